//! The report as its reader finds it: files, pages and what must never be in them; figures and words have files of their own.

mod additivity;
mod few;
mod pictures;
mod reading;
mod words;

use super::*;
use crate::experiment::measure::Measure;
use crate::experiment::record::Status;
use samples::{evicted, failed, pass, with_cell};
use std::fs;

fn drawn(runs: &[Run]) -> (tempfile::TempDir, Drawn) {
    let folder = tempfile::tempdir().unwrap();
    let drawn = write(folder.path(), runs, Detail::Layers).unwrap();
    (folder, drawn)
}

fn of(records: Vec<Record>) -> Run {
    Run { records, ..samples::run() }
}

fn table(run: &Run, id: &str) -> Vec<BTreeMap<String, String>> {
    let (folder, _) = drawn(std::slice::from_ref(run));
    let mut reader = ::csv::Reader::from_path(folder.path().join(format!("plots/{id}.csv"))).unwrap();
    reader.deserialize().map(Result::unwrap).collect()
}

#[test]
fn every_figure_is_drawn_with_the_table_behind_it() {
    let (_folder, kernels) = drawn(&[samples::run()]);
    let (_other, layers) = drawn(&[samples::layers()]);
    let (_third, answers) = drawn(&[samples::answers()]);
    let (_fourth, formats) = drawn(&[samples::formats()]);
    let (_fifth, hybrid) = drawn(&[samples::hybrid()]);
    let (_sixth, memories) = drawn(&[samples::memories()]);
    let (_seventh, ranks) = drawn(&[samples::ranks()]);
    let (_eighth, training) = drawn(&[samples::training()]);
    let (_ninth, tuning) = drawn(&[samples::tuning()]);
    let (_tenth, activations) = drawn(&[samples::activations()]);
    let drawn = [kernels, layers, answers, formats, hybrid, memories, ranks, training, tuning, activations];
    let paths = || drawn.iter().flat_map(|drawn| &drawn.figures);
    let names: std::collections::BTreeSet<_> = paths().filter_map(|path| path.file_name()).collect();
    assert_eq!(names.len(), figures::FIGURES.len() + figures::PANELS.len());
    for path in paths() {
        let svg = fs::read_to_string(path).unwrap();
        assert!(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"800\""), "{path:?}");
        assert!(!svg.contains("NaN") && !svg.contains("inf\""), "{path:?}");
        let table = fs::read_to_string(path.with_extension("csv")).unwrap();
        assert!(table.lines().count() > 1 && table.starts_with("series,status,"), "{path:?}");
    }
}

#[test]
fn a_failed_cell_is_listed_and_its_numbers_appear_nowhere() {
    let contexts = [1024, 2048, 4096];
    let records: Vec<Record> = contexts
        .iter()
        .map(|&context| pass(Measure::FORWARD, "tiled", context))
        .chain(contexts.iter().map(|&context| evicted(context, "h2o", 0.25)))
        .chain([4, 64].map(|facts| samples::told("nearest:facts=4", facts, 0.5)))
        .collect();
    for broken in 0..records.len() {
        let mut records = records.clone();
        records[broken] = failed(records[broken].clone());
        let id = records[broken].cell_id.clone();
        let (_folder, drawn) = drawn(&[of(records)]);
        for path in &drawn.figures {
            assert!(!fs::read_to_string(path.with_extension("csv")).unwrap().contains(&id), "{path:?}");
        }
        for path in [&drawn.html, &drawn.summary] {
            let text = fs::read_to_string(path).unwrap();
            assert!(text.contains("failed") && !text.contains("777"), "{path:?}");
        }
        assert!(fs::read_to_string(&drawn.html).unwrap().contains("the output holds a NaN"));
    }
}

#[test]
fn the_last_record_of_a_cell_counts() {
    let good = pass(Measure::FORWARD, "tiled", 1024);
    let run = of(vec![failed(good.clone()), good, pass(Measure::FORWARD, "tiled", 2048)]);
    assert_eq!(table(&run, "latency-vs-context").len(), 2);
    assert!(!summary_table(&run.records).contains("failed"));
}

