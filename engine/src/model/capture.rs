//! Activations of some layers over a whole sequence, captured while a decoder reads it.

use super::{Activation, Config, Hook, ModelError};
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::tensor::file::Output;
use crate::tensor::{DType, TensorView};
use std::sync::{Mutex, PoisonError};

/// Captures activations of some layers: a hook for [`super::Decoder::hook`].
pub struct Capture {
    layers: Vec<usize>,
    kinds: Vec<Activation>,
    /// In the order of the kinds.
    tensors: Mutex<Vec<Captured>>,
}

impl Capture {
    /// Room for `tokens` tokens of these layers.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn new(
        arena: &Arena,
        config: &Config,
        layers: &[usize],
        kinds: &[Activation],
        tokens: usize,
    ) -> Result<Self, ArenaError> {
        let tensor = |&kind: &Activation| Captured::new(arena, config, kind, layers.len(), tokens);
        let tensors = kinds.iter().map(tensor).collect::<Result<Vec<_>, _>>()?;
        Ok(Capture { layers: layers.to_vec(), kinds: kinds.to_vec(), tensors: Mutex::new(tensors) })
    }

    /// What was captured, one tensor for each kind.
    ///
    /// # Errors
    /// When a number of it is not finite.
    pub fn finish(self) -> Result<Vec<Captured>, ModelError> {
        let tensors = self.tensors.into_inner().unwrap_or_else(PoisonError::into_inner);
        for tensor in &tensors {
            if let Some(at) = tensor.data.iter().position(|value| !value.is_finite()) {
                let [_, heads, tokens, width] = tensor.dims;
                let (layer, token) = (self.layers[at / (heads * tokens * width)], at / width % tokens);
                return Err(ModelError::Activation { layer, token, value: tensor.data[at] });
            }
        }
        Ok(tensors)
    }
}

impl Hook for Capture {
    fn rows(&self, layer: usize, what: Activation, rows: &[f32]) {
        let Some(at) = self.layers.iter().position(|&wanted| wanted == layer) else { return };
        let mut tensors = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = tensors.iter_mut().zip(&self.kinds).filter(|(_, kind)| **kind == what);
        wanted.for_each(|(tensor, _)| tensor.push(at, rows));
    }
}

/// A tensor as it fills, `[layers, heads, L, D]`, or `[layers, 1, L, hidden]`.
pub struct Captured {
    data: Buffer<f32>,
    dims: [usize; 4],
    /// Tokens of each layer so far.
    fill: Vec<usize>,
}

impl Captured {
    fn new(arena: &Arena, config: &Config, kind: Activation, layers: usize, tokens: usize) -> Result<Self, ArenaError> {
        let (heads, width) = match kind {
            Activation::Q | Activation::QBeforeRope | Activation::O => (config.q_heads, config.head_dim),
            Activation::K | Activation::KBeforeRope | Activation::V => (config.kv_heads, config.head_dim),
            Activation::Hidden | Activation::MlpInput => (1, config.hidden),
            Activation::MlpInner => (1, config.ffn),
        };
        let dims = [layers, heads, tokens, width];
        Ok(Captured { data: arena.alloc(Label::Activations, dims.iter().product())?, dims, fill: vec![0; layers] })
    }

    /// All of it.
    pub fn view(&self) -> TensorView<'_> {
        TensorView::contiguous(DType::F32, self.dims, bytemuck::cast_slice(&self.data))
    }

    /// All of it, to be written under a name.
    pub fn output<'t>(&'t self, name: &'t str) -> Output<'t> {
        Output::f32(name, self.dims.to_vec(), &self.data)
    }

    /// Takes rows `[n, heads * width]` of a layer in.
    fn push(&mut self, layer: usize, rows: &[f32]) {
        let [_, heads, tokens, width] = self.dims;
        for row in rows.chunks_exact(heads * width) {
            for (head, values) in row.chunks_exact(width).enumerate() {
                let at = ((layer * heads + head) * tokens + self.fill[layer]) * width;
                self.data[at..][..width].copy_from_slice(values);
            }
            self.fill[layer] += 1;
        }
    }
}
