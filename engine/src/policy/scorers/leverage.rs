//! Leverage scores (part of Compactor, arXiv 2507.08143): how far a key lies outside what the other keys span. With
//! `X` the keys before RoPE less their mean, the score of row `x` is `x (X'X + 0.01)^-1 x'`.
//!
//! Formula and defaults are kvpress's, with the diagonal of 0.01 that it always adds. `sketch` first takes the keys to
//! that many dimensions by a Gaussian matrix of its own for each list; 0 leaves them as they are. Scores get mean 0 and
//! deviation 1 over all heads of a sequence (kvpress: over the whole batch, which couples its sequences).

use super::super::linear::{Moments, inverse_factor, matrix_len, padded, times};
use super::non_causal::standardise;
use crate::attention::Shape;
use crate::memory::Label;
use crate::named::{Named, NamedError, Parameter};
use crate::policy::{Context, List, Policy, PolicyEntry, PolicyError, Scorer, Statistic, each_list};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use rand_distr::{Distribution, StandardNormal};
use std::ops::Range;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "leverage",
    about: "keeps the keys that lie outside what the others span",
    paper: "2507.08143",
    parameters: &[SKETCH],
    build: |named, _| Ok(Policy::after_prefill(Leverage { sketch: sketch(named)? })),
};

/// The parameter that says how far keys are sketched.
pub(super) const SKETCH: Parameter =
    Parameter { name: "sketch", default: "48", about: "dimensions that keys are sketched to; 0: exact" };

/// Added to the diagonal, as kvpress does.
const DIAGONAL: f64 = 1e-2;

/// Reads [`SKETCH`].
pub(super) fn sketch(named: &Named) -> Result<usize, NamedError> {
    let sketch = named.count("sketch", 48, 0)?;
    match sketch <= Shape::MAX_HEAD_DIM {
        true => Ok(sketch),
        false => Err(named.wrong("sketch", format!("at most {}", Shape::MAX_HEAD_DIM))),
    }
}

struct Leverage {
    sketch: usize,
}

impl Scorer for Leverage {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::Keys, Statistic::BeforeRope]
    }

    fn scratch_bytes(&self, shape: &Shape, _: usize) -> u64 {
        scratch_bytes(shape, self.sketch)
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        leverages(context, scores, self.sketch, "leverage", |list| 0..list.len)?;
        standardise(context, scores, |list| 0..list.len);
        Ok(())
    }
}

/// Dimensions of the sketched keys.
fn dimensions(width: usize, sketch: usize) -> usize {
    if sketch == 0 { width } else { sketch }
}

/// Parts of a list's scratch: two square matrices of f64, the sketch in f64, outer products, and the map to rows whose
/// squared norms are the scores.
fn parts(width: usize, sketch: usize) -> [usize; 4] {
    let n = dimensions(width, sketch);
    [4 * n * n, 2 * width * sketch, matrix_len(width, width), matrix_len(width, n)]
}

/// Scratch bytes of [`leverages`].
pub(super) fn scratch_bytes(shape: &Shape, sketch: usize) -> u64 {
    4 * (shape.batch * shape.kv_heads * parts(shape.head_dim, sketch).iter().sum::<usize>()) as u64
}

/// Writes the leverage of the keys of a `span` of each list among those of the span.
pub(super) fn leverages(
    context: &Context<'_>,
    scores: &mut [f32],
    sketch: usize,
    policy: &'static str,
    span: impl Fn(&List<'_>) -> Range<usize> + Sync,
) -> Result<(), PolicyError> {
    if context.before_rope.is_none() {
        return Err(PolicyError::Missing {
            policy,
            what: "RoPE's base, to look at keys before RoPE: rope_theta in the tensor file's metadata",
        });
    }
    let width = context.call.shape.head_dim;
    let parts = parts(width, sketch);
    let mut scratch = context.arena.alloc::<f32>(Label::Workspace, context.lists() * parts.iter().sum::<usize>())?;
    each_list(context, scores, &mut scratch, |list, scores, scratch| {
        let isa = context.call.cpu.isa();
        let (squares, rest) = scratch.split_at_mut(parts[0]);
        let (phi, rest) = rest.split_at_mut(parts[1]);
        let (outer, map) = rest.split_at_mut(parts[2]);
        let range = span(list);
        let mut moments = Moments::new(isa, width, outer);
        list.keys_before_rope(range.clone(), |_, rows| {
            rows.chunks_exact(width).for_each(|row| moments.add_shifted(row));
        });
        let (_, mean) = moments.centre();
        let n = dimensions(width, sketch);
        let (matrix, inverse) = bytemuck::cast_slice_mut::<f32, f64>(squares).split_at_mut(n * n);
        let phi = bytemuck::cast_slice_mut::<f32, f64>(phi);
        draw(phi, sketch, context.seed, context.list_number(list.index));
        sketched(outer, width, phi, sketch, matrix);
        inverse_factor(matrix, n, DIAGONAL, inverse);
        whitening(phi, sketch, inverse, n, map);
        list.keys_before_rope(range, |start, rows| {
            for row in rows.chunks_exact_mut(width) {
                row.iter_mut().zip(&mean).for_each(|(x, mean)| *x -= mean);
            }
            times(isa, rows, width, map, n, |index, _, white| {
                scores[start + index] = white[..n].iter().map(|x| x * x).sum();
            });
        });
    });
    Ok(())
}

/// Draws the sketch of a list, `[D, k]`: normal numbers over the root of `k`, a stream for each list.
fn draw(phi: &mut [f64], sketch: usize, seed: u64, list: usize) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(list as u64);
    let factor = 1.0 / (sketch as f64).sqrt();
    phi.iter_mut().for_each(|x| {
        let drawn: f64 = StandardNormal.sample(&mut rng);
        *x = factor * drawn;
    });
}

