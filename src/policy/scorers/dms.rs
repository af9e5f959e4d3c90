//! DMS (Dynamic Memory Sparsification, arXiv 2506.05345): gates that were trained to say what can be evicted.
//!
//! A token's eviction logit `a = weight . hidden + bias` is positive where the gate would evict it; `kvsieve train --method
//! dms` trains it on a frozen model. The score is `-a`, which means the same in every layer and head, so that one pool of all
//! heads is divided by it: the budget sets the threshold that training sets at 0. Eviction is delayed: a token is decided on
//! once, when it leaves the window of recent tokens.

use super::gate::{GATES, Gate, from_file};
use super::protect::Protected;
use crate::named::Parameter;
use crate::policy::Axis::{Hidden, KvHeads, Layers};
use crate::policy::allocation::{ada::Ada, global::Global};
use crate::policy::{Assets, Decoding, Policy, PolicyEntry, PolicyError, Protect, Schedule};

/// Recent tokens that stay where neither the policy nor its file says how many.
const WINDOW: usize = 256;

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "dms",
    about: "gates trained by `kvsieve train --method dms`: delayed eviction, one pool for all layers and heads; reads \
            dms.weight [layers, Hkv, hidden] and dms.bias [layers, Hkv] of gates or --policy-file",
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
        from_file(named, assets, |assets| build(window, assets))
    },
};

/// The policy of a file's gates, with the window that they were trained with unless one is given.
fn build(window: Option<usize>, assets: &mut Assets<'_>) -> Result<Policy, PolicyError> {
    let weight = assets.needed("dms.weight", &[Layers, KvHeads, Hidden])?;
    let bias = assets.needed("dms.bias", &[Layers, KvHeads])?;
    let trained = assets.metadata("window").and_then(|text| text.parse().ok()).unwrap_or(WINDOW);
    let gate = Gate { policy: ENTRY.name, sign: -1.0, learned: weight.zip(bias) };
    let more = Protect { sink: 0, window: window.unwrap_or(trained) };
    let scorer = Protected { scorer: Box::new(gate), more, at_most_budget: true };
    Ok(Policy {
        layers: Box::new(Global { threshold: None }),
        heads: Box::new(Ada { floor: 0.0 }),
        schedule: Schedule { decoding: Decoding::Delayed, ..Schedule::default() },
        ..Policy::after_prefill(scorer)
    })
}
