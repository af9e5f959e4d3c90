//! GPTQ ([arXiv 2210.17323](https://arxiv.org/abs/2210.17323)): columns of a matrix are rounded one after another, and what each is off
//! by is made good by the columns behind it, as far as their inputs go together.
//!
//! With `H` the mean products of the inputs, and `U` upper triangular with `Uᵀ U = H⁻¹`, a column `i` that is off by `e` is made
//! good by `w_j -= e U_ij / U_ii` for all `j > i`: the least squares of what is left. A group's scale is taken from its weights as they are
//! when its first column's turn comes. With `order=act` columns come by the size of their inputs, largest first, and groups are of
//! columns that follow each other in that order. Rows do not depend on each other and are dealt to threads.

use super::coded::Coded;
use crate::device::Cpu;
use crate::format::{Grid, Step};
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::policy::least_squares::dot;
use rayon::prelude::*;

/// Columns whose errors reach those behind them together.
const PIECE: usize = 128;
/// Rows of a thread that share what is read of `U`, and columns of `U` that are solved for together.
const ROWS: usize = 16;
const COLUMNS: usize = 64;

/// What GPTQ may be asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gptq {
    /// Whether columns come by the size of their inputs.
    pub by_size: bool,
    /// Part of the mean square of the inputs that is added to each.
    pub damp: f64,
}

/// What GPTQ makes of an input's mean products: for all matrices that read it.
pub struct Factor {
    method: Gptq,
    /// The inputs in the order in which columns come.
    order: Vec<usize>,
    /// Those that are always 0.
    unused: Vec<usize>,
    /// `U`, in that order, `[width, width]`.
    factor: Buffer<f32>,
}

impl Factor {
    /// Of mean products `[width, width]`.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn new(method: Gptq, products: &[f32], width: usize, cpu: &Cpu, arena: &Arena) -> Result<Self, ArenaError> {
        let size = |&input: &usize| products[input * width + input];
        let mut order: Vec<usize> = (0..width).collect();
        let unused = order.iter().copied().filter(|input| size(input) == 0.0).collect();
        if method.by_size {
            order.sort_by(|a, b| size(b).total_cmp(&size(a)));
        }
        let factor = inverse_factor(method, &order, products, cpu, arena)?;
        Ok(Factor { method, order, unused, factor })
    }

    /// Codes of `weights` `[rows, width]`, which are spent.
    pub fn code(&self, weights: &mut [f32], coded: &mut Coded, cpu: &Cpu) {
        let (width, grid) = (coded.width, coded.grid);
        for row in weights.chunks_exact_mut(width) {
            // Nothing depends on the weights of an input that is always 0.
            self.unused.iter().for_each(|&input| row[input] = 0.0);
        }
        if self.method.by_size {
            let places = self.order.iter().enumerate();
            places.for_each(|(place, &input)| coded.group_of[input] = (place / grid.group) as u32);
        }
        let rows = weights.par_chunks_mut(ROWS * width).zip(coded.codes.par_chunks_mut(ROWS * width));
        let rows = rows.zip(coded.steps.par_chunks_mut(ROWS * (width / grid.group)));
        cpu.install(|| {
            rows.for_each(|((weights, codes), steps)| of_rows(grid, &self.order, &self.factor, weights, codes, steps));
        });
    }
}

