//! The encoder: hidden states of the model itself, over texts of a fact or a question.

use super::{EditError, Fact};
use crate::device::Cpu;
use crate::format::KvFormat;
use crate::memory::Arena;
use crate::model::{Activation, Decoder, Hook, Model, Setup, Text};
use crate::tensor::DType;
use std::sync::Mutex;

/// Texts that go through the model together.
const AT_ONCE: usize = 64;

/// Reads texts with a model and keeps hidden states of one layer.
pub struct Encoder<'a> {
    /// The model.
    pub model: &'a Model,
    /// Its tokenizer.
    pub text: &'a Text,
    /// Where it runs.
    pub cpu: &'a Cpu,
    /// The layer before whose attention states are taken, behind their norm.
    pub layer: usize,
    beginning: Vec<u32>,
    arena: &'a Arena,
}

/// States of a text.
#[derive(Debug, Clone, PartialEq)]
pub struct Encoded {
    /// The sum over a stem or a question, `[hidden]`: what a key adds to it is the same among few words and among many.
    pub subject: Vec<f32>,
    /// That of a value's last token.
    pub value: Option<Vec<f32>>,
}

/// The rows of one layer.
struct States {
    layer: usize,
    rows: Mutex<Vec<f32>>,
}

impl Hook for States {
    fn rows(&self, layer: usize, what: Activation, rows: &[f32]) {
        if layer == self.layer && what == Activation::Hidden {
            self.rows.lock().expect("nobody panics with the rows").extend_from_slice(rows);
        }
    }
}

impl<'a> Encoder<'a> {
    /// An encoder of a model's states before `layer`.
    ///
    /// # Errors
    /// When the tokenizer cannot say what it begins texts with.
    pub fn new(
        model: &'a Model,
        text: &'a Text,
        layer: usize,
        cpu: &'a Cpu,
        arena: &'a Arena,
    ) -> Result<Self, EditError> {
        Ok(Encoder { model, text, cpu, layer, beginning: text.beginning()?, arena })
    }

    /// Whether a word is one token behind a space.
    pub fn is_one_token(&self, word: &str) -> bool {
        self.text.piece(&format!(" {word}")).is_ok_and(|tokens| tokens.len() == 1)
    }

    /// Tokens of a prompt, as every text of the model begins.
    ///
    /// # Errors
    /// When the tokenizer has no token for a part of it.
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>, EditError> {
        Ok([&self.beginning[..], &self.text.piece(text)?].concat())
    }

    /// The one token of a value.
    ///
    /// # Errors
    /// When it has another number of tokens.
    pub fn value(&self, value: &str) -> Result<u32, EditError> {
        match self.text.piece(value)?[..] {
            [token] => Ok(token),
            ref tokens => Err(EditError::Fact {
                text: value.into(),
                reason: format!("a value of {} tokens; the read-out gives one token", tokens.len()),
            }),
        }
    }

    /// States of facts.
    ///
    /// # Errors
    /// When a text is empty or longer than the model can read, or the arena has no room.
    pub fn facts(&self, facts: &[Fact]) -> Result<Vec<Encoded>, EditError> {
        let texts: Vec<(&str, Option<&str>)> = facts.iter().map(|fact| (&*fact.stem, Some(&*fact.value))).collect();
        self.encode(&texts)
    }

    /// States of questions.
    ///
    /// # Errors
    /// As [`Encoder::facts`].
    pub fn questions(&self, questions: &[String]) -> Result<Vec<Encoded>, EditError> {
        self.encode(&questions.iter().map(|question| (&**question, None)).collect::<Vec<_>>())
    }

