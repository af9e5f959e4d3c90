//! Attention and training on many cards: what a card computes and sends, and where sending takes longer.
//!
//! The equations are those that the project's own ranks are held against ([`crate::ranks::cost`]), with published links in place of
//! measured ones: bandwidths of the tables of cards and networks, and latencies of NCCL's own model. Cards reach [`REACHED`] of their
//! peaks. `docs/scale.md` has the equations and what they leave out.

use super::PlanError;
use super::kv::KvStore;
use super::presets::{Gpu, Network};
use super::roofline::REACHED;
use super::source::Subject;
use crate::ranks::cost::{Link, ring_time, tree_depth, zero_bytes};
use serde::Serialize;

/// Latencies of NCCL's model, in microseconds: of a launch, and of a hop in a node by NVLink, by PCIe, and between nodes
/// (`src/graph/tuning.cc` of NCCL 2.27, `baseLat` and `hwLat`).
struct Latency {
    launch_us: f64,
    nvlink_us: f64,
    pcie_us: f64,
    network_us: f64,
}

/// Of long messages: `Ring`, `Simple`.
const LONG: Latency = Latency { launch_us: 8.4, nvlink_us: 3.4, pcie_us: 5.7, network_us: 14.0 };
/// Of short ones: `Tree`, `LL`.
const SHORT: Latency = Latency { launch_us: 6.8, nvlink_us: 0.6, pcie_us: 1.0, network_us: 5.0 };

/// Most ranks that are looked at for where communication begins to take longer.
const MOST_RANKS: u64 = 1 << 20;

/// A model on many cards.
#[derive(Clone, Copy)]
pub struct Scale<'a> {
    /// The model.
    pub subject: &'a Subject,
    /// The card.
    pub gpu: &'a Gpu,
    /// Between nodes.
    pub network: &'a Network,
    /// Cards of a node.
    pub node_cards: u64,
    /// Tokens of a sequence.
    pub context: u64,
    /// How keys and values are kept.
    pub kv: KvStore,
}

/// A model on so many cards.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OnRanks {
    /// Cards.
    pub ranks: u64,
    /// Tokens of a card.
    pub rank_tokens: u64,
    /// Of a step of ring attention in one layer: what a card computes.
    pub ring_compute_ns: f64,
    /// What it sends meanwhile.
    pub ring_send_ns: f64,
    /// Bytes of that.
    pub ring_send_bytes: u64,
    /// Of attention over the context in all layers: seconds around the ring.
    pub ring_s: f64,
    /// Of these, the share in which it computes.
    pub ring_computing_share: f64,
    /// Of a decode step in all layers: keys and values that a card reads.
    pub tree_read_ns: f64,
    /// And the messages of the tree, which nothing hides.
    pub tree_send_ns: f64,
    /// Of a training step with ZeRO: bytes that a card sends, stages 0 to 2, and stage 3.
    pub zero_bytes: [u64; 2],
    /// Seconds of that.
    pub zero_s: [f64; 2],
    /// Tokens of a card in a step whose passes take as long.
    pub zero_least_tokens: [u64; 2],
}

/// Where communication takes longer than computing.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Turns {
    /// In a ring: with fewer tokens of a card than these, forward, and forward and backward.
    pub ring_least_tokens: [u64; 2],
    /// The same as cards of this context, at least those of a node, which send nothing over the network; `None` where even two are
    /// too many.
    pub ring_most_ranks: [Option<u64>; 2],
    /// In tree decode: with so many cards and more; `None` where there is no such number.
    pub tree_ranks: Option<u64>,
}

