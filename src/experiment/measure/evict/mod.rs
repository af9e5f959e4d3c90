//! `evict`: prefill, eviction of the context by a policy, then decode steps over what was retained.
//!
//! Prefill writes keys and values into the paged cache and attends to them there, layer by layer, in one piece or in
//! chunks. After each chunk the policy evicts and the cache shrinks for real; decoding reads only what is left, and the
//! policy's schedule evicts again. A policy that evicts nothing may instead read a part of the cache in each step. Late
//! queries are compared with the dense f64 result. Layers are folded into the batch, so a decode step is one call for
//! all of them.

mod decode;
pub(super) mod late;
pub(super) mod lengths;
pub(super) mod outcome;
mod predict;
mod queries;
mod steps;

use super::check::{finite, rows_of};
use super::pass::{self, fields_of_passes};
use super::trials::timed;
use super::{Bench, Choice, Measurement, Prepared, Runs, Scope, Trial, TrialError, TrialWork, Trials, cuda};
use crate::attention::cuda::CudaKernel;
use crate::attention::rope::Frequencies;
use crate::attention::{Forward, Outputs, Shape, Workspace};
use crate::cache::{CacheShape, PAGE_TOKENS, PagedCache, Sequences};
use crate::device::cuda::Limits;
use crate::eviction::{Plan, Session};
use crate::experiment::cell::Cell;
use crate::experiment::spec::Grid;
use crate::memory::{Buffer, Label};
use crate::policy::{Policy, Registry};
use crate::tensor::TensorView;
use lengths::Lengths;
use outcome::{Evicted, Kept};
use steps::Queries;

/// Decode steps where nothing is said.
const NEW_TOKENS: usize = 32;
/// Decode steps that are compared at most.
const CHECKED_STEPS: usize = 128;

/// Prefill, eviction, and `new_tokens` decode steps.
pub(super) struct Evict;

impl Measurement for Evict {
    fn name(&self) -> &'static str {
        "evict"
    }

    fn about(&self) -> &'static str {
        "prefill, eviction by a policy, and decode steps over what is retained"
    }

    fn fields(&self) -> &'static [&'static str] {
        fields_of_passes!("kv_format", "policy", "budget", "policy_file", "layers", "new_tokens")
    }

    fn compares(&self) -> Choice {
        Choice::Policy
    }

    fn phase(&self) -> &'static str {
        "decode"
    }

    fn expand(&self, grid: &Grid, scope: &Scope<'_>) -> Result<Vec<Cell>, String> {
        if grid.policy.is_empty() {
            return Err("policy is missing; write policy = [\"full\", \"snapkv\"]".into());
        }
        if !grid.causal || grid.window.is_some() {
            return Err(
                "eviction is measured with a causal mask and without a window; leave causal and window out".into()
            );
        }
        if grid.new_tokens == Some(0) {
            return Err("new_tokens is 0; at least 1 decode step is needed to see what eviction does".into());
        }
        pass::expand(grid, scope, "tiled", NEW_TOKENS)
    }

    fn runs(&self) -> Runs<'_> {
        Runs::InTrials(self)
    }
}

impl Trials for Evict {
    fn checked_rows(&self, cell: &Cell, shape: &Shape) -> Vec<[usize; 3]> {
        let steps = sampled_steps(cell.new_tokens).into_iter().map(|step| cell.context_tokens + step);
        rows_of(shape, &steps.collect::<Vec<_>>())
    }

    fn predict(&self, prepared: &Prepared, threads: usize) -> u64 {
        predict::predict(prepared, threads)
    }

    fn work(&self, prepared: &Prepared) -> TrialWork {
        let (cell, budget_tokens) = (&prepared.cell, prepared.budget_tokens);
        let flops = cell.shape().flops(&cell.params());
        let kv_bytes_read = match prepared.policy.as_ref().and_then(|policy| policy.selection.as_ref()) {
            Some(selection) => {
                let context = cell.context_tokens;
                selection.step_bytes(&cache_shape(prepared), budget_tokens, context, context)
            }
            None => prepared.kv_bytes(budget_tokens),
        };
        // Scores cost about half of what attention does.
        TrialWork { flops, phase: "prefill", kv_bytes_read, passes: 1.5, reads: 2.0 * cell.new_tokens as f64 }
    }

