//! Whether what two savings lose adds up: a format of the cache and a policy, or weights in fewer bits and a smaller cache.
//!
//! A pair is a pool that saves by both, beside the two that save by one of them each, on the same samples. Its divergence is held
//! against the sum of theirs: by their ratio, and by the difference in pairs of samples, whose p-values are corrected together (Holm). A
//! pair tells nothing of a sum that is nearly one part alone, nor where nothing but protected tokens stays; such are counted apart.
//! `additivity.csv` holds all pairs.

use super::ReportError;
use super::combined::{Saved, Spent, choice, named, of_cache, of_whole};
use super::comparison::{SURE, rounded, too_few};
use super::noise::LEAST_SAMPLES;
use super::pools::Pool;
use super::table::Table;
use super::text::{self, NOTHING};
use crate::eval::Protocol;
use crate::experiment::record::Record;
use crate::stats::{Difference, holm, quantile, unbounded_difference};
use crate::units;
use std::collections::BTreeSet;

/// Name of the table beside the figures.
pub const FILE: &str = "additivity.csv";
/// Where a part is no more of the sum than this, the sum is the other part.
const LEAST_PART: f64 = 0.05;
/// Pairs that the table in the summary shows.
const MOST_ROWS: usize = 8;
/// Differences that are no more of the loss are of roundings.
const ROUNDING: f64 = 1e-9;

/// Two savings that are made together.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Savings {
    /// Fewer bits of keys and values, and fewer tokens.
    Cache,
    /// Fewer bits of the weights, and a smaller cache, by either or both.
    Whole,
}

impl Savings {
    fn words(self) -> &'static str {
        match self {
            Savings::Cache => "a format and a policy",
            Savings::Whole => "weights in fewer bits and a smaller cache",
        }
    }

    /// What the parts are called.
    fn parts(self) -> [&'static str; 2] {
        match self {
            Savings::Cache => ["format", "policy"],
            Savings::Whole => ["weights", "cache"],
        }
    }

    /// Which part of `both` a pool is, 0 or 1; `None` if it is none.
    fn part(self, one: &Spent, both: &Spent) -> Option<usize> {
        let cell =
            |one: &Spent| (one.pool.records[0].cell.kv_format, one.pool.policy.to_string(), one.pool.budget.clone());
        let ((format, policy, budget), of_both) = (cell(one), cell(both));
        match (self, one.saved, both.saved) {
            (Savings::Cache, Saved { format: true, policy: false, .. }, Saved { format: true, policy: true, .. }) => {
                (format == of_both.0).then_some(0)
            }
            (Savings::Cache, Saved { format: false, policy: true, .. }, Saved { format: true, policy: true, .. }) => {
                ((policy, budget) == (of_both.1, of_both.2)).then_some(1)
            }
            (Savings::Cache, ..) | (_, _, Saved { weights: false, .. }) => None,
            (_, _, Saved { format: false, policy: false, .. }) => None,
            (_, Saved { weights: true, format: false, policy: false }, _) => {
                (one.weights() == both.weights()).then_some(0)
            }
            (_, Saved { weights: false, format: coded, policy: evicted }, _) if coded || evicted => {
                ((format, policy, budget) == of_both).then_some(1)
            }
            _ => None,
        }
    }
}

/// Why a pair tells nothing of a sum.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mute {
    /// One part is next to nothing.
    Part,
    /// Nothing but protected tokens stays.
    Protected,
}

/// A pool that saves in two ways, beside those that save in one of them.
struct Pair<'a> {
    both: &'a Pool<'a>,
    /// Mean divergence of each part alone, nats a token.
    parts: [f64; 2],
    /// That of both together.
    together: f64,
    /// Samples of all three.
    samples: usize,
    /// Together less the sum of the parts, by sample; `None` of one sample.
    difference: Option<Difference>,
    /// Its p-value among those of all pairs that tell something; 1 for the others.
    p_holm: f64,
    mute: Option<Mute>,
}

