//! `kvsieve plan train`: memory of training on cards that share it.

use super::scenario::{bytes_or_none, memory, subject, tokens};
use super::{Reported, text};
use crate::cli::failure::Failure;
use crate::cli::output;
use crate::planner::PlanError;
use crate::planner::presets::{near, weight_format};
use crate::planner::scenario::{DEFAULT_OVERHEAD, Memory};
use crate::planner::train::{Adapters, OPTIMIZERS, Offload, Optimizer, Recompute, Spent, Training};
use crate::report;
use crate::units::{counted, gb, gib, grouped};
use serde::Serialize;
use std::path::PathBuf;

/// A way of training.
#[derive(clap::Args)]
pub struct Args {
    /// Preset (see `kvsieve list models`), Hugging Face folder, config.json, GGUF file, or 'builtin'
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// Card (see `kvsieve list gpus`), bytes as 40536MiB, or 'here' for the device at hand
    #[arg(long, value_name = "GPU")]
    gpu: String,
    /// Tokens of a sequence
    #[arg(long, value_name = "N", default_value = "4k", value_parser = tokens)]
    context: u64,
    /// Sequences of a card at once
    #[arg(long, value_name = "N", default_value_t = 1)]
    micro_batch: u64,
    /// adamw-bf16 or adafactor (8 bytes a parameter), adamw-8bit (10), adamw-bf16-states, sgd (12), adamw (16), adamw-f32-gradients (18) or
    /// adamw-accumulated (20)
    #[arg(long, value_name = "NAME", default_value = "adamw")]
    optimizer: String,
    /// Train adapters of this rank on every matrix of all blocks, in f32, over weights that stay as they are (LoRA; QLoRA with
    /// --weights nf4 or another format of few bits)
    #[arg(long, value_name = "RANK")]
    adapters: Option<u64>,
    /// How the weights below adapters are kept (see `kvsieve list weights`)
    #[arg(long, value_name = "FORMAT", default_value = "bf16", requires = "adapters")]
    weights: String,
    /// Stage of ZeRO over the data-parallel cards; 3 is FSDP
    #[arg(long, value_name = "0-3", default_value_t = 0)]
    zero: u64,
    /// Cards that each see other sequences
    #[arg(long, value_name = "N", default_value_t = 1)]
    data_parallel: u64,
    /// Cards that share each layer
    #[arg(long, value_name = "N", default_value_t = 1)]
    tensor_parallel: u64,
    /// These cards share the sequence between their layers too
    #[arg(long)]
    sequence_parallel: bool,
    /// Cards that share the layers
    #[arg(long, value_name = "N", default_value_t = 1)]
    pipeline: u64,
    /// What is computed again in the backward pass: none, selective (attention) or full
    #[arg(long, value_name = "WHAT", default_value = "none", value_parser = recompute)]
    recompute: Recompute,
    /// naive keeps the scores for the backward pass, tiled does not
    #[arg(long, value_name = "KIND", default_value = "tiled", value_parser = keeps_scores)]
    attention: Keeps,
    /// What lies in the host's memory: none, optimizer or all
    #[arg(long, value_name = "WHAT", default_value = "none", value_parser = offload)]
    offload: Offload,
    /// Context and libraries of a card, as 0.5GB
    #[arg(long, value_name = "BYTES", value_parser = bytes_or_none, allow_hyphen_values = true)]
    overhead: Option<u64>,
    /// Folder to draw the stages of ZeRO into, as SVG and CSV, and on a page, report.html
    #[arg(long, value_name = "DIR", help_heading = "What is reported")]
    output: Option<PathBuf>,
    #[command(flatten)]
    report: Reported,
}

/// Whether scores are kept for the backward pass.
#[derive(Clone, Copy)]
struct Keeps(bool);

fn keeps_scores(text: &str) -> Result<Keeps, String> {
    match text {
        "naive" => Ok(Keeps(true)),
        "tiled" => Ok(Keeps(false)),
        _ => Err("it is naive or tiled".into()),
    }
}

fn recompute(text: &str) -> Result<Recompute, String> {
    match text {
        "none" => Ok(Recompute::None),
        "selective" => Ok(Recompute::Selective),
        "full" => Ok(Recompute::Full),
        _ => Err("it is none, selective or full".into()),
    }
}

fn offload(text: &str) -> Result<Offload, String> {
    match text {
        "none" => Ok(Offload::None),
        "optimizer" => Ok(Offload::Optimizer),
        "all" => Ok(Offload::All),
        _ => Err("it is none, optimizer or all".into()),
    }
}

fn optimizer(name: &str) -> Result<Optimizer, Failure> {
    let found = OPTIMIZERS.into_iter().find(|optimizer| optimizer.name == name);
    found.ok_or_else(|| {
        let near = near(name, OPTIMIZERS.iter().map(|optimizer| optimizer.name)).join(", ");
        PlanError::Unknown { kind: "optimizer", name: name.into(), near }.into()
    })
}

