//! The size of a page: what it wastes of the memory that requests hold, and what it costs a decode step.

use super::{Data, Interval, Reading, interval_of};
use crate::experiment::cell::Cell;
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::named::Named;
use crate::report::chart::{Axis, Chart, Quantity};
use crate::report::naming::{CONTEXT, HEADS, KERNEL, Naming};
use crate::report::palette;
use crate::report::workers::same_machine;
use crate::serving::DEFAULT_PAGE_TOKENS;
use crate::stats::LEAST_FOR_INTERVAL;

/// The figure; drawn when both sides are there.
pub fn chart(data: &Data) -> Option<Chart> {
    let ok = |measure: Measure| {
        let records = data.of(measure).into_iter().filter(|record| record.status == Status::Ok);
        records.collect::<Vec<&Record>>()
    };
    let decoded: Vec<&Record> = ok(Measure::DECODE).into_iter().filter(|r| r.cell.page_tokens.is_some()).collect();
    // The size of a page is the axis here and sets no series apart.
    let of_any_page: Vec<Record> = decoded
        .iter()
        .map(|record| Record { cell: Cell { page_tokens: None, ..record.cell.clone() }, ..(*record).clone() })
        .collect();
    let naming = Naming::over(&of_any_page.iter().collect::<Vec<_>>(), &[CONTEXT, HEADS, KERNEL]);
    let page = |record: &Record| page_tokens(&record.cell).unwrap_or(0).to_string();
    let slower =
        data.series(&decoded, &naming, |_| "slower decode step".into(), page, |record| slow_down(record, &decoded));
    let trace = |record: &Record| format!("wasted memory, {}", record.cell.trace.as_deref().unwrap_or_default());
    // Pools and requests are all that matters to a simulation, and the trace's name says it.
    let wasted = data.series(&ok(Measure::SERVE), &Naming::over(&[], &[]), trace, page, |record| {
        let waste = record.serving.as_ref()?.waste_of_held;
        Some(Reading::measured(page_tokens(&record.cell)? as f64, waste, None))
    });
    if slower.is_empty() || wasted.is_empty() {
        return None;
    }
    let mut series: Vec<_> = wasted.into_iter().chain(slower).collect();
    for (place, series) in series.iter_mut().enumerate() {
        series.style = palette::style(&series.name, place, 0);
    }
    Some(Chart {
        id: "paging-tradeoff".into(),
        title: "The size of a page: wasted memory against time".into(),
        subtitle: naming.common,
        caption: format!(
            "Wasted memory (simulated): fraction of the slots that running requests hold in which there is no token. Slower \
             decode step (measured): how much longer a step takes than over contiguous tensors, from interleaved rounds; the \
             cache was filled page by page over all heads, so that the pages of a head lie apart. The band is made of the ends \
             of both 95% intervals, of fewer than {LEAST_FOR_INTERVAL} samples of their ranges. Below 0: faster."
        ),
        x: Axis { label: "tokens of a page".into(), field: "page_tokens", quantity: Quantity::Count },
        y: Axis { label: "wasted memory, or added time".into(), field: "share", quantity: Quantity::Gap },
        interval_fields: ("low", "high"),
        model_field: None,
        series,
        rules: Vec::new(),
    })
}

/// Tokens of a page; `None` where memory is contiguous.
fn page_tokens(cell: &Cell) -> Option<usize> {
    match &cell.strategy {
        None => cell.page_tokens.filter(|tokens| *tokens > 0),
        Some(strategy) => {
            let named: Named = strategy.parse().ok().filter(|named: &Named| named.name == "paged")?;
            named.count("page", DEFAULT_PAGE_TOKENS, 1).ok()
        }
    }
}

/// How much longer a step takes than in the same cell without pages.
fn slow_down(record: &Record, records: &[&Record]) -> Option<Reading> {
    let page = page_tokens(&record.cell)?;
    let contiguous = Cell { page_tokens: Some(0), ..record.cell.clone() };
    let theirs =
        records.iter().find(|other| other.cell == contiguous && same_machine(other, record))?.latency.get("decode")?;
    let own = record.latency.get("decode")?;
    let interval = Interval {
        low: own.ci95_low_ns / theirs.ci95_high_ns - 1.0,
        high: own.ci95_high_ns / theirs.ci95_low_ns - 1.0,
        kind: interval_of(&[own, theirs]),
    };
    let slower = Reading::measured(page as f64, own.median_ns / theirs.median_ns - 1.0, None);
    Some(Reading { interval: Some(interval), ..slower })
}
