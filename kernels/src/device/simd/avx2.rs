//! AVX2 and FMA: vectors of 8 f32.

use super::vector::{RAISED, each};
use super::{Levels, Native, Simd, prefetch};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// The path. Made only by [`with`].
#[derive(Clone, Copy)]
pub struct Avx2(());

/// Calls `work`, compiled with AVX2 and FMA if it is `#[inline(always)]`.
#[target_feature(enable = "avx2,fma,f16c")]
pub fn with<R>(work: impl FnOnce(Avx2) -> R) -> R {
    work(Avx2(()))
}

/// An intrinsic that touches registers only.
macro_rules! register {
    ($call:expr) => {
        // SAFETY: an `Avx2` exists only where the processor has the instructions; no memory is touched.
        unsafe { $call }
    };
}

/// The first `count` of eight 16-bit words, zeros after them. AVX2 has no masked load of such words; a copy to memory
/// would stall the load that follows it.
///
/// # Safety
/// `count` words are readable, at most 8.
#[inline(always)]
unsafe fn part(from: *const u16, count: usize) -> __m128i {
    // SAFETY: the caller's promise, for each piece of the words: four, two and one, as the bits of `count` say.
    unsafe {
        if count >= 8 {
            return _mm_loadu_si128(from.cast());
        }
        let mut words = 0u64;
        let (pair, last) = (from.add(count & 4), from.add(count & 6));
        if count & 1 != 0 {
            words = u64::from(last.read_unaligned());
        }
        if count & 2 != 0 {
            words = words << 32 | u64::from(pair.cast::<u32>().read_unaligned());
        }
        match count & 4 {
            0 => _mm_cvtsi64_si128(words as i64),
            _ => _mm_set_epi64x(words as i64, from.cast::<i64>().read_unaligned()),
        }
    }
}

impl Avx2 {
    /// What `values` has for the low four bits of each lane.
    #[inline(always)]
    fn look_up(self, index: __m256i, values: &[f32; 16]) -> __m256 {
        // Of an index three bits count; the fourth, made the sign, chooses between halves.
        let (low, high) = values.split_at(8);
        // SAFETY: an `Avx2` exists only where the processor has the instructions; each half is a vector.
        unsafe {
            let low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(low.as_ptr()), index);
            let high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(high.as_ptr()), index);
            _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index)))
        }
    }
}

