//! Where needles are found: score by depth and length of the context, a map for each policy.

use super::{Data, Picture};
use crate::experiment::measure::Measure;
use crate::experiment::record::Record;
use crate::report::answers::by_length;
use crate::report::heat::{Across, Heat, Panel};
use std::collections::BTreeSet;

/// Rows where depths are drawn at random.
const ROWS: usize = 5;

/// The figure; `None` with fewer than two lengths or two depths.
pub fn heat(data: &Data) -> Option<Picture> {
    let mut records = data.of(Measure::EVAL);
    records.retain(|record| record.answers.as_ref().is_some_and(|answers| !answers.sample_depths.is_empty()));
    let (maps, common) = by_length(&records);
    let mut contexts: Vec<usize> = records.iter().map(|record| record.cell.context_tokens).collect();
    contexts.sort_unstable();
    contexts.dedup();
    let rows = rows(&records);
    if contexts.len() < 2 || rows.len() < 2 {
        return None;
    }
    let panel = |(name, records): (String, Vec<&Record>)| Panel {
        name,
        cell_ids: contexts
            .iter()
            .map(|&context| {
                let cells = records.iter().filter(|record| record.cell.context_tokens == context);
                cells.map(|record| record.cell_id.clone()).collect()
            })
            .collect(),
        rows: rows
            .iter()
            .map(|row| (row.name(), contexts.iter().map(|&context| row.mean(&records, context)).collect()))
            .collect(),
    };
    let mut panels: Vec<Panel> = maps.into_iter().map(panel).collect();
    // A field without a sample would look like one that is always wrong.
    let holes =
        |row: usize, panels: &[Panel]| panels.iter().any(|panel| panel.rows[row].1.iter().any(|value| value.is_nan()));
    let whole: Vec<bool> = (0..rows.len()).map(|row| !holes(row, &panels)).collect();
    for panel in &mut panels {
        let mut keep = whole.iter();
        panel.rows.retain(|_| *keep.next().unwrap_or(&false));
    }
    Some(Picture::Heat(Heat {
        id: "needle-heat-map".into(),
        title: "Needles found, by depth and length of the context".into(),
        subtitle: common,
        caption:
            "Mean score of the samples whose needle lies at this depth (0 % is the beginning of the context), for \
                  each length. Where there are several budgets, it is the middle one."
                .into(),
        down: "depth of the needle",
        across: Across::Contexts(contexts),
        ends: ("wrong", "right"),
        field: "accuracy",
        panels,
    }))
}

/// Depths that are one row.
struct Row {
    low: f64,
    high: f64,
}

impl Row {
    fn name(&self) -> String {
        format!("{:.0}–{:.0} %", 100.0 * self.low, 100.0 * self.high)
    }

    /// NaN without a sample.
    fn mean(&self, records: &[&Record], context: usize) -> f64 {
        let of_context = records.iter().filter(|record| record.cell.context_tokens == context);
        let samples = of_context
            .filter_map(|record| record.answers.as_ref())
            .flat_map(|answers| answers.sample_depths.iter().copied().zip(answers.sample_scores.iter().copied()));
        let last = self.high == 1.0;
        let here: Vec<f64> = samples
            .filter(|(depth, _)| *depth >= self.low && (*depth < self.high || (last && *depth == self.high)))
            .map(|(_, score)| score)
            .collect();
        here.iter().sum::<f64>() / here.len() as f64
    }
}

/// Equal bins of depth: as many as there are depths that tasks ask for, or [`ROWS`].
fn rows(records: &[&Record]) -> Vec<Row> {
    // Tasks such as `passkey:depth=0.5` ask for places, which sentences then round.
    let asked: BTreeSet<&str> =
        records.iter().filter_map(|record| Some(record.cell.task.as_ref()?.split_once("depth=")?.1)).collect();
    let count = if asked.len() > 1 { asked.len() } else { ROWS };
    let edge = |index: usize| index as f64 / count as f64;
    (0..count).map(|index| Row { low: edge(index), high: edge(index + 1) }).collect()
}
