//! Where heads look: masses, entropy and reach of the softmax of some queries; and norms of keys and values.

use crate::attention::few::group_logits;
use crate::attention::{DenseKv, Forward, Shape};
use crate::device::Cpu;
use crate::model::{Model, params};
use crate::stats::quantile;
use crate::tensor::TensorView;
use rayon::prelude::*;
use serde::Serialize;

/// First tokens of a text, on which attention sinks rest (StreamingLLM, arXiv 2309.17453).
pub const FIRST: usize = 4;
/// Latest tokens, the query's own among them.
pub const LAST: usize = 64;
/// Part of a softmax that [`Head::tokens_for_mass`] gathers.
pub const MASS: f64 = 0.9;
/// Most queries that are looked at, evenly over the second half of the text.
pub const QUERIES: usize = 64;

/// What a query head does, mean over the queries that are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Head {
    /// Fraction of the softmax on the first [`FIRST`] tokens.
    pub first_mass: f64,
    /// Fraction on the latest [`LAST`] tokens.
    pub last_mass: f64,
    /// Entropy of the softmax.
    pub entropy_nats: f64,
    /// Fewest tokens that hold [`MASS`] of the softmax.
    pub tokens_for_mass: f64,
    /// The same as a fraction of the tokens that the query sees.
    pub fraction_for_mass: f64,
}

/// What the keys and values of a KV head are like.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct KvHead {
    /// Mean norm of the first [`FIRST`] keys over the median norm of all.
    pub first_key_norm: f64,
    /// The same of values: sinks are quiet where it is far below 1.
    pub first_value_norm: f64,
}

/// The query heads of a layer; `q` is `[layers, Hq, L, D]` and `k` `[layers, Hkv, L, D]`, after RoPE.
pub(super) fn heads(model: &Model, layer: usize, (q, k): (&TensorView<'_>, &TensorView<'_>), cpu: &Cpu) -> Vec<Head> {
    let tokens = q.dims()[2];
    let looked_at = (tokens - tokens / 2).min(QUERIES);
    let queries: Vec<usize> = (1..=looked_at).map(|n| tokens / 2 + n * (tokens - tokens / 2) / looked_at - 1).collect();
    let kv_heads = model.config.kv_heads;
    cpu.install(|| {
        let of_group = |kv_head: usize| {
            let mut sums = vec![Vec::new(); model.config.q_heads / kv_heads];
            for &query in &queries {
                let seen = model.config.windows[layer].map_or(query + 1, |window| window.min(query + 1));
                softmaxes(model, layer, (q, k), [kv_head, query], cpu, |member, softmax| {
                    sums[member].push(Head::of(softmax, seen));
                });
            }
            sums.iter().map(|heads| Head::mean(heads)).collect::<Vec<Head>>()
        };
        (0..kv_heads).into_par_iter().flat_map_iter(of_group).collect()
    })
}

/// Hands the softmax of a query, over the tokens up to its own, to `visit` for each query head of a group.
pub(super) fn softmaxes(
    model: &Model,
    layer: usize,
    (q, k): (&TensorView<'_>, &TensorView<'_>),
    [kv_head, query]: [usize; 2],
    cpu: &Cpu,
    mut visit: impl FnMut(usize, &[f64]),
) {
    let config = &model.config;
    let (q, k) = (q.sequences(layer..layer + 1), k.sequences(layer..layer + 1).tokens(0..query + 1));
    let kv = DenseKv::new(k, k).expect("keys have their own shape");
    let shape = Shape {
        batch: 1,
        q_heads: config.q_heads,
        kv_heads: config.kv_heads,
        q_len: query + 1,
        kv_len: query + 1,
        head_dim: config.head_dim,
    };
    let call = Forward { shape, params: params(config, layer), q: q.tokens(0..query + 1), kv: &kv, cpu };
    let mut logits = vec![0.0; shape.group() * shape.kv_len];
    group_logits(&call, [0, kv_head], query, 0..shape.kv_len, &mut logits);
    for (member, logits) in logits.chunks_exact(shape.kv_len).enumerate() {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut softmax: Vec<f64> = logits.iter().map(|logit| f64::from(logit - largest).exp2()).collect();
        let sum: f64 = softmax.iter().sum();
        softmax.iter_mut().for_each(|p| *p /= sum);
        visit(member, &softmax);
    }
}

