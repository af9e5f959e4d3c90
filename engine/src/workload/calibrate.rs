//! Which channels carry what, and how strong the planted components must be for the knobs to be shares of attention.
//!
//! The slowest RoPE pair carries the cone, the pairs of middling speed the local band, the rest ("free" channels) only
//! noise. Queries have no noise in the planted channels, and what noise keys have there is the same for every
//! key, so it drops out of every ratio. At the end of the context, in units of a sink's weight, an ordinary key at
//! distance `t` then weighs `exp(gain - A cos(w t) + h f(t))`: `A` the cone's strength, `w` the slowest frequency, `h`
//! the band's height, `f` the mean cosine of the band's pairs, `gain` the noise that a sink's small key does not have.
//! `A` and `h` follow from two ratios of sums of this over the context.

use super::{Extents, SyntheticSpec, WorkloadError};
use crate::attention::rope::Frequencies;
use std::ops::Range;

/// Tokens of the local band; a quarter of a context shorter than four times that.
pub(super) const BAND_TOKENS: usize = 64;

/// Standard deviation of keys in planted channels, and of a sink's key everywhere; elsewhere it is 1.
pub(super) const QUIET_NOISE: f64 = 0.25;

/// Radians per token of the pairs that carry the band: they peak at distance 0, fall within tens of tokens, and reach
/// with their slow end far enough that the peak does not come back at full height.
const BAND_RAD_PER_TOKEN: std::ops::RangeInclusive<f64> = 1.0 / 512.0..=0.25;

/// Turn of the slowest pair over the sequence up to which a cone is one.
const MAX_TURN_RAD: f64 = 0.5;

/// Largest height of the band, in logits, that is tried.
const MAX_HEIGHT: usize = 60;

/// Distances up to this are summed one by one, further ones by about as many samples.
const EXACT_TOKENS: usize = 2048;

/// Roles of a head's channels, and its RoPE frequencies.
pub(super) struct Channels {
    /// Frequencies of all pairs.
    pub frequencies: Frequencies,
    /// The pair that carries the cone: the slowest.
    pub cone: usize,
    /// The pairs that carry the band.
    pub band: Range<usize>,
    /// Channels that carry noise and needles.
    pub free: Vec<usize>,
}

impl Channels {
    /// Divides the channels of a head.
    ///
    /// # Errors
    /// When the head is too small, or the slowest pair turns too far over the sequence.
    pub fn new(spec: &SyntheticSpec, extents: &Extents) -> Result<Self, WorkloadError> {
        let (head_dim, tokens) = (extents.head_dim, extents.total_tokens());
        if head_dim < 8 || head_dim % 2 == 1 {
            let expected = "an even number of at least 8: RoPE rotates pairs".into();
            return Err(WorkloadError::Extent { what: "head dim", value: head_dim, expected });
        }
        let frequencies = Frequencies::new(head_dim, spec.rope_theta);
        let speeds = frequencies.rad_per_token();
        let cone = speeds.len() - 1;
        let turn_rad = speeds[cone] * tokens as f64;
        if turn_rad > MAX_TURN_RAD {
            let needed = (tokens as f64 / MAX_TURN_RAD).powf(head_dim as f64 / (head_dim - 2) as f64);
            return Err(WorkloadError::RopeTheta {
                rope_theta: spec.rope_theta,
                turn_rad,
                tokens,
                needed: needed.ceil(),
            });
        }
        // The fastest pair is always left free, so that there are channels for noise.
        let start = 1 + speeds[1..cone].iter().take_while(|&speed| speed > BAND_RAD_PER_TOKEN.end()).count();
        let length = speeds[start..cone].iter().take_while(|&speed| speed >= BAND_RAD_PER_TOKEN.start()).count();
        let band = start..start + length;
        let free = (0..head_dim).filter(|channel| {
            let pair = channel % (head_dim / 2);
            pair != cone && !band.contains(&pair)
        });
        Ok(Channels { free: free.collect(), cone, band, frequencies })
    }
}

/// Strengths of the planted components of one kind of head.
#[derive(Debug, Clone, Copy)]
pub(super) struct Strengths {
    /// `A`: the logit of a sink above an ordinary key.
    pub cone: f64,
    /// `h`: the logit that the band adds at distance 0.
    pub band: f64,
    /// Log of the mean factor that noise gives the weight of a key, over that of a sink.
    pub noise_gain: f64,
}

