//! Memory of training: parameters, gradients, optimizer and activations, and how sharding divides them.
//!
//! States follow ZeRO (arXiv 1910.02054): an optimizer's row says how many bytes a parameter, a gradient and its states
//! take; stage 1 divides the states over the data-parallel cards, stage 2 the gradients too, stage 3 (FSDP) also the
//! parameters, and then gathers the largest unit. Activations follow Korthikanti et al. (arXiv 2205.05198): what a block
//! keeps for its backward pass, with nothing recomputed, attention recomputed, or everything.

use super::PlanError;
use super::source::{Parts, Subject};
use super::weights::WeightFormat;
use serde::Serialize;

/// Bytes per parameter of an optimizer's way of training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Optimizer {
    /// Name on the command line.
    pub name: &'static str,
    /// One line.
    #[serde(skip)]
    pub about: &'static str,
    /// Of a parameter as the pass reads it.
    pub parameter: u64,
    /// Of a gradient.
    pub gradient: u64,
    /// Of the optimizer's states, a master copy included.
    pub states: u64,
}

impl Optimizer {
    /// All of them.
    pub fn bytes(&self) -> u64 {
        self.parameter + self.gradient + self.states
    }
}

/// The ways of training, from 8 to 20 bytes a parameter, and with a factored mean square, which is next to nothing.
pub const OPTIMIZERS: [Optimizer; 8] = [
    optimizer("adamw-bf16", "everything in bf16, no master copy", [2, 2, 4]),
    optimizer("adamw-8bit", "master copy in f32, states in 8 bits", [2, 2, 6]),
    optimizer("adamw-bf16-states", "master copy in f32, states in bf16", [2, 2, 8]),
    optimizer("sgd", "master copy and momentum in f32", [2, 2, 8]),
    optimizer("adamw", "mixed precision: master copy and states in f32", [2, 2, 12]),
    optimizer("adamw-f32-gradients", "mixed precision, gradients in f32", [2, 4, 12]),
    optimizer("adamw-accumulated", "gradients in 16 bits, added up in f32", [2, 6, 12]),
    optimizer("adafactor", "master copy in f32, a mean square of each row and column", [2, 2, 4]),
];

const fn optimizer(name: &'static str, about: &'static str, [parameter, gradient, states]: [u64; 3]) -> Optimizer {
    Optimizer { name, about, parameter, gradient, states }
}

/// The usual one: AdamW in mixed precision.
pub const ADAMW: Optimizer = OPTIMIZERS[4];

/// Low-rank adapters on every matrix of all blocks, in f32, over weights that stay as they are (arXiv 2106.09685, 2305.14314).
#[derive(Debug, Clone, Copy)]
pub struct Adapters {
    /// Their rank.
    pub rank: u64,
    /// How the weights below are kept.
    pub base: &'static WeightFormat,
}

/// What is computed again in the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Nothing.
    None,
    /// Attention's scores.
    Selective,
    /// All but the input of each block.
    Full,
}

/// More bytes than there are anywhere.
const ENDLESS: u128 = 1 << 60;

/// What lies in the host's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Offload {
    /// Nothing.
    None,
    /// Gradients and the optimizer's states.
    Optimizer,
    /// Parameters too.
    All,
}

/// A way of training.
#[derive(Debug, Clone)]
pub struct Training<'a> {
    /// The model.
    pub subject: &'a Subject,
    /// Bytes a parameter.
    pub optimizer: Optimizer,
    /// What is trained, where it is not all.
    pub adapters: Option<Adapters>,
    /// ZeRO's stage, 0 to 3.
    pub zero: u64,
    /// Cards that each see other sequences.
    pub data_parallel: u64,
    /// Cards that share each layer.
    pub tensor_parallel: u64,
    /// Whether they share the sequence between their layers too.
    pub sequence_parallel: bool,
    /// Cards that share the layers.
    pub pipeline: u64,
    /// Sequences of a card at once.
    pub micro_batch: u64,
    /// Tokens of a sequence.
    pub context: u64,
    /// What is computed again.
    pub recompute: Recompute,
    /// Whether attention keeps its scores for the backward pass, as without tiles.
    pub keeps_scores: bool,
    /// What lies in the host's memory.
    pub offload: Offload,
    /// Context and libraries of a card.
    pub overhead_bytes: u64,
}

