//! Gates of evicted tokens as a user meets them: trained on a model, stopped and resumed, at work in it, and mistakes.

use assert_cmd::Command;
use kvsieve::device::Cpu;
use kvsieve::memory::Arena;
use kvsieve::model::Model;
use kvsieve::policy::DecidedBy;
use kvsieve::tensor::DType;
use kvsieve::train::dms::{self, Settings};
use kvsieve::train::log::Line;
use kvsieve::train::lora::Asked;
use kvsieve::train::run::{Options, TrainError};
use predicates::str::contains;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

fn settings() -> Settings {
    Settings {
        model: "builtin".into(),
        ratios: vec![2.0],
        window: 8,
        text: None,
        written: false,
        steps: 6,
        length: 160,
        batch: 1,
        seed: 5,
        learning_rate: 2e-3,
        pressure: 20.0,
        decided_by: Default::default(),
        accumulates: false,
        inner: None,
        adapters: None,
        weights: DType::F32,
    }
}

fn train(settings: &Settings, out: &Path, resume: bool, stop_after: Option<usize>) -> Result<Vec<Line>, TrainError> {
    let cpu = Cpu::new(Some(2)).unwrap();
    let options = Options { out: out.into(), resume, stop_after, limit_bytes: 4 << 30, environment: Value::Null };
    let mut lines = Vec::new();
    dms::run(settings, &cpu, &options, &mut |line| lines.push(line.clone())).map(|()| lines)
}

/// Behind a window a pass has fewer queries than the dense model's, which may be cut into larger tiles.
#[test]
fn a_pass_of_fewer_rows_has_the_room_that_it_takes() {
    let folder = tempfile::tempdir().unwrap();
    let cpu = Cpu::new(Some(1)).unwrap();
    let out = folder.path().join("out");
    let options = Options { out, resume: false, stop_after: Some(1), limit_bytes: 4 << 30, environment: Value::Null };
    let long = Settings { length: 640, window: 128, ..settings() };
    dms::run(&long, &cpu, &options, &mut |_| ()).unwrap();
}

/// Weights and biases of a run's gates.
fn gates(out: &Path) -> [Vec<u8>; 2] {
    gates_of("dms", out)
}

fn gates_of(method: &str, out: &Path) -> [Vec<u8>; 2] {
    let bytes = fs::read(out.join(dms::POLICY)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    ["weight", "bias"].map(|what| file.tensor(&format!("{method}.{what}")).unwrap().data().to_vec())
}

fn kvsieve() -> Command {
    Command::new(assert_cmd::cargo::cargo_bin!("kvsieve"))
}

#[test]
fn a_run_that_was_stopped_goes_on_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    let lines = train(&settings(), &whole, false, None).unwrap();
    assert!(
        lines.iter().any(|line| matches!(line, Line::HeldOutGates { step: 6, evicted, .. } if *evicted > 0.02)),
        "{lines:?}"
    );
    train(&settings(), &parts, false, Some(2)).unwrap();
    train(&settings(), &parts, true, None).unwrap();
    assert!(gates(&whole) == gates(&parts), "resumed gates differ");

    let other = Settings { seed: 6, ..settings() };
    let error = train(&other, &parts, true, None).unwrap_err().to_string();
    assert!(error.contains("of other options (seed was 5 and is 6);"), "{error}");
    assert!(matches!(train(&settings(), &parts, false, None), Err(TrainError::Taken(_))));
    assert!(matches!(train(&settings(), &folder.path().join("new"), true, None), Err(TrainError::Nothing(_))));
}

