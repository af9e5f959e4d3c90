//! Low-rank adapters beside frozen matrices: LoRA (arXiv 2106.09685).
//!
//! A matrix `W` `[out, in]` that stays as it is gets `A` `[r, in]` and `B` `[out, r]` beside it, and computes
//! `y = x Wᵀ + s (x Aᵀ) Bᵀ` with `s = alpha / r`. `B` begins at zero, so that the model begins as it was, and `A` uniform within
//! `1 / sqrt(in)`, as `peft` draws it. Gradients: `dB = dyᵀ s (x Aᵀ)`, and with `d = s dy B`, `dA = dᵀ x` and `dx += d A`.
//! `s (x Aᵀ)` is computed again in the backward pass: a rank is small, and nothing more is kept for it. Everything is f32, whatever
//! the frozen matrices are kept in.

use super::PIECE_ROWS;
use super::activations::Extents;
use super::export;
use super::linear::weight_gradient;
use super::parameters::{BlockGroups, Parameter, Parameters};
use super::run::TrainError;
use crate::device::Cpu;
use crate::device::gemm::{Matrix, product};
use crate::memory::{Arena, ArenaError, Buffer, Label, LabelBytes};
use crate::model::adapter;
use crate::model::parameters::Role;
use crate::tensor::file::{self, Output};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

/// Rows of a piece of a product with an adapter.
const ROWS: usize = PIECE_ROWS / 4;

/// What is asked of adapters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Asked {
    /// Their rank `r`.
    pub rank: usize,
    /// `alpha`, of which an adapter's product has the factor `alpha / r`.
    pub alpha: f32,
    /// Names of the matrices of a block that get one, as `q_proj` or `q`; or `all-linear`, for all of them.
    pub targets: Vec<String>,
}

/// The linear layers of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Site {
    Qkv,
    Out,
    GateUp,
    Down,
}

impl Site {
    const ALL: [Site; 4] = [Site::Qkv, Site::Out, Site::GateUp, Site::Down];

    pub fn linear(self, groups: &BlockGroups) -> &super::linear::Linear {
        match self {
            Site::Qkv => &groups.qkv,
            Site::Out => &groups.out,
            Site::GateUp => &groups.gate_up,
            Site::Down => &groups.down,
        }
    }
}

/// An adapter: where its matrices lie, and which columns of a layer's outputs are its matrix's.
#[derive(Debug, Clone)]
struct Adapter {
    a: Range<usize>,
    b: Range<usize>,
    inputs: usize,
    column: usize,
    /// Outputs of the whole layer.
    width: usize,
}

/// Where the numbers of a model's adapters lie, and what they are called.
#[derive(Debug, Clone)]
pub struct Layout {
    /// What was asked for.
    pub asked: Asked,
    /// Names of the matrices that have an adapter, without their blocks: `q_proj`.
    pub targets: Vec<String>,
    /// `A` and `B` of each, with the names that `peft` gives them.
    pub parameters: Vec<Parameter>,
    blocks: Vec<[Vec<Adapter>; 4]>,
}

impl Layout {
    /// The layout of the adapters that are asked for.
    ///
    /// # Errors
    /// When the rank or alpha is no such number, or no matrix of a block is called as a target.
    pub fn new(model: &Parameters, asked: &Asked) -> Result<Self, String> {
        let Asked { rank, alpha, ref targets } = *asked;
        let most = model.config.hidden;
        if !(1..=most).contains(&rank) {
            return Err(format!("the rank of adapters is {rank}; it must be 1 to the model's hidden size, {most}"));
        }
        if !(alpha.is_finite() && alpha > 0.0) {
            return Err(format!("alpha is {alpha}; it must be finite and above 0"));
        }
        let known = names(model);
        let spelled = |target: &str, name: &str| {
            target == "all-linear" || target == name || name.strip_suffix("_proj") == Some(target)
        };
        if let Some(target) = targets.iter().find(|target| !known.iter().any(|name| spelled(target, name))) {
            let known = known.join(", ");
            return Err(format!(
                "no matrix of a block is called '{target}'; there are {known}, and all-linear for all"
            ));
        }
        let is_target = |name: &String| targets.iter().any(|target| spelled(target, name));
        let targets: Vec<String> = known.into_iter().filter(is_target).collect();
        let (mut parameters, mut at) = (Vec::new(), 0);
        let mut add = |name: String, shape: [usize; 2]| {
            let range = at..at + shape[0] * shape[1];
            at = range.end;
            let (of_kind, gradient) = (range.clone(), Some(range.clone()));
            let shape = shape.to_vec();
            parameters.push(Parameter { name, shape, role: Role::Matrix, range: range.clone(), of_kind, gradient });
            range
        };
        let blocks = model.blocks.iter().map(|groups| {
            Site::ALL.map(|site| {
                let linear = site.linear(groups);
                let within = |parameter: &&Parameter| {
                    let own = &linear.weight.range;
                    own.start <= parameter.range.start && parameter.range.end <= own.end
                };
                let matrices = model.all.iter().filter(within).filter(|one| targets.contains(&module(one).1.into()));
                let adapter = |one: &Parameter| {
                    let (outputs, inputs) = (one.shape[0], linear.inputs);
                    let name = |part: &str| format!("base_model.model.{}.lora_{part}.weight", module(one).0);
                    let (a, b) = (add(name("A"), [rank, inputs]), add(name("B"), [outputs, rank]));
                    let column = (one.range.start - linear.weight.range.start) / inputs;
                    Adapter { a, b, inputs, column, width: linear.outputs }
                };
                matrices.map(adapter).collect()
            })
        });
        let blocks = blocks.collect();
        Ok(Layout { asked: asked.clone(), targets, parameters, blocks })
    }

