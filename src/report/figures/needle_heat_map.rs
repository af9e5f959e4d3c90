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
    let panel = |(name, records): (String, Vec<&Record>)| {
        let of_row = |row: &Row| contexts.iter().map(|&context| row.field(&records, context)).unzip();
        let (values, cell_ids): (Vec<Vec<f64>>, _) = rows.iter().map(of_row).unzip();
        Panel { name, rows: rows.iter().map(Row::name).zip(values).collect(), cell_ids }
    };
    let mut panels: Vec<Panel> = maps.into_iter().map(panel).collect();
    let says_something =
        |row: usize, panels: &[Panel]| panels.iter().any(|panel| panel.rows[row].1.iter().any(|value| !value.is_nan()));
    let kept: Vec<bool> = (0..rows.len()).map(|row| says_something(row, &panels)).collect();
    for panel in &mut panels {
        let [mut keep, mut keep_ids] = [kept.iter(), kept.iter()];
        panel.rows.retain(|_| *keep.next().unwrap_or(&false));
        panel.cell_ids.retain(|_| *keep_ids.next().unwrap_or(&false));
    }
    Some(Picture::Heat(Heat {
        id: "needle-heat-map".into(),
        title: "Needles found, by depth and length of the context".into(),
        subtitle: common,
        caption:
            "Mean score of the samples whose needle lies at this depth (0 % is the beginning of the context), for \
                  each length; grey where there is none. Where there are several budgets, it is the middle one."
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

    /// The mean score of the samples that lie here, NaN without one, and the cells that have some.
    fn field(&self, records: &[&Record], context: usize) -> (f64, Vec<String>) {
        let (mut scores, mut cell_ids) = (Vec::new(), Vec::new());
        for record in records.iter().filter(|record| record.cell.context_tokens == context) {
            let Some(answers) = &record.answers else { continue };
            let before = scores.len();
            let samples = answers.sample_depths.iter().zip(&answers.sample_scores);
            scores.extend(samples.filter(|(depth, _)| self.holds(**depth)).map(|(_, score)| score));
            if scores.len() > before {
                cell_ids.push(record.cell_id.clone());
            }
        }
        (scores.iter().sum::<f64>() / scores.len() as f64, cell_ids)
    }

    /// Whether a depth lies here; the last row has the end of the context too.
    fn holds(&self, depth: f64) -> bool {
        depth >= self.low && (depth < self.high || (self.high == 1.0 && depth == self.high))
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