    fn trial(&self, prepared: &Prepared, bench: Bench<'_>) -> Result<Trial, TrialError> {
        trial(prepared, bench)
    }

    fn task(
        &self,
        cell: &Cell,
        registry: &Registry,
        kernel: &dyn CudaKernel,
        limits: &Limits,
    ) -> Result<Box<dyn cuda::CudaTrial>, String> {
        cuda::evict::task(cell, registry, kernel, limits)
    }
}

/// Decode steps that are compared: all of them, or evenly many where they are more than [`CHECKED_STEPS`]; the last is
/// among them.
fn sampled_steps(steps: usize) -> Vec<usize> {
    let count = steps.min(CHECKED_STEPS);
    (1..=count).map(|index| index * steps / count - 1).collect()
}

/// The policy of a cell, if it ever evicts.
fn evicting(prepared: &Prepared) -> Option<&Policy> {
    prepared.policy.as_ref().filter(|policy| policy.scorer.is_some())
}

pub(super) fn cache_shape(prepared: &Prepared) -> CacheShape {
    let cell = &prepared.cell;
    CacheShape {
        batch: cell.layers * cell.batch,
        kv_heads: cell.kv_heads,
        head_dim: cell.head_dim,
        format: cell.kv_format(),
        max_tokens: lengths(prepared).most(),
        page_tokens: PAGE_TOKENS,
        columns: evicting(prepared).map_or(&[], Policy::columns),
    }
}

/// How long lists get.
fn lengths(prepared: &Prepared) -> Lengths<'_> {
    Lengths { cell: &prepared.cell, evicting: evicting(prepared), budget_tokens: prepared.budget_tokens }
}

/// What happens in a trial, and what it leaves behind.
struct Running<'a> {
    prepared: &'a Prepared,
    bench: Bench<'a>,
    cache: PagedCache,
    /// To look behind RoPE or to rotate keys, where the policy does and the inputs tell.
    frequencies: Option<Frequencies>,
    /// Where the policy evicts.
    session: Option<Session<'a>>,
}

fn trial(prepared: &Prepared, bench: Bench<'_>) -> Result<Trial, TrialError> {
    let cell = &prepared.cell;
    let mut trial = Trial::default();
    let name = cell.policy.as_deref().unwrap_or_default();
    let rope = |policy: &Policy| policy.rope(name, bench.workload.rope, cell.head_dim);
    let plan = |policy| Plan { policy, budget_tokens: prepared.budget_tokens, seed: cell.seed };
    let mut running = Running {
        prepared,
        bench,
        cache: PagedCache::new(bench.arena, cache_shape(prepared))?,
        frequencies: evicting(prepared).map(rope).transpose()?.flatten(),
        session: evicting(prepared).map(|policy| Session::new(plan(policy))),
    };
    let prefill_ns = running.prefill()?;
    trial.samples_ns.insert("prefill", prefill_ns);
    if let Some(session) = &running.session {
        let totals = session.totals();
        trial.samples_ns.extend([("score", totals.score_ns), ("evict", totals.evict_ns)]);
    }
    let kept = running.kept();
    let late = running.decode(&mut trial)?;
    if let Some(truth) = bench.truth {
        let evicted = running.evicted();
        outcome::check(&evicted, &kept, &late)?;
        let drift = truth.drift(cell.head_dim, |at, row| row.copy_from_slice(late.o(cell, at)));
        // What the cache's format rounds is a result.
        if cell.budget.is_none() && cell.kv_format.is_none() {
            super::check::accurate(&drift, cell.dtype)?;
        }
        trial.drift = Some(drift);
        trial.eviction = Some(outcome::eviction(&evicted, &kept, &late, truth));
        trial.warnings.extend(outcome::warnings(&evicted));
    }
    Ok(trial)
}

