//! What a policy sees when it evicts.

use crate::attention::rope::{Frequencies, Unrotation};
use crate::attention::{Forward, Shape};
use crate::memory::Arena;
use crate::tensor::TensorView;
use std::ops::Range;

/// What a policy looks at besides positions, which is what it costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Statistic {
    /// The keys: one read of them.
    Keys,
    /// The values: one read of them.
    Values,
    /// Keys or queries before RoPE.
    BeforeRope,
    /// The hidden state that a token had in each layer: the input of the layer's attention, which its query, key and value
    /// are projections of. Seen once, as the token arrives.
    HiddenStates,
    /// The output projection, where the inputs have one: values are multiplied by it.
    OutputProjection,
    /// The queries of the context themselves.
    Queries,
    /// The attention of the last few queries.
    RecentAttention,
    /// The attention of every query so far.
    AccumulatedAttention,
    /// The attention of the model while it repeats its context: another pass, which only a model can make.
    Reconstruction,
    /// Gradients of what the model makes of its context while it repeats it.
    Gradients,
    /// The attention of the queries that will come: no policy that one can run.
    FutureAttention,
}

impl Statistic {
    /// In words, with its cost, for lists.
    pub fn describe(self) -> &'static str {
        match self {
            Statistic::Keys => "keys (one read of K)",
            Statistic::Values => "values (one read of V)",
            Statistic::BeforeRope => "vectors before RoPE (kept, or rotated back)",
            Statistic::HiddenStates => "hidden states of the model's layers (one look at each token)",
            Statistic::OutputProjection => "the output projection, if there is one (one product with V)",
            Statistic::Queries => "queries of the context (one read of Q)",
            Statistic::RecentAttention => "attention of the last queries (one thin pass)",
            Statistic::AccumulatedAttention => "attention of all queries (one tiled pass, one row per step)",
            Statistic::Reconstruction => "attention while the model repeats its context (2 to 3 times a prefill)",
            Statistic::Gradients => "gradients while the model repeats its context (a pass forth and back)",
            Statistic::FutureAttention => "attention of future queries (known to no policy that one can run)",
        }
    }
}

/// Tokens that are never evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Protect {
    /// The first tokens of the sequence, by position.
    pub sink: usize,
    /// The latest tokens of a head's list.
    pub window: usize,
}

/// How a model repeats its context, and what becomes a token's score (KVzip, arXiv 2505.23416).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reconstruction {
    /// Tokens of the context that are repeated at a time, and looked at meanwhile.
    pub chunk_tokens: usize,
    /// First tokens of the context that each chunk's queries see besides it and themselves.
    pub sink: usize,
    /// What a query's attention to a token is weighed by.
    pub weighing: Weighing,
}

/// What the attention of a query that repeats a context is weighed by, before the maximum over queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weighing {
    /// Nothing (KVzip, arXiv 2505.23416).
    Nothing,
    /// The norm of the value behind the output projection, over that of the query's hidden state (KVzip+, arXiv 2601.07891).
    Norms,
    /// The norm of the value behind the output projection, times that of the gradient of what the model makes of the text by what attention
    /// adds to the residual stream at the query (KVgrad).
    Gradients,
}

/// What a policy sees. Layers are folded into the batch: sequence `layer * (B / layers) + b`.
pub struct Context<'a> {
    /// The queries so far (bottom-right aligned with the keys), the cached keys and values, the mask. `kv_len` of its
    /// shape is the longest list; lists may be shorter.
    pub call: Forward<'a>,
    /// Layers that are folded into the batch.
    pub layers: usize,
    /// Log-sum-exps of these queries over these keys, `[B, Hq, Lq]`; with a statistic of attention.
    pub lse: &'a [f32],
    /// Queries that will come, for the oracle.
    pub future: Option<Future<'a>>,
    /// Attention that each token received from every query so far, `[B, Hkv, kv_len]`, for
    /// [`Statistic::AccumulatedAttention`].
    pub accumulated: Option<&'a [f32]>,
    /// What [`Scorer::gate`](super::Scorer::gate) gave each token when it arrived, `[B, Hkv, kv_len]`, for
    /// [`Statistic::HiddenStates`].
    pub gates: Option<&'a [f32]>,
    /// What each token was looked at while the model repeated its context, `[B, Hkv, kv_len]`, for
    /// [`Statistic::Reconstruction`].
    pub reconstructed: Option<&'a [f32]>,
    /// Position in its sequence of the token in `(list, slot)`.
    pub positions: &'a (dyn Fn(usize, usize) -> usize + Sync),
    /// Tokens that each sequence has seen: the position of the next.
    pub seen_tokens: usize,
    /// How to look behind RoPE; `None` where the inputs do not tell.
    pub before_rope: Option<BeforeRope<'a>>,
    /// Output projection of each query head, `[1, Hq, D, hidden]`, of every layer; empty where the inputs have none.
    pub w_o: &'a [TensorView<'a>],
    /// The model's number of each sequence's layer, `[B]`; empty where they are all of a model's layers in order.
    pub layer_numbers: &'a [usize],
    /// Tokens that each head may keep on average.
    pub budget_tokens: usize,
    /// Seed of the cell.
    pub seed: u64,
    /// Where scratch memory comes from.
    pub arena: &'a Arena,
}

