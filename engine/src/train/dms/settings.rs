//! What a run of `--method dms` or `dmc` is asked for, and what follows from it step by step.

use crate::model::Config;
use crate::policy::DecidedBy;
use crate::tensor::DType;
use crate::train::adamw::Constants;
use crate::train::gate_functions::check_inner;
use crate::train::gates::{Design, Fate};
use crate::train::lora::Asked;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::path::PathBuf;

/// Fraction of a ratio's steps over which it rises.
const RAMP: f64 = 0.8;

/// What is trained, on what, for how long.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The model: a folder, a GGUF file, or `builtin`.
    pub model: PathBuf,
    /// Tokens for each that stays, behind a window: one ratio, or several that are reached one after the other.
    pub ratios: Vec<f64>,
    /// Tokens of the window in which none is evicted.
    pub window: usize,
    /// A text to learn from; generated text and tasks without one.
    pub text: Option<PathBuf>,
    /// Whether the model writes what it learns from itself, in place of a text.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub written: bool,
    /// Steps.
    pub steps: usize,
    /// Tokens of a sequence.
    pub length: usize,
    /// Sequences of a step.
    pub batch: usize,
    /// First number of everything random.
    pub seed: u64,
    /// Largest learning rate.
    pub learning_rate: f32,
    /// Weight of the term that asks for eviction.
    pub pressure: f64,
    /// Whose hidden state decides on a token.
    #[serde(default, skip_serializing_if = "is_itself")]
    pub decided_by: DecidedBy,
    /// Whether tokens that go are accumulated into the one behind them (`--method dmc`), with a window of 1 and the next token deciding.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub accumulates: bool,
    /// Elements of an inner layer of the gates' functions; linear ones have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inner: Option<usize>,
    /// Adapters that are trained beside the gates; none of the model itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapters: Option<Asked>,
    /// Type of the model's matrices: f32 or bf16.
    pub weights: DType,
}

fn is_itself(by: &DecidedBy) -> bool {
    *by == DecidedBy::Itself
}

