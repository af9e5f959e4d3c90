//! `kvsieve inspect`, on a model that anyone has.

use assert_cmd::Command;
use predicates::str::contains;
use std::collections::HashMap;

fn inspect(more: &[&str]) -> assert_cmd::assert::Assert {
    let mut command = Command::cargo_bin("kvsieve").unwrap();
    command.args(["inspect", "--threads", "2"]).args(more).assert()
}

#[test]
fn the_built_in_model_has_heads_that_copy_needles() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("anatomy");
    let out = out.to_str().unwrap();
    let run = inspect(&["--output", out, "--tokens", "512", "--needles", "3", "--json", "-"]).success();
    let report: serde_json::Value = serde_json::from_slice(&run.get_output().stdout).unwrap();
    assert_eq!((&report["layers"], &report["q_heads"], &report["tokens"]), (&4.into(), &4.into(), &512.into()));
    // It answers needle tasks, so something fetches, if not one head by itself; and its first tokens are no sinks.
    assert!(report["copying"][0][2].as_f64().unwrap() > 0.1, "{report}");
    assert!(report["sink_heads"].as_f64().unwrap() < 0.3, "{report}");
    let mut table = csv::Reader::from_path(format!("{out}/anatomy.csv")).unwrap();
    let lines: Vec<HashMap<String, f64>> = table.deserialize().map(Result::unwrap).collect();
    assert_eq!(lines.len(), 16);
    for line in &lines {
        let fraction = |field: &str| (0.0..=1.0).contains(&line[field]);
        assert!(
            ["first_mass", "last_mass", "fraction_for_mass", "retrieval_score"].into_iter().all(fraction),
            "{line:?}"
        );
        assert!(line["first_mass"] + line["last_mass"] < 1.0001 && line["entropy_nats"] < 512f64.ln(), "{line:?}");
    }
    let svg = std::fs::read_to_string(format!("{out}/anatomy.svg")).unwrap();
    assert!(svg.contains("head 3") && svg.contains("copied needles"));
}

/// All tokens hold all of a needle, the first and the newest none; what has the model repeat its context holds most where heads copy.
#[test]
fn policies_are_shown_by_what_they_leave_of_needles() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("anatomy");
    let out = out.to_str().unwrap();
    let asked = ["--policy", "full,streaming-llm:sink=4,kvzip", "--policy", "snapkv:window=8", "--budget", "0.25"];
    let sizes = ["--output", out, "--tokens", "512", "--needles", "3", "--json", "-"];
    let run = inspect(&[&sizes[..], &asked].concat()).success();
    let report: serde_json::Value = serde_json::from_slice(&run.get_output().stdout).unwrap();
    let kept = |at: usize, of: &str| report["needles_retained"][at][of].as_f64().unwrap();
    assert_eq!([kept(0, "of_all_heads"), kept(0, "of_copying_heads")], [1.0, 1.0]);
    assert!(kept(1, "of_all_heads") < 0.1 && kept(2, "of_copying_heads") > 0.5, "{report}");
    let mut table = csv::Reader::from_path(format!("{out}/anatomy.csv")).unwrap();
    let lines: Vec<HashMap<String, f64>> = table.deserialize().map(Result::unwrap).collect();
    for (at, name) in
        ["full", "streaming-llm:sink=4@0.25", "kvzip@0.25", "snapkv:window=8@0.25"].into_iter().enumerate()
    {
        assert_eq!(report["needles_retained"][at]["policy"], name);
        let of_heads: Vec<f64> = lines.iter().map(|line| line[&format!("needles_retained {name}")]).collect();
        assert!((of_heads.iter().sum::<f64>() / 16.0 - kept(at, "of_all_heads")).abs() < 1e-4, "{name}: {of_heads:?}");
    }
}

#[test]
fn mistakes_are_one_line_and_status_2() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("anatomy");
    let out = out.to_str().unwrap();
    for (more, expected) in [
        (vec!["--tokens", "1"], "--tokens is 1 and --needles 10; they must be at least 2 and 1 to 10000"),
        (vec!["--needles", "0"], "and --needles 0; they must be"),
        (vec!["--needles", "99999999999"], "and --needles 99999999999; they must be"),
        (vec!["--tokens", "20"], "20 tokens are too few"),
        (vec!["--text", "/dev/null"], "cannot read --text '/dev/null': it is empty"),
        (vec!["--model", "no/such"], "no/such"),
        (vec!["--text", "no-such.txt"], "cannot read --text 'no-such.txt'"),
        (vec!["--policy", "snapkv"], "policy 'snapkv' has no budget; give --budget"),
        (vec!["--policy", "snapkv", "--budget", "0"], "'0' is not a budget"),
        (vec!["--policy", "nosuch", "--budget", "0.5"], "unknown policy 'nosuch'"),
        (vec!["--policy", "quest", "--budget", "0.5"], "policy 'quest' evicts nothing: it selects what a step reads"),
        (vec!["--policy", "oracle", "--budget", "0.5"], "it looks into the future"),
        (vec!["--policy", "full", "--budget", "0.5"], "--budget is 0.5; nothing is evicted"),
        (vec!["--tokens", "100k"], "--tokens is 102400; the model was made for at most 4096"),
    ] {
        let run = inspect(&[&["--output", out][..], &more].concat()).code(2).stderr(contains(expected));
        let stderr = String::from_utf8(run.get_output().stderr.clone()).unwrap();
        assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
    }
}
