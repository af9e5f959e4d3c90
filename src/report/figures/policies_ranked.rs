//! Many policies at several budgets, best first: drift in one line for each.

use super::{Data, Picture, budget, drift_at, policy};
use crate::experiment::record::Record;
use crate::report::chart::{Axis, MOST_CURVES, Quantity, Series};
use crate::report::naming::{CONTEXT, HEADS, KERNEL, Naming};
use crate::report::palette::{self, Colour};
use crate::report::rows::{Kind, Mark, Row, Rows};
use crate::units;
use std::collections::BTreeMap;

/// The figure; `None` where a plot with a legend holds all curves.
pub fn rows(data: &Data) -> Option<Picture> {
    let mut records = data.evicted_at_longest_context();
    records.retain(|record| !palette::is_baseline(&policy(record)));
    let naming = Naming::over(&records, &[CONTEXT, HEADS, KERNEL]);
    let mut budgets: Vec<(usize, String)> = Vec::new();
    for record in &records {
        let of_record = (tokens(record), budget(record));
        if !budgets.contains(&of_record) {
            budgets.push(of_record);
        }
    }
    budgets.sort();
    let read = |record: &Record| drift_at(tokens(record) as f64, record);
    let series = data.series(&records, &naming, policy, budget, read);
    if series.len() <= MOST_CURVES {
        return None;
    }
    let row = |series: Series| {
        let mut points: BTreeMap<usize, (f64, Vec<String>)> = BTreeMap::new();
        for point in series.points {
            points.extend(point.y.map(|y| (point.x as usize, (y, point.cell_ids))));
        }
        Row { name: series.name, values: budgets.iter().map(|(tokens, _)| points.remove(tokens)).collect() }
    };
    let mut rows: Vec<Row> = series.into_iter().map(row).collect();
    let everywhere: Vec<usize> =
        (0..budgets.len()).filter(|&budget| rows.iter().all(|row| row.values[budget].is_some())).collect();
    rows.sort_by(|a, b| lacks(a).cmp(&lacks(b)).then(mean_log(a, &everywhere).total_cmp(&mean_log(b, &everywhere))));
    let kind = |(index, (tokens, text)): (usize, &(usize, String))| {
        let tokens = units::tokens(*tokens);
        let name = if *text == tokens { format!("{tokens} tokens") } else { format!("{text} ({tokens} tokens)") };
        Kind { name, colour: Colour::sequential((index + 2) as f64 / (budgets.len() + 1) as f64) }
    };
    Some(Picture::Rows(Rows {
        id: "policies-ranked".into(),
        title: "Policies by drift, best first".into(),
        subtitle: naming.common,
        caption: "Relative L2 distance of the decoded outputs from the dense f64 result, one dot for each budget; \
                  further left is better. Lines are in the order of the mean of log drift over the budgets that all have; \
                  those without a drift at some budget stand behind. Oracles see the queries that are still to come."
            .into(),
        axis: Axis { label: "drift (relative L2)".into(), field: "rel_l2", quantity: Quantity::Drift },
        mark: Mark::Dot,
        kinds: budgets.iter().enumerate().map(kind).collect(),
        rows,
        limit: None,
    }))
}

/// Tokens that a record's budget allows each head.
fn tokens(record: &Record) -> usize {
    record.eviction.as_ref().map_or(0, |eviction| eviction.budget_tokens)
}

/// Budgets at which a policy has no drift: its mean would be over easier ones.
fn lacks(row: &Row) -> usize {
    row.values.iter().filter(|value| value.is_none()).count()
}

/// Over the budgets that all have, or without such over its own.
fn mean_log(row: &Row, everywhere: &[usize]) -> f64 {
    let counts = |budget: &usize| everywhere.is_empty() || everywhere.contains(budget);
    let of = row.values.iter().enumerate().filter(|(budget, _)| counts(budget));
    let logs: Vec<f64> = of.filter_map(|(_, value)| Some(value.as_ref()?.0.ln())).collect();
    logs.iter().sum::<f64>() / logs.len() as f64
}
