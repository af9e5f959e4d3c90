//! What a cell measures: the registry of measures, one file each.
//!
//! A [`Measurement`] says which fields of a grid belong to it, makes cells of a grid, and says how these run. There are two
//! ways. Cells that take [`Trials`] are interleaved with all others of their context length: each is checked against the f64
//! reference, then timed until its interval is tight; their memory is predicted from the shapes. Cells that run in
//! [`Comparisons`] share their work with those that differ only in what is compared, and report when it is done. The runner,
//! the shards and `--dry-run` know these two ways and no measure by name.

mod backward;
mod check;
pub mod cuda;
mod decode;
mod edit;
pub mod eval;
mod evict;
mod forward;
mod pass;
mod prepared;
mod ranks;
mod recall;
mod serve;
mod stepped;
mod train;
mod trials;
mod tune;

pub use check::Truth;
pub use prepared::{Implementation, Prepared};
pub use trials::{Bench, Trial, TrialError, TrialWork, Trials};

use super::cell::{Cell, Device};
use super::engine::Engine;
use super::record::Record;
use super::spec::Grid;
use crate::policy::Registry;
use crate::workload::FileSource;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::io;
use std::ops::Deref;
use std::path::Path;

/// All measures, in the order of tables.
pub static MEASURES: &[Measure] = &[
    Measure::FORWARD,
    Measure::BACKWARD,
    Measure::DECODE,
    Measure::EVICT,
    Measure::SERVE,
    Measure::RANKS,
    Measure::TRAIN,
    Measure::TUNE,
    Measure::RECALL,
    Measure::EDIT,
    Measure::EVAL,
];

impl Measure {
    /// A forward pass over the whole context.
    pub const FORWARD: Measure = Measure(&forward::Forward);
    /// A backward pass over the whole context.
    pub const BACKWARD: Measure = Measure(&backward::Backward);
    /// One new query against a cached context.
    pub const DECODE: Measure = Measure(&decode::Decode);
    /// Prefill, eviction by a policy, and decode steps over what is retained.
    pub const EVICT: Measure = Measure(&evict::Evict);
    /// A simulated request trace through an allocation strategy.
    pub const SERVE: Measure = Measure(&serve::Serve);
    /// A forward pass shared out over ranks.
    pub const RANKS: Measure = Measure(&ranks::Ranks);
    /// Steps of training over ranks.
    pub const TRAIN: Measure = Measure(&train::Train);
    /// Steps of fine-tuning.
    pub const TUNE: Measure = Measure(&tune::Tune);
    /// What memories of facts give back.
    pub const RECALL: Measure = Measure(&recall::Recall);
    /// A model's answers about facts it was told.
    pub const EDIT: Measure = Measure(&edit::Edit);
    /// A model's answers under policies and budgets.
    pub const EVAL: Measure = Measure(&eval::Eval);
}

/// A measure: its file, its axes, and how its cells run. `docs/adding-a-measure.md` goes through one.
pub trait Measurement: Sync {
    /// Name in experiment files and records.
    fn name(&self) -> &'static str;

    /// One line for `kvsieve list measures`.
    fn about(&self) -> &'static str;

    /// The fields of a [`Grid`] that belong to it, besides `measure` and `seed`; any other is refused by name.
    fn fields(&self) -> &'static [&'static str];

    /// What its cells are compared by.
    fn compares(&self) -> Choice {
        Choice::Kernel
    }

    /// The phase of its times that it is about.
    fn phase(&self) -> &'static str {
        self.name()
    }

    /// Queries of the pass over a context.
    fn q_len(&self, context_tokens: usize) -> usize {
        context_tokens
    }

    /// The cells of a grid whose fields all belong here.
    ///
    /// # Errors
    /// In words, when an axis is missing, a name means nothing, or a cell could never run.
    fn expand(&self, grid: &Grid, scope: &Scope<'_>) -> Result<Vec<Cell>, String>;

    /// How its cells run.
    fn runs(&self) -> Runs<'_>;
}

