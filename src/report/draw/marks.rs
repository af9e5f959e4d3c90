//! What stands inside the plot: rules, bands, curves, points and crosses.

use super::canvas::{Align, Canvas, Pixel, Stroke, Words, text_width};
use super::{FAINT_INK, Frame, INK};
use crate::report::ReportError;
use crate::report::chart::{Axis, Chart, Interval, Point, Rule, Series};
use crate::report::palette::Colour;

const STRIP: Colour = Colour(0xF4, 0xF4, 0xF4);
const BAND_OPACITY: f64 = 0.16;
const NOTE: f64 = 11.0;
/// Pixels between points that stand side by side.
const ASIDE: f64 = 7.0;

/// A curve of more points than this is dense enough not to need a marker at each.
const MOST_MARKERS: usize = 24;
/// Markers of such a curve.
const FEW_MARKERS: usize = 8;

/// Rows of the strip above the plot: one for each series with cells that have no height.
pub fn strip_rows(chart: &Chart) -> usize {
    chart.series.iter().filter(|series| series.points.iter().any(Point::has_no_height)).count()
}

/// Whether a series has so many points that only a few are marked.
fn is_dense(series: &Series) -> bool {
    series.points.len() > MOST_MARKERS
}

/// Draws everything inside the plot, what matters most last.
pub fn draw(canvas: &Canvas, chart: &Chart, frame: &Frame) -> Result<(), ReportError> {
    let strip = strip(canvas, chart, frame)?;
    let heights: Vec<(&Rule, f64)> = chart
        .rules
        .iter()
        .filter(|rule| frame.y.holds(rule.y))
        .map(|rule| (rule, frame.place(1.0, rule.y).1))
        .collect();
    for &(rule, height) in &heights {
        let stroke = Stroke { colour: FAINT_INK, width: 1.0, dashed: true };
        canvas.line(&[(frame.left, height), (frame.right, height)], stroke)?;
        // Words of rules that lie close to each other could not be read; the legend has them.
        let is_alone = heights.iter().filter(|(_, other)| (other - height).abs() < NOTE + 4.0).count() == 1;
        if is_alone {
            let words = Words { size: NOTE, colour: FAINT_INK, bold: false, align: Align::Start };
            canvas.words((frame.left + 6.0, height - 8.0), &rule.label, words)?;
        }
    }
    let frames: Vec<Frame> = (0..chart.series.len()).map(|index| frame.aside(aside(chart, frame, index))).collect();
    for (series, frame) in chart.series.iter().zip(&frames) {
        band(canvas, &chart.y, frame, series)?;
    }
    // What lies below a dashed line with few markers shows through it; the other way round nothing would.
    let is_thin = |series: &&Series| series.style.dashed && is_dense(series);
    let (above, below): (Vec<&Series>, Vec<&Series>) = chart.series.iter().partition(is_thin);
    for series in below.into_iter().chain(above) {
        curve(canvas, &chart.y, frame, series, 1.8)?;
    }
    for (index, (series, frame)) in chart.series.iter().zip(&frames).enumerate() {
        // Those of several dense curves stand at different places, so that curves on one another are seen to be several.
        let every = if is_dense(series) { series.points.len().div_ceil(FEW_MARKERS) } else { 1 };
        let marked = series.points.iter().skip(index * every / chart.series.len()).step_by(every);
        for point in marked.filter(|point| point.y.is_some_and(|y| chart.y.shows(y))) {
            let place = frame.place(point.x, point.y.expect("just looked"));
            canvas.marker(place, series.style.marker, series.style.colour)?;
        }
    }
    crosses(canvas, chart, frame, &strip)
}

/// How far to the side a series is drawn: single points of one place stand side by side, or their intervals could not be read. None
/// of them comes to stand behind a point that is farther to that side.
fn aside(chart: &Chart, frame: &Frame, index: usize) -> f64 {
    let beside = chart.beside(index);
    let Some(rank) = beside.iter().position(|at| *at == index).filter(|_| beside.len() > 1) else { return 0.0 };
    let across = |at: usize| frame.across(chart.series[at].points[0].x);
    let (first, last) = (across(beside[0]), across(beside[beside.len() - 1]));
    let others = (0..chart.series.len()).filter(|at| !beside.contains(at)).flat_map(|at| &chart.series[at].points);
    let (mut left, mut right) = (frame.left - first, frame.right - last);
    for x in others.map(|point| frame.across(point.x)) {
        if x < first {
            left = left.max((x - first) / 2.0);
        } else if x > last {
            right = right.min((x - last) / 2.0);
        }
    }
    let room = ((-left).min(right) - 5.0).max(0.0);
    let middle = (beside.len() - 1) as f64 / 2.0;
    ASIDE.min(room / middle) * (rank as f64 - middle)
}

/// The strip and the height of each series' row in it.
fn strip(canvas: &Canvas, chart: &Chart, frame: &Frame) -> Result<Vec<Option<f64>>, ReportError> {
    if frame.strip > 0.0 {
        let bottom = frame.top + frame.strip - 3.0;
        let corners = [(frame.left, frame.top), (frame.right, frame.top), (frame.right, bottom), (frame.left, bottom)];
        canvas.polygon(&corners, STRIP, 1.0)?;
        let words = Words { size: NOTE, colour: INK, bold: false, align: Align::End };
        canvas.words((frame.left - 7.0, (frame.top + bottom) / 2.0), "oom", words)?;
    }
    let mut next = frame.top + 8.0;
    let row = |series: &Series| {
        series.points.iter().any(Point::has_no_height).then(|| {
            next += 11.0;
            next - 11.0
        })
    };
    Ok(chart.series.iter().map(row).collect())
}

