//! Policies in an experiment file: a text as on the command line, or the same as a table.
//!
//! `{ method = "snapkv", window = 64, with = [{ part = "ada", floor = 0.2 }, "merge"] }` is
//! `snapkv:window=64+ada:floor=0.2+merge`, and is kept as that text.

use super::axes::AsText;
use super::cell::Cell;
use super::spec::Grid;
use crate::policy::{PRESETS, Policy, PolicyError, PolicyFile, Registry, Statistic};
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;

/// A policy as the command line writes it.
#[derive(Debug, Clone, Serialize)]
#[serde(transparent)]
pub struct PolicyText(pub String);

impl<'de> Deserialize<'de> for PolicyText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Piece { name: "method" }).map(PolicyText)
    }
}

impl Cell {
    /// The cell's policy, from its file where it has one; `None` where nothing is evicted by design.
    ///
    /// # Errors
    /// When the text means nothing, or the file is not the one that the cell was made with any more.
    pub fn build_policy(&self, registry: &Registry) -> Result<Option<Policy>, PolicyError> {
        let Some(text) = &self.policy else { return Ok(None) };
        let Some(path) = &self.policy_file else { return registry.policy(text).map(Some) };
        let is_the_same = |policy: &Policy| policy.parameters.hash() == self.policy_file_hash;
        // What the text names by itself may be a folder, and is no file for other policies.
        let alone = registry.clone().without_file().policy(text).ok();
        let names_it = alone.as_ref().is_some_and(|policy| policy.parameters.files().contains(&Path::new(path)));
        let built = match alone.filter(is_the_same) {
            Some(policy) => Some(policy),
            None if names_it => None,
            None => {
                let registry = registry.clone().with_file(PolicyFile::open(Path::new(path))?);
                Some(registry.policy(text)?).filter(is_the_same)
            }
        };
        let changed = || PolicyError::File(format!("policy_file '{path}' has changed since the experiment was read"));
        built.map(Some).ok_or_else(changed)
    }
}

/// A policy and its budget, as they were written.
pub(super) type Chosen = (Option<String>, Option<String>);

/// Policies with their budgets. `full` has none; the policy `*` stands for every method and every preset that needs
/// neither a file that is not given nor a model that is not there, nor in a model what it has yet to write.
///
/// # Errors
/// In words, when a policy has no budget.
pub(super) fn choices(grid: &Grid, registry: &Registry) -> Result<Vec<Chosen>, String> {
    let Grid { policy: policies, budget: budgets, .. } = grid;
    let bare = registry.clone().without_file();
    let is_out = |policy: &Policy| {
        let missing = policy.parameters.missing();
        let lacks_tensor = missing.is_some_and(|tensor| !registry.file().is_some_and(|file| file.has(tensor)));
        // Hidden states are a model's, and the future is not.
        let has_model = grid.measure.fields().contains(&"model");
        let elsewhere: &[Statistic] = if has_model {
            &[Statistic::FutureAttention]
        } else {
            &[Statistic::HiddenStates, Statistic::Reconstruction]
        };
        lacks_tensor || elsewhere.iter().any(|&elsewhere| policy.looks_at(elsewhere))
    };
    let methods = registry.entries().iter().map(|entry| entry.name);
    let all = methods.chain(PRESETS.iter().map(|preset| preset.name));
    let all = all.filter(|name| !bare.policy(name).is_ok_and(|policy| is_out(&policy)));
    let all: Vec<String> = all.map(Into::into).collect();
    let one = |PolicyText(policy): &PolicyText| if policy == "*" { all.clone() } else { vec![policy.clone()] };
    let mut choices = Vec::new();
    for policy in policies.0.iter().flat_map(one) {
        if policy == "full" {
            choices.push((Some(policy), None));
        } else if budgets.is_empty() {
            return Err(format!("policy '{policy}' needs a budget; write budget = [0.25, 0.5]"));
        } else {
            choices.extend(budgets.0.iter().map(|budget| (Some(policy.clone()), Some(budget.0.clone()))));
        }
    }
    Ok(choices)
}

/// A method or a part: `name:key=value,...`, as a text or a table in which `self.name` is the key of the name.
struct Piece {
    name: &'static str,
}

impl<'de> Visitor<'de> for Piece {
    type Value = String;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "a policy such as \"snapkv:window=64\", or a table such as {{ {} = ..., ... }}", self.name)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<String, E> {
        Ok(text.split(',').map(str::trim).collect::<Vec<_>>().join(","))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<String, A::Error> {
        let (mut name, mut arguments, mut parts) = (None, Vec::new(), Vec::new());
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                key if key == self.name => name = Some(map.next_value::<String>()?),
                "with" if self.name == "method" => parts = map.next_value::<Parts>()?.0,
                key => arguments.push(format!("{key}={}", map.next_value::<Value>()?.0)),
            }
        }
        let name = name.ok_or_else(|| de::Error::custom(format!("the table has no {}", self.name)))?;
        let head = if arguments.is_empty() { name } else { format!("{name}:{}", arguments.join(",")) };
        Ok(std::iter::once(head).chain(parts).collect::<Vec<_>>().join("+"))
    }
}

/// The parts after a method.
struct Parts(Vec<String>);

impl<'de> Deserialize<'de> for Parts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Parts;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a list of parts such as [\"ada\", { part = \"every\", steps = 8 }]")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Parts, A::Error> {
                let mut parts = Vec::new();
                while let Some(Part(part)) = list.next_element()? {
                    parts.push(part);
                }
                Ok(Parts(parts))
            }
        }
        deserializer.deserialize_seq(List)
    }
}

/// One part.
struct Part(String);

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Piece { name: "part" }).map(Part)
    }
}

/// A parameter's value, as text.
struct Value(String);

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AsText { truths: true }).map(Value)
    }
}

#[cfg(test)]
mod tests {
    use super::PolicyText;
    use serde::Deserialize;

    #[derive(Deserialize)]
    struct One {
        policy: PolicyText,
    }

    #[test]
    fn tables_are_texts() {
        let cases = [
            ("\"h2o+once\"", "h2o+once"),
            ("{ method = \"knorm\" }", "knorm"),
            (
                "{ method = \"snapkv\", window = 64, with = [{ part = \"ada\", floor = 0.2 }, \"merge\"] }",
                "snapkv:window=64+ada:floor=0.2+merge",
            ),
            ("{ method = \"h2o\", age = true, window = \"auto\" }", "h2o:age=true,window=auto"),
        ];
        for (table, text) in cases {
            let one: One = toml::from_str(&format!("policy = {table}")).unwrap();
            assert_eq!(one.policy.0, text);
        }
        let cases = [
            ("{ window = 64 }", "the table has no method"),
            ("7", "a policy such as"),
            ("{ method = \"h2o\", with = \"once\" }", "a list of parts"),
            ("{ method = \"h2o\", with = [{ floor = 1 }] }", "the table has no part"),
            ("{ method = \"h2o\", window = [1] }", "a number, a text"),
        ];
        for (table, expected) in cases {
            let error = toml::from_str::<One>(&format!("policy = {table}")).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
