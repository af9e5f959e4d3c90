//! The table behind a figure: one line for each plotted point, with the field names of the record.

use super::ReportError;
use super::chart::{Chart, Point, Series};
use crate::experiment::record::Status;

/// The points of `chart` as CSV.
///
/// Columns: `series`, `status`, the field of x, the field of y, the model's field where the chart has one, the ends of
/// the interval, `interval` (which one it is: `ci95` or `min_max`), `cells` (how many the point stands for) and
/// `cell_ids`. A field without a value is empty.
///
/// # Errors
/// [`ReportError::Csv`] when a line cannot be written.
pub fn write(chart: &Chart) -> Result<String, ReportError> {
    let mut table = csv::Writer::from_writer(Vec::new());
    table.write_record(header(chart))?;
    for series in &chart.series {
        for point in &series.points {
            table.write_record(line(chart, series, point))?;
        }
    }
    let bytes = table.into_inner().map_err(|error| csv::Error::from(error.into_error()))?;
    Ok(String::from_utf8(bytes).expect("every field is text"))
}

fn header(chart: &Chart) -> Vec<&str> {
    let mut names = vec!["series", "status", chart.x.field, chart.y.field];
    names.extend(chart.model_field);
    names.extend([chart.interval_fields.0, chart.interval_fields.1, "interval", "cells", "cell_ids"]);
    names
}

fn line(chart: &Chart, series: &Series, point: &Point) -> Vec<String> {
    let number = |value: Option<f64>| value.map(|value| value.to_string()).unwrap_or_default();
    let status = if point.status == Status::Oom { "oom" } else { "ok" };
    let mut fields = vec![series.name.clone(), status.into(), number(Some(point.x)), number(point.y)];
    fields.extend(chart.model_field.map(|_| number(point.model)));
    fields.extend([
        number(point.interval.map(|interval| interval.low)),
        number(point.interval.map(|interval| interval.high)),
    ]);
    fields.push(point.interval.map_or("", |interval| interval.kind).into());
    fields.extend([point.cell_ids.len().to_string(), point.cell_ids.join(" ")]);
    fields
}
