//! Every setting of a run: its names, what is allowed, and what it is for.

use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

use candle_core::DType;
use candle_cp::LayoutKind;
use candle_cp_layers::Part;
use toml::Value;

use super::setting::Setting;
use super::{Config, MAX_DEADLINE, MAX_RANKS, MAX_REPLICAS, MAX_SEQ_LEN};
use crate::family::Family;
use crate::schedule::ScheduleKind;
use crate::transport::Transport;

type Parsed<T> = std::result::Result<T, String>;

impl Config {
    /// All settings, by section.
    pub const SETTINGS: &'static [Setting] = &[
        Setting {
            key: "model.path",
            flag: Some("--model"),
            value: "DIR|ORG/NAME",
            help: "Any Gemma 4, Qwen 3.5 or Qwen 3.6: a folder in Hugging Face layout (config.json, tokenizer.json, chat template, weights), or \
                   org/name or org/name@revision on the Hugging Face Hub, pulled once into the cache that Python shares \
                   (HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE) [default: a small model from nothing]",
            example: "google/gemma-4-E2B-it",
            set: |config, text| path(text).map(|path| config.model = Some(path)),
            get: |config| config.model.as_ref().map(|path| string(path.display())),
        },
        Setting {
            key: "model.family",
            flag: None,
            value: "FAMILY",
            help: "Family of the small model from nothing: gemma4 or qwen3_5; a checkpoint says its own [default: that of the \
                   program]",
            example: "qwen3_5",
            set: |config, text| one_of(text, &Family::ALL).map(|family| config.family = family),
            get: |config| Some(string(config.family)),
        },
        Setting {
            key: "model.dtype",
            flag: Some("--dtype"),
            value: "TYPE",
            help: "Type of weights and activations: f32, or bf16 with f32 master weights and optimizer state [default: f32]",
            example: "bf16",
            set: |config, text| dtype(text).map(|dtype| config.dtype = dtype),
            get: |config| Some(string(config.dtype.as_str())),
        },
        Setting {
            key: "model.freeze",
            flag: Some("--freeze"),
            value: "PART,PATTERN",
            help: "What of the checkpoint stays as it is: text, vision, audio, embeddings, or patterns of tensor names such \
                   as '*.layers.0.*' [default: nothing]",
            example: "vision,audio",
            set: |config, text| list(text).map(|names| config.freeze = names),
            get: |config| strings(&config.freeze),
        },
        Setting {
            key: "model.recompute",
            flag: Some("--recompute"),
            value: "",
            help: "Run decoder layers again in backward instead of keeping what happened inside: the same gradients, less \
                   memory, more time",
            example: "true",
            set: |config, text| switch(text).map(|yes| config.recompute = yes),
            get: |config| Some(Value::Boolean(config.recompute)),
        },
        Setting {
            key: "lora.rank",
            flag: Some("--lora-rank"),
            value: "N",
            help: "Train adapters of this rank instead of the checkpoint's weights [default: no adapters]",
            example: "16",
            set: |config, text| whole(text, 1, 65_536).map(|rank| config.lora.rank = Some(rank)),
            get: |config| config.lora.rank.map(integer),
        },
        Setting {
            key: "lora.alpha",
            flag: Some("--lora-alpha"),
            value: "X",
            help: "Adapters count alpha / rank times [default: twice the rank]",
            example: "32",
            set: |config, text| {
                real(text, |x| x > 0.0, "a number above 0").map(|alpha| config.lora.alpha = Some(alpha))
            },
            get: |config| config.lora.alpha.map(Value::Float),
        },
        Setting {
            key: "lora.dropout",
            flag: Some("--lora-dropout"),
            value: "P",
            help: "Share of an adapter's inputs that a step leaves out [default: 0]",
            example: "0.05",
            set: |config, text| {
                let allowed = "a number from 0 to below 1";
                real(text, |x| (0.0..1.0).contains(&x), allowed).map(|dropout| config.lora.dropout = dropout)
            },
            get: |config| config.lora.rank.map(|_| Value::Float(config.lora.dropout)),
        },
        Setting {
            key: "lora.targets",
            flag: Some("--lora-targets"),
            value: "NAME,NAME",
            help: "Linear modules that get an adapter, by the end of their names as PEFT matches them [default: all-linear]",
            example: "q_proj,v_proj",
            set: |config, text| list(text).map(|targets| config.lora.targets = targets),
            get: |config| strings(&config.lora.targets),
        },
        Setting {
            key: "lora.parts",
            flag: Some("--lora-parts"),
            value: "PART,PART",
            help: "Parts of the model in which adapters are looked for: text, vision, audio [default: text]",
            example: "text,vision",
            set: |config, text| parts(text).map(|parts| config.lora.parts = parts),
            get: |config| strings(&config.lora.parts.iter().map(Part::to_string).collect::<Vec<_>>()),
        },
        Setting {
            key: "lora.merge",
            flag: Some("--lora-merge"),
            value: "",
            help: "Write the checkpoint with the adapters added to its weights as well",
            example: "true",
            set: |config, text| switch(text).map(|yes| config.lora.merge = yes),
            get: |config| config.lora.rank.map(|_| Value::Boolean(config.lora.merge)),
        },
        Setting {
            key: "data.train",
            flag: Some("--data"),
            value: "FILE|hub:ORG/NAME",
            help: "Lines {\"messages\"}, {\"prompt\", \"completion\", \"images\"} or {\"text\"} (JSONL, or Parquet with the \
                   feature `parquet`), or a data set on the Hub, hub:ORG/NAME with @REVISION and :SPLIT where wanted; needs --model [default: \
                   handwritten digits]",
            example: "chats.jsonl",
            set: |config, text| path(text).map(|path| config.data = Some(path)),
            get: |config| config.data.as_ref().map(|path| string(path.display())),
        },
        Setting {
            key: "data.validation",
            flag: Some("--validation"),
            value: "FILE|hub:ORG/NAME",
            help: "Samples that are never trained on, for val_loss",
            example: "held-out.jsonl",
            set: |config, text| path(text).map(|path| config.validation = Some(path)),
            get: |config| config.validation.as_ref().map(|path| string(path.display())),
        },
        Setting {
            key: "data.validation_share",
            flag: Some("--validation-share"),
            value: "SHARE",
            help: "Share of the samples of --data that is held out for val_loss instead",
            example: "0.05",
            set: |config, text| {
                let share = real(text, |x| x > 0.0 && x < 1.0, "a number above 0 and below 1");
                share.map(|share| config.validation_share = Some(share))
            },
            get: |config| config.validation_share.map(Value::Float),
        },
        Setting {
            key: "data.seq_len",
            flag: Some("--seq-len"),
            value: "N",
            help: "Tokens of a row; samples are packed into rows, and longer ones are left out [default: 256]",
            example: "4096",
            set: |config, text| whole(text, 1, MAX_SEQ_LEN).map(|len| config.seq_len = len),
            get: |config| Some(integer(config.seq_len)),
        },
        Setting {
            key: "data.truncate",
            flag: Some("--truncate"),
            value: "",
            help: "Cut samples that are longer than a row instead of leaving them out",
            example: "true",
            set: |config, text| switch(text).map(|yes| config.truncate = yes),
            get: |config| Some(Value::Boolean(config.truncate)),
        },
        Setting {
            key: "train.steps",
            flag: Some("--steps"),
            value: "N",
            help: "Optimizer steps [default: as many as the epochs take; 1500 for the digits]",
            example: "100",
            set: |config, text| whole(text, 1, usize::MAX).map(|steps| config.steps = Some(steps)),
            get: |config| config.steps.map(integer),
        },
        Setting {
            key: "train.epochs",
            flag: Some("--epochs"),
            value: "N",
            help: "Passes over the samples of --data, in place of --steps [default: 3]",
            example: "3",
            set: |config, text| whole(text, 1, 1_000_000).map(|epochs| config.epochs = Some(epochs)),
            get: |config| config.epochs.map(integer),
        },
        Setting {
            key: "train.batch_rows",
            flag: Some("--batch-rows"),
            value: "N",
            help: "Rows of a batch [default: 2]",
            example: "2",
            set: |config, text| whole(text, 1, MAX_ROWS).map(|rows| config.batch_rows = rows),
            get: |config| Some(integer(config.batch_rows)),
        },
        Setting {
            key: "train.accumulate",
            flag: Some("--accumulate"),
            value: "N",
            help: "Batches of a step for each replica of the model: their gradients are added, over the learned tokens of all of \
                   them [default: 1]",
            example: "8",
            set: |config, text| whole(text, 1, MAX_ROWS).map(|batches| config.accumulate = batches),
            get: |config| Some(integer(config.accumulate)),
        },
        Setting {
            key: "train.learning_rate",
            flag: Some("--lr"),
            value: "RATE",
            help: "Highest learning rate [default: 2e-3 for fresh weights, 1e-4 for a checkpoint, 2e-4 for adapters]",
            example: "1e-4",
            set: |config, text| {
                let allowed = "a number above 0 and below 1, such as 1e-3";
                real(text, |x| x > 0.0 && x < 1.0, allowed).map(|rate| config.lr = Some(rate))
            },
            get: |config| Some(Value::Float(config.rate())),
        },
        Setting {
            key: "train.schedule",
            flag: Some("--schedule"),
            value: "NAME",
            help: "Learning rate after the warm-up: cosine, linear or constant [default: cosine]",
            example: "cosine",
            set: |config, text| one_of(text, &ScheduleKind::ALL).map(|kind| config.schedule = kind),
            get: |config| Some(string(config.schedule)),
        },
        Setting {
            key: "train.warmup",
            flag: Some("--warmup"),
            value: "N",
            help: "Steps in which the learning rate rises [default: a tenth of the steps, at most 30]",
            example: "10",
            set: |config, text| whole(text, 0, usize::MAX).map(|steps| config.warmup = Some(steps)),
            get: |config| config.warmup.map(integer),
        },
        Setting {
            key: "train.rate_floor",
            flag: None,
            value: "SHARE",
            help: "Learning rate of the last step, as a share of the highest; not for constant [default: 0.05]",
            example: "0.1",
            set: |config, text| share(text).map(|floor| config.rate_floor = floor),
            get: |config| Some(Value::Float(config.rate_floor)),
        },
        Setting {
            key: "train.max_grad_norm",
            flag: None,
            value: "X",
            help: "Gradients whose norm is larger are scaled down to it [default: 1]",
            example: "1.0",
            set: |config, text| real(text, |x| x > 0.0, "a number above 0").map(|norm| config.max_grad_norm = norm),
            get: |config| Some(Value::Float(config.max_grad_norm)),
        },
        Setting {
            key: "train.seed",
            flag: Some("--seed"),
            value: "N",
            help: "Seed of fresh weights, of adapters, dropout and the order of the data [default: 0]",
            example: "0",
            // A settings file has no larger whole number.
            set: |config, text| whole(text, 0, i64::MAX as usize).map(|seed| config.seed = seed as u64),
            get: |config| Some(Value::Integer(config.seed as i64)),
        },
        Setting {
            key: "train.validate_every",
            flag: Some("--validate-every"),
            value: "N",
            help: "Steps between two val_loss [default: a tenth of the steps]",
            example: "50",
            set: |config, text| whole(text, 1, usize::MAX).map(|steps| config.validate_every = Some(steps)),
            get: |config| config.validate_every.map(integer),
        },
        Setting {
            key: "optimizer.beta1",
            flag: None,
            value: "X",
            help: "AdamW: decay of the mean of the gradients [default: 0.9]",
            example: "0.9",
            set: |config, text| decay(text).map(|beta| config.optimizer.beta1 = beta),
            get: |config| Some(Value::Float(config.optimizer.beta1)),
        },
        Setting {
            key: "optimizer.beta2",
            flag: None,
            value: "X",
            help: "AdamW: decay of the mean of their squares [default: 0.95]",
            example: "0.95",
            set: |config, text| decay(text).map(|beta| config.optimizer.beta2 = beta),
            get: |config| Some(Value::Float(config.optimizer.beta2)),
        },
        Setting {
            key: "optimizer.eps",
            flag: None,
            value: "X",
            help: "AdamW: added to the root of the second mean [default: 1e-8]",
            example: "1e-8",
            set: |config, text| real(text, |x| x > 0.0, "a number above 0").map(|eps| config.optimizer.eps = eps),
            get: |config| Some(Value::Float(config.optimizer.eps)),
        },
        Setting {
            key: "optimizer.weight_decay",
            flag: None,
            value: "X",
            help: "AdamW: share of a weight that a step at learning rate 1 takes away, of weights with at least two \
                   dimensions [default: 0.05]",
            example: "0.05",
            set: |config, text| share(text).map(|decay| config.optimizer.weight_decay = decay),
            get: |config| Some(Value::Float(config.optimizer.weight_decay)),
        },
        Setting {
            key: "parallel.device",
            flag: Some("--device"),
            value: "DEVICE",
            help: "Where the model runs: cpu, cuda or cuda:N; in several processes, a GPU for each, cuda [default: cpu]",
            example: "cuda",
            set: |config, text| text.parse().map(|device| config.device = device),
            get: |config| Some(string(config.device)),
        },
        Setting {
            key: "parallel.cp",
            flag: Some("--cp"),
            value: "N",
            help: "Ranks that share every sequence: threads, or processes that torchrun, mpirun or srun started [default: 2]",
            example: "2",
            set: |config, text| whole(text, 1, MAX_RANKS).map(|ranks| config.cp = ranks),
            get: |config| Some(integer(config.cp)),
        },
        Setting {
            key: "parallel.dp",
            flag: Some("--dp"),
            value: "N",
            help: "Replicas of the model that share the batches of a step, each of --cp ranks [default: as many as the \
                   processes are for, 1 with threads]",
            example: "2",
            set: |config, text| whole(text, 1, MAX_REPLICAS).map(|replicas| config.dp = Some(replicas)),
            get: |config| config.dp.map(integer),
        },
        Setting {
            key: "parallel.zero",
            flag: Some("--zero"),
            value: "STAGE",
            help: "1 spreads optimizer state and f32 master weights over all ranks (ZeRO): the same numbers, less memory; 0 \
                   keeps all of it on every rank [default: 0]",
            example: "1",
            set: |config, text| whole(text, 0, 1).map(|stage| config.zero = stage),
            get: |config| Some(integer(config.zero)),
        },
        Setting {
            key: "parallel.deadline",
            flag: Some("--deadline"),
            value: "SECONDS",
            help: "Longest time that a rank waits for another one; rank 0 may write a checkpoint meanwhile [default: 3600]",
            example: "600",
            set: |config, text| {
                whole(text, 1, MAX_DEADLINE).map(|seconds| config.deadline = Duration::from_secs(seconds as u64))
            },
            get: |config| Some(integer(config.deadline.as_secs() as usize)),
        },
        Setting {
            key: "parallel.comm",
            flag: Some("--comm"),
            value: "NAME",
            help: "What ranks are: threads of this process, or processes over mpi (CPUs) or nccl (GPUs); auto: threads in one \
                   process, else by --device. With threads the launcher's variables are not read [default: auto]",
            example: "threads",
            set: |config, text| one_of(text, &Transport::ALL).map(|comm| config.comm = comm),
            get: |config| Some(string(config.comm)),
        },
        Setting {
            key: "parallel.layout",
            flag: Some("--layout"),
            value: "LAYOUT",
            help: "Tokens each rank owns: contiguous, head-tail or balanced [default: head-tail]",
            example: "head-tail",
            set: |config, text| one_of(text, &LayoutKind::ALL).map(|layout| config.layout = layout),
            get: |config| Some(string(config.layout)),
        },
        Setting {
            key: "out.dir",
            flag: Some("--out"),
            value: "DIR",
            help: "Folder for everything that a run leaves [default: runs/ and the name of the program]",
            example: "runs/mine",
            set: |config, text| path(text).map(|path| config.out = path),
            get: |config| Some(string(config.out.display())),
        },
        Setting {
            key: "out.save_every",
            flag: Some("--save-every"),
            value: "N",
            help: "Steps between two checkpoints that --resume can go on from [default: only the finished model is saved]",
            example: "100",
            set: |config, text| whole(text, 1, usize::MAX).map(|steps| config.save_every = Some(steps)),
            get: |config| config.save_every.map(integer),
        },
        Setting {
            key: "out.keep",
            flag: Some("--keep"),
            value: "N",
            help: "Checkpoints that are kept: the last N, and the one with the lowest val_loss [default: 2]",
            example: "2",
            set: |config, text| whole(text, 1, 1_000_000).map(|keep| config.keep = keep),
            get: |config| Some(integer(config.keep)),
        },
        Setting {
            key: "out.tensorboard",
            flag: Some("--tensorboard"),
            value: "",
            help: "Write event files for TensorBoard as well",
            example: "true",
            set: |config, text| switch(text).map(|yes| config.tensorboard = yes),
            get: |config| Some(Value::Boolean(config.tensorboard)),
        },
        Setting {
            key: "out.trace",
            flag: Some("--trace"),
            value: "STEP",
            help: "Write a timeline of this step, trace-step-STEP.json: what every rank computed, sent and waited for, for \
                   ui.perfetto.dev or chrome://tracing [default: none]",
            example: "3",
            set: |config, text| whole(text, 1, usize::MAX).map(|step| config.trace = Some(step)),
            get: |config| config.trace.map(integer),
        },
    ];
}

