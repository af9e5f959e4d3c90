//! bitsandbytes: NF4 with a scale for each block of the matrix as it lies, perhaps kept in eight bits itself, and bytes with a scale for
//! each row.
//!
//! NF4 has two codes to a byte, the first in the high bits, row after row (`weight`, U8 `[elements / 2, 1]`), and for each `blocksize`
//! elements a scale, `weight.absmax`. With nested quantisation that is a code of 8 bits: `scale = nested_quant_map[code] *
//! nested_absmax[at / nested_blocksize] + nested_offset`, in f32 and in this order, which is carried out here once, as the package does
//! it whenever it multiplies. `weight.quant_map` must be the levels of NF4. LLM.int8 has codes `weight` (I8) and the largest magnitude
//! of each row, `SCB`: `x = code * SCB / 127`. Its activations, which that package rounds to bytes too, stay as they are here.

use super::{Module, Repacked, int8};
use crate::format::{NF4_LEVELS, Nf4, RowFormat, most_within};
use safetensors::Dtype;
use serde_json::Value;

/// A layer of NF4.
///
/// # Errors
/// As [`Module::repack`].
pub fn nf4<'a>(module: &mut Module<'a>, [rows, width]: [usize; 2]) -> Result<Repacked<'a>, String> {
    let name = module.name;
    let state = State::read(module)?;
    if state.shape != [rows, width] {
        return Err(format!(
            "'{name}' is of shape {:?} as its quant_state says; {:?} is needed",
            state.shape,
            [rows, width]
        ));
    }
    if !width.is_multiple_of(state.block) {
        return Err(format!("'{name}' has {width} inputs; blocks of {} must divide them", state.block));
    }
    let block = most_within(state.block);
    let block =
        block.ok_or_else(|| format!("'{name}' has a blocksize of {}; it must be a multiple of 32", state.block))?;
    let codes = module.bytes(".weight", Dtype::U8, &[rows * width / 2, 1])?;
    let levels = module.numbers(".weight.quant_map", &[&[16]])?;
    if let Some(at) = (0..16).find(|&at| levels.at(at) != NF4_LEVELS[at]) {
        let (level, known) = (levels.at(at), NF4_LEVELS[at]);
        return Err(format!("'{name}.weight.quant_map' has {level} at {at}; nf4 has {known}"));
    }
    let scales = Scales::read(module, &state, rows * width / state.block)?;
    let per_block = state.block;
    let put = move |row: usize, to: &mut [u8]| {
        for (index, to) in to.chunks_exact_mut(4 + block / 2).enumerate() {
            let first = row * width + index * block;
            let code = |element: usize| {
                let at = first + element;
                codes[at / 2] >> (4 * (1 - at % 2)) & 15
            };
            Nf4::put_wide(scales.at(first / per_block), code, to);
        }
    };
    Ok(Repacked { format: RowFormat::Nf4(Nf4::wide(block)), order: None, input_scale: None, put: Box::new(put) })
}

/// What `weight.quant_state.bitsandbytes__nf4` says, a text of JSON.
struct State {
    block: usize,
    shape: Vec<usize>,
    /// Scales that share one of their own, and what is added to each.
    nested: Option<(usize, f32)>,
}

impl State {
    fn read(module: &mut Module<'_>) -> Result<Self, String> {
        const END: &str = ".weight.quant_state.bitsandbytes__nf4";
        let name = module.name;
        let (_, _, text) = module.entry(END)?;
        let json: Value =
            serde_json::from_slice(text).map_err(|error| format!("tensor '{name}{END}' is not JSON: {error}"))?;
        let missing = |key: &str| format!("tensor '{name}{END}' has no {key} that is understood");
        let count = |key: &str| json.get(key).and_then(Value::as_u64).filter(|&n| n > 0).map(|n| n as usize);
        let shape: Option<Vec<usize>> = json
            .get("shape")
            .and_then(Value::as_array)
            .and_then(|shape| shape.iter().map(|extent| extent.as_u64().map(|extent| extent as usize)).collect());
        let nested = match module.has(".weight.nested_absmax") {
            false => None,
            true => {
                let offset = json.get("nested_offset").and_then(Value::as_f64).map(|x| x as f32);
                let offset = offset.filter(|x| x.is_finite()).ok_or_else(|| missing("nested_offset"))?;
                Some((count("nested_blocksize").ok_or_else(|| missing("nested_blocksize"))?, offset))
            }
        };
        Ok(State {
            block: count("blocksize").ok_or_else(|| missing("blocksize"))?,
            shape: shape.ok_or_else(|| missing("shape"))?,
            nested,
        })
    }
}

/// The scales of blocks.
enum Scales<'a> {
    Plain(super::Numbers<'a>),
    Nested { codes: &'a [u8], levels: super::Numbers<'a>, scales: super::Numbers<'a>, block: usize, offset: f32 },
}

impl<'a> Scales<'a> {
    fn read(module: &mut Module<'a>, state: &State, blocks: usize) -> Result<Self, String> {
        let Some((block, offset)) = state.nested else {
            return module.numbers(".weight.absmax", &[&[blocks]]).map(Scales::Plain);
        };
        Ok(Scales::Nested {
            codes: module.bytes(".weight.absmax", Dtype::U8, &[blocks])?,
            levels: module.numbers(".weight.nested_quant_map", &[&[256]])?,
            scales: module.numbers(".weight.nested_absmax", &[&[blocks.div_ceil(block)]])?,
            block,
            offset,
        })
    }

    fn at(&self, at: usize) -> f32 {
        match self {
            Scales::Plain(scales) => scales.at(at),
            Scales::Nested { codes, levels, scales, block, offset } => {
                levels.at(usize::from(codes[at])) * scales.at(at / block) + offset
            }
        }
    }
}

/// A layer of LLM.int8.
///
/// # Errors
/// As [`Module::repack`].
pub fn int8<'a>(module: &mut Module<'a>, shape: [usize; 2]) -> Result<Repacked<'a>, String> {
    let [rows, _] = shape;
    let most = module.numbers(".SCB", &[&[rows]])?;
    if module.has(".weight_format") {
        let (dtype, shape, bytes) = module.entry(".weight_format")?;
        if bytes.iter().any(|&byte| byte != 0) {
            let name = module.name;
            return Err(format!("tensor '{name}.weight_format' is {dtype:?} {shape:?} {bytes:?}; it must be 0, rows"));
        }
    }
    int8::repacked(module, shape, move |row| most.at(row) / 127.0)
}
