//! A run of `--method kvzap` (KVzap, arXiv 2601.07891): a linear function of each token's hidden state that foretells what
//! KVzip+ would say of the token, so that no context has to be repeated to evict from it.
//!
//! The model reads sequences of a text and repeats each, as under the policy `kvzip-plus`. Each token of each layer is then a
//! sample: its hidden state, and the logarithm of its score in each KV head. The function that fits best is known from sums
//! over samples (`ridge.rs`), with the ridge of 1 that the authors' code has, so that there are no epochs and no learning
//! rate; what matters is how many tokens were seen, and of what text. It is written as gates that the policies `kvzap` and
//! `gate` read, in natural logarithms: the thresholds of kvpress mean the same.

use super::checkpoint::{self, Array, Progress};
use super::export;
use super::log::{Line, Log};
use super::ridge::{Linear, Moments};
use super::run::{Options, RECORD, TrainError};
use super::text::{HELD_OUT, TextSource};
use super::vocabulary::Vocabulary;
use crate::device::Cpu;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::model::{Activation, Hook, Model, ModelError, Recall, Repeat, Text, locate};
use crate::policy::Registry;
use crate::tensor::DType;
use crate::tensor::file::{self, Output};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Name of the fitted gates in a run's folder.
pub const POLICY: &str = "policy.safetensors";
/// The policy whose scores are foretold.
const TEACHER: &str = "kvzip-plus";
/// Penalty of a squared weight, that of the authors' code.
const RIDGE: f64 = 1.0;
/// Sequences that are held out, and from one checkpoint to the next.
const JUDGED: u64 = 8;
const SAVE_STEPS: usize = 20;

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

