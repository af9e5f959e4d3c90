//! A model that repeats its context (KVzip, arXiv 2505.23416), and what its tokens are looked at meanwhile.
//!
//! The tokens that ask for a chunk, and the chunk itself, go through the model behind the context; then they leave the cache
//! again. In each layer their queries are scored against the first tokens of the context, the chunk and themselves, and of the
//! chunk each key's largest probability is kept. No score matrix is made: log-sum-exps come from one pass of the kernel,
//! maxima from tiles ([`export::columns`]).

use super::{Decoder, PaddedRows};
use crate::attention::export::{self, OverGroup, OverQueries, Reduction};
use crate::attention::{Forward, Kernel, KvRows, Shape};
use crate::cache::Sequences;
use crate::device::simd::{Isa, loops};
use crate::eviction::recompute_lse;
use crate::format::KvFormat;
use crate::memory::{Arena, Buffer, Label};
use crate::model::evictor::Repeated;
use crate::model::weights::Matrix;
use crate::model::{Config, ModelError};
use crate::policy::{PolicyError, Reconstruction, Weighing};
use crate::tensor::Rows;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// What is known while a chunk is repeated.
pub(super) struct Repeating {
    how: Reconstruction,
    /// The chunk, in positions of the context, and where the context ends.
    chunk: Range<usize>,
    end: usize,
    /// Largest probability of each key, `[layers, Hkv, end]`.
    scores: Buffer<f32>,
    /// Norms of values behind the output projection, `[layers, Hq, end]`, where they weigh.
    norms: Option<Buffer<f32>>,
    /// Norms of gradients at what is fed, `[layers, tokens]`, where they weigh.
    gradients: Option<Buffer<f32>>,
}

