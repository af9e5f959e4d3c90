//! Ways to fine-tune as a table: what each trains and holds by label, and how long a step takes.

use super::steps::held;
use super::summary::{marked, status};
use super::text::{self, NOTHING};
use crate::experiment::record::{Record, Status};
use crate::memory::Label;
use crate::units;

/// What the columns are.
const WORDS: &str = "trained: numbers that are · peaks by label, and of all; with ~ by the formula · step: the median, beside it half of \
                     its 95% interval";

/// The table and what its columns are.
pub fn table(records: &[&Record]) -> (Vec<Vec<String>>, &'static str) {
    let headings = ["tuning", "trained", "weights", "gradients", "optimizer", "activations", "peak", "step", "±"];
    let rows = records.iter().map(|record| row(record));
    (std::iter::once(headings.map(String::from).to_vec()).chain(rows).collect(), WORDS)
}

fn row(record: &Record) -> Vec<String> {
    let memory = record.memory.as_ref();
    let peak = memory.map(|memory| match record.status {
        Status::Ok => units::bytes(memory.peak_bytes),
        _ => format!("~{}", units::bytes(memory.predicted_peak_bytes)),
    });
    let step = text::main_phase(record).filter(|_| record.status == Status::Ok);
    let labels = [Label::Weights, Label::Gradients, Label::Optimizer, Label::Activations];
    let name = marked(record, record.cell.tuning.clone().unwrap_or(NOTHING.into()));
    let trained =
        record.training.as_ref().map_or(NOTHING.into(), |training| units::grouped(training.parameters.into()));
    let before = [name, trained].into_iter().chain(labels.map(|label| held(record, label)));
    let after = [
        peak.unwrap_or(NOTHING.into()),
        step.map_or_else(|| status(record.status).into(), |step| units::nanoseconds(step.median_ns)),
        step.map_or(NOTHING.into(), text::half_width),
    ];
    before.chain(after).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::table::{MOST_COLUMNS, lines, wrapped};
    use crate::report::{latest, samples};

    #[test]
    fn a_way_without_room_shows_what_it_would_take() {
        let run = samples::tuning();
        let (rows, words) = table(&latest(&run.records));
        let of = |way: &str| rows.iter().find(|row| row[0].starts_with(way)).unwrap();
        assert!(of("full")[2].starts_with('~') && of("full")[7] == "oom", "{:?}", of("full"));
        assert!(of("lora:rank=8")[6].starts_with(char::is_numeric), "{:?}", of("lora:rank=8"));
        let text = lines(rows);
        assert!(text.lines().all(|line| line.chars().count() <= MOST_COLUMNS), "{text}");
        assert!(!wrapped(words).contains('…'), "{words}");
    }
}
