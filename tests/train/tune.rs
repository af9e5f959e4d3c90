//! Fine-tuning as a user meets it: adapters trained, stopped, resumed and at work; batches that are added up; and mistakes.

use assert_cmd::Command;
use kvsieve::device::Cpu;
use kvsieve::tensor::DType;
use kvsieve::train::log::Line;
use kvsieve::train::lora::Asked;
use kvsieve::train::optimizer::Kind;
use kvsieve::train::run::{Options, TrainError};
use kvsieve::train::tune::{self, Method, Settings};
use predicates::str::contains;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// A text that repeats itself enough to be learned.
fn text(folder: &Path) -> PathBuf {
    let path = folder.join("text.txt");
    let line = |at: usize| format!(" The code of amber falcon is {}. A bear saw the sea.", at % 7);
    fs::write(&path, (0..120).map(line).collect::<String>()).unwrap();
    path
}

fn settings(text: PathBuf) -> Settings {
    Settings {
        method: Method::Lora,
        model: "builtin".into(),
        text,
        steps: 6,
        length: 32,
        batch: 2,
        accumulate: 1,
        seed: 5,
        learning_rate: 5e-3,
        weights: DType::F32,
        recompute: None,
        optimizer: Kind::Adamw,
        adapters: Some(Asked { rank: 4, alpha: 8.0, targets: vec!["q".into(), "v".into()] }),
        qat: None,
    }
}

fn train(settings: &Settings, out: &Path, resume: bool, stop_after: Option<usize>) -> Result<Vec<Line>, TrainError> {
    let cpu = Cpu::new(Some(2)).unwrap();
    let options = Options { out: out.into(), resume, stop_after, limit_bytes: 4 << 30, environment: Value::Null };
    let mut lines = Vec::new();
    tune::run(settings, &cpu, &options, &mut |line| lines.push(line.clone())).map(|_| lines)
}

fn record(out: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(out.join("training.json")).unwrap()).unwrap()
}

/// All tensors of an adapter or a model, by name.
fn tensors(out: &Path, file: &str) -> Vec<(String, Vec<u8>)> {
    let bytes = fs::read(out.join(file)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut all: Vec<_> = file.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())).collect();
    all.sort();
    all
}

fn kvsieve() -> Command {
    Command::new(assert_cmd::cargo::cargo_bin!("kvsieve"))
}

const ADAPTER: &str = "adapter_model.safetensors";

#[test]
fn every_method_goes_on_with_the_same_bits_and_learns() {
    let folder = tempfile::tempdir().unwrap();
    let lora = settings(text(folder.path()));
    let full = Settings { method: Method::Full, adapters: None, learning_rate: 1e-3, ..lora.clone() };
    let cases = [
        ("lora", Settings { optimizer: Kind::Adamw8bit, weights: DType::Bf16, ..lora.clone() }, ADAPTER),
        ("full", Settings { optimizer: Kind::Adafactor, weights: DType::Bf16, ..full }, "model.safetensors"),
    ];
    for (name, settings, file) in cases {
        let (whole, parts) = (folder.path().join(name), folder.path().join(format!("{name}-parts")));
        train(&settings, &whole, false, None).unwrap();
        train(&settings, &parts, false, Some(2)).unwrap();
        train(&settings, &parts, true, None).unwrap();
        assert!(tensors(&whole, file) == tensors(&parts, file), "{name}: resumed numbers differ");
        let (record, resumed) = (record(&whole), record(&parts));
        let loss = |record: &Value, when: &str| record[format!("held_out_loss_{when}")].as_f64().unwrap();
        assert!(loss(&record, "after") < 0.95 * loss(&record, "before"), "{name}: {record}");
        assert_eq!(
            ["before", "after"].map(|when| loss(&record, when)),
            ["before", "after"].map(|when| loss(&resumed, when))
        );
        assert_eq!(record["predicted_bytes"], record["peak_bytes"], "{name}");
    }
    let (out, other) = (folder.path().join("lora"), Settings { seed: 6, ..lora.clone() });
    let error = train(&other, &out, true, None).unwrap_err().to_string();
    assert!(error.contains("it is of another recipe"), "{error}");
    assert!(matches!(train(&lora, &out, false, None), Err(TrainError::Taken(_))));
    assert!(matches!(train(&lora, &folder.path().join("new"), true, None), Err(TrainError::Nothing(_))));
}

