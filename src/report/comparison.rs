//! Policies against one another: paired differences on the same samples, of scores or, for texts, of divergence from the full
//! cache, and how sure a rank is.
//!
//! All policies of a budget answer the same samples, so that a difference of two is surer than their intervals say. Every
//! pair of a budget is compared, the p-values of all these pairs are corrected together (Holm), and the table shows of them
//! what a reader asks first: is it better than random eviction, and is it worse than the best? How often a policy is among
//! the best is counted over resamples of the samples. Memories in place of the cache have no budget and are compared with
//! one another, and with the window alone in place of random eviction. `comparisons.csv` holds all pairs.

use super::ReportError;
use super::combined;
use super::noise::LEAST_SAMPLES;
use super::origin::weights;
use super::palette;
use super::pools::Pool;
use super::table::Table;
use super::text::{self, NOTHING};
use crate::eval::Protocol;
use crate::experiment::answers::Estimate;
use crate::experiment::measure::eval::RANDOM;
use crate::memories::WINDOW_ALONE;
use crate::stats::{Difference, among_best, difference, holm, least_p, unbounded_difference};

/// Differences with a larger corrected p-value are not marked.
pub const SURE: f64 = 0.05;

/// A policy at a budget among the others.
pub struct Ranked<'a> {
    /// The policy.
    pub pool: &'a Pool<'a>,
    /// Its mean score over tasks, or its divergence for texts.
    pub value: Estimate,
    /// Fraction of resamples in which none is better.
    pub among_best: f64,
}

/// Two policies at a budget.
pub struct Pair {
    /// Indices among those of the budget.
    pub of: [usize; 2],
    /// The first's score minus the second's; for texts the second's divergence minus the first's.
    pub difference: Difference,
    /// Holm's p-value among the pairs that are asked about together.
    p_holm: f64,
}

impl Pair {
    /// Whether the two differ beyond noise, corrected for these pairs, and their interval says so too.
    pub fn is_sure(&self) -> bool {
        let Difference { low, high, .. } = self.difference;
        self.p_holm < SURE && (low > 0.0 || high < 0.0)
    }
}

/// What those that are compared with a pool have in common: their budget, or that they are memories.
pub fn question(pool: &Pool) -> String {
    if pool.is_memory() { "memories".into() } else { format!("budget {}", pool.budget) }
}

/// The one that every other has to be better than: random eviction, or the window alone; with the model's own weights where another
/// model is compared too.
pub fn floor(ranked: &[Ranked]) -> Option<usize> {
    let floors = (0..ranked.len()).filter(|&at| [RANDOM, WINDOW_ALONE].contains(&ranked[at].pool.policy));
    floors.min_by_key(|&at| weights(ranked[at].pool).is_some())
}

/// What [`floor`] is among those that are compared with a pool.
pub fn floor_name(pool: &Pool) -> &'static str {
    if pool.is_memory() { "window" } else { RANDOM }
}

