//! From values to places on an axis: the span that an axis covers, its scale and its ticks.
//!
//! Context lengths, bytes, head counts and fractions kept double from one to the next, so their axes are log2 with
//! ticks at powers of two. Times and errors are log10 with ticks at 1, 2 and 5, or finer. Shares are linear from 0 to 1;
//! decode steps, bytes that are added up, and differences are linear and always hold 0.

use super::chart::{Axis, Quantity};
use crate::units;

/// A tick: where it is, and what is written there.
#[derive(Debug, Clone, PartialEq)]
pub struct Tick {
    /// Value on the axis.
    pub at: f64,
    /// Words.
    pub label: String,
}

/// The values that an axis covers, and how they are spread over its length.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    low: f64,
    high: f64,
    scale: Scale,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Scale {
    Log2,
    Log10,
    Unit,
    Linear,
}

impl Quantity {
    fn scale(self) -> Scale {
        match self {
            Quantity::Tokens | Quantity::Bytes | Quantity::Count | Quantity::Fraction => Scale::Log2,
            Quantity::Nanoseconds | Quantity::Drift | Quantity::Loss | Quantity::Cost => Scale::Log10,
            Quantity::Share => Scale::Unit,
            Quantity::Steps | Quantity::Size | Quantity::Gap => Scale::Linear,
        }
    }
}

impl Axis {
    /// What stands beside the axis: its label, and where its scale is a logarithm that it is.
    pub fn words(&self) -> String {
        match self.quantity.scale() {
            Scale::Log2 | Scale::Log10 => format!("{} · log", self.label),
            Scale::Unit | Scale::Linear => self.label.clone(),
        }
    }

    /// The span that holds every one of `values` that the axis can show, with a margin; `None` when there is none.
    pub fn span(&self, values: impl Iterator<Item = f64>) -> Option<Span> {
        let scale = self.quantity.scale();
        if scale == Scale::Unit {
            return Some(Span { low: -0.04, high: 1.04, scale });
        }
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter(|value| self.shows(*value)) {
            (low, high) = (low.min(value), high.max(value));
        }
        if low > high {
            return None;
        }
        if scale == Scale::Linear {
            (low, high) = (low.min(0.0), high.max(0.0));
            let margin = if low < high { 0.04 * (high - low) } else { 1.0 };
            // Nothing lies beyond 0 unless a value does.
            let low = if low < 0.0 { low - margin } else { 0.0 };
            return Some(Span { low, high: high + margin, scale });
        }
        // At least a factor of 5 (which holds two ticks of 1, 2, 5), or of 2 between contexts.
        let least = if self.quantity == Quantity::Tokens { 1.0 } else { 5f64.log2() };
        let (low, high) = (low.log2(), high.log2());
        let margin = (0.05 * (high - low)).max((least - (high - low)) / 2.0).max(0.15);
        Some(Span { low: (low - margin).exp2(), high: (high + margin).exp2(), scale })
    }

    /// Whether the axis has a place for `value`: a logarithm has none for 0. What nothing measures, such as 1e308 in a
    /// damaged record, would make a span that no number of ticks ever fills.
    pub fn shows(&self, value: f64) -> bool {
        let linear = matches!(self.quantity.scale(), Scale::Unit | Scale::Linear);
        let drawable = (1e-200..=1e200).contains(&value.abs());
        if linear { value == 0.0 || drawable } else { drawable && value > 0.0 }
    }

    /// Between 1 and `most` ticks (`most` at least 3), ascending, all inside `span`.
    pub fn ticks(&self, span: &Span, most: usize) -> Vec<Tick> {
        let places = match span.scale {
            Scale::Unit => (0..=5).map(|fifth| f64::from(fifth) / 5.0).collect(),
            Scale::Log2 => powers(2.0, span, most),
            Scale::Linear => multiples(self.quantity, span, most),
            Scale::Log10 => {
                let (first, last) = (span.low.log10().floor() as i32, span.high.log10().ceil() as i32);
                let within = |digits: &[f64]| -> Vec<f64> {
                    let decade = |power| digits.iter().map(move |digit| digit * 10f64.powi(power));
                    (first..=last).flat_map(decade).filter(|at| span.holds(*at)).collect()
                };
                let fine = within(&[1.0, 2.0, 5.0]);
                let finer = within(&[1.0, 1.5, 2.0, 3.0, 5.0, 7.0]);
                if fine.len() < 3 && finer.len() <= most {
                    finer
                } else if fine.len() <= most {
                    fine
                } else {
                    powers(10.0, span, most)
                }
            }
        };
        let least = places.first().copied().unwrap_or(1.0);
        places.into_iter().map(|at| Tick { at, label: self.tick_label(at, least) }).collect()
    }

    /// A value in words, to three digits where it is measured in bytes.
    pub fn value_label(&self, value: f64) -> String {
        match self.quantity {
            Quantity::Bytes | Quantity::Size => units::bytes(value as u64),
            Quantity::Tokens | Quantity::Steps => units::grouped(value as u128),
            _ => self.tick_label(value, value),
        }
    }

