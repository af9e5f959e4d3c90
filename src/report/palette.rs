//! Colours, markers and dashes of series, which colour-blind readers can tell apart too: the Okabe-Ito palette, and five
//! darker colours behind it.
//!
//! The baselines are black and the oracle is dashed grey in every figure. Everything that a registry knows has its
//! place in one list of names, so that a kernel or policy has the same colour in all figures of all reports. The number
//! of colours and the number of markers have no common divisor, so a colour that comes again comes with another marker.

use crate::attention::KERNELS;
use crate::policy::{POLICIES, PRESETS};

/// Names of baselines: what the others are compared with.
const BASELINES: [&str; 3] = ["naive", "full", "dense"];

/// The name of the policy that knows the future: no real policy does better.
const ORACLES: [&str; 2] = ["oracle", "oracle-output"];

/// What stands beside one another most often and has a colour of its own; the others follow in their registry's order.
const FAMILIAR: [&str; 11] = [
    "h2o",
    "keydiff",
    "random",
    "snapkv",
    "streaming-llm",
    "tova",
    "expected-attention",
    "ada-snapkv",
    "leverage",
    "pyramidkv",
    "knorm",
];
/// The same of kernels.
const FAMILIAR_KERNELS: [&str; 2] = ["tiled", "decode"];

/// Okabe-Ito without black (baselines) and yellow (too pale for a line on white), then darker ones.
const COLOURS: [Colour; 11] = [
    Colour(0x00, 0x72, 0xB2),
    Colour(0xD5, 0x5E, 0x00),
    Colour(0x00, 0x9E, 0x73),
    Colour(0xCC, 0x79, 0xA7),
    Colour(0xE6, 0x9F, 0x00),
    Colour(0x56, 0xB4, 0xE9),
    Colour(0x5E, 0x3C, 0x99),
    Colour(0x88, 0x22, 0x55),
    Colour(0x8C, 0x6D, 0x1F),
    Colour(0x11, 0x55, 0x44),
    Colour(0x99, 0xA0, 0x33),
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

    /// This colour with a `share` of `other` in it.
    fn mixed(self, other: Colour, share: f64) -> Colour {
        let between = |own: u8, other: u8| (f64::from(own) + (f64::from(other) - f64::from(own)) * share).round() as u8;
        Colour(between(self.0, other.0), between(self.1, other.1), between(self.2, other.2))
    }

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
        STOPS[below].mixed(STOPS[below + 1], place - below as f64)
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

/// The place of a kernel or policy that a registry knows, whatever its parameters and parts; `None` for baselines, oracles
/// and what is in no registry.
pub fn place(name: &str) -> Option<usize> {
    let named = name.split([':', '+', ' ']).next().unwrap_or(name);
    let kernels = KERNELS.iter().map(|entry| entry.name);
    let policies = POLICIES.iter().map(|entry| entry.name).chain(PRESETS.iter().map(|preset| preset.name));
    // `pyramidkv@factory` is a name, `h2o@0.25` is a policy at a budget.
    let position = |name: &str| at(name, &FAMILIAR, policies.clone()).or(at(name, &FAMILIAR_KERNELS, kernels.clone()));
    position(named).or_else(|| position(stem(named)))
}

/// How many places the policies of the registry take.
pub fn places() -> usize {
    POLICIES.iter().map(|entry| entry.name).chain(PRESETS.iter().map(|preset| preset.name)).filter_map(place).count()
}

/// The place of `name` in `first` and, behind these, among the others of `all`.
fn at<'n>(name: &str, first: &[&'n str], all: impl Iterator<Item = &'n str>) -> Option<usize> {
    let others = all.filter(|name| !first.contains(name) && !is_baseline(name) && !is_oracle(name));
    first.iter().copied().chain(others).position(|known| known == name)
}

/// The style of the series at `place`, unless it is a baseline or an oracle; `variant` counts series of the same kernel or
/// policy, which share its colour: every other one is dashed, each two are darker or lighter than those before.
pub fn style(name: &str, place: usize, variant: usize) -> Style {
    if is_baseline(name) {
        // What kernels are compared with may stand beside what policies are.
        let own = if stem(name) == "naive" { Marker::Square } else { Marker::Circle };
        let others: Vec<Marker> = MARKERS.into_iter().filter(|marker| *marker != own).collect();
        let marker = if variant == 0 { own } else { others[(variant - 1) % others.len()] };
        return Style { colour: Colour::BLACK, marker, dashed: variant > 0 };
    }
    if is_oracle(name) {
        let marker = if variant == 0 { Marker::Ring } else { MARKERS[(variant - 1) % MARKERS.len()] };
        return Style { colour: Colour::GREY, marker, dashed: true };
    }
    let colour = COLOURS[place % COLOURS.len()];
    Style {
        colour: match variant / 2 % 3 {
            0 => colour,
            1 => colour.mixed(Colour::BLACK, 0.4),
            _ => colour.mixed(Colour(0xFF, 0xFF, 0xFF), 0.4),
        },
        marker: MARKERS[(place + variant) % MARKERS.len()],
        dashed: (place >= COLOURS.len()) != (variant % 2 == 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn series_at_different_places_look_different_and_baselines_are_black() {
        let styles: Vec<Style> = (0..55).map(|place| style("tiled", place, 0)).collect();
        for (index, style) in styles.iter().enumerate() {
            let twins =
                styles[..index].iter().filter(|other| (other.colour, other.marker) == (style.colour, style.marker));
            assert_eq!(twins.count(), 0, "{style:?}");
        }
        for name in ["naive", "full", "full@0.25", "naive 8/2 heads"] {
            assert_eq!((style(name, 3, 0).colour, place(name)), (Colour::BLACK, None), "{name}");
        }
        assert!(style("oracle@0.5", 0, 0).dashed && !is_baseline("fuller"));
    }

    #[test]
    fn every_policy_has_a_place_of_its_own_whatever_its_parameters() {
        let names = POLICIES.iter().map(|entry| entry.name).chain(PRESETS.iter().map(|preset| preset.name));
        let real: Vec<&str> = names.filter(|name| !is_baseline(name) && !is_oracle(name)).collect();
        let taken: BTreeSet<usize> = real.iter().map(|name| place(name).unwrap()).collect();
        assert_eq!((taken, real.len()), ((0..places()).collect(), places()));
        assert!(FAMILIAR.iter().all(|name| real.contains(name)));
        for (text, name) in [("snapkv:window=8+ada", "snapkv"), ("h2o@0.25", "h2o"), ("tiled:br=64 8/2 heads", "tiled")]
        {
            assert_eq!(place(text), place(name), "{text}");
        }
        assert_ne!(place("pyramidkv@factory"), place("pyramidkv"));
        assert_eq!(place("one of the user's"), None);
    }
}
