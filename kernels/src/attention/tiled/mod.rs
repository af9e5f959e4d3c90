//! Tiled attention with an online softmax (FlashAttention-type): linear memory, nothing materialised.
//!
//! A thread takes `BR` queries and walks over the keys they see in tiles of `BC`; scores live only in the thread's
//! own `BR x BC` tile. Tiles that no query of the block sees are never computed. The backward pass ([`backward`]) walks
//! over the keys instead and recomputes the probabilities of each tile from the saved log-sum-exp. Every sum has one
//! order, whatever the number of threads.

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

    /// Query rows that share a packed tile, over all heads of a group.
    const ROWS: usize = 576;
    /// Fewest queries of a head in a block.
    const LEAST: usize = 48;

    /// The measured best: each tile of keys and values is packed once for a block of queries, so that large blocks
    /// pay, up to where their outputs leave the second-level cache; smaller ones where threads would stand idle. A
    /// row's bits do not depend on `br`.
    fn best(shape: &Shape, threads: usize) -> TileSizes {
        let most = (Self::ROWS / shape.group()).max(Self::LEAST);
        let wanted = (4 * threads).div_ceil(shape.batch * shape.kv_heads);
        // Blocks of one size: a short last one would pack as much for less.
        let blocks = shape.q_len.div_ceil(most).max(wanted);
        let br = shape.q_len.div_ceil(blocks).next_multiple_of(Self::LEAST);
        TileSizes { br, bc: 384 }
    }
}

/// Attention by tiles.
pub struct Tiled {
    /// `BR`, unless it is to be chosen by the problem and the threads.
    pub br: Option<usize>,
    /// `BC`, likewise.
    pub bc: Option<usize>,
}

impl Tiled {
    /// The tile for a problem, cut down to it so that short sequences do not pay for empty rows.
    fn sizes(&self, shape: &Shape, threads: usize) -> TileSizes {
        let TileSizes { br, bc } = TileSizes::best(shape, threads);
        TileSizes { br: self.br.unwrap_or(br).min(shape.q_len), bc: self.bc.unwrap_or(bc).min(shape.kv_len) }
    }
}

/// The registry's line.
pub const ENTRY: KernelEntry = KernelEntry {
    name: "tiled",
    about: "online softmax over tiles (FlashAttention-type): linear memory",
    parameters: &[
        Parameter { name: "br", default: "auto", about: "queries of a tile; auto: 48 to 576" },
        Parameter { name: "bc", default: "auto", about: "keys of a tile; auto: 384, backward Lk/6 but 192 to 384" },
    ],
    build: |named| {
        let extent = |key| match named.text(key) {
            None | Some("auto") => Ok(None),
            Some(_) => named.count_in(key, 1, 1..=TileSizes::MAX).map(Some),
        };
        Ok(Box::new(Tiled { br: extent("br")?, bc: extent("bc")? }))
    },
};

impl Tiled {
    /// Tile sizes chosen by the problem and the threads.
    pub const AUTO: Tiled = Tiled { br: None, bc: None };
}

impl Kernel for Tiled {
    fn name(&self) -> &'static str {
        "tiled"
    }

    fn workspace(&self, shape: &Shape, _: &Params, _: DType, threads: usize) -> WorkspaceSize {
        WorkspaceSize { scores: 0, scratch: threads * forward::slot(shape, self.sizes(shape, threads)) }
    }

    fn forward(
        &self,
        call: &Forward<'_>,
        outputs: &mut Outputs,
        workspace: &mut Workspace,
    ) -> Result<(), AttentionError> {
        forward::run(self.sizes(&call.shape, call.cpu.threads()), call, outputs, &mut workspace.scratch);
        Ok(())
    }

    fn backward_workspace(&self, shape: &Shape, _: &Params, dtype: DType, threads: usize) -> Option<WorkspaceSize> {
        let scratch = backward::Blocks::new(shape, self.br, self.bc).scratch(dtype, threads);
        Some(WorkspaceSize { scores: 0, scratch })
    }

    fn backward(
        &self,
        call: &Backward<'_>,
        gradients: &mut Gradients,
        workspace: &mut Workspace,
    ) -> Result<(), AttentionError> {
        let blocks = backward::Blocks::new(&call.forward.shape, self.br, self.bc);
        backward::run(blocks, call, gradients, &mut workspace.scratch);
        Ok(())
    }
}
