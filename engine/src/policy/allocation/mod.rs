//! How a budget is divided: over the layers of a model, and over the heads of a layer.
//!
//! The two are chosen apart (PyramidKV's layers with Ada-KV's heads), and whatever they say, the tokens of all lists
//! together are the budget, as far as the lists hold as many; only under a threshold ([`global`]) it is the most that they are. Both may look at the scores, and may change scores of
//! lists that they rule in another way.

pub mod ada;
pub mod duo;
pub mod global;
mod near;
pub mod pyramid;
pub mod simlayer;
pub mod table;
pub mod uniform;

pub use near::Near;

use super::{Context, PolicyError, Scored, Statistic};

/// Divides a budget over layers.
pub trait OverLayers: Send + Sync {
    /// What it looks at besides scores.
    fn needs(&self) -> Vec<Statistic> {
        Vec::new()
    }

    /// Whether it gives the same to all.
    fn is_even(&self) -> bool {
        false
    }

    /// Whether it looks at the scores; of one that does not, scores on a GPU stay there.
    fn reads_scores(&self) -> bool {
        true
    }

    /// Why it gives `layers` layers the same, though it is there to divide: under a budget of `budget_tokens` in each KV head on
    /// average, of lists of `context_tokens` whose `window` latest tokens are never evicted.
    fn inert(&self, _budget_tokens: usize, _context_tokens: usize, _window: usize, _layers: usize) -> Option<String> {
        None
    }

    /// The least score that stays, where that decides and not the budget alone; for tokens that are decided on later.
    fn threshold(&self) -> Option<f32> {
        None
    }

    /// Tokens that each sequence of each layer may keep in all its heads together, `[B]` with layers folded in. At
    /// most what its lists hold. `scratch` is `[B, Hkv, kv_len]`.
    ///
    /// # Errors
    /// When something it needs is missing.
    fn totals(
        &self,
        context: &Context<'_>,
        scored: &mut Scored,
        scratch: &mut [f32],
    ) -> Result<Vec<usize>, PolicyError>;
}

/// Divides what a layer of a sequence may keep over its heads.
pub trait OverHeads: Send + Sync {
    /// What it looks at besides scores.
    fn needs(&self) -> Vec<Statistic> {
        Vec::new()
    }

    /// Whether it gives the same to all.
    fn is_even(&self) -> bool {
        false
    }

    /// Whether it looks at the scores; of one that does not, scores on a GPU stay there.
    fn reads_scores(&self) -> bool {
        true
    }

    /// Why it gives all of `kv_heads` heads the same, though it is there to divide, under a budget of `budget_tokens` in each on average.
    fn inert(&self, _budget_tokens: usize, _kv_heads: usize) -> Option<String> {
        None
    }

    /// Whether it chooses the tokens of some lists itself, in place of the scorer.
    fn settles_lists(&self) -> bool {
        false
    }

    /// Tokens that each head keeps, `[Hkv]`, `total` together where the lists of `sequence` hold as many. `scratch` is
    /// `[B, Hkv, kv_len]`.
    ///
    /// # Errors
    /// When something it needs is missing.
    fn counts(
        &self,
        context: &Context<'_>,
        scored: &mut Scored,
        sequence: usize,
        total: usize,
        scratch: &mut [f32],
    ) -> Result<Vec<usize>, PolicyError>;
}

/// Lengths of the lists of a sequence, `[Hkv]`.
pub fn lens(context: &Context<'_>, sequence: usize) -> Vec<usize> {
    let heads = context.call.shape.kv_heads;
    (sequence * heads..(sequence + 1) * heads).map(|list| context.len(list)).collect()
}

/// Tokens that a sequence may keep in all layers and heads together: its budget, or what it holds.
pub fn sequence_total(context: &Context<'_>, sequence: usize) -> usize {
    let lists = context.layers * context.call.shape.kv_heads;
    let held: usize = layers_of(context, sequence).flat_map(|index| lens(context, index)).sum();
    held.min(lists * context.budget_tokens)
}

