//! `train`: steps of training that are shared out over ranks, each a thread of this process with an arena of its own
//! (`docs/training.md`): what a rank holds by label, what it sends, and how long a step takes.
//!
//! Cells that differ only in how training is shared out take steps in turn, a few in each round, from the same weights and on the same
//! text. Each rank computes with one thread. A round begins anew, so that what all cells take need not fit at once.

use super::stepped::{STEPS, Stepped, rounds_of, sum};
use super::trials::TrialError;
use super::{Choice, Comparisons, Measure, Measurement, Runs, Scope, Stage};
use crate::device::Cpu;
use crate::experiment::cell::{Cell, Device};
use crate::experiment::record::{Memory, Record, Refused, Status, Training, Work};
use crate::experiment::runner::latency;
use crate::experiment::spec::Grid;
use crate::memory::{Label, LabelBytes};
use crate::ranks::{OfRank, RankError, threads};
use crate::train::run::TrainError;
use crate::train::steps::{OfSteps, SharedOut, Steps};
use std::path::Path;
use std::time::Instant;

/// How far losses of cells may be apart, as a fraction: their sums have other orders.
const SAME_LOSS: f64 = 1e-4;

/// Bytes a second at which fresh memory is taken and weights are widened into it, at which ranks send, and at which the optimizer's
/// averages go to a file and come back: rough figures of one core for [`Comparisons::seconds`].
const FRESH_BYTES_PER_S: f64 = 1e9;
const SENT_BYTES_PER_S: f64 = 1.5e9;
const FILE_BYTES_PER_S: f64 = 1e9;
/// Bytes a second of a step's other memory: gradients that are cleared and read twice, weights and averages that are changed.
const STATE_BYTES_PER_S: f64 = 4e9;

/// Models by ways to share them out.
pub(super) struct Train;

impl Measurement for Train {
    fn name(&self) -> &'static str {
        "train"
    }

    fn about(&self) -> &'static str {
        "steps of training over ranks: ZeRO's stages, shared blocks, averages in a file"
    }

    fn fields(&self) -> &'static [&'static str] {
        &["model", "context_tokens", "batch", "ranks", "samples"]
    }

    fn compares(&self) -> Choice {
        Choice::Ranks
    }

    fn phase(&self) -> &'static str {
        "step"
    }

    fn expand(&self, grid: &Grid, _scope: &Scope<'_>) -> Result<Vec<Cell>, String> {
        Stepped {
            measure: Measure::TRAIN,
            field: "ranks",
            ways: &grid.ranks.0,
            example: "[\"zero:ranks=2,stage=0\", \"zero:ranks=2,stage=3\"]",
            with: |cell, ranks| Cell { ranks: Some(ranks), ..cell },
            config: |cell| Ok(open(cell)?.config().clone()),
        }
        .cells(grid)
    }

    fn runs(&self) -> Runs<'_> {
        Runs::InComparisons(self)
    }
}

/// The steps of a cell.
fn open(cell: &Cell) -> Result<Steps, TrainError> {
    let misfit = |reason: String| TrainError::Misfit { name: cell.label(), reason };
    let missing = || misfit("model or ranks are missing".into());
    let shared: SharedOut =
        cell.ranks.as_deref().ok_or_else(missing)?.parse().map_err(|error| misfit(format!("{error}")))?;
    let model = cell.model.as_deref().ok_or_else(missing)?;
    Steps::open(Path::new(model), [cell.batch, cell.context_tokens], cell.seed, shared)
}

impl Comparisons for Train {
    fn refusal(&self, device: Device) -> Option<String> {
        (device == Device::Cuda).then(|| "ranks are threads of the CPU".into())
    }

    fn predicted_bytes(&self, cell: &Cell, _: usize) -> Option<u64> {
        Some(open(cell).ok()?.predicted().iter().map(sum).sum())
    }

    fn takes_turns(&self) -> bool {
        true
    }

