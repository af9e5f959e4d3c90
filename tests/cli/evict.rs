//! `kvsieve evict` as its users meet it: which tokens stay, in files and numbers, and one line for every mistake.

use crate::common::{normal, rng, tensor};
use assert_cmd::Command;
use kvsieve::policy::{POLICIES, Registry, Statistic};
use kvsieve::tensor::DType;
use kvsieve::tensor::file::{self, Output};
use predicates::str::contains;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A tensor of a test file.
struct Spec {
    name: &'static str,
    dtype: DType,
    dims: [usize; 4],
    values: Vec<f32>,
}

const Q: [usize; 4] = [2, 4, 33, 16];
const KV: [usize; 4] = [2, 2, 70, 16];
const FUTURE: [usize; 4] = [2, 4, 5, 16];
/// Gates that were trained in a model.
const GATES: &str = concat!("dms:gates=", env!("CARGO_MANIFEST_DIR"), "/models/dms/builtin-4x.safetensors");

/// `q`, `k`, `v` and `q_future`, noise.
fn problem(dtype: DType) -> Vec<Spec> {
    let tensors = [("q", Q), ("k", KV), ("v", KV), ("q_future", FUTURE)];
    let specs = tensors.into_iter().zip(1..).map(|((name, dims), seed)| Spec {
        name,
        dtype,
        dims,
        values: normal(&mut rng(seed), dims.iter().product(), 1.0),
    });
    specs.collect()
}

fn save(path: &Path, specs: &[Spec]) {
    let tensors: Vec<_> = specs.iter().map(|spec| tensor(spec.dtype, spec.dims, &spec.values)).collect();
    let outputs = specs.iter().zip(&tensors).map(|(spec, tensor)| Output::tensor(spec.name, tensor));
    file::write(path, &outputs.collect::<Vec<_>>()).unwrap();
}

/// What the output file holds.
#[derive(Debug, PartialEq)]
struct Kept {
    dims: Vec<usize>,
    kept: Vec<i64>,
    kept_len: Vec<i64>,
    scores: Option<Vec<f32>>,
}

impl Kept {
    /// Positions that stay in a list, checked for order and padding.
    fn list(&self, list: usize) -> &[i64] {
        let columns = self.dims[2];
        let row = &self.kept[list * columns..][..columns];
        let (kept, padding) = row.split_at(self.kept_len[list] as usize);
        assert!(kept.windows(2).all(|pair| pair[0] < pair[1]), "{row:?}");
        assert!(kept.iter().all(|position| (0..KV[2] as i64).contains(position)), "{row:?}");
        assert!(padding.iter().all(|position| *position == -1), "{row:?}");
        kept
    }
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

    /// `kvsieve evict` in the folder; options that are not given have defaults.
    fn evict(&self, options: &[&str]) -> Command {
        let mut command = Command::cargo_bin("kvsieve").unwrap();
        command.current_dir(self.folder.path()).arg("evict");
        let defaults =
            [("--input", "in.safetensors"), ("--output", "out.safetensors"), ("--policy", "knorm"), ("--budget", "20")];
        for (option, default) in defaults {
            if !options.contains(&option) {
                command.args([option, default]);
            }
        }
        command.args(options);
        command
    }

    /// Runs it with `--json -` and reads what it prints.
    fn measure(&self, options: &[&str]) -> Value {
        let output = self.evict(options).args(["--json", "-"]).assert().success().get_output().stdout.clone();
        serde_json::from_slice(&output).unwrap()
    }

    fn result(&self) -> Kept {
        let bytes = fs::read(self.path("out.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let integers = |name: &str| {
            let stored = tensors.tensor(name).unwrap();
            assert_eq!(stored.dtype(), safetensors::Dtype::I64);
            let values = stored.data().chunks_exact(8).map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap()));
            (stored.shape().to_vec(), values.collect::<Vec<i64>>())
        };
        let (dims, kept) = integers("kept");
        let (len_dims, kept_len) = integers("kept_len");
        assert_eq!((&dims[..2], &len_dims[..]), (&KV[..2], &KV[..2]));
        assert_eq!(dims[2] as i64, *kept_len.iter().max().unwrap());
        let scores = tensors.tensor("scores").ok().map(|stored| {
            assert_eq!((stored.dtype(), stored.shape()), (safetensors::Dtype::F32, &KV[..3]));
            stored.data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
        });
        Kept { dims, kept, kept_len, scores }
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
        let output = self.evict(options).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{options:?}: {stderr}");
        assert!(stderr.starts_with("error: ") && stderr.ends_with('\n'), "{options:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{options:?}: {stderr}");
        assert!(output.stdout.is_empty(), "{options:?}: printed something");
        assert_eq!(self.names(), before, "{options:?}: left a file");
        stderr
    }
}