/// Makes `U` of `H`, with rows and columns in `order`: `H = R Rᵀ` with `R` upper triangular, from the last column on, and `U = R⁻¹`.
fn inverse_factor(
    method: Gptq,
    order: &[usize],
    products: &[f32],
    cpu: &Cpu,
    arena: &Arena,
) -> Result<Buffer<f32>, ArenaError> {
    let width = order.len();
    let mut factor = arena.alloc::<f64>(Label::Workspace, width * width)?;
    let square = |input: usize| match f64::from(products[input * width + input]) {
        0.0 => 1.0,
        square => square,
    };
    let ridge = method.damp * (0..width).map(square).sum::<f64>() / width as f64;
    for (row, &from) in factor.chunks_exact_mut(width).zip(order) {
        for (to, &column) in row.iter_mut().zip(order) {
            *to = if column == from { square(from) + ridge } else { f64::from(products[from * width + column]) };
        }
    }
    cpu.install(|| {
        for column in (0..width).rev() {
            let (above, own) = factor.split_at_mut(column * width);
            let tail = &own[column + 1..width];
            // What is left of the diagonal is never below the ridge, but for rounding.
            let pivot = (own[column] - dot(tail, tail)).max(ridge).max(f64::MIN_POSITIVE).sqrt();
            own[column] = pivot;
            let tail = &own[column + 1..width];
            above.par_chunks_exact_mut(width).with_min_len(ROWS).for_each(|row| {
                row[column] = (row[column] - dot(&row[column + 1..], tail)) / pivot;
            });
        }
    });
    let factor = &*factor;
    let mut inverse = arena.alloc::<f64>(Label::Workspace, width.div_ceil(COLUMNS) * width * COLUMNS)?;
    let solve = |(index, part): (usize, &mut [f64])| {
        let (first, last) = (index * COLUMNS, width.min((index + 1) * COLUMNS));
        for row in (0..last).rev() {
            let (own, below) = part[row * COLUMNS..].split_at_mut(COLUMNS);
            own.fill(0.0);
            if row >= first {
                own[row - first] = 1.0;
            }
            for (below, factor) in below.chunks_exact(COLUMNS).zip(&factor[row * width + row + 1..row * width + last]) {
                own.iter_mut().zip(below).for_each(|(own, below)| *own -= factor * below);
            }
            own.iter_mut().for_each(|x| *x /= factor[row * width + row]);
        }
    };
    cpu.install(|| inverse.par_chunks_exact_mut(width * COLUMNS).enumerate().for_each(solve));
    let mut done = arena.alloc::<f32>(Label::Workspace, width * width)?;
    for (index, part) in inverse.chunks_exact(width * COLUMNS).enumerate() {
        let (first, last) = (index * COLUMNS, width.min((index + 1) * COLUMNS));
        for (to, from) in done.chunks_exact_mut(width).zip(part.chunks_exact(COLUMNS)).take(last) {
            to[first..last].iter_mut().zip(from).for_each(|(to, from)| *to = *from as f32);
        }
    }
    Ok(done)
}

/// Codes of some rows, with columns in `order` and `factor` in that order too.
fn of_rows(grid: Grid, order: &[usize], factor: &[f32], weights: &mut [f32], codes: &mut [u8], steps: &mut [Step]) {
    let width = order.len();
    let groups = width / grid.group;
    let mut sorted = vec![0.0; width];
    for row in weights.chunks_exact_mut(width) {
        sorted.iter_mut().zip(order).for_each(|(to, &from)| *to = row[from]);
        row.copy_from_slice(&sorted);
    }
    let mut errors = vec![0.0; weights.len() / width * PIECE];
    let mut first = 0;
    while first < width {
        let group = first / grid.group;
        let last = (first + PIECE).min((group + 1) * grid.group);
        let rows =
            weights.chunks_exact_mut(width).zip(codes.chunks_exact_mut(width)).zip(steps.chunks_exact_mut(groups));
        for (((weights, codes), steps), errors) in rows.zip(errors.chunks_exact_mut(PIECE)) {
            if first == group * grid.group {
                steps[group] = grid.step(&weights[first..first + grid.group]);
            }
            for column in first..last {
                let code = steps[group].code(grid, weights[column]);
                let factor = &factor[column * width..][..last];
                let error = (weights[column] - steps[group].element(code)) / factor[column];
                (codes[order[column]], errors[column - first]) = (code, error);
                let behind = weights[column + 1..last].iter_mut().zip(&factor[column + 1..]);
                behind.for_each(|(weight, factor)| *weight -= error * factor);
            }
        }
        for column in first..last {
            let factor = &factor[column * width + last..(column + 1) * width];
            for (weights, errors) in weights.chunks_exact_mut(width).zip(errors.chunks_exact(PIECE)) {
                let error = errors[column - first];
                weights[last..].iter_mut().zip(factor).for_each(|(weight, factor)| *weight -= error * factor);
            }
        }
        first = last;
    }
}
