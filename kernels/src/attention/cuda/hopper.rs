//! `hopper` on a GPU of compute capability 9.0: `kernels/hopper.cu`.

#[cfg(test)]
mod schedule;

use super::{BackwardPlan, CudaKernel, Plan, TmaTiles, elements_of, hopper_backward};
use crate::attention::{AttentionError, Params, Shape, WorkspaceSize};
use crate::device::cuda::{Launch, Limits, Program, Source};
use crate::format::GpuRows;
use crate::tensor::DType;

const SOURCE: Source = Source { name: "hopper.cu", text: include_str!("../../../hopper.cu") };
/// The only GPUs that have the instructions.
const CAPABILITY: (i32, i32) = (9, 0);
/// Threads of a warpgroup; one copies, the others are consumers.
const WARPGROUP: usize = 128;
/// Query rows of a consumer.
const CONSUMER_ROWS: usize = 64;
/// Shared memory of a block, the part of it that is kept for barriers and the item that consumers are told, that item,
/// and the most tiles of keys in a ring.
const SHARED_BYTES: usize = 227 * 1024;
const RESERVED_BYTES: usize = 1024;
const ITEM_BYTES: usize = 16;
const MOST_STAGES: usize = 4;
/// Keys from which on a causal pass has long tiles: on an H100 these are 5% slower at 2K, as fast at 8K and 3% faster at 16K.
const LONG: usize = 8192;
/// Kernels count blocks' items in 32 bits.
const MOST_ITEMS: usize = 1 << 30;

/// TMA, wgmma and warpgroups with roles; bf16 and f16.
pub(super) struct Hopper;

/// How a variant cuts a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tiles {
    consumers: usize,
    /// Keys of a tile: as many as fit into registers beside the output.
    keys: usize,
}

impl Tiles {
    /// `None` for head dims that there is no variant of.
    fn of(shape: &Shape, params: &Params) -> Option<Self> {
        let tiles = |consumers, keys| Some(Tiles { consumers, keys });
        let short = params.window.is_some() || params.causal && shape.kv_len < LONG;
        match (shape.head_dim, short, params.softcap.is_some()) {
            (64, _, false) => tiles(3, 128),
            (64, _, true) => tiles(3, 112),
            // Long tiles waste more at the edge of a mask than they gain, unless there are many.
            (128, false, false) => tiles(2, 176),
            (128, ..) => tiles(2, 128),
            (256, _, false) => tiles(2, 80),
            (256, _, true) => tiles(2, 64),
            _ => None,
        }
    }

    fn rows(self) -> usize {
        CONSUMER_ROWS * self.consumers
    }

    fn shared_bytes(self, head_dim: usize) -> usize {
        let (q_bytes, tile_bytes) = (self.rows() * head_dim * 2, self.keys * head_dim * 2);
        let stages = ((SHARED_BYTES - q_bytes - RESERVED_BYTES) / (2 * tile_bytes)).min(MOST_STAGES);
        let barriers = 2 * self.consumers + 4 * stages;
        q_bytes + 2 * stages * tile_bytes + ITEM_BYTES * self.consumers + 8 * barriers
    }
}

impl CudaKernel for Hopper {
    fn name(&self) -> &'static str {
        "hopper"
    }

    fn about(&self) -> &'static str {
        "tiled for H100 and H200, with wgmma and TMA (--device cuda; bf16, f16; D 64, 128, 256)"
    }

    fn plan(&self, shape: &Shape, params: &Params, rows: GpuRows, limits: &Limits) -> Result<Plan, AttentionError> {
        let dtype = elements_of(self.name(), rows)?;
        let unsupported = |what, instead| AttentionError::Unsupported { kernel: self.name(), what, instead };
        takes(self.name(), dtype, limits)?;
        let tiles = Tiles::of(shape, params).ok_or_else(|| unsupported("head dims but 64, 128 and 256", "tiled"))?;
        let items = shape.batch * shape.q_heads * shape.q_len.div_ceil(tiles.rows());
        if items >= MOST_ITEMS {
            return Err(unsupported("room for so many heads or queries", "a smaller batch or shorter queries"));
        }
        let launches = vec![Launch {
            function: "hopper_forward",
            grid: [items.min(limits.multiprocessors), 1, 1],
            threads: (WARPGROUP * (1 + tiles.consumers)) as u32,
            shared_bytes: tiles.shared_bytes(shape.head_dim) as u32,
        }];
        let negative = params.scale < 0.0;
        let capped = usize::from(params.softcap.is_some());
        let macros = vec![("KEYS", tiles.keys), ("CAPPED", capped), ("NEGATIVE", usize::from(negative))];
        let program = Program { source: SOURCE, dtype, head_dim: shape.head_dim, macros };
        let mut plan = Plan::new(self.name(), program, launches, WorkspaceSize::default(), (shape, params), rows)?;
        plan.tma_tiles = Some(TmaTiles { q_rows: CONSUMER_ROWS, kv_rows: tiles.keys });
        Ok(plan)
    }

    fn plan_backward(
        &self,
        shape: &Shape,
        params: &Params,
        dtype: DType,
        limits: &Limits,
    ) -> Result<BackwardPlan, AttentionError> {
        takes(self.name(), dtype, limits)?;
        hopper_backward::plan(self.name(), shape, params, dtype)
    }
}

