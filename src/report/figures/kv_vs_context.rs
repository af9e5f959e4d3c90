//! Bytes of keys and values that stay, against context.
//!
//! A budget decides how many bytes stay; policies only choose which. Where all policies of a budget keep the same
//! bytes, or where there are too many curves to tell apart, a budget's policies become one curve.

use super::{Data, Reading, budget, context, policy};
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::report::chart::{Axis, Chart, MOST_CURVES, Quantity, Series};
use crate::report::naming::{HEADS, KERNEL, Naming};
use crate::report::palette;
use std::collections::{BTreeMap, BTreeSet};

/// The figure.
pub fn chart(data: &Data) -> Option<Chart> {
    let mut records = data.over_contexts(Measure::EVICT);
    records.retain(|record| record.status == Status::Ok && record.eviction.is_some());
    let naming = Naming::over(&records, &[HEADS, KERNEL]);
    let single = data.series(&records, &naming, alone, context, read);
    let mut policies: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for record in records.iter().filter(|record| !palette::is_baseline(&policy(record))) {
        policies.entry(budget(record)).or_default().insert(policy(record));
    }
    let too_many = single.len() > MOST_CURVES;
    let together = |record: &Record| {
        let sharing = policies.get(&budget(record)).filter(|_| !palette::is_baseline(&policy(record)));
        match sharing {
            Some(sharing) if sharing.len() > 1 && (too_many || alike(&single, &budget(record))) => {
                format!("{} policies @{}", sharing.len(), budget(record))
            }
            _ => alone(record),
        }
    };
    let series = data.series(&records, &naming, together, context, read);
    (!series.is_empty()).then(|| Chart {
        id: "kv-vs-context".into(),
        title: "KV cache after eviction".into(),
        subtitle: naming.common,
        caption: "Bytes of the whole pages in use after the eviction that follows prefill, given back to the system \
                  where a page became empty. A band is the range over policies or seeds."
            .into(),
        x: Axis { label: "context (tokens)".into(), field: "context_tokens", quantity: Quantity::Tokens },
        y: Axis { label: "live KV bytes".into(), field: "kv_bytes_live", quantity: Quantity::Bytes },
        interval_fields: ("low", "high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}

fn alone(record: &Record) -> String {
    let policy = policy(record);
    if palette::is_baseline(&policy) { policy } else { format!("{policy}@{}", budget(record)) }
}

/// Whether every curve of a budget runs through the same points.
fn alike(series: &[Series], budget: &str) -> bool {
    let points =
        |series: &Series| series.points.iter().map(|point| (point.x as u64, point.y.map(|y| y as u64))).collect();
    let curves: BTreeSet<Vec<(u64, Option<u64>)>> = series
        .iter()
        .filter(|series| series.name.split_once('@').is_some_and(|(_, rest)| rest == budget))
        .map(points)
        .collect();
    curves.len() == 1
}

fn read(record: &Record) -> Option<Reading> {
    let eviction = record.eviction.as_ref()?;
    Some(Reading::measured(record.cell.context_tokens as f64, eviction.kv_bytes_live as f64, None))
}
