//! What an eviction loses for some queries: the attention that they would have paid to what is gone, and the error of their
//! output.
//!
//! In f64 over a few queries, by the definition: each query's softmax over all keys that it sees, and over those of them
//! that are retained. Where an action changes what is retained, its values stand in for the tensors'.

use crate::device::Cpu;
use crate::tensor::TensorView;
use rayon::prelude::*;

/// Queries, and the keys and values of the whole context.
#[derive(Clone, Copy)]
pub struct Asked<'a> {
    /// `[B, Hq, Lq, D]`.
    pub q: TensorView<'a>,
    /// The position of the first query: it sees the keys up to its own.
    pub first: usize,
    /// `[B, Hkv, Lk, D]`.
    pub k: TensorView<'a>,
    /// As `k`.
    pub v: TensorView<'a>,
}

/// What was lost, over all queries and heads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Loss {
    /// Mean fraction of the attention that falls on retained tokens.
    pub attention_mass_kept: f64,
    /// `|o - o_full| / |o_full|`; a query that sees no retained token has `o = 0`. `None` where `o_full` is 0.
    pub output_error: Option<f64>,
}

/// What retained tokens have of their own, where it is not the context's; `columns` is the longest list's length.
#[derive(Clone, Copy, Default)]
pub struct Own<'a> {
    /// `[B, Hkv, columns, D]`.
    pub keys: Option<&'a [f32]>,
    /// `[B, Hkv, columns, D]`.
    pub values: Option<&'a [f32]>,
    /// What is added to logits, `[B, Hkv, columns]`.
    pub biases: Option<&'a [f32]>,
}

impl<'a> Own<'a> {
    /// That of the list whose tokens begin at `token`, `count` of them, of `width` elements.
    fn of_list(self, token: usize, count: usize, width: usize) -> Self {
        let part = |rows: Option<&'a [f32]>, width: usize| rows.map(|rows| &rows[token * width..][..count * width]);
        Own { keys: part(self.keys, width), values: part(self.values, width), biases: part(self.biases, 1) }
    }
}

/// The loss of retaining the positions `kept` of each (sequence, KV head).
pub fn loss(asked: Asked<'_>, kept: &[&[u32]], own: Own<'_>, cpu: &Cpu) -> Loss {
    let [_, q_heads, queries, _] = asked.q.dims();
    let [_, kv_heads, ..] = asked.k.dims();
    let columns = kept.iter().map(|kept| kept.len()).max().unwrap_or(0);
    let of_list = |(list, kept): (usize, &&[u32])| {
        let (batch, kv_head) = (list / kv_heads, list % kv_heads);
        let group = q_heads / kv_heads;
        let keys = List::read(asked.k, batch, kv_head);
        let context = List::read(asked.v, batch, kv_head);
        let own = own.of_list(list * columns, kept.len(), keys.width);
        let mut sums = [0.0; 3];
        for q_head in kv_head * group..(kv_head + 1) * group {
            for query in 0..queries {
                let mut q = vec![0.0; keys.width];
                asked.q.read_rows(batch, q_head, query, &mut q);
                let seen = (asked.first + query + 1).min(keys.rows.len() / keys.width);
                let part = keys.part_of(&q, seen, &context, kept, own);
                sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
            }
        }
        sums
    };
    let add = |a: [f64; 3], b: [f64; 3]| [a[0] + b[0], a[1] + b[1], a[2] + b[2]];
    // Collected, so that the order of the sum is fixed.
    let sums: Vec<[f64; 3]> = cpu.install(|| kept.par_iter().enumerate().map(of_list).collect());
    let [mass, error, full] = sums.into_iter().fold([0.0; 3], add);
    let rows = (kept.len() / kv_heads * q_heads * queries) as f64;
    Loss { attention_mass_kept: mass / rows, output_error: (full > 0.0).then(|| (error / full).sqrt()) }
}

/// The keys or values of a (sequence, KV head).
struct List {
    rows: Vec<f32>,
    width: usize,
}

impl List {
    fn read(tensor: TensorView<'_>, batch: usize, head: usize) -> Self {
        let [_, _, len, width] = tensor.dims();
        let mut rows = vec![0.0; len * width];
        tensor.read_rows(batch, head, 0, &mut rows);
        List { rows, width }
    }

