use super::{Data, Reading, budget, policy};
use crate::experiment::measure::Measure;
use crate::experiment::record::Record;
use crate::report::chart::{Axis, Chart, Quantity};
use crate::report::naming::{CONTEXT, HEADS, KERNEL, Naming};

/// Peak memory of a policy against its budget.
pub fn chart(data: &Data) -> Option<Chart> {
    let records = data.of(Measure::EVICT);
    // What all records have in common stands once below the title; what differs becomes part of a curve's name.
    let naming = Naming::over(&records, &[CONTEXT, HEADS, KERNEL]);
    let series = data.series(&records, &naming, policy, budget, read);
    (!series.is_empty()).then(|| Chart {
        id: "peak-vs-budget".into(),
        title: "Peak memory against budget".into(),
        subtitle: naming.common,
        caption: "Peak bytes of prefill, eviction and decode steps. Lower is better.".into(),
        x: Axis {
            label: "tokens kept (fraction of context)".into(),
            field: "kept_fraction",
            quantity: Quantity::Fraction,
        },
        y: Axis { label: "peak memory".into(), field: "peak_bytes", quantity: Quantity::Bytes },
        interval_fields: ("low", "high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}

fn read(record: &Record) -> Option<Reading> {
    let kept = record.eviction.as_ref()?.kept_fraction;
    Some(Reading::measured(kept, record.memory.as_ref()?.peak_bytes as f64, None))
}
