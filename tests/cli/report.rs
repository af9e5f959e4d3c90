//! `kvsieve report` over runs that went on with other threads: sections of one run, whole, and comparable with another.

use assert_cmd::Command;
use std::path::Path;

fn kvsieve(folder: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::cargo_bin("kvsieve").unwrap().current_dir(folder).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// The one folder of runs in `out`.
fn only(folder: &Path, out: &str) -> String {
    let runs = std::fs::read_dir(folder.join(out).join("x")).unwrap();
    let runs: Vec<_> = runs.map(|run| run.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(runs.len(), 1);
    format!("{out}/x/{}", runs[0])
}

#[test]
fn a_run_in_two_sections_is_whole_and_is_compared_with_another() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // Who lowers the most rounds alone has as many at least.
    let experiment = "name = \"x\"\n[timing]\nmax_rounds = 3\n[[grid]]\nmeasure = \"forward\"\nheads = \"2/1\"\n\
                      head_dim = 32\ncontext_tokens = [64, 128, 192]\nkernel = \"tiled\"\n";
    std::fs::write(folder.join("x.toml"), experiment).unwrap();
    for out in ["one", "two"] {
        assert_eq!(kvsieve(folder, &["run", "x.toml", "--out", out, "--threads", "1"]).0, Some(0));
    }
    let [one, two] = ["one", "two"].map(|out| only(folder, out));
    let cells = folder.join(&two).join("cells.jsonl");
    let lines = std::fs::read_to_string(&cells).unwrap();
    let (first, _) = lines.split_at(lines.trim_end().rfind('\n').unwrap() + 1);
    std::fs::write(&cells, first).unwrap();
    let shown = |out: &str| std::fs::read_to_string(folder.join(out).join("summary.md")).unwrap();
    assert_eq!(kvsieve(folder, &["report", &two, "--out", "torn"]).0, Some(0));
    assert!(shown("torn").contains("- Incomplete: 1 of 3 cells is not here"), "{}", shown("torn"));

    assert_eq!(kvsieve(folder, &["run", "x.toml", "--out", "two", "--threads", "2", "--resume"]).0, Some(0));
    let (code, _, warned) = kvsieve(folder, &["report", &two, "--out", "whole"]);
    assert!(code == Some(0) && warned.contains("have a section of their own"), "{warned}");
    let whole = shown("whole");
    assert!(
        !whole.contains("Incomplete") && whole.contains("2 of 3 cells: ") && whole.contains("1 of 3 cells: "),
        "{whole}"
    );
    // Both are compared whole: with two threads a pass takes more memory, and times of other threads count for nothing.
    let (code, said, warned) = kvsieve(folder, &["report", &one, &two, "--out", "both", "--check"]);
    assert!(
        code == Some(1) && said.contains("3 cells in both") && warned.contains("1 of 3 cells changed"),
        "{said}{warned}"
    );
    std::fs::write(&cells, first).unwrap();
    let (code, _, said) = kvsieve(folder, &["report", &one, &two, "--out", "both", "--check"]);
    assert!(code == Some(1) && said.contains("1 cell of the first run missing in the second"), "{said}");
}

#[test]
fn shards_are_one_run_that_is_compared_with_the_whole() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let experiment = "name = \"x\"\n[timing]\nmax_rounds = 3\n[[grid]]\nmeasure = \"forward\"\nheads = \"2/1\"\n\
                      head_dim = 32\ncontext_tokens = [64, 128, 192]\nkernel = \"tiled\"\n";
    std::fs::write(folder.join("x.toml"), experiment).unwrap();
    for (out, shard) in [("full", None), ("first", Some("1/2")), ("second", Some("2/2"))] {
        let shard = shard.map_or(Vec::new(), |shard| vec!["--shard", shard]);
        let run = [vec!["run", "x.toml", "--out", out, "--threads", "1"], shard].concat();
        assert_eq!(kvsieve(folder, &run).0, Some(0));
    }
    let [full, first, second] = ["full", "first", "second"].map(|out| only(folder, out));
    // Whichever stands first, and wherever the whole stands among the shards.
    for folders in [[&full, &first, &second], [&first, &second, &full], [&first, &full, &second]] {
        let arguments = [&["report"], &folders.map(String::as_str)[..], &["--out", "both", "--check"]].concat();
        let (code, said, warned) = kvsieve(folder, &arguments);
        assert!(code == Some(0) && said.contains("3 cells in both\n"), "{said}{warned}");
        let summary = std::fs::read_to_string(folder.join("both/summary.md")).unwrap();
        let ids = [&first, &second].map(|folder| folder.rsplit('/').next().unwrap());
        assert!(summary.contains(&format!("Run `{} + {}`: 3 cells: ", ids[0], ids[1])), "{summary}");
    }
    for (folders, found) in [(vec![&first[..], &second], "these folders are of 1 run"), (vec![&full[..]], "of 1 run")] {
        let (code, _, said) = kvsieve(folder, &[&["report"], &folders[..], &["--check"]].concat());
        assert!(code == Some(2) && said.contains("--check compares two runs") && said.contains(found), "{said}");
    }
}