impl Decoder<'_> {
    /// Has a sequence's context repeated, if the policy that is about to evict from it looks at that.
    ///
    /// # Errors
    /// When the setup has no room for what is fed, or the arena has none.
    pub(super) fn reconstruct(&mut self, sequence: usize) -> Result<(), ModelError> {
        let Some(evictor) = &self.evictor else { return Ok(()) };
        let Some(repeated) = evictor.repeats(sequence) else { return Ok(()) };
        let scores = Arc::new(self.repeated(sequence, repeated)?);
        self.evictor.as_mut().expect("it asked for this").reconstructed(sequence, scores);
        Ok(())
    }

    /// The same for a fork of the recorded prefill: what one policy looked at serves those after it that look at the same.
    ///
    /// # Errors
    /// As [`Decoder::reconstruct`].
    pub(super) fn reconstruct_recorded(&mut self, sequence: usize) -> Result<(), ModelError> {
        let Some(evictor) = &self.evictor else { return Ok(()) };
        let Some(repeated) = evictor.repeats(sequence) else { return Ok(()) };
        let looked_at = (repeated.how, evictor.kept.clone());
        let known = self.recorder.as_ref().and_then(|recorder| recorder.reconstructed(&looked_at));
        let scores = match known {
            Some(scores) => scores,
            None => Arc::new(self.repeated(sequence, repeated)?),
        };
        if let Some(recorder) = &mut self.recorder {
            recorder.keep_reconstructed(looked_at, scores.clone());
        }
        self.evictor.as_mut().expect("it asked for this").reconstructed(sequence, scores);
        Ok(())
    }

    /// What each token of a sequence is looked at while the context is repeated, `[layers, Hkv, tokens]`.
    fn repeated(&mut self, sequence: usize, repeated: Repeated<'_>) -> Result<Buffer<f32>, ModelError> {
        let Repeated { how, repeat, name } = repeated;
        let seen = self.seen[sequence];
        let kept = self.evictor.as_ref().map_or(0..0, |evictor| evictor.kept.clone());
        let context: Vec<u32> = self.fed[sequence][..if kept.is_empty() { seen } else { kept.start }].to_vec();
        let needed = seen + repeat.most_tokens(context.len(), how);
        if needed > self.setup.max_tokens {
            let reason = format!(
                "it has the model repeat a context of {} tokens, which takes {needed} with what is fed; {} are allowed: \
                 give it a smaller chunk",
                context.len(),
                self.setup.max_tokens
            );
            return Err(PolicyError::Combination { policy: name.into(), reason }.into());
        }
        let lists = self.model.config.layers * self.model.config.kv_heads;
        let scores = self.arena.alloc(Label::Policy, lists * seen)?;
        let pieces = (0..context.len().div_ceil(how.chunk_tokens)).map(|number| repeat.tokens(&context, how, number));
        let pieces: Vec<Vec<u32>> = pieces.collect();
        let Decoder { model, cpu, arena, .. } = *self;
        let mut gradients = Vec::new();
        if let (Weighing::Gradients, Some(of)) = (how.weighing, repeat.gradients) {
            gradients = of(model, self.setup.dtype, &self.fed[sequence][..seen], &pieces, cpu, arena)?;
        }
        let norms = if how.weighing == Weighing::Nothing { None } else { Some(self.value_norms(sequence)?) };
        self.repeating = Some(Repeating { how, chunk: 0..0, end: seen, scores, norms, gradients: None });
        let mut gradients = gradients.into_iter();
        let repeated = pieces.iter().enumerate().try_for_each(|(number, piece)| {
            let start = number * how.chunk_tokens;
            if let Some(repeating) = &mut self.repeating {
                repeating.chunk = start..context.len().min(start + how.chunk_tokens);
                repeating.gradients = gradients.next();
            }
            self.feed_and_forget(sequence, piece)
        });
        let Repeating { scores, .. } = self.repeating.take().expect("put there above");
        repeated.map(|()| scores)
    }

    /// Norms of a sequence's values behind each query head's part of the output projection, `[layers, Hq, tokens]`.
    fn value_norms(&self, sequence: usize) -> Result<Buffer<f32>, ModelError> {
        let Decoder { model, cpu, arena, cache, setup, .. } = self;
        let (config, tokens) = (&model.config, self.seen[sequence]);
        let mut norms = arena.alloc::<f32>(Label::Policy, config.layers * config.q_heads * tokens)?;
        let of_layers = norms.par_chunks_exact_mut(config.q_heads * tokens).enumerate();
        cpu.install(|| {
            of_layers.try_for_each(|(layer, norms)| {
                let kv = Sequences { cache, first: layer * setup.batch + sequence, step: 1 };
                let o = model.weights.layers[layer].o.weight().plain(arena)?;
                projected_norms(cpu.isa(), &o, config, &kv, norms);
                Ok::<_, ModelError>(())
            })
        })?;
        Ok(norms)
    }

    /// Runs tokens behind those of a sequence, and takes them from it again.
    fn feed_and_forget(&mut self, sequence: usize, tokens: &[u32]) -> Result<(), ModelError> {
        let seen = self.seen[sequence];
        let mut all: Vec<&[u32]> = vec![&[]; self.setup.batch];
        all[sequence] = tokens;
        let mut horizons = self.seen.clone();
        horizons[sequence] += tokens.len();
        self.run(&all, &horizons, &vec![0; self.setup.batch], &mut |_, _, _| ())?;
        for layer in 0..self.model.config.layers {
            for head in 0..self.model.config.kv_heads {
                let list = self.cache.list(layer * self.setup.batch + sequence, head);
                self.cache.retain(list, 0..seen)?;
            }
        }
        self.seen[sequence] = seen;
        self.fed[sequence].truncate(seen);
        Ok(())
    }
}

