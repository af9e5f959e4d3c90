//! Grids of passes over tensors: what `forward`, `backward`, `decode` and `evict` have in common before they run.

use super::Scope;
use crate::attention::cuda::cuda_kernel;
use crate::attention::kernel;
use crate::cache::MOST_PAGE_TOKENS;
use crate::experiment::cell::{Cell, Device, HEAD_DIM};
use crate::experiment::policy_axis::choices;
use crate::experiment::spec::Grid;
use crate::policy::{Axis, Budget, BudgetError, Statistic};
use crate::tensor::DType;
use crate::workload::FileSource;

/// Most layers of a grid.
const MOST_LAYERS: usize = 1024;

/// The fields of a grid that every pass over tensors has.
macro_rules! fields_of_passes {
    ($($more:literal),*) => {
        &["kernel", "context_tokens", "heads", "head_dim", "batch", "dtype", "causal", "window", "softcap", "knobs", $($more),*]
    };
}
pub(super) use fields_of_passes;

/// The product of a grid's axes, each cell checked. `kernel` is measured where none is given, and cells decode
/// `new_tokens` where nothing is said.
///
/// # Errors
/// In words, when an axis is missing or a cell could never run.
pub(super) fn expand(grid: &Grid, scope: &Scope<'_>, kernel: &str, new_tokens: usize) -> Result<Vec<Cell>, String> {
    let from_file = scope.file.map(FileSource::extents);
    let new_tokens = grid.new_tokens.unwrap_or(new_tokens);
    let contexts: Vec<usize> = match (grid.context_tokens.is_empty(), from_file) {
        (false, _) => grid.context_tokens.0.iter().flat_map(|tokens| tokens.lengths.clone()).collect(),
        // All that the file has but what is decoded behind it.
        (true, Some((.., tokens, _, _))) if tokens > new_tokens => vec![tokens - new_tokens],
        (true, Some((.., tokens, _, _))) => {
            return Err(format!(
                "the file has {tokens} tokens, and {new_tokens} are decoded; write a smaller new_tokens"
            ));
        }
        (true, None) => {
            let example = "write context_tokens = \"4k\" or a range such as \"1k..32k*2\"";
            return Err(format!("context_tokens is missing; {example}"));
        }
    };
    let tensors = [grid.heads.is_empty(), grid.head_dim.is_empty(), grid.batch.is_empty(), grid.dtype.is_empty()];
    if from_file.is_some() && tensors.contains(&false) {
        return Err("heads, head_dim, batch and dtype come from the tensor file; leave them out".into());
    }
    let heads: Vec<(usize, usize)> = match from_file {
        Some((_, q_heads, kv_heads, ..)) => vec![(q_heads, kv_heads)],
        None => grid.heads.0.iter().map(|text| parse_heads(text)).collect::<Result<_, _>>()?,
    };
    if heads.is_empty() {
        return Err("heads are missing; write heads = \"8/2\" (query heads / KV heads)".into());
    }
    let head_dims = from_file.map_or_else(|| grid.head_dim.or(HEAD_DIM), |(.., head_dim, _)| vec![head_dim]);
    let dtypes = from_file.map_or_else(|| grid.dtype.or(DType::F32), |(.., dtype)| vec![dtype]);
    if !grid.kv_format.is_empty() && grid.page_tokens.0.iter().any(|pages| pages.0 == 0) {
        return Err("kv_format is of a cache, which has pages; leave page_tokens = \"contiguous\" out".into());
    }
    let types = grid.types(&dtypes);
    // The sequences of a file may be layers.
    let batches = from_file.map_or_else(|| grid.batch.or(1), |(batch, ..)| vec![batch]);
    let kernels = grid.kernel.or(kernel.into());
    let mut choices = choices(grid, scope.registry)?;
    if grid.policy.is_empty() {
        choices.push((None, None));
    }
    let of_layers = grid.measure.fields().contains(&"layers");
    let layers = grid.layers.or(scope.file.filter(|_| of_layers).map_or(1, FileSource::layers));
    if let Some(count) = layers.iter().find(|count| !(1..=MOST_LAYERS).contains(*count)) {
        return Err(format!("layers is {count}; it must be from 1 to {MOST_LAYERS}"));
    }
    let pages: Vec<Option<usize>> = match &grid.page_tokens.0[..] {
        [] => vec![None],
        pages => pages.iter().map(|page| Some(page.0)).collect(),
    };
    let mut cells = Vec::new();
    for &context_tokens in &contexts {
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
                                    let cell = Cell {
                                        measure: grid.measure,
                                        device: scope.device,
                                        kernel: kernel.clone(),
                                        layers,
                                        batch: if from_file.is_some() { batch / layers } else { batch },
                                        q_heads,
                                        kv_heads,
                                        head_dim,
                                        context_tokens,
                                        new_tokens,
                                        dtype,
                                        kv_format,
                                        causal: grid.causal,
                                        window: grid.window,
                                        softcap: grid.softcap,
                                        policy: policy.clone(),
                                        budget: budget.clone(),
                                        page_tokens,
                                        seed,
                                        workload_hash: scope.workload_hash.into(),
                                        ..Cell::default()
                                    };
                                    check(&cell, scope)?;
                                    cells.push(cell);
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

/// Refuses a cell that could never run.
fn check(cell: &Cell, scope: &Scope<'_>) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    cell.shape().check().map_err(|error| text(&error))?;
    cell.kv_format().check(cell.head_dim, cell.context_tokens).map_err(|error| text(&error))?;
    // Bytes are counted in 64 bits; the score matrix is the largest thing that could be asked for.
    let shape = cell.shape();
    let extents = [shape.batch, shape.q_heads, shape.q_len, shape.kv_len];
    if extents.iter().map(|&extent| extent as u128).product::<u128>() > 1 << 58 {
        return Err(format!("{} tokens with {} heads are more than can be counted", shape.kv_len, cell.heads()));
    }
    cell.params().check().map_err(|error| text(&error))?;
    if let (false, Some(window)) = (cell.causal, cell.window) {
        return Err(format!(
            "causal is false, and a window of {window} is of keys up to a query's own; leave one of them out"
        ));
    }
    check_kernel(cell)?;
    if let Some(tokens) = cell.page_tokens.filter(|&tokens| tokens > MOST_PAGE_TOKENS) {
        return Err(format!(
            "page_tokens is {tokens}; pages hold 1 to {MOST_PAGE_TOKENS} tokens, or write \"contiguous\""
        ));
    }
    if let Some(policy) = &cell.policy {
        let asked = scope.registry.policy(policy).map_err(|error| text(&error))?;
        if asked.looks_at(Statistic::HiddenStates) {
            return Err(format!(
                "policy '{policy}' looks at hidden states, which only a model has; use measure = \"eval\""
            ));
        }
        if asked.looks_at(Statistic::Reconstruction) {
            return Err(format!(
                "policy '{policy}' has a model repeat its context, and there is none; use measure = \"eval\""
            ));
        }
        let extents = [
            (Axis::Layers, cell.layers),
            (Axis::QHeads, cell.q_heads),
            (Axis::KvHeads, cell.kv_heads),
            (Axis::HeadDim, cell.head_dim),
            (Axis::RopePairs, cell.head_dim / 2),
        ];
        let budget = cell.budget.as_deref().map(str::parse).transpose().map_err(|error: BudgetError| text(&error))?;
        asked.check_format(policy, budget.as_ref(), cell.kv_format()).map_err(|error| text(&error))?;
        asked.check_parameters(policy, &extents).map_err(|error| text(&error))?;
        if let Some(file) = scope.file {
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
    Ok(())
}

/// Refuses a kernel that is unknown here and on every other device.
fn check_kernel(cell: &Cell) -> Result<(), String> {
    let cpu = kernel(&cell.kernel).map(drop);
    let known = match cell.device {
        Device::Cpu => cpu,
        // Experiments that name kernels of the CPU run on a GPU all the same; those cells are skipped.
        Device::Cuda => cpu.or_else(|_| cuda_kernel(&cell.kernel).map(drop)),
    };
    known.map_err(|error| error.to_string())
}

/// Reads `8/2` as 8 query heads on 2 KV heads.
fn parse_heads(text: &str) -> Result<(usize, usize), String> {
    let wrong = || format!("heads is '{text}'; write query heads / KV heads such as \"8/2\"");
    let (q_heads, kv_heads) = text.split_once('/').ok_or_else(wrong)?;
    let number = |part: &str| part.trim().parse::<usize>().ok().filter(|heads| (1..=4096).contains(heads));
    Ok((number(q_heads).ok_or_else(wrong)?, number(kv_heads).ok_or_else(wrong)?))
}
