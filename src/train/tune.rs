//! Fine-tuning of a loaded model on a text: all of it (`full`), or adapters beside its matrices (`lora`), which may stay packed as
//! their file keeps them (`qlora`, as QLoRA, arXiv 2305.14314, with any format of weights in place of NF4). A model that is trained whole
//! can be made to bear what `quantize` will do to it (`qat`, quantisation-aware training): the pass reads what the codes of its matrices
//! stand for, and their gradients are taken for those of the numbers behind the codes.
//!
//! The loss is the cross-entropy of every next token of sequences from random places of the first nine tenths of the text. The last
//! tenth is held out, and judged piece by piece before the first step, at every checkpoint and at the end.

use super::activations::{Extents, Recompute};
use super::adamw::Constants;
use super::checkpoint::{self, Progress};
use super::error::{GRADIENT_NORM, HELD_OUT_LOSS, LOSS};
use super::export;
use super::log::{self, Line, Log};
use super::lora::Asked;
use super::loss::Target;
use super::optimizer::Kind;
use super::run::{Options, RECORD, TrainError};
use super::text::TextSource;
use super::tuned::{Plan, Tuned};
use super::vocabulary::Vocabulary;
use super::{Batch, Network};
use crate::device::Cpu;
use crate::memory::Arena;
use crate::model::{Config, fingerprint, locate};
use crate::tensor::DType;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

/// Steps from one line of the log to the next, and from one checkpoint and look at held-out text to the next.
const LOG_STEPS: usize = 5;
const SAVE_STEPS: usize = 25;
/// Most pieces of held-out text that are judged.
const JUDGED: usize = 8;

/// What is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// All parameters.
    Full,
    /// Adapters beside matrices in f32 or bf16.
    Lora,
    /// Adapters beside matrices that stay packed.
    Qlora,
}

impl Method {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        ["full", "lora", "qlora"][self as usize]
    }
}

/// What is trained, on what, for how long.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// What is trained.
    pub method: Method,
    /// The model: a folder, a GGUF file, or `builtin`.
    pub model: PathBuf,
    /// The text to learn from.
    pub text: PathBuf,
    /// Steps.
    pub steps: usize,
    /// Tokens of a sequence.
    pub length: usize,
    /// Sequences that go through the model together.
    pub batch: usize,
    /// Batches whose gradients are added up for a step.
    pub accumulate: usize,
    /// First number of everything random.
    pub seed: u64,
    /// Largest learning rate.
    pub learning_rate: f32,
    /// Type in which matrices are multiplied, and attention computed: f32 or bf16.
    pub weights: DType,
    /// What is computed again in the backward pass; `None` for as little as there is memory for.
    pub recompute: Option<Recompute>,
    /// The optimizer.
    pub optimizer: Kind,
    /// The adapters, where these are trained.
    pub adapters: Option<Asked>,
    /// The file type of `quantize`, or the format of all matrices, whose rounding a model that is trained whole is made to bear.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub qat: Option<String>,
}

impl Settings {
    pub(super) fn check(&self, config: &Config) -> Result<(), String> {
        let Settings { length, steps, batch, accumulate, learning_rate, .. } = *self;
        if !(16..=config.most_tokens()).contains(&length) {
            return Err(format!(
                "the length is {length}; it must be 16 to the model's longest context, {}",
                config.most_tokens()
            ));
        }
        if steps == 0 || batch == 0 || accumulate == 0 {
            return Err(format!("{steps} steps of {accumulate} times {batch} sequences; each must be at least 1"));
        }
        if !(learning_rate > 0.0 && learning_rate.is_finite()) {
            return Err(format!("the learning rate is {learning_rate}; it must be finite and above 0"));
        }
        Ok(())
    }

    pub(super) fn constants(&self) -> Constants {
        Constants {
            learning_rate: self.learning_rate,
            warmup_steps: 10.min(self.steps / 10),
            final_share: 0.1,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            clip: 1.0,
        }
    }

    /// Sequences of a step.
    fn sequences(&self) -> usize {
        self.batch * self.accumulate
    }
}

/// Sequences `[B, len]` of which every next token is judged, with `weight` each; of the first `real` ones.
fn batch(tokens: Vec<u32>, len: usize, real: usize, weight: f32) -> Batch {
    let rows = (0..real * len).filter(|row| (row + 1) % len > 0);
    let targets = rows.map(|row| Target { row, token: tokens[row + 1], weight }).collect();
    Batch { tokens, targets }
}

/// Mean negative log-likelihood of the pieces of held-out text, nats a token.
fn judge(
    settings: &Settings,
    text: &TextSource<'_>,
    network: &mut Network<'_>,
    tuned: &mut Tuned,
) -> Result<f64, TrainError> {
    let Settings { batch: at_once, length: len, .. } = *settings;
    let pieces = text.pieces(len).min(JUDGED);
    let weight = 1.0 / (pieces * (len - 1)) as f32;
    let mut loss = 0.0;
    for first in (0..pieces).step_by(at_once) {
        let tokens = (first..first + at_once).flat_map(|index| text.piece(index.min(pieces - 1), len)).collect();
        let batch = batch(tokens, len, at_once.min(pieces - first), weight);
        loss += network.judge_of(&mut tuned.holder(), &batch, |_, _, _| ())?;
    }
    Ok(loss)
}

/// What was added up since the last line of the log.
#[derive(Default)]
struct Since {
    steps: usize,
    loss: f64,
    seconds: f64,
}

