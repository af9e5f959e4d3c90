//! Weights in a format of their own: what is multiplied is what the format keeps, in pieces of any length, and the arena holds
//! the bytes that it says.

use crate::common::models::{all, checkpoint, deviation, furthest, setup};
use kvsieve::device::Cpu;
use kvsieve::format::RowFormat;
use kvsieve::memory::{Arena, Label};
use kvsieve::model::{Decoder, Model};

fn logits(model: &Model, tokens: &[u32], chunk_tokens: usize, cpu: &Cpu) -> Vec<f32> {
    let arena = Arena::unlimited();
    let mut decoder = Decoder::new(model, setup(1, chunk_tokens), cpu, &arena).unwrap();
    let mut all = Vec::new();
    decoder.prefill(&[tokens], |_, _, logits| all.extend_from_slice(logits)).unwrap();
    all
}

fn relative_l2(got: &[f32], wanted: &[f32]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>();
    (square(&mut got.iter().zip(wanted).map(|(a, b)| a - b)) / square(&mut wanted.iter().copied())).sqrt()
}

#[test]
fn a_model_gives_what_its_format_keeps_whether_rows_are_packed_or_read_where_they_lie() {
    let cpu = Cpu::new(Some(2)).unwrap();
    for name in all() {
        let expected = checkpoint(&name);
        // Random weights of a tiny model: an element of int8 is off by up to 1/254 of its row's largest.
        for (format, least, most) in [("f32", 0.0, 1e-3), ("f16", 0.0, 5e-3), ("bf16", 0.0, 3e-2), ("int8", 1e-4, 1e-1)]
        {
            let format: RowFormat = format.parse().unwrap();
            let arena = Arena::unlimited();
            let model = Model::open_in(&expected.folder, Some(format), &arena).unwrap();
            assert_eq!(model.weights.format(), format);
            assert_eq!(arena.usage().live[&Label::Weights], model.weights.bytes(), "{name} in {format}");
            let [whole, single] = [80, 1].map(|chunk| logits(&model, &expected.tokens, chunk, &cpu));
            // In bf16 a long chunk rounds activations too.
            let apart = if format == "bf16".parse().unwrap() { 2e-2 } else { 1e-3 };
            let bound = apart * deviation(&expected.logits);
            assert!(furthest(&whole, &single) < bound, "{name} in {format}: {}", furthest(&whole, &single));
            let off = relative_l2(&single, &expected.logits);
            assert!((least..=most).contains(&off), "{name} in {format}: off by {off}");
        }
    }
}

#[test]
fn coded_weights_take_the_bytes_of_their_rows() {
    let folder = checkpoint("llama").folder;
    let bytes = |format: Option<&str>| {
        let arena = Arena::unlimited();
        Model::open_in(&folder, format.map(|format| format.parse().unwrap()), &arena).unwrap().weights.bytes()
    };
    let config = kvsieve::model::Config::read(&folder).unwrap();
    let (hidden, ffn) = (config.hidden, config.ffn);
    let (q, kv) = (config.q_heads * config.head_dim, config.kv_heads * config.head_dim);
    let block = [[q + 2 * kv, hidden], [hidden, q], [2 * ffn, hidden], [hidden, ffn]];
    let outside = [config.vocab, hidden];
    let tables = if config.tied { 1 } else { 2 };
    let size = |row: &dyn Fn(usize) -> usize| {
        let matrix = |[rows, width]: [usize; 2]| rows * row(width);
        config.layers * block.map(matrix).iter().sum::<usize>() + tables * matrix(outside)
    };
    // Norms are f32 in either.
    let saved = size(&|width| 4 * width) - size(&|width| (width + 4).next_multiple_of(4));
    assert_eq!(bytes(Some("f32")) - bytes(Some("int8")), saved as u64);
    assert_eq!(bytes(None), bytes(Some("f32")), "this checkpoint is f32");
}

#[test]
fn a_tensor_in_two_files_of_a_folder_is_refused() {
    let (from, folder) = (checkpoint("llama").folder, tempfile::tempdir().unwrap());
    let at = |name: &str| folder.path().join(name);
    std::fs::copy(from.join("config.json"), at("config.json")).unwrap();
    for name in ["a.safetensors", "b.safetensors"] {
        std::fs::copy(from.join("model.safetensors"), at(name)).unwrap();
    }
    let index = r#"{"weight_map": {"model.norm.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}}"#;
    std::fs::write(at("model.safetensors.index.json"), index).unwrap();
    let error = Model::open(folder.path(), &Arena::unlimited()).err().unwrap().to_string();
    assert!(error.contains("b.safetensors") && error.contains("is in another file of the folder too"), "{error}");
}

/// Tied, the output matrix is the embedding: a folder that has another one says two things.
#[test]
fn an_output_matrix_of_its_own_is_not_passed_over() {
    let (from, folder) = (checkpoint("llama").folder, tempfile::tempdir().unwrap());
    let config = std::fs::read_to_string(from.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["tie_word_embeddings"] = true.into();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let weights = folder.path().join("model.safetensors");
    std::fs::copy(from.join("model.safetensors"), &weights).unwrap();
    let error = Model::open(folder.path(), &Arena::unlimited()).err().unwrap().to_string();
    assert!(error.contains("lm_head.weight is another matrix than model.embed_tokens.weight"), "{error}");
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let embedding = file.tensor("model.embed_tokens.weight").unwrap();
    let same = file.tensors().into_iter().map(|(name, tensor)| {
        let tensor = if name == "lm_head.weight" { embedding.clone() } else { tensor };
        (name, tensor)
    });
    safetensors::serialize_to_file(same.collect::<Vec<_>>(), None, &weights).unwrap();
    Model::open(folder.path(), &Arena::unlimited()).unwrap();
}
