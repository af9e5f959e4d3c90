//! The files of the Hugging Face folder that a GGUF file stands for, but its weights: what `transformers` needs to load a model that
//! was gone on with. `folder.rs` is the other way.

use super::{Gguf, is_gguf};
use crate::model::{ChatTemplate, ModelError};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Name and content of each file that stands beside the weights, `config.json` first; `None` where the model is no GGUF file.
///
/// # Errors
/// When the file cannot be read, or its architecture or tokenizer is not known here.
pub(in crate::model) fn files_of_gguf(model: &Path) -> Result<Option<Vec<(&'static str, String)>>, ModelError> {
    if !is_gguf(model) {
        return Ok(None);
    }
    let gguf = Gguf::open(model)?;
    let wrong = |reason| ModelError::Config { path: model.into(), reason };
    let config = gguf.hub_config().map_err(wrong)?;
    let generation: Map<String, Value> = config
        .iter()
        .filter(|(key, _)| key.ends_with("_token_id"))
        .map(|(key, id)| (key.clone(), id.clone()))
        .collect();
    let mut tokenizer = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": false,
        "model_max_length": config["max_position_embeddings"],
    });
    for (key, id) in &generation {
        // Of several ends the first is the tokenizer's.
        let token = id
            .get(0)
            .unwrap_or(id)
            .as_u64()
            .and_then(|id| gguf.metadata.get("tokenizer.ggml.tokens")?.get(id as usize));
        if let Some(token) = token {
            tokenizer[key.trim_end_matches("_id")] = token.clone();
        }
    }
    if let Some(template) = ChatTemplate::find(model)? {
        tokenizer["chat_template"] = template.source().into();
    }
    let pretty = |value: &Value| format!("{value:#}\n");
    Ok(Some(vec![
        ("config.json", pretty(&config.into())),
        ("generation_config.json", pretty(&generation.into())),
        ("tokenizer.json", gguf.tokenizer_json()?),
        ("tokenizer_config.json", pretty(&tokenizer)),
    ]))
}

impl Gguf {
    /// The `config.json` of a folder with the model's weights in bf16.
    fn hub_config(&self) -> Result<Map<String, Value>, String> {
        let mut map = self.keys()?;
        let (family, _) = self.family()?;
        map.insert("model_type".into(), family.model_type().into());
        map.insert("torch_dtype".into(), "bfloat16".into());
        // Left out, `transformers` would take tokens of another model for some of them.
        for (key, own) in [("bos", "bos"), ("pad", "padding")] {
            let id = self.metadata.get(&format!("tokenizer.ggml.{own}_token_id")).cloned();
            map.insert(format!("{key}_token_id"), id.unwrap_or(Value::Null));
        }
        map.entry("eos_token_id").or_insert(Value::Null);
        // Likewise a length for which it was not made.
        map.entry("max_position_embeddings")
            .or_insert_with(|| self.config().map_or(Value::Null, |config| config.max_positions.into()));
        Ok(map)
    }
}
