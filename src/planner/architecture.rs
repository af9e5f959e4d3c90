//! The shape of a model: enough to count its parameters and the bytes of its keys and values, and nothing else.
//!
//! A shape comes from the table of presets, from a `config.json`, or from the header of a GGUF file. What public planners
//! get wrong is written out here instead of derived: the width of a head, KV heads apart from query heads, windows on some
//! of the layers, latent attention (MLA), layers with a recurrent state in place of keys and values, tied embeddings.

use serde::Deserialize;

/// The shape of a decoder.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Architecture {
    /// Preset's name, or the path that was read.
    pub name: String,
    /// Blocks.
    pub layers: usize,
    /// Elements of the residual stream.
    pub hidden: usize,
    /// `Hq`.
    pub heads: usize,
    /// `Hkv`.
    pub kv_heads: usize,
    /// `D`.
    pub head_dim: usize,
    /// Elements between the two halves of an MLP.
    pub ffn: usize,
    /// Tokens that there are.
    pub vocab: usize,
    /// Tokens of the longest context in training.
    pub context: usize,
    /// Whether the output matrix is the embedding.
    #[serde(default)]
    pub tied: bool,
    /// Whether q, k and v have biases.
    #[serde(default)]
    pub qkv_bias: bool,
    /// Whether the output projection of attention has one.
    #[serde(default)]
    pub o_bias: bool,
    /// Whether each head of q and k is normalised.
    #[serde(default)]
    pub qk_norm: bool,
    /// Whether each query head has a learned sink.
    #[serde(default)]
    pub sinks: bool,
    /// Whether attention's output is multiplied by a gate as wide as it.
    #[serde(default)]
    pub output_gate: bool,
    /// Norms of a block.
    #[serde(default = "two")]
    pub norms: usize,
    /// Of GPT's kind: an MLP of two matrices, layer norms, and biases everywhere.
    #[serde(default)]
    pub gpt: bool,
    /// Learned positions.
    #[serde(default)]
    pub positions: usize,
    /// Sliding windows.
    pub window: Option<Window>,
    /// Mixture of experts in place of the MLP.
    pub experts: Option<Experts>,
    /// Latent attention.
    pub mla: Option<Mla>,
    /// Layers of linear attention.
    pub linear: Option<Linear>,
    /// Weight format of the files that its makers published, where that is not of 16 bits.
    pub published: Option<String>,
}

/// Up to here f64 counts whole numbers, and nothing overflows.
const MOST_PARAMETERS: f64 = 9_007_199_254_740_992.0;

fn two() -> usize {
    2
}

/// Sliding-window attention on some layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Tokens that a query sees.
    pub tokens: usize,
    /// Layers that have it.
    pub layers: usize,
}

/// Experts of each block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    /// Experts that there are.
    pub count: usize,
    /// Experts that a token passes through.
    pub active: usize,
    /// Width of one.
    pub ffn: usize,
    /// Experts that every token passes through.
    #[serde(default)]
    pub shared: usize,
    /// Whether the shared ones have a gate.
    #[serde(default)]
    pub shared_gate: bool,
    /// First layers that have an MLP instead.
    #[serde(default)]
    pub dense_layers: usize,
    /// Whether experts have biases.
    #[serde(default)]
    pub bias: bool,
    /// Whether the router has one.
    #[serde(default)]
    pub router_bias: bool,
}

/// Latent attention: one compressed row for all heads, and the part of the keys that is rotated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mla {
    /// Width of the compressed queries; `None` where they are not compressed.
    pub q_rank: Option<usize>,
    /// Width of the compressed keys and values.
    pub kv_rank: usize,
    /// Elements of a head that are not rotated.
    pub nope: usize,
    /// Elements that are.
    pub rope: usize,
    /// Elements of a value.
    pub v: usize,
}

/// Layers of linear attention (gated delta nets): a state per sequence, whatever the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Linear {
    /// Layers that have it in place of attention.
    pub layers: usize,
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Elements of one.
    pub key_dim: usize,
    /// Heads of values.
    pub value_heads: usize,
    /// Elements of one.
    pub value_dim: usize,
    /// Tokens that the convolution sees.
    pub conv: usize,
}

impl Linear {
    fn widths(&self) -> (u64, u64) {
        ((self.key_heads * self.key_dim) as u64, (self.value_heads * self.value_dim) as u64)
    }

