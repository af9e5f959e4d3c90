//! Attention shared out over ranks: what a rank holds, and how long a pass takes, against how many there are.

use super::{Data, Reading, band, curves};
use crate::experiment::cell::Cell;
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::ranks::Asked;
use crate::report::chart::{Axis, Chart, Quantity};
use crate::report::naming::{CONTEXT, HEADS, KERNEL, Naming};

/// Peak of the rank that takes most.
pub fn bytes(data: &Data) -> Option<Chart> {
    let read = |record: &Record| {
        let memory = record.memory.as_ref()?;
        let (y, model) = (Some(memory.peak_bytes as f64), Some(memory.predicted_peak_bytes as f64));
        Some(Reading { x: ranks(record)?, y, interval: None, model })
    };
    Some(Chart {
        id: "rank-bytes-vs-ranks".into(),
        title: "Memory of a rank".into(),
        caption:
            "Points: peak of the rank that takes most, by its own arena, inputs included. Line: the formula. Lower is \
                  better."
                .into(),
        y: Axis { label: "peak of a rank".into(), field: "peak_bytes", quantity: Quantity::Bytes },
        model_field: Some("predicted_peak_bytes"),
        interval_fields: ("low", "high"),
        ..chart(data, read)?
    })
}

/// Time of a pass.
pub fn time(data: &Data) -> Option<Chart> {
    Some(Chart {
        id: "time-vs-ranks".into(),
        title: "Time of a pass that ranks share".into(),
        caption: format!(
            "Points: median time of the slowest rank, each with one thread; {}. Line: the cost model, from what one rank computes \
             and what links took in the run. Ranks beyond the machine's cores take turns. Lower is better.",
            band()
        ),
        model_field: Some("predicted_ns"),
        ..chart(data, |record| timed(record, "forward"))?
    })
}

/// Time of the messages of a pass, with nothing computed.
pub fn sending(data: &Data) -> Option<Chart> {
    let read = |record: &Record| timed(record, "send_alone").filter(|reading| reading.x > 1.0);
    Some(Chart {
        id: "sending-vs-ranks".into(),
        title: "Time of a pass's messages alone".into(),
        caption: format!(
            "Points: median time in which the slowest rank sent what a pass sends, and computed nothing; {}. Line: the cost \
             model, from messages that were timed in the run. Lower is better.",
            band()
        ),
        model_field: Some("predicted_ns"),
        ..chart(data, read)?
    })
}

/// A phase's time, and what the cost model gives for it.
fn timed(record: &Record, phase: &str) -> Option<Reading> {
    let model = record.predicted_ns.get(phase).copied();
    Some(Reading { model, ..Reading::latency(ranks(record)?, record.latency.get(phase)?) })
}

/// A figure over ranks; its words are those of the caller.
fn chart(data: &Data, read: impl Fn(&Record) -> Option<Reading>) -> Option<Chart> {
    let take = |cell: &mut Cell| {
        let ranks = asked(cell).and_then(|asked| asked.threads).unwrap_or(0);
        cell.ranks = asked(cell).map(|asked| asked.method.to_string());
        ranks
    };
    let mut records = curves(data.of(Measure::RANKS), take);
    records.retain(|record| record.status == Status::Ok);
    let naming = Naming::over(&records, &[CONTEXT, HEADS, KERNEL]);
    let method = |record: &Record| asked(&record.cell).map_or(String::new(), |asked| asked.method.to_string());
    let key = |record: &Record| record.cell.ranks.clone().unwrap_or_default();
    let series = data.series(&records, &naming, method, key, read);
    (!series.is_empty()).then(|| Chart {
        id: String::new(),
        title: String::new(),
        subtitle: naming.common,
        caption: String::new(),
        x: Axis { label: "ranks".into(), field: "ranks", quantity: Quantity::Count },
        y: Axis { label: "median time".into(), field: "median_ns", quantity: Quantity::Nanoseconds },
        interval_fields: ("ci95_low_ns", "ci95_high_ns"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}

fn asked(cell: &Cell) -> Option<Asked> {
    cell.ranks.as_deref()?.parse().ok()
}

fn ranks(record: &Record) -> Option<f64> {
    asked(&record.cell)?.threads.map(|ranks| ranks as f64)
}
