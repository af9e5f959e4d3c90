//! [`Rows`] as SVG: names on the left, bars or dots on the right, the axis above and below.

use super::canvas::{self, Align, Canvas, Stroke, Words, text_width};
use super::{FAINT_INK, GRID, INK, MARGIN, SMALL, TOP, WHITE, WIDTH, fitted, fitting, subtitle, title};
use crate::report::ReportError;
use crate::report::chart::Rule;
use crate::report::palette::Marker;
use crate::report::rows::{Kind, Mark, Row, Rows};
use crate::report::ticks::{Span, Tick};

const MOST_NAME: f64 = 230.0;
const KEY_LINE: f64 = 18.0;
const SWATCH: f64 = 12.0;
const BAR: f64 = 12.0;
const NUMBER: f64 = 9.5;
const DOT_ROW: f64 = 19.0;
const BETWEEN: f64 = 12.0;

/// Where everything stands.
struct Frame {
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
    row: f64,
    span: Span,
}

impl Frame {
    fn across(&self, value: f64) -> f64 {
        self.left + self.span.place(value) * (self.right - self.left)
    }
}

/// Draws `rows` as an SVG document.
///
/// # Errors
/// [`ReportError::Empty`] when no value has a place on the axis, [`ReportError::Draw`] when the drawing library fails.
pub fn svg(rows: &Rows) -> Result<String, ReportError> {
    let span = rows.axis.span(rows.values()).ok_or_else(|| ReportError::Empty(rows.id.clone()))?;
    let names = rows.rows.iter().map(|row| text_width(&row.name, SMALL)).fold(40.0, f64::max).min(MOST_NAME);
    let row = match rows.mark {
        Mark::Bar => BAR * rows.kinds.len() as f64 + BETWEEN,
        Mark::Dot => DOT_ROW,
        Mark::Stack | Mark::Fall => BAR + BETWEEN,
    };
    // A name in the key without a mark would be looked for in vain.
    let is_shown = |value: &Option<(f64, _)>| value.as_ref().is_some_and(|(value, _)| rows.axis.shows(*value));
    let has_values = |place: usize| rows.rows.iter().any(|row| is_shown(&row.values[place]));
    let kinds: Vec<&Kind> =
        (0..).zip(&rows.kinds).filter(|(place, _)| has_values(*place)).map(|(_, kind)| kind).collect();
    let key = key_places(&kinds);
    let lines = key.iter().map(|(_, line)| line + 1).max().unwrap_or(1);
    let top = TOP - 14.0 + KEY_LINE * lines as f64 + 24.0;
    let (left, bottom) = (MARGIN + names + 10.0, top + row * rows.rows.len() as f64);
    // The last tick's label stands half outside the plot, a bar's number behind its end.
    let beyond = if rows.mark == Mark::Dot { 20.0 } else { 44.0 };
    let frame = Frame { left, right: WIDTH - MARGIN - beyond, top, bottom, row, span };
    let height = bottom + 52.0;
    let description = format!("{}: {} of each", rows.title, rows.axis.label);
    canvas::svg((WIDTH, height), &description, |canvas| {
        canvas.polygon(&[(0.0, 0.0), (WIDTH, 0.0), (WIDTH, height), (0.0, height)], WHITE, 1.0)?;
        let plain = Words { size: SMALL, colour: FAINT_INK, bold: false, align: Align::Start };
        title(canvas, &rows.title)?;
        subtitle(canvas, &rows.subtitle)?;
        for (kind, &(across, line)) in kinds.iter().zip(&key) {
            let middle = TOP - 14.0 + KEY_LINE * line as f64;
            let box_of = |half: f64| {
                let (left, right) = (across, across + SWATCH);
                [(left, middle - half), (right, middle - half), (right, middle + half), (left, middle + half)]
            };
            match rows.mark {
                Mark::Dot => canvas.marker((across + SWATCH / 2.0, middle), Marker::Circle, kind.colour)?,
                _ => canvas.polygon(&box_of(5.0), kind.colour, 1.0)?,
            }
            canvas.words((across + SWATCH + 6.0, middle), &kind.name, Words { colour: INK, ..plain })?;
        }
        axis(canvas, rows, &frame)?;
        rows.rows.iter().enumerate().try_for_each(|(index, row)| line(canvas, rows, &frame, index, row))?;
        rows.limit.iter().try_for_each(|limit| rule(canvas, &frame, limit))
    })
}

