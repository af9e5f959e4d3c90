//! `--dry-run`: what the cells will take, before they run.

use super::cell::Cell;
use super::engine::Engine;
use super::measure::{Implementation, Measure, Prepared, Stage};
use super::runner::{LEAST_SAMPLES, comparisons};
use super::spec::Timing;
use crate::attention::{DenseKv, Forward, Kernel, Outputs, Params, Shape, Tiled, kernel};
use crate::device::Cpu;
use crate::memory::{Arena, Label};
use crate::policy::Registry;
use crate::tensor::{DType, Tensor};
use crate::units;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::Instant;

/// Bytes per second at which fresh memory is taken and inputs are copied: a rough figure, it only rounds estimates.
const FRESH_BYTES_PER_S: f64 = 3e9;

/// What this machine does, measured in a moment.
struct Rates {
    flops_per_s: f64,
    kv_bytes_per_s: f64,
}

impl Rates {
    fn measure(cpu: &Cpu) -> Self {
        let rate = |kernel: &dyn Kernel, q_len: usize, kv_len: usize, work: &dyn Fn(&Shape) -> f64| {
            let shape = Shape { batch: 1, q_heads: 4, kv_heads: 4, q_len, kv_len, head_dim: 64 };
            let arena = Arena::unlimited();
            let zeros = |dims| Tensor::zeros(&arena, Label::Input, DType::F32, dims).ok();
            let (q, k, v) = (zeros(shape.q_dims())?, zeros(shape.kv_dims())?, zeros(shape.kv_dims())?);
            let kv = DenseKv::new(k.view(), v.view()).ok()?;
            let call = Forward { shape, params: Params::new(64, false), q: q.view(), kv: &kv, cpu };
            let mut outputs = Outputs::allocate(&arena, &shape, DType::F32).ok()?;
            let size = kernel.workspace(&shape, &call.params, DType::F32, cpu.threads());
            let mut workspace = size.allocate(&arena).ok()?;
            let mut best_s = f64::INFINITY;
            for _ in 0..3 {
                let start = Instant::now();
                kernel.forward(&call, &mut outputs, &mut workspace).ok()?;
                best_s = best_s.min(start.elapsed().as_secs_f64());
            }
            Some(work(&shape) / best_s)
        };
        let flops = |shape: &Shape| shape.flops(&Params::new(64, false)) as f64;
        let bytes = |shape: &Shape| 2.0 * Tensor::bytes_of(DType::F32, shape.kv_dims()) as f64;
        let decode = kernel("decode").expect("the decode kernel is built in");
        Rates {
            flops_per_s: rate(&Tiled::AUTO, 512, 512, &flops).unwrap_or(1e10),
            kv_bytes_per_s: rate(&*decode, 1, 8192, &bytes).unwrap_or(1e9),
        }
    }

    /// Seconds that a cell will take, all its rounds together: within a factor of two or so.
    fn seconds(&self, prepared: &Prepared, timing: &Timing, predicted_bytes: u64) -> f64 {
        let work = prepared.work();
        let (flops_s, reads_s) =
            (work.flops as f64 / self.flops_per_s, work.kv_bytes_read as f64 / self.kv_bytes_per_s);
        // The baseline computes what is masked too.
        let masked = if prepared.cell.kernel == "naive" && prepared.cell.causal { 2.0 } else { 1.0 };
        let work = flops_s * masked * work.passes + reads_s * work.reads;
        let trial = work + predicted_bytes as f64 / FRESH_BYTES_PER_S;
        let rounds = timing.min_rounds.min(timing.max_rounds) as f64;
        // Samples that are taken however long they take, and the checked trial before them.
        let least = rounds.min(LEAST_SAMPLES as f64);
        trial * ((timing.cap_s / trial).clamp(least, rounds + 2.0) + timing.warmups.max(1) as f64)
    }
}

/// Seconds that each comparison will take; `None` where nothing takes long, or does not run on this engine.
fn seconds(comparisons: &[Vec<&Cell>], stage: &Stage<'_>) -> Vec<Option<f64>> {
    let (engine, mut all) = (stage.engine, Vec::new());
    for of_measure in comparisons.chunk_by(|a, b| a[0].measure == b[0].measure) {
        let measure = of_measure[0][0].measure.comparisons();
        let runs = measure.filter(|measure| measure.refusal(engine.device()).is_none());
        all.extend(runs.map_or(vec![None; of_measure.len()], |measure| measure.seconds(of_measure, stage)));
    }
    all
}

/// Seconds that each of the cells which run in comparisons will take, by its id, tried within `limit_bytes`; nothing where that is
/// not worth a word.
pub fn of_comparisons(
    cells: &[&Cell],
    registry: &Registry,
    engine: Engine<'_>,
    limit_bytes: u64,
) -> BTreeMap<String, f64> {
    let comparisons = comparisons(cells.iter().copied());
    let stage = Stage { registry, engine, limit_bytes, folder: Path::new("") };
    let seconds = seconds(&comparisons, &stage);
    let mut known = BTreeMap::new();
    for (cells, seconds) in comparisons.iter().zip(seconds) {
        let with_room: Vec<&&Cell> = cells.iter().filter(|cell| has_room(cell, &stage)).collect();
        let each = seconds.map(|seconds| seconds / with_room.len().max(1) as f64);
        known.extend(with_room.into_iter().filter_map(|cell| Some((cell.id(), each?))));
    }
    known
}

