//! What is read: sequences of generated tasks and text, and which of their tokens are targets.
//!
//! A sequence begins as every text of the model. A task's context follows, then as many of its questions with
//! their answers as there is room for: one context with many answers teaches more than many with one. The tokens of
//! answers count in the loss, those of plain text less, those of keys and values that nothing foretells not at all. Plain
//! text is sentences of a grammar, or pieces of the recipe's own text where it has one.
//! What a sequence is depends on the seed and its number alone.

use super::loss::Target;
use super::network::Batch;
use super::recipe::{DataSpec, Evaluation, Recipe, SourceSpec};
use super::text::TextSource;
use super::vocabulary::Vocabulary;
use crate::device::Cpu;
use crate::named::NamedError;
use crate::task::{self, Draw, Sample, Task, TaskError, Tokens, text};
use rand::seq::{SliceRandom, index};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use std::ops::Range;

/// Between the seeds of what is trained on and what is held out.
const HELD_OUT: u64 = 0x5EED_0000_0000_0000;

/// Tokens of a quoted span, and how many of its first ones are not judged: nothing says yet where they come from.
const QUOTED_TOKENS: Range<usize> = 8..65;
const QUOTED_UNJUDGED: usize = 2;

/// Different words in all lists of `echo`, and how many a list has.
const ECHO_WORDS: usize = 300;
const LIST_WORDS: Range<usize> = 3..9;

/// Data that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// No such task.
    #[error(transparent)]
    Name(#[from] NamedError),
    /// A task that does not fit.
    #[error(transparent)]
    Task(#[from] TaskError),
    /// A text that cannot be read or is too short.
    #[error("{0}")]
    Text(String),
}

enum Kind {
    Text,
    Quotes,
    Needles,
    Echo,
    Task(Box<dyn Task>),
}

struct Source {
    spec: SourceSpec,
    kind: Kind,
}

/// Everything that sequences are made from.
pub struct Data<'a> {
    vocabulary: &'a Vocabulary,
    sources: Vec<Source>,
    text: Option<TextSource<'a>>,
    text_weight: f32,
    seed: u64,
}

/// Tokens, each with its weight in the loss when it is the next one.
struct Sequence<'a> {
    vocabulary: &'a Vocabulary,
    tokens: Vec<(u32, f32)>,
    /// Tokens that there must be: one more than are read.
    wanted: usize,
}

impl<'a> Sequence<'a> {
    /// The beginning of one of `len + 1` tokens.
    fn begun(vocabulary: &'a Vocabulary, len: usize) -> Self {
        let tokens = vocabulary.begin().iter().map(|&token| (token, 0.0)).collect();
        Sequence { vocabulary, tokens, wanted: len + 1 }
    }

    fn room(&self) -> usize {
        self.wanted.saturating_sub(self.tokens.len())
    }

    fn push(&mut self, text: &str, weight: f32) {
        self.extend(&self.vocabulary.encode(text), weight);
    }

    fn extend(&mut self, tokens: &[u32], weight: f32) {
        self.tokens.extend(tokens.iter().map(|&token| (token, weight)));
    }

    /// A question and its answer, if there is room for both; says whether there was.
    fn ask(&mut self, prompt: &str, expected: &str) -> bool {
        let before = self.tokens.len();
        self.push(prompt, 0.0);
        self.push(expected, 1.0);
        let fits = self.tokens.len() <= self.wanted;
        if !fits {
            self.tokens.truncate(before);
        }
        fits
    }
}

impl<'a> Data<'a> {
    /// The sources of a recipe, each tried once at each length of a stage.
    ///
    /// # Errors
    /// When a task is not known or does not fit into a stage in which it would be drawn.
    pub fn new(recipe: &Recipe, vocabulary: &'a Vocabulary) -> Result<Self, DataError> {
        let DataSpec { text_weight, text, sources } = &recipe.data;
        let source = |spec: &SourceSpec| {
            let kind = match spec.source.as_str() {
                "text" => Kind::Text,
                "quotes" => Kind::Quotes,
                "needles" => Kind::Needles,
                "echo" => Kind::Echo,
                name => Kind::Task(task::task(name)?),
            };
            Ok(Source { spec: spec.clone(), kind })
        };
        let sources: Vec<Source> = sources.iter().map(source).collect::<Result<_, NamedError>>()?;
        let longest = recipe.stages.iter().map(|stage| stage.length).max().unwrap_or(0);
        let open = |path| TextSource::of_documents(path, vocabulary, longest + 1, recipe.seed).map_err(DataError::Text);
        let text = text.as_deref().map(open).transpose()?;
        let data = Data { vocabulary, sources, text, text_weight: *text_weight, seed: recipe.seed };
        for stage in &recipe.stages {
            for source in data.sources.iter().filter(|source| source.spec.serves(stage.length)) {
                data.sequence(source, stage.length, 0)?;
            }
        }
        Ok(data)
    }

