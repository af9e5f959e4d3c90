//! Medians, shares, paired differences and ranks, with their uncertainty.
//!
//! Intervals are 95%. A share has Wilson's score interval, which has a width even where all samples agree. A paired
//! difference of scores that are right or wrong has the adjusted Wald interval of Agresti and Min (2005): two pseudo-samples, half of one
//! a win and half a loss, keep its width above zero. Of scores in between, for which a whole win is far too much, it is Student's. Its
//! p-value is that of a sign-flip test (Fisher; of zeros and ones McNemar's exact test),
//! so that few samples cannot make it small. p-values of many comparisons are corrected by Holm's method. How sure a rank is
//! says a bootstrap over samples, the same samples for all that are ranked.

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
    quantile_of(&mut values.to_vec(), fraction)
}

/// `quantile` of values whose order may change.
fn quantile_of(values: &mut [f64], fraction: f64) -> f64 {
    let place = fraction * (values.len() - 1) as f64;
    let (_, &mut low, above) = values.select_nth_unstable_by(place.floor() as usize, f64::total_cmp);
    match above.iter().copied().min_by(f64::total_cmp) {
        Some(next) if place.fract() > 0.0 => low + (next - low) * place.fract(),
        _ => low,
    }
}

/// Bootstrap 95% interval of `statistic` over resamples of `0..count` (percentile method, ChaCha8, fixed seed).
pub fn bootstrap(count: usize, mut statistic: impl FnMut(&[usize]) -> f64) -> (f64, f64) {
    bootstrap_strata(&[count], |picked| statistic(&picked[0]))
}

/// The same over resamples of strata of so many samples each: the same ones of all where these are equally many, else of each its
/// own.
pub fn bootstrap_strata(counts: &[usize], mut statistic: impl FnMut(&[Vec<usize>]) -> f64) -> (f64, f64) {
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let mut picked: Vec<Vec<usize>> = counts.iter().map(|&count| vec![0; count]).collect();
    let alike = counts.windows(2).all(|pair| pair[0] == pair[1]);
    let results: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            for at in 0..picked.len() {
                if alike && at > 0 {
                    picked[at] = picked[0].clone();
                    continue;
                }
                let count = counts[at];
                picked[at].iter_mut().for_each(|index| *index = rng.random_range(0..count));
            }
            statistic(&picked)
        })
        .collect();
    (quantile(&results, 0.025), quantile(&results, 0.975))
}

/// Values of which an interval of the median is a 95% one; the range of fewer holds it less often.
pub const LEAST_FOR_INTERVAL: usize = 6;

/// Median and 95% interval of the median, from order statistics: the narrowest pair of values, as many from the lowest as from the
/// highest, that holds the median with 95% whatever the values are distributed like (the sign test turned round; Conover,
/// Practical Nonparametric Statistics, 3.2). Of fewer than [`LEAST_FOR_INTERVAL`] it is their range.
///
/// # Panics
/// When `values` is empty.
pub fn median_with_interval(values: &[f64]) -> (f64, f64, f64) {
    let (mut sorted, last) = (values.to_vec(), values.len() - 1);
    sorted.sort_unstable_by(f64::total_cmp);
    let outside = outside_interval(values.len());
    (quantile(&sorted, 0.5), sorted[outside], sorted[last - outside])
}

/// How many of `count` sorted values lie outside of the interval on each side: the most with which no more than 2.5% of
/// throws of as many coins have so few heads.
fn outside_interval(count: usize) -> usize {
    let n = count as f64;
    if count > 1000 {
        // Half a value for what is whole numbers (Conover).
        return ((n - Z * n.sqrt()) / 2.0 - 0.5).floor() as usize;
    }
    let (mut chance, mut all, mut outside) = (0.5f64.powi(count as i32), 0.0, 0usize);
    loop {
        all += chance;
        if all > 0.025 {
            return outside.saturating_sub(1);
        }
        chance *= (count - outside) as f64 / (outside + 1) as f64;
        outside += 1;
    }
}

/// Quantile of the normal distribution for 95% intervals.
const Z: f64 = 1.959964;

/// Wilson's interval of a share of `count` samples. For samples between 0 and 1 it is too wide, never too narrow: no
/// distribution with this mean varies more than that of zeros and ones.
pub fn wilson(share: f64, count: usize) -> (f64, f64) {
    let (n, z2) = (count as f64, Z * Z);
    let centre = (share + z2 / (2.0 * n)) / (1.0 + z2 / n);
    let half = Z / (1.0 + z2 / n) * (share * (1.0 - share) / n + z2 / (4.0 * n * n)).sqrt();
    // Rounding must not take the share itself out.
    ((centre - half).clamp(0.0, share), (centre + half).clamp(share, 1.0))
}

