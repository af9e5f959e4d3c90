//! A run of `--method duo`: gates that learn which heads retrieve ([`super::head_gates`]), DuoAttention's identification of heads.
//!
//! What is read is needles hidden in the user's text or in generated sentences, and questions about all of them: the heads that
//! answers need are those that must read everything. The loss is the mean square of what the last norm's output is off the
//! dense model's where answers are written, plus `pressure` times the mean of all gates, which are clipped to 0 to 1 before
//! each step. Constants are those of the authors' code (`duo_attn/train.py`): AdamW without decay at 0.02, a rate that rises over the
//! first fifth of the steps and falls over the last. Held out, the half of the heads with the lowest gates reads only what is near, and
//! beside it a half by lot.

use super::activations::{Extents, Recompute};
use super::adamw::{AdamW, Constants};
use super::checkpoint::{Array, Identity, Progress, as_written};
use super::data::Data;
use super::head_gates::HeadGates;
use super::log::{self, Line};
use super::method::{Method, Run, Since, Step, Tell};
use super::recipe::{BUILTIN, DataSpec, Recipe, SourceSpec, Stage};
use super::run::{Options, TrainError};
use super::text::HELD_OUT;
use super::vocabulary::Vocabulary;
use super::weights::Frozen;
use super::{Batch, Network, Parameters};
use crate::device::Cpu;
use crate::memory::Arena;
use crate::model::{Config, fingerprint, locate};
use crate::policy::allocation::Near;
use crate::tensor::DType;
use crate::tensor::file::{self, Output};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Name of the trained gates in a run's folder.
pub const POLICY: &str = "policy.safetensors";
/// How many held-out sequences are judged.
const JUDGED: usize = 4;
/// Between the seeds of what is read here and of what evaluations ask.
const GENERATED: u64 = 0xD00_0000_0000;

/// What is trained, on what, for how long.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The model: a folder, a GGUF file, or `builtin`.
    pub model: PathBuf,
    /// What a streaming head reads.
    pub near: Near,
    /// A text to hide needles in; generated sentences without one.
    pub text: Option<PathBuf>,
    /// Steps.
    pub steps: usize,
    /// Tokens of a sequence.
    pub length: usize,
    /// Sequences of a step.
    pub batch: usize,
    /// First number of everything random.
    pub seed: u64,
    /// Largest learning rate.
    pub learning_rate: f32,
    /// Weight of the mean of the gates in the loss.
    pub pressure: f64,
    /// Type of the model's matrices: f32 or bf16.
    pub weights: DType,
}

impl Settings {
    fn check(&self, config: &Config) -> Result<(), String> {
        let Settings { near: Near { sink, recent }, length, steps, batch, learning_rate, pressure, .. } = *self;
        if recent == 0 || sink + recent >= length {
            return Err(format!(
                "a streaming head reads {sink} first and {recent} recent tokens; it must be at least 1 recent one, and together \
                 less than a sequence, {length} tokens"
            ));
        }
        config.check_even_windows()?;
        if !(64..=config.most_tokens()).contains(&length) {
            let most = config.most_tokens();
            return Err(format!("the length is {length}; it must be 64 to the model's longest context, {most}"));
        }
        if steps == 0 || batch == 0 {
            return Err(format!("{steps} steps of {batch} sequences; both must be at least 1"));
        }
        let positive = |value: f64| value > 0.0 && value.is_finite();
        if !(positive(learning_rate.into()) && positive(pressure)) {
            return Err(format!(
                "learning rate {learning_rate} and pressure {pressure}; both must be finite and above 0"
            ));
        }
        Ok(())
    }

    /// The learning rate of a step: up over the first fifth, down over the last, at least a tenth.
    fn rate(&self, step: usize) -> f32 {
        let fifth = (self.steps / 5).max(1) as f32;
        let [up, down] = [step + 1, self.steps - step].map(|steps| (steps as f32 / fifth).max(0.1));
        self.learning_rate * up.min(down).min(1.0)
    }