/// Fine-tunes. Tells `watch` each line as it is logged.
///
/// # Errors
/// When settings, text, folder or memory do not allow it, or the loss stops being a number.
pub fn run(settings: &Settings, cpu: &Cpu, options: &Options, watch: &mut dyn FnMut(&Line)) -> Result<(), TrainError> {
    let misfit = |reason| TrainError::Misfit { name: settings.method.name().into(), reason };
    let model = locate(&settings.model)?;
    let config = Config::read(&model)?;
    settings.check(&config).map_err(misfit)?;
    let base = fingerprint(&model)?;
    let vocabulary = Vocabulary::of_folder(&model, &config)?;
    let Settings { length: len, batch: at_once, steps, .. } = *settings;
    let text = TextSource::open(&settings.text, &vocabulary, len, settings.seed).map_err(misfit)?;
    let arena = Arena::with_limit(options.limit_bytes);
    let plan = Plan::new(settings, &config, &model).map_err(misfit)?;
    let folder = options.out.as_path();
    checkpoint::check(options, Some(&model))?;
    std::fs::create_dir_all(folder).map_err(|error| TrainError::write(folder, &error))?;
    let digest = checkpoint::digest(&(settings, &base, checkpoint::of_text(Some(&settings.text))));

    let extents = Extents { parameters: &plan.parameters, batch: at_once, len, skipped: 0 };
    let mut tuned = Tuned::open(&plan, &arena, cpu)?;
    let bytes = |mode| plan.bytes(&extents, mode, cpu.threads(), tuned.packed_bytes()).into_values().sum();
    let recompute = settings.recompute.unwrap_or_else(|| Recompute::within(options.limit_bytes, bytes));
    let predicted = plan.bytes(&extents, recompute, cpu.threads(), tuned.packed_bytes());
    let mut network = Network::new(&arena, cpu, extents, recompute)?;
    if let Some(adapters) = plan.adapters(&arena, &extents, settings.seed)? {
        network = network.with_adapters(adapters);
    }
    let mut progress = Progress::default();
    if options.resume {
        let lens = tuned.lens(&mut network);
        progress = checkpoint::load(folder, &digest, lens, &mut |array, values| {
            tuned.array(&mut network, array).copy_from_slice(values);
            Ok(())
        })?;
        tuned.refresh(cpu);
    }
    let log = Log::open(folder, progress.step)?;
    let held_out = |step, loss: f64| Line::HeldOut { step, loss, perplexity: loss.exp() };
    if progress.step == 0 {
        log.tell(watch, held_out(0, judge(settings, &text, &mut network, &mut tuned)?))?;
    }
    let (constants, mut since) = (settings.constants(), Since::default());
    let (sequences, end) = (settings.sequences(), options.stop_after.unwrap_or(usize::MAX).min(steps));
    let weight = 1.0 / (sequences * (len - 1)) as f32;
    if checkpoint::is_done(folder, &progress, end) {
        return Ok(());
    }
    while progress.step < end {
        let (step, began) = (progress.step, Instant::now());
        tuned.begin(&mut network);
        let mut loss = 0.0;
        for part in 0..settings.accumulate {
            let first = progress.sequences + (part * at_once) as u64;
            let batch = batch(text.drawn(first, [at_once, len]), len, at_once, weight);
            loss += network.step_of(&mut tuned.holder(), &batch)?;
        }
        TrainError::diverged(LOSS, step, loss)?;
        let rate = constants.rate(step, steps);
        let gradient_norm = tuned.update(cpu, &constants, (step, rate), &mut network);
        TrainError::diverged(GRADIENT_NORM, step, gradient_norm)?;
        let seconds = progress.add(sequences, sequences * len, began);
        since = Since { steps: since.steps + 1, loss: since.loss + loss, seconds: since.seconds + seconds };
        let done = progress.step;
        if done.is_multiple_of(LOG_STEPS) || done == end {
            let flop = (since.steps * settings.accumulate) as f64 * extents.step_flop(at_once * (len - 1));
            log.tell(
                watch,
                Line::Step {
                    step: done,
                    length_tokens: len,
                    loss: since.loss / since.steps as f64,
                    rate,
                    gradient_norm,
                    tokens: progress.tokens,
                    seconds: progress.seconds,
                    tokens_per_second: (since.steps * sequences * len) as f64 / since.seconds,
                    gflop_per_second: flop / since.seconds / 1e9,
                },
            )?;
            since = Since::default();
        }
        if done.is_multiple_of(SAVE_STEPS) || done == end {
            let loss = judge(settings, &text, &mut network, &mut tuned)?;
            // What is no number is not written over what was one.
            TrainError::diverged(HELD_OUT_LOSS, step, loss)?;
            log.tell(watch, held_out(done, loss))?;
            plan.export(folder, &settings.model, &base, &mut tuned, &mut network)?;
            let lens = tuned.lens(&mut network);
            checkpoint::save(folder, &digest, &progress, lens, &mut |array, take| {
                take(tuned.array(&mut network, array))
            })?;
        }
    }
    let losses: Vec<f64> = log::read(folder)?
        .iter()
        .filter_map(|line| if let Line::HeldOut { loss, .. } = line { Some(*loss) } else { None })
        .collect();
    let record = json!({
        "method": settings.method,
        "settings": settings,
        "base_model": base,
        "parameters": plan.parameters.count(),
        "trained_parameters": plan.trained_count(),
        "recompute": recompute,
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "tokens_per_second": progress.tokens as f64 / progress.seconds,
        "held_out_loss_before": losses.first(),
        "held_out_loss_after": losses.last(),
        "predicted_bytes": predicted,
        "peak_bytes": arena.usage().peak,
        "environment": options.environment,
    });
    export::text(folder, RECORD, &format!("{record:#}\n"))
}
