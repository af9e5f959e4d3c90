//! A model, a card and a load: the bytes of each term in each phase, as exact whole numbers.
//!
//! Transients of different moments do not add up: a pass needs its block's activations and scores, or its logits, never
//! both. So prefill is looked at twice, inside the blocks and at the output, and the larger moment is its peak.

use super::PlanError;
use super::architecture::KvGroup;
use super::eviction::Eviction;
use super::kv::KvStore;
use super::presets::Gpu;
use super::source::Subject;
use super::weights::WeightFormat;

/// Bytes of the context and libraries of a process on a GPU, unless they are measured: 0.5 GB.
pub const DEFAULT_OVERHEAD: u64 = 500_000_000;

/// Where the memory is.
#[derive(Debug, Clone, Copy)]
pub enum Memory {
    /// A card of the table.
    Gpu(&'static Gpu),
    /// So many bytes; nothing is known of its speed.
    Bytes(u64),
    /// A machine without a card: the memory that layers would be moved to is the one they are in.
    Host(u64),
}

impl Memory {
    /// More than there is anywhere: for questions that no card is part of.
    pub const ENDLESS: Memory = Memory::Bytes(1 << 60);

    /// Bytes that are there.
    pub fn bytes(&self) -> u64 {
        match self {
            Memory::Gpu(gpu) => gpu.bytes(),
            Memory::Bytes(bytes) | Memory::Host(bytes) => *bytes,
        }
    }

    /// The card, if it is one of the table.
    pub fn gpu(&self) -> Option<&'static Gpu> {
        match self {
            Memory::Gpu(gpu) => Some(gpu),
            Memory::Bytes(_) | Memory::Host(_) => None,
        }
    }
}

/// How scores are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attention {
    /// As `eager` of transformers: scores and probabilities in 16 bits, the softmax in f32. 8 bytes a score.
    Naive,
    /// Scores and probabilities in 16 bits. 4 bytes a score.
    Minimal,
    /// An online softmax: none.
    Tiled,
}

impl Attention {
    /// Bytes that are held for each pair of a query and a key.
    pub fn score_bytes(self) -> u64 {
        match self {
            Attention::Naive => 8,
            Attention::Minimal => 4,
            Attention::Tiled => 0,
        }
    }

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Attention::Naive => "naive",
            Attention::Minimal => "minimal",
            Attention::Tiled => "tiled",
        }
    }
}

/// Of which tokens of the prompt there are logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logits {
    /// The last: f32.
    Last,
    /// All of a pass: 16 bits and a copy in f32.
    All,
}

/// How room for keys and values is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocation {
    /// As many tokens as there are.
    Exact,
    /// Pages of so many tokens, and 4 bytes for each in a table.
    Paged(u64),
    /// So many tokens for each sequence from the beginning; `None`: its context and its output.
    Reserved(Option<u64>),
}

/// A model, a card and a load.
#[derive(Debug, Clone)]
pub struct Scenario<'a> {
    /// The model.
    pub subject: &'a Subject,
    /// How its weights are kept; as in its files where nothing is asked for.
    pub weights: Option<&'static WeightFormat>,
    /// Where.
    pub memory: Memory,
    /// Bytes of the context, libraries and other processes, where they are known; `None`: [`DEFAULT_OVERHEAD`].
    pub overhead_bytes: Option<u64>,
    /// Sequences whose prompts are read together.
    pub batch: u64,
    /// Sequences that are held and decoded together; as many as are read, where it is less.
    pub concurrency: u64,
    /// Tokens that each brings.
    pub context: u64,
    /// Tokens that each is given.
    pub output: u64,
    /// Tokens of a sequence that go through the model together; `None`: all.
    pub chunk: Option<u64>,
    /// Tokens of all sequences that go through the model together; `None`: all.
    pub step: Option<u64>,
    /// Attention.
    pub attention: Attention,
    /// Logits.
    pub logits: Logits,
    /// Keys and values.
    pub kv: KvStore,
    /// Room for them.
    pub allocation: Allocation,
    /// What is evicted.
    pub eviction: Option<Eviction>,
    /// Cards that share each layer.
    pub tensor_parallel: u64,
    /// Cards that share the layers.
    pub pipeline: u64,
    /// Layers whose weights lie in the host's memory and come over the link for each pass.
    pub offload: u64,
}

