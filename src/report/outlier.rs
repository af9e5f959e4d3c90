//! Whether a mean over pieces of a text is that of one of them: where a piece repeats a page of its context, most policies lose that
//! one and hardly another, and who reads only the mean learns nothing of the others.

use super::comparison::Ranked;

/// Fewest samples of which one can stand out.
const FEWEST: usize = 4;

/// What is to be said of a budget's policies where one sample has more than half of the divergence of most of them.
pub fn sentence(ranked: &[Ranked]) -> Option<String> {
    let lists: Vec<Vec<f64>> = ranked.iter().map(|ranked| ranked.pool.sample_kl_nats().concat()).collect();
    let samples = lists.first().filter(|list| list.len() >= FEWEST)?.len();
    let is_scored = ranked[0].pool.is_scored();
    let has_most = |list: &&Vec<f64>, at: usize| list[at] > list.iter().sum::<f64>() / 2.0;
    let count = |at: usize| lists.iter().filter(|list| list.len() == samples && has_most(list, at)).count();
    let (policies, at) = (0..samples).map(|at| (count(at), at)).max()?;
    (!is_scored && 2 * policies > ranked.len()).then(|| {
        format!(
            " Sample {} of {samples} alone has more than half of the divergence of {policies} of {} policies.",
            at + 1,
            ranked.len(),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::super::{comparison, pools, samples};
    use super::*;

    #[test]
    fn one_sample_of_many_is_told_where_it_is_most_of_the_mean() {
        let said = |of_first: f64, in_policies: usize| {
            let mut records = samples::formats().records;
            records.retain(|record| record.cell.kv_format.is_none() && record.cell.budget.as_deref() != Some("0.25"));
            for record in records.iter_mut().filter(|record| record.cell.budget.is_some()).take(in_policies) {
                record.answers.as_mut().unwrap().sample_kl_nats[0] = of_first;
            }
            let records: Vec<_> = records.iter().collect();
            let (pools, _) = pools::pools(&records);
            sentence(&comparison::ranked(&pools)[0])
        };
        // Nineteen others of about 0.2.
        assert_eq!(said(3.0, 2), None);
        assert_eq!(said(9.0, 1), None);
        assert_eq!(
            said(9.0, 2).unwrap(),
            " Sample 1 of 20 alone has more than half of the divergence of 2 of 2 policies."
        );
    }
}
