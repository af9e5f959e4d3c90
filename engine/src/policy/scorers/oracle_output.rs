//! `oracle-output`: knows the queries that come, and evicts what their outputs miss least.
//!
//! Where `oracle` keeps the most attention, this one looks at what attention is for: with the values in it, two tokens of little
//! mass may matter and a sink whose value is nothing may not. Which set of tokens gives the least squared error of the outputs is
//! a search over all sets; this is greedy backward elimination. Without token `j` of weight `p` a query's output `o` becomes
//! `o + p / (1 - p) (o - v_j)`, so each round gives every token that is still there the error that its eviction would leave, evicts
//! the sixteenth of them with the least, and starts again with what remains. Scores are the order of eviction. Nothing here is a bound:
//! another set may be better, and of many queries only some are looked at.

use crate::device::simd::{Isa, loops};
use crate::memory::Label;
use crate::policy::{Context, Future, Policy, PolicyEntry, PolicyError, Scorer, Statistic, each_list};
use crate::{attention::Shape, policy::List};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "oracle-output",
    about: "keeps what future outputs miss most, by greedy elimination; knows the future, and is no bound",
    paper: "",
    parameters: &[],
    build: |_, _| Ok(Policy::after_prefill(OracleOutput)),
};

/// Queries of a group that are looked at, evenly spaced, at most.
const MOST_ROWS: usize = 256;
/// One of so many tokens is evicted in a round.
const PART: usize = 16;

struct OracleOutput;

/// Queries of each head that are looked at.
fn queries(shape: &Shape) -> usize {
    shape.q_len.min((MOST_ROWS / shape.group()).max(1))
}

/// Floats of scratch of one list.
fn scratch_floats(shape: &Shape) -> usize {
    let rows = queries(shape) * shape.group();
    rows * shape.kv_len + (shape.head_dim + 4) * shape.kv_len + rows * (3 * shape.head_dim + 1)
}

impl Scorer for OracleOutput {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::FutureAttention]
    }

    fn scratch_bytes(&self, shape: &Shape, _threads: usize) -> u64 {
        4 * (shape.batch * shape.kv_heads * scratch_floats(shape)) as u64
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let missing = PolicyError::Missing { policy: ENTRY.name, what: "the queries that come after the context" };
        let future = context.future.ok_or(missing)?;
        let floats = scratch_floats(&future.call.shape);
        let mut scratch = context.arena.alloc::<f32>(Label::Workspace, context.lists() * floats)?;
        each_list(context, scores, &mut scratch, |list, scores, scratch| {
            let mut search = Search::new(&future, list, scratch);
            search.weigh(&future, list);
            search.eliminate(scores);
        });
        Ok(())
    }
}

/// Cuts `count` floats off the front.
fn cut<'s>(scratch: &mut &'s mut [f32], count: usize) -> &'s mut [f32] {
    let (front, rest) = std::mem::take(scratch).split_at_mut(count);
    *scratch = rest;
    front
}

/// The tokens of a list that are still there, and what some queries of its group make of them.
struct Search<'s> {
    isa: Isa,
    width: usize,
    rows: usize,
    /// Room for tokens in each row.
    room: usize,
    /// Slots that are still there.
    slots: Vec<usize>,
    /// Attention of each query, `[rows, room]`; the first `slots.len()` of a row count.
    weights: &'s mut [f32],
    /// `[room, D]`, and the squared norms of these.
    values: &'s mut [f32],
    norms: &'s mut [f32],
    /// Outputs of the full cache, `[rows, D]`.
    full: &'s mut [f32],
    /// What tokens that come later add to sums of values and of weights: they are not evicted here.
    later: &'s mut [f32],
    later_mass: &'s mut [f32],
    /// Outputs of what is still there.
    outputs: &'s mut [f32],
    /// Of each token, the squared error without it less that with it.
    errors: &'s mut [f32],
    /// Products of a query's error, and of its output, with the values.
    products: [&'s mut [f32]; 2],
}

impl<'s> Search<'s> {
    fn new(future: &Future<'_>, list: &List<'_>, mut scratch: &'s mut [f32]) -> Self {
        let (shape, width) = (&future.call.shape, list.width());
        let (rows, room) = (queries(shape) * shape.group(), shape.kv_len);
        Search {
            isa: future.call.cpu.isa(),
            width,
            rows,
            room,
            slots: (0..list.len).collect(),
            weights: cut(&mut scratch, rows * room),
            values: cut(&mut scratch, room * width),
            norms: cut(&mut scratch, room),
            full: cut(&mut scratch, rows * width),
            later: cut(&mut scratch, rows * width),
            later_mass: cut(&mut scratch, rows),
            outputs: cut(&mut scratch, rows * width),
            errors: cut(&mut scratch, room),
            products: [cut(&mut scratch, room), cut(&mut scratch, room)],
        }
    }

