//! One block of the decoder: forward, what of it is computed again, and backward.

use super::activations::{Cheap, Extents, Inner, Recompute, Scratch};
use super::gates::Gates;
use super::heads::{self, Turns};
use super::linear::Linear;
use super::mlp;
use super::norm::{self, Columns};
use super::parameters::{BlockGroups, Group};
use super::weights::Weights;
use crate::attention::{AttentionError, Backward, DenseKv, Forward, Gradients, Kernel, Tiled};
use crate::device::Cpu;
use crate::memory::Buffer;
use crate::model::norm::Norm;
use crate::model::params;
use crate::tensor::{DType, Tensor, TensorView};

/// A block at work: where its parameters are, and what all blocks share.
pub(super) struct Block<'a> {
    pub extents: &'a Extents<'a>,
    pub layer: usize,
    pub cpu: &'a Cpu,
    pub turns: &'a Turns,
    pub weights: Weights<'a>,
}

/// Buffers that all blocks share, one after the other.
pub(super) struct Shared {
    /// q, k and v by tokens, or the gradients by them, `[rows, qkv_width]`.
    pub qkv: Buffer<f32>,
    /// Gradient by the inner part of the MLP, `[rows, ffn]`.
    pub dp: Buffer<f32>,
    /// Gradient by a norm's output, or by its input, `[rows, hidden]`.
    pub dn: Buffer<f32>,
    /// Gradient by attention's output, by tokens, `[rows, q_width]`.
    pub d_o: Buffer<f32>,
    /// Gradients by q, k and v.
    pub dqkv: Gradients,
    pub scratch: Scratch,
    /// What decides on evicted tokens, where that is trained.
    pub gates: Option<Gates>,
}

