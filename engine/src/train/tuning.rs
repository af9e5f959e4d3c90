//! Ways to fine-tune as text, `lora:rank=8,target=q/v`, and a few steps of each, measured: what is held by label, and how long a
//! step takes.
//!
//! The steps are those of [`super::tune`], of a model that is there, on generated text; nothing is judged and nothing is written. Bytes
//! are known before from shapes alone ([`TunedSteps::predicted`]), so that what has no room need not be tried.

use super::Network;
use super::activations::{Extents, Recompute};
use super::data::Data;
use super::error::LOSS;
use super::lora::Asked;
use super::optimizer::Kind;
use super::recipe::Recipe;
use super::run::TrainError;
use super::steps::on_text;
use super::tune::{Method, Settings};
use super::tuned::{Plan, Tuned};
use super::vocabulary::Vocabulary;
use crate::device::Cpu;
use crate::memory::{Arena, LabelBytes};
use crate::model::{Config, locate};
use crate::named::{Named, NamedError, Parameter};
use crate::tensor::DType;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Instant;

/// A way to fine-tune.
#[derive(Debug, Clone, PartialEq)]
pub struct Tuning {
    /// What is trained.
    pub method: Method,
    /// Type in which matrices are multiplied, and kept unless they are packed.
    pub weights: DType,
    /// The optimizer.
    pub optimizer: Kind,
    /// What the backward pass computes again.
    pub recompute: Recompute,
    /// The adapters, where these are trained.
    pub adapters: Option<Asked>,
}

const OF_ALL: [Parameter; 3] = [
    Parameter { name: "weights", default: "f32 of full, else bf16", about: "type of the pass" },
    Parameter { name: "optimizer", default: "adamw", about: "adamw, adamw-8bit or adafactor" },
    Parameter { name: "recompute", default: "none", about: "none, selective or full" },
];
const OF_ADAPTERS: [Parameter; 3] = [
    Parameter { name: "rank", default: "8", about: "rank of the adapters" },
    Parameter { name: "alpha", default: "16", about: "their outputs have the factor alpha / rank" },
    Parameter { name: "target", default: "q/v", about: "matrices that get one, or all-linear" },
];

impl FromStr for Tuning {
    type Err = NamedError;

    fn from_str(text: &str) -> Result<Self, NamedError> {
        let named: Named = text.parse()?;
        let method = one_of("method", &named.name, [Method::Full, Method::Lora, Method::Qlora], Method::name)?;
        let adapts = method != Method::Full;
        named.check(&[&OF_ALL[..], if adapts { &OF_ADAPTERS } else { &[] }].concat())?;
        let asked = || -> Result<Asked, NamedError> {
            Ok(Asked {
                rank: named.count("rank", 8, 1)?,
                alpha: named.number("alpha", 16.0, 1e-3..=1e6)? as f32,
                targets: named.text("target").unwrap_or("q/v").split('/').map(String::from).collect(),
            })
        };
        let kind = |text| one_of("optimizer", text, Kind::ALL, Kind::name);
        let recompute = |text| one_of("recomputation", text, Recompute::ALL, Recompute::name);
        let dtype = |text| one_of("type of the pass", text, [DType::F32, DType::Bf16], DType::name);
        Ok(Tuning {
            method,
            weights: named.text("weights").map_or(Ok(if adapts { DType::Bf16 } else { DType::F32 }), dtype)?,
            optimizer: named.text("optimizer").map_or(Ok(Kind::Adamw), kind)?,
            recompute: named.text("recompute").map_or(Ok(Recompute::None), recompute)?,
            adapters: adapts.then(asked).transpose()?,
        })
    }
}

fn one_of<T: Copy, const N: usize>(
    kind: &'static str,
    text: &str,
    all: [T; N],
    name: fn(T) -> &'static str,
) -> Result<T, NamedError> {
    let known = || NamedError::unknown(kind, text, all.map(name));
    all.into_iter().find(|&one| name(one) == text).ok_or_else(known)
}

/// Steps that can be taken.
pub struct TunedSteps {
    settings: Settings,
    recompute: Recompute,
    recipe: Recipe,
    vocabulary: Vocabulary,
    config: Config,
    plan: Plan,
}

/// What was seen.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// Bytes at the peak, by label.
    pub peak: LabelBytes,
    /// The same from the shapes.
    pub predicted: LabelBytes,
    /// Nanoseconds of each step but the first.
    pub steps_ns: Vec<u64>,
    /// The loss before each step.
    pub losses: Vec<f64>,
    /// Floating-point operations of a step.
    pub flop: f64,
}

