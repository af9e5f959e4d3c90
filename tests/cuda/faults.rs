//! What becomes of a run when a GPU goes wrong in the middle of it, and what is said where one cannot be used at all.
//! Ignored unless asked for, and on the emulated device alone, which fails where it is told to
//! (docs/testing-kernels.md): `python3 tests/kernels/emulate/device.py -- cargo test --release -- --ignored cuda`.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

/// Short contexts first: groups run in this order.
const EXPERIMENT: &str = "
name = \"x\"
[timing]
min_rounds = 2
max_rounds = 2
cap_s = 60
[[grid]]
measure = \"forward\"
kernel = \"naive\"
context_tokens = [24, 40]
heads = \"4/2\"
head_dim = 32
[[grid]]
measure = \"forward\"
kernel = \"tiled\"
context_tokens = 40
heads = \"4/2\"
head_dim = 32
[[grid]]
measure = \"decode\"
context_tokens = [40, 48]
heads = \"4/2\"
head_dim = 32
";

/// Runs `kvsieve` in a folder with the experiment, on a device that these variables describe.
fn kvsieve(folder: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    std::fs::write(folder.join("x.toml"), EXPERIMENT).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvsieve"));
    command.current_dir(folder).args(arguments).envs(variables.iter().copied());
    command.output().unwrap()
}

/// Whether faults can be asked for here: a GPU has none to give.
fn is_emulated() -> bool {
    let folder = tempfile::tempdir().unwrap();
    let said = kvsieve(folder.path(), &["doctor"], &[]);
    String::from_utf8(said.stdout).unwrap().contains("kvsieve emulated device")
}

const RUN: [&str; 4] = ["run", "x.toml", "--device", "cuda"];

/// Everything on stderr that is not the emulated device's own: one line.
fn said(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    let own: Vec<&str> = text.lines().filter(|line| !line.starts_with("emulated device: ")).collect();
    assert_eq!(own.len(), 1, "{text}");
    own[0].into()
}

/// The records of the only run, as kernel, context, status and number of samples, with the reason.
fn records(folder: &Path) -> Vec<(String, u64, String, usize, String)> {
    let runs: Vec<_> = std::fs::read_dir(folder.join("results/x")).unwrap().collect();
    assert_eq!(runs.len(), 1);
    let lines = std::fs::read_to_string(runs[0].as_ref().unwrap().path().join("cells.jsonl")).unwrap();
    let record = |line: &str| {
        let record: Value = serde_json::from_str(line).unwrap();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        let phase = text(&record["cell"]["measure"]);
        let samples = record["latency"][&phase]["samples_ns"].as_array().map_or(0, Vec::len);
        let tokens = record["cell"]["context_tokens"].as_u64().unwrap();
        (text(&record["cell"]["kernel"]), tokens, text(&record["status"]), samples, text(&record["reason"]))
    };
    lines.lines().map(record).collect()
}

