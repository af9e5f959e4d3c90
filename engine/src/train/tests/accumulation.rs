//! Running means of keys and values: hard decisions against a cache that accumulates, gradients against finite differences.

use super::*;
use crate::attention::rope::Frequencies;
use crate::cache::{CacheShape, Column, PagedCache};
use crate::policy::Registry;
use crate::policy::action::Fold;
use crate::tensor::{DType, Tensor};
use crate::train::accumulation::Accumulation;

const LEN: usize = 20;
/// KV heads, and channels of a head, of [`SMALL`].
const DIMS: [usize; 4] = [2, 2, LEN, 8];

fn random(rng: &mut ChaCha8Rng) -> Vec<f32> {
    (0..DIMS.iter().product()).map(|_| rng.random_range(-1.0..1.0)).collect()
}

fn tensors(arena: &Arena, values: &[Vec<f32>; 2]) -> [Tensor; 2] {
    values.each_ref().map(|values| Tensor::from_f32(arena, Label::Input, DType::F32, DIMS, values).unwrap())
}

fn extents(parameters: &Parameters) -> Extents<'_> {
    Extents { parameters, batch: DIMS[0], len: LEN, skipped: 0 }
}

#[test]
fn tokens_that_were_decided_on_come_together_as_in_a_cache() {
    let parameters = Parameters::all_frozen(&config(&SMALL, 50), DType::F32);
    let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let values = [random(&mut rng), random(&mut rng)];
    let decisions: Vec<bool> = (0..DIMS[0] * DIMS[1] * LEN).map(|_| rng.random_bool(0.7)).collect();
    let [mut k, mut v] = tensors(&arena, &values);
    let mut accumulation = Accumulation::new(&arena, &extents(&parameters)).unwrap();
    let weights: Vec<f32> = decisions.iter().map(|_| rng.random_range(0.01..1.0)).collect();
    accumulation.weights(1).copy_from_slice(&weights);
    accumulation.forward(1, &cpu, |index| f32::from(u8::from(decisions[index])), [&mut k, &mut v]);

    let policy = Registry::default().policy("knorm+accumulate:into=later").unwrap();
    let shape = CacheShape {
        batch: DIMS[0],
        kv_heads: DIMS[1],
        head_dim: DIMS[3],
        format: DType::F32.into(),
        max_tokens: LEN,
        page_tokens: 4,
        columns: policy.columns(),
    };
    let mut cache = PagedCache::new(&arena, shape).unwrap();
    let whole = tensors(&arena, &values);
    cache.append(whole[0].view(), whole[1].view(), 0..LEN).unwrap();
    for (index, &weight) in weights.iter().enumerate() {
        cache.set_column(index / LEN, index % LEN, Column::Weight, weight).unwrap();
    }
    let rope = Frequencies::new(DIMS[3], SMALL.rope_theta);
    let fold = Fold { arena: &arena, cpu: &cpu, seed: 0, number: 0, draws: None, rope: Some(&rope), asked: None };
    let mut row = vec![0.0; DIMS[3]];
    for (list, decisions) in decisions.chunks_exact(LEN).enumerate() {
        let stays = |&token: &u32| token as usize + 1 == LEN || !decisions[token as usize];
        let kept: Vec<u32> = (0..LEN as u32).filter(stays).collect();
        policy.shrink(&fold, &mut cache, list, &kept).unwrap();
        for (slot, &token) in kept.iter().enumerate() {
            for (tensor, is_key) in [(&k, true), (&v, false)] {
                if is_key {
                    cache.read_key(list, slot, &mut row)
                } else {
                    cache.read_value(list, slot, &mut row)
                }
                let expected = &tensor.to_f32()[(list * LEN + token as usize) * DIMS[3]..][..DIMS[3]];
                let near = row.iter().zip(expected).all(|(got, expected)| (got - expected).abs() < 1e-5);
                assert!(near, "list {list}, token {token}: {row:?}, {expected:?}");
            }
        }
    }
}

#[test]
fn gradients_equal_finite_differences() {
    let parameters = Parameters::all_frozen(&config(&SMALL, 50), DType::F32);
    let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let values = [random(&mut rng), random(&mut rng)];
    // The loss: a sum of all slots' numbers, each with a weight of its own.
    let weighed = [random(&mut rng), random(&mut rng)];
    let mut drawn = |range: std::ops::Range<f32>| -> Vec<f32> {
        (0..DIMS[0] * DIMS[1] * LEN).map(|_| rng.random_range(range.clone())).collect()
    };
    let inputs = [values[0].clone(), values[1].clone(), drawn(0.05..0.95), drawn(-3.0..3.0)];
    let mut accumulation = Accumulation::new(&arena, &extents(&parameters)).unwrap();
    // Keys, values, decisions, and what weights are sigmoids of.
    let forward = |accumulation: &mut Accumulation, [k, v, alphas, logits]: &[Vec<f32>; 4]| -> [Tensor; 2] {
        let weights = accumulation.weights(1).iter_mut().zip(logits);
        weights.for_each(|(weight, logit)| *weight = 1.0 / (1.0 + (-logit).exp()));
        let [mut k, mut v] = tensors(&arena, &[k.clone(), v.clone()]);
        accumulation.forward(1, &cpu, |index| alphas[index], [&mut k, &mut v]);
        [k, v]
    };
    let mut difference = |part: usize, index: usize| -> f64 {
        let mut at = |by: f32| -> f64 {
            let mut moved = inputs.clone();
            moved[part][index] += by;
            let slots = forward(&mut accumulation, &moved);
            let sums = slots.iter().zip(&weighed).map(|(slots, weights)| -> f64 {
                slots.to_f32().iter().zip(weights).map(|(x, weight)| f64::from(*x) * f64::from(*weight)).sum()
            });
            sums.sum()
        };
        (at(5e-3) - at(-5e-3)) / 1e-2
    };
    let lengths = inputs.each_ref().map(Vec::len);
    let expected: Vec<Vec<f64>> =
        (0..4).map(|part| (0..lengths[part]).map(|index| difference(part, index)).collect()).collect();
    let [k, v] = forward(&mut accumulation, &inputs);
    let [mut dk, mut dv] = tensors(&arena, &weighed);
    accumulation.backward(1, &cpu, |index| inputs[2][index], [&k, &v], [&mut dk, &mut dv]);
    let found = [dk.to_f32(), dv.to_f32(), accumulation.by_alpha.to_vec(), accumulation.by_importance.to_vec()];
    for (part, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let size = expected.iter().map(|x| x.abs()).fold(0.0, f64::max);
        for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
            assert!((f64::from(*found) - expected).abs() < 1e-3 * size, "{part} {index}: {found}, {expected}");
        }
    }
}
