//! What a person sees while a run goes on, on standard error: a bar on a terminal, a few plain lines elsewhere.

use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use std::time::Duration;

use indicatif::{BinaryBytes, ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};

use crate::closing::{aligned, clock};
use crate::report::{StepReport, ValidationReport};

/// Plain lines of a run whose standard error is a file or a pipe, validations not counted.
const PLAIN_LINES: usize = 20;
/// Two lines, so that the numbers have room on a terminal of 80 columns.
const STYLE: &str = "{bar:30} step {pos}/{len}  [{elapsed} < {eta}]\n{wide_msg}";

/// Writes to standard error. A run does not end because nobody listens any more: a closed pipe, a full disk.
pub fn tell(text: &str) {
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

/// The progress of one run.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    steps: usize,
    val_loss: Mutex<Option<f64>>,
}

impl Progress {
    /// Begins after `done` of `steps` steps, beneath lines of a name and a value that say what is trained and how.
    pub fn start(steps: usize, done: usize, header: &[(&str, String)]) -> Self {
        tell(&aligned(header));
        let target = std::io::stderr().is_terminal().then(ProgressDrawTarget::stderr);
        let progress = Self::on(target, steps, done);
        if let Some(bar) = &progress.bar {
            // A step may take minutes; the clock shows that the run is alive.
            bar.enable_steady_tick(Duration::from_secs(1));
        }
        progress
    }

    fn on(target: Option<ProgressDrawTarget>, steps: usize, done: usize) -> Self {
        let bar = target.map(|target| {
            let style = ProgressStyle::with_template(STYLE).expect("the template is valid");
            let bar = ProgressBar::with_draw_target(Some(steps as u64), target).with_position(done as u64);
            // An error leaves the bar as it is, so that one sees how far the run came.
            let bar = bar.with_style(style).with_finish(ProgressFinish::Abandon);
            // Steps of an earlier run say nothing about the speed of this one.
            bar.reset_eta();
            bar
        });
        Self { bar, steps, val_loss: Mutex::new(None) }
    }

    /// Says something that a user should know and that is no error.
    pub fn notice(&self, text: &str) {
        self.say(&format!("note: {text}"));
    }

    /// Shows one step.
    pub fn step(&self, report: &StepReport) {
        match &self.bar {
            Some(bar) => {
                bar.set_message(numbers(report, *self.val_loss.lock().unwrap_or_else(|e| e.into_inner())));
                bar.set_position(report.step as u64);
            }
            None => self.plain(report).iter().for_each(|line| tell(&format!("{line}\n"))),
        }
    }

    /// Shows one validation: on a terminal from the next step on, else as a line.
    pub fn validation(&self, report: &ValidationReport) {
        *self.val_loss.lock().unwrap_or_else(|e| e.into_inner()) = Some(report.val_loss);
        if self.bar.is_none() {
            tell(&format!("{}\n", validation_line(report)));
        }
    }

    /// Leaves the bar as it is and ends.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }

    fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(line),
            None => tell(&format!("{line}\n")),
        }
    }

    /// The line of a step that has one.
    fn plain(&self, report: &StepReport) -> Option<String> {
        let told = report.step.is_multiple_of(self.steps.div_ceil(PLAIN_LINES).max(1)) || report.step == self.steps;
        let (text, took) = (numbers(report, None), clock(report.seconds));
        told.then(|| format!("step {}/{}  {text}  {took}", report.step, self.steps))
    }
}

fn numbers(report: &StepReport, val_loss: Option<f64>) -> String {
    let mut text = format!("loss {:.4}", report.loss);
    if let Some(loss) = val_loss {
        text += &format!("  val {loss:.4}");
    }
    text += &format!("  grad norm {:.3}  lr {:.2e}  {:.0} tokens/s", report.grad_norm, report.lr, report.tokens_per_s);
    if let Some(bytes) = report.memory.memory_bytes {
        text += &format!("  {}", BinaryBytes(bytes));
    }
    text
}

fn validation_line(report: &ValidationReport) -> String {
    format!("after step {}: val loss {:.4} over {} learned tokens", report.step, report.val_loss, report.val_tokens)
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use indicatif::TermLike;

    use super::*;
    use crate::memory::Memory;
    use crate::report::tests::{step_report, validation_report};

    /// Everything that is written to a terminal, without the movements of its cursor.
    #[derive(Debug, Clone, Default)]
    struct Written(Arc<Mutex<String>>);

    impl TermLike for Written {
        fn width(&self) -> u16 {
            80
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(&format!("{text}\n"))
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_terminal_sees_numbers_notices_and_how_far_it_is() {
        let written = Written::default();
        let target = ProgressDrawTarget::term_like(Box::new(written.clone()));
        let progress = Progress::on(Some(target), 20, 3);
        progress.notice("two samples are left out");
        progress.validation(&validation_report(3, 1.5));
        progress.step(&step_report(4, 1.25));
        progress.finish();
        let text = written.0.lock().unwrap().clone();
        assert!(text.contains("note: two samples are left out"), "{text:?}");
        assert!(text.contains(" step 4/20  ["), "{text:?}");
        let numbers = "loss 1.2500  val 1.5000  grad norm 0.500  lr 1.00e-3  50 tokens/s  1.00 GiB";
        assert!(text.contains(numbers), "{text:?}");
    }

    #[test]
    fn the_numbers_fit_a_terminal() {
        let report = StepReport { grad_norm: 0.5, lr: 1e-5, tokens_per_s: 12345.6, ..step_report(1, 2.5) };
        let report = StepReport { memory: Memory { memory_bytes: Some(100 << 30), ..report.memory }, ..report };
        let text = numbers(&report, Some(2.5));
        assert!(text.len() <= 80, "{text}");
        assert_eq!(text, "loss 2.5000  val 2.5000  grad norm 0.500  lr 1.00e-5  12346 tokens/s  100.00 GiB");
        assert!(numbers(&StepReport { memory: Memory::default(), ..report }, None).ends_with(" tokens/s"));
    }

    #[test]
    fn a_file_gets_some_twenty_lines_and_the_last() {
        let told = |steps: usize| {
            let progress = Progress::on(None, steps, 0);
            (1..=steps).filter(|&step| progress.plain(&step_report(step, 2.5)).is_some()).collect::<Vec<_>>()
        };
        assert_eq!(told(3), [1, 2, 3]);
        assert_eq!(told(50), [3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36, 39, 42, 45, 48, 50]);
        assert_eq!(told(1000).len(), 20);
        let line = Progress::on(None, 4, 0).plain(&StepReport { seconds: 3725.5, ..step_report(2, 2.5) }).unwrap();
        assert_eq!(line, "step 2/4  loss 2.5000  grad norm 0.500  lr 1.00e-3  50 tokens/s  1.00 GiB  01:02:05");
        assert_eq!(validation_line(&validation_report(2, 1.5)), "after step 2: val loss 1.5000 over 40 learned tokens");
    }
}
