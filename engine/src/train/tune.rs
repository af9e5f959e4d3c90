//! Fine-tuning of a loaded model on a text: all of it (`full`), or adapters beside its matrices (`lora`), which may stay packed as
//! their file keeps them (`qlora`, as QLoRA, arXiv 2305.14314, with any format of weights in place of NF4). A model that is trained whole
//! can be made to bear what `quantize` will do to it (`qat`, quantisation-aware training): the pass reads what the codes of its matrices
//! stand for, and their gradients are taken for those of the numbers behind the codes.
//!
//! The loss is the cross-entropy of every next token of sequences from random places of the first nine tenths of the text. The last
//! tenth is held out, and judged piece by piece before the first step, at every checkpoint and at the end.

use super::activations::{Extents, Recompute};
use super::adamw::Constants;
use super::checkpoint::{Array, Identity, Progress, as_written};
use super::error::HELD_OUT_LOSS;
use super::log::{self, Line};
use super::lora::Asked;
use super::loss::Target;
use super::method::{self, Run, Since, Step, Tell};
use super::optimizer::Kind;
use super::run::{Options, TrainError};
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
use std::path::{Path, PathBuf};

/// Most pieces of held-out text that are judged.
const JUDGED: usize = 8;
/// Most batches whose gradients are added up for a step.
const MOST_ACCUMULATED: usize = 10_000;

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
        if accumulate > MOST_ACCUMULATED {
            return Err(format!("{accumulate} batches are to be added up for a step; at most {MOST_ACCUMULATED} are"));
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
}

/// Sequences `[B, len]` of which every next token is judged, with `weight` each; of the first `real` ones.
fn batch(tokens: Vec<u32>, len: usize, real: usize, weight: f32) -> Batch {
    let rows = (0..real * len).filter(|row| (row + 1) % len > 0);
    let targets = rows.map(|row| Target { row, token: tokens[row + 1], weight }).collect();
    Batch { tokens, targets }
}

/// A model that is fine-tuned.
struct Tune<'a> {
    settings: &'a Settings,
    cpu: &'a Cpu,
    base: &'a str,
    folder: &'a Path,
    text: TextSource<'a>,
    plan: &'a Plan,
    tuned: Tuned<'a>,
    network: Network<'a>,
    constants: Constants,
}

/// Fine-tunes. Tells `watch` each line as it is logged. Gives the loss on held-out text, nats a token, of the numbers in the folder,
/// where these are rounded and the lines are of others.
///
/// # Errors
/// When settings, text, folder or memory do not allow it, or the loss stops being a number.
pub fn run(
    settings: &Settings,
    cpu: &Cpu,
    options: &Options,
    watch: &mut dyn FnMut(&Line),
) -> Result<Option<f64>, TrainError> {
    let misfit = |reason| TrainError::Misfit { name: format!("--method {}", settings.method.name()), reason };
    let model = locate(&settings.model)?;
    let config = Config::read(&model)?;
    settings.check(&config).map_err(misfit)?;
    let base = fingerprint(&model)?;
    let vocabulary = Vocabulary::of_folder(&model, &config)?;
    let Settings { length: len, batch, .. } = *settings;
    let text = TextSource::open(&settings.text, &vocabulary, len, settings.seed).map_err(misfit)?;
    let arena = Arena::with_limit(options.limit_bytes);
    let plan = Plan::new(settings, &config, &model).map_err(misfit)?;
    let run = Run::begin(options, &model, Identity::new(settings, Some(&base), Some(&settings.text)))?;

    let extents = Extents { parameters: &plan.parameters, batch, len, skipped: 0 };
    let tuned = Tuned::open(&plan, &arena, cpu)?;
    let bytes = |mode| plan.bytes(&extents, mode, cpu.threads(), tuned.packed_bytes()).into_values().sum();
    let recompute = settings.recompute.unwrap_or_else(|| Recompute::within(options.limit_bytes, bytes));
    let predicted = plan.bytes(&extents, recompute, cpu.threads(), tuned.packed_bytes());
    let mut network = Network::new(&arena, cpu, extents, recompute)?;
    if let Some(adapters) = plan.adapters(&arena, &extents, settings.seed)? {
        network = network.with_adapters(adapters);
    }
    let folder = run.folder();
    let constants = settings.constants();
    let mut tune = Tune { settings, cpu, base: &base, folder, text, plan: &plan, tuned, network, constants };
    let Some(progress) = run.steps(&mut tune, settings.steps, watch)? else { return Ok(None) };
    let rounds = tune.tuned.round_as_written(cpu);
    let held_out_loss_of_folder = rounds.then(|| tune.held_out_loss()).transpose()?;
    let losses: Vec<f64> = log::read(folder)?
        .iter()
        .filter_map(|line| if let Line::HeldOut { loss, .. } = line { Some(*loss) } else { None })
        .collect();
    let record = json!({
        "method": settings.method,
        "settings": as_written(settings),
        "base_model": base,
        "parameters": plan.parameters.count(),
        "trained_parameters": plan.trained_count(),
        "recompute": recompute,
        "tokens_per_second": progress.tokens as f64 / progress.seconds,
        "held_out_loss_before": losses.first(),
        "held_out_loss_after": losses.last(),
        "held_out_loss_of_folder": held_out_loss_of_folder,
        "predicted_bytes": predicted,
    });
    run.record(&progress, &arena.usage(), record)?;
    Ok(held_out_loss_of_folder)
}

