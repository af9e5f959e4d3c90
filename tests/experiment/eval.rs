//! Evaluations of a tiny random model: it answers nothing right, but what a policy does to it is seen, and a full cache is
//! itself.

use crate::byte_model;
use kvsieve::device::Cpu;
use kvsieve::eval::Protocol;
use kvsieve::experiment::record::{Record, Status};
use kvsieve::experiment::{Device, Experiment, Options, Outcome, Progress, Spec, run, runner::RunError};
use kvsieve::memory::{Arena, Label};
use kvsieve::model::{Model, locate, quantise_folder};
use kvsieve::policy::Registry;
use std::path::{Path, PathBuf};

fn experiment(folder: &Path, grid: &str) -> Result<Experiment, String> {
    let model = folder.join("model");
    if !model.exists() {
        byte_model::write(&model, 4096);
    }
    of_model(&model.display().to_string(), grid)
}

fn of_model(model: &str, grid: &str) -> Result<Experiment, String> {
    let text = format!("name = \"x\"\n[[grid]]\nmeasure = \"eval\"\nmodel = \"{model}\"\n{grid}");
    let spec = Spec::parse(&text, "x.toml").map_err(|error| error.to_string())?;
    Experiment::new(spec, "x.toml", &Registry::default(), Device::Cpu).map_err(|error| error.to_string())
}

fn go(experiment: &Experiment, out: &Path, resume: bool) -> Result<Outcome, RunError> {
    go_within(1 << 30, experiment, out, resume)
}

fn go_within(limit_bytes: u64, experiment: &Experiment, out: &Path, resume: bool) -> Result<Outcome, RunError> {
    let options =
        Options { out: out.into(), resume, join: false, shard: None, limit_bytes, repro: "kvsieve run x.toml".into() };
    run(experiment, &Registry::default(), &Cpu::new(Some(2)).unwrap(), &options, &mut |_| ())
}

fn record<'r>(records: &'r [Record], policy: &str, task: &str) -> &'r Record {
    let wanted = |record: &&Record| {
        record.cell.policy.as_deref() == Some(policy) && record.cell.task.as_deref().is_some_and(|name| name == task)
    };
    records.iter().find(wanted).unwrap_or_else(|| panic!("{policy} {task}"))
}

const GRID: &str = "context_tokens = 1500\ntask = [\"recall:queries=2\", \"passkey\"]\nsamples = 2\nbudget = 0.25\n\
    policy = [\"full\", \"random\", \"streaming-llm\", \"h2o\", \"snapkv\", \"ada-snapkv\", \"keydiff\", \
    \"snapkv+chunks:tokens=512\", \"h2o+every:steps=4\", \"knorm+rerotate\", \"delayed-keydiff\"]";

