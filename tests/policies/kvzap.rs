//! Gates that foretell KVzip+'s scores, as a user meets them: fitted on a model, stopped and resumed, at work in it, and mistakes.

use assert_cmd::Command;
use kvsieve::device::Cpu;
use kvsieve::policy::Registry;
use kvsieve::tensor::DType;
use kvsieve::train::kvzap::{self, Settings};
use kvsieve::train::log::Line;
use kvsieve::train::run::{Options, TrainError};
use predicates::prelude::PredicateBooleanExt;
use predicates::str::contains;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// A text that does not change with what is measured.
const PROSE: &str = "LICENSE";

fn settings() -> Settings {
    Settings {
        model: "builtin".into(),
        text: PROSE.into(),
        steps: 6,
        length: 96,
        seed: 5,
        dtype: DType::F32,
        inner: None,
    }
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
    let gates = |out: &Path| {
        let bytes = fs::read(out.join(kvzap::POLICY)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        ["gate.weight", "gate.bias"].map(|name| file.tensor(name).unwrap().data().to_vec())
    };
    assert!(gates(&whole) == gates(&parts), "resumed gates differ");

    let other = Settings { seed: 6, ..settings() };
    let error = train(&other, &parts, true, None).unwrap_err().to_string();
    assert!(error.contains("of other options (seed was 5 and is 6);"), "{error}");
    assert!(matches!(train(&settings(), &parts, false, None), Err(TrainError::Taken(_))));
    assert!(matches!(train(&settings(), &folder.path().join("new"), true, None), Err(TrainError::Nothing(_))));
}

#[test]
fn gates_with_an_inner_layer_take_the_place_of_linear_ones_and_evict() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    let with = Settings { inner: Some(16), ..settings() };
    let lines = train(&with, &whole, false, None).unwrap();
    assert!(matches!(lines.last(), Some(Line::Fitted { inner: 16, explained, .. }) if *explained > 0.5), "{lines:?}");
    train(&with, &parts, false, Some(3)).unwrap();
    assert!(parts.join("samples").exists());
    train(&with, &parts, true, None).unwrap();
    let read = |out: &Path| {
        let bytes = fs::read(out.join(kvzap::POLICY)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        ["gate.inner.weight", "gate.inner.bias", "gate.weight", "gate.bias"].map(|name| {
            let tensor = file.tensor(name).unwrap();
            (tensor.shape().to_vec(), tensor.data().to_vec())
        })
    };
    assert!(read(&whole) == read(&parts), "resumed gates differ");
    assert_eq!(read(&whole)[0].0[1], 16);
    assert!(!parts.join("samples").exists());
    // A run that is done has nothing left to do.
    let gates = read(&parts);
    assert!(train(&with, &parts, true, None).unwrap().is_empty());
    assert!(read(&parts) == gates && !parts.join("samples").exists());
    let record: Value = serde_json::from_slice(&fs::read(whole.join("training.json")).unwrap()).unwrap();
    assert!(record["held_out_explained_linear"].as_f64().unwrap() > 0.3, "{record}");

    let mut command = kvsieve();
    command.args([
        "eval",
        "--model",
        "builtin",
        "--task",
        "passkey",
        "--context",
        "256",
        "--samples",
        "1",
        "--budget",
        "0.5",
    ]);
    let policy = format!("kvzap:gates={}", whole.join(kvzap::POLICY).display());
    command.args(["--policy", &policy]).assert().success();
}

#[test]
fn fitted_gates_evict_by_a_budget_or_a_threshold() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("gates");
    train(&Settings { steps: 2, ..settings() }, &out, false, None).unwrap();
    let tokens: Vec<u32> = (0..400).map(|at| 300 + at * 7 % 500).collect();
    let input = folder.path().join("tokens.json");
    fs::write(&input, json!({ "tokens": [tokens] }).to_string()).unwrap();
    let logits = |policy: &str, budget: &str| {
        let mut command = kvsieve();
        command.args(["logits", "--model", "builtin", "--budget", budget, "--evict-after", "320", "--json", "-"]);
        command.args(["--policy", policy]).arg("--tokens").arg(&input);
        command.arg("--output").arg(folder.path().join("logits.safetensors"));
        command.assert()
    };
    let gates = format!("kvzap:gates={}", out.join(kvzap::POLICY).display());
    let evicted = |policy: &str, budget: &str| {
        let said = logits(policy, budget).success().get_output().stdout.clone();
        let said: Value = serde_json::from_slice(&said).unwrap();
        assert!(said["policy_file_hash"].is_string(), "{said}");
        said["evicted_tokens"].as_u64().unwrap()
    };
    // 160 of 320 tokens of each of 8 heads stay on average, and of the 80 behind them those that left the window may go.
    assert!((160 * 8..240 * 8).contains(&evicted(&gates, "0.5")));
    // A threshold that everything reaches keeps everything, one that nothing reaches all but the window.
    assert_eq!(evicted(&format!("{gates}+threshold:at=-1000"), "1.0"), 0);
    assert_eq!(evicted(&format!("{gates}+threshold:at=1000"), "1.0"), (400 - 128) * 8);
    let some = evicted(&format!("{gates}+threshold:at=-5"), "1.0");
    assert!((1..(400 - 128) * 8).contains(&some), "{some}");
    logits("kvzap", "0.5").failure().code(2).stderr(contains("gate.weight"));
}

