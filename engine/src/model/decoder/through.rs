//! One block by itself, from the residual stream in front of it to that behind it: for who changes a model block by block.

use super::{Chunk, Decoder};
use crate::model::ModelError;

impl Decoder<'_> {
    /// Runs block `layer` over the beginnings of all sequences: `rows` `[B * tokens, hidden]` become what lies behind it.
    ///
    /// # Errors
    /// When the arena has no room.
    ///
    /// # Panics
    /// When sequences have seen tokens in this layer, or outgrow the setup.
    pub(in crate::model) fn through(&mut self, layer: usize, rows: &mut [f32]) -> Result<(), ModelError> {
        let count = rows.len() / self.model.config.hidden;
        let tokens = count / self.setup.batch;
        assert!(tokens <= self.setup.chunk_tokens, "sequences go through together");
        let chunk = |sequence| Chunk { sequence, row: sequence * tokens, tokens, first: 0, horizon: tokens };
        let chunks: Vec<Chunk> = (0..self.setup.batch).map(chunk).collect();
        self.buffers.hidden[..rows.len()].copy_from_slice(rows);
        self.turn_angles(&chunks);
        let cpu = self.cpu;
        cpu.install(|| self.block(layer, &chunks, count))?;
        rows.copy_from_slice(&self.buffers.hidden[..rows.len()]);
        Ok(())
    }
}
