//! Numbers as the tables show them.

use crate::experiment::record::{Latency, Record, Status};
use crate::memory::Label;
use crate::units;

/// What a table shows where a cell has no such number.
pub const NOTHING: &str = "–";

/// What a mark behind a number says.
pub const ONLY_PROTECTED: &str =
    "! nothing but protected tokens stays (the window, the first ones): the policy's scores have no say";

/// Whether nothing but tokens that the policy protects stayed in a cell, so that its scores had no say.
pub fn is_only_protected(record: &Record) -> bool {
    let answers = record.answers.as_ref().is_some_and(|answers| answers.unprotected_tokens == Some(0));
    answers || record.warnings.iter().any(|warning| warning.starts_with("nothing but protected tokens stays"))
}

/// The same of the named ones, as a sentence with a leading space; empty without any.
pub fn only_protected(names: &[String]) -> String {
    let stays = "Nothing but protected tokens (the window and the first ones, which are never evicted) stays of";
    let all = names.join(", ");
    if names.is_empty() { String::new() } else { format!(" {stays} {all}: the policy's scores have no say there.") }
}

/// A relative error: three digits, or a power of ten below 0.001.
pub fn drift(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        magnitude if magnitude < 1e-3 => format!("{value:.1e}"),
        magnitude if magnitude < 0.1 => format!("{value:.4}"),
        magnitude if magnitude < 1.0 => format!("{value:.3}"),
        _ => units::three_digits(value),
    }
}

/// A fraction as whole percent.
pub fn percent(value: f64) -> String {
    format!("{:.0}%", value * 100.0)
}

/// How far the ends of an interval of the median lie from it, as a fraction of it: the farther one, `±2%`, or both where
/// one is more than twice as far and at least a tenth, `-1% +30%`. One sample has none.
pub fn ends(latency: &Latency) -> String {
    let share = |end: f64| 100.0 * (end / latency.median_ns - 1.0).abs();
    let (below, above) = (share(latency.ci95_low_ns), share(latency.ci95_high_ns));
    let (near, far) = (below.min(above), below.max(above));
    if !far.is_finite() || latency.samples_ns.len() < 2 {
        return NOTHING.into();
    }
    let digits = |share: f64| if share < 9.5 { format!("{share:.1}%") } else { format!("{share:.0}%") };
    match far < 9.5 || far <= 2.0 * near {
        true => format!("±{}", digits(far)),
        false => format!("-{} +{}", digits(below), digits(above)),
    }
}

/// How many times something is larger: `3.20x`.
pub fn times(ratio: f64) -> String {
    format!("{}x", units::three_digits(ratio))
}

/// The phase that a cell is measured for: decoding where something is evicted, the pass itself elsewhere.
pub fn main_phase(record: &Record) -> Option<&Latency> {
    record.latency.get(record.cell.measure.phase())
}

/// Bytes of the pages with keys and values: as the arena counted them, else as a decode step read them.
pub fn kv_bytes(record: &Record) -> Option<u64> {
    let counted = record.memory.as_ref().and_then(|memory| {
        let peak = |label| memory.peak_by_label.get(&label).copied();
        Some(peak(Label::Kv)? + peak(Label::KvFragmentation).unwrap_or(0))
    });
    counted.or(record.work.as_ref().map(|work| work.kv_bytes_read)).filter(|bytes| *bytes > 0)
}

/// The peak that was measured, or that was predicted for a cell that ran out of memory, with a tilde.
pub fn peak(record: &Record) -> String {
    match (&record.memory, record.status) {
        (Some(memory), Status::Ok) => units::bytes(memory.peak_bytes),
        (Some(memory), Status::Oom) if memory.predicted_peak_bytes > 0 => {
            format!("~{}", units::bytes(memory.predicted_peak_bytes))
        }
        _ => NOTHING.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Latency {
        crate::report::samples::evicted(64, "full", 1.0).latency["decode"].clone()
    }

    #[test]
    fn numbers_are_short_and_keep_three_digits() {
        let cases = [(0.0, "0"), (3.14e-7, "3.1e-7"), (0.0312, "0.0312"), (0.5, "0.500"), (12.34, "12.3")];
        for (value, expected) in cases {
            assert_eq!(drift(value), expected);
        }
        let one = Latency { samples_ns: vec![7], median_ns: 7.0, ci95_low_ns: 7.0, ci95_high_ns: 7.0, ..sample() };
        assert_eq!(ends(&one), NOTHING);
        let of = |low: f64, high: f64| {
            ends(&Latency {
                samples_ns: vec![7; 9],
                median_ns: 100.0,
                ci95_low_ns: low,
                ci95_high_ns: high,
                ..sample()
            })
        };
        assert_eq!([of(98.0, 101.0), of(80.0, 115.0), of(99.0, 350.0)], ["±2.0%", "±20%", "-1.0% +250%"]);
        assert_eq!((percent(0.875), times(3.2), times(123.4)), ("88%".into(), "3.20x".into(), "123x".into()));
    }
}
