//! What a resumed run does again: what failed last, what did not fit into less memory, and comparisons that take turns, whole.

use crate::common::cpu;
use kvsieve::experiment::record::{Record, Status};
use kvsieve::experiment::{Device, Experiment, Options, Outcome, Progress, Spec, runner, store};
use kvsieve::policy::Registry;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

const TIMING: &str = "[timing]\nmin_rounds = 1\nmax_rounds = 2\ncap_s = 0.05\n";
const DECODE: &str = "[[grid]]\nmeasure = \"decode\"\nheads = \"2/1\"\nhead_dim = 32\ncontext_tokens = [128, 256]\n";

/// The outcome, and how many cells were to run and how many were done before.
fn run(grids: &str, out: &Path, resume: bool, limit_bytes: u64) -> (Outcome, (usize, usize)) {
    run_on(2, grids, out, resume, limit_bytes)
}

/// The same on so many threads.
fn run_on(threads: usize, grids: &str, out: &Path, resume: bool, limit_bytes: u64) -> (Outcome, (usize, usize)) {
    let registry = Registry::default();
    let text = format!("name = \"x\"\n{TIMING}{grids}");
    let experiment = Experiment::new(Spec::parse(&text, "x.toml").unwrap(), "x.toml", &registry, Device::Cpu).unwrap();
    let options =
        Options { out: out.into(), resume, join: false, shard: None, limit_bytes, repro: "kvsieve run x.toml".into() };
    let mut started = None;
    let outcome = runner::run(&experiment, &registry, cpu(threads), &options, &mut |progress| {
        if let Progress::Start { cells, resumed } = progress {
            started = Some((cells, resumed));
        }
    });
    (outcome.unwrap(), started.unwrap())
}

/// What goes on with other threads says so: `env.json` is of the first.
#[test]
fn records_of_other_threads_name_their_process() {
    let folder = tempfile::tempdir().unwrap();
    let (first, _) = run_on(1, DECODE, folder.path(), false, 1 << 30);
    assert!(first.records.iter().all(|record| record.worker.is_none()));
    fail(&first.folder, &first.records[0]);
    let (again, _) = run_on(2, DECODE, folder.path(), true, 1 << 30);
    let worker = |record: &Record| (record.threads, record.worker.is_some());
    let mut found: Vec<_> = again.records.iter().map(worker).collect();
    found.sort_unstable();
    assert_eq!(found, [(1, false), (2, true)]);
    let (records, environment) = store::read(&again.folder).unwrap();
    let parts = kvsieve::report::workers::by_machine(records, &environment);
    assert_eq!(parts.iter().map(|(_, records)| records.len()).collect::<Vec<_>>(), [1, 1]);
}

/// Appends a record of a cell that failed, as a later try would.
fn fail(folder: &Path, record: &Record) {
    let failed = Record { status: Status::Failed, reason: Some("on purpose".into()), ..record.clone() };
    let mut lines = OpenOptions::new().append(true).open(folder.join(store::CELLS)).unwrap();
    writeln!(lines, "{}", serde_json::to_string(&failed).unwrap()).unwrap();
}

#[test]
fn the_last_record_of_a_cell_counts() {
    let folder = tempfile::tempdir().unwrap();
    let (first, started) = run(DECODE, folder.path(), false, 1 << 30);
    assert_eq!((started, first.records.len()), ((2, 0), 2));
    fail(&first.folder, &first.records[0]);
    let read = store::read(&first.folder).unwrap().0;
    assert_eq!(read.iter().filter(|record| record.status == Status::Failed).count(), 1);
    assert_eq!(read.len(), 2, "what was written before is not counted any more");
    let (again, started) = run(DECODE, folder.path(), true, 1 << 30);
    assert_eq!(started, (1, 1));
    assert!(again.records.len() == 2 && again.records.iter().all(|record| record.status == Status::Ok));
    assert_eq!(run(DECODE, folder.path(), true, 1 << 30).1, (0, 2));
}

#[test]
fn cells_that_take_turns_are_run_again_together() {
    let folder = tempfile::tempdir().unwrap();
    let train = "[[grid]]\nmeasure = \"train\"\nmodel = \"tests/checkpoints/llama\"\ncontext_tokens = 16\nbatch = 2\n\
                 samples = 1\nranks = [\"zero\", \"zero:ranks=2,stage=1\"]\n";
    let ranks = "[[grid]]\nmeasure = \"ranks\"\nheads = \"2/1\"\nhead_dim = 32\ncontext_tokens = 64\n\
                 ranks = [\"ring:1\", \"ring:2\"]\n";
    for grids in [train, ranks] {
        let (first, _) = run(grids, folder.path(), false, 1 << 30);
        assert!(first.records.iter().all(|record| record.status == Status::Ok));
        fail(&first.folder, &first.records[1]);
        let (again, started) = run(grids, folder.path(), true, 1 << 30);
        assert_eq!((started, again.records.len()), ((2, 0), 2), "{grids}");
        assert!(again.records.iter().all(|record| record.status == Status::Ok));
        // Predictions of more ranks are made from one.
        let predicted = |outcome: &Outcome| -> Vec<usize> {
            outcome.records.iter().map(|record| record.predicted_ns.len()).collect()
        };
        assert_eq!(predicted(&again), predicted(&first));
    }
}

#[test]
fn what_did_not_fit_is_tried_again_under_a_larger_limit() {
    let decode = DECODE.replace("[128, 256]", "128");
    let ranks =
        "[[grid]]\nmeasure = \"ranks\"\nheads = \"2/1\"\nhead_dim = 32\ncontext_tokens = 64\nranks = \"ring:2\"\n";
    let recall = "[[grid]]\nmeasure = \"recall\"\nmemory = \"list\"\nepisode = \"write\"\n";
    let eval = "[[grid]]\nmeasure = \"eval\"\nmodel = \"builtin\"\ntask = \"recall\"\nsamples = 1\ncontext_tokens = 128\n\
                policy = \"full\"\n";
    for grids in [&decode, ranks, recall, eval] {
        let folder = tempfile::tempdir().unwrap();
        let (first, _) = run(grids, folder.path(), false, 2000);
        for record in &first.records {
            assert_eq!((record.status, record.reason.is_some()), (Status::Oom, true), "{grids}");
            assert_eq!(record.memory.as_ref().unwrap().limit_bytes, 2000);
        }
        assert_eq!(run(grids, folder.path(), true, 2000).1, (0, 1), "{grids}: the limit is the same");
        let (again, started) = run(grids, folder.path(), true, 1 << 30);
        assert_eq!((started, again.records[0].status), ((1, 0), Status::Ok), "{grids}");
    }
}
