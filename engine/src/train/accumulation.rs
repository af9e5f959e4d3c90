//! Running means of keys and values: Dynamic Memory Compression (DMC, arXiv 2403.09636), relaxed.
//!
//! The token behind `t` either begins a slot of its own or accumulates into that of `t`, by `alpha_t` in `0..1`. Each token has a weight
//! `w_t`; with `m_t` the sum of the weights of those that the slot stands for,
//!
//! ```text
//! u_t = alpha_(t-1) m_(t-1)    m_t = u_t + w_t    k~_t = (u_t R k~_(t-1) + w_t k_t) / m_t    v~_t = (u_t v~_(t-1) + w_t v_t) / m_t
//! ```
//!
//! where `R` turns a key on by one position, so that what is averaged are keys before RoPE and a slot stands where its newest token
//! does. All intermediate slots are kept, as a query may be the last that sees one; the bias of [`super::gates`] hides a slot from
//! the queries behind the token that went on with it.
//!
//! The gradient walks back through the same recurrence. `k_t` is not kept: `w_t (R k~_(t-1) - k_t) = m_t (R k~_(t-1) - k~_t)`.

use super::activations::Extents;
use crate::attention::rope::Rotation;
use crate::device::Cpu;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::tensor::Tensor;
use rayon::prelude::*;

/// What is accumulated, a layer at a time.
pub(super) struct Accumulation {
    /// A turn by one position, on and back.
    on: Rotation,
    back: Rotation,
    /// What tokens weigh, above 0 and up to 1, `[layers, B, Hkv, L]`.
    weights: Buffer<f32>,
    /// What slots weigh, `[B, Hkv, L]`.
    masses: Buffer<f32>,
    /// Gradient by each decision, `[B, Hkv, L]`.
    pub by_alpha: Buffer<f32>,
    /// Gradient by what each weight is the sigmoid of, `[B, Hkv, L]`.
    pub by_importance: Buffer<f32>,
}

