//! The filter `tojson`, as `json.dumps` writes it: keys in their order, `", "` and `": "`, nothing escaped for HTML.

use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::python::float;

/// How to write.
struct Style {
    ascii: bool,
    /// One level of indentation; `None`: all in one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, by place or by name.
pub(super) fn tojson(value: &Value, places: Rest<Value>, names: Kwargs) -> Result<String, Error> {
    let argument = |place: usize, name: &str| -> Result<Value, Error> {
        match places.get(place) {
            Some(value) => Ok(value.clone()),
            None => Ok(names.get::<Option<Value>>(name)?.unwrap_or(Value::from(()))),
        }
    };
    let indent = indentation(&argument(1, "indent")?)?;
    let separators = argument(2, "separators")?;
    let (item_separator, key_separator) = if separators.is_none() {
        (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned())
    } else {
        let list: Vec<String> = separators.try_iter()?.map(|s| s.to_string()).collect();
        let [item, key] = list.try_into().map_err(|_| invalid("separators must be two texts"))?;
        (item, key)
    };
    let style = Style {
        ascii: argument(0, "ensure_ascii")?.is_true(),
        indent,
        item_separator,
        key_separator,
        sort_keys: argument(3, "sort_keys")?.is_true(),
    };
    names.assert_all_used()?;
    let mut out = String::new();
    style.write(&mut out, value, 0)?;
    Ok(out)
}

fn invalid(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {}", reason.into()))
}

/// A number of blanks, or the text itself.
fn indentation(value: &Value) -> Result<Option<String>, Error> {
    match value.kind() {
        ValueKind::None | ValueKind::Undefined => Ok(None),
        ValueKind::String => Ok(Some(value.to_string())),
        _ => {
            let blanks = i64::try_from(value.clone()).map_err(|_| invalid("indent must be a number or a text"))?;
            Ok(Some(" ".repeat(blanks.clamp(0, 64) as usize)))
        }
    }
}

impl Style {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
            ValueKind::Number => out.push_str(&number(value)?),
            ValueKind::String => self.write_text(out, value.as_str().unwrap_or_default()),
            ValueKind::Map => self.write_map(out, value, depth)?,
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_list(out, ['[', ']'], &items, depth, |out, item| self.write(out, item, depth + 1))?;
            }
            other => return Err(invalid(format!("a value of type {other} cannot be written as JSON"))),
        }
        Ok(())
    }

    fn write_map(&self, out: &mut String, map: &Value, depth: usize) -> Result<(), Error> {
        let mut entries = Vec::new();
        for key in map.try_iter()? {
            entries.push((key_text(&key)?, map.get_item(&key)?));
        }
        if self.sort_keys {
            entries.sort_by(|(a, _), (b, _)| a.cmp(b));
        }
        self.write_list(out, ['{', '}'], &entries, depth, |out, (key, value)| {
            self.write_text(out, key);
            out.push_str(&self.key_separator);
            self.write(out, value, depth + 1)
        })
    }

    fn write_list<T>(
        &self,
        out: &mut String,
        [open, close]: [char; 2],
        items: &[T],
        depth: usize,
        mut write_item: impl FnMut(&mut String, &T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for (place, item) in items.iter().enumerate() {
            if place > 0 {
                out.push_str(&self.item_separator);
            }
            self.new_line(out, depth + 1);
            write_item(out, item)?;
        }
        if !items.is_empty() {
            self.new_line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn new_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.push_str(&indent.repeat(depth));
        }
    }

    fn write_text(&self, out: &mut String, text: &str) {
        out.push('"');
        for symbol in text.chars() {
            match symbol {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                _ if symbol < ' ' || (self.ascii && symbol > '~') => {
                    for unit in symbol.encode_utf16(&mut [0; 2]) {
                        write!(out, "\\u{unit:04x}").expect("writing to a string does not fail");
                    }
                }
                _ => out.push(symbol),
            }
        }
        out.push('"');
    }
}

fn number(value: &Value) -> Result<String, Error> {
    let number = f64::try_from(value.clone())?;
    Ok(match number {
        _ if number.is_nan() => "NaN".into(),
        f64::INFINITY => "Infinity".into(),
        f64::NEG_INFINITY => "-Infinity".into(),
        _ => float(number),
    })
}

/// Keys that are no texts become texts, as in Python.
fn key_text(key: &Value) -> Result<String, Error> {
    Ok(match key.kind() {
        ValueKind::String => key.to_string(),
        ValueKind::None => "null".into(),
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.into(),
        ValueKind::Number if key.is_integer() => key.to_string(),
        ValueKind::Number => number(key)?,
        other => return Err(invalid(format!("a key of type {other} cannot be written as JSON"))),
    })
}
