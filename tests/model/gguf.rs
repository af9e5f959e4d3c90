//! Models from GGUF files: the same logits as the Hugging Face folder that they are made from, and one line for what is wrong.

use crate::common::gguf::{F32, Kind, Parts, Q8_0};
use crate::common::models::{checkpoint, deviation, furthest, setup};
use kvsieve::device::Cpu;
use kvsieve::memory::Arena;
use kvsieve::model::config::RopeScaling;
use kvsieve::model::{Config, Decoder, Eviction, Model, ModelError, Setup, Text, packed_bytes};
use kvsieve::policy::Registry;
use kvsieve::tensor::DType;
use serde_json::{Value, json};
use std::path::Path;

/// Logits of all tokens.
fn logits(path: &Path, tokens: &[u32]) -> Vec<f32> {
    logits_of(&Model::open(path, &Arena::unlimited()).unwrap(), tokens, tokens.len())
}

/// The same, of a model and in chunks.
fn logits_of(model: &Model, tokens: &[u32], chunk_tokens: usize) -> Vec<f32> {
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    let setup = Setup { chunk_tokens, all_logits: true, ..Setup::of(tokens.len(), DType::F32) };
    let mut logits = Vec::new();
    let mut decoder = Decoder::new(model, setup, &cpu, &arena).unwrap();
    decoder.prefill(&[tokens], |_, _, row| logits.extend_from_slice(row)).unwrap();
    logits
}

/// A copy of a checkpoint in `to`, without what llama.cpp does not keep: Qwen's sliding windows, and a scale of Gemma's
/// attention that is not by the width of a head.
fn as_kept(from: &Path, to: &Path) {
    let mut config: Value = serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    if config["architectures"][0].as_str().unwrap().starts_with("Qwen") {
        config["use_sliding_window"] = json!(false);
        config.as_object_mut().unwrap().remove("layer_types");
    }
    if !config["query_pre_attn_scalar"].is_null() {
        config["query_pre_attn_scalar"] = config["head_dim"].clone();
    }
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
    std::fs::copy(from.join("model.safetensors"), to.join("model.safetensors")).unwrap();
}

#[test]
fn a_file_gives_the_logits_of_the_folder_that_it_is_made_from() {
    let llama = ["llama", "llama-bias-tied", "linear", "yarn", "llama3"];
    for name in llama.into_iter().chain(["qwen2", "qwen3", "longrope", "phi3", "phi4-mini", "gemma2"]) {
        let (checkpoint, folder) = (checkpoint(name), tempfile::tempdir().unwrap());
        as_kept(&checkpoint.folder, folder.path());
        let wanted = logits(folder.path(), &checkpoint.tokens);
        let path = folder.path().join("model.gguf");
        // The furthest logit of a random model of 32 channels is a tenth to a half of a deviation off in Q8_0.
        for (kind, bound) in [(F32, 1e-5), (Q8_0, 0.6)] {
            std::fs::write(&path, Parts::of(folder.path(), kind).bytes()).unwrap();
            let off = furthest(&logits(&path, &checkpoint.tokens), &wanted) / deviation(&wanted);
            assert!(off < bound, "{name}, {kind:?}: off by {off}");
        }
    }
}

/// Quantised types.
const QUANTISED: [Kind; 5] = [Q8_0, Kind("q5_1", 7), Kind("q5_0", 6), Kind("q4_1", 3), Kind("q4_0", 2)];

#[test]
fn blocks_are_run_as_they_lie_and_give_what_they_give_widened() {
    let (folder, arena) = (tempfile::tempdir().unwrap(), Arena::unlimited());
    let path = folder.path().join("model.gguf");
    for name in ["llama", "qwen2", "phi3"] {
        let checkpoint = checkpoint(name);
        for kind in QUANTISED.into_iter().chain([Kind("f16", 1), Kind("bf16", 30)]) {
            std::fs::write(&path, Parts::of(&checkpoint.folder, kind).bytes()).unwrap();
            let widened = Model::open_in(&path, Some("f32".parse().unwrap()), &arena).unwrap();
            let wanted = logits_of(&widened, &checkpoint.tokens, 80);
            let packed = Model::open(&path, &arena).unwrap();
            assert_eq!(packed.weights.format(), kind.0.parse().unwrap(), "{name}");
            // What eval asks before it opens a model.
            let unopened = packed_bytes(&path, &packed.config, None).unwrap();
            assert_eq!(unopened, (packed.weights.bytes(), packed.weights.dtype()), "{name}, {kind:?}");
            for chunk in [80, 1] {
                let off = furthest(&logits_of(&packed, &checkpoint.tokens, chunk), &wanted) / deviation(&wanted);
                assert!(off < 1e-4, "{name} in {kind:?}, {chunk} tokens at a time: off by {off}");
            }
        }
    }
}

