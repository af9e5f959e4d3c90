//! What the modes of memories in place of the cache hold, layer by layer: tokens, age, and how alike these are.

use super::{Data, Reading};
use crate::experiment::measure::Measure;
use crate::experiment::record::Record;
use crate::memories::Modes;
use crate::report::chart::{Axis, Chart, Quantity};
use crate::report::naming::{CONTEXT, HEADS, KERNEL, Naming, SAMPLES};
use crate::report::pools::is_text;

/// Tokens of a mode.
pub fn tokens(data: &Data) -> Option<Chart> {
    let y = Axis { label: "tokens of a mode (mean)".into(), field: "tokens", quantity: Quantity::Count };
    let words = ["modes-tokens", "Tokens that modes hold, by layer"];
    let caption =
        "Mean over the modes of a layer's KV heads, behind the context. Tokens of modes that were replaced are gone.";
    chart(data, words, caption, y, |modes| Some(modes.tokens))
}

/// Tokens since a mode was written to.
pub fn age(data: &Data) -> Option<Chart> {
    let y = Axis { label: "age of a mode (tokens)".into(), field: "age_tokens", quantity: Quantity::Tokens };
    let words = ["modes-age", "Age of modes, by layer"];
    let caption = "Tokens that were written since a token was last taken into a mode, mean over the modes of a layer's KV \
                   heads, behind the context.";
    chart(data, words, caption, y, |modes| Some(modes.age_tokens))
}

/// Similarity of the tokens of a mode.
pub fn likeness(data: &Data) -> Option<Chart> {
    let y = Axis { label: "cosine with the mode".into(), field: "likeness", quantity: Quantity::Share };
    let words = ["modes-likeness", "How alike the tokens of a mode are, by layer"];
    let caption = "Mean cosine of the key of a token with that of the mode that it was taken into, as the mode was before. \
                   1 is the same direction; no token below the threshold is taken in.";
    chart(data, words, caption, y, |modes| modes.likeness)
}

/// By layer, of the memories that took a token in, at the longest context: of texts where there are any, or else the median
/// over tasks.
fn chart(
    data: &Data,
    [id, title]: [&str; 2],
    caption: &str,
    y: Axis,
    value: impl Fn(&Modes) -> Option<f64>,
) -> Option<Chart> {
    let mut records = data.of(Measure::EVAL);
    records.retain(|record| modes(record).iter().any(|modes| modes.likeness.is_some()));
    if records.iter().any(|record| is_text(record)) {
        records.retain(|record| is_text(record));
    }
    let longest = records.iter().map(|record| record.cell.context_tokens).max();
    records.retain(|record| Some(record.cell.context_tokens) == longest);
    let naming = Naming::over(&records, &[CONTEXT, HEADS, KERNEL, SAMPLES]);
    let lead = |record: &Record| record.cell.memory.clone().unwrap_or_default();
    let series = data.series_of(&records, &naming, lead, |record| {
        let reading = |(layer, modes): (usize, &Modes)| {
            Some((layer.to_string(), Reading::measured(layer as f64, value(modes)?, None)))
        };
        modes(record).iter().enumerate().filter_map(reading).collect::<Vec<_>>()
    });
    (!series.is_empty()).then(|| Chart {
        id: id.into(),
        title: title.into(),
        subtitle: naming.common,
        caption: format!("{caption} Of several tasks their median, with the band from the least to the most."),
        x: Axis { label: "layer".into(), field: "layer", quantity: Quantity::Steps },
        y,
        interval_fields: ("low", "high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}

fn modes(record: &Record) -> &[Modes] {
    record.answers.as_ref().map_or(&[], |answers| &answers.modes_by_layer)
}
