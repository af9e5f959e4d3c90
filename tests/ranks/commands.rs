//! `kvsieve attend --ranks` and `kvsieve evict --ranks` as a user runs them: on threads of one process, and where kvsieve is built with MPI and `mpirun` is there, on
//! processes.

use crate::common::{normal, rng, tensor};
#[cfg(feature = "mpi")]
use crate::mpi;
use assert_cmd::Command;
use kvsieve::memory::{Arena, Label};
use kvsieve::tensor::DType;
use kvsieve::tensor::file::{Output, TensorFile, write};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longer than any run here takes.
const DEADLINE: Duration = Duration::from_secs(60);

fn input(folder: &Path, tokens: usize) -> PathBuf {
    let (mut rng, path) = (rng(5), folder.join("in.safetensors"));
    let mut draw = |dims: [usize; 4]| tensor(DType::F32, dims, &normal(&mut rng, dims.iter().product(), 1.0));
    let (q, k, v) = (draw([1, 4, tokens, 16]), draw([1, 2, tokens, 16]), draw([1, 2, tokens, 16]));
    let grad_o = draw([1, 4, tokens, 16]);
    let named = [("q", &q), ("k", &k), ("v", &v), ("do", &grad_o)];
    write(&path, &named.map(|(name, tensor)| Output::tensor(name, tensor))).unwrap();
    path
}

fn attend(folder: &Path, output: &str, more: &[&str]) -> Vec<String> {
    let path = |name: &str| folder.join(name).display().to_string();
    let mut args: Vec<String> =
        ["attend", "--input", &path("in.safetensors"), "--output", &path(output), "--causal", "--threads", "1"]
            .map(String::from)
            .into();
    args.extend(more.iter().map(|arg| arg.to_string()));
    args
}

fn output(folder: &Path, name: &str, tensor: &str) -> Vec<f32> {
    TensorFile::open(&folder.join(name)).unwrap().load(tensor, &Arena::unlimited(), Label::Input).unwrap().to_f32()
}

fn assert_same(folder: &Path, name: &str, tensors: &[&str]) {
    for tensor in tensors {
        let (one, shared) = (output(folder, "one.safetensors", tensor), output(folder, name, tensor));
        assert_eq!(one.len(), shared.len());
        let most = one.iter().zip(&shared).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(most < 2e-5 && one.iter().any(|&x| x != 0.0), "{tensor} of {name} is {most} from one rank's");
    }
}

fn kvsieve() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvsieve"));
    command.timeout(DEADLINE);
    command
}

/// Bytes of each rank are what the shapes say, in each pass.
fn assert_as_predicted(json: &[u8], ranks: usize, transport: &str, passes: &[&str]) {
    let report: Value = serde_json::from_slice(json).unwrap();
    assert_eq!(report["transport"], transport);
    for pass in passes {
        let of_ranks = report[pass].as_array().unwrap();
        assert_eq!(of_ranks.len(), ranks);
        for of_rank in of_ranks {
            assert_eq!(of_rank["peak_bytes"], of_rank["predicted_peak_bytes"], "{pass}");
            assert_eq!(of_rank["sent_bytes"], of_rank["predicted_sent_bytes"], "{pass}");
            assert_eq!(of_rank["sent_bytes"].as_u64().unwrap() > 0, ranks > 1);
            assert_eq!(of_rank["samples_ns"].as_array().unwrap().len(), 2);
        }
    }
    assert!(report["rel_l2"].as_f64().unwrap() < 1e-5);
}

const BOTH: [&str; 2] = ["ranks", "backward_ranks"];

#[test]
fn ranks_that_are_threads_write_what_one_writes() {
    let folder = tempfile::tempdir().unwrap();
    input(folder.path(), 101);
    kvsieve().args(attend(folder.path(), "one.safetensors", &[])).assert().success();
    for (ranks, text) in [(1, "ring:1"), (3, "ring:3"), (4, "tree:4")] {
        let args = attend(folder.path(), "shared.safetensors", &["--ranks", text, "--repeat", "2", "--json", "-"]);
        let done = kvsieve().args(args).assert().success();
        assert_as_predicted(&done.get_output().stdout, ranks, "threads", &["ranks"]);
        assert_same(folder.path(), "shared.safetensors", &["o"]);
    }
    let args = attend(folder.path(), "shared.safetensors", &["--ranks", "ring:2"]);
    let said = String::from_utf8(kvsieve().args(args).assert().success().get_output().stdout.clone()).unwrap();
    assert!(said.contains("ring of 2 ranks (threads)") && said.matches("as predicted").count() == 4, "{said}");
}