/// Most rows of a batch and batches of a step.
const MAX_ROWS: usize = 1 << 20;

fn whole(text: &str, least: usize, most: usize) -> Parsed<usize> {
    let number = text.trim().parse().ok().filter(|number| (least..=most).contains(number));
    // A settings file has no larger whole number.
    let number = number.filter(|&number| i64::try_from(number).is_ok());
    number.ok_or_else(|| match most {
        usize::MAX => format!("a whole number of at least {least}"),
        most => format!("a whole number from {least} to {most}"),
    })
}

fn real(text: &str, fits: fn(f64) -> bool, allowed: &str) -> Parsed<f64> {
    let number = text.trim().parse().ok().filter(|&number: &f64| number.is_finite() && fits(number));
    number.ok_or_else(|| allowed.to_string())
}

fn share(text: &str) -> Parsed<f64> {
    real(text, |x| (0.0..=1.0).contains(&x), "a number from 0 to 1")
}

fn decay(text: &str) -> Parsed<f64> {
    real(text, |x| (0.0..1.0).contains(&x), "a number from 0 to below 1")
}

fn switch(text: &str) -> Parsed<bool> {
    text.trim().parse().map_err(|_| "true or false".to_string())
}

fn path(text: &str) -> Parsed<std::path::PathBuf> {
    match text.is_empty() {
        true => Err("a name".to_string()),
        false => Ok(text.into()),
    }
}

