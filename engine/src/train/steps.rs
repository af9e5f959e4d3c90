//! A few steps of training over ranks, measured: what each rank holds by label, what it sends, and how long a step takes.
//!
//! The steps are those of [`super::run`], of a model that is there, on generated text; nothing is judged and nothing is written. What a
//! rank will hold is known before from shapes alone ([`Steps::predicted`]), so that what has no room need not be tried.

use super::activations::{Extents, Recompute};
use super::data::Data;
use super::loss::Target;
use super::origin::{Folder, Origin, Start};
use super::recipe::{BUILTIN, DataSpec, Recipe, SourceSpec, Stage};
use super::run::TrainError;
use super::tensor_parallel;
use super::zero::{self, Groups, Sharing, Zero};
use super::{Batch, Network, Parameters};
use crate::device::Cpu;
use crate::memory::{Arena, Label, LabelBytes};
use crate::model::Config;
use crate::named::{Named, NamedError, Parameter};
use crate::ranks::{Comm, MOST_THREADS};
use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::time::Instant;

/// How training is shared out: `zero:ranks=4,stage=3`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedOut {
    /// Ranks.
    pub ranks: usize,
    /// Stage of ZeRO, 0 to 3.
    pub stage: u8,
    /// Ranks that share each block.
    pub tensor_parallel: usize,
    /// Whether the optimizer's averages lie in a file.
    pub offload: bool,
}

const PARAMETERS: [Parameter; 4] = [
    Parameter { name: "ranks", default: "1", about: "ranks" },
    Parameter { name: "stage", default: "0", about: "stage of ZeRO, 0 to 3" },
    Parameter { name: "tensor_parallel", default: "1", about: "ranks that share each block" },
    Parameter { name: "offload", default: "false", about: "whether the optimizer's averages lie in a file" },
];

impl FromStr for SharedOut {
    type Err = NamedError;

    fn from_str(text: &str) -> Result<Self, NamedError> {
        let named: Named = text.parse()?;
        if named.name != "zero" {
            return Err(NamedError::unknown("way to share training out", &named.name, ["zero"]));
        }
        named.check(&PARAMETERS)?;
        let at_most = |key: &str, default: usize, least: usize, most: usize| {
            let value = named.number(key, default as f64, least as f64..=most as f64)?;
            named.count(key, value as usize, least)
        };
        let ranks = at_most("ranks", 1, 1, MOST_THREADS)?;
        let tensor_parallel = at_most("tensor_parallel", 1, 1, ranks)?;
        if !ranks.is_multiple_of(tensor_parallel) {
            return Err(named.wrong("tensor_parallel", format!("a divisor of ranks, {ranks}")));
        }
        let stage = at_most("stage", 0, 0, 3)? as u8;
        Ok(SharedOut { ranks, stage, tensor_parallel, offload: named.flag("offload", false)? })
    }
}

impl fmt::Display for SharedOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SharedOut { ranks, stage, tensor_parallel, offload } = *self;
        write!(f, "{ranks} {}", if ranks == 1 { "rank" } else { "ranks" })?;
        if ranks > tensor_parallel {
            write!(f, ", stage {stage}")?;
        }
        if tensor_parallel > 1 {
            write!(f, ", tensor {tensor_parallel}")?;
        }
        if offload { write!(f, ", offload") } else { Ok(()) }
    }
}

/// Steps of `batch` sequences of `length` tokens of generated text, on a model that is there.
///
/// # Errors
/// None, unless the recipe that ships with kvsieve cannot be read.
pub(super) fn on_text(model: &Path, [batch, length]: [usize; 2], seed: u64) -> Result<Recipe, TrainError> {
    let own = Recipe::parse(BUILTIN, Path::new("experiments/train-builtin.toml"))?;
    Ok(Recipe {
        name: "steps".into(),
        seed: own.seed.wrapping_add(seed),
        recompute: Recompute::None,
        model: Origin::Folder(Folder { from: model.into() }),
        data: DataSpec {
            text_weight: 1.0,
            text: None,
            sources: vec![SourceSpec { source: "text".into(), share: 1.0, from_length: 0 }],
        },
        stages: vec![Stage { length, batch, steps: 1 << 20 }],
        ..own
    })
}

