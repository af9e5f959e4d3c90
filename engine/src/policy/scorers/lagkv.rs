//! LagKV (arXiv 2504.04704): tokens that differ from what comes next. The cache is cut into partitions of `lag` tokens;
//! the channels of each are scaled by the least and the largest value of the next one, and tokens whose channels spread
//! most, in the key and in the value, stay.
//!
//! Formula and defaults are kvpress's. Without `cross` the score is the rank in the token's own partition over `lag`, so
//! that partitions tie exactly; equal tokens of a partition share the lower rank. The last full partition and what is
//! left over score 1, the most, but are not protected otherwise; the sinks are. A context of less than two partitions is
//! kept by recency. A channel that is constant in the next partition gives kvpress an infinity; here it counts nothing.

use crate::attention::Shape;
use crate::memory::Label;
use crate::named::Parameter;
use crate::policy::{Context, List, Policy, PolicyEntry, PolicyError, Protect, Scorer, Statistic, each_list};
use std::ops::Range;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "lagkv",
    about: "keeps the tokens whose channels spread most on the scale of the tokens that follow",
    paper: "2504.04704",
    parameters: &[
        Parameter { name: "sink", default: "4", about: "first tokens kept" },
        Parameter { name: "lag", default: "128", about: "tokens of a partition" },
        Parameter { name: "cross", default: "false", about: "true: compare partitions by score, not by rank" },
    ],
    build: |named, _| {
        let (sink, lag) = (named.count("sink", 4, 0)?, named.count("lag", 128, 1)?);
        Ok(Policy::after_prefill(LagKv { sink, lag, cross: named.flag("cross", false)? }))
    },
};

/// Scaled channels are cut off here, where their squares are still numbers.
const LARGEST: f32 = 1e15;

struct LagKv {
    sink: usize,
    lag: usize,
    cross: bool,
}

impl Scorer for LagKv {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::Keys, Statistic::Values]
    }

    fn protect(&self, _: usize) -> Protect {
        Protect { sink: self.sink, window: 0 }
    }

    fn scratch_bytes(&self, shape: &Shape, _: usize) -> u64 {
        4 * (shape.batch * shape.kv_heads * shape.kv_len) as u64
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let mut scratch = context.arena.alloc::<f32>(Label::Workspace, scores.len())?;
        each_list(context, scores, &mut scratch, |list, scores, scratch| {
            let sinks = list.sinks(self.sink);
            let scored_tokens = list.len - sinks;
            scores[..sinks].fill(1.0);
            if scored_tokens < 2 * self.lag {
                let recency = |i: usize| i as f32 / scored_tokens as f32;
                scores[sinks..].iter_mut().enumerate().for_each(|(i, score)| *score = recency(i));
                return;
            }
            let last = scored_tokens / self.lag - 1;
            for partition in 0..last {
                let start = sinks + partition * self.lag;
                let (own, next) = (start..start + self.lag, start + self.lag..start + 2 * self.lag);
                let (of_keys, of_values) = (&mut scores[own.clone()], &mut scratch[..self.lag]);
                spread(own.clone(), next.clone(), list.width(), of_keys, |range, visit| list.key_blocks(range, visit));
                spread(own, next, list.width(), of_values, |range, visit| list.value_blocks(range, visit));
                of_keys.iter_mut().zip(&*of_values).for_each(|(key, value)| *key = (*key + value) / 2.0);
                if !self.cross {
                    ranks(of_keys, of_values);
                }
            }
            scores[sinks + last * self.lag..].fill(1.0);
        });
        Ok(())
    }
}

