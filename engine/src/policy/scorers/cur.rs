//! CUR (arXiv 2509.15038, CurDKV): leverage of keys and values, approximated by squared norms.
//!
//! Formula and defaults are kvpress's: the squared norms of the keys and of the values are each divided by their sum
//! inside windows of `window` tokens, combined, and divided by the sum over the head. A short last window therefore gets
//! larger scores than its tokens deserve; so it is in kvpress. Where a sum is zero kvpress divides by zero; here the
//! scores of such a window are zero.

use super::super::linear::dot;
use crate::attention::Shape;
use crate::memory::Label;
use crate::named::Parameter;
use crate::policy::{Context, Policy, PolicyEntry, PolicyError, Protect, Scorer, Statistic, each_list};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "cur",
    about: "keeps the tokens whose key and value are large beside their neighbours'",
    paper: "2509.15038",
    parameters: &[
        Parameter { name: "sink", default: "4", about: "first tokens kept" },
        Parameter { name: "window", default: "16", about: "tokens among which norms are compared" },
        Parameter { name: "leverage", default: "kv", about: "kv (product), avg, key or value" },
    ],
    build: |named, _| {
        let leverage = match named.text("leverage") {
            None | Some("kv") => Leverage::Product,
            Some("avg") => Leverage::Average,
            Some("key") => Leverage::Key,
            Some("value") => Leverage::Value,
            Some(_) => return Err(named.wrong("leverage", "kv, avg, key or value".into()).into()),
        };
        let (sink, window) = (named.count("sink", 4, 0)?, named.count("window", 16, 1)?);
        Ok(Policy::after_prefill(Cur { sink, window, leverage }))
    },
};

#[derive(Clone, Copy, PartialEq)]
enum Leverage {
    Product,
    Average,
    Key,
    Value,
}

struct Cur {
    sink: usize,
    window: usize,
    leverage: Leverage,
}

impl Scorer for Cur {
    fn needs(&self) -> Vec<Statistic> {
        match self.leverage {
            Leverage::Key => vec![Statistic::Keys],
            Leverage::Value => vec![Statistic::Values],
            Leverage::Product | Leverage::Average => vec![Statistic::Keys, Statistic::Values],
        }
    }

    fn protect(&self, _: usize) -> Protect {
        Protect { sink: self.sink, window: 0 }
    }

    fn scratch_bytes(&self, shape: &Shape, _: usize) -> u64 {
        4 * (shape.batch * shape.kv_heads * shape.kv_len) as u64
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let mut scratch = context.arena.alloc::<f32>(Label::Workspace, scores.len())?;
        each_list(context, scores, &mut scratch, |list, scores, values| {
            let values = &mut values[..list.len];
            if self.leverage != Leverage::Value {
                list.keys(|slot, key| scores[slot] = dot(key, key));
                self.share(scores);
            }
            if self.leverage != Leverage::Key {
                list.values(|slot, value| values[slot] = dot(value, value));
                self.share(values);
            }
            for (score, &value) in scores.iter_mut().zip(&*values) {
                *score = match self.leverage {
                    Leverage::Product => *score * value,
                    Leverage::Average => (*score + value) / 2.0,
                    Leverage::Key => *score,
                    Leverage::Value => value,
                };
            }
            divide_by_sum(scores);
        });
        Ok(())
    }
}

impl Cur {
    /// Divides by the sums of the windows.
    fn share(&self, norms: &mut [f32]) {
        norms.chunks_mut(self.window).for_each(divide_by_sum);
    }
}

fn divide_by_sum(values: &mut [f32]) {
    let sum: f32 = values.iter().sum();
    if sum > 0.0 {
        values.iter_mut().for_each(|value| *value /= sum);
    }
}
