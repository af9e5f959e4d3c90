//! Adapters and optimizers of fine-tuning: gradients against finite differences, packed matrices against widened ones, updates
//! against what the papers say in plain f64, bytes against their formula, and what comes out against the decoder of inference.

use super::families::{config as of_family, decoded_nll, folder, furthest};
use super::*;
use crate::memory::LabelBytes;
use crate::model::{Mixture, Model, quantise};
use crate::tensor::DType;
use crate::train::holder::Whole;
use crate::train::lora::{Adapters, Asked, Layout};
use crate::train::optimizer::{Kind, Optimizer};
use crate::train::parameters::Parameter;
use crate::train::tune::{Method, Settings};
use crate::train::tuned::{Plan, Tuned};
use crate::train::weights::{Frozen, Packed, Weights};
use std::path::{Path, PathBuf};

fn asked(targets: &[&str]) -> Asked {
    Asked { rank: 3, alpha: 6.0, targets: targets.iter().map(|name| name.to_string()).collect() }
}

/// A checkpoint in a GGUF file of four bits, but for what needs more.
fn packed(from: &Path, to: &Path) -> PathBuf {
    let path = to.join(from.file_name().unwrap()).with_extension("gguf");
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    quantise(from, "q4_1".parse::<Mixture>().unwrap(), None, &path, (&cpu, &arena), |_, _| ()).unwrap();
    path
}

/// A network with adapters that change much.
fn adapted<'a>(
    arena: &Arena,
    cpu: &'a Cpu,
    extents: Extents<'a>,
    recompute: Recompute,
    targets: &[&str],
) -> Network<'a> {
    let layout = Layout::new(extents.parameters, &asked(targets)).unwrap();
    let mut adapters = Adapters::new(arena, layout, &extents, 5).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    adapters.weights.iter_mut().for_each(|weight| *weight = rng.random_range(-0.3..0.3));
    Network::new(arena, cpu, extents, recompute).unwrap().with_adapters(adapters)
}

fn step(network: &mut Network<'_>, weights: Weights<'_>, batch: &Batch) -> (f64, Vec<f32>) {
    network.adapters().gradient.fill(0.0);
    let loss = network.step_of(&mut Whole { weights, gradients: &mut [] }, batch).unwrap();
    (loss, network.adapters().gradient.to_vec())
}

/// Every matrix of every adapter, along its gradient.
fn check_gradients(name: &str, parameters: &Parameters, weights: Weights<'_>) {
    let extents = Extents { parameters, batch: 2, len: 19, skipped: 0 };
    let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
    let mut network = adapted(&arena, &cpu, extents, Recompute::Full, &["all-linear"]);
    let batch = batch(&extents, 4);
    let (_, gradient) = step(&mut network, weights, &batch);
    for parameter in network.adapters().layout.parameters.clone() {
        let (range, what) = (parameter.range.clone(), format!("{name}, {}", parameter.name));
        let norm = gradient[range.clone()].iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
        assert!(norm > 1e-5, "{what} has no gradient: {norm}");
        let before = network.adapters().weights.to_vec();
        let mut loss = |step: f64| {
            let to = &mut network.adapters().weights[range.clone()];
            for ((weight, before), g) in to.iter_mut().zip(&before[range.clone()]).zip(&gradient[range.clone()]) {
                *weight = (f64::from(*before) + step * f64::from(*g) / norm) as f32;
            }
            network.judge_of(&mut Whole { weights, gradients: &mut [] }, &batch, |_, _, _| ()).unwrap()
        };
        // Where the loss is steep it bends.
        let h = 0.02 / (5.0 * norm).max(1.0);
        let wide = (loss(2.0 * h) - loss(-2.0 * h)) / (4.0 * h);
        let near = (loss(h) - loss(-h)) / (2.0 * h);
        let difference = (4.0 * near - wide) / 3.0;
        loss(0.0);
        let error = (difference - norm).abs() / norm.max(0.02);
        assert!(error < 4e-3, "{what}: gradient {norm:.6}, difference {difference:.6}");
    }
}

#[test]
fn gradients_of_adapters_equal_finite_differences() {
    for name in ["llama", "llama-bias-tied", "gemma2", "qwen3", "phi3"] {
        let parameters = Parameters::all_frozen(&of_family(name), DType::F32);
        check_gradients(name, &parameters, Weights::F32(&weights(&parameters, 3)));
    }
}

