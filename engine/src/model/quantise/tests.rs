//! GPTQ against its authors' code, AWQ against what it must not change, and folders against what was written into them.

use super::awq;
use super::coded::Coded;
use super::coding::Made;
use super::fold::Fold;
use super::gptq::Factor;
use super::inputs::read_inputs;
use super::recipe::Method;
use super::smooth::smooth;
use super::walk::walk;
use super::*;
use crate::device::Cpu;
use crate::device::gemm::{Matrix, product};
use crate::format::{Grid, KvFormat, RowFormat};
use crate::memory::{Arena, Buffer, Label};
use crate::model::gguf::{Keys, header, padded};
use crate::model::parameters::{Make, Role};
use crate::model::{Activation, Decoder, Hook, Model, ModelError, Setup, weights};
use crate::tensor::DType;
use crate::tensor::file::{Output, TensorFile, write};
use proptest::prelude::*;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

fn recipe(text: &str) -> Recipe {
    text.parse().unwrap()
}

/// Codes of a matrix by what it reads, `[tokens, width]`; and the sums of its products.
fn coded(recipe: Recipe, weights: &[f32], inputs: &[f32], width: usize, cpu: &Cpu) -> (Coded, Vec<f32>) {
    let (arena, rows) = (Arena::unlimited(), weights.len() / width);
    let mut products = vec![0.0; width * width];
    let read = Matrix::new(inputs, inputs.len() / width, width);
    product(&mut products, width, read.transposed(), read, false, 1);
    products.iter_mut().for_each(|x| *x *= 2.0 * width as f32 / inputs.len() as f32);
    let mut coded = Coded::new(RowFormat::plain(DType::F32), [rows, width], recipe.grid, &arena).unwrap();
    match recipe.method {
        Method::Gptq(method) => {
            let mut spent = weights.to_vec();
            Factor::new(method, &products, width, cpu, &arena).unwrap().code(&mut spent, &mut coded, cpu);
        }
        _ => coded.round(weights, cpu),
    }
    (coded, products)
}

fn widened(coded: &Coded, cpu: &Cpu) -> Vec<f32> {
    let mut values = vec![0.0; coded.rows * coded.width];
    coded.widen(&mut values, cpu);
    values
}

