//! From an experiment file to its cells.

use super::cell::{Cell, Device, Measure};
use super::measure::{self, eval, serve};
use super::policy_axis::PolicyText;
use super::spec::{Grid, Spec, SpecError};
use crate::cache::MOST_PAGE_TOKENS;
use crate::policy::{Axis, Budget, PRESETS, Policy, PolicyFile, Registry, Statistic};
use crate::tensor::DType;
use crate::workload::FileSource;

/// An experiment with its cells and the source of its inputs.
pub struct Experiment {
    /// What the file said.
    pub spec: Spec,
    /// The user's tensors, if the inputs are not synthetic.
    pub file: Option<FileSource>,
    /// The points of all grids, each once, in order.
    pub cells: Vec<Cell>,
}

impl Experiment {
    /// Expands the grids for a device, checking every name, shape and budget before anything runs. `origin` stands in
    /// errors.
    ///
    /// # Errors
    /// Names the first value that makes no sense.
    pub fn new(spec: Spec, origin: &str, registry: &Registry, device: Device) -> Result<Self, SpecError> {
        let value = |message: String| SpecError::Value { origin: origin.into(), message };
        let file = match &spec.file {
            Some(file) => Some(FileSource::open(&file.path).map_err(|error| value(error.to_string()))?),
            None => None,
        };
        let workload_hash = match &file {
            Some(file) => file.hash().map_err(|error| value(error.to_string()))?,
            None => {
                let knobs = serde_json::to_string(&spec.synthetic.clone().unwrap_or_default());
                blake3::hash(knobs.expect("knobs are plain data").as_bytes()).to_hex()[..16].to_string()
            }
        };
        let mut cells: Vec<Cell> = Vec::new();
        for (index, grid) in spec.grid.iter().enumerate() {
            let context = format!("grid {} ({})", index + 1, grid.measure.name());
            let registry = &with_file(grid, registry).map_err(|message| value(format!("{context}: {message}")))?;
            let expanded = expand(grid, file.as_ref(), &workload_hash, registry, device)
                .and_then(|cells| {
                    cells.into_iter().map(|cell| check(cell, file.as_ref(), registry)).collect::<Result<Vec<_>, _>>()
                })
                .and_then(|cells| name_file(grid, registry, cells))
                .map_err(|message| value(format!("{context}: {message}")))?;
            for cell in expanded {
                if !cells.contains(&cell) {
                    cells.push(cell);
                }
            }
        }
        Ok(Experiment { spec, file, cells })
    }

    /// The cells that are simulated, not measured.
    pub fn simulated(&self) -> impl Iterator<Item = &Cell> {
        self.cells.iter().filter(|cell| cell.measure == Measure::Serve)
    }

    /// The cells that a model answers.
    pub fn evaluated(&self) -> impl Iterator<Item = &Cell> {
        self.cells.iter().filter(|cell| cell.measure == Measure::Eval)
    }

    /// The cells that are timed in turns.
    pub fn timed(&self) -> impl Iterator<Item = &Cell> {
        self.cells.iter().filter(|cell| !matches!(cell.measure, Measure::Serve | Measure::Eval))
    }

    /// Hash of what is measured and how: runs with the same hash can be resumed and merged.
    pub fn config_hash(&self) -> String {
        let text = serde_json::to_string(&(&self.cells, &self.spec.timing)).expect("cells are plain data");
        blake3::hash(text.as_bytes()).to_hex()[..8].to_string()
    }
}

/// A registry that knows the grid's policy file.
fn with_file(grid: &Grid, registry: &Registry) -> Result<Registry, String> {
    match &grid.policy_file {
        Some(path) => {
            let file = PolicyFile::open(path).map_err(|error| format!("policy_file: {error}"))?;
            Ok(registry.clone().with_file(file))
        }
        None => Ok(registry.clone()),
    }
}

