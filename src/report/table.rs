//! A table, as Markdown for the terminal and `summary.md`, and for the page.
//!
//! Lines are at most 100 columns wide where names allow it: those of policies are never cut, because policies differ in any
//! part of them, and others only as far as they stay apart.

use minijinja::{Value, context};
use std::collections::BTreeSet;

/// Width that no line passes but for the name of a policy, in characters.
pub const MOST_COLUMNS: usize = 100;
/// A name is not cut to less, even where a table then gets wider.
const LEAST_NAME: usize = 8;

/// Headings of the columns that hold words and may be shortened.
const NAMES: [&str; 3] = ["kernel", "trace", "strategy"];
/// Heading of the column that holds words and is shown whole.
const POLICY: &str = "policy";

/// A table with the words around it.
pub struct Table {
    /// What it is.
    pub heading: String,
    /// What its rows have in common; parts joined by `·`.
    pub subtitle: String,
    /// The first row has the headings of the columns. None at all where there is nothing to show.
    pub rows: Vec<Vec<String>>,
    /// What a reader must know, below it; parts joined by `·`.
    pub notes: Vec<String>,
}

impl Table {
    /// As Markdown.
    pub fn markdown(&self) -> String {
        let mut text = format!("### {}\n", self.heading);
        if !self.subtitle.is_empty() {
            text += &format!("\n{}\n", wrapped(&self.subtitle));
        }
        if !self.rows.is_empty() {
            text += &format!("\n{}", lines(self.rows.clone()));
        }
        self.notes.iter().for_each(|note| text += &format!("\n{}\n", wrapped(note)));
        text
    }

    /// As the page's template reads it.
    pub fn value(&self) -> Value {
        let headings = self.rows.first().into_iter().flatten();
        let headings = headings.map(|text| context! { text, words => is_words(text) }).collect::<Vec<_>>();
        let words: Vec<bool> = self.rows.first().into_iter().flatten().map(|text| is_words(text)).collect();
        let cell = |(text, words): (&String, &bool)| context! { text, words };
        let row = |row: &Vec<String>| row.iter().zip(&words).map(cell).collect::<Vec<_>>();
        let rows = self.rows.iter().skip(1).map(row).collect::<Vec<_>>();
        context! { heading => &self.heading, subtitle => &self.subtitle, headings, rows, notes => &self.notes }
    }
}

/// Whether a column of this heading holds words.
fn is_words(heading: &str) -> bool {
    NAMES.contains(&heading) || heading == POLICY
}

/// Rows, the first of them the headings, as aligned markdown. A column of names gives way when there is no room, unless two
/// names would then be one.
pub fn lines(mut rows: Vec<Vec<String>>) -> String {
    for cell in rows.iter_mut().flatten() {
        // A bar or a line break would end the cell.
        *cell = cell.replace('|', "/").replace(char::is_control, " ");
    }
    let width = |text: &String| text.chars().count();
    let mut widths: Vec<usize> =
        (0..rows[0].len()).map(|column| rows.iter().map(|row| width(&row[column])).max().unwrap_or(0)).collect();
    let over = (widths.iter().sum::<usize>() + 3 * widths.len() + 1).saturating_sub(MOST_COLUMNS);
    let is_name = |heading: &String| NAMES.contains(&heading.as_str());
    let is_words: Vec<bool> = rows[0].iter().map(|heading| is_words(heading)).collect();
    for (column, width) in widths.iter_mut().enumerate().filter(|(column, _)| is_name(&rows[0][*column])) {
        let less = width.saturating_sub(over).max(LEAST_NAME.min(*width));
        let names: BTreeSet<&str> = rows.iter().map(|row| &row[column][..]).collect();
        let cut: BTreeSet<String> = names.iter().map(|name| shortened(name, less)).collect();
        if cut.len() == names.len() {
            *width = less;
        }
    }
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        for ((cell, &width), is_words) in row.iter().zip(&widths).zip(&is_words) {
            let cell = shortened(cell, width);
            // Words to the left, numbers to the right.
            text += &if *is_words { format!("| {cell:<width$} ") } else { format!("| {cell:>width$} ") };
        }
        text += "|\n";
        if index == 0 {
            for (&width, is_words) in widths.iter().zip(&is_words) {
                let dashes = "-".repeat(width + 1);
                text += &if *is_words { format!("|{dashes}-") } else { format!("|{dashes}:") };
            }
            text += "|\n";
        }
    }
    text
}

/// `text` of parts joined by `·`, on as many lines as it takes.
pub fn wrapped(text: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    for part in text.split(" · ") {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 3 + part.chars().count() <= MOST_COLUMNS - 2 => {
                *line += &format!(" · {part}");
            }
            Some(line) => {
                *line += " ·";
                lines.extend(at_blanks(part));
            }
            None => lines.extend(at_blanks(part)),
        }
    }
    lines.join("\n")
}

/// A part on as many lines as it takes, broken between words; only a word that is longer than a line is shortened.
fn at_blanks(part: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in part.split(' ').map(|word| shortened(word, MOST_COLUMNS - 2)) {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= MOST_COLUMNS - 2 => {
                *line += &format!(" {word}");
            }
            _ => lines.push(word),
        }
    }
    lines
}

/// At most `most` characters of `text`, with a sign where something is missing: names differ at both ends, so it is
/// taken from the middle.
pub fn shortened(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.into();
    }
    let letters: Vec<char> = text.chars().collect();
    let left = most.saturating_sub(1) * 3 / 5;
    let right = most.saturating_sub(1) - left;
    letters[..left].iter().chain(&['…']).chain(&letters[letters.len() - right..]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_parts_are_broken_between_words_and_lose_none() {
        let reason = "out of memory: ".to_string() + &"so many bytes were requested of those that are there ".repeat(4);
        let text = wrapped(&format!("1 cell: {reason} · another"));
        assert!(text.lines().count() > 2 && text.lines().all(|line| line.chars().count() <= MOST_COLUMNS), "{text}");
        let words =
            |text: &str| text.split_whitespace().filter(|word| *word != "·").map(String::from).collect::<Vec<_>>();
        assert_eq!(words(&text), words(&format!("1 cell: {reason} another")));
        assert!(wrapped(&"x".repeat(200)).contains('…'));
    }

    #[test]
    fn names_are_shortened_only_while_they_stay_apart() {
        let of = |names: [&str; 2]| {
            let row = |name: &str| [vec![name.to_string()], vec!["1".repeat(18); 4]].concat();
            let headings = ["kernel", "a", "b", "c", "d"].map(String::from).to_vec();
            lines(vec![headings, row(names[0]), row(names[1])])
        };
        let apart = of(["decode 8/8 heads cache in q4_0", "decode 8/8 heads cache in int8"]);
        assert!(apart.contains("… q4_0 ") && apart.contains("… int8 "), "{apart}");
        let ends = ["kivi:bits=2,group=32,recent=128", "kivi:bits=4,group=32,recent=128"];
        let whole = of(ends);
        assert!(ends.iter().all(|name| whole.contains(name)), "{whole}");
    }
}
