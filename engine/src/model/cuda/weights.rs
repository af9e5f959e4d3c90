//! A model's parameters in a GPU's memory: matrices in their own type, copied there once; vectors in f32.

use crate::device::cuda::{CudaError, Device, DeviceBuffer};
use crate::memory::{Arena, Buffer, Label};
use crate::model::Model;
use crate::model::linear::Linear;
use crate::model::weights::Matrix;
use crate::tensor::DType;
use std::collections::BTreeSet;

/// A matrix `[rows, width]` on the GPU.
pub(super) struct DeviceMatrix {
    pub data: DeviceBuffer,
    pub dtype: DType,
    pub rows: usize,
    pub width: usize,
}

/// A weight matrix `[N, K]` and perhaps a bias `[N]`.
pub(super) struct DeviceLinear {
    pub weight: DeviceMatrix,
    pub bias: Option<DeviceBuffer>,
}

/// Parameters of a block; the names are those of [`crate::model::weights::Layer`].
pub(super) struct DeviceLayer {
    pub q: DeviceLinear,
    pub k: DeviceLinear,
    pub v: DeviceLinear,
    pub o: DeviceLinear,
    pub gate: DeviceLinear,
    pub up: DeviceLinear,
    pub down: DeviceLinear,
    pub qk_norm: Option<[DeviceBuffer; 2]>,
    pub before_attention: DeviceBuffer,
    pub after_attention: Option<DeviceBuffer>,
    pub before_mlp: DeviceBuffer,
    pub after_mlp: Option<DeviceBuffer>,
}

/// All parameters.
pub(super) struct DeviceWeights {
    pub embedding: DeviceMatrix,
    pub layers: Vec<DeviceLayer>,
    pub norm: DeviceBuffer,
    /// `None` where the embedding is the output projection too.
    untied: Option<DeviceMatrix>,
    /// Bytes of all.
    pub bytes: u64,
    /// Element types of matrices.
    pub dtypes: BTreeSet<DType>,
}

impl DeviceWeights {
    /// Copies the parameters of a model.
    ///
    /// # Errors
    /// At the arena's limit, or when the GPU has no room.
    pub fn upload(model: &Model, device: &Device, arena: &Arena) -> Result<Self, CudaError> {
        let mut to = Upload { device, arena, bytes: 0, dtypes: BTreeSet::new() };
        let weights = &model.weights;
        let embedding = to.matrix(&weights.embedding)?;
        let norm = to.vector(&weights.norm)?;
        let output = weights.output.weight();
        let untied = (!model.config.tied).then(|| to.matrix(output)).transpose()?;
        let mut layers = Vec::with_capacity(weights.layers.len());
        for layer in &weights.layers {
            let qk_norm = match &layer.qk_norm {
                Some([q, k]) => Some([to.vector(q)?, to.vector(k)?]),
                None => None,
            };
            layers.push(DeviceLayer {
                q: to.linear(&layer.q)?,
                k: to.linear(&layer.k)?,
                v: to.linear(&layer.v)?,
                o: to.linear(&layer.o)?,
                gate: to.linear(&layer.gate)?,
                up: to.linear(&layer.up)?,
                down: to.linear(&layer.down)?,
                qk_norm,
                before_attention: to.vector(&layer.before_attention)?,
                after_attention: to.optional(layer.after_attention.as_ref())?,
                before_mlp: to.vector(&layer.before_mlp)?,
                after_mlp: to.optional(layer.after_mlp.as_ref())?,
            });
        }
        let Upload { bytes, dtypes, .. } = to;
        Ok(DeviceWeights { embedding, layers, norm, untied, bytes, dtypes })
    }

    /// The output projection, `[vocab, hidden]`.
    pub fn output(&self) -> &DeviceMatrix {
        self.untied.as_ref().unwrap_or(&self.embedding)
    }
}

/// Copies of parameters so far.
struct Upload<'a> {
    device: &'a Device,
    arena: &'a Arena,
    bytes: u64,
    dtypes: BTreeSet<DType>,
}

impl Upload<'_> {
    fn copy(&mut self, bytes: &[u8]) -> Result<DeviceBuffer, CudaError> {
        let mut buffer = self.device.alloc(self.arena, Label::Weights, bytes.len() as u64)?;
        buffer.write(bytes)?;
        self.bytes += bytes.len() as u64;
        Ok(buffer)
    }

    fn matrix(&mut self, matrix: &Matrix) -> Result<DeviceMatrix, CudaError> {
        let (rows, width) = (matrix.rows(), matrix.width());
        let dtype = matrix.format().dtype().unwrap_or(DType::F32);
        self.dtypes.insert(dtype);
        let data = match matrix.format().dtype() {
            Some(_) => self.copy(matrix.bytes())?,
            // No kernel for GPUs reads a file's blocks.
            None => {
                let mut widened = vec![0.0f32; rows * width];
                matrix.widen(0, &mut widened);
                self.copy(bytemuck::cast_slice(&widened))?
            }
        };
        Ok(DeviceMatrix { data, dtype, rows, width })
    }

    fn vector(&mut self, vector: &Buffer<f32>) -> Result<DeviceBuffer, CudaError> {
        self.copy(bytemuck::cast_slice(vector))
    }

    fn optional(&mut self, vector: Option<&Buffer<f32>>) -> Result<Option<DeviceBuffer>, CudaError> {
        vector.map(|vector| self.vector(vector)).transpose()
    }

    fn linear(&mut self, linear: &Linear) -> Result<DeviceLinear, CudaError> {
        let bias = linear.bias().map(|bias| self.copy(bytemuck::cast_slice(bias))).transpose()?;
        Ok(DeviceLinear { weight: self.matrix(linear.weight())?, bias })
    }
}
