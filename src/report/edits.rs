//! What a model answered about facts that it was told, in the tables.

use super::summary::status;
use super::table::Table;
use super::text::{self, NOTHING};
use crate::experiment::answers::Estimate;
use crate::experiment::edited::Edited;
use crate::experiment::record::{Record, Status};
use crate::units;
use std::collections::BTreeSet;

/// A table for each comparison, so that all lines of it are answers to the same questions.
pub fn tables(records: &[&Record]) -> Vec<Table> {
    let mut comparisons: Vec<Vec<&Record>> = Vec::new();
    for &record in records {
        let own = record.cell.without_choice();
        match comparisons.iter_mut().find(|of| of[0].cell.without_choice() == own) {
            Some(of) => of.push(record),
            None => comparisons.push(vec![record]),
        }
    }
    comparisons.iter().map(|records| table(records)).collect()
}

fn table(records: &[&Record]) -> Table {
    let cell = &records[0].cell;
    let facts = cell.facts.unwrap_or(0);
    let episodes = cell.samples.unwrap_or(0);
    let headings =
        ["policy", "stem", "in other words", "new", "old", "forgotten", "never", "unchanged", "held", "edit"];
    let budgets: BTreeSet<&str> = records.iter().filter_map(|record| record.cell.budget.as_deref()).collect();
    let name = |record: &Record| {
        let policy = record.cell.chosen().unwrap_or(NOTHING);
        let budget = record.cell.budget.as_ref().filter(|_| budgets.len() > 1);
        budget.map_or(policy.into(), |budget| format!("{policy}@{budget}"))
    };
    let lines = records.iter().map(|record| line(name(record), record));
    let rows = std::iter::once(headings.map(String::from).to_vec()).chain(lines);
    let model = cell.model.as_deref().unwrap_or_default();
    // What all that evict are given, they need not say themselves.
    let budget = budgets.first().filter(|_| budgets.len() == 1).map_or(String::new(), |one| format!(" · budget {one}"));
    Table {
        heading: format!("edit, {facts} facts"),
        subtitle: format!("{model} · {episodes} episodes · seed {}{budget}", cell.seed),
        rows: rows.collect(),
        notes: vec![
            "percent of answers that are: the value of a fact, by its stem and in other words · of replaced facts the new \
             and the old value · of forgotten and of never-written ones what they were or would have been · of other \
             questions and sentences what the model alone says · behind the stroke without the scope detector"
                .into(),
        ],
    }
}

/// A line; the status stands in the place of the first number.
fn line(name: String, record: &Record) -> Vec<String> {
    let found = record.edit.as_ref().filter(|_| record.status == Status::Ok);
    let share = |read: fn(&Edited) -> Option<Estimate>| {
        found.and_then(read).map_or(NOTHING.into(), |share| text::percent(share.mean))
    };
    let unscoped = found.and_then(|found| found.unchanged_unscoped);
    let unscoped = unscoped.map_or(String::new(), |share| format!("/{}", text::percent(share.mean)));
    let edit = record.latency.get("edit").filter(|_| record.status == Status::Ok);
    let edit = edit.map_or(NOTHING.into(), |edit| units::nanoseconds(edit.median_ns));
    vec![
        name,
        if record.status == Status::Ok { share(|found| Some(found.stem)) } else { status(record.status).into() },
        share(|found| Some(found.rephrased)),
        share(|found| Some(found.replaced)),
        share(|found| Some(found.replaced_old)),
        share(|found| Some(found.forgotten)),
        share(|found| Some(found.never_written)),
        share(|found| Some(found.unchanged)) + &unscoped,
        found.map_or(NOTHING.into(), |found| units::bytes(found.held_bytes)),
        edit,
    ]
}