#[test]
fn every_policy_keeps_its_budget_in_every_dtype() {
    for dtype in DType::ALL {
        let desk = Desk::with(&problem(dtype));
        for policy in POLICIES {
            if Registry::default().policy(policy.name).unwrap().parameters.missing().is_some() {
                let stderr = desk.fails(&["--policy", policy.name], 2);
                assert!(stderr.contains("of a policy file; give --policy-file"), "{stderr}");
                continue;
            }
            if Registry::default().policy(policy.name).unwrap().looks_at(Statistic::Reconstruction) {
                let stderr = desk.fails(&["--policy", policy.name, "--budget", "20"], 2);
                assert!(stderr.contains("needs a model that repeats its context"), "{stderr}");
                continue;
            }
            if Registry::default().policy(policy.name).unwrap().looks_at(Statistic::BeforeRope) {
                // The file does not tell RoPE's base; tests/policies/conformance.rs has files that do.
                let stderr = desk.fails(&["--policy", policy.name], 2);
                assert!(stderr.contains("rope_theta in the tensor file's metadata"), "{stderr}");
                continue;
            }
            let report = desk.measure(&["--policy", policy.name]);
            let kept = desk.result();
            let lens: Vec<usize> = (0..4).map(|list| kept.list(list).len()).collect();
            let total: usize = lens.iter().sum();
            let keeps_all = Registry::default().policy(policy.name).unwrap().scorer.is_none();
            match keeps_all {
                true => assert_eq!(lens, [70; 4], "{}", policy.name),
                _ => assert_eq!(lens, [20; 4], "{}", policy.name),
            }
            assert_eq!(kept.scores.is_none(), keeps_all, "{}", policy.name);
            assert_eq!(report["policy"], policy.name);
            assert_eq!(report["dtype"], dtype.to_string());
            assert_eq!(report["evicted_tokens"], 4 * 70 - total);
            assert_eq!(report["kept_fraction"], total as f64 / 280.0);
            assert_eq!(report["kv_bytes_dense"], 280 * 2 * 16 * dtype.bytes());
            assert_eq!(report["kv_bytes_kept"], total * 2 * 16 * dtype.bytes());
            assert!(report["peak_bytes"].as_u64() > report["kv_bytes_dense"].as_u64());
        }
    }
}

#[test]
fn a_file_says_of_its_rope_that_there_is_none_or_what_its_base_is() {
    let desk = Desk::with(&problem(DType::F32));
    let specs = problem(DType::F32);
    let tensors: Vec<_> = specs.iter().map(|spec| tensor(spec.dtype, spec.dims, &spec.values)).collect();
    let outputs: Vec<_> = specs.iter().zip(&tensors).map(|(spec, tensor)| Output::tensor(spec.name, tensor)).collect();
    let says = |text: &str| {
        let metadata = std::collections::HashMap::from([("rope_theta".to_string(), text.to_string())]);
        file::write_with(&desk.path("in.safetensors"), &outputs, Some(metadata)).unwrap();
    };
    for policy in ["leverage", "expected-attention", "cap", "compactor", "knorm+rerotate"] {
        let kept = ["none", "10000"].map(|text| {
            says(text);
            desk.evict(&["--policy", policy]).assert().success();
            desk.result().scores
        });
        assert!(kept[0] != kept[1] || policy == "knorm+rerotate", "{policy}: the base makes no difference");
        says("without");
        let stderr = desk.fails(&["--policy", policy], 2);
        assert!(stderr.contains("rope_theta in the file's metadata is 'without'; it must be a number"), "{stderr}");
    }
}

