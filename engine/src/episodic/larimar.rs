//! Larimar's memory (arXiv 2403.11901): slots `M [K, C]` as a linear generative model, written and read by least squares.
//!
//! The order of operations is that of the class `GPM` of the public code (IBM/larimar, `larimar_base/modules/memory.py`), without
//! its sampled posteriors of read weights. The operator that takes a fact out is the paper's alone: the code has none.

use super::inverse::Inverse;
use super::matrix::{Matrix, add_scaled, dot, norm, solve};
use super::{EpisodicError, FactMemoryEntry, Method, Noise, Stays, Step, Store};
use crate::memory::{Arena, ArenaError, Label, LabelBytes};
use crate::named::{Named, NamedError, Parameter};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

const fn parameter(name: &'static str, default: &'static str, about: &'static str) -> Parameter {
    Parameter { name, default, about }
}

pub const ENTRY: FactMemoryEntry = FactMemoryEntry {
    name: "larimar",
    about: "Slots that facts are spread over by least squares, with a covariance that lets single ones be taken out",
    paper: "2403.11901",
    parameters: &[
        parameter("slots", "64", "K, rows of the memory"),
        parameter("noise", "0.1", "standard deviation of the observation noise, for each number of a vector"),
        parameter(
            "write",
            "sequential",
            "sequential: one fact after another; episode: all at once, by a pseudo-inverse",
        ),
        parameter("address", "prior", "what a fact's address is solved against in sequential writes: prior or memory"),
        parameter("prior", "identity", "the slots that addresses begin with: identity or random"),
        parameter(
            "start",
            "empty",
            "what is read before anything is written: empty (zeros) or prior, which address=memory needs",
        ),
        parameter("inverse", "newton", "newton: iterations for a pseudo-inverse; exact: by singular values"),
        parameter("steps", "15", "iterations of inverse=newton, at most 40: each doubles the rounding of what is 0"),
    ],
    build: |named| Ok(Box::new(Larimar::parse(named)?)),
};

/// The slots that addresses begin with, a parameter that Larimar trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prior {
    /// Ones on the diagonal.
    Identity,
    /// Standard normal deviates, the same for all.
    Random,
}

/// What the slots hold before anything is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Zeros, so that a read gives back nothing but what was written.
    Empty,
    /// The prior, as in the public code: slots without facts give back what they span of any cue.
    Prior,
}

/// What a fact's address is solved against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Address {
    /// The prior, so that a fact has one address for ever: `w = z M₀⁺`.
    Prior,
    /// The memory as it is: `w = (M Mᵀ + σ² I)⁻¹ M z`.
    Memory,
}

/// How facts get in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Write {
    /// All at once: `W = Z M₀⁺`, `M = W⁺ Z`.
    Episode,
    /// One after another, by the rank-one update of mean and covariance.
    Sequential,
}

/// Parameters of the memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Larimar {
    /// `K`.
    pub slots: usize,
    /// `σ`.
    pub noise: f64,
    /// How facts get in.
    pub write: Write,
    /// What addresses are solved against in sequential writes.
    pub address: Address,
    /// The slots that addresses begin with.
    pub prior: Prior,
    /// What the slots hold at first.
    pub start: Start,
    /// How pseudo-inverses are found.
    pub inverse: Inverse,
}

impl Larimar {
    fn parse(named: &Named) -> Result<Self, NamedError> {
        let choice = |key: &str, options: [&'static str; 2]| {
            let found = named.text(key).unwrap_or(options[0]);
            options
                .iter()
                .position(|option| *option == found)
                .ok_or_else(|| named.wrong(key, format!("{} or {}", options[0], options[1])))
        };
        let is_newton = choice("inverse", ["newton", "exact"])? == 0;
        let steps = named.count_in("steps", 15, 1..=40)?;
        if named.text("steps").is_some() && !is_newton {
            return Err(named.wrong("steps", "left out with inverse=exact".into()));
        }
        let slots = named.count_in("slots", 64, 1..=MOST)?;
        let write = [Write::Sequential, Write::Episode][choice("write", ["sequential", "episode"])?];
        let unused = ["address", "start"].into_iter().find(|key| named.text(key).is_some());
        if let (Write::Episode, Some(key)) = (write, unused) {
            return Err(named.wrong(
                key,
                "left out with write=episode, which takes the prior's addresses and the prior's place".into(),
            ));
        }
        let address = [Address::Prior, Address::Memory][choice("address", ["prior", "memory"])?];
        let start = match named.text("start") {
            None if address == Address::Memory => Start::Prior,
            _ => [Start::Empty, Start::Prior][choice("start", ["empty", "prior"])?],
        };
        if (address, start) == (Address::Memory, Start::Empty) {
            return Err(named.wrong("start", "prior with address=memory: an empty memory has no addresses".into()));
        }
        Ok(Larimar {
            slots,
            noise: named.number("noise", 0.1, 0.0..=1e3)?,
            write,
            address,
            prior: [Prior::Identity, Prior::Random][choice("prior", ["identity", "random"])?],
            start,
            inverse: if is_newton { Inverse::Newton { steps } } else { Inverse::Exact },
        })
    }

