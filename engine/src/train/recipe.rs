//! A recipe: the TOML file that says what is trained, on what, for how long.

use super::Recompute;
use super::adamw::Constants;
use super::checkpoint::Identity;
use super::origin::{Origin, Sizes};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The recipe of the model that ships with this project.
pub const BUILTIN: &str = include_str!("../../../experiments/train-builtin.toml");

/// A recipe that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("'{origin}': {reason}")]
pub struct RecipeError {
    /// The file.
    pub origin: PathBuf,
    /// What was wrong, its value, and what would be right.
    pub reason: String,
}

/// What is trained, on what, for how long.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Its name.
    pub name: String,
    /// First number of everything random.
    pub seed: u64,
    /// What the backward pass computes again.
    pub recompute: Recompute,
    /// Parts of names of parameters that stay as they are, `*` in them anything.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frozen: Vec<String>,
    /// The model.
    pub model: Origin,
    /// The optimizer.
    pub optimizer: Constants,
    /// What is read.
    pub data: DataSpec,
    /// Lengths, one after the other.
    pub stages: Vec<Stage>,
    /// What is measured meanwhile.
    pub evaluation: Evaluation,
}

/// What sequences are made of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataSpec {
    /// Weight of a token of plain text in the loss; one of an answer has 1.
    pub text_weight: f32,
    /// Documents with blank lines between them, that `text` and `quotes` are taken from and needles are hidden in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<PathBuf>,
    /// What a sequence can be, drawn by `share`.
    pub sources: Vec<SourceSpec>,
}

/// A kind of sequence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceSpec {
    /// `text`, `quotes`, `needles`, `echo`, or a task as `kvsieve list tasks` names them.
    pub source: String,
    /// How often it is drawn, against the other shares.
    pub share: f64,
    /// Shortest sequences in which it is drawn, in tokens.
    #[serde(default)]
    pub from_length: usize,
}

impl SourceSpec {
    /// Whether it is drawn for sequences of `len` tokens.
    pub fn serves(&self, len: usize) -> bool {
        self.from_length <= len
    }
}

/// Steps of one length.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// Tokens of a sequence.
    pub length: usize,
    /// Sequences of a step.
    pub batch: usize,
    /// Steps.
    pub steps: usize,
}

/// What is measured while training, and how often the run is saved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evaluation {
    /// Steps from one evaluation to the next.
    pub every_steps: usize,
    /// Samples of each task that no step has read.
    pub samples: usize,
    /// Tasks as `kvsieve list tasks` names them.
    pub tasks: Vec<String>,
    /// Lengths in tokens; those beyond the stage's length are left out.
    pub lengths: Vec<usize>,
    /// Steps from one line of the log to the next.
    pub log_steps: usize,
    /// Steps from one checkpoint to the next.
    pub save_steps: usize,
}

/// Fewest tokens of a sequence.
const SHORTEST: usize = 16;