impl Tune<'_> {
    /// Mean negative log-likelihood of the pieces of held-out text, nats a token, logged.
    fn judge(&mut self, step: usize, tell: Tell<'_>) -> Result<(), TrainError> {
        let loss = self.held_out_loss()?;
        TrainError::diverged(HELD_OUT_LOSS, step.saturating_sub(1), loss)?;
        tell(Line::HeldOut { step, loss, perplexity: loss.exp() })
    }

    fn held_out_loss(&mut self) -> Result<f64, TrainError> {
        let Settings { batch: at_once, length: len, .. } = *self.settings;
        let pieces = self.text.pieces(len).min(JUDGED);
        let weight = 1.0 / (pieces * (len - 1)) as f32;
        let mut loss = 0.0;
        for first in (0..pieces).step_by(at_once) {
            let piece = |index: usize| self.text.piece(index.min(pieces - 1), len);
            let tokens = (first..first + at_once).flat_map(piece).collect();
            let batch = batch(tokens, len, at_once.min(pieces - first), weight);
            loss += self.network.judge_of(&mut self.tuned.holder(), &batch, |_, _, _| ())?;
        }
        Ok(loss)
    }
}

impl method::Method for Tune<'_> {
    fn arrays(&mut self, array: Array) -> Vec<&mut [f32]> {
        vec![self.tuned.array(&mut self.network, array)]
    }

    fn begin(&mut self, progress: &Progress, tell: Tell<'_>) -> Result<(), TrainError> {
        if progress.step == 0 {
            return self.judge(0, tell);
        }
        self.tuned.refresh(self.cpu);
        Ok(())
    }

    fn step(&mut self, progress: &Progress) -> Result<Step, TrainError> {
        let Settings { batch: at_once, length: len, accumulate, steps, .. } = *self.settings;
        let sequences = at_once * accumulate;
        let weight = 1.0 / (sequences * (len - 1)) as f32;
        self.tuned.begin(&mut self.network);
        let mut loss = 0.0;
        for part in 0..accumulate {
            let first = progress.sequences + (part * at_once) as u64;
            let batch = batch(self.text.drawn(first, [at_once, len]), len, at_once, weight);
            loss += self.network.step_of(&mut self.tuned.holder(), &batch)?;
        }
        let rate = self.constants.rate(progress.step, steps);
        let at = (progress.step, rate);
        let gradient_norm = self.tuned.update(self.cpu, &self.constants, at, &mut self.network);
        Ok(Step { sequences, tokens: sequences * len, loss, gradient_norm, rate })
    }

    fn log(&mut self, progress: &Progress, since: &Since, tell: Tell<'_>) -> Result<(), TrainError> {
        let Settings { batch, length: len, accumulate, .. } = *self.settings;
        let flop = (since.steps * accumulate) as f64 * self.network.extents().step_flop(batch * (len - 1));
        tell(since.line(progress, len, flop))
    }

    fn save(&mut self, progress: &Progress, tell: Tell<'_>) -> Result<(), TrainError> {
        self.judge(progress.step, tell)?;
        self.plan.export(self.folder, &self.settings.model, self.base, &mut self.tuned, &mut self.network)
    }
}
