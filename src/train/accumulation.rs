//! Running means of keys and values: Dynamic Memory Compression (DMC, arXiv 2403.09636), relaxed.
//!
//! The token behind `t` either begins a slot of its own or accumulates into that of `t`, by `alpha_t` in `0..1`. With `m_t` the
//! tokens that the slot stands for so far,
//!
//! ```text
//! u_t = alpha_(t-1) m_(t-1)    m_t = u_t + 1    k~_t = (u_t R k~_(t-1) + k_t) / m_t    v~_t = (u_t v~_(t-1) + v_t) / m_t
//! ```
//!
//! where `R` turns a key on by one position, so that what is averaged are keys before RoPE and a slot stands where its newest token
//! does. All intermediate slots are kept, as a query may be the last that sees one; the bias of [`super::gates`] hides a slot from
//! the queries behind the token that went on with it. Every token weighs 1: the weights of the paper, a channel of the queries,
//! are left out.
//!
//! The gradient walks back through the same recurrence. `k_t` is not kept: `R k~_(t-1) - k_t = m_t (R k~_(t-1) - k~_t)`.

use super::activations::Extents;
use crate::device::Cpu;
use crate::memory::{Arena, ArenaError, Buffer, Label, LabelBytes};
use crate::model::rope::{angles, rotate};
use crate::tensor::Tensor;
use rayon::prelude::*;

/// What is accumulated, a layer at a time.
pub(super) struct Accumulation {
    /// A turn by one position, on and back, `[D]` each.
    on: Vec<f32>,
    back: Vec<f32>,
    /// Tokens of each slot, `[B, Hkv, L]`.
    masses: Buffer<f32>,
    /// Gradient by each decision, `[B, Hkv, L]`.
    pub gradient: Buffer<f32>,
}

impl Accumulation {
    /// For batches of these extents.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn new(arena: &Arena, extents: &Extents<'_>) -> Result<Self, ArenaError> {
        let config = extents.config();
        let frequencies = config.rope.frequencies(config.head_dim, config.max_positions, extents.len);
        let mut on = vec![0.0; config.head_dim];
        // A key carries the factor of rotated rows already.
        angles(&frequencies, 1, 1.0, &mut on);
        let mut back = on.clone();
        back[config.head_dim / 2..].iter_mut().for_each(|sine| *sine = -*sine);
        let tokens = || arena.alloc(Label::Activations, extents.rows() * config.kv_heads);
        Ok(Accumulation { on, back, masses: tokens()?, gradient: tokens()? })
    }

    /// Bytes that [`Accumulation::new`] takes.
    pub fn bytes(extents: &Extents<'_>) -> LabelBytes {
        let tokens = extents.rows() * extents.config().kv_heads;
        LabelBytes::from([(Label::Activations, 8 * tokens as u64)])
    }

    /// Makes keys and values `[B, Hkv, L, D]`, keys after RoPE, those of slots; `alpha` says of each of `[B, Hkv, L]` how much the token
    /// behind it accumulates.
    pub fn forward(&mut self, cpu: &Cpu, alpha: impl Fn(usize) -> f32 + Sync, heads: [&mut Tensor; 2]) {
        let ([_, _, len, width], dtype, on) = (heads[0].dims(), heads[0].dtype(), &self.on);
        let bytes = width * dtype.bytes();
        let [k, v] = heads.map(|tensor| tensor.bytes_mut().par_chunks_mut(len * bytes));
        cpu.install(|| {
            k.zip(v).zip(self.masses.par_chunks_mut(len)).enumerate().for_each(|(list, ((k, v), masses))| {
                weigh(masses, |at| alpha(list * len + at));
                let (mut slots, mut new) = ([vec![0.0; width], vec![0.0; width]], vec![0.0; width]);
                let rows = k.chunks_exact_mut(bytes).zip(v.chunks_exact_mut(bytes));
                for ((k, v), mass) in rows.zip(masses) {
                    rotate(&mut slots[0], on);
                    for (row, slot) in [k, v].into_iter().zip(&mut slots) {
                        dtype.decode(row, &mut new);
                        let kept = 1.0 - 1.0 / *mass;
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
        cpu: &Cpu,
        alpha: impl Fn(usize) -> f32 + Sync,
        heads: [&Tensor; 2],
        gradients: [&mut Tensor; 2],
    ) {
        let ([_, _, len, width], dtype) = (heads[0].dims(), heads[0].dtype());
        let (bytes, [k, v]) = (width * dtype.bytes(), heads.map(Tensor::bytes));
        let Accumulation { on, back, masses, gradient } = self;
        let [dk, dv] = gradients.map(|tensor| tensor.bytes_mut().par_chunks_mut(len * bytes));
        let lists = dk.zip(dv).zip(masses.par_chunks_mut(len)).zip(gradient.par_chunks_mut(len)).enumerate();
        cpu.install(|| {
            lists.for_each(|(list, (((dk, dv), masses), gradient))| {
                let alpha = |at: usize| alpha(list * len + at);
                weigh(masses, alpha);
                let slot = |part: usize, at: usize, to: &mut [f32]| {
                    dtype.decode(&[k, v][part][(list * len + at) * bytes..][..bytes], to);
                };
                let mut by_tokens = [dk, dv];
                // The gradient by a slot's key and value: of the queries that see it, and of the slot that goes on with it.
                let mut by_slot = [vec![0.0; width], vec![0.0; width]];
                let [mut now, mut before] = [vec![0.0; width], vec![0.0; width]];
                let mut by_mass = 0.0;
                for at in (0..len).rev() {
                    let mass = masses[at];
                    let mut apart = 0.0;
                    for (part, (by_tokens, by_slot)) in by_tokens.iter_mut().zip(&mut by_slot).enumerate() {
                        let row = &mut by_tokens[at * bytes..][..bytes];
                        dtype.decode(row, &mut now);
                        by_slot.iter_mut().zip(&now).for_each(|(sum, new)| *sum += new);
                        now.iter_mut().zip(&*by_slot).for_each(|(to, sum)| *to = sum / mass);
                        dtype.encode(&now, row);
                        if at > 0 {
                            slot(part, at, &mut now);
                            slot(part, at - 1, &mut before);
                            if part == 0 {
                                rotate(&mut before, on);
                            }
                            let differences = before.iter().zip(&now).map(|(before, now)| before - now);
                            apart += by_slot.iter().zip(differences).map(|(by, apart)| by * apart).sum::<f32>();
                        }
                        by_slot.iter_mut().for_each(|by| *by *= 1.0 - 1.0 / mass);
                        if part == 0 {
                            rotate(by_slot, back);
                        }
                    }
                    if at > 0 {
                        let by_carried = apart / mass + by_mass;
                        gradient[at - 1] = by_carried * masses[at - 1];
                        by_mass = by_carried * alpha(at - 1);
                    }
                }
                gradient[len - 1] = 0.0;
            });
        });
    }
}

/// Tokens of each slot of a list, by how much the token behind each accumulates.
fn weigh(masses: &mut [f32], alpha: impl Fn(usize) -> f32) {
    let mut mass = 0.0;
    for (at, to) in masses.iter_mut().enumerate() {
        mass = if at == 0 { 1.0 } else { alpha(at - 1) * mass + 1.0 };
        *to = mass;
    }
}
