//! Codes of a row of weights as products read them: four groups of 32 at a time, a lane of 128 bits for each.
//!
//! One [`Unpack`] for each layout of [`Codes`](super::super::integers::Codes). Codes become bytes without a sign; what stands for zero is
//! part of the least value.

use super::super::integers::GROUP;
use super::super::vector::each;
use std::arch::x86_64::*;

/// Four groups of a row of `w`: codes without a sign, as a [`Quad`](super::super::integers::Quad) has those of `x`, with the scales of the
/// first halves and of the second, and what is multiplied with a quad's sums.
pub struct Unpacked {
    pub codes: [__m512i; 2],
    pub scales: [__m512; 2],
    pub least: __m512,
}

/// How four groups are unpacked.
pub trait Unpack: Copy {
    /// Whether the halves of a group have scales of their own.
    const HALVES: bool = false;
    /// Whether an f32 scale stands in front of the row.
    const ROW: bool = false;
    /// Bytes of a quad.
    const BYTES: usize;

    /// Reads a quad; groups behind the last one are the last again.
    ///
    /// # Safety
    /// The processor has AVX-512; the row holds groups up to `last`, and this quad's first.
    unsafe fn quad(self, row: *const u8, quad: usize, last: usize) -> Unpacked;
}

/// Signed bytes, of a row with one scale, or of blocks.
#[derive(Clone, Copy)]
pub struct Bytes<const ROW: bool>;

impl<const ROW: bool> Unpack for Bytes<ROW> {
    const ROW: bool = ROW;
    const BYTES: usize = 4 * if ROW { GROUP } else { 2 + GROUP };

    #[inline(always)]
    unsafe fn quad(self, row: *const u8, quad: usize, last: usize) -> Unpacked {
        // SAFETY: the caller's promise.
        unsafe {
            let blocks = if ROW { blocks(row.add(4), GROUP, quad, last) } else { blocks(row, 2 + GROUP, quad, last) };
            let at = if ROW { 0 } else { 2 };
            let sign = _mm512_set1_epi8(-128);
            let codes = [lanes(blocks, at), lanes(blocks, at + GROUP / 2)];
            let codes = [_mm512_xor_si512(codes[0], sign), _mm512_xor_si512(codes[1], sign)];
            let scales = if ROW { _mm512_set1_ps(1.0) } else { spread(halves(blocks, 0)) };
            let least = _mm512_mul_ps(scales, _mm512_set1_ps(-128.0));
            Unpacked { codes, scales: [scales; 2], least }
        }
    }
}

/// Blocks of four bits or five.
#[derive(Clone, Copy)]
pub struct Nibbles<const MINIMUM: bool, const FIFTH: bool>;

impl<const MINIMUM: bool, const FIFTH: bool> Unpack for Nibbles<MINIMUM, FIFTH> {
    const BYTES: usize = 4 * (2 + GROUP / 2 + if MINIMUM { 2 } else { 0 } + if FIFTH { 4 } else { 0 });

    #[inline(always)]
    unsafe fn quad(self, row: *const u8, quad: usize, last: usize) -> Unpacked {
        let fifth_at = if MINIMUM { 4 } else { 2 };
        let codes_at = fifth_at + if FIFTH { 4 } else { 0 };
        // SAFETY: the caller's promise.
        unsafe {
            let blocks = blocks(row, codes_at + GROUP / 2, quad, last);
            let mut codes = two_nibbles(lanes(blocks, codes_at));
            if FIFTH {
                // Bits of first halves are the low words.
                let [a, b, c, d] = each(
                    0,
                    #[inline(always)]
                    |lane| u64::from(blocks[lane].add(fifth_at).cast::<u32>().read_unaligned()),
                );
                let sixteen = _mm512_set1_epi8(16);
                let low = a & 0xffff | (b & 0xffff) << 16 | (c & 0xffff) << 32 | d << 48;
                let high = a >> 16 | b >> 16 << 16 | c >> 16 << 32 | d >> 16 << 48;
                for (codes, bits) in codes.iter_mut().zip([low, high]) {
                    *codes = _mm512_mask_add_epi8(*codes, bits, *codes, sixteen);
                }
            }
            let scales = spread(halves(blocks, 0));
            let least = match MINIMUM {
                true => spread(halves(blocks, 2)),
                false => _mm512_mul_ps(scales, _mm512_set1_ps(if FIFTH { -16.0 } else { -8.0 })),
            };
            Unpacked { codes, scales: [scales; 2], least }
        }
    }
}

