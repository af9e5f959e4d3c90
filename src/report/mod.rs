//! Records to figures, tables and one page.
//!
//! [`write()`] turns the records of one or more runs into SVG figures, the CSV behind each, `summary.md` and a
//! `report.html` that needs nothing else: no script, font or image from elsewhere. The steps know little of one
//! another: `figures` reads records and makes a `chart::Chart`, a `rows::Rows` or a `heat::Heat`, `draw` makes SVG of it,
//! `csv` a table, `html` a page. Adding a figure is one file and one line in `figures::FIGURES` or `figures::PANELS`.

mod additivity;
pub mod anatomy;
mod answers;
mod bars;
mod baseline;
mod chart;
mod combined;
mod comparison;
mod csv;
mod draw;
mod edits;
mod figures;
mod files;
mod findings;
mod growth;
mod heat;
mod html;
mod knobs;
mod leaderboard;
mod naming;
mod noise;
mod notes;
mod origin;
mod outlier;
mod palette;
pub mod planner;
mod pools;
mod recall;
mod rows;
#[cfg(test)]
mod samples;
mod serving;
mod steps;
mod summary;
mod table;
#[cfg(test)]
mod tests;
mod text;
mod ticks;
pub mod training;
mod tuning;
mod versus;
pub mod workers;

pub use summary::summary_table;
pub use table::MOST_COLUMNS;
pub use versus::{Versus, versus};

use crate::experiment::record::Record;
use crate::units;
use chart::Chart;
use figures::Picture;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A decode step that reads less than this part of the KV bytes held reads sparsely.
const SPARSE: f64 = 0.9;

/// One run to be shown.
#[derive(Debug, Clone)]
pub struct Run {
    /// Name of the experiment.
    pub experiment: String,
    /// What the experiment asks, in a sentence or two.
    pub description: String,
    /// Whether inputs that no model made are synthetic; not so where they come from the user's file.
    pub is_synthetic: bool,
    /// Id of the run.
    pub run_id: String,
    /// The command that runs it again.
    pub repro: String,
    /// `env.json`: machine, system and build.
    pub environment: serde_json::Value,
    /// The cells. Of several records of one cell the last counts.
    pub records: Vec<Record>,
    /// Cells of the experiment that stand in other sections: those of other machines or thread counts.
    pub elsewhere: usize,
}

impl Run {
    /// Cells of the experiment that have no record: an interrupted run's, or those of other shards.
    fn missing(&self) -> usize {
        let all = self.environment["run"]["cells"].as_u64().unwrap_or(0) as usize;
        all.saturating_sub(latest(&self.records).len() + self.elsewhere)
    }
}

/// What [`write()`] wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drawn {
    /// `report.html`.
    pub html: PathBuf,
    /// `summary.md`.
    pub summary: PathBuf,
    /// Every SVG; the CSV behind it has the same name with the ending `csv`.
    pub figures: Vec<PathBuf>,
}

/// A report that could not be written.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// No run was given.
    #[error("there is no run to report; name at least one directory that holds cells.jsonl")]
    NoRun,
    /// No run has a record.
    #[error("run '{0}' has no cells: its cells.jsonl is empty; name a run that has at least one")]
    NoCells(String),
    /// A file could not be written.
    #[error("cannot write '{path}': {reason}; give a directory that can be written to")]
    File {
        /// The file.
        path: PathBuf,
        /// The system's own words.
        reason: std::io::Error,
    },
    /// A chart without a point that its axes can show.
    #[error("figure '{0}' has no point that its axes can show; a figure needs at least one")]
    Empty(String),
    /// The drawing library failed.
    #[error("cannot draw: {0}")]
    Draw(String),
    /// A table could not be written.
    #[error("cannot write the table behind a figure: {0}")]
    Csv(#[from] ::csv::Error),
    /// The page could not be filled in.
    #[error("cannot fill in report.html: {0}")]
    Page(#[from] minijinja::Error),
}

/// How far the figures go into detail.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Detail {
    /// The heads of a layer together.
    #[default]
    Layers,
    /// Each head of a layer.
    Heads,
}

/// A figure, drawn, and where its files lie relative to the report.
struct Figure {
    title: String,
    caption: String,
    /// Words in it that are ours, with their meanings.
    words: Vec<(&'static str, &'static str)>,
    svg: String,
    csv: String,
    stem: String,
}

/// Writes `plots/*.svg`, `plots/*.csv` (`comparisons.csv` and `additivity.csv` where models were evaluated), `summary.md` and
/// `report.html` into `folder`; the figures of the second and further `runs` go to `plots/<run_id>/`. Every file is written under a
/// temporary name and then renamed, so that a reader never sees half of one.
///
/// # Errors
/// [`ReportError`] when there is no run or no record in any, or when something cannot be drawn or written.
pub fn write(folder: &Path, runs: &[Run], detail: Detail) -> Result<Drawn, ReportError> {
    let Some(first) = runs.first() else { return Err(ReportError::NoRun) };
    if runs.iter().all(|run| run.records.is_empty()) {
        return Err(ReportError::NoCells(first.run_id.clone()));
    }
    let folders = plot_folders(runs);
    let section = |(run, plots): (_, String)| draw_all(run, &plots, detail).map(|figures| (run, figures));
    let sections = runs.iter().zip(folders).map(section).collect::<Result<Vec<(&Run, Vec<Figure>)>, _>>()?;
    let mut drawn = Drawn { html: folder.join("report.html"), summary: folder.join("summary.md"), figures: Vec::new() };
    for figure in sections.iter().flat_map(|(_, figures)| figures) {
        let path = folder.join(format!("{}.svg", figure.stem));
        files::replace(&path, &figure.svg)?;
        files::replace(&path.with_extension("csv"), &figure.csv)?;
        drawn.figures.push(path);
    }
    for ((run, _), plots) in sections.iter().zip(plot_folders(runs)) {
        for (table, csv) in leaderboard::beside(&latest(&run.records))? {
            files::replace(&folder.join(&plots).join(table.name), &csv)?;
        }
    }
    files::replace(&drawn.summary, &html::summary(&sections))?;
    files::replace(&drawn.html, &html::page(&sections)?)?;
    Ok(drawn)
}

