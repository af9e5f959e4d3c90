//! A run of `--method kvzap` (KVzap, arXiv 2601.07891): a linear function of each token's hidden state that foretells what
//! KVzip+ would say of the token, so that no context has to be repeated to evict from it.
//!
//! The model reads sequences of a text and repeats each, as under the policy `kvzip-plus`. Each token of each layer is then a
//! sample: its hidden state, and the logarithm of its score in each KV head. The function that fits best is known from sums
//! over samples (`ridge.rs`), with the ridge of 1 that the authors' code has, so that there are no epochs and no learning
//! rate; what matters is how many tokens were seen, and of what text. Where an inner layer is asked for, some tokens of each sequence are
//! kept (`samples.rs`), and a function with that layer is fitted to them at the end (`mlp.rs`), in place of the linear one. Either is written as
//! gates that the policies `kvzap` and `gate` read, in natural logarithms: the thresholds of kvpress mean the same.

mod mlp;
mod samples;

use self::mlp::Mlp;
use self::samples::Samples;
use super::checkpoint::{Array, Identity, Progress, as_written};
use super::gate_functions;
use super::log::{Line, Log};
use super::method::{Method, Run, Since, Step, Tell};
use super::ridge::{Linear, Moments};
use super::run::{Options, TrainError};
use super::text::{HELD_OUT, TextSource};
use super::vocabulary::Vocabulary;
use crate::device::Cpu;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::model::{Activation, Config, Hook, Model, ModelError, Recall, Repeat, Text, fingerprint, locate};
use crate::policy::Registry;
use crate::tensor::DType;
use crate::tensor::file::{self, Output};
use crate::units;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Name of the fitted gates in a run's folder.
pub const POLICY: &str = "policy.safetensors";
/// The policy whose scores are foretold.
const TEACHER: &str = "kvzip-plus";
/// Penalty of a squared weight, that of the authors' code.
const RIDGE: f64 = 1.0;
/// Sequences that are held out.
const JUDGED: u64 = 8;

/// What is fitted, on what.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The model: a folder, a GGUF file, or `builtin`.
    pub model: PathBuf,
    /// A text to learn from.
    pub text: PathBuf,
    /// Sequences that are read and repeated.
    pub steps: usize,
    /// Tokens of a sequence.
    pub length: usize,
    /// First number of everything random.
    pub seed: u64,
    /// Element type of the model's passes.
    pub dtype: DType,
    /// Elements of an inner layer; without one the function is linear.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inner: Option<usize>,
}

/// Hidden states of the first tokens of a sequence, of each layer, and how many numbers of them are there.
struct States(Vec<Mutex<(Buffer<f32>, usize)>>);

impl Hook for States {
    fn rows(&self, layer: usize, what: Activation, rows: &[f32]) {
        if what == Activation::Hidden {
            let (held, len) = &mut *self.0[layer].lock().unwrap_or_else(PoisonError::into_inner);
            let more = rows.len().min(held.len() - *len);
            held[*len..][..more].copy_from_slice(&rows[..more]);
            *len += more;
        }
    }
}

/// Rows `[hidden state | 1 | logarithms of the scores of each KV head]` of `tokens` tokens; tokens that some head never looked
/// at have no logarithm, and no row.
fn samples(hidden: &[f32], scores: &[f32], tokens: usize) -> Vec<f32> {
    let states = hidden.chunks_exact(hidden.len() / tokens).enumerate();
    let of_token = |token| scores.chunks_exact(tokens).map(move |head: &[f32]| head[token]);
    let looked_at = states.filter(|(token, _)| of_token(*token).all(|score| score > 0.0));
    looked_at
        .flat_map(|(token, state)| state.iter().copied().chain([1.0]).chain(of_token(token).map(f32::ln)))
        .collect()
}

/// Part of the variance of the scores of each KV head that functions explain, layer after layer.
fn explained(moments: &[Moments], heads: usize, fitted: &[Linear]) -> Vec<f64> {
    fitted.iter().enumerate().map(|(index, linear)| moments[index / heads].explained(index % heads, linear)).collect()
}