#[test]
fn a_budget_of_nothing_but_protected_tokens_warns() {
    let desk = Desk::with(&problem(DType::F32));
    let warned = |budget: &str| {
        let options = ["--policy", "snapkv:window=16+protect:sink=4", "--budget", budget, "--json", "-"];
        let output = desk.evict(&options).assert().success().get_output().clone();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        (report["warnings"].clone(), String::from_utf8(output.stderr).unwrap())
    };
    let (warnings, stderr) = warned("20");
    let text = "nothing but protected tokens stays: the budget is 20 tokens a head, and 4 first and 16 latest ones come \
                before all others";
    assert_eq!((warnings[0].as_str(), stderr), (Some(text), format!("warning: {text}\n")));
    assert_eq!(warned("21"), (Value::Null, String::new()));
}

#[test]
fn heads_that_keep_different_counts_are_padded() {
    let mut specs = problem(DType::F32);
    // The second head's keys are larger: under a threshold on norms the first head keeps nearly all of the budget.
    for (index, value) in specs[1].values.iter_mut().enumerate() {
        *value *= if index / (70 * 16) % 2 == 1 { 10.0 } else { 1.0 };
    }
    let desk = Desk::with(&specs);
    desk.evict(&["--policy", "knorm+ada:floor=0+delayed:window=3"]).assert().success();
    let kept = desk.result();
    assert_eq!((kept.dims[2], &kept.kept_len[..]), (37, &[37, 3, 37, 3][..]));
    assert_eq!(kept.list(1), [67, 68, 69]);
    assert_eq!(kept.kept.iter().filter(|position| **position == -1).count(), 2 * 34);
}

#[test]
fn kept_tokens_are_those_of_the_highest_scores() {
    let desk = Desk::with(&problem(DType::F32));
    desk.evict(&["--policy", "snapkv:window=8,kernel=3"]).assert().success();
    let kept = desk.result();
    for (list, scores) in kept.scores.as_ref().unwrap().chunks_exact(70).enumerate() {
        let stays = |slot: &usize| kept.list(list).contains(&(*slot as i64));
        let least = (0..70).filter(stays).map(|slot| scores[slot]).fold(f32::INFINITY, f32::min);
        let best_lost = (0..70).filter(|slot| !stays(slot)).map(|slot| scores[slot]).fold(0.0, f32::max);
        assert!(best_lost < least);
        // Protected tokens stand above all others.
        let evicted = scores[..62].iter().copied().fold(0.0, f32::max);
        assert!(scores[62..].iter().all(|score| *score > evicted) && (62..70).all(|slot| stays(&slot)));
    }
}

#[test]
fn budgets_seeds_and_threads_do_what_they_say() {
    let desk = Desk::with(&problem(DType::Bf16));
    // 4 lists, 64 bytes a token.
    for (budget, tokens) in [("0.25", 17), ("1.0", 70), ("512", 70), ("7", 7), ("4KiB", 16), ("256B", 1)] {
        let report = desk.measure(&["--budget", budget]);
        assert_eq!(report["budget_tokens"], tokens, "{budget}");
        assert_eq!(desk.result().kept_len, [tokens; 4], "{budget}");
    }
    let random = |options: &[&str]| {
        desk.evict(&[&["--policy", "random"], options].concat()).assert().success();
        desk.result()
    };
    let first = random(&["--seed", "1", "--threads", "1"]);
    assert_eq!(first, random(&["--seed", "1", "--threads", "3"]));
    assert_ne!(first, random(&["--seed", "2"]));
    assert_eq!(random(&[]), random(&["--seed", "0"]));
}

#[test]
fn the_report_has_every_field_and_the_summary_says_what_happened() {
    let desk = Desk::with(&problem(DType::F32));
    desk.evict(&["--json", "report.json", "--threads", "2", "--seed", "5"]).assert().success().stdout("");
    let report: Value = serde_json::from_slice(&fs::read(desk.path("report.json")).unwrap()).unwrap();
    let expected = serde_json::json!({
        "policy": "knorm", "budget": "20", "budget_tokens": 20, "batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 33,
        "kv_len": 70, "head_dim": 16, "dtype": "f32", "seed": 5, "threads": 2, "tie_rate": 0.0, "evicted_tokens": 200,
        "kv_bytes_dense": 35840, "kv_bytes_kept": 10240,
    });
    for (field, value) in expected.as_object().unwrap() {
        assert_eq!(&report[field], value, "{field}");
    }
    assert!(report["evict_ns"].as_u64().unwrap() > 0);
    let text = |options: &[&str]| String::from_utf8(desk.evict(options).output().unwrap().stdout).unwrap();
    let shown = text(&[]);
    for said in [
        "knorm at 20\n",
        "q [2, 4, 33, 16], k and v [2, 2, 70, 16]",
        "20.0 of 70 tokens (28.6%); by head 20.0 to 20.0",
        "35.0 KiB -> 10.0 KiB",
        "of 5 q_future",
        "out.safetensors",
    ] {
        assert!(shown.contains(said), "no '{said}' in {shown}");
    }
    let shown = text(&["--budget", "70"]);
    for said in ["nothing: the budget holds the whole context", "100.0% kept", "0.00e0 relative L2"] {
        assert!(shown.contains(said), "no '{said}' in {shown}");
    }
    let idle = "warning: budget 70 holds the whole context of 70 tokens: nothing is evicted";
    desk.evict(&["--budget", "70"]).assert().success().stderr(contains(idle));
    let shown = text(&["--policy", "full"]);
    assert!(shown.contains("nothing: the policy keeps everything"), "{shown}");
}

