//! Explicit weights: `+table:layers=3;2;1` gives the lowest of three layers half of the budget, `+table:heads=1;3` the
//! second of two KV heads three quarters of its layer's. Weights are relative; there must be one for each.

use super::uniform::Uniform;
use super::{OverHeads, OverLayers, lens, over_layers, share};
use crate::named::{Named, NamedError, Parameter};
use crate::policy::{Context, Part, PartEntry, PolicyError, Scored};

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "table",
    about: "explicit weights of layers, of heads, or of both",
    paper: "",
    parameters: &[
        Parameter { name: "layers", default: "equal", about: "a weight for each layer, lowest first, as in 3;2;1" },
        Parameter { name: "heads", default: "equal", about: "a weight for each KV head of a layer" },
    ],
    build: |named, _| {
        Ok(match (Table::of(named, "layers")?, Table::of(named, "heads")?) {
            (Some(layers), Some(heads)) => Part::Both(Box::new(layers), Box::new(heads)),
            (Some(layers), None) => Part::Layers(Box::new(layers)),
            (None, Some(heads)) => Part::Heads(Box::new(heads)),
            (None, None) => Part::Both(Box::new(Uniform), Box::new(Uniform)),
        })
    },
};

/// Weights of layers or of heads.
struct Table {
    text: String,
    weights: Vec<f64>,
}

impl Table {
    fn of(named: &Named, key: &str) -> Result<Option<Self>, NamedError> {
        let Some(text) = named.text(key).filter(|text| *text != "equal") else { return Ok(None) };
        let weights: Option<Vec<f64>> = text.split(';').map(|weight| weight.trim().parse().ok()).collect();
        let sound = |weights: &Vec<f64>| {
            weights.iter().all(|weight| weight.is_finite() && *weight >= 0.0)
                && weights.iter().any(|&weight| weight > 0.0)
        };
        let weights = weights.filter(sound).ok_or_else(|| {
            named.wrong(key, "equal, or numbers of at least 0, not all 0, with semicolons between, as in 3;2;1".into())
        })?;
        Ok(Some(Table { text: format!("table:{key}={text}"), weights }))
    }

    /// Divides by the weights, of which there must be as many as caps.
    fn shares(&self, total: usize, caps: &[usize], what: &str) -> Result<Vec<usize>, PolicyError> {
        if self.weights.len() != caps.len() {
            let (given, there) = (self.weights.len(), caps.len());
            let reason = format!("it gives {given} weights, and there are {there} {what}; give one for each");
            return Err(PolicyError::Combination { policy: self.text.clone(), reason });
        }
        Ok(share(total, &self.weights, caps))
    }
}

impl OverLayers for Table {
    fn reads_scores(&self) -> bool {
        false
    }

    fn totals(&self, context: &Context<'_>, _: &mut Scored, _: &mut [f32]) -> Result<Vec<usize>, PolicyError> {
        over_layers(context, |total, _, caps| self.shares(total, caps, "layers"))
    }
}

impl OverHeads for Table {
    fn reads_scores(&self) -> bool {
        false
    }

    fn counts(
        &self,
        context: &Context<'_>,
        _: &mut Scored,
        sequence: usize,
        total: usize,
        _: &mut [f32],
    ) -> Result<Vec<usize>, PolicyError> {
        self.shares(total, &lens(context, sequence), "KV heads")
    }
}
