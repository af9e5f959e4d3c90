//! Asking for cache lines ahead of their use, into the cache where this processor wants them.
//!
//! Where reading takes the time, AMD's processors are asked to bring lines into the second-level cache: into the first,
//! the Zen 4 reads at little more than half of the memory's bandwidth as soon as there is work beside the reading,
//! probably because each line takes one of that cache's few miss buffers until memory answers. Where the work on a line
//! takes longer than reading it, as with codes of four bits, the nearer cache is the better. `docs/cpu-kernels.md` has
//! figures, and on which processors they were measured.

use super::cpuid;
use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
use std::sync::atomic::{AtomicBool, Ordering};

/// Not in a lazy cell: what initialises one is a call, for which a kernel's loop would spill its registers.
static INTO_SECOND_LEVEL: AtomicBool = AtomicBool::new(false);

/// Finds out what [`for_reading`] does on this processor.
pub(super) fn prepare() {
    let maker = cpuid(0);
    let maker = [maker.ebx, maker.edx, maker.ecx].map(u32::to_le_bytes);
    INTO_SECOND_LEVEL.store(maker.as_flattened() == b"AuthenticAMD", Ordering::Relaxed);
}

/// Asks for the line at an address where the work on it takes longer than reading it: into the first-level cache.
/// Nothing happens where it cannot be read.
#[inline(always)]
pub(super) fn for_work(at: *const u8) {
    // SAFETY: no memory is touched; every x86-64 processor has the instruction.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
}

/// The same where reading takes the time.
#[inline(always)]
pub(super) fn for_reading(at: *const u8) {
    match INTO_SECOND_LEVEL.load(Ordering::Relaxed) {
        // SAFETY: as in `for_work`.
        true => unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) },
        false => for_work(at),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_cannot_be_read_may_be_asked_for_by_every_maker() {
        for into_second_level in [true, false] {
            INTO_SECOND_LEVEL.store(into_second_level, Ordering::Relaxed);
            for at in [0, 1, 63, usize::MAX, 1 << 47] {
                for_work(at as *const u8);
                for_reading(at as *const u8);
            }
        }
        prepare();
    }
}