#[test]
fn codes_are_those_of_the_authors_of_gptq() {
    let (file, arena) =
        (TensorFile::open(Path::new("../tests/fixtures/gptq.safetensors")).unwrap(), Arena::unlimited());
    let cpu = Cpu::new(Some(2)).unwrap();
    for name in ["symmetric", "zero", "act", "act-zero", "wide", "eight"] {
        let load = |end: &str| file.load(&format!("{name}.{end}"), &arena, Label::Input).unwrap();
        let (weight, inputs, expected) = (load("weight"), load("inputs"), load("expected"));
        let width = *weight.dims().last().unwrap();
        let recipe = recipe(&file.metadata(name).unwrap());
        let (coded, _) = coded(recipe, &weight.to_f32(), &inputs.to_f32(), width, &cpu);
        // Of a weight that lies between two codes, f32 there and f64 here may take either; all behind it follow.
        let (got, expected) = (widened(&coded, &cpu), expected.to_f32());
        let other = got.iter().zip(&expected).filter(|(x, y)| (*x - *y).abs() > 1e-6).count();
        assert!(other * 200 <= got.len(), "{name}: {other} of {} weights are others", got.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn errors_that_are_made_good_cost_outputs_less(
        seed in any::<u64>(),
        (bits, symmetric) in (prop::sample::select(vec![4, 8]), any::<bool>()),
        order in prop::sample::select(vec!["inputs", "act"]),
    ) {
        let (width, rows, tokens) = (64, 8, 200);
        let numbers = |offset: u64, count: usize| -> Vec<f32> {
            use rand::{RngExt, SeedableRng};
            let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed ^ offset);
            (0..count).map(|_| rng.random_range(-1.0..1.0)).collect()
        };
        let weights = numbers(1, rows * width);
        // Neighbours go together, and some are larger than others.
        let drawn = numbers(2, tokens * width);
        let inputs: Vec<f32> = (0..tokens * width)
            .map(|at| (drawn[at] + 2.0 * drawn[at / width * width + at % width / 4 * 4]) * (1 + at % 7) as f32)
            .collect();
        let one = Cpu::new(Some(1)).unwrap();
        let lost = |name: &str, cpu: &Cpu| {
            let (coded, products) = coded(recipe(name), &weights, &inputs, width, cpu);
            let values = widened(&coded, cpu);
            let off: Vec<f32> = weights.iter().zip(&values).map(|(x, y)| x - y).collect();
            let mut outputs = vec![0.0; off.len()];
            (awq::squares(&off, &products, width, &mut outputs, cpu), values)
        };
        let gptq = format!("gptq:bits={bits},group=32,order={order},symmetric={symmetric}");
        let (made_good, values) = lost(&gptq, &one);
        let (nearest, _) = lost(&format!("int{bits}:group=32,symmetric={symmetric}"), &one);
        prop_assert!(made_good < nearest, "{gptq}: {made_good}, rounded {nearest}");
        let (_, again) = lost(&gptq, &Cpu::new(Some(2)).unwrap());
        prop_assert_eq!(values, again, "the same bits whatever the threads");
    }
}

#[test]
fn without_inputs_that_go_together_codes_are_the_nearest() {
    let (width, cpu) = (64, Cpu::new(Some(1)).unwrap());
    let weights: Vec<f32> = (0..4 * width).map(|at| ((at * 37 % 101) as f32 - 50.0) / 37.0).collect();
    let inputs: Vec<f32> = (0..width * width).map(|at| if at / width == at % width { 3.0 } else { 0.0 }).collect();
    let (made_good, _) = coded(recipe("gptq:group=32"), &weights, &inputs, width, &cpu);
    let (nearest, _) = coded(recipe("int4:group=32"), &weights, &inputs, width, &cpu);
    assert_eq!(widened(&made_good, &cpu), widened(&nearest, &cpu));
    let grid = Grid { bits: 4, group: 32, symmetric: false, least_zero: 0 };
    // By hand: from -2 to 5.5 in 15 steps of 0.5.
    let mut group = [0.0; 32];
    group[..4].copy_from_slice(&[5.5, 1.1, -0.8, -2.0]);
    let step = grid.step(&group);
    assert_eq!((step.scale.to_f32(), step.zero), (0.5, 4));
    assert_eq!(group[..5].iter().map(|&x| step.nearest(grid, x)).collect::<Vec<_>>(), [5.5, 1.0, -1.0, -2.0, 0.0]);
    let step = Grid { symmetric: true, ..grid }.step(&group);
    assert_eq!(
        (step.zero, step.nearest(grid, 5.5), step.nearest(grid, -5.5)),
        (8, 7.0 * step.scale.to_f32(), -7.0 * step.scale.to_f32())
    );
    assert_eq!(grid.step(&[0.0; 32]).nearest(grid, 0.0), 0.0);
    // A zero point of 0 is stored as none where the file holds it less one: all above zero in 14 steps of 0.5.
    let stored = Grid { least_zero: 1, ..grid };
    group[..4].copy_from_slice(&[7.0, 1.1, 0.0, 2.0]);
    assert_eq!((grid.step(&group).zero, stored.step(&group).zero), (0, 1));
    assert_eq!(stored.step(&group).scale.to_f32(), 0.5);
    assert_eq!(
        group[..4].iter().map(|&x| stored.step(&group).nearest(stored, x)).collect::<Vec<_>>(),
        [7.0, 1.0, 0.0, 2.0]
    );
    assert_eq!(stored.step(&[0.0; 32]).zero, 1);
    group[..4].copy_from_slice(&[5.5, 1.1, -0.8, -2.0]);
    assert_eq!(stored.step(&group), grid.step(&group));
    for x in [f32::NAN, f32::INFINITY, 1e9] {
        group[3] = x;
        assert!(!grid.step(&group).scale.is_finite(), "{x}");
    }
}

/// What the model's last MLP reads, `[tokens, hidden]`.
struct LastInput(usize, Mutex<Vec<f32>>);

impl Hook for LastInput {
    fn rows(&self, layer: usize, what: Activation, rows: &[f32]) {
        if (layer, what) == (self.0, Activation::MlpInput) {
            self.1.lock().unwrap().extend_from_slice(rows);
        }
    }
}

fn setup(batch: usize, tokens: usize) -> Setup<'static> {
    let kv_format = KvFormat::plain(DType::F32);
    Setup { batch, kv_format, ..Setup::of(tokens, DType::F32) }
}

