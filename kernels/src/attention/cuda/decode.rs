//! `decode` on a GPU: `kernels/decode.cu`, over dense tensors or pages.

use super::{CudaKernel, Plan, code_bytes, row_bytes, strip_takes};
use crate::attention::{AttentionError, Params, Shape, WorkspaceSize};
use crate::device::cuda::{Launch, Limits, Program, Source};
use crate::format::GpuRows;
use crate::tensor::DType;

const SOURCE: Source = Source { name: "decode.cu", text: include_str!("../../../decode.cu") };
/// Warps of a block and stages of each warp's ring, the best first.
const RINGS: [(usize, usize); 9] = [(16, 3), (8, 4), (8, 3), (8, 2), (4, 4), (4, 3), (4, 2), (2, 3), (2, 2)];
/// Shared memory of a block whose multiprocessor is its own: more in flight made every format slower on an H100.
const BLOCK_BYTES: usize = 152 << 10;
/// Threads of a block of the merge.
const MERGE_THREADS: u32 = 256;
/// Least keys of a split: below it the merge costs more than the splits gain.
const LEAST_SPLIT: usize = 256;
/// What a block costs besides its keys, in the time of so many: its start, the first keys' way to it, its partial result.
const BLOCK_KEYS: usize = 128;
/// Waves of blocks that splits may make, for each that there is without splits.
const MOST_WAVES: usize = 4;

/// Few queries against many keys.
pub(super) struct Decode;

impl CudaKernel for Decode {
    fn name(&self) -> &'static str {
        "decode"
    }

    fn plan(&self, shape: &Shape, params: &Params, rows: GpuRows, limits: &Limits) -> Result<Plan, AttentionError> {
        plan(shape, params, rows, limits, 0)
    }
}

/// What runs for a decode step over a cache in pages of `page_tokens` tokens; `shape.kv_len` is the length of the longest
/// list. [`Plan::forward_paged`] runs it.
///
/// # Errors
/// As [`CudaKernel::plan`]; when pages have no tokens, or pages of codes no whole number of steps.
pub fn decode_paged(
    shape: &Shape,
    params: &Params,
    rows: GpuRows,
    limits: &Limits,
    page_tokens: usize,
) -> Result<Plan, AttentionError> {
    if page_tokens == 0 {
        return Err(AttentionError::Option("pages of 0 tokens; pages have at least 1".into()));
    }
    let keys = step_keys(rows.dtype());
    if rows.is_coded() && !page_tokens.is_multiple_of(keys) {
        let wanted = format!("codes on CUDA lie in pages of a multiple of {keys} tokens in a pass of {}", rows.dtype());
        return Err(AttentionError::Option(format!("pages of {page_tokens} tokens; {wanted}")));
    }
    plan(shape, params, rows, limits, page_tokens)
}

/// The plan for pages of `page_tokens` tokens, or for dense tensors where it is 0.
fn plan(
    shape: &Shape,
    params: &Params,
    stored: GpuRows,
    limits: &Limits,
    page_tokens: usize,
) -> Result<Plan, AttentionError> {
    let (head_dim, dtype) = (shape.head_dim, stored.dtype());
    strip_takes(Decode.name(), head_dim)?;
    let Tiling { rows, warps, stages, shared_bytes, grid } = Tiling::new(shape, stored, limits, page_tokens);
    let Splits { splits, split_keys } = grid.splits(seen(shape, params, dtype));
    let [row_tiles, lists] = grid.rest;
    let partial = Launch {
        function: "decode_partial",
        grid: [splits, row_tiles, lists],
        threads: 32 * warps as u32,
        shared_bytes: shared_bytes as u32,
    };
    let merge =
        Launch { function: "decode_merge", grid: [shape.rows(), 1, 1], threads: MERGE_THREADS, shared_bytes: 0 };
    let mut macros = vec![("PAGE_TOKENS", page_tokens), ("WARPS", warps), ("STAGES", stages), ("ROWS", rows)];
    macros.extend(stored.macros());
    let program = Program { source: SOURCE, dtype, head_dim, macros };
    let workspace = WorkspaceSize { scores: 0, scratch: splits * shape.rows() * (head_dim + 2) };
    let mut plan = Plan::new(Decode.name(), program, vec![partial, merge], workspace, (shape, params), stored)?;
    (plan.extents.splits, plan.extents.split_keys) = (splits, split_keys);
    Ok(plan)
}