/// An inner layer is drawn once, learns, is resumed, and is what the policy reads.
#[test]
fn gates_with_an_inner_layer_are_trained_and_at_work_in_their_model() {
    let folder = tempfile::tempdir().unwrap();
    let [whole, parts] = ["whole", "parts"].map(|name| folder.path().join(name));
    let deep = Settings { inner: Some(12), steps: 12, learning_rate: 1e-2, ..settings() };
    let lines = train(&deep, &whole, false, None).unwrap();
    assert!(
        lines.iter().any(|line| matches!(line, Line::HeldOutGates { evicted, .. } if *evicted > 0.02)),
        "{lines:?}"
    );
    train(&deep, &parts, false, Some(2)).unwrap();
    train(&deep, &parts, true, None).unwrap();
    let bytes = [&whole, &parts].map(|out| fs::read(out.join(dms::POLICY)).unwrap());
    assert!(bytes[0] == bytes[1], "resumed gates differ");
    let file = SafeTensors::deserialize(&bytes[0]).unwrap();
    let names = ["dms.weight", "dms.bias", "dms.inner.weight", "dms.inner.bias"];
    let shapes = names.map(|name| file.tensor(name).unwrap().shape().to_vec());
    let config = kvsieve::model::Config::read(Path::new("models/builtin")).unwrap();
    let (layers, heads, hidden) = (config.layers, config.kv_heads, config.hidden);
    assert_eq!(shapes, [vec![layers, heads, 12], vec![layers, heads], vec![layers, 12, hidden], vec![layers, 12]]);

    let eval = |gates: &Path| {
        let mut command = kvsieve();
        command.args(["eval", "--model", "builtin", "--task", "passkey", "--context", "256", "--samples", "1"]);
        command.args(["--budget", "0.5", "--policy"]).arg(format!("dms:gates={}", gates.display()));
        command.assert()
    };
    eval(&whole.join(dms::POLICY)).success();
    let mut command = kvsieve();
    command.args(["train", "--method", "dms", "--model", "builtin", "--inner", "0", "--out"]).arg(folder.path());
    command.assert().failure().code(2).stderr(contains("an inner layer of 0 elements; give 1 to 65536"));
}

#[test]
fn a_training_that_evicts_nothing_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let slow = Settings { learning_rate: 1e-9, ..settings() };
    let error = train(&slow, &folder.path().join("slow"), false, None).unwrap_err().to_string();
    assert!(error.contains("50.0% are asked for; a larger learning rate"), "{error}");
}

#[test]
fn trained_gates_evict_in_their_model_and_in_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("gates");
    train(&settings(), &out, false, None).unwrap();
    let tokens: Vec<u32> = (0..200).map(|at| 300 + at * 7 % 500).collect();
    let input = folder.path().join("tokens.json");
    fs::write(&input, json!({ "tokens": [tokens] }).to_string()).unwrap();
    let logits = |model: &str, policy: &str| {
        let mut command = kvsieve();
        command.args(["logits", "--model", model, "--budget", "0.25", "--evict-after", "160", "--json", "-"]);
        command.args(["--policy", policy]).arg("--tokens").arg(&input);
        command.arg("--output").arg(folder.path().join("logits.safetensors"));
        command.assert()
    };
    let gates = format!("dms:gates={}", out.join(dms::POLICY).display());
    let said = logits("builtin", &gates).success().get_output().stdout.clone();
    let said: Value = serde_json::from_slice(&said).unwrap();
    // 40 of 160 tokens of each head stay on average, and of the 40 behind them those that left the window lose some.
    let lists = 8;
    let evicted = said["evicted_tokens"].as_u64().unwrap();
    assert!(evicted > 120 * lists && evicted < (120 + 40) * lists, "{said}");
    assert!(said["policy_file_hash"].is_string(), "{said}");

    // Of the same extents, but other weights.
    let copy = folder.path().join("copy");
    fs::create_dir(&copy).unwrap();
    for entry in fs::read_dir("models/builtin").unwrap().flatten() {
        fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
    }
    let config = fs::read_to_string(copy.join("config.json")).unwrap();
    fs::write(copy.join("config.json"), format!("{config}\n")).unwrap();
    logits(copy.to_str().unwrap(), &gates).failure().code(2).stderr(contains("was trained on the model"));
    logits("builtin", "dms:gates=nowhere.safetensors").failure().code(2).stderr(contains("nowhere.safetensors"));
    logits("builtin", "dms").failure().code(2).stderr(contains("dms.weight"));
}

