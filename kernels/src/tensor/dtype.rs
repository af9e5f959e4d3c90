//! Element types and their conversion to and from f32, the type in which every kernel accumulates.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

/// Element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// 32-bit IEEE.
    F32,
    /// 16-bit brain float: f32's exponent, 8 bits of mantissa.
    Bf16,
    /// 16-bit IEEE.
    F16,
}

impl DType {
    /// Every element type.
    pub const ALL: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::Bf16 | DType::F16 => 2,
        }
    }

    /// Name as it stands on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
        }
    }

    /// Rounds `source` into raw elements of this type; `target` holds `source.len() * self.bytes()` bytes.
    pub fn encode(self, source: &[f32], target: &mut [u8]) {
        match self {
            DType::F32 => target.copy_from_slice(bytemuck::cast_slice(source)),
            DType::F16 => bytemuck::cast_slice_mut::<u8, f16>(target).convert_from_f32_slice(source),
            DType::Bf16 => narrow_bf16(source, bytemuck::cast_slice_mut(target)),
        }
    }

    /// Widens raw elements of this type into `target`. They may lie at any address, as those of a mapped file do.
    pub fn decode(self, source: &[u8], target: &mut [f32]) {
        match self {
            DType::F32 => bytemuck::cast_slice_mut(target).copy_from_slice(source),
            DType::F16 => aligned::<f16>(source).convert_to_f32_slice(target),
            DType::Bf16 => widen_bf16(&aligned(source), target),
        }
    }
}

/// Elements where they lie, or copied where their address is none of their type's.
fn aligned<T: bytemuck::Pod>(source: &[u8]) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(source) {
        Ok(elements) => Cow::Borrowed(elements),
        Err(_) => Cow::Owned(source.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()),
    }
}

/// bf16 to f32 is a shift; written as one so that it vectorises on every target.
pub(crate) fn widen_bf16(source: &[bf16], target: &mut [f32]) {
    for (wide, narrow) in target.iter_mut().zip(source) {
        *wide = f32::from_bits(u32::from(narrow.to_bits()) << 16);
    }
}

/// f32 to the nearest bf16, ties to even, in integers, so that it vectorises on every target.
fn narrow_bf16(source: &[f32], target: &mut [bf16]) {
    for (narrow, wide) in target.iter_mut().zip(source) {
        let bits = wide.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
        // A NaN stays one, and becomes quiet.
        let bits = if wide.is_nan() { bits >> 16 | 0x40 } else { rounded };
        *narrow = bf16::from_bits(bits as u16);
    }
}

impl fmt::Display for DType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        DType::ALL
            .into_iter()
            .find(|dtype| dtype.name() == text)
            .ok_or_else(|| format!("unknown dtype '{text}'; use f32, bf16 or f16"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_widened_wherever_they_lie() {
        let values = [1.0, -2.5, 0.0, 96.0, -0.125];
        for dtype in DType::ALL {
            let mut bytes = vec![0; dtype.bytes() * values.len()];
            dtype.encode(&values, &mut bytes);
            for offset in 0..4 {
                let shifted = [vec![0; offset], bytes.clone()].concat();
                let mut widened = [0.0; 5];
                dtype.decode(&shifted[offset..], &mut widened);
                assert_eq!(widened, values, "{dtype} at {offset}");
            }
        }
    }

    #[test]
    fn bf16_is_rounded_to_the_nearest_as_the_library_of_the_type_does() {
        let edges = [0.0, -0.0, f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE, 1e-45];
        // Every upper half beside every kind of lower half: below, at and above the middle, and NaNs of all these.
        let halves =
            (0..=u16::MAX).flat_map(|upper| [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF].map(|lower| (upper, lower)));
        let all = halves.map(|(upper, lower): (u16, u32)| f32::from_bits(u32::from(upper) << 16 | lower));
        let values: Vec<f32> = all.chain(edges).collect();
        let mut bytes = vec![0; 2 * values.len()];
        DType::Bf16.encode(&values, &mut bytes);
        let rounded: &[u16] = bytemuck::cast_slice(&bytes);
        let expected: Vec<u16> = values.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
        assert!(rounded == expected);
    }
}
