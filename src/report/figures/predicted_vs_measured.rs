//! Predicted bytes against those that the system says were taken: forward passes and evictions on one diagonal.

use super::{Data, Reading};
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::report::chart::{Axis, Chart, Quantity};
use crate::report::naming::Naming;

/// The figure, of configurations that were measured at two contexts or more. Without evictions beside the passes
/// `memory-vs-context` says it all.
pub fn chart(data: &Data) -> Option<Chart> {
    let evicted = data.over_contexts(Measure::EVICT);
    let mut records = data.over_contexts(Measure::FORWARD);
    if evicted.is_empty() || records.is_empty() {
        return None;
    }
    records.extend(evicted);
    let lead = |record: &Record| record.cell.policy.clone().unwrap_or_else(|| record.cell.kernel.clone());
    // All lie on one diagonal, whatever their shapes: a kernel or policy is one series, and a cell one point.
    let cell = |record: &Record| record.cell_id.clone();
    let mut series = data.series(&records, &Naming::over(&[], &[]), lead, cell, read);
    series.iter_mut().for_each(|series| series.style.dashed = true);
    (!series.is_empty()).then(|| Chart {
        id: "predicted-vs-measured".into(),
        title: "Predicted and measured memory".into(),
        subtitle: Naming::over(&records, &[]).common,
        caption: "Points: growth of the process or of the GPU's memory in use, as the system tells it. Dashed line: equal to what was \
                  predicted from the shapes before the cell ran. The arena's own account agrees to the byte."
            .into(),
        x: Axis { label: "predicted growth of memory".into(), field: "predicted_growth_bytes", quantity: Quantity::Bytes },
        y: Axis { label: "measured growth of memory".into(), field: "system_growth_bytes", quantity: Quantity::Bytes },
        interval_fields: ("low", "high"),
        model_field: Some("equal_bytes"),
        series,
        rules: Vec::new(),
    })
}

fn read(record: &Record) -> Option<Reading> {
    let memory = record.memory.as_ref().filter(|_| record.status == Status::Ok)?;
    // Inputs were there before the cell began.
    let inputs = memory.peak_bytes.saturating_sub(memory.arena_growth_bytes);
    let predicted = memory.predicted_peak_bytes.saturating_sub(inputs) as f64;
    let measured = memory.gpu_growth_bytes.or(memory.rss_growth_bytes)? as f64;
    Some(Reading { x: predicted, y: Some(measured), interval: None, model: Some(predicted) })
}