#[test]
fn a_schedule_that_plays_no_part_is_told() {
    let desk = Desk::with(&problem(DType::F32));
    for (policy, is_told) in [("snapkv", false), ("snapkv+chunks:tokens=16", true), ("snapkv+every:steps=2", true)] {
        let output = desk.evict(&["--policy", policy, "--budget", "0.5"]).assert().success().get_output().clone();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(said.contains("plays no part in one eviction"), is_told, "{policy}: {said}");
    }
}

/// The loss is that of the queries to come where the file has them, else of its last ones; what is kept of their attention
/// is more for the policy that looks at them than by lot.
#[test]
fn the_loss_is_told_of_the_queries_that_the_file_has() {
    let mut specs = problem(DType::F32);
    let of = |desk: &Desk, policy: &str| {
        let report = desk.measure(&["--policy", policy, "--budget", "35"]);
        let number = |name: &str| report[name].as_f64().unwrap();
        (
            report["asked"].clone(),
            report["asked_queries"].clone(),
            number("attention_mass_kept"),
            number("output_error"),
        )
    };
    let desk = Desk::with(&specs);
    let (oracle, random) = (of(&desk, "oracle"), of(&desk, "random"));
    assert_eq!((oracle.0, oracle.1), ("q_future".into(), 5.into()));
    assert!(oracle.2 > random.2 + 0.1 && oracle.3 < random.3, "{} {} {} {}", oracle.2, random.2, oracle.3, random.3);
    specs.truncate(3);
    let desk = Desk::with(&specs);
    let (snapkv, random) = (of(&desk, "snapkv:window=16,kernel=1"), of(&desk, "random"));
    assert_eq!((snapkv.0, snapkv.1), ("last queries".into(), 16.into()));
    assert!(snapkv.2 > random.2 && snapkv.3 < random.3, "{} {} {} {}", snapkv.2, random.2, snapkv.3, random.3);
    let report = desk.measure(&["--policy", "quest", "--budget", "35"]);
    assert!(report["attention_mass_kept"].is_null(), "quest evicts nothing");
}

/// Queries before the first key see nothing and have no say; values of zeros have no error that is relative to them.
#[test]
fn a_loss_is_a_number_or_is_not_told() {
    let with = |kv_len: usize, value: f32| {
        let dims = [("q", [1, 4, 20, 16]), ("k", [1, 2, kv_len, 16]), ("v", [1, 2, kv_len, 16])];
        let specs = dims.into_iter().zip(1..).map(|((name, dims), seed)| {
            let size = if name == "v" { value } else { 1.0 };
            let values = normal(&mut rng(seed), dims.iter().product(), 1.0).into_iter().map(|x| size * x).collect();
            Spec { name, dtype: DType::F32, dims, values }
        });
        Desk::with(&specs.collect::<Vec<_>>()).measure(&["--policy", "knorm", "--budget", "0.5"])
    };
    let few = with(5, 1.0);
    assert_eq!(few["asked_queries"], 5);
    assert!(few["attention_mass_kept"].as_f64().is_some_and(|kept| (0.0..1.0).contains(&kept)), "{few}");
    let zeros = with(40, 0.0);
    assert!(zeros["attention_mass_kept"].is_f64() && zeros["output_error"].is_null(), "{zeros}");
}