fn has_room(cell: &Cell, stage: &Stage<'_>) -> bool {
    let threads = stage.engine.cpu().threads();
    cell.measure.comparisons().is_none_or(|measure| measure.has_room(cell, stage.limit_bytes, threads))
}

/// A table of cells with predicted peak memory and time, and the sums; `others` are cells that run in comparisons, of which
/// memory is predicted where their measure does. Nothing is known beforehand of a GPU's times.
pub fn table<'e>(
    cells: &[Prepared],
    others: &[&Cell],
    registry: &Registry,
    timing: &Timing,
    engine: impl Into<Engine<'e>>,
    limit_bytes: u64,
) -> String {
    let engine = engine.into();
    let rates = match engine {
        Engine::Cpu(cpu) => Some(Rates::measure(cpu)),
        Engine::Cuda(_) => None,
    };
    let labels = cells.iter().map(|prepared| &prepared.cell).chain(others.iter().copied()).map(Cell::label);
    let width = labels.map(|label| label.chars().count()).max().unwrap_or(0);
    let mut text = format!("{:width$}  {:>15}  {:>9}\n", "cell", "predicted peak", "time");
    let (mut total_s, mut oom, mut skipped, mut whole) = (0.0, 0, 0, 0);
    for prepared in cells {
        let bytes = prepared.predict(engine);
        let (peak, time) = match (&prepared.implementation, &rates) {
            (Implementation::Missing(_), _) => {
                skipped += 1;
                ("–".into(), "skipped".into())
            }
            _ if bytes > limit_bytes => {
                oom += 1;
                (units::bytes(bytes), "oom".into())
            }
            _ if prepared.budget_holds_context() => {
                whole += 1;
                ("–".into(), "skipped".into())
            }
            (_, None) => (units::bytes(bytes), "–".into()),
            (_, Some(rates)) => {
                let seconds = rates.seconds(prepared, timing, bytes);
                total_s += seconds;
                (units::bytes(bytes), units::nanoseconds(seconds * 1e9))
            }
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{:width$}  {peak:>15}  {time:>9}", prepared.cell.label());
    }
    let mut unknown = 0;
    let comparisons = comparisons(others.iter().copied());
    let stage = Stage { registry, engine, limit_bytes, folder: Path::new("") };
    for (cells, seconds) in comparisons.iter().zip(seconds(&comparisons, &stage)) {
        let refused = cells[0].measure.comparisons().is_some_and(|measure| measure.refusal(engine.device()).is_some());
        skipped += if refused { cells.len() } else { 0 };
        total_s += seconds.unwrap_or(0.0);
        let bytes = |cell: &&Cell| cell.measure.comparisons()?.predicted_bytes(cell, engine.cpu().threads());
        let bytes: Vec<Option<u64>> = cells.iter().map(bytes).collect();
        let has_room = |bytes: &Option<u64>| bytes.is_none_or(|bytes| bytes <= limit_bytes);
        let with_room = bytes.iter().filter(|bytes| has_room(bytes)).count();
        let time = match seconds {
            Some(seconds) => units::nanoseconds(seconds / with_room.max(1) as f64 * 1e9),
            None if refused => "skipped".into(),
            None if cells[0].measure == Measure::SERVE => "simulated".into(),
            None => {
                unknown += cells.len();
                "not known".into()
            }
        };
        for (cell, bytes) in cells.iter().zip(bytes) {
            let has_room = has_room(&bytes);
            oom += usize::from(!has_room && !refused);
            let (peak, time) = (bytes.map_or("–".into(), units::bytes), if has_room { &time } else { "oom" });
            let _ = writeln!(text, "{:width$}  {peak:>15}  {time:>9}", cell.label());
        }
    }
    let total = match rates {
        None => String::new(),
        Some(_) if unknown == 0 => format!("; about {} in all", minutes(total_s)),
        Some(_) if unknown == cells.len() + others.len() => "; of none the time is known".into(),
        Some(_) => format!("; about {} in all without the {unknown} whose time is not known", minutes(total_s)),
    };
    let reasons = [(skipped, "that do not run on this device"), (whole, "whose budget holds the whole context")];
    let reasons = reasons.iter().filter(|(count, _)| *count > 0).map(|(count, why)| format!(", {count} {why}"));
    let _ = writeln!(
        text,
        "{}, {oom} of them over the limit of {}{}{}",
        units::counted((cells.len() + others.len()) as u64, "cell"),
        units::bytes(limit_bytes),
        reasons.collect::<String>(),
        total,
    );
    text
}

/// As people say how long something takes.
pub fn minutes(seconds: f64) -> String {
    match seconds {
        ..100.0 => format!("{seconds:.0} s"),
        ..6000.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}