    /// Elements of a sequence's state in one layer, all in f32.
    fn state(&self) -> u64 {
        let (keys, values) = self.widths();
        (self.conv as u64 - 1) * (2 * keys + values) + values * self.key_dim as u64
    }
}

/// Parameters by the part of the model that holds them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// The token table.
    pub embedding: u64,
    /// The output matrix, where it is not the embedding.
    pub head: u64,
    /// Values' projections.
    pub v: u64,
    /// Attention's output projections.
    pub o: u64,
    /// Second matrices of MLPs.
    pub down: u64,
    /// All other matrices of blocks.
    pub matrices: u64,
    /// Norms and biases.
    pub vectors: u64,
}

impl Counts {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.embedding + self.head + self.block()
    }

    /// Those of blocks.
    pub fn block(&self) -> u64 {
        self.v + self.o + self.down + self.matrices + self.vectors
    }

    fn add(&mut self, other: &Counts) {
        self.embedding += other.embedding;
        self.head += other.head;
        self.v += other.v;
        self.o += other.o;
        self.down += other.down;
        self.matrices += other.matrices;
        self.vectors += other.vectors;
    }
}

/// Layers whose caches are alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvGroup {
    /// How many.
    pub layers: usize,
    /// Rows of a token.
    pub heads: usize,
    /// Elements of a key.
    pub k_dim: usize,
    /// Elements of a value; 0 where the key's row holds both.
    pub v_dim: usize,
    /// Tokens that stay at most.
    pub window: Option<usize>,
}

impl Architecture {
    /// Parameters outside of blocks.
    pub fn outside(&self) -> Counts {
        let table = (self.vocab * self.hidden) as u64;
        let norm = self.norm() + (self.positions * self.hidden) as u64;
        Counts { embedding: table, head: if self.tied { 0 } else { table }, vectors: norm, ..Counts::default() }
    }

    fn norm(&self) -> u64 {
        (self.hidden * if self.gpt { 2 } else { 1 }) as u64
    }

    /// Parameters of block `layer`. Layers of linear attention count as the first ones, which changes no sum.
    pub fn layer(&self, layer: usize) -> Counts {
        let mut counts = Counts { vectors: self.norms as u64 * self.norm(), ..Counts::default() };
        counts.add(&self.attention(layer));
        counts.add(&self.mlp(layer, false));
        counts
    }

    fn attention(&self, layer: usize) -> Counts {
        let [hidden, heads, kv_heads, dim] = [self.hidden, self.heads, self.kv_heads, self.head_dim].map(|n| n as u64);
        if let Some(linear) = self.linear.filter(|linear| layer < linear.layers) {
            let (keys, values) = linear.widths();
            let per_head = 2 * linear.value_heads as u64;
            let mixed = hidden * (2 * keys + 2 * values + per_head) + (2 * keys + values) * linear.conv as u64;
            let vectors = per_head + linear.value_dim as u64;
            return Counts { o: values * hidden, matrices: mixed, vectors, ..Counts::default() };
        }
        if let Some(Mla { q_rank, kv_rank, nope, rope, v }) = self.mla {
            let [kv_rank, nope, rope, v] = [kv_rank, nope, rope, v].map(|n| n as u64);
            let q = match q_rank.map(|rank| rank as u64) {
                None => hidden * heads * (nope + rope),
                Some(rank) => hidden * rank + rank * heads * (nope + rope),
            };
            let matrices = q + hidden * (kv_rank + rope) + kv_rank * heads * (nope + v);
            let vectors = kv_rank + q_rank.unwrap_or(0) as u64;
            return Counts { o: heads * v * hidden, matrices, vectors, ..Counts::default() };
        }
        let q = hidden * heads * dim * if self.output_gate { 2 } else { 1 };
        let has = |what: bool, count: u64| if what { count } else { 0 };
        let vectors = has(self.qkv_bias || self.gpt, (heads + 2 * kv_heads) * dim)
            + has(self.o_bias || self.gpt, hidden)
            + has(self.qk_norm, 2 * dim)
            + has(self.sinks, heads);
        let kv = hidden * kv_heads * dim;
        Counts { v: kv, o: heads * dim * hidden, matrices: q + kv, vectors, ..Counts::default() }
    }

