//! Steps of training over ranks as a table: what the rank that holds most holds by label, what is sent, and what a way to share out costs
//! in time.

use super::summary::{marked, status};
use super::text::{self, NOTHING};
use super::workers;
use crate::experiment::record::{Record, Status};
use crate::memory::{Label, LabelBytes};
use crate::stats::median_with_interval;
use crate::train::steps::SharedOut;
use crate::units;

/// What the first table's columns are.
const BYTES: &str = "peaks of the rank that holds most; with ~ by the formula · off by: peak less formula, the most of all ranks and \
                     labels";
/// What the second one's are.
const TIMES: &str = "sent: bytes of a step, of the rank that sends most · against: a step's time by that with averages in memory, \
                     else by stage 0 · the median of ratios of steps taken in turn, with its 95% interval";

/// How training is shared out in a cell.
fn shared(record: &Record) -> Option<SharedOut> {
    record.cell.ranks.as_deref()?.parse().ok()
}

fn name(record: &Record) -> String {
    marked(record, shared(record).map_or(NOTHING.into(), |shared| shared.to_string()))
}

/// What the rank that holds most holds of a label.
pub(super) fn held(record: &Record, label: Label) -> String {
    let fullest = record.ranks.iter().max_by_key(|rank| (rank.peak_bytes, rank.predicted_peak_bytes));
    let held = |bytes: &LabelBytes| bytes.get(&label).map(|bytes| units::bytes(*bytes));
    let shown = match record.status {
        Status::Ok => fullest.and_then(|rank| held(&rank.peak_by_label)),
        Status::Oom => fullest.and_then(|rank| held(&rank.predicted_by_label)).map(|bytes| format!("~{bytes}")),
        Status::Failed | Status::Skipped => None,
    };
    shown.unwrap_or(NOTHING.into())
}

/// What it holds of each label, and how far predictions are off.
fn bytes(record: &Record) -> Vec<String> {
    let off = record.ranks.iter().flat_map(|rank| {
        let of = |bytes: &LabelBytes, label: Label| bytes.get(&label).copied().unwrap_or(0);
        Label::ALL.map(|label| of(&rank.peak_by_label, label).abs_diff(of(&rank.predicted_by_label, label)))
    });
    let off = if record.status == Status::Ok { units::bytes(off.max().unwrap_or(0)) } else { NOTHING.into() };
    let labels = [Label::Weights, Label::Gradients, Label::Optimizer, Label::Activations];
    [vec![name(record)], labels.map(|label| held(record, label)).to_vec(), vec![off]].concat()
}

/// What it sends, and how long a step takes.
fn times(record: &Record, records: &[&Record]) -> Vec<String> {
    let is_ok = record.status == Status::Ok;
    let step = text::main_phase(record).filter(|_| is_ok);
    let sent_bytes = record.ranks.iter().map(|rank| rank.sent_bytes).max().filter(|_| is_ok);
    let ratio = against(record, records).map(|[median, low, high]| {
        format!("{} [{}, {}]", text::times(median), units::three_digits(low), units::three_digits(high))
    });
    vec![
        name(record),
        sent_bytes.map_or(NOTHING.into(), units::bytes),
        step.map_or_else(|| status(record.status).into(), |step| units::nanoseconds(step.median_ns)),
        step.map_or(NOTHING.into(), text::ends),
        ratio.unwrap_or(NOTHING.into()),
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

/// Two tables, of bytes and of times, each with what its columns are.
pub fn tables(records: &[&Record]) -> [(Vec<Vec<String>>, &'static str); 2] {
    let headed = |headings: &[&str], rows: Vec<Vec<String>>| {
        std::iter::once(headings.iter().map(ToString::to_string).collect()).chain(rows).collect()
    };
    let held = records.iter().map(|record| bytes(record)).collect();
    let taken = records.iter().map(|record| times(record, records)).collect();
    [
        (headed(&["ranks", "weights", "gradients", "optimizer", "activations", "off by"], held), BYTES),
        (headed(&["ranks", "sent", "step", "±", "against"], taken), TIMES),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::table::{MOST_COLUMNS, lines, wrapped};
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
        let no_room = of("zero:ranks=8,stage=0");
        let (held, taken) = (bytes(no_room), times(no_room, &records));
        assert!(held[1].starts_with('~') && held[5] == NOTHING && taken[2] == "oom", "{held:?} {taken:?}");
        assert_eq!(bytes(of("zero:ranks=2,stage=3"))[5], units::bytes(0));
        for (rows, words) in tables(&records) {
            let text = lines(rows);
            assert!(text.lines().all(|line| line.chars().count() <= MOST_COLUMNS), "{text}");
            assert!(!wrapped(words).contains('…'), "{words}");
        }
    }
}
