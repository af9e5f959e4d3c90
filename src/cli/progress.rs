//! How far a run is: a bar on a terminal, now and then a line where stderr is something else.

use super::failure::Failure;
use super::run::print_line;
use crate::experiment::runner::{Outcome, Progress};
use indicatif::{ProgressBar, ProgressStyle};
use std::time::{Duration, Instant};

/// Steps of the bar for each cell, so that it moves within one.
const STEPS: f64 = 1000.0;
/// Time between lines: what is over sooner needs none.
const QUIET: Duration = Duration::from_secs(5);

/// Runs `work` and shows on stderr how far it is; with `json`, records go to stdout.
pub fn with(
    json: bool,
    work: impl FnOnce(&mut dyn FnMut(Progress<'_>)) -> Result<Outcome, Failure>,
) -> Result<Outcome, Failure> {
    let mut shown = Shown::new();
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
    cells: usize,
    /// Cells that there are records of, those of an earlier run included.
    done: usize,
    resumed: usize,
    start: Instant,
    last_line: Instant,
}

impl Shown {
    fn new() -> Self {
        let bar = ProgressBar::new(0);
        let style = ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {wide_msg}");
        bar.set_style(style.expect("the template is right").progress_chars("=> "));
        bar.enable_steady_tick(Duration::from_millis(200));
        let now = Instant::now();
        Shown { bar, cells: 0, done: 0, resumed: 0, start: now, last_line: now }
    }

    fn tell(&mut self, progress: &Progress<'_>) {
        match *progress {
            Progress::Start { cells, resumed } => {
                (self.cells, self.done, self.resumed) = (cells + resumed, resumed, resumed);
                self.bar.set_length((self.cells as f64 * STEPS) as u64);
                self.show(0.0, "");
            }
            Progress::Trial(cell) => self.show(0.0, &cell.label()),
            Progress::Part { cell, cells, fraction } => {
                self.show(fraction * cells as f64, &cell.label());
                if self.bar.is_hidden() && self.last_line.elapsed() >= QUIET {
                    self.last_line = Instant::now();
                    eprintln!("{}", self.line(fraction * cells as f64, &cell.label()));
                }
            }
            Progress::Done(_) => {
                self.done += 1;
                self.show(0.0, "");
            }
            Progress::Elsewhere(cells) => self.done += cells,
        }
    }

    /// Moves the bar to the cells that are done and `more` cells' worth of work.
    fn show(&self, more: f64, label: &str) {
        self.bar.set_position(((self.done as f64 + more) * STEPS) as u64);
        self.bar.set_message(format!("{}/{} cells  {label}", self.done, self.cells));
    }

    fn line(&self, more: f64, label: &str) -> String {
        let work = (self.cells - self.resumed) as f64;
        let fraction = ((self.done - self.resumed) as f64 + more) / work.max(1.0);
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
    use crate::experiment::cell::Cell;

    #[test]
    fn a_line_tells_how_far_it_is_and_what_is_left() {
        let mut shown = Shown::new();
        shown.tell(&Progress::Start { cells: 8, resumed: 2 });
        assert_eq!((shown.cells, shown.done), (10, 2));
        shown.start = Instant::now() - Duration::from_secs(30);
        shown.tell(&Progress::Part { cell: &Cell::default(), cells: 8, fraction: 0.25 });
        assert_eq!(shown.line(2.0, "x"), "0:30 25% of 10 cells, about 1:30 left: x");
        assert_eq!(shown.bar.position(), 4000);
        assert_eq!(clock(3725.0), "1:02:05");
    }
}
