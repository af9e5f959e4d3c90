//! A figure of small heat maps, one for each policy: a fraction from 0 to 1 in every field of a rectangle.

/// The figure.
#[derive(Debug, Clone, PartialEq)]
pub struct Heat {
    /// Name of the file without its ending.
    pub id: String,
    /// What is compared, in a few words.
    pub title: String,
    /// What all panels have in common.
    pub subtitle: String,
    /// What a reader must know to read the figure rightly.
    pub caption: String,
    /// What the fields of a row stand for, from left to right.
    pub across: Across,
    /// What the rows of a panel are, from top to bottom.
    pub down: &'static str,
    /// What 0 and 1 mean, in a word each.
    pub ends: (&'static str, &'static str),
    /// Name of the value, as in the record.
    pub field: &'static str,
    /// One map for each policy.
    pub panels: Vec<Panel>,
}

/// What lies from left to right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Across {
    /// Equal bins of a context of so many tokens.
    Positions(usize),
    /// KV heads; there are few, so each field says its value in words.
    Heads,
    /// Contexts of so many tokens; there are few of these too.
    Contexts(Vec<usize>),
}

impl Across {
    /// What lies there, in words.
    pub fn words(&self) -> &'static str {
        match self {
            Across::Positions(_) => "position in the context (tokens)",
            Across::Heads => "head",
            Across::Contexts(_) => "context (tokens)",
        }
    }
}

/// One heat map.
#[derive(Debug, Clone, PartialEq)]
pub struct Panel {
    /// The policy.
    pub name: String,
    /// Rows from top to bottom: a name, and the value of each field, NaN where nothing is known.
    pub rows: Vec<(String, Vec<f64>)>,
    /// The cells behind each field, row by row.
    pub cell_ids: Vec<Vec<Vec<String>>>,
    /// Samples behind each field, row by row; empty where a field is not a mean over samples.
    pub samples: Vec<Vec<usize>>,
}

impl Panel {
    /// One that is drawn of one cell.
    pub fn of_cell(name: String, rows: Vec<(String, Vec<f64>)>, cell_id: &str) -> Self {
        let cell_ids = rows.iter().map(|(_, values)| vec![vec![cell_id.into()]; values.len()]).collect();
        Panel { name, rows, cell_ids, samples: Vec::new() }
    }
}