/// Policies look at all queries of a context, at its latest, or at none.
#[test]
fn queries_that_are_missing_are_told() {
    let desk = Desk::with(&problem(DType::F32));
    let all = "looks at all 70 queries, and the input holds 33";
    for (policy, told) in [
        ("h2o", all),
        ("max-attention:last=all", all),
        ("snapkv:window=64", "looks at the latest 64 queries, and the input holds 33"),
        ("knorm+match:queries=64", "looks at the latest 64 queries, and the input holds 33"),
        ("snapkv:window=16", ""),
        ("tova", ""),
        ("knorm", ""),
        ("quest", ""),
    ] {
        let output = desk.evict(&["--policy", policy, "--budget", "0.5"]).assert().success().get_output().clone();
        let said = String::from_utf8(output.stderr).unwrap();
        let warns = said.contains("and the input holds");
        assert!(said.contains(told) && warns != told.is_empty(), "{policy}: {said}");
    }
}

/// In a format a budget of bytes holds more tokens, and what the format loses is part of the error.
#[test]
fn a_format_counts_its_bytes_and_its_error() {
    let desk = Desk::with(&problem(DType::F32));
    let of = |options: &[&str]| {
        let report = desk.measure(&[&["--policy", "knorm"], options].concat());
        (
            report["kv_bytes_kept"].as_u64().unwrap(),
            report["output_error"].as_f64().unwrap(),
            report["kept_fraction"].clone(),
        )
    };
    let full = |format: &str| of(&["--budget", "1.0", "--kv-format", format]);
    assert_eq!((full("f32").0, full("f32").1), (35840, 0.0));
    // 16 codes and a scale, for 280 keys and as many values.
    assert_eq!(full("int8").0, 280 * 40);
    assert!(1e-4 < full("int8").1 && full("int8").1 < 2e-2, "{}", full("int8").1);
    assert!(full("fp8-e5m2").1 > full("fp8-e4m3").1, "{} {}", full("fp8-e5m2").1, full("fp8-e4m3").1);
    let [given, coded] = [&["--budget", "12KiB"][..], &["--budget", "12KiB", "--kv-format", "int8"]].map(&of);
    assert!(coded.2.as_f64() == Some(1.0) && given.2.as_f64() < Some(0.4) && coded.1 < given.1, "{given:?} {coded:?}");
    // An eviction's error, beside which the format's is small.
    let [given, coded] = [&["--budget", "20"][..], &["--budget", "20", "--kv-format", "int8"]].map(of);
    assert!((coded.1 / given.1 - 1.0).abs() < 0.05, "{given:?} {coded:?}");
    let bytes = fs::read(desk.path("out.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert!(["keys", "values"].iter().all(|name| tensors.tensor(name).unwrap().shape() == [2, 2, 20, 16]));
}

#[test]
fn wrong_options_are_named_in_one_line() {
    let desk = Desk::with(&problem(DType::F32));
    fs::create_dir(desk.path("folder")).unwrap();
    let cases: &[(&[&str], i32, &str)] = &[
        (&["--input", "none.safetensors"], 2, "cannot read 'none.safetensors': No such file"),
        (&["--input", "folder"], 2, "cannot read 'folder'"),
        (&["--kv-format", "q4_0"], 2, "the head dim is 16; q4_0 keeps rows whose width is a multiple of 32"),
        (&["--policy", "snap"], 2, "unknown policy 'snap'; did you mean 'snapkv'"),
        (&["--policy", ""], 2, "is not of the form NAME"),
        (&["--policy", "snapkv+"], 2, "'snapkv+' is not of the form NAME"),
        (&["--policy", "snapkv:"], 2, "'snapkv:' is not of the form NAME"),
        (&["--policy", "snapkv:sinks=1"], 2, "'snapkv' has no parameter 'sinks'; it has window, kernel, pool"),
        (&["--policy", "snapkv:kernel=4"], 2, "snapkv: kernel is '4'; it must be odd"),
        (&["--policy", "snapkv:window=0"], 2, "snapkv: window is '0'; it must be a whole number of at least 1"),
        (&["--policy", "h2o:window=-1"], 2, "h2o: window is '-1'"),
        (&["--policy", "h2o+delayed"], 2, "policy 'h2o+delayed': delayed eviction compares"),
        (&["--policy", "streaming-llm", "--budget", "4"], 2, "'streaming-llm' keeps 4 sinks and needs at least 5"),
        (&["--budget", "0"], 2, "'0' is not a budget"),
        (&["--budget", "-1"], 2, "'-1' is not a budget"),
        (&["--budget", "-0.5"], 2, "'-0.5' is not a budget"),
        (&["--budget", "nan"], 2, "'nan' is not a budget"),
        (&["--budget", "1.5"], 2, "'1.5' is not a budget"),
        (&["--budget", "half"], 2, "'half' is not a budget; write a fraction kept such as 0.25"),
        (&["--budget", "0.001"], 2, "budget 0.001 leaves no token of 70 in a KV head"),
        (&["--budget", "10B"], 2, "budget 10B leaves no token of 70"),
        (&["--policy", "knorm+protect:sink=1,sink=2"], 2, "'protect:sink=1,sink=2' gives 'sink' twice"),
        (&["--kv-format", "kiwi"], 2, "unknown format 'kiwi'; did you mean 'kivi'?"),
        (&["--kv-format", "v=int4"], 2, "given behind k, as k=int8,v=bf16"),
        (&["--seed", "-1"], 2, "invalid value '-1' for '--seed <N>': a whole number without a sign is needed"),
        (&["--seed", "x"], 2, "invalid value 'x' for '--seed <N>'"),
        (&["--threads", "0"], 2, "0 threads asked; 1 to 1024 are possible"),
        (
            &["--device", "cuda", "--policy", "cur"],
            2,
            "policy 'cur': no kernel for it on CUDA yet; there are streaming-llm, knorm, keydiff, h2o, observed-attention, snapkv, \
             tova, scissorhands, max-attention; or use --device cpu",
        ),
        (&["--device", "cuda", "--policy", "knorm+merge"], 2, "evicted tokens are only dropped on CUDA"),
        (&["--device", "cuda", "--policy", "knorm+duo"], 2, "on CUDA budgets are divided by lengths or scores"),
        (&["--device", "cuda", "--policy", GATES], 2, "gates of hidden states are worked out in models on CUDA"),
        (&["--device", "cuda:x"], 2, "unknown device 'cuda:x'; use cpu or cuda[:N]"),
        (&["--device", "tpu"], 2, "unknown device 'tpu'; use cpu or cuda[:N]"),
        (&["--limit-memory", "8"], 2, "'8' is not an amount of memory"),
        (&["--limit-memory", "16KiB"], 1, "out of memory: 16896 bytes for input requested"),
        (&["--output", "none/out.safetensors"], 2, "there is no folder 'none'"),
        (&["--output", "folder"], 2, "'folder' exists and is not a regular file"),
        (&["--output", "./in.safetensors"], 2, "the same file as --input; give each its own"),
        (&["--json", "out.safetensors"], 2, "--json is 'out.safetensors', the same file as --output"),
        (&["--json", "none/x"], 2, "there is no folder 'none'"),
        (&["--buget", "3"], 2, "unexpected argument '--buget' found"),
    ];
    for (options, status, expected) in cases {
        let stderr = desk.fails(options, *status);
        assert!(stderr.contains(expected), "{options:?}: expected '{expected}' in: {stderr}");
    }
    let output = Command::cargo_bin("kvsieve").unwrap().args(["evict", "--input", "x"]).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), stderr.lines().count()), (Some(2), 1), "{stderr}");
    assert!(stderr.contains("--output") && stderr.contains("--policy"), "{stderr}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_place_that_takes_no_files_is_refused_before_the_work() {
    let desk = Desk::with(&problem(DType::F32));
    let stderr = desk.fails(&["--output", "/proc/out.safetensors"], 2);
    assert!(stderr.contains("cannot write --output '/proc/out.safetensors'"), "{stderr}");
}

