//! `kvsieve run` and `kvsieve report` as their users meet them: results that survive a kill, and one line for every
//! mistake.

use crate::common::tensor;
use kvsieve::tensor::DType;
use kvsieve::tensor::file::{self, Output};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Three cells that take no time.
pub const SMALL: &str = r#"name = "x"
[timing]
min_rounds = 1
max_rounds = 2
[[grid]]
measure = "evict"
heads = "4/2"
head_dim = 32
context_tokens = 256
new_tokens = 4
policy = ["full", "knorm"]
budget = [0.25, 0.5]
"#;

/// A folder with an experiment `x.toml` and room for results in `out`.
pub struct Desk {
    pub folder: TempDir,
}

impl Desk {
    pub fn with(experiment: &str) -> Self {
        let desk = Desk { folder: tempfile::tempdir().unwrap() };
        fs::write(desk.path("x.toml"), experiment).unwrap();
        desk
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvsieve"));
        command.current_dir(self.folder.path()).args(arguments).stdin(Stdio::null());
        command
    }

    /// Runs a command that must succeed, silent on stderr; returns what it printed.
    pub fn works(&self, arguments: &[&str]) -> String {
        let output = self.command(arguments).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), stderr.as_str()), (Some(0), ""), "{arguments:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a command that must end with `status` and one line on stderr, which is returned.
    pub fn fails(&self, arguments: &[&str], status: i32) -> String {
        let output = self.command(arguments).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {stderr}");
        assert!(stderr.starts_with("error: ") && stderr.ends_with('\n'), "{arguments:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{arguments:?}: {stderr}");
        stderr
    }

    /// As [`Desk::fails`] with status 2, and nothing printed or written.
    pub fn refuses(&self, arguments: &[&str]) -> String {
        let before = names(self.folder.path());
        let stderr = self.fails(arguments, 2);
        assert_eq!(names(self.folder.path()), before, "{arguments:?}: left something behind");
        stderr
    }

    /// Runs `x.toml` into `out` and returns the folder of the run.
    pub fn run(&self, options: &[&str]) -> PathBuf {
        self.works(&[&["run", "x.toml", "--out", "out"], options].concat());
        self.only_run()
    }

    pub fn only_run(&self) -> PathBuf {
        let runs = names(&self.path("out/x"));
        assert_eq!(runs.len(), 1, "{runs:?}");
        self.path("out/x").join(runs.first().unwrap())
    }
}

/// Names in a folder.
pub fn names(folder: &Path) -> BTreeSet<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

pub fn cells(run: &Path) -> Vec<u8> {
    fs::read(run.join("cells.jsonl")).unwrap()
}

pub fn records(text: &[u8]) -> Vec<Value> {
    let whole = text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    whole.map(|line| serde_json::from_slice(line).unwrap()).collect()
}

/// Every file below a folder with its bytes.
pub fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(files(&path)),
            false => {
                found.insert(path.clone(), fs::read(&path).unwrap());
            }
        }
    }
    found
}

#[test]
fn a_run_leaves_records_figures_and_a_page() {
    let desk = Desk::with(SMALL);
    let shown = desk.works(&["run", "x.toml", "--out", "out"]);
    let run = desk.only_run();
    assert!(shown.contains("3 cells: 3 ok, 0 oom, 0 skipped, 0 failed"), "{shown}");
    assert!(shown.contains("report: out/x/"), "{shown}");
    let expected = ["cells.jsonl", "config.toml", "env.json", "plots", "report.html", "summary.md"];
    assert_eq!(names(&run), BTreeSet::from(expected.map(String::from)));
    let plots = names(&run.join("plots"));
    let svg: Vec<&String> = plots.iter().filter(|name| name.ends_with(".svg")).collect();
    assert!(!svg.is_empty());
    for name in svg {
        assert!(plots.contains(&name.replace(".svg", ".csv")), "{plots:?}");
    }
    let records = records(&cells(&run));
    assert_eq!(records.len(), 3);
    for record in &records {
        assert_eq!((&record["status"], &record["schema"]), (&"ok".into(), &"kvsieve/cell/v3".into()));
        assert_eq!(record["memory"]["residual_bytes"], 0);
        assert_eq!(record["repro"], "kvsieve run x.toml");
        assert_eq!(record["run_id"], run.file_name().unwrap().to_str().unwrap());
    }
    let environment: Value = serde_json::from_slice(&fs::read(run.join("env.json")).unwrap()).unwrap();
    assert!(environment["machine"]["cores"].as_u64().unwrap() > 0);
    // The configuration that is kept is an experiment itself: that of the run.
    fs::copy(run.join("config.toml"), desk.path("x.toml")).unwrap();
    let before = cells(&run);
    assert_eq!(desk.run(&["--resume"]), run);
    assert_eq!(cells(&run), before);
}

