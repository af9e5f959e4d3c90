//! Pools along the sequence: neighbours of an important token are important too.

use crate::named::{Named, NamedError};

/// What a pool takes of its window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The mean, with zeros past both ends (torch's `avg_pool1d` with same padding).
    Average,
    /// The largest (torch's `max_pool1d` with same padding).
    Max,
}

/// A centred pool of stride 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    kind: Kind,
    width: usize,
}

impl Pool {
    /// The pool of a method with the parameters `kernel` and, where it has it, `pool=avg|max`.
    pub fn of(named: &Named, kernel: usize, kind: Kind) -> Result<Self, NamedError> {
        let width = named.count("kernel", kernel, 1)?;
        if width.is_multiple_of(2) {
            return Err(named.wrong("kernel", "odd, so that the pool is centred".into()));
        }
        let kind = match named.text("pool") {
            None => kind,
            Some("avg") => Kind::Average,
            Some("max") => Kind::Max,
            Some(_) => return Err(named.wrong("pool", "avg or max".into())),
        };
        Ok(Pool { kind, width })
    }

    /// Its width, and whether it takes the largest.
    pub fn shape(&self) -> (usize, bool) {
        (self.width, matches!(self.kind, Kind::Max))
    }

    /// Pools `source` into `target` of the same length.
    pub fn apply(&self, source: &[f32], target: &mut [f32]) {
        let half = self.width / 2;
        for (index, out) in target.iter_mut().enumerate() {
            let range = index.saturating_sub(half)..source.len().min(index + half + 1);
            let window = source[range].iter();
            *out = match self.kind {
                Kind::Average => window.sum::<f32>() / self.width as f32,
                Kind::Max => window.copied().fold(f32::NEG_INFINITY, f32::max),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_are_centred_and_do_not_look_past_the_ends() {
        let pooled = |kind, width| {
            let mut target = [0.0; 5];
            Pool { kind, width }.apply(&[3.0, 0.0, 0.0, 6.0, 9.0], &mut target);
            target
        };
        assert_eq!(pooled(Kind::Average, 3), [1.0, 1.0, 2.0, 5.0, 5.0]);
        assert_eq!(pooled(Kind::Max, 3), [3.0, 3.0, 6.0, 9.0, 9.0]);
        assert_eq!(pooled(Kind::Max, 1), [3.0, 0.0, 0.0, 6.0, 9.0]);
        let mut negative = [0.0; 2];
        Pool { kind: Kind::Max, width: 5 }.apply(&[-3.0, -2.0], &mut negative);
        assert_eq!(negative, [-2.0, -2.0]);
    }
}
