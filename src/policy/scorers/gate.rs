//! A learned gate: the importance of a token is a linear function of its hidden state, one for each layer and KV head,
//! `score = weight . hidden + bias`.
//!
//! This is what KVzap-linear (arXiv 2601.07891) computes, and, with the sign turned, what [`super::dms`] and others with a
//! gate beside the projections come to at inference. The hidden state is the input of the layer's attention, behind its norm, as kvpress
//! hands it to a press. A token is scored once, as it arrives, and its score stays with it in the cache; the budget decides
//! how many stay, where KVzap evicts below a threshold.

use super::super::linear::dot;
use crate::named::{Named, Parameter};
use crate::policy::Axis::{Hidden, KvHeads, Layers};
use crate::policy::{Assets, Context, Learned, Policy, PolicyEntry, PolicyError, PolicyFile, Scorer, Statistic};
use std::path::Path;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "gate",
    about: "keeps what a learned linear gate on the hidden state scores highest; reads gate.weight [layers, Hkv, hidden] \
            and gate.bias [layers, Hkv] of gates or --policy-file",
    paper: "2601.07891",
    parameters: &[GATES],
    build: |named, assets| from_file(named, assets, build),
};

/// The parameter of policies that read gates.
pub const GATES: Parameter =
    Parameter { name: "gates", default: "auto", about: "file of trained gates; auto: --policy-file" };

/// What `build` makes of the file that a policy's text names, or else of the one that was given.
pub fn from_file(
    named: &Named,
    assets: &mut Assets<'_>,
    build: impl FnOnce(&mut Assets<'_>) -> Result<Policy, PolicyError>,
) -> Result<Policy, PolicyError> {
    match named.text(GATES.name) {
        None | Some("auto") => build(assets),
        Some(path) => assets.of_file(&PolicyFile::open(Path::new(path))?, build),
    }
}

fn build(assets: &mut Assets<'_>) -> Result<Policy, PolicyError> {
    let weight = assets.needed("gate.weight", &[Layers, KvHeads, Hidden])?;
    let bias = assets.needed("gate.bias", &[Layers, KvHeads])?;
    Ok(Policy::after_prefill(Gate { policy: ENTRY.name, sign: 1.0, learned: weight.zip(bias) }))
}

/// A learned linear gate.
pub struct Gate {
    /// Whose it is, for errors.
    pub policy: &'static str,
    /// What its values are multiplied by: higher is retained.
    pub sign: f32,
    /// Weight and bias; `None` where there is no file, which is refused before anything is scored.
    pub learned: Option<(Learned, Learned)>,
}

impl Scorer for Gate {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::HiddenStates]
    }

    fn gate(&self, layer: usize, hidden: &[f32], gates: &mut [f32]) {
        let Some((weight, bias)) = &self.learned else { return };
        for (head, (gate, bias)) in gates.iter_mut().zip(bias.at(&[layer])).enumerate() {
            *gate = self.sign * (bias + dot(weight.at(&[layer, head]), hidden));
        }
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let what = "hidden states of a model's layers, and a policy file";
        let gates = context.gates.filter(|_| self.learned.is_some());
        scores.copy_from_slice(gates.ok_or(PolicyError::Missing { policy: self.policy, what })?);
        Ok(())
    }
}
