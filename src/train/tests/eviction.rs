//! Gates of evicted tokens: gradients against finite differences, memory against its formula, modes of recomputation
//! against each other.

use super::*;
use crate::train::Weights;
use crate::train::gates::{Gates, Mode};

const WINDOW: usize = 5;
const RELAXED: Mode = Mode::Relaxed { seed: 7, step: 3 };

/// Gates whose decisions are divided.
fn gated<'a>(arena: &Arena, cpu: &'a Cpu, extents: Extents<'a>, recompute: Recompute) -> Network<'a> {
    let mut gates = Gates::new(arena, &extents, WINDOW).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let weights = gates.weights.len() - extents.config().layers * extents.config().kv_heads;
    gates.weights[..weights].iter_mut().for_each(|weight| *weight = rng.random_range(-0.02..0.02));
    gates.weights[weights..].fill(0.05);
    Network::new(arena, cpu, extents, recompute).unwrap().with_gates(arena, gates).unwrap()
}

fn tokens(extents: &Extents<'_>) -> Vec<u32> {
    batch(extents, 4).tokens
}

/// The families whose attention differs: plain, soft-capped with sliding windows, with norms of heads.
fn models() -> [Parameters; 3] {
    [config(&SMALL, 50), families::config("gemma2"), families::config("qwen3")]
        .map(|config| Parameters::all_frozen(&config))
}

#[test]
fn gradients_equal_finite_differences() {
    for parameters in &models() {
        let extents = Extents { parameters, batch: 2, len: 24 };
        let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
        let mut network = gated(&arena, &cpu, extents, Recompute::None);
        let (weights, tokens) = (weights(parameters, 3), tokens(&extents));
        let mut gradient = |weight: f64| {
            network.gates().gradient.fill(0.0);
            let found = network.distil(Weights::F32(&weights), &tokens, RELAXED, Some((1.0, weight))).unwrap();
            assert!(found.kl > 1e-3 && (0.1..0.9).contains(&found.evicted), "{found:?}");
            assert!((found.pressure - weight * (1.0 - found.evicted)).abs() < 1e-12);
            network.gates().gradient.to_vec()
        };
        let (of_kl, of_both) = (gradient(0.0), gradient(30.0));
        let of_pressure: Vec<f32> = of_both.iter().zip(&of_kl).map(|(both, kl)| both - kl).collect();
        for (gradient, of_pressure) in [(&of_kl, false), (&of_pressure, true)] {
            let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            let mut at = |step: f64| {
                let moves = gradient.iter().map(|g| (step * f64::from(*g) / norm) as f32).collect::<Vec<_>>();
                let before = network.gates().weights.to_vec();
                network.gates().weights.iter_mut().zip(&moves).for_each(|(w, by)| *w += by);
                let kl = network.distil(Weights::F32(&weights), &tokens, RELAXED, None).unwrap().kl;
                let relaxed = network.gates().relaxed();
                network.gates().weights.copy_from_slice(&before);
                if of_pressure { -30.0 * relaxed } else { kl }
            };
            let step = 2e-5;
            let found = (at(step) - at(-step)) / (2.0 * step);
            assert!((found - norm).abs() < 0.02 * norm, "pressure {of_pressure}: {found}, gradient {norm}");
        }
    }
}

#[test]
fn recomputation_and_threads_do_not_change_a_bit_and_bytes_are_those_of_the_formula() {
    for parameters in &models() {
        let extents = Extents { parameters, batch: 2, len: 70 };
        let run = |recompute, threads| {
            let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(threads)).unwrap());
            let mut network = gated(&arena, &cpu, extents, recompute);
            let mut expected = extents.training_bytes(recompute, threads);
            // The model's own weights lie elsewhere here, and nothing of it is trained.
            expected.retain(|label, _| ![Label::Weights, Label::Gradients, Label::Optimizer].contains(label));
            for (label, bytes) in Gates::bytes(&extents) {
                *expected.entry(label).or_default() += bytes;
            }
            assert_eq!(arena.usage().peak, expected);
            let found = network.distil(Weights::F32(&weights(parameters, 3)), &tokens(&extents), RELAXED, Some((0.9, 1.0))).unwrap();
            (found.kl.to_bits(), network.gates().gradient.to_vec())
        };
        let expected = run(Recompute::None, 1);
        for recompute in Recompute::ALL {
            assert_eq!(run(recompute, 2), expected, "{recompute:?}");
        }
    }
}

#[test]
fn gates_evict_nothing_at_first_and_nothing_inside_the_window() {
    let parameters = &models()[0];
    let extents = Extents { parameters, batch: 1, len: 30 };
    let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(1)).unwrap());
    let mut network = gated(&arena, &cpu, extents, Recompute::None);
    let (weights, tokens) = (weights(parameters, 3), tokens(&extents));
    let mut kl_of = |bias: f32| {
        network.gates().weights.fill(0.0);
        let biases = network.gates().weights.len() - 4;
        network.gates().weights[biases..].fill(bias);
        network.distil(Weights::F32(&weights), &tokens, Mode::Hard, None).unwrap()
    };
    let (none, all) = (kl_of(0.0), kl_of(1.0));
    assert_eq!((none.kl, none.evicted, all.evicted), (0.0, 0.0, 1.0));
    assert!(all.kl > 0.0);
    // A model whose own window is as long has nothing behind it.
    let mut windowed = parameters.config.clone();
    windowed.windows.iter_mut().for_each(|window| *window = Some(WINDOW));
    let windowed = Parameters::all_frozen(&windowed);
    let extents = Extents { parameters: &windowed, ..extents };
    let mut network = gated(&arena, &cpu, extents, Recompute::None);
    assert_eq!(network.distil(Weights::F32(&weights), &tokens, Mode::Hard, None).unwrap().kl, 0.0);
}
