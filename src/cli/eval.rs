//! `kvsieve eval`: a model's answers under eviction policies. The options are written as an experiment, which runs as
//! any other. Perplexities in windows, which evict nothing, are none (`windows.rs`).

mod windows;

use super::failure::Failure;
use super::names::{Names, named};
use super::run::Way;
use super::{Compute, command_line};
use crate::eval::{Protocol, Windows};
use crate::experiment::axes::{BudgetText, Many};
use crate::experiment::measure::Measure;
use crate::experiment::policy_axis::PolicyText;
use crate::experiment::spec::{Grid, Spec};
use crate::experiment::weights::WeightsText;
use crate::format::{KvFormat, RowFormat};
use crate::model::BUILTIN;
use crate::policy::Registry;
use crate::tensor::DType;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error as ValueError, StrDeserializer};
use std::path::PathBuf;
use std::str::FromStr;

const EXAMPLES: &str = "\
Every sample is a context and questions about it. --protocol says what a policy has seen of a question when it evicts: \
nothing (agnostic), the question, whose tokens it may evict (aware) or not (aware-kept), or the whole prompt (aware-whole). \
The model then answers greedily, and the right answer is fed token by token to compare distributions \
with the full cache. The first samples of each cell also run alone, for times and memory. Evaluations run on the CPU only. \
Results go to OUT/eval/<time>-<hash>-<revision>/, but for the perplexities of wikitext and llama-perplexity, which are printed. docs/evaluation.md says what each number is.\n\n\
Examples:
  kvsieve eval                   the built-in model (models/builtin), 5 policies, 4 budgets, 4 tasks
  kvsieve eval --model DIR       your model: 2 policies, half the cache, 2 tasks; a few minutes for a small one
  kvsieve eval --model DIR --context 4k --dry-run      the cells, and how long they would take
  kvsieve eval --model DIR --task niah-multikey-1,vt --context 4k,8k \\
      --policy full,snapkv,h2o --budget 0.25,512
  kvsieve eval --model DIR --text novel.txt --evict-after 2k --new-tokens 256 \\
      --policy full,keydiff --budget 0.5
  kvsieve eval --model DIR --text novel.txt --evict-after 2k --memory camelot:slots=512,window=128 \\
      --policy full,streaming-llm --budget 512
  kvsieve eval --model FILE.gguf --text wiki.test.raw --protocol wikitext,llama-perplexity
  kvsieve list tasks             what there is to ask";

/// What is asked where nothing is said: of the built-in model a whole table, of a user's what is over in minutes.
struct Defaults {
    tasks: &'static [&'static str],
    policies: &'static [&'static str],
    budgets: &'static [&'static str],
    samples: Option<usize>,
}
const OF_BUILTIN: Defaults = Defaults {
    tasks: &["recall", "niah-single-1", "niah-multikey-1", "passkey"],
    policies: &["full", "streaming-llm", "h2o", "snapkv", "ada-snapkv", "keydiff"],
    budgets: &["0.5", "0.25", "0.125", "0.0625"],
    samples: None,
};
const OF_YOURS: Defaults = Defaults {
    tasks: &["niah-single-1", "passkey"],
    policies: &["full", "snapkv", "keydiff"],
    budgets: &["0.5"],
    samples: Some(10),
};

