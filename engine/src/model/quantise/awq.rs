//! AWQ ([arXiv 2306.00978](https://arxiv.org/abs/2306.00978)): inputs that are large on average get larger weights, so that rounding
//! costs them less, and are divided by as much where they come from.
//!
//! An input's factor is its mean magnitude to a power between 0 and 1, one power for matrices that read the same inputs; the one whose
//! rounded weights change the outputs least is taken. Then the ends of each group are cut as far as that changes its outputs less still. What
//! outputs change by is exact for the text: `Δ H Δᵀ`, with `H` the mean products of the inputs, where the authors multiply samples of
//! them. Cutting looks at a group by itself, as theirs does.

use crate::device::Cpu;
use crate::device::gemm::{Matrix, product};
use crate::format::Grid;
use crate::memory::{Arena, ArenaError, Label};
use rayon::prelude::*;

/// Powers that are tried: of so many parts of 1, all but 1 itself.
const POWERS: usize = 20;
/// Ends that are tried: of so many parts of a group's largest weight, those down to half of it.
const CUTS: usize = 20;
/// Least mean magnitude.
const LEAST: f32 = 1e-4;

/// The factor of each input of some matrices `[rows, width]` that read the same: `moments` `[width, width]` are mean products of the
/// inputs, `magnitudes` `[width]` their mean magnitudes.
///
/// # Errors
/// When the arena has no room.
pub fn factors(
    grid: Grid,
    matrices: &[&[f32]],
    moments: &[f32],
    magnitudes: &[f32],
    cpu: &Cpu,
    arena: &Arena,
) -> Result<Vec<f32>, ArenaError> {
    let width = magnitudes.len();
    let largest = matrices.iter().map(|matrix| matrix.len()).max().unwrap_or(0);
    let mut off = arena.alloc::<f32>(Label::Workspace, largest)?;
    let mut outputs = arena.alloc::<f32>(Label::Workspace, largest)?;
    let mut best = (f64::INFINITY, vec![1.0; width]);
    for power in 0..POWERS {
        let factors = of_power(magnitudes, power as f32 / POWERS as f32);
        let mut loss = 0.0;
        for matrix in matrices {
            let (off, outputs) = (&mut off[..matrix.len()], &mut outputs[..matrix.len()]);
            let rows = off.par_chunks_mut(width).zip(matrix.par_chunks(width));
            cpu.install(|| rows.for_each(|(off, row)| rounding(grid, row, &factors, off)));
            loss += squares(off, moments, width, outputs, cpu);
        }
        if loss < best.0 {
            best = (loss, factors);
        }
    }
    Ok(best.1)
}

/// Magnitudes to a power, with the geometric mean of the largest and the least at 1.
fn of_power(magnitudes: &[f32], power: f32) -> Vec<f32> {
    let factors: Vec<f32> = magnitudes.iter().map(|x| x.powf(power).max(LEAST)).collect();
    let (least, most) = factors.iter().fold((f32::INFINITY, 0.0f32), |(least, most), &x| (least.min(x), most.max(x)));
    let middle = (least * most).sqrt();
    factors.iter().map(|x| x / middle).collect()
}

/// What a row is off by once it is rounded times its factors.
fn rounding(grid: Grid, row: &[f32], factors: &[f32], off: &mut [f32]) {
    off.iter_mut().zip(row).zip(factors).for_each(|((to, x), factor)| *to = x * factor);
    for ((off, row), factors) in off.chunks_mut(grid.group).zip(row.chunks(grid.group)).zip(factors.chunks(grid.group))
    {
        let step = grid.step(off);
        let each = off.iter_mut().zip(row).zip(factors);
        each.for_each(|((to, x), factor)| *to = step.nearest(grid, *to) / factor - x);
    }
}

/// The sum over rows of `Δ H Δᵀ`.
pub fn squares(off: &[f32], moments: &[f32], width: usize, outputs: &mut [f32], cpu: &Cpu) -> f64 {
    let rows = off.len() / width;
    let (left, right) = (Matrix::new(off, rows, width), Matrix::new(moments, width, width));
    cpu.install(|| product(outputs, width, left, right, false, cpu.threads()));
    let row = |(off, outputs): (&[f32], &[f32])| -> f64 {
        off.iter().zip(outputs).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
    };
    // Summed in one order, whatever the number of threads.
    off.chunks_exact(width).zip(outputs.chunks_exact(width)).map(row).sum()
}

/// Cuts the ends of each group where its outputs change less for it.
pub fn cut(grid: Grid, weights: &mut [f32], moments: &[f32], width: usize, cpu: &Cpu) {
    let row = |row: &mut [f32]| {
        let mut off = vec![0.0; grid.group];
        for (index, group) in row.chunks_exact_mut(grid.group).enumerate() {
            let largest = group.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            // No cut hides that f16 has no scale for it.
            if !grid.step(group).scale.is_finite() {
                continue;
            }
            let mut best = (f32::INFINITY, largest);
            for part in 0..CUTS / 2 {
                let end = largest * (1.0 - part as f32 / CUTS as f32);
                off.iter_mut().zip(&*group).for_each(|(to, x)| *to = x.clamp(-end, end));
                let step = grid.step(&off);
                off.iter_mut().zip(&*group).for_each(|(to, x)| *to = step.nearest(grid, *to) - x);
                let first = index * grid.group;
                let product = |(row, x): (usize, &f32)| -> f32 {
                    let moments = &moments[(first + row) * width + first..][..grid.group];
                    x * moments.iter().zip(&off).map(|(a, b)| a * b).sum::<f32>()
                };
                let loss: f32 = off.iter().enumerate().map(product).sum();
                if loss < best.0 {
                    best = (loss, end);
                }
            }
            group.iter_mut().for_each(|x| *x = x.clamp(-best.1, best.1));
        }
    };
    cpu.install(|| weights.par_chunks_exact_mut(width).for_each(row));
}
