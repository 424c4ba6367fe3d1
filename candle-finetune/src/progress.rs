//! What a person sees while a run goes on, on standard error: a bar on a terminal, a few plain lines elsewhere.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

use crate::report::StepReport;

/// Plain lines of a run whose standard error is a file or a pipe.
const PLAIN_LINES: usize = 20;

/// The progress of one run.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    steps: usize,
}

impl Progress {
    /// Begins, after a first line that says what is trained.
    pub fn start(steps: usize, headline: &str) -> Self {
        eprintln!("{headline}");
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(steps as u64);
            let style = "{bar:30} step {pos}/{len}  {msg}  [{elapsed} < {eta}]";
            bar.with_style(ProgressStyle::with_template(style).expect("the template is valid"))
        });
        Self { bar, steps }
    }

    /// Says something that a user should know and that is no error.
    pub fn notice(&self, text: &str) {
        let line = format!("note: {text}");
        match &self.bar {
            Some(bar) => bar.println(line),
            None => eprintln!("{line}"),
        }
    }

    /// Shows one step.
    pub fn step(&self, report: &StepReport) {
        let message =
            format!("loss {:.4}  grad norm {:.3}  {:.0} tokens/s", report.loss, report.grad_norm, report.tokens_per_s);
        match &self.bar {
            Some(bar) => {
                bar.set_message(message);
                bar.set_position(report.step as u64);
            }
            None if report.step.is_multiple_of(self.steps.div_ceil(PLAIN_LINES)) || report.step == self.steps => {
                eprintln!("step {}/{}  {message}  {:.0} s", report.step, self.steps, report.seconds);
            }
            None => {}
        }
    }

    /// Leaves the bar as it is and ends.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish();
        }
    }
}
