//! A `config.json` of any bytes, for each family: a configuration with a list of tensors, or an error.
#![no_main]

use candle_finetune::family::Family;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    for family in Family::ALL {
        if let Ok(config) = family.config(text) {
            assert!(!config.tensors().is_empty());
            assert!(family.config(&config.to_json()).is_ok());
        }
    }
});
