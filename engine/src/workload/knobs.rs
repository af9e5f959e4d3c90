//! Knobs of the synthetic workload that a grid turns: what differs from the experiment's own, as an axis.

use super::SyntheticSpec;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fmt;

/// Some knobs with their values; none of them is the experiment's own setting. `{ like = "smollm2" }` starts from that preset.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Knobs(Map<String, Value>);

impl Knobs {
    /// Whether nothing is turned.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// `base` with these knobs turned.
    ///
    /// # Errors
    /// In words, when there is no such knob or a value is out of its range.
    pub fn over(&self, base: &SyntheticSpec) -> Result<SyntheticSpec, String> {
        let mut knobs = match (self.0.contains_key("like"), serde_json::to_value(base)) {
            (false, Ok(Value::Object(knobs))) => knobs,
            _ => Map::new(),
        };
        knobs.extend(self.0.clone());
        let wrong = |error: &dyn fmt::Display| format!("knobs '{self}': {error}");
        let spec: SyntheticSpec = serde_json::from_value(Value::Object(knobs)).map_err(|error| wrong(&error))?;
        spec.check().map_err(|error| wrong(&error))?;
        Ok(spec)
    }
}

/// As a reader knows them: `hinted 0, needle_salience 0.5`.
impl fmt::Display for Knobs {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, (knob, value)) in self.0.iter().enumerate() {
            let value = value.as_str().map_or_else(|| value.to_string(), String::from);
            write!(formatter, "{}{knob} {value}", if place == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn knobs(text: &str) -> Knobs {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn knobs_turn_what_they_name_and_nothing_else() {
        let base = SyntheticSpec { needles: 3, ..SyntheticSpec::default() };
        let turned = knobs("{\"hinted\": 0, \"sinks\": 2}");
        assert_eq!(turned.over(&base).unwrap(), SyntheticSpec { hinted: 0.0, sinks: 2, ..base.clone() });
        assert_eq!(turned.to_string(), "hinted 0, sinks 2");
        assert_eq!(Knobs::default().over(&base).unwrap(), base);
        let like = knobs("{\"like\": \"smollm2\", \"sinks\": 2}");
        assert_eq!(like.over(&base).unwrap(), SyntheticSpec { sinks: 2, ..SyntheticSpec::smollm2() });
        assert_eq!(like.to_string(), "like smollm2, sinks 2");
        for (text, expected) in [
            ("{\"hint\": 0}", "knobs 'hint 0': unknown field `hint`"),
            ("{\"sinks\": 0}", "knobs 'sinks 0': workload: sinks is 0"),
        ] {
            let error = knobs(text).over(&base).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