    /// The batch of a step: `batch` sequences of `len` tokens, from number `first` on; those that are held out take
    /// of the recipe's text what no step reads.
    ///
    /// # Errors
    /// When a task does not fit.
    pub fn batch(&self, cpu: &Cpu, first: u64, [batch, len]: [usize; 2]) -> Result<Batch, DataError> {
        let numbers: Vec<u64> = (first..first + batch as u64).collect();
        let make = |&number: &u64| self.sequence(self.drawn(len, number), len, number);
        let sequences: Vec<Vec<(u32, f32)>> = cpu.install(|| numbers.par_iter().map(make).collect::<Result<_, _>>())?;
        Ok(batch_of(&sequences, len))
    }

    /// The source of a sequence.
    fn drawn(&self, len: usize, number: u64) -> &Source {
        let fitting = || self.sources.iter().filter(|source| source.spec.serves(len));
        let whole: f64 = fitting().map(|source| source.spec.share).sum();
        let mut left = self.rng(number).random_range(0.0..whole);
        let found = fitting().find(|source| {
            left -= source.spec.share;
            left < 0.0
        });
        found.or_else(|| fitting().next_back()).expect("a checked recipe has a source for every stage")
    }

    fn rng(&self, number: u64) -> ChaCha8Rng {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        // The streams of `Draw` are those of the first three quarters of each four.
        rng.set_stream(number * 4 + 3);
        rng
    }

    /// `len + 1` tokens.
    fn sequence(&self, source: &Source, len: usize, number: u64) -> Result<Vec<(u32, f32)>, DataError> {
        let mut rng = self.rng(number);
        rng.next_u64();
        let mut sequence = Sequence::begun(self.vocabulary, len);
        match &source.kind {
            Kind::Text => (),
            Kind::Quotes => self.quotes(&mut sequence, number, &mut rng),
            Kind::Needles => self.needles(&mut sequence, number, &mut rng),
            Kind::Echo => self.echo(&mut sequence, &mut rng),
            Kind::Task(task) => self.task(&mut sequence, &source.spec.source, task.as_ref(), number, &mut rng)?,
        }
        if sequence.tokens.len() > self.vocabulary.begin().len() && sequence.room() > 0 {
            sequence.tokens.extend(self.vocabulary.end().map(|end| (end, 1.0)));
        }
        if let Some(text) = &self.text {
            sequence.extend(text.span(number, &mut rng, sequence.room()), self.text_weight);
        }
        while sequence.room() > 0 {
            sequence.push(&text::sentence(&mut rng), self.text_weight);
        }
        sequence.tokens.truncate(len + 1);
        Ok(sequence.tokens)
    }

    /// A task's context, and its questions until the sequence is full.
    fn task(
        &self,
        sequence: &mut Sequence<'_>,
        name: &str,
        task: &dyn Task,
        number: u64,
        rng: &mut ChaCha8Rng,
    ) -> Result<(), DataError> {
        let draw = Draw::new(self.seed, number);
        let whole = sequence.room() - 1;
        let least =
            task.write(task.least_units(), &draw).map_or(1, |sample| task::length_tokens(&sample, self.vocabulary));
        // Where many questions can be asked, a part of the room is left for them.
        let many = task.write(task.least_units().max(64), &draw).is_some_and(|sample| sample.questions.len() > 1);
        let share = if many { rng.random_range(0.3..0.85) } else { 1.0 - 0.5 * rng.random::<f64>().powi(2) };
        let target = ((whole as f64 * share) as usize).max(least.min(whole));
        let mut sample = task::generate(name, task, target, &draw, self.vocabulary)?;
        sequence.push(&sample.context, 0.0);
        sample.questions.shuffle(rng);
        for question in &sample.questions {
            if !sequence.ask(&question.prompt(), &question.expected) {
                break;
            }
        }
        Ok(())
    }

