//! Models from files: a `config.json`, a folder's tensors, a GGUF header, and what is wrong with them.

use super::common::gguf::{Parts, Q8_0};
use kvsieve::device::Cpu;
use kvsieve::memory::Arena;
use kvsieve::model::{Decoder, Model, Setup};
use kvsieve::planner::measure::measure;
use kvsieve::planner::presets::MODELS;
use kvsieve::planner::scenario::Attention;
use kvsieve::planner::{Scenario, Subject, own_peak_bytes};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A folder with a `config.json`.
fn config(value: &Value) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("config.json");
    fs::write(&path, value.to_string()).unwrap();
    (folder, path)
}

fn llama() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128_256, "max_position_embeddings": 8192,
        "tie_word_embeddings": false, "rope_theta": 5e5, "something_else": [1, 2],
    })
}

/// The keys of `changes` over those of a Llama; `null` takes a key away.
fn with(changes: &Value) -> Value {
    let mut value = llama();
    for (key, change) in changes.as_object().unwrap() {
        match change {
            Value::Null => drop(value.as_object_mut().unwrap().remove(key)),
            change => value[key] = change.clone(),
        }
    }
    value
}

#[test]
fn a_config_is_the_preset_that_was_made_from_it() {
    let gemma = json!({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {
        "hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240, "sliding_window": 1024}});
    let deepseek = json!({
        "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129_280, "max_position_embeddings": 163_840,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3});
    let next = json!({
        "architectures": ["Qwen3NextForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 512, "vocab_size": 151_936,
        "max_position_embeddings": 262_144, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "full_attention_interval": 4, "linear_num_key_heads": 16,
        "linear_key_head_dim": 128, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4});
    let gpt = json!({"architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
        "vocab_size": 50257});
    let qwen = with(&json!({"architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152_064,
        "use_sliding_window": false, "sliding_window": 131_072}));
    let cases = [
        ("llama-3-8b", llama()),
        ("gemma-3-4b", gemma),
        ("deepseek-v3", deepseek),
        ("qwen3-next-80b-a3b", next),
        ("gpt-2", gpt),
        ("qwen2.5-7b", qwen),
    ];
    for (name, value) in cases {
        let (_folder, path) = config(&value);
        let (read, preset) = (Subject::find(&path).unwrap(), super::subject(name));
        assert_eq!((read.parameters, &read.groups), (preset.parameters, &preset.groups), "{name}");
        assert_eq!(
            (read.active_parameters, read.state_bytes),
            (preset.active_parameters, preset.state_bytes),
            "{name}"
        );
    }
}

#[test]
fn what_a_config_lacks_is_an_error_and_never_a_guess() {
    let cases = [
        (
            json!({"architectures": ["MistralForCausalLM"], "num_key_value_heads": null}),
            "num_key_value_heads is missing",
        ),
        (json!({"vocab_size": null}), "vocab_size is missing"),
        (json!({"max_position_embeddings": null}), "max_position_embeddings is missing"),
        (json!({"hidden_size": -4096}), "hidden_size is -4096; it must be a whole number"),
        (json!({"hidden_size": 0}), "hidden_size is 0; it must be a whole number"),
        (json!({"num_hidden_layers": 1_000_000}), "layers is 1000000; it must be at most 4096"),
        (json!({"num_key_value_heads": 5}), "32 query heads cannot share 5 KV heads"),
        (
            json!({"architectures": ["MambaForCausalLM"]}),
            "architecture 'MambaForCausalLM' is not understood; known: Llama",
        ),
        (json!({"architectures": null}), "architectures is missing; it must name one architecture"),
        (json!({"architectures": ["Qwen3ForCausalLM"]}), "head_dim is missing"),
        (json!({"architectures": ["MixtralForCausalLM"]}), "num_local_experts is missing"),
        (
            json!({"architectures": ["Gemma3ForCausalLM"], "head_dim": 256, "sliding_window": 512}),
            "sliding_window_pattern is missing",
        ),
        (json!({"architectures": ["DeepseekV3ForCausalLM"]}), "qk_nope_head_dim is missing"),
        (json!({"layer_types": ["full_attention", "sliding_attention"]}), "layer_types has 2 entries for 32 layers"),
        (json!({"layer_types": vec!["sliding"; 32]}), "layer_types names 'sliding'; known: full_attention, "),
        (json!({"mlp_bias": true}), "mlp_bias is true; it must be false"),
        (
            json!({"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 128, "decoder_sparse_step": 2}),
            "decoder_sparse_step is 2; it must be 1",
        ),
        (
            json!({"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 128, "mlp_only_layers": [3]}),
            "mlp_only_layers is [3]; it must be []",
        ),
    ];
    for (changes, expected) in cases {
        let (_folder, path) = config(&with(&changes));
        let error = Subject::find(&path).unwrap_err().to_string();
        assert!(error.contains(expected), "{changes}: {error}");
    }
    // What its class says is no guess.
    let (_folder, path) = config(&with(&json!({"num_key_value_heads": null})));
    assert_eq!(Subject::find(&path).unwrap().architecture.kv_heads, 32);
    let (_folder, path) = config(&json!([1]));
    assert!(Subject::find(&path).unwrap_err().to_string().contains("it must be a JSON object"));
}

/// Weights are the bytes of the tensors, and the shape is that of the configuration.
#[test]
fn a_folder_is_counted_by_its_tensors() {
    let subject = Subject::find(Path::new("models/builtin")).unwrap();
    let held = subject.held.unwrap();
    // Every tensor of this folder is in bf16.
    assert_eq!(held.total(), 2 * subject.parameters);
    assert_eq!(held.total(), subject.weight_bytes(None).total());
    assert_eq!(held, subject.weight_bytes(Some(kvsieve::planner::presets::weight_format("bf16").unwrap())));
}

/// A GGUF header with tensors of types that are not computed with here, and no data behind it.
fn gguf(architecture: &str, kind: u32, extra: &[(&str, u32)]) -> Vec<u8> {
    let text = |text: &str| [(text.len() as u64).to_le_bytes().to_vec(), text.as_bytes().to_vec()].concat();
    let counts = [
        ("block_count", 1),
        ("context_length", 8192),
        ("embedding_length", 512),
        ("feed_forward_length", 1024),
        ("attention.head_count", 8),
        ("attention.head_count_kv", 2),
    ];
    let counts: Vec<_> = counts.iter().chain(extra).collect();
    let tensors = [("token_embd.weight", [512u64, 1000]), ("blk.0.ffn_down.weight", [1024, 512])];
    let mut file = [b"GGUF".to_vec(), 3u32.to_le_bytes().to_vec()].concat();
    file.extend((tensors.len() as u64).to_le_bytes());
    file.extend((counts.len() as u64 + 1).to_le_bytes());
    file.extend([text("general.architecture"), 8u32.to_le_bytes().to_vec(), text(architecture)].concat());
    for (key, count) in counts {
        file.extend(
            [text(&format!("{architecture}.{key}")), 4u32.to_le_bytes().to_vec(), count.to_le_bytes().to_vec()]
                .concat(),
        );
    }
    for (name, shape) in tensors {
        file.extend([text(name), 2u32.to_le_bytes().to_vec()].concat());
        shape.iter().for_each(|extent| file.extend(extent.to_le_bytes()));
        file.extend([kind.to_le_bytes().to_vec(), 0u64.to_le_bytes().to_vec()].concat());
    }
    file
}

#[test]
fn a_gguf_file_is_counted_by_its_header() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.gguf");
    // Q4_K: 144 bytes for 256 elements.
    fs::write(&path, gguf("llama", 12, &[])).unwrap();
    let subject = Subject::find(&path).unwrap();
    let held = subject.held.unwrap();
    assert_eq!((held.outside, held.layers), (1000 * 512 / 256 * 144, 1024 * 512 / 256 * 144));
    assert_eq!((subject.vocab, subject.architecture.tied, subject.architecture.head_dim), (1000, true, 64));
    // Mixtral, which has no architecture of its own; and Phi-4, whose window of 0 is none.
    fs::write(&path, gguf("llama", 12, &[("expert_count", 8), ("expert_used_count", 2)])).unwrap();
    let mixtral = Subject::find(&path).unwrap();
    let experts = mixtral.architecture.experts.unwrap();
    assert_eq!((experts.count, experts.active, experts.ffn), (8, 2, 1024));
    assert!(mixtral.parameters > subject.parameters + 7 * 3 * 512 * 1024, "{}", mixtral.parameters);
    fs::write(&path, gguf("phi3", 12, &[("attention.sliding_window", 0)])).unwrap();
    assert_eq!(Subject::find(&path).unwrap().architecture.window, None);
    let cases = [
        (
            gguf("qwen2", 12, &[("expert_count", 4)]),
            "qwen2.expert_count is 4; experts of this architecture are not understood",
        ),
        (gguf("llama", 999, &[]), "tensor 'token_embd.weight' is of type 999 of ggml, which is not known"),
        (gguf("mamba", 12, &[]), "general.architecture is 'mamba'; understood are llama, qwen2"),
        (gguf("qwen3", 12, &[]), "head_dim is missing"),
        (gguf("llama", 12, &[])[..200].to_vec(), "inside its header"),
        (b"GGML".to_vec(), "it does not begin with 'GGUF'"),
    ];
    for (bytes, expected) in cases {
        fs::write(&path, bytes).unwrap();
        let error = Subject::find(&path).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// A window is what the class makes of the keys: Llama has none whatever they say, and some have one where they say nothing.
#[test]
fn windows_are_those_of_the_class() {
    let mistral = json!({"architectures": ["MistralForCausalLM"]});
    let qwen = json!({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": true, "max_window_layers": 28});
    for (changes, stated, expected) in [
        (json!({}), json!(64), None),
        (json!({"architectures": ["GemmaForCausalLM"], "head_dim": 128}), json!(64), None),
        (mistral.clone(), json!(64), Some((64, 32))),
        (mistral.clone(), json!(null), Some((4096, 32))),
        (qwen, json!(null), Some((4096, 4))),
        (json!({"architectures": ["Gemma2ForCausalLM"], "head_dim": 256}), json!(null), Some((4096, 16))),
        (json!({"architectures": ["Phi3ForCausalLM"]}), json!(null), None),
    ] {
        let mut value = with(&changes);
        if !stated.is_null() {
            value["sliding_window"] = stated.clone();
        }
        let (_folder, path) = config(&value);
        let window = Subject::find(&path).unwrap().architecture.window.map(|window| (window.tokens, window.layers));
        assert_eq!(window, expected, "{changes} {stated}");
    }
    let mut none = with(&mistral);
    none["sliding_window"] = Value::Null;
    let (_folder, path) = config(&none);
    assert_eq!(Subject::find(&path).unwrap().architecture.window, None, "null is none");
}

/// Presets are what configurations say that were published: the preset whose name is all of a model's, or is followed by a variant's.
#[test]
fn presets_are_their_published_configurations() {
    let text = std::fs::read_to_string("tests/fixtures/published_configs.json").unwrap();
    let published: Vec<Value> = serde_json::from_str(&text).unwrap();
    let mut compared = 0;
    for config in published.iter().filter(|config| !config["accepted"].is_null()) {
        let name = config["model"].as_str().unwrap().to_lowercase();
        let named = MODELS.iter().filter(|preset| name.contains(&preset.name) && !name.contains("phi-4-mini"));
        let Some(preset) = named.max_by_key(|preset| preset.name.len()) else { continue };
        let accepted = &config["accepted"];
        let windows: Vec<&Value> =
            accepted["windows"].as_array().unwrap().iter().filter(|window| !window.is_null()).collect();
        let window = preset.window.as_ref().map(|window| json!(window.tokens));
        assert!(windows.iter().all(|tokens| Some(*tokens) == window.as_ref()), "{name}: {windows:?}, {window:?}");
        assert_eq!(windows.is_empty(), window.is_none(), "{name}");
        let extents = json!([preset.layers, preset.heads, preset.kv_heads, preset.head_dim]);
        let expected = ["layers", "q_heads", "kv_heads", "head_dim"].map(|key| accepted[key].clone());
        assert_eq!(extents, json!(expected), "{name}");
        compared += 1;
    }
    assert!(compared > 20, "{compared}");
}

/// A model's keys on the command line are the model; what is missing or wrong is told as of a file.
#[test]
fn a_model_may_be_written_out() {
    let keys = "LlamaForCausalLM:hidden_size=4096,num_hidden_layers=32,num_attention_heads=32,num_key_value_heads=8,\
                intermediate_size=14336,vocab_size=128256,max_position_embeddings=8192";
    let (read, preset) = (Subject::find(Path::new(keys)).unwrap(), super::subject("llama-3-8b"));
    assert_eq!((read.parameters, &read.groups), (preset.parameters, &preset.groups));
    for (keys, expected) in [
        ("LlamaForCausalLM:hidden_size=4096", "num_hidden_layers is missing"),
        ("LlamaForCausalLM:hidden_size", "'hidden_size' is no key=value"),
        ("LlamaForCausalLM:hidden_size=64,hidden_size=32", "it gives hidden_size twice"),
        (&format!("{keys},num_key_value_head=8"), "num_key_value_head is 8; this option is not known"),
        ("GPT2LMHeadModel:n_embd=-1", "n_embd is -1"),
        ("Nosuch:hidden_size=1", "architecture 'Nosuch' is not understood"),
    ] {
        let error = Subject::find(Path::new(keys)).unwrap_err().to_string();
        assert!(error.contains(expected), "{keys}: {error}");
    }
}

/// A file that runs from its blocks, and one whose matrices are encoded anew: predicted from headers, the arena says the same,
/// and of each part too.
#[test]
fn what_is_measured_is_what_was_predicted() {
    let (cpu, folder) = (Cpu::new(Some(2)).unwrap(), TempDir::new().unwrap());
    let blocks = folder.path().join("blocks.gguf");
    fs::write(&blocks, Parts::of(Path::new("tests/checkpoints/llama"), Q8_0).bytes()).unwrap();
    let builtin = Path::new("models/builtin");
    for (model, weights, attention, context) in [
        (blocks.as_path(), None, Attention::Naive, 30),
        (builtin, Some("int8"), Attention::Tiled, 300),
        (builtin, None, Attention::Naive, 300),
    ] {
        let subject = Subject::find(model).unwrap();
        let weights = weights.map(|name| kvsieve::planner::presets::weight_format(name).unwrap());
        let scenario = Scenario { attention, weights, output: 2, ..super::on(&subject, "h100", context) };
        let measured = measure(&scenario, &cpu, u64::MAX).unwrap();
        for held in &measured.held {
            let encoded = held.term == "load" && weights.is_some();
            assert_eq!(held.arena_bytes, (!encoded).then_some(held.predicted_bytes), "{model:?} {held:?}");
        }
        let (load, peak) = (measured.held[0], measured.held.last().unwrap());
        let own = own_peak_bytes(&scenario, 2).unwrap().unwrap();
        assert_eq!(("peak", own), (peak.term, peak.predicted_bytes));
        // Pages of the file come on top of what is made of them.
        let read = if weights.is_some() { subject.held.unwrap().total() } else { 0 };
        assert_eq!(load.predicted_bytes, measured.held[1].predicted_bytes + read, "{model:?}");
    }
}

/// What the plan says of kvsieve's own run is what its arena then measures, to the byte.
#[test]
fn the_own_peak_is_the_arenas() {
    let folder = Path::new("models/builtin");
    let subject = Subject::find(folder).unwrap();
    for (attention, kernel, context, output, chunk) in
        [(Attention::Tiled, "tiled", 700, 2, Some(256)), (Attention::Naive, "naive", 300, 0, None)]
    {
        let scenario = Scenario { attention, output, chunk, ..super::on(&subject, "h100", context) };
        let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
        let model = Model::open(folder, &arena).unwrap();
        let dtype = model.weights.dtype();
        let setup = Setup {
            kernel,
            chunk_tokens: scenario.pass_tokens(context) as usize,
            ..Setup::of((context + output) as usize, dtype)
        };
        let mut decoder = Decoder::new(&model, setup, &cpu, &arena).unwrap();
        let prompt = vec![5; context as usize];
        decoder.prefill(&[&prompt], |_, _, _| ()).unwrap();
        (0..output).for_each(|_| decoder.follow(&[&[5][..]], |_, _, _| ()).unwrap());
        assert_eq!(own_peak_bytes(&scenario, 2).unwrap(), Some(arena.usage().peak_bytes), "{kernel}");
    }
}
