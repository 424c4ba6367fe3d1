//! Settings of a run. Every one is a flag; checks name the flag, the value, what is allowed and what to do.

use std::path::PathBuf;
use std::str::FromStr;

use candle_cp::LayoutKind;
use candle_gemma4::Part;

use crate::error::{Error, Result};
use crate::hub::{HubOptions, PullEvent, resolve_model};
use crate::optimizer::AdamWConfig;

/// Most ranks that one process may start as threads.
const MAX_RANKS: usize = 64;
/// Longest row.
const MAX_SEQ_LEN: usize = 1 << 24;

/// Settings of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// `--cp`: ranks that share every sequence.
    pub cp: usize,
    /// `--layout`: which tokens each rank owns.
    pub layout: LayoutKind,
    /// `--steps`: optimizer steps.
    pub steps: usize,
    /// `--seed`: of fresh weights and of the order of the data.
    pub seed: u64,
    /// `--model`: a checkpoint folder; `None` trains the small built-in model from nothing. A name on the Hub becomes a
    /// folder by [`Config::resolve_model`].
    pub model: Option<PathBuf>,
    /// `--data`: a JSONL file; `None` trains on the built-in digits.
    pub data: Option<PathBuf>,
    /// `--out`: folder for metrics, loss curve and the trained checkpoint.
    pub out: PathBuf,
    /// `--lr`: highest learning rate; `None` takes [`Config::DEFAULT_RATE_FRESH`] for fresh weights and
    /// [`Config::DEFAULT_RATE_CHECKPOINT`] for a checkpoint.
    pub lr: Option<f64>,
    /// `--batch-rows`: rows of a batch.
    pub batch_rows: usize,
    /// `--seq-len`: tokens of a row.
    pub seq_len: usize,
    /// `--recompute`: decoder layers run again in backward instead of keeping what happened inside of them. The same
    /// gradients in less memory, for the time of one more forward pass.
    pub recompute: bool,
    /// `--freeze`: parts of a checkpoint that are left as they are; their gradients are never computed.
    pub freeze: Vec<Part>,
    /// `--truncate`: samples of `--data` that are longer than a row are cut, not left out.
    pub truncate: bool,
    /// Betas, eps and weight decay.
    pub optimizer: AdamWConfig,
    /// Largest norm of the gradients; longer ones are scaled down.
    pub max_grad_norm: f64,
    /// Lowest learning rate at the end, as a share of the highest.
    pub rate_floor: f64,
    /// How often each held-out digit is read at the end, in other conversations each time; 0 leaves the test out.
    pub held_out_rounds: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            cp: 2,
            layout: LayoutKind::HeadTail,
            steps: 1500,
            seed: 0,
            model: None,
            data: None,
            out: PathBuf::from("runs/finetune_gemma4"),
            lr: None,
            batch_rows: 2,
            seq_len: 256,
            recompute: false,
            freeze: Vec::new(),
            truncate: false,
            optimizer: AdamWConfig::default(),
            max_grad_norm: 1.0,
            rate_floor: 0.05,
            held_out_rounds: 2,
        }
    }
}

impl Config {
    /// The flags that [`Config::set`] knows.
    pub const FLAGS: [&str; 13] = [
        "--cp",
        "--layout",
        "--steps",
        "--seed",
        "--model",
        "--data",
        "--out",
        "--lr",
        "--batch-rows",
        "--seq-len",
        "--recompute",
        "--freeze",
        "--truncate",
    ];
    /// Learning rate of fresh weights, unless `--lr` is given.
    pub const DEFAULT_RATE_FRESH: f64 = 2e-3;
    /// Learning rate of a checkpoint, unless `--lr` is given.
    pub const DEFAULT_RATE_CHECKPOINT: f64 = 1e-4;

    /// Sets one flag from its text.
    ///
    /// # Errors
    /// An unknown flag, or a value that is not of the flag's kind.
    pub fn set(&mut self, flag: &str, value: &str) -> Result<()> {
        match flag {
            "--cp" => self.cp = parse("--cp", value, &count(MAX_RANKS))?,
            "--layout" => self.layout = parse("--layout", value, &layouts())?,
            "--steps" => self.steps = parse("--steps", value, "a whole number of at least 1")?,
            "--seed" => self.seed = parse("--seed", value, "a whole number from 0 to 18446744073709551615")?,
            "--model" => self.model = Some(PathBuf::from(value)),
            "--data" => self.data = Some(PathBuf::from(value)),
            "--out" => self.out = PathBuf::from(value),
            "--lr" => self.lr = Some(parse("--lr", value, RATES)?),
            "--batch-rows" => self.batch_rows = parse("--batch-rows", value, "a whole number of at least 1")?,
            "--seq-len" => self.seq_len = parse("--seq-len", value, &count(MAX_SEQ_LEN))?,
            "--recompute" => self.recompute = parse("--recompute", value, "true or false")?,
            "--freeze" => self.freeze = freeze(value)?,
            "--truncate" => self.truncate = parse("--truncate", value, "true or false")?,
            other => {
                return Err(Error::UnknownFlag { flag: other.to_string(), known: Self::FLAGS.join(", ") });
            }
        }
        Ok(())
    }

