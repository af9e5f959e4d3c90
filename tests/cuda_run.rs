//! Experiments on a GPU. Ignored unless asked for: `cargo test --release -- --ignored cuda`, on a GPU or on the emulated
//! device (docs/testing-kernels.md), for which the contexts are short.

#[path = "common/byte_model.rs"]
mod byte_model;
mod common;

use common::cpu;
use kvsieve::device::Cpu;
use kvsieve::device::cuda::{CudaError, Device as CudaDevice};
use kvsieve::experiment::record::{Record, Status};
use kvsieve::experiment::{Device, Engine, Experiment, Gpu, Options, Spec, max_context, runner};
use kvsieve::memory::{Arena, Label};
use kvsieve::policy::{Context, Policy, PolicyEntry, PolicyError, Registry, Scorer, ScoringPlan, Statistic, each_list};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

const TIMING: &str = "[timing]\nmin_rounds = 1\nmax_rounds = 2\ncap_s = 0.05\n";

fn experiment(grids: &str, device: Device) -> Result<Experiment, String> {
    let spec = Spec::parse(&format!("name = \"x\"\n{TIMING}{grids}"), "x.toml").unwrap();
    Experiment::new(spec, "x.toml", &Registry::default(), device).map_err(|error| error.to_string())
}

/// One test at a time has the GPU: its memory is what they are about.
fn alone() -> MutexGuard<'static, ()> {
    static GPU: Mutex<()> = Mutex::new(());
    GPU.lock().unwrap_or_else(PoisonError::into_inner)
}

fn gpu() -> Gpu {
    Gpu::open(0, None, Cpu::new(Some(2)).unwrap()).unwrap()
}

fn options(out: &Path, limit_bytes: u64) -> Options {
    Options {
        out: out.into(),
        resume: false,
        join: false,
        shard: None,
        limit_bytes,
        repro: "kvsieve run x.toml".into(),
    }
}

fn run<'e>(grids: &str, engine: impl Into<Engine<'e>>, limit_bytes: u64) -> Vec<Record> {
    let (engine, folder) = (engine.into(), tempfile::tempdir().unwrap());
    let experiment = experiment(grids, engine.device()).unwrap();
    let options = options(folder.path(), limit_bytes);
    runner::run(&experiment, &Registry::default(), engine, &options, &mut |_| ()).unwrap().records
}

