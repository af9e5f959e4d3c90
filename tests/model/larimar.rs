//! Facts in a model: training of the maps, which goes on with the same bits, and `kvsieve memory` with texts.

use assert_cmd::Command;
use kvsieve::device::Cpu;
use kvsieve::tensor::DType;
use kvsieve::train::larimar::{MAPS, Settings, run};
use kvsieve::train::run::{Options, RECORD};
use predicates::str::contains;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

const MAPS_OF_BUILTIN: &str = "models/larimar/builtin.safetensors";

fn settings(steps: usize) -> Settings {
    Settings {
        model: "builtin".into(),
        steps,
        batch: 4,
        seed: 1,
        learning_rate: 0.02,
        weights: DType::F32,
        episodes: 1,
    }
}

fn options(out: &Path, resume: bool, stop_after: Option<usize>) -> Options {
    Options { out: out.into(), resume, stop_after, limit_bytes: u64::MAX, environment: json!({}) }
}

#[test]
fn a_run_that_was_stopped_goes_on_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    let cpu = Cpu::new(Some(2)).unwrap();
    assert!(run(&settings(5), &cpu, &options(&whole, false, Some(4)), &mut |_| ()).unwrap().is_none());
    assert!(run(&settings(5), &cpu, &options(&parts, false, Some(2)), &mut |_| ()).unwrap().is_none());
    let taken = run(&settings(5), &cpu, &options(&parts, false, None), &mut |_| ()).unwrap_err();
    assert!(taken.to_string().contains("holds a run already"), "{taken}");
    let halfway = fs::read(parts.join(MAPS)).unwrap();
    assert!(run(&settings(5), &cpu, &options(&parts, true, Some(4)), &mut |_| ()).unwrap().is_none());
    // Behind the header, whose texts come in any order.
    let numbers = |file: Vec<u8>| {
        let header_bytes = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        file[8 + header_bytes..].to_vec()
    };
    let [whole_maps, parts_maps] = [&whole, &parts].map(|folder| numbers(fs::read(folder.join(MAPS)).unwrap()));
    assert!(numbers(halfway) != parts_maps, "two more steps change the maps");
    assert!(whole_maps == parts_maps);
    // Only a run that is over asks, which takes longer than the steps.
    assert!(run(&settings(5), &cpu, &options(&parts, true, None), &mut |_| ()).unwrap().is_some());
    let record: Value = serde_json::from_str(&fs::read_to_string(parts.join(RECORD)).unwrap()).unwrap();
    // Facts in the context are what the built-in model was trained on.
    assert_eq!(record["answers"]["context"]["stem"], json!({"right": 64, "asked": 64}));
    // Five steps teach nothing: what the memory is asked for is asked all the same.
    let asked: Vec<u64> = record["answers"]["memory"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["stem"]["asked"].as_u64().unwrap())
        .collect();
    assert_eq!(asked, [16, 16, 16, 64, 64]);
    assert_eq!(record["fine_tuned"]["facts"], 16);
}

/// An experiment with the measure `edit` in a folder, with the maps of the built-in model unless `more` says others.
fn experiment(folder: &Path, more: &str) {
    let maps = fs::canonicalize(MAPS_OF_BUILTIN).unwrap();
    let maps = if more.contains("maps =") { String::new() } else { format!("maps = {maps:?}\n") };
    fs::write(folder.join("told.toml"), format!("name = \"told\"\n[[grid]]\nmeasure = \"edit\"\n{maps}{more}"))
        .unwrap();
}

fn run_experiment(folder: &Path, more: &[&str]) -> assert_cmd::assert::Assert {
    let mut command = Command::cargo_bin("kvsieve").unwrap();
    command.current_dir(folder).args(["run", "told.toml", "--out", "out"]).args(more).assert()
}

/// The records of the one run in a folder, and where they lie.
fn records(folder: &Path) -> (Vec<Value>, std::path::PathBuf) {
    let found: Vec<_> = fs::read_dir(folder.join("out/told")).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [run] = &found[..] else { panic!("{found:?}") };
    let text = fs::read_to_string(run.join("cells.jsonl")).unwrap();
    (text.lines().map(|line| serde_json::from_str(line).unwrap()).collect(), run.clone())
}

