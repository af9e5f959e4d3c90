//! The folder of a run: written so that nothing that finished is ever lost.
//!
//! `config.toml` and `env.json` are there before the first cell; each record is appended to `cells.jsonl` in one write
//! and synced as its cell ends. A run that was killed is found again by the hash of its configuration; a last line
//! that was torn by the kill is cut off. Who writes to a file holds its lock; processes that share a run write to a file for
//! each comparison ([`Joint`]).

mod joint;

pub use joint::Joint;

use super::earlier;
use super::record::{Record, SCHEMA, Status};
use serde::Serialize;
use std::collections::HashSet;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

/// Name of the records' file.
pub const CELLS: &str = "cells.jsonl";
/// Name of the file with a run's configuration.
const CONFIGURATION: &str = "config.toml";
/// Name of the file that says where a run was begun, and with what.
pub const ENVIRONMENT: &str = "env.json";
/// Name of the file of limits that were searched for.
pub const MAX_CONTEXTS: &str = "max-context.jsonl";

/// A folder that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The system refuses.
    #[error("cannot write '{path}': {reason}")]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// The system's own words.
        reason: String,
    },
    /// The folder cannot be read.
    #[error("cannot read '{path}': {reason}")]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The system's own words.
        reason: String,
    },
    /// A line before the last that is not a record.
    #[error("'{path}' line {line} is not a record: {reason}; remove the line or name another folder")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What the parser found.
        reason: String,
    },
    /// Another process writes to the same run.
    #[error("'{path}' is being written by another kvsieve; wait for it to end")]
    Busy {
        /// The file.
        path: PathBuf,
    },
    /// A file system on which processes cannot be kept apart.
    #[error("'{path}' cannot be locked: {reason}; name a folder on a file system with locks")]
    Locks {
        /// The file or folder.
        path: PathBuf,
        /// The system's own words, or what it would let happen.
        reason: String,
    },
}

/// A run's folder, with a file of it open for appending.
pub struct Store {
    /// The folder.
    pub folder: PathBuf,
    /// The folder's name.
    pub run_id: String,
    path: PathBuf,
    lines: File,
}

impl Store {
    /// Makes `base/<time>-<config hash>-<revision>[suffix]` with its configuration and environment, and in it `file` for
    /// what is appended.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn create(
        base: &Path,
        config_hash: &str,
        suffix: &str,
        config: &str,
        environment: &serde_json::Value,
        file: &'static str,
    ) -> Result<Self, StoreError> {
        let folder = make(base, config_hash, suffix, config, environment)?;
        let path = folder.join(file);
        Ok(Store { lines: alone(&path)?, run_id: name(&folder), path, folder })
    }

    /// Opens the latest run of this configuration and revision under `base`, with its records; `None` without one.
    ///
    /// # Errors
    /// When its records are damaged, or another process writes to it.
    pub fn resume(base: &Path, config_hash: &str, suffix: &str) -> Result<Option<(Self, Vec<Record>)>, StoreError> {
        let Some(folder) = latest(base, config_hash, suffix) else { return Ok(None) };
        let path = folder.join(CELLS);
        let lines = alone(&path)?;
        let mut records = read_parts(&folder)?;
        let (store, own) = Store { run_id: name(&folder), folder, path, lines }.go_on()?;
        records.extend(own);
        Ok(Some((store, current(records))))
    }

    /// The environment in which the run was begun.
    ///
    /// # Errors
    /// When the file that says so is no JSON.
    pub fn environment(&self) -> Result<serde_json::Value, StoreError> {
        environment(&self.folder)
    }

    /// Reads what is in the file, cuts off a torn last line, and ends one that only lacks its line break.
    fn go_on(mut self) -> Result<(Self, Vec<Record>), StoreError> {
        let Lines { records, whole, end } = read_records(&self.path)?;
        // What is whole is not touched: its time says when the last record was written.
        let cut = if end == End::Torn { self.lines.set_len(whole) } else { Ok(()) };
        let seek = cut.and_then(|()| self.lines.seek(SeekFrom::End(0)));
        let ended = seek.and_then(|_| if end == End::Unbroken { self.lines.write_all(b"\n") } else { Ok(()) });
        ended.map_err(|error| failed(&self.path, &error))?;
        Ok((self, records))
    }

    /// Writes the configuration where the folder has lost it.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn renew_configuration(&self, config: &str) -> Result<(), StoreError> {
        let path = self.folder.join(CONFIGURATION);
        if path.exists() { Ok(()) } else { fs::write(&path, config).map_err(|error| failed(&path, &error)) }
    }

    /// Appends a record: on disk when this returns.
    ///
    /// # Errors
    /// When the system refuses; records that were appended before stay.
    pub fn append(&mut self, record: &impl Serialize) -> Result<(), StoreError> {
        let mut line = serde_json::to_string(record).expect("a record is plain data");
        line.push('\n');
        let written = self.lines.write_all(line.as_bytes()).and_then(|()| self.lines.sync_data());
        written.map_err(|error| failed(&self.path, &error))
    }
}

