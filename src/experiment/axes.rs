//! Values of an experiment file's axes: one or many, lengths and ranges of lengths, budgets.

use crate::policy::Budget;
use crate::units;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::marker::PhantomData;

/// One value or a list of them.
#[derive(Debug, Clone, Serialize)]
#[serde(transparent)]
pub struct Many<T>(pub Vec<T>);

impl<T> Default for Many<T> {
    fn default() -> Self {
        Many(Vec::new())
    }
}

impl<T> Many<T> {
    /// Whether none was given.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<T: Clone> Many<T> {
    /// The values, or `default` where none was given.
    pub fn or(&self, default: T) -> Vec<T> {
        if self.0.is_empty() { vec![default] } else { self.0.clone() }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Many<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrMany<T>(PhantomData<T>);
        /// A single value, handed on to `T`.
        macro_rules! one {
            ($visit:ident, $type:ty) => {
                fn $visit<E: de::Error>(self, value: $type) -> Result<Self::Value, E> {
                    Ok(Many(vec![T::deserialize(value.into_deserializer())?]))
                }
            };
        }
        impl<'de, T: Deserialize<'de>> Visitor<'de> for OneOrMany<T> {
            type Value = Many<T>;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a value or a list of values")
            }
            one!(visit_str, &str);
            one!(visit_i64, i64);
            one!(visit_u64, u64);
            one!(visit_f64, f64);
            one!(visit_bool, bool);
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                Ok(Many(vec![T::deserialize(MapAccessDeserializer::new(map))?]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let mut values = Vec::new();
                while let Some(value) = list.next_element()? {
                    values.push(value);
                }
                if values.is_empty() {
                    return Err(de::Error::custom("the list is empty; give at least one value or leave the key out"));
                }
                Ok(Many(values))
            }
        }
        deserializer.deserialize_any(OneOrMany(PhantomData))
    }
}

/// Context lengths that one entry stands for.
#[derive(Debug, Clone)]
pub struct Tokens {
    /// The entry as it was written.
    text: String,
    /// The lengths.
    pub lengths: Vec<usize>,
}

impl Serialize for Tokens {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

/// Lengths of a range, which nobody waits for.
const MOST_LENGTHS: usize = 1000;

impl Tokens {
    fn parse(text: &str) -> Result<Self, String> {
        let Some((first, rest)) = text.split_once("..") else {
            return Ok(Tokens { text: text.into(), lengths: vec![units::parse_tokens(text)?] });
        };
        let wrong = || format!("'{text}' is not a range; write \"1k..32k*2\" (doubling) or \"1k..8k+1k\" (steps)");
        let first = units::parse_tokens(first)?;
        let (last, next): (&str, Box<dyn Fn(usize) -> usize>) = if let Some((last, factor)) = rest.split_once('*') {
            let factor = factor.trim().parse::<usize>().ok().filter(|factor| *factor >= 2).ok_or_else(wrong)?;
            (last, Box::new(move |tokens| tokens.saturating_mul(factor)))
        } else if let Some((last, step)) = rest.split_once('+') {
            let step = units::parse_tokens(step)?;
            (last, Box::new(move |tokens| tokens.saturating_add(step)))
        } else {
            return Err(wrong());
        };
        let last = units::parse_tokens(last)?;
        let lengths: Vec<usize> = std::iter::successors(Some(first), |&tokens| Some(next(tokens)))
            .take_while(|&tokens| tokens <= last)
            .take(MOST_LENGTHS + 1)
            .collect();
        if lengths.len() > MOST_LENGTHS {
            return Err(format!("'{text}' is more than {MOST_LENGTHS} lengths; take larger steps"));
        }
        if lengths.is_empty() { Err(wrong()) } else { Ok(Tokens { text: text.into(), lengths }) }
    }
}

impl<'de> Deserialize<'de> for Tokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = NumberOrText::deserialize(deserializer)?.0;
        Tokens::parse(&text).map_err(de::Error::custom)
    }
}

/// A budget as it was written.
#[derive(Debug, Clone, Serialize)]
#[serde(transparent)]
pub struct BudgetText(pub String);

impl<'de> Deserialize<'de> for BudgetText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = NumberOrText::deserialize(deserializer)?.0;
        let budget: Budget = text.parse().map_err(de::Error::custom)?;
        Ok(BudgetText(budget.to_string()))
    }
}

/// Tokens of a page; 0 stands for contiguous tensors and is written `"contiguous"`.
#[derive(Debug, Clone, Copy)]
pub struct PageTokens(pub usize);

impl Serialize for PageTokens {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            0 => serializer.serialize_str("contiguous"),
            tokens => serializer.serialize_u64(tokens as u64),
        }
    }
}

impl<'de> Deserialize<'de> for PageTokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = NumberOrText::deserialize(deserializer)?.0;
        let tokens = if text == "contiguous" { Some(0) } else { text.parse().ok() };
        let wrong = || format!("'{text}' is not a page size; write a number of tokens such as 16, or \"contiguous\"");
        tokens.map(PageTokens).ok_or_else(|| de::Error::custom(wrong()))
    }
}

/// A number or a text, as text.
struct NumberOrText(String);

impl<'de> Deserialize<'de> for NumberOrText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AsText { truths: false }).map(NumberOrText)
    }
}

/// Reads one value as text: a number or a text, and `true` and `false` where there are `truths`.
pub(super) struct AsText {
    pub truths: bool,
}

impl Visitor<'_> for AsText {
    type Value = String;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.truths { "a number, a text, or true or false" } else { "a number or a text" })
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<String, E> {
        Ok(text.into())
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<String, E> {
        Ok(number.to_string())
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<String, E> {
        Ok(number.to_string())
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<String, E> {
        Ok(format!("{number:?}"))
    }

    fn visit_bool<E: de::Error>(self, truth: bool) -> Result<String, E> {
        match self.truths {
            true => Ok(truth.to_string()),
            false => Err(E::invalid_type(Unexpected::Bool(truth), &self)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_taken_whole_or_refused() {
        let lengths = |text: &str| Tokens::parse(text).map(|tokens| tokens.lengths.len());
        assert_eq!(lengths("1k..32k*2"), Ok(6));
        assert_eq!(lengths("512..1511+1"), Ok(MOST_LENGTHS));
        let error = lengths("512..1512+1").unwrap_err();
        assert!(error.contains("'512..1512+1' is more than 1000 lengths"), "{error}");
    }
}
