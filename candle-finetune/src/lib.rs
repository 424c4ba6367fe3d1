#![doc = include_str!("../README.md")]

pub mod checkpoint;
mod config;
pub mod digit_task;
pub mod digits;
mod error;
mod evaluate;
mod gradients;
mod job;
pub mod jsonl;
mod metrics;
mod optimizer;
mod packing;
mod picture;
pub mod plot;
mod progress;
mod run;
mod sample;
mod schedule;
pub mod small_model;
mod trainer;
mod vocabulary;

pub use config::Config;
pub use error::{Error, LineFault, Result};
pub use evaluate::{Scores, evaluate};
pub use gradients::Gradients;
pub use job::Job;
pub use metrics::MetricsFile;
pub use optimizer::{AdamW, AdamWConfig, Moments};
pub use packing::{Batch, Packer};
pub use picture::Picture;
pub use progress::Progress;
pub use run::{CHECKPOINT_FOLDER, LOSS_CURVE_FILE, METRICS_FILE, Observer, Summary, Trained, run, train};
pub use sample::{Part, Sample, Source, Token};
pub use schedule::Schedule;
pub use trainer::{BatchGradients, StepReport, Trainer};
pub use vocabulary::{TOKENIZER_FILE, Vocabulary};
