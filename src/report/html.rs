//! The page and `summary.md`: figures, tables and words in one file each.
//!
//! Text from records and experiment files is data: the template engine escapes all of it. Only the SVG of the
//! figures, whose text [`super::draw`] has escaped, goes in as it is.

use super::naming::{Naming, RANKS, SEED};
use super::summary::{status, summary_table};
use super::table::Table;
use super::text::{self, NOTHING};
use super::{
    Figure, ReportError, Run, answers, baseline, edits, findings, knobs, latest, leaderboard, noise, recall, serving,
};
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::units;
use minijinja::{Environment, Value, context};
use serde_json::Value as Json;
use std::collections::{BTreeMap, BTreeSet};

const TEMPLATE: &str = include_str!("report.html");

/// `report.html`.
///
/// # Errors
/// [`ReportError::Page`] when the template cannot be filled in.
pub fn page(sections: &[(&Run, Vec<Figure>)]) -> Result<String, ReportError> {
    let runs: Vec<Value> = sections.iter().map(|(run, figures)| section(run, figures)).collect();
    rendered(&runs, if runs.len() == 1 { "kvsieve report ." } else { "kvsieve report DIR..." })
}

/// The page of a plan: what the terminal says, and the figures.
///
/// # Errors
/// As [`page`].
pub fn plan_page(title: &str, text: &str, figures: &[Figure]) -> Result<String, ReportError> {
    let figures = figures.iter().map(picture).collect::<Vec<_>>();
    rendered(&[context! { experiment => title, text, figures }], "")
}

fn rendered(runs: &[Value], redraw: &str) -> Result<String, ReportError> {
    let mut templates = Environment::new();
    templates.add_template("report.html", TEMPLATE)?;
    let page = templates.get_template("report.html")?;
    Ok(page.render(context! { runs, redraw, version => env!("CARGO_PKG_VERSION") })?)
}

/// `summary.md`.
pub fn summary(sections: &[(&Run, Vec<Figure>)]) -> String {
    let section = |(run, figures): &(&Run, Vec<Figure>)| {
        let findings = said(run, findings::of(&latest(&run.records))).map(|finding| format!("- {finding}\n"));
        let pictures =
            figures.iter().map(|figure| format!("![{}]({}.svg)\n\n{}\n\n", figure.title, figure.stem, figure.caption));
        format!(
            "# {}\n\n{}\n\nRun `{}`: {}. Again: `{}`\n\n{}\n{}\n{}",
            run.experiment,
            run.description.trim(),
            run.run_id,
            tally(run),
            run.repro,
            findings.collect::<String>(),
            pictures.collect::<String>(),
            summary_table(&run.records),
        )
    };
    sections.iter().map(section).collect::<Vec<_>>().join("\n")
}

/// A run as the template reads it.
fn section(run: &Run, figures: &[Figure]) -> Value {
    let records = latest(&run.records);
    let unequal = noise::unequal(&records).into_iter().flat_map(|(_, differ)| differ);
    let unequal: BTreeSet<&str> = unequal.map(|record| record.cell_id.as_str()).collect();
    let rows = |records: &[&Record]| {
        let naming = Naming::over(records, &[SEED, RANKS]);
        let row = |record: &&Record| row(record, records, &naming, unequal.contains(record.cell_id.as_str()));
        records.iter().map(row).collect::<Vec<_>>()
    };
    let own = knobs::own(&records);
    let (simulated, measured): (Vec<&Record>, Vec<&Record>) =
        own.iter().partition(|record| record.cell.measure == Measure::SERVE);
    let (recalled, measured): (Vec<&Record>, Vec<&Record>) =
        measured.iter().partition(|record| record.cell.measure == Measure::RECALL);
    let (edited, measured): (Vec<&Record>, Vec<&Record>) =
        measured.iter().partition(|record| record.cell.measure == Measure::EDIT);
    let (evaluated, measured): (Vec<&Record>, Vec<&Record>) =
        measured.iter().partition(|record| record.cell.measure == Measure::EVAL);
    let of_measures = measured.chunk_by(|a, b| a.cell.measure == b.cell.measure);
    let mut warnings: BTreeMap<&str, usize> = BTreeMap::new();
    for warning in records.iter().flat_map(|record| &record.warnings) {
        *warnings.entry(warning).or_default() += 1;
    }
    let mut environment = Vec::new();
    flatten("", &run.environment, &mut environment);
    let without_numbers = records.iter().filter(|record| record.status != Status::Ok);
    context! {
        experiment => &run.experiment,
        description => &run.description,
        run_id => &run.run_id,
        repro => &run.repro,
        tally => tally(run),
        findings => said(run, super::findings(&run.records)).collect::<Vec<_>>(),
        figures => figures.iter().map(picture).collect::<Vec<_>>(),
        cells => of_measures.flat_map(rows).collect::<Vec<_>>(),
        simulations => serving::rows(&simulated),
        recalls => recall::rows(&recalled),
        beside => leaderboard::beside(&records).unwrap_or_default().iter().map(|(table, _)| context! { name => table.name, words => table.words }).collect::<Vec<_>>(),
        rankings => leaderboard::tables(&evaluated).iter().chain(&edits::tables(&edited)).chain(&knobs::tables(&records)).map(Table::value).collect::<Vec<_>>(),
        evaluations => answers::rows(&evaluated),
        runs => answers::runs(&evaluated),
        common => answers::common(&evaluated),
        has_seeds => evaluated.iter().any(|record| record.cell.seed != evaluated[0].cell.seed),
        troubles => without_numbers.map(|record| trouble(record)).collect::<Vec<_>>(),
        warnings => warnings.into_iter().map(|(text, cells)| context! { text, cells }).collect::<Vec<_>>(),
        environment => environment.into_iter().map(|(key, value)| context! { key, value }).collect::<Vec<_>>(),
    }
}

