//! Judgements between decode steps: begun behind the step's own kernels, so that what they find lands on the host with the
//! step's logits, and ended when it has. Nothing else is waited for, and their memory stays from one to the next.
//!
//! Budgets that are divided by scores are the exception: these come to the host in the middle of a judgement.

use super::attend::attended;
use super::evict::DeviceEvictor;
use super::held::Held;
use crate::attention::Shape;
use crate::attention::cuda::{Results, Scratch, decode_paged};
use crate::cache::cuda::DeviceCache;
use crate::device::cuda::{CudaError, Device, DeviceBuffer, Growing, Landing, Runtime};
use crate::memory::{Arena, Label};
use crate::model::decoder::params;
use crate::model::{Config, ModelError};
use crate::policy::cuda::{
    Queries, begin_leaving, begin_score, begin_select, divide, divides_by_scores, highest_of, scratch_bytes, staying,
};
use crate::policy::{Decoding, Policy};

/// Where the numbers of judgements lie.
pub(super) struct Room {
    scores: Growing,
    scratch: Growing,
    /// Slots that stay.
    slots: Growing,
    /// How many stay of each list.
    counts: DeviceBuffer,
    /// What is found of each list: the best score that it lost among it, which later judgements look at.
    found: DeviceBuffer,
    /// The latest queries and their log-sum-exps, oldest first.
    queries: [Growing; 2],
    again: Again,
}

/// What is written when queries are asked once more: outputs, which nobody reads, and partial results.
struct Again {
    o: Growing,
    scratch: Option<Scratch>,
}

/// What a judgement that was begun has yet to do.
enum Due {
    /// To keep so many tokens of each list.
    Keep(Vec<usize>),
    /// To let a token go from each list that has found one.
    Leave,
}

/// A judgement that was begun.
pub(super) struct Begun {
    due: Due,
    /// Slots of each list's part.
    width: usize,
}

/// Bytes that a judgement lets land, of so many lists.
pub(super) fn landing_bytes(lists: usize) -> usize {
    16 * lists
}

impl Room {
    /// Nothing yet, but for the best scores that lists lost so far.
    fn new(device: &Device, arena: &Arena, lists: usize, best_lost: &[f32]) -> Result<Self, CudaError> {
        let none = |label| Growing::new(device, arena, label);
        let mut found = device.alloc(arena, Label::Policy, landing_bytes(lists) as u64)?;
        found.begin_write(device, 0, bytemuck::cast_slice(best_lost))?;
        Ok(Room {
            scores: none(Label::Policy)?,
            scratch: none(Label::Workspace)?,
            slots: none(Label::Policy)?,
            counts: device.alloc(arena, Label::Policy, 4 * lists as u64)?,
            found,
            queries: [none(Label::Policy)?, none(Label::Policy)?],
            again: Again { o: none(Label::Policy)?, scratch: None },
        })
    }
}

