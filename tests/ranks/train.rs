//! `kvsieve train --ranks` as a user meets it: on threads of one process, and where kvsieve is built with MPI and `mpirun` is there, on
//! processes.

#[cfg(feature = "mpi")]
use crate::mpi;
use assert_cmd::Command;
use safetensors::SafeTensors;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

const RECIPE: &str = r#"
name = "tiny"
seed = 3
recompute = "selective"
[model]
hidden = 32
layers = 2
q_heads = 4
kv_heads = 2
head_dim = 8
ffn = 48
max_positions = 256
rope_theta = 10000.0
norm_eps = 1e-5
[optimizer]
learning_rate = 1e-3
warmup_steps = 2
final_share = 0.1
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
eps = 1e-8
clip = 1.0
[data]
text_weight = 0.1
sources = [{ source = "recall:queries=8", share = 1.0 }, { source = "needles", share = 1.0 }]
[[stages]]
length = 64
batch = 4
steps = 4
[evaluation]
every_steps = 4
samples = 8
tasks = ["recall"]
lengths = [64]
log_steps = 1
save_steps = 2
"#;

/// Longer than any run here takes.
const DEADLINE: Duration = Duration::from_secs(100);

fn recipe(folder: &Path) -> PathBuf {
    let path = folder.join("tiny.toml");
    fs::write(&path, RECIPE).unwrap();
    path
}

fn args(folder: &Path, out: &str, more: &[&str]) -> Vec<String> {
    let path = |name: &str| folder.join(name).display().to_string();
    let mut args = vec!["train".into(), path("tiny.toml"), "--out".into(), path(out), "--threads".into(), "1".into()];
    args.extend(more.iter().map(ToString::to_string));
    args
}

fn kvsieve() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvsieve"));
    command.timeout(DEADLINE);
    command
}

fn train(folder: &Path, out: &str, more: &[&str]) -> PathBuf {
    kvsieve().args(args(folder, out, more)).assert().success();
    folder.join(out)
}

fn losses(out: &Path) -> Vec<f64> {
    let text = fs::read_to_string(out.join("training.jsonl")).unwrap();
    let loss = |line: &str| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64();
    text.lines().filter_map(loss).collect()
}

/// Weights and both averages in a run's checkpoint.
fn state(out: &Path) -> Vec<Vec<u8>> {
    let bytes = fs::read(out.join("checkpoint.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    ["weights", "mean", "square"].map(|name| tensors.tensor(name).unwrap().data().to_vec()).into()
}

/// Bytes of each rank are what the shapes say.
fn assert_as_predicted(out: &Path, ranks: u64, transport: &str) {
    let record: Value = serde_json::from_slice(&fs::read(out.join("training.json")).unwrap()).unwrap();
    assert_eq!((&record["ranks"], &record["transport"]), (&ranks.into(), &transport.into()));
    let memory = record["memory"].as_array().unwrap();
    assert_eq!(memory.len() as u64, ranks);
    for (rank, of_rank) in memory.iter().enumerate() {
        assert_eq!(of_rank["rank"], rank);
        assert_eq!(of_rank["predicted_bytes"], of_rank["peak_bytes"], "rank {rank}");
        assert_eq!(of_rank["predicted_sent_bytes"], of_rank["sent_bytes"], "rank {rank}");
        assert_eq!(of_rank["sent_bytes"].as_u64().unwrap() > 0, ranks > 1);
    }
}

fn assert_near(one: &Path, shared: &Path) {
    let (one, shared) = (losses(one), losses(shared));
    assert_eq!((one.len(), shared.len()), (4, 4));
    for (a, b) in one.iter().zip(&shared) {
        assert!(((a - b) / a).abs() < 1e-5, "{one:?} {shared:?}");
    }
}

#[test]
fn ranks_that_are_threads_train_as_one_and_each_stage_as_any_other() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    recipe(folder);
    let one = train(folder, "one", &[]);
    let four = train(folder, "four", &["--ranks", "4", "--zero", "1"]);
    assert_as_predicted(&four, 4, "threads");
    let whole = train(folder, "whole", &["--ranks", "2"]);
    let shared = train(folder, "shared", &["--ranks", "2", "--zero", "3"]);
    for out in [&four, &whole, &shared] {
        assert_near(&one, out);
    }
    assert_as_predicted(&shared, 2, "threads");
    // Stopped in one stage and resumed in another, with the averages in a file.
    train(folder, "resumed", &["--ranks", "2", "--zero", "1", "--steps", "2"]);
    let resumed = train(folder, "resumed", &["--ranks", "2", "--zero", "2", "--offload", "optimizer", "--resume"]);
    for out in [&shared, &resumed] {
        assert!(state(&whole) == state(out), "{} differs", out.display());
        assert!(fs::read(whole.join("model.safetensors")).unwrap() == fs::read(out.join("model.safetensors")).unwrap());
    }
    // Two pairs of ranks, of which each pair shares blocks; resumed on one rank.
    train(folder, "pairs", &["--ranks", "4", "--tensor-parallel", "2", "--zero", "3", "--steps", "3"]);
    assert_as_predicted(&folder.join("pairs"), 4, "threads");
    assert_near(&one, &train(folder, "pairs", &["--resume"]));
}

#[test]
fn ranks_go_on_with_a_model_that_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (head, rest) = RECIPE.split_once("[model]").unwrap();
    let (_, rest) = rest.split_once("[optimizer]").unwrap();
    let recipe = format!("{head}frozen = ['layers.*.mlp']\n[model]\nfrom = 'builtin'\n[optimizer]{rest}");
    fs::write(folder.join("tiny.toml"), recipe.replace("samples = 8", "samples = 2")).unwrap();
    let one = train(folder, "one", &["--steps", "1"]);
    for (out, more) in [("parts", ["--zero", "3"]), ("shared", ["--tensor-parallel", "2"])] {
        let out = train(folder, out, &[&["--ranks", "2", "--steps", "1"][..], &more].concat());
        assert_as_predicted(&out, 2, "threads");
        let (one, shared) = (losses(&one)[0], losses(&out)[0]);
        assert!(((one - shared) / one).abs() < 1e-5 && one < 2.0, "{one} {shared}");
    }
}

