//! Fewer bits or fewer tokens: divergence against KV bytes for each policy, in the format that serves it best.

use super::Data;
use crate::experiment::measure::Measure;
use crate::experiment::record::Status;
use crate::report::chart::{Axis, Chart, Interval, Point, Quantity, Series};
use crate::report::combined::{Spent, front, of_cache};
use crate::report::pools::{Pool, all_pools};
use std::collections::BTreeMap;

/// Name of the figure.
pub const ID: &str = "kl-vs-bits-and-tokens";

/// Each policy's Pareto front over formats and budgets.
pub fn chart(data: &Data) -> Option<Chart> {
    let (pools, subtitle) = all_pools(&data.of(Measure::EVAL));
    let mut by_policy: BTreeMap<(String, String), Vec<Spent>> = BTreeMap::new();
    for one in of_cache(&pools).into_iter().flatten() {
        let Pool { policy, question, .. } = one.pool;
        by_policy.entry((policy.to_string(), format!("{policy}{question}"))).or_default().push(one);
    }
    let y = Axis { label: "KL divergence (nats per token)".into(), field: "kl_nats", quantity: Quantity::Drift };
    let styles = data.styles(by_policy.keys());
    let series = by_policy.into_iter().zip(styles).map(|(((_, name), spent), style)| {
        let points = front(spent, |one| one.bytes_per_token).into_iter().map(
            |Spent { pool, bytes_per_token, kl_nats, .. }| Point {
                x: bytes_per_token,
                y: Some(kl_nats.mean),
                interval: Some(Interval { low: kl_nats.ci95_low, high: kl_nats.ci95_high, kind: "ci95" }),
                model: None,
                status: Status::Ok,
                cell_ids: pool.cell_ids(),
            },
        );
        Series { name, style, points: points.collect() }
    });
    let series: Vec<Series> = series.collect();
    (!series.is_empty()).then(|| Chart {
        id: ID.into(),
        title: "Fewer bits, fewer tokens: divergence of the next token against KV bytes".into(),
        subtitle,
        caption: "Each line is a policy in the formats of keys and values that serve it best (its Pareto front): no \
                  other of its cells loses less with as few bytes. The full cache evicts nothing, and has formats alone. The \
                  band is the 95% interval over samples; the CSV has each point's format and budget."
            .into(),
        x: Axis {
            label: "live KV bytes for each token of context".into(),
            field: "kv_bytes",
            quantity: Quantity::Bytes,
        },
        y,
        interval_fields: ("ci95_low", "ci95_high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}
