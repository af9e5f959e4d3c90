//! AVX2: four lanes are two registers. Products of neighbours are added in 16 bits (`vpmaddubsw`), and those in 32.
//!
//! Of `a b + c d` 16 bits hold all where codes of `w` are at most 63, even when the sums of two halves are added. Signed bytes are widened to
//! 16 bits first: `vpmaddubsw` would need them without a sign, and -128 has no other.

use super::super::Simd;
use super::super::avx2::Avx2;
use super::lanes::Lanes;
use std::arch::x86_64::*;

/// An intrinsic that touches registers only.
macro_rules! register {
    ($call:expr) => {
        // SAFETY: an `Avx2` exists only where the processor has the instructions; no memory is touched.
        unsafe { $call }
    };
}

/// A whole number in all words of each lane.
#[inline(always)]
fn by_lane(_proof: Avx2, lanes: [u32; 4]) -> [__m256i; 2] {
    let [a, b, c, d] = lanes.map(u32::cast_signed);
    register!([_mm256_setr_epi32(a, a, a, a, b, b, b, b), _mm256_setr_epi32(c, c, c, c, d, d, d, d)])
}

impl Lanes for Avx2 {
    type Simd = Avx2;
    type Bytes = [__m256i; 2];
    type Numbers = [__m256; 2];
    const ZERO: f32 = 0.0;

    #[inline(always)]
    fn simd(self) -> Avx2 {
        self
    }

