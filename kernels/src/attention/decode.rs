//! Decode: few queries against a long cache, split over the keys.
//!
//! The unit of work is one KV head and [`SPLIT`] of its keys, for all query heads of the group: each key and value
//! row is read once, in its own format, for the whole group, so that the time is that of reading the cache. Partial
//! results are merged in the order of the splits, so the result does not depend on the number of threads
//! (Flash-Decoding). More than four queries of a group read a block of [`BLOCK`] rows again, from the second-level cache. How rows of a
//! format are read can depend on how many queries there are and on whether bf16 holds them, and with that the order of a sum.

use super::online::{Logits, Running};
use super::source::token_biases;
use super::strip::{LANES, SPAN};
use super::{AttentionError, Forward, Kernel, KernelEntry, Outputs, Params, Shape, Sight, Workspace, WorkspaceSize};
use crate::device::cpu::Slots;
use crate::device::simd::nibbles::Nibbles;
use crate::device::simd::pairs::are_bf16;
use crate::device::simd::reader::RowReader;
use crate::device::simd::rows::{Addresses, BLOCK, Dots, Fold, RowList};
use crate::device::simd::{Isa, Simd, SimdOp};
use crate::format::{KvFormat, RowFormat, rotate, with_codec};
use crate::tensor::{DType, Rows};
use rayon::prelude::*;
use std::ops::Range;

/// Attention for short queries.
pub struct Decode;

/// Keys of one unit of work.
const SPLIT: usize = 1024;

/// Query rows that share a KV head.
fn group_rows(shape: &Shape) -> usize {
    shape.group() * shape.q_len
}

/// Units of work.
fn units(shape: &Shape) -> usize {
    shape.batch * shape.kv_heads * shape.kv_len.div_ceil(SPLIT)
}

/// Elements of a padded row.
fn padded(shape: &Shape) -> usize {
    shape.head_dim.next_multiple_of(LANES)
}

/// Elements of a thread's scratch: its query rows, a block of scores, and a block of keys or values whose elements are
/// no neighbours where they lie.
fn slot(shape: &Shape) -> usize {
    group_rows(shape) * (padded(shape) + BLOCK) + BLOCK * shape.head_dim
}

/// The registry's line.
pub const ENTRY: KernelEntry = KernelEntry {
    name: "decode",
    about: "few queries against a long cache, split over the keys",
    parameters: &[],
    build: |_| Ok(Box::new(Decode)),
};

impl Kernel for Decode {
    fn name(&self) -> &'static str {
        "decode"
    }

    fn workspace(&self, shape: &Shape, _: &Params, _: DType, threads: usize) -> WorkspaceSize {
        // Each partial result is an output row, a maximum and a sum.
        let partials = units(shape) * group_rows(shape) * (padded(shape) + 2);
        WorkspaceSize { scores: 0, scratch: partials + threads * slot(shape) }
    }

    fn forward(
        &self,
        call: &Forward<'_>,
        outputs: &mut Outputs,
        workspace: &mut Workspace,
    ) -> Result<(), AttentionError> {
        let (shape, isa) = (call.shape, call.cpu.isa());
        if call.kv.bias(0, 0).is_some() {
            return Err(AttentionError::Unsupported { kernel: "decode", what: "bias of keys", instead: "tiled" });
        }
        let (width, stride, rows) = (shape.head_dim, padded(&shape), group_rows(&shape));
        let splits = shape.kv_len.div_ceil(SPLIT);
        let (partial_o, rest) = workspace.scratch.split_at_mut(units(&shape) * rows * stride);
        let (partial_state, scratch) = rest.split_at_mut(units(&shape) * rows * 2);
        let states: &mut [Running] = bytemuck::cast_slice_mut(partial_state);
        let slots = Slots::new(scratch, call.cpu.threads());
        let row_bytes = width * outputs.o.dtype().bytes();
        let dtype = outputs.o.dtype();
        call.cpu.install(|| {
            let partials = partial_o.par_chunks_mut(rows * stride).zip(states.par_chunks_mut(rows));
            partials.enumerate().with_max_len(1).for_each(|(unit, (o, states))| {
                slots.with(|slot| {
                    let (head, start) = (unit / splits, unit % splits * SPLIT);
                    Unit { call, head, start, o, states, slot }.run(isa);
                });
            });

            let results = outputs.o.bytes_mut().par_chunks_mut(row_bytes).zip(outputs.lse.par_iter_mut());
            results.enumerate().for_each(|(index, (target, lse))| {
                let (head, i) = (index / shape.q_len, index % shape.q_len);
                let (batch, q_head) = (head / shape.q_heads, head % shape.q_heads);
                let kv_head = batch * shape.kv_heads + q_head / shape.group();
                let row = q_head % shape.group() * shape.q_len + i;
                let parts = (0..splits).map(|split| {
                    let at = (kv_head * splits + split) * rows + row;
                    (states[at], &partial_o[at * stride..][..stride])
                });
                let mut o = [0.0; Shape::MAX_HEAD_DIM];
                *lse = isa.run(Merge { parts, o: &mut o[..stride] });
                let o = &o[..width];
                dtype.encode(o, target);
            });
        });
        Ok(())
    }
}