fn picture(figure: &Figure) -> Value {
    // Inside a page an SVG needs no namespace.
    let svg = figure.svg.replacen(" xmlns=\"http://www.w3.org/2000/svg\"", "", 1);
    let words = figure.words.iter().map(|&(word, meaning)| context! { word, meaning }).collect::<Vec<_>>();
    context! { title => &figure.title, caption => &figure.caption, words, svg, stem => &figure.stem }
}

/// A cell that has no numbers, and why.
fn trouble(record: &Record) -> Value {
    let of_memory = record.needed_bytes().zip(record.memory.as_ref()).map(|(needed, memory)| {
        let (needs, limit) = (units::bytes(needed), units::bytes(memory.limit_bytes));
        format!("needs {needs}, {limit} are allowed (--limit-memory)")
    });
    context! {
        status => status(record.status),
        cell => record.cell.label(),
        reason => of_memory.as_deref().or(record.reason.as_deref()).unwrap_or(NOTHING),
        repro => &record.repro,
    }
}

/// A line of the table of cells.
fn row(record: &Record, records: &[&Record], naming: &Naming, is_unequal: bool) -> Value {
    let cell = &record.cell;
    let or_nothing = |text: Option<String>| text.unwrap_or(NOTHING.into());
    let ok = Some(record).filter(|record| record.status == Status::Ok);
    let phase = ok.and_then(text::main_phase);
    let eviction = ok.and_then(|record| record.eviction.as_ref());
    let decoded = ok.filter(|_| cell.measure == Measure::DECODE);
    let kv_bytes = eviction.map(|eviction| eviction.kv_bytes_live).or(decoded.and_then(text::kv_bytes));
    context! {
        cell_id => &record.cell_id,
        status => status(record.status),
        measure => cell.measure.name(),
        kernel => &cell.kernel,
        heads => cell.heads(),
        dtype => cell.dtype.name(),
        apart => naming.apart(record),
        context => units::tokens(cell.context_tokens),
        policy => cell.chosen().or(cell.tuning.as_deref()).unwrap_or(NOTHING),
        budget => cell.budget.as_deref().unwrap_or(NOTHING),
        peak => text::peak(record),
        kv => or_nothing(kv_bytes.map(units::bytes)),
        read => or_nothing(eviction.map(|eviction| units::bytes(eviction.kv_bytes_read))),
        median => or_nothing(phase.map(|phase| units::nanoseconds(phase.median_ns))),
        is_unequal,
        only_protected => ok.is_some_and(text::is_only_protected),
        interval => phase.map(text::ends).unwrap_or_default(),
        drift => or_nothing(ok.and_then(|record| Some(text::drift(record.drift.as_ref()?.rel_l2)))),
        recall => or_nothing(eviction.and_then(|eviction| eviction.needle_recall).map(text::percent)),
        speed_up => or_nothing(baseline::speed_up(record, records).map(text::times)),
    }
}

/// What the numbers say, and before it that some are not there.
fn said(run: &Run, findings: Vec<String>) -> impl Iterator<Item = String> {
    let missing = run.missing();
    let incomplete = (missing > 0).then(|| {
        let (there, are) = (latest(&run.records).len() + run.elsewhere, if missing == 1 { "is" } else { "are" });
        format!("Incomplete: {missing} of {} cells {are} not here; what follows is of the rest.", there + missing)
    });
    incomplete.into_iter().chain(findings)
}

/// `42 cells: 40 ok, 2 oom`; `42 of 50 cells` where some have no record.
fn tally(run: &Run) -> String {
    let records = latest(&run.records);
    let count = |wanted: Status| records.iter().filter(|record| record.status == wanted).count();
    let statuses = [Status::Ok, Status::Oom, Status::Failed, Status::Skipped];
    let counts = statuses.into_iter().map(|wanted| (count(wanted), status(wanted))).filter(|(count, _)| *count > 0);
    let counts: Vec<String> = counts.map(|(count, name)| format!("{count} {name}")).collect();
    let cells = match run.missing() + run.elsewhere {
        0 => units::counted(records.len() as u64, "cell"),
        others => format!("{} of {} cells", records.len(), records.len() + others),
    };
    format!("{cells}: {}", counts.join(", "))
}

/// Nested JSON as `outer.inner` and value, in the order of the file.
fn flatten(path: &str, value: &Json, lines: &mut Vec<(String, String)>) {
    let below = |key: &str| if path.is_empty() { key.to_string() } else { format!("{path}.{key}") };
    let plain = |value: &Json| value.as_str().map_or_else(|| value.to_string(), String::from);
    match value {
        Json::Null => {}
        Json::Object(fields) => fields.iter().for_each(|(key, value)| flatten(&below(key), value, lines)),
        Json::Array(items) if items.iter().all(|item| !item.is_object() && !item.is_array()) => {
            lines.push((path.into(), items.iter().map(plain).collect::<Vec<_>>().join(", ")));
        }
        Json::Array(items) => {
            items.iter().enumerate().for_each(|(index, item)| flatten(&below(&index.to_string()), item, lines));
        }
        value => {
            let bytes = value.as_u64().filter(|_| path.ends_with("_bytes"));
            lines.push((path.into(), bytes.map_or_else(|| plain(value), units::bytes)));
        }
    }
}