/// The last record of each cell, in the order in which they were written: a cell that is run again replaces what it was before.
pub fn current(records: Vec<Record>) -> Vec<Record> {
    let mut seen = HashSet::new();
    let mut current: Vec<Record> =
        records.into_iter().rev().filter(|record| seen.insert(record.cell_id.clone())).collect();
    current.reverse();
    current
}

/// Cells of [`current`] records that need not run again: measured, or out of memory in as much as there is now.
pub fn finished(records: &[Record], limit_bytes: u64) -> HashSet<String> {
    let may_fit = |record: &Record| {
        let limit_then = record.memory.as_ref().map_or(0, |memory| memory.limit_bytes);
        limit_then < limit_bytes && record.needed_bytes().is_none_or(|needed| needed <= limit_bytes)
    };
    let is_done = |record: &&Record| match record.status {
        Status::Ok | Status::Skipped => true,
        Status::Oom => !may_fit(record),
        Status::Failed => false,
    };
    records.iter().filter(is_done).map(|record| record.cell_id.clone()).collect()
}

/// The files of a run's records whose last line is torn: by a kill, or because it is being written.
///
/// # Errors
/// As [`read`].
pub fn torn(folder: &Path) -> Result<Vec<PathBuf>, StoreError> {
    let mut torn = Vec::new();
    for path in parts(folder).into_iter().chain([folder.join(CELLS)]) {
        if read_records(&path)?.end == End::Torn {
            torn.push(path);
        }
    }
    Ok(torn)
}

/// Reads the [`current`] records of a run's folder and their environment, as written so far; a last line that is [`torn`] is left out.
///
/// # Errors
/// When the folder holds no records or they are damaged.
pub fn read(folder: &Path) -> Result<(Vec<Record>, serde_json::Value), StoreError> {
    let mut records = read_parts(folder)?;
    // Last, because what failed while processes shared the run is run again into it, and of two records the later counts.
    let found = read_records(&folder.join(CELLS)).map_err(|error| match error {
        StoreError::Read { path, reason } => StoreError::Read {
            path,
            reason: format!("{reason}; name a run's own folder, results/NAME/TIME-HASH-REVISION"),
        },
        other => other,
    });
    records.extend(found?.records);
    let mut records = current(records);
    earlier::renew_found(&mut records);
    Ok((records, environment(folder)?))
}

/// The environment in which a run was begun; nothing where no file says.
fn environment(folder: &Path) -> Result<serde_json::Value, StoreError> {
    let path = folder.join(ENVIRONMENT);
    match fs::read_to_string(&path) {
        Ok(text) => serde_json::from_str(&text)
            .map_err(|error| StoreError::Read { path, reason: format!("it is not JSON: {error}") }),
        Err(_) => Ok(serde_json::Value::Null),
    }
}

/// Records of a run that processes shared, by comparison.
fn read_parts(folder: &Path) -> Result<Vec<Record>, StoreError> {
    let read = |path: PathBuf| Ok(read_records(&path)?.records);
    Ok(parts(folder).into_iter().map(read).collect::<Result<Vec<_>, StoreError>>()?.concat())
}

/// The files of these.
fn parts(folder: &Path) -> Vec<PathBuf> {
    let mut parts: Vec<PathBuf> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    parts.retain(|path| joint::is_part(&name(path)));
    parts.sort();
    parts
}

/// How a file of records ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Whole,
    /// With a record that only lacks its line break.
    Unbroken,
    /// Within a line.
    Torn,
}

