//! The first lines of a run: what is trained on what, how, and by what.

use candle_cp::instructions;

use crate::config::Config;
use crate::job::Job;
use crate::jsonl::counted;

impl Job {
    /// Lines of a name and a value.
    pub fn header(&self, config: &Config) -> Vec<(&'static str, String)> {
        let from =
            config.model.as_ref().map_or("from nothing".to_string(), |model| format!("from {}", model.display()));
        let what = match self.device().is_cpu() {
            true => format!("CPU, {}; attention: {}", self.cpus.line(), instructions()),
            false if config.ranks() > 1 => format!("NVIDIA GPU, one for each rank; {}", self.cpus.line()),
            false => format!("NVIDIA GPU; {}", self.cpus.line()),
        };
        let device = match config.launch.place() {
            Some(place) => format!("{what}; {place}"),
            None => what,
        };
        let replicas = match config.replicas() {
            1 => String::new(),
            replicas => format!(" for each of {replicas} replicas"),
        };
        let mut lines = vec![
            ("model", format!("{}, {from}", self.model.title())),
            ("data", self.data_summary(config)),
            (
                "run",
                format!(
                    "{} of {} x {} x {} tokens{replicas}, {} ({})",
                    counted(self.steps(), "step"),
                    counted(config.accumulate, "batch"),
                    counted(config.batch_rows, "row"),
                    config.seq_len,
                    counted(config.ranks(), "rank"),
                    config.layout
                ),
            ),
            ("device", device),
        ];
        lines.push(("settings", config.to_lines().join("\n")));
        lines
    }
}
