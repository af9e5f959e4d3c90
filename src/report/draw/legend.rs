//! The legend: one line for each series, on the right, in the order in which the curves end.

use super::canvas::{Align, Canvas, Stroke, Words, text_width};
use super::{FAINT_INK, Frame, INK, SMALL, fitted};
use crate::report::ReportError;
use crate::report::chart::{Chart, Point, Series};

const LINE: f64 = 18.0;
const SWATCH: f64 = 26.0;
const GAP: f64 = 14.0;
/// Longer names are set smaller and then shortened; the CSV and the tables have them in full.
const MOST_WIDTH: f64 = 270.0;

/// The legend of a chart: series, their names and the size of their type.
pub struct Legend<'a> {
    series: Vec<(&'a Series, String, f64)>,
    /// What the lines are where they are not through the points.
    lines: Option<&'static str>,
}

impl<'a> Legend<'a> {
    /// Names and order of the series.
    pub fn of(chart: &'a Chart) -> Self {
        let mut series: Vec<&Series> = chart.series.iter().collect();
        // What ran out of memory would have ended on top.
        let end = |series: &Series| {
            let last = series.points.last();
            last.map_or(f64::NEG_INFINITY, |point| point.y.or(point.model).unwrap_or(f64::INFINITY))
        };
        series.sort_by(|a, b| end(b).total_cmp(&end(a)));
        let has_both = |point: &Point| point.y.is_some() && point.model.is_some();
        let is_apart = chart.series.iter().flat_map(|series| &series.points).any(has_both);
        Legend {
            lines: is_apart.then_some("line: predicted"),
            series: series
                .into_iter()
                .map(|series| {
                    let (name, size) = fitted(&series.name, MOST_WIDTH);
                    (series, name, size)
                })
                .collect(),
        }
    }

    /// Height in pixels.
    pub fn height(&self) -> f64 {
        LINE * (self.series.len() + usize::from(self.lines.is_some())) as f64
    }

    /// Width in pixels, with the gap to the plot.
    pub fn width(&self) -> f64 {
        let widest = self.series.iter().map(|(_, name, size)| text_width(name, *size));
        let lines = self.lines.map(|words| text_width(words, SMALL));
        let widest = widest.chain(lines).fold(0.0, f64::max);
        GAP + SWATCH + 8.0 + widest
    }

    /// Draws it to the right of the plot.
    pub fn draw(&self, canvas: &Canvas, frame: &Frame) -> Result<(), ReportError> {
        let left = frame.right + GAP;
        let plain = Words { size: SMALL, colour: INK, bold: false, align: Align::Start };
        let line = |middle: f64, stroke| canvas.line(&[(left, middle), (left + SWATCH, middle)], stroke);
        for (row, (series, name, size)) in self.series.iter().enumerate() {
            let middle = frame.top + LINE * (row as f64 + 0.5);
            let style = series.style;
            line(middle, Stroke { colour: style.colour, width: 2.0, dashed: style.dashed })?;
            canvas.marker((left + SWATCH / 2.0, middle), style.marker, style.colour)?;
            canvas.words((left + SWATCH + 8.0, middle), name, Words { size: *size, ..plain })?;
        }
        if let Some(words) = self.lines {
            let middle = frame.top + LINE * (self.series.len() as f64 + 0.5);
            line(
                middle,
                Stroke {
                    colour: FAINT_INK,
                    width: 2.0,
                    dashed: self.series.iter().all(|(series, ..)| series.style.dashed),
                },
            )?;
            canvas.words((left + SWATCH + 8.0, middle), words, plain)?;
        }
        Ok(())
    }
}