/// Moments of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Weights are there; the largest tensor is being converted.
    Load,
    /// Prefill at its worst.
    Prefill,
    /// The last token is decoded.
    Decode,
}

impl Phase {
    /// In the order in which they come.
    pub const ALL: [Phase; 3] = [Phase::Load, Phase::Prefill, Phase::Decode];

    /// Name.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Load => "load",
            Phase::Prefill => "prefill",
            Phase::Decode => "decode",
        }
    }
}

/// Bytes of a moment, by term.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bytes {
    /// Weights on the card.
    pub weights: u128,
    /// What a load needs besides.
    pub cold_start: u128,
    /// Keys and values of tokens, and recurrent states.
    pub kv: u128,
    /// Score matrices of one layer.
    pub scores: u128,
    /// The residual stream and one block's intermediate results.
    pub activations: u128,
    /// Logits.
    pub logits: u128,
    /// A policy's scores.
    pub workspace: u128,
    /// Page tables.
    pub metadata: u128,
    /// Room for tokens that is taken and empty.
    pub slack: u128,
    /// Context, libraries, other processes.
    pub context: u128,
}

impl Bytes {
    /// Names and bytes, in the order in which they are shown.
    pub fn terms(&self) -> [(&'static str, u128); 10] {
        [
            ("weights", self.weights),
            ("cold start", self.cold_start),
            ("kv", self.kv),
            ("scores", self.scores),
            ("activations", self.activations),
            ("logits", self.logits),
            ("workspace", self.workspace),
            ("metadata", self.metadata),
            ("slack", self.slack),
            ("context", self.context),
        ]
    }

    /// Their sum.
    pub fn total(&self) -> u128 {
        self.terms().iter().map(|(_, bytes)| bytes).sum()
    }
}

impl Scenario<'_> {
    /// Tokens of all sequences that go through the model together.
    fn pass_rows(&self, context: u64) -> u64 {
        let evicting = self.eviction.as_ref().and_then(Eviction::chunk_tokens);
        let own = [self.chunk, evicting].into_iter().flatten().fold(context, u64::min).max(1);
        let rows = self.batch.saturating_mul(own);
        self.step.map_or(rows, |step| rows.min(step.max(self.batch)))
    }

    /// Tokens of each sequence that go through the model together.
    pub fn pass_tokens(&self, context: u64) -> u64 {
        self.pass_rows(context).div_ceil(self.batch)
    }

    /// What `generate --chunk` must say for such passes; it may be longer than the prompt.
    pub fn run_chunk(&self) -> u64 {
        self.chunk.filter(|_| self.step.is_none()).unwrap_or_else(|| self.pass_tokens(self.context))
    }

    /// Sequences that are held and decoded together.
    pub fn held(&self) -> u64 {
        self.batch.max(self.concurrency)
    }

    /// Bytes of a token of a sequence in all layers, windows aside.
    pub fn kv_token_bytes(&self) -> u64 {
        self.subject.groups.iter().map(|group| self.kv.token_bytes(group)).sum()
    }

    /// Tokens of a sequence in a list that may hold as many as `window` says: those that are there, and the room for them, at
    /// `context` tokens of the sequence.
    fn tokens(&self, held: u64, context: u64, window: Option<usize>) -> (u64, u64) {
        let held = window.map_or(held, |window| held.min(window as u64));
        let room = match self.allocation {
            Allocation::Exact => held,
            Allocation::Paged(page) => held.next_multiple_of(page),
            Allocation::Reserved(most) => {
                let most = most.unwrap_or(context + self.output);
                held.max(window.map_or(most, |window| most.min(window as u64)))
            }
        };
        (held, room)
    }

    /// What the fullest card holds: whole layers, no more than its stage has and those without a window first, and whole KV
    /// heads as far as there are any; a compressed row is held by every card.
    pub(super) fn on_card(&self) -> Vec<KvGroup> {
        let stages = self.pipeline as usize;
        let mut left = self.subject.layers.div_ceil(stages);
        let mut groups: Vec<&KvGroup> = self.subject.groups.iter().collect();
        groups.sort_by_key(|group| group.window.is_some());
        let mut here = |group: &KvGroup| {
            let layers = group.layers.div_ceil(stages).min(left);
            left -= layers;
            KvGroup { layers, heads: group.heads.div_ceil(self.tensor_parallel as usize), ..*group }
        };
        groups.into_iter().map(&mut here).collect()
    }

