//! Vectors of bytes and of numbers over four groups: a lane of 128 bits for each.
//!
//! What unpacking and products need of an instruction set is [`Lanes`]; each layout of codes and the product itself are written once
//! over it.

use super::super::Simd;
use std::arch::x86_64::*;

/// Four lanes of 128 bits. A value of an implementing type is the proof that the processor has the instructions.
pub trait Lanes: Copy {
    /// Vectors of f32 beside them.
    type Simd: Simd;
    /// 16 bytes in each lane.
    type Bytes: Copy;
    /// Four f32 in each lane.
    type Numbers: Copy;
    /// What stands for zero where bytes are [`Lanes::signed`].
    const ZERO: f32;

    /// The vectors of f32.
    fn simd(self) -> Self::Simd;

    /// 16 bytes from each place.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn load(self, from: [*const u8; 4]) -> Self::Bytes;
    /// A byte everywhere.
    fn byte(self, byte: u8) -> Self::Bytes;
    /// The same 16 bytes in every lane.
    fn all(self, bytes: __m128i) -> Self::Bytes;
    /// Bits that both have.
    fn and(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// Bits that one of them has.
    fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// Words of 32 bits, turned left by as many bits as each lane says.
    fn turn_left(self, bytes: Self::Bytes, bits: [u32; 4]) -> Self::Bytes;
    /// Words of 32 bits, shifted right by as many bits as each lane says.
    fn shift_right(self, bytes: Self::Bytes, bits: [u32; 4]) -> Self::Bytes;
    /// `value` in those bytes of each lane whose bit is set.
    fn where_set(self, bits: [u16; 4], value: u8) -> Self::Bytes;
    /// What a table has for each byte, which is below 16.
    fn look_up(self, table: [i8; 16], bytes: Self::Bytes) -> Self::Bytes;
    /// Signed bytes in the form in which [`Lanes::dot`] takes them.
    fn signed(self, bytes: Self::Bytes) -> Self::Bytes;

    /// Four numbers, each in all of its lane.
    fn spread(self, numbers: __m128) -> Self::Numbers;
    /// Eight numbers: in each lane one of the first four, one of the second, and both again.
    fn spread_pairs(self, even: __m128, odd: __m128) -> Self::Numbers;
    /// A number everywhere.
    fn splat(self, number: f32) -> Self::Numbers;
    /// `a b`.
    fn mul(self, a: Self::Numbers, b: Self::Numbers) -> Self::Numbers;
    /// `a b + c`.
    fn mul_add(self, a: Self::Numbers, b: Self::Numbers, c: Self::Numbers) -> Self::Numbers;

    /// Sums of four products each, of codes of `w` and signed bytes of `x`; codes of `w` are [`Lanes::signed`], or without a sign and at most
    /// 63.
    fn dot<const SIGNED: bool, const PARTS: usize>(
        self,
        w: [Self::Bytes; PARTS],
        x: [Self::Bytes; PARTS],
    ) -> Self::Numbers;
    /// Sums that add up to those of all lanes.
    fn fold(self, a: Self::Numbers, b: Self::Numbers) -> <Self::Simd as Simd>::Vector;
    /// Codes of a [`Quad`](super::Quad).
    fn codes(self, codes: &[[i8; 16]; 4]) -> Self::Bytes;
    /// Numbers of a [`Quad`](super::Quad).
    fn numbers(self, numbers: &[[f32; 4]; 4]) -> Self::Numbers;
}
