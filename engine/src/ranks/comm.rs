//! Communication between ranks: what attention over ranks needs, counted, over whatever moves the bytes.
//!
//! All-reduce, all-gather and the barrier are made of messages between two ranks, so that they are the same on each transport,
//! add up in one order, and every byte that is sent is counted.

use super::RankError;
use crate::device::Cpu;
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::time::Instant;

/// Numbers that [`Comm::reduce_scatter`] takes from each rank at a time.
const SUM_BUCKET: usize = 1 << 16;

/// A message to a rank.
pub type Sent<'a> = (usize, &'a [u8]);
/// Room for a message from a rank.
pub type Received<'a> = (usize, &'a mut [u8]);

/// Moves bytes between ranks.
pub trait Transport {
    /// Name in records.
    fn name(&self) -> &'static str;

    /// The number of this rank, from 0.
    fn rank(&self) -> usize;

    /// Ranks.
    fn size(&self) -> usize;

    /// Sends and receives at once, and returns when all of it is done. Messages from one rank to another come in the order in
    /// which they were sent, each as long as the room for it; a message may have no bytes. No rank sends to itself.
    ///
    /// # Errors
    /// When another rank ended, or has been silent for too long.
    fn transfer(&self, send: &[Sent<'_>], receive: &mut [Received<'_>]) -> Result<(), RankError>;
}

/// The transport of a rank that has no other.
struct Alone;

impl Transport for Alone {
    fn name(&self) -> &'static str {
        "alone"
    }

    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn transfer(&self, send: &[Sent<'_>], receive: &mut [Received<'_>]) -> Result<(), RankError> {
        assert!(send.is_empty() && receive.is_empty(), "no rank sends to itself");
        Ok(())
    }
}

/// Some of the ranks of a transport.
struct Among {
    whole: Rc<dyn Transport>,
    members: Vec<usize>,
    rank: usize,
}

impl Transport for Among {
    fn name(&self) -> &'static str {
        self.whole.name()
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn transfer(&self, send: &[Sent<'_>], receive: &mut [Received<'_>]) -> Result<(), RankError> {
        let send: Vec<Sent<'_>> = send.iter().map(|&(to, bytes)| (self.members[to], bytes)).collect();
        let mut receive: Vec<Received<'_>> =
            receive.iter_mut().map(|(from, room)| (self.members[*from], &mut **room)).collect();
        self.whole.transfer(&send, &mut receive)
    }
}

/// What a rank sent, and how long it computed and waited meanwhile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Messages.
    pub messages: u64,
    /// Bytes of all messages.
    pub sent_bytes: u64,
    /// Of these, bytes that were sent while something was computed.
    pub sent_beside_bytes: u64,
    /// Nanoseconds of the work beside which was sent.
    pub compute_ns: u64,
    /// Nanoseconds from the end of such work to the end of the exchange beside it, and of exchanges without work: what
    /// computing did not hide.
    pub exposed_ns: u64,
}

/// A rank among ranks.
pub struct Comm {
    transport: Rc<dyn Transport>,
    traffic: RefCell<Traffic>,
}

impl Comm {
    /// A rank of this transport.
    pub fn new(transport: impl Transport + 'static) -> Self {
        Comm { transport: Rc::new(transport), traffic: RefCell::default() }
    }

    /// The only rank.
    pub fn alone() -> Self {
        Comm::new(Alone)
    }

    /// Some of the ranks, this one among them, as ranks of their own in the order in which they are named. Each counts what it
    /// sends.
    ///
    /// # Panics
    /// When this rank is not among them.
    pub fn among(&self, members: Vec<usize>) -> Self {
        let rank = members.iter().position(|&member| member == self.rank()).expect("a rank is among its own");
        Comm::new(Among { whole: self.transport.clone(), members, rank })
    }

