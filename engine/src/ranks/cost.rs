//! What communication costs: how long a message takes on a link, and what rings, trees and ZeRO make of it.
//!
//! A [`Link`] says how long a message of some bytes takes: by latency and bandwidth, as they are published, or by points that
//! were measured between the ranks at hand ([`Links::measure`]), because a transport's bandwidth is not one number: small blocks
//! stay in a cache on their way, and long ones wait for a queue to drain. `docs/scale.md` has the equations, and what they give
//! beside what was measured.

use super::{Comm, Rank, RankError};
use crate::memory::{Arena, Label};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// Nanoseconds of a message by its bytes: points with straight lines between them, the last of which goes on.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Bytes, from 0 up, and nanoseconds.
    points: Vec<(u64, f64)>,
}

impl Link {
    /// A link of this latency and bandwidth.
    pub fn new(latency_ns: f64, bytes_per_s: f64) -> Self {
        let bytes = 1 << 30;
        Link { points: vec![(0, latency_ns), (bytes, latency_ns + bytes as f64 / bytes_per_s * 1e9)] }
    }

    /// Nanoseconds of a message.
    pub fn ns(&self, bytes: u64) -> f64 {
        let above = self.points.iter().position(|&(at, _)| at >= bytes).unwrap_or(self.points.len());
        match self.points[..] {
            [] => 0.0,
            [(_, ns)] => ns,
            [(_, first), ..] if above == 0 => first,
            _ => {
                let above = above.min(self.points.len() - 1);
                let [(from, low), (to, high)] = [self.points[above - 1], self.points[above]];
                low + (high - low) * (bytes - from) as f64 / (to - from) as f64
            }
        }
    }
}

/// The links between the ranks of a [`Comm`], and what messages take besides, as passes use them: with what is sent no longer in a cache
/// of the core, all ranks at once, and one message behind another.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Links {
    /// Every rank sends to the next and receives from the one before, while its threads are handed some work: a step of a ring.
    pub around: Link,
    /// One of a pair of ranks sends, and the other waits for it: a step of a tree.
    pub across: Link,
    /// Room is taken from an arena and given back: for long messages the system makes new pages, which takes as long as sending
    /// them.
    pub room: Link,
    /// Nanoseconds that the first message of a pass takes longer than the next ones: ranks that had waited for others have gone to sleep.
    #[serde(default)]
    pub start_ns: f64,
    /// Nanoseconds in which a rank's threads are handed some work and are done: what is received is merged so.
    #[serde(default)]
    pub handed_ns: f64,
    /// How many times longer a rank takes to read memory where all ranks do than alone.
    #[serde(default)]
    pub together: f64,
}

/// What a pass sends, as a rank sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sending {
    /// Bytes of its exchanges one behind another, of the rank that sends most in each.
    pub exchanges: Vec<u64>,
    /// Bytes of each room that is taken for them.
    pub rooms: Vec<u64>,
    /// Times that a rank's threads are handed what was received.
    pub merges: u64,
}

impl Sending {
    /// Nanoseconds of it alone, over one of the links.
    pub fn ns(&self, links: &Links, over: impl Fn(&Links) -> &Link) -> f64 {
        let sum = |link: &Link, bytes: &[u64]| bytes.iter().map(|&bytes| link.ns(bytes)).sum::<f64>();
        let start_ns = if self.exchanges.is_empty() { 0.0 } else { links.start_ns };
        let merging_ns = self.merges as f64 * links.handed_ns;
        sum(over(links), &self.exchanges) + sum(&links.room, &self.rooms) + start_ns + merging_ns
    }

    /// Bytes of the longest message.
    pub fn most_bytes(&self) -> u64 {
        self.exchanges.iter().copied().max().unwrap_or(0)
    }
}

/// Bytes of the messages that are timed, from 0 to the first that is as long as any that is asked about.
const TIMED_BYTES: [usize; 6] = [0, 4 << 10, 64 << 10, 512 << 10, 4 << 20, 32 << 20];
/// Times that messages are sent; an odd number.
const TIMES: usize = 5;
/// Messages that follow one another, the first of which wakes those who wait.
const HOPS: usize = 3;
/// Bytes that are written before messages are timed: more than a core's own caches hold.
const COLD_BYTES: usize = 4 << 20;
/// Bytes that a rank reads to see whether others slow it down.
const READ_BYTES: usize = 16 << 20;

