//! What was retained where: the fraction that each layer keeps of each bin of the context.

use super::{Data, Picture};
use crate::experiment::record::Record;
use crate::report::Detail;
use crate::report::heat::{Across, Heat, Panel};

/// The figure.
pub fn heat(data: &Data) -> Option<Picture> {
    let (records, common) = data.evicted_layers();
    let context = records.first()?.1.cell.context_tokens;
    let panel = |(name, record): (String, &Record)| {
        let lists = &record.eviction.as_ref()?.kept_by_position;
        let heads = record.cell.kv_heads;
        let rows = match data.detail {
            Detail::Layers => {
                lists.chunks(heads).map(mean).enumerate().map(|(layer, row)| (layer.to_string(), row)).collect()
            }
            Detail::Heads => {
                let name = |list: usize| format!("{}.{}", list / heads, list % heads);
                let row = |list: &Vec<f32>| list.iter().copied().map(f64::from).collect();
                lists.iter().enumerate().map(|(list, kept)| (name(list), row(kept))).collect()
            }
        };
        Some(Panel::of_cell(name, rows, &record.cell_id))
    };
    let (what, rows) = match data.detail {
        Detail::Layers => ("layer", "mean of its KV heads"),
        Detail::Heads => ("layer and KV head", "named layer.head"),
    };
    Some(Picture::Heat(Heat {
        id: "kept-by-position".into(),
        title: format!("Tokens kept, by {what} and position"),
        subtitle: common,
        caption: format!(
            "Fraction kept of each of 64 equal bins of the context, oldest on the left, after prefill, in the \
             first sequence. A row is a {what} ({rows}), the lowest layer on top."
        ),
        down: what,
        across: Across::Positions(context),
        ends: ("gone", "kept"),
        field: "kept_fraction",
        panels: records.into_iter().filter_map(panel).collect(),
    }))
}

/// Mean of lists, bin by bin.
fn mean(lists: &[Vec<f32>]) -> Vec<f64> {
    let bins = lists.first().map_or(0, Vec::len);
    let of = |bin: usize| lists.iter().map(|list| f64::from(list[bin])).sum::<f64>() / lists.len() as f64;
    (0..bins).map(of).collect()
}
