//! A GGUF file of fewer bits: which tensor gets which type, and the file that holds them.
//!
//! A [`Mixture`] is what llama.cpp's `quantize` calls a file type: one type for most matrices, more bits where an error costs most
//! (the output matrix, and in `_m` the values and the second half of the MLP in half of the layers), and a wider type where rows are no
//! whole super-blocks. Norms and biases stay f32. Tensors are read, encoded and written one after another, so that the model never
//! lies in memory; each is compared with what it was. Scales are the least squares of the weights, or with an [`Importance`] those of what
//! the weights make of a text.

use super::Quantised;
use super::importance::Importance;
use crate::device::Cpu;
use crate::format::RowFormat;
use crate::memory::{Arena, Buffer, Label};
use crate::model::adapter::base;
use crate::model::config::Family;
use crate::model::gguf::{
    Gguf, Keys, head_rows, header, is_gguf, more, number, own_name, padded, rope_tensors, row_of_folder,
};
use crate::model::parameters::{Make, Role};
use crate::model::weights::{Found, Matrix};
use crate::model::{Config, ModelError};
use crate::tensor::{RowCode, file};
use rayon::prelude::*;
use std::convert::Infallible;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Name, type of most matrices, and number of the file type in llama.cpp.
const MIXTURES: [(&str, &str, u32); 18] = [
    ("f32", "f32", 0),
    ("f16", "f16", 1),
    ("bf16", "bf16", 32),
    ("q8_0", "q8_0", 7),
    ("q6_k", "q6_k", 18),
    ("q5_k_m", "q5_k", 17),
    ("q5_k_s", "q5_k", 16),
    ("q4_k_m", "q4_k", 15),
    ("q4_k_s", "q4_k", 14),
    ("q3_k_m", "q3_k", 12),
    ("q3_k_s", "q3_k", 11),
    ("q2_k", "q2_k", 10),
    ("q5_1", "q5_1", 9),
    ("q5_0", "q5_0", 8),
    ("q4_1", "q4_1", 3),
    ("q4_0", "q4_0", 2),
    ("iq4_nl", "iq4_nl", 25),
    ("iq4_xs", "iq4_xs", 30),
];

/// Which types the tensors of a file have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mixture {
    name: &'static str,
    most: &'static str,
    number: u32,
}

impl std::str::FromStr for Mixture {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = MIXTURES.iter().find(|(name, ..)| *name == text);
        found.map(|&(name, most, number)| Mixture { name, most, number }).ok_or_else(|| {
            let known = MIXTURES.map(|(name, ..)| name).join(", ");
            let why = if text.parse::<RowFormat>().is_ok() { "names no mixture of types" } else { "is not known" };
            format!("format '{text}' {why}; those that can be written: {known}")
        })
    }
}

/// A tensor as it is to be written.
#[derive(Debug, Clone)]
pub struct Planned {
    /// Its name in a Hugging Face folder.
    pub(super) name: String,
    /// Its name in the file.
    pub own: String,
    /// Rows first.
    pub shape: Vec<usize>,
    /// How its rows are kept.
    pub format: RowFormat,
}

impl Planned {
    fn rows(&self) -> usize {
        self.shape[..self.shape.len() - 1].iter().product()
    }

    fn width(&self) -> usize {
        self.shape[self.shape.len() - 1]
    }

    /// Elements.
    pub fn elements(&self) -> usize {
        self.rows() * self.width()
    }

    /// Bytes in the file.
    pub fn bytes(&self) -> usize {
        self.rows() * self.format.row_bytes(self.width())
    }
}