fn dtype(text: &str) -> Parsed<DType> {
    let found = DType::from_str(text.trim()).ok().filter(|dtype| Config::DTYPES.contains(dtype));
    found.ok_or_else(|| Config::DTYPES.map(|dtype| dtype.as_str()).join(" or "))
}

fn one_of<T: Display + Copy>(text: &str, all: &[T]) -> Parsed<T> {
    let found = all.iter().find(|value| value.to_string() == text.trim());
    found.copied().ok_or_else(|| all.iter().map(T::to_string).collect::<Vec<_>>().join(", "))
}

/// Names separated by commas.
fn list(text: &str) -> Parsed<Vec<String>> {
    let names: Vec<String> = text.split(',').map(|name| name.trim().to_string()).collect();
    match names.iter().any(String::is_empty) {
        true => Err("one or more names, separated by commas".to_string()),
        false => Ok(names),
    }
}

fn parts(text: &str) -> Parsed<Vec<Part>> {
    let parts: Option<std::collections::BTreeSet<Part>> =
        text.split(',').map(|name| one_of(name, &Part::ALL).ok()).collect();
    let names = Part::ALL.map(|part| part.to_string()).join(", ");
    Ok(parts.ok_or_else(|| format!("one or more of {names}, separated by commas"))?.into_iter().collect())
}

fn integer(number: usize) -> Value {
    Value::Integer(i64::try_from(number).unwrap_or(i64::MAX))
}

fn string(value: impl Display) -> Value {
    Value::String(value.to_string())
}

/// `None` for an empty list, which is what not giving it means.
fn strings(values: &[String]) -> Option<Value> {
    (!values.is_empty()).then(|| Value::Array(values.iter().map(string).collect()))
}
