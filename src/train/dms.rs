//! A run of `--method dms`: gates that learn which tokens a frozen model can do without ([`super::gates`]).
//!
//! The loss of a step is the divergence from the dense model plus a one-sided term, the fraction of tokens that should have
//! been evicted and were not. That fraction is `1 - 1/ratio` with a ratio that rises linearly from 1 to the one asked for over
//! the first 80% of the steps. Of several ratios each has the part of the steps that its rise is of the whole, and its gates are
//! left at the end of it, as NVIDIA leaves those of every ratio on the way to the highest. What is read is the user's text, what the model writes itself (`written.rs`), or generated text and tasks; the last tenth of a text is
//! held out, and judged with decisions as they are at inference.

use super::activations::{Extents, Recompute};
use super::adamw::{AdamW, Constants};
use super::checkpoint::{self, Progress};
use super::data::Data;
use super::export;
use super::gates::{Gates, Mode, OFFSET, SCALE, TAU};
use super::log::{Line, Log};
use super::recipe::{BUILTIN, Recipe, Stage};
use super::run::{Options, RECORD, TrainError};
use super::text::{HELD_OUT, TextSource};
use super::vocabulary::Vocabulary;
use super::weights::Frozen;
use super::written::Written;
use super::{Network, Parameters};
use crate::device::Cpu;
use crate::memory::Arena;
use crate::model::{Config, fingerprint, locate};
use crate::policy::DecidedBy;
use crate::tensor::DType;
use crate::tensor::file::{self, Output};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Name of the trained gates in a run's folder.
pub const POLICY: &str = "policy.safetensors";
/// Fraction of a ratio's steps over which it rises.
const RAMP: f64 = 0.8;
/// Steps from one line of the log to the next, and from one checkpoint and look at held-out text to the next.
const LOG_STEPS: usize = 5;
const SAVE_STEPS: usize = 25;
/// Between the seeds of generated sequences here and of what evaluations ask.
const GENERATED: u64 = 0xD35_0000_0000;
/// How many held-out sequences are judged.
const JUDGED: usize = 4;

/// What is trained, on what, for how long.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The model: a folder, a GGUF file, or `builtin`.
    pub model: PathBuf,
    /// Tokens for each that stays, behind a window: one ratio, or several that are reached one after the other.
    pub ratios: Vec<f64>,
    /// Tokens of the window in which none is evicted.
    pub window: usize,
    /// A text to learn from; generated text and tasks without one.
    pub text: Option<PathBuf>,
    /// Whether the model writes what it learns from itself, in place of a text.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub written: bool,
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
    /// Weight of the term that asks for eviction.
    pub pressure: f64,
    /// Whose hidden state decides on a token.
    #[serde(default, skip_serializing_if = "is_itself")]
    pub decided_by: DecidedBy,
    /// Type of the model's matrices: f32 or bf16.
    pub weights: DType,
}

fn is_itself(by: &DecidedBy) -> bool {
    *by == DecidedBy::Itself
}

impl Settings {
    fn check(&self, config: &Config) -> Result<(), String> {
        let Settings { window, length, steps, batch, learning_rate, pressure, .. } = *self;
        let mut least = 1.0;
        for &ratio in &self.ratios {
            if !(ratio.is_finite() && ratio > least) {
                return Err(format!("the ratio is {ratio}; it must be finite and above {least}"));
            }
            least = ratio;
        }
        if window == 0 || window >= length {
            return Err(format!(
                "the window is {window}; it must be 1 to less than the training context, {length} tokens"
            ));
        }
        if !(16..=config.most_tokens()).contains(&length) {
            return Err(format!(
                "the length is {length}; it must be 16 to the model's longest context, {}",
                config.most_tokens()
            ));
        }
        if steps == 0 || batch == 0 {
            return Err(format!("{steps} steps of {batch} sequences; both must be at least 1"));
        }
        if !(learning_rate > 0.0 && learning_rate.is_finite() && pressure > 0.0 && pressure.is_finite()) {
            return Err(format!(
                "learning rate {learning_rate} and pressure {pressure}; both must be finite and above 0"
            ));
        }
        Ok(())
    }

    /// The ratio that a step is on the way to, the one before it, and the steps of this way.
    fn stage(&self, step: usize) -> (f64, f64, Range<usize>) {
        let last = self.ratios[self.ratios.len() - 1];
        let end = |ratio: f64| ((ratio - 1.0) / (last - 1.0) * self.steps as f64).round() as usize;
        let at = self.ratios.iter().position(|ratio| step < end(*ratio)).unwrap_or(self.ratios.len() - 1);
        let (from, to) = (if at == 0 { 1.0 } else { self.ratios[at - 1] }, self.ratios[at]);
        (to, from, end(from)..end(to))
    }

