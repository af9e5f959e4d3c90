//! `kvsieve memory` and the measure `recall` from the command line: what is written comes back, and mistakes are one line.

use assert_cmd::Command;
use kvsieve::tensor::file::{Output, write};
use serde_json::Value;
use std::path::Path;

fn kvsieve(folder: &Path, arguments: &str) -> Command {
    let mut command = Command::cargo_bin("kvsieve").unwrap();
    command.current_dir(folder).args(arguments.split_whitespace());
    command
}

fn report(folder: &Path, arguments: &str) -> Value {
    let output = kvsieve(folder, &format!("{arguments} --json -")).assert().success().get_output().stdout.clone();
    serde_json::from_slice(&output).unwrap()
}

fn vectors(folder: &Path, name: &str, width: usize, rows: &[usize]) {
    // Rows of another angle each, no two alike.
    let value = |row: usize, column: usize| ((row * 37 + column * (row + 2)) as f32).sin();
    let values: Vec<f32> = rows.iter().flat_map(|&row| (0..width).map(move |column| value(row, column))).collect();
    write(&folder.join(name), &[Output::f32("z", vec![rows.len(), width], &values)]).unwrap();
}

#[test]
fn facts_are_written_read_and_forgotten_across_files() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    vectors(folder, "facts", 32, &[0, 1, 2, 3]);
    vectors(folder, "more", 32, &[4, 5]);
    vectors(folder, "one", 32, &[1]);
    vectors(folder, "all", 32, &[0, 1, 2, 3, 4, 5, 6, 7]);
    let made = "memory write --memory larimar:slots=12,noise=0.01,scope=residual,threshold=0.3";
    let written = report(folder, &format!("{made} --input facts --output m"));
    assert_eq!((&written["vectors"], &written["width"]), (&4.into(), &32.into()));
    // 12 slots of 32 numbers and their covariance.
    assert_eq!(written["held_bytes"], 8 * (12 * 32 + 12 * 12));
    report(folder, "memory write --from m --input more --output m");
    assert_eq!(report(folder, "memory read --from m --input all --output r")["answered"], 6);
    report(folder, "memory forget --from m --input one --output m");
    assert_eq!(report(folder, "memory read --from m --input all --output r")["answered"], 5);
}

/// What was never written cannot be forgotten, nor what is forgotten already, however small its address is beside the noise.
#[test]
fn strangers_are_not_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    vectors(folder, "facts", 768, &[0, 1, 2, 3, 4, 5, 6, 7]);
    // An address of 64 of these numbers has a square of 30, beside a variance of the noise of 100.
    kvsieve(folder, "memory write --memory larimar:slots=64,noise=10 --input facts --output m").assert().success();
    let forgotten = |row: usize| {
        vectors(folder, "one", 768, &[row]);
        kvsieve(folder, "memory forget --from m --input one --output m").output().unwrap().status.code()
    };
    assert!((8..40).all(|stranger| forgotten(stranger) == Some(2)));
    assert_eq!([3, 3, 5].map(forgotten), [Some(0), Some(2), Some(0)]);
}

/// Another value at a written address is refused and the memory stays; a list that has lost facts says that it did not have one.
#[test]
fn other_values_are_not_forgotten_and_facts_that_a_list_lost_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    vectors(folder, "facts", 32, &[0, 1, 2, 3]);
    vectors(folder, "one", 32, &[1]);
    vectors(folder, "never", 32, &[9]);
    let mut other: Vec<f32> = (0..32).map(|column| ((37 + column * 3) as f32).sin()).collect();
    other[16..].iter_mut().for_each(|value| *value = -*value);
    write(&folder.join("other"), &[Output::f32("z", vec![1, 32], &other)]).unwrap();
    let forget = |what: &str| {
        let arguments = format!("memory forget --from m --input {what} --output m");
        let done = kvsieve(folder, &arguments).output().unwrap();
        (done.status.code(), String::from_utf8(done.stderr).unwrap())
    };
    for memory in ["larimar:slots=12", "larimar:slots=12,scope=list", "list:slots=4"] {
        kvsieve(folder, &format!("memory write --memory {memory} --input facts --output m")).assert().success();
        let before = std::fs::read(folder.join("m")).unwrap();
        let (status, said) = forget("other");
        assert!(status == Some(2) && said.matches("is not in the memory").count() == 1, "{memory}: {said}");
        assert!(before == std::fs::read(folder.join("m")).unwrap(), "{memory}");
        assert_eq!(forget("one"), (Some(0), String::new()), "{memory}");
    }
    for memory in ["list:slots=2", "larimar:slots=12,scope=list --most-facts 2"] {
        kvsieve(folder, &format!("memory write --memory {memory} --input facts --output m")).assert().success();
        let (status, said) = forget("one");
        let warned = "warning: the list of the latest facts did not have 1 of these: it has lost older ones";
        assert!(status == Some(0) && said.starts_with(warned), "{memory}: {said}");
    }
    // Slots tell what went from a list from what was never written.
    assert_eq!(forget("never").0, Some(2));
}

