//! Blocks that are shared out over ranks (Megatron-LM, arXiv 1909.08053): each rank has some KV heads with their query heads, and some of
//! the MLP's inner elements.
//!
//! Matrices into the block are cut by rows, those that leave it by columns, so that what a rank computes in between is its own, and
//! the outputs of ranks are added up: after attention and after the MLP, and on the way back before each. Embedding, norms and
//! output matrix are on every rank, which computes the same with them as any other. A rank's model is a smaller one, with fewer heads
//! and a narrower MLP: everything else that knows a model need not know of ranks.

use super::activations::{Extents, Recompute};
use super::parameters::{Parameter, Parameters};
use crate::model::Config;
use crate::model::config::{Family, Norms};
use crate::ranks::{Comm, parts};

/// How a parameter is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cut {
    /// Every rank has it; with `summed` each has a part of its gradient.
    Whole {
        /// Whether the gradients of ranks are added up.
        summed: bool,
    },
    Rows,
    Columns,
}

/// The model of one of `ranks` that share each block.
///
/// # Errors
/// When heads or the MLP's inner elements cannot be dealt evenly, in words.
pub fn share(config: &Config, ranks: usize) -> Result<Config, String> {
    if ranks == 1 {
        return Ok(config.clone());
    }
    let parts = [("KV heads", config.kv_heads), ("inner elements of the MLP", config.ffn)];
    if let Some((what, count)) = parts.iter().find(|(_, count)| !count.is_multiple_of(ranks)) {
        return Err(format!("the model has {count} {what}; --tensor-parallel {ranks} needs a multiple of {ranks}"));
    }
    if config.family == Family::Phi3 {
        return Err("the model keeps q, k and v in one matrix; --tensor-parallel needs one of each".into());
    }
    let [q_heads, kv_heads, ffn] = [config.q_heads, config.kv_heads, config.ffn].map(|count| count / ranks);
    Ok(Config { q_heads, kv_heads, ffn, ..config.clone() })
}

/// How a parameter is cut, by its name in the model's files.
pub(super) fn cut(parameter: &Parameter) -> Cut {
    let mut parts = parameter.name.rsplit('.');
    let (kind, layer) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
    match (layer, kind) {
        ("q_proj" | "k_proj" | "v_proj" | "gate_proj" | "up_proj", _) => Cut::Rows,
        ("o_proj" | "down_proj", "weight") => Cut::Columns,
        ("q_norm" | "k_norm", _) => Cut::Whole { summed: true },
        _ => Cut::Whole { summed: false },
    }
}

/// The part of a whole parameter's numbers that a rank has.
pub(super) fn part_of(parameter: &Parameter, values: &[f32], rank: usize, ranks: usize) -> Vec<f32> {
    match cut(parameter) {
        Cut::Whole { .. } => values.to_vec(),
        Cut::Rows => values[parts(values.len(), ranks).swap_remove(rank)].to_vec(),
        Cut::Columns => {
            let width = parameter.shape[parameter.shape.len() - 1];
            let columns = parts(width, ranks).swap_remove(rank);
            values.chunks_exact(width).flat_map(|row| &row[columns.clone()]).copied().collect()
        }
    }
}

/// A whole parameter's numbers, of those that each rank has.
pub(super) fn whole_of(parameter: &Parameter, of_ranks: &[Vec<f32>]) -> Vec<f32> {
    match cut(parameter) {
        Cut::Whole { .. } => of_ranks[0].clone(),
        Cut::Rows => of_ranks.concat(),
        Cut::Columns => {
            let width = parameter.shape[parameter.shape.len() - 1] / of_ranks.len();
            let rows = of_ranks[0].len() / width;
            let row = |row: usize| of_ranks.iter().flat_map(move |part| &part[row * width..(row + 1) * width]);
            (0..rows).flat_map(row).copied().collect()
        }
    }
}

/// f32 elements of scratch for sums over the ranks that share blocks.
pub(super) fn sums(extents: &Extents<'_>, ranks: usize) -> usize {
    Comm::sum_scratch(ranks, (extents.rows() * extents.config().hidden).div_ceil(ranks))
}

/// Bytes that a rank sends in a step to those that it shares blocks with, besides the norm of the gradient.
pub(super) fn step_sent_bytes(extents: &Extents<'_>, recompute: Recompute, tensor: &Comm) -> u64 {
    let (parameters, config) = (extents.parameters, extents.config());
    let after = usize::from(config.norms == Norms::BeforeAndAfter);
    let again = match recompute {
        Recompute::None => 0,
        Recompute::Selective => 2 * after,
        Recompute::Full => 1 + after,
    };
    let sums = 2 * config.layers + (2 + again) * (config.layers - parameters.first_trained);
    let summed = |parameter: &&Parameter| cut(parameter) == Cut::Whole { summed: true } && parameter.gradient.is_some();
    let of_gains = |parameter: &Parameter| tensor.sum_sent_bytes(parameter.range.len());
    sums as u64 * tensor.sum_sent_bytes(extents.rows() * config.hidden)
        + parameters.all.iter().filter(summed).map(of_gains).sum::<u64>()
}

/// Each parameter of a model, and what a rank has of it.
pub(super) fn pairs<'a>(
    whole: &'a Parameters,
    share: &'a Parameters,
) -> impl Iterator<Item = (&'a Parameter, &'a Parameter)> + Clone {
    whole.all.iter().zip(&share.all)
}