impl Simd for Avx2 {
    const LANES: usize = 8;
    const COLUMNS: usize = 2;
    type Vector = __m256;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        register!(_mm256_set1_ps(x))
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> __m256 {
        // SAFETY: the caller's promise; a bf16 is the upper half of the f32 of the same value.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn splat_f16(self, from: *const f16) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtph_ps(_mm_set1_epi16(from.cast::<i16>().read_unaligned())) }
    }

    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u8, shift: u32, values: &[f32; 16]) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe {
            let codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
            self.look_up(_mm256_srl_epi32(codes, _mm_cvtsi32_si128(shift as i32)), values)
        }
    }

    #[inline(always)]
    unsafe fn load_32_nibbles(
        self,
        from: *const u8,
        levels: &Levels,
        (scale, least): (__m256, Option<__m256>),
        to: &mut [__m256],
    ) {
        // SAFETY: the caller's promise, and 16 levels. Whole levels are looked up as bytes, sixteen at a time, and widened then.
        unsafe {
            let (bytes, four) = (_mm_loadu_si128(from.cast()), _mm_set1_epi8(15));
            let mut codes = _mm_and_si128(bytes, four);
            for (half, to) in to.chunks_exact_mut(2).enumerate() {
                if half == 1 {
                    codes = _mm_and_si128(_mm_srli_epi16::<4>(bytes), four);
                }
                let mut part = match &levels.whole {
                    Some(whole) => _mm_shuffle_epi8(_mm_loadu_si128(whole.as_ptr().cast()), codes),
                    None => codes,
                };
                for to in to {
                    let x = match levels.whole {
                        Some(_) => _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(part)),
                        None => self.look_up(_mm256_cvtepu8_epi32(part), &levels.values),
                    };
                    let x = _mm256_mul_ps(scale, x);
                    *to = if let Some(least) = least { _mm256_add_ps(x, least) } else { x };
                    part = _mm_srli_si128::<8>(part);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn load_32_raised(self, from: *const u8, to: &mut [__m256]) {
        // SAFETY: the caller's promise. Bits are moved to the mantissa's upper end, below the exponent of 16.
        unsafe {
            let (mantissa, exponent) = (_mm256_set1_epi32(0x78_0000), _mm256_castps_si256(_mm256_set1_ps(RAISED)));
            let (low, high) = to.split_at_mut(2);
            for (index, (low, high)) in low.iter_mut().zip(high).enumerate() {
                let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.add(8 * index).cast()));
                let bits = _mm256_and_si256(_mm256_slli_epi32::<19>(bytes), mantissa);
                *low = _mm256_castsi256_ps(_mm256_or_si256(bits, exponent));
                let bits = _mm256_and_si256(_mm256_slli_epi32::<15>(bytes), mantissa);
                *high = _mm256_castsi256_ps(_mm256_or_si256(bits, exponent));
            }
        }
    }

    #[inline(always)]
    unsafe fn load_codes<const BITS: usize>(self, from: *const u8, first: usize, values: &[f32; 8]) -> __m256 {
        let bits = BITS as i32;
        // SAFETY: the caller's promise: eight codes are followed by two bytes.
        unsafe {
            let words = _mm256_set1_epi32(from.add(first / 8 * BITS).cast::<i32>().read_unaligned());
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let shifted = _mm256_srlv_epi32(words, _mm256_mullo_epi32(lanes, _mm256_set1_epi32(bits)));
            let index = _mm256_and_si256(shifted, _mm256_set1_epi32((1 << bits) - 1));
            _mm256_permutevar8x32_ps(self.load(values.as_ptr()), index)
        }
    }

    #[inline(always)]
    unsafe fn load_bits(self, from: *const u8, shift: u32, mask: u8) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe {
            let codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
            let codes = _mm256_srl_epi32(codes, _mm_cvtsi32_si128(shift as i32));
            _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(i32::from(mask))))
        }
    }

    #[inline(always)]
    unsafe fn load_part(self, from: *const f32, count: usize) -> __m256 {
        // SAFETY: the caller's promise; lanes that the mask leaves out are not read.
        unsafe {
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            _mm256_maskload_ps(from, _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lanes))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_part(self, from: *const bf16, count: usize) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(part(from.cast(), count));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn load_f16_part(self, from: *const f16, count: usize) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtph_ps(part(from.cast(), count)) }
    }

    #[inline(always)]
    unsafe fn load_i8_part(self, from: *const i8, count: usize) -> __m256 {
        let bytes: [i8; 8] = each(
            0,
            #[inline(always)]
            // SAFETY: the caller's promise.
            |lane| if lane < count { unsafe { *from.add(lane) } } else { 0 },
        );
        // SAFETY: eight bytes.
        unsafe { self.load_i8(bytes.as_ptr()) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: __m256) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_ps(to, x) }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, x: __m256) {
        // SAFETY: the caller's promise.
        unsafe {
            let bits = _mm256_castps_si256(x);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
            let rounded = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(up, quiet, nan));
            let packed = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256::<1>(rounded));
            _mm_storeu_si128(to.cast(), packed);
        }
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16, x: __m256) {
        // SAFETY: the caller's promise.
        unsafe { _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        register!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn add_where(self, x: __m256, bits: u32, more: f32) -> __m256 {
        register!({
            let own = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits.cast_signed()), own), own);
            _mm256_add_ps(x, _mm256_and_ps(_mm256_castsi256_ps(set), _mm256_set1_ps(more)))
        })
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        register!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        register!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        register!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        register!(_mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn select_less(self, a: __m256, b: __m256, x: __m256, y: __m256) -> __m256 {
        register!(_mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)))
    }

    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        register!(_mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn round(self, x: __m256) -> __m256 {
        register!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x))
    }

    #[inline(always)]
    fn scale_or_zero(self, x: __m256, exponent: __m256, limit: __m256) -> __m256 {
        register!({
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127));
            let scaled = _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased)));
            _mm256_and_ps(scaled, _mm256_cmp_ps::<_CMP_NLT_UQ>(limit, _mm256_set1_ps(-126.0)))
        })
    }

    #[inline(always)]
    fn sum(self, x: __m256) -> f32 {
        register!({
            let four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }

    #[inline(always)]
    fn sums(self, [a, b, c, d]: [__m256; 4]) -> [f32; 4] {
        register!({
            let halves = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
            let one = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
            std::mem::transmute::<__m128, [f32; 4]>(one)
        })
    }

    #[inline(always)]
    fn largest(self, x: __m256) -> f32 {
        register!({
            let four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        })
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const u8, from_stride_bytes: usize, to: *mut f32, to_stride: usize) {
        // Each half of `quads[half][c]` holds four rows of a column: `c` in the lower, `4 + c` in the upper.
        let mut quads = [[self.splat(0.0); 4]; 2];
        for (half, quads) in quads.iter_mut().enumerate() {
            // SAFETY: the caller's promise, for each row.
            let [a, b, c, d] = unsafe {
                let first = from.add(4 * half * from_stride_bytes);
                [
                    self.load(first.cast()),
                    self.load(first.add(from_stride_bytes).cast()),
                    self.load(first.add(2 * from_stride_bytes).cast()),
                    self.load(first.add(3 * from_stride_bytes).cast()),
                ]
            };
            *quads = register!({
                let (ab, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
                let (cd, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
                [
                    _mm256_shuffle_ps::<0x44>(ab, cd),
                    _mm256_shuffle_ps::<0xee>(ab, cd),
                    _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
                    _mm256_shuffle_ps::<0xee>(ab_high, cd_high),
                ]
            });
        }
        let [upper, lower] = quads;
        for (column, (upper, lower)) in upper.into_iter().zip(lower).enumerate() {
            let (left, right) =
                register!((_mm256_permute2f128_ps::<0x20>(upper, lower), _mm256_permute2f128_ps::<0x31>(upper, lower)));
            // SAFETY: the caller's promise.
            unsafe {
                self.store(to.add(column * to_stride), left);
                self.store(to.add((4 + column) * to_stride), right);
            }
        }
    }

    #[inline(always)]
    fn prefetch_for_work(self, at: *const u8) {
        prefetch::for_work(at);
    }

    #[inline(always)]
    fn prefetch_for_reading(self, at: *const u8) {
        prefetch::for_reading(at);
    }
}

impl Native for Avx2 {
    type Bf16 = f32;
}