#[test]
fn a_full_cache_is_itself_and_evictions_are_seen() {
    let folder = tempfile::tempdir().unwrap();
    let experiment = experiment(folder.path(), GRID).unwrap();
    let records = go(&experiment, &folder.path().join("out"), false).unwrap().records;
    assert_eq!(records.len(), 22);
    for record in &records {
        assert_eq!(record.status, Status::Ok, "{}: {:?}", record.cell.label(), record.reason);
        assert_eq!(record.warnings, Vec::<String>::new(), "{}", record.cell.label());
        let (answers, label) = (record.answers.as_ref().unwrap(), record.cell.label());
        assert_eq!(answers.samples, 2);
        assert_eq!(answers.questions, if record.cell.task.as_deref() == Some("passkey") { 2 } else { 4 });
        assert_eq!((answers.sample_scores.len(), answers.o_drift_by_layer.len()), (2, 2));
        assert_eq!(answers.sample_depths.len(), if record.cell.task.as_deref() == Some("passkey") { 2 } else { 0 });
        assert!(answers.context_tokens > 1300.0 && answers.context_tokens < 1500.0, "{label}: {answers:?}");
        let memory = record.memory.as_ref().unwrap();
        if record.cell.policy.as_deref() == Some("full") {
            assert_eq!((answers.kl_nats.mean, answers.top1_agreement.mean), (0.0, 1.0), "{label}");
            assert_eq!(
                (answers.greedy_agreement.unwrap().mean, answers.nll_difference_nats.mean),
                (1.0, 0.0),
                "{label}"
            );
            assert_eq!((answers.accuracy_difference.unwrap().mean, answers.kept_fraction), (0.0, 1.0), "{label}");
            assert!(answers.o_drift_by_layer.iter().all(|drift| drift.mean == 0.0), "{label}");
            assert_eq!(memory.residual_bytes, 0, "{label}: {memory:?}");
            assert_eq!(answers.evicted_tokens, Some(0));
        } else {
            assert!(answers.kl_nats.mean > 1e-5 && answers.kl_nats.mean.is_finite(), "{label}: {:?}", answers.kl_nats);
            assert!(answers.o_drift_by_layer.iter().all(|drift| drift.mean > 1e-4), "{label}");
            assert!((answers.kept_fraction - 0.25).abs() < 0.02, "{label}: kept {}", answers.kept_fraction);
            assert!(answers.kv_bytes_live < answers.kv_bytes_dense * 2 / 5, "{label}");
            assert!(answers.kv_bytes_peak >= Some(answers.kv_bytes_live), "{label}");
            assert!(answers.evicted_tokens > Some(0), "{label}");
        }
        // Of more than eight cells that are compared each runs alone once.
        assert_eq!(record.latency["first_token"].samples_ns.len(), 1);
        assert!(record.latency.contains_key("decode"), "{label}");
    }
    // Who evicts chunks never holds the whole context.
    let peak = |policy: &str| record(&records, policy, "passkey").answers.as_ref().unwrap().kv_bytes_peak.unwrap();
    assert!(peak("snapkv+chunks:tokens=512") < peak("snapkv") * 3 / 4);
    // Who evicts after prefill holds all of it at that moment, and no more later; a full cache also what follows.
    assert_eq!(peak("snapkv"), peak("random"));
    assert!(peak("snapkv") < peak("full"));
}

#[test]
fn as_many_samples_run_alone_as_are_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let run = |count: &str| {
        let grid = format!(
            "context_tokens = 300\ntask = \"passkey\"\nsamples = 3\npolicy = \"snapkv:window=8\"\nbudget = 0.25\n{count}"
        );
        let experiment = experiment(folder.path(), &grid).unwrap();
        go(&experiment, &folder.path().join(count), false).unwrap().records
    };
    let (usual, none, two) = (run(""), run("alone_samples = 0"), run("alone_samples = 2"));
    for ((usual, none), two) in usual.iter().zip(&none).zip(&two) {
        let count = |record: &Record| record.latency.get("first_token").map(|latency| latency.samples_ns.len());
        assert_eq!([usual, none, two].map(count), [Some(3), None, Some(2)], "{}", usual.cell.label());
        assert_eq!([usual, none, two].map(|record| record.memory.is_some()), [true, false, true]);
        let answers = |record: &Record| record.answers.clone().unwrap();
        let (full, bare) = (answers(usual), answers(none));
        assert_eq!((bare.kv_bytes_peak, bare.evicted_tokens), (None, None));
        assert_eq!((full.sample_kl_nats, full.kv_bytes_live), (bare.sample_kl_nats, bare.kv_bytes_live));
    }
}