/// How the cells of a measure run.
pub enum Runs<'a> {
    /// Checked, then timed interleaved with all others of their context length.
    InTrials(&'a dyn Trials),
    /// With those they are compared with, once.
    InComparisons(&'a dyn Comparisons),
}

/// Cells that are run once and together with those they are compared with.
pub trait Comparisons: Sync {
    /// Why they do not run on this kind of device.
    fn refusal(&self, _device: Device) -> Option<String> {
        None
    }

    /// Whether cells are measured in turn, or held against one another as they are measured: where one is missing, all are run again.
    fn takes_turns(&self) -> bool {
        false
    }

    /// Seconds that each of these comparisons will take, tried on pieces of them; `None` where nothing takes long, or it cannot be tried.
    /// Takes no more than the stage's limit; cells beyond it take no time.
    fn seconds(&self, comparisons: &[Vec<&Cell>], _stage: &Stage<'_>) -> Vec<Option<f64>> {
        vec![None; comparisons.len()]
    }

    /// Whether a cell has room in so many bytes, as far as those that it takes are predicted.
    fn has_room(&self, cell: &Cell, limit_bytes: u64, threads: usize) -> bool {
        self.predicted_bytes(cell, threads).is_none_or(|bytes| bytes <= limit_bytes)
    }

    /// Bytes that a cell will take at its peak on so many threads, all ranks together, from the shapes alone; `None` where nothing
    /// predicts them.
    fn predicted_bytes(&self, _cell: &Cell, _threads: usize) -> Option<u64> {
        None
    }

    /// Runs a comparison: `records` of its cells come without numbers and go with them. `each` is told of the cell that is
    /// at work, and which fraction of the comparison is done.
    fn run(&self, records: Vec<Record>, stage: &Stage<'_>, each: &mut dyn FnMut(&Cell, f64)) -> Vec<Record>;

    /// Takes away what it kept in a run's folder for the comparison of this cell, once all its records are there.
    ///
    /// # Errors
    /// When the system refuses.
    fn finish(&self, _folder: &Path, _cell: &Cell) -> io::Result<()> {
        Ok(())
    }
}

/// Where a comparison runs.
pub struct Stage<'a> {
    /// The policies.
    pub registry: &'a Registry,
    /// The device.
    pub engine: Engine<'a>,
    /// Memory that may be taken.
    pub limit_bytes: u64,
    /// The run's folder, for what is kept until there is a record.
    pub folder: &'a Path,
}

/// What a grid is expanded with.
pub struct Scope<'a> {
    /// The user's tensors, if the inputs are not synthetic.
    pub file: Option<&'a FileSource>,
    /// Hash of the inputs.
    pub workload_hash: &'a str,
    /// The policies, with the grid's file.
    pub registry: &'a Registry,
    /// Where cells will run.
    pub device: Device,
}

/// What cells are compared by. Cells that agree in everything else are one comparison: they go to one process, and only
/// their ratios are formed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Choice {
    /// The kernel.
    Kernel,
    /// The policy, its budget, and the format of keys and values; or the memory.
    Policy,
    /// The allocation strategy.
    Strategy,
    /// How many ranks share it.
    Ranks,
    /// What is trained, and how.
    Tuning,
}

/// A measure of the registry, as it stands in cells: a name that knows what it means.
#[derive(Clone, Copy)]
pub struct Measure(&'static dyn Measurement);

impl Measure {
    /// The measure of this name.
    pub fn named(name: &str) -> Option<Self> {
        MEASURES.iter().copied().find(|measure| measure.name() == name)
    }

    /// Its trials, if it takes them.
    pub fn trials(self) -> Option<&'static dyn Trials> {
        match self.0.runs() {
            Runs::InTrials(trials) => Some(trials),
            Runs::InComparisons(_) => None,
        }
    }

    /// Its comparisons, if it runs in them.
    pub fn comparisons(self) -> Option<&'static dyn Comparisons> {
        match self.0.runs() {
            Runs::InTrials(_) => None,
            Runs::InComparisons(comparisons) => Some(comparisons),
        }
    }

    /// Place in the registry, for tables.
    fn place(self) -> usize {
        MEASURES.iter().position(|measure| *measure == self).unwrap_or(MEASURES.len())
    }
}

impl Deref for Measure {
    type Target = dyn Measurement;

    fn deref(&self) -> &Self::Target {
        self.0
    }
}

impl std::fmt::Debug for Measure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl PartialEq for Measure {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for Measure {}

impl PartialOrd for Measure {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Measure {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.place(), self.name()).cmp(&(other.place(), other.name()))
    }
}

impl Serialize for Measure {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Measure {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Measure::named(&name).ok_or_else(|| {
            let known: Vec<&str> = MEASURES.iter().map(|measure| measure.name()).collect();
            serde::de::Error::custom(format!("unknown measure '{name}'; known are {}", known.join(", ")))
        })
    }
}

