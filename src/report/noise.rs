//! What may be said of numbers that have intervals: a difference is one where at least ten samples stand behind each
//! number and the intervals do not meet. All else is undecided, or a warning.

use super::naming::{BUDGET, CONTEXT, Naming};
use super::workers::{Machine, machine};
use super::{baseline, text};
use crate::experiment::record::{Latency, Record, Status};
use crate::stats::{LEAST_FOR_INTERVAL, wilson};
use crate::units;
use std::collections::BTreeMap;

/// Fewer samples make no finding: their interval is itself a guess.
pub const LEAST_SAMPLES: usize = 10;
/// Half an interval of a median time, as a part of the median, from which on it is wide.
const WIDE_TIME: f64 = 0.1;
/// Half an interval of a score from which on it is wide.
const WIDE_SCORE: f64 = 0.1;
/// Names that a sentence lists before it counts the rest.
const MOST_NAMES: usize = 5;

/// A number with its 95% interval and how many samples are behind it.
pub struct Measured {
    /// What it is of.
    pub name: String,
    /// The number.
    pub value: f64,
    /// Lower end of its interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Samples.
    pub count: usize,
    /// Whether the interval is the range of samples too few for one of 95%.
    pub is_range: bool,
}

impl Measured {
    /// The median time of a phase, in nanoseconds.
    pub fn time(name: String, phase: &Latency) -> Measured {
        let (low, high) = (phase.ci95_low_ns, phase.ci95_high_ns);
        let count = phase.samples_ns.len();
        Measured { name, value: phase.median_ns, low, high, count, is_range: count < LEAST_FOR_INTERVAL }
    }

    /// Whether it is sure that the two differ.
    pub fn differs(&self, other: &Measured) -> bool {
        self.count.min(other.count) >= LEAST_SAMPLES && (self.high < other.low || other.high < self.low)
    }

    /// Name, value and interval; where it is a range, of how many samples.
    pub fn words(&self, write: impl Fn(f64) -> String) -> String {
        let Measured { name, value, low, high, count, is_range } = self;
        let sure = match is_range {
            true => format!("{}:", units::counted(*count as u64, "sample")),
            false => "95%".into(),
        };
        format!("`{name}` ({}, {sure} {} to {})", write(*value), write(*low), write(*high))
    }
}

/// Names in a sentence, the last ones counted where there are many.
pub fn listed(names: Vec<String>) -> String {
    match &names[..] {
        [first @ .., last] if !first.is_empty() && names.len() <= MOST_NAMES => {
            format!("{} and {last}", first.join(", "))
        }
        _ if names.len() <= MOST_NAMES => names.concat(),
        _ => format!("{} and {} more", names[..MOST_NAMES - 1].join(", "), names.len() - (MOST_NAMES - 1)),
    }
}

/// What is said instead of a winner among `rivals`, of which the weakest has `samples`.
pub fn undecided(rivals: Vec<String>, samples: usize) -> String {
    let few = if samples < LEAST_SAMPLES {
        format!(" with {} ({LEAST_SAMPLES} make a finding)", units::counted(samples as u64, "sample"))
    } else {
        String::new()
    };
    let between = if rivals.len() > 1 { " between" } else { "," };
    format!("undecided{few}{between} {}", listed(rivals))
}

/// What a reader must know of the intervals of all `records`.
pub fn warnings(records: &[&Record]) -> Vec<String> {
    let ok: Vec<&Record> = records.iter().copied().filter(|record| record.status == Status::Ok).collect();
    wide_times(&ok).into_iter().chain(wide_scores(&ok)).chain(unequal_words(&ok)).collect()
}

fn wide_times(records: &[&Record]) -> Option<String> {
    let half = |record: &&Record| {
        let phase = text::main_phase(record).filter(|phase| phase.samples_ns.len() > 1)?;
        Some((((phase.ci95_high_ns - phase.ci95_low_ns) / 2.0 / phase.median_ns), record.cell.label()))
    };
    let timed: Vec<(f64, String)> = records.iter().filter_map(half).filter(|(half, _)| half.is_finite()).collect();
    let wide = timed.iter().filter(|(half, _)| *half > WIDE_TIME);
    let (most, cell) = wide.clone().max_by(|(a, _), (b, _)| a.total_cmp(b))?;
    Some(format!(
        "Wide intervals: the median time of {} of {} cells is not known to ±{}; the worst, `{cell}`, to ±{}. Something else \
         ran on the machine, or samples were few.",
        wide.count(),
        timed.len(),
        text::percent(WIDE_TIME),
        text::percent(*most),
    ))
}

