//! Whole methods that are combinations: a name for a text of the algebra.

use super::registry::Preset;

/// The presets, in the order in which they are listed. A parameter given to a preset goes to the first part that has it.
pub const PRESETS: &[Preset] = &[
    Preset {
        name: "dms",
        text: "keydiff+ada:floor=0+delayed",
        paper: "2506.05345",
        about: "one threshold for the heads of a layer, each new token judged when it leaves a recent window; the decision is a training-free score",
    },
    Preset {
        name: "ada-snapkv",
        text: "snapkv+ada",
        paper: "2407.11550",
        about: "SnapKV with a layer's budget divided over its heads by score",
    },
    Preset {
        name: "pyramidkv",
        text: "snapkv+pyramid",
        paper: "2406.02069",
        about: "SnapKV with more budget for lower layers",
    },
    Preset {
        name: "ada-pyramidkv",
        text: "snapkv+pyramid+ada",
        paper: "2407.11550",
        about: "PyramidKV's budgets over layers, Ada-KV's over heads",
    },
];
