//! [`Bars`] as SVG: stacked bars, the measured one in full colour and what it is compared with paler beside it.

use super::canvas::{self, Align, Canvas, Stroke, Words, text_width};
use super::{FAINT_INK, GRID, INK, LEAST_TYPE, MARGIN, SMALL, TOP, WHITE, WIDTH, subtitle, title};
use crate::report::ReportError;
use crate::report::bars::{Bar, Bars};
use crate::report::chart::Quantity;
use crate::report::palette::Colour;

const PLOT: f64 = 300.0;
const LINE: f64 = 15.0;
const NOTE: f64 = 11.0;
const VALUE: f64 = 10.0;
/// Between two groups, in widths of a bar with its neighbour.
const GROUP_GAP: f64 = 0.35;
const PALE: f64 = 0.4;

/// Where the bars stand.
struct Layout {
    left: f64,
    bottom: f64,
    /// Width that belongs to a bar and its paler neighbour.
    slot: f64,
    /// Value at the upper end of the axis, and ticks from 0 on with their words.
    top: f64,
    ticks: Vec<(f64, String)>,
    /// Centre of each bar's slot.
    centres: Vec<f64>,
}

/// Draws `bars` as an SVG document.
///
/// # Errors
/// [`ReportError::Empty`] when there is no bar, [`ReportError::Draw`] when the drawing library fails.
pub fn svg(bars: &Bars) -> Result<String, ReportError> {
    if bars.bars.is_empty() {
        return Err(ReportError::Empty(bars.id.clone()));
    }
    let legend = bars.parts.iter().map(|part| part.name).chain([bars.paler_label.as_str()]);
    let legend_width = 34.0 + legend.map(|name| text_width(name, SMALL)).fold(0.0, f64::max);
    let (top, ticks) = ticks(bars);
    let left = MARGIN + ticks.iter().map(|(_, words)| text_width(words, SMALL)).fold(0.0, f64::max) + 8.0;
    let right = WIDTH - MARGIN - legend_width - 10.0;
    let changes = bars.bars.windows(2).map(|pair| if pair[0].group == pair[1].group { 0.0 } else { GROUP_GAP });
    let gaps: Vec<f64> = [0.0].into_iter().chain(changes).collect();
    let slot = ((right - left) / (bars.bars.len() as f64 + gaps.iter().sum::<f64>())).min(120.0);
    let mut next = left;
    let place = |gap: &f64| {
        next += slot * (1.0 + gap);
        next - slot / 2.0
    };
    let layout = Layout { left, bottom: TOP + PLOT, slot, top, ticks, centres: gaps.iter().map(place).collect() };
    let right = left + slot * (bars.bars.len() as f64 + gaps.iter().sum::<f64>());
    let lines = bars.bars.iter().map(|bar| bar.notes.len()).max().unwrap_or(0) as f64;
    let height = layout.bottom + LINE * (lines + 2.0) + 24.0;
    let description = format!("{}: {}", bars.title, bars.y.label);
    canvas::svg((WIDTH, height), &description, |canvas| {
        canvas.polygon(&[(0.0, 0.0), (WIDTH, 0.0), (WIDTH, height), (0.0, height)], WHITE, 1.0)?;
        headings(canvas, bars)?;
        axis(canvas, &layout, right)?;
        for (bar, &centre) in bars.bars.iter().zip(&layout.centres) {
            stacks(canvas, bars, bar, centre, &layout)?;
            below(canvas, bar, centre, &layout)?;
        }
        groups(canvas, bars, &layout, height)?;
        legend_of(canvas, bars, right + 22.0)
    })
}

fn words(size: f64, colour: Colour, align: Align) -> Words {
    Words { size, colour, bold: false, align }
}

fn headings(canvas: &Canvas, bars: &Bars) -> Result<(), ReportError> {
    title(canvas, &bars.title)?;
    subtitle(canvas, &bars.subtitle)?;
    canvas.words((MARGIN, TOP - 14.0), &bars.y.label, words(SMALL, INK, Align::Start))
}

/// The upper end of the axis, and its ticks: fifths of a whole, else what the quantity has.
fn ticks(bars: &Bars) -> (f64, Vec<(f64, String)>) {
    if bars.y.quantity == Quantity::Share {
        return (1.0, (0..=5).map(|fifth| (f64::from(fifth) / 5.0, format!("{} %", 20 * fifth))).collect());
    }
    let heights = bars.bars.iter().flat_map(|bar| [bar.values.iter().sum(), bar.paler.iter().flatten().sum()]);
    let heights: Vec<f64> = heights.collect();
    let Some(span) = bars.y.span(heights.iter().copied()) else { return (1.0, Vec::new()) };
    let ticks = bars.y.ticks(&span, 6);
    let top = ticks.iter().map(|tick| tick.at).chain(heights).fold(0.0, f64::max);
    (top, ticks.into_iter().map(|tick| (tick.at, tick.label)).collect())
}

