//! AVX-512: vectors of 16 f32, with AVX512-BF16 dot products of pairs of bf16, and with AMX products of tiles of them.

use super::product::{Extents, Left, Right};
use super::{Levels, Native, Simd, Unit, amx, prefetch};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// The path; `BF16` says whether it has AVX512-BF16. Made only by the functions below.
#[derive(Clone, Copy)]
pub struct Avx512<const BF16: bool> {
    /// Whether the thread's tiles of AMX are configured.
    tiles: bool,
}

/// Calls `work`, compiled with AVX-512 if it is `#[inline(always)]`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub fn with<R>(work: impl FnOnce(Avx512<false>) -> R) -> R {
    work(Avx512 { tiles: false })
}

/// As [`with`], with AVX512-BF16 too, and with AMX if `tiles`.
///
/// # Safety
/// Without `tiles`, or [`amx::is_here`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub unsafe fn with_bf16<R>(tiles: bool, work: impl FnOnce(Avx512<true>) -> R) -> R {
    // SAFETY: the caller's promise.
    let _configured = tiles.then(|| unsafe { amx::Configured::begin() });
    work(Avx512 { tiles })
}

impl Avx512<false> {
    /// The path, within code that is compiled with AVX-512 and more.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub fn here() -> Self {
        Avx512 { tiles: false }
    }
}

/// An intrinsic that touches registers only.
macro_rules! register {
    ($call:expr) => {
        // SAFETY: an `Avx512` exists only where the processor has the instructions; no memory is touched.
        unsafe { $call }
    };
}

/// The mask of the first `count` lanes, at most 16.
#[inline(always)]
fn first(count: usize) -> __mmask16 {
    ((1u32 << count) - 1) as __mmask16
}

