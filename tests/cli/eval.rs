//! `kvsieve eval` and `kvsieve capture` as a user meets them.

use crate::byte_model;
use assert_cmd::Command;
use kvsieve::memory::{Arena, Label};
use kvsieve::tensor::file::TensorFile;
use std::path::Path;

fn run(folder: &Path, arguments: &[&str]) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvsieve"));
    command.current_dir(folder).args(arguments).args(["--threads", "2"]).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn a_leaderboard_and_figures_come_of_one_command() {
    let folder = tempfile::tempdir().unwrap();
    byte_model::write(&folder.path().join("models/builtin"), 2048);
    let least = ["eval", "--context", "800", "--samples", "2", "--task", "passkey:digits=3,recall:queries=2"];
    let output = run(folder.path(), &[&least[..], &["--policy", "full,knorm,snapkv:window=16,kernel=5"]].concat());
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{err}");
    for wanted in [
        "### eval: leaderboard",
        "### eval: passkey:digits=3, 800 context",
        "| snapkv:window=16,kernel=5 |",
        "26 cells: 26 ok",
        "not ranked, the model cannot do it: passkey:digits=3 at 800 (full cache 0.0)",
    ] {
        assert!(out.contains(wanted), "{wanted}: {out}");
    }
    let report = out.lines().find_map(|line| line.strip_prefix("report: ")).unwrap();
    let plots = folder.path().join(report).parent().unwrap().join("plots");
    // A model that answers nothing right ranks nobody; how far a policy takes it from itself is seen all the same.
    assert!(plots.join("kl-vs-budget.svg").exists() && !plots.join("accuracy-vs-budget.svg").exists());
    let again = run(
        folder.path(),
        &[&least[..], &["--policy", "full,knorm,snapkv:window=16,kernel=5", "--resume", "--json", "-"]].concat(),
    );
    assert!(again.status.success() && again.stdout.is_empty(), "resumed cells ran again: {}", text(&again.stdout));
    let drawn = run_report(folder.path(), Path::new(report).parent().unwrap());
    assert!(drawn.contains("figures"), "{drawn}");
}

#[test]
fn a_budget_of_nothing_but_protected_tokens_warns() {
    let folder = tempfile::tempdir().unwrap();
    byte_model::write(&folder.path().join("models/builtin"), 2048);
    let options = ["--context", "600", "--samples", "1", "--task", "passkey:digits=3", "--budget", "32,128"];
    let output = run(folder.path(), &[&["eval", "--policy", "snapkv:window=64"][..], &options].concat());
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{err}");
    assert!(out.contains(" 32 ! |") && !out.contains("128 ! |"), "{out}");
    assert!(out.contains("! 1 cell: nothing but protected tokens stays: the budget is 32 tokens a head"), "{out}");
}

#[test]
fn the_model_that_comes_along_answers_with_its_whole_cache_and_not_with_a_sixteenth() {
    let folder = tempfile::tempdir().unwrap();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/models/builtin");
    let tasks = ["--task", "recall,niah-single-1,niah-multikey-1,passkey", "--context", "1k,2k", "--samples", "8"];
    let policies = ["--policy", "full,streaming-llm", "--budget", "0.0625", "--json", "-"];
    let output = run(folder.path(), &[&["eval", "--model", model][..], &tasks, &policies].concat());
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{err}");
    let (mut whole, mut evicted) = (Vec::new(), Vec::new());
    for line in out.lines() {
        let record: serde_json::Value = serde_json::from_str(line).unwrap();
        let score = record["answers"]["accuracy"]["mean"].as_f64().unwrap();
        if record["cell"]["policy"] == "full" { &mut whole } else { &mut evicted }.push(score);
    }
    let mean = |scores: &[f64]| scores.iter().sum::<f64>() / scores.len() as f64;
    assert_eq!((whole.len(), evicted.len()), (8, 16));
    assert!(mean(&whole) >= 0.95, "with the full cache: {whole:?}");
    assert!(mean(&evicted) <= 0.3, "with a sixteenth of it: {evicted:?}");
}

#[test]
fn a_table_says_why_a_cell_has_no_number() {
    let folder = tempfile::tempdir().unwrap();
    byte_model::write(&folder.path().join("m"), 2048);
    let least = ["eval", "--model", "m", "--context", "800", "--samples", "2", "--task", "passkey"];
    let output = run(folder.path(), &[&least[..], &["--policy", "full,knorm,snapkv", "--budget", "0.5,790"]].concat());
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{err}");
    for wanted in
        ["7 cells: 4 ok, 0 oom, 3 skipped", "3 skipped · the budget holds a whole context of", "first: time to"]
    {
        assert!(out.contains(wanted), "{wanted}: {out}");
    }
    assert!(!out.contains("perplexity"), "{out}");
}