#[test]
fn a_memory_is_compared_with_the_full_cache() {
    let folder = tempfile::tempdir().unwrap();
    let (exact, small) = ("camelot:slots=4000,window=200,threshold=2", "camelot:slots=40,window=20");
    let grid = format!(
        "context_tokens = 700\ntask = \"passkey\"\nsamples = 2\npolicy = \"full\"\n\
         memory = [\"{exact}\", \"{small}\", \"transformer-xl:slots=40,window=20\"]"
    );
    let experiment = experiment(folder.path(), &grid).unwrap();
    let records = go(&experiment, &folder.path().join("out"), false).unwrap().records;
    let of = |text| records.iter().find(|record| record.cell.memory.as_deref() == Some(text)).unwrap();
    assert_eq!((records.len(), of(small).cell.policy.as_deref()), (4, None));
    assert!(of(small).cell_id != of(exact).cell_id);
    for record in &records {
        assert_eq!((record.status, &record.reason), (Status::Ok, &None));
        assert_eq!(record.memory.as_ref().unwrap().residual_bytes, 0, "{}", record.cell.label());
    }
    let answers = |record: &Record| record.answers.clone().unwrap();
    // The byte model's weights are f32, as memories are.
    let (exact, small) = (answers(of(exact)), answers(of(small)));
    assert!(exact.kl_nats.mean < 1e-6 && exact.kept_fraction == 1.0, "{exact:?}");
    assert!(small.kl_nats.mean > 1e-5 && small.kept_fraction < 0.1, "{small:?}");
    // The modes behind the context, layer by layer, of a memory that has some.
    let (ring, layers) = (answers(of("transformer-xl:slots=40,window=20")), records[0].cell.layers);
    assert_eq!((small.modes_by_layer.len(), ring.modes_by_layer.len()), (layers, 0));
    assert!(small.modes_by_layer.iter().all(|modes| modes.count <= 40.0 && modes.tokens >= 1.0), "{small:?}");
    let mean = small.sample_nll_nats.iter().sum::<f64>() / 2.0;
    assert!((mean - small.nll_nats.mean).abs() < 1e-9 && small.sample_nll_nats.len() == 2, "{small:?}");
    // Two keys and a value of 40 modes and 20 tokens.
    let head_dim = of("transformer-xl:slots=40,window=20").cell.head_dim as u64;
    let heads = (records[0].cell.layers * records[0].cell.kv_heads) as u64;
    assert_eq!(small.kv_bytes_live, heads * 60 * 3 * 4 * head_dim);
    assert_eq!(small.kv_bytes_peak, Some(small.kv_bytes_live));
    for (more, reason) in [
        ("memory = \"camelot:slots=0\"", "slots is '0'; it must be a whole number of at least 1"),
        ("memory = \"camelot\"\nkv_format = \"int8\"", "leave kv_format or memory out"),
    ] {
        let error = self::experiment(folder.path(), &format!("context_tokens = 700\ntask = \"passkey\"\n{more}"));
        assert!(error.as_ref().is_err_and(|error| error.contains(reason)), "{:?}", error.err());
    }
}

#[test]
fn a_fact_from_far_before_the_window_comes_back_only_from_a_memory() {
    let folder = tempfile::tempdir().unwrap();
    let grid = "context_tokens = 600\ntask = \"passkey:depth=0.2\"\nsamples = 4\npolicy = \"full\"\n\
                memory = [\"camelot:slots=256,sink=4,window=64\", \"transformer-xl:slots=1,window=64\", \
                \"memorizing-transformer:top=32,window=64\"]";
    let records = go(&of_model("builtin", grid).unwrap(), &folder.path().join("out"), false).unwrap().records;
    let scores: Vec<(&str, f64)> = records
        .iter()
        .map(|record| {
            let answers = record.answers.as_ref().unwrap_or_else(|| panic!("{:?}", record.reason));
            (record.cell.chosen().unwrap_or_default(), answers.accuracy.unwrap().mean)
        })
        .collect();
    for (name, score) in &scores {
        let is_right = !name.starts_with("transformer-xl");
        assert!(if is_right { *score > 0.7 } else { *score < 0.3 }, "{scores:?}");
    }
    assert_eq!(scores.len(), 4);
}

#[test]
fn a_budget_that_holds_the_context_is_for_policies_that_judge_answers() {
    let folder = tempfile::tempdir().unwrap();
    let grid =
        "context_tokens = 600\ntask = \"count\"\nsamples = 1\nbudget = 200\npolicy = [\"h2o+every\", \"snapkv\"]";
    let records = go(&experiment(folder.path(), grid).unwrap(), &folder.path().join("out"), false).unwrap().records;
    let (h2o, snapkv) = (record(&records, "h2o+every", "count"), record(&records, "snapkv", "count"));
    let answers = h2o.answers.as_ref().unwrap_or_else(|| panic!("{:?}", h2o.reason));
    assert!(answers.context_tokens < 200.0 && answers.kept_fraction == 1.0, "{answers:?}");
    assert!(answers.evicted_tokens > Some(0) && answers.kl_nats.mean > 0.0, "{answers:?}");
    assert_eq!(snapkv.status, Status::Skipped);
    assert!(snapkv.reason.as_ref().unwrap().contains("nothing to evict"), "{:?}", snapkv.reason);
}

