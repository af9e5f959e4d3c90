//! What the numbers say, in sentences: the first thing that a reader wants, and the figures show why.
//!
//! A winner is named where [`super::noise`] says that there is one; elsewhere all that may be it, with their intervals.

use super::naming::{HEADS, KERNEL, Naming};
use super::noise::{self, Measured};
use super::{baseline, growth, knobs, leaderboard, palette, serving, text};
use crate::experiment::cell::Cell;
use crate::experiment::measure::{Choice, Measure};
use crate::experiment::record::{Drift, Record, Status};
use crate::units;
use std::collections::BTreeMap;

/// Shares of bytes less far apart than this, as a factor, are one.
const NEAR: f64 = 1.25;

/// Sentences about `records`; each stands on numbers of cells that are `ok`, or on predictions of those that ran out of
/// memory. Warnings of wide intervals are the last.
pub fn of(records: &[&Record]) -> Vec<String> {
    let of_all_settings = records;
    let records = &knobs::own(records)[..];
    let mut sentences = ran_out(records);
    sentences.extend(
        [Measure::FORWARD, Measure::BACKWARD, Measure::DECODE]
            .into_iter()
            .filter_map(|measure| kernels(records, measure)),
    );
    sentences.extend(policies(records));
    sentences.extend(knobs::findings(of_all_settings));
    sentences.extend(leaderboard::findings(records));
    sentences.extend(serving::findings(records));
    sentences.extend(noise::warnings(records));
    sentences
}

/// For each kernel that ran out of memory: where. Other measures are no matter of kernels: their tables say what has no room.
fn ran_out(records: &[&Record]) -> Vec<String> {
    let mut first: BTreeMap<(Measure, &str), &Record> = BTreeMap::new();
    let is_kernels =
        |record: &&&Record| record.cell.measure.compares() == Choice::Kernel || record.cell.measure == Measure::EVICT;
    let ran_out = |record: &&&Record| record.needed_bytes().is_some();
    for record in records.iter().filter(is_kernels).filter(ran_out) {
        let known = first.entry((record.cell.measure, &record.cell.kernel)).or_insert(record);
        if record.cell.context_tokens < known.cell.context_tokens {
            *known = record;
        }
    }
    let sentence = |((measure, kernel), record): ((Measure, &str), &Record)| {
        let (memory, needed) = (record.memory.as_ref()?, record.needed_bytes()?);
        Some(format!(
            "{}: `{kernel}` runs out of memory at a context of {}; it would need {}, the limit is {}.",
            measure.name(),
            units::tokens(record.cell.context_tokens),
            units::bytes(needed),
            units::bytes(memory.limit_bytes),
        ))
    };
    first.into_iter().filter_map(sentence).collect()
}