/// What each layer of each sequence may keep, `[B]` with layers folded in. `divide` says it of one sequence, by what it may keep
/// in all, its layers' folded indices, and what their lists hold, lowest layer first.
///
/// # Errors
/// Those of `divide`.
pub fn over_layers(
    context: &Context<'_>,
    mut divide: impl FnMut(usize, &[usize], &[usize]) -> Result<Vec<usize>, PolicyError>,
) -> Result<Vec<usize>, PolicyError> {
    let mut totals = vec![0; context.call.shape.batch];
    for sequence in 0..context.sequences() {
        let layers: Vec<usize> = layers_of(context, sequence).collect();
        let caps: Vec<usize> = layers.iter().map(|&layer| lens(context, layer).iter().sum()).collect();
        let shares = divide(sequence_total(context, sequence), &layers, &caps)?;
        layers.into_iter().zip(shares).for_each(|(layer, share)| totals[layer] = share);
    }
    Ok(totals)
}

/// The folded indices of a sequence's layers, lowest layer first.
pub fn layers_of(context: &Context<'_>, sequence: usize) -> impl Iterator<Item = usize> + use<> {
    let (layers, sequences) = (context.layers, context.sequences());
    (0..layers).map(move |layer| layer * sequences + sequence)
}

/// Whole numbers in proportion to `weights`, none above its cap, `total` together where the caps allow. What rounding
/// down leaves goes to the largest fractions, and what the caps leave to those that have room, in order.
pub fn share(total: usize, weights: &[f64], caps: &[usize]) -> Vec<usize> {
    let sum: f64 = weights.iter().sum();
    let exact: Vec<f64> =
        weights.iter().map(|weight| if sum > 0.0 { total as f64 * (weight / sum) } else { 0.0 }).collect();
    let mut shares: Vec<usize> = exact.iter().map(|&exact| exact as usize).collect();
    let mut order: Vec<usize> = (0..exact.len()).filter(|&index| weights[index] > 0.0).collect();
    order.sort_by(|&a, &b| exact[b].fract().total_cmp(&exact[a].fract()));
    let left = total.saturating_sub(shares.iter().sum());
    order.into_iter().take(left).for_each(|index| shares[index] += 1);
    shares.iter_mut().zip(caps).for_each(|(share, &cap)| *share = cap.min(*share));
    level(total, &mut shares, caps);
    shares
}

/// Lowers the largest shares, or raises all that have room, until they add up to `total` (or to all the caps).
pub fn level(total: usize, shares: &mut [usize], caps: &[usize]) {
    let total = total.min(caps.iter().sum());
    let mut sum: usize = shares.iter().sum();
    while sum > total {
        let most = (0..shares.len()).rev().max_by_key(|&index| shares[index]).expect("a sum has parts");
        let excess = (sum - total).div_ceil(shares.len()).min(shares[most]);
        shares[most] -= excess;
        sum -= excess;
    }
    while sum < total {
        let open: Vec<usize> = (0..shares.len()).filter(|&index| shares[index] < caps[index]).collect();
        let each = ((total - sum) / open.len()).max(1);
        for index in open {
            let more = each.min(caps[index] - shares[index]).min(total - sum);
            shares[index] += more;
            sum += more;
        }
    }
}

