//! Simulated traces in the tables and in words: shares of the pool, beside what the vLLM paper prints.

use super::summary::status;
use super::text::NOTHING;
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::serving::{Usage, published};
use minijinja::{Value, context};
use std::collections::BTreeMap;

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

/// For each trace: the strategies with the least and with the most tokens in the pool. Of several seeds the median speaks, so that
/// no strategy is the best by a lucky one.
pub fn findings(records: &[&Record]) -> Vec<String> {
    let mut traces: BTreeMap<&str, BTreeMap<&str, Vec<&Usage>>> = BTreeMap::new();
    for record in records.iter().filter(|record| record.cell.measure == Measure::SERVE) {
        let (trace, strategy) = names(record);
        traces.entry(trace).or_default().entry(strategy).or_default().extend(usage(record));
    }
    let sentence = |(trace, strategies): (&str, BTreeMap<&str, Vec<&Usage>>)| {
        let of_seeds = match strategies.values().map(Vec::len).max() {
            Some(seeds) if seeds > 1 => format!(", the median of {seeds} seeds"),
            _ => String::new(),
        };
        let mut served: Vec<(&str, &Usage)> =
            strategies.into_iter().filter_map(|(name, of_seeds)| Some((name, median(of_seeds)?))).collect();
        served.sort_by(|(_, one), (_, other)| one.token_fraction.total_cmp(&other.token_fraction));
        let [(least, low), .., (most, high)] = served[..] else { return None };
        Some(format!(
            "serve, {trace}{of_seeds}: tokens fill {}% of the slots under `{least}` and {}% under `{most}`; {:.1} and {:.1} \
             requests run at a time.",
            percent(low.token_fraction),
            percent(high.token_fraction),
            low.mean_batch,
            high.mean_batch,
        ))
    };
    traces.into_iter().filter_map(sentence).collect()
}

/// The simulation with the lower median of tokens in the pool.
fn median(mut of_seeds: Vec<&Usage>) -> Option<&Usage> {
    of_seeds.sort_by(|one, other| one.token_fraction.total_cmp(&other.token_fraction));
    of_seeds.get(of_seeds.len().saturating_sub(1) / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::samples::{served, with_cell};

    #[test]
    fn strategies_are_held_against_one_another_by_the_median_of_their_seeds() {
        let of = |strategy: &str, seed: u64, token_fraction: f64| {
            let mut record = with_cell(served("sharegpt", strategy), |cell| cell.seed = seed);
            record.serving.as_mut().unwrap().token_fraction = token_fraction;
            record
        };
        // The best and the worst seed are of one strategy.
        let paged = [0.9, 0.2, 0.8].iter().zip(0..).map(|(&share, seed)| of("paged:page=16", seed, share));
        let max = [0.3, 0.4, 0.5].iter().zip(0..).map(|(&share, seed)| of("max", seed, share));
        let (paged, max) = (paged.collect::<Vec<_>>(), max.collect::<Vec<_>>());
        let found = findings(&paged.iter().chain(&max).collect::<Vec<_>>());
        let expected = "serve, sharegpt, the median of 3 seeds: tokens fill 40.0% of the slots under `max` and 80.0% \
                        under `paged:page=16`; ";
        assert!(found.len() == 1 && found[0].starts_with(expected), "{found:?}");
        assert_eq!(findings(&paged.iter().collect::<Vec<_>>()), Vec::<String>::new(), "one strategy is no comparison");
        let found = findings(&[&paged[0], &max[0]]);
        assert!(found[0].starts_with("serve, sharegpt: tokens fill 30.0%"), "{found:?}");
    }
}
