//! A [`Chart`] as SVG: where everything stands.
//!
//! From top to bottom: title, what the series have in common, the name of the y axis (level, so that it can be read
//! without turning the head), the plot, the x axis. The legend stands on the right, in the order in which the curves
//! end, and never over data. Cells that ran out of memory are crosses: at their predicted height where there is one,
//! else in a strip above the plot. More curves than one plot can hold apart become small multiples.

pub mod bars;
mod canvas;
mod heat;
mod legend;
mod marks;
mod multiples;
mod rows;

pub use heat::svg as heat;
pub use rows::svg as rows;

use super::ReportError;
use super::chart::{Axis, Chart};
use super::palette::Colour;
use super::ticks::{Span, Tick};
use canvas::{Align, BOLD, Canvas, Pixel, Stroke, Words, text_width};

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 430.0;
const MARGIN: f64 = 16.0;
const TOP: f64 = 78.0;
const BOTTOM: f64 = 52.0;
const SMALL: f64 = 12.0;
/// Type of a name that takes two lines.
const TINY: f64 = 10.5;
/// Words that are long are shortened rather than set in smaller type than this.
const LEAST_TYPE: f64 = 9.0;

const INK: Colour = Colour(0x22, 0x22, 0x22);
const FAINT_INK: Colour = Colour(0x5A, 0x5A, 0x5A);
const GRID: Colour = Colour(0xE6, 0xE6, 0xE6);
const WHITE: Colour = Colour(0xFF, 0xFF, 0xFF);

/// The plot: a rectangle of pixels with a span on each side.
struct Frame {
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
    x: Span,
    y: Span,
    /// Height of the strip inside the top for cells without a height; 0 without such cells.
    strip: f64,
}

impl Frame {
    /// Where a point lies.
    fn place(&self, x: f64, y: f64) -> Pixel {
        (self.across(x), self.bottom - self.y.place(y) * (self.bottom - self.top - self.strip))
    }

    /// The same, with all that is in it so far to the side.
    fn aside(&self, pixels: f64) -> Frame {
        Frame { left: self.left + pixels, right: self.right + pixels, ..*self }
    }

    /// How far right a value of x lies.
    fn across(&self, x: f64) -> f64 {
        self.left + self.x.place(x) * (self.right - self.left)
    }
}

/// Draws `chart` as an SVG document.
///
/// # Errors
/// [`ReportError::Empty`] when no point of the chart has a place on its axes, [`ReportError::Draw`] when the drawing
/// library fails.
pub fn svg(chart: &Chart) -> Result<String, ReportError> {
    let chart = &chart.shown();
    if chart.is_split() {
        return multiples::svg(chart);
    }
    let empty = || ReportError::Empty(chart.id.clone());
    let x = chart.x.span(chart.x_values()).ok_or_else(empty)?;
    // A chart of nothing but cells without a height still has a y axis.
    let y = chart.y.span(chart.y_values()).or_else(|| chart.y.span([1.0].into_iter())).ok_or_else(empty)?;
    let y_ticks = chart.y.ticks(&y, 8);
    let tick_width = y_ticks.iter().map(|tick| text_width(&tick.label, SMALL)).fold(24.0, f64::max);
    let legend = legend::Legend::of(chart);
    let rows = marks::strip_rows(chart);
    let height = HEIGHT.max(TOP + BOTTOM + legend.height());
    let frame = Frame {
        left: MARGIN + tick_width + 8.0,
        right: WIDTH - MARGIN - legend.width(),
        top: TOP,
        bottom: height - BOTTOM,
        x,
        y,
        strip: if rows == 0 { 0.0 } else { 8.0 + 11.0 * rows as f64 },
    };
    let description = format!("{}: {} against {}", chart.title, chart.y.label, chart.x.label);
    canvas::svg((WIDTH, height), &description, |canvas| {
        let corners = [(0.0, 0.0), (WIDTH, 0.0), (WIDTH, height), (0.0, height)];
        canvas.polygon(&corners, WHITE, 1.0)?;
        headings(canvas, chart, &frame)?;
        if chart.has_beside() {
            let words = Words { size: TINY, colour: FAINT_INK, bold: false, align: Align::End };
            canvas.words((frame.right, TOP - 14.0), "points of one place stand side by side", words)?;
        }
        axes(canvas, &chart.x, &frame, &y_ticks)?;
        marks::draw(canvas, chart, &frame)?;
        legend.draw(canvas, &frame)
    })
}

