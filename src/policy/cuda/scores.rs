//! Recipes as launches of `kernels/score.cu` and of the export of attention columns.

use super::{DeviceContext, DevicePolicyError};
use crate::attention::cuda::export;
use crate::attention::export::OverQueries;
use crate::cache::cuda::DeviceCache;
use crate::device::cuda::{CudaError, DeviceBuffer, Launch, Program, Scoring, Source};
use crate::memory::Label;
use crate::policy::{Recipe, Then};
use crate::tensor::DType;

const SOURCE: Source = Source { name: "score.cu", text: include_str!("../../../kernels/score.cu") };
/// Slots of a block.
const ROWS: usize = 32;

/// Bytes of scratch memory that scores take besides themselves.
pub fn scratch_bytes(recipe: &Recipe, lists: usize, width: usize, head_dim: usize) -> u64 {
    let elements = match recipe {
        Recipe::Positions | Recipe::KeyNorm | Recipe::Accumulated { .. } => 0,
        Recipe::KeyUnlike => lists * width.div_ceil(ROWS) * head_dim,
        Recipe::Recent { then: Then::Nothing, .. } => 0,
        Recipe::Recent { .. } => lists * width,
        Recipe::TimesValueNorm(recipe) => return scratch_bytes(recipe, lists, width, head_dim),
    };
    4 * elements as u64
}

/// Writes the scores of a recipe, `[B, Hkv, longest list]`. Returns the GPU's time in nanoseconds.
///
/// # Errors
/// When queries are missing, there is no room, or a kernel fails.
pub(super) fn write(
    recipe: &Recipe,
    context: &DeviceContext<'_>,
    cache: &DeviceCache,
    scores: &mut DeviceBuffer,
) -> Result<u64, DevicePolicyError> {
    let (lists, width) = (cache.shape().lists(), cache.max_len());
    let scratch_bytes = scratch_bytes(recipe, lists, width, cache.shape().head_dim);
    let plain = |function, scores: &mut DeviceBuffer| {
        run(context, cache, function, &Scoring::new(scores, None, [lists, width], context.seen_tokens)?)
    };
    let scratch = || context.runtime.device().alloc(context.arena, Label::Workspace, scratch_bytes);
    Ok(match recipe {
        Recipe::Positions => plain("score_positions", scores)?,
        Recipe::KeyNorm => plain("score_key_norm", scores)?,
        Recipe::KeyUnlike => {
            let sums = scratch()?;
            let raw = Some((&sums, scratch_bytes as usize));
            let scoring = Scoring::new(scores, raw, [lists, width], context.seen_tokens)?;
            run(context, cache, "anchor_sum", &scoring)? + run(context, cache, "score_unlike", &scoring)?
        }
        Recipe::Accumulated { age } => {
            let copied = plain("score_copy", scores)?;
            copied + if *age { plain("score_age", scores)? } else { 0 }
        }
        Recipe::Recent { queries, reduction, then: Then::Nothing } => {
            context.columns(cache, *queries, *reduction, scores)?
        }
        Recipe::Recent { queries, reduction, then } => {
            let mut columns = scratch()?;
            let exported = context.columns(cache, *queries, *reduction, &mut columns)?;
            let raw = Some((&columns, scratch_bytes as usize));
            let scoring = Scoring::new(scores, raw, [lists, width], context.seen_tokens)?;
            let q_len = context.queries.map_or(0, |seen| seen.q_len);
            let asked = queries.unwrap_or(q_len).min(q_len);
            exported
                + match *then {
                    Then::MeanOverHeads => run(context, cache, "score_over_heads", &scoring)?,
                    Then::Pooled { mean, kernel, is_max, behind } => {
                        let divisor = if mean { asked as f32 } else { 1.0 };
                        run(context, cache, "score_pool", &scoring.pooled(kernel, is_max, divisor, behind))?
                    }
                    Then::Negated => run(context, cache, "score_pool", &scoring.pooled(1, false, -1.0, 0))?,
                    Then::Nothing => unreachable!("columns that are scores are written in place, above"),
                }
        }
        Recipe::TimesValueNorm(recipe) => {
            let scored = write(recipe, context, cache, scores)?;
            scored + plain("score_value_norm", scores)?
        }
    })
}

/// What is compiled for the scores of a recipe over a cache of a type and head dim.
pub(super) fn programs(recipe: &Recipe, dtype: DType, head_dim: usize) -> Vec<Program> {
    let columns = |queries| export::program(dtype, head_dim, queries);
    let mut programs = vec![program(dtype, head_dim)];
    programs.extend(match recipe {
        Recipe::Positions | Recipe::KeyNorm | Recipe::KeyUnlike => None,
        Recipe::Accumulated { .. } => Some(columns(OverQueries::Sum)),
        Recipe::Recent { reduction, .. } => Some(columns(reduction.queries)),
        Recipe::TimesValueNorm(recipe) => return self::programs(recipe, dtype, head_dim),
    });
    programs
}

fn program(dtype: DType, head_dim: usize) -> Program {
    Program { source: SOURCE, dtype, head_dim, macros: vec![] }
}

/// Runs a function of `score.cu`.
fn run(
    context: &DeviceContext<'_>,
    cache: &DeviceCache,
    function: &'static str,
    scoring: &Scoring<'_>,
) -> Result<u64, CudaError> {
    let (shape, lists) = (cache.shape(), cache.lists()?);
    let program = program(shape.dtype, shape.head_dim);
    let grid = [cache.max_len().div_ceil(ROWS), cache.shape().lists(), 1];
    let launch = Launch { function, grid, threads: 128, shared_bytes: 0 };
    context.runtime.device().run(&*context.runtime.module(&program)?, &[launch], &[&lists, scoring])
}
