//! The table behind a figure: one line for each plotted value, with the field names of the record.

use super::ReportError;
use super::chart::{Chart, Point, Series};
use super::heat::{Across, Heat};
use super::rows::Rows;
use crate::experiment::cell::Cell;
use crate::experiment::record::{Record, Status};

/// A column that says of a point's cell what neither an axis nor the name of its series does.
pub type Told = (&'static str, fn(&Cell) -> String);

/// The points of `chart` as CSV.
///
/// Columns: `series`, `status`, the field of x, the field of y, the model's field where the chart has one, the ends of
/// the interval, `interval` (which one it is: `ci95`, `range` or `min_max`), `cells` (how many the point stands for) and
/// `cell_ids`. A field without a value is empty.
///
/// # Errors
/// [`ReportError::Csv`] when a line cannot be written.
pub fn write(chart: &Chart) -> Result<String, ReportError> {
    with_cells(chart, &[], &[])
}

/// The same with columns about the cells of the points, which are among `records`, before `cells`. Those of one point agree in them.
///
/// # Errors
/// As [`write`].
pub fn with_cells(chart: &Chart, told: &[Told], records: &[&Record]) -> Result<String, ReportError> {
    let mut table = csv::Writer::from_writer(Vec::new());
    table.write_record(header(chart, told))?;
    for series in &chart.series {
        for point in &series.points {
            let record = records.iter().find(|record| point.cell_ids.first() == Some(&record.cell_id));
            let about = told.iter().map(|(_, read)| record.map_or(String::new(), |record| read(&record.cell)));
            table.write_record(line(chart, series, point, about))?;
        }
    }
    text(table)
}

/// The values of `rows` as CSV: `series`, `status`, `kind`, the value's field, `cells` and `cell_ids`.
///
/// # Errors
/// [`ReportError::Csv`] when a line cannot be written.
pub fn rows(rows: &Rows) -> Result<String, ReportError> {
    let mut table = csv::Writer::from_writer(Vec::new());
    table.write_record(["series", "status", "kind", rows.axis.field, "cells", "cell_ids"])?;
    for row in &rows.rows {
        for (kind, value) in rows.kinds.iter().zip(&row.values) {
            if let Some((value, ids)) = value {
                let (value, count, ids) = (value.to_string(), ids.len().to_string(), ids.join(" "));
                table.write_record([row.name.as_str(), "ok", &kind.name, &value, &count, &ids])?;
            }
        }
    }
    text(table)
}

/// The fields of heat maps as CSV: `series`, `status`, `row`, `bin`, `head` or `context_tokens`, the value's field, `samples` where it is
/// a mean over some, `cells` and `cell_ids`; `missing` without a value where nothing is known.
///
/// # Errors
/// [`ReportError::Csv`] when a line cannot be written.
pub fn heat(heat: &Heat) -> Result<String, ReportError> {
    let mut table = csv::Writer::from_writer(Vec::new());
    let across = match heat.across {
        Across::Heads => "head",
        Across::Positions(_) => "bin",
        Across::Contexts(_) => "context_tokens",
    };
    let samples = heat.panels.iter().any(|panel| !panel.samples.is_empty()).then_some("samples");
    let names = ["series", "status", "row", across, heat.field].into_iter().chain(samples);
    table.write_record(names.chain(["cells", "cell_ids"]))?;
    for panel in &heat.panels {
        for (row, ((name, values), cells)) in panel.rows.iter().zip(&panel.cell_ids).enumerate() {
            for (at, (value, cells)) in values.iter().zip(cells).enumerate() {
                let place = match &heat.across {
                    Across::Contexts(contexts) => contexts[at],
                    _ => at,
                };
                let (status, value) = match value.is_nan() {
                    true => ("missing", String::new()),
                    false => ("ok", value.to_string()),
                };
                let count = panel.samples.get(row).map(|of_row| of_row[at].to_string());
                let fields = [panel.name.clone(), status.into(), name.clone(), place.to_string(), value];
                let fields = fields.into_iter().chain(count);
                table.write_record(fields.chain([cells.len().to_string(), cells.join(" ")]))?;
            }
        }
    }
    text(table)
}

/// A finished table.
pub(super) fn text(table: csv::Writer<Vec<u8>>) -> Result<String, ReportError> {
    let bytes = table.into_inner().map_err(|error| csv::Error::from(error.into_error()))?;
    Ok(String::from_utf8(bytes).expect("every field is text"))
}

fn header<'c>(chart: &'c Chart, told: &[Told]) -> Vec<&'c str> {
    let mut names = vec!["series", "status", chart.x.field, chart.y.field];
    names.extend(chart.model_field);
    names.extend([chart.interval_fields.0, chart.interval_fields.1, "interval"]);
    names.extend(told.iter().map(|(name, _)| *name));
    names.extend(["cells", "cell_ids"]);
    names
}

fn line(chart: &Chart, series: &Series, point: &Point, about: impl Iterator<Item = String>) -> Vec<String> {
    let number = |value: Option<f64>| value.map(|value| value.to_string()).unwrap_or_default();
    let status = if point.status == Status::Oom { "oom" } else { "ok" };
    let mut fields = vec![series.name.clone(), status.into(), number(Some(point.x)), number(point.y)];
    fields.extend(chart.model_field.map(|_| number(point.model)));
    fields.extend([
        number(point.interval.map(|interval| interval.low)),
        number(point.interval.map(|interval| interval.high)),
    ]);
    fields.push(point.interval.map_or("", |interval| interval.kind).into());
    fields.extend(about);
    fields.extend([point.cell_ids.len().to_string(), point.cell_ids.join(" ")]);
    fields
}
