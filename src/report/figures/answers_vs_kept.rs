//! What models still answer against what is kept: scores and divergence over tokens and over bytes. Of several formats of keys
//! and values only plain elements are drawn; `formats_and_tokens` has the others.

use super::{Data, kept_axis};
use crate::experiment::answers::Estimate;
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::report::chart::{Axis, Chart, Interval, Point, Quantity, Series};
use crate::report::combined::is_compared;
use crate::report::pools::{Pool, all_pools, answers, is_text, pools};
use std::collections::BTreeMap;

/// Score against the fraction of tokens kept.
pub fn score_by_budget(data: &Data) -> Option<Chart> {
    let words = ["accuracy-vs-budget", "Accuracy against budget"];
    chart(data, pools, words, kept_axis(false), kept_fraction, score_axis(), Pool::score)
}

/// Score against the bytes that stay.
pub fn score_by_bytes(data: &Data) -> Option<Chart> {
    let bytes = Axis { label: "live KV bytes".into(), field: "kv_bytes_live", quantity: Quantity::Bytes };
    let words = ["accuracy-vs-kv-bytes", "Accuracy against live KV bytes"];
    chart(
        data,
        pools,
        words,
        bytes,
        |pool| pool.mean(|answers| answers.kv_bytes_live as f64),
        score_axis(),
        Pool::score,
    )
}

/// Divergence from the full cache against the fraction of tokens kept; it says something of tasks too that the model cannot do.
pub fn divergence_by_budget(data: &Data) -> Option<Chart> {
    let axis = Axis { label: "KL divergence (nats per token)".into(), field: "kl_nats", quantity: Quantity::Drift };
    let words = ["kl-vs-budget", "Divergence of the next token against budget"];
    chart(data, all_pools, words, kept_axis(false), kept_fraction, axis, Pool::kl_nats)
}

/// The same of a text that is asked for beside tasks, which the figure above is of then.
pub fn text_divergence_by_budget(data: &Data) -> Option<Chart> {
    let has_tasks = data.of(Measure::EVAL).iter().any(|record| answers(record).is_some() && !is_text(record));
    let axis = Axis { label: "KL divergence (nats per token)".into(), field: "kl_nats", quantity: Quantity::Drift };
    let words = ["text-kl-vs-budget", "Divergence of a text's next token against budget"];
    let of_text = || chart(data, of_texts, words, kept_axis(false), kept_fraction, axis, Pool::kl_nats);
    has_tasks.then(of_text).flatten()
}

fn of_texts<'a>(records: &[&'a Record]) -> (Vec<Pool<'a>>, String) {
    all_pools(&records.iter().copied().filter(|record| is_text(record)).collect::<Vec<_>>())
}

/// What a policy keeps, or of one that keeps everything its budget.
fn kept_fraction(pool: &Pool<'_>) -> f64 {
    budget_of_all(pool).unwrap_or_else(|| pool.mean(|answers| answers.kept_fraction))
}

/// The budget of a policy that keeps everything under it and reads a part, as a fraction of the context; in bytes it is none.
fn budget_of_all(pool: &Pool<'_>) -> Option<f64> {
    let budget: f64 = pool.budget.parse().ok()?;
    let context_tokens = pool.records[0].cell.context_tokens as f64;
    let fraction = if budget <= 1.0 { budget } else { budget / context_tokens };
    (pool.mean(|answers| answers.kept_fraction) >= 1.0 && fraction < 1.0).then_some(fraction)
}

fn score_axis() -> Axis {
    Axis { label: "score (mean over tasks)".into(), field: "accuracy", quantity: Quantity::Share }
}

fn chart<'d>(
    data: &Data<'d>,
    pools: fn(&[&'d Record]) -> (Vec<Pool<'d>>, String),
    [id, title]: [&str; 2],
    x: Axis,
    place: fn(&Pool<'d>) -> f64,
    y: Axis,
    value: fn(&Pool<'d>) -> Option<Estimate>,
) -> Option<Chart> {
    let (pools, subtitle) = pools(&data.of(Measure::EVAL));
    let has_budgets = pools.iter().any(|pool| budget_of_all(pool).is_some());
    let x = if x == kept_axis(false) { kept_axis(has_budgets) } else { x };
    let mut series: BTreeMap<(String, String), Vec<Point>> = BTreeMap::new();
    for pool in pools.iter().filter(|pool| is_compared(pool, &pools) && !pool.is_memory()) {
        // A logarithm has no place for a full cache's divergence from itself.
        let Some(found) = value(pool).filter(|found| y.shows(found.mean)) else { continue };
        series.entry((pool.policy.into(), pool.name.clone())).or_default().push(Point {
            x: place(pool),
            y: Some(found.mean),
            interval: Some(Interval { low: found.ci95_low, high: found.ci95_high, kind: "ci95" }),
            model: None,
            status: Status::Ok,
            cell_ids: pool.cell_ids(),
        });
    }
    let styles = data.styles(series.keys());
    let series = series.into_iter().zip(styles).map(|(((_, name), mut points), style)| {
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
        Series { name, style, points }
    });
    let series: Vec<Series> = series.collect();
    (!series.is_empty()).then(|| Chart {
        id: id.into(),
        title: title.into(),
        subtitle,
        caption:
            "A point is the mean over tasks at the longest context; its band is the 95% interval over samples. All \
                  policies answer the same samples."
                .into(),
        x,
        y,
        interval_fields: ("ci95_low", "ci95_high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}
