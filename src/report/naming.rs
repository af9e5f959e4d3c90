//! What cells have in common and in what they differ.
//!
//! A figure names its series by what differs (`tiled 8/2 heads`) and says once, in its subtitle, what is the same for
//! all. Whatever can change a number is one of the dimensions here, so that no two different configurations are ever
//! taken for two seeds of one.

use crate::eval::Protocol;
use crate::experiment::cell::{Cell, Device};
use crate::experiment::record::Record;
use crate::units;
use std::collections::{BTreeMap, BTreeSet};

/// A property of a cell, in words; empty where there is nothing to say.
pub type Dimension = fn(&Record) -> String;

/// Query heads and KV heads.
pub const HEADS: Dimension = |record| format!("{} heads", record.cell.heads());
/// Query heads alone, where KV heads are the axis.
pub const Q_HEADS: Dimension = |record| format!("{} query heads", record.cell.q_heads);
/// The kernel.
pub const KERNEL: Dimension = |record| record.cell.kernel.clone();
/// Length of the context.
pub const CONTEXT: Dimension = |record| format!("{} context", units::tokens(record.cell.context_tokens));
/// Seed of workload and policy.
pub const SEED: Dimension = |record| format!("seed {}", record.cell.seed);

/// Ranks that share a pass.
pub const RANKS: Dimension = |record| record.cell.ranks.clone().unwrap_or_default();

/// What may stay.
pub const BUDGET: Dimension =
    |record| record.cell.budget.as_ref().map_or(String::new(), |budget| format!("budget {budget}"));
/// Which file the policy was built from.
const POLICY_FILE: Dimension = |record| match &record.cell.policy_file_hash {
    Some(hash) => format!("file {}", short(hash)),
    None => String::new(),
};
/// Layers, where there are several.
const LAYERS: Dimension = |record| match record.cell.layers {
    1 => String::new(),
    layers => format!("{layers} layers"),
};
/// The task of an evaluation.
pub const TASK: Dimension = |record| record.cell.task.clone().unwrap_or_default();
/// Samples of an evaluation.
pub const SAMPLES: Dimension =
    |record| record.cell.samples.map_or(String::new(), |samples| format!("{samples} samples"));
/// The text that goes on, for tables in which several are told apart.
pub const TEXT: Dimension = |record| {
    let text = record.cell.text.as_deref().unwrap_or_default();
    text.rsplit('/').next().unwrap_or_default().into()
};
const MODEL: Dimension = |record| last_part(&record.cell).into();
/// The same where two have one name in different folders.
const MODEL_PATH: Dimension = |record| record.cell.model.clone().unwrap_or_default();
/// What policies had seen of a question.
const PROTOCOL: Dimension = |record| record.cell.protocol.map_or(String::new(), |protocol| protocol.name().into());
const CHAT: Dimension = |record| if record.cell.chat { "chat template".into() } else { String::new() };
const BATCH: Dimension = |record| format!("B {}", record.cell.batch);
const HEAD_DIM: Dimension = |record| format!("D {}", record.cell.head_dim);
const DTYPE: Dimension = |record| record.cell.dtype.name().into();
const KV_FORMAT: Dimension =
    |record| record.cell.kv_format.map_or(String::new(), |format| format!("cache in {format}"));
const WEIGHTS: Dimension =
    |record| record.cell.weights.as_ref().map_or(String::new(), |weights| format!("weights {}", weights.words()));
const ACTIVATIONS: Dimension =
    |record| record.cell.activations.map_or(String::new(), |activations| format!("activations in {activations}"));
const MASK: Dimension = |record| {
    let mask = if record.cell.causal { "causal" } else { "no mask" };
    record.cell.window.map_or(mask.into(), |window| format!("{mask}, window {window}"))
};
const SOFTCAP: Dimension = |record| record.cell.softcap.map_or(String::new(), |cap| format!("soft-cap {cap}"));
const NEW_TOKENS: Dimension = |record| match record.cell.new_tokens {
    0 => String::new(),
    count => format!("{count} new tokens"),
};
const PAGES: Dimension = |record| match record.cell.page_tokens {
    None => String::new(),
    Some(0) => "contiguous".into(),
    Some(tokens) => format!("page {tokens}"),
};
const THREADS: Dimension = |record| match (record.cell.device, record.threads) {
    // What the host's threads do is not measured.
    (Device::Cuda, _) => String::new(),
    (Device::Cpu, 1) => "1 thread".into(),
    (Device::Cpu, threads) => format!("{threads} threads"),
};
const ISA: Dimension = |record| record.isa_path.clone();
const KNOBS: Dimension = |record| record.cell.knobs.as_ref().map_or(String::new(), ToString::to_string);
const WORKLOAD: Dimension = |record| format!("workload {}", short(&record.cell.workload_hash));