/// Packed matrices, some of which are kept in other formats than those beside them, have the gradients of the numbers that they stand for.
#[test]
fn beside_packed_matrices_too() {
    let out = tempfile::tempdir().unwrap();
    for name in ["qwen3", "phi3"] {
        let path = packed(&folder(name), out.path());
        let arena = Arena::unlimited();
        let config = Config::read(&path).unwrap();
        let parameters = Parameters::all_frozen(&config, DType::F32);
        let coded = Frozen::Packed(Packed::open(&path, &parameters, &arena).unwrap());
        check_gradients(name, &parameters, coded.all());

        let wide = Frozen::open(&path, &parameters, &arena).unwrap();
        let cpu = Cpu::new(Some(2)).unwrap();
        let run = |parameters: &Parameters, weights: Weights<'_>| {
            let extents = Extents { parameters, batch: 2, len: 40, skipped: 0 };
            let mut network = adapted(&arena, &cpu, extents, Recompute::None, &["all-linear"]);
            step(&mut network, weights, &batch(&extents, 4))
        };
        let ((loss, of_coded), (expected, of_wide)) = (run(&parameters, coded.all()), run(&parameters, wide.all()));
        let size = of_wide.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        assert!((loss - expected).abs() < 1e-6 * expected, "{name}: {loss}, {expected}");
        assert!(furthest(&of_coded, &of_wide) < 1e-5 * size, "{name}");

        // Multiplied in bf16 they are what matrices rounded to bf16 are.
        let narrow = Parameters::all_frozen(&config, DType::Bf16);
        let coded = Frozen::Packed(Packed::open(&path, &narrow, &arena).unwrap());
        let rounded = Frozen::open(&path, &narrow, &arena).unwrap();
        let ((loss, of_coded), (expected, of_rounded)) = (run(&narrow, coded.all()), run(&narrow, rounded.all()));
        assert!((loss - expected).abs() < 1e-2 * expected, "{name}: {loss}, {expected} in bf16");
        let of = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let cosine = of(&of_coded, &of_rounded) / (of(&of_coded, &of_coded) * of(&of_rounded, &of_rounded)).sqrt();
        assert!(cosine > 0.99, "{name}: cosine {cosine} in bf16");
    }
}

#[test]
fn recomputation_and_threads_change_no_bit_of_an_adapters_gradient() {
    for name in ["llama", "gemma2"] {
        let parameters = Parameters::all_frozen(&of_family(name), DType::F32);
        let extents = Extents { parameters: &parameters, batch: 3, len: 101, skipped: 0 };
        let weights = weights(&parameters, 3);
        let run = |recompute, threads| {
            let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(threads)).unwrap());
            let mut network = adapted(&arena, &cpu, extents, recompute, &["v", "down", "up_proj"]);
            let (loss, gradient) = step(&mut network, Weights::F32(&weights), &batch(&extents, 4));
            (loss.to_bits(), gradient.iter().map(|g| g.to_bits()).collect::<Vec<_>>())
        };
        let expected = run(Recompute::None, 1);
        for recompute in Recompute::ALL {
            assert_eq!(run(recompute, 3), expected, "{name}, {recompute:?}");
        }
    }
}

#[test]
fn targets_are_names_of_the_matrices_of_a_block() {
    let layout = |name, asked: &Asked| Layout::new(&Parameters::all_frozen(&of_family(name), DType::F32), asked);
    let of_llama = layout("llama", &asked(&["v", "q_proj"])).unwrap();
    assert_eq!(of_llama.targets, ["q_proj", "v_proj"]);
    let first = &of_llama.parameters[0];
    assert_eq!(first.name, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight");
    assert_eq!((first.shape.as_slice(), of_llama.parameters.len()), (&[3, 32][..], 2 * 2 * 2));
    let all = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
    assert_eq!(layout("llama", &asked(&["all-linear"])).unwrap().targets, all);
    let error = layout("phi3", &asked(&["v"])).unwrap_err();
    assert!(error.contains("no matrix of a block is called 'v'; there are qkv_proj, o_proj, gate_up_proj"), "{error}");
    let error = layout("llama", &Asked { rank: 0, ..asked(&["q"]) }).unwrap_err();
    assert!(error.contains("the rank of adapters is 0; it must be 1 to the model's hidden size, 32"), "{error}");
    let error = layout("llama", &Asked { alpha: 0.0, ..asked(&["q"]) }).unwrap_err();
    assert!(error.contains("alpha is 0; it must be finite and above 0"), "{error}");
}

/// A step of one batch, and steps of its sequences one after the other.
#[test]
fn accumulated_gradients_are_those_of_the_larger_batch() {
    let parameters = Parameters::new(&of_family("llama"));
    let weights = weights(&parameters, 3);
    let [all, one] = [4, 1].map(|sequences| Extents { parameters: &parameters, batch: sequences, len: 30, skipped: 0 });
    let whole = batch(&all, 4);
    let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
    let run = |extents: Extents<'_>, batches: &[Batch]| {
        let mut network = Network::new(&arena, &cpu, extents, Recompute::None).unwrap();
        let mut gradient = vec![0.0; parameters.count()];
        let loss: f64 = batches.iter().map(|batch| network.step(&weights, batch, &mut gradient).unwrap()).sum();
        (loss, gradient)
    };
    let parts: Vec<Batch> = (0..4).map(|part| whole.part(part, 4, 30)).collect();
    let ((loss, gradient), (expected, larger)) = (run(one, &parts), run(all, &[whole]));
    assert!((loss - expected).abs() < 1e-6 * expected);
    let size = larger.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    assert!(furthest(&gradient, &larger) < 1e-5 * size);
}

