//! Expected attention (arXiv 2510.00636): the attention that queries to come will give a key, from what queries so far
//! are like. Queries before RoPE are taken as normal numbers with mean `mu` and covariance `S`; rotated by RoPE to the
//! next `future` positions on average, the expectation of `exp(q k / root D)` is `exp(k mu / root D + k S k / 2 D)`.
//!
//! Formula and defaults are kvpress's: the first `sink` tokens are left out, as queries and as keys; the softmax is over
//! keys, and then the mean over the query heads of a group; with `vnorm` the score, plus `epsilon`, is multiplied by the
//! norm of the value. Between decode steps only the latest queries are there, and are what the mean is taken of.

use super::super::linear::{Moments, dot, matrix_len, padded, times};
use super::vnorm::times_value_norm;
use crate::attention::Shape;
use crate::memory::Label;
use crate::named::Parameter;
use crate::policy::{Context, List, Policy, PolicyEntry, PolicyError, Protect, Scorer, Statistic, each_list};
use std::ops::Range;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "expected-attention",
    about: "keeps what queries like those so far would attend to from the positions that come",
    paper: "2510.00636",
    parameters: &[
        FUTURE,
        Parameter { name: "sink", default: "4", about: "first tokens kept, and left out of the queries" },
        Parameter { name: "covariance", default: "true", about: "false: as if all queries were their mean" },
        Parameter { name: "vnorm", default: "true", about: "true: times the norm of the value" },
        Parameter { name: "epsilon", default: "0", about: "added before the norm of the value" },
    ],
    build: |named, _| {
        let (vnorm, epsilon) = (named.flag("vnorm", true)?, named.number("epsilon", 0.0, 0.0..=1e6)? as f32);
        if !vnorm && epsilon > 0.0 {
            return Err(named.wrong("epsilon", "0 where vnorm is false".into()).into());
        }
        Ok(Policy::after_prefill(ExpectedAttention {
            future: named.count_in("future", 512, 1..=MOST_FUTURE)?,
            sink: named.count("sink", 4, 0)?,
            covariance: named.flag("covariance", true)?,
            vnorm,
            epsilon,
        }))
    },
};

/// Most of them: their turns are added up one by one.
pub(super) const MOST_FUTURE: usize = 1 << 20;
/// The parameter that says over how many positions RoPE is averaged.
pub(super) const FUTURE: Parameter =
    Parameter { name: "future", default: "512", about: "positions to come that RoPE is averaged over" };

/// Queries that are looked at between decode steps.
pub(super) const RECENT: usize = 128;

struct ExpectedAttention {
    future: usize,
    sink: usize,
    covariance: bool,
    vnorm: bool,
    epsilon: f32,
}

/// Scratch elements of a list: the logits of a head, and the covariance of its queries.
fn parts(shape: &Shape) -> [usize; 2] {
    [shape.kv_len, matrix_len(shape.head_dim, shape.head_dim)]
}

impl Scorer for ExpectedAttention {
    fn needs(&self) -> Vec<Statistic> {
        let mut needs = vec![Statistic::Keys, Statistic::BeforeRope, Statistic::Queries];
        if self.vnorm {
            needs.push(Statistic::Values);
        }
        needs
    }

    fn protect(&self, _: usize) -> Protect {
        Protect { sink: self.sink, window: 0 }
    }

    fn recent_queries(&self) -> usize {
        RECENT
    }

    fn scratch_bytes(&self, shape: &Shape, _: usize) -> u64 {
        4 * (shape.batch * shape.kv_heads * parts(shape).iter().sum::<usize>()) as u64
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let turn = AverageTurn::ahead(context, self.future, "expected-attention")?;
        let (shape, queries) = (context.call.shape, queries_after(context, self.sink));
        let (width, parts, isa) = (shape.head_dim, parts(&shape), context.call.cpu.isa());
        let root = (width as f32).sqrt();
        let mut scratch =
            context.arena.alloc::<f32>(Label::Workspace, context.lists() * parts.iter().sum::<usize>())?;
        each_list(context, scores, &mut scratch, |list, scores, scratch| {
            let (logits, matrix) = scratch.split_at_mut(parts[0]);
            let (sinks, group) = (list.sinks(self.sink), shape.group());
            let span = sinks..list.len;
            scores.fill(0.0);
            for head in list.head * group..(list.head + 1) * group {
                let mut mean = covariance(context, list, head, queries.clone(), matrix);
                turn.apply(&mut mean[..width]);
                mean.iter_mut().for_each(|x| *x /= root);
                let logits = &mut logits[span.clone()];
                if self.covariance {
                    turn.apply_twice(matrix, width);
                    let factor = 0.5 / (queries.len() * width) as f32;
                    matrix.iter_mut().for_each(|x| *x *= factor);
                    list.key_blocks(span.clone(), |start, keys| {
                        times(isa, keys, width, matrix, width, |index, key, product| {
                            logits[start - sinks + index] = dot(key, &mean[..width]) + dot(key, &product[..width]);
                        });
                    });
                } else {
                    list.key_blocks(span.clone(), |start, keys| {
                        for (index, key) in keys.chunks_exact(width).enumerate() {
                            logits[start - sinks + index] = dot(key, &mean[..width]);
                        }
                    });
                }
                let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                logits.iter_mut().for_each(|x| *x = (*x - highest).exp());
                let factor = 1.0 / (logits.iter().sum::<f32>() * group as f32);
                scores[span.clone()].iter_mut().zip(&*logits).for_each(|(score, x)| *score += factor * x);
            }
        });
        if self.vnorm {
            times_value_norm(context, scores, self.epsilon);
        }
        Ok(())
    }
}

