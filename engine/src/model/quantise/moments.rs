//! Means over a text of products of a block's inputs, `H = 2/n Σ xᵀ x`, and of their magnitudes: all that [`super::gptq`] and
//! [`super::awq`] know of the text.

use crate::device::Cpu;
use crate::device::gemm::{Matrix, product};
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::model::{Activation, Config, Hook};
use std::sync::{Mutex, PoisonError};

/// Rows that are multiplied together.
const ROWS: usize = 512;

/// What the matrices of a block read: of q, k and v, of o, of gate and up, of down.
pub const INPUTS: [Activation; 4] = [Activation::Hidden, Activation::O, Activation::MlpInput, Activation::MlpInner];

/// Elements of a row of each.
pub fn widths(config: &Config) -> [usize; INPUTS.len()] {
    [config.hidden, config.q_width(), config.hidden, config.ffn]
}

/// The sums of one input.
pub struct Moment {
    /// Elements of a row.
    pub width: usize,
    /// `[width, width]`.
    pub products: Buffer<f32>,
    /// Of the magnitudes, `[width]`.
    magnitudes: Vec<f64>,
    /// Rows that are still to be multiplied, `[ROWS, width]`.
    rows: Buffer<f32>,
    filled: usize,
    count: usize,
}

impl Moment {
    fn new(width: usize, arena: &Arena) -> Result<Self, ArenaError> {
        let room = |len| arena.alloc(Label::Workspace, len);
        let (products, rows) = (room(width * width)?, room(ROWS * width)?);
        Ok(Moment { width, products, magnitudes: vec![0.0; width], rows, filled: 0, count: 0 })
    }

    fn push(&mut self, rows: &[f32], cpu: &Cpu) {
        for row in rows.chunks_exact(self.width) {
            self.rows[self.filled * self.width..][..self.width].copy_from_slice(row);
            self.magnitudes.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(x.abs()));
            (self.filled, self.count) = (self.filled + 1, self.count + 1);
            if self.filled == ROWS {
                self.multiply(cpu);
            }
        }
    }

    fn multiply(&mut self, cpu: &Cpu) {
        let rows = Matrix::new(&self.rows, std::mem::take(&mut self.filled), self.width);
        cpu.install(|| product(&mut self.products, self.width, rows.transposed(), rows, true, cpu.threads()));
    }

    /// Mean magnitude of each element.
    pub fn magnitudes(&self) -> Vec<f32> {
        self.magnitudes.iter().map(|sum| (sum / self.count.max(1) as f64) as f32).collect()
    }
}

/// The sums of all inputs of a block, in the order of [`INPUTS`]: a hook.
pub struct Moments<'a> {
    sums: Mutex<[Moment; 4]>,
    cpu: &'a Cpu,
}

impl<'a> Moments<'a> {
    /// Nothing yet.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn new(config: &Config, cpu: &'a Cpu, arena: &Arena) -> Result<Self, ArenaError> {
        let of = |width| Moment::new(width, arena);
        let [hidden, q, mlp, inner] = widths(config);
        let sums = [of(hidden)?, of(q)?, of(mlp)?, of(inner)?];
        Ok(Moments { sums: Mutex::new(sums), cpu })
    }

    /// All of it.
    pub fn finish(self) -> [Moment; 4] {
        let mut sums = self.sums.into_inner().unwrap_or_else(PoisonError::into_inner);
        for sum in &mut sums {
            sum.multiply(self.cpu);
            let share = 2.0 / sum.count.max(1) as f32;
            sum.products.iter_mut().for_each(|x| *x *= share);
        }
        sums
    }
}

impl Hook for Moments<'_> {
    fn rows(&self, _: usize, what: Activation, rows: &[f32]) {
        if let Some(at) = INPUTS.iter().position(|&input| input == what) {
            self.sums.lock().unwrap_or_else(PoisonError::into_inner)[at].push(rows, self.cpu);
        }
    }
}
