//! `kvsieve train --method`: gates that evict or that foretell scores, adapters, or all of a model that is there.

use super::super::failure::Failure;
use super::super::{command_line, output};
use super::Args;
use crate::device::Cpu;
use crate::editing::Rate;
use crate::experiment::environment;
use crate::policy::DecidedBy;
use crate::policy::allocation::Near;
use crate::report::training;
use crate::stats::wilson;
use crate::tensor::DType;
use crate::train::Recompute;
use crate::train::dms::{self, Settings};
use crate::train::duo;
use crate::train::fine_tuned::FineTuned;
use crate::train::kvzap;
use crate::train::larimar::{self, Found};
use crate::train::log::Line;
use crate::train::lora::Asked as Adapters;
use crate::train::optimizer::Kind;
use crate::train::run::{Options, RECORD};
use crate::train::tune::{self, Method};
use crate::units;
use indicatif::{ProgressBar, ProgressStyle};
use std::path::PathBuf;

/// Episodes of facts that `--method larimar` asks at the end.
const EPISODES: usize = 8;

/// In place of a text: what the model writes.
const BY_MODEL: &str = "model";

/// What every `--method` is asked.
#[derive(clap::Args)]
#[command(next_help_heading = "Training on a loaded model")]
pub(super) struct Loaded {
    /// What is trained in place of a recipe's model: gates that evict (dms), accumulate (dmc), foretell scores (kvzap) or tell which heads retrieve (duo), a memory of facts's maps (larimar),
    /// adapters (lora; qlora beside packed matrices) or all parameters (full)
    #[arg(long, value_name = "NAME", value_parser = ["dms", "dmc", "kvzap", "duo", "larimar", "lora", "qlora", "full"], requires = "model")]
    method: Option<String>,
    /// Model to train on: a folder, a GGUF file, or builtin
    #[arg(long, value_name = "DIR|FILE.gguf", requires = "method")]
    model: Option<PathBuf>,
    /// Text to learn from; model: what the model writes itself, for dms and dmc [default: for these generated text and tasks, for duo needles in
    /// generated sentences]
    #[arg(long, value_name = "FILE|model", requires = "method")]
    text: Option<PathBuf>,
    /// Tokens of a sequence [default: 1024; larimar: its longest question]
    #[arg(long, value_name = "N", requires = "method")]
    length: Option<usize>,
    /// Sequences that go through the model together [default: 1; larimar: 32]
    #[arg(long, value_name = "N", requires = "method")]
    batch: Option<usize>,
    /// First number of everything random
    #[arg(long, value_name = "N", default_value_t = 0, requires = "method")]
    seed: u64,
    /// Largest learning rate [default: 0.0001; larimar and duo: 0.02]
    #[arg(long, value_name = "X", requires = "method")]
    learning_rate: Option<f32>,
    /// Type in which matrices are multiplied and, but for qlora, kept: f32, or bf16, which takes half the memory and less time
    /// [default: bf16 for lora and qlora, else f32]
    #[arg(long, value_name = "TYPE", value_parser = weights, requires = "method")]
    weights: Option<DType>,
}

/// What is asked of `--method dms`, `dmc`, `duo` and `kvzap`.
#[derive(clap::Args)]
#[command(next_help_heading = "Gates")]
pub(super) struct Gates {
    /// Tokens for each that stays, behind the window; of several, as 2,4,8, each is reached in turn and leaves its gates [default: 4]
    #[arg(long, value_name = "R", value_delimiter = ',', requires = "method")]
    ratio: Vec<f64>,
    /// Recent tokens that are not evicted yet [default: 256; dmc: always 1]
    #[arg(long, value_name = "N", requires = "method")]
    window: Option<usize>,
    /// First tokens that a head of duo reads besides when its gate is 0 [default: 128]
    #[arg(long, value_name = "N", requires = "method")]
    sink: Option<usize>,
    /// Weight of the term of the loss that asks for eviction [default: 1; duo: 0.05]
    #[arg(long, value_name = "X", requires = "method")]
    pressure: Option<f64>,
    /// Elements of an inner layer, with GELU, of the functions of dms and kvzap [default: none: they are linear]
    #[arg(long, value_name = "N", requires = "method")]
    inner: Option<usize>,
    /// Whose hidden state decides on a token: its own, or that of the token behind it, as in NVIDIA's DMS [default: itself; dmc: always next]
    #[arg(long, value_name = "TOKEN", value_parser = ["itself", "next"], requires = "method")]
    decided_by: Option<String>,
}

