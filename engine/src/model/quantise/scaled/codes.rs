//! Codes of rows under their scales, and what these stand for.

use super::Scaled;
use crate::format::{Int8, NF4_LEVELS, Nf4, RowFormat};
use crate::tensor::RowCode;
use std::ops::Range;

/// Largest number of `E4M3`.
const MOST: f32 = 448.0;

impl Scaled {
    /// Bytes of `elements` codes.
    pub(super) fn code_bytes(self, elements: usize) -> usize {
        if let Scaled::Nf4 { .. } = self { elements / 2 } else { elements }
    }

    /// Where the scale of an element of a matrix stands.
    fn scale_at(self, row: usize, column: usize, width: usize) -> usize {
        match self {
            Scaled::Nf4 { block, .. } => (row * width + column) / block,
            Scaled::Fp8 { block: Some(block) } => row / block * width.div_ceil(block) + column / block,
            Scaled::Fp8 { block: None } | Scaled::W8a8 { .. } => row,
        }
    }

    /// Codes of some rows, a multiple of [`BLOCK_ROWS`] but for the last, and their scales.
    pub(super) fn encode(self, values: &[f32], width: usize, codes: &mut [u8], scales: &mut Vec<f32>) {
        match self {
            Scaled::Nf4 { block, .. } => nf4(values, block, codes, scales),
            Scaled::Fp8 { block: None } => fp8(values, width, [1, width], codes, scales),
            Scaled::Fp8 { block: Some(block) } => fp8(values, width, [block; 2], codes, scales),
            Scaled::W8a8 { .. } => bytes_of(values, width, codes, scales),
        }
    }

    /// What the codes of rows from `first` on stand for.
    pub(super) fn decode(self, codes: &[u8], first: usize, width: usize, scales: &[f32], to: &mut [f32]) {
        match self {
            Scaled::Nf4 { .. } => {
                for (byte, to) in codes.iter().zip(to.chunks_exact_mut(2)) {
                    to.copy_from_slice(&[byte >> 4, byte & 15].map(|code| NF4_LEVELS[usize::from(code)]));
                }
            }
            Scaled::Fp8 { .. } => e4m3().decode(codes, 0, to),
            Scaled::W8a8 { .. } => to.iter_mut().zip(codes).for_each(|(to, code)| *to = f32::from(code.cast_signed())),
        }
        for (row, to) in (first..).zip(to.chunks_exact_mut(width)) {
            to.iter_mut().enumerate().for_each(|(column, to)| *to *= scales[self.scale_at(row, column, width)]);
        }
    }
}

fn e4m3() -> RowFormat {
    "fp8-e4m3".parse().expect("a format of rows")
}

fn largest<'a>(values: impl IntoIterator<Item = &'a f32>) -> f32 {
    values.into_iter().fold(0.0, |most, x| most.max(x.abs()))
}

/// Codes of blocks behind each other, two to a byte, the first in the high bits; and their scales.
fn nf4(values: &[f32], block: usize, codes: &mut [u8], scales: &mut Vec<f32>) {
    for (values, codes) in values.chunks(block).zip(codes.chunks_mut(block / 2)) {
        let scale = largest(values);
        let code = |x: f32| Nf4::nearest(if scale == 0.0 { 0.0 } else { x / scale });
        for (pair, byte) in values.chunks(2).zip(codes) {
            *byte = code(pair[0]) << 4 | code(pair[1]);
        }
        scales.push(scale);
    }
}

