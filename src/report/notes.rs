//! What the words of every figure get, whichever it is: that inputs are synthetic, that curves are the same, that a policy
//! is nothing but its window, that times differ at equal bytes, and the meaning of the words that are ours.

use super::chart::Chart;
use super::figures::Picture;
use super::{noise, text};
use crate::experiment::record::Record;
use std::collections::BTreeSet;

/// The words that are ours, and what they mean: the first table is for figures.
const GLOSSARY: &str = include_str!("../../docs/glossary.md");

/// Puts what a reader must know of the `records` behind a figure into its title and caption.
pub fn add(picture: &mut Picture, records: &[&Record], is_synthetic: bool) {
    let ids = picture.cell_ids();
    let mut behind: Vec<&Record> = records.to_vec();
    behind.retain(|record| ids.contains(record.cell_id.as_str()));
    let tight: BTreeSet<String> =
        behind.iter().filter(|record| text::is_only_protected(record)).map(|record| at_budget(record)).collect();
    let mut notes = text::only_protected(&Vec::from_iter(tight));
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

fn at_budget(record: &Record) -> String {
    let budget = record.cell.budget.as_ref().map_or(String::new(), |budget| format!(" at {budget}"));
    format!("{}{budget}", record.cell.chosen().unwrap_or_default())
}

/// Which curves lie on one another, as a sentence with a leading space; empty where none do.
fn identical(chart: &Chart) -> String {
    let places = |index: usize| chart.series[index].points.iter().map(|point| (point.x, point.y)).collect::<Vec<_>>();
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for index in (0..chart.series.len()).filter(|&index| places(index).iter().any(|(_, y)| y.is_some())) {
        match groups.iter_mut().find(|group| places(group[0]) == places(index)) {
            Some(group) => group.push(index),
            None => groups.push(vec![index]),
        }
    }
    let names = |group: &Vec<usize>| noise::listed(group.iter().map(|&at| chart.series[at].name.clone()).collect());
    let same: Vec<String> = groups.iter().filter(|group| group.len() > 1).map(names).collect();
    if same.is_empty() { String::new() } else { format!(" Identical at every point: {}.", same.join("; ")) }
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
