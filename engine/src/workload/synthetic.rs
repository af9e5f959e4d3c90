//! Generates the synthetic workload, head by head, each from random streams of its own.

use super::ask::Asker;
use super::calibrate::{Channels, QUIET_NOISE, Strengths};
use super::plan::{Plan, Planted, Role};
use super::{Extents, Needle, SyntheticSpec, Workload, WorkloadError};
use crate::attention::rope::{RopeBase, rotate};
use crate::memory::{Arena, Label};
use crate::tensor::Tensor;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;

/// What a random stream is drawn for.
#[derive(Clone, Copy)]
enum Part {
    Q,
    K,
    V,
    Plan,
    Norm,
}

/// Everything that the heads of a workload have in common.
struct Scene<'a> {
    spec: &'a SyntheticSpec,
    extents: &'a Extents,
    seed: u64,
    channels: Channels,
    /// Of each layer.
    layers: Vec<LayerScene>,
}

/// What the heads of a layer have in common.
struct LayerScene {
    spec: SyntheticSpec,
    retrieval: Strengths,
    local: Strengths,
}

impl SyntheticSpec {
    /// Says whether a workload of these extents can be planted, without making it.
    ///
    /// # Errors
    /// As [`SyntheticSpec::generate`], but for what depends on the seed and for memory.
    pub fn check_extents(&self, extents: &Extents) -> Result<(), WorkloadError> {
        Scene::new(self, extents, 0).map(|_| ())
    }

    /// Generates a workload. It depends on the knobs, the extents and the seed only, not on the number of threads.
    ///
    /// # Errors
    /// When a knob is out of range, the extents have no room for what is planted, a mass cannot be reached with so few
    /// channels, or the arena has no room.
    pub fn generate(&self, extents: &Extents, seed: u64, arena: &Arena) -> Result<Workload, WorkloadError> {
        let scene = Scene::new(self, extents, seed)?;
        let zeros = |dims| Tensor::zeros(arena, Label::Input, extents.dtype, dims);
        let mut workload = Workload {
            q: zeros(extents.q_dims())?,
            k: zeros(extents.kv_dims())?,
            v: zeros(extents.kv_dims())?,
            needles: Vec::new(),
            rope: Some(RopeBase::Theta(self.rope_theta)),
        };
        let head_bytes = extents.total_tokens() * extents.head_dim * extents.dtype.bytes();
        let group_bytes = extents.q_heads / extents.kv_heads * head_bytes;
        let needles = workload
            .q
            .bytes_mut()
            .par_chunks_mut(group_bytes)
            .zip(workload.k.bytes_mut().par_chunks_mut(head_bytes))
            .zip(workload.v.bytes_mut().par_chunks_mut(head_bytes))
            .with_max_len(1)
            .enumerate()
            .map(|(head, ((q, k), v))| scene.head(head / extents.kv_heads, head % extents.kv_heads, q, k, v))
            .collect::<Result<Vec<_>, _>>()?;
        workload.needles = needles.concat();
        Ok(workload)
    }
}

impl<'a> Scene<'a> {
    fn new(spec: &'a SyntheticSpec, extents: &'a Extents, seed: u64) -> Result<Self, WorkloadError> {
        spec.check()?;
        extents.check()?;
        spec.check_room(extents)?;
        let channels = Channels::new(spec, extents)?;
        let layer = |layer: usize| -> Result<LayerScene, WorkloadError> {
            let spec = spec.of_layer(layer, extents.layers);
            let solve = |knob, mass| Strengths::solve(&spec, extents, &channels, knob, mass);
            let retrieval = solve("band_mass", spec.band_mass)?;
            let local = solve("local_band_mass", spec.local_band_mass)?;
            Ok(LayerScene { spec, retrieval, local })
        };
        let layers = (0..extents.layers).map(layer).collect::<Result<Vec<_>, _>>()?;
        Ok(Scene { spec, extents, seed, channels, layers })
    }

    fn plan(&self, batch: usize, kv_head: usize) -> (Plan, Strengths) {
        let is_retrieval = kv_head < self.spec.retrieval_heads_of(self.extents.kv_heads);
        let layer = &self.layers[batch / self.extents.batch];
        let strengths = if is_retrieval { layer.retrieval } else { layer.local };
        let mut rng = self.stream(Part::Plan, batch, kv_head);
        (Plan::draw(&layer.spec, self.extents, &self.channels, &strengths, is_retrieval, &mut rng), strengths)
    }

    /// Writes one KV head and the query heads of its group, and tells its needles.
    fn head(
        &self,
        batch: usize,
        kv_head: usize,
        q: &mut [u8],
        k: &mut [u8],
        v: &mut [u8],
    ) -> Result<Vec<Needle>, WorkloadError> {
        let (plan, strengths) = self.plan(batch, kv_head);
        self.keys(&plan, &mut self.stream(Part::K, batch, kv_head), k);
        let [mut rng, mut norms] = [Part::V, Part::Norm].map(|part| self.stream(part, batch, kv_head));
        self.rows(v, |token, row| {
            normals(&mut rng, row);
            let norm = self.value_norm(&plan, token, &mut norms) as f32;
            row.iter_mut().for_each(|x| *x *= norm);
        });
        let group = self.extents.q_heads / self.extents.kv_heads;
        let tokens = self.extents.total_tokens();
        let mut asker = Asker::new(self.extents.dtype, k, tokens, self.extents.head_dim);
        for (index, q) in q.chunks_exact_mut(k.len()).enumerate() {
            let mut rng = self.stream(Part::Q, batch, kv_head * group + index);
            self.queries(&plan, &strengths, &mut rng, &mut asker, q)?;
        }
        let needle = |needle: &Planted| Needle {
            batch,
            kv_head,
            position: needle.position,
            asked_by: needle.asked_by,
            hinted: needle.hinted_by.is_some(),
        };
        Ok(plan.needles.iter().map(needle).collect())
    }

