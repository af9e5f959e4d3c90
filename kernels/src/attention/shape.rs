//! The extents of a problem and the options that give it its meaning.

use super::AttentionError;
use std::ops::Range;

/// Extents of an attention problem: `q` is `[batch, q_heads, q_len, head_dim]`, `k` and `v` are
/// `[batch, kv_heads, kv_len, head_dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// `B`: sequences.
    pub batch: usize,
    /// `Hq`: query heads, a multiple of `kv_heads`.
    pub q_heads: usize,
    /// `Hkv`: key and value heads.
    pub kv_heads: usize,
    /// `Lq`: queries.
    pub q_len: usize,
    /// `Lk`: keys.
    pub kv_len: usize,
    /// `D`: elements of a head, 1 to 256.
    pub head_dim: usize,
}

impl Shape {
    /// Largest head dim that kernels accept.
    pub const MAX_HEAD_DIM: usize = 256;

    /// The extents of three tensors.
    ///
    /// # Errors
    /// When they do not fit together.
    pub fn of(q: [usize; 4], k: [usize; 4], v: [usize; 4]) -> Result<Self, AttentionError> {
        let wrong = |what: &str| {
            Err(AttentionError::Shape(format!(
                "{what}: q is {q:?}, k is {k:?}, v is {v:?}; q must be [B, Hq, Lq, D], k and v [B, Hkv, Lk, D]"
            )))
        };
        if k != v {
            return wrong("k and v differ in shape");
        }
        if q[0] != k[0] {
            return wrong("q and k differ in batch");
        }
        if q[3] != k[3] {
            return wrong("q and k differ in head dim");
        }
        let shape = Shape { batch: q[0], q_heads: q[1], kv_heads: k[1], q_len: q[2], kv_len: k[2], head_dim: q[3] };
        shape.check()?;
        Ok(shape)
    }

    /// Says whether the extents make a problem.
    ///
    /// # Errors
    /// When one is zero, the head dim exceeds 256, or `q_heads` is no multiple of `kv_heads`.
    pub fn check(&self) -> Result<(), AttentionError> {
        let extents = [
            ("batch", self.batch),
            ("query heads", self.q_heads),
            ("KV heads", self.kv_heads),
            ("query length", self.q_len),
            ("key length", self.kv_len),
            ("head dim", self.head_dim),
        ];
        if let Some((name, _)) = extents.iter().find(|(_, extent)| *extent == 0) {
            return Err(AttentionError::Shape(format!("{name} is 0; every extent must be at least 1")));
        }
        if self.head_dim > Self::MAX_HEAD_DIM {
            return Err(AttentionError::Shape(format!("head dim is {}; at most 256 is supported", self.head_dim)));
        }
        if !self.q_heads.is_multiple_of(self.kv_heads) {
            return Err(AttentionError::Shape(format!(
                "{} query heads cannot share {} KV heads evenly; Hq must be a multiple of Hkv",
                self.q_heads, self.kv_heads
            )));
        }
        Ok(())
    }

    /// `G`: query heads that share a KV head.
    pub fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }

    /// `[B, Hq, Lq, D]`.
    pub fn q_dims(&self) -> [usize; 4] {
        [self.batch, self.q_heads, self.q_len, self.head_dim]
    }

    /// `[B, Hkv, Lk, D]`.
    pub fn kv_dims(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.kv_len, self.head_dim]
    }

    /// Query rows: `B * Hq * Lq`.
    pub fn rows(&self) -> usize {
        self.batch * self.q_heads * self.q_len
    }

    /// Elements of a materialised score matrix: `B * Hq * Lq * Lk`.
    pub fn scores(&self) -> usize {
        self.rows() * self.kv_len
    }

    /// Floating-point operations of a forward pass: `4 D` for each visible pair of query and key (FlashAttention-3's
    /// benchmark formula); softmax is not counted. A backward pass is 2.5 times this.
    pub fn flops(&self, params: &Params) -> u64 {
        let pairs: u64 = (0..self.q_len).map(|i| params.visible(i, self.q_len, self.kv_len).len() as u64).sum();
        4 * self.head_dim as u64 * pairs * (self.batch * self.q_heads) as u64
    }
}

/// What a score becomes before the softmax: `mask(cap * tanh(scale * q.k / cap))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Params {
    /// Factor of the inner product; `1 / sqrt(D)` unless told.
    pub scale: f32,
    /// Soft-cap of the logits, after the scale and before the mask.
    pub softcap: Option<f32>,
    /// Query `i` sees keys `j <= i + Lk - Lq` (bottom-right aligned).
    pub causal: bool,
    /// A query sees its own key (`i + Lk - Lq`) and the `window - 1` before it.
    pub window: Option<usize>,
}

