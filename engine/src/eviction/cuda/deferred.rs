//! Eviction steps between the decode steps of a model, in two halves: begun behind the decode step's own kernels, so that what
//! they find lands on the host with its logits, and ended when it has. Nothing else is waited for, and their memory stays from
//! one to the next.
//!
//! Budgets that are divided by scores are the exception: these come to the host in the middle of a step.

use super::window::DeviceWindow;
use super::{CudaBackend, CudaView};
use crate::attention::cuda::{Results, Scratch, decode_paged};
use crate::attention::rope::Frequencies;
use crate::attention::{AttentionError, Shape};
use crate::cache::cuda::DeviceCache;
use crate::device::cuda::{CudaError, Device, DeviceBuffer, Growing, Landing};
use crate::eviction::{Plan, Rule};
use crate::memory::{Arena, Label};
use crate::policy::Policy;
use crate::policy::cuda::{
    DevicePolicyError, Queries, begin_leaving, begin_score, begin_select, divide, divides_by_scores, highest_of,
    scratch_bytes, staying,
};

/// The memory of eviction steps, and the one that was begun.
pub(crate) struct Deferred {
    scores: Growing,
    scratch: Growing,
    /// Slots that are retained.
    slots: Growing,
    /// How many are retained of each list.
    counts: DeviceBuffer,
    /// What is found of each list: the best score that it lost among it, which later steps look at.
    found: DeviceBuffer,
    /// The latest queries and their log-sum-exps, oldest first.
    queries: [Growing; 2],
    again: Again,
    begun: Option<Begun>,
}

/// What is written when log-sum-exps are recomputed: outputs, which nobody reads, and partial results.
struct Again {
    o: Growing,
    scratch: Option<Scratch>,
}

/// A step that was begun.
struct Begun {
    due: Due,
    /// Slots of each list's part.
    width: usize,
}

/// What a step that was begun has yet to do.
enum Due {
    /// To retain so many tokens of each list.
    Retain(Vec<usize>),
    /// To evict the token that each list has found, if any.
    Leave,
}

/// Bytes that a step lets land, of so many lists.
pub(crate) fn landing_bytes(lists: usize) -> usize {
    16 * lists
}

impl Deferred {
    /// Memory for the steps over so many lists, whose best scores that they lost are known.
    ///
    /// # Errors
    /// At the arena's limit, or when the GPU has no room.
    pub fn new(device: &Device, arena: &Arena, lists: usize, best_evicted: &[f32]) -> Result<Self, CudaError> {
        let none = |label| Growing::new(device, arena, label);
        let mut found = device.alloc(arena, Label::Policy, landing_bytes(lists) as u64)?;
        found.begin_write(device, 0, bytemuck::cast_slice(best_evicted))?;
        Ok(Deferred {
            scores: none(Label::Policy)?,
            scratch: none(Label::Workspace)?,
            slots: none(Label::Policy)?,
            counts: device.alloc(arena, Label::Policy, 4 * lists as u64)?,
            found,
            queries: [none(Label::Policy)?, none(Label::Policy)?],
            again: Again { o: none(Label::Policy)?, scratch: None },
            begun: None,
        })
    }

