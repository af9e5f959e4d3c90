//! Whether a policy fits what it is given, asked before it works: it must know how keys were rotated if it looks behind
//! RoPE, and its budget should leave it something to score.

use super::{Budget, Decoding, Policy, PolicyError, Protect, Statistic};
use crate::attention::rope::{Frequencies, RopeBase};
use crate::format::KvFormat;

impl Policy {
    /// Refuses a cache of a format in which the policy, or its budget, means nothing; `name` stands in errors.
    ///
    /// # Errors
    /// When it rotates keys whose scales groups of tokens share, chooses what is read of a cache that has tokens in full besides, or has
    /// a budget in bytes there.
    pub fn check_format(&self, name: &str, budget: Option<&Budget>, format: KvFormat) -> Result<(), PolicyError> {
        let refused = |reason: String| Err(PolicyError::Combination { policy: name.into(), reason });
        if self.rerotates && format.k.group_tokens().is_some() {
            return refused(format!(
                "it rotates keys, and those of {format} share scales along their channels; take a format whose rows have their own"
            ));
        }
        if self.reconstruction.is_some() && (format.keeps_full() || format.k.group_tokens().is_some()) {
            return refused(format!(
                "what is fed to repeat the context leaves the cache again, and {format} has changed older tokens by then; take a \
                 format whose rows have their own scales, and leave recent and first out"
            ));
        }
        if self.selection.is_some() && format.k.group_tokens().is_some() {
            return refused(format!(
                "it reads pages of one cache, and {format} keeps the latest tokens in full until they share scales; take a format whose \
                 rows have their own"
            ));
        }
        if self.selection.is_some() && format.keeps_full() {
            return refused(format!(
                "it reads pages of one cache, and {format} keeps tokens in full in others; leave recent, first and kivi out"
            ));
        }
        match budget {
            Some(Budget::Bytes(_)) if self.scorer.is_some() && format.keeps_full() => refused(format!(
                "a budget in bytes is no number of tokens where {format} keeps some in full; give a fraction or tokens"
            )),
            _ => Ok(()),
        }
    }

    /// Whether it needs RoPE's frequencies: to look at vectors before RoPE, or to rotate keys.
    pub fn needs_rope(&self) -> bool {
        self.scorer.is_some() && (self.rerotates || self.looks_at(Statistic::BeforeRope))
    }

    /// RoPE's frequencies for heads of `head_dim` channels, where the policy needs them; `stated` is what the inputs say.
    /// `name` stands in errors.
    ///
    /// # Errors
    /// When they are needed and the inputs say nothing, for then vectors after RoPE would pass for those before it; or
    /// when the head dim is odd.
    pub fn rope(
        &self,
        name: &str,
        stated: Option<RopeBase>,
        head_dim: usize,
    ) -> Result<Option<Frequencies>, PolicyError> {
        if !self.needs_rope() {
            return Ok(None);
        }
        let refused = |reason: String| PolicyError::Combination { policy: name.into(), reason };
        let does = if self.rerotates { "it rotates keys" } else { "it looks behind RoPE" };
        let Some(base) = stated else {
            return Err(refused(format!(
                "{does} and needs rope_theta in the tensor file's metadata: RoPE's base, or none where nothing was rotated"
            )));
        };
        if !head_dim.is_multiple_of(2) {
            return Err(refused(format!("{does}, which rotates pairs of channels; head dim {head_dim} is odd")));
        }
        Ok(Some(base.frequencies(head_dim)))
    }

    /// Of a budget of `budget_tokens` in each KV head, on average, what is left beside the tokens that the policy never
    /// evicts; `None` for a policy that evicts nothing. The `kept` last tokens stay beside the budget, whoever protects them.
    pub fn unprotected(&self, budget_tokens: usize, kept: usize) -> Option<usize> {
        let Protect { sink, window } = self.scorer.as_ref()?.protect(budget_tokens);
        Some(budget_tokens.saturating_sub(sink.saturating_add(window.saturating_sub(kept))))
    }

    /// Whether it evicts because of its budget alone, so that one which holds a context leaves it nothing to evict: not where a
    /// threshold decides as well.
    pub fn is_bound_by_budget(&self) -> bool {
        self.scorer.is_some() && self.layers.threshold().is_none()
    }

