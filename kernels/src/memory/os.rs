//! What the operating system says about memory: the check that does not trust the arena.

use std::fs;
use std::path::Path;

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
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    for [limit, used] in control_groups(Path::new("/sys/fs/cgroup"), &groups) {
        machine.total_bytes = machine.total_bytes.min(limit);
        machine.available_bytes = machine.available_bytes.min(limit.saturating_sub(used));
    }
    Some(machine)
}

/// Limit and use, in bytes, of each control group that a process is in and that has a limit: of version 2 or 1, with the groups
/// that they lie in. `groups` is `/proc/self/cgroup`, `root` where groups are mounted. Pages of files that the system can take
/// back do not count as used.
fn control_groups(root: &Path, groups: &str) -> Vec<[u64; 2]> {
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let is_memory = controllers.split(',').any(|controller| controller == "memory");
        let (mount, names) = match (controllers.is_empty(), is_memory) {
            (true, _) => (root.to_path_buf(), ["memory.max", "memory.current", "inactive_file"]),
            (_, true) => {
                (root.join("memory"), ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"])
            }
            _ => continue,
        };
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            let read = |name: &str| fs::read_to_string(mount.join(group).join(name)).ok();
            let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
            let Some(limit) = number(names[0]) else { continue };
            let spare = read("memory.stat")
                .and_then(|text| text.lines().find_map(|line| line.strip_prefix(names[2])?.trim().parse::<u64>().ok()));
            let used = number(names[1]).unwrap_or(0).saturating_sub(spare.unwrap_or(0));
            found.push([limit, used]);
        }
    }
    found
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
    let file_bytes = resident_bytes.saturating_sub(anonymous_bytes);
    Some(Held {
        resident_bytes,
        proportional_bytes: of("Pss:")?,
        anonymous_bytes,
        huge_bytes: of("AnonHugePages:")?,
        lazily_free_bytes: of("LazyFree:")?,
        file_bytes,
        // What is free lazily is clean as well, and of no file.
        clean_bytes: (of("Shared_Clean:")? + of("Private_Clean:")?).saturating_sub(of("LazyFree:")?).min(file_bytes),
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

    #[cfg(target_os = "linux")]
    #[test]
    fn pages_that_are_free_lazily_are_no_files() {
        let mut pages = memmap2::MmapMut::map_anon(64 << 20).unwrap();
        pages.fill(1);
        // SAFETY: nothing reads the pages again.
        if unsafe { pages.unchecked_advise(memmap2::UncheckedAdvice::Free) }.is_err() {
            return;
        }
        let Some(held) = held(std::process::id()) else { return };
        assert!(held.clean_bytes <= held.file_bytes, "{held:?}");
    }

    #[test]
    fn control_groups_of_both_versions_are_found_with_those_that_they_lie_in() {
        let root = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("slice/job/memory.max", "max\n");
        put("slice/memory.max", "1000\n");
        put("slice/memory.current", "700\n");
        put("slice/memory.stat", "anon 400\ninactive_file 200\n");
        put("memory/job/memory.limit_in_bytes", "2000\n");
        put("memory/job/memory.usage_in_bytes", "100\n");
        assert_eq!(control_groups(root.path(), "0::/slice/job\n"), [[1000, 500]]);
        let both = control_groups(root.path(), "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n");
        assert_eq!(both, [[2000, 100]]);
        assert!(control_groups(root.path(), "").is_empty());
    }
}
