//! The tag `{% generation %}`: what a template says the model writes.
//!
//! The engine knows no such tag, so each becomes a filter block of the same extent. A second form of the template puts
//! marks around these blocks; comparing both renderings gives the places in the text.

use std::ops::Range;

use crate::error::{Error, Result};

/// Filter that changes nothing.
pub(super) const PLAIN_FILTER: &str = "generation_block";
/// Filter that puts marks around its body.
pub(super) const MARKED_FILTER: &str = "generation_block_marked";

/// Code points that no text may hold (Unicode keeps them for use inside programs).
const OPEN: char = '\u{fdd0}';
const CLOSE: char = '\u{fdd1}';

pub(super) fn mark(body: String) -> String {
    format!("{OPEN}{body}{CLOSE}")
}

/// The template with every generation tag replaced by a block of `filter`; `None` if it has none.
pub(super) fn replace_tags(source: &str, filter: &str) -> Option<String> {
    let mut result = String::with_capacity(source.len());
    let (mut rest, mut found) = (source, false);
    while let Some(at) = rest.find('{') {
        result.push_str(&rest[..at]);
        rest = &rest[at..];
        let skip = match rest.as_bytes().get(1) {
            Some(b'#') => rest.find("#}").map_or(rest.len(), |end| end + 2),
            Some(b'{') => tag_end(rest, "}}"),
            Some(b'%') => {
                let end = raw_end(rest).unwrap_or_else(|| tag_end(rest, "%}"));
                if let Some(tag) = replaced(&rest[..end], filter) {
                    result.push_str(&tag);
                    rest = &rest[end..];
                    found = true;
                    continue;
                }
                end
            }
            _ => 1,
        };
        result.push_str(&rest[..skip]);
        rest = &rest[skip..];
    }
    result.push_str(rest);
    found.then_some(result)
}

/// Length of a tag, its closing delimiter among it; delimiters inside quotes do not close it.
fn tag_end(tag: &str, close: &str) -> usize {
    let mut quote = None;
    let mut escaped = false;
    for (at, symbol) in tag.char_indices().skip(2) {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if symbol == '\\' => escaped = true,
            Some(open) if symbol == open => quote = None,
            Some(_) => {}
            None if tag[at..].starts_with(close) => return at + close.len(),
            None if symbol == '"' || symbol == '\'' => quote = Some(symbol),
            None => {}
        }
    }
    tag.len()
}

/// Length of a raw block up to its end tag, if the text starts with one.
fn raw_end(source: &str) -> Option<usize> {
    let tag = &source[..source.find("%}")? + 2];
    if inner(tag)?.1 != "raw" {
        return None;
    }
    let mut at = tag.len();
    while let Some(start) = source[at..].find("{%") {
        at += start;
        let end = at + source[at..].find("%}")? + 2;
        if inner(&source[at..end])?.1 == "endraw" {
            return Some(at);
        }
        at += 2;
    }
    None
}

/// The replacement of one `{% ... %}`, with its whitespace control; `None` for other tags.
fn replaced(tag: &str, filter: &str) -> Option<String> {
    let ([left, right], inner) = inner(tag)?;
    match inner {
        // What is set inside stays inside.
        "generation" => Some(format!("{{%{left} filter {filter} %}}{{% with {right}%}}")),
        "endgeneration" => Some(format!("{{%{left} endwith %}}{{% endfilter {right}%}}")),
        _ => None,
    }
}

/// The whitespace control of a tag at both ends, and what stands between.
fn inner(tag: &str) -> Option<([&'static str; 2], &str)> {
    let inner = tag.strip_prefix("{%")?.strip_suffix("%}")?;
    let (left, inner) = control(inner, |s, c| s.strip_prefix(c));
    let (right, inner) = control(inner, |s, c| s.strip_suffix(c));
    Some(([left, right], inner.trim()))
}

/// The sign at one end of a tag that says how blanks beside it are treated.
fn control<'a>(inner: &'a str, strip: impl Fn(&'a str, char) -> Option<&'a str>) -> (&'static str, &'a str) {
    for (sign, text) in [('-', "-"), ('+', "+")] {
        if let Some(rest) = strip(inner, sign) {
            return (text, rest);
        }
    }
    ("", inner)
}

/// Byte ranges in `plain` of what stands between marks in `marked`.
pub(super) fn spans(template: &str, plain: &str, marked: &str) -> Result<Vec<Range<usize>>> {
    let fault = || Error::Template {
        name: template.into(),
        reason: "the places of its generation blocks cannot be found: the template changes their text afterwards, \
                 or a message holds U+FDD0 or U+FDD1, which are no characters"
            .into(),
    };
    let mut text = String::with_capacity(plain.len());
    let mut spans = Vec::new();
    let mut open = Vec::new();
    for symbol in marked.chars() {
        match symbol {
            OPEN => open.push(text.len()),
            CLOSE => {
                let start = open.pop().ok_or_else(fault)?;
                spans.push(start..text.len());
            }
            _ => text.push(symbol),
        }
    }
    if text != plain || !open.is_empty() {
        return Err(fault());
    }
    Ok(spans)
}
