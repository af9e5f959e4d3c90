//! Keys and values in codes on a GPU: the bytes of the CPU's formats, attention over them, eviction and models. Ignored unless
//! asked for: `cargo test --release -- --ignored cuda`, on a GPU or on the emulated device (docs/testing-kernels.md).

use crate::common::models::{checkpoint, deviation, furthest, setup};
use crate::common::{normal, rng, tensor};
use assert_cmd::Command;
use kvsieve::cache::cuda::DeviceCache;
use kvsieve::cache::{CacheShape, PAGE_TOKENS};
use kvsieve::device::Cpu;
use kvsieve::device::cuda::Runtime;
use kvsieve::experiment::record::{Record, Status};
use kvsieve::experiment::{Engine, Experiment, Gpu, Options, Spec, runner};
use kvsieve::format::{KvFormat, RowFormat};
use kvsieve::memory::{Arena, Label};
use kvsieve::model::cuda::{DeviceDecoder, DeviceModel};
use kvsieve::model::{Decoder, Eviction, Model, Setup};
use kvsieve::policy::Registry;
use kvsieve::tensor::DType;
use kvsieve::tensor::file::{self, Output, TensorFile};

const FORMATS: [&str; 7] = [
    "int8",
    "fp8-e4m3",
    "fp8-e5m2",
    "int4:group=32",
    "int4:group=64,zero=true",
    "k=int8,v=int4:group=32,zero=true",
    "k=f32,v=int8",
];

/// Numbers of all sizes: subnormal codes of 8-bit floats, numbers beyond the largest, rows of zeros, and two rows that hold what
/// is no number.
fn strange(count: usize, head_dim: usize) -> Vec<f32> {
    let mut values = normal(&mut rng(5), count, 1.0);
    for (row, values) in values.chunks_exact_mut(head_dim).enumerate() {
        match row % 9 {
            0 => values.fill(0.0),
            1 => values.iter_mut().for_each(|x| *x *= 2f32.powi(-12)),
            2 => values.iter_mut().for_each(|x| *x *= 3e4),
            3 => values.iter_mut().for_each(|x| *x = (*x * 8.0).round() / 8.0),
            4 => values[row % head_dim] = 300.0,
            5 if row < 10 => values[3] = [f32::NAN, f32::INFINITY][row % 2],
            _ => (),
        }
    }
    values
}

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_codes_are_those_of_the_cpu_to_the_bit() {
    let runtime = Runtime::open(0, None).unwrap();
    let (device, arena) = (runtime.device(), Arena::unlimited());
    let (lists, tokens) = (3, 41);
    for (dtype, head_dim, formats) in
        [(DType::F32, 64, &FORMATS[..]), (DType::Bf16, 128, &FORMATS[..6]), (DType::F16, 33, &FORMATS[..3])]
    {
        for format in formats {
            let format: KvFormat = format.parse().unwrap();
            let shape = CacheShape {
                batch: 1,
                kv_heads: lists,
                head_dim,
                format,
                max_tokens: tokens,
                page_tokens: PAGE_TOKENS,
                columns: &[],
            };
            let values = strange(lists * tokens * head_dim, head_dim);
            let tensor = tensor(dtype, [1, lists, tokens, head_dim], &values);
            let mut there = device.alloc(&arena, Label::Input, tensor.bytes().len() as u64).unwrap();
            there.write(tensor.bytes()).unwrap();
            let mut cache = DeviceCache::new(device, &arena, shape, dtype).unwrap();
            cache.append(&runtime, [&there, &there], tokens, 0..tokens).unwrap();
            let rounded = tensor.to_f32();
            for (part, format) in [format.k, format.v].into_iter().enumerate() {
                let row_bytes = format.row_bytes(head_dim);
                for list in 0..lists {
                    let rows = cache.read_rows(list, part).unwrap();
                    for (token, found) in rows.chunks_exact(row_bytes).enumerate() {
                        let row = &rounded[(list * tokens + token) * head_dim..][..head_dim];
                        let mut wanted = vec![0; row_bytes];
                        format.encode(row, head_dim, &mut wanted);
                        // What a row that holds no number becomes must be no number either; which, is nobody's business.
                        match row.iter().all(|x| x.is_finite()) {
                            true => assert_eq!(found, wanted, "{format} {dtype} {head_dim}: {list}, {token}: {row:?}"),
                            false => assert!(holds_no_number(format, found, head_dim), "{format} {dtype}: {found:?}"),
                        }
                    }
                }
            }
        }
    }
}

fn holds_no_number(format: RowFormat, row: &[u8], head_dim: usize) -> bool {
    use kvsieve::tensor::RowCode;
    let mut back = vec![0.0; head_dim];
    format.decode(row, 0, &mut back);
    back.iter().any(|x| !x.is_finite())
}

