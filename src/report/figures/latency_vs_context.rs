//! Time of the kernels against context.

use super::{Data, Reading, band, context};
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::report::chart::{Axis, Chart, Quantity};
use crate::report::naming::{HEADS, Naming};

/// Of forward passes.
pub fn forward(data: &Data) -> Option<Chart> {
    chart(data, Measure::FORWARD, "latency-vs-context", "Time of a forward pass")
}

/// Of backward passes.
pub fn backward(data: &Data) -> Option<Chart> {
    chart(data, Measure::BACKWARD, "backward-latency-vs-context", "Time of a backward pass")
}

/// Of decode steps over the whole cache.
pub fn decode(data: &Data) -> Option<Chart> {
    chart(data, Measure::DECODE, "decode-latency-vs-context", "Time of a decode step over the whole cache")
}

fn chart(data: &Data, measure: Measure, id: &str, title: &str) -> Option<Chart> {
    let records = data.over_contexts(measure);
    let naming = Naming::over(&records, &[HEADS]);
    let read = |record: &Record| read(record, measure.name());
    let series = data.series(&records, &naming, |record| record.cell.kernel.clone(), context, read);
    let ran_out = series.iter().flat_map(|series| &series.points).any(|point| point.y.is_none());
    let cross = if ran_out { " A cross on top marks a cell that ran out of memory: it has no time." } else { "" };
    (!series.is_empty()).then(|| Chart {
        id: id.into(),
        title: title.into(),
        subtitle: naming.common,
        caption: format!("Medians; {}, or the range over seeds.{cross}", band()),
        x: Axis { label: "context (tokens)".into(), field: "context_tokens", quantity: Quantity::Tokens },
        y: Axis { label: "median time".into(), field: "median_ns", quantity: Quantity::Nanoseconds },
        interval_fields: ("ci95_low_ns", "ci95_high_ns"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}

fn read(record: &Record, phase: &str) -> Option<Reading> {
    let x = record.cell.context_tokens as f64;
    match record.status {
        Status::Oom => Some(Reading { x, y: None, interval: None, model: None }),
        _ => Some(Reading::latency(x, record.latency.get(phase)?)),
    }
}