/// Merges partial results in order into `o`, and gives the log-sum-exp.
struct Merge<'a, I> {
    parts: I,
    o: &'a mut [f32],
}

impl<'p, I: Iterator<Item = (Running, &'p [f32])>> SimdOp for Merge<'_, I> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let mut state = Running::EMPTY;
        for (other, other_o) in self.parts {
            state.merge(simd, self.o, other, other_o);
        }
        state.normalise(simd, self.o)
    }
}

/// The partial results of all query rows of KV head `head` (counted over the batch) over the keys from `start` on.
struct Unit<'a> {
    call: &'a Forward<'a>,
    head: usize,
    start: usize,
    o: &'a mut [f32],
    states: &'a mut [Running],
    slot: &'a mut [f32],
}

impl Unit<'_> {
    fn run(self, isa: Isa) {
        let Unit { call, head, start, o, states, slot } = self;
        let (shape, width, stride) = (call.shape, call.shape.head_dim, padded(&call.shape));
        let (batch, kv_head) = (head / shape.kv_heads, head % shape.kv_heads);
        let (rows, logits) = (group_rows(&shape), Logits::new(&call.params));
        let (queries, rest) = slot.split_at_mut(rows * stride);
        let (scores, copies) = rest.split_at_mut(rows * BLOCK);
        for (row, query) in queries.chunks_exact_mut(stride).enumerate() {
            let (query, padding) = query.split_at_mut(width);
            call.q.read_rows(batch, kv_head * shape.group() + row / shape.q_len, row % shape.q_len, query);
            if logits.negative {
                query.iter_mut().for_each(|x| *x = -*x);
            }
            padding.fill(0.0);
        }
        o.fill(0.0);
        states.fill(Running::EMPTY);
        let kv_len = call.kv.len(batch, kv_head);
        let sight = call.sight([batch, kv_head]);
        let visible = |row: usize| sight.visible(row % shape.q_len);
        let seen = visible(0).start.max(start)..visible(shape.q_len - 1).end.min(start + SPLIT);

        let keys = |row| call.kv.key_rows(batch, kv_head, row);
        let values = |row| call.kv.value_rows(batch, kv_head, row);
        // How queries, and sums of values, are arranged.
        let mut orders = [Order::default(); 2];
        let mut turn = |part: usize, to: Order, rows: &mut [f32]| {
            let from = std::mem::replace(&mut orders[part], to);
            rows.chunks_exact_mut(stride).for_each(|row| from.become_another(to, &mut row[..width]));
        };
        let (few, in_bf16) = (rows <= Nibbles::MOST_SUMS, are_bf16(queries));
        let (mut first, mut addresses) = (seen.start, Addresses::default());
        while first < seen.end {
            let (format, end) = alike(call.kv.format(), &keys, &values, first..seen.end.min(first + BLOCK));
            // Codes by lane pay for one or two queries; keys for more of them where pairs of bf16 are multiplied.
            let in_pairs = |nibbles: &Nibbles| in_bf16 && !format.k.is_rotated() && nibbles.has_pairs(isa);
            let key_nibbles = format.k.nibbles(isa, width).filter(|nibbles| few || in_pairs(nibbles));
            let value_nibbles = format.v.nibbles(isa, width).filter(|_| few);
            turn(0, Order { rotated: format.k.is_rotated(), by_lane: key_nibbles.is_some() }, queries);
            let row_bytes = format.k.row_bytes(width);
            if format.k.group_tokens().is_some() {
                let list = RowList::collect(
                    &mut addresses,
                    [width, row_bytes],
                    &keys,
                    first..end,
                    &values,
                    first..end,
                    &mut [],
                );
                with_codec!(format.k, reader => {
                    dots_by_group(isa, reader, (&list, &keys, first..end), (queries, stride), scores, copies);
                });
            } else {
                let list = RowList::collect(
                    &mut addresses,
                    [width, row_bytes],
                    &keys,
                    first..end,
                    &values,
                    first..end,
                    copies,
                );
                let (range, queries) = (0..end - first, (&*queries, stride));
                match key_nibbles {
                    Some(nibbles) => nibbles.dots(isa, &list, range, queries, scores),
                    None => format.k.dots(isa, &list, range, queries, scores),
                }
            }
            let biases = token_biases::<BLOCK>(call.kv, [batch, kv_head], first..end);
            let biases = biases.as_ref().map_or(&[][..], |biases| &biases[..end - first]);
            isa.run(Absorb { call, logits: &logits, biases, sight: &sight, block: first..end, scores, o, states });
            turn(1, Order { rotated: format.v.is_rotated(), by_lane: value_nibbles.is_some() }, o);
            let row_bytes = format.v.row_bytes(width);
            let list =
                RowList::collect(&mut addresses, [width, row_bytes], &values, first..end, &keys, end..kv_len, copies);
            match value_nibbles {
                Some(nibbles) => nibbles.accumulate(&list, scores, (o, stride)),
                None => format.v.accumulate(isa, &list, scores, (o, stride)),
            }
            first = end;
        }
        turn(1, Order::default(), o);
    }
}