fn matrix(shape: &[usize], start: usize) -> Parameter {
    let range = start..start + shape.iter().product::<usize>();
    let (of_kind, gradient, shape) = (range.clone(), Some(range.clone()), shape.to_vec());
    Parameter { name: String::new(), shape, role: Role::Matrix, range, of_kind, gradient }
}

/// Some steps of an optimizer on a matrix, a vector and a matrix of more than a block, with gradients that are clipped at times.
fn updated(kind: Kind, constants: &Constants) -> (Vec<Parameter>, Vec<f32>, Vec<Vec<f32>>, Vec<f32>) {
    let mut parameters = vec![matrix(&[7, 13], 0)];
    parameters.push(matrix(&[19], parameters[0].range.end));
    parameters.push(matrix(&[50, 61], parameters[1].range.end));
    let count = parameters[2].range.end;
    let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
    let mut rng = ChaCha8Rng::seed_from_u64(8);
    let first: Vec<f32> = (0..count).map(|_| rng.random_range(-1.0..1.0)).collect();
    let mut optimizer = Optimizer::new(&arena, kind, &parameters).unwrap();
    let (mut weights, mut gradients) = (first.clone(), Vec::new());
    for step in 0..5 {
        let size = 10f32.powi(step - 3);
        let gradient: Vec<f32> = (0..count).map(|_| size * rng.random_range(-1.0..1.0f32).powi(3)).collect();
        optimizer.update(&cpu, constants, &parameters, (step as usize, 1e-2), &mut weights, &gradient);
        gradients.push(gradient);
    }
    (parameters, first, gradients, weights)
}

fn clipped(gradient: &[f32], clip: f64) -> Vec<f64> {
    let norm = gradient.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
    gradient.iter().map(|&g| f64::from(g) * (clip / norm).min(1.0)).collect()
}

/// Algorithm 4 of arXiv 1804.04235, written out with whole matrices.
#[test]
fn adafactor_is_what_the_paper_says() {
    let constants = Constants { weight_decay: 0.1, ..CONSTANTS };
    let (parameters, first, gradients, found) = updated(Kind::Adafactor, &constants);
    for parameter in &parameters {
        let [rows, columns] =
            if parameter.shape.len() == 2 { [parameter.shape[0], parameter.shape[1]] } else { [1, parameter.shape[0]] };
        let (mut r, mut c) = (vec![0.0; rows], vec![0.0; columns]);
        let mut w: Vec<f64> = first[parameter.range.clone()].iter().map(|&w| f64::from(w)).collect();
        for (step, gradient) in gradients.iter().enumerate() {
            let g = &clipped(gradient, 1.0)[parameter.range.clone()];
            let beta = 1.0 - (step as f64 + 1.0).powf(-0.8);
            let square = |i: usize, j: usize| g[i * columns + j].powi(2) + 1e-30;
            for (i, r) in r.iter_mut().enumerate() {
                *r = beta * *r + (1.0 - beta) * (0..columns).map(|j| square(i, j)).sum::<f64>();
            }
            for (j, c) in c.iter_mut().enumerate() {
                *c = beta * *c + (1.0 - beta) * (0..rows).map(|i| square(i, j)).sum::<f64>();
            }
            let all: f64 = r.iter().sum();
            let u: Vec<f64> = (0..w.len()).map(|at| g[at] / (r[at / columns] * c[at % columns] / all).sqrt()).collect();
            let rms = (u.iter().map(|u| u * u).sum::<f64>() / u.len() as f64).sqrt();
            w.iter_mut().zip(&u).for_each(|(w, u)| *w = *w * (1.0 - 1e-3) - 1e-2 * u / rms.max(1.0));
        }
        let off =
            found[parameter.range.clone()].iter().zip(&w).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
        assert!(off < 2e-6, "{:?}: off by {off}", parameter.shape);
    }
}

