//! Policies ranked by what models answered: a leaderboard for each protocol, the comparisons of every two policies behind
//! it, and what may be said of them in a sentence.

use super::ReportError;
use super::additivity;
use super::combined;
use super::comparison::{self, Pair, Ranked};
use super::naming::{SEED, TASK};
use super::noise::{self, Measured};
use super::outlier;
use super::palette;
use super::pools::{Pool, answers, full_score, is_ranked, is_text, left_out, pools};
use super::table::Table;
use super::text::{self, NOTHING};
use crate::eval::Protocol;
use crate::experiment::record::Record;
use crate::units;
use std::collections::{BTreeMap, BTreeSet};

/// Cells with answers by their protocol, those of texts apart: those of one are not compared with those of another.
fn by_protocol<'a>(records: &[&'a Record]) -> Vec<Vec<&'a Record>> {
    let of = |(protocol, texts): (Protocol, bool)| {
        let these = |record: &&&Record| {
            record.cell.protocol() == protocol && answers(record).is_some() && is_text(record) == texts
        };
        records.iter().filter(these).copied().collect::<Vec<_>>()
    };
    let groups = Protocol::ALL.into_iter().flat_map(|protocol| [(protocol, false), (protocol, true)]);
    groups.map(of).filter(|records| !records.is_empty()).collect()
}

/// The lines of each protocol's pools as CSV; `None` without any. Fails when one cannot be written.
type Lines = fn(&[(Protocol, Vec<Pool>)]) -> Result<Option<String>, ReportError>;

/// A table of many lines that lies beside the figures.
pub struct Beside {
    /// Name of its file.
    pub name: &'static str,
    /// What its lines are.
    pub words: &'static str,
    lines: Lines,
}

const BESIDE: [Beside; 2] = [
    Beside { name: "comparisons.csv", words: "All pairs of policies with their p-values", lines: comparison::csv },
    Beside {
        name: additivity::FILE,
        words: "What is lost together, beside the sum of what is lost alone",
        lines: additivity::csv,
    },
];

/// The tables beside the figures that these records fill, as CSV.
///
/// # Errors
/// [`ReportError::Csv`] when a line cannot be written.
pub fn beside(records: &[&Record]) -> Result<Vec<(Beside, String)>, ReportError> {
    let of_protocols = by_protocol(records);
    let of_protocols = of_protocols.iter().map(|records| (records[0].cell.protocol(), pools(records).0));
    let of_protocols: Vec<(Protocol, Vec<Pool>)> = of_protocols.collect();
    let filled = BESIDE.into_iter().map(|table| Ok((table.lines)(&of_protocols)?.map(|csv| (table, csv))));
    filled.filter_map(Result::transpose).collect()
}

/// What a heading says of the protocol of its cells.
pub fn protocol(record: &Record) -> String {
    record.cell.protocol.map_or(String::new(), |protocol| format!(", protocol {protocol}"))
}

/// For each protocol the leaderboard and, for each budget, how its policies compare.
pub fn tables(records: &[&Record]) -> Vec<Table> {
    by_protocol(records).iter().flat_map(|records| of_protocol(records)).collect()
}

fn of_protocol(records: &[&Record]) -> Vec<Table> {
    let (pools, common) = pools(records);
    let protocol = protocol(records[0]);
    let tight = pools.iter().any(Pool::only_protected).then(|| text::ONLY_PROTECTED.to_string());
    let scored = pools.iter().any(|pool| pool.score().is_some());
    let what = if scored { "score in percent, mean over tasks" } else { "perplexity" };
    let board = Table {
        heading: format!("eval: leaderboard{protocol}"),
        subtitle: if pools.is_empty() { String::new() } else { format!("{what} · {common}") },
        rows: if pools.is_empty() { Vec::new() } else { leaderboard(&pools, scored) },
        notes: tight.into_iter().chain(unranked(records)).chain(left_out(records)).collect(),
    };
    let combined = combined::tables(&pools, &protocol).into_iter().chain(additivity::tables(&pools, &protocol));
    std::iter::once(board).chain(combined).chain(comparison::tables(&pools, &protocol)).collect()
}