/// Scratch memory for every step over lists of at most `shape.kv_len` tokens in pages of `page_tokens`, however long they
/// are: a shorter list may be cut into more splits.
pub fn step_workspace(
    shape: &Shape,
    params: &Params,
    rows: GpuRows,
    limits: &Limits,
    page_tokens: usize,
) -> WorkspaceSize {
    let most = Tiling::new(shape, rows, limits, page_tokens).grid.most_splits(seen(shape, params, rows.dtype()));
    WorkspaceSize { scores: 0, scratch: most * shape.rows() * (shape.head_dim + 2) }
}

/// Keys of a warp's step: what is the left operand of a product of tensor cores, or as many as CUDA cores have lanes for.
fn step_keys(dtype: DType) -> usize {
    if dtype == DType::F32 { 8 } else { 16 }
}

/// Query rows of a block: as few as there are, since those that are not there cost as much. A product of tensor cores has 8 of
/// them; above D 192 there are no registers for two.
fn block_rows(rows: usize, head_dim: usize, dtype: DType) -> usize {
    let rows = rows.next_power_of_two();
    match dtype {
        DType::F32 => rows.clamp(4, 16),
        DType::Bf16 | DType::F16 => rows.clamp(8, if head_dim <= 192 { 16 } else { 8 }),
    }
}

/// Keys of the longest list that any query sees, from where the kernel's first split begins: under a window at most a step
/// before the first of them.
fn seen(shape: &Shape, params: &Params, dtype: DType) -> usize {
    let keys = step_keys(dtype);
    params.window.map_or(shape.kv_len, |window| shape.kv_len.min(window.saturating_add(shape.q_len + keys - 2)))
}

/// What follows from the queries and the GPU alone.
struct Tiling {
    /// Query rows of a block.
    rows: usize,
    warps: usize,
    stages: usize,
    shared_bytes: usize,
    grid: Grid,
}

impl Tiling {
    fn new(shape: &Shape, stored: GpuRows, limits: &Limits, page_tokens: usize) -> Self {
        let (all_rows, dtype) = (shape.group() * shape.q_len, stored.dtype());
        let (rows, keys) = (block_rows(all_rows, shape.head_dim, dtype), step_keys(dtype));
        // Where the keys of a step do not lie in one page, each one's place is held.
        let places = if page_tokens.is_multiple_of(keys) { 0 } else { 8 * keys };
        // A tile in each stage; where rows are codes, these in each stage, and one tile if they are not taken in place.
        let row = row_bytes(shape.head_dim, dtype);
        let (codes, in_place) = (code_bytes(stored, keys, shape.head_dim), stored.in_place(shape.head_dim));
        let parts = [0, 1].map(|part| match (codes[part], in_place[part]) {
            (0, _) => (0, keys * row),
            (codes, true) => (0, codes),
            (codes, false) => (keys * row, codes),
        });
        // A warp's partial result takes the place of its ring.
        let result = rows * (row / dtype.bytes() + 2) * 4;
        let ring = |stages| parts.iter().map(|(once, each)| once + stages * each).sum::<usize>();
        let ring = |stages| ring(stages).max(result).next_multiple_of(128);
        let bytes = |(warps, stages)| rows * row + warps * (ring(stages) + places);
        // One block of many warps leaves fewer partial results than several of few, as long as a warp's registers suffice: 128
        // where there are 16. On CUDA cores two small ones hide each other's waiting.
        let (blocks, most_warps, most_bytes) = match dtype {
            DType::F32 => (2, 4, usize::MAX),
            DType::Bf16 | DType::F16 => (1, if rows * shape.head_dim <= 1024 { 16 } else { 8 }, BLOCK_BYTES),
        };
        let room = Limits { block_shared_bytes: limits.block_shared_bytes.min(most_bytes), ..*limits };
        let rings: Vec<_> = RINGS.into_iter().filter(|&(warps, _)| warps <= most_warps).collect();
        let (warps, stages) = room.roomiest(blocks, &rings, bytes);
        let shared_bytes = bytes((warps, stages));
        let each = room.blocks_each(shared_bytes).clamp(1, blocks);
        let rest = [all_rows.div_ceil(rows), shape.batch * shape.kv_heads];
        let grid = Grid { rest, slots: each * limits.multiprocessors, step: warps * keys };
        Tiling { rows, warps, stages, shared_bytes, grid }
    }
}