#[test]
fn wrong_tensors_are_named_in_one_line() {
    type Change = fn(&mut Vec<Spec>);
    fn dims(spec: &mut Spec, dims: [usize; 4]) {
        spec.dims = dims;
        spec.values = vec![0.5; dims.iter().product()];
    }
    let cases: &[(Change, &[&str], i32, &str)] = &[
        (|all| all.truncate(2), &[], 2, "has no tensor 'v'; it holds k, q"),
        (|all| all.truncate(3), &["--policy", "oracle"], 2, "has no tensor 'q_future'; it holds k, q, v"),
        (
            |all| dims(&mut all[3], [2, 4, 5, 8]),
            &["--policy", "oracle"],
            2,
            "q_future is [2, 4, 5, 8]; it must be [2, 4, any, 16]",
        ),
        (|all| dims(&mut all[3], [2, 2, 5, 16]), &["--policy", "oracle"], 2, "q_future is [2, 2, 5, 16]"),
        (
            |all| all[3].values[7] = f32::NAN,
            &["--policy", "oracle"],
            2,
            "tensor 'q_future' in 'in.safetensors' holds NaN",
        ),
        (|all| dims(&mut all[2], [2, 2, 71, 16]), &[], 2, "k and v differ in shape"),
        (|all| dims(&mut all[0], [1, 4, 33, 16]), &[], 2, "q and k differ in batch"),
        (|all| dims(&mut all[0], [2, 3, 33, 16]), &[], 2, "3 query heads cannot share 2 KV heads"),
        (|all| all.iter_mut().for_each(|spec| dims(spec, [1, 1, 2, 257])), &[], 2, "head dim is 257; at most 256"),
        (|all| all[2].dtype = DType::F16, &[], 2, "k is f32"),
        (
            |all| all[1].values[70 * 16 + 18] = f32::INFINITY,
            &[],
            2,
            "tensor 'k' in 'in.safetensors' holds inf at [0, 1, 1, 2]",
        ),
        (|all| all[3].values[7] = f32::NAN, &[], 2, "tensor 'q_future' in 'in.safetensors' holds NaN"),
        (|all| dims(&mut all[3], [2, 2, 5, 16]), &[], 2, "q_future is [2, 2, 5, 16]; it must be [2, 4, any, 16]"),
        (
            |all| all[2].values[3] = 1e9,
            &["--policy", "streaming-llm", "--kv-format", "f16"],
            1,
            "values has NaN or infinity, and nothing was written",
        ),
        // Finite numbers whose squares are not: no number, and nothing is written.
        (|all| all[1].values[3 * 16] = 1e30, &[], 1, "scores must be numbers: are the inputs too large?"),
    ];
    for (change, options, status, expected) in cases {
        let mut specs = problem(DType::F32);
        change(&mut specs);
        let stderr = Desk::with(&specs).fails(options, *status);
        assert!(stderr.contains(expected), "expected '{expected}' in: {stderr}");
    }
}