/// The policies that evict, by setting and by budget from the largest, and the memories, each with the best first.
pub fn ranked<'a>(pools: &'a [Pool<'a>]) -> Vec<Vec<Ranked<'a>>> {
    let mut questions: Vec<(&str, &str)> = Vec::new();
    let is_compared =
        |pool: &&Pool| !palette::is_baseline(pool.policy) && (!pool.budget.is_empty() || pool.is_memory());
    for pool in pools.iter().rev().filter(is_compared) {
        let question = (pool.budget.as_str(), pool.setting.as_str());
        if !questions.contains(&question) {
            questions.push(question);
        }
    }
    let of_question = |(budget, setting): (&str, &str)| {
        let of = |pool: &&Pool| pool.budget == budget && pool.setting == setting;
        let these: Vec<&Pool> = pools.iter().filter(is_compared).filter(of).collect();
        let shares = among_best(&these.iter().map(|pool| pool.merits()).collect::<Vec<_>>());
        let value = |pool: &Pool| if pool.is_scored() { pool.score() } else { pool.kl_nats() };
        let one = |(pool, among_best): (&'a Pool<'a>, f64)| Some(Ranked { pool, value: value(pool)?, among_best });
        let mut ranked: Vec<Ranked> = these.into_iter().zip(shares).filter_map(one).collect();
        let worth = |ranked: &Ranked| if ranked.pool.is_scored() { ranked.value.mean } else { -ranked.value.mean };
        ranked.sort_by(|a, b| worth(b).total_cmp(&worth(a)).then(b.among_best.total_cmp(&a.among_best)));
        ranked
    };
    questions.into_iter().map(of_question).filter(|ranked| !ranked.is_empty()).collect()
}

/// The least p-value that so many comparisons of so many samples can have, and with how many samples they could tell something, where
/// these are too few to tell anything, however far apart they are.
pub fn too_few(samples: usize, comparisons: usize) -> Option<(f64, usize)> {
    let least = least_p(samples)? * comparisons as f64;
    (least >= SURE).then(|| {
        let enough = (samples..).find(|&samples| least_p(samples).is_none_or(|p| p * (comparisons as f64) < SURE));
        (least.min(1.0), enough.unwrap_or(samples))
    })
}

/// The same of policies, with at least as many samples as make a finding.
fn too_few_of(ranked: &[Ranked], comparisons: usize) -> Option<(f64, usize)> {
    let pool = ranked[0].pool;
    let (least, enough) = too_few(pool.all_samples(), comparisons)?;
    Some((least, enough.max(LEAST_SAMPLES * pool.asked_apart())))
}

/// What a reader must know where so few samples of so many policies cannot set any two apart.
fn floor_of_p(ranked: &[Ranked]) -> Option<String> {
    let pairs = ranked.len() * (ranked.len() - 1) / 2;
    let (least, enough) = too_few_of(ranked, pairs)?;
    Some(format!(
        "{} samples of {} policies set no two apart: the least p of {pairs} pairs is {least:.2}; {enough} samples could",
        ranked[0].pool.all_samples(),
        ranked.len(),
    ))
}

/// With how many samples something could be said of which policy is the best, where these are too few.
pub fn enough_for_a_best(ranked: &[Ranked]) -> Option<usize> {
    too_few_of(ranked, ranked.len() - 1).map(|(_, enough)| enough)
}

/// Every pair of a budget's policies, the better one first.
pub fn pairs(ranked: &[Ranked]) -> Vec<Pair> {
    pairs_by(ranked, |pool| pool.merits())
}

/// The first, which did best, with each of the others: who asks for the best asks for no other pair, so that these alone are corrected
/// together (multiple comparisons with the best, Hsu 1981).
pub fn with_first(ranked: &[Ranked]) -> Vec<Pair> {
    compared((1..ranked.len()).map(|other| [0, other]), ranked, |pool| pool.merits())
}

/// As [`pairs`] by other merits.
fn pairs_by(ranked: &[Ranked], merits: fn(&Pool) -> Vec<Vec<f64>>) -> Vec<Pair> {
    let both = (0..ranked.len()).flat_map(|a| (a + 1..ranked.len()).map(move |b| [a, b]));
    compared(both, ranked, merits)
}

/// Some pairs, corrected together.
fn compared(
    both: impl Iterator<Item = [usize; 2]>,
    ranked: &[Ranked],
    merits: fn(&Pool) -> Vec<Vec<f64>>,
) -> Vec<Pair> {
    let of_pair = |of: [usize; 2]| {
        let [a, b] = of.map(|at| merits(ranked[at].pool));
        let stratum = |(a, b): (&Vec<f64>, &Vec<f64>)| a.iter().zip(b).map(|(a, b)| a - b).collect();
        let strata: Vec<Vec<f64>> = a.iter().zip(&b).map(stratum).collect();
        let difference = match ranked[of[0]].pool.is_scored() {
            true => difference(&strata),
            false => unbounded_difference(&strata.concat()),
        };
        Some(Pair { of, difference: difference?, p_holm: 1.0 })
    };
    let mut pairs: Vec<Pair> = both.filter_map(of_pair).collect();
    let corrected = holm(&pairs.iter().map(|pair| pair.difference.p).collect::<Vec<_>>());
    pairs.iter_mut().zip(corrected).for_each(|(pair, p)| pair.p_holm = p);
    pairs
}

/// A table for each budget of a protocol.
pub fn tables(pools: &[Pool], protocol: &str) -> Vec<Table> {
    const WORDS: &str = "vs: difference with its 95% interval, paired by sample · *: p < 0.05, corrected for all pairs of \
                         the budget (Holm), and the interval leaves 0 out · among best: fraction of resamples in which none \
                         is better";
    const OF_MEMORIES: &str = "vs window: beside transformer-xl:slots=1, of a text in percent of its perplexity";
    let all = ranked(pools);
    let mut tables: Vec<Table> = all
        .iter()
        .filter(|ranked| ranked.len() > 1 && combined::is_compared(ranked[0].pool, pools))
        .map(|ranked| Table {
            heading: format!("eval: comparison{protocol}, {}{}", question(ranked[0].pool), apart(ranked)),
            subtitle: String::new(),
            rows: rows(ranked),
            notes: ranked[0]
                .pool
                .is_memory()
                .then(|| OF_MEMORIES.into())
                .into_iter()
                .chain(floor_of_p(ranked))
                .collect(),
        })
        .collect();
    if let Some(last) = tables.last_mut() {
        last.notes.push(WORDS.into());
    }
    tables
}

/// What sets all of a budget apart from those of another setting; the file of a single policy does not.
pub fn apart<'a>(ranked: &[Ranked<'a>]) -> &'a str {
    let first = ranked[0].pool.apart();
    if ranked.iter().all(|ranked| ranked.pool.apart() == first) { first } else { "" }
}