#[test]
fn block_by_block_a_model_computes_what_it_does_as_a_whole() {
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    for name in ["llama", "gemma2", "phi3", "qwen3", "dynamic"] {
        let model = Model::open(&Path::new("../tests/checkpoints").join(name), &arena).unwrap();
        let tokens: [&[u32]; 2] = [&[5, 17, 99, 3, 40], &[7, 7, 1, 80, 2]];
        let last = model.config.layers - 1;
        let whole = LastInput(last, Mutex::default());
        let mut decoder = Decoder::new(&model, setup(2, 5), &cpu, &arena).unwrap();
        decoder.hook(&whole);
        decoder.prefill(&tokens, |_, _, _| ()).unwrap();

        let hidden = model.config.hidden;
        let mut rows = vec![0.0; 10 * hidden];
        for (&token, row) in tokens.iter().flat_map(|tokens| tokens.iter()).zip(rows.chunks_exact_mut(hidden)) {
            crate::model::weights::embed(&model.weights.embedding, token as usize, model.config.embedding_scale, row);
        }
        let parts = LastInput(last, Mutex::default());
        for layer in 0..=last {
            let mut decoder = Decoder::new(&model, setup(2, 5), &cpu, &arena).unwrap();
            decoder.hook(&parts);
            decoder.through(layer, &mut rows).unwrap();
        }
        assert_eq!(*whole.1.lock().unwrap(), *parts.1.lock().unwrap(), "{name}");
    }
}

/// Logits `[tokens, vocab]` of a model.
fn logits(model: &Model, tokens: &[u32], cpu: &Cpu, arena: &Arena) -> Vec<f32> {
    let mut all = Vec::new();
    let setup = Setup { all_logits: true, ..setup(1, tokens.len()) };
    let mut decoder = Decoder::new(model, setup, cpu, arena).unwrap();
    decoder.prefill(&[tokens], |_, _, logits| all.extend_from_slice(logits)).unwrap();
    all
}

fn rel_l2(got: &[f32], expected: &[f32]) -> f64 {
    let square = |of: &mut dyn Iterator<Item = f32>| of.map(|x| f64::from(x).powi(2)).sum::<f64>();
    let off = square(&mut got.iter().zip(expected).map(|(x, y)| x - y));
    (off / square(&mut expected.iter().copied())).sqrt()
}

#[test]
fn a_folder_holds_what_codes_stand_for_and_is_the_model_but_for_rounding() {
    let (cpu, arena, folder) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited(), tempfile::tempdir().unwrap());
    let source = crate::model::locate(Path::new("builtin")).unwrap();
    let tokens: Vec<u32> = (0..192).map(|at| 3 + at * 7 % 60).collect();
    let text = Calibration { tokens: &tokens, length: 48 };
    let own = logits(&Model::open(&source, &arena).unwrap(), &tokens[..48], &cpu, &arena);
    let mut lost = Vec::new();
    for name in [
        "int8:group=64",
        "gptq:bits=8,group=32,order=act,symmetric=false",
        "int4:group=64,symmetric=false",
        "gptq:group=64,symmetric=false",
        "gptq:group=64,order=act,symmetric=false",
        "awq:group=64",
    ] {
        let recipe = recipe(name);
        assert_eq!(recipe.to_string().parse::<Recipe>().unwrap(), recipe);
        let [to, again] = ["", "again-"].map(|before| folder.path().join(format!("{before}{name}")));
        let text = recipe.reads_text().then_some(text);
        let mut blocks = 0;
        let done = quantise_folder(&source, recipe, text, &to, (&cpu, &arena), |_, all| blocks = all).unwrap();
        let model = Model::open(&to, &arena).unwrap();
        assert_eq!((blocks, done.len()), (model.config.layers, 1 + 7 * model.config.layers), "{name}");
        // The same bytes whatever the threads.
        let one = Cpu::new(Some(1)).unwrap();
        quantise_folder(&source, recipe, text, &again, (&one, &arena), |_, _| ()).unwrap();
        let [bytes, same] = [&to, &again].map(|folder| std::fs::read(folder.join("model.safetensors")).unwrap());
        assert!(bytes == same, "{name}: threads change codes");
        // What is read back is what the codes were made of.
        let mut found = crate::model::weights::Found::open(&to, &model.config, &arena).unwrap();
        walk(&source, recipe, text, (&cpu, &arena), |made| {
            for (name, made) in made {
                let Made::Coded(coded) = made else { continue };
                let mut values = vec![0.0; coded.rows * coded.width];
                found.tensor(&name, &[coded.rows, coded.width])?.widen(0, &mut values);
                assert_eq!(values, widened(&coded, &cpu), "{recipe}: {name}");
            }
            Ok::<(), ModelError>(())
        })
        .unwrap();
        lost.push(rel_l2(&logits(&model, &tokens[..48], &cpu, &arena), &own));
    }
    // Eight bits are near the model, whatever was scaled and sorted; of four, those that know the text are nearer.
    let [int8, gptq8, int4, gptq, act, awq] = lost[..] else { panic!("six recipes") };
    assert!(int8 < 0.02 && gptq8 < 0.02, "{lost:?}");
    assert!(gptq < int4 && act < int4 && awq < int4 && int4 < 0.5, "{lost:?}");
}

