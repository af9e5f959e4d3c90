//! From a grid with `measure = "eval"` to its cells: models and tasks are looked at before anything runs.

use super::{PERPLEXITY, RANDOM};
use crate::attention;
use crate::eval::{EvalError, Frame, Protocol, documents, prompts};
use crate::experiment::cell::Cell;
use crate::experiment::measure::Measure;
use crate::experiment::policy_axis::{Chosen, choices};
use crate::experiment::spec::Grid;
use crate::experiment::weights::WeightsText;
use crate::format::RowFormat;
use crate::memories::memory;
use crate::model::{BUILTIN, ChatTemplate, Config, Eviction, ModelError, Text, fingerprint, locate, packed_bytes};
use crate::policy::{Budget, Registry};
use crate::task;
use crate::tensor::DType;
use std::path::{Path, PathBuf};

/// Samples where nothing is said.
const SAMPLES: usize = 20;
/// Most samples of a task, and pieces of a text: all are written before the first is read.
const MOST_SAMPLES: usize = 1_000_000;
/// Tokens behind the eviction of a text, where nothing is said.
const TEXT_NEW_TOKENS: usize = 128;

/// The cells of a grid: models by contexts by tasks by policies by budgets by seeds.
///
/// # Errors
/// In words, when an axis is missing, one does not belong here, a name means nothing, or a model cannot do what is asked.
pub fn expand(grid: &Grid, registry: &Registry) -> Result<Vec<Cell>, String> {
    if grid.context_tokens.is_empty() {
        return Err("context_tokens is missing; write context_tokens = \"1k\"".into());
    }
    if grid.task.is_empty() == grid.text.is_none() {
        return Err("either task or text is needed; write task = [\"recall\", \"passkey\"], or text = \"FILE\"".into());
    }
    if !grid.memory.is_empty() && !grid.kv_format.is_empty() {
        return Err("a memory keeps keys and values in its own way; leave kv_format or memory out".into());
    }
    if !grid.memory.is_empty() && grid.protocol.0.contains(&Protocol::AwareKept) {
        return Err("a memory keeps no tokens beside its own; leave memory or the protocol aware-kept out".into());
    }
    if grid.policy.is_empty() && grid.memory.is_empty() {
        return Err("policy is missing; write policy = [\"full\", \"snapkv\"]".into());
    }
    if let (Some(protocol), Some(_)) = (grid.protocol.0.first(), &grid.text) {
        return Err(format!("protocol is {protocol}, which is about questions; a text has none, leave it out"));
    }
    if grid.chat && grid.text.is_some() {
        return Err("chat is about questions; a text has none".into());
    }
    if grid.text.is_some() && grid.new_tokens == Some(1) {
        return Err(
            "new_tokens is 1; the first token behind a text comes from the prefill's own logits, in which no eviction \
                    shows: at least 2 are needed"
                .into(),
        );
    }
    for (name, count) in [("samples", grid.samples), ("new_tokens", grid.new_tokens)] {
        if count == Some(0) {
            return Err(format!("{name} is 0; it must be at least 1"));
        }
    }
    let samples = grid.samples.unwrap_or(SAMPLES);
    if let Some(alone) = grid.alone_samples.filter(|&alone| alone > samples) {
        return Err(format!("alone_samples is {alone}; it must be at most the samples, {samples}"));
    }
    if let Some(samples) = grid.samples.filter(|&samples| samples > MOST_SAMPLES) {
        return Err(format!("samples is {samples}; it must be at most {MOST_SAMPLES}"));
    }
    let mut cells = Vec::new();
    for model in grid.model.or(BUILTIN.into()) {
        let opened = Opened::new(&model, grid).map_err(|error| error.to_string())?;
        cells.extend(opened.cells(&model, grid, registry)?);
    }
    Ok(cells)
}

/// What a grid needs to know of a model.
struct Opened {
    config: Config,
    /// That of the weights, in which a model runs where nothing else is asked for.
    dtype: DType,
    text: Text,
    frame: Frame,
    /// The user's text and its file.
    document: Option<(PathBuf, String)>,
    fingerprint: String,
    workload_hash: String,
}