#[test]
fn a_model_takes_more_memory_where_scores_are_held() {
    let folder = tempfile::tempdir().unwrap();
    let grid =
        "context_tokens = 1200\ntask = \"passkey\"\nsamples = 1\npolicy = \"full\"\nkernel = [\"naive\", \"tiled\"]";
    let records = go(&experiment(folder.path(), grid).unwrap(), &folder.path().join("out"), false).unwrap().records;
    let memory = |index: usize| records[index].memory.as_ref().unwrap_or_else(|| panic!("{:?}", records[index].reason));
    assert_eq!([0, 1].map(|index| &*records[index].cell.kernel), ["naive", "tiled"]);
    assert_eq!([0, 1].map(|index| memory(index).residual_bytes), [0, 0]);
    let scores = memory(0).peak_by_label[&Label::Scores];
    assert!(scores > 4 * 512 * 1200, "a chunk's scores of at least one head: {scores}");
    assert!(!memory(1).peak_by_label.contains_key(&Label::Scores));
    assert!(memory(0).peak_bytes - memory(1).peak_bytes > scores / 2);
}

#[test]
fn a_star_is_every_policy_that_a_model_can_run() {
    let folder = tempfile::tempdir().unwrap();
    let grid = "context_tokens = 900\ntask = \"passkey\"\nsamples = 1\nbudget = 0.5\npolicy = \"*\"";
    let experiment = experiment(folder.path(), grid).unwrap();
    let policies: Vec<&str> = experiment.cells.iter().filter_map(|cell| cell.policy.as_deref()).collect();
    assert!(["full", "random", "snapkv", "compactor"].iter().all(|name| policies.contains(name)), "{policies:?}");
    assert!(!policies.iter().any(|name| name.starts_with("oracle") || *name == "gate"), "{policies:?}");
}

/// The file of what each sample gave, in a run's folder.
fn samples_in(folder: &Path) -> Option<PathBuf> {
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    names.into_iter().find(|path| path.file_name().unwrap().to_str().unwrap().starts_with("samples"))
}

#[test]
fn a_run_goes_on_where_it_was_killed() {
    let folder = tempfile::tempdir().unwrap();
    let grid =
        "context_tokens = 900\ntask = \"passkey\"\nsamples = 2\nbudget = [0.25, 0.5]\npolicy = [\"full\", \"h2o\"]";
    let experiment = experiment(folder.path(), grid).unwrap();
    let first = go(&experiment, folder.path(), false).unwrap();
    let path = first.folder.join("cells.jsonl");
    let whole = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = whole.lines().collect();
    assert_eq!(samples_in(&first.folder), None, "what is complete needs no samples");
    std::fs::write(&path, format!("{}\n{}", lines[0], &lines[1][..40])).unwrap();
    let again = go(&experiment, folder.path(), true).unwrap();
    assert_eq!((again.folder, again.records.len()), (first.folder, 5));
    // What is answered does not depend on who else was asked.
    for record in &first.records {
        let other = again.records.iter().find(|other| other.cell_id == record.cell_id).unwrap();
        assert_eq!(other.answers, record.answers, "{}", record.cell.label());
    }
}

#[test]
fn a_run_that_is_killed_within_a_group_goes_on_with_the_next_sample() {
    goes_on_with_the_next_sample(false);
}

#[test]
fn another_process_goes_on_with_the_next_sample() {
    goes_on_with_the_next_sample(true);
}

fn goes_on_with_the_next_sample(join: bool) {
    let folder = tempfile::tempdir().unwrap();
    let grid = "context_tokens = 900\ntask = \"passkey\"\nsamples = 5\nbudget = 0.25\npolicy = [\"full\", \"knorm\"]";
    let experiment = experiment(folder.path(), grid).unwrap();
    let whole = go(&experiment, &folder.path().join("whole"), false).unwrap();
    let out = folder.path().join("killed");
    let options = |resume| Options {
        out: out.clone(),
        resume: resume && !join,
        join,
        shard: None,
        limit_bytes: 1 << 30,
        repro: "kvsieve run x.toml".into(),
    };
    let (registry, cpu) = (Registry::default(), Cpu::new(Some(2)).unwrap());
    // The third sample's turn is the last.
    let killed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        run(&experiment, &registry, &cpu, &options(false), &mut |progress| {
            assert!(!matches!(progress, Progress::Part { fraction, .. } if fraction > 0.6), "killed");
        })
    }));
    assert!(killed.is_err());
    let mut entries = std::fs::read_dir(out.join("x")).unwrap().map(|entry| entry.unwrap().path());
    let run_folder = entries.find(|path| path.is_dir()).unwrap();
    let path = samples_in(&run_folder).unwrap();
    let samples = std::fs::read_to_string(&path).unwrap();
    assert!(samples.lines().count() >= 6, "{}", samples.lines().count());
    // A torn line is asked again.
    std::fs::write(&path, &samples[..samples.len() - 30]).unwrap();
    let mut trials = 0;
    let again = run(&experiment, &registry, &cpu, &options(true), &mut |progress| {
        trials += usize::from(matches!(progress, Progress::Trial(_)));
    });
    let again = again.unwrap();
    assert_eq!((again.folder, again.records.len()), (run_folder, 3));
    assert!(trials < 10, "{trials} trials: what was known is not asked again");
    for record in &whole.records {
        let other = again.records.iter().find(|other| other.cell_id == record.cell_id).unwrap();
        assert_eq!(other.answers, record.answers, "{}", record.cell.label());
    }
}

