//! What it takes to hold what heads that keep different counts keep: as planned, with page lists, without them, masked.

use super::{Data, Picture, policy};
use crate::experiment::record::{Eviction, Record};
use crate::report::chart::{Axis, MOST_CURVES, Quantity};
use crate::report::palette::{self, Colour};
use crate::report::rows::{Kind, Mark, Row, Rows};

/// The kinds of bytes, from least to most.
const KINDS: [(&str, Colour); 4] = [
    ("planned: the budget, to the token", Colour(0x99, 0x99, 0x99)),
    ("in use: pages of each head", Colour(0x00, 0x72, 0xB2)),
    ("padded: each layer's fullest head for all", Colour(0xE6, 0x9F, 0x00)),
    ("masked: nothing is given back", Colour(0xD5, 0x5E, 0x00)),
];

/// The figure; `None` where heads keep equal counts.
pub fn rows(data: &Data) -> Option<Picture> {
    let (mut records, common) = data.evicted_layers();
    records.retain(|(_, record)| !palette::is_oracle(&policy(record)));
    let padded = |record: &Record| record.eviction.as_ref().map_or(0, |eviction| eviction.kv_bytes_padded);
    let is_ragged = |record: &Record| {
        record.eviction.as_ref().is_some_and(|eviction| {
            eviction.kept_by_head.iter().any(|layer| layer.iter().any(|kept| (kept - layer[0]).abs() > 1e-9))
        })
    };
    if !records.iter().any(|(_, record)| is_ragged(record)) {
        return None;
    }
    if records.len() > MOST_CURVES {
        records.retain(|(_, record)| is_ragged(record));
    }
    records.sort_by_key(|(name, record)| (padded(record), name.clone()));
    let row = |(name, record): (String, &Record)| {
        let eviction = record.eviction.as_ref()?;
        let value = |bytes: u64| Some((bytes as f64, vec![record.cell_id.clone()]));
        let bytes = [planned(record, eviction), eviction.kv_bytes_live, eviction.kv_bytes_padded];
        let values = bytes.into_iter().chain([eviction.kv_bytes_dense]).map(value).collect();
        Some(Row { name, values })
    };
    Some(Picture::Rows(Rows {
        id: "ragged-memory".into(),
        title: "KV bytes of budget allocations that differ from head to head".into(),
        subtitle: common,
        caption: "Bytes that hold the same tokens, after prefill. In use: measured, whole pages of a list for each \
                  head. Padded: a rectangular cache with room for as much as the fullest head of a layer keeps. \
                  Masked: tokens that are only hidden stay in memory."
            .into(),
        axis: Axis { label: "KV bytes".into(), field: "kv_bytes", quantity: Quantity::Size },
        mark: Mark::Bar,
        kinds: KINDS.into_iter().map(|(name, colour)| Kind { name: name.into(), colour }).collect(),
        rows: records.into_iter().filter_map(row).collect(),
        limit: None,
    }))
}

/// KV bytes of the budget, without pages.
fn planned(record: &Record, eviction: &Eviction) -> u64 {
    let cell = &record.cell;
    let token_bytes = cell.kv_format().token_bytes(cell.head_dim) as usize;
    (eviction.budget_tokens * cell.layers * cell.batch * cell.kv_heads * token_bytes) as u64
}
