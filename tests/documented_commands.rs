//! Every command that README and the pages of `docs/` show is one that the command line understands: none names an option,
//! a command or a spelled value that is gone. What the commands do is tested elsewhere.

use std::path::Path;
use std::process::Command;

/// Commands of the page's code blocks, continued lines as one, without the remarks that stand some spaces behind them.
fn commands(page: &str) -> Vec<String> {
    let mut commands = Vec::new();
    for block in page.split("```").skip(1).step_by(2) {
        let lines = block.replace("\\\n", " ");
        for line in
            lines.lines().map(str::trim).filter(|line| line.starts_with("kvsieve ") && !line.starts_with("kvsieve ="))
        {
            let words = line.split(" #").next().unwrap_or_default();
            let shown = match words.split_once("   ") {
                // A continued line is indented, a remark is set apart.
                Some((command, rest)) if !rest.trim_start().starts_with('-') => command,
                _ => words,
            };
            commands.push(shown.to_string());
        }
    }
    commands
}

#[test]
fn every_command_that_is_shown_is_understood() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let pages = std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let pages = pages.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let (mut shown, mut wrong) = (0, Vec::new());
    for path in pages.chain(["README.md", "CONTRIBUTING.md", "experiments/README.md"].map(|page| root.join(page))) {
        for command in commands(&std::fs::read_to_string(&path).unwrap()) {
            // What is read before --help must be right, and then help is all that is asked for.
            let script =
                format!("kvsieve() {{ '{}' \"$@\" --help; }}; model=m; {command}", env!("CARGO_BIN_EXE_kvsieve"));
            let output = Command::new("sh").args(["-c", &script]).output().unwrap();
            shown += 1;
            if !output.status.success() {
                wrong.push(format!("{}: {command}: {}", path.display(), String::from_utf8_lossy(&output.stderr)));
            }
        }
    }
    assert!(shown > 40, "{shown} commands are shown");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
