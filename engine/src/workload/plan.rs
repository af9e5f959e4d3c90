//! Who stands where in one KV head: heavy hitters and needles, and which queries ask.

use super::calibrate::{BAND_TOKENS, Channels, Strengths};
use super::{Extents, SyntheticSpec, WorkloadError};
use rand::{Rng, RngExt};
use rand_distr::{Distribution, StandardNormal};
use std::collections::BTreeMap;

/// Last tokens of the context that may hint at a needle.
const HINT_TOKENS: usize = 32;

/// A needle of one KV head.
pub(super) struct Planted {
    /// Where its key is.
    pub position: usize,
    /// Unit vector in the free channels, after RoPE: the direction of its key.
    pub direction: Vec<f32>,
    /// The late token that asks for it.
    pub asked_by: usize,
    /// The token near the end of the context that asks for it too.
    pub hinted_by: Option<usize>,
}

/// What a token's key is.
pub(super) enum Role<'a> {
    /// On the cone, with the band.
    Ordinary,
    /// Off the cone altogether, with a small key.
    Sink,
    /// Off the cone by this much.
    Heavy(f64),
    /// Looked for by a query.
    Needle(&'a Planted),
}

/// The salient tokens of one KV head.
#[derive(Default)]
pub(super) struct Plan {
    /// Position and salience of the heavy hitters.
    pub heavy: BTreeMap<usize, f64>,
    /// Needles, in the order in which they are asked for.
    pub needles: Vec<Planted>,
}

impl SyntheticSpec {
    /// Heavy hitters of a context.
    pub(super) fn heavy_tokens(&self, extents: &Extents) -> usize {
        if self.heavy_mass_planted() == 0.0 {
            return 0;
        }
        ((self.heavy_hitters * extents.context_tokens as f64).round() as usize).max(1)
    }

    /// Mass on the heavy hitters: none where there are none.
    pub(super) fn heavy_mass_planted(&self) -> f64 {
        if self.heavy_hitters == 0.0 { 0.0 } else { self.heavy_mass }
    }

    /// Needles of a retrieval head: at most one for each late token.
    fn needles_planted(&self, extents: &Extents) -> usize {
        self.needles.min(extents.new_tokens)
    }

    /// KV heads that have needles; they come first.
    pub(super) fn retrieval_heads_of(&self, kv_heads: usize) -> usize {
        ((self.retrieval_heads * kv_heads as f64).round() as usize).clamp(1, kv_heads)
    }

    /// Says whether a context has room for sinks and needles besides its heavy hitters.
    pub(super) fn check_room(&self, extents: &Extents) -> Result<(), WorkloadError> {
        let tokens = extents.context_tokens;
        // Needles keep out of the last quarter at most, and heavy hitters are at most 0.4 of the tokens.
        let needed = 16.max(2 * (self.sinks + self.needles_planted(extents)));
        if tokens >= needed {
            return Ok(());
        }
        let expected = format!("at least {needed}: twice its sinks and needles, and not below 16");
        Err(WorkloadError::Extent { what: "context_tokens", value: tokens, expected })
    }
}

impl Plan {
    /// Draws the salient tokens of a head; `with_needles` for a retrieval head.
    pub fn draw(
        spec: &SyntheticSpec,
        extents: &Extents,
        channels: &Channels,
        strengths: &Strengths,
        with_needles: bool,
        rng: &mut impl Rng,
    ) -> Self {
        let mut plan = Plan::default();
        if with_needles {
            plan.needles = needles(spec, extents, channels, rng);
        }
        let taken: Vec<usize> = plan.needles.iter().map(|needle| needle.position).collect();
        let slowest = channels.frequencies.rad_per_token()[channels.cone];
        let count = spec.heavy_tokens(extents);
        let harmonic: f64 = (1..=count).map(|rank| 1.0 / rank as f64).sum();
        while plan.heavy.len() < count {
            let position = rng.random_range(spec.sinks..extents.context_tokens);
            if taken.contains(&position) || plan.heavy.contains_key(&position) {
                continue;
            }
            // In units of one sink's weight; a token off the cone by `e` has the logit `-(1 - e) A cos`.
            let share = spec.heavy_mass / (harmonic * (plan.heavy.len() + 1) as f64);
            let weight = spec.sinks as f64 * share / spec.sink_mass;
            let cone = strengths.cone * (slowest * (extents.context_tokens - position) as f64).cos();
            let salience = 1.0 + (weight.ln() - strengths.noise_gain) / cone;
            plan.heavy.insert(position, salience.clamp(0.0, 2.0));
        }
        plan
    }

    /// What the key of `token` is, when the first `sinks` tokens are sinks.
    pub fn role(&self, token: usize, sinks: usize) -> Role<'_> {
        if token < sinks {
            return Role::Sink;
        }
        if let Some(&salience) = self.heavy.get(&token) {
            return Role::Heavy(salience);
        }
        self.needles.iter().find(|needle| needle.position == token).map_or(Role::Ordinary, Role::Needle)
    }

    /// The needle that the query of `token` asks for.
    pub fn asked(&self, token: usize) -> Option<&Planted> {
        self.needles.iter().find(|needle| needle.asked_by == token || needle.hinted_by == Some(token))
    }
}

/// Needles, one in each of as many equal bins of the context, asked for in random order.
fn needles(spec: &SyntheticSpec, extents: &Extents, channels: &Channels, rng: &mut impl Rng) -> Vec<Planted> {
    let count = spec.needles_planted(extents);
    let tail = BAND_TOKENS.min(extents.context_tokens / 4);
    let room = extents.context_tokens - tail - spec.sinks;
    let mut positions: Vec<usize> = (0..count)
        .map(|index| spec.sinks + rng.random_range(index * room / count..(index + 1) * room / count))
        .collect();
    for index in (1..count).rev() {
        positions.swap(index, rng.random_range(0..=index));
    }
    let window = HINT_TOKENS.min(tail);
    let hints = ((spec.hinted * count as f64).round() as usize).min(window);
    let needle = |(index, position): (usize, usize)| Planted {
        position,
        direction: direction(extents.head_dim, channels, rng),
        asked_by: extents.context_tokens + index * extents.new_tokens / count,
        hinted_by: (index < hints).then(|| extents.context_tokens - window + index * window / hints),
    };
    positions.into_iter().enumerate().map(needle).collect()
}

/// A random unit vector in the free channels.
fn direction(head_dim: usize, channels: &Channels, rng: &mut impl Rng) -> Vec<f32> {
    let mut vector = vec![0f32; head_dim];
    channels.free.iter().for_each(|&channel| vector[channel] = StandardNormal.sample(rng));
    let norm = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
    vector.iter_mut().for_each(|x| *x /= norm);
    vector
}