/// How many of the `total` best scores of all lists together fall into each; of equal scores those of later lists,
/// and in a list the later ones, stay. Each list keeps at least its best `floor`. `scratch` holds all scores.
pub fn pooled(lists: &[&[f32]], floor: usize, total: usize, scratch: &mut [f32]) -> Vec<usize> {
    let mut counts: Vec<usize> = lists.iter().map(|list| floor.min(list.len())).collect();
    let mut len = 0;
    for (list, &floor) in lists.iter().zip(&counts) {
        let open = &mut scratch[len..len + list.len()];
        open.copy_from_slice(list);
        // What the floor keeps is no longer in the pool.
        if floor > 0 && floor < list.len() {
            open.select_nth_unstable_by(floor - 1, |a, b| b.total_cmp(a));
        }
        open.copy_within(floor.., 0);
        len += list.len() - floor;
    }
    let wanted = total.saturating_sub(counts.iter().sum());
    if wanted >= len {
        return lists.iter().map(|list| list.len()).collect();
    }
    let (_, &mut bar, _) = scratch[..len].select_nth_unstable_by(wanted, |a, b| b.total_cmp(a));
    let mut equal = Vec::with_capacity(lists.len());
    for (list, count) in lists.iter().zip(&mut counts) {
        let above = list.iter().filter(|score| score.total_cmp(&bar).is_gt()).count();
        let at_bar = list.iter().filter(|score| score.total_cmp(&bar).is_eq()).count();
        // A floor that reaches below the bar has taken some of the equal ones.
        equal.push(at_bar.saturating_sub(count.saturating_sub(above)));
        *count = above.max(*count);
    }
    let mut left = total.saturating_sub(counts.iter().sum());
    for (count, equal) in counts.iter_mut().zip(equal).rev() {
        let more = equal.min(left);
        *count += more;
        left -= more;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn pooled_counts_prefer_the_best_and_then_the_later() {
        let (a, b) = ([1.0, 5.0, 5.0], [5.0, 0.0]);
        let counts = |floor, total| pooled(&[&a, &b], floor, total, &mut [0.0; 5]);
        assert_eq!(counts(0, 1), [0, 1]);
        assert_eq!(counts(0, 2), [1, 1]);
        assert_eq!(counts(1, 2), [1, 1]);
        assert_eq!(counts(2, 4), [2, 2]);
        assert_eq!(counts(0, 9), [3, 2]);
    }

    #[test]
    fn shares_follow_the_weights() {
        let caps = [100; 4];
        assert_eq!(share(60, &[3.0, 2.0, 1.0], &caps[..3]), [30, 20, 10]);
        assert_eq!(share(10, &[0.0, 1.0, 1.0, 1.0], &caps), [0, 4, 3, 3]);
        assert_eq!(share(7, &[1e300, 1e300], &caps[..2]), [4, 3]);
        assert_eq!(share(30, &[2.0, 1.0], &[5, 100]), [5, 25]);
    }

    proptest! {
        #[test]
        fn shares_add_up_and_keep_to_their_caps(
            parts in prop::collection::vec((0.0f64..9.0, 0usize..40), 1..9),
            total in 0usize..200,
        ) {
            let (weights, caps): (Vec<f64>, Vec<usize>) = parts.into_iter().unzip();
            let shares = share(total, &weights, &caps);
            prop_assert!(shares.iter().zip(&caps).all(|(share, cap)| share <= cap));
            prop_assert_eq!(shares.iter().sum::<usize>(), total.min(caps.iter().sum()));
        }

        #[test]
        fn pooled_counts_are_those_of_one_sorted_list(
            lists in prop::collection::vec(prop::collection::vec(0u8..5, 0..12), 1..5),
            total in 0usize..50,
        ) {
            let lists: Vec<Vec<f32>> = lists.iter().map(|list| list.iter().map(|&x| f32::from(x)).collect()).collect();
            let views: Vec<&[f32]> = lists.iter().map(Vec::as_slice).collect();
            let mut all: Vec<(u32, usize)> = Vec::new();
            for (index, list) in lists.iter().enumerate() {
                all.extend(list.iter().map(|score| (score.to_bits(), index)));
            }
            all.sort_unstable_by(|a, b| b.cmp(a));
            all.truncate(total);
            let expected: Vec<usize> = (0..lists.len()).map(|index| all.iter().filter(|entry| entry.1 == index).count()).collect();
            prop_assert_eq!(pooled(&views, 0, total, &mut [0.0; 60]), expected);
        }
    }
}