impl Links {
    /// Times messages of up to about `most_bytes` between these ranks, all of which must call it.
    ///
    /// # Errors
    /// When another rank ended.
    pub fn measure(on: Rank<'_>, most_bytes: u64) -> Result<Self, RankError> {
        let comm = on.comm;
        let count = TIMED_BYTES.iter().position(|&bytes| bytes as u64 >= most_bytes).unwrap_or(TIMED_BYTES.len() - 1);
        let sizes = &TIMED_BYTES[..=count];
        // As a pass's own arena, it holds on to few pages and asks the system for many.
        let arena = Arena::unlimited();
        let mut rooms = [vec![1u8; sizes[count]], vec![0u8; sizes[count]]];
        let mut timer = Timer { comm, other: vec![0; COLD_BYTES / 8] };
        let mut links = Links::default();
        for &bytes in sizes {
            // What came in goes out next, as keys and values do.
            let [first_ns, around_ns] = timer.hops(HOPS, |hop| {
                let [even, odd] = &mut rooms;
                let (out, room) = if hop % 2 == 0 { (even, odd) } else { (odd, even) };
                let (send, mut receive) = ([(comm.next(), &out[..bytes])], [(comm.previous(), &mut room[..bytes])]);
                comm.exchange(on.cpu, &send, &mut receive, || ())
            })?;
            links.around.points.push((bytes as u64, around_ns));
            if bytes == 0 {
                links.start_ns = (first_ns - around_ns).max(0.0);
            }
            let other = comm.rank() ^ 1;
            let [_, across_ns] = timer.hops(HOPS, |_| {
                if other >= comm.size() {
                    return Ok(());
                }
                // There and back.
                let [sent, room] = &mut rooms;
                if comm.rank() < other {
                    comm.transfer(&[(other, &sent[..bytes])], &mut [])?;
                    comm.transfer(&[], &mut [(other, &mut room[..bytes])])
                } else {
                    comm.transfer(&[], &mut [(other, &mut room[..bytes])])?;
                    comm.transfer(&[(other, &sent[..bytes])], &mut [])
                }
            })?;
            links.across.points.push((bytes as u64, across_ns / 2.0));
            let [taken_ns, _] = timer.hops(1, |_| {
                arena.alloc::<u8>(Label::Workspace, bytes)?;
                Ok(())
            })?;
            links.room.points.push((bytes as u64, taken_ns));
        }
        let handed = timer.hops(HOPS, |_| {
            on.cpu.install(|| ());
            Ok(())
        });
        links.handed_ns = handed?[1];
        links.together = together(comm)?;
        Ok(links)
    }
}

/// Times what all ranks do, from where all of them begin.
struct Timer<'a> {
    comm: &'a Comm,
    /// What is written in between.
    other: Vec<u64>,
}

impl Timer<'_> {
    /// Medians of the nanoseconds of the first of `count` hops, and of each of the others, on the rank that takes longest, for which
    /// the others wait. Before them ranks do other work, of which the first has more: what is sent lies in no core's cache, and who is
    /// done first has gone to sleep, as where a pass begins.
    fn hops(
        &mut self,
        count: usize,
        mut hop: impl FnMut(usize) -> Result<(), RankError>,
    ) -> Result<[f64; 2], RankError> {
        let (mut firsts_ns, mut others_ns) = (Vec::new(), Vec::new());
        for _ in 0..TIMES {
            // The first rank, which lets all others go, comes last: those are asleep.
            for _ in 0..1 + usize::from(self.comm.rank() == 0) {
                self.other.iter_mut().for_each(|number| *number = number.wrapping_add(1));
                std::hint::black_box(&self.other);
            }
            self.comm.barrier()?;
            let start = Instant::now();
            let mut ends_ns = [0u64; 2];
            for index in 0..count {
                hop(index)?;
                ends_ns[usize::from(index > 0)] = start.elapsed().as_nanos() as u64;
            }
            let [first, last] = most(self.comm, ends_ns)?.map(|ns| ns as f64);
            firsts_ns.push(first);
            others_ns.push(if count > 1 { (last - first).max(0.0) / (count - 1) as f64 } else { 0.0 });
        }
        Ok([median(firsts_ns), median(others_ns)])
    }
}

/// The middle one of an odd number of times.
fn median(mut times_ns: Vec<f64>) -> f64 {
    times_ns.sort_by(f64::total_cmp);
    times_ns[times_ns.len() / 2]
}

/// The largest of all ranks' numbers.
fn most(comm: &Comm, numbers: [u64; 2]) -> Result<[u64; 2], RankError> {
    let mut mine = numbers;
    comm.all_reduce(bytemuck::bytes_of_mut(&mut mine), &mut [0; 16], |mine, theirs| {
        let theirs: [u64; 2] = bytemuck::pod_read_unaligned(theirs);
        let own: [u64; 2] = bytemuck::pod_read_unaligned(mine);
        let most = [own[0].max(theirs[0]), own[1].max(theirs[1])];
        mine.copy_from_slice(bytemuck::bytes_of(&most));
    })?;
    Ok(mine)
}

/// How many times longer it takes to read memory where all ranks do than where the first does alone.
fn together(comm: &Comm) -> Result<f64, RankError> {
    const TRIES: usize = 3;
    let numbers = vec![1u64; READ_BYTES / 8];
    let mut times_ns = [const { Vec::new() }; 2];
    for _ in 0..TRIES {
        for all in [false, true] {
            comm.barrier()?;
            let start = Instant::now();
            if all || comm.rank() == 0 {
                std::hint::black_box(numbers.iter().fold(0u64, |sum, number| sum.wrapping_add(*number)));
            }
            let [ns, _] = most(comm, [start.elapsed().as_nanos() as u64, 0])?;
            times_ns[usize::from(all)].push(ns as f64);
        }
    }
    let [alone_ns, all_ns] = times_ns.map(median);
    Ok((all_ns / alone_ns.max(1.0)).max(1.0))
}

