//! What the kernels of eviction policies take: the structs of `kernels/lists.cuh`, `select.cu`, `score.cu` and
//! `compact.cu`, made only from buffers that are large enough for what the kernels do with them.
//!
//! Page numbers and lengths are data of the cache that owns the pages ([`crate::cache::cuda`]), which keeps them right.

use super::problem::{has, short};
use super::{CudaError, DeviceBuffer, PagedKv, Pages};
use cudarc::driver::DeviceRepr;
use std::marker::PhantomData;

/// Borrows the buffers whose addresses are in a struct.
type Borrowed<'a> = PhantomData<&'a DeviceBuffer>;

/// A number of which more than all tokens is as good as all.
pub(super) fn capped(value: usize) -> i32 {
    value.min((1 << 29) - 1) as i32
}

/// The buffers and extents of [`Lists`].
pub struct ListsOperands<'a> {
    /// The pages, and which list is the first.
    pub kv: PagedKv<'a>,
    /// `[all lists, stride]` in i32.
    pub positions: &'a DeviceBuffer,
    /// The same of what keys stood at before they were rotated, where that is kept.
    pub origins: Option<&'a DeviceBuffer>,
    /// What tokens carry, `[all lists, stride]` in f32, where it is kept.
    pub carried: Option<&'a DeviceBuffer>,
    /// `B Hkv`.
    pub lists: usize,
    /// `Hkv`.
    pub heads: usize,
    /// Tokens that one list can hold.
    pub stride: usize,
    /// Bytes of a key, and of a value.
    pub row_bytes: [usize; 2],
}

/// The cached tokens of each (sequence, KV head).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Lists<'a> {
    pages: Pages<'a>,
    positions: u64,
    origins: u64,
    carried: u64,
    heads: i32,
    stride: i32,
    buffers: Borrowed<'a>,
}

// SAFETY: this struct and all below are `repr(C)` without padding and hold numbers only; their fields are those of the
// structs of the same names under kernels/ (a test compares them). Their constructors compare buffers with extents.
unsafe impl DeviceRepr for Lists<'_> {}

impl<'a> Lists<'a> {
    /// Lists over the pages of a cache.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when a buffer is too small or an extent too large.
    pub fn new(operands: &ListsOperands<'a>) -> Result<Self, CudaError> {
        let ListsOperands { kv, positions, origins, carried, lists, heads, stride, row_bytes } = *operands;
        let (before, bytes) = (4 * kv.first_list * stride, 4 * (kv.first_list + lists) * stride);
        let from = |start: u64| start + before as u64;
        Ok(Lists {
            pages: Pages::new(&kv, lists, stride, row_bytes)?,
            positions: has("positions", positions, bytes).map(from)?,
            origins: origins.map_or(Ok(0), |origins| has("origins", origins, bytes).map(from))?,
            carried: carried.map_or(Ok(0), |carried| has("carried numbers", carried, bytes).map(from))?,
            heads: short("KV heads", heads)?,
            stride: short("tokens of a list", stride)?,
            buffers: PhantomData,
        })
    }
}

/// The buffers and extents of [`Observers`].
pub struct ObserversOperands<'a> {
    /// `[B, Hq, length, D]`, `row_bytes` each row.
    pub q: &'a DeviceBuffer,
    /// Rows of a head in `q`, of which `q_len` from `q_first` on are the queries.
    pub length: usize,
    /// The first of them.
    pub q_first: usize,
    /// Bytes of a query.
    pub row_bytes: usize,
    /// `[B, Hq, q_len]` in f32.
    pub lse: &'a DeviceBuffer,
    /// `[lists, width]` in f32.
    pub columns: &'a mut DeviceBuffer,
    /// `B Hkv`.
    pub lists: usize,
    /// `B`.
    pub batch: usize,
    /// `Hq`.
    pub q_heads: usize,
    /// `Lq`.
    pub q_len: usize,
    /// First of the queries that are asked; the last one is the last of all.
    pub first: usize,
    /// Bottom-right aligned.
    pub causal: bool,
    /// A query sees its own key and the `window - 1` before it.
    pub window: Option<usize>,
    /// At least the longest list.
    pub width: usize,
    /// 0 mean, 1 sum, 2 largest.
    pub group: i32,
    /// Factor of the inner product.
    pub scale: f32,
    /// `cap * tanh(logit / cap)`.
    pub softcap: Option<f32>,
}

/// Queries that have seen the lists.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Observers<'a> {
    q: u64,
    lse: u64,
    columns: u64,
    q_heads: i32,
    q_len: i32,
    length: i32,
    q_first: i32,
    first: i32,
    end: i32,
    causal: i32,
    window: i32,
    width: i32,
    group: i32,
    scale: f32,
    softcap: f32,
    buffers: Borrowed<'a>,
}

// SAFETY: see `Lists`.
unsafe impl DeviceRepr for Observers<'_> {}

