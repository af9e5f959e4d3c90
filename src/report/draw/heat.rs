//! [`Heat`] as SVG: panels side by side, the same colours in all of them, and the scale of colours at the top.

use super::canvas::{self, Align, Canvas, Stroke, Words, text_width};
use super::{FAINT_INK, INK, MARGIN, SMALL, TOP, WHITE, WIDTH, heading, subtitle, title};
use crate::report::ReportError;
use crate::report::heat::{Across, Heat, Panel};
use crate::report::palette::Colour;
use crate::units;

const NAME: f64 = 24.0;
const GAP: f64 = 22.0;
const NOTE: f64 = 11.0;
/// Shades that are told apart: neighbours of one shade are drawn as one piece.
const SHADES: f64 = 32.0;
const KEY: f64 = 120.0;
/// Of a field that nothing is known of: no shade of the scale.
const UNKNOWN: Colour = Colour(0xC8, 0xC8, 0xC8);
/// Width of a field that says its value.
const FIELD: f64 = 38.0;
/// Width of the figure without its margins.
const ROOM: f64 = WIDTH - 2.0 * MARGIN;

/// Draws `heat` as an SVG document.
///
/// # Errors
/// [`ReportError::Empty`] when there is no panel, [`ReportError::Draw`] when the drawing library fails.
pub fn svg(heat: &Heat) -> Result<String, ReportError> {
    if heat.panels.iter().all(|panel| panel.rows.is_empty()) {
        return Err(ReportError::Empty(heat.id.clone()));
    }
    let rows = heat.panels.iter().map(|panel| panel.rows.len()).max().unwrap_or(1);
    let names = heat.panels.iter().flat_map(|panel| &panel.rows).map(|(name, _)| text_width(name, NOTE));
    let row_name = names.fold(0.0, f64::max) + 6.0;
    let (high, least_wide) = match says_values(heat) {
        true => (18.0, FIELD * widest(heat) as f64),
        false => (if rows > 8 { 7.0 } else { 12.0 }, 150.0),
    };
    let room = ROOM;
    let across = (((room + GAP) / (least_wide + row_name + GAP)) as usize).clamp(1, 4);
    let wide = (room + GAP) / across as f64 - GAP - row_name;
    let panel_high = NAME + high * rows as f64 + 20.0;
    let lines = heat.panels.len().div_ceil(across);
    let height = TOP + panel_high * lines as f64 + 8.0;
    canvas::svg((WIDTH, height), &format!("{}: maps side by side", heat.title), |canvas| {
        canvas.polygon(&[(0.0, 0.0), (WIDTH, 0.0), (WIDTH, height), (0.0, height)], WHITE, 1.0)?;
        let plain = Words { size: SMALL, colour: FAINT_INK, bold: false, align: Align::Start };
        title(canvas, &heat.title)?;
        subtitle(canvas, &heat.subtitle)?;
        key(canvas, heat.ends)?;
        let axes = format!("across: {} · down: {}", heat.across.words(), heat.down);
        canvas.words(
            (WIDTH - MARGIN, TOP - 14.0),
            &axes,
            Words { size: NOTE, colour: INK, align: Align::End, ..plain },
        )?;
        for (index, panel) in heat.panels.iter().enumerate() {
            let left = MARGIN + row_name + (index % across) as f64 * (wide + row_name + GAP);
            let top = TOP + NAME + (index / across) as f64 * panel_high;
            heading(canvas, (left, top - NAME / 2.0), wide + GAP / 2.0, &panel.name)?;
            map(canvas, heat, panel, (left, top), (wide, high))?;
        }
        Ok(())
    })
}

/// Whether fields say their values in words: where there are few.
fn says_values(heat: &Heat) -> bool {
    !matches!(heat.across, Across::Positions(_)) && FIELD * widest(heat) as f64 <= ROOM - 30.0
}

fn widest(heat: &Heat) -> usize {
    heat.panels.iter().flat_map(|panel| &panel.rows).map(|(_, values)| values.len()).max().unwrap_or(1)
}

