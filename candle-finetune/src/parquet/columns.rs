//! The shape of a column: its structs, lists and leaves, with the place of each leaf among all leaves of the file.

use parquet::basic::{ConvertedType, Repetition, Type as PhysicalType};
use parquet::schema::types::Type;

use crate::encoder::Fault;

/// A column, or a part of one.
#[derive(Debug)]
pub(super) enum Column {
    /// A value, and its place among the leaves.
    Leaf(usize),
    /// A struct.
    Group(Vec<(String, Column)>),
    List(Box<Column>),
    /// The values of a map; its keys are texts.
    Map(Box<Column>),
}

impl Column {
    /// The shape of a top-level field, whose first leaf is `next`; that is moved past its leaves.
    ///
    /// Fails for shapes and types that are not read; the library that assembles rows would panic on some of them.
    pub(super) fn new(field: &Type, next: &mut usize) -> Fault<Self> {
        let fault = |reason: &str| Err(format!("column {:?} {reason}; leave it out of the file", field.name()));
        if field.is_primitive() {
            let place = *next;
            *next += 1;
            let kind = (field.get_physical_type(), field.get_basic_info().converted_type());
            if !is_read(kind) {
                return fault(&format!("is of the type {} {}, which is not read", kind.0, kind.1));
            }
            return Ok(repeated(field, Self::Leaf(place)));
        }
        let fields = field.get_fields();
        let inner = fields.first().filter(|inner| fields.len() == 1 && is_repeated(inner));
        match (field.get_basic_info().converted_type(), inner) {
            (ConvertedType::LIST, Some(inner)) => Self::list(inner, next),
            (ConvertedType::MAP | ConvertedType::MAP_KEY_VALUE, Some(entry)) if entry.is_group() => {
                match entry.get_fields() {
                    [key, value] if key.is_primitive() => {
                        *next += 1;
                        Ok(Self::Map(Box::new(Self::new(value, next)?)))
                    }
                    _ => fault("is a map without keys that are texts and values"),
                }
            }
            (ConvertedType::LIST | ConvertedType::MAP | ConvertedType::MAP_KEY_VALUE, _) => {
                fault("is a list or map of an unknown form")
            }
            _ => Ok(repeated(field, Self::group(field, next)?)),
        }
    }

    fn group(field: &Type, next: &mut usize) -> Fault<Self> {
        let mut columns: Vec<(String, Self)> = Vec::new();
        for child in field.get_fields() {
            if columns.iter().any(|(name, _)| name == child.name()) {
                return Err(format!("the field {:?} stands twice in {:?}", child.name(), field.name()));
            }
            columns.push((child.name().to_string(), Self::new(child, next)?));
        }
        match columns.is_empty() {
            true => Err(format!("column {:?} is a struct without fields; leave it out of the file", field.name())),
            false => Ok(Self::Group(columns)),
        }
    }

    /// A list by its repeated field, which is the element itself in files of old writers, else the element's only parent.
    fn list(inner: &Type, next: &mut usize) -> Fault<Self> {
        let is_list = inner.get_basic_info().converted_type() == ConvertedType::LIST;
        let children = if inner.is_group() { inner.get_fields() } else { &[] };
        let is_element = match children {
            [] => true,
            [only] => !is_list && !is_repeated(only) && (inner.name() == "array" || inner.name().ends_with("_tuple")),
            _ => !is_list,
        };
        let element = match is_element {
            true if inner.is_primitive() => return Self::new(inner, next),
            true => Self::group(inner, next)?,
            false => Self::new(&children[0], next)?,
        };
        Ok(Self::List(Box::new(element)))
    }
}

/// The number of leaves of a field that is not read.
pub(super) fn leaves(field: &Type) -> usize {
    match field.is_primitive() {
        true => 1,
        false => field.get_fields().iter().map(|child| leaves(child)).sum(),
    }
}

fn is_repeated(field: &Type) -> bool {
    field.get_basic_info().has_repetition() && field.get_basic_info().repetition() == Repetition::REPEATED
}

/// A repeated field outside of a list is a list of its own.
fn repeated(field: &Type, column: Column) -> Column {
    if is_repeated(field) { Column::List(Box::new(column)) } else { column }
}

fn is_read((physical, converted): (PhysicalType, ConvertedType)) -> bool {
    use ConvertedType::{
        BSON, ENUM, INT_8, INT_16, INT_32, INT_64, JSON, NONE, UINT_8, UINT_16, UINT_32, UINT_64, UTF8,
    };
    match physical {
        PhysicalType::BOOLEAN | PhysicalType::FLOAT | PhysicalType::DOUBLE => true,
        PhysicalType::INT32 => matches!(converted, NONE | INT_8 | INT_16 | INT_32 | UINT_8 | UINT_16 | UINT_32),
        PhysicalType::INT64 => matches!(converted, NONE | INT_64 | UINT_64),
        PhysicalType::BYTE_ARRAY => matches!(converted, NONE | UTF8 | ENUM | JSON | BSON),
        PhysicalType::INT96 | PhysicalType::FIXED_LEN_BYTE_ARRAY => false,
    }
}
