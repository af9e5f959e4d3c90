//! What a prefill shows to policies that evict from it later: its queries, the attention that tokens received, and what the
//! model looks at when it repeats its context, once for all of them.

use super::{AttentionSums, Evictor, window_shape};
use crate::attention::Forward;
use crate::cache::Column;
use crate::eviction::{ObservationWindow, Span, attention_sums};
use crate::memory::{Arena, ArenaError, Buffer};
use crate::model::ModelError;
use crate::policy::{Policy, Reconstruction, Statistic};
use std::ops::Range;
use std::sync::Arc;

/// Keeps what some policies look at while the first sequence is prefilled.
pub(in crate::model) struct QueryRecorder {
    arena: Arena,
    span: Span,
    accumulates: bool,
    window: Option<ObservationWindow>,
    reconstructed: Option<(LookedAt, Arc<Buffer<f32>>)>,
}

/// How a context is repeated, and which of its last tokens are left out of that.
pub(in crate::model) type LookedAt = (Reconstruction, Range<usize>);

impl QueryRecorder {
    /// The sequence that is recorded.
    pub const SEQUENCE: usize = 0;

    /// For these policies.
    pub fn new<'p>(arena: &Arena, policies: impl Iterator<Item = &'p Policy>, columns: &[Column]) -> Self {
        let (mut span, mut accumulates) = (Span::Latest(0), false);
        for policy in policies {
            span = span.max(Span::of_prefill(policy));
            accumulates |= policy.looks_at(Statistic::AccumulatedAttention);
        }
        assert!(!accumulates || columns.contains(&Column::Attention), "a cache with a column of attention");
        QueryRecorder { arena: arena.clone(), span, accumulates, window: None, reconstructed: None }
    }

    /// Before another prefill.
    pub fn forget(&mut self) {
        (self.window, self.reconstructed) = (None, None);
    }

    /// What the tokens were looked at while the context was repeated, if the latest policy that had it repeated asked for
    /// the same.
    pub fn reconstructed(&self, looked_at: &LookedAt) -> Option<Arc<Buffer<f32>>> {
        let (known, scores) = self.reconstructed.as_ref()?;
        (known == looked_at).then(|| scores.clone())
    }

    /// Keeps that for the policies that follow.
    pub fn keep_reconstructed(&mut self, looked_at: LookedAt, scores: Arc<Buffer<f32>>) {
        self.reconstructed = Some((looked_at, scores));
    }

    /// As [`Evictor::see`], of the recorded sequence alone.
    pub fn see(
        &mut self,
        layer: usize,
        layers: usize,
        call: &Forward<'_>,
        lse: &[f32],
    ) -> Result<Option<AttentionSums>, ModelError> {
        if self.span == Span::Latest(0) {
            return Ok(None);
        }
        let window = match &mut self.window {
            Some(window) => window,
            none => {
                let shape = window_shape(layers, &call.shape);
                none.insert(ObservationWindow::new(&self.arena, shape, self.span, call.shape.q_len)?)
            }
        };
        window.push(layer, call.q, lse)?;
        if !self.accumulates {
            return Ok(None);
        }
        Ok(Some(AttentionSums { kv_len: call.shape.kv_len, sums: attention_sums(call, lse, &self.arena)? }))
    }
}

impl Evictor<'_> {
    /// Looks at what a prefill showed before this policy was put to work, in place of `sequence`'s own.
    pub fn adopt(&mut self, sequence: usize, recorder: &QueryRecorder) -> Result<(), ArenaError> {
        let span = Span::of_prefill(self.eviction.policy);
        if span != Span::Latest(0) {
            let window = recorder.window.as_ref().expect("a prefill was recorded");
            self.sequences[sequence].window = Some(window.copy(Some(span))?);
        }
        Ok(())
    }
}
