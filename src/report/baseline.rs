//! What a cell is compared with: the same cell with the kernel `naive`, or with the policy `full`, plain keys and values, activations
//! as they are and the weights of the model's files, or, where these are not there, `full` in its own formats; with one rank.

use super::{palette, text, workers};
use crate::experiment::cell::Cell;
use crate::experiment::measure::Choice;
use crate::experiment::record::{Record, Status};

/// The `ok` baseline of `record` among `records`; `None` when there is none.
pub fn of<'a>(record: &Record, records: &[&'a Record]) -> Option<&'a Record> {
    let wanted = record.cell.without_choice();
    // First what is quick to compare and sets most cells apart, so that runs of many thousands are drawn in a moment.
    let shape =
        |record: &Record| (record.cell.context_tokens, record.cell.seed, record.cell.q_heads, record.cell.measure);
    let of_shape = records.iter().copied().filter(|other| shape(other) == shape(record));
    let candidates = of_shape.filter(|other| other.status == Status::Ok && is_one(other));
    // A resumed run may have come to another machine: times of two devices are never compared.
    let compared = |other: &&&Record| workers::same_machine(other, record) && other.cell.without_choice() == wanted;
    let mut candidates: Vec<&Record> = candidates.filter(|other| compared(&other)).collect();
    let formats = |cell: &Cell| (cell.weights.is_some(), cell.activations.is_some(), cell.kv_format.is_some());
    candidates.sort_by_key(|other| formats(&other.cell));
    let fits = |other: &&&Record| {
        let (theirs, ours) = (&other.cell, &record.cell);
        theirs.kv_format.is_none_or(|format| Some(format) == ours.kv_format)
            && theirs.activations.is_none_or(|format| Some(format) == ours.activations)
            && theirs.weights.as_ref().is_none_or(|weights| Some(weights) == ours.weights.as_ref())
    };
    candidates.iter().find(fits).copied()
}

/// Whether a cell is a baseline itself.
pub fn is_one(record: &Record) -> bool {
    match record.cell.measure.compares() {
        Choice::Policy => record.cell.policy.as_deref().is_some_and(palette::is_baseline),
        Choice::Kernel => palette::is_baseline(&record.cell.kernel),
        Choice::Strategy | Choice::Tuning => false,
        Choice::Ranks => record.cell.ranks.as_deref().is_some_and(|ranks| ranks.ends_with(":1")),
    }
}

/// How many times faster `record` is than its baseline, by the medians of the phase it is measured for.
pub fn speed_up(record: &Record, records: &[&Record]) -> Option<f64> {
    if record.status != Status::Ok {
        return None;
    }
    let theirs = text::main_phase(of(record, records)?)?.median_ns;
    Some(theirs / text::main_phase(record)?.median_ns).filter(|ratio| ratio.is_finite())
}