#[test]
fn json_prints_a_record_on_each_line_and_nothing_else() {
    let desk = Desk::with(SMALL);
    let shown = desk.works(&["run", "x.toml", "--out", "out", "--json", "-"]);
    assert_eq!(shown.as_bytes(), cells(&desk.only_run()));
    assert_eq!(shown.lines().count(), 3);
}

#[test]
fn a_dry_run_lists_the_cells_and_writes_nothing() {
    let desk = Desk::with(SMALL);
    let shown = desk.works(&["run", "x.toml", "--out", "out", "--dry-run"]);
    assert!(shown.contains("evict tiled 4/2 D 32 knorm@0.25 f32 256"), "{shown}");
    assert!(shown.contains("3 cells, 0 of them over the limit"), "{shown}");
    let shown = desk.works(&["run", "x.toml", "--dry-run", "--limit-memory", "64KiB"]);
    assert!(shown.contains("3 cells, 3 of them over the limit of 64.0 KiB"), "{shown}");
    assert_eq!(names(desk.folder.path()), BTreeSet::from(["x.toml".to_string()]));
    // The installed program needs no file: the default experiment comes with it.
    fs::remove_file(desk.path("x.toml")).unwrap();
    assert!(desk.works(&["run", "--dry-run"]).contains("forward naive 8/8 f32 512"));
    assert!(names(desk.folder.path()).is_empty());
}

#[test]
fn a_report_is_drawn_again_from_the_records_alone() {
    let desk = Desk::with(SMALL);
    let run = desk.run(&[]);
    let before = files(&run);
    fs::remove_dir_all(run.join("plots")).unwrap();
    fs::remove_file(run.join("report.html")).unwrap();
    fs::remove_file(run.join("summary.md")).unwrap();
    let shown = desk.works(&["report", run.to_str().unwrap()]);
    assert!(shown.contains("figures\nreport: "), "{shown}");
    let after = files(&run);
    assert_eq!(after.keys().collect::<Vec<_>>(), before.keys().collect::<Vec<_>>());
    for (path, bytes) in &before {
        assert!(after[path] == *bytes, "{} differs", path.display());
    }
    desk.works(&["report", run.to_str().unwrap(), "--out", "a/b"]);
    assert!(desk.path("a/b/report.html").exists());
    assert!(files(&run) == before);
}

#[test]
fn shards_hold_whole_comparisons_and_make_one_report() {
    let lengths = "context_tokens = [256, 192, 128, 64]";
    let desk = Desk::with(&SMALL.replace("context_tokens = 256", lengths));
    for shard in ["1/2", "2/2"] {
        desk.works(&["run", "x.toml", "--out", "out", "--shard", shard]);
    }
    let runs: Vec<String> = names(&desk.path("out/x")).iter().map(|name| format!("out/x/{name}")).collect();
    assert_eq!(runs.len(), 2);
    let lengths_of = |run: &String| -> Vec<u64> {
        let records = records(&cells(&desk.path(run)));
        let mut lengths: Vec<_> =
            records.iter().map(|record| record["cell"]["context_tokens"].as_u64().unwrap()).collect();
        lengths.sort_unstable();
        lengths
    };
    // `full` and `knorm` at two budgets for each length, never apart; the longest is more work than all others together.
    assert_eq!(lengths_of(&runs[0]), [256; 3]);
    assert_eq!(lengths_of(&runs[1]), [[64; 3], [128; 3], [192; 3]].concat());
    desk.works(&["report", &runs[0], &runs[1], "--out", "both"]);
    let summary = fs::read_to_string(desk.path("both/summary.md")).unwrap();
    assert!(summary.starts_with("# x\n"), "{summary}");
    assert_eq!(summary.lines().filter(|line| line.starts_with("| knorm")).count(), 8, "{summary}");
}

