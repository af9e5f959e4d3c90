//! Rounding error of the kernels against context.

use super::{Data, context, drift_at};
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::report::chart::{Axis, Chart, Quantity};
use crate::report::naming::{HEADS, Naming};

/// Of forward passes.
pub fn forward(data: &Data) -> Option<Chart> {
    chart(data, Measure::FORWARD, "drift-vs-context", "Rounding error of a forward pass")
}

/// Of backward passes.
pub fn backward(data: &Data) -> Option<Chart> {
    chart(data, Measure::BACKWARD, "backward-drift-vs-context", "Rounding error of a backward pass")
}

fn chart(data: &Data, measure: Measure, id: &str, title: &str) -> Option<Chart> {
    let mut records = data.over_contexts(measure);
    records.retain(|record| record.status == Status::Ok);
    let naming = Naming::over(&records, &[HEADS]);
    let read = |record: &Record| drift_at(record.cell.context_tokens as f64, record);
    let series = data.series(&records, &naming, |record| record.cell.kernel.clone(), context, read);
    (!series.is_empty()).then(|| Chart {
        id: id.into(),
        title: title.into(),
        subtitle: naming.common,
        caption: "Relative L2 distance from the dense f64 result over the checked rows; the band is the bootstrap 95% \
                  interval, or the range over seeds."
            .into(),
        x: Axis { label: "context (tokens)".into(), field: "context_tokens", quantity: Quantity::Tokens },
        y: Axis { label: "relative L2 error".into(), field: "rel_l2", quantity: Quantity::Drift },
        interval_fields: ("ci95_low", "ci95_high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}
