//! Chat templates: how a model that was trained on conversations wants its prompts written.
//!
//! A template is a Jinja text that comes with the model: in the metadata of a GGUF file, as `chat_template.jinja` in a folder,
//! or in its `tokenizer_config.json`. It is rendered as `transformers` renders it (blocks trimmed, Python's methods of
//! strings), and the special tokens that it writes are read by the tokenizer as tokens. Only what is the same on every day
//! is rendered: to templates that ask whether `strftime_now` is defined it is not, and they write the date that they were made with;
//! to others every day is [`TODAY`].

use super::adapter::base;
use super::gguf::{Gguf, is_gguf};
use super::{ModelError, Text};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value as Data, context};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use std::borrow::Cow;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A day as `strftime` writes it: the one that Llama 3.2's template writes where it is not told another.
const TODAY: [(&str, &str); 13] = [
    ("%Y", "2024"),
    ("%y", "24"),
    ("%m", "07"),
    ("%d", "26"),
    ("%e", "26"),
    ("%B", "July"),
    ("%b", "Jul"),
    ("%A", "Friday"),
    ("%a", "Fri"),
    ("%H", "12"),
    ("%M", "00"),
    ("%S", "00"),
    ("%p", "PM"),
];

/// Most steps of a template.
const MOST_STEPS: u64 = 10_000_000;

/// What a user might say in no task: the place of the words in a rendered prompt.
const WORDS: &str = "\u{e000}";

/// One turn of a conversation.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user` or `assistant`.
    pub role: String,
    /// The words.
    pub content: String,
}

impl Message {
    fn user(words: &str) -> Self {
        Message { role: "user".into(), content: words.into() }
    }
}

/// A template whose marks of what the model itself says, for training (`{% generation %}`), are comments that trim as these do.
fn without_generation(source: &str) -> Cow<'_, str> {
    if !source.contains("generation") {
        return source.into();
    }
    let mut text = String::new();
    let mut pieces = source.split("{%");
    text += pieces.next().unwrap_or_default();
    for piece in pieces {
        let tag = piece.split_once("%}").map(|(tag, rest)| (tag, tag.trim_matches(['-', '+']).trim(), rest));
        match tag {
            Some((tag, "generation" | "endgeneration", rest)) => {
                let [begin, end] = [tag.starts_with('-'), tag.ends_with('-')].map(|trims| if trims { "-" } else { "" });
                text += &format!("{{#{begin} {end}#}}{rest}");
            }
            _ => text += &format!("{{%{piece}"),
        }
    }
    text.into()
}