impl DeviceEvictor<'_> {
    /// Begins what the schedule asks for after a decode step, whose kernels were begun; what it finds lands behind `start`.
    ///
    /// # Errors
    /// When there is no room, or a kernel fails.
    pub fn begin_step(
        &mut self,
        config: &Config,
        runtime: &Runtime,
        cache: &DeviceCache,
        seen_tokens: usize,
        (landing, start): (&mut Landing, usize),
    ) -> Result<(), ModelError> {
        let Some(policy) = self.judging() else { return Ok(()) };
        self.steps += 1;
        let leaves = match policy.schedule.decoding {
            Decoding::EverySteps(every) if self.steps.is_multiple_of(every) => false,
            Decoding::Delayed => true,
            _ => return Ok(()),
        };
        let lists = cache.shape().lists();
        let mut room = match self.room.take() {
            Some(room) => room,
            None => Room::new(runtime.device(), &self.arena, lists, &self.best_lost)?,
        };
        let due = self.begin_judgement(config, runtime, cache, seen_tokens, &mut room, leaves)?;
        landing.begin(start, &room.found, landing_bytes(lists))?;
        self.begun = Some(Begun { due, width: cache.max_len() });
        self.room = Some(room);
        Ok(())
    }

    /// Begins to score, and to choose: of all tokens, or of those that have just left the recent ones, which look at no
    /// queries.
    fn begin_judgement(
        &self,
        config: &Config,
        runtime: &Runtime,
        cache: &DeviceCache,
        seen_tokens: usize,
        room: &mut Room,
        leaves: bool,
    ) -> Result<Due, ModelError> {
        let (device, arena, policy) = (runtime.device(), &self.arena, self.eviction.policy);
        let (lists, width) = (cache.shape().lists(), cache.max_len());
        let Room { scores, scratch, slots, counts, found, queries, again } = room;
        let queries = match self.held.as_ref().filter(|_| !leaves) {
            Some(held) => Some(again.ask(config, runtime, arena, cache, held, queries)?),
            None => None,
        };
        let context = self.context(config, runtime, queries, seen_tokens);
        let scores = scores.of(device, arena, 4 * (lists * width) as u64)?;
        let slots = slots.of(device, arena, 4 * (lists * width) as u64)?;
        let scratch = scratch.of(device, arena, scratch_bytes_of(policy, lists, width, config.head_dim))?;
        begin_score(policy, &context, cache, [&mut *scores, scratch, &mut *found])?;
        if leaves {
            let recent = policy.scorer.as_ref().map_or(0, |scorer| scorer.protect(self.budget_tokens).window);
            begin_leaving(&context, cache, [scores, found], (counts, slots), recent)?;
            return Ok(Due::Leave);
        }
        let highest_judged = match divides_by_scores(policy) {
            true => {
                let mut words = vec![0u32; 4 * lists];
                found.read(bytemuck::cast_slice_mut(&mut words))?;
                highest_of(cache, scores, &words)?
            }
            false => f32::NEG_INFINITY,
        };
        let stay = divide(policy, &context, cache, scores, highest_judged)?;
        write_counts(device, counts, &stay)?;
        begin_select(&context, cache, [scores, found], (counts, slots))?;
        Ok(Due::Keep(stay))
    }

    /// Ends the judgement that was begun after the step, with what has landed of it: the cache shrinks, and keeps the room
    /// that the next token needs.
    ///
    /// # Errors
    /// When the policy gave scores that are no numbers, or a kernel fails.
    pub fn end_step(
        &mut self,
        config: &Config,
        runtime: &Runtime,
        cache: &mut DeviceCache,
        seen_tokens: usize,
        found: &[u32],
    ) -> Result<(), ModelError> {
        let (Some(Begun { due, width }), Some(room)) = (self.begun.take(), &mut self.room) else { return Ok(()) };
        highest_of(cache, room.scores.now(), found)?;
        let stay = match due {
            Due::Keep(stay) => stay,
            Due::Leave => {
                let stay = staying(cache, found);
                write_counts(runtime.device(), &mut room.counts, &stay)?;
                stay
            }
        };
        let before: usize = cache.lens().iter().sum();
        cache.begin_keep(runtime, room.slots.now(), width, &stay, &room.counts)?;
        if self.eviction.policy.rerotates {
            cache.set_rope(&config.rope.frequencies(config.head_dim, config.max_positions, seen_tokens))?;
            cache.turn_newest(runtime, 0..cache.shape().lists(), cache.max_len())?;
            self.turns = true;
        }
        self.evicted_tokens += (before - stay.iter().sum::<usize>()) as u64;
        cache.release(runtime, 1)?;
        Ok(())
    }
}

impl Again {
    /// The latest queries; where they are more than the last one's, the lists have changed since they were asked, and they
    /// are asked again.
    fn ask<'q>(
        &mut self,
        config: &Config,
        runtime: &Runtime,
        arena: &Arena,
        cache: &DeviceCache,
        held: &Held,
        [q, lse]: &'q mut [Growing; 2],
    ) -> Result<Queries<'q>, ModelError> {
        let (device, q_len, [q_bytes, lse_bytes]) = (runtime.device(), held.count(), held.dense_bytes());
        let (q, lse) = (q.of(device, arena, q_bytes)?, lse.of(device, arena, lse_bytes)?);
        held.begin_dense(runtime, [&mut *q, &mut *lse])?;
        if q_len > 1 {
            let shape = Shape { batch: config.layers, ..attended(config, q_len, cache.max_len()) };
            let (dtype, limits) = (cache.shape().dtype(), device.limits());
            let plan = decode_paged(&shape, &params(config, 0), dtype, limits, cache.shape().page_tokens)?;
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

/// Begins to tell the GPU how many tokens stay of each list.
fn write_counts(device: &Device, counts: &mut DeviceBuffer, stay: &[usize]) -> Result<(), CudaError> {
    let numbers: Vec<i32> = stay.iter().map(|&count| count as i32).collect();
    counts.begin_write(device, 0, bytemuck::cast_slice(&numbers))
}

/// Scratch memory of a policy's scores.
fn scratch_bytes_of(policy: &Policy, lists: usize, width: usize, head_dim: usize) -> u64 {
    let recipe = policy.scorer.as_ref().and_then(|scorer| scorer.recipe());
    recipe.map_or(0, |recipe| scratch_bytes(&recipe, lists, width, head_dim))
}
