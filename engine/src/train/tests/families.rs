//! Every family, by the tiny checkpoints of `tests/checkpoints/`: gradients against finite differences, forward passes against
//! the decoder of inference, and training that starts from a folder and ends in one.

use super::*;
use crate::memory::Buffer;
use crate::model::{Decoder, Model, Setup};
use crate::tensor::DType;
use crate::train::export;
use crate::train::weights::Frozen;
use std::path::{Path, PathBuf};

fn in_f32(folder: &Path, parameters: &Parameters) -> Buffer<f32> {
    match Frozen::open(folder, parameters, &Arena::unlimited()).unwrap() {
        Frozen::F32(all) => all,
        Frozen::Bf16(..) | Frozen::Packed(_) => unreachable!("what is trained is f32"),
    }
}

pub(super) fn folder(name: &str) -> PathBuf {
    Path::new("../tests/checkpoints").join(name)
}

/// The configuration of a checkpoint, with soft-caps and windows so small that they matter.
pub(super) fn config(name: &str) -> Config {
    let mut config = Config::read(&folder(name)).unwrap();
    config.attention_softcap = config.attention_softcap.map(|_| 1.5);
    config.final_softcap = config.final_softcap.map(|_| 2.5);
    config.windows.iter_mut().for_each(|window| *window = window.map(|_| 8));
    config
}

/// Every checkpoint.
fn all() -> Vec<String> {
    let names = std::fs::read_dir("../tests/checkpoints").unwrap().map(|entry| entry.unwrap());
    let names = names.filter(|entry| entry.path().join("config.json").exists());
    let mut names: Vec<String> = names.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() >= 15, "{names:?}");
    names
}

/// Compares each parameter's gradient with differences of the loss.
fn check_gradients(name: &str, config: &Config) {
    let parameters = Parameters::new(config);
    let extents = Extents { parameters: &parameters, batch: 2, len: 19, skipped: 0 };
    let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
    let mut network = Network::new(&arena, &cpu, extents, Recompute::None).unwrap();
    let (weights, batch) = (weights(&parameters, 3), batch(&extents, 4));
    let mut gradient = vec![0.0; parameters.count()];
    network.step(&weights, &batch, &mut gradient).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for parameter in &parameters.all {
        let (range, what) = (parameter.range.clone(), format!("{name}, {}", parameter.name));
        let norm = gradient[range.clone()].iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
        assert!(norm > 1e-4, "{what} has no gradient: {norm}");
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
                network.judge(&moved, &batch, |_, _, _| ()).unwrap()
            };
            // Two central differences, combined so that the error of the third power falls out.
            let h = 0.02;
            let wide = (loss(2.0 * h) - loss(-2.0 * h)) / (4.0 * h);
            let near = (loss(h) - loss(-h)) / (2.0 * h);
            let difference = (4.0 * near - wide) / 3.0;
            let error = (difference - slope).abs() / slope.abs().max(0.02);
            assert!(error < 4e-3, "{what}: gradient {slope:.6}, difference {difference:.6}");
        }
    }
}

#[test]
fn every_gradient_equals_the_finite_difference_of_the_loss() {
    check_gradients("small", &super::config(&SMALL, 50));
    all().iter().for_each(|name| check_gradients(name, &config(name)));
}

/// What is left of the gradients when a part is frozen.
#[test]
fn what_is_frozen_has_no_gradient_and_changes_none() {
    for (name, frozen) in [
        ("llama", &["embed"][..]),
        ("llama-bias-tied", &["embed", "k_proj"]),
        ("qwen2", &["layers.*.v_proj.weight", "q_proj.bias", "lm_head"]),
        ("qwen3", &["q_norm", "up_proj"]),
        ("phi3", &["embed", "layers.0.", "model.norm"]),
        ("gemma2", &["embed", "layers.0.", "layers.1.", "post_*norm"]),
    ] {
        let (config, frozen) = (config(name), frozen.iter().map(|text| text.to_string()).collect::<Vec<_>>());
        let (whole, part) = (Parameters::new(&config), Parameters::with_frozen(&config, &frozen).unwrap());
        let of = |parameters| gradient(Extents { parameters, batch: 2, len: 19, skipped: 0 }, Recompute::Selective, 2);
        let ((loss, all), (again, some)) = (of(&whole), of(&part));
        assert_eq!((loss.to_bits(), some.len()), (again.to_bits(), part.trained_count()), "{name}");
        assert!(some.len() < all.len(), "{name}");
        for (parameter, kept) in whole.all.iter().zip(&part.all) {
            let is_frozen = frozen.iter().any(|pattern| {
                let name = &parameter.name;
                pattern.split_once('*').map_or(name.contains(pattern), |(a, b)| name.contains(a) && name.contains(b))
            });
            assert_eq!(kept.gradient.is_none(), is_frozen, "{name}, {}", kept.name);
            let Some(range) = kept.gradient.clone() else { continue };
            let expected = &all[parameter.range.clone()];
            let size = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            let off = some[range].iter().zip(expected).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
            assert!(off <= 1e-5 * size, "{name}, {}: off by {off} of {size}", kept.name);
        }
    }
    let config = config("llama");
    let error = |pattern: &str| Parameters::with_frozen(&config, &[pattern.into()]).unwrap_err();
    assert!(error("head.bias").contains("'head.bias' matches no parameter"));
    assert!(error("weight").contains("matches every parameter"));
}