/// A mean paired difference of scores between 0 and 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Difference {
    /// Mean.
    pub mean: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Two-sided p-value of no difference.
    pub p: f64,
}

/// Mean of paired differences, -1 to 1, in strata that count equally for each sample: what varies between strata is no
/// uncertainty of the interval, but for strata of a single sample, which say nothing of what varies within and are taken as one. `None`
/// without any.
pub fn difference(strata: &[Vec<f64>]) -> Option<Difference> {
    let all = strata.concat();
    if all.is_empty() {
        return None;
    }
    let (alone, mut strata): (Vec<&Vec<f64>>, Vec<&Vec<f64>>) = strata.iter().partition(|stratum| stratum.len() < 2);
    let alone: Vec<f64> = alone.into_iter().flatten().copied().collect();
    strata.extend((!alone.is_empty()).then_some(&alone));
    let (count, sum) = (all.len() as f64, all.iter().sum::<f64>());
    let is_whole = all.iter().all(|x| [-1.0, 0.0, 1.0].contains(x));
    let student = if is_whole { None } else { student_interval(&strata) };
    let (low, high) = student.unwrap_or_else(|| adjusted_wald(&strata));
    let mean = sum / count;
    let (low, high) = (low.max(-1.0).min(mean), high.min(1.0).max(mean));
    let p = flipped_p(&all).unwrap_or_else(|| {
        let squares = all.iter().map(|x| x * x).sum::<f64>();
        erfc(sum.abs() / (2.0 * squares).sqrt())
    });
    Some(Difference { mean, low, high, p: p.min(1.0) })
}

/// The interval of Agresti and Min, for differences of -1, 0 and 1.
fn adjusted_wald(strata: &[&Vec<f64>]) -> (f64, f64) {
    let count = strata.iter().map(|stratum| stratum.len()).sum::<usize>() as f64;
    // The two pseudo-samples are shared by the strata.
    let more = 2.0 / strata.len() as f64;
    let squares = strata.iter().map(|stratum| squares_around_mean(stratum, more)).sum::<f64>();
    // Each stratum's mean takes a degree of freedom; that of one stratum Agresti and Min do not count.
    let freedom = count + 3.0 - strata.len() as f64;
    let error = ((squares + 1.0) / freedom / (count + 2.0)).sqrt();
    let centre = strata.iter().copied().flatten().sum::<f64>() / (count + 2.0);
    (centre - Z * error, centre + Z * error)
}

/// Student's interval of a mean over strata; `None` where nothing varies within them, which is no reason to be sure.
fn student_interval(strata: &[&Vec<f64>]) -> Option<(f64, f64)> {
    let count = strata.iter().map(|stratum| stratum.len()).sum::<usize>();
    let freedom = (count - strata.len()) as f64;
    let squares = strata.iter().map(|stratum| squares_around_mean(stratum, 0.0)).sum::<f64>();
    // What is left of equal differences is rounding.
    (freedom > 0.0 && squares > 1e-12).then_some(())?;
    let t = student_t(freedom);
    let mean = strata.iter().copied().flatten().sum::<f64>() / count as f64;
    let half = t * (squares / freedom / count as f64).sqrt();
    Some((mean - half, mean + half))
}

/// Student's t that 95% lie within, for degrees of freedom of at least 1.
fn student_t(freedom: f64) -> f64 {
    const FEW: [f64; 10] = [12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281];
    FEW.get(freedom as usize - 1).copied().unwrap_or_else(|| {
        // As a normal deviate (Wallace 1959).
        let deviate = Z * (8.0 * freedom + 3.0) / (8.0 * freedom + 1.0);
        (freedom * (deviate * deviate / freedom).exp_m1()).sqrt()
    })
}

/// Sum of squares around the mean of these and so many zeros `more`.
fn squares_around_mean(values: &[f64], more: f64) -> f64 {
    let squares = values.iter().map(|x| x * x).sum::<f64>();
    squares - values.iter().sum::<f64>().powi(2) / (values.len() as f64 + more)
}

/// Most differences whose signs are flipped in every way; of more, sums of flipped signs are close enough to normal.
const FLIPPED: usize = 14;