/// What is asked of `--method lora`, `qlora` and `full`, and of adapters beside the gates of `dms` and `dmc`.
#[derive(clap::Args)]
#[command(next_help_heading = "Fine-tuning")]
pub(super) struct Tuning {
    /// Rank of adapters; dms and dmc train them beside their gates if --rank, --alpha or --target is given [default: 8]
    #[arg(long, value_name = "R", requires = "method")]
    rank: Option<usize>,
    /// Adapters' outputs have the factor alpha / rank; a larger one lets each step change the model more [default: 16; dms, dmc: 2]
    #[arg(long, value_name = "X", requires = "method")]
    alpha: Option<f32>,
    /// Matrices of each block that get an adapter, as q,v or q_proj, or all-linear [default: q,v]
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires = "method")]
    target: Vec<String>,
    /// Batches whose gradients are added up for a step [default: 1]
    #[arg(long, value_name = "N", requires = "method")]
    accumulate: Option<usize>,
    /// What the backward pass computes again: none, selective or full [default: as little as there is memory for]
    #[arg(long, value_name = "MODE", value_parser = recompute, requires = "method")]
    recompute: Option<Recompute>,
    /// adamw, adamw-8bit or adafactor [default: adamw]
    #[arg(long, value_name = "NAME", requires = "method")]
    optimizer: Option<Kind>,
    /// With --method full, train for a file that quantize will write, q4_k_m, q4_0 and others, or for matrices in any format of
    /// `kvsieve list formats` (quantisation-aware training)
    #[arg(long, value_name = "FORMAT", requires = "method")]
    qat: Option<String>,
}

/// What `--weights` says.
fn weights(text: &str) -> Result<DType, String> {
    match text.parse() {
        Ok(dtype @ (DType::F32 | DType::Bf16)) => Ok(dtype),
        _ => Err(format!("'{text}' is neither f32 nor bf16")),
    }
}

/// What `--recompute` says.
fn recompute(text: &str) -> Result<Recompute, String> {
    let found = Recompute::ALL.into_iter().find(|mode| mode.name() == text);
    found.ok_or_else(|| format!("'{text}' is neither none nor selective nor full"))
}

/// What `--method` asks for.
pub(super) enum OnLoaded {
    Gates(Settings),
    Surrogate(kvzap::Settings),
    Heads(duo::Settings),
    Maps(larimar::Settings),
    Tuning(tune::Settings),
}