    /// Needles in text, few or many, of which all are asked for while there is room.
    fn needles(&self, sequence: &mut Sequence<'_>, number: u64, rng: &mut ChaCha8Rng) {
        const NEEDLE_TOKENS: usize = 12;
        const ASKED_TOKENS: usize = 22;
        let whole = sequence.room() - 1;
        let most = (whole / (NEEDLE_TOKENS + ASKED_TOKENS)).clamp(1, 24);
        let count = if rng.random_bool(0.25) { 1 } else { rng.random_range(1..=most) };
        let keys = text::distinct_pairs(rng, count);
        let values: Vec<String> = (0..count).map(|_| text::number(rng, 7)).collect();
        let room = whole.saturating_sub(count * (NEEDLE_TOKENS + ASKED_TOKENS));
        let wanted = rng.random_range(room / 2..=room);
        let mut pieces: Vec<(Vec<u32>, f32)> =
            self.haystack(number, wanted, rng).into_iter().map(|piece| (piece, self.text_weight)).collect();
        for (key, value) in keys.iter().zip(&values) {
            let place = rng.random_range(0..=pieces.len());
            pieces.insert(place, (self.vocabulary.encode(&text::needle(key, value)), 0.0));
        }
        for (piece, weight) in &pieces {
            sequence.extend(piece, *weight);
        }
        let mut order: Vec<usize> = (0..count).collect();
        order.shuffle(rng);
        for at in order {
            let prompt = format!("{}{}", text::needle_question(&keys[at]), text::needle_stem(&keys[at]));
            if !sequence.ask(&prompt, &format!(" {}.", values[at])) {
                break;
            }
        }
    }

    /// About `wanted` tokens in pieces between which a needle can stand: mostly sentences of the text, if there is one.
    fn haystack(&self, number: u64, wanted: usize, rng: &mut ChaCha8Rng) -> Vec<Vec<u32>> {
        if let Some(text) = self.text.as_ref().filter(|_| wanted > 0 && rng.random_bool(0.6)) {
            let stop = self.vocabulary.encode("a.").pop();
            let span = text.span(number, rng, wanted);
            return span.split_inclusive(|token| Some(*token) == stop).map(<[u32]>::to_vec).collect();
        }
        let repeated: Option<Vec<String>> =
            rng.random_bool(0.25).then(|| (0..4).map(|_| text::sentence(rng)).collect());
        let (mut pieces, mut tokens) = (Vec::new(), 0);
        while tokens < wanted {
            let sentence = match &repeated {
                Some(cycle) => cycle[pieces.len() % cycle.len()].clone(),
                None => text::sentence(rng),
            };
            let sentence = self.vocabulary.encode(&sentence);
            tokens += sentence.len();
            if tokens < wanted {
                pieces.push(sentence);
            }
        }
        pieces
    }

    /// The text, in which spans stand once more somewhere behind: their tokens are foretold by what followed before.
    fn quotes(&self, sequence: &mut Sequence<'_>, number: u64, rng: &mut ChaCha8Rng) {
        let text = self.text.as_ref().expect("a checked recipe has a text for its quotes");
        let first = sequence.tokens.len();
        while sequence.room() > 0 {
            let fresh = rng.random_range(QUOTED_TOKENS).min(sequence.room());
            sequence.extend(text.span(number, rng, fresh), self.text_weight);
            let (written, count) = (sequence.tokens.len(), rng.random_range(QUOTED_TOKENS));
            if written > first + count && sequence.room() > count {
                let at = rng.random_range(first..written - count);
                let quoted: Vec<u32> = sequence.tokens[at..at + count].iter().map(|(token, _)| *token).collect();
                sequence.extend(&quoted[..QUOTED_UNJUDGED], 0.0);
                sequence.extend(&quoted[QUOTED_UNJUDGED..], 1.0);
            }
        }
    }

    /// `count` pieces of `len` tokens of the text that no step reads, if there is one; every token is a target. There are as many
    /// by what is checked before the first step.
    pub fn held_out_text(&self, count: usize, len: usize) -> Option<Batch> {
        let text = self.text.as_ref()?;
        let (begin, pieces) = (self.vocabulary.begin().len(), text.pieces(len + 1));
        let piece = |index: usize| {
            let tokens = text.piece(index * pieces / count, len + 1);
            tokens.into_iter().enumerate().map(|(at, token)| (token, f32::from(at >= begin))).collect::<Vec<_>>()
        };
        Some(batch_of(&(0..count).map(piece).collect::<Vec<_>>(), len))
    }

