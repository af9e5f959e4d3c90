//! A look at what a model computes while it runs: queries, keys, values and outputs of attention, and what the MLP reads, layer by layer.

/// What is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// Hidden states: inputs of attention behind their norm, one row at a time, `[hidden]`.
    Hidden,
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
    /// Inputs of the MLP behind their norm, one row at a time, `[hidden]`.
    MlpInput,
    /// What the MLP's second half reads, one row at a time, `[ffn]`.
    MlpInner,
}

/// Looks on while a decoder works.
pub trait Hook: Sync {
    /// Is shown rows of a layer, in the order of their tokens.
    fn rows(&self, layer: usize, what: Activation, rows: &[f32]);

    /// The last layer that is looked at, where what the model says behind it is of no interest: neither blocks above it nor
    /// logits are computed then.
    fn last_layer(&self) -> Option<usize> {
        None
    }
}