impl Opened {
    fn new(model: &str, grid: &Grid) -> Result<Self, EvalError> {
        let folder = locate(Path::new(model))?;
        let config = Config::read(&folder)?;
        let (_, dtype) = packed_bytes(&folder, &config, None)?;
        let text = Text::open(&folder)?;
        let frame = frame(&folder, &text, grid.chat)?;
        let document = grid.text.as_deref().map(read).transpose()?;
        let mut hasher = blake3::Hasher::new();
        let fingerprint = fingerprint(&folder)?;
        hasher.update(fingerprint.as_bytes());
        if grid.chat {
            hasher.update(bytemuck::cast_slice(&[&frame.before[..], &frame.behind].join(&u32::MAX)));
        }
        if let Some((_, content)) = &document {
            hasher.update(content.as_bytes());
        }
        let workload_hash = hasher.finalize().to_hex()[..16].to_string();
        Ok(Opened { config, dtype, text, frame, document, fingerprint, workload_hash })
    }

    fn cells(&self, model: &str, grid: &Grid, registry: &Registry) -> Result<Vec<Cell>, String> {
        let config = &self.config;
        let tasks = if grid.text.is_some() { vec![PERPLEXITY.to_string()] } else { grid.task.0.clone() };
        let new_tokens = grid.new_tokens.unwrap_or(if grid.text.is_some() { TEXT_NEW_TOKENS } else { 0 });
        let samples = grid.samples.unwrap_or(SAMPLES);
        let protocols = grid.protocol.or(Protocol::Agnostic);
        let policies = with_random(choices(grid, registry)?, registry);
        let policies = policies.into_iter().map(|(policy, budget)| (policy, budget, None));
        let memories = grid.memory.0.iter().map(|memory| (None, None, Some(memory.clone())));
        let choices: Vec<(Option<String>, Option<String>, Option<String>)> = policies.chain(memories).collect();
        for text in &grid.memory.0 {
            let memory = memory(text).map_err(|error| error.to_string())?;
            if !grid.beyond_limit {
                config.check_memory(&*memory).map_err(|error| format!("'{model}': {error}"))?;
            }
        }
        let kernels = grid.kernel.or("tiled".into());
        for kernel in &kernels {
            attention::kernel(kernel).map_err(|error| error.to_string())?;
        }
        let types = grid.types(&grid.dtype.or(self.dtype));
        let contexts = grid.context_tokens.0.iter().flat_map(|tokens| tokens.lengths.iter().copied());
        for (format, tokens) in
            grid.kv_format.0.iter().flat_map(|format| contexts.clone().map(move |tokens| (format, tokens)))
        {
            format.check(config.head_dim, tokens).map_err(|error| format!("'{model}': {error}"))?;
        }
        let weights = grid.weights.or(WeightsText(None));
        let mut hashed = Vec::new();
        for WeightsText(weights) in weights {
            let mut hash = None;
            if let Some(weights) = &weights {
                weights.check(config).map_err(|reason| format!("'{model}': {reason}"))?;
                hash = weights.fingerprint().map_err(|error| error.to_string())?;
            }
            hashed.push((weights, hash));
        }
        let mut activations = Vec::new();
        for format in grid.activations.or(RowFormat::plain(DType::F32)) {
            config.check_activations(format).map_err(|error| format!("'{model}': {error}"))?;
            activations.push(format.rounding());
        }
        let hashed: Vec<_> =
            hashed.iter().flat_map(|weights| activations.iter().map(move |&rounded| (weights, rounded))).collect();
        let formats = hashed.iter().flat_map(|weights| types.iter().map(move |&types| (weights, types)));
        let formats: Vec<_> = formats.collect();
        let passes =
            kernels.iter().flat_map(|kernel| formats.iter().map(move |&(weights, types)| (kernel, weights, types)));
        let passes: Vec<_> = passes.collect();
        let mut cells = Vec::new();
        for &context_tokens in grid.context_tokens.0.iter().flat_map(|tokens| &tokens.lengths) {
            let most = context_tokens + if grid.text.is_some() { new_tokens } else { 0 };
            if most > config.most_tokens() && !grid.beyond_limit {
                return Err(format!(
                    "a sequence of {most} tokens; '{model}' was made for at most {}, write beyond_limit = true to run \
                     it all the same",
                    config.most_tokens()
                ));
            }
            for task in &tasks {
                for seed in grid.seed.or(0) {
                    for &protocol in &protocols {
                        self.check_task(task, context_tokens, (seed, samples, new_tokens), protocol)?;
                    }
                    for (&protocol, (policy, budget, memory)) in
                        protocols.iter().flat_map(|protocol| choices.iter().map(move |choice| (protocol, choice)))
                    {
                        for &(kernel, ((weights, weights_hash), activations), (dtype, kv_format)) in &passes {
                            let cell = Cell {
                                measure: Measure::EVAL,
                                model: Some(model.into()),
                                task: Some(task.clone()),
                                text: grid.text.as_ref().map(|path| path.display().to_string()),
                                samples: Some(samples),
                                alone_samples: grid.alone_samples,
                                protocol: grid.text.is_none().then_some(protocol),
                                chat: grid.chat,
                                beyond_limit: grid.beyond_limit,
                                kernel: kernel.clone(),
                                layers: config.layers,
                                batch: 1,
                                q_heads: config.q_heads,
                                kv_heads: config.kv_heads,
                                head_dim: config.head_dim,
                                context_tokens,
                                new_tokens,
                                dtype,
                                kv_format,
                                weights: weights.clone(),
                                weights_hash: weights_hash.clone(),
                                activations: *activations,
                                causal: true,
                                policy: policy.clone(),
                                budget: budget.clone(),
                                memory: memory.clone(),
                                seed,
                                workload_hash: self.workload_hash.clone(),
                                ..Cell::default()
                            };
                            self.check_policy(&cell, registry)?;
                            cells.push(cell);
                        }
                    }
                }
            }
        }
        Ok(cells)
    }

