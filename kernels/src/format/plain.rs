//! Rows of plain elements: f32, bf16, f16.

use super::RowCodec;
use crate::device::simd::reader::Plain;
use crate::named::{Named, NamedError};
use crate::tensor::DType;
use half::{bf16, f16};

macro_rules! plain {
    ($type:ty, $dtype:expr, $name:literal, $about:literal) => {
        impl RowCodec for Plain<$type> {
            const NAME: &'static str = $name;
            const ABOUT: &'static str = $about;

            fn build(_: &Named) -> Result<Self, NamedError> {
                Ok(Plain::NEW)
            }

            fn encode(self, row: &[f32], to: &mut [u8]) {
                $dtype.encode(row, to);
            }

            fn decode(self, from: &[u8], first: usize, to: &mut [f32]) {
                $dtype.decode(&from[first * $dtype.bytes()..][..to.len() * $dtype.bytes()], to);
            }
        }
    };
}

plain!(f32, DType::F32, "f32", "32-bit floats: nothing is rounded");
plain!(bf16, DType::Bf16, "bf16", "16-bit brain floats: the range of f32, 8 bits of precision");
plain!(f16, DType::F16, "f16", "16-bit IEEE floats: 11 bits of precision, up to 65504");
