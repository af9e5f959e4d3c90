//! Simulated traces and page sizes through the experiment: records, resuming, shards, mistakes.

use crate::common::cpu;
use kvsieve::experiment::record::{Record, Status};
use kvsieve::experiment::{Device, Experiment, Options, Outcome, Spec, runner};
use kvsieve::policy::Registry;
use std::path::Path;

const SERVE: &str =
    "[[grid]]\nmeasure = \"serve\"\nstrategy = [\"max\", \"paged\"]\ntrace = \"alpaca:steps=300,warmup=100\"\n";
const DECODE: &str = "[[grid]]\nmeasure = \"decode\"\nheads = \"4/2\"\nhead_dim = 32\n";

fn experiment(grids: &str) -> Result<Experiment, String> {
    let text = format!("name = \"x\"\n[timing]\nmin_rounds = 1\nmax_rounds = 2\ncap_s = 0.05\n{grids}");
    let spec = Spec::parse(&text, "x.toml").map_err(|error| error.to_string())?;
    Experiment::new(spec, "x.toml", &Registry::default(), Device::Cpu).map_err(|error| error.to_string())
}

fn run(grids: &str, out: &Path, resume: bool, shard: Option<(usize, usize)>) -> Outcome {
    let options = Options {
        out: out.into(),
        resume,
        join: false,
        shard,
        limit_bytes: 1 << 30,
        repro: "kvsieve run x.toml".into(),
    };
    runner::run(&experiment(grids).unwrap(), &Registry::default(), cpu(2), &options, &mut |_| ()).unwrap()
}

fn records(grids: &str) -> Vec<Record> {
    run(grids, tempfile::tempdir().unwrap().path(), false, None).records
}

#[test]
fn simulations_leave_records_beside_measured_cells() {
    let mixed = format!("{SERVE}seed = [3, 4]\n{DECODE}context_tokens = 64\n");
    let records = records(&mixed);
    let (simulated, measured): (Vec<&Record>, Vec<&Record>) =
        records.iter().partition(|record| record.cell.measure.name() == "serve");
    assert_eq!((simulated.len(), measured.len()), (4, 1));
    assert!(records.iter().all(|record| record.status == Status::Ok));
    assert!(measured[0].serving.is_none() && measured[0].memory.is_some());
    for record in &simulated {
        let usage = record.serving.as_ref().unwrap();
        assert_eq!((usage.counted_steps, record.cell.label().starts_with("serve ")), (200, true));
        assert!(record.memory.is_none() && record.latency.is_empty() && record.drift.is_none());
    }
    let shares = |seed: u64| {
        let of_seed = simulated.iter().filter(|record| record.cell.seed == seed);
        of_seed.map(|record| record.serving.as_ref().unwrap().token_fraction.to_bits()).collect::<Vec<_>>()
    };
    assert_ne!(shares(3), shares(4));
}

#[test]
fn a_resumed_run_simulates_only_what_is_missing_and_shards_share_the_cells() {
    let folder = tempfile::tempdir().unwrap();
    let first = run(SERVE, folder.path(), false, None);
    let again = run(SERVE, folder.path(), true, None);
    assert!(first.folder == again.folder && first.records == again.records);
    // Strategies are compared with one another: a shard has both of a seed.
    let seeds = format!("{SERVE}seed = [3, 4]\n");
    let cells = |index: usize| {
        let records = run(&seeds, folder.path(), false, Some((index, 2))).records;
        records.into_iter().map(|record| (record.cell.seed, record.cell.strategy.unwrap())).collect::<Vec<_>>()
    };
    let both = |seed: u64| ["max", "paged"].map(|strategy| (seed, strategy.to_string())).to_vec();
    assert_eq!([cells(1), cells(2)], [both(3), both(4)]);
}

#[test]
fn a_trace_from_a_file_is_known_by_what_is_in_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.csv");
    let grid = SERVE.replace("alpaca:", &format!("file:path={},", path.display()));
    let ids = ["4,9\n", "4,9\n", "9,4\n"].map(|row| {
        std::fs::write(&path, format!("prompt_tokens,output_tokens\n{row}")).unwrap();
        experiment(&grid).unwrap().cells[0].id()
    });
    assert!(ids[0] == ids[1] && ids[1] != ids[2], "{ids:?}");
    let experiment = experiment(&grid).unwrap();
    std::fs::write(&path, "prompt_tokens,output_tokens\n1,1\n").unwrap();
    let options = Options {
        out: folder.path().into(),
        resume: false,
        join: false,
        shard: None,
        limit_bytes: 1,
        repro: "x".into(),
    };
    let outcome = runner::run(&experiment, &Registry::default(), cpu(1), &options, &mut |_| ()).unwrap();
    for record in outcome.records {
        assert_eq!(record.status, Status::Failed);
        assert!(record.reason.unwrap().contains("has changed since the experiment was read"));
    }
}

#[test]
fn pages_and_contiguous_tensors_give_the_same_result_and_are_accounted_for_to_the_byte() {
    let records = records(&format!("{DECODE}context_tokens = [40, 1500]\npage_tokens = [\"contiguous\", 16]\n"));
    assert_eq!(records.len(), 4);
    for record in &records {
        let label = record.cell.label();
        assert_eq!(record.status, Status::Ok, "{label}: {:?}", record.reason);
        assert_eq!(record.memory.as_ref().unwrap().residual_bytes, 0, "{label}");
        assert!(record.drift.as_ref().unwrap().rel_l2 < 1e-6, "{label}");
        let pages = label.contains("page 16");
        assert!(pages != label.contains("contiguous"), "{label}");
        let in_cache = record.memory.as_ref().unwrap().peak_by_label.contains_key(&kvsieve::memory::Label::Kv);
        assert_eq!(in_cache, pages, "{label}");
    }
}

#[test]
fn axes_that_do_not_belong_are_refused() {
    let decode = format!("{DECODE}context_tokens = 64\n");
    for (grids, expected) in [
        (format!("{SERVE}kernel = \"naive\"\n"), "kernel belongs to measure = \"forward\", \"backward\", "),
        (format!("{SERVE}page_tokens = 16\n"), "page_tokens belongs to measure = \"decode\", not to \"serve\""),
        (SERVE.replace("strategy = [\"max\", \"paged\"]\n", ""), "strategy and trace are both needed"),
        (SERVE.replace("\"max\"", "\"best\""), "unknown strategy 'best'; there are max, pow2, oracle, paged"),
        (SERVE.replace("alpaca", "wikitext"), "unknown trace 'wikitext'"),
        (
            SERVE.replace("warmup=100", "warmup=100,slots=1000"),
            "no room for a request of 2048 tokens in a pool of 1000 slots",
        ),
        (format!("{decode}strategy = \"max\"\n"), "strategy belongs to measure = \"serve\", not to \"decode\""),
        (format!("{decode}page_tokens = \"many\"\n"), "'many' is not a page size"),
        (format!("{decode}page_tokens = 16\n").replace("decode", "forward"), "page_tokens belongs to measure = "),
        (format!("{decode}causal = false\nwindow = 16\n"), "a window of 16 is of keys up to a query's own"),
    ] {
        let error = experiment(&grids).err().unwrap();
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    }
}