/// Refuses a field of a grid that its measure does not have.
///
/// # Errors
/// Names the field and the measures that have it.
pub(super) fn check_fields(grid: &Grid) -> Result<(), String> {
    let given = serde_json::to_value(grid).expect("a grid is plain data");
    let given = given.as_object().into_iter().flat_map(|fields| fields.keys().map(String::as_str));
    let mut strange = given.filter(|name| !["measure", "seed"].contains(name) && !grid.measure.fields().contains(name));
    let Some(field) = strange.next() else { return Ok(()) };
    let owners = MEASURES.iter().filter(|measure| measure.fields().contains(&field));
    let owners: Vec<String> = owners.map(|measure| format!("\"{}\"", measure.name())).collect();
    let owners = match &owners[..] {
        [some @ .., last] if !some.is_empty() => format!("{} or {last}", some.join(", ")),
        few => few.concat(),
    };
    Err(format!("{field} belongs to measure = {owners}, not to \"{}\"", grid.measure.name()))
}

#[cfg(test)]
#[path = "../../../docs/examples/measure.rs"]
mod example;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Cpu;
    use crate::experiment::axes::{Many, Tokens};
    use std::collections::BTreeMap;

    /// A field that no measure has could never be given; one that a measure invents would never be refused elsewhere.
    #[test]
    fn every_field_of_a_grid_belongs_to_a_measure() {
        let text = "measure = \"eval\"\nkernel = \"x\"\ncontext_tokens = 1\nheads = \"1/1\"\nhead_dim = 1\nbatch = 1\n\
                    dtype = \"f32\"\nkv_format = \"int8\"\nweights = \"int8\"\nactivations = \"int8\"\ncausal = false\nwindow = 1\nsoftcap = 1.0\npolicy = \"x\"\n\
                    budget = 2\npolicy_file = \"x\"\nlayers = 1\nnew_tokens = 1\npage_tokens = 1\nstrategy = \"x\"\n\
                    trace = \"x\"\nmodel = \"x\"\ntask = \"x\"\ntext = \"x\"\nsamples = 1\nalone_samples = 0\nprotocol = \"aware\"\n\
                    chat = true\nbeyond_limit = true\nmemory = \"x\"\nmaps = \"x\"\nfacts = 1\nepisode = \"x\"\nranks = \"x\"\ntuning = \"x\"\nknobs = { hinted = 0 }\n";
        let grid: Grid = toml::from_str(text).unwrap();
        let given = serde_json::to_value(grid).unwrap();
        let mut fields: Vec<&str> = given.as_object().unwrap().keys().map(String::as_str).collect();
        fields.retain(|field| *field != "measure");
        let mut owned: Vec<&str> = MEASURES.iter().flat_map(|measure| measure.fields()).copied().collect();
        owned.sort_unstable();
        owned.dedup();
        fields.sort_unstable();
        assert_eq!(fields, owned);
    }

    #[test]
    fn names_are_found_again_and_each_is_there_once() {
        for (place, measure) in MEASURES.iter().enumerate() {
            assert_eq!(Measure::named(measure.name()), Some(*measure));
            assert_eq!(measure.place(), place);
            let text = serde_json::to_string(measure).unwrap();
            assert_eq!(serde_json::from_str::<Measure>(&text).unwrap(), *measure);
        }
    }

    #[test]
    fn the_guides_measure_gives_the_formula_of_each_kernel() {
        let measure = Measure(&example::Scratch);
        let grid = Grid {
            kernel: Many(vec!["naive".into(), "tiled".into()]),
            heads: Many(vec!["8/2".into()]),
            context_tokens: toml::from_str::<BTreeMap<String, Many<Tokens>>>("x = \"1k..4k*2\"").unwrap()["x"].clone(),
            ..Grid::of(measure)
        };
        let (registry, cpu) = (Registry::default(), Cpu::new(Some(1)).unwrap());
        let scope = Scope { file: None, workload_hash: "", registry: &registry, device: Device::Cpu };
        let cells = measure.expand(&grid, &scope).unwrap();
        let records = cells.iter().map(|cell| Record::blank(cell.clone())).collect();
        let stage = Stage { registry: &registry, engine: (&cpu).into(), limit_bytes: u64::MAX, folder: Path::new("") };
        let records = measure.comparisons().unwrap().run(records, &stage, &mut |_, _| ());
        let bytes = |record: &Record| record.memory.as_ref().unwrap().workspace_bytes;
        let of =
            |kernel: &str| records.iter().filter(|record| record.cell.kernel == kernel).map(bytes).collect::<Vec<_>>();
        // Naive holds the scores of all heads, which grow with the square; tiled does not grow.
        let naive = of("naive");
        assert!(naive[0] >= 8 * 1024 * 1024 * 4 && naive[1] > 3 * naive[0] && naive[2] > 3 * naive[1], "{naive:?}");
        assert!(of("tiled").iter().all(|&bytes| bytes < 8 << 20), "{:?}", of("tiled"));
    }
}