fn run<'e>(grids: &str, engine: impl Into<Engine<'e>>) -> Vec<Record> {
    let (engine, folder) = (engine.into(), tempfile::tempdir().unwrap());
    let timing = "[timing]\nmin_rounds = 1\nmax_rounds = 1\ncap_s = 0.01\n";
    let spec = Spec::parse(&format!("name = \"x\"\n{timing}{grids}"), "x.toml").unwrap();
    let experiment = Experiment::new(spec, "x.toml", &Registry::default(), engine.device()).unwrap();
    let options = Options {
        out: folder.path().into(),
        resume: false,
        join: false,
        shard: None,
        limit_bytes: 1 << 30,
        repro: "kvsieve run x.toml".into(),
    };
    runner::run(&experiment, &Registry::default(), engine, &options, &mut |_| ()).unwrap().records
}

/// Every cell on the GPU has the bytes that were predicted, and drifts as far as on the CPU, which holds the same codes.
#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_cells_over_codes_drift_as_on_the_cpu() {
    let shape = "heads = \"4/2\"\nhead_dim = 64\n";
    let formats =
        "kv_format = [\"int8\", \"fp8-e4m3\", \"fp8-e5m2\", \"k=int8,v=int4:zero=true\", \"int4:group=64\"]\n";
    let few = "kv_format = [\"int8\", \"k=fp8-e4m3,v=int4:zero=true\"]\n";
    let policies = "policy = [\"knorm\", \"snapkv:window=8\", \"h2o+every:steps=2\", \"keydiff+rerotate\", \
                    \"snapkv:window=8+chunks:tokens=40\", \"ada-snapkv:window=8+chunks:tokens=40\"]\nbudget = 0.5\nnew_tokens = 5\n";
    let grids = [
        format!("[[grid]]\nmeasure = \"decode\"\ncontext_tokens = 97\n{formats}{shape}"),
        format!(
            "[[grid]]\nmeasure = \"decode\"\ndtype = \"bf16\"\npage_tokens = 32\ncontext_tokens = 97\n{formats}{shape}"
        ),
        format!("[[grid]]\nmeasure = \"evict\"\ncontext_tokens = 97\n{few}{policies}{shape}"),
        format!(
            "[[grid]]\nmeasure = \"evict\"\ndtype = \"bf16\"\ncontext_tokens = 97\npolicy = \"full\"\nnew_tokens = 3\n{few}{shape}"
        ),
    ];
    let host = Cpu::new(Some(2)).unwrap();
    let on_cpu = run(&grids.concat(), &host);
    let on_gpu = run(&grids.concat(), &Gpu::open(0, None, Cpu::new(Some(2)).unwrap()).unwrap());
    assert_eq!(on_cpu.len(), on_gpu.len());
    for (cpu, gpu) in on_cpu.iter().zip(&on_gpu) {
        let label = gpu.cell.label();
        assert_eq!((label.clone(), gpu.status, &gpu.reason), (format!("{} cuda", cpu.cell.label()), Status::Ok, &None));
        let memory = gpu.memory.as_ref().unwrap();
        let ragged = label.contains("ada-");
        assert!(memory.residual_bytes == 0 || ragged && memory.residual_bytes < 0, "{label}: {memory:?}");
        let drift = |record: &Record| record.drift.as_ref().unwrap().rel_l2;
        // What a policy evicts between equals may differ, and with it the drift. In bf16 either may round what codes stand for
        // where the other takes it as it is.
        let (cpu, found, allowed) = (drift(cpu), drift(gpu), if label.contains("evict") { 0.05 } else { 0.01 });
        let rounding: f64 = if gpu.cell.dtype == DType::F32 { 0.0 } else { 4e-3 };
        let least = (cpu * cpu - rounding * rounding).max(0.0).sqrt() * (1.0 - allowed);
        let most = cpu.hypot(rounding) * (1.0 + allowed);
        assert!((least..most).contains(&found), "{label}: {found} on the GPU, {cpu} on the CPU");
    }
}

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_attend_reads_codes_as_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let arena = Arena::unlimited();
    // 83 keys of 36 bytes: lists of codes that are no whole 16 bytes.
    let tensors = [("q", [2, 4, 20, 64]), ("k", [2, 2, 83, 64]), ("v", [2, 2, 83, 64])].map(|(name, dims)| {
        let values = normal(&mut rng(name.len() as u64 + dims[2] as u64), dims.iter().product(), 1.0);
        (name, kvsieve::tensor::Tensor::from_f32(&arena, Label::Input, DType::F32, dims, &values).unwrap())
    });
    file::write(
        &folder.path().join("in.safetensors"),
        &tensors.each_ref().map(|(name, tensor)| Output::tensor(name, tensor)),
    )
    .unwrap();
    let attend = |options: &[&str]| {
        let mut command = Command::cargo_bin("kvsieve").unwrap();
        let files = ["attend", "--input", "in.safetensors", "--output", "out.safetensors", "--causal"];
        command.current_dir(folder.path()).args(files).args(options);
        command
    };
    let result = || {
        let file = TensorFile::open(&folder.path().join("out.safetensors")).unwrap();
        file.load("o", &Arena::unlimited(), Label::Input).unwrap().to_f32()
    };
    for format in FORMATS {
        attend(&["--kernel", "tiled", "--kv-format", format]).assert().success();
        let expected = result();
        for kernel in ["tiled", "decode"] {
            let options = ["--kernel", kernel, "--kv-format", format, "--device", "cuda", "--json", "-"];
            let output = attend(&options).assert().success().get_output().stdout.clone();
            let report: serde_json::Value = serde_json::from_slice(&output).unwrap();
            assert_eq!(report["peak_bytes"], report["predicted_peak_bytes"], "{kernel} {format}");
            let off = furthest(&result(), &expected);
            assert!(off < 1e-4, "{kernel} {format}: off by {off}");
        }
    }
    for (kernel, format, error) in [
        ("naive", "int8", "kernel 'naive' has no keys and values in codes on CUDA; use tiled or decode"),
        ("tiled", "q8_0", "no kernel for GPUs reads keys and values in q8_0 in a pass of f32"),
        ("tiled", "int8:recent=64", "all tokens alike and not rotated; or use --device cpu"),
    ] {
        let output = attend(&["--kernel", kernel, "--kv-format", format, "--device", "cuda"]).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && stderr.contains(error) && stderr.lines().count() == 1, "{stderr}");
    }
}