const SHAPE: &str = "heads = \"4/2\"\nhead_dim = 32\n";

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_cells_are_accounted_for_to_the_byte() {
    let _alone = alone();
    let grids = [
        format!("[[grid]]\nmeasure = \"forward\"\nkernel = [\"naive\", \"tiled\"]\ncontext_tokens = [40, 97]\n{SHAPE}"),
        format!("[[grid]]\nmeasure = \"forward\"\ndtype = \"bf16\"\ncausal = false\ncontext_tokens = 97\n{SHAPE}"),
        format!("[[grid]]\nmeasure = \"decode\"\ncontext_tokens = 97\npage_tokens = [\"contiguous\", 1, 16]\n{SHAPE}"),
        format!("[[grid]]\nmeasure = \"decode\"\ndtype = \"f16\"\nbatch = 2\ncontext_tokens = 97\n{SHAPE}"),
    ];
    let gpu = gpu();
    let records = run(&grids.concat(), &gpu, 1 << 30);
    assert_eq!(records.len(), 4 + 1 + 3 + 1);
    for record in &records {
        let label = record.cell.label();
        assert_eq!((record.status, &record.reason), (Status::Ok, &None), "{label}");
        assert_eq!(record.cell.device, Device::Cuda, "{label}");
        assert!(record.isa_path.starts_with(gpu.runtime().unwrap().device().name()), "{label}: {}", record.isa_path);
        let memory = record.memory.as_ref().unwrap();
        assert_eq!(memory.peak_bytes, memory.predicted_peak_bytes, "{label}");
        assert_eq!(memory.residual_bytes, 0, "{label}");
        assert!(memory.rss_growth_bytes.is_none() && memory.gpu_growth_bytes.is_some(), "{label}: {memory:?}");
        assert!(record.latency[record.cell.measure.name()].median_ns > 0.0, "{label}");
        assert!(record.drift.as_ref().unwrap().checked_rows > 0, "{label}");
    }
    let scores: Vec<bool> = records
        .iter()
        .map(|record| record.memory.as_ref().unwrap().peak_by_label.contains_key(&Label::Scores))
        .collect();
    let naive: Vec<bool> = records.iter().map(|record| record.cell.kernel == "naive").collect();
    assert_eq!(scores, naive, "only naive keeps scores");
}

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_skips_what_has_no_kernel_there_and_says_why() {
    let _alone = alone();
    let other = format!("[[grid]]\nmeasure = \"forward\"\nkernel = \"tiled:br=16\"\ncontext_tokens = 40\n{SHAPE}");
    let own = format!("[[grid]]\nmeasure = \"forward\"\nkernel = \"naive\"\ncontext_tokens = 40\n{SHAPE}");
    let gpu = gpu();
    let records = run(&format!("{other}{own}"), &gpu, 1 << 30);
    let of = |kernel: &str| records.iter().find(|record| record.cell.kernel == kernel).unwrap();
    assert_eq!(of("naive").status, Status::Ok);
    assert_eq!(of("tiled:br=16").status, Status::Skipped);
    assert!(of("tiled:br=16").reason.as_ref().unwrap().contains("br"), "{:?}", of("tiled:br=16").reason);
    // Where nothing at all can run, nothing is written.
    let experiment = experiment(&other, Device::Cuda).unwrap();
    let error = runner::prepare(&experiment, &Registry::default(), &gpu).err().unwrap().to_string();
    assert!(error.starts_with("none of the cells runs here: forward tiled:br=16"), "{error}");
}

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_skips_models_beside_what_it_measures() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    byte_model::write(folder.path(), 2048);
    let eval = format!(
        "[[grid]]\nmeasure = \"eval\"\nmodel = \"{}\"\ncontext_tokens = 900\ntask = \"passkey\"\n\
         policy = [\"full\", \"knorm\"]\nbudget = 0.5\n",
        folder.path().display()
    );
    let forward = format!("[[grid]]\nmeasure = \"forward\"\nkernel = \"naive\"\ncontext_tokens = 40\n{SHAPE}");
    let gpu = gpu();
    let records = run(&format!("{eval}{forward}"), &gpu, 1 << 30);
    let (evaluated, measured): (Vec<&Record>, _) = records.iter().partition(|record| record.cell.model.is_some());
    assert_eq!(measured.iter().map(|record| record.status).collect::<Vec<_>>(), [Status::Ok]);
    assert_eq!(evaluated.len(), 3);
    for record in evaluated {
        assert_eq!((record.status, record.cell.device), (Status::Skipped, Device::Cuda));
        assert_eq!(record.reason.as_deref(), Some("models run on the CPU only"));
    }
    let experiment = experiment(&eval, Device::Cuda).unwrap();
    let error = runner::prepare(&experiment, &Registry::default(), &gpu).err().unwrap().to_string();
    let model = folder.path().file_name().unwrap().to_string_lossy();
    assert!(error.starts_with(&format!("none of the cells runs here: eval {model} passkey agnostic full")), "{error}");
}

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_out_of_memory_is_a_record_and_the_sweep_goes_on() {
    let _alone = alone();
    let gpu = gpu();
    let runtime = gpu.runtime().unwrap();
    let device = runtime.device();
    // All but a little is held by somebody else.
    let (elsewhere, free_bytes) = (Arena::unlimited(), device.free_bytes_now().unwrap());
    let held = device.alloc(&elsewhere, Label::Workspace, free_bytes - (8 << 20)).unwrap();
    let grid = "[[grid]]\nmeasure = \"forward\"\nkernel = \"naive\"\nheads = \"1/1\"\nhead_dim = 64\n\
                context_tokens = [32, 2048]\n";
    let records = run(&format!("{grid}{}", grid.replace("[32, 2048]", "48")), &gpu, u64::MAX);
    drop(held);
    let statuses: Vec<(usize, Status)> =
        records.iter().map(|record| (record.cell.context_tokens, record.status)).collect();
    assert_eq!(statuses, [(32, Status::Ok), (48, Status::Ok), (2048, Status::Oom)]);
    let refused = records[2].refused.as_ref().unwrap();
    assert_eq!((refused.label.as_str(), refused.requested_bytes), ("scores", 4 * 2048 * 2048));
    assert!(refused.free_bytes.unwrap() < refused.requested_bytes, "{refused:?}");
    // The GPU is as good as before.
    assert_eq!(run(&grid.replace("[32, 2048]", "56"), &gpu, u64::MAX)[0].status, Status::Ok);
}

