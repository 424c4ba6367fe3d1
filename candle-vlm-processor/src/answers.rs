//! What the assistant wrote in a rendered chat: what a model is trained on.
//!
//! Templates move, strip and drop text by the place of a message, so the beginning of a chat, rendered alone, need not
//! be the beginning of the whole. All places are therefore taken from the one full rendering. What begins and ends an
//! answer is learned from a probe chat; a second rendering with marks around the text of every message proves that the
//! answers found hold the assistant's text and nobody else's. Whatever cannot be proved is an error.

mod marks;

use std::ops::Range;

use self::marks::{Marked, Side};
use crate::chat::{ChatEncoder, EncodedChat};
use crate::error::{Error, Result};
use crate::message::Message;
use crate::template::TemplateInputs;

const ASSISTANT: &str = "assistant";

/// One stretch of what the assistant wrote, in bytes of the rendered text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// All of it but its end.
    pub text: Range<usize>,
    /// The token right behind, by which the model says that it is done.
    pub end: Range<usize>,
}

impl Answer {
    /// Text and end.
    pub fn whole(&self) -> Range<usize> {
        self.text.start..self.end.end
    }
}

/// Finds what the assistant wrote in the chats of one template.
#[derive(Clone, Debug)]
pub struct AnswerFinder {
    /// Or why a probe chat did not tell.
    turns: Result<Turns, String>,
}

impl AnswerFinder {
    /// Asks the template once. One that does not tell is no error yet: its chats may have `{% generation %}` blocks.
    pub fn new(chat: &ChatEncoder) -> Self {
        Self { turns: Turns::of(chat).map_err(reason_of) }
    }

    /// Everything that the assistant wrote in a chat, in order: what stands in `{% generation %}` blocks, or, in a
    /// chat without any, what stands between the texts by which the template begins and ends answers.
    ///
    /// # Errors
    /// It cannot be told without doubt: a block or an answer ends without a special token, the template changes text by
    /// what stands in it, or a message holds the text that begins or ends an answer.
    pub fn find(
        &self,
        chat: &ChatEncoder,
        messages: &[Message],
        inputs: &TemplateInputs,
        encoded: &EncodedChat,
    ) -> Result<Vec<Answer>> {
        match (&self.turns, encoded.generated.is_empty()) {
            (_, false) => of_generated(chat, encoded),
            (Ok(turns), true) => turns.answers(chat, messages, inputs, encoded),
            (Err(reason), true) => Err(fault(format!("{reason}; give it {{% generation %}} blocks"))),
        }
    }
}

/// How a template begins and ends what the assistant writes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Turns {
    header: String,
    end: String,
    /// What opens and closes the answer of a tool, where a template writes it inside the assistant's turn.
    tool: Option<[String; 2]>,
}

impl Turns {
    /// Learns it from a small chat.
    fn of(chat: &ChatEncoder) -> Result<Self> {
        let message = |role: &str, n| Message::text(role, &marks::mark(n, Side::Open));
        let messages = [message("user", 0), message(ASSISTANT, 1), message("user", 2), message(ASSISTANT, 3)];
        let whole = Marked::parse(&chat.render(&messages, &TemplateInputs::default())?.text);
        let place = |n| whole.place(n, Side::Open).ok_or_else(|| fault("the template does not write every message"));
        let gap = |n: usize| Ok(whole.text.get(place(n)?..place(n + 1)?).unwrap_or_default());
        let after_question = |prompt: bool| {
            let inputs = TemplateInputs { add_generation_prompt: prompt, ..TemplateInputs::default() };
            let one = chat.render(&messages[..1], &inputs).map(|rendered| Marked::parse(&rendered.text));
            one.ok().and_then(|one| Some(one.text[one.place(0, Side::Open)?..].to_owned()))
        };
        let question_end = after_question(false).unwrap_or_default();
        let mut header = common_start(gap(0)?, gap(2)?);
        // What a model is given before it writes is not its own, unless the template knows no such prompt.
        if let Some(prompt) = after_question(true).filter(|prompt| prompt.len() > question_end.len()) {
            header = common_start(header, &prompt);
        }
        let header = header.strip_prefix(&question_end).filter(|rest| !rest.is_empty()).unwrap_or(header).to_owned();
        if header.is_empty() {
            return Err(fault("the template writes nothing that tells where an answer begins"));
        }
        let end = chat.tokenizer().special_at_start(gap(1)?.trim_start());
        let end = end.ok_or_else(|| fault("the template puts no special token behind an answer"))?.to_owned();
        let named = |field| chat.tokenizer().named_token(field).map(|(token, _)| token).ok();
        let tool = named("str_token").zip(named("etr_token")).map(|(open, close)| [open, close]);
        Ok(Self { header, end, tool })
    }

    fn answers(
        &self,
        chat: &ChatEncoder,
        messages: &[Message],
        inputs: &TemplateInputs,
        encoded: &EncodedChat,
    ) -> Result<Vec<Answer>> {
        if let Some(index) = messages.iter().position(|m| m.role() == ASSISTANT && m.holds(&self.end)) {
            let end = &self.end;
            return Err(fault(format!("messages[{index}] holds {end}, which ends an answer; remove it")));
        }
        let answers = self.find(&encoded.rendered)?;
        let marked = marked(chat, messages, inputs, &encoded.rendered)?;
        check(messages, &answers, &marked)?;
        Ok(answers)
    }

