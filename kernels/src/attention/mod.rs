//! Attention kernels: the same mathematics, implemented in ways that cost different memory and time.
//!
//! A kernel computes `o = softmax(mask(cap(scale * q kᵀ) + bias)) v` for `q` `[B, Hq, Lq, D]` and `k`, `v`
//! `[B, Hkv, Lk, D]`, and the log-sum-exp of each row; few problems have a bias ([`KeyBias`]). The meaning of every option
//! is defined once, by [`Params`] and the f64 [`mod@reference`]; an implementation may not change it. Implementations do
//! not import one another. Adding a kernel is one file and one line in [`KERNELS`].

mod backward;
pub mod cuda;
mod decode;
pub mod export;
pub mod few;
mod naive;
mod online;
mod partial;
pub mod reference;
pub mod rope;
mod shape;
mod source;
mod strip;
mod tiled;
mod workspace;

pub use partial::Partials;
pub use shape::{Params, Shape};
pub use source::{DenseKv, KeyBias, KvRows};
pub use tiled::{TileSizes, Tiled};
pub use workspace::{Workspace, WorkspaceSize};

use crate::device::Cpu;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::named::{Named, NamedError, Parameter};
use crate::tensor::{DType, Tensor, TensorView};
use std::ops::Range;

/// A kernel as the registry knows it.
pub struct KernelEntry {
    /// Name on the command line and in records.
    pub name: &'static str,
    /// One line for `kvsieve list kernels`.
    pub about: &'static str,
    /// Its parameters.
    pub parameters: &'static [Parameter],
    /// Makes it.
    pub build: fn(&Named) -> Result<Box<dyn Kernel>, NamedError>,
}

/// Every kernel, in the order in which they are listed.
pub const KERNELS: &[KernelEntry] = &[reference::ENTRY, naive::ENTRY, tiled::ENTRY, decode::ENTRY];

/// Makes the kernel that a text such as `tiled:br=64,bc=256` names.
///
/// # Errors
/// When there is no such kernel or parameter, or a value is wrong.
pub fn kernel(text: &str) -> Result<Box<dyn Kernel>, NamedError> {
    let named: Named = text.parse()?;
    let built = || {
        let entry = named.find("kernel", KERNELS, |entry| entry.name)?;
        named.check(entry.parameters)?;
        (entry.build)(&named)
    };
    built().map_err(|error| match cuda::cuda_kernel(text) {
        Ok(_) => NamedError::Cuda { text: text.into() },
        Err(_) => error,
    })
}

/// Most queries that `decode` is for: it reads keys and values once for each of them, and `tiled` packs tiles first.
const FEW_QUERIES: usize = 8;

/// Name of the kernel that is fastest for these extents.
pub fn fitting(shape: &Shape, backward: bool) -> &'static str {
    if shape.q_len <= FEW_QUERIES && !backward { decode::ENTRY.name } else { tiled::ENTRY.name }
}

/// A problem that attention cannot be computed for.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum AttentionError {
    /// Extents that do not fit together.
    #[error("{0}")]
    Shape(String),
    /// An option out of range.
    #[error("{0}")]
    Option(String),
    /// A kernel that does not do what was asked.
    #[error("kernel '{kernel}' has no {what}; use {instead}")]
    Unsupported {
        /// The kernel.
        kernel: &'static str,
        /// What it lacks.
        what: &'static str,
        /// What has it.
        instead: &'static str,
    },
    /// The arena has no room.
    #[error(transparent)]
    Arena(#[from] ArenaError),
}

/// What a forward pass reads.
#[derive(Clone, Copy)]
pub struct Forward<'a> {
    /// Extents; they agree with `q` and `kv`.
    pub shape: Shape,
    /// Scale, mask and soft-cap.
    pub params: Params,
    /// Queries, `[B, Hq, Lq, D]`.
    pub q: TensorView<'a>,
    /// Keys and values.
    pub kv: &'a dyn KvRows,
    /// Where it runs.
    pub cpu: &'a Cpu,
}

/// Which rows of a list queries see: as [`Params::visible`] says where all tokens are there, and by their positions where some have
/// left. For `reference`, `decode` and attention statistics, which are asked by queries of tokens that may be gone; the other
/// kernels are asked by those whose keys are the last of each list.
pub(crate) struct Sight<'a> {
    call: &'a Forward<'a>,
    list: [usize; 2],
    kv_len: usize,
    is_dense: bool,
}

impl Sight<'_> {
    /// Rows that query `i` sees: a range, perhaps empty.
    #[inline(always)]
    pub fn visible(&self, i: usize) -> Range<usize> {
        match self.is_dense {
            true => self.call.params.visible(i, self.call.shape.q_len, self.kv_len),
            false => self.visible_by_position(i),
        }
    }

    fn visible_by_position(&self, i: usize) -> Range<usize> {
        let Params { causal, window, .. } = self.call.params;
        if !causal && window.is_none() {
            return 0..self.kv_len;
        }
        let (behind, [batch, head]) = (self.call.shape.q_len - 1 - i, self.list);
        let end = self.call.kv.before(batch, head, behind);
        let start = window.map_or(0, |window| self.call.kv.before(batch, head, behind.saturating_add(window)));
        start.min(end)..end
    }
}