fn axis(canvas: &Canvas, layout: &Layout, right: f64) -> Result<(), ReportError> {
    for (at, text) in &layout.ticks {
        let height = layout.bottom - PLOT * at / layout.top;
        let colour = if *at == 0.0 { FAINT_INK } else { GRID };
        canvas.line(&[(layout.left, height), (right, height)], Stroke { colour, width: 1.0, dashed: false })?;
        canvas.words((layout.left - 7.0, height), text, words(SMALL, INK, Align::End))?;
    }
    Ok(())
}

/// The bar and, where there is something to compare with, its paler neighbour; alone it stands in the middle.
fn stacks(canvas: &Canvas, bars: &Bars, bar: &Bar, centre: f64, layout: &Layout) -> Result<(), ReportError> {
    let width = (layout.slot * 0.42).min(40.0);
    let has_paler = bar.paler.iter().any(Option::is_some);
    let has_both = has_paler && !bar.values.is_empty();
    let start = if has_both { centre - width - 1.0 } else { centre - width / 2.0 };
    let own: Vec<Option<f64>> = bar.values.iter().copied().map(Some).collect();
    let stack = |shares: &[Option<f64>], start: f64, opacity: f64| -> Result<(), ReportError> {
        let mut below = layout.bottom;
        for (part, share) in bars.parts.iter().zip(shares) {
            let Some(share) = share.filter(|share| *share > 0.0) else { continue };
            let top = below - PLOT * share / layout.top;
            let corners = [(start, below), (start + width, below), (start + width, top), (start, top)];
            // No line of the grid shows through a pale bar.
            canvas.polygon(&corners, WHITE, 1.0)?;
            canvas.polygon(&corners, part.colour, opacity)?;
            let text = match bars.y.quantity {
                Quantity::Share => format!("{:.1}", 100.0 * share),
                _ => bars.y.value_label(share),
            };
            if below - top > VALUE + 2.0 && text_width(&text, VALUE) <= width + 2.0 {
                let ink = if opacity == 1.0 && is_dark(part.colour) { WHITE } else { INK };
                canvas.words((start + width / 2.0, (below + top) / 2.0), &text, words(VALUE, ink, Align::Middle))?;
            }
            below = top;
        }
        Ok(())
    };
    stack(&own, start, 1.0)?;
    if has_paler { stack(&bar.paler, if has_both { start + width + 2.0 } else { start }, PALE) } else { Ok(()) }
}

/// Whether white words are easier to read on a colour than black ones.
fn is_dark(Colour(red, green, blue): Colour) -> bool {
    0.299 * f64::from(red) + 0.587 * f64::from(green) + 0.114 * f64::from(blue) < 140.0
}

fn below(canvas: &Canvas, bar: &Bar, centre: f64, layout: &Layout) -> Result<(), ReportError> {
    // Names of narrow bars are smaller, so that they do not run into each other.
    let size = (0.999 * SMALL * (layout.slot - 10.0) / text_width(&bar.name, SMALL)).clamp(LEAST_TYPE, SMALL);
    canvas.words((centre, layout.bottom + LINE), &bar.name, words(size, INK, Align::Middle))?;
    for (line, note) in bar.notes.iter().enumerate() {
        let height = layout.bottom + LINE * (line as f64 + 2.0);
        canvas.words((centre, height), note, words(NOTE, FAINT_INK, Align::Middle))?;
    }
    Ok(())
}

/// The name of each group below the middle of its bars.
fn groups(canvas: &Canvas, bars: &Bars, layout: &Layout, height: f64) -> Result<(), ReportError> {
    let placed: Vec<(&Bar, f64)> = bars.bars.iter().zip(layout.centres.iter().copied()).collect();
    for group in placed.chunk_by(|(a, _), (b, _)| a.group == b.group) {
        let middle = (group[0].1 + group[group.len() - 1].1) / 2.0;
        let heavy = Words { bold: true, ..words(SMALL, INK, Align::Middle) };
        canvas.words((middle, height - 14.0), &group[0].0.group, heavy)?;
    }
    Ok(())
}

/// From above in the order in which the parts are stacked.
fn legend_of(canvas: &Canvas, bars: &Bars, left: f64) -> Result<(), ReportError> {
    let swatch = |top: f64, left: f64, width: f64, colour: Colour, opacity: f64| {
        let corners = [(left, top), (left + width, top), (left + width, top + 12.0), (left, top + 12.0)];
        canvas.polygon(&corners, colour, opacity)
    };
    let mut top = TOP;
    for part in bars.parts.iter().rev() {
        swatch(top, left, 14.0, part.colour, 1.0)?;
        canvas.words((left + 20.0, top + 6.0), part.name, words(SMALL, INK, Align::Start))?;
        top += 20.0;
    }
    if bars.bars.iter().any(|bar| bar.paler.iter().any(Option::is_some)) {
        top += 8.0;
        for (index, part) in bars.parts.iter().enumerate() {
            swatch(top, left + 3.5 * index as f64, 3.5, part.colour, PALE)?;
        }
        canvas.words((left + 20.0, top + 6.0), &bars.paler_label, words(SMALL, INK, Align::Start))?;
    }
    Ok(())
}