    fn seconds(&self, comparisons: &[Vec<&Cell>], stage: &Stage<'_>) -> Vec<Option<f64>> {
        let comparison = |cells: &Vec<&Cell>| {
            let (one, cpu) = (Cpu::new(Some(1)).ok()?, stage.engine.for_models().ok()?);
            let cell = |cell: &&Cell| {
                let steps = open(cell).ok()?;
                let together = steps.shared().ranks.min(cores_of(cpu)) as f64;
                // Ranks that compute at once share caches and memory, as threads of one pass do.
                let flop_per_s = steps.flop_per_s(if together > 1.0 { cpu } else { &one }).ok()?;
                Some(seconds(&steps, flop_per_s, together, rounds_of(cell)))
            };
            cells
                .iter()
                .filter(|cell| self.has_room(cell, stage.limit_bytes, stage.engine.cpu().threads()))
                .map(cell)
                .sum::<Option<f64>>()
        };
        comparisons.iter().map(comparison).collect()
    }

    fn run(&self, records: Vec<Record>, stage: &Stage<'_>, each: &mut dyn FnMut(&Cell, f64)) -> Vec<Record> {
        let mut cells: Vec<Measured> =
            records.into_iter().map(|record| Measured::new(record, stage.limit_bytes)).collect();
        let rounds = cells.iter().map(|cell| rounds_of(&cell.record.cell)).max().unwrap_or(0);
        for round in 0..rounds {
            for cell in &mut cells {
                let Some(steps) = cell.steps.as_ref().filter(|_| cell.record.status == Status::Ok) else { continue };
                each(&cell.record.cell, round as f64 / rounds as f64);
                let start = Instant::now();
                let of_ranks = threads::run(steps.shared().ranks, |comm| {
                    let cpu = Cpu::new(Some(1)).map_err(|error| RankError::Start(error.to_string()))?;
                    steps.on_rank(comm, &cpu, STEPS, stage.folder)
                });
                match of_ranks {
                    Ok(of_ranks) => cell.add(&of_ranks),
                    Err(error) => cell.end(&error),
                }
                cell.record.wall_ns += start.elapsed().as_nanos() as u64;
            }
        }
        let expected = cells.iter().find_map(|cell| cell.losses.first().copied());
        cells.into_iter().map(|cell| cell.finish(expected)).collect()
    }
}

/// A cell and what its ranks showed so far.
struct Measured {
    record: Record,
    steps: Option<Steps>,
    losses: Vec<f64>,
    flop: f64,
}

impl Measured {
    /// A cell with what it will take; it is out of memory where that is more than the limit.
    fn new(mut record: Record, limit_bytes: u64) -> Self {
        let steps = match open(&record.cell) {
            Ok(steps) => Some(steps),
            Err(error) => {
                (record.status, record.reason) = (Status::Failed, Some(error.to_string()));
                None
            }
        };
        let predicted = steps.as_ref().map(Steps::predicted).unwrap_or_default();
        let of_rank = |bytes: &LabelBytes| OfRank {
            predicted_peak_bytes: sum(bytes),
            predicted_by_label: bytes.clone(),
            ..OfRank::default()
        };
        record.ranks = predicted.iter().map(of_rank).collect();
        record.threads = 1;
        let predicted_peak_bytes = predicted.iter().map(sum).max().unwrap_or(0);
        record.memory = Some(Memory { predicted_peak_bytes, limit_bytes, ..Memory::default() });
        let requested_bytes: u64 = predicted.iter().map(sum).sum();
        if requested_bytes > limit_bytes {
            record.status = Status::Oom;
            let said = format!("all ranks together need {requested_bytes} bytes; the limit is {limit_bytes}");
            record.reason = Some(said);
            record.refused =
                Some(Refused { label: Label::Weights.name().into(), requested_bytes, free_bytes: Some(limit_bytes) });
        }
        Measured { record, steps, losses: Vec::new(), flop: 0.0 }
    }

    /// Adds a round.
    fn add(&mut self, of_ranks: &[OfSteps]) {
        for (rank, seen) in self.record.ranks.iter_mut().zip(of_ranks) {
            rank.peak_bytes = rank.peak_bytes.max(sum(&seen.peak));
            (rank.peak_by_label, rank.predicted_by_label) = (seen.peak.clone(), seen.predicted.clone());
            (rank.sent_bytes, rank.predicted_sent_bytes) = (seen.sent_bytes, seen.predicted_sent_bytes);
            rank.samples_ns.extend(&seen.steps_ns);
        }
        (self.losses, self.flop) = (of_ranks[0].losses.clone(), of_ranks[0].flop);
    }

