//! Text of a module as tokens with their lines.

use crate::error::Error;

/// One token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Token<'t> {
    /// A directive, opcode, register, label or name, with its dots: `.reg`, `mma.sync.aligned`, `%r1`, `$L__BB0_2`.
    Word(&'t str),
    /// A number without its sign.
    Number(&'t str),
    /// A string without its quotes.
    Text,
    /// Any other character.
    Mark(char),
}

/// Splits a module into tokens; each has its line, from 1.
pub(crate) fn tokens(text: &str) -> Result<Vec<(Token<'_>, u32)>, Error> {
    let bytes = text.as_bytes();
    let mut out = Vec::new();
    let (mut at, mut line) = (0, 1u32);
    while at < bytes.len() {
        let c = bytes[at];
        let rest = &bytes[at..];
        match c {
            b'\n' => {
                line += 1;
                at += 1;
            }
            _ if c.is_ascii_whitespace() => at += 1,
            b'/' if rest.starts_with(b"//") => at += line_length(rest),
            b'/' if rest.starts_with(b"/*") => {
                let end =
                    text[at + 2..].find("*/").ok_or_else(|| Error::syntax(text, line, "a comment without end"))?;
                let skipped = &text[at..at + 4 + end];
                line += skipped.matches('\n').count() as u32;
                at += skipped.len();
            }
            b'"' => {
                let end = text[at + 1..].find('"').ok_or_else(|| Error::syntax(text, line, "a string without end"))?;
                out.push((Token::Text, line));
                at += end + 2;
            }
            _ if c.is_ascii_digit() => {
                let length = rest.iter().take_while(|b| b.is_ascii_alphanumeric() || **b == b'.').count();
                out.push((Token::Number(&text[at..at + length]), line));
                at += length;
            }
            _ if c.is_ascii_alphabetic() || b"%$._".contains(&c) => {
                let word = &text[at..at + word_length(rest)];
                if matches!(word, ".loc" | ".file") {
                    // Debug lines end with the line, not with a semicolon.
                    at += line_length(rest);
                } else {
                    out.push((Token::Word(word), line));
                    at += word.len();
                }
            }
            _ if c.is_ascii_graphic() => {
                out.push((Token::Mark(c as char), line));
                at += 1;
            }
            _ => return Err(Error::syntax(text, line, "a character outside of ASCII")),
        }
    }
    Ok(out)
}

fn line_length(bytes: &[u8]) -> usize {
    bytes.iter().take_while(|b| **b != b'\n').count()
}

fn word_length(bytes: &[u8]) -> usize {
    let mut length = 1;
    while let Some(b) = bytes.get(length) {
        if b.is_ascii_alphanumeric() || b"_$.".contains(b) {
            length += 1;
        } else if bytes[length..].starts_with(b"::") {
            length += 2;
        } else {
            break;
        }
    }
    length
}
