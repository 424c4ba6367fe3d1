//! Training data as JSONL: every line is checked before anything is trained.

use std::path::{Path, PathBuf};

use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde_json::{Map, Value};

use candle_gemma4::Config;

use crate::error::{Error, LineFault, Result, io};
use crate::picture::Picture;
use crate::sample::{Part, Sample, Source};
use crate::vocabulary::Vocabulary;

/// The two kinds of line, for messages.
const ALLOWED: &str = "allowed are {\"prompt\": .., \"completion\": .., \"images\": [..]} and {\"text\": ..}";

/// All samples of a file, in memory.
#[derive(Debug, Clone)]
pub struct Lines {
    samples: Vec<Sample>,
}

impl Lines {
    /// Reads and checks a file, its pictures included. Samples of more than `seq_len` tokens are faults.
    ///
    /// # Errors
    /// The file cannot be read, has no sample, or has lines that cannot be used; all of those are listed.
    pub fn load(path: &Path, vocabulary: &Vocabulary, config: &Config, seq_len: usize) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(io("read", path))?;
        let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
        let folder = path.parent().map(Path::to_path_buf).unwrap_or_default();
        let reader = Reader { vocabulary, config, folder, seq_len };
        let (mut samples, mut faults) = (Vec::new(), Vec::new());
        for (index, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            match reader.read(line) {
                Ok(sample) => samples.push(sample),
                Err(reason) => faults.push(LineFault { line: index + 1, reason }),
            }
        }
        if !faults.is_empty() {
            return Err(Error::Data { path: path.to_path_buf(), lines: samples.len() + faults.len(), faults });
        }
        match samples.is_empty() {
            true => Err(Error::EmptyData { path: path.to_path_buf() }),
            false => Ok(Self { samples }),
        }
    }

    /// The samples, in the order of their lines.
    pub fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// Endless epochs, each in an order of its own.
    pub fn training(&self, seed: u64) -> Epochs<'_> {
        Epochs { samples: &self.samples, order: Vec::new(), started: false, rng: StdRng::seed_from_u64(seed) }
    }
}

/// What is needed to turn one line into a sample.
struct Reader<'a> {
    vocabulary: &'a Vocabulary,
    config: &'a Config,
    folder: PathBuf,
    seq_len: usize,
}

/// The reason why a line cannot be used.
type Fault<T> = std::result::Result<T, String>;

