//! What a model answered: the part of a record that only `eval` has.

use crate::memories::Modes;
use crate::stats::{bootstrap, difference, quantile, wilson};
use serde::{Deserialize, Serialize};

/// A mean over samples, with a 95% interval over them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// Mean.
    pub mean: f64,
    /// Lower end of the interval.
    pub ci95_low: f64,
    /// Upper end.
    pub ci95_high: f64,
}

impl Estimate {
    /// Over one value for each sample, with a bootstrap interval; `None` without any.
    pub fn over(values: &[f64]) -> Option<Self> {
        if values.is_empty() {
            return None;
        }
        let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>();
        let count = values.len() as f64;
        let (ci95_low, ci95_high) =
            bootstrap(values.len(), |picked| mean(&mut picked.iter().map(|&index| values[index])) / count);
        Some(Estimate { mean: mean(&mut values.iter().copied()) / count, ci95_low, ci95_high })
    }

    /// Mean over tasks of shares between 0 and 1, one for each sample of a task: with Wilson's interval where all are 0 or 1,
    /// a bootstrap interval over samples elsewhere, and Wilson's again where that has no width. `None` without any.
    pub fn of_shares(tasks: &[&[f64]]) -> Option<Self> {
        let count = tasks.iter().map(|values| values.len()).min().filter(|count| *count > 0)?;
        let mean_over = |picked: &[usize]| {
            let sums = tasks.iter().map(|values| picked.iter().map(|&index| values[index]).sum::<f64>());
            sums.sum::<f64>() / (picked.len() * tasks.len()) as f64
        };
        let mean = mean_over(&(0..count).collect::<Vec<_>>());
        let proportion = tasks.iter().copied().flatten().all(|&share| share == 0.0 || share == 1.0);
        let (low, high) = if proportion { (mean, mean) } else { bootstrap(count, mean_over) };
        let (ci95_low, ci95_high) = if low < high { (low, high) } else { wilson(mean, count * tasks.len()) };
        Some(Estimate { mean, ci95_low, ci95_high })
    }

    /// Mean of paired differences of such shares, with the interval of [`difference`]. `None` without any.
    pub fn of_differences(values: Vec<f64>) -> Option<Self> {
        let found = difference(&[values])?;
        Some(Estimate { mean: found.mean, ci95_low: found.low, ci95_high: found.high })
    }
}

/// How numbers of single tokens are spread.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Half of them are less.
    pub median: f64,
    /// 99 of 100 are less.
    pub p99: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// Of these; `None` without any.
    pub fn of(values: &[f64]) -> Option<Self> {
        let at = |share| quantile(values, share);
        (!values.is_empty()).then(|| Spread { median: at(0.5), p99: at(0.99), max: at(1.0) })
    }
}

