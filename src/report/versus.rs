//! Two runs beside each other: what differs in how they were made, and which cells changed beyond noise.
//!
//! Cells are the same when their ids are: all that decides a number but the code and the machine. Bytes are exact, so that any
//! difference is a change. A time has changed when the intervals of the two medians do not meet and the medians are
//! further apart than [`STILL`]; times of different machines are not compared. Drift, scores and what else a measure found have
//! changed when they differ by more than rounding does.

use super::naming::{BUDGET, CONTEXT, HEADS, KERNEL, Naming, SEED, TASK};
use super::noise::LEAST_SAMPLES;
use super::text::{self, NOTHING};
use super::{Run, latest, summary, table};
use crate::experiment::cell::Cell;
use crate::experiment::record::{Latency, Record, Status};
use crate::units;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Medians that lie nearer to each other are the same: two runs of one program, minutes apart, differ by as much.
const STILL: f64 = 0.05;
/// Drift and scores that lie nearer to each other are the same, relative to the larger.
const ROUNDING: f64 = 1e-3;
/// Drift up to here is of roundings alone, which change with the order of sums.
const OF_ROUNDING: f64 = 1e-5;
/// Facts of `env.json` that differ between any two runs.
const PASSING: [&str; 6] =
    ["run.started_at", "run.command", "run.cells", "run.shard", "machine.available_bytes", "machine.load_before"];
/// Facts without which times can be compared.
const MACHINE: [&str; 6] = ["machine.cpu", "machine.cores", "run.threads", "run.isa_path", "run.device", "gpu.name"];

/// Two runs compared.
#[derive(Debug, Clone, PartialEq)]
pub struct Versus {
    /// What a reader is shown, in Markdown, at most 100 columns wide.
    pub text: String,
    /// Cells that both runs have.
    pub common: usize,
    /// Of these, how many changed beyond noise, or ended otherwise.
    pub changed: usize,
    /// Cells of the first run that the second has not.
    pub gone: usize,
}

/// Compares the run `b` with the earlier run `a`.
pub fn versus(a: &Run, b: &Run) -> Versus {
    let (before, after) = (latest(&a.records), latest(&b.records));
    let known: BTreeMap<&str, &Record> = before.iter().map(|record| (record.cell_id.as_str(), *record)).collect();
    let pairs: Vec<(&Record, &Record)> =
        after.iter().filter_map(|&after| Some((*known.get(after.cell_id.as_str())?, after))).collect();
    let differences = differences(&a.environment, &b.environment);
    let same_machine = differences.iter().all(|(name, ..)| !MACHINE.contains(&name.as_str()));
    let changes: Vec<Change<'_>> = pairs.iter().map(|&(a, b)| Change::of(a, b, same_machine)).collect();
    let changed = changes.iter().filter(|change| change.is_one()).count();

    let mut text = format!("### {} against {}\n\n", b.run_id, a.run_id);
    for (name, a, b) in &differences {
        text.push_str(&format!("- {name}: {a} -> {b}\n"));
    }
    if !same_machine {
        text.push_str("- times are of different machines and count for nothing\n");
    }
    let (gone, new) = (before.len() - pairs.len(), after.len() - pairs.len());
    let others = [(gone, "only in the first"), (new, "only in the second")];
    let others = others.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!(", {count} {what}"));
    let cells = |count: usize| units::counted(count as u64, "cell");
    text.push_str(&format!("- {} in both{}\n", cells(pairs.len()), others.collect::<String>()));
    let untimed = pairs.iter().filter(|(a, b)| same_machine && phases(a, b).is_some_and(|(a, b)| !are_enough(a, b)));
    match untimed.count() {
        0 => (),
        count => text.push_str(&format!(
            "- times of {} are of fewer than {LEAST_SAMPLES} samples and count for nothing\n",
            cells(count)
        )),
    }
    text.push_str(&match changed {
        0 => "\nNo cell changed beyond noise.\n".into(),
        _ => format!("\n{}\n{changed} of {} changed (second / first).\n", table(&changes), cells(pairs.len())),
    });
    Versus { text, common: pairs.len(), changed, gone }
}

/// A cell in two runs.
struct Change<'r> {
    a: &'r Record,
    b: &'r Record,
    status: bool,
    time: bool,
    peak: bool,
    drift: bool,
    score: bool,
    /// What else the measure found that is no longer the same, as `recall.kept.mean 0.91 -> 0.4`.
    found: Vec<String>,
}

