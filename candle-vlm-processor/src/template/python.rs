//! The template engine, set up so that a template writes what it would write under Python.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Tuple, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value, escape_formatter};

use super::{generation, json, methods};

/// Most steps of a template; 64 bytes that it handles count as one. A chat of a million tokens is far below it.
const FUEL: u64 = 10_000_000;

/// An engine with the settings, functions and filters that transformers gives to chat templates.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("only whitespace settings are changed"));
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(methods::call);
    environment.set_formatter(write_value);
    environment.add_filter("tojson", json::tojson);
    environment.add_filter("string", |value: &Value| text(value));
    environment.add_filter("escape", escape);
    environment.add_filter("e", escape);
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_test("sequence", is_sequence);
    environment.add_filter(generation::PLAIN_FILTER, |body: String| body);
    environment.add_filter(generation::MARKED_FILTER, generation::mark);
    environment.add_function("raise_exception", raise_exception);
    environment
}

fn raise_exception(message: &Value, _: Kwargs) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_string()))
}

fn write_value(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    if holds_float(value) {
        out.write_str(&text(value)).map_err(Error::from)
    } else {
        escape_formatter(out, state, value)
    }
}

/// Whether it has a length and items: texts, mappings and what is not defined do, to Jinja2.
fn is_sequence(value: &Value) -> bool {
    use ValueKind::{Bytes, Map, Seq, String, Undefined};
    matches!(value.kind(), Undefined | String | Bytes | Seq | Map)
}

/// As the engine's own, with the names that Python gives to quotes.
fn escape(value: &Value) -> String {
    let mut out = String::new();
    for symbol in text(value).chars() {
        match symbol {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            _ => out.push(symbol),
        }
    }
    out
}

fn is_float(value: &Value) -> bool {
    value.kind() == ValueKind::Number && !value.is_integer()
}

/// Whether a number stands somewhere in a value that the engine may write unlike Python.
fn holds_float(value: &Value) -> bool {
    let any = |items: &Value| items.try_iter().is_ok_and(|mut items| items.any(|item| holds_float(&item)));
    match value.kind() {
        ValueKind::Number => is_float(value),
        ValueKind::Seq => any(value),
        ValueKind::Map => {
            let item = |key: Value| value.get_item(&key).is_ok_and(|item| holds_float(&item));
            value.try_iter().is_ok_and(|mut keys| keys.any(item))
        }
        _ => false,
    }
}

/// `str(value)`.
fn text(value: &Value) -> String {
    if !holds_float(value) {
        return value.to_string();
    }
    match value.kind() {
        ValueKind::Seq => {
            let items: Vec<_> = value.try_iter().into_iter().flatten().map(|item| repr(&item)).collect();
            let is_tuple = value.downcast_object_ref::<Tuple>().is_some();
            let comma = if is_tuple && items.len() == 1 { "," } else { "" };
            let [open, close] = if is_tuple { ['(', ')'] } else { ['[', ']'] };
            format!("{open}{}{comma}{close}", items.join(", "))
        }
        ValueKind::Map => {
            let keys = value.try_iter().into_iter().flatten();
            let entry = |key: Value| format!("{}: {}", repr(&key), repr(&value.get_item(&key).unwrap_or_default()));
            format!("{{{}}}", keys.map(entry).collect::<Vec<_>>().join(", "))
        }
        _ => f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float),
    }
}

/// `repr(value)`.
fn repr(value: &Value) -> String {
    if holds_float(value) { text(value) } else { format!("{value:?}") }
}

/// `repr` of a Python float: the shortest digits that read back, with an exponent below 1e-4 and from 1e16 on.
pub(super) fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').expect("this format has an exponent");
    let exponent: i32 = exponent.parse().expect("this exponent is a number");
    if (-4..16).contains(&exponent) {
        let plain = value.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}