#[test]
fn a_model_of_a_file_takes_the_bytes_of_its_blocks_as_the_arena_shows() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    for kind in QUANTISED {
        let parts = Parts::of(&checkpoint("qwen2").folder, kind);
        std::fs::write(&path, parts.bytes()).unwrap();
        let arena = Arena::unlimited();
        let model = Model::open(&path, &arena).unwrap();
        assert_eq!(model.weights.bytes(), arena.usage().live_bytes);
        let of_file: usize = parts.tensors.iter().map(|(.., bytes)| bytes.len()).sum();
        assert_eq!(model.weights.bytes(), of_file as u64, "{kind:?}");
    }
}

#[test]
fn a_policy_that_reads_a_projection_reads_what_its_blocks_stand_for() {
    let (folder, arena) = (tempfile::tempdir().unwrap(), Arena::unlimited());
    let (path, cpu, checkpoint) = (folder.path().join("model.gguf"), Cpu::new(Some(2)).unwrap(), checkpoint("llama"));
    std::fs::write(&path, Parts::of(&checkpoint.folder, Q8_0).bytes()).unwrap();
    let policy = Registry::default().policy("critical-snapkv").unwrap();
    let [packed, widened] = [None, Some("f32".parse().unwrap())].map(|format| {
        let model = Model::open_in(&path, format, &arena).unwrap();
        let setup = Setup { columns: policy.columns(), all_logits: false, ..setup(1, 80) };
        let mut decoder = Decoder::new(&model, setup, &cpu, &arena).unwrap();
        let eviction = Eviction {
            policy: &policy,
            name: "critical-snapkv",
            budget: Some("0.5".parse().unwrap()),
            seed: 0,
            repeat: None,
        };
        decoder.evict(eviction, &[32]).unwrap();
        let mut logits = Vec::new();
        decoder.prefill(&[&checkpoint.tokens[..32]], |_, _, _| ()).unwrap();
        assert!(decoder.evicted_tokens() > 0);
        decoder.follow(&[&checkpoint.tokens[32..33]], |_, _, row| logits.extend_from_slice(row)).unwrap();
        logits
    });
    assert!(furthest(&packed, &widened) < 1e-4 * deviation(&widened));
}

#[test]
fn the_tokenizer_of_a_file_is_that_of_the_folder() {
    let json = std::fs::read_to_string("tests/parsers/corpus/tokenizers/bpe-bytelevel.json").unwrap();
    let mut original: Value = serde_json::from_str(&json).unwrap();
    // Cut as GPT-2 does, and what the vocabulary lacks is left out.
    original["pre_tokenizer"] = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true
    });
    (original["normalizer"], original["model"]["unk_token"]) = (Value::Null, Value::Null);
    original["added_tokens"] = json!([]);
    let mut vocabulary: Vec<(String, u64)> = original["model"]["vocab"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(token, id)| (token.clone(), id.as_u64().unwrap()))
        .collect();
    vocabulary.sort_by_key(|&(_, id)| id);
    let merges = original["model"]["merges"].as_array().unwrap().iter().map(|merge| match merge {
        Value::Array(pair) => json!(format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap())),
        text => text.clone(),
    });
    let mut parts = Parts::of(&checkpoint("llama").folder, F32);
    let tokens: Vec<Value> = vocabulary.iter().map(|(token, _)| json!(token)).collect();
    parts.keys.extend([
        ("tokenizer.ggml.model".into(), json!("gpt2")),
        ("tokenizer.ggml.pre".into(), json!("gpt-2")),
        ("tokenizer.ggml.tokens".into(), json!(tokens)),
        ("tokenizer.ggml.merges".into(), json!(merges.collect::<Vec<_>>())),
    ]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, parts.bytes()).unwrap();
    let (file, original) = (Text::open(&path).unwrap(), Text::parse("original".into(), &original.to_string()).unwrap());
    for text in ["the key of the red door", "it's 4711, isn't it?\n\n  Indented", "naïve – ∑"] {
        assert_eq!(file.piece(text).unwrap(), original.piece(text).unwrap(), "{text}");
    }
}

