//! `kvsieve attend` as its users meet it: files in, files and numbers out, and one line for every mistake.

use assert_cmd::Command;
use kvsieve::memory::{Arena, Label};
use kvsieve::tensor::file::{self, Output, TensorFile};
use kvsieve::tensor::{DType, Tensor};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Numbers in -1..1 that look random and are the same in every run.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// A tensor of a test file.
struct Spec {
    name: &'static str,
    dtype: DType,
    dims: [usize; 4],
    values: Vec<f32>,
}

const Q: [usize; 4] = [2, 4, 33, 16];
const KV: [usize; 4] = [2, 2, 70, 16];

/// `q`, `k`, `v`, `do` with two query heads on each KV head.
fn problem(dtype: DType) -> Vec<Spec> {
    let tensors = [("q", Q), ("k", KV), ("v", KV), ("do", Q)];
    let specs = tensors.into_iter().zip(1..).map(|((name, dims), seed)| Spec {
        name,
        dtype,
        dims,
        values: numbers(dims.iter().product(), seed),
    });
    specs.collect()
}

fn save(path: &Path, specs: &[Spec]) {
    let arena = Arena::unlimited();
    let store = |spec: &Spec| Tensor::from_f32(&arena, Label::Input, spec.dtype, spec.dims, &spec.values).unwrap();
    let tensors: Vec<Tensor> = specs.iter().map(store).collect();
    let outputs = specs.iter().zip(&tensors).map(|(spec, tensor)| Output::tensor(spec.name, tensor));
    file::write(path, &outputs.collect::<Vec<_>>()).unwrap();
}

/// A folder with an input file and room for an output file.
struct Desk {
    folder: TempDir,
}