impl Mixture {
    /// Whether scales are searched for, and an importance can say which errors count.
    pub fn is_fitted(self) -> bool {
        !matches!(self.name, "f32" | "f16" | "bf16" | "q8_0")
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// All tensors of a model, in the order in which they are written.
    pub fn plan(self, config: &Config) -> Vec<Planned> {
        let mut listing = Listing { config, mixture: self, planned: Vec::new() };
        let Ok(_) = config.parameters(&mut listing);
        listing.planned
    }

    /// The type of a matrix, by its name in the file, as llama.cpp chooses it.
    fn of(self, config: &Config, own: &str, width: usize) -> &'static str {
        let layers = config.layers;
        let (layer, part) = match own.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((layer, part)) => (layer.parse().unwrap_or(0), part),
            None => (0, own),
        };
        let counts_more = layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2;
        let group = config.q_heads / config.kv_heads;
        let is_output = part == "output.weight" || config.tied && part == "token_embd.weight";
        let chosen = match (part, self.name) {
            _ if is_output && fallback(self.most, width) != self.most => "q8_0",
            (_, "f32" | "f16" | "bf16" | "q8_0") => self.most,
            _ if is_output => "q6_k",
            ("attn_v.weight" | "attn_qkv.weight", name) => {
                let chosen = match name {
                    "q2_k" => {
                        if group >= 4 {
                            "q4_k"
                        } else {
                            "q3_k"
                        }
                    }
                    "q3_k_m" => {
                        if layer < 2 {
                            "q5_k"
                        } else {
                            "q4_k"
                        }
                    }
                    "q4_k_m" | "q5_k_m" if counts_more => "q6_k",
                    "q4_k_s" if layer < 4 => "q5_k",
                    "iq4_nl" | "iq4_xs" if group >= 4 => "q5_k",
                    _ => self.most,
                };
                // Models of 70 billion parameters, whose values are an eighth of the queries.
                let is_large = layers == 80 && group > 1 && (chosen == "q3_k" || chosen == "q4_k");
                if is_large { "q5_k" } else { chosen }
            }
            ("ffn_down.weight", "q2_k") => "q3_k",
            ("ffn_down.weight", "q3_k_m") => {
                if layer < layers / 16 {
                    "q5_k"
                } else {
                    "q4_k"
                }
            }
            ("ffn_down.weight", "q4_k_m" | "q5_k_m") if counts_more => "q6_k",
            ("ffn_down.weight", "q4_k_s" | "iq4_nl" | "iq4_xs") if layer < layers / 8 => "q5_k",
            ("attn_output.weight", "q2_k") => "q3_k",
            ("attn_output.weight", "q3_k_m") => "q4_k",
            _ => self.most,
        };
        fallback(chosen, width)
    }
}

/// The type itself, or where rows are not whole blocks of it what llama.cpp takes in its place.
fn fallback(chosen: &'static str, width: usize) -> &'static str {
    let fits = |name: &str| name.parse::<RowFormat>().is_ok_and(|format| format.check("a row", width).is_ok());
    let wider = match chosen {
        "q2_k" | "q3_k" => "q4_0",
        "q4_k" => "q5_0",
        "q5_k" => "q5_1",
        "q6_k" => "q8_0",
        "iq4_xs" => "iq4_nl",
        other => other,
    };
    [chosen, wider].into_iter().find(|name| fits(name)).unwrap_or("f16")
}

/// Lists what a model has.
struct Listing<'a> {
    config: &'a Config,
    mixture: Mixture,
    planned: Vec<Planned>,
}

impl Listing<'_> {
    fn add(&mut self, name: String, shape: Vec<usize>) {
        let own = own_name(self.config, &name).expect("every parameter has a name in GGUF files");
        let format = match shape[..] {
            [_, width] => self.mixture.of(self.config, &own, width),
            _ => "f32",
        };
        self.planned.push(Planned { name, own, shape, format: format.parse().expect("a registered format") });
    }
}

impl Make for Listing<'_> {
    type Matrix = ();
    type Vector = ();
    type Error = Infallible;

    fn matrix(&mut self, name: String, _: Role, shape: [usize; 2]) -> Result<(), Infallible> {
        self.add(name, shape.to_vec());
        Ok(())
    }

    fn vector(&mut self, name: String, _: Role, width: usize) -> Result<(), Infallible> {
        self.add(name, vec![width]);
        Ok(())
    }
}

