//! One sample as text, with what is learned of it.

use std::ops::Range;

use super::Inspection;
use crate::config::Config;
use crate::encoder::{Encoded, Encoder};
use crate::error::{Error, Result};
use crate::jsonl::{Line, Lines, counted, cut};
use crate::sample::is_learned;

/// Around learned tokens: in a terminal green, elsewhere brackets.
const GREEN: [&str; 2] = ["\u{1b}[32m", "\u{1b}[0m"];
const BRACKETS: [&str; 2] = ["[[", "]]"];

/// The sample to show, as the run takes it, after a line about its length.
pub(super) fn show(lines: &Lines, config: &Config, inspection: &Inspection) -> Result<String> {
    let line = find(lines, inspection)?;
    let mut encoded = line.encoded.clone();
    let too_long = line.len() > config.seq_len;
    if too_long && config.truncate {
        cut(&mut encoded, config.seq_len);
    }
    let learned = encoded.tokens.iter().enumerate().filter(|&token| is_learned(token)).count();
    let becomes = match (too_long, config.truncate, learned) {
        (false, _, _) => String::new(),
        (true, false, _) => format!(", left out: longer than --seq-len {}", config.seq_len),
        (true, true, 0) => format!(", cut to {} and left out", encoded.tokens.len()),
        (true, true, _) => format!(", cut to {}", encoded.tokens.len()),
    };
    let (marks, legend) = match inspection.color {
        true => (GREEN, format!("{}learned{}", GREEN[0], GREEN[1])),
        false => (BRACKETS, "[[learned]]".to_string()),
    };
    let text = text(lines.encoder(), &encoded, marks)?;
    let end = if text.ends_with('\n') { "" } else { "\n" };
    Ok(format!("{}: {}{becomes}; {learned} {legend}\n{text}{end}", lines.place(line), counted(line.len(), "token")))
}

fn find<'a>(lines: &'a Lines, inspection: &Inspection) -> Result<&'a Line> {
    let all = lines.lines();
    let found = match inspection.line {
        Some(number) => all.iter().find(|line| line.number == number),
        None => all.first(),
    };
    found.ok_or_else(|| {
        let last = all.last().map_or(0, |line| line.number);
        let allowed = format!("a line of {} that has a sample; the last one is {last}", lines.path().display());
        Error::flag("--inspect-line", inspection.line.unwrap_or(1), allowed, "count empty lines too, from 1")
    })
}

/// The text of all tokens, `marks` around what is learned, and a word for each picture.
fn text(encoder: &Encoder, encoded: &Encoded, marks: [&str; 2]) -> Result<String> {
    let ids: Vec<u32> = encoded.tokens.iter().map(|token| token.id).collect();
    let mut text = String::new();
    for Piece { tokens, kind } in pieces(encoded) {
        let decoded = || encoder.tokenizer().decode(&ids[tokens.clone()], false);
        match kind {
            Kind::Picture => text += &format!("<picture {} tokens>", tokens.len()),
            Kind::Given => text += &visible(&decoded()?),
            Kind::Learned => text += &format!("{}{}{}", marks[0], visible(&decoded()?), marks[1]),
        }
    }
    Ok(text)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Picture,
    Given,
    Learned,
}

/// Neighbouring tokens of one kind.
#[derive(Debug, PartialEq, Eq)]
struct Piece {
    tokens: Range<usize>,
    kind: Kind,
}

fn pieces(encoded: &Encoded) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut blocks = encoded.blocks.iter().peekable();
    let mut place = 0;
    while place < encoded.tokens.len() {
        if let Some(block) = blocks.next_if(|block| block.start <= place) {
            place = block.end;
            pieces.push(Piece { tokens: block.clone(), kind: Kind::Picture });
            continue;
        }
        let kind = if is_learned((place, &encoded.tokens[place])) { Kind::Learned } else { Kind::Given };
        match pieces.last_mut() {
            Some(piece) if piece.kind == kind => piece.tokens.end += 1,
            _ => pieces.push(Piece { tokens: place..place + 1, kind }),
        }
        place += 1;
    }
    pieces
}

/// A text whose control characters do nothing to a terminal.
fn visible(text: &str) -> String {
    let mut visible = String::with_capacity(text.len());
    for char in text.chars() {
        match char.is_control() && !matches!(char, '\n' | '\t') {
            true => visible.extend(char.escape_default()),
            false => visible.push(char),
        }
    }
    visible
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{Part, Token};

    #[test]
    fn neighbours_of_one_kind_are_one_piece_and_pictures_their_own() {
        let token = |learned: u8| Token { id: 7, learned: (learned == 1).then_some(Part::Text) };
        let encoded = Encoded {
            tokens: [1, 0, 0, 0, 0, 0, 1, 1, 0, 1].map(token).to_vec(),
            pictures: Vec::new(),
            soft_tokens: Vec::new(),
            blocks: vec![2..4, 4..6],
        };
        let piece = |tokens, kind| Piece { tokens, kind };
        let expected = [
            piece(0..2, Kind::Given),
            piece(2..4, Kind::Picture),
            piece(4..6, Kind::Picture),
            piece(6..8, Kind::Learned),
            piece(8..9, Kind::Given),
            piece(9..10, Kind::Learned),
        ];
        assert_eq!(pieces(&encoded), expected);
    }

    #[test]
    fn control_characters_are_written_out() {
        assert_eq!(visible("a\tb\n\u{1b}[31mc\r\u{9b}d"), "a\tb\n\\u{1b}[31mc\\r\\u{9b}d");
    }
}