/// The fastest kernel against `naive`, at the longest context that both ran. Of several seeds the median speaks, so that no
/// kernel wins by a lucky one.
fn kernels(records: &[&Record], measure: Measure) -> Option<String> {
    let compared = records.iter().filter(|record| record.cell.measure == measure && !baseline::is_one(record));
    let mut seeds: BTreeMap<String, Vec<(&Record, f64)>> = BTreeMap::new();
    for (record, speed) in compared.filter_map(|record| Some((*record, baseline::speed_up(record, records)?))) {
        let cell = Cell { seed: 0, workload_hash: String::new(), ..record.cell.clone() };
        seeds.entry(cell.id()).or_default().push((record, speed));
    }
    let ((best, speed), of_seeds) =
        seeds.into_values().map(median_speed).max_by(|((a, fast), _), ((b, faster), _)| {
            a.cell.context_tokens.cmp(&b.cell.context_tokens).then(fast.total_cmp(faster))
        })?;
    let of_seeds = if of_seeds > 1 { format!(", the median of {of_seeds} seeds") } else { String::new() };
    let theirs = baseline::of(best, records)?;
    let bytes = |record: &Record| record.memory.as_ref().map(|memory| memory.peak_bytes as f64);
    let saved = bytes(theirs).zip(bytes(best)).map(|(theirs, own)| theirs / own);
    let memory = match saved {
        Some(saved) if saved >= 1.05 => format!(", at a peak {} lower", text::times(saved)),
        Some(saved) if saved <= 0.95 => format!(", at a peak {} higher", text::times(1.0 / saved)),
        _ => String::new(),
    };
    let phases = (text::main_phase(best)?, text::main_phase(theirs)?);
    let time = |record: &Record, phase| Measured::time(record.cell.kernel.clone(), phase);
    let (own, other) = (time(best, phases.0), time(theirs, phases.1));
    let words = |measured: &Measured| measured.words(units::nanoseconds);
    let of_ranks = noise::apart(phases.0, phases.1);
    let what = if own.differs(&other) || of_ranks == Some(true) {
        format!("{} takes {} of the time of {}{memory}", words(&own), text::percent(1.0 / speed), words(&other))
    } else {
        let samples = own.count.min(other.count);
        let memory = memory.replacen(", at", &format!("; `{}` runs at", own.name), 1);
        let few =
            if of_ranks.is_some() { "; their ranges do not meet, but samples are too few to be sure" } else { "" };
        format!("the time is {}{few}{memory}", noise::undecided(vec![words(&own), words(&other)], samples))
    };
    Some(format!(
        "{} at a context of {} ({} heads, {}{of_seeds}): {what}.",
        measure.name(),
        units::tokens(best.cell.context_tokens),
        best.cell.heads(),
        best.cell.dtype,
    ))
}

/// The lower median of cells that differ in their seed, and how many they are.
fn median_speed(mut of: Vec<(&Record, f64)>) -> ((&Record, f64), usize) {
    of.sort_by(|(_, slow), (_, fast)| slow.total_cmp(fast));
    (of[(of.len() - 1) / 2], of.len())
}

/// For each budget at the longest context: the policy with the least drift, and what it buys.
fn policies(records: &[&Record]) -> Vec<String> {
    let is_real = |name: &str| !palette::is_baseline(name) && !palette::is_oracle(name);
    let mut evicted: Vec<&Record> = records.to_vec();
    evicted.retain(|record| {
        record.status == Status::Ok && record.drift.is_some() && record.cell.policy.as_deref().is_some_and(is_real)
    });
    let longest = evicted.iter().map(|record| record.cell.context_tokens).max();
    evicted.retain(|record| Some(record.cell.context_tokens) == longest);
    let naming = Naming::over(&evicted, &[HEADS, KERNEL]);
    // Cells that differ only in their seed speak through their median, so that no policy wins by a lucky seed.
    type Seeds<'r> = Vec<(&'r Drift, &'r Record)>;
    let mut seeds: BTreeMap<&str, BTreeMap<String, Seeds>> = BTreeMap::new();
    for record in evicted {
        if let (Some(policy), Some(budget), Some(drift)) = (&record.cell.policy, &record.cell.budget, &record.drift) {
            let name = format!("{policy}{}", naming.apart(record));
            seeds.entry(budget).or_default().entry(name).or_default().push((drift, record));
        }
    }
    let sentence = |(budget, policies): (&str, BTreeMap<String, Seeds>)| {
        // Intervals of a single draw are over its tokens: what another draw would give, they do not know.
        let draws = policies.values().map(Vec::len).min().unwrap_or(0);
        let mut rivals: Vec<(Measured, &Record)> = policies.into_iter().map(over_seeds).collect();
        rivals.sort_by(|(a, _), (b, _)| a.value.total_cmp(&b.value));
        let all: Vec<&Record> = rivals.iter().map(|(_, record)| *record).collect();
        let is_grown = |(_, record): &(Measured, &Record)| growth::outgrows(record, all.iter().copied());
        let (grown, rivals): (Vec<_>, Vec<_>) = rivals.into_iter().partition(is_grown);
        let tight = rivals.iter().filter(|(_, record)| text::is_only_protected(record));
        let tight: Vec<String> = tight.map(|(measured, _)| measured.name.clone()).collect();
        let (best, record) = rivals.first()?;
        let words = |(measured, _): &(Measured, &Record)| measured.words(text::drift);
        let near = || rivals[1..].iter().filter(|(other, _)| !best.differs(other));
        // Who has no rival is no winner.
        let next = rivals.get(1)?;
        let what = if near().next().is_none() {
            format!(
                "{} has the least drift of {}, before {}; it needs {}",
                words(&rivals[0]),
                rivals.len(),
                words(next),
                needs(record, records)?
            )
        } else {
            let samples = near().map(|(other, _)| other.count).min().unwrap_or(0).min(best.count);
            let all = std::iter::once(&rivals[0]).chain(near()).map(words).collect();
            format!("the least drift is {}", noise::undecided(all, samples))
        };
        let context = units::tokens(record.cell.context_tokens);
        let draw = if draws == 1 { ", one draw of the inputs" } else { "" };
        let held = |rival: &(Measured, &Record)| {
            let share = end_share(rival.1, records);
            let share =
                share.map_or(String::new(), |share| format!(", {} of the KV bytes of `full`", text::percent(share)));
            format!("{}{share}", words(rival))
        };
        let apart = grown.iter().map(held).collect::<Vec<_>>().join("; ");
        let apart = match apart.is_empty() {
            true => apart,
            false => format!(" Not ranked beside them, since more than twice as much stays in the end: {apart}."),
        };
        let tight = text::only_protected(&tight);
        Some(format!("evict at a context of {context}, budget {budget}{draw}: {what}.{apart}{tight}"))
    };
    seeds.into_iter().filter_map(sentence).collect()
}

