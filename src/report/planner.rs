//! The planner's figures: memory against context, the terms that it is made of, levers, and the stages of ZeRO.
//!
//! Both axes are logarithmic, so that a term that does not grow is level, keys and values rise with slope 1 and scores with
//! slope 2. Beyond the context that fits, points are the crosses of every figure, at the height that would be needed.

use super::chart::{Axis, Chart, Point, Quantity, Rule, Series};
use super::rows::{Kind, Mark, Row, Rows};
use super::{ReportError, csv, draw, files, palette};
use crate::experiment::record::Status;
use crate::planner::levers::Ranked;
use crate::planner::scenario::{Attention, Memory};
use crate::planner::search::MOST;
use crate::planner::train::{Spent, Training};
use crate::planner::{Phase, Scenario, Waterfall};
use crate::units::{bytes, grouped};
use std::path::Path;

/// Contexts of the curves: powers of two from this on.
const LEAST_CONTEXT: u64 = 512;
/// The least length of the axis.
const LEAST_FAR: u64 = 64 << 10;
/// Crosses behind the last context that fits.
const CROSSES: usize = 2;
/// Levers that are drawn.
const LEVERS: usize = 12;

/// Writes `memory-vs-context`, `memory-terms` and `levers`, each as SVG and CSV.
///
/// # Errors
/// When nothing can be drawn or a file cannot be written.
pub fn write(
    folder: &Path,
    scenario: &Scenario<'_>,
    waterfall: &Waterfall,
    levers: &[Ranked],
) -> Result<(), ReportError> {
    for chart in [attention(scenario), terms(scenario, waterfall)] {
        files::replace(&folder.join(format!("{}.svg", chart.id)), &draw::svg(&chart)?)?;
        files::replace(&folder.join(format!("{}.csv", chart.id)), &csv::write(&chart)?)?;
    }
    let drawn: Vec<&Ranked> = levers.iter().filter(|lever| lever.max_context_tokens.is_some()).take(LEVERS).collect();
    if drawn.is_empty() { Ok(()) } else { rows(folder, &ranked(scenario, waterfall, &drawn)) }
}

fn rows(folder: &Path, figure: &Rows) -> Result<(), ReportError> {
    files::replace(&folder.join(format!("{}.svg", figure.id)), &draw::rows(figure)?)?;
    files::replace(&folder.join(format!("{}.csv", figure.id)), &csv::rows(figure)?)
}

/// Contexts from short to twice what was asked for at least.
fn contexts(scenario: &Scenario<'_>) -> Vec<u64> {
    let tiled = Scenario { attention: Attention::Tiled, ..scenario.clone() }.max_context().ok().flatten().unwrap_or(1);
    let far = (2 * scenario.context).max(LEAST_FAR).max(4 * tiled.min(MOST >> 20)).next_power_of_two().min(MOST);
    std::iter::successors(Some(LEAST_CONTEXT), |context| Some(2 * context))
        .take_while(|context| *context <= far)
        .collect()
}

/// A curve of bytes against context; what does not fit is a cross.
fn curve(name: String, place: usize, of: impl Fn(u64) -> Option<(u128, bool)>, contexts: &[u64]) -> Series {
    let point = |&context: &u64| {
        let (bytes, fits) = of(context).filter(|(bytes, _)| *bytes > 0)?;
        let bytes = Some(bytes as f64);
        let (y, model, status) = if fits { (bytes, None, Status::Ok) } else { (None, bytes, Status::Oom) };
        Some(Point { x: context as f64, y, interval: None, model, status, cell_ids: Vec::new() })
    };
    let style = palette::style(&name, place, 0);
    let mut crosses = 0;
    let points = contexts.iter().filter_map(point).take_while(|point| {
        crosses += usize::from(point.status == Status::Oom);
        crosses <= CROSSES
    });
    Series { points: points.collect(), name, style }
}

fn chart(id: &str, title: String, scenario: &Scenario<'_>, caption: &str, series: Vec<Series>) -> Chart {
    let there = match scenario.memory {
        Memory::Gpu(gpu) => format!("{}: {}", gpu.name, bytes(gpu.bytes())),
        Memory::Bytes(there) => bytes(there),
    };
    Chart {
        id: id.into(),
        title,
        subtitle: scenario.words(),
        caption: caption.into(),
        x: Axis { label: "context, tokens".into(), field: "context_tokens", quantity: Quantity::Tokens },
        y: Axis { label: "memory".into(), field: "peak_bytes", quantity: Quantity::Bytes },
        interval_fields: ("low", "high"),
        model_field: Some("predicted_bytes"),
        series: series.into_iter().filter(|series| !series.points.is_empty()).collect(),
        rules: vec![Rule { y: scenario.memory.bytes() as f64, label: there }],
    }
}

