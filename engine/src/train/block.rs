//! One block of the decoder: forward, what of it is computed again, and backward.

use super::activations::{Cheap, Extents, Inner, Recompute, Scratch};
use super::gates::Gates;
use super::head_gates::{HeadGates, Streaming};
use super::heads::{self, Turns};
use super::holder::UnitGradients;
use super::lora::{Adapters, Site};
use super::mlp;
use super::norm::{self, Columns};
use super::parameters::{BlockGroups, Group};
use super::readout::Readout;
use super::weights::Weights;
use crate::attention::{
    AttentionError, Backward, DenseKv, Forward, Gradients, Kernel, KeyBias, Outputs, Shape, Tiled, Workspace,
};
use crate::device::Cpu;
use crate::memory::Buffer;
use crate::model::norm::Norm;
use crate::model::params;
use crate::ranks::{Comm, RankError};
use crate::tensor::{DType, Tensor, TensorView};
use half::bf16;
use std::ops::RangeFrom;

/// A block at work: where its parameters are, and what all blocks share.
pub(super) struct Block<'a> {
    pub extents: &'a Extents<'a>,
    pub layer: usize,
    pub cpu: &'a Cpu,
    pub turns: &'a Turns,
    pub weights: Weights<'a>,
    pub recompute: Recompute,
    /// The first row that is computed. Those before it are what an earlier pass left, where that was kept.
    pub first: usize,
    /// The ranks that share the block: each has some of its heads and of the MLP's inner elements (Megatron-LM, arXiv 1909.08053).
    pub tensor: Option<&'a Comm>,
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
    /// The same rounded for attention, where that computes in bf16; else empty.
    pub rounded: Buffer<bf16>,
    /// Gradients by q, k and v.
    pub dqkv: Gradients,
    pub scratch: Scratch,
    /// For sums over ranks that share the block; else empty.
    pub sums: Buffer<f32>,
    /// Attention's outputs where rows are computed that later passes skip.
    pub dense: Option<Outputs>,
    /// What decides on evicted tokens, where that is trained.
    pub gates: Option<Gates>,
    /// How much each head reads of everything, where that is trained.
    pub head_gates: Option<HeadGates>,
    /// What is trained beside matrices that are frozen.
    pub adapters: Option<Adapters>,
    /// What the first keys and values of each sequence are read out of, where that is trained.
    pub readout: Option<Readout>,
    /// Norms of the gradient by what attention adds to the residual stream, `[layers, rows]`, where those are asked for.
    pub sensed: Option<Buffer<f32>>,
}