/// A list that is full goes on with the latest, and says so.
#[test]
fn facts_that_a_scope_detector_has_no_room_for_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    vectors(folder, "facts", 32, &[0, 1, 2]);
    vectors(folder, "more", 32, &[3, 4]);
    let said = |arguments: &str| {
        let done = kvsieve(folder, arguments).assert().success();
        String::from_utf8(done.get_output().stderr.clone()).unwrap()
    };
    let made = "memory write --memory larimar:slots=12,scope=list --most-facts 4";
    assert_eq!(said(&format!("{made} --input facts --output m")), "");
    let warned = said("memory write --from m --input more --output m");
    assert!(warned.starts_with("warning: scope=list lists the latest 4 facts, and 1 older ones went"), "{warned}");
    assert_eq!(report(folder, "memory read --from m --input facts --output r")["answered"], 2);
}

#[test]
fn mistakes_are_one_line_and_status_2() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    vectors(folder, "facts", 16, &[0, 1]);
    vectors(folder, "other", 17, &[0]);
    vectors(folder, "never", 16, &[9]);
    write(&folder.join("flat"), &[Output::f32("z", vec![4], &[0.0; 4])]).unwrap();
    write(&folder.join("nan"), &[Output::f32("z", vec![1, 2], &[0.0, f32::NAN])]).unwrap();
    write(&folder.join("behind"), &[Output::f32("z", vec![1, 6], &[0.0, 0.0, 0.0, 0.0, 1.0, 2.0])]).unwrap();
    let double = |name: &str, value: f64| {
        let (name, bytes) = (folder.join(name), [value.to_le_bytes(), 1f64.to_le_bytes()].concat());
        write(&name, &[Output { name: "z", dtype: safetensors::Dtype::F64, shape: vec![1, 2], bytes: &bytes }])
            .unwrap();
    };
    double("huge", 1e200);
    double("large", 1e39);
    kvsieve(folder, "memory write --memory list --input large --output beyond-f32").assert().success();
    kvsieve(folder, "memory write --memory larimar:slots=4 --input facts --output m").assert().success();
    kvsieve(folder, "memory write --memory larimar:slots=4,write=episode --input facts --output at-once")
        .assert()
        .success();
    let whole = std::fs::read(folder.join("m")).unwrap();
    std::fs::write(folder.join("torn"), &whole[..whole.len() - 100]).unwrap();
    let grid = "name = \"x\"\n[[grid]]\nmeasure = \"recall\"\n";
    std::fs::write(folder.join("both.toml"), format!("{grid}memory = \"list\"\n")).unwrap();
    std::fs::write(folder.join("zero.toml"), format!("{grid}memory = \"list:slots=0\"\nepisode = \"write\"\n"))
        .unwrap();
    std::fs::write(
        folder.join("once.toml"),
        format!("{grid}memory = \"larimar:write=episode\"\nepisode = \"forget\"\n"),
    )
    .unwrap();
    for (arguments, said) in [
        (
            "memory write --memory larimar:slots=0 --input facts --output o",
            "slots is '0'; it must be a whole number from 1 to",
        ),
        ("memory write --memory camelot --input facts --output o", "unknown memory of facts 'camelot'"),
        ("memory write --input facts --output o", "--memory"),
        ("memory write --memory list --most-facts 0 --input facts --output o", "--most-facts is 0; it must be 1 to"),
        (
            "memory write --memory larimar --most-facts 3 --input facts --output o",
            "--most-facts is nothing to 'larimar', which lists no facts",
        ),
        ("memory write --memory larimar:slots=4 --input behind --output o", "a fact has no address"),
        (
            "memory write --memory larimar --input huge --output o",
            "is inf; to be a fact's it must be above 0 and finite",
        ),
        ("memory read --from beyond-f32 --input large --output o", "for cue 0 holds 1e39, and --output is F32"),
        (
            "memory write --memory list --maps none --input facts --output o",
            "'--memory <NAME>' cannot be used with '--maps <FILE>'",
        ),
        ("memory read --memory list --input facts --output o", "use --from"),
        ("memory read --from m --input other --output o", "the vectors have 17 numbers; the memory is for 16"),
        ("memory read --from torn --input facts --output o", "'torn' is not a valid safetensors file"),
        ("memory read --from facts --input never --output o", "it does not say its memory"),
        ("memory forget --from m --input never --output o", "not in the memory"),
        ("memory read --from m --input facts --output m", "--output is 'm', the same file as --from"),
        ("memory write --from at-once --input never --output o", "another episode would take its place"),
        ("memory write --memory list --input flat --output o", "z has shape [4]; [N, C] is needed"),
        ("memory write --memory list --input nan --output o", "z holds NaN at [0, 1]"),
        ("memory write --memory list --input facts --output facts", "the same file as --input"),
        ("memory write --memory list --input facts --output o --json facts", "the same file as --input"),
        ("memory write --memory list --input facts --output o --json o", "the same file as --output"),
        ("memory write --from m --input facts --output o --json m", "the same file as --from"),
        ("run both.toml", "memory and episode are both needed"),
        ("run zero.toml", "slots is '0'"),
        ("run once.toml", "has no covariance, and forgets nothing"),
    ] {
        let output = kvsieve(folder, arguments).assert().code(2).get_output().clone();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(said) && error.trim_end().lines().count() == 1, "{arguments}: {error}");
        assert!(!folder.join("o").exists(), "{arguments}");
    }
    // What is beyond the memory that may be taken is no mistake of the input.
    let limited = "memory write --memory larimar:slots=4000 --input facts --output o --limit-memory 1MiB";
    kvsieve(folder, limited).assert().code(1);
}

