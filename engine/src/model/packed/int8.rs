//! Signed bytes with a scale for each row: of LLM.int8 ([`super::bitsandbytes`]), and of W8A8 as llm-compressor writes it (`compressed-tensors`).
//!
//! Where activations of W8A8 are static there is one scale for the inputs of a layer, of all tokens (`input_scale`): what activations
//! that are rounded to `int8` are then divided by. Else each token has its own.

use super::{Module, Repacked};
use crate::format::{Int8, RowFormat};
use safetensors::Dtype;

/// A layer of W8A8.
///
/// # Errors
/// As [`Module::repack`].
pub fn rows<'a>(module: &mut Module<'a>, shape: [usize; 2]) -> Result<Repacked<'a>, String> {
    let scale = module.row_scales(shape[0])?;
    Ok(Repacked { input_scale: module.input_scale()?, ..repacked(module, shape, scale)? })
}

/// Codes of rows under the scale that `scale` has for each.
///
/// # Errors
/// As [`Module::repack`].
pub fn repacked<'a>(
    module: &mut Module<'a>,
    [rows, width]: [usize; 2],
    scale: impl Fn(usize) -> f32 + Sync + 'a,
) -> Result<Repacked<'a>, String> {
    let codes = module.bytes(".weight", Dtype::I8, &[rows, width])?;
    let put = move |row: usize, to: &mut [u8]| {
        let codes = codes[row * width..][..width].iter().map(|&code| code.cast_signed());
        Int8::put(scale(row), codes, to);
    };
    Ok(Repacked { format: RowFormat::Int8(Int8), order: None, input_scale: None, put: Box::new(put) })
}