/// Ranks hold parts under their share of the limit; the whole, which is checked, is held against all of it, before anything runs.
#[test]
fn the_limit_is_that_of_all_ranks_together() {
    let folder = tempfile::tempdir().unwrap();
    input(folder.path(), 2048);
    let run = |limit: &str| {
        let more = ["--ranks", "ring:4", "--limit-memory", limit];
        kvsieve().args(attend(folder.path(), "out.safetensors", &more)).assert()
    };
    // q, k, v and o of 2048 tokens and 4 + 2 + 2 + 4 heads of 16 numbers are 1.5 MiB, and 32 KiB of log-sum-exps.
    run("4MiB").success();
    let said = String::from_utf8(run("1500KiB").code(1).get_output().stderr.clone()).unwrap();
    assert!(said.contains("behind the passes rank 0 checks the whole result, of 1.53 MiB"), "{said}");
    for (device, expected) in [("tpu", "unknown device 'tpu'"), ("cuda", "--ranks is not available with --device cuda")]
    {
        let more = ["--ranks", "ring:2", "--device", device];
        let run = kvsieve().args(attend(folder.path(), "out.safetensors", &more)).assert().code(2);
        let said = String::from_utf8(run.get_output().stderr.clone()).unwrap();
        assert!(said.contains(expected) && said.lines().count() == 1, "{said}");
    }
}

#[test]
fn gradients_over_ranks_are_those_of_one() {
    let folder = tempfile::tempdir().unwrap();
    input(folder.path(), 101);
    kvsieve().args(attend(folder.path(), "one.safetensors", &["--backward"])).assert().success();
    for ranks in [1, 3, 4] {
        let text = format!("ring:{ranks}");
        let more = ["--ranks", &text, "--backward", "--repeat", "2", "--json", "-"];
        let done = kvsieve().args(attend(folder.path(), "shared.safetensors", &more)).assert().success();
        assert_as_predicted(&done.get_output().stdout, ranks, "threads", &BOTH);
        assert_same(folder.path(), "shared.safetensors", &["o", "dq", "dk", "dv"]);
    }
    let args = attend(folder.path(), "shared.safetensors", &["--ranks", "ring:2", "--backward"]);
    let said = String::from_utf8(kvsieve().args(args).assert().success().get_output().stdout.clone()).unwrap();
    assert!(said.contains("\nbackward  ") && said.matches("as predicted").count() == 8, "{said}");
}

fn evict(folder: &Path, output: &str, policy: &str, more: &[&str]) -> Vec<String> {
    let path = |name: &str| folder.join(name).display().to_string();
    let args = ["evict", "--input", &path("in.safetensors"), "--output", &path(output), "--policy", policy];
    args.iter().chain(&["--budget", "0.25", "--threads", "1"]).chain(more).map(|arg| arg.to_string()).collect()
}

/// Positions that stay, and how many of each list.
fn kept(folder: &Path, name: &str) -> [Vec<u8>; 2] {
    let bytes = std::fs::read(folder.join(name)).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    ["kept", "kept_len"].map(|name| file.tensor(name).unwrap().data().to_vec())
}

/// What `evict --json -` says of each rank is what the shapes say, and adds up.
fn assert_evicted(json: &[u8], ranks: usize, transport: &str) {
    let report: Value = serde_json::from_slice(json).unwrap();
    assert_eq!(report["transport"], transport);
    let of_ranks = report["ranks"].as_array().unwrap();
    assert_eq!(of_ranks.len(), ranks);
    let sum = |field: &str| of_ranks.iter().map(|of_rank| of_rank[field].as_u64().unwrap()).sum::<u64>();
    for field in ["kv_bytes_dense", "kv_bytes_kept"] {
        assert_eq!(report[field].as_u64().unwrap(), sum(field), "{field}");
    }
    assert!(sum("kv_bytes_kept") * 3 < sum("kv_bytes_dense"));
    for of_rank in of_ranks {
        assert_eq!(of_rank["sent_bytes"], of_rank["predicted_sent_bytes"]);
        assert_eq!(of_rank["sent_bytes"].as_u64().unwrap() > 0, ranks > 1);
    }
}