/// Policies by budgets, best first.
fn leaderboard(pools: &[Pool], scored: bool) -> Vec<Vec<String>> {
    let value = |pool: &Pool| match scored {
        true => pool.score().map(|score| 100.0 * score.mean),
        false => Some(pool.nll_nats().exp()),
    };
    // Written budgets, from the largest: records are sorted from the least.
    let mut budgets: Vec<&str> = Vec::new();
    for pool in pools.iter().rev() {
        if !pool.budget.is_empty() && !budgets.contains(&pool.budget.as_str()) {
            budgets.push(&pool.budget);
        }
    }
    let mut by_name: BTreeMap<&str, BTreeMap<&str, (f64, bool)>> = BTreeMap::new();
    for pool in pools {
        let of_name = by_name.entry(&pool.name).or_default();
        of_name.extend(value(pool).map(|value| (pool.budget.as_str(), (value, pool.only_protected()))));
    }
    let number = |value: Option<&(f64, bool)>| match value {
        Some((value, tight)) => format!("{value:.1}{}", if *tight { " !" } else { "" }),
        None => NOTHING.into(),
    };
    // What has no budget is not measured at any.
    let evicting = || {
        by_name
            .iter()
            .filter(|(name, values)| !palette::is_baseline(name) && !values.contains_key(""))
            .map(|(_, all)| all)
    };
    let everywhere: Vec<&str> =
        budgets.iter().copied().filter(|budget| evicting().all(|values| values.contains_key(budget))).collect();
    let row = |(name, values): (&&str, &BTreeMap<&str, (f64, bool)>)| {
        // By the budgets that all have; what was not measured at some of them stands behind.
        let is_common = |budget: &str| everywhere.is_empty() || budget.is_empty() || everywhere.contains(&budget);
        let common = values.iter().filter(|(budget, _)| is_common(budget)).map(|(_, (value, _))| value);
        let mean = common.clone().sum::<f64>() / common.count().max(1) as f64;
        // The full cache leads: it is what the others are compared with.
        let (missing, order) = match palette::is_baseline(name) {
            true => (0, f64::NEG_INFINITY),
            false if values.contains_key("") => (0, mean),
            false => (budgets.len().saturating_sub(values.len()), mean),
        };
        let cells = std::iter::once("").chain(budgets.iter().copied()).map(|budget| number(values.get(budget)));
        let row: Vec<String> = std::iter::once(name.to_string()).chain(cells).collect();
        (missing, if scored && order.is_finite() { -order } else { order }, row)
    };
    let mut rows: Vec<(usize, f64, Vec<String>)> = by_name.iter().map(row).collect();
    rows.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let headings = ["policy", "no budget"].into_iter().chain(budgets.iter().copied()).map(String::from).collect();
    std::iter::once(headings).chain(rows.into_iter().map(|(.., row)| row)).collect()
}

/// The tasks that rank nothing, in words; `None` where all do.
fn unranked(records: &[&Record]) -> Option<String> {
    let mut tasks: BTreeMap<(&str, usize, &str), f64> = BTreeMap::new();
    for record in records.iter().filter(|record| !is_ranked(record)) {
        let (task, model) = (record.cell.task.as_deref().unwrap_or(NOTHING), record.cell.model.as_deref());
        tasks.insert((task, record.cell.context_tokens, model.unwrap_or(NOTHING)), full_score(record).unwrap_or(0.0));
    }
    let many = records.iter().any(|record| record.cell.model != records[0].cell.model);
    let one = |((task, context, model), score): (&(&str, usize, &str), &f64)| {
        let of_model = if many { format!(" by {model}") } else { String::new() };
        format!("{task} at {}{of_model} (full cache {:.1})", units::tokens(*context), 100.0 * score)
    };
    let all = tasks.iter().map(one).collect::<Vec<_>>().join(" · ");
    (!all.is_empty()).then(|| format!("not ranked, the model cannot do it: {all}"))
}

/// For each protocol and budget: the best policy where that is sure, or those that may be it, by score or, for texts, by
/// divergence; beside random eviction and the full cache.
pub fn findings(records: &[&Record]) -> Vec<String> {
    let of_protocol = |records: &Vec<&Record>| {
        let (pools, _) = pools(records);
        let protocol = protocol(records[0]);
        let sentence = |budget: Vec<Ranked>| best(&budget, &pools, &protocol);
        let compared = |ranked: &Vec<Ranked>| combined::is_compared(ranked[0].pool, &pools);
        let best = comparison::ranked(&pools).into_iter().filter(compared).filter_map(sentence);
        let left_out = left_out(records).map(|words| format!("eval{protocol}: {words}."));
        best.chain(additivity::findings(&pools, &protocol)).chain(left_out).collect::<Vec<_>>()
    };
    by_protocol(records).iter().flat_map(of_protocol).collect()
}