/// The least p-value of a difference of so many samples; `None` where it may be any that counts.
pub fn least_p(samples: usize) -> Option<f64> {
    (samples <= FLIPPED).then(|| 2.0 / (1u64 << samples) as f64)
}

/// p-value of an exact sign-flip test (Fisher) of the sum: `n` values of one sign give `2 / 2^n`. `None` of more than [`FLIPPED`] that are
/// not 0, unless all are of one size.
fn flipped_p(values: &[f64]) -> Option<f64> {
    let values: Vec<f64> = values.iter().copied().filter(|value| *value != 0.0).collect();
    if values.len() > FLIPPED && values.iter().all(|value| value.abs() == values[0].abs()) {
        // McNemar's exact test: how few of so many signs are the rarer one.
        let (count, above) = (values.len(), values.iter().filter(|value| **value > 0.0).count());
        let ways = (0..above.min(count - above)).scan(1.0, |ways, rarer| {
            *ways *= (count - rarer) as f64 / (rarer + 1) as f64;
            Some(*ways)
        });
        return (count <= 1000).then(|| (2.0 * (1.0 + ways.sum::<f64>()) / 2f64.powi(count as i32)).min(1.0));
    }
    if values.len() > FLIPPED {
        return None;
    }
    let ways = 1usize << values.len();
    let flipped = |signs: usize| {
        let sign = |at: usize| if signs >> at & 1 == 1 { -1.0 } else { 1.0 };
        values.iter().enumerate().map(|(at, value)| sign(at) * value).sum::<f64>()
    };
    // Sums in other orders differ by roundings.
    let least = flipped(0).abs() * (1.0 - 1e-12);
    let as_far = |signs: &usize| flipped(*signs).abs() >= least;
    Some((0..ways).filter(as_far).count() as f64 / ways as f64)
}

/// Two-sided p-value of the exact rank-sum test (Wilcoxon, Mann and Whitney) of two samples of so many values, all of one below all of the
/// other: two of the ways in which the ranks can fall.
pub fn rank_sum_p(one: usize, other: usize) -> f64 {
    let ways = (1..=one).fold(1.0, |ways, taken| ways * (other + taken) as f64 / taken as f64);
    (2.0 / ways).min(1.0)
}

/// Mean of paired differences without bounds, with a bootstrap interval. Its p-value is that of an exact sign-flip test, of more samples
/// Student's. `None` for less than two.
pub fn unbounded_difference(values: &[f64]) -> Option<Difference> {
    if values.len() < 2 {
        return None;
    }
    let sum: f64 = values.iter().sum();
    let mean = sum / values.len() as f64;
    let (low, high) =
        bootstrap(values.len(), |picked| picked.iter().map(|&at| values[at]).sum::<f64>() / picked.len() as f64);
    let p = flipped_p(values).unwrap_or_else(|| {
        let (count, freedom) = (values.len() as f64, values.len() as f64 - 1.0);
        let squares = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
        let error = (squares / (freedom * count)).sqrt();
        let t = if error > 0.0 { mean.abs() / error } else { f64::INFINITY };
        // Student's t as a normal deviate (Abramowitz and Stegun 26.7.8).
        let deviate = (freedom * (t * t / freedom).ln_1p()).sqrt() * (1.0 - 1.0 / (4.0 * freedom));
        if mean == 0.0 { 1.0 } else { erfc(deviate / 2f64.sqrt()) }
    });
    Some(Difference { mean, low, high, p: p.min(1.0) })
}

/// Holm's correction: p-values as they are among all of these comparisons.
pub fn holm(p: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[a].total_cmp(&p[b]));
    let (mut adjusted, mut most) = (vec![0.0; p.len()], 0.0f64);
    for (rank, &at) in order.iter().enumerate() {
        most = most.max((p.len() - rank) as f64 * p[at]).min(1.0);
        adjusted[at] = most;
    }
    adjusted
}