/// The drift of cells that differ in their seed: the median, and an interval that holds those of all.
fn over_seeds<'r>((name, mut cells): (String, Vec<(&'r Drift, &'r Record)>)) -> (Measured, &'r Record) {
    cells.sort_by(|(a, _), (b, _)| a.rel_l2.total_cmp(&b.rel_l2));
    let (median, record) = cells[(cells.len() - 1) / 2];
    let low = cells.iter().map(|(drift, _)| drift.ci95_low).fold(f64::INFINITY, f64::min);
    let high = cells.iter().map(|(drift, _)| drift.ci95_high).fold(f64::NEG_INFINITY, f64::max);
    let count = cells.iter().map(|(drift, record)| drift.checked_tokens(&record.cell)).sum();
    let ends = (low.min(cells[0].0.rel_l2), high.max(cells[cells.len() - 1].0.rel_l2));
    (Measured { name, value: median.rel_l2, low: ends.0, high: ends.1, count, is_range: false }, record)
}

/// What a policy's cell takes of what the full cache takes: bytes and, where that is sure, time.
fn needs(record: &Record, records: &[&Record]) -> Option<String> {
    let eviction = record.eviction.as_ref()?;
    let share = eviction.kv_bytes_live as f64 / eviction.kv_bytes_dense as f64;
    let time = |record: &Record| Some(Measured::time(String::new(), text::main_phase(record)?));
    let full = baseline::of(record, records).and_then(time);
    // Where policies take several times for the same bytes, none of these is the time of the bytes.
    let is_unequal = noise::is_among_unequal(record, records);
    let time = time(record).zip(full).filter(|(own, full)| !is_unequal && own.differs(full));
    let time = time.map(|(own, full)| format!(" and {} of the decode time", text::percent(own.value / full.value)));
    let (bytes, time) = (text::percent(share), time.unwrap_or_default());
    // Where many tokens are decoded, what stays of the context is not what is held.
    let end = end_share(record, records).filter(|end| !(1.0 / NEAR..=NEAR).contains(&(end / share)));
    Some(match end {
        Some(end) => {
            format!(
                "{bytes} of the KV bytes behind prefill, {} of those at the end{time} of `full`",
                text::percent(end)
            )
        }
        None => format!("{bytes} of the KV bytes{time} of `full`"),
    })
}

/// KV bytes at the end of decoding, of those that the full cache has then.
fn end_share(record: &Record, records: &[&Record]) -> Option<f64> {
    let full = growth::end_bytes(baseline::of(record, records)?)?;
    Some(growth::end_bytes(record)? as f64 / full as f64)
}
