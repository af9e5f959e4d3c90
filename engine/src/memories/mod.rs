//! Memories: what attention reads of the past in place of a cache of tokens.
//!
//! A cache holds tokens; a memory may hold anything that has keys and values: the means of many tokens, or a ring of the
//! latest. A [`Memory`] is a method with its parameters; opened for the sequences of a model (layers fold into them, as in a
//! cache) it becomes a [`MemoryState`], which takes the keys and values of tokens as they arrive, before RoPE, says what the
//! queries of these tokens attend to, and writes behind them what it keeps. Its bytes are a function of its shape, and each
//! memory names parameters under which it must give what the full cache gives. Adding one is one file and one line in
//! [`MEMORIES`]; `docs/memories.md` says what each does.

mod camelot;
mod memorizing_transformer;
mod runs;
mod transformer_xl;

pub use runs::{Run, Runs};

use crate::attention::rope::ModelRope;
use crate::device::Cpu;
use crate::memory::{Arena, ArenaError, LabelBytes};
use crate::named::{Named, NamedError, Parameter};
use crate::tensor::TensorView;
use serde::{Deserialize, Serialize};

/// The text of the memory that is next to none, the segment with one token before it: what a memory has to be better than.
pub const WINDOW_ALONE: &str = "transformer-xl:slots=1";

/// What a memory is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryShape {
    /// Sequences. The layers of a model fold into them: sequence `b` of layer `l` is `l * B + b`.
    pub sequences: usize,
    /// `Hq`.
    pub q_heads: usize,
    /// `Hkv`.
    pub kv_heads: usize,
    /// `D`.
    pub head_dim: usize,
    /// Most tokens that a sequence will have.
    pub max_tokens: usize,
    /// Whether some layer has a sliding window.
    pub windowed: bool,
}

/// Where a memory is at work.
#[derive(Clone, Copy)]
pub struct At<'a> {
    /// Sequence, with its layer folded in.
    pub sequence: usize,
    /// Sliding window of the layer: a query at position `p` sees keys at positions above `p - window`.
    pub window: Option<usize>,
    /// RoPE of the sequence.
    pub rope: &'a ModelRope,
    /// Where it runs.
    pub cpu: &'a Cpu,
}

/// A memory with its parameters.
pub trait Memory: Send + Sync {
    /// How many of the next `tokens` tokens of a sequence that has `seen` so many go through attention together, in a layer
    /// with this sliding window; at least one. All of these see the same of the past, and each of themselves those before it.
    fn together(&self, seen: usize, tokens: usize, window: Option<usize>) -> usize;

    /// Tokens of a segment, where a text is read in such.
    fn segment_tokens(&self) -> Option<usize> {
        None
    }

    /// Lists of [`MemoryState::read`]: one for each KV head, or for each query head where every one of these chooses by itself.
    fn lists(&self, shape: &MemoryShape) -> usize {
        shape.kv_heads
    }

    /// Most rows that a query attends to.
    fn most_rows(&self, shape: &MemoryShape) -> usize;

    /// Bytes by label, from the shape alone: what [`Memory::open`] takes, and all that the state will ever take.
    fn bytes(&self, shape: &MemoryShape) -> LabelBytes;

    /// An empty memory.
    ///
    /// # Errors
    /// When the arena has no room.
    fn open(&self, shape: &MemoryShape, arena: &Arena) -> Result<Box<dyn MemoryState>, ArenaError>;
}

