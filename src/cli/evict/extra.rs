//! What a file may hold besides `q`, `k` and `v`, loaded where the policy looks at it.

use super::Failure;
use crate::attention::Shape;
use crate::attention::rope::Frequencies;
use crate::eviction::Given;
use crate::memory::{Arena, Label};
use crate::policy::{Axis, Policy, Statistic};
use crate::tensor::Tensor;
use crate::tensor::file::TensorFile;

/// The tensors, and what the file says of its layers.
pub struct Extra {
    future: Option<Tensor>,
    pub(super) rope: Option<Frequencies>,
    q_pre: Option<Tensor>,
    k_pre: Option<Tensor>,
    w_o: Option<Tensor>,
    hidden: Option<Tensor>,
    /// The model's number of the layer that each sequence is; all of its layers in order where the file does not tell.
    layer_numbers: Vec<usize>,
    has_all_layers: bool,
    /// Numbers that an action uses in place of drawn ones, by position.
    pub(super) draws: Option<Vec<f32>>,
}

/// The queries to come, `[B, Hq, any, D]`.
pub fn future(file: &TensorFile, arena: &Arena, shape: &Shape) -> Result<Tensor, Failure> {
    fitting(file, arena, "q_future", [Some(shape.batch), Some(shape.q_heads), None, Some(shape.head_dim)])
}

/// A tensor of these extents, of which some may be any.
fn fitting(file: &TensorFile, arena: &Arena, name: &str, expected: [Option<usize>; 4]) -> Result<Tensor, Failure> {
    let tensor = file.load(name, arena, Label::Input)?;
    if tensor.dims().iter().zip(expected).all(|(&found, expected)| expected.is_none_or(|e| e == found)) {
        return Ok(tensor);
    }
    let expected = expected.map(|extent| extent.map_or("any".into(), |extent| extent.to_string()));
    let (found, expected) = (tensor.dims(), expected.join(", "));
    Err(Failure::usage(format!("{name} is {found:?}; it must be [{expected}]")))
}

impl Extra {
    pub fn load(
        file: &TensorFile,
        arena: &Arena,
        policy: &Policy,
        shape: &Shape,
        rope: Option<Frequencies>,
    ) -> Result<Self, Failure> {
        let Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim } = *shape;
        let rotated = policy.looks_at(Statistic::BeforeRope);
        let load =
            |name: &str, wanted: bool, expected| wanted.then(|| fitting(file, arena, name, expected)).transpose();
        let q = [Some(batch), Some(q_heads), Some(q_len), Some(head_dim)];
        let k = [Some(batch), Some(kv_heads), Some(kv_len), Some(head_dim)];
        let draws = policy.action.as_ref().is_some_and(|action| action.draws()) && file.has("draws");
        let draws = load("draws", draws, [Some(1), Some(1), Some(kv_len), Some(1)])?;
        let w_o = [Some(1), Some(q_heads), Some(head_dim), None];
        let hidden = [Some(batch), Some(1), Some(kv_len), None];
        let wants_layers = policy.parameters.extent(Axis::Layers).is_some();
        let listed = file.metadata("layers").filter(|_| wants_layers).map(|text| layer_numbers(&text, batch));
        let listed = listed.transpose()?;
        Ok(Extra {
            future: policy.looks_at(Statistic::FutureAttention).then(|| future(file, arena, shape)).transpose()?,
            rope,
            q_pre: load("q_pre", rotated && file.has("q_pre"), q)?,
            k_pre: load("k_pre", rotated && file.has("k_pre"), k)?,
            w_o: load("w_o", policy.looks_at(Statistic::Values) && file.has("w_o"), w_o)?,
            hidden: load("hidden", policy.looks_at(Statistic::HiddenStates), hidden)?,
            has_all_layers: listed.is_none(),
            layer_numbers: listed.unwrap_or_else(|| (0..batch).collect()),
            draws: draws.map(|tensor| tensor.to_f32()),
        })
    }

    /// Refuses parameters of another model than the tensors are of.
    pub fn check_parameters(&self, policy: &Policy, name: &str, shape: &Shape) -> Result<(), Failure> {
        let mut extents = vec![
            (Axis::QHeads, shape.q_heads),
            (Axis::KvHeads, shape.kv_heads),
            (Axis::HeadDim, shape.head_dim),
            (Axis::RopePairs, shape.head_dim / 2),
        ];
        extents.extend(self.hidden.as_ref().map(|hidden| (Axis::Hidden, hidden.dims()[3])));
        extents.extend(self.has_all_layers.then_some((Axis::Layers, shape.batch)));
        policy.check_parameters(name, &extents)?;
        let layers = policy.parameters.extent(Axis::Layers).unwrap_or(usize::MAX);
        match self.layer_numbers.iter().find(|&&number| number >= layers) {
            Some(number) => Err(Failure::usage(format!(
                "the policy file is of a model of {layers} layers; by the input's metadata it holds layer {number}"
            ))),
            None => Ok(()),
        }
    }

    pub fn given(&self) -> Given<'_> {
        Given {
            future: self.future.as_ref().map(Tensor::view),
            rope: self.rope.as_ref(),
            q_pre: self.q_pre.as_ref().map(Tensor::view),
            k_pre: self.k_pre.as_ref().map(Tensor::view),
            w_o: self.w_o.as_ref().map(Tensor::view),
            hidden: self.hidden.as_ref().map(Tensor::view),
            layer_numbers: &self.layer_numbers,
            ..Given::budget(0)
        }
    }
}

/// Reads `layers` of a file's metadata, one number for each of `batch` sequences.
fn layer_numbers(text: &str, batch: usize) -> Result<Vec<usize>, Failure> {
    let numbers: Option<Vec<usize>> = text.split(',').map(|layer| layer.trim().parse().ok()).collect();
    numbers.filter(|numbers| numbers.len() == batch).ok_or_else(|| {
        let expected = format!("it must be {batch} numbers with commas, one for each sequence");
        Failure::usage(format!("layers in the file's metadata is '{text}'; {expected}"))
    })
}
