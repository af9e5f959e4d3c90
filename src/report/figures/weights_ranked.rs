//! Weights in fewer bits by themselves, with a full cache: divergence in one line for each, the most bytes first.

use super::{Data, Picture};
use crate::experiment::measure::Measure;
use crate::experiment::weights::OtherWeights;
use crate::report::chart::{Axis, Quantity};
use crate::report::combined::{Spent, of_whole};
use crate::report::origin::weights_bytes;
use crate::report::palette::{self, Colour};
use crate::report::pools::all_pools;
use crate::report::rows::{Kind, Mark, Row, Rows};
use crate::units;

/// The figure; `None` where fewer than two kinds of weights lose anything.
pub fn rows(data: &Data) -> Option<Picture> {
    let (pools, subtitle) = all_pools(&data.of(Measure::EVAL));
    let mut alone: Vec<Spent> = of_whole(&pools).into_iter().flatten().collect();
    alone.retain(|one| one.is_plain() && palette::is_baseline(one.pool.policy) && one.kl_nats.mean > 0.0);
    alone.sort_by_key(|one| std::cmp::Reverse(weights_bytes(one.pool)));
    let row = |one: &Spent| {
        let weights = one.weights().map_or("of the file".into(), OtherWeights::short);
        let name = format!("{weights}{}, {}", one.pool.question, units::bytes(weights_bytes(one.pool)));
        Row { name, values: vec![Some((one.kl_nats.mean, one.pool.cell_ids()))] }
    };
    (alone.len() > 1).then(|| {
        Picture::Rows(Rows {
            id: "weights-ranked".into(),
            title: "Weights in fewer bits: divergence of the next token, most bytes first".into(),
            subtitle,
            caption: "KL divergence from the model as its files have it, with a full cache of plain elements; further left is \
                      better. Bytes are those of all weights as they are kept."
                .into(),
            axis: Axis { label: "KL divergence (nats per token)".into(), field: "kl_nats", quantity: Quantity::Drift },
            mark: Mark::Dot,
            kinds: vec![Kind { name: "full cache".into(), colour: Colour::sequential(0.8) }],
            rows: alone.iter().map(row).collect(),
            limit: None,
        })
    })
}
