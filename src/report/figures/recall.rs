//! Memories of facts: what is recalled as more is written, overwritten and forgotten, what the scope detector tells apart, and
//! what it costs in bytes.

use super::{Data, Reading};
use crate::experiment::answers::Estimate;
use crate::experiment::measure::Measure;
use crate::experiment::recalled::Recalled;
use crate::experiment::record::Record;
use crate::named::Named;
use crate::report::chart::{Axis, Chart, Quantity, Series};
use crate::report::naming::Naming;
use crate::report::palette;
use std::collections::BTreeSet;

type Read = fn(&Recalled) -> Option<Estimate>;

/// Slots of a memory, and facts of an episode, that do not say how many.
const DEFAULT: usize = 64;

/// Right answers as more facts are written.
pub fn by_facts(data: &Data) -> Option<Chart> {
    let records = of_kind(data, "write", |record| !has_scope(record));
    let series = curves(data, &several(records.clone(), count), "", facts_per_slot, |found| found.kept);
    chart(&records, series, facts_axis(), share_axis("recalled facts")).map(|chart| Chart {
        id: "recall-vs-facts".into(),
        title: "Recall against the facts that are written".into(),
        caption: "Share of the written facts whose value is the nearest one to what the memory reads for their subject. Higher \
                  is better; the band is the 95% interval over drawn episodes. A list keeps the latest facts as they are."
            .into(),
        ..chart
    })
}

/// Right answers against bytes, of memories with so many slots.
pub fn by_bytes(data: &Data) -> Option<Chart> {
    let records = of_kind(data, "write", |record| !has_scope(record));
    // Memories of one episode that differ in their slots.
    let slotless = |record: &Record| (memory(record).without("slots").to_string(), episode(record).to_string());
    let records = grouped(records, slotless, slots);
    let bytes = |record: &Record| record.recall.as_ref().map_or(0.0, |found| found.held_bytes as f64);
    let series = named_curves(
        data,
        &records,
        |record| format!("{} {}", memory(record).without("slots"), arguments(&episode(record))),
        |record| slots(record).to_string(),
        bytes,
        |found| found.kept,
    );
    let axis = Axis { label: "bytes that are held".into(), field: "held_bytes", quantity: Quantity::Bytes };
    chart(&records, series, axis, share_axis("recalled facts")).map(|chart| Chart {
        id: "recall-vs-bytes".into(),
        title: "Recall against what is held".into(),
        caption: "Points of a curve differ in their slots. Numbers of all memories are f64, so that ratios of bytes hold for any \
                  other type too; a prior, which holds no facts, is not counted."
            .into(),
        ..chart
    })
}

/// What is left of forgotten facts.
pub fn forgetting(data: &Data) -> Option<Chart> {
    let reads: [(&str, Read); 3] = [
        ("kept, ", |found| found.kept),
        ("forgotten, ", |found| found.old),
        ("never written, ", |found| Some(found.unwritten)),
    ];
    changed(data, "forget", &reads).map(|chart| Chart {
        id: "what-forgetting-leaves".into(),
        title: "What forgetting leaves".into(),
        caption: "Share of right answers about facts that were kept, forgotten, and never written: a forgotten fact should be \
                  where a never-written one is, and a kept one stay where it was. The band is the 95% interval over drawn \
                  episodes."
            .into(),
        ..chart
    })
}

/// What becomes of overwritten facts.
pub fn overwriting(data: &Data) -> Option<Chart> {
    let reads: [(&str, Read); 2] = [("new value, ", |found| found.changed), ("old value, ", |found| found.old)];
    changed(data, "overwrite", &reads).map(|chart| Chart {
        id: "overwriting".into(),
        title: "Overwritten facts".into(),
        caption: "Share of overwritten facts whose new, and whose old value is given. The band is the 95% interval over drawn \
                  episodes."
            .into(),
        ..chart
    })
}

/// How well the scope detector tells written facts from others.
pub fn scope(data: &Data) -> Option<Chart> {
    let records = several(of_kind(data, "write", has_scope), count);
    let series = curves(data, &records, "", facts_per_slot, |found| found.scope_auc);
    chart(&records, series, facts_axis(), share_axis("told apart")).map(|chart| Chart {
        id: "scope-vs-facts".into(),
        title: "What the scope detector tells apart".into(),
        caption: "Chance that the detector's distance is smaller for the cue of a written fact than for that of a never-written \
                  one, whatever the threshold: 100% is always, 50% a coin."
            .into(),
        ..chart
    })
}

fn changed(data: &Data, kind: &str, reads: &[(&str, Read)]) -> Option<Chart> {
    let records = several(of_kind(data, kind, |record| !has_scope(record)), count);
    let series = reads.iter().flat_map(|(lead, read)| curves(data, &records, lead, facts_per_slot, *read)).collect();
    chart(&records, series, facts_axis(), share_axis("right answers"))
}

