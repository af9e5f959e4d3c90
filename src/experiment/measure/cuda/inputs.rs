//! A workload in a GPU's memory.

use crate::device::cuda::{CudaError, Device, DeviceBuffer};
use crate::memory::{Arena, Label};
use crate::tensor::Tensor;
use crate::workload::{Extents, Workload};

/// The inputs of some cells: the workload's three tensors, and the context's last query by itself, which decode steps
/// read.
pub struct Inputs {
    /// `[B, Hq, N, D]`, layers folded into the batch as in the workload.
    pub q: DeviceBuffer,
    /// `[B, Hkv, N, D]`.
    pub k: DeviceBuffer,
    /// `[B, Hkv, N, D]`.
    pub v: DeviceBuffer,
    /// `[B, Hq, 1, D]`: the query of the context's last token.
    pub last_q: DeviceBuffer,
    /// What was copied; `None` for blank inputs, which the host has not.
    pub host: Option<Workload>,
}

impl Inputs {
    /// Bytes that inputs of these extents take from the arena.
    pub fn bytes(extents: &Extents) -> u64 {
        Workload::bytes(extents) + last_q_bytes(extents)
    }

    /// Copies a workload to the GPU.
    ///
    /// # Errors
    /// At the arena's limit, or when the GPU has no room.
    pub fn upload(device: &Device, arena: &Arena, extents: &Extents, host: Workload) -> Result<Self, CudaError> {
        let mut inputs = Self::allocate(device, arena, extents)?;
        inputs.q.write(host.q.bytes())?;
        inputs.k.write(host.k.bytes())?;
        inputs.v.write(host.v.bytes())?;
        inputs.last_q.write(&last_rows(&host.q, extents.context_tokens - 1))?;
        inputs.host = Some(host);
        Ok(inputs)
    }

    /// Inputs whose bytes are all zero but those of `v`, which are `v_byte`: what the limits of memory are found with.
    ///
    /// # Errors
    /// As [`Inputs::upload`].
    pub fn blank(device: &Device, arena: &Arena, extents: &Extents, v_byte: u8) -> Result<Self, CudaError> {
        let mut inputs = Self::allocate(device, arena, extents)?;
        inputs.v.fill(v_byte)?;
        Ok(inputs)
    }

    fn allocate(device: &Device, arena: &Arena, extents: &Extents) -> Result<Self, CudaError> {
        let take = |bytes| device.alloc(arena, Label::Input, bytes);
        let kv_bytes = Tensor::bytes_of(extents.dtype, extents.kv_dims());
        Ok(Inputs {
            q: take(Tensor::bytes_of(extents.dtype, extents.q_dims()))?,
            k: take(kv_bytes)?,
            v: take(kv_bytes)?,
            last_q: take(last_q_bytes(extents))?,
            host: None,
        })
    }
}

fn last_q_bytes(extents: &Extents) -> u64 {
    let [batch, heads, _, head_dim] = extents.q_dims();
    Tensor::bytes_of(extents.dtype, [batch, heads, 1, head_dim])
}

/// Row `token` of every head, one behind another.
fn last_rows(q: &Tensor, token: usize) -> Vec<u8> {
    let [_, _, tokens, head_dim] = q.dims();
    let row_bytes = head_dim * q.dtype().bytes();
    let heads = q.bytes().chunks_exact(tokens * row_bytes);
    heads.flat_map(|head| &head[token * row_bytes..(token + 1) * row_bytes]).copied().collect()
}