    /// Of a query over the first `seen` of these keys: the attention on retained tokens, the squared error of the output
    /// and its squared length.
    fn part_of(&self, q: &[f32], seen: usize, context: &List, kept: &[u32], own: Own<'_>) -> [f64; 3] {
        let scale = 1.0 / (self.width as f64).sqrt();
        let logit = |key: &[f32]| scale * key.iter().zip(q).map(|(&k, &q)| f64::from(k) * f64::from(q)).sum::<f64>();
        let logits: Vec<f64> = self.rows.chunks_exact(self.width).take(seen).map(logit).collect();
        let highest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = logits.iter().map(|logit| (logit - highest).exp()).collect();
        let (mut full, mut rest) = (vec![0.0; self.width], vec![0.0; self.width]);
        let add = |to: &mut [f64], weight: f64, value: &[f32]| {
            to.iter_mut().zip(value).for_each(|(to, &value)| *to += weight * f64::from(value));
        };
        for (weight, value) in weights.iter().zip(context.rows.chunks_exact(self.width)) {
            add(&mut full, *weight, value);
        }
        // Attention that falls on retained tokens, and what it is by their own keys.
        let (mut mass, mut own_mass) = (0.0, 0.0);
        for (column, position) in kept.iter().map(|&position| position as usize).enumerate() {
            if position < seen {
                let [key, value] =
                    [own.keys, own.values].map(|rows| rows.map(|rows| &rows[column * self.width..][..self.width]));
                let weight = key.map_or(weights[position], |key| (logit(key) - highest).exp());
                let weight = own.biases.map_or(weight, |biases| weight * f64::from(biases[column]).exp());
                add(&mut rest, weight, value.unwrap_or(&context.rows[position * self.width..][..self.width]));
                mass += weights[position];
                own_mass += weight;
            }
        }
        let total: f64 = weights.iter().sum();
        let distance = |(full, rest): (&f64, &f64)| {
            // No mass is no output; one that is no number is told.
            let rest = if own_mass == 0.0 { 0.0 } else { rest / own_mass };
            (full / total - rest).powi(2)
        };
        let error = full.iter().zip(&rest).map(distance).sum();
        [mass / total, error, full.iter().map(|x| (x / total).powi(2)).sum()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Arena, Label};
    use crate::tensor::{DType, Tensor};

    fn tensor(arena: &Arena, dims: [usize; 4], values: &[f32]) -> Tensor {
        let mut tensor = Tensor::zeros(arena, Label::Input, DType::F32, dims).unwrap();
        DType::F32.encode(values, tensor.bytes_mut());
        tensor
    }

    #[test]
    fn lost_attention_and_output_are_as_by_hand() {
        let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(1)).unwrap());
        // Keys of zeros: even attention. The first query sees three of four tokens, the second all.
        let q = tensor(&arena, [1, 2, 2, 1], &[1.0, 2.0, -1.0, 0.5]);
        let k = tensor(&arena, [1, 1, 4, 1], &[0.0; 4]);
        let v = tensor(&arena, [1, 1, 4, 1], &[1.0, 2.0, 3.0, 6.0]);
        let asked = Asked { q: q.view(), first: 2, k: k.view(), v: v.view() };
        let third = [0.0, 3.0f32.ln()];
        for (kept, values, biases, mass, errors) in [
            (&[0u32, 1, 2, 3][..], None, None, 1.0, [0.0, 0.0]),
            (&[1, 3], None, None, (1.0 / 3.0 + 0.5) / 2.0, [0.0, 1.0]),
            (&[1, 3], Some(&[4.0f32, 2.0][..]), None, (1.0 / 3.0 + 0.5) / 2.0, [2.0, 0.0]),
            // The last token counts for three.
            (&[1, 3], None, Some(&third[..]), (1.0 / 3.0 + 0.5) / 2.0, [0.0, 2.0]),
            // The first query sees nothing that is retained.
            (&[3], None, None, 0.125, [2.0, 3.0]),
        ] {
            let found = loss(asked, &[kept], Own { values, biases, ..Own::default() }, &cpu);
            let of_all = (errors.iter().map(|e: &f64| e * e).sum::<f64>() / (4.0 + 9.0)).sqrt();
            assert!((found.attention_mass_kept - mass).abs() < 1e-12, "{kept:?}: {found:?}");
            // A bias is f32.
            let error = found.output_error.unwrap();
            assert!((error - of_all).abs() < 1e-7, "{kept:?}: {found:?}, not {of_all}");
        }
    }
}