/// The answer as JSON.
#[derive(Serialize)]
struct Report<'a> {
    model: &'a str,
    parameters: u64,
    optimizer: Optimizer,
    #[serde(flatten)]
    spent: Spent,
    total_bytes: u64,
    available_bytes: u64,
    fits: bool,
    /// Seconds of a step that the link takes; `None` where nothing goes over it, or nothing is known of the card.
    link_s: Option<f64>,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    args.report.check(&[("--model", &args.model)])?;
    args.output.as_deref().map_or(Ok(()), |folder| output::check_folder("--output", folder))?;
    let strange = [
        (
            (1..=3).contains(&args.zero) && args.data_parallel == 1,
            "--zero shares things out over --data-parallel cards, which are 1",
        ),
        (
            args.sequence_parallel && args.tensor_parallel == 1,
            "--sequence-parallel shares the sequence out over --tensor-parallel cards, which are 1",
        ),
        (
            args.recompute == Recompute::Selective && !args.attention.0,
            "--recompute selective leaves out the scores that --attention naive keeps, and tiled keeps none; give full or none",
        ),
    ];
    if let Some((_, why)) = strange.iter().find(|(is, _)| *is) {
        return Err(Failure::usage((*why).into()));
    }
    let subject = subject(&args.model)?;
    let memory = memory(&args.gpu)?;
    let adapters = args.adapters.map(|rank| Ok::<_, Failure>(Adapters { rank, base: weight_format(&args.weights)? }));
    let training = Training {
        subject: &subject,
        optimizer: optimizer(&args.optimizer)?,
        adapters: adapters.transpose()?,
        zero: args.zero,
        data_parallel: args.data_parallel,
        tensor_parallel: args.tensor_parallel,
        sequence_parallel: args.sequence_parallel,
        pipeline: args.pipeline,
        micro_batch: args.micro_batch,
        context: args.context,
        recompute: args.recompute,
        keeps_scores: args.attention.0,
        offload: args.offload,
        overhead_bytes: args.overhead.unwrap_or(DEFAULT_OVERHEAD),
    };
    training.check()?;
    let spent = training.spent();
    let link = memory.gpu().filter(|_| spent.link_bytes > 0);
    let report = Report {
        model: &subject.name,
        parameters: subject.parameters,
        optimizer: training.updated(),
        spent,
        total_bytes: spent.total(),
        available_bytes: memory.bytes(),
        fits: spent.total() <= memory.bytes(),
        link_s: link.map(|gpu| spent.link_bytes as f64 / gpu.link_bytes_per_s()),
    };
    let mut said = words(&training, memory, &report);
    if let Some(folder) = &args.output {
        report::planner::write_training(folder, &training, memory, &said)?;
        said.push_str(&text::page(folder));
    }
    args.report.give(&report, || said)
}

fn words(training: &Training<'_>, memory: Memory, report: &Report<'_>) -> String {
    let cards = training.data_parallel * training.tensor_parallel * training.pipeline;
    let trained = match training.adapters {
        Some(Adapters { rank, base }) => {
            format!("adapters of rank {rank} over {}, {}", base.name, report.optimizer.name)
        }
        None => format!("{} ({} B a parameter)", report.optimizer.name, report.optimizer.bytes()),
    };
    let head = format!(
        "{}, {} parameters, {trained}, {} x {} tokens on each of {}, ZeRO {}, recomputing {}",
        report.model,
        grouped(u128::from(report.parameters)),
        training.micro_batch,
        grouped(u128::from(training.context)),
        counted(cards, "card"),
        training.zero,
        format!("{:?}", training.recompute).to_lowercase(),
    );
    let mut rows = vec![["of a card", "GiB", "GB"].map(String::from).to_vec()];
    let row = |name: &str, bytes: u64| vec![name.into(), gib(u128::from(bytes)), gb(u128::from(bytes))];
    rows.extend(report.spent.terms().iter().filter(|(_, bytes)| *bytes > 0).map(|&(name, bytes)| row(name, bytes)));
    rows.push(row("total", report.total_bytes));
    rows.push(row("available", memory.bytes()));
    if report.spent.host_bytes > 0 {
        rows.push(row("on the host", report.spent.host_bytes));
    }
    let (largest, bytes) = report.spent.terms().into_iter().max_by_key(|(_, bytes)| *bytes).unwrap_or_default();
    let verdict = match report.fits {
        true => format!("It fits, and {} GiB stay free.", gib(u128::from(memory.bytes() - report.total_bytes))),
        false => format!(
            "It does not fit: {} GiB are missing. The most is {largest}: {} GiB.",
            gib(u128::from(report.total_bytes - memory.bytes())),
            gib(u128::from(bytes))
        ),
    };
    let link = report.link_s.map_or(String::new(), |s| format!(" {s:.2} s of each step go over the link to the host."));
    format!(
        "{}\n{}\n{}",
        text::wrapped(&head, ""),
        text::table(&rows, 0),
        text::wrapped(&format!("{verdict}{link}"), "")
    )
}
