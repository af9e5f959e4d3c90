//! What is lost against what it costs to keep: drift of the policies against the bytes that stay.

use super::{Data, budget, drift_at, policy, rounding};
use crate::report::chart::{Axis, Chart, Quantity};
use crate::report::growth;
use crate::report::naming::{CONTEXT, HEADS, KERNEL, Naming};

/// The figure.
pub fn chart(data: &Data) -> Option<Chart> {
    let records = data.evicted_at_longest_context();
    let naming = Naming::over(&records, &[CONTEXT, HEADS, KERNEL]);
    // Of caches that grow by how much is decoded, those behind prefill say little.
    let is_outgrown = records.iter().any(|record| growth::outgrows(record, records.iter().copied()));
    let series = data.series(&records, &naming, policy, budget, |record| {
        let live = record.eviction.as_ref()?.kv_bytes_live as f64;
        drift_at(if is_outgrown { growth::mean_bytes(record)? } else { live }, record)
    });
    let (label, field, when) = match is_outgrown {
        true => ("mean live KV bytes while decoding", "mean_kv_bytes_live", "on average over the decode steps"),
        false => ("live KV bytes", "kv_bytes_live", "after the eviction that follows prefill"),
    };
    let (series, note) = rounding::split(series);
    (!series.is_empty()).then(|| Chart {
        id: "drift-vs-kv-bytes".into(),
        title: "Drift against live KV bytes".into(),
        subtitle: naming.common,
        caption: format!(
            "Down and to the left is better. Bytes are those of whole pages in use {when}, so a policy that keeps different counts per head pays for its half-empty pages here.{note}"
        ),
        x: Axis { label: label.into(), field, quantity: Quantity::Bytes },
        y: Axis { label: "drift (relative L2)".into(), field: "rel_l2", quantity: Quantity::Drift },
        interval_fields: ("ci95_low", "ci95_high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}
