//! Ways to fine-tune as a table: what each trains and holds by label, and how long a step takes.

use super::steps::held;
use super::summary::{marked, status};
use super::text::{self, NOTHING};
use crate::experiment::record::{Record, Status};
use crate::memory::Label;
use crate::named::Named;
use crate::units;

/// What the first table's columns are.
const BYTES: &str =
    "peaks by label; with ~ by the formula · again: what the backward pass computes again · r: rank of adapters";
/// What the second one's are.
const TIMES: &str = "trained: numbers that are · peak: of all labels; off by: peak less formula · step: the median, ± half of its 95% interval";

/// A way to fine-tune in few words.
fn name(record: &Record) -> String {
    let named: Option<Named> = record.cell.tuning.as_deref().and_then(|text| text.parse().ok());
    let words = |named: Named| {
        let word = |(key, value): (&str, &str)| match key {
            "recompute" => format!("again:{value}"),
            "rank" => format!("r{value}"),
            "alpha" => format!("alpha:{value}"),
            _ => value.to_string(),
        };
        let words: Vec<String> = std::iter::once(named.name.clone()).chain(named.arguments().map(word)).collect();
        words.join(" ")
    };
    marked(record, named.map_or(NOTHING.into(), words))
}

/// Two tables, of bytes and of times, each with what its columns are.
pub fn tables(records: &[&Record]) -> [(Vec<Vec<String>>, &'static str); 2] {
    let headed = |headings: &[&str], rows: Vec<Vec<String>>| {
        std::iter::once(headings.iter().map(ToString::to_string).collect()).chain(rows).collect()
    };
    let labels = [Label::Weights, Label::Gradients, Label::Optimizer, Label::Activations];
    let bytes =
        |record: &&Record| std::iter::once(name(record)).chain(labels.map(|label| held(record, label))).collect();
    [
        (
            headed(
                &["tuning", "weights", "gradients", "optimizer", "activations"],
                records.iter().map(bytes).collect(),
            ),
            BYTES,
        ),
        (
            headed(
                &["tuning", "trained", "peak", "off by", "step", "±"],
                records.iter().map(|record| times(record)).collect(),
            ),
            TIMES,
        ),
    ]
}

fn times(record: &Record) -> Vec<String> {
    let peak = record.memory.as_ref().map(|memory| match record.status {
        Status::Ok => units::bytes(memory.peak_bytes),
        _ => format!("~{}", units::bytes(memory.predicted_peak_bytes)),
    });
    let is_ok = record.status == Status::Ok;
    let off = record.memory.as_ref().filter(|_| is_ok).map(|memory| memory.residual_bytes.unsigned_abs());
    let step = text::main_phase(record).filter(|_| is_ok);
    vec![
        name(record),
        record.training.as_ref().map_or(NOTHING.into(), |training| units::grouped(training.parameters.into())),
        peak.unwrap_or(NOTHING.into()),
        off.map_or(NOTHING.into(), units::bytes),
        step.map_or_else(|| status(record.status).into(), |step| units::nanoseconds(step.median_ns)),
        step.map_or(NOTHING.into(), text::ends),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::table::{MOST_COLUMNS, lines, wrapped};
    use crate::report::{latest, samples};

    #[test]
    fn a_way_without_room_shows_what_it_would_take() {
        let run = samples::tuning();
        let [(bytes, _), (times, _)] = tables(&latest(&run.records));
        let of = |rows: &[Vec<String>], way: &str| rows.iter().find(|row| row[0] == way).unwrap().clone();
        assert!(of(&bytes, "full")[1].starts_with('~') && of(&times, "full")[4] == "oom");
        let tuned = "qlora adamw-8bit r8 again:full all-linear";
        assert!(of(&bytes, tuned)[1].starts_with(char::is_numeric), "{bytes:?}");
        assert_eq!(of(&times, tuned)[3], units::bytes(0));
        for (rows, words) in tables(&latest(&run.records)) {
            let text = lines(rows);
            assert!(text.lines().all(|line| line.chars().count() <= MOST_COLUMNS), "{text}");
            assert!(!wrapped(words).contains('…'), "{words}");
        }
    }
}
