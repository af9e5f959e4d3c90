//! Scratch memory of kernels: one size, used to allocate and to predict.

use crate::memory::{Arena, ArenaError, Buffer, Label};

/// How much scratch memory a pass needs, in f32 elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WorkspaceSize {
    /// Elements of materialised score matrices.
    pub scores: usize,
    /// Elements of everything else: tiles, partial results, converted copies.
    pub scratch: usize,
}

impl WorkspaceSize {
    /// The size in bytes: exactly what [`WorkspaceSize::allocate`] takes.
    pub fn bytes(&self) -> u64 {
        4 * (self.scores as u64 + self.scratch as u64)
    }

    /// Takes the memory from the arena.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn allocate(&self, arena: &Arena) -> Result<Workspace, ArenaError> {
        Ok(Workspace {
            scores: arena.alloc(Label::Scores, self.scores)?,
            scratch: arena.alloc(Label::Workspace, self.scratch)?,
        })
    }
}

/// Scratch memory of a pass, reusable for passes that need as much or less; a shorter pass may need more.
pub struct Workspace {
    /// Materialised score matrices.
    pub scores: Buffer<f32>,
    /// Everything else.
    pub scratch: Buffer<f32>,
}
