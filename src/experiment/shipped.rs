//! The experiments that come with kvsieve, compiled in.

/// The experiments that come with kvsieve, by name.
pub const SHIPPED: &[(&str, &str)] = &[
    ("quickstart", include_str!("../../experiments/quickstart.toml")),
    ("memory-vs-context", include_str!("../../experiments/memory-vs-context.toml")),
    ("plan-vs-measured", include_str!("../../experiments/plan-vs-measured.toml")),
    ("latency-vs-context", include_str!("../../experiments/latency-vs-context.toml")),
    ("gqa-vs-mha", include_str!("../../experiments/gqa-vs-mha.toml")),
    ("eviction-catalogue", include_str!("../../experiments/eviction-catalogue.toml")),
    ("eviction-cost", include_str!("../../experiments/eviction-cost.toml")),
    ("ragged-memory", include_str!("../../experiments/ragged-memory.toml")),
    ("chunked-prefill", include_str!("../../experiments/chunked-prefill.toml")),
    ("decode-eviction", include_str!("../../experiments/decode-eviction.toml")),
    ("kv-formats", include_str!("../../experiments/kv-formats.toml")),
    ("equal-bytes", include_str!("../../experiments/equal-bytes.toml")),
    ("paging-waste", include_str!("../../experiments/paging-waste.toml")),
    ("eval-builtin", include_str!("../../experiments/eval-builtin.toml")),
    ("needle-heatmap", include_str!("../../experiments/needle-heatmap.toml")),
    ("model-memory", include_str!("../../experiments/model-memory.toml")),
    ("long-decode", include_str!("../../experiments/long-decode.toml")),
    ("real-text", include_str!("../../experiments/real-text.toml")),
    ("real-formats", include_str!("../../experiments/real-formats.toml")),
    ("hybrid", include_str!("../../experiments/hybrid.toml")),
    ("real-chunks", include_str!("../../experiments/real-chunks.toml")),
    ("real-needles", include_str!("../../experiments/real-needles.toml")),
    ("real-memory", include_str!("../../experiments/real-memory.toml")),
    ("dms", include_str!("../../experiments/dms.toml")),
];
