//! Several processes on one run: whatever ends them, every cell is there once.

use kvsieve::experiment::record::{Latency, Record, Status, Worker};
use kvsieve::experiment::{Device, Experiment, Spec, store};
use kvsieve::policy::Registry;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Comparisons of `full` and of `knorm` at two budgets, and passes by two kernels: of each, one for each length.
fn experiment(lengths: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = format!(
        "name = \"x\"\n[timing]\nmin_rounds = 1\nmax_rounds = 2\n\
         [[grid]]\nmeasure = \"evict\"\nheads = \"2/1\"\nhead_dim = 32\ncontext_tokens = {lengths}\nnew_tokens = 4\n\
         policy = [\"full\", \"knorm\"]\nbudget = [0.25, 0.5]\n\
         [[grid]]\nmeasure = \"forward\"\nkernel = [\"naive\", \"tiled\"]\nheads = \"2/1\"\nhead_dim = 32\n\
         context_tokens = {lengths}\n"
    );
    fs::write(folder.path().join("x.toml"), text).unwrap();
    folder
}

fn kvsieve(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvsieve"));
    command.current_dir(folder).args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

const JOIN: [&str; 7] = ["run", "x.toml", "--out", "out", "--threads", "1", "--join"];

fn join(folder: &Path) -> Child {
    kvsieve(folder, &JOIN).spawn().unwrap()
}

/// The only run of a folder, once it is there.
fn run_of(folder: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(folder.join("out/x")).ok()?.map(|entry| entry.unwrap());
    let mut runs = entries.filter(|entry| !entry.file_name().to_str().unwrap().starts_with('.'));
    let run = runs.next()?.path();
    assert!(runs.next().is_none(), "all join one run");
    Some(run)
}

/// Ids of cells in all files of a run, each as often as there is a line of it.
fn recorded(run: &Path) -> Vec<String> {
    let names = fs::read_dir(run).unwrap().map(|entry| entry.unwrap().path());
    let names = names.filter(|path| path.extension().is_some_and(|ending| ending == "jsonl"));
    let texts = names.map(|path| fs::read_to_string(path).unwrap());
    let id = |line: &str| Some(serde_json::from_str::<Value>(line).ok()?["cell_id"].as_str()?.to_string());
    texts.flat_map(|text| text.lines().filter_map(id).collect::<Vec<_>>()).collect()
}

fn text(output: &Output) -> (String, String) {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8(bytes.clone()).unwrap()).into()
}

/// Keeps four processes on a run and ends them at random until it is done; returns how many were.
fn sweep_with_kills(lengths: &str, cells: usize, rng: &mut ChaCha8Rng) -> usize {
    let desk = experiment(lengths);
    let folder = desk.path();
    let mut workers: Vec<Child> = (0..4).map(|_| join(folder)).collect();
    let (mut kills, mut done) = (0, 0);
    let start = Instant::now();
    while done < cells {
        assert!(start.elapsed() < Duration::from_secs(300), "{kills} kills, and {done} of {cells} cells");
        sleep(Duration::from_millis(rng.random_range(10..150)));
        let before = std::mem::replace(&mut done, run_of(folder).map_or(0, |run| recorded(&run).len()));
        // Now and then a record is waited for, so that a busy machine gets on too.
        if kills % 4 == 3 && done == before {
            continue;
        }
        let worker = &mut workers[rng.random_range(0..4)];
        match worker.try_wait().unwrap() {
            // There was nothing more to claim.
            Some(status) => assert!(status.success(), "{status}"),
            None if rng.random_bool(0.5) => {
                worker.kill().unwrap();
                kills += 1;
            }
            None => {
                let asked = Command::new("kill").arg("-TERM").arg(worker.id().to_string()).status().unwrap();
                kills += usize::from(asked.success());
            }
        }
        worker.wait().unwrap();
        *worker = join(folder);
    }
    for mut worker in workers {
        assert!(worker.wait().unwrap().success());
    }
    let run = run_of(folder).unwrap();
    let ids = recorded(&run);
    assert_eq!((ids.len(), ids.iter().collect::<BTreeSet<_>>().len()), (cells, cells), "each cell once");
    let (records, environment) = store::read(&run).unwrap();
    assert_eq!((records.len(), environment["run"]["cells"].as_u64()), (cells, Some(cells as u64)));
    assert!(records.iter().all(|record| record.reason.is_none() && record.worker.is_some()));
    kills
}

#[cfg(unix)]
#[test]
fn four_processes_and_random_kills_leave_each_cell_once() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let kills = sweep_with_kills("\"32..80+2\"", 25 * 5, &mut rng);
    assert!(kills > 0);
}

/// As above for some minutes: `cargo test --release --test experiment -- --ignored a_thousand`.
#[cfg(unix)]
#[test]
#[ignore = "takes minutes"]
fn a_thousand_kills_leave_each_cell_once() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let mut kills = 0;
    while kills < 1000 {
        kills += sweep_with_kills("\"32..80+2\"", 25 * 5, &mut rng);
        eprintln!("{kills} kills");
    }
}

