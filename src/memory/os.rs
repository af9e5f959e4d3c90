//! What the operating system says about memory: the check that does not trust the arena.

use std::fs;

/// Peak and current resident set of this process, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resident {
    /// Resident set now (`VmRSS`).
    pub now_bytes: u64,
    /// Largest resident set since the last [`reset_peak`] (`VmHWM`).
    pub peak_bytes: u64,
}

/// Memory of the machine, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    /// All of it, or the control group's limit if that is smaller.
    pub total_bytes: u64,
    /// What can be taken without swapping.
    pub available_bytes: u64,
}

/// Starts a new measurement of the peak resident set. False where the system has no such switch (outside Linux).
pub fn reset_peak() -> bool {
    fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// The process's resident set; `None` where the system does not tell.
pub fn resident() -> Option<Resident> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    Some(Resident { now_bytes: field(&text, "VmRSS:")?, peak_bytes: field(&text, "VmHWM:")? })
}

/// The machine's memory; `None` where the system does not tell.
pub fn machine() -> Option<Machine> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let mut machine =
        Machine { total_bytes: field(&text, "MemTotal:")?, available_bytes: field(&text, "MemAvailable:")? };
    let control_group =
        |name: &str| -> Option<u64> { fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?.trim().parse().ok() };
    if let Some(limit) = control_group("memory.max") {
        let used = control_group("memory.current").unwrap_or(0);
        machine.total_bytes = machine.total_bytes.min(limit);
        machine.available_bytes = machine.available_bytes.min(limit.saturating_sub(used));
    }
    Some(machine)
}

/// Memory that a run may take when nobody says otherwise: 80% of what can be taken without swapping; `None` where the
/// system does not tell.
pub fn default_limit_bytes() -> Option<u64> {
    machine().map(|machine| machine.available_bytes / 5 * 4)
}

/// What a process holds, in bytes, as `/proc/PID/smaps_rollup` tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Held {
    /// Pages in memory.
    pub resident_bytes: u64,
    /// Of these, its share of pages that several processes map.
    pub proportional_bytes: u64,
    /// Anonymous pages: heap, tensors, stacks. Only the process itself can give them back.
    pub anonymous_bytes: u64,
    /// Of these, in huge pages.
    pub huge_bytes: u64,
    /// Of these, given up by the process and taken by the system when it needs them.
    pub lazily_free_bytes: u64,
    /// Pages of files, shared memory included.
    pub file_bytes: u64,
    /// Of these, unchanged: the system takes them without asking and reads them again.
    pub clean_bytes: u64,
    /// Swapped out.
    pub swapped_bytes: u64,
}

/// What a process holds; `None` where there is no such process, it belongs to somebody else, or the system does not tell.
pub fn held(pid: u32) -> Option<Held> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let of = |name| field(&text, name);
    let (resident_bytes, anonymous_bytes) = (of("Rss:")?, of("Anonymous:")?);
    Some(Held {
        resident_bytes,
        proportional_bytes: of("Pss:")?,
        anonymous_bytes,
        huge_bytes: of("AnonHugePages:")?,
        lazily_free_bytes: of("LazyFree:")?,
        file_bytes: resident_bytes.saturating_sub(anonymous_bytes),
        clean_bytes: of("Shared_Clean:")? + of("Private_Clean:")?,
        swapped_bytes: of("Swap:")?,
    })
}

/// A `Name:  1234 kB` line of a proc file, in bytes.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_lines_are_read_in_bytes() {
        assert_eq!(field("A: 1 kB\nVmHWM:\t   12 kB\n", "VmHWM:"), Some(12288));
        assert_eq!(field("A: 1 kB\n", "VmHWM:"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_resident_peak_sees_an_arena_allocation() {
        use crate::memory::{Arena, Label};
        if !reset_peak() {
            return;
        }
        let before = resident().unwrap();
        let arena = Arena::unlimited();
        drop(arena.alloc::<u8>(Label::Workspace, 256 << 20).unwrap());
        let grown = resident().unwrap().peak_bytes.saturating_sub(before.now_bytes);
        // Other tests of this process run beside this one, so only a lower bound is certain.
        assert!(grown >= 240 << 20, "resident peak grew by {grown} bytes only");
    }
}
