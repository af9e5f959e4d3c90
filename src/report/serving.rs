//! Simulated traces in the tables and in words: shares of the pool, beside what the vLLM paper prints.

use super::summary::status;
use super::text::NOTHING;
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::serving::{Usage, published};
use minijinja::{Value, context};

/// Number of a share, in percent with one digit.
fn percent(share: f64) -> String {
    format!("{:.1}", 100.0 * share)
}

/// What an `ok` simulation gave.
fn usage(record: &Record) -> Option<&Usage> {
    record.serving.as_ref().filter(|_| record.status == Status::Ok)
}

fn names(record: &Record) -> (&str, &str) {
    (record.cell.trace.as_deref().unwrap_or(NOTHING), record.cell.strategy.as_deref().unwrap_or(NOTHING))
}

/// The four printed shares in percent, and the printed batch.
fn printed(record: &Record) -> (Option<String>, Option<String>) {
    let (trace, strategy) = names(record);
    let row = published::of(trace, strategy);
    let number = |share: Option<f64>| share.map_or(NOTHING.into(), |share| format!("{share:.1}"));
    let shares = row.and_then(|row| row.shares_percent).map(|shares| shares.map(number).join(" / "));
    (shares, row.map(|row| format!("{:.2}", row.batch)))
}

/// Headings of the table in `summary.md`.
pub const HEADINGS: [&str; 8] = ["trace", "strategy", "tokens", "reserved", "internal", "external", "batch", "printed"];

/// A line of the table in `summary.md`: shares in percent; last the printed share of tokens and the printed batch.
pub fn line(record: &Record) -> Vec<String> {
    let (trace, strategy) = names(record);
    let share = |read: fn(&Usage) -> f64| usage(record).map_or(NOTHING.into(), |usage| percent(read(usage)));
    let tokens = match usage(record) {
        Some(usage) => percent(usage.token_fraction),
        None => status(record.status).into(),
    };
    let row = published::of(trace, strategy);
    let printed = row.map_or(NOTHING.into(), |row| {
        let tokens = row.shares_percent.and_then(|shares| shares[0]);
        format!("{}, {:.2}", tokens.map_or(NOTHING.into(), |tokens| format!("{tokens:.1}")), row.batch)
    });
    vec![
        trace.into(),
        match record.cell.seed {
            0 => strategy.into(),
            seed => format!("{strategy}, seed {seed}"),
        },
        tokens,
        share(|usage| usage.reserved_fraction),
        share(|usage| usage.internal_fraction),
        share(|usage| usage.external_fraction),
        usage(record).map_or(NOTHING.into(), |usage| format!("{:.2}", usage.mean_batch)),
        printed,
    ]
}

/// Lines of the page's table.
pub fn rows(records: &[&Record]) -> Vec<Value> {
    let row = |record: &&Record| {
        let (trace, strategy) = names(record);
        let number = |read: fn(&Usage) -> String| usage(record).map_or(NOTHING.into(), read);
        let (printed_shares, printed_batch) = printed(record);
        context! {
            cell_id => &record.cell_id,
            status => status(record.status),
            trace,
            strategy,
            seed => record.cell.seed,
            tokens => number(|usage| percent(usage.token_fraction)),
            reserved => number(|usage| percent(usage.reserved_fraction)),
            internal => number(|usage| percent(usage.internal_fraction)),
            external => number(|usage| percent(usage.external_fraction)),
            waste => number(|usage| percent(usage.waste_of_held)),
            batch => number(|usage| format!("{:.2}", usage.mean_batch)),
            finished => number(|usage| usage.finished_requests.to_string()),
            preempted => number(|usage| usage.preempted_requests.to_string()),
            printed_shares => printed_shares.unwrap_or(NOTHING.into()),
            printed_batch => printed_batch.unwrap_or(NOTHING.into()),
        }
    };
    records.iter().map(row).collect()
}

/// For each trace: the strategies with the least and with the most tokens in the pool.
pub fn findings(records: &[&Record]) -> Vec<String> {
    let mut served: Vec<(&Record, &Usage)> = records
        .iter()
        .filter(|record| record.cell.measure == Measure::SERVE)
        .filter_map(|record| Some((*record, usage(record)?)))
        .collect();
    served.sort_by(|(a, one), (b, other)| {
        names(a).0.cmp(names(b).0).then(one.token_fraction.total_cmp(&other.token_fraction))
    });
    let of_traces = served.chunk_by(|(a, _), (b, _)| a.cell.trace == b.cell.trace).filter(|found| found.len() > 1);
    let sentence = |found: &[(&Record, &Usage)]| {
        let ((least, low), (most, high)) = (found[0], found[found.len() - 1]);
        format!(
            "serve, {}: tokens fill {}% of the slots under `{}` and {}% under `{}`; {:.1} and {:.1} requests run at a \
             time.",
            names(least).0,
            percent(low.token_fraction),
            names(least).1,
            percent(high.token_fraction),
            names(most).1,
            low.mean_batch,
            high.mean_batch,
        )
    };
    of_traces.map(sentence).collect()
}
