//! A run of `--method larimar`: the maps by which a frozen model writes facts into a memory and answers from it
//! ([`crate::editing`]).
//!
//! The two maps of the encoder are fitted first, in closed form, to states of generated facts and questions, and the scope
//! detector's threshold to cues of facts and of others. The read-out is then trained through the frozen model: a step draws facts, takes
//! each value's encoding as it is written, with noise and a shrinkage in the place of what a read from a full memory adds, and
//! has the loss of the value's token behind a question that has the read-out's prefix before it. The memory itself is linear and
//! has nothing to train, so that no gradient goes through it.

mod fit;

use super::activations::{Extents, Recompute};
use super::adamw::{AdamW, Constants};
use super::checkpoint::{Array, Identity, Progress, as_written};
use super::fine_tuned::{FineTuned, fine_tune};
use super::holder::Whole;
use super::log::Line;
use super::loss::Target;
use super::method::{Method, Run, Since, Step, Tell};
use super::readout::Readout;
use super::run::{Options, TrainError};
use super::weights::Frozen;
use super::{Batch, Network, Parameters};
use crate::device::Cpu;
use crate::editing::{
    Answered, Drawn, EditError, Editor, Encoded, Encoder, Episode, Fact, InContext, MEMORY, Maps, PREFIX, Retrieval,
    TRAINED, widths,
};
use crate::memory::{Arena, Label, LabelBytes};
use crate::model::{Config, Model, Text, fingerprint, locate};
use crate::tensor::DType;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Name of the trained maps in a run's folder.
pub const MAPS: &str = "maps.safetensors";
/// Facts that are fine-tuned in at the end, to compare with.
const TUNED_IN: usize = 16;
/// Facts whose encodings steps draw from.
const POOL: usize = 2048;
/// Standard deviation of the noise on a value, and the least part that a read shrinks it to.
const NOISE: f64 = 0.2;
const SHRUNK: f64 = 0.7;
/// Facts that are asked for together at the end; fewer are asked for in so many more episodes that they come to as many as [`FEWEST`].
const COUNTS: [usize; 5] = [1, 4, 16, 64, 128];
const FEWEST: usize = 16;
/// Facts that are asked for from the context, all or the nearest ones.
const BESIDE: usize = 64;
const NEAREST: [usize; 2] = [1, 4];
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

/// A read-out that is trained through a frozen model.
struct Larimar<'a> {
    settings: &'a Settings,
    cpu: &'a Cpu,
    folder: &'a Path,
    encoder: &'a Encoder<'a>,
    pool: Pool,
    /// Tokens of a question with its placeholders.
    len: usize,
    maps: Maps,
    weights: Frozen,
    network: Network<'a>,
    adamw: AdamW,
    optimizer: Constants,
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
) -> Result<Option<(Found, FineTuned)>, TrainError> {
    let misfit = |reason| TrainError::Misfit { name: "--method larimar".into(), reason };
    settings.check().map_err(misfit)?;
    let located = locate(&settings.model)?;
    let base = fingerprint(&located)?;
    let run = Run::begin(options, &located, Identity::new(settings, Some(&base), None))?;
    let (arena, text) = (Arena::with_limit(options.limit_bytes), Text::open(&located)?);
    let model = Model::open(&located, &arena)?;
    let seed = settings.seed.wrapping_mul(1 << 20);
    let mut encoder = Encoder::new(&model, &text, 0, cpu, &arena)?;
    let maps = fit::fit(&encoder, seed, &arena)?;
    encoder.layer = maps.layer;
    let pool = pool(&encoder, &maps, seed + 3)?;
    let len = length(&encoder)?;

    let parameters = Parameters::all_frozen(&model.config, settings.weights);
    let extents = Extents { parameters: &parameters, batch: settings.batch, len, skipped: 0 };
    let of_training = Arena::with_limit(options.limit_bytes);
    let bytes = |mode| bytes(&extents, mode, cpu.threads()).into_values().sum();
    let recompute = Recompute::within(options.limit_bytes, bytes);
    let weights = Frozen::open(&located, &parameters, &of_training)?;
    let readout = Readout::new(&of_training, &extents, shape(&model.config), cpu.threads(), settings.seed)?;
    let adamw = AdamW::new(&of_training, readout.weights.len())?;
    let network = Network::new(&of_training, cpu, extents, recompute)?.with_readout(readout);
    let (folder, optimizer, encoder) = (run.folder(), settings.optimizer(), &encoder);
    let mut larimar = Larimar { settings, cpu, folder, encoder, pool, len, maps, weights, network, adamw, optimizer };
    let Some(progress) = run.steps(&mut larimar, settings.steps, watch)?.filter(|at| at.step == settings.steps) else {
        return Ok(None);
    };
    let Larimar { maps, weights, .. } = larimar.read_out();
    let found = Found::of(encoder, maps, settings.episodes, options.limit_bytes)?;
    let fine_tuned = fine_tune((weights, &parameters), &tuned_in(encoder)?, cpu, options.limit_bytes)?;
    let record = json!({
        "method": "larimar",
        "settings": as_written(settings),
        "base_model": base,
        "layer": maps.layer,
        "threshold": maps.threshold,
        "prefix_tokens": PREFIX,
        "trained_parameters": maps.readout.iter().map(Vec::len).sum::<usize>(),
        "recompute": recompute,
        "answers": found,
        "fine_tuned": fine_tuned,
    });
    run.record(&progress, &of_training.usage(), record)?;
    Ok(Some((found, fine_tuned)))
}

impl Larimar<'_> {
    /// With the read-out among the maps.
    fn read_out(&mut self) -> &mut Self {
        let readout = self.network.readout();
        let (weight, bias) = readout.weights.split_at(readout.parameters[1].range.start);
        self.maps.readout = [weight.to_vec(), bias.to_vec()];
        self
    }
}

