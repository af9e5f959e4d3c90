//! The planner's answers as text of at most 100 columns.

use kvsieve::planner::{Phase, Scenario, Waterfall};
use kvsieve::units::{gb, gib, grouped};
use std::fmt::Write;

/// Columns of a terminal.
const WIDTH: usize = 100;

/// Lines of at most [`WIDTH`] columns, broken between words, each beginning with `indent`.
pub fn wrapped(text: &str, indent: &str) -> String {
    let mut lines = String::new();
    let mut line = String::new();
    for word in text.split_whitespace() {
        if !line.is_empty() && indent.chars().count() + line.chars().count() + 1 + word.chars().count() > WIDTH {
            let _ = writeln!(lines, "{indent}{line}");
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    let _ = writeln!(lines, "{indent}{line}");
    lines
}

/// A table whose first column is left-aligned and whose others are right-aligned, but for the last ones in `left`.
pub fn table(rows: &[Vec<String>], left: usize) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().enumerate().map(|(column, cell)| {
            let pad = " ".repeat(widths[column] - cell.chars().count());
            if column == 0 || column + left >= columns { format!("{cell}{pad}") } else { format!("{pad}{cell}") }
        });
        let _ = writeln!(text, "{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
    text
}

/// The waterfall: a line for each term, its sums, how each is known, and the verdict.
pub fn waterfall(scenario: &Scenario<'_>, waterfall: &Waterfall) -> String {
    let of = |bytes: u64| if bytes == 0 { "-".into() } else { gib(u128::from(bytes)) };
    let heading = ["GiB", "load", "prefill", "decode", "known by"].map(String::from).to_vec();
    let mut rows = vec![heading];
    for term in &waterfall.terms {
        let known = format!("{:?}", term.known).to_lowercase();
        let cells = Phase::ALL.map(|phase| of(term.bytes(phase)));
        rows.push([vec![term.term.into()], cells.to_vec(), vec![known]].concat());
    }
    let sum = |name: &str, unit: fn(u128) -> String| {
        let sums = waterfall.total_bytes.map(|bytes| unit(u128::from(bytes)));
        [vec![name.to_string()], sums.to_vec()].concat()
    };
    rows.extend([sum("total", gib), sum("total, GB", gb)]);
    let there = u128::from(waterfall.available_bytes);
    let available = |name: &str, value: String| vec![name.to_string(), value.clone(), value.clone(), value];
    rows.extend([available("available", gib(there)), available("available, GB", gb(there))]);
    let mut text = wrapped(&scenario.words(), "");
    let _ = write!(text, "\n{}\n", table(&rows, 1));
    for term in &waterfall.terms {
        let line = format!("{} = {}: {}", term.term, term.formula, term.numbers);
        text.push_str(&wrapped(&line, "  "));
    }
    let _ = write!(text, "\n{}", wrapped(&waterfall.verdict, ""));
    text
}

/// Bytes a token's keys and values take, and how many fit.
pub fn most(scenario: &Scenario<'_>, what: &str, most: Option<u64>) -> String {
    let answer = match most {
        Some(most) => format!("{} {what}", grouped(u128::from(most))),
        None => format!("not one: weights and context alone take {} GiB", gib(scenario.weight_bytes() + u128::from(scenario.overhead_bytes))),
    };
    format!("{}{answer}\n", wrapped(&scenario.words(), ""))
}
