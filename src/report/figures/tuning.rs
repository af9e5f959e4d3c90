//! What fine-tuning takes, by what is trained and how.

use super::Data;
use super::zero::{PARTS, held};
use crate::experiment::measure::Measure;
use crate::experiment::record::Record;
use crate::report::bars::{Bar, Bars};
use crate::report::chart::{Axis, Quantity};
use crate::report::naming::{CONTEXT, Naming};
use crate::train::Recompute;
use crate::train::lora::Asked;
use crate::train::tuning::Tuning;

/// The figure, of the model and batch that most was measured of.
pub fn bars(data: &Data) -> Option<Bars> {
    let records = data.of(Measure::TUNE);
    let alike = |record: &&Record| {
        let same = record.cell.without_choice();
        records.iter().filter(|other| other.cell.without_choice() == same).count()
    };
    let chosen = records.iter().copied().max_by_key(alike)?.cell.without_choice();
    let mut of_chosen: Vec<(&Record, Tuning)> = records
        .iter()
        .filter(|record| record.cell.without_choice() == chosen)
        .filter_map(|record| Some((*record, record.cell.tuning.as_deref()?.parse().ok()?)))
        .collect();
    // From the most memory to the least, those of one method together.
    of_chosen.sort_by_key(|(record, of)| (of.method as usize, std::cmp::Reverse(predicted(record))));
    let naming = Naming::over(&of_chosen.iter().map(|(record, _)| *record).collect::<Vec<_>>(), &[CONTEXT]);
    let bars: Vec<Bar> = of_chosen.iter().filter_map(|(record, of)| bar(record, of)).collect();
    (!bars.is_empty()).then(|| Bars {
        id: "tuning-bytes".into(),
        title: "What fine-tuning takes".into(),
        subtitle: naming.common,
        caption: "Peak bytes by the arena, by what is trained: all parameters (full), adapters beside frozen matrices (lora), or \
                  beside matrices that stay packed as their file has them (qlora). Below each bar the optimizer, the type of the \
                  pass, the adapters' rank and matrices, and what the backward pass computes again. Gradients and the \
                  optimizer's averages are of what is trained; with full in bf16 the optimizer's part has the master copy. Paler: \
                  by the formula, where there is no room. Lower is better."
            .into(),
        y: Axis { label: "peak bytes".into(), field: "peak_bytes", quantity: Quantity::Size },
        parts: PARTS.map(|(part, _)| part).into(),
        paler_label: "no room".into(),
        paler_prefix: "predicted_",
        notes_name: true,
        bars,
    })
}

fn predicted(record: &Record) -> u64 {
    record.memory.as_ref().map_or(0, |memory| memory.predicted_peak_bytes)
}

fn bar(record: &Record, of: &Tuning) -> Option<Bar> {
    let (values, paler) = held(record)?;
    let adapters =
        of.adapters.iter().flat_map(|Asked { rank, targets, .. }| [format!("rank {rank}"), targets.join(",")]);
    let again = match of.recompute {
        Recompute::None => vec![],
        mode => vec!["again:".to_string(), mode.name().into()],
    };
    // Words stand below a narrow bar: none may be longer than `adafactor`.
    let (optimizer, bits) = match of.optimizer.name().split_once('-') {
        Some((optimizer, bits)) => (optimizer, Some(bits.to_string())),
        None => (of.optimizer.name(), None),
    };
    Some(Bar {
        group: of.method.name().into(),
        name: optimizer.into(),
        notes: bits.into_iter().chain([of.weights.name().to_string()]).chain(adapters).chain(again).collect(),
        values,
        paler,
        cell_ids: vec![record.cell_id.clone()],
    })
}
