//! What the CPU can do at best: the ceilings against which kernels are measured.
//!
//! Each probe runs on all threads of a pool at once and is the best of a few short runs. A multiply-add counts as two
//! operations, a dot product of a pair as four.

use super::Cpu;
use super::simd::product::{Extents, Left, Right, product};
use super::simd::{Isa, Native, Simd, SimdBf16Op, SimdOp, Unit};
use std::hint::black_box;
use std::time::Instant;

/// Independent accumulators: enough to hide the latency of two pipes, and with both operands no more than the 16 registers of AVX2.
const CHAINS: usize = 12;
const STEPS: usize = 1_000_000;
/// Operations of a matrix unit's instruction, in those of a vector's dot products.
const TILE_WORK: usize = 16;
const RUNS: usize = 5;
/// The same for a first look, of some 20 microseconds a run.
const FEW_STEPS: usize = 5_000;
const FEW_RUNS: usize = 8;
/// What is read in one run: far more than the last-level cache of most machines.
const READ_BYTES: usize = 256 << 20;

/// Bytes of a cache line, and how far ahead of the reading lines are asked for.
const LINE_BYTES: usize = 64;
const AHEAD_BYTES: usize = 8192;

/// Operations per second of f32 multiply-adds.
pub fn fma_flops(cpu: &Cpu) -> f64 {
    best(cpu, || cpu.isa().run_bf16(MultiplyAdds { bf16: false, steps: STEPS }))
}

/// Operations per second of dot products of pairs of bf16; `None` where the path has none.
pub fn bf16_dot_flops(cpu: &Cpu) -> Option<f64> {
    let probe = |steps| cpu.isa().run_bf16(MultiplyAdds { bf16: true, steps });
    (probe(1) > 0.0).then(|| best(cpu, || probe(STEPS)))
}

/// Products of bf16 in dot products of pairs that this thread takes in the time of one multiply-add in f32; `None` where
/// the path has none. The best of a few runs of each, in turn.
pub fn bf16_gain(isa: Isa) -> Option<f64> {
    let rate = |bf16| {
        let start = Instant::now();
        isa.run_bf16(MultiplyAdds { bf16, steps: FEW_STEPS }) / start.elapsed().as_secs_f64()
    };
    let both = |[f32s, bf16s]: [f64; 2]| [f32s.max(rate(false)), bf16s.max(rate(true))];
    let [f32s, bf16s] = (0..FEW_RUNS).fold([0.0; 2], |best, _| both(best));
    (bf16s > 0.0).then(|| bf16s / f32s)
}

/// Bytes per second read from memory.
pub fn read_bytes(cpu: &Cpu) -> f64 {
    // Not zeros: the system would back all of those by the same page.
    let memory = vec![1.0f32; READ_BYTES / 4];
    let share = memory.len() / cpu.threads();
    best(cpu, || {
        let index = rayon::current_thread_index().unwrap_or(0);
        cpu.isa().run(Read(&memory[index * share..][..share]))
    })
}

/// The work of all threads together, by what each returns, per second of the best run.
fn best(cpu: &Cpu, work: impl Fn() -> f64 + Sync) -> f64 {
    let run = |_| {
        let start = Instant::now();
        let done: f64 = cpu.install(|| rayon::broadcast(|_| work())).iter().sum();
        done / start.elapsed().as_secs_f64()
    };
    (0..RUNS).map(run).fold(0.0, f64::max)
}

/// Multiply-adds in registers; returns their operations.
struct MultiplyAdds {
    bf16: bool,
    steps: usize,
}

impl SimdBf16Op for MultiplyAdds {
    type Output = f64;

    #[inline(always)]
    fn run<S: Native>(self, simd: S) -> f64 {
        match (self.bf16, <S::Bf16 as Unit<S>>::DEPTH) {
            (true, 1) => 0.0,
            (true, _) if <S::Bf16 as Unit<S>>::has_tiles(simd) => tile_products::<S, S::Bf16>(simd, self.steps),
            (true, _) => multiply_adds::<S, S::Bf16>(simd, self.steps),
            (false, _) => multiply_adds::<S, f32>(simd, self.steps),
        }
    }
}

#[inline(always)]
fn multiply_adds<S: Simd, U: Unit<S>>(simd: S, steps: usize) -> f64 {
    let unit = black_box([U::zeroed(); 16]);
    // SAFETY: 16 units, as many as the widest vector has lanes.
    let (a, b) = unsafe { (U::load(simd, unit.as_ptr()), U::broadcast(simd, unit.as_ptr())) };
    let mut sums = [simd.splat(0.0); CHAINS];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = U::mul_add(simd, a, b, *sum);
        }
    }
    for sum in sums {
        black_box(simd.sum(sum));
    }
    (steps * CHAINS * S::LANES * U::DEPTH * 2) as f64
}

/// As long as so many steps of [`multiply_adds`] or longer, which is [`TILE_WORK`] times their operations, in products of operands
/// that stay in the first-level cache: with fewer, the time would be that of making room for these.
#[inline(always)]
fn tile_products<S: Simd, U: Unit<S>>(simd: S, steps: usize) -> f64 {
    const EXTENTS: Extents = Extents { rows: 48, columns: 32, steps: 64 };
    let (a, b) = (vec![U::zeroed(); EXTENTS.rows * EXTENTS.steps], vec![U::zeroed(); EXTENTS.steps * EXTENTS.columns]);
    let mut c = vec![0.0; EXTENTS.rows * EXTENTS.columns];
    let operations = 2 * U::DEPTH * EXTENTS.rows * EXTENTS.columns * EXTENTS.steps;
    let products = (TILE_WORK * steps * CHAINS * S::LANES * U::DEPTH * 2).div_ceil(operations);
    for _ in 0..products {
        let a = Left { units: black_box(&*a), row_stride: EXTENTS.steps, step_stride: 1 };
        let b = Right { units: &b, stride: EXTENTS.columns };
        product::<S, U, false>(simd, EXTENTS, a, b, black_box(&mut c), EXTENTS.columns);
    }
    (products * operations) as f64
}

/// Reads a slice once; returns its bytes.
struct Read<'a>(&'a [f32]);

impl SimdOp for Read<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f64 {
        let mut sums = [simd.splat(0.0); 4];
        // Hardware prefetchers stop at the end of a page: asking ahead is what reads fastest.
        for line in self.0.chunks_exact(LINE_BYTES / 4) {
            simd.prefetch_for_reading(line.as_ptr().cast::<u8>().wrapping_add(AHEAD_BYTES));
            for (sum, x) in sums.iter_mut().zip(line.chunks_exact(S::LANES)) {
                *sum = simd.add(*sum, simd.read(x));
            }
        }
        for sum in sums {
            black_box(simd.sum(sum));
        }
        4.0 * self.0.len() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_has_ceilings() {
        for isa in Isa::available() {
            let cpu = Cpu::with_isa(Some(1), isa).unwrap();
            assert!(fma_flops(&cpu) > 0.0, "{}", isa.name());
            let has_unit = ["amx", "avx512-bf16"].contains(&isa.name());
            assert_eq!(bf16_dot_flops(&cpu).is_some(), has_unit);
            assert_eq!(bf16_gain(isa).is_some(), has_unit);
        }
        assert!(read_bytes(&Cpu::new(Some(1)).unwrap()) > 0.0);
    }
}
