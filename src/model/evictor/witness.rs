//! What a prefill shows to policies that judge it later: its queries, and the attention that tokens received, once for
//! all of them.

use super::held::Held;
use super::{Evictor, Received, Wanted, wanted_of_prefill};
use crate::attention::Forward;
use crate::cache::Column;
use crate::memory::{Arena, ArenaError};
use crate::model::ModelError;
use crate::policy::{Policy, Statistic, evict};

/// Keeps what some policies look at while the first sequence is prefilled.
pub(in crate::model) struct Witness {
    arena: Arena,
    wanted: Wanted,
    accumulates: bool,
    held: Option<Held>,
}

impl Witness {
    /// The sequence that is witnessed.
    pub const SEQUENCE: usize = 0;

    /// For these policies; those that never evict look at nothing.
    pub fn new<'p>(arena: &Arena, policies: impl Iterator<Item = &'p Policy>, columns: &[Column]) -> Self {
        let (mut wanted, mut accumulates) = (Wanted::Latest(0), false);
        for policy in policies.filter(|policy| policy.scorer.is_some()) {
            wanted = match (wanted, wanted_of_prefill(policy)) {
                (Wanted::Latest(some), Wanted::Latest(others)) => Wanted::Latest(some.max(others)),
                _ => Wanted::All,
            };
            accumulates |= policy.looks_at(Statistic::AccumulatedAttention);
        }
        assert!(!accumulates || columns.contains(&Column::Attention), "a cache with a column of attention");
        Witness { arena: arena.clone(), wanted, accumulates, held: None }
    }

    /// Before another prefill.
    pub fn forget(&mut self) {
        self.held = None;
    }

    /// As [`super::Evictor::see`], of the witnessed sequence alone.
    pub fn see(
        &mut self,
        layer: usize,
        layers: usize,
        call: &Forward<'_>,
        lse: &[f32],
    ) -> Result<Option<Received>, ModelError> {
        if self.wanted == Wanted::Latest(0) {
            return Ok(None);
        }
        let held = match &mut self.held {
            Some(held) => held,
            held => held.insert(Held::new(&self.arena, layers, &call.shape, self.wanted)?),
        };
        held.push(layer, call.q, lse)?;
        if !self.accumulates {
            return Ok(None);
        }
        Ok(Some(Received { kv_len: call.shape.kv_len, sums: evict::received(call, lse, &self.arena)? }))
    }
}

impl Evictor<'_> {
    /// Looks at what a prefill showed before this policy was put to work, in place of `sequence`'s own.
    pub fn adopt(&mut self, sequence: usize, witness: &Witness) -> Result<(), ArenaError> {
        let Some(policy) = self.judging() else { return Ok(()) };
        let held = witness.held.as_ref().expect("a prefill was witnessed");
        self.sequences[sequence].held = Some(held.copy(Some(wanted_of_prefill(policy)))?);
        Ok(())
    }
}
