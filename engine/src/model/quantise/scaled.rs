//! Folders whose matrices are small numbers under scales, each rounded by itself: NF4 as bitsandbytes has it, and 8-bit floats or bytes with
//! a scale for each output as llm-compressor writes them (`compressed-tensors`).
//!
//! NF4's scales may be codes themselves ([`nested`]), and 8-bit floats have a scale for each block of rows and inputs, as DeepSeek's.
//! Bytes are the weights of W8A8: programs that read such a folder round activations to bytes too. Each token has a scale of its own, or
//! (static) each layer one for all, by the largest number that it read of a text ([`read_inputs`]); inputs may be smoothed ([`smooth`]).

mod codes;
mod nested;

use self::nested::Nested;
use super::Quantised;
use super::fold::{Factors, Fold, input_of};
use super::folder::{Layout, Part, Plain, write};
use super::inputs::{Channels, read_inputs};
use super::moments::INPUTS;
use super::smooth::smooth;
use super::walk::Calibration;
use crate::device::Cpu;
use crate::format::{Int8, NF4_LEVELS, SIGNED};
use crate::memory::{Arena, Label};
use crate::model::ModelError;
use crate::model::parameters::{Make, Role};
use crate::named::{Named, NamedError, Parameter};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// How a folder's matrices are scaled and rounded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scaled {
    /// Four bits, levels of a normal distribution, an f32 scale for each `block` of a row.
    Nf4 {
        /// Elements that share a scale.
        block: usize,
        /// Whether scales are codes of eight bits.
        nested: bool,
    },
    /// `E4M3` with an f32 scale for each row.
    Fp8 {
        /// Rows and inputs that share a scale, where it is not a row.
        block: Option<usize>,
    },
    /// Bytes with an f32 scale for each row.
    W8a8 {
        /// Whether the inputs of a layer have one scale, of all tokens.
        is_static: bool,
        /// How much of the outliers of inputs weights take over, from 0 to 1, if any (SmoothQuant).
        smoothing: Option<f32>,
    },
}

const BLOCK: Parameter =
    Parameter { name: "block", default: "64", about: "inputs that share a scale: 32, 64, 128 or 256" };
const NESTED: Parameter = Parameter {
    name: "nested",
    default: "false",
    about: "whether scales are kept in eight bits under scales of their own (QLoRA's double quantisation)",
};
const FP8_BLOCK: Parameter = Parameter {
    name: "block",
    default: "none",
    about: "rows and inputs that share a scale, 32, 64 or 128 as DeepSeek's, where none has one for each output",
};
const ACTIVATIONS: Parameter = Parameter {
    name: "activations",
    default: "token",
    about: "whose scale activations have: token, or static, which is one for all tokens of a text",
};
const SMOOTHING: Parameter = Parameter {
    name: "smoothing",
    default: "none",
    about: "part of the outliers of inputs, from 0 to 1, that the weights take over (SmoothQuant's alpha)",
};
/// Names, and what each may be asked for.
const METHODS: [(&str, &[Parameter]); 3] =
    [("nf4", &[BLOCK, NESTED]), ("fp8", &[FP8_BLOCK]), ("w8a8", &[ACTIVATIONS, SMOOTHING])];
/// Rows that are rounded together: a multiple of what share a scale.
const BLOCK_ROWS: usize = 128;

impl Scaled {
    /// The names of all.
    pub fn names() -> [&'static str; 3] {
        METHODS.map(|(name, _)| name)
    }

    /// Whether it needs a text.
    pub fn reads_text(self) -> bool {
        self.is_static() || matches!(self, Scaled::W8a8 { smoothing: Some(_), .. })
    }

    fn is_static(self) -> bool {
        matches!(self, Scaled::W8a8 { is_static: true, .. })
    }
}

impl FromStr for Scaled {
    type Err = NamedError;

