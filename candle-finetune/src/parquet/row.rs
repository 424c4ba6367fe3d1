//! One row as named values.

use std::collections::BTreeMap;

use candle_vlm_processor::TemplateValue;
use parquet::data_type::ByteArray;
use parquet::record::{self, Field};

use super::columns::Column;
use super::{Cell, Row};
use crate::encoder::Fault;
use crate::jsonl;

/// Columns that may hold a JSON text instead of lists and structs.
const JSON_COLUMNS: [&str; 3] = ["messages", "texts", "tools"];

/// Turns one row into values, and counts the contents that it meets in each leaf.
#[derive(Default)]
pub(super) struct Convert {
    group: usize,
    row: usize,
    /// Contents met so far, by leaf.
    met: BTreeMap<usize, usize>,
    cells: Vec<(String, Cell)>,
}

impl Convert {
    /// For a row of a row group, both from 0.
    pub(super) fn new(group: usize, row: usize) -> Self {
        Self { group, row, ..Self::default() }
    }

    /// The row, whose columns have these shapes. Struct fields that are null are left out: every struct has every field.
    pub(super) fn row(mut self, row: &record::Row, shapes: &[(String, Column)]) -> Fault<Row> {
        let mut columns = Vec::new();
        for ((name, field), (_, shape)) in row.get_column_iter().zip(shapes) {
            let value = match field {
                Field::Str(text) if JSON_COLUMNS.contains(&name.as_str()) => {
                    jsonl::json(text).map_err(|reason| format!("{name:?} is a text, but not a JSON list: {reason}"))?
                }
                _ => self.value(field, shape, name)?,
            };
            if !value.is_none() {
                columns.push((name.clone(), value));
            }
        }
        one_image(&mut columns)?;
        Ok(Row { columns, cells: self.cells })
    }

    /// A value; `name` tells its place in the row.
    fn value(&mut self, field: &Field, shape: &Column, name: &str) -> Fault<TemplateValue> {
        Ok(match (field, shape) {
            (Field::Null, _) => TemplateValue::from(()),
            (Field::Bool(value), _) => TemplateValue::from(*value),
            (Field::Str(text), _) => TemplateValue::from(text.as_str()),
            (Field::Bytes(content), Column::Leaf(leaf)) => self.content(content, *leaf, name, None)?,
            (Field::Group(row), Column::Group(shapes)) if is_picture(shapes) => self.picture(row, shapes, name)?,
            (Field::Group(row), Column::Group(shapes)) => {
                let mut fields = Vec::new();
                for ((key, field), (_, shape)) in row.get_column_iter().zip(shapes) {
                    let value = self.value(field, shape, &format!("{name}.{key}"))?;
                    if !value.is_none() {
                        fields.push((key.clone(), value));
                    }
                }
                TemplateValue::from_pairs(fields)
            }
            (Field::ListInternal(list), Column::List(element)) => {
                let value = |(place, field)| self.value(field, element, &format!("{name}[{place}]"));
                list.elements().iter().enumerate().map(value).collect::<Fault<Vec<_>>>()?.into()
            }
            (Field::MapInternal(map), Column::Map(shape)) => {
                let mut fields: Vec<(String, TemplateValue)> = Vec::new();
                for (key, field) in map.entries() {
                    let Field::Str(key) = key else { return Err(format!("{name} has a key that is no text")) };
                    if fields.iter().any(|(other, _)| other == key) {
                        return Err(format!("the key \"{key}\" stands twice in {name}"));
                    }
                    fields.push((key.clone(), self.value(field, shape, &format!("{name}.{key}"))?));
                }
                TemplateValue::from_pairs(fields)
            }
            (number, _) => {
                serde_json::from_value(number.to_json_value()).map_err(|error| format!("{name}: {error}"))?
            }
        })
    }

    /// A picture as the library `datasets` stores one: content, path, or both.
    fn picture(&mut self, row: &record::Row, shapes: &[(String, Column)], name: &str) -> Fault<TemplateValue> {
        let mut path = None;
        for (key, field) in row.get_column_iter() {
            match field {
                Field::Str(text) if key == "path" => path = Some(text.as_str()),
                _ => {}
            }
        }
        for ((_, field), (_, shape)) in row.get_column_iter().zip(shapes) {
            if let (Field::Bytes(content), Column::Leaf(leaf)) = (field, shape) {
                return self.content(content, *leaf, name, path);
            }
        }
        Ok(path.map_or(TemplateValue::from(()), TemplateValue::from))
    }

    /// The content of a picture as a data URL, noted with its cell.
    fn content(&mut self, content: &ByteArray, leaf: usize, name: &str, path: Option<&str>) -> Fault<TemplateValue> {
        let column = name.split(['.', '[']).next().unwrap_or(name);
        let key = name.rsplit('.').next().unwrap_or(name);
        if ![column, key].iter().any(|name| matches!(*name, "image" | "images")) {
            return Err(format!("{name:?} is binary; a text is needed: store it as a string"));
        }
        let met = self.met.entry(leaf).or_default();
        let nth = *met;
        *met += 1;
        let json = Field::Bytes(content.clone()).to_json_value();
        let url = format!("data:;base64,{}", json.as_str().unwrap_or_default());
        let name = path.map_or(name.to_string(), |path| format!("{name}, {path}"));
        self.cells.push((url.clone(), Cell { group: self.group, row: self.row, column: leaf, nth, name }));
        Ok(TemplateValue::from(url))
    }
}

/// Whether a struct has the fields of a picture: `bytes`, and at most `path` beside it.
fn is_picture(shapes: &[(String, Column)]) -> bool {
    shapes.iter().any(|(name, _)| name == "bytes") && shapes.iter().all(|(name, _)| name == "bytes" || name == "path")
}

/// A single `image`, or a list under that name, becomes `images`.
fn one_image(columns: &mut [(String, TemplateValue)]) -> Fault<()> {
    let has_images = columns.iter().any(|(name, _)| name == "images");
    let Some((name, value)) = columns.iter_mut().find(|(name, _)| name == "image") else { return Ok(()) };
    if has_images {
        return Err("\"image\" beside \"images\"; keep one of the two columns".to_string());
    }
    *name = "images".to_string();
    if value.as_str().is_some() {
        *value = vec![value.clone()].into();
    }
    Ok(())
}
