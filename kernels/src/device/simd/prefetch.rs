//! Asking for cache lines ahead of their use, into the cache where this processor wants them.
//!
//! A line that is asked for into the first-level cache takes one of its few miss buffers until memory answers. Where there
//! is work beside the reading, AMD's cores then read at half of the memory's bandwidth; lines that are asked for into the
//! second-level cache wait there for the little while that the first level needs to take them. Where work takes longer than
//! reading, as with codes of four bits, the first level is as good a place and nearer. `docs/cpu-kernels.md` has figures.

use std::arch::x86_64::{__cpuid, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
use std::sync::atomic::{AtomicBool, Ordering};

/// Not in a lazy cell: what initialises one is a call, for which a kernel's loop would spill its registers.
static INTO_SECOND_LEVEL: AtomicBool = AtomicBool::new(false);

/// Finds out which cache this processor wants lines in that are read as fast as memory gives them.
pub(super) fn prepare() {
    let maker = __cpuid(0);
    let maker = [maker.ebx, maker.edx, maker.ecx].map(u32::to_le_bytes);
    INTO_SECOND_LEVEL.store(maker.as_flattened() == b"AuthenticAMD", Ordering::Relaxed);
}

/// Asks for the line at an address into the first-level cache. Nothing happens where it cannot be read.
#[inline(always)]
pub(super) fn near(at: *const u8) {
    // SAFETY: no memory is touched; every x86-64 processor has the instruction.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
}

/// The same, into the cache where lines are wanted that are read as fast as memory gives them.
#[inline(always)]
pub(super) fn far(at: *const u8) {
    match INTO_SECOND_LEVEL.load(Ordering::Relaxed) {
        // SAFETY: as in `near`.
        true => unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) },
        false => near(at),
    }
}