/// The same experiment twice is compared, not merged; a byte more is a change, and an exit status for scripts.
#[test]
fn two_runs_of_the_same_cells_are_compared() {
    let desk = Desk::with(SMALL);
    for out in ["before", "after"] {
        desk.works(&["run", "x.toml", "--out", out]);
    }
    let folder = |out: &str| format!("{out}/x/{}", names(&desk.path(&format!("{out}/x"))).first().unwrap());
    let (before, after) = (folder("before"), folder("after"));
    let shown = desk.works(&["report", &before, &after, "--out", "both"]);
    let kept = fs::read_to_string(desk.path("both/comparison.md")).unwrap();
    assert!(kept.contains("3 cells in both") && shown.contains(&kept), "{shown}");
    let path = desk.path(&after).join("cells.jsonl");
    let mut changed = records(&cells(&desk.path(&after)));
    for record in &mut changed {
        record["memory"]["peak_bytes"] = (record["memory"]["peak_bytes"].as_u64().unwrap() + 64).into();
    }
    let lines: String = changed.iter().map(|record| format!("{record}\n")).collect();
    fs::write(&path, lines).unwrap();
    let output = desk.command(&["report", &before, &after, "--out", "both", "--check"]).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("error: 3 of 3 cells changed beyond noise"), "{stderr}");
    assert!(stdout.contains("1.00x *"), "{stdout}");
    assert!(desk.refuses(&["report", &before, "--check"]).contains("--check compares two runs"));
}

#[test]
fn cells_that_do_not_fit_are_no_error_and_cells_that_fail_are() {
    let desk = Desk::with(SMALL);
    let shown = desk.works(&["run", "x.toml", "--out", "out", "--limit-memory", "64KiB"]);
    assert!(shown.contains("3 cells: 0 ok, 3 oom, 0 skipped, 0 failed"), "{shown}");
    // Scores that overflow f32 give outputs that are no numbers.
    let values: Vec<f32> = (0..64).map(|index| [1e20, 1e20, 0.0, -1e20][index % 4] * (1.0 + index as f32)).collect();
    let large = tensor(DType::F32, [1, 1, 16, 4], &values);
    let outputs = ["q", "k", "v"].map(|name| Output::tensor(name, &large));
    file::write(&desk.path("in.safetensors"), &outputs).unwrap();
    let text =
        "name = \"x\"\n[file]\npath = \"in.safetensors\"\n[[grid]]\nmeasure = \"forward\"\ncontext_tokens = [16]\n";
    fs::write(desk.path("x.toml"), text).unwrap();
    let stderr = desk.fails(&["run", "x.toml", "--out", "failed"], 1);
    assert!(stderr.contains("1 of the cells failed; the first is 'forward tiled 1/1 D 4 f32 16': "), "{stderr}");
    let run = desk.path("failed/x").join(names(&desk.path("failed/x")).first().unwrap());
    assert_eq!(records(&cells(&run))[0]["status"], "failed");
}