/// Writes the model at `source`, a GGUF file or a Hugging Face folder, as a GGUF file; `wrote` is told of each tensor. `importance` says
/// which errors count.
///
/// # Errors
/// When the source cannot be read, an element is not finite or none of the format's scales holds it, or the file cannot be written.
pub fn quantise(
    source: &Path,
    mixture: Mixture,
    importance: Option<Importance<'_>>,
    output: &Path,
    (cpu, arena): (&Cpu, &Arena),
    mut wrote: impl FnMut(usize, usize),
) -> Result<Vec<Quantised>, ModelError> {
    // A Mistral without windows is a Llama by another name, and GGUF files call it so.
    let config = match Config::read(source)? {
        config if config.family == Family::Mistral && config.windows.iter().all(Option::is_none) => {
            Config { family: Family::Llama, ..config }
        }
        config => config,
    };
    let keys = keys(&base(source)?, &config, mixture)?;
    let planned = mixture.plan(&config);
    let squares = importance.map(|importance| importance.read(source, &planned, (cpu, arena))).transpose()?;
    let mut found = Found::open(source, &config, arena)?;
    // What belongs to the configuration stands first, for the header is read back with it.
    let of_config = rope_tensors(&config.rope, config.head_dim);
    let all: Vec<_> = of_config
        .iter()
        .map(|(name, factors)| ((*name).to_owned(), vec![factors.len()], 0, 4 * factors.len()))
        .chain(planned.iter().map(|one| {
            let number = number(one.format).expect("mixtures have types of GGUF");
            (one.own.clone(), one.shape.clone(), number, one.bytes())
        }))
        .collect();
    let mut header = header(&keys, &all);
    for (_, factors) in &of_config {
        header.extend_from_slice(bytemuck::cast_slice(factors));
        header.resize(padded(header.len()), 0);
    }
    let (mut done, mut failed) = (Vec::new(), None);
    let written = file::replace(output, |path| {
        let system = |error: std::io::Error| error.to_string();
        let mut file = BufWriter::new(File::create(path).map_err(system)?);
        file.write_all(&header).map_err(system)?;
        file.flush().map_err(system)?;
        let all_bytes = header.len() + planned.iter().map(|one| padded(one.bytes())).sum::<usize>();
        file.get_ref().set_len(all_bytes as u64).map_err(system)?;
        if let Err(error) = reads_as(path, &config) {
            let said = error.to_string();
            failed = Some(ModelError::Config { path: source.into(), reason: said.clone() });
            return Err(said);
        }
        for (index, one) in planned.iter().enumerate() {
            let inputs = squares.as_ref().and_then(|squares| squares.get(&one.own)).map(Vec::as_slice);
            let encoded = tensor(&mut found, &config, one, inputs, source, (cpu, arena));
            let (bytes, quantised) = encoded.map_err(|error| {
                let said = error.to_string();
                failed = Some(error);
                said
            })?;
            file.write_all(&bytes).map_err(system)?;
            file.write_all(&vec![0; padded(bytes.len()) - bytes.len()]).map_err(system)?;
            done.push(quantised);
            wrote(index + 1, planned.len());
        }
        file.flush().map_err(system)?;
        found.finish().map_err(|error| {
            let said = error.to_string();
            failed = Some(error);
            said
        })
    });
    match failed {
        Some(error) => Err(error),
        None => Ok(written.map(|()| done)?),
    }
}

/// Refuses a header that is another model's: what GGUF files have no place for is not left out silently.
fn reads_as(path: &Path, config: &Config) -> Result<(), String> {
    let back = Gguf::open(path).and_then(|file| file.config()).map_err(|error| error.to_string())?;
    match back.computes_as(config) {
        true => Ok(()),
        false => Err("a GGUF file has no place for all of its configuration: another RoPE scaling than linear, \
                      yarn, llama3 or longrope, a sliding window of some layers, or an own scale of attention"
            .into()),
    }
}

