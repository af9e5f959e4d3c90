//! What a rank holds in training, by stage of ZeRO and ranks, in the manner of the paper's first figure.

use super::Data;
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::memory::{Label, LabelBytes};
use crate::ranks::OfRank;
use crate::report::bars::{Bar, Bars, Part};
use crate::report::chart::{Axis, Quantity};
use crate::report::naming::{CONTEXT, Naming};
use crate::report::palette::Colour;
use crate::train::steps::SharedOut;

/// From below, in the order of the paper.
pub(super) const PARTS: [(Part, Label); 5] = [
    (Part { name: "weights", field: "weights_bytes", colour: Colour(0x00, 0x72, 0xB2) }, Label::Weights),
    (Part { name: "gradients", field: "gradients_bytes", colour: Colour(0xD5, 0x5E, 0x00) }, Label::Gradients),
    (Part { name: "optimizer", field: "optimizer_bytes", colour: Colour(0x00, 0x9E, 0x73) }, Label::Optimizer),
    (Part { name: "activations", field: "activations_bytes", colour: Colour(0xE6, 0x9F, 0x00) }, Label::Activations),
    (Part { name: "scratch", field: "workspace_bytes", colour: Colour(0xBB, 0xBB, 0xBB) }, Label::Workspace),
];

/// The figure, of the model and batch that most was measured of.
pub fn bars(data: &Data) -> Option<Bars> {
    let shared = |record: &Record| record.cell.ranks.as_deref().and_then(|text| text.parse::<SharedOut>().ok());
    let mut records: Vec<(&Record, SharedOut)> =
        data.of(Measure::TRAIN).into_iter().filter_map(|record| Some((record, shared(record)?))).collect();
    let count = |of: &Record| {
        let same = of.cell.without_choice();
        records.iter().filter(|(other, _)| other.cell.without_choice() == same).count()
    };
    let chosen = records.iter().map(|(record, _)| *record).max_by_key(|record| count(record))?.cell.without_choice();
    records.retain(|(record, _)| record.cell.without_choice() == chosen);
    records.sort_by_key(|(_, of)| (of.ranks, of.tensor_parallel, of.stage, of.offload));
    let naming = Naming::over(&records.iter().map(|(record, _)| *record).collect::<Vec<_>>(), &[CONTEXT]);
    let bars: Vec<Bar> = records.iter().filter_map(|(record, shared)| bar(record, *shared)).collect();
    (!bars.is_empty()).then(|| Bars {
        id: "rank-bytes-vs-stage".into(),
        title: "What a rank holds in training".into(),
        subtitle: naming.common,
        caption: "Peak bytes of the rank that holds most, by its own arena, by ZeRO's stage: what is shared out is nothing (0), the \
                  optimizer's averages (1), gradients too (2), weights too (3). Tensor: ranks that share each block. Offload: the \
                  optimizer's averages are in a file. Paler: by the formula, where all ranks together have no room. Lower is better."
            .into(),
        y: Axis { label: "peak of a rank, by stage of ZeRO".into(), field: "peak_bytes", quantity: Quantity::Size },
        parts: PARTS.map(|(part, _)| part).into(),
        paler_label: "no room".into(),
        paler_prefix: "predicted_",
        notes_name: true,
        bars,
    })
}

/// Bytes of each part, and of what is paler: of the rank that holds most, or would.
pub(super) fn held(record: &Record) -> Option<(Vec<f64>, Vec<Option<f64>>)> {
    let values = |bytes: &LabelBytes| PARTS.map(|(_, label)| bytes.get(&label).copied().unwrap_or(0) as f64).to_vec();
    let total = |bytes: &LabelBytes| bytes.values().sum::<u64>();
    let fullest = |read: fn(&OfRank) -> &LabelBytes| record.ranks.iter().map(read).max_by_key(|bytes| total(bytes));
    Some(match record.status {
        Status::Ok => (values(fullest(|rank| &rank.peak_by_label)?), Vec::new()),
        _ => (Vec::new(), values(fullest(|rank| &rank.predicted_by_label)?).into_iter().map(Some).collect()),
    })
}

fn bar(record: &Record, shared: SharedOut) -> Option<Bar> {
    let (values, paler) = held(record)?;
    let SharedOut { ranks, stage, tensor_parallel, offload } = shared;
    let notes = [(tensor_parallel > 1).then_some("tensor"), offload.then_some("offload")];
    Some(Bar {
        group: if ranks == 1 { "1 rank".into() } else { format!("{ranks} ranks") },
        name: if ranks > tensor_parallel { stage.to_string() } else { "–".into() },
        notes: notes.into_iter().flatten().map(String::from).collect(),
        values,
        paler,
        cell_ids: vec![record.cell_id.clone()],
    })
}