/// A model whose cache is in codes gives the logits of the CPU's, whatever the chunks and whatever is evicted.
#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_models_over_codes_are_those_of_the_cpu() {
    let (runtime, host) = (Runtime::open(0, None).unwrap(), Cpu::new(Some(1)).unwrap());
    let cases = [
        ("full", 80),
        ("full", 7),
        ("snapkv:window=4,kernel=3", 7),
        ("keydiff+every:steps=3+rerotate", 9),
        ("h2o+every", 16),
    ];
    let expected = checkpoint("llama");
    let model = Model::open(&expected.folder, &Arena::unlimited()).unwrap();
    let (before, behind) = expected.tokens.split_at(24);
    let deviation = deviation(&expected.logits);
    // Keys that differ in their last bit may fall on either side of a code's edge.
    for (format, bound) in [("int8", 0.02), ("fp8-e4m3", 0.1)] {
        for (text, chunk) in cases {
            let policy = Registry::default().policy(text).unwrap();
            let eviction =
                Eviction { policy: &policy, name: text, budget: Some("12".parse().unwrap()), seed: 0, repeat: None };
            let kv_format: KvFormat = format.parse().unwrap();
            let setup = || Setup { columns: policy.columns(), kv_format, ..setup(1, chunk) };
            let arena = Arena::unlimited();
            let mut wanted = Vec::new();
            let mut decoder = Decoder::new(&model, setup(), &host, &arena).unwrap();
            decoder.evict(eviction, &[before.len()]).unwrap();
            decoder.prefill(&[before], |_, _, logits| wanted.extend_from_slice(logits)).unwrap();
            decoder.follow(&[behind], |_, _, logits| wanted.extend_from_slice(logits)).unwrap();
            let there = DeviceModel::new(&model, &runtime, &arena).unwrap();
            let mut got = Vec::new();
            let mut decoder = DeviceDecoder::new(&there, setup(), &arena).unwrap();
            decoder.evict(eviction, &host, before.len()).unwrap();
            decoder.prefill(0, before, |_, logits| got.extend_from_slice(logits)).unwrap();
            decoder.follow(0, behind, |_, logits| got.extend_from_slice(logits)).unwrap();
            let off = furthest(&got, &wanted) / deviation;
            assert!(off < bound, "{format} {text}, chunks of {chunk}: off by {off} of the logits' deviation");
            let token_bytes = kv_format.token_bytes(model.config.head_dim);
            assert_eq!(decoder.cache().shape().token_bytes(), token_bytes);
        }
    }
}

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_generate_takes_a_format() {
    let generate = |options: &[&str]| {
        let mut command = Command::cargo_bin("kvsieve").unwrap();
        let prompt = ["generate", "--model", "tests/checkpoints/llama", "--prompt", "w9 w17 w33 w8 w100 w54 w21 w77"];
        command.args(prompt).args(["--max-new-tokens", "6", "--json", "-"]).args(options).output().unwrap()
    };
    let report = |options: &[&str]| -> serde_json::Value {
        let output = generate(options);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let (there, here) = (report(&["--device", "cuda", "--kv-format", "int8"]), report(&["--kv-format", "int8"]));
    for name in ["text", "prompt_kv_bytes"] {
        assert_eq!(there[name], here[name], "{name}");
    }
    for (format, error) in [
        ("nf4", "no kernel for GPUs reads keys and values in nf4:group=64 in a pass of f32"),
        ("bf16", "no kernel for GPUs reads keys and values in bf16 in a pass of f32"),
        ("int4", "the head dim is 8; int4:group=32 keeps rows whose width is a multiple of 32"),
    ] {
        let refused = generate(&["--device", "cuda", "--kv-format", format]);
        let stderr = String::from_utf8(refused.stderr).unwrap();
        assert!(refused.status.code() == Some(2) && stderr.contains(error) && stderr.lines().count() == 1, "{stderr}");
    }
}
