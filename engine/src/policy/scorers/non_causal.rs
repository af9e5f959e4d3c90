//! Non-causal attention in chunks (part of Compactor, arXiv 2507.08143): how much attention a key gets from all queries
//! of its own chunk, before and after it, times the norm of its value.
//!
//! Formula, defaults and quirks are kvpress's. Logits are not divided by the root of the head dim. A last chunk that is
//! not full is filled up with zero keys and queries that are not masked: every row counts one for each of them, and each
//! of them gives every key `1 / chunk`. The sums are smoothed over three neighbours and get mean 0 and deviation 1 over
//! all heads of a sequence (kvpress: over the whole batch, which couples its sequences).
//!
//! Where queries are missing (between decode steps, or when fewer were recorded than keys), a chunk is asked by those of
//! its own that are there, or else by the latest ones, and its sums are scaled to as many queries as it has keys.

use super::vnorm::times_value_norm;
use crate::attention::Shape;
use crate::device::cpu::Slots;
use crate::device::simd::pack::{Packed, transposed};
use crate::device::simd::product::{Extents, Left, ROWS, Right, product};
use crate::device::simd::{Native, Simd, SimdBf16Op, math};
use crate::memory::Label;
use crate::named::Parameter;
use crate::policy::{Context, List, Policy, PolicyEntry, PolicyError, Scorer, Statistic, each_list};
use rayon::prelude::*;
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "non-causal",
    about: "keeps what the queries of the same chunk, earlier and later, attend to",
    paper: "2507.08143",
    parameters: &[CHUNK],
    build: |named, _| Ok(Policy::after_prefill(NonCausal { chunk: named.count("chunk", 256, 1)? })),
};

/// The parameter that says how long a chunk is.
pub(super) const CHUNK: Parameter =
    Parameter { name: "chunk", default: "256", about: "tokens that attend to each other" };

/// Queries in a strip, and what extents of keys are rounded up to.
const STRIP: usize = 8 * ROWS;
const LANES: usize = 16;
/// Least deviation that scores are divided by.
const LEAST_DEVIATION: f64 = 1e-6;

struct NonCausal {
    chunk: usize,
}

impl Scorer for NonCausal {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::Keys, Statistic::Values, Statistic::Queries]
    }

    fn recent_queries(&self) -> usize {
        self.chunk
    }

    fn scratch_bytes(&self, shape: &Shape, threads: usize) -> u64 {
        scratch_bytes(shape, self.chunk, threads)
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        attention_in_chunks(context, scores, self.chunk, |list| 0..list.len)?;
        standardise(context, scores, |list| 0..list.len);
        Ok(())
    }
}

/// Parts of a thread's scratch: a chunk of keys, a strip of queries, their scores.
fn parts(shape: &Shape, chunk: usize) -> [usize; 3] {
    let keys = chunk.min(shape.kv_len).next_multiple_of(LANES);
    [shape.head_dim * keys, STRIP * shape.head_dim, STRIP * keys]
}

/// Scratch bytes of [`attention_in_chunks`].
pub(super) fn scratch_bytes(shape: &Shape, chunk: usize, threads: usize) -> u64 {
    4 * (threads * parts(shape, chunk).iter().sum::<usize>()) as u64
}

