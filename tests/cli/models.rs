//! `kvsieve logits` and `kvsieve generate` as a user meets them.

use crate::common::models::{checkpoint, deviation, furthest};
use assert_cmd::Command;
use predicates::str::contains;
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};

fn kvsieve(arguments: &[&str]) -> Command {
    let mut command = Command::cargo_bin("kvsieve").unwrap();
    command.args(arguments).args(["--threads", "2"]);
    command
}

/// A file of tokens in a folder.
fn write_tokens(folder: &Path, json: &str) -> PathBuf {
    let path = folder.join("tokens.json");
    std::fs::write(&path, json).unwrap();
    path
}

/// Runs `logits` on the tokens of a checkpoint; returns the logits and the measurements.
fn logits(name: &str, more: &[&str]) -> (Vec<f32>, serde_json::Value) {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(name);
    let tokens = write_tokens(folder.path(), &format!("{{\"tokens\": [{:?}]}}", checkpoint.tokens));
    let output = folder.path().join("logits.safetensors");
    let (model, tokens) = (checkpoint.folder.to_str().unwrap(), tokens.to_str().unwrap());
    let arguments =
        ["logits", "--model", model, "--tokens", tokens, "--output", output.to_str().unwrap(), "--json", "-"];
    let run = kvsieve(&arguments).args(more).assert().success();
    let report = serde_json::from_slice(&run.get_output().stdout).unwrap();
    let bytes = std::fs::read(output).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let found = file.tensor("logits").unwrap();
    assert_eq!(found.shape(), [1, checkpoint.tokens.len(), 120]);
    let values = found.data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
    (values, report)
}

#[test]
fn logits_are_written_with_their_measurements() {
    let expected = checkpoint("llama-sharded");
    let (values, report) = logits("llama-sharded", &["--chunk", "7"]);
    assert!(furthest(&values, &expected.logits) < 1e-3 * deviation(&expected.logits));
    assert_eq!((&report["architecture"], &report["tokens"]), (&"LlamaForCausalLM".into(), &40.into()));
    assert_eq!(report["evicted_tokens"], 0);
    let (_, report) = logits("llama-sharded", &["--kv-format", "int8"]);
    assert_eq!((&report["dtype"], &report["kv_format"]), (&"f32".into(), &"int8".into()));
}

#[test]
fn logits_over_a_memory_are_written() {
    let expected = checkpoint("qwen3");
    let (values, report) = logits("qwen3", &["--memory", "camelot:slots=100,window=8,threshold=2"]);
    assert!(furthest(&values, &expected.logits) < 1e-3 * deviation(&expected.logits));
    assert_eq!(report["memory"], "camelot:slots=100,window=8,threshold=2");
    // 3 layers, 2 KV heads, 40 modes and 8 tokens of a segment: two keys and a value each, of 16 channels in f32.
    let kv_bytes = 3 * 2 * (40 + 8) * 3 * 16 * 4;
    assert_eq!(report["kv_bytes_live"], kv_bytes);
    let model = "tests/checkpoints/llama";
    let generate = |more: &[&str]| kvsieve(&["generate", "--model", model, "--prompt", "a b"]).args(more).assert();
    generate(&["--memory", "camelot:slots=4,window=3", "--json", "-"]).success().stdout(contains("\"memory\""));
    for (more, reason) in [
        (vec!["--memory", "camelot:slots=0"], "camelot: slots is '0'; it must be a whole number of at least 1"),
        (vec!["--memory", "camelot:window=129"], "a window of 129 tokens; the model was made for at most 128"),
        (vec!["--memory", "cameloot"], "unknown memory 'cameloot'; did you mean 'camelot'?"),
        (vec!["--memory", "camelot", "--policy", "h2o", "--budget", "3"], "cannot be used with"),
        (vec!["--memory", "camelot", "--kv-format", "int8"], "cannot be used with"),
        (vec!["--memory", "camelot", "--budget", "3"], "cannot be used with"),
        (vec!["--memory", "camelot", "--policy-file", "x"], "cannot be used with"),
        (vec!["--json", "tests/checkpoints/llama/config.json"], "a file of --model; name another"),
        (vec!["--memory", "camelot", "--device", "cuda"], "memory 'camelot' is at work on the CPU only"),
    ] {
        generate(&more).code(2).stderr(contains(reason));
    }
}

