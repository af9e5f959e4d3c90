//! Cached rows of four-bit codes by vectors of 16: 128 columns at a time, which are one vector of codes.
//!
//! [`rows`](super::rows) widens such rows block by block, in the order of their elements; a code then costs as much as the
//! product that it is for. Here a permutation brings the codes of 128 columns into one vector, whose lanes hold eight each. A
//! shift and a lookup give one of each lane, and scales wait for the sum of a row (a lane belongs to one block), or go with the
//! weight of the row. Columns therefore come in another order, that of lanes: queries are brought into it first
//! ([`Nibbles::arrange`]), and sums of values are brought back at the end ([`Nibbles::restore`]). Where the path has fast dot products of
//! bf16, keys are looked up as pairs of them for queries that bf16 holds ([`pairs`](super::pairs)).

#[cfg(target_arch = "x86_64")]
mod avx512;

#[cfg(target_arch = "x86_64")]
use super::pairs::are_bf16;
use super::row_list::{BLOCK, RowList};
use super::{Isa, Levels};
use std::ops::Range;

/// Columns that go through together.
const COLUMNS: usize = 128;

/// Rows that are blocks of four-bit codes with an f16 scale each, and nothing else.
#[derive(Debug, Clone, Copy)]
pub struct FourBits {
    /// Elements of a block.
    pub elements: usize,
    /// Whether its scale stands in front of the codes.
    pub scale_first: bool,
    /// What codes stand for, of a scale of 1.
    pub levels: &'static Levels,
}

/// What multiplies such rows of a width.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "made only for AVX-512"))]
pub struct Nibbles {
    width: usize,
    /// Where words of 128 columns come from.
    at: &'static Layout,
    levels: &'static Levels,
}

/// Which words of a row's 128 columns, its first 32 and its last 32, become codes and which scales.
#[derive(Debug)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "read only by AVX-512"))]
struct Layout {
    codes: [u16; 32],
    scales: [u16; 32],
    /// Bytes of 128 columns.
    bytes: usize,
}

/// Blocks of 32, 64 and 128 elements, with the scale behind the codes and in front of them.
static LAYOUTS: [[Layout; 2]; 3] = [layouts(32), layouts(64), layouts(128)];

const fn layouts(elements: usize) -> [Layout; 2] {
    [layout(elements, false), layout(elements, true)]
}

const fn layout(elements: usize, scale_first: bool) -> Layout {
    let (codes, words) = (elements / 4, COLUMNS / elements * (elements / 4 + 1));
    let (mut layout, mut to) = (Layout { codes: [0; 32], scales: [0; 32], bytes: 2 * words }, 0);
    while to < 32 {
        let code = to / codes * (codes + 1) + to % codes + scale_first as usize;
        layout.codes[to] = from_ends(code, words);
        if to < 16 {
            let scale = 2 * to / codes * (codes + 1) + if scale_first { 0 } else { codes };
            layout.scales[to] = from_ends(scale, words);
        }
        to += 1;
    }
    layout
}

/// A word's place in a vector of the first 32 words and one of the last 32.
const fn from_ends(word: usize, words: usize) -> u16 {
    (if word < 32 { word } else { 64 + word - words }) as u16
}

/// The column of a place in the order of lanes: lane `l` of vector `k` is the `k`-th of the eight codes of four neighbouring bytes.
const fn column(place: usize) -> usize {
    let (vector, lane) = (place / 16, place % 16);
    lane / 4 * 32 + lane % 4 * 4 + vector / 2 + vector % 2 * 16
}

impl Nibbles {
    /// Most query rows for which sums of values are taken so: more do not fit into registers. In f32, products of more with keys are not
    /// faster either.
    pub const MOST_SUMS: usize = 2;

    /// For rows of a width; none where blocks, the width or the path are others than this is for.
    pub fn new(isa: Isa, width: usize, FourBits { elements, scale_first, levels }: FourBits) -> Option<Self> {
        let size = [32, 64, 128].into_iter().position(|size| size == elements)?;
        let is_for = isa.has_avx512() && width.is_multiple_of(COLUMNS) && width <= super::pairs::MOST_COLUMNS;
        is_for.then(|| Nibbles { width, at: &LAYOUTS[size][usize::from(scale_first)], levels })
    }

    /// Whether keys are multiplied in pairs of bf16 with queries that bf16 holds ([`super::pairs::are_bf16`]).
    pub fn has_pairs(self, isa: Isa) -> bool {
        isa.has_fast_pairs() && self.levels.whole.is_some()
    }

    /// Puts the columns of a row, whole 128s, in the order of lanes.
    pub fn arrange(row: &mut [f32]) {
        for row in row.as_chunks_mut::<COLUMNS>().0 {
            *row = std::array::from_fn(|place| row[column(place)]);
        }
    }

    /// Undoes [`Nibbles::arrange`].
    pub fn restore(row: &mut [f32]) {
        for row in row.as_chunks_mut::<COLUMNS>().0 {
            let arranged = *row;
            (0..COLUMNS).for_each(|place| row[column(place)] = arranged[place]);
        }
    }

    /// As [`Dots`](super::rows::Dots), of arranged queries.
    ///
    /// # Panics
    /// When rows are of another width, or a slice is too short.
    pub fn dots(
        self,
        isa: Isa,
        rows: &RowList<'_>,
        range: Range<usize>,
        (queries, stride): (&[f32], usize),
        scores: &mut [f32],
    ) {
        assert!(rows.width() == self.width && self.width <= stride, "rows of {} columns", rows.width());
        assert!(scores.len() >= queries.len() / stride * BLOCK, "scores are too short");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a `Nibbles` is made only for paths with AVX-512, and pairs are fast only where they are.
        unsafe {
            self.dots_with_keys((rows, range), (queries, stride), scores, self.has_pairs(isa) && are_bf16(queries));
        }
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("made only for AVX-512, which {} is not, for rows {range:?}", isa.name());
    }