    /// Begins to score and to choose; what is found lands behind the landing's `start`. The queries of the `window` are
    /// looked at, where there is one, in place of the view's.
    ///
    /// # Errors
    /// When there is no room, or a kernel fails.
    pub fn begin(
        &mut self,
        backend: &CudaBackend<'_>,
        (plan, rule): (&Plan<'_>, Rule<'_>),
        cache: &DeviceCache,
        (view, window): (&CudaView<'_>, Option<&DeviceWindow>),
        (landing, start): (&mut Landing, usize),
    ) -> Result<(), DevicePolicyError> {
        let due = self.choose(backend, (plan, rule), cache, view, window)?;
        landing.begin(start, &self.found, landing_bytes(cache.shape().lists()))?;
        self.begun = Some(Begun { due, width: cache.max_len() });
        Ok(())
    }

    fn choose(
        &mut self,
        backend: &CudaBackend<'_>,
        (plan, rule): (&Plan<'_>, Rule<'_>),
        cache: &DeviceCache,
        view: &CudaView<'_>,
        window: Option<&DeviceWindow>,
    ) -> Result<Due, DevicePolicyError> {
        let (device, arena, policy) = (backend.runtime.device(), backend.arena, plan.policy);
        let (lists, width) = (cache.shape().lists(), cache.max_len());
        let Deferred { scores, scratch, slots, counts, found, queries, again, .. } = self;
        // What has just left the protected window is scored without queries.
        let leaves = matches!(rule, Rule::Delayed { .. });
        let queries = match window.filter(|_| !leaves) {
            Some(window) => Some(again.ask(backend, cache, view, window, queries)?),
            None => None,
        };
        let view = CudaView { queries, ..*view };
        let context = backend.context(&view, plan.budget_tokens);
        let scores = scores.of(device, arena, 4 * (lists * width) as u64)?;
        let slots = slots.of(device, arena, 4 * (lists * width) as u64)?;
        let scratch = scratch.of(device, arena, scratch_bytes_of(policy, lists, width, cache.shape().head_dim))?;
        begin_score(policy, &context, cache, [&mut *scores, scratch, &mut *found])?;
        if leaves {
            let recent = policy.scorer.as_ref().map_or(0, |scorer| scorer.protect(plan.budget_tokens).window);
            begin_leaving(&context, cache, [scores, found], (counts, slots), recent)?;
            return Ok(Due::Leave);
        }
        let highest = match divides_by_scores(policy) {
            true => {
                let mut words = vec![0u32; 4 * lists];
                found.read(bytemuck::cast_slice_mut(&mut words))?;
                highest_of(cache, scores, &words)?
            }
            false => f32::NEG_INFINITY,
        };
        let retained = divide(policy, &context, cache, scores, highest)?;
        write_counts(device, counts, &retained)?;
        begin_select(&context, cache, [scores, found], (counts, slots))?;
        Ok(Due::Retain(retained))
    }

    /// Ends the step that was begun, if one was, with what has landed of it: the cache shrinks, and keeps the room that the
    /// next token needs. Keys are re-rotated by `rope`, where that is wanted. Returns how many list-tokens were evicted.
    ///
    /// # Errors
    /// When the policy gave scores that are no numbers, or a kernel fails.
    pub fn end(
        &mut self,
        backend: &CudaBackend<'_>,
        cache: &mut DeviceCache,
        rope: Option<&Frequencies>,
        found: &[u32],
    ) -> Result<u64, DevicePolicyError> {
        let (Some(Begun { due, width }), runtime) = (self.begun.take(), backend.runtime) else { return Ok(0) };
        highest_of(cache, self.scores.now(), found)?;
        let retained = match due {
            Due::Retain(retained) => retained,
            Due::Leave => {
                let retained = staying(cache, found);
                write_counts(runtime.device(), &mut self.counts, &retained)?;
                retained
            }
        };
        let before: usize = cache.lens().iter().sum();
        cache.begin_keep(runtime, self.slots.now(), width, &retained, &self.counts)?;
        if let Some(rope) = rope {
            cache.set_rope(rope)?;
            cache.turn_newest(runtime, 0..cache.shape().lists(), cache.max_len())?;
        }
        cache.release(runtime, 1)?;
        Ok((before - retained.iter().sum::<usize>()) as u64)
    }
}

impl Again {
    /// The latest queries; where they are more than the last one's, the lists have changed since they attended, and their
    /// log-sum-exps are recomputed.
    fn ask<'q>(
        &mut self,
        backend: &CudaBackend<'_>,
        cache: &DeviceCache,
        view: &CudaView<'_>,
        window: &DeviceWindow,
        [q, lse]: &'q mut [Growing; 2],
    ) -> Result<Queries<'q>, DevicePolicyError> {
        let CudaBackend { runtime, arena, .. } = *backend;
        let (device, q_len, [q_bytes, lse_bytes]) = (runtime.device(), window.count(), window.dense_bytes());
        let (q, lse) = (q.of(device, arena, q_bytes)?, lse.of(device, arena, lse_bytes)?);
        window.begin_dense(runtime, [&mut *q, &mut *lse])?;
        if q_len > 1 {
            let held = cache.shape();
            let shape = Shape {
                batch: held.batch,
                q_heads: view.q_heads,
                kv_heads: held.kv_heads,
                q_len,
                kv_len: cache.max_len(),
                head_dim: held.head_dim,
            };
            let plan = decode_paged(&shape, &view.params, cache.rows(), device.limits(), held.page_tokens);
            let plan = plan.map_err(|error: AttentionError| CudaError::Operand(error.to_string()))?;
            let scratch = match self.scratch.take() {
                Some(scratch) if scratch.fits(&plan) => scratch,
                old => {
                    drop(old);
                    plan.scratch(device, arena)?
                }
            };
            let scratch = self.scratch.insert(scratch);
            let results = Results { o: self.o.of(device, arena, q_bytes)?, lse: &mut *lse };
            plan.begin_paged(device, &plan.ready(runtime)?, q, &cache.kv(), results, scratch)?;
        }
        Ok(Queries { q, length: q_len, first: 0, lse, q_len })
    }
}

/// Begins to tell the GPU how many tokens are retained of each list.
fn write_counts(device: &Device, counts: &mut DeviceBuffer, retained: &[usize]) -> Result<(), CudaError> {
    let numbers: Vec<i32> = retained.iter().map(|&count| count as i32).collect();
    counts.begin_write(device, 0, bytemuck::cast_slice(&numbers))
}

/// Scratch memory of a policy's scores.
fn scratch_bytes_of(policy: &Policy, lists: usize, width: usize, head_dim: usize) -> u64 {
    let plan = policy.scorer.as_ref().and_then(|scorer| scorer.scoring_plan());
    plan.map_or(0, |plan| scratch_bytes(&plan, lists, width, head_dim))
}
