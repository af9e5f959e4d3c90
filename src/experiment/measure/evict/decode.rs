//! Decode steps over what stayed.

use super::late::Late;
use super::{Session, judging};
use crate::attention::{Outputs, Shape, kernel};
use crate::experiment::measure::check::finite;
use crate::experiment::measure::{Prepared, Turn, TurnError, timed};
use crate::memory::Label;
use crate::policy::Decoding;

/// One decode step over at most everything; the workspace is taken once for all steps.
pub(super) fn step_shape(prepared: &Prepared) -> Shape {
    Shape { q_len: 1, kv_len: super::most_tokens(prepared), ..prepared.cell.shape() }
}

impl Session<'_> {
    /// Decodes the new tokens one by one; adds the mean times of a step and of what the schedule costs.
    pub(super) fn decode(&mut self, turn: &mut Turn) -> Result<Late, TurnError> {
        let (cell, bench) = (&self.prepared.cell, self.bench);
        let (k, v) = (bench.workload.k.view(), bench.workload.v.view());
        let kernel = kernel("decode").expect("the decode kernel is built in");
        let shape = step_shape(self.prepared);
        let mut workspace =
            kernel.workspace(&shape, &cell.params(), cell.dtype, bench.cpu.threads()).allocate(bench.arena)?;
        let mut outputs = Outputs::allocate(bench.arena, &shape, cell.dtype)?;
        let mut late = Late {
            o: bench.arena.alloc(Label::Activations, cell.new_tokens * shape.rows() * cell.head_dim)?,
            lse: bench.arena.alloc(Label::Activations, cell.new_tokens * shape.rows())?,
            live_bytes: Vec::new(),
            read_bytes: 0,
        };
        let (mut decode_ns, mut judge_ns) = (0, 0);
        for step in 0..cell.new_tokens {
            let token = cell.context_tokens + step;
            self.cache.append(k, v, token..token + 1)?;
            bench.poison(&mut outputs);
            let call = self.call(token..token + 1);
            let (step_ns, result) = timed(|| kernel.forward(&call, &mut outputs, &mut workspace));
            result?;
            decode_ns += step_ns;
            if bench.truth.is_some() {
                finite(&outputs)?;
                late.store(step, &outputs);
                late.live_bytes.push(self.kv_bytes_live());
                let tokens: usize = self.cache.lens().iter().sum();
                late.read_bytes += tokens as u64 * self.cache.shape().token_bytes();
            }
            if let Some(policy) = judging(self.prepared) {
                let (ns, result) = timed(|| self.judge_step(policy, step, &outputs.lse));
                result?;
                judge_ns += ns;
            }
        }
        let steps = cell.new_tokens as u64;
        turn.samples_ns.insert("decode", decode_ns / steps);
        if judging(self.prepared).is_some_and(|policy| policy.schedule.decoding != Decoding::Never) {
            turn.samples_ns.insert("decode_evict", judge_ns / steps);
        }
        Ok(late)
    }
}
