//! Memories of facts: vectors that are written once, read by a cue, overwritten and forgotten.
//!
//! Not memories of attention (those are in `memories/`): what is kept here is not a token's keys and values but the encoding of
//! a whole fact, a vector of `C` numbers. A [`FactMemory`] is a method with its parameters and a scope detector, which says
//! whether a cue asks for anything that was written at all. Opened for a width it is a [`Facts`]. An [`Episode`] writes drawn
//! facts into one, changes some and asks for them: what the measure `recall` counts. `docs/larimar.md` has the equations.
//!
//! Where an encoding comes from, and what a model makes of what is read, is for floors above: [`Facts::write`] takes encodings,
//! [`Facts::read`] gives them.

mod episode;
mod file;
mod inverse;
mod larimar;
mod list;
pub mod matrix;
mod scope;

pub use episode::{EPISODES, Episode, EpisodeEntry, Outcome, UNWRITTEN};
pub use file::read_vectors;
pub use inverse::Inverse;
pub use larimar::{Address, Larimar, Prior, Slots, Start, Write};
pub use scope::Scope;

use crate::memory::{Arena, ArenaError, Label, LabelBytes};
use crate::named::{Named, NamedError, Parameter};
use crate::tensor::file::FileError;
use matrix::{Matrix, dot};

/// Facts that may be listed one by one.
pub const MOST_FACTS: usize = 1 << 32;

/// What a memory is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FactShape {
    /// `C`, numbers of an encoding.
    pub width: usize,
    /// Most facts that it is told of, for what is listed one by one.
    pub most_facts: usize,
}

/// Where the noise of a memory comes from: standard normal deviates, one for each call.
pub type Noise<'a> = &'a mut dyn FnMut() -> f64;

/// What cannot be done with a memory of facts.
#[derive(Debug, thiserror::Error)]
pub enum EpisodicError {
    /// A name or a parameter is wrong.
    #[error(transparent)]
    Named(#[from] NamedError),
    /// The arena has no room.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The iteration for the pseudo-inverse would grow without end.
    #[error(
        "the iterative pseudo-inverse needs singular values below {most:.1}, the largest is {largest:.1}; write shorter vectors \
         or fewer, or make the memory with fewer slots or with inverse=exact"
    )]
    Diverges {
        /// Largest singular value of the matrix.
        largest: f64,
        /// Where divergence begins.
        most: f64,
    },
    /// The equations for addresses have no single answer.
    #[error(
        "the slots are linearly dependent, so that an address has no single answer; give the memory noise above {noise}"
    )]
    Singular {
        /// Standard deviation of the observation noise.
        noise: f64,
    },
    /// A fact is taken out that is not in the memory, or that the memory cannot tell from others.
    #[error(transparent)]
    NotForgotten(#[from] Stays),
    /// A memory without a covariance is to forget.
    #[error(
        "a memory that was written with write=episode has no covariance, and forgets nothing; use write=sequential"
    )]
    NoCovariance,
    /// A vector that is nothing, or too long to be reckoned with.
    #[error(
        "the square of a vector's length, or of its address, is {squared}; to be a fact's it must be above 0 and finite"
    )]
    Length {
        /// That square.
        squared: f64,
    },
    /// A vector of which the slots would keep nothing.
    #[error(
        "a fact has no address: nothing of it lies in what the slots' prior spans; with prior=identity its first {slots} \
         numbers alone make its address, so put what tells facts apart there, or use prior=random"
    )]
    NoAddress {
        /// `K`.
        slots: usize,
    },
    /// Encodings of another width.
    #[error("the vectors have {found} numbers; the memory is for {expected}")]
    Width {
        /// Numbers of what was given.
        found: usize,
        /// Numbers of the memory's slots.
        expected: usize,
    },
    /// A file without vectors.
    #[error("'{path}' has no vectors: {reason}")]
    Vectors {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A saved memory that is none, or is another one.
    #[error("'{path}' is not such a memory: {reason}")]
    Saved {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// Why a fact cannot be taken out.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum Stays {
    /// Nothing was written at its address.
    #[error(
        "the fact to be forgotten is not in the memory: its address has a variance of {variance:.3e}, which after a write is \
         at most {most:.3e}; forget what was written, once"
    )]
    Address {
        /// `w U wᵀ`.
        variance: f64,
        /// What a write leaves of it at most.
        most: f64,
    },
    /// Something else was written at its address.
    #[error(
        "the fact to be forgotten is not in the memory: another value was written at its address, and to take this one out \
         would leave {lengths:.0} times its length there; give it as it was written"
    )]
    Value {
        /// How far the memory without it would be from it, in lengths of its own.
        lengths: f64,
    },
    /// What its write left of the address's variance is lost in rounding.
    #[error(
        "the fact cannot be forgotten: beside an address of its length a noise of {noise} is lost in rounding; it takes {least:.1e} at \
         least, in a memory that all facts are written into anew"
    )]
    Rounding {
        /// Standard deviation of the observation noise.
        noise: f64,
        /// With which it could be.
        least: f64,
    },
    /// A list of all facts has none like it.
    #[error("the fact to be forgotten is not in the memory: no listed one is the same to the last bit")]
    List,
}

