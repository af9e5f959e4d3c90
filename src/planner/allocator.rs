//! One trace of allocations through the rules of several allocators: what is asked for, what is taken, what lies idle.
//!
//! The caching allocator of PyTorch (`c10/cuda/CUDACachingAllocator.cpp`) never moves a block. It rounds to 512 B; up to
//! 1 MiB it cuts segments of 2 MiB, up to 10 MiB segments of 20 MiB, and beyond takes what is asked in whole 2 MiB. The
//! smallest free block that is large enough is cut in two, and neighbours that come back join. With expandable segments a
//! pool is one range of addresses that grows at its end, so that nothing is stranded between segments. A buddy allocator
//! rounds to powers of two; a reservation holds each label's most from the beginning; pages take any free page.

use super::PlanError;
use crate::serving::Buddy;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A change of the arena's ledger, as `kvsieve attend --timeline` writes them.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Event {
    /// What the bytes are for.
    pub label: String,
    /// Bytes taken (positive) or given back (negative).
    pub delta_bytes: i64,
    /// They only change their label: a block stays with the one that it was taken for.
    #[serde(default)]
    pub relabelled: bool,
}

/// What an allocator made of a trace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// Its name.
    pub allocator: &'static str,
    /// Most bytes that were asked for at one moment.
    pub allocated_peak_bytes: u64,
    /// Most bytes that it took from the device.
    pub reserved_peak_bytes: u64,
    /// Of these, not asked for at the moment when most were: rounding, and free blocks that fit nothing.
    pub fragmented_bytes: u64,
}

/// An allocator: takes and gives back blocks by number.
trait Allocator {
    fn take(&mut self, block: usize, bytes: u64, label: &str);
    fn give(&mut self, block: usize);
    /// Bytes that it has from the device.
    fn reserved(&self) -> u64;
}

/// Bytes at once that are replayed: a thirty-second of the buddy's pool, which has holes.
const MOST: u128 = 1 << 44;

/// Replays a trace.
///
/// # Errors
/// When it takes more than any memory has, an event gives back what none took, or the trace takes nothing.
pub fn replay(events: &[Event]) -> Result<Vec<Outcome>, PlanError> {
    let steps = steps(events)?;
    let most = most_of_labels(events);
    let allocators: [(&'static str, Box<dyn Allocator>); 5] = [
        ("PyTorch, caching", Box::new(Caching::new(false))),
        ("PyTorch, expandable segments", Box::new(Caching::new(true))),
        ("buddy", Box::new(BuddyBlocks { buddy: Buddy::new(1 << 40), held: HashMap::new(), end: 0 })),
        ("reserved, each label's most", Box::new(Reserved(most))),
        ("paged, 64 KiB", Box::new(Paged { held: HashMap::new(), pages: 0, most: 0 })),
    ];
    Ok(allocators.into_iter().map(|(name, mut allocator)| run(name, &mut *allocator, &steps)).collect())
}

/// A step of a trace with its blocks told apart.
enum Step<'a> {
    Take(usize, u64, &'a str),
    Give(usize, u64),
}

/// Pairs what is given back with the latest block of its label and size.
fn steps(events: &[Event]) -> Result<Vec<Step<'_>>, PlanError> {
    let wrong =
        |value: String, expected: &str| PlanError::Value { what: "the trace", value, expected: expected.into() };
    let mut live: HashMap<(&str, u64), Vec<usize>> = HashMap::new();
    let (mut steps, mut total) = (Vec::new(), 0u128);
    for (number, event) in events.iter().enumerate().filter(|(_, event)| !event.relabelled) {
        let bytes = event.delta_bytes.unsigned_abs();
        let key = (event.label.as_str(), bytes);
        match event.delta_bytes {
            0 => {}
            1.. if total + u128::from(bytes) > MOST => {
                let held = total + u128::from(bytes);
                return Err(wrong(format!("{held} B at event {number}"), "at most 2^44 B at once are replayed"));
            }
            1.. => {
                total += u128::from(bytes);
                live.entry(key).or_default().push(number);
                steps.push(Step::Take(number, bytes, &event.label));
            }
            _ => {
                let block = live.get_mut(&key).and_then(Vec::pop).ok_or_else(|| {
                    wrong(format!("{bytes} B of '{}' at event {number}", event.label), "given back, but never taken")
                })?;
                total -= u128::from(bytes);
                steps.push(Step::Give(block, bytes));
            }
        }
    }
    match steps.is_empty() {
        true => Err(wrong("without allocations".into(), "write one with `kvsieve attend --timeline FILE`")),
        false => Ok(steps),
    }
}

fn most_of_labels(events: &[Event]) -> u64 {
    let (mut live, mut most): (HashMap<&str, i64>, HashMap<&str, i64>) = Default::default();
    for event in events.iter().filter(|event| !event.relabelled) {
        let live = live.entry(&event.label).or_default();
        *live = live.saturating_add(event.delta_bytes);
        let most = most.entry(&event.label).or_default();
        *most = (*most).max(*live);
    }
    most.values().map(|&bytes| bytes.unsigned_abs()).sum()
}

