//! The same KV bytes spent on many heads and few tokens, or on few heads and many tokens.

use super::{Data, Reading, budget, drift_at, policy, rounding};
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::report::chart::{Axis, Chart, Quantity};
use crate::report::naming::{KERNEL, Naming};
use crate::report::palette;
use crate::units;
use std::collections::{BTreeMap, BTreeSet};

/// Time of a decode step.
pub fn latency(data: &Data) -> Option<Chart> {
    let label = "median time of decoding".into();
    let y = Axis { label, field: "median_ns", quantity: Quantity::Nanoseconds };
    let read = |x: f64, record: &Record| Some(Reading::latency(x, record.latency.get("decode")?));
    let caption = "Each line is one shape of cache; its rightmost point is the full cache, the others were evicted to \
                   fewer bytes. The same bytes are more tokens where there are fewer KV heads, and all query heads \
                   look at each of them. Shapes have contexts of their own, so their samples were not taken in turn.";
    let chart = chart(data, y, caption, read)?;
    let title = "Time of decoding at equal KV bytes".into();
    Some(Chart { id: "equal-bytes-latency".into(), title, interval_fields: ("ci95_low_ns", "ci95_high_ns"), ..chart })
}

/// Drift.
pub fn drift(data: &Data) -> Option<Chart> {
    let y = Axis { label: "drift (relative L2)".into(), field: "rel_l2", quantity: Quantity::Drift };
    let caption = "Each line is one shape of cache, evicted to fewer and fewer bytes; drift is from the dense result \
                   of the same shape over its own context.";
    let mut chart = chart(data, y, caption, drift_at)?;
    // The full caches lose nothing but rounding.
    let (rounding, others): (Vec<f64>, Vec<f64>) = chart.y_values().partition(|drift| *drift < rounding::LEAST_LOSS);
    if !others.is_empty() && !rounding.is_empty() {
        for series in &mut chart.series {
            series.points.retain(|point| point.y.is_some_and(|drift| drift >= rounding::LEAST_LOSS));
        }
        chart.series.retain(|series| !series.points.is_empty());
        chart.caption += " The full caches are not drawn: their drift is rounding.";
    }
    let title = "Drift at equal KV bytes".into();
    Some(Chart { id: "equal-bytes-drift".into(), title, interval_fields: ("ci95_low", "ci95_high"), ..chart })
}

/// A figure over live KV bytes, without name and title.
fn chart(data: &Data, y: Axis, caption: &str, read: impl Fn(f64, &Record) -> Option<Reading>) -> Option<Chart> {
    let records = comparable(data);
    let naming = Naming::over(&records, &[KERNEL]);
    let policies: BTreeSet<String> =
        records.iter().map(|record| policy(record)).filter(|name| !palette::is_baseline(name)).collect();
    let lead = |record: &Record| {
        let shape = format!("{} heads, {} tokens", record.cell.heads(), units::tokens(record.cell.context_tokens));
        if policies.len() > 1 { format!("{} {shape}", policy(record)) } else { shape }
    };
    let series = data
        .series(&records, &naming, lead, budget, |record| read(record.eviction.as_ref()?.kv_bytes_live as f64, record));
    let only = policies.first().filter(|_| policies.len() == 1).map(|name| format!("{name} · ")).unwrap_or_default();
    (!series.is_empty()).then(|| Chart {
        id: String::new(),
        title: String::new(),
        subtitle: format!("{only}{}", naming.common),
        caption: caption.into(),
        x: Axis { label: "live KV bytes".into(), field: "kv_bytes_live", quantity: Quantity::Bytes },
        y,
        interval_fields: ("", ""),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}

/// The `ok` records whose KV bytes without eviction are those of another number of KV heads over another context.
fn comparable<'a>(data: &Data<'a>) -> Vec<&'a Record> {
    let mut records = data.of(Measure::EVICT);
    records.retain(|record| record.status == Status::Ok && record.eviction.is_some());
    let dense = |record: &Record| record.eviction.as_ref().map(|eviction| eviction.kv_bytes_dense);
    let mut shapes: BTreeMap<Option<u64>, BTreeSet<(usize, usize)>> = BTreeMap::new();
    for record in &records {
        shapes.entry(dense(record)).or_default().insert((record.cell.kv_heads, record.cell.context_tokens));
    }
    let several = |shapes: &BTreeSet<(usize, usize)>| {
        let heads: BTreeSet<usize> = shapes.iter().map(|(heads, _)| *heads).collect();
        heads.len() > 1 && heads.len() == shapes.len()
    };
    records.retain(|record| several(&shapes[&dense(record)]));
    records
}
