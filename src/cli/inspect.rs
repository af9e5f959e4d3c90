//! `kvsieve inspect`: where the heads of a model look, and which of them fetch what a context hides.

use super::failure::Failure;
use super::names::{Names, named};
use super::policy::budget;
use super::{Compute, output, read_text};
use crate::anatomy::{Anatomy, FIRST, LAST, MASS, Retrieval, anatomy, needles_retained, retrieval};
use crate::format::KvFormat;
use crate::memory::Arena;
use crate::model::{Config, Eviction, Model, ModelError, Repeat, Text, locate};
use crate::policy::{Budget, Policy, Registry};
use crate::report;
use crate::report::anatomy::Retained;
use crate::stats::quantile;
use crate::task::{Draw, generate, task};
use crate::tensor::DType;
use crate::train::sensitivity;
use crate::units;
use serde::Serialize;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Writes anatomy.svg, maps of layers by heads, and anatomy.csv, a line for each query head: the fraction of its attention on the \
first 4 tokens and on the latest 64, its entropy in nats, the fewest tokens that hold 90% of it, how often it copies a needle \
(retrieval score, arXiv 2404.15574), and the norms of its first 4 keys and values over the median ones. Attention is that of 64 \
queries of the second half of the text; without --text the text is an essay that tasks hide needles in. With --policy also \
what each KV head retains of the needles' values, evicted before the question is seen.\n\n\
Examples:
  kvsieve inspect --model builtin --output anatomy
  kvsieve inspect --model SmolLM2-135M-Instruct.Q4_1.gguf --text novel.txt --tokens 2k --output anatomy
  kvsieve inspect --model builtin --policy snapkv,keydiff --budget 0.25 --output anatomy";

/// The anatomy of a model's attention, head by head: sinks, locality, entropy, copying
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Hugging Face folder, a GGUF file, or 'builtin'
    #[arg(long, value_name = "MODEL", default_value = "builtin")]
    model: PathBuf,
    /// File with a text [default: an essay]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Tokens of the text, and of each context with a needle
    #[arg(long, value_name = "N", default_value = "1k", value_parser = units::parse_tokens)]
    tokens: usize,
    /// Contexts with a needle
    #[arg(long, value_name = "N", default_value_t = 10)]
    needles: usize,
    /// Policies (see `kvsieve list policies`), to show what they retain of the needles in each head
    #[arg(long, value_name = "POLICY", value_parser = named)]
    policy: Vec<Names>,
    /// What may stay: a fraction (0.25), tokens per KV head (512) or bytes of all layers (64MiB)
    #[arg(long, value_name = "BUDGET", requires = "policy")]
    budget: Option<String>,
    /// Folder to write into
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    #[command(flatten)]
    compute: Compute,
    /// Write the numbers as JSON instead of the summary, to standard output (-) or a file
    #[arg(long, value_name = "-|FILE", help_heading = "What is reported")]
    json: Option<PathBuf>,
}

/// Fractions of all query heads.
#[derive(Serialize)]
struct Report {
    model: PathBuf,
    tokens: usize,
    needles: usize,
    layers: usize,
    q_heads: usize,
    /// With more than 0.3 of their attention on the first tokens.
    sink_heads: f64,
    /// With more than 0.6 on the latest.
    local_heads: f64,
    /// That copy at least a tenth of the needle's tokens.
    retrieval_heads: f64,
    /// Median over heads of the tokens for 90% of the attention.
    median_tokens_for_mass: f64,
    /// Median over KV heads.
    median_first_key_norm: f64,
    median_first_value_norm: f64,
    /// The best copying heads: layer, head, score.
    copying: Vec<(usize, usize, f64)>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    needles_retained: Vec<Kept>,
}

/// What a policy retains of the needles' values, as fractions.
#[derive(Serialize)]
struct Kept {
    policy: String,
    /// Over all query heads.
    of_all_heads: f64,
    /// Over those that copy at least a tenth; `None` where none does.
    of_copying_heads: Option<f64>,
}

