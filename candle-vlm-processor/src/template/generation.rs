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
    let (mut end, mut found) = (0, false);
    for tag in tags(source) {
        if let Some(new) = replaced(&source[tag.clone()], filter) {
            result.push_str(&source[end..tag.start]);
            result.push_str(&new);
            end = tag.end;
            found = true;
        }
    }
    result.push_str(&source[end..]);
    found.then_some(result)
}

/// The places of all tags `{{ ... }}` and `{% ... %}`; comments and raw blocks have none inside.
pub(super) fn tags(source: &str) -> impl Iterator<Item = Range<usize>> {
    let mut next = 0;
    std::iter::from_fn(move || {
        while let Some(found) = source[next..].find('{') {
            let start = next + found;
            let rest = &source[start..];
            let (length, is_tag) = match rest.as_bytes().get(1) {
                Some(b'#') => (rest.find("#}").map_or(rest.len(), |end| end + 2), false),
                Some(b'{') => (tag_end(rest, "}}"), true),
                Some(b'%') => raw_end(rest).map_or_else(|| (tag_end(rest, "%}"), true), |end| (end, false)),
                _ => (1, false),
            };
            next = start + length;
            if is_tag {
                return Some(start..next);
            }
        }
        None
    })
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

/// Length of a raw block up to its end tag, or to the end of the text, if the text starts with one.
fn raw_end(source: &str) -> Option<usize> {
    const END: &str = "endraw";
    let tag = &source[..source.find("%}")? + 2];
    if inner(tag)?.1 != "raw" {
        return None;
    }
    let start = |(at, _): (usize, &str)| {
        let head = source[..at].trim_end();
        let head = head.strip_suffix(['-', '+']).unwrap_or(head).strip_suffix("{%")?;
        let tail = source[at + END.len()..].trim_start();
        tail.strip_prefix(['-', '+']).unwrap_or(tail).starts_with("%}").then_some(head.len())
    };
    Some(source.match_indices(END).find_map(start).unwrap_or(source.len()))
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
