//! Judgements of one sequence: after prefill or a chunk of it, and between decode steps.

use super::held::Held;
use super::{Evictor, Wanted};
use crate::attention::{Forward, Outputs, Params, Shape, kernel};
use crate::cache::{PagedCache, Sequences};
use crate::device::Cpu;
use crate::memory::{Buffer, Label};
use crate::model::decoder::params;
use crate::model::{Model, ModelError};
use crate::policy::action::Fold;
use crate::policy::evict::{self, Leaving};
use crate::policy::{BeforeRope, Context, Decoding, Policy, Statistic, gates, select};
use crate::tensor::{DType, TensorView};
use std::ops::Range;

/// What a judgement works on.
pub(in crate::model) struct Scene<'a> {
    pub model: &'a Model,
    pub cpu: &'a Cpu,
    pub cache: &'a mut PagedCache,
    /// Sequences of the batch.
    pub batch: usize,
    /// The sequence that is judged, and the tokens it has seen.
    pub sequence: usize,
    pub seen: usize,
}

impl Scene<'_> {
    /// Some layers of the sequence.
    fn layers(&self, layers: &Range<usize>) -> Sequences<'_> {
        Sequences { cache: self.cache, first: layers.start * self.batch + self.sequence, step: self.batch }
    }

    /// Layers that are judged together: all, unless their windows differ.
    fn groups(&self) -> Vec<Range<usize>> {
        let (layers, windows) = (self.model.config.layers, &self.model.config.windows);
        match windows.iter().all(|window| *window == windows[0]) {
            true => std::iter::once(0..layers).collect(),
            false => (0..layers).map(|layer| layer..layer + 1).collect(),
        }
    }
}

