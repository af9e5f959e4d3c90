//! The parameters of a model: how each is called in its files, its shape and its role. One table for all who hold them.
//!
//! [`Config::parameters`] goes through them in one order, and [`Make`] makes of each what its owner needs: memory mapped
//! from a file ([`super::weights`]), or a place in an array of f32 (training).

use super::Config;
use super::config::{Family, Norms};

/// What a parameter is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A row for each token.
    Embedding,
    /// Of a linear layer.
    Matrix,
    /// Of a linear layer whose outputs are added to the residual stream.
    Residual,
    /// Factors of a norm's outputs.
    Norm,
    /// Added to a linear layer's outputs.
    Bias,
}

impl Role {
    /// Whether weight decay draws it towards zero.
    pub fn decays(self) -> bool {
        matches!(self, Role::Embedding | Role::Matrix | Role::Residual)
    }
}

/// What is made of each parameter.
pub(crate) trait Make {
    type Matrix;
    type Vector;
    type Error;

    /// Of a matrix `[rows, width]`.
    fn matrix(&mut self, name: String, role: Role, shape: [usize; 2]) -> Result<Self::Matrix, Self::Error>;

    /// Of a vector.
    fn vector(&mut self, name: String, role: Role, width: usize) -> Result<Self::Vector, Self::Error>;
}

/// A linear layer: matrices of equal width below each other, one file's tensor each, and as many biases or none.
pub(crate) struct Stack<M, V> {
    pub matrices: Vec<M>,
    pub biases: Vec<V>,
}

/// Parameters of a block, in the order in which they are made.
pub(crate) struct Block<M, V> {
    pub before_attention: V,
    /// Queries, keys and values: three matrices, or one of all their rows.
    pub qkv: Stack<M, V>,
    /// Weights of the norms of each head of q and of k.
    pub qk_norm: Option<[V; 2]>,
    pub o: Stack<M, V>,
    pub after_attention: Option<V>,
    pub before_mlp: V,
    /// Likewise.
    pub gate_up: Stack<M, V>,
    pub down: Stack<M, V>,
    pub after_mlp: Option<V>,
}

/// All parameters.
pub(crate) struct Tree<M, V> {
    pub embedding: M,
    pub blocks: Vec<Block<M, V>>,
    pub norm: V,
    /// The output matrix, where it is not the embedding.
    pub output: Option<M>,
}

impl Config {
    /// Goes through all parameters.
    ///
    /// # Errors
    /// Those of `make`.
    pub(crate) fn parameters<T: Make>(&self, make: &mut T) -> Result<Tree<T::Matrix, T::Vector>, T::Error> {
        let vocabulary = [self.vocab, self.hidden];
        let embedding = make.matrix("model.embed_tokens.weight".into(), Role::Embedding, vocabulary)?;
        let blocks = (0..self.layers).map(|layer| self.block(layer, make)).collect::<Result<_, _>>()?;
        let norm = make.vector("model.norm.weight".into(), Role::Norm, self.hidden)?;
        let output = match self.tied {
            true => None,
            false => Some(make.matrix("lm_head.weight".into(), Role::Matrix, vocabulary)?),
        };
        Ok(Tree { embedding, blocks, norm, output })
    }

    /// The norm in front of the MLP: its name is that of another one where there are norms behind attention too.
    pub(super) fn before_mlp(&self) -> &'static str {
        match self.norms {
            Norms::BeforeAndAfter => "pre_feedforward_layernorm",
            _ => "post_attention_layernorm",
        }
    }

    /// Goes through those of one block.
    ///
    /// # Errors
    /// Those of `make`.
    pub(super) fn block<T: Make>(&self, layer: usize, make: &mut T) -> Result<Block<T::Matrix, T::Vector>, T::Error> {
        let Config { hidden, ffn, head_dim, .. } = *self;
        let (q_width, kv_width) = (self.q_width(), self.kv_width());
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        let norm = |make: &mut T, name: &str, width| make.vector(at(&format!("{name}.weight")), Role::Norm, width);
        let stack = |make: &mut T, role, parts: &[(&str, usize)], width, has_bias: bool| {
            let matrix =
                |&(name, rows): &(&str, usize)| make.matrix(at(&format!("{name}.weight")), role, [rows, width]);
            let matrices = parts.iter().map(matrix).collect::<Result<_, _>>()?;
            let bias = |&(name, rows): &(&str, usize)| make.vector(at(&format!("{name}.bias")), Role::Bias, rows);
            let biases = parts.iter().filter(|_| has_bias).map(bias).collect::<Result<_, _>>()?;
            Ok(Stack { matrices, biases })
        };
        let (qkv, gate_up): (&[_], &[_]) = match self.family {
            Family::Phi3 => (&[("self_attn.qkv_proj", q_width + 2 * kv_width)], &[("mlp.gate_up_proj", 2 * ffn)]),
            _ => (
                &[("self_attn.q_proj", q_width), ("self_attn.k_proj", kv_width), ("self_attn.v_proj", kv_width)],
                &[("mlp.gate_proj", ffn), ("mlp.up_proj", ffn)],
            ),
        };
        let after = self.norms == Norms::BeforeAndAfter;
        Ok(Block {
            before_attention: norm(make, "input_layernorm", hidden)?,
            qkv: stack(make, Role::Matrix, qkv, hidden, self.qkv_bias)?,
            qk_norm: match self.qk_norm {
                true => Some([norm(make, "self_attn.q_norm", head_dim)?, norm(make, "self_attn.k_norm", head_dim)?]),
                false => None,
            },
            o: stack(make, Role::Residual, &[("self_attn.o_proj", hidden)], q_width, self.o_bias)?,
            after_attention: after.then(|| norm(make, "post_attention_layernorm", hidden)).transpose()?,
            before_mlp: norm(make, self.before_mlp(), hidden)?,
            gate_up: stack(make, Role::Matrix, gate_up, hidden, self.mlp_bias)?,
            down: stack(make, Role::Residual, &[("mlp.down_proj", hidden)], ffn, self.mlp_bias)?,
            after_mlp: after.then(|| norm(make, "post_feedforward_layernorm", hidden)).transpose()?,
        })
    }
}
