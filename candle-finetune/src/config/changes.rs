//! What may be different when a run goes on, and between the processes of a run.

use super::{Config, Setting};
use crate::error::{Error, Result};

/// What the state of a run means: another value would need another state.
const FIXED: [&str; 15] = [
    "model.dtype",
    "model.freeze",
    "lora.rank",
    "lora.alpha",
    "lora.dropout",
    "lora.targets",
    "lora.parts",
    "data.validation_share",
    "data.seq_len",
    "data.truncate",
    "train.batch_rows",
    "train.seed",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.eps",
];

/// What has no part in the numbers that training gives, or only in their rounding.
const FREE: [&str; 14] = [
    "model.recompute",
    "lora.merge",
    "train.validate_every",
    "parallel.device",
    "parallel.cp",
    "parallel.comm",
    "parallel.layout",
    "parallel.zero",
    "parallel.deadline",
    "out.dir",
    "out.save_every",
    "out.keep",
    "out.tensorboard",
    TRACE,
];

/// Which together say how many batches a step has; that number may not change.
const BATCHES: [&str; 2] = ["train.accumulate", "parallel.dp"];

/// What concerns one machine only: where things are on it.
const PLACES: [&str; 3] = ["model.path", "data.train", "data.validation"];
/// What only rank 0 uses, but for one: all ranks record.
const OUT: &str = "out.";
const TRACE: &str = "out.trace";

impl Config {
    /// The settings in which processes that train together have to agree, as lines `key = value`.
    pub(crate) fn of_all_ranks(&self) -> Vec<String> {
        let is_shared = |key: &str| !PLACES.contains(&key) && (key == TRACE || !key.starts_with(OUT));
        let shared = Self::SETTINGS.iter().filter(|setting| is_shared(setting.key));
        let text = |setting: &Setting| (setting.get)(self).map_or("unset".to_string(), |value| value.to_string());
        shared.map(|setting| format!("{} = {}", setting.key, text(setting))).collect()
    }

    /// As many batches in a step as before, whatever the number of replicas that share them.
    fn check_batches(&self, before: &Self) -> Result<()> {
        let batches = before.accumulate * before.replicas();
        if self.accumulate * self.replicas() == batches {
            return Ok(());
        }
        let (accumulate, replicas) = (self.accumulate, self.replicas());
        let allowed = format!("what makes {batches} batches in a step, as the checkpoint was written with");
        let fix = match batches.is_multiple_of(replicas) {
            true => format!("use --accumulate {} beside {replicas} replicas of the model", batches / replicas),
            false => format!("use another number of replicas than {replicas}: a divisor of {batches}"),
        };
        Err(Error::flag("--accumulate", accumulate, allowed, fix))
    }

    /// Compares the settings of a run that goes on with those it had: texts about what counts from now on.
    ///
    /// # Errors
    /// A setting that the state of the run depends on has changed.
    pub fn changes_since(&self, before: &Self) -> Result<Vec<String>> {
        self.check_batches(before)?;
        let mut changes = Vec::new();
        for setting in Self::SETTINGS {
            let text = |config: &Self| (setting.get)(config).map_or("unset".to_string(), |value| value.to_string());
            let (then, now) = (text(before), text(self));
            if then == now || FREE.contains(&setting.key) || BATCHES.contains(&setting.key) {
                continue;
            }
            if FIXED.contains(&setting.key) {
                let allowed = format!("{then}, which the checkpoint was written with");
                let fix = format!("leave {} out to go on, or begin a new run in another --out", setting.name());
                return Err(Error::flag(setting.name(), now, allowed, fix));
            }
            changes.push(format!("{} is {now} from now on; until the checkpoint it was {then}", setting.key));
        }
        Ok(changes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_that_of_a_setting() {
        for key in FIXED.iter().chain(&FREE) {
            assert!(Config::SETTINGS.iter().any(|setting| setting.key == *key), "{key}");
        }
    }

    #[test]
    fn what_the_state_depends_on_cannot_change() {
        let before = Config { model: Some("m".into()), ..Config::default() };
        for (key, value) in [("model.dtype", "bf16"), ("train.seed", "5"), ("lora.rank", "4"), ("data.seq_len", "64")] {
            let mut config = before.clone();
            config.set(key, value).unwrap();
            let error = config.changes_since(&before).unwrap_err();
            let text = error.to_string();
            assert!(error.is_usage() && text.contains("which the checkpoint was written with"), "{text}");
            assert!(text.contains("begin a new run in another --out"), "{text}");
        }
        let mut config = before.clone();
        for (key, value) in [
            ("train.steps", "50"),
            ("train.learning_rate", "0.5"),
            ("parallel.cp", "4"),
            ("out.dir", "x"),
            ("model.path", "n"),
        ] {
            config.set(key, value).unwrap();
        }
        assert_eq!(
            config.changes_since(&before).unwrap(),
            [
                "model.path is \"n\" from now on; until the checkpoint it was \"m\"",
                "train.steps is 50 from now on; until the checkpoint it was unset",
                "train.learning_rate is 0.5 from now on; until the checkpoint it was 0.0001",
            ]
        );
        assert_eq!(before.changes_since(&before).unwrap(), Vec::<String>::new());
    }
}