/// Blocks of a launch besides its splits.
struct Grid {
    /// Tiles of rows, and lists.
    rest: [usize; 2],
    /// Blocks that run at a time.
    slots: usize,
    /// Keys of a block's step.
    step: usize,
}

/// How keys are split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Splits {
    splits: usize,
    split_keys: usize,
}

impl Grid {
    /// Cuts `seen` keys so that blocks come in whole waves: of the most splits that fit as many waves as there are without
    /// splits, twice as many, and so on, those whose waves take the least time.
    fn splits(&self, seen: usize) -> Splits {
        let cut = |times| {
            let wanted = self.fitting(times).clamp(1, seen.div_ceil(LEAST_SPLIT).max(1));
            let split_keys = seen.div_ceil(wanted).next_multiple_of(self.step);
            Splits { splits: seen.div_ceil(split_keys).max(1), split_keys }
        };
        (1..=MOST_WAVES).map(cut).min_by_key(|cut| self.cost(*cut)).expect("there is a first choice")
    }

    /// Splits with which blocks fit so many times the waves that there are without splits.
    fn fitting(&self, times: usize) -> usize {
        let blocks: usize = self.rest.iter().product();
        times * blocks.div_ceil(self.slots) * self.slots / blocks
    }

    /// The time of all waves, in that of a key.
    fn cost(&self, Splits { splits, split_keys }: Splits) -> usize {
        (splits * self.rest.iter().product::<usize>()).div_ceil(self.slots) * (split_keys + BLOCK_KEYS)
    }

