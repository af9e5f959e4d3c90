//! AVX512-VNNI: four lanes are a register, and 64 pairs of codes are multiplied and added up in one instruction.

use super::super::Simd;
use super::super::avx512::Avx512;
use super::lanes::Lanes;
use std::arch::x86_64::*;

/// The processor has AVX512-VNNI. Made only by [`with`].
#[derive(Clone, Copy)]
pub struct Vnni(Avx512<false>);

/// Calls `work`, compiled with AVX512-VNNI if it is `#[inline(always)]`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub fn with<R>(work: impl FnOnce(Vnni) -> R) -> R {
    work(Vnni(Avx512::here()))
}

/// An intrinsic that touches registers only.
macro_rules! register {
    ($call:expr) => {
        // SAFETY: a `Vnni` exists only where the processor has the instructions; no memory is touched.
        unsafe { $call }
    };
}

/// A whole number in all words of each lane.
#[inline(always)]
fn by_lane(_proof: Vnni, lanes: [u32; 4]) -> __m512i {
    let [a, b, c, d] = lanes.map(u32::cast_signed);
    register!(_mm512_setr_epi32(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d))
}

impl Lanes for Vnni {
    type Simd = Avx512<false>;
    type Bytes = __m512i;
    type Numbers = __m512;
    // The instruction takes codes of `w` without a sign.
    const ZERO: f32 = 128.0;

    #[inline(always)]
    fn simd(self) -> Self::Simd {
        self.0
    }

    #[inline(always)]
    unsafe fn load(self, [a, b, c, d]: [*const u8; 4]) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe {
            let (a, b) = (_mm_loadu_si128(a.cast()), _mm_loadu_si128(b.cast()));
            let (c, d) = (_mm_loadu_si128(c.cast()), _mm_loadu_si128(d.cast()));
            let low = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(a), b);
            let high = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(c), d);
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
        }
    }

    #[inline(always)]
    fn byte(self, byte: u8) -> __m512i {
        register!(_mm512_set1_epi8(byte.cast_signed()))
    }

    #[inline(always)]
    fn all(self, bytes: __m128i) -> __m512i {
        register!(_mm512_broadcast_i32x4(bytes))
    }

    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        register!(_mm512_and_si512(a, b))
    }

    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        register!(_mm512_or_si512(a, b))
    }

    #[inline(always)]
    fn turn_left(self, bytes: __m512i, bits: [u32; 4]) -> __m512i {
        register!(_mm512_rolv_epi32(bytes, by_lane(self, bits)))
    }

    #[inline(always)]
    fn shift_right(self, bytes: __m512i, bits: [u32; 4]) -> __m512i {
        register!(_mm512_srlv_epi32(bytes, by_lane(self, bits)))
    }

    #[inline(always)]
    fn where_set(self, bits: [u16; 4], value: u8) -> __m512i {
        let [a, b, c, d] = bits.map(u64::from);
        register!(_mm512_maskz_set1_epi8(a | b << 16 | c << 32 | d << 48, value.cast_signed()))
    }

    #[inline(always)]
    fn look_up(self, table: [i8; 16], bytes: __m512i) -> __m512i {
        // SAFETY: 16 bytes, and as for `register`.
        unsafe { _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), bytes) }
    }

    #[inline(always)]
    fn signed(self, bytes: __m512i) -> __m512i {
        register!(_mm512_xor_si512(bytes, _mm512_set1_epi8(-128)))
    }

    #[inline(always)]
    fn spread(self, numbers: __m128) -> __m512 {
        register!(_mm512_permutexvar_ps(by_lane(self, [0, 1, 2, 3]), _mm512_castps128_ps512(numbers)))
    }

    #[inline(always)]
    fn spread_pairs(self, even: __m128, odd: __m128) -> __m512 {
        register!(_mm512_mask_blend_ps(0xaaaa, self.spread(even), self.spread(odd)))
    }

    #[inline(always)]
    fn splat(self, number: f32) -> __m512 {
        self.0.splat(number)
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        self.0.mul(a, b)
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        self.0.mul_add(a, b, c)
    }

    #[inline(always)]
    fn dot<const SIGNED: bool, const PARTS: usize>(self, w: [__m512i; PARTS], x: [__m512i; PARTS]) -> __m512 {
        let mut sums = register!(_mm512_setzero_si512());
        for (w, x) in w.into_iter().zip(x) {
            sums = register!(_mm512_dpbusd_epi32(sums, w, x));
        }
        register!(_mm512_cvtepi32_ps(sums))
    }

    #[inline(always)]
    fn fold(self, a: __m512, b: __m512) -> __m512 {
        self.0.add(a, b)
    }

    #[inline(always)]
    fn codes(self, codes: &[[i8; 16]; 4]) -> __m512i {
        // SAFETY: 64 bytes, and as for `register`.
        unsafe { _mm512_loadu_si512(codes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn numbers(self, numbers: &[[f32; 4]; 4]) -> __m512 {
        // SAFETY: 16 numbers.
        unsafe { self.0.load(numbers.as_ptr().cast()) }
    }
}
