//! The planner's figures: memory against context, the terms that it is made of, levers, and the stages of ZeRO.
//!
//! Both axes are logarithmic, so that a term that does not grow is level, keys and values rise with slope 1 and scores with
//! slope 2. Beyond the context that fits, points are the crosses of every figure, at the height that would be needed.

use super::chart::{Axis, Chart, Point, Quantity, Rule, Series};
use super::rows::{Kind, Mark, Row, Rows};
use super::{Figure, ReportError, csv, draw, files, html, palette};
use crate::experiment::record::Status;
use crate::planner::levers::Ranked;
use crate::planner::measure::{Held, Measured};
use crate::planner::scenario::{Allocation, Attention, Bytes, Memory};
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

/// Writes the figures of a plan, each as SVG and CSV, and `report.html` with them and what the terminal says: memory against
/// context by kind of attention, by term as curves and as stacks, the room that tokens take, KV heads, and levers.
///
/// # Errors
/// When nothing can be drawn or a file cannot be written.
pub fn write(
    folder: &Path,
    scenario: &Scenario<'_>,
    waterfall: &Waterfall,
    levers: &[Ranked],
    together: &[(String, u64)],
    said: &str,
) -> Result<(), ReportError> {
    let mut figures = vec![curves(attention(scenario))?, curves(terms(scenario, waterfall))?, bars(stacks(scenario))?];
    figures.push(curves(room(scenario))?);
    figures.extend(kv_heads(scenario).map(bars).transpose()?);
    let drawn: Vec<&Ranked> = levers.iter().filter(|lever| lever.max_context_tokens.is_some()).collect();
    if !drawn.is_empty() {
        figures.push(bars(ranked(scenario, waterfall, &drawn))?);
    }
    if !together.is_empty() {
        figures.push(bars(falls(scenario, waterfall, together))?);
    }
    publish(folder, &format!("plan: {}", scenario.subject.name), said, &figures)
}

fn curves(chart: Chart) -> Result<Figure, ReportError> {
    let (svg, csv) = (draw::svg(&chart)?, csv::write(&chart)?);
    Ok(Figure { title: chart.title, caption: chart.caption, words: Vec::new(), svg, csv, stem: chart.id })
}

fn bars(rows: Rows) -> Result<Figure, ReportError> {
    let (svg, csv) = (draw::rows(&rows)?, csv::rows(&rows)?);
    Ok(Figure { title: rows.title, caption: rows.caption, words: Vec::new(), svg, csv, stem: rows.id })
}

fn publish(folder: &Path, title: &str, said: &str, figures: &[Figure]) -> Result<(), ReportError> {
    for figure in figures {
        files::replace(&folder.join(format!("{}.svg", figure.stem)), &figure.svg)?;
        files::replace(&folder.join(format!("{}.csv", figure.stem)), &figure.csv)?;
    }
    files::replace(&folder.join("report.html"), &html::plan_page(title, said, figures)?)
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
        rules: vec![capacity(scenario.memory)],
    }
}

