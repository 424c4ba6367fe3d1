//! A settings file of any bytes: settings that survive being written, or a report of its lines.
#![no_main]

use std::path::Path;

use candle_finetune::{Config, Error};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let path = Path::new("run.toml");
    let mut config = Config::default();
    match config.set_toml(text, path) {
        Ok(()) => {
            let written = config.to_toml();
            let mut again = Config::default();
            again.set_toml(&written, path).expect("what was written can be read");
            assert_eq!(again.to_toml(), written);
        }
        Err(Error::Settings { faults, .. }) => assert!(!faults.is_empty() && config == Config::default()),
        Err(error) => panic!("{error}"),
    }
});
