//! `ranks`: attention that is shared out over ranks, each a thread of this process with an arena of its own (`docs/ranks.md`).
//!
//! Cells that differ only in the ranks take samples in turn. Each rank computes with one thread, so that ranks are what is
//! compared, whatever the machine has. Inputs are standard normal: what is measured does not depend on them.

mod estimate;

use super::check::{accurate, finite, sample_rows};
use super::trials::TrialError;
use super::{Choice, Comparisons, Measurement, Runs, Scope, Stage, Truth, pass};
use crate::attention::{self, DenseKv, Forward, Inputs, Outputs, Shape};
use crate::device::Cpu;
use crate::experiment::cell::{Cell, Device};
use crate::experiment::record::{Memory, Record, Status, Work};
use crate::experiment::runner::latency;
use crate::experiment::spec::Grid;
use crate::memory::{Arena, ArenaError, Label};
use crate::ranks::{Asked, Method, OfRank, Rank, RankError, Shared, cost, scatter, threads};
use crate::tensor::Tensor;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use std::time::Instant;

/// Timed passes of a cell, behind one that is checked.
const SAMPLES: usize = 9;

/// Ranks by shapes and contexts.
pub(super) struct Ranks;

impl Measurement for Ranks {
    fn name(&self) -> &'static str {
        "ranks"
    }

    fn about(&self) -> &'static str {
        "a forward pass shared out over ranks: ring:N over a context, tree:N of one query"
    }

    fn fields(&self) -> &'static [&'static str] {
        &["context_tokens", "heads", "head_dim", "batch", "dtype", "causal", "softcap", "ranks"]
    }

    fn compares(&self) -> Choice {
        Choice::Ranks
    }

    fn phase(&self) -> &'static str {
        "forward"
    }

    fn expand(&self, grid: &Grid, scope: &Scope<'_>) -> Result<Vec<Cell>, String> {
        if grid.ranks.is_empty() {
            return Err("ranks are missing; write ranks = [\"ring:1\", \"ring:2\", \"ring:4\"], or tree:N".into());
        }
        let mut cells = Vec::new();
        for text in &grid.ranks.0 {
            let asked: Asked = text.parse()?;
            if asked.threads.is_none() {
                return Err(format!("ranks is '{text}'; a run has threads for ranks: write \"{text}:4\""));
            }
            let kernel = match asked.method {
                Method::Ring => "tiled",
                Method::Tree => "decode",
            };
            for mut cell in pass::expand(grid, scope, kernel, 0)? {
                cell.ranks = Some(text.clone());
                shared(&cell).map_err(|error| error.to_string())?;
                cells.push(cell);
            }
        }
        Ok(cells)
    }

    fn runs(&self) -> Runs<'_> {
        Runs::InComparisons(self)
    }
}

/// Queries of a pass over a context.
fn queries(method: Method, context_tokens: usize) -> usize {
    match method {
        Method::Ring => context_tokens,
        Method::Tree => 1,
    }
}

/// The problem of a cell, its ranks, and how it is shared out.
fn shared(cell: &Cell) -> Result<(Shape, usize, Shared), RankError> {
    let wrong = || RankError::Unsupported("ranks are missing".into());
    let asked: Asked = cell.ranks.as_deref().ok_or_else(wrong)?.parse().map_err(RankError::Unsupported)?;
    let (method, ranks) = (asked.method, asked.threads.ok_or_else(wrong)?);
    let shape = Shape { q_len: queries(method, cell.context_tokens), ..cell.shape() };
    Ok((shape, ranks, Shared::new(method, shape, cell.params(), cell.dtype, ranks)?))
}

impl Comparisons for Ranks {
    fn refusal(&self, device: Device) -> Option<String> {
        (device == Device::Cuda).then(|| "ranks are threads of the CPU".into())
    }

    fn predicted_bytes(&self, cell: &Cell, _: usize) -> Option<u64> {
        needed_bytes(cell).ok()
    }

    fn takes_turns(&self) -> bool {
        true
    }

    fn seconds(&self, comparisons: &[Vec<&Cell>], stage: &Stage<'_>) -> Vec<Option<f64>> {
        let of = |cells: &Vec<&Cell>| {
            let with_room: Vec<&Cell> = cells
                .iter()
                .filter(|cell| self.has_room(cell, stage.limit_bytes, stage.engine.cpu().threads()))
                .copied()
                .collect();
            estimate::seconds(&with_room, stage)
        };
        comparisons.iter().map(of).collect()
    }

