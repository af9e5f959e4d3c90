//! Modes of recomputation against each other, memory against its formula, and learning; `families` has gradients and
//! forward passes of every family.

mod accumulation;
mod eviction;
mod families;
mod heads;
mod readout;
mod tuning;
mod zero;

use super::activations::Extents;
use super::adamw::{AdamW, Constants};
use super::loss::Target;
use super::origin::Sizes;
use super::parameters::Group;
use super::{Batch, Network, Parameters, Recompute};
use crate::attention::rope::{Frequencies, rotate};
use crate::device::Cpu;
use crate::memory::{Arena, Label};
use crate::model::Config;
use crate::model::config::Norms;
use crate::model::parameters::Role;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const SMALL: Sizes = Sizes {
    hidden: 24,
    layers: 2,
    q_heads: 4,
    kv_heads: 2,
    head_dim: 8,
    ffn: 40,
    max_positions: 64,
    rope_theta: 100.0,
    norm_eps: 1e-5,
    vocabulary: None,
    look_back: true,
};

fn config(sizes: &Sizes, vocab: usize) -> Config {
    Config::from_json(sizes.config(vocab, 0, 1).as_object().unwrap()).unwrap()
}

/// Random tokens, of which about half are judged, with weights of three sizes.
fn batch(extents: &Extents<'_>, seed: u64) -> Batch {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let tokens: Vec<u32> = (0..extents.rows()).map(|_| rng.random_range(0..extents.config().vocab as u32)).collect();
    let mut targets = Vec::new();
    for row in 0..extents.rows() {
        if rng.random_bool(0.5) {
            let token = rng.random_range(0..extents.config().vocab as u32);
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
    let mut weights = vec![0.0; parameters.count()];
    for parameter in &parameters.all {
        let is_norm = parameter.role == Role::Norm;
        let base = if is_norm { 1.0 - parameters.config.norm_shift() } else { 0.0 };
        let std_dev = if parameter.role.decays() { 0.3 } else { 0.5 };
        for weight in &mut weights[parameter.range.clone()] {
            *weight = base + rng.random_range(-1.0..1.0f32) * std_dev;
        }
    }
    weights
}

fn gradient(extents: Extents<'_>, recompute: Recompute, threads: usize) -> (f64, Vec<f32>) {
    let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(threads)).unwrap());
    let mut network = Network::new(&arena, &cpu, extents, recompute).unwrap();
    let mut gradient = vec![0.0; extents.parameters.trained_count()];
    let loss = network.step(&weights(extents.parameters, 3), &batch(&extents, 4), &mut gradient).unwrap();
    (loss, gradient)
}

#[test]
fn recomputation_and_threads_do_not_change_a_bit() {
    let small = Parameters::new(&config(&SMALL, 50));
    let gemma = Parameters::new(&families::config("gemma2"));
    let qwen = Parameters::new(&families::config("qwen3"));
    for (parameters, batch, len) in [(&small, 2, 19), (&small, 3, 301), (&gemma, 3, 101), (&qwen, 3, 101)] {
        let extents = Extents { parameters, batch, len, skipped: 0 };
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
    let small = Parameters::new(&config(&SMALL, 50));
    let gemma = Parameters::with_frozen(&families::config("gemma2"), &["embed".into(), "layers.1.".into()]).unwrap();
    let qwen = Parameters::with_frozen(&families::config("qwen3"), &["k_proj".into(), "norm".into()]).unwrap();
    let cases = [(&small, 2, 19, 1), (&small, 1, 700, 2), (&small, 7, 300, 3), (&gemma, 3, 100, 2), (&qwen, 3, 100, 2)];
    for (parameters, sequences, len, threads) in cases {
        let cpu = Cpu::new(Some(threads)).unwrap();
        let extents = Extents { parameters, batch: sequences, len, skipped: 0 };
        let mut before = u64::MAX;
        for recompute in Recompute::ALL {
            let arena = Arena::unlimited();
            let mut weights = parameters.initial(&arena, 1).unwrap();
            let mut gradients = arena.alloc(Label::Gradients, parameters.trained_count()).unwrap();
            let mut adamw = AdamW::new(&arena, parameters.trained_count()).unwrap();
            let mut network = Network::new(&arena, &cpu, extents, recompute).unwrap();
            network.step(&weights, &batch(&extents, 1), &mut gradients).unwrap();
            adamw.update(&cpu, &CONSTANTS, &parameters.all, (0, 1e-3), &mut weights, &gradients);
            let predicted = extents.training_bytes(recompute, threads);
            assert_eq!(arena.usage().peak, predicted, "{recompute:?}");

            // The table of `activations.rs`, written out once more.
            let Config { hidden, layers, q_heads, kv_heads, head_dim, ffn, qk_norm, norms, .. } = parameters.config;
            let (q, kv) = (q_heads * head_dim, kv_heads * head_dim);
            let (input, cheap) = (hidden, q + q_heads + hidden);
            let unnormed = if qk_norm { q + 2 * kv } else { 0 };
            let after = if norms == Norms::BeforeAndAfter { 2 * hidden } else { 0 };
            let inner = 2 * hidden + 2 * q + 2 * kv + 3 * ffn + unnormed + after;
            let kept = match recompute {
                Recompute::None => layers * (input + cheap + inner),
                Recompute::Selective => layers * (input + cheap) + inner,
                Recompute::Full => layers * input + cheap + inner,
            };
            let once = 4 * hidden + (q + 2 * kv) * 2 + ffn + q;
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
    let spec = Sizes { hidden: 64, head_dim: 32, rope_theta: 1e4, ..SMALL };
    let parameters = Parameters::new(&config(&spec, 50));
    let weights = parameters.initial(&Arena::unlimited(), 1).unwrap();
    let of = |group: &Group| &weights[group.range.clone()];
    let (embedding, qkv) = (of(&parameters.embedding), of(&parameters.blocks[0].qkv.weight));
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
    let parameters = Parameters::new(&config(&Sizes { hidden: 64, head_dim: 16, ffn: 128, ..SMALL }, 32));
    let extents = Extents { parameters: &parameters, batch: 32, len: 32, skipped: 0 };
    let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
    let mut weights = parameters.initial(&arena, 1).unwrap();
    let mut gradients = arena.alloc::<f32>(Label::Gradients, parameters.count()).unwrap();
    let mut adamw = AdamW::new(&arena, parameters.trained_count()).unwrap();
    let mut network = Network::new(&arena, &cpu, extents, Recompute::Selective).unwrap();
    let repeated = |seed: u64| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (mut tokens, mut targets) = (Vec::new(), Vec::new());
        for sequence in 0..extents.batch {
            let half: Vec<u32> =
                (0..extents.len / 2).map(|_| rng.random_range(0..extents.config().vocab as u32)).collect();
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
        adamw.update(&cpu, &CONSTANTS, &parameters.all, (step, rate), &mut weights, &gradients);
    }
    let (unseen, mut right) = (repeated(1 << 40), 0);
    let loss =
        network.judge(&weights, &unseen, |target, token, _| right += usize::from(token == target.token)).unwrap();
    let accuracy = right as f64 / unseen.targets.len() as f64;
    assert!(accuracy > 0.95, "accuracy {accuracy}, loss {loss}");
}
