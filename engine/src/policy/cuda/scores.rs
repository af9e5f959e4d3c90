//! Scoring plans as launches of `kernels/score.cu` and of the export of attention columns.

use super::{DeviceContext, DevicePolicyError};
use crate::attention::cuda::export;
use crate::attention::export::OverQueries;
use crate::cache::cuda::DeviceCache;
use crate::device::cuda::{CudaError, DeviceBuffer, Launch, Program, SCORE, Scoring};
use crate::format::GpuRows;
use crate::policy::{ScoringPlan, Then};

/// Slots of a block.
const ROWS: usize = 32;

/// Bytes of scratch memory that scores take besides themselves.
pub fn scratch_bytes(plan: &ScoringPlan, lists: usize, width: usize, head_dim: usize) -> u64 {
    let elements = match plan {
        ScoringPlan::Positions | ScoringPlan::KeyNorm | ScoringPlan::Accumulated { .. } | ScoringPlan::Gates => 0,
        ScoringPlan::KeyUnlike => lists * width.div_ceil(ROWS) * head_dim,
        ScoringPlan::Recent { then: Then::Nothing, .. } => 0,
        ScoringPlan::Recent { .. } => lists * width,
        ScoringPlan::TimesValueNorm(plan) => return scratch_bytes(plan, lists, width, head_dim),
    };
    4 * elements as u64
}

/// Begins the scores of a scoring plan, `[B, Hkv, longest list]`; `scratch` has [`scratch_bytes`].
///
/// # Errors
/// When queries are missing, a buffer is too small, or a kernel cannot be launched.
pub(super) fn begin(
    plan: &ScoringPlan,
    context: &DeviceContext<'_>,
    cache: &DeviceCache,
    [scores, scratch]: [&mut DeviceBuffer; 2],
) -> Result<(), DevicePolicyError> {
    let (lists, width) = (cache.shape().lists(), cache.max_len());
    let scratch_bytes = scratch_bytes(plan, lists, width, cache.shape().head_dim) as usize;
    let plain = |function, scores: &mut DeviceBuffer| {
        launch(context, cache, function, &Scoring::new(scores, None, [lists, width], context.seen_tokens)?)
    };
    match plan {
        ScoringPlan::Positions => plain("score_positions", scores)?,
        ScoringPlan::KeyNorm => plain("score_key_norm", scores)?,
        ScoringPlan::KeyUnlike => {
            let raw = Some((&*scratch, scratch_bytes));
            let scoring = Scoring::new(scores, raw, [lists, width], context.seen_tokens)?;
            launch(context, cache, "anchor_sum", &scoring)?;
            launch(context, cache, "anchor_join", &scoring)?;
            launch(context, cache, "score_unlike", &scoring)?;
        }
        ScoringPlan::Accumulated { age } => {
            plain("score_copy", scores)?;
            if *age {
                plain("score_age", scores)?;
            }
        }
        ScoringPlan::Gates => plain("score_copy", scores)?,
        ScoringPlan::Recent { queries, reduction, then: Then::Nothing } => {
            context.begin_columns(cache, *queries, *reduction, scores)?;
        }
        ScoringPlan::Recent { queries, reduction, then } => {
            context.begin_columns(cache, *queries, *reduction, scratch)?;
            let raw = Some((&*scratch, scratch_bytes));
            let scoring = Scoring::new(scores, raw, [lists, width], context.seen_tokens)?;
            let q_len = context.queries.map_or(0, |seen| seen.q_len);
            let asked = queries.unwrap_or(q_len).min(q_len);
            match *then {
                Then::MeanOverHeads => launch(context, cache, "score_over_heads", &scoring)?,
                Then::Pooled { mean, pool, behind } => {
                    let (kernel, is_max) = pool.shape();
                    let divisor = if mean { asked as f32 } else { 1.0 };
                    launch(context, cache, "score_pool", &scoring.pooled(kernel, is_max, divisor, behind))?;
                }
                Then::Negated => launch(context, cache, "score_pool", &scoring.pooled(1, false, -1.0, 0))?,
                Then::Nothing => unreachable!("columns that are scores are written in place, above"),
            }
        }
        ScoringPlan::TimesValueNorm(plan) => {
            begin(plan, context, cache, [&mut *scores, scratch])?;
            plain("score_value_norm", scores)?;
        }
    }
    Ok(())
}

/// What is compiled for the scores of a scoring plan over a cache of such rows and head dim.
pub(super) fn programs(plan: &ScoringPlan, rows: GpuRows, head_dim: usize) -> Vec<Program> {
    let columns = |queries| export::program(rows, head_dim, queries);
    let mut programs = vec![program(rows, head_dim)];
    programs.extend(match plan {
        ScoringPlan::Positions | ScoringPlan::KeyNorm | ScoringPlan::KeyUnlike | ScoringPlan::Gates => None,
        ScoringPlan::Accumulated { .. } => Some(columns(OverQueries::Sum)),
        ScoringPlan::Recent { reduction, .. } => Some(columns(reduction.queries)),
        ScoringPlan::TimesValueNorm(plan) => return self::programs(plan, rows, head_dim),
    });
    programs
}

fn program(rows: GpuRows, head_dim: usize) -> Program {
    Program { source: SCORE, dtype: rows.dtype(), head_dim, macros: rows.macros() }
}

/// Begins a function of `score.cu`.
fn launch(
    context: &DeviceContext<'_>,
    cache: &DeviceCache,
    function: &'static str,
    scoring: &Scoring<'_>,
) -> Result<(), CudaError> {
    let (shape, lists) = (cache.shape(), cache.lists()?);
    let program = program(cache.rows(), shape.head_dim);
    let (grid, threads) = match function {
        "anchor_join" => ([shape.lists(), 1, 1], 1024),
        _ => ([cache.max_len().div_ceil(ROWS), shape.lists(), 1], 128),
    };
    let launch = Launch { function, grid, threads, shared_bytes: 0 };
    let device = context.runtime.device();
    device.begin(&device.ready(&*context.runtime.module(&program)?, &[launch])?, &[&lists, scoring])
}
