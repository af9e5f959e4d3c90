//! CapKV (arXiv 2604.25975): leverage of the values, weighted by how well their keys point along the queries to come.
//!
//! Formula and defaults are kvpress's: the mean query before RoPE of all tokens but the first `sink`, rotated by RoPE on
//! average over the next `future` positions, is the anchor of a query head. A key with cosine `c` to it weighs
//! `w = exp(tau c)`, divided by the largest; the score is `w v C^-1 v'` with `C = I + sum (w + 1e-6) v' v`, averaged over
//! the query heads of a group. Between decode steps the mean is that of the latest queries.

use super::super::linear::{Moments, dot, inverse_factor, matrix_len, padded, times};
use super::expected_attention::{AverageTurn, FUTURE, MOST_FUTURE, RECENT, covariance, queries_after};
use crate::attention::Shape;
use crate::memory::Label;
use crate::named::Parameter;
use crate::policy::{Context, Policy, PolicyEntry, PolicyError, Protect, Scorer, Statistic, each_list};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "cap",
    about: "keeps the values outside what others span, weighted by their keys' direction to expected queries",
    paper: "2604.25975",
    parameters: &[
        Parameter { name: "tau", default: "5", about: "sharpness of the weights" },
        FUTURE,
        Parameter { name: "sink", default: "4", about: "first tokens kept, and left out" },
    ],
    build: |named, _| {
        let tau = named.number("tau", 5.0, 0.0..=1e4)? as f32;
        let (future, sink) = (named.count_in("future", 512, 1..=MOST_FUTURE)?, named.count("sink", 4, 0)?);
        Ok(Policy::after_prefill(Cap { tau, future, sink }))
    },
};

/// Added to the weights in the sum, and the least norm that a cosine is divided by.
const EPSILON: f32 = 1e-6;
const LEAST_NORM: f32 = 1e-12;

struct Cap {
    tau: f32,
    future: usize,
    sink: usize,
}

/// Scratch elements of a list: two square matrices of f64, the values' outer products, the map to rows whose squared
/// norms are the leverages, and the weights.
fn parts(shape: &Shape) -> [usize; 4] {
    let (width, matrix) = (shape.head_dim, matrix_len(shape.head_dim, shape.head_dim));
    [4 * width * width, matrix, matrix, shape.kv_len.next_multiple_of(2)]
}

impl Scorer for Cap {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::Keys, Statistic::Values, Statistic::BeforeRope, Statistic::Queries]
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
        let turn = AverageTurn::ahead(context, self.future, "cap")?;
        let (shape, queries) = (context.call.shape, queries_after(context, self.sink));
        let (width, parts, isa) = (shape.head_dim, parts(&shape), context.call.cpu.isa());
        let mut scratch =
            context.arena.alloc::<f32>(Label::Workspace, context.lists() * parts.iter().sum::<usize>())?;
        each_list(context, scores, &mut scratch, |list, scores, scratch| {
            let (squares, rest) = scratch.split_at_mut(parts[0]);
            let (outer, rest) = rest.split_at_mut(parts[1]);
            let (map, weights) = rest.split_at_mut(parts[2]);
            let (matrix, inverse) = bytemuck::cast_slice_mut::<f32, f64>(squares).split_at_mut(width * width);
            let (sinks, group) = (list.sinks(self.sink), shape.group());
            let span = sinks..list.len;
            let weights = &mut weights[span.clone()];
            scores.fill(0.0);
            for head in list.head * group..(list.head + 1) * group {
                let mut anchor = covariance(context, list, head, queries.clone(), outer);
                let anchor = &mut anchor[..width];
                turn.apply(anchor);
                let norm = dot(anchor, anchor).sqrt().max(LEAST_NORM);
                list.key_blocks(span.clone(), |start, keys| {
                    for (index, key) in keys.chunks_exact(width).enumerate() {
                        let cosine = dot(key, anchor) / (norm * dot(key, key).sqrt().max(LEAST_NORM));
                        weights[start - sinks + index] = self.tau * cosine.clamp(-1.0, 1.0);
                    }
                });
                let highest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                weights.iter_mut().for_each(|x| *x = (*x - highest).exp());
                let mut moments = Moments::new(isa, width, outer);
                list.value_blocks(span.clone(), |start, values| {
                    for (index, value) in values.chunks_exact(width).enumerate() {
                        moments.add_scaled(value, (weights[start - sinks + index] + EPSILON).sqrt());
                    }
                });
                moments.finish();
                for (to, from) in matrix.chunks_exact_mut(width).zip(outer.chunks_exact(padded(width))) {
                    to.iter_mut().zip(from).for_each(|(to, &from)| *to = f64::from(from));
                }
                inverse_factor(matrix, width, 1.0, inverse);
                for (d, to) in map.chunks_exact_mut(padded(width)).take(width).enumerate() {
                    to[..width].iter_mut().enumerate().for_each(|(j, to)| *to = inverse[j * width + d] as f32);
                }
                list.value_blocks(span.clone(), |start, values| {
                    times(isa, values, width, map, width, |index, _, white| {
                        let leverage = dot(&white[..width], &white[..width]);
                        let slot = start + index;
                        scores[slot] += weights[slot - sinks] * leverage / group as f32;
                    });
                });
            }
        });
        Ok(())
    }
}
