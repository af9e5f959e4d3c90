//! The labelled arena: a ledger over pages that come straight from the operating system.

use super::spare::{Spare, map};
use super::{Label, LabelBytes};
use bytemuck::Pod;
use memmap2::MmapMut;
use serde::Serialize;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

const LABELS: usize = Label::ALL.len();

/// An allocation that could not be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArenaError {
    /// The arena's limit would be passed.
    #[error(
        "out of memory: {requested_bytes} bytes for {label} requested, {live_bytes} of {limit_bytes} bytes in use; \
         {remedy} or raise --limit-memory",
        label = label.name(), remedy = if *label == Label::Weights { "take fewer bits for weights" } else { "shorten the context" }
    )]
    Limit {
        /// What the memory was for.
        label: Label,
        /// Bytes asked for.
        requested_bytes: u64,
        /// Bytes in use at that moment.
        live_bytes: u64,
        /// The arena's limit.
        limit_bytes: u64,
    },
    /// The operating system refused.
    #[error("out of memory: the system refused {requested_bytes} bytes for {label}: {reason}", label = label.name())]
    System {
        /// What the memory was for.
        label: Label,
        /// Bytes asked for.
        requested_bytes: u64,
        /// The system's own words.
        reason: String,
    },
}

/// One change of the ledger, for the timeline.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Event {
    /// Nanoseconds since the arena was made.
    pub at_ns: u64,
    /// What the bytes are for.
    pub label: Label,
    /// Bytes taken (positive) or given back (negative).
    pub delta_bytes: i64,
    /// Bytes in use afterwards, all labels together.
    pub live_bytes: u64,
    /// One of the two halves of a change of label, with which no memory moves.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub relabelled: bool,
}

/// A picture of the ledger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Bytes in use now.
    pub live_bytes: u64,
    /// Most bytes in use at one moment since the last [`Arena::reset_peak`].
    pub peak_bytes: u64,
    /// Bytes in use now, for each label.
    pub live: LabelBytes,
    /// Most bytes in use at one moment, for each label. The moments differ, so these need not add up to the peak.
    pub peak: LabelBytes,
}

struct Ledger {
    live: [u64; LABELS],
    peak: [u64; LABELS],
    live_total: u64,
    peak_total: u64,
    timeline: Option<Vec<Event>>,
}

impl Ledger {
    fn change(&mut self, label: Label, delta_bytes: i64, started: Instant) {
        let slot = label as usize;
        self.live[slot] = self.live[slot].checked_add_signed(delta_bytes).expect("a label gave back more than it took");
        self.live_total =
            self.live_total.checked_add_signed(delta_bytes).expect("the arena gave back more than it took");
        self.peak[slot] = self.peak[slot].max(self.live[slot]);
        self.peak_total = self.peak_total.max(self.live_total);
        let live_bytes = self.live_total;
        if let Some(timeline) = &mut self.timeline {
            let at_ns = started.elapsed().as_nanos() as u64;
            timeline.push(Event { at_ns, label, delta_bytes, live_bytes, relabelled: false });
        }
    }
}

struct Inner {
    ledger: Mutex<Ledger>,
    spare: Mutex<Spare>,
    limit_bytes: u64,
    started: Instant,
}

impl Inner {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // The ledger's numbers stay consistent even if a thread panicked while holding it.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spare(&self) -> MutexGuard<'_, Spare> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A labelled arena. Clones share one ledger; it may be used from every thread.
#[derive(Clone)]
pub struct Arena(Arc<Inner>);

impl Arena {
    /// An arena that refuses to grow past `limit_bytes`.
    pub fn with_limit(limit_bytes: u64) -> Self {
        let ledger = Ledger { live: [0; LABELS], peak: [0; LABELS], live_total: 0, peak_total: 0, timeline: None };
        let (ledger, spare) = (Mutex::new(ledger), Mutex::default());
        Arena(Arc::new(Inner { ledger, spare, limit_bytes, started: Instant::now() }))
    }

    /// An arena without a limit of its own.
    pub fn unlimited() -> Self {
        Self::with_limit(u64::MAX)
    }

