//! One block of the decoder: forward, what of it is computed again, and backward.

use super::activations::{Cheap, Extents, Inner, Recompute, Scratch};
use super::heads::{self, Turns};
use super::norm;
use super::parameters::BlockRanges;
use super::{linear, swiglu};
use crate::attention::{AttentionError, Backward, DenseKv, Forward, Gradients, Kernel, Tiled};
use crate::device::Cpu;
use crate::memory::Buffer;
use crate::tensor::{DType, Tensor, TensorView};

/// A block at work: where its parameters are, and what all blocks share.
pub(super) struct Block<'a> {
    pub extents: &'a Extents,
    pub cpu: &'a Cpu,
    pub turns: &'a Turns,
    pub weights: &'a [f32],
    pub ranges: &'a BlockRanges,
}

/// Buffers that all blocks share, one after the other.
pub(super) struct Shared {
    /// q, k and v by tokens, or the gradients by them, `[rows, qkv_width]`.
    pub qkv: Buffer<f32>,
    /// Gradient by the inner part of the MLP, `[rows, ffn]`.
    pub dp: Buffer<f32>,
    /// Gradient by a norm's output, `[rows, hidden]`.
    pub dn: Buffer<f32>,
    /// Gradient by attention's output, by tokens, `[rows, q_width]`.
    pub d_o: Buffer<f32>,
    /// Gradients by q, k and v.
    pub dqkv: Gradients,
    pub scratch: Scratch,
}

