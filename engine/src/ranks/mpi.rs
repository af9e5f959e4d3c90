//! Ranks as processes of MPI.
//!
//! Only the thread that started MPI calls it (`MPI_THREAD_FUNNELED`): it looks after the messages while the threads of
//! [`crate::device::Cpu`] compute, so that they move without the library's own progress. A process that dies takes the others with it:
//! `mpirun` ends them and names it. One that fails ends all by [`abort`].

use super::RankError;
use super::comm::{Comm, Received, Sent, Transport};
use ::mpi::environment::Universe;
use ::mpi::request::{LocalScope, Request};
use ::mpi::topology::SimpleCommunicator;
use ::mpi::traits::{Communicator, Destination, Source};
use ::mpi::{Threading, request};
use std::time::{Duration, Instant};

/// Most bytes of one message of MPI, which counts them in 32 bits.
const MOST_BYTES: usize = 1 << 30;
/// How long a rank waits for another.
const PATIENCE: Duration = Duration::from_secs(600);
/// Times that a rank looks again at once before it sleeps.
const LOOKS: u32 = 2000;

struct Mpi {
    world: SimpleCommunicator,
    /// Ends MPI when it is dropped.
    _universe: Universe,
}

/// Starts MPI; this process is one of its ranks.
///
/// # Errors
/// When MPI was started before, or cannot be called from a process with threads.
pub fn start() -> Result<Comm, RankError> {
    let failed = |why: &str| RankError::Start(format!("MPI cannot be started: {why}"));
    let (universe, threading) = ::mpi::initialize_with_threading(Threading::Funneled)
        .ok_or_else(|| failed("it was started before in this process"))?;
    if threading < Threading::Funneled {
        return Err(failed("this MPI does not allow processes with threads (MPI_THREAD_FUNNELED)"));
    }
    Ok(Comm::new(Mpi { world: universe.world(), _universe: universe }))
}

/// Ends all ranks with this exit status.
pub fn abort(status: i32) -> ! {
    SimpleCommunicator::world().abort(status)
}

impl Transport for Mpi {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn rank(&self) -> usize {
        self.world.rank() as usize
    }

    fn size(&self) -> usize {
        self.world.size() as usize
    }

    fn transfer(&self, send: &[Sent<'_>], receive: &mut [Received<'_>]) -> Result<(), RankError> {
        request::scope(|scope| {
            let mut requests = Vec::new();
            for (from, room) in receive.iter_mut() {
                let process = self.world.process_at_rank(*from as i32);
                let empty = room.is_empty().then_some(&mut [][..]);
                let parts = room.chunks_mut(MOST_BYTES).chain(empty);
                requests.extend(parts.map(|part| (*from, process.immediate_receive_into(scope, part))));
            }
            for (to, bytes) in send {
                let process = self.world.process_at_rank(*to as i32);
                let empty = bytes.is_empty().then_some(&[][..]);
                let parts = bytes.chunks(MOST_BYTES).chain(empty);
                requests.extend(parts.map(|part| (*to, process.immediate_send(scope, part))));
            }
            wait(requests, |rank| RankError::Silent { rank, size: self.size(), seconds: PATIENCE.as_secs() });
        });
        Ok(())
    }
}

/// Looks after requests, each with the rank that it waits for, until they are done. What is under way cannot be taken back, so that
/// who waits in vain ends all ranks.
fn wait<'a>(mut requests: Vec<(usize, Request<'a, [u8], &LocalScope<'a>>)>, silent: impl Fn(usize) -> RankError) {
    let (mut looks, mut since) = (0, Instant::now());
    loop {
        let open = requests.len();
        let still_open = |(rank, request): (usize, Request<'a, _, _>)| Some((rank, request.test().err()?));
        requests = requests.into_iter().filter_map(still_open).collect();
        let Some(&(rank, _)) = requests.first() else { return };
        if requests.len() < open {
            since = Instant::now();
        }
        if since.elapsed() > PATIENCE {
            eprintln!("error: {}", silent(rank));
            abort(1);
        }
        looks += 1;
        if looks < LOOKS { std::thread::yield_now() } else { std::thread::sleep(Duration::from_micros(50)) }
    }
}
