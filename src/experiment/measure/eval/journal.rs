//! What every sample gave, written down as soon as it is known, so that a run that was killed in the middle of a group of
//! cells goes on with the next sample. Each comparison has its file, beside the records, until all of its cells have theirs.

use crate::eval::{Alone, Answers};
use crate::experiment::cell::Cell;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// What a prompt gave under a cell's policy.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Given {
    /// Beside the full cache.
    pub answers: Answers,
    /// By itself, for the first samples.
    pub alone: Option<Alone>,
}

/// A line of the file.
#[derive(Serialize, Deserialize)]
struct Line<G> {
    cell_id: String,
    /// Which prompt of the cell's samples.
    prompt: usize,
    given: G,
}

/// The samples of a comparison so far.
pub struct Journal {
    lines: File,
    given: HashMap<(String, usize), Given>,
}

impl Journal {
    /// Reads what is in a run's folder of the comparison of this cell; a torn last line is cut off.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn open(folder: &Path, cell: &Cell) -> io::Result<Self> {
        let path = path(folder, cell);
        let mut lines = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path)?;
        let (mut given, mut whole) = (HashMap::new(), 0);
        let bytes = fs::read(&path)?;
        for line in bytes.split_inclusive(|&byte| byte == b'\n') {
            if !line.ends_with(b"\n") {
                break;
            }
            whole += line.len() as u64;
            // What cannot be read is asked again.
            if let Ok(read) = serde_json::from_slice::<Line<Given>>(line) {
                given.insert((read.cell_id, read.prompt), read.given);
            }
        }
        // What is whole is not touched: its time says when the last sample was written.
        if whole < bytes.len() as u64 {
            lines.set_len(whole)?;
        }
        lines.seek(SeekFrom::End(0))?;
        Ok(Journal { lines, given })
    }

    /// What a prompt of a cell gave before.
    pub fn given(&self, cell_id: &str, prompt: usize) -> Option<&Given> {
        self.given.get(&(cell_id.to_string(), prompt))
    }

    /// Writes down what a prompt of a cell gave: on disk when this returns.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn append(&mut self, cell_id: &str, prompt: usize, given: &Given) -> io::Result<()> {
        let line = Line { cell_id: cell_id.into(), prompt, given };
        let mut text = serde_json::to_string(&line).expect("answers are plain data");
        text.push('\n');
        self.lines.write_all(text.as_bytes())?;
        self.lines.sync_data()
    }

    /// Takes the file away, once every cell of the comparison has its record.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn remove(folder: &Path, cell: &Cell) -> io::Result<()> {
        match fs::remove_file(path(folder, cell)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// The file of a cell's comparison in a run's folder.
fn path(folder: &Path, cell: &Cell) -> PathBuf {
    folder.join(format!("samples-{}.jsonl", cell.without_choice().id()))
}