/// Steps that can be taken.
pub struct Steps {
    recipe: Recipe,
    shared: SharedOut,
    start: Start,
    /// Of the whole model, and those that a rank has.
    whole: Parameters,
    own: Parameters,
}

/// What a rank showed.
#[derive(Debug, Clone, Default)]
pub struct OfSteps {
    /// Bytes of its arena at the peak, by label.
    pub peak: LabelBytes,
    /// The same from the shapes.
    pub predicted: LabelBytes,
    /// Bytes that it sent in a step.
    pub sent_bytes: u64,
    /// The same from the shapes.
    pub predicted_sent_bytes: u64,
    /// Nanoseconds of each step but the first, from where all ranks begin.
    pub steps_ns: Vec<u64>,
    /// The loss before each step.
    pub losses: Vec<f64>,
    /// Floating-point operations of a step of all ranks.
    pub flop: f64,
}

impl Steps {
    /// Steps of `batch` sequences of `length` tokens, of the folder, GGUF file or `builtin` that `model` names; each `seed` has other
    /// texts.
    ///
    /// # Errors
    /// When there is no such model, or it or the batch cannot be shared out so.
    pub fn open(model: &Path, [batch, length]: [usize; 2], seed: u64, shared: SharedOut) -> Result<Self, TrainError> {
        let recipe = on_text(model, [batch, length], seed)?;
        let misfit = |reason| TrainError::Misfit { name: format!("'{}'", model.display()), reason };
        let start = recipe.model.open(recipe.data.text.as_deref())?;
        recipe.check_lengths(start.config.most_tokens(), "the model's longest context").map_err(misfit)?;
        recipe.check_ranks(shared.ranks / shared.tensor_parallel).map_err(misfit)?;
        let share = tensor_parallel::share(&start.config, shared.tensor_parallel).map_err(misfit)?;
        let (whole, own) = (Parameters::new(&start.config), Parameters::new(&share));
        Ok(Steps { recipe, shared, start, whole, own })
    }

    /// The model.
    pub fn config(&self) -> &Config {
        &self.start.config
    }

    /// How it is shared out.
    pub fn shared(&self) -> SharedOut {
        self.shared
    }

    /// Parameters of the whole model.
    pub fn parameters(&self) -> usize {
        self.whole.count()
    }

