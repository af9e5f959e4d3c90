//! `tune`: steps of fine-tuning a loaded model in several ways (`docs/training.md`): all of it or adapters, by optimizer, type of the pass
//! and what is computed again: what each holds by label, and how long a step takes.
//!
//! Cells that differ only in the way take steps in turn, a few in each round, from the same weights and on the same text. A round begins
//! anew, so that what all cells take need not fit at once.

use super::stepped::{STEPS, Stepped, rounds_of, sum};
use super::{Choice, Comparisons, Measure, Measurement, Runs, Scope, Stage};
use crate::experiment::cell::{Cell, Device};
use crate::experiment::record::{Memory, Record, Status, Training, Work};
use crate::experiment::runner::latency;
use crate::experiment::spec::Grid;
use crate::ranks::OfRank;
use crate::train::run::TrainError;
use crate::train::tuning::{Seen, TunedSteps, Tuning};
use std::path::Path;
use std::time::Instant;

/// Models by ways to fine-tune them.
pub(super) struct Tune;

impl Measurement for Tune {
    fn name(&self) -> &'static str {
        "tune"
    }

    fn about(&self) -> &'static str {
        "steps of fine-tuning: all parameters or adapters, by optimizer and recomputation"
    }

    fn fields(&self) -> &'static [&'static str] {
        &["model", "context_tokens", "batch", "tuning", "samples"]
    }

    fn compares(&self) -> Choice {
        Choice::Tuning
    }

    fn phase(&self) -> &'static str {
        "step"
    }

    fn expand(&self, grid: &Grid, _scope: &Scope<'_>) -> Result<Vec<Cell>, String> {
        Stepped {
            measure: Measure::TUNE,
            field: "tuning",
            ways: &grid.tuning.0,
            example: "[\"full\", \"lora:rank=8\"]",
            with: |cell, tuning| Cell { tuning: Some(tuning), ..cell },
            config: |cell| Ok(open(cell)?.config().clone()),
        }
        .cells(grid)
    }

    fn runs(&self) -> Runs<'_> {
        Runs::InComparisons(self)
    }
}

/// The steps of a cell.
fn open(cell: &Cell) -> Result<TunedSteps, TrainError> {
    let misfit = |reason: String| TrainError::Misfit { name: cell.label(), reason };
    let missing = || misfit("model or tuning are missing".into());
    let tuning: Tuning =
        cell.tuning.as_deref().ok_or_else(missing)?.parse().map_err(|error| misfit(format!("{error}")))?;
    let model = cell.model.as_deref().ok_or_else(missing)?;
    TunedSteps::open(Path::new(model), [cell.batch, cell.context_tokens], cell.seed, tuning)
}

impl Comparisons for Tune {
    fn refusal(&self, device: Device) -> Option<String> {
        (device == Device::Cuda).then(|| "training runs on the CPU".into())
    }

    fn takes_turns(&self) -> bool {
        true
    }

    fn predicted_bytes(&self, cell: &Cell, threads: usize) -> Option<u64> {
        Some(sum(&open(cell).ok()?.predicted(threads).ok()?))
    }

    fn seconds(&self, comparisons: &[Vec<&Cell>], stage: &Stage<'_>) -> Vec<Option<f64>> {
        // One round of a cell, tried; those that compute more take longer by as much.
        let comparison = |cells: &Vec<&Cell>| {
            let steps = cells
                .iter()
                .filter(|cell| self.has_room(cell, stage.limit_bytes, stage.engine.cpu().threads()))
                .filter_map(|cell| open(cell).ok());
            let steps: Vec<_> = steps.collect();
            let Some(cheapest) = steps.iter().min_by_key(|steps| steps.trained_count()) else { return Some(0.0) };
            let began = Instant::now();
            cheapest.run(stage.engine.for_models().ok()?, STEPS, stage.limit_bytes).ok()?;
            let (round_s, rounds) = (began.elapsed().as_secs_f64(), rounds_of(cells[0]));
            Some(steps.iter().map(|steps| steps.flop() / cheapest.flop()).sum::<f64>() * round_s * rounds as f64)
        };
        comparisons.iter().map(comparison).collect()
    }

