//! The figures: one file each, one line each in [`FIGURES`].
//!
//! A figure is a function from the records of a run to a [`Chart`], or to nothing when the records hold nothing for
//! it. What they share lives here: which records may be drawn at all, and how cells become the points of a series.

mod activations_ranked;
mod answers_vs_kept;
mod bytes_read_vs_held;
mod chunked_prefill;
mod decode_latency_vs_kv_bytes;
mod decode_steps;
mod drift_vs_budget;
mod drift_vs_context;
mod drift_vs_kv_bytes;
mod edits;
mod equal_bytes;
mod formats_and_tokens;
mod kept_by_head;
mod kept_by_position;
mod kv_heads;
mod kv_memory_use;
mod kv_vs_context;
mod latency_vs_context;
mod memories;
mod memory_cost;
mod memory_modes;
mod memory_vs_context;
mod model_vs_context;
mod needle_heat_map;
mod needle_recall_vs_budget;
mod paging_tradeoff;
mod policies_ranked;
mod predicted_vs_measured;
mod ragged_memory;
mod ranks;
mod ranks_over_settings;
mod recall;
mod rounding;
mod scoring_cost;
mod tuning;
mod weights_and_cache;
mod weights_ranked;
mod zero;

#[cfg(test)]
#[path = "../../../docs/examples/figure.rs"]
pub mod example;

use super::Detail;
use super::bars::Bars;
use super::chart::{Axis, Chart, Interval, Point, Quantity, Series};
use super::csv::Told;
use super::heat::Heat;
use super::knobs;
use super::naming::{BUDGET, CONTEXT, HEADS, KERNEL, Naming};
use super::palette::{self, Style};
use super::rows::Rows;
use crate::experiment::cell::Cell;
use crate::experiment::measure::Measure;
use crate::experiment::record::{Latency, Record, Status};
use crate::stats::LEAST_FOR_INTERVAL;
use std::collections::{BTreeMap, BTreeSet};

/// Every figure, in the order in which the report shows them.
pub const FIGURES: &[fn(&Data) -> Option<Chart>] = &[
    memory_vs_context::forward,
    memory_vs_context::backward,
    predicted_vs_measured::chart,
    latency_vs_context::forward,
    latency_vs_context::backward,
    latency_vs_context::decode,
    drift_vs_context::forward,
    drift_vs_context::backward,
    kv_vs_context::chart,
    drift_vs_budget::chart,
    drift_vs_kv_bytes::chart,
    needle_recall_vs_budget::chart,
    decode_latency_vs_kv_bytes::chart,
    scoring_cost::chart,
    kv_heads::bytes_per_token,
    kv_heads::forward_latency,
    kv_heads::decode_latency,
    paging_tradeoff::chart,
    ranks::bytes,
    ranks::time,
    ranks::sending,
    recall::by_facts,
    recall::by_bytes,
    recall::forgetting,
    recall::overwriting,
    recall::scope,
    edits::by_facts,
    decode_steps::live_bytes,
    decode_steps::drift,
    decode_steps::mass_lost,
    decode_steps::regret,
    chunked_prefill::kv_bytes,
    chunked_prefill::memory,
    chunked_prefill::drift,
    equal_bytes::latency,
    equal_bytes::drift,
    bytes_read_vs_held::chart,
    answers_vs_kept::score_by_budget,
    answers_vs_kept::score_by_bytes,
    answers_vs_kept::divergence_by_budget,
    answers_vs_kept::text_divergence_by_budget,
    formats_and_tokens::chart,
    memories::by_bytes,
    memories::by_window,
    memories::score_by_bytes,
    memory_modes::tokens,
    memory_modes::age,
    memory_modes::likeness,
    weights_and_cache::chart,
    model_vs_context::memory,
    model_vs_context::first_token,
    model_vs_context::step,
];

