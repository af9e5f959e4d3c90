//! A problem shared out by one of the methods, run and measured: what the command and the measure have in common.

use super::cost::{Link, Links, Sending};
use super::{Rank, RankError, Ring, RingBackward, Traffic, Tree};
use crate::attention::{DenseKv, Gradients, Kernel, Outputs, Params, Shape};
use crate::memory::LabelBytes;
use crate::tensor::{DType, Tensor, TensorView};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::time::Instant;

/// Most ranks that are threads of one process.
pub const MOST_THREADS: usize = 64;

/// How attention is shared out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Queries, keys and values are; keys go around.
    Ring,
    /// Keys and values are; partial results are merged.
    Tree,
}

/// A method and its ranks, as people write them: `ring:4` is four threads of one process, `ring` the processes of `mpirun`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// The method.
    pub method: Method,
    /// Ranks that are threads; `None` for those of MPI.
    pub threads: Option<usize>,
}

impl FromStr for Asked {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "'{text}' is not a way to share attention out; write ring:4, tree:4 (1 to {MOST_THREADS} threads), or under mpirun ring or tree"
            )
        };
        let (method, ranks) = text.split_once(':').map_or((text, None), |(method, ranks)| (method, Some(ranks)));
        let method = match method {
            "ring" => Method::Ring,
            "tree" => Method::Tree,
            _ => return Err(wrong()),
        };
        let threads = ranks.map(|ranks| ranks.parse().map_err(|_| wrong())).transpose()?;
        match threads {
            Some(threads) if !(1..=MOST_THREADS).contains(&threads) => {
                Err(format!("'{text}' asks for {threads} threads; 1 to {MOST_THREADS} are possible"))
            }
            threads => Ok(Asked { method, threads }),
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Method::Ring => "ring",
            Method::Tree => "tree",
        })
    }
}

/// A problem that is shared out.
#[derive(Debug, Clone, Copy)]
pub enum Shared {
    /// By a ring.
    Ring(Ring),
    /// By a tree.
    Tree(Tree),
}

/// What a rank took, sent and waited for in the passes of a problem.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OfRank {
    /// Bytes of its arena at the peak of a pass, inputs included.
    pub peak_bytes: u64,
    /// The same from the shapes.
    pub predicted_peak_bytes: u64,
    /// Its peak by label, and the same from the shapes, for steps of training.
    #[serde(default, skip_serializing_if = "LabelBytes::is_empty")]
    pub peak_by_label: LabelBytes,
    /// See [`OfRank::peak_by_label`].
    #[serde(default, skip_serializing_if = "LabelBytes::is_empty")]
    pub predicted_by_label: LabelBytes,
    /// Bytes that it sent in a pass.
    pub sent_bytes: u64,
    /// The same from the shapes.
    pub predicted_sent_bytes: u64,
    /// Of these, bytes that were sent while it computed.
    pub sent_beside_bytes: u64,
    /// Messages of a pass.
    pub messages: u64,
    /// Nanoseconds of each pass.
    pub samples_ns: Vec<u64>,
    /// Of these, nanoseconds in which it computed.
    pub compute_ns: Vec<u64>,
    /// Nanoseconds in which it waited for messages and did not compute.
    pub exposed_ns: Vec<u64>,
    /// Nanoseconds of the same messages alone, with nothing computed.
    pub alone_ns: Vec<u64>,
    /// The same by the cost model ([`super::cost`]), with the links as they were just behind each pass.
    #[serde(default)]
    pub predicted_alone_ns: Vec<u64>,
    /// The links behind the last pass.
    #[serde(default)]
    pub links: Links,
}

impl OfRank {
    /// The share of sending that computing hid: of the median time of the messages alone, what was not waited for; `None` where
    /// nothing is sent beside computing.
    pub fn hidden_share(&self) -> Option<f64> {
        let median = |samples: &[u64]| {
            let mut sorted = samples.to_vec();
            sorted.sort_unstable();
            sorted.get(sorted.len() / 2).map(|&ns| ns as f64)
        };
        let alone = median(&self.alone_ns).filter(|&ns| ns > 0.0 && self.sent_beside_bytes > 0)?;
        Some((1.0 - median(&self.exposed_ns)? / alone).clamp(0.0, 1.0))
    }
}