impl Args {
    /// What is trained on a loaded model, if that is asked for.
    pub(super) fn on_loaded(&self) -> Result<Option<OnLoaded>, Failure> {
        let seed = self.loaded.seed;
        let (length, batch) = (self.loaded.length.unwrap_or(1024), self.loaded.batch.unwrap_or(1));
        let learning_rate = self.loaded.learning_rate.unwrap_or(1e-4);
        let (Some(name), Some(model)) = (&self.loaded.method, self.loaded.model.clone()) else { return Ok(None) };
        let (mut text, steps) = (self.loaded.text.clone(), self.steps.unwrap_or(500));
        let written = text.take_if(|text| text.as_os_str() == BY_MODEL).is_some();
        if written && !["dms", "dmc"].contains(&name.as_str()) {
            return Err(Failure::usage(format!(
                "--text {BY_MODEL} is for --method dms and dmc; {name} learns from a file"
            )));
        }
        let needed = |text: Option<PathBuf>| {
            text.ok_or_else(|| Failure::usage(format!("--method {name} learns from a text; give --text FILE")))
        };
        let method = match name.as_str() {
            "kvzap" => {
                let given = [
                    ("--batch", self.loaded.batch.is_some(), false),
                    ("--learning-rate", self.loaded.learning_rate.is_some(), false),
                ];
                let of_others = self.gates.given().into_iter().filter(|given| given.0 != "--inner").collect::<Vec<_>>();
                self.refuse(name, &[&given[..], &of_others, &self.tuning.given()].concat())?;
                let (text, dtype) = (needed(text)?, self.loaded.weights.unwrap_or(DType::F32));
                let (steps, inner) = (self.steps.unwrap_or(100), self.gates.inner);
                let settings = kvzap::Settings { model, text, steps, length, seed, dtype, inner };
                return Ok(Some(OnLoaded::Surrogate(settings)));
            }
            "duo" => {
                let of_dms = |given: &(&str, bool, bool)| ["--ratio", "--decided-by", "--inner"].contains(&given.0);
                let given: Vec<_> = self.gates.given().into_iter().filter(of_dms).collect();
                self.refuse(name, &[&given[..], &self.tuning.given()].concat())?;
                return Ok(Some(OnLoaded::Heads(duo::Settings {
                    model,
                    near: Near { sink: self.gates.sink.unwrap_or(128), recent: self.gates.window.unwrap_or(256) },
                    text,
                    steps: self.steps.unwrap_or(200),
                    length,
                    batch,
                    seed,
                    learning_rate: self.loaded.learning_rate.unwrap_or(0.02),
                    pressure: self.gates.pressure.unwrap_or(0.05),
                    weights: self.loaded.weights.unwrap_or(DType::F32),
                })));
            }
            "larimar" => {
                let given = [("--text", text.is_some(), false), ("--length", self.loaded.length.is_some(), false)];
                self.refuse(name, &[&given[..], &self.gates.given(), &self.tuning.given()].concat())?;
                return Ok(Some(OnLoaded::Maps(larimar::Settings {
                    model,
                    steps: self.steps.unwrap_or(300),
                    batch: self.loaded.batch.unwrap_or(32),
                    seed,
                    learning_rate: self.loaded.learning_rate.unwrap_or(0.02),
                    weights: self.loaded.weights.unwrap_or(DType::F32),
                    episodes: EPISODES,
                })));
            }
            "lora" => Method::Lora,
            "qlora" => Method::Qlora,
            "full" => Method::Full,
            gates => {
                let accumulates = gates == "dmc";
                let Gates { window, pressure, sink, inner, .. } = self.gates;
                let (of_adapters, others): (Vec<_>, Vec<_>) =
                    self.tuning.given().into_iter().partition(|given| given.2);
                let of_gates = [
                    ("--sink", sink.is_some(), false),
                    ("--inner", accumulates && inner.is_some(), false),
                    ("--window", accumulates && window.is_some(), false),
                    ("--decided-by", accumulates && self.gates.decided_by.is_some(), false),
                ];
                self.refuse(name, &[&of_gates[..], &others].concat())?;
                let adapters = of_adapters.iter().any(|(_, given, _)| *given).then(|| self.tuning.adapters(2.0));
                let ratios = if self.gates.ratio.is_empty() { vec![4.0] } else { self.gates.ratio.clone() };
                let decided_by = self.gates.decided_by.as_deref().and_then(DecidedBy::named).unwrap_or_default();
                let (window, decided_by) =
                    if accumulates { (1, DecidedBy::Next) } else { (window.unwrap_or(256), decided_by) };
                let pressure = pressure.unwrap_or(1.0);
                let weights = self.loaded.weights.unwrap_or(DType::F32);
                let settings = Settings {
                    model,
                    ratios,
                    window,
                    text,
                    written,
                    steps,
                    length,
                    batch,
                    seed,
                    learning_rate,
                    pressure,
                    decided_by,
                    accumulates,
                    inner,
                    adapters,
                    weights,
                };
                return Ok(Some(OnLoaded::Gates(settings)));
            }
        };
        let Tuning { accumulate, recompute, optimizer, .. } = self.tuning;
        self.refuse(name, &self.gates.given())?;
        let text = needed(text)?;
        let mut adapters = None;
        if method == Method::Full {
            self.refuse(name, &self.tuning.given().into_iter().filter(|given| given.2).collect::<Vec<_>>())?;
        } else {
            self.refuse(name, &[("--qat", self.tuning.qat.is_some(), false)])?;
            adapters = Some(self.tuning.adapters(16.0));
        }
        let default = if method == Method::Full { DType::F32 } else { DType::Bf16 };
        Ok(Some(OnLoaded::Tuning(tune::Settings {
            method,
            model,
            text,
            steps,
            length,
            batch,
            accumulate: accumulate.unwrap_or(1),
            seed,
            learning_rate,
            weights: self.loaded.weights.unwrap_or(default),
            recompute,
            optimizer: optimizer.unwrap_or(Kind::Adamw),
            adapters,
            qat: self.tuning.qat.clone(),
        })))
    }