/// AdamW in f64 whose averages go through eight bits after each step, by a search through all values of the map.
#[test]
fn adamw_in_eight_bits_is_adamw_whose_averages_are_coded() {
    let mut map = [vec![0.0, 1.0], vec![0.0, 1.0]];
    for decade in 0..7 {
        for (signed, map) in map.iter_mut().enumerate() {
            let parts = 2usize.pow(decade) * (2 - signed);
            for part in 0..parts {
                let value = (0.1 + 0.9 * (part as f64 + 0.5) / parts as f64) * 10f64.powi(decade as i32 - 6);
                map.extend(if signed == 1 { vec![value, -value] } else { vec![value] });
            }
        }
    }
    assert!(map.iter().all(|map| map.len() == 256));
    let coded = |values: &mut [f64], map: &[f64]| {
        for block in values.chunks_mut(2048) {
            let most = block.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            for x in block.iter_mut().filter(|_| most > 0.0) {
                let nearest = map.iter().min_by(|a, b| (*a - *x / most).abs().total_cmp(&(*b - *x / most).abs()));
                let smallest = map.iter().filter(|value| **value > 0.0).fold(1.0f64, |least, value| least.min(*value));
                let has_sign = map.iter().any(|value| *value < 0.0);
                *x = most * if *x > 0.0 && !has_sign { nearest.unwrap().max(smallest) } else { *nearest.unwrap() };
            }
        }
    };
    let constants = Constants { weight_decay: 0.1, ..CONSTANTS };
    let (parameters, first, gradients, found) = updated(Kind::Adamw8bit, &constants);
    let (_, _, _, plain) = updated(Kind::Adamw, &constants);
    let apart = |a: &[f32]| a.iter().zip(&plain).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!((1e-4..5e-2).contains(&apart(&found)), "apart from AdamW in f32 by {}", apart(&found));
    for parameter in &parameters {
        let mut w: Vec<f64> = first[parameter.range.clone()].iter().map(|&w| f64::from(w)).collect();
        let (mut m, mut v) = (vec![0.0; w.len()], vec![0.0; w.len()]);
        for (step, gradient) in gradients.iter().enumerate() {
            let g = &clipped(gradient, 1.0)[parameter.range.clone()];
            let [beta1, beta2] = [0.9f32, 0.95].map(f64::from);
            let power = step as i32 + 1;
            for at in 0..w.len() {
                m[at] = beta1 * m[at] + (1.0 - beta1) * g[at];
                v[at] = beta2 * v[at] + (1.0 - beta2) * g[at] * g[at];
                let root = (v[at] / (1.0 - beta2.powi(power))).sqrt() + 1e-8;
                w[at] = w[at] * (1.0 - 1e-3) - 1e-2 * m[at] / (1.0 - beta1.powi(power)) / root;
            }
            coded(&mut m, &map[1]);
            coded(&mut v, &map[0]);
        }
        // A number in the middle between two codes may fall to either: but for few, rounding is all there is.
        let found = &found[parameter.range.clone()];
        let off = found.iter().zip(&w).filter(|(a, b)| (f64::from(**a) - **b).abs() > 1e-5).count();
        assert!(off <= w.len() / 200, "{:?}: {off} of {} are off", parameter.shape, w.len());
    }
}

fn settings(method: Method, model: &Path, weights: DType, optimizer: Kind) -> Settings {
    Settings {
        method,
        model: model.into(),
        text: PathBuf::new(),
        steps: 1,
        length: 40,
        batch: 2,
        accumulate: 1,
        seed: 1,
        learning_rate: 1e-3,
        weights,
        recompute: None,
        optimizer,
        adapters: (method != Method::Full).then(|| asked(&["q", "v", "down"])),
        qat: None,
    }
}

