//! What models still answer against what is kept: scores and divergence over tokens and over bytes.

use super::Data;
use crate::experiment::answers::{Answers, Estimate};
use crate::experiment::cell::Measure;
use crate::experiment::record::Status;
use crate::report::answers::{Pool, pools};
use crate::report::chart::{Axis, Chart, Interval, Point, Quantity, Series};

/// Score against the fraction of tokens kept.
pub fn score_by_budget(data: &Data) -> Option<Chart> {
    chart(
        data,
        ["accuracy-vs-budget", "Accuracy against budget"],
        kept,
        score_axis(),
        |answers| answers.kept_fraction,
        Pool::score,
    )
}

/// Score against the bytes that stay.
pub fn score_by_bytes(data: &Data) -> Option<Chart> {
    let bytes = Axis { label: "live KV bytes".into(), field: "kv_bytes_live", quantity: Quantity::Bytes };
    let words = ["accuracy-vs-kv-bytes", "Accuracy against live KV bytes"];
    chart(data, words, || bytes.clone(), score_axis(), |answers| answers.kv_bytes_live as f64, Pool::score)
}

/// Divergence from the full cache against the fraction of tokens kept.
pub fn divergence_by_budget(data: &Data) -> Option<Chart> {
    let axis = Axis { label: "KL divergence (nats per token)".into(), field: "kl_nats", quantity: Quantity::Drift };
    let words = ["kl-vs-budget", "Divergence of the next token against budget"];
    chart(data, words, kept, axis, |answers| answers.kept_fraction, Pool::kl_nats)
}

fn kept() -> Axis {
    Axis { label: "tokens kept (fraction of context)".into(), field: "kept_fraction", quantity: Quantity::Fraction }
}

fn score_axis() -> Axis {
    Axis { label: "score (mean over tasks)".into(), field: "accuracy", quantity: Quantity::Share }
}

fn chart(
    data: &Data,
    [id, title]: [&str; 2],
    x_axis: impl Fn() -> Axis,
    y: Axis,
    x: impl Fn(&Answers) -> f64 + Copy,
    value: impl Fn(&Pool) -> Option<Estimate>,
) -> Option<Chart> {
    let (pools, subtitle) = pools(&data.of(Measure::Eval));
    let mut series: Vec<(&str, Series)> = Vec::new();
    let names: Vec<(String, String)> = {
        let mut names: Vec<_> = pools.iter().map(|pool| (pool.policy.to_string(), pool.name.clone())).collect();
        names.sort();
        names.dedup();
        names
    };
    let styles = data.styles(names.iter());
    for pool in &pools {
        // A logarithm has no place for a full cache's divergence from itself.
        let Some(found) = value(pool).filter(|found| y.shows(found.mean)) else { continue };
        let point = Point {
            x: pool.mean(x),
            y: Some(found.mean),
            interval: Some(Interval { low: found.ci95_low, high: found.ci95_high, kind: "ci95" }),
            model: None,
            status: Status::Ok,
            cell_ids: pool.cell_ids(),
        };
        match series.iter_mut().find(|(name, _)| *name == pool.name) {
            Some((_, series)) => series.points.push(point),
            None => {
                let place = names.iter().position(|(_, name)| *name == pool.name).unwrap_or(0);
                series
                    .push((&pool.name, Series { name: pool.name.clone(), style: styles[place], points: vec![point] }));
            }
        }
    }
    let mut series: Vec<Series> = series.into_iter().map(|(_, series)| series).collect();
    series.iter_mut().for_each(|series| series.points.sort_by(|a, b| a.x.total_cmp(&b.x)));
    (!series.is_empty()).then(|| Chart {
        id: id.into(),
        title: title.into(),
        subtitle,
        caption: "A point is the mean over tasks at the longest context; its band is the bootstrap 95% interval over \
                  samples. All policies answer the same samples."
            .into(),
        x: x_axis(),
        y,
        interval_fields: ("ci95_low", "ci95_high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}