    /// Attention of the queries over all keys, and the values.
    fn weigh(&mut self, future: &Future<'_>, list: &List<'_>) {
        let (call, width, isa) = (&future.call, self.width, self.isa);
        let Shape { q_heads, q_len, kv_len, .. } = call.shape;
        let (group, queries) = (call.shape.group(), queries(&call.shape));
        // Where `outputs` will be, the queries lie meanwhile.
        let query = |row: usize| (list.head * group + row / queries, (row % queries + 1) * q_len / queries - 1);
        for (row, to) in self.outputs.chunks_exact_mut(width).enumerate() {
            let (head, index) = query(row);
            call.q.read_rows(list.batch, head, index, to);
        }
        self.later.fill(0.0);
        self.later_mass.fill(0.0);
        let mut block = [0.0; List::BLOCK * Shape::MAX_HEAD_DIM];
        let mut logits = [0.0; List::BLOCK];
        for start in (0..kv_len).step_by(List::BLOCK) {
            let count = List::BLOCK.min(kv_len - start);
            let keys = call.kv.keys(list.batch, list.head, start, count, &mut block);
            for (row, q) in self.outputs.chunks_exact(width).enumerate() {
                let (head, index) = query(row);
                let lse = future.lse[(list.batch * q_heads + head) * q_len + index];
                let visible = call.params.visible(index, q_len, kv_len);
                loops::row_dots(isa, q, keys, &mut logits[..count]);
                loops::scale(isa, &mut logits[..count], call.params.scale);
                if let Some(cap) = call.params.softcap {
                    loops::soft_cap(isa, &mut logits[..count], 1.0, cap);
                }
                let to = &mut self.weights[row * self.room + start..][..count];
                for (offset, (to, logit)) in to.iter_mut().zip(&logits).enumerate() {
                    *to = if visible.contains(&(start + offset)) { (logit - lse).exp() } else { 0.0 };
                }
            }
            let values = call.kv.values(list.batch, list.head, start, count, &mut block);
            self.values[start * width..][..count * width].copy_from_slice(values);
        }
        for (slot, value) in self.values.chunks_exact(width).enumerate() {
            self.norms[slot] = loops::dot(isa, value, value);
            if slot >= self.slots.len() {
                for (row, sum) in self.later.chunks_exact_mut(width).enumerate() {
                    let weight = self.weights[row * self.room + slot];
                    self.later_mass[row] += weight;
                    loops::add_scaled(isa, sum, weight, value);
                }
            }
        }
    }

    /// Evicts until nothing is there; a token's score is how many went before it.
    fn eliminate(&mut self, scores: &mut [f32]) {
        let mut gone = 0;
        while !self.slots.is_empty() {
            self.judge(gone == 0);
            let (errors, here) = (&self.errors[..], self.slots.len());
            // Of equal errors the earlier token goes first.
            let mut order: Vec<usize> = (0..here).collect();
            order.sort_by(|&a, &b| errors[a].total_cmp(&errors[b]).then(a.cmp(&b)));
            let evicted = &order[..(here / PART).max(1)];
            for &at in evicted {
                scores[self.slots[at]] = gone as f32;
                gone += 1;
            }
            let mut stays = vec![true; here];
            evicted.iter().for_each(|&at| stays[at] = false);
            self.keep(&stays);
        }
    }

    /// What the eviction of each token would add to the squared error.
    fn judge(&mut self, first: bool) {
        let (isa, width, here) = (self.isa, self.width, self.slots.len());
        let (errors, values) = (&mut self.errors[..here], &self.values[..here * width]);
        errors.fill(0.0);
        let mut error = [0.0; Shape::MAX_HEAD_DIM];
        let error = &mut error[..width];
        for row in 0..self.rows {
            let weights = &self.weights[row * self.room..][..here];
            let mass = self.later_mass[row] + weights.iter().sum::<f32>();
            if mass == 0.0 {
                continue;
            }
            let output = &mut self.outputs[row * width..][..width];
            output.copy_from_slice(&self.later[row * width..][..width]);
            for (weight, value) in weights.iter().zip(values.chunks_exact(width)) {
                loops::add_scaled(isa, output, *weight, value);
            }
            loops::scale(isa, output, 1.0 / mass);
            let full = &mut self.full[row * width..][..width];
            if first {
                full.copy_from_slice(output);
            }
            error.iter_mut().zip(&*output).zip(&*full).for_each(|((error, output), full)| *error = output - full);
            let [of_error, of_output] = self.products.each_mut().map(|products| &mut products[..here]);
            loops::row_dots(isa, error, values, of_error);
            loops::row_dots(isa, output, values, of_output);
            let (across, square) = (loops::dot(isa, error, output), loops::dot(isa, output, output));
            for at in 0..here {
                // A query that has nothing else left cannot do without it.
                let share = weights[at] / (mass - weights[at]).max(1e-4 * mass);
                let distance = square - 2.0 * of_output[at] + self.norms[at];
                errors[at] += share * (2.0 * (across - of_error[at]) + share * distance);
            }
        }
    }

    /// Drops tokens.
    fn keep(&mut self, stays: &[bool]) {
        let (width, mut to) = (self.width, 0);
        for from in (0..stays.len()).filter(|&at| stays[at]) {
            self.values.copy_within(from * width..(from + 1) * width, to * width);
            self.norms[to] = self.norms[from];
            self.slots[to] = self.slots[from];
            to += 1;
        }
        self.slots.truncate(to);
        for row in self.weights.chunks_exact_mut(self.room) {
            for (to, from) in (0..stays.len()).filter(|&at| stays[at]).enumerate() {
                row[to] = row[from];
            }
        }
    }
}
