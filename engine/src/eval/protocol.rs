//! Protocols: what a policy has seen of a question when it evicts, and what it may evict of it.
//!
//! A prompt is a context, a question, and the words with which the answer is begun (`Question: ...? Answer:`). Whether a
//! method ranks high depends on which of them it sees, so that a score without its protocol says little. `docs/evaluation.md`
//! says who in the literature uses which.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// What is scored and evicted together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    /// The context alone, before a question is seen.
    #[default]
    Agnostic,
    /// Context and question; the answer's beginning follows the eviction (kvpress).
    Aware,
    /// The same, but the question is never evicted and is kept beside the budget.
    AwareKept,
    /// The whole prompt, the answer's beginning included (SnapKV's paper).
    AwareWhole,
}

impl Protocol {
    /// All of them, in the order of tables.
    pub const ALL: [Protocol; 4] = [Protocol::Agnostic, Protocol::Aware, Protocol::AwareKept, Protocol::AwareWhole];

    /// Name on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Protocol::Agnostic => "agnostic",
            Protocol::Aware => "aware",
            Protocol::AwareKept => "aware-kept",
            Protocol::AwareWhole => "aware-whole",
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for Protocol {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Protocol::ALL.map(Protocol::name).join(", ");
        let named = Protocol::ALL.into_iter().find(|protocol| protocol.name() == text);
        named.ok_or_else(|| format!("'{text}' is no protocol; there are {known}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_protocol_has_one_name_everywhere() {
        for protocol in Protocol::ALL {
            assert_eq!(serde_json::to_value(protocol).unwrap(), protocol.name());
            assert_eq!(protocol.name().parse(), Ok(protocol));
        }
        assert!("query-aware".parse::<Protocol>().unwrap_err().contains("aware-kept"));
    }
}