impl Running<'_> {
    fn evicted(&self) -> Evicted<'_> {
        let totals = self.session.as_ref().map(|session| *session.totals()).unwrap_or_default();
        Evicted {
            cell: &self.prepared.cell,
            policy: self.prepared.policy.as_ref(),
            budget_tokens: self.prepared.budget_tokens,
            cache: *self.cache.shape(),
            kv_bytes_peak: self.cache.most_kv_bytes(),
            evicted_tokens: totals.evicted_tokens,
            tie_rate: totals.tie_rate,
            workload: self.bench.workload,
        }
    }

    /// KV bytes of pages in use.
    fn kv_bytes_live(&self) -> u64 {
        self.cache.kv_bytes()
    }

    fn kept(&self) -> Kept {
        Kept {
            lens: self.cache.lens().to_vec(),
            list_kv_bytes: (0..self.cache.lens().len()).map(|list| self.cache.list_kv_bytes(list)).collect(),
            kv_bytes_live: self.kv_bytes_live(),
            by_position: match self.bench.truth {
                Some(_) => outcome::by_position(&self.prepared.cell, |list| {
                    (0..self.cache.lens()[list]).map(|slot| self.cache.origin(list, slot)).collect()
                }),
                None => Vec::new(),
            },
        }
    }

    /// Attention over the context, chunk by chunk and layer by layer, with an eviction step after each; returns the time of attention.
    fn prefill(&mut self) -> Result<u64, TrialError> {
        let (cell, bench) = (&self.prepared.cell, self.bench);
        let (context, chunk) = (cell.context_tokens, lengths(self.prepared).chunk());
        let mut prefill_ns = 0;
        for start in (0..context).step_by(chunk) {
            let range = start..context.min(start + chunk);
            self.append(range.clone())?;
            let asked = self.attending(bench.workload.q.view().tokens(range.clone()), range.end)?;
            let (chunk_ns, lse) = self.attend(asked.view())?;
            prefill_ns += chunk_ns;
            let queries = Queries { q: asked.view(), end: range.end, lse: &lse };
            self.evict_chunk(&queries, range.end == context)?;
        }
        Ok(prefill_ns)
    }

    /// Attention of the queries `q` to the cache; returns its time and the log-sum-exps, `[layers * B, Hq, n]`.
    fn attend(&self, q: TensorView<'_>) -> Result<(u64, Buffer<f32>), TrialError> {
        let (cell, bench, kernel) = (&self.prepared.cell, self.bench, self.prepared.kernel());
        let shape = Shape { batch: cell.batch, q_len: q.dims()[2], kv_len: self.cache.max_len(), ..cell.shape() };
        let size = kernel.workspace(&shape, &cell.params(), cell.dtype, bench.cpu.threads());
        let mut workspace: Workspace = size.allocate(bench.arena)?;
        let mut outputs = Outputs::allocate(bench.arena, &shape, cell.dtype)?;
        let mut lse: Buffer<f32> = bench.arena.alloc(Label::Activations, cell.layers * shape.rows())?;
        let mut total_ns = 0;
        for (layer, lse) in lse.chunks_mut(shape.rows()).enumerate() {
            let sequences = layer * cell.batch..(layer + 1) * cell.batch;
            let kv = Sequences { cache: &self.cache, first: sequences.start, step: 1 };
            let call = Forward { shape, params: cell.params(), q: q.sequences(sequences), kv: &kv, cpu: bench.cpu };
            bench.poison(&mut outputs);
            let (layer_ns, result) = timed(|| kernel.forward(&call, &mut outputs, &mut workspace));
            result?;
            total_ns += layer_ns;
            if bench.truth.is_some() {
                finite(&outputs)?;
            }
            lse.copy_from_slice(&outputs.lse);
        }
        Ok((total_ns, lse))
    }
}
