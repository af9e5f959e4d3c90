//! Folders whose matrices are small numbers under scales, each rounded by itself: NF4 as bitsandbytes has it, and 8-bit floats or bytes with
//! a scale for each output as llm-compressor writes them (`compressed-tensors`).
//!
//! Bytes are the weights of W8A8: programs that read such a folder round activations to bytes too. Each token has a scale of its own, or
//! (static) each layer one for all, by the largest number that it read of a text ([`read_inputs`]); inputs may be smoothed ([`smooth`]).

use super::Quantised;
use super::fold::{Factors, Fold, input_of};
use super::folder::{Layout, Part, Plain, ROWS, write};
use super::inputs::{Channels, read_inputs};
use super::moments::INPUTS;
use super::smooth::smooth;
use super::walk::Calibration;
use crate::device::Cpu;
use crate::format::{Int8, NF4_LEVELS, Nf4, RowFormat};
use crate::memory::{Arena, Label};
use crate::model::ModelError;
use crate::model::parameters::{Make, Role};
use crate::named::{Named, NamedError, Parameter};
use crate::tensor::RowCode;
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
    },
    /// `E4M3` with an f32 scale for each row.
    Fp8,
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
const METHODS: [(&str, &[Parameter]); 3] = [("nf4", &[BLOCK]), ("fp8", &[]), ("w8a8", &[ACTIVATIONS, SMOOTHING])];
/// Largest number of `E4M3`.
const MOST: f32 = 448.0;

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

    /// Bits of a code.
    fn bits(self) -> usize {
        if let Scaled::Nf4 { .. } = self { 4 } else { 8 }
    }
}

impl FromStr for Scaled {
    type Err = NamedError;

    fn from_str(text: &str) -> Result<Self, NamedError> {
        let named: Named = text.parse()?;
        let (name, known) = *named.find("format", &METHODS, |(name, _)| name)?;
        named.check(known)?;
        match name {
            "fp8" => Ok(Scaled::Fp8),
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
                block @ (32 | 64 | 128 | 256) => Ok(Scaled::Nf4 { block }),
                _ => Err(named.wrong("block", "32, 64, 128 or 256".into())),
            },
        }
    }
}