impl Scale<'_> {
    /// On so many cards.
    pub fn on(&self, ranks: u64) -> OnRanks {
        let rank_tokens = self.context.div_ceil(ranks);
        let (link, layers) = (self.long(ranks), self.layers() as f64);
        let ring_compute_ns = self.pair_ns() * (rank_tokens as f64).powi(2);
        // One card has nobody to send to.
        let ring_send_bytes = if ranks > 1 { (self.layer_token_bytes() * rank_tokens as f64) as u64 } else { 0 };
        let ring_send_ns = if ranks > 1 { link.ns(ring_send_bytes) } else { 0.0 };
        let ring = ring_time(ranks, ring_compute_ns, ring_send_ns);
        let volume = [2, 3].map(|stage| zero_bytes(stage, 2 * self.subject.parameters, ranks));
        let zero_s = [2, 3].map(|collectives| self.zero_s(ranks, collectives));
        let token_s = 6.0 * self.subject.active_parameters as f64 / self.flops_per_s();
        OnRanks {
            ranks,
            rank_tokens,
            ring_compute_ns,
            ring_send_ns,
            ring_send_bytes,
            ring_s: layers * ring / 1e9,
            ring_computing_share: ranks as f64 * ring_compute_ns / ring,
            tree_read_ns: self.read_ns(ranks),
            tree_send_ns: self.tree_ns(ranks),
            zero_bytes: volume,
            zero_s,
            zero_least_tokens: zero_s.map(|seconds| (seconds / token_s).ceil() as u64),
        }
    }

    /// Where communication takes longer, on more cards than a node has.
    pub fn turns(&self) -> Turns {
        let link = self.long(self.node_cards + 1);
        let (latency, bytes) = (link.ns(0), 1 << 20);
        let byte_ns = (link.ns(bytes) - latency) / bytes as f64;
        let kv = self.layer_token_bytes();
        // Sums of gradients travel in f32, one for each element of a key and a value.
        let sums = 4.0 * self.layer_token_elements();
        // Tokens t of a rank at which c t^2 = b t + a.
        let least = |computing: f64, bytes: f64, messages: f64| {
            let (c, b, a) = (computing * self.pair_ns(), bytes * byte_ns, messages * latency);
            ((b + (b * b + 4.0 * c * a).sqrt()) / (2.0 * c)).ceil() as u64
        };
        let ring_least_tokens = [least(1.0, kv, 1.0), least(3.5, 2.0 * kv + sums, 2.0)];
        // Messages take longer with more cards, and reading takes less.
        let ranks: Vec<u64> = (2..=MOST_RANKS).collect();
        let first = ranks.partition_point(|&ranks| self.tree_ns(ranks) <= self.read_ns(ranks));
        Turns {
            ring_least_tokens,
            // Cards of one node do not send over the network, however few tokens they have.
            ring_most_ranks: ring_least_tokens
                .map(|tokens| Some((self.context / tokens).max(self.node_cards)).filter(|&ranks| ranks > 1)),
            tree_ranks: ranks.get(first).copied(),
        }
    }

    /// Refuses what cannot be.
    ///
    /// # Errors
    /// What was wrong, its value, and what would be right.
    pub fn check(&self, ranks: &[u64]) -> Result<(), PlanError> {
        let wrong =
            |what, value: u64, expected: String| Err(PlanError::Value { what, value: value.to_string(), expected });
        if !(1..=MOST_RANKS).contains(&self.node_cards) {
            return wrong("--per-node", self.node_cards, format!("a node has 1 to {MOST_RANKS} cards"));
        }
        if self.context < 2 {
            return wrong("--context", self.context, "a ring needs at least 2 tokens".into());
        }
        self.kv.check(&self.subject.groups)?;
        // Two chunks of a ring for each card.
        let most = (self.context / 2).min(MOST_RANKS);
        match ranks.iter().find(|&&ranks| ranks == 0 || ranks > most) {
            Some(&ranks) => wrong("--ranks", ranks, format!("it must be 1 to {most} with this context")),
            None if self.layers() == 0 => {
                let expected = "it must have layers that attend to the whole context; this one has none".into();
                Err(PlanError::Value { what: "--model", value: self.subject.name.clone(), expected })
            }
            None => Ok(()),
        }
    }

    /// Layers that attend to the whole context.
    fn layers(&self) -> u64 {
        self.full().map(|group| group.layers as u64).sum()
    }

    fn full(&self) -> impl Iterator<Item = &super::architecture::KvGroup> {
        self.subject.groups.iter().filter(|group| group.window.is_none())
    }

    fn flops_per_s(&self) -> f64 {
        self.gpu.tflops * 1e12 * REACHED.operations
    }

    /// Nanoseconds of a pair of a query and a key in all heads of a layer, of which the causal mask leaves half.
    fn pair_ns(&self) -> f64 {
        let shape = &self.subject.architecture;
        let [k_dim, v_dim] = shape.head_dims();
        (shape.heads * (k_dim + v_dim)) as f64 / self.flops_per_s() * 1e9
    }

    /// Bytes of a token's keys and values in a layer.
    fn layer_token_bytes(&self) -> f64 {
        self.full().map(|group| self.kv.token_bytes(group)).sum::<u64>() as f64 / self.layers() as f64
    }

    fn layer_token_elements(&self) -> f64 {
        let elements = self.full().map(|group| group.layers * group.heads * (group.k_dim + group.v_dim)).sum::<usize>();
        elements as f64 / self.layers() as f64
    }

    /// Nanoseconds in which a card reads its keys and values of all layers.
    fn read_ns(&self, ranks: u64) -> f64 {
        let bytes = self.layers() as f64 * self.layer_token_bytes() * self.context.div_ceil(ranks) as f64;
        bytes / (self.gpu.gb_per_s * REACHED.bandwidth)
    }

    /// The slowest hop of a ring, which a card goes over alone.
    fn long(&self, ranks: u64) -> Link {
        let inside = ranks <= self.node_cards;
        let hop_us = if inside { self.inner(&LONG) } else { LONG.network_us };
        let gb_per_s = if inside { self.gpu.peer_gb_per_s() } else { self.network.gb_per_s };
        Link::new((LONG.launch_us + hop_us) * 1e3, gb_per_s * 1e9)
    }

    /// A hop in a node.
    fn inner(&self, latency: &Latency) -> f64 {
        if self.gpu.nvlink_gb_per_s.is_some() { latency.nvlink_us } else { latency.pcie_us }
    }

    /// Nanoseconds of the messages of a decode step in all layers: the levels of the tree in a node, then those between nodes.
    fn tree_ns(&self, ranks: u64) -> f64 {
        if ranks == 1 {
            return 0.0;
        }
        let shape = &self.subject.architecture;
        // An unnormalised output in f32, a maximum and a sum for each head.
        let bytes = 4 * shape.heads as u64 * (shape.head_dims()[1] as u64 + 2);
        let inside = tree_depth(ranks.min(self.node_cards)) as f64;
        let between = tree_depth(ranks.div_ceil(self.node_cards)) as f64;
        let hop = |us: f64, gb_per_s: f64| Link::new(us * 1e3, gb_per_s * 1e9).ns(bytes);
        let levels = inside * hop(self.inner(&SHORT), self.gpu.peer_gb_per_s())
            + between * hop(SHORT.network_us, self.network.gb_per_s);
        self.layers() as f64 * (SHORT.launch_us * 1e3 + levels)
    }

    /// Seconds of so many collectives of every block: reduce-scatter and all-gather around the cards, on as many rings as a node has
    /// ports.
    fn zero_s(&self, ranks: u64, collectives: u64) -> f64 {
        if ranks == 1 {
            return 0.0;
        }
        let between = if ranks <= self.node_cards { 0 } else { ranks.div_ceil(self.node_cards) - 1 };
        let hops_us = (ranks - 1 - between) as f64 * self.inner(&LONG) + between as f64 * LONG.network_us;
        let latency = collectives as f64 * self.subject.layers as f64 * (LONG.launch_us + hops_us) / 1e6;
        let ports = self.network.gb_per_s * self.node_cards as f64;
        let peer = self.gpu.peer_gb_per_s();
        let gb_per_s = if between == 0 { peer } else { peer.min(ports) };
        let stage = if collectives > 2 { 3 } else { 2 };
        latency + zero_bytes(stage, 2 * self.subject.parameters, ranks) as f64 / (gb_per_s * 1e9)
    }
}