/// Every figure that is not made of curves; they follow those that are.
pub const PANELS: &[fn(&Data) -> Option<Picture>] = &[
    policies_ranked::rows,
    weights_ranked::rows,
    activations_ranked::rows,
    ranks_over_settings::rows,
    ragged_memory::rows,
    kept_by_head::heat,
    kept_by_position::heat,
    needle_heat_map::heat,
    memory_cost::rows,
    |data| kv_memory_use::bars(data).map(Picture::Bars),
    |data| zero::bars(data).map(Picture::Bars),
    |data| tuning::bars(data).map(Picture::Bars),
];

/// What the table behind a figure says of the cell of each point: of fronts, which are made of cells of many formats.
pub fn told(id: &str) -> &'static [Told] {
    const FORMAT: Told = ("format", |cell| cell.kv_format().to_string());
    const POLICY: Told = ("policy", |cell| cell.policy.clone().unwrap_or_default());
    const BUDGET: Told = ("budget", |cell| cell.budget.clone().unwrap_or_default());
    match id {
        formats_and_tokens::ID => &[FORMAT, BUDGET],
        weights_and_cache::ID => &[FORMAT, POLICY, BUDGET],
        _ => &[],
    }
}

/// A figure of any form.
pub enum Picture {
    /// Curves between two axes.
    Curves(Chart),
    /// Values beside names.
    Rows(Rows),
    /// Small heat maps.
    Heat(Heat),
    /// Stacked bars.
    Bars(Bars),
}

impl Picture {
    /// Name of the file.
    pub fn id(&self) -> &str {
        match self {
            Picture::Curves(chart) => &chart.id,
            Picture::Rows(rows) => &rows.id,
            Picture::Heat(heat) => &heat.id,
            Picture::Bars(bars) => &bars.id,
        }
    }

    /// Title and caption.
    pub fn words_mut(&mut self) -> (&mut String, &mut String) {
        match self {
            Picture::Curves(chart) => (&mut chart.title, &mut chart.caption),
            Picture::Rows(rows) => (&mut rows.title, &mut rows.caption),
            Picture::Heat(heat) => (&mut heat.title, &mut heat.caption),
            Picture::Bars(bars) => (&mut bars.title, &mut bars.caption),
        }
    }

    /// What stands beside the axes and the marks.
    pub fn labels(&self) -> Vec<&str> {
        match self {
            Picture::Curves(chart) => {
                let names = chart.series.iter().map(|series| series.name.as_str());
                names.chain([chart.x.label.as_str(), chart.y.label.as_str()]).collect()
            }
            Picture::Rows(rows) => {
                rows.rows.iter().map(|row| row.name.as_str()).chain([rows.axis.label.as_str()]).collect()
            }
            Picture::Heat(heat) => heat.panels.iter().map(|panel| panel.name.as_str()).collect(),
            Picture::Bars(bars) => vec![&bars.y.label],
        }
    }

    /// The cells behind it.
    pub fn cell_ids(&self) -> BTreeSet<String> {
        match self {
            Picture::Curves(chart) => {
                let points = chart.series.iter().flat_map(|series| &series.points);
                points.flat_map(|point| point.cell_ids.clone()).collect()
            }
            Picture::Rows(rows) => {
                let values = rows.rows.iter().flat_map(|row| row.values.iter().flatten());
                values.flat_map(|(_, ids)| ids.clone()).collect()
            }
            Picture::Heat(heat) => heat.panels.iter().flat_map(|panel| panel.cell_ids.concat().concat()).collect(),
            Picture::Bars(bars) => bars.bars.iter().flat_map(|bar| bar.cell_ids.clone()).collect(),
        }
    }
}

/// The records of a run that may be drawn: those that are `ok`, and those that ran out of memory.
///
/// A `failed` or `skipped` cell is left out here, once, so that no figure can show a number of it.
pub struct Data<'a> {
    records: Vec<&'a Record>,
    /// The same and those of other settings of the synthetic inputs.
    of_all_settings: Vec<&'a Record>,
    detail: Detail,
    /// Places of policies and memories that no registry knows, behind those that one does.
    own: BTreeMap<&'a str, usize>,
}