impl Forward<'_> {
    /// Whether all that is multiplied may be pairs of bf16: what is bf16 already, and what codes stand for.
    pub fn is_bf16(&self) -> bool {
        self.q.dtype() == DType::Bf16 && self.kv.format().is_read_as_bf16()
    }

    /// What queries see of a list.
    pub(crate) fn sight(&self, [batch, head]: [usize; 2]) -> Sight<'_> {
        let kv_len = self.kv.len(batch, head);
        // The farthest place behind the last token that is asked for. Up to it most often no token is missing.
        let farthest = self.shape.q_len.saturating_sub(1).saturating_add(self.params.window.unwrap_or(0));
        let is_dense = match farthest < kv_len {
            true => self.kv.before(batch, head, farthest) == kv_len - farthest,
            // As many tokens as there are places.
            false => self.kv.before(batch, head, kv_len) == 0,
        };
        Sight { call: self, list: [batch, head], kv_len, is_dense }
    }
}

/// What a forward pass writes: `o` `[B, Hq, Lq, D]` in the input's type, `lse` `[B, Hq, Lq]` (natural log).
pub struct Outputs {
    /// The attention output.
    pub o: Tensor,
    /// Log of the sum of exponentials of each row; `-inf` where a row sees no key.
    pub lse: Buffer<f32>,
}

impl Outputs {
    /// Zeroed outputs for a problem.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn allocate(arena: &Arena, shape: &Shape, dtype: DType) -> Result<Self, ArenaError> {
        Ok(Outputs {
            o: Tensor::zeros(arena, Label::Activations, dtype, shape.q_dims())?,
            lse: arena.alloc(Label::Activations, shape.rows())?,
        })
    }

    /// Bytes that [`Outputs::allocate`] takes.
    pub fn bytes(shape: &Shape, dtype: DType) -> u64 {
        Tensor::bytes_of(dtype, shape.q_dims()) + 4 * shape.rows() as u64
    }
}

/// What a backward pass reads besides the forward pass's inputs.
#[derive(Clone, Copy)]
pub struct Backward<'a> {
    /// The forward pass.
    pub forward: Forward<'a>,
    /// Its output, `[B, Hq, Lq, D]`.
    pub o: TensorView<'a>,
    /// Its log-sum-exps, `[B, Hq, Lq]`.
    pub lse: &'a [f32],
    /// Gradient of the loss by `o`, `[B, Hq, Lq, D]`.
    pub grad_o: TensorView<'a>,
}

/// Gradients by the inputs, in the inputs' type; those of `k` and `v` are summed over the group's query heads.
pub struct Gradients {
    /// By `q`, `[B, Hq, Lq, D]`.
    pub q: Tensor,
    /// By `k`, `[B, Hkv, Lk, D]`.
    pub k: Tensor,
    /// By `v`, `[B, Hkv, Lk, D]`.
    pub v: Tensor,
    /// By the bias of the keys, `[B, Hkv, Lk]`, where it is wanted.
    pub bias: Option<Buffer<f32>>,
}

impl Gradients {
    /// Zeroed gradients for a problem.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn allocate(arena: &Arena, shape: &Shape, dtype: DType) -> Result<Self, ArenaError> {
        let zeros = |dims| Tensor::zeros(arena, Label::Activations, dtype, dims);
        Ok(Gradients { q: zeros(shape.q_dims())?, k: zeros(shape.kv_dims())?, v: zeros(shape.kv_dims())?, bias: None })
    }

    /// The same with the gradient by the bias of the keys.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn with_bias(self, arena: &Arena, shape: &Shape) -> Result<Self, ArenaError> {
        let bias = arena.alloc(Label::Activations, shape.batch * shape.kv_heads * shape.kv_len)?;
        Ok(Gradients { bias: Some(bias), ..self })
    }

    /// Bytes that [`Gradients::allocate`] takes.
    pub fn bytes(shape: &Shape, dtype: DType) -> u64 {
        Tensor::bytes_of(dtype, shape.q_dims()) + 2 * Tensor::bytes_of(dtype, shape.kv_dims())
    }
}

/// An implementation of attention.
pub trait Kernel: Send + Sync {
    /// Name on the command line and in records.
    fn name(&self) -> &'static str;

    /// Scratch memory of a forward pass: the size that is allocated, and the size that is predicted.
    fn workspace(&self, shape: &Shape, params: &Params, dtype: DType, threads: usize) -> WorkspaceSize;

    /// Computes `o` and `lse`. Deterministic: the result does not depend on the number of threads.
    ///
    /// # Errors
    /// When the kernel cannot do this problem.
    fn forward(
        &self,
        call: &Forward<'_>,
        outputs: &mut Outputs,
        workspace: &mut Workspace,
    ) -> Result<(), AttentionError>;

    /// Scratch memory of a backward pass; `None` when the kernel has none.
    fn backward_workspace(
        &self,
        _shape: &Shape,
        _params: &Params,
        _dtype: DType,
        _threads: usize,
    ) -> Option<WorkspaceSize> {
        None
    }

    /// Computes the gradients, recomputing the probabilities from `lse`. Deterministic. Every list of keys must be
    /// `shape.kv_len` long.
    ///
    /// # Errors
    /// When the kernel cannot do this problem.
    fn backward(
        &self,
        _call: &Backward<'_>,
        _gradients: &mut Gradients,
        _workspace: &mut Workspace,
    ) -> Result<(), AttentionError> {
        Err(AttentionError::Unsupported { kernel: self.name(), what: "backward pass", instead: "naive or tiled" })
    }
}

/// Queries, keys and values of one problem, owned: the inputs of a forward pass.
pub struct Inputs {
    /// Queries, `[B, Hq, Lq, D]`.
    pub q: Tensor,
    /// Keys, `[B, Hkv, Lk, D]`.
    pub k: Tensor,
    /// Values, `[B, Hkv, Lk, D]`.
    pub v: Tensor,
}
