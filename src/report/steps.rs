//! Steps of training over ranks as a table: what the rank that holds most holds by label, what is sent, and what a way to share out costs
//! in time.

use super::summary::{marked, status};
use super::text::{self, NOTHING};
use super::workers;
use crate::experiment::record::{Record, Status};
use crate::experiment::stats::median_with_interval;
use crate::memory::{Label, LabelBytes};
use crate::train::steps::SharedOut;
use crate::units;

/// Headings of the columns.
pub const HEADINGS: [&str; 10] =
    ["ranks", "weights", "gradients", "optimizer", "activations", "off by", "sent", "step", "±", "against"];
/// What the last columns are, below the heading.
pub const WORDS: &str = "peaks of the rank that holds most; with ~ by the formula · off by: peak less formula, of all ranks and labels \
                         the most · against: a step's time by that with the averages in memory, or else of stage 0, of the same \
                         ranks; the median of ratios of steps taken in turn, with its 95% interval";

/// How training is shared out in a cell.
fn shared(record: &Record) -> Option<SharedOut> {
    record.cell.ranks.as_deref()?.parse().ok()
}

/// The columns of a cell.
pub fn line(record: &Record, records: &[&Record]) -> Vec<String> {
    let name = shared(record).map_or(NOTHING.into(), |shared| shared.to_string());
    let is_ok = record.status == Status::Ok;
    let nothing = || NOTHING.to_string();
    let fullest = record.ranks.iter().max_by_key(|rank| (rank.peak_bytes, rank.predicted_peak_bytes));
    let of = |label: Label| match (fullest, record.status) {
        (Some(rank), Status::Ok) => rank.peak_by_label.get(&label).map_or_else(nothing, |bytes| units::bytes(*bytes)),
        (Some(rank), Status::Oom) => {
            rank.predicted_by_label.get(&label).map_or_else(nothing, |bytes| format!("~{}", units::bytes(*bytes)))
        }
        _ => nothing(),
    };
    let off = record.ranks.iter().flat_map(|rank| {
        let label = |label: Label| {
            let of = |bytes: &LabelBytes| bytes.get(&label).copied().unwrap_or(0);
            of(&rank.peak_by_label).abs_diff(of(&rank.predicted_by_label))
        };
        Label::ALL.map(label)
    });
    let step = text::main_phase(record).filter(|_| is_ok);
    let time = step.map_or_else(|| status(record.status).into(), |step| units::nanoseconds(step.median_ns));
    vec![
        marked(record, name),
        of(Label::Weights),
        of(Label::Gradients),
        of(Label::Optimizer),
        of(Label::Activations),
        if is_ok { units::bytes(off.max().unwrap_or(0)) } else { nothing() },
        if is_ok {
            units::bytes(record.ranks.iter().map(|rank| rank.sent_bytes).max().unwrap_or(0))
        } else {
            nothing()
        },
        time,
        step.map_or_else(nothing, text::half_width),
        against(record, records).map_or_else(nothing, |[median, low, high]| {
            format!("{} [{}, {}]", text::times(median), units::three_digits(low), units::three_digits(high))
        }),
    ]
}

/// Time of a step as a multiple of that of the cell it is held against, with its interval: of each pair of steps that were taken in the
/// same turn, the ratio; of these the median.
pub fn against(record: &Record, records: &[&Record]) -> Option<[f64; 3]> {
    let ours = shared(record)?;
    let theirs = match ours {
        SharedOut { offload: true, .. } => SharedOut { offload: false, ..ours },
        SharedOut { stage: 0, .. } => return None,
        _ => SharedOut { stage: 0, ..ours },
    };
    let wanted = record.cell.without_choice();
    let other = records.iter().find(|other| {
        let both_ok = other.status == Status::Ok && record.status == Status::Ok;
        both_ok
            && shared(other) == Some(theirs)
            && other.cell.without_choice() == wanted
            && workers::same_machine(other, record)
    })?;
    let (ours, theirs) = (&text::main_phase(record)?.samples_ns, &text::main_phase(other)?.samples_ns);
    let ratios: Vec<f64> = ours.iter().zip(theirs).map(|(ours, theirs)| *ours as f64 / *theirs as f64).collect();
    if ratios.is_empty() || ours.len() != theirs.len() {
        return None;
    }
    let (median, low, high) = median_with_interval(&ratios);
    Some([median, low, high])
}

/// The rows of a table.
pub fn rows(records: &[&Record]) -> Vec<Vec<String>> {
    let headings = HEADINGS.map(String::from).to_vec();
    std::iter::once(headings).chain(records.iter().map(|record| line(record, records))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{latest, samples};

    #[test]
    fn a_step_is_held_against_its_twin_turn_by_turn() {
        let run = samples::training();
        let records = latest(&run.records);
        let of = |ranks: &str| *records.iter().find(|record| record.cell.ranks.as_deref() == Some(ranks)).unwrap();
        // Every step of the sample takes 1.5 times as long with a file, and stages as many tenths more as their number.
        let against = |ranks: &str| against(of(ranks), &records).map(|all| all.map(|ratio| (ratio * 100.0).round()));
        assert_eq!(against("zero:ranks=2,stage=0"), None);
        assert_eq!(against("zero:ranks=2,stage=3"), Some([130.0; 3]));
        assert_eq!(against("zero:ranks=2,stage=1,offload=true"), Some([150.0; 3]));
        assert_eq!(against("zero:ranks=8,stage=0"), None, "it had no room");
        let row = line(of("zero:ranks=8,stage=0"), &records);
        assert!(row[1].starts_with('~') && row[5] == NOTHING && row[7] == "oom", "{row:?}");
        assert_eq!(line(of("zero:ranks=2,stage=3"), &records)[5], units::bytes(0));
    }
}