    /// Bytes of a token of a sequence on the fullest card, windows aside.
    pub fn card_token_bytes(&self) -> u64 {
        self.on_card().iter().map(|group| self.kv.token_bytes(group)).sum()
    }

    /// Bytes of a sequence's recurrent states on a card.
    pub fn card_state_bytes(&self) -> u64 {
        self.subject.state_bytes.div_ceil(self.tensor_parallel * self.pipeline)
    }

    /// Adds a cache of `sequences` sequences whose lists hold `tokens` of each, at `context` tokens of each.
    pub(super) fn add_cache(&self, to: &mut Bytes, sequences: u64, tokens: u64, context: u64) {
        for group in self.on_card() {
            let (held, room) = self.tokens(tokens, context, group.window);
            let token = u128::from(self.kv.token_bytes(&group)) * u128::from(sequences);
            to.kv += token * u128::from(held);
            to.slack += token * u128::from(room - held);
            if let Allocation::Paged(page) = self.allocation {
                let lists = u128::from(sequences) * (group.layers * group.heads) as u128;
                to.metadata += 4 * u128::from(room / page) * lists;
            }
        }
        to.kv += u128::from(self.card_state_bytes()) * u128::from(sequences);
    }

    /// Bytes of weights on the fullest card: of a pipeline's stages the first has the embedding, the last the output matrix.
    pub fn weight_bytes(&self) -> u128 {
        let whole = self.subject.weight_bytes(self.weights);
        let here = (self.subject.layers as u64).saturating_sub(self.offload).div_ceil(self.pipeline);
        // One layer that is on its way has its room.
        let here = here + self.offload.min(1);
        let layers = u128::from(self.subject.fullest_stage(whole.layers, self.weights, here));
        let outside = if self.pipeline > 1 { whole.fullest_end(self.subject.architecture.tied) } else { whole.outside };
        layers.div_ceil(u128::from(self.tensor_parallel))
            + u128::from(outside).div_ceil(u128::from(self.tensor_parallel))
    }

    /// Bytes that weights in the host's memory have.
    pub fn offloaded_bytes(&self) -> u128 {
        let layers = self.subject.layers as u128;
        u128::from(self.subject.weight_bytes(self.weights).layers) * u128::from(self.offload).min(layers) / layers
    }

    /// Bytes of an element in which a block computes.
    pub fn compute_bytes(&self) -> u64 {
        if self.weights.is_some_and(|format| format.name == "fp32") { 4 } else { 2 }
    }

    /// Bytes of the rows of a pass: `elements` of each.
    fn row_bytes(&self, rows: u64, elements: u64) -> u128 {
        u128::from(rows) * u128::from(elements) * u128::from(self.compute_bytes())
    }

    fn logit_bytes(&self, rows: u64) -> u128 {
        let (rows, bytes) = match self.logits {
            Logits::Last => (self.batch, 4),
            Logits::All => (rows, self.compute_bytes() + 4),
        };
        u128::from(rows) * u128::from(bytes) * self.subject.vocab as u128
    }

    /// The larger of the two moments of a pass of `rows` tokens of all sequences over `keys` keys, whose cache `base` holds.
    fn pass(&self, base: Bytes, rows: u64, keys: u64) -> Bytes {
        let subject = self.subject;
        // Where every layer has a window, those that it sees of the cache and those that come.
        let each = rows.div_ceil(self.batch);
        let seen = |group: &KvGroup| group.window.map_or(keys, |window| keys.min(window as u64 + each));
        let keys = subject.groups.iter().map(seen).max().unwrap_or(keys);
        let pairs = u128::from(rows) * u128::from(keys);
        let heads = (subject.heads as u64).div_ceil(self.tensor_parallel);
        let scores = pairs * u128::from(heads) * u128::from(self.attention.score_bytes());
        let stream = 2 * subject.hidden as u64;
        let inner = (subject.activation_elements - stream).div_ceil(self.tensor_parallel);
        let lists = self.on_card().iter().map(|group| group.heads).max().unwrap_or(0);
        let scored = self.evicting().map_or(0, |_| 4 * u128::from(self.batch) * lists as u128 * u128::from(keys));
        let workspace = base.workspace + scored;
        let inside = Bytes { scores, activations: self.row_bytes(rows, stream + inner), workspace, ..base };
        let output = Bytes { activations: self.row_bytes(rows, stream), logits: self.logit_bytes(rows), ..base };
        if inside.total() >= output.total() { inside } else { output }
    }

