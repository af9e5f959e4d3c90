//! How results leave the program: to standard output, which a reader may close at any time, or to files, which are
//! whole or not there.

use super::failure::Failure;
use crate::model::{BUILTIN, is_of_model, locate};
use crate::tensor::file;
use serde::Serialize;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Prints a text that ends with a line break. A reader that has seen enough (`| head -1`) is no error.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::work(format!("cannot write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// Prints what a user should know before trusting the numbers, on stderr: standard output is for results.
pub fn warn(warnings: &[String]) {
    warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
}

/// Tells a user on stderr what is no result and no doubt.
pub fn note(text: &str) {
    eprintln!("note: {text}");
}

/// Writes a value as JSON to standard output (`-`) or to a file.
pub fn json(target: &Path, value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).expect("what is printed is plain data");
    put_json(target, text + "\n")
}

/// Compiled once, whatever was printed.
fn put_json(target: &Path, text: String) -> Result<(), Failure> {
    if is_stdout(target) {
        return print(&text);
    }
    check_json(Some(target))?;
    Ok(file::replace(target, |path| std::fs::write(path, &text).map_err(|error| error.to_string()))?)
}

/// Refuses a `--json` target that cannot be written, before any work is done.
pub fn check_json(target: Option<&Path>) -> Result<(), Failure> {
    target.filter(|target| !is_stdout(target)).map_or(Ok(()), |target| check_writable("--json", target))
}

/// Whether a `--json` target is standard output.
pub fn is_stdout(target: &Path) -> bool {
    target == Path::new("-")
}

/// Refuses files that cannot be written, that two options name, or that are part of a model whose folder is read, before any work is
/// done: `reads` and `writes` are pairs of an option and its file.
pub fn check_files(reads: &[(&str, &Path)], writes: &[(&str, &Path)]) -> Result<(), Failure> {
    let all: Vec<_> = reads.iter().chain(writes).map(|&(option, path)| (option, path, resolved(path))).collect();
    for (index, (option, path, resolved)) in all.iter().enumerate() {
        if let Some((other, ..)) = all[..index].iter().find(|earlier| earlier.2 == *resolved) {
            return Err(Failure::usage(format!(
                "{option} is '{}', the same file as {other}; give each its own",
                path.display()
            )));
        }
    }
    let is_read = |path: &Path| {
        let name = path.file_name().and_then(|name| name.to_str());
        path.exists() && name.is_some_and(is_of_model)
    };
    let folders: Vec<_> = reads.iter().map(|&(option, path)| (option, resolved(&stands_for(path)))).collect();
    for (option, path, resolved) in all.iter().skip(reads.len()).filter(|(.., resolved)| is_read(resolved)) {
        if let Some((of, _)) = folders.iter().find(|(_, folder)| resolved.parent() == Some(folder)) {
            return Err(Failure::usage(format!("{option} is '{}', a file of {of}; name another", path.display())));
        }
    }
    writes.iter().try_for_each(|&(option, path)| check_writable(option, path))
}

/// A `--json` target with its option where it is a file, for checks of what is written.
pub fn json_file(target: Option<&Path>) -> Option<(&'static str, &Path)> {
    target.filter(|target| !is_stdout(target)).map(|target| ("--json", target))
}

/// The folder of the model that comes with kvsieve, where it is named; else the path itself.
fn stands_for(path: &Path) -> PathBuf {
    let builtin = (path == Path::new(BUILTIN)).then(|| locate(path).ok()).flatten();
    builtin.unwrap_or_else(|| path.into())
}

fn check_writable(option: &str, path: &Path) -> Result<(), Failure> {
    let shown = path.display();
    if path.metadata().is_ok_and(|found| !found.is_file()) {
        return Err(Failure::usage(format!("{option} '{shown}' exists and is not a regular file; name a file")));
    }
    let folder = folder(path);
    if !folder.is_dir() {
        let folder = folder.display();
        return Err(Failure::usage(format!("{option} '{shown}': there is no folder '{folder}'; make it first")));
    }
    writable(option, path, folder)
}

/// Refuses a folder that cannot be written to, or made, before any work is done. Nothing is made here, so that a command
/// that is refused for another reason leaves nothing behind.
pub fn check_folder(option: &str, path: &Path) -> Result<(), Failure> {
    // What is missing will be made in the first of its parents that is there.
    let there = |folder: &&Path| folder.as_os_str().is_empty() || folder.symlink_metadata().is_ok();
    let found = path.ancestors().find(there).unwrap_or(path);
    let found = if found.as_os_str().is_empty() { Path::new(".") } else { found };
    if !found.is_dir() {
        let (shown, found) = (path.display(), found.display());
        return Err(Failure::usage(format!("{option} '{shown}': '{found}' is not a folder; name another")));
    }
    writable(option, path, found)
}

/// Writes a nameless file into `folder`, which says more than permissions do.
fn writable(option: &str, path: &Path, folder: &Path) -> Result<(), Failure> {
    match tempfile::tempfile_in(folder) {
        Ok(_) => Ok(()),
        Err(error) => {
            let (shown, folder) = (path.display(), folder.display());
            Err(Failure::usage(format!("cannot write {option} '{shown}': {error} (in '{folder}'); name another place")))
        }
    }
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The path by which the system knows a file, also one that is not there yet.
fn resolved(path: &Path) -> PathBuf {
    let in_folder = || Some(folder(path).canonicalize().ok()?.join(path.file_name()?));
    path.canonicalize().ok().or_else(in_folder).unwrap_or_else(|| path.into())
}
