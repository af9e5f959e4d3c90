//! The presets: tables of models, cards, networks and weight formats, compiled in as TOML.

use super::PlanError;
use super::architecture::Architecture;
use super::weights::WeightFormat;
use serde::Deserialize;
use std::sync::LazyLock;

/// A card, as its driver reports it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Name.
    pub name: String,
    /// Memory that the driver reports, in MiB.
    pub mib: u64,
    /// Peak bandwidth, in 1e9 bytes per second.
    pub gb_per_s: f64,
    /// Dense 16-bit products that add up in f32, in 1e12 operations per second.
    pub tflops: f64,
    /// The same in 8-bit floats, where it has them.
    pub fp8_tflops: Option<f64>,
    /// Generation of its link to the host, 16 lanes.
    pub pcie: u32,
    /// To the other cards of its node, one direction, in 1e9 bytes per second; without it they are reached as the host is.
    pub nvlink_gb_per_s: Option<f64>,
    /// Whether it computes in bf16.
    #[serde(default = "yes")]
    pub bf16: bool,
    /// Where the numbers stand.
    pub source: String,
}

fn yes() -> bool {
    true
}

impl Gpu {
    /// Bytes that the driver reports.
    pub fn bytes(&self) -> u64 {
        self.mib << 20
    }

    /// Bytes per second over the link, pinned, as measured in practice: 12, 25 and 50 GB/s for generations 3, 4 and 5.
    pub fn link_bytes_per_s(&self) -> f64 {
        match self.pcie {
            ..=3 => 12e9,
            4 => 25e9,
            _ => 50e9,
        }
    }

    /// To another card of its node, one direction, in 1e9 bytes per second.
    pub fn peer_gb_per_s(&self) -> f64 {
        self.nvlink_gb_per_s.unwrap_or(self.link_bytes_per_s() / 1e9)
    }
}

/// A network between nodes.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Name.
    pub name: String,
    /// One direction of the port that a card has, in 1e9 bytes per second.
    pub gb_per_s: f64,
    /// Where the number stands.
    pub source: String,
}

#[derive(Deserialize)]
struct Table<T> {
    #[serde(alias = "gpu", alias = "format", alias = "claim", alias = "measured", alias = "network")]
    model: Vec<T>,
}

fn table<T: serde::de::DeserializeOwned>(text: &str) -> Vec<T> {
    toml::from_str::<Table<T>>(text).expect("the tables are tested").model
}

/// Every model.
pub static MODELS: LazyLock<Vec<Architecture>> = LazyLock::new(|| table(include_str!("presets/models.toml")));

/// Every card, from the smallest bandwidth of its generation on.
pub static GPUS: LazyLock<Vec<Gpu>> = LazyLock::new(|| table(include_str!("presets/gpus.toml")));

/// Every network.
pub static NETWORKS: LazyLock<Vec<Network>> = LazyLock::new(|| table(include_str!("presets/networks.toml")));

/// Every weight format.
pub static WEIGHT_FORMATS: LazyLock<Vec<WeightFormat>> = LazyLock::new(|| table(include_str!("presets/formats.toml")));

/// What policies and formats lose by the project's own records.
pub static LOSSES: LazyLock<Vec<Measured>> = LazyLock::new(|| table(include_str!("presets/losses.toml")));

/// What a policy or a format did to the next token of a real model, taken from a record of `results/reference/`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// The experiment.
    pub experiment: String,
    /// The policy, and its budget as it was written.
    pub policy: Option<String>,
    /// See `policy`.
    pub budget: Option<String>,
    /// Or how keys and values are kept, with a full cache.
    pub kv_format: Option<String>,
    /// Or how weights are kept, with a full cache of plain elements.
    pub weights: Option<String>,
    /// Tokens of the context.
    pub context_tokens: usize,
    /// KL divergence from the full cache, nats for each token.
    pub kl_nats: f64,
}

/// The model of a name, in any case.
///
/// # Errors
/// Lists names near it.
pub fn model(name: &str) -> Result<&'static Architecture, PlanError> {
    named("model", name, &MODELS, |model| &model.name)
}

/// The card of a name, in any case.
///
/// # Errors
/// Lists names near it.
pub fn gpu(name: &str) -> Result<&'static Gpu, PlanError> {
    named("GPU", name, &GPUS, |gpu| &gpu.name)
}

/// The network of a name, in any case.
///
/// # Errors
/// Lists names near it.
pub fn network(name: &str) -> Result<&'static Network, PlanError> {
    named("network", name, &NETWORKS, |network| &network.name)
}

/// The weight format of a name, in any case.
///
/// # Errors
/// Lists names near it.
pub fn weight_format(name: &str) -> Result<&'static WeightFormat, PlanError> {
    named("weight format", name, &WEIGHT_FORMATS, |format| &format.name)
}

fn named<T>(kind: &'static str, name: &str, all: &'static [T], of: fn(&T) -> &String) -> Result<&'static T, PlanError> {
    let wanted = name.to_lowercase();
    all.iter().find(|item| *of(item) == wanted).ok_or_else(|| PlanError::Unknown {
        kind,
        name: name.into(),
        near: near(&wanted, all.iter().map(|item| of(item).as_str())).join(", "),
    })
}

/// Names that are shown where one is not known.
const SHOWN: usize = 6;

/// The names that differ least, by edits that turn one into the other; a name that holds the other is near.
pub fn near<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let distance = |name: &str| {
        let holds = !wanted.is_empty() && (name.contains(wanted) || wanted.contains(name));
        (if holds { 0 } else { 1 }, edits(wanted, name))
    };
    let mut names: Vec<&str> = names.collect();
    names.sort_by_key(|name| distance(name));
    names.truncate(SHOWN);
    names
}

/// Levenshtein's distance.
fn edits(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, b) in to.iter().enumerate() {
            let best = (diagonal + usize::from(a != *b)).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = std::mem::replace(&mut row[j + 1], best);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_names_come_first() {
        assert_eq!(edits("kitten", "sitting"), 3);
        let names = ["qwen3-8b", "llama-3-8b", "llama-3.1-8b", "gpt-2"];
        assert_eq!(near("llama3-8b", names.into_iter())[0], "llama-3-8b");
        assert_eq!(near("gpt", names.into_iter())[0], "gpt-2");
    }
}
