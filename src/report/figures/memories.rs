//! Memories in place of the cache: perplexity of a text against the bytes that they hold, and against their window.

use super::Data;
use crate::experiment::measure::Measure;
use crate::experiment::record::Status;
use crate::named::Named;
use crate::report::chart::{Axis, Chart, Interval, Point, Quantity, Rule, Series};
use crate::report::pools::{Pool, all_pools, answers};
use std::collections::BTreeMap;

/// The window of memories that do not say one.
const WINDOW: usize = 128;

/// Perplexity against KV bytes; points of a memory differ in its slots, those of a policy in its budget.
pub fn by_bytes(data: &Data) -> Option<Chart> {
    let x = Axis { label: "live KV bytes".into(), field: "kv_bytes_live", quantity: Quantity::Bytes };
    let bytes = |pool: &Pool| Some(pool.mean(|answers| answers.kv_bytes_live as f64));
    let chart = chart(data, x, bytes, "slots")?;
    Some(Chart {
        id: "perplexity-vs-kv-bytes".into(),
        title: "Perplexity against KV bytes: memories and policies".into(),
        caption: "Perplexity of the tokens behind a context that was read through each memory, or was evicted from by each \
                  policy. Points of a memory differ in its slots, those of a policy in its budget; the line is the full cache. \
                  Lower is better; the band is the 95% interval over samples."
            .into(),
        ..chart
    })
}

/// Perplexity against the window of a memory.
pub fn by_window(data: &Data) -> Option<Chart> {
    let x = Axis { label: "tokens of the window".into(), field: "window_tokens", quantity: Quantity::Tokens };
    let window = |pool: &Pool| Some(memory(pool)?.count("window", WINDOW, 1).ok()? as f64);
    let mut chart = chart(data, x, window, "window")?;
    chart.series.retain(|series| series.points.len() > 1);
    (!chart.series.is_empty()).then(|| Chart {
        id: "perplexity-vs-window".into(),
        title: "Perplexity against the window of a memory".into(),
        caption: "A memory reads a text in segments of its window: the tokens before a segment are there only as far as the \
                  memory holds them. The line is the full cache. Lower is better; the band is the 95% interval over samples."
            .into(),
        ..chart
    })
}

/// Series by what is chosen without the parameter that makes its points; `None` where no memory is among them.
fn chart(data: &Data, x: Axis, place: impl Fn(&Pool) -> Option<f64>, varied: &str) -> Option<Chart> {
    let (pools, subtitle) = all_pools(&data.of(Measure::EVAL));
    pools.iter().find(|pool| memory(pool).is_some())?;
    let mut series: BTreeMap<(String, String), Vec<Point>> = BTreeMap::new();
    let mut full = None;
    for pool in &pools {
        let [record] = pool.records[..] else { continue };
        let found = answers(record)?;
        let nats = found.nll_nats;
        full = Some(nats.mean - found.nll_difference_nats.mean);
        let Some(x) = place(pool).filter(|_| pool.policy != "full") else { continue };
        let name = memory(pool).map_or(pool.policy.to_string(), |named| named.without(varied).to_string());
        series.entry((name.clone(), format!("{name}{}", pool.apart()))).or_default().push(Point {
            x,
            y: Some(nats.mean.exp()),
            interval: Some(Interval { low: nats.ci95_low.exp(), high: nats.ci95_high.exp(), kind: "ci95" }),
            model: None,
            status: Status::Ok,
            cell_ids: pool.cell_ids(),
        });
    }
    let styles = data.styles(series.keys());
    let series: Vec<Series> = series
        .into_iter()
        .zip(styles)
        .map(|(((_, name), mut points), style)| {
            points.sort_by(|a, b| a.x.total_cmp(&b.x));
            Series { name, style, points }
        })
        .collect();
    (!series.is_empty()).then(|| Chart {
        id: String::new(),
        title: String::new(),
        subtitle,
        caption: String::new(),
        x,
        y: Axis { label: "perplexity".into(), field: "perplexity", quantity: Quantity::Loss },
        interval_fields: ("ci95_low", "ci95_high"),
        model_field: None,
        series,
        rules: full.map(|nats| Rule { y: nats.exp(), label: "full cache".into() }).into_iter().collect(),
    })
}

/// The memory of a pool, if it has one.
fn memory(pool: &Pool) -> Option<Named> {
    pool.records.first()?.cell.memory.as_deref()?.parse().ok()
}
