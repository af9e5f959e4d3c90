//! Colours, markers and dashes of series: the Okabe-Ito palette, which colour-blind readers can tell apart.
//!
//! The baselines are black and the oracle is dashed grey in every figure. Everything else takes its place in a list
//! of names, so that a kernel or policy looks the same in all figures of a run. The number of colours and the number
//! of markers have no common divisor, so a colour that comes again comes with another marker.

/// Names of baselines: what the others are compared with.
const BASELINES: [&str; 3] = ["naive", "full", "dense"];

/// The name of the policy that knows the future: no real policy does better.
const ORACLES: [&str; 2] = ["oracle", "oracle-output"];

/// Okabe-Ito without black (baselines) and yellow (too pale for a line on white).
const COLOURS: [Colour; 6] = [
    Colour(0x00, 0x72, 0xB2),
    Colour(0xD5, 0x5E, 0x00),
    Colour(0x00, 0x9E, 0x73),
    Colour(0xCC, 0x79, 0xA7),
    Colour(0xE6, 0x9F, 0x00),
    Colour(0x56, 0xB4, 0xE9),
];

const MARKERS: [Marker; 5] = [Marker::Square, Marker::Triangle, Marker::Diamond, Marker::TriangleDown, Marker::Circle];

/// Red, green and blue, 0 to 255.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Colour(pub u8, pub u8, pub u8);

impl Colour {
    /// Black.
    pub const BLACK: Colour = Colour(0, 0, 0);
    /// Grey of the oracle.
    pub const GREY: Colour = Colour(0x77, 0x77, 0x77);

    /// From white at 0 over blue to nearly black at 1; lightness falls all the way, so it reads without colour too.
    pub fn sequential(share: f64) -> Colour {
        const STOPS: [Colour; 5] = [
            Colour(0xFF, 0xFF, 0xFF),
            Colour(0xBF, 0xD9, 0xEE),
            Colour(0x56, 0xA3, 0xD6),
            Colour(0x10, 0x62, 0xA6),
            Colour(0x0A, 0x26, 0x52),
        ];
        let place = share.clamp(0.0, 1.0) * (STOPS.len() - 1) as f64;
        let below = (place as usize).min(STOPS.len() - 2);
        let part = place - below as f64;
        let between = |low: u8, high: u8| (f64::from(low) + (f64::from(high) - f64::from(low)) * part).round() as u8;
        let (low, high) = (STOPS[below], STOPS[below + 1]);
        Colour(between(low.0, high.0), between(low.1, high.1), between(low.2, high.2))
    }
}

/// Shape of a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Marker {
    /// Filled circle.
    Circle,
    /// Circle with a white centre.
    Ring,
    /// Filled square.
    Square,
    /// Filled square on its corner.
    Diamond,
    /// Filled triangle, tip up.
    Triangle,
    /// Filled triangle, tip down.
    TriangleDown,
}

/// How a series looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    /// Colour of line, band and markers.
    pub colour: Colour,
    /// Shape of its points.
    pub marker: Marker,
    /// Whether its line is dashed.
    pub dashed: bool,
}

/// The part of a name before its parameters: `tiled` of `tiled:br=64`.
pub fn stem(name: &str) -> &str {
    name.split([':', '@', ' ']).next().unwrap_or(name)
}

/// Whether a kernel or policy is what the others are compared with.
pub fn is_baseline(name: &str) -> bool {
    BASELINES.contains(&stem(name))
}

/// Whether a policy is an oracle, which knows the future.
pub fn is_oracle(name: &str) -> bool {
    ORACLES.contains(&stem(name))
}

/// Whether one of `places` has the colour of another without need: there are enough for all.
pub fn collide(places: &[usize]) -> bool {
    let colours: std::collections::BTreeSet<usize> = places.iter().map(|place| place % COLOURS.len()).collect();
    places.len() <= COLOURS.len() && colours.len() < places.len()
}

/// The style of the `place`-th series that is neither baseline nor oracle; `variant` counts series of the same
/// kernel or policy.
pub fn style(name: &str, place: usize, variant: usize) -> Style {
    if is_baseline(name) {
        let marker = if variant == 0 { Marker::Circle } else { MARKERS[(variant - 1) % MARKERS.len()] };
        return Style { colour: Colour::BLACK, marker, dashed: variant > 0 };
    }
    if is_oracle(name) {
        let marker = if variant == 0 { Marker::Ring } else { MARKERS[(variant - 1) % MARKERS.len()] };
        return Style { colour: Colour::GREY, marker, dashed: true };
    }
    Style {
        colour: COLOURS[place % COLOURS.len()],
        marker: MARKERS[place % MARKERS.len()],
        dashed: place >= COLOURS.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thirty_series_look_different_and_baselines_are_black() {
        let styles: Vec<Style> = (0..30).map(|place| style("tiled", place, 0)).collect();
        for (index, style) in styles.iter().enumerate() {
            let twins =
                styles[..index].iter().filter(|other| (other.colour, other.marker) == (style.colour, style.marker));
            assert_eq!(twins.count(), 0, "{style:?}");
        }
        for name in ["naive", "full", "full@0.25", "naive 8/2 heads"] {
            assert_eq!(style(name, 3, 0).colour, Colour::BLACK, "{name}");
        }
        assert!(style("oracle@0.5", 0, 0).dashed && !is_baseline("fuller"));
    }
}
