//! Gates that tell which heads retrieve, as a user meets them: trained, stopped and resumed, at work in the policy, and mistakes.

use assert_cmd::Command;
use kvsieve::device::Cpu;
use kvsieve::policy::allocation::Near;
use kvsieve::tensor::DType;
use kvsieve::tensor::file::{self, Output};
use kvsieve::train::duo::{self, Settings};
use kvsieve::train::log::Line;
use kvsieve::train::run::{Options, TrainError};
use predicates::str::contains;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

fn settings() -> Settings {
    Settings {
        model: "builtin".into(),
        near: Near { sink: 4, recent: 32 },
        text: None,
        steps: 60,
        length: 192,
        batch: 2,
        seed: 5,
        learning_rate: 0.04,
        pressure: 0.05,
        weights: DType::F32,
    }
}

fn train(settings: &Settings, out: &Path, resume: bool, stop_after: Option<usize>) -> Result<Vec<Line>, TrainError> {
    let cpu = Cpu::new(Some(2)).unwrap();
    let options = Options { out: out.into(), resume, stop_after, limit_bytes: 4 << 30, environment: Value::Null };
    let mut lines = Vec::new();
    duo::run(settings, &cpu, &options, &mut |line| lines.push(line.clone())).map(|()| lines)
}

fn kvsieve() -> Command {
    Command::new(assert_cmd::cargo::cargo_bin!("kvsieve"))
}

fn alpha(out: &Path) -> Vec<u8> {
    let bytes = fs::read(out.join(duo::POLICY)).unwrap();
    SafeTensors::deserialize(&bytes).unwrap().tensor("duo.alpha").unwrap().data().to_vec()
}

#[test]
fn heads_with_the_lowest_gates_cost_less_than_heads_by_lot_and_a_stopped_run_goes_on_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    let lines = train(&settings(), &whole, false, None).unwrap();
    let Some(Line::HeldOutHeads { step: 60, distance, random }) = lines.last() else { panic!("{:?}", lines.last()) };
    assert!(*distance < 0.5 * random, "off by {distance}, by lot {random}");
    let Some(Line::Heads { alpha: left, heads: 8, low, .. }) = lines.iter().rev().nth(1) else { panic!("{lines:?}") };
    assert!((0.01..0.9).contains(left) && *low > 0, "{left} on average, {low} below one half");

    let short = Settings { steps: 6, ..settings() };
    let (whole_short, lines) = (folder.path().join("short"), train(&short, &parts, false, Some(2)).unwrap());
    assert!(matches!(lines[0], Line::Heads { step: 2, .. }));
    train(&short, &parts, true, None).unwrap();
    train(&short, &whole_short, false, None).unwrap();
    assert!(alpha(&whole_short) == alpha(&parts), "resumed gates differ");
    let error = train(&Settings { seed: 6, ..short.clone() }, &parts, true, None).unwrap_err().to_string();
    assert!(error.contains("of other options (seed was 5 and is 6);"), "{error}");
    assert!(matches!(train(&short, &parts, false, None), Err(TrainError::Taken(_))));

    // The gates say which heads keep the near tokens alone; without them the context does.
    let tokens: Vec<u32> = (0..400).map(|at| 300 + at * 7 % 500).collect();
    let input = folder.path().join("tokens.json");
    fs::write(&input, json!({ "tokens": [tokens] }).to_string()).unwrap();
    let logits_of = |policy: &str, file: Option<&Path>| {
        let mut command = kvsieve();
        command.args(["logits", "--model", "builtin", "--policy", policy, "--budget", "0.5"]);
        command.args(["--evict-after", "320", "--json", "-"]).arg("--tokens").arg(&input);
        command.arg("--output").arg(folder.path().join("logits.safetensors"));
        command.args(file.map(|file| ["--policy-file".as_ref(), file.as_os_str()]).into_iter().flatten());
        let said: Value = serde_json::from_slice(&command.assert().success().get_output().stdout).unwrap();
        (said["policy_file_hash"].is_string(), fs::read(folder.path().join("logits.safetensors")).unwrap())
    };
    let logits = |file| logits_of("duoattention:recent=32", file);
    let (trained, measured) = (logits(Some(&whole.join(duo::POLICY))), logits(None));
    assert!(trained.0 && !measured.0 && trained.1 != measured.1);
    // Streaming heads keep what they were trained to read, unless something else is asked for.
    let gates = format!("gates={}", whole.join(duo::POLICY).display());
    let named = |more: &str| logits_of(&format!("duoattention:{more}{gates}"), None).1;
    assert!(named("") == named("sink=4,recent=32,") && named("") != named("sink=4,recent=64,"));
    // A file that is named for its gates must have them.
    let path = folder.path().join("none.safetensors");
    file::write(&path, &[Output::f32("other", vec![1], &[0.0])]).unwrap();
    let mut command = kvsieve();
    let policy = format!("duoattention:gates={}", path.display());
    command.args([
        "logits",
        "--model",
        "builtin",
        "--policy",
        &policy,
        "--budget",
        "0.5",
        "--evict-after",
        "320",
        "--tokens",
    ]);
    command.arg(&input).arg("--output").arg(folder.path().join("no.safetensors"));
    command.assert().failure().code(2).stderr(contains("has no tensor 'duo.alpha'"));
}

#[test]
fn settings_that_mean_nothing_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("gates");
    let cases: [(&[&str], &str); 8] = [
        (&["--text", "nowhere.txt"], "cannot read the text 'nowhere.txt'"),
        (&["--length", "8"], "together less than a sequence, 8 tokens"),
        (&["--length", "100000"], "the length is 100000; it must be 64 to"),
        (&["--window", "0"], "at least 1 recent one"),
        (&["--sink", "1000"], "reads 1000 first and 256 recent tokens"),
        (&["--pressure", "0"], "both must be finite and above 0"),
        (&["--ratio", "4"], "--ratio is nothing to --method duo"),
        (&["--rank", "4"], "--rank is nothing to --method duo"),
    ];
    for (more, expected) in cases {
        let mut command = kvsieve();
        command.args(["train", "--method", "duo", "--model", "builtin"]).args(more).arg("--out").arg(&out);
        command.assert().failure().code(2).stderr(contains(expected));
    }
    let mut command = kvsieve();
    command.args(["train", "--method", "dms", "--model", "builtin", "--sink", "4"]).arg("--out").arg(&out);
    command.assert().failure().code(2).stderr(contains("--sink is nothing to --method dms"));
}
