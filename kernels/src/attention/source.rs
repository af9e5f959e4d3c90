//! Where keys and values come from: two tensors, or a cache whose heads keep different tokens.

use super::AttentionError;
use crate::format::KvFormat;
use crate::tensor::{Rows, TensorView};
use std::ops::Range;

/// Keys and values of `[B, Hkv]` lists of rows. Lists may differ in length; kernels read them in order.
pub trait KvRows: Sync {
    /// Rows in the list of `(batch, KV head)`.
    fn len(&self, batch: usize, head: usize) -> usize;

    /// Rows of a list whose tokens stand `behind` tokens or more behind its last one. Where tokens between have left, this is fewer
    /// than are before the last `behind` rows: an earlier query sees no more of the list than these.
    fn before(&self, batch: usize, head: usize, behind: usize) -> usize {
        self.len(batch, head).saturating_sub(behind)
    }

    /// How rows are kept.
    fn format(&self) -> KvFormat;

    /// Key rows from `start` on, `[_, D]`: as many as are uniformly strided in memory, at least one.
    fn key_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_>;

    /// Value rows, as [`KvRows::key_rows`].
    fn value_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_>;

    /// What is added to the logits of a list's keys, where they have a bias behind a window. Read by `reference`, `naive` and
    /// `tiled`; `decode` refuses it.
    fn bias(&self, _batch: usize, _head: usize) -> Option<KeyBias<'_>> {
        None
    }

    /// What tokens of a cache carry to be added to their logits, behind scale and soft-cap and for every query: those from
    /// `start` on, natural logarithms, as many as lie behind one another, at least one. Read by every forward pass and by
    /// attention statistics, by no backward pass; lists have it instead of [`KvRows::bias`], or neither.
    fn token_bias(&self, _batch: usize, _head: usize, _start: usize) -> Option<&[f32]> {
        None
    }

    /// Key rows `start .. start + count` in f32, `[count, D]`; `scratch` holds as much and may be used for it.
    fn keys<'s>(&'s self, batch: usize, head: usize, start: usize, count: usize, scratch: &'s mut [f32]) -> &'s [f32] {
        widened(|row| self.key_rows(batch, head, row), start, count, scratch)
    }

    /// Value rows, as [`KvRows::keys`].
    fn values<'s>(
        &'s self,
        batch: usize,
        head: usize,
        start: usize,
        count: usize,
        scratch: &'s mut [f32],
    ) -> &'s [f32] {
        widened(|row| self.value_rows(batch, head, row), start, count, scratch)
    }
}

/// A bias of the keys of a list: added to their logits, behind scale and soft-cap, for queries that lie at least `window`
/// behind them. Queries that are nearer, and those before the key, see the key as it is.
#[derive(Debug, Clone, Copy)]
pub struct KeyBias<'a> {
    /// Natural logarithm of a factor of the probability before normalisation, `[Lk]`.
    pub values: &'a [f32],
    /// The bias of key `j` counts for the query at position `p` if `p - j >= window`.
    pub window: usize,
}

impl<'a> KeyBias<'a> {
    /// The biases that count for query `i`: those of the first keys.
    pub fn far(&self, i: usize, q_len: usize, kv_len: usize) -> &'a [f32] {
        &self.values[..(i + 1 + kv_len).saturating_sub(q_len.saturating_add(self.window)).min(kv_len)]
    }
}

/// The biases that the tokens `keys` of a list carry, at most `N` of them, zeros behind them; `None` where they carry none.
pub fn token_biases<const N: usize>(
    kv: &dyn KvRows,
    [batch, head]: [usize; 2],
    keys: Range<usize>,
) -> Option<[f32; N]> {
    if keys.is_empty() {
        return None;
    }
    kv.token_bias(batch, head, keys.start)?;
    let (mut biases, mut filled) = ([0.0; N], 0);
    while filled < keys.len() {
        let run = kv.token_bias(batch, head, keys.start + filled)?;
        let count = run.len().min(keys.len() - filled);
        biases[filled..filled + count].copy_from_slice(&run[..count]);
        filled += count;
    }
    Some(biases)
}

/// Rows in f32: the memory itself where they lie there so, else a copy.
fn widened<'s>(rows_from: impl Fn(usize) -> Rows<'s>, start: usize, count: usize, scratch: &'s mut [f32]) -> &'s [f32] {
    let mut next = start;
    while next < start + count {
        let rows = rows_from(next).first(start + count - next);
        if let (true, Some(rows)) = (rows.count() == count, rows.as_f32()) {
            return rows;
        }
        rows.widen(&mut scratch[(next - start) * rows.width()..]);
        next += rows.count();
    }
    &scratch[..count * rows_from(start).width()]
}

/// Keys and values in two tensors `[B, Hkv, Lk, D]`.
#[derive(Clone, Copy)]
pub struct DenseKv<'a> {
    k: TensorView<'a>,
    v: TensorView<'a>,
    /// `[B, Hkv, Lk]`.
    bias: Option<KeyBias<'a>>,
}

impl<'a> DenseKv<'a> {
    /// Pairs the tensors.
    ///
    /// # Errors
    /// When shapes or element types differ.
    pub fn new(k: TensorView<'a>, v: TensorView<'a>) -> Result<Self, AttentionError> {
        if k.dims() != v.dims() || k.dtype() != v.dtype() {
            return Err(AttentionError::Shape(format!(
                "k is {} {:?} and v is {} {:?}; they must agree",
                k.dtype(),
                k.dims(),
                v.dtype(),
                v.dims()
            )));
        }
        Ok(DenseKv { k, v, bias: None })
    }

    /// The same with a bias of every key, `values` `[B, Hkv, Lk]`.
    ///
    /// # Panics
    /// When there are not as many values as keys.
    pub fn with_bias(self, bias: KeyBias<'a>) -> Self {
        let [batch, heads, len, _] = self.k.dims();
        assert_eq!(bias.values.len(), batch * heads * len, "every key has a bias");
        DenseKv { bias: Some(bias), ..self }
    }
}

impl KvRows for DenseKv<'_> {
    fn len(&self, _batch: usize, _head: usize) -> usize {
        self.k.dims()[2]
    }

    fn format(&self) -> KvFormat {
        KvFormat::plain(self.k.dtype())
    }

    fn key_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        self.k.head(batch, head, start)
    }

    fn value_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        self.v.head(batch, head, start)
    }

    fn bias(&self, batch: usize, head: usize) -> Option<KeyBias<'_>> {
        let [_, heads, len, _] = self.k.dims();
        self.bias.map(|bias| KeyBias { values: &bias.values[(batch * heads + head) * len..][..len], ..bias })
    }
}
