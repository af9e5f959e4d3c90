//! `config.json`, as `transformers` 4 and 5 write it.

use super::fields::Fields;
use super::{Activation, Config, Family, Norms, Packing, Rope, RopeScaling};
use crate::attention::Shape;
use crate::model::ModelError;
use crate::model::adapter::base;
use crate::model::gguf::{Gguf, is_gguf};
use crate::model::rope::{is_odd, pairs};
use crate::tensor::DType;
use serde_json::{Map, Value};
use std::path::Path;

const SCALINGS: &str = "known: default, linear, dynamic, yarn, llama3";
/// `original_max_position_embeddings` of `Phi3Config` where a file says nothing.
const PHI3_ORIGINAL_POSITIONS: usize = 4096;

impl Config {
    /// Reads the `config.json` of a folder, and the tokens that end a text from `generation_config.json` where there
    /// is one; or the metadata of a GGUF file.
    ///
    /// # Errors
    /// When a file cannot be read, is not JSON, lacks what is needed, or asks for what is not understood.
    pub fn read(folder: &Path) -> Result<Self, ModelError> {
        let folder = &*base(folder)?;
        if is_gguf(folder) {
            return Gguf::open(folder)?.config();
        }
        let path = folder.join("config.json");
        let wrong = |reason| ModelError::Config { path: path.clone(), reason };
        let mut config = Config::from_json(&object(&path)?).map_err(wrong)?;
        let path = folder.join("generation_config.json");
        if path.exists() {
            let map = object(&path)?;
            let eos = Fields::new(&map, "").tokens("eos_token_id");
            let eos = eos.map_err(|reason| ModelError::Config { path: path.clone(), reason })?;
            if !eos.is_empty() {
                config.eos = eos;
            }
        }
        Ok(config)
    }

    /// Reads the text of a `config.json`; `path` is what errors call it.
    ///
    /// # Errors
    /// As [`Config::read`].
    pub(crate) fn parse(path: &Path, text: &str) -> Result<Self, ModelError> {
        Config::from_json(&parsed(path, text)?).map_err(|reason| ModelError::Config { path: path.into(), reason })
    }

    /// The model that an object describes.
    ///
    /// # Errors
    /// In words: what was wrong, its value, and what would be right.
    pub fn from_json(map: &Map<String, Value>) -> Result<Self, String> {
        let fields = Fields::new(map, "");
        let packing = Packing::read(&fields)?;
        let family = family(&fields)?;
        let defaults = Defaults::of(family);
        let need = |key| fields.needed(key, fields.count(key)?);
        let (hidden, layers, q_heads) =
            (need("hidden_size")?, need("num_hidden_layers")?, need("num_attention_heads")?);
        // Left out it has a default, as null it is the number of query heads.
        let kv_heads = match map.get("num_key_value_heads") {
            None => defaults.kv_heads.unwrap_or(q_heads),
            Some(_) => fields.count("num_key_value_heads")?.unwrap_or(q_heads),
        };
        let head_dim = match (fields.count("head_dim")?, defaults.head_dim) {
            (Some(head_dim), _) | (None, Some(head_dim)) => head_dim,
            (None, None) if hidden.is_multiple_of(q_heads) => hidden / q_heads,
            (None, None) => return Err(fields.refuse("num_attention_heads", "hidden_size must be a multiple of it")),
        };
        let shape = Shape { batch: 1, q_heads, kv_heads, q_len: 1, kv_len: 1, head_dim };
        shape.check().map_err(|error| error.to_string())?;
        if !head_dim.is_multiple_of(2) {
            return Err(format!("head_dim is {head_dim}; RoPE rotates pairs, so it must be even"));
        }
        if layers > 4096 {
            return Err(fields.refuse("num_hidden_layers", "it must be at most 4096"));
        }
        let max_positions = fields.count("max_position_embeddings")?.unwrap_or(defaults.max_positions);
        let gemma = family == Family::Gemma2;
        let attention_bias = fields.flag("attention_bias")?;
        let scalar = if gemma { fields.number("query_pre_attn_scalar")?.unwrap_or(256.0) } else { head_dim as f64 };
        let cap = |key, default| match map.get(key) {
            Some(Value::Null) => Ok(None),
            _ => fields.number(key).map(|cap| cap.or(default).map(|cap| cap as f32)),
        };
        let config = Config {
            family,
            vocab: need("vocab_size")?,
            hidden,
            layers,
            q_heads,
            kv_heads,
            head_dim,
            ffn: need("intermediate_size")?,
            norm_eps: fields.number("rms_norm_eps")?.unwrap_or(defaults.norm_eps) as f32,
            rope: rope(&fields, family, max_positions, head_dim)?,
            max_positions,
            tied: match map.get("tie_word_embeddings") {
                Some(_) => fields.flag("tie_word_embeddings")?,
                None => gemma,
            },
            qkv_bias: family == Family::Qwen2 || attention_bias,
            o_bias: attention_bias && family != Family::Qwen2,
            mlp_bias: family == Family::Llama && fields.flag("mlp_bias")?,
            qk_norm: family == Family::Qwen3,
            windows: windows(&fields, family, layers)?,
            attention_softcap: if gemma { cap("attn_logit_softcapping", Some(50.0))? } else { None },
            final_softcap: if gemma { cap("final_logit_softcapping", Some(30.0))? } else { None },
            attention_scale: scalar.powf(-0.5) as f32,
            embedding_scale: if gemma { (hidden as f64).sqrt() as f32 } else { 1.0 },
            activation: activation(&fields, family)?,
            norms: if gemma { Norms::BeforeAndAfter } else { Norms::Before },
            bos: fields.tokens("bos_token_id")?.first().copied(),
            eos: fields.tokens("eos_token_id")?,
            dtype: dtype(&fields)?,
            packing,
        };
        if family == Family::Phi3 && attention_bias {
            return Err(fields.refuse("attention_bias", "Phi3ForCausalLM has no biases"));
        }
        fields.finish()?;
        Ok(config)
    }
}

