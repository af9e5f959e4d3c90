//! Experiments through the library: what is measured, what memory is accounted for, and what is no quiet number.

use crate::common::{cpu, normal, rng, tensor};
use kvsieve::experiment::record::{Record, Status};
use kvsieve::experiment::{Device, Experiment, Options, Outcome, Progress, Spec, runner, store};
use kvsieve::policy::{Context, Decoding, Policy, PolicyEntry, PolicyError, Registry, Scorer, Statistic};
use kvsieve::tensor::DType;
use kvsieve::tensor::file::{self, Output};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const TIMING: &str = "[timing]\nmin_rounds = 1\nmax_rounds = 2\ncap_s = 0.05\n";

fn experiment_of(grids: &str, registry: &Registry) -> Experiment {
    let text = format!("name = \"x\"\n{TIMING}{grids}");
    Experiment::new(Spec::parse(&text, "x.toml").unwrap(), "x.toml", registry, Device::Cpu).unwrap()
}

fn options(out: &Path) -> Options {
    Options {
        out: out.into(),
        resume: false,
        join: false,
        shard: None,
        limit_bytes: 1 << 30,
        repro: "kvsieve run x.toml".into(),
    }
}

/// Runs an experiment into a folder of its own.
pub fn run(grids: &str) -> Vec<Record> {
    let folder = tempfile::tempdir().unwrap();
    run_in(grids, &Registry::default(), 2, options(folder.path())).records
}

fn run_in(grids: &str, registry: &Registry, threads: usize, options: Options) -> Outcome {
    let outcome = runner::run(&experiment_of(grids, registry), registry, cpu(threads), &options, &mut |_| ()).unwrap();
    let on_disk = store::read(&outcome.folder).unwrap().0;
    assert!(on_disk == outcome.records, "records read back differ from those returned");
    outcome
}

const EVICT: &str = "[[grid]]\nmeasure = \"evict\"\nheads = \"4/2\"\nhead_dim = 32\nnew_tokens = 8\n";

pub fn evict(rest: &str) -> String {
    format!("{EVICT}{rest}\n")
}

/// Every method of the registry that needs neither a file nor a model.
pub fn methods() -> Vec<&'static str> {
    let names = kvsieve::policy::POLICIES.iter().map(|entry| entry.name);
    let works_alone = |name: &&str| {
        let policy = Registry::default().policy(name).unwrap();
        policy.parameters.missing().is_none() && policy.reconstruction.is_none()
    };
    names.filter(works_alone).collect()
}

/// Every policy of the registry, as the list of a grid.
pub fn every_policy() -> String {
    format!("policy = {:?}\n", methods())
}

/// Whether a policy evicts between decode steps.
pub fn judges_again(policy: &str) -> bool {
    Registry::default().policy(policy).unwrap().schedule.decoding != Decoding::Never
}

pub fn assert_sound(record: &Record) {
    let label = record.cell.label();
    assert_eq!(record.status, Status::Ok, "{label}: {:?}", record.reason);
    assert_eq!(record.reason, None);
    let memory = record.memory.as_ref().unwrap();
    assert_eq!(memory.residual_bytes, 0, "{label}: {memory:?}");
    assert_eq!(memory.peak_bytes, memory.predicted_peak_bytes, "{label}");
    assert!(memory.arena_growth_bytes > 0 && memory.arena_growth_bytes < memory.peak_bytes, "{label}");
    let tight = |warning: &String| warning.contains("nothing but protected tokens stays");
    assert!(record.warnings.iter().all(tight), "{label}: {:?}", record.warnings);
    for (phase, latency) in &record.latency {
        assert!((1..=2).contains(&latency.samples_ns.len()), "{label} {phase}");
        assert!(latency.ci95_low_ns <= latency.median_ns && latency.median_ns <= latency.ci95_high_ns);
    }
    let drift = record.drift.as_ref().unwrap();
    assert!(drift.rel_l2.is_finite() && drift.checked_rows > 0, "{label}");
    assert!(drift.ci95_low <= drift.rel_l2 && drift.rel_l2 <= drift.ci95_high, "{label}: {drift:?}");
}

