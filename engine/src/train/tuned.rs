//! What fine-tuning trains and what it leaves as it is: where the numbers lie, their bytes, and the files that come out.

use super::activations::{Extents, Recompute};
use super::adamw::Constants;
use super::checkpoint::Array;
use super::export;
use super::holder::Whole;
use super::lora::{Adapters, Layout};
use super::network::Network;
use super::optimizer::{Kind, Optimizer};
use super::origin::{Folder, Origin, Start};
use super::parameters::{Parameter, Parameters};
use super::run::TrainError;
use super::tune::{Method, Settings};
use super::weights::{Frozen, Packed, Weights};
use crate::device::Cpu;
use crate::format::RowFormat;
use crate::memory::{Arena, ArenaError, Buffer, Label, LabelBytes};
use crate::model::{Config, Mixture};
use crate::tensor::DType;
use std::path::{Path, PathBuf};

/// What is trained of a model, before anything is taken from an arena.
pub(super) struct Plan {
    method: Method,
    /// All of the model, of which adapters train nothing.
    pub parameters: Parameters,
    layout: Option<Layout>,
    kind: Kind,
    /// In what the pass reads each parameter, where that is coded (`qat`).
    formats: Option<Vec<RowFormat>>,
    model: PathBuf,
    /// Names and contents of what stands beside the weights of a model that is trained whole.
    files: Vec<(&'static str, String)>,
}

impl Plan {
    /// What settings ask for.
    ///
    /// # Errors
    /// In one line, when the model cannot be trained so.
    pub fn new(settings: &Settings, config: &Config, model: &Path) -> Result<Self, String> {
        let Settings { method, weights: dtype, optimizer: kind, .. } = *settings;
        let (mut files, mut layout) = (Vec::new(), None);
        let formats = settings.qat.as_ref().map(|name| coded(name, config)).transpose()?;
        let parameters = match &settings.adapters {
            Some(asked) => {
                let parameters = Parameters::all_frozen(config, dtype);
                layout = Some(Layout::beside(model, &parameters, asked)?);
                parameters
            }
            None => {
                // Of a GGUF file the configuration is that of the folder that comes out.
                let start = Origin::Folder(Folder { from: settings.model.clone() }).open(None);
                let Start { config, files: beside, .. } = start.map_err(|error| error.to_string())?;
                files = beside;
                Parameters { dtype, ..Parameters::new(&config) }
            }
        };
        Ok(Plan { method, parameters, layout, kind, formats, model: model.into(), files })
    }

    /// Whether the pass reads other numbers than those that are trained.
    fn has_master(&self) -> bool {
        self.method == Method::Full && (self.parameters.dtype == DType::Bf16 || self.formats.is_some())
    }

    /// What is trained: all of the model's parameters, or those of adapters.
    fn trained(&self) -> &[Parameter] {
        self.layout.as_ref().map_or(&self.parameters.all, |layout| &layout.parameters)
    }

    /// The model with its matrices packed, as `qlora` reads it.
    ///
    /// # Errors
    /// When a file cannot be read or does not fit, or nothing of it is packed.
    pub fn packed(&self, arena: &Arena) -> Result<Packed, TrainError> {
        let packed = Packed::open(&self.model, &self.parameters, arena)?;
        if packed.is_coded() {
            return Ok(packed);
        }
        let reason = format!(
            "no matrix of '{}' is packed; name a GGUF file that is quantised (kvsieve quantize writes one), or take lora",
            self.model.display()
        );
        Err(TrainError::Misfit { name: format!("--method {}", self.method.name()), reason })
    }

    /// Numbers that are trained.
    pub fn trained_count(&self) -> usize {
        self.layout.as_ref().map_or(self.parameters.trained_count(), Layout::count)
    }

    /// Adapters that change nothing yet, where they are what is trained.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn adapters(&self, arena: &Arena, extents: &Extents<'_>, seed: u64) -> Result<Option<Adapters>, ArenaError> {
        self.layout.clone().map(|layout| Adapters::new(arena, layout, extents, seed)).transpose()
    }

    /// Bytes of fine-tuning, for each label: what [`Tuned`], a network of these extents, and its adapters take. `packed` are the bytes
    /// of a model whose matrices stay packed ([`Tuned::packed_bytes`]).
    ///
    /// Weights are those of the pass. A model that is trained whole in bf16, or for codes, has a master copy in f32,
    /// which counts as the optimizer's.
    pub fn bytes(
        &self,
        extents: &Extents<'_>,
        recompute: Recompute,
        threads: usize,
        packed: Option<u64>,
    ) -> LabelBytes {
        let mut bytes = extents.training_bytes(recompute, threads);
        if let Some(packed) = packed {
            bytes.insert(Label::Weights, packed);
        }
        let master = if self.has_master() { 4 * self.parameters.count() as u64 } else { 0 };
        bytes.insert(Label::Optimizer, master + self.kind.bytes(self.trained()));
        for (label, more) in self.layout.iter().flat_map(|layout| layout.bytes(extents)) {
            *bytes.entry(label).or_default() += more;
        }
        bytes
    }

    /// Writes what was trained: an adapter as `peft` lays it out, or a model's folder.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn export(
        &self,
        folder: &Path,
        model: &Path,
        base: &str,
        tuned: &mut Tuned,
        network: &mut Network<'_>,
    ) -> Result<(), TrainError> {
        if self.layout.is_some() {
            return network.adapters().export(folder, model, base);
        }
        let weights = tuned.array(network, Array::Weights);
        export::write(folder, &self.files, &self.parameters, |take| take(weights))
    }
}

