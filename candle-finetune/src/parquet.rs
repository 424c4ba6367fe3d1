//! Training data in Parquet files: rows as named values, and the content of pictures when it is needed.

#[cfg(feature = "parquet")]
mod columns;
#[cfg(feature = "parquet")]
mod row;
#[cfg(feature = "parquet")]
mod table;

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use candle_vlm_processor::TemplateValue;

#[cfg(feature = "parquet")]
pub(crate) use table::Table;

/// Where the content of a picture lies in a file.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "parquet"), expect(dead_code, reason = "no file is read that has cells"))]
pub(crate) struct Cell {
    /// Row group.
    group: usize,
    /// Row in the group.
    row: usize,
    /// Leaf column.
    column: usize,
    /// Which of the column's values in this row that are not null.
    nth: usize,
    /// For errors: column and place in it, and the name that the file gives the picture, if any.
    pub(crate) name: String,
}

/// One row.
#[derive(Debug)]
pub(crate) struct Row {
    /// The columns by name. Pictures that the file holds are data URLs; columns that nobody reads are empty texts.
    pub(crate) columns: Vec<(String, TemplateValue)>,
    /// The data URLs and where their content lies.
    pub(crate) cells: Vec<(String, Cell)>,
}

/// Whether the first bytes of a file are those of a Parquet file. A pipe is none: nothing is taken from it.
pub(crate) fn is_parquet(path: &Path) -> io::Result<bool> {
    if !std::fs::metadata(path)?.is_file() {
        return Ok(false);
    }
    let mut start = Vec::new();
    File::open(path)?.take(4).read_to_end(&mut start)?;
    Ok(matches!(&start[..], b"PAR1" | b"PARE"))
}

/// Stands for a file that cannot be read in this build: there is none of this type.
#[cfg(not(feature = "parquet"))]
#[derive(Debug)]
pub(crate) enum Table {}

#[cfg(not(feature = "parquet"))]
impl Table {
    pub(crate) fn open(path: &Path) -> crate::Result<Self> {
        Err(crate::Error::NoParquet { path: path.to_path_buf() })
    }

    pub(crate) fn rows(&self) -> usize {
        match *self {}
    }

    pub(crate) fn read(&self, _each: &mut dyn FnMut(usize, crate::encoder::Fault<Row>)) -> crate::Result<()> {
        match *self {}
    }

    pub(crate) fn cell(&self, _cell: &Cell) -> crate::encoder::Fault<Vec<u8>> {
        match *self {}
    }
}
