//! GGUF files made of the tiny checkpoints, by the rules of llama.cpp's `convert_hf_to_gguf.py`.

use kvsieve::format::RowFormat;
use safetensors::SafeTensors;
use serde_json::Value;
use std::path::Path;

/// How matrices are written; vectors are always f32.
#[derive(Debug, Clone, Copy)]
pub struct Kind(pub &'static str, pub u32);

/// A format's name, and its number in ggml.
#[allow(dead_code)] // training has Q8_0 alone
pub const F32: Kind = Kind("f32", 0);
#[allow(dead_code)] // the parsers write it
pub const Q8_0: Kind = Kind("q8_0", 8);

/// A file's parts, which a test may change before it is written.
pub struct Parts {
    pub keys: Vec<(String, Value)>,
    /// Name, extents (the fastest first), number of the type, and bytes.
    pub tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

impl Parts {
    /// The checkpoint in `folder`, whose tensors are in one file.
    pub fn of(folder: &Path, kind: Kind) -> Parts {
        let config: Value = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
        let architecture = match config["architectures"][0].as_str().unwrap() {
            "LlamaForCausalLM" => "llama",
            "Qwen2ForCausalLM" => "qwen2",
            "Qwen3ForCausalLM" => "qwen3",
            "Phi3ForCausalLM" => "phi3",
            "Gemma2ForCausalLM" => "gemma2",
            other => panic!("{other} has no name in llama.cpp"),
        };
        let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut tensors: Vec<_> = file.tensors();
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        let tensors = tensors.into_iter().map(|(name, tensor)| {
            let values: Vec<f32> =
                tensor.data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
            convert(architecture, &config, &name, tensor.shape(), values, kind)
        });
        Parts { keys: keys(architecture, &config), tensors: rope_factors(&config).into_iter().chain(tensors).collect() }
    }

    /// The file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            text(&mut out, key);
            out.extend(number_of(value).to_le_bytes());
            put(&mut out, value);
        }
        let mut offset = 0u64;
        for (name, extents, kind, bytes) in &self.tensors {
            text(&mut out, name);
            out.extend((extents.len() as u32).to_le_bytes());
            extents.iter().for_each(|extent| out.extend(extent.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += (bytes.len() as u64).next_multiple_of(32);
        }
        for (.., bytes) in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(bytes);
        }
        out
    }
}

fn keys(architecture: &str, config: &Value) -> Vec<(String, Value)> {
    let theta = match &config["rope_theta"] {
        Value::Null => config["rope_parameters"]["rope_theta"].clone(),
        theta => theta.clone(),
    };
    let scaling = [&config["rope_scaling"], &config["rope_parameters"]].into_iter().find(|found| found.is_object());
    let scaling = scaling.cloned().unwrap_or(Value::Null);
    let kind = scaling["rope_type"].as_str().filter(|kind| !["default", "llama3", "longrope"].contains(kind));
    let is_long = scaling["rope_type"] == "longrope";
    let original = scaling["original_max_position_embeddings"].clone();
    let part = scaling["partial_rotary_factor"].as_f64().unwrap_or(1.0);
    let longer = config["max_position_embeddings"].as_f64().unwrap() / original.as_f64().unwrap_or(1.0);
    let sharper = (1.0 + longer.ln() / original.as_f64().unwrap_or(2.0).ln()).sqrt();
    let head_dim = match config["head_dim"].as_u64() {
        Some(width) => width,
        None => config["hidden_size"].as_u64().unwrap() / config["num_attention_heads"].as_u64().unwrap(),
    };
    let known = [
        ("block_count", config["num_hidden_layers"].clone()),
        ("context_length", config["max_position_embeddings"].clone()),
        ("embedding_length", config["hidden_size"].clone()),
        ("feed_forward_length", config["intermediate_size"].clone()),
        ("attention.head_count", config["num_attention_heads"].clone()),
        ("attention.head_count_kv", config["num_key_value_heads"].clone()),
        ("attention.key_length", head_dim.into()),
        ("attention.layer_norm_rms_epsilon", config["rms_norm_eps"].clone()),
        ("attention.sliding_window", config["sliding_window"].clone()),
        ("attn_logit_softcapping", config["attn_logit_softcapping"].clone()),
        ("final_logit_softcapping", config["final_logit_softcapping"].clone()),
        ("rope.dimension_count", ((head_dim as f64 * part) as u64).into()),
        ("rope.freq_base", theta),
        ("rope.scaling.type", kind.map_or(Value::Null, Value::from)),
        ("rope.scaling.factor", kind.map_or(Value::Null, |_| scaling["factor"].clone())),
        ("rope.scaling.original_context_length", if kind.is_some() || is_long { original } else { Value::Null }),
        ("rope.scaling.attn_factor", if is_long { sharper.into() } else { Value::Null }),
    ];
    let own = known.into_iter().filter(|(_, value)| !value.is_null());
    let own = own.map(|(key, value)| (format!("{architecture}.{key}"), value));
    std::iter::once(("general.architecture".to_string(), architecture.into())).chain(own).collect()
}

/// What stands in the place of a RoPE's configuration: what each of its frequencies is divided by.
fn rope_factors(config: &Value) -> Vec<(String, Vec<u64>, u32, Vec<u8>)> {
    let rope = &config["rope_parameters"];
    let number = |key: &str| rope[key].as_f64().unwrap() as f32;
    let llama3 = || {
        let (factor, low, high) = (number("factor"), number("low_freq_factor"), number("high_freq_factor"));
        let (original, width) = (number("original_max_position_embeddings"), config["head_dim"].as_u64().unwrap());
        let divided = |pair: u64| {
            let wave = std::f32::consts::TAU * number("rope_theta").powf(2.0 * pair as f32 / width as f32);
            if wave < original / high {
                1.0
            } else if wave > original / low {
                factor
            } else {
                let smooth = (original / wave - low) / (high - low);
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        };
        (0..width / 2).map(divided).collect::<Vec<f32>>()
    };
    let list = |key: &str| rope[key].as_array().unwrap().iter().map(|factor| factor.as_f64().unwrap() as f32).collect();
    let all: Vec<(&str, Vec<f32>)> = match rope["rope_type"].as_str() {
        Some("llama3") => vec![("rope_freqs.weight", llama3())],
        Some("longrope") => {
            vec![("rope_factors_long.weight", list("long_factor")), ("rope_factors_short.weight", list("short_factor"))]
        }
        _ => Vec::new(),
    };
    let tensor = |(name, factors): (&str, Vec<f32>)| {
        let bytes = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        (name.to_string(), vec![factors.len() as u64], 0, bytes)
    };
    all.into_iter().map(tensor).collect()
}

/// A tensor of a Hugging Face folder as llama.cpp keeps it.
fn convert(
    architecture: &str,
    config: &Value,
    name: &str,
    shape: &[usize],
    mut values: Vec<f32>,
    kind: Kind,
) -> (String, Vec<u64>, u32, Vec<u8>) {
    let heads = |key: &str| config[key].as_u64().unwrap() as usize;
    let heads = match () {
        () if architecture != "llama" => 0,
        () if name.contains("q_proj") => heads("num_attention_heads"),
        () if name.contains("k_proj") => heads("num_key_value_heads"),
        () => 0,
    };
    if let Some(rows) = shape[0].checked_div(heads) {
        // `weights.reshape(heads, 2, D / 2, width).swapaxes(1, 2)`
        let width = shape.get(1).copied().unwrap_or(1);
        let row = |head: usize, row: usize| (head * rows + row % 2 * (rows / 2) + row / 2) * width;
        let order = (0..heads).flat_map(|head| (0..rows).map(move |at| row(head, at)));
        values = order.flat_map(|from| values[from..from + width].to_vec()).collect();
    }
    if architecture == "gemma2" && name.ends_with("norm.weight") {
        values.iter_mut().for_each(|factor| *factor += 1.0);
    }
    let extents = shape.iter().rev().map(|&extent| extent as u64).collect();
    let own = own_name(architecture, name);
    let Kind(format, number) = kind;
    let format: RowFormat = format.parse().unwrap();
    let width = shape[shape.len() - 1];
    if shape.len() == 1 || format.check("a row", width).is_err() {
        return (own, extents, 0, values.iter().flat_map(|value| value.to_le_bytes()).collect());
    }
    let mut bytes = vec![0; shape[0] * format.row_bytes(width)];
    format.encode(&values, width, &mut bytes);
    (own, extents, number, bytes)
}

fn own_name(architecture: &str, name: &str) -> String {
    let after = if architecture == "gemma2" { "post_attention_norm" } else { "ffn_norm" };
    let parts = [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", after),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.qkv_proj", "attn_qkv"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("mlp.gate_up_proj", "ffn_up"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    parts.iter().fold(name.to_string(), |name, (from, to)| name.replace(from, to))
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// The number of a value's kind.
fn number_of(value: &Value) -> u32 {
    match value {
        Value::Bool(_) => 7,
        Value::String(_) => 8,
        Value::Array(_) => 9,
        value if value.is_u64() => 4,
        _ => 6,
    }
}

fn put(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::Bool(flag) => out.push(u8::from(*flag)),
        Value::String(string) => text(out, string),
        Value::Array(values) => {
            out.extend(values.first().map_or(4, number_of).to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| put(out, value));
        }
        value => match value.as_u64() {
            Some(count) => out.extend((count as u32).to_le_bytes()),
            None => out.extend((value.as_f64().unwrap() as f32).to_le_bytes()),
        },
    }
}
