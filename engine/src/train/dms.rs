//! A run of `--method dms`: gates that learn which tokens a frozen model can do without ([`super::gates`]), and beside them, where that
//! is asked for, adapters by which the model learns to do without them ([`super::lora`]). The dense model has no adapters. In a run of
//! `--method dmc` tokens are accumulated in place of being dropped (`accumulation.rs`).
//!
//! The loss of a step is the divergence from the dense model plus a one-sided term, the fraction of tokens that should have
//! been evicted and were not. That fraction is `1 - 1/ratio` with a ratio that rises linearly from 1 to the one asked for over
//! the first 80% of the steps. Of several ratios each has the part of the steps that its rise is of the whole, and its gates are
//! left at the end of it, as NVIDIA leaves those of every ratio on the way to the highest. What is read is the user's text, what the model writes itself (`written.rs`), or generated text and tasks; the last tenth of a text is
//! held out, and judged with decisions as they are at inference.

mod settings;

pub use settings::Settings;

use super::activations::{Extents, Recompute};
use super::adamw::{AdamW, Constants};
use super::checkpoint::{Array, Identity, Progress, as_written};
use super::data::Data;
use super::error::{GRADIENT_NORM, HELD_OUT_LOSS};
use super::gates::{Gates, Mode, OFFSET, SCALE, TAU};
use super::log::{self, Line};
use super::lora::{Adapters, Layout};
use super::method::{Method, Run, Since, Step, Tell};
use super::recipe::{BUILTIN, Recipe, Stage};
use super::run::{Options, TrainError};
use super::text::{HELD_OUT, TextSource};
use super::vocabulary::Vocabulary;
use super::weights::Frozen;
use super::written::Written;
use super::{Network, Parameters};
use crate::device::Cpu;
use crate::memory::Arena;
use crate::model::{Config, fingerprint, locate};
use crate::tensor::file::{self, Output};
use serde_json::json;
use std::collections::HashMap;
use std::path::Path;

/// Name of the trained gates in a run's folder.
pub const POLICY: &str = "policy.safetensors";
/// Between the seeds of generated sequences here and of what evaluations ask.
const GENERATED: u64 = 0xD35_0000_0000;
/// How many held-out sequences are judged.
const JUDGED: usize = 4;

