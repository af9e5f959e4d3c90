//! Models on a GPU against what `transformers` gave, and against the CPU. Ignored unless asked for:
//! `cargo test --release -- --ignored cuda`, on a GPU or on the emulated device (`tests/kernels/emulate/device.py`).

use crate::common::models::{all, checkpoint, deviation, furthest, setup};
use assert_cmd::Command;
use kvsieve::device::Cpu;
use kvsieve::device::cuda::Runtime;
use kvsieve::memory::Arena;
use kvsieve::model::cuda::{DeviceDecoder, DeviceModel};
use kvsieve::model::{Config, Decoder, Eviction, Model, Sampler, Sampling, Setup, generate};
use kvsieve::policy::Registry;
use kvsieve::tensor::DType;
use kvsieve::tensor::file::{self, Output};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::Path;

#[test]
#[ignore = "needs a GPU, or the emulated device (tests/kernels/emulate/device.py)"]
fn cuda_logits_are_those_of_transformers_whatever_the_chunks() {
    let runtime = Runtime::open(0, None).unwrap();
    let mut failed = Vec::new();
    for name in all() {
        let expected = checkpoint(&name);
        let model = Model::open(&expected.folder, &Arena::unlimited()).unwrap();
        // cuBLAS rounds activations to a 16-bit type of the weights; PyTorch that does so too is off as far.
        let rounding = match model.weights.dtype() {
            DType::F16 if runtime.cublas().is_some() => 2e-2,
            DType::Bf16 if runtime.cublas().is_some() => 8e-2,
            _ => 1e-3,
        };
        let bound = rounding * deviation(&expected.logits);
        let arena = Arena::unlimited();
        let there = DeviceModel::new(&model, &runtime, &arena).unwrap();
        assert_eq!(arena.usage().live_bytes, there.bytes());
        for (kernel, chunk) in [("tiled", 80), ("tiled", 1), ("tiled", 7), ("naive", 30)] {
            if kernel == "naive" && !["llama", "gemma2"].contains(&&*name) {
                continue;
            }
            let mut decoder = DeviceDecoder::new(&there, Setup { kernel, ..setup(1, chunk) }, &arena).unwrap();
            let mut got = Vec::new();
            // With chunks of 7 twice, the second time where other tokens were.
            for _ in 0..if chunk == 7 { 2 } else { 1 } {
                decoder.clear().unwrap();
                got.clear();
                let feed = decoder.prefill(0, &expected.tokens, |place, logits| {
                    assert_eq!(got.len(), place * logits.len());
                    got.extend_from_slice(logits);
                });
                feed.unwrap();
            }
            let off = furthest(&got, &expected.logits);
            println!("{name}, {kernel}, chunks of {chunk}: off by {off}, allowed {bound}");
            if off.is_nan() || off > bound {
                failed.push(format!("{name}, {kernel}, chunks of {chunk}: off by {off}, allowed {bound}"));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
#[ignore = "needs a GPU, or the emulated device (tests/kernels/emulate/device.py)"]
fn cuda_greedy_continuations_are_those_of_transformers() {
    let runtime = Runtime::open(0, None).unwrap();
    for name in all() {
        let expected = checkpoint(&name);
        let model = Model::open(&expected.folder, &Arena::unlimited()).unwrap();
        let arena = Arena::unlimited();
        let there = DeviceModel::new(&model, &runtime, &arena).unwrap();
        let setup = Setup { all_logits: false, ..setup(1, 16) };
        let mut decoder = DeviceDecoder::new(&there, setup, &arena).unwrap();
        let mut sampler = Sampler::new(Sampling::GREEDY);
        let most_tokens = expected.greedy.len();
        let generated = generate(&mut decoder, &expected.tokens, &mut sampler, &[], most_tokens, |_| ()).unwrap();
        assert_eq!(generated.tokens, expected.greedy, "{name}");
    }
}

/// Logits of all tokens, with `after` of them before the policy evicts, and what it evicted.
fn on_cpu(model: &Model, tokens: &[u32], eviction: Eviction<'_>, after: usize, chunk: usize) -> (Vec<f32>, u64) {
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    let setup = Setup { columns: eviction.policy.columns(), ..setup(1, chunk) };
    let mut decoder = Decoder::new(model, setup, &cpu, &arena).unwrap();
    decoder.evict(eviction, &[after]).unwrap();
    let mut all = Vec::new();
    decoder.prefill(&[&tokens[..after]], |_, _, logits| all.extend_from_slice(logits)).unwrap();
    decoder.follow(&[&tokens[after..]], |_, _, logits| all.extend_from_slice(logits)).unwrap();
    (all, decoder.evicted_tokens())
}

/// How far logits of a policy at work on the GPU are off those on the CPU, and what was evicted on each.
fn apart(
    (runtime, cpu): (&Runtime, &Cpu),
    model: &Model,
    tokens: &[u32],
    text: &str,
    after: usize,
    chunk: usize,
) -> (f32, u64, u64) {
    let policy = Registry::default().policy(text).unwrap();
    let eviction = Eviction { policy: &policy, name: text, budget: Some("12".parse().unwrap()), seed: 0, repeat: None };
    let (wanted, evicted) = on_cpu(model, tokens, eviction, after, chunk);
    let arena = Arena::unlimited();
    let there = DeviceModel::new(model, runtime, &arena).unwrap();
    let setup = Setup { columns: policy.columns(), ..setup(1, chunk) };
    let mut decoder = DeviceDecoder::new(&there, setup, &arena).unwrap();
    decoder.evict(eviction, cpu, after).unwrap();
    let mut got = Vec::new();
    decoder.prefill(0, &tokens[..after], |_, logits| got.extend_from_slice(logits)).unwrap();
    decoder.follow(0, &tokens[after..], |_, logits| got.extend_from_slice(logits)).unwrap();
    (furthest(&got, &wanted), decoder.evicted_tokens(), evicted)
}

/// Gates that tell tokens apart: of a policy's name, with `inner` elements between, or linear.
fn write_gates(path: &Path, config: &Config, policy: &str, inner: Option<usize>, decided_by: &str) {
    let mut state = 7u32;
    let mut numbers = |count: usize| -> Vec<f32> {
        let mut number = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| number()).collect()
    };
    let (layers, heads, hidden) = (config.layers, config.kv_heads, config.hidden);
    let mut shapes = vec![("weight", vec![layers, heads, inner.unwrap_or(hidden)]), ("bias", vec![layers, heads])];
    shapes.extend(
        inner
            .iter()
            .flat_map(|&inner| [("inner.weight", vec![layers, inner, hidden]), ("inner.bias", vec![layers, inner])]),
    );
    let tensors: Vec<(String, Vec<usize>, Vec<f32>)> = shapes
        .into_iter()
        .map(|(what, shape)| (format!("{policy}.{what}"), shape.clone(), numbers(shape.iter().product())))
        .collect();
    let outputs: Vec<Output<'_>> =
        tensors.iter().map(|(name, shape, values)| Output::f32(name, shape.clone(), values)).collect();
    let metadata =
        [("window", "4"), ("decided_by", decided_by)].map(|(key, value)| (key.to_string(), value.to_string()));
    file::write_with(path, &outputs, Some(metadata.into())).unwrap();
}

#[test]
#[ignore = "needs a GPU, or the emulated device (tests/kernels/emulate/device.py)"]
fn cuda_gates_evict_in_models_as_on_the_cpu() {
    let (runtime, cpu) = (Runtime::open(0, None).unwrap(), Cpu::new(Some(1)).unwrap());
    let folder = tempfile::tempdir().unwrap();
    for name in ["llama", "qwen3"] {
        let expected = checkpoint(name);
        let model = Model::open(&expected.folder, &Arena::unlimited()).unwrap();
        let bound = 1e-3 * deviation(&expected.logits);
        let cases = [
            ("dms", None, "itself", "", 24, 80),
            ("dms", None, "next", "", 30, 7),
            ("dms", Some(5), "itself", "+chunks:tokens=13", 40, 5),
            ("gate", Some(9), "itself", "", 24, 80),
            ("gate", None, "itself", "+every", 24, 16),
            ("gate", None, "itself", "+vnorm", 24, 80),
            // What is below the threshold is let go of while decoding, in lists that lost nothing before too.
            ("gate", None, "itself", "+threshold:at=0.1+delayed:window=4", 16, 7),
            // Nothing is left.
            ("gate", None, "itself", "+threshold:at=1000+rerotate", 24, 80),
        ];
        for (index, (policy, inner, decided_by, parts, after, chunk)) in cases.into_iter().enumerate() {
            let path = folder.path().join(format!("{name}-{index}.safetensors"));
            write_gates(&path, &model.config, policy, inner, decided_by);
            let text = format!("{policy}:gates={}{parts}", path.display());
            let (off, evicted, wanted) = apart((&runtime, &cpu), &model, &expected.tokens, &text, after, chunk);
            println!("{name}, {index}, {text}: off by {off}, allowed {bound}; {wanted} evicted");
            assert!(wanted > 0 && evicted == wanted, "{name}, {text}: {evicted} and {wanted} evicted");
            assert!(off <= bound, "{name}, {text}: off by {off}");
        }
    }
}

#[test]
#[ignore = "needs a GPU, or the emulated device (tests/kernels/emulate/device.py)"]
fn cuda_policies_evict_in_models_as_on_the_cpu() {
    let (runtime, cpu) = (Runtime::open(0, None).unwrap(), Cpu::new(Some(1)).unwrap());
    let cases = [
        ("streaming-llm:sink=4", 24, 80),
        ("knorm", 24, 80),
        ("keydiff+every:steps=3", 20, 9),
        ("snapkv:window=4,kernel=3", 24, 7),
        ("snapkv:window=4,kernel=3+every:steps=5", 24, 3),
        // Of the queries that are asked, some saw tokens that have left since.
        ("snapkv:window=8,kernel=3+every:steps=2", 24, 7),
        ("scissorhands+every", 24, 16),
        ("ada-snapkv:window=4,kernel=3", 30, 80),
        ("pyramidkv:window=2", 30, 80),
        ("h2o+every", 24, 16),
        ("h2o:age=true", 24, 5),
        ("tova+every", 24, 80),
        ("knorm+chunks:tokens=10", 40, 4),
        ("snapkv:window=4,kernel=3+chunks:tokens=13", 40, 80),
        ("streaming-llm:sink=4+every+rerotate", 24, 7),
        ("h2o+every+rerotate", 24, 80),
        ("snapkv:window=4,kernel=3+chunks:tokens=13+rerotate", 40, 5),
        ("ada-snapkv:window=4,kernel=3+rerotate", 30, 80),
        ("keydiff+delayed:window=5", 24, 80),
        ("delayed-keydiff:window=4", 30, 7),
        ("keydiff+delayed:window=6+rerotate", 24, 80),
        ("full", 24, 80),
    ];
    let mut failed = Vec::new();
    for name in ["llama", "qwen3", "llama-odd"] {
        let expected = checkpoint(name);
        let (tokens, host) = (&expected.tokens, Arena::unlimited());
        let model = Model::open(&expected.folder, &host).unwrap();
        let bound = 1e-3 * deviation(&expected.logits);
        // Every policy in the first model, and in the others, which differ in heads and in their extents, each third.
        for (text, after, chunk) in cases.into_iter().step_by(if name == "llama" { 1 } else { 3 }) {
            let (off, evicted, wanted) = apart((&runtime, &cpu), &model, tokens, text, after, chunk);
            println!("{name}, {text}: off by {off}, allowed {bound}; {wanted} evicted");
            assert!(text == "full" || wanted > 0, "{name}, {text}");
            if off.is_nan() || off > bound || evicted != wanted {
                failed.push(format!("{name}, {text}: off by {off}; {evicted} evicted"));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
#[ignore = "needs a GPU, or the emulated device (tests/kernels/emulate/device.py)"]
fn cuda_policies_without_a_form_in_models_are_refused_by_name() {
    let (runtime, cpu) = (Runtime::open(0, None).unwrap(), Cpu::new(Some(1)).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let at = |file: &str| folder.path().join(file);
    let config = Model::open(&checkpoint("llama").folder, &Arena::unlimited()).unwrap().config;
    write_gates(&at("gates"), &config, "gate", None, "itself");
    let alphas: Vec<f32> = (0..config.layers * config.kv_heads).map(|head| head as f32 / 16.0).collect();
    let alphas = Output::f32("duo.alpha", vec![config.layers, config.kv_heads], &alphas);
    file::write_with(&at("heads"), &[alphas], None).unwrap();
    let settled = format!("gate:gates={}+duo:gates={}", at("gates").display(), at("heads").display());
    let cases = [
        ("llama", &settled[..], "not with scores of a head's own"),
        ("gemma2", "knorm", "'knorm': in a model with sliding windows nothing is evicted on CUDA yet"),
        ("llama", "qfilters", "no kernel for it on CUDA yet"),
        ("llama", "knorm+merge", "evicted tokens are only dropped on CUDA"),
    ];
    for (name, text, reason) in cases {
        let model = Model::open(&checkpoint(name).folder, &Arena::unlimited()).unwrap();
        let Ok(policy) = Registry::default().policy(text) else { panic!("{text}") };
        let arena = Arena::unlimited();
        let there = DeviceModel::new(&model, &runtime, &arena).unwrap();
        let eviction =
            Eviction { policy: &policy, name: text, budget: Some("12".parse().unwrap()), seed: 0, repeat: None };
        let error = there.check(&eviction).unwrap_err().to_string();
        assert!(error.contains(reason) && error.ends_with("use --device cpu"), "{error}");
        if policy.columns().is_empty() {
            let mut decoder = DeviceDecoder::new(&there, setup(1, 16), &arena).unwrap();
            assert_eq!(decoder.evict(eviction, &cpu, 24).unwrap_err().to_string(), error);
        }
    }
}

fn json(arguments: &[&str]) -> serde_json::Value {
    let mut command = Command::cargo_bin("kvsieve").unwrap();
    let run = command.args(arguments).args(["--json", "-"]).assert().success();
    serde_json::from_slice(&run.get_output().stdout).unwrap()
}

#[test]
#[ignore = "needs a GPU, or the emulated device (tests/kernels/emulate/device.py)"]
fn cuda_commands_report_what_they_report_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let expected = checkpoint("llama");
    let (tokens, output) = (folder.path().join("tokens.json"), folder.path().join("logits.safetensors"));
    std::fs::write(&tokens, format!("{{\"tokens\": [{:?}, [5, 6, 7]]}}", expected.tokens)).unwrap();
    let (tokens, output) = (tokens.to_str().unwrap(), output.to_str().unwrap());
    let model = "tests/checkpoints/llama";
    let logits = ["logits", "--model", model, "--tokens", tokens, "--output", output, "--chunk", "16"];
    let prompt = "w9 w17 w33 w8 w100 w54 w21 w77";
    let generate = ["generate", "--model", model, "--prompt", prompt, "--max-new-tokens", "6"];
    let evicting = ["--policy", "snapkv:window=2", "--budget", "4"];
    for (arguments, more) in [(&logits[..], &[][..]), (&generate, &[]), (&generate, &evicting)] {
        let arguments = [arguments, more].concat();
        let on_cpu = json(&[&arguments[..], &["--threads", "1"]].concat());
        let on_gpu = json(&[&arguments[..], &["--device", "cuda"]].concat());
        let names = |report: &serde_json::Value| report.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&on_cpu), names(&on_gpu));
        for name in ["tokens", "text", "evicted_tokens", "prompt_kv_bytes"] {
            assert_eq!(on_cpu[name], on_gpu[name], "{arguments:?}: {name}");
        }
        assert_eq!((&on_gpu["device"], &on_gpu["threads"]), (&"cuda:0".into(), &serde_json::Value::Null));
        assert!(on_gpu["isa_path"].as_str().unwrap().contains("NVRTC"), "{on_gpu}");
        assert!(on_gpu["peak_bytes"].as_u64() > on_gpu["weights_bytes"].as_u64(), "{on_gpu}");
    }
    let bytes = std::fs::read(output).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let found = file.tensor("logits").unwrap();
    assert_eq!(found.shape(), [2, expected.tokens.len(), 120]);
    let values: Vec<f32> =
        found.data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
    let first = &values[..expected.logits.len()];
    assert!(furthest(first, &expected.logits) < 1e-3 * deviation(&expected.logits));

    let mut command = Command::cargo_bin("kvsieve").unwrap();
    let refused = command.args(logits).args(["--device", "cuda", "--limit-memory", "64KiB"]).assert().code(2);
    refused.stderr(predicates::str::contains("weights"));
    let mut command = Command::cargo_bin("kvsieve").unwrap();
    let refused =
        command.args(generate).args(["--device", "cuda", "--policy", "knorm+merge", "--budget", "4"]).assert().code(2);
    refused.stderr(predicates::str::contains("evicted tokens are only dropped on CUDA"));
}

/// Calls of the driver by function, and launches by kernel, of a process in which a model writes `new_tokens`: as the
/// emulated device counts them.
fn driver_calls(model: &str, policy: &[&str], new_tokens: usize) -> BTreeMap<String, i64> {
    let folder = tempfile::tempdir().unwrap();
    let (counts, most) = (folder.path().join("counts"), new_tokens.to_string());
    let prompt: Vec<String> = (0..24).map(|word| format!("w{}", 7 + 11 * word % 97)).collect();
    let mut command = Command::cargo_bin("kvsieve").unwrap();
    command.env("KVSIEVE_EMULATED_COUNT", &counts).args(["generate", "--model", model, "--prompt"]);
    command.arg(prompt.join(" ")).args(["--max-new-tokens", &most, "--device", "cuda", "--json", "-"]).args(policy);
    let report: serde_json::Value = serde_json::from_slice(&command.assert().success().get_output().stdout).unwrap();
    assert_eq!(report["tokens"].as_array().unwrap().len(), new_tokens, "{policy:?} ended early: {report}");
    let text = std::fs::read_to_string(counts).unwrap();
    let counted = text.lines().map(|line| line.rsplit_once(' ').unwrap());
    counted.map(|(name, count)| (name.to_string(), count.parse().unwrap())).collect()
}

/// Activations are rounded for cuBLAS once for all products that read them: queries, keys and values, then the output, gate
/// and up, down, and the logits.
#[test]
#[ignore = "needs the emulated device (tests/kernels/emulate/device.py)"]
fn cuda_activations_are_narrowed_once() {
    let runtime = Runtime::open(0, None).unwrap();
    if !runtime.device().name().contains("emulated") || runtime.cublas().is_none() {
        return;
    }
    const LAYERS: i64 = 2;
    // Weights of 16 bits, and the words of another model of the same size.
    let folder = tempfile::tempdir().unwrap();
    for file in ["llama-f16/config.json", "llama-f16/model.safetensors", "llama/tokenizer.json"] {
        let from = Path::new("tests/checkpoints").join(file);
        std::fs::copy(&from, folder.path().join(from.file_name().unwrap())).unwrap();
    }
    let model = folder.path().to_str().unwrap();
    let narrowed = |tokens| driver_calls(model, &[], tokens)["launch narrow_each"];
    assert_eq!(narrowed(6) - narrowed(4), 2 * (4 * LAYERS + 1));
}

/// What 16 tokens more cost. Every call of the driver is held: there are these, no memory is taken, cleared, given back or
/// asked for, no function told anything, and no event made.
#[test]
#[ignore = "needs the emulated device (tests/kernels/emulate/device.py)"]
fn cuda_tokens_take_no_memory_and_wait_once() {
    let runtime = Runtime::open(0, None).unwrap();
    // A GPU does not count its calls, and the emulated cuBLAS copies matrices to the host.
    if !runtime.device().name().contains("emulated") || runtime.cublas().is_some() {
        return;
    }
    const FEW: usize = 10;
    const MORE: usize = 16;
    let budget = |policy| vec!["--policy", policy, "--budget", "16"];
    // Of each token 19 launches in each of two layers, and 3 besides. Lists that pass a page change the table once; those
    // that pass one and come back do so at every token.
    let plain = 2 * 19 + 3;
    // Scores, their bounds, the protected, the choice, and what is kept.
    let evicted = 5;
    // Of all these tokens: copies to the GPU besides those of the step, copies from it, scores that are waited for in the
    // middle of an eviction step, launches.
    let cases = [
        (vec![], [0, 0, 0, 16 * plain + 1]),
        (budget("snapkv:window=4,kernel=3"), [0, 0, 0, 16 * plain + 1]),
        (budget("streaming-llm:sink=4+every"), [32, 16, 0, 16 * (plain + evicted + 1)]),
        // Attention that tokens receive, in each layer.
        (budget("h2o+every"), [32, 16, 0, 16 * (plain + 2 * 2 + evicted + 1)]),
        (budget("h2o+every+rerotate"), [32, 16, 0, 16 * (plain + 2 * (2 + 2) + evicted + 1 + 1)]),
        // The query and its log-sum-exp are held in each layer, and taken together; then the mean over heads.
        (budget("tova+every"), [32, 16, 0, 16 * (plain + 2 * 2 + 2 + evicted + 1 + 1)]),
        // Scores by keys take two launches more.
        (budget("delayed-keydiff:window=4"), [32, 16, 0, 16 * (plain + evicted + 2)]),
        (budget("knorm+every:steps=4"), [8, 4, 0, 16 * plain + 4 * (evicted + 1)]),
        // Its budget is divided by scores.
        (budget("knorm+ada+every:steps=4"), [8, 4, 8, 16 * plain + 4 * (evicted + 1)]),
    ];
    for (policy, [writes, reads, scores, launches]) in cases {
        let mut more = driver_calls("tests/checkpoints/llama", &policy, FEW + MORE);
        for (name, count) in driver_calls("tests/checkpoints/llama", &policy, FEW) {
            *more.entry(name).or_default() -= count;
        }
        let counted = more.into_iter().filter(|(name, count)| *count != 0 && name != "cuCtxGetCurrent");
        let (kernels, calls): (BTreeMap<_, _>, BTreeMap<_, _>) =
            counted.partition(|(name, _)| name.starts_with("launch "));
        let expected = [
            ("cuStreamSynchronize", 16),
            // Tokens with their angles, and the lengths of lists with changes of the page table.
            ("cuMemcpyHtoDAsync_v2", 32 + writes),
            // Logits.
            ("cuMemcpyDtoHAsync_v2", 16 + reads),
            ("cuMemcpyDtoH_v2", scores),
            ("cuLaunchKernel", launches),
        ];
        let expected = expected.into_iter().filter(|&(_, count)| count > 0);
        let expected: BTreeMap<String, i64> = expected.map(|(name, count)| (name.into(), count)).collect();
        assert_eq!(calls, expected, "{policy:?}: {kernels:#?}");
    }
}
