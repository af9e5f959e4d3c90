//! How results leave the program: to standard output, which a reader may close at any time, or to files, which are
//! whole or not there.

use super::failure::Failure;
use kvsieve::tensor::file;
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

/// Writes a value as JSON to standard output (`-`) or to a file.
pub fn json(target: &Path, value: &impl Serialize) -> Result<(), Failure> {
    let mut text = serde_json::to_string_pretty(value).expect("what is printed is plain data");
    text.push('\n');
    if is_stdout(target) {
        return print(&text);
    }
    check_writable("--json", target)?;
    Ok(file::replace(target, |path| std::fs::write(path, &text).map_err(|error| error.to_string()))?)
}

/// Whether a `--json` target is standard output.
pub fn is_stdout(target: &Path) -> bool {
    target == Path::new("-")
}

/// Refuses files that cannot be written, or that two options name, before any work is done: `reads` and `writes` are
/// pairs of an option and its file.
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
    writes.iter().try_for_each(|&(option, path)| check_writable(option, path))
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
    match tempfile::tempfile_in(folder) {
        Ok(_) => Ok(()),
        Err(error) => Err(Failure::work(format!("cannot write '{shown}': {error}"))),
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
