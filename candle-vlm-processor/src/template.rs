//! Chat templates, rendered as transformers does it with Jinja2.

mod clock;
mod generation;
mod json;
mod limits;
mod methods;
mod python;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::time::SystemTime;

use minijinja::{Environment, Error as JinjaError, ErrorKind, Value};

use crate::error::{Error, Result};
use crate::files;
use crate::message::Message;

/// Name of the template that is used unless another one is asked for.
const DEFAULT: &str = "default";

/// The chat templates of a checkpoint, compiled.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Per name, how the template is stored.
    templates: BTreeMap<String, Stored>,
}

/// Names under which the engine keeps a template.
#[derive(Debug)]
struct Stored {
    plain: String,
    /// The same template with marks around what the model generates; `None` if it has no `{% generation %}`.
    marked: Option<String>,
}

/// What a template is rendered with, besides the messages. All of it is optional.
#[derive(Clone, Debug, Default)]
pub struct TemplateInputs {
    /// Which of several named templates; `None`: the one named `default`.
    pub template: Option<String>,
    /// End with the header of an answer that is yet to be generated.
    pub add_generation_prompt: bool,
    /// JSON schemas of tools, as a list.
    pub tools: Option<Value>,
    /// Documents to answer from, as a list.
    pub documents: Option<Value>,
    /// More variables, such as `enable_thinking`; they win over special tokens of the same name.
    pub variables: BTreeMap<String, Value>,
    /// The time that `strftime_now` tells, in UTC; `None`: now.
    ///
    /// DIFFERENCE: transformers tells the local time.
    pub now: Option<SystemTime>,
}

/// A rendered chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// Byte ranges of what stands inside `{% generation %}` blocks; empty if the template has none.
    pub generated: Vec<Range<usize>>,
}

impl ChatTemplate {
    /// Finds the templates of a checkpoint folder: the old `chat_template.json`, `chat_template.jinja` and
    /// `additional_chat_templates/*.jinja`, in that order; without any of these, `chat_template` in
    /// `tokenizer_config.json`, a text or a list of named ones.
    ///
    /// # Errors
    /// There is none, or one does not compile (with its line).
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let mut sources = named_files(folder)?;
        if let Some(text) = files::text(folder, "chat_template.jinja")? {
            sources.insert(DEFAULT.into(), text);
        }
        if let Some(config) = files::json(folder, "chat_template.json")? {
            sources.extend(in_config("chat_template.json", &config["chat_template"])?);
        }
        if sources.is_empty()
            && let Some(config) = files::json(folder, "tokenizer_config.json")?
        {
            sources = in_config("tokenizer_config.json", &config["chat_template"])?;
        }
        if sources.is_empty() {
            return Err(Error::MissingFile {
                folder: folder.into(),
                files: vec!["chat_template.jinja", "chat_template in tokenizer_config.json"],
                fix: "write the template of the model into chat_template.jinja",
            });
        }
        Self::from_named(sources)
    }

    /// One template from its source, named `default`.
    ///
    /// # Errors
    /// It does not compile.
    pub fn from_source(source: &str) -> Result<Self> {
        Self::from_named(BTreeMap::from([(DEFAULT.to_owned(), source.to_owned())]))
    }

    /// Several named templates.
    ///
    /// # Errors
    /// One does not compile.
    pub fn from_named(sources: BTreeMap<String, String>) -> Result<Self> {
        let mut environment = python::environment();
        let mut templates = BTreeMap::new();
        for (name, source) in sources {
            let source = source.replace("\r\n", "\n").replace('\r', "\n"); // as Jinja2 reads it
            limits::check(&source).map_err(|reason| Error::Template { name: name.clone(), reason })?;
            let marked = generation::replace_tags(&source, generation::MARKED_FILTER);
            let plain = generation::replace_tags(&source, generation::PLAIN_FILTER).unwrap_or(source);
            let stored =
                Stored { plain: format!("plain {name}"), marked: marked.as_ref().map(|_| format!("marked {name}")) };
            environment.add_template_owned(stored.plain.clone(), plain).map_err(|e| fault(&name, &e))?;
            if let (Some(marked), Some(key)) = (marked, &stored.marked) {
                environment.add_template_owned(key.clone(), marked).map_err(|e| fault(&name, &e))?;
            }
            templates.insert(name, stored);
        }
        Ok(Self { environment, templates })
    }

    /// Names of the templates.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.templates.keys().map(String::as_str)
    }

    /// Renders messages. `special_tokens` become variables, such as `bos_token`.
    ///
    /// # Errors
    /// No template of that name; the template fails or calls `raise_exception`.
    pub fn render(
        &self,
        messages: &[Message],
        inputs: &TemplateInputs,
        special_tokens: &BTreeMap<String, String>,
    ) -> Result<Rendered> {
        let name = inputs.template.as_deref().unwrap_or(DEFAULT);
        let Some(stored) = self.templates.get(name) else {
            let names: Vec<_> = self.names().collect();
            return Err(Error::Template {
                name: name.into(),
                reason: format!("there is no template of this name; there are: {}", names.join(", ")),
            });
        };
        let variables = variables(messages, inputs, special_tokens);
        let render = |key: &str| {
            let template = self.environment.get_template(key);
            template.and_then(|t| t.render(&variables)).map_err(|e| fault(name, &e))
        };
        let text = render(&stored.plain)?;
        let generated = match &stored.marked {
            Some(key) => generation::spans(name, &text, &render(key)?)?,
            None => Vec::new(),
        };
        Ok(Rendered { text, generated })
    }
}