#[test]
fn what_cannot_be_shared_is_one_line_and_status_2() {
    let folder = tempfile::tempdir().unwrap();
    recipe(folder.path());
    let cases: [(&[&str], &str); 10] = [
        (&["--zero", "3"], "--zero 3 shares things out to ranks; give --ranks N"),
        (&["--steps", "0"], "--steps is 0; it must be at least 1"),
        (&["--ranks", "3"], "a stage's batch is 4; 3 ranks need a multiple of 3 sequences"),
        (&["--ranks", "0"], "write 1 to 64 (threads of this process), or under mpirun mpi"),
        (&["--ranks", "many"], "write 1 to 64"),
        (&["--ranks", "2", "--zero", "4"], "'4' for '--zero <0-3>'"),
        (&["--ranks", "2", "--offload", "weights"], "possible values: optimizer"),
        (&["--ranks", "4", "--tensor-parallel", "3"], "4 ranks cannot share blocks 3 at a time"),
        (
            &["--ranks", "4", "--tensor-parallel", "4"],
            "the model has 2 KV heads; --tensor-parallel 4 needs a multiple of 4",
        ),
        (&["--ranks", "2", "--resume"], "holds no checkpoint.safetensors to go on from"),
    ];
    for (more, words) in cases {
        let done = kvsieve().args(args(folder.path(), "out", more)).assert().code(2);
        let said = String::from_utf8(done.get_output().stderr.clone()).unwrap();
        assert!(said.contains(words) && said.lines().count() == 1, "{more:?}: {said}");
    }
    for (more, words) in [(&["--ranks", "2"][..], "started 4; write --ranks mpi"), (&[], "each would train alone")] {
        let mut command = kvsieve();
        command.env("OMPI_COMM_WORLD_SIZE", "4");
        let done = command.args(args(folder.path(), "out", more)).assert().code(2);
        let said = String::from_utf8(done.get_output().stderr.clone()).unwrap();
        assert!(said.contains(words) && said.lines().count() == 1, "{said}");
    }
}

#[cfg(feature = "mpi")]
mod processes {
    use super::*;

    fn mpirun(ranks: usize) -> Command {
        mpi::mpirun(ranks, DEADLINE)
    }

    fn said(assert: &assert_cmd::assert::Assert) -> String {
        String::from_utf8(assert.get_output().stderr.clone()).unwrap()
    }

    #[test]
    fn ranks_that_are_processes_train_with_the_bits_of_threads() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        recipe(folder);
        let threads = train(folder, "threads", &["--ranks", "2", "--zero", "3"]);
        let more = ["--ranks", "mpi", "--zero", "3"];
        mpirun(2).arg(env!("CARGO_BIN_EXE_kvsieve")).args(args(folder, "mpi", &more)).assert().success();
        assert_as_predicted(&folder.join("mpi"), 2, "mpi");
        assert!(state(&threads) == state(&folder.join("mpi")));
        let more = ["--ranks", "mpi", "--tensor-parallel", "2"];
        mpirun(4).arg(env!("CARGO_BIN_EXE_kvsieve")).args(args(folder, "pairs", &more)).assert().success();
        assert_as_predicted(&folder.join("pairs"), 4, "mpi");
        assert_near(&threads, &folder.join("pairs"));
    }

    #[test]
    fn ranks_with_different_arguments_are_refused_and_a_wrong_recipe_is_said_once() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let missing =
            mpirun(2).arg(env!("CARGO_BIN_EXE_kvsieve")).args(args(folder, "o", &["--ranks", "mpi"])).assert();
        let missing = said(&missing.code(2));
        assert!(missing.matches("error: ").count() == 1 && missing.contains("rank 0 of 2"), "{missing}");
        recipe(folder);
        let done = mpirun(1)
            .arg(env!("CARGO_BIN_EXE_kvsieve"))
            .args(args(folder, "o", &["--ranks", "mpi"]))
            .args([":", "-n", "1", env!("CARGO_BIN_EXE_kvsieve")])
            .args(args(folder, "o", &["--ranks", "mpi", "--zero", "1"]))
            .assert();
        let done = said(&done.code(2));
        assert!(done.contains("rank 1 differs from rank 0 in its recipe, arguments or vector instructions"), "{done}");
    }
}