/// What a folder holds is rounded, and small steps may vanish in it.
#[test]
fn the_loss_of_the_folder_is_that_of_its_rounded_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let base = settings(text(folder.path()));
    for (name, weights, qat) in
        [("f32", DType::F32, None), ("bf16", DType::Bf16, None), ("qat", DType::F32, Some("q8_0"))]
    {
        let full = Settings { method: Method::Full, adapters: None, learning_rate: 1e-4, weights, ..base.clone() };
        let full = Settings { qat: qat.map(String::from), ..full };
        let out = folder.path().join(name);
        train(&full, &out, false, None).unwrap();
        let again = Settings { model: out.clone(), steps: 1, ..full };
        let lines = train(&again, &folder.path().join(format!("{name}-again")), false, None).unwrap();
        let Line::HeldOut { step: 0, loss, .. } = lines[0] else { panic!("{:?}", lines[0]) };
        let record = record(&out);
        assert_eq!(record["held_out_loss_of_folder"].as_f64(), Some(loss), "{name}: {record}");
        assert_ne!(record["held_out_loss_after"], record["held_out_loss_of_folder"], "{name}");
    }
    // Adapters are written as they are.
    train(&base, &folder.path().join("lora"), false, None).unwrap();
    assert!(record(&folder.path().join("lora"))["held_out_loss_of_folder"].is_null());
}

#[test]
fn batches_that_are_added_up_are_one_larger_batch() {
    let folder = tempfile::tempdir().unwrap();
    let whole = Settings { steps: 3, batch: 4, ..settings(text(folder.path())) };
    let parts = Settings { batch: 2, accumulate: 2, ..whole.clone() };
    let losses = |settings: &Settings, name: &str| -> Vec<f64> {
        let lines = train(settings, &folder.path().join(name), false, None).unwrap();
        let loss = |line: &Line| match line {
            Line::Step { loss, .. } | Line::HeldOut { loss, .. } => Some(*loss),
            _ => None,
        };
        lines.iter().filter_map(loss).collect()
    };
    let (whole, parts) = (losses(&whole, "whole"), losses(&parts, "parts"));
    assert_eq!(whole.len(), 3);
    assert!(whole.iter().zip(&parts).all(|(a, b)| (a - b).abs() < 1e-5 * a), "{whole:?} {parts:?}");
}

#[test]
fn an_adapters_folder_is_a_model_of_every_command_and_of_its_base_alone() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let out = at("adapter");
    train(&settings(text(folder.path())), &out, false, None).unwrap();
    let tokens: Vec<u32> = (0..40).map(|at| 300 + at * 7 % 500).collect();
    fs::write(at("tokens.json"), json!({"tokens": [tokens]}).to_string()).unwrap();
    let logits = |model: &Path, to: &str| {
        let mut command = kvsieve();
        command.args(["logits", "--dtype", "f32", "--tokens"]).arg(at("tokens.json"));
        command.arg("--model").arg(model).arg("--output").arg(at(to));
        command
    };
    logits(&out, "tuned.safetensors").assert().success();
    logits(Path::new("builtin"), "base.safetensors").assert().success();
    assert!(tensors(folder.path(), "tuned.safetensors") != tensors(folder.path(), "base.safetensors"));
    let prompt = " The code of amber falcon is";
    kvsieve().args(["generate", "--prompt", prompt, "--max-new-tokens", "4", "--model"]).arg(&out).assert().success();

    // Another rank than its configuration says, a matrix that the base does not have, and a base that is another model.
    let config: Value = serde_json::from_str(&fs::read_to_string(out.join("adapter_config.json")).unwrap()).unwrap();
    let refused = |config: &Value, expected: &str| {
        fs::write(out.join("adapter_config.json"), config.to_string()).unwrap();
        let output = logits(&out, "no.safetensors").assert().code(2).stderr(contains(expected));
        assert_eq!(String::from_utf8_lossy(&output.get_output().stderr).lines().count(), 1);
    };
    let with = |key: &str, value: Value| {
        let mut config = config.clone();
        config[key] = value;
        config
    };
    refused(&with("r", json!(5)), "of rank 4; adapter_config.json says 5");
    refused(&with("use_dora", json!(true)), "use_dora is true; only false is read");
    refused(
        &with("alora_invocation_tokens", json!([5])),
        "alora_invocation_tokens is [5]; adapters with it are not read",
    );
    refused(&with("init_lora_weights", json!("pissa")), "init_lora_weights is \"pissa\", which changes the base");
    refused(&with("use_rslora", json!(1)), "use_rslora is 1; it must be true or false");
    refused(&with("base_model_name_or_path", json!("nowhere")), "its base 'nowhere' is not there");
    let other = Path::new("tests/checkpoints/llama").canonicalize().unwrap();
    refused(&with("base_model_name_or_path", json!(other)), "it was trained on another model");
}