impl<const BF16: bool> Simd for Avx512<BF16> {
    const LANES: usize = 16;
    const COLUMNS: usize = 4;
    type Vector = __m512;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        register!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> __m512 {
        // SAFETY: the caller's promise; a bf16 is the upper half of the f32 of the same value.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn splat_f16(self, from: *const f16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_set1_epi16(from.cast::<i16>().read_unaligned())) }
    }

    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u8, shift: u32, values: &[f32; 16]) -> __m512 {
        // SAFETY: the caller's promise; of an index only the low four bits count.
        unsafe {
            let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
            let index = _mm512_srl_epi32(codes, _mm_cvtsi32_si128(shift as i32));
            _mm512_permutexvar_ps(index, self.load(values.as_ptr()))
        }
    }

    #[inline(always)]
    unsafe fn load_32_nibbles(
        self,
        from: *const u8,
        levels: &Levels,
        (scale, least): (__m512, Option<__m512>),
        to: &mut [__m512],
    ) {
        // SAFETY: the caller's promise. What all 16 codes stand for is one vector; of an index only the low four bits count.
        unsafe {
            let scaled = _mm512_mul_ps(scale, self.load(levels.values.as_ptr()));
            let values = if let Some(least) = least { _mm512_add_ps(scaled, least) } else { scaled };
            let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
            to[0] = _mm512_permutexvar_ps(codes, values);
            to[1] = _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(codes), values);
        }
    }

    #[inline(always)]
    unsafe fn load_codes<const BITS: usize>(self, from: *const u8, first: usize, values: &[f32; 8]) -> __m512 {
        let bits = BITS as i32;
        // SAFETY: the caller's promise: the second eight codes are followed by two bytes.
        unsafe {
            let from = from.add(first / 8 * BITS);
            let (low, high) = (from.cast::<i32>().read_unaligned(), from.add(BITS).cast::<i32>().read_unaligned());
            let words = _mm512_mask_blend_epi32(0xff00, _mm512_set1_epi32(low), _mm512_set1_epi32(high));
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
            let shifted = _mm512_srlv_epi32(words, _mm512_mullo_epi32(lanes, _mm512_set1_epi32(bits)));
            let index = _mm512_and_si512(shifted, _mm512_set1_epi32((1 << bits) - 1));
            _mm512_permutexvar_ps(index, _mm512_castps256_ps512(_mm256_loadu_ps(values.as_ptr())))
        }
    }

    #[inline(always)]
    unsafe fn load_32_of_bytes(
        self,
        from: *const u8,
        shift: u32,
        values: &[f32; 16],
        (scale, least): (__m512, __m512),
        to: &mut [__m512],
    ) {
        // SAFETY: the caller's promise. As above: the table is scaled and not the elements.
        unsafe {
            let values = _mm512_fmadd_ps(scale, self.load(values.as_ptr()), least);
            let shift = _mm_cvtsi32_si128(shift as i32);
            for (half, to) in to.iter_mut().enumerate() {
                let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.add(16 * half).cast()));
                *to = _mm512_permutexvar_ps(_mm512_srl_epi32(codes, shift), values);
            }
        }
    }

    #[inline(always)]
    unsafe fn load_bits(self, from: *const u8, shift: u32, mask: u8) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe {
            let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
            let codes = _mm512_srl_epi32(codes, _mm_cvtsi32_si128(shift as i32));
            _mm512_cvtepi32_ps(_mm512_and_si512(codes, _mm512_set1_epi32(i32::from(mask))))
        }
    }

    #[inline(always)]
    unsafe fn load_part(self, from: *const f32, count: usize) -> __m512 {
        // SAFETY: the caller's promise; lanes that the mask leaves out are not read.
        unsafe { _mm512_maskz_loadu_ps(first(count), from) }
    }

    #[inline(always)]
    unsafe fn load_bf16_part(self, from: *const bf16, count: usize) -> __m512 {
        // SAFETY: as above.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(count), from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn load_f16_part(self, from: *const f16, count: usize) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_i8_part(self, from: *const i8, count: usize) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(count), from))) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: __m512) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_ps(to, x) }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, x: __m512) {
        // SAFETY: the caller's promise, and for the first branch that `BF16` is true only where the processor has it.
        unsafe {
            let rounded = if BF16 {
                std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(x))
            } else {
                let bits = _mm512_castps_si512(x);
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                let up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
                let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
                let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
                _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, up, quiet)))
            };
            _mm256_storeu_si256(to.cast(), rounded);
        }
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16, x: __m512) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        register!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn add_where(self, x: __m512, bits: u32, more: f32) -> __m512 {
        register!(_mm512_mask_add_ps(x, bits as __mmask16, x, _mm512_set1_ps(more)))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        register!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        register!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        register!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        register!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn select_less(self, a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
        register!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        register!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn round(self, x: __m512) -> __m512 {
        register!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x))
    }

    #[inline(always)]
    fn scale_or_zero(self, x: __m512, exponent: __m512, limit: __m512) -> __m512 {
        register!({
            let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(limit, _mm512_set1_ps(-126.0));
            _mm512_maskz_scalef_ps(keep, x, exponent)
        })
    }

    #[inline(always)]
    fn sum(self, x: __m512) -> f32 {
        register!(_mm512_reduce_add_ps(x))
    }

    #[inline(always)]
    fn sums(self, [a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        register!({
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
            let low = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
            let high = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
            // Each quarter now holds four partial sums, one of each vector.
            let quarters = _mm512_add_ps(low, high);
            let halves = _mm512_castps_pd(quarters);
            let two =
                _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(halves)));
            let one = _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps::<1>(two));
            std::mem::transmute::<__m128, [f32; 4]>(one)
        })
    }

    #[inline(always)]
    fn largest(self, x: __m512) -> f32 {
        register!(_mm512_reduce_max_ps(x))
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const u8, from_stride_bytes: usize, to: *mut f32, to_stride: usize) {
        let mut quads = [self.splat(0.0); 16];
        for group in 0..4 {
            // SAFETY: the caller's promise, for each row.
            let [a, b, c, d] = unsafe {
                let first = from.add(4 * group * from_stride_bytes);
                [
                    self.load(first.cast()),
                    self.load(first.add(from_stride_bytes).cast()),
                    self.load(first.add(2 * from_stride_bytes).cast()),
                    self.load(first.add(3 * from_stride_bytes).cast()),
                ]
            };
            let pairs = register!({
                [
                    _mm512_castps_pd(_mm512_unpacklo_ps(a, b)),
                    _mm512_castps_pd(_mm512_unpackhi_ps(a, b)),
                    _mm512_castps_pd(_mm512_unpacklo_ps(c, d)),
                    _mm512_castps_pd(_mm512_unpackhi_ps(c, d)),
                ]
            });
            // Lane `k` of `quads[4 * group + c]` now holds rows `4 * group ..+ 4` of column `4 * k + c`.
            register!({
                quads[4 * group] = _mm512_castpd_ps(_mm512_unpacklo_pd(pairs[0], pairs[2]));
                quads[4 * group + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pairs[0], pairs[2]));
                quads[4 * group + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pairs[1], pairs[3]));
                quads[4 * group + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pairs[1], pairs[3]));
            });
        }
        for column in 0..4 {
            let (a, b, c, d) = (quads[column], quads[4 + column], quads[8 + column], quads[12 + column]);
            let columns = register!({
                let (upper_even, upper_odd) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
                let (lower_even, lower_odd) = (_mm512_shuffle_f32x4::<0x88>(c, d), _mm512_shuffle_f32x4::<0xdd>(c, d));
                [
                    _mm512_shuffle_f32x4::<0x88>(upper_even, lower_even),
                    _mm512_shuffle_f32x4::<0x88>(upper_odd, lower_odd),
                    _mm512_shuffle_f32x4::<0xdd>(upper_even, lower_even),
                    _mm512_shuffle_f32x4::<0xdd>(upper_odd, lower_odd),
                ]
            });
            for (lane, words) in columns.into_iter().enumerate() {
                // SAFETY: the caller's promise.
                unsafe { self.store(to.add((4 * lane + column) * to_stride), words) };
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

impl Native for Avx512<false> {
    type Bf16 = f32;
}

impl Native for Avx512<true> {
    type Bf16 = Bf16Pair;
}

/// Two bf16, the first in the lower half.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct Bf16Pair(u32);

impl Bf16Pair {
    /// Pairs of an element of each of two rows, as many as are whole vectors of 16; returns how many.
    #[inline(always)]
    pub fn interleave(_: Avx512<true>, even: &[bf16], odd: &[bf16], to: &mut [Self]) -> usize {
        const LOW: [u16; 32] = interleaved(0);
        const HIGH: [u16; 32] = interleaved(16);
        let count = even.len().min(odd.len()).min(to.len()) / 16 * 16;
        // SAFETY: every access is below `count`, but for the masked ones of a last half, which touch 16 elements.
        unsafe {
            let (low, high) = (_mm512_loadu_si512(LOW.as_ptr().cast()), _mm512_loadu_si512(HIGH.as_ptr().cast()));
            for at in (0..count).step_by(32) {
                let mask = if count - at < 32 { 0xffff } else { u32::MAX };
                let even = _mm512_maskz_loadu_epi16(mask, even.as_ptr().add(at).cast());
                let odd = _mm512_maskz_loadu_epi16(mask, odd.as_ptr().add(at).cast());
                let to = to.as_mut_ptr().add(at);
                _mm512_storeu_si512(to.cast(), _mm512_permutex2var_epi16(even, low, odd));
                if count - at >= 32 {
                    _mm512_storeu_si512(to.add(16).cast(), _mm512_permutex2var_epi16(even, high, odd));
                }
            }
        }
        count
    }
}

/// Which elements of two vectors of 32 become 16 pairs, from element `first` of each on.
const fn interleaved(first: u16) -> [u16; 32] {
    let mut from = [0; 32];
    let mut at = 0;
    while at < 32 {
        from[at as usize] = first + at / 2 + 32 * (at % 2);
        at += 1;
    }
    from
}

impl Unit<Avx512<true>> for Bf16Pair {
    const DEPTH: usize = 2;
    type Operand = __m512i;

    #[inline(always)]
    unsafe fn load(_: Avx512<true>, from: *const Self) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn broadcast(_: Avx512<true>, from: *const Self) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_set1_epi32((*from).0 as i32) }
    }

    #[inline(always)]
    fn mul_add(_: Avx512<true>, a: __m512i, b: __m512i, acc: __m512) -> __m512 {
        // SAFETY: the two types are names of the same 64 bytes; the rest is as in `register`.
        register!({
            let (a, b) = (std::mem::transmute::<__m512i, __m512bh>(a), std::mem::transmute::<__m512i, __m512bh>(b));
            _mm512_dpbf16_ps(acc, a, b)
        })
    }

    #[inline(always)]
    fn put(_: Avx512<true>, to: &mut [Self], low: __m512, high: __m512) {
        assert!(to.len() >= 16);
        // SAFETY: the assertion above; the transmute renames the same 64 bytes.
        unsafe {
            let pairs = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
            _mm512_storeu_si512(to.as_mut_ptr().cast(), pairs);
        }
    }

    #[inline(always)]
    fn put_rows(_: Avx512<true>, to: &mut [Self], even: __m512, odd: __m512) {
        assert!(to.len() >= 16);
        // SAFETY: the assertion above; the transmute renames the same 64 bytes.
        unsafe {
            // One conversion for both rows, whose halves are then interleaved.
            let halves = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(odd, even));
            let even = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(halves));
            let odd = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64::<1>(halves));
            let pairs = _mm512_or_si512(even, _mm512_slli_epi32::<16>(odd));
            _mm512_storeu_si512(to.as_mut_ptr().cast(), pairs);
        }
    }

    #[inline(always)]
    fn has_tiles(simd: Avx512<true>) -> bool {
        simd.tiles
    }

    #[inline(always)]
    unsafe fn multiply_tiles(
        simd: Avx512<true>,
        extents: Extents,
        a: Left<'_, Self>,
        b: Right<'_, Self>,
        c: &mut [f32],
        c_stride: usize,
        add: bool,
    ) -> bool {
        if !simd.tiles || (a.step_stride != 1 && a.row_stride != 1) {
            return false;
        }
        let matrix = |at, stride: usize| amx::Matrix { at, row_bytes: 4 * stride };
        let b = matrix(b.units.as_ptr(), b.stride);
        let c = amx::Matrix { at: c.as_mut_ptr(), row_bytes: 4 * c_stride };
        // SAFETY: the caller's promise; with `tiles` those of this thread are configured.
        unsafe {
            match a.step_stride {
                1 => amx::product(extents, matrix(a.units.as_ptr(), a.row_stride), b, c, add),
                _ => amx::product_across(simd, extents, (a.units.as_ptr(), a.step_stride), b, c, add),
            }
        }
        true
    }
}
