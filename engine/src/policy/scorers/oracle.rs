//! `oracle`: keeps the tokens that the future queries really attend to. No other choice of as many tokens of each head keeps
//! more of their attention; of less error in their outputs it is no bound (`oracle_output.rs`).

use crate::attention::{Shape, export};
use crate::memory::Label;
use crate::policy::{Context, Policy, PolicyEntry, PolicyError, Scorer, Statistic};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "oracle",
    about: "keeps what future queries attend to: knows the future, and no choice of as many tokens of a head keeps more of that attention",
    paper: "",
    parameters: &[],
    build: |_, _| Ok(Policy::after_prefill(Oracle)),
};

struct Oracle;

impl Scorer for Oracle {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::FutureAttention]
    }

    fn scratch_bytes(&self, shape: &Shape, threads: usize) -> u64 {
        4 * (export::workspace(shape, threads) + shape.batch * shape.kv_heads * shape.kv_len) as u64
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let missing = PolicyError::Missing { policy: "oracle", what: "the queries that come after the context" };
        let future = context.future.as_ref().ok_or(missing)?;
        let shape = future.call.shape;
        let elements = export::workspace(&shape, future.call.cpu.threads());
        let mut scratch = context.arena.alloc(Label::Workspace, elements)?;
        let mut sums = context.arena.alloc::<f32>(Label::Policy, shape.batch * shape.kv_heads * shape.kv_len)?;
        export::column_sums(&future.call, future.lse, 0..shape.q_len, &mut sums, &mut scratch);
        // The future's keys are the context's keys and those that come later; only the former can be evicted now.
        let kv_len = context.call.shape.kv_len;
        for (target, source) in scores.chunks_mut(kv_len).zip(sums.chunks(shape.kv_len)) {
            target.copy_from_slice(&source[..kv_len]);
        }
        Ok(())
    }
}