impl<'a> Pair<'a> {
    fn of(both: &Spent<'a>, first: &Spent<'a>, second: &Spent<'a>) -> Self {
        let of_samples = [both, first, second].map(|one| one.pool.sample_kl_nats().concat());
        let samples = of_samples.iter().map(Vec::len).min().unwrap_or(0);
        let [together, first_alone, second_alone] =
            of_samples.each_ref().map(|kl| kl[..samples].iter().sum::<f64>() / samples as f64);
        let excess = |at: usize| {
            let excess = of_samples[0][at] - of_samples[1][at] - of_samples[2][at];
            // Sums of what is the same differ by roundings, which have signs too.
            if excess.abs() <= ROUNDING * together { 0.0 } else { excess }
        };
        let difference = unbounded_difference(&(0..samples).map(excess).collect::<Vec<_>>());
        let parts = [first_alone, second_alone];
        let is_next_to_nothing = |part: &f64| *part <= LEAST_PART * (first_alone + second_alone);
        let mute = if both.pool.only_protected() || second.pool.only_protected() {
            Some(Mute::Protected)
        } else {
            parts.iter().any(is_next_to_nothing).then_some(Mute::Part)
        };
        Pair { both: both.pool, parts, together, samples, difference, p_holm: 1.0, mute }
    }

    fn sum(&self) -> f64 {
        self.parts.iter().sum()
    }

    fn ratio(&self) -> f64 {
        self.together / self.sum()
    }

    /// Whether it is sure that both together lose something else than the sum: the difference, if so.
    fn sure(&self) -> Option<f64> {
        let Difference { mean, low, high, .. } = self.difference?;
        let is_sure = self.samples >= LEAST_SAMPLES && self.p_holm < SURE && (low > 0.0 || high < 0.0);
        is_sure.then_some(mean)
    }
}

/// The pairs of one question, such as of one model.
struct Asked<'a> {
    savings: Savings,
    /// What sets the question apart, where there are several.
    of: String,
    pairs: Vec<Pair<'a>>,
}

impl<'a> Asked<'a> {
    /// Every pool whose two parts are there.
    fn of(savings: Savings, spent: &[Spent<'a>]) -> Self {
        let pair = |both: &Spent<'a>| {
            let part = |which| spent.iter().find(|one| savings.part(one, both) == Some(which));
            Some(Pair::of(both, part(0)?, part(1)?))
        };
        let mut pairs: Vec<Pair> = spent.iter().filter_map(pair).collect();
        let told = pairs.iter_mut().filter(|pair| pair.mute.is_none());
        let mut tested: Vec<(&mut Pair, f64)> =
            told.filter_map(|pair| pair.difference.map(|found| (pair, found.p))).collect();
        let corrected = holm(&tested.iter().map(|(_, p)| *p).collect::<Vec<_>>());
        tested.iter_mut().zip(corrected).for_each(|((pair, _), p)| pair.p_holm = p);
        Asked { savings, of: named(spent), pairs }
    }