/// Everything that a template sees, as one map.
fn variables(messages: &[Message], inputs: &TemplateInputs, special_tokens: &BTreeMap<String, String>) -> Value {
    let now = inputs.now.unwrap_or_else(SystemTime::now);
    let strftime_now = move |format: &str| {
        clock::strftime(now, format).map_err(|reason| JinjaError::new(ErrorKind::InvalidOperation, reason))
    };
    let list_or_none = |list: &Option<Value>| list.clone().unwrap_or(Value::from(()));
    let mut all: BTreeMap<String, Value> =
        special_tokens.iter().map(|(name, token)| (name.clone(), Value::from(token))).collect();
    all.insert("strftime_now".into(), Value::from_function(strftime_now));
    all.extend(inputs.variables.clone());
    all.insert("messages".into(), messages.iter().map(|m| m.template_value().clone()).collect());
    all.insert("tools".into(), list_or_none(&inputs.tools));
    all.insert("documents".into(), list_or_none(&inputs.documents));
    all.insert("add_generation_prompt".into(), Value::from(inputs.add_generation_prompt));
    Value::from_pairs(all)
}

/// The files of `additional_chat_templates`, by their names without extension.
fn named_files(folder: &Path) -> Result<BTreeMap<String, String>> {
    let folder = folder.join("additional_chat_templates");
    let fault = |cause| Error::Io { path: folder.clone(), cause };
    let mut sources = BTreeMap::new();
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Ok(sources),
        Err(cause) => return Err(fault(cause)),
    };
    for entry in entries {
        let path = entry.map_err(fault)?.path();
        let (Some(stem), Some(file)) = (path.file_stem(), path.file_name()) else { continue };
        if path.extension().is_some_and(|e| e == "jinja")
            && let Some(text) = files::text(&folder, &file.to_string_lossy())?
        {
            sources.insert(stem.to_string_lossy().into_owned(), text);
        }
    }
    Ok(sources)
}

/// The field `chat_template` of a configuration: a text, or a list of `{name, template}`.
fn in_config(file: &str, value: &serde_json::Value) -> Result<BTreeMap<String, String>> {
    let fault = || Error::Setting {
        file: file.into(),
        field: "chat_template".into(),
        value: value.to_string().chars().take(80).collect(),
        reason: "must be a text, or a list of objects with a name and a template".into(),
    };
    match value {
        serde_json::Value::Null => Ok(BTreeMap::new()),
        serde_json::Value::String(text) => Ok(BTreeMap::from([(DEFAULT.into(), text.clone())])),
        serde_json::Value::Array(list) => list
            .iter()
            .map(|entry| match (entry["name"].as_str(), entry["template"].as_str()) {
                (Some(name), Some(template)) => Ok((name.to_owned(), template.to_owned())),
                _ => Err(fault()),
            })
            .collect(),
        _ => Err(fault()),
    }
}

/// The engine's error with its line, and what caused it.
fn fault(name: &str, error: &JinjaError) -> Error {
    let mut reason = match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => "it runs too long or makes too long a text; does it loop over a loop?".to_owned(),
        (_, Some(detail)) => detail.to_owned(),
        (kind, None) => kind.to_string(),
    };
    if let Some(line) = error.line() {
        reason = format!("line {line}: {reason}");
    }
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        reason = format!("{reason}: {cause}");
        source = cause.source();
    }
    Error::Template { name: name.into(), reason }
}