    /// Bytes of a phase at `context` tokens of each sequence.
    ///
    /// # Errors
    /// When the budget leaves no token.
    pub fn bytes_at(&self, phase: Phase, context: u64) -> Result<Bytes, PlanError> {
        let overhead = self.overhead_bytes.unwrap_or(DEFAULT_OVERHEAD);
        let mut base = Bytes { weights: self.weight_bytes(), context: u128::from(overhead), ..Bytes::default() };
        let lists = self.lists_hold(phase, context)?;
        for &(sequences, tokens) in &lists {
            self.add_cache(&mut base, sequences, tokens, context);
        }
        base.workspace = u128::from(self.opened(phase)) * self.index_bytes(context)?;
        let keys = lists.first().map_or(0, |&(_, tokens)| tokens);
        match phase {
            Phase::Load => {
                // Quantised as it is loaded: the largest matrix is there in 16 bits too.
                if self.weights.is_some_and(|format| format.at_load) {
                    base.cold_start = 2 * u128::from(self.subject.largest_matrix());
                }
                Ok(base)
            }
            Phase::Prefill => Ok(self.pass(base, self.pass_rows(context), keys)),
            Phase::Decode => Ok(Scenario { batch: self.held(), ..self.clone() }.pass(base, self.held(), keys)),
        }
    }

    /// Bytes of the fullest moment at `context` tokens.
    ///
    /// # Errors
    /// As [`Scenario::bytes_at`].
    pub fn peak(&self, context: u64) -> Result<(Phase, Bytes), PlanError> {
        let mut peak = (Phase::Load, self.bytes_at(Phase::Load, context)?);
        for phase in [Phase::Prefill, Phase::Decode] {
            let bytes = self.bytes_at(phase, context)?;
            if bytes.total() > peak.1.total() {
                peak = (phase, bytes);
            }
        }
        Ok(peak)
    }

    /// Whether it runs at `context` tokens.
    ///
    /// # Errors
    /// As [`Scenario::bytes_at`].
    pub fn fits(&self, context: u64) -> Result<bool, PlanError> {
        Ok(self.has_room(context) && self.peak(context)?.1.total() <= u128::from(self.memory.bytes()))
    }

    /// Whether a context and its output go into the room that was reserved for a sequence.
    fn has_room(&self, context: u64) -> bool {
        !matches!(self.allocation, Allocation::Reserved(Some(most)) if context + self.output > most)
    }

    /// Refuses what cannot be.
    ///
    /// # Errors
    /// What was wrong, its value, and what would be right; or that the sum is beyond any memory.
    pub fn check(&self) -> Result<(), PlanError> {
        const MOST: u64 = 1 << 40;
        let counts = [
            ("--batch", self.batch),
            ("--concurrency", self.concurrency),
            ("--context", self.context),
            ("--output-tokens", self.output.max(1)),
            ("--prefill-chunk", self.chunk.unwrap_or(1)),
            ("--tensor-parallel", self.tensor_parallel),
            ("--pipeline", self.pipeline),
        ];
        let wrong =
            |what, value: u64, expected: String| Err(PlanError::Value { what, value: value.to_string(), expected });
        for (what, value) in counts {
            if !(1..=MOST).contains(&value) {
                return wrong(what, value, "it must be 1 to 2^40".into());
            }
        }
        let layers = self.subject.layers as u64;
        for (what, value) in [("--pipeline", self.pipeline), ("--offload-layers", self.offload)] {
            if value > layers {
                return wrong(what, value, format!("the model has {layers} layers"));
            }
        }
        let heads = self.subject.heads as u64;
        if self.tensor_parallel > heads {
            return wrong("--tensor-parallel", self.tensor_parallel, format!("the model has {heads} query heads"));
        }
        if let (Allocation::Reserved(Some(most)), false) = (self.allocation, self.has_room(self.context)) {
            let needed = self.context + self.output;
            return wrong("--allocation reserved", most, format!("context and output are {needed} tokens"));
        }
        self.weights.map_or(Ok(()), |format| format.check(&self.subject.architecture))?;
        self.kv.check(&self.subject.groups)?;
        self.check_policy()?;
        if self.peak(self.context)?.1.total() > 1 << 60 {
            return Err(PlanError::Overflow { what: "this" });
        }
        Ok(())
    }
}
