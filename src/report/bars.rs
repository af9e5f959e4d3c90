//! Stacked bars, before anything is drawn: shares of a whole, side by side, each with printed values to compare with.
//!
//! The counterpart of [`super::chart`] for figures whose horizontal axis is a list of names.

use super::ReportError;
use super::palette::Colour;

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
    /// Words over the vertical axis.
    pub y_label: String,
    /// What a bar is made of, from below.
    pub parts: Vec<Part>,
    /// Words for the paler bars of printed values.
    pub printed_label: String,
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
    /// Fraction of each part, adding up to 1.
    pub shares: Vec<f64>,
    /// Printed share of each part, where there is one.
    pub printed: Vec<Option<f64>>,
    /// Ids of the cells behind the bar.
    pub cell_ids: Vec<String>,
}

impl Bars {
    /// The table behind the figure: a line for each bar, with the field names of the record; printed values have the
    /// prefix `published_`.
    ///
    /// # Errors
    /// [`ReportError::Csv`] when a line cannot be written.
    pub fn csv(&self) -> Result<String, ReportError> {
        let mut table = csv::Writer::from_writer(Vec::new());
        let fields = self.parts.iter().map(|part| part.field.to_string());
        let printed = self.parts.iter().map(|part| format!("published_{}", part.field));
        let header = ["series", "status", "group"].map(String::from).into_iter().chain(fields).chain(printed);
        table.write_record(header.chain(["cells", "cell_ids"].map(String::from)))?;
        for bar in &self.bars {
            let number = |value: Option<f64>| value.map(|value| value.to_string()).unwrap_or_default();
            let mut line = vec![bar.name.clone(), "ok".into(), bar.group.clone()];
            line.extend(bar.shares.iter().map(|share| number(Some(*share))));
            line.extend(bar.printed.iter().copied().map(number));
            line.extend([bar.cell_ids.len().to_string(), bar.cell_ids.join(" ")]);
            table.write_record(line)?;
        }
        let bytes = table.into_inner().map_err(|error| csv::Error::from(error.into_error()))?;
        Ok(String::from_utf8(bytes).expect("every field is text"))
    }
}
