//! What a byte is for.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The purpose of an allocation. Peaks are kept for each label and in total.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Label {
    /// Tensors an experiment reads: generated or loaded, the same for every cell of a comparison.
    Input,
    /// Parameters of a model: mapped files, and what was widened of them.
    Weights,
    /// Keys and values that a token may still attend to.
    Kv,
    /// Empty places of a cache's pages in use.
    KvFragmentation,
    /// Free pages that a cache holds.
    KvSlack,
    /// Page tables of a cache, and how many lists hold each page.
    PageTable,
    /// Gradients by the parameters.
    Gradients,
    /// What an optimizer remembers of each parameter.
    Optimizer,
    /// Outputs, log-sum-exps, and gradients by them.
    Activations,
    /// Materialised score matrices, `[B, Hq, Lq, Lk]`.
    Scores,
    /// Scratch memory of a kernel.
    Workspace,
    /// Importance scores and statistics of an eviction policy.
    Policy,
    /// Positions of a cache's tokens.
    Metadata,
    /// What a memory of facts holds.
    Facts,
}

impl Label {
    /// Every label, in the order in which they are shown.
    pub const ALL: [Label; 14] = [
        Label::Input,
        Label::Weights,
        Label::Kv,
        Label::KvFragmentation,
        Label::KvSlack,
        Label::PageTable,
        Label::Gradients,
        Label::Optimizer,
        Label::Activations,
        Label::Scores,
        Label::Workspace,
        Label::Policy,
        Label::Metadata,
        Label::Facts,
    ];

    /// The label's name as it stands in records and on screen.
    pub fn name(self) -> &'static str {
        match self {
            Label::Input => "input",
            Label::Weights => "weights",
            Label::Kv => "kv",
            Label::KvFragmentation => "kv_fragmentation",
            Label::KvSlack => "kv_slack",
            Label::PageTable => "page_table",
            Label::Gradients => "gradients",
            Label::Optimizer => "optimizer",
            Label::Activations => "activations",
            Label::Scores => "scores",
            Label::Workspace => "workspace",
            Label::Policy => "policy",
            Label::Metadata => "metadata",
            Label::Facts => "facts",
        }
    }
}

/// Bytes for each label; labels that hold nothing are left out.
pub type LabelBytes = BTreeMap<Label, u64>;