impl<'r> Change<'r> {
    fn of(a: &'r Record, b: &'r Record, same_machine: bool) -> Self {
        let both = |value: fn(&Record) -> Option<f64>| value(a).zip(value(b)).is_some_and(|(a, b)| apart(a, b));
        Change {
            a,
            b,
            status: a.status != b.status,
            time: same_machine && is_alike(a, b) && phases(a, b).is_some_and(|(a, b)| has_changed(a, b)),
            peak: a.status == b.status && peak(a) != peak(b),
            drift: both(drift) && [a, b].into_iter().filter_map(drift).any(|drift| drift > OF_ROUNDING),
            score: both(score),
            found: found(a, b),
        }
    }

    fn is_one(&self) -> bool {
        self.status || self.time || self.peak || self.drift || self.score || !self.found.is_empty()
    }
}

/// Whether two cells of one machine were timed alike: a run may have gone on with other threads.
fn is_alike(a: &Record, b: &Record) -> bool {
    let cpus = [a, b].map(|record| record.worker.as_ref().map(|worker| &worker.cpu));
    let of_one_cpu = cpus[0].zip(cpus[1]).is_none_or(|(a, b)| a == b);
    of_one_cpu && a.threads == b.threads && a.isa_path == b.isa_path
}

fn phases<'r>(a: &'r Record, b: &'r Record) -> Option<(&'r Latency, &'r Latency)> {
    text::main_phase(a).zip(text::main_phase(b))
}

/// Intervals of fewer samples are too narrow.
fn are_enough(a: &Latency, b: &Latency) -> bool {
    a.samples_ns.len().min(b.samples_ns.len()) >= LEAST_SAMPLES
}

fn has_changed(a: &Latency, b: &Latency) -> bool {
    let meet = a.ci95_low_ns <= b.ci95_high_ns && b.ci95_low_ns <= a.ci95_high_ns;
    are_enough(a, b) && !meet && (b.median_ns / a.median_ns - 1.0).abs() > STILL
}

fn peak(record: &Record) -> Option<f64> {
    Some(record.memory.as_ref()?.peak_bytes as f64)
}

/// The distance from the full cache's result, whichever the measure has.
fn drift(record: &Record) -> Option<f64> {
    let of_tensors = record.drift.as_ref().map(|drift| drift.rel_l2);
    of_tensors.or_else(|| Some(record.answers.as_ref()?.kl_nats.mean))
}

fn score(record: &Record) -> Option<f64> {
    Some(record.answers.as_ref()?.accuracy.as_ref()?.mean)
}

/// Numbers of a memory's, an editor's and a pool's results and of an eviction that differ.
fn found(a: &Record, b: &Record) -> Vec<String> {
    if a.status != Status::Ok || b.status != Status::Ok {
        return Vec::new();
    }
    let numbers = |record: &Record| {
        let eviction = record.eviction.as_ref();
        let live = eviction.map(|eviction| eviction.kv_bytes_live);
        let eviction = json!({"kv_bytes_live": live, "needle_recall": eviction.and_then(|found| found.needle_recall)});
        flat(&json!({"recall": record.recall, "edit": record.edit, "serving": record.serving, "eviction": eviction}))
    };
    let (before, after) = (numbers(a), numbers(b));
    let differs = |name: &&String| {
        let number = |of: &BTreeMap<String, String>| of.get(*name).and_then(|text| text.parse::<f64>().ok());
        match (number(&before), number(&after)) {
            (Some(a), Some(b)) => apart(a, b),
            (a, b) => a != b,
        }
    };
    let words = |name: &String| {
        let value = |of: &BTreeMap<String, String>| {
            let number = of.get(name).and_then(|text| text.parse().ok());
            number.map_or(NOTHING.into(), units::three_digits)
        };
        format!("{name} {} -> {}", value(&before), value(&after))
    };
    let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    names.into_iter().filter(differs).map(words).collect()
}

fn apart(a: f64, b: f64) -> bool {
    (a - b).abs() > ROUNDING * a.abs().max(b.abs())
}

