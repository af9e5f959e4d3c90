//! A long answer, step by step: bytes in use, drift, and attention that falls on tokens that are gone.

use super::{Data, Reading, policy, rounding};
use crate::experiment::cell::Cell;
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status, Step};
use crate::report::chart::{Axis, Chart, Quantity};
use crate::report::naming::{BUDGET, CONTEXT, HEADS, KERNEL, Naming};
use crate::report::palette;
use std::collections::BTreeMap;

/// Fewer steps are no course, but a point.
const LEAST_STEPS: usize = 256;

/// Neighbouring steps whose mean is a point: single queries differ more than policies do.
const TOGETHER: usize = 4;

/// [`TOGETHER`], in words.
const MEAN: &str = "a point is the mean of 4 neighbouring steps that were looked at";

/// The policy that the others are compared with.
const ORACLE: &str = "oracle";

/// Bytes in use.
pub fn live_bytes(data: &Data) -> Option<Chart> {
    let y = Axis { label: "live KV bytes".into(), field: "kv_bytes_live", quantity: Quantity::Size };
    let records = long_answers(data, |_| true);
    let chart = chart(data, &records, y, 1, |_, step| Some(step.kv_bytes_live as f64))?;
    Some(Chart {
        id: "kv-bytes-vs-steps".into(),
        title: "Live KV bytes while decoding".into(),
        caption: "KV bytes of whole pages in use after each decode step that was looked at, evenly many of them: what \
                  a policy does between two of these does not show."
            .into(),
        ..chart
    })
}

/// Drift.
pub fn drift(data: &Data) -> Option<Chart> {
    let y = Axis { label: "drift (relative L2)".into(), field: "drift", quantity: Quantity::Drift };
    let records = long_answers(data, |_| true);
    let chart = chart(data, &records, y, TOGETHER, |_, step| Some(step.drift))?;
    let (series, note) = rounding::split(chart.series);
    Some(Chart {
        id: "drift-vs-steps".into(),
        title: "Drift while decoding".into(),
        caption: format!(
            "Relative L2 distance of a step's outputs, all layers and heads, from the dense f64 result; {MEAN}.{note}"
        ),
        series,
        ..chart
    })
}

/// Attention that falls on tokens that are gone.
pub fn mass_lost(data: &Data) -> Option<Chart> {
    let y = Axis { label: "attention lost".into(), field: "attention_mass_lost", quantity: Quantity::Share };
    let records = long_answers(data, |name| !palette::is_baseline(name));
    let chart = chart(data, &records, y, TOGETHER, |_, step| Some(1.0 - step.attention_mass_kept?))?;
    Some(Chart {
        id: "attention-lost-vs-steps".into(),
        title: "Attention lost while decoding".into(),
        caption: format!(
            "Fraction of a step's dense attention that falls on tokens that are no longer there, mean of all layers and \
             heads; {MEAN}. Lower is better; the full cache loses nothing."
        ),
        ..chart
    })
}

/// What the oracle keeps of the attention and the policy does not.
pub fn regret(data: &Data) -> Option<Chart> {
    let question = |record: &Record| Cell { budget: record.cell.budget.clone(), ..record.cell.without_choice() }.id();
    let oracles = long_answers(data, |name| name == ORACLE);
    let oracles: BTreeMap<String, &Record> = oracles.into_iter().map(|record| (question(record), record)).collect();
    let records = long_answers(data, |name| !palette::is_baseline(name) && name != ORACLE);
    let y = Axis { label: "regret (difference of attention kept)".into(), field: "regret", quantity: Quantity::Gap };
    let chart = chart(data, &records, y, TOGETHER, |record, step| {
        let steps = &oracles.get(&question(record))?.eviction.as_ref()?.steps;
        let theirs = steps.iter().find(|other| other.new_tokens == step.new_tokens)?;
        Some(theirs.attention_mass_kept? - step.attention_mass_kept?)
    })?;
    Some(Chart {
        id: "regret-vs-steps".into(),
        title: "Regret against the oracle while decoding".into(),
        caption: format!(
            "Fraction of the dense attention that the oracle's tokens hold and the policy's do not; {MEAN}. The oracle \
             evicts once, after prefill, knowing all queries to come, and keeps every new token: it holds more bytes \
             than a policy that goes on evicting, and part of the regret is these bytes. Below 0 a policy keeps more \
             than the oracle."
        ),
        ..chart
    })
}

/// The records with a long course of steps whose policy's name is `wanted`, at the longest context that has any.
fn long_answers<'a>(data: &Data<'a>, wanted: impl Fn(&str) -> bool) -> Vec<&'a Record> {
    let mut records = data.of(Measure::EVICT);
    records.retain(|record| {
        let long = record.cell.new_tokens >= LEAST_STEPS && record.eviction.is_some();
        record.status == Status::Ok && long && wanted(&policy(record))
    });
    let longest = records.iter().map(|record| record.cell.context_tokens).max();
    records.retain(|record| Some(record.cell.context_tokens) == longest);
    records
}

/// A figure over steps, without name, title and caption; a point is the mean of `together` neighbouring steps.
fn chart(
    data: &Data,
    records: &[&Record],
    y: Axis,
    together: usize,
    read: impl Fn(&Record, &Step) -> Option<f64>,
) -> Option<Chart> {
    // The full cache has no budget, which is no difference worth a name.
    let mut budgeted = records.to_vec();
    budgeted.retain(|record| record.cell.budget.is_some());
    let naming = Naming::over(if budgeted.is_empty() { records } else { &budgeted }, &[CONTEXT, HEADS, KERNEL, BUDGET]);
    let series = data.series_of(records, &naming, policy, |record| {
        let steps = record.eviction.as_ref().map_or(&[][..], |eviction| &eviction.steps);
        let reading = |near: &[Step]| {
            let values: Vec<f64> = near.iter().filter_map(|step| read(record, step)).collect();
            let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
            let at: Vec<f64> = near.iter().map(|step| step.new_tokens as f64).collect();
            let key = near.first()?.new_tokens.to_string();
            (!values.is_empty()).then(|| (key, Reading::measured(mean(&at), mean(&values), None)))
        };
        steps.chunks(together).filter_map(reading).collect::<Vec<_>>()
    });
    (!series.is_empty()).then(|| Chart {
        id: String::new(),
        title: String::new(),
        subtitle: naming.common,
        caption: String::new(),
        x: Axis { label: "tokens decoded".into(), field: "new_tokens", quantity: Quantity::Steps },
        y,
        interval_fields: ("low", "high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}