/// A model without its tokenizer, which GGUF files have no name for.
fn without_tokenizer(model: &Path, folder: &Path) -> PathBuf {
    let source = folder.join("model");
    std::fs::create_dir(&source).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(model.join(file), source.join(file)).unwrap();
    }
    source
}

#[test]
fn a_file_by_a_text_is_nearer_to_the_model() {
    let (cpu, arena, folder) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited(), tempfile::tempdir().unwrap());
    let source = without_tokenizer(&crate::model::locate(Path::new("builtin")).unwrap(), folder.path());
    let tokens: Vec<u32> = (0..192).map(|at| 3 + at * 7 % 60).collect();
    let text = Calibration { tokens: &tokens, length: 48 };
    let own = logits(&Model::open(&source, &arena).unwrap(), &tokens[..48], &cpu, &arena);
    for name in ["q4_1", "q4_0"] {
        let lost = [None, Some(Importance::Text(text))].map(|importance| {
            let to = folder.path().join("coded.gguf");
            let mixture: Mixture = name.parse().unwrap();
            quantise(&source, mixture, importance, &to, (&cpu, &arena), |_, _| ()).unwrap();
            rel_l2(&logits(&Model::open(&to, &arena).unwrap(), &tokens[..48], &cpu, &arena), &own)
        });
        assert!(lost[1] < 0.9 * lost[0], "{name}: {lost:?}");
    }
}

/// A matrix's name, sums and counts.
type Entry<'a> = (&'a str, Vec<f32>, Vec<f32>);

