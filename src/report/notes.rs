//! What the words of every figure get, whichever it is: that inputs are synthetic, that curves are the same, that a policy
//! is nothing but its window, that times differ at equal bytes, and the meaning of the words that are ours.

use super::chart::{Chart, Point};
use super::figures::Picture;
use super::ticks::Span;
use super::{noise, text};
use crate::experiment::record::Record;
use crate::units;
use std::collections::BTreeMap;

/// What the eye does not see, as a part of an axis.
const ONE_PIXEL: f64 = 1e-3;

/// The words that are ours, and what they mean: the first table is for figures.
const GLOSSARY: &str = include_str!("../../docs/glossary.md");

/// Puts what a reader must know of the `records` behind a figure into its title and caption.
pub fn add(picture: &mut Picture, records: &[&Record], is_synthetic: bool) {
    let ids = picture.cell_ids();
    let mut behind: Vec<&Record> = records.to_vec();
    behind.retain(|record| ids.contains(record.cell_id.as_str()));
    let mut notes = text::only_protected(&only_protected(&behind));
    if let Picture::Curves(chart) = picture {
        notes += &identical(chart);
        if chart.shown().has_beside() {
            notes += " Points of one place on the axis stand side by side.";
        }
        let shows_times_of_bytes = chart.x.field == "kv_bytes_live" && chart.y.field == "median_ns";
        if shows_times_of_bytes && !noise::unequal(&behind).is_empty() {
            notes += " Some times differ beyond noise at equal bytes; the findings name them.";
        }
    }
    let drawn = behind.iter().any(|record| record.cell.measure.trials().is_some());
    let (title, caption) = picture.words_mut();
    caption.push_str(&notes);
    if is_synthetic && drawn {
        title.push_str(" (synthetic inputs)");
    }
}

/// What nothing but protected tokens stays of: a policy with its budget and, where more stays at another context that is drawn too, with
/// its contexts.
fn only_protected(behind: &[&Record]) -> Vec<String> {
    let mut contexts: BTreeMap<String, BTreeMap<usize, bool>> = BTreeMap::new();
    for record in behind {
        let is_tight = contexts.entry(at_budget(record)).or_default().entry(record.cell.context_tokens).or_default();
        *is_tight |= text::is_only_protected(record);
    }
    let words = |(name, contexts): (String, BTreeMap<usize, bool>)| {
        let tight = contexts.iter().filter(|(_, is_tight)| **is_tight);
        let tight: Vec<String> = tight.map(|(context, _)| units::tokens(*context)).collect();
        match tight.len() {
            0 => None,
            all if all == contexts.len() => Some(name),
            1 => Some(format!("{name} at a context of {}", tight[0])),
            _ => Some(format!("{name} at contexts of {}", noise::listed(tight))),
        }
    };
    contexts.into_iter().filter_map(words).collect()
}

fn at_budget(record: &Record) -> String {
    let budget = record.cell.budget.as_ref().map_or(String::new(), |budget| format!(" at {budget}"));
    format!("{}{budget}", record.cell.chosen().unwrap_or_default())
}

/// Which curves lie on one another to the eye, as a sentence with a leading space; empty where none do.
fn identical(chart: &Chart) -> String {
    let (x, y) = (chart.x.span(chart.x_values()), chart.y.span(chart.y_values()));
    let is_near = |span: &Option<Span>, a: f64, b: f64| {
        a == b || span.is_some_and(|span| (span.place(a) - span.place(b)).abs() <= ONE_PIXEL)
    };
    let are_one = |a: &Point, b: &Point| {
        let heights = match (a.y, b.y) {
            (Some(a), Some(b)) => is_near(&y, a, b),
            (a, b) => a == b,
        };
        heights && is_near(&x, a.x, b.x)
    };
    let points = |index: usize| &chart.series[index].points;
    let are_same = |a: usize, b: usize| {
        points(a).len() == points(b).len() && points(a).iter().zip(points(b)).all(|(a, b)| are_one(a, b))
    };
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for index in (0..chart.series.len()).filter(|&index| points(index).iter().any(|point| point.y.is_some())) {
        match groups.iter_mut().find(|group| are_same(group[0], index)) {
            Some(group) => group.push(index),
            None => groups.push(vec![index]),
        }
    }
    let names = |group: &Vec<usize>| noise::listed(group.iter().map(|&at| chart.series[at].name.clone()).collect());
    let same: Vec<String> = groups.iter().filter(|group| group.len() > 1).map(names).collect();
    if same.is_empty() { String::new() } else { format!(" Identical to the eye at every point: {}.", same.join("; ")) }
}

/// The words of the glossary's first table that stand in `texts`, each with its meaning.
pub fn definitions(texts: &[&str]) -> Vec<(&'static str, &'static str)> {
    let rows = GLOSSARY.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
    let rows = rows.take_while(|line| line.starts_with('|')).filter_map(|line| {
        let (word, meaning) = line.trim_matches(['|', ' ']).split_once(" | ")?;
        Some((word, meaning))
    });
    let is_letter = |letter: char| letter.is_alphanumeric();
    let has = |word: &str| {
        let is_it = |part: &str| part.eq_ignore_ascii_case(word);
        texts.iter().any(|text| text.split(|letter| !is_letter(letter)).any(is_it))
    };
    rows.filter(|(word, _)| has(word)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_figure_are_explained_and_no_others() {
        let words = |text: &str| definitions(&[text]).into_iter().map(|(word, _)| word).collect::<Vec<_>>();
        assert_eq!(words("Drift against budget, oracle-output"), ["drift", "oracle"]);
        assert_eq!(words("KL divergence (nats per token)"), ["KL"]);
        assert!(words("drifting klaxons, a budget, a cell").is_empty());
    }
}
