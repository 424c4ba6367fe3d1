//! A `config.json` of any bytes: a configuration with a list of tensors, or an error.
#![no_main]

use candle_gemma4::{Config, tensors};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(config) = Config::from_json(text) {
        assert!(!tensors(&config).is_empty());
        assert!(Config::from_json(&config.to_json()).is_ok());
    }
});