/// `phi' S phi` of the outer products `S`, or `S` itself without a sketch.
fn sketched(outer: &[f32], width: usize, phi: &[f64], sketch: usize, matrix: &mut [f64]) {
    let rows = outer.chunks_exact(padded(width)).take(width);
    if sketch == 0 {
        for (to, from) in matrix.chunks_exact_mut(width).zip(rows) {
            to.iter_mut().zip(from).for_each(|(to, &from)| *to = f64::from(from));
        }
        return;
    }
    matrix.fill(0.0);
    for (left, row) in phi.chunks_exact(sketch).zip(rows) {
        let mut right = [0.0f64; Shape::MAX_HEAD_DIM];
        let right = &mut right[..sketch];
        for (&x, phi) in row.iter().zip(phi.chunks_exact(sketch)) {
            right.iter_mut().zip(phi).for_each(|(to, phi)| *to += f64::from(x) * phi);
        }
        for (factor, to) in left.iter().zip(matrix.chunks_exact_mut(sketch)) {
            to.iter_mut().zip(&*right).for_each(|(to, x)| *to += factor * x);
        }
    }
}

/// `phi W'` of the inverse factor `W`, or `W'` itself without a sketch: `[D, n]`.
fn whitening(phi: &[f64], sketch: usize, inverse: &[f64], n: usize, map: &mut [f32]) {
    for (d, to) in map.chunks_exact_mut(padded(n)).enumerate() {
        for (j, to) in to[..n].iter_mut().enumerate() {
            let row = &inverse[j * n..][..n];
            *to = match sketch {
                0 => row.get(d).map_or(0.0, |&x| x as f32),
                _ => phi
                    .get(d * n..(d + 1) * n)
                    .map_or(0.0, |phi| phi.iter().zip(row).map(|(x, y)| x * y).sum::<f64>() as f32),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sketch_by_the_identity_is_no_sketch() {
        let (width, mut outer) = (3, vec![0.0f32; matrix_len(3, 3)]);
        for (i, row) in outer.chunks_exact_mut(padded(3)).take(3).enumerate() {
            row[..3].iter_mut().enumerate().for_each(|(j, x)| *x = if i == j { 2.0 } else { 0.5 });
        }
        let identity: Vec<f64> = (0..9).map(|i| if i % 4 == 0 { 1.0 } else { 0.0 }).collect();
        let (mut exact, mut by_identity) = (vec![0.0; 9], vec![0.0; 9]);
        sketched(&outer, width, &[], 0, &mut exact);
        sketched(&outer, width, &identity, 3, &mut by_identity);
        assert_eq!(exact, by_identity);
        assert_eq!(exact[..4], [2.0, 0.5, 0.5, 0.5]);
        let mut inverse = vec![0.0; 9];
        inverse_factor(&exact, 3, DIAGONAL, &mut inverse);
        let (mut one, mut other) = (vec![0.0; matrix_len(3, 3)], vec![0.0; matrix_len(3, 3)]);
        whitening(&[], 0, &inverse, 3, &mut one);
        whitening(&identity, 3, &inverse, 3, &mut other);
        assert_eq!(one, other);
        // The map is the transpose: upper where the factor is lower.
        assert!(one[1] != 0.0 && one[padded(3)] == 0.0);
    }

    #[test]
    fn every_list_draws_a_sketch_of_the_right_size() {
        let (mut one, mut other) = (vec![0.0; 64 * 48], vec![0.0; 64 * 48]);
        draw(&mut one, 48, 7, 0);
        draw(&mut other, 48, 7, 1);
        assert_ne!(one, other);
        let square: f64 = one.iter().map(|x| x * x).sum::<f64>() / 64.0;
        assert!((square - 1.0).abs() < 0.1, "rows have norm {square}, not about 1");
    }
}
