//! The template engine, set up so that a template writes what it would write under Python.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value, escape_formatter};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::{generation, json};

/// An engine with the settings, functions and filters that transformers gives to chat templates.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("only whitespace settings are changed"));
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.set_formatter(write_value);
    environment.add_filter("tojson", json::tojson);
    environment.add_filter("string", |value: &Value| text(value));
    environment.add_filter(generation::PLAIN_FILTER, |body: String| body);
    environment.add_filter(generation::MARKED_FILTER, generation::mark);
    environment.add_function("raise_exception", raise_exception);
    environment
}

fn raise_exception(message: &Value, _: Kwargs) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_string()))
}

fn write_value(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    if is_float(value) {
        escape_formatter(out, state, &Value::from(text(value)))
    } else {
        escape_formatter(out, state, value)
    }
}

fn is_float(value: &Value) -> bool {
    value.kind() == ValueKind::Number && !value.is_integer()
}

/// `str(value)`.
fn text(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(number) if is_float(value) => float(number),
        _ => value.to_string(),
    }
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
