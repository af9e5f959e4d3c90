//! A model that was told facts: right answers as more are written, through a memory and in the context.

use super::{Data, Reading};
use crate::experiment::cell::Cell;
use crate::experiment::measure::Measure;
use crate::experiment::record::Record;
use crate::report::chart::{Axis, Chart, Quantity};
use crate::report::naming::Naming;
use std::collections::BTreeSet;

/// Answers by the fact's value, for its stem.
pub fn by_facts(data: &Data) -> Option<Chart> {
    let records = data.of(Measure::EDIT);
    // Budgets are those of so many facts; several of these set a policy apart from itself.
    let bare = |record: &Record| Cell { budget: None, ..record.cell.clone() };
    let has_budgets = |record: &Record| {
        records.iter().any(|other| bare(other) == bare(record) && other.cell.budget != record.cell.budget)
    };
    let name = |record: &Record| {
        let budget = record.cell.budget.as_ref().filter(|_| has_budgets(record));
        format!("{}{}", record.cell.chosen().unwrap_or_default(), budget.map_or(String::new(), |one| format!("@{one}")))
    };
    let places = |record: &Record| {
        let alike = records.iter().filter(|other| name(other) == name(record) && other.cell.model == record.cell.model);
        alike.map(|other| other.cell.facts).collect::<BTreeSet<_>>().len()
    };
    let records: Vec<&Record> = records.iter().copied().filter(|record| places(record) > 1).collect();
    let models: BTreeSet<&str> = records.iter().filter_map(|record| record.cell.model.as_deref()).collect();
    let naming = Naming::over(&[], &[]);
    let lead = |record: &Record| match models.len() {
        1 => name(record),
        _ => format!("{} {}", name(record), record.cell.model.as_deref().unwrap_or_default()),
    };
    let reading = |record: &Record| {
        let found = record.edit.as_ref()?.stem;
        let facts = record.cell.facts? as f64;
        Some(Reading::measured(facts, found.mean, Some((found.ci95_low, found.ci95_high))))
    };
    let key = |record: &Record| record.cell.facts.unwrap_or(0).to_string();
    let series = data.series(&records, &naming, lead, key, reading);
    (!series.is_empty()).then(|| Chart {
        id: "answers-vs-facts".into(),
        title: "Answers about facts that a model was told".into(),
        subtitle: models.into_iter().collect::<Vec<_>>().join(" · "),
        caption: "Share of facts that are answered by their value when asked for by their stem. larimar: written into a memory whose \
                  read-out stands before the question; full: all facts in the context; policies: the same, evicted before a question \
                  is seen to a budget of as many bytes as the memory takes, from as many facts on as do not fit (whole pages may \
                  hold more: the bytes held stand in the table); nearest: the facts nearest to the question in the context. The band is Wilson's 95% interval over questions."
            .into(),
        x: Axis { label: "facts written".into(), field: "facts", quantity: Quantity::Count },
        y: Axis { label: "right answers".into(), field: "share", quantity: Quantity::Share },
        interval_fields: ("ci95_low", "ci95_high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}
