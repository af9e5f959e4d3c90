//! `kvsieve plan scale`: attention and training on many cards, and where communication takes longer than computing.

use super::scenario::{memory, subject, tokens};
use super::{Reported, text};
use crate::cli::failure::Failure;
use crate::planner::kv::KvStore;
use crate::planner::presets::{Gpu, network};
use crate::planner::scale::{OnRanks, Scale, Turns};
use crate::units::{bytes, grouped, nanoseconds};
use serde::Serialize;
use std::path::PathBuf;

/// A model on many cards.
#[derive(clap::Args)]
pub struct Args {
    /// Preset (see `kvsieve list models`), Hugging Face folder, config.json, GGUF file, or 'builtin'
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// Card (see `kvsieve list gpus`)
    #[arg(long, value_name = "GPU")]
    gpu: String,
    /// Cards that share a sequence, or that train together
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "8,64,512")]
    ranks: Vec<u64>,
    /// Tokens of the sequence
    #[arg(long, value_name = "N", default_value = "1m", value_parser = tokens)]
    context: u64,
    /// Between nodes: infiniband-hdr, infiniband-ndr, infiniband-xdr, ethernet-100g or ethernet-400g
    #[arg(long, value_name = "NAME", default_value = "infiniband-ndr")]
    network: String,
    /// Cards of a node
    #[arg(long, value_name = "N", default_value_t = 8)]
    per_node: u64,
    /// How keys and values are kept and sent: a format (see `kvsieve list formats`), or fp8 of other engines
    #[arg(long, value_name = "FORMAT", default_value = "bf16")]
    kv_format: String,
    #[command(flatten)]
    report: Reported,
}

/// The answer as JSON.
#[derive(Serialize)]
struct Report<'a> {
    model: &'a str,
    gpu: &'a str,
    network: &'a str,
    node_cards: u64,
    context_tokens: u64,
    on: Vec<OnRanks>,
    turns: Turns,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    args.report.check(&[("--model", &args.model)])?;
    let subject = subject(&args.model)?;
    let gpu: &Gpu = memory(&args.gpu)?.gpu().ok_or_else(|| {
        Failure::usage(format!("--gpu is '{}'; times need a card of `kvsieve list gpus`, such as h100", args.gpu))
    })?;
    let scale = Scale {
        subject: &subject,
        gpu,
        network: network(&args.network)?,
        node_cards: args.per_node,
        context: args.context,
        kv: args.kv_format.parse::<KvStore>()?,
    };
    scale.check(&args.ranks)?;
    let report = Report {
        model: &subject.name,
        gpu: &gpu.name,
        network: &scale.network.name,
        node_cards: args.per_node,
        context_tokens: args.context,
        on: args.ranks.iter().map(|&ranks| scale.on(ranks)).collect(),
        turns: scale.turns(),
    };
    args.report.give(&report, || words(&scale, &report))
}

fn words(scale: &Scale<'_>, report: &Report<'_>) -> String {
    let n = |count: u64| grouped(u128::from(count));
    let head = format!(
        "{} on {}, {} tokens of a sequence, keys and values in {}; nodes of {} cards ({:.0} GB/s to each other{}), {} \
         between them ({} GB/s a card)",
        report.model,
        report.gpu,
        n(report.context_tokens),
        scale.kv,
        report.node_cards,
        scale.gpu.peer_gb_per_s(),
        if scale.gpu.nvlink_gb_per_s.is_some() { "" } else { ", over PCIe" },
        report.network,
        scale.network.gb_per_s,
    );
    let rows = |heading: &[&str], of: &dyn Fn(&OnRanks) -> Vec<String>| {
        let heading = heading.iter().map(|cell| cell.to_string()).collect();
        let rows = report.on.iter().map(|on| [vec![n(on.ranks)], of(on)].concat());
        text::table(&std::iter::once(heading).chain(rows).collect::<Vec<_>>(), 0)
    };
    let ring = rows(&["ring", "tokens of a card", "computes", "sends", "all layers", "computing"], &|on| {
        vec![
            n(on.rank_tokens),
            nanoseconds(on.ring_compute_ns),
            nanoseconds(on.ring_send_ns),
            nanoseconds(on.ring_s * 1e9),
            format!("{:.0}%", 100.0 * on.ring_computing_share),
        ]
    });
    let tree = rows(&["tree", "reads", "sends", "a token"], &|on| {
        [on.tree_read_ns, on.tree_send_ns, on.tree_read_ns + on.tree_send_ns].map(nanoseconds).into()
    });
    let zero = rows(&["ZeRO", "stage 0-2", "sends", "as long", "stage 3", "sends", "as long"], &|on| {
        let of = |stage: usize| {
            let least = format!("{} tokens", n(on.zero_least_tokens[stage]));
            [bytes(on.zero_bytes[stage]), nanoseconds(on.zero_s[stage] * 1e9), least]
        };
        [of(0), of(1)].concat()
    });
    let said = [turns_of_ring(report), turns_of_tree(report), turns_of_zero(report)];
    let parts = [
        "Attention over the context, around a ring; a step of a layer computes and sends at once:",
        "A decode step, up and down a tree; all layers read, and then send:",
        "A training step; what a card sends, and the tokens of a card whose passes take as long:",
    ];
    format!(
        "{}\n{}{ring}\n{}{tree}\n{}{zero}\n{}",
        text::wrapped(&head, ""),
        text::wrapped(parts[0], ""),
        text::wrapped(parts[1], ""),
        text::wrapped(parts[2], ""),
        said.map(|line| text::wrapped(&line, "")).concat()
    )
}

fn turns_of_ring(report: &Report<'_>) -> String {
    let [forward, both] = report.turns.ring_least_tokens.map(|tokens| grouped(u128::from(tokens)));
    let ranks = report.turns.ring_most_ranks.map(|ranks| match ranks {
        Some(ranks) => format!("beyond {} cards", grouped(u128::from(ranks))),
        None => "on two cards already".into(),
    });
    format!(
        "Between nodes a ring sends longer than it computes with fewer than {forward} tokens of a card ({} at this context), \
         and with fewer than {both} where gradients go around too ({}).",
        ranks[0], ranks[1]
    )
}

fn turns_of_tree(report: &Report<'_>) -> String {
    match report.turns.tree_ranks {
        Some(ranks) => {
            format!(
                "A tree's messages take longer than reading the cache from {} cards on.",
                grouped(u128::from(ranks))
            )
        }
        None => "A tree's messages never take longer than reading the cache.".into(),
    }
}

fn turns_of_zero(report: &Report<'_>) -> String {
    let Some(on) = report.on.iter().filter(|on| on.ranks > 1).max_by_key(|on| on.ranks) else {
        return String::new();
    };
    let [two, three] = on.zero_least_tokens.map(|tokens| grouped(u128::from(tokens)));
    format!(
        "ZeRO on {} cards sends longer than it computes with fewer than {two} tokens of a card and step, at stage 3 with fewer \
         than {three}.",
        grouped(u128::from(on.ranks))
    )
}