/// Codes of blocks of rows and columns, those at the ends perhaps cut off; and the scale of each.
fn fp8(values: &[f32], width: usize, [of_rows, of_columns]: [usize; 2], codes: &mut [u8], scales: &mut Vec<f32>) {
    let format = e4m3();
    let mut row = vec![0.0; width];
    for (values, codes) in values.chunks(of_rows * width).zip(codes.chunks_mut(of_rows * width)) {
        let columns = (0..width).step_by(of_columns).map(|from| from..width.min(from + of_columns));
        let of = |range: Range<usize>| largest(values.chunks(width).flat_map(|row| &row[range.clone()])) / MOST;
        let first = scales.len();
        scales.extend(columns.map(|range| of(range).max(f32::EPSILON)));
        for (values, codes) in values.chunks(width).zip(codes.chunks_mut(width)) {
            let scale = |column: usize| scales[first + column / of_columns];
            row.iter_mut().zip(values).enumerate().for_each(|(column, (row, x))| *row = x / scale(column));
            format.encode(&row, width, codes);
        }
    }
}

/// Bytes of rows, and the scale of each.
fn bytes_of(values: &[f32], width: usize, codes: &mut [u8], scales: &mut Vec<f32>) {
    let format = RowFormat::Int8(Int8);
    let mut row = vec![0; format.row_bytes(width)];
    for (values, codes) in values.chunks(width).zip(codes.chunks_mut(width)) {
        format.encode(values, width, &mut row);
        let (scale, bytes) = row.split_at(size_of::<f32>());
        scales.push(bytemuck::pod_read_unaligned(scale));
        codes.copy_from_slice(&bytes[..width]);
    }
}

#[cfg(test)]
mod tests {
    use super::super::BLOCK_ROWS;
    use super::*;

    /// How far what is kept is off at most, and how many scales there are.
    #[test]
    fn codes_under_their_scales_are_near_what_they_were_made_of() {
        const WIDTH: usize = 160;
        let rows = BLOCK_ROWS + 8;
        // Rows and columns of different sizes, so that a scale of another block is seen.
        let size = |row: usize, column: usize| (1 + row / 64) as f32 * if column < 128 { 1.0 } else { 0.1 };
        let value = |at: usize| ((at * 37 % 101) as f32 - 50.0) / 50.0 * size(at / WIDTH, at % WIDTH);
        let values: Vec<f32> = (0..rows * WIDTH).map(value).collect();
        let wide = WIDTH / 32;
        for (text, scale_count, bound) in [
            ("nf4:block=32", rows * wide, 0.16),
            ("fp8", rows, 1.0 / 16.0),
            ("fp8:block=128", 2 * 2, 1.0 / 16.0),
            ("fp8:block=32", rows.div_ceil(32) * wide, 1.0 / 16.0),
            ("w8a8", rows, 1.001 / 254.0),
        ] {
            let scaled: Scaled = text.parse().unwrap();
            let mut codes = vec![0; scaled.code_bytes(values.len())];
            let (mut scales, mut back) = (Vec::new(), vec![0.0; values.len()]);
            let chunk = BLOCK_ROWS * WIDTH;
            for (values, codes) in values.chunks(chunk).zip(codes.chunks_mut(scaled.code_bytes(chunk))) {
                scaled.encode(values, WIDTH, codes, &mut scales);
            }
            // Row by row, which is not how they were made.
            let (each, codes) = (scaled.code_bytes(WIDTH), &codes);
            for (row, back) in back.chunks_mut(WIDTH).enumerate() {
                scaled.decode(&codes[row * each..][..each], row, WIDTH, &scales, back);
            }
            assert_eq!(scales.len(), scale_count, "{text}");
            for (at, (x, y)) in values.iter().zip(&back).enumerate() {
                let row = at / WIDTH;
                assert!((x - y).abs() <= bound * size(row, 0), "{text}: {x} became {y} in row {row}");
            }
            // A block of columns that are small is as fine as they are.
            if scale_count != rows {
                let [off, all] = values
                    .iter()
                    .zip(&back)
                    .enumerate()
                    .filter(|(at, _)| at % WIDTH >= 128)
                    .fold([0.0; 2], |[off, all], (_, (x, y))| [off + (x - y).powi(2), all + x.powi(2)]);
                assert!((off / all).sqrt() < 0.15, "{text}: {}", (off / all).sqrt());
            }
        }
    }
}
