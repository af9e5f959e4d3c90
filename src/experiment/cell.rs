//! A cell: one point of an experiment's grid, fully resolved.

use super::measure::{Choice, Measure};
use super::weights::OtherWeights;
use crate::attention::{Params, Shape};
use crate::eval::Protocol;
use crate::format::{KvFormat, RowFormat};
use crate::model::BUILTIN;
use crate::tensor::DType;
use crate::workload::Knobs;
use serde::{Deserialize, Deserializer, Serialize};
use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

/// Where a cell runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The processor's threads.
    #[default]
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

impl Device {
    /// Name as it stands in records and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Device::Cpu => "cpu",
            Device::Cuda => "cuda",
        }
    }

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
    fn is_cpu(&self) -> bool {
        *self == Device::Cpu
    }
}

/// What has a cell, by the comparison that the cell belongs to, which is named by the id of what its cells share
/// ([`Cell::without_choice`]): in the order of the first of each.
pub fn by_comparison<T>(all: impl IntoIterator<Item = T>, cell: impl Fn(&T) -> &Cell) -> Vec<(String, Vec<T>)> {
    let mut places: HashMap<String, usize> = HashMap::new();
    let mut comparisons: Vec<(String, Vec<T>)> = Vec::new();
    for one in all {
        let id = cell(&one).without_choice().id();
        let place = *places.entry(id.clone()).or_insert(comparisons.len());
        match comparisons.get_mut(place) {
            Some((_, cells)) => cells.push(one),
            None => comparisons.push((id, vec![one])),
        }
    }
    comparisons
}

/// Elements of a head where a grid does not say.
pub const HEAD_DIM: usize = 64;

fn one() -> usize {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
fn is_one(layers: &usize) -> bool {
    *layers == 1
}

/// Reads a protocol, or whether it was query-aware.
fn protocol_or_query_aware<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Protocol>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Protocol(Protocol),
        QueryAware(bool),
    }
    Ok(Some(match Written::deserialize(deserializer)? {
        Written::Protocol(protocol) => protocol,
        Written::QueryAware(true) => Protocol::AwareWhole,
        Written::QueryAware(false) => Protocol::Agnostic,
    }))
}

