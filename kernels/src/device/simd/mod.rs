//! Vector code: one dispatch point, one trait of vectors, and an implementation of it for each instruction set.
//!
//! A kernel's inner part is a [`SimdOp`]: code written once over the trait [`Simd`]. [`Isa::run`] compiles it for each
//! path (AVX-512, AVX2 + FMA, portable) and picks at run time; a [`SimdBf16Op`] also for AVX-512 with dot products of
//! bf16, which with AMX leaves whole products to a matrix unit. Everything that an op calls must be `#[inline(always)]`:
//! an ordinary function would be compiled for the target's baseline, where every intrinsic is a call. On top of the
//! trait stand `math` (exponentials), `product` (the one register-blocked matrix product that all tiled kernels share),
//! `pack` (rows of any element type into the layout that it reads), `rows` (inner products with rows, and sums of rows,
//! that are read once where they lie), `pairs` and `nibbles` (the same of bf16 and of four-bit codes, where AVX-512 has a
//! faster way), `widen` (copies of coded rows), `linear` (products with the rows of a weight matrix) and `loops`, which the
//! compiler vectorises by itself; beside it `integers`, products of whole numbers. A result depends on the path only through
//! the order in which it is summed, and for bf16 on whether products are taken in bf16 pairs.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod dense;
pub mod integers;
pub mod linear;
pub mod loops;
pub mod math;
pub mod nibbles;
pub mod pack;
pub mod pairs;
pub mod panel;
mod portable;
#[cfg(target_arch = "x86_64")]
mod prefetch;
pub mod product;
mod quads;
pub mod reader;
mod row_list;
pub mod rows;
mod vector;
pub mod widen;

use super::probe;
use std::sync::LazyLock;

pub(crate) use vector::narrow;
pub use vector::{Element, Levels, Native, RAISED, Simd, Unit};

/// Code to be compiled for each instruction path.
pub trait SimdOp {
    /// What it computes.
    type Output;

    /// The code; mark it and all that it calls `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// An op that multiplies bf16 in the unit that the processor has for it ([`Native::Bf16`]), so that there is one more
/// path to compile it for.
pub trait SimdBf16Op {
    /// What it computes.
    type Output;

    /// As [`SimdOp::run`].
    fn run<S: Native>(self, simd: S) -> Self::Output;
}

/// An instruction path that this machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Isa(Path);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Path {
    Amx,
    Avx512Bf16,
    Avx512,
    Avx2,
    Portable,
}

/// How many products of bf16 the unit for them must take in the time of one multiply-add to be used. Processors lie near
/// 1/2, 1 and 2; at 1 the products in f32 are as fast and more exact.
const LEAST_GAIN: f64 = 1.4;

/// `KVSIEVE_ISA` names no path of this machine.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("KVSIEVE_ISA is '{asked}'; this machine has {available}")]
pub struct IsaError {
    asked: String,
    available: String,
}

impl Isa {
    /// The path without any extension, which every machine has.
    pub const PORTABLE: Isa = Isa(Path::Portable);

    /// The paths of this machine, those with more instructions first.
    pub fn available() -> impl Iterator<Item = Isa> {
        #[cfg(target_arch = "x86_64")]
        prefetch::prepare();
        let paths = [Path::Amx, Path::Avx512Bf16, Path::Avx512, Path::Avx2, Path::Portable];
        paths.into_iter().filter(|path| path.is_here()).map(Isa)
    }

    /// The fastest path of this machine. Dot products of bf16 are not fast on every processor that has them (on Intel's
    /// Emerald Rapids they have half the rate of multiply-adds in f32, on AMD's Zen 5 twice that rate): they are used
    /// where they were measured to be worth it, once in a process, in about a millisecond.
    pub fn fastest() -> Isa {
        static FASTEST: LazyLock<Isa> = LazyLock::new(|| {
            let mut worth_it =
                Isa::available().filter(|&isa| probe::bf16_gain(isa).is_none_or(|gain| gain > LEAST_GAIN));
            worth_it.next().unwrap_or(Isa::PORTABLE)
        });
        *FASTEST
    }