/// How often each contender is among the best, as a fraction of resamples; `scores` holds its lists of scores, the higher the
/// better, one value for each sample of a stratum, in the same order for all.
pub fn among_best(scores: &[Vec<Vec<f64>>]) -> Vec<f64> {
    // Contenders answered the same samples; where one lacks some, those that all have.
    let strata = scores.iter().map(Vec::len).min().unwrap_or(0);
    let least = |stratum: usize| scores.iter().map(|lists| lists[stratum].len()).min().unwrap_or(0);
    let counts: Vec<usize> = (0..strata).map(least).collect();
    let mut wins = vec![0usize; scores.len()];
    if !counts.is_empty() && !counts.contains(&0) {
        let total = |lists: &Vec<Vec<f64>>, picked: &[Vec<usize>]| {
            let of_list = |(values, picked): (&Vec<f64>, &Vec<usize>)| picked.iter().map(|&at| values[at]).sum::<f64>();
            lists.iter().zip(picked).map(of_list).sum::<f64>()
        };
        bootstrap_strata(&counts, |picked| {
            let totals: Vec<f64> = scores.iter().map(|lists| total(lists, picked)).collect();
            let best = totals.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            // Sums in other orders differ by roundings.
            let is_best = |total: &f64| *total >= best - 1e-9;
            wins.iter_mut().zip(&totals).for_each(|(wins, total)| *wins += usize::from(is_best(total)));
            0.0
        });
    }
    wins.into_iter().map(|wins| wins as f64 / RESAMPLES as f64).collect()
}