/// The scale of colours.
fn key(canvas: &Canvas, (none, all): (&str, &str)) -> Result<(), ReportError> {
    let words = Words { size: NOTE, colour: INK, bold: false, align: Align::End };
    let (left, middle) = (MARGIN + 96.0, TOP - 14.0);
    canvas.words((left - 6.0, middle), &format!("{none}  0 %"), words)?;
    let wide = KEY / SHADES;
    for shade in 0..SHADES as usize {
        let left = left + wide * shade as f64;
        field(canvas, (left, middle - 5.0), (wide, 10.0), shade as f64 / (SHADES - 1.0))?;
    }
    outline(canvas, (left, middle - 5.0), (KEY, 10.0))?;
    canvas.words((left + KEY + 6.0, middle), &format!("100 %  {all}"), Words { align: Align::Start, ..words })
}

fn map(
    canvas: &Canvas,
    heat: &Heat,
    panel: &Panel,
    (left, top): (f64, f64),
    (wide, high): (f64, f64),
) -> Result<(), ReportError> {
    for (index, (name, values)) in panel.rows.iter().enumerate() {
        let top = top + high * index as f64;
        let width = wide / values.len() as f64;
        let plain = Words { size: NOTE, colour: FAINT_INK, bold: false, align: Align::End };
        // Rows that are lower than letters have room for a name on every second one.
        if high >= NOTE || index.is_multiple_of(2) {
            canvas.words((left - 4.0, top + high / 2.0), name, Words { size: NOTE.min(high + 3.0), ..plain })?;
        }
        let shade = |value: &f64| (value * SHADES).round() / SHADES;
        let mut start = 0;
        for same in values.chunk_by(|a, b| shade(a) == shade(b)) {
            let place = (left + width * start as f64, top);
            start += same.len();
            let value = shade(&same[0]);
            let size = (width * same.len() as f64, high);
            // What nothing is known of must not look like what is always wrong.
            if value.is_nan() {
                filled(canvas, place, size, UNKNOWN)?;
            } else if value > 0.0 {
                field(canvas, place, size, value)?;
            }
        }
        if says_values(heat) {
            for (head, value) in values.iter().enumerate() {
                let colour = if *value > 0.5 { WHITE } else { INK };
                let words = Words { colour, align: Align::Middle, ..plain };
                let share = 100.0 * value;
                let text = match share {
                    _ if share.is_nan() => "–".into(),
                    _ if share < 9.95 => format!("{share:.1} %"),
                    _ => format!("{share:.0} %"),
                };
                canvas.words((left + width * (head as f64 + 0.5), top + high / 2.0), &text, words)?;
            }
        }
    }
    let bottom = top + high * panel.rows.len() as f64;
    outline(canvas, (left, top), (wide, bottom - top))?;
    let note = |place: f64, text: &str, align| {
        let words = Words { size: NOTE, colour: FAINT_INK, bold: false, align };
        canvas.words((place, bottom + 9.0), text, words)
    };
    match &heat.across {
        Across::Positions(context) => {
            note(left, "0", Align::Start)?;
            note(left + wide, &units::tokens(*context), Align::End)
        }
        Across::Heads => {
            let heads = panel.rows.first().map_or(0, |(_, values)| values.len());
            let width = wide / heads.max(1) as f64;
            let every = (FIELD / width).ceil() as usize;
            (0..heads)
                .step_by(every)
                .try_for_each(|head| note(left + width * (head as f64 + 0.5), &format!("head {head}"), Align::Middle))
        }
        Across::Contexts(contexts) => {
            let width = wide / contexts.len().max(1) as f64;
            (0..).zip(contexts).try_for_each(|(place, &context)| {
                note(left + width * (f64::from(place) + 0.5), &units::tokens(context), Align::Middle)
            })
        }
    }
}

fn field(canvas: &Canvas, place: (f64, f64), size: (f64, f64), value: f64) -> Result<(), ReportError> {
    filled(canvas, place, size, Colour::sequential(value))
}

fn filled(
    canvas: &Canvas,
    (left, top): (f64, f64),
    (wide, high): (f64, f64),
    colour: Colour,
) -> Result<(), ReportError> {
    // A little over the edge, so that no seam of the ground shows between neighbours.
    let (right, bottom) = (left + wide + 0.25, top + high + 0.25);
    let corners = [(left, top), (right, top), (right, bottom), (left, bottom)];
    canvas.polygon(&corners, colour, 1.0)
}

fn outline(canvas: &Canvas, (left, top): (f64, f64), (wide, high): (f64, f64)) -> Result<(), ReportError> {
    let stroke = Stroke { colour: FAINT_INK, width: 0.75, dashed: false };
    let (right, bottom) = (left + wide, top + high);
    canvas.line(&[(left, top), (right, top), (right, bottom), (left, bottom), (left, top)], stroke)
}