/// A file of records.
struct Lines {
    records: Vec<Record>,
    /// Length of what was read, in bytes.
    whole: u64,
    end: End,
}

fn read_records(path: &Path) -> Result<Lines, StoreError> {
    let bytes = fs::read(path).map_err(|error| StoreError::Read { path: path.into(), reason: error.to_string() })?;
    let broken = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |last| last + 1);
    let end = match &bytes[broken..] {
        [] => End::Whole,
        rest if serde_json::from_slice::<serde_json::Value>(rest).is_ok() => End::Unbroken,
        _ => End::Torn,
    };
    let whole = if end == End::Torn { broken } else { bytes.len() };
    let mut records = Vec::new();
    for (index, line) in bytes[..whole].split(|&byte| byte == b'\n').enumerate() {
        if line.is_empty() {
            continue;
        }
        let damaged = |reason: String| StoreError::Damaged { path: path.into(), line: index + 1, reason };
        let mut value: serde_json::Value = serde_json::from_slice(line).map_err(|error| damaged(error.to_string()))?;
        earlier::renew(&mut value);
        // Said before a missing field is: the record is whole, only of another version.
        if let Some(other) = value["schema"].as_str().filter(|schema| *schema != SCHEMA) {
            return Err(damaged(format!("its schema is {other}, and this kvsieve reads {SCHEMA}; run it again")));
        }
        let record: Record = serde_json::from_value(value).map_err(|error| damaged(error.to_string()))?;
        record.check().map_err(damaged)?;
        records.push(record);
    }
    Ok(Lines { records, whole: whole as u64, end })
}

/// Makes a run's folder. It is filled under another name, so that nobody ever finds half of one.
fn make(
    base: &Path,
    config_hash: &str,
    suffix: &str,
    config: &str,
    environment: &serde_json::Value,
) -> Result<PathBuf, StoreError> {
    let unfinished = base.join(format!(".{config_hash}-{}", std::process::id()));
    fs::create_dir_all(&unfinished).map_err(|error| failed(&unfinished, &error))?;
    let environment = serde_json::to_string_pretty(environment).expect("the environment is plain data");
    for (file, text) in [(CONFIGURATION, config), (ENVIRONMENT, &environment)] {
        let path = unfinished.join(file);
        fs::write(&path, text).map_err(|error| failed(&path, &error))?;
    }
    loop {
        let seconds = humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string();
        let time: String = seconds.chars().filter(|c| !matches!(c, '-' | ':')).collect();
        let folder = base.join(format!("{time}-{config_hash}-{}{suffix}", super::environment::revision()));
        match fs::rename(&unfinished, &folder) {
            Ok(()) => return Ok(folder),
            // Another run of the same configuration has this second.
            Err(error) if matches!(error.kind(), ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty) => {
                sleep(Duration::from_millis(100));
            }
            Err(error) => return Err(failed(&folder, &error)),
        }
    }
}

/// The folder of the latest run of this configuration and revision under `base`.
pub fn latest(base: &Path, config_hash: &str, suffix: &str) -> Option<PathBuf> {
    let wanted = format!("-{config_hash}-{}{suffix}", super::environment::revision());
    let folders = fs::read_dir(base).ok()?.flatten().map(|entry| entry.path());
    folders.filter(|path| name(path).ends_with(&wanted)).max()
}

fn name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().to_string()).unwrap_or_default()
}

/// Opens a file to which no other process may write.
fn alone(path: &Path) -> Result<File, StoreError> {
    let file = open(path)?;
    let lock = file.try_lock();
    locked(path, lock).map(|()| file)
}

fn open(path: &Path) -> Result<File, StoreError> {
    let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path);
    file.map_err(|error| failed(path, &error))
}

fn locked(path: &Path, lock: Result<(), TryLockError>) -> Result<(), StoreError> {
    lock.map_err(|error| match error {
        TryLockError::WouldBlock => StoreError::Busy { path: path.into() },
        TryLockError::Error(error) => StoreError::Locks { path: path.into(), reason: error.to_string() },
    })
}

fn failed(path: &Path, error: &std::io::Error) -> StoreError {
    StoreError::Write { path: path.into(), reason: error.to_string() }
}
