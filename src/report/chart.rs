//! What a figure shows, before anything is drawn: axes with a meaning, series, points and their intervals.
//!
//! Nothing here knows a drawing library or a file format. [`super::draw`] turns a [`Chart`] into SVG and
//! [`super::csv`] writes the points behind it, so that the two cannot disagree.

use super::palette::Style;
use crate::experiment::record::Status;

/// Curves that one plot can hold apart; more become small multiples.
pub const MOST_CURVES: usize = 10;
/// Places on the horizontal axis that lie nearer to each other, relative to the larger, are one to the eye.
const ONE_PLACE: f64 = 0.02;

/// A figure: axes, series and the words around them.
#[derive(Debug, Clone, PartialEq)]
pub struct Chart {
    /// Name of the file without its ending, `memory-vs-context`.
    pub id: String,
    /// What is compared, in a few words.
    pub title: String,
    /// What all series have in common: heads, element type, mask, threads.
    pub subtitle: String,
    /// What a reader must know to read the figure rightly.
    pub caption: String,
    /// Horizontal axis.
    pub x: Axis,
    /// Vertical axis.
    pub y: Axis,
    /// Field names of a point's interval, lower and upper end.
    pub interval_fields: (&'static str, &'static str),
    /// Field name of [`Point::model`]; `None` where nothing is predicted.
    pub model_field: Option<&'static str>,
    /// What is compared.
    pub series: Vec<Series>,
    /// Horizontal lines to compare with.
    pub rules: Vec<Rule>,
}

/// One axis.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    /// Words beside the axis.
    pub label: String,
    /// Name of the plotted field, as in the record.
    pub field: &'static str,
    /// What is counted, which decides scale and tick labels.
    pub quantity: Quantity,
}

/// What an axis counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantity {
    /// Tokens; log2, `4K`.
    Tokens,
    /// Bytes; log2, `64 MiB`.
    Bytes,
    /// A number of things; log2, `8`.
    Count,
    /// A fraction kept of a whole; log2, `1/8`.
    Fraction,
    /// A duration; log10, `2 ms`.
    Nanoseconds,
    /// A relative error; log10, `0.01`.
    Drift,
    /// A loss; log10, `0.5`.
    Loss,
    /// A cost relative to another; log10, `5 %`.
    Cost,
    /// A fraction from 0 to 1; linear, `80 %`.
    Share,
    /// Decode steps; linear from 0, `1K`.
    Steps,
    /// Bytes whose sums and parts are compared; linear from 0, `64 MiB`.
    Size,
    /// A difference of two shares, or what is added to a whole, of either sign; linear, `5 %`.
    Gap,
}

/// Points that belong together, ascending in x.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// Name in the legend and in the CSV.
    pub name: String,
    /// Colour, marker, dash.
    pub style: Style,
    /// Its points.
    pub points: Vec<Point>,
}

/// One point: one cell, or the median of the cells that differ only in their seed.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// Place on the horizontal axis.
    pub x: f64,
    /// Measured value; `None` for a point that ran out of memory.
    pub y: Option<f64>,
    /// Interval around `y`.
    pub interval: Option<Interval>,
    /// Value that a formula predicts here; the line runs through it instead of through `y`.
    pub model: Option<f64>,
    /// [`Status::Ok`] or [`Status::Oom`].
    pub status: Status,
    /// Ids of the cells behind the point.
    pub cell_ids: Vec<String>,
}

/// An interval and what it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// `ci95` for one cell's 95% interval, `range` for that of samples too few for one, `min_max` for the spread over seeds.
    pub kind: &'static str,
}

/// A horizontal line.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    /// Where it lies.
    pub y: f64,
    /// Words on the line.
    pub label: String,
}

impl Chart {
    /// Whether the eye can tell its series apart: there are few, or lines to follow. Many single points belong beside
    /// their names, as [`super::rows::Rows`].
    pub fn is_readable(&self) -> bool {
        self.series.len() <= MOST_CURVES || self.series.iter().any(|series| series.points.len() > 1)
    }

    /// The chart without series that have no mark: their names in the legend would be looked for in vain.
    pub fn shown(&self) -> Chart {
        let is_shown = |point: &Point| point.y.or(point.model).is_none_or(|y| self.y.shows(y));
        let shown = self.series.iter().filter(|series| series.points.iter().any(is_shown)).cloned().collect();
        Chart { series: shown, ..self.clone() }
    }

    /// Whether there are more curves than one plot can hold apart, so that each has a plot of its own.
    pub fn is_split(&self) -> bool {
        self.series.len() > MOST_CURVES && self.points().all(|point| point.y.is_some())
    }

    /// The series of a single point whose places are that of this one's or nearly so, itself among them, from left to right; nothing for
    /// a curve.
    pub fn beside(&self, index: usize) -> Vec<usize> {
        let place = |at: usize| match self.series[at].points[..] {
            [Point { x, y: Some(y), .. }] if self.y.shows(y) => Some(x),
            _ => None,
        };
        let mut places: Vec<(f64, usize)> = (0..self.series.len()).filter_map(|at| Some((place(at)?, at))).collect();
        places.sort_by(|a, b| a.0.total_cmp(&b.0));
        let groups = places.chunk_by(|(a, _), (b, _)| b - a <= ONE_PLACE * b);
        let own = groups.into_iter().find(|group| group.iter().any(|(_, at)| *at == index));
        own.unwrap_or_default().iter().map(|(_, at)| *at).collect()
    }

    /// Whether some points stand side by side in one plot.
    pub fn has_beside(&self) -> bool {
        !self.is_split() && (0..self.series.len()).any(|index| self.beside(index).len() > 1)
    }

    /// Every value that the horizontal axis must hold.
    pub fn x_values(&self) -> impl Iterator<Item = f64> {
        self.points().map(|point| point.x)
    }

    /// Every value that the vertical axis must hold.
    pub fn y_values(&self) -> impl Iterator<Item = f64> {
        let of_point = |point: &Point| {
            let ends = point.interval.map(|interval| [interval.low, interval.high]);
            point.y.into_iter().chain(point.model).chain(ends.into_iter().flatten()).collect::<Vec<_>>()
        };
        self.points().flat_map(of_point).chain(self.rules.iter().map(|rule| rule.y))
    }

    fn points(&self) -> impl Iterator<Item = &Point> {
        self.series.iter().flat_map(|series| &series.points)
    }
}

impl Point {
    /// Whether the point ran out of memory and nothing predicts where it would have been.
    pub fn has_no_height(&self) -> bool {
        self.y.is_none() && self.model.is_none()
    }
}