#[test]
fn protocols_differ_in_what_of_the_question_is_evicted() {
    let folder = tempfile::tempdir().unwrap();
    let grid = "context_tokens = 1000\ntask = \"recall\"\nsamples = 2\nbudget = 200\n\
        protocol = [\"agnostic\", \"aware\", \"aware-kept\", \"aware-whole\"]\n\
        policy = [\"full\", \"knorm\", \"streaming-llm\", \"knorm+chunks:tokens=300\"]";
    let records = go(&experiment(folder.path(), grid).unwrap(), folder.path(), false).unwrap().records;
    let answers = |protocol: Protocol, policy: &str| {
        let wanted =
            |record: &&Record| record.cell.protocol == Some(protocol) && record.cell.policy.as_deref() == Some(policy);
        let record = records.iter().find(wanted).unwrap();
        assert_eq!(record.status, Status::Ok, "{protocol} {policy}: {:?}", record.reason);
        assert_eq!(record.warnings, Vec::<String>::new(), "{protocol} {policy}");
        record.answers.clone().unwrap()
    };
    use Protocol::{Agnostic, Aware, AwareKept, AwareWhole};
    let tokens = |protocol| answers(protocol, "full").context_tokens;
    // ':' is the beginning of the answer, one token of this model.
    assert!(tokens(Aware) > tokens(Agnostic) + 5.0 && tokens(AwareWhole) == tokens(Aware) + 1.0);
    assert_eq!(tokens(AwareKept), tokens(Agnostic));
    for protocol in Protocol::ALL {
        assert_eq!((answers(protocol, "full").kl_nats.mean, answers(protocol, "full").questions), (0.0, 8));
        for policy in ["knorm", "streaming-llm", "knorm+chunks:tokens=300"] {
            let found = answers(protocol, policy);
            assert_eq!((found.kept_fraction * found.context_tokens).round(), 200.0, "{protocol} {policy}");
            assert!(found.kl_nats.mean > 0.0, "{protocol} {policy}");
        }
    }
    // The tokens of the question come on top of the budget only where they are never evicted.
    let live = |protocol| answers(protocol, "knorm").kv_bytes_live;
    assert_eq!((live(Aware), live(AwareWhole)), (live(Agnostic), live(Agnostic)));
    assert!(live(AwareKept) > live(Agnostic));
    // All right answers have more tokens than the one that the prefill foretells.
    assert_ne!(answers(AwareWhole, "knorm").kl_nats, answers(Aware, "knorm").kl_nats);
}

#[test]
fn a_text_is_gone_on_with_piece_by_piece() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "The cat sat on the mat, and the dog lay by the door. ".repeat(40)).unwrap();
    let grid = format!(
        "context_tokens = 400\nnew_tokens = 60\ntext = \"{}\"\nsamples = 3\nbudget = 0.5\npolicy = [\"full\", \"knorm\"]",
        text.display()
    );
    let experiment = experiment(folder.path(), &grid).unwrap();
    let records = go(&experiment, folder.path(), false).unwrap().records;
    let full = record(&records, "full", "perplexity").answers.clone().unwrap();
    let evicted = record(&records, "knorm", "perplexity").answers.clone().unwrap();
    assert_eq!((full.samples, full.accuracy, full.answer_tokens), (3, None, 60.0));
    assert_eq!((full.kl_nats.mean, full.nll_difference_nats.mean), (0.0, 0.0));
    // A random model expects every byte about as much as any other, or worse.
    assert!(full.nll_nats.mean > 4.0 && evicted.kl_nats.mean > 0.0);
    assert!((evicted.nll_nats.mean - full.nll_nats.mean - evicted.nll_difference_nats.mean).abs() < 1e-9);
}