#[test]
fn files_that_hold_no_problem_are_named_in_one_line() {
    let desk = Desk::with(&problem(DType::F32));
    let path = desk.path("in.safetensors");
    let whole = fs::read(&path).unwrap();
    let cases: &[(&[u8], &str)] = &[
        (&whole[..whole.len() - 1], "is not a valid safetensors file"),
        (b"", "'in.safetensors'"),
        (&[0xff; 100], "is not a valid safetensors file"),
    ];
    for (bytes, expected) in cases {
        fs::write(&path, bytes).unwrap();
        let stderr = desk.fails(&[], 2);
        assert!(stderr.contains(expected), "expected '{expected}' in: {stderr}");
    }
    let integers = ["q", "k", "v"].map(|name| Output::i64(name, vec![1, 2, 2, 1], &[1, 2, 3, 4]));
    file::write(&path, &integers).unwrap();
    assert!(desk.fails(&[], 2).contains("tensor 'q' in 'in.safetensors' is I64; F32, F16 or BF16"));
}

/// On a GPU or the emulated device: `cargo test --release -- --ignored cuda`.
#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_evicts_what_the_cpu_evicts() {
    for dtype in [DType::F32, DType::Bf16] {
        let desk = Desk::with(&problem(dtype));
        for policy in ["streaming-llm", "h2o", "snapkv:window=8", "ada-snapkv:window=8", "full"] {
            let here = desk.measure(&["--policy", policy]);
            let kept = desk.result();
            let there = desk.measure(&["--policy", policy, "--device", "cuda"]);
            let found = desk.result();
            assert_eq!((found.dims, found.kept, found.kept_len), (kept.dims, kept.kept, kept.kept_len), "{policy}");
            let scores = kept.scores.into_iter().flatten().zip(found.scores.into_iter().flatten());
            scores.for_each(|(a, b)| assert!((a - b).abs() < 1e-4, "{policy}, {dtype}: {a} {b}"));
            for field in ["evicted_tokens", "kept_fraction", "kv_bytes_kept", "tie_rate", "budget_tokens"] {
                assert_eq!(here[field], there[field], "{policy}: {field}");
            }
            assert_eq!((&there["device"], &there["threads"]), (&"cuda:0".into(), &Value::Null));
        }
    }
}