#[test]
fn what_is_wrong_with_a_file_is_said_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let refused = |bytes: &[u8]| -> String {
        std::fs::write(&path, bytes).unwrap();
        let error: ModelError = Model::open(&path, &Arena::unlimited()).err().expect("it is refused");
        error.to_string()
    };
    let parts = || Parts::of(&checkpoint("llama").folder, F32);
    let whole = parts().bytes();
    // Cut anywhere: in the header, or in the last tensor.
    for end in (0..whole.len()).step_by(whole.len() / 60 + 1).chain([whole.len() - 1]) {
        let said = refused(&whole[..end]);
        assert!(said.contains("not a GGUF file that is read") || said.contains("cannot read"), "{end}: {said}");
        assert_eq!(said.lines().count(), 1);
    }
    // A list as long as the file allows would take many times its bytes.
    let mut long = b"GGUF".to_vec();
    long.extend(3u32.to_le_bytes());
    long.extend([0u64, 1, 1].iter().flat_map(|count| count.to_le_bytes()));
    long.push(b'x');
    long.extend([9u32, 0].iter().flat_map(|kind| kind.to_le_bytes()));
    long.extend(((1u64 << 22) + 1).to_le_bytes());
    long.resize(long.len() + (1 << 22) + 1, 0);
    assert!(refused(&long).contains("a list of 4194305 elements; at most 4194304 are read"));
    let changed = |change: &dyn Fn(&mut Parts)| {
        let mut parts = parts();
        change(&mut parts);
        refused(&parts.bytes())
    };
    type Change<'a> = &'a dyn Fn(&mut Parts);
    let cases: [(Change<'_>, &str); 9] = [
        (&|parts| parts.tensors[0].2 = 42, "type number 42 of ggml; read are F32, F16, BF16, Q4_0"),
        (&|parts| parts.tensors[0].1 = vec![u64::MAX, 3], "is not whole blocks of f32"),
        (&|parts| parts.keys[0].1 = json!("mamba"), "general.architecture is 'mamba'; known: llama, qwen2"),
        (&|parts| drop(parts.tensors.remove(3)), "there is no tensor"),
        (&|parts| parts.tensors.retain(|(name, ..)| name != "output_norm.weight"), "no tensor 'output_norm.weight'"),
        (&|parts| parts.tensors[3].0 += "s", "there is no tensor"),
        (
            &|parts| parts.tensors.push(("rope_freqs.weight".into(), vec![1], 0, vec![0, 0, 128, 63])),
            "tensor 'rope_freqs.weight' has shape [1]; [4] is needed",
        ),
        (
            &|parts| parts.tensors.push(("rope_freqs.weight".into(), vec![4], 0, vec![0; 16])),
            "divides RoPE's frequencies by 'rope_freqs.weight', which is none of Llama 3.1's",
        ),
        (
            &|parts| parts.tensors.push(("blk.0.extra".into(), vec![1], 0, vec![0; 4])),
            "tensor 'blk.0.extra' is not part of",
        ),
    ];
    for (change, expected) in cases {
        let said = changed(change);
        assert!(said.contains(expected), "{said}");
    }
    for (key, value, expected) in [
        ("attention.scale", json!(0.5), "llama.attention.scale is 0.5; what it changes is not known here"),
        ("attention.clamp_kqv", json!(8.0), "llama.attention.clamp_kqv is 8"),
        ("rope.dimension_count", json!(4), "llama.rope.dimension_count is 4; of such a model it must be 8"),
        ("rope.scaling.attn_factor", json!(0.5), "llama.rope.scaling.attn_factor is 0.5; of such a model it must be 1"),
        ("expert_count", json!(8), "llama.expert_count is 8; of such a model it must be 0"),
        ("attention.head_count_kv", json!([2, 2]), "llama.attention.head_count_kv is [2,2]; it must be"),
    ] {
        let key = format!("llama.{key}");
        let said = changed(&|parts| {
            parts.keys.retain(|(known, _)| *known != key);
            parts.keys.push((key.clone(), value.clone()));
        });
        assert!(said.contains(expected), "{said}");
    }
    // A factor without a type is linear, as older files have it.
    for (key, factor) in [("rope.scale_linear", 4.0), ("rope.scaling.factor", 4.0), ("rope.scaling.factor", 1.0)] {
        let mut parts = parts();
        parts.keys.push((format!("llama.{key}"), json!(factor)));
        std::fs::write(&path, parts.bytes()).unwrap();
        let expected = if factor == 1.0 { RopeScaling::None } else { RopeScaling::Linear { factor } };
        assert_eq!(Config::read(&path).unwrap().rope.scaling, expected, "{key}");
    }
    for (name, key) in [("longrope", "phi3.rope.scaling.type"), ("llama3", "llama.rope.scaling.type")] {
        let mut parts = Parts::of(&checkpoint(name).folder, F32);
        parts.keys.push((key.into(), json!("yarn")));
        assert!(refused(&parts.bytes()).contains("it scales RoPE in two ways at once"));
    }
    let mut parts = Parts::of(&checkpoint("longrope").folder, F32);
    parts.tensors.retain(|(name, ..)| name != "rope_factors_short.weight");
    assert!(refused(&parts.bytes()).contains("or has half of one; its tensors may be: rope_freqs.weight"));
    let mut parts = Parts::of(&checkpoint("longrope").folder, F32);
    parts.keys.iter_mut().find(|(key, _)| key.ends_with("attn_factor")).unwrap().1 = json!(3.5);
    let said = refused(&parts.bytes());
    assert!(said.contains("rope.scaling.attn_factor is 3.5; for a context as its own it must be 1.18"), "{said}");
    std::fs::write(&path, &whole).unwrap();
    let said = Text::open(&path).err().unwrap().to_string();
    assert!(said.contains("its tokenizer is 'nothing'"), "{said}");
}
