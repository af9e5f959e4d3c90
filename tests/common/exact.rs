//! Attention in f64, written from the definition and without a line of the crate's own mathematics.

use kvsieve::attention::{Params, Shape};

/// Whether query `i` sees key `j`, pair by pair.
pub fn sees(params: &Params, i: usize, j: usize, q_len: usize, kv_len: usize) -> bool {
    let (own, j) = (i as i128 + kv_len as i128 - q_len as i128, j as i128);
    let past = !(params.causal || params.window.is_some()) || j <= own;
    past && params.window.is_none_or(|window| j > own - window as i128)
}

/// Probabilities `[B, Hq, Lq, Lk]` and log-sum-exps `[B, Hq, Lq]`; `len(batch, KV head)` keys exist of each list.
pub fn probabilities(
    shape: &Shape,
    params: &Params,
    q: &[f64],
    k: &[f64],
    len: impl Fn(usize, usize) -> usize,
) -> (Vec<f64>, Vec<f64>) {
    let Shape { q_len, kv_len, head_dim: width, .. } = *shape;
    let (mut probabilities, mut lses) = (vec![0.0; shape.scores()], vec![0.0; shape.rows()]);
    for row in 0..shape.rows() {
        let (head, i) = (row / q_len, row % q_len);
        let (batch, kv_head) = (head / shape.q_heads, head % shape.q_heads / shape.group());
        let list = batch * shape.kv_heads + kv_head;
        let target = &mut probabilities[row * kv_len..][..kv_len];
        let logits: Vec<f64> = (0..len(batch, kv_head))
            .map(|j| {
                let key = &k[(list * kv_len + j) * width..][..width];
                let inner: f64 = q[row * width..][..width].iter().zip(key).map(|(a, b)| a * b).sum();
                let logit = f64::from(params.scale) * inner;
                let logit = params.softcap.map_or(logit, |cap| f64::from(cap) * (logit / f64::from(cap)).tanh());
                if sees(params, i, j, q_len, len(batch, kv_head)) { logit } else { f64::NEG_INFINITY }
            })
            .collect();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        lses[row] = f64::NEG_INFINITY;
        if max > f64::NEG_INFINITY {
            let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
            lses[row] = max + sum.ln();
            target.iter_mut().zip(&logits).for_each(|(p, logit)| *p = (logit - lses[row]).exp());
        }
    }
    (probabilities, lses)
}

/// Output `[B, Hq, Lq, D]` and log-sum-exps.
pub fn attend(shape: &Shape, params: &Params, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let Shape { q_len, kv_len, head_dim: width, .. } = *shape;
    let (probabilities, lses) = probabilities(shape, params, q, k, |_, _| kv_len);
    let mut o = vec![0.0; shape.rows() * width];
    for (row, o) in o.chunks_exact_mut(width).enumerate() {
        let head = row / q_len;
        let list = head / shape.q_heads * shape.kv_heads + head % shape.q_heads / shape.group();
        for (j, p) in probabilities[row * kv_len..][..kv_len].iter().enumerate() {
            let value = &v[(list * kv_len + j) * width..][..width];
            o.iter_mut().zip(value).for_each(|(o, v)| *o += p * v);
        }
    }
    (o, lses)
}

/// Gradients of `sum(o * grad_o)` by `q`, `k` and `v`, from central differences.
pub fn gradients(shape: &Shape, params: &Params, inputs: [&[f64]; 3], grad_o: &[f64]) -> [Vec<f64>; 3] {
    const STEP: f64 = 1e-5;
    let loss = |inputs: &[Vec<f64>; 3]| -> f64 {
        let [q, k, v] = inputs;
        attend(shape, params, q, k, v).0.iter().zip(grad_o).map(|(o, g)| o * g).sum()
    };
    let mut moved = inputs.map(<[f64]>::to_vec);
    [0, 1, 2].map(|which| {
        (0..inputs[which].len())
            .map(|index| {
                let here = moved[which][index];
                moved[which][index] = here + STEP;
                let above = loss(&moved);
                moved[which][index] = here - STEP;
                let below = loss(&moved);
                moved[which][index] = here;
                (above - below) / (2.0 * STEP)
            })
            .collect()
    })
}
