//! The figure and the table of a model's anatomy: maps of layers by heads, and all numbers as CSV.

use super::heat::{Across, Heat, Panel};
use super::{ReportError, csv, draw, files};
use crate::anatomy::{Anatomy, FIRST, LAST, MASS, Retrieval};
use std::path::Path;

/// A policy and its budget, and the fraction of needles that it retains, `[layers][Hkv]`.
pub type Retained = (String, Vec<Vec<f64>>);

/// Writes `anatomy.svg` and `anatomy.csv` into a folder.
///
/// # Errors
/// When a file cannot be written.
pub fn write(
    folder: &Path,
    model: &str,
    anatomy: &Anatomy,
    retrieval: &Retrieval,
    retained: &[Retained],
) -> Result<(), ReportError> {
    files::replace(&folder.join("anatomy.svg"), &draw::heat(&heat(model, anatomy, retrieval, retained))?)?;
    files::replace(&folder.join("anatomy.csv"), &table(anatomy, retrieval, retained)?)
}

fn heat(model: &str, anatomy: &Anatomy, retrieval: &Retrieval, retained: &[Retained]) -> Heat {
    let map = |name: String, value: &dyn Fn(usize, usize) -> f64| {
        let row = |(layer, heads): (usize, &Vec<_>)| {
            (format!("{layer}"), (0..heads.len()).map(|head| value(layer, head)).collect())
        };
        Panel::of_cell(name, anatomy.heads.iter().enumerate().map(row).collect(), "")
    };
    let heads = &anatomy.heads;
    let group = heads[0].len() / anatomy.kv_heads[0].len();
    let mut panels = vec![
        map(format!("first {FIRST} tokens"), &|layer, head| heads[layer][head].first_mass),
        map(format!("latest {LAST} tokens"), &|layer, head| heads[layer][head].last_mass),
        map(format!("tokens for {:.0}%", 100.0 * MASS), &|layer, head| heads[layer][head].fraction_for_mass),
        map("copied needles".into(), &|layer, head| retrieval.scores[layer][head]),
    ];
    let of_policy = |(policy, retained): &Retained| {
        map(format!("retained by {policy}"), &|layer, head| retained[layer][head / group])
    };
    panels.extend(retained.iter().map(of_policy));
    Heat {
        id: "anatomy".into(),
        title: format!("Where the heads of {model} look"),
        subtitle: format!(
            "a row for each layer, a field for each query head; {} tokens of text, {} tokens of needles to copy{}",
            anatomy.tokens,
            retrieval.steps,
            if retained.is_empty() { "" } else { " or to retain" }
        ),
        caption: String::new(),
        across: Across::Heads,
        down: "layer",
        ends: ("none", "all"),
        field: "fraction",
        panels,
    }
}

/// A line for each query head, with what its KV head's first tokens are like and what policies retain there.
fn table(anatomy: &Anatomy, retrieval: &Retrieval, retained: &[Retained]) -> Result<String, ReportError> {
    let mut table = ::csv::Writer::from_writer(Vec::new());
    let fields = [
        "layer",
        "head",
        "kv_head",
        "first_mass",
        "last_mass",
        "entropy_nats",
        "tokens_for_mass",
        "fraction_for_mass",
        "retrieval_score",
        "first_key_norm",
        "first_value_norm",
    ];
    let of_policies = retained.iter().map(|(policy, _)| format!("needles_retained {policy}"));
    table.write_record(fields.map(String::from).into_iter().chain(of_policies))?;
    for (layer, heads) in anatomy.heads.iter().enumerate() {
        let kv_heads = &anatomy.kv_heads[layer];
        for (head, of) in heads.iter().enumerate() {
            let kv_head = head / (heads.len() / kv_heads.len());
            let numbers = [
                of.first_mass,
                of.last_mass,
                of.entropy_nats,
                of.tokens_for_mass,
                of.fraction_for_mass,
                retrieval.scores[layer][head],
                kv_heads[kv_head].first_key_norm,
                kv_heads[kv_head].first_value_norm,
            ];
            let places = [layer, head, kv_head].map(|place| place.to_string());
            let numbers = numbers.into_iter().chain(retained.iter().map(|(_, retained)| retained[layer][kv_head]));
            table.write_record(places.into_iter().chain(numbers.map(|number| format!("{number:.5}"))))?;
        }
    }
    csv::text(table)
}
