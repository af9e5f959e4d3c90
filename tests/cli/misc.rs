//! The commands that compute nothing, and what all commands have in common: help, exit status, closed pipes.

use assert_cmd::Command;
use predicates::prelude::*;
use serde_json::Value;
use std::process::Stdio;

/// `kvsieve` with arguments, in a terminal of a known width.
fn kvsieve(arguments: &[&str]) -> Command {
    let mut command = Command::cargo_bin("kvsieve").unwrap();
    command.args(arguments).env_remove("COLUMNS").env("NO_COLOR", "1");
    command
}

fn stdout(arguments: &[&str]) -> String {
    String::from_utf8(kvsieve(arguments).assert().success().stderr("").get_output().stdout.clone()).unwrap()
}

#[test]
fn help_texts_are_as_reviewed() {
    insta::assert_snapshot!("help", stdout(&["--help"]));
    let commands = [
        "run",
        "report",
        "slurm",
        "attend",
        "evict",
        "logits",
        "generate",
        "plan",
        "eval",
        "capture",
        "calibrate",
        "list",
        "doctor",
        "kernels",
        "memory",
        "completions",
    ];
    for command in commands {
        insta::assert_snapshot!(format!("help_{command}"), stdout(&[command, "--help"]));
    }
}

#[test]
fn every_command_has_examples_in_its_help() {
    let top = stdout(&["--help"]);
    let commands = top.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names: Vec<&str> = commands.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(names.contains(&"attend") && names.contains(&"doctor"), "{names:?}");
    for name in names.into_iter().filter(|name| *name != "help") {
        let help = stdout(&[name, "--help"]);
        assert!(help.contains("Examples:"), "{name} has no examples");
        assert!(help.lines().all(|line| line.chars().count() <= 100), "{name}: a line is too wide");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn who_holds_memory_is_told_of_a_process_and_of_the_machine() {
    let own = std::process::id().to_string();
    let report: Value = serde_json::from_str(&stdout(&["doctor", "--memory", &own, "--json", "-"])).unwrap();
    let process = &report["processes"][0];
    assert_eq!(process["pid"], std::process::id());
    let of = |field: &str| process[field].as_u64().unwrap();
    assert!(of("anonymous_bytes") > 0 && of("anonymous_bytes") + of("file_bytes") == of("resident_bytes"), "{report}");
    assert!(stdout(&["doctor", "--memory"]).contains("kvsieve plan --model MODEL --gpu here"));
    kvsieve(&["doctor", "--memory", "4294967295"]).assert().code(2).stderr(predicate::str::contains("no such process"));
}

#[test]
fn the_version_names_the_source() {
    let text = stdout(&["--version"]);
    assert!(text.starts_with(concat!("kvsieve ", env!("CARGO_PKG_VERSION"), " (")), "{text}");
}

#[test]
fn kernels_are_listed_with_their_parameters() {
    insta::assert_snapshot!("list_kernels", stdout(&["list", "kernels"]));
    let listed: Value = serde_json::from_str(&stdout(&["list", "kernels", "--json", "-"])).unwrap();
    let names: Vec<_> = listed.as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect();
    let known: Vec<_> = kvsieve::attention::KERNELS.iter().map(|entry| entry.name).collect();
    assert_eq!(names, [known, vec!["hopper"]].concat());
    let tiled = listed.as_array().unwrap().iter().find(|row| row["name"] == "tiled").unwrap();
    assert_eq!(tiled["parameters"][0]["name"], "br");
    assert_eq!(tiled["parameters"][1]["default"], "auto");
    assert_eq!(tiled["parameters"][2]["name"], "deterministic");
}

#[test]
fn policies_memories_and_experiments_are_listed() {
    insta::assert_snapshot!("list_policies", stdout(&["list", "policies"]));
    insta::assert_snapshot!("list_memories", stdout(&["list", "memories"]));
    insta::assert_snapshot!("list_fact_memories", stdout(&["list", "fact-memories"]));
    insta::assert_snapshot!("list_experiments", stdout(&["list", "experiments"]));
}

#[test]
fn a_listed_line_fits_a_terminal_and_the_whole_is_there_by_name() {
    for things in
        ["policies", "formats", "memories", "tasks", "measures", "strategies", "traces", "models", "gpus", "weights"]
    {
        let listed = stdout(&["list", things]);
        assert!(listed.lines().all(|line| line.chars().count() <= 100), "{listed}");
    }
    let listed = stdout(&["list", "experiments"]);
    let quickstart = listed.lines().find(|line| line.starts_with("quickstart")).unwrap();
    assert!(quickstart.ends_with(" ..."), "{quickstart}");
    assert!(stdout(&["list", "fact-memories", "larimar"]).contains("scope"), "parameters of all of them too");
    assert!(stdout(&["list", "experiments", "quickstart"]).contains("an oracle that knows the queries to come"));
}

#[test]
fn listed_defaults_are_what_a_kernel_policy_or_memory_takes() {
    let text = |name: &str, parameters: &[kvsieve::named::Parameter]| {
        let settings: Vec<_> = parameters.iter().map(|p| format!("{}={}", p.name, p.default)).collect();
        let separator = if settings.is_empty() { "" } else { ":" };
        format!("{name}{separator}{}", settings.join(","))
    };
    for entry in kvsieve::attention::KERNELS {
        let text = text(entry.name, entry.parameters);
        assert!(kvsieve::attention::kernel(&text).is_ok(), "{text}");
    }
    for entry in kvsieve::memories::MEMORIES {
        let text = text(entry.name, entry.parameters);
        assert!(kvsieve::memories::memory(&text).is_ok(), "{text}");
    }
    let registry = kvsieve::policy::Registry::default();
    for entry in registry.entries() {
        let text = text(entry.name, entry.parameters);
        assert!(registry.policy(&text).is_ok(), "{text}");
    }
}

#[test]
fn the_doctor_reports_the_machine_also_where_there_is_nothing() {
    let bare = |arguments: &[&str]| {
        let mut command = kvsieve(arguments);
        for variable in [
            "LD_LIBRARY_PATH",
            "CUDA_HOME",
            "CUDA_PATH",
            "PATH",
            "HOME",
            "KVSIEVE_CACHE",
            "XDG_CACHE_HOME",
            "VIRTUAL_ENV",
            "CONDA_PREFIX",
        ] {
            command.env_remove(variable);
        }
        String::from_utf8(command.assert().success().stderr("").get_output().stdout.clone()).unwrap()
    };
    let text = bare(&["doctor"]);
    for part in
        ["cpu  ", "cores  ", "instructions  ", "available  ", "driver  ", "nvrtc  ", "kernels  ", "the CPU only"]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
    let report: Value = serde_json::from_str(&bare(&["doctor", "--json", "-"])).unwrap();
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert!(report["git_rev"].is_string() && report["git_dirty"].is_boolean());
    assert!(report["cpu"]["cores"].as_u64().unwrap() >= 1 && report["threads"].as_u64().unwrap() >= 1);
    assert_eq!(report["compute_devices"], serde_json::json!(["cpu"]));
    assert_eq!((&report["kernels"]["folder"], &report["kernels"]["fits"]), (&Value::Null, &Value::Null));
    let limit = |bytes: &Value| bytes.as_u64().unwrap_or(u64::MAX);
    assert!(limit(&report["memory"]["default_limit_bytes"]) <= limit(&report["memory"]["available_bytes"]));
}

#[test]
fn the_doctor_finds_a_compiler_that_the_environment_names() {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().canonicalize().unwrap().join("lib64/libnvrtc.so.12");
    std::fs::create_dir_all(library.parent().unwrap()).unwrap();
    std::fs::write(&library, "").unwrap();
    let shown = library.to_str().unwrap().to_string();
    kvsieve(&["doctor"]).env("CUDA_HOME", folder.path()).assert().success().stdout(predicate::str::contains(shown));
}

#[test]
fn json_goes_to_a_file_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kernels.json");
    kvsieve(&["list", "kernels", "--json", path.to_str().unwrap()]).assert().success().stdout("");
    let listed: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(listed[0]["name"], "reference");
}

#[test]
fn completions_are_made_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = stdout(&["completions", shell]);
        assert!(script.contains("attend") && script.contains("softcap"), "{shell}");
    }
}