/// Tokens are accumulated into those behind them, behind prefill, in chunks of it and while decoding.
#[test]
fn gates_that_accumulate_are_trained_and_at_work_in_their_model() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    let slots = Settings { window: 1, decided_by: DecidedBy::Next, accumulates: true, ..settings() };
    let lines = train(&slots, &whole, false, None).unwrap();
    assert!(lines.iter().any(|line| matches!(line, Line::HeldOutGates { kl, .. } if *kl > 0.0)), "{lines:?}");
    train(&slots, &parts, false, Some(2)).unwrap();
    train(&slots, &parts, true, None).unwrap();
    assert!(gates_of("dmc", &whole) == gates_of("dmc", &parts), "resumed gates differ");

    let wide = Settings { window: 8, ..slots.clone() };
    let error = train(&wide, &folder.path().join("wide"), false, None).unwrap_err().to_string();
    assert!(error.contains("the window is 8 and next decides"), "{error}");

    let gates = whole.join(dms::POLICY);
    let eval = |policy: String| {
        let mut command = kvsieve();
        command.args(["eval", "--model", "builtin", "--task", "passkey", "--context", "256", "--samples", "1"]);
        command.args(["--budget", "0.5", "--policy"]).arg(policy);
        command.assert()
    };
    for part in ["", "+chunks:tokens=64", "+once"] {
        eval(format!("dmc:gates={}{part}", gates.display())).success();
    }
    // Gates that drop are other gates.
    eval(format!("dms:gates={}", gates.display())).failure().code(2).stderr(contains("dms.weight"));
    eval("dmc:window=4".into()).failure().code(2).stderr(contains("window"));
    for option in [["--window", "8"], ["--decided-by", "next"], ["--sink", "4"], ["--inner", "4"]] {
        let mut command = kvsieve();
        command.args(["train", "--method", "dmc", "--model", "builtin"]).args(option).arg("--out").arg(&whole);
        command.assert().failure().code(2).stderr(contains(format!("{} is nothing to --method dmc", option[0])));
    }
}

/// Adapters are trained from the dense model's own divergence, and the gates are those of the model with them.
#[test]
fn adapters_beside_gates_make_a_model_whose_gates_these_are() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    let asked = Asked { rank: 2, alpha: 4.0, targets: vec!["q".into(), "v".into()] };
    let with = Settings { adapters: Some(asked), ..settings() };
    train(&with, &whole, false, None).unwrap();
    train(&with, &parts, false, Some(2)).unwrap();
    train(&with, &parts, true, None).unwrap();
    assert!(gates(&whole) == gates(&parts), "resumed gates differ");
    let adapter = |out: &Path| fs::read(out.join("adapter_model.safetensors")).unwrap();
    let (own, resumed) = (adapter(&whole), adapter(&parts));
    let numbers = |bytes: &[u8]| -> BTreeMap<String, Vec<u8>> {
        let file = SafeTensors::deserialize(bytes).unwrap();
        file.tensors().into_iter().map(|(name, tensor)| (name, tensor.data().to_vec())).collect()
    };
    assert!(numbers(&own) == numbers(&resumed), "resumed adapters differ");
    let changed = |(name, data): (String, Vec<u8>)| name.contains("lora_B") && data.iter().any(|&byte| byte != 0);
    assert!(numbers(&own).into_iter().any(changed));

    let eval = |model: &Path| {
        let mut command = kvsieve();
        command.args(["eval", "--task", "passkey", "--context", "256", "--samples", "1", "--budget", "0.5", "--model"]);
        command.arg(model).arg("--policy").arg(format!("dms:gates={}", whole.join(dms::POLICY).display()));
        command.assert()
    };
    eval(&whole).success();
    // Where the base lies is no part of what the gates were trained in, and an adapter is no base.
    let file = whole.join("adapter_config.json");
    let config = fs::read_to_string(&file).unwrap();
    let elsewhere = fs::canonicalize("models/builtin").unwrap();
    fs::write(&file, config.replace("\"builtin\"", &json!(elsewhere).to_string())).unwrap();
    eval(&whole).success();
    // A base that is named from the working folder is found from there too.
    let near = folder.path().join("near");
    train(&Settings { model: "./models/builtin".into(), ..with.clone() }, &near, false, Some(1)).unwrap();
    Model::open(&near, &Arena::unlimited()).unwrap();
    let upon = Settings { model: whole.clone(), ..with };
    let error = train(&upon, &folder.path().join("upon"), false, None).unwrap_err().to_string();
    assert!(error.contains("is an adapter, and adapters stand beside a model; name its base"), "{error}");
    eval(Path::new("builtin")).failure().code(2).stderr(contains("was trained on the model"));
    // As other weights of its base it is compared with that, whose gates serve both.
    let other = |gates: &Path| {
        let mut command = kvsieve();
        command.args([
            "eval",
            "--task",
            "passkey",
            "--context",
            "256",
            "--samples",
            "1",
            "--budget",
            "0.5",
            "--json",
            "-",
        ]);
        command
            .args(["--model", "builtin", "--weights"])
            .arg(&whole)
            .args(["--out"])
            .arg(folder.path().join("results"));
        command.arg("--policy").arg(format!("full,dms:gates={}", gates.display()));
        let assert = command.assert().success();
        let lines = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
        let full = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let full = full.into_iter().find(|record| record["cell"]["policy"] == "full").unwrap();
        full["answers"]["kl_nats"]["mean"].as_f64().unwrap()
    };
    assert!(other(&whole.join(dms::POLICY)) > 0.0, "the full cache of the adapted model is not its base's");
    assert!(other(Path::new("models/dms/builtin-4x.safetensors")) > 0.0);
}