/// `tests/conformance/peft_fixtures.py` made it: an adapter that kvsieve trained, and the logits of `peft` with it.
#[test]
fn an_adapter_has_the_logits_that_peft_computes() {
    let folder = tempfile::tempdir().unwrap();
    let (fixture, out) = (Path::new("tests/fixtures/adapter"), folder.path().join("logits.safetensors"));
    let expected = fs::read(fixture.join("expected.safetensors")).unwrap();
    let expected = SafeTensors::deserialize(&expected).unwrap();
    let tokens = expected.tensor("tokens").unwrap();
    let tokens: Vec<i64> = tokens.data().chunks(8).map(|at| i64::from_le_bytes(at.try_into().unwrap())).collect();
    fs::write(folder.path().join("tokens.json"), json!({"tokens": [tokens]}).to_string()).unwrap();
    let mut command = kvsieve();
    command.args(["logits", "--dtype", "f32", "--weights", "f32", "--model"]).arg(fixture);
    command.arg("--tokens").arg(folder.path().join("tokens.json")).arg("--output").arg(&out).assert().success();
    let found = fs::read(&out).unwrap();
    let found = SafeTensors::deserialize(&found).unwrap();
    let floats = |file: &SafeTensors<'_>| -> Vec<f32> {
        let logits = file.tensor("logits").unwrap();
        logits.data().chunks(4).map(|at| f32::from_le_bytes(at.try_into().unwrap())).collect()
    };
    let (found, expected) = (floats(&found), floats(&expected));
    assert_eq!(found.len(), expected.len());
    let off = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(off < 1e-3, "off by {off}");
}

