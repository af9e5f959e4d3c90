//! Bakes the git revision of the source into the binary, so that every record names the code that made it.
use std::process::Command;

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
}

/// What is compiled in.
const PATHS: [&str; 8] =
    ["src", "engine", "kernels", "experiments", "docs/glossary.md", "Cargo.toml", "Cargo.lock", "build.rs"];

fn main() {
    let revision = git(&["rev-parse", "--short=7", "HEAD"]).unwrap_or_else(|| "unknown".into());
    let dirty =
        git(&[&["status", "--porcelain", "--"], &PATHS[..]].concat()).is_some_and(|changes| !changes.is_empty());
    println!("cargo:rustc-env=KVSIEVE_GIT_REV={revision}");
    println!("cargo:rustc-env=KVSIEVE_GIT_DIRTY={dirty}");
    println!("cargo:rustc-env=KVSIEVE_PROFILE={}", std::env::var("PROFILE").unwrap_or_default());
    // Where it lies in memory is fixed: relocations would be a megabyte of the binary.
    let is = |key: &str, value: &str| std::env::var(key).is_ok_and(|found| found == value);
    if is("CARGO_CFG_TARGET_OS", "linux") && is("CARGO_CFG_TARGET_ENV", "gnu") {
        println!("cargo:rustc-link-arg-bins=-no-pie");
    }
    // The log of HEAD grows with each commit and checkout, and with nothing else. A path that is not there would make
    // every build begin anew.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|path| std::path::Path::new(path).exists());
    for path in log.iter().map(String::as_str).chain(PATHS) {
        println!("cargo:rerun-if-changed={path}");
    }
}
