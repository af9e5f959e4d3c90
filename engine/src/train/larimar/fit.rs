//! The maps of the encoder, fitted in closed form, and the threshold of the scope detector: of each of some layers, of which the one
//! is taken whose states tell most written facts from others.

use super::TrainError;
use crate::editing::{Affine, Drawn, EditError, Encoded, Encoder, Fact, Maps, PREFIX, TRAINED, values, widths};
use crate::episodic::matrix::cosine;
use crate::memory::Arena;
use crate::model::Config;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// Facts that the encoder's maps are fitted to, and behind how many keys each value stands for its own.
const FITTED: usize = 384;
const KEYS_OF_A_VALUE: usize = 4;
/// Questions about a key that are among words in no order, besides those of training.
const AMONG_WORDS: usize = 4;
/// Facts whose cues the threshold is set by, and facts that were written beside each.
const CALIBRATED: usize = 256;
/// Layers that are tried for the encoder's states.
const TRIED: usize = 4;

/// Fits at each layer that is tried and gives the maps of the best, without a read-out.
pub(super) fn fit(encoder: &Encoder<'_>, seed: u64, arena: &Arena) -> Result<Maps, TrainError> {
    let config = &encoder.model.config;
    let layers = layers(config);
    let Texts { keys, values, written, cues } = Texts::draw(encoder, seed)?;
    let keys = encoder.questions_at(&layers, &keys)?;
    let values = encoder.facts_at(&layers, &values)?;
    let written = encoder.facts_at(&layers, &written)?;
    let cues = encoder.questions_at(&layers, &cues)?;
    let [subject_width, value_width] = widths(config);
    let mut best: Option<(i64, Maps)> = None;
    for (at, &layer) in layers.iter().enumerate() {
        let subjects: Vec<Vec<f32>> = keys[at].iter().map(|state| state.subject.clone()).collect();
        let values: Vec<Vec<f32>> = values[at].iter().filter_map(|state| state.value.clone()).collect();
        let mut maps = Maps {
            base: encoder.model.fingerprint.clone(),
            layer,
            subject: Affine::fit(&subjects, TRAINED.len() + AMONG_WORDS, subject_width, arena)?,
            value: Affine::fit(&values, KEYS_OF_A_VALUE, value_width, arena)?,
            tokens: PREFIX,
            readout: [Vec::new(), Vec::new()],
            threshold: 0.0,
        };
        let (threshold, told) = threshold(&maps, &written[at], &cues[at]);
        maps.threshold = threshold;
        if best.as_ref().is_none_or(|(most, _)| told > *most) {
            best = Some((told, maps));
        }
    }
    Ok(best.expect("a model has layers").1)
}

/// Layers whose states are tried: the first, and others up to the middle of the model.
fn layers(config: &Config) -> Vec<usize> {
    let mut layers: Vec<usize> = (0..TRIED).map(|at| at * config.layers / (2 * (TRIED - 1))).collect();
    layers.dedup();
    layers
}

/// What states are taken of.
struct Texts {
    /// Keys, each in [`TRAINED`] questions and [`AMONG_WORDS`] times among words.
    keys: Vec<String>,
    /// Facts, [`KEYS_OF_A_VALUE`] of each value.
    values: Vec<Fact>,
    /// Facts that are written.
    written: Vec<Fact>,
    /// Cues about each of those, then about as many others, all among words in no order.
    cues: Vec<String>,
}

impl Texts {
    fn draw(encoder: &Encoder<'_>, seed: u64) -> Result<Self, EditError> {
        let usable = |word: &str| encoder.is_one_token(word);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut keys = Vec::with_capacity(FITTED * (TRAINED.len() + AMONG_WORDS));
        for one in Drawn::draw(seed, FITTED, false, usable)? {
            keys.extend(TRAINED.iter().map(|template| one.ask(template)));
            keys.extend((0..AMONG_WORDS).map(|_| one.among_words(&mut rng)));
        }
        let words = values(false, usable)?;
        let drawn = Drawn::draw(seed + 1, words.len() * KEYS_OF_A_VALUE, false, usable)?;
        let values = drawn.iter().enumerate().map(|(at, one)| Fact::new(&one.key, words[at / KEYS_OF_A_VALUE]));
        let drawn = Drawn::draw(seed + 2, 2 * CALIBRATED, false, usable)?;
        let mut rng = ChaCha8Rng::seed_from_u64(seed + 2);
        Ok(Texts {
            keys,
            values: values.collect(),
            written: drawn[..CALIBRATED].iter().map(Drawn::fact).collect(),
            cues: drawn.iter().map(|one| one.among_words(&mut rng)).collect(),
        })
    }
}

/// The distance that tells cues of written facts best from cues of others, and by how many cues.
fn threshold(maps: &Maps, written: &[Encoded], cues: &[Encoded]) -> (f64, i64) {
    let written: Vec<Vec<f64>> = written.iter().map(|state| maps.encoding(state)).collect();
    let distance = |(at, cue): (usize, &Encoded)| {
        let cue = maps.encoding(cue);
        let nearest = written.iter().map(|fact| cosine(fact, &cue)).fold(-1.0, f64::max);
        (1.0 - nearest, at < written.len())
    };
    let mut distances: Vec<(f64, bool)> = cues.iter().enumerate().map(distance).collect();
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
    (at, best)
}