/// Queries that will come, over all keys that will be there.
#[derive(Clone, Copy)]
pub struct Future<'a> {
    /// The future queries and the whole sequence's keys and values.
    pub call: Forward<'a>,
    /// Their log-sum-exps, `[B, Hq, Lq]`.
    pub lse: &'a [f32],
}

/// Keys and queries as they were before RoPE: recorded, or rotated back.
#[derive(Clone, Copy)]
pub struct BeforeRope<'a> {
    /// RoPE's frequencies.
    pub frequencies: &'a Frequencies,
    /// Recorded queries `[B, Hq, Lq, D]`, the last one aligned with the last key.
    pub q: Option<TensorView<'a>>,
    /// Recorded keys `[B, Hkv, L, D]` by position.
    pub k: Option<TensorView<'a>>,
}

/// The number, among those of all layers, of a list that is the `list`-th of those that are scored together: `heads` to each of
/// `sequences` of each layer, whose numbers are `layer_numbers` where they are not scored together.
pub fn list_number(list: usize, heads: usize, sequences: usize, layer_numbers: &[usize]) -> usize {
    let sequence = list / heads;
    let layer = layer_numbers.get(sequence).copied().unwrap_or(sequence / sequences);
    (layer * sequences + sequence % sequences) * heads + list % heads
}

impl<'a> Context<'a> {
    /// Number of lists: `B * Hkv`.
    pub fn lists(&self) -> usize {
        self.call.shape.batch * self.call.shape.kv_heads
    }

    /// Sequence and KV head of a list.
    pub fn list_at(&self, list: usize) -> (usize, usize) {
        (list / self.call.shape.kv_heads, list % self.call.shape.kv_heads)
    }

    /// Tokens of a list.
    pub fn len(&self, list: usize) -> usize {
        let (batch, head) = self.list_at(list);
        self.call.kv.len(batch, head)
    }

    /// The model's number of the layer that is folded into `sequence`.
    pub fn layer_number(&self, sequence: usize) -> usize {
        self.layer_numbers.get(sequence).copied().unwrap_or(sequence / self.sequences())
    }

    /// A list's number among those of all layers, whether these are scored together or one by one.
    pub fn list_number(&self, list: usize) -> usize {
        list_number(list, self.call.shape.kv_heads, self.sequences(), self.layer_numbers)
    }

    /// Sequences of one layer: `B / layers`.
    pub fn sequences(&self) -> usize {
        self.call.shape.batch / self.layers
    }

    /// Calls `visit` for queries (indices in `0..Lq`) of a query head as they were before RoPE, `[D]`; `None` where the
    /// inputs do not tell.
    pub fn queries_before_rope(
        &self,
        batch: usize,
        head: usize,
        queries: Range<usize>,
        mut visit: impl FnMut(&[f32]),
    ) -> Option<()> {
        let before = self.before_rope?;
        let mut unrotation = Unrotation::new(before.frequencies);
        let mut row = [0.0; Shape::MAX_HEAD_DIM];
        let row = &mut row[..self.call.shape.head_dim];
        for index in queries {
            match before.q {
                Some(recorded) => recorded.read_rows(batch, head, index, row),
                None => {
                    self.call.q.read_rows(batch, head, index, row);
                    // Queries before the first token have no position.
                    let position = (self.seen_tokens + index).saturating_sub(self.call.shape.q_len);
                    unrotation.unrotate(row, position);
                }
            }
            visit(row);
        }
        Some(())
    }
}
