//! Tiled attention with an online softmax (FlashAttention-type): linear memory, nothing materialised.
//!
//! A thread takes `BR` queries and walks over the keys they see in tiles of `BC`; scores live only in the thread's
//! own `BR x BC` tile. Tiles that no query of the block sees are never computed. The backward pass recomputes
//! probabilities from the saved log-sum-exp in two sweeps, one by query tiles for `dq` and one by key tiles for `dk`
//! and `dv`, so that every sum has one owner and one order: deterministic without atomics.

mod backward;
mod forward;

use super::{
    AttentionError, Backward, Forward, Gradients, Kernel, KernelEntry, Outputs, Params, Shape, Workspace, WorkspaceSize,
};
use crate::named::Parameter;
use crate::tensor::DType;

/// Queries and keys of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileSizes {
    /// `BR`: queries.
    pub br: usize,
    /// `BC`: keys.
    pub bc: usize,
}

impl TileSizes {
    /// Largest extent of a tile.
    pub const MAX: usize = 4096;

    /// Measured defaults: a tile of scores stays in the second-level cache beside its keys and values.
    pub const DEFAULT: TileSizes = TileSizes { br: 64, bc: 256 };

    /// The tile cut down to the problem, so that short sequences do not pay for empty rows.
    fn fit(self, shape: &Shape) -> TileSizes {
        TileSizes { br: self.br.min(shape.q_len), bc: self.bc.min(shape.kv_len) }
    }
}

/// Attention by tiles.
pub struct Tiled {
    /// Tile sizes.
    pub sizes: TileSizes,
}

/// The registry's line.
pub const ENTRY: KernelEntry = KernelEntry {
    name: "tiled",
    about: "online softmax over tiles (FlashAttention-type): linear memory",
    parameters: &[
        Parameter { name: "br", default: "64", about: "queries of a tile" },
        Parameter { name: "bc", default: "256", about: "keys of a tile" },
    ],
    build: |named| {
        let extent = |key, default| {
            let value = named.count(key, default, 1)?;
            let in_range = value <= TileSizes::MAX;
            in_range.then_some(value).ok_or_else(|| named.wrong(key, format!("at most {}", TileSizes::MAX)))
        };
        let TileSizes { br, bc } = TileSizes::DEFAULT;
        Ok(Box::new(Tiled { sizes: TileSizes { br: extent("br", br)?, bc: extent("bc", bc)? } }))
    },
};

impl Kernel for Tiled {
    fn name(&self) -> &'static str {
        "tiled"
    }

    fn workspace(&self, shape: &Shape, _: &Params, _: DType, threads: usize) -> WorkspaceSize {
        WorkspaceSize { scores: 0, scratch: threads * forward::slot(shape, self.sizes.fit(shape)) }
    }

    fn forward(
        &self,
        call: &Forward<'_>,
        outputs: &mut Outputs,
        workspace: &mut Workspace,
    ) -> Result<(), AttentionError> {
        forward::run(self.sizes.fit(&call.shape), call, outputs, &mut workspace.scratch);
        Ok(())
    }

    fn backward_workspace(&self, shape: &Shape, _: &Params, threads: usize) -> Option<WorkspaceSize> {
        let slot = backward::slot(shape, self.sizes.fit(shape));
        Some(WorkspaceSize { scores: 0, scratch: shape.rows() + threads * slot })
    }

    fn backward(
        &self,
        call: &Backward<'_>,
        gradients: &mut Gradients,
        workspace: &mut Workspace,
    ) -> Result<(), AttentionError> {
        backward::run(self.sizes.fit(&call.forward.shape), call, gradients, &mut workspace.scratch);
        Ok(())
    }
}
