//! Rows in blocks: some neighbouring elements share a scale, which stands in front of their codes.
//!
//! Most formats of few bits are of this kind. Such a format is a [`Blocks`]: how a block is written, and how a vector of it
//! is read in registers, scale and all, because a scale that varies along the row cannot wait for the sum. Blocks are whole
//! vectors of every instruction path, and a row is whole blocks and nothing else, as in a GGUF file, whose rows are read where
//! they lie: 34 bytes for 32 elements of q8_0 are 102 for a head of 96.

use super::{RowCodec, rotate};
use crate::device::simd::integers::Codes;
use crate::device::simd::nibbles::FourBits;
use crate::device::simd::reader::RowReader;
use crate::device::simd::{Levels, RAISED, Simd};
use crate::named::{Named, NamedError, Parameter};
use half::f16;
use std::fmt;

/// Fewest elements of a block; all sizes are powers of two.
pub const LEAST: usize = 32;
/// Most elements of a block.
pub const MOST: usize = 256;

/// A format of blocks.
pub trait Blocks: Copy + Send + Sync {
    /// As [`RowCodec::NAME`].
    const NAME: &'static str;
    /// As [`RowCodec::ABOUT`].
    const ABOUT: &'static str;
    /// As [`RowCodec::PARAMETERS`].
    const PARAMETERS: &'static [Parameter] = &[];

    /// As [`RowReader::AFFINE`].
    const AFFINE: bool = false;
    /// As [`RowReader::OF_WEIGHTS`].
    const OF_WEIGHTS: bool = false;

    /// As [`RowCodec::build`].
    fn build(named: &Named) -> Result<Self, NamedError>;

    /// As [`RowCodec::spell`].
    fn spell(self, to: &mut dyn fmt::Write) -> fmt::Result {
        to.write_str(Self::NAME)
    }

    /// Elements of a block: a power of two from [`LEAST`] to [`MOST`].
    #[inline(always)]
    fn elements(self) -> usize {
        LEAST
    }

    /// As [`RowCodec::rotated`].
    fn rotated(self) -> bool {
        false
    }

    /// As [`RowCodec::group_tokens`].
    fn group_tokens(self) -> Option<usize> {
        None
    }

    /// As [`RowCodec::steps`].
    fn steps(self) -> f32 {
        0.0
    }

    /// As [`RowCodec::codes`].
    fn codes(self) -> Option<Codes> {
        None
    }

    /// As [`RowCodec::four_bits`].
    fn four_bits(self) -> Option<FourBits> {
        None
    }

    /// Bytes of a block.
    fn bytes(self) -> usize;

    /// Reads the elements from `offset` on, a multiple of `S::LANES`.
    ///
    /// # Safety
    /// A block's bytes begin at `block`, and `offset` is less than its elements.
    unsafe fn vector<S: Simd>(self, simd: S, block: *const u8, offset: usize) -> S::Vector;

    /// Reads 32 elements from `offset` on, a multiple of 32, into as many vectors as that takes.
    ///
    /// # Safety
    /// As [`Blocks::vector`].
    #[inline(always)]
    unsafe fn vectors<S: Simd>(self, simd: S, block: *const u8, offset: usize, to: &mut [S::Vector]) {
        for (index, to) in to.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *to = unsafe { self.vector(simd, block, offset + index * S::LANES) };
        }
    }

    /// As [`RowReader::load_affine`], from `offset` on. [`raised`] is how codes of four bits are read so.
    ///
    /// # Safety
    /// As [`Blocks::vectors`].
    #[inline(always)]
    unsafe fn affine<S: Simd>(self, simd: S, block: *const u8, offset: usize, x: &mut [S::Vector]) -> [S::Vector; 2] {
        // SAFETY: the caller's promise.
        unsafe { self.vectors(simd, block, offset, x) };
        [simd.splat(1.0), simd.splat(0.0)]
    }

    /// Writes a block.
    fn encode(self, block: &[f32], to: &mut [u8]);

    /// As [`RowCodec::encode_weighted`].
    fn encode_weighted(self, block: &[f32], _weights: &[f32], to: &mut [u8]) {
        <Self as Blocks>::encode(self, block, to);
    }

    /// Reads a block.
    fn decode(self, block: &[u8], to: &mut [f32]);
}