/// What sequences are made of.
enum Source<'a> {
    Generated(Box<Data<'a>>),
    Text(TextSource<'a>),
    Written(Box<Written<'a>>),
}

impl<'a> Source<'a> {
    fn new(
        settings: &Settings,
        model: &Path,
        vocabulary: &'a Vocabulary,
        arena: &'a Arena,
    ) -> Result<Self, TrainError> {
        let Settings { length, batch, steps, seed, .. } = *settings;
        if settings.written {
            let numbers = (length, seed ^ GENERATED);
            return Ok(Source::Written(Box::new(Written::open(model, vocabulary, numbers, settings.weights, arena)?)));
        }
        let Some(path) = &settings.text else {
            let mut recipe = Recipe::parse(BUILTIN, Path::new("built-in"))?;
            (recipe.stages, recipe.seed) = (vec![Stage { length, batch, steps }], seed ^ GENERATED);
            return Ok(Source::Generated(Box::new(Data::new(&recipe, vocabulary)?)));
        };
        let misfit = |reason| TrainError::Misfit { name: format!("--method {}", settings.method()), reason };
        Ok(Source::Text(TextSource::open(path, vocabulary, length, seed).map_err(misfit)?))
    }

    /// Most bytes of the arena that reading takes for a while.
    fn bytes(&self, threads: usize) -> u64 {
        match self {
            Source::Written(written) => written.writing_bytes(threads),
            Source::Generated(_) | Source::Text(_) => 0,
        }
    }

    /// `count` sequences of `len` tokens, from number `first` on; numbers from [`HELD_OUT`] on are of what no step reads.
    fn tokens(&mut self, cpu: &Cpu, first: u64, [count, len]: [usize; 2]) -> Result<Vec<u32>, TrainError> {
        match self {
            Source::Generated(data) => Ok(data.batch(cpu, first, [count, len])?.tokens),
            Source::Text(text) => Ok(text.drawn(first, [count, len])),
            Source::Written(written) => written.drawn(cpu, first, count),
        }
    }
}

/// Gates, and adapters where there are some, beside a frozen model.
struct Dms<'a> {
    settings: &'a Settings,
    cpu: &'a Cpu,
    config: &'a Config,
    base: &'a str,
    folder: &'a Path,
    source: Source<'a>,
    weights: Frozen,
    network: Network<'a>,
    /// Of the gates, and of the adapters.
    averages: Vec<AdamW>,
    optimizer: Constants,
    /// Fractions of tokens that were evicted since the last line of the log, added up.
    evicted: f64,
}

/// Trains gates. Tells `watch` each line as it is logged.
///
/// # Errors
/// When settings, text, folder or memory do not allow it, the loss stops being a number, or nothing or everything is evicted.
pub fn run(settings: &Settings, cpu: &Cpu, options: &Options, watch: &mut dyn FnMut(&Line)) -> Result<(), TrainError> {
    let misfit = |reason| TrainError::Misfit { name: format!("--method {}", settings.method()), reason };
    let model = locate(&settings.model)?;
    let config = Config::read(&model)?;
    settings.check(&config).map_err(misfit)?;
    let base = fingerprint(&model)?;
    let vocabulary = Vocabulary::of_folder(&model, &config)?;
    let parameters = Parameters::all_frozen(&config, settings.weights);
    let layout = settings.adapters.as_ref().map(|asked| Layout::beside(&model, &parameters, asked));
    let layout = layout.transpose().map_err(misfit)?;
    let arena = Arena::with_limit(options.limit_bytes);
    let source = Source::new(settings, &model, &vocabulary, &arena)?;
    let Settings { batch, length: len, .. } = *settings;
    let design = settings.design();
    // Rows that no token is gone for are those of the dense model where nothing but gates is trained.
    let skipped = if batch == 1 && layout.is_none() { design.fate.reach() } else { 0 };
    let extents = Extents { parameters: &parameters, batch, len, skipped };
    let count = Gates::count(&config, design) + layout.as_ref().map_or(0, Layout::count);
    let of_adapters = layout.as_ref().map(|layout| layout.bytes(&extents)).unwrap_or_default();
    let of_both = Gates::bytes(&extents, design).into_values().chain(of_adapters.into_values()).sum::<u64>();
    let beside = of_both + AdamW::bytes(count) + arena.usage().live_bytes + source.bytes(cpu.threads());
    let bytes = |mode| beside + extents.training_bytes(mode, cpu.threads()).into_values().sum::<u64>();
    let recompute = Recompute::within(options.limit_bytes, bytes);

    let run = Run::begin(options, &model, Identity::new(settings, Some(&base), settings.text.as_deref()))?;
    let weights = Frozen::open(&model, &parameters, &arena)?;
    let mut gates = Gates::new(&arena, &extents, design)?;
    gates.draw(settings.seed);
    let mut network = Network::new(&arena, cpu, extents, recompute)?.with_gates(&arena, gates)?;
    let mut averages = vec![AdamW::new(&arena, Gates::count(&config, design))?];
    if let Some(layout) = layout {
        averages.push(AdamW::new(&arena, layout.count())?);
        network = network.with_adapters(Adapters::new(&arena, layout, &extents, settings.seed)?);
    }
    let folder = run.folder();
    let (config, base, optimizer) = (&config, &base[..], settings.optimizer());
    let mut dms =
        Dms { settings, cpu, config, base, folder, source, weights, network, averages, optimizer, evicted: 0.0 };
    let Some(progress) = run.steps(&mut dms, settings.steps, watch)? else { return Ok(()) };
    let record = json!({
        "method": settings.method(),
        "settings": as_written(settings),
        "base_model": base,
        "scale": SCALE,
        "offset": OFFSET,
        "temperature": TAU,
        "trained_parameters": count,
        "recompute": recompute,
        "held_out": log::last(folder, |line| matches!(line, Line::HeldOutGates { .. }))?,
    });
    run.record(&progress, &arena.usage(), record)
}

impl Method for Dms<'_> {
    fn arrays(&mut self, array: Array) -> Vec<&mut [f32]> {
        match array {
            Array::Weights => {
                let (gates, adapters) = self.network.gates_and_adapters();
                std::iter::once(&mut *gates.weights).chain(adapters.map(|adapters| &mut *adapters.weights)).collect()
            }
            Array::Mean => self.averages.iter_mut().map(|one| &mut *one.mean).collect(),
            Array::Square => self.averages.iter_mut().map(|one| &mut *one.square).collect(),
        }
    }

    fn step(&mut self, progress: &Progress) -> Result<Step, TrainError> {
        let Dms { settings, cpu, network, averages, optimizer, .. } = self;
        let Settings { batch, length, seed, steps, pressure, .. } = **settings;
        let tokens = self.source.tokens(cpu, progress.sequences, [batch, length])?;
        let step = progress.step;
        let (gates, adapters) = network.gates_and_adapters();
        gates.gradient.fill(0.0);
        if let Some(adapters) = adapters {
            adapters.gradient.fill(0.0);
        }
        let (mode, target) = (Mode::Relaxed { seed, step: step as u64 }, settings.target(step));
        let found = network.distil(self.weights.all(), &tokens, mode, Some((target, pressure)))?;
        let rate = optimizer.rate(step, steps);
        let (gates, adapters) = network.gates_and_adapters();
        let Gates { weights: trained, gradient, parameters, .. } = gates;
        let gradient_norm = averages[0].update(cpu, optimizer, parameters, (step, rate), trained, gradient);
        if let Some(Adapters { weights: trained, gradient, layout, .. }) = adapters {
            let norm = averages[1].update(cpu, optimizer, &layout.parameters, (step, rate), trained, gradient);
            TrainError::diverged(GRADIENT_NORM, step, norm)?;
        }
        self.evicted += found.evicted;
        Ok(Step { sequences: batch, tokens: tokens.len(), loss: found.kl, gradient_norm, rate })
    }

    fn log(&mut self, progress: &Progress, since: &Since, tell: Tell<'_>) -> Result<(), TrainError> {
        let target = self.settings.target(progress.step - 1);
        let evicted = std::mem::take(&mut self.evicted) / since.steps as f64;
        tell(Line::Gates {
            step: progress.step,
            kl: since.loss(),
            evicted,
            target,
            rate: since.last.rate,
            gradient_norm: since.gradient_norm(),
            tokens: progress.tokens,
            seconds: progress.seconds,
            tokens_per_second: since.tokens_per_second(),
        })?;
        match self.settings.collapsed(progress.step, evicted, target) {
            true => Err(TrainError::Collapsed { step: progress.step, evicted, target }),
            false => Ok(()),
        }
    }

    fn is_milestone(&self, steps: usize) -> bool {
        steps == self.settings.stage(steps - 1).2.end
    }

    fn save(&mut self, progress: &Progress, tell: Tell<'_>) -> Result<(), TrainError> {
        let Dms { settings, network, folder, .. } = self;
        let Settings { batch, length, .. } = **settings;
        let (mut kl, mut evicted) = (0.0, 0.0);
        let batches = JUDGED.div_ceil(batch);
        for index in 0..batches {
            let tokens = self.source.tokens(self.cpu, HELD_OUT + (index * batch) as u64, [batch, length])?;
            let found = network.distil(self.weights.all(), &tokens, Mode::Hard, None)?;
            (kl, evicted) = (kl + found.kl / batches as f64, evicted + found.evicted / batches as f64);
        }
        let done = progress.step;
        TrainError::diverged(HELD_OUT_LOSS, done - 1, kl)?;
        tell(Line::HeldOutGates { step: done, kl, evicted })?;
        let (gates, adapters) = network.gates_and_adapters();
        // Gates belong to the model that they were trained in: with adapters, that of this folder.
        let mut of = self.base.to_string();
        if let Some(adapters) = adapters {
            adapters.export(folder, &settings.model, self.base)?;
            of = fingerprint(folder)?;
        }
        let write = |name: &str| write_policy(settings, self.config, &of, gates, progress, &folder.join(name));
        write(POLICY)?;
        let (ratio, _, stage) = settings.stage(done - 1);
        if done == stage.end && done < settings.steps {
            write(&format!("policy-{ratio}x.safetensors"))?;
        }
        Ok(())
    }
}