    /// Whether the prior's pseudo-inverse is kept, for addresses.
    fn keeps_prior(&self) -> bool {
        self.write == Write::Episode || self.address == Address::Prior
    }

    /// A memory with nothing written.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn begin(&self, width: usize, arena: &Arena) -> Result<Slots, EpisodicError> {
        let mut mean = Matrix::zeros(arena, Label::Facts, self.slots, width)?;
        match self.prior {
            Prior::Identity => mean.set_identity(),
            Prior::Random => {
                let mut rng = ChaCha8Rng::seed_from_u64(0);
                mean.iter_mut().for_each(|value| *value = StandardNormal.sample(&mut rng));
            }
        }
        let covariance = match self.write {
            Write::Episode => None,
            Write::Sequential => {
                let mut covariance = Matrix::zeros(arena, Label::Facts, self.slots, self.slots)?;
                covariance.set_identity();
                covariance.iter_mut().for_each(|value| *value *= 1.0 + EPSILON);
                Some(covariance)
            }
        };
        let mut slots = Slots { settings: *self, mean, covariance, prior_inverse: None, arena: arena.clone() };
        slots.take_prior()?;
        Ok(slots)
    }
}

/// Most slots: their covariance has so many rows and columns.
const MOST: usize = 1 << 14;
/// What the reference code adds to the prior's variance.
const EPSILON: f64 = 1e-6;
/// How many times its rounding a difference must be to take a fact out with: what is left of it is then wrong by a few thousandths.
const PRECISE: f64 = 100.0;
/// Largest distance of a fact from what the memory without it has at its address, in lengths of the fact. Written facts come to a
/// few while a quarter of the slots is free, and seldom to 50 when none is; another value comes to hundreds, as what it differs by
/// is multiplied by `1 + |w|² / σ²`. (Normal vectors of variance 1, noise of 0.01 to 0.1; with more facts than slots the two are alike,
/// and neither does harm.)
const MOST_LENGTHS: f64 = 50.0;

impl Method for Larimar {
    fn bytes(&self, width: usize) -> LabelBytes {
        let mean = Matrix::bytes(self.slots, width);
        let covariance = if self.write == Write::Sequential { Matrix::bytes(self.slots, self.slots) } else { 0 };
        let prior = if self.keeps_prior() { mean } else { 0 };
        [(Label::Facts, mean + covariance), (Label::Weights, prior)]
            .into_iter()
            .filter(|(_, bytes)| *bytes > 0)
            .collect()
    }

    fn workspace_bytes(&self, width: usize, step: Step) -> u64 {
        let slots = self.slots;
        match step {
            Step::Open if self.keeps_prior() => self.inverse.bytes(slots, width),
            Step::Open => 0,
            Step::Write(facts) if self.write == Write::Episode => {
                2 * Matrix::bytes(facts, width) + Matrix::bytes(facts, slots) + self.inverse.bytes(facts, slots)
            }
            Step::Write(_) => {
                let gram = if self.address == Address::Memory { Matrix::bytes(slots, slots) } else { 0 };
                Matrix::bytes(1, 2 * slots + width) + gram
            }
            Step::Read(cues) => {
                let weights = Matrix::bytes(slots, width) + Matrix::bytes(cues, width) + Matrix::bytes(cues, slots);
                self.inverse.bytes(slots, width).max(weights)
            }
        }
    }

    fn forgets(&self) -> bool {
        self.write == Write::Sequential
    }

    fn open(&self, width: usize, arena: &Arena) -> Result<Box<dyn Store>, EpisodicError> {
        Ok(Box::new(self.begin(width, arena)?))
    }
}