impl Desk {
    fn with(specs: &[Spec]) -> Self {
        let desk = Desk { folder: tempfile::tempdir().unwrap() };
        save(&desk.path("in.safetensors"), specs);
        desk
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `kvsieve attend` in the folder, from `in.safetensors` to `out.safetensors` unless `options` say otherwise.
    fn attend(&self, options: &[&str]) -> Command {
        let mut command = Command::cargo_bin("kvsieve").unwrap();
        command.current_dir(self.folder.path()).arg("attend");
        for (option, default) in [("--input", "in.safetensors"), ("--output", "out.safetensors")] {
            if !options.contains(&option) {
                command.args([option, default]);
            }
        }
        command.args(options);
        command
    }

    /// Runs it with `--json -` and reads what it prints.
    fn measure(&self, options: &[&str]) -> Value {
        let output = self.attend(options).args(["--json", "-"]).assert().success().get_output().stdout.clone();
        serde_json::from_slice(&output).unwrap()
    }

    /// A tensor of the output file.
    fn result(&self, name: &str) -> (DType, [usize; 4], Vec<f32>) {
        let file = TensorFile::open(&self.path("out.safetensors")).unwrap();
        let tensor = file.load(name, &Arena::unlimited(), Label::Input).unwrap();
        (tensor.dtype(), tensor.dims(), tensor.to_f32())
    }

    /// `lse` of the output file, with its shape.
    fn lse(&self) -> (Vec<usize>, Vec<f32>) {
        let bytes = fs::read(self.path("out.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let lse = tensors.tensor("lse").unwrap();
        assert_eq!(lse.dtype(), safetensors::Dtype::F32);
        let values = lse.data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
        (lse.shape().to_vec(), values.collect())
    }

    /// Names in the folder.
    fn names(&self) -> Vec<std::ffi::OsString> {
        let mut names: Vec<_> =
            fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    }

    /// Runs a command that must end with `status`, one line on stderr (which is returned), nothing on stdout and no
    /// new file.
    fn fails(&self, options: &[&str], status: i32) -> String {
        let before = self.names();
        let output = self.attend(options).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{options:?}: {stderr}");
        assert!(stderr.starts_with("error: ") && stderr.ends_with('\n'), "{options:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{options:?}: {stderr}");
        assert!(output.stdout.is_empty(), "{options:?}: printed something");
        assert_eq!(self.names(), before, "{options:?}: left a file");
        stderr
    }
}

fn relative_distance(got: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let difference: f64 = got.iter().zip(expected).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let norm: f64 = expected.iter().map(|b| f64::from(*b).powi(2)).sum();
    (difference / norm).sqrt()
}

#[test]
fn kernels_agree_with_the_reference_in_every_dtype_and_mask() {
    let masks: [&[&str]; 4] = [
        &[],
        &["--causal", "--scale", "-0.5"],
        &["--window", "9", "--softcap", "2.5"],
        &["--causal", "--dtype", "f32", "--threads", "1"],
    ];
    for (dtype, tolerance) in [(DType::F32, 2e-6), (DType::F16, 1e-3), (DType::Bf16, 8e-3)] {
        let desk = Desk::with(&problem(dtype));
        for mask in masks {
            desk.attend(mask).args(["--kernel", "reference"]).assert().success();
            let ((kind, dims, expected), (lse_dims, lse)) = (desk.result("o"), desk.lse());
            assert_eq!(kind, if mask.contains(&"--dtype") { DType::F32 } else { dtype });
            assert_eq!((dims, lse_dims), (Q, vec![2, 4, 33]));
            for kernel in ["naive", "tiled", "tiled:br=8,bc=16", "decode"] {
                let report = desk.measure(&[mask, &["--kernel", kernel]].concat());
                let distance = relative_distance(&desk.result("o").2, &expected);
                assert!(distance < tolerance, "{kernel} {dtype} {mask:?}: o differs by {distance}");
                let distance = relative_distance(&desk.lse().1, &lse);
                assert!(distance < 1e-5, "{kernel} {dtype} {mask:?}: lse differs by {distance}");
                assert!(report["drift"]["rel_l2"].as_f64().unwrap() < tolerance, "{report}");
                assert_eq!(report["predicted_peak_bytes"], report["peak_bytes"], "{kernel} {dtype} {mask:?}");
            }
        }
    }
}

#[test]
fn gradients_agree_between_kernels_and_have_the_inputs_shapes() {
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F16, 2e-3), (DType::Bf16, 2e-2)] {
        let desk = Desk::with(&problem(dtype));
        let report = desk.measure(&["--kernel", "naive", "--causal", "--backward", "--repeat", "2"]);
        assert_eq!(report["predicted_peak_bytes"], report["peak_bytes"]);
        assert_eq!(report["backward_samples_ns"].as_array().unwrap().len(), 2);
        assert!(report["backward_median_ns"].as_f64().unwrap() > 0.0);
        assert!(report["backward_workspace_bytes"].as_u64().unwrap() > 0);
        let expected = ["dq", "dk", "dv"].map(|name| desk.result(name).2);
        let report = desk.measure(&["--kernel", "tiled:br=8,bc=16", "--causal", "--backward"]);
        assert_eq!(report["predicted_peak_bytes"], report["peak_bytes"]);
        for ((name, dims), expected) in [("dq", Q), ("dk", KV), ("dv", KV)].into_iter().zip(expected) {
            let (kind, got_dims, got) = desk.result(name);
            assert_eq!((kind, got_dims), (dtype, dims), "{name}");
            let distance = relative_distance(&got, &expected);
            assert!(distance < tolerance, "{name} {dtype}: differs by {distance}");
        }
    }
}

#[test]
fn gradients_are_the_slope_of_the_loss() {
    // The loss is the inner product of `do` and `o`; its slope along a direction is the direction's product with dq.
    let mut specs = problem(DType::F32);
    let desk = Desk::with(&specs);
    desk.attend(&["--backward", "--causal", "--softcap", "3"]).assert().success();
    let gradient = desk.result("dq").2;
    let direction = numbers(gradient.len(), 99);
    let expected: f64 = gradient.iter().zip(&direction).map(|(a, b)| f64::from(a * b)).sum();
    let base = specs[0].values.clone();
    let mut loss = |step: f32| -> f64 {
        specs[0].values = base.iter().zip(&direction).map(|(x, d)| x + step * d).collect();
        save(&desk.path("in.safetensors"), &specs);
        desk.attend(&["--causal", "--softcap", "3", "--kernel", "reference"]).assert().success();
        desk.result("o").2.iter().zip(&specs[3].values).map(|(o, g)| f64::from(*o) * f64::from(*g)).sum()
    };
    let slope = (loss(0.01) - loss(-0.01)) / 0.02;
    assert!((slope - expected).abs() < 2e-3 * expected.abs().max(1.0), "slope {slope}, gradient {expected}");
}

#[test]
fn the_report_has_every_field_and_counts_every_byte() {
    let desk = Desk::with(&problem(DType::F16));
    let options = ["--kernel", "tiled:bc=32,br=16", "--causal", "--window", "20", "--softcap", "30", "--threads", "2"];
    let report = desk.measure(&[&options[..], &["--repeat", "4", "--limit-memory", "1GiB"]].concat());
    let expected = serde_json::json!({
        "kernel": "tiled:bc=32,br=16", "device": "cpu", "threads": 2, "dtype": "f16", "batch": 2, "q_heads": 4,
        "kv_heads": 2, "q_len": 33, "kv_len": 70, "head_dim": 16, "causal": true, "window": 20, "softcap": 30.0,
        "scale": 0.25, "warmups": 1, "limit_bytes": 1 << 30,
    });
    for (field, value) in expected.as_object().unwrap() {
        assert_eq!(&report[field], value, "{field}");
    }
    // Each of 33 queries sees 20 of the 70 keys.
    let flops = 4 * 16 * 33 * 20 * 8;
    assert_eq!(report["flops"], flops);
    let samples: Vec<f64> = report["samples_ns"].as_array().unwrap().iter().flat_map(Value::as_f64).collect();
    assert_eq!(samples.len(), 4);
    let median = report["median_ns"].as_f64().unwrap();
    let below = samples.iter().filter(|sample| **sample < median).count();
    let above = samples.iter().filter(|sample| **sample > median).count();
    assert_eq!(below, above);
    let rate = report["flops_per_s"].as_f64().unwrap();
    assert!((rate * median / 1e9 / f64::from(flops) - 1.0).abs() < 1e-9);
    assert!(["amx", "avx512-bf16", "avx512", "avx2", "portable"].contains(&report["isa_path"].as_str().unwrap()));
    assert_eq!(report["drift"]["checked_rows"], 2 * 4 * 33);
    assert!(report.get("backward_median_ns").is_none());
    // Inputs 2 B each; o 2 B each and lse 4 B a row.
    let peaks = &report["peak_by_label"];
    assert_eq!(peaks["input"], 2 * (2 * 4 * 33 * 16 + 2 * 2 * 2 * 70 * 16));
    assert_eq!(peaks["activations"], 2 * 2 * 4 * 33 * 16 + 4 * 2 * 4 * 33);
    assert_eq!(peaks["workspace"], report["workspace_bytes"]);
    let total: u64 = peaks.as_object().unwrap().values().map(|bytes| bytes.as_u64().unwrap()).sum();
    assert_eq!(report["peak_bytes"], total);
}

#[test]
fn a_format_costs_its_bytes_and_says_what_it_loses() {
    let mut specs = problem(DType::F32);
    specs.iter_mut().for_each(|spec| {
        spec.dims[3] = 64;
        spec.values = numbers(spec.dims.iter().product(), 3 + spec.dims[1] as u64);
    });
    let desk = Desk::with(&specs);
    // Bytes of a key and of a value, and the drift from the f64 reference over what was given.
    for (format, row_bytes, [least, most]) in [
        ("f32", [256, 256], [0.0, 1e-5]),
        ("int8", [68, 68], [1e-4, 2e-2]),
        ("int4:group=32", [36, 36], [1e-2, 0.3]),
        ("k=q8_0,v=q4_0", [68, 36], [1e-2, 0.3]),
    ] {
        for kernel in ["decode", "tiled"] {
            let report = desk.measure(&["--kernel", kernel, "--kv-format", format, "--threads", "1"]);
            let tokens = 2 * 2 * 70;
            assert_eq!(
                (&report["kv_format"], &report["kv_bytes"]),
                (&format.into(), &(tokens * (row_bytes[0] + row_bytes[1])).into())
            );
            assert_eq!(
                (&report["kv_bytes_given"], &report["peak_by_label"]["kv"]),
                (&(tokens * 512).into(), &report["kv_bytes"])
            );
            assert_eq!(report["predicted_peak_bytes"], report["peak_bytes"], "{kernel} over {format}");
            let drift = report["drift"]["rel_l2"].as_f64().unwrap();
            assert!((least..most).contains(&drift), "{kernel} over {format}: {drift}");
        }
    }
}

#[test]
fn tokens_in_full_and_scales_of_groups_are_counted() {
    let mut specs = problem(DType::F32);
    specs.iter_mut().for_each(|spec| {
        spec.dims[3] = 64;
        spec.values = numbers(spec.dims.iter().product(), 3 + spec.dims[1] as u64);
    });
    let desk = Desk::with(&specs);
    // Of 70 tokens so many are coded, in so many bytes with what groups share.
    for (format, coded, coded_bytes) in [
        ("q4_0:recent=30", 40, 40 * 72),
        ("q4_0:recent=30,first=4", 36, 36 * 72),
        ("k=int8,v=q4_0:first=4", 66, 66 * (68 + 36)),
        ("kivi:bits=4,group=32,recent=30", 32, 32 * (32 + 40) + 4 * 64),
        ("kivi:bits=2,group=32,recent=1,first=2", 64, 64 * (16 + 24) + 2 * 4 * 64),
        ("k=int8-channel:group=64,v=int8", 64, 64 * (64 + 68) + 4 * 64),
    ] {
        for kernel in ["decode", "tiled"] {
            let report = desk.measure(&["--kernel", kernel, "--kv-format", format, "--threads", "1"]);
            let kv_bytes = 4 * (coded_bytes + (70 - coded) * 512);
            assert_eq!((&report["kv_format"], &report["kv_bytes"]), (&format.into(), &kv_bytes.into()));
            assert_eq!(report["peak_by_label"]["kv"], report["kv_bytes"], "{format}");
            assert_eq!(report["predicted_peak_bytes"], report["peak_bytes"], "{kernel} over {format}");
        }
    }
    for (format, told) in [
        ("kivi:recent=128", "codes no token before there are 160, and there are 70"),
        ("k=int8,v=int8-channel", "int8-channel:group=32 is a format of keys"),
        ("kivi:bits=3", "bits is '3'; it must be 2 or 4"),
    ] {
        let error = desk.fails(&["--kv-format", format], 2);
        assert!(error.contains(told), "{error}");
    }
}

#[test]
fn long_queries_are_checked_on_64_rows_of_each_head() {
    let spec = |name, seed| Spec { name, dtype: DType::F32, dims: [1, 2, 300, 8], values: numbers(4800, seed) };
    let desk = Desk::with(&[spec("q", 1), spec("k", 2), spec("v", 3)]);
    assert_eq!(desk.measure(&[])["drift"]["checked_rows"], 128);
}

#[test]
fn the_peak_of_a_conversion_is_counted() {
    // A single query makes everything small beside the conversion of v, so that loading is the peak.
    let mut specs = problem(DType::F32);
    specs.truncate(3);
    for spec in &mut specs {
        spec.dims[2] = if spec.name == "q" { 1 } else { 4096 };
        spec.values = numbers(spec.dims.iter().product(), 7);
    }
    let desk = Desk::with(&specs);
    let report = desk.measure(&["--dtype", "bf16", "--kernel", "tiled:br=1,bc=1"]);
    assert_eq!(desk.result("o").0, DType::Bf16);
    let (q, kv) = (2 * 4 * 16, 2 * 2 * 4096 * 16);
    assert_eq!(report["peak_bytes"], 2 * q + 2 * kv + (4 + 2) * kv);
    assert_eq!(report["predicted_peak_bytes"], report["peak_bytes"]);
    assert_eq!(report["peak_by_label"]["input"], report["peak_bytes"]);
}

#[test]
fn mixed_types_need_to_be_made_one() {
    let mut specs = problem(DType::F32);
    specs[1].dtype = DType::Bf16;
    let desk = Desk::with(&specs);
    let stderr = desk.fails(&[], 2);
    assert!(stderr.contains("q is f32, k is bf16, v is f32; give --dtype"), "{stderr}");
    assert_eq!(desk.measure(&["--dtype", "f16"])["dtype"], "f16");
    assert_eq!(desk.result("o").0, DType::F16);
}

#[test]
fn queries_that_see_no_key_give_zero_and_minus_infinity() {
    let mut specs = problem(DType::F32);
    for spec in &mut specs[1..3] {
        spec.dims[2] = 30;
        spec.values.truncate(spec.dims.iter().product());
    }
    let desk = Desk::with(&specs);
    for kernel in ["reference", "naive", "tiled", "decode"] {
        desk.attend(&["--causal", "--kernel", kernel]).assert().success();
        let (o, lse) = (desk.result("o").2, desk.lse().1);
        assert!(o[..3 * 16].iter().all(|x| *x == 0.0) && o[3 * 16] != 0.0, "{kernel}");
        assert!(lse[..3].iter().all(|x| *x == f32::NEG_INFINITY) && lse[3].is_finite(), "{kernel}");
    }
}

#[test]
fn few_queries_are_decoded_where_no_kernel_is_named() {
    for (queries, options, kernel) in
        [(1, &[][..], "decode"), (8, &[], "decode"), (9, &[], "tiled"), (8, &["--backward"], "tiled")]
    {
        let mut specs = problem(DType::F32);
        for spec in specs.iter_mut().filter(|spec| ["q", "do"].contains(&spec.name)) {
            spec.dims[2] = queries;
            spec.values.truncate(spec.dims.iter().product());
        }
        let report = Desk::with(&specs).measure(options);
        assert!(report["kernel"] == kernel && report["q_len"] == queries, "{queries} queries {options:?}: {report}");
    }
}

#[test]
fn the_summary_the_timeline_and_the_json_file_say_what_happened() {
    let desk = Desk::with(&problem(DType::F32));
    desk.attend(&["--timeline", "timeline.json", "--json", "report.json"]).assert().success().stdout("");
    let read = |name: &str| -> Value { serde_json::from_slice(&fs::read(desk.path(name)).unwrap()).unwrap() };
    let (timeline, report) = (read("timeline.json"), read("report.json"));
    let most = timeline.as_array().unwrap().iter().map(|event| event["live_bytes"].as_u64().unwrap()).max();
    assert_eq!(most, report["peak_bytes"].as_u64());
    assert_eq!(timeline[0]["label"], "input");
    assert_eq!(timeline[0]["delta_bytes"], 4 * 2 * 4 * 33 * 16);

    let output = desk.attend(&["--causal", "--repeat", "3", "--backward"]).assert().success();
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    for part in ["kernel    tiled on cpu", "B=2 Hq=4 Hkv=2 Lq=33 Lk=70 D=16, f32, causal", "median of 3 passes"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    for part in ["GFLOP/s", "backward  ", "KiB, as predicted", "264 rows checked", "out.safetensors"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[cfg(unix)]
#[test]
fn results_have_the_permissions_of_any_new_file() {
    use std::os::unix::fs::PermissionsExt;
    let desk = Desk::with(&problem(DType::F32));
    fs::write(desk.path("plain"), "").unwrap();
    desk.attend(&["--json", "report.json"]).assert().success();
    let mode = |name: &str| fs::metadata(desk.path(name)).unwrap().permissions().mode();
    assert_eq!([mode("out.safetensors"), mode("report.json")], [mode("plain"); 2]);
}

#[test]
fn wrong_options_are_named_in_one_line() {
    let desk = Desk::with(&problem(DType::F32));
    fs::create_dir(desk.path("folder")).unwrap();
    let cases: &[(&[&str], i32, &str)] = &[
        (&["--input", "none.safetensors"], 2, "cannot read 'none.safetensors': No such file"),
        (&["--input", "folder"], 2, "cannot read 'folder'"),
        (&["--input", "a\nb"], 2, "cannot read 'a b'"),
        (&["--kernel", "flash"], 2, "unknown kernel 'flash'; there are reference, naive, tiled, decode"),
        (&["--kernel", "tiled:br=0"], 2, "tiled: br is '0'; it must be a whole number from 1 to 4096"),
        (&["--kernel", "tiled:bc=5000"], 2, "bc is '5000'; it must be a whole number from 1 to 4096"),
        (&["--kernel", "naive:br=4"], 2, "'naive' has no parameter 'br'; it has none"),
        (&["--kernel", "hopper"], 2, "'hopper' needs --device cuda"),
        (&["--kernel", "tiled:"], 2, "'tiled:' is not of the form NAME"),
        (&["--kernel", ""], 2, "is not of the form NAME"),
        (&["--kv-format", "int5"], 2, "unknown format 'int5'"),
        (&["--kv-format", "int4"], 2, "the head dim is 16; int4:group=32 keeps rows whose width is a multiple of 32"),
        (&["--kv-format", "int8", "--backward"], 2, "cannot be used with"),
        (&["--window", "0"], 2, "window is 0; it must be at least 1"),
        (&["--window", "-3"], 2, "invalid value '-3' for '--window <W>'"),
        (&["--softcap", "0"], 2, "soft-cap is 0; it must be finite and above 0"),
        (&["--softcap", "-1.5"], 2, "soft-cap is -1.5"),
        (&["--softcap", "3e38"], 2, "it must be at most 2.3e38"),
        (&["--scale", "inf"], 2, "scale is inf; it must be finite"),
        (&["--scale", "3e38"], 2, "it must be at most 2.3e38, either way"),
        (&["--softcap", "1e-40"], 2, "their quotient must be finite"),
        (&["--scale", "half"], 2, "invalid value 'half' for '--scale <S>'"),
        (&["--dtype", "f64"], 2, "unknown dtype 'f64'; use f32, bf16 or f16"),
        (&["--repeat", "0"], 2, "0 is not in 1.."),
        (&["--repeat", "-1"], 2, "-1 is not in 1.."),
        (&["--threads", "0"], 2, "0 threads asked; 1 to 1024 are possible"),
        (&["--threads", "1000000"], 2, "1000000 threads asked"),
        (
            &["--device", "cuda", "--kernel", "reference"],
            2,
            "unknown kernel of --device cuda 'reference'; there are naive",
        ),
        (&["--device", "cuda", "--kernel", "tiled:br=32"], 2, "'tiled' has no parameter 'br'; it has deterministic"),
        (&["--device", "cuda:x"], 2, "unknown device 'cuda:x'; use cpu or cuda[:N]"),
        (&["--limit-memory", "8"], 2, "'8' is not an amount of memory"),
        (&["--limit-memory", "16KiB", "--threads", "2"], 1, "the limit is 16384 bytes (16.0 KiB)"),
        (&["--backward", "--kernel", "decode"], 2, "kernel 'decode' has no backward pass; use naive or tiled"),
        (&["--backward", "--kernel", "reference"], 2, "kernel 'reference' has no backward pass"),
        (&["--causl"], 2, "unexpected argument '--causl' found; tip: a similar argument exists: '--causal'"),
        (&["--output", "none/out.safetensors"], 2, "there is no folder 'none'"),
        (&["--output", "folder"], 2, "'folder' exists and is not a regular file"),
        (&["--output", "folder/../in.safetensors"], 2, "the same file as --input; give each its own"),
        (&["--json", "in.safetensors"], 2, "--json is 'in.safetensors', the same file as --input"),
        (&["--json", "./out.safetensors"], 2, "--json is './out.safetensors', the same file as --output"),
        (&["--timeline", "x", "--json", "x"], 2, "--json is 'x', the same file as --timeline"),
        (&["--timeline", "none/x"], 2, "there is no folder 'none'"),
        // Scores overflow f32: the result is no number, and is not written.
        (&["--scale", "2e38"], 1, "the result 'o' holds NaN at [0, 0, 0, 0], so nothing was written"),
    ];
    for (options, status, expected) in cases {
        let stderr = desk.fails(options, *status);
        assert!(stderr.contains(expected), "{options:?}: expected '{expected}' in: {stderr}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_place_that_takes_no_files_is_refused_before_the_work() {
    let desk = Desk::with(&problem(DType::F32));
    // Nobody, not even root, makes files in /proc.
    let stderr = desk.fails(&["--output", "/proc/out.safetensors"], 2);
    assert!(stderr.contains("cannot write --output '/proc/out.safetensors'"), "{stderr}");
    let stderr = desk.fails(&["--output", "/dev/null"], 2);
    assert!(stderr.contains("'/dev/null' exists and is not a regular file"), "{stderr}");
}

#[test]
fn wrong_tensors_are_named_in_one_line() {
    type Change = fn(&mut Vec<Spec>);
    fn dims(spec: &mut Spec, dims: [usize; 4]) {
        spec.dims = dims;
        spec.values = vec![0.5; dims.iter().product()];
    }
    let cases: &[(Change, &[&str], &str)] = &[
        (|all| all.truncate(2), &[], "has no tensor 'v'; it holds k, q"),
        (|all| all.truncate(3), &["--backward"], "has no tensor 'do'; it holds k, q, v"),
        (|all| dims(&mut all[3], KV), &["--backward"], "do is [2, 2, 70, 16] and q is [2, 4, 33, 16]"),
        (|all| dims(&mut all[2], [2, 2, 71, 16]), &[], "k and v differ in shape"),
        (|all| dims(&mut all[0], [1, 4, 33, 16]), &[], "q and k differ in batch"),
        (|all| dims(&mut all[0], [2, 4, 33, 8]), &[], "q and k differ in head dim"),
        (|all| dims(&mut all[0], [2, 3, 33, 16]), &[], "3 query heads cannot share 2 KV heads"),
        (|all| dims(&mut all[0], [2, 1, 33, 16]), &[], "1 query heads cannot share 2 KV heads"),
        (|all| all.iter_mut().for_each(|spec| dims(spec, [1, 1, 2, 257])), &[], "head dim is 257; at most 256"),
        (|all| all[1].values[70 * 16 + 18] = f32::NAN, &[], "tensor 'k' in 'in.safetensors' holds NaN at [0, 1, 1, 2]"),
        (|all| all[0].values[5] = f32::INFINITY, &[], "tensor 'q' in 'in.safetensors' holds inf at [0, 0, 0, 5]"),
        (|all| all[3].values[0] = f32::NAN, &["--backward"], "tensor 'do' in 'in.safetensors' holds NaN"),
        (|all| all[2].values[3] = 7e4, &["--dtype", "f16"], "at [0, 0, 0, 3] that is too large for f16"),
    ];
    for (change, options, expected) in cases {
        let mut specs = problem(DType::F32);
        change(&mut specs);
        let stderr = Desk::with(&specs).fails(options, 2);
        assert!(stderr.contains(expected), "expected '{expected}' in: {stderr}");
    }
}

#[test]
fn files_that_hold_no_problem_are_named_in_one_line() {
    let desk = Desk::with(&problem(DType::F32));
    let path = desk.path("in.safetensors");
    let whole = fs::read(&path).unwrap();
    let bytes = |bytes: &[u8]| fs::write(&path, bytes).unwrap();
    let floats = |shape: &[usize]| {
        let values = vec![0.5; shape.iter().product()];
        let tensors = ["q", "k", "v"].map(|name| Output::f32(name, shape.to_vec(), &values));
        file::write(&path, &tensors).unwrap();
    };
    let integers = || {
        let tensors = ["q", "k", "v"].map(|name| Output::i64(name, vec![1, 2, 2, 1], &[1, 2, 3, 4]));
        file::write(&path, &tensors).unwrap();
    };
    let cases: &[(&dyn Fn(), &str)] = &[
        (&|| bytes(&whole[..whole.len() - 1]), "is not a valid safetensors file"),
        (&|| bytes(&whole[..40]), "is not a valid safetensors file"),
        (&|| bytes(b""), "'in.safetensors'"),
        (&|| bytes(&[0xff; 100]), "is not a valid safetensors file"),
        (&|| bytes(b"q = 1\nk = 2\nv = 3\n"), "is not a valid safetensors file"),
        (&|| floats(&[4, 8, 16]), "tensor 'q' in 'in.safetensors' has shape [4, 8, 16]"),
        (&|| floats(&[1, 1, 4, 8, 16]), "has shape [1, 1, 4, 8, 16]"),
        (&|| floats(&[]), "has shape []"),
        (&|| floats(&[1, 2, 0, 16]), "has shape [1, 2, 0, 16]"),
        (&integers, "tensor 'q' in 'in.safetensors' is I64; F32, F16 or BF16"),
    ];
    for (make, expected) in cases {
        make();
        let stderr = desk.fails(&[], 2);
        assert!(stderr.contains(expected), "expected '{expected}' in: {stderr}");
    }
}

#[test]
fn a_score_that_overflows_is_no_quiet_number() {
    // Products of 1e40 and -1e40 add up to 0 in f64 and to NaN in f32; the other scores are 0 in both.
    let spec = |name, values: [f32; 8]| {
        let values = values.iter().cycle().take(64).copied().collect();
        Spec { name, dtype: DType::F32, dims: [1, 1, 16, 4], values }
    };
    let q = [1e20, 1e20, 0.0, 0.0, 1e20, 1e20, 0.0, 0.0];
    let k = [1e20, -1e20, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    let desk = Desk::with(&[spec("q", q), spec("k", k), spec("v", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])]);
    for kernel in ["naive", "tiled", "decode"] {
        let stderr = desk.fails(&["--kernel", kernel], 1);
        assert!(stderr.contains("holds NaN at [0, 0, 0"), "{kernel}: {stderr}");
    }
    desk.attend(&["--kernel", "reference"]).assert().success();
    assert_eq!(desk.result("o").2[..4], [3.0, 4.0, 5.0, 6.0]);
}

#[test]
fn an_old_output_survives_a_failed_run_and_is_replaced_by_a_good_one() {
    let desk = Desk::with(&problem(DType::F32));
    let path = desk.path("out.safetensors");
    fs::write(&path, "old").unwrap();
    desk.fails(&["--scale", "2e38"], 1);
    assert_eq!(fs::read(&path).unwrap(), b"old");
    desk.attend(&[]).assert().success();
    assert_eq!(desk.result("o").1, Q);
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let desk = Desk::with(&problem(DType::F32));
    for kernel in ["naive", "tiled:br=4,bc=8", "decode"] {
        let outputs = ["1", "2", "5"].map(|threads| {
            let report = desk.measure(&["--kernel", kernel, "--threads", threads, "--causal"]);
            assert_eq!(report["threads"].to_string(), threads);
            assert_eq!(report["predicted_peak_bytes"], report["peak_bytes"], "{kernel}, {threads} threads");
            desk.result("o").2
        });
        assert!(outputs.iter().all(|o| *o == outputs[0]), "{kernel}");
    }
    let output = desk.attend(&["--json", "-"]).env("RAYON_NUM_THREADS", "3").output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["threads"], 3);
    let output = desk.attend(&[]).env("RAYON_NUM_THREADS", "100000").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(output.stderr, b"error: 100000 threads asked; 1 to 1024 are possible\n");
}

/// Whatever is missing of what a GPU needs, it is one line that says so, never a panic.
#[test]
fn cuda_without_its_compiler_is_one_line() {
    let desk = Desk::with(&problem(DType::F32));
    let output = desk.attend(&["--device", "cuda", "--nvrtc", "no-such-library.so"]).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    let missing = ["no CUDA driver: libcuda.so.1 was not found", "opening the GPU failed", "no-such-library.so"];
    assert!(matches!(output.status.code(), Some(1 | 2)), "{:?}", output.status);
    assert!(missing.iter().any(|text| stderr.contains(text)) && stderr.lines().count() == 1, "{stderr}");
}