/// Blocks of four bits that choose levels.
#[derive(Clone, Copy)]
pub struct Levels(pub &'static [i8; 16]);

impl Unpack for Levels {
    const BYTES: usize = 4 * (2 + GROUP / 2);

    #[inline(always)]
    unsafe fn quad(self, row: *const u8, quad: usize, last: usize) -> Unpacked {
        // SAFETY: the caller's promise.
        unsafe {
            let blocks = blocks(row, 2 + GROUP / 2, quad, last);
            let levels = _mm_xor_si128(_mm_loadu_si128(self.0.as_ptr().cast()), _mm_set1_epi8(-128));
            let levels = _mm512_broadcast_i32x4(levels);
            let codes = two_nibbles(lanes(blocks, 2));
            let scales = spread(halves(blocks, 0));
            let least = _mm512_mul_ps(scales, _mm512_set1_ps(-128.0));
            let codes = [_mm512_shuffle_epi8(levels, codes[0]), _mm512_shuffle_epi8(levels, codes[1])];
            Unpacked { codes, scales: [scales; 2], least }
        }
    }
}

/// llama.cpp's `q4_k` and `q5_k`.
#[derive(Clone, Copy)]
pub struct SixBits<const FIFTH: bool>;

impl<const FIFTH: bool> Unpack for SixBits<FIFTH> {
    const BYTES: usize = if FIFTH { 88 } else { 72 };

    #[inline(always)]
    unsafe fn quad(self, row: *const u8, quad: usize, _last: usize) -> Unpacked {
        let codes_at = if FIFTH { 48 } else { 16 };
        // SAFETY: the caller's promise: a quad is half a super-block.
        unsafe {
            let (block, half) = (row.add(quad / 2 * (codes_at + 128)), quad % 2);
            // Lanes of 16 bytes: codes of two groups in their first halves, in their second, and again of the next two.
            let codes = _mm512_loadu_si512(block.add(codes_at + 64 * half).cast());
            let shifts = by_lane([0, 4, 0, 4]);
            let mut codes = [
                nibbles(_mm512_shuffle_i32x4::<0b10_10_00_00>(codes, codes), shifts),
                nibbles(_mm512_shuffle_i32x4::<0b11_11_01_01>(codes, codes), shifts),
            ];
            if FIFTH {
                // Bit `g` of a byte becomes the fifth of group `g`.
                let rotate = _mm512_sub_epi32(by_lane([4, 3, 2, 1]), _mm512_set1_epi32(4 * half as i32));
                for (part, codes) in codes.iter_mut().enumerate() {
                    let bits = _mm512_broadcast_i32x4(_mm_loadu_si128(block.add(16 + 16 * part).cast()));
                    let bits = _mm512_and_si512(_mm512_rolv_epi32(bits, rotate), _mm512_set1_epi8(16));
                    *codes = _mm512_or_si512(*codes, bits);
                }
            }
            let [a, b, c] = block.add(4).cast::<[u32; 3]>().read_unaligned();
            let [scales, least] = match half {
                0 => [a & 0x3f3f_3f3f, b & 0x3f3f_3f3f],
                _ => [c & 0x0f0f_0f0f | a >> 2 & 0x3030_3030, c >> 4 & 0x0f0f_0f0f | b >> 2 & 0x3030_3030],
            };
            let scales = _mm512_mul_ps(half_at(block), bytes_by_lane(scales));
            let least = _mm512_mul_ps(half_at(block.add(2)), bytes_by_lane(least));
            let least = _mm512_sub_ps(_mm512_setzero_ps(), least);
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
    unsafe fn quad(self, row: *const u8, quad: usize, _last: usize) -> Unpacked {
        // SAFETY: the caller's promise: a quad is half a super-block.
        unsafe {
            let (block, half) = (row.add(quad / 2 * 210), quad % 2);
            let low = _mm512_loadu_si512(block.add(64 * half).cast());
            let shifts = by_lane([0, 0, 4, 4]);
            let low = [
                nibbles(_mm512_shuffle_i32x4::<0b10_00_10_00>(low, low), shifts),
                nibbles(_mm512_shuffle_i32x4::<0b11_01_11_01>(low, low), shifts),
            ];
            // Two bits of a byte for each group, to become the fifth and the sixth.
            let rotate = by_lane([4, 2, 0, 30]);
            let mut codes = low;
            for (part, codes) in codes.iter_mut().enumerate() {
                let bits = _mm512_broadcast_i32x4(_mm_loadu_si128(block.add(128 + 32 * half + 16 * part).cast()));
                let bits = _mm512_and_si512(_mm512_rolv_epi32(bits, rotate), _mm512_set1_epi8(48));
                *codes = _mm512_or_si512(*codes, bits);
            }
            let d = _mm256_cvtph_ps(_mm_set1_epi16(block.add(208).cast::<i16>().read_unaligned()));
            let scales = _mm256_cvtepi8_epi32(_mm_loadl_epi64(block.add(192 + 8 * half).cast()));
            let scales = _mm512_castps256_ps512(_mm256_mul_ps(d, _mm256_cvtepi32_ps(scales)));
            let even = by_lane([0, 2, 4, 6]);
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            let both = _mm512_mask_blend_epi32(0xaaaa, even, odd);
            let least = _mm512_mul_ps(_mm512_permutexvar_ps(both, scales), _mm512_set1_ps(-32.0));
            let scales = [_mm512_permutexvar_ps(even, scales), _mm512_permutexvar_ps(odd, scales)];
            Unpacked { codes, scales, least }
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

/// 16 bytes of a block in each lane.
///
/// # Safety
/// The processor has AVX-512, and the bytes are readable.
#[inline(always)]
unsafe fn lanes(blocks: [*const u8; 4], at: usize) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let [a, b, c, d] = each(
            _mm_setzero_si128(),
            #[inline(always)]
            |lane| _mm_loadu_si128(blocks[lane].add(at).cast()),
        );
        let low = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(a), b);
        let high = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(c), d);
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
    }
}

/// Low halves of bytes, and high ones.
///
/// # Safety
/// The processor has AVX-512.
#[inline(always)]
unsafe fn two_nibbles(bytes: __m512i) -> [__m512i; 2] {
    // SAFETY: registers only.
    unsafe {
        let mask = _mm512_set1_epi8(15);
        [_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask)]
    }
}

/// The f16 at a byte of each block.
///
/// # Safety
/// The processor has F16C, and they are readable.
#[inline(always)]
unsafe fn halves(blocks: [*const u8; 4], at: usize) -> __m128 {
    // SAFETY: the caller's promise.
    unsafe {
        let [a, b, c, d] = each(
            0,
            #[inline(always)]
            |lane| u64::from(blocks[lane].add(at).cast::<u16>().read_unaligned()),
        );
        _mm_cvtph_ps(_mm_cvtsi64_si128((a | b << 16 | c << 32 | d << 48).cast_signed()))
    }
}

/// An f16 everywhere.
///
/// # Safety
/// The processor has AVX-512, and it is readable.
#[inline(always)]
unsafe fn half_at(at: *const u8) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe { _mm512_cvtph_ps(_mm256_set1_epi16(at.cast::<i16>().read_unaligned())) }
}

