//! DMC (Dynamic Memory Compression, arXiv 2403.09636): gates that were trained to say which tokens go on with the slot of the token
//! before them, in place of beginning one of their own.
//!
//! `kvsieve train --method dmc` trains them as those of [`super::dms`], with logits by which the token behind decides. A token whose
//! slot another goes on with leaves the cache, and its key and value go into the mean of that one
//! ([`crate::policy::action::accumulate`], `into=later`), in which each token has a weight that a second function gives it as it
//! comes. The score is the logit with its sign turned, in one pool of all layers and heads: the budget sets the threshold that
//! training sets at 0. While decoding a slot goes on behind the step, so that the newest token's own query still sees it as it came.

use super::dms;
use super::gate::Gate;
use crate::policy::Axis::{self, Hidden, KvHeads, Layers};
use crate::policy::action::accumulate::{Accumulate, Into};
use crate::policy::network::Network;
use crate::policy::published::{GATES, from_file};
use crate::policy::{DecidedBy, Policy, PolicyEntry, PolicyError};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "dmc",
    about: "gates trained by `kvsieve train --method dmc`: a token is averaged into the one behind it or stays, one pool for all \
            layers and heads; reads dmc.weight and dmc.importance.weight [layers, Hkv, hidden], dmc.bias and dmc.importance.bias \
            [layers, Hkv] of gates or --policy-file",
    paper: "2403.09636",
    parameters: &[GATES],
    build: |named, assets| {
        from_file(named, assets, |assets| {
            let mut network = |[weight, bias]: [&'static str; 2]| {
                let (weight, bias) = (assets.needed(weight, MATRIX)?, assets.needed(bias, &MATRIX[..2])?);
                let network = weight.zip(bias).map(|(weight, bias)| Network { inner: None, weight, bias });
                Ok::<_, PolicyError>(network)
            };
            let gate = Gate { policy: ENTRY.name, sign: -1.0, network: network(["dmc.weight", "dmc.bias"])? };
            let weights = network(["dmc.importance.weight", "dmc.importance.bias"])?;
            let action = Some(Box::new(Accumulate { into: Into::Later, weights }) as _);
            Ok(Policy { action, ..dms::policy(gate, 1, DecidedBy::Next) })
        })
    },
};

const MATRIX: &[Axis] = &[Layers, KvHeads, Hidden];