#[test]
fn a_memory_is_measured_beside_contexts_of_as_many_bytes_and_the_run_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    const MEMORY: &str = "larimar:slots=32,noise=0.05,scope=list";
    let grid = "facts = [2, 16]\nsamples = 4\npolicy = [\"full\", \"streaming-llm\"]\n";
    experiment(folder, &format!("{grid}memory = [\"{MEMORY}\", \"nearest:facts=4\"]\n"));
    run_experiment(folder, &[]).success();
    let (first, run) = records(folder);
    assert_eq!(first.len(), 2 * 5, "random is beside what evicts");
    let of = |choice: &str, facts: u64| {
        let chosen = |record: &&Value| {
            let cell = &record["cell"];
            (cell["policy"] == choice || cell["memory"] == choice) && cell["facts"] == facts
        };
        first.iter().find(chosen).unwrap()
    };
    let share = |choice: &str, facts: u64, what: &str| of(choice, facts)["edit"][what]["mean"].as_f64().unwrap();
    for facts in [2, 16] {
        let memory = of(MEMORY, facts);
        assert_eq!(memory["memory"]["residual_bytes"], 0);
        // Without the memory a model can but guess one of some hundred words.
        assert!(share(MEMORY, facts, "stem") >= 0.75, "{memory}");
        assert!(share(MEMORY, facts, "replaced") >= 0.5, "{memory}");
        assert!(share(MEMORY, facts, "unchanged") > share(MEMORY, facts, "unchanged_unscoped"), "{memory}");
        for what in ["forgotten", "replaced_old", "never_written"] {
            assert!(share(MEMORY, facts, what) <= 0.25, "{what}: {memory}");
        }
        for choice in ["full", "nearest:facts=4"] {
            assert_eq!((share(choice, facts, "stem"), share(choice, facts, "replaced")), (1.0, 1.0), "{choice}");
        }
        assert_eq!(of("full", facts)["edit"]["unchanged_unscoped"], Value::Null);
        for choice in ["streaming-llm", "random"] {
            let evicted = of(choice, facts);
            assert_eq!(evicted["cell"]["budget"], format!("{}B", memory["edit"]["held_bytes"]));
            assert_eq!(evicted["status"], if facts == 2 { "skipped" } else { "ok" });
        }
    }
    // Pages of 16 tokens are not always full.
    let (held, budget) = (&of("streaming-llm", 16)["edit"]["held_bytes"], &of(MEMORY, 16)["edit"]["held_bytes"]);
    assert!(held.as_f64().unwrap() < 1.5 * budget.as_f64().unwrap(), "{held} {budget}");
    assert!(share("streaming-llm", 16, "stem") < 0.9 && share("random", 16, "stem") < 0.9);
    assert!(run.join("plots/answers-vs-facts.svg").exists());
    assert!(fs::read_to_string(run.join("summary.md")).unwrap().contains("### edit, 16 facts"));

    // Of a run that was killed behind its third record, the rest is asked again and the same.
    let text = fs::read_to_string(run.join("cells.jsonl")).unwrap();
    fs::write(run.join("cells.jsonl"), text.split_inclusive('\n').take(3).collect::<String>()).unwrap();
    run_experiment(folder, &["--resume"]).success();
    let (second, _) = records(folder);
    assert_eq!(second.len(), first.len());
    for record in &second {
        let before = first.iter().find(|before| before["cell_id"] == record["cell_id"]).unwrap();
        assert_eq!((&before["edit"], &before["status"]), (&record["edit"], &record["status"]));
    }
}

