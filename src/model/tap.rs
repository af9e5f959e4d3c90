//! A look at what a model computes while it runs: queries, keys, values and outputs of attention, layer by layer.

/// What is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tapped {
    /// Queries before RoPE, `[rows, Hq * D]`.
    QBeforeRope,
    /// Keys before RoPE, `[rows, Hkv * D]`.
    KBeforeRope,
    /// Queries after RoPE.
    Q,
    /// Keys after RoPE.
    K,
    /// Values, `[rows, Hkv * D]`.
    V,
    /// Outputs of attention before the output projection, one row at a time, `[Hq * D]`.
    O,
}

/// Is shown rows of a layer, in the order of their tokens.
pub type Tap<'a> = Box<dyn FnMut(usize, Tapped, &[f32]) + 'a>;