/// From which fraction on a head counts as one that rests on sinks, one that looks near, one that copies.
const SINK: f64 = 0.3;
const LOCAL: f64 = 0.6;
const COPIES: f64 = 0.1;
/// Tokens by which an essay is written longer than what is read.
const ESSAY_MORE: usize = 256;
/// Most contexts with a needle: each is read by the model.
const MOST_NEEDLES: usize = 10_000;
/// Copying heads that are named.
const NAMED: usize = 5;

pub fn run(args: &Args, registry: &Registry) -> Result<(), Failure> {
    args.compute.refuse_cuda()?;
    if args.tokens < 2 || !(1..=MOST_NEEDLES).contains(&args.needles) {
        let (tokens, needles) = (args.tokens, args.needles);
        return Err(Failure::usage(format!(
            "--tokens is {tokens} and --needles {needles}; they must be at least 2 and 1 to {MOST_NEEDLES}"
        )));
    }
    output::check_folder("--output", &args.output)?;
    let mut reads = vec![("--model", args.model.as_path())];
    reads.extend(args.text.as_deref().map(|path| ("--text", path)));
    output::check_files(&reads, output::json_file(args.json.as_deref()).as_slice())?;
    let folder = locate(&args.model)?;
    let most = Config::read(&folder)?.most_tokens();
    // Needles are of that length whatever the text's.
    if args.tokens > most {
        return Err(Failure::usage(format!("--tokens is {}; the model was made for at most {most}", args.tokens)));
    }
    let names = args.policy.iter().flat_map(|Names(names)| names.clone());
    let asked = |name: String| {
        let policy = registry.policy(&name)?;
        let budget = budget(&policy, &name, args.budget.as_deref())?.filter(|_| !policy.keeps_all());
        Ok((policy, name, budget))
    };
    let policies = names.map(asked).collect::<Result<Vec<_>, Failure>>()?;
    args.check_policies(&Config::read(&folder)?, &policies)?;
    let text = Text::open(&folder)?;
    let content = match &args.text {
        Some(path) => read_text(path)?,
        None => {
            let essay = task("niah-single-2").expect("the task is built in");
            // Longer than what is read of it: its question and answer count in the length.
            generate("niah-single-2", &*essay, args.tokens + ESSAY_MORE, &Draw::new(1, 0), &text)?.context
        }
    };
    let mut tokens = text.tokens(&content)?;
    tokens.truncate(args.tokens);
    let cpu = args.compute.cpu()?;
    let arena = Arena::with_limit(args.compute.limit_bytes());
    let model = Model::open(&folder, &arena)?;
    let found = anatomy(&model, &tokens, &cpu, &arena)?;
    let needles = (args.tokens, args.needles);
    let copied = retrieval(&model, &text, needles, &cpu, &arena)?;
    let mut retained: Vec<Retained> = Vec::new();
    for (policy, name, budget) in &policies {
        let repeat = match policy.reconstruction {
            Some(_) => Some(Repeat::new(&folder, &text)?.with_gradients(sensitivity)),
            None => None,
        };
        let eviction = Eviction { policy, name, budget: *budget, seed: 0, repeat: repeat.as_ref() };
        let of_heads = needles_retained(&model, &text, needles, eviction, &cpu, &arena)?;
        retained.push((budget.map_or(name.clone(), |budget| format!("{name}@{budget}")), of_heads));
    }
    let name = args.model.file_name().unwrap_or(args.model.as_os_str()).to_string_lossy();
    report::anatomy::write(&args.output, name.trim_end_matches(".gguf"), &found, &copied, &retained)?;
    let report = summed_up(args, &found, &copied, &retained);
    match &args.json {
        Some(target) => output::json(target, &report),
        None => output::print(&words(args, &report)),
    }
}

impl Args {
    /// Refuses what would show nothing, and warns of what shows little, before anything is read.
    fn check_policies(&self, config: &Config, policies: &[(Policy, String, Option<Budget>)]) -> Result<(), Failure> {
        if let (Some(budget), true) = (&self.budget, policies.iter().all(|(policy, ..)| policy.keeps_all())) {
            return Err(Failure::usage(format!(
                "--budget is {budget}; nothing is evicted by these policies; leave it out"
            )));
        }
        for (policy, name, budget) in policies {
            if policy.selection.is_some() {
                return Err(Failure::usage(format!(
                    "policy '{name}' evicts nothing: it selects what a step reads; name one that evicts"
                )));
            }
            let eviction = Eviction { policy, name, budget: *budget, seed: 0, repeat: None };
            eviction.check(config).map_err(ModelError::from)?;
            let warnings = eviction.warnings(config, self.tokens, KvFormat::plain(DType::F32));
            let of_policy: Vec<String> = warnings.iter().map(|warning| format!("{name}: {warning}")).collect();
            output::warn(&of_policy);
        }
        Ok(())
    }
}