/// A policy that says it evicts, and does not.
const LAZY: PolicyEntry = PolicyEntry {
    name: "lazy",
    about: "",
    paper: "",
    parameters: &[],
    build: |_, _| {
        let mut policy = Policy::after_prefill(Constant(0.0));
        policy.scorer = None;
        Ok(policy)
    },
};

/// One whose scores are no numbers.
const BROKEN: PolicyEntry =
    PolicyEntry { name: "broken", build: |_, _| Ok(Policy::after_prefill(Constant(f32::NAN))), ..LAZY };

/// One of a user's own that works.
const OWN: PolicyEntry = PolicyEntry { name: "own", build: |_, _| Ok(Policy::after_prefill(Constant(1.0))), ..LAZY };

struct Constant(f32);

impl Scorer for Constant {
    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::Keys]
    }

    fn score(&self, _: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        scores.fill(self.0);
        Ok(())
    }
}

/// What had no room is run again where there is room for it now, and not where there is none yet.
#[test]
fn what_was_out_of_memory_runs_under_a_larger_limit() {
    let folder = tempfile::tempdir().unwrap();
    let grids = evict("policy = [\"full\", \"knorm\"]\nbudget = 0.5\ncontext_tokens = [64, 2048]");
    let registry = Registry::default();
    let of = |outcome: &Outcome| -> Vec<(usize, Status)> {
        outcome.records.iter().map(|record| (record.cell.context_tokens, record.status)).collect()
    };
    let under =
        |limit_bytes, resume| run_in(&grids, &registry, 2, Options { resume, limit_bytes, ..options(folder.path()) });
    let first = of(&under(1 << 20, false));
    let expected = |context, status| first.iter().filter(|found| **found == (context, status)).count() == 2;
    assert!(first.len() == 4 && expected(64, Status::Ok) && expected(2048, Status::Oom), "{first:?}");
    assert_eq!(of(&under((1 << 20) + 1, true)), first, "there is no more room than before");
    assert_eq!(of(&under(1 << 30, true)), [(64, Status::Ok), (64, Status::Ok), (2048, Status::Ok), (2048, Status::Ok)]);
}

#[test]
fn a_policy_that_does_nothing_or_gives_no_numbers_fails_by_name() {
    let registry = Registry::default().with(LAZY).with(BROKEN).with(OWN);
    let folder = tempfile::tempdir().unwrap();
    let grids = evict("policy = [\"lazy\", \"broken\", \"own\"]\nbudget = 0.25\ncontext_tokens = 256");
    let first = run_in(&grids, &registry, 2, options(folder.path()));
    let of = |records: &[Record], policy: &str| -> Record {
        records.iter().rfind(|record| record.cell.policy.as_deref() == Some(policy)).unwrap().clone()
    };
    let lazy = of(&first.records, "lazy");
    assert_eq!(lazy.status, Status::Failed);
    let reason = "the policy evicted nothing: a budget of 0.25 against a context of 256 tokens";
    assert_eq!(lazy.reason.as_deref(), Some(reason));
    let broken = of(&first.records, "broken");
    assert_eq!(broken.status, Status::Failed);
    assert!(broken.reason.as_ref().unwrap().contains("gave the score NaN to slot 0 of KV head 0"), "{broken:?}");
    assert!(lazy.latency.is_empty() && lazy.eviction.is_none() && broken.drift.is_none());
    let own = of(&first.records, "own");
    assert_sound(&own);
    assert_eq!(own.eviction.unwrap().tie_rate, 1.0);
    // Failed cells run again on resuming, and so do those that they are compared with: ratios are of one moment.
    let resumed = Options { resume: true, ..options(folder.path()) };
    let second = run_in(&grids, &registry, 2, resumed);
    assert_eq!(second.folder, first.folder);
    assert_eq!(second.records.len(), 3, "what is run again replaces what it was");
    let written = fs::read_to_string(second.folder.join(store::CELLS)).unwrap();
    for policy in ["own", "lazy"] {
        assert_eq!(written.matches(&format!("\"policy\":\"{policy}\"")).count(), 2, "{policy}");
    }
}

