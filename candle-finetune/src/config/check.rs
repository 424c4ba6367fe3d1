//! Which settings go together.

use super::Config;
use super::setting::text;
use crate::error::{Error, Result};

impl Config {
    /// Checks values and their combination; nothing is read or written yet but the paths are looked at.
    ///
    /// # Errors
    /// The first setting that cannot be used.
    pub fn validate(&self) -> Result<()> {
        self.validate_all_but_files()?;
        if let Some(model) = self.model_folder().filter(|model| !model.join(candle_cp_layers::CONFIG_FILE).is_file()) {
            let allowed = "a folder with config.json, tokenizer.json and model.safetensors (or its index)";
            let fix = "download the checkpoint first and give the folder, not a file in it";
            return Err(Error::flag("--model", model.display(), allowed, fix));
        }
        for (flag, files) in [("--data", self.train_files()), ("--validation", self.validation_files())] {
            if let Some(file) = files.iter().find(|file| !file.is_file()) {
                let fix = "check the path; see the documentation for the format of its lines";
                return Err(Error::flag(flag, file.display(), "an existing file of JSON lines or Parquet", fix));
            }
        }
        Ok(())
    }

    pub(super) fn validate_all_but_files(&self) -> Result<()> {
        self.check_values()?;
        self.check_model()?;
        self.check_lora()?;
        self.check_data()?;
        self.check_length()?;
        self.device.check_build()?;
        if self.out.exists() && !self.out.is_dir() {
            let allowed = "a folder, which is made if need be";
            return Err(Error::flag("--out", self.out.display(), allowed, "choose another name"));
        }
        Ok(())
    }

    /// Each value by itself: a program may have set any.
    fn check_values(&self) -> Result<()> {
        let mut scratch = self.clone();
        for setting in Self::SETTINGS {
            if let Some(value) = (setting.get)(self) {
                setting.set_flag(&mut scratch, &text(&value).expect("settings are texts, numbers and lists"))?;
            }
        }
        Ok(())
    }

    fn check_model(&self) -> Result<()> {
        if !self.freeze.is_empty() && self.model.is_none() {
            let fix = "give the checkpoint with --model, or leave --freeze out";
            let allowed = "parts of a checkpoint, beside --model DIR: fresh weights have to be trained";
            return Err(Error::flag("--freeze", self.freeze.join(","), allowed, fix));
        }
        Ok(())
    }

    fn check_lora(&self) -> Result<()> {
        let lora = &self.lora;
        let Some(rank) = lora.rank else {
            let given = [
                ("--lora-alpha", lora.alpha.map(|alpha| alpha.to_string())),
                ("--lora-dropout", (lora.dropout > 0.0).then(|| lora.dropout.to_string())),
                ("--lora-targets", (!lora.targets.is_empty()).then(|| lora.targets.join(","))),
                ("--lora-parts", (!lora.parts.is_empty()).then(|| lora.parts[0].to_string())),
                ("--lora-merge", lora.merge.then(|| lora.merge.to_string())),
            ];
            return match given.into_iter().find_map(|(flag, value)| Some((flag, value?))) {
                Some((flag, value)) => Err(Error::flag(
                    flag,
                    value,
                    "beside --lora-rank N",
                    "give the rank of the adapters, such as --lora-rank 16",
                )),
                None => Ok(()),
            };
        };
        if self.model.is_none() {
            let allowed = "beside --model DIR: adapters change a trained model a little";
            let fix = "give the checkpoint with --model, or leave --lora-rank out";
            return Err(Error::flag("--lora-rank", rank, allowed, fix));
        }
        if !self.freeze.is_empty() {
            let allowed = "without --lora-rank: beside adapters all of the checkpoint stays as it is";
            let fix = "leave --freeze out, and choose where adapters go with --lora-parts and --lora-targets";
            return Err(Error::flag("--freeze", self.freeze.join(","), allowed, fix));
        }
        Ok(())
    }

    fn check_data(&self) -> Result<()> {
        let Some(data) = &self.data else { return self.check_digits() };
        if self.model.is_none() {
            let allowed = "a file beside --model DIR, whose tokenizer reads the text";
            let fix = "give the checkpoint with --model, or leave --data out to train on the digits";
            return Err(Error::flag("--data", data.display(), allowed, fix));
        }
        if let (Some(_), Some(share)) = (&self.validation, self.validation_share) {
            let allowed = "without --validation FILE: held-out samples come from one place";
            return Err(Error::flag("--validation-share", share, allowed, "leave one of the two out"));
        }
        let validates = self.validation.is_some() || self.validation_share.is_some();
        match self.validate_every {
            Some(steps) if !validates => {
                let allowed = "beside --validation FILE or --validation-share SHARE";
                Err(Error::flag("--validate-every", steps, allowed, "say which samples are held out"))
            }
            _ => Ok(()),
        }
    }

    /// What only a data file can have.
    fn check_digits(&self) -> Result<()> {
        let given = [
            ("--truncate", self.truncate.then(|| "true".to_string())),
            ("--validation", self.validation.as_ref().map(|path| path.display().to_string())),
            ("--validation-share", self.validation_share.map(|share| share.to_string())),
            ("--validate-every", self.validate_every.map(|steps| steps.to_string())),
            ("--epochs", self.epochs.map(|epochs| epochs.to_string())),
        ];
        match given.into_iter().find_map(|(flag, value)| Some((flag, value?))) {
            Some((flag, value)) => {
                let allowed =
                    "beside --data FILE: conversations about digits are made without end, and none is too long";
                Err(Error::flag(flag, value, allowed, format!("give the file with --data, or leave {flag} out")))
            }
            None => Ok(()),
        }
    }

    fn check_length(&self) -> Result<()> {
        if let (Some(steps), Some(epochs)) = (self.steps, self.epochs) {
            let allowed = format!("without --steps {steps}: the epochs say how many steps there are");
            return Err(Error::flag("--epochs", epochs, allowed, "leave one of the two out"));
        }
        self.steps.map_or(Ok(()), |steps| self.check_steps(steps))
    }

    /// Against the steps of the run, which the data tells where epochs are given.
    pub(crate) fn check_steps(&self, steps: usize) -> Result<()> {
        if let Some(step) = self.trace.filter(|&step| step > steps) {
            let allowed = format!("at most the number of steps, {steps}");
            return Err(Error::flag("--trace", step, allowed, "choose a step of the run"));
        }
        match self.warmup.filter(|&warmup| warmup > steps) {
            Some(warmup) => {
                let allowed = format!("at most the number of steps, {steps}");
                Err(Error::flag("--warmup", warmup, allowed, "a tenth of the steps is a good start"))
            }
            None => Ok(()),
        }
    }
}