/// An importance matrix as llama.cpp writes it: a GGUF container of sums and counts.
fn container(entries: &[Entry<'_>]) -> Vec<u8> {
    let mut tensors = Vec::new();
    for (name, sums, counts) in entries {
        tensors.push((format!("{name}.in_sum2"), vec![counts.len(), sums.len() / counts.len().max(1)], sums));
        tensors.push((format!("{name}.counts"), vec![counts.len(), 1], counts));
    }
    let mut keys = Keys::new();
    keys.put("general.type", &"imatrix".into());
    keys.put("imatrix.chunk_count", &1.into());
    let described: Vec<_> =
        tensors.iter().map(|(name, shape, values)| (name.clone(), shape.clone(), 0, 4 * values.len())).collect();
    let mut bytes = header(&keys, &described);
    for (.., values) in &tensors {
        bytes.extend_from_slice(bytemuck::cast_slice(values));
        bytes.resize(padded(bytes.len()), 0);
    }
    bytes
}

/// The same as its older files had it: each value is to be divided by the number of calls.
fn list(entries: &[(&str, Vec<f32>, u32)]) -> Vec<u8> {
    let mut bytes = (entries.len() as u32).to_le_bytes().to_vec();
    for (name, values, calls) in entries {
        bytes.extend((name.len() as u32).to_le_bytes());
        bytes.extend(name.as_bytes());
        bytes.extend(calls.to_le_bytes());
        bytes.extend((values.len() as u32).to_le_bytes());
        bytes.extend_from_slice(bytemuck::cast_slice(values));
    }
    bytes
}

#[test]
fn a_file_of_mean_squares_is_the_text_that_they_are_of() {
    let (cpu, arena, folder) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited(), tempfile::tempdir().unwrap());
    let source = &without_tokenizer(Path::new("../tests/checkpoints/llama"), folder.path());
    let (mixture, file): (Mixture, _) = ("q4_0".parse().unwrap(), folder.path().join("imatrix"));
    let tokens: Vec<u32> = (0..96).map(|at| 3 + at * 7 % 60).collect();
    let text = Importance::Text(Calibration { tokens: &tokens, length: 48 });
    let planned = mixture.plan(&crate::model::Config::read(source).unwrap());
    let squares = text.read(source, &planned, (&cpu, &arena)).unwrap();
    let written = |importance| {
        let to = folder.path().join("coded.gguf");
        quantise(source, mixture, importance, &to, (&cpu, &arena), |_, _| ()).map(|_| std::fs::read(&to).unwrap())
    };
    let by_text = written(Some(text)).unwrap();
    assert_ne!(by_text, written(None).unwrap());
    let by_file = |bytes: &[u8]| {
        std::fs::write(&file, bytes).unwrap();
        written(Some(Importance::File(&file))).map_err(|error| error.to_string())
    };
    let times = |squares: &[f32], count: f32| squares.iter().map(|square| square * count).collect::<Vec<_>>();
    let entries: Vec<_> = squares.iter().map(|(name, squares)| (name.as_str(), squares.clone())).collect();
    let sums: Vec<_> = entries.iter().map(|(name, squares)| (*name, times(squares, 8.0), vec![8.0])).collect();
    let calls: Vec<_> = entries.iter().map(|(name, squares)| (*name, times(squares, 4.0), 4)).collect();
    assert_eq!(by_file(&container(&sums)).unwrap(), by_text);
    assert_eq!(by_file(&list(&calls)).unwrap(), by_text);
    let changed = |to: &dyn Fn(&mut Entry<'_>)| {
        let mut sums = sums.clone();
        to(sums.iter_mut().find(|(name, ..)| *name == "blk.1.ffn_down.weight").unwrap());
        container(&sums)
    };
    let cut = list(&calls);
    for (bytes, said) in [
        (changed(&|entry| entry.0 = "blk.9.ffn_down.weight"), "it has nothing of 'blk.1.ffn_down.weight'"),
        (changed(&|entry| entry.1.truncate(32)), "'blk.1.ffn_down.weight' has 32 inputs and not"),
        (changed(&|entry| entry.1[3] = -1.0), "has a mean square of -0.125; it must be a number of at least 0"),
        (changed(&|entry| entry.1[3] = f32::NAN), "has a mean square of NaN"),
        (changed(&|entry| entry.2[0] = 0.0), "'blk.1.ffn_down.weight' has seen 0 tokens"),
        (changed(&|entry| entry.2 = vec![1.0; 2]), "'blk.1.ffn_down.weight' has 2 experts"),
        (container(&[]), "the name of none of its tensors ends in '.in_sum2'"),
        (list(&[]), "it names no matrix"),
        (list(&[("x", vec![1.0], 0)]), "'x' has seen no text"),
        (list(&[("x", vec![1.0], 1), ("x", vec![1.0], 1)]), "'x' is there twice"),
        (cut[..cut.len() - 1].to_vec(), "it ends at byte"),
        (u32::MAX.to_le_bytes().repeat(4), "it ends at byte 16"),
    ] {
        let error = by_file(&bytes).unwrap_err();
        assert!(error.contains(said) && error.contains("not an importance matrix"), "{error}");
    }
}

/// Parameters of a block under factors.
struct Smoothed<'a> {
    found: weights::Found<'a>,
    fold: Fold<'a>,
    arena: Arena,
}