impl fmt::Display for Scaled {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scaled::Nf4 { block } => write!(formatter, "nf4:block={block}"),
            Scaled::Fp8 => write!(formatter, "fp8"),
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

/// What bitsandbytes reads of a matrix besides its numbers.
fn quant_state([rows, width]: [usize; 2], block: usize) -> String {
    json!({"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [rows, width]}).to_string()
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
            Scaled::Nf4 { block } if !width.is_multiple_of(block) => {
                let fits: Vec<String> = [32, 64, 128, 256]
                    .into_iter()
                    .filter(|&block| width.is_multiple_of(block))
                    .map(|block| block.to_string())
                    .collect();
                let instead = if fits.is_empty() { "none does".into() } else { format!("{} do", fits.join(", ")) };
                Err(format!("'{module}' has {width} inputs, which blocks of {block} do not divide; {instead}"))
            }
            Scaled::Nf4 { block } => Ok(vec![
                (".weight", Dtype::U8, vec![rows * width / 2, 1]),
                (".weight.absmax", Dtype::F32, vec![rows * width / block]),
                (".weight.quant_map", Dtype::F32, vec![NF4_LEVELS.len()]),
                (".weight.quant_state.bitsandbytes__nf4", Dtype::U8, vec![quant_state(shape, block).len()]),
            ]),
            // What is written must be read here.
            Scaled::Fp8 if !width.is_multiple_of(32) => {
                Err(format!("'{module}' has {width} inputs; fp8 needs a multiple of 32"))
            }
            Scaled::Fp8 | Scaled::W8a8 { .. } => {
                let dtype = if *self == Scaled::Fp8 { Dtype::F8_E4M3 } else { Dtype::I8 };
                let mut parts =
                    vec![(".weight", dtype, vec![rows, width]), (".weight_scale", Dtype::F32, vec![rows, 1])];
                parts.extend(self.is_static().then(|| (".input_scale", Dtype::F32, vec![1])));
                Ok(parts)
            }
        }
    }

    fn packing(&self) -> Value {
        match self {
            Scaled::Nf4 { .. } => json!({
                "quant_method": "bitsandbytes", "load_in_4bit": true, "load_in_8bit": false, "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8", "bnb_4bit_use_double_quant": false,
                "llm_int8_skip_modules": ["lm_head"],
            }),
            Scaled::Fp8 => compressed("float", false),
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
        let bits = scaled.bits();
        let mut codes = self.arena.alloc::<u8>(Label::Workspace, rows * width * bits / 8)?;
        let (mut scales, mut values, mut back) = (Vec::new(), Vec::new(), Vec::new());
        let matrix = self.plain.found.tensor(&name, &shape)?;
        let (mut lost, mut all) = (0.0, 0.0);
        let chunks = codes.chunks_mut(ROWS * width * bits / 8);
        for (first, codes) in (0..rows).step_by(ROWS).zip(chunks) {
            values.resize(ROWS.min(rows - first) * width, 0.0);
            matrix.widen(first, &mut values);
            if let Some(at) = values.iter().position(|x| !x.is_finite()) {
                let (value, row) = (values[at], first + at / width);
                return Err(self.plain.found.refused(format!("tensor '{name}' holds {value} in row {row}")));
            }
            self.fold.matrix(&name, first, &mut values, width);
            back.resize(values.len(), 0.0);
            match scaled {
                Scaled::Nf4 { block } => nf4(&values, block, codes, &mut scales, &mut back),
                Scaled::Fp8 => fp8(&values, width, codes, &mut scales, &mut back),
                Scaled::W8a8 { .. } => bytes_of(&values, width, codes, &mut scales, &mut back),
            }
            for (x, y) in values.iter().zip(&back) {
                lost += f64::from(x - y).powi(2);
                all += f64::from(*x).powi(2);
            }
        }
        let mut bytes = codes.len() + 4 * scales.len();
        self.plain.sink.put(&codes)?;
        self.plain.sink.put(bytemuck::cast_slice(&scales))?;
        if let Some(inputs) = self.inputs.filter(|_| scaled.is_static()) {
            let input = input_of(&name);
            // Where nothing but zeros was read any scale is right.
            let scale = (self.fold.largest(input, &inputs[input].largest) / Int8::MOST).max(f32::EPSILON);
            self.plain.sink.put(bytemuck::bytes_of(&scale))?;
            bytes += size_of_val(&scale);
        }
        if let Scaled::Nf4 { block } = scaled {
            let state = quant_state(shape, block);
            self.plain.sink.put(bytemuck::cast_slice(&NF4_LEVELS))?;
            self.plain.sink.put(state.as_bytes())?;
            bytes += size_of_val(&NF4_LEVELS) + state.len();
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

/// Codes of blocks behind each other, two to a byte, the first in the high bits; their scales; and what they stand for.
fn nf4(values: &[f32], block: usize, codes: &mut [u8], scales: &mut Vec<f32>, back: &mut [f32]) {
    let blocks = values.chunks(block).zip(codes.chunks_mut(block / 2)).zip(back.chunks_mut(block));
    for ((values, codes), back) in blocks {
        let scale = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let code = |x: f32| Nf4::nearest(if scale == 0.0 { 0.0 } else { x / scale });
        for ((pair, byte), back) in values.chunks(2).zip(codes).zip(back.chunks_mut(2)) {
            let pair = [code(pair[0]), code(pair[1])];
            *byte = pair[0] << 4 | pair[1];
            back.iter_mut().zip(pair).for_each(|(back, code)| *back = scale * NF4_LEVELS[usize::from(code)]);
        }
        scales.push(scale);
    }
}

/// Codes of rows, the scale of each, and what they stand for.
fn fp8(values: &[f32], width: usize, codes: &mut [u8], scales: &mut Vec<f32>, back: &mut [f32]) {
    let format: RowFormat = "fp8-e4m3".parse().expect("a format of rows");
    let mut row = vec![0.0; width];
    for ((values, codes), back) in values.chunks(width).zip(codes.chunks_mut(width)).zip(back.chunks_mut(width)) {
        let scale = (values.iter().fold(0.0f32, |most, x| most.max(x.abs())) / MOST).max(f32::EPSILON);
        row.iter_mut().zip(values).for_each(|(row, x)| *row = x / scale);
        format.encode(&row, width, codes);
        format.decode(codes, 0, back);
        back.iter_mut().for_each(|x| *x *= scale);
        scales.push(scale);
    }
}

/// As [`fp8`], of bytes.
fn bytes_of(values: &[f32], width: usize, codes: &mut [u8], scales: &mut Vec<f32>, back: &mut [f32]) {
    let format = RowFormat::Int8(Int8);
    let mut row = vec![0; format.row_bytes(width)];
    for ((values, codes), back) in values.chunks(width).zip(codes.chunks_mut(width)).zip(back.chunks_mut(width)) {
        format.encode(values, width, &mut row);
        format.decode(&row, 0, back);
        let (scale, bytes) = row.split_at(size_of::<f32>());
        scales.push(bytemuck::pod_read_unaligned(scale));
        codes.copy_from_slice(&bytes[..width]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_under_their_scales_are_what_is_said_to_be_kept() {
        let values: Vec<f32> = (0..128).map(|at| ((at * 37 % 101) as f32 - 50.0) / 7.0).collect();
        let near = |back: &[f32], bound: f32| values.iter().zip(back).all(|(x, y)| (x - y).abs() <= bound);

        let (mut codes, mut scales, mut back) = (vec![0; 64], Vec::new(), vec![0.0; 128]);
        nf4(&values, 32, &mut codes, &mut scales, &mut back);
        // The first of two elements is in the high bits.
        let level = |at: usize| NF4_LEVELS[usize::from(codes[at / 2] >> (4 * (1 - at % 2)) & 15)];
        let read: Vec<f32> = (0..128).map(|at| scales[at / 32] * level(at)).collect();
        assert!(read == back && scales.len() == 4 && near(&back, 0.16 * 50.0 / 7.0), "{scales:?}");

        let (mut codes, mut scales, mut back) = (vec![0; 128], Vec::new(), vec![0.0; 128]);
        fp8(&values, 64, &mut codes, &mut scales, &mut back);
        let format: RowFormat = "fp8-e4m3".parse().unwrap();
        let mut read = vec![0.0; 128];
        for ((codes, read), scale) in codes.chunks(64).zip(read.chunks_mut(64)).zip(&scales) {
            format.decode(codes, 0, read);
            read.iter_mut().for_each(|x| *x *= scale);
        }
        assert!(read == back && scales.len() == 2 && near(&back, 50.0 / 7.0 / 16.0), "{scales:?}");

        let (mut codes, mut scales, mut back) = (vec![0; 128], Vec::new(), vec![0.0; 128]);
        bytes_of(&values, 64, &mut codes, &mut scales, &mut back);
        let read: Vec<f32> = (0..128).map(|at| scales[at / 64] * f32::from(codes[at].cast_signed())).collect();
        assert!(read == back && scales.len() == 2 && near(&back, 1.001 * 50.0 / 7.0 / 254.0), "{scales:?}");
    }
}
