//! Attention Matching (arXiv 2602.16284): what is retained gets a bias for its key and another value, so that it answers
//! reference queries as the whole list did.
//!
//! Queries `i` of all query heads that read a list ask it before it shrinks: `m_i = max_j l_ij` over all keys, `s_i = sum_j
//! exp(l_ij - m_i)` their mass, `y_i = sum_j exp(l_ij - m_i) v_j / s_i` their output. First the retained keys `k` are given
//! weights `w_k`, with which they have that mass: the least squares of `sum_k exp(l_ik - m_i) w_k = s_i` within `exp(+-bound)`;
//! `ln w_k` is added to the key's logits from then on ([`Column::Bias`]). Then their values are refitted: the least squares of
//! `sum_k p_ik v'_k = y_i`, where `p_i` is the softmax over what is retained, with its biases.
//!
//! The authors' code (adamzweiger/compaction) clamps the solution without bounds and takes two projected gradient steps; here the
//! bounded minimum is sought for up to a thousand passes, which the usual `bound` and `ridge` leave many of. It has no ridge, so
//! that keys and values that no reference query looks at become small; here both fits are held to what the tokens were, weights
//! to 1 and values to their own, by `ridge` parts of the mean squared column. So a list of which everything stays does not change.
//! As there, a reference query sees the whole list, as later ones will, wherever it was asked.

use super::{Action, Fold};
use crate::attention::{KvRows, Shape};
use crate::cache::{Column, PagedCache};
use crate::memory::{Buffer, Label};
use crate::named::Parameter;
use crate::policy::least_squares::{Design, add};
use crate::policy::{Part, PartEntry, PolicyError, Statistic};
use rayon::prelude::*;

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "match",
    about: "what is retained is refitted: biases of keys to the mass, and values to the output, that reference queries had",
    paper: "2602.16284",
    parameters: &[
        Parameter { name: "queries", default: "64", about: "reference queries of each query head" },
        Parameter {
            name: "of",
            default: "recent",
            about: "recent or context: the latest queries, or evenly spaced ones",
        },
        Parameter { name: "fit", default: "both", about: "both, bias or values" },
        Parameter { name: "bound", default: "3", about: "largest bias that one refit adds, either way" },
        Parameter { name: "ridge", default: "0.01", about: "how strongly tokens are held to what they were" },
    ],
    build: |named, _| {
        let of_context = match named.text("of") {
            None | Some("recent") => false,
            Some("context") => true,
            Some(_) => return Err(named.wrong("of", "recent or context".into()).into()),
        };
        let (biases, values) = match named.text("fit") {
            None | Some("both") => (true, true),
            Some("bias") => (true, false),
            Some("values") => (false, true),
            Some(_) => return Err(named.wrong("fit", "both, bias or values".into()).into()),
        };
        if !biases && named.text("bound").is_some() {
            return Err(named.wrong("bound", "left out where only values are fitted".into()).into());
        }
        Ok(Part::Action(Some(Box::new(Matching {
            queries: named.count("queries", 64, 1)?,
            of_context,
            biases,
            values,
            bound: named.number("bound", 3.0, 0.0..=20.0)?,
            ridge: named.number("ridge", 0.01, 1e-9..=1.0)?,
        }))))
    },
};

/// Why nothing can be fitted.
const NO_QUERIES: PolicyError = PolicyError::Missing { policy: "match", what: "queries, to be refitted to" };

/// Keys or values that are widened at a time.
const BLOCK: usize = 64;

struct Matching {
    queries: usize,
    of_context: bool,
    biases: bool,
    values: bool,
    bound: f64,
    ridge: f64,
}

impl Matching {
    /// Numbers of scratch in f64: a weight of each key for each reference query; what these had and were given; products of
    /// theirs; a weight of each key.
    fn parts(n: usize, len: usize, width: usize) -> [usize; 5] {
        [n * len, n * width, 2 * n, n + n * n, len]
    }
}