impl Make for Smoothed<'_> {
    type Matrix = weights::Matrix;
    type Vector = Buffer<f32>;
    type Error = ModelError;

    fn matrix(&mut self, name: String, _: Role, [rows, width]: [usize; 2]) -> Result<weights::Matrix, ModelError> {
        let mut bytes = self.arena.alloc(Label::Weights, 4 * rows * width)?;
        let values: &mut [f32] = bytemuck::cast_slice_mut(&mut bytes);
        self.found.tensor(&name, &[rows, width])?.widen(0, values);
        // Some rows at a time, as they are written.
        for (first, rows) in (0..rows).step_by(5).zip(values.chunks_mut(5 * width)) {
            self.fold.matrix(&name, first, rows, width);
        }
        Ok(weights::Matrix::held(bytes, [rows, width]))
    }

    fn vector(&mut self, name: String, role: Role, width: usize) -> Result<Buffer<f32>, ModelError> {
        let mut vector = self.arena.alloc(Label::Weights, width)?;
        self.found.widened(&name, width, &mut vector)?;
        self.fold.vector(&name, role, &mut vector);
        Ok(vector)
    }
}

#[test]
fn what_is_smoothed_computes_the_same_in_every_family() {
    let (cpu, arena, folder) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited(), tempfile::tempdir().unwrap());
    let tokens: Vec<u32> = (0..48).map(|at| 3 + at * 11 % 100).collect();
    let text = Calibration { tokens: &tokens, length: 48 };
    let named = ["llama", "llama-bias-tied", "qwen2", "qwen3", "phi3", "gemma2"]
        .map(|name| Path::new("../tests/checkpoints").join(name));
    let unshared = unshared(folder.path());
    for path in named.iter().chain([&unshared]) {
        let mut model = Model::open(path, &arena).unwrap();
        let (config, own) = (model.config.clone(), logits(&model, &tokens, &cpu, &arena));
        let inputs = read_inputs(path, text, &cpu, &arena).unwrap();
        let mut most = Vec::new();
        for (index, inputs) in inputs.iter().enumerate() {
            let mut found = weights::Found::open(path, &config, &arena).unwrap();
            let fold = smooth(&mut found, &config, index, inputs, 1.0).unwrap();
            most.push([0, 1, 2, 3].map(|input| fold.largest(input, &inputs[input].largest)));
            let mut smoothed = Smoothed { found, fold, arena: arena.clone() };
            let block = config.block(index, &mut smoothed).unwrap();
            model.weights.layers[index] = weights::layer(&config, block);
        }
        let off = rel_l2(&logits(&model, &tokens, &cpu, &arena), &own);
        assert!(off < 1e-5, "{path:?}: off by {off}");
        // A strength of 1 leaves no input above 1 that can be divided: all but o's where values are shared.
        for (index, most) in most.iter().enumerate() {
            let shares = config.q_heads != config.kv_heads;
            for (input, most) in most.iter().enumerate() {
                assert_eq!((most - 1.0).abs() < 1e-5, input != 1 || !shares, "{path:?}, {index}, {input}: {most}");
            }
        }
    }
}

/// Parameters of a block as they were made, once more.
struct Again(std::vec::IntoIter<(String, Made)>, Arena);

impl Make for Again {
    type Matrix = weights::Matrix;
    type Vector = Buffer<f32>;
    type Error = ModelError;

    fn matrix(&mut self, name: String, _: Role, shape: [usize; 2]) -> Result<weights::Matrix, ModelError> {
        let Some((made, Made::Coded(coded))) = self.0.next() else { panic!("{name} is a matrix") };
        assert_eq!(made, name);
        let mut bytes = self.1.alloc(Label::Weights, 4 * shape[0] * shape[1])?;
        coded.widen(bytemuck::cast_slice_mut(&mut bytes), &Cpu::new(Some(1)).unwrap());
        Ok(weights::Matrix::held(bytes, shape))
    }

    fn vector(&mut self, name: String, _: Role, width: usize) -> Result<Buffer<f32>, ModelError> {
        let Some((made, Made::Vector(values))) = self.0.next() else { panic!("{name} is a vector") };
        let mut vector = self.1.alloc(Label::Weights, width)?;
        vector.copy_from_slice(&values);
        assert_eq!(made, name);
        Ok(vector)
    }
}