    /// Takes `len` zeroed elements, resident at once so that no page fault falls into a timed region.
    ///
    /// # Errors
    /// [`ArenaError`] when the limit would be passed or the system has no memory left.
    pub fn alloc<T: Pod>(&self, label: Label, len: usize) -> Result<Buffer<T>, ArenaError> {
        let bytes = len as u64 * size_of::<T>() as u64;
        self.charge(label, bytes)?;
        let spare = self.0.spare().take(bytes as usize);
        let pages = spare.map_or_else(|| map(bytes as usize), Ok).map_err(|error| {
            self.0.ledger().change(label, -(bytes as i64), self.0.started);
            ArenaError::System { label, requested_bytes: bytes, reason: error.to_string() }
        })?;
        Ok(Buffer { pages: Some(pages), len, label, arena: self.clone(), element: PhantomData })
    }

    /// Counts bytes that lie elsewhere, in a device's memory, until the claim is dropped.
    ///
    /// # Errors
    /// [`ArenaError::Limit`] when the limit would be passed.
    pub fn claim(&self, label: Label, bytes: u64) -> Result<Claim, ArenaError> {
        self.charge(label, bytes)?;
        Ok(Claim { label, bytes, arena: self.clone() })
    }

    /// Counts bytes that are about to be taken, unless they are beyond the limit: in one step, for threads that ask together.
    fn charge(&self, label: Label, requested_bytes: u64) -> Result<(), ArenaError> {
        let mut ledger = self.0.ledger();
        let (live_bytes, limit_bytes) = (ledger.live_total, self.0.limit_bytes);
        if live_bytes.saturating_add(requested_bytes) > limit_bytes {
            return Err(ArenaError::Limit { label, requested_bytes, live_bytes, limit_bytes });
        }
        ledger.change(label, requested_bytes as i64, self.0.started);
        Ok(())
    }

    /// Moves `bytes` from one label to another without touching memory (a page that becomes occupied or free).
    pub fn relabel(&self, from: Label, to: Label, bytes: u64) {
        if bytes > 0 {
            let mut ledger = self.0.ledger();
            ledger.change(from, -(bytes as i64), self.0.started);
            ledger.change(to, bytes as i64, self.0.started);
            if let Some([.., left, came]) = ledger.timeline.as_deref_mut() {
                (left.relabelled, came.relabelled) = (true, true);
            }
        }
    }

    /// Forgets past peaks: from here on, peaks count from what is in use now.
    pub fn reset_peak(&self) {
        let mut ledger = self.0.ledger();
        ledger.peak = ledger.live;
        ledger.peak_total = ledger.live_total;
    }

    /// The ledger as it stands.
    pub fn usage(&self) -> Usage {
        let ledger = self.0.ledger();
        let by_label = |values: &[u64; LABELS]| {
            Label::ALL.iter().map(|&label| (label, values[label as usize])).filter(|&(_, bytes)| bytes > 0).collect()
        };
        Usage {
            live_bytes: ledger.live_total,
            peak_bytes: ledger.peak_total,
            live: by_label(&ledger.live),
            peak: by_label(&ledger.peak),
        }
    }

    /// Bytes in use for one label.
    pub fn live_bytes(&self, label: Label) -> u64 {
        self.0.ledger().live[label as usize]
    }

    /// Starts to record every change of the ledger.
    pub fn record_timeline(&self) {
        self.0.ledger().timeline.get_or_insert_default();
    }

    /// The recorded changes so far; empty unless [`Arena::record_timeline`] was called.
    pub fn timeline(&self) -> Vec<Event> {
        self.0.ledger().timeline.clone().unwrap_or_default()
    }
}

/// Elements that live in an arena. Dropping it returns the bytes to the ledger, and the pages to the system or, if they are
/// few, to the arena's spare ones.
pub struct Buffer<T> {
    /// There until the buffer is dropped.
    pages: Option<MmapMut>,
    len: usize,
    label: Label,
    arena: Arena,
    element: PhantomData<T>,
}

impl<T> Buffer<T> {
    /// Size in bytes, as the ledger counts it.
    pub fn bytes(&self) -> u64 {
        (self.len * size_of::<T>()) as u64
    }
}

impl<T: Pod> Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        let pages = self.pages.as_ref().expect("the buffer is not dropped");
        bytemuck::cast_slice(&pages[..self.len * size_of::<T>()])
    }
}