fn run_report(folder: &Path, of: &Path) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvsieve"));
    text(&command.current_dir(folder).arg("report").arg(of).output().unwrap().stdout)
}

#[test]
fn records_from_before_protocols_had_names_are_drawn_again() {
    let folder = tempfile::tempdir().unwrap();
    let reference = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/query-aware");
    for file in ["cells.jsonl", "env.json"] {
        std::fs::copy(format!("{reference}/{file}"), folder.path().join(file)).unwrap();
    }
    let drawn = run_report(folder.path(), folder.path());
    assert!(drawn.contains("figures"), "{drawn}");
    let summary = std::fs::read_to_string(folder.path().join("summary.md")).unwrap();
    for heading in ["### eval: leaderboard\n", "### eval: leaderboard, protocol aware-whole\n"] {
        assert!(summary.contains(heading), "{summary}");
    }
}

#[test]
fn a_text_has_a_perplexity() {
    let folder = tempfile::tempdir().unwrap();
    byte_model::write(&folder.path().join("m"), 2048);
    std::fs::write(folder.path().join("t.txt"), "One after another they came down to the river. ".repeat(30)).unwrap();
    let output = run(
        folder.path(),
        &[
            "eval",
            "--model",
            "m",
            "--text",
            "t.txt",
            "--evict-after",
            "300",
            "--new-tokens",
            "40",
            "--policy",
            "full,keydiff",
            "--budget",
            "0.5",
            "--json",
            "-",
        ],
    );
    assert!(output.status.success(), "{}", text(&output.stderr));
    let records: Vec<serde_json::Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // Random eviction is added.
    assert_eq!(records.len(), 3);
    for record in &records {
        assert_eq!((&record["cell"]["task"], &record["status"]), (&"perplexity".into(), &"ok".into()));
        assert!(record["answers"]["nll_nats"]["mean"].as_f64().unwrap() > 0.0);
        assert!(record["repro"].as_str().unwrap().starts_with("kvsieve eval --model m"));
    }
}