/// The lines of the cells that changed.
fn table(changes: &[Change<'_>]) -> String {
    let records: Vec<&Record> = changes.iter().map(|change| change.b).collect();
    // A kernel is a part of a name where a policy is the other.
    let [of_policies, of_kernels] =
        [&[TASK, HEADS, KERNEL, SEED][..], &[TASK, HEADS, SEED]].map(|facts| Naming::over(&records, facts));
    let changed: BTreeSet<_> =
        changes.iter().filter(|change| change.is_one()).map(|change| change.b.cell.measure).collect();
    let has = |what: fn(&Change<'_>) -> bool| changes.iter().any(|change| change.is_one() && what(change));
    let mut headings = if changed.len() > 1 { vec!["measure"] } else { Vec::new() };
    headings.extend(["context", "policy", "budget", "time", "95%"]);
    let (with_peak, with_drift, with_score) = (has(|c| c.peak || c.status), has(|c| c.drift), has(|c| c.score));
    headings.extend(with_peak.then_some("peak"));
    headings.extend(with_drift.then_some("drift"));
    headings.extend(with_score.then_some("score"));
    let with_found = has(|c| !c.found.is_empty());
    headings.extend(with_found.then_some("found"));
    let mut rows = vec![headings.into_iter().map(String::from).collect::<Vec<_>>()];
    for change in changes.iter().filter(|change| change.is_one()) {
        let (a, b) = (change.a, change.b);
        let mark = |changed: bool, text: String| if changed { format!("{text} *") } else { text };
        let ratio = |value: fn(&Record) -> Option<f64>| value(a).zip(value(b)).map(|(a, b)| text::times(b / a));
        let Cell { tuning, ranks, strategy, episode, kernel, .. } = &b.cell;
        let others = [tuning, ranks, strategy, episode].into_iter().flatten().map(String::as_str);
        let subject = b.cell.chosen().into_iter().chain(others).next().unwrap_or(kernel);
        let [time, interval] = match phases(a, b) {
            _ if change.status => {
                [format!("{} -> {}", summary::status(a.status), summary::status(b.status)), NOTHING.into()]
            }
            Some((a, b)) => {
                let ends = [b.ci95_low_ns / a.ci95_high_ns, b.ci95_high_ns / a.ci95_low_ns].map(units::three_digits);
                [mark(change.time, text::times(b.median_ns / a.median_ns)), ends.join("-")]
            }
            None => [NOTHING.into(), NOTHING.into()],
        };
        let budget = BUDGET(b).trim_start_matches("budget ").to_string();
        let context = CONTEXT(b).trim_end_matches(" context").to_string();
        let apart = if b.cell.policy.is_some() { of_policies.apart(b) } else { of_kernels.apart(b) };
        let mut row = if changed.len() > 1 { vec![b.cell.measure.name().to_string()] } else { Vec::new() };
        row.extend([context, format!("{subject}{apart}"), budget, time, interval]);
        let nothing = || NOTHING.to_string();
        let is_ok = a.status == Status::Ok && b.status == Status::Ok;
        row.extend(with_peak.then(|| ratio(peak).filter(|_| is_ok).map_or_else(nothing, |x| mark(change.peak, x))));
        row.extend(with_drift.then(|| ratio(drift).map_or_else(nothing, |x| mark(change.drift, x))));
        let scores = |(a, b)| format!("{} -> {}", text::percent(a), text::percent(b));
        let scored = score(a).zip(score(b)).map(scores);
        row.extend(with_score.then(|| scored.map_or_else(nothing, |x| mark(change.score, x))));
        row.extend(with_found.then(|| match &change.found[..] {
            [] => nothing(),
            [one] => format!("{one} *"),
            [one, rest @ ..] => format!("{one} * and {} more", rest.len()),
        }));
        rows.push(row);
    }
    table::lines(rows)
}

/// Facts of two environments that are not equal, by their path.
fn differences(a: &Value, b: &Value) -> Vec<(String, String, String)> {
    let (a, b) = (flat(a), flat(b));
    let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let shown = |facts: &BTreeMap<String, String>, name: &String| facts.get(name).cloned().unwrap_or("none".into());
    let differ = names.into_iter().filter(|name| a.get(*name) != b.get(*name) && !PASSING.contains(&name.as_str()));
    differ.map(|name| (name.clone(), shown(&a, name), shown(&b, name))).collect()
}

/// The leaves of a value, each with its path.
fn flat(value: &Value) -> BTreeMap<String, String> {
    let mut facts = BTreeMap::new();
    let mut open = vec![(String::new(), value)];
    while let Some((path, value)) = open.pop() {
        match value {
            Value::Object(map) => open.extend(map.iter().map(|(name, value)| match path.as_str() {
                "" => (name.clone(), value),
                path => (format!("{path}.{name}"), value),
            })),
            Value::Null => {}
            Value::String(text) => drop(facts.insert(path, text.clone())),
            other => drop(facts.insert(path, other.to_string())),
        }
    }
    facts
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;

    fn run(records: Vec<Record>, cpu: &str, git: &str) -> Run {
        Run {
            experiment: "x".into(),
            description: String::new(),
            is_synthetic: true,
            run_id: format!("run-{git}"),
            repro: String::new(),
            environment: json!({"machine": {"cpu": cpu, "load_before": git}, "tool": {"git": git}, "gpu": null}),
            records,
            elsewhere: 0,
        }
    }

    fn slower(mut record: Record, factor: f64) -> Record {
        let phase = record.latency.get_mut("decode").unwrap();
        for ns in [&mut phase.median_ns, &mut phase.ci95_low_ns, &mut phase.ci95_high_ns] {
            *ns *= factor;
        }
        record
    }

    #[test]
    fn what_changed_beyond_noise_is_told_and_counted() {
        let timed = |count: usize, mut record: Record| {
            record.latency.values_mut().for_each(|phase| phase.samples_ns.resize(count, 1));
            record
        };
        let cells = || {
            [("full", 1.0), ("knorm", 0.25)]
                .map(|(name, budget)| timed(10, samples::evicted(1024, name, budget)))
                .to_vec()
        };
        let a = run(cells(), "A", "1");
        let of = |records: Vec<Record>, cpu: &str| versus(&a, &run(records, cpu, "2"));
        let same = of(cells(), "A");
        assert_eq!((same.common, same.changed), (2, 0));
        assert!(same.text.contains("No cell changed") && same.text.contains("tool.git: 1 -> 2"), "{}", same.text);
        assert!(!same.text.contains("load_before"), "{}", same.text);

        let change = |change: &dyn Fn(&mut Record)| {
            let mut records = cells();
            change(&mut records[1]);
            records
        };
        type Case<'c> = (&'c dyn Fn(&mut Record), usize);
        let cases: [Case<'_>; 9] = [
            (&|record| *record = slower(record.clone(), 1.5), 1),
            // Of few samples intervals are too narrow, and roundings change with the order of sums.
            (&|record| *record = timed(3, slower(record.clone(), 1.5)), 0),
            (&|record| record.drift.as_mut().unwrap().rel_l2 = 3e-7, 1),
            (&|record| *record = slower(record.clone(), 1.02), 0),
            (&|record| record.memory.as_mut().unwrap().peak_bytes += 1, 1),
            (&|record| record.drift.as_mut().unwrap().rel_l2 *= 1.01, 1),
            (&|record| record.drift.as_mut().unwrap().rel_l2 *= 1.000_01, 0),
            (&|record| record.status = Status::Failed, 1),
            (&|record| record.eviction.as_mut().unwrap().kv_bytes_live += 4096, 1),
        ];
        for (index, (change_one, changed)) in cases.into_iter().enumerate() {
            assert_eq!(of(change(change_one), "A").changed, changed, "case {index}");
        }
        let elsewhere = of(change(&|record| *record = slower(record.clone(), 1.5)), "B");
        assert_eq!(elsewhere.changed, 0, "times of two machines say nothing of the code");
        assert!(elsewhere.text.contains("different machines"), "{}", elsewhere.text);
        let hasty = of(change(&|record| *record = timed(3, record.clone())), "A");
        assert!(hasty.text.contains("times of 1 cell are of fewer than 10 samples"), "{}", hasty.text);
        let fewer = of(cells()[..1].to_vec(), "A");
        assert!(fewer.common == 1 && fewer.gone == 1 && fewer.text.contains("1 only in the first"), "{}", fewer.text);
        let slow = of(change(&|record| *record = slower(record.clone(), 1.5)), "A").text;
        assert!(slow.contains("knorm") && slow.contains("1.50x *") && !slow.contains("full"), "{slow}");
        assert!(slow.lines().all(|line| line.chars().count() <= 100), "{slow}");
    }
}
