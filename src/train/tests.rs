//! Gradients against finite differences, modes against each other, memory against its formula, and learning.

use super::activations::Extents;
use super::adamw::{AdamW, Constants};
use super::loss::Target;
use super::{Batch, ModelSpec, Network, Parameters, Recompute};
use crate::attention::rope::{Frequencies, rotate};
use crate::device::Cpu;
use crate::memory::{Arena, Label};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const SMALL: ModelSpec = ModelSpec {
    hidden: 24,
    layers: 2,
    q_heads: 4,
    kv_heads: 2,
    head_dim: 8,
    ffn: 40,
    max_positions: 64,
    rope_theta: 100.0,
    norm_eps: 1e-5,
};

fn extents(batch: usize, len: usize) -> Extents {
    Extents { spec: SMALL, vocab: 50, batch, len }
}

/// Random tokens, of which about half are judged, with weights of three sizes.
fn batch(extents: &Extents, seed: u64) -> Batch {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let tokens: Vec<u32> = (0..extents.rows()).map(|_| rng.random_range(0..extents.vocab as u32)).collect();
    let mut targets = Vec::new();
    for row in 0..extents.rows() {
        if rng.random_bool(0.5) {
            let token = rng.random_range(0..extents.vocab as u32);
            targets.push(Target { row, token, weight: rng.random_range(1..4) as f32 });
        }
    }
    let sum: f32 = targets.iter().map(|target| target.weight).sum();
    targets.iter_mut().for_each(|target| target.weight /= sum);
    Batch { tokens, targets }
}

/// Weights far from their small beginnings, so that every path matters.
fn weights(parameters: &Parameters, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let spread = |parameter: &super::parameters::Parameter| if parameter.spread.is_some() { 0.3 } else { 0.5 };
    let mut weights = vec![0.0; parameters.count()];
    for parameter in &parameters.all {
        let base = if parameter.spread.is_some() { 0.0 } else { 1.0 };
        for weight in &mut weights[parameter.range.clone()] {
            *weight = base + rng.random_range(-1.0..1.0f32) * spread(parameter);
        }
    }
    weights
}

fn gradient(extents: Extents, recompute: Recompute, threads: usize) -> (f64, Vec<f32>) {
    let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(threads)).unwrap());
    let parameters = Parameters::new(&extents.spec, extents.vocab);
    let mut network = Network::new(&arena, &cpu, extents, &parameters, recompute).unwrap();
    let mut gradient = vec![0.0; parameters.count()];
    let loss = network.step(&weights(&parameters, 3), &batch(&extents, 4), &mut gradient).unwrap();
    (loss, gradient)
}

#[test]
fn every_gradient_equals_the_finite_difference_of_the_loss() {
    let extents = extents(2, 19);
    let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
    let parameters = Parameters::new(&extents.spec, extents.vocab);
    let mut network = Network::new(&arena, &cpu, extents, &parameters, Recompute::None).unwrap();
    let (weights, batch) = (weights(&parameters, 3), batch(&extents, 4));
    let mut gradient = vec![0.0; parameters.count()];
    network.step(&weights, &batch, &mut gradient).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for parameter in &parameters.all {
        let range = parameter.range.clone();
        let norm = gradient[range.clone()].iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
        assert!(norm > 1e-4, "{} has no gradient: {norm}", parameter.name);
        // Along the gradient, and along signs that agree with it on three quarters of the elements: a wrong element
        // hides from neither.
        for agree in [None, Some(0.75)] {
            let direction: Vec<f64> = match agree {
                None => gradient[range.clone()].iter().map(|&g| f64::from(g) / norm).collect(),
                Some(share) => {
                    let unit = 1.0 / (range.len() as f64).sqrt();
                    let sign = |&g: &f32| if (g > 0.0) == rng.random_bool(share) { unit } else { -unit };
                    gradient[range.clone()].iter().map(sign).collect()
                }
            };
            let slope: f64 = gradient[range.clone()].iter().zip(&direction).map(|(&g, d)| f64::from(g) * d).sum();
            let mut loss = |step: f64| {
                let mut moved = weights.clone();
                for (weight, d) in moved[range.clone()].iter_mut().zip(&direction) {
                    *weight = (f64::from(*weight) + step * d) as f32;
                }
                network.judge(&moved, &batch, |_, _| ()).unwrap()
            };
            // Two central differences, combined so that the error of the third power falls out.
            let h = 0.02;
            let wide = (loss(2.0 * h) - loss(-2.0 * h)) / (4.0 * h);
            let near = (loss(h) - loss(-h)) / (2.0 * h);
            let difference = (4.0 * near - wide) / 3.0;
            let error = (difference - slope).abs() / slope.abs().max(0.02);
            assert!(error < 4e-3, "{}: gradient {slope:.6}, difference {difference:.6}", parameter.name);
        }
    }
}

