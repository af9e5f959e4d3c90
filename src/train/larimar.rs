//! A run of `--method larimar`: the maps by which a frozen model writes facts into a memory and answers from it
//! ([`crate::editing`]).
//!
//! The two maps of the encoder are fitted first, in closed form, to states of generated facts and questions, and the scope
//! detector's threshold to cues of facts and of others. The read-out is then trained through the frozen model: a step draws facts, takes
//! each value's encoding as it is written, with noise and a shrinkage in the place of what a read from a full memory adds, and
//! has the loss of the value's token behind a question that has the read-out's prefix before it. The memory itself is linear and
//! has nothing to train, so that no gradient goes through it.

use super::activations::{Extents, Recompute};
use super::adamw::{AdamW, Constants};
use super::checkpoint::{self, CHECKPOINT, Progress};
use super::export;
use super::fine_tuned::{FineTuned, fine_tune};
use super::holder::Whole;
use super::log::{Line, Log};
use super::loss::Target;
use super::readout::Readout;
use super::run::{Options, RECORD, TrainError};
use super::weights::Frozen;
use super::{Batch, Network, Parameters};
use crate::device::Cpu;
use crate::editing::{
    Affine, Drawn, EditError, Encoded, Encoder, Fact, Maps, PREFIX, Probe, TRAINED, probe, values, widths,
};
use crate::episodic::matrix::cosine;
use crate::memory::{Arena, Label, LabelBytes};
use crate::model::{Config, Model, Text, locate};
use crate::tensor::DType;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

/// Name of the trained maps in a run's folder.
pub const MAPS: &str = "maps.safetensors";
/// Facts that the encoder's maps are fitted to, and behind how many keys each value stands for its own.
const FITTED: usize = 384;
const KEYS_OF_A_VALUE: usize = 4;
/// Questions about a key that are among words in no order, besides those of training.
const AMONG_WORDS: usize = 4;
/// Facts whose cues the threshold is set by, and facts that were written beside each.
const CALIBRATED: usize = 256;
/// Facts that are fine-tuned in at the end, to compare with.
const TUNED_IN: usize = 16;
/// Layers that are tried for the encoder's states.
const TRIED: usize = 4;
/// Facts whose encodings steps draw from.
const POOL: usize = 2048;
/// Steps from one line of the log to the next, and from one checkpoint and look at held-out facts to the next.
const LOG_STEPS: usize = 5;
const SAVE_STEPS: usize = 50;
/// Standard deviation of the noise on a value, and the least part that a read shrinks it to.
const NOISE: f64 = 0.2;
const SHRUNK: f64 = 0.7;
/// Between the seeds of what is fitted and trained on, and what is asked at the end.
const HELD_OUT_SEED: u64 = 0x1A91_3A00;

/// What is trained, on what, for how long.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The model: a folder, a GGUF file, or `builtin`.
    pub model: PathBuf,
    /// Steps.
    pub steps: usize,
    /// Questions of a step.
    pub batch: usize,
    /// First number of everything random.
    pub seed: u64,
    /// Largest learning rate.
    pub learning_rate: f32,
    /// Type of the model's matrices in training: f32 or bf16.
    pub weights: DType,
    /// Episodes of 64 facts that are asked at the end.
    pub episodes: usize,
}

impl Settings {
    fn check(&self) -> Result<(), String> {
        let Settings { steps, batch, learning_rate, episodes, .. } = *self;
        if steps == 0 || batch == 0 || episodes == 0 {
            return Err(format!("{steps} steps of {batch} questions, {episodes} episodes; each must be at least 1"));
        }
        if !(learning_rate > 0.0 && learning_rate.is_finite()) {
            return Err(format!("learning rate {learning_rate}; it must be finite and above 0"));
        }
        Ok(())
    }

    fn optimizer(&self) -> Constants {
        Constants {
            learning_rate: self.learning_rate,
            warmup_steps: 10.min(self.steps / 10),
            final_share: 0.05,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            clip: 1.0,
        }
    }
}

