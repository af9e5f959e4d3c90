//! What the vLLM paper prints, to be shown beside what is simulated: Kwon et al., "Efficient Memory Management for
//! Large Language Model Serving with PagedAttention", SOSP 2023, arXiv 2309.06180, figures 2 and 13 (OPT-13B, an A100
//! of 40 GB). This is the only place where these numbers stand.

/// Where the numbers are from.
pub const SOURCE: &str = "arXiv 2309.06180, figures 2 and 13";

/// Printed numbers of one trace and strategy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Published {
    /// Name of the trace here.
    pub trace: &'static str,
    /// Name of the strategy here.
    pub strategy: &'static str,
    /// Shares of figure 2 in percent: token states, reserved, internal, external and others. Nothing is printed for
    /// what is `None`.
    pub shares_percent: Option<[Option<f64>; 4]>,
    /// Mean number of batched requests, figure 13.
    pub batch: f64,
    /// Whether the paper's load filled the memory, as the simulated one always does. Its vLLM ran ShareGPT at 2 and
    /// Alpaca at 30 requests a second and was not full, so its batch is not to be compared.
    pub saturated: bool,
}

const fn row(
    trace: &'static str,
    strategy: &'static str,
    shares_percent: Option<[Option<f64>; 4]>,
    batch: f64,
    saturated: bool,
) -> Published {
    Published { trace, strategy, shares_percent, batch, saturated }
}

/// Every printed row.
pub const PUBLISHED: &[Published] = &[
    row("sharegpt", "max", Some([Some(20.4), Some(13.3), Some(57.3), Some(8.9)]), 7.0, true),
    row("sharegpt", "pow2", Some([Some(26.8), Some(17.9), Some(13.6), Some(41.6)]), 9.81, true),
    row("sharegpt", "oracle", Some([Some(38.2), Some(25.2), None, Some(36.6)]), 13.62, true),
    row("sharegpt", "paged", Some([Some(96.3), None, None, None]), 30.42, false),
    row("alpaca", "max", None, 7.0, true),
    row("alpaca", "pow2", None, 43.24, true),
    row("alpaca", "oracle", None, 72.75, true),
    row("alpaca", "paged", None, 132.44, false),
];

/// The printed row for a trace and a strategy as they stand in a cell. Only the presets with all their defaults, and
/// for `paged` pages of 16, are what the paper ran.
pub fn of(trace: &str, strategy: &str) -> Option<&'static Published> {
    let strategy = if strategy == "paged:page=16" { "paged" } else { strategy };
    PUBLISHED.iter().find(|row| row.trace == trace && row.strategy == strategy)
}