    fn tick_label(&self, at: f64, least: f64) -> String {
        match self.quantity {
            Quantity::Tokens => units::tokens(at.round() as usize),
            Quantity::Steps => units::tokens(at.round() as usize),
            Quantity::Size if at == 0.0 => "0".into(),
            Quantity::Bytes | Quantity::Size => byte_label(at),
            Quantity::Count => format!("{at}"),
            Quantity::Fraction if at < 1.0 => format!("1/{}", (1.0 / at).round()),
            Quantity::Fraction => format!("{at}"),
            Quantity::Nanoseconds => {
                let steps = [(1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns")];
                // 999 999.99…: rounding must not turn 1 ms into 1000 µs.
                let (size, unit) = steps.into_iter().find(|(size, _)| at >= size * 0.999).unwrap_or((1.0, "ns"));
                format!("{} {unit}", plain(at / size))
            }
            Quantity::Drift if least < 0.9e-3 => power_of_ten(at),
            Quantity::Drift | Quantity::Loss => plain(at),
            Quantity::Cost | Quantity::Share | Quantity::Gap => format!("{} %", plain(100.0 * at)),
        }
    }
}

impl Span {
    /// Where `value` lies: 0 at the low end, 1 at the high end.
    pub fn place(&self, value: f64) -> f64 {
        match self.scale {
            Scale::Unit | Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log2 | Scale::Log10 => (value / self.low).ln() / (self.high / self.low).ln(),
        }
    }

    /// The value at the low end.
    pub fn lowest(&self) -> f64 {
        self.low
    }

    /// Whether `value` lies inside.
    pub fn holds(&self, value: f64) -> bool {
        (self.low..=self.high).contains(&value)
    }
}

/// Powers of `base` inside `span`, with the smallest even spacing that leaves at most `most`.
fn powers(base: f64, span: &Span, most: usize) -> Vec<f64> {
    let exponent = |value: f64| value.ln() / base.ln();
    let (first, last) = (exponent(span.low).ceil() as i32, exponent(span.high).floor() as i32);
    let spaced = |step: i32| {
        (first..=last).filter(|power| power.rem_euclid(step) == 0).map(|power| base.powi(power)).collect::<Vec<_>>()
    };
    (1..).map(spaced).find(|places| places.len() <= most).unwrap_or_default()
}

/// Multiples of one step inside `span`, at most `most`: the step is a power of two for what doubles, else 1, 2 or 5.
fn multiples(quantity: Quantity, span: &Span, most: usize) -> Vec<f64> {
    // Halves of thousands are longer words than thousands.
    let most = if quantity == Quantity::Steps { most.min(6) } else { most };
    let least = (span.high - span.low) / most as f64;
    let digits: &[f64] = if quantity == Quantity::Gap { &[1.0, 2.0, 5.0, 10.0, 20.0] } else { &[1.0, 2.0, 4.0] };
    let base: f64 = if quantity == Quantity::Gap { 10.0 } else { 2.0 };
    let below = base.powf((least.ln() / base.ln()).floor());
    // Between whole steps there are none.
    let below = if quantity == Quantity::Steps { below.max(1.0) } else { below };
    let spaced = |step: f64| {
        let (first, last) = ((span.low / step).ceil() as i64, (span.high / step).floor() as i64);
        (first..=last).map(|count| count as f64 * step).collect::<Vec<_>>()
    };
    digits.iter().map(|digit| spaced(digit * below)).find(|places| places.len() <= most).unwrap_or_default()
}

/// A power of two of bytes, exactly: `64 MiB`.
fn byte_label(at: f64) -> String {
    let steps = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B")];
    let (shift, unit) = steps.into_iter().find(|(shift, _)| at >= f64::from(*shift).exp2()).unwrap_or((0, "B"));
    format!("{} {unit}", plain(at / f64::from(shift).exp2()))
}

/// A number without an exponent and without noise of the last digit.
fn plain(value: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    let digits = (2 - value.abs().log10().floor() as i32).clamp(0, 12) as usize;
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').into() } else { text }
}

/// `10⁻⁴`, `2·10⁻⁴`.
fn power_of_ten(value: f64) -> String {
    // A power of ten may come out just below itself.
    let exponent = (value.log10() + 1e-9).floor();
    let digit = (10.0 * value / 10f64.powf(exponent)).round() / 10.0;
    let raised: String = format!("{exponent}")
        .chars()
        .map(|letter| {
            letter.to_digit(10).map_or('⁻', |digit| "⁰¹²³⁴⁵⁶⁷⁸⁹".chars().nth(digit as usize).expect("a digit"))
        })
        .collect();
    if digit == 1.0 { format!("10{raised}") } else { format!("{digit}·10{raised}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn axis(quantity: Quantity) -> Axis {
        Axis { label: String::new(), field: "x", quantity }
    }

    fn labels(quantity: Quantity, values: &[f64]) -> Vec<String> {
        let axis = axis(quantity);
        let span = axis.span(values.iter().copied()).unwrap();
        axis.ticks(&span, 8).into_iter().map(|tick| tick.label).collect()
    }

    #[test]
    fn ticks_are_powers_of_two_or_one_two_five() {
        assert_eq!(labels(Quantity::Tokens, &[1024.0, 8192.0]), ["1K", "2K", "4K", "8K"]);
        assert_eq!(labels(Quantity::Tokens, &[512.0, 131_072.0]), ["1K", "4K", "16K", "64K"]);
        assert_eq!(labels(Quantity::Tokens, &[4096.0]), ["4K"]);
        assert_eq!(labels(Quantity::Bytes, &[1.5e6, 9e6]), ["2 MiB", "4 MiB", "8 MiB"]);
        assert_eq!(labels(Quantity::Fraction, &[0.0625, 1.0]), ["1/16", "1/8", "1/4", "1/2", "1"]);
        assert_eq!(labels(Quantity::Nanoseconds, &[0.9e6, 6e6]), ["1 ms", "2 ms", "5 ms"]);
        assert_eq!(labels(Quantity::Nanoseconds, &[0.9e5, 6e9]), ["100 µs", "1 ms", "10 ms", "100 ms", "1 s", "10 s"]);
        assert_eq!(labels(Quantity::Drift, &[2e-7, 3e-7]), ["1.5·10⁻⁷", "2·10⁻⁷", "3·10⁻⁷", "5·10⁻⁷"]);
        assert_eq!(labels(Quantity::Drift, &[0.02, 0.3]), ["0.02", "0.05", "0.1", "0.2"]);
        assert_eq!(labels(Quantity::Cost, &[0.002, 0.04]), ["0.2 %", "0.5 %", "1 %", "2 %"]);
        assert_eq!(labels(Quantity::Share, &[]).last().unwrap(), "100 %");
        assert_eq!(labels(Quantity::Steps, &[2.0]), ["0", "1", "2"]);
        assert_eq!(labels(Quantity::Steps, &[32.0, 4096.0]), ["0", "1K", "2K", "3K", "4K"]);
        assert_eq!(
            labels(Quantity::Size, &[1e6, 8e6]),
            ["0", "1 MiB", "2 MiB", "3 MiB", "4 MiB", "5 MiB", "6 MiB", "7 MiB"]
        );
        assert_eq!(labels(Quantity::Gap, &[-0.02, 0.09]), ["-2 %", "0 %", "2 %", "4 %", "6 %", "8 %"]);
    }

    #[test]
    fn what_nothing_measures_has_no_place_and_its_neighbours_have_few_ticks() {
        let all = [
            Quantity::Tokens,
            Quantity::Bytes,
            Quantity::Count,
            Quantity::Nanoseconds,
            Quantity::Drift,
            Quantity::Loss,
            Quantity::Cost,
            Quantity::Steps,
            Quantity::Size,
            Quantity::Gap,
        ];
        for axis in all.map(axis) {
            for value in [1e308, -1e308, 1e-308, f64::INFINITY, f64::NAN] {
                assert!(!axis.shows(value), "{:?}: {value}", axis.quantity);
            }
            for values in [[1e-200, 1e200], [1e199, 1e200], [1e-200, 2e-200], [1.0, 1e200], [f64::MAX, 2.0]] {
                let span = axis.span(values.into_iter()).unwrap();
                assert!((1..=8).contains(&axis.ticks(&span, 8).len()), "{:?}: {values:?}", axis.quantity);
            }
        }
    }

    #[test]
    fn an_axis_without_a_value_that_it_can_show_has_no_span() {
        assert_eq!(axis(Quantity::Drift).span([0.0, f64::NAN, -1.0].into_iter()), None);
        assert_eq!(axis(Quantity::Size).span([f64::NAN].into_iter()), None);
    }

    proptest! {
        #[test]
        fn every_value_and_every_tick_lies_on_the_axis(
            values in prop::collection::vec(1e-9f64..1e15, 1..6),
            kind in 0usize..10,
            most in 3usize..10,
        ) {
            let quantity = [
                Quantity::Tokens, Quantity::Bytes, Quantity::Count, Quantity::Fraction, Quantity::Nanoseconds,
                Quantity::Drift, Quantity::Cost, Quantity::Steps, Quantity::Size, Quantity::Gap,
            ][kind];
            let axis = axis(quantity);
            let span = axis.span(values.iter().copied()).unwrap();
            for value in &values {
                prop_assert!((0.0..=1.0).contains(&span.place(*value)));
            }
            let ticks = axis.ticks(&span, most);
            prop_assert!(!ticks.is_empty() && ticks.len() <= most, "{} ticks", ticks.len());
            prop_assert!(ticks.windows(2).all(|pair| span.place(pair[0].at) < span.place(pair[1].at)));
            prop_assert!(ticks.iter().all(|tick| (0.0..=1.0).contains(&span.place(tick.at))));
        }
    }
}