#[test]
fn an_experiment_with_memories_of_facts_is_run_resumed_and_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let text = "name = \"facts\"\n[[grid]]\nmeasure = \"recall\"\nsamples = 3\nmemory = [\"larimar:slots=8\", \"list:slots=8\"]\n\
                episode = [\"write:count=4,width=16\", \"write:count=8,width=16\", \"forget:count=4,width=16\", \
                \"forget:count=8,width=16\", \"write:count=8,width=4096\"]\n";
    std::fs::write(folder.join("facts.toml"), text).unwrap();
    let run = "run facts.toml --out out --limit-memory 12MiB";
    kvsieve(folder, run).assert().success();
    kvsieve(folder, &format!("{run} --resume")).assert().success();
    let found: Vec<_> =
        std::fs::read_dir(folder.join("out/facts")).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [run] = &found[..] else { panic!("{found:?}") };
    let records = std::fs::read_to_string(run.join("cells.jsonl")).unwrap();
    let records: Vec<Value> = records.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(records.len(), 10);
    for record in &records {
        let wide = record["cell"]["episode"] == "write:count=8,width=4096";
        assert_eq!(record["status"], if wide { "oom" } else { "ok" });
        assert!(wide || record["memory"]["residual_bytes"] == 0);
    }
    for figure in ["recall-vs-facts", "what-forgetting-leaves"] {
        assert!(run.join(format!("plots/{figure}.svg")).exists(), "{figure}");
    }
    assert!(std::fs::read_to_string(run.join("summary.md")).unwrap().contains("### recall"));
}