    fn extents(&self) -> Extents<'_> {
        let Stage { length, batch, .. } = self.recipe.stages[0];
        let readers = self.shared.ranks / self.shared.tensor_parallel;
        Extents { parameters: &self.own, batch: batch / readers, len: length, skipped: 0 }
    }

    /// Bytes that each rank, of one thread, will take from its arena, by label.
    pub fn predicted(&self) -> Vec<LabelBytes> {
        let SharedOut { ranks, stage, tensor_parallel, offload } = self.shared;
        let of_rank = |rank: usize| {
            let sharing = Sharing::new(&self.own, stage, rank / tensor_parallel, ranks / tensor_parallel);
            zero::training_bytes(&sharing, &self.extents(), self.recipe.recompute, 1, (tensor_parallel, offload))
        };
        (0..ranks).map(of_rank).collect()
    }

    /// Floating-point operations of a step of all ranks, each token being judged.
    pub fn flop(&self) -> f64 {
        let extents = self.extents();
        self.shared.ranks as f64 * extents.step_flop(extents.rows())
    }

    /// What one rank does: a step that is not timed, and `count` that are. Averages that are not in memory lie in a file of `folder`.
    ///
    /// # Errors
    /// When the arena has no room, the loss stops being a number, or another rank ended.
    pub fn on_rank(&self, comm: &Comm, cpu: &Cpu, count: usize, folder: &Path) -> Result<OfSteps, TrainError> {
        let SharedOut { stage, tensor_parallel, offload, .. } = self.shared;
        let Recipe { recompute, optimizer, seed, .. } = &self.recipe;
        let (arena, groups) = (Arena::unlimited(), Groups::new(comm, tensor_parallel)?);
        let data = Data::new(&self.recipe, &self.start.vocabulary)?;
        let parts = [&self.whole, &self.own];
        let mut zero = Zero::new(&arena, &groups, cpu, parts, stage, offload.then_some(folder))?;
        zero.start(&self.start, *seed)?;
        let (extents, Stage { length, batch, .. }) = (self.extents(), self.recipe.stages[0]);
        let mut network = Network::new(&arena, cpu, extents, *recompute)?;
        if tensor_parallel > 1 {
            network = network.shared_by(&arena, &groups.tensor)?;
        }
        let mut seen = OfSteps::default();
        for step in 0..=count {
            let all = data.batch(cpu, (step * batch) as u64, [batch, length])?;
            let own = all.part(groups.data.rank(), groups.data.size(), length);
            comm.barrier()?;
            zero.take_sent_bytes();
            let began = Instant::now();
            let rate = optimizer.rate(step, self.recipe.steps());
            let (loss, _) = zero.step(&mut network, &own, optimizer, (step, rate))?;
            let ns = began.elapsed().as_nanos() as u64;
            seen.sent_bytes = zero.take_sent_bytes();
            seen.losses.push(loss);
            if step > 0 {
                seen.steps_ns.push(ns);
            }
            seen.flop = self.shared.ranks as f64 * extents.step_flop(own.targets.len());
        }
        seen.peak = arena.usage().peak;
        seen.predicted = zero.training_bytes(&extents, *recompute);
        seen.predicted_sent_bytes = zero.step_sent_bytes(&extents, *recompute);
        Ok(seen)
    }

    /// Floating-point operations a second of one rank's passes, tried on a model of one block as wide as this one, with few tokens in its
    /// vocabulary.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn flop_per_s(&self, cpu: &Cpu) -> Result<f64, TrainError> {
        const VOCAB: usize = 512;
        let config = Config { layers: 1, vocab: VOCAB, windows: vec![None], ..self.own.config.clone() };
        let (parameters, arena) = (Parameters::new(&config), Arena::unlimited());
        let extents = Extents { parameters: &parameters, ..self.extents() };
        let weights = parameters.initial(&arena, 0)?;
        let mut gradients = arena.alloc::<f32>(Label::Gradients, parameters.trained_count())?;
        let mut network = Network::new(&arena, cpu, extents, self.recipe.recompute)?;
        let target = |row: usize| Target { row, token: 0, weight: 1.0 };
        let tokens = (0..extents.rows()).map(|row| (row % VOCAB) as u32).collect();
        let batch = Batch { tokens, targets: (0..extents.rows()).map(target).collect() };
        let mut best_s = f64::INFINITY;
        for _ in 0..3 {
            let began = Instant::now();
            network.step(&weights, &batch, &mut gradients)?;
            best_s = best_s.min(began.elapsed().as_secs_f64());
        }
        Ok(extents.step_flop(extents.rows()) / best_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_to_share_out_is_read_and_what_cannot_be_is_refused() {
        let read = |text: &str| text.parse::<SharedOut>().map(|shared| shared.to_string()).map_err(|e| e.to_string());
        assert_eq!(read("zero").unwrap(), "1 rank");
        assert_eq!(read("zero:ranks=4,stage=3").unwrap(), "4 ranks, stage 3");
        assert_eq!(
            read("zero:ranks=4,tensor_parallel=2,stage=1,offload=true").unwrap(),
            "4 ranks, stage 1, tensor 2, offload"
        );
        for (text, said) in [
            ("ring:4", "not of the form"),
            ("tree:ranks=4", "unknown way to share training out 'tree'"),
            ("zero:stage=4", "stage is '4'"),
            ("zero:stage=1.5", "stage is '1.5'"),
            ("zero:ranks=0", "ranks is '0'"),
            ("zero:ranks=4,tensor_parallel=3", "a divisor of ranks, 4"),
            ("zero:rank=4", "has no parameter 'rank'"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
