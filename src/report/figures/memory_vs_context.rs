//! Peak memory of the kernels against context: measured points on the line that the formula predicts.

use super::{Data, Reading, context};
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::report::chart::{Axis, Chart, Quantity, Rule};
use crate::report::naming::{HEADS, Naming};
use crate::units;

/// Of forward passes.
pub fn forward(data: &Data) -> Option<Chart> {
    chart(data, Measure::FORWARD, "memory-vs-context", "Memory of a forward pass")
}

/// Of backward passes.
pub fn backward(data: &Data) -> Option<Chart> {
    chart(data, Measure::BACKWARD, "backward-memory-vs-context", "Memory of a backward pass")
}

fn chart(data: &Data, measure: Measure, id: &str, title: &str) -> Option<Chart> {
    let records = data.over_contexts(measure);
    let naming = Naming::over(&records, &[HEADS]);
    let series = data.series(&records, &naming, |record| record.cell.kernel.clone(), context, read);
    let ran_out = || records.iter().filter(|record| record.status == Status::Oom);
    let limits = ran_out().filter_map(|record| record.memory.as_ref()).map(|memory| memory.limit_bytes);
    let rule = |limit: u64| Rule { y: limit as f64, label: format!("memory limit {}", units::bytes(limit)) };
    (!series.is_empty()).then(|| Chart {
        id: id.into(),
        title: title.into(),
        subtitle: naming.common,
        caption: "Points: peak that the arena measured, inputs included. Line: peak predicted from the shapes before \
                  the cell ran. A cross marks a cell that ran out of memory, at its predicted peak."
            .into(),
        x: Axis { label: "context (tokens)".into(), field: "context_tokens", quantity: Quantity::Tokens },
        y: Axis { label: "peak memory".into(), field: "peak_bytes", quantity: Quantity::Bytes },
        interval_fields: ("low", "high"),
        model_field: Some("predicted_peak_bytes"),
        series,
        rules: limits.filter(|limit| *limit < u64::MAX).min().map(rule).into_iter().collect(),
    })
}

fn read(record: &Record) -> Option<Reading> {
    let memory = record.memory.as_ref()?;
    Some(Reading {
        x: record.cell.context_tokens as f64,
        y: (record.status == Status::Ok).then_some(memory.peak_bytes as f64),
        interval: None,
        model: Some(memory.predicted_peak_bytes as f64),
    })
}
