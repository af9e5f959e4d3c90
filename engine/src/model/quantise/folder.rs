//! A Hugging Face folder whose matrices are codes: as GPTQ or AWQ pack them, block by block, as [`walk`] makes them, or in another
//! [`Layout`] ([`super::scaled`]).
//!
//! The embedding, the output matrix, norms and biases stay as the source's embedding is, 16 bits in most, as in other such folders.
//! `config.json` is the source's with a `quantization_config` that says how to read the codes; the tokenizer stands beside it.

use super::Quantised;
use super::coded::Coded;
use super::coding::Made;
use super::recipe::{Method, Recipe};
use super::walk::{Calibration, walk};
use crate::device::Cpu;
use crate::format::{Grid, RowFormat};
use crate::memory::Arena;
use crate::model::packed::Codes;
use crate::model::parameters::{Make, Role};
use crate::model::weights::Found;
use crate::model::{Config, ModelError, files_beside};
use crate::tensor::stream::{self, Sink};
use crate::tensor::{DType, file};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;

/// Rows that are rounded together.
pub(super) const ROWS: usize = 64;

/// A tensor of a module: the end of its name, its type and shape.
pub(super) type Part = (&'static str, Dtype, Vec<usize>);

/// How the matrices of a folder lie.
pub(super) trait Layout {
    /// The tensors that a module's weight becomes.
    ///
    /// # Errors
    /// When it cannot be laid out so.
    fn tensors(&self, module: &str, shape: [usize; 2]) -> Result<Vec<Part>, String>;

    /// What `config.json` says of it.
    fn packing(&self) -> Value;
}

/// Writes the model at `source`, a GGUF file or a Hugging Face folder, as a folder of codes; `wrote` is told how many of how many blocks are
/// done. `text` is what codes are chosen by, for recipes that read one.
///
/// # Errors
/// When the source cannot be read, the recipe's groups do not divide its matrices, an element is not finite or f16 has no scale for it, or
/// the folder cannot be written.
pub fn quantise_folder(
    source: &Path,
    recipe: Recipe,
    text: Option<Calibration<'_>>,
    output: &Path,
    (cpu, arena): (&Cpu, &Arena),
    mut wrote: impl FnMut(usize, usize),
) -> Result<Vec<Quantised>, ModelError> {
    write(source, &recipe, output, arena, |plain, config, done| {
        let mut blocks = 0;
        walk(source, recipe, text, (cpu, arena), |made| {
            for (name, made) in made {
                match made {
                    Made::Vector(values) => drop(plain.put(&name, &values)?),
                    Made::Coded(coded) => done.push(plain.coded(name, &coded, recipe)?),
                }
            }
            blocks += 1;
            wrote(blocks, config.layers);
            Ok::<(), ModelError>(())
        })
        // The walk has read blocks by itself, and refused what no model has.
        .map(|_| false)
    })
}

/// Writes a folder whose blocks are what `blocks` puts, in the order of the model's parameters.
///
/// # Errors
/// When the source cannot be read, its matrices cannot be laid out so, or the folder cannot be written; and those of `blocks`, which
/// say whether they took all that they wrote from the source here: what nobody took is then refused.
pub(super) fn write(
    source: &Path,
    layout: &dyn Layout,
    output: &Path,
    arena: &Arena,
    blocks: impl FnOnce(&mut Plain<'_, '_>, &Config, &mut Vec<Quantised>) -> Result<bool, ModelError>,
) -> Result<Vec<Quantised>, ModelError> {
    let config = Config::read(source)?;
    let wrong = |reason: String| ModelError::Config { path: source.into(), reason };
    let mut found = Found::open(source, &config, arena)?;
    let kept = kept(&mut found, &config)?;
    let mut listing = Listing { layout, dtype: file::stored_as(kept), tensors: Vec::new() };
    config.parameters(&mut listing).map_err(wrong)?;
    let mut files = files_beside(source)?;
    files[0].1 = with_packing(&files[0].1, layout.packing(), kept).map_err(wrong)?;
    let system =
        |path: &Path, error: std::io::Error| ModelError::Config { path: path.into(), reason: error.to_string() };
    std::fs::create_dir_all(output).map_err(|error| system(output, error))?;
    let mut done = Vec::new();
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    stream::write(&output.join("model.safetensors"), listing.tensors, metadata, |sink| {
        let mut plain = Plain { found: &mut found, kept, sink };
        done.push(plain.matrix("model.embed_tokens.weight", [config.vocab, config.hidden])?);
        let took_all = blocks(&mut plain, &config, &mut done)?;
        plain.vector("model.norm.weight", config.hidden)?;
        if !config.tied {
            done.push(plain.matrix("lm_head.weight", [config.vocab, config.hidden])?);
        }
        if took_all { found.finish() } else { Ok(()) }
    })
    // A folder of a run that failed holds nothing; the next run may have its name.
    .inspect_err(|_| drop(std::fs::remove_dir(output)))?;
    // Last, so that a folder without it is one that is not whole.
    for (name, content) in files.iter().rev() {
        let fill = |path: &Path| std::fs::write(path, content).map_err(|error| error.to_string());
        file::replace(&output.join(name), fill)?;
    }
    Ok(done)
}

/// The type of what is not coded: that of a plain embedding, and f16, which holds the scales of quantised blocks, of another.
fn kept(found: &mut Found<'_>, config: &Config) -> Result<DType, ModelError> {
    let embedding = found.tensor("model.embed_tokens.weight", &[config.vocab, config.hidden])?;
    Ok(embedding.format().dtype().unwrap_or(DType::F16))
}

/// A `config.json` that says how codes are packed.
fn with_packing(text: &str, packing: Value, kept: DType) -> Result<String, String> {
    let mut config: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let fields = config.as_object_mut().ok_or("not an object")?;
    let name = match kept {
        DType::F32 => "float32",
        DType::F16 => "float16",
        DType::Bf16 => "bfloat16",
    };
    // Both names of it that there are.
    let known = if fields.contains_key("dtype") { "dtype" } else { "torch_dtype" };
    fields.insert(known.into(), name.into());
    fields.insert("quantization_config".into(), packing);
    Ok(format!("{config:#}\n"))
}

/// Lists the tensors of the folder in the order in which they are written.
struct Listing<'l> {
    layout: &'l dyn Layout,
    dtype: Dtype,
    tensors: Vec<(String, Dtype, Vec<usize>)>,
}