#[test]
fn settings_that_mean_nothing_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("gates");
    let empty = folder.path().join("empty.txt");
    fs::write(&empty, "too short").unwrap();
    let cases: [(&[&str], &str); 12] = [
        (&["--ratio", "1"], "the ratio is 1; it must be finite and above 1"),
        (&["--ratio", "4,2"], "the ratio is 2; it must be finite and above 4"),
        (&["--weights", "int8"], "'int8' is neither f32 nor bf16"),
        (&["--window", "63", "--length", "64"], "the window is 63; it must be 1 to 62, so that sequences of 64 tokens"),
        (&["--length", "100000"], "the length is 100000; it must be 16 to"),
        (&["--steps", "0"], "0 steps of 1 sequences; both must be at least 1"),
        (&["--text", empty.to_str().unwrap()], "at least 20480 are needed"),
        (&["--text", "nowhere.txt"], "cannot read the text 'nowhere.txt'"),
        (&["--pressure", "0"], "both must be finite and above 0"),
        (&["--rank", "4", "--ratio", "2,4"], "2 ratios are asked for; adapters go with the gates of one"),
        (&["--target", "nothing"], "no matrix of a block is called 'nothing'"),
        (&["--accumulate", "2"], "--accumulate is nothing to --method dms"),
    ];
    for (more, expected) in cases {
        let mut command = kvsieve();
        command.args(["train", "--method", "dms", "--model", "builtin"]).args(more).arg("--out").arg(&out);
        command.assert().failure().code(2).stderr(contains(expected));
    }
}

#[test]
fn a_model_writes_its_own_text_and_writes_it_again_when_a_run_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    let written = Settings { written: true, length: 48, batch: 3, steps: 4, ..settings() };
    let lines = train(&written, &whole, false, None).unwrap();
    assert!(lines.iter().any(|line| matches!(line, Line::HeldOutGates { kl, .. } if *kl > 0.0)), "{lines:?}");
    // The third step begins within a block of sequences that the run before had begun.
    train(&written, &parts, false, Some(2)).unwrap();
    train(&written, &parts, true, None).unwrap();
    assert!(gates(&whole) == gates(&parts), "resumed gates differ");
    let record: Value = serde_json::from_slice(&fs::read(whole.join("training.json")).unwrap()).unwrap();
    assert_eq!((&record["settings"]["written"], &record["settings"]["text"]), (&json!(true), &Value::Null));
    // What writing takes is known beforehand: where memory gets too small activations are computed again, and no run fails.
    assert_eq!(record["recompute"], "none");
    let mut limit_bytes: u64 = record["peak_bytes"].as_object().unwrap().values().filter_map(Value::as_u64).sum();
    let found = (0..60).find_map(|index| {
        let out = folder.path().join(format!("tight-{index}"));
        limit_bytes -= limit_bytes / 50;
        let options =
            Options { out: out.clone(), resume: false, stop_after: Some(1), limit_bytes, environment: Value::Null };
        dms::run(&written, &Cpu::new(Some(2)).unwrap(), &options, &mut |_| ()).unwrap();
        let record: Value = serde_json::from_slice(&fs::read(out.join("training.json")).unwrap()).unwrap();
        (record["recompute"] != "none").then_some(record["recompute"].clone())
    });
    assert_eq!(found, Some(json!("selective")));
    // The same run makes the same file, and a finished one is left as it is.
    assert!(fs::read(whole.join(dms::POLICY)).unwrap() == fs::read(parts.join(dms::POLICY)).unwrap());
    train(&written, &whole, true, None).unwrap();
    let again: Value = serde_json::from_slice(&fs::read(whole.join("training.json")).unwrap()).unwrap();
    assert_eq!(record, again);
    let mut command = kvsieve();
    command.args(["train", "--method", "kvzap", "--model", "builtin", "--text", "model", "--out"]).arg(&whole);
    command
        .assert()
        .failure()
        .code(2)
        .stderr(contains("--text model is for --method dms and dmc; kvzap learns from a file"));
}

