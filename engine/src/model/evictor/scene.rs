//! Eviction steps of one sequence: all layers together, unless their sliding windows differ.

use super::{Evictor, Sequence};
use crate::attention::{Forward, Shape, kernel};
use crate::cache::{PagedCache, Sequences};
use crate::device::Cpu;
use crate::eviction::{CpuBackend, Moment, ObservationWindow, Span, View, recompute_lse};
use crate::memory::Buffer;
use crate::model::decoder::params;
use crate::model::weights::Matrix;
use crate::model::{Model, ModelError};
use crate::policy::sparse::{Lists, Start};
use crate::policy::{BeforeRope, Statistic};
use crate::tensor::TensorView;
use std::ops::Range;

/// What an eviction step works on.
pub(in crate::model) struct Scene<'a> {
    pub model: &'a Model,
    pub cpu: &'a Cpu,
    pub cache: &'a mut PagedCache,
    /// Sequences of the batch.
    pub batch: usize,
    /// The sequence that is evicted from, and the tokens it has seen.
    pub sequence: usize,
    pub seen: usize,
    /// Tokens of the sequence by whose number RoPE turned the latest: with those of its prompt that are yet to come.
    pub horizon: usize,
}

impl Scene<'_> {
    /// Layers that are scored together: all, unless their windows differ.
    fn groups(&self) -> Vec<Range<usize>> {
        let (layers, windows) = (self.model.config.layers, &self.model.config.windows);
        match windows.iter().all(|window| *window == windows[0]) {
            true => std::iter::once(0..layers).collect(),
            false => (0..layers).map(|layer| layer..layer + 1).collect(),
        }
    }

    /// Sequence of the cache that holds a layer.
    fn sequence_of(&self, layer: usize) -> usize {
        layer * self.batch + self.sequence
    }

    /// Log-sum-exps of a window's queries in some layers, over the lists as they are now.
    fn lse_now(&self, window: &ObservationWindow, layers: &Range<usize>) -> Result<Buffer<f32>, ModelError> {
        let config = &self.model.config;
        let kv = Sequences { cache: self.cache, first: self.sequence_of(layers.start), step: self.batch };
        let shape = Shape {
            batch: layers.len(),
            q_heads: config.q_heads,
            kv_heads: config.kv_heads,
            q_len: window.queries(),
            kv_len: kv.max_len(layers.len()),
            head_dim: config.head_dim,
        };
        let (q, params) = (window.view(layers.clone()), params(config, layers.start));
        let decode = kernel("decode").expect("the decode kernel is built in");
        Ok(recompute_lse(&*decode, &Forward { shape, params, q, kv: &kv, cpu: self.cpu }, window.arena())?)
    }
}

