//! What a memory in place of the cache costs: time per token beside that of the window alone.

use super::{Data, Picture};
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::memories::WINDOW_ALONE;
use crate::report::chart::{Axis, Quantity, Rule};
use crate::report::naming::{CONTEXT, HEADS, KERNEL, Naming, SAMPLES, TASK};
use crate::report::palette::{self, Colour};
use crate::report::rows::{Kind, Mark, Row, Rows};
use crate::report::workers::machine;
use std::collections::BTreeMap;

/// Phases of a run alone, in words.
const PHASES: [(&str, &str); 2] = [("first_token", "reading the context"), ("decode", "a token of the answer")];
/// Runs of which a mean says something; where many cells are compared each runs by itself only once.
const LEAST_RUNS: usize = 3;
/// Samples of a phase of which a median says something: an answer may end behind a token.
const LEAST_SAMPLES: [usize; 2] = [LEAST_RUNS, 32];
/// A memory may take so much longer for a token than the window alone.
const GOAL: f64 = 0.5;

/// The figure: memories and the full cache wherever the window alone was measured with them.
pub fn rows(data: &Data) -> Option<Picture> {
    let mut records = data.of(Measure::EVAL);
    let runs = |record: &Record| record.latency.get("first_token").map_or(0, |latency| latency.samples_ns.len());
    records.retain(|record| record.status == Status::Ok && runs(record) >= LEAST_RUNS);
    let is_window = |record: &&&Record| record.cell.memory.as_deref() == Some(WINDOW_ALONE);
    let key = |record: &Record| (record.cell.without_choice().id(), machine(record));
    let windows: BTreeMap<_, &Record> = records.iter().filter(is_window).map(|record| (key(record), *record)).collect();
    let is_shown = |record: &&Record| {
        let name = record.cell.chosen().unwrap_or_default();
        record.cell.memory.is_some() && name != WINDOW_ALONE || palette::is_baseline(name)
    };
    let mut ratios: BTreeMap<&str, [Vec<(f64, &str)>; 2]> = BTreeMap::new();
    for record in records.iter().filter(|record| is_shown(record)) {
        let Some(window) = windows.get(&key(record)) else { continue };
        let of_record = ratios.entry(record.cell.chosen().unwrap_or_default()).or_default();
        for (((phase, _), least), ratios) in PHASES.iter().zip(LEAST_SAMPLES).zip(of_record) {
            let of =
                |record: &'_ Record| record.latency.get(*phase).filter(|own| own.samples_ns.len() >= least).cloned();
            let both = of(record).zip(of(window));
            ratios.extend(both.map(|(own, window)| (own.median_ns / window.median_ns, &record.cell_id[..])));
        }
    }
    let row =
        |(name, ratios): (&str, [Vec<(f64, &str)>; 2])| Row { name: name.into(), values: ratios.map(added).into() };
    let mut rows: Vec<Row> = ratios.into_iter().map(row).filter(|row| row.values[0].is_some()).collect();
    let reading = |row: &Row| row.values[0].as_ref().map_or(0.0, |(value, _)| *value);
    rows.sort_by(|a, b| reading(a).total_cmp(&reading(b)));
    let kinds = PHASES.iter().zip([0.35, 0.75]);
    (!rows.is_empty()).then(|| {
        Picture::Rows(Rows {
            id: "memory-cost".into(),
            title: "Time per token of memories, beside the window alone".into(),
            subtitle: Naming::over(&records, &[CONTEXT, HEADS, KERNEL, TASK, SAMPLES]).common,
            caption: "How much longer a run by itself takes than with transformer-xl:slots=1, the window and one token: to \
                      read the context, writing to the memory included, and for a token of the answer, behind which seldom \
                      anything is written. Medians; runs of a sample follow one another; the geometric mean over tasks. Left \
                      of 0 is faster; the line is the goal of 1.5 times."
                .into(),
            axis: Axis { label: "more time per token".into(), field: "more_time", quantity: Quantity::Gap },
            mark: Mark::Dot,
            kinds: kinds
                .map(|((_, words), shade)| Kind { name: (*words).into(), colour: Colour::sequential(shade) })
                .collect(),
            rows,
            limit: Some(Rule { y: GOAL, label: "goal".into() }),
        })
    })
}

/// The geometric mean of ratios less one, with the cells behind them; `None` without any.
fn added(ratios: Vec<(f64, &str)>) -> Option<(f64, Vec<String>)> {
    let log = ratios.iter().map(|(ratio, _)| ratio.ln()).sum::<f64>() / ratios.len() as f64;
    (!ratios.is_empty()).then(|| (log.exp_m1(), ratios.into_iter().map(|(_, id)| id.to_string()).collect()))
}