impl TunedSteps {
    /// Steps of `batch` sequences of `length` tokens, of the folder, GGUF file or `builtin` that `model` names.
    ///
    /// # Errors
    /// When there is no such model, or it cannot be fine-tuned so.
    pub fn open(model: &Path, [batch, length]: [usize; 2], seed: u64, tuning: Tuning) -> Result<Self, TrainError> {
        let Tuning { method, weights, optimizer, recompute, adapters } = tuning;
        let misfit = |reason| TrainError::Misfit { name: format!("--method {}", method.name()), reason };
        let folder = locate(model)?;
        let config = Config::read(&folder)?;
        let recipe = on_text(model, [batch, length], seed)?;
        let settings = Settings {
            method,
            model: model.into(),
            text: PathBuf::new(),
            steps: recipe.steps(),
            length,
            batch,
            accumulate: 1,
            seed: recipe.seed,
            learning_rate: 1e-4,
            weights,
            recompute: Some(recompute),
            optimizer,
            adapters,
            qat: None,
        };
        settings.check(&config).map_err(misfit)?;
        let plan = Plan::new(&settings, &config, &folder).map_err(misfit)?;
        let vocabulary = Vocabulary::of_folder(&folder, &config)?;
        Ok(TunedSteps { settings, recompute, recipe, vocabulary, config, plan })
    }

    /// The model.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Numbers that are trained.
    pub fn trained_count(&self) -> usize {
        self.plan.trained_count()
    }

    fn extents(&self) -> Extents<'_> {
        let Settings { batch, length, .. } = self.settings;
        Extents { parameters: &self.plan.parameters, batch, len: length, skipped: 0 }
    }

    /// Floating-point operations of a step, without those that are done again.
    pub fn flop(&self) -> f64 {
        self.extents().step_flop(self.extents().rows())
    }

    /// Bytes by label, from the shapes and the formats of packed matrices.
    ///
    /// # Errors
    /// When the model's files cannot be read.
    pub fn predicted(&self, threads: usize) -> Result<LabelBytes, TrainError> {
        let packed = match self.settings.method {
            Method::Qlora => Some(self.plan.packed(&Arena::unlimited())?.bytes()),
            Method::Full | Method::Lora => None,
        };
        Ok(self.plan.bytes(&self.extents(), self.recompute, threads, packed))
    }

    /// Takes a step that is not timed, and `count` that are.
    ///
    /// # Errors
    /// When the arena has no room, or the loss stops being a number.
    pub fn run(&self, cpu: &Cpu, count: usize, limit_bytes: u64) -> Result<Seen, TrainError> {
        let (arena, extents) = (Arena::with_limit(limit_bytes), self.extents());
        let Settings { batch, length, seed, .. } = self.settings;
        let data = Data::new(&self.recipe, &self.vocabulary)?;
        let mut tuned = Tuned::open(&self.plan, &arena, cpu)?;
        let predicted = self.plan.bytes(&extents, self.recompute, cpu.threads(), tuned.packed_bytes());
        let mut network = Network::new(&arena, cpu, extents, self.recompute)?;
        if let Some(adapters) = self.plan.adapters(&arena, &extents, seed)? {
            network = network.with_adapters(adapters);
        }
        let constants = self.settings.constants();
        let mut seen = Seen { predicted, flop: self.flop(), ..Seen::default() };
        for step in 0..=count {
            let batch = data.batch(cpu, (step * batch) as u64, [batch, length])?;
            let began = Instant::now();
            tuned.begin(&mut network);
            let loss = network.step_of(&mut tuned.holder(), &batch)?;
            TrainError::diverged(LOSS, step, loss)?;
            tuned.update(cpu, &constants, (step, constants.learning_rate), &mut network);
            seen.losses.push(loss);
            if step > 0 {
                seen.steps_ns.push(began.elapsed().as_nanos() as u64);
            }
        }
        seen.peak = arena.usage().peak;
        Ok(seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_to_fine_tune_is_read_and_what_cannot_be_is_refused() {
        let read = |text: &str| text.parse::<Tuning>().map_err(|error| error.to_string());
        let lora = read("lora:rank=4,target=q/o").unwrap();
        assert_eq!((lora.method, lora.weights, lora.optimizer), (Method::Lora, DType::Bf16, Kind::Adamw));
        assert_eq!(lora.adapters, Some(Asked { rank: 4, alpha: 16.0, targets: vec!["q".into(), "o".into()] }));
        let full = read("full:weights=bf16,optimizer=adafactor,recompute=selective").unwrap();
        assert_eq!((full.weights, full.optimizer), (DType::Bf16, Kind::Adafactor));
        assert_eq!((full.recompute, full.adapters), (Recompute::Selective, None));
        for (text, said) in [
            ("prefix", "unknown method 'prefix'"),
            ("full:rank=8", "has no parameter 'rank'"),
            ("lora:rank=0", "rank is '0'"),
            ("full:weights=f16", "unknown type of the pass 'f16'"),
            ("full:optimizer=adam", "unknown optimizer 'adam'"),
            ("full:recompute=some", "unknown recomputation 'some'"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