fn run(name: &'static str, allocator: &mut dyn Allocator, steps: &[Step<'_>]) -> Outcome {
    let (mut live, mut outcome) =
        (0u64, Outcome { allocator: name, allocated_peak_bytes: 0, reserved_peak_bytes: 0, fragmented_bytes: 0 });
    for step in steps {
        match *step {
            Step::Take(block, bytes, label) => {
                allocator.take(block, bytes, label);
                live += bytes;
            }
            Step::Give(block, bytes) => {
                allocator.give(block);
                live -= bytes;
            }
        }
        outcome.reserved_peak_bytes = outcome.reserved_peak_bytes.max(allocator.reserved());
        if live > outcome.allocated_peak_bytes {
            outcome.allocated_peak_bytes = live;
            outcome.fragmented_bytes = allocator.reserved().saturating_sub(live);
        }
    }
    outcome
}

const ROUND: u64 = 512;
const SMALL: u64 = 1 << 20;
const SMALL_SEGMENT: u64 = 2 << 20;
const MIDDLE: u64 = 10 << 20;
const MIDDLE_SEGMENT: u64 = 20 << 20;

/// PyTorch's.
struct Caching {
    expandable: bool,
    small: Pool,
    large: Pool,
    /// Where blocks lie: whether in the small pool, and the address.
    held: HashMap<usize, (bool, u64)>,
}

/// Segments one behind another in one range of addresses, with gaps so that they never join unless they may.
#[derive(Default)]
struct Pool {
    /// Size and whether it is used, by address.
    blocks: BTreeMap<u64, (u64, bool)>,
    /// Free blocks by size.
    free: BTreeSet<(u64, u64)>,
    /// Where the next segment begins.
    next: u64,
    reserved: u64,
}

impl Pool {
    /// A free block that is large enough, the smallest and then the first.
    fn fitting(&self, bytes: u64) -> Option<u64> {
        self.free.range((bytes, 0)..).next().map(|&(_, at)| at)
    }

    fn insert(&mut self, at: u64, bytes: u64) {
        self.blocks.insert(at, (bytes, false));
        self.free.insert((bytes, at));
    }

    /// A new segment that joins nothing.
    fn segment(&mut self, bytes: u64) -> u64 {
        let at = self.next;
        self.next += bytes + 1;
        self.reserved += bytes;
        self.insert(at, bytes);
        at
    }

    /// More pages at the end, which join a free block there.
    fn extend(&mut self, bytes: u64, page: u64) -> u64 {
        let last = self.blocks.last_key_value().filter(|(_, (_, used))| !used).map(|(&at, &(size, _))| (at, size));
        let (at, there) = last.unwrap_or((self.next, 0));
        let more = (bytes - there).next_multiple_of(page);
        self.free.remove(&(there, at));
        self.insert(at, there + more);
        (self.next, self.reserved) = (self.next + more, self.reserved + more);
        at
    }

    /// Uses a free block; what is left is cut off when it is at least `least`.
    fn use_block(&mut self, at: u64, bytes: u64, least: u64) {
        let (size, _) = self.blocks[&at];
        self.free.remove(&(size, at));
        let left = size - bytes;
        let kept = if left >= least { bytes } else { size };
        self.blocks.insert(at, (kept, true));
        if kept < size {
            self.insert(at + bytes, left);
        }
    }

    fn give(&mut self, at: u64) {
        let (mut start, mut size) = (at, self.blocks[&at].0);
        if let Some((&next, &(more, false))) = self.blocks.range(at + 1..).next()
            && next == at + size
        {
            self.blocks.remove(&next);
            self.free.remove(&(more, next));
            size += more;
        }
        if let Some((&before, &(more, false))) = self.blocks.range(..at).next_back()
            && before + more == at
        {
            self.blocks.remove(&at);
            self.free.remove(&(more, before));
            (start, size) = (before, size + more);
        }
        self.insert(start, size);
    }
}

impl Caching {
    fn new(expandable: bool) -> Self {
        Caching { expandable, small: Pool::default(), large: Pool::default(), held: HashMap::new() }
    }
}

impl Allocator for Caching {
    fn take(&mut self, block: usize, bytes: u64, _: &str) {
        let bytes = bytes.next_multiple_of(ROUND);
        let is_small = bytes <= SMALL;
        let (pool, segment) = match (is_small, bytes < MIDDLE) {
            (true, _) => (&mut self.small, SMALL_SEGMENT),
            (false, true) => (&mut self.large, MIDDLE_SEGMENT),
            (false, false) => (&mut self.large, bytes.next_multiple_of(SMALL_SEGMENT)),
        };
        // Its `should_split`.
        let least = if is_small || self.expandable { ROUND } else { SMALL + 1 };
        let page = if is_small { SMALL_SEGMENT } else { MIDDLE_SEGMENT };
        let at = pool.fitting(bytes).unwrap_or_else(|| match self.expandable {
            true => pool.extend(bytes, page),
            false => pool.segment(segment),
        });
        pool.use_block(at, bytes, least);
        self.held.insert(block, (is_small, at));
    }