    fn encode(&self, texts: &[(&str, Option<&str>)]) -> Result<Vec<Encoded>, EditError> {
        let mut encoded = Vec::with_capacity(texts.len());
        for texts in texts.chunks(AT_ONCE) {
            let mut sequences = Vec::with_capacity(texts.len());
            for (stem, value) in texts {
                let stem_tokens = self.text.piece(stem)?;
                let value = value.map_or(Ok(Vec::new()), |value| self.text.piece(value))?;
                let tokens = [&self.beginning[..], &stem_tokens, &value].concat();
                let most = self.model.config.most_tokens();
                let wrong = |reason| EditError::Fact { text: stem.chars().take(60).collect(), reason };
                if stem_tokens.is_empty() {
                    return Err(wrong("a text without tokens; give at least one".into()));
                }
                if tokens.len() > most {
                    return Err(wrong(format!("{} tokens; the encoder reads at most {most}", tokens.len())));
                }
                sequences.push((tokens, stem_tokens.len(), !value.is_empty()));
            }
            let longest = sequences.iter().map(|(tokens, ..)| tokens.len()).max().unwrap_or(1);
            let states = States { layer: self.layer, rows: Mutex::default() };
            let mut decoder = Decoder::new(self.model, setup(texts.len(), longest), self.cpu, self.arena)?;
            decoder.hook(&states);
            let tokens: Vec<&[u32]> = sequences.iter().map(|(tokens, ..)| &tokens[..]).collect();
            decoder.prefill(&tokens, |_, _, _| ())?;
            drop(decoder);
            let rows = states.rows.into_inner().expect("nobody panics with the rows");
            let (hidden, mut row) = (self.model.config.hidden, 0);
            for (tokens, stem, has_value) in &sequences {
                let own = &rows[row * hidden..][..tokens.len() * hidden];
                let mut subject = vec![0.0; hidden];
                for state in own.chunks_exact(hidden).skip(self.beginning.len()).take(*stem) {
                    subject.iter_mut().zip(state).for_each(|(sum, value)| *sum += value);
                }
                let value = has_value.then(|| own[own.len() - hidden..].to_vec());
                encoded.push(Encoded { subject, value });
                row += tokens.len();
            }
        }
        Ok(encoded)
    }

    /// The likeliest next token of each prompt, behind its prefix where it has one; and bytes of keys and values.
    ///
    /// # Errors
    /// When a prompt is too long for the model, or the arena has no room.
    pub fn answers(
        &self,
        prompts: &[Vec<u32>],
        prefixes: &[Option<Vec<f32>>],
        shape: &crate::model::PrefixShape,
    ) -> Result<(Vec<u32>, u64), EditError> {
        let (mut answers, mut most_bytes) = (Vec::with_capacity(prompts.len()), 0);
        for (prompts, prefixes) in prompts.chunks(AT_ONCE).zip(prefixes.chunks(AT_ONCE)) {
            let longest = prompts.iter().map(Vec::len).max().unwrap_or(1);
            self.model.check_length(longest + shape.tokens)?;
            let setup = Setup { chunk_tokens: longest, ..setup(prompts.len(), longest + shape.tokens) };
            let mut decoder = Decoder::new(self.model, setup, self.cpu, self.arena)?;
            for (sequence, prefix) in prefixes.iter().enumerate() {
                if let Some(prefix) = prefix {
                    decoder.prefix(sequence, shape, prefix)?;
                }
            }
            let mut likeliest = vec![0; prompts.len()];
            let tokens: Vec<&[u32]> = prompts.iter().map(|prompt| &prompt[..]).collect();
            decoder.prefill(&tokens, |sequence, _, logits| likeliest[sequence] = argmax(logits))?;
            most_bytes = decoder.most_kv_bytes().max(most_bytes);
            answers.extend(likeliest);
        }
        Ok((answers, most_bytes))
    }
}

fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap_or(0) as u32
}

fn setup(batch: usize, tokens: usize) -> Setup<'static> {
    Setup {
        kernel: "tiled",
        batch,
        max_tokens: tokens,
        chunk_tokens: tokens,
        all_logits: false,
        dtype: DType::F32,
        kv_format: KvFormat::plain(DType::F32),
        columns: &[],
    }
}
