//! A chart of more curves than one plot can hold apart: a small plot for each, with all the others in pale grey behind.
//!
//! All plots share their axes, so that places can be compared. Where there are a few of each policy, as of two protocols, they
//! are in one plot. Baselines and oracles are what others are seen against: they are drawn in every plot and have none of
//! their own.

use super::canvas::{self, Align, Canvas, Stroke, Words, text_width};
use super::{BOTTOM, FAINT_INK, Frame, GRID, INK, MARGIN, SMALL, TOP, WHITE, WIDTH, heading, headings, marks};
use crate::report::ReportError;
use crate::report::chart::{Chart, Point, Series};
use crate::report::palette::{self, Colour, Style};

const ACROSS: usize = 4;
const HIGH: f64 = 112.0;
const NAME: f64 = 24.0;
const GAP: f64 = 14.0;
const MOST_TICKS: usize = 6;
/// Most curves of one name in a plot.
const MOST_VARIANTS: usize = 3;
const SWATCH: f64 = 20.0;
const OTHERS: Colour = Colour(0xD2, 0xD2, 0xD2);

/// Draws `chart` as small multiples, in the order of its series, which is the same in all figures of a run.
///
/// # Errors
/// As [`super::svg`].
pub fn svg(chart: &Chart) -> Result<String, ReportError> {
    let empty = || ReportError::Empty(chart.id.clone());
    let x = chart.x.span(chart.x_values()).ok_or_else(empty)?;
    let y = chart.y.span(chart.y_values()).ok_or_else(empty)?;
    let y_ticks = chart.y.ticks(&y, MOST_TICKS);
    let tick_width = y_ticks.iter().map(|tick| text_width(&tick.label, SMALL)).fold(24.0, f64::max);
    let is_reference = |series: &&Series| palette::is_baseline(&series.name) || palette::is_oracle(&series.name);
    let (bounds, own): (Vec<&Series>, Vec<&Series>) = chart.series.iter().partition(is_reference);
    let left = MARGIN + tick_width + 8.0;
    let wide = (WIDTH - MARGIN - left - GAP * (ACROSS - 1) as f64) / ACROSS as f64;
    let variants = variants(&own);
    let plots: Vec<&[&Series]> = match variants[..] {
        [] => own.chunks(1).collect(),
        _ => own.chunk_by(|a, b| apart(a).0 == apart(b).0).collect(),
    };
    let frame = |index: usize| {
        let (column, row) = ((index % ACROSS) as f64, (index / ACROSS) as f64);
        let (left, top) = (left + column * (wide + GAP), TOP + 8.0 + NAME + row * (HIGH + NAME + GAP));
        Frame { left, right: left + wide, top, bottom: top + HIGH, x, y, strip: 0.0 }
    };
    let bottom = frame(plots.len().max(1) - 1).bottom;
    let height = bottom + BOTTOM;
    let whole = Frame { left, right: WIDTH - MARGIN, top: TOP, bottom, x, y, strip: 0.0 };
    let description = format!("{}: {} against {}, a plot for each", chart.title, chart.y.label, chart.x.label);
    canvas::svg((WIDTH, height), &description, |canvas| {
        canvas.polygon(&[(0.0, 0.0), (WIDTH, 0.0), (WIDTH, height), (0.0, height)], WHITE, 1.0)?;
        headings(canvas, chart, &whole)?;
        key(canvas, &variants, &bounds)?;
        for (index, &plot) in plots.iter().enumerate() {
            let frame = frame(index);
            axes(canvas, chart, &frame, (index % ACROSS == 0).then_some(&y_ticks[..]), index + ACROSS >= plots.len())?;
            for other in own.iter().filter(|other| plot.iter().all(|series| series.name != other.name)) {
                marks::curve(canvas, &chart.y, &frame, &dressed(other, OTHERS, false), 1.0)?;
            }
            for rule in chart.rules.iter().filter(|rule| frame.y.holds(rule.y)) {
                let (_, height) = frame.place(1.0, rule.y);
                let stroke = Stroke { colour: FAINT_INK, width: 1.0, dashed: true };
                canvas.line(&[(frame.left, height), (frame.right, height)], stroke)?;
            }
            for bound in &bounds {
                marks::curve(canvas, &chart.y, &frame, bound, 1.4)?;
                alone(canvas, &frame, bound)?;
            }
            for series in plot {
                let variant = variants.iter().position(|variant| apart(series).1 == *variant);
                let own = dressed(series, series.style.colour, variant.is_some_and(|variant| variant % 2 == 1));
                marks::band(canvas, &chart.y, &frame, &own)?;
                marks::curve(canvas, &chart.y, &frame, &own, 2.0)?;
                let is_shown = |point: &&Point| point.y.is_some_and(|y| chart.y.shows(y));
                for point in own.points.iter().filter(is_shown).filter(|_| variant.is_some_and(is_marked)) {
                    canvas.marker(
                        frame.place(point.x, point.y.unwrap_or_default()),
                        own.style.marker,
                        own.style.colour,
                    )?;
                }
                alone(canvas, &frame, &own)?;
            }
            let name = if variants.is_empty() { &plot[0].name } else { apart(plot[0]).0 };
            heading(canvas, (frame.left, frame.top - NAME / 2.0), frame.right - frame.left + GAP / 2.0, name)?;
        }
        Ok(())
    })
}