impl Settings {
    /// The method, as it is named.
    pub fn method(&self) -> &'static str {
        if self.accumulates { "dmc" } else { "dms" }
    }

    /// What the gates are.
    pub(super) fn design(&self) -> Design {
        let dropped = Fate::Dropped { window: self.window, by: self.decided_by };
        Design { fate: if self.accumulates { Fate::Accumulated } else { dropped }, inner: self.inner }
    }

    pub(super) fn check(&self, config: &Config) -> Result<(), String> {
        let Settings { window, length, steps, batch, learning_rate, pressure, .. } = *self;
        if self.ratios.is_empty() {
            return Err("no ratio is asked for; give at least one above 1".into());
        }
        if self.accumulates && self.inner.is_some() {
            return Err("gates of dmc are linear; leave out the inner layer".into());
        }
        let mut least = 1.0;
        for &ratio in &self.ratios {
            if !(ratio.is_finite() && ratio > least) {
                return Err(format!("the ratio is {ratio}; it must be finite and above {least}"));
            }
            least = ratio;
        }
        config.check_even_windows()?;
        if self.adapters.is_some() && self.ratios.len() > 1 {
            return Err(format!(
                "{} ratios are asked for; adapters go with the gates of one, so train each by itself",
                self.ratios.len()
            ));
        }
        if window == 0 || window.saturating_add(1) >= length {
            return Err(format!(
                "the window is {window}; it must be 1 to {}, so that sequences of {length} tokens have some behind it",
                length.saturating_sub(2)
            ));
        }
        check_inner(self.inner)?;
        if self.accumulates && (window, self.decided_by) != (1, DecidedBy::Next) {
            return Err(format!(
                "the window is {window} and {} decides; tokens are accumulated with a window of 1, and next decides",
                self.decided_by.name()
            ));
        }
        if !(16..=config.most_tokens()).contains(&length) {
            return Err(format!(
                "the length is {length}; it must be 16 to the model's longest context, {}",
                config.most_tokens()
            ));
        }
        if steps == 0 || batch == 0 {
            return Err(format!("{steps} steps of {batch} sequences; both must be at least 1"));
        }
        if !(learning_rate > 0.0 && learning_rate.is_finite() && pressure > 0.0 && pressure.is_finite()) {
            return Err(format!(
                "learning rate {learning_rate} and pressure {pressure}; both must be finite and above 0"
            ));
        }
        let mut done = 0;
        for &ratio in &self.ratios {
            if self.end(ratio) == done {
                return Err(format!("{steps} steps leave none for the ratio {ratio}; give more steps or fewer ratios"));
            }
            done = self.end(ratio);
        }
        Ok(())
    }

    /// Steps that are done when gates of a ratio are.
    fn end(&self, ratio: f64) -> usize {
        let last = self.ratios[self.ratios.len() - 1];
        ((ratio - 1.0) / (last - 1.0) * self.steps as f64).round() as usize
    }

    /// The ratio that a step is on the way to, the one before it, and the steps of this way.
    pub(super) fn stage(&self, step: usize) -> (f64, f64, Range<usize>) {
        let at = self.ratios.iter().position(|ratio| step < self.end(*ratio)).unwrap_or(self.ratios.len() - 1);
        let (from, to) = (if at == 0 { 1.0 } else { self.ratios[at - 1] }, self.ratios[at]);
        (to, from, self.end(from)..self.end(to))
    }

    /// The fraction of tokens to be evicted in a step.
    pub fn target(&self, step: usize) -> f64 {
        let (to, from, steps) = self.stage(step);
        let risen = ((step + 1 - steps.start) as f64 / (RAMP * steps.len() as f64)).min(1.0);
        1.0 - 1.0 / (from + (to - from) * risen)
    }

    /// Whether gates that `evicted` a fraction by step `done` let go of everything, or, past half of the steps, of next to
    /// nothing.
    pub(super) fn collapsed(&self, done: usize, evicted: f64, target: f64) -> bool {
        evicted > 0.99 && evicted > target + 0.01 || 2 * done > self.steps && evicted < target / 4.0
    }

    pub(super) fn optimizer(&self) -> Constants {
        Constants {
            learning_rate: self.learning_rate,
            warmup_steps: 10.min(self.steps / 10),
            final_share: 0.1,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            clip: 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_rises_to_the_one_asked_for_and_both_collapses_are_seen() {
        let settings = Settings {
            model: "builtin".into(),
            ratios: vec![4.0],
            window: 8,
            text: None,
            written: false,
            steps: 100,
            length: 64,
            batch: 1,
            seed: 0,
            learning_rate: 1e-3,
            pressure: 1.0,
            decided_by: DecidedBy::Itself,
            accumulates: false,
            inner: None,
            adapters: None,
            weights: DType::F32,
        };
        let targets: Vec<f64> = (0..100).map(|step| settings.target(step)).collect();
        assert!(targets[0] < 0.05 && targets.is_sorted());
        assert_eq!((targets[78] < 0.75, targets[79], targets[99]), (true, 0.75, 0.75));
        // Ratios one after the other: a seventh, two sevenths and four of the steps.
        let several = Settings { ratios: vec![2.0, 4.0, 8.0], steps: 700, ..settings.clone() };
        let targets: Vec<f64> = (0..700).map(|step| several.target(step)).collect();
        assert!(targets.is_sorted());
        assert_eq!([79, 99, 259, 299, 619, 699].map(|step| targets[step]), [0.5, 0.5, 0.75, 0.75, 0.875, 0.875]);
        assert!(targets[100] > 0.5 && targets[258] < 0.75 && targets[300] > 0.75 && targets[618] < 0.875);
        assert_eq!(several.stage(150), (4.0, 2.0, 100..300));
        let cases = [
            (10, 0.995, 0.3, true),
            (90, 0.995, 0.96, true),
            (90, 0.995, 0.99, false),
            (20, 0.0, 0.3, false),
            (60, 0.1, 0.6, true),
            (60, 0.2, 0.6, false),
        ];
        for (done, evicted, target, expected) in cases {
            assert_eq!(settings.collapsed(done, evicted, target), expected, "{done} {evicted} {target}");
        }
    }
}