#[test]
fn logits_behind_an_eviction_are_written() {
    let expected = checkpoint("qwen3").evicted.unwrap();
    let policy = ["--policy", "streaming-llm:sink=4", "--budget", "12", "--evict-after", "24"];
    let (values, report) = logits("qwen3", &policy);
    assert!(furthest(&values, &expected) < 1e-3 * deviation(&expected));
    assert_eq!(report["evicted_tokens"], 12 * 3 * 2);
}

#[test]
fn weights_are_kept_as_they_are_asked_for() {
    let expected = checkpoint("llama").logits;
    let bytes = [("f32", 1e-3), ("int8", 0.6)].map(|(format, bound)| {
        let (values, report) = logits("llama", &["--weights", format]);
        assert!(furthest(&values, &expected) < bound * deviation(&expected), "{format}");
        assert_eq!(report["weights_format"], format);
        report["weights_bytes"].as_u64().unwrap()
    });
    assert!(bytes[1] * 3 < bytes[0], "{bytes:?}");
}

#[test]
fn sequences_of_different_lengths_come_with_their_lengths() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = write_tokens(folder.path(), r#"{"tokens": [[5, 6, 7], [8]]}"#);
    let output = folder.path().join("logits.safetensors");
    let (tokens, out) = (tokens.to_str().unwrap(), output.to_str().unwrap());
    kvsieve(&["logits", "--model", "tests/checkpoints/llama", "--tokens", tokens, "--output", out])
        .assert()
        .success()
        .stdout(contains("4 tokens in 2 sequences"));
    let bytes = std::fs::read(output).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.tensor("logits").unwrap().shape(), [2, 3, 120]);
    let len = file.tensor("len").unwrap().data();
    assert_eq!(len, [3i64.to_le_bytes(), 1i64.to_le_bytes()].concat());
}

