//! A learned gate: the importance of a token is a function of its hidden state, one for each layer and KV head, linear,
//! `score = weight . hidden + bias`, or with an inner layer ([`Network`]).
//!
//! This is what KVzap (arXiv 2601.07891) computes, whose published folders are read too, and, with the sign turned, what [`super::dms`] and others with a
//! gate beside the projections come to at inference. The hidden state is the input of the layer's attention, behind its norm, as kvpress
//! hands it to a press. A token is scored once, as it arrives, and its score stays with it in the cache; the budget decides
//! how many stay, where KVzap evicts below a threshold.

use crate::policy::Axis::{self, Hidden, KvHeads, Layers};
use crate::policy::network::{Inner, Network};
use crate::policy::published::{GATES, folder, from_file, kvzap};
use crate::policy::{Assets, Context, Policy, PolicyEntry, PolicyError, Scorer, Statistic};
use std::path::Path;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "gate",
    about: "keeps what a learned gate on the hidden state scores highest, linear or with an inner layer; reads gate.weight \
            [layers, Hkv, hidden or inner], gate.bias [layers, Hkv] and, of an inner layer, gate.inner.weight and gate.inner.bias \
            of gates or --policy-file, or a folder of KVzap's authors",
    paper: "2601.07891",
    parameters: &[GATES],
    build: |named, assets| match folder(named) {
        Some(path) => of_folder(path, assets),
        None => from_file(named, assets, build),
    },
};

const WEIGHT: &str = "gate.weight";
const BIAS: (&str, &[Axis]) = ("gate.bias", &[Layers, KvHeads]);
const INNER_WEIGHT: (&str, &[Axis]) = ("gate.inner.weight", &[Layers, Axis::Inner, Hidden]);
const INNER_BIAS: (&str, &[Axis]) = ("gate.inner.bias", &[Layers, Axis::Inner]);

/// Axes of the weight behind an inner layer, or of the only one.
fn axes(inner: &Option<Inner>) -> [Axis; 3] {
    [Layers, KvHeads, if inner.is_some() { Axis::Inner } else { Hidden }]
}

fn build(assets: &mut Assets<'_>) -> Result<Policy, PolicyError> {
    let inner = match assets.optional(INNER_WEIGHT.0, INNER_WEIGHT.1)? {
        Some(weight) => assets.needed(INNER_BIAS.0, INNER_BIAS.1)?.map(|bias| Inner { weight, bias }),
        None => None,
    };
    let weight = assets.needed(WEIGHT, &axes(&inner))?;
    let bias = assets.needed(BIAS.0, BIAS.1)?;
    let network = weight.zip(bias).map(|(weight, bias)| Network { inner, weight, bias });
    Ok(Policy::after_prefill(Gate { policy: ENTRY.name, sign: 1.0, network }))
}

/// The policy of a surrogate that KVzap's authors fitted.
fn of_folder(path: &Path, assets: &mut Assets<'_>) -> Result<Policy, PolicyError> {
    let network = kvzap::read(path)?;
    let Network { inner, weight, bias } = &network;
    let axes = axes(inner);
    let mut tensors = vec![(WEIGHT, &axes[..], weight), (BIAS.0, BIAS.1, bias)];
    if let Some(inner) = inner {
        tensors.push((INNER_WEIGHT.0, INNER_WEIGHT.1, &inner.weight));
        tensors.push((INNER_BIAS.0, INNER_BIAS.1, &inner.bias));
    }
    assets.note(path, &tensors)?;
    Ok(Policy::after_prefill(Gate { policy: ENTRY.name, sign: 1.0, network: Some(network) }))
}

/// A learned gate.
pub struct Gate {
    /// Whose it is, for errors.
    pub policy: &'static str,
    /// What its values are multiplied by: higher is retained.
    pub sign: f32,
    /// `None` where there is no file, which is refused before anything is scored.
    pub network: Option<Network>,
}

impl Scorer for Gate {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::HiddenStates]
    }

    fn gate(&self, layer: usize, hidden: &[f32], gates: &mut [f32]) {
        let Some(network) = &self.network else { return };
        network.gates(layer, hidden, gates);
        gates.iter_mut().for_each(|gate| *gate *= self.sign);
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let what = "hidden states of a model's layers, and a policy file";
        let gates = context.gates.filter(|_| self.network.is_some());
        scores.copy_from_slice(gates.ok_or(PolicyError::Missing { policy: self.policy, what })?);
        Ok(())
    }
}