/// Time of a pass around a ring of `ranks`: in each step a rank computes, and sends meanwhile; in the last it only computes.
pub fn ring_time(ranks: u64, compute: f64, send: f64) -> f64 {
    (ranks - 1) as f64 * compute.max(send) + compute
}

/// Messages of a tree of `ranks` that follow one another: up to rank 0, and down again.
pub fn tree_depth(ranks: u64) -> u64 {
    2 * u64::from(ranks.next_power_of_two().trailing_zeros())
}

/// Bytes that each of `ranks` sends in a step of ZeRO (arXiv 1910.02054, section 7): gradients are reduced and parameters gathered
/// around a ring, `2 Ψ` elements in all; stage 3 gathers parameters for both passes and divides gradients, `3 Ψ`.
pub fn zero_bytes(stage: u64, parameter_bytes: u64, ranks: u64) -> u64 {
    let around = parameter_bytes.div_ceil(ranks) * (ranks - 1);
    if stage < 3 { 2 * around } else { 3 * around }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::kernel;
    use crate::device::Cpu;
    use crate::ranks::threads;

    #[test]
    fn a_link_is_its_latency_and_its_bandwidth() {
        let link = Link::new(5e3, 2e9);
        for (bytes, ns) in [(0, 5e3), (1 << 20, 5e3 + 524_288.0), (1 << 34, 5e3 + 8_589_934_592.0)] {
            assert!((link.ns(bytes) - ns).abs() < 1e-3 * ns, "{bytes}: {}", link.ns(bytes));
        }
        let bent = Link { points: vec![(0, 10.0), (100, 20.0), (200, 120.0)] };
        assert_eq!([0, 50, 100, 150, 300].map(|bytes| bent.ns(bytes)), [10.0, 15.0, 20.0, 70.0, 220.0]);
    }

    #[test]
    fn longer_messages_are_timed_as_far_as_they_are_asked_about() {
        let tiled = kernel("tiled").unwrap();
        let links = threads::run(3, |comm| {
            let (cpu, arena) = (Cpu::new(Some(1)).unwrap(), Arena::unlimited());
            Links::measure(Rank { comm, cpu: &cpu, arena: &arena, kernel: &*tiled }, 60_000)
        });
        let links = links.unwrap();
        assert!(links.iter().all(|of_rank| *of_rank == links[0]), "all ranks know the same");
        for link in [&links[0].around, &links[0].across, &links[0].room] {
            assert_eq!(link.points.iter().map(|point| point.0).collect::<Vec<_>>(), [0, 4 << 10, 64 << 10]);
            assert!(link.points.iter().all(|point| point.1 >= 0.0));
        }
        let Links { start_ns, handed_ns, together, .. } = links[0];
        assert!(start_ns >= 0.0 && handed_ns > 0.0 && together >= 1.0, "{start_ns} {handed_ns} {together}");
    }

    #[test]
    fn sending_adds_up_messages_and_their_room() {
        let links = Links {
            around: Link::new(10.0, 1e9),
            across: Link::new(0.0, 1e9),
            room: Link::new(1.0, 1e10),
            start_ns: 1000.0,
            handed_ns: 7.0,
            together: 1.0,
        };
        let sending = Sending { exchanges: vec![100, 300], rooms: vec![300], merges: 0 };
        assert_eq!(sending.ns(&links, |links| &links.around).round(), 20.0 + 400.0 + 31.0 + 1000.0);
        let merged = Sending { merges: 2, ..sending };
        assert_eq!((merged.ns(&links, |links| &links.across).round(), merged.most_bytes()), (1445.0, 300));
        // One rank sends nothing and wakes nobody.
        assert_eq!(
            Sending { exchanges: Vec::new(), rooms: Vec::new(), merges: 0 }.ns(&links, |links| &links.around),
            0.0
        );
    }

    #[test]
    fn zero_sends_what_its_paper_says() {
        let (parameters, ranks) = (7_000_000_000u64, 64);
        for (stage, times) in [(0, 2.0), (1, 2.0), (2, 2.0), (3, 3.0)] {
            let bytes = zero_bytes(stage, 2 * parameters, ranks) as f64;
            assert!((bytes / (2 * parameters) as f64 - times * 63.0 / 64.0).abs() < 1e-6);
        }
        assert_eq!(zero_bytes(3, 100, 1), 0);
    }

    #[test]
    fn a_ring_waits_for_what_is_slower_and_a_tree_for_every_level() {
        assert_eq!([40.0, 200.0].map(|send| ring_time(4, 100.0, send)), [400.0, 3.0 * 200.0 + 100.0]);
        assert_eq!([1, 2, 3, 4, 5, 8].map(tree_depth), [0, 2, 4, 4, 6, 6]);
    }
}
