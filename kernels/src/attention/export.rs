//! Attention statistics without a score matrix: reductions of the softmax's columns, from the saved log-sum-exp.
//!
//! Policies ask "how much attention did key `j` receive from these queries?". With the rows' log-sum-exps at hand,
//! each tile of probabilities can be recomputed on its own, so a pass over key tiles reduces them in linear memory.
//! Sums over all queries give H2O's accumulated attention, over the last few SnapKV's window, over the last one TOVA's;
//! maxima and counts serve policies that ask for the best or the typical query ([`Reduction`]).

use super::online::Logits;
use super::source::token_biases;
use super::strip::{SPAN, STRIP, cut, pack_queries};
use super::{Forward, Shape};
use crate::device::cpu::Slots;
use crate::device::simd::pack::{Packed, odd_lines, transposed, whole_lines};
use crate::device::simd::product::{Extents, Left, ROWS, Right, product};
use crate::device::simd::{Native, Simd, SimdBf16Op, math};
use rayon::prelude::*;
use std::ops::Range;

/// How the probabilities that queries give a key become one number: first over the queries of each query head, then
/// over the heads of the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reduction {
    /// Over the queries.
    pub queries: OverQueries,
    /// Over the query heads of a KV head.
    pub group: OverGroup,
}

/// A reduction over queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverQueries {
    /// The sum.
    Sum,
    /// The sum of the squares.
    SumOfSquares,
    /// The largest.
    Max,
    /// How many queries see the key and give it less than an even share, `1 / keys that the query sees`, by more than
    /// rounding.
    CountBelowEven,
}

/// A reduction over the query heads of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverGroup {
    /// The mean.
    Mean,
    /// The sum.
    Sum,
    /// The largest.
    Max,
}

impl Reduction {
    /// Sums over queries, means over the group: attention received.
    pub const RECEIVED: Reduction = Reduction { queries: OverQueries::Sum, group: OverGroup::Mean };
}

/// Of a probability, for each unit of its row's log-sum-exp: both are rounded before they meet.
const ROUNDING: f32 = 1.0 / (1 << 22) as f32;

/// Keys of a tile.
const BC: usize = 192;

/// The parts of a thread's scratch: a tile of keys, a strip of queries, their scores, and sums of whole vectors.
fn parts(shape: &Shape) -> [usize; 4] {
    let (keys, rows) = (keys(shape), STRIP.min(shape.q_len).next_multiple_of(ROWS));
    whole_lines([shape.head_dim * keys, rows * shape.head_dim, rows * keys, keys])
}

/// The distance of rows whose columns are the keys of a tile, which is cut down to the problem, in whole spans.
fn keys(shape: &Shape) -> usize {
    odd_lines(BC.min(shape.kv_len).next_multiple_of(SPAN))
}

/// Scratch elements of [`columns`] and [`column_sums`].
pub fn workspace(shape: &Shape, threads: usize) -> usize {
    threads * parts(shape).iter().sum::<usize>()
}

/// For each key, the softmax probabilities that `queries` (a range of `0..Lq`) give it, summed over these queries and
/// averaged over the group's query heads: [`columns`] with [`Reduction::RECEIVED`].
pub fn column_sums(call: &Forward<'_>, lse: &[f32], queries: Range<usize>, sums: &mut [f32], scratch: &mut [f32]) {
    columns(call, lse, queries, Reduction::RECEIVED, sums, scratch);
}

/// For each key, the softmax probabilities that `queries` (a range of `0..Lq`) give it, reduced to one number.
///
/// `lse` is `[B, Hq, Lq]` of the whole call; `sums` is `[B, Hkv, shape.kv_len]` and is overwritten (columns past the
/// length of a shorter list get zero); `scratch` holds [`workspace`] elements.
pub fn columns(
    call: &Forward<'_>,
    lse: &[f32],
    queries: Range<usize>,
    reduction: Reduction,
    sums: &mut [f32],
    scratch: &mut [f32],
) {
    let shape = call.shape;
    let slots = Slots::new(scratch, call.cpu.threads());
    let units: Vec<(usize, usize, &mut [f32])> = sums
        .chunks_mut(shape.kv_len)
        .enumerate()
        .flat_map(|(head, sums)| sums.chunks_mut(BC).enumerate().map(move |(tile, sums)| (head, tile * BC, sums)))
        .collect();
    call.cpu.install(|| {
        units.into_par_iter().with_max_len(1).for_each(|(head, first, sums)| {
            let (batch, kv_head) = (head / shape.kv_heads, head % shape.kv_heads);
            let end = (first + sums.len()).min(call.kv.len(batch, kv_head));
            let (seen, hidden) = sums.split_at_mut(end.saturating_sub(first));
            hidden.fill(0.0);
            if !seen.is_empty() {
                slots.with(|slot| {
                    let queries = queries.clone();
                    let tile = KeyTile { call, lse, queries, reduction, batch, kv_head, first, sums: seen, slot };
                    call.cpu.isa().run_bf16(tile);
                });
            }
        });
    });
}

/// The keys from `first` on of a KV head, as many as `sums`.
struct KeyTile<'a, 's> {
    call: &'a Forward<'a>,
    lse: &'a [f32],
    queries: Range<usize>,
    reduction: Reduction,
    batch: usize,
    kv_head: usize,
    first: usize,
    sums: &'s mut [f32],
    slot: &'s mut [f32],
}

