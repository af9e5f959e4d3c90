//! A long answer, step by step: bytes in use, drift, and attention that falls on tokens that are gone.

use super::{Data, Reading, policy, rounding};
use crate::experiment::cell::{Cell, Measure};
use crate::experiment::record::{Record, Status, Step};
use crate::report::chart::{Axis, Chart, Quantity};
use crate::report::naming::{BUDGET, CONTEXT, HEADS, KERNEL, Naming};
use crate::report::palette;
use std::collections::BTreeMap;

/// Fewer steps are no course, but a point.
const LEAST_STEPS: usize = 256;

/// The policy that the others are compared with.
const ORACLE: &str = "oracle";

/// Bytes in use.
pub fn live_bytes(data: &Data) -> Option<Chart> {
    let records = long_answers(data, |_| true);
    let y = Axis { label: "live KV bytes".into(), field: "kv_bytes_live", quantity: Quantity::Size };
    let caption = "KV bytes of whole pages in use after each decode step that was looked at, evenly many of them: what \
                   a policy does between two of these does not show.";
    let read = |_: &Record, step: &Step| Some(step.kv_bytes_live as f64);
    chart(data, &records, "kv-bytes-vs-steps", "Live KV bytes while decoding", caption, y, read)
}

/// Drift.
pub fn drift(data: &Data) -> Option<Chart> {
    let records = long_answers(data, |_| true);
    let y = Axis { label: "drift (relative L2)".into(), field: "drift", quantity: Quantity::Drift };
    let caption = "Relative L2 distance of a step's outputs, all layers and heads, from the dense f64 result.";
    let read = |_: &Record, step: &Step| Some(step.drift);
    let mut chart = chart(data, &records, "drift-vs-steps", "Drift while decoding", caption, y, read)?;
    let (series, note) = rounding::split(std::mem::take(&mut chart.series));
    Some(Chart { series, caption: chart.caption + &note, ..chart })
}

/// Attention that falls on tokens that are gone.
pub fn mass_lost(data: &Data) -> Option<Chart> {
    let records = long_answers(data, |name| !palette::is_baseline(name));
    let y = Axis { label: "attention lost".into(), field: "attention_mass_lost", quantity: Quantity::Share };
    let caption = "Share of a step's dense attention that falls on tokens that are no longer there, mean of all layers \
                   and heads; lower is better. The full cache loses nothing.";
    let read = |_: &Record, step: &Step| Some(1.0 - step.attention_mass_kept);
    chart(data, &records, "attention-lost-vs-steps", "Attention lost while decoding", caption, y, read)
}

/// What the oracle keeps of the attention and the policy does not.
pub fn regret(data: &Data) -> Option<Chart> {
    let all = long_answers(data, |_| true);
    let oracles: BTreeMap<String, &Record> = all
        .iter()
        .filter(|record| policy(record) == ORACLE)
        .map(|record| (Cell { policy: None, ..record.cell.clone() }.id(), *record))
        .collect();
    let records = long_answers(data, |name| !palette::is_baseline(name) && name != ORACLE);
    let y = Axis { label: "regret (difference of attention kept)".into(), field: "regret", quantity: Quantity::Gap };
    let caption = "Share of the dense attention that the oracle's tokens hold and the policy's do not, step by step. \
                   The oracle judges once, after prefill, knowing all queries to come; it keeps every new token, so \
                   it holds more bytes than a policy that goes on evicting, and part of the regret is these bytes. \
                   Below 0 a policy keeps more than the oracle.";
    let read = |record: &Record, step: &Step| {
        let oracle = oracles.get(&Cell { policy: None, ..record.cell.clone() }.id())?;
        let steps = &oracle.eviction.as_ref()?.steps;
        let theirs = steps.iter().find(|other| other.new_tokens == step.new_tokens)?;
        Some(theirs.attention_mass_kept - step.attention_mass_kept)
    };
    chart(data, &records, "regret-vs-steps", "Regret against the oracle while decoding", caption, y, read)
}

/// The records with a long course of steps whose policy's name is `wanted`, at the longest context that has any.
fn long_answers<'a>(data: &Data<'a>, wanted: impl Fn(&str) -> bool) -> Vec<&'a Record> {
    let mut records = data.of(Measure::Evict);
    records.retain(|record| {
        let long = record.cell.new_tokens >= LEAST_STEPS && record.eviction.is_some();
        record.status == Status::Ok && long && wanted(&policy(record))
    });
    let longest = records.iter().map(|record| record.cell.context_tokens).max();
    records.retain(|record| Some(record.cell.context_tokens) == longest);
    records
}

fn chart(
    data: &Data,
    records: &[&Record],
    id: &str,
    title: &str,
    caption: &str,
    y: Axis,
    read: impl Fn(&Record, &Step) -> Option<f64>,
) -> Option<Chart> {
    // The full cache has no budget, which is no difference worth a name.
    let mut budgeted = records.to_vec();
    budgeted.retain(|record| record.cell.budget.is_some());
    let naming = Naming::over(if budgeted.is_empty() { records } else { &budgeted }, &[CONTEXT, HEADS, KERNEL, BUDGET]);
    let series = data.series_of(records, &naming, policy, |record| {
        let steps = record.eviction.iter().flat_map(|eviction| &eviction.steps);
        let reading = |step: &Step| {
            let y = read(record, step)?;
            Some((step.new_tokens.to_string(), Reading::measured(step.new_tokens as f64, y, None)))
        };
        steps.filter_map(reading).collect::<Vec<_>>()
    });
    (!series.is_empty()).then(|| Chart {
        id: id.into(),
        title: title.into(),
        subtitle: naming.common,
        caption: caption.into(),
        x: Axis { label: "tokens decoded".into(), field: "new_tokens", quantity: Quantity::Steps },
        y,
        interval_fields: ("low", "high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}