/// Whether there are kernels for this GPU and type; the name is that of the kernel which asks.
fn takes(kernel: &'static str, dtype: DType, limits: &Limits) -> Result<(), AttentionError> {
    let unsupported = |what, instead| Err(AttentionError::Unsupported { kernel, what, instead });
    if limits.capability != CAPABILITY {
        return unsupported("form for GPUs but those of compute capability 9.0 (H100, H200)", "tiled");
    }
    match dtype {
        DType::F32 => unsupported("f32", "naive, or --dtype bf16 or f16"),
        DType::Bf16 | DType::F16 => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Limits = Limits { capability: (9, 0), multiprocessors: 132, block_shared_bytes: 232_448 };
    const SHAPE: Shape = Shape { batch: 2, q_heads: 16, kv_heads: 4, q_len: 4096, kv_len: 4096, head_dim: 128 };

    fn plan(head_dim: usize, params: Params) -> Plan {
        Hopper.plan(&Shape { head_dim, ..SHAPE }, &params, DType::Bf16.into(), &H200).unwrap()
    }

    /// Rows of a block, keys of a tile, threads and shared memory of every variant, as kernels/hopper.cu has them.
    #[test]
    fn a_variant_fits_a_multiprocessor() {
        let plain = |d| Params::new(d, false);
        let cases = [
            (64, plain(64), [64, 128, 512, 155_872]),
            (64, Params { softcap: Some(20.0), ..plain(64) }, [64, 112, 512, 139_488]),
            (128, plain(128), [64, 176, 384, 213_120]),
            (128, Params::new(128, true), [64, 128, 384, 229_536]),
            (128, Params { window: Some(9), ..plain(128) }, [64, 128, 384, 229_536]),
            (128, Params { softcap: Some(20.0), ..plain(128) }, [64, 128, 384, 229_536]),
            (256, plain(256), [64, 80, 384, 229_504]),
            (256, Params { softcap: Some(20.0), ..plain(256) }, [64, 64, 384, 196_736]),
        ];
        for (head_dim, params, expected) in cases {
            let plan = plan(head_dim, params);
            let (launch, tma_tiles) = (plan.launches[0], plan.tma_tiles.unwrap());
            let found = [tma_tiles.q_rows, tma_tiles.kv_rows, launch.threads as usize, launch.shared_bytes as usize];
            assert_eq!(found, expected, "D {head_dim} {params:?}");
            assert!(launch.shared_bytes as usize <= H200.block_shared_bytes);
            assert_eq!(launch.grid, [132, 1, 1]);
        }
    }

    #[test]
    fn many_keys_are_taken_in_long_tiles_under_a_causal_mask() {
        for (kv_len, window, keys) in [(8191, None, 128), (8192, None, 176), (8192, Some(9), 128)] {
            let params = Params { window, ..Params::new(128, true) };
            assert_eq!(Tiles::of(&Shape { kv_len, ..SHAPE }, &params).unwrap().keys, keys, "{kv_len} {window:?}");
        }
    }

    #[test]
    fn a_small_problem_has_a_block_for_each_item() {
        let shape = Shape { batch: 1, q_heads: 3, kv_heads: 1, q_len: 129, ..SHAPE };
        let plan = Hopper.plan(&shape, &Params::new(128, true), DType::F16.into(), &H200).unwrap();
        assert_eq!(plan.launches[0].grid, [6, 1, 1]);
    }

    #[test]
    fn the_sign_of_the_scale_and_the_cap_are_compiled_in() {
        let macros = |params| plan(256, params).program.macros;
        let plain = Params::new(256, true);
        assert_eq!(macros(plain), [("KEYS", 80), ("CAPPED", 0), ("NEGATIVE", 0)]);
        let turned = Params { scale: -0.5, softcap: Some(3.0), ..plain };
        assert_eq!(macros(turned), [("KEYS", 64), ("CAPPED", 1), ("NEGATIVE", 1)]);
    }

    #[test]
    fn other_gpus_types_and_head_dims_are_refused() {
        let refused = |head_dim, dtype, capability| {
            let limits = Limits { capability, ..H200 };
            let shape = Shape { head_dim, ..SHAPE };
            let params = Params::new(head_dim, false);
            let backward = Hopper.plan_backward(&shape, &params, dtype, &limits).unwrap_err().to_string();
            let forward = Hopper.plan(&shape, &params, dtype.into(), &limits).unwrap_err().to_string();
            assert!(backward == forward || head_dim == 96, "{backward}");
            forward
        };
        assert!(refused(128, DType::Bf16, (8, 9)).contains("compute capability 9.0 (H100, H200); use tiled"));
        assert!(refused(128, DType::Bf16, (10, 0)).contains("compute capability 9.0"));
        assert!(refused(96, DType::Bf16, (9, 0)).contains("head dims but 64, 128 and 256; use tiled"));
        assert!(refused(128, DType::F32, (9, 0)).contains("no f32; use naive"));
    }
}
