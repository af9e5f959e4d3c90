//! The encoder: hidden states of the model itself, over texts of a fact or a question. Blocks above the layer that they are taken at are
//! not run.

use super::{EditError, Fact};
use crate::device::Cpu;
use crate::memory::Arena;
use crate::model::{Activation, Decoder, Hook, Model, PrefixShape, Setup, Text, likeliest};
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

/// The rows of some layers, in ascending order.
struct States<'l> {
    layers: &'l [usize],
    rows: Mutex<Vec<Vec<f32>>>,
}

impl Hook for States<'_> {
    fn rows(&self, layer: usize, what: Activation, rows: &[f32]) {
        let place = self.layers.iter().position(|wanted| *wanted == layer).filter(|_| what == Activation::Hidden);
        if let Some(place) = place {
            self.rows.lock().expect("nobody panics with the rows")[place].extend_from_slice(rows);
        }
    }

    fn last_layer(&self) -> Option<usize> {
        self.layers.iter().max().copied()
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
        Ok([&self.beginning[..], &self.piece(text)?].concat())
    }

    /// Tokens of a text that follows another.
    ///
    /// # Errors
    /// As [`Encoder::prompt`].
    pub fn piece(&self, text: &str) -> Result<Vec<u32>, EditError> {
        Ok(self.text.piece(text)?)
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
        Ok(self.facts_at(&[self.layer], facts)?.remove(0))
    }

    /// States of questions.
    ///
    /// # Errors
    /// As [`Encoder::facts`].
    pub fn questions(&self, questions: &[String]) -> Result<Vec<Encoded>, EditError> {
        Ok(self.questions_at(&[self.layer], questions)?.remove(0))
    }

    /// States of facts before each of some layers.
    ///
    /// # Errors
    /// As [`Encoder::facts`].
    pub fn facts_at(&self, layers: &[usize], facts: &[Fact]) -> Result<Vec<Vec<Encoded>>, EditError> {
        let texts: Vec<(&str, Option<&str>)> = facts.iter().map(|fact| (&*fact.stem, Some(&*fact.value))).collect();
        self.encode(layers, &texts)
    }

    /// States of questions before each of some layers.
    ///
    /// # Errors
    /// As [`Encoder::facts`].
    pub fn questions_at(&self, layers: &[usize], questions: &[String]) -> Result<Vec<Vec<Encoded>>, EditError> {
        self.encode(layers, &questions.iter().map(|question| (&**question, None)).collect::<Vec<_>>())
    }

    fn encode(&self, layers: &[usize], texts: &[(&str, Option<&str>)]) -> Result<Vec<Vec<Encoded>>, EditError> {
        let mut encoded = vec![Vec::with_capacity(texts.len()); layers.len()];
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
            let states = States { layers, rows: Mutex::new(vec![Vec::new(); layers.len()]) };
            let mut decoder = Decoder::new(self.model, setup(texts.len(), longest), self.cpu, self.arena)?;
            decoder.hook(&states);
            let tokens: Vec<&[u32]> = sequences.iter().map(|(tokens, ..)| &tokens[..]).collect();
            decoder.prefill(&tokens, |_, _, _| ())?;
            drop(decoder);
            let of_layers = states.rows.into_inner().expect("nobody panics with the rows");
            for (rows, encoded) in of_layers.iter().zip(&mut encoded) {
                self.add_up(rows, &sequences, encoded);
            }
        }
        Ok(encoded)
    }

    /// What a layer's rows are of each sequence: its tokens, those of its stem, and whether a value follows.
    fn add_up(&self, rows: &[f32], sequences: &[(Vec<u32>, usize, bool)], encoded: &mut Vec<Encoded>) {
        let (hidden, mut row) = (self.model.config.hidden, 0);
        for (tokens, stem, has_value) in sequences {
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

    /// The likeliest next token of each prompt, behind its prefix where it has one.
    ///
    /// # Errors
    /// When a prompt is too long for the model, or the arena has no room.
    pub fn answers(
        &self,
        prompts: &[Vec<u32>],
        prefixes: &[Option<(PrefixShape, Vec<f32>)>],
    ) -> Result<Vec<u32>, EditError> {
        let mut answers = Vec::with_capacity(prompts.len());
        for (prompts, prefixes) in prompts.chunks(AT_ONCE).zip(prefixes.chunks(AT_ONCE)) {
            let longest = prompts.iter().map(Vec::len).max().unwrap_or(1);
            let before = prefixes.iter().flatten().map(|(shape, _)| shape.tokens).max().unwrap_or(0);
            self.model.check_length(longest + before)?;
            let setup = Setup { chunk_tokens: longest, ..setup(prompts.len(), longest + before) };
            let mut decoder = Decoder::new(self.model, setup, self.cpu, self.arena)?;
            for (sequence, prefix) in prefixes.iter().enumerate() {
                if let Some((shape, numbers)) = prefix {
                    decoder.prefix(sequence, shape, numbers)?;
                }
            }
            let mut answered: Vec<_> = prompts.iter().map(|_| Ok(0)).collect();
            let tokens: Vec<&[u32]> = prompts.iter().map(|prompt| &prompt[..]).collect();
            decoder.prefill(&tokens, |sequence, _, logits| answered[sequence] = likeliest(logits))?;
            answers.extend(answered.into_iter().collect::<Result<Vec<u32>, _>>()?);
        }
        Ok(answers)
    }
}

fn setup(batch: usize, tokens: usize) -> Setup<'static> {
    Setup { batch, ..Setup::of(tokens, DType::F32) }
}