    /// The same beside the model of a folder or file.
    ///
    /// # Errors
    /// As [`Layout::new`], and when that is an adapter itself.
    pub fn beside(path: &Path, model: &Parameters, asked: &Asked) -> Result<Self, String> {
        if adapter::is_adapter(path) {
            return Err(format!(
                "'{}' is an adapter, and adapters stand beside a model; name its base",
                path.display()
            ));
        }
        Layout::new(model, asked)
    }

    /// Numbers that are trained.
    pub fn count(&self) -> usize {
        self.parameters.last().map_or(0, |last| last.range.end)
    }

    /// Bytes that [`Adapters::new`] takes.
    pub fn bytes(&self, extents: &Extents<'_>) -> LabelBytes {
        let numbers = 4 * self.count() as u64;
        let scratch = 4 * 2 * (extents.rows() * self.asked.rank) as u64;
        LabelBytes::from([(Label::Weights, numbers), (Label::Gradients, numbers), (Label::Workspace, scratch)])
    }
}

/// A matrix's module with its block, and without: `model.layers.0.self_attn.q_proj` and `q_proj`.
fn module(parameter: &Parameter) -> (&str, &str) {
    let module = parameter.name.strip_suffix(".weight").unwrap_or(&parameter.name);
    (module, module.rsplit('.').next().unwrap_or(module))
}

/// The matrices of a block, each name once.
fn names(model: &Parameters) -> Vec<String> {
    let of_block =
        |one: &&Parameter| matches!(one.role, Role::Matrix | Role::Residual) && one.name.contains(".layers.0.");
    model.all.iter().filter(of_block).map(|one| module(one).1.to_string()).collect()
}

/// The adapters of a model at work.
pub struct Adapters {
    /// Where they lie.
    pub layout: Layout,
    /// `A` and `B` of each matrix.
    pub weights: Buffer<f32>,
    /// Their gradient, laid out alike.
    pub gradient: Buffer<f32>,
    /// Whether the model is read with them; without, it is the one that they stand beside.
    pub(super) at_work: bool,
    /// `s (x Aᵀ)`, and the gradient by `x Aᵀ`, `[rows, r]` each.
    inner: [Buffer<f32>; 2],
}