impl<T: Pod> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let pages = self.pages.as_mut().expect("the buffer is not dropped");
        bytemuck::cast_slice_mut(&mut pages[..self.len * size_of::<T>()])
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        let bytes = (self.len * size_of::<T>()) as i64;
        self.arena.0.ledger().change(self.label, -bytes, self.arena.0.started);
        self.arena.0.spare().give(self.pages.take().expect("a buffer is dropped once"));
    }
}

/// Bytes of another memory that the ledger counts. Dropping it takes them off again.
pub struct Claim {
    label: Label,
    bytes: u64,
    arena: Arena,
}

impl Claim {
    /// The bytes counted.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.arena.0.ledger().change(self.label, -(self.bytes as i64), self.arena.0.started);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_labels_and_timeline_follow_the_allocations() {
        let arena = Arena::unlimited();
        arena.record_timeline();
        let kv = arena.alloc::<f32>(Label::Kv, 100).unwrap();
        let scores = arena.alloc::<f64>(Label::Scores, 10).unwrap();
        assert_eq!(arena.usage().peak_bytes, 480);
        drop(scores);
        assert_eq!(arena.usage().live_bytes, 400);
        assert_eq!(arena.usage().peak[&Label::Scores], 80);
        arena.reset_peak();
        assert_eq!(arena.usage().peak_bytes, 400);
        assert!(!arena.usage().peak.contains_key(&Label::Scores));
        drop(kv);
        let deltas: Vec<i64> = arena.timeline().iter().map(|event| event.delta_bytes).collect();
        assert_eq!(deltas, [400, 80, -80, -400]);
        assert_eq!(arena.timeline().last().unwrap().live_bytes, 0);
    }

    #[test]
    fn the_limit_is_an_error_that_names_the_numbers() {
        let arena = Arena::with_limit(1000);
        let _held = arena.alloc::<u8>(Label::Input, 900).unwrap();
        let error = arena.alloc::<u8>(Label::Scores, 101).err().unwrap();
        let expected =
            ArenaError::Limit { label: Label::Scores, requested_bytes: 101, live_bytes: 900, limit_bytes: 1000 };
        assert_eq!(error, expected);
        assert!(arena.alloc::<u8>(Label::Scores, 100).is_ok());
    }

    #[test]
    fn claims_count_until_they_are_dropped() {
        let arena = Arena::with_limit(1000);
        let claim = arena.claim(Label::Scores, 900).unwrap();
        assert_eq!((claim.bytes(), arena.live_bytes(Label::Scores)), (900, 900));
        assert!(matches!(arena.claim(Label::Kv, 101), Err(ArenaError::Limit { live_bytes: 900, .. })));
        drop(claim);
        assert_eq!((arena.usage().live_bytes, arena.usage().peak_bytes), (0, 900));
    }

    #[test]
    fn every_thread_counts_in_the_same_ledger() {
        let arena = Arena::unlimited();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let arena = arena.clone();
                scope.spawn(move || (0..50).for_each(|_| drop(arena.alloc::<u8>(Label::Workspace, 64).unwrap())));
            }
        });
        let usage = arena.usage();
        assert_eq!(usage.live_bytes, 0);
        assert!((64..=256).contains(&usage.peak_bytes));
    }

    #[test]
    fn relabelling_moves_bytes_and_raises_the_peak_of_the_target() {
        let arena = Arena::unlimited();
        let _slab = arena.alloc::<u8>(Label::KvSlack, 100).unwrap();
        arena.relabel(Label::KvSlack, Label::Kv, 60);
        arena.relabel(Label::Kv, Label::KvSlack, 20);
        let usage = arena.usage();
        assert_eq!((usage.live[&Label::Kv], usage.live[&Label::KvSlack]), (40, 60));
        assert_eq!(usage.peak[&Label::Kv], 60);
        assert_eq!(usage.peak_bytes, 100);
        arena.relabel(Label::Kv, Label::KvSlack, 40);
    }
}
