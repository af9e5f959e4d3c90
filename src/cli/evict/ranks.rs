//! `evict --ranks`: a cache that is shared out over ranks, each of which evicts what is its own; the same tokens stay as on one.
//!
//! Every rank has all queries, and a cache of its chunk of the keys and values. Rank 0 then reads the whole input to say what is lost,
//! and writes what all ranks found.

use super::held::filled;
use super::{Args, Outcome, Tensors};
use crate::attention::{self, Params, Shape};
use crate::cli::failure::Failure;
use crate::cli::{output, ranks};
use crate::device::Cpu;
use crate::format::KvFormat;
use crate::memory::{Arena, Label};
use crate::policy::{Budget, Policy};
use crate::ranks::evict::{Held, Sharded};
use crate::ranks::{Asked, Comm, Method, Rank, Traffic, Tree};
use crate::tensor::file::TensorFile;
use crate::units;
use crate::workload::looks_swapped;
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// How the cache was shared out, and what each rank shows.
#[derive(Clone, Serialize)]
pub struct OverRanks {
    transport: &'static str,
    ranks: Vec<OfRank>,
}

/// What a rank held, took and sent.
#[derive(Clone, Serialize, Deserialize)]
struct OfRank {
    /// Tokens of the context that it began with.
    kv_tokens: usize,
    /// Bytes of its cache's tokens, before and after.
    kv_bytes_dense: u64,
    kv_bytes_kept: u64,
    /// Of its arena while it evicted: queries, cache, and what the policy takes.
    peak_bytes: u64,
    sent_bytes: u64,
    /// The same from the shapes.
    predicted_sent_bytes: u64,
    messages: u64,
    evict_ns: u64,
    /// Of these, nanoseconds in which it waited for messages.
    exposed_ns: u64,
}

pub fn run(args: &Args, asked: Asked, policy: &Policy, budget: Option<&Budget>) -> Result<(), Failure> {
    if asked.method == Method::Ring {
        return Err(Failure::usage(
            "eviction is shared out as decoding is, each rank with a chunk of the keys; write --ranks tree, or tree:4"
                .into(),
        ));
    }
    let sharded = Sharded::new(&args.policy, policy)?;
    ranks::run_attention(asked, &args.compute, |comm, cpu, arena| {
        args.on_rank(comm, cpu, arena, &sharded, (policy, budget))
    })
}

impl Args {
    /// What one rank does.
    fn on_rank(
        &self,
        comm: &Comm,
        cpu: &Cpu,
        arena: &Arena,
        sharded: &Sharded<'_>,
        (policy, budget): (&Policy, Option<&Budget>),
    ) -> Result<(), Failure> {
        let prepare = || {
            self.check_files()?;
            let file = TensorFile::open(&self.input)?;
            let [(q, dtype), (k, kv_dtype), (v, _)] = {
                let of = |name| file.describe(name);
                [of("q")?, of("k")?, of("v")?]
            };
            let shape = Shape::of(q, k, v)?;
            let tree = Tree::new(shape, Params::new(shape.head_dim, true), dtype, comm.size())?;
            let (format, lists) = (KvFormat::from(kv_dtype), shape.batch * shape.kv_heads);
            policy.check_format(&self.policy, budget, format)?;
            let token_bytes = format.token_bytes(shape.head_dim);
            let tokens = policy.budget_tokens(&self.policy, budget, shape.kv_len, token_bytes, lists)?;
            Ok::<_, Failure>((file, tree, format, tokens))
        };
        let (file, tree, format, budget_tokens) = ranks::settle(comm, prepare())?;
        let shape = tree.shape();
        let (output, input) = (self.output.display(), file.hash());
        let text = format!("{} {budget:?} {} {shape:?} {format} {output} {input}", self.policy, self.seed);
        ranks::agree_on_input(comm, &text)?;
        if comm.rank() == 0 {
            output::warn(looks_swapped(shape.kv_heads, shape.kv_len).as_slice());
        }

        let q = file.load("q", arena, Label::Input)?;
        let mut cache = {
            let load = |name| file.load_tokens(name, &tree.keys().of(comm.rank()), arena, Label::Input);
            filled(arena, [&load("k")?, &load("v")?], format, &[])?
        };
        let kernel = attention::kernel("tiled")?;
        let on = Rank { comm, cpu, arena, kernel: &*kernel };
        let held = Held { tree: &tree, q: q.view(), budget_tokens, layers: 1, seed: self.seed };
        let kv_bytes_dense = arena.live_bytes(Label::Kv);
        comm.barrier()?;
        comm.take_traffic();
        arena.reset_peak();
        let start = Instant::now();
        let retained = sharded.evict(on, held, &mut cache)?;
        let evict_ns = start.elapsed().as_nanos() as u64;
        let Traffic { messages, sent_bytes, exposed_ns, .. } = comm.take_traffic();
        let seen = OfRank {
            kv_tokens: tree.keys().len(comm.rank()),
            kv_bytes_dense,
            kv_bytes_kept: arena.live_bytes(Label::Kv),
            peak_bytes: arena.usage().peak_bytes,
            sent_bytes,
            predicted_sent_bytes: sharded.sent_bytes(&tree, comm.rank()),
            messages,
            evict_ns,
            exposed_ns,
        };
        let ranks = ranks::gather(comm, &seen)?;
        if comm.rank() > 0 {
            return Ok(());
        }
        let most = |of: fn(&OfRank) -> u64| ranks.iter().map(of).max().unwrap_or(0);
        let outcome = Outcome {
            kept: (0..shape.batch * shape.kv_heads).map(|list| retained.selection.kept(list)).collect(),
            scores: retained.scores.as_deref(),
            rows: Vec::new(),
            read: None,
            kv_bytes_kept: Some(ranks.iter().map(|rank| rank.kv_bytes_kept).sum()),
            device: "cpu".into(),
            threads: Some(cpu.threads()),
            evict_ns: most(|rank| rank.evict_ns),
            tie_rate: retained.tie_rate,
            peak_bytes: most(|rank| rank.peak_bytes),
            over_ranks: Some(OverRanks { transport: comm.transport(), ranks }),
            used: None,
        };
        // Behind what is measured: the queries' loss is of all keys and values.
        let beside = Arena::unlimited();
        let (k, v) = (file.load("k", &beside, Label::Input)?, file.load("v", &beside, Label::Input)?);
        let tensors = Tensors { q: q.view(), k: k.view(), v: v.view(), shape, cpu };
        self.finish(policy, (budget, budget_tokens), &file, &tensors, &outcome)
    }
}

impl OverRanks {
    /// A line for each rank.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let line = |of_rank: &OfRank| {
            let [dense, kept, peak, sent] =
                [of_rank.kv_bytes_dense, of_rank.kv_bytes_kept, of_rank.peak_bytes, of_rank.sent_bytes]
                    .map(units::bytes);
            let agrees = match of_rank.sent_bytes == of_rank.predicted_sent_bytes {
                true => "as predicted".into(),
                false => format!("{} predicted", units::bytes(of_rank.predicted_sent_bytes)),
            };
            let messages = of_rank.messages;
            ("rank", format!("KV {dense} -> {kept}, peak {peak}; sent {sent} in {messages} messages, {agrees}"))
        };
        self.ranks.iter().map(line).collect()
    }
}
