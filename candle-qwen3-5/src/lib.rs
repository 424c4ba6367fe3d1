//! Trainable Qwen 3.5 and 3.6 on Candle, ready for context parallelism.

pub mod vision;
