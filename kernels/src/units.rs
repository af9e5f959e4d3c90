//! Lengths, bytes and times as people write and read them.

/// Token counts: `512`, `4K`, `128K`; not a multiple of 1024: as it is.
pub fn tokens(count: usize) -> String {
    match count {
        0 => "0".into(),
        count if count.is_multiple_of(1 << 20) => format!("{}M", count >> 20),
        count if count.is_multiple_of(1 << 10) => format!("{}K", count >> 10),
        count => count.to_string(),
    }
}

/// Bytes in binary units with three significant digits: `1.50 GiB`.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    // 1023.5 would round to 1024 of the smaller unit.
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{} {}", three_digits(value), UNITS[unit]) }
}

/// So many of something: `1 cell`, `1,437 cells`.
pub fn counted(count: u64, what: &str) -> String {
    format!("{} {what}{}", grouped(count.into()), if count == 1 { "" } else { "s" })
}

/// A whole number with its digits in threes: `111,124`.
pub fn grouped(count: u128) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// GiB with two digits behind the point: `14.96`.
pub fn gib(bytes: u128) -> String {
    format!("{:.2}", bytes as f64 / (1u64 << 30) as f64)
}

/// GB (1e9 bytes) with two digits behind the point: `16.06`.
pub fn gb(bytes: u128) -> String {
    format!("{:.2}", bytes as f64 / 1e9)
}

/// Nanoseconds with three significant digits in the unit that fits: `1.20 ms`.
pub fn nanoseconds(count: f64) -> String {
    let (value, unit) = match count {
        count if count < 999.5 => (count, "ns"),
        count if count < 999.5e3 => (count / 1e3, "µs"),
        count if count < 999.5e6 => (count / 1e6, "ms"),
        count => (count / 1e9, "s"),
    };
    format!("{} {unit}", three_digits(value))
}

/// Three significant digits, two between a tenth and 1, without an exponent.
pub fn three_digits(value: f64) -> String {
    match value.abs() {
        magnitude if magnitude >= 99.95 => format!("{value:.0}"),
        magnitude if magnitude >= 9.995 => format!("{value:.1}"),
        magnitude if magnitude > 0.0 && magnitude < 0.0995 => {
            format!("{value:.*}", (2.0 - magnitude.log10().floor()).min(9.0) as usize)
        }
        _ => format!("{value:.2}"),
    }
}

/// Reads `512`, `4k`, `1M` (binary multiples) as a count of tokens.
///
/// # Errors
/// When the text is no positive whole number with an optional `k` or `m`.
pub fn parse_tokens(text: &str) -> Result<usize, String> {
    let wrong = || format!("'{text}' is not a token count; write 512, 4k or 1m");
    let lower = text.trim().to_ascii_lowercase();
    let (digits, shift) = match lower.strip_suffix(['k', 'm']) {
        Some(digits) => (digits, if lower.ends_with('k') { 10 } else { 20 }),
        None => (lower.as_str(), 0),
    };
    let many = || format!("{text} tokens are more than 2^40");
    let count: usize = digits.parse().map_err(|_| wrong())?;
    match count.checked_mul(1 << shift) {
        Some(0) => Err(wrong()),
        Some(count) if count <= 1 << 40 => Ok(count),
        _ => Err(many()),
    }
}

/// Reads `8GiB`, `64MiB`, `512KiB`, `1024B`, or decimal `8GB`, as bytes.
///
/// # Errors
/// When the text is no positive number with one of these units.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("'{text}' is not an amount of memory; write 8GiB, 512MiB or 65536B");
    const UNITS: [(&str, f64); 9] = [
        ("TiB", 1_099_511_627_776.0),
        ("GiB", 1_073_741_824.0),
        ("MiB", 1_048_576.0),
        ("KiB", 1024.0),
        ("TB", 1e12),
        ("GB", 1e9),
        ("MB", 1e6),
        ("kB", 1e3),
        ("B", 1.0),
    ];
    let text = text.trim();
    let ends = |unit: &str| {
        text.get(text.len().checked_sub(unit.len())?..).filter(|end| end.eq_ignore_ascii_case(unit)).map(|_| ())
    };
    let (unit, factor) = UNITS.into_iter().find(|(unit, _)| ends(unit).is_some()).ok_or_else(wrong)?;
    let value: f64 = text[..text.len() - unit.len()].trim().parse().map_err(|_| wrong())?;
    let bytes = value * factor;
    if bytes >= 1.0 && bytes < 2f64.powi(60) { Ok(bytes as u64) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_written_with_three_digits() {
        let cases = [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1536, "1.50 KiB"), (1 << 30, "1.00 GiB")];
        for (count, expected) in cases {
            assert_eq!(bytes(count), expected);
        }
        assert_eq!(bytes(123 << 20), "123 MiB");
        let cases = [(5.0, "5.00 ns"), (1234.0, "1.23 µs"), (12_345_678.0, "12.3 ms"), (2.5e9, "2.50 s")];
        for (count, expected) in cases {
            assert_eq!(nanoseconds(count), expected);
        }
        assert_eq!([0.0, 0.004, 0.0994, 0.55].map(three_digits), ["0.00", "0.00400", "0.0994", "0.55"]);
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!((gib(3 << 29).as_str(), gb(16_060_522_496).as_str()), ("1.50", "16.06"));
        assert_eq!([512, 1024, 1000, 131_072, 1 << 20].map(tokens), ["512", "1K", "1000", "128K", "1M"]);
    }

    #[test]
    fn quantities_are_read_in_the_units_people_write() {
        assert_eq!(parse_tokens("32k"), Ok(32768));
        assert_eq!(parse_tokens("1M"), Ok(1 << 20));
        assert_eq!(parse_bytes("8GiB"), Ok(8 << 30));
        assert_eq!(parse_bytes("1.5 mib"), Ok(3 << 19));
        assert_eq!(parse_bytes("2GB"), Ok(2_000_000_000));
        for bad in ["", "k", "-1", "0", "1.5", "9999999999m", "4 q"] {
            assert!(parse_tokens(bad).is_err(), "{bad}");
        }
        for bad in ["", "GiB", "-1GiB", "0B", "nanGiB", "12", "é", "1e30GiB"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }
}
