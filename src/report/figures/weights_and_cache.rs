//! Fewer bits of the weights, and a smaller cache beside them: divergence against the bytes of both.

use super::Data;
use crate::experiment::measure::Measure;
use crate::experiment::record::Status;
use crate::report::chart::{Axis, Chart, Interval, Point, Quantity, Series};
use crate::report::combined::{Spent, front, of_whole};
use crate::report::pools::all_pools;
use std::collections::BTreeMap;

/// Name of the figure.
pub const ID: &str = "kl-vs-weights-and-cache";

/// For each format of the weights the Pareto front over formats of the cache, policies and budgets.
pub fn chart(data: &Data) -> Option<Chart> {
    let (pools, subtitle) = all_pools(&data.of(Measure::EVAL));
    let mut by_weights: BTreeMap<(String, String), Vec<Spent>> = BTreeMap::new();
    for one in of_whole(&pools).into_iter().flatten() {
        let name =
            one.weights().map_or("weights as in the file".into(), |weights| format!("weights {}", weights.words()));
        let of_question = format!("{name}{}", one.pool.question);
        by_weights.entry((name, of_question)).or_default().push(one);
    }
    let y = Axis { label: "KL divergence (nats per token)".into(), field: "kl_nats", quantity: Quantity::Drift };
    let styles = data.styles(by_weights.keys());
    let series = by_weights.into_iter().zip(styles).map(|(((_, name), spent), style)| {
        let points =
            front(spent, |one| one.whole_bytes).into_iter().map(|Spent { pool, whole_bytes, kl_nats, .. }| Point {
                x: whole_bytes,
                y: Some(kl_nats.mean),
                interval: Some(Interval { low: kl_nats.ci95_low, high: kl_nats.ci95_high, kind: "ci95" }),
                model: None,
                status: Status::Ok,
                cell_ids: pool.cell_ids(),
            });
        Series { name, style, points: points.collect() }
    });
    let series: Vec<Series> = series.collect();
    (!series.is_empty()).then(|| Chart {
        id: ID.into(),
        title: "Smaller weights, a smaller cache: divergence of the next token against the bytes of both".into(),
        subtitle,
        caption: "Each line is a format of the weights, with the formats of keys and values, policies and budgets that serve \
                  it best (its Pareto front): no other of its cells loses less with as few bytes. The divergence is from \
                  the model as its files have it with its full cache. The band is the 95% interval over samples; the CSV has \
                  each point's format, policy and budget."
            .into(),
        x: Axis { label: "weights and live KV bytes".into(), field: "whole_bytes", quantity: Quantity::Bytes },
        y,
        interval_fields: ("ci95_low", "ci95_high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}
