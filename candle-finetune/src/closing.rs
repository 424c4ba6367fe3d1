//! What a person sees when a run has ended.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use indicatif::{BinaryBytes, FormattedDuration, HumanCount};

use crate::report::History;

/// What a run came to and where everything lies; shown as lines of a name and a value.
#[derive(Debug, Clone)]
pub struct Closing<'a> {
    /// All steps and validations, also those of earlier parts of a resumed run.
    pub history: &'a History,
    /// Steps that were wanted.
    pub steps: usize,
    /// The most resident bytes of each process, by rank; of one process the history tells.
    pub peaks: &'a [u64],
    /// Samples that were left out for the length of a row.
    pub samples_dropped: usize,
    /// Samples that were cut to the length of a row.
    pub samples_cut: usize,
    /// What the run left behind, by name.
    pub files: &'a [(&'a str, PathBuf)],
}

impl fmt::Display for Closing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut lines = vec![("trained", self.trained())];
        if let [first, .., last] = self.history.steps.as_slice() {
            lines.push(("loss", format!("{:.4} at first, {:.4} at last", first.loss, last.loss)));
        } else if let [only] = self.history.steps.as_slice() {
            lines.push(("loss", format!("{:.4}", only.loss)));
        }
        if let (Some(last), Some(best)) = (self.history.validations.last(), self.history.best_validation()) {
            let text = format!("{:.4} at last, best {:.4} after step {}", last.val_loss, best.val_loss, best.step);
            lines.push(("val loss", text));
        }
        if self.peaks.len() > 1 {
            let each: Vec<String> = self.peaks.iter().map(|&bytes| BinaryBytes(bytes).to_string()).collect();
            lines.push(("memory", format!("at most, by rank: {}", each.join(", "))));
        } else if let Some(bytes) = self.history.steps.iter().filter_map(|report| report.memory.peak_memory_bytes).max()
        {
            lines.push(("memory", format!("{} at most", BinaryBytes(bytes))));
        }
        lines.extend(self.samples());
        lines.extend(self.files.iter().map(|(name, path)| (*name, path.display().to_string())));
        f.write_str(&aligned(&lines))
    }
}

impl Closing<'_> {
    fn trained(&self) -> String {
        let count = |n: usize| HumanCount(n as u64);
        let wanted = count(self.steps);
        let Some(last) = self.history.steps.last() else { return format!("0 of {wanted} steps") };
        let tokens: usize = self.history.steps.iter().map(|report| report.tokens).sum();
        let of = if last.step == self.steps { String::new() } else { format!(" of {wanted}") };
        let s = if self.steps == 1 { "" } else { "s" };
        let epochs = last.epoch.map_or(String::new(), |epoch| format!(", {epoch:.2} epochs"));
        let mut text = format!("{}{of} step{s}{epochs}, {} tokens", count(last.step), count(tokens));
        if last.seconds > 0.0 {
            let speed = count((tokens as f64 / last.seconds).round() as usize);
            text += &format!(" in {} ({speed} tokens/s)", clock(last.seconds));
        }
        text
    }

    fn samples(&self) -> Option<(&'static str, String)> {
        let samples = |count: usize, what: &str| {
            let s = if count == 1 { "" } else { "s" };
            (count > 0).then(|| format!("{} sample{s} {what}", HumanCount(count as u64)))
        };
        let dropped = samples(self.samples_dropped, "longer than a row left out");
        let parts: Vec<String> = dropped.into_iter().chain(samples(self.samples_cut, "cut to a row")).collect();
        (!parts.is_empty()).then(|| ("data", parts.join(", ")))
    }
}

/// As `hours:minutes:seconds`; what no clock can show is shown as zero.
pub(crate) fn clock(seconds: f64) -> FormattedDuration {
    FormattedDuration(Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

/// Lines of a name and a value, the values beneath each other; further lines of a value as well. A name without a
/// value is left out.
pub(crate) fn aligned(lines: &[(&str, String)]) -> String {
    let width = lines.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0) + 1;
    let shown = lines.iter().flat_map(|(name, value)| {
        let names = std::iter::once(format!("{name}:")).chain(std::iter::repeat(String::new()));
        names.zip(value.lines()).map(|(name, value)| format!("{name:width$}  {value}\n"))
    });
    shown.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;
    use crate::report::StepReport;
    use crate::report::tests::{step_report, validation_report};

    #[test]
    fn everything_that_is_known_is_told() {
        let last = StepReport { epoch: Some(1.5), tokens: 1_234_000, seconds: 725.0, ..step_report(1200, 0.5) };
        let peak = |bytes| Memory { memory_bytes: None, peak_memory_bytes: Some(bytes) };
        let history = History {
            steps: vec![
                StepReport { memory: peak(3 << 30), ..step_report(1, 2.5) },
                StepReport { memory: peak(1 << 30), ..last },
            ],
            validations: vec![validation_report(600, 0.75), validation_report(1200, 1.0)],
        };
        let files = [("checkpoint", PathBuf::from("runs/a/checkpoint")), ("metrics", "runs/a/metrics.jsonl".into())];
        let closing = Closing {
            history: &history,
            steps: 1200,
            peaks: &[],
            samples_dropped: 1,
            samples_cut: 1001,
            files: &files,
        };
        let expected = "\
trained:     1,200 steps, 1.50 epochs, 1,234,100 tokens in 00:12:05 (1,702 tokens/s)
loss:        2.5000 at first, 0.5000 at last
val loss:    1.0000 at last, best 0.7500 after step 600
memory:      3.00 GiB at most
data:        1 sample longer than a row left out, 1,001 samples cut to a row
checkpoint:  runs/a/checkpoint
metrics:     runs/a/metrics.jsonl
";
        assert_eq!(closing.to_string(), expected);
        let cut = Closing { steps: 2000, samples_dropped: 0, ..closing }.to_string();
        assert!(cut.starts_with("trained:     1,200 of 2,000 steps, "), "{cut}");
        assert!(cut.contains("\ndata:        1,001 samples cut to a row\n"), "{cut}");
    }

    #[test]
    fn what_is_not_known_is_left_out() {
        let history = History::default();
        let closing =
            Closing { history: &history, steps: 5, peaks: &[], samples_dropped: 0, samples_cut: 0, files: &[] };
        assert_eq!(closing.to_string(), "trained:  0 of 5 steps\n");
        let one = StepReport { epoch: None, memory: Memory::default(), seconds: 0.0, ..step_report(1, 2.5) };
        let history = History { steps: vec![one], validations: vec![validation_report(1, f64::NAN)] };
        let closing = Closing { history: &history, steps: 1, ..closing };
        assert_eq!(closing.to_string(), "trained:  1 step, 100 tokens\nloss:     2.5000\n");
    }

    #[test]
    fn values_lie_beneath_each_other() {
        let lines = [("model", "a\nb".to_string()), ("größe", "c".to_string()), ("to", String::new())];
        assert_eq!(aligned(&lines), "model:  a\n        b\ngröße:  c\n");
        assert_eq!(aligned(&[]), "");
    }
}
