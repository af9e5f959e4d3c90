//! Files that are there whole or not at all.

use super::ReportError;
use std::fs;
use std::path::Path;

/// Writes `content` beside `path` under another name, then renames it; makes the folder if need be.
///
/// # Errors
/// [`ReportError::File`] with the path and the system's reason.
pub fn replace(path: &Path, content: &str) -> Result<(), ReportError> {
    let error = |reason| ReportError::File { path: path.into(), reason };
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(error)?;
    }
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.tmp", std::process::id()));
    let unfinished = path.with_file_name(name);
    let written = fs::write(&unfinished, content).and_then(|()| fs::rename(&unfinished, path));
    written.map_err(|reason| {
        // Best effort: the first error is the one to tell.
        let _ = fs::remove_file(&unfinished);
        error(reason)
    })
}