    fn optimizer(&self) -> Constants {
        Constants {
            learning_rate: self.learning_rate,
            warmup_steps: 0,
            final_share: 1.0,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            clip: f32::MAX,
        }
    }

    fn data<'a>(&self, vocabulary: &'a Vocabulary) -> Result<Data<'a>, TrainError> {
        let Settings { length, batch, steps, seed, .. } = *self;
        let mut recipe = Recipe::parse(BUILTIN, Path::new("built-in"))?;
        let needles = SourceSpec { source: "needles".into(), share: 1.0, from_length: 0 };
        recipe.data = DataSpec { text_weight: 0.0, text: self.text.clone(), sources: vec![needles] };
        (recipe.stages, recipe.seed) = (vec![Stage { length, batch, steps }], seed ^ GENERATED);
        Ok(Data::new(&recipe, vocabulary)?)
    }
}

/// Gates of the heads of a frozen model.
struct Duo<'a> {
    settings: &'a Settings,
    cpu: &'a Cpu,
    config: &'a Config,
    base: &'a str,
    folder: &'a Path,
    data: Data<'a>,
    weights: Frozen,
    network: Network<'a>,
    adamw: AdamW,
    optimizer: Constants,
}

/// Trains gates. Tells `watch` each line as it is logged.
///
/// # Errors
/// When settings, text, folder or memory do not allow it, or the loss stops being a number.
pub fn run(settings: &Settings, cpu: &Cpu, options: &Options, watch: &mut dyn FnMut(&Line)) -> Result<(), TrainError> {
    let model = locate(&settings.model)?;
    let config = Config::read(&model)?;
    settings.check(&config).map_err(misfit)?;
    let base = fingerprint(&model)?;
    let vocabulary = Vocabulary::of_folder(&model, &config)?;
    let data = settings.data(&vocabulary)?;
    let parameters = Parameters::all_frozen(&config, settings.weights);
    let arena = Arena::with_limit(options.limit_bytes);
    let extents = Extents { parameters: &parameters, batch: settings.batch, len: settings.length, skipped: 0 };
    let beside = HeadGates::bytes(&extents).into_values().sum::<u64>() + AdamW::bytes(HeadGates::count(&config));
    let bytes = |mode| beside + extents.training_bytes(mode, cpu.threads()).into_values().sum::<u64>();
    let recompute = Recompute::within(options.limit_bytes, bytes);

    let run = Run::begin(options, &model, Identity::new(settings, Some(&base), settings.text.as_deref()))?;
    let weights = Frozen::open(&model, &parameters, &arena)?;
    let gates = HeadGates::new(&arena, &extents, settings.near)?;
    let network = Network::new(&arena, cpu, extents, recompute)?.with_head_gates(gates);
    let adamw = AdamW::new(&arena, HeadGates::count(&config))?;
    let folder = run.folder();
    let (config, base, optimizer) = (&config, &base[..], settings.optimizer());
    let mut duo = Duo { settings, cpu, config, base, folder, data, weights, network, adamw, optimizer };
    let Some(progress) = run.steps(&mut duo, settings.steps, watch)? else { return Ok(()) };
    let record = json!({
        "method": "duo",
        "settings": as_written(settings),
        "base_model": base,
        "trained_parameters": HeadGates::count(config),
        "recompute": recompute,
        "held_out": log::last(folder, |line| matches!(line, Line::HeldOutHeads { .. }))?,
    });
    run.record(&progress, &arena.usage(), record)
}

fn misfit(reason: String) -> TrainError {
    TrainError::Misfit { name: "--method duo".into(), reason }
}

/// Refuses sequences in which no token is judged.
fn has_targets(batch: &Batch, length: usize) -> Result<(), TrainError> {
    match batch.targets.is_empty() {
        true => Err(misfit(format!("{length} tokens have no room for a needle and its question; give more"))),
        false => Ok(()),
    }
}

