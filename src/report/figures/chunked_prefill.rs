//! Prefill in chunks, with eviction after each: peak memory and drift against the size of a chunk.

use super::{Data, Reading, policy};
use crate::experiment::record::Record;
use crate::named::Named;
use crate::policy::{Assets, PARTS, Part, Registry};
use crate::report::chart::{Axis, Chart, Quantity};
use crate::report::naming::{BUDGET, CONTEXT, HEADS, KERNEL, Naming};
use crate::report::palette;
use std::collections::BTreeMap;

/// The part of a policy's text that sets the size of its chunks.
const PART: &str = "+chunks";

/// Peak KV bytes.
pub fn kv_bytes(data: &Data) -> Option<Chart> {
    let y = Axis { label: "peak KV bytes".into(), field: "kv_bytes_peak", quantity: Quantity::Bytes };
    let read = |record: &Record| Some((record.eviction.as_ref()?.kv_bytes_peak as f64, None));
    let chart = chart(data, y, read)?;
    Some(Chart { id: "kv-peak-vs-chunk".into(), title: "Peak KV bytes against the size of a chunk".into(), ..chart })
}

/// Peak memory.
pub fn memory(data: &Data) -> Option<Chart> {
    let label = "peak memory beside the inputs".into();
    let y = Axis { label, field: "arena_growth_bytes", quantity: Quantity::Bytes };
    let read = |record: &Record| Some((record.memory.as_ref()?.arena_growth_bytes as f64, None));
    let chart = chart(data, y, read)?;
    let title = "Peak memory against the size of a chunk".into();
    Some(Chart { id: "memory-peak-vs-chunk".into(), title, ..chart })
}

/// Drift.
pub fn drift(data: &Data) -> Option<Chart> {
    let y = Axis { label: "drift (relative L2)".into(), field: "rel_l2", quantity: Quantity::Drift };
    let read = |record: &Record| {
        let drift = record.drift.as_ref()?;
        Some((drift.rel_l2, Some((drift.ci95_low, drift.ci95_high))))
    };
    let chart = chart(data, y, read)?;
    Some(Chart { id: "drift-vs-chunk".into(), title: "Drift against the size of a chunk".into(), ..chart })
}

/// A figure over sizes of chunks, without name and title.
fn chart(data: &Data, y: Axis, read: impl Fn(&Record) -> Option<(f64, Option<(f64, f64)>)>) -> Option<Chart> {
    let mut records = data.evicted_at_longest_context();
    let chunks: BTreeMap<String, usize> =
        records.iter().filter_map(|record| Some((policy(record), chunk_tokens(&policy(record))?))).collect();
    let methods: Vec<String> = chunks.keys().map(|text| without_chunks(text)).collect();
    records.retain(|record| methods.contains(&without_chunks(&policy(record))));
    let naming = Naming::over(&records, &[CONTEXT, HEADS, KERNEL, BUDGET]);
    // In one piece is a chunk as long as the context.
    let size = |record: &Record| chunks.get(&policy(record)).map_or(record.cell.context_tokens, |tokens| *tokens);
    let lead = |record: &Record| without_chunks(&policy(record));
    let series = data.series(
        &records,
        &naming,
        lead,
        |record| size(record).to_string(),
        |record| {
            let (y, ci95) = read(record)?;
            Some(Reading::measured(size(record) as f64, y, ci95))
        },
    );
    (!series.is_empty()).then(|| Chart {
        id: String::new(),
        title: String::new(),
        subtitle: naming.common,
        caption:
            "Prefill comes in chunks; after each the policy evicts and the cache shrinks to its budget. The point \
                  at the length of the context is prefill in one piece, evicted once at its end."
                .into(),
        x: Axis { label: "tokens of a prefill chunk".into(), field: "chunk_tokens", quantity: Quantity::Tokens },
        y,
        interval_fields: ("low", "high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}

/// Tokens of a policy's chunks, as its text says; else as the built-in policy of that name has them by itself. `None` where
/// prefill comes in one piece, and for a policy that is not built in and says nothing: records do not hold it.
fn chunk_tokens(policy: &str) -> Option<usize> {
    if palette::is_baseline(policy) {
        return None;
    }
    let said = policy.split('+').skip(1).filter_map(|part| part.parse::<Named>().ok()).find_map(|part| {
        let entry = PARTS.iter().find(|entry| entry.name == part.name)?;
        match (entry.build)(&part, &mut Assets::new(None)).ok()? {
            Part::Chunks(tokens) => Some(tokens),
            _ => None,
        }
    });
    said.or_else(|| Registry::default().policy(policy).ok()?.schedule.chunk_tokens)
}

/// A policy's text without the part that sets its chunks: `snapkv+chunks:tokens=512+ada` is `snapkv+ada`.
fn without_chunks(policy: &str) -> String {
    match policy.split_once(PART) {
        Some((before, after)) => format!("{before}{}", after.find('+').map_or("", |next| &after[next..])),
        None => policy.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_known_by_what_is_not_its_chunks() {
        for (text, rest, tokens) in [
            ("snapkv", "snapkv", None),
            ("snapkv+chunks", "snapkv", Some(1024)),
            ("snapkv+chunks:tokens=512", "snapkv", Some(512)),
            ("snapkv:window=32+chunks:tokens=256+ada", "snapkv:window=32+ada", Some(256)),
            ("full", "full", None),
            ("one of the user's", "one of the user's", None),
            ("own+chunks:tokens=64", "own", Some(64)),
        ] {
            assert_eq!((without_chunks(text).as_str(), chunk_tokens(text)), (rest, tokens), "{text}");
        }
    }
}
