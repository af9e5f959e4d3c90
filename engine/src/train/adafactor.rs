//! Adafactor (Shazeer and Stern, arXiv 1804.04235): the mean square of a matrix's gradient as a product of its rows' and columns'.
//!
//! `R` are means over the columns, `C` over the rows, of `g² + 1e-30`, remembered by `1 - t^-0.8` in step `t`;
//! `v = R Cᵀ / mean(R)`. What has one row is kept in full. The update `u = g / √v` is scaled down to a root mean square of 1
//! (algorithm 4 of the paper), and there is no first moment. The learning rate is that of the run; steps relative to the parameter's
//! size are left out.

use super::parameters::Parameter;
use crate::device::Cpu;
use rayon::prelude::*;

/// Added to the square of a gradient.
const EPS: f64 = 1e-30;
/// Exponent of the memory.
const DECAY: f64 = 0.8;

/// Numbers that are kept of a parameter.
pub(super) fn kept(parameter: &Parameter) -> usize {
    match parameter.shape[..] {
        [rows, columns] if rows > 1 => rows + columns,
        _ => parameter.range.len(),
    }
}

/// Changes a parameter's weights in step `step` (from 0) at learning rate `rate`, with its gradient times `scale`; weights are multiplied
/// by `decay` before.
pub(super) fn update(
    cpu: &Cpu,
    parameter: &Parameter,
    (step, rate): (usize, f32),
    (scale, decay): (f32, f32),
    (weights, gradient): (&mut [f32], &[f32]),
    kept: &mut [f32],
) {
    let new = (step as f64 + 1.0).powf(-DECAY);
    let mix = |old: &mut f32, square: f64| *old = ((1.0 - new) * f64::from(*old) + new * square) as f32;
    let square = |g: &f32| f64::from(g * scale).powi(2) + EPS;
    let columns = match parameter.shape[..] {
        [rows, columns] if rows > 1 => columns,
        _ => {
            kept.iter_mut().zip(gradient).for_each(|(kept, g)| mix(kept, square(g)));
            let factor = |index: usize| 1.0 / f64::from(kept[index]).sqrt();
            return apply(cpu, (rate, scale, decay), weights, gradient, gradient.len(), &|_, at| factor(at));
        }
    };
    let (of_rows, of_columns) = kept.split_at_mut(gradient.len() / columns);
    let rows = of_rows.len();
    cpu.install(|| {
        let of_rows = of_rows.par_iter_mut().zip(gradient.par_chunks(columns));
        of_rows.for_each(|(kept, g)| mix(kept, g.iter().map(square).sum::<f64>() / columns as f64));
        const PIECE: usize = 64;
        of_columns.par_chunks_mut(PIECE).enumerate().for_each(|(piece, kept)| {
            let mut sums = [0.0f64; PIECE];
            for g in gradient.chunks(columns) {
                sums.iter_mut().zip(&g[piece * PIECE..][..kept.len()]).for_each(|(sum, g)| *sum += square(g));
            }
            kept.iter_mut().zip(sums).for_each(|(kept, sum)| mix(kept, sum / rows as f64));
        });
    });
    let mean = of_rows.iter().map(|&r| f64::from(r)).sum::<f64>() / rows as f64;
    let (of_rows, of_columns) = (&*of_rows, &*of_columns);
    let per_row: Vec<f64> = of_rows.iter().map(|&r| (mean / f64::from(r)).sqrt()).collect();
    let per_column: Vec<f64> = of_columns.iter().map(|&c| 1.0 / f64::from(c).sqrt()).collect();
    apply(cpu, (rate, scale, decay), weights, gradient, columns, &|row, column| per_row[row] * per_column[column]);
}

/// `w = decay w - rate u / max(1, rms(u))` with `u = scale g factor(row, column)`.
fn apply(
    cpu: &Cpu,
    (rate, scale, decay): (f32, f32, f32),
    weights: &mut [f32],
    gradient: &[f32],
    columns: usize,
    factor: &(dyn Fn(usize, usize) -> f64 + Sync),
) {
    let update = |row: usize, column: usize, g: f32| f64::from(g * scale) * factor(row, column);
    let squares: Vec<f64> = cpu.install(|| {
        let rows = gradient.par_chunks(columns).enumerate();
        let of_row = |(row, g): (usize, &[f32])| {
            g.iter().enumerate().map(|(column, &g)| update(row, column, g).powi(2)).sum::<f64>()
        };
        rows.map(of_row).collect()
    });
    let rms = (squares.iter().sum::<f64>() / gradient.len() as f64).sqrt();
    let step = f64::from(rate) / rms.max(1.0);
    cpu.install(|| {
        let rows = weights.par_chunks_mut(columns).zip(gradient.par_chunks(columns)).enumerate();
        rows.for_each(|(row, (weights, g))| {
            for (column, (w, &g)) in weights.iter_mut().zip(g).enumerate() {
                *w = (f64::from(*w * decay) - step * update(row, column, g)) as f32;
            }
        });
    });
}
