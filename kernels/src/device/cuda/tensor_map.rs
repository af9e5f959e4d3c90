//! TMA descriptors: the extents, strides and swizzle by which Hopper's copy engine fetches tiles of a tensor.
//!
//! A map is 128 opaque bytes that the driver makes from the tensor's address, extents and strides, and from the box. A
//! kernel gets it by value. Boxes are rows of 64 elements, the width of the swizzle that tensor cores read; what a box
//! has outside the tensor becomes zero.

use super::{CudaError, DeviceBuffer, doing};
use crate::tensor::DType;
use cudarc::driver::DeviceRepr;
use cudarc::driver::sys::{
    CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle, cuTensorMapEncodeTiled,
};
use std::ffi::c_void;
use std::marker::PhantomData;

/// Elements of a box's row: 128 bytes of a 16-bit type.
const BOX_COLUMNS: usize = 64;
/// The most rows that a box can have.
const MOST_BOX_ROWS: usize = 256;

/// A tensor `[lists, rows, columns]` of a 16-bit type, in tiles of some rows and 64 columns. It borrows its buffer.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct TensorMap<'a> {
    map: CUtensorMap,
    buffer: PhantomData<&'a DeviceBuffer>,
}

// SAFETY: the struct is `repr(C)` and 128 bytes without padding, as `TensorMap` in kernels/hopper.cuh. `new` compares the
// buffer with the extents that the copy engine keeps to.
unsafe impl DeviceRepr for TensorMap<'_> {}

impl<'a> TensorMap<'a> {
    /// The map of a dense tensor at the start of `buffer`.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when the buffer is smaller than the extents say, or the type, the extents or the box are none
    /// that a map can have; [`CudaError::Driver`] when the driver refuses it.
    pub(crate) fn new(
        buffer: &'a DeviceBuffer,
        dtype: DType,
        extents: [usize; 3],
        box_rows: usize,
    ) -> Result<Self, CudaError> {
        let [lists, rows, columns] = extents;
        let element = match dtype {
            DType::Bf16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            DType::F16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            DType::F32 => return Err(CudaError::Operand("a TMA descriptor of f32; it takes bf16 or f16".into())),
        };
        let row_bytes = columns * dtype.bytes();
        let bytes = lists * rows * row_bytes;
        if buffer.bytes() < bytes as u64 || bytes == 0 {
            let has = buffer.bytes();
            return Err(CudaError::Operand(format!("a TMA descriptor of {bytes} bytes over a buffer of {has}")));
        }
        if !columns.is_multiple_of(BOX_COLUMNS) || !(1..=MOST_BOX_ROWS).contains(&box_rows) || rows >= 1 << 31 {
            return Err(CudaError::Operand(format!(
                "a TMA descriptor of {rows} rows of {columns} in tiles of {box_rows} rows; it takes less than 2^31 rows of a \
                 multiple of {BOX_COLUMNS}, and tiles of 1 to {MOST_BOX_ROWS} rows"
            )));
        }
        let lengths = [columns as u64, rows as u64, lists as u64];
        let strides = [row_bytes as u64, (rows * row_bytes) as u64];
        let boxes = [BOX_COLUMNS as u32, box_rows as u32, 1];
        let mut map = CUtensorMap { opaque: [0; 16] };
        // SAFETY: the driver has the function (its version was asked). It writes the map, and reads as many numbers as the
        // rank, 3, says: one stride less. It does not touch the tensor's memory.
        let result = unsafe {
            cuTensorMapEncodeTiled(
                &mut map,
                element,
                3,
                buffer.address() as *mut c_void,
                lengths.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                [1u32; 3].as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        result.result().map_err(doing("making a TMA descriptor"))?;
        Ok(TensorMap { map, buffer: PhantomData })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_struct_has_the_size_that_cuda_gives_it() {
        assert_eq!(size_of::<TensorMap>(), 128);
    }
}
