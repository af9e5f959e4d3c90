//! `kvsieve generate --context FILE --question TEXT` as a user meets it.

use assert_cmd::Command;
use predicates::prelude::PredicateBooleanExt;
use predicates::str::contains;
use serde_json::Value;
use std::path::Path;

/// Words that the built-in model was trained on.
const CONTEXT: &str = "The code of the harbor is 4821. The boat of the miller is red. The key of the tower lies under the old \
                       stone. The code of the garden is 1177. The bridge of the village is long and the river is cold.";
const QUESTION: &str = "What is the code of the harbor?";

fn run(arguments: &[&str]) -> assert_cmd::assert::Assert {
    let mut command = Command::cargo_bin("kvsieve").unwrap();
    command.args(["generate", "--model", "builtin", "--max-new-tokens", "8", "--threads", "2"]).args(arguments).assert()
}

fn report(arguments: &[&str]) -> Value {
    let run = run(&[arguments, &["--json", "-"]].concat()).success();
    serde_json::from_slice(&run.get_output().stdout).unwrap()
}

fn file(folder: &Path, text: &str) -> String {
    let path = folder.join("context.txt");
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().into()
}

#[test]
fn answers_are_those_of_the_prompt_with_a_full_and_an_evicted_cache() {
    let folder = tempfile::tempdir().unwrap();
    let context = file(folder.path(), CONTEXT);
    let policy = ["--policy", "snapkv:window=8", "--budget", "24"];
    let asked = ["--context", &context, "--question", QUESTION];
    let whole = report(&[&asked[..], &policy, &["--protocol", "aware-whole"]].concat());
    let prompt = format!("{CONTEXT}\n\nQuestion: {QUESTION}\nAnswer:");
    let alone = report(&["--prompt", &prompt]);
    assert_eq!(whole["context_tokens"], alone["prompt_tokens"], "pieces have the tokens of the whole");
    let answer = |report: &Value, side: &str| report["questions"][0][side]["tokens"].clone();
    assert_eq!(answer(&whole, "full"), alone["tokens"]);
    let evicted = report(&[&["--prompt", &prompt][..], &policy].concat());
    assert_eq!(answer(&whole, "evicted"), evicted["tokens"]);
    assert_eq!(whole["evicted"]["held_tokens_per_head"], 24.0);
    assert_eq!(whole["full"]["held_tokens_per_head"].as_f64(), whole["context_tokens"].as_f64());
    assert!(whole["evicted"]["kv_bytes_live"].as_u64() < whole["full"]["kv_bytes_live"].as_u64());
    // Whatever a policy sees, the full cache answers the same, and what is read before the eviction grows with what it sees.
    let read = |protocol: &str| {
        let report = report(&[&asked[..], &policy, &["--protocol", protocol]].concat());
        assert_eq!(answer(&report, "full"), alone["tokens"], "{protocol}");
        report["context_tokens"].as_u64().unwrap()
    };
    let [agnostic, aware, kept] = ["agnostic", "aware", "aware-kept"].map(read);
    assert!(agnostic < aware && aware == kept && aware < whole["context_tokens"].as_u64().unwrap());
    // What is kept counts on top of the budget, also of lists that a budget allocation or a second look gives other scores.
    let held = |policy: &str| {
        let report =
            report(&[&asked[..], &["--policy", policy, "--budget", "24", "--protocol", "aware-kept"]].concat());
        report["evicted"]["held_tokens_per_head"].as_f64().unwrap()
    };
    for policy in ["snapkv:window=8+duo:sink=2,recent=20,heads=0.5", "knorm", "knorm+critical"] {
        assert_eq!(held(policy), held("snapkv:window=8"), "{policy}");
    }
}

#[test]
fn several_questions_are_each_asked_of_the_same_cache() {
    let folder = tempfile::tempdir().unwrap();
    let context = file(folder.path(), CONTEXT);
    let second = "What is the code of the garden?";
    for cache in [&["--policy", "keydiff", "--budget", "50%"][..], &["--memory", "transformer-xl:window=16"]] {
        let asked = |questions: &[&str]| {
            let questions: Vec<&str> = questions.iter().flat_map(|question| ["--question", question]).collect();
            report(&[&["--context", &context], &questions[..], cache].concat())["questions"].clone()
        };
        let tokens = |answered: &Value| [&answered["full"]["tokens"], &answered["evicted"]["tokens"]].map(Value::clone);
        let both = asked(&[QUESTION, second]);
        for (place, question) in [QUESTION, second].into_iter().enumerate() {
            assert_eq!(tokens(&both[place]), tokens(&asked(&[question])[0]), "{question}");
        }
    }
}

#[test]
fn both_answers_stand_side_by_side_with_what_they_took() {
    let folder = tempfile::tempdir().unwrap();
    let context = file(folder.path(), CONTEXT);
    let all = run(&["--context", &context, "--question", QUESTION, "--policy", "knorm", "--budget", "100%"]).success();
    all.stdout(contains("the same answer"))
        .stdout(contains("protocol agnostic"))
        .stdout(contains("tokens per KV head"));
    let window = ["--policy", "snapkv:window=8", "--budget", "8"];
    run(&[&["--context", &context, "--question", QUESTION][..], &window].concat())
        .success()
        .stdout(contains("full cache").and(contains("snapkv:window=8, budget 8")))
        .stderr(contains("warning: nothing but protected tokens stays"));
}

#[test]
fn mistakes_are_one_line_and_status_2() {
    let folder = tempfile::tempdir().unwrap();
    let context = file(folder.path(), CONTEXT);
    let policy = ["--policy", "knorm", "--budget", "0.5"];
    let asked = ["--context", &context, "--question", QUESTION];
    for (arguments, expected) in [
        (&asked[..], "give --policy and --budget, or --memory"),
        (&["--context", &context, "--question", " "], "at least one word is asked"),
        (&["--context", "nowhere.txt", "--question", "a"], "cannot read --context 'nowhere.txt'"),
        (&[&asked[..], &["--device", "cuda"]].concat(), "cuda"),
        (&[&asked[..], &["--protocol", "blind"]].concat(), "'blind' is no protocol"),
        (&["--context", &context], "--question"),
        (&["--question", "a"], "--context"),
        (&[&asked[..], &["--prompt", "a"]].concat(), "cannot be used with"),
        (&[], "--prompt"),
    ] {
        let more: &[&str] = if arguments == asked { &[] } else { &policy };
        run(&[arguments, more].concat()).code(2).stderr(contains(expected));
    }
}