/// `tests/checkpoints/llama` with a KV head for each query head, twice the same: it computes what that does.
fn unshared(folder: &Path) -> PathBuf {
    let (from, to) = (Path::new("../tests/checkpoints/llama"), folder.join("unshared"));
    std::fs::create_dir(&to).unwrap();
    let mut config: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(from.join("config.json")).unwrap()).unwrap();
    config["num_key_value_heads"] = 4.into();
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
    let file = TensorFile::open(&from.join("model.safetensors")).unwrap();
    let entries = file.entries().unwrap();
    let repeated: Vec<Vec<u8>> = entries
        .iter()
        .map(|entry| {
            let bytes = file.bytes(entry.range.clone());
            match entry.name.contains("k_proj") || entry.name.contains("v_proj") {
                true => bytes.chunks(bytes.len() / 2).flat_map(|head| [head, head].concat()).collect(),
                false => bytes.to_vec(),
            }
        })
        .collect();
    let outputs: Vec<Output<'_>> = entries
        .iter()
        .zip(&repeated)
        .map(|(entry, bytes)| {
            let mut shape = entry.shape.clone();
            shape[0] = shape[0] * bytes.len() / entry.range.len();
            Output { name: &entry.name, dtype: entry.dtype, shape, bytes }
        })
        .collect();
    write(&to.join("model.safetensors"), &outputs).unwrap();
    to
}

#[test]
fn what_awq_scales_is_divided_where_it_comes_from_in_every_family() {
    let (cpu, arena, folder) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited(), tempfile::tempdir().unwrap());
    let tokens: Vec<u32> = (0..96).map(|at| 3 + at * 11 % 100).collect();
    // Groups of 8 divide these small models.
    let recipe = Recipe { method: Method::Awq, grid: Grid { bits: 8, group: 8, symmetric: false, least_zero: 0 } };
    let named = ["llama", "llama-bias-tied", "qwen2", "qwen3", "phi3", "gemma2"]
        .map(|name| Path::new("../tests/checkpoints").join(name));
    let own = logits(&Model::open(&named[0], &arena).unwrap(), &tokens[..48], &cpu, &arena);
    let unshared = unshared(folder.path());
    let same = logits(&Model::open(&unshared, &arena).unwrap(), &tokens[..48], &cpu, &arena);
    assert!(rel_l2(&same, &own) < 1e-5, "heads that are twice the same");
    for path in named.iter().chain([&unshared]) {
        let mut model = Model::open(path, &arena).unwrap();
        let (config, own) = (model.config.clone(), logits(&model, &tokens[..48], &cpu, &arena));
        let (mut blocks, mut scaled) = (Vec::new(), Vec::new());
        let mut found = weights::Found::open(path, &config, &arena).unwrap();
        walk(path, recipe, Some(Calibration { tokens: &tokens, length: 48 }), (&cpu, &arena), |made| {
            for (name, made) in &made {
                let off = match made {
                    Made::Vector(values) => {
                        let mut before = vec![0.0; values.len()];
                        found.widened(name, values.len(), &mut before)?;
                        rel_l2(values, &before)
                    }
                    Made::Coded(coded) => {
                        let mut before = vec![0.0; coded.rows * coded.width];
                        found.tensor(name, &[coded.rows, coded.width])?.widen(0, &mut before);
                        rel_l2(&widened(coded, &cpu), &before)
                    }
                };
                scaled.push((name.clone(), off));
            }
            blocks.push(made);
            Ok::<(), ModelError>(())
        })
        .unwrap();
        let at_most = |part: &str| {
            scaled.iter().filter(|(name, _)| name.contains(part)).fold(0.0f64, |most, (_, off)| most.max(*off))
        };
        let shares = config.q_heads != config.kv_heads;
        for part in ["input_layernorm", "q", "up_proj", "down_proj"] {
            assert!(at_most(part) > 0.02, "{path:?}: {part} was not scaled: {}", at_most(part));
        }
        assert_eq!(at_most("o_proj") > 0.02, !shares, "{path:?}: values that are shared cannot be divided");
        for (index, made) in blocks.into_iter().enumerate() {
            let mut again = Again(made.into_iter(), arena.clone());
            let block = config.block(index, &mut again).unwrap();
            model.weights.layers[index] = weights::layer(&config, block);
        }
        let off = rel_l2(&logits(&model, &tokens[..48], &cpu, &arena), &own);
        assert!(off < 0.05, "{path:?}: off by {off}");
    }
}
