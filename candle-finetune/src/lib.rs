#![doc = include_str!("../README.md")]

pub mod checkpoint;
mod closing;
mod comm_use;
mod config;
pub mod digit_task;
mod digit_words;
pub mod digits;
mod encoder;
mod error;
mod evaluate;
mod gradients;
mod header;
mod histogram;
pub mod hub;
mod images;
mod inspect;
mod job;
pub mod jsonl;
mod memory;
mod metrics;
mod names;
mod optimizer;
mod outputs;
mod packing;
mod parquet;
mod plan;
pub mod plot;
mod progress;
mod recorder;
mod report;
mod run;
mod sample;
pub mod saves;
mod schedule;
pub mod small_model;
mod summary;
mod tensorboard;
mod train;
mod trainer;

pub use closing::Closing;
pub use comm_use::{CommMeter, CommUse};
pub use config::{Config, LoraSettings, Setting, Sources};
pub use encoder::Encoder;
pub use error::{Error, LineFault, Result, Unit};
pub use evaluate::{Scores, evaluate};
pub use gradients::Gradients;
pub use inspect::{Inspection, inspect};
pub use job::Job;
pub use memory::Memory;
pub use metrics::MetricsFile;
pub use optimizer::{AdamW, AdamWConfig, Moments, StateFault};
pub use packing::{Batch, Packer};
pub use plan::{EpochPlan, Plan};
pub use progress::{Progress, tell};
pub use report::{History, StepReport, ValidationReport};
pub use run::{
    ADAPTER_FOLDER, CHECKPOINT_FOLDER, Control, LOSS_CURVE_FILE, METRICS_FILE, SETTINGS_FILE, TENSORBOARD_FOLDER,
    layered_settings, resume, resumed_settings, run, run_controlled,
};
pub use sample::{Part, Position, Sample, Source, Token};
pub use schedule::{Schedule, ScheduleKind};
pub use summary::Summary;
pub use tensorboard::EventFile;
pub use train::{Next, Observer, Trained, Watcher, train, train_watched};
pub use trainer::{BatchGradients, Trainer};
