//! Signed bytes with a scale for each row or one for the matrix (`weight_scale`), as llm-compressor writes W8A8 (`compressed-tensors`).
//!
//! Where activations are static there is one scale for the inputs of a layer, of all tokens (`input_scale`): what activations that are
//! rounded to `int8` are then divided by. Else each token has its own.

use super::{Module, Repacked};
use crate::format::{Int8, RowFormat};
use safetensors::Dtype;

/// A layer of W8A8.
///
/// # Errors
/// As [`Module::repack`].
pub fn rows<'a>(module: &mut Module<'a>, [rows, width]: [usize; 2]) -> Result<Repacked<'a>, String> {
    let codes = module.bytes(".weight", Dtype::I8, &[rows, width])?;
    let scales = module.numbers(".weight_scale", &[&[rows, 1], &[rows], &[1], &[]])?;
    let input_scale = match module.has(".input_scale") {
        true => Some(module.numbers(".input_scale", &[&[1], &[]])?.at(0)),
        false => None,
    };
    if let Some(scale) = input_scale.filter(|&scale| scale <= 0.0) {
        return Err(format!("tensor '{}.input_scale' holds {scale}; it must be above 0", module.name));
    }
    let is_one = scales.len() == 1;
    let put = move |row: usize, to: &mut [u8]| {
        let codes = codes[row * width..][..width].iter().map(|&code| code.cast_signed());
        Int8::put(scales.at(if is_one { 0 } else { row }), codes, to);
    };
    Ok(Repacked { format: RowFormat::Int8(Int8), order: None, input_scale, put: Box::new(put) })
}
