//! Lines, shapes and words in SVG, by plotters. The only file of the report that knows the drawing library.
//!
//! Positions are in pixels of the finished figure, as fractions. plotters places everything on whole pixels, so the
//! canvas is drawn larger and shown smaller: a curve keeps its course to a quarter of a pixel.

use super::super::ReportError;
use super::super::palette::{Colour, Marker};
use plotters::backend::SVGBackend;
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{Circle, DashedPathElement, Drawable, PathElement, PointCollection, Polygon, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontFamily, FontStyle, RGBColor, ShapeStyle, TextStyle};

const OVERSAMPLING: f64 = 4.0;

/// plotters' SVG backend divides font sizes by this.
const PLOTTERS_FONT_FACTOR: f64 = 1.24;

const FONTS: &str = "Helvetica, Arial, Liberation Sans, DejaVu Sans, sans-serif";

/// A position in pixels, from the top left.
pub type Pixel = (f64, f64);

/// A drawing in the making.
pub struct Canvas<'a> {
    area: DrawingArea<SVGBackend<'a>, Shift>,
}

/// Where words stand relative to their position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Align {
    /// Start here.
    Start,
    /// Centred here.
    Middle,
    /// End here.
    End,
}

/// How words look.
#[derive(Debug, Clone, Copy)]
pub struct Words {
    /// Height of the font in pixels.
    pub size: f64,
    /// Colour.
    pub colour: Colour,
    /// Heavy type.
    pub bold: bool,
    /// Horizontal alignment; the position is halfway up.
    pub align: Align,
}

/// How a line looks.
#[derive(Debug, Clone, Copy)]
pub struct Stroke {
    /// Colour.
    pub colour: Colour,
    /// Width in pixels.
    pub width: f64,
    /// Broken into dashes.
    pub dashed: bool,
}

/// Draws an SVG of `width` x `height` pixels, described for screen readers as `description`.
///
/// # Errors
/// What `draw` returns.
pub fn svg(
    (width, height): (f64, f64),
    description: &str,
    draw: impl FnOnce(&Canvas) -> Result<(), ReportError>,
) -> Result<String, ReportError> {
    let mut text = String::new();
    let size = ((width * OVERSAMPLING) as u32, (height * OVERSAMPLING) as u32);
    {
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        let canvas = Canvas { area };
        draw(&canvas)?;
        canvas.area.present().map_err(|error| ReportError::Draw(error.to_string()))?;
    }
    let (head, body) = text.split_once('>').expect("an SVG has a root");
    debug_assert!(head.starts_with("<svg"));
    let (inner_width, inner_height) = size;
    Ok(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {inner_width} {inner_height}\" role=\"img\" aria-label=\"{}\">{body}",
        escape(description)
    ))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