/// Writes the gates as a policy reads them.
fn write_policy(
    settings: &Settings,
    config: &Config,
    base: &str,
    gates: &Gates,
    progress: &Progress,
    path: &Path,
) -> Result<(), TrainError> {
    let Config { layers, kv_heads, hidden, .. } = *config;
    let (method, folded) = (settings.method(), gates.folded());
    let named =
        ["", ".importance", ".inner"].map(|what| ["weight", "bias"].map(|part| format!("{method}{what}.{part}")));
    let shapes = [vec![layers, kv_heads, settings.inner.unwrap_or(hidden)], vec![layers, kv_heads]];
    let of_functions = named.iter().zip(&folded).flat_map(|(names, values)| names.iter().zip(&shapes).zip(values));
    let mut outputs: Vec<Output<'_>> =
        of_functions.map(|((name, shape), values)| Output::f32(name, shape.clone(), values)).collect();
    if let Some(inner) = settings.inner {
        let shapes = [vec![layers, inner, hidden], vec![layers, inner]];
        let tensors = named[2].iter().zip(shapes).zip(gates.inner());
        outputs.extend(tensors.map(|((name, shape), values)| Output::f32(name, shape, values)));
    }
    let metadata = [
        ("base_model", base.to_string()),
        ("window", settings.window.to_string()),
        ("decided_by", settings.decided_by.name().to_string()),
        ("ratio", settings.stage(progress.step - 1).0.to_string()),
        ("steps", progress.step.to_string()),
        ("tokens", progress.tokens.to_string()),
    ];
    let metadata: HashMap<String, String> = metadata.map(|(key, value)| (key.to_string(), value)).into();
    Ok(file::write_with(path, &outputs, Some(metadata))?)
}