/// Bytes of a card, by term.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spent {
    /// Parameters.
    pub parameter_bytes: u64,
    /// Gradients.
    pub gradient_bytes: u64,
    /// The optimizer's states.
    pub optimizer_bytes: u64,
    /// The unit in work, where parameters lie elsewhere (stage 3, or the host): the largest, and its gradients in 16 bits.
    pub gathered_bytes: u64,
    /// What blocks keep for the backward pass.
    pub activation_bytes: u64,
    /// Logits: 16 bits, f32, and a gradient in f32.
    pub loss_bytes: u64,
    /// Context and libraries.
    pub context_bytes: u64,
    /// Bytes in the host's memory, for each card.
    pub host_bytes: u64,
    /// Bytes over the link in a step, for each card.
    pub link_bytes: u64,
}

impl Spent {
    /// What a card needs.
    pub fn total(&self) -> u64 {
        self.terms().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Names and bytes on the card.
    pub fn terms(&self) -> [(&'static str, u64); 7] {
        [
            ("parameters", self.parameter_bytes),
            ("gradients", self.gradient_bytes),
            ("optimizer", self.optimizer_bytes),
            ("gathered unit", self.gathered_bytes),
            ("activations", self.activation_bytes),
            ("loss", self.loss_bytes),
            ("context", self.context_bytes),
        ]
    }
}

/// Bytes of parameters, gradients and optimizer states of a card that holds `parameters`, with ZeRO over `cards`.
pub fn states(parameters: u64, optimizer: Optimizer, zero: u64, cards: u64) -> [u64; 3] {
    let of = |bytes: u64, from: u64| (parameters * bytes).div_ceil(if zero >= from { cards } else { 1 });
    [of(optimizer.parameter, 3), of(optimizer.gradient, 2), of(optimizer.states, 1)]
}

/// Bytes that a GPT-like block keeps of a token of the residual stream, in 16 bits: `h (34 + 5 a s / h)` (arXiv 2205.05198,
/// equations 1 to 4 and 6), divided over `t` cards, with or without the sequence.
pub fn gpt_bytes_per_token(
    hidden: u64,
    heads: u64,
    context: u64,
    tensor: u64,
    sequence: bool,
    recompute: Recompute,
) -> f64 {
    let [h, a, s, t] = [hidden, heads, context, tensor].map(|n| n as f64);
    let shared = if sequence { t } else { 1.0 };
    let scores = if recompute == Recompute::None { 5.0 * a * s / t } else { 0.0 };
    match recompute {
        Recompute::Full => 2.0 * h / shared,
        _ => h * (10.0 / shared + 24.0 / t) + scores,
    }
}

/// A card's place in a pipeline.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Only,
    First,
    Last,
}

impl Training<'_> {
    /// Bytes of what is trained, by parameter. Adapters are kept in f32 and are their own master copy.
    pub fn updated(&self) -> Optimizer {
        match self.adapters {
            None => self.optimizer,
            Some(_) => {
                let states = self.optimizer.states.saturating_sub(4);
                Optimizer { parameter: 4, gradient: 4, states, ..self.optimizer }
            }
        }
    }

    /// Bytes that a block keeps of a token.
    fn block_bytes_per_token(&self) -> f64 {
        let shape = &self.subject.architecture;
        let [h, heads, kv_heads, d] = [shape.hidden, shape.heads, shape.kv_heads, shape.head_dim].map(|n| n as f64);
        let tensor = self.tensor_parallel as f64;
        if shape.gpt {
            let recompute = match (self.recompute, self.keeps_scores) {
                (Recompute::None, false) => Recompute::Selective,
                (recompute, _) => recompute,
            };
            let (hidden, heads) = (shape.hidden as u64, shape.heads as u64);
            return gpt_bytes_per_token(
                hidden,
                heads,
                self.context,
                self.tensor_parallel,
                self.sequence_parallel,
                recompute,
            );
        }
        let shared = if self.sequence_parallel { tensor } else { 1.0 };
        let ffn = match shape.experts {
            Some(experts) => (experts.ffn * (experts.active + experts.shared)) as f64,
            None => shape.ffn as f64,
        };
        // RMS norms, SwiGLU: two norms with their inputs, q, k, v, the output, gate, up, their product and its factor.
        let attention = match shape.mla {
            Some(mla) => 2.0 * heads * (2 * (mla.nope + mla.rope) + 2 * mla.v) as f64,
            None => 2.0 * (2.0 * heads + 2.0 * kv_heads) * d,
        };
        let kept = 8.0 * h / shared + (attention + 8.0 * ffn) / tensor;
        let scores = match (self.recompute, self.keeps_scores) {
            (Recompute::None, true) => 5.0 * heads * self.context as f64 / tensor,
            // The log-sum-exp of each row.
            _ => 4.0 * heads / tensor,
        };
        match self.recompute {
            Recompute::Full => 2.0 * h / shared,
            _ => kept + scores,
        }
    }

