//! What the last queries say of the tokens before them: the softmax over the past alone, without the window's columns.
//!
//! R-KV and MorphKV cut the window off before the softmax and reduce over the heads of a group query by query, which
//! sums over columns of the whole softmax cannot give. A query's logits are a row for each head; no more than one query
//! is held at a time.

use crate::attention::few::group_logits;
use crate::device::simd::{Isa, loops};
use crate::policy::{Context, List};

/// Tokens of a list of `len` that lie before its last `window`.
pub fn past(len: usize, window: usize) -> usize {
    len.saturating_sub(window)
}

/// Calls `visit(logits)` for each of the last `window` queries: base-2 logits over the past of `list`, `[G, past]`,
/// minus infinity where a sliding window hides a token. `scratch` holds `G * past` elements.
pub fn each_query(
    context: &Context<'_>,
    list: &List<'_>,
    window: usize,
    scratch: &mut [f32],
    mut visit: impl FnMut(&mut [f32]),
) {
    let (shape, past) = (context.call.shape, past(list.len, window));
    if past == 0 {
        return;
    }
    let logits = &mut scratch[..shape.group() * past];
    for query in shape.q_len.saturating_sub(window)..shape.q_len {
        group_logits(&context.call, [list.batch, list.head], query, 0..past, logits);
        visit(logits);
    }
}

/// Softmax of base-2 logits in place; zeros where every one is minus infinity.
pub fn softmax(isa: Isa, row: &mut [f32]) {
    let max = loops::scale_max(isa, row, 1.0);
    if max == f32::NEG_INFINITY {
        row.fill(0.0);
        return;
    }
    let sum = loops::exp2_sum(isa, row, max);
    loops::scale(isa, row, 1.0 / sum);
}

/// Raises each entry to that of `other`, where it is larger.
pub fn raise(row: &mut [f32], other: &[f32]) {
    row.iter_mut().zip(other).for_each(|(most, &x)| *most = if x > *most { x } else { *most });
}