#[test]
fn recomputation_and_threads_do_not_change_a_bit() {
    for extents in [extents(2, 19), extents(3, 301)] {
        let expected = gradient(extents, Recompute::None, 1);
        for recompute in Recompute::ALL {
            for threads in [1, 2, 3] {
                let found = gradient(extents, recompute, threads);
                assert_eq!(expected.0.to_bits(), found.0.to_bits(), "{recompute:?}, {threads} threads");
                let differ = expected.1.iter().zip(&found.1).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                assert_eq!(differ, 0, "{recompute:?}, {threads} threads: {differ} of {} differ", found.1.len());
            }
        }
    }
}

#[test]
fn training_takes_exactly_the_bytes_that_are_predicted() {
    for (extents, threads) in [(extents(2, 19), 1), (extents(1, 700), 2), (extents(7, 300), 3)] {
        let cpu = Cpu::new(Some(threads)).unwrap();
        let parameters = Parameters::new(&extents.spec, extents.vocab);
        let mut before = u64::MAX;
        for recompute in Recompute::ALL {
            let arena = Arena::unlimited();
            let weights = parameters.initial(&arena, 1).unwrap();
            let mut gradients = arena.alloc(Label::Gradients, parameters.count()).unwrap();
            let mut adamw = AdamW::new(&arena, &parameters).unwrap();
            let mut network = Network::new(&arena, &cpu, extents, &parameters, recompute).unwrap();
            let mut weights = weights;
            network.step(&weights, &batch(&extents, 1), &mut gradients).unwrap();
            adamw.update(&cpu, &CONSTANTS, &parameters, (0, 1e-3), &mut weights, &gradients);
            let predicted = extents.training_bytes(recompute, threads);
            assert_eq!(arena.usage().peak, predicted, "{recompute:?}");

            // The table of `activations.rs`, written out once more.
            let ModelSpec { hidden, layers, q_heads, kv_heads, head_dim, ffn, .. } = extents.spec;
            let (q, kv) = (q_heads * head_dim, kv_heads * head_dim);
            let (input, cheap) = (hidden, 2 + q + q_heads + hidden);
            let inner = 2 * hidden + 2 * q + 2 * kv + 3 * ffn;
            let kept = match recompute {
                Recompute::None => layers * (input + cheap + inner),
                Recompute::Selective => layers * (input + cheap) + inner,
                Recompute::Full => layers * input + cheap + inner,
            };
            let once = 4 * hidden + 1 + (q + 2 * kv) * 2 + ffn + q;
            assert_eq!(predicted[&Label::Activations], 4 * (extents.rows() * (kept + once)) as u64, "{recompute:?}");
            assert!(predicted[&Label::Activations] < before, "{recompute:?} saves nothing");
            before = predicted[&Label::Activations];
        }
    }
}

const CONSTANTS: Constants = Constants {
    learning_rate: 3e-3,
    warmup_steps: 20,
    final_share: 0.1,
    weight_decay: 0.01,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    clip: 1.0,
};

#[test]
fn the_rate_rises_to_its_largest_and_falls_to_its_share() {
    let rates: Vec<f32> = (0..200).map(|step| CONSTANTS.rate(step, 200)).collect();
    assert!((rates[0] - 3e-3 / 20.0).abs() < 1e-9 && (rates[19] - 3e-3).abs() < 1e-9);
    assert!(rates[..20].is_sorted() && rates[20..].is_sorted_by(|a, b| a >= b));
    assert!((rates[199] - 3e-4).abs() < 1e-6, "{}", rates[199]);
}