    /// As [`Accumulate`](super::rows::Accumulate), onto arranged outputs, at most [`Nibbles::MOST_SUMS`].
    ///
    /// # Panics
    /// When rows are of another width, a slice is too short, or there are more outputs.
    pub fn accumulate(self, rows: &RowList<'_>, weights: &[f32], (outputs, stride): (&mut [f32], usize)) {
        let count = outputs.len() / stride;
        assert!((1..=Self::MOST_SUMS).contains(&count), "{count} outputs, of at most {}", Self::MOST_SUMS);
        assert!(rows.width() == self.width && self.width <= stride, "rows of {} columns", rows.width());
        assert!(weights.len() >= count * BLOCK, "weights are too short");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a `Nibbles` is made only for paths with AVX-512; outputs and weights are as long as is asserted.
        unsafe {
            self.sums(rows, weights.as_ptr(), (outputs.as_mut_ptr(), stride), count);
        }
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("made only for AVX-512");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::simd::rows::{self, Addresses};
    use crate::format::{RowFormat, with_codec};
    use crate::tensor::{Coded, Rows};

    /// Products and sums as [`rows`] has them, of rows that lie in runs of `run`.
    fn check(isa: Isa, format: RowFormat, (count, width, queries, run): (usize, usize, usize, usize), step: f32) {
        let wide: Vec<f32> = (0..count * width).map(|x| (x * 31 % 251) as f32 * 0.25 - 30.0).collect();
        let row_bytes = format.row_bytes(width);
        let mut bytes = vec![0; count * row_bytes];
        format.encode(&wide, width, &mut bytes);
        let coded = Rows::Coded(Coded::new(&format, &bytes, row_bytes, width));
        let source = |row: usize| coded.skip(row).first(run - row % run);
        let mut addresses = Addresses::default();
        let list = RowList::collect(&mut addresses, [width, row_bytes], &source, 0..count, &source, 0..count, &mut []);
        let nibbles = format.nibbles(isa, width).unwrap();
        let arranged = |rows: &[f32]| {
            let mut rows = rows.to_vec();
            rows.chunks_exact_mut(width).for_each(Nibbles::arrange);
            rows
        };

        let x: Vec<f32> = (0..queries * width).map(|at| (at * 7 % 23) as f32 * step - 5.0).collect();
        let range = (count / 3).min(2)..count;
        let (mut scores, mut expected) = (vec![0.0; queries * BLOCK], vec![0.0; queries * BLOCK]);
        nibbles.dots(isa, &list, range.clone(), (&arranged(&x), width), &mut scores);
        format.dots(isa, &list, range, (&x, width), &mut expected);
        for (at, (got, expected)) in scores.iter().zip(&expected).enumerate() {
            assert!(
                (got - expected).abs() < 2e-2,
                "{format}, {count} x {width}, {queries}, at {at}: {got}, not {expected}"
            );
        }
        if queries <= Nibbles::MOST_SUMS {
            let mut weights: Vec<f32> = (0..queries * BLOCK).map(|at| (at % 7) as f32 - 2.5).collect();
            let start: Vec<f32> = (0..queries * width).map(|at| at as f32).collect();
            let (mut sums, mut expected) = (arranged(&start), start);
            nibbles.accumulate(&list, &weights, (&mut sums, width));
            sums.chunks_exact_mut(width).for_each(Nibbles::restore);
            with_codec!(format, reader => isa.run(rows::Accumulate {
                reader, rows: &list, weights: &mut weights, outputs: &mut expected, stride: width,
            }));
            for (at, (got, expected)) in sums.iter().zip(&expected).enumerate() {
                assert!((got - expected).abs() < 2e-2, "{format}, {count} x {width}, sum {at}: {got}, not {expected}");
            }
        }
    }

    #[test]
    fn products_and_sums_are_those_of_rows_read_by_blocks() {
        const FORMATS: &[&str] = &[
            "q4_0",
            "int4",
            "int4:group=64",
            "int4:group=128",
            "nf4",
            "nf4:group=32",
            "nf4:group=128",
            "iq4_nl",
            "int4:hadamard=true",
        ];
        // Rows, columns, queries and how many rows lie one behind another.
        const EXTENTS: &[(usize, usize, usize, usize)] = &[
            (1, 128, 1, 9),
            (7, 256, 2, 3),
            (40, 128, 4, 16),
            (256, 128, 3, 999),
            (9, 256, 5, 4),
            (40, 256, 2, 16),
            (33, 128, 1, 5),
        ];
        for isa in Isa::available().filter(|isa| isa.has_avx512()) {
            for format in FORMATS.iter().map(|text| text.parse::<RowFormat>().unwrap()) {
                for &extents in EXTENTS {
                    // A step that bf16 holds, and one that it does not.
                    for step in [0.5, 0.3] {
                        check(isa, format, extents, step);
                    }
                }
                let has_pairs = isa.name() == "avx512-bf16" && !format.to_string().starts_with("nf4");
                assert_eq!(format.nibbles(isa, 128).unwrap().has_pairs(isa), has_pairs, "{format} on {}", isa.name());
            }
            for (format, width) in
                [("q4_0", 64), ("q4_0", 160), ("int4:zero=true", 128), ("int4:group=256", 256), ("int8", 128)]
            {
                assert!(format.parse::<RowFormat>().unwrap().nibbles(isa, width).is_none(), "{format} of {width}");
            }
        }
    }
}
