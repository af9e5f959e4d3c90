//! What is lost against what it costs to keep: drift of the policies against the bytes that stay.

use super::{Data, budget, drift_at, policy, rounding};
use crate::report::chart::{Axis, Chart, Quantity};
use crate::report::naming::{CONTEXT, HEADS, KERNEL, Naming};

/// The figure.
pub fn chart(data: &Data) -> Option<Chart> {
    let records = data.evicted_at_longest_context();
    let naming = Naming::over(&records, &[CONTEXT, HEADS, KERNEL]);
    let series = data.series(&records, &naming, policy, budget, |record| {
        drift_at(record.eviction.as_ref()?.kv_bytes_live as f64, record)
    });
    let (series, note) = rounding::split(series);
    (!series.is_empty()).then(|| Chart {
        id: "drift-vs-kv-bytes".into(),
        title: "Drift against live KV bytes".into(),
        subtitle: naming.common,
        caption: format!(
            "Down and to the left is better. Bytes are those of whole pages in use after the eviction that follows \
             prefill, so a policy that keeps different counts per head pays for its half-empty pages here.{note}"
        ),
        x: Axis { label: "live KV bytes".into(), field: "kv_bytes_live", quantity: Quantity::Bytes },
        y: Axis { label: "drift (relative L2)".into(), field: "rel_l2", quantity: Quantity::Drift },
        interval_fields: ("ci95_low", "ci95_high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}