impl Params {
    /// Scale `1 / sqrt(head_dim)`, no soft-cap, no window.
    pub fn new(head_dim: usize, causal: bool) -> Self {
        Params { scale: 1.0 / (head_dim as f32).sqrt(), softcap: None, causal, window: None }
    }

    /// Says whether the options are in range.
    ///
    /// # Errors
    /// When the scale is not finite, the soft-cap not positive, one of them too large or too small for f32, or the window zero.
    pub fn check(&self) -> Result<(), AttentionError> {
        if !self.scale.is_finite() {
            return Err(AttentionError::Option(format!(
                "scale is {}; it must be finite (f32 ends at 3.4e38)",
                self.scale
            )));
        }
        if let Some(cap) = self.softcap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
            return Err(AttentionError::Option(format!("soft-cap is {cap}; it must be finite and above 0")));
        }
        // What the kernels multiply by, one after the other.
        if !(self.scale * std::f32::consts::LOG2_E).is_finite() {
            return Err(AttentionError::Option(format!(
                "scale is {}; it must be at most 2.3e38, either way",
                self.scale
            )));
        }
        if let Some(cap) = self.softcap.filter(|cap| !(cap * std::f32::consts::LOG2_E).is_finite()) {
            return Err(AttentionError::Option(format!("soft-cap is {cap}; it must be at most 2.3e38")));
        }
        if let Some(cap) = self.softcap.filter(|cap| !(self.scale / cap).is_finite()) {
            return Err(AttentionError::Option(format!(
                "soft-cap is {cap} with a scale of {}; their quotient must be finite (f32 ends at 3.4e38)",
                self.scale
            )));
        }
        if self.window == Some(0) {
            return Err(AttentionError::Option("window is 0; it must be at least 1 (the query's own key)".into()));
        }
        Ok(())
    }

    /// Keys that query `i` sees: a range of `0..kv_len`, perhaps empty.
    pub fn visible(&self, i: usize, q_len: usize, kv_len: usize) -> Range<usize> {
        if !self.causal && self.window.is_none() {
            return 0..kv_len;
        }
        // `own` is one past the query's own key; it is 0 or less for queries before the first key.
        let end = (i + 1 + kv_len).saturating_sub(q_len).min(kv_len);
        let start =
            self.window.map_or(0, |window| (i + 1 + kv_len).saturating_sub(q_len.saturating_add(window)).min(end));
        start..end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visibility_is_aligned_to_the_bottom_right() {
        let causal = Params::new(4, true);
        let windowed = Params { window: Some(2), ..causal };
        let cases = [
            (causal, 0, 3, 3, 0..1),
            (causal, 2, 3, 3, 0..3),
            (causal, 0, 1, 5, 0..5),
            (causal, 0, 5, 3, 0..0),
            (causal, 1, 5, 3, 0..0),
            (causal, 2, 5, 3, 0..1),
            (windowed, 0, 3, 3, 0..1),
            (windowed, 2, 3, 3, 1..3),
            (windowed, 0, 1, 5, 3..5),
            (windowed, 0, 5, 3, 0..0),
            (Params { window: Some(9), ..causal }, 1, 2, 3, 0..3),
            (Params { window: Some(usize::MAX), ..causal }, 1, 2, 3, 0..3),
            (Params::new(4, false), 0, 5, 3, 0..3),
        ];
        for (params, i, q_len, kv_len, expected) in cases {
            assert_eq!(params.visible(i, q_len, kv_len), expected, "query {i} of {q_len}, {kv_len} keys");
        }
    }

    #[test]
    fn flops_count_only_visible_pairs() {
        let shape = Shape { batch: 2, q_heads: 4, kv_heads: 2, q_len: 3, kv_len: 5, head_dim: 8 };
        assert_eq!(shape.flops(&Params::new(8, false)), 4 * 8 * 15 * 8);
        assert_eq!(shape.flops(&Params::new(8, true)), 4 * 8 * (3 + 4 + 5) * 8);
    }

    #[test]
    fn wrong_shapes_are_named() {
        let error = Shape::of([1, 3, 4, 8], [1, 2, 4, 8], [1, 2, 4, 8]).unwrap_err().to_string();
        assert!(error.contains("3 query heads cannot share 2 KV heads"), "{error}");
        assert!(Shape::of([1, 2, 4, 8], [1, 2, 4, 8], [1, 2, 5, 8]).unwrap_err().to_string().contains("k and v"));
        assert!(Shape::of([1, 2, 4, 300], [1, 2, 4, 300], [1, 2, 4, 300]).is_err());
        assert!(Shape::of([1, 2, 0, 8], [1, 2, 4, 8], [1, 2, 4, 8]).is_err());
    }
}
