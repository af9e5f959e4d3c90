//! Models against what `transformers` gave for the tiny checkpoints of `tests/checkpoints/` (`tests/checkpoints/make.py`).

use crate::common::models::{all, checkpoint, deviation, furthest, setup};
use kvsieve::device::Cpu;
use kvsieve::device::simd::Isa;
use kvsieve::memory::Arena;
use kvsieve::model::config::{Family, Rope, RopeScaling};
use kvsieve::model::{self, Config, Decoder, Model, Sampler, Sampling, Setup, generate};
use kvsieve::tensor::DType;
use proptest::prelude::*;
use serde_json::Value;
use std::path::Path;

/// Logits of all tokens of each sequence.
fn logits(model: &Model, tokens: &[&[u32]], (kernel, chunk_tokens): (&str, usize), cpu: &Cpu) -> Vec<Vec<f32>> {
    let arena = Arena::unlimited();
    let setup = Setup { kernel, ..setup(tokens.len(), chunk_tokens) };
    let mut decoder = Decoder::new(model, setup, cpu, &arena).unwrap();
    let mut all = vec![Vec::new(); tokens.len()];
    decoder
        .prefill(tokens, |sequence, place, logits| {
            assert_eq!(all[sequence].len(), place * logits.len());
            all[sequence].extend_from_slice(logits);
        })
        .unwrap();
    all
}