    fn give(&mut self, block: usize) {
        let (is_small, at) = self.held.remove(&block).expect("the trace was checked");
        if is_small { self.small.give(at) } else { self.large.give(at) }
    }

    fn reserved(&self) -> u64 {
        self.small.reserved + self.large.reserved
    }
}

struct BuddyBlocks {
    buddy: Buddy,
    held: HashMap<usize, (usize, usize)>,
    end: u64,
}

impl Allocator for BuddyBlocks {
    fn take(&mut self, block: usize, bytes: u64, _: &str) {
        let taken = self.buddy.take(bytes.div_ceil(ROUND) as usize).expect("the pool is larger than any trace");
        self.end = self.end.max((taken.0 + taken.1) as u64 * ROUND);
        self.held.insert(block, taken);
    }

    fn give(&mut self, block: usize) {
        self.buddy.give(self.held.remove(&block).expect("the trace was checked"));
    }

    fn reserved(&self) -> u64 {
        self.end
    }
}

struct Reserved(u64);

impl Allocator for Reserved {
    fn take(&mut self, _: usize, _: u64, _: &str) {}
    fn give(&mut self, _: usize) {}
    fn reserved(&self) -> u64 {
        self.0
    }
}

const PAGE: u64 = 64 << 10;

struct Paged {
    held: HashMap<usize, u64>,
    pages: u64,
    most: u64,
}

impl Allocator for Paged {
    fn take(&mut self, block: usize, bytes: u64, _: &str) {
        let pages = bytes.div_ceil(PAGE);
        self.held.insert(block, pages);
        self.pages += pages;
        self.most = self.most.max(self.pages);
    }

    fn give(&mut self, block: usize) {
        self.pages -= self.held.remove(&block).expect("the trace was checked");
    }

    fn reserved(&self) -> u64 {
        self.most * PAGE
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn event(label: &str, mib: f64) -> Event {
        Event { label: label.into(), delta_bytes: (mib * f64::from(1 << 20)) as i64, relabelled: false }
    }

    fn reserved(events: &[Event]) -> Vec<u64> {
        replay(events).unwrap().iter().map(|outcome| outcome.reserved_peak_bytes).collect()
    }

    #[test]
    fn segments_are_cut_as_pytorch_cuts_them() {
        let mib = |n: u64| n << 20;
        // 512 B of a segment of 2 MiB; 5 MiB of 20; 11 of 12.
        assert_eq!(reserved(&[event("a", 0.0001)])[0], mib(2));
        assert_eq!(reserved(&[event("a", 5.0), event("a", 5.0), event("a", 5.0)])[0], mib(20));
        assert_eq!(reserved(&[event("a", 11.0)])[0], mib(12));
        // The next batch is a little larger: the old block fits nothing, and both stay.
        let slivers = [event("a", 64.0), event("a", -64.0), event("a", 66.0)];
        assert_eq!(reserved(&slivers)[..2], [mib(130), mib(80)]);
        // Freed neighbours join and are used again.
        let joined =
            [event("a", 6.0), event("b", 6.0), event("a", -6.0), event("b", -6.0), event("c", 9.0), event("d", 9.0)];
        assert_eq!(reserved(&joined)[0], mib(20));
        assert_eq!(reserved(&joined)[2..], [mib(32), mib(30), mib(18)]);
    }

    #[test]
    fn traces_that_make_no_sense_are_refused() {
        for events in [vec![], vec![event("a", 1.0), event("a", -2.0)], vec![event("a", 1.0), event("b", -1.0)]] {
            assert!(replay(&events).is_err(), "{events:?}");
        }
        // Each event is within the limit, and what is held at once is not.
        let most = || event("a", f64::from(1 << 24));
        let given = event("a", -f64::from(1 << 24));
        assert!(replay(&[most(), given, most()]).is_ok() && replay(&[most(), most()]).is_err());
    }

    proptest! {
        #[test]
        fn nobody_reserves_less_than_is_asked_for(steps in prop::collection::vec((any::<bool>(), 1i64..40 << 20), 1..80)) {
            let (mut live, mut events) = (Vec::new(), Vec::new());
            for (gives, bytes) in steps {
                if gives && !live.is_empty() {
                    let bytes: i64 = live.swap_remove(bytes as usize % live.len());
                    events.push(Event { label: "a".into(), delta_bytes: -bytes, relabelled: false });
                } else {
                    live.push(bytes);
                    events.push(Event { label: "a".into(), delta_bytes: bytes, relabelled: false });
                }
            }
            for outcome in replay(&events).unwrap() {
                prop_assert!(outcome.reserved_peak_bytes >= outcome.allocated_peak_bytes, "{outcome:?}");
            }
        }
    }
}
