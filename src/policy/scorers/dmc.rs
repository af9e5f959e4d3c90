//! DMC (Dynamic Memory Compression, arXiv 2403.09636): gates that were trained to say which tokens go on with the slot of the token
//! before them, in place of beginning one of their own.
//!
//! `kvsieve train --method dmc` trains them as those of [`super::dms`], with logits by which the token behind decides. A token whose
//! slot another goes on with leaves the cache, and its key and value go into the mean of that one
//! ([`crate::policy::action::accumulate`], `into=later`). The score is the logit with its sign turned, in one pool of all layers and
//! heads: the budget sets the threshold that training sets at 0. While decoding a slot goes on behind the step, so that
//! the newest token's own query still sees it as it came.

use super::dms;
use crate::policy::Axis::{self, Hidden, KvHeads, Layers};
use crate::policy::action::accumulate::{Accumulate, Into};
use crate::policy::published::{GATES, from_file};
use crate::policy::{DecidedBy, Policy, PolicyEntry};

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "dmc",
    about: "gates trained by `kvsieve train --method dmc`: a token is averaged into the one behind it or stays, one pool for all \
            layers and heads; reads dmc.weight [layers, Hkv, hidden] and dmc.bias [layers, Hkv] of gates or --policy-file",
    paper: "2403.09636",
    parameters: &[GATES],
    build: |named, assets| {
        from_file(named, assets, |assets| {
            let learned = assets.needed(WEIGHT.0, WEIGHT.1)?.zip(assets.needed(BIAS.0, BIAS.1)?);
            let action = Some(Box::new(Accumulate { into: Into::Later }) as _);
            Ok(Policy { action, ..dms::policy(ENTRY.name, learned, 1, DecidedBy::Next) })
        })
    },
};

const WEIGHT: (&str, &[Axis]) = ("dmc.weight", &[Layers, KvHeads, Hidden]);
const BIAS: (&str, &[Axis]) = ("dmc.bias", &[Layers, KvHeads]);