#[test]
fn ranks_evict_what_one_evicts() {
    let folder = tempfile::tempdir().unwrap();
    input(folder.path(), 103);
    for policy in ["streaming-llm", "knorm", "keydiff", "snapkv:window=8", "h2o"] {
        kvsieve().args(evict(folder.path(), "one.safetensors", policy, &[])).assert().success();
        for ranks in [1, 3, 4] {
            let more = ["--ranks", &format!("tree:{ranks}"), "--json", "-"];
            let done = kvsieve().args(evict(folder.path(), "shared.safetensors", policy, &more)).assert().success();
            assert_evicted(&done.get_output().stdout, ranks, "threads");
            assert_eq!(kept(folder.path(), "one.safetensors"), kept(folder.path(), "shared.safetensors"), "{policy}");
        }
    }
    let args = evict(folder.path(), "shared.safetensors", "knorm", &["--ranks", "tree:2"]);
    let said = String::from_utf8(kvsieve().args(args).assert().success().get_output().stdout.clone()).unwrap();
    assert_eq!(said.matches("as predicted").count(), 2, "{said}");

    let cases: [(&str, &[&str], &str); 4] = [
        ("knorm", &["--ranks", "ring:2"], "eviction is shared out as decoding is"),
        ("full", &["--ranks", "tree:2"], "policy 'full' is not available over ranks: it evicts nothing"),
        ("knorm", &["--ranks", "tree:2", "--kv-format", "int8"], "cannot be used with"),
        ("knorm", &["--ranks", "tree:2", "--device", "cuda"], "--ranks is not available with --device cuda"),
    ];
    for (policy, more, words) in cases {
        let done = kvsieve().args(evict(folder.path(), "o.safetensors", policy, more)).assert().code(2);
        let said = String::from_utf8(done.get_output().stderr.clone()).unwrap();
        assert!(said.contains(words) && said.lines().count() == 1, "{more:?}: {said}");
    }
}

#[test]
fn what_cannot_be_shared_is_one_line_and_status_2() {
    let folder = tempfile::tempdir().unwrap();
    input(folder.path(), 20);
    let cases: [(&[&str], &str); 5] = [
        (&["--ranks", "ring:11"], "20 tokens cannot be shared by 11 ranks; at least 22 tokens"),
        (&["--ranks", "ring:0"], "'ring:0' asks for 0 threads; 1 to 64 are possible"),
        (&["--ranks", "star:4"], "'star:4' is not a way to share attention out"),
        (&["--ranks", "ring:2", "--window", "4"], "a window of 4 is not available over ranks"),
        (&["--ranks", "tree:2", "--backward"], "--backward is not available over a tree"),
    ];
    for (more, words) in cases {
        let done = kvsieve().args(attend(folder.path(), "o.safetensors", more)).assert().code(2);
        let said = String::from_utf8(done.get_output().stderr.clone()).unwrap();
        assert!(said.contains(words) && said.lines().count() == 1, "{more:?}: {said}");
    }
    let launched = || {
        let mut command = kvsieve();
        command.env("OMPI_COMM_WORLD_SIZE", "4");
        command
    };
    let done = launched().args(attend(folder.path(), "o.safetensors", &["--ranks", "ring:2"])).assert().code(2);
    let said = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    assert!(said.contains("mpirun started 4; write --ranks ring"), "{said}");
}

#[cfg(not(feature = "mpi"))]
#[test]
fn without_mpi_a_line_says_how_to_build_with_it() {
    let folder = tempfile::tempdir().unwrap();
    input(folder.path(), 20);
    let done = kvsieve().args(attend(folder.path(), "o.safetensors", &["--ranks", "ring"])).assert().code(2);
    let said = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    assert!(said.contains("install libopenmpi-dev, openmpi-bin and libclang-dev, then cargo build"), "{said}");
    assert_eq!(said.lines().count(), 1);
}

#[cfg(feature = "mpi")]
mod processes {
    use super::*;
    use std::process::Stdio;
    use std::time::Instant;

    fn mpirun(ranks: usize) -> Command {
        mpi::mpirun(ranks, DEADLINE)
    }

