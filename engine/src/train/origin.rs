//! What a run starts from: the sizes of a new model, which is a Llama, or the folder or GGUF file of one that goes on to be trained.
//!
//! In every case the model is what its `config.json` says: for sizes and for a GGUF file it is written here, and read as any other.

use super::Parameters;
use super::run::TrainError;
use super::text::{documents, read};
use super::vocabulary::{BEGIN, END, LEARNED_TOKENS, Vocabulary};
use crate::model::{Config, files_beside, locate, widen};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Extents and constants of a new model, as a recipe gives them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sizes {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Blocks.
    pub layers: usize,
    /// Query heads of a block, a multiple of `kv_heads`.
    pub q_heads: usize,
    /// KV heads of a block.
    pub kv_heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Inner width of the MLP.
    pub ffn: usize,
    /// Longest sequence that the model is made for, in tokens.
    pub max_positions: usize,
    /// Base of the frequencies of RoPE.
    pub rope_theta: f64,
    /// Added to the mean square of a row before its root.
    pub norm_eps: f32,
    /// Tokens of a vocabulary that is learned from the recipe's text; without it, the words of generated texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<usize>,
    /// Whether the heads of the first block look back some tokens from the start ([`Parameters::initial`]).
    #[serde(default = "yes", skip_serializing_if = "Clone::clone")]
    pub look_back: bool,
}

fn yes() -> bool {
    true
}

impl Sizes {
    /// Says what is wrong with it, if anything.
    ///
    /// # Errors
    /// One line with the field, its value and what would be right.
    pub fn check(&self) -> Result<(), String> {
        let counts = [
            ("hidden", self.hidden),
            ("layers", self.layers),
            ("q_heads", self.q_heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("ffn", self.ffn),
            ("max_positions", self.max_positions),
        ];
        if let Some((name, value)) = counts.iter().find(|(_, value)| !(1..=1 << 20).contains(value)) {
            return Err(format!("model.{name} is {value}; it must be 1 to 1048576"));
        }
        if !self.q_heads.is_multiple_of(self.kv_heads) {
            return Err(format!(
                "model.q_heads is {}; it must be a multiple of kv_heads, {}",
                self.q_heads, self.kv_heads
            ));
        }
        if self.head_dim % 2 == 1 || self.head_dim > 256 {
            return Err(format!("model.head_dim is {}; it must be even and at most 256", self.head_dim));
        }
        if !(self.rope_theta.is_finite() && self.rope_theta > 1.0) {
            return Err(format!("model.rope_theta is {}; it must be finite and above 1", self.rope_theta));
        }
        if !(self.norm_eps.is_finite() && self.norm_eps > 0.0) {
            return Err(format!("model.norm_eps is {}; it must be finite and above 0", self.norm_eps));
        }
        match self.vocabulary {
            Some(tokens) if !LEARNED_TOKENS.contains(&tokens) => {
                let (least, most) = (LEARNED_TOKENS.start(), LEARNED_TOKENS.end());
                Err(format!("model.vocabulary is {tokens}; it must be {least} to {most}"))
            }
            _ => Ok(()),
        }
    }

    /// The `config.json` of a model with `vocab` tokens, of which `begin` begins a text and `end` ends it.
    pub(super) fn config(&self, vocab: usize, begin: u32, end: u32) -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.q_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": shortest(self.norm_eps),
            "rope_theta": self.rope_theta,
            "attention_bias": false,
            "mlp_bias": false,
            "tie_word_embeddings": true,
            "bos_token_id": begin,
            "eos_token_id": end,
            "torch_dtype": "bfloat16",
        })
    }
}

/// The number that a person would write for one of f32.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().expect("a number's text is one")
}

/// What a recipe's `[model]` says.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Origin {
    /// A model of these sizes, from random numbers.
    New(Sizes),
    /// A model that is there.
    Folder(Folder),
}

/// A model that is there.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Folder {
    /// Its folder or GGUF file, or `builtin`.
    pub from: PathBuf,
}

impl<'de> Deserialize<'de> for Origin {
    /// By hand, because a derived one would only say that no variant fits.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let table = toml::Table::deserialize(deserializer)?;
        let origin = match table.contains_key("from") {
            true => Folder::deserialize(table).map(Origin::Folder),
            false => Sizes::deserialize(table).map(Origin::New),
        };
        origin.map_err(|error| D::Error::custom(error.message()))
    }
}

/// A model that is about to be trained.
pub(super) struct Start {
    pub config: Config,
    pub vocabulary: Vocabulary,
    /// Names and contents of the files that stand beside the weights.
    pub files: Vec<(&'static str, String)>,
    /// The folder or file that weights come from, if not from random numbers.
    pub folder: Option<PathBuf>,
    /// Whether heads of the first block look back, of a new model.
    look_back: bool,
}

impl Origin {
    /// The model, without its weights; `text` is the recipe's.
    ///
    /// # Errors
    /// When a folder or file is not that of a model with a tokenizer, or a text cannot be read that a vocabulary is to be learned from.
    pub(super) fn open(&self, text: Option<&Path>) -> Result<Start, TrainError> {
        match self {
            Origin::New(sizes) => new(sizes, text),
            Origin::Folder(Folder { from }) => {
                let folder = locate(from)?;
                let files = files_beside(&folder)?;
                // Of a GGUF file the configuration is that of the folder that comes out.
                let config = match folder.is_dir() {
                    true => Config::read(&folder)?,
                    false => Config::parse(&folder, &files[0].1)?,
                };
                let vocabulary = Vocabulary::of_folder(&folder, &config)?;
                Ok(Start { config, vocabulary, files, folder: Some(folder), look_back: false })
            }
        }
    }
}

fn new(sizes: &Sizes, text: Option<&Path>) -> Result<Start, TrainError> {
    let written = match (sizes.vocabulary, text) {
        (Some(count), Some(path)) => Vocabulary::json_of_text(&documents(&read(path)?), count),
        _ => Vocabulary::json_of_generated_text(),
    };
    let vocabulary = Vocabulary::of_json(&written);
    let (begin, end) = (Vocabulary::BEGIN, Vocabulary::END);
    let config = sizes.config(vocabulary.len(), begin, end);
    let generation = json!({"bos_token_id": begin, "eos_token_id": end, "do_sample": false});
    let tokenizer = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "clean_up_tokenization_spaces": false,
        "model_max_length": sizes.max_positions,
    });
    let pretty = |value: &Value| format!("{value:#}\n");
    let files = vec![
        ("config.json", pretty(&config)),
        ("generation_config.json", pretty(&generation)),
        ("tokenizer_config.json", pretty(&tokenizer)),
        ("tokenizer.json", written),
    ];
    let config = config.as_object().map(Config::from_json).expect("it is an object");
    let config = config.expect("checked sizes make a model");
    Ok(Start { config, vocabulary, files, folder: None, look_back: sizes.look_back })
}

impl Start {
    /// Hands on the first weights in the order of `parameters`, some numbers at a time.
    ///
    /// # Errors
    /// When a file cannot be read or does not fit.
    pub fn each_weight(
        &self,
        parameters: &Parameters,
        seed: u64,
        take: &mut dyn FnMut(&[f32]),
    ) -> Result<(), TrainError> {
        match &self.folder {
            Some(folder) => widen(folder, &parameters.config, &mut |_, values| take(values))?,
            None => parameters.each_initial(seed, self.look_back, take),
        }
        Ok(())
    }
}
