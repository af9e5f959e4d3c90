//! Q-Filters (arXiv 2503.02812): queries of a head point one way, so a key's projection on that direction tells how much
//! attention it will get.
//!
//! The direction is the first right-singular vector of a head's queries after RoPE, not centred, with the sign that most
//! queries have on it, and a KV head's is the mean over its query heads. The authors and kvpress compute it once for a
//! model from a calibration text: a policy file's `qfilters.filters` `[layers, Hkv, D]` is read as they have it, which is
//! minus the direction, for their score is minus the product. Without one the direction is that of the queries at hand,
//! which after prefill are those of the context. Either way what points along the queries stays.

use super::super::linear::{Moments, dot, matrix_len, padded};
use crate::attention::Shape;
use crate::device::Cpu;
use crate::device::simd::Isa;
use crate::memory::{Arena, ArenaError, Label};
use crate::policy::Axis::{HeadDim, KvHeads, Layers};
use crate::policy::{Context, Learned, Policy, PolicyEntry, PolicyError, Scorer, Statistic, each_list};
use crate::tensor::TensorView;
use rayon::prelude::*;

/// The tensor of calibrated filters.
pub const FILTERS: &str = "qfilters.filters";

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "qfilters",
    about: "keeps the keys that point along the principal direction of the queries, or as calibrated filters say: \
            qfilters.filters [layers, Hkv, D] of --policy-file",
    paper: "2503.02812",
    parameters: &[],
    build: |_, assets| {
        let filters = assets.optional(FILTERS, &[Layers, KvHeads, HeadDim])?;
        Ok(match filters {
            Some(filters) => Policy::after_prefill(Calibrated { filters }),
            None => Policy::after_prefill(QFilters),
        })
    },
};

/// Queries that are looked at between decode steps.
const RECENT: usize = 64;
/// Squarings of the matrix before the iteration, which is as if it were `2^SQUARINGS` times as long.
const SQUARINGS: usize = 5;
/// Steps of the iteration at most, and the change below which it is done.
const STEPS: usize = 2000;
const SETTLED: f64 = 1e-12;

/// With filters of a file.
struct Calibrated {
    filters: Learned,
}

impl Scorer for Calibrated {
    fn is_absolute(&self) -> bool {
        true
    }

    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::Keys]
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        each_list(context, scores, &mut [], |list, scores, _| {
            let filter = self.filters.at(&[context.layer_number(list.batch), list.head]);
            list.keys(|slot, key| scores[slot] = -dot(key, filter));
        });
        Ok(())
    }
}

/// With directions of the queries at hand.
struct QFilters;

/// Scratch elements of [`direction`]: the queries' outer products, and two square matrices of f64.
fn scratch_len(width: usize) -> usize {
    4 * width * width + matrix_len(width, width)
}

impl Scorer for QFilters {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::Keys, Statistic::Queries]
    }

    fn recent_queries(&self) -> usize {
        RECENT
    }

    fn scratch_bytes(&self, shape: &Shape, _: usize) -> u64 {
        4 * (shape.batch * shape.kv_heads * scratch_len(shape.head_dim)) as u64
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let call = &context.call;
        let (width, group) = (call.shape.head_dim, call.shape.group());
        let mut scratch = context.arena.alloc::<f32>(Label::Workspace, context.lists() * scratch_len(width))?;
        each_list(context, scores, &mut scratch, |list, scores, scratch| {
            let direction = direction(call.cpu.isa(), &call.q, (list.batch, list.head), group, scratch);
            list.keys(|slot, key| scores[slot] = dot(key, &direction[..width]));
        });
        Ok(())
    }
}

/// Where the queries `q` `[B, Hq, Lq, D]` of the `group` query heads of a KV head of a sequence point, `[D]`. `scratch` has
/// [`scratch_len`] elements.
fn direction(
    isa: Isa,
    q: &TensorView<'_>,
    (batch, kv_head): (usize, usize),
    group: usize,
    scratch: &mut [f32],
) -> [f32; Shape::MAX_HEAD_DIM] {
    let [_, _, queries, width] = q.dims();
    let (squares, outer) = scratch.split_at_mut(4 * width * width);
    let (square, power) = bytemuck::cast_slice_mut::<f32, f64>(squares).split_at_mut(width * width);
    let mut mean = [0.0f64; Shape::MAX_HEAD_DIM];
    let mut row = [0.0f32; Shape::MAX_HEAD_DIM];
    let row = &mut row[..width];
    for head in kv_head * group..(kv_head + 1) * group {
        let mut moments = Moments::new(isa, width, outer);
        for index in 0..queries {
            q.read_rows(batch, head, index, row);
            moments.add_scaled(row, 1.0);
        }
        moments.finish();
        for (to, from) in square.chunks_exact_mut(width).zip(outer.chunks_exact(padded(width))) {
            to.iter_mut().zip(from).for_each(|(to, &from)| *to = f64::from(from));
        }
        let principal = principal(square, power, width);
        let along = principal.map(|x| x as f32);
        let (mut positive, mut negative) = (0, 0);
        for index in 0..queries {
            q.read_rows(batch, head, index, row);
            let on = dot(row, &along[..width]);
            positive += usize::from(on > 0.0);
            negative += usize::from(on < 0.0);
        }
        let sign = if positive >= negative { 1.0 } else { -1.0 };
        mean.iter_mut().zip(&principal).for_each(|(sum, x)| *sum += sign * x / group as f64);
    }
    mean.map(|x| x as f32)
}

