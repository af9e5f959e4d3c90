//! The backward pass in one sweep over the keys: five products a tile, nothing materialised.
//!
//! A unit of work is a block of keys of one KV head ([`unit`]): its `dk` and `dv` stay in the thread's scratch while
//! the query blocks that see it pass by. Each of them also gets a share of `dq` from each block of keys. So that the
//! sum has one order, whatever the number of threads, a query block holds the index of the block of keys whose turn it
//! is ([`QueryBlock`]). Threads claim units in order, so that a unit waits only for units that were claimed before it: the
//! earliest one at work never waits, and there is no deadlock with any number of threads. Waiting is rare: units are
//! claimed key block by key block over all heads, and every unit begins at the last query block, so that neighbours
//! of one head follow each other like a wave.
//!
//! What each step brought: GFLOP/s of one core, causal and full (2 heads, L 2048, D 128, Zen 5 shared with other work;
//! its peak is 244 in f32 and 489 in bf16 pairs):
//!
//! | step | causal | full |
//! |------|-------:|-----:|
//! | two sweeps, seven products by `gemm` | 112 | 142 |
//! | one sweep, five products by `product`, keys and values packed anew for each query block | 178 | 189 |
//! | packed once for all query blocks | 203 | 208 |
//! | probabilities and score gradients in one loop | 208 | 210 |
//! | bf16: operands in pairs | 370 | 389 |

mod scores;
mod unit;

use crate::attention::{Backward, Forward, Gradients, Shape};
use crate::device::cpu::Slots;
use crate::device::simd::product::ROWS;
use crate::tensor::DType;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use unit::{KeyBlock, Layout};

/// The extents of a tile in one problem.
#[derive(Debug, Clone, Copy)]
pub(super) struct Blocks {
    shape: Shape,
    /// Queries of a block.
    queries: usize,
    /// Keys of a block.
    keys: usize,
}

impl Blocks {
    /// Blocks as asked, else of the measured best sizes. What is packed of a block of keys serves every query, so that
    /// large blocks pay; a head is left about six of them for the threads. Only the length of the keys counts, lest a
    /// sequence's rounding depend on its batch.
    pub(super) fn new(shape: &Shape, queries: Option<usize>, keys: Option<usize>) -> Self {
        let keys = keys.unwrap_or((shape.kv_len / 6 / 96 * 96).clamp(192, 384));
        Blocks { shape: *shape, queries: queries.unwrap_or(96).min(shape.q_len), keys: keys.min(shape.kv_len) }
    }

    /// f32 elements of scratch: the threads' slots, `delta`, and sums of `dq` where the gradient cannot hold them.
    pub(super) fn scratch(&self, dtype: DType, threads: usize) -> usize {
        threads * Layout::of(self).words() + self.shape.rows() + self.sums(dtype)
    }

    fn sums(&self, dtype: DType) -> usize {
        if dtype == DType::F32 { 0 } else { self.shape.rows() * self.shape.head_dim }
    }

    fn query_blocks(&self) -> usize {
        self.shape.q_len.div_ceil(self.queries)
    }

    /// Queries of a block.
    fn query_rows(&self, block: usize) -> Range<usize> {
        block * self.queries..self.shape.q_len.min((block + 1) * self.queries)
    }

    /// Keys of a block.
    fn key_rows(&self, block: usize) -> Range<usize> {
        block * self.keys..self.shape.kv_len.min((block + 1) * self.keys)
    }
}

/// What all units share.
struct Plan<'a, 'g> {
    call: &'a Backward<'a>,
    blocks: Blocks,
    delta: &'a [f32],
    /// `[B * Hq, query blocks]`.
    query_blocks: Vec<Mutex<QueryBlock<'g>>>,
    /// `dk` and `dv` of each unit, `[key blocks, B * Hkv]`.
    targets: Vec<Mutex<[&'g mut [u8]; 2]>>,
    /// The gradient by the bias of each unit's keys, where it is wanted.
    biases: Vec<Mutex<&'g mut [f32]>>,
    dtype: DType,
    /// A unit panicked, and those that wait for it must not wait for ever.
    failed: AtomicBool,
}

/// The queries of a block and their gradient.
struct QueryBlock<'g> {
    /// The block of keys whose turn it is, and the end of those that any of the queries sees.
    turns: Range<usize>,
    /// Nothing has been added.
    empty: bool,
    /// The sum, `[queries, D]`.
    sum: &'g mut [f32],
    /// Where the sum goes when it is complete, if it is not the gradient itself.
    encoded: Option<&'g mut [u8]>,
}