/// In which order a row's elements are what a format's rows are multiplied with; at first their own.
#[derive(Clone, Copy, Default, PartialEq)]
struct Order {
    /// Whether the row is rotated.
    rotated: bool,
    /// Whether it is then arranged for [`Nibbles`].
    by_lane: bool,
}

impl Order {
    /// Brings a row of this order into another.
    fn become_another(self, to: Order, row: &mut [f32]) {
        if self == to {
            return;
        }
        if self.by_lane {
            Nibbles::restore(row);
        }
        if self.rotated != to.rotated {
            rotate(row);
        }
        if to.by_lane {
            Nibbles::arrange(row);
        }
    }
}

/// How the first keys and values of a range are kept, and how far others are kept so: where some tokens are in full, not to its end.
fn alike<'r>(
    format: KvFormat,
    keys: &dyn Fn(usize) -> Rows<'r>,
    values: &dyn Fn(usize) -> Rows<'r>,
    range: Range<usize>,
) -> (KvFormat, usize) {
    if !format.keeps_full() {
        return (format, range.end);
    }
    let kinds = |row: usize| [keys(row), values(row)].map(|rows| (rows.dtype(), rows.count()));
    let [(k, count), (v, _)] = kinds(range.start);
    let mut end = range.start + count;
    while end < range.end {
        let [(next_k, count), (next_v, _)] = kinds(end);
        if (next_k, next_v) != (k, v) {
            break;
        }
        end += count;
    }
    let of = |coded: RowFormat, dtype: Option<DType>| dtype.map_or(coded, RowFormat::plain);
    (KvFormat { k: of(format.k, k), v: of(format.v, v), ..format }, end.min(range.end))
}

/// Inner products with the rows `range` of `keys`, which are those of the list and share scales in groups. `scratch` holds `BLOCK` rows.
fn dots_by_group<'r, R: RowReader>(
    isa: Isa,
    reader: R,
    (rows, keys, range): (&RowList<'_>, &dyn Fn(usize) -> Rows<'r>, Range<usize>),
    (queries, stride): (&[f32], usize),
    scores: &mut [f32],
    scratch: &mut [f32],
) {
    // A row of queries and a number for each that are scaled at a time.
    let together = (scratch.len() / (stride + 1)).min(BLOCK);
    let (scaled, added) = scratch.split_at_mut(together * stride);
    for (queries, scores) in queries.chunks(together * stride).zip(scores.chunks_mut(together * BLOCK)) {
        let (scaled, added) = (&mut scaled[..queries.len()], &mut added[..queries.len() / stride]);
        let mut row = range.start;
        while row < range.end {
            let run = keys(row).first(range.end - row);
            let channels = run.channels().expect("keys of a format whose scales groups share");
            isa.run(Fold { channels, queries, stride, scaled, added });
            let some = row - range.start..row - range.start + run.count();
            isa.run(Dots { reader, rows, range: some.clone(), queries: scaled, stride, scores });
            for (scores, added) in scores.chunks_exact_mut(BLOCK).zip(&*added) {
                scores[some.clone()].iter_mut().for_each(|score| *score += added);
            }
            row += run.count();
        }
    }
}

/// The logits of a block of keys become weights, and what was summed so far is weighed anew.
struct Absorb<'a> {
    call: &'a Forward<'a>,
    logits: &'a Logits,
    /// What the keys of the block carry to be added, if any.
    biases: &'a [f32],
    sight: &'a Sight<'a>,
    block: Range<usize>,
    scores: &'a mut [f32],
    o: &'a mut [f32],
    states: &'a mut [Running],
}

impl SimdOp for Absorb<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Absorb { call, logits, biases, sight, block: Range { start, end }, scores, o, states } = self;
        let (shape, filled) = (call.shape, (end - start).next_multiple_of(SPAN));
        let rows = scores.chunks_exact_mut(BLOCK).zip(o.chunks_exact_mut(padded(&shape))).zip(states);
        for (row, ((scores, o), state)) in rows.enumerate() {
            let seen = sight.visible(row % shape.q_len);
            let seen = seen.start.clamp(start, end) - start..seen.end.clamp(start, end) - start;
            state.absorb::<S, f32>(simd, logits, &mut scores[..filled], seen, biases, o);
        }
    }
}
