//! The next token from logits: the likeliest, or drawn.

use super::ModelError;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// What logits are divided by; 0 takes the likeliest token.
    pub temperature: f32,
    /// Share of probability that is drawn from: the likeliest tokens that together have it.
    pub top_p: f32,
    /// Of the generator, ChaCha8.
    pub seed: u64,
}

impl Sampling {
    /// The likeliest token.
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_p: 1.0, seed: 0 };
}

/// Chooses tokens.
pub struct Sampler {
    sampling: Sampling,
    rng: ChaCha8Rng,
    /// Tokens by probability, and their probabilities.
    ranked: Vec<(u32, f64)>,
}

/// The likeliest token; of equal logits the one of the smaller number.
///
/// # Errors
/// When a logit is no number.
pub fn likeliest(logits: &[f32]) -> Result<u32, ModelError> {
    if let Some(token) = logits.iter().position(|logit| !logit.is_finite()) {
        return Err(ModelError::Logit { logit: logits[token], token: token as u32 });
    }
    Ok((0..logits.len()).fold(0, |best, at| if logits[at] > logits[best] { at } else { best }) as u32)
}

impl Sampler {
    /// From the seed on.
    pub fn new(sampling: Sampling) -> Self {
        Sampler { sampling, rng: ChaCha8Rng::seed_from_u64(sampling.seed), ranked: Vec::new() }
    }

    /// The next token.
    ///
    /// # Errors
    /// When a logit is no number.
    pub fn next(&mut self, logits: &[f32]) -> Result<u32, ModelError> {
        let best = likeliest(logits)?;
        if self.sampling.temperature == 0.0 {
            return Ok(best);
        }
        let most = logits[best as usize];
        let weight = |logit: f32| (f64::from(logit - most) / f64::from(self.sampling.temperature)).exp();
        self.ranked.clear();
        self.ranked.extend((0..).zip(logits.iter().map(|&logit| weight(logit))));
        // Without a limit any order does.
        if self.sampling.top_p < 1.0 {
            self.ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        }
        let total: f64 = self.ranked.iter().map(|(_, weight)| weight).sum();
        let mut among = 0.0;
        let mut last = 0;
        for (index, (_, weight)) in self.ranked.iter().enumerate() {
            (among, last) = (among + weight, index);
            if among >= f64::from(self.sampling.top_p) * total {
                break;
            }
        }
        let mut left = self.rng.random::<f64>() * among;
        let drawn = self.ranked[..=last].iter().find(|(_, weight)| {
            left -= weight;
            left < 0.0
        });
        Ok(drawn.unwrap_or(&self.ranked[last]).0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(sampling: Sampling, logits: &[f32]) -> Vec<usize> {
        let mut sampler = Sampler::new(sampling);
        let mut counts = vec![0; logits.len()];
        (0..4000).for_each(|_| counts[sampler.next(logits).unwrap() as usize] += 1);
        counts
    }

    #[test]
    fn tokens_are_drawn_as_often_as_the_softmax_says() {
        let logits = [0.0, 2f32.ln(), f32::MIN, 5f32.ln()];
        let plain = counts(Sampling { temperature: 1.0, top_p: 1.0, seed: 3 }, &logits);
        for (count, expected) in plain.iter().zip([500.0, 1000.0, 0.0, 2500.0]) {
            assert!((*count as f64 - expected).abs() < 120.0, "{plain:?}");
        }
        let nucleus = counts(Sampling { temperature: 1.0, top_p: 0.8, seed: 3 }, &logits);
        assert_eq!([nucleus[0], nucleus[2]], [0, 0]);
        assert!((nucleus[3] as f64 - 4000.0 * 5.0 / 7.0).abs() < 120.0, "{nucleus:?}");
        let cold = counts(Sampling { temperature: 0.5, top_p: 1.0, seed: 3 }, &logits);
        assert!((cold[3] as f64 - 4000.0 * 25.0 / 30.0).abs() < 120.0, "{cold:?}");
    }

    #[test]
    fn greedy_takes_the_first_of_the_likeliest_and_nothing_is_drawn_from_nan() {
        let mut sampler = Sampler::new(Sampling::GREEDY);
        assert_eq!(sampler.next(&[1.0, 4.0, 4.0, -2.0]).unwrap(), 1);
        assert!(sampler.next(&[1.0, f32::NAN]).is_err());
    }

    #[test]
    fn the_seed_decides() {
        let of = |seed| {
            let mut sampler = Sampler::new(Sampling { temperature: 1.0, top_p: 0.9, seed });
            (0..20).map(|_| sampler.next(&[0.1, 0.2, 0.3, 0.4]).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }
}