impl Block<'_> {
    fn groups(&self) -> &BlockGroups {
        &self.extents.parameters.blocks[self.layer]
    }

    fn norm(&self, gain: &Group) -> Norm<'_> {
        self.extents.config().norm(self.weights.vector(gain))
    }

    /// The rows that are computed, of a width.
    fn live(&self, width: usize) -> RangeFrom<usize> {
        self.first * width..
    }

    /// Computes the block's output from its input `x`, and everything that [`Block::backward`] reads.
    pub fn forward(
        &self,
        x: &[f32],
        cheap: &mut Cheap,
        inner: &mut Inner,
        shared: &mut Shared,
        output: &mut [f32],
    ) -> Result<(), RankError> {
        let hidden = self.extents.config().hidden;
        self.attention_inputs(x, inner, shared);
        if let Some(gates) = &mut shared.gates {
            gates.decide(self.layer, self.cpu, &inner.n1, &mut shared.scratch.products);
        }
        self.accumulate(inner, shared);
        self.attend(cheap, inner, shared)?;
        self.residual(x, cheap, inner, shared)?;
        self.mlp_inner(cheap, inner, shared)?;
        match &self.groups().after_mlp {
            Some(gain) => {
                let (from, to) = (&inner.projected[self.live(hidden)], &mut output[self.live(hidden)]);
                self.norm(gain).rows(self.cpu, from, to, hidden);
                norm::add(self.cpu, to, &cheap.y[self.live(hidden)]);
            }
            None => {
                let p = &inner.p[self.live(self.extents.config().ffn)];
                let (y, output) = (&cheap.y[self.live(hidden)], &mut output[self.live(hidden)]);
                self.leave(Site::Down, p, Some(y), output, shared)?;
            }
        }
        Ok(())
    }

    /// Computes again what `recompute` did not keep, by the same steps and so with the same bits.
    pub fn restore(
        &self,
        x: &[f32],
        cheap: &mut Cheap,
        inner: &mut Inner,
        shared: &mut Shared,
    ) -> Result<(), RankError> {
        match self.recompute {
            Recompute::None => return Ok(()),
            Recompute::Selective => {
                self.attention_inputs(x, inner, shared);
                self.accumulate(inner, shared);
                self.by_tokens(&cheap.attention, inner, &shared.head_gates);
                if self.groups().after_attention.is_some() {
                    self.residual(x, cheap, inner, shared)?;
                }
            }
            Recompute::Full => {
                self.attention_inputs(x, inner, shared);
                self.accumulate(inner, shared);
                self.attend(cheap, inner, shared)?;
                self.residual(x, cheap, inner, shared)?;
            }
        }
        self.mlp_inner(cheap, inner, shared)
    }

    fn attention_inputs(&self, x: &[f32], inner: &mut Inner, shared: &mut Shared) {
        let (config, groups) = (self.extents.config(), self.groups());
        // Every row's keys and values are read: those that another block overwrote must be computed again.
        let first = if self.recompute == Recompute::None { self.first } else { 0 };
        let (live, width) = (first * config.hidden.., first * config.qkv_width()..);
        let n1 = &mut inner.n1[live.clone()];
        self.norm(&groups.before_attention).rows(self.cpu, &x[live], n1, config.hidden);
        let norms = groups.qk_norm.as_ref().map(|norms| norms.each_ref().map(|gain| self.norm(gain)));
        let rows = if norms.is_some() { &mut inner.unnormed } else { &mut shared.qkv };
        let scratch = &mut shared.scratch.products;
        let qkv = &mut rows[width];
        groups.qkv.forward(self.cpu, self.weights, n1, qkv, false, scratch);
        if let Some(adapters) = &mut shared.adapters {
            adapters.forward((self.layer, Site::Qkv), self.cpu, n1, qkv);
        }
        heads::split(self.cpu, config, self.turns, norms, (rows, first), inner.qkv.each_mut());
        if let Some(readout) = &shared.readout {
            let [_, k, v] = &mut inner.qkv;
            readout.put(self.layer, [k, v]);
        }
    }

    /// Accumulates tokens that a gate decided on, where that is what becomes of them.
    fn accumulate(&self, inner: &mut Inner, shared: &mut Shared) {
        if let Some(gates) = &mut shared.gates {
            let [_, k, v] = &mut inner.qkv;
            gates.accumulate(self.layer, self.cpu, [k, v]);
        }
    }

    fn call<'a>(&'a self, q: &'a Tensor, kv: &'a DenseKv<'a>) -> Forward<'a> {
        let params = params(self.extents.config(), self.layer);
        let shape = Shape { q_len: self.extents.len - self.first, ..self.extents.attention() };
        Forward { shape, params, q: q.view().tokens(self.first..self.extents.len), kv, cpu: self.cpu }
    }

    /// Keys and values, perhaps with biases of the keys.
    fn kv<'a>(&self, inner: &'a Inner, bias: Option<KeyBias<'a>>) -> Result<DenseKv<'a>, AttentionError> {
        let [_, k, v] = &inner.qkv;
        let kv = DenseKv::new(k.view(), v.view())?;
        Ok(match bias {
            Some(bias) => kv.with_bias(bias),
            None => kv,
        })
    }

    /// The biases of the keys that a gate decided on.
    fn decided<'a>(&self, gates: &'a Option<Gates>) -> Option<KeyBias<'a>> {
        gates.as_ref().and_then(|gates| gates.bias(self.layer))
    }

    fn attend(&self, cheap: &mut Cheap, inner: &mut Inner, shared: &mut Shared) -> Result<(), AttentionError> {
        let [q, ..] = &inner.qkv;
        let kv = self.kv(inner, self.decided(&shared.gates))?;
        let outputs = match &mut shared.dense {
            Some(dense) if self.first < self.extents.skipped => dense,
            _ => &mut cheap.attention,
        };
        Tiled::AUTO.forward(&self.call(q, &kv), outputs, &mut shared.scratch.forward)?;
        if let Some(gates) = shared.head_gates.as_mut().filter(|gates| gates.mixes()) {
            let Streaming { bias, outputs, .. } = gates.streaming(self.layer);
            let near = self.kv(inner, Some(bias))?;
            Tiled::AUTO.forward(&self.call(q, &near), outputs, &mut shared.scratch.forward)?;
        }
        self.by_tokens(outputs, inner, &shared.head_gates);
        Ok(())
    }

    fn by_tokens(&self, outputs: &Outputs, inner: &mut Inner, head_gates: &Option<HeadGates>) {
        heads::side_by_side(self.cpu, &outputs.o, self.extents.len, &mut inner.o);
        if let Some(gates) = head_gates.as_ref().filter(|gates| gates.mixes()) {
            gates.mix(self.layer, self.cpu, self.extents.len, &mut inner.o);
        }
    }

    /// Adds up what each rank that shares the block has of `values`.
    fn sum(&self, values: &mut [f32], scratch: &mut [f32]) -> Result<(), RankError> {
        self.tensor.map_or(Ok(()), |ranks| ranks.sum(values, scratch))
    }

    /// Leaves the part of a block that ranks share, by a layer that each has some columns of: `y = x Wᵀ + b`, and `base` on top.
    fn leave(
        &self,
        site: Site,
        x: &[f32],
        base: Option<&[f32]>,
        y: &mut [f32],
        shared: &mut Shared,
    ) -> Result<(), RankError> {
        let leads = self.tensor.is_none_or(|ranks| ranks.rank() == 0);
        match base {
            Some(base) if leads => y.copy_from_slice(base),
            Some(_) => y.fill(0.0),
            None => {}
        }
        let add = base.is_some();
        let layer = site.linear(self.groups());
        layer.forward_of(self.cpu, self.weights, x, y, (add, leads), &mut shared.scratch.products);
        if let Some(adapters) = &mut shared.adapters {
            adapters.forward((self.layer, site), self.cpu, x, y);
        }
        self.sum(y, &mut shared.sums)
    }

    /// Gradients by q, k and v from that by attention's output by tokens, `d_o`.
    fn attention_backward(
        &self,
        (q, kv): (&Tensor, &DenseKv<'_>),
        outputs: &Outputs,
        (d_o, rounded): (&[f32], &mut [bf16]),
        dqkv: &mut Gradients,
        workspace: &mut Workspace,
    ) -> Result<(), AttentionError> {
        let config = self.extents.config();
        let dims = [self.extents.batch, self.extents.len - self.first, config.q_heads, config.head_dim];
        let dtype = self.extents.dtype();
        let grad_o: &[u8] = match dtype {
            DType::F32 => bytemuck::cast_slice(d_o),
            _ => bytemuck::cast_slice(heads::round(self.cpu, d_o, rounded)),
        };
        let grad_o = TensorView::contiguous(dtype, dims, grad_o).permuted([0, 2, 1, 3]);
        let call = Backward { forward: self.call(q, kv), o: outputs.o.view(), lse: &outputs.lse, grad_o };
        Tiled::AUTO.backward(&call, dqkv, workspace)
    }

    fn residual(&self, x: &[f32], cheap: &mut Cheap, inner: &mut Inner, shared: &mut Shared) -> Result<(), RankError> {
        let groups = self.groups();
        let (hidden, o) = (self.extents.config().hidden, &inner.o[self.live(self.extents.config().q_width())]);
        let (x, y) = (&x[self.live(hidden)], &mut cheap.y[self.live(hidden)]);
        match &groups.after_attention {
            Some(gain) => {
                let attended = &mut inner.attended[self.live(hidden)];
                self.leave(Site::Out, o, None, attended, shared)?;
                self.norm(gain).rows(self.cpu, attended, y, hidden);
                norm::add(self.cpu, y, x);
            }
            None => self.leave(Site::Out, o, Some(x), y, shared)?,
        }
        Ok(())
    }

    fn mlp_inner(&self, cheap: &Cheap, inner: &mut Inner, shared: &mut Shared) -> Result<(), RankError> {
        let (config, groups) = (self.extents.config(), self.groups());
        let scratch = &mut shared.scratch.products;
        let (hidden, ffn) = (config.hidden, config.ffn);
        let (y, n2) = (&cheap.y[self.live(hidden)], &mut inner.n2[self.live(hidden)]);
        let (gate_up, p) = (&mut inner.gate_up[self.live(2 * ffn)], &mut inner.p[self.live(ffn)]);
        self.norm(&groups.before_mlp).rows(self.cpu, y, n2, hidden);
        groups.gate_up.forward(self.cpu, self.weights, n2, gate_up, false, scratch);
        if let Some(adapters) = &mut shared.adapters {
            adapters.forward((self.layer, Site::GateUp), self.cpu, n2, gate_up);
        }
        mlp::forward(self.cpu, config.activation, gate_up, p, ffn);
        if groups.after_mlp.is_some() {
            self.leave(Site::Down, p, None, &mut inner.projected[self.live(hidden)], shared)?;
        }
        Ok(())
    }

    /// Turns `dx` from the gradient by the block's output to that by its input, and adds to the parameters' gradients.
    pub fn backward(
        &self,
        x: &[f32],
        cheap: &Cheap,
        inner: &mut Inner,
        shared: &mut Shared,
        gradients: &mut UnitGradients<'_>,
        dx: &mut [f32],
    ) -> Result<(), RankError> {
        let (config, groups, cpu, w) = (self.extents.config(), self.groups(), self.cpu, self.weights);
        let Shared { qkv, dp, dn, d_o, rounded, dqkv, scratch, sums, .. } = shared;
        let Shared { gates, head_gates, adapters, readout, sensed, .. } = shared;
        let (hidden, ffn, q_width, qkv_width) = (config.hidden, config.ffn, config.q_width(), config.qkv_width());
        let [stream, inside, doubled] = [hidden, ffn, 2 * ffn].map(|width| self.live(width));
        let [of_q, of_qkv] = [q_width, qkv_width].map(|width| self.live(width));
        let columns = Columns { range: 0..hidden, stride: hidden };
        // The gradient by a layer's inputs, from that by its outputs, and those by what of it is trained.
        let mut layer = |site: Site,
                         dy: &[f32],
                         x: &[f32],
                         gradients: &mut UnitGradients<'_>,
                         dx: &mut [f32],
                         scratch: &mut [f32]| {
            let layer = site.linear(groups);
            layer.gradients(cpu, dy, x, gradients);
            layer.backward(cpu, w, dy, dx, false, scratch);
            if let Some(adapters) = &mut *adapters {
                adapters.backward((self.layer, site), cpu, (dy, x), dx);
            }
        };
        let norm_backward =
            |gain: &Group, x: &[f32], dn: &mut [f32], gradients: &mut UnitGradients<'_>, sums: &mut [f32]| {
                norm::backward(cpu, self.norm(gain), x, dn, &columns, (gain, gradients), sums);
            };
        let (all_n1, all_dn) = (&inner.n1, dn);
        let (dx, dn) = (&mut dx[stream.clone()], &mut all_dn[stream.clone()]);
        let (x, y) = (&x[stream.clone()], &cheap.y[stream.clone()]);
        let (dp, d_o, products) = (&mut dp[inside.clone()], &mut d_o[of_q.clone()], &mut scratch.products);
        let (gate_up, p, o) = (&mut inner.gate_up[doubled], &inner.p[inside], &inner.o[of_q]);

        match &groups.after_mlp {
            Some(gain) => {
                dn.copy_from_slice(dx);
                norm_backward(gain, &inner.projected[stream.clone()], dn, gradients, &mut scratch.norm);
                layer(Site::Down, dn, p, gradients, dp, products);
            }
            None => layer(Site::Down, dx, p, gradients, dp, products),
        }
        mlp::backward(cpu, config.activation, dp, gate_up, ffn);
        layer(Site::GateUp, gate_up, &inner.n2[stream.clone()], gradients, dn, products);
        self.sum(dn, sums)?;
        norm_backward(&groups.before_mlp, y, dn, gradients, &mut scratch.norm);
        norm::add(cpu, dx, dn);

        match &groups.after_attention {
            Some(gain) => {
                dn.copy_from_slice(dx);
                norm_backward(gain, &inner.attended[stream.clone()], dn, gradients, &mut scratch.norm);
                layer(Site::Out, dn, o, gradients, d_o, products);
            }
            None => layer(Site::Out, dx, o, gradients, d_o, products),
        }
        if let Some(sensed) = sensed {
            let added = if groups.after_attention.is_some() { &*dn } else { &*dx };
            let to = &mut sensed[self.layer * self.extents.rows()..][..self.extents.rows()][self.first..];
            let rows = added.chunks_exact(hidden);
            to.iter_mut().zip(rows).for_each(|(to, row)| *to = row.iter().map(|x| x * x).sum::<f32>().sqrt());
        }
        let [q, k, v] = &inner.qkv;
        let mut attention = |bias, outputs: &Outputs, d_o: &[f32], dqkv: &mut Gradients| {
            let kv = self.kv(inner, bias)?;
            self.attention_backward((q, &kv), outputs, (d_o, rounded), dqkv, &mut scratch.backward)?;
            if let Some(readout) = &mut *readout {
                readout.take(self.layer, [&mut dqkv.k, &mut dqkv.v]);
            }
            Ok::<_, AttentionError>(())
        };
        let merge = |dqkv: &Gradients, qkv: &mut [f32]| {
            heads::merge(cpu, config, self.turns, [&dqkv.q, &dqkv.k, &dqkv.v], (qkv, self.first));
        };
        match head_gates {
            Some(head_gates) => {
                head_gates.divide(self.layer, cpu, &cheap.attention.o, d_o);
                attention(None, &cheap.attention, d_o, dqkv)?;
                merge(dqkv, qkv);
                let Streaming { bias, outputs, d_o, dqkv: near } = head_gates.streaming(self.layer);
                attention(Some(bias), outputs, d_o, dqkv)?;
                merge(dqkv, near);
                norm::add(cpu, qkv, near);
            }
            None => {
                attention(self.decided(gates), &cheap.attention, d_o, dqkv)?;
                if let Some(gates) = gates {
                    gates.accumulate_backward(self.layer, cpu, [k, v], [&mut dqkv.k, &mut dqkv.v]);
                }
                merge(dqkv, qkv);
            }
        }
        let qkv = &mut qkv[of_qkv.clone()];
        for (gain, range) in groups.qk_norm.iter().flatten().zip(heads::columns(config)) {
            let columns = Columns { range, stride: qkv_width };
            let unnormed = &inner.unnormed[of_qkv.clone()];
            norm::backward(cpu, self.norm(gain), unnormed, qkv, &columns, (gain, gradients), &mut scratch.norm);
        }
        layer(Site::Qkv, qkv, &all_n1[stream], gradients, dn, &mut scratch.products);
        self.sum(dn, sums)?;
        if let (Some(gates), Some(dbias)) = (gates, &dqkv.bias) {
            gates.backward(self.layer, cpu, all_n1, dbias, (dn, self.first), &mut scratch.products);
        }
        norm_backward(&groups.before_attention, x, dn, gradients, &mut scratch.norm);
        norm::add(cpu, dx, dn);
        Ok(())
    }
}
