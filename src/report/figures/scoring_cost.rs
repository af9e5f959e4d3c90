//! What choosing costs: time of scoring and evicting relative to prefill.

use super::{Data, Reading, context, policy};
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::report::chart::{Axis, Chart, Quantity};
use crate::report::naming::{HEADS, KERNEL, Naming};
use crate::report::palette;

/// The figure.
pub fn chart(data: &Data) -> Option<Chart> {
    let mut records = data.over_contexts(Measure::EVICT);
    // Looking into the future costs a policy nothing that could be measured.
    let chooses = |name: &str| !palette::is_baseline(name) && !palette::is_oracle(name);
    records.retain(|record| record.status == Status::Ok && chooses(&policy(record)));
    let naming = Naming::over(&records, &[HEADS, KERNEL]);
    let series = data.series(&records, &naming, policy, context, read);
    (!series.is_empty()).then(|| Chart {
        id: "scoring-cost".into(),
        title: "Cost of scoring and evicting, relative to prefill".into(),
        subtitle: naming.common,
        caption: "Median time of scoring plus median time of evicting, as a percentage of the median time of prefill \
                  in the same cell; lower is better. A point is the median over budgets and seeds, the band their \
                  range."
            .into(),
        x: Axis { label: "context (tokens)".into(), field: "context_tokens", quantity: Quantity::Tokens },
        y: Axis {
            label: "scoring + evicting, % of prefill".into(),
            field: "score_and_evict_per_prefill",
            quantity: Quantity::Cost,
        },
        interval_fields: ("low", "high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}

fn read(record: &Record) -> Option<Reading> {
    let phase = |name: &str| record.latency.get(name).map(|latency| latency.median_ns);
    let (score, evict) = (phase("score"), phase("evict"));
    // A policy that needs no scores still evicts, and the other way round.
    let spent = score.or(evict).map(|_| score.unwrap_or(0.0) + evict.unwrap_or(0.0))?;
    Some(Reading::measured(record.cell.context_tokens as f64, spent / phase("prefill")?, None))
}