/// What is there.
fn capacity(memory: Memory) -> Rule {
    let label = match memory {
        Memory::Gpu(gpu) => format!("{}: {}", gpu.name, bytes(gpu.bytes())),
        Memory::Bytes(there) | Memory::Host(there) => bytes(there),
    };
    Rule { y: memory.bytes() as f64, label }
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

/// What the fullest moment is made of, stacked, at contexts up to the first that takes twice what is there.
fn stacks(scenario: &Scenario<'_>) -> Rows {
    let twice = 2 * u128::from(scenario.memory.bytes());
    let mut over = 0;
    let peaks = contexts(scenario).into_iter().filter_map(|context| Some((context, scenario.peak(context).ok()?.1)));
    let peaks: Vec<_> = peaks
        .take_while(|(_, bytes)| {
            over += usize::from(bytes.total() > twice / 2);
            over <= 1 && bytes.total() <= twice.saturating_mul(2)
        })
        .collect();
    let used = |place: &usize| peaks.iter().any(|(_, bytes)| bytes.terms()[*place].1 > 0);
    let used: Vec<usize> = (0..peaks.first().map_or(0, |(_, bytes)| bytes.terms().len())).filter(used).collect();
    let kind = |(colour, &place): (usize, &usize)| Kind {
        name: peaks[0].1.terms()[place].0.into(),
        colour: palette::style("", colour, 0).colour,
    };
    let row = |(context, bytes): &(u64, Bytes)| Row {
        name: grouped(u128::from(*context)),
        values: used.iter().map(|&place| Some((bytes.terms()[place].1 as f64, Vec::new()))).collect(),
    };
    Rows {
        id: "memory-stacked".into(),
        title: "The fullest moment at each context".into(),
        subtitle: scenario.words(),
        caption: "Terms behind one another; the dashed line is what is there.".into(),
        axis: Axis { label: "memory".into(), field: "bytes", quantity: Quantity::Size },
        mark: Mark::Stack,
        kinds: used.iter().enumerate().map(kind).collect(),
        rows: peaks.iter().map(row).collect(),
        limit: Some(capacity(scenario.memory)),
    }
}

/// Last context of the figure of rooms, and the distance between its points.
const ROOM: (u64, usize) = (2048, 64);

/// Bytes that are taken for a growing sequence, by how room is taken: a slope, staircases, a level line.
fn room(scenario: &Scenario<'_>) -> Chart {
    let kinds = [
        ("what its tokens take", Allocation::Exact),
        ("pages of 256 tokens", Allocation::Paged(256)),
        ("pages of 512 tokens", Allocation::Paged(512)),
        ("2048 tokens reserved", Allocation::Reserved(Some(ROOM.0))),
    ];
    // With the first token of the next page beside the last of each: steps are no slopes.
    let edges = (ROOM.1 as u64..=ROOM.0).step_by(ROOM.1).flat_map(|context| [context, context + 1]);
    let contexts: Vec<u64> = edges.filter(|context| *context <= ROOM.0).collect();
    let series = kinds.into_iter().enumerate().map(|(place, (name, allocation))| {
        let changed = Scenario { allocation, batch: 1, eviction: None, ..scenario.clone() };
        let taken = |context| {
            let bytes = changed.bytes_at(Phase::Prefill, context).ok()?;
            Some((bytes.kv + bytes.slack + bytes.metadata, true))
        };
        curve(name.into(), place, taken, &contexts)
    });
    let caption = "Keys and values of one sequence, empty places and page tables included, as it grows.";
    let title = "The room that a sequence takes".into();
    let chart = chart("kv-room", title, scenario, caption, series.collect());
    Chart {
        x: Axis { quantity: Quantity::Steps, ..chart.x },
        y: Axis { label: "bytes of the cache".into(), field: "kv_bytes", quantity: Quantity::Size },
        rules: Vec::new(),
        ..chart
    }
}

/// The longest context of tiled attention, which no scores end first, by the number of KV heads; none where layers differ, or share compressed rows.
fn kv_heads(scenario: &Scenario<'_>) -> Option<Rows> {
    let scenario = &Scenario { attention: Attention::Tiled, ..scenario.clone() };
    let heads = scenario.subject.heads;
    let own = scenario.subject.groups.first().filter(|group| group.v_dim > 0)?.heads;
    scenario.subject.groups.iter().all(|group| group.heads == own).then_some(())?;
    let counts = (1..=heads)
        .rev()
        .filter(|count| heads.is_multiple_of(*count) && (count.is_power_of_two() || [own, heads].contains(count)));
    let row = |count: usize| {
        let mut subject = scenario.subject.clone();
        subject.groups.iter_mut().for_each(|group| group.heads = count);
        let changed = Scenario { subject: &subject, ..scenario.clone() };
        let kind = match count {
            _ if count == own => " (this model)",
            1 => " (MQA)",
            _ if count == heads => " (MHA)",
            _ => "",
        };
        let value = changed.max_context().ok().flatten().filter(|most| *most < MOST);
        Row {
            name: format!("{count}{kind}: {} a token", bytes(changed.kv_token_bytes())),
            values: vec![value.map(|tokens| (tokens as f64, Vec::new()))],
        }
    };
    let rows: Vec<Row> = counts.map(row).filter(|row| row.values[0].is_some()).collect();
    (rows.len() > 1).then(|| Rows {
        id: "kv-heads".into(),
        title: "The longest context, by KV heads".into(),
        subtitle: scenario.words(),
        caption: "Only the cache is changed; weights stay as they are.".into(),
        ..context_rows("", Mark::Bar, rows)
    })
}

/// The longest context that each lever makes fit.
fn ranked(scenario: &Scenario<'_>, waterfall: &Waterfall, levers: &[&Ranked]) -> Rows {
    let rows = levers.iter().map(|lever| context_row(lever.lever.clone(), lever.max_context_tokens));
    Rows {
        id: "levers".into(),
        title: "The longest context, by what is changed".into(),
        subtitle: scenario.words(),
        caption: "One change at a time, those that gain most for their price first.".into(),
        ..context_rows("", Mark::Bar, std::iter::once(as_is(waterfall)).chain(rows).collect())
    }
}

/// The longest context as levers come one on top of the other.
fn falls(scenario: &Scenario<'_>, waterfall: &Waterfall, together: &[(String, u64)]) -> Rows {
    let rows = together.iter().map(|(lever, most)| context_row(format!("+ {lever}"), Some(*most)));
    Rows {
        id: "levers-together".into(),
        title: "The longest context, as changes are added".into(),
        subtitle: scenario.words(),
        caption:
            "Each bar is what one more change gains on top of all above it; at each step the one that gains most for \
                  its price."
                .into(),
        ..context_rows("", Mark::Fall, std::iter::once(as_is(waterfall)).chain(rows).collect())
    }
}

fn as_is(waterfall: &Waterfall) -> Row {
    context_row("as it is".into(), waterfall.max_context_tokens)
}

fn context_row(name: String, tokens: Option<u64>) -> Row {
    Row { name, values: vec![tokens.map(|tokens| (tokens as f64, Vec::new()))] }
}

/// Lines of longest contexts, without the words around them.
fn context_rows(id: &str, mark: Mark, rows: Vec<Row>) -> Rows {
    Rows {
        id: id.into(),
        title: String::new(),
        subtitle: String::new(),
        caption: String::new(),
        axis: Axis { label: "context, tokens".into(), field: "max_context_tokens", quantity: Quantity::Steps },
        mark,
        kinds: vec![Kind { name: "longest context that fits".into(), colour: palette::style("", 0, 0).colour }],
        rows,
        limit: None,
    }
}

/// Writes `measured-vs-context` as SVG and CSV, and `report.html`: each predicted size as a line, what was measured as points on it.
///
/// # Errors
/// When nothing can be drawn or a file cannot be written.
pub fn write_measured(
    folder: &Path,
    scenario: &Scenario<'_>,
    measured: &[Measured],
    said: &str,
) -> Result<(), ReportError> {
    let mut terms: Vec<&str> = Vec::new();
    for held in measured.iter().flat_map(|one| &one.held) {
        if !terms.contains(&held.term) {
            terms.push(held.term);
        }
    }
    type Account = fn(&Held) -> Option<u64>;
    let accounts: [(&str, Account); 2] = [("arena", |held| held.arena_bytes), ("process", |held| held.process_bytes)];
    let named = terms.iter().flat_map(|&term| accounts.map(|(account, bytes)| (term, account, bytes)));
    let series = named.enumerate().map(|(place, (term, account, bytes))| {
        let point = |one: &Measured| {
            let held = one.held.iter().find(|held| held.term == term)?;
            Some(Point {
                x: one.context_tokens as f64,
                y: Some(bytes(held)? as f64),
                interval: None,
                model: Some(held.predicted_bytes as f64),
                status: Status::Ok,
                cell_ids: Vec::new(),
            })
        };
        let name = format!("{term}, {account}");
        Series { style: palette::style(&name, place, 0), name, points: measured.iter().filter_map(point).collect() }
    });
    let chart = Chart {
        id: "measured-vs-context".into(),
        title: "Predicted and measured".into(),
        rules: Vec::new(),
        ..chart(
            "",
            String::new(),
            scenario,
            "Lines: predicted from headers and shapes. Points: counted by the arena, and growth of the process. A load that maps \
             its files has touched few of their pages; a pass touches all.",
            series.collect(),
        )
    };
    publish(folder, &format!("plan measure: {}", scenario.subject.name), said, &[curves(chart)?])
}

/// Writes `zero-stages` as SVG and CSV, and `report.html`: a card's memory in each stage, by term.
///
/// # Errors
/// When it cannot be drawn or a file cannot be written.
pub fn write_training(folder: &Path, training: &Training<'_>, memory: Memory, said: &str) -> Result<(), ReportError> {
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
        Row { name: format!("ZeRO {zero}"), values: used.iter().map(value).collect() }
    };
    let figure = Rows {
        id: "zero-stages".into(),
        title: format!("Training {}, by ZeRO's stage", training.subject.name),
        subtitle: format!("{} cards, {} on each", training.data_parallel, training.optimizer.name),
        caption: "Bytes of a card; stage 1 divides the optimizer's states, 2 the gradients too, 3 the parameters too."
            .into(),
        axis: Axis { label: "memory of a card".into(), field: "bytes", quantity: Quantity::Size },
        mark: Mark::Stack,
        kinds: kinds.collect(),
        rows: stages.iter().enumerate().map(row).collect(),
        limit: Some(capacity(memory)),
    };
    publish(folder, &format!("plan train: {}", training.subject.name), said, &[bars(figure)?])
}
