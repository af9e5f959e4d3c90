//! Runs that were ended and go on, and what they leave alone.

use super::run::{Desk, SMALL, cells, files, records};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

#[test]
fn a_killed_run_goes_on_where_it_was() {
    // Contexts of their own are groups of their own, so cells end one after another.
    let text = "name = \"x\"\n[timing]\nmin_rounds = 6\nmax_rounds = 6\n[[grid]]\nmeasure = \"forward\"\nheads = \"8/8\"\n\
                head_dim = 64\ncontext_tokens = [64, 1500, 1501, 1502, 1503]\n";
    let desk = Desk::with(text);
    let mut child =
        desk.command(&["run", "x.toml", "--out", "out", "--threads", "1"]).stdout(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    let found = || -> Option<PathBuf> {
        let folder = fs::read_dir(desk.path("out/x")).ok()?.next()?.unwrap().path();
        fs::read(folder.join("cells.jsonl")).ok()?.contains(&b'\n').then_some(folder)
    };
    let run = loop {
        if let Some(run) = found() {
            break run;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "no record in a minute");
        std::thread::sleep(Duration::from_millis(2));
    };
    child.kill().unwrap();
    child.wait().unwrap();
    let before = cells(&run);
    let done = before.iter().filter(|&&byte| byte == b'\n').count();
    assert!((1..5).contains(&done), "{done} cells had ended");
    // A kill in the middle of a write leaves half a line.
    let half = &before[..before.len() / done / 2];
    fs::write(run.join("cells.jsonl"), [&before[..], half].concat()).unwrap();
    let report = desk.command(&["report", run.to_str().unwrap()]).output().unwrap();
    assert!(report.status.success() && run.join("report.html").exists());

    let printed = desk.works(&["run", "x.toml", "--out", "out", "--threads", "1", "--resume", "--json", "-"]);
    assert_eq!(printed.lines().count(), 5 - done, "only missing cells run");
    assert_eq!(desk.only_run(), run);
    let after = cells(&run);
    assert!(after.starts_with(&before), "finished cells are as they were, byte for byte");
    let records = records(&after);
    let ids: BTreeSet<&str> = records.iter().map(|record| record["cell_id"].as_str().unwrap()).collect();
    assert_eq!((records.len(), ids.len()), (5, 5));
    assert!(records.iter().all(|record| record["status"] == "ok"));
    assert!(run.join("report.html").exists());
}

#[test]
fn torn_last_lines_are_cut_off_and_damaged_ones_are_named() {
    let desk = Desk::with(SMALL);
    let run = desk.run(&[]);
    let path = run.join("cells.jsonl");
    let whole = cells(&run);
    let lines: Vec<&[u8]> = whole.split_inclusive(|&byte| byte == b'\n').collect();
    // Only the line break is missing: nothing is lost.
    fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    desk.works(&["report", run.to_str().unwrap()]);
    assert_eq!(desk.run(&["--resume"]), run);
    assert!(cells(&run) == whole);
    for cut in [2, 40, lines[2].len() - 1] {
        fs::write(&path, &whole[..whole.len() - cut]).unwrap();
        let said = desk.command(&["report", run.to_str().unwrap()]).output().unwrap();
        let warning = String::from_utf8(said.stderr).unwrap();
        assert!(
            said.status.success() && warning.contains("cells.jsonl': the last line is torn and left out"),
            "{warning}"
        );
        assert_eq!(desk.run(&["--resume"]), run);
        let again = cells(&run);
        assert!(again.starts_with(&whole[..whole.len() - lines[2].len()]));
        // All of the comparison are timed side by side again, and the later record of a cell counts.
        let records = records(&again);
        let ids: BTreeSet<&str> = records.iter().map(|record| record["cell_id"].as_str().unwrap()).collect();
        assert_eq!((records.len(), ids.len()), (5, 3), "cut by {cut}");
    }
    let damaged = [lines[0], &lines[1][..50], b"\n", lines[2]].concat();
    fs::write(&path, &damaged).unwrap();
    for arguments in [vec!["report", run.to_str().unwrap()], vec!["run", "x.toml", "--out", "out", "--resume"]] {
        let stderr = desk.refuses(&arguments);
        assert!(stderr.contains("cells.jsonl' line 2 is not a record"), "{stderr}");
    }
    assert_eq!(fs::read(&path).unwrap(), damaged, "nothing of it is lost");
    fs::write(&path, String::from_utf8(whole).unwrap().replace("cell/v3", "cell/v1")).unwrap();
    let stderr = desk.refuses(&["report", run.to_str().unwrap()]);
    assert!(stderr.contains("line 1 is not a record: its schema is kvsieve/cell/v1"), "{stderr}");
}

#[test]
fn what_a_resumed_run_does_not_find_is_told() {
    let desk = Desk::with(SMALL);
    let resume = || {
        let output = desk.command(&["run", "x.toml", "--out", "out", "--resume"]).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let said = resume();
    assert!(
        said.starts_with("note: no run of this configuration in 'out/x' to go on with; a new one begins"),
        "{said}"
    );
    let run = desk.only_run();
    let config = fs::read(run.join("config.toml")).unwrap();
    for file in ["config.toml", "env.json"] {
        fs::remove_file(run.join(file)).unwrap();
    }
    let said = resume();
    assert!(said.starts_with("warning: ") && said.contains("has no env.json: where its first records"), "{said}");
    assert!(fs::read(run.join("config.toml")).unwrap() == config && desk.only_run() == run);
}

#[test]
fn a_run_that_another_process_writes_to_is_left_alone() {
    let desk = Desk::with(SMALL);
    let run = desk.run(&[]);
    let before = files(&run);
    let held = File::open(run.join("cells.jsonl")).unwrap();
    held.lock().unwrap();
    let stderr = desk.fails(&["run", "x.toml", "--out", "out", "--resume"], 1);
    assert!(stderr.contains("cells.jsonl' is being written by another kvsieve; wait for it to end"), "{stderr}");
    assert!(files(&run) == before);
    held.unlock().unwrap();
    desk.run(&["--resume"]);
}
