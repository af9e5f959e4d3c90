//! Samples of records of training and of fine-tuning.

use super::*;
use crate::train::steps::SharedOut;

/// Steps of training that 1, 2 and 8 ranks share, of which one way has no room.
pub fn training() -> Run {
    let ways = [
        ("zero:ranks=1", 1),
        ("zero:ranks=1,offload=true", 1),
        ("zero:ranks=2,stage=0", 2),
        ("zero:ranks=2,stage=1", 2),
        ("zero:ranks=2,stage=1,offload=true", 2),
        ("zero:ranks=2,stage=3", 2),
        ("zero:ranks=2,tensor_parallel=2", 2),
        ("zero:ranks=8,stage=0", 8),
        ("zero:ranks=8,stage=3", 8),
    ];
    let one = |&(way, ranks): &(&str, usize)| {
        let mut record = with_cell(record(Measure::TRAIN, "tiled", 256), |cell| {
            (cell.model, cell.ranks) = (Some("builtin".into()), Some(way.into()));
            (cell.batch, cell.samples) = (8, Some(5));
        });
        let shared: SharedOut = way.parse().expect("it is one of those above");
        let share = |from: u8, mib: u64| if shared.stage >= from { (mib << 20) / ranks as u64 } else { mib << 20 };
        let optimizer = if shared.offload { 1 << 19 } else { share(1, 8) };
        let bytes = LabelBytes::from([
            (Label::Weights, share(3, 4)),
            (Label::Gradients, share(2, 4)),
            (Label::Optimizer, optimizer),
            (Label::Activations, (64 << 20) / ranks as u64),
            (Label::Workspace, 1 << 20),
        ]);
        let peak_bytes = bytes.values().sum();
        let of_rank =
            OfRank { predicted_peak_bytes: peak_bytes, predicted_by_label: bytes.clone(), ..OfRank::default() };
        record.memory =
            Some(Memory { predicted_peak_bytes: peak_bytes, limit_bytes: LIMIT_BYTES, ..Memory::default() });
        if ranks == 8 && shared.stage == 0 {
            (record.status, record.reason) = (Status::Oom, Some("all ranks together need more".into()));
            record.ranks = vec![of_rank; ranks];
            return record;
        }
        let of_rank =
            OfRank { peak_bytes, peak_by_label: bytes.clone(), sent_bytes: (ranks as u64 - 1) << 20, ..of_rank };
        record.ranks = vec![of_rank; ranks];
        let slower = 1.0
            + 0.1 * f64::from(shared.stage)
            + if shared.offload { 0.5 * (1.0 + 0.1 * f64::from(shared.stage)) } else { 0.0 };
        record.latency.insert("step".into(), latency(1e8 * slower));
        record.memory = record.memory.map(|memory| Memory { peak_bytes, peak_by_label: bytes, ..memory });
        record.training = Some(Training { parameters: 1 << 20, losses: vec![2.0, 1.9] });
        record
    };
    Run { experiment: "zero".into(), records: ways.iter().map(one).collect(), ..run() }
}

/// Steps of fine-tuning in four ways, of which one has no room.
pub fn tuning() -> Run {
    let ways = [
        ("full", 2048),
        ("full:weights=bf16,optimizer=adafactor", 700),
        ("lora:rank=8", 400),
        ("qlora:rank=8,target=all-linear,optimizer=adamw-8bit,recompute=full", 200),
    ];
    let one = |&(way, mib): &(&str, u64)| {
        let mut record = with_cell(record(Measure::TUNE, "tiled", 256), |cell| {
            (cell.model, cell.tuning, cell.samples) = (Some("builtin".into()), Some(way.into()), Some(5));
        });
        let labels = [Label::Weights, Label::Gradients, Label::Optimizer, Label::Activations];
        let bytes: LabelBytes = labels.map(|label| (label, mib << 18)).into();
        let (predicted_peak_bytes, is_ok) = (mib << 20, mib < 1024);
        let predicted = OfRank { predicted_peak_bytes, predicted_by_label: bytes.clone(), ..OfRank::default() };
        record.memory = Some(Memory { predicted_peak_bytes, limit_bytes: LIMIT_BYTES, ..Memory::default() });
        record.ranks = vec![predicted];
        if !is_ok {
            (record.status, record.reason) = (Status::Oom, Some("it needs more".into()));
            return record;
        }
        (record.ranks[0].peak_bytes, record.ranks[0].peak_by_label) = (predicted_peak_bytes, bytes.clone());
        record.latency.insert("step".into(), latency(1e8));
        record.memory =
            record.memory.map(|memory| Memory { peak_bytes: predicted_peak_bytes, peak_by_label: bytes, ..memory });
        record.training = Some(Training { parameters: 1 << 16, losses: vec![2.0, 1.9] });
        record
    };
    Run { experiment: "real-tuning".into(), records: ways.iter().map(one).collect(), ..run() }
}
