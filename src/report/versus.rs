//! Two runs beside each other: what differs in how they were made, and which cells changed beyond noise.
//!
//! Cells are the same when their ids are: all that decides a number but the code and the machine. Bytes are exact, so that any
//! difference is a change. The time of a phase has changed when the intervals of the two medians do not meet and the medians are
//! further apart than [`STILL`]; times of different machines are not compared. Drift, scores and what else a measure found have
//! changed when they differ by more than rounding does. What one of two `ok` cells has and the other lacks is a change, whatever
//! it is.

use super::naming::{BUDGET, CONTEXT, HEADS, KERNEL, Naming, SEED, TASK};
use super::noise::LEAST_SAMPLES;
use super::text::{self, NOTHING};
use super::{Run, latest, summary, table};
use crate::experiment::cell::Cell;
use crate::experiment::record::{Latency, Record, Status};
use crate::ranks::OfRank;
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
    let mut untimed: BTreeMap<&str, usize> = BTreeMap::new();
    for (a, b) in pairs.iter().filter(|_| same_machine) {
        let both = a.latency.iter().filter_map(|(phase, latency)| Some((phase, latency, b.latency.get(phase)?)));
        both.filter(|(_, a, b)| !are_enough(a, b)).for_each(|(phase, ..)| *untimed.entry(phase).or_default() += 1);
    }
    for (phase, count) in untimed {
        text.push_str(&format!(
            "- times of `{phase}` in {} are of fewer than {LEAST_SAMPLES} samples and count for nothing\n",
            cells(count)
        ));
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
    /// Times of other phases, and what else the measure found that is no longer the same, as `recall.kept.mean 0.91 -> 0.4`.
    found: Vec<String>,
}