/// Where each kind's entry of the key begins, and on which line.
fn key_places(kinds: &[&Kind]) -> Vec<(f64, usize)> {
    let (mut across, mut line) = (MARGIN, 0);
    let place = |kind: &&Kind| {
        let width = SWATCH + 6.0 + text_width(&kind.name, SMALL) + 18.0;
        if across + width > WIDTH && across > MARGIN {
            (across, line) = (MARGIN, line + 1);
        }
        across += width;
        (across - width, line)
    };
    kinds.iter().map(place).collect()
}

fn axis(canvas: &Canvas, rows: &Rows, frame: &Frame) -> Result<(), ReportError> {
    let grid = Stroke { colour: GRID, width: 1.0, dashed: false };
    let words = Words { size: SMALL, colour: INK, bold: false, align: Align::Middle };
    let ticks = fitting(frame.right - frame.left, |most| rows.axis.ticks(&frame.span, most), |at| frame.across(at));
    for Tick { at, label } in &ticks {
        let across = frame.across(*at);
        canvas.line(&[(across, frame.top), (across, frame.bottom)], grid)?;
        canvas.words((across, frame.top - 11.0), label, words)?;
        canvas.words((across, frame.bottom + 14.0), label, words)?;
    }
    canvas.words(((frame.left + frame.right) / 2.0, frame.bottom + 36.0), &rows.axis.words(), words)?;
    let edge = Stroke { colour: FAINT_INK, width: 1.0, dashed: false };
    canvas.line(&[(frame.left, frame.top), (frame.left, frame.bottom)], edge)
}

fn line(canvas: &Canvas, rows: &Rows, frame: &Frame, index: usize, row: &Row) -> Result<(), ReportError> {
    let middle = frame.top + frame.row * (index as f64 + 0.5);
    let (name, size) = fitted(&row.name, MOST_NAME);
    canvas.words((frame.left - 8.0, middle), &name, Words { size, colour: INK, bold: false, align: Align::End })?;
    let values = rows.kinds.iter().zip(&row.values).enumerate();
    let shown = values.filter_map(|(place, (kind, value))| Some((place, kind, value.as_ref()?.0)));
    let shown = shown.filter(|(_, _, value)| rows.axis.shows(*value)).collect::<Vec<_>>();
    if rows.mark == Mark::Dot {
        let ends = shown.iter().map(|(.., value)| frame.across(*value));
        let (low, high) = (ends.clone().fold(f64::INFINITY, f64::min), ends.fold(f64::NEG_INFINITY, f64::max));
        if low < high {
            canvas.line(&[(low, middle), (high, middle)], Stroke { colour: GRID, width: 3.0, dashed: false })?;
        }
    }
    let bar = |place: usize, from: f64, to: f64, colour| {
        let top = middle - frame.row / 2.0 + BETWEEN / 2.0 + BAR * place as f64;
        let bottom = top + BAR - 1.0;
        canvas.polygon(&[(from, top), (to, top), (to, bottom), (from, bottom)], colour, 1.0)
    };
    let number = |across: f64, middle: f64, value: f64| {
        let words = Words { size: NUMBER, colour: INK, bold: false, align: Align::Start };
        canvas.words((across + 5.0, middle), &rows.axis.value_label(value), words)
    };
    // Where a stack or a fall has come to.
    let above = rows.rows[..index].iter().rev().find_map(|row| row.values.iter().flatten().next());
    let mut sum = 0.0;
    let mut from = above.filter(|_| rows.mark == Mark::Fall).map_or(frame.left, |(value, _)| frame.across(*value));
    for (place, kind, value) in shown {
        match rows.mark {
            Mark::Dot => canvas.marker((frame.across(value), middle), Marker::Circle, kind.colour)?,
            Mark::Bar => {
                let across = frame.across(value);
                bar(place, frame.left, across, kind.colour)?;
                number(
                    across,
                    middle - frame.row / 2.0 + BETWEEN / 2.0 + BAR * place as f64 + (BAR - 1.0) / 2.0,
                    value,
                )?;
            }
            Mark::Stack | Mark::Fall => {
                sum += value;
                bar(0, from, frame.across(sum), kind.colour)?;
                from = frame.across(sum);
            }
        }
    }
    if sum > 0.0 { number(from, middle, sum) } else { Ok(()) }
}

/// The line to compare with, named above the rows.
fn rule(canvas: &Canvas, frame: &Frame, limit: &Rule) -> Result<(), ReportError> {
    let across = frame.across(limit.y);
    canvas.line(&[(across, frame.top), (across, frame.bottom)], Stroke { colour: INK, width: 1.5, dashed: true })?;
    let words = Words { size: SMALL, colour: INK, bold: true, align: Align::Middle };
    canvas.words((across, frame.top - 27.0), &limit.label, words)
}
