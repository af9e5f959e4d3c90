//! 8-bit floats `E4M3` with f32 scales: of blocks of rows and inputs (`weight_scale_inv`, which is a factor in spite of its name), or
//! of rows or the whole matrix (`weight_scale`).
//!
//! Blocks at the ends may be cut off. A row gets the scale of its part of each block. Activations, which the programs that write these
//! folders round to 8 bits too, stay as they are here, whatever scales they have for them.

use super::{Module, Repacked};
use crate::format::{Fp8Scaled, RowFormat, most_within};
use safetensors::Dtype;

/// A layer with a scale for each block.
///
/// # Errors
/// As [`Module::repack`].
pub fn blocks<'a>(
    module: &mut Module<'a>,
    shape: [usize; 2],
    [of_rows, of_inputs]: [usize; 2],
) -> Result<Repacked<'a>, String> {
    let [rows, width] = shape;
    let across = width.div_ceil(of_inputs);
    let scales = module.numbers(".weight_scale_inv", &[&[rows.div_ceil(of_rows), across]])?;
    let group = if across == 1 { width } else { of_inputs };
    repacked(module, shape, group, move |row, column| scales.at(row / of_rows * across + column / of_inputs))
}

/// A layer with a scale for each row, or one.
///
/// # Errors
/// As [`Module::repack`].
pub fn rows<'a>(module: &mut Module<'a>, shape: [usize; 2]) -> Result<Repacked<'a>, String> {
    let [rows, width] = shape;
    let scale = module.row_scales(rows)?;
    repacked(module, shape, width, move |row, _| scale(row))
}

/// Codes under the scale that `scale` has for a row and a column; columns of a group share one.
fn repacked<'a>(
    module: &mut Module<'a>,
    [rows, width]: [usize; 2],
    group: usize,
    scale: impl Fn(usize, usize) -> f32 + Sync + 'a,
) -> Result<Repacked<'a>, String> {
    let name = module.name;
    let codes = module.bytes(".weight", Dtype::F8_E4M3, &[rows, width])?;
    module.input_scale()?;
    if let Some(at) = codes.iter().position(|code| code & 0x7f == 0x7f) {
        return Err(format!(
            "tensor '{name}.weight' holds NaN at {:?}; every number must be finite",
            [at / width, at % width]
        ));
    }
    let block = most_within(group).and_then(|most| {
        let fits = |&block: &usize| block <= most && width.is_multiple_of(block);
        [256, 128, 64, 32].into_iter().find(fits)
    });
    let block = block.ok_or_else(|| format!("'{name}' has {width} inputs; of fp8 a multiple of 32 is read"))?;
    let put = move |row: usize, to: &mut [u8]| {
        let codes = codes[row * width..][..width].chunks_exact(block);
        for (index, (codes, to)) in codes.zip(to.chunks_exact_mut(4 + block)).enumerate() {
            Fp8Scaled::put(scale(row, index * block), codes, to);
        }
    };
    Ok(Repacked {
        format: RowFormat::Fp8Scaled(Fp8Scaled::new(block)),
        order: None,
        input_scale: None,
        put: Box::new(put),
    })
}