/// Each method with each optimizer and mode of recomputation: what the arena counts is what the formula says, to the byte.
#[test]
fn fine_tuning_takes_exactly_the_bytes_that_are_predicted() {
    let out = tempfile::tempdir().unwrap();
    let builtin = Path::new("../models/builtin");
    let (file, model) = (packed(&folder("qwen3"), out.path()), folder("qwen2"));
    let methods = [
        (Method::Full, builtin, DType::F32, None),
        (Method::Full, builtin, DType::Bf16, None),
        (Method::Full, builtin, DType::F32, Some("q4_0")),
        (Method::Full, builtin, DType::Bf16, Some("q8_0")),
        (Method::Lora, &*model, DType::F32, None),
        (Method::Lora, &*file, DType::Bf16, None),
        (Method::Qlora, &*file, DType::Bf16, None),
        (Method::Qlora, &*file, DType::F32, None),
    ];
    let mut optimizers: Vec<LabelBytes> = Vec::new();
    for (method, path, dtype, qat) in methods {
        for kind in Kind::ALL {
            for recompute in Recompute::ALL {
                let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
                let config = Config::read(path).unwrap();
                let settings = Settings { qat: qat.map(String::from), ..settings(method, path, dtype, kind) };
                let plan = Plan::new(&settings, &config, path).unwrap();
                let extents = Extents { parameters: &plan.parameters, batch: 2, len: 40, skipped: 0 };
                let mut tuned = Tuned::open(&plan, &arena, &cpu).unwrap();
                let predicted = plan.bytes(&extents, recompute, 2, tuned.packed_bytes());
                let mut network = Network::new(&arena, &cpu, extents, recompute).unwrap();
                if let Some(adapters) = plan.adapters(&arena, &extents, 1).unwrap() {
                    network = network.with_adapters(adapters);
                }
                tuned.begin(&mut network);
                network.step_of(&mut tuned.holder(), &batch(&extents, 1)).unwrap();
                tuned.update(&cpu, &CONSTANTS, (0, 1e-3), &mut network);
                assert_eq!(arena.usage().peak, predicted, "{method:?} in {dtype:?}, {qat:?}, {kind:?}, {recompute:?}");
                optimizers.push(predicted);
            }
        }
    }
    // Of a whole model in f32: 8 bytes a parameter, 2 and some for blocks, and next to nothing.
    let count = 1_105_920;
    let of = |at: usize| optimizers[3 * at][&Label::Optimizer];
    assert_eq!((of(0), of(1) - of(1) % 1000), (8 * count, 2_216_000));
    assert!(of(2) < count / 10, "{}", of(2));
    // In bf16 there is a master copy besides.
    assert_eq!((of(3), of(6)), (of(0) + 4 * count, of(0) + 4 * count));
}

/// Training for a format judges the model as it will be kept, and makes it better: better than keeping so what was trained without it, by as
/// many steps.
#[test]
fn a_model_that_was_trained_for_a_format_bears_its_rounding() {
    let (folder, cpu, path) =
        (tempfile::tempdir().unwrap(), Cpu::new(Some(2)).unwrap(), Path::new("../models/builtin"));
    let config = Config::read(path).unwrap();
    let judged = |folder: &Path, format: &str, tokens: &[u32]| {
        let format = Some(format.parse().unwrap());
        let nll = decoded_nll(&Model::open_in(folder, format, &Arena::unlimited()).unwrap(), tokens, &cpu);
        let of = |(row, &token): (usize, &u32)| nll[row * config.vocab + token as usize];
        tokens[1..].iter().enumerate().map(of).sum::<f32>() / (tokens.len() - 1) as f32
    };
    let (format, mut after) = ("int2:zero=true", Vec::new());
    for (qat, dtype) in [(None, DType::F32), (Some(format), DType::F32), (Some(format), DType::Bf16)] {
        let settings = Settings { qat: qat.map(String::from), ..settings(Method::Full, path, dtype, Kind::Adamw) };
        let (arena, plan) = (Arena::unlimited(), Plan::new(&settings, &config, path).unwrap());
        let extents = Extents { parameters: &plan.parameters, batch: 1, len: 40, skipped: 0 };
        let mut tuned = Tuned::open(&plan, &arena, &cpu).unwrap();
        let mut network = Network::new(&arena, &cpu, extents, Recompute::None).unwrap();
        let tokens = batch(&extents, 1).tokens;
        let targets = (0..39).map(|row| Target { row, token: tokens[row + 1], weight: 1.0 / 39.0 }).collect();
        let (batch, mut losses) = (Batch { tokens, targets }, Vec::new());
        for step in 0..30 {
            tuned.begin(&mut network);
            losses.push(network.step_of(&mut tuned.holder(), &batch).unwrap() as f32);
            tuned.update(&cpu, &CONSTANTS, (step, 1e-3), &mut network);
        }
        assert!(losses[29] < 0.8 * losses[0], "{qat:?}: {losses:?}");
        let out = folder.path().join(format!("{qat:?}{dtype}"));
        std::fs::create_dir_all(&out).unwrap();
        plan.export(&out, path, "", &mut tuned, &mut network).unwrap();
        after.push(judged(&out, format, &batch.tokens));
        if qat.is_some() {
            let before = judged(path, format, &batch.tokens);
            assert!((before - losses[0]).abs() < 0.02 * before, "{dtype}: {before}, judged {}", losses[0]);
        }
    }
    assert!(after[1] < 0.8 * after[0] && after[2] < 0.8 * after[0], "trained without {format}, and for it: {after:?}");
    for (qat, said) in [("int9", "int9"), ("q4_k", "256"), ("int4:hadamard=true", "hadamard")] {
        let settings = Settings { qat: Some(qat.into()), ..settings(Method::Full, path, DType::F32, Kind::Adamw) };
        let error = Plan::new(&settings, &config, path).map(drop).unwrap_err();
        assert!(error.contains(said), "{qat}: {error}");
    }
}