impl Accumulation {
    /// For batches of these extents.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn new(arena: &Arena, extents: &Extents<'_>) -> Result<Self, ArenaError> {
        let config = extents.config();
        let frequencies = config.rope.frequencies(config.head_dim, config.max_positions, extents.len);
        // Keys carry the factor of rotated rows already.
        let [on, back] = [1, -1].map(|tokens| Rotation::new(&frequencies, tokens));
        let each = extents.rows() * config.kv_heads;
        let tokens = |layers: usize| arena.alloc(Label::Activations, layers * each);
        let (weights, masses) = (tokens(config.layers)?, tokens(1)?);
        Ok(Accumulation { on, back, weights, masses, by_alpha: tokens(1)?, by_importance: tokens(1)? })
    }

    /// Bytes that [`Accumulation::new`] takes.
    pub fn bytes(extents: &Extents<'_>) -> u64 {
        let config = extents.config();
        (4 * extents.rows() * config.kv_heads * (config.layers + 3)) as u64
    }

    /// What the tokens of a layer weigh, `[B, Hkv, L]`.
    pub fn weights(&mut self, layer: usize) -> &mut [f32] {
        let each = self.masses.len();
        &mut self.weights[layer * each..][..each]
    }

    /// Makes keys and values `[B, Hkv, L, D]`, keys after RoPE, those of slots; `alpha` says of each of `[B, Hkv, L]` how much the token
    /// behind it accumulates.
    pub fn forward(&mut self, layer: usize, cpu: &Cpu, alpha: impl Fn(usize) -> f32 + Sync, heads: [&mut Tensor; 2]) {
        let ([_, _, len, width], dtype) = (heads[0].dims(), heads[0].dtype());
        let Accumulation { on, weights, masses, .. } = self;
        let weights = &weights[layer * masses.len()..];
        let bytes = width * dtype.bytes();
        let [k, v] = heads.map(|tensor| tensor.bytes_mut().par_chunks_mut(len * bytes));
        cpu.install(|| {
            k.zip(v).zip(masses.par_chunks_mut(len)).enumerate().for_each(|(list, ((k, v), masses))| {
                let weights = &weights[list * len..][..len];
                weigh(masses, weights, |at| alpha(list * len + at));
                let (mut slots, mut new) = ([vec![0.0; width], vec![0.0; width]], vec![0.0; width]);
                let rows = k.chunks_exact_mut(bytes).zip(v.chunks_exact_mut(bytes));
                for ((k, v), (mass, weight)) in rows.zip(masses.iter().zip(weights)) {
                    on.rotate(&mut slots[0]);
                    for (row, slot) in [k, v].into_iter().zip(&mut slots) {
                        dtype.decode(row, &mut new);
                        let kept = (mass - weight) / mass;
                        slot.iter_mut().zip(&new).for_each(|(slot, new)| *slot = new + kept * (*slot - new));
                        dtype.encode(slot, row);
                    }
                }
            });
        });
    }

    /// Turns the gradients by keys and values of slots into those by the tokens', and leaves that by each decision. `heads` are what
    /// [`Accumulation::forward`] made of keys and values.
    pub fn backward(
        &mut self,
        layer: usize,
        cpu: &Cpu,
        alpha: impl Fn(usize) -> f32 + Sync,
        heads: [&Tensor; 2],
        gradients: [&mut Tensor; 2],
    ) {
        let ([_, _, len, width], dtype) = (heads[0].dims(), heads[0].dtype());
        let (bytes, [k, v]) = (width * dtype.bytes(), heads.map(Tensor::bytes));
        let Accumulation { on, back, weights, masses, by_alpha, by_importance } = self;
        let weights = &weights[layer * masses.len()..];
        let [dk, dv] = gradients.map(|tensor| tensor.bytes_mut().par_chunks_mut(len * bytes));
        let gradients = by_alpha.par_chunks_mut(len).zip(by_importance.par_chunks_mut(len));
        let lists = dk.zip(dv).zip(masses.par_chunks_mut(len)).zip(gradients).enumerate();
        cpu.install(|| {
            lists.for_each(|(list, (((dk, dv), masses), (by_alpha, by_importance)))| {
                let (weights, alpha) = (&weights[list * len..][..len], |at: usize| alpha(list * len + at));
                weigh(masses, weights, alpha);
                let slot = |part: usize, at: usize, to: &mut [f32]| {
                    dtype.decode(&[k, v][part][(list * len + at) * bytes..][..bytes], to);
                };
                let mut by_tokens = [dk, dv];
                // The gradient by a slot's key and value: of the queries that see it, and of the slot that goes on with it.
                let mut by_slot = [vec![0.0; width], vec![0.0; width]];
                let [mut now, mut before] = [vec![0.0; width], vec![0.0; width]];
                let mut by_mass = 0.0;
                for at in (0..len).rev() {
                    let (mass, weight) = (masses[at], weights[at]);
                    let kept = (mass - weight) / mass;
                    let mut apart = 0.0;
                    for (part, (by_tokens, by_slot)) in by_tokens.iter_mut().zip(&mut by_slot).enumerate() {
                        let row = &mut by_tokens[at * bytes..][..bytes];
                        dtype.decode(row, &mut now);
                        by_slot.iter_mut().zip(&now).for_each(|(sum, new)| *sum += new);
                        now.iter_mut().zip(&*by_slot).for_each(|(to, sum)| *to = (1.0 - kept) * sum);
                        dtype.encode(&now, row);
                        if at > 0 {
                            slot(part, at, &mut now);
                            slot(part, at - 1, &mut before);
                            if part == 0 {
                                on.rotate(&mut before);
                            }
                            let differences = before.iter().zip(&now).map(|(before, now)| before - now);
                            apart += by_slot.iter().zip(differences).map(|(by, apart)| by * apart).sum::<f32>();
                        }
                        by_slot.iter_mut().for_each(|by| *by *= kept);
                        if part == 0 {
                            back.rotate(by_slot);
                        }
                    }
                    by_importance[at] = (1.0 - weight) * (weight * by_mass - kept * apart);
                    if at > 0 {
                        let by_carried = apart / mass + by_mass;
                        by_alpha[at - 1] = by_carried * masses[at - 1];
                        by_mass = by_carried * alpha(at - 1);
                    }
                }
                by_alpha[len - 1] = 0.0;
            });
        });
    }
}

/// What each slot of a list weighs, by how much the token behind each accumulates.
fn weigh(masses: &mut [f32], weights: &[f32], alpha: impl Fn(usize) -> f32) {
    let mut mass = 0.0;
    for (at, (to, weight)) in masses.iter_mut().zip(weights).enumerate() {
        let carried = if at == 0 { 0.0 } else { alpha(at - 1) * mass };
        mass = carried + weight;
        *to = mass;
    }
}