/// What a key means where it is left out: the defaults of the family's configuration class in `transformers`.
struct Defaults {
    head_dim: Option<usize>,
    /// `None` is as many as query heads.
    kv_heads: Option<usize>,
    max_positions: usize,
    norm_eps: f64,
}

impl Defaults {
    fn of(family: Family) -> Self {
        let (head_dim, kv_heads, max_positions) = match family {
            Family::Llama => (None, None, 2048),
            Family::Mistral => (None, Some(8), 131_072),
            Family::Qwen2 => (None, Some(32), 32_768),
            Family::Qwen3 => (Some(128), Some(32), 32_768),
            Family::Phi3 => (None, None, 4096),
            Family::Gemma2 => (Some(256), Some(4), 8192),
        };
        let norm_eps = if family == Family::Phi3 { 1e-5 } else { 1e-6 };
        Defaults { head_dim, kv_heads, max_positions, norm_eps }
    }
}

fn object(path: &Path) -> Result<Map<String, Value>, ModelError> {
    let wrong = |reason: String| ModelError::Config { path: path.into(), reason };
    parsed(path, &std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?)
}

fn parsed(path: &Path, text: &str) -> Result<Map<String, Value>, ModelError> {
    let wrong = |reason: String| ModelError::Config { path: path.into(), reason };
    match serde_json::from_str(text) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(wrong("it must be a JSON object".into())),
        Err(error) => Err(wrong(format!("it is not JSON: {error}"))),
    }
}

fn family(fields: &Fields<'_>) -> Result<Family, String> {
    let known = || Family::ALL.map(Family::architecture).join(", ");
    if is_dms(fields)? {
        let named = fields.text("model_type")?.unwrap_or_default();
        let family = Family::ALL.into_iter().find(|family| family.model_type() == named);
        return family.ok_or_else(|| fields.refuse("model_type", "it is none of those that are known"));
    }
    let named = fields.texts("architectures")?.unwrap_or_default();
    let [name] = named[..] else {
        return Err(fields.refuse("architectures", &format!("it must name one architecture; known: {}", known())));
    };
    let family = Family::ALL.into_iter().find(|family| family.architecture() == name);
    family.ok_or_else(|| format!("unknown architecture '{name}'; known: {}", known()))
}

