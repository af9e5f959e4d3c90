//! Numbers that a policy gives tokens as they arrive, from their hidden states ([`Scorer::gate`](super::Scorer::gate)):
//! worked out where a token's hidden state is at hand, which is once, carried by the cache, and shown to eviction steps as
//! [`Context::gates`].

use super::{Context, Policy, PolicyError, Statistic};
use crate::cache::{Column, PagedCache};
use crate::device::Cpu;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::tensor::TensorView;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// Whose hidden state a token's gate is worked out from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecidedBy {
    /// The token's own.
    #[default]
    Itself,
    /// That of the token behind it, as in NVIDIA's DMS. The newest token's gate is 0 until there is one: a policy protects it.
    Next,
}

impl DecidedBy {
    /// How it is spelled.
    pub const fn name(self) -> &'static str {
        match self {
            DecidedBy::Itself => "itself",
            DecidedBy::Next => "next",
        }
    }

    /// What a name means.
    pub fn named(name: &str) -> Option<Self> {
        [DecidedBy::Itself, DecidedBy::Next].into_iter().find(|by| by.name() == name)
    }

    /// Tokens between the one that decides and the one that is decided on.
    pub const fn later(self) -> usize {
        match self {
            DecidedBy::Itself => 0,
            DecidedBy::Next => 1,
        }
    }
}

impl Policy {
    /// Gives tokens of `sequence` of a cache, whose latest ones are those of `hidden`, the gates and weights that they carry from now on; `layer` is
    /// the model's number of the sequence's layer. Does nothing for a policy without a scorer.
    ///
    /// # Errors
    /// When other sequences share pages and the arena has no room for copies.
    ///
    /// # Panics
    /// When the cache does not keep [`Column::Gate`].
    pub fn carry_gates(
        &self,
        cpu: &Cpu,
        cache: &mut PagedCache,
        (layer, sequence): (usize, usize),
        hidden: &[&[f32]],
    ) -> Result<(), ArenaError> {
        let Some(scorer) = &self.scorer else { return Ok(()) };
        let heads = cache.shape().kv_heads;
        // A gate and a weight of each KV head.
        let mut numbers = vec![0.0; 2 * heads * hidden.len()];
        let give = |hidden: &[f32], numbers: &mut [f32]| {
            let (gates, weights) = numbers.split_at_mut(heads);
            weights.fill(1.0);
            scorer.gate(layer, hidden, gates);
            if let Some(action) = &self.action {
                action.weigh(layer, hidden, weights);
            }
        };
        match hidden {
            // Not worth waking a thread for.
            [hidden] => give(hidden, &mut numbers),
            _ => cpu.install(|| {
                let tokens = hidden.par_iter().zip(numbers.par_chunks_mut(2 * heads));
                tokens.for_each(|(hidden, numbers)| give(hidden, numbers));
            }),
        }
        let carries_weights = cache.shape().columns.contains(&Column::Weight);
        for (token, numbers) in numbers.chunks_exact(2 * heads).enumerate() {
            let (gates, weights) = numbers.split_at(heads);
            for (head, (&gate, &weight)) in gates.iter().zip(weights).enumerate() {
                let list = cache.list(sequence, head);
                let slot = cache.lens()[list] - hidden.len() + token;
                if carries_weights {
                    cache.set_column(list, slot, Column::Weight, weight)?;
                }
                if let Some(slot) = slot.checked_sub(self.decided_by.later()) {
                    cache.set_column(list, slot, Column::Gate, gate)?;
                }
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
            let later = self.decided_by.later();
            for token in later..kv_len {
                hidden.read_rows(sequence, 0, token, &mut row);
                scorer.gate(context.layer_number(sequence), &row, &mut gates);
                gates.iter().enumerate().for_each(|(head, &gate)| all[head * kv_len + token - later] = gate);
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
        cache.read_column(list, Column::Gate, &mut gates[..cache.lens()[list]]);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::CacheShape;
    use crate::policy::Scorer;
    use crate::policy::action::{Action, Fold};
    use crate::tensor::{DType, Tensor};

    /// The sum of a hidden state, and its double.
    struct Sums;

    impl Scorer for Sums {
        fn needs(&self) -> Vec<Statistic> {
            vec![Statistic::HiddenStates]
        }

        fn gate(&self, _layer: usize, hidden: &[f32], gates: &mut [f32]) {
            gates.copy_from_slice(&[hidden.iter().sum(), 2.0 * hidden.iter().sum::<f32>()]);
        }

        fn score(&self, _context: &Context<'_>, _scores: &mut [f32]) -> Result<(), PolicyError> {
            Ok(())
        }
    }

    /// Weighs a token by its hidden state's first number, and by half of it.
    struct Weighs;

    impl Action for Weighs {
        fn weighs(&self) -> bool {
            true
        }

        fn weigh(&self, _layer: usize, hidden: &[f32], weights: &mut [f32]) {
            weights.copy_from_slice(&[hidden[0], hidden[0] / 2.0]);
        }

        fn fold(&self, _: &Fold<'_>, _: &mut PagedCache, _: usize, _: &[u32]) -> Result<(), PolicyError> {
            Ok(())
        }
    }

    #[test]
    fn a_token_carries_its_own_gate_or_that_of_the_token_behind_it_whatever_the_chunks() {
        let states: Vec<[f32; 2]> = (1..=6).map(|at| [at as f32, 0.5]).collect();
        let own: Vec<f32> = states.iter().map(|state| state.iter().sum()).collect();
        for (decided_by, expected) in
            [(DecidedBy::Itself, own.clone()), (DecidedBy::Next, own[1..].iter().copied().chain([0.0]).collect())]
        {
            let policy = Policy { decided_by, action: Some(Box::new(Weighs)), ..Policy::after_prefill(Sums) };
            for chunks in [vec![6], vec![1; 6], vec![2, 3, 1]] {
                let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
                let rows = Tensor::from_f32(&arena, Label::Input, DType::F32, [1, 2, 6, 4], &[0.0; 48]).unwrap();
                let shape = CacheShape {
                    batch: 1,
                    kv_heads: 2,
                    head_dim: 4,
                    format: DType::F32.into(),
                    max_tokens: 6,
                    page_tokens: 4,
                    columns: policy.columns(),
                };
                let mut cache = PagedCache::new(&arena, shape).unwrap();
                let mut first = 0;
                for chunk in chunks {
                    cache.append(rows.view(), rows.view(), first..first + chunk).unwrap();
                    let hidden: Vec<&[f32]> = states[first..first + chunk].iter().map(|state| &state[..]).collect();
                    policy.carry_gates(&cpu, &mut cache, (0, 0), &hidden).unwrap();
                    first += chunk;
                }
                let carried = |column, head: usize| {
                    (0..6).map(|slot| cache.column(cache.list(0, head), slot, column)).collect::<Vec<f32>>()
                };
                let of_head = |head| carried(Column::Gate, head);
                // A token's weight is its own, whoever decides on it.
                assert_eq!(carried(Column::Weight, 0), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
                assert_eq!(carried(Column::Weight, 1), [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]);
                let doubled: Vec<f32> = expected.iter().map(|gate| 2.0 * gate).collect();
                assert_eq!([of_head(0), of_head(1)], [expected.clone(), doubled], "{decided_by:?}");
            }
        }
    }
}
