//! Baselines that lose nothing but rounding have no place on a logarithmic axis of drift; they become words.

use crate::report::chart::Series;
use crate::report::{palette, text};

/// Drift below this is rounding of f32, not of something that was lost.
pub const LEAST_LOSS: f64 = 1e-5;

/// A baseline's drift this much below every other point is rounding.
const FAR_BELOW: f64 = 0.1;

/// Takes the baselines whose drift is far below all others out of `series`, and says so in a sentence that starts
/// with a space (empty when none is taken out). Without other series, nothing is taken out.
pub fn split(series: Vec<Series>) -> (Vec<Series>, String) {
    let drifts = |series: &Series| series.points.iter().filter_map(|point| point.y).collect::<Vec<_>>();
    let (baselines, others): (Vec<_>, Vec<_>) =
        series.into_iter().partition(|series| palette::is_baseline(&series.name));
    let least = others.iter().flat_map(drifts).filter(|drift| *drift > 0.0).fold(f64::INFINITY, f64::min);
    let greatest = |series: &Series| drifts(series).into_iter().fold(0.0, f64::max);
    let far = |series: &Series| least.is_finite() && greatest(series) < FAR_BELOW * least;
    let (below, mut shown): (Vec<_>, Vec<_>) = baselines.into_iter().partition(far);
    shown.extend(others);
    let note = |series: &Series| {
        format!(" {} keeps everything and is not drawn: its drift is {}.", series.name, text::drift(greatest(series)))
    };
    (shown, below.iter().map(note).collect())
}