/// Writes the softmax, over the tokens `own`, of the standard deviation of their channels on the scale of `next`.
fn spread(
    own: Range<usize>,
    next: Range<usize>,
    width: usize,
    scores: &mut [f32],
    rows: impl Fn(Range<usize>, &mut dyn FnMut(usize, &[f32])),
) {
    let mut least = [f32::INFINITY; Shape::MAX_HEAD_DIM];
    let mut most = [f32::NEG_INFINITY; Shape::MAX_HEAD_DIM];
    rows(next, &mut |_, rows| {
        for row in rows.chunks_exact(width) {
            least.iter_mut().zip(row).for_each(|(least, x)| *least = if *x < *least { *x } else { *least });
            most.iter_mut().zip(row).for_each(|(most, x)| *most = if *x > *most { *x } else { *most });
        }
    });
    let mut factors = most;
    for (factor, least) in factors[..width].iter_mut().zip(&least) {
        let range = *factor - least;
        *factor = if range >= f32::MIN_POSITIVE { 1.0 / range } else { 0.0 };
    }
    let (first, mut scaled) = (own.start, [0.0f32; Shape::MAX_HEAD_DIM]);
    let scaled = &mut scaled[..width];
    rows(own, &mut |start, rows| {
        for (index, row) in rows.chunks_exact(width).enumerate() {
            for ((to, x), (least, factor)) in scaled.iter_mut().zip(row).zip(least.iter().zip(&factors)) {
                *to = ((x - least) * factor).clamp(-LARGEST, LARGEST);
            }
            scores[start - first + index] = deviation(scaled);
        }
    });
    let highest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    scores.iter_mut().for_each(|score| *score = (*score - highest).exp());
    let sum: f32 = scores.iter().sum();
    scores.iter_mut().for_each(|score| *score /= sum);
}

/// Standard deviation with `N - 1`; of one number 0.
fn deviation(row: &[f32]) -> f32 {
    // Lane by lane, for the compiler's vectors.
    const LANES: usize = 8;
    let sum_of = |f: &dyn Fn(f32) -> f32| -> f32 {
        let (whole, rest) = row.as_chunks::<LANES>();
        let mut lanes = [0.0f32; LANES];
        for chunk in whole {
            for lane in 0..LANES {
                lanes[lane] += f(chunk[lane]);
            }
        }
        lanes.iter().sum::<f32>() + rest.iter().map(|&x| f(x)).sum::<f32>()
    };
    let mean = sum_of(&|x| x) / row.len() as f32;
    let squares = sum_of(&|x| (x - mean) * (x - mean));
    (squares / row.len().saturating_sub(1).max(1) as f32).sqrt()
}

/// Replaces scores by how many are lower, over their number.
fn ranks(scores: &mut [f32], sorted: &mut [f32]) {
    sorted.copy_from_slice(scores);
    sorted.sort_unstable_by(f32::total_cmp);
    let count = scores.len() as f32;
    for score in scores {
        *score = sorted.partition_point(|other| other.total_cmp(score).is_lt()) as f32 / count;
    }
}

impl List<'_> {
    /// Slots at the front that hold the first `sink` positions of the sequence.
    pub(super) fn sinks(&self, sink: usize) -> usize {
        (0..self.len.min(sink)).take_while(|&slot| self.position(slot) < sink).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_count_what_is_lower() {
        let mut scores = [0.3, 0.1, 0.9, 0.3];
        ranks(&mut scores, &mut [0.0; 4]);
        assert_eq!(scores, [0.25, 0.0, 0.75, 0.25]);
    }

    #[test]
    fn deviations_divide_by_one_less() {
        assert!((deviation(&[1.0, 2.0, 3.0, 4.0]) - (5.0f32 / 3.0).sqrt()).abs() < 1e-6);
        let ten: Vec<f32> = (0..10).map(|x| x as f32).collect();
        assert!((deviation(&ten) - (55.0f32 / 6.0).sqrt()).abs() < 1e-6);
        assert_eq!(deviation(&[7.0]), 0.0);
    }

    #[test]
    fn channels_are_scaled_by_the_next_partition() {
        // The next partition spans 0..2 and 1..1: the second channel counts nothing. Scaled: (0.5, 0), (2, 0).
        let rows = [[1.0f32, 5.0], [4.0, 9.0], [0.0, 1.0], [2.0, 1.0]];
        let mut scores = [0.0; 2];
        spread(0..2, 2..4, 2, &mut scores, |range, visit| visit(range.start, rows[range].as_flattened()));
        let spreads = [0.5 / 2f32.sqrt(), 2.0 / 2f32.sqrt()].map(f32::exp);
        assert!((scores[1] - spreads[1] / (spreads[0] + spreads[1])).abs() < 1e-6, "{scores:?}");
        assert!((scores[0] + scores[1] - 1.0).abs() < 1e-6);
    }
}
