//! Facts that a model answers without reading them: an encoder of its own hidden states, a memory of facts, and a read-out into
//! keys and values that stand before the question (Larimar, arXiv 2403.11901).
//!
//! A fact is a stem and a value, ` amber falcon:` and ` river`. Its encoding `z = [s; v]` is made of hidden states of the model
//! that reads the fact once: `s` of their sum over the stem, scaled to one length, `v` of the value's last token, each through an affine map
//! ([`Affine`]). A question is encoded as `[s; 0]` of its own words. What [`crate::episodic`] has for this cue is a vector whose
//! second half a linear map turns into keys and values of every layer, which the question's tokens attend to
//! ([`crate::model::Decoder::prefix`]); where the scope detector says that nothing of the kind was written, there is no prefix, and the
//! model answers as it would alone. The maps are trained by [`crate::train::larimar`] and lie in one file ([`Maps`]);
//! `docs/larimar.md` has the equations.

mod affine;
mod context;
mod editor;
mod encoder;
mod facts;
mod maps;
mod probe;

pub use affine::Affine;
pub use context::{InContext, Retrieval};
pub use editor::{Editor, MEMORY};
pub use encoder::{Encoded, Encoder};
pub use facts::{Drawn, Fact, HELD_OUT, TRAINED, values};
pub use maps::{Maps, PREFIX, VALUE_SCALE, widths};
pub use probe::{Answered, Episode, Informed, Rate};

use crate::episodic::EpisodicError;
use crate::memory::ArenaError;
use crate::model::ModelError;
use crate::tensor::file::FileError;
use std::path::PathBuf;

/// What cannot be done with facts in a model.
#[derive(Debug, thiserror::Error)]
pub enum EditError {
    /// The model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The memory.
    #[error(transparent)]
    Memory(#[from] EpisodicError),
    /// A file.
    #[error(transparent)]
    File(#[from] FileError),
    /// The arena has no room.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// A file of maps that is none, or was trained on another model.
    #[error("'{path}': {reason}")]
    Maps {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A fact or a question that cannot be encoded.
    #[error("'{text}': {reason}")]
    Fact {
        /// The text.
        text: String,
        /// What is wrong with it, and what would be right.
        reason: String,
    },
    /// Facts that cannot be drawn, in words.
    #[error("{0}")]
    Words(String),
}