    fn from_str(text: &str) -> Result<Self, NamedError> {
        let named: Named = text.parse()?;
        let (name, known) = *named.find("format", &METHODS, |(name, _)| name)?;
        named.check(known)?;
        match name {
            "fp8" => match named.text("block").unwrap_or("none") {
                "none" => Ok(Scaled::Fp8 { block: None }),
                _ => match named.count("block", 128, 32)? {
                    block @ (32 | 64 | 128) => Ok(Scaled::Fp8 { block: Some(block) }),
                    _ => Err(named.wrong("block", "32, 64, 128 or none".into())),
                },
            },
            "w8a8" => {
                let is_static = match named.text("activations").unwrap_or("token") {
                    "token" => false,
                    "static" => true,
                    _ => return Err(named.wrong("activations", "token or static".into())),
                };
                let smoothing = match named.text("smoothing").unwrap_or("none") {
                    "none" => None,
                    _ => Some(named.number("smoothing", 0.5, 0.0..=1.0)? as f32),
                };
                Ok(Scaled::W8a8 { is_static, smoothing })
            }
            _ => match named.count("block", 64, 32)? {
                block @ (32 | 64 | 128 | 256) => Ok(Scaled::Nf4 { block, nested: named.flag("nested", false)? }),
                _ => Err(named.wrong("block", "32, 64, 128 or 256".into())),
            },
        }
    }
}

impl fmt::Display for Scaled {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scaled::Nf4 { block, nested } => {
                write!(formatter, "nf4:block={block}{}", if *nested { ",nested=true" } else { "" })
            }
            Scaled::Fp8 { block: None } => write!(formatter, "fp8"),
            Scaled::Fp8 { block: Some(block) } => write!(formatter, "fp8:block={block}"),
            Scaled::W8a8 { is_static, smoothing } => {
                let activations = is_static.then(|| "activations=static".to_owned());
                let parameters: Vec<_> =
                    activations.into_iter().chain(smoothing.map(|of| format!("smoothing={of}"))).collect();
                let colon = if parameters.is_empty() { "" } else { ":" };
                write!(formatter, "w8a8{colon}{}", parameters.join(","))
            }
        }
    }
}

/// What bitsandbytes reads of a matrix besides its numbers; with nested scales as long for any offset.
fn quant_state(shape: [usize; 2], block: usize, offset: Option<f32>) -> String {
    const OFFSET_DIGITS: usize = 24;
    let mut state = json!({"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": shape});
    let Some(offset) = offset else { return state.to_string() };
    for (key, value) in
        [("nested_blocksize", json!(nested::BLOCK)), ("nested_dtype", json!("float32")), ("nested_offset", json!(0.0))]
    {
        state[key] = value;
    }
    let wide = state.to_string().len() + OFFSET_DIGITS;
    state["nested_offset"] = json!(offset);
    format!("{state:<wide$}", state = state.to_string())
}

/// What `config.json` says of eight bits of a type under scales of compressed-tensors.
fn compressed(kind: &str, is_static: bool) -> Value {
    let strategy = if is_static { "tensor" } else { "token" };
    json!({
        "quant_method": "compressed-tensors", "format": format!("{kind}-quantized"), "quantization_status": "compressed",
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": kind, "symmetric": true, "strategy": "channel", "dynamic": false},
            "input_activations": {
                "num_bits": 8, "type": kind, "symmetric": true, "strategy": strategy, "dynamic": !is_static,
            },
            "output_activations": null,
        }},
        "ignore": ["lm_head"], "kv_cache_scheme": null,
    })
}