impl Block<'_> {
    /// Computes the block's output from its input `x`, and everything that [`Block::backward`] reads.
    pub fn forward(
        &self,
        x: &[f32],
        cheap: &mut Cheap,
        inner: &mut Inner,
        shared: &mut Shared,
        output: &mut [f32],
    ) -> Result<(), AttentionError> {
        self.attention_inputs(x, cheap, inner, shared);
        self.attend(cheap, inner, shared)?;
        self.residual(x, cheap, inner);
        self.mlp_inner(cheap, inner);
        output.copy_from_slice(&cheap.y);
        let spec = &self.extents.spec;
        linear::forward(
            self.cpu,
            &inner.p,
            &self.weights[self.ranges.down.clone()],
            output,
            [spec.ffn, spec.hidden],
            true,
        );
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
                self.attention_inputs(x, cheap, inner, shared);
                self.by_tokens(cheap, inner);
            }
            Recompute::Full => {
                self.attention_inputs(x, cheap, inner, shared);
                self.attend(cheap, inner, shared)?;
                self.residual(x, cheap, inner);
            }
        }
        self.mlp_inner(cheap, inner);
        Ok(())
    }

    fn attention_inputs(&self, x: &[f32], cheap: &mut Cheap, inner: &mut Inner, shared: &mut Shared) {
        let (spec, ranges) = (&self.extents.spec, self.ranges);
        let (inverse, _) = cheap.inverse.split_at_mut(self.extents.rows());
        norm::forward(self.cpu, x, &self.weights[ranges.norm1.clone()], spec.norm_eps, inverse, &mut inner.n1);
        let widths = [spec.hidden, spec.qkv_width()];
        linear::forward(self.cpu, &inner.n1, &self.weights[ranges.qkv.clone()], &mut shared.qkv, widths, false);
        let heads = inner.qkv.each_mut().map(|tensor| bytemuck::cast_slice_mut(tensor.bytes_mut()));
        heads::split(self.cpu, spec, self.turns, &shared.qkv, heads);
    }

    fn call<'a>(&'a self, q: &'a Tensor, kv: &'a DenseKv<'a>) -> Forward<'a> {
        let (shape, params) = (self.extents.attention(), self.extents.params());
        Forward { shape, params, q: q.view(), kv, cpu: self.cpu }
    }

    fn attend(&self, cheap: &mut Cheap, inner: &mut Inner, shared: &mut Shared) -> Result<(), AttentionError> {
        let [q, k, v] = &inner.qkv;
        let kv = DenseKv::new(k.view(), v.view())?;
        Tiled::AUTO.forward(&self.call(q, &kv), &mut cheap.attention, &mut shared.scratch.forward)?;
        self.by_tokens(cheap, inner);
        Ok(())
    }

    fn by_tokens(&self, cheap: &Cheap, inner: &mut Inner) {
        let spec = &self.extents.spec;
        let extents = [spec.q_heads, self.extents.len, spec.head_dim];
        heads::side_by_side(self.cpu, bytemuck::cast_slice(cheap.attention.o.bytes()), extents, &mut inner.o);
    }

    fn residual(&self, x: &[f32], cheap: &mut Cheap, inner: &mut Inner) {
        let spec = &self.extents.spec;
        cheap.y.copy_from_slice(x);
        let widths = [spec.q_width(), spec.hidden];
        linear::forward(self.cpu, &inner.o, &self.weights[self.ranges.out.clone()], &mut cheap.y, widths, true);
    }

    fn mlp_inner(&self, cheap: &mut Cheap, inner: &mut Inner) {
        let (spec, ranges) = (&self.extents.spec, self.ranges);
        let (_, inverse) = cheap.inverse.split_at_mut(self.extents.rows());
        norm::forward(self.cpu, &cheap.y, &self.weights[ranges.norm2.clone()], spec.norm_eps, inverse, &mut inner.n2);
        let widths = [spec.hidden, 2 * spec.ffn];
        linear::forward(self.cpu, &inner.n2, &self.weights[ranges.gate_up.clone()], &mut inner.gate_up, widths, false);
        swiglu::forward(self.cpu, &inner.gate_up, &mut inner.p, spec.ffn);
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
        let (spec, ranges, cpu, w) = (&self.extents.spec, self.ranges, self.cpu, self.weights);
        let Shared { qkv, dp, dn, d_o, dqkv, scratch } = shared;
        let (inverse1, inverse2) = cheap.inverse.split_at(self.extents.rows());

        let widths = [spec.ffn, spec.hidden];
        linear::weight_gradient(cpu, dx, &inner.p, &mut gradients[ranges.down.clone()], widths);
        linear::input_gradient(cpu, dx, &w[ranges.down.clone()], dp, widths);
        swiglu::backward(cpu, dp, &mut inner.gate_up, spec.ffn);
        let widths = [spec.hidden, 2 * spec.ffn];
        linear::weight_gradient(cpu, &inner.gate_up, &inner.n2, &mut gradients[ranges.gate_up.clone()], widths);
        linear::input_gradient(cpu, &inner.gate_up, &w[ranges.gate_up.clone()], dn, widths);
        let saved = norm::Saved { x: &cheap.y, gain: &w[ranges.norm2.clone()], inverse: inverse2 };
        norm::backward(cpu, &saved, dn, dx, &mut gradients[ranges.norm2.clone()], &mut scratch.norm);

        let widths = [spec.q_width(), spec.hidden];
        linear::weight_gradient(cpu, dx, &inner.o, &mut gradients[ranges.out.clone()], widths);
        linear::input_gradient(cpu, dx, &w[ranges.out.clone()], d_o, widths);
        let dims = [self.extents.batch, self.extents.len, spec.q_heads, spec.head_dim];
        let grad_o = TensorView::contiguous(DType::F32, dims, bytemuck::cast_slice(d_o)).permuted([0, 2, 1, 3]);
        let [q, k, v] = &inner.qkv;
        let kv = DenseKv::new(k.view(), v.view())?;
        let (o, lse) = (cheap.attention.o.view(), &*cheap.attention.lse);
        let call = Backward { forward: self.call(q, &kv), o, lse, grad_o };
        Tiled::AUTO.backward(&call, dqkv, &mut scratch.backward)?;
        let heads = [&dqkv.q, &dqkv.k, &dqkv.v].map(|tensor| bytemuck::cast_slice(tensor.bytes()));
        heads::merge(cpu, spec, self.turns, heads, qkv);

        let widths = [spec.hidden, spec.qkv_width()];
        linear::weight_gradient(cpu, qkv, &inner.n1, &mut gradients[ranges.qkv.clone()], widths);
        linear::input_gradient(cpu, qkv, &w[ranges.qkv.clone()], dn, widths);
        let saved = norm::Saved { x, gain: &w[ranges.norm1.clone()], inverse: inverse1 };
        norm::backward(cpu, &saved, dn, dx, &mut gradients[ranges.norm1.clone()], &mut scratch.norm);
        Ok(())
    }
}
