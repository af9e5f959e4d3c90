//! Codes of a row of weights as products read them: four groups of 32 at a time, a lane of 128 bits for each.
//!
//! One [`Unpack`] for each layout of [`Codes`](super::Codes). What stands for zero is part of the least value, unless codes are signed.

use super::super::vector::each;
use super::GROUP;
use super::lanes::Lanes;
use std::arch::x86_64::*;

/// Four groups of a row of `w`: codes as a [`Quad`](super::Quad) has those of `x`, with the scales of the first halves and of the second,
/// and what is multiplied with a quad's sums.
pub struct Unpacked<L: Lanes> {
    pub codes: [L::Bytes; 2],
    pub scales: [L::Numbers; 2],
    pub least: L::Numbers,
}

/// How four groups are unpacked.
pub trait Unpack: Copy {
    /// Whether codes are [`Lanes::signed`]; others are at most 63.
    const SIGNED: bool = false;
    /// Whether the halves of a group have scales of their own.
    const HALVES: bool = false;
    /// Whether an f32 scale stands in front of the row.
    const ROW: bool = false;
    /// Bytes of a quad.
    const BYTES: usize;

    /// Reads a quad; groups behind the last one are the last again.
    ///
    /// # Safety
    /// The row holds groups up to `last`, and this quad's first.
    unsafe fn quad<L: Lanes>(self, lanes: L, row: *const u8, quad: usize, last: usize) -> Unpacked<L>;
}

/// Signed bytes, of a row with one scale, or of blocks.
#[derive(Clone, Copy)]
pub struct Bytes<const ROW: bool>;

impl<const ROW: bool> Unpack for Bytes<ROW> {
    const SIGNED: bool = true;
    const ROW: bool = ROW;
    const BYTES: usize = 4 * if ROW { GROUP } else { 2 + GROUP };

    #[inline(always)]
    unsafe fn quad<L: Lanes>(self, lanes: L, row: *const u8, quad: usize, last: usize) -> Unpacked<L> {
        // SAFETY: the caller's promise.
        unsafe {
            let blocks = if ROW { blocks(row.add(4), GROUP, quad, last) } else { blocks(row, 2 + GROUP, quad, last) };
            let at = if ROW { 0 } else { 2 };
            let codes = [lanes.load(skip(blocks, at)), lanes.load(skip(blocks, at + GROUP / 2))];
            let scales = if ROW { lanes.splat(1.0) } else { lanes.spread(halves(blocks, 0)) };
            let least = lanes.mul(scales, lanes.splat(-L::ZERO));
            Unpacked { codes: [lanes.signed(codes[0]), lanes.signed(codes[1])], scales: [scales; 2], least }
        }
    }
}

/// Blocks of four bits or five.
#[derive(Clone, Copy)]
pub struct Nibbles<const MINIMUM: bool, const FIFTH: bool>;

impl<const MINIMUM: bool, const FIFTH: bool> Unpack for Nibbles<MINIMUM, FIFTH> {
    const BYTES: usize = 4 * (2 + GROUP / 2 + if MINIMUM { 2 } else { 0 } + if FIFTH { 4 } else { 0 });

    #[inline(always)]
    unsafe fn quad<L: Lanes>(self, lanes: L, row: *const u8, quad: usize, last: usize) -> Unpacked<L> {
        let fifth_at = if MINIMUM { 4 } else { 2 };
        let codes_at = fifth_at + if FIFTH { 4 } else { 0 };
        // SAFETY: the caller's promise.
        unsafe {
            let blocks = blocks(row, codes_at + GROUP / 2, quad, last);
            let mut codes = two_nibbles(lanes, lanes.load(skip(blocks, codes_at)));
            if FIFTH {
                // Bits of first halves come first.
                for (half, codes) in codes.iter_mut().enumerate() {
                    let bits = words(skip(blocks, fifth_at + 2 * half));
                    *codes = lanes.or(*codes, lanes.where_set(bits, 16));
                }
            }
            let scales = lanes.spread(halves(blocks, 0));
            let least = match MINIMUM {
                true => lanes.spread(halves(blocks, 2)),
                false => lanes.mul(scales, lanes.splat(if FIFTH { -16.0 } else { -8.0 })),
            };
            Unpacked { codes, scales: [scales; 2], least }
        }
    }
}

