//! Prefill and decoding: what is run together, and when the policy evicts.

use super::Decoder;
use crate::model::ModelError;
use crate::model::evictor::Scene;
use crate::policy::Decoding;

impl Decoder<'_> {
    /// Runs the prompts, `[B]` sequences that may differ in length, and lets the policy evict after them, or after each
    /// chunk that its schedule names. `visit(sequence, place, logits)` gets the logits `[vocab]` of every token, or of
    /// the last of each sequence, as the setup says; `place` counts from the first token of this call.
    ///
    /// # Errors
    /// When a token is not one of the model's, the policy lacks something, or the arena has no room.
    ///
    /// # Panics
    /// When there are not as many sequences as the setup says, or one outgrows it.
    pub fn prefill(
        &mut self,
        tokens: &[&[u32]],
        mut visit: impl FnMut(usize, usize, &[f32]),
    ) -> Result<(), ModelError> {
        self.prefill_with(tokens, &mut visit)
    }

    /// Compiled once, whatever `visit` is.
    fn prefill_with(
        &mut self,
        tokens: &[&[u32]],
        visit: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<(), ModelError> {
        self.check(tokens)?;
        let horizons: Vec<usize> = self.seen.iter().zip(tokens).map(|(seen, tokens)| seen + tokens.len()).collect();
        let longest = tokens.iter().map(|tokens| tokens.len()).max().unwrap_or(0).max(1);
        let policy = self.evictor.as_ref().and_then(|evictor| evictor.evicting());
        let piece = policy.and_then(|policy| policy.schedule.chunk_tokens).unwrap_or(longest);
        for start in (0..longest).step_by(piece) {
            let pieces: Vec<&[u32]> =
                tokens.iter().map(|tokens| &tokens[start.min(tokens.len())..tokens.len().min(start + piece)]).collect();
            self.run(&pieces, &horizons, &vec![start; tokens.len()], visit)?;
            for (sequence, piece) in pieces.iter().enumerate().filter(|(_, piece)| !piece.is_empty()) {
                let last = start + piece.len() == tokens[sequence].len();
                if last {
                    self.reconstruct(sequence)?;
                }
                let horizon = horizons[sequence];
                self.eviction_step(sequence, horizon, |evictor, scene| evictor.evict_chunk(scene, last))?;
            }
        }
        Ok(())
    }

    /// Runs tokens that follow, and lets the policy evict after each where its schedule asks for that; else they go
    /// through together (but with RoPE of dynamic scaling, which depends on the length). `visit` as in [`Decoder::prefill`].
    ///
    /// # Errors
    /// As [`Decoder::prefill`].
    ///
    /// # Panics
    /// As [`Decoder::prefill`].
    pub fn follow(&mut self, tokens: &[&[u32]], mut visit: impl FnMut(usize, usize, &[f32])) -> Result<(), ModelError> {
        self.follow_with(tokens, &mut visit)
    }

    /// As `prefill_with`.
    fn follow_with(
        &mut self,
        tokens: &[&[u32]],
        visit: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<(), ModelError> {
        self.check(tokens)?;
        let together = self.evictor.as_ref().is_none_or(|evictor| {
            let evicts = evictor.evicting().is_some_and(|policy| policy.schedule.decoding != Decoding::Never);
            !evicts && !evictor.selects()
        });
        // Each token is rotated by the length that it is written at.
        let together = together && !self.model.config.rope.is_dynamic();
        let longest = tokens.iter().map(|tokens| tokens.len()).max().unwrap_or(0);
        let piece = if together { longest.max(1) } else { 1 };
        for start in (0..longest).step_by(piece) {
            let pieces: Vec<&[u32]> =
                tokens.iter().map(|tokens| &tokens[start.min(tokens.len())..tokens.len().min(start + piece)]).collect();
            let horizons: Vec<usize> = self.seen.iter().zip(&pieces).map(|(seen, piece)| seen + piece.len()).collect();
            self.run(&pieces, &horizons, &vec![start; tokens.len()], visit)?;
            for (sequence, _) in pieces.iter().enumerate().filter(|(_, piece)| !together && !piece.is_empty()) {
                self.eviction_step(sequence, horizons[sequence], |evictor, scene| evictor.evict_step(scene))?;
            }
        }
        Ok(())
    }

    /// As [`Decoder::follow`], with the logits of every token whatever the setup says; they are computed as many at a time
    /// as it has room for.
    ///
    /// # Errors
    /// As [`Decoder::prefill`].
    ///
    /// # Panics
    /// As [`Decoder::prefill`].
    pub fn follow_closely(
        &mut self,
        tokens: &[&[u32]],
        visit: impl FnMut(usize, usize, &[f32]),
    ) -> Result<(), ModelError> {
        let usual = std::mem::replace(&mut self.all_logits, true);
        let followed = self.follow(tokens, visit);
        self.all_logits = usual;
        followed
    }

    /// Lets the policy evict from a sequence whose latest tokens were turned as those of `horizon` tokens: on the threads from
    /// the first to the last, as [`Decoder::pass`].
    pub(super) fn eviction_step(
        &mut self,
        sequence: usize,
        horizon: usize,
        work: impl FnOnce(&mut super::Evictor<'_>, &mut Scene<'_>) -> Result<(), ModelError> + Send,
    ) -> Result<(), ModelError> {
        let Some(evictor) = &mut self.evictor else { return Ok(()) };
        let before = evictor.evicted_tokens();
        let mut scene = Scene {
            model: self.model,
            cpu: self.cpu,
            cache: &mut self.cache,
            batch: self.setup.batch,
            sequence,
            seen: self.seen[sequence],
            horizon,
        };
        self.cpu.install(|| work(evictor, &mut scene))?;
        self.gaps[sequence] |= evictor.evicted_tokens() > before;
        Ok(())
    }
}
