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
use super::checkpoint::{self, Progress};
use super::data::Data;
use super::error::LOSS;
use super::export;
use super::head_gates::HeadGates;
use super::log::{self, Line, Log};
use super::recipe::{BUILTIN, DataSpec, Recipe, SourceSpec, Stage};
use super::run::{Options, RECORD, TrainError};
use super::text::HELD_OUT;
use super::vocabulary::Vocabulary;
use super::weights::Frozen;
use super::{Network, Parameters};
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
use std::time::Instant;

/// Name of the trained gates in a run's folder.
pub const POLICY: &str = "policy.safetensors";
/// Steps from one line of the log to the next, and from one checkpoint and look at held-out sequences to the next.
const LOG_STEPS: usize = 5;
const SAVE_STEPS: usize = 25;
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

/// What was added up since the last line of the log.
#[derive(Default)]
struct Since {
    steps: usize,
    distance: f64,
    seconds: f64,
}

/// Trains gates. Tells `watch` each line as it is logged.
///
/// # Errors
/// When settings, text, folder or memory do not allow it, or the loss stops being a number.
pub fn run(settings: &Settings, cpu: &Cpu, options: &Options, watch: &mut dyn FnMut(&Line)) -> Result<(), TrainError> {
    let misfit = |reason| TrainError::Misfit { name: "duo".into(), reason };
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

    let folder = options.out.as_path();
    checkpoint::check(options, Some(&model))?;
    std::fs::create_dir_all(folder).map_err(|error| TrainError::write(folder, &error))?;
    let digest = checkpoint::digest(&(settings, &base, checkpoint::of_text(settings.text.as_deref())));
    let weights = Frozen::open(&model, &parameters, &arena)?;
    let gates = HeadGates::new(&arena, &extents, settings.near)?;
    let mut network = Network::new(&arena, cpu, extents, recompute)?.with_head_gates(gates);
    let mut adamw = AdamW::new(&arena, HeadGates::count(&config))?;
    let mut progress = Progress::default();
    if options.resume {
        let alpha = &mut network.head_gates().alpha;
        progress = checkpoint::load(folder, &digest, [alpha.len(); 3], &mut |array, values| {
            let AdamW { mean, square } = &mut adamw;
            [&mut *alpha, mean, square][array as usize].copy_from_slice(values);
            Ok(())
        })?;
    }
    let log = Log::open(folder, progress.step)?;
    let (optimizer, mut since) = (settings.optimizer(), Since::default());
    let of_step = [settings.batch, settings.length];
    let end = options.stop_after.unwrap_or(usize::MAX).min(settings.steps);
    if checkpoint::is_done(folder, &progress, end) {
        return Ok(());
    }
    while progress.step < end {
        let (step, began) = (progress.step, Instant::now());
        let batch = data.batch(cpu, progress.sequences, of_step)?;
        if batch.targets.is_empty() {
            let length = settings.length;
            return Err(misfit(format!("{length} tokens have no room for a needle and its question; give more")));
        }
        network.head_gates().gradient.fill(0.0);
        let distance = network.identify(weights.all(), &batch, Some(settings.pressure))?;
        TrainError::diverged(LOSS, step, distance)?;
        let rate = settings.rate(step);
        let HeadGates { alpha, gradient, parameters, .. } = network.head_gates();
        adamw.update(cpu, &optimizer, parameters, (step, rate), alpha, gradient);
        alpha.iter_mut().for_each(|alpha| *alpha = alpha.clamp(0.0, 1.0));
        let seconds = progress.add(settings.batch, batch.tokens.len(), began);
        since = Since { steps: since.steps + 1, distance: since.distance + distance, seconds: since.seconds + seconds };

        let done = progress.step;
        if done.is_multiple_of(LOG_STEPS) || done == end {
            let alpha = &network.head_gates().alpha;
            let line = Line::Heads {
                step: done,
                distance: since.distance / since.steps as f64,
                alpha: mean(alpha),
                low: alpha.iter().filter(|alpha| **alpha < 0.5).count(),
                heads: alpha.len(),
                rate,
                tokens: progress.tokens,
                seconds: progress.seconds,
                tokens_per_second: (since.steps * batch.tokens.len()) as f64 / since.seconds,
            };
            log.tell(watch, line)?;
            since = Since::default();
        }
        if done.is_multiple_of(SAVE_STEPS) || done == end {
            let alpha = network.head_gates().alpha.to_vec();
            write_policy(settings, &config, &base, &alpha, &progress, &folder.join(POLICY))?;
            let mut judge = |order: &[usize]| -> Result<f64, TrainError> {
                let (gates, half) = (&mut network.head_gates().alpha, order.len() / 2);
                order.iter().enumerate().for_each(|(rank, &head)| gates[head] = if rank < half { 0.0 } else { 1.0 });
                let batches = JUDGED.div_ceil(settings.batch);
                let mut sum = 0.0;
                for index in 0..batches {
                    let batch = data.batch(cpu, HELD_OUT + (index * settings.batch) as u64, of_step)?;
                    sum += network.identify(weights.all(), &batch, None)?;
                }
                network.head_gates().alpha.copy_from_slice(&alpha);
                Ok(sum / batches as f64)
            };
            let mut order: Vec<usize> = (0..alpha.len()).collect();
            order.sort_by(|&a, &b| alpha[a].total_cmp(&alpha[b]));
            let distance = judge(&order)?;
            order.shuffle(&mut ChaCha8Rng::seed_from_u64(settings.seed));
            let line = Line::HeldOutHeads { step: done, distance, random: judge(&order)? };
            log.tell(watch, line)?;
            // Last: a run that is killed before it writes all of this again.
            checkpoint::save(folder, &digest, &progress, [alpha.len(); 3], &mut |array, take| {
                take([&alpha, &*adamw.mean, &*adamw.square][array as usize])
            })?;
        }
    }
    let record = json!({
        "method": "duo",
        "settings": settings,
        "base_model": base,
        "trained_parameters": HeadGates::count(&config),
        "recompute": recompute,
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "held_out": log::last(folder, |line| matches!(line, Line::HeldOutHeads { .. }))?,
        "peak_bytes": arena.usage().peak,
        "environment": options.environment,
    });
    export::text(folder, RECORD, &format!("{record:#}\n"))
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
