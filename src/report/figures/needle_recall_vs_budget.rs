//! Whether what mattered stayed: needles that late queries still find, against the fraction of retained tokens.

use super::{Data, Reading, budget, budget_of_all, kept_axis, kept_or_budget, policy};
use crate::report::chart::{Axis, Chart, Quantity};
use crate::report::naming::{CONTEXT, HEADS, KERNEL, Naming};

/// The figure.
pub fn chart(data: &Data) -> Option<Chart> {
    let records = data.evicted_at_longest_context();
    let naming = Naming::over(&records, &[CONTEXT, HEADS, KERNEL]);
    let series = data.series(&records, &naming, policy, budget, |record| {
        let eviction = record.eviction.as_ref()?;
        Some(Reading::measured(kept_or_budget(record)?, eviction.needle_recall?, None))
    });
    (!series.is_empty()).then(|| Chart {
        id: "needle-recall-vs-budget".into(),
        title: "Needle recall against budget".into(),
        subtitle: naming.common,
        caption:
            "Fraction of the planted needles whose value a late query still retrieves; higher is better. A band is \
                  the range over seeds."
                .into(),
        x: kept_axis(records.iter().any(|record| budget_of_all(record).is_some())),
        y: Axis { label: "needles found".into(), field: "needle_recall", quantity: Quantity::Share },
        interval_fields: ("low", "high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}