#[test]
fn a_process_that_comes_when_all_is_done_does_nothing_and_one_that_wants_the_run_alone_waits() {
    let desk = experiment("[32, 64]");
    let folder = desk.path();
    assert!(join(folder).wait().unwrap().success());
    let run = run_of(folder).unwrap();
    let before = recorded(&run);
    assert_eq!(before.len(), 10);
    assert!(run.join("report.html").exists());
    for how in ["--join", "--resume"] {
        let output = kvsieve(folder, &["run", "x.toml", "--out", "out", how]).stderr(Stdio::piped()).output().unwrap();
        assert_eq!((output.status.code(), text(&output).1.as_str()), (Some(0), ""), "{how}");
        assert_eq!(recorded(&run), before, "{how}");
    }
    // Who shares the run keeps out who wants it alone, and the other way round.
    let held = File::open(run.join(store::CELLS)).unwrap();
    let busy = |how: &str| {
        let output = kvsieve(folder, &["run", "x.toml", "--out", "out", how]).stderr(Stdio::piped()).output().unwrap();
        let said = text(&output).1;
        (output.status.code() == Some(1)) && said.contains("cells.jsonl' is being written by another kvsieve")
    };
    held.lock_shared().unwrap();
    assert_eq!((busy("--join"), busy("--resume")), (false, true));
    held.unlock().unwrap();
    held.lock().unwrap();
    assert_eq!((busy("--join"), busy("--resume")), (true, true));
}

#[test]
fn what_did_not_fit_is_tried_again_with_more_room() {
    let desk = experiment("[32]");
    for (limit, expected) in [("1KiB", Status::Oom), ("1GiB", Status::Ok), ("1KiB", Status::Ok)] {
        let arguments = [&JOIN[..], &["--limit-memory", limit]].concat();
        kvsieve(desk.path(), &arguments).status().unwrap();
        let (records, _) = store::read(&run_of(desk.path()).unwrap()).unwrap();
        let found: Vec<Status> = records.iter().map(|record| record.status).collect();
        assert_eq!(found, vec![expected; 5], "{limit}");
    }
}

#[test]
fn what_another_process_holds_is_left_to_it_and_taken_over_when_it_died() {
    let desk = experiment("[32, 64]");
    let folder = desk.path();
    assert!(join(folder).wait().unwrap().success());
    let run = run_of(folder).unwrap();
    let parts = fs::read_dir(&run).unwrap().map(|entry| entry.unwrap().path());
    let mut parts: Vec<PathBuf> =
        parts.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("cells-")).collect();
    parts.sort();
    assert_eq!(parts.len(), 4, "a file for each comparison");
    // A process died while it wrote its second record, another is at work.
    let lines = fs::read_to_string(&parts[0]).unwrap();
    let first = lines.split_inclusive('\n').next().unwrap();
    fs::write(&parts[0], &lines[..first.len() + 20]).unwrap();
    let taken = fs::read_to_string(&parts[1]).unwrap().lines().count();
    fs::write(&parts[1], "").unwrap();
    fs::remove_file(run.join("report.html")).unwrap();
    let held = File::open(&parts[1]).unwrap();
    held.lock().unwrap();
    let output = kvsieve(folder, &JOIN).stderr(Stdio::piped()).output().unwrap();
    let said = text(&output).1;
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.starts_with(&format!("note: {} cells have records and {taken} have none yet", 10 - taken)), "{said}");
    assert!(fs::read_to_string(&parts[0]).unwrap().starts_with(first));
    assert_eq!(fs::read_to_string(&parts[0]).unwrap().lines().count(), lines.lines().count());
    assert!(fs::read(&parts[1]).unwrap().is_empty() && !run.join("report.html").exists());
    drop(held);
    assert!(join(folder).wait().unwrap().success());
    assert_eq!(recorded(&run).len(), 10);
    assert!(run.join("report.html").exists());
}

/// Records of all cells of an experiment with two kernels at each point, in `count` parts by comparison.
fn partial(experiment: &Experiment, count: usize, worker: impl Fn(usize) -> Worker) -> Vec<String> {
    let mut parts = vec![String::new(); count];
    for cell in &experiment.cells {
        let comparison = cell.without_choice().id();
        let part = usize::from_str_radix(&comparison[..4], 16).unwrap() % count;
        let ns = cell.context_tokens as f64;
        let latency = Latency {
            samples_ns: vec![ns as u64; 10],
            median_ns: ns,
            p10_ns: ns,
            p90_ns: ns,
            ci95_low_ns: ns,
            ci95_high_ns: ns,
            warmups: 1,
            stop_reason: "rounds".into(),
        };
        let record = Record {
            threads: 1,
            isa_path: "avx2".into(),
            worker: Some(worker(part)),
            latency: [("forward".to_string(), latency)].into(),
            ..Record::blank(cell.clone())
        };
        parts[part] += &serde_json::to_string(&record).unwrap();
        parts[part].push('\n');
    }
    parts
}