    #[test]
    fn ranks_that_are_processes_write_what_one_writes() {
        let folder = tempfile::tempdir().unwrap();
        input(folder.path(), 203);
        kvsieve().args(attend(folder.path(), "one.safetensors", &["--backward"])).assert().success();
        for ranks in [1, 2, 3, 4] {
            for (method, more, passes, tensors) in [
                ("ring", &["--backward"][..], &BOTH[..], &["o", "dq", "dk", "dv"][..]),
                ("tree", &[], &BOTH[..1], &["o"]),
            ] {
                let more = [&["--ranks", method, "--repeat", "2", "--json", "-"], more].concat();
                let args = attend(folder.path(), "shared.safetensors", &more);
                let done = mpirun(ranks).arg(env!("CARGO_BIN_EXE_kvsieve")).args(args).assert().success();
                assert_as_predicted(&done.get_output().stdout, ranks, "mpi", passes);
                assert_same(folder.path(), "shared.safetensors", tensors);
            }
        }
    }

    #[test]
    fn processes_evict_what_one_evicts() {
        let folder = tempfile::tempdir().unwrap();
        input(folder.path(), 103);
        for policy in ["keydiff", "snapkv:window=8"] {
            kvsieve().args(evict(folder.path(), "one.safetensors", policy, &[])).assert().success();
            let args = evict(folder.path(), "shared.safetensors", policy, &["--ranks", "tree", "--json", "-"]);
            let done = mpirun(3).arg(env!("CARGO_BIN_EXE_kvsieve")).args(args).assert().success();
            assert_evicted(&done.get_output().stdout, 3, "mpi");
            assert_eq!(kept(folder.path(), "one.safetensors"), kept(folder.path(), "shared.safetensors"), "{policy}");
        }
    }

    #[test]
    fn wrong_input_is_said_once() {
        let folder = tempfile::tempdir().unwrap();
        let args = attend(folder.path(), "o.safetensors", &["--ranks", "ring"]);
        let done = mpirun(3).arg(env!("CARGO_BIN_EXE_kvsieve")).args(args).assert().code(2);
        let said = String::from_utf8(done.get_output().stderr.clone()).unwrap();
        assert_eq!(said.matches("error: rank 0 of 3: cannot read").count(), 1, "{said}");
        assert_eq!(said.matches("error: ").count(), 1, "{said}");
    }

    #[test]
    fn ranks_with_different_arguments_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        input(folder.path(), 64);
        let one = attend(folder.path(), "o.safetensors", &["--ranks", "ring"]);
        let other = attend(folder.path(), "o.safetensors", &["--ranks", "ring", "--repeat", "3"]);
        let done = mpirun(1)
            .arg(env!("CARGO_BIN_EXE_kvsieve"))
            .args(one)
            .args([":", "-n", "1", env!("CARGO_BIN_EXE_kvsieve")])
            .args(other)
            .assert()
            .code(2);
        let said = String::from_utf8(done.get_output().stderr.clone()).unwrap();
        assert!(
            said.contains("rank 1 differs from rank 0 in its arguments or its input; start all ranks with"),
            "{said}"
        );
    }

    #[test]
    fn a_rank_that_is_killed_ends_the_others_within_seconds() {
        let folder = tempfile::tempdir().unwrap();
        input(folder.path(), 512);
        let args = attend(folder.path(), "o.safetensors", &["--ranks", "ring", "--repeat", "1000000"]);
        let mut command = std::process::Command::new("mpirun");
        for name in ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] {
            command.env(name, "1");
        }
        // Rank 1 says its number and becomes kvsieve, which is then killed.
        let script = "[ \"$OMPI_COMM_WORLD_RANK\" = 1 ] && echo $$ > \"$0\"; exec \"$@\"";
        let pid_file = folder.path().join("pid");
        command.args(["--oversubscribe", "--timeout", "50", "-n", "3", "sh", "-c", script]);
        let mpirun = command
            .arg(&pid_file)
            .arg(env!("CARGO_BIN_EXE_kvsieve"))
            .args(args)
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let started = Instant::now();
        let pid = loop {
            match std::fs::read_to_string(&pid_file) {
                Ok(text) if text.ends_with('\n') => break text.trim().to_string(),
                _ => std::thread::sleep(Duration::from_millis(50)),
            }
            assert!(started.elapsed() < DEADLINE, "mpirun started nothing");
        };
        std::thread::sleep(Duration::from_secs(2));
        assert!(std::process::Command::new("kill").args(["-9", &pid]).status().unwrap().success());
        // mpirun's own time limit ends the wait, with another status and other words.
        let ended = mpirun.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr).to_string();
        assert!(!ended.status.success() && said.contains("rank 1") && said.contains("signal 9"), "{said}");
    }
}