impl Evictor<'_> {
    /// The eviction step of a sequence behind its prefill, or behind a chunk of it that is not the `last`.
    pub fn evict_chunk(&mut self, scene: &mut Scene<'_>, last: bool) -> Result<(), ModelError> {
        let Some(policy) = self.evicting() else { return if last { self.select(scene) } else { Ok(()) } };
        if !self.sequences[scene.sequence].session.is_open() {
            // An earlier prompt was evicted from, and the schedule asks for no more.
            return Ok(());
        }
        self.evict(scene, Moment::Chunk { last })?;
        // What was held is of the context; while decoding only the latest queries count.
        let Sequence { session, window, .. } = &mut self.sequences[scene.sequence];
        match (Span::of_decoding(policy), window) {
            (Span::Latest(queries), Some(window)) if last && session.is_open() => window.narrow(queries)?,
            (_, window) => *window = None,
        }
        Ok(())
    }

    /// Where the policy selects what steps read: begins that in every layer.
    fn select(&mut self, scene: &mut Scene<'_>) -> Result<(), ModelError> {
        let Some(selection) = &self.eviction.policy.selection else { return Ok(()) };
        let Sequence { session, window, selectors, .. } = &mut self.sequences[scene.sequence];
        if !selectors.is_empty() {
            // Begun behind an earlier prompt; what has come since is selected from too.
            return Ok(());
        }
        let window = window.take().expect("every pass shows its queries");
        let (budget_tokens, arena, cpu) = (session.plan().budget_tokens, self.arena, scene.cpu);
        for layer in 0..scene.model.config.layers {
            let sequence = scene.sequence_of(layer);
            let (cache, q) = (Lists::of_sequence(scene.cache, sequence), window.view(layer..layer + 1));
            let selector = selection.open(&Start { cache, q, budget_tokens, cpu, arena })?;
            selector.prune(scene.cache, sequence)?;
            selectors.push(selector);
        }
        Ok(())
    }

    /// What the schedule asks for behind a decode step of a sequence.
    pub fn evict_step(&mut self, scene: &mut Scene<'_>) -> Result<(), ModelError> {
        match self.evicting().is_some() && self.sequences[scene.sequence].session.advance() {
            true => self.evict(scene, Moment::Step),
            false => Ok(()),
        }
    }

    fn evict(&mut self, scene: &mut Scene<'_>, moment: Moment) -> Result<(), ModelError> {
        let (policy, config) = (self.eviction.policy, &scene.model.config);
        let Evictor { sequences, arena, kept, .. } = self;
        let Sequence { session, window, reconstructed, frequencies, turned_tokens, .. } =
            &mut sequences[scene.sequence];
        if policy.rerotates || policy.looks_at(Statistic::BeforeRope) {
            *frequencies = Some(config.rope.frequencies(config.head_dim, config.max_positions, scene.horizon));
            *turned_tokens = scene.horizon;
        }
        let reconstructed = reconstructed.take();
        let window = window.as_ref().expect("every pass shows its queries");
        // Lists may have changed since earlier queries attended.
        let again = session.is_decoding() && window.queries() > 1 && policy.looks_at_attention();
        let lse = |layers: &Range<usize>| match again {
            true => scene.lse_now(window, layers),
            false => Ok(window.lse(layers.clone())?),
        };
        let groups = scene.groups();
        let lse = groups.iter().map(lse).collect::<Result<Vec<_>, _>>()?;
        // Scorers read plain elements; quantised projections are widened for this step.
        let projections = |layers: &Range<usize>| {
            let looked_at = if policy.looks_at(Statistic::OutputProjection) { layers.clone() } else { 0..0 };
            scene.model.weights.layers[looked_at].iter().map(|layer| layer.o.weight().plain(arena)).collect()
        };
        let projections = groups.iter().map(projections).collect::<Result<Vec<Vec<Matrix>>, _>>()?;
        let by_head =
            projections.iter().map(|o| o.iter().filter_map(|matrix| matrix.by_head(config.head_dim)).collect());
        let w_o: Vec<Vec<TensorView<'_>>> = by_head.collect();
        let rope = frequencies.as_ref();
        let numbers: Vec<usize> = (0..config.layers).collect();
        let view = |((layers, lse), w_o)| {
            let layers: &Range<usize> = layers;
            let (lse, w_o): (&Buffer<f32>, &Vec<TensorView<'_>>) = (lse, w_o);
            View {
                first: scene.sequence_of(layers.start),
                step: scene.batch,
                count: layers.len(),
                layers: layers.len(),
                params: params(config, layers.start),
                q: window.view(layers.clone()),
                lse,
                seen_tokens: scene.seen,
                future: None,
                reconstructed: reconstructed.as_ref().map(|scores| &scores[..]),
                before_rope: rope.map(|frequencies| BeforeRope { frequencies, q: None, k: None }),
                w_o,
                layer_numbers: &numbers[layers.clone()],
                kept: kept.clone(),
            }
        };
        let views: Vec<View<'_>> = groups.iter().zip(&lse).zip(&w_o).map(view).collect();
        let backend = CpuBackend { cpu: scene.cpu, arena, rope, counts_ties: false };
        Ok(session.evict(&backend, scene.cache, &views, moment)?)
    }
}