/// The name of a model's folder or file.
fn last_part(cell: &Cell) -> &str {
    let model = cell.model.as_deref().unwrap_or_default();
    model.rsplit('/').find(|part| !part.is_empty()).unwrap_or_default()
}

/// The first six characters of a hash.
fn short(hash: &str) -> &str {
    hash.char_indices().nth(6).map_or(hash, |(end, _)| &hash[..end])
}

/// The dimensions of a set of records, split into those that differ and those that do not.
pub struct Naming {
    differ: Vec<Dimension>,
    /// What all have in common: `8/2 heads, D 64, f32, causal`.
    pub common: String,
}

impl Naming {
    /// Compares `records` in the dimensions `first` and in those that matter to every figure. Seed, policy, budget and
    /// whatever else of kernel, heads and context is not among `first` is left to the caller.
    pub fn over(records: &[&Record], first: &[Dimension]) -> Naming {
        let mut all = first.to_vec();
        let is_ambiguous = compete(records, |cell| (last_part(cell), &cell.model));
        all.extend([
            if is_ambiguous { MODEL_PATH } else { MODEL },
            PROTOCOL,
            CHAT,
            LAYERS,
            BATCH,
            HEAD_DIM,
            DTYPE,
            WEIGHTS,
            ACTIVATIONS,
            KV_FORMAT,
            MASK,
            SOFTCAP,
            NEW_TOKENS,
            PAGES,
            THREADS,
            ISA,
            KNOBS,
        ]);
        // A hash that merely follows the seed or the context is no difference worth a name.
        let elsewhere = |cell: &Cell| Cell { workload_hash: String::new(), ..cell.clone() }.id();
        if compete(records, |cell| (elsewhere(cell), &cell.workload_hash)) {
            all.push(WORKLOAD);
        }
        // Which file it is, a policy says itself, unless the file has changed.
        if compete(records, |cell| (cell.policy.as_deref().unwrap_or_default(), &cell.policy_file_hash)) {
            all.push(POLICY_FILE);
        }
        let values = |dimension: &Dimension| records.iter().map(|record| dimension(record)).collect::<BTreeSet<_>>();
        let (differ, common): (Vec<_>, Vec<_>) = all.into_iter().partition(|dimension| values(dimension).len() > 1);
        let mut common: Vec<String> = common.iter().flat_map(values).filter(|text| !text.is_empty()).collect();
        common.retain(|text| text != "B 1");
        // A text may have fewer pieces than were asked for.
        let pieces = records.iter().filter_map(|record| record.answers.as_ref()).map(|answers| answers.samples).max();
        let is_less = |record: &&Record| record.cell.text.is_some() && record.cell.samples > pieces;
        if let Some(had) = pieces.filter(|_| records.iter().all(is_less)) {
            let stated = common.iter_mut().find(|text| **text == SAMPLES(records[0]));
            stated.into_iter().for_each(|text| *text = format!("{had} samples, all of the text"));
        }
        // Beside a policy the name of a protocol is enough, alone it is not.
        if let Some(protocol) = common.iter_mut().find(|text| Protocol::ALL.iter().any(|known| known.name() == **text))
        {
            *protocol = format!("protocol {protocol}");
        }
        Naming { differ, common: common.join(" · ") }
    }

    /// What sets `record` apart, to be put behind its kernel or policy; empty or with a leading space.
    pub fn apart(&self, record: &Record) -> String {
        self.differ
            .iter()
            .map(|dimension| dimension(record))
            .filter(|text| !text.is_empty())
            .fold(String::new(), |text, part| format!("{text} {part}"))
    }
}

/// Whether two cells have the same first part, and not the same second.
fn compete<'a, K: Ord, V: Copy + PartialEq>(records: &[&'a Record], parts: impl Fn(&'a Cell) -> (K, V)) -> bool {
    let mut seen = BTreeMap::new();
    records.iter().any(|record| {
        let (key, value) = parts(&record.cell);
        seen.insert(key, value).is_some_and(|other| other != value)
    })
}