/// Writes, in a `span` of each list that is cut into chunks from its start, the attention that keys get in their chunk
/// times the norms of their values, smoothed.
pub(super) fn attention_in_chunks(
    context: &Context<'_>,
    scores: &mut [f32],
    chunk: usize,
    span: impl Fn(&List<'_>) -> Range<usize> + Sync,
) -> Result<(), PolicyError> {
    let (shape, cpu) = (context.call.shape, context.call.cpu);
    let parts = parts(&shape, chunk);
    let mut scratch = context.arena.alloc::<f32>(Label::Workspace, cpu.threads() * parts.iter().sum::<usize>())?;
    let slots = Slots::new(&mut scratch, cpu.threads());
    let units: Vec<(usize, usize, &mut [f32])> = scores
        .chunks_mut(shape.kv_len)
        .enumerate()
        .flat_map(|(index, scores)| {
            let range = span(&List::new(context, index));
            let first = range.start;
            scores[range].chunks_mut(chunk).enumerate().map(move |(at, sums)| (index, first + at * chunk, sums))
        })
        .collect();
    cpu.install(|| {
        units.into_par_iter().with_max_len(1).for_each(|(index, first, sums)| {
            let list = List::new(context, index);
            let queries = queries(context, &list, first..first + sums.len(), chunk);
            slots.with(|slot| {
                cpu.isa().run_bf16(Chunk { context, list: &list, first, chunk, queries, sums, parts, slot })
            });
        });
    });
    times_value_norm(context, scores, 0.0);
    each_list(context, scores, &mut [], |list, scores, _| smooth(&mut scores[span(list)]));
    Ok(())
}

/// The queries of a chunk of slots: those of its positions, else the latest.
fn queries(context: &Context<'_>, list: &List<'_>, slots: Range<usize>, chunk: usize) -> Range<usize> {
    let count = context.call.shape.q_len;
    let index = |position: usize| (position + count).saturating_sub(context.seen_tokens).min(count);
    // A chunk owns the positions up to its last token.
    let own = index(list.position(slots.start))..index(list.position(slots.end - 1) + 1);
    if own.is_empty() { count.saturating_sub(chunk)..count } else { own }
}

/// One chunk of a list: the slots from `first` on, as many as `sums`.
struct Chunk<'a, 's> {
    context: &'a Context<'a>,
    list: &'a List<'a>,
    first: usize,
    chunk: usize,
    queries: Range<usize>,
    sums: &'s mut [f32],
    parts: [usize; 3],
    slot: &'s mut [f32],
}

impl SimdBf16Op for Chunk<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Native>(self, simd: S) {
        let call = &self.context.call;
        if call.is_bf16() {
            one_chunk::<S, S::Bf16>(simd, self);
        } else {
            one_chunk::<S, f32>(simd, self);
        }
    }
}

#[inline(always)]
fn one_chunk<S: Simd, U: Packed<S>>(simd: S, unit: Chunk<'_, '_>) {
    let Chunk { context, list, first, chunk, queries, sums, parts, slot } = unit;
    let (call, shape, count) = (&context.call, context.call.shape, sums.len());
    let (steps, stride) = (shape.head_dim.div_ceil(U::DEPTH), count.next_multiple_of(LANES));
    let (k, rest) = slot.split_at_mut(parts[0]);
    let (q, scores) = rest.split_at_mut(parts[1]);
    let (k, q) = (bytemuck::cast_slice_mut::<f32, U>(k), bytemuck::cast_slice_mut::<f32, U>(q));
    let key_rows = |row: usize| call.kv.key_rows(list.batch, list.head, first + row);
    transposed::<S, U>(simd, key_rows, count, shape.head_dim, stride, k, stride);
    // Zero keys and queries that fill the last chunk up.
    let filled = (chunk - count) as f32;
    sums.fill(0.0);
    let group = shape.group();
    for head in list.head * group..(list.head + 1) * group {
        for start in queries.clone().step_by(STRIP) {
            let rows = STRIP.min(queries.end - start);
            let padded_rows = rows.next_multiple_of(ROWS);
            let source = call.q.head(list.batch, head, start).first(rows);
            for (row, to) in q.chunks_exact_mut(steps).take(padded_rows).enumerate() {
                if row < rows {
                    U::along(simd, source.skip(row).first(1), to);
                } else {
                    to.fill(U::zeroed());
                }
            }
            let extents = Extents { rows: padded_rows, columns: stride, steps };
            let left = Left { units: &*q, row_stride: steps, step_stride: 1 };
            product::<S, U, false>(simd, extents, left, Right { units: &*k, stride }, scores, stride);
            for row in scores.chunks_exact_mut(stride).take(rows) {
                add_softmax(simd, &mut row[..count], filled, sums);
            }
        }
    }
    let factor = count as f32 / (queries.len() * group) as f32;
    sums.iter_mut().for_each(|sum| *sum = *sum * factor + filled / chunk as f32);
}