    /// Lists of words, ` oar lamp wolf;`, and pieces of earlier ones, each from some word to its list's end. What follows
    /// that word is foretold by what followed it before and by nothing else, least of all by its place: where whole
    /// texts are copied a model learns to look so many tokens back.
    fn echo(&self, sequence: &mut Sequence<'_>, rng: &mut ChaCha8Rng) {
        // The same words for every sequence of a seed.
        let pool = text::distinct_words(&mut ChaCha8Rng::seed_from_u64(self.seed), ECHO_WORDS);
        let mut lists: Vec<Vec<&str>> = Vec::new();
        while sequence.room() > 1 {
            if lists.len() > 1 && rng.random_bool(0.6) {
                let list = &lists[rng.random_range(0..lists.len())];
                let first = rng.random_range(0..list.len() - 1);
                sequence.push(&format!(" {}", list[first]), 0.0);
                let rest: String = list[first + 1..].iter().map(|word| format!(" {word}")).collect();
                sequence.push(&format!("{rest};"), 1.0);
            } else {
                let count = rng.random_range(LIST_WORDS);
                let list: Vec<&str> = index::sample(rng, ECHO_WORDS, count).into_iter().map(|at| pool[at]).collect();
                sequence.push(&format!("{};", list.iter().map(|word| format!(" {word}")).collect::<String>()), 0.0);
                lists.push(list);
            }
        }
        sequence.tokens.truncate(sequence.wanted - 1);
    }

    /// Held-out samples of a task, one question each, `len` tokens long with the beginning; the tokens of a sequence's
    /// answer are its targets.
    ///
    /// # Errors
    /// When there is no such task, or it does not fit.
    pub fn held_out(&self, cpu: &Cpu, name: &str, samples: usize, len: usize) -> Result<Batch, DataError> {
        let task = task::task(name)?;
        let make = |index: usize| self.held_out_sequence(name, task.as_ref(), index, len);
        let indices: Vec<usize> = (0..samples).collect();
        let sequences: Vec<Vec<(u32, f32)>> =
            cpu.install(|| indices.par_iter().map(|&index| make(index)).collect::<Result<_, DataError>>())?;
        Ok(batch_of(&sequences, len))
    }

    /// A sample of [`Data::held_out`].
    fn held_out_sequence(
        &self,
        name: &str,
        task: &dyn Task,
        index: usize,
        len: usize,
    ) -> Result<Vec<(u32, f32)>, DataError> {
        let draw = Draw::new(self.seed ^ HELD_OUT, index as u64);
        let target = len - self.vocabulary.begin().len();
        let Sample { context, questions, .. } = task::generate(name, task, target, &draw, self.vocabulary)?;
        let mut sequence = Sequence::begun(self.vocabulary, len);
        sequence.push(&context, 0.0);
        sequence.push(&questions[0].prompt(), 0.0);
        sequence.push(&questions[0].expected, 1.0);
        // What follows an answer changes nothing of it.
        sequence.tokens.resize(len + 1, (self.vocabulary.end().unwrap_or(0), 0.0));
        Ok(sequence.tokens)
    }

    /// Tries what a run will be judged by: each task at each length up to `longest`. An error behind many steps would lose them.
    ///
    /// # Errors
    /// As [`Data::held_out`].
    pub(super) fn check(&self, evaluation: &Evaluation, longest: usize) -> Result<(), DataError> {
        for name in &evaluation.tasks {
            let task = task::task(name)?;
            for &length in evaluation.lengths.iter().filter(|length| **length <= longest) {
                self.held_out_sequence(name, task.as_ref(), 0, length)?;
            }
        }
        let judged = evaluation.lengths.iter().copied().filter(|length| *length <= longest).max();
        if let Some((text, length)) = self.text.as_ref().zip(judged) {
            let (pieces, samples) = (text.pieces(length + 1), evaluation.samples);
            if pieces < samples {
                return Err(DataError::Text(format!(
                    "the last tenth of data.text has {pieces} pieces of {length} tokens; evaluation.samples is {samples}, which must be \
                     no more than that"
                )));
            }
        }
        Ok(())
    }
}

/// Sequences of `len + 1` tokens as a batch: all but the last are read, all but the first are targets.
fn batch_of(sequences: &[Vec<(u32, f32)>], len: usize) -> Batch {
    let (mut tokens, mut targets) = (Vec::with_capacity(sequences.len() * len), Vec::new());
    for (index, sequence) in sequences.iter().enumerate() {
        tokens.extend(sequence[..len].iter().map(|(token, _)| token));
        for (at, &(token, weight)) in sequence[1..].iter().enumerate().filter(|(_, (_, weight))| *weight > 0.0) {
            targets.push(Target { row: index * len + at, token, weight });
        }
    }
    let sum: f64 = targets.iter().map(|target| f64::from(target.weight)).sum();
    for target in &mut targets {
        target.weight = (f64::from(target.weight) / sum) as f32;
    }
    Batch { tokens, targets }
}

#[cfg(test)]
mod tests;