#[test]
fn an_experiment_over_a_file_takes_all_of_it_names_it_and_doubts_a_layout_that_looks_exchanged() {
    let desk = Desk::with(SMALL);
    let text = "name = \"x\"\n[file]\npath = \"in.safetensors\"\n[[grid]]\nmeasure = \"evict\"\npolicy = \"knorm\"\n\
                budget = 0.5\nnew_tokens = 4\n";
    fs::write(desk.path("x.toml"), text).unwrap();
    for (dims, swapped) in [([1, 2, 20, 4], false), ([1, 20, 16, 4], true)] {
        let values: Vec<f32> = (0..dims.iter().product()).map(|x: usize| (x * 37 % 64) as f32 / 32.0 - 1.0).collect();
        let given = tensor(DType::F32, dims, &values);
        let outputs = ["q", "k", "v"].map(|name| Output::tensor(name, &given));
        file::write(&desk.path("in.safetensors"), &outputs).unwrap();
        let output = desk.command(&["run", "x.toml", "--out", "out"]).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        assert_eq!(stderr.contains("warning: 'in.safetensors': 20 heads of 16 tokens"), swapped, "{stderr}");
        let run = desk.path("out/x").join(names(&desk.path("out/x")).last().unwrap());
        assert_eq!(records(&cells(&run))[0]["cell"]["context_tokens"], dims[2] - 4);
        assert!(fs::read_to_string(run.join("report.html")).unwrap().contains("Inputs are those of in.safetensors."));
        fs::remove_dir_all(desk.path("out")).unwrap();
        let args = ["attend", "--input", "in.safetensors", "--output", "o.safetensors"];
        let attend = desk.command(&args).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&attend.stderr).contains("are these axes exchanged?"), swapped);
    }
    // Of a file of `kvsieve capture` the sequences are layers.
    let given = tensor(DType::F32, [2, 2, 20, 4], &[0.5; 320]);
    let outputs = ["q", "k", "v"].map(|name| Output::tensor(name, &given));
    let metadata = [("layers".to_string(), "0,3".to_string())].into();
    file::write_with(&desk.path("in.safetensors"), &outputs, Some(metadata)).unwrap();
    desk.works(&["run", "x.toml", "--out", "out"]);
    let run = desk.path("out/x").join(names(&desk.path("out/x")).last().unwrap());
    let cell = &records(&cells(&run))[0]["cell"];
    assert_eq!((&cell["layers"], &cell["batch"]), (&2.into(), &1.into()));
    let short = text.replace("new_tokens = 4", "new_tokens = 20");
    fs::write(desk.path("x.toml"), short).unwrap();
    assert!(desk.refuses(&["run", "x.toml"]).contains("the file has 20 tokens, and 20 are decoded"));
}