    fn told(&self) -> Vec<&Pair<'a>> {
        self.pairs.iter().filter(|pair| pair.mute.is_none()).collect()
    }

    /// How many pairs tell nothing, and why; empty without any.
    fn left_out(&self) -> String {
        let count = |why: Mute| self.pairs.iter().filter(|pair| pair.mute == Some(why)).count();
        let least = format!("with a part of at most {} of the sum", text::percent(LEAST_PART));
        let words = [(Mute::Part, least), (Mute::Protected, "in which nothing but protected tokens stays".into())];
        let some = words.into_iter().map(|(why, words)| (count(why), words)).filter(|(count, _)| *count > 0);
        some.map(|(count, words)| format!("{count} {words}")).collect::<Vec<_>>().join(" and ")
    }

    fn sentence(&self, protocol: &str) -> Option<String> {
        let Asked { savings, of, pairs } = self;
        (!pairs.is_empty()).then_some(())?;
        let (told, left_out, what) = (self.told(), self.left_out(), savings.words());
        let counted = |count: usize, what: &str| units::counted(count as u64, what);
        let mut ratios: Vec<f64> = told.iter().map(|pair| pair.ratio()).collect();
        ratios.sort_by(f64::total_cmp);
        let (Some(least), Some(most)) = (ratios.first(), ratios.last()) else {
            let all = counted(pairs.len(), "pair");
            return Some(format!(
                "eval{protocol}{of}: whether the KL of {what} adds up, none of {all} tells: {left_out} (`{FILE}`)."
            ));
        };
        let range = match told.len() {
            1 => format!("{least:.2} times the KL that both have alone, added up (1 pair)"),
            many => format!(
                "{least:.2} to {most:.2} times the KL that both have alone, added up (median {:.2}, {many} pairs)",
                quantile(&ratios, 0.5)
            ),
        };
        let samples = told.iter().map(|pair| pair.samples).min().unwrap_or(0);
        let enough = too_few(samples, told.len()).map(|(_, enough)| enough.max(LEAST_SAMPLES));
        let enough = enough.or((samples < LEAST_SAMPLES).then_some(LEAST_SAMPLES));
        let sure: Vec<f64> = told.iter().filter_map(|pair| pair.sure()).collect();
        let more = sure.iter().filter(|difference| **difference > 0.0).count();
        let verdict = match (enough, more, sure.len() - more) {
            (Some(enough), ..) => {
                format!("{} cannot tell whether that is the sum, {enough} could", counted(samples, "sample"))
            }
            (None, 0, 0) => "beyond noise none is another than the sum".into(),
            (None, more, less) => format!("beyond noise it is more than the sum in {more} and less in {less}"),
        };
        let left_out = if left_out.is_empty() { left_out } else { format!("; left out: {left_out}") };
        Some(format!("eval{protocol}{of}: {what} together have {range}; {verdict}{left_out} (`{FILE}`)."))
    }

    /// The pairs that are farthest from the sum.
    fn table(&self, protocol: &str) -> Option<Table> {
        let Asked { savings, of, .. } = self;
        let mut told = self.told();
        let (all, left_out) = (told.len(), self.left_out());
        (all > 0).then_some(())?;
        told.sort_by(|a, b| b.ratio().ln().abs().total_cmp(&a.ratio().ln().abs()));
        told.truncate(MOST_ROWS);
        let parts = savings.parts().map(|part| format!("KL {part}"));
        let headings =
            ["policy", &parts[0], &parts[1], "KL both", "of sum", "both less sum"].map(String::from).to_vec();
        let signed = |value: f64| format!("{}{}", if value < 0.0 { "" } else { "+" }, text::drift(value));
        let row = |pair: &&Pair| {
            let sure = if pair.sure().is_some() { " *" } else { "" };
            let difference = pair.difference.map_or(NOTHING.into(), |Difference { mean, low, high, .. }| {
                // An interval of few samples is itself a guess.
                let is_known = pair.samples >= LEAST_SAMPLES;
                let interval = if is_known { format!(" ({} to {})", signed(low), signed(high)) } else { String::new() };
                format!("{}{interval}{sure}", signed(mean))
            });
            let [first, second] = pair.parts.map(text::drift);
            let (both, ratio) = (text::drift(pair.together), format!("{:.2}", pair.ratio()));
            vec![choice(pair.both), first, second, both, ratio, difference]
        };
        let shown = if all > MOST_ROWS {
            format!("the {MOST_ROWS} of {all} pairs farthest from the sum · ")
        } else {
            String::new()
        };
        let left_out = if left_out.is_empty() { left_out } else { format!(" · left out: {left_out}") };
        Some(Table {
            heading: format!("eval: {} together, beside the sum of both{protocol}{of}", savings.words()),
            subtitle: String::new(),
            rows: std::iter::once(headings).chain(told.iter().map(row)).collect(),
            notes: vec![format!(
                "{shown}both less sum: nats a token, of at least {LEAST_SAMPLES} samples with the 95% interval, paired by sample · \
                 *: p < 0.05, corrected for all of {all} (Holm){left_out} · all pairs: {FILE}"
            )],
        })
    }
}

