//! A model on every card: does it fit, how long a context, how large a batch; fine-tuned or only run; with layers on the host.

use super::PlanError;
use super::presets::{GPUS, WEIGHT_FORMATS, weight_format};
use super::roofline::REACHED;
use super::scenario::{DEFAULT_OVERHEAD, Memory, Scenario};
use super::train::{ADAMW, Adapters, Offload, Recompute, Training};
use super::weights::WeightFormat;
use serde::Serialize;

/// Bytes per second that a good disk gives: NVMe over four lanes of PCIe 4.
const DISK_BYTES_PER_S: f64 = 5e9;

/// Rank of adapters in the table.
pub const RANK: u64 = 16;

/// A weight format on a card.
#[derive(Debug, Clone, Serialize)]
pub struct Fit {
    /// The format.
    pub weights: &'static str,
    /// Whether the context that was asked for fits.
    pub fits: bool,
    /// The largest context.
    pub max_context_tokens: Option<u64>,
    /// The largest batch at the context.
    pub max_batch: Option<u64>,
}

/// A card.
#[derive(Debug, Clone, Serialize)]
pub struct Card {
    /// Its name.
    pub gpu: &'static str,
    /// What its driver reports.
    pub available_bytes: u64,
    /// In each of [`WEIGHT_FORMATS`] that is for the model.
    pub formats: Vec<Fit>,
    /// Adapters over bf16 weights, a sequence of the context, everything recomputed.
    pub lora_fits: bool,
    /// Adapters over nf4 weights.
    pub qlora_fits: bool,
    /// All parameters, mixed precision.
    pub full_fits: bool,
    /// Fewest layers on the host with which bf16 weights fit; `None` when none is enough.
    pub offload_layers: Option<u64>,
    /// Tokens per second of all sequences that are held, with them.
    pub offload_tokens_per_s: Option<f64>,
    /// How much slower that is than if the card had room.
    pub offload_factor: Option<f64>,
    /// Bytes that then come over the link for each token.
    pub offload_bytes: Option<u64>,
    /// Tokens per second where they come from a disk.
    pub disk_tokens_per_s: Option<f64>,
}

/// Bytes of fine-tuning one sequence: `[adapters over bf16, adapters over nf4, all parameters]`.
pub fn fine_tuning(scenario: &Scenario<'_>) -> Result<[u64; 3], PlanError> {
    let subject = scenario.subject;
    let training = Training {
        subject,
        optimizer: ADAMW,
        adapters: None,
        zero: 0,
        data_parallel: 1,
        tensor_parallel: scenario.tensor_parallel,
        sequence_parallel: false,
        pipeline: scenario.pipeline,
        micro_batch: 1,
        context: scenario.context,
        recompute: Recompute::Full,
        keeps_scores: false,
        offload: Offload::None,
        overhead_bytes: scenario.overhead_bytes.unwrap_or(DEFAULT_OVERHEAD),
    };
    training.check()?;
    let over = |format| {
        let adapters = Some(Adapters { rank: RANK, base: weight_format(format)? });
        Ok::<_, PlanError>(Training { adapters, ..training.clone() }.spent().total())
    };
    Ok([over("bf16")?, over("nf4")?, training.spent().total()])
}

/// Every card, by memory.
///
/// # Errors
/// When the budget leaves no token.
pub fn cards(scenario: &Scenario<'_>) -> Result<Vec<Card>, PlanError> {
    let tuned = fine_tuning(scenario)?;
    let formats = WEIGHT_FORMATS.iter().filter(|format| format.is_for(&scenario.subject.architecture));
    let mut gpus: Vec<_> = GPUS.iter().collect();
    gpus.sort_by_key(|gpu| gpu.mib);
    gpus.into_iter()
        .map(|gpu| {
            let on = |format| Scenario { memory: Memory::Gpu(gpu), weights: Some(format), ..scenario.clone() };
            let fit = |format: &'static WeightFormat| {
                let on = on(format);
                let (max_context_tokens, max_batch) = (on.max_context()?, on.max_batch()?);
                Ok(Fit { weights: &format.name, fits: on.fits(on.context)?, max_context_tokens, max_batch })
            };
            let whole = on(weight_format("bf16")?);
            let with = |offload| Scenario { offload, ..whole.clone() };
            let layers = scenario.subject.layers as u64;
            let mut offload_layers = None;
            for offload in 0..=layers {
                if with(offload).fits(scenario.context)? {
                    offload_layers = Some(offload);
                    break;
                }
            }
            let times = |offload| with(offload).times(REACHED);
            let (fast, slow) = (times(0)?, offload_layers.map(times).transpose()?.flatten());
            Ok(Card {
                gpu: &gpu.name,
                available_bytes: gpu.bytes(),
                formats: formats.clone().map(fit).collect::<Result<_, PlanError>>()?,
                lora_fits: tuned[0] <= gpu.bytes(),
                qlora_fits: tuned[1] <= gpu.bytes(),
                full_fits: tuned[2] <= gpu.bytes(),
                offload_layers,
                offload_tokens_per_s: slow.map(|slow| scenario.held() as f64 / slow.decode_s),
                offload_factor: fast.zip(slow).map(|(fast, slow)| slow.decode_s / fast.decode_s),
                offload_bytes: offload_layers.map(|offload| with(offload).offloaded_bytes() as u64),
                disk_tokens_per_s: slow.map(|slow| {
                    scenario.held() as f64 / (slow.decode_s - slow.link_s + slow.link_bytes / DISK_BYTES_PER_S)
                }),
            })
        })
        .collect()
}