/// The peak by kind of attention, each with the context at which it ends.
fn attention(scenario: &Scenario<'_>) -> Chart {
    let kinds = [
        ("naive, 8 B a score", Attention::Naive, None),
        ("naive, 4 B a score", Attention::Minimal, None),
        ("tiled", Attention::Tiled, None),
        ("tiled, chunks of 2048", Attention::Tiled, Some(2048)),
    ];
    let contexts = contexts(scenario);
    let series = kinds.into_iter().enumerate().map(|(place, (name, attention, chunk))| {
        let changed = Scenario { attention, chunk: chunk.or(scenario.chunk), ..scenario.clone() };
        let ends = changed.max_context().ok().flatten().map_or("never fits".into(), |most| match most {
            MOST.. => "never ends".into(),
            most => format!("ends at {}", grouped(u128::from(most))),
        });
        let there = u128::from(changed.memory.bytes());
        let peak = |context| changed.peak(context).ok().map(|(_, bytes)| (bytes.total(), bytes.total() <= there));
        curve(format!("{name}: {ends}"), place, peak, &contexts)
    });
    let caption = "Predicted peak of load, prefill and decoding. Crosses: more than there is.";
    chart("memory-vs-context", "Memory against context".into(), scenario, caption, series.collect())
}

/// The terms of the scenario's fullest phase.
fn terms(scenario: &Scenario<'_>, waterfall: &Waterfall) -> Chart {
    let contexts = contexts(scenario);
    let phase = Phase::ALL.into_iter().find(|phase| phase.name() == waterfall.peak_phase).unwrap_or(Phase::Prefill);
    let of = |(place, name): (usize, &'static str)| {
        let bytes = |context| {
            let bytes = scenario.bytes_at(phase, context).ok()?;
            Some((bytes.terms().iter().find(|(term, _)| *term == name)?.1, true))
        };
        curve(name.into(), place, bytes, &contexts)
    };
    let mut series: Vec<Series> = waterfall.terms.iter().map(|term| term.term).enumerate().map(of).collect();
    let total = |context| Some((scenario.bytes_at(phase, context).ok()?.total(), true));
    series.push(curve("total".into(), waterfall.terms.len(), total, &contexts));
    let title = format!("What {} is made of", phase.name());
    chart("memory-terms", title, scenario, "Each term by its formula; the total is their sum.", series)
}

/// The longest context that each lever makes fit.
fn ranked(scenario: &Scenario<'_>, waterfall: &Waterfall, levers: &[&Ranked]) -> Rows {
    let value = |tokens: Option<u64>| vec![tokens.map(|tokens| (tokens as f64, Vec::new()))];
    let as_is = Row { name: "as it is".into(), values: value(waterfall.max_context_tokens) };
    let rows = levers.iter().map(|lever| Row { name: lever.lever.clone(), values: value(lever.max_context_tokens) });
    Rows {
        id: "levers".into(),
        title: "The longest context, by what is changed".into(),
        subtitle: scenario.words(),
        caption: "One change at a time, those that gain most for their price first.".into(),
        axis: Axis { label: "context, tokens".into(), field: "max_context_tokens", quantity: Quantity::Tokens },
        mark: Mark::Bar,
        kinds: vec![Kind { name: "longest context that fits".into(), colour: palette::style("", 0, 0).colour }],
        rows: std::iter::once(as_is).chain(rows).collect(),
    }
}

/// Writes `zero-stages` as SVG and CSV: a card's memory in each stage, by term.
///
/// # Errors
/// When it cannot be drawn or a file cannot be written.
pub fn write_training(folder: &Path, training: &Training<'_>) -> Result<(), ReportError> {
    let stages: Vec<Spent> = (0..=3).map(|zero| Training { zero, ..training.clone() }.spent()).collect();
    let used: Vec<usize> =
        (0..stages[0].terms().len()).filter(|&term| stages.iter().any(|spent| spent.terms()[term].1 > 0)).collect();
    let kinds = used.iter().enumerate().map(|(place, &term)| Kind {
        name: stages[0].terms()[term].0.into(),
        colour: palette::style("", place, 0).colour,
    });
    let row = |(zero, spent): (usize, &Spent)| {
        let value = |&term: &usize| {
            Some(spent.terms()[term].1).filter(|bytes| *bytes > 0).map(|bytes| (bytes as f64, Vec::new()))
        };
        Row { name: format!("ZeRO {zero}: {}", bytes(spent.total())), values: used.iter().map(value).collect() }
    };
    let figure = Rows {
        id: "zero-stages".into(),
        title: format!("Training {}, by ZeRO's stage", training.subject.name),
        subtitle: format!("{} cards, {} on each", training.data_parallel, training.optimizer.name),
        caption: "Bytes of a card; stage 1 divides the optimizer's states, 2 the gradients too, 3 the parameters too."
            .into(),
        axis: Axis { label: "memory of a card".into(), field: "bytes", quantity: Quantity::Size },
        mark: Mark::Bar,
        kinds: kinds.collect(),
        rows: stages.iter().enumerate().map(row).collect(),
    };
    rows(folder, &figure)
}