/// Reads a sequence, has it repeated, and adds its tokens to the moments of each layer.
fn add(teacher: &Recall<'_>, tokens: &[u32], moments: &mut [Moments], scratch: &mut [f32]) -> Result<(), TrainError> {
    let Recall { model, cpu, arena, .. } = *teacher;
    let config = &model.config;
    let held = |_| Ok(Mutex::new((arena.alloc(Label::Activations, tokens.len() * config.hidden)?, 0)));
    let states = States((0..config.layers).map(held).collect::<Result<_, ArenaError>>()?);
    let heard = teacher.scores(tokens, Some(&states))?;
    let of_layers = moments.iter_mut().zip(states.0).zip(heard.chunks_exact(config.kv_heads * tokens.len()));
    for ((moments, hidden), scores) in of_layers {
        let (hidden, _) = hidden.into_inner().unwrap_or_else(PoisonError::into_inner);
        let rows = samples(&hidden, scores, tokens.len());
        cpu.install(|| moments.add(&rows, scratch, cpu.threads()));
    }
    Ok(())
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

/// The function of each KV head of each layer that fits best, layer after layer.
fn fit(moments: &[Moments], heads: usize, cpu: &Cpu, arena: &Arena) -> Result<Vec<Linear>, TrainError> {
    let of_head = |index: usize| moments[index / heads].fit(index % heads, RIDGE, arena);
    let fitted = cpu
        .install(|| (0..moments.len() * heads).into_par_iter().map(of_head).collect::<Result<Vec<_>, ArenaError>>())?;
    fitted.into_iter().collect::<Option<_>>().ok_or_else(|| misfit("no token was looked at in some layer".into()))
}

/// Part of the variance of the scores of each KV head that functions explain, layer after layer.
fn explained(moments: &[Moments], heads: usize, fitted: &[Linear]) -> Vec<f64> {
    fitted.iter().enumerate().map(|(index, linear)| moments[index / heads].explained(index % heads, linear)).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn misfit(reason: String) -> TrainError {
    TrainError::Misfit { name: "kvzap".into(), reason }
}

/// Fits gates. Tells `watch` each line as it is logged.
///
/// # Errors
/// When settings, text, folder or memory do not allow it.
pub fn run(settings: &Settings, cpu: &Cpu, options: &Options, watch: &mut dyn FnMut(&Line)) -> Result<(), TrainError> {
    let folder = options.out.as_path();
    checkpoint::check(options)?;
    let path = locate(&settings.model)?;
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
    let vocabulary = Vocabulary::of_folder(&path, config)?;
    let source = TextSource::open(&settings.text, &vocabulary, length, seed).map_err(misfit)?;
    std::fs::create_dir_all(folder).map_err(|error| TrainError::write(folder, &error))?;
    let digest = checkpoint::digest(&(settings, &model.fingerprint));

    let heads = config.kv_heads;
    let of_layers =
        || (0..config.layers).map(|_| Moments::new(&arena, config.hidden, heads)).collect::<Result<Vec<_>, _>>();
    let (mut moments, mut held_out) = (of_layers()?, of_layers()?);
    let width = moments[0].width();
    let mut scratch = arena.alloc(Label::Workspace, width * width)?;
    // Sums of doubles are written as twice as many numbers of half the width, bit for bit.
    let lens = [2 * config.layers * width * width, 0, 0];
    let mut progress = Progress::default();
    if options.resume {
        progress = checkpoint::load(folder, &digest, lens, |array, words| {
            if array == Array::Weights {
                let parts = words.chunks_exact(2 * width * width);
                moments.iter_mut().zip(parts).for_each(|(moments, part)| {
                    bytemuck::cast_slice_mut(moments.sums()).copy_from_slice(part);
                });
            }
            Ok(())
        })?;
    }
    let log = Log::open(folder, progress.step)?;
    let teacher = Recall { model: &model, repeat: &repeat, how, dtype: settings.dtype, cpu, arena: &arena };
    for number in 0..JUDGED {
        add(&teacher, &source.drawn(HELD_OUT + number, [1, length]), &mut held_out, &mut scratch)?;
    }
    let mut judged = Vec::new();
    let end = options.stop_after.unwrap_or(usize::MAX).min(steps);
    while progress.step < end {
        let began = Instant::now();
        add(&teacher, &source.drawn(progress.sequences, [1, length]), &mut moments, &mut scratch)?;
        progress.add(1, length, began);
        let Progress { step, tokens, seconds, .. } = progress;
        log.tell(watch, Line::Repeated { step, tokens, seconds, tokens_per_second: tokens as f64 / seconds })?;
        if step.is_multiple_of(SAVE_STEPS) || step == end {
            let fitted = fit(&moments, heads, cpu, &arena)?;
            judged = explained(&held_out, heads, &fitted);
            checkpoint::save(folder, &digest, &progress, lens, |array, take| match array {
                Array::Weights => moments.iter_mut().try_for_each(|moments| take(bytemuck::cast_slice(moments.sums()))),
                _ => Ok(()),
            })?;
            write_gates(&model, &fitted, &judged, &progress, &folder.join(POLICY))?;
            let learned = mean(&explained(&moments, heads, &fitted));
            log.tell(watch, Line::Fitted { step, explained: learned, held_out: mean(&judged) })?;
        }
    }
    let record = json!({
        "method": "kvzap",
        "settings": settings,
        "base_model": model.fingerprint,
        "teacher": TEACHER,
        "ridge": RIDGE,
        "parameters": config.layers * heads * (config.hidden + 1),
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "held_out_explained": mean(&judged),
        "held_out_explained_by_layer": judged.chunks(heads).map(mean).collect::<Vec<_>>(),
        "peak_bytes": arena.usage().peak,
        "environment": options.environment,
    });
    export::text(folder, RECORD, &format!("{record:#}\n"))
}

/// Writes gates as policies read them.
fn write_gates(
    model: &Model,
    fitted: &[Linear],
    judged: &[f64],
    progress: &Progress,
    path: &Path,
) -> Result<(), TrainError> {
    let config = &model.config;
    let weight: Vec<f32> = fitted.iter().flat_map(|linear| linear.weight.iter().map(|&weight| weight as f32)).collect();
    let bias: Vec<f32> = fitted.iter().map(|linear| linear.bias as f32).collect();
    let outputs = [
        Output::f32("gate.weight", vec![config.layers, config.kv_heads, config.hidden], &weight),
        Output::f32("gate.bias", vec![config.layers, config.kv_heads], &bias),
    ];
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