impl<'a> Observers<'a> {
    /// Queries over buffers.
    ///
    /// # Errors
    /// As [`Lists::new`].
    pub fn new(operands: &'a ObserversOperands<'_>) -> Result<Self, CudaError> {
        let heads = operands.batch * operands.q_heads;
        let q_len = short("query length", operands.q_len)?;
        if operands.q_first + operands.q_len > operands.length {
            let (last, length) = (operands.q_first + operands.q_len, operands.length);
            return Err(CudaError::Operand(format!("queries up to {last} of {length}")));
        }
        Ok(Observers {
            q: has("q", operands.q, heads * operands.length * operands.row_bytes)?,
            lse: has("lse", operands.lse, 4 * heads * operands.q_len)?,
            columns: has("columns", operands.columns, 4 * operands.lists * operands.width)?,
            q_heads: short("query heads", operands.q_heads)?,
            q_len,
            length: short("rows of q", operands.length)?,
            q_first: short("first row of q", operands.q_first)?,
            first: short("first query", operands.first)?,
            end: q_len,
            causal: i32::from(operands.causal),
            window: operands.window.map_or(0, capped),
            width: short("key length", operands.width)?,
            group: operands.group,
            scale: operands.scale,
            softcap: operands.softcap.unwrap_or(0.0),
            buffers: PhantomData,
        })
    }
}

/// Scores that a policy gives, and what a kernel reads or leaves beside them.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Scoring<'a> {
    scores: u64,
    raw: u64,
    width: i32,
    seen: i32,
    behind: i32,
    kernel: i32,
    is_max: i32,
    divisor: f32,
    buffers: Borrowed<'a>,
}

// SAFETY: see `Lists`.
unsafe impl DeviceRepr for Scoring<'_> {}

impl<'a> Scoring<'a> {
    /// Scores `[lists, width]` of sequences that have seen `seen` tokens; `raw` with the bytes that it needs.
    ///
    /// # Errors
    /// As [`Lists::new`].
    pub fn new(
        scores: &'a mut DeviceBuffer,
        raw: Option<(&'a DeviceBuffer, usize)>,
        [lists, width]: [usize; 2],
        seen: usize,
    ) -> Result<Self, CudaError> {
        Ok(Scoring {
            scores: has("scores", scores, 4 * lists * width)?,
            raw: raw.map_or(Ok(0), |(raw, bytes)| has("raw scores", raw, bytes))?,
            width: short("key length", width)?,
            seen: short("tokens seen", seen)?,
            behind: 0,
            kernel: 1,
            is_max: 0,
            divisor: 1.0,
            buffers: PhantomData,
        })
    }

    /// The same with a pool of `kernel` slots over raw scores divided by `divisor`, without the last `behind` slots.
    pub fn pooled(self, kernel: usize, is_max: bool, divisor: f32, behind: usize) -> Self {
        Scoring { kernel: capped(kernel), is_max: i32::from(is_max), divisor, behind: capped(behind), ..self }
    }
}

/// The buffers and extents of [`Choice`].
pub struct ChoiceOperands<'a> {
    /// `[lists, width]` in f32.
    pub scores: &'a mut DeviceBuffer,
    /// Where slots that stay are written, `[lists, width]` in u32, and how many `select_best` is to choose, `[lists]` in
    /// i32.
    pub chosen: Option<(&'a DeviceBuffer, &'a mut DeviceBuffer)>,
    /// `[4, lists]`: best scores lost, largest scores (f32), first slots whose scores are no numbers, slots that go (i32).
    pub found: &'a mut DeviceBuffer,
    /// `B Hkv`.
    pub lists: usize,
    /// At least the longest list.
    pub width: usize,
    /// Positions below it are protected.
    pub sink: usize,
    /// So many slots at the end are protected.
    pub recent: usize,
}

/// What is chosen by scores.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Choice<'a> {
    scores: u64,
    counts: u64,
    slots: u64,
    best_lost: u64,
    tops: u64,
    wrong: u64,
    gone: u64,
    width: i32,
    sink: i32,
    recent: i32,
    lists: i32,
    buffers: Borrowed<'a>,
}

// SAFETY: see `Lists`.
unsafe impl DeviceRepr for Choice<'_> {}

impl<'a> Choice<'a> {
    /// A choice over buffers.
    ///
    /// # Errors
    /// As [`Lists::new`].
    pub fn new(operands: &'a ChoiceOperands<'_>) -> Result<Self, CudaError> {
        let (lists, bytes) = (operands.lists, 4 * operands.lists * operands.width);
        let found = has("results", operands.found, 16 * lists)?;
        Ok(Choice {
            scores: has("scores", operands.scores, bytes)?,
            counts: operands.chosen.as_ref().map_or(Ok(0), |(counts, _)| has("counts", counts, 4 * lists))?,
            slots: operands.chosen.as_ref().map_or(Ok(0), |(_, slots)| has("slots", slots, bytes))?,
            best_lost: found,
            tops: found + 4 * lists as u64,
            wrong: found + 8 * lists as u64,
            gone: found + 12 * lists as u64,
            width: short("key length", operands.width)?,
            sink: capped(operands.sink),
            recent: capped(operands.recent),
            lists: short("lists", lists)?,
            buffers: PhantomData,
        })
    }
}