#[test]
fn mistakes_are_one_line_and_status_2() {
    let folder = tempfile::tempdir().unwrap();
    let good = r#"{"tokens": [[5, 6, 7, 8]]}"#;
    let long = format!("{{\"tokens\": [{:?}]}}", vec![5; 200]);
    let evict = ["--policy", "knorm", "--budget", "2"];
    let cases: [(&str, &str, Vec<&str>, &str); 15] = [
        (
            "llama",
            r#"{"tokens": [[5, 120]]}"#,
            vec![],
            "token 120 at place 1 of sequence 0; the model has tokens 0 to 119",
        ),
        ("llama", r#"{"tokens": [[5, -1]]}"#, vec![], "token 1 of sequence 0 is -1"),
        ("llama", r#"{"tokens": [[]]}"#, vec![], "sequence 0 is no list of at least one token"),
        ("llama", r#"{"tokens": []}"#, vec![], "'tokens' is empty"),
        ("llama", "[1]", vec![], "has no list 'tokens'"),
        ("llama", "{", vec![], "it is not JSON"),
        ("llama", &long, vec![], "a sequence of 200 tokens; the model was made for at most 128, give a shorter one"),
        ("none", good, vec![], "there is no such folder or file, and nothing is downloaded"),
        ("llama", good, vec!["--chunk", "0"], "--chunk is 0"),
        ("llama", good, vec!["--policy", "knorm"], "--budget"),
        ("llama", good, evict.to_vec(), "give --evict-after N, or '+chunks'"),
        (
            "llama",
            good,
            [&evict[..], &["--evict-after", "4"]].concat(),
            "--evict-after is 4; the shortest sequence has 4 tokens, and one must follow, so it must be 1 to 3",
        ),
        (
            "mistral",
            good,
            vec!["--policy", "quest", "--budget", "16", "--evict-after", "3"],
            "this model has sliding windows",
        ),
        ("llama", good, vec!["--dtype", "f8"], "unknown dtype 'f8'"),
        ("llama", good, vec!["--weights", "int7"], "unknown format 'int7'"),
    ];
    for (model, tokens, more, expected) in cases {
        let tokens = write_tokens(folder.path(), tokens);
        let (model, output) = (format!("tests/checkpoints/{model}"), folder.path().join("x.safetensors"));
        let (tokens, out) = (tokens.to_str().unwrap(), output.to_str().unwrap());
        let run = kvsieve(&["logits", "--model", &model, "--tokens", tokens, "--output", out]).args(&more).assert();
        let run = run.code(2).stderr(contains(expected));
        let stderr = String::from_utf8(run.get_output().stderr.clone()).unwrap();
        assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
        assert!(!output.exists());
    }
}

#[test]
fn a_sequence_beyond_the_limit_runs_when_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = write_tokens(folder.path(), &format!("{{\"tokens\": [{:?}]}}", vec![5; 140]));
    let out = folder.path().join("x.safetensors");
    let (tokens, out) = (tokens.to_str().unwrap(), out.to_str().unwrap());
    let arguments =
        ["logits", "--model", "tests/checkpoints/llama", "--tokens", tokens, "--output", out, "--beyond-limit"];
    kvsieve(&arguments).assert().success();
}

#[test]
fn text_follows_a_prompt() {
    let prompt = "w9 w17 w33 w8 w100 w54 w21 w77";
    let base = ["generate", "--model", "tests/checkpoints/llama", "--prompt", prompt, "--max-new-tokens", "6"];
    let run = |more: &[&str]| {
        let run = kvsieve(&base).args(["--json", "-"]).args(more).assert().success();
        serde_json::from_slice::<serde_json::Value>(&run.get_output().stdout).unwrap()
    };
    let greedy = run(&[]);
    assert_eq!(greedy["prompt_tokens"], 9);
    assert!((1..=6).contains(&greedy["tokens"].as_array().unwrap().len()));
    let shown = kvsieve(&base).assert().success();
    assert_eq!(String::from_utf8_lossy(&shown.get_output().stdout).trim(), greedy["text"].as_str().unwrap().trim());
    let drawn = |seed: &str| run(&["--temperature", "1.5", "--top-p", "0.9", "--seed", seed])["tokens"].clone();
    assert_eq!(drawn("1"), drawn("1"));
    assert!((2..9).any(|seed| drawn(&seed.to_string()) != drawn("1")));
    let evicted = run(&["--policy", "snapkv:window=2", "--budget", "4"]);
    assert_eq!(evicted["evicted_tokens"], 5 * 4);
}

#[test]
fn a_budget_of_nothing_but_protected_tokens_warns() {
    let warning = "nothing but protected tokens stays: the budget is 4 tokens a head, and 0 first and 8 latest ones";
    let policy = ["--policy", "snapkv:window=8", "--budget", "4"];
    let prompt = "w9 w17 w33 w8 w100 w54 w21 w77";
    let base =
        ["generate", "--model", "tests/checkpoints/llama", "--prompt", prompt, "--max-new-tokens", "2", "--json", "-"];
    let run = kvsieve(&base).args(policy).assert().success().stderr(contains(format!("warning: {warning}")));
    let report: serde_json::Value = serde_json::from_slice(&run.get_output().stdout).unwrap();
    assert!(report["warnings"][0].as_str().unwrap().starts_with(warning), "{report}");
    let (_, report) = logits("llama", &[&policy[..], &["--evict-after", "24"]].concat());
    assert!(report["warnings"][0].as_str().unwrap().starts_with(warning), "{report}");
    let (_, report) = logits("llama", &["--policy", "snapkv:window=8", "--budget", "9", "--evict-after", "24"]);
    assert_eq!(report["warnings"], serde_json::Value::Null);
    // One that holds everything.
    let idle = |budget: &str, tokens: usize| {
        format!("budget {budget} holds the whole context of {tokens} tokens: nothing is evicted")
    };
    let (_, report) = logits("llama", &["--policy", "knorm", "--budget", "24", "--evict-after", "24"]);
    assert_eq!(report["warnings"][0], idle("24", 24));
    kvsieve(&base).args(["--policy", "knorm", "--budget", "5000"]).assert().success().stderr(contains(idle("5000", 9)));
    kvsieve(&base).args(["--policy", "full"]).assert().success().stderr("");
    let idle = "warning: the policy evicts nothing, and the budget 2 changes nothing\n";
    kvsieve(&base).args(["--policy", "full", "--budget", "2"]).assert().success().stderr(idle);
}

#[test]
fn a_tokenizer_that_makes_no_sense_is_told_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(Path::new("tests/checkpoints/llama").join(file), folder.path().join(file)).unwrap();
    }
    let whole = std::fs::read_to_string("tests/checkpoints/llama/tokenizer.json").unwrap();
    let panics = "it makes no sense to the tokenizers library: ";
    for (part, broken, expected) in [
        ("\"decoder\":null", "\"decoder\":falsy", panics),
        ("\"special_tokens\":{\"<s>\"", "\"special_tokens\":{\"<x>\"", panics),
        ("\"decoder\":null", "\"decoder\":{\"type\":\"Nothing\"}", ""),
        (
            "\"normalizer\":null",
            "\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"(\"},\"content\":\" \"}",
            "Parsing error at position 1: Opening parenthesis",
        ),
        ("\"type\":\"WordLevel\"", "\"type\":\"Unigram\"", ""),
    ] {
        let text = whole.replace(part, broken);
        assert_ne!(text, whole, "{part} is not there");
        std::fs::write(folder.path().join("tokenizer.json"), text).unwrap();
        let model = folder.path().to_str().unwrap();
        let run = kvsieve(&["generate", "--model", model, "--prompt", "w5", "--max-new-tokens", "1"]).assert().code(2);
        let stderr = String::from_utf8(run.get_output().stderr.clone()).unwrap();
        let begins = stderr.starts_with("error: ") && stderr.contains(&format!("tokenizer.json': {expected}"));
        assert!(begins && stderr.trim_end().lines().count() == 1, "{broken}: {stderr}");
    }
}

#[test]
fn mistakes_in_generating_are_one_line_and_status_2() {
    let cases = [
        ("qwen2", vec!["--prompt", "w5"], "tokenizer.json': there is no such file"),
        (
            "llama",
            vec!["--prompt", "w5", "--temperature", "-1"],
            "--temperature is -1; it must be finite and 0 or more",
        ),
        (
            "llama",
            vec!["--prompt", "w5", "--question", "w6"],
            "'--prompt <TEXT>' cannot be used with '--question <TEXT>'",
        ),
        ("llama", vec!["--prompt", "w5", "--top-p", "0"], "--top-p is 0; it must be above 0 and at most 1"),
        ("llama", vec!["--prompt", "w5", "--top-p", "0.5"], "--top-p is 0.5 and --temperature 0"),
        ("llama", vec!["--prompt", "w5", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (
            "llama",
            vec!["--prompt", "w5", "--max-new-tokens", "1000"],
            "a sequence of 1002 tokens; the model was made for",
        ),
    ];
    for (model, more, expected) in cases {
        let model = format!("tests/checkpoints/{model}");
        let run = kvsieve(&["generate", "--model", &model]).args(&more).assert().code(2).stderr(contains(expected));
        let stderr = String::from_utf8(run.get_output().stderr.clone()).unwrap();
        assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
    }
}

#[test]
fn activations_are_rounded_where_that_is_asked() {
    let (plain, report) = logits("llama", &[]);
    assert!(report.get("activations").is_none());
    let (same, report) = logits("llama", &["--activations", "f32"]);
    assert!(report.get("activations").is_none() && same == plain);
    let (rounded, report) = logits("llama", &["--activations", "int8"]);
    assert_eq!(report["activations"], "int8");
    let off = furthest(&rounded, &plain);
    assert!(0.0 < off && off < deviation(&plain), "{off}");
    let generate = |more: &[&str]| {
        kvsieve(&["generate", "--model", "tests/checkpoints/llama", "--prompt", "a b"]).args(more).assert().code(2)
    };
    for (more, reason) in [
        (
            vec!["--activations", "int4"],
            "the width of the MLP is 72; int4:group=32 keeps rows whose width is a multiple of 32",
        ),
        (vec!["--activations", "int8-channel"], "int8-channel:group=32 is a format of keys"),
        (vec!["--activations", "int5"], "unknown format 'int5'"),
        (vec!["--activations", "int8", "--device", "cuda"], "activations are rounded to int8 on the CPU only"),
    ] {
        generate(&more).stderr(contains(reason));
    }
}
