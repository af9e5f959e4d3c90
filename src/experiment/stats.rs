//! Medians and their uncertainty.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// Resamples of a bootstrap.
const RESAMPLES: usize = 1000;

/// The value at a fraction of the sorted order, linear between neighbours.
///
/// # Panics
/// When `values` is empty.
pub fn quantile(values: &[f64], fraction: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let place = fraction * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    low + (high - low) * place.fract()
}

/// Bootstrap 95% interval of `statistic` over resamples of `0..count` (percentile method, ChaCha8, fixed seed).
pub fn bootstrap(count: usize, mut statistic: impl FnMut(&[usize]) -> f64) -> (f64, f64) {
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let mut picked = vec![0; count];
    let results: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            picked.iter_mut().for_each(|index| *index = rng.random_range(0..count));
            statistic(&picked)
        })
        .collect();
    (quantile(&results, 0.025), quantile(&results, 0.975))
}

/// Median and bootstrap 95% interval of the median.
pub fn median_with_interval(values: &[f64]) -> (f64, f64, f64) {
    let mut picked = vec![0.0; values.len()];
    let (low, high) = bootstrap(values.len(), |indices| {
        picked.iter_mut().zip(indices).for_each(|(value, &index)| *value = values[index]);
        quantile(&picked, 0.5)
    });
    (quantile(values, 0.5), low, high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_interpolate() {
        assert_eq!(quantile(&[3.0, 1.0, 2.0], 0.5), 2.0);
        assert_eq!(quantile(&[1.0, 2.0], 0.5), 1.5);
        assert_eq!(quantile(&[5.0], 0.9), 5.0);
        assert_eq!(quantile(&[0.0, 10.0], 0.1), 1.0);
    }

    #[test]
    fn the_interval_holds_the_median_and_shrinks_with_samples() {
        let noisy = |count: usize| -> Vec<f64> { (0..count).map(|i| ((i * 7919) % 101) as f64).collect() };
        let (median, low, high) = median_with_interval(&noisy(15));
        assert!(low <= median && median <= high && low < high);
        let (_, narrow_low, narrow_high) = median_with_interval(&noisy(1500));
        assert!(narrow_high - narrow_low < (high - low) / 3.0);
        assert_eq!(median_with_interval(&[4.0, 4.0, 4.0]), (4.0, 4.0, 4.0));
        assert_eq!(median_with_interval(&noisy(15)), median_with_interval(&noisy(15)));
    }
}