#[test]
fn a_memory_has_what_the_model_leaves_of_the_limit() {
    let folder = tempfile::tempdir().unwrap();
    experiment(folder.path(), "facts = [2]\nsamples = 1\nmemory = [\"larimar:slots=4000\"]\n");
    run_experiment(folder.path(), &["--limit-memory", "8MiB"]).success();
    let (records, _) = records(folder.path());
    let reason = records[0]["reason"].as_str().unwrap();
    let numbers: Vec<u64> = reason.split(' ').filter_map(|word| word.parse().ok()).collect();
    let weights = fs::metadata("models/builtin/model.safetensors").unwrap().len();
    assert_eq!((&records[0]["status"], numbers[0]), (&"oom".into(), 161_350_912), "{reason}");
    assert!(numbers[1] < (8 << 20) - weights / 10 * 9, "{reason}");
}

#[test]
fn grids_that_cannot_be_asked_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (grid, said) in [
        ("policy = \"full\"\n", "facts says how many are written"),
        ("facts = [4, 0]\n", "facts says how many are written"),
        ("facts = 4\nsamples = 0\n", "samples is 0"),
        ("facts = 4\nbudget = 64\n", "budget belongs to measure"),
        ("facts = 4\nmemory = \"nearest:facts=0\"\n", "facts is '0'"),
        ("facts = 4\nmemory = \"nearest:slots=4\"\n", "slots"),
        ("facts = 4\nmemory = \"camelot\"\n", "unknown memory of facts 'camelot'"),
        ("facts = 4\npolicy = \"snapkw\"\n", "snapkw"),
        ("facts = 4\nmodel = [\"builtin\", \"x\"]\n", "maps are of one"),
        ("facts = 4\nmaps = \"nowhere\"\n", "nowhere"),
    ] {
        experiment(folder, grid);
        let output = run_experiment(folder, &[]).code(2).get_output().clone();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(said) && error.trim_end().lines().count() == 1, "{grid}: {error}");
    }
}

fn memory(folder: &Path, arguments: &str) -> Command {
    let mut command = Command::cargo_bin("kvsieve").unwrap();
    let maps = fs::canonicalize(MAPS_OF_BUILTIN).unwrap();
    let model = fs::canonicalize("models/builtin").unwrap();
    let arguments = arguments.split_whitespace();
    command.current_dir(folder).arg("memory").args(arguments).arg("--model").arg(model).arg("--maps").arg(maps);
    command
}

/// Answers, each with what it is from.
fn answers(folder: &Path) -> Vec<[String; 2]> {
    memory(folder, "read --from m --input questions --output answers").assert().success();
    let text = fs::read_to_string(folder.join("answers")).unwrap();
    let line = |line: &str| {
        let parts: Vec<&str> = line.split('\t').collect();
        [parts[1].to_string(), parts[2].to_string()]
    };
    text.lines().map(line).collect()
}

#[test]
fn facts_as_text_are_answered_replaced_and_forgotten_across_files() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let write = |name: &str, text: &str| fs::write(folder.join(name), text).unwrap();
    write("facts", " amber falcon:\t river\n rusty kettle:\t wolf\n tall tower:\t lemon\n");
    write("old", " rusty kettle:\t wolf\n");
    write("new", " rusty kettle:\t green\n");
    write("gone", " tall tower:\t lemon\n");
    write("questions", " amber falcon:\n rusty kettle:\n tall tower:\n shy otter:\n");
    memory(folder, "write --input facts --output m").assert().success();
    let from = |answers: &[[String; 2]], at: usize| [answers[at][0].trim().to_string(), answers[at][1].clone()];
    let first = answers(folder);
    assert_eq!(from(&first, 0), ["river", "memory"]);
    assert_eq!(from(&first, 1), ["wolf", "memory"]);
    assert_eq!(from(&first, 2), ["lemon", "memory"]);
    assert_eq!(first[3][1], "model");
    memory(folder, "forget --from m --input old --output m").assert().success();
    memory(folder, "write --from m --input new --output m").assert().success();
    memory(folder, "forget --from m --input gone --output m").assert().success();
    let second = answers(folder);
    assert_eq!(from(&second, 0), ["river", "memory"]);
    assert_eq!(from(&second, 1), ["green", "memory"]);
    assert_eq!((&*second[2][1], &*second[3][1]), ("model", "model"));
}

