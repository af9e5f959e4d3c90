//! Logits of single queries: for those who look at a few queries in another way than by columns of the softmax.
//!
//! Some statistics need the logits themselves (a softmax over part of the keys, a maximum over heads before it) or only
//! a few keys of a long list. For a handful of queries that is cheap, a row at a time, and needs no score matrix.

use super::source::token_biases;
use super::{Forward, Shape, online};
use crate::device::simd::loops;
use std::ops::Range;

/// Keys that are widened at once.
const BLOCK: usize = 64;

/// Base-2 logits (`logit * log2(e)`, after soft-cap and mask) of query `query` of all query heads of a KV head against
/// `keys`, a range of the list's slots: `[G, keys.len()]`, minus infinity where the query does not see a key.
pub fn group_logits(
    call: &Forward<'_>,
    [batch, kv_head]: [usize; 2],
    query: usize,
    keys: Range<usize>,
    logits: &mut [f32],
) {
    let (shape, isa, len) = (call.shape, call.cpu.isa(), keys.len());
    let (group, width) = (shape.group(), shape.head_dim);
    let visible = call.sight([batch, kv_head]).visible(query);
    let mut queries = vec![0.0; group * width];
    for (head, row) in queries.chunks_exact_mut(width).enumerate() {
        call.q.read_rows(batch, kv_head * group + head, query, row);
    }
    let mut scratch = [0.0; BLOCK * Shape::MAX_HEAD_DIM];
    for start in keys.clone().step_by(BLOCK) {
        let count = BLOCK.min(keys.end - start);
        let rows = call.kv.keys(batch, kv_head, start, count, &mut scratch);
        for (query, logits) in queries.chunks_exact(width).zip(logits.chunks_exact_mut(len)) {
            loops::row_dots(isa, query, rows, &mut logits[start - keys.start..][..count]);
        }
    }
    if len == 0 {
        return;
    }
    let seen = visible.start.clamp(keys.start, keys.end)..visible.end.clamp(keys.start, keys.end);
    for logits in logits.chunks_exact_mut(len).take(group) {
        online::logits(isa, &call.params, logits);
        for start in keys.clone().step_by(BLOCK) {
            let block = start..keys.end.min(start + BLOCK);
            if let Some(biases) = token_biases::<BLOCK>(call.kv, [batch, kv_head], block.clone()) {
                online::add_bias(&biases, &mut logits[block.start - keys.start..block.end - keys.start]);
            }
        }
        logits[..seen.start - keys.start].fill(f32::NEG_INFINITY);
        logits[seen.end.max(seen.start) - keys.start..].fill(f32::NEG_INFINITY);
    }
}