    /// The fraction of tokens to be evicted in a step.
    pub fn target(&self, step: usize) -> f64 {
        let (to, from, steps) = self.stage(step);
        let risen = ((step + 1 - steps.start) as f64 / (RAMP * steps.len() as f64)).min(1.0);
        1.0 - 1.0 / (from + (to - from) * risen)
    }

    /// Whether gates that `evicted` a fraction by step `done` let go of everything, or, past half of the steps, of next to
    /// nothing.
    fn collapsed(&self, done: usize, evicted: f64, target: f64) -> bool {
        evicted > 0.99 && target < 0.95 || 2 * done > self.steps && evicted < target / 4.0
    }

    fn optimizer(&self) -> Constants {
        Constants {
            learning_rate: self.learning_rate,
            warmup_steps: 10.min(self.steps / 10),
            final_share: 0.1,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            clip: 1.0,
        }
    }
}

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
        let misfit = |reason| TrainError::Misfit { name: "dms".into(), reason };
        Ok(Source::Text(TextSource::open(path, vocabulary, length, seed).map_err(misfit)?))
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

/// What was added up since the last line of the log.
#[derive(Default)]
struct Since {
    steps: usize,
    kl: f64,
    evicted: f64,
    gradient_norm: f64,
    seconds: f64,
}

