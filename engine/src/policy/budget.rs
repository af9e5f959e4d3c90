//! How much may stay: a fraction, a number of tokens, or bytes.

use crate::units;
use std::fmt;
use std::str::FromStr;

/// What may stay of a context.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    /// This fraction of the context's tokens in every KV head, rounded down.
    Fraction(f64),
    /// So many tokens in every KV head.
    Tokens(usize),
    /// So many bytes of keys and values in all lists that share the budget: in a model those of all layers of a sequence, in an
    /// experiment on tensors those of all layers and sequences.
    Bytes(u64),
}

/// A budget that means nothing or cannot be met.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BudgetError {
    /// Not a budget.
    #[error(
        "'{text}' is not a budget; write a fraction kept such as 0.25 or 25%, tokens per KV head such as 512, or bytes such as 64MiB"
    )]
    Syntax {
        /// What was given.
        text: String,
    },
    /// A bare 1.
    #[error("budget '1' may mean one token or everything; write 1.0 to keep the whole context, or at least 2 tokens")]
    Ambiguous,
    /// Less than a token.
    #[error("budget {budget} leaves no token of {context_tokens} in a KV head; at least 1 must stay")]
    Nothing {
        /// The budget.
        budget: String,
        /// Tokens of the context.
        context_tokens: usize,
    },
    /// Fewer tokens than the policy always keeps.
    #[error("budget {budget} is {tokens} tokens per KV head; '{policy}' keeps {sink} sinks and needs at least {least}", least = sink + 1)]
    Sinks {
        /// The budget.
        budget: String,
        /// What it comes to.
        tokens: usize,
        /// The policy.
        policy: String,
        /// Its sinks.
        sink: usize,
    },
    /// One that means nothing to a policy that chooses what is read.
    #[error("budget {budget}: '{policy}' {reason}")]
    Selection {
        /// The budget.
        budget: String,
        /// The policy.
        policy: String,
        /// What would be right.
        reason: String,
    },
}

impl Budget {
    /// Tokens that each KV head may keep of a context, at most all of it. `token_bytes` are the bytes of one token in
    /// one KV head, `lists` the number of KV heads times sequences.
    ///
    /// # Errors
    /// When nothing would stay.
    pub fn tokens(&self, context_tokens: usize, token_bytes: u64, lists: usize) -> Result<usize, BudgetError> {
        Ok(self.of_all(context_tokens, token_bytes, lists)?.min(context_tokens))
    }

    /// The same of a context and all that comes behind it: perhaps more than the context.
    ///
    /// # Errors
    /// When nothing would stay.
    pub fn of_all(&self, context_tokens: usize, token_bytes: u64, lists: usize) -> Result<usize, BudgetError> {
        let tokens = match *self {
            // 0.29 of 100 is 29, of which a product of binary numbers falls short.
            Budget::Fraction(fraction) => {
                (fraction * context_tokens as f64 * (1.0 + 4.0 * f64::EPSILON)).floor() as usize
            }
            Budget::Tokens(tokens) => tokens,
            Budget::Bytes(bytes) => (bytes / (token_bytes * lists as u64)) as usize,
        };
        match tokens {
            0 => Err(BudgetError::Nothing { budget: self.to_string(), context_tokens }),
            tokens => Ok(tokens),
        }
    }
}

impl FromStr for Budget {
    type Err = BudgetError;
    fn from_str(text: &str) -> Result<Self, BudgetError> {
        let text = text.trim();
        let syntax = || BudgetError::Syntax { text: text.into() };
        if text.ends_with(['b', 'B']) {
            return units::parse_bytes(text).map(Budget::Bytes).map_err(|_| syntax());
        }
        if let Ok(tokens) = units::parse_tokens(text) {
            return if tokens == 1 { Err(BudgetError::Ambiguous) } else { Ok(Budget::Tokens(tokens)) };
        }
        let (number, whole) = text.strip_suffix('%').map_or((text, 1.0), |percent| (percent.trim_end(), 100.0));
        let fraction = number.parse::<f64>().map_err(|_| syntax())? / whole;
        // 1.0 is everything; larger numbers with a point are a mistake, not a count.
        if fraction > 0.0 && fraction <= 1.0 { Ok(Budget::Fraction(fraction)) } else { Err(syntax()) }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Budget::Fraction(fraction) => write!(formatter, "{fraction:?}"),
            Budget::Tokens(tokens) => write!(formatter, "{tokens}"),
            Budget::Bytes(bytes) => write!(formatter, "{bytes}B"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_fractions_tokens_or_bytes() {
        let cases = [
            ("0.25", 1000, 250),
            ("0.3", 10, 3),
            ("0.29", 100, 29),
            ("1.0", 77, 77),
            ("512", 1000, 512),
            ("2k", 1000, 1000),
            ("2", 9, 2),
            ("25%", 1000, 250),
            ("12.5 %", 1000, 125),
            ("100%", 77, 77),
            ("64KiB", 1000, 64),
            ("1500B", 1000, 1),
        ];
        for (text, context_tokens, expected) in cases {
            let budget: Budget = text.parse().unwrap();
            assert_eq!(budget.tokens(context_tokens, 256, 4), Ok(expected), "{text}");
            assert_eq!(budget.to_string().parse::<Budget>(), Ok(budget));
        }
    }

    #[test]
    fn budgets_that_mean_nothing_are_refused() {
        for bad in ["", "0", "1", "%", "0%", "101%", "0.0", "-0.5", "-3", "nan", "inf", "1.5", "half", "0B", "-1MiB"] {
            assert!(bad.parse::<Budget>().is_err(), "{bad}");
        }
        assert!("0.05".parse::<Budget>().unwrap().tokens(10, 256, 4).is_err());
        assert!("1000B".parse::<Budget>().unwrap().tokens(10, 256, 4).is_err());
    }
}
