//! CriticalKV (arXiv 2502.03805): what evicting a token costs is the attention to it times what its value adds to the
//! output. The best `first` of a head's budget stay by the scores as they are; for the rest of the budget the score, plus
//! `epsilon`, is multiplied by the L1 norm of the value behind the output projection, averaged over the query heads of
//! the group. Where the inputs have no output projection it is the L1 norm of the value itself.
//!
//! The budget is divided over heads by the scores as they are, as in the authors' combination with Ada-KV
//! (`+critical+ada`); there the best tokens of a head that Ada-KV's floor gives it are of the first stage, however
//! small that is. As in kvpress, protected tokens are the first of the first stage; unlike there they stay when they are more than it has room for. Tokens of the first stage keep their order, above all others. Being
//! the last word on the tokens of a head, it acts after every other part, wherever it is written; lists whose tokens a budget
//! allocation chooses (`duo`, `simlayer`) it leaves alone. It is for scores that are not negative, such as attention: of negative ones
//! the second stage takes the small values, here as in kvpress.

use super::super::linear::times;
use crate::attention::Shape;
use crate::named::Parameter;
use crate::policy::scored::above;
use crate::policy::{Context, Part, PartEntry, PolicyError, Scored, Scorer, Statistic, each_list};

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "critical",
    about: "a second stage of each head's budget goes by score times the norm of the projected value",
    paper: "2502.03805",
    parameters: &[
        Parameter { name: "first", default: "0.5", about: "part of a head's budget that goes by the score alone" },
        Parameter { name: "epsilon", default: "1e-4", about: "added to the score before the norm" },
    ],
    build: |named, _| {
        let first = named.number("first", 0.5, 0.0..=1.0)?;
        let epsilon = named.number("epsilon", 1e-4, 0.0..=1e6)? as f32;
        Ok(Part::Scorer(Box::new(move |scorer| Box::new(Critical { scorer, first, epsilon }))))
    },
};

/// Columns of the projection that are taken at a time.
const COLUMNS: usize = 64;

struct Critical {
    scorer: Box<dyn Scorer>,
    first: f64,
    epsilon: f32,
}

impl Scorer for Critical {
    fn inner(&self) -> Option<&dyn Scorer> {
        Some(&*self.scorer)
    }

    /// Its second stage depends on how many tokens stay.
    fn is_absolute(&self) -> bool {
        false
    }

    fn needs(&self) -> Vec<Statistic> {
        let mut needs = self.scorer.needs();
        needs.extend([Statistic::Values, Statistic::OutputProjection]);
        needs
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        self.scorer.score(context, scores)
    }

    fn refine(
        &self,
        context: &Context<'_>,
        scored: &mut Scored,
        counts: &[usize],
        scratch: &mut [f32],
    ) -> Result<(), PolicyError> {
        self.scorer.refine(context, scored, counts, scratch)?;
        let kv_len = context.call.shape.kv_len;
        let mut first_stage = Vec::with_capacity(counts.len());
        for (list, &count) in counts.iter().enumerate() {
            let scores = &scored.values[list * kv_len..][..context.len(list)];
            let first = if self.first > 0.0 { ((self.first * count as f64) as usize).max(1) } else { 0 };
            let count = first.max(scored.safe.get(list).copied().unwrap_or(0)).min(count);
            first_stage.push(Best::of(scores, count, &mut scratch[list * kv_len..][..scores.len()]));
        }
        projected_norms(context, scratch);
        let (mut highest, mut lowest_first) = (0.0f32, f32::INFINITY);
        let lists = scored.values.chunks_mut(kv_len).zip(scratch.chunks_mut(kv_len)).zip(first_stage);
        for (list, ((scores, norms), mut best)) in lists.enumerate() {
            let len = if scored.settled.contains(&list) { 0 } else { context.len(list) };
            norms[len..].fill(0.0);
            // Of equal scores the latest are the first stage's.
            for (score, norm) in scores[..len].iter_mut().zip(&mut norms[..len]).rev() {
                if *score > scored.highest_scored {
                    *norm = PROTECTED;
                } else if best.takes(*score) {
                    *norm = FIRST_STAGE;
                    lowest_first = lowest_first.min(*score);
                } else {
                    // And not -0, which is below 0 in the order by which tokens are selected.
                    *score = (*score + self.epsilon) * *norm + 0.0;
                    highest = highest.max(*score);
                }
            }
        }
        // The first stage goes above the second, and what is protected above the first.
        let mut highest_scored = highest;
        for (score, norm) in scored.values.iter_mut().zip(&*scratch) {
            if *norm == FIRST_STAGE {
                *score = highest + 1.0 + (*score - lowest_first);
                highest_scored = highest_scored.max(*score);
            }
        }
        for (list, norms) in scratch.chunks(kv_len).enumerate() {
            for (slot, _) in norms.iter().enumerate().filter(|(_, norm)| **norm == PROTECTED) {
                let score = scored.values[list * kv_len + slot];
                scored.values[list * kv_len + slot] = above(highest_scored, scored.rank(score));
            }
        }
        scored.highest_scored = highest_scored;
        Ok(())
    }
}

