//! Products of whole numbers: `y = x wᵀ + b` where rows of `x` and of `w` are codes of at most eight bits.
//!
//! Each 32 neighbours share a scale: a weight is `scale * code + least` with a code of no sign, an activation `scale * code` with one.
//! Of such a group `Σ w x = scale_w scale_x Σ code_w code_x + least_w scale_x Σ code_x`: the first sum is exact in 32 bits, and the second
//! belongs to `x` alone. A processor multiplies and adds 64 pairs of codes in one instruction (AVX512-VNNI) or 32 in two (AVX2), so that
//! products read weights of few bits as fast as the memory gives them, and unpacking is shared by all rows of `x`.
//!
//! Columns go through in a [`Quad`]: four groups, a lane of 128 bits for each, the first halves of the groups in one vector and the
//! second in another. Sums of a group then stay in its lane, and one multiplication scales all four. What lies behind the width
//! has scales of zero. Each instruction set has `lanes`, and layouts (`unpack`) and the product (`tile`) are written once over them.
//! The portable path multiplies what codes stand for in f32.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod lanes;
#[cfg(target_arch = "x86_64")]
mod tile;
#[cfg(target_arch = "x86_64")]
mod unpack;
#[cfg(target_arch = "x86_64")]
mod vnni;

use super::Isa;
use super::linear::{Columns, Stripes};
use half::f16;

/// Columns that share a scale, and that go through together.
pub const GROUP: usize = 32;
/// See [`Quad`].
pub const QUAD: usize = 4 * GROUP;
/// Rows of `x` up to which whole numbers are multiplied; more are faster in panels, which unpack weights once for all.
pub const MOST_ROWS: usize = 32;

/// How codes of a row lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codes {
    /// Signed bytes, and an f32 scale in front of the row.
    Row,
    /// Blocks of signed bytes, and an f16 scale in front of each.
    Bytes,
    /// Blocks of four bits, in front of them an f16 scale, perhaps an f16 minimum, and perhaps 32 fifth bits. Without a minimum the
    /// middle code stands for zero.
    Nibbles {
        /// Whether there is a minimum.
        minimum: bool,
        /// Whether there are fifth bits.
        fifth: bool,
    },
    /// Blocks of four bits that choose one of these whole numbers, and an f16 scale in front of each.
    Levels(&'static [i8; 16]),
    /// llama.cpp's super-blocks `q4_k`, and with fifth bits `q5_k`.
    SixBits {
        /// Whether there are fifth bits.
        fifth: bool,
    },
    /// llama.cpp's super-blocks `q6_k`.
    Q6K,
}

impl Codes {
    /// Whether activations can lie so.
    pub fn are_signed_bytes(self) -> bool {
        matches!(self, Codes::Row | Codes::Bytes)
    }
}

/// [`QUAD`] columns of a row of `x`.
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub struct Quad {
    /// Codes of the first halves of four groups, and of the second.
    codes: [[[i8; GROUP / 2]; 4]; 2],
    /// Each group's scale, four times.
    scales: [[f32; 4]; 4],
    /// Each group's scale times the sum of codes: of the first half and of the second; zero and zero.
    sums: [[f32; 4]; 4],
}

impl Quad {
    /// How many hold a row.
    pub fn count(width: usize) -> usize {
        width.div_ceil(QUAD)
    }

    /// Writes a row that is kept as signed bytes.
    ///
    /// # Panics
    /// When codes lie in another way ([`Codes::are_signed_bytes`]), or there are fewer quads than a row takes.
    pub fn fill(codes: Codes, row: &[u8], to: &mut [Quad]) {
        let head = if codes == Codes::Row { 4 } else { 0 };
        let block_bytes = GROUP + if codes == Codes::Row { 0 } else { 2 };
        assert!(codes.are_signed_bytes(), "rows of x are signed bytes");
        for (index, block) in row[head..].chunks_exact(block_bytes).enumerate() {
            let scale = match codes {
                Codes::Row => f32::from_ne_bytes([row[0], row[1], row[2], row[3]]),
                _ => f16::from_le_bytes([block[0], block[1]]).to_f32(),
            };
            let (quad, lane) = (&mut to[index / 4], index % 4);
            quad.scales[lane] = [scale; 4];
            for (half, bytes) in block[block_bytes - GROUP..].chunks_exact(GROUP / 2).enumerate() {
                let codes = &mut quad.codes[half][lane];
                codes.copy_from_slice(bytemuck::cast_slice(bytes));
                quad.sums[lane][half] = scale * codes.iter().map(|&code| i32::from(code)).sum::<i32>() as f32;
            }
        }
    }
}

/// Some columns of `y` from whole numbers; rows of `x` are [`Quad::count`] quads.
pub struct Integers<'a> {
    /// What is multiplied.
    pub columns: Columns<'a, Quad>,
    /// How codes of `w` lie.
    pub codes: Codes,
    /// All of `y`.
    pub y: &'a Stripes<'a>,
}

