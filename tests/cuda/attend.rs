//! `kvsieve attend --device cuda` as its users meet it. Ignored unless asked for, as everything that needs a GPU or an
//! emulated one (docs/testing-kernels.md): `cargo test --release -- --ignored cuda`.

use assert_cmd::Command;
use kvsieve::memory::{Arena, Label};
use kvsieve::tensor::file::{self, Output, TensorFile};
use kvsieve::tensor::{DType, Tensor};
use serde_json::Value;
use std::path::Path;

/// Writes q, k and v with waves in them.
fn save(path: &Path, q_dims: [usize; 4], kv_dims: [usize; 4]) {
    let arena = Arena::unlimited();
    let tensors = [("q", q_dims), ("k", kv_dims), ("v", kv_dims)].map(|(name, dims)| {
        let values: Vec<f32> = (0..dims.iter().product()).map(|i: usize| (i as f32 * 0.37).sin() * 2.0).collect();
        (name, Tensor::from_f32(&arena, Label::Input, DType::F16, dims, &values).unwrap())
    });
    file::write(path, &tensors.each_ref().map(|(name, tensor)| Output::tensor(name, tensor))).unwrap();
}

fn attend(folder: &Path, options: &[&str]) -> Command {
    let mut command = Command::cargo_bin("kvsieve").unwrap();
    command
        .current_dir(folder)
        .args(["attend", "--input", "in.safetensors", "--output", "out.safetensors"])
        .args(options);
    command
}

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_attend_computes_what_the_cpu_computes() {
    let folder = tempfile::tempdir().unwrap();
    save(&folder.path().join("in.safetensors"), [1, 4, 20, 64], [1, 2, 300, 64]);
    let result = || {
        let file = TensorFile::open(&folder.path().join("out.safetensors")).unwrap();
        file.load("o", &Arena::unlimited(), Label::Input).unwrap().to_f32()
    };
    attend(folder.path(), &["--kernel", "reference", "--causal"]).assert().success();
    let expected = result();
    for kernel in ["naive", "tiled", "decode"] {
        let options = ["--kernel", kernel, "--causal", "--device", "cuda", "--repeat", "2", "--json", "-"];
        let output = attend(folder.path(), &options).assert().success().get_output().stdout.clone();
        let report: Value = serde_json::from_slice(&output).unwrap();
        assert_eq!(report["device"], "cuda:0");
        assert_eq!(report["peak_bytes"], report["predicted_peak_bytes"], "{kernel}");
        assert!(report["drift"]["rel_l2"].as_f64().unwrap() < 1e-3, "{kernel}: {report}");
        assert!(report["samples_ns"].as_array().unwrap().iter().all(|sample| sample.as_u64().unwrap() > 0), "{report}");
        let worst = result().iter().zip(&expected).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
        assert!(worst < 4e-3, "{kernel}: {worst} from the reference's result on the CPU");
    }
}

/// 360 GB of scores, which no limit keeps `attend` from asking for: the GPU itself says no.
#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_attend_without_room_is_one_line() {
    let folder = tempfile::tempdir().unwrap();
    save(&folder.path().join("in.safetensors"), [1, 1, 300_000, 8], [1, 1, 300_000, 8]);
    let options = ["--kernel", "naive", "--device", "cuda", "--limit-memory", "1TiB"];
    let output = attend(folder.path(), &options).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let asked = "out of GPU memory: 360000000000 bytes for scores requested";
    assert!(stderr.contains(asked) && stderr.lines().count() == 1, "{stderr}");
}