/// The name of what is compared, and what sets this series of it apart.
fn apart(series: &Series) -> (&str, &str) {
    series.name.split_once(' ').unwrap_or((&series.name, ""))
}

/// Whether a variant has markers: solid and dashed are those before it.
fn is_marked(variant: usize) -> bool {
    variant >= 2
}

/// What sets series of a name apart, if it is the same few everywhere; the palette makes every other one dashed, and those
/// behind the first two darker.
fn variants<'c>(all: &[&'c Series]) -> Vec<&'c str> {
    let mut found: Vec<&str> = all.iter().map(|series| apart(series).1).collect();
    found.sort_unstable();
    found.dedup();
    let are_few = (2..=MOST_VARIANTS).contains(&found.len()) && !found[0].is_empty();
    if are_few { found } else { Vec::new() }
}

/// The marker of a series of one point, which has no line.
fn alone(canvas: &Canvas, frame: &Frame, series: &Series) -> Result<(), ReportError> {
    match series.points[..] {
        [Point { x, y: Some(y), .. }] => canvas.marker(frame.place(x, y), series.style.marker, series.style.colour),
        _ => Ok(()),
    }
}

/// What the lines are, at the top on the right.
fn key<'k>(canvas: &Canvas, variants: &[&'k str], bounds: &[&'k Series]) -> Result<(), ReportError> {
    let line = |colour, dashed| Style { colour, marker: palette::Marker::Circle, dashed };
    // Names, with whether there is a line and whether there is a marker.
    let mut entries = vec![("in pale grey: the others", line(OTHERS, false), (true, false))];
    let colour = |index| if index < 2 { FAINT_INK } else { INK };
    let of =
        |(index, variant): (usize, &&'k str)| (*variant, line(colour(index), index % 2 == 1), (true, is_marked(index)));
    entries.extend(variants.iter().enumerate().map(of));
    for series in bounds {
        // One entry is enough for what is the same in all plots.
        let name = if variants.is_empty() { series.name.as_str() } else { apart(series).0 };
        if entries.iter().all(|entry| entry.0 != name) {
            let is_point = series.points.len() == 1;
            entries.push((name, series.style, (!is_point, is_point)));
        }
    }
    let mut right = WIDTH - MARGIN;
    for (name, style, (has_line, has_marker)) in entries.into_iter().rev() {
        let words = Words { size: SMALL, colour: INK, bold: false, align: Align::End };
        canvas.words((right, TOP - 14.0), name, words)?;
        let end = right - text_width(name, SMALL) - 4.0;
        let stroke = Stroke { colour: style.colour, width: 2.0, dashed: style.dashed };
        if has_line {
            canvas.line(&[(end - SWATCH, TOP - 14.0), (end, TOP - 14.0)], stroke)?;
        }
        if has_marker {
            canvas.marker((end - SWATCH / 2.0, TOP - 14.0), style.marker, style.colour)?;
        }
        right = end - SWATCH - 14.0;
    }
    Ok(())
}

fn axes(
    canvas: &Canvas,
    chart: &Chart,
    frame: &Frame,
    y_labels: Option<&[super::Tick]>,
    is_lowest: bool,
) -> Result<(), ReportError> {
    let grid = Stroke { colour: GRID, width: 1.0, dashed: false };
    let label = Words { size: SMALL, colour: INK, bold: false, align: Align::End };
    for tick in chart.y.ticks(&frame.y, MOST_TICKS) {
        let (_, height) = frame.place(1.0, tick.at);
        canvas.line(&[(frame.left, height), (frame.right, height)], grid)?;
    }
    for tick in y_labels.unwrap_or_default() {
        let (_, height) = frame.place(1.0, tick.at);
        canvas.words((frame.left - 7.0, height), &tick.label, label)?;
    }
    for tick in super::x_ticks(&chart.x, frame) {
        let across = frame.across(tick.at);
        canvas.line(&[(across, frame.top), (across, frame.bottom)], grid)?;
        // A label at the end of an axis would run into that of the next plot.
        let half = text_width(&tick.label, SMALL) / 2.0;
        if is_lowest && across + half < frame.right + GAP / 2.0 - 2.0 {
            canvas.words((across, frame.bottom + 15.0), &tick.label, Words { align: Align::Middle, ..label })?;
        }
    }
    let edge = Stroke { colour: FAINT_INK, width: 1.0, dashed: false };
    canvas.line(&[(frame.left, frame.top), (frame.left, frame.bottom), (frame.right, frame.bottom)], edge)
}

fn dressed(series: &Series, colour: Colour, dashed: bool) -> Series {
    Series { style: Style { colour, dashed, ..series.style }, ..series.clone() }
}