/// Adds the softmax of a row of logits, among which are `zeros` more zeros.
#[inline(always)]
fn add_softmax<S: Simd>(simd: S, row: &mut [f32], zeros: f32, sums: &mut [f32]) {
    let floor = if zeros > 0.0 { 0.0 } else { f32::NEG_INFINITY };
    let (whole, rest) = row.as_chunks::<LANES>();
    let mut lanes = [floor; LANES];
    for chunk in whole {
        for lane in 0..LANES {
            lanes[lane] = if chunk[lane] > lanes[lane] { chunk[lane] } else { lanes[lane] };
        }
    }
    let highest = lanes.iter().chain(rest.iter()).fold(floor, |a, &b| if b > a { b } else { a });
    let (scale, shift) = (simd.splat(LOG2_E), simd.splat(highest * LOG2_E));
    math::map(
        simd,
        row,
        #[inline(always)]
        |x| math::exp2(simd, simd.sub(simd.mul(x, scale), shift)),
    );
    let (whole, rest) = row.as_chunks::<LANES>();
    let mut lanes = [0.0f32; LANES];
    for chunk in whole {
        for lane in 0..LANES {
            lanes[lane] += chunk[lane];
        }
    }
    // Without zeros the highest may lie so far below them that a single one would be infinite.
    let filled = if zeros > 0.0 { zeros * (-highest).exp() } else { 0.0 };
    let sum = lanes.iter().sum::<f32>() + rest.iter().sum::<f32>() + filled;
    let factor = 1.0 / sum;
    for (total, x) in sums.iter_mut().zip(&*row) {
        *total += factor * x;
    }
}

/// Mean of each entry and its two neighbours, with zeros past both ends.
fn smooth(scores: &mut [f32]) {
    let mut before = 0.0;
    for slot in 0..scores.len() {
        let own = scores[slot];
        let after = scores.get(slot + 1).copied().unwrap_or(0.0);
        scores[slot] = (before + own + after) / 3.0;
        before = own;
    }
}

/// Shifts and scales the scores of a `span` of each list to mean 0 and deviation 1 over the heads of a sequence.
pub(super) fn standardise(context: &Context<'_>, scores: &mut [f32], span: impl Fn(&List<'_>) -> Range<usize>) {
    let shape = context.call.shape;
    for (sequence, scores) in scores.chunks_mut(shape.kv_heads * shape.kv_len).enumerate() {
        let spans: Vec<Range<usize>> = (0..shape.kv_heads)
            .map(|head| {
                let span = span(&List::new(context, sequence * shape.kv_heads + head));
                head * shape.kv_len + span.start..head * shape.kv_len + span.end
            })
            .collect();
        let count: usize = spans.iter().map(Range::len).sum();
        let total = |scores: &[f32], f: &dyn Fn(f64) -> f64| -> f64 {
            spans.iter().flat_map(|span| &scores[span.clone()]).map(|&x| f(f64::from(x))).sum()
        };
        let mean = total(scores, &|x| x) / count.max(1) as f64;
        let squares = total(scores, &|x| (x - mean) * (x - mean));
        // One score alone deviates by nothing.
        let deviation = (squares / count.saturating_sub(1).max(1) as f64).sqrt().max(LEAST_DEVIATION);
        for span in spans {
            scores[span].iter_mut().for_each(|x| *x = ((f64::from(*x) - mean) / deviation) as f32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::simd::{Isa, SimdOp};

    struct Rows<'a>(&'a mut [f32], f32, &'a mut [f32]);

    impl SimdOp for Rows<'_> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            add_softmax(simd, self.0, self.1, self.2);
        }
    }

    #[test]
    fn zeros_that_fill_a_chunk_count_in_the_sum() {
        for isa in Isa::available() {
            // Keys of nearly one direction lie far from a query all together.
            for (count, middle) in [3usize, 16, 37].into_iter().flat_map(|count| [(count, -5.0), (count, -150.0)]) {
                let row: Vec<f32> = (0..count).map(|i| (i as f32 * 1.7).sin() * 30.0 + middle).collect();
                for zeros in [0.0f32, 4.0] {
                    let (mut logits, mut sums) = (row.clone(), vec![1.0; count]);
                    isa.run(Rows(&mut logits, zeros, &mut sums));
                    let total: f64 = row.iter().map(|&x| f64::from(x).exp()).sum::<f64>() + f64::from(zeros);
                    for (x, got) in row.iter().zip(&sums) {
                        let wanted = 1.0 + f64::from(*x).exp() / total;
                        assert!((f64::from(*got) - wanted).abs() < 1e-5, "{got} {wanted}");
                    }
                }
            }
        }
    }

    #[test]
    fn neighbours_are_smoothed_with_zeros_past_the_ends() {
        let mut scores = [3.0, 0.0, 6.0, 9.0];
        smooth(&mut scores);
        assert_eq!(scores, [1.0, 3.0, 5.0, 5.0]);
    }
}
