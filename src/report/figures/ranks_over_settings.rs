//! Ranks of policies over settings of the synthetic inputs: a line for each, from its best rank to its worst.

use super::{Data, Picture};
use crate::report::chart::{Axis, Quantity};
use crate::report::knobs::{Ranked, rankings};
use crate::report::palette::Colour;
use crate::report::rows::{Kind, Mark, Row, Rows};

/// The figure, at the middle of the budgets; `None` where nothing was measured under several settings.
pub fn rows(data: &Data) -> Option<Picture> {
    let mut rankings = rankings(&data.of_all_settings);
    let middle = rankings.len() / 2;
    let ranking = (middle < rankings.len()).then(|| rankings.swap_remove(middle))?;
    let row = |policy: &Ranked| {
        let (best, median, worst) = policy.range();
        let ids = || policy.cell_ids.concat();
        Row {
            name: policy.name.clone(),
            values: [best as f64, median, worst as f64].map(|rank| Some((rank, ids()))).to_vec(),
        }
    };
    let kind = |(name, share): (&str, f64)| Kind { name: name.into(), colour: Colour::sequential(share) };
    Some(Picture::Rows(Rows {
        id: "ranks-over-settings".into(),
        title: "Ranks over settings of the inputs".into(),
        subtitle: ranking.common.clone(),
        caption: format!(
            "Rank by drift among {} policies, 1 having the least, under {} settings of the knobs of the synthetic inputs: \
             the best, the median and the worst. A policy whose dots lie far apart is ranked by the inputs, not by what it is. \
             Settings: {}.",
            ranking.policies.len(),
            ranking.settings.len(),
            ranking.settings.join("; ")
        ),
        axis: Axis { label: "rank by drift".into(), field: "rank", quantity: Quantity::Steps },
        mark: Mark::Dot,
        kinds: [("best", 0.35), ("median", 0.65), ("worst", 0.95)].map(kind).to_vec(),
        rows: ranking.policies.iter().map(row).collect(),
        limit: None,
    }))
}