fn summed_up(args: &Args, found: &Anatomy, copied: &Retrieval, retained: &[Retained]) -> Report {
    let heads: Vec<_> = found.heads.iter().flatten().collect();
    let kv_heads: Vec<_> = found.kv_heads.iter().flatten().collect();
    let fraction = |count: usize| count as f64 / heads.len() as f64;
    let median = |values: Vec<f64>| quantile(&values, 0.5);
    let best = copied.heads();
    let group = found.heads[0].len() / found.kv_heads[0].len();
    let kept = |(policy, retained): &Retained| {
        let mean = |least: f64| {
            let heads = best.iter().filter(|(_, score)| *score >= least);
            let of_heads: Vec<f64> = heads.map(|([layer, head], _)| retained[*layer][head / group]).collect();
            (!of_heads.is_empty()).then(|| of_heads.iter().sum::<f64>() / of_heads.len() as f64)
        };
        let of_all_heads = mean(0.0).expect("a model has heads");
        Kept { policy: policy.clone(), of_all_heads, of_copying_heads: mean(COPIES) }
    };
    Report {
        needles_retained: retained.iter().map(kept).collect(),
        model: args.model.clone(),
        tokens: found.tokens,
        needles: args.needles,
        layers: found.heads.len(),
        q_heads: found.heads[0].len(),
        sink_heads: fraction(heads.iter().filter(|head| head.first_mass > SINK).count()),
        local_heads: fraction(heads.iter().filter(|head| head.last_mass > LOCAL).count()),
        retrieval_heads: fraction(best.iter().filter(|(_, score)| *score >= COPIES).count()),
        median_tokens_for_mass: median(heads.iter().map(|head| head.tokens_for_mass).collect()),
        median_first_key_norm: median(kv_heads.iter().map(|head| head.first_key_norm).collect()),
        median_first_value_norm: median(kv_heads.iter().map(|head| head.first_value_norm).collect()),
        copying: best.into_iter().take(NAMED).map(|([layer, head], score)| (layer, head, score)).collect(),
    }
}

fn words(args: &Args, report: &Report) -> String {
    let percent = |fraction: f64| format!("{:.0}%", 100.0 * fraction);
    let retained = |kept: &Kept| {
        let copying = kept.of_copying_heads.map(|fraction| format!(", {} where heads copy", percent(fraction)));
        let of_all = percent(kept.of_all_heads);
        format!("{} retains {of_all} of the needles' values{}\n", kept.policy, copying.unwrap_or_default())
    };
    let retained: String = report.needles_retained.iter().map(retained).collect();
    let copying = report.copying.iter().map(|(layer, head, score)| format!("{layer}.{head} ({})", percent(*score)));
    format!(
        "{} layers of {} heads over {} tokens: {} of the heads have more than {} of their attention on the first {FIRST} tokens, {} \
         more than {} on the latest {LAST}\n\
         half of the heads need at most {:.0} tokens for {} of their attention\n\
         {} of the heads copy at least {} of a needle's tokens; most: {}\n\
         norms of the first {FIRST} tokens over the median's: keys {:.2}, values {:.2}\n\
         {retained}{} and anatomy.csv\n",
        report.layers,
        report.q_heads,
        report.tokens,
        percent(report.sink_heads),
        percent(SINK),
        percent(report.local_heads),
        percent(LOCAL),
        report.median_tokens_for_mass,
        percent(MASS),
        percent(report.retrieval_heads),
        percent(COPIES),
        copying.collect::<Vec<_>>().join(", "),
        report.median_first_key_norm,
        report.median_first_value_norm,
        args.output.join("anatomy.svg").display(),
    )
}