impl Block<'_> {
    fn groups(&self) -> &BlockGroups {
        &self.extents.parameters.blocks[self.layer]
    }

    fn norm(&self, gain: &Group) -> Norm<'_> {
        self.extents.config().norm(self.weights.vector(gain))
    }

    /// Computes the block's output from its input `x`, and everything that [`Block::backward`] reads.
    pub fn forward(
        &self,
        x: &[f32],
        cheap: &mut Cheap,
        inner: &mut Inner,
        shared: &mut Shared,
        output: &mut [f32],
    ) -> Result<(), AttentionError> {
        self.attention_inputs(x, inner, shared);
        if let Some(gates) = &mut shared.gates {
            gates.decide(self.layer, self.cpu, &inner.n1, &mut shared.scratch.products);
        }
        self.attend(cheap, inner, shared)?;
        self.residual(x, cheap, inner, &mut shared.scratch);
        self.mlp_inner(cheap, inner, &mut shared.scratch);
        match &self.groups().after_mlp {
            Some(gain) => {
                self.norm(gain).rows(self.cpu, &inner.projected, output, self.extents.config().hidden);
                norm::add(self.cpu, output, &cheap.y);
            }
            None => {
                output.copy_from_slice(&cheap.y);
                let scratch = &mut shared.scratch.products;
                self.groups().down.forward(self.cpu, self.weights, &inner.p, output, true, scratch);
            }
        }
        Ok(())
    }

    /// Computes again what `recompute` did not keep, by the same steps and so with the same bits.
    pub fn restore(
        &self,
        recompute: Recompute,
        x: &[f32],
        cheap: &mut Cheap,
        inner: &mut Inner,
        shared: &mut Shared,
    ) -> Result<(), AttentionError> {
        match recompute {
            Recompute::None => return Ok(()),
            Recompute::Selective => {
                self.attention_inputs(x, inner, shared);
                self.by_tokens(cheap, inner);
                if self.groups().after_attention.is_some() {
                    self.residual(x, cheap, inner, &mut shared.scratch);
                }
            }
            Recompute::Full => {
                self.attention_inputs(x, inner, shared);
                self.attend(cheap, inner, shared)?;
                self.residual(x, cheap, inner, &mut shared.scratch);
            }
        }
        self.mlp_inner(cheap, inner, &mut shared.scratch);
        Ok(())
    }

    fn attention_inputs(&self, x: &[f32], inner: &mut Inner, shared: &mut Shared) {
        let (config, groups) = (self.extents.config(), self.groups());
        self.norm(&groups.before_attention).rows(self.cpu, x, &mut inner.n1, config.hidden);
        let norms = groups.qk_norm.as_ref().map(|norms| norms.each_ref().map(|gain| self.norm(gain)));
        let rows = if norms.is_some() { &mut inner.unnormed } else { &mut shared.qkv };
        groups.qkv.forward(self.cpu, self.weights, &inner.n1, rows, false, &mut shared.scratch.products);
        let heads = inner.qkv.each_mut().map(|tensor| bytemuck::cast_slice_mut(tensor.bytes_mut()));
        heads::split(self.cpu, config, self.turns, norms, rows, heads);
    }

    fn call<'a>(&'a self, q: &'a Tensor, kv: &'a DenseKv<'a>) -> Forward<'a> {
        let (shape, params) = (self.extents.attention(), params(self.extents.config(), self.layer));
        Forward { shape, params, q: q.view(), kv, cpu: self.cpu }
    }

    /// Keys and values, with the biases of the keys that a gate decided on.
    fn kv<'a>(&self, inner: &'a Inner, gates: &'a Option<Gates>) -> Result<DenseKv<'a>, AttentionError> {
        let [_, k, v] = &inner.qkv;
        let kv = DenseKv::new(k.view(), v.view())?;
        Ok(match gates.as_ref().and_then(|gates| gates.bias(self.layer)) {
            Some(bias) => kv.with_bias(bias),
            None => kv,
        })
    }

    fn attend(&self, cheap: &mut Cheap, inner: &mut Inner, shared: &mut Shared) -> Result<(), AttentionError> {
        let [q, ..] = &inner.qkv;
        let kv = self.kv(inner, &shared.gates)?;
        Tiled::AUTO.forward(&self.call(q, &kv), &mut cheap.attention, &mut shared.scratch.forward)?;
        self.by_tokens(cheap, inner);
        Ok(())
    }

    fn by_tokens(&self, cheap: &Cheap, inner: &mut Inner) {
        let config = self.extents.config();
        let extents = [config.q_heads, self.extents.len, config.head_dim];
        heads::side_by_side(self.cpu, bytemuck::cast_slice(cheap.attention.o.bytes()), extents, &mut inner.o);
    }

    fn residual(&self, x: &[f32], cheap: &mut Cheap, inner: &mut Inner, scratch: &mut Scratch) {
        let (groups, scratch) = (self.groups(), &mut scratch.products);
        match &groups.after_attention {
            Some(gain) => {
                groups.out.forward(self.cpu, self.weights, &inner.o, &mut inner.attended, false, scratch);
                self.norm(gain).rows(self.cpu, &inner.attended, &mut cheap.y, self.extents.config().hidden);
                norm::add(self.cpu, &mut cheap.y, x);
            }
            None => {
                cheap.y.copy_from_slice(x);
                groups.out.forward(self.cpu, self.weights, &inner.o, &mut cheap.y, true, scratch);
            }
        }
    }

    fn mlp_inner(&self, cheap: &Cheap, inner: &mut Inner, scratch: &mut Scratch) {
        let (config, groups, scratch) = (self.extents.config(), self.groups(), &mut scratch.products);
        self.norm(&groups.before_mlp).rows(self.cpu, &cheap.y, &mut inner.n2, config.hidden);
        groups.gate_up.forward(self.cpu, self.weights, &inner.n2, &mut inner.gate_up, false, scratch);
        mlp::forward(self.cpu, config.activation, &inner.gate_up, &mut inner.p, config.ffn);
        if groups.after_mlp.is_some() {
            groups.down.forward(self.cpu, self.weights, &inner.p, &mut inner.projected, false, scratch);
        }
    }

    /// Turns `dx` from the gradient by the block's output to that by its input, and adds to the parameters' gradients.
    pub fn backward(
        &self,
        x: &[f32],
        cheap: &Cheap,
        inner: &mut Inner,
        shared: &mut Shared,
        gradients: &mut [f32],
        dx: &mut [f32],
    ) -> Result<(), AttentionError> {
        let (config, groups, cpu, w) = (self.extents.config(), self.groups(), self.cpu, self.weights);
        let Shared { qkv, dp, dn, d_o, dqkv, scratch, gates } = shared;
        let stream = Columns { range: 0..config.hidden, stride: config.hidden };
        // The gradient by a layer's inputs, from that by its outputs, and those by what of it is trained.
        let layer = |layer: &Linear, dy: &[f32], x: &[f32], gradients: &mut [f32], dx: &mut [f32], scratch: &mut [f32]| {
            layer.gradients(cpu, dy, x, gradients);
            layer.backward(cpu, w, dy, dx, false, scratch);
        };
        let norm_backward = |gain: &Group, x: &[f32], dn: &mut [f32], gradients: &mut [f32], sums: &mut [f32]| {
            norm::backward(cpu, self.norm(gain), x, dn, &stream, (gain, gradients), sums);
        };

        match &groups.after_mlp {
            Some(gain) => {
                dn.copy_from_slice(dx);
                norm_backward(gain, &inner.projected, dn, gradients, &mut scratch.norm);
                layer(&groups.down, dn, &inner.p, gradients, dp, &mut scratch.products);
            }
            None => layer(&groups.down, dx, &inner.p, gradients, dp, &mut scratch.products),
        }
        mlp::backward(cpu, config.activation, dp, &mut inner.gate_up, config.ffn);
        layer(&groups.gate_up, &inner.gate_up, &inner.n2, gradients, dn, &mut scratch.products);
        norm_backward(&groups.before_mlp, &cheap.y, dn, gradients, &mut scratch.norm);
        norm::add(cpu, dx, dn);

        match &groups.after_attention {
            Some(gain) => {
                dn.copy_from_slice(dx);
                norm_backward(gain, &inner.attended, dn, gradients, &mut scratch.norm);
                layer(&groups.out, dn, &inner.o, gradients, d_o, &mut scratch.products);
            }
            None => layer(&groups.out, dx, &inner.o, gradients, d_o, &mut scratch.products),
        }
        let dims = [self.extents.batch, self.extents.len, config.q_heads, config.head_dim];
        let grad_o = TensorView::contiguous(DType::F32, dims, bytemuck::cast_slice(d_o)).permuted([0, 2, 1, 3]);
        let [q, ..] = &inner.qkv;
        let kv = self.kv(inner, gates)?;
        let (o, lse) = (cheap.attention.o.view(), &*cheap.attention.lse);
        let call = Backward { forward: self.call(q, &kv), o, lse, grad_o };
        Tiled::AUTO.backward(&call, dqkv, &mut scratch.backward)?;
        let heads = [&dqkv.q, &dqkv.k, &dqkv.v].map(|tensor| bytemuck::cast_slice(tensor.bytes()));
        heads::merge(cpu, config, self.turns, heads, qkv);
        for (gain, range) in groups.qk_norm.iter().flatten().zip(heads::columns(config)) {
            let columns = Columns { range, stride: config.qkv_width() };
            norm::backward(cpu, self.norm(gain), &inner.unnormed, qkv, &columns, (gain, gradients), &mut scratch.norm);
        }
        layer(&groups.qkv, qkv, &inner.n1, gradients, dn, &mut scratch.products);
        if let (Some(gates), Some(dbias)) = (gates, &dqkv.bias) {
            gates.backward(self.layer, cpu, &inner.n1, dbias, dn, &mut scratch.products);
        }
        norm_backward(&groups.before_attention, x, dn, gradients, &mut scratch.norm);
        norm::add(cpu, dx, dn);
        Ok(())
    }
}