    /// Linear layers of block `layer`: inputs, outputs, and how many there are alike. Those that read the same input are apart,
    /// as checkpoints have them.
    pub fn matrices(&self, layer: usize) -> Vec<[u64; 3]> {
        let [hidden, heads, kv_heads, dim] = [self.hidden, self.heads, self.kv_heads, self.head_dim].map(|n| n as u64);
        let mut all = Vec::new();
        if let Some(linear) = self.linear.filter(|linear| layer < linear.layers) {
            let (keys, values) = linear.widths();
            all.extend([
                [hidden, 2 * keys + 2 * values, 1],
                [hidden, 2 * linear.value_heads as u64, 1],
                [values, hidden, 1],
            ]);
        } else if let Some(Mla { q_rank, kv_rank, nope, rope, v }) = self.mla {
            let [kv_rank, nope, rope, v] = [kv_rank, nope, rope, v].map(|n| n as u64);
            match q_rank.map(|rank| rank as u64) {
                None => all.push([hidden, heads * (nope + rope), 1]),
                Some(rank) => all.extend([[hidden, rank, 1], [rank, heads * (nope + rope), 1]]),
            }
            all.extend([[hidden, kv_rank + rope, 1], [kv_rank, heads * (nope + v), 1], [heads * v, hidden, 1]]);
        } else {
            let q = heads * dim * if self.output_gate { 2 } else { 1 };
            all.extend([[hidden, q, 1], [hidden, kv_heads * dim, 2], [heads * dim, hidden, 1]]);
        }
        let mut mlp = |ffn: u64, count: u64| {
            let before = if self.gpt { 1 } else { 2 };
            all.extend([[hidden, ffn, before * count], [ffn, hidden, count]]);
        };
        match self.experts.filter(|experts| layer >= experts.dense_layers) {
            None => mlp(self.ffn as u64, 1),
            Some(experts) => {
                mlp(experts.ffn as u64, experts.count as u64);
                if experts.shared > 0 {
                    mlp((experts.shared * experts.ffn) as u64, 1);
                }
                all.push([hidden, experts.count as u64, 1]);
                if experts.shared_gate {
                    all.push([hidden, 1, 1]);
                }
            }
        }
        all
    }

    /// The MLP of a layer; `active`: of experts only those that a token passes through.
    fn mlp(&self, layer: usize, active: bool) -> Counts {
        let hidden = self.hidden as u64;
        let Some(experts) = self.experts.filter(|experts| layer >= experts.dense_layers) else {
            let ffn = self.ffn as u64;
            let (before, vectors) = if self.gpt { (1, ffn + hidden) } else { (2, 0) };
            return Counts { down: ffn * hidden, matrices: before * ffn * hidden, vectors, ..Counts::default() };
        };
        let [count, ffn, shared] = [experts.count, experts.ffn, experts.shared].map(|n| n as u64);
        let held = if active { experts.active as u64 } else { count };
        let one = ffn * hidden;
        let biases = if experts.bias { held * (2 * ffn + hidden) } else { 0 };
        let router = if experts.router_bias { count } else { 0 };
        Counts {
            down: (held + shared) * one,
            matrices: (held + shared) * 2 * one + count * hidden + if experts.shared_gate { hidden } else { 0 },
            vectors: biases + router,
            ..Counts::default()
        }
    }

    /// Parameters of one of the three matrices of all experts of a layer that tokens are routed to.
    pub fn routed(&self, layer: usize) -> u64 {
        let experts = self.experts.filter(|experts| layer >= experts.dense_layers);
        experts.map_or(0, |experts| (experts.count * experts.ffn * self.hidden) as u64)
    }

    /// All parameters.
    pub fn parameters(&self) -> u64 {
        let mut counts = self.outside();
        (0..self.layers).for_each(|layer| counts.add(&self.layer(layer)));
        counts.total()
    }

    /// Parameters that a token is multiplied by: without the table that it is looked up in, and of experts those that it
    /// passes through.
    pub fn active_parameters(&self) -> u64 {
        let table = (self.vocab * self.hidden) as u64;
        let looked_up = if self.tied { 0 } else { table } + (self.positions * self.hidden) as u64;
        self.parameters() - looked_up - self.idle_parameters()
    }

    /// Parameters of experts that a token does not pass through.
    pub fn idle_parameters(&self) -> u64 {
        (0..self.layers).map(|layer| self.mlp(layer, false).block() - self.mlp(layer, true).block()).sum()
    }

    /// Elements of a key and of a value of a query head, as they are multiplied: compressed rows are expanded.
    pub fn head_dims(&self) -> [usize; 2] {
        self.mla.map_or([self.head_dim; 2], |mla| [mla.nope + mla.rope, mla.v])
    }