/// What a figure reads from one `ok` or `oom` cell.
pub struct Reading {
    /// Place on the horizontal axis.
    pub x: f64,
    /// Measured value; `None` where the cell ran out of memory.
    pub y: Option<f64>,
    /// The value's own interval.
    pub interval: Option<Interval>,
    /// Value by formula.
    pub model: Option<f64>,
}

impl<'a> Data<'a> {
    /// The drawable ones of `records`.
    pub fn new(records: &[&'a Record], detail: Detail) -> Self {
        let of_all_settings: Vec<&Record> =
            records.iter().copied().filter(|record| matches!(record.status, Status::Ok | Status::Oom)).collect();
        let records = knobs::own(&of_all_settings);
        let chosen = records.iter().filter_map(|record| record.cell.chosen()).collect::<BTreeSet<&str>>();
        let is_own =
            |name: &&str| !palette::is_baseline(name) && !palette::is_oracle(name) && palette::place(name).is_none();
        let own = chosen.into_iter().filter(is_own).zip(palette::places()..).collect();
        Data { records, of_all_settings, detail, own }
    }

    /// The drawable records of one measure.
    pub fn of(&self, measure: Measure) -> Vec<&'a Record> {
        self.records.iter().copied().filter(|record| record.cell.measure == measure).collect()
    }