/// Filters of a model as a policy file has them, `[layers, Hkv, D]`, from its queries over a text, `[layers, Hq, L, D]`.
///
/// # Errors
/// When the arena has no room.
pub fn filters(q: &TensorView<'_>, kv_heads: usize, cpu: &Cpu, arena: &Arena) -> Result<Vec<f32>, ArenaError> {
    let [layers, q_heads, _, width] = q.dims();
    let mut scratch = arena.alloc::<f32>(Label::Workspace, layers * kv_heads * scratch_len(width))?;
    let mut filters = vec![0.0; layers * kv_heads * width];
    let parts = scratch.chunks_mut(scratch_len(width)).zip(filters.chunks_mut(width)).collect::<Vec<_>>();
    cpu.install(|| {
        parts.into_par_iter().enumerate().for_each(|(list, (scratch, filter))| {
            let of = (list / kv_heads, list % kv_heads);
            let direction = direction(cpu.isa(), q, of, q_heads / kv_heads, scratch);
            filter.iter_mut().zip(direction).for_each(|(to, x)| *to = -x);
        });
    });
    Ok(filters)
}

/// The unit eigenvector of the largest eigenvalue of a symmetric positive matrix `[n, n]`, which is overwritten; zero for
/// a zero matrix. `other` holds as much.
fn principal(matrix: &mut [f64], other: &mut [f64], n: usize) -> [f64; Shape::MAX_HEAD_DIM] {
    let mut vector = [0.0f64; Shape::MAX_HEAD_DIM];
    for _ in 0..SQUARINGS {
        // Powers of a matrix of trace one stay within the numbers.
        let trace: f64 = (0..n).map(|i| matrix[i * n + i]).sum();
        if trace <= 0.0 || !trace.is_finite() {
            return vector;
        }
        matrix.iter_mut().for_each(|x| *x /= trace);
        other.fill(0.0);
        for (row, to) in matrix.chunks_exact(n).zip(other.chunks_exact_mut(n)) {
            for (factor, from) in row.iter().zip(matrix.chunks_exact(n)) {
                to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
            }
        }
        matrix.copy_from_slice(other);
    }
    // The column of the largest diagonal element is not orthogonal to the eigenvector.
    let first = (0..n).max_by(|&i, &j| matrix[i * n + i].total_cmp(&matrix[j * n + j])).unwrap_or(0);
    vector[..n].copy_from_slice(&matrix[first * n..][..n]);
    normalise(&mut vector);
    for _ in 0..STEPS {
        let mut next = [0.0; Shape::MAX_HEAD_DIM];
        for (to, row) in next.iter_mut().zip(matrix.chunks_exact(n)) {
            *to = row.iter().zip(&vector).map(|(x, y)| x * y).sum();
        }
        normalise(&mut next);
        let change = next.iter().zip(&vector).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
        vector = next;
        if change < SETTLED {
            break;
        }
    }
    vector
}

fn normalise(vector: &mut [f64]) {
    let norm = vector.iter().map(|x| x * x).sum::<f64>().sqrt();
    if norm > 0.0 {
        vector.iter_mut().for_each(|x| *x /= norm);
    }
}

#[cfg(test)]
mod tests {
    use super::principal;

    #[test]
    fn the_principal_direction_is_found_also_where_the_second_is_near() {
        // Eigenvectors (3,4)/5 and (4,-3)/5 with eigenvalues 2 and b.
        for second in [0.0, 0.5, 1.9, 1.999] {
            let at = |x: f64, y: f64, z: f64| (2.0 * x + second * y) / 25.0 + z;
            let mut matrix = [at(9.0, 16.0, 0.0), at(12.0, -12.0, 0.0), at(12.0, -12.0, 0.0), at(16.0, 9.0, 0.0)];
            let got = principal(&mut matrix, &mut [0.0; 4], 2);
            assert!((got[0] - 0.6).abs() < 1e-6 && (got[1] - 0.8).abs() < 1e-6, "{:?}", &got[..2]);
        }
        assert_eq!(principal(&mut [0.0; 4], &mut [0.0; 4], 2)[..2], [0.0, 0.0]);
    }
}