    /// What moves the bytes.
    pub fn transport(&self) -> &'static str {
        self.transport.name()
    }

    /// The number of this rank, from 0.
    pub fn rank(&self) -> usize {
        self.transport.rank()
    }

    /// Ranks.
    pub fn size(&self) -> usize {
        self.transport.size()
    }

    /// The rank behind this one in the ring.
    pub fn next(&self) -> usize {
        (self.rank() + 1) % self.size()
    }

    /// The rank before this one in the ring.
    pub fn previous(&self) -> usize {
        (self.rank() + self.size() - 1) % self.size()
    }

    /// What was sent since the last call, and how long was waited.
    pub fn take_traffic(&self) -> Traffic {
        self.traffic.take()
    }

    /// Sends and receives at once ([`Transport::transfer`]).
    ///
    /// # Errors
    /// When another rank ended, or has been silent for too long.
    pub fn transfer(&self, send: &[Sent<'_>], receive: &mut [Received<'_>]) -> Result<(), RankError> {
        let start = Instant::now();
        let done = self.transport.transfer(send, receive);
        self.count(send, None, nanoseconds(start));
        done
    }

    /// Sends and receives while `work` computes on `cpu`; its result.
    ///
    /// # Errors
    /// As [`Comm::transfer`].
    pub fn exchange<R: Send>(
        &self,
        cpu: &Cpu,
        send: &[Sent<'_>],
        receive: &mut [Received<'_>],
        work: impl FnOnce() -> R + Send,
    ) -> Result<R, RankError> {
        let start = Instant::now();
        let worked = || {
            let result = work();
            (result, nanoseconds(start))
        };
        let ((result, compute_ns), done) = match (send, &*receive) {
            ([], []) => (worked(), Ok(())),
            _ => cpu.beside(worked, || self.transport.transfer(send, receive)),
        };
        self.count(send, Some(compute_ns), nanoseconds(start) - compute_ns);
        done.map(|()| result)
    }

    fn count(&self, send: &[Sent<'_>], compute_ns: Option<u64>, exposed_ns: u64) {
        let mut traffic = self.traffic.borrow_mut();
        let sent_bytes = send.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>();
        traffic.messages += send.len() as u64;
        traffic.sent_bytes += sent_bytes;
        traffic.sent_beside_bytes += compute_ns.map_or(0, |_| sent_bytes);
        traffic.compute_ns += compute_ns.unwrap_or(0);
        traffic.exposed_ns += exposed_ns;
    }

    /// Makes `values` on every rank what `merge(mine, theirs)` makes of those of all ranks, neighbours first: up a binomial
    /// tree to rank 0, and the result down again. `scratch` is as long. A rank sends [`all_reduce_messages`] times.
    ///
    /// # Errors
    /// As [`Comm::transfer`].
    pub fn all_reduce(
        &self,
        values: &mut [u8],
        scratch: &mut [u8],
        mut merge: impl FnMut(&mut [u8], &[u8]),
    ) -> Result<(), RankError> {
        let (rank, size) = (self.rank(), self.size());
        let reach = reach(rank, size);
        for step in steps(reach) {
            if rank + step < size {
                self.transfer(&[], &mut [(rank + step, &mut *scratch)])?;
                merge(values, scratch);
            }
        }
        if rank > 0 {
            self.transfer(&[(rank - reach, &*values)], &mut [])?;
            self.transfer(&[], &mut [(rank - reach, &mut *values)])?;
        }
        for step in steps(reach).rev().filter(|step| rank + step < size) {
            self.transfer(&[(rank + step, &*values)], &mut [])?;
        }
        Ok(())
    }

    /// Waits for every rank.
    ///
    /// # Errors
    /// As [`Comm::transfer`].
    pub fn barrier(&self) -> Result<(), RankError> {
        self.all_reduce(&mut [], &mut [], |_, _| ())
    }

    /// Gives every rank what each has: `parts[r]` is filled in on rank `r`, and on all others afterwards. Around the ring, so
    /// that a rank sends every part but that of the rank behind it.
    ///
    /// # Errors
    /// As [`Comm::transfer`].
    pub fn all_gather(&self, parts: &mut [&mut [u8]]) -> Result<(), RankError> {
        let (rank, size) = (self.rank(), self.size());
        for step in 0..size - 1 {
            let [mine, theirs] = [step, step + 1].map(|step| (rank + size - step) % size);
            let [mine, theirs] = parts.get_disjoint_mut([mine, theirs]).expect("a part for each rank");
            self.transfer(&[(self.next(), &**mine)], &mut [(self.previous(), &mut **theirs)])?;
        }
        Ok(())
    }

    /// Adds up `values` of all ranks, of which rank `r` gets those of its part: consecutive parts, all of `values`. The others stay
    /// what they were. A sum begins with rank 0's number and goes on in the order of ranks, so that it does not depend on the
    /// part; a rank sends what is not in its own, straight to who gets it. `scratch` holds [`Comm::sum_scratch`] numbers or less,
    /// at least one for each other rank.
    ///
    /// # Errors
    /// As [`Comm::transfer`].
    pub fn reduce_scatter(
        &self,
        values: &mut [f32],
        parts: &[Range<usize>],
        scratch: &mut [f32],
    ) -> Result<(), RankError> {
        let (rank, size) = (self.rank(), self.size());
        if size == 1 {
            return Ok(());
        }
        let others = || (0..size).filter(|other| *other != rank);
        let most = parts.iter().map(Range::len).max().unwrap_or(0);
        let bucket = scratch.len() / (size - 1);
        for first in (0..most).step_by(bucket) {
            let within =
                |part: &Range<usize>| (part.start + first).min(part.end)..(part.start + first + bucket).min(part.end);
            let mine = within(&parts[rank]);
            let sent: Vec<Sent<'_>> = others()
                .map(|to| (to, bytemuck::cast_slice(&values[within(&parts[to])])))
                .filter(|(_, bytes): &Sent<'_>| !bytes.is_empty())
                .collect();
            let rooms = others().zip(scratch.chunks_exact_mut(bucket)).filter(|_| !mine.is_empty());
            let mut received: Vec<Received<'_>> =
                rooms.map(|(from, room)| (from, bytemuck::cast_slice_mut(&mut room[..mine.len()]))).collect();
            self.transfer(&sent, &mut received)?;
            let add = |to: &mut [f32], from: &[f32]| to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
            let (lower, higher) = scratch[..(size - 1) * bucket].split_at_mut(rank * bucket);
            let own = &mut values[mine];
            if rank > 0 {
                let (sum, rest) = lower.split_at_mut(bucket);
                rest.chunks_exact(bucket).for_each(|value| add(sum, value));
                // Of two numbers it does not matter which is added to which.
                add(own, sum);
            }
            higher.chunks_exact(bucket).for_each(|value| add(own, value));
        }
        Ok(())
    }

    /// Gives every rank all parts of `values`, of which each has its own ([`parts`]).
    ///
    /// # Errors
    /// As [`Comm::transfer`].
    pub fn gather_parts(&self, values: &mut [f32]) -> Result<(), RankError> {
        let (mut rest, mut all) = (&mut *values, Vec::new());
        for part in parts(rest.len(), self.size()) {
            let (part, behind) = rest.split_at_mut(part.len());
            all.push(bytemuck::cast_slice_mut(part));
            rest = behind;
        }
        self.all_gather(&mut all)
    }

    /// Adds up `values` of all ranks, for all of them, as [`Comm::reduce_scatter`] does.
    ///
    /// # Errors
    /// As [`Comm::transfer`].
    pub fn sum(&self, values: &mut [f32], scratch: &mut [f32]) -> Result<(), RankError> {
        self.reduce_scatter(values, &parts(values.len(), self.size()), scratch)?;
        self.gather_parts(values)
    }

    /// Bytes that this rank sends in a [`Comm::sum`] of so many numbers.
    pub fn sum_sent_bytes(&self, len: usize) -> u64 {
        let (parts, next) = (parts(len, self.size()), self.next());
        if self.size() == 1 { 0 } else { 4 * (2 * len - parts[self.rank()].len() - parts[next].len()) as u64 }
    }

    /// Numbers of scratch for sums whose parts are at most this long: a bucket from each other rank at a time.
    pub fn sum_scratch(ranks: usize, part: usize) -> usize {
        (ranks - 1) * part.min(SUM_BUCKET)
    }

    /// What each rank says, on every rank.
    ///
    /// # Errors
    /// As [`Comm::transfer`].
    pub fn gather_texts(&self, text: Vec<u8>) -> Result<Vec<Vec<u8>>, RankError> {
        let mut lens = vec![0u64; self.size()];
        lens[self.rank()] = text.len() as u64;
        self.all_gather(&mut lens.chunks_mut(1).map(bytemuck::cast_slice_mut::<u64, u8>).collect::<Vec<_>>())?;
        let mut texts: Vec<Vec<u8>> = lens.iter().map(|&len| vec![0; len as usize]).collect();
        texts[self.rank()] = text;
        self.all_gather(&mut texts.iter_mut().map(|text| &mut text[..]).collect::<Vec<_>>())?;
        Ok(texts)
    }

    /// Refuses ranks that differ from rank 0 in what `text` says of them.
    ///
    /// # Errors
    /// Names the first rank that differs; on every rank the same one.
    pub fn agree(&self, what: &'static str, text: &str, remedy: &'static str) -> Result<(), RankError> {
        let mut hashes = vec![[0u8; 32]; self.size()];
        hashes[self.rank()] = *blake3::hash(text.as_bytes()).as_bytes();
        let mut parts: Vec<&mut [u8]> = hashes.iter_mut().map(|hash| &mut hash[..]).collect();
        self.all_gather(&mut parts)?;
        match hashes.iter().position(|hash| *hash != hashes[0]) {
            Some(rank) => Err(RankError::Differs { rank, what, remedy }),
            None => Ok(()),
        }
    }
}

/// `0..len` cut into a part for each rank, as long as any other but for one.
pub fn parts(len: usize, ranks: usize) -> Vec<Range<usize>> {
    let start = |rank: usize| (rank as u128 * len as u128 / ranks as u128) as usize;
    (0..ranks).map(|rank| start(rank)..start(rank + 1)).collect()
}

/// Ranks from `rank` on whose values it merges: up to its parent, or to the end.
fn reach(rank: usize, size: usize) -> usize {
    if rank == 0 { size.next_power_of_two() } else { 1 << rank.trailing_zeros() }
}

fn steps(reach: usize) -> impl DoubleEndedIterator<Item = usize> {
    (0..reach.trailing_zeros()).map(|power| 1 << power)
}

/// Messages that a rank sends in [`Comm::all_reduce`]: to its parent in the binomial tree, and to each child.
pub fn all_reduce_messages(rank: usize, size: usize) -> u64 {
    let children = steps(reach(rank, size)).filter(|step| rank + step < size).count();
    (children + usize::from(rank > 0)) as u64
}

fn nanoseconds(since: Instant) -> u64 {
    since.elapsed().as_nanos() as u64
}
