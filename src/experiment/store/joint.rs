//! Several processes on one run, of one machine or of many that share its folder.
//!
//! A process claims comparisons, whose cells are measured side by side. The records of each are a file, and who holds the
//! file's lock is the only one to write to it. The system lets go of a lock when its process ends, in whatever way: the next
//! process to come reads what is there and runs the rest. `cells.jsonl` is locked by all of them together, which keeps out a
//! process that wants the run for itself, as such a process keeps them out.

use super::{CELLS, Record, Store, StoreError, failed, latest, locked, make, name, open, read};
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

/// Begins the name of a comparison's records.
const PART: &str = "cells-";
/// Locked while a process looks for the run's folder, so that only one makes it.
const DOOR: &str = ".join.lock";

/// A run that is shared with other processes.
pub struct Joint {
    /// The folder.
    pub folder: PathBuf,
    /// The folder's name.
    pub run_id: String,
    /// Keeps out processes that would have the run alone.
    _shared: File,
}

impl Joint {
    /// Joins the latest run of this configuration and revision under `base`, or makes one.
    ///
    /// # Errors
    /// When a process has the run for itself, the folder cannot be locked, or the system refuses.
    pub fn open(
        base: &Path,
        config_hash: &str,
        config: &str,
        environment: &serde_json::Value,
    ) -> Result<Self, StoreError> {
        fs::create_dir_all(base).map_err(|error| failed(base, &error))?;
        if let Some(reason) = local_locks(base) {
            return Err(StoreError::Locks { path: base.into(), reason });
        }
        let path = base.join(DOOR);
        let door = open(&path)?;
        locked(&path, door.lock().map_err(TryLockError::Error))?;
        let folder = match latest(base, config_hash, "") {
            Some(folder) => folder,
            None => make(base, config_hash, "", config, environment)?,
        };
        let path = folder.join(CELLS);
        let shared = open(&path)?;
        locked(&path, shared.try_lock_shared())?;
        Ok(Joint { run_id: name(&folder), folder, _shared: shared })
    }

    /// All records so far, whoever wrote them.
    ///
    /// # Errors
    /// When they are damaged.
    pub fn records(&self) -> Result<Vec<Record>, StoreError> {
        Ok(read(&self.folder)?.0)
    }

    /// Claims a comparison: what is recorded of it, and where the rest goes; `None` while another process has it. The claim
    /// ends with the [`Store`].
    ///
    /// # Errors
    /// When records are damaged, or the system refuses.
    pub fn claim(&self, comparison: &str) -> Result<Option<(Store, Vec<Record>)>, StoreError> {
        let path = self.folder.join(format!("{PART}{comparison}.jsonl"));
        let lines = open(&path)?;
        match lines.try_lock() {
            Err(TryLockError::WouldBlock) => Ok(None),
            lock => {
                locked(&path, lock)?;
                let store = Store { folder: self.folder.clone(), run_id: self.run_id.clone(), path, lines };
                store.go_on().map(Some)
            }
        }
    }
}

/// Whether a file of this name holds the records of a comparison.
pub(super) fn is_part(name: &str) -> bool {
    name.starts_with(PART) && name.ends_with(".jsonl")
}

/// Why locks in a folder would keep apart only the processes of one machine; `None` where nothing says so.
fn local_locks(folder: &Path) -> Option<String> {
    let folder = folder.canonicalize().ok()?;
    local_locks_of(&fs::read_to_string("/proc/self/mounts").ok()?, &folder)
}

/// As [`local_locks`], from the system's table of mounts: device, folder, type and options on each line.
fn local_locks_of(mounts: &str, folder: &Path) -> Option<String> {
    let fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).filter(|fields| fields.len() >= 4);
    // A blank in a folder's name is written as its number.
    let at = |fields: &Vec<&str>| PathBuf::from(fields[1].replace("\\040", " "));
    // Of equal ones the last is on top.
    let mount =
        fields.filter(|fields| folder.starts_with(at(fields))).max_by_key(|fields| at(fields).components().count())?;
    let local = match mount[2] {
        "nfs" | "nfs4" => &["nolock", "local_lock=flock", "local_lock=all"][..],
        "lustre" => &["localflock"],
        _ => &[],
    };
    let option = mount[3].split(',').find(|option| local.contains(option))?;
    Some(format!("'{}' is mounted with {option}, and other machines would not see the lock", mount[1]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_whose_locks_stay_on_one_machine_is_known_by_its_mount() {
        let mounts = "/dev/sda / ext4 rw,relatime 0 0\n\
                      a:/home /home nfs4 rw,vers=4.2,local_lock=none 0 0\n\
                      b:/old /home/old nfs rw,nolock,local_lock=all 0 0\n\
                      c:/two /my\\040work nfs rw,local_lock=flock 0 0\n\
                      d@tcp:/fast /fast lustre rw,flock 0 0\n\
                      d@tcp:/slow /slow lustre rw,localflock 0 0\n";
        for (folder, option) in [
            ("/tmp", None),
            ("/home/user/results", None),
            ("/home/older", None),
            ("/home/old/results", Some("nolock")),
            ("/my work/results", Some("local_lock=flock")),
            ("/fast/results", None),
            ("/slow", Some("localflock")),
        ] {
            let reason = local_locks_of(mounts, Path::new(folder));
            assert_eq!(reason.is_some(), option.is_some(), "{folder}: {reason:?}");
            if let (Some(reason), Some(option)) = (reason, option) {
                assert!(reason.contains(&format!("mounted with {option}, ")), "{reason}");
            }
        }
    }
}