fn headings(canvas: &Canvas, chart: &Chart, frame: &Frame) -> Result<(), ReportError> {
    title(canvas, &chart.title)?;
    subtitle(canvas, &chart.subtitle)?;
    let plain = Words { size: SMALL, colour: INK, bold: false, align: Align::Start };
    canvas.words((MARGIN, TOP - 14.0), &chart.y.words(), plain)?;
    let below = ((frame.left + frame.right) / 2.0, frame.bottom + 38.0);
    canvas.words(below, &chart.x.words(), Words { align: Align::Middle, ..plain })
}

/// A figure's title, smaller where it is long.
fn title(canvas: &Canvas, text: &str) -> Result<(), ReportError> {
    const LARGE: f64 = 16.0;
    let room = (WIDTH - 2.0 * MARGIN) / BOLD;
    let size = (0.999 * LARGE * room / text_width(text, LARGE)).clamp(SMALL, LARGE);
    let words = Words { size, colour: INK, bold: true, align: Align::Start };
    canvas.words((MARGIN, 20.0), &shortened(text, room, size), words)
}

/// What all of a figure have in common, below its title: on one line, else on two that are broken between its parts.
fn subtitle(canvas: &Canvas, text: &str) -> Result<(), ReportError> {
    let room = WIDTH - 2.0 * MARGIN;
    let words = |size| Words { size, colour: FAINT_INK, bold: false, align: Align::Start };
    if text_width(text, SMALL) <= room {
        return canvas.words((MARGIN, 40.0), text, words(SMALL));
    }
    for (line, height) in folded(text, room, TINY).iter().zip([35.0, 48.0]) {
        canvas.words((MARGIN, height), line, words(TINY))?;
    }
    Ok(())
}

/// Parts of `text` on two lines of `room` pixels at a font of `size`; files have lost their folders, and parts that no longer fit are
/// left out whole.
fn folded(text: &str, room: f64, size: f64) -> [String; 2] {
    const BETWEEN: &str = " · ";
    let text = without_folders(text);
    let (mut lines, mut at) = ([String::new(), String::new()], 0);
    for part in text.split(BETWEEN) {
        let longer = |line: &str| if line.is_empty() { part.to_string() } else { format!("{line}{BETWEEN}{part}") };
        if at == 0 && text_width(&longer(&lines[0]), size) > room {
            at = 1;
        }
        if text_width(&longer(&lines[at]), size) <= room {
            lines[at] = longer(&lines[at]);
        }
    }
    lines
}

/// `text` within `room` pixels, and the size of its type: where it is long, files lose their folders, then it is smaller, and only then
/// shortened.
fn fitted(text: &str, room: f64) -> (String, f64) {
    let text = &if text_width(text, SMALL) > room { without_folders(text) } else { text.to_string() };
    // A little less than what fits, so that rounding shortens nothing.
    let size = (0.999 * SMALL * room / text_width(text, SMALL)).clamp(LEAST_TYPE, SMALL);
    (shortened(text, room, size), size)
}

/// A name whose files have lost their folders, and the ending that all have: `dms:gates=models/dms/x.safetensors` is `dms:gates=x`.
fn without_folders(name: &str) -> String {
    let part = |part: &str| match part.rsplit_once('/') {
        Some((_, file)) if file.contains('.') => file.replacen(".safetensors", "", 1),
        _ => part.to_string(),
    };
    name.split_inclusive([' ', '=', ',', '+']).map(part).collect()
}

/// The name above a plot or map, around the height of `place`: on one line of `room` pixels, else in smaller type on two,
/// broken where a part of it ends.
fn heading(canvas: &Canvas, (left, middle): Pixel, room: f64, name: &str) -> Result<(), ReportError> {
    let bold = |size| Words { size, colour: INK, bold: true, align: Align::Start };
    let fits = |name: &str| text_width(name, SMALL) * BOLD <= room;
    let short = if fits(name) { name.to_string() } else { without_folders(name) };
    let name = &short[..];
    if fits(name) {
        return canvas.words((left, middle), name, bold(SMALL));
    }
    let fits = |end: &usize| text_width(&name[..*end], TINY) * BOLD <= room;
    let end = |(at, letter)| match letter {
        ' ' | '+' => Some(at),
        ':' | ',' | '-' => Some(at + 1),
        _ => None,
    };
    let mut ends = name.char_indices().filter_map(end);
    let (first, second) = name.split_at(ends.rfind(fits).unwrap_or(0));
    canvas.words((left, middle - 6.0), first, bold(TINY))?;
    canvas.words((left, middle + 5.0), &shortened(second.trim_start(), room / BOLD, TINY), bold(TINY))
}