fn rows(ranked: &[Ranked]) -> Vec<Vec<String>> {
    let first = ranked[0].pool;
    let (is_scored, floor) = (first.is_scored(), floor(ranked));
    let by_perplexity = first.is_memory() && !is_scored;
    let pairs = pairs(ranked);
    let of_floor = if by_perplexity { pairs_by(ranked, |pool| pool.log_probabilities()) } else { Vec::new() };
    let whole = |percent: f64| if percent.round() == 0.0 { "0".into() } else { format!("{percent:+.0}") };
    let signed = |value: f64| match is_scored {
        true => whole(100.0 * value),
        false => format!("{}{}", if value < 0.0 { "" } else { "+" }, text::drift(value)),
    };
    let against = |pairs: &[Pair], write: &dyn Fn(f64) -> String, one: usize, other: Option<usize>| {
        let found = pairs.iter().find(|pair| other.is_some_and(|other| pair.of == [one.min(other), one.max(other)]));
        found.map_or(NOTHING.into(), |pair| {
            let Difference { mean, low, high, .. } = pair.difference;
            // Of texts, less divergence is better.
            let (mean, low, high) =
                if (pair.of[0] == one) == is_scored { (mean, low, high) } else { (-mean, -high, -low) };
            let sure = if pair.is_sure() { " *" } else { "" };
            format!("{} ({} to {}){sure}", write(mean), write(low), write(high))
        })
    };
    let against_floor = |one: usize| match by_perplexity {
        true => against(&of_floor, &|nats: f64| format!("{}%", whole(100.0 * nats.exp_m1())), one, floor),
        false => against(&pairs, &signed, one, floor),
    };
    let value = if is_scored { "score" } else { "KL nats" };
    let against_what = format!("vs {}", floor_name(first));
    let headings = ["policy", value, "95%", against_what.as_str(), "vs best", "among best"].map(String::from).to_vec();
    let row = |(at, found): (usize, &Ranked)| {
        let Estimate { mean, ci95_low, ci95_high } = found.value;
        let mark = if found.pool.only_protected() { " !" } else { "" };
        let [value, interval] = match is_scored {
            true => [format!("{:.1}", 100.0 * mean), format!("{:.0}–{:.0}", 100.0 * ci95_low, 100.0 * ci95_high)],
            false => [text::drift(mean), format!("{}–{}", text::drift(ci95_low), text::drift(ci95_high))],
        };
        vec![
            found.pool.name.clone(),
            format!("{value}{mark}"),
            interval,
            against_floor(at),
            against(&pairs, &signed, at, Some(0)),
            text::percent(found.among_best),
        ]
    };
    std::iter::once(headings).chain(ranked.iter().enumerate().map(row)).collect()
}

/// `comparisons.csv`: every pair of policies of each protocol's pools; `None` without any.
///
/// # Errors
/// When a line cannot be written.
pub fn csv(of_protocols: &[(Protocol, Vec<Pool>)]) -> Result<Option<String>, ReportError> {
    const NAMES: [&str; 5] = ["protocol", "budget", "measure", "policy_a", "policy_b"];
    const NUMBERS: [&str; 9] =
        ["value_a", "value_b", "difference", "ci95_low", "ci95_high", "p", "p_holm", "among_best_a", "among_best_b"];
    let mut table = ::csv::Writer::from_writer(Vec::new());
    table.write_record(NAMES.iter().chain(&NUMBERS))?;
    let mut is_empty = true;
    for (protocol, pools) in of_protocols {
        for ranked in ranked(pools) {
            let is_scored = ranked[0].pool.is_scored();
            for &(measure, merits, value) in if is_scored { SCORES } else { TEXTS } {
                for Pair { of, difference: Difference { mean, low, high, p }, p_holm } in pairs_by(&ranked, merits) {
                    let [a, b] = of.map(|at| &ranked[at]);
                    // Of texts, less divergence is better.
                    let (mean, low, high) = if is_scored { (mean, low, high) } else { (-mean, -high, -low) };
                    let [value_a, value_b] = [a, b].map(|one| value(one.pool));
                    let numbers = [value_a, value_b, mean, low, high, p, p_holm, a.among_best, b.among_best];
                    let names =
                        [protocol.name(), &a.pool.budget, measure, &a.pool.name, &b.pool.name].map(String::from);
                    table.write_record(names.into_iter().chain(numbers.map(rounded)))?;
                    is_empty = false;
                }
            }
        }
    }
    if is_empty { Ok(None) } else { super::csv::text(table).map(Some) }
}

/// A number of a table of thousands of pairs: six digits are more than any sample tells.
pub fn rounded(number: f64) -> String {
    format!("{number:.5e}").parse::<f64>().map_or_else(|_| number.to_string(), |number| number.to_string())
}

/// What those of a question are compared by: its name, the merits of every sample, and the mean of what is measured.
type Measured = (&'static str, fn(&Pool) -> Vec<Vec<f64>>, fn(&Pool) -> f64);

/// Of tasks.
const SCORES: &[Measured] =
    &[("accuracy", |pool| pool.merits(), |pool| pool.score().map_or(f64::NAN, |score| score.mean))];

/// Of texts.
const TEXTS: &[Measured] = &[
    ("kl_nats", |pool| pool.merits(), |pool| pool.kl_nats().map_or(f64::NAN, |kl| kl.mean)),
    ("nll_nats", |pool| pool.log_probabilities(), |pool| pool.nll_nats()),
];