/// Slots that stay.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Keeping<'a> {
    slots: u64,
    counts: u64,
    width: i32,
    unused: i32,
    buffers: Borrowed<'a>,
}

// SAFETY: see `Lists`.
unsafe impl DeviceRepr for Keeping<'_> {}

impl<'a> Keeping<'a> {
    /// `counts` `[lists]` slots of each list, at the front of its part of `slots` `[lists, width]`.
    ///
    /// # Errors
    /// As [`Lists::new`].
    pub fn new(
        slots: &'a DeviceBuffer,
        counts: &'a DeviceBuffer,
        lists: usize,
        width: usize,
    ) -> Result<Self, CudaError> {
        Ok(Keeping {
            slots: has("slots", slots, 4 * lists * width)?,
            counts: has("counts", counts, 4 * lists)?,
            width: short("key length", width)?,
            unused: 0,
            buffers: PhantomData,
        })
    }
}

/// Pages that move: `[2, most]` page numbers in u32, from and to.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Moves<'a> {
    from: u64,
    to: u64,
    buffers: Borrowed<'a>,
}

// SAFETY: see `Lists`.
unsafe impl DeviceRepr for Moves<'_> {}

impl<'a> Moves<'a> {
    /// Moves whose targets lie `most` numbers behind their sources in one buffer.
    ///
    /// # Errors
    /// As [`Lists::new`].
    pub fn new(numbers: &'a DeviceBuffer, most: usize) -> Result<Self, CudaError> {
        let from = has("moves", numbers, 8 * most)?;
        Ok(Moves { from, to: from + 4 * most as u64, buffers: PhantomData })
    }
}

/// Places of the page table that change: behind the lengths of lists, where they lie and the pages that they get.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Changes<'a> {
    places: u64,
    pages: u64,
    count: i32,
    unused: i32,
    buffers: Borrowed<'a>,
}

// SAFETY: see `Lists`.
unsafe impl DeviceRepr for Changes<'_> {}

impl<'a> Changes<'a> {
    /// `count` places and as many pages in u32, behind the lengths of `lists` lists in one buffer.
    ///
    /// # Errors
    /// As [`Lists::new`].
    pub fn new(numbers: &'a DeviceBuffer, lists: usize, count: usize) -> Result<Self, CudaError> {
        let places = has("changes of the page table", numbers, 4 * (lists + 2 * count))? + 4 * lists as u64;
        let pages = places + 4 * count as u64;
        Ok(Changes { places, pages, count: short("changes", count)?, unused: 0, buffers: PhantomData })
    }
}

/// Attention that tokens received, `[lists, width]` in f32.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Received<'a> {
    columns: u64,
    width: i32,
    unused: i32,
    buffers: Borrowed<'a>,
}

// SAFETY: see `Lists`.
unsafe impl DeviceRepr for Received<'_> {}

impl<'a> Received<'a> {
    /// Columns of `lists` lists.
    ///
    /// # Errors
    /// As [`Lists::new`].
    pub fn new(columns: &'a DeviceBuffer, [lists, width]: [usize; 2]) -> Result<Self, CudaError> {
        let columns = has("columns", columns, 4 * lists * width)?;
        Ok(Received { columns, width: short("key length", width)?, unused: 0, buffers: PhantomData })
    }
}

/// Gates of tokens that come, `[count, lists]` in f32, each of the token `later` before it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Gating<'a> {
    gates: u64,
    count: i32,
    later: i32,
    buffers: Borrowed<'a>,
}

// SAFETY: see `Lists`.
unsafe impl DeviceRepr for Gating<'_> {}

impl<'a> Gating<'a> {
    /// Of so many tokens for each of `lists` lists.
    ///
    /// # Errors
    /// As [`Lists::new`].
    pub fn new(gates: &'a DeviceBuffer, [count, lists]: [usize; 2], later: usize) -> Result<Self, CudaError> {
        let gates = has("gates", gates, 4 * count * lists)?;
        Ok(Gating { gates, count: short("tokens", count)?, later: short("tokens", later)?, buffers: PhantomData })
    }
}

#[cfg(test)]
mod tests {
    use super::super::source::tests::{in_cuda_text, in_rust};

    /// The fields of each struct on both sides: same names, same order.
    #[test]
    fn structs_are_the_same_in_rust_and_in_cuda() {
        let (lists, compact) = (include_str!("../../../lists.cuh"), include_str!("../../../compact.cu"));
        let (select, score) = (include_str!("../../../select.cu"), include_str!("../../../score.cu"));
        let sources = [
            (lists, &["Lists", "Observers"][..]),
            (select, &["Choice"]),
            (score, &["Scoring"]),
            (compact, &["Keeping", "Moves", "Changes", "Received", "Gating"]),
        ];
        for (text, names) in sources {
            for name in names {
                assert_eq!(in_rust(include_str!("lists.rs"), name), in_cuda_text(text, name), "{name}");
            }
        }
    }
}