/// A run leaves its model alone, does not go on with another text, and exports no numbers that are none; the same run makes the
/// same file.
#[test]
fn nothing_good_is_written_over() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    fs::create_dir(&model).unwrap();
    let files =
        ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"];
    for name in files {
        fs::copy(Path::new("models/builtin").join(name), model.join(name)).unwrap();
    }
    let text = text(folder.path());
    for method in ["lora", "full", "dms", "dmc", "duo", "kvzap", "larimar"] {
        let mut command = kvsieve();
        command.args(["train", "--method", method, "--steps", "3", "--model"]).arg(&model).arg("--out").arg(&model);
        let more: &[&str] = match method {
            "larimar" => &[],
            "duo" => &["--length", "512"],
            "dms" => &["--length", "64", "--window", "32"],
            _ => &["--length", "64"],
        };
        command.args(more);
        if !["duo", "larimar"].contains(&method) {
            command.arg("--text").arg(&text);
        }
        command.assert().code(2).stderr(contains("is the folder that the model comes from; name another one"));
        assert_eq!(fs::read_dir(&model).unwrap().count(), files.len(), "{method}");
        for name in files {
            assert!(fs::read(model.join(name)).unwrap() == fs::read(Path::new("models/builtin").join(name)).unwrap());
        }
    }

    // Another model's folder is as little a place for a run, unless it is the run's own.
    let recipe = Path::new("experiments/train-builtin.toml").canonicalize().unwrap();
    for begun in [
        vec!["train".as_ref(), recipe.as_os_str(), "--steps".as_ref(), "1".as_ref()],
        vec![
            "train".as_ref(),
            "--method".as_ref(),
            "full".as_ref(),
            "--model".as_ref(),
            "builtin".as_ref(),
            "--length".as_ref(),
            "64".as_ref(),
            "--text".as_ref(),
            text.as_os_str(),
        ],
    ] {
        let holds = format!("'{}' holds a model (config.json); name a new folder", model.display());
        kvsieve().args(begun).arg("--out").arg(&model).assert().code(2).stderr(contains(holds));
        assert_eq!(fs::read_dir(&model).unwrap().count(), files.len());
    }

    let lora = settings(text.clone());
    let [first, second, other] = ["first", "second", "other"].map(|name| folder.path().join(name));
    train(&lora, &first, false, None).unwrap();
    train(&lora, &second, false, None).unwrap();
    assert!(fs::read(first.join(ADAPTER)).unwrap() == fs::read(second.join(ADAPTER)).unwrap());
    train(&lora, &other, false, Some(2)).unwrap();
    fs::write(&text, fs::read_to_string(&text).unwrap().replace("bear", "wolf")).unwrap();
    let error = train(&lora, &other, true, None).unwrap_err().to_string();
    assert!(error.contains("it is of another recipe"), "{error}");

    let wild = Settings {
        method: Method::Full,
        adapters: None,
        optimizer: Kind::Adafactor,
        learning_rate: 1e38,
        steps: 1,
        ..settings(text)
    };
    let out = folder.path().join("wild");
    assert!(matches!(train(&wild, &out, false, None), Err(TrainError::Diverged { .. })));
    assert!(!out.join("model.safetensors").exists() && !out.join("training.json").exists());
}

#[test]
fn mistakes_are_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let (text, short) = (text(folder.path()), folder.path().join("short.txt"));
    fs::write(&short, " A bear saw the sea.").unwrap();
    let path = |path: &Path| path.to_str().unwrap().to_string();
    let refused = |method: &str, more: &[&str], expected: &str| {
        let mut command = kvsieve();
        command.args(["train", "--method", method, "--model", "builtin", "--length", "32", "--out"]);
        let output = command.arg(folder.path().join("out")).args(more).assert().code(2).stderr(contains(expected));
        assert_eq!(String::from_utf8_lossy(&output.get_output().stderr).lines().count(), 1, "{expected}");
    };
    let text = path(&text);
    refused("lora", &[], "--method lora learns from a text; give --text FILE");
    refused("lora", &["--text", &path(&short)], "at least 640 are needed for sequences of 32");
    refused("lora", &["--text", &text, "--rank", "0"], "the rank of adapters is 0; it must be 1 to");
    refused("lora", &["--text", &text, "--target", "q,w"], "no matrix of a block is called 'w'; there are q_proj");
    refused("lora", &["--text", &text, "--ratio", "4"], "--ratio is nothing to --method lora");
    refused("full", &["--text", &text, "--rank", "4"], "--rank is nothing to --method full");
    refused("lora", &["--text", &text, "--qat", "q4_0"], "--qat is nothing to --method lora");
    refused("full", &["--text", &text, "--qat", "q9"], "--qat: unknown format 'q9'");
    refused("dms", &["--accumulate", "2"], "--accumulate is nothing to --method dms");
    refused("full", &["--text", &text, "--accumulate", "0"], "500 steps of 0 times 1 sequences");
    refused(
        "full",
        &["--text", &text, "--accumulate", "9999999999"],
        "9999999999 batches are to be added up for a step",
    );
    refused("full", &["--text", &text, "--tensor-parallel", "2"], "cannot be used with '--tensor-parallel <N>'");
    refused("lora", &["--text", &text, "--zero", "1"], "cannot be used with '--zero <0-3>'");
    refused("qlora", &["--text", &text], "is packed; name a GGUF file that is quantised");
}
