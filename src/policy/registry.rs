//! Policies by name.

use super::{Needs, POLICIES, Policy, PolicyError};
use crate::named::{Named, NamedError, Parameter};

/// A policy as the registry knows it.
#[derive(Clone, Copy)]
pub struct PolicyEntry {
    /// Name on the command line and in records.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// Where it was published (arXiv id), or an empty text.
    pub paper: &'static str,
    /// Its parameters.
    pub parameters: &'static [Parameter],
    /// What it looks at.
    pub needs: Needs,
    /// Makes it.
    pub build: fn(&Named) -> Result<Policy, NamedError>,
}

/// The policies that an experiment may name.
#[derive(Clone)]
pub struct Registry {
    entries: Vec<PolicyEntry>,
}

impl Default for Registry {
    fn default() -> Self {
        Registry { entries: POLICIES.to_vec() }
    }
}

impl Registry {
    /// The built-in policies and one more; an entry of the same name is replaced.
    pub fn with(mut self, entry: PolicyEntry) -> Self {
        self.entries.retain(|known| known.name != entry.name);
        self.entries.push(entry);
        self
    }

    /// Every entry, in the order in which they are listed.
    pub fn entries(&self) -> &[PolicyEntry] {
        &self.entries
    }

    /// Makes the policy that a text such as `snapkv:window=32` names.
    ///
    /// # Errors
    /// When there is no such policy or parameter, or a value is wrong.
    pub fn policy(&self, text: &str) -> Result<Policy, PolicyError> {
        let named: Named = text.parse()?;
        let entry = self.entries.iter().find(|entry| entry.name == named.name).ok_or_else(|| NamedError::Unknown {
            kind: "policy",
            name: named.name.clone(),
            known: self.entries.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", "),
        })?;
        named.check(entry.parameters)?;
        Ok((entry.build)(&named)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_listed_is_what_the_scorer_says() {
        let registry = Registry::default();
        for entry in registry.entries() {
            let policy = registry.policy(entry.name).unwrap();
            assert_eq!(policy.needs().unwrap_or(Needs::Positions), entry.needs, "{}", entry.name);
        }
    }
}