/// Functions with `inner` inner elements, layer after layer, and the part of the variance of the scores of each KV head that they explain, of
/// what they were fitted to and of what was held out.
fn fit_mlps(
    kept: &Samples,
    settings: &Settings,
    (layers, inner, at_once): (usize, usize, usize),
    cpu: &Cpu,
    arena: &Arena,
) -> Result<(Vec<Mlp>, [Vec<f64>; 2]), TrainError> {
    let of_layer = |layer: usize| {
        let fitted_to = kept.of_layer(layer, 0..settings.steps as u64, arena)?;
        if fitted_to.count() == 0 {
            return Err(misfit("no token was looked at in some layer".into()));
        }
        let (mlp, learned) = Mlp::fit(fitted_to, inner, settings.seed, cpu.isa(), arena)?;
        let held_out = mlp.explained(&kept.of_layer(layer, HELD_OUT..HELD_OUT + JUDGED, arena)?);
        Ok((mlp, [learned, held_out]))
    };
    let (mut fitted, mut explained) = (Vec::new(), Vec::new());
    for first in (0..layers).step_by(at_once) {
        let some = (first..layers.min(first + at_once)).into_par_iter().map(of_layer);
        let some: Vec<_> = cpu.install(|| some.collect::<Result<_, TrainError>>())?;
        some.into_iter().for_each(|(mlp, parts)| {
            fitted.push(mlp);
            explained.push(parts);
        });
    }
    let part = |part: usize| explained.iter().flat_map(|parts| parts[part].iter().copied()).collect();
    Ok((fitted, [part(0), part(1)]))
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn misfit(reason: String) -> TrainError {
    TrainError::Misfit { name: "--method kvzap".into(), reason }
}

/// Sums over samples of what a model reads and repeats.
struct Kvzap<'a> {
    teacher: Recall<'a>,
    source: TextSource<'a>,
    length: usize,
    folder: &'a Path,
    /// Of each layer, of what is learned from and of what is held out.
    moments: Vec<Moments>,
    held_out: Vec<Moments>,
    /// Samples by themselves, where more than sums are fitted to.
    kept: Option<Samples>,
    scratch: Buffer<f32>,
}

/// Fits gates. Tells `watch` each line as it is logged.
///
/// # Errors
/// When settings, text, folder or memory do not allow it.
pub fn run(settings: &Settings, cpu: &Cpu, options: &Options, watch: &mut dyn FnMut(&Line)) -> Result<(), TrainError> {
    let path = locate(&settings.model)?;
    let identity = Identity::new(settings, Some(&fingerprint(&path)?), Some(&settings.text));
    let arena = Arena::with_limit(options.limit_bytes);
    let model = Model::open(&path, &arena)?;
    let config = &model.config;
    let repeat = Repeat::new(&path, &Text::open(&path)?)?;
    let how = Registry::default()
        .policy(TEACHER)
        .map_err(ModelError::from)?
        .reconstruction
        .expect("KVzip has a model repeat its context");
    let Settings { length, steps, seed, .. } = *settings;
    let most = config.most_tokens().saturating_sub(repeat.most_tokens(length, how));
    if !(16..=most).contains(&length) || steps == 0 {
        return Err(misfit(format!(
            "{steps} sequences of {length} tokens; give at least 1, of 16 tokens to what the model can read and repeat"
        )));
    }
    gate_functions::check_inner(settings.inner).map_err(misfit)?;
    let vocabulary = Vocabulary::of_folder(&path, config)?;
    let source = TextSource::open(&settings.text, &vocabulary, length, seed).map_err(misfit)?;
    let run = Run::begin(options, &path, identity)?;

    let (layers, heads, folder) = (config.layers, config.kv_heads, run.folder());
    let of_layers = || (0..layers).map(|_| Moments::new(&arena, config.hidden, heads)).collect::<Result<Vec<_>, _>>();
    let (moments, held_out) = (of_layers()?, of_layers()?);
    let scratch = arena.alloc(Label::Workspace, moments[0].width().pow(2))?;
    let at_once = match settings.inner {
        Some(inner) => at_once(settings, (config, inner), options.limit_bytes - arena.usage().live_bytes, cpu)?,
        None => 0,
    };
    let kept = settings.inner.map(|_| Samples::new(folder, [layers, heads, config.hidden], seed));
    let teacher = Recall { model: &model, repeat: &repeat, how, dtype: settings.dtype, cpu, arena: &arena };
    let mut kvzap = Kvzap { teacher, source, length, folder, moments, held_out, kept, scratch };
    let Some(progress) = run.steps(&mut kvzap, steps, watch)? else {
        // A run that was killed behind its record may have left them.
        kvzap.kept.iter().filter(|_| options.end(steps) == steps).for_each(Samples::remove);
        return Ok(());
    };
    let is_last = progress.step == steps;
    let mut judged = explained(&kvzap.held_out, heads, &kvzap.fit()?);
    let of_linear = mean(&judged);
    let mut parameters = layers * heads * (config.hidden + 1);
    if let (Some(kept), Some(inner), true) = (&kvzap.kept, settings.inner, is_last) {
        let (fitted, [learned, held_out]) = fit_mlps(kept, settings, (layers, inner, at_once), cpu, &arena)?;
        write_gates(&model, &Fitted::Mlp(&fitted), &held_out, &progress, &folder.join(POLICY))?;
        let line = Line::Fitted { step: steps, explained: mean(&learned), held_out: mean(&held_out), inner };
        Log::open(folder, steps)?.tell(watch, line)?;
        judged = held_out;
        parameters = layers * (inner * (config.hidden + 1) + heads * (inner + 1));
    }
    let record = json!({
        "method": "kvzap",
        "settings": as_written(settings),
        "base_model": model.fingerprint,
        "teacher": TEACHER,
        "ridge": RIDGE,
        "parameters": parameters,
        "held_out_explained": mean(&judged),
        "held_out_explained_linear": of_linear,
        "held_out_explained_by_layer": judged.chunks(heads).map(mean).collect::<Vec<_>>(),
    });
    run.record(&progress, &arena.usage(), record)?;
    kvzap.kept.iter().filter(|_| is_last).for_each(Samples::remove);
    Ok(())
}