    #[inline(always)]
    unsafe fn load(self, [a, b, c, d]: [*const u8; 4]) -> [__m256i; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let (a, b) = (_mm_loadu_si128(a.cast()), _mm_loadu_si128(b.cast()));
            let (c, d) = (_mm_loadu_si128(c.cast()), _mm_loadu_si128(d.cast()));
            [
                _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(a), b),
                _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(c), d),
            ]
        }
    }

    #[inline(always)]
    fn byte(self, byte: u8) -> [__m256i; 2] {
        register!([_mm256_set1_epi8(byte.cast_signed()); 2])
    }

    #[inline(always)]
    fn all(self, bytes: __m128i) -> [__m256i; 2] {
        register!([_mm256_broadcastsi128_si256(bytes); 2])
    }

    #[inline(always)]
    fn and(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        register!([_mm256_and_si256(a[0], b[0]), _mm256_and_si256(a[1], b[1])])
    }

    #[inline(always)]
    fn or(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        register!([_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])])
    }

    #[inline(always)]
    fn turn_left(self, bytes: [__m256i; 2], bits: [u32; 4]) -> [__m256i; 2] {
        // A shift by 32 leaves nothing.
        let (left, right) = (by_lane(self, bits), self.shift_right(bytes, bits.map(|bits| 32 - bits)));
        register!({
            let left = [_mm256_sllv_epi32(bytes[0], left[0]), _mm256_sllv_epi32(bytes[1], left[1])];
            self.or(left, right)
        })
    }

    #[inline(always)]
    fn shift_right(self, bytes: [__m256i; 2], bits: [u32; 4]) -> [__m256i; 2] {
        let bits = by_lane(self, bits);
        register!([_mm256_srlv_epi32(bytes[0], bits[0]), _mm256_srlv_epi32(bytes[1], bits[1])])
    }

    #[inline(always)]
    fn where_set(self, bits: [u16; 4], value: u8) -> [__m256i; 2] {
        register!({
            // Each byte of a lane gets the eight bits in which its own is, and keeps that.
            let first = _mm256_set_epi64x(0x0101_0101_0101_0101, 0, 0x0101_0101_0101_0101, 0);
            let own = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
            let mut bytes = by_lane(self, bits.map(u32::from));
            for bytes in &mut bytes {
                let eight = _mm256_shuffle_epi8(*bytes, first);
                let set = _mm256_cmpeq_epi8(_mm256_and_si256(eight, own), own);
                *bytes = _mm256_and_si256(set, _mm256_set1_epi8(value.cast_signed()));
            }
            bytes
        })
    }

    #[inline(always)]
    fn look_up(self, table: [i8; 16], bytes: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: 16 bytes, and as for `register`.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            [_mm256_shuffle_epi8(table, bytes[0]), _mm256_shuffle_epi8(table, bytes[1])]
        }
    }

    #[inline(always)]
    fn signed(self, bytes: [__m256i; 2]) -> [__m256i; 2] {
        bytes
    }

    #[inline(always)]
    fn spread(self, numbers: __m128) -> [__m256; 2] {
        register!({
            let both = _mm256_broadcast_ps(&numbers);
            let lanes = by_lane(self, [0, 1, 2, 3]);
            [_mm256_permutevar_ps(both, lanes[0]), _mm256_permutevar_ps(both, lanes[1])]
        })
    }

    #[inline(always)]
    fn spread_pairs(self, even: __m128, odd: __m128) -> [__m256; 2] {
        let (even, odd) = (self.spread(even), self.spread(odd));
        register!([_mm256_blend_ps::<0xaa>(even[0], odd[0]), _mm256_blend_ps::<0xaa>(even[1], odd[1])])
    }

    #[inline(always)]
    fn splat(self, number: f32) -> [__m256; 2] {
        [Simd::splat(self, number); 2]
    }

    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        [Simd::mul(self, a[0], b[0]), Simd::mul(self, a[1], b[1])]
    }

    #[inline(always)]
    fn mul_add(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        [Simd::mul_add(self, a[0], b[0], c[0]), Simd::mul_add(self, a[1], b[1], c[1])]
    }

    #[inline(always)]
    fn dot<const SIGNED: bool, const PARTS: usize>(
        self,
        w: [[__m256i; 2]; PARTS],
        x: [[__m256i; 2]; PARTS],
    ) -> [__m256; 2] {
        let mut numbers = Lanes::splat(self, 0.0);
        for (pair, numbers) in numbers.iter_mut().enumerate() {
            *numbers = register!({
                let (mut halves, mut sums) = (_mm256_setzero_si256(), _mm256_setzero_si256());
                for (w, x) in w.iter().zip(x) {
                    let (w, x) = (w[pair], x[pair]);
                    if SIGNED {
                        // Each byte in both halves of a word, and the lower one shifted out again.
                        let low = _mm256_madd_epi16(
                            _mm256_srai_epi16::<8>(_mm256_unpacklo_epi8(w, w)),
                            _mm256_srai_epi16::<8>(_mm256_unpacklo_epi8(x, x)),
                        );
                        let high = _mm256_madd_epi16(
                            _mm256_srai_epi16::<8>(_mm256_unpackhi_epi8(w, w)),
                            _mm256_srai_epi16::<8>(_mm256_unpackhi_epi8(x, x)),
                        );
                        sums = _mm256_add_epi32(sums, _mm256_add_epi32(low, high));
                    } else {
                        halves = _mm256_add_epi16(halves, _mm256_maddubs_epi16(w, x));
                    }
                }
                if !SIGNED {
                    sums = _mm256_madd_epi16(halves, _mm256_set1_epi16(1));
                }
                _mm256_cvtepi32_ps(sums)
            });
        }
        numbers
    }

    #[inline(always)]
    fn fold(self, a: [__m256; 2], b: [__m256; 2]) -> __m256 {
        self.add(self.add(a[0], a[1]), self.add(b[0], b[1]))
    }

    #[inline(always)]
    fn codes(self, codes: &[[i8; 16]; 4]) -> [__m256i; 2] {
        // SAFETY: 64 bytes, and as for `register`.
        unsafe { [_mm256_loadu_si256(codes.as_ptr().cast()), _mm256_loadu_si256(codes[2..].as_ptr().cast())] }
    }

    #[inline(always)]
    fn numbers(self, numbers: &[[f32; 4]; 4]) -> [__m256; 2] {
        // SAFETY: 16 numbers.
        unsafe { [Simd::load(self, numbers.as_ptr().cast()), Simd::load(self, numbers[2..].as_ptr().cast())] }
    }
}