/// A policy that reads the context by itself leaves other logits behind it; those that come after begin their answers with
/// the full cache's all the same.
#[test]
fn a_policy_gives_the_same_whoever_was_asked_before_it() {
    let answers = |before: &str| {
        let folder = tempfile::tempdir().unwrap();
        let grid = format!(
            "context_tokens = 700\ntask = \"passkey\"\nprotocol = \"aware-whole\"\nsamples = 4\nbudget = 0.25\n\
             policy = [{before}\"knorm\", \"full\"]"
        );
        let records = go(&experiment(folder.path(), &grid).unwrap(), folder.path(), false).unwrap().records;
        ["knorm", "full"].map(|policy| {
            let answers = record(&records, policy, "passkey").answers.clone().unwrap();
            (answers.sample_kl_nats, answers.greedy_agreement.unwrap().mean, answers.nll_nats.mean)
        })
    };
    let alone = answers("");
    assert_eq!(alone[1].1, 1.0, "the full cache agrees with itself");
    assert_eq!(answers("\"keydiff+chunks:tokens=64\", "), alone);
}

/// A context is repeated once for the cells that look at it in the same way, and anew for each sample.
#[test]
fn a_pass_that_cells_share_is_that_of_each() {
    let answers = |policies: &str, budgets: &str| -> Vec<(String, Vec<f64>, u64)> {
        let folder = tempfile::tempdir().unwrap();
        let grid = format!(
            "context_tokens = 300\ntask = \"passkey\"\nprotocol = \"aware-kept\"\nsamples = 2\npolicy = [{policies}]\n\
             budget = [{budgets}]"
        );
        let records = go(&experiment(folder.path(), &grid).unwrap(), folder.path(), false).unwrap().records;
        let given = |record: Record| {
            let answers = record.answers.expect("it ran");
            let cell = format!("{}@{:?}", record.cell.policy.unwrap(), record.cell.budget);
            (cell, answers.sample_kl_nats, answers.kv_bytes_live)
        };
        let is_asked = |record: &Record| !matches!(record.cell.policy.as_deref(), Some("full" | "random"));
        records.into_iter().filter(is_asked).map(given).collect()
    };
    let policies = ["\"kvzip:chunk=100\"", "\"kvzip:chunk=100,plus=true\"", "\"kvzip\""];
    let shared = answers(&policies.join(","), "0.5, 0.25");
    for policy in policies {
        for budget in ["0.5", "0.25"] {
            let apart = answers(policy, budget);
            let own = shared.iter().filter(|cell| apart.iter().any(|other| other.0 == cell.0));
            assert!(own.eq(&apart), "{apart:?} {shared:?}");
        }
    }
    assert!(
        shared.iter().enumerate().all(|(at, cell)| shared[..at].iter().all(|other| other.1 != cell.1)),
        "{shared:?}"
    );
}

#[test]
fn mistakes_are_said_before_anything_runs() {
    let folder = tempfile::tempdir().unwrap();
    let good = "context_tokens = 900\ntask = \"passkey\"\npolicy = [\"full\", \"h2o\"]\nbudget = 0.5";
    assert!(experiment(folder.path(), good).is_ok());
    for (wrong, right, expected) in [
        ("passkey", "passkeys", "unknown task 'passkeys'"),
        ("= 900", "= 9000", "was made for at most 4096"),
        ("= 900", "= 100", "100 tokens are too few"),
        ("h2o", "oracle", "it looks into the future"),
        ("h2o", "h3o", "unknown policy"),
        ("budget = 0.5", "", "needs a budget"),
        ("budget = 0.5", "budget = 0.5\nheads = \"2/1\"", "heads belongs to measure = "),
        ("task = \"passkey\"", "", "either task or text"),
        ("task = \"passkey\"", "text = \"nothing.txt\"", "nothing.txt"),
    ] {
        let error = experiment(folder.path(), &good.replace(wrong, right)).err().unwrap_or_default();
        assert!(error.contains(expected) && !error.contains('\n'), "{right}: {error}");
    }
}