impl SimdBf16Op for KeyTile<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Native>(self, simd: S) {
        let is_sum = self.reduction.queries == OverQueries::Sum;
        if self.call.is_bf16() {
            if is_sum { key_tile::<S, S::Bf16, true>(simd, self) } else { key_tile::<S, S::Bf16, false>(simd, self) }
        } else if is_sum {
            key_tile::<S, f32, true>(simd, self);
        } else {
            key_tile::<S, f32, false>(simd, self);
        }
    }
}

/// `SUM` says that queries are summed: known when it is compiled, so that sums pay nothing for the others.
#[inline(always)]
fn key_tile<S: Simd, U: Packed<S>, const SUM: bool>(simd: S, tile: KeyTile<'_, '_>) {
    let KeyTile { call, lse, queries, reduction, batch, kv_head, first, sums, slot } = tile;
    let (shape, params, count) = (call.shape, call.params, sums.len());
    let (stride, end, sight) = (keys(&shape), first + sums.len(), call.sight([batch, kv_head]));
    let (steps, logits) = (shape.head_dim.div_ceil(U::DEPTH), Logits::new(&params));
    let [k, q, scores, totals] = cut(slot, parts(&shape));
    let (k, q) = (bytemuck::cast_slice_mut(k), bytemuck::cast_slice_mut(q));
    let key_rows = |row: usize| call.kv.key_rows(batch, kv_head, first + row);
    transposed::<S, U>(simd, key_rows, count, shape.head_dim, count.next_multiple_of(SPAN), k, stride);
    let carried = token_biases::<BC>(call.kv, [batch, kv_head], first..end);
    let carried = carried.as_ref().map_or(&[][..], |carried| &carried[..count]);
    sums.fill(0.0);
    for head in batch * shape.q_heads + kv_head * shape.group()..batch * shape.q_heads + (kv_head + 1) * shape.group() {
        let lse = &lse[head * shape.q_len..][..shape.q_len];
        totals.fill(0.0);
        for start in queries.clone().step_by(STRIP) {
            let rows = start..queries.end.min(start + STRIP);
            let visible = |i: usize| sight.visible(i);
            let seen = visible(start).start.max(first)..visible(rows.end - 1).end.min(end);
            if seen.is_empty() {
                continue;
            }
            let (from, to) = ((seen.start - first) / SPAN * SPAN, (seen.end - first).next_multiple_of(SPAN));
            let padded = rows.len().next_multiple_of(ROWS);
            let source = call.q.head(batch, head % shape.q_heads, start).first(rows.len());
            let in_place = U::in_place(&source).filter(|_| padded == rows.len() && !logits.negative);
            let (units, row_stride) = match in_place {
                Some(lines) => lines,
                None => {
                    pack_queries::<S, U>(simd, source, logits.negative, steps, &mut q[..padded * steps]);
                    (&*q, steps)
                }
            };
            let extents = Extents { rows: padded, columns: to - from, steps };
            let left = Left { units, row_stride, step_stride: 1 };
            product::<S, U, false>(simd, extents, left, Right { units: &k[from..], stride }, scores, stride);
            for (i, row) in rows.zip(scores.chunks_exact_mut(stride)) {
                let (visible, within) = (visible(i), |key: usize| key.clamp(first + from, end) - first - from);
                let seen = within(visible.start)..within(visible.end).min(to - from);
                if seen.is_empty() {
                    continue;
                }
                let (row, totals) = (&mut row[..to - from], &mut totals[from..to]);
                let biases = carried.get(from..).unwrap_or(&[]);
                match reduction.queries {
                    _ if SUM => logits.add_probabilities(simd, row, (seen, biases), lse[i], totals),
                    OverQueries::Sum => unreachable!("sums are a case of their own"),
                    OverQueries::SumOfSquares => {
                        logits.probabilities(simd, row, (seen, biases), lse[i]);
                        totals.iter_mut().zip(&*row).for_each(|(sum, p)| *sum += p * p);
                    }
                    OverQueries::Max => {
                        logits.probabilities(simd, row, (seen, biases), lse[i]);
                        totals.iter_mut().zip(&*row).for_each(|(most, p)| *most = if *p > *most { *p } else { *most });
                    }
                    OverQueries::CountBelowEven => {
                        logits.probabilities(simd, row, (seen.clone(), biases), lse[i]);
                        // Less by more than the rounding of its logit.
                        let even = (1.0 - (1e-5 + ROUNDING * lse[i].abs())) / visible.len() as f32;
                        let pairs = totals[seen.clone()].iter_mut().zip(&row[seen]);
                        pairs.for_each(|(count, p)| *count += if *p < even { 1.0 } else { 0.0 });
                    }
                }
            }
        }
        let pairs = sums.iter_mut().zip(&*totals);
        match reduction.group {
            OverGroup::Mean | OverGroup::Sum => pairs.for_each(|(sum, x)| *sum += x),
            OverGroup::Max => pairs.for_each(|(most, x)| *most = if *x > *most { *x } else { *most }),
        }
    }
    if reduction.group == OverGroup::Mean {
        math::scale(simd, sums, 1.0 / shape.group() as f32);
    }
}