#[test]
fn every_wrong_value_of_an_experiment_is_named_in_one_line() {
    // What is replaced in the experiment, by what, and what the error says.
    let cases: &[(&str, &str, &str)] = &[
        ("head_dim = 32", "head_dims = 32", "error: x.toml:8:1: unknown field `head_dims`"),
        ("min_rounds = 1", "min_round = 1", "error: x.toml:3:1: unknown field `min_round`"),
        ("name = \"x\"", "nam = \"x\"", "error: x.toml:1:1: unknown field `nam`"),
        ("name = \"x\"", "name = \"../x\"", "name is '../x'; use lower-case letters"),
        ("name = \"x\"", "name = \"\"", "name is ''"),
        ("name = \"x\"", "name = \"x\"\nname = \"y\"", "x.toml:2:1: duplicate key"),
        ("name = \"x\"", "name = \"x\"\nlimit_memory = \"8\"", "limit_memory: '8' is not an amount of memory"),
        ("[[grid]]", "[[grid]", "x.toml:5:"),
        ("\"knorm\"", "\"knrm\"", "x.toml: grid 1 (evict): unknown policy 'knrm'; did you mean 'knorm'"),
        ("\"knorm\"", "\"knorm:window=3\"", "'knorm' has no parameter 'window'; it has none"),
        ("\"knorm\"", "3", "x.toml:11:19: "),
        ("budget = [0.25, 0.5]\n", "", "policy 'knorm' needs a budget; write budget = [0.25, 0.5]"),
        ("[0.25, 0.5]", "0", "x.toml:12:10: '0' is not a budget"),
        ("[0.25, 0.5]", "-1", "x.toml:12:10: '-1' is not a budget"),
        ("[0.25, 0.5]", "nan", "x.toml:12:10: 'NaN' is not a budget"),
        ("[0.25, 0.5]", "1.5", "x.toml:12:10: '1.5' is not a budget"),
        ("[0.25, 0.5]", "\"much\"", "x.toml:12:10: 'much' is not a budget"),
        ("[0.25, 0.5]", "0.001", "budget 0.001 leaves no token of 256 in a KV head"),
        ("[0.25, 0.5]", "\"100B\"", "budget 100B leaves no token of 256"),
        ("\"knorm\"]\nbudget = [0.25, 0.5]", "\"streaming-llm\"]\nbudget = 4", "keeps 4 sinks and needs at least 5"),
        ("policy = [\"full\", \"knorm\"]\n", "", "policy is missing; write policy = "),
        ("policy = [\"full\", \"knorm\"]", "policy = []", "x.toml:11:10: the list is empty"),
        ("\"evict\"", "\"sideways\"", "x.toml:6:11: unknown measure 'sideways'; known are forward"),
        ("\"evict\"", "\"forward\"", "budget belongs to measure = \"evict\" or \"eval\", not to \"forward\""),
        ("\"4/2\"", "\"3/2\"", "3 query heads cannot share 2 KV heads evenly"),
        ("\"4/2\"", "\"4\"", "heads is '4'; write query heads / KV heads such as \"8/2\""),
        ("\"4/2\"", "\"4/0\"", "heads is '4/0'"),
        ("\"4/2\"", "4", "x.toml:7:9: heads = 4: invalid type: integer `4`"),
        ("heads = \"4/2\"\n", "", "heads are missing"),
        ("head_dim = 32", "head_dim = 0", "head dim is 0; every extent must be at least 1"),
        ("head_dim = 32", "head_dim = 300", "head dim is 300; at most 256"),
        ("head_dim = 32", "head_dim = 31", "head dim is 31; it must be an even number of at least 8"),
        ("head_dim = 32", "head_dim = -1", "x.toml:8:12: head_dim = -1: invalid value: integer `-1`"),
        ("context_tokens = 256", "context_tokens = 0", "x.toml:9:18: '0' is not a token count"),
        ("context_tokens = 256", "context_tokens = \"2k..1k*2\"", "x.toml:9:18: '2k..1k*2' is not a range"),
        ("context_tokens = 256", "context_tokens = \"10m\"", "rope_theta must be at least"),
        ("context_tokens = 256\n", "", "context_tokens is missing; write context_tokens = "),
        ("new_tokens = 4", "new_tokens = 0", "new_tokens is 0; at least 1 decode step"),
        ("new_tokens = 4", "batch = 0", "batch is 0; every extent must be at least 1"),
        ("new_tokens = 4", "layers = 1000000", "layers is 1000000; it must be from 1 to 1024"),
        ("new_tokens = 4", "dtype = \"f64\"", "x.toml:10:9: "),
        ("new_tokens = 4", "kernel = \"flash\"", "unknown kernel 'flash'; there are reference, naive, tiled, decode"),
        ("new_tokens = 4", "kernel = \"tiled:br=0\"", "tiled: br is '0'"),
        ("new_tokens = 4", "seed = -1", "x.toml:10:8: seed = -1: invalid value: integer `-1`"),
        ("new_tokens = 4", "causal = false", "eviction is measured with a causal mask and without a window"),
        ("new_tokens = 4", "window = 9", "eviction is measured with a causal mask and without a window"),
        ("new_tokens = 4", "softcap = 0", "soft-cap is 0; it must be finite and above 0"),
        ("max_rounds = 2", "max_rounds = 0", "timing: min_rounds is 1, max_rounds 0"),
        ("max_rounds = 2", "cap_s = nan", "cap_s NaN (seconds, above 0)"),
        ("[timing]", "[synthetic]\nsinks = 0\n[timing]", "workload: sinks is 0; it must be between 1 and 64"),
        ("[timing]", "[synthetic]\nneedle = 1\n[timing]", "x.toml:2:1: unknown field `needle`"),
        ("[timing]", "[file]\npath = \"a\"\n[synthetic]\n[timing]", "both [file] and [synthetic] are given"),
        ("[timing]", "[file]\npath = \"a\"\n[timing]", "cannot read 'a': No such file"),
        ("[timing]", "[file]\npath = \"x.toml\"\n[timing]", "'x.toml' is not a valid safetensors file"),
        ("[timing]", "[file]\npath = \"in.safetensors\"\n[timing]", "come from the tensor file; leave them out"),
        (
            "[timing]\nmin_rounds = 1\nmax_rounds = 2\n[[grid]]\nmeasure = \"evict\"\nheads = \"4/2\"\nhead_dim = 32\n",
            "[file]\npath = \"in.safetensors\"\n[[grid]]\nmeasure = \"evict\"\n",
            "has 20 tokens; needed: 256 and 4 new; shorten the context",
        ),
    ];
    let desk = Desk::with(SMALL);
    let small = tensor(DType::F32, [1, 1, 20, 4], &[0.5; 80]);
    file::write(&desk.path("in.safetensors"), &["q", "k", "v"].map(|name| Output::tensor(name, &small))).unwrap();
    for (from, to, expected) in cases {
        assert!(SMALL.contains(from), "{from}");
        fs::write(desk.path("x.toml"), SMALL.replacen(from, to, 1)).unwrap();
        let stderr = desk.refuses(&["run", "x.toml", "--out", "out"]);
        assert!(stderr.contains(expected), "{to}: expected '{expected}' in: {stderr}");
        assert_eq!(desk.refuses(&["run", "x.toml", "--dry-run"]), stderr, "a dry run says the same");
    }
    for (bytes, expected) in [(&b""[..], "missing field `name`"), (b"\xff\xfe", "cannot read experiment 'x.toml'")] {
        fs::write(desk.path("x.toml"), bytes).unwrap();
        let stderr = desk.refuses(&["run", "x.toml", "--out", "out"]);
        assert!(stderr.contains(expected), "{stderr}");
    }
}