    /// The path that the environment variable `KVSIEVE_ISA` names, else the fastest.
    ///
    /// # Errors
    /// When the variable names no path of this machine.
    pub fn chosen() -> Result<Isa, IsaError> {
        let asked = std::env::var("KVSIEVE_ISA").unwrap_or_default();
        if asked.is_empty() {
            return Ok(Isa::fastest());
        }
        Isa::available().find(|isa| isa.name() == asked).ok_or_else(|| IsaError {
            asked,
            available: Isa::available().map(Isa::name).collect::<Vec<_>>().join(", "),
        })
    }

    /// [`Isa::chosen`] of what reads the variable once; the fastest where it is wrong, which whoever opens the processors says.
    pub(crate) fn current() -> Isa {
        static CURRENT: LazyLock<Isa> = LazyLock::new(|| Isa::chosen().unwrap_or_else(|_| Isa::fastest()));
        *CURRENT
    }

    /// Whether it has vectors of 16.
    fn has_avx512(self) -> bool {
        matches!(self.0, Path::Amx | Path::Avx512Bf16 | Path::Avx512)
    }

    /// Whether it has dot products of bf16 pairs that are worth more than products in f32, outside a matrix unit.
    fn has_fast_pairs(self) -> bool {
        self.0 == Path::Avx512Bf16
    }

    /// Its name in records, and for `KVSIEVE_ISA`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Path::Amx => "amx",
            Path::Avx512Bf16 => "avx512-bf16",
            Path::Avx512 => "avx512",
            Path::Avx2 => "avx2",
            Path::Portable => "portable",
        }
    }

    /// Runs an op with the instructions of this path.
    #[inline]
    pub fn run<T: SimdOp>(self, op: T) -> T::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Path::Amx | Path::Avx512Bf16 | Path::Avx512 => {
                // SAFETY: an `Isa` is made only of a path that `is_here`.
                unsafe {
                    avx512::with(
                        #[inline(always)]
                        |simd| op.run(simd),
                    )
                }
            }
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => {
                // SAFETY: as above.
                unsafe {
                    avx2::with(
                        #[inline(always)]
                        |simd| op.run(simd),
                    )
                }
            }
            _ => op.run(portable::Portable),
        }
    }

    /// Runs an op with the instructions of this path and its unit for bf16.
    #[inline]
    pub fn run_bf16<T: SimdBf16Op>(self, op: T) -> T::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Path::Amx | Path::Avx512Bf16 => {
                // SAFETY: as in `run`.
                unsafe {
                    avx512::with_bf16(
                        self.0 == Path::Amx,
                        #[inline(always)]
                        |simd| op.run(simd),
                    )
                }
            }
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 => {
                // SAFETY: as in `run`.
                unsafe {
                    avx512::with(
                        #[inline(always)]
                        |simd| op.run(simd),
                    )
                }
            }
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => {
                // SAFETY: as in `run`.
                unsafe {
                    avx2::with(
                        #[inline(always)]
                        |simd| op.run(simd),
                    )
                }
            }
            _ => op.run(portable::Portable),
        }
    }
}

impl Path {
    #[cfg(target_arch = "x86_64")]
    fn is_here(self) -> bool {
        match self {
            Path::Amx => Path::Avx512Bf16.is_here() && amx::is_here(),
            Path::Avx512Bf16 => Path::Avx512.is_here() && is_x86_feature_detected!("avx512bf16"),
            Path::Avx512 => {
                Path::Avx2.is_here()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            Path::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            Path::Portable => true,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_here(self) -> bool {
        self == Path::Portable
    }
}

/// What the processor says of itself on a leaf that it has.
#[cfg(target_arch = "x86_64")]
fn cpuid(leaf: u32) -> std::arch::x86_64::CpuidResult {
    // SAFETY: every x86-64 processor has the instruction. Rust 1.90 still wants the block.
    #[allow(unused_unsafe)]
    unsafe {
        std::arch::x86_64::__cpuid_count(leaf, 0)
    }
}