/// The interval: a band along a curve, a bar at a point that stands alone.
pub fn band(canvas: &Canvas, axis: &Axis, frame: &Frame, series: &Series) -> Result<(), ReportError> {
    let ends = |point: &Point| -> Option<(f64, Interval)> {
        let interval = point.interval?;
        (axis.shows(interval.high) && point.y.is_some_and(|y| axis.shows(y))).then_some(())?;
        // An interval that starts at 0 reaches below every logarithmic axis.
        let low = if axis.shows(interval.low) { interval.low } else { frame.y.lowest() };
        Some((point.x, Interval { low, ..interval }))
    };
    let ends: Vec<(f64, Interval)> = series.points.iter().filter_map(ends).collect();
    let low = |(x, interval): &(f64, Interval)| frame.place(*x, interval.low.max(frame.y.lowest()));
    let high = |(x, interval): &(f64, Interval)| frame.place(*x, interval.high);
    if let [alone] = &ends[..] {
        let stroke = Stroke { colour: series.style.colour, width: 1.5, dashed: false };
        return canvas.line(&[low(alone), high(alone)], stroke);
    }
    let outline: Vec<Pixel> = ends.iter().map(high).chain(ends.iter().rev().map(low)).collect();
    if outline.is_empty() { Ok(()) } else { canvas.polygon(&outline, series.style.colour, BAND_OPACITY) }
}

/// The line through a series, `width` pixels wide.
pub fn curve(canvas: &Canvas, axis: &Axis, frame: &Frame, series: &Series, width: f64) -> Result<(), ReportError> {
    let places: Vec<Pixel> = series
        .points
        .iter()
        .filter(|point| point.y.is_some())
        .filter_map(|point| point.model.or(point.y).filter(|y| axis.shows(*y)).map(|y| frame.place(point.x, y)))
        .collect();
    let stroke = Stroke { colour: series.style.colour, width, dashed: series.style.dashed };
    if places.len() < 2 { Ok(()) } else { canvas.line(&places, stroke) }
}

/// Cells that ran out of memory, each joined to the curve's last measured point by a thin dashed line.
fn crosses(canvas: &Canvas, chart: &Chart, frame: &Frame, strip: &[Option<f64>]) -> Result<(), ReportError> {
    let mut notes = Notes { taken: Vec::new() };
    for rule in &chart.rules {
        let (_, height) = frame.place(1.0, rule.y);
        notes.taken.push((((frame.left + frame.right) / 2.0, height), ((frame.right - frame.left) / 2.0, 1.0)));
    }
    let mut at_height = Vec::new();
    for (series, row) in chart.series.iter().zip(strip) {
        let mut last = series
            .points
            .iter()
            .rfind(|point| point.y.is_some_and(|y| chart.y.shows(y)))
            .map(|point| (point.x, frame.place(point.x, point.model.or(point.y).expect("has a height"))));
        for point in series.points.iter().filter(|point| point.y.is_none()) {
            let predicted = point.model.filter(|y| chart.y.shows(*y)).map(|y| frame.place(point.x, y));
            let Some(place) = predicted.or(row.map(|row| (frame.across(point.x), row))) else { continue };
            if let Some((x, from)) = last.filter(|(x, _)| *x < point.x) {
                let stroke = Stroke { colour: series.style.colour, width: 1.0, dashed: true };
                canvas.line(&[from, place], stroke)?;
                // In the strip, crosses stand in a row that needs no line between them.
                last = predicted.map(|place| (point.x.max(x), place));
            }
            canvas.cross(place, series.style.colour)?;
            notes.block(place);
            at_height.extend(predicted.map(|place| (place, series.style.colour)));
        }
    }
    for (index, &(place, colour)) in at_height.iter().enumerate() {
        // Crosses of several series on one spot need the word once.
        let near = |&((x, y), _): &(Pixel, Colour)| (x - place.0).abs() < 8.0 && (y - place.1).abs() < 14.0;
        if at_height[..index].iter().any(near) {
            continue;
        }
        if let Some(free) = notes.free_place(place, "oom", frame) {
            canvas.words(free, "oom", Words { size: NOTE, colour, bold: false, align: Align::Middle })?;
        }
    }
    Ok(())
}

/// Boxes that a further note must not cover: centre and half extents.
struct Notes {
    taken: Vec<(Pixel, Pixel)>,
}

impl Notes {
    fn block(&mut self, place: Pixel) {
        self.taken.push((place, (5.0, 5.0)));
    }

    /// The centre of the first free place around `anchor` for `text`, which is taken from then on.
    fn free_place(&mut self, (x, y): Pixel, text: &str, frame: &Frame) -> Option<Pixel> {
        let half = (text_width(text, NOTE) / 2.0, NOTE / 2.0);
        let beside = half.0 + 7.0;
        let around = [(x - beside, y - 3.0), (x, y - 13.0), (x, y + 13.0), (x + beside, y)];
        let inside = |&(x, y): &Pixel| {
            x - half.0 > frame.left && x + half.0 < frame.right && y - half.1 > frame.top && y + half.1 < frame.bottom
        };
        let clear = |&(x, y): &Pixel| {
            let apart = |((other_x, other_y), (wide, high)): &(Pixel, Pixel)| {
                (x - other_x).abs() >= half.0 + wide || (y - other_y).abs() >= half.1 + high
            };
            self.taken.iter().all(apart)
        };
        let free = around.into_iter().find(|place| inside(place) && clear(place))?;
        self.taken.push((free, half));
        Some(free)
    }
}