/// A folder of NVIDIA's Model-Optimizer is a model, and its gates are a policy (`engine/src/train/tests/eviction.rs` compares them with theirs).
#[test]
fn a_public_checkpoint_is_a_model_and_its_gates_evict_from_it() {
    const FOLDER: &str = "tests/checkpoints/qwen3-dms";
    let folder = tempfile::tempdir().unwrap();
    let (tokens, out) = (folder.path().join("tokens.json"), folder.path().join("logits.safetensors"));
    let ids: Vec<usize> = (0..60).map(|at| 3 + at * 7 % 100).collect();
    fs::write(&tokens, json!({ "tokens": [ids] }).to_string()).unwrap();
    let logits = |model: &Path, more: &[&str]| {
        let mut command = kvsieve();
        command.args(["logits", "--model"]).arg(model).arg("--tokens").arg(&tokens).arg("--output").arg(&out);
        command.args(more).assert()
    };
    let read = || fs::read(&out).unwrap();
    let policy = format!("dms:gates={FOLDER}");
    let evicting = ["--policy", &policy, "--budget", "0.4", "--evict-after", "30", "--chunk", "7"];
    logits(Path::new(FOLDER), &[]).success();
    let dense = read();
    logits(Path::new(FOLDER), &evicting).success();
    assert_ne!(dense, read());

    // What cannot be read as gates, or is another model.
    let copy = folder.path().join("copy");
    fs::create_dir(&copy).unwrap();
    for entry in fs::read_dir(FOLDER).unwrap().flatten() {
        fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
    }
    let config = fs::read_to_string(copy.join("config.json")).unwrap();
    let of_copy = format!("dms:gates={}", copy.display());
    for (from, to, expected) in [
        ("\"dms_separate_alpha\": true", "\"dms_separate_alpha\": false", "a channel of the queries"),
        (
            "\"dms_alpha_per\": \"head\"",
            "\"dms_alpha_per\": \"token\"",
            "dms_alpha_per is 'token'; it must be head or layer",
        ),
        ("\"dms_window_size\": 6", "\"dms_window_size\": \"six\"", "dms_window_size is \"six\"; a count is needed"),
        (
            "\"num_hidden_layers\": 3",
            "\"num_hidden_layers\": 4",
            "no tensor 'model.layers.3.self_attn.dms_proj_alpha.weight'",
        ),
        ("\"hidden_size\": 32", "\"hidden_size\": 64", "is [2, 32]; [2, 64] is needed"),
        ("{", "[", "config.json is not JSON"),
        ("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 900000", "no tensor 'model.layers.3."),
    ] {
        fs::write(copy.join("config.json"), config.replacen(from, to, 1)).unwrap();
        logits(Path::new(FOLDER), &["--policy", &of_copy, "--budget", "0.4", "--evict-after", "30"])
            .failure()
            .code(2)
            .stderr(contains(expected));
    }
    fs::write(
        copy.join("config.json"),
        config.replace("\"dms_separate_alpha\": true", "\"dms_separate_alpha\": false"),
    )
    .unwrap();
    logits(&copy, &[]).failure().code(2).stderr(contains("dms_separate_alpha is false"));
    fs::remove_file(copy.join("model.safetensors")).unwrap();
    fs::write(copy.join("config.json"), &config).unwrap();
    let gone = ["--policy", &*of_copy, "--budget", "0.4", "--evict-after", "30"];
    logits(Path::new(FOLDER), &gone).failure().code(2).stderr(contains("there is no tensor"));
    logits(Path::new("builtin"), &evicting).failure().code(2).stderr(contains("'dms.weight'"));
}