/// The slots at work.
pub struct Slots {
    settings: Larimar,
    /// `M [K, C]`.
    mean: Matrix,
    /// `U [K, K]`.
    covariance: Option<Matrix>,
    /// `M₀⁺ [C, K]`.
    prior_inverse: Option<Matrix>,
    arena: Arena,
}

impl Slots {
    /// Puts other slots in the place of the prior; nothing must be written yet.
    ///
    /// # Errors
    /// As [`Larimar::begin`].
    ///
    /// # Panics
    /// When they are of another shape.
    pub fn with_prior(mut self, prior: &[f64]) -> Result<Self, EpisodicError> {
        self.mean.copy_from_slice(prior);
        self.take_prior()?;
        Ok(self)
    }

    /// `M [K, C]`.
    pub fn mean(&self) -> &Matrix {
        &self.mean
    }

    /// `U [K, K]`, of sequential writes.
    pub fn covariance(&self) -> Option<&Matrix> {
        self.covariance.as_ref()
    }

    /// Begins with the prior that lies in the slots.
    fn take_prior(&mut self) -> Result<(), EpisodicError> {
        if self.settings.keeps_prior() {
            let mut kept = match self.prior_inverse.take() {
                Some(kept) => kept,
                None => Matrix::zeros(&self.arena, Label::Weights, self.mean.columns(), self.mean.rows())?,
            };
            kept.copy_from_slice(&self.settings.inverse.of(&self.mean, &self.arena)?);
            self.prior_inverse = Some(kept);
        }
        if self.settings.start == Start::Empty {
            self.mean.fill(0.0);
        }
        Ok(())
    }

    fn workspace(&self, rows: usize, columns: usize) -> Result<Matrix, ArenaError> {
        Matrix::zeros(&self.arena, Label::Workspace, rows, columns)
    }

    /// `source` with noise on every number.
    fn noisy(&self, source: &Matrix, noise: Noise<'_>) -> Result<Matrix, ArenaError> {
        let mut noisy = self.workspace(source.rows(), source.columns())?;
        noisy.copy_from_slice(source);
        self.disturb(&mut noisy, noise);
        Ok(noisy)
    }

    fn disturb(&self, values: &mut [f64], noise: Noise<'_>) {
        values.iter_mut().for_each(|value| *value += self.settings.noise * noise());
    }

    /// Writes an episode at once: `Z' = Z + σ ε`, `W = (Z' + σ ε') M₀⁺`, `M = W⁺ Z'`.
    fn write_episode(&mut self, facts: &Matrix, noise: Noise<'_>) -> Result<(), EpisodicError> {
        let facts = self.noisy(facts, noise)?;
        let asked = self.noisy(&facts, noise)?;
        let prior = self.prior_inverse.as_ref().expect("an episode's addresses are of the prior");
        let mut addresses = self.workspace(facts.rows(), self.mean.rows())?;
        addresses.set_product(&asked, prior);
        let inverse = self.settings.inverse.of(&addresses, &self.arena)?;
        self.mean.set_product(&inverse, &facts);
        Ok(())
    }

    /// The address `w [K]` of a fact in sequential writes.
    fn address(&self, fact: &[f64], address: &mut [f64]) -> Result<(), EpisodicError> {
        match (self.settings.address, &self.prior_inverse) {
            (Address::Prior, Some(prior)) => {
                address.fill(0.0);
                fact.iter().enumerate().for_each(|(index, &value)| add_scaled(address, value, prior.row(index)));
            }
            _ => {
                let mut gram = self.workspace(self.mean.rows(), self.mean.rows())?;
                gram.set_gram(&self.mean);
                for (index, value) in address.iter_mut().enumerate() {
                    gram.row_mut(index)[index] += self.settings.noise.powi(2);
                    *value = dot(self.mean.row(index), fact);
                }
                if !solve(&mut gram, address) {
                    return Err(EpisodicError::Singular { noise: self.settings.noise });
                }
            }
        }
        Ok(())
    }

