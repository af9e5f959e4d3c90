//! Text that a model writes itself, to distil it from: what it learns is to go on as it would, which needs no text of anybody's.
//!
//! A sequence begins as every text of the model does, and each token is drawn from what the model foretells, at temperature 1. Where a text ends
//! before the sequence does, another one begins. A sequence depends on the seed and its own number alone, so
//! that a run that is resumed reads what it would have read.

use super::error::TrainError;
use super::text::HELD_OUT;
use super::vocabulary::Vocabulary;
use crate::device::Cpu;
use crate::memory::Arena;
use crate::model::{Config, Decoder, Model, ModelError, Sampler, Sampling, Setup, bytes};
use crate::tensor::DType;
use rayon::prelude::*;
use std::path::Path;

/// Sequences that are written together: weights are read once for a token of each.
const TOGETHER: u64 = 8;

/// A model that writes sequences of one length.
pub(super) struct Written<'a> {
    model: Model,
    dtype: DType,
    begin: Vec<u32>,
    len: usize,
    seed: u64,
    arena: &'a Arena,
    /// The latest blocks of [`TOGETHER`] sequences, of what is learned from and of what is held out, each with its number.
    blocks: [Option<(u64, Vec<u32>)>; 2],
}

impl<'a> Written<'a> {
    /// Opens a model that will write sequences of `len` tokens.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(
        path: &Path,
        vocabulary: &Vocabulary,
        (len, seed): (usize, u64),
        dtype: DType,
        arena: &'a Arena,
    ) -> Result<Self, TrainError> {
        let model = Model::open(path, arena)?;
        let Config { bos, ref eos, .. } = model.config;
        let begin = match vocabulary.begin() {
            [] => vec![bos.or(eos.first().copied()).unwrap_or(0)],
            begin => begin.to_vec(),
        };
        Ok(Written { model, dtype, begin, len, seed, arena, blocks: [None, None] })
    }

    /// `count` sequences from number `first` on, `[count, len]`; numbers from [`HELD_OUT`] on are of what no step reads.
    ///
    /// # Errors
    /// When a logit is no number, or the arena has no room.
    pub fn drawn(&mut self, cpu: &Cpu, first: u64, count: usize) -> Result<Vec<u32>, TrainError> {
        let mut tokens = Vec::with_capacity(count * self.len);
        for number in first..first + count as u64 {
            let (block, kind) = (number / TOGETHER, usize::from(number >= HELD_OUT));
            if self.blocks[kind].as_ref().is_none_or(|(known, _)| *known != block) {
                self.blocks[kind] = Some((block, self.write(cpu, block * TOGETHER)?));
            }
            let (_, known) = self.blocks[kind].as_ref().expect("written above");
            tokens.extend_from_slice(&known[(number % TOGETHER) as usize * self.len..][..self.len]);
        }
        Ok(tokens)
    }

    fn setup(&self) -> Setup<'static> {
        Setup { batch: TOGETHER as usize, chunk_tokens: self.begin.len(), ..Setup::of(self.len, self.dtype) }
    }

    /// Most bytes of the arena while sequences are written, besides the model's.
    pub fn writing_bytes(&self, threads: usize) -> u64 {
        let (prompts, steps) = (vec![self.begin.len(); TOGETHER as usize], self.len - self.begin.len());
        let all = bytes(&self.model, &self.setup(), &prompts, steps, threads);
        all.expect("the setup's kernel is a registered one") - self.model.weights.bytes()
    }

    /// A block's sequences, `[TOGETHER, len]`.
    fn write(&self, cpu: &Cpu, first: u64) -> Result<Vec<u32>, ModelError> {
        let mut decoder = Decoder::new(&self.model, self.setup(), cpu, self.arena)?;
        // Numbers that follow each other are far apart as seeds.
        let seed = |number: u64| self.seed.wrapping_add(number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let writer = |number| Writer {
            sampler: Sampler::new(Sampling { temperature: 1.0, top_p: 1.0, seed: seed(number) }),
            tokens: self.begin.clone(),
            logits: vec![0.0; self.model.config.vocab],
        };
        let mut writers: Vec<Writer> = (first..first + TOGETHER).map(writer).collect();
        let prompts = vec![&self.begin[..]; TOGETHER as usize];
        decoder.prefill(&prompts, |sequence, _, row| writers[sequence].logits.copy_from_slice(row))?;
        for at in self.begin.len()..self.len {
            let next = |writer: &mut Writer| {
                let (drawn, last) = (writer.sampler.next(&writer.logits)?, writer.tokens[at - 1]);
                // A token that ends a text and begins the next is no end of its own beginning.
                let ended = last != self.begin[0] && self.model.config.eos.contains(&last);
                writer.tokens.push(if ended { self.begin[0] } else { drawn });
                Ok::<_, ModelError>(())
            };
            cpu.install(|| writers.par_iter_mut().try_for_each(next))?;
            if at + 1 < self.len {
                let newest: Vec<[u32; 1]> = writers.iter().map(|writer| [writer.tokens[at]]).collect();
                let newest: Vec<&[u32]> = newest.iter().map(|token| &token[..]).collect();
                decoder.follow(&newest, |sequence, _, row| writers[sequence].logits.copy_from_slice(row))?;
            }
        }
        Ok(writers.into_iter().flat_map(|writer| writer.tokens).collect())
    }
}

/// A sequence on its way.
struct Writer {
    sampler: Sampler,
    tokens: Vec<u32>,
    /// What the model foretells behind them.
    logits: Vec<f32>,
}