#[test]
fn what_does_not_fit_is_oom_with_its_prediction_and_never_runs() {
    let grids = "[[grid]]\nmeasure = \"forward\"\nkernel = [\"naive\", \"tiled\"]\nheads = \"2/1\"\nhead_dim = 32\ncontext_tokens = 512\n";
    let fits = run(grids);
    let predicted = |record: &Record| record.memory.as_ref().unwrap().predicted_peak_bytes;
    let (naive, tiled) = (predicted(&fits[0]), predicted(&fits[1]));
    assert!(naive > tiled);
    let with_limit = |limit_bytes: u64| -> (Vec<Record>, usize) {
        let folder = tempfile::tempdir().unwrap();
        let (registry, mut turns) = (Registry::default(), 0);
        let options = Options { limit_bytes, ..options(folder.path()) };
        let outcome = runner::run(&experiment_of(grids, &registry), &registry, cpu(2), &options, &mut |progress| {
            turns += usize::from(matches!(progress, Progress::Trial(_)));
        });
        (outcome.unwrap().records, turns)
    };
    let (records, turns) = with_limit(1 << 16);
    assert_eq!(turns, 0);
    for (record, bytes) in records.iter().zip([naive, tiled]) {
        assert_eq!(record.status, Status::Oom);
        assert_eq!(predicted(record), bytes);
        assert_eq!(
            record.reason.as_ref().unwrap(),
            &format!("needs {bytes} bytes, 65536 are allowed (--limit-memory)")
        );
        assert_eq!((record.memory.as_ref().unwrap().peak_bytes, record.latency.len()), (0, 0));
        assert!(record.drift.is_none() && record.work.is_none());
    }
    // The prediction is exact: a byte less is too little, and it is enough.
    let status =
        |limit_bytes| -> Vec<Status> { with_limit(limit_bytes).0.iter().map(|record| record.status).collect() };
    assert_eq!(status(naive - 1), [Status::Oom, Status::Ok]);
    assert_eq!(status(naive), [Status::Ok, Status::Ok]);
    assert_eq!(status(tiled - 1), [Status::Oom, Status::Oom]);
}

#[test]
fn a_budget_that_holds_everything_is_skipped() {
    let records =
        run(&evict("policy = [\"knorm\", \"full\"]\nbudget = [1.0, 256, 4096, \"1GiB\", 255]\ncontext_tokens = 256"));
    let statuses: Vec<Status> = records.iter().map(|record| record.status).collect();
    // Skipped cells end before the first turn.
    assert_eq!(statuses, [[Status::Skipped; 4].as_slice(), &[Status::Ok; 2]].concat());
    let reason = "the budget holds the whole context of 256 tokens: nothing to evict";
    assert!(records[..4].iter().all(|record| record.reason.as_deref() == Some(reason)));
}

/// Where each query sees one key, nothing depends on q: what rounding leaves of its gradient is no mistake.
#[test]
fn gradients_that_are_nothing_but_rounding_are_right() {
    let grid = "[[grid]]\nmeasure = \"backward\"\nkernel = [\"naive\", \"tiled\"]\ndtype = [\"f32\", \"f16\", \"bf16\"]\n\
                heads = \"4/2\"\nhead_dim = 64\ncontext_tokens = [16, 300]\n";
    for window in ["window = 1\n", "window = 2\n", ""] {
        let records = run(&format!("{grid}{window}"));
        assert_eq!(records.len(), 12);
        records.iter().for_each(|record| assert_eq!(record.status, Status::Ok, "{record:?}"));
    }
}

