//! A policy in a plan: what it leaves of the lists, what a decode step reads of them, and what it holds to choose that.

use super::PlanError;
use super::architecture::KvGroup;
use super::kv::KvStore;
use super::scenario::{Phase, Scenario};
use crate::attention::Shape;
use crate::cache::{CacheShape, PAGE_TOKENS};
use crate::policy::sparse::KvSelection;
use crate::policy::{Budget, Decoding, Policy, Registry};
use std::fmt;
use std::sync::Arc;

/// A policy and its budget.
#[derive(Clone)]
pub struct Eviction {
    /// The policy as it is written.
    pub name: String,
    /// What it does.
    pub policy: Arc<Policy>,
    /// What may stay of each sequence's context, or be read of it in a step.
    pub budget: Budget,
}

impl Eviction {
    /// A policy of the registry.
    ///
    /// # Errors
    /// When there is none of the name, or its parameters mean nothing.
    pub fn of(name: &str, budget: Budget) -> Result<Self, PlanError> {
        Ok(Eviction { name: name.into(), policy: Arc::new(Registry::default().policy(name)?), budget })
    }

    /// Tokens of a prefill chunk, back to the budget after each; `None`: after the whole prompt.
    pub fn chunk_tokens(&self) -> Option<u64> {
        self.policy.schedule.chunk_tokens.map(|tokens| tokens as u64)
    }

    /// How it selects what a step reads, if it gives nothing back.
    fn selection(&self) -> Option<&dyn KvSelection> {
        self.policy.selection.as_deref()
    }
}

impl fmt::Display for Eviction {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}@{}", self.name, self.budget)
    }
}

impl fmt::Debug for Eviction {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl Scenario<'_> {
    /// What gives tokens back, if anything does.
    pub(super) fn evicting(&self) -> Option<&Eviction> {
        self.eviction.as_ref().filter(|eviction| eviction.selection().is_none())
    }

    /// Tokens that a list holds of a context once the policy was at work. A budget in bytes is each sequence's.
    ///
    /// # Errors
    /// When the budget leaves none.
    pub fn retained(&self, context: u64) -> Result<u64, PlanError> {
        let Some(eviction) = self.evicting() else { return Ok(context) };
        Ok(eviction.budget.tokens(context as usize, self.kv_token_bytes(), 1)? as u64)
    }

    /// Tokens that a list comes to while its prompt is read: all of it, or what was retained and a chunk of the policy's, however
    /// short the passes are that read it.
    fn prefilled(&self, context: u64) -> Result<u64, PlanError> {
        match self.evicting().and_then(Eviction::chunk_tokens) {
            Some(chunk) => Ok(context.min(self.retained(context)?.saturating_add(chunk))),
            None => Ok(context),
        }
    }

    /// Most tokens that a list holds while the output is decoded behind a context: how many leave with a delayed eviction
    /// depends on the text, so that none are taken to.
    fn decoded(&self, context: u64) -> Result<u64, PlanError> {
        let all = self.retained(context)? + self.output;
        match self.evicting() {
            Some(Eviction { policy, budget, .. }) => match policy.schedule.decoding {
                // The budget counts the output too.
                Decoding::EverySteps(steps) => {
                    let budget = budget.of_all(context as usize, self.kv_token_bytes(), 1)? as u64;
                    Ok(all.min(budget.saturating_add(steps as u64)))
                }
                _ => Ok(all),
            },
            None => Ok(all),
        }
    }

    /// Sequences, and the tokens that a list of each holds in a phase: those whose prompts are read, and those that are held
    /// meanwhile and may be at their last token.
    pub(super) fn lists_hold(&self, phase: Phase, context: u64) -> Result<Vec<(u64, u64)>, PlanError> {
        let (beside, decoded) = (self.held() - self.batch, self.decoded(context)?);
        Ok(match phase {
            Phase::Load => Vec::new(),
            Phase::Decode => vec![(self.held(), decoded)],
            Phase::Prefill => match self.prefilled(context)? {
                prefilled if prefilled == decoded => vec![(self.held(), decoded)],
                prefilled if beside == 0 => vec![(self.batch, prefilled)],
                prefilled => vec![(self.batch, prefilled), (beside, decoded)],
            },
        })
    }