impl Make for Listing<'_> {
    type Matrix = ();
    type Vector = ();
    type Error = String;

    fn matrix(&mut self, name: String, role: Role, [rows, width]: [usize; 2]) -> Result<(), String> {
        let Some(module) = name.strip_suffix(".weight").filter(|name| role != Role::Embedding && *name != "lm_head")
        else {
            self.tensors.push((name, self.dtype, vec![rows, width]));
            return Ok(());
        };
        for (end, dtype, shape) in self.layout.tensors(module, [rows, width])? {
            self.tensors.push((format!("{module}{end}"), dtype, shape));
        }
        Ok(())
    }

    fn vector(&mut self, name: String, _: Role, width: usize) -> Result<(), String> {
        self.tensors.push((name, self.dtype, vec![width]));
        Ok(())
    }
}

impl Layout for Recipe {
    fn tensors(&self, module: &str, [rows, width]: [usize; 2]) -> Result<Vec<Part>, String> {
        let Grid { bits, group, .. } = self.grid;
        if !width.is_multiple_of(group) {
            let fits = (32..=width.min(256)).step_by(32).filter(|&group| width.is_multiple_of(group));
            let fits: Vec<String> = fits.map(|group| group.to_string()).collect();
            let instead = match &fits[..] {
                [] => "no multiple of 32 does".into(),
                fits => format!("of these inputs groups of {} do", fits.join(", ")),
            };
            return Err(format!("'{module}' has {width} inputs, which groups of {group} do not divide; {instead}"));
        }
        let in_word = 32 / bits as usize;
        if !rows.is_multiple_of(in_word) {
            return Err(format!("'{module}' has {rows} outputs; packed zero points need a multiple of {in_word}"));
        }
        let groups = width / group;
        let (codes, zeros) = match self.is_awq() {
            true => (vec![width, rows / in_word], vec![groups, rows / in_word]),
            false => (vec![width / in_word, rows], vec![groups, rows / in_word]),
        };
        let scales = (".scales", Dtype::F16, vec![groups, rows]);
        let mut tensors = vec![(".qweight", Dtype::I32, codes), (".qzeros", Dtype::I32, zeros), scales];
        if !self.is_awq() {
            tensors.push((".g_idx", Dtype::I32, vec![width]));
        }
        Ok(tensors)
    }