    /// Norm of a token's value, as a part of what noise has.
    fn value_norm(&self, plan: &Plan, token: usize, rng: &mut impl Rng) -> f64 {
        let deviate: f64 = StandardNormal.sample(rng);
        let spread = (self.spec.value_spread * deviate).exp();
        match plan.role(token, self.spec.sinks) {
            Role::Sink => self.spec.sink_value_norm * spread,
            Role::Heavy(_) => self.spec.heavy_value_norm * spread,
            Role::Ordinary | Role::Needle(_) => spread,
        }
    }

    fn keys(&self, plan: &Plan, rng: &mut impl Rng, k: &mut [u8]) {
        let Channels { frequencies, cone, band, free } = &self.channels;
        let width = self.extents.head_dim;
        let norm = (width as f32).sqrt();
        // A needle's key has no noise; its direction has the norm that noise and band have in an ordinary key.
        let needle_norm = (width as f32 - 2.0).sqrt();
        self.rows(k, |token, row| {
            normals(rng, row);
            let role = plan.role(token, self.spec.sinks);
            let salience = match role {
                Role::Ordinary => 0.0,
                Role::Sink => 1.0,
                Role::Heavy(salience) => salience,
                Role::Needle(_) => self.spec.needle_salience,
            };
            match role {
                Role::Needle(_) => row.fill(0.0),
                Role::Sink => row.iter_mut().for_each(|x| *x *= QUIET_NOISE as f32),
                Role::Ordinary | Role::Heavy(_) => self.scale_planted(row, QUIET_NOISE as f32),
            }
            row[*cone] -= (1.0 - salience) as f32 * norm;
            if let Role::Ordinary = role {
                row[band.clone()].iter_mut().for_each(|x| *x += std::f32::consts::SQRT_2);
            }
            rotate(row, token, frequencies);
            if let Role::Needle(needle) = role {
                free.iter().for_each(|&channel| row[channel] = needle_norm * needle.direction[channel]);
            }
        });
    }

    fn queries(
        &self,
        plan: &Plan,
        strengths: &Strengths,
        rng: &mut impl Rng,
        asker: &mut Asker<'_>,
        q: &mut [u8],
    ) -> Result<(), WorkloadError> {
        let Channels { frequencies, cone, band, free } = &self.channels;
        let width = self.extents.head_dim;
        // A key's free channels are N(0, 1): with this the logits' noise has the standard deviation of the knob.
        let noise = (self.spec.noise * (width as f64 / free.len() as f64).sqrt()) as f32;
        let height = strengths.band * (width as f64).sqrt() / (band.len().max(1) as f64 * std::f64::consts::SQRT_2);
        let mut reached = true;
        self.rows(q, |token, row| {
            normals(rng, row);
            row.iter_mut().for_each(|x| *x *= noise);
            self.scale_planted(row, 0.0);
            row[*cone] = strengths.cone as f32;
            row[band.clone()].fill(height as f32);
            rotate(row, token, frequencies);
            if let Some(needle) = plan.asked(token) {
                reached &= asker.ask(row, token, &needle.direction, needle.position, self.spec.needle_mass);
            }
        });
        if reached {
            return Ok(());
        }
        Err(WorkloadError::Unreachable {
            knob: "needle_mass",
            value: self.spec.needle_mass,
            head_dim: width,
            tokens: self.extents.total_tokens(),
        })
    }

    /// Scales the channels of the cone and of the band.
    fn scale_planted(&self, row: &mut [f32], factor: f32) {
        let (first, second) = row.split_at_mut(self.extents.head_dim / 2);
        for half in [first, second] {
            half[self.channels.cone] *= factor;
            half[self.channels.band.clone()].iter_mut().for_each(|x| *x *= factor);
        }
    }

    /// Fills the rows of one head, each from a row in f32.
    fn rows(&self, head: &mut [u8], mut fill: impl FnMut(usize, &mut [f32])) {
        let mut row = vec![0f32; self.extents.head_dim];
        for (token, target) in head.chunks_exact_mut(row.len() * self.extents.dtype.bytes()).enumerate() {
            fill(token, &mut row);
            self.extents.dtype.encode(&row, target);
        }
    }

    /// The random numbers of one part of one head.
    fn stream(&self, part: Part, batch: usize, head: usize) -> ChaCha8Rng {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream((part as u64) << 48 | (batch as u64) << 24 | head as u64);
        rng
    }
}

fn normals(rng: &mut impl Rng, row: &mut [f32]) {
    row.iter_mut().for_each(|x| *x = StandardNormal.sample(rng));
}

#[cfg(test)]
mod tests;