    fn end(&mut self, error: &TrainError) {
        let status = match error {
            TrainError::Arena(_) => Status::Oom,
            TrainError::Rank(error) if TrialError::from(error.clone()).is_memory() => Status::Oom,
            _ => Status::Failed,
        };
        (self.record.status, self.record.reason) = (status, Some(error.to_string()));
    }

    /// The record with the numbers of all rounds; `expected` is the loss that every way to share out begins with.
    fn finish(self, expected: Option<f64>) -> Record {
        let Measured { mut record, losses, flop, steps } = self;
        if record.status != Status::Ok {
            return record;
        }
        // A step ends with its slowest rank.
        let count = record.ranks.iter().map(|rank| rank.samples_ns.len()).min().unwrap_or(0);
        let slowest = |step: usize| record.ranks.iter().map(|rank| rank.samples_ns[step]).max().unwrap_or(0);
        let step = latency((0..count).map(slowest).collect(), 1, "rounds");
        record.work = Some(Work { flops: flop as u64, kv_bytes_read: 0, flops_per_s: flop / (step.median_ns / 1e9) });
        record.latency.insert("step".into(), step);
        let fullest = record.ranks.iter().max_by_key(|rank| rank.peak_bytes).cloned().unwrap_or_default();
        let off = |rank: &OfRank| rank.peak_bytes as i64 - sum(&rank.predicted_by_label) as i64;
        let residual_bytes = record.ranks.iter().map(off).max_by_key(|off| off.abs()).unwrap_or(0);
        let before = record.memory.take().unwrap_or_default();
        record.memory = Some(Memory {
            peak_bytes: fullest.peak_bytes,
            residual_bytes,
            peak_by_label: fullest.peak_by_label,
            arena_growth_bytes: fullest.peak_bytes,
            ..before
        });
        let parameters = steps.map_or(0, |steps| steps.parameters() as u64);
        let first = losses.first().copied().unwrap_or(f64::NAN);
        // A loss that is no number is near none.
        let is_same = expected.is_some_and(|expected| (first - expected).abs() <= SAME_LOSS * expected.abs());
        if !is_same {
            record.status = Status::Failed;
            let said = format!("the first loss is {first}; that of the first way to share out is {expected:?}");
            record.reason = Some(said);
        }
        record.training = Some(Training { parameters, losses });
        record
    }
}

fn cores_of(cpu: &Cpu) -> usize {
    cpu.threads().max(1)
}