/// One point of the grid. Its canonical JSON, with the workload's hash in it, is what [`Cell::id`] hashes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// What is measured.
    pub measure: Measure,
    /// Where; the CPU where nothing is said.
    #[serde(default, skip_serializing_if = "Device::is_cpu")]
    pub device: Device,
    /// Model of `eval`, `edit`, `train` and `tune`: a Hugging Face folder, a GGUF file, or `builtin`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Task of `eval`, with parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<String>,
    /// Text file whose pieces are gone on with, for the task `perplexity`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Samples of `eval`, at most; drawn episodes of `recall` and `edit`; rounds of `train` and `tune`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<usize>,
    /// How many of these it also runs alone, for its times and memory; `None`: as many as its comparison leaves time for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alone_samples: Option<usize>,
    /// What a policy has seen of the question of `eval` when it evicts; `None` where there is no question. Records from
    /// before protocols had names hold `query_aware` instead, which came closest to [`Protocol::AwareWhole`].
    #[serde(
        default,
        alias = "query_aware",
        deserialize_with = "protocol_or_query_aware",
        skip_serializing_if = "Option::is_none"
    )]
    pub protocol: Option<Protocol>,
    /// Whether prompts of `eval` are written in the model's chat template.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub chat: bool,
    /// Whether a sequence may be longer than the model was made for.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub beyond_limit: bool,
    /// Kernel, with parameters: `tiled:br=64,bc=256`. Empty for [`Measure::SERVE`], where all extents are 0.
    pub kernel: String,
    /// Layers, for [`Measure::EVICT`] and [`Measure::EVAL`]; 1 otherwise.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub layers: usize,
    /// `B`.
    pub batch: usize,
    /// `Hq`.
    pub q_heads: usize,
    /// `Hkv`.
    pub kv_heads: usize,
    /// `D`.
    pub head_dim: usize,
    /// Tokens of the context.
    pub context_tokens: usize,
    /// Tokens decoded after the context (0 where nothing is decoded). For [`Measure::EVAL`] the most of an answer, 0
    /// being twice the right one's and 8; of a text, those behind the eviction.
    pub new_tokens: usize,
    /// Element type of q, k, v and o.
    pub dtype: DType,
    /// How the cache keeps keys and values; as `dtype` where nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_format: Option<KvFormat>,
    /// The weights of `eval`; those of the model's own files where nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights: Option<OtherWeights>,
    /// What the activations of `eval` are rounded to before each linear layer; nothing where nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activations: Option<RowFormat>,
    /// The fingerprint of weights that come from other files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights_hash: Option<String>,
    /// Bottom-right causal mask.
    pub causal: bool,
    /// Sliding window, if any.
    pub window: Option<usize>,
    /// Soft-cap of the logits, if any.
    pub softcap: Option<f32>,
    /// Eviction policy, with parameters; `None` where nothing is evicted by design.
    pub policy: Option<String>,
    /// Budget as it was written: `0.25`, `512` or `64MiB`.
    pub budget: Option<String>,
    /// Memory of `eval` in place of the cache, or memory of facts of `recall` and `edit`, with parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<String>,
    /// File that the policy read tensors of, where it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy_file: Option<String>,
    /// BLAKE3 hash of that file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy_file_hash: Option<String>,
    /// Tokens of a page in `decode`, with 0 for contiguous tensors; `None` for the cache's own pages, filled at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_tokens: Option<usize>,
    /// Allocation strategy of `serve`, with parameters: `paged:page=16`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<String>,
    /// Request trace of `serve`, with parameters: `sharegpt:steps=50000`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<String>,
    /// Maps of `edit` between the model and a memory of facts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maps: Option<String>,
    /// Facts that are written, for `edit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub facts: Option<usize>,
    /// Episode of `recall`, with parameters: `forget:count=64`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub episode: Option<String>,
    /// Ranks that share a pass of `ranks`, as `ring:4`, or training, as `zero:ranks=4,stage=3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<String>,
    /// What `tune` trains, and how, as `lora:rank=8`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tuning: Option<String>,
    /// Seed of the workload, of the policy, of the trace and of the episode.
    pub seed: u64,
    /// Knobs of the synthetic workload, where they are not the experiment's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub knobs: Option<Knobs>,
    /// Hash of the workload: its knobs, or the bytes of the tensor file.
    pub workload_hash: String,
}

impl Default for Cell {
    /// A cell of nothing, for the fields that a measure does not have.
    fn default() -> Self {
        Cell {
            measure: Measure::SERVE,
            device: Device::Cpu,
            model: None,
            task: None,
            text: None,
            samples: None,
            alone_samples: None,
            protocol: None,
            chat: false,
            beyond_limit: false,
            kernel: String::new(),
            layers: 1,
            batch: 0,
            q_heads: 0,
            kv_heads: 0,
            head_dim: 0,
            context_tokens: 0,
            new_tokens: 0,
            dtype: DType::F32,
            kv_format: None,
            weights: None,
            weights_hash: None,
            activations: None,
            causal: false,
            window: None,
            softcap: None,
            policy: None,
            budget: None,
            memory: None,
            policy_file: None,
            policy_file_hash: None,
            page_tokens: None,
            strategy: None,
            trace: None,
            maps: None,
            facts: None,
            episode: None,
            ranks: None,
            tuning: None,
            seed: 0,
            knobs: None,
            workload_hash: String::new(),
        }
    }
}

impl Cell {
    /// Hash of the resolved cell: the same cell has the same id in every run.
    pub fn id(&self) -> String {
        let canonical = serde_json::to_string(self).expect("a cell is plain data");
        blake3::hash(canonical.as_bytes()).to_hex()[..16].to_string()
    }

    /// The cell without what is compared ([`Choice`]): cells that agree in the rest are one question
    /// with several answers.
    pub fn without_choice(&self) -> Cell {
        let same = self.clone();
        match self.measure.compares() {
            Choice::Policy => {
                let bare = Cell { policy: None, budget: None, memory: None, kv_format: None, ..same };
                Cell {
                    weights: None,
                    weights_hash: None,
                    activations: None,
                    policy_file: None,
                    policy_file_hash: None,
                    ..bare
                }
            }
            Choice::Kernel => Cell { kernel: String::new(), ..same },
            Choice::Strategy => Cell { strategy: None, ..same },
            Choice::Ranks => Cell { ranks: None, ..same },
            Choice::Tuning => Cell { tuning: None, ..same },
        }
    }