/// A memory at work. Of each sequence [`MemoryState::append`], [`MemoryState::read`] and [`MemoryState::write`] follow one
/// another, for as many tokens as [`Memory::together`] says.
pub trait MemoryState: Send {
    /// Takes keys before RoPE and values of the next tokens, `[1, Hkv, L, D]`.
    fn append(&mut self, at: &At<'_>, k: TensorView<'_>, v: TensorView<'_>);

    /// What the tokens that were appended last attend to: in each list what is seen of the past, and behind it these tokens,
    /// keys turned by RoPE. `q` are their queries, turned likewise, `[1, Hq, L, D]`.
    fn read(&mut self, at: &At<'_>, q: TensorView<'_>) -> Runs<'_>;

    /// Keeps what is to be kept, once the tokens that were appended last went through attention.
    fn write(&mut self, _at: &At<'_>) {}

    /// Rows of keys and values that a sequence holds, summed over the KV heads.
    fn held_rows(&self, sequence: usize) -> usize;

    /// What the modes of a sequence hold; `None` of a memory without modes, or while there are none.
    fn modes(&self, _sequence: usize) -> Option<Modes> {
        None
    }

    /// Puts sequence `to` where `from` is.
    fn fork(&mut self, from: usize, to: usize);

    /// Takes everything from a sequence.
    fn free(&mut self, sequence: usize);
}

/// What modes hold, over the KV heads of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Modes {
    /// Modes of a KV head.
    pub count: f64,
    /// Tokens of a mode.
    pub tokens: f64,
    /// Tokens of the largest mode of a KV head.
    pub most_tokens: f64,
    /// Fraction of the modes that hold one token.
    pub single: f64,
    /// Tokens that were written since a mode was.
    pub age_tokens: f64,
    /// Cosine of a token's key with that of the mode that it was taken into, as the mode was before; `None` where none was.
    pub likeness: Option<f64>,
}

impl Modes {
    /// The mean of several; `None` without any.
    pub fn mean(all: &[Modes]) -> Option<Self> {
        let over = |read: &dyn Fn(&Modes) -> Option<f64>| {
            let values: Vec<f64> = all.iter().filter_map(read).collect();
            (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
        };
        Some(Modes {
            count: over(&|modes| Some(modes.count))?,
            tokens: over(&|modes| Some(modes.tokens))?,
            most_tokens: over(&|modes| Some(modes.most_tokens))?,
            single: over(&|modes| Some(modes.single))?,
            age_tokens: over(&|modes| Some(modes.age_tokens))?,
            likeness: over(&|modes| modes.likeness),
        })
    }
}

/// A memory as the registry knows it.
pub struct MemoryEntry {
    /// Name on the command line and in records.
    pub name: &'static str,
    /// One line for `kvsieve list memories`.
    pub about: &'static str,
    /// arXiv number of its paper, or nothing.
    pub paper: &'static str,
    /// Its parameters.
    pub parameters: &'static [Parameter],
    /// A text of this memory under which a model must give what it gives with its full cache, up to rounding.
    pub exact: &'static str,
    /// Makes it.
    pub build: fn(&Named) -> Result<Box<dyn Memory>, NamedError>,
}

/// Every memory, in the order in which they are listed.
pub const MEMORIES: &[MemoryEntry] = &[camelot::ENTRY, transformer_xl::ENTRY, memorizing_transformer::ENTRY];

/// Makes the memory that a text such as `camelot:slots=1024,window=128` names.
///
/// # Errors
/// When there is no such memory or parameter, or a value is wrong.
pub fn memory(text: &str) -> Result<Box<dyn Memory>, NamedError> {
    let named: Named = text.parse()?;
    let entry = named.find("memory", MEMORIES, |entry| entry.name)?;
    named.check(entry.parameters)?;
    (entry.build)(&named)
}

/// Tokens that go on in a segment of `window` tokens, behind `seen` others.
fn in_segment(seen: usize, tokens: usize, window: usize) -> usize {
    tokens.min(window - seen % window)
}

/// Of these rows, the `most` of the largest scores, ascending; of equal ones the first.
fn largest<'o>(rows: &'o mut [u32], most: usize, scores: &[f32]) -> &'o [u32] {
    if rows.len() <= most {
        return rows;
    }
    let score = |row: u32| scores[row as usize];
    rows.select_nth_unstable_by(most - 1, |&a, &b| score(b).total_cmp(&score(a)).then(a.cmp(&b)));
    let largest = &mut rows[..most];
    largest.sort_unstable();
    largest
}