impl Head {
    /// What one softmax over all tokens up to the query shows, of which the query sees the latest `seen`.
    fn of(softmax: &[f64], seen: usize) -> Head {
        let tokens = softmax.len();
        let entropy_nats = -softmax.iter().filter(|p| **p > 0.0).map(|p| p * p.ln()).sum::<f64>();
        let mut sorted = softmax.to_vec();
        sorted.sort_unstable_by(|a, b| b.total_cmp(a));
        let mut gathered = 0.0;
        let tokens_for_mass =
            1 + sorted.iter().take_while(|p| (gathered += **p, gathered < MASS).1).count().min(seen - 1);
        Head {
            first_mass: softmax[..FIRST.min(tokens)].iter().sum(),
            last_mass: softmax[tokens.saturating_sub(LAST)..].iter().sum(),
            entropy_nats,
            tokens_for_mass: tokens_for_mass as f64,
            fraction_for_mass: tokens_for_mass as f64 / seen as f64,
        }
    }

    fn mean(heads: &[Head]) -> Head {
        let mean = |read: fn(&Head) -> f64| heads.iter().map(read).sum::<f64>() / heads.len() as f64;
        Head {
            first_mass: mean(|head| head.first_mass),
            last_mass: mean(|head| head.last_mass),
            entropy_nats: mean(|head| head.entropy_nats),
            tokens_for_mass: mean(|head| head.tokens_for_mass),
            fraction_for_mass: mean(|head| head.fraction_for_mass),
        }
    }
}

/// The KV heads of a layer; `k` and `v` are `[layers, Hkv, L, D]`.
pub(super) fn kv_heads(layer: usize, k: &TensorView<'_>, v: &TensorView<'_>) -> Vec<KvHead> {
    let first_norm = |tensor: &TensorView<'_>, head: usize| {
        let [_, _, tokens, width] = tensor.dims();
        let mut row = vec![0.0; width];
        let norm = |token: usize| {
            tensor.read_rows(layer, head, token, &mut row);
            row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt()
        };
        let norms: Vec<f64> = (0..tokens).map(norm).collect();
        let first = norms[..FIRST.min(tokens)].iter().sum::<f64>() / FIRST.min(tokens) as f64;
        first / quantile(&norms, 0.5)
    };
    let head = |head| KvHead { first_key_norm: first_norm(k, head), first_value_norm: first_norm(v, head) };
    (0..k.dims()[1]).map(head).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn softmaxes_by_hand() {
        let even = Head::of(&[0.01; 100], 100);
        assert!((even.entropy_nats - 100f64.ln()).abs() < 1e-9 && (even.first_mass - 0.04).abs() < 1e-12, "{even:?}");
        assert!((even.last_mass - 0.64).abs() < 1e-12 && (even.tokens_for_mass - 90.0).abs() <= 1.0, "{even:?}");
        let mut sink = [0.0; 80];
        (sink[0], sink[79]) = (0.95, 0.05);
        let in_window = Head::of(&sink, 16);
        assert_eq!(in_window, Head { fraction_for_mass: 1.0 / 16.0, ..Head::of(&sink, 80) });
        let sink = Head::of(&sink, 80);
        assert_eq!((sink.first_mass, sink.tokens_for_mass, sink.fraction_for_mass), (0.95, 1.0, 1.0 / 80.0));
        assert!((sink.last_mass - 0.05).abs() < 1e-12, "{sink:?}");
        // Of one token all is first and last.
        assert_eq!(Head::of(&[1.0], 1).first_mass, 1.0);
    }
}