/// Of this repository's licence, beside `transformers` (`conformance/perplexity_fixtures.py`).
#[test]
fn perplexities_in_windows_are_those_of_transformers() {
    #[derive(serde::Deserialize)]
    struct Expected {
        model: String,
        protocol: String,
        windows: u64,
        perplexity: f64,
        standard_error: Option<f64>,
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let expected = std::fs::read_to_string(root.join("tests/fixtures/perplexity.json")).unwrap();
    for expected in serde_json::from_str::<Vec<Expected>>(&expected).unwrap() {
        let Expected { model, protocol, .. } = &expected;
        if !root.join(model).exists() {
            println!("skipped: {model} is not there; scripts/fetch-smollm2 fetches it");
            continue;
        }
        let of = ["eval", "--model", model, "--protocol", protocol, "--text", "LICENSE", "--dtype", "f32"];
        let output = run(root, &[&of[..], &["--json", "-"]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let got: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let near = |name: &str, wanted: f64| {
            let got = got[name].as_f64().unwrap();
            assert!((got / wanted - 1.0).abs() < 1e-3, "{model}, {protocol}: {name} {got}, expected {wanted}");
        };
        near("perplexity", expected.perplexity);
        assert_eq!(got["windows"], expected.windows);
        match expected.standard_error {
            Some(error) => near("standard_error", error),
            None => assert!(got["standard_error"].is_null()),
        }
    }
    let words = run(root, &["eval", "--protocol", "llama-perplexity", "--text", "LICENSE", "--samples", "2"]);
    let plain = text(&words.stdout);
    assert!(plain.contains("(llama-perplexity, 2 windows of 512 tokens, 510 predicted; "));
    let rounded = [
        "--protocol",
        "llama-perplexity",
        "--text",
        "LICENSE",
        "--samples",
        "2",
        "--activations",
        "f32,int8",
        "--weights",
        "file,./models/builtin",
    ];
    let rounded = text(&run(root, &[&["eval"], &rounded[..]].concat()).stdout);
    let lines: Vec<_> = rounded.lines().collect();
    // In f32 they are as they are; in bytes all but the perplexity and the words for them stays.
    assert!(
        lines.len() == 4 && lines[0] == plain.trim_end() && lines[1].contains(", activations in int8, cache in "),
        "{rounded}"
    );
    // A file of weights is named, and of the same weights all else is the same.
    assert_eq!(lines[3].replace("weights of ./models/builtin in", "weights in"), lines[1]);
    assert_ne!(lines[3], lines[1]);
    assert_ne!(lines[0].split(" (").next(), lines[1].split(" (").next(), "{rounded}");
    let folder = tempfile::tempdir().unwrap();
    byte_model::write(&folder.path().join("m"), 2048);
    std::fs::write(folder.path().join("t"), "short").unwrap();
    let short = run(folder.path(), &["eval", "--model", "m", "--protocol", "wikitext", "--text", "t"]);
    assert!(text(&short.stderr).contains("'t': 6 tokens; a window of wikitext has 2048"), "{}", text(&short.stderr));
}

#[test]
fn a_program_far_from_its_model_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join(if cfg!(windows) { "kvsieve.exe" } else { "kvsieve" });
    std::fs::copy(env!("CARGO_BIN_EXE_kvsieve"), &program).unwrap();
    let output = Command::new(&program).current_dir(folder.path()).arg("eval").output().unwrap();
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("the built-in model is neither") && error.trim_end().lines().count() == 1, "{error}");
}

#[test]
fn a_dry_run_tells_the_time_of_every_cell_and_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    byte_model::write(&folder.path().join("m"), 2048);
    std::fs::write(folder.path().join("t.txt"), "one two three ".repeat(400)).unwrap();
    let of_tasks = ["eval", "--model", "m", "--context", "800,1600", "--dry-run", "--protocol", "agnostic,aware"];
    let of_text = ["eval", "--model", "m", "--text", "t.txt", "--evict-after", "1k", "--dry-run"];
    // 2 lengths, 2 protocols and 2 tasks of 2 policies, random and the full cache at the default budget; and those of a text.
    for (arguments, cells) in [(&of_tasks[..], 32), (&of_text, 4)] {
        let output = run(folder.path(), arguments);
        let table = text(&output.stdout);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let times = table.lines().filter(|line| line.ends_with(" ms") || line.ends_with(" s") || line.ends_with(" µs"));
        assert_eq!(times.count(), cells, "{table}");
        assert!(table.lines().last().unwrap().contains(&format!("{cells} cells, 0 of them over the limit")), "{table}");
        assert!(table.lines().last().unwrap().contains("; about "), "{table}");
    }
    assert!(!folder.path().join("results").exists());
}

/// Spaces around names are none of theirs.
#[test]
fn names_of_a_list_may_have_spaces_around_them() {
    let folder = tempfile::tempdir().unwrap();
    byte_model::write(&folder.path().join("m"), 2048);
    let table = |tasks, policies| {
        let arguments = ["eval", "--model", "m", "--context", "800", "--samples", "2", "--dry-run"];
        let output = run(
            folder.path(),
            &[&arguments[..], &["--task", tasks, "--policy", policies, "--budget", "0.5, 0.25"]].concat(),
        );
        assert!(output.status.success(), "{}", text(&output.stderr));
        let lines =
            text(&output.stdout).lines().map(|line| line.split("  ").next().unwrap().to_string()).collect::<Vec<_>>();
        lines[..lines.len() - 1].to_vec()
    };
    let spaced = table("recall, niah-single-1", " full, snapkv:window=16, kernel=5 ,random");
    assert_eq!(spaced, table("recall,niah-single-1", "full,snapkv:window=16,kernel=5,random"));
}

