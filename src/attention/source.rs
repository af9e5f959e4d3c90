//! Where keys and values come from: two tensors, or a cache whose heads keep different tokens.

use super::AttentionError;
use crate::format::KvFormat;
use crate::tensor::{Rows, TensorView};

/// Keys and values of `[B, Hkv]` lists of rows. Lists may differ in length; kernels read them in order.
pub trait KvRows: Sync {
    /// Rows in the list of `(batch, KV head)`.
    fn len(&self, batch: usize, head: usize) -> usize;

    /// How rows are kept.
    fn format(&self) -> KvFormat;

    /// Key rows from `start` on, `[_, D]`: as many as are uniformly strided in memory, at least one.
    fn key_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_>;

    /// Value rows, as [`KvRows::key_rows`].
    fn value_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_>;

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
        Ok(DenseKv { k, v })
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
}
