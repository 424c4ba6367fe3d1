//! Methods of Python's texts that the engine's own collection lacks.

use minijinja::value::{Tuple, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Calls a method of a text, list or dictionary as Python would.
pub(super) fn call(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else { return unknown_method_callback(state, value, method, args) };
    match method {
        "removeprefix" | "removesuffix" => {
            let (part,): (&str,) = from_args(args)?;
            let rest = if method == "removeprefix" { text.strip_prefix(part) } else { text.strip_suffix(part) };
            Ok(Value::from(rest.unwrap_or(text)))
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            Ok(three(text.split_once(separator).map_or([text, "", ""], |(head, tail)| [head, separator, tail])))
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            Ok(three(text.rsplit_once(separator).map_or(["", "", text], |(head, tail)| [head, separator, tail])))
        }
        "rsplit" => {
            let (separator, most): (&str, Option<i64>) = from_args(args)?;
            // As in Python, a negative number is no limit.
            let most =
                most.and_then(|most| usize::try_from(most).ok()).map_or(usize::MAX, |most| most.saturating_add(1));
            let mut parts: Vec<_> = text.rsplitn(most, separator).collect();
            parts.reverse();
            Ok(parts.into_iter().map(Value::from).collect())
        }
        "title" => {
            let () = from_args(args)?;
            Ok(Value::from(title(text)))
        }
        "index" => {
            let (part,): (&str,) = from_args(args)?;
            let missing = || Error::new(ErrorKind::InvalidOperation, format!("{part:?} is not in the text"));
            text.find(part).map(|at| Value::from(text[..at].chars().count())).ok_or_else(missing)
        }
        _ => unknown_method_callback(state, value, method, args),
    }
}

/// The first letter of every run of letters as a capital, the others small; unlike the filter, an apostrophe ends a run.
fn title(text: &str) -> String {
    let mut after_letter = false;
    let turn = |symbol: char| {
        let was_letter = std::mem::replace(&mut after_letter, symbol.is_alphabetic());
        if was_letter { symbol.to_lowercase().collect::<String>() } else { symbol.to_uppercase().collect() }
    };
    text.chars().map(turn).collect()
}

fn three(parts: [&str; 3]) -> Value {
    Value::from(Tuple::from(parts.map(Value::from)))
}