impl Duo<'_> {
    /// Distance on held-out sequences with the first half of `order` reading only what is near.
    fn judge(&mut self, order: &[usize], alpha: &[f32]) -> Result<f64, TrainError> {
        let Settings { batch, length, .. } = *self.settings;
        let (gates, half) = (&mut self.network.head_gates().alpha, order.len() / 2);
        order.iter().enumerate().for_each(|(rank, &head)| gates[head] = if rank < half { 0.0 } else { 1.0 });
        let batches = JUDGED.div_ceil(batch);
        let mut sum = 0.0;
        for index in 0..batches {
            let read = self.data.batch(self.cpu, HELD_OUT + (index * batch) as u64, [batch, length])?;
            has_targets(&read, length)?;
            sum += self.network.identify(self.weights.all(), &read, None)?;
        }
        self.network.head_gates().alpha.copy_from_slice(alpha);
        Ok(sum / batches as f64)
    }
}

impl Method for Duo<'_> {
    fn arrays(&mut self, array: Array) -> Vec<&mut [f32]> {
        vec![self.adamw.array(&mut self.network.head_gates().alpha, array)]
    }

    fn step(&mut self, progress: &Progress) -> Result<Step, TrainError> {
        let Settings { batch: sequences, length, pressure, .. } = *self.settings;
        let batch = self.data.batch(self.cpu, progress.sequences, [sequences, length])?;
        has_targets(&batch, length)?;
        self.network.head_gates().gradient.fill(0.0);
        let loss = self.network.identify(self.weights.all(), &batch, Some(pressure))?;
        let rate = self.settings.rate(progress.step);
        let HeadGates { alpha, gradient, parameters, .. } = self.network.head_gates();
        let gradient_norm =
            self.adamw.update(self.cpu, &self.optimizer, parameters, (progress.step, rate), alpha, gradient);
        alpha.iter_mut().for_each(|alpha| *alpha = alpha.clamp(0.0, 1.0));
        Ok(Step { sequences, tokens: batch.tokens.len(), loss, gradient_norm, rate })
    }

    fn log(&mut self, progress: &Progress, since: &Since, tell: Tell<'_>) -> Result<(), TrainError> {
        let alpha = &self.network.head_gates().alpha;
        tell(Line::Heads {
            step: progress.step,
            distance: since.loss(),
            alpha: mean(alpha),
            low: alpha.iter().filter(|alpha| **alpha < 0.5).count(),
            heads: alpha.len(),
            rate: since.last.rate,
            tokens: progress.tokens,
            seconds: progress.seconds,
            tokens_per_second: since.tokens_per_second(),
        })
    }

    fn save(&mut self, progress: &Progress, tell: Tell<'_>) -> Result<(), TrainError> {
        let alpha = self.network.head_gates().alpha.to_vec();
        write_policy(self.settings, self.config, self.base, &alpha, progress, &self.folder.join(POLICY))?;
        let mut order: Vec<usize> = (0..alpha.len()).collect();
        order.sort_by(|&a, &b| alpha[a].total_cmp(&alpha[b]));
        let distance = self.judge(&order, &alpha)?;
        order.shuffle(&mut ChaCha8Rng::seed_from_u64(self.settings.seed));
        let random = self.judge(&order, &alpha)?;
        tell(Line::HeldOutHeads { step: progress.step, distance, random })
    }
}

fn mean(alpha: &[f32]) -> f64 {
    alpha.iter().map(|alpha| f64::from(*alpha)).sum::<f64>() / alpha.len() as f64
}

/// Writes the gates as the policy part `duo` reads them.
fn write_policy(
    settings: &Settings,
    config: &Config,
    base: &str,
    alpha: &[f32],
    progress: &Progress,
    path: &Path,
) -> Result<(), TrainError> {
    let outputs = [Output::f32("duo.alpha", vec![config.layers, config.kv_heads], alpha)];
    let metadata = [
        ("base_model", base.to_string()),
        ("sink", settings.near.sink.to_string()),
        ("recent", settings.near.recent.to_string()),
        ("steps", progress.step.to_string()),
        ("tokens", progress.tokens.to_string()),
    ];
    let metadata: HashMap<String, String> = metadata.map(|(key, value)| (key.to_string(), value)).into();
    Ok(file::write_with(path, &outputs, Some(metadata))?)
}
