//! `kvsieve completions`: what a shell needs to complete commands and options.

use super::failure::Failure;
use super::output;
use clap_complete::Shell;

const EXAMPLES: &str = "\
Examples:
  bash   kvsieve completions bash > ~/.local/share/bash-completion/completions/kvsieve
  zsh    kvsieve completions zsh > \"${fpath[1]}/_kvsieve\"
  fish   kvsieve completions fish > ~/.config/fish/completions/kvsieve.fish";

/// Print the completion script of a shell
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The shell
    shell: Shell,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut super::command(), "kvsieve", &mut script);
    output::print(&String::from_utf8_lossy(&script))
}
