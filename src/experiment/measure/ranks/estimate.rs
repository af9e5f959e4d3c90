//! How long cells of `ranks` will take: passes of a quarter of the context are run, and the messages and links of the whole one timed.
//!
//! Computing of a ring grows with the square of the context, all else with its length. The reference, which looks at a few rows, is run
//! once.

use super::{Measured, SAMPLES, draw, one_thread, shared};
use crate::attention::kernel;
use crate::experiment::cell::Cell;
use crate::experiment::measure::{Stage, TrialError};
use crate::experiment::record::Record;
use crate::memory::Arena;
use crate::ranks::cost::Links;
use crate::ranks::{OfRank, Rank, RankError, Shared, threads};
use std::time::Instant;

/// Of the context, what is tried.
const PART: usize = 4;
/// Least tokens of a context that is tried.
const LEAST_TOKENS: usize = 512;

/// Seconds of a comparison; `None` where it cannot run.
pub(super) fn seconds(cells: &[&Cell], stage: &Stage<'_>) -> Option<f64> {
    let mut sum_s = 0.0;
    for (index, cell) in cells.iter().enumerate() {
        let (one_s, unchecked_s) = tried(cell, stage).ok()?;
        sum_s += (SAMPLES + 1) as f64 * one_s;
        if index == 0 {
            // Every cell is checked on the same rows.
            let (mut part, times) = part(cell);
            let checked_s = timed(|| part.round(true, stage)).ok()?;
            sum_s += cells.len() as f64 * (checked_s - unchecked_s).max(0.0) * times;
        }
    }
    Some(sum_s)
}

/// A cell with a part of the context, and how many times longer the whole is.
fn part(cell: &Cell) -> (Measured, f64) {
    let context_tokens = (cell.context_tokens / PART).max(LEAST_TOKENS).min(cell.context_tokens);
    let record = Record::blank(Cell { context_tokens, ..cell.clone() });
    (Measured { record, ranks: Vec::new(), spent_ns: 0 }, cell.context_tokens as f64 / context_tokens as f64)
}

/// Seconds of a round of a cell, and of the one that was tried.
fn tried(cell: &Cell, stage: &Stage<'_>) -> Result<(f64, f64), TrialError> {
    let (mut measured, times) = part(cell);
    let tried_s = timed(|| measured.round(false, stage))?;
    let (shape, ..) = shared(&measured.record.cell)?;
    let draw_s =
        timed(|| draw(&Arena::unlimited(), &measured.record.cell, &shape).map(drop).map_err(TrialError::from))?;
    let slowest = |read: fn(&OfRank) -> &Vec<u64>| {
        measured.ranks.iter().filter_map(|rank| read(rank).last()).max().map_or(0.0, |&ns| ns as f64 / 1e9)
    };
    let (pass_s, alone_s) = (slowest(|rank| &rank.samples_ns), slowest(|rank| &rank.alone_ns));
    let (_, ranks, whole) = shared(cell)?;
    let grown = match whole {
        Shared::Ring(_) => times * times,
        Shared::Tree(_) => times,
    };
    Ok(((draw_s + alone_s) * times + pass_s * grown + links(ranks, &whole)?, tried_s))
}

fn timed(work: impl FnOnce() -> Result<(), TrialError>) -> Result<f64, TrialError> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Seconds in which the ranks of a problem time their links.
fn links(ranks: usize, problem: &Shared) -> Result<f64, TrialError> {
    let most_bytes = problem.forward_sending().most_bytes();
    let kernel = kernel("tiled").map_err(|error| TrialError::Failed(error.to_string()))?;
    let start = Instant::now();
    threads::run(ranks, |comm| {
        let (cpu, arena) = (one_thread()?, Arena::unlimited());
        Links::measure(Rank { comm, cpu: &cpu, arena: &arena, kernel: &*kernel }, most_bytes).map(drop)
    })
    .map_err(|error: RankError| TrialError::from(error))?;
    Ok(start.elapsed().as_secs_f64())
}
