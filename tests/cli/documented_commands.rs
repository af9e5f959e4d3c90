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

/// The whole walk of the tutorial, on the built program; tells how long each step takes.
#[test]
#[ignore = "takes minutes, and fetches a model of 98 MB with pip"]
fn the_tutorial_runs_from_its_first_command_to_its_last() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let results = tempfile::tempdir().unwrap();
    let page = std::fs::read_to_string(root.join("docs/tutorial.md")).unwrap();
    let experiment = page.split("```toml\n# mine.toml\n").nth(1).unwrap().split("```").next().unwrap();
    let mine = results.path().join("mine.toml");
    std::fs::write(&mine, experiment).unwrap();
    let page = page.replace("run mine.toml", &format!("run {}", mine.display()));
    let mut model = "";
    for block in page.split("```sh\n").skip(1) {
        let block = block.split("```").next().unwrap();
        model = block.lines().find(|line| line.starts_with("model=")).unwrap_or(model);
        let start = std::time::Instant::now();
        let program = env!("CARGO_BIN_EXE_kvsieve");
        // Results go elsewhere, and what cargo would build and install is there.
        let script = format!(
            "set -e\nkvsieve() {{ case $1 in run|eval) '{program}' \"$@\" --out '{0}';; *) '{program}' \"$@\";; esac; }}\n\
             cargo() {{ case \"$*\" in 'run --release -- '*) shift 3; kvsieve \"$@\";; install*) ;; *) command cargo \"$@\" --out '{0}';; esac; }}\n\
             {model}\n{block}",
            results.path().display()
        );
        let output = Command::new("bash").args(["-c", &script]).current_dir(root).output().unwrap();
        println!("{:.0} s: {}", start.elapsed().as_secs_f64(), block.trim());
        assert!(output.status.success(), "{block}: {}", String::from_utf8_lossy(&output.stderr));
    }
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
