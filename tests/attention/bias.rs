//! A bias of keys behind a window: results and gradients against an f64 attention and its central differences, and kernels
//! against each other on large problems.

use crate::common;
use crate::common::exact::sees;
use crate::common::ragged::Ragged;
use crate::common::{Problem, cpu, grad_o, inputs, relative_l2, root_mean_square_error, shape, widen};
use kvsieve::attention::{
    AttentionError, Backward, DenseKv, Forward, Gradients, Inputs, KeyBias, KvRows, Outputs, Params, Shape, kernel,
};
use kvsieve::cache::{CacheShape, Column, PagedCache};
use kvsieve::memory::Arena;
use kvsieve::tensor::{DType, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A problem with a bias: `[B, Hkv, Lk]` numbers, from `window` keys behind a query on.
struct Biased {
    problem: Problem,
    bias: Vec<f32>,
    window: usize,
}

impl Biased {
    fn new(problem: Problem, window: usize, seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let count = problem.shape.batch * problem.shape.kv_heads * problem.shape.kv_len;
        Biased { problem, bias: (0..count).map(|_| -rng.random_range(0.0f32..4.0)).collect(), window }
    }

    /// Output and log-sum-exps in f64 from the definition.
    fn exact(&self, [q, k, v, bias]: [&[f64]; 4]) -> (Vec<f64>, Vec<f64>) {
        let Problem { shape, params, .. } = &self.problem;
        let (len, width, before) = (shape.kv_len, shape.head_dim, shape.kv_len as i64 - shape.q_len as i64);
        let (mut o, mut lses) = (vec![0.0; shape.rows() * width], Vec::new());
        for (row, o) in o.chunks_exact_mut(width).enumerate() {
            let (head, i) = (row / shape.q_len, row % shape.q_len);
            let list = head / shape.q_heads * shape.kv_heads + head % shape.q_heads / shape.group();
            let logit = |j: usize| {
                let key = &k[(list * len + j) * width..][..width];
                let inner: f64 = q[row * width..][..width].iter().zip(key).map(|(a, b)| a * b).sum();
                let logit = f64::from(params.scale) * inner;
                let logit = params.softcap.map_or(logit, |cap| f64::from(cap) * (logit / f64::from(cap)).tanh());
                let is_far = i as i64 + before - j as i64 >= self.window as i64;
                let logit = if is_far { logit + bias[list * len + j] } else { logit };
                if sees(params, i, j, shape.q_len, len) { logit.exp() } else { 0.0 }
            };
            let weights: Vec<f64> = (0..len).map(logit).collect();
            let sum: f64 = weights.iter().sum();
            lses.push(sum.ln());
            for (j, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
                let value = &v[(list * len + j) * width..][..width];
                o.iter_mut().zip(value).for_each(|(o, v)| *o += weight / sum * v);
            }
        }
        (o, lses)
    }

    /// Gradients of `sum(o * grad_o)` by q, k, v and the bias, from central differences.
    fn differences(&self, inputs: [&[f64]; 4], grad_o: &[f64]) -> [Vec<f64>; 4] {
        const STEP: f64 = 1e-5;
        let mut moved = inputs.map(<[f64]>::to_vec);
        let loss = |moved: &[Vec<f64>; 4]| -> f64 {
            let [q, k, v, bias] = moved;
            self.exact([q, k, v, bias]).0.iter().zip(grad_o).map(|(o, g)| o * g).sum()
        };
        [0, 1, 2, 3].map(|which| {
            let by = |index| {
                let here = moved[which][index];
                let [below, above] = [-STEP, STEP].map(|step| {
                    moved[which][index] = here + step;
                    loss(&moved)
                });
                moved[which][index] = here;
                (above - below) / (2.0 * STEP)
            };
            (0..inputs[which].len()).map(by).collect()
        })
    }

    /// Runs a forward pass and, where there is a gradient by `o`, a backward pass: `o`, `lse`, and the gradients.
    fn run(
        &self,
        name: &str,
        inputs: &Inputs,
        grad_o: Option<&Tensor>,
    ) -> Result<(Vec<Vec<f32>>, Outputs), AttentionError> {
        let Problem { shape, params, dtype } = self.problem;
        let (kernel, arena, threads) = (kernel(name).unwrap(), Arena::unlimited(), 2);
        let kv = DenseKv::new(inputs.k.view(), inputs.v.view())?;
        let kv = kv.with_bias(KeyBias { values: &self.bias, window: self.window });
        let forward = Forward { shape, params, q: inputs.q.view(), kv: &kv, cpu: cpu(threads) };
        let mut outputs = Outputs::allocate(&arena, &shape, dtype)?;
        let mut workspace = kernel.workspace(&shape, &params, dtype, threads).allocate(&arena)?;
        workspace.scratch.fill(f32::NAN);
        kernel.forward(&forward, &mut outputs, &mut workspace)?;
        let Some(grad_o) = grad_o else { return Ok((Vec::new(), outputs)) };
        let mut gradients = Gradients::allocate(&arena, &shape, dtype)?.with_bias(&arena, &shape)?;
        gradients.bias.as_mut().unwrap().fill(f32::NAN);
        let mut workspace = kernel.backward_workspace(&shape, &params, dtype, threads).unwrap().allocate(&arena)?;
        workspace.scratch.fill(f32::NAN);
        let call = Backward { forward, o: outputs.o.view(), lse: &outputs.lse, grad_o: grad_o.view() };
        kernel.backward(&call, &mut gradients, &mut workspace)?;
        let Gradients { q, k, v, bias } = gradients;
        Ok((vec![q.to_f32(), k.to_f32(), v.to_f32(), bias.unwrap().to_vec()], outputs))
    }
}

fn small() -> Vec<(Problem, usize)> {
    let (full, causal) = (Params::new(6, false), Params::new(6, true));
    let cases = [
        ([1, 1, 1, 5, 7, 6], full, 2),
        ([2, 4, 2, 9, 9, 6], causal, 3),
        ([1, 2, 1, 5, 9, 6], causal, 0),
        ([1, 4, 2, 8, 8, 6], Params { window: Some(6), ..causal }, 2),
        ([1, 2, 1, 7, 9, 6], Params { softcap: Some(1.5), ..causal }, 1),
        ([1, 2, 2, 6, 6, 6], Params { scale: -0.7, ..causal }, 1),
        ([1, 2, 1, 6, 6, 6], causal, 100),
    ];
    let all = |(extents, params, window)| {
        [DType::F32, DType::Bf16].map(|dtype| (Problem { shape: shape(extents), params, dtype }, window))
    };
    cases.into_iter().flat_map(all).collect()
}

#[test]
fn results_and_gradients_equal_an_exact_attention_and_its_differences() {
    for (seed, (problem, window)) in small().into_iter().enumerate() {
        let biased = Biased::new(problem, window, seed as u64);
        let problem = &biased.problem;
        let (data, grad) = (inputs(problem, seed as u64), grad_o(problem, seed as u64));
        let [q, k, v, g] = [&data.q, &data.k, &data.v, &grad].map(|tensor| widen(&tensor.to_f32()));
        let exact = [&*q, &*k, &*v, &*widen(&biased.bias)];
        let ((o, lse), expected) = (biased.exact(exact), biased.differences(exact, &g));
        let most = if problem.dtype == DType::F32 { 2e-6 } else { 1.6e-2 };
        for name in ["reference", "naive", "tiled"] {
            let backward = (name != "reference").then_some(&grad);
            let (gradients, outputs) = biased.run(name, &data, backward).unwrap();
            let error = relative_l2(&outputs.o.to_f32(), &o).max(relative_l2(&outputs.lse, &lse) / 10.0);
            assert!(error <= most, "{name}: o or lse is off by {error:e} in {problem:?}");
            for ((which, got), wanted) in ["dq", "dk", "dv", "dbias"].iter().zip(&gradients).zip(&expected) {
                let error = root_mean_square_error(got, wanted);
                assert!(error <= most, "{name}: {which} is off by {error:e} in {problem:?}, window {window}");
            }
        }
    }
}

#[test]
fn kernels_agree_on_large_problems() {
    let cases = [
        ([1, 3, 1, 700, 700, 64], Params::new(64, true), 130),
        ([2, 4, 2, 97, 513, 40], Params { softcap: Some(15.0), ..Params::new(40, true) }, 50),
        ([1, 2, 2, 300, 300, 16], Params { window: Some(200), ..Params::new(16, true) }, 64),
    ];
    for (seed, (extents, params, window)) in cases.into_iter().enumerate() {
        for (dtype, most) in [(DType::F32, 2e-6), (DType::Bf16, 1.6e-2)] {
            let biased = Biased::new(Problem { shape: shape(extents), params, dtype }, window, seed as u64);
            let data = inputs(&biased.problem, seed as u64);
            let grad = grad_o(&biased.problem, seed as u64);
            let (naive, _) = biased.run("naive", &data, Some(&grad)).unwrap();
            let (tiled, _) = biased.run("tiled", &data, Some(&grad)).unwrap();
            for ((which, got), wanted) in ["dq", "dk", "dv", "dbias"].iter().zip(&tiled).zip(&naive) {
                let error = root_mean_square_error(got, &widen(wanted));
                assert!(error <= most, "{which} is off by {error:e} in {:?}", biased.problem);
            }
        }
    }
}

#[test]
fn a_bias_of_nothing_changes_no_bit() {
    let problem = Problem { shape: shape([1, 4, 2, 150, 150, 24]), params: Params::new(24, true), dtype: DType::F32 };
    let (data, grad) = (inputs(&problem, 3), grad_o(&problem, 3));
    let mut biased = Biased::new(problem, 20, 3);
    biased.bias.fill(0.0);
    for name in ["naive", "tiled"] {
        let plain = common::backward(name, &biased.problem, &data, &grad, 1);
        assert_eq!(biased.run(name, &data, Some(&grad)).unwrap().0[..3], plain, "{name}");
    }
}

#[test]
fn the_decode_kernel_refuses_a_bias() {
    let problem = Problem { shape: shape([1, 1, 1, 1, 4, 8]), params: Params::new(8, true), dtype: DType::F32 };
    let data = inputs(&problem, 1);
    let error = Biased::new(problem, 1, 1).run("decode", &data, None).err().unwrap().to_string();
    assert_eq!(error, "kernel 'decode' has no bias of keys; use tiled");
}

/// A cache of a problem's keys and values in a format, whose tokens carry `columns`.
fn cached(arena: &Arena, shape: &Shape, data: &Inputs, format: &str, columns: &'static [Column]) -> PagedCache {
    let Shape { batch, kv_heads, kv_len, head_dim, .. } = *shape;
    let format = format.parse().unwrap();
    let shape = CacheShape { batch, kv_heads, head_dim, format, max_tokens: kv_len, page_tokens: 4, columns };
    let mut cache = PagedCache::new(arena, shape).unwrap();
    cache.append(data.k.view(), data.v.view(), 0..kv_len).unwrap();
    cache
}

/// Output and log-sum-exps of a kernel.
fn attend(name: &str, problem: &Problem, data: &Inputs, kv: &dyn KvRows) -> (Vec<f32>, Vec<f32>) {
    let Problem { shape, params, dtype } = *problem;
    let (kernel, arena, threads) = (kernel(name).unwrap(), Arena::unlimited(), 2);
    let mut outputs = Outputs::allocate(&arena, &shape, dtype).unwrap();
    let mut workspace = kernel.workspace(&shape, &params, dtype, threads).allocate(&arena).unwrap();
    workspace.scratch.fill(f32::NAN);
    let call = Forward { shape, params, q: data.q.view(), kv, cpu: cpu(threads) };
    kernel.forward(&call, &mut outputs, &mut workspace).unwrap();
    (outputs.o.to_f32(), outputs.lse.to_vec())
}

#[test]
fn a_token_with_the_bias_ln_c_counts_for_c_of_it() {
    for (seed, (queries, params)) in [
        (1, Params::new(16, false)),
        (7, Params { softcap: Some(1.5), ..Params::new(16, false) }),
        (60, Params { scale: -0.4, ..Params::new(16, false) }),
    ]
    .into_iter()
    .enumerate()
    {
        let arena = Arena::unlimited();
        let shape = shape([2, 4, 2, queries, 340, 16]);
        let problem = Problem { shape, params, dtype: DType::F32 };
        let data = inputs(&problem, seed as u64);
        let mut cache = cached(&arena, &shape, &data, "f32", &[Column::Attention, Column::Bias]);
        let mut repeated = Ragged::prefixes(2, 16, 340, &data.k.to_f32(), &data.v.to_f32(), &[0; 4]);
        for list in 0..4 {
            // Lists of different lengths, whose tokens count for 1 to 3.
            cache.retain(list, (0..340).filter(|slot| slot % (list + 2) != 0)).unwrap();
            for slot in 0..cache.lens()[list] {
                let count = 1 + (slot * 7 + list) % 3;
                cache.set_column(list, slot, Column::Bias, (count as f32).ln()).unwrap();
                let mut row = [0.0; 16];
                for _ in 0..count {
                    cache.read_key(list, slot, &mut row);
                    repeated.k[list].extend(row);
                    cache.read_value(list, slot, &mut row);
                    repeated.v[list].extend(row);
                }
            }
        }
        let longest = repeated.k.iter().map(|list| list.len() / 16).max().unwrap();
        let more = Problem { shape: Shape { kv_len: longest, ..shape }, ..problem };
        let (o, lse) = attend("reference", &more, &data, &repeated);
        let problem = Problem { shape: Shape { kv_len: cache.max_len(), ..shape }, ..problem };
        for name in common::VARIANTS.into_iter().chain(["reference"]) {
            let (got, got_lse) = attend(name, &problem, &data, &cache);
            let error = relative_l2(&got, &widen(&o)).max(relative_l2(&got_lse, &widen(&lse)));
            assert!(error <= 2e-6, "{name}: off by {error:e} in {problem:?}");
        }
    }
}

#[test]
fn what_tokens_carry_is_added_in_every_format_and_under_every_mask() {
    let causal = Params::new(32, true);
    for (queries, params) in [(1, causal), (40, causal), (40, Params { window: Some(9), ..causal })] {
        for format in ["f32", "int8", "q4_0:recent=8,first=2", "kivi"] {
            let arena = Arena::unlimited();
            let problem = Problem { shape: shape([1, 4, 2, queries, 300, 32]), params, dtype: DType::F32 };
            let data = inputs(&problem, 5);
            let run = |columns: &'static [Column], bias: f32| {
                let mut cache = cached(&arena, &problem.shape, &data, format, columns);
                for (list, slot) in (0..2).flat_map(|list| (0..300).map(move |slot| (list, slot))) {
                    if bias != 0.0 {
                        cache.set_column(list, slot, Column::Bias, bias * ((slot * 7 + list) % 5) as f32).unwrap();
                    }
                }
                let names = ["reference", "naive", "tiled", "tiled:br=7,bc=5", "decode"];
                names.map(|name| attend(name, &problem, &data, &cache))
            };
            let (without, none, some) = (run(&[], 0.0), run(&[Column::Bias], 0.0), run(&[Column::Bias], 0.5));
            assert_eq!(none, without, "a bias of nothing changes no bit: {format}");
            let (o, lse) = &some[0];
            for (got, got_lse) in &some[1..] {
                let error = relative_l2(got, &widen(o)).max(relative_l2(got_lse, &widen(lse)));
                assert!(error <= 2e-6, "off by {error:e} in {problem:?}, {format}");
            }
            let change = relative_l2(&without[0].0, &widen(o));
            assert!(change > 1e-2, "biases change what is read: {change:e}");
        }
    }
}
