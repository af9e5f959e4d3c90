//! The knobs of the synthetic workload, with their defaults and ranges, and presets measured on real models.

use super::WorkloadError;
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};

/// Knobs of the synthetic workload. Masses are shares of the softmax of a late query in the full cache. Written with
/// `like = "smollm2"`, knobs that are not given are those measured on that model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", deny_unknown_fields, default)]
pub struct SyntheticSpec {
    /// Standard deviation of the logits' noise, 0 to 4. Default 1.
    pub noise: f64,
    /// Base of RoPE's frequencies, above 1. Default 500000.
    pub rope_theta: f64,
    /// First tokens that act as attention sinks, 1 to 64. Default 4.
    pub sinks: usize,
    /// Mass on the sinks. Default 0.35.
    pub sink_mass: f64,
    /// Fraction of the context that are heavy hitters, 0 to 0.4. Default 0.02.
    pub heavy_hitters: f64,
    /// Mass on the heavy hitters, the `r`-th strongest with a weight of `1/r`. Default 0.15.
    pub heavy_mass: f64,
    /// Mass on the last 64 tokens in retrieval heads. Default 0.25.
    pub band_mass: f64,
    /// Mass on the last 64 tokens in the other heads. Default 0.4.
    pub local_band_mass: f64,
    /// Needles for each retrieval head; at most as many as there are late tokens are planted. Default 8.
    pub needles: usize,
    /// Fraction of the KV heads that have needles (at least one head), 0 to 1. Default 0.5.
    pub retrieval_heads: f64,
    /// How far a needle stands off the cone of the keys: 0 as an ordinary token, 1 as a sink. Default 0.25.
    pub needle_salience: f64,
    /// Mass on a needle in the query that asks for it. Default 0.6.
    pub needle_mass: f64,
    /// Fraction of the needles that one of the last 32 tokens of the context asks for too, 0 to 1. Default 0.5.
    pub hinted: f64,
    /// Part of the sink and heavy mass that the lowest of several layers lacks, 0 to 0.9, falling linearly to nothing in
    /// the highest: low layers attend broadly, as PyramidKV's authors found. Default 0.6.
    pub funnel: f64,
    /// Norm of the values of sinks, as a part of an ordinary one's, 0 to 4. Default 1.
    #[serde(skip_serializing_if = "is_one")]
    pub sink_value_norm: f64,
    /// Likewise of the heavy hitters' values. Default 1.
    #[serde(skip_serializing_if = "is_one")]
    pub heavy_value_norm: f64,
    /// Standard deviation of the logarithms of the values' norms, 0 to 1, beside what noise of so many channels has. Default 0.
    #[serde(skip_serializing_if = "is_zero")]
    pub value_spread: f64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
fn is_one(knob: &f64) -> bool {
    *knob == 1.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
fn is_zero(knob: &f64) -> bool {
    *knob == 0.0
}

impl Serialize for SyntheticSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for SyntheticSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut given = Map::<String, Value>::deserialize(deserializer)?;
        let spec = match given.remove("like") {
            None => SyntheticSpec::default(),
            Some(Value::String(name)) if name == "smollm2" => SyntheticSpec::smollm2(),
            Some(other) => return Err(D::Error::custom(format!("like is {other}; there is \"smollm2\""))),
        };
        // A number that is none has no JSON.
        if let Some((knob, _)) = given.iter().find(|(_, value)| value.is_null()) {
            let range = spec.ranges().into_iter().find(|(name, ..)| name == knob);
            let expected =
                range.map_or(String::new(), |(_, _, least, most)| format!("; it must be between {least} and {most}"));
            return Err(D::Error::custom(format!("{knob} is NaN or infinite{expected}")));
        }
        let Ok(Value::Object(mut knobs)) = serde_json::to_value(&spec) else { unreachable!("knobs are a table") };
        knobs.extend(given);
        Self::deserialize(Value::Object(knobs)).map_err(D::Error::custom)
    }
}

impl Default for SyntheticSpec {
    fn default() -> Self {
        SyntheticSpec {
            noise: 1.0,
            rope_theta: 500_000.0,
            sinks: 4,
            sink_mass: 0.35,
            heavy_hitters: 0.02,
            heavy_mass: 0.15,
            band_mass: 0.25,
            local_band_mass: 0.4,
            needles: 8,
            retrieval_heads: 0.5,
            needle_salience: 0.25,
            needle_mass: 0.6,
            hinted: 0.5,
            funnel: 0.6,
            sink_value_norm: 1.0,
            heavy_value_norm: 1.0,
            value_spread: 0.0,
        }
    }
}

impl SyntheticSpec {
    /// As SmolLM2-135M-Instruct attends to 2048 tokens of documentation: `docs/workload.md` says what was measured and by which
    /// commands.
    pub fn smollm2() -> Self {
        SyntheticSpec {
            rope_theta: 100_000.0,
            sinks: 1,
            sink_mass: 0.27,
            heavy_mass: 0.18,
            band_mass: 0.28,
            local_band_mass: 0.53,
            sink_value_norm: 0.24,
            heavy_value_norm: 0.96,
            value_spread: 0.225,
            ..SyntheticSpec::default()
        }
    }

