//! Marks in texts, made of code points that no text may hold (Unicode keeps them for use inside programs).

/// Sixteen digits for the number of a message; the two below are those of generation blocks.
const DIGIT_0: u32 = 0xfdd2;
const OPEN: char = '\u{fde2}';
const CLOSE: char = '\u{fde3}';
const STOP: char = '\u{fde4}';

/// The end of a message's text that a mark stands at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Open,
    Close,
}

/// The mark of the n-th message.
pub(super) fn mark(n: usize, side: Side) -> String {
    let digits = format!("{n:x}");
    let digit = |symbol: char| {
        let value = symbol.to_digit(16).expect("a digit that was just written");
        char::from_u32(DIGIT_0 + value).expect("16 code points from U+FDD2 on")
    };
    let kind = if side == Side::Open { OPEN } else { CLOSE };
    std::iter::once(kind).chain(digits.chars().map(digit)).chain([STOP]).collect()
}

/// Whether a text holds what marks are made of.
pub(super) fn any(text: &str) -> bool {
    text.contains(|symbol| ('\u{fdd2}'..='\u{fdef}').contains(&symbol))
}

/// A text without its marks, and where they were.
#[derive(Debug)]
pub(super) struct Marked {
    pub(super) text: String,
    /// Message, side and place in bytes of `text`, in order.
    marks: Vec<(usize, Side, usize)>,
}

impl Marked {
    /// Marks that are not whole stay in the text.
    pub(super) fn parse(marked: &str) -> Self {
        let mut result = Self { text: String::with_capacity(marked.len()), marks: Vec::new() };
        let mut rest = marked;
        while let Some(at) = rest.find([OPEN, CLOSE]) {
            result.text.push_str(&rest[..at]);
            rest = &rest[at..];
            let side = if rest.starts_with(OPEN) { Side::Open } else { Side::Close };
            let read = rest.find(STOP).and_then(|stop| Some((number(&rest[OPEN.len_utf8()..stop])?, stop)));
            let taken = match read {
                Some((n, stop)) => {
                    result.marks.push((n, side, result.text.len()));
                    stop + STOP.len_utf8()
                }
                None => {
                    result.text.push_str(&rest[..OPEN.len_utf8()]);
                    OPEN.len_utf8()
                }
            };
            rest = &rest[taken..];
        }
        result.text.push_str(rest);
        result
    }

    /// All places of a mark.
    pub(super) fn places(&self, n: usize, side: Side) -> impl Iterator<Item = usize> {
        self.marks.iter().filter(move |mark| (mark.0, mark.1) == (n, side)).map(|mark| mark.2)
    }

    /// The place of a mark that stands there once.
    pub(super) fn place(&self, n: usize, side: Side) -> Option<usize> {
        let mut places = self.places(n, side);
        places.next().filter(|_| places.next().is_none())
    }
}

fn number(digits: &str) -> Option<usize> {
    let digit = |symbol: char| (symbol as u32).checked_sub(DIGIT_0).filter(|&value| value < 16);
    let mut all = digits.chars().map(digit);
    let first = all.next()??;
    all.try_fold(first as usize, |n, digit| n.checked_mul(16)?.checked_add(digit? as usize))
}
