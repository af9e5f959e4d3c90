//! What eviction buys: time of decoding against the bytes that stay. One sample is no median and is not drawn.

use super::{Data, Reading, band, budget, policy};
use crate::report::chart::{Axis, Chart, Quantity, Rule, Series};
use crate::report::naming::{CONTEXT, HEADS, KERNEL, Naming};
use crate::report::palette;

/// The figure.
pub fn chart(data: &Data) -> Option<Chart> {
    let records = data.evicted_at_longest_context();
    let naming = Naming::over(&records, &[CONTEXT, HEADS, KERNEL]);
    let series = data.series(&records, &naming, policy, budget, |record| {
        let decode = record.latency.get("decode").filter(|decode| decode.samples_ns.len() > 1)?;
        Some(Reading::latency(record.eviction.as_ref()?.kv_bytes_live as f64, decode))
    });
    let rules = series.iter().filter(|series| palette::is_baseline(&series.name)).flat_map(rule).collect();
    (!series.is_empty()).then(|| Chart {
        id: "decode-latency-vs-kv-bytes".into(),
        title: "Time of decoding against live KV bytes".into(),
        subtitle: naming.common,
        caption: format!(
            "Medians of the decode phase after eviction; {}, or the range over seeds. Dashed line: the cache that nothing was \
             evicted from.",
            band()
        ),
        x: Axis { label: "live KV bytes".into(), field: "kv_bytes_live", quantity: Quantity::Bytes },
        y: Axis { label: "median time of decoding".into(), field: "median_ns", quantity: Quantity::Nanoseconds },
        interval_fields: ("ci95_low_ns", "ci95_high_ns"),
        model_field: None,
        series,
        rules,
    })
}

fn rule(baseline: &Series) -> Option<Rule> {
    let y = baseline.points.last()?.y?;
    Some(Rule { y, label: baseline.name.clone() })
}
