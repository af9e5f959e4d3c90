//! What the numbers say, in sentences: the first thing that a reader wants, and the figures show why.

use super::naming::{HEADS, KERNEL, Naming};
use super::{answers, baseline, palette, serving, text};
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::units;
use std::collections::BTreeMap;

/// Sentences about `records`; each stands on numbers of cells that are `ok`, or on predictions of those that ran out of
/// memory.
pub fn of(records: &[&Record]) -> Vec<String> {
    let mut sentences = ran_out(records);
    sentences.extend(
        [Measure::FORWARD, Measure::BACKWARD, Measure::DECODE]
            .into_iter()
            .filter_map(|measure| kernels(records, measure)),
    );
    sentences.extend(policies(records));
    sentences.extend(answers::findings(records));
    sentences.extend(serving::findings(records));
    sentences
}

/// For each kernel that ran out of memory: where.
fn ran_out(records: &[&Record]) -> Vec<String> {
    let mut first: BTreeMap<(Measure, &str), &Record> = BTreeMap::new();
    for record in records.iter().filter(|record| record.status == Status::Oom && record.memory.is_some()) {
        let known = first.entry((record.cell.measure, &record.cell.kernel)).or_insert(record);
        if record.cell.context_tokens < known.cell.context_tokens {
            *known = record;
        }
    }
    let sentence = |((measure, kernel), record): ((Measure, &str), &Record)| {
        let memory = record.memory.as_ref()?;
        Some(format!(
            "{}: `{kernel}` runs out of memory at a context of {}; it would need {}, the limit is {}.",
            measure.name(),
            units::tokens(record.cell.context_tokens),
            units::bytes(memory.predicted_peak_bytes),
            units::bytes(memory.limit_bytes),
        ))
    };
    first.into_iter().filter_map(sentence).collect()
}

/// The fastest kernel against `naive`, at the longest context that both ran.
fn kernels(records: &[&Record], measure: Measure) -> Option<String> {
    let compared = records.iter().filter(|record| record.cell.measure == measure && !baseline::is_one(record));
    let rivals = compared.filter_map(|record| Some((*record, baseline::speed_up(record, records)?)));
    let (best, speed) = rivals.max_by(|(a, fast), (b, faster)| {
        a.cell.context_tokens.cmp(&b.cell.context_tokens).then(fast.total_cmp(faster))
    })?;
    let theirs = baseline::of(best, records)?;
    let bytes = |record: &Record| record.memory.as_ref().map(|memory| memory.peak_bytes as f64);
    let saved = bytes(theirs).zip(bytes(best)).map(|(theirs, own)| theirs / own);
    let memory = match saved {
        Some(saved) if saved >= 1.05 => format!(", at a peak {} lower", text::times(saved)),
        Some(saved) if saved <= 0.95 => format!(", at a peak {} higher", text::times(1.0 / saved)),
        _ => String::new(),
    };
    Some(format!(
        "{} at a context of {} ({} heads, {}): `{}` takes {} of the time of `{}`{memory}.",
        measure.name(),
        units::tokens(best.cell.context_tokens),
        best.cell.heads(),
        best.cell.dtype,
        best.cell.kernel,
        text::percent(1.0 / speed),
        theirs.cell.kernel,
    ))
}

/// For each budget at the longest context: the policy with the least drift, and what it buys.
fn policies(records: &[&Record]) -> Vec<String> {
    let is_real = |name: &str| !palette::is_baseline(name) && !palette::is_oracle(name);
    let mut evicted: Vec<&Record> = records.to_vec();
    evicted.retain(|record| record.status == Status::Ok && record.cell.policy.as_deref().is_some_and(is_real));
    let longest = evicted.iter().map(|record| record.cell.context_tokens).max();
    evicted.retain(|record| Some(record.cell.context_tokens) == longest);
    let naming = Naming::over(&evicted, &[HEADS, KERNEL]);
    // Cells that differ only in their seed speak through their median, so that no policy wins by a lucky seed.
    type Seeds<'r> = Vec<(f64, &'r Record)>;
    let mut seeds: BTreeMap<(&str, &str, String), Seeds> = BTreeMap::new();
    for record in evicted {
        if let (Some(policy), Some(budget), Some(drift)) = (&record.cell.policy, &record.cell.budget, &record.drift) {
            seeds.entry((budget, policy, naming.apart(record))).or_default().push((drift.rel_l2, record));
        }
    }
    let mut best: BTreeMap<&str, (f64, &Record)> = BTreeMap::new();
    for ((budget, ..), mut cells) in seeds {
        cells.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        let median = cells[(cells.len() - 1) / 2];
        let known = best.entry(budget).or_insert(median);
        if median.0 < known.0 {
            *known = median;
        }
    }
    let sentence = |(budget, (drift, record)): (&str, (f64, &Record))| {
        let eviction = record.eviction.as_ref()?;
        let saved = eviction.kv_bytes_dense as f64 / eviction.kv_bytes_live as f64;
        let speed = baseline::speed_up(record, records);
        let time = speed.map(|speed| format!(" and {} of the decode time", text::percent(1.0 / speed)));
        Some(format!(
            "evict at a context of {}, budget {budget}: `{}`{} has the least drift ({}) of the policies, with {} of the \
             KV bytes{} of `full`.",
            units::tokens(record.cell.context_tokens),
            record.cell.policy.as_deref()?,
            naming.apart(record),
            text::drift(drift),
            text::percent(1.0 / saved),
            time.unwrap_or_default(),
        ))
    };
    best.into_iter().filter_map(sentence).collect()
}