/// Between new tokens queries see what is left of a list by positions: some of them look further back than it is long.
#[test]
fn more_queries_may_be_looked_at_than_tokens_stay() {
    let policies = "[\"rms-attention:window=16+every:steps=4\", \"max-attention:last=16+every:steps=4\", \
                    \"snapkv:window=16,local=2,span=all+every:steps=4\"]";
    for record in run(&evict(&format!("policy = {policies}\nbudget = 12\ncontext_tokens = 96"))) {
        assert_eq!(record.status, Status::Ok, "{record:?}");
        let eviction = record.eviction.unwrap();
        assert!(eviction.attention_mass_kept.is_some_and(|kept| kept > 0.0), "{eviction:?}");
    }
}

/// Where a threshold decides what stays, the budget may hold everything.
#[test]
fn a_threshold_evicts_whatever_the_budget_holds() {
    let records = run(&evict("policy = \"knorm+threshold:at=-5\"\nbudget = [0.99, 1.0]\ncontext_tokens = 256"));
    let fractions: Vec<f64> = records.iter().map(|record| record.eviction.as_ref().unwrap().kept_fraction).collect();
    assert!(records.iter().all(|record| record.status == Status::Ok) && fractions[0] < 0.9, "{records:?}");
    assert_eq!(fractions[0], fractions[1]);
}

/// What evicts while decoding has something to evict where the budget holds the context and not the new tokens.
#[test]
fn a_budget_above_the_context_is_for_policies_that_go_on_evicting() {
    let records = run(&evict("policy = \"h2o+every\"\nbudget = [260, 264]\ncontext_tokens = 256"));
    let find = |budget: &str| records.iter().find(|record| record.cell.budget.as_deref() == Some(budget)).unwrap();
    let (ran, skipped) = (find("260"), find("264"));
    assert_eq!((ran.status, skipped.status), (Status::Ok, Status::Skipped));
    // The last of its evictions comes with the sixth of eight tokens.
    let slower = run(&evict("policy = \"h2o+every:steps=3\"\nbudget = [261, 262]\ncontext_tokens = 256"));
    assert_eq!(slower.iter().filter(|record| record.status == Status::Ok).count(), 1, "{slower:?}");
    assert_eq!(slower.iter().filter(|record| record.status == Status::Skipped).count(), 1, "{slower:?}");
    let eviction = ran.eviction.as_ref().unwrap();
    assert!(
        eviction.evicted_tokens > 0 && eviction.kept_fraction == 1.0 && ran.latency.contains_key("decode_evict"),
        "{ran:?}"
    );
    assert!(ran.drift.as_ref().unwrap().rel_l2 > 1e-4 && ran.memory.as_ref().unwrap().residual_bytes == 0, "{ran:?}");
}

#[test]
fn shards_are_disjoint_and_complete() {
    let grids =
        "[[grid]]\nmeasure = \"forward\"\nheads = [\"2/1\", \"2/2\"]\nhead_dim = 32\ncontext_tokens = \"128..512*2\"\n";
    let folder = tempfile::tempdir().unwrap();
    let whole: BTreeSet<String> = run(grids).into_iter().map(|record| record.cell_id).collect();
    assert_eq!(whole.len(), 6);
    for count in [1, 4, 7] {
        let mut seen = BTreeSet::new();
        for index in 1..=count {
            let options = Options { shard: Some((index, count)), ..options(folder.path()) };
            let outcome = run_in(grids, &Registry::default(), 2, options);
            assert!(outcome.run_id.contains(&format!("-shard{index}of{count}")), "{}", outcome.run_id);
            assert!(outcome.records.len().abs_diff(6 / count) <= 1, "{index} of {count}");
            for record in outcome.records {
                assert!(seen.insert(record.cell_id), "a cell is in two shards");
            }
        }
        assert_eq!(seen, whole, "{count} shards");
    }
}

/// Writes noise as `q`, `k` and `v` of `tokens` tokens.
fn tensor_file(path: &Path, tokens: usize, seed: u64) {
    let mut rng = rng(seed);
    let mut make =
        |heads: usize| tensor(DType::Bf16, [2, heads, tokens, 16], &normal(&mut rng, 2 * heads * tokens * 16, 1.0));
    let (q, k, v) = (make(4), make(2), make(2));
    file::write(path, &[Output::tensor("q", &q), Output::tensor("k", &k), Output::tensor("v", &v)]).unwrap();
}

