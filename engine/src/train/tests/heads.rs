//! Gates of heads: what they give at 0 and 1, gradients against finite differences, memory against its formula, modes of
//! recomputation against each other.

use super::eviction::{frozen, models};
use super::*;
use crate::policy::allocation::Near;
use crate::tensor::DType;
use crate::train::Weights;
use crate::train::head_gates::HeadGates;
use crate::train::weights::Frozen;
use std::path::Path;

const NEAR: Near = Near { sink: 2, recent: 5 };

/// A network whose heads have these gates, one after the other.
fn mixed<'a>(arena: &Arena, cpu: &'a Cpu, extents: Extents<'a>, recompute: Recompute, alpha: &[f32]) -> Network<'a> {
    let mut gates = HeadGates::new(arena, &extents, NEAR).unwrap();
    gates.alpha.iter_mut().zip(alpha.iter().cycle()).for_each(|(to, alpha)| *to = *alpha);
    Network::new(arena, cpu, extents, recompute).unwrap().with_head_gates(gates)
}

#[test]
fn gates_of_one_are_the_dense_model_and_near_tokens_that_are_all_tokens_too() {
    for parameters in &models(DType::F32) {
        let weights = weights(parameters, 3);
        let distance = |len: usize, alpha: &[f32]| {
            let extents = Extents { parameters, batch: 2, len, skipped: 0 };
            let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
            let mut network = mixed(&arena, &cpu, extents, Recompute::None, alpha);
            network.identify(Weights::F32(&weights), &batch(&extents, 4), None).unwrap()
        };
        assert_eq!(distance(40, &[1.0]), 0.0);
        // Whatever the gates: streaming heads read all that there is.
        assert!(distance(NEAR.sink + NEAR.recent, &[0.0, 0.3]) < 1e-12);
        let [half, none] = [0.5, 0.0].map(|alpha| distance(40, &[alpha]));
        assert!(none > 1e-3 && 0.0 < half && half < none, "{half} at gates of one half, {none} at 0");
    }
}

#[test]
fn gradients_equal_finite_differences() {
    for parameters in &models(DType::F32) {
        let extents = Extents { parameters, batch: 2, len: 24, skipped: 0 };
        let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
        let mut network = mixed(&arena, &cpu, extents, Recompute::None, &[0.3, 0.9, 0.6]);
        let (weights, batch) = (weights(parameters, 3), batch(&extents, 4));
        network.identify(Weights::F32(&weights), &batch, Some(0.0)).unwrap();
        let gradient = network.head_gates().gradient.to_vec();
        for (head, &expected) in gradient.iter().enumerate() {
            let mut at = |by: f32| {
                network.head_gates().alpha[head] += by;
                let distance = network.identify(Weights::F32(&weights), &batch, None).unwrap();
                network.head_gates().alpha[head] -= by;
                distance
            };
            let step = 5e-3;
            let found = (at(step) - at(-step)) / (2.0 * f64::from(step));
            let largest = gradient.iter().fold(0.0f32, |most, g| most.max(g.abs()));
            let off = (found - f64::from(expected)).abs();
            assert!(off < 0.02 * f64::from(largest), "head {head}: {found}, gradient {expected}");
        }
        // The mean of the gates, on top.
        network.head_gates().gradient.fill(0.0);
        network.identify(Weights::F32(&weights), &batch, Some(3.0)).unwrap();
        let share = 3.0 / gradient.len() as f32;
        let pressed = network.head_gates().gradient.to_vec();
        assert!(pressed.iter().zip(&gradient).all(|(pressed, g)| (pressed - g - share).abs() < 1e-5 * (1.0 + g.abs())));
    }
}

#[test]
fn recomputation_and_threads_do_not_change_a_bit_and_bytes_are_those_of_the_formula() {
    for parameters in models(DType::F32).iter().chain(&models(DType::Bf16)) {
        let extents = Extents { parameters, batch: 2, len: 70, skipped: 0 };
        let run = |recompute, threads| {
            let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(threads)).unwrap());
            let mut network = mixed(&arena, &cpu, extents, recompute, &[0.2, 0.7, 1.0]);
            let mut expected = extents.training_bytes(recompute, threads);
            let weights = frozen(parameters, &arena);
            // Nothing of the model is trained.
            expected.retain(|label, _| ![Label::Gradients, Label::Optimizer].contains(label));
            for (label, bytes) in HeadGates::bytes(&extents) {
                *expected.entry(label).or_default() += bytes;
            }
            assert_eq!(arena.usage().peak, expected);
            let distance = network.identify(weights.all(), &batch(&extents, 4), Some(0.1)).unwrap();
            (distance.to_bits(), network.head_gates().gradient.to_vec())
        };
        let expected = run(Recompute::None, 1);
        for recompute in Recompute::ALL {
            assert_eq!(run(recompute, 2), expected, "{recompute:?}");
        }
    }
}

/// Distance, gradient and the term on the gates are those of the authors' code (`tests/conformance/duo_fixtures.py`).
#[test]
fn gates_are_what_the_authors_code_makes_of_them() {
    const FOLDER: &str = "../tests/checkpoints/llama";
    let expected = std::fs::read("../tests/fixtures/duo.safetensors").unwrap();
    let expected = safetensors::SafeTensors::deserialize(&expected).unwrap();
    let whole = |name: &str| {
        let values = expected.tensor(name).unwrap().data().chunks_exact(8);
        values.map(|value| i64::from_le_bytes(value.try_into().unwrap()) as usize).collect::<Vec<usize>>()
    };
    let floats = |name: &str| {
        let values = expected.tensor(name).unwrap().data().chunks_exact(4);
        values.map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect::<Vec<f32>>()
    };
    let parameters = Parameters::all_frozen(&Config::read(Path::new(FOLDER)).unwrap(), DType::F32);
    let [sink, recent] = whole("near")[..] else { panic!("near has a sink and recent tokens") };
    let (tokens, target) = (whole("tokens"), |row| Target { row, token: 0, weight: 0.0 });
    let extents = Extents { parameters: &parameters, batch: 2, len: tokens.len() / 2, skipped: 0 };
    let batch = Batch {
        tokens: tokens.into_iter().map(|token| token as u32).collect(),
        targets: whole("judged").into_iter().map(target).collect(),
    };
    let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
    let weights = Frozen::open(Path::new(FOLDER), &parameters, &arena).unwrap();
    let mut gates = HeadGates::new(&arena, &extents, Near { sink, recent }).unwrap();
    gates.alpha.copy_from_slice(&floats("alpha"));
    let mut network = Network::new(&arena, &cpu, extents, Recompute::None).unwrap().with_head_gates(gates);
    for (pressure, name) in [(0.0, "gradient"), (0.05, "pressed")] {
        network.head_gates().gradient.fill(0.0);
        let distance = network.identify(weights.all(), &batch, Some(pressure)).unwrap();
        assert!((distance - f64::from(floats("distance")[0])).abs() < 1e-5, "{distance}");
        let gradient = network.head_gates().gradient.to_vec();
        let near = gradient.iter().zip(floats(name)).all(|(found, expected)| (found - expected).abs() < 1e-5);
        assert!(near, "{name}: {gradient:?}, {:?}", floats(name));
    }
}
