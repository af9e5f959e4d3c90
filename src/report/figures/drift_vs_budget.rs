//! What is lost against what is kept: drift of the policies against the fraction of retained tokens.

use super::{Data, budget, budget_of_all, drift_at, kept_axis, kept_or_budget, policy, rounding};
use crate::report::chart::{Axis, Chart, Quantity};
use crate::report::naming::{CONTEXT, HEADS, KERNEL, Naming};

/// The figure.
pub fn chart(data: &Data) -> Option<Chart> {
    let records = data.evicted_at_longest_context();
    let naming = Naming::over(&records, &[CONTEXT, HEADS, KERNEL]);
    let series = data.series(&records, &naming, policy, budget, |record| drift_at(kept_or_budget(record)?, record));
    let (series, note) = rounding::split(series);
    (!series.is_empty()).then(|| Chart {
        id: "drift-vs-budget".into(),
        title: "Drift against budget".into(),
        subtitle: naming.common,
        caption: format!(
            "Relative L2 distance of the decoded outputs from the dense f64 result; lower is better. The oracle sees \
             the queries that are still to come: no policy is expected below it. The band is the bootstrap 95% \
             interval over queries, or the range over seeds.{note}"
        ),
        x: kept_axis(records.iter().any(|record| budget_of_all(record).is_some())),
        y: Axis { label: "drift (relative L2)".into(), field: "rel_l2", quantity: Quantity::Drift },
        interval_fields: ("ci95_low", "ci95_high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}
