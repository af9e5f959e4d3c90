//! What a GPU gives a launch: by its own account, or by its architecture where there is no GPU.

/// What launches are planned for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Compute capability, as `(9, 0)`.
    pub capability: (i32, i32),
    /// Streaming multiprocessors: what a grid should fill.
    pub multiprocessors: usize,
    /// Shared memory that one block may have.
    pub block_shared_bytes: usize,
}

/// Shared memory that the system takes for each block that runs.
const BLOCK_SYSTEM_BYTES: usize = 1 << 10;

/// Shared memory that one block may have, in KiB, by compute capability (CUDA C++ Programming Guide, "Compute
/// Capabilities"): what kernels are compiled for.
const BLOCK_SHARED_KIB: [((i32, i32), usize); 11] = [
    ((8, 0), 163),
    ((8, 6), 99),
    ((8, 7), 163),
    ((8, 9), 99),
    ((9, 0), 227),
    ((10, 0), 227),
    ((10, 1), 227),
    ((10, 3), 227),
    ((11, 0), 227),
    ((12, 0), 99),
    ((12, 1), 99),
];
/// Multiprocessors of a GPU that is not there. Only grids follow from their number, never what is compiled.
const SOME_MULTIPROCESSORS: usize = 132;

impl Limits {
    /// Those of every architecture that kernels can be compiled for without a GPU.
    pub fn known() -> impl Iterator<Item = Self> {
        BLOCK_SHARED_KIB.into_iter().map(|(capability, kib)| Limits {
            capability,
            multiprocessors: SOME_MULTIPROCESSORS,
            block_shared_bytes: kib << 10,
        })
    }

    /// What NVRTC compiles for, as `sm_80`. On Hopper it is `sm_90a`, which has `wgmma` and runs on no other chip.
    pub fn architecture(&self) -> String {
        let (major, minor) = self.capability;
        let only_this = if major == 9 { "a" } else { "" };
        format!("sm_{major}{minor}{only_this}")
    }

    /// The first choice of which so many blocks fit on one multiprocessor, else the first of which one block less does, and so
    /// on, else the last; `bytes` is the shared memory of a block. Blocks hide each other's waiting.
    pub(crate) fn roomiest<T: Copy>(&self, blocks: usize, choices: &[T], bytes: impl Fn(T) -> usize) -> T {
        let first = |blocks| choices.iter().copied().find(|&choice| self.blocks_each(bytes(choice)) >= blocks);
        (1..=blocks).rev().find_map(first).unwrap_or(choices[choices.len() - 1])
    }

    /// Blocks with so much shared memory that a multiprocessor has room for.
    pub(crate) fn blocks_each(&self, bytes: usize) -> usize {
        // A block may have all of a multiprocessor's shared memory but what the system takes for it.
        (self.block_shared_bytes + BLOCK_SYSTEM_BYTES) / (bytes + BLOCK_SYSTEM_BYTES)
    }
}