    /// What is compared: the policy, or the memory in place of the cache.
    pub fn chosen(&self) -> Option<&str> {
        self.policy.as_deref().or(self.memory.as_deref())
    }

    /// What a policy has seen of a question when it evicts.
    pub fn protocol(&self) -> Protocol {
        self.protocol.unwrap_or_default()
    }

    /// How the cache keeps keys and values, those in full in the type of the pass.
    pub fn kv_format(&self) -> KvFormat {
        self.kv_format.unwrap_or(self.dtype.into()).in_pass(self.dtype)
    }

    /// Extents of the pass over the whole context (of one step for [`Measure::DECODE`]), layers folded into the batch.
    pub fn shape(&self) -> Shape {
        Shape {
            batch: self.layers * self.batch,
            q_heads: self.q_heads,
            kv_heads: self.kv_heads,
            q_len: self.measure.q_len(self.context_tokens),
            kv_len: self.context_tokens,
            head_dim: self.head_dim,
        }
    }

    /// Scale, mask and soft-cap.
    pub fn params(&self) -> Params {
        Params { softcap: self.softcap, window: self.window, ..Params::new(self.head_dim, self.causal) }
    }

    /// Heads as people write them: `8/2` is 8 query heads on 2 KV heads.
    pub fn heads(&self) -> String {
        format!("{}/{}", self.q_heads, self.kv_heads)
    }

    /// A short name for progress bars and tables.
    pub fn label(&self) -> String {
        let seed = if self.seed == 0 { String::new() } else { format!(" seed {}", self.seed) };
        self.label_of_any_seed() + &seed
    }

    fn label_of_any_seed(&self) -> String {
        let many = |count: usize, what: &str| if count > 1 { format!(" {what} {count}") } else { String::new() };
        if let (Some(strategy), Some(trace)) = (&self.strategy, &self.trace) {
            return format!("{} {strategy} {trace}", self.measure.name());
        }
        if let (Some(memory), Some(episode)) = (&self.memory, &self.episode) {
            return format!("{} {memory} {episode}", self.measure.name());
        }
        if let (Some(model), Some(tuning)) = (&self.model, &self.tuning) {
            let tokens = crate::units::tokens(self.context_tokens);
            return format!("{} {model} {tuning}{} {tokens}", self.measure.name(), many(self.batch, "batch"));
        }
        if let Some(facts) = self.facts {
            return format!("{} {} {facts} facts", self.measure.name(), self.chosen().unwrap_or_default());
        }
        let policy = match (self.chosen(), &self.budget) {
            (Some(policy), Some(budget)) => format!(" {policy}@{budget}"),
            (Some(policy), None) => format!(" {policy}"),
            _ => String::new(),
        };
        let (tokens, device) = (crate::units::tokens(self.context_tokens), self.device.name());
        let device = if self.device == Device::Cpu { String::new() } else { format!(" {device}") };
        let format = self.kv_format.map_or(String::new(), |format| format!(" kv {format}"));
        if let Some(task) = &self.task {
            let weights =
                self.weights.as_ref().map_or(String::new(), |weights| format!(" weights {}", weights.words()));
            let activations =
                self.activations.map_or(String::new(), |activations| format!(" activations {activations}"));
            let protocol = self.protocol.map_or(String::new(), |protocol| format!(" {protocol}"));
            let chat = if self.chat { " chat" } else { "" };
            let dtype = if self.dtype == DType::F32 { String::new() } else { format!(" {}", self.dtype) };
            let new = if self.new_tokens == 0 { String::new() } else { format!("+{}", self.new_tokens) };
            let text = self.text.as_deref().map_or(String::new(), |text| format!(" {}", file_name(text)));
            let measure = self.measure.name();
            let kernel = match &self.kernel[..] {
                "" | "tiled" => String::new(),
                kernel => format!(" {kernel}"),
            };
            let model = self.model.as_deref().filter(|&model| model != BUILTIN).map_or(String::new(), |model| {
                let name = file_name(model);
                format!(" {}", name.strip_suffix(".gguf").unwrap_or(&name))
            });
            return format!(
                "{measure}{model}{kernel} {task}{text}{protocol}{chat}{policy}{weights}{activations}{dtype}{format} \
                 {tokens}{new}{device}"
            );
        }
        let pages = match self.page_tokens {
            Some(0) => " contiguous".into(),
            Some(tokens) => format!(" page {tokens}"),
            None => String::new(),
        };
        let knobs = self.knobs.as_ref().map_or(String::new(), |knobs| format!(" ({knobs})"));
        let ranks = self.ranks.as_ref().map_or(String::new(), |ranks| format!(" {ranks}"));
        let dim = if self.head_dim == HEAD_DIM { String::new() } else { format!(" D {}", self.head_dim) };
        let shape = dim + &many(self.batch, "batch") + &many(self.layers, "layers");
        let causal = if self.causal { "" } else { " not causal" };
        let window = self.window.map_or(String::new(), |window| format!(" window {window}"));
        let softcap = self.softcap.map_or(String::new(), |cap| format!(" soft-cap {cap}"));
        format!(
            "{}{ranks} {} {}{shape}{policy}{pages} {}{format} {tokens}{causal}{window}{softcap}{device}{knobs}",
            self.measure.name(),
            self.kernel,
            self.heads(),
            self.dtype
        )
    }
}