#[test]
fn settings_that_mean_nothing_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("gates");
    let cases: [(&[&str], &str); 8] = [
        (&[], "--method kvzap learns from a text; give --text FILE"),
        (&["--text", "nowhere.txt"], "cannot read the text 'nowhere.txt'"),
        (&["--text", PROSE, "--length", "8"], "give at least 1, of 16 tokens"),
        (&["--text", PROSE, "--length", "100000"], "sequences of 100000 tokens"),
        (&["--text", PROSE, "--steps", "0"], "0 sequences of 1024 tokens"),
        (&["--text", PROSE, "--inner", "0"], "an inner layer of 0 elements; give 1 to 65536"),
        (&["--text", PROSE, "--window", "64"], "--window is nothing to --method kvzap"),
        (&["--text", PROSE, "--learning-rate", "0.1"], "--learning-rate is nothing to --method kvzap"),
    ];
    for (more, expected) in cases {
        let mut command = kvsieve();
        command.args(["train", "--method", "kvzap", "--model", "builtin"]).args(more).arg("--out").arg(&out);
        command.assert().failure().code(2).stderr(contains(expected));
    }
}

/// Surrogates as the method's authors publish them give what their class gives (`tests/conformance/kvzap_fixtures.py`).
#[test]
fn published_surrogates_score_as_their_authors_class_does() {
    for (name, bound) in [("kvzap-linear", 1e-5), ("kvzap-mlp", 1e-4)] {
        let folder = format!("tests/fixtures/{name}");
        let bytes = fs::read(format!("{folder}/expected.safetensors")).unwrap();
        let expected = SafeTensors::deserialize(&bytes).unwrap();
        let [hidden, scores] = ["hidden", "scores"].map(|name| {
            let values = expected.tensor(name).unwrap().data().chunks_exact(4);
            values.map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect::<Vec<f32>>()
        });
        let policy = Registry::default().policy(&format!("kvzap:gates={folder}")).unwrap();
        let scorer = policy.scorer.unwrap();
        for (at, (hidden, scores)) in hidden.chunks(32).zip(scores.chunks(2)).enumerate() {
            let mut gates = [0.0; 2];
            scorer.gate(at % 3, hidden, &mut gates);
            let off = gates.iter().zip(scores).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(off < bound, "{name}, token {}, layer {}: {gates:?}, {scores:?}", at / 3, at % 3);
        }
    }
    let other = tempfile::tempdir().unwrap();
    fs::write(other.path().join("config.json"), r#"{"model_type": "llama"}"#).unwrap();
    let of = |folder: &str| {
        let policy = format!("kvzap:gates={folder}");
        let mut command = kvsieve();
        command
            .args(["generate", "--model", "builtin", "--prompt", "a", "--budget", "0.5", "--policy", &policy])
            .assert()
            .code(2)
    };
    of(other.path().to_str().unwrap()).stderr(contains("model_type is \"llama\"; it must be \"kvzap\""));
    // Of a model with other hidden states.
    of("tests/fixtures/kvzap-mlp").stderr(contains("'gate.weight'").and(contains("inner elements")));
}