#[test]
fn wrong_arguments_are_one_line_and_status_2() {
    let cases: &[(&[&str], &str)] = &[
        (&["atend"], "unrecognized subcommand 'atend'; tip: a similar subcommand exists: 'attend'"),
        (&["attend"], "required arguments were not provided: --input <FILE.safetensors> --output <FILE.safetensors>"),
        (&["attend", "--output"], "a value is required for '--output"),
        (&["list"], "required arguments were not provided"),
        (&["list", "gods"], "invalid value 'gods'"),
        (&["list", "kernels", "--json", "no/such/folder.json"], "there is no folder 'no/such'"),
        (&["completions", "sh"], "invalid value 'sh'"),
        (&["kernels", "build"], "required arguments were not provided: --arch <sm_NN>"),
        (&["kernels", "build", "--arch", "sm_90"], "kernels are compiled for sm_80, "),
        (&["kernels", "build", "--arch", "sm_80", "--nvrtc", "no/such.so"], "no NVRTC to compile the kernels with"),
        (
            &["kernels", "build", "--arch", "sm_80", "--jobs", "0"],
            "invalid value '0' for '--jobs <N>': at least 1 is needed",
        ),
        (
            &["generate", "--model", "builtin", "--question", "Who?"],
            "error: the following required arguments were not provided: --context <FILE>\n",
        ),
        (&["doctor", "--memory", "--nvrtc", "x.so"], "cannot be used with"),
        (&["run", "--dry-run", "--resume"], "cannot be used with"),
        (&["run", "--dry-run", "--shard", "1/2"], "cannot be used with"),
        (&["train", "--out", "x", "--steps", "-1"], "invalid value '-1' for '--steps <N>': a whole number"),
        (&["doctor", "--now"], "unexpected argument '--now'"),
    ];
    for (arguments, expected) in cases {
        let assertion = kvsieve(arguments).assert().code(2).stdout("");
        let stderr = String::from_utf8(assertion.get_output().stderr.clone()).unwrap();
        assert!(stderr.starts_with("error: ") && stderr.lines().count() == 1, "{arguments:?}: {stderr}");
        assert!(stderr.contains(expected), "{arguments:?}: expected '{expected}' in: {stderr}");
    }
}

