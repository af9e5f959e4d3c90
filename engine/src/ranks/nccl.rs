//! Messages over NCCL, between ranks that have a GPU each: by NVLink in a node, by the network between nodes.
//!
//! Ranks that know each other already, as threads or by MPI, agree on NCCL's identifier and then speak over it. A message's bytes lie
//! in the host's memory as on any [`Transport`], and are copied to the GPU before they are sent and back when they have come: what
//! is measured is those copies and the link. NCCL is loaded when it is asked for; nothing of it is needed to build. It has not run on
//! GPUs yet.

use super::RankError;
use super::comm::{Comm, Received, Sent, Transport};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DriverError};
use cudarc::nccl::result::NcclError;
use cudarc::nccl::{self, group_end, group_start};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

struct Nccl {
    /// Before the stream, which it works on until it is dropped.
    comm: nccl::Comm,
    stream: Arc<CudaStream>,
}

/// The ranks of `known`, over NCCL; this one has GPU `index`. All ranks call it.
///
/// # Errors
/// In one line where NCCL or the GPU is missing, on every rank, so that none waits.
pub fn over(known: &Comm, index: usize) -> Result<Comm, RankError> {
    let opened = open(index);
    let mut missing = vec![0u8; known.size()];
    missing[known.rank()] = u8::from(opened.is_err());
    known.all_gather(&mut missing.chunks_mut(1).collect::<Vec<_>>())?;
    if let Some(rank) = missing.iter().position(|&missing| missing == 1) {
        let reason = "it has no NCCL or no GPU".into();
        return Err(opened.err().unwrap_or(RankError::Ended { rank, size: known.size(), reason }));
    }
    let stream = opened?;
    // Rank 0 makes the identifier; a sum of bytes that are 0 elsewhere hands it out.
    let mut bytes = [0u8; 128];
    if known.rank() == 0 {
        let id = nccl::Id::new().map_err(failed("making its identifier"))?;
        bytes = id.internal().map(|byte| byte as u8);
    }
    let add = |mine: &mut [u8], theirs: &[u8]| mine.iter_mut().zip(theirs).for_each(|(mine, theirs)| *mine |= theirs);
    known.all_reduce(&mut bytes, &mut [0; 128], add)?;
    let id = nccl::Id::uninit(bytes.map(|byte| byte as std::ffi::c_char));
    let comm =
        nccl::Comm::from_rank(stream.clone(), known.rank(), known.size(), id).map_err(failed("connecting ranks"))?;
    Ok(Comm::new(Nccl { comm, stream }))
}

fn open(index: usize) -> Result<Arc<CudaStream>, RankError> {
    // SAFETY: it only tries to load the library, whose initialisers have no requirements.
    if !unsafe { nccl::sys::is_culib_present() } {
        let needed = "install libnccl2 (libnccl.so.2), or use ranks that are threads or processes of MPI";
        return Err(RankError::Start(format!("NCCL was not found; {needed}")));
    }
    // SAFETY: as above.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err(RankError::Start("NCCL needs an NVIDIA GPU, whose driver was not found".into()));
    }
    // cudarc panics where a driver is too old to have a function.
    let context = catch_unwind(AssertUnwindSafe(|| CudaContext::new(index)));
    match context {
        Ok(Ok(context)) => context.new_stream().map_err(device),
        Ok(Err(error)) => Err(device(error)),
        Err(_) => Err(RankError::Start("the CUDA driver is too old".into())),
    }
}

fn device(error: DriverError) -> RankError {
    RankError::Start(format!("NCCL's GPU: {error}"))
}

fn failed(doing: &'static str) -> impl Fn(NcclError) -> RankError {
    move |NcclError(status)| RankError::Start(format!("NCCL failed while {doing}: {status:?}"))
}

impl Transport for Nccl {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn size(&self) -> usize {
        self.comm.world_size()
    }

    fn transfer(&self, send: &[Sent<'_>], receive: &mut [Received<'_>]) -> Result<(), RankError> {
        // A message of no bytes is sent as one byte, because somebody waits for it.
        let there = |bytes: &[u8]| self.stream.clone_htod(if bytes.is_empty() { &[0][..] } else { bytes });
        let sent: Vec<CudaSlice<u8>> =
            send.iter().map(|(_, bytes)| there(bytes)).collect::<Result<_, _>>().map_err(device)?;
        let room = |bytes: usize| self.stream.alloc_zeros::<u8>(bytes.max(1));
        let mut came: Vec<CudaSlice<u8>> =
            receive.iter().map(|(_, room_for)| room(room_for.len())).collect::<Result<_, _>>().map_err(device)?;
        group_start().map_err(failed("sending"))?;
        for (&(to, _), bytes) in send.iter().zip(&sent) {
            self.comm.send(bytes, to as i32).map_err(failed("sending"))?;
        }
        for (&mut (from, _), room) in receive.iter_mut().zip(&mut came) {
            self.comm.recv(room, from as i32).map_err(failed("receiving"))?;
        }
        group_end().map_err(failed("sending"))?;
        for ((_, to), from) in receive.iter_mut().zip(&came).filter(|((_, to), _)| !to.is_empty()) {
            self.stream.memcpy_dtoh(from, &mut **to).map_err(device)?;
        }
        self.stream.synchronize().map_err(device)
    }
}
