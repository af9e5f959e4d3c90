//! The `kvsieve` command: runs what the command line asks for, and turns an error into one line and an exit status.

mod cli;

use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    match cli::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // Nobody reads a closed stderr; that must not turn an error into a panic.
            let _ = writeln!(std::io::stderr(), "error: {failure}");
            failure.exit_code()
        }
    }
}
