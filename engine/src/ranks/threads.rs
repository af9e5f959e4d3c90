//! Ranks as threads of one process: the everyday form, for tests and for users without MPI.
//!
//! Messages go in pieces through a short queue for each pair of ranks, as MPI's go through shared memory: what is on the way is
//! bounded, and a rank never looks into another's arena.

use super::comm::{Comm, Received, Sent, Transport};
use super::{RankError, comm};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Bytes of a piece.
const PIECE_BYTES: usize = 64 << 10;
/// Pieces of a queue.
const QUEUE: usize = 16;
/// How long a rank waits for another: longer than any step of a pass that people wait for.
const PATIENCE: Duration = Duration::from_secs(600);
/// Times that a rank looks again at once before it sleeps.
const LOOKS: u32 = 200;

/// The first rank that ended early, and why.
type Ended = Arc<OnceLock<(usize, String)>>;

/// A rank's ends of the queues, by the other rank.
struct Threads {
    rank: usize,
    to: Vec<SyncSender<Vec<u8>>>,
    from: Vec<Receiver<Vec<u8>>>,
    ended: Ended,
}

impl Transport for Threads {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.to.len()
    }

    fn transfer(&self, send: &[Sent<'_>], receive: &mut [Received<'_>]) -> Result<(), RankError> {
        let mut sent: Vec<usize> = vec![0; send.len()];
        let mut received: Vec<usize> = vec![0; receive.len()];
        // A piece that found its queue full.
        let mut ready: Vec<Option<Vec<u8>>> = vec![None; send.len()];
        // Pieces of a message, at least one, so that an empty message is one too.
        let pieces = |bytes: usize| bytes.div_ceil(PIECE_BYTES).max(1);
        let (mut idle, mut since) = (0, Instant::now());
        loop {
            let (mut moved, mut waits_for) = (false, None);
            // Of messages to one rank only the first that is not done may go on.
            for (index, &(to, bytes)) in send.iter().enumerate() {
                let first =
                    (0..index).all(|earlier| send[earlier].0 != to || sent[earlier] == pieces(send[earlier].1.len()));
                if !first || sent[index] == pieces(bytes.len()) {
                    continue;
                }
                waits_for = Some(to);
                let piece = ready[index].take().unwrap_or_else(|| {
                    let rest = &bytes[sent[index] * PIECE_BYTES..];
                    rest[..rest.len().min(PIECE_BYTES)].to_vec()
                });
                match self.to[to].try_send(piece) {
                    Ok(()) => {
                        sent[index] += 1;
                        moved = true;
                    }
                    Err(TrySendError::Full(piece)) => ready[index] = Some(piece),
                    Err(TrySendError::Disconnected(_)) => return Err(self.gone(to)),
                }
            }
            for index in 0..receive.len() {
                let from = receive[index].0;
                let done = |at: usize| received[at] == pieces(receive[at].1.len());
                if done(index) || !(0..index).all(|earlier| receive[earlier].0 != from || done(earlier)) {
                    continue;
                }
                waits_for = Some(from);
                match self.from[from].try_recv() {
                    Ok(piece) => {
                        let start = received[index] * PIECE_BYTES;
                        receive[index].1[start..start + piece.len()].copy_from_slice(&piece);
                        received[index] += 1;
                        moved = true;
                    }
                    Err(TryRecvError::Empty) => {}
                    Err(TryRecvError::Disconnected) => return Err(self.gone(from)),
                }
            }
            let Some(rank) = waits_for else { return Ok(()) };
            if moved {
                (idle, since) = (0, Instant::now());
                continue;
            }
            if self.ended.get().is_some() {
                return Err(self.gone(rank));
            }
            if since.elapsed() > PATIENCE {
                return Err(RankError::Silent { rank, size: self.size(), seconds: PATIENCE.as_secs() });
            }
            idle += 1;
            if idle < LOOKS { std::thread::yield_now() } else { std::thread::sleep(Duration::from_micros(50)) }
        }
    }
}

impl Threads {
    /// The rank that ended first; `rank` itself has, if none is known.
    fn gone(&self, rank: usize) -> RankError {
        let (rank, reason) = self.ended.get().cloned().unwrap_or((rank, "its work was over".into()));
        RankError::Ended { rank, size: self.size(), reason }
    }
}

/// Ranks that are joined with each other by queues.
fn joined(size: usize, ended: &Ended) -> Vec<Threads> {
    let mut ranks: Vec<Threads> =
        (0..size).map(|rank| Threads { rank, to: Vec::new(), from: Vec::new(), ended: ended.clone() }).collect();
    // In the order of both numbers, so that each rank's ends lie by the number of the other.
    for from in 0..size {
        for to in 0..size {
            let (sender, receiver) = sync_channel(QUEUE);
            ranks[from].to.push(sender);
            ranks[to].from.push(receiver);
        }
    }
    ranks
}