impl Shared {
    /// Shares a problem out over `ranks`.
    ///
    /// # Errors
    /// When it cannot be.
    pub fn new(method: Method, shape: Shape, params: Params, dtype: DType, ranks: usize) -> Result<Self, RankError> {
        Ok(match method {
            Method::Ring => Shared::Ring(Ring::new(shape, params, dtype, ranks)?),
            Method::Tree => Shared::Tree(Tree::new(shape, params, dtype, ranks)?),
        })
    }

    /// The queries and the keys that a rank holds.
    pub fn tokens_of(&self, rank: usize) -> [Vec<Range<usize>>; 2] {
        match self {
            Shared::Ring(ring) => [ring.queries().of(rank), ring.keys().of(rank)],
            Shared::Tree(tree) => {
                let all = 0..tree.shape().q_len;
                [vec![all], tree.keys().of(rank)]
            }
        }
    }

    /// Bytes of a rank's arena at the peak of a forward pass, its queries, keys and values included.
    pub fn forward_bytes(&self, kernel: &dyn Kernel, rank: usize, threads: usize) -> u64 {
        match self {
            Shared::Ring(ring) => ring.input_bytes(rank) + ring.forward_bytes(kernel, rank, threads),
            Shared::Tree(tree) => tree.input_bytes(rank) + tree.forward_bytes(kernel, rank, threads),
        }
    }

    /// Bytes that a rank sends in a forward pass.
    pub fn forward_sent_bytes(&self, rank: usize) -> u64 {
        match self {
            Shared::Ring(ring) => ring.forward_sent_bytes(rank),
            Shared::Tree(tree) => tree.forward_sent_bytes(rank),
        }
    }

    /// Attention of this rank's queries over all keys.
    ///
    /// # Errors
    /// When another rank ended, or the arena has no room.
    pub fn forward(&self, on: Rank<'_>, q: TensorView<'_>, [k, v]: [&Tensor; 2]) -> Result<Outputs, RankError> {
        match self {
            Shared::Ring(ring) => ring.forward(on, q, [k, v]),
            Shared::Tree(tree) => tree.forward(on, q, &DenseKv::new(k.view(), v.view())?),
        }
    }

    /// Sends what a forward pass sends, and computes nothing.
    ///
    /// # Errors
    /// When another rank ended, or the arena has no room.
    pub fn send_alone(&self, on: Rank<'_>, kv: [&Tensor; 2]) -> Result<(), RankError> {
        match self {
            Shared::Ring(ring) => ring.send_alone(on, kv),
            Shared::Tree(tree) => tree.send_alone(on),
        }
    }

    /// A forward pass, timed from where all ranks begin, and the same messages alone, added to `seen`.
    ///
    /// # Errors
    /// As [`Shared::forward`].
    pub fn sample(
        &self,
        on: Rank<'_>,
        q: TensorView<'_>,
        kv: [&Tensor; 2],
        seen: &mut OfRank,
    ) -> Result<Outputs, RankError> {
        let rank = on.comm.rank();
        seen.predicted_peak_bytes = self.forward_bytes(on.kernel, rank, on.cpu.threads());
        seen.predicted_sent_bytes = self.forward_sent_bytes(rank);
        seen.sample(on, || self.forward(on, q, kv), || self.send_alone(on, kv))
    }

    /// Times the links, and adds what the cost model gives by them for the messages of a forward pass.
    ///
    /// # Errors
    /// When another rank ended.
    pub fn predict(&self, on: Rank<'_>, seen: &mut OfRank) -> Result<(), RankError> {
        let link: fn(&Links) -> &Link = match self {
            Shared::Ring(_) => |links| &links.around,
            Shared::Tree(_) => |links| &links.across,
        };
        seen.predict(on, &self.forward_sending(), link)
    }

    /// What a forward pass sends, one message behind another.
    pub fn forward_sending(&self) -> Sending {
        match self {
            Shared::Ring(ring) => ring.forward_sending(),
            Shared::Tree(tree) => tree.forward_sending(),
        }
    }
}

