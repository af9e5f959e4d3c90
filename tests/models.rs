//! Models against what `transformers` gave for the tiny checkpoints of `tests/models/` (`tests/models/make.py`).

use kvsieve::device::Cpu;
use kvsieve::memory::Arena;
use kvsieve::model::{self, Decoder, Model, Sampler, Sampling, Setup, generate};
use kvsieve::tensor::DType;
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};

/// What a checkpoint must give.
struct Expected {
    folder: PathBuf,
    tokens: Vec<u32>,
    /// `[L, vocab]`.
    logits: Vec<f32>,
    greedy: Vec<u32>,
}

fn expected(name: &str) -> Expected {
    let folder = Path::new("tests/models").join(name);
    let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let whole = |name| -> Vec<u32> {
        let data = file.tensor(name).unwrap().data();
        data.chunks_exact(8).map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap()) as u32).collect()
    };
    let logits = file.tensor("logits").unwrap().data();
    let logits = logits.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
    Expected { folder: folder.clone(), tokens: whole("tokens"), logits, greedy: whole("greedy") }
}

/// Every checkpoint of the folder.
fn all() -> Vec<String> {
    let folders = std::fs::read_dir("tests/models").unwrap().map(|entry| entry.unwrap());
    let folders = folders.filter(|entry| entry.path().join("config.json").exists());
    let mut names: Vec<String> = folders.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() >= 15, "{names:?}");
    names
}

fn setup(batch: usize, chunk_tokens: usize) -> Setup {
    Setup { batch, max_tokens: 80, chunk_tokens, all_logits: true, kv_dtype: DType::F32, columns: &[] }
}

/// Logits of all tokens of each sequence.
fn logits(model: &Model, tokens: &[&[u32]], chunk_tokens: usize, cpu: &Cpu) -> Vec<Vec<f32>> {
    let arena = Arena::unlimited();
    let mut decoder = Decoder::new(model, setup(tokens.len(), chunk_tokens), cpu, &arena).unwrap();
    let mut all = vec![Vec::new(); tokens.len()];
    decoder
        .prefill(tokens, |sequence, place, logits| {
            assert_eq!(all[sequence].len(), place * logits.len());
            all[sequence].extend_from_slice(logits);
        })
        .unwrap();
    all
}

fn deviation(values: &[f32]) -> f32 {
    let mean = values.iter().sum::<f32>() / values.len() as f32;
    (values.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / values.len() as f32).sqrt()
}

fn furthest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |most, x| if x > most || x.is_nan() { x } else { most })
}

#[test]
fn logits_are_those_of_transformers_whatever_the_chunks() {
    let cpu = Cpu::new(Some(2)).unwrap();
    let mut failed = Vec::new();
    for name in all() {
        let expected = expected(&name);
        let model = Model::open(&expected.folder, &Arena::unlimited()).unwrap_or_else(|error| panic!("{error}"));
        let bound = 1e-3 * deviation(&expected.logits);
        for chunk in [1000, 1, 7] {
            let got = logits(&model, &[&expected.tokens], chunk, &cpu);
            let off = furthest(&got[0], &expected.logits);
            if off.is_nan() || off > bound {
                failed.push(format!("{name}, chunks of {chunk}: off by {off}, allowed {bound}"));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn greedy_continuations_are_those_of_transformers() {
    let cpu = Cpu::new(Some(2)).unwrap();
    for name in all() {
        let expected = expected(&name);
        let arena = Arena::unlimited();
        let model = Model::open(&expected.folder, &arena).unwrap();
        let setup = Setup { all_logits: false, ..setup(1, 16) };
        let mut decoder = Decoder::new(&model, setup, &cpu, &arena).unwrap();
        let mut sampler = Sampler::new(Sampling::GREEDY);
        let most_tokens = expected.greedy.len();
        let generated = generate(&mut decoder, &expected.tokens, &mut sampler, &[], most_tokens, |_| ()).unwrap();
        let got = generated.tokens;
        assert_eq!(got, expected.greedy, "{name}");
        let most = model::bytes(&model, &setup, &[expected.tokens.len()], got.len() - 1, cpu.threads());
        assert_eq!(arena.usage().peak_bytes, most, "{name}");
    }
}

#[test]
fn sequences_of_one_batch_do_not_meet() {
    let cpu = Cpu::new(Some(2)).unwrap();
    for name in ["llama", "gemma2", "dynamic"] {
        let expected = expected(name);
        let model = Model::open(&expected.folder, &Arena::unlimited()).unwrap();
        let tokens = &expected.tokens;
        let batch: [&[u32]; 3] = [&tokens[..23], &tokens[5..], &tokens[30..31]];
        let together = logits(&model, &batch, 9, &cpu);
        for (tokens, together) in batch.iter().zip(&together) {
            let alone = logits(&model, &[tokens], 9, &cpu);
            assert!(furthest(&alone[0], together) < 1e-4, "{name}");
        }
    }
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    let expected = expected("qwen3");
    let model = Model::open(&expected.folder, &Arena::unlimited()).unwrap();
    let of = |threads| logits(&model, &[&expected.tokens], 16, &Cpu::new(Some(threads)).unwrap());
    assert_eq!(of(1), of(3));
}