/// Negative log-likelihoods of every token after every other, `[L, vocab]`.
fn trained_nll(parameters: &Parameters, weights: &[f32], tokens: &[u32], cpu: &Cpu) -> Vec<f32> {
    let extents = Extents { parameters, batch: 1, len: tokens.len(), skipped: 0 };
    let rows = (0..tokens.len()).flat_map(|row| (0..parameters.config.vocab as u32).map(move |token| (row, token)));
    let targets = rows.map(|(row, token)| Target { row, token, weight: 1e-4 }).collect();
    let mut network = Network::new(&Arena::unlimited(), cpu, extents, Recompute::Full).unwrap();
    let mut nll = Vec::new();
    network.judge(weights, &Batch { tokens: tokens.to_vec(), targets }, |_, _, own| nll.push(own)).unwrap();
    nll
}

/// Likewise, by the decoder of inference.
pub(super) fn decoded_nll(model: &Model, tokens: &[u32], cpu: &Cpu) -> Vec<f32> {
    let setup = Setup { chunk_tokens: 16, all_logits: true, ..Setup::of(tokens.len(), DType::F32) };
    let arena = Arena::unlimited();
    let (mut decoder, mut nll) = (Decoder::new(model, setup, cpu, &arena).unwrap(), Vec::new());
    let visit = |_, _, logits: &[f32]| {
        let most = logits.iter().fold(f32::MIN, |most, x| most.max(*x));
        let sum: f32 = logits.iter().map(|x| (x - most).exp()).sum();
        nll.extend(logits.iter().map(|x| sum.ln() + most - x));
    };
    decoder.prefill(&[tokens], visit).unwrap();
    nll
}

pub(super) fn furthest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |most, x| if x > most || x.is_nan() { x } else { most })
}

#[test]
fn a_folder_is_loaded_as_by_inference_trained_and_written_again() {
    let cpu = Cpu::new(Some(2)).unwrap();
    for name in all() {
        let model = Model::open(&folder(&name), &Arena::unlimited()).unwrap();
        let parameters = Parameters::new(&model.config);
        let mut weights = in_f32(&folder(&name), &parameters);
        // Longer than every window, and for one checkpoint longer than its first training.
        let tokens: Vec<u32> = (0..50).map(|at| (at * at * 7 + at) % model.config.vocab as u32).collect();
        let off = furthest(&trained_nll(&parameters, &weights, &tokens, &cpu), &decoded_nll(&model, &tokens, &cpu));
        assert!(off < 2e-5, "{name}: off by {off}");

        let arena = Arena::unlimited();
        let extents = Extents { parameters: &parameters, batch: 2, len: 24, skipped: 0 };
        let mut network = Network::new(&arena, &cpu, extents, Recompute::None).unwrap();
        let mut adamw = AdamW::new(&arena, parameters.trained_count()).unwrap();
        let (batch, mut losses) = (batch(&extents, 1), Vec::new());
        for step in 0..12 {
            let mut gradients = vec![0.0; parameters.count()];
            losses.push(network.step(&weights, &batch, &mut gradients).unwrap());
            adamw.update(&cpu, &CONSTANTS, &parameters.all, (step, 3e-3), &mut weights, &gradients);
        }
        assert!(losses[11] < 0.9 * losses[0], "{name}: {losses:?}");

        let out = tempfile::tempdir().unwrap();
        let file = |name: &str, from: &Path| std::fs::read_to_string(from.join(name)).unwrap();
        let files = [("config.json", file("config.json", &folder(&name)))];
        export::write(out.path(), &files, &parameters, |take| take(&weights)).unwrap();
        let exported = Model::open(out.path(), &Arena::unlimited()).unwrap();
        assert_eq!(exported.weights.dtype(), model.config.dtype, "{name}");
        let again = in_f32(out.path(), &parameters);
        let rounding = if model.config.dtype == DType::F32 { 0.0 } else { 4e-3 };
        // Below its smallest normal number f16 has steps of one size.
        let normal = if model.config.dtype == DType::F16 { 2f32.powi(-14) } else { 0.0 };
        let near = |(a, b): (&f32, &f32)| (a - b).abs() <= rounding * a.abs().max(normal);
        assert!(weights.iter().zip(&*again).all(near), "{name}");
        let off = furthest(&trained_nll(&parameters, &again, &tokens, &cpu), &decoded_nll(&exported, &tokens, &cpu));
        assert!(off < 2e-5, "{name}: off by {off} after training");
    }
}