    /// The highest learning rate.
    pub fn rate(&self) -> f64 {
        let default = if self.model.is_some() { Self::DEFAULT_RATE_CHECKPOINT } else { Self::DEFAULT_RATE_FRESH };
        self.lr.unwrap_or(default)
    }

    /// The frozen parts, as `--freeze` takes them.
    pub(crate) fn frozen_names(&self) -> String {
        self.freeze.iter().map(Part::to_string).collect::<Vec<_>>().join(",")
    }

    /// Turns a name on the Hub into its folder, as [`resolve_model`] does; pulls it if need be. The other settings are
    /// checked first: a wrong one should not be told after a long pull.
    ///
    /// # Errors
    /// A setting that cannot be used; a model that cannot be had.
    pub fn resolve_model(&mut self, options: &HubOptions, progress: &mut dyn FnMut(&PullEvent)) -> Result<()> {
        self.validate_all_but_model()?;
        if let Some(model) = self.model.as_deref().filter(|model| !model.is_dir()) {
            self.model = Some(resolve_model(&model.to_string_lossy(), options, progress)?);
        }
        Ok(())
    }

    /// Checks values and their combination; nothing is read or written yet but the paths are looked at.
    ///
    /// # Errors
    /// The first flag that cannot be used.
    pub fn validate(&self) -> Result<()> {
        self.validate_all_but_model()?;
        match &self.model {
            Some(model) if !model.join(candle_gemma4::CONFIG_FILE).is_file() => {
                let allowed = "a folder with config.json, tokenizer.json and model.safetensors (or its index)";
                let fix = "download the checkpoint first and give the folder, not a file in it";
                Err(Error::flag("--model", model.display(), allowed, fix))
            }
            _ => Ok(()),
        }
    }

    fn validate_all_but_model(&self) -> Result<()> {
        let at_least_one = "a whole number of at least 1";
        in_range("--cp", self.cp, MAX_RANKS, "ranks are threads of this process; 2 is a good start")?;
        in_range("--seq-len", self.seq_len, MAX_SEQ_LEN, "a row has to hold the longest document")?;
        if self.steps == 0 {
            return Err(Error::flag("--steps", 0, at_least_one, "20 steps show whether a set-up works"));
        }
        if self.batch_rows == 0 {
            return Err(Error::flag("--batch-rows", 0, at_least_one, "2 rows are a good start"));
        }
        if let Some(rate) = self.lr.filter(|rate| !(*rate > 0.0 && *rate < 1.0)) {
            let fix = format!("try {:e}", Self { lr: None, ..self.clone() }.rate());
            return Err(Error::flag("--lr", rate, RATES, fix));
        }
        if !self.freeze.is_empty() && self.model.is_none() {
            let fix = "give the checkpoint folder with --model, or leave --freeze out";
            let allowed = "parts of a checkpoint, beside --model DIR: fresh weights have to be trained";
            return Err(Error::flag("--freeze", self.frozen_names(), allowed, fix));
        }
        if self.truncate && self.data.is_none() {
            let allowed = "beside --data FILE.jsonl: conversations about digits are never cut";
            return Err(Error::flag("--truncate", true, allowed, "give the file with --data, or leave --truncate out"));
        }
        if let Some(data) = &self.data {
            if self.model.is_none() {
                let allowed = "a file beside --model DIR, whose tokenizer reads the text";
                let fix = "give the checkpoint folder with --model, or leave --data out to train on the digits";
                return Err(Error::flag("--data", data.display(), allowed, fix));
            }
            if !data.is_file() {
                let fix = "check the path; see the documentation for the format of its lines";
                return Err(Error::flag("--data", data.display(), "an existing JSONL file", fix));
            }
        }
        if self.out.exists() && !self.out.is_dir() {
            let allowed = "a folder, which is made if need be";
            return Err(Error::flag("--out", self.out.display(), allowed, "choose another name"));
        }
        Ok(())
    }
}

/// Learning rates, for messages.
const RATES: &str = "a number above 0 and below 1, such as 1e-3";

/// Parts separated by commas, each once.
fn freeze(value: &str) -> Result<Vec<Part>> {
    let part = |name: &str| Part::ALL.into_iter().find(|part| part.to_string() == name.trim());
    let parts: Option<std::collections::BTreeSet<Part>> = value.split(',').map(part).collect();
    let names = Part::ALL.map(|part| part.to_string()).join(", ");
    let wrong = || {
        let allowed = format!("one or more of {names}, separated by commas");
        Error::flag("--freeze", value, allowed, "write for example --freeze vision,audio")
    };
    Ok(parts.ok_or_else(wrong)?.into_iter().collect())
}

fn count(most: usize) -> String {
    format!("a whole number from 1 to {most}")
}

fn layouts() -> String {
    LayoutKind::ALL.map(|kind| kind.to_string()).join(", ")
}