impl Reader<'_> {
    fn read(&self, line: &[u8]) -> Fault<Sample> {
        let text = std::str::from_utf8(line).map_err(|e| {
            format!("not UTF-8 from byte {} of the line on; save the file as UTF-8", e.valid_up_to() + 1)
        })?;
        let value: Value = serde_json::from_str(text).map_err(|e| format!("not valid JSON: {e}"))?;
        let Value::Object(fields) = value else {
            return Err(format!("{} instead of an object; {ALLOWED}", kind(&value)));
        };
        check_fields(&fields)?;
        let sample = match fields.get("text") {
            Some(text) => self.plain_text(string("text", text)?)?,
            None => self.turns(&fields)?,
        };
        match sample.len() > self.seq_len {
            true => Err(format!(
                "{} tokens, but a row has {}; raise --seq-len to at least {} or shorten the line",
                sample.len(),
                self.seq_len,
                sample.len()
            )),
            false => Ok(sample),
        }
    }

    fn plain_text(&self, text: &str) -> Fault<Sample> {
        if text.is_empty() {
            return Err("\"text\" is empty; leave the line out".to_string());
        }
        if text.contains(&self.vocabulary.placeholder) {
            return Err(format!(
                "{} in \"text\"; pictures are allowed in \"prompt\" only",
                self.vocabulary.placeholder
            ));
        }
        let mut sample = Sample::default();
        let ids = self.encode("text", text)?;
        if ids.first() != Some(&self.vocabulary.bos) {
            sample.push(&[self.vocabulary.bos]);
        }
        sample.push_learned(&ids, Part::Text);
        sample.push_learned(&[self.vocabulary.eos], Part::End);
        Ok(sample)
    }

    fn turns(&self, fields: &Map<String, Value>) -> Fault<Sample> {
        let get = |name: &str| match fields.get(name) {
            Some(value) => string(name, value),
            None => Err(format!("no \"{name}\"; {ALLOWED}")),
        };
        // Chat templates take the space around a turn's text away as well.
        let (prompt, completion) = (get("prompt")?.trim(), get("completion")?.trim());
        if completion.is_empty() {
            return Err("\"completion\" is empty; there is nothing to learn from this line".to_string());
        }
        if completion.contains(&self.vocabulary.placeholder) {
            let placeholder = &self.vocabulary.placeholder;
            return Err(format!("{placeholder} in \"completion\"; pictures are allowed in \"prompt\" only"));
        }
        let pieces: Vec<&str> = prompt.split(&self.vocabulary.placeholder).collect();
        let paths = image_paths(fields.get("images"))?;
        if pieces.len() - 1 != paths.len() {
            return Err(format!(
                "{} placeholders {} in \"prompt\", but {} images; every image needs one placeholder, in order",
                pieces.len() - 1,
                self.vocabulary.placeholder,
                paths.len()
            ));
        }
        let vocabulary = self.vocabulary;
        let open_turn = |role| vocabulary.open_turn(role).map_err(|e| e.to_string());
        let mut sample = Sample::default();
        sample.push(&[vocabulary.bos]);
        sample.push(&open_turn("user")?);
        sample.push(&self.encode("prompt", pieces[0])?);
        for (path, piece) in paths.into_iter().zip(&pieces[1..]) {
            let (picture, soft_tokens) = self.picture(path)?;
            sample.pictures.push(picture);
            sample.push(&vocabulary.image(soft_tokens));
            sample.push(&self.encode("prompt", piece)?);
        }
        sample.push(&[vocabulary.turn_close()]);
        sample.push(vocabulary.newline());
        sample.push(&open_turn("model")?);
        sample.push_learned(&self.encode("completion", completion)?, Part::Text);
        sample.push_learned(&[vocabulary.turn_close()], Part::End);
        sample.push(vocabulary.newline());
        Ok(sample)
    }

    fn encode(&self, field: &str, text: &str) -> Fault<Vec<u32>> {
        let ids = self.vocabulary.encode(text).map_err(|e| e.to_string())?;
        match self.vocabulary.first_reserved(&ids) {
            None => Ok(ids),
            Some(id) => Err(format!(
                "{} in \"{field}\" stands for a picture, a video or a sound, which cannot be given here; remove it",
                self.vocabulary.token(id)
            )),
        }
    }

    fn picture(&self, path: &str) -> Fault<(Picture, usize)> {
        let Some(vision) = self.config.vision.as_ref() else {
            return Err(format!("image {path}: this model has no vision tower; use a vision-language checkpoint"));
        };
        let picture = Picture::open(&self.folder.join(path)).map_err(|e| format!("image {path}: {e}"))?;
        let soft_tokens = picture.soft_tokens(vision).map_err(|e| format!("image {path} {e}"))?;
        Ok((picture, soft_tokens))
    }
}

fn check_fields(fields: &Map<String, Value>) -> Fault<()> {
    if fields.contains_key("messages") {
        return Err(format!("chat \"messages\" are not supported yet; {ALLOWED}"));
    }
    let known = ["prompt", "completion", "images", "text"];
    if let Some(name) = fields.keys().find(|name| !known.contains(&name.as_str())) {
        return Err(format!("unknown field \"{name}\"; {ALLOWED}"));
    }
    match fields.contains_key("text") && fields.len() > 1 {
        true => Err(format!("\"text\" beside other fields; {ALLOWED}")),
        false => Ok(()),
    }
}

fn string<'a>(name: &str, value: &'a Value) -> Fault<&'a str> {
    value.as_str().ok_or_else(|| format!("\"{name}\" is {}; a string is needed", kind(value)))
}

fn image_paths(value: Option<&Value>) -> Fault<Vec<&str>> {
    let wrong = |value: &Value| format!("\"images\" is {}; a list of paths is needed", kind(value));
    match value {
        None => Ok(Vec::new()),
        Some(Value::Array(list)) => list
            .iter()
            .map(|item| item.as_str().ok_or_else(|| format!("{} in \"images\"; paths are strings", kind(item))))
            .collect(),
        Some(other) => Err(wrong(other)),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A stream of samples: each one once per epoch.
#[derive(Debug, Clone)]
pub struct Epochs<'a> {
    samples: &'a [Sample],
    /// What is left of this epoch, taken from the end.
    order: Vec<usize>,
    started: bool,
    rng: StdRng,
}

impl Source for Epochs<'_> {
    fn next_sample(&mut self) -> Result<Option<Sample>> {
        if !self.started {
            self.order = (0..self.samples.len()).collect();
            self.order.shuffle(&mut self.rng);
            self.started = true;
        }
        let next = self.order.pop();
        self.started = next.is_some();
        Ok(next.map(|index| self.samples[index].clone()))
    }
}