impl OfRank {
    /// A pass, timed from where all ranks begin, and the same messages alone.
    fn sample<T>(
        &mut self,
        on: Rank<'_>,
        pass: impl FnOnce() -> Result<T, RankError>,
        alone: impl FnOnce() -> Result<(), RankError>,
    ) -> Result<T, RankError> {
        on.arena.reset_peak();
        let (result, ns, traffic) = timed(on, pass)?;
        let Traffic { messages, sent_bytes, sent_beside_bytes, compute_ns, exposed_ns } = traffic;
        self.peak_bytes = on.arena.usage().peak_bytes;
        (self.messages, self.sent_bytes, self.sent_beside_bytes) = (messages, sent_bytes, sent_beside_bytes);
        self.samples_ns.push(ns);
        self.compute_ns.push(compute_ns);
        self.exposed_ns.push(exposed_ns);
        self.alone_ns.push(timed(on, alone)?.1);
        Ok(result)
    }

    /// Adds what the cost model gives for what a pass sends over one of the links.
    fn predict(&mut self, on: Rank<'_>, sending: &Sending, over: fn(&Links) -> &Link) -> Result<(), RankError> {
        self.links = Links::measure(on, sending.most_bytes())?;
        self.predicted_alone_ns.push(sending.ns(&self.links, over) as u64);
        Ok(())
    }
}

impl Ring {
    /// A backward pass, as [`Shared::sample`] does a forward pass; its peak includes the inputs, the outputs of the forward pass and
    /// their gradient.
    ///
    /// # Errors
    /// As [`Ring::backward`].
    pub fn sample_backward(
        &self,
        on: Rank<'_>,
        call: RingBackward<'_>,
        kv: [&Tensor; 2],
        seen: &mut OfRank,
    ) -> Result<Gradients, RankError> {
        let rank = on.comm.rank();
        let shape = self.shape_of(rank);
        let given = self.input_bytes(rank)
            + Tensor::bytes_of(call.grad_o.dtype(), shape.q_dims())
            + Outputs::bytes(&shape, call.o.dtype());
        let pass = self.backward_bytes(on.kernel, rank, on.cpu.threads()).unwrap_or(0);
        seen.predicted_peak_bytes = given + pass;
        seen.predicted_sent_bytes = self.backward_sent_bytes(rank);
        seen.sample(on, || self.backward(on, call, kv), || self.send_backward_alone(on, kv))
    }

    /// As [`Shared::predict`], of a backward pass.
    ///
    /// # Errors
    /// When another rank ended.
    pub fn predict_backward(&self, on: Rank<'_>, seen: &mut OfRank) -> Result<(), RankError> {
        seen.predict(on, &self.backward_sending(), |links| &links.around)
    }
}

/// What `work` gave, its nanoseconds from where all ranks begin, and what it sent.
fn timed<T>(on: Rank<'_>, work: impl FnOnce() -> Result<T, RankError>) -> Result<(T, u64, Traffic), RankError> {
    on.comm.barrier()?;
    on.comm.take_traffic();
    let start = Instant::now();
    let result = work()?;
    Ok((result, start.elapsed().as_nanos() as u64, on.comm.take_traffic()))
}

/// Writes what a rank computed to the tokens `ranges` of the whole result.
pub fn scatter(whole: &mut Outputs, part: &Outputs, ranges: &[Range<usize>]) {
    let [.., tokens, width] = whole.o.dims();
    let row_bytes = width * whole.o.dtype().bytes();
    scatter_rows(whole.o.bytes_mut(), part.o.bytes(), tokens, ranges, row_bytes);
    let (whole, part) = (bytemuck::cast_slice_mut(&mut whole.lse), bytemuck::cast_slice(&part.lse));
    scatter_rows(whole, part, tokens, ranges, DType::F32.bytes());
}

/// Writes rows `[heads, tokens of ranges]` to the tokens `ranges` of `whole`, `[heads, tokens]`; a row has `row_bytes`.
pub fn scatter_rows(whole: &mut [u8], part: &[u8], tokens: usize, ranges: &[Range<usize>], row_bytes: usize) {
    let count: usize = ranges.iter().map(Range::len).sum();
    let heads = whole.chunks_exact_mut(tokens * row_bytes).zip(part.chunks_exact(count * row_bytes));
    for (to, mut from) in heads {
        for range in ranges {
            let (rows, rest) = from.split_at(range.len() * row_bytes);
            to[range.start * row_bytes..range.end * row_bytes].copy_from_slice(rows);
            from = rest;
        }
    }
}