impl Action for Matching {
    fn needs(&self) -> Vec<Statistic> {
        if self.of_context { vec![Statistic::Queries] } else { Vec::new() }
    }

    fn recent_queries(&self) -> usize {
        if self.of_context { 0 } else { self.queries }
    }

    fn refits(&self) -> bool {
        true
    }

    fn biases(&self) -> bool {
        self.biases
    }

    fn scratch_bytes(&self, shape: &Shape, _: usize) -> u64 {
        let (n, width) = (self.queries.min(shape.q_len) * shape.group(), shape.head_dim);
        (8 * Self::parts(n, shape.kv_len, width).iter().sum::<usize>() + 4 * n * width) as u64
    }

    fn fold(&self, fold: &Fold<'_>, cache: &mut PagedCache, list: usize, kept: &[u32]) -> Result<(), PolicyError> {
        let (len, width, heads) = (cache.lens()[list], cache.shape().head_dim, cache.shape().kv_heads);
        let asked = fold.asked.ok_or(NO_QUERIES)?;
        let [_, q_heads, q_len, _] = asked.q.dims();
        let (group, count) = (q_heads / heads, self.queries.min(q_len));
        let n = group * count;
        if n == 0 {
            return Err(NO_QUERIES);
        }
        let parts = Self::parts(n, len, width);
        let mut numbers: Buffer<f64> = fold.arena.alloc(Label::Workspace, parts.iter().sum())?;
        let mut queries: Buffer<f32> = fold.arena.alloc(Label::Workspace, n * width)?;
        for (row, query) in queries.chunks_exact_mut(width).enumerate() {
            let (head, at) = (asked.list % heads * group + row / count, row % count);
            let at = if self.of_context { (2 * at + 1) * q_len / (2 * count) } else { q_len - count + at };
            asked.q.read_rows(asked.list / heads, head, at, query);
        }
        let (columns, rest) = numbers.split_at_mut(parts[0]);
        let (outputs, rest) = rest.split_at_mut(parts[1]);
        let (masses, rest) = rest.split_at_mut(parts[2]);
        let (scratch, weights) = rest.split_at_mut(parts[3]);
        let (masses, highest) = masses.split_at_mut(n);
        let at = [list / heads, list % heads];
        let logit = |inner: f64| asked.params.logit(inner);
        fold.cpu.install(|| {
            ask(cache, at, (&queries, width, &logit), columns, [masses, highest], outputs);
            for (to, &slot) in kept.iter().enumerate() {
                let from = slot as usize * n;
                columns.copy_within(from..from + n, to * n);
            }
            let (columns, weights) = (&mut columns[..kept.len() * n], &mut weights[..kept.len()]);
            if self.biases {
                let bounds = [(-self.bound).exp(), self.bound.exp()];
                Design { columns, n, ridge: self.ridge }.bounded(masses, bounds, weights, scratch);
                for (column, weight) in columns.chunks_exact_mut(n).zip(weights.iter_mut()) {
                    // As kernels will read it.
                    *weight = f64::from(weight.ln() as f32);
                    let factor = weight.exp();
                    column.iter_mut().for_each(|x| *x *= factor);
                }
            }
            if self.values {
                normalise(columns, n, masses);
                for (column, &slot) in columns.chunks_exact(n).zip(kept) {
                    let mut value = [0.0; Shape::MAX_HEAD_DIM];
                    cache.read_value(list, slot as usize, &mut value[..width]);
                    let value = value.map(f64::from);
                    outputs.chunks_exact_mut(width).zip(column).for_each(|(y, p)| add(y, -p, &value[..width]));
                }
                Design { columns, n, ridge: self.ridge }.solve(outputs, &mut scratch[n..]);
            }
        });
        let mut value = [0.0; Shape::MAX_HEAD_DIM];
        let value = &mut value[..width];
        for ((column, weight), &slot) in columns.chunks_exact(n).zip(&*weights).zip(kept) {
            let slot = slot as usize;
            if self.biases {
                let before = cache.column(list, slot, Column::Bias);
                cache.set_column(list, slot, Column::Bias, before + *weight as f32)?;
            }
            if self.values {
                let mut wanted = [0.0; Shape::MAX_HEAD_DIM];
                let wanted = &mut wanted[..width];
                outputs.chunks_exact(width).zip(column).for_each(|(z, &p)| add(wanted, p, z));
                cache.read_value(list, slot, value);
                value.iter_mut().zip(&*wanted).for_each(|(value, by)| *value = (f64::from(*value) + by) as f32);
                cache.write_value(list, slot, value)?;
            }
        }
        Ok(())
    }
}