impl Repeating {
    /// Looks at the attention of one layer for a part of what is fed: `normed` holds the hidden states of its queries from row
    /// `first` on.
    pub fn see(
        &mut self,
        (layer, call): (usize, &Forward<'_>),
        kernel: &dyn Kernel,
        (normed, first): (&PaddedRows, usize),
        arena: &Arena,
    ) -> Result<(), ModelError> {
        let Repeating { how, ref chunk, end, ref mut scores, ref norms, ref gradients } = *self;
        let kv_heads = call.shape.kv_heads;
        let group = if how.weighing == Weighing::Nothing { 1 } else { call.shape.group() };
        let heads = kv_heads * group;
        let fed = call.kv.len(0, 0) - end;
        let parts = [0..how.sink.min(chunk.start), chunk.clone(), end..end + fed];
        let kv = Spliced { kv: call.kv, parts: parts.clone(), group };
        let shape = Shape { kv_heads: heads, kv_len: kv.len(0, 0), ..call.shape };
        let call = Forward { shape, kv: &kv, ..*call };
        let mut lse = recompute_lse(kernel, &call, arena)?;
        // A probability divided by a number is one with a larger log-sum-exp.
        match how.weighing {
            Weighing::Nothing => {}
            Weighing::Norms => {
                for (index, lse) in lse.iter_mut().enumerate() {
                    let row = &normed.data[(first + index % shape.q_len) * normed.stride..][..normed.width];
                    *lse += row.iter().map(|x| x * x).sum::<f32>().sqrt().ln();
                }
            }
            Weighing::Gradients => {
                let gradients = gradients.as_ref().expect("they are known before anything is fed");
                let layers = scores.len() / (kv_heads * end);
                let of_layer = &gradients[layer * (gradients.len() / layers)..][fed - shape.q_len..fed];
                for (index, lse) in lse.iter_mut().enumerate() {
                    *lse -= of_layer[index % shape.q_len].max(f32::MIN_POSITIVE).ln();
                }
            }
        }
        let mut most = arena.alloc::<f32>(Label::Policy, heads * shape.kv_len)?;
        let mut scratch = arena.alloc(Label::Workspace, export::workspace(&shape, call.cpu.threads()))?;
        let reduction = Reduction { queries: OverQueries::Max, group: OverGroup::Max };
        export::columns(&call, &lse, 0..shape.q_len, reduction, &mut most, &mut scratch);
        for (head, most) in most.chunks_exact(shape.kv_len).enumerate() {
            let to = &mut scores[(layer * kv_heads + head / group) * end..][chunk.clone()];
            let norms = norms.as_ref().map(|norms| &norms[(layer * heads + head) * end..][chunk.clone()]);
            for (token, (to, &most)) in to.iter_mut().zip(&most[parts[0].len()..]).enumerate() {
                *to = to.max(most * norms.map_or(1.0, |norms| norms[token]));
            }
        }
        Ok(())
    }
}

/// Parts of lists as one list, each list as often as `group` says.
struct Spliced<'a> {
    kv: &'a dyn KvRows,
    parts: [Range<usize>; 3],
    group: usize,
}

impl Spliced<'_> {
    /// The slot of row `start`, and how many of its part follow.
    fn slot(&self, mut start: usize) -> (usize, usize) {
        for part in &self.parts {
            if start < part.len() {
                return (part.start + start, part.len() - start);
            }
            start -= part.len();
        }
        panic!("row {start} behind the last one");
    }
}

impl KvRows for Spliced<'_> {
    fn len(&self, _: usize, _: usize) -> usize {
        self.parts.iter().map(|part| part.len()).sum()
    }

    fn format(&self) -> KvFormat {
        self.kv.format()
    }

    fn key_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        let (slot, count) = self.slot(start);
        self.kv.key_rows(batch, head / self.group, slot).first(count)
    }

    fn value_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        let (slot, count) = self.slot(start);
        self.kv.value_rows(batch, head / self.group, slot).first(count)
    }

    fn token_bias(&self, batch: usize, head: usize, start: usize) -> Option<&[f32]> {
        let (slot, count) = self.slot(start);
        let run = self.kv.token_bias(batch, head / self.group, slot)?;
        Some(&run[..run.len().min(count)])
    }
}

/// Norms of the values of a layer's lists behind each query head's part of the output projection `o`, `[Hq, tokens]`.
fn projected_norms(isa: Isa, o: &Matrix, config: &Config, kv: &dyn KvRows, norms: &mut [f32]) {
    let Config { q_heads, kv_heads, head_dim, hidden, .. } = *config;
    let by_head = o.by_head(head_dim).expect("the elements are plain");
    let (mut rows, mut value) = (vec![0.0; head_dim * hidden], vec![0.0; head_dim]);
    let mut gram = vec![0.0; head_dim * head_dim];
    for (head, norms) in norms.chunks_exact_mut(kv.len(0, 0)).enumerate() {
        for (channel, row) in rows.chunks_exact_mut(hidden).enumerate() {
            by_head.read_rows(0, head, channel, row);
        }
        // A squared norm is a form of the products of the projection's rows, which are few.
        for (at, product) in gram.iter_mut().enumerate() {
            let row = |channel: usize| &rows[channel * hidden..][..hidden];
            *product = loops::dot(isa, row(at / head_dim), row(at % head_dim));
        }
        for (token, norm) in norms.iter_mut().enumerate() {
            kv.value_rows(0, head * kv_heads / q_heads, token).first(1).widen(&mut value);
            let along = gram.chunks_exact(head_dim).zip(&value).map(|(row, x)| x * loops::dot(isa, row, &value));
            *norm = along.sum::<f32>().max(0.0).sqrt();
        }
    }
}
