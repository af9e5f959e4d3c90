//! Knobs of the synthetic inputs as an axis of a grid: each setting measures what an experiment with that setting measures.

use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

/// Runs an experiment in a folder.
fn run(folder: &Path, synthetic: &str, knobs: &str) -> Output {
    let text = format!(
        "name = \"x\"\n[timing]\nmin_rounds = 1\nmax_rounds = 1\n{synthetic}\n[[grid]]\nmeasure = \"evict\"\n\
         heads = \"2/1\"\nhead_dim = 64\ncontext_tokens = 256\nnew_tokens = 8\npolicy = [\"random\", \"snapkv\"]\n\
         budget = 64\n{knobs}\n"
    );
    std::fs::write(folder.join("x.toml"), text).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvsieve"));
    command.current_dir(folder).args(["run", "x.toml"]).output().unwrap()
}

/// Drift by policy and setting, with the hash of the inputs.
fn drifts(synthetic: &str, knobs: &str) -> BTreeMap<(String, String), (f64, String)> {
    let folder = tempfile::tempdir().unwrap();
    let output = run(folder.path(), synthetic, knobs);
    assert!(output.status.success(), "{output:?}");
    let run = std::fs::read_dir(folder.path().join("results/x")).unwrap().next().unwrap().unwrap().path();
    let records = std::fs::read_to_string(run.join("cells.jsonl")).unwrap();
    let record = |line: &str| {
        let record: Value = serde_json::from_str(line).unwrap();
        let text = |field: &str| record["cell"][field].as_str().unwrap().to_string();
        let drift = record["drift"]["rel_l2"].as_f64().unwrap();
        ((text("policy"), record["cell"]["knobs"].to_string()), (drift, text("workload_hash")))
    };
    records.lines().map(record).collect()
}

#[test]
fn a_setting_measures_what_an_experiment_with_that_setting_measures() {
    let axis = drifts("[synthetic]\nneedles = 4", "knobs = [{}, { hinted = 0, noise = 2 }]");
    assert_eq!(axis.len(), 4);
    let alone = drifts("[synthetic]\nneedles = 4\nhinted = 0\nnoise = 2", "");
    let own = drifts("[synthetic]\nneedles = 4", "");
    for policy in ["random", "snapkv"] {
        let of = |setting: &str| (policy.to_string(), setting.to_string());
        let turned = &axis[&of(r#"{"hinted":0,"noise":2}"#)];
        assert_eq!(turned, &alone[&of("null")], "{policy}");
        assert_eq!(axis[&of("null")], own[&of("null")], "{policy}");
        assert_ne!(&axis[&of("null")], turned, "{policy}");
    }
}

#[test]
fn knobs_that_there_are_not_are_refused_in_one_line() {
    for (synthetic, knobs, expected) in [
        ("", "knobs = { hint = 0 }", "knobs 'hint 0': unknown field `hint`"),
        ("", "knobs = { hinted = 2 }", "hinted is 2; it must be between 0 and 1"),
        ("[file]\npath = \"qkv.safetensors\"", "knobs = { hinted = 0 }", "knobs are of synthetic inputs"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let output = run(folder.path(), synthetic, knobs);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{said}");
        assert!(said.contains(expected), "{said}");
    }
}