const LIMIT_BYTES: u64 = 600 << 10;

/// On every device the limit is where the formula says; here it is the arena's, to the token.
fn find<'e>(engine: impl Into<Engine<'e>>) {
    let (engine, forward) = (engine.into(), "[[grid]]\nmeasure = \"forward\"\n");
    let grids = [
        format!("{forward}kernel = [\"naive\", \"tiled\"]\ncontext_tokens = [32, 64]\nwindow = 16\n{SHAPE}"),
        format!("[[grid]]\nmeasure = \"decode\"\ncontext_tokens = 32\npage_tokens = [\"contiguous\", 16]\n{SHAPE}"),
    ];
    let experiment = experiment(&grids.concat(), engine.device()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let options =
        max_context::Options { out: folder.path().into(), limit_bytes: Some(LIMIT_BYTES), repro: "kvsieve run".into() };
    let found = max_context::find(&experiment, &Registry::default(), engine, &options, &mut |_, _| ()).unwrap();
    assert_eq!(found.max_contexts.len(), 4);
    for max_context in &found.max_contexts {
        assert_eq!(max_context.found_tokens, max_context.predicted_tokens, "{max_context:?}");
        assert_eq!(
            max_context.refused_tokens,
            Some(max_context.found_tokens + max_context.step_tokens),
            "{max_context:?}"
        );
        assert!(max_context.peak_bytes <= LIMIT_BYTES && max_context.peak_bytes > LIMIT_BYTES / 2, "{max_context:?}");
        let refused = max_context.refused.as_ref().unwrap();
        assert!(refused.requested_bytes > refused.free_bytes.unwrap(), "{max_context:?}");
    }
    let lines = std::fs::read_to_string(found.folder.join("max-context.jsonl")).unwrap();
    let read: Vec<max_context::MaxContext> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(read == found.max_contexts);
    assert_eq!(
        max_context::table(&found.max_contexts).matches("+0.00%").count(),
        4,
        "{}",
        max_context::table(&found.max_contexts)
    );
}

#[test]
fn the_limit_is_where_the_formula_says() {
    find(cpu(2));
}

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_limits_are_where_the_formula_says() {
    let _alone = alone();
    find(&gpu());
}

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_is_an_option_of_run() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let grid = format!("[[grid]]\nmeasure = \"forward\"\nkernel = \"tiled\"\ncontext_tokens = 40\n{SHAPE}");
    std::fs::write(folder.path().join("x.toml"), format!("name = \"x\"\n{TIMING}{grid}")).unwrap();
    let kvsieve = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvsieve"));
        let output = command.current_dir(folder.path()).args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let line = kvsieve(&["run", "x.toml", "--device", "cuda", "--json", "-"]);
    let record: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(record["cell"]["device"], "cuda");
    assert_eq!(record["repro"], "kvsieve run x.toml --device cuda");
    // The same cell on the CPU is another cell, and a report of both keeps them apart.
    kvsieve(&["run", "x.toml"]);
    let runs: Vec<String> = std::fs::read_dir(folder.path().join("results/x"))
        .unwrap()
        .map(|entry| entry.unwrap().path().display().to_string())
        .collect();
    let mut report: Vec<&str> = ["report", "--out", "both"].into();
    report.extend(runs.iter().map(String::as_str));
    kvsieve(&report);
    let summary = std::fs::read_to_string(folder.path().join("both/summary.md")).unwrap();
    assert_eq!(summary.matches("# x\n").count(), 2, "{summary}");
    assert!(kvsieve(&["run", "x.toml", "--device", "cuda", "--dry-run"]).contains("1 cell, 0 of them over"));
}

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_evicts_as_the_cpu_does() {
    let _alone = alone();
    let policies = "[\"streaming-llm+every\", \"h2o+every\", \"snapkv:window=8\", \"tova+every\", \"knorm+every:steps=3\", \
                    \"ada-snapkv:window=8\", \"max-attention+global\", \
                    \"streaming-llm+chunks:tokens=16\", \"keydiff+chunks:tokens=40\", \
                    \"h2o+chunks:tokens=32\", \"snapkv:window=8+chunks:tokens=40\", \
                    \"ada-snapkv:window=8+chunks:tokens=40\", \
                    \"streaming-llm+every+rerotate\", \"h2o:age=true+every+rerotate\", \
                    \"snapkv:window=8+chunks:tokens=40+rerotate\", \
                    \"ada-snapkv:window=8+chunks:tokens=40+rerotate\", \
                    \"snapkv:window=4+every:steps=3\", \"snapkv:window=4+every:steps=2+rerotate\", \
                    \"knorm+delayed:window=8\", \"delayed-keydiff:window=8\", \"keydiff+delayed:window=4+rerotate\"]";
    let shape = "heads = \"4/2\"\nhead_dim = 16\nlayers = 2\nbatch = 1\ncontext_tokens = 96\nnew_tokens = 5\n";
    let grid = |dtype: &str, rest: &str| format!("[[grid]]\nmeasure = \"evict\"\ndtype = \"{dtype}\"\n{shape}{rest}\n");
    let cut = format!("policy = {policies}\nbudget = 24");
    let chunks = "[\"snapkv:window=8+chunks:tokens=40+every:steps=2+rerotate\", \
                  \"ada-snapkv:window=8+chunks:tokens=40+every:steps=2\"]";
    let two = grid("f32", &format!("kernel = \"naive\"\npolicy = {chunks}\nbudget = 24"));
    let grids = [
        grid("bf16", &cut),
        grid("f32", "policy = [\"full\", \"h2o\"]\nbudget = 0.25"),
        two.replace("batch = 1", "batch = 2"),
    ]
    .concat();
    let (gpu, limit_bytes) = (gpu(), 1 << 30);
    let (there, here) = (run(&grids, &gpu, limit_bytes), run(&grids, cpu(2), limit_bytes));
    assert_eq!(there.len(), here.len());
    for (there, here) in there.iter().zip(&here) {
        let label = there.cell.label();
        assert_eq!(
            (there.status, &there.reason, &there.cell.policy),
            (Status::Ok, &None, &here.cell.policy),
            "{label}"
        );
        let memory = there.memory.as_ref().unwrap();
        let even = Registry::default().policy(there.cell.policy.as_ref().unwrap()).unwrap().is_even();
        match even {
            true => assert_eq!(memory.residual_bytes, 0, "{label}: {memory:?}"),
            false => assert!(memory.peak_bytes <= memory.predicted_peak_bytes, "{label}: {memory:?}"),
        }
        let (a, b) = (there.eviction.as_ref().unwrap(), here.eviction.as_ref().unwrap());
        assert_eq!((a.evicted_tokens, a.kept_fraction), (b.evicted_tokens, b.kept_fraction), "{label}");
        assert_eq!((a.kv_bytes_dense, a.kv_bytes_live), (b.kv_bytes_dense, b.kv_bytes_live), "{label}");
        assert_eq!(a.kv_bytes_peak, b.kv_bytes_peak, "{label}");
        assert_eq!(a.kept_by_position, b.kept_by_position, "{label}");
        let [a_mass, b_mass] = [a, b].map(|eviction| eviction.attention_mass_kept);
        assert_eq!(a_mass.is_some(), b_mass.is_some(), "{label}");
        assert!(a_mass.zip(b_mass).is_none_or(|(a, b)| (a - b).abs() < 1e-3), "{label}");
        let drift = [there, here].map(|record| record.drift.as_ref().unwrap().rel_l2);
        assert!((drift[0] - drift[1]).abs() <= 0.02 * drift[1].max(0.1), "{label}: {drift:?}");
    }
    let refused = [("cur", "no kernel for it on CUDA yet"), ("knorm+merge", "evicted tokens are only dropped on CUDA")];
    for (policy, reason) in refused {
        let own = grid("bf16", "policy = \"knorm\"\nbudget = 24");
        let records =
            run(&[grid("bf16", &format!("policy = \"{policy}\"\nbudget = 24")), own].concat(), &gpu, limit_bytes);
        let skipped = records.iter().find(|record| record.status == Status::Skipped).expect(policy);
        assert!(skipped.reason.as_ref().unwrap().contains(reason), "{:?}", skipped.reason);
    }
}