/// A model's chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    path: PathBuf,
    source: String,
    /// Texts of the tokens at the beginning and the end; empty where the model names none.
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// The template of a folder or a GGUF file; of several the one that is named `default`.
    ///
    /// # Errors
    /// When the model has none, or its file cannot be read.
    pub fn open(model: &Path) -> Result<Self, ModelError> {
        let reason =
            "it has no chat template (in a GGUF file tokenizer.chat_template, in a folder chat_template.jinja or \
                      chat_template of tokenizer_config.json); leave --chat out"
                .to_string();
        Self::find(model)?.ok_or_else(|| ModelError::Config { path: model.into(), reason })
    }

    /// The same, or nothing where the model has none.
    ///
    /// # Errors
    /// When its file cannot be read.
    pub fn find(model: &Path) -> Result<Option<Self>, ModelError> {
        let model = &*base(model)?;
        if is_gguf(model) {
            let gguf = Gguf::open(model)?;
            let key = |key: &str| gguf.metadata.get(&format!("tokenizer.{key}"));
            let token = |id: &str| key("ggml.tokens")?.get(key(id)?.as_u64()? as usize)?.as_str().map(String::from);
            let source = key("chat_template").and_then(Value::as_str).map(String::from);
            return Ok(Self::found(model, source, token("ggml.bos_token_id"), token("ggml.eos_token_id")));
        }
        let path = model.join("tokenizer_config.json");
        let wrong = |reason: String| ModelError::Config { path: path.clone(), reason };
        let config = match path.exists() {
            true => std::fs::read_to_string(&path).map_err(|error| wrong(error.to_string()))?,
            false => "{}".into(),
        };
        let config: Value = serde_json::from_str(&config).map_err(|error| wrong(error.to_string()))?;
        let token = |name: &str| {
            let token = config.get(name)?;
            token.as_str().or_else(|| token.get("content")?.as_str()).map(String::from)
        };
        let of_config = |config: &Value| match config.get("chat_template")? {
            Value::Array(named) => {
                let default = named.iter().find(|entry| entry["name"] == "default")?;
                default["template"].as_str().map(String::from)
            }
            source => source.as_str().map(String::from),
        };
        let path = model.join("chat_template.jinja");
        let beside = match std::fs::read_to_string(&path) {
            Ok(template) => Some(template),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(ModelError::Config { path, reason: error.to_string() }),
        };
        Ok(Self::found(model, beside.or_else(|| of_config(&config)), token("bos_token"), token("eos_token")))
    }

    fn found(model: &Path, source: Option<String>, bos: Option<String>, eos: Option<String>) -> Option<Self> {
        Some(Self::parse(model.into(), source?, bos.unwrap_or_default(), eos.unwrap_or_default()))
    }

    /// A template by its text; `path` is what errors call it.
    pub fn parse(path: PathBuf, source: String, bos: String, eos: String) -> Self {
        ChatTemplate { path, source, bos, eos }
    }

    /// The template's text.
    pub(super) fn source(&self) -> &str {
        &self.source
    }

    /// A conversation as the model wants it written; with `answer`, up to where its next answer begins.
    ///
    /// # Errors
    /// When the template is no Jinja, or refuses the conversation.
    pub fn render(&self, messages: &[Message], answer: bool) -> Result<String, ModelError> {
        let mut jinja = Environment::new();
        // A template comes with the model: it must end.
        jinja.set_fuel(Some(MOST_STEPS));
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        jinja.set_syntax(syntax.expect("the delimiters are Jinja's own"));
        jinja.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        let refuse = |reason: String| -> Result<String, Error> { Err(Error::new(ErrorKind::InvalidOperation, reason)) };
        jinja.add_function("raise_exception", refuse);
        jinja.add_filter("tojson", json);
        if !self.source.contains("strftime_now is") {
            let today = |format: String| TODAY.iter().fold(format, |text, (name, value)| text.replace(name, value));
            jinja.add_function("strftime_now", today);
        }
        let turn = |message: &Message| {
            let Message { role, content } = message.clone();
            Data::from_pairs([("role", role), ("content", content)])
        };
        let messages: Vec<Data> = messages.iter().map(turn).collect();
        let (bos_token, eos_token) = (self.bos.clone(), self.eos.clone());
        // None, as where `transformers` is given none: what is not defined at all is another thing.
        let (tools, documents) = ((), ());
        let given = context! { messages, bos_token, eos_token, tools, documents, add_generation_prompt => answer };
        jinja.render_str(&without_generation(&self.source), given).map_err(|error| {
            let reason = error.detail().map_or_else(|| error.to_string(), String::from);
            ModelError::Config { path: self.path.clone(), reason: format!("its chat template: {reason}") }
        })
    }

    /// Tokens of a user's words, up to where the model's answer begins.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`], when the tokenizer has no token for a part of it, and when the words are not in it.
    pub fn prompt(&self, words: &str, text: &Text) -> Result<Vec<u32>, ModelError> {
        // A template may write words in its own way; that it writes any, some say that are in none.
        if !self.render(&[Message::user(WORDS)], true)?.contains(WORDS) {
            let reason = "its chat template does not write what a user says".into();
            return Err(ModelError::Config { path: self.path.clone(), reason });
        }
        text.rendered(&self.render(&[Message::user(words)], true)?)
    }

    /// Tokens that stand before a user's words, and between them and the model's answer.
    ///
    /// # Errors
    /// As [`ChatTemplate::prompt`], and when the template does not write the words once.
    pub fn around(&self, text: &Text) -> Result<[Vec<u32>; 2], ModelError> {
        let written = self.render(&[Message::user(WORDS)], true)?;
        match written.split(WORDS).collect::<Vec<_>>()[..] {
            [before, behind] => Ok([text.rendered(before)?, text.piece(behind)?]),
            ref pieces => {
                let reason =
                    format!("its chat template writes what a user says {} times; once is needed", pieces.len() - 1);
                Err(ModelError::Config { path: self.path.clone(), reason })
            }
        }
    }
}

/// Plain JSON as Python writes it; Jinja's own is made safe for HTML.
fn json(value: Data, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    for option in ["ensure_ascii", "sort_keys"] {
        if options.get::<Option<bool>>(option)? == Some(true) {
            let reason = format!("tojson with {option}=true is not understood");
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
    }
    options.assert_all_used()?;
    let mut bytes = Vec::new();
    let written = match indent {
        Some(spaces) => {
            let spaces = " ".repeat(spaces.min(MOST_INDENT));
            let formatter = PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut bytes, formatter))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut bytes, Spaced)),
    };
    written.map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(String::from_utf8(bytes).expect("JSON is text"))
}

const MOST_INDENT: usize = 16;

/// With a space behind commas and colons.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + Write>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        to.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        to.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        to.write_all(b": ")
    }
}