/// Before any training: q and k of the first block, by the same matrices that a step multiplies.
#[test]
fn the_first_heads_look_back_one_token_further_each() {
    let spec = ModelSpec { hidden: 64, head_dim: 32, rope_theta: 1e4, ..SMALL };
    let parameters = Parameters::new(&spec, 50);
    let weights = parameters.initial(&Arena::unlimited(), 1).unwrap();
    let (embedding, qkv) = (&weights[parameters.embedding.clone()], &weights[parameters.blocks[0].qkv.clone()]);
    let frequencies = Frequencies::new(spec.head_dim, spec.rope_theta);
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let tokens: Vec<usize> = (0..60).map(|_| rng.random_range(0..50)).collect();
    let head = |head: usize, place: usize| {
        let x = &embedding[tokens[place] * spec.hidden..][..spec.hidden];
        let inverse = (spec.hidden as f32 / x.iter().map(|x| x * x).sum::<f32>()).sqrt();
        let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| w * x * inverse).sum::<f32>();
        let rows = qkv[head * spec.head_dim * spec.hidden..][..spec.head_dim * spec.hidden].chunks_exact(spec.hidden);
        let mut row: Vec<f32> = rows.map(dot).collect();
        rotate(&mut row, place, &frequencies);
        row
    };
    for query_head in 0..spec.q_heads {
        let key_head = spec.q_heads + query_head / (spec.q_heads / spec.kv_heads);
        let mut share = 0.0;
        for place in 20..60 {
            let q = head(query_head, place);
            let scores = (0..=place).map(|at| head(key_head, at).iter().zip(&q).map(|(k, q)| k * q).sum::<f32>());
            let weights: Vec<f32> = scores.map(|score| (score / (spec.head_dim as f32).sqrt()).exp()).collect();
            share += weights[place - query_head - 1] / weights.iter().sum::<f32>() / 40.0;
        }
        assert!(share > 0.6, "head {query_head}: {share} of its attention");
    }
}

/// The second half of each sequence repeats the first: only attention to what followed before can tell.
#[test]
fn a_model_learns_to_repeat() {
    let spec = ModelSpec { hidden: 64, head_dim: 16, ffn: 128, ..SMALL };
    let extents = Extents { spec, vocab: 32, batch: 32, len: 32 };
    let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
    let parameters = Parameters::new(&spec, extents.vocab);
    let mut weights = parameters.initial(&arena, 1).unwrap();
    let mut gradients = arena.alloc::<f32>(Label::Gradients, parameters.count()).unwrap();
    let mut adamw = AdamW::new(&arena, &parameters).unwrap();
    let mut network = Network::new(&arena, &cpu, extents, &parameters, Recompute::Selective).unwrap();
    let repeated = |seed: u64| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (mut tokens, mut targets) = (Vec::new(), Vec::new());
        for sequence in 0..extents.batch {
            let half: Vec<u32> = (0..extents.len / 2).map(|_| rng.random_range(0..extents.vocab as u32)).collect();
            tokens.extend(half.iter().chain(&half));
            let first = extents.len / 2;
            for at in first..extents.len - 1 {
                let weight = 1.0 / (extents.batch * (first - 1)) as f32;
                targets.push(Target { row: sequence * extents.len + at, token: half[at + 1 - first], weight });
            }
        }
        Batch { tokens, targets }
    };
    let steps = 400;
    for step in 0..steps {
        gradients.fill(0.0);
        network.step(&weights, &repeated(step as u64), &mut gradients).unwrap();
        let rate = CONSTANTS.rate(step, steps);
        adamw.update(&cpu, &CONSTANTS, &parameters, (step, rate), &mut weights, &gradients);
    }
    let (unseen, mut right) = (repeated(1 << 40), 0);
    let loss = network.judge(&weights, &unseen, |target, token| right += usize::from(token == target.token)).unwrap();
    let accuracy = right as f64 / unseen.targets.len() as f64;
    assert!(accuracy > 0.95, "accuracy {accuracy}, loss {loss}");
}
