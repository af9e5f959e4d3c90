//! The budget of an eviction step divided over lists, on the host, by the policy's own budget allocations.

use super::{DeviceContext, DevicePolicyError};
use crate::attention::{Forward, KvRows};
use crate::cache::cuda::DeviceCache;
use crate::device::cuda::DeviceBuffer;
use crate::format::KvFormat;
use crate::memory::{Arena, Label};
use crate::policy::{Context, Policy, PolicyError, Protect, Scored};
use crate::tensor::{DType, Rows, Tensor};

/// Whether the budget is divided by scores, which come to the host for that.
pub(crate) fn divides_by_scores(policy: &Policy) -> bool {
    policy.layers.reads_scores() || policy.heads.reads_scores()
}

/// Tokens retained of each list, by the policy's budget allocations on the host. `scores` and the highest that is scored are looked
/// at where these read them.
pub(crate) fn divide(
    policy: &Policy,
    context: &DeviceContext<'_>,
    cache: &DeviceCache,
    scores: &DeviceBuffer,
    highest_scored: f32,
) -> Result<Vec<usize>, DevicePolicyError> {
    // What the host holds for a moment is not the GPU's.
    let host = Arena::unlimited();
    let shape = context.shape(cache, 0);
    let places = match divides_by_scores(policy) {
        true => shape.batch * shape.kv_heads * shape.kv_len,
        false => 0,
    };
    let mut there = host.alloc::<f32>(Label::Policy, places).map_err(PolicyError::from)?;
    scores.read(bytemuck::cast_slice_mut(&mut there))?;
    let protect = policy.scorer.as_ref().map_or_else(Protect::default, |scorer| scorer.protect(context.budget_tokens));
    let mut scored = Scored::new(there, highest_scored, protect);
    let mut ranks = host.alloc::<f32>(Label::Policy, places).map_err(PolicyError::from)?;
    let kv = Lengths { lens: cache.lens(), heads: shape.kv_heads, dtype: cache.rows().dtype() };
    let none = Tensor::zeros(&host, Label::Policy, kv.dtype, shape.q_dims()).map_err(PolicyError::from)?;
    let seen = Context {
        call: Forward { shape, params: context.params, q: none.view(), kv: &kv, cpu: context.cpu },
        layers: context.layers,
        lse: &[],
        future: None,
        accumulated: None,
        gates: None,
        reconstructed: None,
        positions: &|_, slot| slot,
        seen_tokens: context.seen_tokens,
        before_rope: None,
        w_o: &[],
        layer_numbers: &[],
        budget_tokens: context.budget_tokens,
        seed: 0,
        arena: &host,
    };
    let totals = policy.layers.totals(&seen, &mut scored, &mut ranks)?;
    let mut counts = Vec::with_capacity(cache.shape().lists());
    for (sequence, &total) in totals.iter().enumerate() {
        counts.extend(policy.heads.counts(&seen, &mut scored, sequence, total, &mut ranks)?);
    }
    Ok(counts)
}

/// The lengths of lists whose rows lie in a GPU's memory: all that a budget allocation without needs asks of them.
struct Lengths<'a> {
    lens: &'a [usize],
    heads: usize,
    dtype: DType,
}

impl KvRows for Lengths<'_> {
    fn len(&self, batch: usize, head: usize) -> usize {
        self.lens[batch * self.heads + head]
    }

    fn format(&self) -> KvFormat {
        KvFormat::plain(self.dtype)
    }

    fn key_rows(&self, _: usize, _: usize, _: usize) -> Rows<'_> {
        unreachable!("`check_device` refuses budget allocations that look at keys")
    }

    fn value_rows(&self, _: usize, _: usize, _: usize) -> Rows<'_> {
        unreachable!("`check_device` refuses budget allocations that look at values")
    }
}