fn parse<T: FromStr>(flag: &'static str, value: &str, allowed: &str) -> Result<T> {
    let example = match flag {
        "--cp" => "--cp 2",
        "--layout" => "--layout head-tail",
        "--steps" => "--steps 100",
        "--seed" => "--seed 0",
        "--lr" => "--lr 1e-4",
        "--batch-rows" => "--batch-rows 2",
        "--recompute" => "--recompute true",
        "--truncate" => "--truncate true",
        _ => "--seq-len 256",
    };
    value.trim().parse().map_err(|_| Error::flag(flag, value, allowed, format!("write for example {example}")))
}

fn in_range(flag: &'static str, value: usize, most: usize, fix: &str) -> Result<()> {
    match value {
        value if (1..=most).contains(&value) => Ok(()),
        value => Err(Error::flag(flag, value, count(most), fix)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flag_is_set() -> Result<()> {
        let mut config = Config::default();
        let values =
            ["3", "contiguous", "7", "9", "m", "d.jsonl", "o", "2e-4", "5", "96", "true", "audio,vision", "true"];
        for (flag, value) in Config::FLAGS.iter().zip(values) {
            config.set(flag, value)?;
        }
        let expected = Config {
            cp: 3,
            layout: LayoutKind::Contiguous,
            steps: 7,
            seed: 9,
            model: Some("m".into()),
            data: Some("d.jsonl".into()),
            out: "o".into(),
            lr: Some(2e-4),
            batch_rows: 5,
            seq_len: 96,
            recompute: true,
            freeze: vec![Part::Vision, Part::Audio],
            truncate: true,
            ..Config::default()
        };
        assert_eq!(config, expected);
        Ok(())
    }

    #[test]
    fn bad_values_name_flag_value_allowed_and_fix() {
        for (flag, value, parts) in [
            ("--cp", "two", ["\"two\"", "from 1 to 64", "--cp 2"]),
            ("--cp", "-1", ["\"-1\"", "from 1 to 64", "--cp 2"]),
            ("--cp", "0", ["\"0\"", "from 1 to 64", "2 is a good start"]),
            ("--cp", "65", ["\"65\"", "from 1 to 64", "2 is a good start"]),
            ("--layout", "zigzag", ["\"zigzag\"", "contiguous, head-tail, balanced", "--layout head-tail"]),
            ("--steps", "0", ["\"0\"", "at least 1", "20 steps"]),
            ("--steps", "1.5", ["\"1.5\"", "at least 1", "--steps 100"]),
            ("--seed", "-3", ["\"-3\"", "18446744073709551615", "--seed 0"]),
            ("--lr", "fast", ["\"fast\"", "above 0 and below 1", "--lr 1e-4"]),
            ("--lr", "0", ["\"0\"", "above 0 and below 1", "try 2e-3"]),
            ("--lr", "NaN", ["\"NaN\"", "above 0 and below 1", "try 2e-3"]),
            ("--batch-rows", "0", ["\"0\"", "at least 1", "2 rows"]),
            ("--seq-len", "0", ["\"0\"", "from 1 to 16777216", "longest document"]),
            ("--recompute", "maybe", ["\"maybe\"", "true or false", "--recompute true"]),
            ("--freeze", "visoin", ["\"visoin\"", "one or more of text, vision, audio", "--freeze vision,audio"]),
            ("--freeze", "", ["\"\"", "one or more of text, vision, audio", "--freeze vision,audio"]),
            ("--freeze", "audio", ["\"audio\"", "beside --model DIR", "leave --freeze out"]),
            ("--truncate", "yes", ["\"yes\"", "true or false", "--truncate true"]),
            ("--truncate", "true", ["\"true\"", "beside --data", "leave --truncate out"]),
            ("--data", "x.jsonl", ["\"x.jsonl\"", "beside --model DIR", "leave --data out"]),
            ("--model", "no-such-folder", ["\"no-such-folder\"", "config.json", "download the checkpoint"]),
            ("--out", "Cargo.toml", ["\"Cargo.toml\"", "a folder", "another name"]),
        ] {
            let mut config = Config::default();
            let error = config.set(flag, value).and_then(|()| config.validate()).unwrap_err();
            assert!(error.is_usage());
            let text = error.to_string();
            assert!(text.starts_with(&format!("{flag} {}", parts[0])), "{text}");
            assert!(parts.iter().all(|part| text.contains(part)), "{flag} {value}: {text}");
        }
        let error = Config::default().set("--stpes", "3").unwrap_err().to_string();
        assert!(error.starts_with("--stpes is no flag") && error.contains("--steps"), "{error}");
    }

    #[test]
    fn data_needs_a_file_that_exists() {
        let model = tempfile::tempdir().unwrap();
        std::fs::write(model.path().join("config.json"), "{}").unwrap();
        let config =
            Config { model: Some(model.path().to_path_buf()), data: Some("absent.jsonl".into()), ..Config::default() };
        let error = config.validate().unwrap_err().to_string();
        assert!(error.contains("--data \"absent.jsonl\": allowed is an existing JSONL file"), "{error}");
        assert_eq!(Config { data: None, ..config.clone() }.validate().ok(), Some(()));
        assert_eq!((config.rate(), Config::default().rate()), (1e-4, 2e-3));
    }
}