/// Runs `work` on `size` ranks, each a thread; their results by rank. When one fails or panics, the others are told in their
/// next wait, and its error is the result.
///
/// # Errors
/// That of the first rank that failed.
pub fn run<R: Send, E: From<RankError> + std::fmt::Display + Send>(
    size: usize,
    work: impl Fn(&Comm) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let ended = Ended::default();
    let one = |threads: Threads| {
        let rank = threads.rank;
        let comm = comm::Comm::new(threads);
        let result = catch_unwind(AssertUnwindSafe(|| work(&comm))).unwrap_or_else(|panic| {
            let said = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            let reason = format!("it panicked: {}", said.unwrap_or("no message"));
            Err(RankError::Ended { rank, size, reason }.into())
        });
        if let Err(error) = &result {
            // Before its queues close, so that who finds them closed knows why.
            let _ = ended.set((rank, error.to_string()));
        }
        result
    };
    let mut results: Vec<Result<R, E>> = std::thread::scope(|scope| {
        let one = &one;
        let handles: Vec<_> =
            joined(size, &ended).into_iter().map(|threads| scope.spawn(move || one(threads))).collect();
        handles.into_iter().map(|handle| handle.join().expect("panics were caught")).collect()
    });
    match ended.get() {
        Some(&(rank, _)) => match results.swap_remove(rank) {
            Err(error) => Err(error),
            Ok(_) => unreachable!("a rank that ended early has an error"),
        },
        None => results.into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_keep_their_order_and_are_counted() {
        let traffic = run(3, |comm| {
            let long: Vec<u8> = (0..3 * PIECE_BYTES + 7).map(|at| (at * (comm.rank() + 1)) as u8).collect();
            let (mut first, mut second) = (vec![0; long.len()], [0; 3]);
            let (to, from) = (comm.next(), comm.previous());
            comm.transfer(&[(to, &long), (to, b"abc")], &mut [(from, &mut first), (from, &mut second)])?;
            let expected: Vec<u8> = (0..long.len()).map(|at| (at * (from + 1)) as u8).collect();
            assert!(first == expected && &second == b"abc");
            comm.barrier()?;
            Ok::<_, RankError>(comm.take_traffic())
        });
        for (rank, traffic) in traffic.unwrap().into_iter().enumerate() {
            assert_eq!(traffic.sent_bytes, 3 * PIECE_BYTES as u64 + 7 + 3);
            assert_eq!(traffic.messages, 2 + comm::all_reduce_messages(rank, 3));
        }
    }

    #[test]
    fn all_ranks_get_the_same_sum_and_all_parts() {
        for size in [1, 2, 3, 4, 5, 8] {
            let results = run(size, |comm| {
                let add = |mine: &mut [u8], theirs: &[u8]| mine.iter_mut().zip(theirs).for_each(|(a, b)| *a += b);
                let mut sum = [1, comm.rank() as u8];
                comm.all_reduce(&mut sum, &mut [0; 2], add)?;
                let mut parts: Vec<Vec<u8>> = (0..size).map(|rank| vec![0; rank]).collect();
                parts[comm.rank()].fill(comm.rank() as u8);
                comm.all_gather(&mut parts.iter_mut().map(|part| &mut part[..]).collect::<Vec<_>>())?;
                assert!(parts.iter().enumerate().all(|(rank, part)| *part == vec![rank as u8; rank]));
                Ok::<_, RankError>((sum, comm.take_traffic()))
            });
            for (rank, (sum, traffic)) in results.unwrap().into_iter().enumerate() {
                assert_eq!(sum, [size as u8, (size * (size - 1) / 2) as u8], "rank {rank} of {size}");
                let gathered: u64 = (0..size as u64).sum::<u64>() - ((rank + 1) % size) as u64;
                assert_eq!(traffic.sent_bytes, 2 * comm::all_reduce_messages(rank, size) + gathered);
            }
        }
    }

    #[test]
    fn the_rank_that_ends_early_is_named_by_all() {
        // Rank 0 waits for 1, which waits for 2, which fails or panics.
        let errors = std::sync::Mutex::new(Vec::new());
        for panics in [false, true] {
            let result = run(3, |comm| {
                let done = match comm.rank() {
                    2 if panics => panic!("a bad day"),
                    2 => Err(RankError::Unsupported("a bad day".into())),
                    rank => comm.transfer(&[], &mut [(rank + 1, &mut [0; 4])]),
                };
                errors.lock().unwrap().extend(done.clone().err().map(|error| error.to_string()));
                done
            });
            assert!(result.unwrap_err().to_string().contains("a bad day"));
            let said = std::mem::take(&mut *errors.lock().unwrap());
            assert_eq!(said.iter().filter(|said| said.starts_with("rank 2 of 3 ended: ")).count(), 2, "{said:?}");
        }
    }

    #[test]
    fn ranks_that_differ_are_named() {
        let result = run(4, |comm| {
            comm.agree("build", if comm.rank() < 2 { "one" } else { "another" }, "the same build of kvsieve")
        });
        let error = result.unwrap_err();
        assert_eq!(
            error.to_string(),
            "rank 2 differs from rank 0 in build; start all ranks with the same build of kvsieve"
        );
    }
}