/// Trains gates. Tells `watch` each line as it is logged.
///
/// # Errors
/// When settings, text, folder or memory do not allow it, the loss stops being a number, or nothing or everything is evicted.
pub fn run(settings: &Settings, cpu: &Cpu, options: &Options, watch: &mut dyn FnMut(&Line)) -> Result<(), TrainError> {
    let misfit = |reason| TrainError::Misfit { name: "dms".into(), reason };
    let model = locate(&settings.model)?;
    let config = Config::read(&model)?;
    settings.check(&config).map_err(misfit)?;
    let base = fingerprint(&model)?;
    let vocabulary = Vocabulary::of_folder(&model, &config)?;
    let parameters = Parameters::all_frozen(&config, settings.weights);
    let arena = Arena::with_limit(options.limit_bytes);
    let mut source = Source::new(settings, &model, &vocabulary, &arena)?;
    let Settings { batch, length: len, window, .. } = *settings;
    let skipped = if batch == 1 { window } else { 0 };
    let extents = Extents { parameters: &parameters, batch, len, skipped };
    let beside: u64 = Gates::bytes(&extents).into_values().sum();
    let bytes = |mode| beside + extents.training_bytes(mode, cpu.threads()).into_values().sum::<u64>();
    let recompute = Recompute::within(options.limit_bytes, bytes);

    let folder = options.out.as_path();
    checkpoint::check(options)?;
    std::fs::create_dir_all(folder).map_err(|error| TrainError::write(folder, &error))?;
    let digest = checkpoint::digest(&(settings, &base));
    let weights = Frozen::open(&model, &parameters, &arena)?;
    let gates = Gates::new(&arena, &extents, settings.window, settings.decided_by)?;
    let mut network = Network::new(&arena, cpu, extents, recompute)?.with_gates(&arena, gates)?;
    let mut adamw = AdamW::new(&arena, Gates::count(&config))?;
    let mut progress = Progress::default();
    if options.resume {
        let gates = network.gates();
        progress = checkpoint::load(folder, &digest, [gates.weights.len(); 3], |array, values| {
            let AdamW { mean, square } = &mut adamw;
            [&mut gates.weights, mean, square][array as usize].copy_from_slice(values);
            Ok(())
        })?;
    }
    let log = Log::open(folder, progress.step)?;
    let (optimizer, mut since) = (settings.optimizer(), Since::default());
    let extents = [settings.batch, settings.length];
    let end = options.stop_after.unwrap_or(usize::MAX).min(settings.steps);
    let mut held_out = None;
    while progress.step < end {
        let (step, began) = (progress.step, Instant::now());
        let tokens = source.tokens(cpu, progress.sequences, extents)?;
        let (mode, target) = (Mode::Relaxed { seed: settings.seed, step: step as u64 }, settings.target(step));
        network.gates().gradient.fill(0.0);
        let found = network.distil(weights.all(), &tokens, mode, Some((target, settings.pressure)))?;
        if !found.kl.is_finite() {
            return Err(TrainError::Diverged { step, loss: found.kl });
        }
        let rate = optimizer.rate(step, settings.steps);
        let Gates { weights: trained, gradient, parameters, .. } = network.gates();
        since.gradient_norm += adamw.update(cpu, &optimizer, parameters, (step, rate), trained, gradient);
        let seconds = progress.add(settings.batch, tokens.len(), began);
        since.seconds += seconds;
        since.steps += 1;
        since.kl += found.kl;
        since.evicted += found.evicted;

        let (done, steps) = (progress.step, since.steps as f64);
        if done.is_multiple_of(LOG_STEPS) || done == end {
            let evicted = since.evicted / steps;
            log.tell(
                watch,
                Line::Gates {
                    step: done,
                    kl: since.kl / steps,
                    evicted,
                    target,
                    rate,
                    gradient_norm: since.gradient_norm / steps,
                    tokens: progress.tokens,
                    seconds: progress.seconds,
                    tokens_per_second: steps * tokens.len() as f64 / since.seconds,
                },
            )?;
            if settings.collapsed(done, evicted, target) {
                return Err(TrainError::Collapsed { step: done, evicted, target });
            }
            since = Since::default();
        }
        let (ratio, _, stage) = settings.stage(step);
        if done.is_multiple_of(SAVE_STEPS) || done == end || done == stage.end {
            let (mut kl, mut evicted) = (0.0, 0.0);
            let batches = JUDGED.div_ceil(settings.batch);
            for index in 0..batches {
                let tokens = source.tokens(cpu, HELD_OUT + (index * settings.batch) as u64, extents)?;
                let found = network.distil(weights.all(), &tokens, Mode::Hard, None)?;
                (kl, evicted) = (kl + found.kl / batches as f64, evicted + found.evicted / batches as f64);
            }
            let line = Line::HeldOutGates { step: done, kl, evicted };
            held_out = serde_json::to_value(&line).ok();
            log.tell(watch, line)?;
            let weights = &network.gates().weights;
            checkpoint::save(folder, &digest, &progress, [weights.len(); 3], |array, take| {
                take([weights, &adamw.mean, &adamw.square][array as usize])
            })?;
            let write = |name: &str, gates: &Gates| {
                write_policy(settings, &config, &base, gates, &progress, &folder.join(name))
            };
            write(POLICY, network.gates())?;
            if done == stage.end && done < settings.steps {
                write(&format!("policy-{ratio}x.safetensors"), network.gates())?;
            }
        }
    }
    let record = json!({
        "method": "dms",
        "settings": settings,
        "base_model": base,
        "scale": SCALE,
        "offset": OFFSET,
        "temperature": TAU,
        "trained_parameters": Gates::count(&config),
        "recompute": recompute,
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "held_out": held_out,
        "peak_bytes": arena.usage().peak,
        "environment": options.environment,
    });
    export::text(folder, RECORD, &format!("{record:#}\n"))
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
    let [weight, bias] = gates.folded();
    let outputs = [
        Output::f32("dms.weight", vec![config.layers, config.kv_heads, config.hidden], &weight),
        Output::f32("dms.bias", vec![config.layers, config.kv_heads], &bias),
    ];
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_rises_to_the_one_asked_for_and_both_collapses_are_seen() {
        let settings = Settings {
            model: "builtin".into(),
            ratios: vec![4.0],
            window: 8,
            text: None,
            written: false,
            steps: 100,
            length: 64,
            batch: 1,
            seed: 0,
            learning_rate: 1e-3,
            pressure: 1.0,
            decided_by: DecidedBy::Itself,
            weights: DType::F32,
        };
        let targets: Vec<f64> = (0..100).map(|step| settings.target(step)).collect();
        assert!(targets[0] < 0.05 && targets.is_sorted());
        assert_eq!((targets[78] < 0.75, targets[79], targets[99]), (true, 0.75, 0.75));
        // Ratios one after the other: a seventh, two sevenths and four of the steps.
        let several = Settings { ratios: vec![2.0, 4.0, 8.0], steps: 700, ..settings.clone() };
        let targets: Vec<f64> = (0..700).map(|step| several.target(step)).collect();
        assert!(targets.is_sorted());
        assert_eq!([79, 99, 259, 299, 619, 699].map(|step| targets[step]), [0.5, 0.5, 0.75, 0.75, 0.875, 0.875]);
        assert!(targets[100] > 0.5 && targets[258] < 0.75 && targets[300] > 0.75 && targets[618] < 0.875);
        assert_eq!(several.stage(150), (4.0, 2.0, 100..300));
        let cases = [
            (10, 0.995, 0.3, true),
            (90, 0.995, 0.96, false),
            (20, 0.0, 0.3, false),
            (60, 0.1, 0.6, true),
            (60, 0.2, 0.6, false),
        ];
        for (done, evicted, target, expected) in cases {
            assert_eq!(settings.collapsed(done, evicted, target), expected, "{done} {evicted} {target}");
        }
    }
}
