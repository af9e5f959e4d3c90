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
use crate::policy::{Assets, Context, Policy, PolicyEntry, PolicyError, Scorer, ScoringPlan, Statistic};
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

const NAMES: Names =
    Names { weight: "gate.weight", bias: "gate.bias", inner: ["gate.inner.weight", "gate.inner.bias"] };

/// Names of the tensors of a network.
pub(super) struct Names {
    pub weight: &'static str,
    pub bias: &'static str,
    pub inner: [&'static str; 2],
}

const BIAS: &[Axis] = &[Layers, KvHeads];
const INNER: [&[Axis]; 2] = [&[Layers, Axis::Inner, Hidden], &[Layers, Axis::Inner]];

/// Axes of the weight behind an inner layer, or of the only one.
fn axes(inner: &Option<Inner>) -> [Axis; 3] {
    [Layers, KvHeads, if inner.is_some() { Axis::Inner } else { Hidden }]
}

/// The network of a file's tensors; `None` where there is no file.
pub(super) fn network(assets: &mut Assets<'_>, names: &Names) -> Result<Option<Network>, PolicyError> {
    let inner = match assets.optional(names.inner[0], INNER[0])? {
        Some(weight) => assets.needed(names.inner[1], INNER[1])?.map(|bias| Inner { weight, bias }),
        None => None,
    };
    let weight = assets.needed(names.weight, &axes(&inner))?;
    let bias = assets.needed(names.bias, BIAS)?;
    Ok(weight.zip(bias).map(|(weight, bias)| Network { inner, weight, bias }))
}

fn build(assets: &mut Assets<'_>) -> Result<Policy, PolicyError> {
    let network = network(assets, &NAMES)?;
    Ok(Policy::after_prefill(Gate { policy: ENTRY.name, sign: 1.0, network }))
}

/// The policy of a surrogate that KVzap's authors fitted.
fn of_folder(path: &Path, assets: &mut Assets<'_>) -> Result<Policy, PolicyError> {
    let network = kvzap::read(path)?;
    let Network { inner, weight, bias } = &network;
    let axes = axes(inner);
    let mut tensors = vec![(NAMES.weight, &axes[..], weight), (NAMES.bias, BIAS, bias)];
    if let Some(inner) = inner {
        tensors.extend([(NAMES.inner[0], INNER[0], &inner.weight), (NAMES.inner[1], INNER[1], &inner.bias)]);
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
    fn is_absolute(&self) -> bool {
        true
    }

    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::HiddenStates]
    }

    fn gate(&self, layer: usize, hidden: &[f32], gates: &mut [f32]) {
        let Some(network) = &self.network else { return };
        network.gates(layer, hidden, gates);
        gates.iter_mut().for_each(|gate| *gate *= self.sign);
    }

    fn network(&self) -> Option<(&Network, f32)> {
        Some((self.network.as_ref()?, self.sign))
    }

    fn scoring_plan(&self) -> Option<ScoringPlan> {
        Some(ScoringPlan::Gates)
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let what = "hidden states of a model's layers, and a policy file";
        let gates = context.gates.filter(|_| self.network.is_some());
        scores.copy_from_slice(gates.ok_or(PolicyError::Missing { policy: self.policy, what })?);
        Ok(())
    }
}
