//! How far a run is: a bar on a terminal, now and then a line where stderr is something else.

use super::failure::Failure;
use super::run::print_line;
use crate::experiment::cell::Cell;
use crate::experiment::runner::{Outcome, Progress};
use indicatif::{ProgressBar, ProgressStyle};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Steps of the bar.
const STEPS: f64 = 10_000.0;
/// Time between lines: what is over sooner needs none.
const QUIET: Duration = Duration::from_secs(5);

/// Runs `work` and shows on stderr how far it is, cells weighed by `seconds` that some are expected to take, by id; with
/// `json`, records go to stdout.
pub fn with(
    json: bool,
    seconds: BTreeMap<String, f64>,
    work: impl FnOnce(&mut dyn FnMut(Progress<'_>)) -> Result<Outcome, Failure>,
) -> Result<Outcome, Failure> {
    let mut shown = Shown::new(seconds);
    let mut printed = Ok(());
    let outcome = work(&mut |progress| {
        shown.tell(&progress);
        if let (Progress::Done(record), true, true) = (&progress, json, printed.is_ok()) {
            printed = print_line(record);
        }
    })?;
    shown.bar.finish_and_clear();
    printed.map(|()| outcome)
}

/// What a reader sees.
struct Shown {
    bar: ProgressBar,
    /// Seconds that cells are expected to take, by id.
    expected_s: BTreeMap<String, f64>,
    cells: usize,
    /// Cells that there are records of, those of an earlier run included.
    done: usize,
    /// Work of this run, and how much of it is done: seconds where they are expected, else cells.
    work: f64,
    worked: f64,
    start: Instant,
    last_line: Instant,
}

impl Shown {
    fn new(expected_s: BTreeMap<String, f64>) -> Self {
        let bar = ProgressBar::new(STEPS as u64);
        let style = ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {wide_msg}");
        bar.set_style(style.expect("the template is right").progress_chars("=> "));
        bar.enable_steady_tick(Duration::from_millis(200));
        let now = Instant::now();
        Shown { bar, expected_s, cells: 0, done: 0, work: 0.0, worked: 0.0, start: now, last_line: now }
    }

    fn tell(&mut self, progress: &Progress<'_>) {
        match *progress {
            Progress::Start { cells, resumed } => {
                (self.cells, self.done) = (cells + resumed, resumed);
                // What is not expected to take long is no work beside what is.
                let expected: f64 = self.expected_s.values().sum();
                self.work = if expected > 0.0 { expected } else { cells as f64 };
                self.show(0.0, "");
            }
            Progress::Trial(cell) => self.show(0.0, &cell.label()),
            Progress::Part { cell, cells, fraction } => {
                let more = fraction * cells as f64 * self.weight(cell);
                self.show(more, &cell.label());
                if self.bar.is_hidden() && self.last_line.elapsed() >= QUIET {
                    self.last_line = Instant::now();
                    eprintln!("{}", self.line(more, &cell.label()));
                }
            }
            Progress::Done(record) => {
                self.done += 1;
                self.worked += self.weight(&record.cell);
                self.show(0.0, "");
            }
            Progress::Elsewhere(cells) => {
                self.done += cells;
                self.worked += cells as f64;
            }
        }
    }

    fn weight(&self, cell: &Cell) -> f64 {
        if self.expected_s.is_empty() { 1.0 } else { self.expected_s.get(&cell.id()).copied().unwrap_or(0.0) }
    }

    /// The part of the work that is done, with `more` of it in hand.
    fn fraction(&self, more: f64) -> f64 {
        if self.work > 0.0 { ((self.worked + more) / self.work).min(1.0) } else { 0.0 }
    }

    /// Moves the bar.
    fn show(&self, more: f64, label: &str) {
        self.bar.set_position((self.fraction(more) * STEPS) as u64);
        self.bar.set_message(format!("{}/{} cells  {label}", self.done, self.cells));
    }

    fn line(&self, more: f64, label: &str) -> String {
        let fraction = self.fraction(more);
        let seconds = self.start.elapsed().as_secs_f64();
        let left = match fraction {
            fraction if fraction > 0.0 => format!(", about {} left", clock(seconds * (1.0 - fraction) / fraction)),
            _ => String::new(),
        };
        format!("{} {:.0}% of {} cells{left}: {label}", clock(seconds), 100.0 * fraction, self.cells)
    }
}

/// Minutes and seconds, with hours where there are some.
fn clock(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    match seconds / 3600 {
        0 => format!("{}:{:02}", seconds / 60, seconds % 60),
        hours => format!("{hours}:{:02}:{:02}", seconds / 60 % 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_tells_how_far_it_is_and_what_is_left() {
        let mut shown = Shown::new(BTreeMap::new());
        shown.tell(&Progress::Start { cells: 8, resumed: 2 });
        assert_eq!((shown.cells, shown.done), (10, 2));
        shown.start = Instant::now() - Duration::from_secs(30);
        shown.tell(&Progress::Part { cell: &Cell::default(), cells: 8, fraction: 0.25 });
        assert_eq!(shown.line(2.0, "x"), "0:30 25% of 10 cells, about 1:30 left: x");
        assert_eq!(shown.bar.position(), 2500);
        assert_eq!(clock(3725.0), "1:02:05");
    }

    #[test]
    fn cells_count_by_the_time_they_are_expected_to_take() {
        let cell = |context_tokens| Cell { context_tokens, ..Cell::default() };
        let (short, long) = (cell(512), cell(8192));
        let mut shown = Shown::new(BTreeMap::from([(short.id(), 10.0), (long.id(), 90.0)]));
        shown.tell(&Progress::Start { cells: 2, resumed: 0 });
        shown.tell(&Progress::Part { cell: &short, cells: 1, fraction: 0.5 });
        assert_eq!(shown.bar.position(), 500);
        shown.start = Instant::now() - Duration::from_secs(5);
        assert_eq!(shown.line(shown.weight(&long) / 2.0, "x"), "0:05 45% of 2 cells, about 0:06 left: x");
    }
}