/// A chart without words; `None` without series.
fn chart(records: &[&Record], mut series: Vec<Series>, x: Axis, y: Axis) -> Option<Chart> {
    for (place, series) in series.iter_mut().enumerate() {
        series.style = palette::style(&series.name, place, 0);
    }
    (!series.is_empty()).then(|| Chart {
        id: String::new(),
        title: String::new(),
        subtitle: subtitle(records),
        caption: String::new(),
        x,
        y,
        interval_fields: ("ci95_low", "ci95_high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}

fn facts_axis() -> Axis {
    Axis { label: "facts written per slot".into(), field: "facts_per_slot", quantity: Quantity::Fraction }
}

fn share_axis(label: &str) -> Axis {
    Axis { label: label.into(), field: "share", quantity: Quantity::Share }
}

/// Curves over the number of facts, named by `lead`, the memory, and in what else episodes differ.
fn curves(data: &Data, records: &[&Record], lead: &str, x: fn(&Record) -> f64, read: Read) -> Vec<Series> {
    let rest = |record: &Record| arguments(&episode(record).without("count"));
    let differ = records.iter().map(|record| rest(record)).collect::<BTreeSet<_>>().len() > 1;
    let name = |record: &Record| {
        let rest = if differ { rest(record) } else { String::new() };
        format!("{lead}{} {rest}", memory(record)).trim_end().to_string()
    };
    named_curves(data, records, name, |record| count(record).to_string(), x, read)
}

fn named_curves(
    data: &Data,
    records: &[&Record],
    name: impl Fn(&Record) -> String,
    key: impl Fn(&Record) -> String,
    x: impl Fn(&Record) -> f64,
    read: Read,
) -> Vec<Series> {
    let reading = |record: &Record| {
        let found = read(record.recall.as_ref()?)?;
        Some(Reading::measured(x(record), found.mean, Some((found.ci95_low, found.ci95_high))))
    };
    // Memory and episode are all that matters, and the name says them.
    data.series(records, &Naming::over(&[], &[]), |record| name(record).trim_end().into(), key, reading)
}

/// The records of one kind of episode.
fn of_kind<'a>(data: &Data<'a>, kind: &str, holds: impl Fn(&Record) -> bool) -> Vec<&'a Record> {
    let mut records = data.of(Measure::RECALL);
    records.retain(|record| record.recall.is_some() && episode(record).name == kind && holds(record));
    records
}

/// Those of which something was measured at two places or more: those that make a curve over the number of facts.
fn several(records: Vec<&Record>, place: fn(&Record) -> usize) -> Vec<&Record> {
    grouped(records, |record| (memory(record).to_string(), episode(record).without("count").to_string()), place)
}

fn grouped(
    records: Vec<&Record>,
    group: impl Fn(&Record) -> (String, String),
    place: fn(&Record) -> usize,
) -> Vec<&Record> {
    let places = |record: &Record| {
        let own = group(record);
        let of_group = records.iter().filter(|other| group(other) == own);
        of_group.map(|other| place(other)).collect::<BTreeSet<_>>().len()
    };
    records.iter().copied().filter(|record| places(record) > 1).collect()
}

fn named(text: Option<&str>) -> Named {
    text.and_then(|text| text.parse().ok()).unwrap_or_else(|| "nothing".parse().expect("a name"))
}

fn memory(record: &Record) -> Named {
    named(record.cell.memory.as_deref())
}

fn episode(record: &Record) -> Named {
    named(record.cell.episode.as_deref())
}

fn has_scope(record: &Record) -> bool {
    memory(record).text("scope").is_some_and(|scope| scope != "none")
}

fn slots(record: &Record) -> usize {
    memory(record).count("slots", DEFAULT, 1).unwrap_or(DEFAULT)
}

fn count(record: &Record) -> usize {
    episode(record).count("count", DEFAULT, 1).unwrap_or(DEFAULT)
}

fn facts_per_slot(record: &Record) -> f64 {
    count(record) as f64 / slots(record) as f64
}

fn arguments(named: &Named) -> String {
    named.arguments().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
}

/// What all episodes have in common.
fn subtitle(records: &[&Record]) -> String {
    let rest: BTreeSet<String> = records.iter().map(|record| arguments(&episode(record).without("count"))).collect();
    let drawn: BTreeSet<usize> = records.iter().filter_map(|record| Some(record.recall.as_ref()?.samples)).collect();
    let drawn = drawn.iter().map(usize::to_string).collect::<Vec<_>>().join(" or ");
    let rest = if rest.len() == 1 { rest.into_iter().next().filter(|rest| !rest.is_empty()) } else { None };
    rest.into_iter().chain([format!("{drawn} drawn episodes")]).collect::<Vec<_>>().join(" · ")
}
