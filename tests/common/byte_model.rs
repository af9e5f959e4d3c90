//! A tiny random decoder whose tokens are bytes, so that every task can be written in them.

use kvsieve::tensor::file::{self, Output};
use std::path::Path;

const VOCAB: usize = 258;
const HIDDEN: usize = 32;
const FFN: usize = 48;
const LAYERS: usize = 2;
const Q_WIDTH: usize = 32;
const KV_WIDTH: usize = 16;

/// Numbers between -1 and 1 that look random.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// The letter that stands for a byte in a byte-level vocabulary.
fn letter(byte: u8) -> char {
    let printed = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let before = (0..byte).filter(|byte| !printed(*byte)).count() as u32;
    if printed(byte) { char::from(byte) } else { char::from_u32(0x100 + before).unwrap() }
}

/// Writes the folder of a model made for `max_positions` tokens.
pub fn write(folder: &Path, max_positions: usize) {
    std::fs::create_dir_all(folder).unwrap();
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": FFN, "hidden_act": "silu", "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "attention_bias": false, "mlp_bias": false,
        "tie_word_embeddings": true, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32",
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();

    let mut entries: Vec<String> = vec!["<s>".into(), "</s>".into()];
    entries.extend((0..=255).map(|byte| letter(byte).to_string()));
    let vocab: serde_json::Map<String, serde_json::Value> =
        entries.iter().enumerate().map(|(id, entry)| (entry.clone(), id.into())).collect();
    let special = |id: u32, content: &str| {
        serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "<s>"), special(1, "</s>")], "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();

    let mut shapes = vec![("model.embed_tokens.weight".to_string(), vec![VOCAB, HIDDEN])];
    for layer in 0..LAYERS {
        let of_layer = [
            ("input_layernorm", vec![HIDDEN]),
            ("self_attn.q_proj", vec![Q_WIDTH, HIDDEN]),
            ("self_attn.k_proj", vec![KV_WIDTH, HIDDEN]),
            ("self_attn.v_proj", vec![KV_WIDTH, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, Q_WIDTH]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("mlp.gate_proj", vec![FFN, HIDDEN]),
            ("mlp.up_proj", vec![FFN, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, FFN]),
        ];
        shapes.extend(of_layer.map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape)));
    }
    shapes.push(("model.norm.weight".into(), vec![HIDDEN]));
    let mut noise = Noise(7);
    let values: Vec<Vec<f32>> = shapes
        .iter()
        .map(|(name, shape)| {
            // Large enough that attention is not flat.
            let (base, scale) = if name.contains("norm") { (1.0, 0.1) } else { (0.0, 0.6) };
            (0..shape.iter().product()).map(|_| base + scale * noise.next()).collect()
        })
        .collect();
    let outputs: Vec<Output<'_>> =
        shapes.iter().zip(&values).map(|((name, shape), values)| Output::f32(name, shape.clone(), values)).collect();
    file::write(&folder.join("model.safetensors"), &outputs).unwrap();
}