    fn run(&self, records: Vec<Record>, stage: &Stage<'_>, each: &mut dyn FnMut(&Cell, f64)) -> Vec<Record> {
        let mut cells: Vec<Measured> =
            records.into_iter().map(|record| Measured { record, ranks: Vec::new(), spent_ns: 0 }).collect();
        for round in 0..=SAMPLES {
            for cell in cells.iter_mut().filter(|cell| cell.record.status == Status::Ok) {
                each(&cell.record.cell, round as f64 / (SAMPLES + 1) as f64);
                let start = Instant::now();
                if let Err(error) = cell.round(round == 0, stage) {
                    let status = if error.is_memory() { Status::Oom } else { Status::Failed };
                    (cell.record.status, cell.record.reason) = (status, Some(error.to_string()));
                }
                cell.spent_ns += start.elapsed().as_nanos() as u64;
            }
        }
        let mut records: Vec<_> = cells.into_iter().map(|cell| cell.finish(stage.limit_bytes)).collect();
        predict(&mut records);
        records
    }
}

/// Bytes of all ranks and of the whole problem, which lies beside them: they have copies of their parts.
fn needed_bytes(cell: &Cell) -> Result<u64, TrialError> {
    let (shape, ranks, shared) = shared(cell)?;
    let kernel = attention::kernel(&cell.kernel).map_err(|error| TrialError::Failed(error.to_string()))?;
    let predicted: u64 = (0..ranks).map(|rank| shared.forward_bytes(&*kernel, rank, 1)).sum();
    let beside = 2 * shape.q_dims().iter().product::<usize>() + 2 * shape.kv_dims().iter().product::<usize>();
    Ok(predicted + (beside * cell.dtype.bytes()) as u64)
}

/// One of the times of a rank, pass by pass.
type Samples = fn(&OfRank) -> &Vec<u64>;

/// A cell and what its ranks showed so far.
struct Measured {
    record: Record,
    ranks: Vec<OfRank>,
    spent_ns: u64,
}

impl Measured {
    /// One pass; the first is checked, and its times do not count.
    fn round(&mut self, is_checked: bool, stage: &Stage<'_>) -> Result<(), TrialError> {
        let cell = &self.record.cell;
        let (shape, ranks, shared) = shared(cell)?;
        let kernel = attention::kernel(&cell.kernel).map_err(|error| TrialError::Failed(error.to_string()))?;
        let needed = needed_bytes(cell)?;
        if needed > stage.limit_bytes {
            let refused = ArenaError::Limit {
                label: Label::Input,
                requested_bytes: needed,
                live_bytes: 0,
                limit_bytes: stage.limit_bytes,
            };
            return Err(refused.into());
        }
        let arena = Arena::unlimited();
        let inputs = draw(&arena, cell, &shape)?;
        let seen = std::mem::take(&mut self.ranks);
        let results = threads::run(ranks, |comm| {
            let (rank, arena, cpu) = (comm.rank(), Arena::unlimited(), one_thread()?);
            let on = Rank { comm, cpu: &cpu, arena: &arena, kernel: &*kernel };
            let [q_of, kv_of] = shared.tokens_of(rank);
            let part = |tensor: &Tensor, tokens: &[_]| {
                Tensor::from_tokens(&arena, Label::Input, tensor.dtype(), tensor.dims(), tensor.bytes(), tokens)
            };
            let (q, k, v) = (part(&inputs.q, &q_of)?, part(&inputs.k, &kv_of)?, part(&inputs.v, &kv_of)?);
            let mut seen = if is_checked { OfRank::default() } else { seen.get(rank).cloned().unwrap_or_default() };
            let outputs = shared.sample(on, q.view(), [&k, &v], &mut seen)?;
            shared.predict(on, &mut seen)?;
            Ok::<_, RankError>((outputs, seen))
        })?;
        if is_checked {
            let mut whole = Outputs::allocate(&arena, &shape, cell.dtype)?;
            whole.o.bytes_mut().fill(0xff);
            for (rank, (part, _)) in results.iter().enumerate() {
                scatter(&mut whole, part, &shared.tokens_of(rank)[0]);
            }
            finite(&whole)?;
            let kv = DenseKv::new(inputs.k.view(), inputs.v.view())?;
            let cpu = stage.engine.cpu();
            let call = Forward { shape, params: cell.params(), q: inputs.q.view(), kv: &kv, cpu };
            let at = sample_rows(&shape);
            let rows = attention::reference::rows(&call, &at);
            let read =
                |[batch, head, token]: [usize; 3], row: &mut [f32]| whole.o.view().read_rows(batch, head, token, row);
            let drift = Truth { at, rows }.drift(cell.head_dim, read);
            accurate(&drift, cell.dtype)?;
            self.record.drift = Some(drift);
        } else {
            self.ranks = results.into_iter().map(|(_, seen)| seen).collect();
        }
        Ok(())
    }