    /// Sequences behind whose prompts a policy has opened what it selects by.
    pub(super) fn opened(&self, phase: Phase) -> u64 {
        match phase {
            Phase::Load => 0,
            Phase::Prefill => self.held() - self.batch,
            Phase::Decode => self.held(),
        }
    }

    /// Bytes that a policy holds of a sequence on the fullest card to choose what steps read of it.
    ///
    /// # Errors
    /// When the format is not one of our own.
    pub(super) fn index_bytes(&self, context: u64) -> Result<u128, PlanError> {
        let Some(selection) = self.eviction.as_ref().and_then(Eviction::selection) else { return Ok(0) };
        self.sum_of_lists(context + self.output, |list| {
            let step = Shape { batch: 1, q_heads: 1, kv_heads: 1, q_len: 1, kv_len: 1, head_dim: list.head_dim };
            // Scratch of a CPU's threads is no part of it.
            selection.bytes(list, &step, 0)
        })
    }

    /// Bytes of all of a sequence's lists on the fullest card, `of_list` bytes of one with room for so many tokens.
    fn sum_of_lists(&self, tokens: u64, of_list: impl Fn(&CacheShape) -> u64) -> Result<u128, PlanError> {
        let format = match self.kv {
            KvStore::Own(format) => format,
            KvStore::Other(name, _) => {
                let expected = "a policy that selects what is read needs one of `kvsieve list formats`".into();
                return Err(PlanError::Value { what: "--kv-format", value: name.into(), expected });
            }
        };
        let (max_tokens, page_tokens) = (tokens as usize, PAGE_TOKENS);
        let bytes = |group: &KvGroup| {
            let head_dim = group.k_dim;
            let list = CacheShape { batch: 1, kv_heads: 1, head_dim, format, max_tokens, page_tokens, columns: &[] };
            (group.layers * group.heads) as u128 * u128::from(of_list(&list))
        };
        Ok(self.on_card().iter().map(bytes).sum())
    }

    /// Bytes that the last decode step reads of the keys and values on the fullest card: all of them, or what a policy selects and
    /// looks at to do so; and recurrent states.
    ///
    /// # Errors
    /// When the budget leaves no token.
    pub(super) fn step_kv_bytes(&self) -> Result<u128, PlanError> {
        let selecting = self.eviction.as_ref().and_then(|eviction| Some((eviction.selection()?, eviction.budget)));
        let Some((selection, budget)) = selecting else { return Ok(self.bytes_at(Phase::Decode, self.context)?.kv) };
        let (context, tokens) = (self.context as usize, self.decoded(self.context)?);
        let budget = budget.of_all(context, self.kv_token_bytes(), 1)?;
        let lists = self.sum_of_lists(tokens, |list| selection.step_bytes(list, budget, context, tokens as usize))?;
        Ok(u128::from(self.held()) * (lists + u128::from(self.card_state_bytes())))
    }

    /// Refuses a policy that does not fit the model or its budget.
    ///
    /// # Errors
    /// What was wrong, its value, and what would be right.
    pub(super) fn check_policy(&self) -> Result<(), PlanError> {
        let Some(Eviction { name, policy, budget }) = &self.eviction else { return Ok(()) };
        let wrong =
            |what, value: String, expected: &str| Err(PlanError::Value { what, value, expected: expected.into() });
        if matches!(budget, Budget::Bytes(_)) && self.kv_token_bytes() == 0 {
            let none = "no layer of this model has keys and values; a budget in bytes has nothing to be divided by";
            return wrong("--budget", budget.to_string(), none);
        }
        if policy.selection.is_some() {
            let groups = &self.subject.groups;
            if groups.iter().any(|group| group.window.is_some()) {
                let windows = "it selects from the whole context, but this model has sliding windows";
                return wrong("--policy", name.clone(), windows);
            }
            if groups.iter().any(|group| group.k_dim != group.v_dim) {
                let rows =
                    "it selects from keys and values of heads, but this model has compressed rows for all of them";
                return wrong("--policy", name.clone(), rows);
            }
        }
        policy.budget_tokens(name, Some(budget), self.context as usize, self.kv_token_bytes(), 1)?;
        Ok(())
    }
}