impl Kvzap<'_> {
    /// Reads sequence `number`, has it repeated, and adds its tokens to the moments of each layer, and some to the samples that are
    /// kept.
    fn add(&mut self, number: u64) -> Result<(), TrainError> {
        let Recall { model, cpu, arena, .. } = self.teacher;
        let config = &model.config;
        let tokens = self.source.drawn(number, [1, self.length]);
        let held = |_| Ok(Mutex::new((arena.alloc(Label::Activations, tokens.len() * config.hidden)?, 0)));
        let states = States((0..config.layers).map(held).collect::<Result<_, ArenaError>>()?);
        let heard = self.teacher.scores(&tokens, Some(&states))?;
        let unlocked = |one: Mutex<(Buffer<f32>, usize)>| one.into_inner().unwrap_or_else(PoisonError::into_inner).0;
        let hidden: Vec<Buffer<f32>> = states.0.into_iter().map(unlocked).collect();
        let scores = heard.chunks_exact(config.kv_heads * tokens.len());
        let of_layers: Vec<(&[f32], &[f32])> = hidden.iter().map(|hidden| &**hidden).zip(scores).collect();
        let moments = if number < HELD_OUT { &mut self.moments } else { &mut self.held_out };
        for (moments, (hidden, scores)) in moments.iter_mut().zip(&of_layers) {
            let rows = samples(hidden, scores, tokens.len());
            cpu.install(|| moments.add(&rows, &mut self.scratch, cpu.threads()));
        }
        self.kept.as_ref().map_or(Ok(()), |kept| kept.keep(number, &of_layers))
    }

    /// The function of each KV head of each layer that fits best, layer after layer.
    fn fit(&self) -> Result<Vec<Linear>, TrainError> {
        let Recall { model, cpu, arena, .. } = self.teacher;
        let heads = model.config.kv_heads;
        let of_head = |index: usize| self.moments[index / heads].fit(index % heads, RIDGE, arena);
        let all = 0..self.moments.len() * heads;
        let fitted = cpu.install(|| all.into_par_iter().map(of_head).collect::<Result<Vec<_>, ArenaError>>())?;
        fitted.into_iter().collect::<Option<_>>().ok_or_else(|| misfit("no token was looked at in some layer".into()))
    }
}