#[test]
fn inputs_come_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in.safetensors");
    tensor_file(&path, 150, 1);
    let grids = format!(
        "[file]\npath = {path:?}\n[[grid]]\nmeasure = \"forward\"\ncontext_tokens = [100, 150]\n\
         [[grid]]\nmeasure = \"evict\"\nnew_tokens = 6\ncontext_tokens = 144\npolicy = [\"full\", \"h2o\", \"oracle\"]\nbudget = 40\n"
    );
    let records = run(&grids);
    assert_eq!(records.len(), 5);
    for record in &records {
        assert_sound(record);
        let cell = &record.cell;
        assert_eq!((cell.batch, cell.q_heads, cell.kv_heads, cell.head_dim, cell.dtype), (2, 4, 2, 16, DType::Bf16));
        assert!(record.eviction.as_ref().is_none_or(|eviction| eviction.needle_recall.is_none()));
    }
    for (grid, expected) in [
        // A measure that reads no tensors would ignore them.
        (
            "measure = \"recall\"\nmemory = \"list:slots=8\"\nepisode = \"write\"",
            "recall reads no tensors; leave [file] out",
        ),
        // Other seeds do not change them, and would make one draw look like many.
        (
            "measure = \"forward\"\ncontext_tokens = 100\nseed = [0, 1]",
            "seed is [0, 1]; the tensors of a [file] are the same for every seed",
        ),
    ] {
        let text = format!("name = \"x\"\n[file]\npath = {path:?}\n[[grid]]\n{grid}\n");
        let spec = Spec::parse(&text, "x.toml").unwrap();
        let refused = Experiment::new(spec, "x.toml", &Registry::default(), Device::Cpu).err().unwrap().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
    // Other bytes are another workload.
    tensor_file(&path, 150, 2);
    let other = run(&grids);
    let ids =
        |records: &[Record]| -> BTreeSet<String> { records.iter().map(|record| record.cell_id.clone()).collect() };
    assert!(ids(&records).is_disjoint(&ids(&other)));
    // A file that is too short is found out before anything is written.
    let registry = Registry::default();
    tensor_file(&path, 149, 1);
    let out = folder.path().join("out");
    let error =
        runner::run(&experiment_of(&grids, &registry), &registry, cpu(2), &options(&out), &mut |_| ()).err().unwrap();
    assert!(error.to_string().contains("has 149 tokens; needed: 150 and 0 new"), "{error}");
    assert!(!out.exists());
}

#[test]
fn the_same_seed_gives_the_same_numbers_on_any_number_of_threads() {
    let numbers = |seed: u64, threads: usize| {
        let folder = tempfile::tempdir().unwrap();
        let grids = evict(&format!("{}budget = 0.25\ncontext_tokens = 256\nseed = {seed}\n", every_policy()));
        let records = run_in(&grids, &Registry::default(), threads, options(folder.path())).records;
        let mut numbers: Vec<_> =
            records.into_iter().map(|record| (record.cell.policy, record.drift, record.eviction)).collect();
        numbers.sort_by(|a, b| a.0.cmp(&b.0));
        numbers
    };
    let first = numbers(3, 2);
    assert_eq!(first, numbers(3, 2));
    assert_eq!(first, numbers(3, 1), "threads");
    for (one, other) in first.iter().zip(numbers(4, 2)) {
        assert_ne!(one.1, other.1, "{:?}", one.0);
    }
}