#[test]
fn records_without_a_curve_make_a_page_without_figures() {
    let (_folder, drawn) = drawn(&[of(vec![pass(Measure::FORWARD, "naive", 1 << 20)])]);
    assert_eq!(drawn.figures, Vec::<PathBuf>::new());
    assert!(fs::read_to_string(drawn.html).unwrap().contains("No figure"));
    let empty = write(Path::new("nowhere"), &[of(Vec::new())], Detail::Layers);
    assert!(matches!(empty, Err(ReportError::NoCells(_))) && !Path::new("nowhere").exists(), "{empty:?}");
    assert!(matches!(write(Path::new("nowhere"), &[], Detail::Layers), Err(ReportError::NoRun)));
}

#[test]
fn the_page_needs_nothing_from_elsewhere_and_escapes_what_it_shows() {
    let mut run = samples::run();
    let attack = "<script src=\"http://evil.example/x.js\"></script>";
    run.description = attack.into();
    run.experiment = attack.into();
    run.records[3].warnings.push(attack.into());
    run.records.iter_mut().for_each(|record| {
        record.cell.kernel = record.cell.kernel.replace("naive", "naive<b>&\"");
    });
    run.environment = serde_json::json!({ attack: [attack] });
    let (_folder, drawn) = drawn(&[run]);
    let page = fs::read_to_string(&drawn.html).unwrap();
    assert_eq!(page.matches("<script").count(), 1, "only the page's own, which sorts tables");
    assert!(!page.contains("<b>") && !page.contains("<link") && !page.contains("@import"));
    assert!(!page.contains("src=\"") && !page.contains("href=\"http") && !page.contains("url("));
    assert!(page.contains("&lt;script"));
    for path in &drawn.figures {
        assert!(!fs::read_to_string(path).unwrap().contains("<b>"), "{path:?}");
    }
}

#[test]
fn each_run_has_its_section_and_its_folder_inside_the_report() {
    let mut escaping = samples::run();
    escaping.run_id = "../../outside".into();
    let (folder, drawn) = drawn(&[samples::run(), samples::run(), escaping]);
    let page = fs::read_to_string(&drawn.html).unwrap();
    assert_eq!(page.matches("<section class=\"run\">").count(), 3);
    let own: std::collections::BTreeSet<&Path> = drawn.figures.iter().filter_map(|path| path.parent()).collect();
    assert_eq!(own.len(), 3);
    for path in own {
        let inside = path.canonicalize().unwrap();
        assert!(inside.starts_with(folder.path().canonicalize().unwrap().join("plots")), "{inside:?}");
    }
    let unfinished = fs::read_dir(folder.path())
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().ends_with(".tmp"));
    assert_eq!(unfinished.count(), 0);
}

#[test]
fn the_page_compares_policies_and_explains_its_words() {
    let (_folder, drawn) = drawn(&[samples::answers(), samples::run()]);
    let page = fs::read_to_string(&drawn.html).unwrap();
    for text in [
        "eval: comparison, budget 0.25",
        "among best",
        "<dt>oracle</dt><dd>a policy that ranks tokens",
        "<dt>KL</dt>",
        "Nothing but protected tokens (the window and the first ones, which are never evicted) stays of snapkv",
        "<a href=\"#r2-plots",
    ] {
        assert!(page.contains(text), "{text}");
    }
    assert_eq!(page.matches("kvsieve report DIR").count(), 1);
}

#[test]
fn titles_say_that_inputs_are_synthetic_unless_they_are_the_users() {
    for is_synthetic in [true, false] {
        let (folder, _) = drawn(&[Run { is_synthetic, ..samples::run() }]);
        let has = |id: &str| {
            let svg = fs::read_to_string(folder.path().join(format!("plots/{id}.svg"))).unwrap();
            svg.contains("(synthetic inputs)")
        };
        assert_eq!(["drift-vs-budget", "memory-vs-context"].map(has), [is_synthetic; 2]);
        // Traces are simulated, and say so.
        assert!(!has("kv-memory-use"));
    }
}
