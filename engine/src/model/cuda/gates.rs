//! Gates of tokens on a GPU: what a policy's network ([`crate::policy::network`]) says of each token as it arrives, by the launches of
//! the model's own linear layers, and put into the cache beside the token.

use super::layers::Layers;
use super::weights::{DeviceLinear, DeviceMatrix};
use crate::cache::cuda::DeviceCache;
use crate::device::cuda::{CudaError, Device, DeviceBuffer, Runtime};
use crate::memory::{Arena, Label};
use crate::model::Config;
use crate::policy::Policy;
use crate::tensor::DType;

/// Which tokens come, and where they go.
pub(super) struct Place<'p> {
    pub runtime: &'p Runtime,
    pub layers: &'p Layers<'p>,
    pub cache: &'p DeviceCache,
    pub layer: usize,
    pub count: usize,
}

/// The networks of all layers, and room for what they say of one.
pub(super) struct DeviceGates {
    outer: Vec<DeviceLinear>,
    inner: Vec<DeviceLinear>,
    /// The inner layer's rows; empty without one.
    between: DeviceBuffer,
    /// `[rows, Hkv]`.
    gates: DeviceBuffer,
    /// Tokens between the one that decides and the one that is decided on.
    later: usize,
}

impl DeviceGates {
    /// Those of a policy, for at most `rows` tokens at once; `None` for a policy without gates.
    ///
    /// # Errors
    /// At the arena's limit, or when the GPU has no room.
    pub fn new(
        policy: &Policy,
        config: &Config,
        rows: usize,
        device: &Device,
        arena: &Arena,
    ) -> Result<Option<Self>, CudaError> {
        let network = policy.scorer.as_ref().and_then(|scorer| scorer.network());
        let Some((network, factor)) = network else { return Ok(None) };
        let room = |elements: usize| device.alloc(arena, Label::Policy, 4 * elements as u64);
        let copy = |values: &mut dyn Iterator<Item = f32>| {
            let values: Vec<f32> = values.collect();
            let mut there = room(values.len())?;
            there.write(bytemuck::cast_slice(&values))?;
            Ok::<_, CudaError>(there)
        };
        let linear = |[weight, bias]: [&[f32]; 2], factor: f32| {
            let (rows, width) = (bias.len(), weight.len() / bias.len());
            let data = copy(&mut weight.iter().map(|weight| factor * weight))?;
            let bias = copy(&mut bias.iter().map(|bias| factor * bias))?;
            Ok::<_, CudaError>(DeviceLinear {
                weight: DeviceMatrix { data, dtype: DType::F32, rows, width },
                bias: Some(bias),
            })
        };
        let outer = |layer: usize| linear([network.weight.at(&[layer]), network.bias.at(&[layer])], factor);
        let inner = network.inner.iter().flat_map(|inner| {
            (0..config.layers).map(|layer| linear([inner.weight.at(&[layer]), inner.bias.at(&[layer])], 1.0))
        });
        let inner = inner.collect::<Result<Vec<_>, _>>()?;
        let width = inner.first().map_or(0, |inner| inner.weight.rows);
        Ok(Some(DeviceGates {
            outer: (0..config.layers).map(outer).collect::<Result<_, _>>()?,
            inner,
            between: room(rows * width)?,
            gates: room(rows * config.kv_heads)?,
            later: policy.decided_by.later(),
        }))
    }

    /// Begins to work out the gates of the tokens of a `place`, which are in their lists, from hidden states `[count, hidden]`;
    /// `narrowed` is what [`Layers::linear`] takes.
    ///
    /// # Errors
    /// As [`Runtime::module`].
    pub fn begin(
        &mut self,
        place: &Place<'_>,
        hidden: &DeviceBuffer,
        narrowed: &mut DeviceBuffer,
    ) -> Result<(), CudaError> {
        let Place { runtime, layers, cache, layer, count } = *place;
        let DeviceGates { outer, inner, between, gates, later } = self;
        let x = match inner.get(layer) {
            Some(inner) => {
                layers.linear(hidden, [(inner, &mut *between)], count, narrowed)?;
                layers.gelu(between, count * inner.weight.rows)?;
                &*between
            }
            None => hidden,
        };
        layers.linear(x, [(&outer[layer], &mut *gates)], count, narrowed)?;
        let heads = cache.shape().kv_heads;
        cache.place_gates(runtime, layer * heads..(layer + 1) * heads, gates, count, *later)
    }
}
