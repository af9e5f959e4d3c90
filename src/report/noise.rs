//! What may be said of numbers that have intervals: a difference is one where at least ten samples stand behind each
//! number and the intervals do not meet, or, of times, where all samples of one lie below all of the other and these are enough to make
//! that no chance. All else is undecided, or a warning.

use super::naming::{BUDGET, CONTEXT, Naming};
use super::workers::{Machine, machine};
use super::{baseline, text};
use crate::experiment::answers::Estimate;
use crate::experiment::record::{Latency, Record, Status};
use crate::stats::{LEAST_FOR_INTERVAL, rank_sum_p, wilson};
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

    /// Name, value and interval; where it is a range, of how many samples. One sample has neither.
    pub fn words(&self, write: impl Fn(f64) -> String) -> String {
        let Measured { name, value, low, high, count, is_range } = self;
        let (value, ends) = (write(*value), format!("{} to {}", write(*low), write(*high)));
        match (is_range, count) {
            (true, 1) => format!("`{name}` ({value}, 1 sample)"),
            (true, count) => format!("`{name}` ({value}, {count} samples: {ends})"),
            (false, _) => format!("`{name}` ({value}, 95% {ends})"),
        }
    }
}

/// How two sets of times that do not overlap lie: whether a rank-sum test is sure of it. `None` where they overlap.
pub fn apart(a: &Latency, b: &Latency) -> Option<bool> {
    let ends = |phase: &Latency| {
        let samples = &phase.samples_ns;
        Some((*samples.iter().min()?, *samples.iter().max()?))
    };
    let ((a_low, a_high), (b_low, b_high)) = ends(a).zip(ends(b))?;
    let is_apart = a_high < b_low || b_high < a_low;
    is_apart.then(|| rank_sum_p(a.samples_ns.len(), b.samples_ns.len()) < 0.05)
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

/// What is said instead of a winner among two `rivals` or more, of which the weakest has `samples`.
pub fn undecided(rivals: Vec<String>, samples: usize) -> String {
    let few = if samples < LEAST_SAMPLES {
        format!(" with {} ({LEAST_SAMPLES} make a finding)", units::counted(samples as u64, "sample"))
    } else {
        String::new()
    };
    format!("undecided{few} between {}", listed(rivals))
}

/// What a reader must know of the intervals of all `records`.
pub fn warnings(records: &[&Record]) -> Vec<String> {
    let ok: Vec<&Record> = records.iter().copied().filter(|record| record.status == Status::Ok).collect();
    let of_times = wide_times(&ok).into_iter().chain(single_times(&ok));
    of_times.chain(wide_scores(&ok)).chain(unequal_words(&ok)).collect()
}

/// `1 of 3 scores is`, `2 of 3 scores are`.
fn part_of(part: usize, all: usize, what: &str) -> String {
    format!("{part} of {} {}", units::counted(all as u64, what), if part == 1 { "is" } else { "are" })
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
        "Wide intervals: {} not known to ±{}; the worst, `{cell}`, to ±{}. Something else ran on the machine, or samples were few.",
        part_of(wide.count(), timed.len(), "median time"),
        text::percent(WIDE_TIME),
        text::percent(*most),
    ))
}

/// Times of one sample, of which nobody knows how far they are off.
fn single_times(records: &[&Record]) -> Option<String> {
    let counts: Vec<usize> =
        records.iter().filter_map(|record| Some(text::main_phase(record)?.samples_ns.len())).collect();
    let single = counts.iter().filter(|count| **count == 1).count();
    let is = if single == 1 { "is" } else { "are" };
    (single > 0).then(|| format!("Times without an interval: {single} of {} {is} of one sample.", counts.len()))
}

fn wide_scores(records: &[&Record]) -> Option<String> {
    let half = |record: &&Record| {
        let answers = record.answers.as_ref()?;
        let score = answers.accuracy?;
        Some(((score.ci95_high - score.ci95_low) / 2.0, answers.samples, score))
    };
    let scored: Vec<(f64, usize, Estimate)> = records.iter().filter_map(half).collect();
    let wide = scored.iter().filter(|(half, ..)| *half > WIDE_SCORE);
    let (most, samples, _) = wide.clone().max_by(|(a, ..), (b, ..)| a.total_cmp(b))?;
    // The score may be anywhere in its interval, and the nearer to a half it is, the more samples it takes.
    let hardest = wide.clone().map(|(.., score)| 0.5f64.max(score.ci95_low).min(score.ci95_high).clamp(0.0, 1.0));
    let hardest = hardest.min_by(|a, b| (a - 0.5).abs().total_cmp(&(b - 0.5).abs()))?;
    let is_enough = |count: &usize| {
        let (low, high) = wilson(hardest, *count);
        high - low <= 2.0 * WIDE_SCORE
    };
    let enough = (1..).map(|tens| 10 * tens).find(is_enough)?;
    let points = |half: f64| format!("{:.0}", 100.0 * half);
    Some(format!(
        "Wide intervals: {} not known to ±{} points, the worst to ±{} with {}; about {enough} would do for all.",
        part_of(wide.count(), scored.len(), "score"),
        points(WIDE_SCORE),
        points(*most),
        units::counted(*samples as u64, "sample"),
    ))
}

/// Cells that hold and read equal bytes in one setting, where a time differs from that of the middle one beyond noise: the
/// middle one, then those.
pub fn unequal<'a>(records: &[&'a Record]) -> Vec<(&'a Record, Vec<&'a Record>)> {
    type Timed<'r> = Vec<(&'r Latency, &'r Record)>;
    let mut groups: BTreeMap<Bytes, Timed> = BTreeMap::new();
    for &record in records.iter().filter(|record| record.status == Status::Ok && !baseline::is_one(record)) {
        let Some((bytes, phase)) = bytes(record).zip(text::main_phase(record)) else { continue };
        groups.entry(bytes).or_default().push((phase, record));
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

/// A setting, a machine, and the bytes that are held and read there.
type Bytes = (String, Machine, u64, u64);

fn bytes(record: &Record) -> Option<Bytes> {
    let eviction = record.eviction.as_ref()?;
    Some((record.cell.without_choice().id(), machine(record), eviction.kv_bytes_live, eviction.kv_bytes_read))
}

/// Whether some cell takes another time than others for the bytes of this one, whichever of them it is: then no time is that of the bytes.
pub fn is_among_unequal(record: &Record, records: &[&Record]) -> bool {
    unequal(records).iter().any(|(of, _)| bytes(of) == bytes(record))
}

/// What [`unequal`] finds in sentences, one for each context.
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
