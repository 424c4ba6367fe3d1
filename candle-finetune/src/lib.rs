#![doc = include_str!("../README.md")]

pub mod checkpoint;
mod config;
pub mod digit_task;
mod digit_words;
pub mod digits;
mod encoder;
mod error;
mod evaluate;
mod gradients;
mod images;
mod job;
pub mod jsonl;
mod metrics;
mod optimizer;
mod packing;
pub mod plot;
mod progress;
mod run;
mod sample;
mod schedule;
pub mod small_model;
mod trainer;

pub use config::Config;
pub use encoder::Encoder;
pub use error::{Error, LineFault, Result};
pub use evaluate::{Scores, evaluate};
pub use gradients::Gradients;
pub use job::Job;
pub use metrics::MetricsFile;
pub use optimizer::{AdamW, AdamWConfig, Moments};
pub use packing::{Batch, Packer};
pub use progress::Progress;
pub use run::{CHECKPOINT_FOLDER, LOSS_CURVE_FILE, METRICS_FILE, Observer, Summary, Trained, run, train, train_with};
pub use sample::{Part, Sample, Source, Token};
pub use schedule::Schedule;
pub use trainer::{BatchGradients, StepReport, Trainer};
