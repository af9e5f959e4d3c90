//! Running means of keys and values: hard decisions against a cache that accumulates, gradients against finite differences.

use super::*;
use crate::attention::rope::Frequencies;
use crate::cache::{CacheShape, PagedCache};
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
    accumulation.forward(&cpu, |index| f32::from(u8::from(decisions[index])), [&mut k, &mut v]);

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
    let rope = Frequencies::new(DIMS[3], SMALL.rope_theta);
    let fold = Fold { arena: &arena, cpu: &cpu, seed: 0, draws: None, rope: Some(&rope), asked: None };
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
    let alphas: Vec<f32> = (0..DIMS[0] * DIMS[1] * LEN).map(|_| rng.random_range(0.05..0.95)).collect();
    let mut accumulation = Accumulation::new(&arena, &extents(&parameters)).unwrap();
    let mut loss = |values: &[Vec<f32>; 2], alphas: &[f32]| -> f64 {
        let [mut k, mut v] = tensors(&arena, values);
        accumulation.forward(&cpu, |index| alphas[index], [&mut k, &mut v]);
        let sum = |tensor: &Tensor, weights: &[f32]| -> f64 {
            tensor.to_f32().iter().zip(weights).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum()
        };
        sum(&k, &weighed[0]) + sum(&v, &weighed[1])
    };
    let mut difference = |part: usize, index: usize| -> f64 {
        let at = |by: f32, loss: &mut dyn FnMut(&[Vec<f32>; 2], &[f32]) -> f64| {
            let (mut values, mut alphas) = (values.clone(), alphas.clone());
            if part < 2 {
                values[part][index] += by
            } else {
                alphas[index] += by
            }
            loss(&values, &alphas)
        };
        (at(5e-3, &mut loss) - at(-5e-3, &mut loss)) / 1e-2
    };
    let expected: Vec<Vec<f64>> = [values[0].len(), values[1].len(), alphas.len()]
        .into_iter()
        .enumerate()
        .map(|(part, count)| (0..count).map(|index| difference(part, index)).collect())
        .collect();
    let [mut k, mut v] = tensors(&arena, &values);
    let [mut dk, mut dv] = tensors(&arena, &weighed);
    accumulation.forward(&cpu, |index| alphas[index], [&mut k, &mut v]);
    accumulation.backward(&cpu, |index| alphas[index], [&k, &v], [&mut dk, &mut dv]);
    for (found, expected) in [dk.to_f32(), dv.to_f32(), accumulation.gradient.to_vec()].iter().zip(&expected) {
        let size = expected.iter().map(|x| x.abs()).fold(0.0, f64::max);
        for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
            assert!((f64::from(*found) - expected).abs() < 1e-3 * size, "{index}: {found}, {expected}");
        }
    }
}