    /// A warning where `budget`, which is `budget_tokens` in each KV head, changes nothing: the policy evicts nothing, or the budget holds
    /// the whole context. Not where the policy evicts while decoding too, from what comes behind the context.
    pub fn holds_all(&self, budget: &Budget, budget_tokens: usize, context_tokens: usize) -> Option<String> {
        if self.keeps_all() {
            return Some(format!("the policy evicts nothing, and the budget {budget} changes nothing"));
        }
        let is_idle = self.is_bound_by_budget() && self.schedule.decoding == Decoding::Never;
        (is_idle && budget_tokens >= context_tokens)
            .then(|| format!("budget {budget} holds the whole context of {context_tokens} tokens: nothing is evicted"))
    }

    /// What a reader must know of a budget of `budget_tokens` in each KV head, on average, of `(layers, KV heads)` and contexts of
    /// `context_tokens`: that nothing but protected tokens stays, or that its budget allocation does nothing. Nothing where the
    /// whole context stays; `kept` as in [`Policy::unprotected`].
    pub fn warnings(
        &self,
        budget_tokens: usize,
        context_tokens: usize,
        kept: usize,
        (layers, kv_heads): (usize, usize),
    ) -> Vec<String> {
        let Some(scorer) = self.scorer.as_ref().filter(|_| budget_tokens < context_tokens) else { return Vec::new() };
        let window = scorer.protect(budget_tokens).window;
        let inert = self.layers.inert(budget_tokens, context_tokens, window, layers);
        self.only_protected(budget_tokens, kept)
            .into_iter()
            .chain(inert)
            .chain(self.heads.inert(budget_tokens, kv_heads))
            .collect()
    }

    /// A warning where the last chunk of prefill has fewer queries than the scorer observes: those of the chunk before are not asked
    /// again, of whose keys some have been evicted.
    pub fn few_queries(&self, context_tokens: usize) -> Option<String> {
        let observed = self.scorer.as_ref().filter(|_| self.looks_at(Statistic::RecentAttention))?.recent_queries();
        let chunk_tokens = self.schedule.chunk_tokens?;
        let last = context_tokens.checked_sub(1)? % chunk_tokens + 1;
        (last < observed).then(|| {
            format!(
                "of the {observed} queries that are observed {last} decide: so many are in the last chunk of {context_tokens} tokens, \
                 read {chunk_tokens} at a time"
            )
        })
    }