    /// Refuses what was given of options that a method does not read.
    fn refuse(&self, method: &str, given: &[(&str, bool, bool)]) -> Result<(), Failure> {
        match given.iter().find(|(_, given, _)| *given) {
            Some((option, ..)) => {
                Err(Failure::usage(format!("{option} is nothing to --method {method}; leave it out")))
            }
            None => Ok(()),
        }
    }
}

impl OnLoaded {
    /// Trains.
    pub(super) fn run(&self, args: &Args) -> Result<(), Failure> {
        match self {
            OnLoaded::Gates(settings) => run_gates(args, settings),
            OnLoaded::Surrogate(settings) => run_surrogate(args, settings),
            OnLoaded::Heads(settings) => run_heads(args, settings),
            OnLoaded::Maps(settings) => run_maps(args, settings),
            OnLoaded::Tuning(settings) => run_tuning(args, settings),
        }
    }
}

impl Gates {
    /// Options, whether each was given, and whether it is of adapters.
    fn given(&self) -> [(&'static str, bool, bool); 6] {
        [
            ("--ratio", !self.ratio.is_empty(), false),
            ("--window", self.window.is_some(), false),
            ("--sink", self.sink.is_some(), false),
            ("--pressure", self.pressure.is_some(), false),
            ("--inner", self.inner.is_some(), false),
            ("--decided-by", self.decided_by.is_some(), false),
        ]
    }
}

impl Tuning {
    /// The adapters that are asked for, with this alpha unless another is.
    fn adapters(&self, usual: f32) -> Adapters {
        let Tuning { rank, alpha, target, .. } = self;
        let targets = if target.is_empty() { vec!["q".into(), "v".into()] } else { target.clone() };
        Adapters { rank: rank.unwrap_or(8), alpha: alpha.unwrap_or(usual), targets }
    }