/// Seconds of all rounds of a cell, where so many ranks are at work at once.
fn seconds(steps: &Steps, flop_per_s: f64, together: f64, rounds: usize) -> f64 {
    let SharedOut { ranks, stage, offload, tensor_parallel } = steps.shared();
    let (of_all, parameters) = (steps.predicted().iter().map(sum).sum::<u64>() as f64, steps.parameters() as f64);
    let (readers, ranks) = ((ranks / tensor_parallel) as f64, ranks as f64);
    // Each rank reads the whole model, and keeps its part.
    let begin = (of_all + 4.0 * parameters * ranks) / FRESH_BYTES_PER_S / together;
    let own = parameters * ranks / tensor_parallel as f64;
    let updated = if stage == 0 { own } else { own / readers };
    let times = if stage < 3 { 2.0 } else { 3.0 };
    let step = steps.flop() / flop_per_s
        + (12.0 * own + 28.0 * updated) / STATE_BYTES_PER_S / together
        + 4.0 * times * own * (readers - 1.0) / readers / SENT_BYTES_PER_S / together
        + if offload { 16.0 * updated / FILE_BYTES_PER_S } else { 0.0 };
    rounds as f64 * (begin + (STEPS + 1) as f64 * step)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Registry;

    fn cells(ranks: &[&str]) -> Result<Vec<Cell>, String> {
        let text = format!(
            "measure = \"train\"\nmodel = \"tests/checkpoints/llama\"\ncontext_tokens = 16\nbatch = 4\nsamples = 2\nranks = {ranks:?}"
        );
        let grid: Grid = toml::from_str(&text).unwrap();
        let registry = Registry::default();
        Train.expand(&grid, &Scope { file: None, workload_hash: "", registry: &registry, device: Device::Cpu })
    }

    fn records(cells: &[Cell], limit_bytes: u64) -> Vec<Record> {
        let (registry, cpu, folder) = (Registry::default(), Cpu::new(Some(1)).unwrap(), tempfile::tempdir().unwrap());
        let stage = Stage { registry: &registry, engine: (&cpu).into(), limit_bytes, folder: folder.path() };
        let records = cells.iter().map(|cell| Record::blank(cell.clone())).collect();
        Train.run(records, &stage, &mut |_, _| ())
    }

    #[test]
    fn ranks_hold_and_send_what_is_predicted_however_training_is_shared_out() {
        let ways = [
            "zero",
            "zero:offload=true",
            "zero:ranks=2,stage=0",
            "zero:ranks=2,stage=1,offload=true",
            "zero:ranks=4,stage=2",
            "zero:ranks=4,stage=3",
            "zero:ranks=2,tensor_parallel=2",
            "zero:ranks=4,stage=3,tensor_parallel=2",
        ];
        let cells = cells(&ways).unwrap();
        for (record, cell) in records(&cells, u64::MAX).iter().zip(&cells) {
            let way = cell.ranks.as_deref().unwrap();
            assert_eq!((record.status, &record.reason), (Status::Ok, &None), "{way}");
            let mut in_all = 0;
            for rank in &record.ranks {
                assert_eq!(rank.peak_by_label, rank.predicted_by_label, "{way}");
                assert_eq!(rank.sent_bytes, rank.predicted_sent_bytes, "{way}");
                assert_eq!(rank.samples_ns.len(), 2 * STEPS, "{way}");
                assert_eq!(
                    rank.peak_bytes, rank.predicted_peak_bytes,
                    "{way}: what was said before anything was tried"
                );
                in_all += rank.peak_bytes;
            }
            assert_eq!(Train.predicted_bytes(cell, 1), Some(in_all), "{way}");
            let memory = record.memory.as_ref().unwrap();
            assert_eq!((memory.residual_bytes, record.latency["step"].samples_ns.len()), (0, 2 * STEPS), "{way}");
            assert_eq!(record.training.as_ref().unwrap().losses.len(), 1 + STEPS, "{way}");
        }
    }

    #[test]
    fn each_seed_reads_texts_of_its_own() {
        let losses = |seed| {
            // The words of the other checkpoint are all one token to it.
            let model = Some("models/builtin".into());
            let cells = [Cell { seed, model, ..cells(&["zero"]).unwrap().remove(0) }];
            records(&cells, u64::MAX)[0].training.as_ref().unwrap().losses.clone()
        };
        assert_eq!(losses(0), losses(0));
        assert_ne!(losses(0), losses(1));
    }

    #[test]
    fn what_has_no_room_for_all_ranks_is_out_of_memory_and_says_how_much_it_is() {
        let cells = cells(&["zero:ranks=4,stage=0", "zero:ranks=4,stage=3"]).unwrap();
        let needed = [0, 1].map(|cell: usize| Train.predicted_bytes(&cells[cell], 1).unwrap());
        assert!(needed[1] < needed[0]);
        let records = records(&cells, needed[0] - 1);
        assert_eq!([records[0].status, records[1].status], [Status::Oom, Status::Ok]);
        assert_eq!(records[0].refused.as_ref().unwrap().requested_bytes, needed[0]);
        assert!(records[0].ranks.iter().all(|rank| rank.peak_bytes == 0 && rank.predicted_peak_bytes > 0));
    }

    #[test]
    fn mistakes_are_said_before_anything_runs() {
        for (ranks, said) in [
            ("ring:2", "ring"),
            ("zero:ranks=3", "a stage's batch is 4; 3 ranks need a multiple of 3"),
            ("zero:ranks=4,tensor_parallel=4", "2 KV heads"),
        ] {
            let error = cells(&[ranks]).unwrap_err();
            assert!(error.contains(said), "{ranks}: {error}");
        }
    }
}