/// Whether a folder is what NVIDIA's Model-Optimizer leaves of DMS: it names code of its own, and no architecture that is known, and has
/// gates beside the weights, which change nothing until something is evicted (`dms:gates=FOLDER`).
fn is_dms(fields: &Fields<'_>) -> Result<bool, String> {
    if fields.count("dms_window_size")?.is_none() {
        return Ok(false);
    }
    if !fields.flag("dms_separate_alpha")? {
        let reason = "its eviction logits are a channel of the queries, which such a model attends without";
        return Err(fields.refuse("dms_separate_alpha", reason));
    }
    Ok(true)
}

fn activation(fields: &Fields<'_>, family: Family) -> Result<Activation, String> {
    // Gemma 2 has both keys in older folders, and computes by the first.
    let (key, default) = match family {
        Family::Gemma2 => ("hidden_activation", "gelu_pytorch_tanh"),
        _ => ("hidden_act", "silu"),
    };
    fields.value("hidden_act");
    match fields.text(key)?.unwrap_or(default) {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
        _ => Err(fields.refuse(key, "known: silu, gelu_pytorch_tanh")),
    }
}

fn dtype(fields: &Fields<'_>) -> Result<DType, String> {
    let older = fields.text("torch_dtype")?;
    match fields.text("dtype")?.or(older).unwrap_or("float32") {
        "float32" => Ok(DType::F32),
        "float16" => Ok(DType::F16),
        "bfloat16" => Ok(DType::Bf16),
        other => Err(format!("dtype is \"{other}\"; known: float32, float16, bfloat16")),
    }
}

/// The sliding window of each layer.
fn windows(fields: &Fields<'_>, family: Family, layers: usize) -> Result<Vec<Option<usize>>, String> {
    let stated = fields.count("sliding_window")?;
    // Gemma 2's folders say it twice.
    if fields.count("sliding_window_size")?.is_some_and(|again| Some(again) != stated) {
        return Err(fields.refuse("sliding_window_size", "it must be the same as sliding_window, or be left out"));
    }
    if family == Family::Gemma2 && stated.is_none() && fields.has("sliding_window") {
        return Err(fields.refuse("sliding_window", "a Gemma 2 has one in every other layer; leave it out for 4096"));
    }
    let named = fields.texts("layer_types")?;
    let qwen = matches!(family, Family::Qwen2 | Family::Qwen3);
    let used = fields.flag("use_sliding_window")?;
    let from = fields.place("max_window_layers")?.unwrap_or(28);
    let window = match family {
        Family::Llama => None,
        Family::Qwen2 | Family::Qwen3 if !used => None,
        // Left out it has a default; null is none.
        Family::Mistral | Family::Qwen2 | Family::Qwen3 if !fields.has("sliding_window") => Some(4096),
        Family::Gemma2 => stated.or(Some(4096)),
        Family::Mistral | Family::Phi3 | Family::Qwen2 | Family::Qwen3 => stated,
    };
    let usual = |layer: usize| match family {
        Family::Gemma2 => window.filter(|_| layer.is_multiple_of(2)),
        _ if qwen => window.filter(|_| layer >= from),
        _ => window,
    };
    let Some(named) = named else { return Ok((0..layers).map(usual).collect()) };
    if named.len() != layers {
        return Err(format!("layer_types names {} layers; num_hidden_layers is {layers}", named.len()));
    }
    let of = |(layer, name): (usize, &str)| match name {
        "full_attention" => Ok(None),
        "sliding_attention" if window.is_some() => Ok(window),
        "sliding_attention" => Err("layer_types has sliding_attention, but there is no sliding_window".to_string()),
        other => Err(format!("layer_types has '{other}' at layer {layer}; known: full_attention, sliding_attention")),
    };
    let windows: Vec<_> = named.into_iter().enumerate().map(of).collect::<Result<_, _>>()?;
    // The other families' classes do not read the key, so it may only say what they do.
    match (0..layers).find(|&layer| windows[layer] != usual(layer)) {
        Some(layer) if !(qwen || family == Family::Gemma2) => {
            let name = family.architecture();
            Err(format!("layer_types is not what {name} does at layer {layer}; leave it out, or change sliding_window"))
        }
        _ => Ok(windows),
    }
}