impl<'g> Plan<'_, 'g> {
    /// Keys that some of the queries see; `visible` grows with the query at both ends.
    fn seen(&self, queries: &Range<usize>) -> Range<usize> {
        let Forward { shape, params, .. } = self.call.forward;
        let visible = |i| params.visible(i, shape.q_len, shape.kv_len);
        visible(queries.start).start..visible(queries.end - 1).end
    }

    /// Whether all of the queries see all of the keys.
    fn sees_all(&self, queries: &Range<usize>, keys: &Range<usize>) -> bool {
        let Forward { shape, params, .. } = self.call.forward;
        let visible = |i| params.visible(i, shape.q_len, shape.kv_len);
        visible(queries.end - 1).start <= keys.start && keys.end <= visible(queries.start).end
    }

    /// Blocks of keys that some query of a block sees.
    fn turns(&self, query_block: usize) -> Range<usize> {
        let seen = self.seen(&self.blocks.query_rows(query_block));
        if seen.is_empty() {
            return 0..0;
        }
        seen.start / self.blocks.keys..seen.end.div_ceil(self.blocks.keys)
    }

    /// A query block of a head (counted over the batch), once it is the turn of `key_block`.
    fn wait(&self, head: usize, query_block: usize, key_block: usize) -> MutexGuard<'_, QueryBlock<'g>> {
        let waited = &self.query_blocks[head * self.blocks.query_blocks() + query_block];
        for attempt in 0u32.. {
            let guard = waited.lock().unwrap_or_else(PoisonError::into_inner);
            if guard.turns.start == key_block {
                return guard;
            }
            drop(guard);
            assert!(!self.failed.load(Ordering::Relaxed), "another thread of this backward pass panicked");
            if attempt < 100 {
                (0..50).for_each(|_| std::hint::spin_loop());
            } else {
                std::thread::yield_now();
            }
        }
        unreachable!("the loop ends by returning")
    }
}

/// Tells the others when a unit panics.
struct Alarm<'a>(&'a AtomicBool);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

pub(super) fn run(blocks: Blocks, call: &Backward<'_>, gradients: &mut Gradients, scratch: &mut [f32]) {
    let Forward { shape, cpu, .. } = call.forward;
    let (dtype, width, threads) = (gradients.q.dtype(), shape.head_dim, cpu.threads());
    let (slots, rest) = scratch.split_at_mut(threads * Layout::of(&blocks).words());
    let slots = Slots::new(slots, threads);
    let (delta, sums) = rest.split_at_mut(shape.rows());
    call.row_deltas(delta);

    let row_bytes = width * dtype.bytes();
    let targets = {
        let head_bytes = shape.kv_len * row_bytes;
        let heads = gradients.k.bytes_mut().chunks_mut(head_bytes).zip(gradients.v.bytes_mut().chunks_mut(head_bytes));
        let block_bytes = blocks.keys * row_bytes;
        let mut heads: Vec<_> = heads.map(|(k, v)| k.chunks_mut(block_bytes).zip(v.chunks_mut(block_bytes))).collect();
        let mut targets = Vec::new();
        for _ in 0..shape.kv_len.div_ceil(blocks.keys) {
            targets.extend(heads.iter_mut().filter_map(Iterator::next).map(|(k, v)| Mutex::new([k, v])));
        }
        targets
    };
    let mut biases = Vec::new();
    if let Some(bias) = &mut gradients.bias {
        let mut heads: Vec<_> = bias.chunks_mut(shape.kv_len).map(|head| head.chunks_mut(blocks.keys)).collect();
        for _ in 0..shape.kv_len.div_ceil(blocks.keys) {
            biases.extend(heads.iter_mut().filter_map(Iterator::next).map(Mutex::new));
        }
    }
    let (query_blocks, failed) = (Vec::new(), AtomicBool::new(false));
    let mut plan = Plan { call, blocks, delta, query_blocks, targets, biases, dtype, failed };
    let (sums, encoded) = match dtype {
        DType::F32 => (bytemuck::cast_slice_mut(gradients.q.bytes_mut()), &mut [][..]),
        _ => (sums, gradients.q.bytes_mut()),
    };
    let mut encoded =
        encoded.chunks_mut(shape.q_len * row_bytes).flat_map(|head| head.chunks_mut(blocks.queries * row_bytes));
    for head in sums.chunks_mut(shape.q_len * width) {
        for (block, sum) in head.chunks_mut(blocks.queries * width).enumerate() {
            let (turns, mut encoded) = (plan.turns(block), encoded.next());
            if turns.is_empty() {
                sum.fill(0.0);
                encoded.iter_mut().for_each(|bytes| bytes.fill(0));
            }
            plan.query_blocks.push(Mutex::new(QueryBlock { turns, empty: true, sum, encoded }));
        }
    }

    let (plan, claimed) = (&plan, AtomicUsize::new(0));
    cpu.install(|| {
        rayon::broadcast(|_| {
            slots.with(|slot| {
                let _alarm = Alarm(&plan.failed);
                loop {
                    let index = claimed.fetch_add(1, Ordering::Relaxed);
                    if index >= plan.targets.len() {
                        break;
                    }
                    cpu.isa().run_bf16(KeyBlock { plan, index, slot: &mut *slot });
                }
            });
        });
    });
}

/// Rows of a register tile that hold `rows` rows.
fn whole(rows: usize) -> usize {
    rows.next_multiple_of(ROWS)
}
