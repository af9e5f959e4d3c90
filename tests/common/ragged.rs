//! Lists of keys and values whose lengths differ from head to head, as a cache after eviction has them.

use kvsieve::attention::KvRows;
use kvsieve::format::KvFormat;
use kvsieve::tensor::{DType, Rows, Strided};

/// `[B, Hkv]` lists of f32 rows.
pub struct Ragged {
    kv_heads: usize,
    width: usize,
    /// Keys of each list, `[len, D]`.
    pub k: Vec<Vec<f32>>,
    /// Values of each list, `[len, D]`.
    pub v: Vec<Vec<f32>>,
}

impl Ragged {
    /// The first `lens[list]` rows of each list of dense `[B, Hkv, Lk, D]` tensors.
    pub fn prefixes(kv_heads: usize, width: usize, kv_len: usize, k: &[f32], v: &[f32], lens: &[usize]) -> Self {
        let cut = |values: &[f32]| -> Vec<Vec<f32>> {
            let lists = values.chunks_exact(kv_len * width).zip(lens);
            lists.map(|(list, &len)| list[..len * width].to_vec()).collect()
        };
        Ragged { kv_heads, width, k: cut(k), v: cut(v) }
    }

    fn rows<'s>(&'s self, lists: &'s [Vec<f32>], [batch, head, start]: [usize; 3]) -> Rows<'s> {
        let list = batch * self.kv_heads + head;
        let rows = &lists[list][start * self.width..];
        let count = rows.len() / self.width;
        // Odd lists come in short runs, even ones in one piece: kernels must cope with both.
        let run = if list.is_multiple_of(2) { count } else { count.min(7 - start % 7) };
        Rows::F32(Strided::new(rows, [self.width, 1], run, self.width))
    }
}

impl KvRows for Ragged {
    fn len(&self, batch: usize, head: usize) -> usize {
        self.k[batch * self.kv_heads + head].len() / self.width
    }

    fn format(&self) -> KvFormat {
        KvFormat::plain(DType::F32)
    }

    fn key_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        self.rows(&self.k, [batch, head, start])
    }

    fn value_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        self.rows(&self.v, [batch, head, start])
    }
}
