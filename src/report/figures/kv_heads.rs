//! What grouped-query attention saves: KV bytes for each token, and time, against the number of KV heads.

use super::{Data, Reading, band};
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::report::chart::{Axis, Chart, Quantity, Series};
use crate::report::naming::{CONTEXT, Naming, Q_HEADS};
use crate::report::text::kv_bytes;

/// Keys and values of one token, in bytes.
pub fn bytes_per_token(data: &Data) -> Option<Chart> {
    let all = |measure| comparable(data, measure, |record| kv_bytes(record).is_some());
    let records = Some(all(Measure::DECODE)).filter(|found| !found.is_empty()).unwrap_or_else(|| all(Measure::FORWARD));
    let read = |record: &Record| {
        let cell = &record.cell;
        let elements = 2 * cell.kv_heads * cell.head_dim;
        Some(Reading {
            x: cell.kv_heads as f64,
            y: Some(kv_bytes(record)? as f64 / (cell.batch * cell.context_tokens) as f64),
            interval: None,
            model: Some((elements * cell.dtype.bytes()) as f64),
        })
    };
    let chart = chart(data, &records, read)?;
    Some(Chart {
        id: "kv-bytes-per-token-vs-kv-heads".into(),
        title: "KV cache per token".into(),
        caption: "Points: measured KV bytes divided by tokens. Line: 2 · Hkv · D · bytes of an element.".into(),
        y: Axis { label: "KV bytes per token".into(), field: "kv_bytes_per_token", quantity: Quantity::Bytes },
        model_field: Some("predicted_kv_bytes_per_token"),
        interval_fields: ("low", "high"),
        ..chart
    })
}

/// Time of a forward pass.
pub fn forward_latency(data: &Data) -> Option<Chart> {
    latency(data, Measure::FORWARD, "forward-latency-vs-kv-heads", "Time of a forward pass against KV heads")
}

/// Time of a decode step.
pub fn decode_latency(data: &Data) -> Option<Chart> {
    latency(data, Measure::DECODE, "decode-latency-vs-kv-heads", "Time of a decode step against KV heads")
}

fn latency(data: &Data, measure: Measure, id: &str, title: &str) -> Option<Chart> {
    let phase = measure.name();
    let records = comparable(data, measure, |record| record.latency.contains_key(phase));
    let read = |record: &Record| Some(Reading::latency(record.cell.kv_heads as f64, record.latency.get(phase)?));
    let chart = chart(data, &records, read)?;
    Some(Chart { id: id.into(), title: title.into(), ..chart })
}

/// A figure of times over KV heads, without name and title.
fn chart(data: &Data, records: &[&Record], read: impl Fn(&Record) -> Option<Reading>) -> Option<Chart> {
    let naming = Naming::over(records, &[CONTEXT, Q_HEADS]);
    let heads = |record: &Record| record.cell.kv_heads.to_string();
    let series: Vec<Series> = data.series(records, &naming, |record| record.cell.kernel.clone(), heads, read);
    (!series.is_empty()).then(|| Chart {
        id: String::new(),
        title: String::new(),
        subtitle: naming.common,
        caption: format!(
            "Medians; {}, or the range over seeds. Fewer KV heads than query heads: grouped-query attention; one: multi-query \
             attention.",
            band()
        ),
        x: Axis { label: "KV heads (Hkv)".into(), field: "kv_heads", quantity: Quantity::Count },
        y: Axis { label: "median time".into(), field: "median_ns", quantity: Quantity::Nanoseconds },
        interval_fields: ("ci95_low_ns", "ci95_high_ns"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}

/// The `ok` records of `measure` whose configuration was measured with several numbers of KV heads, at the longest
/// context that has any.
fn comparable<'a>(data: &Data<'a>, measure: Measure, usable: impl Fn(&Record) -> bool) -> Vec<&'a Record> {
    let mut records = data.of(measure);
    records.retain(|record| record.status == Status::Ok && usable(record));
    let mut records = super::curves(records, |cell| std::mem::take(&mut cell.kv_heads));
    let longest = records.iter().map(|record| record.cell.context_tokens).max();
    records.retain(|record| Some(record.cell.context_tokens) == longest);
    records
}
