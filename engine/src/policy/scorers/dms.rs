//! DMS (Dynamic Memory Sparsification, arXiv 2506.05345): gates that were trained to say what can be evicted.
//!
//! A token's eviction logit, `a = weight . hidden + bias` or one with an inner layer ([`Network`]), is positive where the gate would evict it; `kvsieve train --method
//! dms` trains it on a frozen model. The score is `-a`, which means the same in every layer and head, so that one pool of all
//! heads is divided by it: the budget sets the threshold that training sets at 0. Eviction is delayed: a token is decided on
//! once, when it leaves the window of recent tokens. `hidden` is the token's own, or that of the token behind it where the file
//! says so in its metadata (`decided_by = next`).

use super::gate::{self, Gate, Names};
use super::protect::Protected;
use crate::named::Parameter;
use crate::policy::Axis::{Hidden, KvHeads, Layers};
use crate::policy::allocation::{ada::Ada, global::Global};
use crate::policy::network::Network;
use crate::policy::published::{self, GATES, dms::CheckpointGates, folder, from_file};
use crate::policy::{Assets, DecidedBy, Decoding, Policy, PolicyEntry, PolicyError, Protect, Schedule};
use std::path::Path;

/// Recent tokens that stay where neither the policy nor its file says how many.
const WINDOW: usize = 256;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "dms",
    about: "gates trained by `kvsieve train --method dms`: delayed eviction, one pool for all layers and heads; reads \
            dms.weight [layers, Hkv, hidden or inner], dms.bias [layers, Hkv] and, of an inner layer, dms.inner.weight and dms.inner.bias \
            of gates or --policy-file, or a folder of NVIDIA's Model-Optimizer",
    paper: "2506.05345",
    parameters: &[
        GATES,
        Parameter {
            name: "window",
            default: "auto",
            about: "recent tokens that are not evicted yet; auto: as trained",
        },
    ],
    build: |named, assets| {
        let window = match named.text("window") {
            None | Some("auto") => None,
            Some(_) => Some(named.count("window", WINDOW, 1)?),
        };
        match folder(named) {
            Some(folder) => of_checkpoint(folder, window, assets),
            None => from_file(named, assets, |assets| build(window, assets)),
        }
    },
};

const NAMES: Names = Names { weight: "dms.weight", bias: "dms.bias", inner: ["dms.inner.weight", "dms.inner.bias"] };

/// The policy of gates that NVIDIA's Model-Optimizer trained, whose decisions come one token late.
fn of_checkpoint(folder: &Path, window: Option<usize>, assets: &mut Assets<'_>) -> Result<Policy, PolicyError> {
    let CheckpointGates { weight, bias, window: trained } = published::dms::read(folder)?;
    assets.note(
        folder,
        &[(NAMES.weight, &[Layers, KvHeads, Hidden], &weight), (NAMES.bias, &[Layers, KvHeads], &bias)],
    )?;
    let network = Network { inner: None, weight, bias };
    Ok(policy(gate(Some(network)), window.unwrap_or(trained), DecidedBy::Next))
}

/// The policy of a file's gates, with the window that they were trained with unless one is given.
fn build(window: Option<usize>, assets: &mut Assets<'_>) -> Result<Policy, PolicyError> {
    let network = gate::network(assets, &NAMES)?;
    let trained = published::trained_with(assets, "window", 1)?.unwrap_or(WINDOW);
    let named = |text: String| {
        let wrong = || PolicyError::File(format!("decided_by of the gates is '{text}'; it must be itself or next"));
        DecidedBy::named(&text).ok_or_else(wrong)
    };
    let decided_by = assets.metadata("decided_by").map(named).transpose()?.unwrap_or_default();
    Ok(policy(gate(network), window.unwrap_or(trained), decided_by))
}

fn gate(network: Option<Network>) -> Gate {
    Gate { policy: ENTRY.name, sign: -1.0, network }
}

/// The policy of gates that score tokens, behind a window of recent tokens.
pub(super) fn policy(gate: Gate, window: usize, decided_by: DecidedBy) -> Policy {
    let more = Protect { sink: 0, window };
    let scorer = Protected { scorer: Box::new(gate), more, at_most_budget: true };
    Policy {
        layers: Box::new(Global { threshold: None }),
        heads: Box::new(Ada { floor: 0.0 }),
        schedule: Schedule { decoding: Decoding::Delayed, ..Schedule::default() },
        decided_by,
        ..Policy::after_prefill(scorer)
    }
}
