//! Times by the roofline: bytes over bandwidth or operations over speed, whichever takes longer, with two constants.
//!
//! A decode step reads the weights that its tokens pass through and all keys and values. Prefill is bound by products;
//! naive attention besides writes and reads its scores four times. The constants say what fraction of a card's peaks is
//! reached: the naive column of FlashAttention's table 18 (A100, N of 2K and more) gives 0.67 of the bandwidth, good
//! products reach 0.6 of the operations. Offloaded layers come over the link in every pass.

use super::PlanError;
use super::presets::Gpu;
use super::scenario::{Attention, Phase, Scenario};
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
}

impl Times {
    /// Of a sequence's share of a request: the first token of those that are read together, and so many more of those that are
    /// decoded together.
    pub fn sequence_s(&self, scenario: &Scenario<'_>, tokens: u64) -> f64 {
        self.prefill_s / scenario.batch as f64 + tokens as f64 * self.decode_s / scenario.held() as f64
    }
}

impl Scenario<'_> {
    /// Bytes of weights that a pass of `tokens` tokens reads: of experts those that some token is expected to choose.
    pub fn read_bytes(&self, tokens: u64) -> f64 {
        let shape = &self.subject.architecture;
        let (all, active) = (self.subject.parameters as f64, self.subject.active_parameters as f64);
        let looked_up = if shape.tied { 0.0 } else { (shape.vocab * shape.hidden) as f64 };
        let multiplied = all - looked_up;
        let idle = multiplied - active;
        let missed = shape.experts.map_or(0.0, |experts| 1.0 - experts.active as f64 / experts.count as f64);
        let read = if missed > 0.0 { multiplied - idle * missed.powf(tokens as f64 - 1.0) } else { active };
        self.subject.weight_bytes(self.weights).total() as f64 * read / all
    }

    /// Times on the card, if one of the table was named.
    ///
    /// # Errors
    /// When the budget leaves no token.
    pub fn times(&self, reached: Reached) -> Result<Option<Times>, PlanError> {
        let Some(gpu) = self.memory.gpu() else { return Ok(None) };
        let cards = (self.tensor_parallel * self.pipeline) as f64;
        // A token goes through the stages of a pipeline one after another.
        let bandwidth = gpu.gb_per_s * 1e9 * reached.bandwidth * self.tensor_parallel as f64;
        let operations = gpu.tflops * 1e12 * reached.operations * self.tensor_parallel as f64;
        let link = self.offloaded_bytes() as f64 / (gpu.link_bytes_per_s() * cards);
        let held = self.bytes_at(Phase::Decode, self.context)?.kv as f64 * cards;
        let here = 1.0 - (self.offload as f64 / self.subject.layers as f64).min(1.0);
        let decode_bytes = self.read_bytes(self.held()) * here + held;
        let decode_flops = 2.0 * self.subject.active_parameters as f64 * self.held() as f64;
        let decode_s = (decode_bytes / bandwidth).max(decode_flops / operations) + link;
        Ok(Some(Times {
            prefill_s: self.prefill_s(gpu, bandwidth, operations, link),
            decode_s,
            decode_bytes,
            link_bytes: self.offloaded_bytes() as f64,
        }))
    }

    fn prefill_s(&self, gpu: &Gpu, bandwidth: f64, operations: f64, link: f64) -> f64 {
        let shape = &self.subject.architecture;
        let tokens = self.batch as f64 * self.context as f64;
        let passes = self.context.div_ceil(self.pass_tokens(self.context)) as f64;
        let eight = self.weights.is_some_and(|format| format.name == "fp8");
        let faster = gpu.fp8_tflops.filter(|_| eight).map_or(1.0, |fp8| fp8 / gpu.tflops);
        let products = 2.0 * self.subject.active_parameters as f64 * tokens / (operations * faster);
        let reads = passes * self.read_bytes(self.batch.saturating_mul(self.pass_tokens(self.context))) / bandwidth;
        let all = self.context as f64;
        let layers = self.subject.groups.iter().map(|group| (group.layers as f64, group.window));
        let pairs = match self.attention {
            // Pairs behind a query, or beyond its window, are skipped.
            Attention::Tiled => layers
                .map(|(layers, window)| {
                    let window = window.map_or(all, |window| all.min(window as f64));
                    layers * window * (all - window / 2.0)
                })
                .sum::<f64>(),
            _ => layers.map(|(layers, _)| layers * all * all).sum(),
        };
        let pairs = pairs * self.batch as f64 * shape.heads as f64;
        let products_s = 4.0 * pairs * shape.head_dim as f64 / operations;
        let attention = match self.attention {
            Attention::Tiled => products_s,
            // Written, read, written, read: four passes in 16 bits.
            _ => (4.0 * 2.0 * pairs / bandwidth).max(products_s),
        };
        products.max(reads) + attention + passes * link
    }
}