/// The last part of a path.
fn file_name(path: &str) -> Cow<'_, str> {
    Path::new(path).file_name().map_or(path.into(), |name| name.to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two cells of a run that look alike on screen cannot be told apart in a warning or a table of what has no room.
    #[test]
    fn cells_that_differ_have_other_labels() {
        let eval = Cell {
            measure: Measure::EVAL,
            model: Some("models/llama.gguf".into()),
            task: Some("recall".into()),
            protocol: Some(Protocol::Agnostic),
            kernel: "tiled".into(),
            policy: Some("h2o".into()),
            budget: Some("0.5".into()),
            context_tokens: 64,
            batch: 1,
            ..Cell::default()
        };
        let text = Cell { task: Some("perplexity".into()), protocol: None, new_tokens: 8, ..eval.clone() };
        let named = |text_file: &str| Cell { text: Some(text_file.into()), ..text.clone() };
        let tune = Cell {
            measure: Measure::TUNE,
            model: Some(BUILTIN.into()),
            tuning: Some("lora:rank=4".into()),
            context_tokens: 64,
            batch: 1,
            ..Cell::default()
        };
        for (cell, expected) in [
            (eval.clone(), "eval llama recall agnostic h2o@0.5 64"),
            (Cell { dtype: DType::Bf16, ..eval.clone() }, "eval llama recall agnostic h2o@0.5 bf16 64"),
            (Cell { chat: true, ..eval.clone() }, "eval llama recall agnostic chat h2o@0.5 64"),
            (Cell { new_tokens: 4, ..eval.clone() }, "eval llama recall agnostic h2o@0.5 64+4"),
            (Cell { seed: 1, ..eval.clone() }, "eval llama recall agnostic h2o@0.5 64 seed 1"),
            (named("texts/a.txt"), "eval llama perplexity a.txt h2o@0.5 64+8"),
            (Cell { new_tokens: 16, ..named("texts/b.txt") }, "eval llama perplexity b.txt h2o@0.5 64+16"),
            (tune.clone(), "tune builtin lora:rank=4 64"),
            (Cell { batch: 2, ..tune }, "tune builtin lora:rank=4 batch 2 64"),
        ] {
            assert_eq!(cell.label(), expected);
        }
    }

    #[test]
    fn cells_of_a_comparison_are_together_wherever_they_stand() {
        let of = |batch: usize, strategy: &str| Cell { batch, strategy: Some(strategy.into()), ..Cell::default() };
        let cells = [of(1, "a"), of(2, "a"), of(1, "b"), of(2, "c"), of(1, "c")];
        let found = by_comparison(&cells, |cell| cell);
        let strategies = |cells: &[&Cell]| cells.iter().filter_map(|cell| cell.strategy.clone()).collect::<String>();
        assert_eq!(found.iter().map(|(_, cells)| strategies(cells)).collect::<Vec<_>>(), ["abc", "ac"]);
        assert!(found.iter().all(|(id, cells)| cells.iter().all(|cell| cell.without_choice().id() == *id)));
    }
}
