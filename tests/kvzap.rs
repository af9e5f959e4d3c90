//! Gates that foretell KVzip+'s scores, as a user meets them: fitted on a model, stopped and resumed, at work in it, and mistakes.

use assert_cmd::Command;
use kvsieve::device::Cpu;
use kvsieve::tensor::DType;
use kvsieve::train::kvzap::{self, Settings};
use kvsieve::train::log::Line;
use kvsieve::train::run::{Options, TrainError};
use predicates::str::contains;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

const PROSE: &str = "docs/results.md";

fn settings() -> Settings {
    Settings { model: "builtin".into(), text: PROSE.into(), steps: 6, length: 96, seed: 5, dtype: DType::F32 }
}

fn train(settings: &Settings, out: &Path, resume: bool, stop_after: Option<usize>) -> Result<Vec<Line>, TrainError> {
    let cpu = Cpu::new(Some(2)).unwrap();
    let options = Options { out: out.into(), resume, stop_after, limit_bytes: 4 << 30, environment: Value::Null };
    let mut lines = Vec::new();
    kvzap::run(settings, &cpu, &options, &mut |line| lines.push(line.clone())).map(|()| lines)
}

fn kvsieve() -> Command {
    Command::new(assert_cmd::cargo::cargo_bin!("kvsieve"))
}

/// What gates explain of text that they were not fitted to, at the end.
fn held_out(lines: &[Line]) -> f64 {
    match lines.last() {
        Some(Line::Fitted { step: 6, held_out, .. }) => *held_out,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_run_that_was_stopped_goes_on_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    let explained = held_out(&train(&settings(), &whole, false, None).unwrap());
    assert!((0.3..1.0).contains(&explained), "{explained}");
    train(&settings(), &parts, false, Some(2)).unwrap();
    assert_eq!(held_out(&train(&settings(), &parts, true, None).unwrap()), explained);
    let gates = |out: &Path| fs::read(out.join(kvzap::POLICY)).unwrap();
    assert!(gates(&whole) == gates(&parts), "resumed gates differ");

    let other = Settings { seed: 6, ..settings() };
    let error = train(&other, &parts, true, None).unwrap_err().to_string();
    assert!(error.contains("it is of another recipe"), "{error}");
    assert!(matches!(train(&settings(), &parts, false, None), Err(TrainError::Taken(_))));
    assert!(matches!(train(&settings(), &folder.path().join("new"), true, None), Err(TrainError::Nothing(_))));
}

/// Mean KL to the full cache of each policy, after a command.
fn divergence(policies: &str) -> Vec<(String, f64)> {
    let mut command = kvsieve();
    command.args([
        "eval",
        "--model",
        "builtin",
        "--task",
        "recall",
        "--context",
        "512",
        "--samples",
        "4",
        "--json",
        "-",
    ]);
    command.args(["--policy", policies, "--budget", "0.5", "--dtype", "f32"]);
    let out = command.assert().success().get_output().stdout.clone();
    let said: Value = serde_json::from_slice(&out).unwrap();
    let rows = said["results"].as_array().unwrap_or_else(|| panic!("{said}"));
    rows.iter().map(|row| (row["policy"].as_str().unwrap().to_string(), row["kl"].as_f64().unwrap())).collect()
}

#[test]
fn fitted_gates_evict_better_than_chance() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    // What the built-in model was made for: names and codes.
    let words = ["amber", "falcon", "copper", "river", "silver", "maple", "garden", "window"];
    let line =
        |at: usize| format!(" The code of {} {} is {:07}.", words[at % 8], words[at / 8 % 8], at * 7919 % 9999999);
    fs::write(&text, (0..2000).map(line).collect::<String>()).unwrap();
    let out: PathBuf = folder.path().join("gates");
    train(&Settings { text, steps: 12, length: 256, ..settings() }, &out, false, None).unwrap();
    let gates = out.join(kvzap::POLICY);
    let found = divergence(&format!("kvzap:gates={},random", gates.display()));
    let of = |name: &str| found.iter().find(|(policy, _)| policy.starts_with(name)).unwrap().1;
    assert!(of("kvzap") < 0.8 * of("random"), "{found:?}");
}

#[test]
fn settings_that_mean_nothing_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("gates");
    let cases: [(&[&str], &str); 7] = [
        (&[], "--method kvzap learns from a text; give --text FILE"),
        (&["--text", "nowhere.txt"], "cannot read the text 'nowhere.txt'"),
        (&["--text", PROSE, "--length", "8"], "give at least 1, of 16 tokens"),
        (&["--text", PROSE, "--length", "100000"], "sequences of 100000 tokens"),
        (&["--text", PROSE, "--steps", "0"], "0 sequences of 1024 tokens"),
        (&["--text", PROSE, "--window", "64"], "--window is nothing to --method kvzap"),
        (&["--text", PROSE, "--learning-rate", "0.1"], "--learning-rate is nothing to --method kvzap"),
    ];
    for (more, expected) in cases {
        let mut command = kvsieve();
        command.args(["train", "--method", "kvzap", "--model", "builtin"]).args(more).arg("--out").arg(&out);
        command.assert().failure().code(2).stderr(contains(expected));
    }
}