#[test]
fn logits_are_those_of_transformers_whatever_the_chunks_and_the_kernel() {
    let cpu = Cpu::new(Some(2)).unwrap();
    let mut failed = Vec::new();
    for name in all() {
        let expected = checkpoint(&name);
        let model = Model::open(&expected.folder, &Arena::unlimited()).unwrap_or_else(|error| panic!("{error}"));
        let bound = 1e-3 * deviation(&expected.logits);
        for (kernel, chunk) in [
            ("tiled", 1000),
            ("tiled", 1),
            ("tiled", 7),
            ("tiled:br=16,bc=32", 1000),
            ("naive", 7),
            ("reference", 30),
            ("decode", 9),
        ] {
            let got = logits(&model, &[&expected.tokens], (kernel, chunk), &cpu);
            let off = furthest(&got[0], &expected.logits);
            if off.is_nan() || off > bound {
                failed.push(format!("{name}, {kernel}, chunks of {chunk}: off by {off}, allowed {bound}"));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn what_follows_closely_gives_the_logits_of_every_token() {
    let cpu = Cpu::new(Some(2)).unwrap();
    for name in ["llama", "gemma2", "dynamic", "mistral"] {
        let expected = checkpoint(name);
        let model = Model::open(&expected.folder, &Arena::unlimited()).unwrap();
        let arena = Arena::unlimited();
        // Room for the logits of one token at a time.
        let few = Setup { all_logits: false, ..setup(1, 64) };
        let (context, rest) = expected.tokens.split_at(15);
        let steps = {
            let mut decoder = Decoder::new(&model, few, &cpu, &arena).unwrap();
            decoder.prefill(&[context], |_, _, _| ()).unwrap();
            let mut all = Vec::new();
            for token in rest {
                decoder.follow(&[&[*token]], |_, _, logits| all.extend_from_slice(logits)).unwrap();
            }
            all
        };
        let mut decoder = Decoder::new(&model, few, &cpu, &arena).unwrap();
        decoder.prefill(&[context], |_, _, _| ()).unwrap();
        let (mut places, mut together) = (Vec::new(), Vec::new());
        decoder
            .follow_closely(&[rest], |_, place, logits| {
                places.push(place);
                together.extend_from_slice(logits);
            })
            .unwrap();
        assert!(places.into_iter().eq(0..rest.len()), "{name}");
        assert!(furthest(&together, &steps) < 1e-3 * deviation(&steps), "{name}");
        // Afterwards only the last is given again.
        let mut last = 0;
        decoder.follow(&[&rest[..3]], |_, place, _| last = 10 * last + place + 1).unwrap();
        assert!(last == 3 || name == "dynamic", "{name}: {last}");
    }
}

#[test]
fn greedy_continuations_are_those_of_transformers() {
    let cpu = Cpu::new(Some(2)).unwrap();
    for name in all() {
        let expected = checkpoint(&name);
        let arena = Arena::unlimited();
        let model = Model::open(&expected.folder, &arena).unwrap();
        let setup = Setup { all_logits: false, ..setup(1, 16) };
        let mut decoder = Decoder::new(&model, setup, &cpu, &arena).unwrap();
        let mut sampler = Sampler::new(Sampling::GREEDY);
        let most_tokens = expected.greedy.len();
        let generated = generate(&mut decoder, &expected.tokens, &mut sampler, &[], most_tokens, |_| ()).unwrap();
        let got = generated.tokens;
        assert_eq!(got, expected.greedy, "{name}");
        let most = model::bytes(&model, &setup, &[expected.tokens.len()], got.len() - 1, cpu.threads()).unwrap();
        assert_eq!(arena.usage().peak_bytes, most, "{name}");
    }
}

#[test]
fn sequences_of_one_batch_do_not_meet() {
    let cpu = Cpu::new(Some(2)).unwrap();
    for name in ["llama", "gemma2", "dynamic"] {
        let expected = checkpoint(name);
        let model = Model::open(&expected.folder, &Arena::unlimited()).unwrap();
        let tokens = &expected.tokens;
        let batch: [&[u32]; 3] = [&tokens[..23], &tokens[5..], &tokens[30..31]];
        let together = logits(&model, &batch, ("tiled", 9), &cpu);
        for (tokens, together) in batch.iter().zip(&together) {
            let alone = logits(&model, &[tokens], ("tiled", 9), &cpu);
            assert!(furthest(&alone[0], together) < 1e-4, "{name}");
        }
    }
}

#[test]
fn the_peak_is_the_formula_for_chunks_steps_and_sequences_of_any_length() {
    let model = Model::open(&checkpoint("llama-f16").folder, &Arena::unlimited()).unwrap();
    let tokens: Vec<u32> = (0..2000).map(|index| 3 + index % 100).collect();
    for (kernel, lens, steps, chunk_tokens, threads, activations) in [
        ("tiled", vec![1500], 3, 512, 1, None),
        ("tiled", vec![40, 700, 1], 2, 300, 2, None),
        ("tiled", vec![256, 256], 0, 64, 3, Some("int8")),
        ("tiled", vec![1], 5, 1, 1, Some("int8")),
        ("naive", vec![700, 90], 2, 300, 2, Some("f16")),
        // A short chunk takes a new slab when the long one before it is over.
        ("tiled", vec![1100], 1, 512, 2, None),
        ("tiled", vec![1030, 600], 1, 512, 2, None),
    ] {
        let (cpu, arena) = (Cpu::new(Some(threads)).unwrap(), Arena::unlimited());
        let (batch, max_tokens) = (lens.len(), 1600);
        let kv_dtype = DType::F16;
        let activations = activations.map(|format| format.parse().unwrap());
        let setup = Setup { kernel, batch, chunk_tokens, activations, ..Setup::of(max_tokens, kv_dtype) };
        let mut decoder = Decoder::new(&model, setup, &cpu, &arena).unwrap();
        let prompts: Vec<&[u32]> = lens.iter().map(|&len| &tokens[..len]).collect();
        decoder.prefill(&prompts, |_, _, _| ()).unwrap();
        (0..steps).for_each(|_| decoder.follow(&vec![&tokens[..1]; batch], |_, _, _| ()).unwrap());
        let predicted = model::bytes(&model, &setup, &lens, steps, threads).unwrap() - model.weights.bytes();
        assert_eq!(arena.usage().peak_bytes, predicted, "{kernel} {lens:?}");
    }
}

/// A copy of a checkpoint that may be damaged.
fn copied(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(Path::new("tests/checkpoints").join(name)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

fn refusal(folder: &Path) -> String {
    let error = Model::open(folder, &Arena::unlimited()).err().expect("a damaged folder").to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn folders_that_do_not_fit_together_are_refused_by_name() {
    let folder = copied("llama");
    std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    assert!(refusal(folder.path()).contains("cannot read"), "{}", refusal(folder.path()));
    std::fs::remove_file(folder.path().join("config.json")).unwrap();
    assert!(refusal(folder.path()).contains("config.json"));

    let folder = copied("llama-sharded");
    let shard = folder.path().join("model-00002-of-00003.safetensors");
    let bytes = std::fs::read(&shard).unwrap();
    std::fs::write(&shard, &bytes[..bytes.len() - 100]).unwrap();
    assert!(refusal(folder.path()).contains("00002-of-00003.safetensors' is not a valid safetensors file"));
    std::fs::remove_file(&shard).unwrap();
    let missing = "it names the file 'model-00002-of-00003.safetensors', which is not there";
    assert!(refusal(folder.path()).contains(missing));

    let changes = [
        ("\"intermediate_size\": 72", "\"intermediate_size\": 71", "has shape [72, 32]; [71, 32] is needed"),
        ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3", "no tensor 'model.layers.2.input_layernorm.weight'"),
        (
            "\"num_hidden_layers\": 2",
            "\"num_hidden_layers\": 1",
            "tensor 'model.layers.1.input_layernorm.weight' is not",
        ),
        ("\"attention_bias\": false", "\"attention_bias\": true", "no tensor 'model.layers.0.self_attn.q_proj.bias'"),
        ("LlamaForCausalLM", "OPTForCausalLM", "unknown architecture 'OPTForCausalLM'"),
    ];
    for (from, to, expected) in changes {
        let folder = copied("llama");
        let path = folder.path().join("config.json");
        let config = std::fs::read_to_string(&path).unwrap();
        assert!(config.contains(from), "{config}");
        std::fs::write(&path, config.replace(from, to)).unwrap();
        assert!(refusal(folder.path()).contains(expected), "{}", refusal(folder.path()));
    }
}

#[test]
fn weights_that_lie_askew_in_their_file_are_read_all_the_same() {
    let expected = checkpoint("qwen3-bf16");
    let folder = copied("qwen3-bf16");
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut askew = (header as u64 + 1).to_le_bytes().to_vec();
    askew.extend_from_slice(&bytes[8..8 + header]);
    askew.push(b' ');
    askew.extend_from_slice(&bytes[8 + header..]);
    std::fs::write(&path, askew).unwrap();
    let cpu = Cpu::new(Some(1)).unwrap();
    let of = |folder: &Path| {
        let model = Model::open(folder, &Arena::unlimited()).unwrap();
        logits(&model, &[&expected.tokens], ("tiled", 16), &cpu)
    };
    assert_eq!(of(folder.path()), of(&expected.folder));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn damaged_files_give_errors_and_no_panic(
        name in prop::sample::select(vec!["llama", "llama-sharded", "phi3", "gemma2"]),
        which in any::<prop::sample::Index>(),
        at in any::<prop::sample::Index>(),
        value in any::<u8>(),
        cut in any::<bool>(),
    ) {
        let folder = copied(name);
        let mut files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.retain(|path| !path.ends_with("expected.safetensors") && !path.ends_with("tokenizer.json"));
        files.sort();
        let path = which.get(&files);
        let mut bytes = std::fs::read(path).unwrap();
        if cut {
            let len = at.index(bytes.len());
            bytes.truncate(len);
        } else {
            // Of a file of weights, the header.
            let at = at.index(bytes.len().min(2500));
            bytes[at] = value;
        }
        std::fs::write(path, bytes).unwrap();
        let cpu = Cpu::new(Some(1)).unwrap();
        // What still opens must run.
        if let Ok(model) = Model::open(folder.path(), &Arena::unlimited()) {
            let arena = Arena::unlimited();
            let mut decoder = Decoder::new(&model, setup(1, 16), &cpu, &arena).unwrap();
            let _ = decoder.prefill(&[&[3, 4, 5]], |_, _, _| ());
        }
    }
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    let expected = checkpoint("qwen3");
    let model = Model::open(&expected.folder, &Arena::unlimited()).unwrap();
    let of = |threads| logits(&model, &[&expected.tokens], ("tiled", 16), &Cpu::new(Some(threads)).unwrap());
    assert_eq!(of(1), of(3));
}

#[test]
fn a_text_is_neither_cut_nor_padded_whatever_the_tokenizer_was_saved_with() {
    let folder = tempfile::tempdir().unwrap();
    let whole = std::fs::read_to_string("tests/checkpoints/llama/tokenizer.json").unwrap();
    let mut saved: Value = serde_json::from_str(&whole).unwrap();
    saved["truncation"] =
        serde_json::json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0});
    saved["padding"] = serde_json::json!({"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"});
    std::fs::write(folder.path().join("tokenizer.json"), saved.to_string()).unwrap();
    let tokens = |folder: &Path| model::Text::open(folder).unwrap().tokens("w9 w17 w33 w8 w100").unwrap();
    assert_eq!(tokens(folder.path()), tokens(Path::new("tests/checkpoints/llama")));
    assert_eq!(tokens(folder.path()), [1, 9, 17, 33, 8, 100]);
}

/// What `tests/fixtures/published_configs.json` says of a configuration: keys and values as they were published, and what
/// a reader must make of them, written down from the models' own descriptions.
#[derive(serde::Deserialize)]
struct Published {
    model: String,
    config: serde_json::Map<String, Value>,
    accepted: Option<Value>,
    refused: Option<String>,
}

#[test]
fn published_configurations_are_read_right_or_refused_for_the_right_reason() {
    let text = std::fs::read_to_string("tests/fixtures/published_configs.json").unwrap();
    let all: Vec<Published> = serde_json::from_str(&text).unwrap();
    assert!(all.len() >= 30);
    for family in Family::ALL {
        let named = |published: &&Published| published.config["architectures"][0] == family.architecture();
        assert!(all.iter().filter(named).count() >= 3, "{family:?}");
    }
    for Published { model, config, accepted, refused } in &all {
        let found = Config::from_json(config);
        match (accepted, refused) {
            (None, Some(reason)) => {
                let error = found.expect_err(model);
                assert!(error.contains(reason), "{model}: {error}");
            }
            (Some(expected), None) => {
                let found = found.unwrap_or_else(|error| panic!("{model}: {error}"));
                let count = |key: &str| expected[key].as_u64().unwrap() as usize;
                let extents = (count("layers"), count("q_heads"), count("kv_heads"), count("head_dim"));
                assert_eq!((found.layers, found.q_heads, found.kv_heads, found.head_dim), extents, "{model}");
                assert_eq!(found.tied, expected["tied"].as_bool().unwrap(), "{model}");
                assert_eq!(
                    found.rope,
                    rope(&expected["rope"], config.get("rope_scaling").unwrap_or(&Value::Null)),
                    "{model}"
                );
                // The pattern of the first layers goes on to the last.
                let pattern = expected["windows"].as_array().unwrap();
                for (layer, window) in found.windows.iter().enumerate() {
                    let expected = pattern[layer % pattern.len()].as_u64().map(|window| window as usize);
                    assert_eq!(*window, expected, "{model}, layer {layer}");
                }
                let scale = expected["attention_scale"].as_f64().unwrap_or((found.head_dim as f64).powf(-0.5));
                assert_eq!(found.attention_scale, scale as f32, "{model}");
                let caps =
                    ["attention_softcap", "final_softcap"].map(|cap| expected[cap].as_f64().map(|cap| cap as f32));
                assert_eq!([found.attention_softcap, found.final_softcap], caps, "{model}");
                if let Some(eos) = expected["eos"].as_array() {
                    assert!(eos.iter().map(|token| token.as_u64().unwrap() as u32).eq(found.eos), "{model}");
                }
            }
            _ => panic!("{model} must be accepted or refused"),
        }
    }
}

/// RoPE as the fixture writes it; lists of factors are those of the configuration.
fn rope(expected: &Value, config: &Value) -> Rope {
    let number = |key: &str| expected[key].as_f64().unwrap();
    let original = || number("original_positions") as usize;
    let scaling = match expected["scaling"].as_str().unwrap() {
        "none" => RopeScaling::None,
        "llama3" => RopeScaling::Llama3 {
            factor: number("factor"),
            low_freq_factor: number("low_freq_factor"),
            high_freq_factor: number("high_freq_factor"),
            original_positions: original(),
        },
        "yarn" => RopeScaling::Yarn {
            factor: number("factor"),
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_positions: original(),
            attention_factor: 0.1 * number("factor").ln() + 1.0,
            truncate: true,
        },
        "longrope" => {
            let factors = |key: &str| {
                config[key].as_array().unwrap().iter().map(|factor| factor.as_f64().unwrap() as f32).collect()
            };
            RopeScaling::Long {
                short: factors("short_factor"),
                long: factors("long_factor"),
                original_positions: original(),
                attention_factor: number("attention_factor") as f32,
            }
        }
        other => panic!("{other}"),
    };
    Rope { theta: number("theta"), part: expected["part"].as_f64().unwrap_or(1.0), scaling }
}

/// As [`logits`] of one sequence, with activations rounded.
fn rounded(model: &Model, tokens: &[u32], chunk_tokens: usize, format: &str, cpu: &Cpu) -> Vec<f32> {
    let arena = Arena::unlimited();
    let setup = Setup { activations: Some(format.parse().unwrap()), ..setup(1, chunk_tokens) };
    let mut decoder = Decoder::new(model, setup, cpu, &arena).unwrap();
    let mut all = Vec::new();
    decoder.prefill(&[tokens], |_, _, logits| all.extend_from_slice(logits)).unwrap();
    all
}

/// The mean difference.
fn mean_off(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum::<f32>() / a.len() as f32
}

#[test]
fn activations_in_bytes_give_what_transformers_gives_with_inputs_rounded_so() {
    let cpu = Cpu::new(Some(2)).unwrap();
    let file = std::fs::read("tests/checkpoints/activations.safetensors").unwrap();
    let file = safetensors::SafeTensors::deserialize(&file).unwrap();
    for name in file.names() {
        let numbers = file.tensor(name).unwrap().data().chunks_exact(4);
        let theirs: Vec<f32> = numbers.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
        let expected = checkpoint(name);
        let model = Model::open(&expected.folder, &Arena::unlimited()).unwrap();
        let effect = mean_off(&theirs, &expected.logits);
        // One token at a time, and many: rows that are read where they lie, and panels.
        for chunk in [1, 1000] {
            let ours = rounded(&model, &expected.tokens, chunk, "int8", &cpu);
            // A code that falls to the other side of a half moves little; a layer whose input stays as it is moves much.
            let off = mean_off(&ours, &theirs);
            assert!(off < 0.1 * effect, "{name}, chunks of {chunk}: off by {off}, rounding itself moves {effect}");
        }
    }
}

/// `tests/conformance/w8a8.py` made the fixture: transformers rounds inputs of linear layers by the folder's static scales.
#[test]
fn a_folder_with_static_activations_gives_what_transformers_gives() {
    let (folder, cpu) = (Path::new("tests/fixtures/w8a8"), Cpu::new(Some(2)).unwrap());
    let file = std::fs::read(folder.join("expected.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&file).unwrap();
    let four = |name: &str, bytes: usize| {
        let data = file.tensor(name).unwrap().data().chunks_exact(bytes);
        data.map(|number| <[u8; 4]>::try_from(&number[..4]).unwrap()).collect::<Vec<_>>()
    };
    let tokens: Vec<u32> = four("tokens", 8).into_iter().map(u32::from_le_bytes).collect();
    let theirs: Vec<f32> = four("logits", 4).into_iter().map(f32::from_le_bytes).collect();
    let model = Model::open(folder, &Arena::unlimited()).unwrap();
    let plain = &logits(&model, &[&tokens], ("tiled", 1000), &cpu)[0];
    let effect = mean_off(&theirs, plain);
    for chunk in [1, 1000] {
        let off = mean_off(&rounded(&model, &tokens, chunk, "int8", &cpu), &theirs);
        // One code lies so near a half that a millionth moves it, which is 7% of the effect; without -128 as a code it is 12%.
        assert!(off < 0.1 * effect, "chunks of {chunk}: off by {off}, rounding itself moves {effect}");
    }
    // Other formats have scales of their own.
    let off = mean_off(&rounded(&model, &tokens, 1000, "f16", &cpu), &theirs);
    assert!(off > 0.5 * effect, "{off} {effect}");
}

#[test]
fn activations_in_f32_change_no_bit_and_coarser_ones_change_more() {
    let cpu = Cpu::new(Some(2)).unwrap();
    for name in ["llama", "gemma2"] {
        let expected = checkpoint(name);
        let model = Model::open(&expected.folder, &Arena::unlimited()).unwrap();
        let of = |format: &str| rounded(&model, &expected.tokens, 1000, format, &cpu);
        let plain = &logits(&model, &[&expected.tokens], ("tiled", 1000), &cpu)[0];
        assert_eq!(of("f32"), *plain, "{name}");
        let off = ["f16", "int8", "fp8-e5m2"].map(|format| mean_off(&of(format), plain));
        assert!(0.0 < off[0] && off[0] < off[1] && off[1] < off[2], "{name}: {off:?}");
    }
}

#[test]
fn codes_of_activations_and_weights_give_the_same_on_every_path() {
    let expected = checkpoint("llama");
    let plain = Model::open(&expected.folder, &Arena::unlimited()).unwrap();
    let model = Model::open_in(&expected.folder, Some("int8".parse().unwrap()), &Arena::unlimited()).unwrap();
    let portable = Cpu::with_isa(Some(1), Isa::PORTABLE).unwrap();
    for chunk in [1, 20, 1000] {
        let wanted = rounded(&model, &expected.tokens, chunk, "int8", &portable);
        let effect = mean_off(&wanted, &rounded(&plain, &expected.tokens, chunk, "f32", &portable));
        for isa in Isa::available() {
            let cpu = Cpu::with_isa(Some(2), isa).unwrap();
            // A code may fall to the other side of a half.
            let off = mean_off(&rounded(&model, &expected.tokens, chunk, "int8", &cpu), &wanted);
            assert!(off < 0.05 * effect, "{}, chunks of {chunk}: off by {off}, rounding moves {effect}", isa.name());
        }
    }
}

#[test]
fn activations_are_refused_in_formats_of_keys_and_of_other_widths() {
    let model = Model::open(&checkpoint("llama").folder, &Arena::unlimited()).unwrap();
    let (cpu, arena) = (Cpu::new(Some(1)).unwrap(), Arena::unlimited());
    for (format, said) in [("int4-channel", "a format of keys"), ("q4_k", "the hidden size is")] {
        let setup = Setup { activations: Some(format.parse().unwrap()), ..setup(1, 8) };
        let error = Decoder::new(&model, setup, &cpu, &arena).err().expect(format).to_string();
        assert!(error.contains(said), "{format}: {error}");
    }
}
