//! Stacked bars, before anything is drawn: parts of a whole, side by side, each with values beside it to compare with.
//!
//! The counterpart of [`super::chart`] for figures whose horizontal axis is a list of names.

use super::ReportError;
use super::chart::Axis;
use super::palette::Colour;
use super::summary;
use crate::experiment::record::Status;

/// A figure of stacked bars.
#[derive(Debug, Clone, PartialEq)]
pub struct Bars {
    /// Name of the file without its ending.
    pub id: String,
    /// What is compared, in a few words.
    pub title: String,
    /// Words below the title.
    pub subtitle: String,
    /// What a reader must know to read the figure rightly.
    pub caption: String,
    /// The vertical axis: [`super::chart::Quantity::Share`] where parts add up to 1.
    pub y: Axis,
    /// What a bar is made of, from below.
    pub parts: Vec<Part>,
    /// Words for the paler bars, and what their fields begin with in the table.
    pub paler_label: String,
    /// See [`Bars::paler_label`].
    pub paler_prefix: &'static str,
    /// Whether notes are part of a bar's name, and not numbers beside it.
    pub notes_name: bool,
    /// The bars; those of one group stand together in this order.
    pub bars: Vec<Bar>,
}

/// A part of every bar.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// Name in the legend.
    pub name: &'static str,
    /// Field of the record.
    pub field: &'static str,
    /// Colour.
    pub colour: Colour,
}

/// A bar.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// Words below all bars of a group.
    pub group: String,
    /// Words below the bar.
    pub name: String,
    /// Further words below the bar, one line each.
    pub notes: Vec<String>,
    /// Value of each part; nothing at all for a bar that was not measured.
    pub values: Vec<f64>,
    /// What each part is compared with, where there is something.
    pub paler: Vec<Option<f64>>,
    /// Ids of the cells behind the bar.
    pub cell_ids: Vec<String>,
}

impl Bars {
    /// The table behind the figure: a line for each bar, with the field names of the record; paler values have their prefix.
    ///
    /// # Errors
    /// [`ReportError::Csv`] when a line cannot be written.
    pub fn csv(&self) -> Result<String, ReportError> {
        let mut table = csv::Writer::from_writer(Vec::new());
        let fields = self.parts.iter().map(|part| part.field.to_string());
        let paler = self.parts.iter().map(|part| format!("{}{}", self.paler_prefix, part.field));
        let header = ["series", "status", "group"].map(String::from).into_iter().chain(fields).chain(paler);
        table.write_record(header.chain(["cells", "cell_ids"].map(String::from)))?;
        for bar in &self.bars {
            let number = |value: Option<f64>| value.map(|value| value.to_string()).unwrap_or_default();
            let status = if bar.values.is_empty() { Status::Oom } else { Status::Ok };
            let name =
                [vec![bar.name.clone()], bar.notes.iter().filter(|_| self.notes_name).cloned().collect()].concat();
            let mut line = vec![name.join(" "), summary::status(status).into(), bar.group.clone()];
            line.extend((0..self.parts.len()).map(|part| number(bar.values.get(part).copied())));
            line.extend((0..self.parts.len()).map(|part| number(bar.paler.get(part).copied().flatten())));
            line.extend([bar.cell_ids.len().to_string(), bar.cell_ids.join(" ")]);
            table.write_record(line)?;
        }
        super::csv::text(table)
    }
}
