//! SnapKV (arXiv 2404.14469): what the last queries of the prompt look at is what the answer will need.
//!
//! The score is the attention that the last `window` queries give a token, averaged over these queries and the query
//! heads of the group, smoothed by an average pool of width `kernel` along the sequence; the window itself stays.
//! Defaults and order of steps are those of NVIDIA's kvpress (window 64, kernel 5).

use crate::attention::{Shape, export};
use crate::memory::Label;
use crate::named::Parameter;
use crate::policy::{Context, Policy, PolicyEntry, PolicyError, Protect, Scorer, Statistic};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "snapkv",
    about: "keeps what the last queries of the prompt attend to, and these last tokens",
    paper: "2404.14469",
    parameters: &[
        Parameter { name: "window", default: "64", about: "observing queries, and recent tokens kept" },
        Parameter { name: "kernel", default: "5", about: "width of the average pool, odd" },
    ],
    build: |named| {
        let (window, kernel) = (named.count("window", 64, 1)?, named.count("kernel", 5, 1)?);
        if kernel.is_multiple_of(2) {
            return Err(named.wrong("kernel", "odd, so that the pool is centred".into()));
        }
        Ok(Policy::after_prefill(SnapKv { window, kernel }))
    },
};

struct SnapKv {
    window: usize,
    kernel: usize,
}

impl Scorer for SnapKv {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::RecentAttention]
    }

    fn protect(&self, _: usize) -> Protect {
        Protect { sink: 0, window: self.window }
    }

    fn recent_queries(&self) -> usize {
        self.window
    }

    fn scratch_bytes(&self, shape: &Shape, threads: usize) -> u64 {
        4 * export::workspace(shape, threads).max(shape.kv_len) as u64
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let shape = context.call.shape;
        recent_attention(context, self.window, scores)?;
        let mut raw = context.arena.alloc::<f32>(Label::Workspace, shape.kv_len)?;
        for (list, scores) in scores.chunks_mut(shape.kv_len).enumerate() {
            // The window's own columns are left out of the pool: past its end there are zeros.
            let len = context.call.kv.len(list / shape.kv_heads, list % shape.kv_heads);
            let judged = len.saturating_sub(self.window);
            raw[..judged].copy_from_slice(&scores[..judged]);
            average_pool(&raw[..judged], self.kernel, &mut scores[..judged]);
            scores[judged..len].fill(0.0);
        }
        Ok(())
    }
}

/// Mean attention that the last `window` queries give each token: `[B, Hkv, kv_len]`.
pub(super) fn recent_attention(context: &Context<'_>, window: usize, scores: &mut [f32]) -> Result<(), PolicyError> {
    let shape = context.call.shape;
    let queries = shape.q_len.saturating_sub(window)..shape.q_len;
    let count = queries.len() as f32;
    let elements = export::workspace(&shape, context.call.cpu.threads());
    let mut scratch = context.arena.alloc(Label::Workspace, elements)?;
    export::column_sums(&context.call, context.lse, queries, scores, &mut scratch);
    scores.iter_mut().for_each(|score| *score /= count);
    Ok(())
}

/// Mean over a centred window of `width` entries, with zeros past both ends (torch's `avg_pool1d` with same padding).
fn average_pool(source: &[f32], width: usize, target: &mut [f32]) {
    let half = width / 2;
    for (index, out) in target.iter_mut().enumerate() {
        let range = index.saturating_sub(half)..source.len().min(index + half + 1);
        *out = source[range].iter().sum::<f32>() / width as f32;
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_pool_is_centred_and_padded_with_zeros() {
        let mut target = [0.0; 5];
        super::average_pool(&[3.0, 0.0, 0.0, 6.0, 9.0], 3, &mut target);
        assert_eq!(target, [1.0, 1.0, 2.0, 5.0, 5.0]);
    }
}
