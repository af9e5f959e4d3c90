//! Where needles are found: score by depth and length of the context, a map for each policy.

use super::{Data, Picture};
use crate::experiment::measure::Measure;
use crate::experiment::record::Record;
use crate::report::answers::by_length;
use crate::report::heat::{Across, Heat, Panel};
use crate::units;
use std::collections::BTreeSet;

/// Rows where depths are drawn at random.
const ROWS: usize = 5;

/// The figure; `None` with fewer than two lengths, or with needles in fewer than two rows.
pub fn heat(data: &Data) -> Option<Picture> {
    let mut records = data.of(Measure::EVAL);
    records.retain(|record| record.answers.as_ref().is_some_and(|answers| !answers.sample_depths.is_empty()));
    let (maps, common) = by_length(&records);
    let mut contexts: Vec<usize> = records.iter().map(|record| record.cell.context_tokens).collect();
    contexts.sort_unstable();
    contexts.dedup();
    let rows = rows(&records);
    let panel = |(name, records): (String, Vec<&Record>)| {
        let mut panel = Panel { name, rows: Vec::new(), cell_ids: Vec::new(), samples: Vec::new() };
        for row in &rows {
            let fields: Vec<Field> = contexts.iter().map(|&context| row.field(&records, context)).collect();
            panel.rows.push((row.name(), fields.iter().map(|field| field.score).collect()));
            panel.samples.push(fields.iter().map(|field| field.samples).collect());
            panel.cell_ids.push(fields.into_iter().map(|field| field.cell_ids).collect());
        }
        panel
    };
    let panels: Vec<Panel> = maps.into_iter().map(panel).collect();
    let has_needles = |row: &usize| panels.iter().any(|panel| panel.samples[*row].iter().any(|count| *count > 0));
    if contexts.len() < 2 || (0..rows.len()).filter(has_needles).count() < 2 {
        return None;
    }
    let counts = || panels.iter().flat_map(|panel| panel.samples.iter().flatten()).copied().filter(|count| *count > 0);
    let samples = match (counts().min()?, counts().max()?) {
        (least, most) if least == most => units::counted(most as u64, "sample"),
        (least, most) => format!("{least} to {most} samples"),
    };
    Some(Picture::Heat(Heat {
        id: "needle-heat-map".into(),
        title: "Needles found, by depth and length of the context".into(),
        subtitle: common,
        caption: format!(
            "Mean score of the samples whose needle lies at this depth (0 % is the beginning of the context), for each length; \
             {samples} in a field, grey where there is none. Where there are several budgets, it is the middle one."
        ),
        down: "depth of the needle",
        across: Across::Contexts(contexts),
        ends: ("wrong", "right"),
        field: "accuracy",
        panels,
    }))
}

/// What lies in one row at one length.
struct Field {
    /// Mean score, NaN without a sample.
    score: f64,
    /// Samples whose needle lies there.
    samples: usize,
    /// The cells that have some.
    cell_ids: Vec<String>,
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

    /// The samples of a length that lie here.
    fn field(&self, records: &[&Record], context: usize) -> Field {
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
        Field { score: scores.iter().sum::<f64>() / scores.len() as f64, samples: scores.len(), cell_ids }
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
