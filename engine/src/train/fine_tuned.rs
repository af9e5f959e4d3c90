//! What it takes to fine-tune a fact in: LoRA on the one statement, until its value is the likelier half of what follows. To
//! compare an edit of [`super::larimar`] with.

use super::activations::{Extents, Recompute};
use super::adamw::{AdamW, Constants};
use super::holder::Whole;
use super::lora::{Adapters, Asked, Layout};
use super::loss::Target;
use super::run::TrainError;
use super::weights::Frozen;
use super::{Batch, Network, Parameters};
use crate::device::Cpu;
use crate::memory::Arena;
use crate::stats::median_with_interval;
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// Most steps for a fact.
const MOST_STEPS: usize = 100;
/// As much as a fact of one statement bears: fewer steps than with smaller rates.
const RATE: f32 = 5e-3;

/// Facts that were fine-tuned in, each into adapters of its own.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct FineTuned {
    /// Facts.
    pub facts: usize,
    /// Facts whose value had more than half of the probability within the most steps.
    pub learned: usize,
    /// Median of a fact's steps.
    pub steps: f64,
    /// Median of their seconds, without opening the model.
    pub seconds: f64,
}

/// Fine-tunes each of some statements in, by rank-8 adapters of `q` and `v`: its tokens, of which the last is learned.
pub(super) fn fine_tune(
    (weights, parameters): (&Frozen, &Parameters),
    statements: &[Vec<u32>],
    cpu: &Cpu,
    limit_bytes: u64,
) -> Result<FineTuned, TrainError> {
    let asked = Asked { rank: 8, alpha: 16.0, targets: vec!["q".into(), "v".into()] };
    let layout = Layout::new(parameters, &asked).expect("every model has q and v");
    let constants = Constants {
        learning_rate: RATE,
        warmup_steps: 0,
        final_share: 1.0,
        weight_decay: 0.0,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        clip: 1.0,
    };
    let (mut steps, mut seconds, mut learned) = (Vec::new(), Vec::new(), 0);
    for tokens in statements {
        let arena = Arena::with_limit(limit_bytes);
        let (&token, read) = tokens.split_last().expect("a statement has tokens");
        let extents = Extents { parameters, batch: 1, len: read.len(), skipped: 0 };
        let targets = vec![Target { row: read.len() - 1, token, weight: 1.0 }];
        let batch = Batch { tokens: read.to_vec(), targets };
        let adapters = Adapters::new(&arena, layout.clone(), &extents, 0)?;
        let mut adamw = AdamW::new(&arena, layout.count())?;
        let mut network = Network::new(&arena, cpu, extents, Recompute::None)?.with_adapters(adapters);
        let (began, mut step) = (Instant::now(), 0);
        let is_learned = loop {
            network.adapters().gradient.fill(0.0);
            let loss = network.step_of(&mut Whole { weights: weights.all(), gradients: &mut [] }, &batch)?;
            if loss < std::f64::consts::LN_2 || step == MOST_STEPS {
                break loss < std::f64::consts::LN_2;
            }
            let Adapters { weights, gradient, layout, .. } = network.adapters();
            adamw.update(cpu, &constants, &layout.parameters, (step, RATE), weights, gradient);
            step += 1;
        };
        seconds.push(began.elapsed().as_secs_f64());
        steps.push(step as f64);
        learned += usize::from(is_learned);
    }
    let [(steps, ..), (seconds, ..)] = [&steps, &seconds].map(|values| median_with_interval(values));
    Ok(FineTuned { facts: statements.len(), learned, steps, seconds })
}