    /// The record with the numbers of all rounds.
    fn finish(self, limit_bytes: u64) -> Record {
        let Measured { mut record, ranks, spent_ns } = self;
        record.wall_ns = spent_ns;
        if record.status != Status::Ok {
            return record;
        }
        let over_ranks = |read: Samples| -> Vec<u64> {
            (0..SAMPLES).map(|pass| ranks.iter().map(|rank| read(rank)[pass]).max().unwrap_or(0)).collect()
        };
        // A pass ends with its slowest rank.
        let phases: [(&str, Samples); 4] = [
            ("forward", |rank| &rank.samples_ns),
            ("compute", |rank| &rank.compute_ns),
            ("exposed", |rank| &rank.exposed_ns),
            ("send_alone", |rank| &rank.alone_ns),
        ];
        for (name, read) in phases {
            record.latency.insert(name.into(), latency(over_ranks(read), 1, "rounds"));
        }
        // Medians on both sides: whoever else wants the cores takes them from passes and from links alike.
        let sending = latency(over_ranks(|rank| &rank.predicted_alone_ns), 1, "rounds");
        record.predicted_ns.insert("send_alone".into(), sending.median_ns);
        let most = |read: fn(&OfRank) -> u64| ranks.iter().map(read).max().unwrap_or(0);
        let (peak_bytes, predicted_peak_bytes) = (most(|rank| rank.peak_bytes), most(|rank| rank.predicted_peak_bytes));
        let residual_bytes = peak_bytes as i64 - predicted_peak_bytes as i64;
        let memory = Memory { peak_bytes, predicted_peak_bytes, residual_bytes, limit_bytes, ..Memory::default() };
        record.memory = Some(Memory { arena_growth_bytes: peak_bytes, ..memory });
        let flops = shared(&record.cell).map_or(0, |(shape, ..)| shape.flops(&record.cell.params()));
        let flops_per_s = flops as f64 / (record.latency["forward"].median_ns / 1e9);
        record.work = Some(Work { flops, kv_bytes_read: 0, flops_per_s });
        record.threads = 1;
        record.ranks = ranks;
        record
    }
}

/// Adds what the cost model gives for a whole pass, from what one rank took to compute: ranks beyond the cores take turns, and those of a
/// tree, which read, share the memory too.
fn predict(records: &mut [Record]) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    let asked = |record: &Record| record.cell.ranks.as_deref().and_then(|text| text.parse::<Asked>().ok());
    let of = |record: &Record, method| {
        let alone = Asked { method, threads: Some(1) };
        let compute = record.latency.get("compute").filter(|_| asked(record) == Some(alone))?;
        Some((method, compute.median_ns))
    };
    let methods = [Method::Ring, Method::Tree];
    let one: Vec<_> = methods.iter().flat_map(|&method| records.iter().find_map(|record| of(record, method))).collect();
    for record in records {
        let Some(Asked { method, threads: Some(ranks) }) = asked(record) else { continue };
        let Some(&send_ns) = record.predicted_ns.get("send_alone") else { continue };
        let Some((_, compute_ns)) = one.iter().find(|(of, _)| *of == method) else { continue };
        let together = record.ranks.first().map_or(1.0, |rank| rank.links.together.max(1.0));
        let forward_ns = match method {
            Method::Ring if ranks > 1 => {
                let step_ns = compute_ns / (ranks as f64).min(cores) / ranks as f64;
                cost::ring_time(ranks as u64, step_ns, send_ns / (ranks - 1) as f64)
            }
            Method::Tree if ranks > 1 => compute_ns / ranks as f64 * together + send_ns,
            _ => compute_ns + send_ns,
        };
        record.predicted_ns.insert("forward".into(), forward_ns);
    }
}

fn one_thread() -> Result<Cpu, RankError> {
    Cpu::new(Some(1)).map_err(|error| RankError::Start(error.to_string()))
}

/// Standard normal inputs of a cell.
fn draw(arena: &Arena, cell: &Cell, shape: &Shape) -> Result<Inputs, ArenaError> {
    let mut rng = ChaCha8Rng::seed_from_u64(cell.seed);
    let mut tensor = |dims: [usize; 4]| {
        let values: Vec<f32> = (0..dims.iter().product()).map(|_| rng.sample(StandardNormal)).collect();
        Tensor::from_f32(arena, Label::Input, cell.dtype, dims, &values)
    };
    Ok(Inputs { q: tensor(shape.q_dims())?, k: tensor(shape.kv_dims())?, v: tensor(shape.kv_dims())? })
}