impl Evictor<'_> {
    /// Judges a sequence after prefill, or after a chunk of it that is not the `last`.
    pub fn judge_prefill(&mut self, scene: &mut Scene<'_>, last: bool) -> Result<(), ModelError> {
        let Some(policy) = self.judging() else { return Ok(()) };
        self.know_rope(scene, policy);
        let best_lost = self.judge(scene, policy, false)?;
        if last {
            self.sequences[scene.sequence].best_lost = best_lost;
        }
        // What was held is of the context; while decoding only the latest queries count.
        let wanted = self.wanted(policy, scene.sequence);
        let judged = &mut self.sequences[scene.sequence];
        match (wanted, &mut judged.held) {
            (Some(Wanted::Latest(queries)), Some(held)) if last => held.narrow(queries)?,
            (_, held) => *held = None,
        }
        Ok(())
    }

    /// What the schedule asks for after a decode step of a sequence.
    pub fn judge_step(&mut self, scene: &mut Scene<'_>) -> Result<(), ModelError> {
        let Some(policy) = self.judging() else { return Ok(()) };
        self.sequences[scene.sequence].steps += 1;
        let steps = self.sequences[scene.sequence].steps;
        match policy.schedule.decoding {
            Decoding::Never => Ok(()),
            Decoding::EverySteps(every) if !steps.is_multiple_of(every) => Ok(()),
            Decoding::EverySteps(_) => {
                self.know_rope(scene, policy);
                self.judge(scene, policy, true).map(drop)
            }
            Decoding::Delayed => {
                self.know_rope(scene, policy);
                self.judge_leaving(scene, policy)
            }
        }
    }

    fn know_rope(&mut self, scene: &Scene<'_>, policy: &Policy) {
        let config = &scene.model.config;
        if policy.rerotates || policy.looks_at(Statistic::BeforeRope) {
            self.frequencies = Some(config.rope.frequencies(config.head_dim, config.max_positions, scene.seen));
        }
    }

    /// Judges every list of a sequence and shrinks it; returns the highest score that each lost. `again` says that
    /// lists have changed since the held queries were asked.
    fn judge(&mut self, scene: &mut Scene<'_>, policy: &Policy, again: bool) -> Result<Vec<f32>, ModelError> {
        let heads = scene.model.config.kv_heads;
        let mut best_lost = Vec::new();
        for layers in scene.groups() {
            let selection = self.with_context(scene, policy, &layers, again, |context| {
                let mut scored = policy.score(context)?.expect("a policy with a scorer gives scores");
                Ok(select(policy, context, &mut scored)?)
            })?;
            for list in 0..layers.len() * heads {
                let (kept, list) = (selection.kept(list), scene.layers(&layers).list(list / heads, list % heads));
                self.evicted_tokens += (scene.cache.lens()[list] - kept.len()) as u64;
                policy.shrink(&self.fold(scene.cpu), scene.cache, list, kept)?;
            }
            best_lost.extend(selection.best_lost);
        }
        scene.cache.release();
        Ok(best_lost)
    }

    /// Under a delayed schedule.
    fn judge_leaving(&mut self, scene: &mut Scene<'_>, policy: &Policy) -> Result<(), ModelError> {
        let heads = scene.model.config.kv_heads;
        let budget_tokens = self.sequences[scene.sequence].budget_tokens;
        let window = policy.scorer.as_ref().map_or(0, |scorer| scorer.protect(budget_tokens).window);
        for layers in scene.groups() {
            let (kv_len, scored) = self.with_context(scene, policy, &layers, true, |context| {
                let scored = policy.score(context)?.expect("a policy with a scorer gives scores");
                Ok((context.call.shape.kv_len, scored))
            })?;
            let mut stays: Buffer<u32> = self.arena.alloc(Label::Policy, kv_len)?;
            for index in 0..layers.len() * heads {
                let list = scene.layers(&layers).list(index / heads, index % heads);
                let best_lost = self.sequences[scene.sequence].best_lost[layers.start * heads + index];
                let scores = &scored.values[index * kv_len..][..kv_len];
                let leaving = Leaving { window, scores, best_lost };
                let fold = self.fold(scene.cpu);
                let gone = evict::let_leave(policy, &fold, scene.cache, list, &leaving, &mut stays)?;
                self.evicted_tokens += gone as u64;
            }
        }
        scene.cache.release();
        Ok(())
    }

    fn fold<'f>(&'f self, cpu: &'f Cpu) -> Fold<'f> {
        let Evictor { eviction, arena, frequencies, .. } = self;
        Fold { arena, cpu, seed: eviction.seed, draws: None, rope: frequencies.as_ref() }
    }

    /// Shows some layers of a sequence to `work`.
    fn with_context<R>(
        &self,
        scene: &Scene<'_>,
        policy: &Policy,
        layers: &Range<usize>,
        again: bool,
        work: impl FnOnce(&Context<'_>) -> Result<R, ModelError>,
    ) -> Result<R, ModelError> {
        let judged = &self.sequences[scene.sequence];
        let held: &Held = judged.held.as_ref().expect("every pass shows its queries");
        let (config, kv) = (&scene.model.config, scene.layers(layers));
        let mut lse = held.lse(layers.clone())?;
        let shape = Shape {
            batch: layers.len(),
            q_heads: config.q_heads,
            kv_heads: config.kv_heads,
            q_len: held.queries(),
            kv_len: kv.max_len(layers.len()),
            head_dim: config.head_dim,
        };
        // In lists with gaps the window of these parameters is one of slots: what lies farther back is scored as if it
        // were seen.
        let params = params(config, layers.start);
        let call = Forward { shape, params, q: held.view(layers.clone()), kv: &kv, cpu: scene.cpu };
        let attends = [Statistic::RecentAttention, Statistic::AccumulatedAttention];
        if again && shape.q_len > 1 && policy.needs().iter().any(|need| attends.contains(need)) {
            lse = self.asked_again(&call, &params)?;
        }
        let list = |list: usize| kv.list(list / config.kv_heads, list % config.kv_heads);
        let accumulated = match policy.looks_at(Statistic::AccumulatedAttention) {
            true => {
                let lists = layers.len() * config.kv_heads;
                let mut sums = self.arena.alloc::<f32>(Label::Policy, lists * shape.kv_len)?;
                evict::accumulated(scene.cache, list, shape.kv_len, &mut sums);
                Some(sums)
            }
            false => None,
        };
        let gates = match policy.looks_at(Statistic::HiddenStates) {
            true => Some(gates::carried(scene.cache, layers.len() * config.kv_heads, list, shape.kv_len, self.arena)?),
            false => None,
        };
        let weights = &scene.model.weights.layers[layers.clone()];
        let w_o: Vec<TensorView<'_>> = weights.iter().map(|layer| layer.o.weight().by_head(config.head_dim)).collect();
        let context = Context {
            call,
            layers: layers.len(),
            lse: &lse,
            future: None,
            accumulated: accumulated.as_deref(),
            gates: gates.as_deref(),
            positions: &|index, slot| scene.cache.origin(list(index), slot),
            seen_tokens: scene.seen,
            before_rope: self.frequencies.as_ref().map(|frequencies| BeforeRope { frequencies, q: None, k: None }),
            w_o: &w_o,
            layer_numbers: &layers.clone().collect::<Vec<_>>(),
            budget_tokens: judged.budget_tokens,
            seed: self.eviction.seed,
            arena: self.arena,
        };
        work(&context)
    }

    /// Log-sum-exps of held queries over the lists as they are now.
    fn asked_again(&self, call: &Forward<'_>, params: &Params) -> Result<Buffer<f32>, ModelError> {
        let kernel = kernel("decode").expect("the decode kernel is built in");
        let size = kernel.workspace(&call.shape, params, DType::F32, call.cpu.threads());
        let mut workspace = size.allocate(self.arena)?;
        let mut outputs = Outputs::allocate(self.arena, &call.shape, DType::F32)?;
        kernel.forward(call, &mut outputs, &mut workspace)?;
        Ok(outputs.lse)
    }
}