/// What the records say, in a few sentences.
pub fn findings(records: &[Record]) -> Vec<String> {
    findings::of(&latest(records)).into_iter().map(|finding| finding.replace('`', "")).collect()
}

fn draw_all(run: &Run, plots: &str, detail: Detail) -> Result<Vec<Figure>, ReportError> {
    let records = latest(&run.records);
    let data = figures::Data::new(&records, detail);
    let charts = figures::FIGURES.iter().filter_map(|figure| figure(&data));
    let charts = charts.filter(Chart::is_readable).map(Picture::Curves);
    let panels = figures::PANELS.iter().filter_map(|figure| figure(&data));
    let draw = |mut picture: Picture| {
        notes::add(&mut picture, &records, run.is_synthetic);
        let (svg, table) = match &picture {
            Picture::Curves(chart) => (draw::svg(chart), csv::with_cells(chart, figures::told(&chart.id), &records)),
            Picture::Rows(rows) => (draw::rows(rows), csv::rows(rows)),
            Picture::Heat(heat) => (draw::heat(heat), csv::heat(heat)),
            Picture::Bars(bars) => (draw::bars::svg(bars), bars.csv()),
        };
        let stem = format!("{plots}/{}", picture.id());
        let (title, caption) = picture.words_mut();
        let (title, caption) = (std::mem::take(title), std::mem::take(caption));
        let words = notes::definitions(&[picture.labels(), vec![&title]].concat());
        match svg {
            // Records may hold nothing but zeros, for which a logarithmic axis has no place.
            Err(ReportError::Empty(_)) => None,
            Err(error) => Some(Err(error)),
            Ok(svg) => Some(table.map(|csv| Figure { title, caption, words, svg, csv, stem })),
        }
    };
    charts.chain(panels).filter_map(draw).collect()
}

/// `plots` for the first run, `plots/<run_id>` for the others, each once.
fn plot_folders(runs: &[Run]) -> Vec<String> {
    let mut folders: Vec<String> = Vec::new();
    for run in runs {
        // A run id comes from a file: it must not lead out of the folder.
        let plain = |letter: char| if letter.is_ascii_alphanumeric() || "-_.".contains(letter) { letter } else { '-' };
        // One that was put together of shards has the name of the first.
        let id: String = run.run_id.split(' ').next().unwrap_or_default().chars().map(plain).collect();
        let base = if folders.is_empty() { "plots".into() } else { format!("plots/{}", id.trim_start_matches('.')) };
        let numbered = (1..).map(|count| if count == 1 { base.clone() } else { format!("{base}-{count}") });
        let free = numbered.into_iter().find(|folder| !folders.contains(folder) && !folder.ends_with('/'));
        folders.extend(free);
    }
    folders
}

/// The last record of each cell, sorted by measure, context or facts, kernel, policy, budget, heads, batch, trace, strategy, episode, memory,
/// ranks, model, task, formats and seed.
fn latest(records: &[Record]) -> Vec<&Record> {
    let by_id: BTreeMap<&str, &Record> = records.iter().map(|record| (record.cell_id.as_str(), record)).collect();
    let mut records: Vec<&Record> = by_id.into_values().collect();
    // Fractions, tokens and bytes each ascend; bits of positive numbers are ordered as the numbers are.
    let size = |budget: &str| budget.parse().map_or_else(|_| units::parse_bytes(budget).unwrap_or(0), f64::to_bits);
    let key = |record: &Record| {
        let cell = &record.cell;
        let budget = cell.budget.clone().map(|budget| (size(&budget), budget));
        let heads = (cell.q_heads, cell.kv_heads, cell.batch);
        // By length first: reservations before pages, and pages by their size.
        let strategy = cell.strategy.clone().map(|name| (name.len(), name));
        let serving = (std::cmp::Reverse(cell.trace.clone()), strategy, cell.page_tokens);
        let recall = (cell.episode.clone().map(|name| (name.len(), name)), cell.memory.clone());
        let choice = (cell.kernel.clone(), cell.policy.clone(), budget);
        let ranks = cell.ranks.clone().or(cell.tuning.clone()).map(|name| (name.len(), name));
        // Plain ones first.
        let named = |name: Option<String>| name.map(|name| (name.len(), name));
        let kept = [
            named(cell.model.clone()),
            named(cell.task.clone()),
            named(cell.weights.as_ref().map(ToString::to_string)),
            named(cell.kv_format.as_ref().map(ToString::to_string)),
            named(cell.activations.as_ref().map(ToString::to_string)),
            named(Some(cell.dtype.to_string())),
        ];
        (cell.measure, (cell.context_tokens, cell.facts), choice, heads, serving, (recall, ranks), (kept, cell.seed))
    };
    records.sort_by_cached_key(|record| key(record));
    records
}
