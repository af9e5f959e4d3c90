//! What a model is: extents and options, read from a Hugging Face folder's `config.json`.
//!
//! A family is an architecture by its name in `architectures`. Options that change results are read or refused by name;
//! a key that nobody here knows is refused too, unless it says nothing (`null`, `false`) or cannot change a result
//! (`harmless.rs` says which keys cannot, and why the rule is this way round).

mod fields;
mod harmless;
mod packing;
mod read;

pub use fields::Fields;
pub use packing::Packing;

use crate::format::{FormatError, RowFormat};
use crate::memories::Memory;
use crate::model::ModelError;
use crate::tensor::DType;

/// An architecture, by the name of its class in `transformers`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Llama 2 and 3.
    Llama,
    /// Mistral: Llama with a sliding window.
    Mistral,
    /// Qwen2 and 2.5: Llama with biases of q, k and v.
    Qwen2,
    /// Qwen3: each head of q and k is normalised; the head dim is its own.
    Qwen3,
    /// Phi-3: q, k and v in one matrix, gate and up in another.
    Phi3,
    /// Gemma 2: soft-caps, alternating windows, norms before and after, scaled embeddings.
    Gemma2,
}

impl Family {
    /// Every family, in the order in which they are listed.
    pub const ALL: [Family; 6] =
        [Family::Llama, Family::Mistral, Family::Qwen2, Family::Qwen3, Family::Phi3, Family::Gemma2];

    /// Its name in `config.json`.
    pub fn architecture(self) -> &'static str {
        match self {
            Family::Llama => "LlamaForCausalLM",
            Family::Mistral => "MistralForCausalLM",
            Family::Qwen2 => "Qwen2ForCausalLM",
            Family::Qwen3 => "Qwen3ForCausalLM",
            Family::Phi3 => "Phi3ForCausalLM",
            Family::Gemma2 => "Gemma2ForCausalLM",
        }
    }

    /// The name by which `transformers` finds its configuration.
    pub(super) fn model_type(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Mistral => "mistral",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
            Family::Phi3 => "phi3",
            Family::Gemma2 => "gemma2",
        }
    }
}

/// RoPE scaling: how frequencies change for longer contexts than the model was first trained for.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All divided by `factor`.
    Linear {
        /// How much longer contexts become.
        factor: f64,
    },
    /// The base grows with the length of the sequence, from `max_positions` on ("NTK-aware").
    Dynamic {
        /// How much longer contexts become.
        factor: f64,
    },
    /// Slow pairs divided by `factor`, fast ones kept, a ramp between (YaRN, arXiv 2309.00071).
    Yarn {
        /// How much longer contexts become.
        factor: f64,
        /// Turns over the original context above which a pair is kept.
        beta_fast: f64,
        /// Turns over the original context below which a pair is divided.
        beta_slow: f64,
        /// Context of the first training, in tokens.
        original_positions: usize,
        /// Factor of both sine and cosine, which makes logits sharper.
        attention_factor: f64,
        /// Whether the ends of the ramp are whole pairs.
        truncate: bool,
    },
    /// Long waves divided by `factor`, short ones kept, a ramp between (Llama 3.1).
    Llama3 {
        /// How much longer contexts become.
        factor: f64,
        /// Waves longer than the original context over this are divided.
        low_freq_factor: f64,
        /// Waves shorter than the original context over this are kept.
        high_freq_factor: f64,
        /// Context of the first training, in tokens.
        original_positions: usize,
    },
    /// Each frequency divided by a factor of its own, by another one in longer sequences than the original context (LongRoPE,
    /// arXiv 2402.13753; Phi 3).
    Long {
        /// Factors up to the original context, one for each pair of channels that is rotated.
        short: Vec<f32>,
        /// Factors beyond it, as many.
        long: Vec<f32>,
        /// Context of the first training, in tokens.
        original_positions: usize,
        /// Factor of both sine and cosine, which makes logits sharper.
        attention_factor: f32,
    },
}

/// Rotary position embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Fraction of a head's channels, the first ones, that are rotated; the others are no different at any position (Phi 4 mini).
    pub part: f64,
    /// RoPE scaling.
    pub scaling: RopeScaling,
}

/// What stands between the two halves of an MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu,
    /// The tanh form of GELU: `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
    GeluTanh,
}

/// Where a block's root-mean-square norms stand and what they multiply by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norms {
    /// Before attention and before the MLP; times the weight.
    Before,
    /// Before and after both; times one more than the weight (Gemma 2).
    BeforeAndAfter,
}

