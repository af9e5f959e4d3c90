//! The list of what is compiled before there is a GPU: whatever a run compiles is in it. Ignored unless asked for, as it
//! needs a GPU or the emulated device (docs/testing-kernels.md).

use kvsieve::device::cuda::{Cache, Device, Nvrtc, Program};
use kvsieve::experiment::kernels;
use serde_json::Value;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Each measure, with policies that look at attention and at none.
const EXPERIMENT: &str = "
name = \"x\"
timing = { min_rounds = 1, max_rounds = 1 }
[[grid]]
measure = \"backward\"
kernel = \"tiled\"
context_tokens = 40
heads = \"4/2\"
head_dim = 64
dtype = \"bf16\"
[[grid]]
measure = \"evict\"
context_tokens = 64
heads = \"4/2\"
head_dim = 64
dtype = \"bf16\"
new_tokens = 2
policy = [\"snapkv:window=8+ada\", \"h2o+every\", \"knorm+every:steps=1\"]
budget = 24
";

fn kvsieve(folder: &Path, arguments: &[&str], input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvsieve"));
    command.current_dir(folder).args(arguments).env("KVSIEVE_CACHE", folder.join("cache"));
    let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Who reads none of it may have ended.
    let _ = process.stdin.take().unwrap().write_all(input.as_bytes());
    process.wait_with_output().unwrap()
}

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_runs_compile_nothing_that_is_not_in_the_list() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("x.toml"), EXPERIMENT).unwrap();
    let output = kvsieve(folder.path(), &["run", "x.toml", "--device", "cuda"], "");
    assert!(output.status.success(), "{output:?}");
    let (device, nvrtc) = (Device::open(0).unwrap(), Nvrtc::load(None).unwrap());
    let cache = Cache::at(folder.path().join("cache"));
    let listed = kernels::programs(device.limits());
    let held = |program: &&Program| cache.holds(&nvrtc.version(), program, &device.architecture()).is_some();
    let files = std::fs::read_dir(folder.path().join("cache")).unwrap().count();
    assert!(files > 6, "{files}");
    assert_eq!(listed.iter().filter(held).count(), files);

    let report: Value = serde_json::from_slice(&kvsieve(folder.path(), &["doctor", "--json", "-"], "").stdout).unwrap();
    let here = &report["kernels"]["architectures"][0];
    assert_eq!((&here["held"], &here["variants"]), (&Value::from(files), &Value::from(listed.len())));
    assert_eq!(
        (&here["architecture"], &report["kernels"]["fits"]),
        (&Value::from(device.architecture()), &Value::from(false))
    );
}

#[test]
#[ignore = "cuda: needs NVRTC"]
fn cuda_kernels_are_built_one_by_one_as_they_are_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let worker = ["kernels", "build", "--arch", "sm_80", "--worker"];
    let output = kvsieve(folder.path(), &worker, "0\n0\n");
    assert!(output.status.success(), "{output:?}");
    let answers: Vec<Value> =
        String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers.len(), 2);
    let files: Vec<_> = std::fs::read_dir(folder.path().join("cache")).unwrap().map(Result::unwrap).collect();
    assert_eq!(files.len(), 1);
    let bytes = files[0].metadata().unwrap().len();
    assert!(answers.iter().all(|answer| answer["bytes"] == bytes && answer["seconds"].is_f64()), "{answers:?}");
    let output = kvsieve(folder.path(), &worker, "1000000\n");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    // A folder that cannot be one.
    std::fs::write(folder.path().join("file"), "").unwrap();
    let output = kvsieve(folder.path(), &["kernels", "build", "--arch", "sm_80", "--cache", "file/x"], "");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}
