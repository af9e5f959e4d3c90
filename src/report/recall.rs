//! What memories of facts recalled, in the tables.

use super::summary::status;
use super::text::{self, NOTHING};
use crate::experiment::answers::Estimate;
use crate::experiment::recalled::Recalled;
use crate::experiment::record::{Record, Status};
use crate::units;
use minijinja::{Value, context};

/// What an `ok` cell recalled.
fn recalled(record: &Record) -> Option<&Recalled> {
    record.recall.as_ref().filter(|_| record.status == Status::Ok)
}

/// Mean of an estimate, in percent.
fn share(record: &Record, read: fn(&Recalled) -> Option<Estimate>) -> String {
    recalled(record).and_then(read).map_or(NOTHING.into(), |found| text::percent(found.mean))
}

/// Mean and interval, in percent.
fn interval(record: &Record, read: fn(&Recalled) -> Option<Estimate>) -> String {
    let words = |found: Estimate| {
        format!(
            "{} ({} to {})",
            text::percent(found.mean),
            text::percent(found.ci95_low),
            text::percent(found.ci95_high)
        )
    };
    recalled(record).and_then(read).map_or(NOTHING.into(), words)
}

/// Headings of the table in `summary.md`.
pub const HEADINGS: [&str; 8] = ["memory", "episode", "kept", "new", "old", "never", "answers", "held"];

/// A line of the table in `summary.md`, whose memory `apart` sets apart; `answers` are the answered cues about kept and about
/// never-written facts.
pub fn line(record: &Record, apart: &str) -> Vec<String> {
    let kept = match record.status {
        Status::Ok => share(record, |found| found.kept),
        other => status(other).into(),
    };
    let answers = [share(record, |found| found.answered_kept), share(record, |found| Some(found.answered_unwritten))];
    vec![
        format!("{}{apart}", record.cell.memory.as_deref().unwrap_or_default()),
        record.cell.episode.clone().unwrap_or_default(),
        kept,
        share(record, |found| found.changed),
        share(record, |found| found.old),
        share(record, |found| Some(found.unwritten)),
        answers.join("/"),
        recalled(record).map_or(NOTHING.into(), |found| units::bytes(found.held_bytes)),
    ]
}

/// Lines of the page's table.
pub fn rows(records: &[&Record]) -> Vec<Value> {
    let row = |record: &&Record| {
        context! {
            cell_id => &record.cell_id,
            status => status(record.status),
            memory => &record.cell.memory,
            episode => &record.cell.episode,
            seed => record.cell.seed,
            kept => interval(record, |found| found.kept),
            changed => interval(record, |found| found.changed),
            old => interval(record, |found| found.old),
            refused => share(record, |found| found.refused),
            unwritten => interval(record, |found| Some(found.unwritten)),
            answered_kept => share(record, |found| found.answered_kept),
            answered_changed => share(record, |found| found.answered_changed),
            answered_unwritten => share(record, |found| Some(found.answered_unwritten)),
            auc => share(record, |found| found.scope_auc),
            held => recalled(record).map_or(NOTHING.into(), |found| units::bytes(found.held_bytes)),
            peak => text::peak(record),
        }
    };
    records.iter().map(row).collect()
}