impl<'r> Change<'r> {
    fn of(a: &'r Record, b: &'r Record, same_machine: bool) -> Self {
        let is_ok = are_ok(a, b);
        let differs = |value: fn(&Record) -> Option<f64>, least: f64| match (value(a), value(b)) {
            (Some(a), Some(b)) => apart(a, b) && a.max(b) > least,
            (a, b) => is_ok && a != b,
        };
        let is_timed = same_machine && is_alike(a, b);
        let is_other = |phase: &&String| match (a.latency.get(*phase), b.latency.get(*phase)) {
            (Some(own), Some(other)) => is_timed && *phase != b.cell.measure.phase() && has_changed(own, other),
            _ => is_ok,
        };
        let words = |phase: &String| {
            let median = |latency: &Latency| units::nanoseconds(latency.median_ns);
            let [before, after] = [a, b].map(|record| record.latency.get(phase).map_or(NOTHING.into(), median));
            format!("{phase} {before} -> {after}")
        };
        let timed: BTreeSet<&String> = a.latency.keys().chain(b.latency.keys()).collect();
        Change {
            a,
            b,
            status: a.status != b.status,
            time: is_timed && phases(a, b).is_some_and(|(a, b)| has_changed(a, b)),
            peak: a.status == b.status && peak(a) != peak(b),
            drift: differs(drift, OF_ROUNDING),
            score: differs(score, 0.0),
            found: timed.into_iter().filter(is_other).map(words).chain(found(a, b)).collect(),
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

fn are_ok(a: &Record, b: &Record) -> bool {
    a.status == Status::Ok && b.status == Status::Ok
}

/// The phase that both are measured for.
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

/// Results beside the drift and the score that differ.
fn found(a: &Record, b: &Record) -> Vec<String> {
    if !are_ok(a, b) {
        return Vec::new();
    }
    let (before, after) = (numbers(a), numbers(b));
    let differs = |name: &&String| {
        let number = |of: &BTreeMap<String, String>| of.get(*name).and_then(|text| text.parse::<f64>().ok());
        match (number(&before), number(&after)) {
            (Some(a), Some(b)) if !name.contains("bytes") => apart(a, b),
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

/// The results of a cell by name. What stands for each position, head or sample is left out: its means are here.
fn numbers(record: &Record) -> BTreeMap<String, String> {
    let mut eviction = json!(record.eviction);
    if let Some(fields) = eviction.as_object_mut() {
        fields.retain(|_, value| !value.is_array());
    }
    let answers = record.answers.as_ref().map(|found| {
        json!({
            "kv_bytes_dense": found.kv_bytes_dense,
            "kv_bytes_live": found.kv_bytes_live,
            "kv_bytes_peak": found.kv_bytes_peak,
            "kv_bytes_read": found.kv_bytes_read,
            "nll_nats": found.nll_nats.mean,
            "top1_agreement": found.top1_agreement.mean,
        })
    });
    let training = record.training.as_ref().map(|training| {
        json!({"parameters": training.parameters, "losses": by_place(training.losses.iter().map(|loss| json!(loss)))})
    });
    let of_rank = |rank: &OfRank| json!({"sent_bytes": rank.sent_bytes, "peak_bytes": rank.peak_bytes});
    flat(&json!({
        "recall": record.recall,
        "edit": record.edit,
        "serving": record.serving,
        "eviction": eviction,
        "answers": answers,
        "training": training,
        "ranks": by_place(record.ranks.iter().map(of_rank)),
    }))
}

/// Values of a list, each by its place.
fn by_place(values: impl Iterator<Item = Value>) -> Value {
    (0..).map(|place: usize| place.to_string()).zip(values).collect::<serde_json::Map<_, _>>().into()
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
        // What one of the two lacks has no ratio, nor what was nothing.
        let ratio = |value: fn(&Record) -> Option<f64>| {
            let both = value(a).zip(value(b)).filter(|(a, _)| *a > 0.0);
            both.map(|(a, b)| text::times(b / a))
        };
        let both = |value: fn(&Record) -> Option<f64>, write: fn(f64) -> String| {
            let [before, after] = [a, b].map(|record| value(record).map_or(NOTHING.into(), write));
            format!("{before} -> {after}")
        };
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
        let bytes = |bytes: f64| units::bytes(bytes as u64);
        let shown = |changed: bool, ratio: Option<String>, value, write| match ratio {
            Some(ratio) => mark(changed, ratio),
            None if changed => mark(true, both(value, write)),
            None => nothing(),
        };
        row.extend(with_peak.then(|| match are_ok(a, b) {
            true => shown(change.peak, ratio(peak), peak, bytes),
            false => nothing(),
        }));
        row.extend(with_drift.then(|| shown(change.drift, ratio(drift), drift, text::drift)));
        let scored = score(a).zip(score(b)).map(|_| both(score, text::percent));
        row.extend(with_score.then(|| shown(change.score, scored, score, text::percent)));
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

    fn slow(record: &mut Record, phase: &str, factor: f64) {
        let phase = record.latency.get_mut(phase).unwrap();
        for ns in [&mut phase.median_ns, &mut phase.ci95_low_ns, &mut phase.ci95_high_ns] {
            *ns *= factor;
        }
    }

    fn timed(count: usize, mut record: Record) -> Record {
        record.latency.values_mut().for_each(|phase| phase.samples_ns.resize(count, 1));
        record
    }

    /// Of any measure, a result that is another one, and one that is no longer there.
    #[test]
    fn whatever_a_cell_found_is_compared() {
        let evicted = || timed(10, samples::evicted(1024, "knorm", 0.25));
        let answered = || samples::answered(512, "passkey", "h2o", 0.25);
        let of_ranks = || samples::ranks().records[1].clone();
        fn eviction(record: &mut Record) -> &mut crate::experiment::record::Eviction {
            record.eviction.as_mut().unwrap()
        }
        fn answers(record: &mut Record) -> &mut crate::experiment::answers::Answers {
            record.answers.as_mut().unwrap()
        }
        type Case = (Record, fn(&mut Record), &'static str);
        let cases: Vec<Case> = vec![
            (evicted(), |record| slow(record, "score", 10.0), "score 1"),
            (evicted(), |record| slow(record, "prefill", 10.0), "prefill "),
            (evicted(), |record| record.latency.clear(), "decode "),
            (evicted(), |record| drop(record.latency.remove("evict")), "evict 41.0 µs -> –"),
            (evicted(), |record| record.drift = None, "-> – *"),
            (evicted(), |record| record.eviction = None, "eviction."),
            (evicted(), |record| record.memory = None, "-> – *"),
            // Bytes are exact.
            (evicted(), |record| eviction(record).kv_bytes_peak += 1, "eviction.kv_bytes_peak"),
            (evicted(), |record| eviction(record).kv_bytes_read += 1, "eviction.kv_bytes_read"),
            (
                evicted(),
                |record| eviction(record).attention_mass_kept = Some(0.45),
                "attention_mass_kept 0.90 -> 0.45 *",
            ),
            (evicted(), |record| eviction(record).attention_mass_kept = None, "attention_mass_kept 0.90 -> – *"),
            (answered(), |record| answers(record).kv_bytes_live *= 2, "answers.kv_bytes_live"),
            (answered(), |record| answers(record).nll_nats.mean *= 2.0, "answers.nll_nats"),
            (answered(), |record| answers(record).top1_agreement.mean = 0.0, "answers.top1_agreement"),
            (answered(), |record| answers(record).kl_nats.mean *= 2.0, "2.00x *"),
            (
                samples::answered(512, "passkey", "full", 1.0),
                |record| answers(record).kl_nats.mean = 0.5,
                "0 -> 0.500 *",
            ),
            (answered(), |record| answers(record).accuracy = None, "% -> – *"),
            (answered(), |record| record.answers = None, "% -> – *"),
            (samples::training().records[0].clone(), halve_losses, "training.losses.0"),
            (samples::tuning().records[2].clone(), halve_losses, "training.losses.0"),
            (of_ranks(), |record| record.ranks[1].sent_bytes *= 2, "ranks.1.sent_bytes"),
            (of_ranks(), |record| record.ranks[0].peak_bytes += 1, "ranks.0.peak_bytes"),
        ];
        for (index, (record, change, expected)) in cases.into_iter().enumerate() {
            let mut other = record.clone();
            change(&mut other);
            let of = |record: &Record| run(vec![record.clone()], "A", "1");
            assert_eq!(versus(&of(&record), &of(&record)).changed, 0, "case {index}");
            let found = versus(&of(&record), &of(&other));
            assert!(found.changed == 1 && found.text.contains(expected), "case {index}: {expected}: {}", found.text);
        }
    }

    fn halve_losses(record: &mut Record) {
        record.training.as_mut().unwrap().losses.iter_mut().for_each(|loss| *loss /= 2.0);
    }

    #[test]
    fn what_changed_beyond_noise_is_told_and_counted() {
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
            (&|record| slow(record, "decode", 1.5), 1),
            // Of few samples intervals are too narrow, and roundings change with the order of sums.
            (
                &|record| {
                    slow(record, "decode", 1.5);
                    *record = timed(3, record.clone());
                },
                0,
            ),
            (&|record| record.drift.as_mut().unwrap().rel_l2 = 3e-7, 1),
            (&|record| slow(record, "decode", 1.02), 0),
            (&|record| record.memory.as_mut().unwrap().peak_bytes += 1, 1),
            (&|record| record.drift.as_mut().unwrap().rel_l2 *= 1.01, 1),
            (&|record| record.drift.as_mut().unwrap().rel_l2 *= 1.000_01, 0),
            (&|record| record.status = Status::Failed, 1),
            (&|record| record.eviction.as_mut().unwrap().kv_bytes_live += 4096, 1),
        ];
        for (index, (change_one, changed)) in cases.into_iter().enumerate() {
            assert_eq!(of(change(change_one), "A").changed, changed, "case {index}");
        }
        let elsewhere = of(change(&|record| slow(record, "decode", 1.5)), "B");
        assert_eq!(elsewhere.changed, 0, "times of two machines say nothing of the code");
        assert!(elsewhere.text.contains("different machines"), "{}", elsewhere.text);
        let hasty = of(change(&|record| *record = timed(3, record.clone())), "A");
        assert!(hasty.text.contains("times of `evict` in 1 cell are of fewer than 10 samples"), "{}", hasty.text);
        let fewer = of(cells()[..1].to_vec(), "A");
        assert!(fewer.common == 1 && fewer.gone == 1 && fewer.text.contains("1 only in the first"), "{}", fewer.text);
        let slow = of(change(&|record| slow(record, "decode", 1.5)), "A").text;
        assert!(slow.contains("knorm") && slow.contains("1.50x *") && !slow.contains("full"), "{slow}");
        assert!(slow.lines().all(|line| line.chars().count() <= 100), "{slow}");
    }
}