    /// Refuses a task that this tokenizer or length does not allow, by writing its first sample.
    fn check_task(
        &self,
        name: &str,
        context_tokens: usize,
        (seed, samples, new_tokens): (u64, usize, usize),
        protocol: Protocol,
    ) -> Result<(), String> {
        let written = match &self.document {
            Some((path, content)) => documents(&self.text, (path, content), context_tokens, new_tokens, samples),
            None => task::task(name).map_err(EvalError::from).and_then(|task| {
                prompts((name, &*task), context_tokens, (seed, 0), protocol, (&self.text, &self.frame))
            }),
        };
        written.map(drop).map_err(|error| error.to_string())
    }

    /// Refuses a policy or a budget that means nothing to this model.
    fn check_policy(&self, cell: &Cell, registry: &Registry) -> Result<(), String> {
        let Some(name) = &cell.policy else { return Ok(()) };
        let policy = registry.policy(name).map_err(|error| error.to_string())?;
        let budget = match &cell.budget {
            Some(text) => Some(text.parse::<Budget>().map_err(|error| error.to_string())?),
            None => None,
        };
        let eviction = Eviction { policy: &policy, name, budget, seed: cell.seed, repeat: None };
        eviction.check(&self.config).map_err(|error| error.to_string())?;
        // Gates may be of the model, whichever weights it has, or of these.
        let (of_cell, of_model) = (cell.weights_hash.as_ref().unwrap_or(&self.fingerprint), &self.fingerprint);
        policy.check_base(of_cell, Some(of_model)).map_err(|error| error.to_string())?;
        policy.check_format(name, budget.as_ref(), cell.kv_format()).map_err(|error| error.to_string())?;
        let lists = cell.layers * cell.kv_heads;
        let token_bytes = cell.kv_format().token_bytes(cell.head_dim);
        policy
            .budget_tokens(name, budget.as_ref(), cell.context_tokens, token_bytes, lists)
            .map(drop)
            .map_err(|error| error.to_string())
    }
}

/// These policies, and random eviction at every budget at which something is evicted: what a method must be better than.
pub(in crate::experiment::measure) fn with_random(mut choices: Vec<Chosen>, registry: &Registry) -> Vec<Chosen> {
    let evicts = |policy: &str| registry.policy(policy).is_ok_and(|policy| policy.scorer.is_some());
    let random = |(policy, budget): &Chosen| {
        let named = policy.as_deref().filter(|name| evicts(name)).and(budget.clone());
        named.map(|budget| (Some(RANDOM.to_string()), Some(budget)))
    };
    let missing: Vec<Chosen> = choices.iter().filter_map(random).collect();
    for choice in missing {
        if !choices.contains(&choice) {
            choices.push(choice);
        }
    }
    choices
}

/// What stands around a model's prompts.
pub(super) fn frame(folder: &Path, text: &Text, chat: bool) -> Result<Frame, EvalError> {
    if chat { Frame::chat(&ChatTemplate::open(folder)?, text) } else { Frame::plain(text) }
}

/// A text file.
pub(super) fn read(path: &Path) -> Result<(PathBuf, String), ModelError> {
    let content = std::fs::read_to_string(path).map_err(|error| {
        let is_ours = path.starts_with("models/text") && !path.exists();
        let from = if is_ours { "; scripts/python-reference writes it" } else { "" };
        ModelError::Config { path: path.into(), reason: format!("{error}{from}") }
    })?;
    Ok((path.into(), content))
}