fn axes(canvas: &Canvas, x: &Axis, frame: &Frame, y_ticks: &[Tick]) -> Result<(), ReportError> {
    let grid = Stroke { colour: GRID, width: 1.0, dashed: false };
    let label = Words { size: SMALL, colour: INK, bold: false, align: Align::End };
    for tick in y_ticks {
        let (_, height) = frame.place(1.0, tick.at);
        canvas.line(&[(frame.left, height), (frame.right, height)], grid)?;
        canvas.words((frame.left - 7.0, height), &tick.label, label)?;
    }
    for tick in x_ticks(x, frame) {
        let across = frame.across(tick.at);
        canvas.line(&[(across, frame.top + frame.strip), (across, frame.bottom)], grid)?;
        canvas.words((across, frame.bottom + 15.0), &tick.label, Words { align: Align::Middle, ..label })?;
    }
    let edge = Stroke { colour: FAINT_INK, width: 1.0, dashed: false };
    canvas.line(&[(frame.left, frame.top), (frame.left, frame.bottom), (frame.right, frame.bottom)], edge)
}

/// As many ticks as fit side by side.
fn x_ticks(axis: &Axis, frame: &Frame) -> Vec<Tick> {
    fitting(frame.right - frame.left, |most| axis.ticks(&frame.x, most), |at| frame.across(at))
}

/// The most ticks whose labels stand side by side without touching.
fn fitting(room: f64, ticks: impl Fn(usize) -> Vec<Tick>, across: impl Fn(f64) -> f64) -> Vec<Tick> {
    let fits = |ticks: &Vec<Tick>| {
        let centre = |tick: &Tick| across(tick.at);
        let half = |tick: &Tick| text_width(&tick.label, SMALL) / 2.0;
        ticks.windows(2).all(|pair| centre(&pair[0]) + half(&pair[0]) + 6.0 < centre(&pair[1]) - half(&pair[1]))
    };
    let most = (room / 30.0) as usize;
    (3..=most.max(3)).rev().map(ticks).find(fits).unwrap_or_default()
}

/// `text` within `most` pixels at a font of `size`; what is missing, a sign stands for.
fn shortened(text: &str, most: f64, size: f64) -> String {
    let mut text = text.to_string();
    while text_width(&text, size) > most {
        // Names differ at the end more often than in the middle.
        let letters: Vec<char> = text.chars().filter(|letter| *letter != '…').collect();
        let cut = letters.len() * 3 / 5;
        text = letters[..cut - 1].iter().chain(['…'].iter()).chain(&letters[cut..]).collect();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::canvas::text_width;
    use super::{folded, without_folders};

    #[test]
    fn a_long_subtitle_is_broken_between_its_parts_and_loses_no_letters() {
        let parts: Vec<String> = (0..20).map(|at| format!("part {at} of the whole")).collect();
        for count in 1..=parts.len() {
            let lines = folded(&parts[..count].join(" · "), 400.0, 10.5);
            let found: Vec<&str> =
                lines.iter().filter(|line| !line.is_empty()).flat_map(|line| line.split(" · ")).collect();
            assert!(found.iter().zip(&parts).all(|(found, part)| found == part) && !found.is_empty(), "{lines:?}");
            assert!(lines.iter().all(|line| text_width(line, 10.5) <= 400.0));
            assert_eq!(found.len() == count, count <= 6, "{lines:?}");
        }
    }

    #[test]
    fn names_lose_the_folders_of_their_files_and_nothing_else() {
        for (name, short) in [
            ("dms:gates=models/dms/builtin-4x.safetensors,window=16", "dms:gates=builtin-4x,window=16"),
            ("snapkv 8/2 heads, D 64", "snapkv 8/2 heads, D 64"),
            ("duo:file=/a b/c.safetensors+rerotate", "duo:file=/a c+rerotate"),
            ("kvzap:gates=models/kvzap/x.safetensors@0.5", "kvzap:gates=x@0.5"),
        ] {
            assert_eq!(without_folders(name), short);
        }
    }
}