impl Integers<'_> {
    /// Whether a path multiplies whole numbers.
    pub fn are_on(isa: Isa) -> bool {
        isa != Isa::PORTABLE
    }

    /// Computes them.
    ///
    /// # Panics
    /// When the path has no such products, or rows are too short.
    pub fn run(self, isa: Isa) {
        assert!(Self::are_on(isa), "products of whole numbers need AVX2");
        #[cfg(target_arch = "x86_64")]
        if isa.has_avx512() && is_x86_feature_detected!("avx512vnni") {
            // SAFETY: the processor has the instructions, of which AVX-512 is what the path has.
            unsafe {
                vnni::with(
                    #[inline(always)]
                    |lanes| self.with(lanes),
                );
            }
        } else {
            // SAFETY: every path but the portable one has AVX2.
            unsafe {
                super::avx2::with(
                    #[inline(always)]
                    |lanes| self.with(lanes),
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{FORMATS, RowFormat};
    use crate::tensor::RowCode;

    /// Numbers of either sign, most of them small.
    fn numbers(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next() * next() * next()).collect()
    }

    /// Rows as they are kept, and what the bytes stand for.
    fn kept(format: RowFormat, rows: &[f32], width: usize) -> (Vec<u8>, Vec<f32>) {
        let row_bytes = format.row_bytes(width);
        let mut bytes = vec![0; rows.len() / width * row_bytes];
        format.encode(rows, width, &mut bytes);
        let mut back = vec![0.0; rows.len()];
        bytes.chunks(row_bytes).zip(back.chunks_mut(width)).for_each(|(row, back)| format.decode(row, 0, back));
        (bytes, back)
    }

    #[test]
    fn products_are_those_of_what_the_codes_stand_for() {
        let with_codes = FORMATS.iter().map(|entry| entry.name.parse::<RowFormat>().unwrap());
        let weights: Vec<_> = with_codes.filter(|format| format.codes().is_some()).collect();
        assert_eq!(weights.len(), 10);
        for isa in Isa::available().filter(|&isa| Integers::are_on(isa)) {
            for (case, weight) in weights.iter().enumerate() {
                // Numbers of one size have the largest codes: their sums must not overflow.
                let widths = [("q8_0", 32), ("int8", 96), ("q8_0", 576), ("int8", 256), ("q8_0", 1536)];
                for (activations, width, one_size) in
                    widths.into_iter().flat_map(|(a, width)| [(a, width, false), (a, width, true)])
                {
                    let numbers = |count, seed| {
                        let numbers = numbers(count, seed).into_iter();
                        numbers.map(|x| if one_size { x.signum() } else { x }).collect::<Vec<_>>()
                    };
                    if weight.check("width", width).is_err() {
                        continue;
                    }
                    for (rows, count) in [(1, 1), (2, 7), (3, 4), (5, 9), (8, 3), (15, 6)] {
                        let activations: RowFormat = activations.parse().unwrap();
                        let (bytes, x) = kept(activations, &numbers(rows * width, 7 + case as u64), width);
                        // What lies behind the last group is left as it was.
                        let stride = Quad::count(width);
                        let mut quads = vec![bytemuck::Zeroable::zeroed(); rows * stride];
                        let each = bytes.chunks(activations.row_bytes(width)).zip(quads.chunks_mut(stride));
                        each.for_each(|(row, quads)| Quad::fill(activations.codes().unwrap(), row, quads));

                        let (bytes, w) = kept(*weight, &numbers(count * width, 99 + case as u64), width);
                        let bias = numbers(count, 5);
                        let mut y = vec![f32::NAN; rows * (count + 2)];
                        let columns = Columns {
                            x: &quads,
                            stride,
                            rows,
                            w: weight.rows(&bytes, [count, width]),
                            bias: Some(&bias),
                            first: 1,
                        };
                        let stripes = Stripes::new(&mut y, count + 2, rows, count + 2);
                        Integers { columns, codes: weight.codes().unwrap(), y: &stripes }.run(isa);
                        for row in 0..rows {
                            for column in 0..count {
                                let pairs = x[row * width..][..width].iter().zip(&w[column * width..]);
                                let products = pairs.map(|(x, w)| f64::from(*x) * f64::from(*w));
                                let (sum, size) = products.fold((0.0, 0.0), |(sum, size), product: f64| {
                                    (sum + product, size + product.abs())
                                });
                                let (got, exact) = (y[row * (count + 2) + 1 + column], sum + f64::from(bias[column]));
                                let off = (f64::from(got) - exact).abs();
                                assert!(
                                    off <= 1e-5 * size + 1e-7,
                                    "{weight} {activations} {width}: {got}, not {exact}"
                                );
                            }
                        }
                        assert!(y.iter().step_by(count + 2).all(|y| y.is_nan()), "a column of others was written");
                    }
                }
            }
        }
    }
}
