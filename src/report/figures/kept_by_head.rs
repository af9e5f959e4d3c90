//! Who got how much: the fraction of the context that each layer and head keeps.

use super::{Data, Picture};
use crate::experiment::record::Record;
use crate::report::heat::{Across, Heat, Panel};

/// The figure: policies whose heads keep different counts; `None` where there is none.
pub fn heat(data: &Data) -> Option<Picture> {
    let (records, common) = data.evicted_layers();
    let panel = |(name, record): (String, &Record)| {
        let kept = &record.eviction.as_ref()?.kept_by_head;
        let first = *kept.first()?.first()?;
        kept.iter().flatten().any(|fraction| (fraction - first).abs() > 1e-9).then(|| {
            let rows = kept.iter().enumerate().map(|(layer, heads)| (format!("layer {layer}"), heads.clone()));
            Panel::of_cell(name, rows.collect(), &record.cell_id)
        })
    };
    let panels: Vec<Panel> = records.into_iter().filter_map(panel).collect();
    (!panels.is_empty()).then(|| {
        Picture::Heat(Heat {
            id: "kept-by-head".into(),
            title: "Fraction of the context kept by each layer and KV head".into(),
            subtitle: common,
            caption: "After prefill, mean of the sequences. Policies that give every head the same are not drawn."
                .into(),
            down: "layer",
            across: Across::Heads,
            ends: ("gone", "kept"),
            field: "kept_fraction",
            panels,
        })
    })
}
