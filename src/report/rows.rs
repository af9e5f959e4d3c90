//! A figure with a name on each line: values of several kinds beside every policy, as bars or as dots.
//!
//! Names of policies are long and there are many of them. On lines of their own they need no legend and no turned
//! head, and the figure grows downwards with their number.

use super::chart::{Axis, Rule};
use super::palette::Colour;

/// The figure.
#[derive(Debug, Clone, PartialEq)]
pub struct Rows {
    /// Name of the file without its ending.
    pub id: String,
    /// What is compared, in a few words.
    pub title: String,
    /// What all rows have in common.
    pub subtitle: String,
    /// What a reader must know to read the figure rightly.
    pub caption: String,
    /// What the values are.
    pub axis: Axis,
    /// How a value is drawn.
    pub mark: Mark,
    /// The kinds of value, in the order of [`Row::values`].
    pub kinds: Vec<Kind>,
    /// The lines, from top to bottom.
    pub rows: Vec<Row>,
    /// A line across all of them, to compare with.
    pub limit: Option<Rule>,
}

/// How a value is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// From 0 to the value, one bar below the other.
    Bar,
    /// At the value, all on one line.
    Dot,
    /// One behind the other on one line, with their sum behind the last.
    Stack,
    /// From where the line above ended to the value.
    Fall,
}

/// One kind of value.
#[derive(Debug, Clone, PartialEq)]
pub struct Kind {
    /// Name in the legend and in the CSV.
    pub name: String,
    /// Colour of its marks.
    pub colour: Colour,
}

/// One line.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Name on the left and in the CSV.
    pub name: String,
    /// A value of each kind and the cells behind it; `None` where there is none.
    pub values: Vec<Option<(f64, Vec<String>)>>,
}

impl Rows {
    /// Every value that the axis must hold.
    pub fn values(&self) -> impl Iterator<Item = f64> {
        let of = |row: &Row| -> Vec<f64> {
            let values = row.values.iter().flatten().map(|(value, _)| *value);
            if self.mark == Mark::Stack { vec![values.sum()] } else { values.collect() }
        };
        self.rows.iter().flat_map(of).chain(self.limit.iter().map(|limit| limit.y))
    }
}
