//! Rows that lie in runs: what a memory hands to an attention kernel, read where they lie.

use crate::attention::KvRows;
use crate::format::KvFormat;
use crate::tensor::{DType, Rows};

/// Rows of a head that lie behind one another.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// Keys after RoPE, `[_, D]`.
    pub k: &'a [f32],
    /// Values, `[_, D]`.
    pub v: &'a [f32],
}

/// Runs of each KV head of one sequence, in the order in which kernels read them.
pub struct Runs<'a> {
    head_dim: usize,
    /// Of each head: runs that are not empty, each with its first row's number.
    heads: Vec<Vec<(usize, Run<'a>)>>,
    /// Keys that were looked at besides, to choose which rows these are, over all heads.
    looked_at: usize,
}

impl<'a> Runs<'a> {
    /// The runs of each head; empty ones are left out.
    ///
    /// # Panics
    /// When a run has not as many keys as values.
    pub fn new(head_dim: usize, heads: impl IntoIterator<Item = impl IntoIterator<Item = Run<'a>>>) -> Self {
        let head = |runs| {
            let mut next = 0;
            let mut numbered = Vec::new();
            for run in runs {
                let Run { k, v } = run;
                assert_eq!(k.len(), v.len(), "a run has as many keys as values");
                if !k.is_empty() {
                    numbered.push((next, run));
                    next += k.len() / head_dim;
                }
            }
            numbered
        };
        Runs { head_dim, heads: heads.into_iter().map(|runs| head(runs.into_iter())).collect(), looked_at: 0 }
    }

    /// The same, chosen by so many keys, over all heads.
    pub fn chosen_by(self, keys: usize) -> Self {
        Runs { looked_at: keys, ..self }
    }

    /// Bytes that are read: keys and values, those that several heads share once, and keys that were looked at to choose them.
    pub fn bytes(&self) -> u64 {
        let mut runs: Vec<&[f32]> = self.heads.iter().flatten().flat_map(|(_, run)| [run.k, run.v]).collect();
        runs.sort_by_key(|run| (run.as_ptr(), run.len()));
        runs.dedup_by_key(|run| (run.as_ptr(), run.len()));
        let elements = runs.iter().map(|run| run.len()).sum::<usize>() + self.looked_at * self.head_dim;
        (elements * size_of::<f32>()) as u64
    }

    /// Rows of the longest head.
    pub fn max_len(&self) -> usize {
        (0..self.heads.len()).map(|head| self.len(0, head)).max().unwrap_or(0)
    }

    fn rows(&self, head: usize, start: usize, part: impl Fn(&Run<'a>) -> &'a [f32]) -> Rows<'_> {
        let runs = &self.heads[head];
        let (first, run) = &runs[runs.partition_point(|(first, _)| *first <= start) - 1];
        let rows = &part(run)[(start - first) * self.head_dim..];
        Rows::contiguous(DType::F32, bytemuck::cast_slice(rows), [rows.len() / self.head_dim, self.head_dim])
    }
}

impl KvRows for Runs<'_> {
    fn len(&self, _batch: usize, head: usize) -> usize {
        self.heads[head].last().map_or(0, |(first, run)| first + run.k.len() / self.head_dim)
    }

    fn format(&self) -> KvFormat {
        KvFormat::plain(DType::F32)
    }

    fn key_rows(&self, _batch: usize, head: usize, start: usize) -> Rows<'_> {
        self.rows(head, start, |run| run.k)
    }

    fn value_rows(&self, _batch: usize, head: usize, start: usize) -> Rows<'_> {
        self.rows(head, start, |run| run.v)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_those_of_their_runs() {
        let values: Vec<f32> = (0..12).map(|index| index as f32).collect();
        let run = |rows: std::ops::Range<usize>| Run {
            k: &values[2 * rows.start..2 * rows.end],
            v: &values[..2 * rows.len()],
        };
        let runs = Runs::new(2, [vec![run(3..5), run(0..0), run(1..2)], vec![run(5..6)]]);
        assert_eq!((runs.len(0, 0), runs.len(0, 1), runs.max_len()), (3, 1, 3));
        let keys = |head, start| runs.key_rows(0, head, start).as_f32().unwrap().to_vec();
        assert_eq!((keys(0, 0), keys(0, 1)), (vec![6.0, 7.0, 8.0, 9.0], vec![8.0, 9.0]));
        assert_eq!((keys(0, 2), keys(1, 0)), (vec![2.0, 3.0], vec![10.0, 11.0]));
        assert_eq!(runs.value_rows(0, 0, 2).as_f32().unwrap(), [0.0, 1.0]);
        let mut scratch = [0.0; 6];
        assert_eq!(runs.keys(0, 0, 0, 3, &mut scratch), [6.0, 7.0, 8.0, 9.0, 2.0, 3.0]);
    }
}