/// What a memory is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// It is opened.
    Open,
    /// So many facts are written in one call.
    Write(usize),
    /// So many cues are read in one call.
    Read(usize),
}

/// How facts are kept.
pub trait Method: Send + Sync {
    /// Bytes by label of what is held, from the shape alone.
    fn bytes(&self, width: usize) -> LabelBytes;

    /// Bytes besides, at most, while a step is at work.
    fn workspace_bytes(&self, width: usize, step: Step) -> u64;

    /// Whether single facts can be taken out.
    fn forgets(&self) -> bool;

    /// A memory without facts.
    ///
    /// # Errors
    /// When the arena has no room, or a width is too small.
    fn open(&self, width: usize, arena: &Arena) -> Result<Box<dyn Store>, EpisodicError>;
}

/// A memory of facts at work. Vectors are rows of `[N, C]`.
pub trait Store: Send {
    /// Writes facts, in their order.
    ///
    /// # Errors
    /// When the arena has no room, or the method cannot take them.
    fn write(&mut self, facts: &Matrix, noise: Noise<'_>) -> Result<(), EpisodicError>;

    /// Takes a fact out, which must be given as it was written; `false` where it is not there and may have been.
    ///
    /// # Errors
    /// When it is not in the memory, or cannot be told from others there.
    fn forget(&mut self, fact: &[f64]) -> Result<bool, EpisodicError>;

    /// What the memory has for each cue.
    ///
    /// # Errors
    /// When the arena has no room, or the method cannot read.
    fn read(&self, cues: &Matrix, noise: Noise<'_>, target: &mut Matrix) -> Result<(), EpisodicError>;

    /// What there is to save: matrices by name.
    fn parts(&mut self) -> Vec<(&'static str, &mut Matrix)>;
}

/// A method of keeping facts as the registry knows it.
pub struct FactMemoryEntry {
    /// Name in experiment files and records.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// arXiv number of its paper, or nothing.
    pub paper: &'static str,
    /// Its parameters, the scope detector's aside.
    pub parameters: &'static [Parameter],
    /// Makes it.
    pub build: fn(&Named) -> Result<Box<dyn Method>, NamedError>,
}

impl FactMemoryEntry {
    /// Its parameters, with those of the scope detector.
    pub fn all_parameters(&self) -> Vec<Parameter> {
        [self.parameters, &scope::PARAMETERS[..]].concat()
    }
}

/// Every memory of facts.
pub const FACT_MEMORIES: &[FactMemoryEntry] = &[larimar::ENTRY, list::ENTRY];

/// A memory of facts with its parameters: `larimar:slots=64,scope=list`.
pub struct FactMemory {
    /// How facts are kept.
    pub method: Box<dyn Method>,
    /// What it answers at all.
    pub scope: Scope,
}

impl FactMemory {
    /// The memory that a text such as `larimar:slots=64,noise=0.1` names.
    ///
    /// # Errors
    /// When there is no such memory or parameter, or a value is wrong.
    pub fn parse(text: &str) -> Result<Self, NamedError> {
        let named: Named = text.parse()?;
        let entry = named.find("memory of facts", FACT_MEMORIES, |entry| entry.name)?;
        named.check(&entry.all_parameters())?;
        Ok(FactMemory { method: (entry.build)(&named)?, scope: Scope::parse(&named)? })
    }

    /// Bytes by label of what is held.
    pub fn bytes(&self, shape: &FactShape) -> LabelBytes {
        let mut bytes = self.method.bytes(shape.width);
        *bytes.entry(Label::Facts).or_default() += self.scope.bytes(shape);
        bytes
    }

    /// A memory without facts.
    ///
    /// # Errors
    /// As [`Method::open`].
    pub fn open(&self, shape: &FactShape, arena: &Arena) -> Result<Facts, EpisodicError> {
        let detector = self.scope.open(shape, arena)?;
        Ok(Facts {
            origin: String::new(),
            store: self.method.open(shape.width, arena)?,
            detector,
            width: shape.width,
            unlisted: 0,
            unfound: 0,
        })
    }
}

/// Facts in a memory.
pub struct Facts {
    /// By what encodings were made: a model's fingerprint, or nothing where they are the user's own vectors.
    pub origin: String,
    store: Box<dyn Store>,
    detector: scope::Detector,
    width: usize,
    /// Facts that were written and are not listed any more by the scope detector, which has room for the latest alone, so that their cues go
    /// unanswered; of those that were written since the memory was opened or read.
    pub unlisted: usize,
    /// Facts to be forgotten that a list of the latest ones did not have: they may have been among those that it lost.
    pub unfound: usize,
}

impl Facts {
    /// Writes facts, in their order.
    ///
    /// # Errors
    /// As [`Store::write`], and when they are of another width or no facts.
    pub fn write(&mut self, facts: &Matrix, noise: Noise<'_>) -> Result<(), EpisodicError> {
        self.check(facts.columns())?;
        (0..facts.rows()).try_for_each(|index| has_length(facts.row(index)))?;
        self.store.write(facts, noise)?;
        self.unlisted += (0..facts.rows()).filter(|&index| self.detector.add(facts.row(index))).count();
        Ok(())
    }

    /// Takes a fact out, which must be given as it was written.
    ///
    /// # Errors
    /// As [`Store::forget`], and when it is of another width or no fact.
    pub fn forget(&mut self, fact: &[f64]) -> Result<(), EpisodicError> {
        self.check(fact.len())?;
        has_length(fact)?;
        // Before anything is changed: a list says of any fact whether it was written, slots do not.
        let is_listed = self.detector.lists(fact)?;
        let was_there = self.store.forget(fact)?;
        self.detector.remove(fact);
        self.unfound += usize::from(!(is_listed && was_there));
        Ok(())
    }

    /// What the memory has for each cue.
    ///
    /// # Errors
    /// As [`Store::read`], and when cues are of another width.
    pub fn read(&self, cues: &Matrix, noise: Noise<'_>, target: &mut Matrix) -> Result<(), EpisodicError> {
        self.check(cues.columns())?;
        self.store.read(cues, noise, target)
    }

    /// How far a cue is from what the memory was told of, given what it has for it; `None` without a scope detector.
    pub fn distance(&self, cue: &[f64], read: &[f64]) -> Option<f64> {
        self.detector.distance(cue, read)
    }

    /// Whether there is a scope detector.
    pub fn has_scope(&self) -> bool {
        self.detector.detects()
    }

    /// Whether a cue at this distance is answered.
    pub fn answers(&self, distance: Option<f64>) -> bool {
        self.detector.answers(distance)
    }

    fn check(&self, found: usize) -> Result<(), EpisodicError> {
        if found == self.width { Ok(()) } else { Err(EpisodicError::Width { found, expected: self.width }) }
    }
}

/// Whether a vector can be a fact: zeros are an empty place of a list, and squares are needed of all.
fn has_length(fact: &[f64]) -> Result<(), EpisodicError> {
    let squared = dot(fact, fact);
    if squared > 0.0 && squared.is_finite() { Ok(()) } else { Err(EpisodicError::Length { squared }) }
}