impl Layout for Scaled {
    fn tensors(&self, module: &str, shape: [usize; 2]) -> Result<Vec<Part>, String> {
        let [rows, width] = shape;
        match *self {
            Scaled::Nf4 { block, .. } if !width.is_multiple_of(block) => {
                let fits: Vec<String> = [32, 64, 128, 256]
                    .into_iter()
                    .filter(|&block| width.is_multiple_of(block))
                    .map(|block| block.to_string())
                    .collect();
                let instead = if fits.is_empty() { "none does".into() } else { format!("{} do", fits.join(", ")) };
                Err(format!("'{module}' has {width} inputs, which blocks of {block} do not divide; {instead}"))
            }
            Scaled::Nf4 { block, nested } => {
                let blocks = rows * width / block;
                let mut parts = vec![(".weight", Dtype::U8, vec![rows * width / 2, 1])];
                match nested {
                    false => parts.push((".weight.absmax", Dtype::F32, vec![blocks])),
                    true => parts.extend([
                        (".weight.absmax", Dtype::U8, vec![blocks]),
                        (".weight.nested_absmax", Dtype::F32, vec![blocks.div_ceil(nested::BLOCK)]),
                        (".weight.nested_quant_map", Dtype::F32, vec![SIGNED.values().len()]),
                    ]),
                }
                let state = quant_state(shape, block, nested.then_some(0.0));
                parts.push((".weight.quant_map", Dtype::F32, vec![NF4_LEVELS.len()]));
                parts.push((".weight.quant_state.bitsandbytes__nf4", Dtype::U8, vec![state.len()]));
                Ok(parts)
            }
            // What is written must be read here.
            Scaled::Fp8 { .. } if !width.is_multiple_of(32) => {
                Err(format!("'{module}' has {width} inputs; fp8 needs a multiple of 32"))
            }
            Scaled::Fp8 { block: Some(block) } => Ok(vec![
                (".weight", Dtype::F8_E4M3, vec![rows, width]),
                (".weight_scale_inv", Dtype::F32, vec![rows.div_ceil(block), width.div_ceil(block)]),
            ]),
            Scaled::Fp8 { block: None } | Scaled::W8a8 { .. } => {
                let dtype = if let Scaled::W8a8 { .. } = self { Dtype::I8 } else { Dtype::F8_E4M3 };
                let mut parts =
                    vec![(".weight", dtype, vec![rows, width]), (".weight_scale", Dtype::F32, vec![rows, 1])];
                parts.extend(self.is_static().then(|| (".input_scale", Dtype::F32, vec![1])));
                Ok(parts)
            }
        }
    }

    fn packing(&self) -> Value {
        match self {
            Scaled::Nf4 { nested, .. } => json!({
                "quant_method": "bitsandbytes", "load_in_4bit": true, "load_in_8bit": false, "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8", "bnb_4bit_use_double_quant": nested,
                "llm_int8_skip_modules": ["lm_head"],
            }),
            Scaled::Fp8 { block: None } => compressed("float", false),
            Scaled::Fp8 { block: Some(block) } => json!({
                "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [block, block],
                "modules_to_not_convert": ["lm_head"],
            }),
            Scaled::W8a8 { is_static, .. } => compressed("int", *is_static),
        }
    }
}

/// Writes the model at `source`, a GGUF file or a Hugging Face folder, as a folder of scaled numbers; `wrote` is told how many of how many
/// blocks are done. `text` is what static activations and smoothing are taken of.
///
/// # Errors
/// When the source cannot be read, blocks do not divide its matrices, an element is not finite, or the folder cannot be written.
pub fn quantise_scaled(
    source: &Path,
    scaled: Scaled,
    text: Option<Calibration<'_>>,
    output: &Path,
    (cpu, arena): (&Cpu, &Arena),
    mut wrote: impl FnMut(usize, usize),
) -> Result<Vec<Quantised>, ModelError> {
    let inputs = text.map(|text| read_inputs(source, text, cpu, arena)).transpose()?;
    write(source, &scaled, output, arena, |plain, config, done| {
        let fold = Fold::new(config, Factors::default());
        let mut writer = Writer { plain, scaled, inputs: None, fold, arena, done };
        for layer in 0..config.layers {
            writer.inputs = inputs.as_ref().map(|inputs| &inputs[layer]);
            if let (Scaled::W8a8 { smoothing: Some(strength), .. }, Some(inputs)) = (scaled, writer.inputs) {
                writer.fold = smooth(writer.plain.found, config, layer, inputs, strength)?;
            }
            config.block(layer, &mut writer)?;
            wrote(layer + 1, config.layers);
        }
        Ok(true)
    })
}