#[test]
fn every_wrong_option_is_named_in_one_line() {
    let desk = Desk::with(SMALL);
    fs::create_dir(desk.path("empty")).unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&["run", "none.toml"], "neither a file nor a shipped one; `kvsieve list experiments` lists what is shipped"),
        (&["run", "quickstrt"], "near it are quickstart"),
        (&["run", "empty"], "cannot read experiment 'empty'"),
        (&["run", "x.toml", "none.toml"], "there is no experiment 'none.toml'"),
        (&["run", "x.toml", "--device", "cuda:x"], "unknown device 'cuda:x'; use cpu or cuda[:N]"),
        (&["run", "x.toml", "--device", "tpu"], "unknown device 'tpu'"),
        (&["run", "x.toml", "--threads", "0"], "0 threads asked; 1 to 1024 are possible"),
        (&["run", "x.toml", "--shard", "0/4"], "'0/4' is not a shard; write I/N with 1 <= I <= N, such as 1/4"),
        (&["run", "x.toml", "--shard", "5/4"], "'5/4' is not a shard"),
        (&["run", "x.toml", "--shard", "1"], "'1' is not a shard"),
        (&["run", "x.toml", "--shard", "-1/2"], "unexpected argument '-1' found"),
        (&["run", "x.toml", "--shard", "1/0"], "'1/0' is not a shard"),
        (&["run", "x.toml", "--limit-memory", "8"], "'8' is not an amount of memory; write 8GiB"),
        (&["run", "x.toml", "--limit-memory", "-8GiB"], "unexpected argument '-8' found"),
        (&["run", "x.toml", "--limit-memory", "0GiB"], "'0GiB' is not an amount of memory"),
        (&["run", "x.toml", "--json", "records"], "invalid value 'records' for '--json <->'"),
        (&["run", "x.toml", "--dryrun"], "unexpected argument '--dryrun' found"),
        (&["report"], "<DIR>..."),
        (&["report", "none"], "cannot read 'none/cells.jsonl': No such file"),
        (&["report", "empty"], "; name a run's own folder, results/NAME/TIME-HASH-REVISION"),
        (&["report", "empty", "--out", "new"], "cannot read 'empty/cells.jsonl'"),
        (&["report", "x.toml"], "cannot read 'x.toml/cells.jsonl'"),
    ];
    for (arguments, expected) in cases {
        let stderr = desk.refuses(arguments);
        assert!(stderr.contains(expected), "{arguments:?}: expected '{expected}' in: {stderr}");
    }
    // A second experiment that means nothing stops the first one before it starts.
    fs::write(desk.path("y.toml"), SMALL.replace("4/2", "3/2")).unwrap();
    assert!(desk.refuses(&["run", "x.toml", "y.toml", "--out", "out"]).contains("y.toml: grid 1"));
    fs::write(desk.path("y.toml"), SMALL.replace("head_dim = 32", "head_dim = 31")).unwrap();
    assert!(desk.refuses(&["run", "x.toml", "y.toml", "--out", "out"]).contains("head dim is 31"));
}

