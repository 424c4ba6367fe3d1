//! What a data file holds, told before anything is trained.

mod sample;

use std::collections::BTreeSet;

use crate::config::Config;
use crate::encoder::Encoder;
use crate::error::{Error, Result};
use crate::family::Family;
use crate::histogram::histogram;
use crate::jsonl::{Line, Lines, counted};
use crate::plan::{EpochPlan, Plan};
use crate::sample::is_learned;

/// What of a data file is shown, and how.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Inspection {
    /// Line of the sample that is shown, from 1; `None` shows the first one.
    pub line: Option<usize>,
    /// Shows learned tokens in a colour of the terminal, not in brackets.
    pub color: bool,
}

impl Inspection {
    /// From the text of `--inspect-line` and of `--color`; `terminal` tells whether a terminal shows the result.
    ///
    /// # Errors
    /// A value is not of its flag's kind.
    pub fn from_flags(line: Option<&str>, color: Option<&str>, terminal: bool) -> Result<Self> {
        let number = |value: &str| {
            let number = value.trim().parse().ok().filter(|&number: &usize| number > 0);
            let allowed = "the number of a line, from 1";
            number.ok_or_else(|| Error::flag("--inspect-line", value, allowed, "write for example --inspect-line 1"))
        };
        let color = match color {
            None | Some("auto") => terminal,
            Some("always") => true,
            Some("never") => false,
            Some(other) => {
                let fix = "auto colours what a terminal shows";
                return Err(Error::flag("--color", other, "auto, always or never", fix));
            }
        };
        Ok(Self { line: line.map(number).transpose()?, color })
    }
}

/// Reads and checks the data file of a run and tells what is in it: samples and tokens, how long samples are, how many
/// of them fit rows of several lengths, how the rows of this run are filled, and one sample as text with what is
/// learned of it. No weights are read.
///
/// # Errors
/// There is no data file, a setting or a line of the file cannot be used, or there is no sample in the line to show.
pub fn inspect(config: &Config, inspection: &Inspection) -> Result<String> {
    config.validate()?;
    let (Some(folder), Some(_)) = (config.model_folder(), &config.data) else {
        let allowed = "beside --model DIR and --data FILE.jsonl: there is no file of the digits to look into";
        return Err(Error::flag("--inspect", true, allowed, "give both"));
    };
    let model = Family::read(folder)?;
    let lines = Lines::read_all(&config.train_files(), Encoder::from_folder(folder, model.clone())?)?;
    let lengths: Vec<usize> = lines.lines().iter().map(Line::len).collect();
    let mut sections = vec![
        overview(&lines),
        format!("samples by their tokens\n{}", histogram(&lengths)),
        survivors(&lines, config.seq_len),
    ];
    let sample = sample::show(&lines, config, inspection)?;
    sections.push(match lines.fit(config.seq_len, config.truncate) {
        Ok(lines) => packed(&lines, config),
        Err(error @ Error::NothingFits { .. }) => format!("{error}\n"),
        Err(error) => return Err(error),
    });
    sections.push(sample);
    Ok(sections.join("\n"))
}

impl Line {
    fn len(&self) -> usize {
        self.encoded.tokens.len()
    }

    fn learned(&self) -> usize {
        self.encoded.tokens.iter().enumerate().filter(|&token| is_learned(token)).count()
    }
}

fn overview(lines: &Lines) -> String {
    let (tokens, learned) = totals(lines.lines().iter());
    let pictures: usize = lines.lines().iter().map(|line| line.encoded.pictures.len()).sum();
    let mut text = format!(
        "{}\n{}, {}, {learned} of them learned ({}), {}\n",
        lines.path().display(),
        counted(lines.len(), "sample"),
        counted(tokens, "token"),
        share(learned, tokens),
        counted(pictures, "picture")
    );
    if let Some(unread) = lines.unread() {
        text += &format!("{unread}\n");
    }
    text
}

/// Tokens, and those that are learned.
fn totals<'a>(lines: impl Iterator<Item = &'a Line>) -> (usize, usize) {
    lines.fold((0, 0), |(tokens, learned), line| (tokens + line.len(), learned + line.learned()))
}

/// How many samples rows of several lengths take whole: powers of two from just below the shortest sample to just above
/// the longest, and `seq_len`.
fn survivors(lines: &Lines, seq_len: usize) -> String {
    let shortest = lines.lines().iter().map(Line::len).min().unwrap_or(1).max(1);
    let longest = lines.lines().iter().map(Line::len).max().unwrap_or(1).max(1);
    let powers = shortest.ilog2()..=longest.next_power_of_two().ilog2();
    let rows: BTreeSet<usize> = powers.map(|power| 1 << power).chain([seq_len]).collect();
    let all_learned = totals(lines.lines().iter()).1;
    let mut text = format!("  {:>10} {:>21} {:>26}\n", "--seq-len", "samples that fit", "learned tokens in them");
    for row in rows {
        let fit: Vec<&Line> = lines.lines().iter().filter(|line| line.len() <= row).collect();
        let learned = totals(fit.iter().copied()).1;
        let mark = if row == seq_len { '>' } else { ' ' };
        text += &format!(
            "{mark} {row:>10} {:>12} {:>8} {learned:>17} {:>8}\n",
            fit.len(),
            share(fit.len(), lines.len()),
            share(learned, all_learned)
        );
    }
    text
}

/// How the rows of the first epoch are filled.
fn packed(lines: &Lines, config: &Config) -> String {
    let EpochPlan { batches, rows, tokens, steps, .. } = Plan::make(lines, config).first();
    let places = rows * config.seq_len;
    let mut text = format!(
        "packed, one epoch: {} in {} of {} tokens ({} of {}, {}), {} padding\n",
        counted(lines.len(), "sample"),
        counted(rows, "row"),
        config.seq_len,
        counted(batches, "batch"),
        counted(config.batch_rows, "row"),
        counted(steps, "step"),
        share(places - tokens, places)
    );
    lines.fitted().notices().iter().for_each(|notice| text += &format!("{notice}\n"));
    text
}

fn share(part: usize, whole: usize) -> String {
    format!("{:.1} %", 100.0 * part as f64 / whole.max(1) as f64)
}
