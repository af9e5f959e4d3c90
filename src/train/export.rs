//! A trained model as a Hugging Face folder: configuration, bf16 weights, tokenizer.

use super::parameters::{ModelSpec, Parameters};
use super::run::TrainError;
use super::vocabulary::{BEGIN, END, Vocabulary};
use crate::tensor::DType;
use crate::tensor::file::{self, Output};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;

/// Writes the folder's files, each whole or not at all.
pub(super) fn write(
    folder: &Path,
    spec: &ModelSpec,
    vocabulary: &Vocabulary,
    parameters: &Parameters,
    weights: &[f32],
) -> Result<(), TrainError> {
    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary.len(),
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.q_heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "attention_bias": false,
        "mlp_bias": false,
        "tie_word_embeddings": true,
        "bos_token_id": vocabulary.begin(),
        "eos_token_id": vocabulary.end(),
        "torch_dtype": "bfloat16",
    });
    let generation = json!({"bos_token_id": vocabulary.begin(), "eos_token_id": vocabulary.end(), "do_sample": false});
    let tokenizer = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "clean_up_tokenization_spaces": false,
        "model_max_length": spec.max_positions,
    });
    text(folder, "config.json", &pretty(&config))?;
    text(folder, "generation_config.json", &pretty(&generation))?;
    text(folder, "tokenizer_config.json", &pretty(&tokenizer))?;
    text(folder, "tokenizer.json", vocabulary.json())?;

    let mut rounded = vec![0u8; 2 * weights.len()];
    DType::Bf16.encode(weights, &mut rounded);
    let output = |parameter: &'_ super::parameters::Parameter| -> (String, Vec<usize>, std::ops::Range<usize>) {
        (parameter.name.clone(), parameter.shape.clone(), 2 * parameter.range.start..2 * parameter.range.end)
    };
    let named: Vec<_> = parameters.all.iter().map(output).collect();
    let outputs: Vec<Output<'_>> = named
        .iter()
        .map(|(name, shape, range)| Output {
            name,
            dtype: Dtype::BF16,
            shape: shape.clone(),
            bytes: &rounded[range.clone()],
        })
        .collect();
    // `transformers` asks a file which framework wrote it, and reads only what it knows.
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    Ok(file::write_with(&folder.join("model.safetensors"), &outputs, Some(metadata))?)
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

/// Writes a text file of the folder.
pub(super) fn text(folder: &Path, name: &str, content: &str) -> Result<(), TrainError> {
    let fill = |path: &Path| std::fs::write(path, content).map_err(|error| error.to_string());
    Ok(file::replace(&folder.join(name), fill)?)
}