impl Recipe {
    /// Reads a recipe's file.
    ///
    /// # Errors
    /// When it cannot be read, is not TOML of a recipe, or holds a value out of range.
    pub fn load(path: &Path) -> Result<Self, RecipeError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| RecipeError { origin: path.into(), reason: error.to_string() })?;
        Self::parse(&text, path)
    }

    /// Reads a recipe's text; `origin` is what errors call it.
    ///
    /// # Errors
    /// As [`Recipe::load`].
    pub fn parse(text: &str, origin: &Path) -> Result<Self, RecipeError> {
        let wrong = |reason| RecipeError { origin: origin.into(), reason };
        let recipe: Recipe = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(0, |span| text[..span.start.min(text.len())].matches('\n').count()) + 1;
            wrong(format!("line {line}: {}", error.message().lines().collect::<Vec<_>>().join("; ")))
        })?;
        recipe.check().map_err(wrong)?;
        Ok(recipe)
    }

    fn check(&self) -> Result<(), String> {
        if let Origin::New(sizes) = &self.model {
            sizes.check()?;
            self.check_lengths(sizes.max_positions, "model.max_positions")?;
        }
        self.optimizer.check()?;
        let weight = self.data.text_weight;
        if !(weight.is_finite() && weight >= 0.0) {
            return Err(format!("data.text_weight is {weight}; it must be finite and not negative"));
        }
        for source in &self.data.sources {
            if !(source.share.is_finite() && source.share > 0.0) {
                return Err(format!(
                    "the fraction of '{}' is {}; it must be finite and above 0",
                    source.source, source.share
                ));
            }
        }
        if self.data.text.is_none() {
            let learned = matches!(&self.model, Origin::New(Sizes { vocabulary: Some(_), .. }));
            let quotes = self.data.sources.iter().any(|source| source.source == "quotes");
            let needs = [(learned, "model.vocabulary"), (quotes, "the source 'quotes'")];
            if let Some((_, what)) = needs.iter().find(|(needs, _)| *needs) {
                return Err(format!("{what} needs data.text, the file of a text"));
            }
        }
        if self.stages.is_empty() {
            return Err("there are no stages; give at least one".into());
        }
        for stage in &self.stages {
            let Stage { length, batch, steps } = *stage;
            if batch == 0 || steps == 0 {
                return Err(format!("a stage has {batch} sequences and {steps} steps; both must be at least 1"));
            }
            if !self.data.sources.iter().any(|source| source.serves(length)) {
                return Err(format!("no source of data serves length {length}, a stage's; see from_length"));
            }
            let mut serving = self.data.sources.iter().filter(|source| source.serves(length));
            if weight == 0.0 && serving.all(|source| source.source == "text") {
                return Err(format!(
                    "data.text_weight is 0, and a stage of length {length} has no source but 'text': nothing would be learned"
                ));
            }
        }
        if self.optimizer.warmup_steps >= self.steps() {
            let (warmup, steps) = (self.optimizer.warmup_steps, self.steps());
            return Err(format!(
                "optimizer.warmup_steps is {warmup}; it must be below the {steps} steps of all stages"
            ));
        }
        let Evaluation { every_steps, samples, log_steps, save_steps, .. } = self.evaluation;
        if [every_steps, samples, log_steps, save_steps].contains(&0) {
            return Err("evaluation: every_steps, samples, log_steps and save_steps must be at least 1".into());
        }
        if !save_steps.is_multiple_of(log_steps) {
            return Err(format!(
                "evaluation.save_steps is {save_steps}; it must be a multiple of log_steps, {log_steps}: what is resumed begins a line"
            ));
        }
        if let Some(length) = self.evaluation.lengths.iter().find(|length| **length < SHORTEST) {
            return Err(format!("evaluation: a length is {length}; it must be at least {SHORTEST}"));
        }
        Ok(())
    }

    /// Refuses stages of lengths that the model is not made for; `named` is what errors call the longest.
    ///
    /// # Errors
    /// One line with the length and what would be right.
    pub(super) fn check_lengths(&self, most: usize, named: &str) -> Result<(), String> {
        match self.stages.iter().find(|stage| !(SHORTEST..=most).contains(&stage.length)) {
            Some(Stage { length, .. }) => {
                Err(format!("a stage's length is {length}; it must be {SHORTEST} to {named}, {most}"))
            }
            None => Ok(()),
        }
    }

    /// Refuses a batch that cannot be dealt to so many ranks.
    ///
    /// # Errors
    /// One line with the batch and what would be right.
    pub(super) fn check_ranks(&self, ranks: usize) -> Result<(), String> {
        match self.stages.iter().find(|stage| !stage.batch.is_multiple_of(ranks)) {
            Some(Stage { batch, .. }) => {
                Err(format!("a stage's batch is {batch}; {ranks} ranks need a multiple of {ranks} sequences"))
            }
            None => Ok(()),
        }
    }

    /// Steps of all stages.
    pub fn steps(&self) -> usize {
        self.stages.iter().map(|stage| stage.steps).sum()
    }

    /// The stage of a step.
    pub fn stage(&self, step: usize) -> Stage {
        let mut end = 0;
        let stages = self.stages.iter().find(|stage| {
            end += stage.steps;
            step < end
        });
        *stages.unwrap_or(&self.stages[self.stages.len() - 1])
    }

    /// A short text of it and of the text that it names, as that is now.
    pub fn digest(&self) -> String {
        Identity::new(self, None, self.data.text.as_deref()).digest()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_recipes_are_right_and_can_be_written_and_read_again() {
        let text = include_str!("../../../experiments/train-text.toml");
        let [recipe, text] = [BUILTIN, text].map(|text| Recipe::parse(text, Path::new("shipped")).unwrap());
        assert_eq!(Recipe::parse(&toml::to_string(&text).unwrap(), Path::new("written")).unwrap(), text);
        let written = toml::to_string(&recipe).unwrap();
        let read = Recipe::parse(&written, Path::new("written")).unwrap();
        assert_eq!((&recipe, recipe.digest()), (&read, read.digest()));
        assert_ne!(recipe.digest(), Recipe { seed: recipe.seed + 1, ..recipe.clone() }.digest());
        let last = recipe.stages[recipe.stages.len() - 1];
        assert_eq!((recipe.stage(0), recipe.stage(recipe.steps() - 1)), (recipe.stages[0], last));
    }
}
