//! What a whole model takes against context: peak memory, time to the first token, time of a token.

use super::{Data, Reading, band};
use crate::experiment::measure::Measure;
use crate::experiment::record::Record;
use crate::report::chart::{Axis, Chart, Quantity};
use crate::report::naming::{BUDGET, HEADS, KERNEL, Naming, SAMPLES};

/// Peak memory, weights included.
pub fn memory(data: &Data) -> Option<Chart> {
    let axis = Axis { label: "peak memory".into(), field: "peak_bytes", quantity: Quantity::Bytes };
    let caption = "Peak that the arena measured while the policy ran alone, weights included.";
    let read = |record: &Record| {
        let bytes = record.memory.as_ref()?.peak_bytes as f64;
        Some(Reading::measured(record.cell.context_tokens as f64, bytes, None))
    };
    chart(data, ["model-memory-vs-context", "Memory of a model", caption], axis, read)
}

/// Time to the first token.
pub fn first_token(data: &Data) -> Option<Chart> {
    let caption = format!(
        "From the start to the first token of the answer, while the policy ran alone: reading the context, evicting from it, \
         reading the question. Medians over samples; {}.",
        band()
    );
    chart(data, ["first-token-vs-context", "Time to the first token", &caption], time(), |record| {
        phase(record, "first_token")
    })
}

/// Time of a token.
pub fn step(data: &Data) -> Option<Chart> {
    let caption =
        format!("Between one token of an answer and the next, while the policy ran alone. Medians; {}.", band());
    chart(data, ["token-vs-context", "Time of a token", &caption], time(), |record| phase(record, "decode"))
}

fn time() -> Axis {
    Axis { label: "median time".into(), field: "median_ns", quantity: Quantity::Nanoseconds }
}

fn phase(record: &Record, phase: &str) -> Option<Reading> {
    Some(Reading::latency(record.cell.context_tokens as f64, record.latency.get(phase)?))
}

fn chart(
    data: &Data,
    [id, title, caption]: [&str; 3],
    y: Axis,
    read: impl Fn(&Record) -> Option<Reading>,
) -> Option<Chart> {
    let mut records = data.over_contexts(Measure::EVAL);
    records.retain(|record| record.answers.is_some());
    let naming = Naming::over(&records, &[BUDGET, SAMPLES, HEADS, KERNEL]);
    let key = |record: &Record| record.cell.context_tokens.to_string();
    let lead = |record: &Record| record.cell.chosen().unwrap_or("full").to_string();
    let series = data.series(&records, &naming, lead, key, read);
    (!series.is_empty()).then(|| Chart {
        id: id.into(),
        title: title.into(),
        subtitle: naming.common.clone(),
        caption: format!("{caption} Tasks are one point, with their range."),
        x: Axis { label: "context (tokens)".into(), field: "context_tokens", quantity: Quantity::Tokens },
        y,
        interval_fields: ("low", "high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}