/// What a model answers under eviction policies and budgets
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Hugging Face folders, GGUF files, or 'builtin'
    #[arg(long, value_name = "DIR", value_delimiter = ',', default_value = "builtin")]
    model: Vec<String>,
    /// Tasks (see `kvsieve list tasks`) [default: niah-single-1,passkey; of the built-in model also recall and
    /// niah-multikey-1]
    #[arg(long, value_name = "TASK", value_parser = named)]
    task: Vec<Names>,
    /// Eviction policies (see `kvsieve list policies`); random is added to every comparison [default:
    /// full,snapkv,keydiff; of the built-in model also streaming-llm, h2o and ada-snapkv]
    #[arg(long, value_name = "POLICY", value_parser = named)]
    policy: Vec<Names>,
    /// Memories in place of the cache (see `kvsieve list memories`); policies are then only those that are named, and
    /// without any the full cache
    #[arg(long, value_name = "MEMORY", value_parser = named, conflicts_with = "kv_format")]
    memory: Vec<Names>,
    /// Safetensors file that the policies may read tensors of [default: none]
    #[arg(long, value_name = "FILE")]
    policy_file: Option<PathBuf>,
    /// What may stay: fractions (0.25), tokens per KV head (512) or bytes of all layers (64MiB) [default: 0.5; of
    /// the built-in model also 0.25, 0.125 and 0.0625]
    #[arg(long, value_name = "BUDGET", value_delimiter = ',')]
    budget: Vec<String>,
    /// Lengths of context, question and answer together, in tokens of the model [default: 1k]
    #[arg(long, value_name = "N", value_delimiter = ',', conflicts_with = "evict_after")]
    context: Vec<String>,
    /// Samples of each task, or pieces or windows of the text at most [default: 10; of the built-in model, and pieces of a
    /// text, 20; all windows]
    #[arg(long, value_name = "N")]
    samples: Option<usize>,
    /// How many of them each policy also runs alone, for its times and memory [default: 3; 1 where more than 8 are compared]
    #[arg(long, value_name = "N")]
    alone_samples: Option<usize>,
    /// What is scored and evicted together: agnostic, aware, aware-kept or aware-whole; or, with --text and nothing evicted,
    /// perplexity in windows: wikitext (2048 tokens) or llama-perplexity (512, second half) [default: agnostic]
    #[arg(long, value_name = "PROTOCOL", value_delimiter = ',')]
    protocol: Vec<Named>,
    /// Write context and question as the model's own chat template has what a user says
    #[arg(long)]
    chat: bool,
    /// Instead of tasks: a text, cut into pieces, whose tokens behind the eviction are fed as they are
    #[arg(long, value_name = "FILE", conflicts_with_all = ["task", "chat"])]
    text: Option<PathBuf>,
    /// Tokens of a piece of the text before the eviction [default: 1k]
    #[arg(long, value_name = "N", requires = "text")]
    evict_after: Option<String>,
    /// Most tokens of an answer, or tokens of a piece of the text behind the eviction [default: twice the right answer's and
    /// 8; 128 of a text]
    #[arg(long, value_name = "N")]
    new_tokens: Option<usize>,
    /// Kernels of attention where several tokens go through together (see `kvsieve list kernels`) [default: tiled]
    #[arg(long, value_name = "KERNEL", value_parser = named)]
    kernel: Vec<Names>,
    /// Element type of the pass, and of keys and values in the cache: f32, bf16 or f16 [default: that of the weights]
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<DType>,
    /// How the cache keeps keys and values: a format, or k=FORMAT,v=FORMAT (see `kvsieve list formats`) [default: as --dtype]
    #[arg(long, value_name = "FORMAT")]
    kv_format: Vec<KvFormat>,
    /// How weight matrices are kept: formats (see `kvsieve list formats`), paths of files of the same model, as quantize writes
    /// them, or file for the model's own, with which all others are compared [default: file]
    #[arg(long, value_name = "FORMAT|PATH", value_parser = named)]
    weights: Vec<Names>,
    /// What activations are rounded to before each linear layer: formats (see `kvsieve list formats`), int8 beside --weights int8
    /// being W8A8, or f32 for as they are [default: f32]
    #[arg(long, value_name = "FORMAT", value_parser = named)]
    activations: Vec<Names>,
    /// Run sequences that are longer than the model was made for
    #[arg(long)]
    beyond_limit: bool,
    /// Seed of the samples and of policies that draw numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Folder for results
    #[arg(long, value_name = "DIR", default_value = "results")]
    out: PathBuf,
    /// Go on with the latest run of the same options: only missing samples run
    #[arg(long)]
    resume: bool,
    /// List the cells with the time that each will take, and run nothing else than the samples that tell it
    #[arg(long, conflicts_with_all = ["resume", "json"])]
    dry_run: bool,
    #[command(flatten)]
    compute: Compute,
    /// Print each record as a line of JSON to standard output (-) instead of the leaderboard
    #[arg(long, value_name = "-", value_parser = ["-"], help_heading = "What is reported")]
    json: Option<String>,
}

/// A protocol by its name.
#[derive(Debug, Clone, Copy)]
enum Named {
    /// What a policy has seen of a question.
    Question(Protocol),
    /// Perplexity of a text.
    Windows(Windows),
}

impl FromStr for Named {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        text.parse().map(Named::Windows).or_else(|_| {
            let known = |error| format!("{error}; for --text {}", Windows::ALL.map(Windows::name).join(", "));
            text.parse().map(Named::Question).map_err(known)
        })
    }
}

pub fn run(args: &Args, registry: &Registry) -> Result<(), Failure> {
    args.compute.refuse_cuda()?;
    let command = command_line()?;
    let (mut windows, mut protocols) = (Vec::new(), Vec::new());
    for named in &args.protocol {
        match *named {
            Named::Windows(of_text) if windows.contains(&of_text) => {}
            Named::Windows(of_text) => windows.push(of_text),
            Named::Question(protocol) => protocols.push(protocol),
        }
    }
    match (&windows[..], &protocols[..]) {
        ([], _) => {}
        (windows, []) => return windows::run(args, windows),
        ([windows, ..], [protocol, ..]) => {
            let reason = format!("--protocol {windows} is about a text and {protocol} about questions; give one kind");
            return Err(Failure::usage(reason));
        }
    }
    let spec = args.spec(protocols)?;
    let way = Way {
        registry,
        out: &args.out,
        resume: args.resume,
        join: false,
        dry_run: args.dry_run,
        find_max_context: false,
        shard: None,
        compute: &args.compute,
        json: args.json.is_some(),
    };
    way.go(&[(spec, "eval".into(), command)]).map_err(|failure| failure.reworded(in_options))
}

