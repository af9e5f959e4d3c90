//! A policy of your own beside the built-in ones: `cargo run --release --example own_policy` (a few seconds). It always
//! keeps the first tokens and, for half of the budget, the latest; between them it keeps the keys of smallest norm.

use kvsieve::experiment::{Device, Experiment, Options, Spec, run, store};
use kvsieve::policy::{Context, Policy, PolicyEntry, PolicyError, Protect, Registry, Scorer, Statistic, each_list};
use kvsieve::{device::Cpu, report};

const EXPERIMENT: &str = r#"
name = "own-policy"
timing = { max_rounds = 9 }
[[grid]]
measure = "evict"
heads = "8/2"
context_tokens = "512..2k*2"
policy = ["full", "random", "knorm", "sink-norm", "oracle"]
budget = 0.25"#;

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

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let registry = Registry::default().with(PolicyEntry {
        name: "sink-norm",
        about: "keeps sinks, a recent window and keys of small norm",
        paper: "",
        parameters: &[],
        build: |_, _| Ok(Policy::after_prefill(SinkNorm)),
    });
    let experiment =
        Experiment::new(Spec::parse(EXPERIMENT, "own_policy.rs")?, "own_policy.rs", &registry, Device::Cpu)?;
    let repro = "cargo run --release --example own_policy".to_string();
    let options = Options { out: "results".into(), resume: false, shard: None, limit_bytes: 1 << 30, repro };
    let outcome = run(&experiment, &registry, &Cpu::new(None)?, &options, &mut |_| ())?;
    println!("{}", report::summary_table(&outcome.records));
    let (records, environment) = store::read(&outcome.folder)?;
    let (experiment, description) = (experiment.spec.name, experiment.spec.description);
    let run =
        report::Run { experiment, description, run_id: outcome.run_id, repro: options.repro, environment, records };
    println!("report: {}", report::write(&outcome.folder, &[run], report::Detail::Layers)?.html.display());
    Ok(())
}