/// Complementary error function for `x >= 0`, to a relative error of 1.2e-7 (Numerical Recipes, `erfcc`).
fn erfc(x: f64) -> f64 {
    const TERMS: [f64; 10] = [
        -1.26551223,
        1.00002368,
        0.37409196,
        0.09678418,
        -0.18628806,
        0.27886807,
        -1.13520398,
        1.48851587,
        -0.82215223,
        0.17087277,
    ];
    let t = 1.0 / (1.0 + 0.5 * x);
    t * (TERMS.iter().rev().fold(0.0, |sum, term| sum * t + term) - x * x).exp()
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
    fn shares_have_wilsons_interval_and_never_none() {
        // Brown, Cai and DasGupta (2001): exact values of the formula.
        for (share, count, low, high) in [(0.0, 50, 0.0, 0.0713), (1.0, 50, 0.9287, 1.0), (0.5, 20, 0.2993, 0.7007)] {
            let (found_low, found_high) = wilson(share, count);
            assert!(
                (found_low - low).abs() < 1e-4 && (found_high - high).abs() < 1e-4,
                "{share}: {found_low} {found_high}"
            );
        }
    }

    #[test]
    fn differences_are_those_of_agresti_and_min() {
        // 20 pairs, of which 6 are won and 1 is lost: (b - c) / (n + 2), with 0.5 added to each cell of the table.
        let pairs: Vec<f64> =
            (0..20).map(|pair| if pair < 6 { 1.0 } else { f64::from(-i8::from(pair == 6)) }).collect();
        let found = difference(std::slice::from_ref(&pairs)).unwrap();
        let (b, c, n) = (6.5, 1.5, 22.0f64);
        let error = ((b + c) - (b - c) * (b - c) / n).sqrt() / n;
        assert!((found.low - ((b - c) / n - Z * error)).abs() < 1e-9, "{found:?}");
        assert!((found.high - ((b - c) / n + Z * error)).abs() < 1e-9, "{found:?}");
        assert_eq!(found.mean, 0.25);
        // Twice the upper tail of the normal distribution at 1.96.
        assert!((erfc(Z / 2f64.sqrt()) - 0.05).abs() < 1e-6 && (erfc(0.0) - 1.0).abs() < 1e-6);
        let mirrored = difference(&[pairs.iter().map(|d| -d).collect()]).unwrap();
        assert!((mirrored.low + found.high).abs() < 1e-12 && (mirrored.p - found.p).abs() < 1e-12);
        for same in [0.0, 1.0, -1.0] {
            let found = difference(&[vec![same; 20]]).unwrap();
            assert!(found.low < found.high && found.low <= same && same <= found.high, "{found:?}");
            assert_eq!(found.p < 0.05, same != 0.0);
        }
        // What is won in one task and lost in another is a difference of none, and no doubt.
        let apart = difference(&[vec![1.0; 20], vec![-1.0; 20]]).unwrap();
        assert!(apart.mean == 0.0 && apart.high < 0.15, "{apart:?}");
        assert_eq!(difference(&[]), None);
        // McNemar's exact test: twice the tail of a binomial distribution over the pairs that differ.
        let p = |won: usize, lost: usize, same: usize| {
            difference(&[[vec![1.0; won], vec![-1.0; lost], vec![0.0; same]].concat()]).unwrap().p
        };
        assert_eq!((p(9, 0, 1), p(8, 1, 30), p(3, 3, 0)), (2.0 / 512.0, 20.0 / 512.0, 1.0));
        assert_eq!((p(14, 1, 5), p(8, 8, 0)), (2.0 * 16.0 / f64::from(1 << 15), 1.0));
        assert!((p(20, 6, 3) - 0.009355).abs() < 1e-6 && p(400, 350, 0) > 0.05 && p(800, 600, 9) < 1e-6);
        // Of several sizes, nearly normal: 15 wins of 1 and 15 of a half.
        let mixed = difference(&[[vec![1.0; 15], vec![0.5; 15]].concat()]).unwrap().p;
        assert!((mixed / erfc(22.5 / (2.0 * 18.75f64).sqrt()) - 1.0).abs() < 1e-9 && mixed < 1e-6, "{mixed}");
    }

    /// A few points that hold in every sample are no matter of luck, and the interval is not that of whole wins.
    #[test]
    fn differences_of_scores_between_right_and_wrong_have_students_interval() {
        // t of 4 degrees of freedom is 2.776, and the mean's error 0.01 * sqrt(2.5 / 5).
        let found = difference(&[vec![0.04, 0.05, 0.06, 0.07, 0.08]]).unwrap();
        let half = 2.776 * 0.01 * 0.5f64.sqrt();
        assert!((found.mean - 0.06).abs() < 1e-12 && (found.high - found.low - 2.0 * half).abs() < 1e-5, "{found:?}");
        for (freedom, t) in [(1.0, 12.706), (4.0, 2.776), (10.0, 2.228), (11.0, 2.201), (19.0, 2.093), (60.0, 2.000)] {
            assert!((student_t(freedom) - t).abs() < 1e-3, "{freedom}: {}", student_t(freedom));
        }
        let of_20: Vec<f64> = (0..20).map(|at| 0.05 + 0.01 * f64::from(at % 8)).collect();
        let found = difference(std::slice::from_ref(&of_20)).unwrap();
        assert!(found.low > 0.06 && found.high < 0.11 && found.p < 0.001, "{found:?}");
        // What is the same in every sample has a width all the same, and so has a single one.
        for same in [vec![0.3; 20], vec![0.3]] {
            let found = difference(&[same]).unwrap();
            assert!(found.low < 0.25 && found.high > 0.35, "{found:?}");
        }
        // Two tasks that are each alike differ in nothing but themselves.
        let apart = difference(&[vec![0.1, 0.2, 0.15], vec![-0.2, -0.1, -0.15]]).unwrap();
        assert!(apart.mean.abs() < 1e-12 && apart.high < 0.1, "{apart:?}");
    }

    /// Where two policies are equal, intervals of differences are wrong about one time in twenty, however many tasks there are and
    /// whether or not answers can be partly right.
    #[test]
    fn intervals_of_several_tasks_hold_what_they_promise() {
        const DRAWS: usize = 4000;
        let sizes = [(1, 10), (4, 2), (4, 3), (8, 1), (8, 2), (20, 1), (20, 2), (4, 10)];
        for ((tasks, samples), parts) in sizes.into_iter().flat_map(|size| [(size, 1i32), (size, 4)]) {
            let mut rng = ChaCha8Rng::seed_from_u64(0);
            let (mut missed, mut sure) = (0, 0);
            for _ in 0..DRAWS {
                let mut sample =
                    || f64::from(rng.random_range(0..=parts) - rng.random_range(0..=parts)) / f64::from(parts);
                let strata: Vec<Vec<f64>> = (0..tasks).map(|_| (0..samples).map(|_| sample()).collect()).collect();
                let found = difference(&strata).unwrap();
                missed += usize::from(found.low > 0.0 || found.high < 0.0);
                sure += usize::from(found.p < 0.05);
            }
            assert!(missed < DRAWS * 8 / 100, "{tasks} x {samples} in {parts}: {missed} of {DRAWS} intervals");
            assert!(sure < DRAWS * 6 / 100, "{tasks} x {samples} in {parts}: {sure} of {DRAWS} p-values");
        }
    }

    #[test]
    fn differences_without_bounds_are_as_sure_as_samples_make_them() {
        let found = unbounded_difference(&[0.2, 0.3, 0.25, 0.4, 0.1, 0.35]).unwrap();
        assert!(found.low > 0.1 && found.high < 0.4 && (found.mean - 1.6 / 6.0).abs() < 1e-12, "{found:?}");
        // Six of one sign: the two of 64 ways in which all signs agree.
        assert_eq!(found.p, 2.0 / 64.0);
        assert_eq!(unbounded_difference(&[0.1, 0.2, 0.3]).unwrap().p, 2.0 / 8.0);
        assert_eq!(unbounded_difference(&[0.0; 5]).unwrap().p, 1.0);
        assert_eq!((unbounded_difference(&[]), unbounded_difference(&[0.3])), (None, None));
        // t = 2.145 of 14 degrees of freedom is the table's 5%.
        let mut table: Vec<f64> = (0..15).map(|at| at as f64 - 7.0).collect();
        let spread = (table.iter().map(|x| x * x).sum::<f64>() / 14.0).sqrt();
        table.iter_mut().for_each(|x| *x += 2.1448 * spread / 15f64.sqrt());
        assert!((unbounded_difference(&table).unwrap().p - 0.05).abs() < 1e-3);
    }

    #[test]
    fn samples_that_lie_apart_are_as_sure_as_their_ranks() {
        for (one, other, ways) in [(9, 3, 220.0), (3, 9, 220.0), (3, 3, 20.0), (4, 4, 70.0), (2, 1, 3.0)] {
            assert!((rank_sum_p(one, other) - 2.0 / ways).abs() < 1e-12, "{one} {other}");
        }
        assert_eq!((rank_sum_p(1, 1), rank_sum_p(0, 4)), (1.0, 1.0));
    }

    #[test]
    fn many_comparisons_are_corrected_in_order() {
        assert_eq!(holm(&[0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02]);
        assert_eq!(holm(&[0.9, 0.8]), [1.0, 1.0]);
    }

    #[test]
    fn who_is_best_is_sure_only_where_samples_say_so() {
        let (all, half, other): (Vec<f64>, Vec<f64>, Vec<f64>) = (
            vec![1.0; 30],
            (0..30).map(|at| f64::from(at % 2)).collect(),
            (0..30).map(|at| f64::from((at + 1) % 2)).collect(),
        );
        let contenders = |lists: &[&Vec<f64>]| lists.iter().map(|&list| vec![list.clone()]).collect::<Vec<_>>();
        assert_eq!(among_best(&contenders(&[&all, &half])), [1.0, 0.0]);
        // Of two texts one has fewer pieces: all pieces of the other count.
        let [less, more] = [[vec![1.0; 2], vec![0.0; 8]], [vec![0.0; 2], vec![1.0; 8]]];
        assert_eq!(among_best(&[more.to_vec(), less.to_vec()]), [1.0, 0.0]);
        assert_eq!(among_best(&contenders(&[&all, &all, &half])), [1.0, 1.0, 0.0]);
        let unsure = among_best(&contenders(&[&half, &other]));
        assert!(unsure.iter().all(|share| (0.35..0.75).contains(share)), "{unsure:?}");
        assert!(unsure.iter().sum::<f64>() >= 1.0);
    }

    #[test]
    fn the_interval_holds_the_median_and_shrinks_with_samples() {
        let noisy = |count: usize| -> Vec<f64> { (0..count).map(|i| ((i * 7919) % 101) as f64).collect() };
        let (median, low, high) = median_with_interval(&noisy(15));
        assert!(low <= median && median <= high && low < high);
        let (_, narrow_low, narrow_high) = median_with_interval(&noisy(1500));
        assert!(narrow_high - narrow_low < (high - low) / 3.0);
        assert_eq!(median_with_interval(&[4.0, 4.0, 4.0]), (4.0, 4.0, 4.0));
        // The second and the ninth of ten; of few samples their range.
        assert_eq!(median_with_interval(&noisy(10)[..3]), (41.0, 0.0, 82.0));
        let ten: Vec<f64> = (1..=10).map(f64::from).collect();
        assert_eq!(median_with_interval(&ten), (5.5, 2.0, 9.0));
    }

    #[test]
    fn of_intervals_of_the_median_as_many_hold_it_as_is_said() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        // Skewed as times are: the median is 1.
        let mut held = |count: usize| {
            let holds = |_: &usize| {
                let values: Vec<f64> = (0..count).map(|_| rng.random_range(-1.0f64..1.0).powi(3).exp()).collect();
                let (_, low, high) = median_with_interval(&values);
                low <= 1.0 && 1.0 <= high
            };
            (0..2000).filter(holds).count() as f64 / 2000.0
        };
        for (count, at_least, at_most) in
            [(3, 0.72, 0.78), (6, 0.955, 0.98), (10, 0.965, 0.99), (30, 0.945, 0.97), (1500, 0.935, 0.97)]
        {
            let share = held(count);
            assert!((at_least..at_most).contains(&share), "{count}: {share}");
        }
    }
}
