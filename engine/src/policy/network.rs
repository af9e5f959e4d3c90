//! What gives a token its gates: for each layer a function of the token's hidden state, linear or with an inner layer.

use super::Learned;
use super::linear::dot;
use std::f32::consts::PI;

/// `gates = W f(x) + b` of each layer, where `f` is the identity or `gelu(U x + c)`.
pub struct Network {
    /// The inner layer, if there is one.
    pub inner: Option<Inner>,
    /// `[layers, Hkv, hidden]`, or of as many columns as the inner layer has rows.
    pub weight: Learned,
    /// `[layers, Hkv]`.
    pub bias: Learned,
}

/// An inner layer.
pub struct Inner {
    /// `[layers, inner, hidden]`.
    pub weight: Learned,
    /// `[layers, inner]`.
    pub bias: Learned,
}

impl Network {
    /// The gates `[Hkv]` of a token by its hidden state in a layer, `[hidden]`.
    pub fn gates(&self, layer: usize, hidden: &[f32], gates: &mut [f32]) {
        match &self.inner {
            None => apply(&self.weight, &self.bias, layer, hidden, gates),
            Some(inner) => {
                let mut between = vec![0.0; inner.bias.at(&[layer]).len()];
                apply(&inner.weight, &inner.bias, layer, hidden, &mut between);
                between.iter_mut().for_each(|x| *x = gelu(*x));
                apply(&self.weight, &self.bias, layer, &between, gates);
            }
        }
    }
}

fn apply(weight: &Learned, bias: &Learned, layer: usize, x: &[f32], y: &mut [f32]) {
    for (row, (y, bias)) in y.iter_mut().zip(bias.at(&[layer])).enumerate() {
        *y = bias + dot(weight.at(&[layer, row]), x);
    }
}

/// `x Phi(x)`, by the error function (arXiv 1606.08415), as PyTorch's.
pub(crate) fn gelu(x: f32) -> f32 {
    x * normal_share(x)
}

/// Its derivative.
pub(crate) fn gelu_slope(x: f32) -> f32 {
    normal_share(x) + x * (-0.5 * x * x).exp() / (2.0 * PI).sqrt()
}

/// `Phi(x)`, the normal distribution's share below `x`.
fn normal_share(x: f32) -> f32 {
    0.5 * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2))
}