    /// Layers that hold keys and values, alike ones together.
    pub fn kv_groups(&self) -> Vec<KvGroup> {
        let layers = self.layers - self.linear.map_or(0, |linear| linear.layers);
        let (heads, k_dim, v_dim) = match self.mla {
            Some(mla) => (1, mla.kv_rank + mla.rope, 0),
            None => (self.kv_heads, self.head_dim, self.head_dim),
        };
        let group = |layers, window| KvGroup { layers, heads, k_dim, v_dim, window };
        let windowed = self.window.map_or(0, |window| window.layers);
        let groups = [group(layers - windowed, None), group(windowed, self.window.map(|window| window.tokens))];
        groups.into_iter().filter(|group| group.layers > 0).collect()
    }

    /// Bytes of a sequence's recurrent states.
    pub fn state_bytes(&self) -> u64 {
        self.linear.map_or(0, |linear| 4 * linear.layers as u64 * linear.state())
    }

    /// Elements that a token takes while it passes through a block, residual stream included: the larger of its MLP
    /// (stream, norm, gate, up, product) and its attention (stream, norm, q, k, v, output).
    pub fn activation_elements(&self) -> u64 {
        let mlp = if self.gpt { 2 } else { 3 };
        let dense = match self.experts {
            Some(experts) if experts.dense_layers == 0 => 0,
            _ => mlp * self.ffn,
        };
        let routed = self.experts.map_or(0, |experts| 3 * experts.ffn * (experts.active + experts.shared));
        let attention = match self.mla {
            Some(mla) => self.heads * (2 * (mla.nope + mla.rope) + 2 * mla.v),
            None => (2 * self.heads + 2 * self.kv_heads) * self.head_dim,
        };
        (2 * self.hidden + dense.max(routed).max(attention)) as u64
    }

    /// No less than the parameters, and than any product of extents here, without overflow.
    fn size(&self) -> f64 {
        let product = |extents: &[usize]| extents.iter().map(|&extent| extent as f64).product::<f64>();
        let mla = self.mla.map_or(0.0, |mla| {
            let ranks = (mla.kv_rank + mla.q_rank.unwrap_or(0) + self.hidden) as f64;
            2.0 * ranks * product(&[self.heads, mla.nope + mla.rope + mla.v])
        });
        let linear = self.linear.map_or(0.0, |linear| {
            let (keys, values) =
                (product(&[linear.key_heads, linear.key_dim]), product(&[linear.value_heads, linear.value_dim]));
            (2.0 * keys + 2.0 * values) * (self.hidden + linear.conv) as f64 + values * linear.key_dim as f64
        });
        let experts = self
            .experts
            .map_or(0.0, |experts| product(&[3, experts.count + experts.shared, experts.ffn + 1, self.hidden]));
        let block = product(&[4, self.heads, self.head_dim, self.hidden])
            + product(&[3, self.ffn, self.hidden])
            + experts
            + mla
            + linear;
        self.layers as f64 * block + product(&[2, self.vocab + self.positions, self.hidden])
    }

    /// Says whether the extents make a model.
    ///
    /// # Errors
    /// In words: what was wrong, its value, and what would be right.
    pub fn check(&self) -> Result<(), String> {
        let extents = [
            ("layers", self.layers),
            ("hidden", self.hidden),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("vocab", self.vocab),
            ("context", self.context),
        ];
        if let Some((name, extent)) = extents.into_iter().find(|(_, extent)| !(1..=1 << 28).contains(extent)) {
            return Err(format!("{name} is {extent}; it must be 1 to 2^28"));
        }
        if self.layers > 4096 {
            return Err(format!("layers is {}; it must be at most 4096", self.layers));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(format!(
                "{} query heads cannot share {} KV heads; heads must be a multiple of kv_heads",
                self.heads, self.kv_heads
            ));
        }
        if let Some(Experts { count, active, .. }) = self.experts.filter(|experts| experts.active > experts.count) {
            return Err(format!("{active} of {count} experts are active; it must be at most all"));
        }
        if self.size() > MOST_PARAMETERS {
            return Err("it comes to more than 2^53 parameters; its extents cannot be right".into());
        }
        let windowed = self.window.map_or(0, |window| window.layers);
        let linear = self.linear.map_or(0, |linear| linear.layers);
        if windowed + linear > self.layers {
            return Err(format!("{windowed} layers with windows and {linear} linear ones; there are {}", self.layers));
        }
        Ok(())
    }
}