impl<B: Blocks> RowReader for B {
    const SCALED: bool = false;
    const TOGETHER: bool = true;
    const AFFINE: bool = <B as Blocks>::AFFINE;
    const OF_WEIGHTS: bool = <B as Blocks>::OF_WEIGHTS;

    #[inline(always)]
    fn row_bytes(self, width: usize) -> usize {
        width.div_ceil(self.elements()) * self.bytes()
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(self, simd: S, row: *const u8, column: usize) -> S::Vector {
        let shift = self.elements().trailing_zeros();
        // SAFETY: the caller's promise: the row has a block with this column.
        unsafe { self.vector(simd, row.add((column >> shift) * self.bytes()), column & (self.elements() - 1)) }
    }

    #[inline(always)]
    unsafe fn load_many<S: Simd, const N: usize>(self, simd: S, row: *const u8, column: usize) -> [S::Vector; N] {
        let mut vectors = [simd.splat(0.0); N];
        let shift = self.elements().trailing_zeros();
        let together = if (N * S::LANES).is_multiple_of(LEAST) { LEAST / S::LANES } else { 1 };
        for (part, to) in vectors.chunks_exact_mut(together).enumerate() {
            let column = column + part * together * S::LANES;
            // SAFETY: the caller's promise.
            unsafe {
                let (block, offset) = (row.add((column >> shift) * self.bytes()), column & (self.elements() - 1));
                match together {
                    1 => to[0] = self.vector(simd, block, offset),
                    _ => self.vectors(simd, block, offset, to),
                }
            }
        }
        vectors
    }

    #[inline(always)]
    unsafe fn load_affine<S: Simd>(
        self,
        simd: S,
        row: *const u8,
        column: usize,
        x: &mut [S::Vector],
    ) -> [S::Vector; 2] {
        let shift = self.elements().trailing_zeros();
        // SAFETY: the caller's promise.
        unsafe {
            let (block, offset) = (row.add((column >> shift) * self.bytes()), column & (self.elements() - 1));
            self.affine(simd, block, offset, x)
        }
    }

    #[inline(always)]
    unsafe fn load_part<S: Simd>(self, simd: S, row: *const u8, column: usize, _count: usize) -> S::Vector {
        // SAFETY: the caller's promise. Rows are whole vectors, so that a part is a whole one.
        unsafe { self.load(simd, row, column) }
    }

    #[inline(always)]
    unsafe fn scale(self, _row: *const u8) -> f32 {
        1.0
    }
}

impl<B: Blocks> RowCodec for B {
    const NAME: &'static str = <B as Blocks>::NAME;
    const ABOUT: &'static str = <B as Blocks>::ABOUT;
    const PARAMETERS: &'static [Parameter] = <B as Blocks>::PARAMETERS;

    fn build(named: &Named) -> Result<Self, NamedError> {
        <B as Blocks>::build(named)
    }

    fn spell(self, to: &mut dyn fmt::Write) -> fmt::Result {
        <B as Blocks>::spell(self, to)
    }

    fn wants(self, width: usize) -> Option<String> {
        if self.rotated() && !(width.is_power_of_two() && width <= MOST) {
            return Some(format!("a power of two up to {MOST}"));
        }
        (!width.is_multiple_of(self.elements())).then(|| format!("a multiple of {}", self.elements()))
    }

    fn rotated(self) -> bool {
        <B as Blocks>::rotated(self)
    }

    fn group_tokens(self) -> Option<usize> {
        <B as Blocks>::group_tokens(self)
    }

    fn steps(self) -> f32 {
        <B as Blocks>::steps(self)
    }

    fn codes(self) -> Option<Codes> {
        <B as Blocks>::codes(self)
    }

    fn four_bits(self) -> Option<FourBits> {
        <B as Blocks>::four_bits(self)
    }

    fn encode(self, row: &[f32], to: &mut [u8]) {
        let mut copy = [0.0; MOST];
        let row = match self.rotated() {
            true => {
                let copy = &mut copy[..row.len()];
                copy.copy_from_slice(row);
                rotate(copy);
                copy
            }
            false => row,
        };
        let blocks = row.chunks_exact(self.elements()).zip(to.chunks_exact_mut(self.bytes()));
        blocks.for_each(|(block, to)| <B as Blocks>::encode(self, block, to));
    }