fn best(budget: &[Ranked], pools: &[Pool], protocol: &str) -> Option<String> {
    let first = budget.first()?;
    let is_scored = first.pool.is_scored();
    // Where nobody answers anything there is no best.
    (!is_scored || first.value.mean > 0.0).then_some(())?;
    let samples = first.pool.samples();
    let write = |value: f64| if is_scored { text::percent(value) } else { text::drift(value) };
    let named = |at: usize| {
        let Ranked { pool, value, .. } = &budget[at];
        let (low, high) = (value.ci95_low, value.ci95_high);
        Measured { name: pool.name.clone(), value: value.mean, low, high, count: samples, is_range: false }.words(write)
    };
    // Policies of which it is not sure that the first is better.
    let pairs = comparison::with_first(budget);
    let with_first = |at: usize| pairs.iter().find(|pair| pair.of == [0, at]);
    let rivals: Vec<usize> = (1..budget.len()).filter(|&at| !with_first(at).is_some_and(Pair::is_sure)).collect();
    let what = if budget.len() == 1 {
        named(0)
    } else if let Some(enough) = comparison::enough_for_a_best(budget) {
        format!(
            "undecided: {} samples set none of {} policies apart from {}, and {enough} could",
            first.pool.all_samples(),
            budget.len(),
            named(0)
        )
    } else if !rivals.is_empty() {
        noise::undecided(std::iter::once(0).chain(rivals).map(named).collect(), samples)
    } else if samples < noise::LEAST_SAMPLES {
        let others = if budget.len() == 2 { "the other".into() } else { format!("all {} others", budget.len() - 1) };
        format!(
            "{} is apart from {others}, but {}{} are too few for a finding ({} make one)",
            named(0),
            units::counted(samples as u64, "sample"),
            if first.pool.asked_apart() > 1 { " of each" } else { "" },
            noise::LEAST_SAMPLES
        )
    } else {
        let next = with_first(1).map(|Pair { difference, .. }| {
            let number = |value: f64| if is_scored { format!("{:.0}", 100.0 * value) } else { text::drift(value) };
            let [mean, low, high] = [difference.mean, difference.low, difference.high].map(number);
            let unit = if is_scored { "points" } else { "nats" };
            format!(", {mean} {unit} (95% {low} to {high}, paired) before {}", named(1))
        });
        format!("{} is the best of {}{}", named(0), budget.len(), next.unwrap_or_default())
    };
    let is_full = |pool: &&Pool| palette::is_baseline(pool.policy) && pool.setting == first.pool.setting;
    let full = pools.iter().find(is_full).and_then(Pool::score).map(|full| ("full cache", full.mean));
    // What stands in the sentence already is not said again.
    let floor = comparison::floor(budget).filter(|&at| !what.contains(&format!("`{}`", budget[at].pool.name)));
    let floor = floor.map(|at| (comparison::floor_name(first.pool), budget[at].value.mean));
    let beside = floor.into_iter().chain(full).map(|(name, value)| format!("{name} {}", write(value)));
    let beside = beside.collect::<Vec<_>>().join(", ");
    let tight = budget.iter().filter(|ranked| ranked.pool.only_protected()).map(|ranked| ranked.pool.name.clone());
    let apart = comparison::apart(budget);
    Some(format!(
        "eval at a context of {}{protocol}, {}{}, {}{}: {what}{}{beside}.{}{}",
        units::tokens(first.pool.records[0].cell.context_tokens),
        comparison::question(first.pool),
        if apart.is_empty() { String::new() } else { format!(", with{apart}") },
        asked(first.pool),
        if is_scored { "" } else { ", KL in nats a token" },
        if beside.is_empty() { "" } else { "; " },
        text::only_protected(&tight.collect::<Vec<_>>()),
        outlier::sentence(budget).unwrap_or_default(),
    ))
}

/// How many samples stand behind a pool's numbers: `20 samples`, or `10 samples of each of 3 tasks (30)`.
fn asked(pool: &Pool) -> String {
    let (least, all) = (pool.samples(), pool.all_samples());
    let of =
        |read: fn(&Record) -> String| pool.records.iter().map(|record| read(record)).collect::<BTreeSet<_>>().len();
    let (tasks, seeds) = (of(TASK), of(SEED));
    let each = match (tasks, seeds) {
        _ if !pool.is_scored() || least == all => return units::counted(all as u64, "sample"),
        (tasks, 1) => format!("{tasks} tasks"),
        (1, seeds) => format!("{seeds} seeds"),
        (tasks, seeds) => format!("{tasks} tasks and {seeds} seeds"),
    };
    format!("{} of each of {each} ({all})", units::counted(least as u64, "sample"))
}