/// Queries `[n, D]` ask a whole list: the weight of each key for them, `[keys, n]`, as a part of that of the highest logit; the sum
/// of the weights and that logit of each; their outputs, `[n, D]`.
fn ask(
    cache: &PagedCache,
    [sequence, head]: [usize; 2],
    (queries, width, logit): (&[f32], usize, &(dyn Fn(f64) -> f64 + Sync)),
    columns: &mut [f64],
    [masses, highest]: [&mut [f64]; 2],
    outputs: &mut [f64],
) {
    let n = masses.len();
    columns.par_chunks_mut(BLOCK * n).enumerate().for_each(|(block, columns)| {
        let mut scratch = [0.0; BLOCK * Shape::MAX_HEAD_DIM];
        let keys = cache.keys(sequence, head, block * BLOCK, columns.len() / n, &mut scratch).chunks_exact(width);
        for ((slot, key), column) in (block * BLOCK..).zip(keys).zip(columns.chunks_exact_mut(n)) {
            let bias = cache.token_bias(sequence, head, slot).map_or(0.0, |run| f64::from(run[0]));
            for (x, query) in column.iter_mut().zip(queries.chunks_exact(width)) {
                let inner: f64 = query.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                *x = logit(inner) + bias;
            }
        }
    });
    highest.fill(f64::NEG_INFINITY);
    for column in columns.chunks_exact(n) {
        highest.iter_mut().zip(column).for_each(|(most, &x)| *most = most.max(x));
    }
    let highest = &*highest;
    columns.par_chunks_mut(BLOCK * n).for_each(|columns| {
        let weights = columns.chunks_exact_mut(n).flat_map(|column| column.iter_mut().zip(highest));
        weights.for_each(|(x, most)| *x = (*x - most).exp());
    });
    masses.fill(0.0);
    columns.chunks_exact(n).for_each(|column| add(masses, 1.0, column));
    outputs.fill(0.0);
    for (block, columns) in columns.chunks(BLOCK * n).enumerate() {
        let mut scratch = [0.0; BLOCK * Shape::MAX_HEAD_DIM];
        let values = cache.values(sequence, head, block * BLOCK, columns.len() / n, &mut scratch);
        outputs.par_chunks_exact_mut(width).enumerate().for_each(|(query, y)| {
            let weights = columns.iter().skip(query).step_by(n);
            for (value, weight) in values.chunks_exact(width).zip(weights) {
                y.iter_mut().zip(value).for_each(|(y, &value)| *y += weight * f64::from(value));
            }
        });
    }
    let each = outputs.chunks_exact_mut(width).zip(&*masses);
    each.for_each(|(y, mass)| y.iter_mut().for_each(|y| *y /= mass));
}

/// Makes weights of keys `[keys, n]` a softmax for each query; `sums` is scratch.
fn normalise(columns: &mut [f64], n: usize, sums: &mut [f64]) {
    sums.fill(0.0);
    columns.chunks_exact(n).for_each(|column| add(sums, 1.0, column));
    // A query all of whose weight is gone is not asked.
    let each = columns.chunks_exact_mut(n).flat_map(|column| column.iter_mut().zip(&*sums));
    each.for_each(|(x, &sum)| *x /= sum.max(f64::MIN_POSITIVE));
}
