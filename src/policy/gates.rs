//! Numbers that a policy gives tokens as they arrive, from their hidden states ([`Scorer::gate`](super::Scorer::gate)):
//! worked out where a token's hidden state is at hand, which is once, carried by the cache, and shown to eviction steps as
//! [`Context::gates`].

use super::{Context, Policy, PolicyError, Statistic};
use crate::cache::{Column, PagedCache};
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::tensor::TensorView;

impl Policy {
    /// Gives the latest tokens of `sequence` of a cache, one for each of `hidden`, the gates that they carry from now on;
    /// `layer` is the model's number of the sequence's layer. Does nothing for a policy without a scorer.
    ///
    /// # Errors
    /// When other sequences share pages and the arena has no room for copies.
    ///
    /// # Panics
    /// When the cache does not keep [`Column::Gate`].
    pub fn carry_gates<'h>(
        &self,
        cache: &mut PagedCache,
        (layer, sequence): (usize, usize),
        hidden: impl ExactSizeIterator<Item = &'h [f32]>,
    ) -> Result<(), ArenaError> {
        let Some(scorer) = &self.scorer else { return Ok(()) };
        let mut gates = vec![0.0; cache.shape().kv_heads];
        let tokens = hidden.len();
        for (token, hidden) in hidden.enumerate() {
            scorer.gate(layer, hidden, &mut gates);
            for (head, &gate) in gates.iter().enumerate() {
                let list = cache.list(sequence, head);
                cache.set_column(list, cache.lens()[list] - tokens + token, Column::Gate, gate)?;
            }
        }
        Ok(())
    }

    /// Gates of tokens that are in no cache, `[B, Hkv, kv_len]`, from their hidden states `[B, 1, kv_len, hidden]`; `None`
    /// where there are none, or the policy looks at none.
    ///
    /// # Errors
    /// When the arena has no room.
    pub(crate) fn gates(
        &self,
        context: &Context<'_>,
        hidden: Option<TensorView<'_>>,
    ) -> Result<Option<Buffer<f32>>, PolicyError> {
        let scorer = self.scorer.as_ref().filter(|_| self.looks_at(Statistic::HiddenStates));
        let (Some(scorer), Some(hidden)) = (scorer, hidden) else { return Ok(None) };
        let (heads, kv_len) = (context.call.shape.kv_heads, context.call.shape.kv_len);
        let mut all = context.arena.alloc(Label::Policy, context.lists() * kv_len)?;
        let (mut row, mut gates) = (vec![0.0; hidden.dims()[3]], vec![0.0; heads]);
        for (sequence, all) in all.chunks_mut(heads * kv_len).enumerate() {
            for token in 0..kv_len {
                hidden.read_rows(sequence, 0, token, &mut row);
                scorer.gate(context.layer_number(sequence), &row, &mut gates);
                gates.iter().enumerate().for_each(|(head, &gate)| all[head * kv_len + token] = gate);
            }
        }
        Ok(Some(all))
    }
}

/// Gates that the tokens of some lists of a cache carry, `[lists, kv_len]`; `list` gives the number of each.
///
/// # Errors
/// When the arena has no room.
pub fn carried(
    cache: &PagedCache,
    lists: usize,
    list: impl Fn(usize) -> usize,
    kv_len: usize,
    arena: &Arena,
) -> Result<Buffer<f32>, ArenaError> {
    let mut all = arena.alloc::<f32>(Label::Policy, lists * kv_len)?;
    for (index, gates) in all.chunks_mut(kv_len).enumerate() {
        let list = list(index);
        let len = cache.lens()[list];
        gates[..len].iter_mut().enumerate().for_each(|(slot, gate)| *gate = cache.column(list, slot, Column::Gate));
    }
    Ok(all)
}