#[test]
fn mistakes_are_one_line() {
    let folder = tempfile::tempdir().unwrap();
    byte_model::write(&folder.path().join("m"), 2048);
    for (arguments, expected) in [
        (&["eval", "--model", "nowhere"][..], "nowhere"),
        (&["eval", "--model", "m", "--task", "chess"], "unknown task 'chess'"),
        (&["eval", "--model", "m", "--policy", "h3o"], "unknown policy 'h3o'"),
        (&["eval", "--policy", "full", "--budget", "0.25"], "--budget is 0.25; nothing is evicted by full"),
        (&["eval", "--model", "m", "--budget", "1.5"], "--budget: '1.5' is not a budget"),
        (&["eval", "--model", "m", "--context", "none"], "--context: 'none' is not a token count"),
        (
            &["eval", "--model", "m", "--context", "4k"],
            "error: a sequence of 4096 tokens; 'm' was made for at most 2048, give --",
        ),
        (&["eval", "--model", "m", "--context", "-4"], "--context: '-4' is not a token count"),
        (&["eval", "--model", "m", "--samples", "0"], "error: --samples is 0; it must be at least 1"),
        (
            &["eval", "--model", "m", "--samples", "99999999999", "--dry-run"],
            "error: --samples is 99999999999; it must be at most 1000000",
        ),
        (&["eval", "--model", "m", "--samples", "-3"], "a whole number without a sign is needed"),
        (
            &["eval", "--model", "m", "--protocol", "blind"],
            "'blind' is no protocol; there are agnostic, aware, aware-kept",
        ),
        (&["eval", "--model", "m", "--device", "cuda"], "--device cuda: models run on the CPU only"),
        (&["eval", "--model", "m", "--device", "tpu"], "unknown device 'tpu'"),
        (
            &["capture", "--model", "m", "--text", "t", "--output", "o.safetensors", "--device", "cuda:1"],
            "--device cuda:1: models run on the CPU only",
        ),
        (&["eval", "--model", "m", "--text", "t", "--task", "copy"], "cannot be used with"),
        (
            &["eval", "--model", "m", "--samples", "3", "--alone-samples", "4"],
            "--alone-samples is 4; it must be at most the samples, 3",
        ),
        (&["eval", "--model", "m", "--protocol", "wikitext"], "the perplexity of a text; give --text FILE"),
        (&["eval", "--model", "m", "--protocol", "wikitext,aware", "--text", "t"], "give one kind"),
        (&["eval", "--model", "m", "--protocol", "wikitext", "--text", "t", "--budget", "9"], "leave --budget out"),
        (&["eval", "--model", "m", "--protocol", "wikitext", "--text", "t", "--dry-run"], "leave --dry-run out"),
        (&["eval", "--model", "m", "--protocol", "wikitext", "--text", "no.txt"], "cannot read --text 'no.txt'"),
        (
            &["eval", "--model", "m", "--protocol", "aware", "--text", "t"],
            "--protocol is aware, which is about questions",
        ),
        (&["capture", "--model", "m", "--text", "no.txt", "--output", "o.safetensors"], "cannot read --text 'no.txt'"),
    ] {
        let output = run(folder.path(), arguments);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains(expected) && error.trim_end().lines().count() == 1, "{arguments:?}: {error}");
    }
    std::fs::write(folder.path().join("t.txt"), "short").unwrap();
    let capture = ["capture", "--model", "m", "--text", "t.txt", "--output", "o.safetensors", "--layers", "0,7"];
    assert!(text(&run(folder.path(), &capture).stderr).contains("the model has layers 0 to 1"));
}

#[test]
fn attention_over_captured_tensors_is_the_models_own() {
    let folder = tempfile::tempdir().unwrap();
    byte_model::write(&folder.path().join("m"), 2048);
    std::fs::write(folder.path().join("t.txt"), "Every morning the old lamp was lit again. ".repeat(8)).unwrap();
    let capture = [
        "capture",
        "--model",
        "m",
        "--text",
        "t.txt",
        "--layers",
        "1,0",
        "--output",
        "qkv.safetensors",
        "--chunk",
        "100",
    ];
    let output = run(folder.path(), &capture);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("337 tokens of 2 layers, 4/2 heads of 8"), "{}", text(&output.stdout));
    let attend = ["attend", "--input", "qkv.safetensors", "--output", "o.safetensors", "--kernel", "tiled", "--causal"];
    assert!(run(folder.path(), &attend).status.success());
    let values = |file: &str, name: &str| {
        let arena = Arena::unlimited();
        let tensor = TensorFile::open(&folder.path().join(file)).unwrap().load(name, &arena, Label::Input).unwrap();
        (tensor.dims(), bytemuck::cast_slice::<u8, f32>(tensor.bytes()).to_vec())
    };
    let ((dims, own), (_, again)) = (values("qkv.safetensors", "o"), values("o.safetensors", "o"));
    assert_eq!(dims, [2, 4, 337, 8]);
    let furthest = own.iter().zip(&again).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let largest = own.iter().fold(0f32, |most, x| most.max(x.abs()));
    assert!(furthest < 1e-5 * largest && largest > 0.0, "off by {furthest} of {largest}");
    // What looks behind RoPE finds what was recorded there.
    let evict = [
        "evict",
        "--input",
        "qkv.safetensors",
        "--output",
        "kept.safetensors",
        "--policy",
        "expected-attention",
        "--budget",
        "0.25",
    ];
    let output = run(folder.path(), &evict);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let theta = TensorFile::open(&folder.path().join("qkv.safetensors")).unwrap().metadata("rope_theta");
    assert_eq!(theta.as_deref(), Some("10000"));
}