/// The questions of a protocol's pools: of caches, then of weights and caches.
fn asked<'a>(pools: &'a [Pool<'a>]) -> Vec<Asked<'a>> {
    let caches = of_cache(pools).into_iter().map(|spent| Asked::of(Savings::Cache, &spent));
    caches.chain(of_whole(pools).into_iter().map(|spent| Asked::of(Savings::Whole, &spent))).collect()
}

/// Whether two savings together lose what both lose alone, a sentence for each question.
pub fn findings(pools: &[Pool], protocol: &str) -> Vec<String> {
    asked(pools).iter().filter_map(|asked| asked.sentence(protocol)).collect()
}

/// The pairs that are farthest from the sum, a table for each question.
pub fn tables(pools: &[Pool], protocol: &str) -> Vec<Table> {
    asked(pools).iter().filter_map(|asked| asked.table(protocol)).collect()
}

/// `additivity.csv`: every pair of each protocol's pools; `None` without any.
///
/// # Errors
/// When a line cannot be written.
pub fn csv(of_protocols: &[(Protocol, Vec<Pool>)]) -> Result<Option<String>, ReportError> {
    const NAMES: [&str; 9] =
        ["protocol", "savings", "model", "task", "context_tokens", "weights", "format", "policy", "budget"];
    const NUMBERS: [&str; 14] = [
        "samples",
        "kl_weights",
        "kl_format",
        "kl_policy",
        "kl_cache",
        "kl_sum",
        "kl_both",
        "ratio",
        "difference",
        "ci95_low",
        "ci95_high",
        "p",
        "p_holm",
        "left_out",
    ];
    let mut table = ::csv::Writer::from_writer(Vec::new());
    table.write_record(NAMES.iter().chain(&NUMBERS))?;
    let mut is_empty = true;
    for (protocol, pools) in of_protocols {
        for Asked { savings, pairs, .. } in asked(pools) {
            for pair in pairs {
                let [names, numbers] = [identity(&pair, protocol.name(), savings), numbers(&pair, savings)];
                table.write_record(names.iter().chain(&numbers))?;
                is_empty = false;
            }
        }
    }
    if is_empty { Ok(None) } else { super::csv::text(table).map(Some) }
}

/// The first columns of a pair's line.
fn identity(pair: &Pair, protocol: &str, savings: Savings) -> Vec<String> {
    let record = pair.both.records[0];
    let task = |record: &&Record| {
        let text = record.cell.text.as_deref().and_then(|text| text.rsplit('/').next());
        text.or(record.cell.task.as_deref()).unwrap_or_default().to_string()
    };
    let tasks: BTreeSet<String> = pair.both.records.iter().map(task).collect();
    vec![
        protocol.into(),
        savings.parts().join("+"),
        record.cell.model.clone().unwrap_or_default(),
        tasks.into_iter().collect::<Vec<_>>().join(" "),
        record.cell.context_tokens.to_string(),
        record.cell.weights.as_ref().map_or("file".into(), ToString::to_string),
        record.cell.kv_format().to_string(),
        pair.both.policy.into(),
        pair.both.budget.clone(),
    ]
}

/// The others: a part that a pair does not have is empty, and so is what a pair that is left out is not corrected with.
fn numbers(pair: &Pair, savings: Savings) -> Vec<String> {
    let part = |name: &str| {
        let at = savings.parts().iter().position(|part| *part == name);
        at.map_or(String::new(), |at| rounded(pair.parts[at]))
    };
    let of = |read: fn(Difference) -> f64| pair.difference.map_or(String::new(), |found| rounded(read(found)));
    let is_corrected = pair.mute.is_none() && pair.difference.is_some();
    let left_out = match pair.mute {
        None => "",
        Some(Mute::Part) => "part",
        Some(Mute::Protected) => "protected",
    };
    let mut numbers = vec![pair.samples.to_string()];
    numbers.extend(["weights", "format", "policy", "cache"].map(part));
    numbers.extend([pair.sum(), pair.together].map(rounded));
    numbers.push(if pair.sum() > 0.0 { rounded(pair.ratio()) } else { String::new() });
    numbers.extend([of(|found| found.mean), of(|found| found.low), of(|found| found.high), of(|found| found.p)]);
    numbers.extend([if is_corrected { rounded(pair.p_holm) } else { String::new() }, left_out.into()]);
    numbers
}