    /// A warning where a budget keeps nothing but tokens that the policy never evicts, so that its scores have no say.
    fn only_protected(&self, budget_tokens: usize, kept: usize) -> Option<String> {
        let Protect { sink, window } = self.scorer.as_ref()?.protect(budget_tokens);
        (self.unprotected(budget_tokens, kept)? == 0).then(|| {
            format!(
                "nothing but protected tokens stays: the budget is {budget_tokens} tokens a head, and {sink} first and {window} \
                 latest ones come before all others"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Budget;
    use crate::attention::rope::RopeBase;
    use crate::policy::Registry;

    #[test]
    fn a_policy_fits_the_format_of_its_cache() {
        let registry = Registry::default();
        let check = |name: &str, budget: &str, format: &str| {
            let (policy, budget): (_, Budget) = (registry.policy(name).unwrap(), budget.parse().unwrap());
            policy.check_format(name, Some(&budget), format.parse().unwrap()).map_err(|error| error.to_string())
        };
        for (name, budget, format, reason) in [
            ("knorm+rerotate", "0.5", "kivi", "it rotates keys"),
            ("quest", "0.5", "q4_0:recent=32", "it reads pages of one cache"),
            ("snapkv", "1MiB", "q4_0:recent=32", "a budget in bytes is no number of tokens"),
        ] {
            let error = check(name, budget, format).unwrap_err();
            assert!(error.contains(reason) && error.contains(name), "{error}");
        }
        for (name, budget, format) in [
            ("knorm+rerotate", "0.5", "q4_0:recent=32"),
            ("quest", "0.5", "q4_0"),
            ("snapkv", "1MiB", "q4_0"),
            ("snapkv", "0.5", "kivi"),
        ] {
            assert_eq!(check(name, budget, format), Ok(()));
        }
    }

    #[test]
    fn a_policy_that_looks_behind_rope_must_be_told_of_it() {
        let registry = Registry::default();
        for (text, does) in [
            ("expected-attention", "it looks behind RoPE"),
            ("cap", "it looks behind RoPE"),
            ("leverage", "it looks behind RoPE"),
            ("compactor", "it looks behind RoPE"),
            ("knorm+rerotate", "it rotates keys"),
        ] {
            let policy = registry.policy(text).unwrap();
            let asked = |stated, head_dim| policy.rope(text, stated, head_dim).map(|rope| rope.unwrap());
            let error = asked(None, 8).err().unwrap().to_string();
            assert!(error.contains(text) && error.contains(does) && error.contains("rope_theta"), "{error}");
            assert!(asked(Some(RopeBase::Theta(1e4)), 7).err().unwrap().to_string().contains("head dim 7 is odd"));
            assert_eq!(asked(Some(RopeBase::None), 8).unwrap().rad_per_token(), [0.0; 4]);
            assert_eq!(asked(Some(RopeBase::Theta(1e4)), 8).unwrap().rad_per_token()[0], 1.0);
        }
        for text in ["snapkv", "full", "quest"] {
            assert!(registry.policy(text).unwrap().rope(text, None, 7).unwrap().is_none());
        }
        for (text, base) in [
            ("none", Some(RopeBase::None)),
            ("500000", Some(RopeBase::Theta(5e5))),
            ("None", None),
            ("0.5", None),
            ("NaN", None),
            ("", None),
        ] {
            assert_eq!(RopeBase::parse(text), base, "{text}");
        }
    }

    #[test]
    fn an_allocation_that_has_nothing_to_divide_warns() {
        for (text, inert, divides) in [
            ("snapkv+ada", 1, 2),
            ("snapkv+duo:heads=0.25", 3, 4),
            ("snapkv+duo:heads=1", 0, 1),
            ("knorm+global", 0, 1),
            ("knorm+threshold:at=-1", 0, 1),
        ] {
            let told =
                |kv_heads| Registry::default().policy(text).unwrap().warnings(400, 1000, 0, (4, kv_heads)).concat();
            assert!(told(divides).is_empty(), "{text}: {}", told(divides));
            assert!(inert == 0 || told(inert).contains("is inert"), "{text}: {}", told(inert));
        }
        // What lists that look near keep is more than everyone's share, or there is no more than that.
        for (text, budget, context, why) in [
            ("duoattention", 384, 1000, "a streaming head keeps up to 384"),
            ("duoattention", 385, 1000, ""),
            ("duoattention:sink=4,recent=16", 150, 1000, ""),
            ("simlayerkv", 1027, 4096, "a lazy layer keeps up to 1027"),
            ("simlayerkv", 1028, 4096, ""),
            ("simlayerkv", 500, 1029, "at most 1029 tokens"),
            ("simlayerkv:threshold=1", 2000, 4096, "threshold of 1"),
        ] {
            let told = Registry::default().policy(text).unwrap().warnings(budget, context, 0, (4, 2)).concat();
            assert!(told.contains(why) && told.is_empty() == why.is_empty(), "{text} {budget} {context}: {told}");
        }
    }

    #[test]
    fn a_last_chunk_of_fewer_queries_than_are_observed_warns() {
        for (text, context, last) in [
            ("snapkv:window=64+chunks:tokens=400", 801, Some(1)),
            ("snapkv:window=64+chunks:tokens=400", 863, Some(63)),
            ("snapkv:window=64+chunks:tokens=400", 864, None),
            ("snapkv:window=64+chunks:tokens=400", 800, None),
            ("snapkv:window=64+chunks:tokens=32", 800, Some(32)),
            ("snapkv:window=64", 801, None),
            ("h2o+chunks:tokens=400", 801, None),
            ("knorm+chunks:tokens=400", 801, None),
            ("snapkv:window=64+chunks:tokens=400", 0, None),
        ] {
            let told = Registry::default().policy(text).unwrap().few_queries(context).unwrap_or_default();
            let expected =
                last.map_or(String::new(), |last| format!("of the 64 queries that are observed {last} decide"));
            assert!(told.starts_with(&expected) && told.is_empty() == last.is_none(), "{text} {context}: {told}");
        }
    }

    #[test]
    fn a_budget_of_nothing_but_protected_tokens_warns() {
        let warns = |text: &str, budget| {
            !Registry::default().policy(text).unwrap().warnings(budget, 1000, 0, (4, 2)).is_empty()
        };
        for (text, least) in [
            ("snapkv:window=64", 65),
            ("snapkv:window=64+protect:sink=4", 69),
            ("streaming-llm:sink=4", 5),
            ("knorm+delayed:window=128", 129),
            ("knorm", 1),
        ] {
            assert!(!warns(text, least) && (least == 1 || warns(text, least - 1)), "{text}");
        }
        assert!(!warns("snapkv", 1000) && !warns("full", 3) && !warns("quest", 16));
        // Of a pyramid the highest layer keeps its window too.
        assert!(
            warns("pyramidkv", 400) && !warns("snapkv:window=8+pyramid", 400) && warns("snapkv:window=8+pyramid", 100)
        );
        assert!(!warns("pyramidkv", 1000));
        // Half of H2O's budget is always for others.
        assert!(!warns("h2o", 2) && warns("h2o:window=10", 10));
    }
}