fn wide_scores(records: &[&Record]) -> Option<String> {
    let half = |record: &&Record| {
        let answers = record.answers.as_ref()?;
        let score = answers.accuracy?;
        Some(((score.ci95_high - score.ci95_low) / 2.0, answers.samples, score.mean))
    };
    let scored: Vec<(f64, usize, f64)> = records.iter().filter_map(half).collect();
    let wide = scored.iter().filter(|(half, ..)| *half > WIDE_SCORE);
    let (most, samples, share) = wide.clone().max_by(|(a, ..), (b, ..)| a.total_cmp(b))?;
    let is_enough = |count: &usize| {
        let (low, high) = wilson(*share, *count);
        high - low <= 2.0 * WIDE_SCORE
    };
    let enough = (1..).map(|tens| 10 * tens).find(is_enough)?;
    let points = |half: f64| format!("{:.0}", 100.0 * half);
    Some(format!(
        "Wide intervals: the score of {} of {} cells is not known to ±{} points, the worst to ±{} with {samples} samples; \
         about {enough} would do.",
        wide.count(),
        scored.len(),
        points(WIDE_SCORE),
        points(*most),
    ))
}

/// Cells that hold and read equal bytes in one setting, where a time differs from that of the middle one beyond noise: the
/// middle one, then those.
pub fn unequal<'a>(records: &[&'a Record]) -> Vec<(&'a Record, Vec<&'a Record>)> {
    type Timed<'r> = Vec<(&'r Latency, &'r Record)>;
    let mut groups: BTreeMap<(String, Machine, u64, u64), Timed> = BTreeMap::new();
    for &record in records.iter().filter(|record| record.status == Status::Ok && !baseline::is_one(record)) {
        let (Some(eviction), Some(phase)) = (&record.eviction, text::main_phase(record)) else { continue };
        let key = (record.cell.without_choice().id(), machine(record), eviction.kv_bytes_live, eviction.kv_bytes_read);
        groups.entry(key).or_default().push((phase, record));
    }
    let apart = |mut group: Timed<'a>| {
        group.sort_by(|(a, _), (b, _)| a.median_ns.total_cmp(&b.median_ns));
        let (middle, of) = group[(group.len() - 1) / 2];
        let time = |phase| Measured::time(String::new(), phase);
        let differ = group.iter().filter(|(phase, _)| time(phase).differs(&time(middle)));
        (of, differ.map(|(_, record)| *record).collect::<Vec<_>>())
    };
    groups.into_values().map(apart).filter(|(_, differ)| !differ.is_empty()).collect()
}

/// The same in sentences, one for each context.
fn unequal_words(records: &[&Record]) -> Vec<String> {
    let mut all = unequal(records);
    all.sort_by_key(|(of, _)| of.cell.context_tokens);
    let naming = Naming::over(records, &[]);
    let named = |record: &Record| {
        let name = format!("{}{} {}", record.cell.chosen().unwrap_or_default(), naming.apart(record), BUDGET(record));
        let phase = text::main_phase(record)?;
        Some(Measured::time(name, phase).words(units::nanoseconds))
    };
    let sentence = |groups: &[(&Record, Vec<&Record>)]| {
        let differ: Vec<String> =
            groups.iter().flat_map(|(_, differ)| differ).filter_map(|record| named(record)).collect();
        let middle = groups.iter().filter_map(|(of, _)| named(of)).collect();
        format!(
            "Equal bytes, unequal times (≠ in the tables), {}: {} against {}: not bytes alone decide the time.",
            CONTEXT(groups[0].0),
            listed(differ),
            listed(middle),
        )
    };
    all.chunk_by(|(a, _), (b, _)| a.cell.context_tokens == b.cell.context_tokens).map(sentence).collect()
}
