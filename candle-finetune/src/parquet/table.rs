//! One Parquet file: all rows once, and single cells again.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_vlm_processor::TemplateValue;
use parquet::column::reader::ColumnReader;
use parquet::errors::ParquetError;
use parquet::file::metadata::{PageIndexPolicy, ParquetMetaData, ParquetMetaDataReader};
use parquet::file::properties::ReaderProperties;
use parquet::file::reader::RowGroupReader;
use parquet::file::serialized_reader::SerializedRowGroupReader;
use parquet::record::reader::TreeBuilder;
use parquet::schema::types::{SchemaDescPtr, SchemaDescriptor, Type};

use super::columns::{Column, leaves};
use super::row::Convert;
use super::{Cell, Row};
use crate::encoder::Fault;
use crate::error::{Error, Result, io};
use crate::jsonl::{COLUMNS, has_a_sample};

/// Rows that are decoded at a time.
const ROWS_AT_A_TIME: usize = 16;
/// Reads of one row: the library ends a read at a page without rows, as some writers leave between others.
const EMPTY_PAGES: usize = 8;

/// Rows that a row group may claim, so that the rows of all groups can be added.
const MOST_GROUP_ROWS: usize = 1 << 40;

/// A file by its footer. It is opened anew for every use, so that ranks do not share a place in it.
#[derive(Debug)]
pub(crate) struct Table {
    path: PathBuf,
    footer: ParquetMetaData,
    /// The columns that are read.
    columns: Vec<(String, Column)>,
    /// The same columns as the library takes them.
    schema: SchemaDescPtr,
    /// Names of the other columns.
    unread: Vec<String>,
}

impl Table {
    /// Reads the footer and checks that the columns make samples.
    ///
    /// # Errors
    /// The file is cut or damaged, or lacks the columns that are needed.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(io("read", path))?;
        let fault = |reason| Error::Parquet { path: path.to_path_buf(), reason };
        let reader = ParquetMetaDataReader::new().with_offset_index_policy(PageIndexPolicy::Optional);
        let footer = reader.parse_and_finish(&file).map_err(|error| fault(damaged(&error)))?;
        let root = footer.file_metadata().schema();
        let names: Vec<String> = root.get_fields().iter().map(|field| field.name().to_string()).collect();
        if !has_a_sample(&names) {
            return Err(Error::Columns { path: path.to_path_buf(), columns: names, understood: COLUMNS });
        }
        let (mut columns, mut fields, mut unread) = (Vec::<(String, Column)>::new(), Vec::new(), Vec::new());
        let mut next = 0;
        for field in root.get_fields() {
            let name = field.name().to_string();
            if !is_read(&name) {
                next += leaves(field);
                unread.push(name);
                continue;
            }
            if columns.iter().any(|(other, _)| *other == name) {
                return Err(fault(format!("the column {name:?} stands twice")));
            }
            columns.push((name, Column::new(field, &mut next).map_err(fault)?));
            fields.push(field.clone());
        }
        let schema = Type::group_type_builder("schema").with_fields(fields).build();
        let schema = schema.map_err(|error| fault(damaged(&error)))?;
        let schema = Arc::new(SchemaDescriptor::new(Arc::new(schema)));
        Ok(Self { path: path.to_path_buf(), footer, columns, schema, unread })
    }

    /// Number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.footer.row_groups().iter().map(|group| group_rows(group.num_rows())).sum()
    }

    /// Calls `each` with every row and its number, from 1. Of a row group that is damaged the rest is not read.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub(crate) fn read(&self, each: &mut dyn FnMut(usize, Fault<Row>)) -> Result<()> {
        let mut start = 0;
        for group in 0..self.footer.num_row_groups() {
            let file = Arc::new(File::open(&self.path).map_err(io("read", &self.path))?);
            let rows = self.group(group, file).and_then(|reader| {
                TreeBuilder::new().with_batch_size(ROWS_AT_A_TIME).as_iter(self.schema.clone(), &reader)
            });
            match rows {
                Err(error) => each(start + 1, Err(damaged(&error))),
                Ok(rows) => {
                    for (row, found) in rows.enumerate() {
                        let is_damaged = found.is_err();
                        each(
                            start + row + 1,
                            match found {
                                Ok(found) => {
                                    Convert::new(group, row).row(&found, &self.columns).map(|row| self.with_unread(row))
                                }
                                Err(error) => Err(damaged(&error)),
                            },
                        );
                        if is_damaged {
                            break;
                        }
                    }
                }
            }
            start += group_rows(self.footer.row_group(group).num_rows());
        }
        Ok(())
    }

    fn with_unread(&self, mut row: Row) -> Row {
        row.columns.extend(self.unread.iter().map(|name| (name.clone(), TemplateValue::from(""))));
        row
    }

    fn group(&self, group: usize, file: Arc<File>) -> parquet::errors::Result<SerializedRowGroupReader<'_, File>> {
        let properties = Arc::new(ReaderProperties::builder().build());
        let pages = self.footer.page_index_for_row_group(group);
        SerializedRowGroupReader::new(file, self.footer.row_group(group), pages, properties)
    }

    /// The content of a cell. The pages before its row are skipped unread where their heads or the file's page index tell
    /// how many rows they have; else they are unpacked.
    pub(crate) fn cell(&self, cell: &Cell) -> Fault<Vec<u8>> {
        let read = || -> parquet::errors::Result<Option<Vec<u8>>> {
            let reader = self.group(cell.group, Arc::new(File::open(&self.path)?))?;
            let ColumnReader::ByteArrayColumnReader(mut column) = reader.get_column_reader(cell.column)? else {
                return Ok(None);
            };
            let skipped = column.skip_records(cell.row)?;
            let (mut definitions, mut repetitions, mut values) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..EMPTY_PAGES {
                let buffers = (Some(&mut definitions), Some(&mut repetitions), &mut values);
                if column.read_records(1, buffers.0, buffers.1, buffers.2)?.0 > 0 {
                    break;
                }
            }
            let value = values.get(cell.nth).filter(|_| skipped == cell.row);
            Ok(value.map(|value| value.data().to_vec()))
        };
        match read() {
            Ok(Some(content)) => Ok(content),
            Ok(None) => Err("it is not there any more; leave the file alone until training ends".to_string()),
            Err(error) => Err(damaged(&error)),
        }
    }
}

fn is_read(name: &str) -> bool {
    crate::jsonl::KNOWN.contains(&name) || name == "image"
}

/// A footer may say anything: a negative number of rows is none, and no group has more than the limit.
fn group_rows(rows: i64) -> usize {
    usize::try_from(rows).unwrap_or(0).min(MOST_GROUP_ROWS)
}

fn damaged(error: &ParquetError) -> String {
    format!("{error}; the file may be cut or damaged: copy or pull it again")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_a_footer_claims_can_be_added() {
        assert_eq!([i64::MIN, -1, 0, 7, i64::MAX].map(group_rows), [0, 0, 0, 7, MOST_GROUP_ROWS]);
    }
}