/// What is written is a model: its decoder computes what was trained, whatever the base is kept in.
#[test]
fn an_adapter_that_was_trained_is_merged_by_inference() {
    let out = tempfile::tempdir().unwrap();
    let cases = [
        ("llama", false, DType::F32),
        ("phi3", true, DType::F32),
        ("qwen3", true, DType::F32),
        ("gemma2", false, DType::F32),
    ];
    for (name, is_packed, dtype) in cases {
        let (method, path) = match is_packed {
            true => (Method::Qlora, packed(&folder(name), out.path())),
            false => (Method::Lora, folder(name).canonicalize().unwrap()),
        };
        let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
        let config = Config::read(&path).unwrap();
        let mut settings = settings(method, &path, dtype, Kind::Adamw);
        settings.adapters = Some(asked(&["all-linear"]));
        let plan = Plan::new(&settings, &config, &path).unwrap();
        let extents = Extents { parameters: &plan.parameters, batch: 1, len: 40, skipped: 0 };
        let mut tuned = Tuned::open(&plan, &arena, &cpu).unwrap();
        let adapters = plan.adapters(&arena, &extents, 1).unwrap().unwrap();
        let mut network = Network::new(&arena, &cpu, extents, Recompute::None).unwrap().with_adapters(adapters);
        let (batch, mut losses) = (batch(&extents, 1), Vec::new());
        for step in 0..10 {
            tuned.begin(&mut network);
            losses.push(network.step_of(&mut tuned.holder(), &batch).unwrap());
            tuned.update(&cpu, &CONSTANTS, (step, 1e-2), &mut network);
        }
        assert!(losses[9] < 0.9 * losses[0], "{name}: {losses:?}");

        let folder = out.path().join(format!("{name}-adapter"));
        std::fs::create_dir_all(&folder).unwrap();
        let base = crate::model::fingerprint(&path).unwrap();
        plan.export(&folder, &path, &base, &mut tuned, &mut network).unwrap();
        let model = Model::open(&folder, &Arena::unlimited()).unwrap();
        let rows = (0..40).flat_map(|row| (0..config.vocab as u32).map(move |token| (row, token)));
        let targets = rows.map(|(row, token)| Target { row, token, weight: 1e-4 }).collect();
        let mut nll = Vec::new();
        let judged = Batch { tokens: batch.tokens.clone(), targets };
        network.judge_of(&mut tuned.holder(), &judged, |_, _, own| nll.push(own)).unwrap();
        // The decoder rounds activations beside weights in few bits.
        let rounding = if is_packed { 3e-2 } else { 3e-5 };
        let off = furthest(&nll, &decoded_nll(&model, &batch.tokens, &cpu));
        assert!(off < rounding, "{name}: off by {off}");
        let bare = Model::open(&path, &Arena::unlimited()).unwrap();
        assert!(
            furthest(&nll, &decoded_nll(&bare, &batch.tokens, &cpu)) > 10.0 * rounding,
            "{name}: nothing was merged"
        );
    }
}