/// RoPE: `rope_parameters` of `transformers` 5, or `rope_theta` and `rope_scaling` of 4.
fn rope(fields: &Fields<'_>, family: Family, max_positions: usize, head_dim: usize) -> Result<Rope, String> {
    let outer_theta = fields.number("rope_theta")?;
    let outer_partial = fields.number("partial_rotary_factor")?;
    let outer_original = fields.count("original_max_position_embeddings")?;
    let (newer, older) =
        (fields.object("rope_parameters", "rope_parameters.")?, fields.object("rope_scaling", "rope_scaling.")?);
    let said = |key| fields.value(key).and_then(Value::as_object);
    let differ = |(newer, older): (&Map<String, Value>, &Map<String, Value>)| {
        older.iter().any(|(key, value)| newer.get(key).is_some_and(|other| other != value))
            || older.keys().any(|key| !newer.contains_key(key) && key != "type")
    };
    if said("rope_parameters").zip(said("rope_scaling")).is_some_and(differ) {
        return Err("rope_parameters and rope_scaling say different things; leave one of them out".into());
    }
    let Some(inner) = newer.or(older) else {
        let part = part(outer_partial, family, head_dim)?;
        return Ok(Rope { theta: outer_theta.unwrap_or(10_000.0), part, scaling: RopeScaling::None });
    };
    let theta = inner.number("rope_theta")?.or(outer_theta).unwrap_or(10_000.0);
    let part = part(inner.number("partial_rotary_factor")?.or(outer_partial), family, head_dim)?;
    let older_kind = inner.text("type")?;
    let kind = inner.text("rope_type")?.or(older_kind).unwrap_or("default");
    let number = |key, default| Ok::<f64, String>(inner.number(key)?.unwrap_or(default));
    let original = outer_original.or(inner.count("original_max_position_embeddings")?);
    let original = original.unwrap_or(if family == Family::Phi3 { PHI3_ORIGINAL_POSITIONS } else { max_positions });
    let factor = inner.number("factor")?;
    let needed = |factor| inner.needed("factor", factor);
    let scaling = match kind {
        "default" => RopeScaling::None,
        // Older configurations of Phi-3 call it su or yarn.
        "longrope" | "su" | "yarn" if family == Family::Phi3 => {
            let pairs = pairs(part, head_dim);
            let factors = |key| {
                let factors: Vec<f64> = inner.needed(key, inner.numbers(key)?)?;
                match factors.len() {
                    len if len == pairs => Ok(factors.into_iter().map(|factor| factor as f32).collect()),
                    len => Err(format!("rope_scaling.{key} has {len} numbers; a head has {pairs} frequencies")),
                }
            };
            let longer = factor.unwrap_or(max_positions as f64 / original as f64);
            let natural = if longer <= 1.0 { 1.0 } else { (1.0 + longer.ln() / (original.max(2) as f64).ln()).sqrt() };
            RopeScaling::Long {
                short: factors("short_factor")?,
                long: factors("long_factor")?,
                original_positions: original,
                attention_factor: number("attention_factor", natural)? as f32,
            }
        }
        _ if family == Family::Phi3 => {
            return Err(format!(
                "rope_scaling type '{kind}' of Phi3ForCausalLM is not understood; known: default, longrope"
            ));
        }
        "linear" => RopeScaling::Linear { factor: needed(factor)? },
        "dynamic" => RopeScaling::Dynamic { factor: needed(factor)? },
        "llama3" => RopeScaling::Llama3 {
            factor: needed(factor)?,
            low_freq_factor: inner.needed("low_freq_factor", inner.number("low_freq_factor")?)?,
            high_freq_factor: inner.needed("high_freq_factor", inner.number("high_freq_factor")?)?,
            original_positions: original,
        },
        "yarn" => {
            let factor = factor.unwrap_or(max_positions as f64 / original as f64);
            let stretch = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
            let scales = (inner.number("mscale")?, inner.number("mscale_all_dim")?);
            let natural = match scales {
                (Some(mscale), Some(all_dim)) => stretch(mscale) / stretch(all_dim),
                _ => stretch(1.0),
            };
            RopeScaling::Yarn {
                factor,
                beta_fast: number("beta_fast", 32.0)?,
                beta_slow: number("beta_slow", 1.0)?,
                original_positions: original,
                attention_factor: number("attention_factor", natural)?,
                truncate: inner.value("truncate").is_none() || inner.flag("truncate")?,
            }
        }
        other => return Err(format!("rope_scaling type '{other}' is not understood; {SCALINGS}")),
    };
    inner.finish()?;
    Ok(Rope { theta, part, scaling })
}