#[test]
fn formats_are_compared_with_plain_elements_alone_and_beside_policies() {
    let folder = tempfile::tempdir().unwrap();
    let grid = |formats: &str| {
        format!(
            "context_tokens = 600\ntask = \"passkey\"\nsamples = 2\nbudget = 0.5\npolicy = [\"full\", \"snapkv\"]\n\
             kv_format = [{formats}]"
        )
    };
    let out = folder.path().join("out");
    let run = |formats: &str| go(&experiment(folder.path(), &grid(formats)).unwrap(), &out, false).unwrap().records;
    let in_full = "int8:recent=64,first=4";
    let all = run(&format!("\"f32\", \"fp8-e5m2\", \"int8\", \"{in_full}\""));
    let of = |records: &[Record], policy: &str, format: &str| {
        let is = |record: &&Record| {
            record.cell.policy.as_deref() == Some(policy) && record.cell.kv_format().to_string() == format
        };
        let record = records.iter().find(is).unwrap_or_else(|| panic!("{policy} {format}"));
        assert_eq!((record.status, &record.reason), (Status::Ok, &None));
        assert_eq!(
            record.memory.as_ref().map(|memory| memory.residual_bytes).filter(|_| policy == "full"),
            (policy == "full").then_some(0)
        );
        record.answers.clone().unwrap()
    };
    // Random is beside every format.
    assert_eq!(all.len(), 12);
    let kl = |policy: &str, format: &str| of(&all, policy, format).kl_nats.mean;
    assert_eq!(kl("full", "f32"), 0.0);
    let (bytes8, floats) = (kl("full", "int8"), kl("full", "fp8-e5m2"));
    assert!(0.0 < bytes8 && bytes8 < floats / 4.0, "{bytes8} and {floats}");
    assert!(kl("snapkv", "f32") > kl("full", "int8"));
    let spread = of(&all, "full", "fp8-e5m2").kl_of_tokens.unwrap();
    assert!(0.0 < spread.median && spread.median <= spread.p99 && spread.p99 <= spread.max, "{spread:?}");
    let bytes = |format: &str| of(&all, "snapkv", format).kv_bytes_live;
    assert!(bytes("int8") * 2 < bytes("f32") && bytes("fp8-e5m2") < bytes("int8"));
    assert!(bytes("int8") < bytes(in_full) && bytes(in_full) < bytes("f32"));
    // What stands beside a format changes nothing of it.
    let alone = run("\"fp8-e5m2\"");
    for policy in ["full", "snapkv"] {
        let [alone, beside] = [&alone, &all].map(|records| of(records, policy, "fp8-e5m2"));
        assert_eq!(alone, beside, "{policy}");
    }
}

#[test]
fn files_that_quantize_wrote_are_weights_too_and_those_of_another_model_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let (coded, cpu) = (folder.path().join("coded"), Cpu::new(Some(2)).unwrap());
    let (source, recipe) = (locate(Path::new("builtin")).unwrap(), "int8:group=64".parse().unwrap());
    quantise_folder(&source, recipe, None, &coded, (&cpu, &Arena::unlimited()), |_, _| ()).unwrap();
    let path = coded.display().to_string();
    let grid = |weights: &str| {
        let asked = "context_tokens = 300\ntask = \"passkey\"\nsamples = 1\npolicy = \"full\"";
        format!("{asked}\nweights = [\"file\", \"q4_0\", \"{weights}\"]")
    };
    let records = go(&of_model("builtin", &grid(&path)).unwrap(), &folder.path().join("out"), false).unwrap().records;
    let of = |weights: &str| {
        let is = |record: &&Record| record.cell.weights.as_ref().map_or("file".into(), |of| of.to_string()) == weights;
        records.iter().find(is).unwrap_or_else(|| panic!("{weights}"))
    };
    let kl = |weights: &str| of(weights).answers.as_ref().unwrap().kl_nats.mean;
    assert!(kl("file") == 0.0 && 0.0 < kl(&path) && kl(&path) < kl("q4_0") / 10.0, "{} {}", kl(&path), kl("q4_0"));
    let (model, memory) = (Model::open(&coded, &Arena::unlimited()).unwrap(), of(&path).memory.clone().unwrap());
    assert_eq!((memory.residual_bytes, memory.peak_by_label[&Label::Weights]), (0, model.weights.bytes()));
    let hashes = [&path, "q4_0"].map(|weights| of(weights).cell.weights_hash.clone());
    assert_eq!(hashes, [Some(model.fingerprint), None]);
    for (weights, reason) in
        [("./nowhere", "nowhere"), ("tests/checkpoints/llama", "weights must be of the same model")]
    {
        let error = of_model("builtin", &grid(weights)).err().unwrap_or_default();
        assert!(error.contains(reason) && !error.trim_end().contains('\n'), "{weights}: {error}");
    }
}