/// What is wrong with the experiment that the options make, as somebody who typed options reads it.
fn in_options(message: &str) -> String {
    let words = [
        ("eval: grid 1 (eval): samples is ", "--samples is "),
        ("eval: grid 1 (eval): ", ""),
        ("write beyond_limit = true", "give --beyond-limit"),
        ("context_tokens", "--context"),
        ("alone_samples is ", "--alone-samples is "),
        ("new_tokens is ", "--new-tokens is "),
        ("protocol is ", "--protocol is "),
    ];
    words.iter().fold(message.to_string(), |text, (key, option)| text.replace(key, option))
}

impl Args {
    /// The names that were given, or those that are meant where none is.
    fn names(given: &[Names], default: &[&str]) -> Vec<String> {
        match given {
            [] => default.iter().map(|name| name.to_string()).collect(),
            given => given.iter().flat_map(|Names(names)| names.clone()).collect(),
        }
    }

    fn weights(&self) -> Result<Vec<WeightsText>, Failure> {
        parsed("--weights", &Args::names(&self.weights, &[]))
    }

    fn activations(&self) -> Result<Vec<RowFormat>, Failure> {
        parsed("--activations", &Args::names(&self.activations, &[]))
    }

    fn spec(&self, protocols: Vec<Protocol>) -> Result<Spec, Failure> {
        let names = Args::names;
        let default = if self.model == [BUILTIN] { OF_BUILTIN } else { OF_YOURS };
        let policies = names(&self.policy, if self.memory.is_empty() { default.policies } else { &["full"] });
        let keeps_all = |name: &String| Registry::default().policy(name).is_ok_and(|policy| policy.keeps_all());
        if !self.budget.is_empty() && policies.iter().all(keeps_all) {
            return Err(Failure::usage(format!(
                "--budget is {}; nothing is evicted by {}; leave it out, or name a policy that evicts",
                self.budget.join(","),
                policies.join(", ")
            )));
        }
        let budgets = match &self.budget[..] {
            [] => default.budgets.iter().map(|budget| budget.to_string()).collect(),
            given => given.to_vec(),
        };
        if let (Some(after), None) = (&self.evict_after, &self.text) {
            let reason = "is for the pieces of a text; give --text FILE, or --context for tasks";
            return Err(Failure::usage(format!("--evict-after {after} {reason}")));
        }
        let contexts = match (&self.evict_after, &self.context[..]) {
            (Some(after), _) => vec![after.clone()],
            (None, []) => vec!["1k".into()],
            (None, given) => given.to_vec(),
        };
        let context_option = if self.evict_after.is_some() { "--evict-after" } else { "--context" };
        let grid = Grid {
            model: Many(self.model.clone()),
            task: Many(if self.text.is_some() { Vec::new() } else { names(&self.task, default.tasks) }),
            text: self.text.clone(),
            samples: self.samples.or(default.samples.filter(|_| self.text.is_none())),
            alone_samples: self.alone_samples,
            protocol: Many(protocols),
            chat: self.chat,
            beyond_limit: self.beyond_limit,
            context_tokens: Many(parsed(context_option, &contexts)?),
            policy: Many(policies.into_iter().map(PolicyText).collect()),
            budget: Many(parsed::<BudgetText>("--budget", &budgets)?),
            memory: Many(names(&self.memory, &[])),
            policy_file: self.policy_file.clone(),
            new_tokens: self.new_tokens,
            kernel: Many(names(&self.kernel, &[])),
            dtype: Many(self.dtype.into_iter().collect()),
            kv_format: Many(self.kv_format.clone()),
            weights: Many(self.weights()?),
            activations: Many(self.activations()?),
            seed: Many(vec![self.seed]),
            ..Grid::of(Measure::EVAL)
        };
        let what = if self.text.is_some() { "goes on with a text" } else { "answers" };
        Ok(Spec {
            name: "eval".into(),
            description: format!("What a model {what} under eviction policies, beside its full cache."),
            limit_memory: None,
            timing: Default::default(),
            file: None,
            synthetic: None,
            grid: vec![grid],
        })
    }
}

/// Values of an axis as an experiment file has them.
fn parsed<'t, T: Deserialize<'t>>(option: &str, texts: &'t [String]) -> Result<Vec<T>, Failure> {
    let one = |text: &'t String| {
        let text: StrDeserializer<'t, ValueError> = text.as_str().into_deserializer();
        T::deserialize(text).map_err(|error| Failure::usage(format!("{option}: {error}")))
    };
    texts.iter().map(one).collect()
}
