//! Read-outs into prefixes: gradients against finite differences, bytes against their formula, and the loss against the decoder
//! of inference with the same prefix.

use super::*;
use crate::model::{Decoder, Model, PrefixShape, Setup};
use crate::tensor::DType;
use crate::train::larimar;
use crate::train::readout::Readout;
use crate::train::weights::Frozen;
use std::path::Path;

/// Values of a read-out, and places that it fills.
const SHAPE: (usize, usize) = (7, 2);

fn with_readout<'a>(arena: &Arena, cpu: &'a Cpu, extents: Extents<'a>, recompute: Recompute) -> Network<'a> {
    let mut readout = Readout::new(arena, &extents, SHAPE, cpu.threads(), 3).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(9);
    readout.weights.iter_mut().for_each(|weight| *weight = rng.random_range(-0.5..0.5));
    readout.values.iter_mut().for_each(|value| *value = rng.random_range(-1.0..1.0));
    Network::new(arena, cpu, extents, recompute).unwrap().with_readout(readout)
}

/// A batch whose placeholders are not judged.
fn judged(extents: &Extents<'_>) -> Batch {
    let mut batch = batch(extents, 4);
    batch.targets.retain(|target| target.row % extents.len >= SHAPE.1);
    batch
}

#[test]
fn gradients_equal_finite_differences() {
    for config in [config(&SMALL, 50), families::config("gemma2"), families::config("qwen3")] {
        let parameters = Parameters::all_frozen(&config, DType::F32);
        let extents = Extents { parameters: &parameters, batch: 2, len: 19, skipped: 0 };
        let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
        let mut network = with_readout(&arena, &cpu, extents, Recompute::Full);
        let (weights, batch) = (weights(&parameters, 3), judged(&extents));
        network.step(&weights, &batch, &mut []).unwrap();
        let gradient = network.readout().gradient.to_vec();
        for parameter in network.readout().parameters.clone() {
            let (range, what) = (parameter.range.clone(), &parameter.name);
            let norm = gradient[range.clone()].iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            assert!(norm > 1e-4, "{what}: {norm}");
            let before = network.readout().weights.to_vec();
            let mut at = |step: f64| {
                let moved = network.readout().weights[range.clone()].iter_mut().zip(&gradient[range.clone()]);
                moved.for_each(|(w, g)| *w += (step * f64::from(*g) / norm) as f32);
                let loss = network.judge(&weights, &batch, |_, _, _| ()).unwrap();
                network.readout().weights.copy_from_slice(&before);
                loss
            };
            let h = 0.02;
            let wide = (at(2.0 * h) - at(-2.0 * h)) / (4.0 * h);
            let near = (at(h) - at(-h)) / (2.0 * h);
            let found = (4.0 * near - wide) / 3.0;
            assert!((found - norm).abs() < 0.02 * norm, "{what}: {found}, gradient {norm}");
        }
    }
}

#[test]
fn recomputation_and_threads_do_not_change_a_bit_and_bytes_are_those_of_the_formula() {
    for dtype in [DType::F32, DType::Bf16] {
        let config = Config::read(Path::new("../models/builtin")).unwrap();
        let parameters = Parameters::all_frozen(&config, dtype);
        let extents = Extents { parameters: &parameters, batch: 3, len: 17, skipped: 0 };
        let run = |recompute, threads| {
            let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(threads)).unwrap());
            let weights = Frozen::open(Path::new("../models/builtin"), &parameters, &arena).unwrap();
            let shape = larimar::shape(&config);
            let mut readout = Readout::new(&arena, &extents, shape, threads, 3).unwrap();
            readout.values.fill(0.5);
            let adamw = AdamW::new(&arena, readout.weights.len()).unwrap();
            let mut network = Network::new(&arena, &cpu, extents, recompute).unwrap().with_readout(readout);
            let mut expected = larimar::bytes(&extents, recompute, threads);
            expected.retain(|_, bytes| *bytes > 0);
            let batch = judged(&extents);
            let whole = &mut super::super::holder::Whole { weights: weights.all(), gradients: &mut [] };
            let loss = network.step_of(whole, &batch).unwrap();
            let mut peak = arena.usage().peak;
            peak.retain(|_, bytes| *bytes > 0);
            assert_eq!(peak, expected, "{recompute:?}");
            drop(adamw);
            (loss.to_bits(), network.readout().gradient.to_vec())
        };
        let expected = run(Recompute::None, 1);
        for recompute in Recompute::ALL {
            assert_eq!(run(recompute, 2), expected, "{recompute:?}");
        }
    }
}

/// What is trained is what is used: the loss of tokens behind a prefix is that of the decoder whose cache begins with it.
#[test]
fn the_decoder_of_inference_answers_as_the_network_does() {
    for name in ["../models/builtin", "../tests/checkpoints/qwen3", "../tests/checkpoints/gemma2"] {
        let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
        let model = Model::open(Path::new(name), &arena).unwrap();
        let parameters = Parameters::all_frozen(&model.config, DType::F32);
        let extents = Extents { parameters: &parameters, batch: 2, len: 12, skipped: 0 };
        let weights = Frozen::open(Path::new(name), &parameters, &arena).unwrap();
        let mut network = with_readout(&arena, &cpu, extents, Recompute::None);
        let tokens = batch(&extents, 4).tokens;
        let target = |row: usize| Target { row, token: tokens[row + 1], weight: 1.0 };
        let behind = |sequence: usize| sequence * 12 + SHAPE.1..sequence * 12 + 11;
        let targets = behind(0).chain(behind(1)).map(target).collect();
        let (read, mut expected) = (Batch { tokens: tokens.clone(), targets }, Vec::new());
        let whole = &mut super::super::holder::Whole { weights: weights.all(), gradients: &mut [] };
        network.judge_of(whole, &read, |_, _, nll| expected.push(nll)).unwrap();

        let readout = network.readout();
        let shape = PrefixShape::new(&model.config, SHAPE.1);
        let (matrix, bias) = readout.weights.split_at(shape.numbers() * SHAPE.0);
        let setup = Setup { batch: 2, chunk_tokens: 4, all_logits: true, ..Setup::of(12, DType::F32) };
        let mut decoder = Decoder::new(&model, setup, &cpu, &arena).unwrap();
        for (sequence, value) in readout.values.chunks_exact(SHAPE.0).enumerate() {
            let rows = matrix.chunks_exact(SHAPE.0).zip(bias);
            let row = |(row, bias): (&[f32], &f32)| bias + row.iter().zip(value).map(|(w, x)| w * x).sum::<f32>();
            decoder.prefix(sequence, &shape, &rows.map(row).collect::<Vec<f32>>()).unwrap();
        }
        let prompts: Vec<&[u32]> = (0..2).map(|sequence| &tokens[behind(sequence)]).collect();
        let mut found = vec![Vec::new(); 2];
        let visit = |sequence: usize, place: usize, logits: &[f32]| {
            let most = logits.iter().fold(f32::MIN, |most, x| most.max(*x));
            let sum: f32 = logits.iter().map(|x| (x - most).exp()).sum();
            found[sequence].push(sum.ln() + most - logits[tokens[sequence * 12 + SHAPE.1 + place + 1] as usize]);
        };
        decoder.prefill(&prompts, visit).unwrap();
        let apart = families::furthest(&found.concat(), &expected);
        assert!(apart < 2e-3, "{name}: {apart}");
    }
}