    /// From each header to the first end behind it, without the answers of tools.
    fn find(&self, rendered: &str) -> Result<Vec<Answer>> {
        let mut answers = Vec::new();
        let mut at = 0;
        while let Some(found) = rendered[at..].find(&self.header) {
            let start = at + found + self.header.len();
            let next = rendered[start..].find(&self.header).map_or(rendered.len(), |next| start + next);
            let end = rendered[start..next].find(&self.end).map(|end| start + end);
            let end = end.ok_or_else(|| fault(format!("an answer does not end with {}", self.end)))?;
            self.split(rendered, start..end, &mut answers)?;
            at = end;
        }
        Ok(answers)
    }

    /// Leaves out what tools answered; the token that calls for it ends the stretch before.
    fn split(&self, rendered: &str, turn: Range<usize>, answers: &mut Vec<Answer>) -> Result<()> {
        let mut start = turn.start;
        if let Some([open, close]) = &self.tool {
            while let Some(at) = rendered[start..turn.end].find(open.as_str()).map(|at| start + at) {
                let closed = rendered[at..turn.end].find(close.as_str());
                let closed = closed.ok_or_else(|| fault(format!("{open} in an answer without {close}")))?;
                if at > start {
                    answers.push(Answer { text: start..at, end: at..at + open.len() });
                }
                start = at + closed + close.len();
            }
        }
        answers.push(Answer { text: start..turn.end, end: turn.end..turn.end + self.end.len() });
        Ok(())
    }
}

/// What stands in `{% generation %}` blocks, each with the token that ends it, inside or right behind.
fn of_generated(chat: &ChatEncoder, encoded: &EncodedChat) -> Result<Vec<Answer>> {
    let rendered = &encoded.rendered;
    let mut blocks: Vec<Range<usize>> = Vec::new();
    let mut sorted = encoded.generated.clone();
    sorted.sort_by_key(|block| (block.start, block.end));
    for block in sorted {
        match blocks.last_mut().filter(|last| last.end >= block.start) {
            Some(last) => last.end = last.end.max(block.end),
            None => blocks.push(block),
        }
    }
    let answer = |block: Range<usize>| {
        let written = rendered[block.clone()].trim_end();
        let stop = block.start + written.len();
        if let Some(end) = chat.tokenizer().special_at_end(written) {
            return Ok(Answer { text: block.start..stop - end.len(), end: stop - end.len()..stop });
        }
        let behind = chat.tokenizer().special_at_start(&rendered[block.end..]);
        let end = behind.ok_or_else(|| fault("a generation block of the template ends without a special token"))?;
        Ok(Answer { text: block.clone(), end: block.end..block.end + end.len() })
    };
    blocks.into_iter().map(answer).collect()
}

/// The rendering with marks around the text of every message; without its marks it is the rendering itself.
fn marked(chat: &ChatEncoder, messages: &[Message], inputs: &TemplateInputs, rendered: &str) -> Result<Marked> {
    if marks::any(rendered) {
        return Err(fault("a message holds U+FDD2 to U+FDEF, which are no characters"));
    }
    // Some templates look at how an answer begins or ends; then the mark at the other side will do.
    for sides in [&[Side::Open, Side::Close][..], &[Side::Close], &[Side::Open]] {
        let mark = |(n, message): (usize, &Message)| {
            let side = |side| match message.role() != ASSISTANT || sides.contains(&side) {
                true => marks::mark(n, side),
                false => String::new(),
            };
            message.around(&side(Side::Open), &side(Side::Close)).unwrap_or_else(|| message.clone())
        };
        let messages: Vec<_> = messages.iter().enumerate().map(mark).collect();
        // A template may refuse a text that it does not expect.
        if let Ok(again) = chat.render(&messages, inputs) {
            let marked = Marked::parse(&again.text);
            if marked.text == rendered {
                return Ok(marked);
            }
        }
    }
    Err(fault("the template changes the text of messages by what stands in them; give it {% generation %} blocks"))
}

/// Every text of the assistant stands in an answer, no other text does, and no answer is without an assistant.
fn check(messages: &[Message], answers: &[Answer], marked: &Marked) -> Result<()> {
    let mut owned = vec![false; answers.len()];
    let mut silent = 0;
    let mut last = 0;
    for (n, message) in messages.iter().enumerate() {
        let role = message.role();
        let places: Vec<usize> = [Side::Open, Side::Close].iter().flat_map(|&side| marked.places(n, side)).collect();
        if places.len() > 2 {
            return Err(fault(format!("the template writes messages[{n}] more than once")));
        }
        let (Some(&first), Some(&end)) = (places.first(), places.last()) else {
            silent += usize::from(role == ASSISTANT);
            if role == ASSISTANT && message.around("", "").is_some() {
                return Err(fault(format!("the template does not write the text of messages[{n}]")));
            }
            continue;
        };
        if role != ASSISTANT {
            let inside = |answer: &Answer| answer.text.start < end && first < answer.end.end;
            if answers.iter().any(inside) {
                return Err(fault(format!("the text of messages[{n}] ({role}) stands in what looks like an answer")));
            }
            continue;
        }
        for place in places {
            let holds = |answer: &Answer| answer.text.start <= place && place <= answer.text.end;
            let at = answers[last..].iter().position(holds).map(|at| last + at);
            let at = at.ok_or_else(|| fault(format!("messages[{n}] does not stand where the template writes answers")))?;
            owned[at] = true;
            last = at;
        }
    }
    match owned.iter().filter(|&&owned| !owned).count() > silent {
        true => Err(fault("a message holds the text that begins an answer; remove it")),
        false => Ok(()),
    }
}

fn fault(reason: impl Into<String>) -> Error {
    Error::Answers { reason: reason.into() }
}

fn common_start<'a>(a: &'a str, b: &str) -> &'a str {
    let same = a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
    &a[..same]
}

fn reason_of(error: Error) -> String {
    match error {
        Error::Answers { reason } => reason,
        other => other.to_string(),
    }
}