    /// Bytes of the fullest card. Of a pipeline's stages the first has the embedding and keeps activations of as many
    /// micro-batches as there are stages, the last has the output matrix and the logits.
    pub fn spent(&self) -> Spent {
        let stages = if self.pipeline == 1 { &[Stage::Only][..] } else { &[Stage::First, Stage::Last] };
        let spent = stages.iter().map(|&stage| self.spent_by(stage));
        spent.max_by_key(Spent::total).expect("a stage")
    }

    /// What a stage holds of parameters or of their bytes: layers as far as any stage has them, and what is outside of blocks at
    /// its end.
    fn of_stage(&self, whole: Parts, stage: Stage) -> u64 {
        let layers = (self.subject.layers as u64).div_ceil(self.pipeline);
        let here = self.subject.fullest_stage(whole.layers, None, layers);
        match stage {
            Stage::Only => whole.total(),
            Stage::First => here + whole.first_end(),
            Stage::Last => here + whole.last_end(self.subject.architecture.tied),
        }
    }

    fn spent_by(&self, stage: Stage) -> Spent {
        let shape = &self.subject.architecture;
        let states = |parameters: Parts, optimizer| {
            let here = self.of_stage(parameters, stage).div_ceil(self.tensor_parallel);
            states(here, optimizer, self.zero, self.data_parallel)
        };
        let largest = (0..shape.layers).map(|layer| shape.layer(layer).block()).max().unwrap_or(0);
        let largest = largest.max((shape.vocab * shape.hidden) as u64) / self.tensor_parallel;
        let ([parameter, gradient, optimizer], unit) = match self.adapters {
            None => {
                let outside = shape.outside();
                let last = outside.head + outside.vectors;
                let outside = outside.embedding + last;
                let all = Parts { outside, last, layers: self.subject.parameters - outside };
                (states(all, self.optimizer), 4 * largest)
            }
            Some(Adapters { rank, base }) => {
                let own = Parts { layers: adapter_parameters(self.subject, rank), ..Parts::default() };
                let [parameter, gradient, optimizer] = states(own, self.updated());
                let largest = base.largest_unit_bytes(shape);
                let base = self.subject.weight_bytes(Some(base));
                let shared = self.tensor_parallel * if self.zero >= 3 { self.data_parallel } else { 1 };
                // A frozen unit has no gradients, and comes as it is kept.
                let unit = largest / self.tensor_parallel;
                ([parameter + self.of_stage(base, stage).div_ceil(shared), gradient, optimizer], unit)
            }
        };
        let comes = self.zero >= 3 && self.data_parallel > 1 || self.offload == Offload::All;
        let gathered_bytes = if comes { unit } else { 0 };
        let tokens = (self.micro_batch * self.context) as f64;
        let layers = (shape.layers as u64).div_ceil(self.pipeline);
        let micro_batches = if stage == Stage::First { self.pipeline } else { 1 };
        let kept = tokens * (layers * micro_batches) as f64 * self.block_bytes_per_token();
        // The block that is being computed again holds all that it needs for its backward pass, its scores too.
        let with = |recompute| Training { recompute, ..self.clone() }.block_bytes_per_token();
        let one_more = tokens
            * match self.recompute {
                Recompute::None => 0.0,
                Recompute::Selective => with(Recompute::None) - with(Recompute::Selective),
                Recompute::Full => with(Recompute::None),
            };
        let loss = match stage {
            Stage::First => 0.0,
            Stage::Only | Stage::Last => 10.0 * tokens * shape.vocab as f64 / self.tensor_parallel as f64,
        };
        // What is offloaded is shared out from stage 1 on: a card keeps and moves the gradients of its own part.
        let owned =
            |bytes: u64, from| if (1..from).contains(&self.zero) { bytes.div_ceil(self.data_parallel) } else { bytes };
        let gradient = if self.offload == Offload::None { gradient } else { owned(gradient, 2) };
        let (mut here, mut host) = ([parameter, gradient, optimizer], 0);
        let moved = match self.offload {
            Offload::None => 0..0,
            Offload::Optimizer => 1..3,
            Offload::All => 0..3,
        };
        here[moved].iter_mut().for_each(|bytes| host += std::mem::take(bytes));
        // Gradients go down and new parameters come up, of a card's own part; parameters that lie there come up for both passes.
        let link = match self.offload {
            Offload::None => 0,
            Offload::Optimizer => gradient + owned(parameter, 3),
            Offload::All => gradient + 2 * parameter,
        };
        Spent {
            parameter_bytes: here[0],
            gradient_bytes: here[1],
            optimizer_bytes: here[2],
            gathered_bytes,
            activation_bytes: (kept + one_more) as u64,
            loss_bytes: loss as u64,
            context_bytes: self.overhead_bytes,
            host_bytes: host,
            link_bytes: link,
        }
    }

