//! A whole `kvsieve` with one more policy: `cargo run --release --example own_policy -- list policies sink-norm`, and every
//! other command. The policy always keeps the first tokens and, for half of the budget, the latest; between them it keeps
//! the keys of smallest norm.

use kvsieve::policy::{Context, Policy, PolicyEntry, PolicyError, Protect, Registry, Scorer, Statistic, each_list};
use std::process::ExitCode;

struct SinkNorm;

impl Scorer for SinkNorm {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::Keys]
    }

    fn protect(&self, budget_tokens: usize) -> Protect {
        Protect { sink: 4, window: budget_tokens / 2 }
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        each_list(context, scores, &mut [], |list, scores, _| {
            list.keys(|slot, key| scores[slot] = -key.iter().map(|x| x * x).sum::<f32>());
        });
        Ok(())
    }
}

fn main() -> ExitCode {
    kvsieve::cli::main_with(Registry::default().with(PolicyEntry {
        name: "sink-norm",
        about: "keeps sinks, a recent window and keys of small norm",
        paper: "",
        parameters: &[],
        build: |_, _| Ok(Policy::after_prefill(SinkNorm)),
    }))
}