/// The four bits from a bit of each lane on, of every byte.
///
/// # Safety
/// The processor has AVX-512.
#[inline(always)]
unsafe fn nibbles(bytes: __m512i, from: __m512i) -> __m512i {
    // SAFETY: registers only. What comes from the byte above is cut off.
    unsafe { _mm512_and_si512(_mm512_srlv_epi32(bytes, from), _mm512_set1_epi8(15)) }
}

/// Byte `j` of a word in all of lane `j`.
///
/// # Safety
/// The processor has AVX-512.
#[inline(always)]
unsafe fn bytes_by_lane(word: u32) -> __m512 {
    // SAFETY: registers only. The upper bytes of what is shuffled become zero.
    unsafe {
        let bytes = _mm512_or_si512(by_lane([0, 1, 2, 3]), _mm512_set1_epi32(0x8080_8000_u32.cast_signed()));
        _mm512_cvtepi32_ps(_mm512_shuffle_epi8(_mm512_set1_epi32(word.cast_signed()), bytes))
    }
}

/// Each of four numbers in all of its lane.
///
/// # Safety
/// The processor has AVX-512.
#[inline(always)]
unsafe fn spread(numbers: __m128) -> __m512 {
    // SAFETY: registers only.
    unsafe { _mm512_permutexvar_ps(by_lane([0, 1, 2, 3]), _mm512_castps128_ps512(numbers)) }
}

/// A whole number in all words of each lane.
///
/// # Safety
/// The processor has AVX-512.
#[inline(always)]
unsafe fn by_lane([a, b, c, d]: [i32; 4]) -> __m512i {
    // SAFETY: registers only.
    unsafe { _mm512_setr_epi32(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d) }
}