#[test]
fn weights_in_fewer_bits_are_compared_with_those_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let grid = |weights: &str| {
        format!(
            "context_tokens = 600\ntask = \"passkey\"\nsamples = 2\nbudget = 0.5\npolicy = [\"full\", \"snapkv\"]\n\
             kv_format = [\"f32\", \"int8\"]\nweights = [{weights}]"
        )
    };
    let out = folder.path().join("out");
    let run = |weights: &str| go(&experiment(folder.path(), &grid(weights)).unwrap(), &out, false).unwrap().records;
    let all = run("\"file\", \"int8\", \"fp8-e5m2\"");
    let of = |records: &[Record], weights: &str, policy: &str, format: &str| {
        let is = |record: &&Record| {
            let cell = &record.cell;
            let kept = cell.weights.as_ref().map_or("file".into(), |format| format.to_string());
            cell.policy.as_deref() == Some(policy) && cell.kv_format().to_string() == format && kept == weights
        };
        let record = records.iter().find(is).unwrap_or_else(|| panic!("{weights} {policy} {format}"));
        assert_eq!((record.status, &record.reason), (Status::Ok, &None));
        (record.answers.clone().unwrap(), record.memory.clone().unwrap())
    };
    // Random is beside every pair of formats.
    assert_eq!(all.len(), 18);
    let kl = |weights: &str, policy: &str, format: &str| of(&all, weights, policy, format).0.kl_nats.mean;
    assert_eq!(kl("file", "full", "f32"), 0.0);
    let (bytes8, floats) = (kl("int8", "full", "f32"), kl("fp8-e5m2", "full", "f32"));
    assert!(0.0 < bytes8 && bytes8 < floats / 10.0, "{bytes8} and {floats}");
    assert!(kl("int8", "full", "int8") > bytes8);
    // Each runs alone with its own weights in the arena, and takes what was predicted.
    for weights in ["file", "int8", "fp8-e5m2"] {
        let arena = Arena::unlimited();
        let format = weights.parse().ok();
        let model = Model::open_in(&locate(&folder.path().join("model")).unwrap(), format, &arena).unwrap();
        let (_, memory) = of(&all, weights, "full", "int8");
        assert_eq!(memory.residual_bytes, 0, "{weights}");
        assert_eq!(memory.peak_by_label[&Label::Weights], model.weights.bytes(), "{weights}");
    }
    // What stands beside a format changes nothing of it, also where the file's own weights are not asked for.
    let alone = run("\"int8\"");
    for (policy, format) in [("full", "f32"), ("full", "int8"), ("snapkv", "f32"), ("snapkv", "int8")] {
        let [alone, beside] = [&alone, &all].map(|records| of(records, "int8", policy, format).0);
        assert_eq!(alone, beside, "{policy} {format}");
    }
    for (weights, reason) in [("q4_k", "256"), ("int4:hadamard=true", "no hadamard=true"), ("int5", "unknown format")] {
        let error = experiment(folder.path(), &grid(&format!("\"{weights}\""))).err().unwrap_or_default();
        assert!(error.contains(reason) && !error.trim_end().contains('\n'), "{weights}: {error}");
    }
}

#[test]
fn who_has_no_room_is_told_of_the_models_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    for (weights, beside) in [("\"file\"", None), ("[\"file\", \"int8\"]", Some("holds 2 models at once, "))] {
        let grid =
            format!("context_tokens = 300\ntask = \"passkey\"\nsamples = 1\npolicy = \"full\"\nweights = {weights}");
        let experiment = experiment(folder.path(), &grid).unwrap();
        for record in go_within(1 << 10, &experiment, &folder.path().join("out"), false).unwrap().records {
            let reason = record.reason.unwrap();
            assert_eq!(record.status, Status::Oom, "{reason}");
            assert_eq!(reason.contains("the comparison holds"), beside.is_some(), "{reason}");
            assert!(reason.contains(beside.unwrap_or_default()) && !reason.contains('\n'), "{reason}");
        }
    }
}