    fn run(&self, records: Vec<Record>, stage: &Stage<'_>, each: &mut dyn FnMut(&Cell, f64)) -> Vec<Record> {
        let cpu = stage.engine.cpu();
        let mut cells: Vec<Measured> =
            records.into_iter().map(|record| Measured::new(record, stage.limit_bytes, cpu.threads())).collect();
        let rounds = cells.iter().map(|cell| rounds_of(&cell.record.cell)).max().unwrap_or(0);
        for round in 0..rounds {
            for cell in &mut cells {
                let Some(steps) = cell.steps.as_ref().filter(|_| cell.record.status == Status::Ok) else { continue };
                each(&cell.record.cell, round as f64 / rounds as f64);
                let start = Instant::now();
                match steps.run(cpu, STEPS, stage.limit_bytes) {
                    Ok(seen) => cell.add(seen),
                    Err(error) => {
                        let is_memory = matches!(error, TrainError::Arena(_));
                        cell.record.status = if is_memory { Status::Oom } else { Status::Failed };
                        cell.record.reason = Some(error.to_string());
                    }
                }
                cell.record.wall_ns += start.elapsed().as_nanos() as u64;
            }
        }
        cells.into_iter().map(Measured::finish).collect()
    }
}

/// A cell and what its rounds showed so far.
struct Measured {
    record: Record,
    steps: Option<TunedSteps>,
    seen: Seen,
}

impl Measured {
    /// A cell with what it will take; it is out of memory where that is more than the limit.
    fn new(mut record: Record, limit_bytes: u64, threads: usize) -> Self {
        record.threads = threads;
        let found = open(&record.cell).and_then(|steps| Ok((steps.predicted(threads)?, steps)));
        let (predicted, steps) = match found {
            Ok((predicted, steps)) => (predicted, Some(steps)),
            Err(error) => {
                (record.status, record.reason) = (Status::Failed, Some(error.to_string()));
                return Measured { record, steps: None, seen: Seen::default() };
            }
        };
        let predicted_peak_bytes = sum(&predicted);
        record.memory = Some(Memory { predicted_peak_bytes, limit_bytes, ..Memory::default() });
        record.ranks = vec![OfRank { predicted_peak_bytes, predicted_by_label: predicted, ..OfRank::default() }];
        if predicted_peak_bytes > limit_bytes {
            record.status = Status::Oom;
            record.reason = Some(format!("it needs {predicted_peak_bytes} bytes; the limit is {limit_bytes}"));
        }
        Measured { record, steps, seen: Seen::default() }
    }

    /// Adds a round; every round takes the same steps.
    fn add(&mut self, seen: Seen) {
        let rank = &mut self.record.ranks[0];
        rank.peak_bytes = rank.peak_bytes.max(sum(&seen.peak));
        rank.peak_by_label.clone_from(&seen.peak);
        rank.samples_ns.extend(&seen.steps_ns);
        self.seen = seen;
    }