    /// Likewise.
    fn given(&self) -> [(&'static str, bool, bool); 7] {
        [
            ("--rank", self.rank.is_some(), true),
            ("--alpha", self.alpha.is_some(), true),
            ("--target", !self.target.is_empty(), true),
            ("--accumulate", self.accumulate.is_some(), false),
            ("--recompute", self.recompute.is_some(), false),
            ("--optimizer", self.optimizer.is_some(), false),
            ("--qat", self.qat.is_some(), false),
        ]
    }
}

/// Where `--method` trains, and a bar of its steps.
fn options(args: &Args, cpu: &Cpu, steps: usize) -> Result<(Options, ProgressBar), Failure> {
    let options = Options {
        out: args.out.clone(),
        resume: args.resume,
        stop_after: None,
        limit_bytes: args.compute.limit_bytes(),
        environment: environment::probe(cpu.into(), &command_line()?),
    };
    let bar = ProgressBar::new(steps as u64);
    let style = "{elapsed_precise} [{bar:30}] {pos}/{len} steps, {eta} left  {wide_msg}";
    bar.set_style(ProgressStyle::with_template(style).expect("the template is right").progress_chars("=> "));
    Ok((options, bar))
}

/// `--method lora`, `qlora` and `full`.
fn run_tuning(args: &Args, settings: &tune::Settings) -> Result<(), Failure> {
    let cpu = args.compute.cpu()?;
    let (options, bar) = options(args, &cpu, settings.steps)?;
    let mut drawn = Ok(());
    let of_folder = tune::run(settings, &cpu, &options, &mut |line| match line {
        Line::Step { step, loss, tokens_per_second, .. } => {
            bar.set_position(*step as u64);
            bar.set_message(format!("loss {loss:.3}  {tokens_per_second:.0} tokens/s"));
        }
        Line::HeldOut { .. } if drawn.is_ok() => drawn = training::draw(&args.out).map(|_| ()),
        _ => (),
    })?;
    bar.finish_and_clear();
    drawn?;
    let figures = training::draw(&args.out)?;
    let of_folder = of_folder.map_or(String::new(), |loss| {
        format!("as the folder has it, rounded: {loss:.4} nats a token (perplexity {:.3})\n", loss.exp())
    });
    output::print(&format!(
        "{}{of_folder}model: {}\nrecord: {}\n",
        figures.summary,
        args.out.display(),
        args.out.join(RECORD).display()
    ))
}

/// `--method kvzap`.
fn run_surrogate(args: &Args, settings: &kvzap::Settings) -> Result<(), Failure> {
    let cpu = args.compute.cpu()?;
    let (options, bar) = options(args, &cpu, settings.steps)?;
    let mut found = None;
    kvzap::run(settings, &cpu, &options, &mut |line| match line {
        Line::Repeated { step, .. } => bar.set_position(*step as u64),
        Line::Fitted { held_out, .. } => {
            bar.set_message(format!("explains {:.1}% of held-out scores", 100.0 * held_out));
            found = Some(*held_out);
        }
        _ => (),
    })?;
    bar.finish_and_clear();
    training::draw(&args.out)?;
    let summary = found.map_or(String::new(), |held_out| {
        format!("explains {:.1}% of the variance of held-out scores\n", 100.0 * held_out)
    });
    let (policy, record) = (args.out.join(kvzap::POLICY), args.out.join(RECORD));
    output::print(&format!("{summary}gates: {}\nrecord: {}\n", policy.display(), record.display()))
}

/// `--method duo`.
fn run_heads(args: &Args, settings: &duo::Settings) -> Result<(), Failure> {
    let cpu = args.compute.cpu()?;
    let (options, bar) = options(args, &cpu, settings.steps)?;
    let mut drawn = Ok(());
    duo::run(settings, &cpu, &options, &mut |line| match line {
        Line::Heads { step, distance, low, heads, tokens_per_second, .. } => {
            bar.set_position(*step as u64);
            bar.set_message(format!(
                "off by {distance:.4}  {low} of {heads} gates below 0.5  {tokens_per_second:.0} tokens/s"
            ));
        }
        Line::HeldOutHeads { .. } if drawn.is_ok() => drawn = training::draw(&args.out).map(|_| ()),
        _ => (),
    })?;
    bar.finish_and_clear();
    drawn?;
    let figures = training::draw(&args.out)?;
    let (policy, record) = (args.out.join(duo::POLICY), args.out.join(RECORD));
    output::print(&format!("{}gates: {}\nrecord: {}\n", figures.summary, policy.display(), record.display()))
}

/// `--method larimar`.
fn run_maps(args: &Args, settings: &larimar::Settings) -> Result<(), Failure> {
    let cpu = args.compute.cpu()?;
    let (options, bar) = options(args, &cpu, settings.steps)?;
    let found = larimar::run(settings, &cpu, &options, &mut |line| {
        if let Line::Step { step, loss, tokens_per_second, .. } = line {
            bar.set_position(*step as u64);
            bar.set_message(format!("loss {loss:.3}  {tokens_per_second:.0} tokens/s"));
        }
    })?;
    bar.finish_and_clear();
    training::draw(&args.out)?;
    let (maps, record) = (args.out.join(larimar::MAPS), args.out.join(RECORD));
    let rates = found.map_or(String::new(), |(found, tuned)| rates(&found) + &beside(&found, &tuned));
    output::print(&format!("{rates}maps: {}\nrecord: {}\n", maps.display(), record.display()))
}

/// What an edited model answers, a line each, with 95% intervals by Wilson.
fn rates(found: &Found) -> String {
    let line = |name: &str, rate: &Rate| {
        let (low, high) = wilson(rate.share(), rate.asked);
        let [share, low, high] = [rate.share(), low, high].map(|share| 100.0 * share);
        format!("{name:<52} {share:5.1}%  [{low:.1}, {high:.1}] of {}\n", rate.asked)
    };
    let mut text = String::new();
    for answered in &found.memory {
        text += &line(&format!("facts behind {} edits, by their stem", answered.facts), &answered.stem);
    }
    for answered in &found.memory {
        text += &line(&format!("in words that no training has, {}", answered.facts), &answered.rephrased);
    }
    text += &line("single facts with values that no training has", &found.new_values.stem);
    let beside = found.memory.iter().find(|answered| answered.facts == found.context.facts);
    if let Some(memory) = beside {
        let of = |name: &str| format!("of {}: {name}", memory.facts);
        text += &[
            ("replaced facts, by the new value", &memory.replaced),
            ("  by the old one", &memory.replaced_old),
            ("forgotten facts, by what they were", &memory.forgotten),
            ("  those that stayed", &memory.remembered),
            ("facts that were never written", &memory.never_written),
            ("other questions and texts, unchanged", &memory.unchanged),
            ("  without a scope detector", &memory.unchanged_unscoped),
            ("all in the context", &found.context.stem),
            ("  in words that no training has", &found.context.rephrased),
        ]
        .map(|(name, rate)| line(&of(name), rate))
        .concat();
        let [context, memory] = [found.context.held_bytes, memory.held_bytes].map(units::bytes);
        text += &format!("{} facts take {context} in the context, {memory} in the memory\n", found.context.facts);
    }
    for (count, answered) in &found.retrieved {
        text += &line(&format!("the {count} nearest of {} in the context", answered.facts), &answered.stem);
    }
    text
}

/// An edit beside fine-tuning.
fn beside(found: &Found, tuned: &FineTuned) -> String {
    let FineTuned { facts, learned, steps, seconds } = *tuned;
    let edit = found.seconds_per_edit();
    let times = seconds / edit;
    format!(
        "an edit takes {:.1} ms; LoRA {:.1} ms for a fact, {steps} steps ({learned} of {facts} learned): {times:.1} times as long\n",
        1e3 * edit,
        1e3 * seconds
    )
}

/// `--method dms` and `dmc`.
fn run_gates(args: &Args, settings: &Settings) -> Result<(), Failure> {
    let cpu = args.compute.cpu()?;
    let (options, bar) = options(args, &cpu, settings.steps)?;
    let mut drawn = Ok(());
    dms::run(settings, &cpu, &options, &mut |line| match line {
        Line::Gates { step, kl, evicted, target, tokens_per_second, .. } => {
            bar.set_position(*step as u64);
            let (evicted, target) = (100.0 * evicted, 100.0 * target);
            bar.set_message(format!(
                "KL {kl:.4}  {evicted:.1}% of {target:.1}% evicted  {tokens_per_second:.0} tokens/s"
            ));
        }
        Line::HeldOutGates { .. } if drawn.is_ok() => drawn = training::draw(&args.out).map(|_| ()),
        _ => (),
    })?;
    bar.finish_and_clear();
    drawn?;
    let figures = training::draw(&args.out)?;
    let (policy, record) = (args.out.join(dms::POLICY), args.out.join(RECORD));
    output::print(&format!("{}gates: {}\nrecord: {}\n", figures.summary, policy.display(), record.display()))
}
