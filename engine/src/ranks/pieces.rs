//! Attention of some queries over some keys of a sequence, as calls of kernels.
//!
//! Kernels align a causal mask at the bottom right: the last query sees the last key. Of two chunks of a sequence there is a
//! part of the queries that sees all of the keys, which is a call without a mask, and a part on the diagonal, which is a call
//! that is so aligned once the keys that nobody sees are cut off. Neighbouring parts are joined: fewer calls of longer tiles.

use crate::attention::{KvRows, Params, Shape};
use crate::format::KvFormat;
use crate::tensor::Rows;
use std::ops::Range;

/// Some keys of each list, or of one list alone.
pub struct Part<'a> {
    /// All lists.
    pub kv: &'a dyn KvRows,
    /// The sequence and KV head of the only list, where there is one.
    pub list: Option<[usize; 2]>,
    /// The keys.
    pub keys: Range<usize>,
}

impl KvRows for Part<'_> {
    fn len(&self, _batch: usize, _head: usize) -> usize {
        self.keys.len()
    }

    fn format(&self) -> KvFormat {
        self.kv.format()
    }

    fn key_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        let [batch, head] = self.list.unwrap_or([batch, head]);
        self.kv.key_rows(batch, head, self.keys.start + start).first(self.keys.len() - start)
    }

    fn value_rows(&self, batch: usize, head: usize, start: usize) -> Rows<'_> {
        let [batch, head] = self.list.unwrap_or([batch, head]);
        self.kv.value_rows(batch, head, self.keys.start + start).first(self.keys.len() - start)
    }
}

/// One call of a kernel. Queries and keys are counted in the tensors of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Queries.
    pub q: Range<usize>,
    /// Keys.
    pub k: Range<usize>,
    /// Whether a causal mask lies over it.
    pub causal: bool,
}

impl Piece {
    /// Its extents and options in a problem.
    pub fn of(&self, shape: Shape, params: Params) -> (Shape, Params) {
        let shape = Shape { q_len: self.q.len(), kv_len: self.k.len(), ..shape };
        (shape, Params { causal: self.causal, ..params })
    }
}

/// The calls for the queries and keys in these ranges of a sequence with `[Lq, Lk]` of them. The ranges of each lie one behind another
/// in the tensors.
pub fn pieces(causal: bool, [q_len, kv_len]: [usize; 2], q: &[Range<usize>], k: &[Range<usize>]) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut q_start = 0;
    for queries in q {
        let mut k_start = 0;
        for keys in k {
            for piece in of_chunks(causal, [q_len, kv_len], queries, keys) {
                let moved =
                    |range: Range<usize>, from: usize, to: usize| range.start - from + to..range.end - from + to;
                let piece = Piece {
                    q: moved(piece.q, queries.start, q_start),
                    k: moved(piece.k, keys.start, k_start),
                    causal: piece.causal,
                };
                join(&mut pieces, piece);
            }
            k_start += keys.len();
        }
        q_start += queries.len();
    }
    pieces
}

/// The calls for a chunk of queries and a chunk of keys, both counted in the sequence.
fn of_chunks(causal: bool, [q_len, kv_len]: [usize; 2], q: &Range<usize>, k: &Range<usize>) -> Vec<Piece> {
    if !causal {
        return vec![Piece { q: q.clone(), k: k.clone(), causal: false }];
    }
    // Query `i` sees keys before `i + 1 + Lk - Lq`. Those from `first` on see some of the chunk, those from `beyond` on
    // keys behind it too.
    let sees = |end: usize| (end + q_len).saturating_sub(kv_len + 1);
    let first = sees(k.start + 1).clamp(q.start, q.end);
    let beyond = sees(k.end + 1).clamp(first, q.end);
    let end = (beyond + kv_len).saturating_sub(q_len).clamp(k.start, k.end);
    [Piece { q: first..beyond, k: k.start..end, causal: true }, Piece { q: beyond..q.end, k: k.clone(), causal: false }]
        .into_iter()
        .filter(|piece| !piece.q.is_empty() && !piece.k.is_empty())
        .collect()
}

/// Adds a piece, joined with one before it where one call does for both.
fn join(pieces: &mut Vec<Piece>, piece: Piece) {
    for before in pieces.iter_mut().filter(|before| !before.causal) {
        if before.q == piece.q && before.k.end == piece.k.start {
            before.k.end = piece.k.end;
            before.causal = piece.causal;
            return;
        }
        if before.k == piece.k && before.q.end == piece.q.start && !piece.causal {
            before.q.end = piece.q.end;
            return;
        }
    }
    pieces.push(piece);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::Params;
    use crate::ranks::{Placement, Shards};
    use proptest::prelude::*;

    proptest! {
        /// Every pair that the mask lets through is in exactly one piece of one pair of ranks, and no other is in any.
        #[test]
        fn pieces_cover_what_is_visible_once(
            lens in [2usize..40, 2usize..40], ranks in 1usize..5, zigzag: bool, causal: bool,
        ) {
            let placement = if zigzag { Placement::ZigZag } else { Placement::Contiguous };
            let (Ok(q), Ok(k)) = (Shards::new(lens[0], ranks, placement), Shards::new(lens[1], ranks, placement)) else {
                return Ok(());
            };
            let params = Params::new(1, causal);
            let mut seen = vec![0; lens[0] * lens[1]];
            for (of_q, of_k) in (0..ranks).flat_map(|a| (0..ranks).map(move |b| (a, b))) {
                let queries: Vec<usize> = q.of(of_q).into_iter().flatten().collect();
                let keys: Vec<usize> = k.of(of_k).into_iter().flatten().collect();
                for piece in pieces(causal, lens, &q.of(of_q), &k.of(of_k)) {
                    let params = Params { causal: piece.causal, ..params };
                    for i in 0..piece.q.len() {
                        for j in params.visible(i, piece.q.len(), piece.k.len()) {
                            seen[queries[piece.q.start + i] * lens[1] + keys[piece.k.start + j]] += 1;
                        }
                    }
                }
            }
            for i in 0..lens[0] {
                let visible = params.visible(i, lens[0], lens[1]);
                for j in 0..lens[1] {
                    prop_assert_eq!(seen[i * lens[1] + j], usize::from(visible.contains(&j)), "query {} key {}", i, j);
                }
            }
        }
    }

    #[test]
    fn a_step_of_a_zigzag_ring_is_one_call_and_the_diagonal_two() {
        let shards = Shards::new(64, 4, Placement::ZigZag).unwrap();
        let of = |rank: usize, source: usize| pieces(true, [64; 2], &shards.of(rank), &shards.of(source));
        assert_eq!(of(1, 0), [Piece { q: 0..16, k: 0..8, causal: false }]);
        assert_eq!(of(1, 2), [Piece { q: 8..16, k: 0..16, causal: false }]);
        let own = [Piece { q: 0..8, k: 0..8, causal: true }, Piece { q: 8..16, k: 0..16, causal: true }];
        assert_eq!(of(1, 1), own);
        assert_eq!(of(3, 3), [Piece { q: 0..16, k: 0..16, causal: true }]);
    }
}