impl Strengths {
    /// Strengths for which sinks and the last tokens have their masses at the end of the context.
    ///
    /// # Errors
    /// When no height of the band gives `band_mass`, which `knob` names.
    pub fn solve(
        spec: &SyntheticSpec,
        extents: &Extents,
        channels: &Channels,
        knob: &'static str,
        band_mass: f64,
    ) -> Result<Self, WorkloadError> {
        let heavy_fraction = spec.heavy_tokens(extents) as f64 / extents.context_tokens as f64;
        let distances = Distances::new(channels, extents.context_tokens, 1.0 - heavy_fraction);
        let noise_gain = spec.noise.powi(2) * (1.0 - QUIET_NOISE.powi(2)) / 2.0;
        let ordinary = 1.0 - spec.sink_mass - spec.heavy_mass_planted();
        let band_ratio = band_mass / (ordinary - band_mass);
        let sink_weight = spec.sinks as f64 * ordinary / spec.sink_mass;
        let (mut cone, mut band) = (10.0, 0.0);
        // The two depend on each other only by the slow turn of the cone: a few rounds settle them.
        for _ in 0..4 {
            band = distances.height(cone, band_ratio).ok_or(WorkloadError::Unreachable {
                knob,
                value: band_mass,
                head_dim: extents.head_dim,
                tokens: extents.context_tokens,
            })?;
            cone = bisect(0.5, 80.0, |cone| {
                let (near, far) = distances.weights(cone, band);
                noise_gain.exp() * (near + far) < sink_weight
            });
        }
        Ok(Strengths { cone, band, noise_gain })
    }
}

/// What the weight of an ordinary key depends on, for the distances of a context.
struct Distances {
    near: Vec<Distance>,
    far: Vec<Distance>,
}

struct Distance {
    /// Keys that this one stands for.
    keys: f64,
    cone_cos: f64,
    band: f64,
}

impl Distances {
    fn new(channels: &Channels, tokens: usize, keys_per_token: f64) -> Self {
        let speeds = channels.frequencies.rad_per_token();
        let at = |distance: usize, keys: f64| {
            let t = distance as f64;
            let cosines: f64 = speeds[channels.band.clone()].iter().map(|speed| (speed * t).cos()).sum();
            let band = cosines / channels.band.len().max(1) as f64;
            Distance { keys: keys * keys_per_token, cone_cos: (speeds[channels.cone] * t).cos(), band }
        };
        let band_tokens = BAND_TOKENS.min(tokens / 4);
        let exact = tokens.min(EXACT_TOKENS);
        let mut far: Vec<Distance> = (band_tokens..exact).map(|distance| at(distance, 1.0)).collect();
        let samples = (tokens - exact).min(2 * EXACT_TOKENS);
        let stride = (tokens - exact) as f64 / samples.max(1) as f64;
        far.extend((0..samples).map(|sample| {
            // One sample in each bin, at a place that follows the golden ratio lest strides beat with cosines.
            let place = (sample as f64 * 0.618_033_988_749_895).fract();
            at(exact + ((sample as f64 + place) * stride) as usize, stride)
        }));
        Distances { near: (0..band_tokens).map(|distance| at(distance, 1.0)).collect(), far }
    }

    /// Summed weights of the keys in the band and beyond it, without the noise.
    fn weights(&self, cone: f64, height: f64) -> (f64, f64) {
        let sum = |distances: &[Distance]| -> f64 {
            distances.iter().map(|at| at.keys * (height * at.band - cone * at.cone_cos).exp()).sum()
        };
        (sum(&self.near), sum(&self.far))
    }

    /// The least height for which the band outweighs the rest by `ratio`; 0 where it does by its length alone.
    fn height(&self, cone: f64, ratio: f64) -> Option<f64> {
        let reached = |height: f64| {
            let (near, far) = self.weights(cone, height);
            near >= ratio * far
        };
        // The ratio need not rise all the way (distant echoes of the band grow too), so walk, then bisect.
        match (0..=MAX_HEIGHT).find(|&height| reached(height as f64))? {
            0 => Some(0.0),
            above => Some(bisect(above as f64 - 1.0, above as f64, reached)),
        }
    }
}

/// The least value between `low` and `high` for which `reached` holds, given that it holds from there on.
fn bisect(mut low: f64, mut high: f64, reached: impl Fn(f64) -> bool) -> f64 {
    for _ in 0..40 {
        let middle = (low + high) / 2.0;
        if reached(middle) { high = middle } else { low = middle }
    }
    high
}