/// The fraction of a head that is rotated: less than all of it in Phi 3's family alone.
fn part(partial: Option<f64>, family: Family, head_dim: usize) -> Result<f64, String> {
    match partial.unwrap_or(1.0) {
        1.0 => Ok(1.0),
        part if family != Family::Phi3 => Err(format!(
            "partial_rotary_factor is {part}; heads of {} are rotated as a whole (1)",
            family.architecture()
        )),
        part if part > 0.0 && part < 1.0 && pairs(part, head_dim) > 0 && !is_odd(part, head_dim) => Ok(part),
        part => Err(format!(
            "partial_rotary_factor is {part}; it must be at most 1 and rotate whole pairs of {head_dim} channels"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(value: Value) -> Result<Config, String> {
        Config::from_json(value.as_object().expect("an object"))
    }

    fn with(changes: Value) -> Value {
        let mut value = json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "intermediate_size": 96,
        });
        let all = value.as_object_mut().expect("an object");
        changes.as_object().expect("an object").iter().for_each(|(key, to)| _ = all.insert(key.clone(), to.clone()));
        value
    }

    #[test]
    fn what_is_left_out_means_what_the_family_says() {
        let llama = read(with(json!({}))).unwrap();
        assert_eq!((llama.head_dim, llama.max_positions, llama.tied), (16, 2048, false));
        assert_eq!(llama.rope, Rope { theta: 10_000.0, part: 1.0, scaling: RopeScaling::None });
        let gemma = read(with(json!({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 8}))).unwrap();
        assert_eq!(gemma.windows, [Some(8), None]);
        assert_eq!((gemma.head_dim, gemma.final_softcap, gemma.tied), (256, Some(30.0), true));
        let gemma = json!({"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": null});
        assert_eq!(read(with(gemma)).unwrap().attention_softcap, None);
        let qwen = json!({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": true, "sliding_window": 8,
            "max_window_layers": 1});
        let qwen = read(with(qwen)).unwrap();
        assert_eq!((qwen.windows, qwen.qkv_bias, qwen.o_bias), (vec![None, Some(8)], true, false));
    }

    #[test]
    fn a_key_left_out_is_not_a_key_of_null() {
        let mistral = |more: Value| {
            let mut value = with(json!({"architectures": ["MistralForCausalLM"], "num_attention_heads": 16}));
            let all = value.as_object_mut().expect("an object");
            all.remove("num_key_value_heads");
            more.as_object().expect("an object").iter().for_each(|(key, to)| _ = all.insert(key.clone(), to.clone()));
            let config = read(value).unwrap();
            (config.kv_heads, config.windows)
        };
        assert_eq!(mistral(json!({})), (8, vec![Some(4096); 2]));
        let null = json!({"num_key_value_heads": null, "sliding_window": null});
        assert_eq!(mistral(null), (16, vec![None; 2]));
        let qwen = |window: Value| {
            let own =
                json!({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": true, "max_window_layers": 1});
            let mut value = with(own);
            if window != json!(false) {
                value["sliding_window"] = window;
            }
            read(value).unwrap().windows
        };
        assert_eq!([qwen(json!(false)), qwen(Value::Null)], [vec![None, Some(4096)], vec![None; 2]]);
    }

    #[test]
    fn what_cannot_change_results_is_accepted_and_changes_none() {
        let plain = read(with(json!({}))).unwrap();
        let keys = json!({
            "_name_or_path": "a/b", "_model_name_or_path": "a/b", "_attn_implementation_autoset": true, "_commit_hash": "0a",
            "unk_token_id": 0, "pad_token_id": -1, "is_llama_config": true, "rope_interleaved": false, "activation": "swiglu",
            "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}, "quantization_config": null,
            "internal_version": "7b-v2", "attention_dropout": 0.1, "resid_pdrop": 0.1, "unsloth_fixed": true, "num_beams": 4,
            "tokenizer_padding_side": "left", "transformers_version": "4.57.0", "pruned_heads": {}, "num_experts": 0,
            "use_cache": true, "layer_types": ["full_attention", "full_attention"], "sliding_window": 4096,
            "sliding_window_size": 4096, "summary_type": "cls_index", "license": "mit", "rope_scaling": {},
        });
        assert_eq!(read(with(keys)).unwrap(), plain);
    }

    #[test]
    fn both_ways_of_writing_rope_are_read() {
        let expected =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_positions: 512 };
        let inner = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512});
        let older = read(with(json!({"rope_theta": 5e5, "rope_scaling": inner}))).unwrap();
        assert_eq!(older.rope, Rope { theta: 5e5, part: 1.0, scaling: expected });
        let mut inner = inner;
        inner["rope_theta"] = json!(5e5);
        assert_eq!(read(with(json!({"rope_parameters": inner}))).unwrap().rope, older.rope);
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        let cases = [
            (json!({"architectures": ["FalconForCausalLM"]}), "unknown architecture 'FalconForCausalLM'; known: Llama"),
            (json!({"rope_scaling": {"type": "longrope", "factor": 4}}), "rope_scaling type 'longrope' is not"),
            (
                json!({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "su", "long_factor": [1]}}),
                "rope_scaling.short_factor is missing",
            ),
            (
                json!({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {
                    "type": "longrope", "long_factor": [1, 2], "short_factor": [1, 2, 3],
                }}),
                "rope_scaling.short_factor has 3 numbers; a head has",
            ),
            (json!({"hidden_act": "relu"}), "hidden_act is \"relu\"; known: silu"),
            (json!({"logit_scale": 0.5}), "logit_scale is 0.5; this option is not known and may change results"),
            (json!({"rope_interleaved": true}), "rope_interleaved is true; this option is not known"),
            (json!({"is_decoder": true}), "is_decoder is true; this option is not known"),
            (json!({"is_causal": false}), "is_causal is false; this option is not known"),
            (json!({"rms_norm": false}), "rms_norm is false; this option is not known"),
            (
                json!({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 4}}),
                "rope_parameters and rope_scaling say different things",
            ),
            (json!({"pruned_heads": {"0": [1]}}), "pruned_heads is {\"0\":[1]}; this option"),
            (json!({"activation": "geglu"}), "activation is \"geglu\"; this option"),
            (json!({"full_attn_mod": 2}), "full_attn_mod is 2; this option"),
            (json!({"sliding_window": 8, "sliding_window_size": 16}), "sliding_window_size is 16; it must be the same"),
            (json!({"layer_types": ["sliding_attention", "full_attention"]}), "there is no sliding_window"),
            (
                json!({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention", "full_attention"]}),
                "layer_types is not what MistralForCausalLM does at layer 0",
            ),
            (json!({"layer_types": ["full_attention"]}), "layer_types names 1 layers; num_hidden_layers is 2"),
            (json!({"max_window_layers": -1}), "max_window_layers is -1; it must be a whole number"),
            (
                json!({"quantization": {"bits": 4}}),
                "it has a quantization; of packed weights those that a quantization_config",
            ),
            (json!({"rope_scaling": {"type": "linear", "factor": 4, "wave": 1}}), "rope_scaling.wave is 1"),
            (json!({"rope_scaling": {"type": "linear"}}), "rope_scaling.factor is missing"),
            (json!({"partial_rotary_factor": 0.75}), "partial_rotary_factor is 0.75; heads of LlamaForCausalLM"),
            (json!({"vocab_size": -3}), "vocab_size is -3; it must be a whole number"),
            (json!({"vocab_size": null}), "vocab_size is missing"),
            (json!({"num_key_value_heads": 3}), "4 query heads cannot share 3 KV heads"),
            (json!({"quantization_config": {"bits": 4}}), "quantization_config.quant_method is missing"),
            (json!({"dtype": "float8"}), "dtype is \"float8\"; known: float32"),
            (json!({"head_dim": 15}), "head_dim is 15"),
        ];
        for (changes, expected) in cases {
            let error = read(with(changes)).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