/// What a model answered under a policy and a budget. Differences and agreement are with the full cache, on the same
/// samples. Intervals are over samples; each sample is the mean of its questions, or of the tokens of their right answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Answers {
    /// Samples that were asked.
    pub samples: usize,
    /// Questions, over all samples.
    pub questions: usize,
    /// Score, 0 to 1; `None` for a text that only goes on.
    pub accuracy: Option<Estimate>,
    /// Score minus that of the full cache.
    pub accuracy_difference: Option<Estimate>,
    /// Kullback-Leibler divergence from the full cache's next-token distributions, nats for each token of the right
    /// answer, fed as it is.
    pub kl_nats: Estimate,
    /// The same by token, over all samples; `None` in records from before it was written down.
    #[serde(default)]
    pub kl_of_tokens: Option<Spread>,
    /// Fraction of these tokens where both caches make the same token the likeliest.
    pub top1_agreement: Estimate,
    /// Minus the log-probability of these tokens, nats each; its exponential is the perplexity.
    pub nll_nats: Estimate,
    /// The same minus that of the full cache.
    pub nll_difference_nats: Estimate,
    /// Fraction of the full cache's own words that the answer begins with, both written greedily.
    pub greedy_agreement: Option<Estimate>,
    /// Relative L2 distance of attention's outputs from the full cache's in each layer, lowest first, over the tokens of
    /// question and right answer.
    pub o_drift_by_layer: Vec<Estimate>,
    /// Tokens of the shortest context that each KV head may keep on average; `None` where nothing is evicted, and in records
    /// from before it was written down.
    #[serde(default)]
    pub budget_tokens: Option<usize>,
    /// The same less the tokens that the policy protects: 0 where nothing but these stays, so that its scores have no say.
    #[serde(default)]
    pub unprotected_tokens: Option<usize>,
    /// Tokens of the context that stayed, on average over samples and KV heads, as a fraction.
    pub kept_fraction: f64,
    /// Tokens of the evicted contexts, on average.
    pub context_tokens: f64,
    /// Tokens of an answer, on average.
    pub answer_tokens: f64,
    /// KV bytes of a context without eviction, on average.
    pub kv_bytes_dense: u64,
    /// KV bytes of whole pages in use once the context was evicted, on average.
    pub kv_bytes_live: u64,
    /// KV bytes that the last decode step of an answer read, on average; 0 in records from before policies selected in
    /// models.
    #[serde(default)]
    pub kv_bytes_read: u64,
    /// Bytes of the model's weights; `None` in records from before cells could have no run alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights_bytes: Option<u64>,
    /// Most KV bytes in use at one moment, over the runs alone, if there were any.
    pub kv_bytes_peak: Option<u64>,
    /// Tokens evicted in the first run alone, summed over the KV heads of all layers.
    pub evicted_tokens: Option<u64>,
    /// Score of each sample, in order.
    pub sample_scores: Vec<f64>,
    /// Nats for each token, by sample.
    pub sample_kl_nats: Vec<f64>,
    /// Minus the log-probability of a token of the right answer, by sample; nothing in records from before it was written down.
    #[serde(default)]
    pub sample_nll_nats: Vec<f64>,
    /// Where the needle of each sample lies, 0 the beginning and 1 the end; empty where there is not one.
    pub sample_depths: Vec<f64>,
    /// What the modes of a memory in place of the cache hold behind a context, on average over these, lowest layer first; nothing
    /// of what has no modes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub modes_by_layer: Vec<Modes>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_estimate_holds_its_mean_and_knows_when_nothing_varies() {
        assert_eq!(Estimate::over(&[]), None);
        assert_eq!(Estimate::over(&[0.5; 4]), Some(Estimate { mean: 0.5, ci95_low: 0.5, ci95_high: 0.5 }));
        let values: Vec<f64> = (0..40).map(|index| f64::from(index % 2)).collect();
        let estimate = Estimate::over(&values).unwrap();
        assert!(estimate.ci95_low < 0.5 && estimate.mean == 0.5 && estimate.ci95_high > 0.5, "{estimate:?}");
        // Half of the width of a binomial's 95% interval is about 2 sqrt(0.25 / 40) = 0.16.
        assert!((estimate.ci95_high - estimate.ci95_low - 0.31).abs() < 0.08, "{estimate:?}");
    }

    #[test]
    fn shares_are_never_sure() {
        for values in [vec![0.0; 8], vec![1.0; 8], vec![0.25; 8], vec![1.0]] {
            let estimate = Estimate::of_shares(&[&values]).unwrap();
            assert!(estimate.ci95_low < estimate.ci95_high, "{values:?}: {estimate:?}");
            assert!(
                estimate.ci95_low <= estimate.mean && estimate.mean <= estimate.ci95_high,
                "{values:?}: {estimate:?}"
            );
        }
        // Two tasks tell more than one.
        let width =
            |tasks: &[&[f64]]| Estimate::of_shares(tasks).map(|found| found.ci95_high - found.ci95_low).unwrap();
        assert!(width(&[&[1.0; 8], &[1.0; 8]]) < width(&[&[1.0; 8]]));
        assert_eq!((Estimate::of_shares(&[]), Estimate::of_shares(&[&[]])), (None, None));
    }
}
