//! What commands over ranks have in common: ranks are threads of this process, or the processes that `mpirun` started.

use super::Compute;
use super::failure::Failure;
use crate::device::Cpu;
use crate::experiment::environment::revision;
use crate::memory::Arena;
use crate::ranks::{Asked, Comm, Method, RankError, threads};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Runs `work` on the ranks that were asked for, each with threads and memory of its own.
pub fn run(
    asked: Asked,
    compute: &Compute,
    work: impl Fn(&Comm, &Cpu, &Arena) -> Result<(), Failure> + Sync,
) -> Result<(), Failure> {
    let Asked { method, threads } = asked;
    match threads {
        Some(ranks) => {
            if let Some(processes) = launched().filter(|&processes| processes > 1) {
                return Err(Failure::usage(format!(
                    "--ranks {method}:{ranks} makes threads of one process, and mpirun started {processes}; write --ranks {method}"
                )));
            }
            let share = std::thread::available_parallelism().map_or(1, usize::from) / ranks;
            let threads = compute.threads.unwrap_or(share.max(1));
            let limit_bytes = compute.limit_bytes() / ranks as u64;
            threads::run(ranks, |comm| {
                let (cpu, arena) = (Cpu::new(Some(threads))?, Arena::with_limit(limit_bytes));
                agree_on_build(comm)?;
                work(comm, &cpu, &arena)
            })
            .map(drop)
        }
        None => over_mpi(method, compute, work),
    }
}

/// Processes that a launcher of MPI says it started.
fn launched() -> Option<usize> {
    ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"]
        .iter()
        .find_map(|name| std::env::var(name).ok()?.parse().ok())
}

#[cfg(not(feature = "mpi"))]
fn over_mpi(
    method: Method,
    _: &Compute,
    _: impl Fn(&Comm, &Cpu, &Arena) -> Result<(), Failure>,
) -> Result<(), Failure> {
    Err(Failure::usage(format!(
        "--ranks {method} needs MPI, without which this kvsieve was built: install libopenmpi-dev, openmpi-bin and \
         libclang-dev, then cargo build --release --features mpi; or write --ranks {method}:4 for 4 threads of one process"
    )))
}

#[cfg(feature = "mpi")]
fn over_mpi(
    _: Method,
    compute: &Compute,
    work: impl Fn(&Comm, &Cpu, &Arena) -> Result<(), Failure>,
) -> Result<(), Failure> {
    use crate::ranks::mpi;
    let comm = mpi::start()?;
    let arena = Arena::with_limit(compute.limit_bytes());
    let on_rank = |cpu| {
        agree_on_build(&comm)?;
        work(&comm, &cpu, &arena)
    };
    compute.cpu().and_then(on_rank).or_else(|failure| {
        eprintln!("error: rank {} of {}: {failure}", comm.rank(), comm.size());
        mpi::abort(failure.status().into())
    })
}

fn agree_on_build(comm: &Comm) -> Result<(), RankError> {
    let build = format!("{} {}", env!("CARGO_PKG_VERSION"), revision());
    comm.agree("its build of kvsieve", &build, "the same build")
}

/// Refuses ranks whose arguments or input, in this text, are not those of rank 0.
pub fn agree_on_input(comm: &Comm, text: &str) -> Result<(), RankError> {
    comm.agree("its arguments or its input", text, "the same arguments and input file")
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

/// What all ranks measured, on every rank.
pub fn gather<T: Serialize + DeserializeOwned>(comm: &Comm, own: &T) -> Result<Vec<T>, RankError> {
    // As text, which is longer on one rank than on another.
    let text = serde_json::to_vec(own).expect("numbers are plain data");
    let mut lens = vec![0u64; comm.size()];
    lens[comm.rank()] = text.len() as u64;
    comm.all_gather(&mut lens.chunks_mut(1).map(bytemuck::cast_slice_mut::<u64, u8>).collect::<Vec<_>>())?;
    let mut texts: Vec<Vec<u8>> = lens.iter().map(|&len| vec![0; len as usize]).collect();
    texts[comm.rank()] = text;
    comm.all_gather(&mut texts.iter_mut().map(|text| &mut text[..]).collect::<Vec<_>>())?;
    Ok(texts.iter().map(|text| serde_json::from_slice(text).expect("written by the same build")).collect())
}
