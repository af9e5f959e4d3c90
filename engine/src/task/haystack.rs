//! What needles are hidden in.

use super::Draw;
use super::text;
use crate::named::{Named, NamedError};
use rand::seq::index;

/// A kind of filler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Haystack {
    /// The same few sentences over and over: nothing in it resembles a needle.
    Repeat,
    /// Sentences of a grammar, all different.
    Essay,
}

impl Haystack {
    /// Its first `units` sentences.
    pub fn sentences(self, units: usize, draw: &Draw) -> Vec<String> {
        let mut rng = draw.filler();
        let cycle: Vec<String> = match self {
            Haystack::Repeat => (0..4).map(|_| text::sentence(&mut rng)).collect(),
            Haystack::Essay => Vec::new(),
        };
        (0..units).map(|at| cycle.get(at % 4).cloned().unwrap_or_else(|| text::sentence(&mut rng))).collect()
    }
}

/// The parameter `depth`; `None` is anywhere, and may be given in the word that the list of tasks has for it.
pub(super) fn depth(named: &Named) -> Result<Option<f64>, NamedError> {
    let asked = named.text("depth").filter(|depth| *depth != "random");
    asked.map(|_| named.number("depth", 0.0, 0.0..=1.0)).transpose()
}

/// Puts `needles` between the sentences: the first at `depth` (0 the beginning, 1 the end) where it is given, the others
/// at places drawn at random. Gives the text and the depth of the first.
pub(super) fn hide(sentences: &[String], needles: &[String], depth: Option<f64>, draw: &Draw) -> (String, f64) {
    let gaps = sentences.len() + 1;
    let mut rng = draw.places();
    let mut places: Vec<usize> = match needles.len() <= gaps {
        true => index::sample(&mut rng, gaps, needles.len()).into_vec(),
        // More needles than gaps: some stand side by side.
        false => (0..needles.len()).map(|needle| needle * gaps / needles.len()).collect(),
    };
    if let Some(depth) = depth {
        let wanted = ((gaps - 1) as f64 * depth).round() as usize;
        // The place may be another needle's: they change places, and all stay apart.
        match places.iter().position(|&place| place == wanted) {
            Some(other) => places.swap(0, other),
            None => places[0] = wanted,
        }
    }
    let mut text = String::new();
    for gap in 0..gaps {
        for (needle, _) in needles.iter().zip(&places).filter(|(_, place)| **place == gap) {
            text.push_str(needle);
        }
        text.push_str(sentences.get(gap).map_or("", String::as_str));
    }
    (text, places[0] as f64 / (gaps - 1).max(1) as f64)
}
