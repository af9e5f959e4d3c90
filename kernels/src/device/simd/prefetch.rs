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

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_second_level_is_for_processors_that_the_system_too_says_are_of_amd() {
        prepare();
        let told = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let maker = told.lines().find_map(|line| line.strip_prefix("vendor_id")).unwrap();
        assert_eq!(INTO_SECOND_LEVEL.load(Ordering::Relaxed), maker.contains("AuthenticAMD"), "{maker}");
        // Addresses that cannot be read do no harm.
        for at in [0, 63, usize::MAX] {
            for_work(at as *const u8);
            for_reading(at as *const u8);
        }
    }
}