    /// The drawable records of one measure whose configuration was measured at two contexts or more: those that make
    /// a curve. What was measured at one context alone is a point of another figure.
    pub fn over_contexts(&self, measure: Measure) -> Vec<&'a Record> {
        curves(self.of(measure), |cell| std::mem::take(&mut cell.context_tokens))
    }

    /// The `ok` records of [`Measure::EVICT`] at the longest context that has any.
    pub fn evicted_at_longest_context(&self) -> Vec<&'a Record> {
        let mut records = self.of(Measure::EVICT);
        records.retain(|record| record.status == Status::Ok && record.eviction.is_some());
        let longest = records.iter().map(|record| record.cell.context_tokens).max();
        records.retain(|record| Some(record.cell.context_tokens) == longest);
        records
    }

    /// One `ok` eviction record for each policy of several layers, at the longest context and the middle one of the
    /// budgets there, with the lowest seed; its name; and what all have in common. Baselines keep everything and are
    /// left out.
    pub fn evicted_layers(&self) -> (Vec<(String, &'a Record)>, String) {
        let mut records = self.evicted_at_longest_context();
        records.retain(|record| record.cell.layers > 1 && !palette::is_baseline(&policy(record)));
        let kept = |record: &Record| record.eviction.as_ref().map_or(0, |eviction| eviction.budget_tokens);
        let budgets: BTreeSet<usize> = records.iter().map(|record| kept(record)).collect();
        let middle = budgets.iter().nth(budgets.len() / 2).copied();
        records.retain(|record| Some(kept(record)) == middle);
        let naming = Naming::over(&records, &[CONTEXT, HEADS, KERNEL, BUDGET]);
        let mut seen = BTreeSet::new();
        let named = records.into_iter().map(|record| (format!("{}{}", policy(record), naming.apart(record)), record));
        (named.filter(|(name, _)| seen.insert(name.clone())).collect(), naming.common)
    }

    /// Series of `records`, named by `lead` (a kernel or a policy) and by what else sets them apart.
    ///
    /// Cells of one series with the same `key` are one point: the median of them, with the range from the least to
    /// the greatest. A point is `oom` when no cell of it has a value and at least one ran out of memory.
    pub fn series(
        &self,
        records: &[&Record],
        naming: &Naming,
        lead: impl Fn(&Record) -> String,
        key: impl Fn(&Record) -> String,
        read: impl Fn(&Record) -> Option<Reading>,
    ) -> Vec<Series> {
        self.series_of(records, naming, lead, |record| read(record).map(|reading| (key(record), reading)))
    }

    /// The same where one cell may be many points, each with its key.
    pub fn series_of<I: IntoIterator<Item = (String, Reading)>>(
        &self,
        records: &[&Record],
        naming: &Naming,
        lead: impl Fn(&Record) -> String,
        read: impl Fn(&Record) -> I,
    ) -> Vec<Series> {
        let mut readings = Vec::new();
        for &record in records {
            readings.extend(read(record).into_iter().map(|(key, reading)| (record, lead(record), key, reading)));
        }
        self.grouped(naming, readings)
    }

    /// Readings of records, each with what leads its series and its key, by series.
    fn grouped(&self, naming: &Naming, readings: Vec<(&Record, String, String, Reading)>) -> Vec<Series> {
        type Cells<'r> = Vec<(&'r Record, Reading)>;
        let mut groups: BTreeMap<(String, String), BTreeMap<String, Cells>> = BTreeMap::new();
        for (record, lead, key, reading) in readings.into_iter().filter(|(.., reading)| reading.is_finite()) {
            let name = format!("{lead}{}", naming.apart(record));
            groups.entry((lead, name)).or_default().entry(key).or_default().push((record, reading));
        }
        let styles = self.styles(groups.keys());
        let series = groups.into_iter().zip(styles).map(|(((_, name), points), style)| {
            let mut points: Vec<Point> = points.into_values().map(|cells| point(&cells)).collect();
            points.sort_by(|a, b| a.x.total_cmp(&b.x));
            Series { name, style, points }
        });
        series.collect()
    }

    /// Styles for series given as (lead, name), in their order: by the place of what leads; what has none takes the next.
    fn styles<'n>(&self, names: impl Iterator<Item = &'n (String, String)>) -> Vec<Style> {
        let mut variants: BTreeMap<(Option<usize>, &str), usize> = BTreeMap::new();
        let mut next = 0..;
        let style = |(lead, _): &'n (String, String)| {
            let place = palette::place(lead).or(self.own.get(lead.as_str()).copied());
            // Baselines and oracles have no place, and are told apart by their names.
            let is_bound = palette::is_baseline(lead) || palette::is_oracle(lead);
            if place.is_none() && !is_bound {
                return palette::style(lead, next.next().unwrap_or(0), 0);
            }
            let variant = variants.entry((place, if is_bound { palette::stem(lead) } else { "" })).or_insert(0);
            *variant += 1;
            palette::style(lead, place.unwrap_or(0), *variant - 1)
        };
        names.map(style).collect()
    }
}

impl Reading {
    /// A measured value with its own 95% interval.
    pub fn measured(x: f64, y: f64, ci95: Option<(f64, f64)>) -> Reading {
        let interval = ci95.map(|(low, high)| Interval { low, high, kind: "ci95" });
        Reading { x, y: Some(y), interval, model: None }
    }

    /// The median of a phase, with its interval; of one sample nobody knows any.
    pub fn latency(x: f64, latency: &Latency) -> Reading {
        let interval = Interval { low: latency.ci95_low_ns, high: latency.ci95_high_ns, kind: interval_of(&[latency]) };
        let interval = Some(interval).filter(|_| latency.samples_ns.len() > 1);
        Reading { interval, ..Reading::measured(x, latency.median_ns, None) }
    }

    fn is_finite(&self) -> bool {
        let ends = self.interval.map(|Interval { low, high, .. }| [low, high]);
        let values = [self.x].into_iter().chain(self.y).chain(self.model).chain(ends.into_iter().flatten());
        values.into_iter().all(f64::is_finite)
    }
}

/// What the ends around medians are: of samples too few for an interval their range.
fn interval_of(phases: &[&Latency]) -> &'static str {
    if phases.iter().any(|phase| phase.samples_ns.len() < LEAST_FOR_INTERVAL) { "range" } else { "ci95" }
}