    /// Adds a fact that was seen (`sign` 1) or takes one out (`sign` -1), by the rank-one update of mean and covariance:
    /// `Δ = z - w M`, `s = σ² + sign w U wᵀ`, `M <- M + sign (U wᵀ / s) Δ`, `U <- U - sign (U wᵀ)(w U) / s`.
    fn update(&mut self, fact: &[f64], sign: f64) -> Result<(), EpisodicError> {
        let (slots, variance) = (self.mean.rows(), self.settings.noise.powi(2));
        let mut scratch = self.workspace(1, 2 * slots + fact.len())?;
        let (address, rest) = scratch.split_at_mut(slots);
        let (spread, difference) = rest.split_at_mut(slots);
        self.address(fact, address)?;
        if address.iter().all(|&weight| weight == 0.0) {
            return Err(EpisodicError::NoAddress { slots });
        }
        let covariance = self.covariance.as_mut().ok_or(EpisodicError::NoCovariance)?;
        spread.iter_mut().enumerate().for_each(|(index, value)| *value = dot(covariance.row(index), address));
        let seen = dot(address, spread);
        if !seen.is_finite() {
            return Err(EpisodicError::Length { squared: seen });
        }
        let denominator = variance + sign * seen;
        // Writing leaves an address no more of its variance than `σ² p / (σ² + p)` of the prior's `p`, whatever else is written.
        let before = dot(address, address) * (1.0 + EPSILON);
        let most = match (self.settings.address, variance + before) {
            (Address::Prior, all) if all > 0.0 => variance * before / all,
            _ => variance,
        };
        // What is left of two numbers that nearly cancel must be more than their rounding.
        let rounding = 4.0 * f64::EPSILON * variance.max(dot(address, address));
        if sign < 0.0 {
            if seen > most * (1.0 + 1e-6) + rounding {
                return Err(Stays::Address { variance: seen, most }.into());
            }
            if denominator <= PRECISE * rounding {
                // From the denominator `σ⁴ / |w|²` of a lone fact.
                let least = norm(address) * (4.0 * f64::EPSILON * PRECISE).powf(0.25);
                return Err(Stays::Rounding { noise: self.settings.noise, least }.into());
            }
        } else if denominator <= rounding {
            // Without noise a memory that knows all about an address has nothing to learn there.
            return Ok(());
        }
        difference.copy_from_slice(fact);
        address.iter().enumerate().for_each(|(index, &weight)| add_scaled(difference, -weight, self.mean.row(index)));
        // From the memory with the fact to the memory without it a difference grows by `σ² / s`.
        let lengths = norm(difference) / norm(fact) * (variance / denominator);
        if sign < 0.0 && lengths > MOST_LENGTHS {
            return Err(Stays::Value { lengths }.into());
        }
        for (index, &part) in spread.iter().enumerate() {
            add_scaled(self.mean.row_mut(index), sign * part / denominator, difference);
            add_scaled(covariance.row_mut(index), -sign * part / denominator, spread);
        }
        Ok(())
    }

    /// Weights with which slots are read, `[Q, K]`: `w = (z + σ ε) M⁺`.
    ///
    /// # Errors
    /// When the arena has no room, or the pseudo-inverse cannot be found.
    pub fn read_weights(&self, cues: &Matrix, noise: Noise<'_>) -> Result<Matrix, EpisodicError> {
        let inverse = self.settings.inverse.of(&self.mean, &self.arena)?;
        let cues = self.noisy(cues, noise)?;
        let mut weights = self.workspace(cues.rows(), self.mean.rows())?;
        weights.set_product(&cues, &inverse);
        Ok(weights)
    }
}

impl Store for Slots {
    fn write(&mut self, facts: &Matrix, noise: Noise<'_>) -> Result<(), EpisodicError> {
        match self.settings.write {
            Write::Episode => self.write_episode(facts, noise),
            Write::Sequential => (0..facts.rows()).try_for_each(|index| self.update(facts.row(index), 1.0)),
        }
    }

    fn forget(&mut self, fact: &[f64]) -> Result<bool, EpisodicError> {
        self.update(fact, -1.0)?;
        Ok(true)
    }

    fn read(&self, cues: &Matrix, noise: Noise<'_>, target: &mut Matrix) -> Result<(), EpisodicError> {
        let weights = self.read_weights(cues, noise)?;
        target.set_product(&weights, &self.mean);
        self.disturb(target, noise);
        Ok(())
    }

    fn parts(&mut self) -> Vec<(&'static str, &mut Matrix)> {
        let Slots { mean, covariance, prior_inverse, .. } = self;
        let rest = [("covariance", covariance), ("prior_inverse", prior_inverse)];
        let rest = rest.into_iter().filter_map(|(name, part)| Some((name, part.as_mut()?)));
        std::iter::once(("mean", mean)).chain(rest).collect()
    }
}
