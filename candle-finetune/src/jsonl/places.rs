//! Where samples stand: their files, and lines or rows in them.

use std::path::{Path, PathBuf};

use super::fit::listed;
use crate::error::{LineFault, Unit};

/// The files of a data set. Samples are numbered through them: the numbers of a file begin where those of the one before
/// it end, so that with one file a number is that of the line or row.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Places(Vec<Span>);

/// One file and its numbers, from `start + 1` on.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Span {
    path: PathBuf,
    unit: Unit,
    start: usize,
}

impl Places {
    /// Adds a file, whose first line or row has the number `start + 1`.
    pub(super) fn push(&mut self, path: &Path, unit: Unit, start: usize) {
        self.0.push(Span { path: path.to_path_buf(), unit, start });
    }

    /// The file that a number is in, by its index, and the line or row in it.
    pub(super) fn find(&self, number: usize) -> (usize, usize) {
        let file = self.0.partition_point(|span| span.start < number).saturating_sub(1);
        (file, number - self.0.get(file).map_or(0, |span| span.start))
    }

    pub(super) fn path(&self, file: usize) -> &Path {
        &self.0[file].path
    }

    /// All files.
    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.0.iter().map(|span| span.path.as_path())
    }

    /// The file, or the folder of several.
    pub(super) fn whole(&self) -> &Path {
        match &self.0[..] {
            [] => Path::new(""),
            [only] => &only.path,
            [first, ..] => first.path.parent().unwrap_or(&first.path),
        }
    }

    /// What the data is counted in.
    pub(super) fn unit(&self) -> Unit {
        self.0.first().map(|span| span.unit).unwrap_or_default()
    }

    /// `data.jsonl line 7`.
    pub(super) fn full(&self, number: usize) -> String {
        let (file, own) = self.find(number);
        format!("{} {} {own}", self.0[file].path.display(), self.0[file].unit)
    }

    /// `line 7`; with the file's name if there are several.
    pub(crate) fn short(&self, number: usize) -> String {
        let (file, own) = self.find(number);
        let Some(span) = self.0.get(file) else { return format!("{} {own}", Unit::Line) };
        match self.0.len() {
            1 => format!("{} {own}", span.unit),
            _ => format!("{} {} {own}", span.path.file_name().unwrap_or_default().display(), span.unit),
        }
    }

    /// `lines 3, 6`; with the files' names if there are several.
    pub(super) fn list(&self, numbers: &[usize]) -> String {
        if self.0.len() > 1 {
            return listed(&numbers.iter().map(|&number| self.short(number)).collect::<Vec<_>>());
        }
        let texts: Vec<String> = numbers.iter().map(usize::to_string).collect();
        format!("{}{} {}", self.unit(), if numbers.len() == 1 { "" } else { "s" }, listed(&texts))
    }

    pub(super) fn fault(&self, number: usize, reason: String) -> LineFault {
        LineFault { line: self.find(number).1, place: self.short(number), reason }
    }
}