/// Extents and options of a decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Architecture.
    pub family: Family,
    /// Tokens that there are.
    pub vocab: usize,
    /// Elements of the residual stream.
    pub hidden: usize,
    /// Blocks.
    pub layers: usize,
    /// `Hq`.
    pub q_heads: usize,
    /// `Hkv`.
    pub kv_heads: usize,
    /// `D`.
    pub head_dim: usize,
    /// Elements between the two halves of an MLP.
    pub ffn: usize,
    /// What is added to the mean square under the root.
    pub norm_eps: f32,
    /// Position embedding.
    pub rope: Rope,
    /// Longest context that the model was made for, in tokens.
    pub max_positions: usize,
    /// Whether the output projection is the embedding.
    pub tied: bool,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub o_bias: bool,
    /// Whether the MLP has biases.
    pub mlp_bias: bool,
    /// Whether each head of q and k is normalised before RoPE.
    pub qk_norm: bool,
    /// Sliding window of each layer, in tokens; `None` sees everything.
    pub windows: Vec<Option<usize>>,
    /// Soft-cap of attention's logits.
    pub attention_softcap: Option<f32>,
    /// Soft-cap of the output's logits.
    pub final_softcap: Option<f32>,
    /// Factor of `q.k`.
    pub attention_scale: f32,
    /// Factor of embeddings.
    pub embedding_scale: f32,
    /// Activation of the MLP.
    pub activation: Activation,
    /// Norms of a block.
    pub norms: Norms,
    /// Token that begins a text.
    pub bos: Option<u32>,
    /// Tokens that end one.
    pub eos: Vec<u32>,
    /// Element type in which the folder says that weights are kept; the files decide.
    pub dtype: DType,
    /// How the folder's matrices are packed, where some are.
    pub packing: Option<Packing>,
}

impl Config {
    /// Whether a model of this configuration computes what one of another does, of the same weights: how elements are kept, and which
    /// tokens begin and end a text, are no part of that.
    pub fn computes_as(&self, other: &Config) -> bool {
        let (dtype, packing, bos) = (other.dtype, other.packing, other.bos);
        Config { dtype, packing, bos, eos: other.eos.clone(), ..self.clone() } == *other
    }

    /// Refuses policies that divide a budget over layers where these have different windows.
    ///
    /// # Errors
    /// When they have.
    pub fn check_even_windows(&self) -> Result<(), &'static str> {
        match self.windows.iter().all(|window| *window == self.windows[0]) {
            true => Ok(()),
            false => Err("it divides the budget over layers, but this model's layers have different windows"),
        }
    }

    /// Elements of all query heads.
    pub fn q_width(&self) -> usize {
        self.q_heads * self.head_dim
    }

    /// Refuses a format that rows of activations of this model cannot be rounded to.
    ///
    /// # Errors
    /// When it is one of keys, or a row is not made of whole groups or blocks of it.
    pub fn check_activations(&self, format: RowFormat) -> Result<(), FormatError> {
        if format.group_tokens().is_some() {
            return Err(FormatError::OfKeys { format: format.to_string() });
        }
        let rows = [
            ("the hidden size", self.hidden),
            ("the width of all query heads", self.q_width()),
            ("the width of the MLP", self.ffn),
        ];
        rows.into_iter().try_for_each(|(what, width)| format.check(what, width))
    }

    /// Refuses a memory that reads a text in segments which are longer than the model was made for.
    ///
    /// # Errors
    /// When they are.
    pub fn check_memory(&self, memory: &dyn Memory) -> Result<(), ModelError> {
        let most = self.most_tokens();
        match memory.segment_tokens() {
            Some(tokens) if tokens > most => Err(ModelError::Segment { tokens, most }),
            _ => Ok(()),
        }
    }

    /// Whether packed matrices may have their inputs in another order.
    pub(super) fn is_ordered(&self) -> bool {
        matches!(self.packing, Some(Packing::Gptq { ordered: true, .. }))
    }

    /// Tokens of the longest sequence that the model was made for, with its RoPE scaling. Of linear scaling, as of Llama 3's, the
    /// configuration's number counts as scaled already (so Gemma's and DeepSeek Coder's are; Vicuna 16K's is not).
    pub fn most_tokens(&self) -> usize {
        match self.rope.scaling {
            RopeScaling::Dynamic { factor } => (self.max_positions as f64 * factor) as usize,
            RopeScaling::Yarn { factor, original_positions, .. } => {
                self.max_positions.max((original_positions as f64 * factor) as usize)
            }
            RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } | RopeScaling::Long { .. } => {
                self.max_positions
            }
        }
    }

    /// Elements of all KV heads.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Elements of the queries, keys and values of a token.
    pub fn qkv_width(&self) -> usize {
        self.q_width() + 2 * self.kv_width()
    }
}
