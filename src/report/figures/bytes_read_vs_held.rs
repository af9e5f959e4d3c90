//! Methods that hold everything and read little: bytes of a decode step against bytes in use.

use super::{Data, Reading, budget, policy};
use crate::experiment::record::Eviction;
use crate::report::SPARSE;
use crate::report::chart::{Axis, Chart, Quantity};
use crate::report::naming::{CONTEXT, HEADS, KERNEL, Naming};

/// The figure; `None` where every step reads what there is.
pub fn chart(data: &Data) -> Option<Chart> {
    let records = data.evicted_at_longest_context();
    let sparse = |eviction: &Eviction| (eviction.kv_bytes_read as f64) < SPARSE * eviction.kv_bytes_live as f64;
    if !records.iter().filter_map(|record| record.eviction.as_ref()).any(sparse) {
        return None;
    }
    let naming = Naming::over(&records, &[CONTEXT, HEADS, KERNEL]);
    let series = data.series(&records, &naming, policy, budget, |record| {
        let eviction = record.eviction.as_ref()?;
        Some(Reading::measured(eviction.kv_bytes_live as f64, eviction.kv_bytes_read as f64, None))
    });
    (!series.is_empty()).then(|| Chart {
        id: "kv-bytes-read-vs-held".into(),
        title: "KV bytes read by a decode step against KV bytes held".into(),
        subtitle: naming.common,
        caption: "Eviction reads what it holds. A sparse method goes down without going to the left: steps are \
                  cheaper, memory is not."
            .into(),
        x: Axis { label: "live KV bytes".into(), field: "kv_bytes_live", quantity: Quantity::Bytes },
        y: Axis { label: "KV bytes read by a step".into(), field: "kv_bytes_read", quantity: Quantity::Bytes },
        interval_fields: ("low", "high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}