    /// No fewer than [`Grid::splits`] cuts `seen` keys into, or fewer than these.
    fn most_splits(&self, seen: usize) -> usize {
        self.fitting(MOST_WAVES).clamp(1, seen.div_ceil(LEAST_SPLIT).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Any problem and GPU.
    fn problems() -> impl Strategy<Value = (Shape, Params, DType, Limits)> {
        let extents = (1usize..200_000, 1usize..4, 1usize..20, 1usize..40, 1usize..4, 1usize..=256);
        let window = proptest::option::of(1usize..20_000);
        let gpu = (1usize..200, prop_oneof![Just(99usize << 10), Just(163 << 10), Just(227 << 10)]);
        (extents, window, gpu, any::<bool>()).prop_map(
            |(extents, window, (multiprocessors, block_shared_bytes), wide)| {
                let (kv_len, batch, kv_heads, group, q_len, head_dim) = extents;
                let shape = Shape { q_heads: kv_heads * group, kv_heads, kv_len, batch, q_len, head_dim };
                let params = Params { window, ..Params::new(head_dim, true) };
                let limits = Limits { capability: (8, 0), multiprocessors, block_shared_bytes };
                (shape, params, if wide { DType::F32 } else { DType::Bf16 }, limits)
            },
        )
    }

    /// Keys of a list of `len` from where the first split begins to the last one that a query sees, as
    /// `kernels/decode.cu` has them.
    fn spanned(shape: &Shape, params: &Params, len: usize, step: usize) -> usize {
        let first = params.window.map_or(0, |window| (len + 1).saturating_sub(shape.q_len + window));
        len - first / step * step
    }

    proptest! {
        /// Splits cover every key that is seen of every list, and none of the longest list's is empty.
        #[test]
        fn splits_cover_the_keys_that_are_seen((shape, params, dtype, limits) in problems(), shorter in 0usize..1000) {
            let plan = Decode.plan(&shape, &params, dtype.into(), &limits).unwrap();
            let (splits, keys) = (plan.extents.splits, plan.extents.split_keys);
            let step = step_keys(dtype);
            let all = spanned(&shape, &params, shape.kv_len, step);
            prop_assert!(splits * keys >= all);
            // A window may begin with a step or in its middle.
            let least = if params.window.is_some() { all.min(shape.kv_len) + step } else { all };
            prop_assert!((splits - 1) * keys < least, "{splits} splits of {keys} for {all}");
            let len = shape.kv_len.saturating_sub(shorter);
            prop_assert!(splits * keys >= spanned(&shape, &params, len, step));
            let value = |name| plan.program.macros.iter().find(|&&(macro_name, _)| macro_name == name).unwrap().1;
            prop_assert_eq!(keys % (value("WARPS") * step), 0);
            let [x, y, z] = plan.launches[0].grid;
            prop_assert_eq!((x, z), (splits, shape.batch * shape.kv_heads));
            let rows = shape.group() * shape.q_len;
            prop_assert!(y * value("ROWS") >= rows && (y - 1) * value("ROWS") < rows);
        }

        /// Of the blocks that could run in the waves of a launch most are there, with most of the keys that they could read:
        /// a few blocks never make another wave.
        #[test]
        fn long_lists_are_split_into_whole_waves((shape, params, dtype, limits) in problems()) {
            let params = Params { window: None, ..params };
            let shape = Shape { kv_len: shape.kv_len + 400 * limits.multiprocessors * MOST_WAVES, ..shape };
            let plan = Decode.plan(&shape, &params, dtype.into(), &limits).unwrap();
            let grid = Tiling::new(&shape, dtype.into(), &limits, 0).grid;
            let blocks: usize = plan.launches[0].grid.iter().product();
            let waves = blocks.div_ceil(grid.slots);
            let keys = shape.kv_len * grid.rest.iter().product::<usize>();
            let efficiency = keys as f64 / (waves * grid.slots * plan.extents.split_keys) as f64;
            prop_assert!(efficiency > 0.75, "{blocks} blocks in {waves} waves of {}: {efficiency}", grid.slots);
        }

        /// What is taken once for the longest list is enough for each that is shorter.
        #[test]
        fn scratch_for_the_longest_list_fits_every_other((shape, params, dtype, limits) in problems(), part in 0.0f64..1.0) {
            let shorter = Shape { kv_len: ((shape.kv_len as f64 * part) as usize).max(1), ..shape };
            let needed = Decode.plan(&shorter, &params, dtype.into(), &limits).unwrap().workspace;
            prop_assert!(step_workspace(&shape, &params, dtype.into(), &limits, 0).scratch >= needed.scratch);
        }
    }

    /// Splits on an H100, a block of which each multiprocessor holds: 132 at a time.
    #[test]
    fn waves_are_whole_on_a_gpu_that_is_known() {
        let limits = Limits { capability: (9, 0), multiprocessors: 132, block_shared_bytes: 232_448 };
        let shape = |batch, kv_len| Shape { batch, q_heads: 32, kv_heads: 8, q_len: 1, kv_len, head_dim: 128 };
        let cases = [
            // 9 splits would be 144 blocks.
            (shape(2, 65_536), None, 8),
            (shape(1, 131_072), None, 16),
            // A short list, whatever the maximum; a window inside a long one.
            (shape(1, 4096), None, 16),
            (shape(1, 131_072), Some(4096), 11),
            // More lists than run at a time: 300 blocks would leave a quarter of three waves idle.
            (Shape { batch: 300, q_heads: 1, kv_heads: 1, ..shape(1, 8192) }, None, 3),
            (shape(1, 1), None, 1),
        ];
        for (shape, window, splits) in cases {
            let params = Params { window, ..Params::new(128, true) };
            let plan = Decode.plan(&shape, &params, DType::Bf16.into(), &limits).unwrap();
            assert_eq!(plan.extents.splits, splits, "{shape:?}, window {window:?}: {:?}", plan.launches[0].grid);
        }
    }
}
