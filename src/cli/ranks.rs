//! Ranks as commands start them: threads of this process, or the processes that `mpirun` started.

use super::Compute;
use super::failure::Failure;
use crate::device::Cpu;
use crate::experiment::environment::revision;
use crate::memory::Arena;
use crate::ranks::{Asked, Comm, RankError, threads};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// How a command spells its ranks, for messages.
pub struct Spelled {
    /// So many threads, as `--ranks ring:4`.
    pub threads: String,
    /// Processes of MPI, as `--ranks ring`.
    pub mpi: String,
}

/// Runs `work` on each of so many ranks that are threads, or with `None` on this one of MPI, with its threads and the bytes that its
/// tensors may take.
pub fn run(
    compute: &Compute,
    asked: Option<usize>,
    spelled: &Spelled,
    work: impl Fn(&Comm, &Cpu, u64) -> Result<(), Failure> + Sync,
) -> Result<(), Failure> {
    let Some(ranks) = asked else { return over_mpi(compute, spelled, work) };
    if let Some(processes) = launched() {
        let Spelled { threads, mpi } = spelled;
        return Err(Failure::usage(format!(
            "{threads} makes threads of one process, and mpirun started {processes}; write {mpi}"
        )));
    }
    let all = compute.cpu()?.threads();
    let threads = compute.threads.unwrap_or((all / ranks).max(1));
    let limit_bytes = compute.limit_bytes() / ranks as u64;
    threads::run(ranks, |comm| on_rank(comm, &Cpu::new(Some(threads))?, limit_bytes, &work)).map(drop)
}

/// As [`run`], where ranks are spelled with the method by which attention is shared out, each with an arena of its own.
pub fn run_attention(
    asked: Asked,
    compute: &Compute,
    work: impl Fn(&Comm, &Cpu, &Arena) -> Result<(), Failure> + Sync,
) -> Result<(), Failure> {
    let Asked { method, threads } = asked;
    let of_threads = format!("--ranks {method}:{}", threads.unwrap_or(4));
    let spelled = Spelled { threads: of_threads, mpi: format!("--ranks {method}") };
    run(compute, threads, &spelled, |comm, cpu, limit_bytes| work(comm, cpu, &Arena::with_limit(limit_bytes)))
}

/// How many processes a launcher of MPI says that it started, where they are more than one.
pub fn launched() -> Option<usize> {
    let said = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"];
    let processes = said.iter().find_map(|name| std::env::var(name).ok()?.parse().ok());
    processes.filter(|&processes| processes > 1)
}

#[cfg(not(feature = "mpi"))]
fn over_mpi(
    _: &Compute,
    Spelled { threads, mpi }: &Spelled,
    _: impl Fn(&Comm, &Cpu, u64) -> Result<(), Failure>,
) -> Result<(), Failure> {
    Err(Failure::usage(format!(
        "{mpi} needs MPI, without which this kvsieve was built: install libopenmpi-dev, openmpi-bin and \
         libclang-dev, then cargo build --release --features mpi; or write {threads} for threads of one process"
    )))
}

#[cfg(feature = "mpi")]
fn over_mpi(
    compute: &Compute,
    _: &Spelled,
    work: impl Fn(&Comm, &Cpu, u64) -> Result<(), Failure>,
) -> Result<(), Failure> {
    use crate::ranks::mpi;
    let comm = mpi::start()?;
    // Processes of one node share its cores and its memory. What a launcher has bound is theirs.
    let local = ["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"];
    let local = local.iter().find_map(|name| std::env::var(name).ok()?.parse().ok()).unwrap_or(1).max(1);
    let all = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let all = all.lines().filter(|line| line.starts_with("processor")).count();
    let share = |bound: usize| if all == 0 { bound } else { bound.min((all / local).max(1)) };
    let threads = |bound: usize| compute.threads.unwrap_or(share(bound));
    let limit_bytes = compute.limit_bytes() / local as u64;
    let cpu = compute.cpu().and_then(|cpu| Ok(Cpu::new(Some(threads(cpu.threads())))?));
    let done = cpu.and_then(|cpu| on_rank(&comm, &cpu, limit_bytes, &work));
    done.or_else(|failure| {
        eprintln!("error: rank {} of {}: {failure}", comm.rank(), comm.size());
        mpi::abort(failure.status().into())
    })
}

fn on_rank(
    comm: &Comm,
    cpu: &Cpu,
    limit_bytes: u64,
    work: &impl Fn(&Comm, &Cpu, u64) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let build = format!("{} {}", env!("CARGO_PKG_VERSION"), revision());
    comm.agree("its build of kvsieve", &build, "the same build")?;
    work(comm, cpu, limit_bytes)
}

/// Refuses ranks whose arguments or input, in this text, are not those of rank 0.
pub fn agree_on_input(comm: &Comm, text: &str) -> Result<(), RankError> {
    comm.agree("its arguments or its input", text, "the same arguments and input file")
}

/// What all ranks measured, on every rank.
pub fn gather<T: Serialize + DeserializeOwned>(comm: &Comm, own: &T) -> Result<Vec<T>, RankError> {
    let texts = comm.gather_texts(serde_json::to_vec(own).expect("numbers are plain data"))?;
    Ok(texts.iter().map(|text| serde_json::from_slice(text).expect("written by the same build")).collect())
}

/// What this rank prepared, if all could; else the lowest rank that could not says why, and the others end.
pub fn settle<T>(comm: &Comm, prepared: Result<T, Failure>) -> Result<T, Failure> {
    let mut failed = vec![0u8; comm.size()];
    failed[comm.rank()] = u8::from(prepared.is_err());
    comm.all_gather(&mut failed.chunks_mut(1).collect::<Vec<_>>())?;
    match failed.iter().position(|&failed| failed == 1) {
        Some(first) if first != comm.rank() => {
            // Nothing will come: that rank ends all.
            comm.transfer(&[], &mut [(first, &mut [0])])?;
            Err(RankError::Ended { rank: first, size: comm.size(), reason: "its input is wrong".into() }.into())
        }
        _ => prepared,
    }
}