#[test]
fn mistakes_are_one_line_and_status_2() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let write = |name: &str, text: &str| fs::write(folder.join(name), text).unwrap();
    write("facts", " amber falcon:\t river\n");
    write("never", " shy otter:\t river\n");
    write("answered", " shy otter:\n amber falcon:\t river\n");
    write("flat", " amber falcon: river\n");
    write("wide", " amber falcon:\t river wolf\n");
    write("long", &format!("{}\t river\n", " river".repeat(5000)));
    write("empty", "\n");
    memory(folder, "write --input facts --output m").assert().success();
    let bytes = fs::read(folder.join("m")).unwrap();
    let text = String::from_utf8_lossy(&bytes[8..2000.min(bytes.len())]).into_owned();
    let at = text.find("\"origin\":\"").unwrap() + 8 + "\"origin\":\"".len();
    let mut other = bytes.clone();
    other[at] = if other[at] == b'0' { b'1' } else { b'0' };
    fs::write(folder.join("other"), &other).unwrap();
    let cases = [
        ("write --input flat --output n", "is no fact; write what is asked, a tab, and the answer"),
        ("write --input wide --output n", "a value of 2 tokens; the read-out gives one token"),
        ("write --input long --output n", "tokens; the encoder reads at most 4096"),
        ("write --input empty --output n", "has no lines"),
        ("write --input nowhere --output n", "nowhere"),
        ("read --input facts --output n", "there is nothing to read or to forget yet"),
        ("read --from other --input facts --output n", "are not those that were saved (their hash differs)"),
        ("forget --from m --input never --output n", "is not in the memory"),
        ("read --from m --input answered --output n", "' amber falcon:\t river' has a tab"),
    ];
    for (arguments, expected) in cases {
        memory(folder, arguments).assert().failure().code(2).stderr(contains(expected));
    }
    let train = |more: &[&str]| {
        let mut command = Command::cargo_bin("kvsieve").unwrap();
        command
            .args(["train", "--method", "larimar", "--model", "builtin", "--out"])
            .arg(folder.join("out"))
            .args(more);
        command.assert().failure().code(2)
    };
    train(&["--text", "x"]).stderr(contains("--text is nothing to --method larimar"));
    train(&["--length", "64"]).stderr(contains("--length is nothing to --method larimar"));
    train(&["--ratio", "2"]).stderr(contains("--ratio is nothing to --method larimar"));
    train(&["--rank", "2"]).stderr(contains("--rank is nothing to --method larimar"));
    train(&["--steps", "0"]).stderr(contains("each must be at least 1"));
    train(&["--learning-rate", "0"]).stderr(contains("it must be finite and above 0"));
}

#[test]
fn a_memory_is_read_by_the_maps_that_wrote_it() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(folder.join("facts"), " amber falcon:\t river\n").unwrap();
    fs::write(folder.join("questions"), " amber falcon:\n").unwrap();
    memory(folder, "write --input facts --output m").assert().success();
    let mut maps = fs::read(MAPS_OF_BUILTIN).unwrap();
    *maps.last_mut().unwrap() ^= 1;
    fs::write(folder.join("maps"), maps).unwrap();
    let mut command = Command::cargo_bin("kvsieve").unwrap();
    command.current_dir(folder).args(["memory", "read", "--from", "m", "--input", "questions", "--output", "answers"]);
    command.arg("--model").arg(fs::canonicalize("models/builtin").unwrap()).args(["--maps", "maps"]);
    command.assert().code(2).stderr(contains("'m' was written from other maps of this model"));
}

#[test]
fn maps_of_another_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("facts"), " a:\t b\n").unwrap();
    let mut command = Command::cargo_bin("kvsieve").unwrap();
    let (facts, out) = (folder.path().join("facts"), folder.path().join("m"));
    command.args(["memory", "write", "--model", "tests/checkpoints/llama", "--maps", MAPS_OF_BUILTIN]);
    command.arg("--input").arg(facts).arg("--output").arg(out);
    command.assert().failure().code(2).stderr(contains("it is of another model"));
}