/// In place of a norm, which is never negative: what became of a token otherwise.
const FIRST_STAGE: f32 = -1.0;
const PROTECTED: f32 = -2.0;

/// The best scores of a list.
struct Best {
    /// The last of them.
    bar: f32,
    /// How many of those that equal it.
    equals: usize,
}

impl Best {
    fn of(scores: &[f32], count: usize, scratch: &mut [f32]) -> Self {
        if count == 0 {
            return Best { bar: f32::INFINITY, equals: 0 };
        }
        scratch.copy_from_slice(scores);
        let (_, &mut bar, _) = scratch.select_nth_unstable_by(count.min(scores.len()) - 1, |a, b| b.total_cmp(a));
        let above = scores.iter().filter(|&&score| score > bar).count();
        Best { bar, equals: count - above }
    }

    /// Whether the next score is one of them.
    fn takes(&mut self, score: f32) -> bool {
        let equal = score == self.bar && self.equals > 0;
        self.equals -= usize::from(equal);
        equal || score > self.bar
    }
}

/// L1 norms of the values behind the output projection, averaged over the group's query heads; of the values as they are
/// where there is no projection.
fn projected_norms(context: &Context<'_>, norms: &mut [f32]) {
    let (width, group, isa) = (context.call.shape.head_dim, context.call.shape.group(), context.call.cpu.isa());
    if context.w_o.is_empty() {
        each_list(context, norms, &mut [], |list, norms, _| {
            list.values(|slot, value| norms[slot] = sum_of_sizes(value))
        });
        return;
    }
    each_list(context, norms, &mut [], |list, norms, _| {
        let w_o = context.w_o[list.batch / context.sequences()];
        // [1, Hq, hidden, D]: a row is one column of the projection.
        let (columns, hidden) = (w_o.permuted([0, 1, 3, 2]), w_o.dims()[3]);
        norms.fill(0.0);
        let (mut matrix, mut column) = ([0.0; Shape::MAX_HEAD_DIM * COLUMNS], [0.0; Shape::MAX_HEAD_DIM]);
        for head in list.head * group..(list.head + 1) * group {
            for first in (0..hidden).step_by(COLUMNS) {
                matrix.fill(0.0);
                for index in 0..COLUMNS.min(hidden - first) {
                    columns.read_rows(0, head, first + index, &mut column[..width]);
                    matrix.chunks_exact_mut(COLUMNS).zip(&column[..width]).for_each(|(row, &x)| row[index] = x);
                }
                list.value_blocks(0..list.len, |start, values| {
                    times(isa, values, width, &matrix[..width * COLUMNS], COLUMNS, |index, _, product| {
                        norms[start + index] += sum_of_sizes(product) / group as f32;
                    });
                });
            }
        }
    });
}

/// L1 norm, in lanes.
fn sum_of_sizes(row: &[f32]) -> f32 {
    const LANES: usize = 8;
    let (whole, rest) = row.as_chunks::<LANES>();
    let mut lanes = [0.0f32; LANES];
    for chunk in whole {
        for lane in 0..LANES {
            lanes[lane] += chunk[lane].abs();
        }
    }
    lanes.iter().sum::<f32>() + rest.iter().map(|x| x.abs()).sum::<f32>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_stage_takes_the_best_and_of_equals_the_latest() {
        let scores = [3.0f32, 1.0, 3.0, 5.0, 3.0];
        for (count, expected) in
            [(0, vec![]), (1, vec![3]), (2, vec![3, 4]), (3, vec![2, 3, 4]), (5, vec![0, 1, 2, 3, 4])]
        {
            let mut best = Best::of(&scores, count, &mut [0.0; 5]);
            let mut taken: Vec<usize> = (0..5).rev().filter(|&slot| best.takes(scores[slot])).collect();
            taken.reverse();
            assert_eq!(taken, expected);
        }
    }

    #[test]
    fn sizes_add_up() {
        let row: Vec<f32> = (0..19).map(|i| if i % 2 == 0 { i as f32 } else { -(i as f32) }).collect();
        assert_eq!(sum_of_sizes(&row), 171.0);
    }
}
