//! Activations in fewer bits, with a full cache: divergence in one line for each format, a mark for each kind of weights.

use super::{Data, Picture};
use crate::experiment::measure::Measure;
use crate::format::RowFormat;
use crate::report::chart::{Axis, Quantity};
use crate::report::palette::{self, Colour};
use crate::report::pools::{Pool, all_pools};
use crate::report::rows::{Kind, Mark, Row, Rows};

/// The figure; `None` where no activations are rounded.
pub fn rows(data: &Data) -> Option<Picture> {
    let (mut pools, subtitle) = all_pools(&data.of(Measure::EVAL));
    pools.retain(|pool| pool.records[0].cell.kv_format.is_none() && palette::is_baseline(pool.policy));
    let format = |pool: &Pool| pool.records[0].cell.activations;
    let weights = |pool: &Pool| {
        let words = pool.records[0].cell.weights.as_ref().map_or("of the file".into(), |one| one.words());
        words + &pool.question
    };
    let lost = |pool: &Pool| pool.kl_nats().map(|kl| kl.mean).filter(|&mean| mean > 0.0);
    let (mut formats, mut kinds): (Vec<Option<RowFormat>>, Vec<String>) = Default::default();
    // What loses least comes first, whatever weights lose it.
    pools.sort_by(|a, b| lost(a).partial_cmp(&lost(b)).unwrap_or(std::cmp::Ordering::Equal));
    for pool in &pools {
        if !formats.contains(&format(pool)) {
            formats.push(format(pool));
        }
        if !kinds.contains(&weights(pool)) {
            kinds.push(weights(pool));
        }
    }
    let value = |&of: &Option<RowFormat>, kind: &String| {
        let pool = pools.iter().find(|pool| format(pool) == of && weights(pool) == *kind)?;
        Some((lost(pool)?, pool.cell_ids()))
    };
    let row = |of: &Option<RowFormat>| Row {
        name: of.map_or("as they are".into(), |format| format!("in {format}")),
        values: kinds.iter().map(|kind| value(of, kind)).collect(),
    };
    let colour = |index: usize| Colour::sequential(0.25 + 0.75 * index as f64 / kinds.len().max(2) as f64);
    let kind = |(index, name): (usize, &String)| Kind { name: format!("weights {name}"), colour: colour(index) };
    formats.iter().any(Option::is_some).then(|| {
        Picture::Rows(Rows {
            id: "activations-ranked".into(),
            title: "Activations in fewer bits: divergence of the next token".into(),
            subtitle,
            caption: "KL divergence from the model as its files have it, with a full cache of plain elements and activations \
                      as they are; further left is better. Rows are rounded before every linear layer."
                .into(),
            axis: Axis { label: "KL divergence (nats per token)".into(), field: "kl_nats", quantity: Quantity::Drift },
            mark: Mark::Dot,
            kinds: kinds.iter().enumerate().map(kind).collect(),
            rows: formats.iter().map(row).collect(),
            limit: None,
        })
    })
}