/// Writes the parameters of blocks in their order.
struct Writer<'w, 'p, 'f> {
    plain: &'w mut Plain<'p, 'f>,
    scaled: Scaled,
    /// What this block read of the text.
    inputs: Option<&'w [Channels; INPUTS.len()]>,
    fold: Fold<'w>,
    arena: &'w Arena,
    done: &'w mut Vec<Quantised>,
}

impl Make for Writer<'_, '_, '_> {
    type Matrix = ();
    type Vector = ();
    type Error = ModelError;

    fn matrix(&mut self, name: String, _: Role, shape: [usize; 2]) -> Result<(), ModelError> {
        let coded = self.coded(name, shape)?;
        self.done.push(coded);
        Ok(())
    }

    fn vector(&mut self, name: String, role: Role, width: usize) -> Result<(), ModelError> {
        let mut values = vec![0.0; width];
        self.plain.found.widened(&name, width, &mut values)?;
        self.fold.vector(&name, role, &mut values);
        self.plain.put(&name, &values).map(drop)
    }
}

impl Writer<'_, '_, '_> {
    fn coded(&mut self, name: String, shape: [usize; 2]) -> Result<Quantised, ModelError> {
        let ([rows, width], scaled) = (shape, self.scaled);
        let mut codes = self.arena.alloc::<u8>(Label::Workspace, scaled.code_bytes(rows * width))?;
        let (mut scales, mut values, mut back) = (Vec::new(), Vec::new(), Vec::new());
        let matrix = self.plain.found.tensor(&name, &shape)?;
        let widened = |first: usize, values: &mut Vec<f32>| {
            values.resize(BLOCK_ROWS.min(rows - first) * width, 0.0);
            matrix.widen(first, values);
            self.fold.matrix(&name, first, values, width);
        };
        let (firsts, chunk) = ((0..rows).step_by(BLOCK_ROWS), scaled.code_bytes(BLOCK_ROWS * width));
        for (first, codes) in firsts.clone().zip(codes.chunks_mut(chunk)) {
            widened(first, &mut values);
            if let Some(at) = values.iter().position(|x| !x.is_finite()) {
                let (value, row) = (values[at], first + at / width);
                return Err(self.plain.found.refused(format!("tensor '{name}' holds {value} in row {row}")));
            }
            scaled.encode(&values, width, codes, &mut scales);
        }
        let nested = matches!(scaled, Scaled::Nf4 { nested: true, .. }).then(|| Nested::of(&mut scales));
        let (mut lost, mut all) = (0.0, 0.0);
        for (first, codes) in firsts.zip(codes.chunks(chunk)) {
            widened(first, &mut values);
            back.resize(values.len(), 0.0);
            scaled.decode(codes, first, width, &scales, &mut back);
            for (x, y) in values.iter().zip(&back) {
                lost += f64::from(x - y).powi(2);
                all += f64::from(*x).powi(2);
            }
        }
        let mut bytes = 0;
        let mut put = |part: &[u8]| {
            bytes += part.len();
            self.plain.sink.put(part)
        };
        put(&codes)?;
        match &nested {
            None => put(bytemuck::cast_slice(&scales))?,
            Some(nested) => {
                put(&nested.codes)?;
                put(bytemuck::cast_slice(&nested.most))?;
                put(bytemuck::cast_slice(SIGNED.values()))?;
            }
        }
        if let Some(inputs) = self.inputs.filter(|_| scaled.is_static()) {
            let input = input_of(&name);
            // Where nothing but zeros was read any scale is right.
            let scale = (self.fold.largest(input, &inputs[input].largest) / Int8::MOST).max(f32::EPSILON);
            put(bytemuck::bytes_of(&scale))?;
        }
        if let Scaled::Nf4 { block, .. } = scaled {
            put(bytemuck::cast_slice(&NF4_LEVELS))?;
            put(quant_state(shape, block, nested.as_ref().map(|nested| nested.offset)).as_bytes())?;
        }
        Ok(Quantised {
            name,
            shape: vec![rows, width],
            from: matrix.format(),
            format: scaled.to_string(),
            bytes,
            rel_l2: if all > 0.0 { (lost / all).sqrt() } else { 0.0 },
            output_rel_l2: None,
        })
    }
}