/// Names the grid's policy file in the cells whose policies read it; refuses a file that none reads.
fn name_file(grid: &Grid, registry: &Registry, mut cells: Vec<Cell>) -> Result<Vec<Cell>, String> {
    let (Some(path), Some(file)) = (&grid.policy_file, registry.file()) else { return Ok(cells) };
    let mut is_read = false;
    for cell in &mut cells {
        let policy = cell.policy.as_ref().map(|text| registry.policy(text)).transpose();
        if policy.map_err(|error| error.to_string())?.is_some_and(|policy| !policy.parameters.is_empty()) {
            cell.policy_file = Some(path.display().to_string());
            cell.policy_file_hash = Some(file.hash().into());
            is_read = true;
        }
    }
    match is_read {
        true => Ok(cells),
        false => Err(format!("none of the policies reads a tensor of policy_file '{}'; leave it out", path.display())),
    }
}

/// The product of a grid's axes. The policy `*` stands for every method and every preset, so that a new one is measured
/// without a change of the file.
fn expand(
    grid: &Grid,
    file: Option<&FileSource>,
    workload_hash: &str,
    registry: &Registry,
    device: Device,
) -> Result<Vec<Cell>, String> {
    if grid.measure == Measure::Serve {
        return serve::expand(grid);
    }
    if grid.measure == Measure::Eval {
        return Ok(eval::expand(grid, registry)?.into_iter().map(|cell| Cell { device, ..cell }).collect());
    }
    if !grid.strategy.is_empty() || !grid.trace.is_empty() {
        return Err("strategy and trace belong to measure = \"serve\"".into());
    }
    let of_models = [
        ("model", grid.model.is_empty()),
        ("task", grid.task.is_empty()),
        ("text", grid.text.is_none()),
        ("samples", grid.samples.is_none()),
        ("query_aware", !grid.query_aware),
        ("beyond_limit", !grid.beyond_limit),
    ];
    if let Some((name, _)) = of_models.into_iter().find(|(_, is_absent)| !is_absent) {
        return Err(format!("{name} belongs to measure = \"eval\""));
    }
    if grid.context_tokens.is_empty() {
        return Err("context_tokens is missing; write context_tokens = \"4k\" or a range such as \"1k..32k*2\"".into());
    }
    if grid.measure != Measure::Decode && !grid.page_tokens.is_empty() {
        return Err("page_tokens belongs to measure = \"decode\"".into());
    }
    let from_file = file.map(FileSource::extents);
    if from_file.is_some()
        && !(grid.heads.0.is_empty()
            && grid.head_dim.0.is_empty()
            && grid.batch.0.is_empty()
            && grid.dtype.0.is_empty())
    {
        return Err("heads, head_dim, batch and dtype come from the tensor file; leave them out".into());
    }
    let heads: Vec<(usize, usize)> = match from_file {
        Some((_, q_heads, kv_heads, ..)) => vec![(q_heads, kv_heads)],
        None => grid.heads.0.iter().map(|text| parse_heads(text)).collect::<Result<_, _>>()?,
    };
    if heads.is_empty() {
        return Err("heads are missing; write heads = \"8/2\" (query heads / KV heads)".into());
    }
    let head_dims = from_file.map_or_else(|| grid.head_dim.or(64), |(.., head_dim, _)| vec![head_dim]);
    let dtypes = from_file.map_or_else(|| grid.dtype.or(DType::F32), |(.., dtype)| vec![dtype]);
    if !matches!(grid.measure, Measure::Decode | Measure::Evict) && !grid.kv_format.is_empty() {
        return Err("kv_format belongs to measure = \"decode\", \"evict\" or \"eval\"".into());
    }
    if !grid.kv_format.is_empty() && grid.page_tokens.0.iter().any(|pages| pages.0 == 0) {
        return Err("kv_format is of a cache, which has pages; leave page_tokens = \"contiguous\" out".into());
    }
    let types = grid.types(&dtypes);
    // The sequences of a file may be layers.
    let batches = from_file.map_or_else(|| grid.batch.or(1), |(batch, ..)| vec![batch]);
    let kernels = grid.kernel.or(if grid.measure == Measure::Decode { "decode" } else { "tiled" }.into());
    let evicts = grid.measure == Measure::Evict;
    let chooses = !grid.policy.0.is_empty() || !grid.budget.0.is_empty() || grid.policy_file.is_some();
    if !evicts && (chooses || grid.new_tokens.is_some()) {
        return Err("policy, budget, policy_file and new_tokens belong to measure = \"evict\"".into());
    }
    if !grid.memory.is_empty() {
        return Err("memory belongs to measure = \"eval\"".into());
    }
    if evicts && grid.policy.0.is_empty() {
        return Err("policy is missing; write policy = [\"full\", \"snapkv\"]".into());
    }
    let mut choices = choices(grid, registry)?;
    if !evicts {
        choices.push((None, None));
    }

    let layers = grid.layers.or(1);
    if layers.contains(&0) || (!evicts && !grid.layers.is_empty()) {
        return Err("layers must be at least 1, and belong to measure = \"evict\"".into());
    }
    let pages: Vec<Option<usize>> = match &grid.page_tokens.0[..] {
        [] => vec![None],
        pages => pages.iter().map(|page| Some(page.0)).collect(),
    };
    let mut cells = Vec::new();
    for &context_tokens in grid.context_tokens.0.iter().flat_map(|tokens| &tokens.lengths) {
        for (&(q_heads, kv_heads), &layers) in heads.iter().flat_map(|heads| layers.iter().map(move |n| (heads, n))) {
            if batches.iter().any(|batch| from_file.is_some() && !batch.is_multiple_of(layers)) {
                return Err(format!(
                    "layers is {layers}; the file's {} sequences must be a multiple of it",
                    batches[0]
                ));
            }
            for &head_dim in &head_dims {
                for &(dtype, kv_format) in &types {
                    for &batch in &batches {
                        for seed in grid.seed.or(0) {
                            for kernel in &kernels {
                                for ((policy, budget), &page_tokens) in
                                    choices.iter().flat_map(|choice| pages.iter().map(move |page| (choice, page)))
                                {
                                    cells.push(Cell {
                                        measure: grid.measure,
                                        device,
                                        kernel: kernel.clone(),
                                        layers,
                                        batch: if from_file.is_some() { batch / layers } else { batch },
                                        q_heads,
                                        kv_heads,
                                        head_dim,
                                        context_tokens,
                                        new_tokens: if evicts { grid.new_tokens.unwrap_or(32) } else { 0 },
                                        dtype,
                                        kv_format,
                                        causal: grid.causal,
                                        window: grid.window,
                                        softcap: grid.softcap,
                                        policy: policy.clone(),
                                        budget: budget.clone(),
                                        page_tokens,
                                        seed,
                                        workload_hash: workload_hash.into(),
                                        ..Cell::default()
                                    });
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    Ok(cells)
}

/// A policy and its budget, as they were written.
type Choice = (Option<String>, Option<String>);

/// Policies with their budgets. `full` has none; the policy `*` stands for every method and every preset that needs
/// neither a file that is not given nor a model that is not there.
///
/// # Errors
/// In words, when a policy has no budget.
pub(super) fn choices(grid: &Grid, registry: &Registry) -> Result<Vec<Choice>, String> {
    let Grid { policy: policies, budget: budgets, .. } = grid;
    let bare = registry.clone().without_file();
    let is_out = |policy: &Policy| {
        let missing = policy.parameters.missing();
        let lacks_tensor = missing.is_some_and(|tensor| !registry.file().is_some_and(|file| file.has(tensor)));
        let lacks_model = grid.measure != Measure::Eval && policy.looks_at(Statistic::HiddenStates);
        lacks_tensor || lacks_model
    };
    let methods = registry.entries().iter().map(|entry| entry.name);
    let all = methods.chain(PRESETS.iter().map(|preset| preset.name));
    let all = all.filter(|name| !bare.policy(name).is_ok_and(|policy| is_out(&policy)));
    let all: Vec<String> = all.map(Into::into).collect();
    let one = |PolicyText(policy): &PolicyText| if policy == "*" { all.clone() } else { vec![policy.clone()] };
    let mut choices = Vec::new();
    for policy in policies.0.iter().flat_map(one) {
        if policy == "full" {
            choices.push((Some(policy), None));
        } else if budgets.is_empty() {
            return Err(format!("policy '{policy}' needs a budget; write budget = [0.25, 0.5]"));
        } else {
            choices.extend(budgets.0.iter().map(|budget| (Some(policy.clone()), Some(budget.0.clone()))));
        }
    }
    Ok(choices)
}

/// Refuses a cell that could never run.
fn check(cell: Cell, file: Option<&FileSource>, registry: &Registry) -> Result<Cell, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    // What these can do was asked when they were expanded.
    if matches!(cell.measure, Measure::Serve | Measure::Eval) {
        return Ok(cell);
    }
    cell.shape().check().map_err(|error| text(&error))?;
    // Bytes are counted in 64 bits; the score matrix is the largest thing that could be asked for.
    let shape = cell.shape();
    let extents = [shape.batch, shape.q_heads, shape.q_len, shape.kv_len];
    if extents.iter().map(|&extent| extent as u128).product::<u128>() > 1 << 58 {
        return Err(format!("{} tokens with {} heads are more than can be counted", shape.kv_len, cell.heads()));
    }
    cell.params().check().map_err(|error| text(&error))?;
    measure::known(&cell)?;
    if let Some(tokens) = cell.page_tokens.filter(|&tokens| tokens > MOST_PAGE_TOKENS) {
        return Err(format!(
            "page_tokens is {tokens}; pages hold 1 to {MOST_PAGE_TOKENS} tokens, or write \"contiguous\""
        ));
    }
    if cell.measure == Measure::Evict {
        if !cell.causal || cell.window.is_some() {
            return Err("eviction is measured with a causal mask and without a window".into());
        }
        if cell.new_tokens == 0 {
            return Err("new_tokens is 0; at least 1 decode step is needed to see what eviction does".into());
        }
    }
    if let Some(policy) = &cell.policy {
        let asked = registry.policy(policy).map_err(|error| text(&error))?;
        if asked.looks_at(Statistic::HiddenStates) {
            return Err(format!(
                "policy '{policy}' looks at hidden states, which only a model has; use measure = \"eval\""
            ));
        }
        let extents = [(Axis::Layers, cell.layers), (Axis::KvHeads, cell.kv_heads), (Axis::HeadDim, cell.head_dim)];
        asked.check_parameters(policy, &extents).map_err(|error| text(&error))?;
        if let Some(file) = file {
            asked.rope(policy, file.rope(), cell.head_dim).map_err(|error| text(&error))?;
        }
    }
    if let Some(budget) = &cell.budget {
        let budget: Budget = budget.parse().map_err(|error| text(&error))?;
        let token_bytes = cell.kv_format().token_bytes(cell.head_dim);
        budget
            .tokens(cell.context_tokens, token_bytes, cell.shape().batch * cell.kv_heads)
            .map_err(|error| text(&error))?;
    }
    Ok(cell)
}

/// Reads `8/2` as 8 query heads on 2 KV heads.
fn parse_heads(text: &str) -> Result<(usize, usize), String> {
    let wrong = || format!("heads is '{text}'; write query heads / KV heads such as \"8/2\"");
    let (q_heads, kv_heads) = text.split_once('/').ok_or_else(wrong)?;
    let number = |part: &str| part.trim().parse::<usize>().ok().filter(|heads| (1..=4096).contains(heads));
    Ok((number(q_heads).ok_or_else(wrong)?, number(kv_heads).ok_or_else(wrong)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::PolicyEntry;

    #[test]
    fn a_star_is_every_method_and_preset_with_each_budget() {
        let text = "name = \"x\"\n[[grid]]\nmeasure = \"evict\"\nheads = \"2/1\"\nhead_dim = 8\ncontext_tokens = 64\n\
                    policy = \"*\"\nbudget = [16, 32]\n";
        let own = PolicyEntry { name: "own", about: "", paper: "", parameters: &[], build: |_, _| Ok(Policy::full()) };
        let registry = Registry::default().with(own);
        let spec = Spec::parse(text, "x.toml").unwrap();
        let experiment = Experiment::new(spec, "x.toml", &registry, Device::Cpu).unwrap();
        let policies: Vec<&str> = experiment.cells.iter().filter_map(|cell| cell.policy.as_deref()).collect();
        let count = |name: &str| policies.iter().filter(|policy| **policy == name).count();
        for name in registry.entries().iter().map(|entry| entry.name).chain(PRESETS.iter().map(|preset| preset.name)) {
            let expected = match registry.policy(name).unwrap() {
                policy if policy.parameters.missing().is_some() => 0,
                _ if name == "full" => 1,
                _ => 2,
            };
            assert_eq!(count(name), expected, "{name}");
        }
        assert_eq!(count("own"), 2);
    }
}