impl Method for Kvzap<'_> {
    const LOG_STEPS: usize = 1;
    const SAVE_STEPS: usize = 20;

    /// Sums of doubles are written as twice as many numbers of half the width, bit for bit.
    fn arrays(&mut self, array: Array) -> Vec<&mut [f32]> {
        let all = if array == Array::Weights { &mut self.moments[..] } else { &mut [] };
        all.iter_mut().map(|moments| bytemuck::cast_slice_mut(moments.sums())).collect()
    }

    fn begin(&mut self, _progress: &Progress, _tell: Tell<'_>) -> Result<(), TrainError> {
        (HELD_OUT..HELD_OUT + JUDGED).try_for_each(|number| self.add(number))
    }

    /// One sequence more: there is no loss before all is fitted.
    fn step(&mut self, progress: &Progress) -> Result<Step, TrainError> {
        self.add(progress.sequences)?;
        Ok(Step { sequences: 1, tokens: self.length, ..Step::default() })
    }

    fn log(&mut self, progress: &Progress, _since: &Since, tell: Tell<'_>) -> Result<(), TrainError> {
        let Progress { step, tokens, seconds, .. } = *progress;
        tell(Line::Repeated { step, tokens, seconds, tokens_per_second: tokens as f64 / seconds })
    }

    fn save(&mut self, progress: &Progress, tell: Tell<'_>) -> Result<(), TrainError> {
        let model = self.teacher.model;
        let (heads, fitted) = (model.config.kv_heads, self.fit()?);
        let judged = explained(&self.held_out, heads, &fitted);
        write_gates(model, &Fitted::Linear(&fitted), &judged, progress, &self.folder.join(POLICY))?;
        let learned = mean(&explained(&self.moments, heads, &fitted));
        tell(Line::Fitted { step: progress.step, explained: learned, held_out: mean(&judged), inner: 0 })
    }
}

/// How many layers with an inner layer can be fitted at once in so much memory, at most one for each thread.
fn at_once(
    settings: &Settings,
    (config, inner): (&Config, usize),
    free_bytes: u64,
    cpu: &Cpu,
) -> Result<usize, TrainError> {
    let samples = samples::bytes(JUDGED.max(settings.steps as u64), [config.hidden, config.kv_heads]);
    let each = samples + Mlp::bytes([config.hidden, inner, config.kv_heads]);
    match free_bytes / each {
        0 => Err(misfit(format!(
            "samples and weights of a layer take {}, and {} are left; fewer --steps, a smaller --inner, or more memory",
            units::bytes(each),
            units::bytes(free_bytes)
        ))),
        fit => Ok((fit as usize).min(cpu.threads())),
    }
}

/// What was fitted, layer after layer.
enum Fitted<'a> {
    /// A function for each KV head.
    Linear(&'a [Linear]),
    /// One for the KV heads of a layer.
    Mlp(&'a [Mlp]),
}

impl Fitted<'_> {
    /// Tensors `[layers, ...]`: names, what lies behind the layers, and numbers.
    fn tensors(&self, config: &Config) -> Vec<(&'static str, Vec<usize>, Vec<f32>)> {
        let Config { hidden, kv_heads: heads, .. } = *config;
        let (weight, bias) = ("gate.weight", "gate.bias");
        match self {
            Fitted::Linear(all) => {
                let weights = all.iter().flat_map(|linear| linear.weight.iter().map(|&weight| weight as f32));
                let biases = all.iter().map(|linear| linear.bias as f32);
                vec![(weight, vec![heads, hidden], weights.collect()), (bias, vec![heads], biases.collect())]
            }
            Fitted::Mlp(all) => {
                let whole = |part: usize| all.iter().flat_map(|mlp| mlp.parts()[part]).copied().collect::<Vec<f32>>();
                let inner = all[0].parts()[1].len();
                vec![
                    ("gate.inner.weight", vec![inner, hidden], whole(0)),
                    ("gate.inner.bias", vec![inner], whole(1)),
                    (weight, vec![heads, inner], whole(2)),
                    (bias, vec![heads], whole(3)),
                ]
            }
        }
    }
}

/// Writes gates as policies read them.
fn write_gates(
    model: &Model,
    fitted: &Fitted<'_>,
    judged: &[f64],
    progress: &Progress,
    path: &Path,
) -> Result<(), TrainError> {
    let tensors = fitted.tensors(&model.config);
    let output = |(name, shape, values)| Output::f32(name, [&[model.config.layers][..], shape].concat(), values);
    let outputs: Vec<Output<'_>> =
        tensors.iter().map(|(name, shape, values)| output((*name, &shape[..], &values[..]))).collect();
    let metadata = [
        ("base_model", model.fingerprint.clone()),
        ("method", "kvzap".into()),
        ("sequences", progress.step.to_string()),
        ("tokens", progress.tokens.to_string()),
        ("held_out_explained", format!("{:.3}", mean(judged))),
    ];
    let metadata: HashMap<String, String> = metadata.map(|(key, value)| (key.to_string(), value)).into();
    Ok(file::write_with(path, &outputs, Some(metadata))?)
}