#[test]
fn a_record_whose_parts_do_not_fit_together_is_damaged() {
    let desk = Desk::with(&SMALL.replace("head_dim = 32", "head_dim = 32\nlayers = 2"));
    let run = desk.run(&[]);
    let (folder, path) = (run.to_str().unwrap(), run.join("cells.jsonl"));
    let whole = records(&cells(&run));
    let at = whole.iter().position(|record| record["cell"]["policy"] == "knorm").unwrap();
    type Change = fn(&mut Value);
    let cases: [(Change, &str); 6] = [
        (|record| drop(take(record, "kept_by_position").pop()), "kept_by_position has 3 lists; the cell has 2 x 2"),
        (
            |record| drop(take(record, "kept_by_position")[1].as_array_mut().unwrap().pop()),
            "kept_by_position has 63 bins in a list; the cell needs 64",
        ),
        (|record| drop(take(record, "kept_by_head").pop()), "kept_by_head has 1 layers; the cell needs 2"),
        (
            |record| take(record, "drift_by_head")[1] = serde_json::json!([0.5]),
            "drift_by_head has 1 heads in a layer; the cell needs 4",
        ),
        (|record| record["cell"]["kv_heads"] = 0.into(), "it evicts with 2 layers and 0 KV heads"),
        (|record| record["eviction"]["steps"] = 7.into(), "invalid type: integer `7`"),
    ];
    for (change, expected) in cases {
        let mut records = whole.clone();
        change(&mut records[at]);
        fs::write(&path, records.iter().map(|record| format!("{record}\n")).collect::<String>()).unwrap();
        for more in [&[][..], &["--per-head"]] {
            let stderr = desk.refuses(&[&["report", folder], more].concat());
            assert!(stderr.contains(&format!("cells.jsonl' line {} is not a record: ", at + 1)), "{stderr}");
            assert!(stderr.contains(expected), "{stderr}");
        }
    }
}

/// A list of a record's eviction.
fn take<'r>(record: &'r mut Value, field: &str) -> &'r mut Vec<Value> {
    record["eviction"][field].as_array_mut().unwrap()
}

#[test]
fn a_budget_of_nothing_but_protected_tokens_warns_in_record_and_tables() {
    let desk = Desk::with(&SMALL.replace("\"knorm\"", "\"snapkv:window=64\""));
    let printed = desk.works(&["run", "x.toml", "--out", "out"]);
    let run = desk.only_run();
    let warning = "nothing but protected tokens stays: the budget is 64 tokens a head, and 0 first and 64 latest ones come \
                   before all others";
    for record in records(&cells(&run)) {
        let expected =
            if record["cell"]["budget"] == "0.25" { serde_json::json!([warning]) } else { serde_json::json!([]) };
        assert_eq!(record["warnings"], expected, "{}", record["cell"]);
    }
    let summary = fs::read_to_string(run.join("summary.md")).unwrap();
    for text in [&printed, &summary] {
        assert!(text.contains("| 0.25 ! |") && !text.contains("0.5 ! |"), "{text}");
        assert!(
            text.split_whitespace().collect::<Vec<_>>().join(" ").contains(&format!("! 1 cell: {warning}")),
            "{text}"
        );
    }
}

#[test]
fn a_place_that_takes_no_results_is_refused_before_the_work() {
    let desk = Desk::with(SMALL);
    let no_folder = "--out 'x.toml/below/x': 'x.toml' is not a folder";
    let mut places = vec![("x.toml/below", no_folder)];
    if cfg!(target_os = "linux") {
        // Nobody, not even root, makes folders in /proc.
        places.push(("/proc/results", "cannot write --out '/proc/results/x'"));
    }
    for &(place, expected) in &places {
        for more in [&[][..], &["--resume"], &["--find-max-context"]] {
            let stderr = desk.refuses(&[&["run", "x.toml", "--out", place], more].concat());
            assert!(stderr.contains(expected), "{stderr}");
        }
        // Nothing is written by a dry run.
        desk.works(&["run", "x.toml", "--out", place, "--dry-run"]);
        for (command, name) in [(&["eval", "--out", place][..], "eval"), (&["train", "--out", place], "")] {
            let stderr = desk.refuses(command);
            let place = if name.is_empty() { place.to_string() } else { format!("{place}/{name}") };
            assert!(stderr.contains("--out '") && stderr.contains(&format!("'{place}'")), "{stderr}");
        }
    }
    let run = desk.run(&[]);
    let stderr = desk.refuses(&["report", run.to_str().unwrap(), "--out", "x.toml/below"]);
    assert!(stderr.contains("--out 'x.toml/below': 'x.toml' is not a folder"), "{stderr}");
}
