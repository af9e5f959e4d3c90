//! Asking for cache lines ahead of their use, into the cache where this processor wants them.
//!
//! A line that is asked for into the first-level cache takes one of its few miss buffers until memory answers. AMD's cores
//! then read at half of the memory's bandwidth wherever there is work beside the reading; lines asked for into the
//! second-level cache wait there, and the first level takes them from it as they are used. Figures are in
//! `docs/cpu-kernels.md`.

use std::arch::x86_64::{__cpuid, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
use std::sync::atomic::{AtomicBool, Ordering};

/// Not in a lazy cell: what initialises one is a call, for which a kernel's loop would spill its registers.
static INTO_SECOND_LEVEL: AtomicBool = AtomicBool::new(false);

/// Finds out which cache this processor wants lines in.
pub(super) fn prepare() {
    let maker = __cpuid(0);
    let maker = [maker.ebx, maker.edx, maker.ecx].map(u32::to_le_bytes);
    INTO_SECOND_LEVEL.store(maker.as_flattened() == b"AuthenticAMD", Ordering::Relaxed);
}

/// Asks for the cache line at `at`, which need not be readable: then nothing happens.
#[inline(always)]
pub(super) fn ask(at: *const u8) {
    // SAFETY: no memory is touched; every x86-64 processor has the instruction.
    unsafe {
        match INTO_SECOND_LEVEL.load(Ordering::Relaxed) {
            true => _mm_prefetch::<_MM_HINT_T1>(at.cast()),
            false => _mm_prefetch::<_MM_HINT_T0>(at.cast()),
        }
    }
}