#[test]
fn samples_of_competing_cells_are_taken_in_turn() {
    let registry = Registry::default();
    let text = "name = \"x\"\n[timing]\nwarmups = 2\nmin_rounds = 3\nmax_rounds = 3\n[[grid]]\nmeasure = \"forward\"\n\
                kernel = [\"naive\", \"tiled\", \"decode\"]\nheads = \"2/1\"\nhead_dim = 32\ncontext_tokens = 128\n";
    let experiment = Experiment::new(Spec::parse(text, "x.toml").unwrap(), "x.toml", &registry, Device::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut turns = Vec::new();
    let outcome = runner::run(&experiment, &registry, cpu(2), &options(folder.path()), &mut |progress| {
        if let Progress::Trial(cell) = progress {
            turns.push(cell.kernel.clone());
        }
    });
    // A checked turn, a second warm-up, three samples.
    assert_eq!(turns, ["naive", "tiled", "decode"].repeat(5));
    for record in outcome.unwrap().records {
        let latency = &record.latency["forward"];
        assert_eq!((latency.samples_ns.len(), latency.warmups), (3, 2));
    }
}

#[test]
fn a_finished_run_is_resumed_to_nothing_and_another_configuration_is_another_run() {
    let folder = tempfile::tempdir().unwrap();
    let registry = Registry::default();
    let grid = |tokens: &str| {
        format!("[[grid]]\nmeasure = \"decode\"\nheads = \"2/1\"\nhead_dim = 32\ncontext_tokens = {tokens}\n").repeat(2)
    };
    let first = run_in(&grid("[128, 256]"), &registry, 1, options(folder.path()));
    assert_eq!(first.records.len(), 2, "a cell in two grids runs once");
    let before = fs::read(first.folder.join(store::CELLS)).unwrap();
    let resume = || Options { resume: true, ..options(folder.path()) };
    let mut started = None;
    let again =
        runner::run(&experiment_of(&grid("[128, 256]"), &registry), &registry, cpu(1), &resume(), &mut |progress| {
            if let Progress::Start { cells, resumed } = progress {
                started = Some((cells, resumed));
            }
        });
    assert_eq!(started, Some((0, 2)));
    assert_eq!(again.unwrap().records, first.records);
    assert_eq!(fs::read(first.folder.join(store::CELLS)).unwrap(), before);
    let other = run_in(&grid("[128, 512]"), &registry, 1, resume());
    assert_ne!(other.folder, first.folder);
    assert_eq!(other.records.len(), 2);
}

#[test]
fn a_window_that_moves_as_a_whole_may_be_turned() {
    // Without sinks all that stays, and the query, turn by the same angles: that changes nothing but roundings. With
    // sinks the distance to them does change.
    let policies = [
        "streaming-llm:sink=0",
        "streaming-llm:sink=0+rerotate",
        "streaming-llm:sink=4",
        "streaming-llm:sink=4+rerotate",
    ];
    for more in ["", "+every", "+chunks:tokens=64"] {
        let named: Vec<String> = policies.iter().map(|policy| format!("{policy}{more}")).collect();
        let records = run(&evict(&format!("policy = {named:?}\ncontext_tokens = 256\nbudget = 100\n")));
        let drift = |at: usize| {
            let record = records.iter().find(|record| record.cell.policy.as_deref() == Some(&named[at])).unwrap();
            assert_sound(record);
            record.drift.as_ref().unwrap().rel_l2
        };
        assert!((drift(0) - drift(1)).abs() < 1e-4, "{more}: {} {}", drift(0), drift(1));
        assert!((drift(2) - drift(3)).abs() > 1e-3, "{more}: {} {}", drift(2), drift(3));
    }
}

#[test]
fn who_looks_behind_rope_in_a_file_must_be_told_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in.safetensors");
    let mut rng = rng(1);
    let mut make =
        |heads: usize| tensor(DType::Bf16, [2, heads, 150, 16], &normal(&mut rng, 2 * heads * 150 * 16, 1.0));
    let (q, k, v) = (make(4), make(2), make(2));
    let says = |rope: Option<&str>| {
        let metadata = rope.map(|text| [("rope_theta".to_string(), text.to_string())].into());
        let outputs = [Output::tensor("q", &q), Output::tensor("k", &k), Output::tensor("v", &v)];
        file::write_with(&path, &outputs, metadata).unwrap();
    };
    for policy in ["knorm+rerotate", "leverage", "cap", "expected-attention", "compactor"] {
        let grids = format!(
            "[file]\npath = {path:?}\n[[grid]]\nmeasure = \"evict\"\nnew_tokens = 6\ncontext_tokens = 144\n\
             policy = {policy:?}\nbudget = 40\n"
        );
        let text = format!("name = \"x\"\n{TIMING}{grids}");
        let opened = || {
            let spec = Spec::parse(&text, "x.toml").unwrap();
            Experiment::new(spec, "x.toml", &Registry::default(), Device::Cpu)
                .map(drop)
                .map_err(|error| error.to_string())
        };
        // Said before anything runs.
        says(None);
        let error = opened().expect_err(policy);
        assert!(error.contains(policy) && error.contains("needs rope_theta in the tensor file's metadata"), "{error}");
        says(Some("mine"));
        assert!(opened().expect_err(policy).contains("has mine as rope_theta in its metadata"));
        for rope in ["none", "10000"] {
            says(Some(rope));
            run(&grids).iter().for_each(assert_sound);
        }
    }
}

