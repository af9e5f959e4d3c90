//! Memories in place of the cache: perplexity of a text and score of tasks against the bytes that they hold, and perplexity
//! against their window.

use super::Data;
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::named::Named;
use crate::report::chart::{Axis, Chart, Interval, Point, Quantity, Rule, Series};
use crate::report::pools::{Pool, all_pools, answers, is_text, pools};
use std::collections::BTreeMap;

/// The window of memories that do not say one.
const WINDOW: usize = 128;

/// Perplexity against KV bytes; points of a memory differ in its slots, those of a policy in its budget.
pub fn by_bytes(data: &Data) -> Option<Chart> {
    let chart = chart(data, all_pools(&texts(data)), bytes_axis(), bytes, &SIZES, perplexity)?;
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

/// Score of tasks against KV bytes, likewise.
pub fn score_by_bytes(data: &Data) -> Option<Chart> {
    let mut records = data.of(Measure::EVAL);
    records.retain(|record| !is_text(record));
    let chart = chart(data, pools(&records), bytes_axis(), bytes, &SIZES, score)?;
    Some(Chart {
        id: "score-vs-kv-bytes".into(),
        title: "Score against KV bytes: memories and policies".into(),
        caption: "Mean score over tasks, asked behind a context that was read through each memory, or was evicted from by \
                  each policy. Points of a memory differ in its slots or in the tokens that it reads, those of a policy in its \
                  budget; the line is the full cache. Higher is better; the band is the 95% interval over samples."
            .into(),
        y: Axis { label: "score (mean over tasks)".into(), field: "accuracy", quantity: Quantity::Share },
        ..chart
    })
}

/// Perplexity against the window of a memory.
pub fn by_window(data: &Data) -> Option<Chart> {
    let x = Axis { label: "tokens of the window".into(), field: "window_tokens", quantity: Quantity::Tokens };
    let window = |pool: &Pool| Some(memory(pool)?.count("window", WINDOW, 1).ok()? as f64);
    let mut chart = chart(data, all_pools(&texts(data)), x, window, &["window"], perplexity)?;
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

/// What makes a memory larger, or lets it read more.
const SIZES: [&str; 2] = ["slots", "top"];

fn bytes_axis() -> Axis {
    Axis { label: "live KV bytes".into(), field: "kv_bytes_live", quantity: Quantity::Bytes }
}

fn bytes(pool: &Pool) -> Option<f64> {
    Some(pool.mean(|answers| answers.kv_bytes_live as f64))
}

/// Tasks beside a text are drawn by themselves.
fn texts<'a>(data: &Data<'a>) -> Vec<&'a Record> {
    data.of(Measure::EVAL).into_iter().filter(|record| is_text(record)).collect()
}

/// Perplexity with its interval, and that of the full cache.
fn perplexity(pool: &Pool) -> Option<(f64, Interval, f64)> {
    let [record] = pool.records[..] else { return None };
    let found = answers(record)?;
    let (nats, full) = (found.nll_nats, found.nll_nats.mean - found.nll_difference_nats.mean);
    let interval = Interval { low: nats.ci95_low.exp(), high: nats.ci95_high.exp(), kind: "ci95" };
    Some((nats.mean.exp(), interval, full.exp()))
}

/// Score with its interval, and that of the full cache.
fn score(pool: &Pool) -> Option<(f64, Interval, f64)> {
    let found = pool.score()?;
    let full = found.mean - pool.mean(|answers| answers.accuracy_difference.map_or(0.0, |difference| difference.mean));
    Some((found.mean, Interval { low: found.ci95_low, high: found.ci95_high, kind: "ci95" }, full))
}

/// Series by what is chosen without the parameters that make its points; `None` where no memory is among them.
fn chart(
    data: &Data,
    (pools, subtitle): (Vec<Pool>, String),
    x: Axis,
    place: impl Fn(&Pool) -> Option<f64>,
    varied: &[&str],
    value: impl Fn(&Pool) -> Option<(f64, Interval, f64)>,
) -> Option<Chart> {
    pools.iter().find(|pool| pool.is_memory())?;
    // By name, with one of those that it stands for: its colour is that of the series.
    let mut series: BTreeMap<String, (String, Vec<Point>)> = BTreeMap::new();
    let mut full: Vec<f64> = Vec::new();
    for pool in &pools {
        let Some((y, interval, of_full)) = value(pool) else { continue };
        // The same number, but for rounding, of every pool of a model.
        if full.iter().all(|known| (known - of_full).abs() > 1e-6 * of_full.abs()) {
            full.push(of_full);
        }
        let Some(x) = place(pool).filter(|_| pool.policy != "full") else { continue };
        let without = |named: Named| varied.iter().fold(named, |named, parameter| named.without(parameter)).to_string();
        let name = memory(pool).map_or(pool.policy.to_string(), without);
        let of_name =
            series.entry(format!("{name}{}", pool.apart())).or_insert_with(|| (pool.policy.into(), Vec::new()));
        of_name.1.push(Point {
            x,
            y: Some(y),
            interval: Some(interval),
            model: None,
            status: Status::Ok,
            cell_ids: pool.cell_ids(),
        });
    }
    let (names, points): (Vec<(String, String)>, Vec<Vec<Point>>) =
        series.into_iter().map(|(name, (lead, points))| ((lead, name), points)).unzip();
    let styles = data.styles(names.iter());
    let series: Vec<Series> = names
        .iter()
        .zip(styles)
        .zip(points)
        .map(|(((_, name), style), mut points)| {
            points.sort_by(|a, b| a.x.total_cmp(&b.x));
            Series { name: name.clone(), style, points }
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
        // Of several models, say, each has its own, and a line would be of one of them.
        rules: match full[..] {
            [y] => vec![Rule { y, label: "full cache".into() }],
            _ => Vec::new(),
        },
    })
}

/// The memory of a pool, if it has one.
fn memory(pool: &Pool) -> Option<Named> {
    pool.records.first()?.cell.memory.as_deref()?.parse().ok()
}