/// What stands in a run's folder beside its records.
fn write_run(folder: &Path, experiment: &Experiment, parts: &[(String, &str)]) {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("config.toml"), toml::to_string_pretty(&experiment.spec).unwrap()).unwrap();
    fs::write(folder.join("env.json"), format!("{{\"run\": {{\"cells\": {}}}}}", experiment.cells.len())).unwrap();
    for (name, records) in parts {
        fs::write(folder.join(name), records).unwrap();
    }
}

/// Two kernels at each of `lengths` contexts.
fn large(heads: &str, lengths: usize) -> Experiment {
    let text = format!(
        "name = \"x\"\n[[grid]]\nmeasure = \"forward\"\nkernel = [\"naive\", \"tiled\"]\nheads = {heads}\nhead_dim = 32\n\
         context_tokens = \"1..{lengths}+1\"\n"
    );
    Experiment::new(Spec::parse(&text, "x.toml").unwrap(), "x.toml", &Registry::default(), Device::Cpu).unwrap()
}

fn worker(task: usize, host: &str, cpu: &str) -> Worker {
    Worker { task: format!("7_{task}"), process: 1, host: host.into(), cpu: cpu.into() }
}

#[test]
fn ten_thousand_cells_in_64_folders_or_files_are_one_report() {
    let desk = tempfile::tempdir().unwrap();
    let experiment = large(r#"["2/1", "4/1", "4/2", "8/2", "8/4"]"#, 1000);
    assert_eq!(experiment.cells.len(), 10_000);
    let parts = partial(&experiment, 64, |part| worker(part, "a", "EPYC"));
    let folders: Vec<String> = (0..64).map(|part| format!("shard{part}")).collect();
    for (folder, records) in folders.iter().zip(&parts) {
        write_run(&desk.path().join(folder), &experiment, &[(store::CELLS.into(), records)]);
    }
    let mut files: Vec<(String, &str)> =
        parts.iter().enumerate().map(|(index, records)| (format!("cells-{index}.jsonl"), &**records)).collect();
    files.push((store::CELLS.into(), ""));
    write_run(&desk.path().join("joint"), &experiment, &files);
    let folders: Vec<&str> = folders.iter().map(String::as_str).collect();
    for folders in [&folders[..], &["joint"]] {
        let arguments = [&["report", "--out", "both"], folders].concat();
        let output = kvsieve(desk.path(), &arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
        let (shown, said) = text(&output);
        assert_eq!((output.status.code(), said.as_str()), (Some(0), ""));
        assert!(shown.starts_with("x: 10000 of 10000 cells\n"), "{shown}");
        let rows = shown.lines().filter(|line| line.trim_start_matches(['|', ' ']).starts_with("7_"));
        let cells = rows.map(|line| line.split('|').nth(3).unwrap().trim().parse::<usize>().unwrap());
        let cells: Vec<usize> = cells.collect();
        assert_eq!((cells.len(), cells.iter().sum::<usize>()), (64, 10_000), "{shown}");
        let summary = fs::read_to_string(desk.path().join("both/summary.md")).unwrap();
        assert_eq!(summary.lines().filter(|line| line.starts_with("# ")).collect::<Vec<_>>(), ["# x"]);
    }
}

#[test]
fn machines_and_builds_are_not_put_together_and_which_is_said() {
    let desk = tempfile::tempdir().unwrap();
    let experiment = large("\"2/1\"", 40);
    let parts = partial(&experiment, 2, |part| worker(part, ["a", "b"][part], ["EPYC", "Xeon"][part]));
    write_run(&desk.path().join("joint"), &experiment, &[(store::CELLS.into(), &parts.concat())]);
    for (folder, records, build) in [("old", &parts[0], "1"), ("new", &parts[1], "2")] {
        let records = records.replace("Xeon", "EPYC");
        write_run(&desk.path().join(folder), &experiment, &[(store::CELLS.into(), &records)]);
        fs::write(desk.path().join(folder).join("env.json"), format!("{{\"tool\": {{\"git\": \"{build}\"}}}}"))
            .unwrap();
    }
    let cells = parts[1].lines().count();
    for (folders, said) in [
        (&["joint"][..], "EPYC, 1 threads, avx2; Xeon, 1 threads, avx2"),
        (&["old", "new"], "build \"1\"; build \"2\""),
    ] {
        let arguments = [&["report", "--out", "both"], folders].concat();
        let output = kvsieve(desk.path(), &arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
        let expected = format!(
            "warning: x: {cells} cells have a section of their own, for no ratio is formed of two machines or builds: {said}\n"
        );
        assert_eq!(text(&output).1, expected);
        let summary = fs::read_to_string(desk.path().join("both/summary.md")).unwrap();
        assert_eq!(summary.lines().filter(|line| line.starts_with("# x")).count(), 2, "{summary}");
    }
}
