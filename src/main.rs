//! The `kvsieve` command, with the policies that come with it.

use std::process::ExitCode;

fn main() -> ExitCode {
    kvsieve::cli::main_with(Default::default())
}