/// Bytes that training a read-out of a model takes from the arena, by label.
pub fn bytes(extents: &Extents<'_>, recompute: Recompute, threads: usize) -> LabelBytes {
    let mut bytes = extents.training_bytes(recompute, threads);
    let readout = Readout::bytes(extents, shape(extents.config()), threads);
    let trained = 2 * readout[&Label::Gradients];
    for (label, more) in readout.into_iter().chain([(Label::Optimizer, trained)]) {
        *bytes.entry(label).or_default() += more;
    }
    bytes
}

/// Numbers that a read-out reads, and places that it fills.
pub(super) fn shape(config: &Config) -> (usize, usize) {
    (widths(config)[1], PREFIX)
}

/// Facts to train on, each with its value's encoding and token.
struct Pool {
    facts: Vec<Drawn>,
    values: Vec<Vec<f64>>,
    tokens: Vec<u32>,
}

/// Layers whose states are tried: the first, and others up to the middle of the model.
fn layers(config: &Config) -> Vec<usize> {
    let mut layers: Vec<usize> = (0..TRIED).map(|at| at * config.layers / (2 * (TRIED - 1))).collect();
    layers.dedup();
    layers
}

/// Fits the encoder's maps and the threshold at the layer whose states tell most written facts from others by their
/// questions.
fn fit<'a>(
    at: impl Fn(usize) -> Result<Encoder<'a>, EditError>,
    config: &Config,
    seed: u64,
    arena: &Arena,
) -> Result<(Encoder<'a>, Maps), TrainError> {
    let mut best: Option<(i64, Encoder<'_>, Maps)> = None;
    for layer in layers(config) {
        let encoder = at(layer)?;
        let (told, maps) = fit_layer(&encoder, seed, arena)?;
        if best.as_ref().is_none_or(|(most, ..)| told > *most) {
            best = Some((told, encoder, maps));
        }
    }
    let (_, encoder, maps) = best.expect("a model has layers");
    Ok((encoder, maps))
}

/// How many cues more are told apart than not, and the maps.
fn fit_layer(encoder: &Encoder<'_>, seed: u64, arena: &Arena) -> Result<(i64, Maps), TrainError> {
    let usable = |word: &str| encoder.is_one_token(word);
    let config = &encoder.model.config;
    let [subject_width, value_width] = widths(config);
    let drawn = Drawn::draw(seed, FITTED, false, usable);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut asked = Vec::with_capacity(FITTED * (TRAINED.len() + AMONG_WORDS));
    for one in &drawn {
        asked.extend(TRAINED.iter().map(|template| one.ask(template)));
        asked.extend((0..AMONG_WORDS).map(|_| one.among_words(&mut rng)));
    }
    let states = encoder.questions(&asked)?;
    let subjects: Vec<Vec<f32>> = states.into_iter().map(|state| state.subject).collect();
    let subject = Affine::fit(&subjects, TRAINED.len() + AMONG_WORDS, subject_width, arena)?;
    let words = values(false, usable);
    let keys = Drawn::draw(seed + 1, words.len() * KEYS_OF_A_VALUE, false, usable);
    let facts = keys.iter().enumerate().map(|(at, one)| Fact::new(&one.key, words[at / KEYS_OF_A_VALUE]));
    let values: Vec<Vec<f32>> =
        encoder.facts(&facts.collect::<Vec<_>>())?.into_iter().filter_map(|one| one.value).collect();
    let value = Affine::fit(&values, KEYS_OF_A_VALUE, value_width, arena)?;
    let mut maps = Maps {
        base: encoder.model.fingerprint.clone(),
        layer: encoder.layer,
        subject,
        value,
        tokens: PREFIX,
        readout: [Vec::new(), Vec::new()],
        threshold: 0.0,
    };
    let (threshold, told) = threshold(encoder, &maps, seed + 2)?;
    maps.threshold = threshold;
    Ok((told, maps))
}

/// The distance that tells cues of written facts, among words in no order, best from cues of others, and by how many cues.
fn threshold(encoder: &Encoder<'_>, maps: &Maps, seed: u64) -> Result<(f64, i64), TrainError> {
    let drawn = Drawn::draw(seed, 2 * CALIBRATED, false, |word| encoder.is_one_token(word));
    let facts: Vec<Fact> = drawn[..CALIBRATED].iter().map(Drawn::fact).collect();
    let encodings = |states: Vec<Encoded>| states.iter().map(|state| maps.encoding(state)).collect::<Vec<_>>();
    let written = encodings(encoder.facts(&facts)?);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let asked: Vec<String> = drawn.iter().map(|one| one.among_words(&mut rng)).collect();
    let mut distances: Vec<(f64, bool)> = encodings(encoder.questions(&asked)?)
        .iter()
        .enumerate()
        .map(|(at, cue)| {
            let nearest = written.iter().map(|fact| cosine(fact, cue)).fold(-1.0, f64::max);
            (1.0 - nearest, at < CALIBRATED)
        })
        .collect();
    distances.sort_by(|a, b| a.0.total_cmp(&b.0));
    // Answered cues so far less answered others, at its most.
    let (mut best, mut lead, mut at) = (i64::MIN, 0, 0.0);
    for (index, (distance, is_written)) in distances.iter().enumerate() {
        lead += if *is_written { 1 } else { -1 };
        if lead > best {
            let next = distances.get(index + 1).map_or(*distance, |next| next.0);
            (best, at) = (lead, (distance + next) / 2.0);
        }
    }
    Ok((at, best))
}

/// Trains maps. Tells `watch` each line as it is logged, and gives what the edited model answers at the end.
///
/// # Errors
/// When settings, folder or memory do not allow it, or the loss stops being a number.
pub fn run(
    settings: &Settings,
    cpu: &Cpu,
    options: &Options,
    watch: &mut dyn FnMut(&Line),
) -> Result<Option<(Probe, FineTuned)>, TrainError> {
    let misfit = |reason| TrainError::Misfit { name: "larimar".into(), reason };
    settings.check().map_err(misfit)?;
    let folder = options.out.as_path();
    let there = folder.join(CHECKPOINT).exists();
    if there != options.resume {
        return Err(if there { TrainError::Taken(folder.into()) } else { TrainError::Nothing(folder.into()) });
    }
    let located = locate(&settings.model)?;
    let (arena, text) = (Arena::with_limit(options.limit_bytes), Text::open(&located)?);
    let model = Model::open(&located, &arena)?;
    let config = model.config.clone();
    let seed = settings.seed.wrapping_mul(1 << 20);
    let (encoder, mut maps) = fit(|layer| Encoder::new(&model, &text, layer, cpu, &arena), &config, seed, &arena)?;
    let pool = pool(&encoder, &maps, seed + 3)?;
    let len = length(&encoder)?;

    let base = model.fingerprint.clone();
    let parameters = Parameters::all_frozen(&config, settings.weights);
    let extents = Extents { parameters: &parameters, batch: settings.batch, len, skipped: 0 };
    let of_training = Arena::with_limit(options.limit_bytes);
    let fits =
        |mode: &Recompute| bytes(&extents, *mode, cpu.threads()).into_values().sum::<u64>() < options.limit_bytes;
    let recompute = Recompute::ALL.into_iter().find(fits).unwrap_or(Recompute::Full);
    std::fs::create_dir_all(folder).map_err(|error| TrainError::write(folder, &error))?;
    let description = serde_json::to_string(&(settings, &base)).expect("settings are plain data");
    let digest = blake3::hash(description.as_bytes()).to_hex()[..16].to_string();
    let weights = Frozen::open(&located, &parameters, &of_training)?;
    let readout = Readout::new(&of_training, &extents, shape(&config), cpu.threads(), settings.seed)?;
    let mut adamw = AdamW::new(&of_training, readout.weights.len())?;
    let mut network = Network::new(&of_training, cpu, extents, recompute)?.with_readout(readout);
    let mut progress = Progress::default();
    if there {
        let readout = network.readout();
        progress = checkpoint::load(folder, &digest, [readout.weights.len(); 3], |array, values| {
            let AdamW { mean, square } = &mut adamw;
            [&mut readout.weights, mean, square][array as usize].copy_from_slice(values);
            Ok(())
        })?;
    }
    let log = Log::open(folder, progress.step)?;
    let mut tell = |line: Line| -> Result<(), TrainError> {
        log.add(&line)?;
        watch(&line);
        Ok(())
    };
    let optimizer = settings.optimizer();
    let end = options.stop_after.unwrap_or(usize::MAX).min(settings.steps);
    let (mut loss, mut since, mut seconds) = (0.0, 0, 0.0);
    while progress.step < end {
        let (step, began) = (progress.step, Instant::now());
        let batch = draw(&encoder, &pool, settings, step as u64, len, network.readout())?;
        network.readout().gradient.fill(0.0);
        let found = network.step_of(&mut Whole { weights: weights.all(), gradients: &mut [] }, &batch)?;
        if !found.is_finite() {
            return Err(TrainError::Diverged { step, loss: found });
        }
        let rate = optimizer.rate(step, settings.steps);
        let Readout { weights: trained, gradient, parameters, .. } = network.readout();
        let gradient_norm = adamw.update(cpu, &optimizer, parameters, (step, rate), trained, gradient);
        progress.step += 1;
        progress.sequences += settings.batch as u64;
        progress.tokens += batch.tokens.len() as u64;
        let elapsed = began.elapsed().as_secs_f64();
        progress.seconds += elapsed;
        (loss, since, seconds) = (loss + found, since + 1, seconds + elapsed);
        let done = progress.step;
        if done.is_multiple_of(LOG_STEPS) || done == end {
            tell(Line::Step {
                step: done,
                length_tokens: len,
                loss: loss / f64::from(since),
                rate,
                gradient_norm,
                tokens: progress.tokens,
                seconds: progress.seconds,
                tokens_per_second: f64::from(since) * batch.tokens.len() as f64 / seconds,
                gflop_per_second: f64::from(since) * network.extents().step_flop(batch.targets.len()) / seconds / 1e9,
            })?;
            (loss, since, seconds) = (0.0, 0, 0.0);
        }
        if done.is_multiple_of(SAVE_STEPS) || done == end {
            let readout = network.readout();
            checkpoint::save(folder, &digest, &progress, [readout.weights.len(); 3], |array, take| {
                take([&readout.weights, &adamw.mean, &adamw.square][array as usize])
            })?;
            let (weight, bias) = readout.weights.split_at(readout.parameters[1].range.start);
            maps.readout = [weight.to_vec(), bias.to_vec()];
            maps.save(&folder.join(MAPS))?;
        }
    }
    if progress.step < settings.steps {
        return Ok(None);
    }
    let (weight, bias) = {
        let readout = network.readout();
        readout.weights.split_at(readout.parameters[1].range.start)
    };
    maps.readout = [weight.to_vec(), bias.to_vec()];
    let found = probe(&encoder, &maps, (settings.episodes, HELD_OUT_SEED), &arena)?;
    let statements = tuned_in(&encoder)?;
    let fine_tuned = fine_tune((&weights, &parameters), &statements, cpu, options.limit_bytes)?;
    let record = json!({
        "method": "larimar",
        "settings": settings,
        "base_model": base,
        "layer": maps.layer,
        "threshold": maps.threshold,
        "prefix_tokens": PREFIX,
        "trained_parameters": maps.readout.iter().map(Vec::len).sum::<usize>(),
        "recompute": recompute,
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "answers": found,
        "fine_tuned": fine_tuned,
        "peak_bytes": of_training.usage().peak,
        "environment": options.environment,
    });
    export::text(folder, RECORD, &format!("{record:#}\n"))?;
    Ok(Some((found, fine_tuned)))
}

/// Tokens of facts to be fine-tuned in.
fn tuned_in(encoder: &Encoder<'_>) -> Result<Vec<Vec<u32>>, TrainError> {
    let facts = Drawn::draw(HELD_OUT_SEED, TUNED_IN, false, |word| encoder.is_one_token(word));
    let statement = |fact: Fact| encoder.prompt(&format!("{}{}", fact.stem, fact.value));
    Ok(facts.iter().map(|one| statement(one.fact())).collect::<Result<_, _>>()?)
}

/// Facts with the encodings of their values.
fn pool(encoder: &Encoder<'_>, maps: &Maps, seed: u64) -> Result<Pool, TrainError> {
    let facts = Drawn::draw(seed, POOL, false, |word| encoder.is_one_token(word));
    let texts: Vec<Fact> = facts.iter().map(Drawn::fact).collect();
    let states = encoder.facts(&texts)?;
    let value = |state: &Encoded| state.value.as_ref().map(|value| maps.value.apply(value)).unwrap_or_default();
    let values = states.iter().map(value).collect();
    let tokens = texts.iter().map(|fact| encoder.value(&fact.value)).collect::<Result<_, _>>()?;
    Ok(Pool { facts, values, tokens })
}

/// Tokens of the longest question of training with its placeholders.
fn length(encoder: &Encoder<'_>) -> Result<usize, TrainError> {
    let drawn = Drawn::draw(0, POOL, false, |word| encoder.is_one_token(word));
    let mut longest = 0;
    for one in &drawn {
        for template in TRAINED {
            longest = encoder.prompt(&one.ask(template))?.len().max(longest);
        }
    }
    Ok(PREFIX + longest)
}

/// The batch of a step, and the values that its prefixes are read out of.
fn draw(
    encoder: &Encoder<'_>,
    pool: &Pool,
    settings: &Settings,
    step: u64,
    len: usize,
    readout: &mut Readout,
) -> Result<Batch, TrainError> {
    let mut rng = ChaCha8Rng::seed_from_u64(settings.seed);
    rng.set_stream(step);
    let mut batch = Batch { tokens: Vec::with_capacity(settings.batch * len), targets: Vec::new() };
    let width = readout.values.len() / settings.batch;
    let mut index = 0;
    while index < settings.batch {
        let at = rng.random_range(0..pool.facts.len());
        let question = match rng.random_bool(0.5) {
            true => pool.facts[at].ask(TRAINED[rng.random_range(0..TRAINED.len())]),
            false => pool.facts[at].among_words(&mut rng),
        };
        let prompt = encoder.prompt(&question)?;
        let room = len - PREFIX;
        // Of more tokens than any that the length was taken from.
        if prompt.len() > room {
            continue;
        }
        let shrunk = rng.random_range(SHRUNK..1.0);
        let to = &mut readout.values[index * width..][..width];
        for (to, value) in to.iter_mut().zip(&pool.values[at]) {
            let noise: f64 = StandardNormal.sample(&mut rng);
            *to = (shrunk * value + NOISE * noise) as f32;
        }
        // Placeholders are any token; what follows the question changes nothing of its answer.
        let padded = std::iter::repeat_n(prompt[0], PREFIX).chain(prompt.iter().copied());
        batch.tokens.extend(padded.chain(std::iter::repeat_n(prompt[0], room - prompt.len())));
        let row = index * len + PREFIX + prompt.len() - 1;
        batch.targets.push(Target { row, token: pool.tokens[at], weight: 1.0 / settings.batch as f32 });
        index += 1;
    }
    Ok(batch)
}