/// Metadata of the file.
fn keys(source: &Path, config: &Config, mixture: Mixture) -> Result<Keys, ModelError> {
    const OWN: [&str; 3] = ["general.file_type", "general.quantization_version", "general.alignment"];
    let mut keys = match is_gguf(source) {
        true => Keys::of_file(&Gguf::open(source)?, &OWN),
        false => Keys::of_folder(source, config)?,
    };
    keys.put(OWN[0], &mixture.number.into());
    keys.put(OWN[1], &2.into());
    Ok(keys)
}

/// The bytes of a tensor, and what they lost.
fn tensor(
    found: &mut Found<'_>,
    config: &Config,
    planned: &Planned,
    inputs: Option<&[f32]>,
    source: &Path,
    (cpu, arena): (&Cpu, &Arena),
) -> Result<(Buffer<u8>, Quantised), ModelError> {
    let (format, width) = (planned.format, planned.width());
    let (name, order) = (&planned.name, head_rows(config, &planned.name, planned.shape[0]));
    let mut bytes = arena.alloc::<u8>(Label::Weights, planned.bytes())?;
    let (from, losses): (RowFormat, Vec<[f64; 2]>) = match planned.shape[..] {
        [_] => {
            let mut vector = vec![0.0; width];
            let from = found.tensor(name, &planned.shape)?.format();
            found.widened(name, width, &mut vector)?;
            let file: Vec<f32> = (0..width)
                .map(|at| vector[order.map_or(at, |rows| row_of_folder(rows, at))] + more(config, name))
                .collect();
            (from, vec![encode(format, &file, None, &mut bytes)])
        }
        _ => {
            let matrix: Matrix = found.tensor(name, &planned.shape)?;
            let mut row_losses = vec![[0.0; 2]; planned.rows()];
            let rows = bytes.par_chunks_mut(format.row_bytes(width)).zip(&mut row_losses).enumerate();
            cpu.install(|| {
                rows.for_each_init(
                    || vec![0.0; width],
                    |widened, (row, (to, loss))| {
                        let row = order.map_or(row, |rows| row_of_folder(rows, row));
                        matrix.widen(row, widened);
                        *loss = encode(format, widened, inputs, to);
                    },
                );
            });
            (matrix.format(), row_losses)
        }
    };
    if let Some(row) = losses.iter().position(|[off, all]| !off.is_finite() || !all.is_finite()) {
        let reason = format!(
            "tensor '{name}' holds in row {row} an element that is not finite, or that {format} has no scale for"
        );
        return Err(ModelError::Weights { path: source.into(), reason });
    }
    let [off, all] = losses.iter().fold([0.0; 2], |[off, all], loss| [off + loss[0], all + loss[1]]);
    let rel_l2 = if all > 0.0 { (off / all).sqrt() } else { 0.0 };
    let done = Quantised {
        name: planned.own.clone(),
        shape: planned.shape.clone(),
        from,
        format: format.to_string(),
        bytes: planned.bytes(),
        rel_l2,
        output_rel_l2: None,
    };
    Ok((bytes, done))
}

/// Encodes a row, for inputs of these mean squares where they are known; the squares of what it lost, and of all.
fn encode(format: RowFormat, row: &[f32], inputs: Option<&[f32]>, to: &mut [u8]) -> [f64; 2] {
    match inputs {
        Some(inputs) => format.encode_weighted(row, inputs, to),
        None => format.encode(row, row.len(), to),
    }
    let mut back = vec![0.0; row.len()];
    format.decode(to, 0, &mut back);
    let square = |of: &dyn Fn(f32, f32) -> f32| -> f64 {
        row.iter().zip(&back).map(|(&x, &y)| f64::from(of(x, y)).powi(2)).sum()
    };
    [square(&|x, y| x - y), square(&|x, _| x)]
}
