//! The scope detector: whether a cue asks for anything that was written, so that a model goes on alone where it does not.
//!
//! Two as in Larimar's public code (`larimar_base/PyriteSentenceScope.py`): the distance to the nearest of the written
//! encodings, which are listed for it, or how much of the cue the memory cannot give back, which needs no list.

use super::list::Ring;
use super::matrix::{Matrix, norm};
use super::{EpisodicError, FactShape, Stays, Store};
use crate::memory::Arena;
use crate::named::{Named, NamedError, Parameter};

/// Parameters that every memory of facts has.
pub const PARAMETERS: [Parameter; 2] = [
    Parameter {
        name: "scope",
        default: "none",
        about: "none: every cue is answered; list: those near a written vector; residual: those that the memory gives back",
    },
    Parameter {
        name: "threshold",
        default: "0.5",
        about: "largest distance that is answered; 0.8 by default with scope=residual",
    },
];

/// What is answered.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scope {
    /// Everything.
    Any,
    /// Cues whose cosine distance from a written vector is at most this.
    List(f64),
    /// Cues `z` with `|read - z| <= threshold |z|`.
    Residual(f64),
}

impl Scope {
    pub(super) fn parse(named: &Named) -> Result<Self, NamedError> {
        let threshold = |default: f64| named.number("threshold", default, 0.0..=2.0);
        match named.text("scope").unwrap_or("none") {
            "none" if named.text("threshold").is_some() => {
                Err(named.wrong("threshold", "left out without a scope detector; write scope=list".into()))
            }
            "none" => Ok(Scope::Any),
            "list" => Ok(Scope::List(threshold(0.5)?)),
            "residual" => Ok(Scope::Residual(threshold(0.8)?)),
            _ => Err(named.wrong("scope", "none, list or residual".into())),
        }
    }

    /// Bytes of what it lists.
    pub(super) fn bytes(&self, shape: &FactShape) -> u64 {
        match self {
            Scope::List(_) => Ring::bytes(shape.most_facts, shape.width),
            Scope::Any | Scope::Residual(_) => 0,
        }
    }

    pub(super) fn open(&self, shape: &FactShape, arena: &Arena) -> Result<Detector, EpisodicError> {
        let listed = match self {
            Scope::List(_) => Some(Ring::new(arena, shape.most_facts, shape.width)?),
            Scope::Any | Scope::Residual(_) => None,
        };
        Ok(Detector { scope: *self, listed })
    }
}

/// A scope detector at work.
pub(super) struct Detector {
    scope: Scope,
    listed: Option<Ring>,
}

impl Detector {
    /// Adds a fact; whether an older one is not listed any more.
    pub fn add(&mut self, fact: &[f64]) -> bool {
        self.listed.as_mut().is_some_and(|listed| listed.add(fact))
    }

    /// Whether a fact is listed; `false` where it may be one that went. Without a list all are.
    ///
    /// # Errors
    /// When it was never listed.
    pub fn lists(&self, fact: &[f64]) -> Result<bool, Stays> {
        self.listed.as_ref().map_or(Ok(true), |listed| listed.has(fact))
    }

    pub fn remove(&mut self, fact: &[f64]) {
        if let Some(listed) = &mut self.listed {
            listed.remove(fact);
        }
    }

    /// What there is to save.
    pub fn parts(&mut self) -> Vec<(&'static str, &mut Matrix)> {
        let parts = self.listed.as_mut().map(Ring::parts).unwrap_or_default();
        parts.into_iter().map(|(name, part)| (if name == "next" { "scope_next" } else { "scope" }, part)).collect()
    }

    pub fn distance(&self, cue: &[f64], read: &[f64]) -> Option<f64> {
        match (&self.scope, &self.listed) {
            (Scope::Residual(_), _) => {
                let lost: f64 = cue.iter().zip(read).map(|(cue, read)| (cue - read).powi(2)).sum();
                Some(lost.sqrt() / norm(cue))
            }
            (_, Some(listed)) => Some(1.0 - listed.nearest(cue).1),
            _ => None,
        }
    }

    pub fn detects(&self) -> bool {
        self.scope != Scope::Any
    }

    pub fn answers(&self, distance: Option<f64>) -> bool {
        match self.scope {
            Scope::Any => true,
            Scope::List(most) | Scope::Residual(most) => distance.is_some_and(|distance| distance <= most),
        }
    }
}
