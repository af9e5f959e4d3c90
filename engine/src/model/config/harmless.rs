//! Keys of `config.json` that cannot change what a model computes.
//!
//! Published folders carry dozens of keys that no decoder reads: who saved the file and with what, how training
//! went, how text is drawn by default, what another program wants to know. Refusing them all refuses the hub;
//! accepting whatever is unknown would one day run a model with an option that it ignores, and every number
//! measured on it would be wrong without a word. So an unknown key passes on one of three grounds: its value says
//! that nothing is there (`null`, `false`, 0, an empty text, list or object), its name is in the list below, or its
//! name ends or begins as only bookkeeping does. Everything else is refused by name; where a user knows better,
//! making the key `null` in the file settles it, and stays on record beside the model.

use serde_json::Value;

/// Names of keys that say nothing about results, by what they are about.
const NAMES: [&str; 68] = [
    // Where the file comes from.
    "_commit_hash",
    "_from_model_config",
    "architectures",
    "auto_map",
    "base_model",
    "is_llama_config",
    "language",
    "license",
    "model_type",
    "tags",
    "tokenizer_class",
    "vocab_file",
    // How the same results are computed: kernels, caches, memory.
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_flash_attn_2_enabled",
    "attn_implementation",
    "cache_implementation",
    "chunk_size_feed_forward",
    "flash_attn",
    "gradient_checkpointing",
    "pretraining_tp",
    "torchscript",
    "transformers.js_config",
    "use_cache",
    "use_flash_attn",
    "use_flash_attention",
    // What a call gives back.
    "logits_to_keep",
    "num_logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "return_dict",
    "return_dict_in_generate",
    // Training.
    "finetuning_task",
    "initializer_range",
    "id2label",
    "label2id",
    "neftune_noise_alpha",
    "problem_type",
    "task_specific_params",
    // How text is drawn or written, where a caller says nothing; kvsieve's options say it.
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_p",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "prefix",
    "remove_invalid_values",
    "repetition_penalty",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    // A limit on what is fed, which `max_position_embeddings` settles.
    "max_sequence_length",
    "model_max_length",
    "seq_length",
];

/// Options that some folders state and that are what every family here does anyway, at these values (as JSON).
const AS_USUAL: [(&str, &str); 3] = [("activation", "\"swiglu\""), ("full_attn_mod", "1"), ("interpolate_factor", "1")];

/// Options that are on in every family here, so that a folder that switches one off is not what is run.
const ON: [&str; 6] = ["causal", "is_causal", "rms_norm", "rope", "use_rope", "use_rotary"];

/// Ends of names that are bookkeeping: dropout acts in training only, the tokens of these names mark text.
const ENDS: [&str; 9] = [
    "_version",
    "_name_or_path",
    "_dropout",
    "_pdrop",
    "_token_id",
    "_token_ids",
    "_dropout_prob",
    "_loss_coef",
    "_date",
];

/// Beginnings of names that are bookkeeping: what a program notes about its own work, and how gates decide that the model itself does
/// not have (`dms_`, of those the ones that matter are read before).
const BEGINNINGS: [&str; 4] = ["unsloth_", "summary_", "tokenizer_", "dms_"];

/// Whether a key that nobody reads can be left out without another result.
pub(super) fn is_harmless(key: &str, value: &Value) -> bool {
    if ON.contains(&key) {
        return matches!(value, Value::Null | Value::Bool(true));
    }
    says_nothing(value)
        || NAMES.contains(&key)
        || ENDS.iter().any(|end| key.ends_with(end))
        || BEGINNINGS.iter().any(|beginning| key.starts_with(beginning))
        || AS_USUAL.contains(&(key, value.to_string().as_str()))
}

/// Whether a value switches its option off.
fn says_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}