/// The format of each parameter, in a file type of `quantize` or all in one format.
fn coded(name: &str, config: &Config) -> Result<Vec<RowFormat>, String> {
    if let Ok(mixture) = name.parse::<Mixture>() {
        return Ok(mixture.plan(config).into_iter().map(|one| one.format).collect());
    }
    let format: RowFormat = name.parse().map_err(|error| format!("--qat: {error}; or a file type of quantize"))?;
    config.check_weights(format)?;
    Ok(vec![format; "f32".parse::<Mixture>()?.plan(config).len()])
}

/// The model's own numbers.
enum Base {
    Frozen(Frozen),
    Trained {
        /// In f32.
        master: Buffer<f32>,
        /// What the pass reads, where that is something else.
        read: Option<Frozen>,
        gradient: Buffer<f32>,
    },
}

/// A model at work on what is trained.
pub(super) struct Tuned<'a> {
    plan: &'a Plan,
    base: Base,
    optimizer: Optimizer,
}

impl<'a> Tuned<'a> {
    /// Reads the model, and makes room for gradients and the optimizer.
    ///
    /// # Errors
    /// When a file cannot be read or does not fit, nothing is packed of what should be, or the arena has no room.
    pub fn open(plan: &'a Plan, arena: &Arena, cpu: &Cpu) -> Result<Self, TrainError> {
        let (parameters, model) = (&plan.parameters, plan.model.as_path());
        let base = match plan.method {
            Method::Lora => Base::Frozen(Frozen::open(model, parameters, arena)?),
            Method::Qlora => Base::Frozen(Frozen::Packed(plan.packed(arena)?)),
            Method::Full => {
                let label = if plan.has_master() { Label::Optimizer } else { Label::Weights };
                let master = Frozen::f32(model, parameters, arena, label)?;
                let read = plan.has_master().then(|| Frozen::room(parameters, arena)).transpose()?;
                Base::Trained { master, read, gradient: arena.alloc(Label::Gradients, parameters.trained_count())? }
            }
        };
        let optimizer = Optimizer::new(arena, plan.kind, plan.trained())?;
        let mut tuned = Tuned { plan, base, optimizer };
        tuned.refresh(cpu);
        Ok(tuned)
    }

    /// Bytes of the model by the formats that its matrices are packed in, where they are.
    pub fn packed_bytes(&self) -> Option<u64> {
        match &self.base {
            Base::Frozen(Frozen::Packed(packed)) => Some(packed.bytes()),
            Base::Frozen(_) | Base::Trained { .. } => None,
        }
    }

    /// Parameters and gradients of the model itself.
    pub fn holder(&mut self) -> Whole<'_> {
        match &mut self.base {
            Base::Frozen(frozen) => Whole { weights: frozen.all(), gradients: &mut [] },
            Base::Trained { master, read, gradient } => {
                let weights = read.as_ref().map_or(Weights::F32(master), Frozen::all);
                Whole { weights, gradients: gradient }
            }
        }
    }

    /// Begins a step.
    pub fn begin(&mut self, network: &mut Network<'_>) {
        match &mut self.base {
            Base::Frozen(_) => network.adapters().gradient.fill(0.0),
            Base::Trained { gradient, .. } => gradient.fill(0.0),
        }
    }

    /// Changes what is trained by one step, and gives the norm of the gradient before it was clipped.
    pub fn update(&mut self, cpu: &Cpu, constants: &Constants, at: (usize, f32), network: &mut Network<'_>) -> f64 {
        let Tuned { plan, base, optimizer } = self;
        let norm = match base {
            Base::Frozen(_) => {
                let Adapters { weights, gradient, layout, .. } = network.adapters();
                optimizer.update(cpu, constants, &layout.parameters, at, weights, gradient)
            }
            Base::Trained { master, gradient, .. } => {
                optimizer.update(cpu, constants, &plan.parameters.all, at, master, gradient)
            }
        };
        self.refresh(cpu);
        norm
    }

    /// Rounds what the pass reads anew.
    pub fn refresh(&mut self, cpu: &Cpu) {
        let Base::Trained { master, read: Some(read), .. } = &mut self.base else { return };
        let formats = self.plan.formats.as_ref();
        for (index, one) in self.plan.parameters.all.iter().enumerate() {
            let from = &master[one.range.clone()];
            let format = formats.map(|formats| formats[index]).filter(|_| one.role.decays());
            read.put(cpu, one, from, format);
        }
    }

    /// Rounds the numbers of a model that was trained whole as its folder has them, behind the last step; says whether there is
    /// anything to round.
    pub fn round_as_written(&mut self, cpu: &Cpu) -> bool {
        let dtype = self.plan.parameters.config.dtype;
        let Base::Trained { master, .. } = &mut self.base else { return false };
        if dtype == DType::F32 {
            return false;
        }
        let mut rounded = Vec::new();
        for values in master.chunks_mut(export::PIECE) {
            rounded.resize(dtype.bytes() * values.len(), 0);
            dtype.encode(values, &mut rounded);
            dtype.decode(&rounded, values);
        }
        self.refresh(cpu);
        true
    }

    /// An array of a checkpoint.
    pub fn array<'t>(&'t mut self, network: &'t mut Network<'_>, array: Array) -> &'t mut [f32] {
        match (array, &mut self.base) {
            (Array::Weights, Base::Frozen(_)) => &mut network.adapters().weights,
            (Array::Weights, Base::Trained { master, .. }) => master,
            (Array::Mean, _) => &mut self.optimizer.mean,
            (Array::Square, _) => &mut self.optimizer.square,
        }
    }
}