impl Canvas<'_> {
    /// A line through `places`.
    pub fn line(&self, places: &[Pixel], stroke: Stroke) -> Result<(), ReportError> {
        let places: Vec<(i32, i32)> = places.iter().copied().map(scaled).collect();
        let style = stroke.shape();
        if stroke.dashed {
            self.put(&DashedPathElement::new(places, length(6.0), length(4.0), style))
        } else {
            self.put(&PathElement::new(places, style))
        }
    }

    /// A filled polygon; `opacity` from 0 to 1.
    pub fn polygon(&self, places: &[Pixel], colour: Colour, opacity: f64) -> Result<(), ReportError> {
        let places: Vec<(i32, i32)> = places.iter().copied().map(scaled).collect();
        self.put(&Polygon::new(places, rgb(colour).mix(opacity).filled()))
    }

    /// A marker.
    pub fn marker(&self, (x, y): Pixel, marker: Marker, colour: Colour) -> Result<(), ReportError> {
        let shape = |corners: &[Pixel]| {
            let corners: Vec<Pixel> = corners.iter().map(|(dx, dy)| (x + dx, y + dy)).collect();
            self.polygon(&corners, colour, 1.0)
        };
        match marker {
            Marker::Circle => self.put(&Circle::new(scaled((x, y)), length(3.6), rgb(colour).filled())),
            Marker::Ring => {
                self.put(&Circle::new(scaled((x, y)), length(3.4), rgb(Colour(255, 255, 255)).filled()))?;
                let edge = Stroke { colour, width: 1.5, dashed: false };
                self.put(&Circle::new(scaled((x, y)), length(3.4), edge.shape()))
            }
            Marker::Square => shape(&[(-3.3, -3.3), (3.3, -3.3), (3.3, 3.3), (-3.3, 3.3)]),
            Marker::Diamond => shape(&[(0.0, -4.7), (4.7, 0.0), (0.0, 4.7), (-4.7, 0.0)]),
            Marker::Triangle => shape(&[(0.0, -4.7), (4.4, 3.2), (-4.4, 3.2)]),
            Marker::TriangleDown => shape(&[(0.0, 4.7), (4.4, -3.2), (-4.4, -3.2)]),
        }
    }

    /// A cross: something that did not run.
    pub fn cross(&self, (x, y): Pixel, colour: Colour) -> Result<(), ReportError> {
        let stroke = Stroke { colour, width: 2.0, dashed: false };
        self.line(&[(x - 4.0, y - 4.0), (x + 4.0, y + 4.0)], stroke)?;
        self.line(&[(x - 4.0, y + 4.0), (x + 4.0, y - 4.0)], stroke)
    }

    /// Words, halfway up at `place`.
    pub fn words(&self, place: Pixel, text: &str, words: Words) -> Result<(), ReportError> {
        let horizontal = match words.align {
            Align::Start => HPos::Left,
            Align::Middle => HPos::Center,
            Align::End => HPos::Right,
        };
        let size = words.size * OVERSAMPLING * PLOTTERS_FONT_FACTOR;
        let weight = if words.bold { FontStyle::Bold } else { FontStyle::Normal };
        let colour = rgb(words.colour);
        let style = TextStyle::from((FontFamily::Name(FONTS), size, weight))
            .color(&colour)
            .pos(Pos::new(horizontal, VPos::Center));
        self.put(&Text::new(text.to_string(), scaled(place), style))
    }

    fn put<'e, E>(&self, element: &'e E) -> Result<(), ReportError>
    where
        &'e E: PointCollection<'e, (i32, i32)>,
        E: for<'b> Drawable<SVGBackend<'b>>,
    {
        self.area.draw(element).map_err(|error| ReportError::Draw(error.to_string()))
    }
}

impl Stroke {
    fn shape(self) -> ShapeStyle {
        rgb(self.colour).stroke_width(length(self.width) as u32)
    }
}

/// How much wider heavy type is.
pub const BOLD: f64 = 1.2;

/// Width of `text` in pixels at a font of `size`; a little more than the widest usual sans-serif needs.
pub fn text_width(text: &str, size: f64) -> f64 {
    let share = |letter: char| match letter {
        'i' | 'j' | 'l' | 'I' | '.' | ',' | ':' | '|' | '\'' => 0.32,
        ' ' | 'f' | 't' | 'r' | '(' | ')' | '/' | '-' | '·' => 0.40,
        'm' | 'w' | 'M' | 'W' | '@' | '%' => 0.98,
        letter if letter.is_ascii_digit() => 0.60,
        letter if letter.is_uppercase() => 0.72,
        _ => 0.60,
    };
    text.chars().map(share).sum::<f64>() * size
}

fn scaled((x, y): Pixel) -> (i32, i32) {
    ((x * OVERSAMPLING).round() as i32, (y * OVERSAMPLING).round() as i32)
}

fn length(pixels: f64) -> i32 {
    (pixels * OVERSAMPLING).round() as i32
}

fn rgb(Colour(red, green, blue): Colour) -> RGBColor {
    RGBColor(red, green, blue)
}