/// The same in words.
fn band() -> String {
    format!("the band is the 95% interval, of fewer than {LEAST_FOR_INTERVAL} samples their range, of one none")
}

/// Median drift of a record, with its interval, at `x`.
fn drift_at(x: f64, record: &Record) -> Option<Reading> {
    let drift = record.drift.as_ref()?;
    Some(Reading::measured(x, drift.rel_l2, Some((drift.ci95_low, drift.ci95_high))))
}

/// Tokens that stay, as a fraction of the context, or the budget of a policy that keeps everything under it and reads a part.
fn kept_or_budget(record: &Record) -> Option<f64> {
    let eviction = record.eviction.as_ref()?;
    Some(budget_of_all(record).unwrap_or(eviction.kept_fraction))
}

/// The budget, as a fraction of the context, of a policy that keeps everything under it and reads a part; `None` of others.
fn budget_of_all(record: &Record) -> Option<f64> {
    let eviction = record.eviction.as_ref().filter(|eviction| eviction.kept_fraction >= 1.0)?;
    Some(eviction.budget_tokens as f64 / record.cell.context_tokens as f64).filter(|budget| *budget < 1.0)
}

/// The axis of tokens kept, where some may keep all and have the place of their budget.
fn kept_axis(has_budgets: bool) -> Axis {
    let (label, field) = match has_budgets {
        true => ("tokens kept, or the budget where all are (fraction of context)", "kept_or_budget_fraction"),
        false => ("tokens kept (fraction of context)", "kept_fraction"),
    };
    Axis { label: label.into(), field, quantity: Quantity::Fraction }
}

/// The policy of an eviction cell.
fn policy(record: &Record) -> String {
    record.cell.policy.clone().unwrap_or_else(|| "no policy".into())
}

/// The budget of an eviction cell, as it was written.
fn budget(record: &Record) -> String {
    record.cell.budget.clone().unwrap_or_default()
}

/// The context of a cell.
fn context(record: &Record) -> String {
    record.cell.context_tokens.to_string()
}

/// The records among `records` that share their configuration with one at another place of the axis. `take` returns
/// the cell's place and blanks it.
fn curves(mut records: Vec<&Record>, take: impl Fn(&mut Cell) -> usize) -> Vec<&Record> {
    let split = |record: &Record| {
        let mut cell = Cell { seed: 0, workload_hash: String::new(), ..record.cell.clone() };
        let place = take(&mut cell);
        (cell.id(), place)
    };
    let mut places: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
    for record in &records {
        let (configuration, place) = split(record);
        places.entry(configuration).or_default().insert(place);
    }
    records.retain(|record| places[&split(record).0].len() > 1);
    records
}

fn point(cells: &[(&Record, Reading)]) -> Point {
    let measured: Vec<&(&Record, Reading)> = cells.iter().filter(|(_, reading)| reading.y.is_some()).collect();
    let shown = if measured.is_empty() { cells.iter().collect() } else { measured };
    let readings = || shown.iter().map(|(_, reading)| reading);
    let y = median(readings().filter_map(|reading| reading.y));
    let interval = match (&shown[..], y) {
        (_, None) => None,
        ([(_, only)], _) => only.interval,
        _ => {
            let ends = readings().filter_map(|reading| reading.y);
            let (low, high) = (ends.clone().fold(f64::INFINITY, f64::min), ends.fold(f64::NEG_INFINITY, f64::max));
            Some(Interval { low, high, kind: "min_max" })
        }
    };
    Point {
        x: median(readings().map(|reading| reading.x)).expect("a group has a cell"),
        y,
        interval,
        model: median(readings().filter_map(|reading| reading.model)),
        status: if y.is_some() { Status::Ok } else { Status::Oom },
        cell_ids: shown.iter().map(|(record, _)| record.cell_id.clone()).collect(),
    }
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        count if count % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}
