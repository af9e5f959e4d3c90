//! Results over some of the keys, to which those over others are added: what ranks and steps of a ring meet in.
//!
//! A row is an unnormalised output with the maximum and the sum that it was built with, as in `tiled` and `decode`. The result of
//! any kernel is one too: its output, with the log-sum-exp as the maximum and a sum of 1.

use super::online::Running;
use super::strip::LANES;
use super::{Outputs, Shape};
use crate::device::Cpu;
use crate::device::simd::{Simd, SimdOp};
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::tensor::DType;
use rayon::prelude::*;

/// Partial results of all query rows of a problem, in f32.
pub struct Partials {
    /// `[rows, D rounded up to whole vectors]`, then the state of each row.
    values: Buffer<f32>,
    shape: Shape,
}

/// Elements of a row: its output, rounded up to whole vectors.
fn stride(shape: &Shape) -> usize {
    shape.head_dim.next_multiple_of(LANES)
}

impl Partials {
    /// Partial results over no keys, for the queries of `shape`.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn empty(arena: &Arena, shape: &Shape) -> Result<Self, ArenaError> {
        let mut partials =
            Partials { values: arena.alloc(Label::Activations, Self::bytes(shape) as usize / 4)?, shape: *shape };
        partials.split().1.fill(Running::EMPTY);
        Ok(partials)
    }

    /// Bytes that [`Partials::empty`] takes: `D` rounded up to 16, a maximum and a sum for each row.
    pub fn bytes(shape: &Shape) -> u64 {
        4 * (shape.rows() * (stride(shape) + 2)) as u64
    }

    fn split(&mut self) -> (&mut [f32], &mut [Running]) {
        let (o, states) = self.values.split_at_mut(self.shape.rows() * stride(&self.shape));
        (o, bytemuck::cast_slice_mut(states))
    }

    /// All of it, to be sent to where [`Partials::merge`] takes it in.
    pub fn as_bytes(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.values)
    }

    /// Takes in what a kernel computed for the queries from `first` on of each head, over keys that are not in yet.
    ///
    /// # Panics
    /// When there are not as many heads, or fewer queries.
    pub fn add(&mut self, cpu: &Cpu, first: usize, outputs: &Outputs) {
        let Shape { q_len, head_dim, q_heads, .. } = self.shape;
        let [batch, heads, count, width] = outputs.o.dims();
        assert!(batch == self.shape.batch && heads == q_heads && width == head_dim && first + count <= q_len);
        let (stride, isa, view) = (stride(&self.shape), cpu.isa(), outputs.o.view());
        let (o, states) = self.split();
        let heads = o.par_chunks_mut(q_len * stride).zip(states.par_chunks_mut(q_len)).enumerate();
        cpu.install(|| {
            heads.for_each(|(head, (o, states))| {
                let rows = o.chunks_exact_mut(stride).zip(states).skip(first).take(count).enumerate();
                for (i, (o, state)) in rows {
                    let mut row = [0.0; Shape::MAX_HEAD_DIM];
                    view.read_rows(head / q_heads, head % q_heads, i, &mut row[..width]);
                    let other = Running::of(outputs.lse[head * count + i]);
                    isa.run(Merge { state, o, other, other_o: &row[..stride] });
                }
            });
        });
    }

    /// Takes in the partial results of the same rows over other keys, as [`Partials::as_bytes`] gave them.
    ///
    /// # Panics
    /// When they are of another shape.
    pub fn merge(shape: &Shape, cpu: &Cpu, mine: &mut [u8], theirs: &[u8]) {
        let (stride, isa, rows) = (stride(shape), cpu.isa(), shape.rows());
        assert_eq!(mine.len() as u64, Self::bytes(shape), "partial results of one shape");
        let (o, states) = bytemuck::cast_slice_mut::<u8, f32>(mine).split_at_mut(rows * stride);
        let (other_o, others) = bytemuck::cast_slice::<u8, f32>(theirs).split_at(rows * stride);
        let (states, others): (&mut [Running], &[Running]) =
            (bytemuck::cast_slice_mut(states), bytemuck::cast_slice(others));
        cpu.install(|| {
            let mine = o.par_chunks_mut(stride).zip(states);
            mine.zip(other_o.par_chunks(stride).zip(others)).for_each(|((o, state), (other_o, &other))| {
                isa.run(Merge { state, o, other, other_o });
            });
        });
    }

    /// Writes the results over all keys that are in.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn finish(mut self, cpu: &Cpu, arena: &Arena, dtype: DType) -> Result<Outputs, ArenaError> {
        let (shape, isa) = (self.shape, cpu.isa());
        let mut outputs = Outputs::allocate(arena, &shape, dtype)?;
        let row_bytes = shape.head_dim * dtype.bytes();
        let (o, states) = self.split();
        let rows = o.par_chunks_mut(stride(&shape)).zip(states);
        let results = outputs.o.bytes_mut().par_chunks_mut(row_bytes).zip(outputs.lse.par_iter_mut());
        cpu.install(|| {
            rows.zip(results).for_each(|((o, state), (target, lse))| {
                *lse = isa.run(Normalise { state, o });
                dtype.encode(&o[..shape.head_dim], target);
            });
        });
        Ok(outputs)
    }
}

struct Merge<'a> {
    state: &'a mut Running,
    o: &'a mut [f32],
    other: Running,
    other_o: &'a [f32],
}

impl SimdOp for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        self.state.merge(simd, self.o, self.other, self.other_o);
    }
}

struct Normalise<'a> {
    state: &'a Running,
    o: &'a mut [f32],
}

impl SimdOp for Normalise<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        self.state.normalise(simd, self.o)
    }
}