    fn encode_weighted(self, row: &[f32], weights: &[f32], to: &mut [u8]) {
        // Weights are of elements, which rotation mixes.
        if self.rotated() {
            return RowCodec::encode(self, row, to);
        }
        let blocks = row.chunks_exact(self.elements()).zip(weights.chunks_exact(self.elements()));
        let blocks = blocks.zip(to.chunks_exact_mut(self.bytes()));
        blocks.for_each(|((block, weights), to)| <B as Blocks>::encode_weighted(self, block, weights, to));
    }

    fn decode(self, from: &[u8], first: usize, to: &mut [f32]) {
        if self.rotated() {
            let mut row = [0.0; MOST];
            let row = &mut row[..from.len() / self.bytes() * self.elements()];
            read(self, from, 0, row);
            rotate(row);
            to.copy_from_slice(&row[first..][..to.len()]);
        } else {
            read(self, from, first, to);
        }
    }
}

/// `scale code + least` of 32 codes of four bits, as [`RowReader::load_affine`] reads them.
///
/// # Safety
/// As [`Simd::load_32_raised`].
#[inline(always)]
pub unsafe fn raised<S: Simd>(
    simd: S,
    codes: *const u8,
    (scale, least): (S::Vector, S::Vector),
    x: &mut [S::Vector],
) -> [S::Vector; 2] {
    // SAFETY: the caller's promise.
    unsafe { simd.load_32_raised(codes, x) };
    [scale, simd.mul_add(scale, simd.splat(-RAISED), least)]
}

/// Reads elements from `first` on as they are kept.
fn read<B: Blocks>(format: B, from: &[u8], first: usize, to: &mut [f32]) {
    let (mut block, mut column, mut to) = ([0.0; MOST], first, to);
    while !to.is_empty() {
        let (index, skipped) = (column / format.elements(), column % format.elements());
        let bytes = &from[index * format.bytes()..][..format.bytes()];
        let count = to.len().min(format.elements() - skipped);
        let (part, rest) = to.split_at_mut(count);
        match count == format.elements() {
            true => <B as Blocks>::decode(format, bytes, part),
            false => {
                <B as Blocks>::decode(format, bytes, &mut block[..format.elements()]);
                part.copy_from_slice(&block[skipped..][..count]);
            }
        }
        (column, to) = (column + count, rest);
    }
}

/// What codes of four bits stand for: whole numbers with a sign, and without one.
pub const SIGNED: Levels = Levels::whole([-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7]);
/// See [`SIGNED`].
pub const UNSIGNED: Levels = Levels::whole([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);

/// The parameter `group`: how many elements share a scale.
///
/// # Errors
/// When blocks cannot have so many.
pub fn group(named: &Named, default: usize) -> Result<usize, NamedError> {
    let group = named.count("group", default, 0)?;
    match group.is_power_of_two() && (LEAST..=MOST).contains(&group) {
        true => Ok(group),
        false => Err(named.wrong("group", "32, 64, 128 or 256".into())),
    }
}

/// Elements of the largest blocks that a group of so many elements is made up of, if any.
pub fn most_within(group: usize) -> Option<usize> {
    [MOST, 128, 64, LEAST].into_iter().find(|&block| group.is_multiple_of(block))
}

/// The f16 at byte `at` of a block, which llama.cpp's files have in this order of bytes too.
pub fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Writes an f16; returns what it is after rounding.
pub fn put_half(block: &mut [u8], at: usize, x: f32) -> f32 {
    let half = f16::from_f32(x);
    block[at..at + 2].copy_from_slice(&half.to_le_bytes());
    half.to_f32()
}

/// Reads the elements from `offset` on of codes of four bits: 16 bytes hold 32 of them, byte `i` the codes `i` and `i + 16`.
///
/// # Safety
/// The codes begin at `codes`, and `offset`, a multiple of `S::LANES`, is less than there are.
#[inline(always)]
pub unsafe fn nibbles<S: Simd>(simd: S, codes: *const u8, offset: usize, values: &[f32; 16]) -> S::Vector {
    // SAFETY: the caller's promise; a vector is at most 16 elements, which begin in the same half.
    unsafe { simd.load_nibbles(codes.add(offset / 32 * 16 + offset % 16), (offset / 16 % 2 * 4) as u32, values) }
}

/// Reads the elements from `offset` on of 32 codes of five bits: `values` has what the low four stand for, as [`nibbles`] reads them,
/// and 16 comes on top where the fifth, in a word of its own, is set.
///
/// # Safety
/// 4 bytes are readable at `high` and 16 at `low`; `offset` is a multiple of `S::LANES`, less than 32.
#[inline(always)]
pub unsafe fn with_fifth<S: Simd>(
    simd: S,
    high: *const u8,
    low: *const u8,
    offset: usize,
    values: &[f32; 16],
) -> S::Vector {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = u32::from_le(high.cast::<u32>().read_unaligned()) >> offset;
        simd.add_where(nibbles(simd, low, offset, values), bits, 16.0)
    }
}

/// The codes of 32 elements. All are found before any is packed, because loops over neighbours become vectors.
#[inline(always)]
pub fn coded(block: &[f32], code: impl Fn(f32) -> u8) -> [u8; LEAST] {
    let block: &[f32; LEAST] = block.try_into().expect("32 elements");
    block.map(code)
}

/// The fifth bits of 32 codes.
pub fn fifth_bits(codes: &[u8; LEAST]) -> u32 {
    codes.iter().enumerate().fold(0, |high, (index, code)| high | u32::from(code >> 4 & 1) << index)
}

/// Writes 32 codes of four bits as [`nibbles`] reads them; more bits are left out.
#[inline(always)]
pub fn put_nibbles(codes: &[u8; LEAST], to: &mut [u8]) {
    let (low, high) = codes.split_at(LEAST / 2);
    to.iter_mut().zip(low.iter().zip(high)).for_each(|(to, (low, high))| *to = low & 15 | high << 4);
}

/// The code of four bits of an element.
pub fn nibble(codes: &[u8], element: usize) -> u8 {
    codes[element / 32 * 16 + element % 16] >> (element / 16 % 2 * 4) & 15
}

/// Reads the elements from `offset` on of codes of 2, 3 or 4 bits, as [`put_codes`] writes them. `values` is what each
/// code stands for.
///
/// # Safety
/// The codes begin at `codes`, two more bytes follow them, and `offset`, a multiple of `S::LANES`, is less than there are.
#[inline(always)]
pub unsafe fn codes<S: Simd, const BITS: usize>(
    simd: S,
    codes: *const u8,
    offset: usize,
    values: &[f32; 16],
) -> S::Vector {
    // SAFETY: the caller's promise.
    unsafe {
        match BITS {
            4 => nibbles(simd, codes, offset, values),
            _ => simd.load_codes::<BITS>(codes, offset, values.first_chunk().expect("there are 16")),
        }
    }
}

/// Writes codes of elements in so many bits: of four as [`put_nibbles`] does, of fewer eight in as many bytes as they have bits.
#[inline(always)]
pub fn put_codes(bits: usize, block: &[f32], code: impl Fn(f32) -> u8, to: &mut [u8]) {
    for (block, to) in block.chunks_exact(LEAST).zip(to.chunks_exact_mut(LEAST / 8 * bits)) {
        let codes = coded(block, &code);
        if bits == 4 {
            put_nibbles(&codes, to);
            continue;
        }
        for (eight, bytes) in codes.chunks_exact(8).zip(to.chunks_exact_mut(bits)) {
            let word = eight.iter().enumerate().fold(0, |word, (at, &code)| word | u32::from(code) << (at * bits));
            bytes.copy_from_slice(&word.to_le_bytes()[..bits]);
        }
    }
}

/// The code of so many bits of an element.
pub fn code(bits: usize, codes: &[u8], element: usize) -> u8 {
    if bits == 4 {
        return nibble(codes, element);
    }
    let bit = element * bits;
    let two = u16::from(codes[bit / 8]) | codes.get(bit / 8 + 1).map_or(0, |&byte| u16::from(byte) << 8);
    (two >> (bit % 8)) as u8 & ((1 << bits) - 1)
}

/// The level nearest to `x` among ascending ones: how many midpoints of neighbours lie below.
pub fn nearest_level(levels: &[f32], x: f32) -> u8 {
    levels.windows(2).filter(|pair| x > (pair[0] + pair[1]) / 2.0).count() as u8
}

/// The largest magnitude; NaN if one is there.
pub fn largest(row: &[f32]) -> f32 {
    // Bits of magnitudes are ordered as these are, and NaN lies above infinity.
    let most = row.iter().map(|x| x.abs().to_bits().cast_signed()).max();
    f32::from_bits(most.unwrap_or(0).cast_unsigned())
}

/// Beyond 2^23 an f32 has no fraction, and the lowest bits of its mantissa count ones.
const SHIFT: f32 = 12_582_912.0;

/// The nearest whole number, halves to even, of numbers below 2^22: what `f32::round_ties_even` gives, without a call for each.
pub fn nearest_even(x: f32) -> f32 {
    (x + SHIFT) - SHIFT
}

/// A whole number from -128 to 127 as a byte: what `as` gives, without its care for all others, which become anything.
pub fn byte(whole: f32) -> i8 {
    ((whole + SHIFT).to_bits() as u8).cast_signed()
}

/// The nearest whole number, halves away from zero, as `f32::round` gives it, of numbers below 2^22.
pub fn nearest(x: f32) -> f32 {
    let even = nearest_even(x);
    let off = x - even;
    let up = if off == 0.5 && x > 0.0 { 1.0 } else { 0.0 };
    let down = if off == -0.5 && x < 0.0 { 1.0 } else { 0.0 };
    even + up - down
}

/// What a format keeps of a row; the same from any column on, and by vectors on every instruction path.
#[cfg(test)]
pub fn there_and_back(format: &str, row: &[f32]) -> Vec<f32> {
    use super::{RowFormat, with_codec};
    use crate::device::simd::{Isa, SimdOp};
    use crate::tensor::RowCode;

    /// Reads a row `N` vectors at a time.
    struct Load<'a, R, const N: usize>(R, &'a [u8], &'a mut [f32]);

    impl<R: RowReader, const N: usize> SimdOp for Load<'_, R, N> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let Load(reader, row, to) = self;
            for (index, to) in to.chunks_exact_mut(N * S::LANES).enumerate() {
                // SAFETY: the row has as many elements as `to`.
                let vectors = unsafe { reader.load_many::<S, N>(simd, row.as_ptr(), index * N * S::LANES) };
                to.chunks_exact_mut(S::LANES).zip(vectors).for_each(|(to, vector)| simd.write(to, vector));
            }
        }
    }

    let format: RowFormat = format.parse().unwrap();
    let mut bytes = vec![0xff; format.row_bytes(row.len())];
    format.encode(row, row.len(), &mut bytes);
    let mut back = vec![0.0; row.len()];
    format.decode(&bytes, 0, &mut back);
    let bits = |values: &[f32]| values.iter().map(|x| if x.is_nan() { 0 } else { x.to_bits() }).collect::<Vec<_>>();
    for isa in Isa::available() {
        let mut loaded = [vec![0.0; row.len()], back.clone(), back.clone()];
        let [one, two, eight] = &mut loaded;
        with_codec!(format, reader => {
            isa.run(Load::<_, 1>(reader, &bytes, one));
            isa.run(Load::<_, 2>(reader, &bytes, two));
            isa.run(Load::<_, 8>(reader, &bytes, eight));
        });
        loaded.iter().for_each(|loaded| assert_eq!(bits(loaded), bits(&back), "{format} on {}", isa.name()));
    }
    let mut part = vec![0.0; row.len() - 3];
    format.decode(&bytes, 2, &mut part[1..]);
    assert_eq!(bits(&part[1..]), bits(&back[2..row.len() - 2]), "{format}");
    back
}

#[test]
fn nearest_whole_numbers_are_those_of_the_standard_library() {
    let near = |at: i32| [-1i32, 0, 1].map(|by| f32::from_bits(((at as f32) / 4.0).to_bits().wrapping_add_signed(by)));
    let numbers = (-1024..1024).flat_map(near).chain([f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0, -0.0]);
    for x in numbers.filter(|x| x.abs() < 300.0 || !x.is_finite()) {
        assert_eq!(nearest(x) as i8, x.round() as i8, "{x}");
        if nearest(x).abs() < 128.0 {
            assert_eq!(byte(nearest(x)), x.round() as i8, "{x}");
        }
        assert_eq!(nearest_even(x) as i8, x.round_ties_even() as i8, "{x}");
    }
}
