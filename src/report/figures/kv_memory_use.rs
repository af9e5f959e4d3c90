//! Where the slots of a pool are under each allocation strategy, beside what the vLLM paper prints.

use super::Data;
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::report::bars::{Bar, Bars, Part};
use crate::report::chart::{Axis, Quantity};
use crate::report::palette::Colour;
use crate::serving::{Usage, published};
use std::collections::BTreeMap;

/// From below: what is useful stands on the axis, where heights are compared best.
const PARTS: [Part; 4] = [
    Part { name: "tokens", field: "token_fraction", colour: Colour(0x00, 0x72, 0xB2) },
    Part { name: "reserved", field: "reserved_fraction", colour: Colour(0x56, 0xB4, 0xE9) },
    Part { name: "internal", field: "internal_fraction", colour: Colour(0xD5, 0x5E, 0x00) },
    Part { name: "external", field: "external_fraction", colour: Colour(0xBB, 0xBB, 0xBB) },
];

/// The figure. Of page sizes only 16, the paper's, is shown where it was simulated: the others have a figure of their
/// own.
pub fn bars(data: &Data) -> Option<Bars> {
    // Records come sorted by trace and then by strategy.
    type Seeds<'r> = Vec<(&'r Record, &'r Usage)>;
    let mut bars: Vec<(String, String, Seeds)> = Vec::new();
    for record in data.of(Measure::SERVE).into_iter().filter(|record| record.status == Status::Ok) {
        let (Some(trace), Some(strategy), Some(usage)) = (&record.cell.trace, &record.cell.strategy, &record.serving)
        else {
            continue;
        };
        match bars.last_mut().filter(|(of, by, _)| of == trace && by == strategy) {
            Some((.., seeds)) => seeds.push((record, usage)),
            None => bars.push((trace.clone(), strategy.clone(), vec![(record, usage)])),
        }
    }
    let is_paged = |strategy: &str| strategy.starts_with("paged");
    let is_usual = |strategy: &str| ["paged", "paged:page=16"].contains(&strategy);
    let mut has_usual: BTreeMap<String, bool> = BTreeMap::new();
    for (trace, strategy, _) in &bars {
        *has_usual.entry(trace.clone()).or_default() |= is_usual(strategy);
    }
    bars.retain(|(trace, strategy, _)| !is_paged(strategy) || is_usual(strategy) || !has_usual[trace]);
    let bars: Vec<Bar> = bars.iter().map(|(trace, strategy, seeds)| bar(trace, strategy, seeds)).collect();
    (!bars.is_empty()).then(|| Bars {
        id: "kv-memory-use".into(),
        title: "Where KV memory goes".into(),
        subtitle: format!("simulated request traces, memory always full · paler: {}", published::SOURCE),
        caption:
            "Mean fraction of the pool's slots over all steps. Tokens: keys and values that are there. Reserved: set \
                  aside for tokens that running requests will have. Internal: inside what a request holds, and never \
                  used by it. External: free, or lost to an allocator's rounding. Batch: requests that run at a time; \
                  the paper's load did not fill the memory of its paged system, so its batch is smaller there."
                .into(),
        y: Axis { label: "fraction of the pool's slots".into(), field: "fraction", quantity: Quantity::Share },
        parts: PARTS.into(),
        paler_label: "paper (vLLM)".into(),
        paler_prefix: "published_",
        notes_name: false,
        bars,
    })
}

/// The mean over seeds.
fn bar(trace: &str, strategy: &str, seeds: &[(&Record, &Usage)]) -> Bar {
    let mean =
        |read: &dyn Fn(&Usage) -> f64| seeds.iter().map(|(_, usage)| read(usage)).sum::<f64>() / seeds.len() as f64;
    let published = published::of(trace, strategy);
    let printed = published.and_then(|row| row.shares_percent).unwrap_or_default();
    let mut notes = vec![format!("batch {:.1}", mean(&|usage| usage.mean_batch))];
    notes.extend(published.map(|row| format!("paper {:.1}", row.batch)));
    Bar {
        group: trace.into(),
        name: strategy.replace("paged:page=", "paged "),
        notes,
        values: vec![
            mean(&|usage| usage.token_fraction),
            mean(&|usage| usage.reserved_fraction),
            mean(&|usage| usage.internal_fraction),
            mean(&|usage| usage.external_fraction),
        ],
        paler: printed.iter().map(|share| share.map(|percent| percent / 100.0)).collect(),
        cell_ids: seeds.iter().map(|(record, _)| record.cell_id.clone()).collect(),
    }
}