#[test]
fn a_shard_without_cells_and_a_run_named_twice_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let grid =
        "name = \"x\"\n[[grid]]\nmeasure = \"serve\"\nstrategy = \"max\"\ntrace = \"alpaca:steps=20,warmup=10\"\n";
    std::fs::write(folder.path().join("x.toml"), grid).unwrap();
    let run = |shard: &str| kvsieve(&["run", "x.toml", "--out", "out", "--shard", shard]).current_dir(&folder).assert();
    run("2/2").success().stderr(predicate::str::contains("no cell is this shard's")).stdout("");
    run("1/2").success().stdout(predicate::str::contains("1 cell: 1 ok"));
    kvsieve(&["report", "out/x", "out/../out/x"])
        .current_dir(&folder)
        .assert()
        .code(2)
        .stderr(predicate::str::contains("is named twice"));
}

#[cfg(unix)]
#[test]
fn what_is_no_text_is_refused_where_records_tell_it() {
    use std::os::unix::ffi::OsStringExt;
    let name = std::ffi::OsString::from_vec(b"w\xff.txt".to_vec());
    for arguments in
        [&["eval", "--text"][..], &["train", "--method", "lora", "--model", "builtin", "--out", "x", "--text"]]
    {
        kvsieve(arguments).arg(&name).assert().code(2).stderr(predicate::str::contains(".txt' is not UTF-8"));
    }
}

#[test]
fn a_number_of_threads_in_the_environment_must_be_one() {
    kvsieve(&["doctor"])
        .env("RAYON_NUM_THREADS", "abc")
        .assert()
        .code(2)
        .stderr(predicate::str::contains("RAYON_NUM_THREADS is 'abc'; it must be a whole number from 1 to 1024"));
    kvsieve(&["doctor"]).env("RAYON_NUM_THREADS", "0").assert().success();
}

#[test]
fn without_a_command_the_help_is_shown_and_the_status_is_2() {
    kvsieve(&[]).assert().code(2).stderr(predicate::str::contains("Usage: kvsieve <COMMAND>"));
}

#[test]
fn a_reader_that_stops_reading_is_no_error() {
    for arguments in [&["list", "kernels"][..], &["doctor"], &["completions", "bash"], &["--help"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let child = std::process::Command::new(assert_cmd::cargo::cargo_bin("kvsieve"))
            .args(arguments)
            .stdout(writer)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {:?}", output.status);
        assert!(output.stderr.is_empty(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = std::process::Command::new(assert_cmd::cargo::cargo_bin("kvsieve"))
        .args(["list", "kernels"])
        .stdout(full)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.starts_with("error: cannot write to standard output: ") && stderr.lines().count() == 1, "{stderr}");
}