    /// The knobs of one of several layers, lowest first.
    pub(super) fn of_layer(&self, layer: usize, layers: usize) -> SyntheticSpec {
        let depth = if layers == 1 { 1.0 } else { layer as f64 / (layers - 1) as f64 };
        let there = 1.0 - self.funnel * (1.0 - depth);
        SyntheticSpec {
            sink_mass: (self.sink_mass * there).max(0.01),
            heavy_mass: self.heavy_mass * there,
            ..self.clone()
        }
    }

    /// Says whether every knob is in its range and the masses leave something for the background.
    ///
    /// # Errors
    /// Names the first knob that is wrong and what would be right.
    pub fn check(&self) -> Result<(), WorkloadError> {
        let wrong = |knob, value: String, expected| Err(WorkloadError::Knob { knob, value, expected });
        for (knob, value, least, most) in self.ranges() {
            // A NaN is in no range.
            if !(least..=most).contains(&value) {
                return wrong(knob, value.to_string(), format!("between {least} and {most}"));
            }
        }
        if !(1..=64).contains(&self.sinks) {
            return wrong("sinks", self.sinks.to_string(), "between 1 and 64".into());
        }
        for (knob, band) in [("band_mass", self.band_mass), ("local_band_mass", self.local_band_mass)] {
            let salient = self.sink_mass + self.heavy_mass;
            if salient + band > 0.99 {
                let expected = format!(
                    "less: together with sink_mass {} and heavy_mass {} it makes {:.3}, and at most 0.99 leaves room \
                     for the background",
                    self.sink_mass,
                    self.heavy_mass,
                    salient + band
                );
                return wrong(knob, band.to_string(), expected);
            }
        }
        Ok(())
    }

    /// Knobs that are fractions and the like: name, value, and the least and the most that it may be.
    fn ranges(&self) -> [(&'static str, f64, f64, f64); 15] {
        [
            ("noise", self.noise, 0.0, 4.0),
            ("rope_theta", self.rope_theta, 2.0, 1e12),
            // Sinks set the scale against which everything else is salient, so they cannot have nothing.
            ("sink_mass", self.sink_mass, 0.01, 0.99),
            ("heavy_hitters", self.heavy_hitters, 0.0, 0.4),
            ("heavy_mass", self.heavy_mass, 0.0, 0.99),
            ("band_mass", self.band_mass, 0.0, 0.99),
            ("local_band_mass", self.local_band_mass, 0.0, 0.99),
            ("retrieval_heads", self.retrieval_heads, 0.0, 1.0),
            ("needle_salience", self.needle_salience, 0.0, 1.0),
            ("needle_mass", self.needle_mass, 0.01, 0.99),
            ("hinted", self.hinted, 0.0, 1.0),
            ("funnel", self.funnel, 0.0, 0.9),
            ("sink_value_norm", self.sink_value_norm, 0.0, 4.0),
            ("heavy_value_norm", self.heavy_value_norm, 0.0, 4.0),
            ("value_spread", self.value_spread, 0.0, 1.0),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knobs_out_of_range_are_named_with_their_value() {
        assert!(SyntheticSpec::default().check().is_ok());
        type Change = fn(&mut SyntheticSpec);
        let cases: [(&str, Change); 7] = [
            ("noise is NaN", |spec| spec.noise = f64::NAN),
            ("rope_theta is inf", |spec| spec.rope_theta = f64::INFINITY),
            ("sink_mass is 0;", |spec| spec.sink_mass = 0.0),
            ("sinks is 0;", |spec| spec.sinks = 0),
            ("hinted is -0.5", |spec| spec.hinted = -0.5),
            ("local_band_mass is 0.5; it must be less: together", |spec| spec.local_band_mass = 0.5),
            ("band_mass is 0.25; it must be less: together", |spec| spec.sink_mass = 0.6),
        ];
        for (expected, change) in cases {
            let mut spec = SyntheticSpec::default();
            change(&mut spec);
            let message = spec.check().unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn a_spec_is_written_with_the_knobs_that_differ_and_refuses_strangers() {
        let spec: SyntheticSpec = toml::from_str("needles = 3\nnoise = 0.5").unwrap();
        assert_eq!(spec, SyntheticSpec { needles: 3, noise: 0.5, ..SyntheticSpec::default() });
        let like: SyntheticSpec = toml::from_str("like = \"smollm2\"\nsinks = 2").unwrap();
        assert_eq!(like, SyntheticSpec { sinks: 2, ..SyntheticSpec::smollm2() });
        assert!(like.check().is_ok());
        // What is written down is read back as it was, and old knobs without the new ones are what they were.
        let written = serde_json::to_string(&like).unwrap();
        assert_eq!(serde_json::from_str::<SyntheticSpec>(&written).unwrap(), like);
        assert!(!serde_json::to_string(&spec).unwrap().contains("value"));
        let error = toml::from_str::<SyntheticSpec>("like = \"gpt\"").unwrap_err().to_string();
        assert!(error.contains("like is \"gpt\"; there is \"smollm2\""), "{error}");
        for number in ["nan", "inf"] {
            let error = toml::from_str::<SyntheticSpec>(&format!("needle_mass = {number}")).unwrap_err().to_string();
            assert!(error.contains("needle_mass is NaN or infinite; it must be between 0.01 and 0.99"), "{error}");
        }
        let error = toml::from_str::<SyntheticSpec>("needle = 3").unwrap_err().to_string();
        assert!(error.contains("unknown field `needle`"), "{error}");
    }
}
