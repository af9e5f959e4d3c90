//! What can go wrong in training.

use super::checkpoint::CHECKPOINT;
use super::data::DataError;
use super::recipe::RecipeError;
use crate::attention::AttentionError;
use crate::editing::EditError;
use crate::memory::ArenaError;
use crate::model::ModelError;
use crate::ranks::RankError;
use crate::tensor::file::FileError;
use std::path::{Path, PathBuf};

/// What [`TrainError::Diverged`] is said of.
pub(super) const LOSS: &str = "loss";
/// See [`LOSS`].
pub(super) const GRADIENT_NORM: &str = "norm of the gradient";
/// See [`LOSS`].
pub(super) const HELD_OUT_LOSS: &str = "held-out loss";

/// Training that cannot begin or go on.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The recipe.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The model that it starts from.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A recipe, or what a method was asked for, that does not fit the model that it starts from.
    #[error("{name}: {reason}")]
    Misfit {
        /// The recipe or the method.
        name: String,
        /// What was wrong, its value, and what would be right.
        reason: String,
    },
    /// The folder is the model's.
    #[error("'{0}' is the folder that the model comes from; name another one")]
    Own(PathBuf),
    /// The folder holds a model, which a run would write over.
    #[error("'{folder}' holds a model ({file}); name a new folder")]
    Holds {
        /// The run's folder.
        folder: PathBuf,
        /// A file of the model.
        file: String,
    },
    /// The data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The folder holds a run, and nobody said to go on with it.
    #[error("'{0}' holds a run already; go on with it by --resume, or name another folder")]
    Taken(PathBuf),
    /// There is no run to go on with.
    #[error("'{0}' holds no {CHECKPOINT} to go on from; leave --resume out")]
    Nothing(PathBuf),
    /// A checkpoint that does not fit.
    #[error("'{path}': {reason}")]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file that cannot be read or written.
    #[error("cannot {verb} '{path}': {reason}")]
    System {
        /// Read or write.
        verb: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's own words.
        reason: String,
    },
    /// A file of tensors.
    #[error(transparent)]
    File(#[from] FileError),
    /// Attention.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// Another rank, or what cannot be shared out.
    #[error(transparent)]
    Rank(#[from] RankError),
    /// Facts in a model.
    #[error(transparent)]
    Edit(#[from] EditError),
    /// No room.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// Gates that let go of everything, or of nothing.
    #[error(
        "by step {step} gates evict {:.1}% of the tokens behind the window where {:.1}% are asked for; {}",
        100.0 * evicted, 100.0 * target,
        if evicted > target { "a smaller learning rate or pressure may help" }
        else { "a larger learning rate, more pressure or more steps may help" }
    )]
    Collapsed {
        /// Steps that are done.
        step: usize,
        /// Fraction of tokens that are evicted.
        evicted: f64,
        /// Fraction that is asked for.
        target: f64,
    },
    /// The loss, or what a step makes of it, is no number any more.
    #[error(
        "the {what} of step {step} is {value}; {}",
        if *step == 0 { "are the weights and activations finite?" } else { "a smaller learning rate or more warmup may help" }
    )]
    Diverged {
        /// What it is.
        what: &'static str,
        /// The step.
        step: usize,
        /// What it came to.
        value: f64,
    },
}

impl TrainError {
    /// Refuses what a step came to if it is no number.
    pub(super) fn diverged(what: &'static str, step: usize, value: f64) -> Result<(), Self> {
        if value.is_finite() { Ok(()) } else { Err(TrainError::Diverged { what, step, value }) }
    }

    pub(super) fn read(path: &Path, error: &std::io::Error) -> Self {
        TrainError::System { verb: "read", path: path.into(), reason: error.to_string() }
    }

    pub(super) fn write(path: &Path, error: &std::io::Error) -> Self {
        TrainError::System { verb: "write", path: path.into(), reason: error.to_string() }
    }
}
