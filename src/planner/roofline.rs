//! Times by the roofline: bytes over bandwidth or operations over speed, whichever takes longer, with two constants.
//!
//! A decode step reads the weights that its tokens pass through and all keys and values, or what a policy selects of them.
//! Prefill is bound by products; naive attention besides writes and reads its scores four times. The constants say what
//! fraction of a card's peaks is reached: the naive column of FlashAttention's table 18 (A100, N of 2K and more) gives
//! 0.67 of the bandwidth, good products reach 0.6 of the operations. Offloaded layers come over the link in every pass.

use super::PlanError;
use super::architecture::KvGroup;
use super::eviction::Eviction;
use super::presets::Gpu;
use super::scenario::{Attention, Scenario};
use serde::Serialize;

/// Fraction of a card's peaks that is reached.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reached {
    /// Of the bandwidth.
    pub bandwidth: f64,
    /// Of the operations per second.
    pub operations: f64,
}

/// What is reached where nothing was measured.
pub const REACHED: Reached = Reached { bandwidth: 0.67, operations: 0.6 };

/// Times of a scenario.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Times {
    /// Until the first token.
    pub prefill_s: f64,
    /// Of a decode step behind the context.
    pub decode_s: f64,
    /// Bytes that a decode step reads on all cards together.
    pub decode_bytes: f64,
    /// Bytes over the link for each pass.
    pub link_bytes: f64,
    /// Time that they take, which each pass waits for.
    pub link_s: f64,
}

impl Times {
    /// Of a sequence's share of a request: the first token of those that are read together, and so many more of those that are
    /// decoded together.
    pub fn sequence_s(&self, scenario: &Scenario<'_>, tokens: u64) -> f64 {
        self.prefill_s / scenario.batch as f64 + tokens as f64 * self.decode_s / scenario.held() as f64
    }
}

impl Scenario<'_> {
    /// Bytes of weights that a pass of `tokens` tokens reads from the cards' memory: the output matrix, and of blocks those
    /// that are there, of experts those that some token is expected to choose.
    pub fn read_bytes(&self, tokens: u64) -> f64 {
        let shape = &self.subject.architecture;
        let held = self.subject.weight_bytes(self.weights);
        let blocks = (self.subject.parameters - shape.outside().total()) as f64;
        let idle = shape.idle_parameters() as f64;
        let missed = shape.experts.map_or(0.0, |experts| 1.0 - experts.active as f64 / experts.count as f64);
        // Experts may have bits of their own.
        let bits = self.weights.and_then(|format| format.bits.experts);
        let idle_bytes = bits.map_or(held.layers as f64 * idle / blocks, |bits| idle * bits / 8.0);
        // A token misses all that is idle; of several each misses another part.
        let unread = if idle > 0.0 { idle_bytes * missed.powf(tokens as f64 - 1.0) } else { 0.0 };
        let here = 1.0 - (self.offload as f64 / self.subject.layers as f64).min(1.0);
        held.last_end(shape.tied) as f64 + (held.layers as f64 - unread) * here
    }

    /// Times on the card, if one of the table was named.
    ///
    /// # Errors
    /// When the budget leaves no token.
    pub fn times(&self, reached: Reached) -> Result<Option<Times>, PlanError> {
        let Some(gpu) = self.memory.gpu() else { return Ok(None) };
        // A token goes through the stages of a pipeline one after another, and what a stage lacks comes when it is its turn.
        let bandwidth = gpu.gb_per_s * 1e9 * reached.bandwidth * self.tensor_parallel as f64;
        let operations = gpu.tflops * 1e12 * reached.operations * self.tensor_parallel as f64;
        let cards = self.tensor_parallel as f64;
        let link_s = self.offloaded_bytes() as f64 / (gpu.link_bytes_per_s() * cards);
        // The slowest of the cards that share a layer decides.
        let one_stage = Scenario { pipeline: 1, ..self.clone() };
        let decode_bytes = self.read_bytes(self.held()) + one_stage.step_kv_bytes()? as f64 * cards;
        let decode_flops = 2.0 * self.subject.active_parameters as f64 * self.held() as f64;
        let decode_s = (decode_bytes / bandwidth).max(decode_flops / operations) + link_s;
        Ok(Some(Times {
            prefill_s: self.prefill_s(gpu, bandwidth, operations, link_s)?,
            decode_s,
            decode_bytes,
            link_bytes: self.offloaded_bytes() as f64,
            link_s,
        }))
    }

    fn prefill_s(&self, gpu: &Gpu, bandwidth: f64, operations: f64, link_s: f64) -> Result<f64, PlanError> {
        let shape = &self.subject.architecture;
        let tokens = self.batch as f64 * self.context as f64;
        let passes = self.context.div_ceil(self.pass_tokens(self.context)) as f64;
        let eight = self.weights.is_some_and(|format| format.name == "fp8");
        let faster = gpu.fp8_tflops.filter(|_| eight).map_or(1.0, |fp8| fp8 / gpu.tflops);
        let products = 2.0 * self.subject.active_parameters as f64 * tokens / (operations * faster);
        let reads = passes * self.read_bytes(self.batch.saturating_mul(self.pass_tokens(self.context))) / bandwidth;
        // Nothing is evicted before the policy's first chunk was read.
        let piece = self.evicting().and_then(Eviction::chunk_tokens).filter(|&chunk| chunk < self.context);
        let retained = if piece.is_some() { self.retained(self.context)? } else { self.context };
        let piece = piece.unwrap_or(self.context);
        let pairs = |group: &KvGroup| group.layers as f64 * self.pairs(retained, piece, group.window);
        let pairs = self.subject.groups.iter().map(pairs).sum::<f64>() * (self.batch * shape.heads as u64) as f64;
        let [k_dim, v_dim] = shape.head_dims();
        let products_s = 2.0 * pairs * (k_dim + v_dim) as f64 / operations;
        let attention = match self.attention {
            Attention::Tiled => products_s,
            // Written, read, written, read: four passes in 16 bits.
            _ => (4.0 * 2.0 * pairs / bandwidth).max(products_s),
        };
        Ok(products.max(reads) + attention + passes * link_s)
    }

    /// Pairs of a query and a key of a head that are multiplied while a sequence's context is read, of which a list holds no more
    /// than `retained` tokens between pieces of `piece` tokens, whatever passes each is read in.
    fn pairs(&self, retained: u64, piece: u64, window: Option<usize>) -> f64 {
        let [all, retained, piece] = [self.context, retained, piece].map(|tokens| tokens as f64);
        let seen = window.map_or(all, |window| all.min(window as f64));
        let passes = self.context.div_ceil(self.pass_tokens(self.context)) as f64;
        let pass = all / passes;
        match self.attention {
            // Pairs behind a query, or beyond its window, are skipped: half of a piece's own.
            Attention::Tiled => {
                let most = seen.min(retained + piece / 2.0);
                most * (all - most / 2.0)
            }
            // All of a pass, and of what is held before it.
            _ => {
                let before = seen.min(retained + (piece - pass).max(0.0) / 2.0);
                let growing = passes.min((before / pass).floor() + 1.0);
                pass * (pass * growing * (growing - 1.0) / 2.0 + (passes - growing) * before) + pass * all
            }
        }
    }
}