/// Indices of the queries behind the first `sink` positions; all of them where no others are there.
pub(super) fn queries_after(context: &Context<'_>, sink: usize) -> Range<usize> {
    let count = context.call.shape.q_len;
    let first = (sink + count).saturating_sub(context.seen_tokens);
    if first < count { first..count } else { 0..count }
}

/// Mean of a head's queries before RoPE; `matrix` gets the sum of outer products of their distances to it.
pub(super) fn covariance(
    context: &Context<'_>,
    list: &List<'_>,
    head: usize,
    queries: Range<usize>,
    matrix: &mut [f32],
) -> [f32; Shape::MAX_HEAD_DIM] {
    let width = list.width();
    let mut moments = Moments::new(context.call.cpu.isa(), width, matrix);
    // The turn to come was made of RoPE's frequencies, so they are there.
    let _ = context.queries_before_rope(list.batch, head, queries, |query| moments.add_shifted(query));
    moments.centre().1
}

/// RoPE's rotation averaged over positions to come: no rotation, for vectors get shorter by it.
pub(super) struct AverageTurn {
    cos: [f32; Shape::MAX_HEAD_DIM / 2],
    sin: [f32; Shape::MAX_HEAD_DIM / 2],
    /// Pairs that turn, the first channels of a row.
    pairs: usize,
}

impl AverageTurn {
    /// Over the next `future` positions.
    pub fn ahead(context: &Context<'_>, future: usize, policy: &'static str) -> Result<Self, PolicyError> {
        Self::over(context, 0..future, policy)
    }

    /// Over positions at these distances from the next one.
    pub fn over(
        context: &Context<'_>,
        distances: impl Iterator<Item = usize> + Clone,
        policy: &'static str,
    ) -> Result<Self, PolicyError> {
        let missing = PolicyError::Missing {
            policy,
            what: "RoPE's base, to look at queries before RoPE: rope_theta in the tensor file's metadata",
        };
        let frequencies = context.before_rope.ok_or(missing)?.frequencies;
        let (cos, sin) = ([0.0; Shape::MAX_HEAD_DIM / 2], [0.0; Shape::MAX_HEAD_DIM / 2]);
        let mut turn = AverageTurn { cos, sin, pairs: frequencies.rad_per_token().len() };
        for (pair, frequency) in frequencies.rad_per_token().iter().enumerate() {
            let (mut cos, mut sin) = (0.0, 0.0);
            let mut count = 0.0;
            for distance in distances.clone() {
                let (s, c) = ((context.seen_tokens + distance) as f64 * frequency).sin_cos();
                (cos, sin, count) = (cos + c, sin + s, count + 1.0);
            }
            (turn.cos[pair], turn.sin[pair]) = ((cos / count) as f32, (sin / count) as f32);
        }
        Ok(turn)
    }

    /// `row = R row`.
    pub fn apply(&self, row: &mut [f32]) {
        let (first, second) = row.split_at_mut(self.pairs);
        for ((x, y), (cos, sin)) in first.iter_mut().zip(second).zip(self.cos.iter().zip(&self.sin)) {
            (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
        }
    }

    /// `matrix = R matrix R'`.
    fn apply_twice(&self, matrix: &mut [f32], width: usize) {
        let stride = padded(width);
        for row in matrix.chunks_exact_mut(stride).take(width) {
            self.apply(&mut row[..width]);
        }
        let (first, second) = matrix[..width * stride].split_at_mut(self.pairs * stride);
        let pairs = first.chunks_exact_mut(stride).zip(second.chunks_exact_mut(stride));
        for ((first, second), (cos, sin)) in pairs.zip(self.cos.iter().zip(&self.sin)) {
            for (x, y) in first.iter_mut().zip(second) {
                (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_of_a_matrix_is_the_turn_of_what_it_is_made_of() {
        let mut turn = AverageTurn { cos: [0.0; 128], sin: [0.0; 128], pairs: 2 };
        (turn.cos[0], turn.sin[0], turn.cos[1], turn.sin[1]) = (0.5, 0.25, -0.75, 1.0);
        let mut row = [1.0f32, -2.0, 3.0, 5.0];
        let stride = padded(4);
        let mut matrix = vec![0.0; matrix_len(4, 4)];
        for (to, x) in matrix.chunks_exact_mut(stride).zip(row) {
            to[..4].copy_from_slice(&row.map(|y| x * y));
        }
        turn.pairs = 1;
        let mut part = [1.0f32, 3.0, -2.0, 5.0];
        turn.apply(&mut part);
        assert_eq!(part, [1.0 * 0.5 - 3.0 * 0.25, 3.0 * 0.5 + 0.25, -2.0, 5.0]);
        turn.pairs = 2;
        turn.apply(&mut row);
        assert_eq!(row, [1.0 * 0.5 - 3.0 * 0.25, 2.0 * 0.75 - 5.0, 3.0 * 0.5 + 0.25, -5.0 * 0.75 - 2.0]);
        turn.apply_twice(&mut matrix, 4);
        for (got, x) in matrix.chunks_exact(stride).zip(row) {
            assert_eq!(got[..4], row.map(|y| x * y));
        }
    }
}