    fn packing(&self) -> Value {
        let Grid { bits, group, symmetric, .. } = self.grid;
        match self.method {
            Method::Awq => json!({
                "quant_method": "awq", "bits": bits, "group_size": group, "zero_point": true, "version": "gemm",
                "modules_to_not_convert": ["lm_head"],
            }),
            Method::Gptq(method) => json!({
                "quant_method": "gptq", "checkpoint_format": "gptq", "bits": bits, "group_size": group, "sym": symmetric,
                "desc_act": method.by_size, "damp_percent": method.damp, "static_groups": false, "lm_head": false,
            }),
            Method::Nearest => json!({
                "quant_method": "gptq", "checkpoint_format": "gptq", "bits": bits, "group_size": group, "sym": symmetric,
                "desc_act": false, "lm_head": false,
            }),
        }
    }
}

/// Writes what is not coded.
pub(super) struct Plain<'p, 'f> {
    pub found: &'p mut Found<'f>,
    kept: DType,
    pub sink: &'p mut Sink,
}

impl Plain<'_, '_> {
    /// Writes elements of a tensor; what they become.
    pub fn put(&mut self, name: &str, values: &[f32]) -> Result<Vec<f32>, ModelError> {
        let mut bytes = vec![0; values.len() * self.kept.bytes()];
        self.kept.encode(values, &mut bytes);
        let mut back = vec![0.0; values.len()];
        RowFormat::plain(self.kept).rows(&bytes, [1, values.len()]).widen(&mut back);
        if let Some(at) = back.iter().position(|x| !x.is_finite()) {
            let reason = format!("tensor '{name}' holds {}, which {} does not", values[at], self.kept);
            return Err(self.found.refused(reason));
        }
        self.sink.put(&bytes)?;
        Ok(back)
    }

    /// Writes a vector of the source.
    pub fn vector(&mut self, name: &str, width: usize) -> Result<(), ModelError> {
        let mut values = vec![0.0; width];
        self.found.widened(name, width, &mut values)?;
        self.put(name, &values).map(drop)
    }

    /// Writes a matrix of the source, some rows at a time.
    fn matrix(&mut self, name: &str, [rows, width]: [usize; 2]) -> Result<Quantised, ModelError> {
        let matrix = self.found.tensor(name, &[rows, width])?;
        let (mut values, mut lost, mut all) = (Vec::new(), 0.0, 0.0);
        for first in (0..rows).step_by(ROWS) {
            values.resize(ROWS.min(rows - first) * width, 0.0);
            matrix.widen(first, &mut values);
            for (x, y) in values.iter().zip(self.put(name, &values)?) {
                lost += f64::from(x - y).powi(2);
                all += f64::from(*x).powi(2);
            }
        }
        Ok(Quantised {
            name: name.into(),
            shape: vec![rows, width],
            from: matrix.format(),
            format: self.kept.to_string(),
            bytes: rows * width * self.kept.bytes(),
            rel_l2: if all > 0.0 { (lost / all).sqrt() } else { 0.0 },
            output_rel_l2: None,
        })
    }

    /// Writes the tensors of a coded matrix.
    fn coded(&mut self, name: String, coded: &Coded, recipe: Recipe) -> Result<Quantised, ModelError> {
        let Coded { rows, width, grid, codes, steps, group_of, .. } = coded;
        let codes = Codes { bits: grid.bits as usize, rows: *rows, width: *width, codes, steps, group_of };
        let tensors = if recipe.is_awq() { codes.awq().to_vec() } else { codes.gptq().to_vec() };
        let mut bytes = 0;
        for (.., of) in &tensors {
            self.sink.put(of)?;
            bytes += of.len();
        }
        Ok(Quantised {
            name,
            shape: vec![*rows, *width],
            from: coded.from,
            format: format!("uint{}:group={}", grid.bits, grid.group),
            bytes,
            rel_l2: coded.rel_l2,
            output_rel_l2: coded.output_rel_l2,
        })
    }
}