    /// Refuses what cannot be.
    ///
    /// # Errors
    /// What was wrong, its value, and what would be right.
    pub fn check(&self) -> Result<(), PlanError> {
        let wrong = |what, value: u64, expected: &str| {
            Err(PlanError::Value { what, value: value.to_string(), expected: expected.into() })
        };
        let counts = [
            ("--data-parallel", self.data_parallel),
            ("--tensor-parallel", self.tensor_parallel),
            ("--pipeline", self.pipeline),
            ("--micro-batch", self.micro_batch),
            ("--context", self.context),
        ];
        if let Some((what, value)) = counts.into_iter().find(|(_, value)| !(1..=1 << 28).contains(value)) {
            return wrong(what, value, "it must be 1 to 2^28");
        }
        if let Some(Adapters { rank, base }) = self.adapters {
            base.check(&self.subject.architecture)?;
            if !(1..=self.subject.architecture.hidden as u64).contains(&rank) {
                return wrong("--adapters", rank, "a rank is 1 to the model's hidden size");
            }
            if !["adamw", "adamw-8bit", "adafactor"].contains(&self.optimizer.name) {
                let (what, value) = ("--optimizer", self.optimizer.name.into());
                return Err(PlanError::Value {
                    what,
                    value,
                    expected: "adapters are kept in f32; it must be adamw, adamw-8bit or adafactor".into(),
                });
            }
        }
        if self.zero > 3 {
            return wrong("--zero", self.zero, "the stages are 0 to 3");
        }
        if self.pipeline > self.subject.layers as u64 {
            return wrong("--pipeline", self.pipeline, "it must not be more than the model's layers");
        }
        if self.tensor_parallel > self.subject.heads as u64 {
            return wrong(
                "--tensor-parallel",
                self.tensor_parallel,
                "it must not be more than the model's query heads",
            );
        }
        let spent = self.spent();
        let terms = spent.terms().map(|(_, bytes)| bytes).into_iter().chain([spent.host_bytes, spent.link_bytes]);
        match terms.map(u128::from).sum::<u128>() {
            0..=ENDLESS => Ok(()),
            _ => Err(PlanError::Overflow { what: "a step" }),
        }
    }
}

/// Numbers in adapters of a rank on every matrix of all blocks, experts and their routers included.
pub fn adapter_parameters(subject: &Subject, rank: u64) -> u64 {
    let shape = &subject.architecture;
    let matrices = (0..shape.layers).flat_map(|layer| shape.matrices(layer));
    rank * matrices.map(|[inputs, outputs, count]| count * (inputs + outputs)).sum::<u64>()
}