impl Adapters {
    /// Adapters that change nothing yet, drawn from `seed`, for batches of these extents.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn new(arena: &Arena, layout: Layout, extents: &Extents<'_>, seed: u64) -> Result<Self, ArenaError> {
        let (count, inner) = (layout.count(), extents.rows() * layout.asked.rank);
        let scratch = || arena.alloc(Label::Workspace, inner);
        let mut weights = arena.alloc::<f32>(Label::Weights, count)?;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for one in layout.parameters.iter().step_by(2) {
            let most = 1.0 / (one.shape[1] as f32).sqrt();
            weights[one.range.clone()].iter_mut().for_each(|a| *a = rng.random_range(-most..most));
        }
        let gradient = arena.alloc(Label::Gradients, count)?;
        Ok(Adapters { layout, weights, gradient, at_work: true, inner: [scratch()?, scratch()?] })
    }

    /// Writes them as `peft` lays them out, beside a `model` whose fingerprint is `base`.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub(super) fn export(&self, folder: &Path, model: &Path, base: &str) -> Result<(), TrainError> {
        let Layout { asked, targets, parameters, .. } = &self.layout;
        let outputs: Vec<Output<'_>> = parameters
            .iter()
            .map(|one| Output::f32(&one.name, one.shape.clone(), &self.weights[one.range.clone()]))
            .collect();
        let metadata = [("format", "pt"), ("base_model", base)];
        let metadata = metadata.map(|(key, value)| (key.to_string(), value.to_string())).into();
        file::write_with(&folder.join(adapter::WEIGHTS), &outputs, Some::<HashMap<_, _>>(metadata))?;
        // What begins with a dot would be looked for from the adapter's folder.
        let dotted = model.starts_with(".") || model.starts_with("..");
        let model = dotted.then(|| model.canonicalize().ok()).flatten().unwrap_or_else(|| model.into());
        let config = json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": model,
            "r": asked.rank,
            "lora_alpha": asked.alpha,
            "target_modules": targets,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": false,
            "use_rslora": false,
            "use_dora": false,
            "modules_to_save": null,
            "init_lora_weights": true,
            "inference_mode": true,
        });
        export::text(folder, adapter::CONFIG, &format!("{config:#}\n"))
    }

    /// Adds what the adapters of a layer make of `x` `[rows, in]` to its outputs `y` `[rows, out]`.
    pub(super) fn forward(&mut self, (layer, site): (usize, Site), cpu: &Cpu, x: &[f32], y: &mut [f32]) {
        if !self.at_work {
            return;
        }
        let Adapters { layout, weights, inner: [inner, _], .. } = self;
        let (rank, scale) = (layout.asked.rank, layout.asked.alpha / layout.asked.rank as f32);
        for adapter in &layout.blocks[layer][site as usize] {
            let Adapter { inputs, column, width, .. } = *adapter;
            let (a, b) = (&weights[adapter.a.clone()], &weights[adapter.b.clone()]);
            cpu.install(|| {
                y.par_chunks_mut(ROWS * width)
                    .zip(x.par_chunks(ROWS * inputs))
                    .zip(inner.par_chunks_mut(ROWS * rank))
                    .for_each(|((y, x), inner)| {
                        let inner = &mut inner[..x.len() / inputs * rank];
                        narrow(inner, (x, [inputs, inputs]), Matrix::new(a, rank, inputs).transposed(), scale);
                        let (rows, outputs) = (x.len() / inputs, b.len() / rank);
                        let b = Matrix::new(b, outputs, rank).transposed();
                        product(&mut y[column..], width, Matrix::new(inner, rows, rank), b, true, 1);
                    });
            });
        }
    }

    /// Adds to the gradients of a layer's adapters, and to `dx`, from the gradient by its outputs.
    pub(super) fn backward(
        &mut self,
        (layer, site): (usize, Site),
        cpu: &Cpu,
        (dy, x): (&[f32], &[f32]),
        dx: &mut [f32],
    ) {
        let Adapters { layout, weights, gradient, inner: [inner, dinner], .. } = self;
        let (rank, scale) = (layout.asked.rank, layout.asked.alpha / layout.asked.rank as f32);
        for adapter in &layout.blocks[layer][site as usize] {
            let Adapter { inputs, column, width, .. } = *adapter;
            let (a, b) = (&weights[adapter.a.clone()], &weights[adapter.b.clone()]);
            let (rows, outputs) = (x.len() / inputs, b.len() / rank);
            let (inner, dinner) = (&mut inner[..rows * rank], &mut dinner[..rows * rank]);
            cpu.install(|| {
                let inner = inner.par_chunks_mut(ROWS * rank).zip(dinner.par_chunks_mut(ROWS * rank));
                let rows = dx.par_chunks_mut(ROWS * inputs).zip(x.par_chunks(ROWS * inputs));
                rows.zip(dy.par_chunks(ROWS * width)).zip(inner).for_each(|(((dx, x), dy), (inner, dinner))| {
                    let a = Matrix::new(a, rank, inputs);
                    narrow(inner, (x, [inputs, inputs]), a.transposed(), scale);
                    narrow(dinner, (&dy[column..], [outputs, width]), Matrix::new(b, outputs, rank), scale);
                    product(dx, inputs, Matrix::new(dinner, x.len() / inputs, rank), a, true, 1);
                });
            });
            weight_gradient(cpu, &dy[column..], inner, &mut gradient[adapter.b.clone()], [rank, width]);
            weight_gradient(cpu, dinner, x, &mut gradient[adapter.a.clone()], [inputs, rank]);
        }
    }
}

/// `to = scale * from * right`, for as many rows as `to` has, of `[columns, stride]` in `from`.
fn narrow(to: &mut [f32], (from, [columns, stride]): (&[f32], [usize; 2]), right: Matrix<'_>, scale: f32) {
    let rank = right.columns();
    let left = Matrix::new(from, to.len() / rank, columns).with_row_stride(stride);
    product(to, rank, left, right, false, 1);
    to.iter_mut().for_each(|x| *x *= scale);
}