impl Method for Larimar<'_> {
    const SAVE_STEPS: usize = 50;

    fn arrays(&mut self, array: Array) -> Vec<&mut [f32]> {
        vec![self.adamw.array(&mut self.network.readout().weights, array)]
    }

    fn step(&mut self, progress: &Progress) -> Result<Step, TrainError> {
        let (settings, step) = (self.settings, progress.step);
        let batch = draw(self.encoder, &self.pool, settings, step as u64, self.len, self.network.readout())?;
        self.network.readout().gradient.fill(0.0);
        let mut whole = Whole { weights: self.weights.all(), gradients: &mut [] };
        let loss = self.network.step_of(&mut whole, &batch)?;
        let rate = self.optimizer.rate(step, settings.steps);
        let Readout { weights: trained, gradient, parameters, .. } = self.network.readout();
        let gradient_norm = self.adamw.update(self.cpu, &self.optimizer, parameters, (step, rate), trained, gradient);
        Ok(Step { sequences: settings.batch, tokens: batch.tokens.len(), loss, gradient_norm, rate })
    }

    fn log(&mut self, progress: &Progress, since: &Since, tell: Tell<'_>) -> Result<(), TrainError> {
        // A question has one answer of one token.
        let flop = since.steps as f64 * self.network.extents().step_flop(self.settings.batch);
        tell(since.line(progress, self.len, flop))
    }

    fn save(&mut self, _progress: &Progress, _tell: Tell<'_>) -> Result<(), TrainError> {
        let Larimar { maps, folder, .. } = self.read_out();
        Ok(maps.save(&folder.join(MAPS))?)
    }
}

/// What the model answers with the maps, and without.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Found {
    /// From a memory of so many facts.
    pub memory: Vec<Answered>,
    /// Single facts whose values no training has.
    pub new_values: Answered,
    /// From the context, all facts in a full cache.
    pub context: Answered,
    /// From the context, so many facts that are nearest to the question.
    pub retrieved: Vec<(usize, Answered)>,
}

impl Found {
    fn of(encoder: &Encoder<'_>, maps: &Maps, episodes: usize, limit_bytes: u64) -> Result<Self, EditError> {
        let name = Editor::memory(MEMORY, maps)?;
        let memory = |count: usize, kept_back: bool| {
            let times = FEWEST.div_ceil(count);
            asked(encoder, (count, kept_back), episodes * times, |episode| {
                let arena = Arena::with_limit(limit_bytes);
                episode.ask(encoder, &mut Editor::new(encoder, maps, (&name, count), &arena)?)
            })
        };
        let arena = Arena::with_limit(limit_bytes);
        let context = asked(encoder, (BESIDE, false), episodes, |episode| {
            episode.ask(encoder, &mut InContext::new(encoder, None, episode.most_tokens(encoder)?, &arena)?)
        })?;
        let nearest = |count: usize| {
            let ask = |episode: &Episode| episode.ask(encoder, &mut Retrieval::new(encoder, maps, count));
            Ok::<_, EditError>((count, asked(encoder, (BESIDE, false), episodes, ask)?))
        };
        Ok(Found {
            memory: COUNTS.iter().map(|&count| memory(count, false)).collect::<Result<_, _>>()?,
            new_values: memory(1, true)?,
            context,
            retrieved: NEAREST.iter().map(|&count| nearest(count)).collect::<Result<_, _>>()?,
        })
    }

    /// Median seconds of an edit, one by itself.
    pub fn seconds_per_edit(&self) -> f64 {
        self.memory[0].seconds_per_edit()
    }
}

/// Answers over episodes of so many facts.
fn asked(
    encoder: &Encoder<'_>,
    (count, kept_back): (usize, bool),
    episodes: usize,
    ask: impl Fn(&Episode) -> Result<Answered, EditError>,
) -> Result<Answered, EditError> {
    let mut answered = Answered::default();
    for episode in 0..episodes as u64 {
        let seed = HELD_OUT_SEED.wrapping_add(episode << 16);
        answered.add(ask(&Episode::draw(encoder, count, kept_back, seed)?)?);
    }
    Ok(answered)
}

/// Tokens of facts to be fine-tuned in.
fn tuned_in(encoder: &Encoder<'_>) -> Result<Vec<Vec<u32>>, TrainError> {
    let facts = Drawn::draw(HELD_OUT_SEED, TUNED_IN, false, |word| encoder.is_one_token(word))?;
    let statement = |fact: Fact| encoder.prompt(&format!("{}{}", fact.stem, fact.value));
    Ok(facts.iter().map(|one| statement(one.fact())).collect::<Result<_, _>>()?)
}

/// Facts with the encodings of their values.
fn pool(encoder: &Encoder<'_>, maps: &Maps, seed: u64) -> Result<Pool, TrainError> {
    let facts = Drawn::draw(seed, POOL, false, |word| encoder.is_one_token(word))?;
    let texts: Vec<Fact> = facts.iter().map(Drawn::fact).collect();
    let states = encoder.facts(&texts)?;
    let value = |state: &Encoded| state.value.as_ref().map(|value| maps.value.apply(value)).unwrap_or_default();
    let values = states.iter().map(value).collect();
    let tokens = texts.iter().map(|fact| encoder.value(&fact.value)).collect::<Result<_, _>>()?;
    Ok(Pool { facts, values, tokens })
}

/// Tokens of the longest question of training with its placeholders.
fn length(encoder: &Encoder<'_>) -> Result<usize, TrainError> {
    let drawn = Drawn::draw(0, POOL, false, |word| encoder.is_one_token(word))?;
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
