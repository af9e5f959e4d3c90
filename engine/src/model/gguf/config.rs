//! Metadata to the keys of the `config.json` that the file was made from.

use super::{Gguf, rope};
use crate::format::RowFormat;
use crate::model::config::{Family, RopeScaling};
use crate::model::{Config, ModelError};
use crate::tensor::DType;
use serde_json::{Map, Value, json};

/// Architectures as llama.cpp names them. `llama` is Mistral too, whose sliding window llama.cpp does not keep.
pub(super) const ARCHITECTURES: [(&str, Family); 5] = [
    ("llama", Family::Llama),
    ("qwen2", Family::Qwen2),
    ("qwen3", Family::Qwen3),
    ("phi3", Family::Phi3),
    ("gemma2", Family::Gemma2),
];

/// Keys of an architecture, and what they are in `config.json`.
const KEYS: [(&str, &str); 11] = [
    ("block_count", "num_hidden_layers"),
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("rope.freq_base", "rope_theta"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
];

/// Further keys of an architecture that say nothing of what it computes, or are looked at where they are needed.
const OTHERS: [&str; 11] = [
    "vocab_size",
    "tensor_data_layout",
    "pooling_type",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.finetuned",
];

/// Tokens that end a text: of a text, of a turn, of a message.
pub(super) const ENDS: [&str; 3] = ["eos_token_id", "eot_token_id", "eom_token_id"];

impl Gguf {
    /// What the model is.
    ///
    /// # Errors
    /// When the architecture or an option is not known here.
    pub fn config(&self) -> Result<Config, ModelError> {
        let wrong = |reason| ModelError::Config { path: self.path().into(), reason };
        let keys = self.keys().map_err(wrong)?;
        let config = Config::from_json(&keys).map_err(|reason| wrong(self.in_own_keys(&reason)))?;
        self.check_keys(&config).and_then(|()| self.check_rope(&config)).map_err(wrong)?;
        Ok(config)
    }

    /// What is said of a key of `config.json`, of the one that this file has in its place.
    fn in_own_keys(&self, reason: &str) -> String {
        let own = KEYS.iter().find_map(|(own, key)| Some((own, reason.strip_prefix(key)?)));
        match (own, self.family()) {
            (Some((own, rest)), Ok((_, family))) if rest.starts_with(' ') => format!("{family}.{own}{rest}"),
            _ => reason.into(),
        }
    }

    /// Refuses keys of the architecture that may change what is computed, and are not known here.
    fn check_keys(&self, config: &Config) -> Result<(), String> {
        let (_, name) = self.family()?;
        let own =
            self.metadata.iter().filter_map(|(key, value)| Some((key.strip_prefix(name)?.strip_prefix('.')?, value)));
        for (key, value) in own {
            let needed: Value = match key {
                "rope.dimension_count" => (2 * config.rope.pairs(config.head_dim)).into(),
                "attention.value_length" => config.head_dim.into(),
                "attention.causal" => true.into(),
                "rope.scaling.yarn_log_multiplier" => 0.0.into(),
                "rope.scaling.attn_factor" if !matches!(config.rope.scaling, RopeScaling::Long { .. }) => 1.0.into(),
                // Experts of a model that has none.
                "expert_count" | "expert_used_count" => 0.into(),
                _ if OTHERS.contains(&key) || KEYS.iter().any(|(known, _)| *known == key) => continue,
                _ => return Err(format!("{name}.{key} is {value}; what it changes is not known here")),
            };
            if value.as_f64() != needed.as_f64() || value.as_bool() != needed.as_bool() {
                return Err(format!("{name}.{key} is {value}; of such a model it must be {needed}"));
            }
        }
        Ok(())
    }

    /// Refuses factors of RoPE that are not those of the configuration that was made of the file.
    fn check_rope(&self, config: &Config) -> Result<(), String> {
        let needed = config.rope.pairs(config.head_dim);
        for name in rope::TENSORS {
            if let Some(info) = self.find(name).filter(|info| info.shape != [needed]) {
                return Err(format!("tensor '{name}' has shape {:?}; [{needed}] is needed", info.shape));
            }
        }
        let RopeScaling::Long { attention_factor, .. } = config.rope.scaling else { return Ok(()) };
        let kept = self.metadata.get("phi3.rope.scaling.attn_factor").and_then(Value::as_f64);
        match kept.filter(|kept| (kept - f64::from(attention_factor)).abs() > 1e-4) {
            Some(kept) => Err(format!(
                "rope.scaling.attn_factor is {kept}; for a context as its own it must be {attention_factor}"
            )),
            None => Ok(()),
        }
    }

    /// The architecture's family, and its name.
    pub(super) fn family(&self) -> Result<(Family, &'static str), String> {
        let named = self.metadata.get("general.architecture").and_then(Value::as_str).unwrap_or("nothing");
        let found = ARCHITECTURES.iter().find(|(name, _)| *name == named);
        found.map(|&(name, family)| (family, name)).ok_or_else(|| {
            let known = ARCHITECTURES.map(|(name, _)| name).join(", ");
            format!("general.architecture is '{named}'; known: {known}")
        })
    }

    /// Keys of a `config.json` that the file has words for.
    pub(super) fn keys(&self) -> Result<Map<String, Value>, String> {
        let (family, name) = self.family()?;
        let own = |key: &str| self.metadata.get(&format!("{name}.{key}"));
        let mut map = Map::new();
        map.insert("architectures".into(), json!([family.architecture()]));
        for (key, config) in KEYS {
            if let Some(value) = own(key) {
                map.insert(config.into(), value.clone());
            }
        }
        let embedding = self.find("token_embd.weight").ok_or("it has no tensor 'token_embd.weight'")?;
        map.insert("vocab_size".into(), embedding.shape[0].into());
        map.insert("tie_word_embeddings".into(), self.find("output.weight").is_none().into());
        let has = |tensor: &str| self.find(tensor).is_some();
        if family == Family::Llama {
            map.insert("attention_bias".into(), has("blk.0.attn_q.bias").into());
            map.insert("mlp_bias".into(), has("blk.0.ffn_gate.bias").into());
        }
        if family == Family::Gemma2 {
            // The file does not say it. As llama.cpp: the width of a head, but in the model of 27B, which has 46 layers.
            let count = |key| own(key).and_then(Value::as_u64);
            let heads = count("attention.head_count").filter(|&heads| heads > 0);
            let scalar = match (count("block_count"), count("embedding_length").zip(heads)) {
                (Some(46), Some((hidden, heads))) => Some(hidden / heads),
                _ => count("attention.key_length"),
            };
            map.extend(scalar.map(|scalar| ("query_pre_attn_scalar".into(), scalar.into())));
        }
        // Phi-4's says 0, for none.
        let has_windows =
            |window: &&Value| family == Family::Gemma2 || family == Family::Phi3 && window.as_u64() != Some(0);
        if let Some(window) = own("attention.sliding_window").filter(has_windows) {
            map.insert("sliding_window".into(), window.clone());
        }
        if family == Family::Phi3 {
            let [rotated, heads, hidden, length] =
                ["rope.dimension_count", "attention.head_count", "embedding_length", "attention.key_length"]
                    .map(|key| own(key).and_then(Value::as_u64).filter(|&count| count > 0));
            let head_dim = length.or(hidden.zip(heads).map(|(hidden, heads)| hidden / heads));
            let part = rotated.zip(head_dim).map(|(rotated, head_dim)| rotated as f64 / head_dim as f64);
            map.extend(part.map(|part| ("partial_rotary_factor".into(), part.into())));
        }
        if let Some(scaling) = self.rope_scaling(&own)? {
            if scaling["type"] == "longrope" {
                // llama.cpp's, where the file does not say.
                let original = own("rope.scaling.original_context_length").or(own("context_length")).cloned();
                map.extend(original.map(|original| ("original_max_position_embeddings".into(), original)));
            }
            map.insert("rope_scaling".into(), scaling);
        }
        let token = |key: &str| self.metadata.get(&format!("tokenizer.ggml.{key}")).cloned();
        map.extend(token("bos_token_id").map(|token| ("bos_token_id".into(), token)));
        let mut ends: Vec<Value> = Vec::new();
        for token in ENDS.iter().filter_map(|key| token(key)) {
            if !ends.contains(&token) {
                ends.push(token);
            }
        }
        if !ends.is_empty() {
            map.insert("eos_token_id".into(), ends.into());
        }
        Ok(map)
    }

    fn rope_scaling<'v>(&self, own: &impl Fn(&str) -> Option<&'v Value>) -> Result<Option<Value>, String> {
        let of = |key: &str| own(key).cloned().unwrap_or(Value::Null);
        // Older files have the factor under another name, and no type: linear, as llama.cpp reads them. 0 is none.
        let factor = own("rope.scaling.factor").or(own("rope.scale_linear"));
        let factor = factor.filter(|factor| factor.as_f64().is_none_or(|factor| factor != 0.0 && factor != 1.0));
        let kind = match own("rope.scaling.type").and_then(Value::as_str) {
            Some("none") => None,
            Some("linear") | None if factor.is_none() => None,
            None => Some("linear"),
            kind => kind,
        };
        match (self.numbers(rope::FACTORS)?, self.numbers(rope::SHORT)?, self.numbers(rope::LONG)?) {
            (None, None, None) => {}
            (Some(factors), None, None) if kind.is_none() => {
                let theta = own("rope.freq_base").and_then(Value::as_f64).unwrap_or(10_000.0);
                return rope::of_factors(&factors, theta).map(Some);
            }
            // These keys and no others, or some versions of `transformers` refuse them.
            (None, Some(short), Some(long)) if kind.is_none_or(|kind| kind == "longrope") => {
                return Ok(Some(json!({ "type": "longrope", "short_factor": short, "long_factor": long })));
            }
            _ => {
                let all = rope::TENSORS.join(", ");
                return Err(format!(
                    "it scales RoPE in two ways at once, or has half of one; its tensors may be: {all}"
                ));
            }
        }
        match kind {
            None => Ok(None),
            Some("linear") => Ok(Some(json!({ "rope_type": "linear", "factor": factor }))),
            Some("yarn") => {
                let original = of("rope.scaling.original_context_length");
                let scaling = json!({
                    "rope_type": "yarn",
                    "factor": factor,
                    "original_max_position_embeddings": original,
                });
                Ok(Some(scaling))
            }
            Some(other) => Err(format!("its RoPE scaling is '{other}'; known: none, linear, yarn")),
        }
    }

    /// Elements of a tensor that belongs to the configuration, where there is one.
    fn numbers(&self, name: &str) -> Result<Option<Vec<f32>>, String> {
        let Some(info) = self.find(name) else { return Ok(None) };
        if info.format != RowFormat::plain(DType::F32) {
            return Err(format!("tensor '{name}' is {}; it must be f32", info.format));
        }
        let bytes = self.bytes(info.range.clone()).chunks_exact(4);
        Ok(Some(bytes.map(bytemuck::pod_read_unaligned).collect()))
    }
}