/// Keeps the keys nearest to one end of the context, in the two forms that a policy for both devices has.
struct ByPosition;

impl Scorer for ByPosition {
    fn needs(&self) -> Vec<Statistic> {
        Vec::new()
    }

    fn scoring_plan(&self) -> Option<ScoringPlan> {
        Some(ScoringPlan::Positions)
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        each_list(context, scores, &mut [], |list, scores, _| {
            scores.iter_mut().enumerate().for_each(|(slot, score)| *score = list.position(slot) as f32);
        });
        Ok(())
    }
}

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_runs_the_policies_of_its_caller() {
    let _alone = alone();
    let entry = |name| PolicyEntry {
        name,
        about: "",
        paper: "",
        parameters: &[],
        build: |_, _| Ok(Policy::after_prefill(ByPosition)),
    };
    // One in the place of a built-in one, which keeps other tokens, and one that only the caller knows.
    let registry = Registry::default().with(entry("knorm")).with(entry("latest"));
    let grids = "[[grid]]\nmeasure = \"evict\"\nheads = \"4/2\"\nhead_dim = 16\nlayers = 1\ncontext_tokens = 96\n\
                 new_tokens = 2\npolicy = [\"knorm\", \"latest\", \"latest+chunks:tokens=40\"]\nbudget = 24\n";
    let kept = |engine: Engine<'_>| -> Vec<_> {
        let spec = Spec::parse(&format!("name = \"x\"\n{TIMING}{grids}"), "x.toml").unwrap();
        let experiment = Experiment::new(spec, "x.toml", &registry, engine.device()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let outcome = runner::run(&experiment, &registry, engine, &options(folder.path(), 1 << 30), &mut |_| ());
        let kept = |record: Record| {
            assert_eq!((record.status, &record.reason), (Status::Ok, &None), "{}", record.cell.label());
            record.eviction.unwrap().kept_by_position
        };
        outcome.unwrap().records.into_iter().map(kept).collect()
    };
    let gpu = gpu();
    let there = kept(Engine::Cuda(&gpu));
    assert_eq!(there.len(), 3);
    assert_eq!(there[0], there[1], "the same policy by either name");
    assert_eq!(there, kept(Engine::Cpu(cpu(2))));
}

#[test]
#[ignore = "cuda: needs a GPU"]
fn cuda_memory_that_was_given_back_is_there_again() {
    let _alone = alone();
    let (device, arena) = (CudaDevice::open(0).unwrap(), Arena::unlimited());
    let most = device.free_bytes() / 4 * 3;
    for _ in 0..2 {
        let buffer = device.alloc(&arena, Label::Input, most).unwrap();
        match device.alloc(&arena, Label::Scores, most) {
            Err(CudaError::OutOfMemory { label: Label::Scores, requested_bytes, free_bytes }) => {
                assert_eq!(requested_bytes, most);
                assert!(free_bytes < most);
            }
            other => panic!("{:?}", other.map(|buffer| buffer.bytes())),
        }
        let mut start = [1; 16];
        buffer.read(&mut start).unwrap();
        assert_eq!(start, [0; 16], "new memory is zeroed");
        assert_eq!(arena.usage().live_bytes, most, "what failed is not counted");
    }
}
