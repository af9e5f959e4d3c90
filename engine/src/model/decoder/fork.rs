//! One prefill for many policies and many questions: a sequence goes on from where another is, and a policy that evicts
//! only after prefill evicts from a prefill that is already there.
//!
//! Pages are shared until a sequence changes them, so that a fork costs nothing but page tables, and an eviction a copy
//! of the pages that stay.

use super::Decoder;
use crate::memories::Modes;
use crate::model::ModelError;
use crate::model::evictor::{Eviction, QueryRecorder};
use crate::model::hook::Hook;
use crate::policy::Policy;

impl<'a> Decoder<'a> {
    /// From now on keeps what `policies` look at while the first sequence is prefilled, for [`Decoder::evict_recorded`].
    ///
    /// # Panics
    /// When a policy that accumulates attention finds no column for it in the setup.
    pub fn record_queries<'p>(&mut self, policies: impl Iterator<Item = &'p Policy>) {
        let recorder = QueryRecorder::new(self.arena, policies, self.setup.columns);
        self.recorder = Some(recorder);
    }

    /// Shows every layer's rows to `hook` from now on.
    pub fn hook(&mut self, hook: &'a dyn Hook) {
        self.hook = Some(hook);
    }

    /// Forgets every sequence, the policy, and what was recorded.
    pub fn clear(&mut self) {
        (0..self.setup.batch).for_each(|sequence| self.free(sequence));
        self.evictor = None;
        if let Some(recorder) = &mut self.recorder {
            recorder.forget();
        }
    }

    /// Takes all tokens from a sequence, and what the policy knows of it.
    pub fn free(&mut self, sequence: usize) {
        if let Some(memory) = &mut self.memory {
            memory.free(self.model.config.layers, self.setup.batch, sequence);
        }
        for layer in 0..self.model.config.layers {
            self.cache.free(layer * self.setup.batch + sequence);
        }
        (self.seen[sequence], self.gaps[sequence]) = (0, false);
        self.fed[sequence].clear();
        if let Some(evictor) = &mut self.evictor {
            evictor.forget(sequence);
        }
    }

    /// Puts sequence `to` where `from` is: its tokens, and what the policy knows of it.
    ///
    /// # Errors
    /// When the arena has no room.
    ///
    /// # Panics
    /// When the two are the same.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), ModelError> {
        assert!(from != to, "a sequence is forked into another");
        self.free(to);
        if let Some(memory) = &mut self.memory {
            memory.fork(self.model.config.layers, self.setup.batch, from, to);
        }
        for layer in 0..self.model.config.layers {
            self.cache.fork(layer * self.setup.batch + from, layer * self.setup.batch + to);
        }
        (self.seen[to], self.gaps[to]) = (self.seen[from], self.gaps[from]);
        self.fed[to] = self.fed[from].clone();
        self.evictor.as_mut().map_or(Ok(()), |evictor| Ok(evictor.fork(from, to)?))
    }

    /// Lets a policy evict from `sequence`, a fork of the first one after its prefill, as if it had been at work in it. Its last
    /// `kept` tokens are never evicted, and the budget does not count them. A policy that never evicts takes the place of
    /// the one before all the same.
    ///
    /// # Errors
    /// When the model cannot do what the policy does, the budget leaves nothing, or the arena has no room.
    ///
    /// # Panics
    /// When nothing was recorded, the policy evicts from chunks of the prefill, or the cache lacks a column of it.
    pub fn evict_recorded(&mut self, sequence: usize, eviction: Eviction<'a>, kept: usize) -> Result<(), ModelError> {
        assert!(eviction.policy.schedule.chunk_tokens.is_none(), "chunks are evicted from while they are read");
        let context = self.seen[sequence] - kept;
        self.evict(eviction, &vec![context; self.setup.batch])?;
        self.never_evict(context..context + kept);
        let recorder = self.recorder.as_ref().expect("prefill was recorded");
        let evictor = self.evictor.as_mut().expect("put to work above");
        evictor.adopt(sequence, recorder)?;
        self.reconstruct_recorded(sequence)?;
        self.eviction_step(sequence, self.seen[sequence], |evictor, scene| evictor.evict_chunk(scene, true))
    }

    /// KV bytes of the pages that a sequence holds, as if it shared none, or of its part of the memory.
    pub fn sequence_kv_bytes(&self, sequence: usize) -> u64 {
        if let Some(memory) = &self.memory {
            return memory.kv_bytes() / self.setup.batch as u64;
        }
        self.lists_of(sequence).map(|list| self.cache.list_kv_bytes(list)).sum()
    }

    /// KV bytes that the latest decode step of a sequence read: all that it holds, unless the policy selects.
    pub fn step_kv_bytes(&self, sequence: usize) -> u64 {
        if let Some(memory) = &self.memory {
            return memory.read_bytes(self.model.config.layers, self.setup.batch, sequence);
        }
        let selected =
            self.evictor.as_ref().and_then(|evictor| evictor.read_bytes(&self.cache, self.setup.batch, sequence));
        selected.unwrap_or_else(|| self.lists_of(sequence).map(|list| self.cache.held_bytes(list)).sum())
    }

    /// What the modes of a sequence's memory hold, by layer; nothing without a memory that has modes.
    pub fn modes(&self, sequence: usize) -> Vec<Modes> {
        let layers = self.model.config.layers;
        self.memory.as_ref().map_or(Vec::new(), |memory| memory.modes(layers, self.setup.batch, sequence))
    }

    /// Tokens that a sequence holds, or rows of its memory, summed over the KV heads of all layers.
    pub fn held_tokens(&self, sequence: usize) -> usize {
        if let Some(memory) = &self.memory {
            return memory.held_rows(self.model.config.layers, self.setup.batch, sequence);
        }
        self.lists_of(sequence).map(|list| self.cache.lens()[list]).sum()
    }

    fn lists_of(&self, sequence: usize) -> impl Iterator<Item = usize> {
        let heads = self.model.config.kv_heads;
        let sequences = (0..self.model.config.layers).map(move |layer| layer * self.setup.batch + sequence);
        sequences.flat_map(move |sequence| (0..heads).map(move |head| self.cache.list(sequence, head)))
    }
}