    /// The record with the numbers of all rounds.
    fn finish(self) -> Record {
        let Measured { mut record, steps, seen: Seen { flop, losses, .. } } = self;
        if record.status != Status::Ok {
            return record;
        }
        let rank = record.ranks[0].clone();
        let step = latency(rank.samples_ns, 1, "rounds");
        record.work = Some(Work { flops: flop as u64, kv_bytes_read: 0, flops_per_s: flop / (step.median_ns / 1e9) });
        record.latency.insert("step".into(), step);
        record.memory = record.memory.map(|before| Memory {
            peak_bytes: rank.peak_bytes,
            residual_bytes: rank.peak_bytes as i64 - rank.predicted_peak_bytes as i64,
            peak_by_label: rank.peak_by_label,
            arena_growth_bytes: rank.peak_bytes,
            ..before
        });
        let parameters = steps.map_or(0, |steps| steps.trained_count() as u64);
        record.training = Some(Training { parameters, losses });
        record
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Cpu;
    use crate::memory::LabelBytes;
    use crate::policy::Registry;

    fn cells(tuning: &[&str]) -> Result<Vec<Cell>, String> {
        let text = format!(
            "measure = \"tune\"\nmodel = \"tests/checkpoints/llama\"\ncontext_tokens = 16\nbatch = 2\nsamples = 2\ntuning = {tuning:?}"
        );
        let grid: Grid = toml::from_str(&text).unwrap();
        let registry = Registry::default();
        Tune.expand(&grid, &Scope { file: None, workload_hash: "", registry: &registry, device: Device::Cpu })
    }

    fn records(cells: &[Cell], limit_bytes: u64) -> Vec<Record> {
        let (registry, cpu, folder) = (Registry::default(), Cpu::new(Some(1)).unwrap(), tempfile::tempdir().unwrap());
        let stage = Stage { registry: &registry, engine: (&cpu).into(), limit_bytes, folder: folder.path() };
        let records = cells.iter().map(|cell| Record::blank(cell.clone())).collect();
        Tune.run(records, &stage, &mut |_, _| ())
    }

    #[test]
    fn every_way_holds_what_is_predicted_label_by_label() {
        let ways = [
            "full",
            "full:weights=bf16,optimizer=adamw-8bit",
            "full:optimizer=adafactor,recompute=full",
            "lora",
            "lora:weights=f32,rank=2,target=all-linear,recompute=selective",
        ];
        let cells = cells(&ways).unwrap();
        let records = records(&cells, u64::MAX);
        for (record, way) in records.iter().zip(ways) {
            assert_eq!((record.status, &record.reason), (Status::Ok, &None), "{way}");
            let rank = &record.ranks[0];
            let filled = |bytes: &LabelBytes| {
                bytes.iter().filter(|(_, bytes)| **bytes > 0).map(|(l, b)| (*l, *b)).collect::<Vec<_>>()
            };
            assert_eq!(filled(&rank.peak_by_label), filled(&rank.predicted_by_label), "{way}");
            assert_eq!(record.memory.as_ref().unwrap().residual_bytes, 0, "{way}");
            assert_eq!(record.latency["step"].samples_ns.len(), 2 * STEPS, "{way}");
            assert_eq!(record.training.as_ref().unwrap().losses.len(), 1 + STEPS, "{way}");
        }
        // The same model on the same text before anything is changed.
        let first = |record: &Record| record.training.as_ref().unwrap().losses[0];
        assert!((first(&records[0]) - first(&records[4])).abs() < 1e-4, "adapters change nothing at first");
        let trained = |record: &Record| record.training.as_ref().unwrap().parameters;
        assert!(trained(&records[3]) * 10 < trained(&records[0]));
    }

    #[test]
    fn what_has_no_room_is_out_of_memory_and_mistakes_are_said_before_anything_runs() {
        let cells_of = cells(&["full", "lora:weights=f32"]).unwrap();
        let needed = |cell: &Cell| sum(&open(cell).unwrap().predicted(1).unwrap());
        assert!(needed(&cells_of[1]) < needed(&cells_of[0]));
        let records = records(&cells_of, needed(&cells_of[0]) - 1);
        assert_eq!([records[0].status, records[1].status], [Status::Oom, Status::Ok]);
        assert_eq!(records[0].needed_bytes(), Some(needed(&cells_of[0])));
        for (way, said) in [("prefix", "prefix"), ("lora:target=wq", "wq"), ("qlora", "no matrix of")] {
            let error = cells(&[way]).map(|cells| open(&cells[0]).and_then(|steps| steps.predicted(1)));
            let error = error.map_or_else(|said| said, |found| found.map_or_else(|e| e.to_string(), |_| "none".into()));
            assert!(error.contains(said), "{way}: {error}");
        }
    }
}