#[test]
#[ignore = "cuda: needs the emulated device"]
fn cuda_faults_are_the_cells_that_made_them_and_the_others_go_on() {
    if !is_emulated() {
        return;
    }
    // In the checked turn, in a round while other cells wait for theirs, and in the first kernel of all.
    for (fault, kernel, tokens) in
        [("tiled_forward@1", "tiled", 40), ("tiled_forward@3", "tiled", 40), ("naive_scores@1", "naive", 24)]
    {
        let folder = tempfile::tempdir().unwrap();
        let faults = format!("launch={fault}");
        let output = kvsieve(folder.path(), &RUN, &[("KVSIEVE_EMULATED_FAULTS", faults.as_str())]);
        assert_eq!(output.status.code(), Some(1), "{fault}: {output:?}");
        let line = said(&output);
        assert!(line.contains(&format!("1 of the cells failed; the first is 'forward {kernel}")), "{line}");
        let records = records(folder.path());
        assert_eq!(records.len(), 5, "{records:?}");
        for record in &records {
            if (record.0.as_str(), record.1) == (kernel, tokens) {
                assert_eq!(record.2, "failed", "{fault}: {record:?}");
                assert!(record.4.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{fault}: {record:?}");
            } else {
                assert_eq!((record.2.as_str(), record.3, record.4.as_str()), ("ok", 2, ""), "{fault}: {record:?}");
            }
        }
    }
}

#[test]
#[ignore = "cuda: needs the emulated device"]
fn cuda_lost_in_the_middle_keeps_what_was_measured() {
    if !is_emulated() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let output = kvsieve(folder.path(), &RUN, &[("KVSIEVE_EMULATED_FAULTS", "lost=tiled_forward@2")]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let line = said(&output);
    assert!(line.contains("the GPU was lost") && line.contains("CUDA_ERROR_DEVICE_UNAVAILABLE"), "{line}");
    assert!(line.contains("--resume"), "{line}");
    let before = records(folder.path());
    let told: Vec<_> = before.iter().map(|record| (record.0.as_str(), record.1, record.2.as_str())).collect();
    assert_eq!(told, [("naive", 24, "ok"), ("tiled", 40, "failed")]);

    let resumed: Vec<&str> = RUN.into_iter().chain(["--resume"]).collect();
    let output = kvsieve(folder.path(), &resumed, &[]);
    // The rest is run, and the cell that failed once more: nothing is left to tell.
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let after = records(folder.path());
    assert_eq!(after[..2], before[..], "nothing is written over");
    assert_eq!(after[2..].iter().filter(|record| record.2 == "ok").count(), 4, "{after:?}");
}

#[test]
#[ignore = "cuda: needs the emulated device"]
fn cuda_memory_that_is_not_there_is_a_record_whoever_asks_for_it() {
    if !is_emulated() {
        return;
    }
    // A tensor of a cell, and a module whose kernels find no room.
    for (fault, reason) in [("alloc@8", "bytes for"), ("load@2", "loading the kernels")] {
        let folder = tempfile::tempdir().unwrap();
        let output = kvsieve(folder.path(), &RUN, &[("KVSIEVE_EMULATED_FAULTS", fault)]);
        assert_eq!(output.status.code(), Some(0), "{fault}: {output:?}");
        let records = records(folder.path());
        let refused: Vec<_> = records.iter().filter(|record| record.2 == "oom").collect();
        assert_eq!((records.len(), refused.len()), (5, 1), "{fault}: {records:?}");
        assert!(refused[0].4.starts_with("out of GPU memory") && refused[0].4.contains(reason), "{refused:?}");
    }
    // Where it ends a probe of the longest context, the search goes on.
    let folder = tempfile::tempdir().unwrap();
    let search: Vec<&str> = RUN.into_iter().chain(["--find-max-context", "--limit-memory", "1MiB"]).collect();
    let output = kvsieve(folder.path(), &search, &[("KVSIEVE_EMULATED_FAULTS", "load@2")]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    // A fault ends it, and is no mistake of the user's.
    let folder = tempfile::tempdir().unwrap();
    let output = kvsieve(folder.path(), &search, &[("KVSIEVE_EMULATED_FAULTS", "launch=tiled_forward@2")]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(said(&output).contains("forward tiled") && said(&output).contains("ILLEGAL_ADDRESS"), "{output:?}");
}

#[test]
#[ignore = "cuda: needs the emulated device"]
fn cuda_that_cannot_be_used_is_refused_in_one_line() {
    if !is_emulated() {
        return;
    }
    let full = (33 << 20).to_string();
    for (variable, value, status, words) in [
        ("KVSIEVE_EMULATED_CUDA", "11.8", 2, &["the driver has CUDA 11.8", "needs 12.0 or later", "update"][..]),
        ("KVSIEVE_EMULATED_CAPABILITY", "7.5", 2, &["compute capability 7.5", "need 8.0"]),
        ("KVSIEVE_EMULATED_CAPABILITY", "15.0", 2, &["NVRTC 13.0 (", "does not compile for sm_150", "--nvrtc"]),
        ("KVSIEVE_EMULATED_BYTES", &full, 1, &["out of GPU memory"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let output = kvsieve(folder.path(), &RUN, &[(variable, value)]);
        let line = said(&output);
        assert_eq!(output.status.code(), Some(status), "{value}: {line}");
        assert!(words.iter().all(|word| line.contains(word)), "{value}: {line}");
        assert!(!folder.path().join("results").exists(), "{value}");
    }
    // The oldest driver that will do has none of the functions that came later.
    let folder = tempfile::tempdir().unwrap();
    let output = kvsieve(folder.path(), &RUN, &[("KVSIEVE_EMULATED_CUDA", "12.0")]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}