/// Blocks of four bits that choose levels.
#[derive(Clone, Copy)]
pub struct Levels(pub &'static [i8; 16]);

impl Unpack for Levels {
    const SIGNED: bool = true;
    const BYTES: usize = 4 * (2 + GROUP / 2);

    #[inline(always)]
    unsafe fn quad<L: Lanes>(self, lanes: L, row: *const u8, quad: usize, last: usize) -> Unpacked<L> {
        // SAFETY: the caller's promise.
        unsafe {
            let blocks = blocks(row, 2 + GROUP / 2, quad, last);
            let [first, second] = two_nibbles(lanes, lanes.load(skip(blocks, 2)));
            let codes = [lanes.look_up(*self.0, first), lanes.look_up(*self.0, second)];
            let scales = lanes.spread(halves(blocks, 0));
            let least = lanes.mul(scales, lanes.splat(-L::ZERO));
            Unpacked { codes: [lanes.signed(codes[0]), lanes.signed(codes[1])], scales: [scales; 2], least }
        }
    }
}

/// llama.cpp's `q4_k` and `q5_k`.
#[derive(Clone, Copy)]
pub struct SixBits<const FIFTH: bool>;

impl<const FIFTH: bool> Unpack for SixBits<FIFTH> {
    const BYTES: usize = if FIFTH { 88 } else { 72 };

    #[inline(always)]
    unsafe fn quad<L: Lanes>(self, lanes: L, row: *const u8, quad: usize, _last: usize) -> Unpacked<L> {
        let codes_at = if FIFTH { 48 } else { 16 };
        // SAFETY: the caller's promise: a quad is half a super-block.
        unsafe {
            let (block, half) = (row.add(quad / 2 * (codes_at + 128)), quad % 2);
            // Two groups share their bytes: first halves of both, second halves, and the same of the next two.
            let from = block.add(codes_at + 64 * half);
            let mut codes = [lanes.byte(0); 2];
            for (part, codes) in codes.iter_mut().enumerate() {
                let at = from.add(16 * part);
                let bytes = lanes.load([at, at, at.add(32), at.add(32)]);
                *codes = lanes.and(lanes.shift_right(bytes, [0, 4, 0, 4]), lanes.byte(15));
            }
            if FIFTH {
                // Bit `g` of a byte becomes the fifth of group `g`.
                let turn = if half == 0 { [4, 3, 2, 1] } else { [0, 31, 30, 29] };
                for (part, codes) in codes.iter_mut().enumerate() {
                    let bits = lanes.all(_mm_loadu_si128(block.add(16 + 16 * part).cast()));
                    *codes = lanes.or(*codes, lanes.and(lanes.turn_left(bits, turn), lanes.byte(16)));
                }
            }
            let [a, b, c] = block.add(4).cast::<[u32; 3]>().read_unaligned();
            let [scales, least] = match half {
                0 => [a & 0x3f3f_3f3f, b & 0x3f3f_3f3f],
                _ => [c & 0x0f0f_0f0f | a >> 2 & 0x3030_3030, c >> 4 & 0x0f0f_0f0f | b >> 2 & 0x3030_3030],
            };
            let scales = lanes.spread(_mm_mul_ps(half_at(block), of_bytes(scales)));
            let least = _mm_mul_ps(half_at(block.add(2)), of_bytes(least));
            let least = lanes.spread(_mm_sub_ps(_mm_setzero_ps(), least));
            Unpacked { codes, scales: [scales; 2], least }
        }
    }
}

/// llama.cpp's `q6_k`.
#[derive(Clone, Copy)]
pub struct Q6K;

impl Unpack for Q6K {
    const HALVES: bool = true;
    const BYTES: usize = 105;

    #[inline(always)]
    unsafe fn quad<L: Lanes>(self, lanes: L, row: *const u8, quad: usize, _last: usize) -> Unpacked<L> {
        // SAFETY: the caller's promise: a quad is half a super-block.
        unsafe {
            let (block, half) = (row.add(quad / 2 * 210), quad % 2);
            let mut codes = [lanes.byte(0); 2];
            for (part, codes) in codes.iter_mut().enumerate() {
                let at = block.add(64 * half + 16 * part);
                let low = lanes.load([at, at.add(32), at, at.add(32)]);
                let low = lanes.and(lanes.shift_right(low, [0, 0, 4, 4]), lanes.byte(15));
                // Two bits of a byte for each group, to become the fifth and the sixth.
                let bits = lanes.all(_mm_loadu_si128(block.add(128 + 32 * half + 16 * part).cast()));
                let bits = lanes.and(lanes.turn_left(bits, [4, 2, 0, 30]), lanes.byte(48));
                *codes = lanes.or(low, bits);
            }
            let d = half_at(block.add(208));
            let scales = _mm_loadl_epi64(block.add(192 + 8 * half).cast());
            let [even, odd] = each(
                d,
                #[inline(always)]
                |first| {
                    let every_other = _mm_cvtsi32_si128(0x0604_0200 + 0x0101_0101 * first as i32);
                    let bytes = _mm_cvtepi8_epi32(_mm_shuffle_epi8(scales, every_other));
                    _mm_mul_ps(d, _mm_cvtepi32_ps(bytes))
                },
            );
            let least = lanes.mul(lanes.spread_pairs(even, odd), lanes.splat(-32.0));
            Unpacked { codes, scales: [lanes.spread(even), lanes.spread(odd)], least }
        }
    }
}

/// Where a quad's blocks begin; those behind the last one are the last again.
///
/// # Safety
/// There are blocks up to the last.
#[inline(always)]
unsafe fn blocks(row: *const u8, bytes: usize, quad: usize, last: usize) -> [*const u8; 4] {
    each(
        row,
        #[inline(always)]
        |lane| {
            // SAFETY: the caller's promise.
            unsafe { row.add((4 * quad + lane).min(last) * bytes) }
        },
    )
}

/// So many bytes behind each place.
///
/// # Safety
/// They belong to the same row.
#[inline(always)]
unsafe fn skip(blocks: [*const u8; 4], bytes: usize) -> [*const u8; 4] {
    each(
        blocks[0],
        #[inline(always)]
        |lane| {
            // SAFETY: the caller's promise.
            unsafe { blocks[lane].add(bytes) }
        },
    )
}

/// Low halves of bytes, and high ones.
#[inline(always)]
fn two_nibbles<L: Lanes>(lanes: L, bytes: L::Bytes) -> [L::Bytes; 2] {
    let mask = lanes.byte(15);
    [lanes.and(bytes, mask), lanes.and(lanes.shift_right(bytes, [4; 4]), mask)]
}

/// 16 bits at each place.
///
/// # Safety
/// They are readable.
#[inline(always)]
unsafe fn words(at: [*const u8; 4]) -> [u16; 4] {
    each(
        0,
        #[inline(always)]
        |lane| {
            // SAFETY: the caller's promise.
            unsafe { at[lane].cast::<u16>().read_unaligned() }
        },
    )
}

/// The f16 at a byte of each block.
///
/// # Safety
/// The processor has F16C, and they are readable.
#[inline(always)]
unsafe fn halves(blocks: [*const u8; 4], at: usize) -> __m128 {
    // SAFETY: the caller's promise.
    unsafe {
        let halves = words(skip(blocks, at));
        _mm_cvtph_ps(_mm_loadl_epi64(halves.as_ptr().cast()))
    }
}

/// An f16, four times.
///
/// # Safety
/// The processor has F16C, and it is readable.
#[inline(always)]
unsafe fn half_at(at: *const u8) -> __m128 {
    // SAFETY: the caller's promise.
    unsafe { _mm_cvtph_ps(_mm_set1_epi16(at.cast::<i16>().read_unaligned())) }
}

/// The bytes of a word.
///
/// # Safety
/// The processor has SSE4.1.
#[inline(always)]
unsafe fn of_bytes(word: u32) -> __m128 {
    // SAFETY: registers only.
    unsafe { _mm_cvtepi32_ps(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(word.cast_signed()))) }
}