#[test]
fn readers_read_what_their_budget_says() {
    let both = evict("policy = [\"quest\", \"think\"]\ncontext_tokens = 320\nbudget = [0.25, 0.5, 1.0]");
    let records = run(&(both + &evict("policy = \"think:ratio=0.25\"\ncontext_tokens = 320\nbudget = 1.0")));
    // Two heads; 32 channels of f32; 8 steps from 321 tokens on, 21 pages in all of them.
    let (token, tokens) = (2 * 32 * 4, (321..=328).sum::<u64>() as f64 / 8.0);
    let drift = |policy: &str, budget: &str| -> f64 {
        let same = |record: &&Record| {
            record.cell.policy.as_deref() == Some(policy) && record.cell.budget.as_deref() == Some(budget)
        };
        let record = records.iter().find(same).unwrap();
        if record.status == Status::Skipped {
            return 0.0;
        }
        assert_sound(record);
        let read = record.eviction.as_ref().unwrap().kv_bytes_read as f64;
        let fraction: f64 = budget.parse().unwrap();
        let wanted = match policy {
            // The last page holds 1 to 8 tokens, on average 4.5; the index has a line for each page.
            "quest" => 2.0 * f64::from(token) * ((fraction * 320.0 / 16.0 - 1.0) * 16.0 + 4.5 + 21.0),
            // The context's keys alone lose channels.
            "think" => 2.0 * (2.0 * tokens - 320.0 * (1.0 - fraction)) * 32.0 * 4.0,
            _ => 2.0 * (2.0 * tokens - 320.0 * 0.25) * 32.0 * 4.0,
        };
        assert!((read - wanted).abs() <= 1.0, "{policy} at {budget}: {read}, expected {wanted}");
        record.drift.as_ref().unwrap().rel_l2
    };
    for policy in ["quest", "think"] {
        let drifts = [drift(policy, "0.25"), drift(policy, "0.5")];
        assert!(drifts[0] > drifts[1] && drifts[1] > 0.0, "{policy}: {drifts:?}");
        assert_eq!(drift(policy, "1.0"), 0.0, "{policy} reads all: skipped");
    }
    assert!(drift("think:ratio=0.25", "1.0") > 0.0);
    let refused = |policy: &str, budget: &str| {
        let (registry, folder) = (Registry::default(), tempfile::tempdir().unwrap());
        let grids = evict(&format!("policy = \"{policy}\"\nbudget = {budget}\ncontext_tokens = 256"));
        let (experiment, options) = (experiment_of(&grids, &registry), options(folder.path()));
        runner::run(&experiment, &registry, cpu(1), &options, &mut |_| ()).err().map(|error| error.to_string())
    };
    for (policy, budget, reason) in
        [("quest", "15", "reads whole pages of 16 tokens"), ("think:ratio=0.5", "0.5", "give the budget 1.0")]
    {
        let error = refused(policy, budget).expect(policy);
        assert!(error.contains(reason), "{error}");
    }
}
