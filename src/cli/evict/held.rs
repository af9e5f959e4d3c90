//! Keys and values in a cache, where a policy changes what is retained or chooses what a step reads.

use super::Failure;
use super::extra::Extra;
use crate::attention::Forward;
use crate::cache::{CacheShape, Column, PAGE_TOKENS, PagedCache};
use crate::device::Cpu;
use crate::eviction::Retained;
use crate::format::KvFormat;
use crate::memory::Arena;
use crate::policy::Policy;
use crate::policy::action::{Asked, Fold};
use crate::policy::sparse::{Lists, Start};
use crate::tensor::Tensor;

/// What a step reads: what was chosen, for each list, and KV bytes.
pub struct Read {
    pub(super) name: &'static str,
    pub(super) chosen: Vec<Vec<i64>>,
    pub(super) bytes: u64,
}

/// Queries, keys and values, and the policy that is to shrink or read them.
pub struct Held<'a> {
    pub(super) policy: &'a Policy,
    pub(super) call: &'a Forward<'a>,
    pub(super) k: &'a Tensor,
    pub(super) v: &'a Tensor,
    /// What they are kept in, if not as they are.
    pub(super) format: Option<KvFormat>,
    pub(super) arena: &'a Arena,
}

impl Held<'_> {
    /// A cache of the keys and values.
    fn cache(&self) -> Result<PagedCache, Failure> {
        let format = self.format.unwrap_or(self.k.dtype().into());
        filled(self.arena, [self.k, self.v], format, self.policy.columns())
    }

    /// What is retained, where the policy or the format changes it.
    pub fn shrink(&self, retained: &Retained, extra: &Extra, seed: u64) -> Result<Option<PagedCache>, Failure> {
        if self.policy.action.is_none() && !self.policy.rerotates && self.format.is_none() {
            return Ok(None);
        }
        let mut cache = self.cache()?;
        let (draws, rope) = (extra.draws.as_deref(), extra.rope.as_ref());
        let fold = Fold { arena: self.arena, cpu: self.call.cpu, seed, number: 0, draws, rope, asked: None };
        for list in 0..cache.shape().lists() {
            if let Some(received) = &retained.accumulated {
                let kv_len = self.call.shape.kv_len;
                cache.add_attention(list, &received[list * kv_len..][..kv_len])?;
            }
            let asked = Asked { q: self.call.q, list, params: self.call.params };
            self.policy.shrink(
                &Fold { asked: Some(asked), number: list, ..fold },
                &mut cache,
                list,
                retained.selection.kept(list),
            )?;
        }
        Ok(Some(cache))
    }

    /// What a step with the last query reads, where the policy chooses that, and its bytes.
    pub fn read(&self, budget_tokens: usize) -> Result<Option<Read>, Failure> {
        let Some(selection) = &self.policy.selection else { return Ok(None) };
        let (cache, cpu): (_, &Cpu) = (self.cache()?, self.call.cpu);
        let (q, q_len) = (self.call.q, self.call.shape.q_len);
        let recent = q.tokens(q_len.saturating_sub(selection.recent_queries())..q_len);
        let mut selector =
            selection.open(&Start { cache: Lists::all(&cache), q: recent, budget_tokens, cpu, arena: self.arena })?;
        selector.step(q.tokens(q_len - 1..q_len), Lists::all(&cache), cpu);
        let (name, chosen) = selector.choice();
        Ok(Some(Read { name, chosen, bytes: selector.read_bytes(Lists::all(&cache)) }))
    }

    /// Values of a cache, and keys if the policy or the format changes them, `[B, Hkv, max_kept, D]`, and biases if tokens carry
    /// them, `[B, Hkv, max_kept]`; padded to the longest list.
    pub fn rows(&self, cache: &PagedCache) -> Vec<(&'static str, Vec<f32>)> {
        let (width, lists, columns) = (cache.shape().head_dim, cache.shape().lists(), cache.max_len());
        let all = |read: &dyn Fn(usize, usize, &mut [f32])| {
            let mut rows = vec![0.0; lists * columns * width];
            for list in 0..lists {
                let rows = rows[list * columns * width..].chunks_exact_mut(width).take(cache.lens()[list]);
                rows.enumerate().for_each(|(slot, row)| read(list, slot, row));
            }
            rows
        };
        let mut named = vec![("values", all(&|list, slot, row| cache.read_value(list, slot, row)))];
        let changes_keys = self.policy.action.as_ref().is_some_and(|action| action.changes_keys());
        if self.policy.rerotates || changes_keys || self.format.is_some() {
            named.push(("keys", all(&|list, slot, row| cache.read_key(list, slot, row))));
        }
        if cache.shape().columns.contains(&Column::Bias) {
            let mut biases = vec![0.0; lists * columns];
            for list in 0..lists {
                cache.read_column(list, Column::Bias, &mut biases[list * columns..][..cache.lens()[list]]);
            }
            named.push(("biases", biases));
        }
        named
    }
}

/// A cache of keys and values `[B, Hkv, Lk, D]`.
pub fn filled(
    arena: &Arena,
    [k, v]: [&Tensor; 2],
    format: KvFormat,
    columns: &'static [Column],
) -> Result<PagedCache, Failure> {
    let [batch, kv_heads, max_tokens, head_dim] = k.dims();
    let shape = CacheShape { batch, kv_heads, head_dim, format, max_tokens, page_tokens: PAGE_TOKENS, columns };
    let mut cache = PagedCache::new(arena, shape)?;
    cache.append(k.view(), v.view(), 0..max_tokens)?;
    Ok(cache)
}
