//! The report as its reader finds it: files, figures, tables, page.

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

/// Whether no line passes a hundred columns but those of tables, in which names of policies are whole.
fn within_width(summary: &str) -> bool {
    summary.lines().all(|line| line.chars().count() <= 100 || line.starts_with('|'))
}

#[test]
fn every_figure_is_drawn_with_the_table_behind_it() {
    let (_folder, kernels) = drawn(&[samples::run()]);
    let (_other, layers) = drawn(&[samples::layers()]);
    let (_third, answers) = drawn(&[samples::answers()]);
    let paths = || kernels.figures.iter().chain(&layers.figures).chain(&answers.figures);
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
fn tables_have_the_field_names_of_the_record() {
    let (folder, _) = drawn(&[samples::run()]);
    let header = |id: &str| {
        let table = fs::read_to_string(folder.path().join(format!("plots/{id}.csv"))).unwrap();
        table.lines().next().unwrap().to_string()
    };
    let ids = ["memory-vs-context", "latency-vs-context", "drift-vs-budget", "drift-vs-kv-bytes", "kv-vs-context"];
    insta::assert_snapshot!(ids.map(header).join("\n"), @r"
    series,status,context_tokens,peak_bytes,predicted_peak_bytes,low,high,interval,cells,cell_ids
    series,status,context_tokens,median_ns,ci95_low_ns,ci95_high_ns,interval,cells,cell_ids
    series,status,kept_fraction,rel_l2,ci95_low,ci95_high,interval,cells,cell_ids
    series,status,kv_bytes_live,rel_l2,ci95_low,ci95_high,interval,cells,cell_ids
    series,status,context_tokens,kv_bytes_live,low,high,interval,cells,cell_ids
    ");
}

#[test]
fn cells_that_ran_out_of_memory_are_crosses_and_lines_of_the_table() {
    let run = samples::run();
    let oom: Vec<_> = table(&run, "memory-vs-context").into_iter().filter(|row| row["status"] == "oom").collect();
    assert_eq!(oom.iter().map(|row| row["context_tokens"].as_str()).collect::<Vec<_>>(), ["16384", "32768", "65536"]);
    assert!(oom.iter().all(|row| row["peak_bytes"].is_empty() && !row["predicted_peak_bytes"].is_empty()));
    let oom = table(&run, "latency-vs-context").into_iter().filter(|row| row["status"] == "oom");
    assert!(oom.map(|row| row["median_ns"].clone()).all(|median| median.is_empty()));
    let (folder, _) = drawn(&[run]);
    for (id, notes) in [("memory-vs-context", 3), ("latency-vs-context", 1), ("drift-vs-budget", 0)] {
        let svg = fs::read_to_string(folder.path().join(format!("plots/{id}.svg"))).unwrap();
        assert_eq!(svg.matches("\noom\n").count(), notes, "{id}");
    }
    let svg = fs::read_to_string(folder.path().join("plots/memory-vs-context.svg")).unwrap();
    assert!(svg.contains("memory limit 8.00 GiB"));
}

#[test]
fn a_failed_cell_is_listed_and_its_numbers_appear_nowhere() {
    let contexts = [1024, 2048, 4096];
    let records: Vec<Record> = contexts
        .iter()
        .map(|&context| pass(Measure::FORWARD, "tiled", context))
        .chain(contexts.iter().map(|&context| evicted(context, "h2o", 0.25)))
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
fn several_seeds_are_one_point_with_their_range() {
    let seeds = [(1, 100), (2, 300), (3, 200)].map(|(seed, drift)| {
        let mut record = with_cell(evicted(4096, "random", 0.25), |cell| {
            cell.seed = seed;
            cell.workload_hash = format!("hash of seed {seed}");
        });
        record.drift.as_mut().unwrap().rel_l2 = f64::from(drift) / 1000.0;
        record
    });
    let rows = table(&of(seeds.into()), "drift-vs-budget");
    let point = &rows[0];
    assert_eq!(rows.len(), 1);
    let fields = ["series", "rel_l2", "ci95_low", "ci95_high", "interval", "cells"].map(|field| point[field].as_str());
    assert_eq!(fields, ["random", "0.2", "0.1", "0.3", "min_max", "3"]);
}

#[test]
fn configurations_that_differ_never_share_a_series() {
    type Change = fn(&mut crate::experiment::cell::Cell);
    let changes: [Change; 9] = [
        |cell| cell.kv_heads = 8,
        |cell| cell.dtype = crate::tensor::DType::Bf16,
        |cell| cell.causal = false,
        |cell| cell.window = Some(512),
        |cell| cell.softcap = Some(30.0),
        |cell| cell.batch = 2,
        |cell| cell.page_tokens = Some(0),
        |cell| cell.policy_file_hash = Some("another".into()),
        |cell| cell.workload_hash = "another".into(),
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let base = [1024, 2048].map(|context| pass(Measure::FORWARD, "tiled", context));
        let other = base.clone().map(|record| with_cell(record, change));
        let rows = table(&of(base.into_iter().chain(other).collect()), "latency-vs-context");
        let series: std::collections::BTreeSet<&String> = rows.iter().map(|row| &row["series"]).collect();
        assert_eq!((series.len(), rows.len()), (2, 4), "change {index}: {series:?}");
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
    for records in [Vec::new(), vec![pass(Measure::FORWARD, "naive", 1 << 20)]] {
        let (_folder, drawn) = drawn(&[of(records)]);
        assert_eq!(drawn.figures, Vec::<PathBuf>::new());
        assert!(fs::read_to_string(drawn.html).unwrap().contains("No figure"));
    }
    assert!(matches!(write(Path::new("nowhere"), &[], Detail::Layers), Err(ReportError::NoRun)));
}

#[test]
fn nothing_but_cells_without_room_is_still_a_figure() {
    let records = [1 << 20, 1 << 21].map(|context| pass(Measure::FORWARD, "naive", context));
    let rows = table(&of(records.into()), "latency-vs-context");
    assert!(rows.iter().all(|row| row["status"] == "oom") && rows.len() == 2);
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
fn the_summary_is_a_table_within_a_hundred_columns() {
    let mut records = samples::run().records;
    let long = with_cell(pass(Measure::FORWARD, "tiled", 4096), |cell| {
        cell.kernel = format!("tiled:{}=|x", "µ".repeat(200));
        cell.softcap = Some(12.5);
    });
    records.push(long);
    let summary = summary_table(&records);
    assert!(summary.lines().all(|line| line.chars().count() <= 100));
    let rows = summary.lines().filter(|line| line.starts_with("| ")).count();
    let tables = summary.matches("###").count();
    assert_eq!(rows, records.len() + tables);
    let bars: std::collections::BTreeSet<usize> =
        summary.lines().filter(|line| line.starts_with('|')).map(|line| line.matches('|').count()).collect();
    assert_eq!(bars.into_iter().collect::<Vec<_>>(), [8, 9]);
}

#[test]
fn the_summary_compares_with_the_baseline_of_the_same_cell() {
    let mut records = Vec::new();
    for context in [8192, 16_384] {
        records.extend(["tiled:br=64", "naive"].map(|kernel| pass(Measure::FORWARD, kernel, context)));
    }
    records.extend([("full", 1.0), ("h2o", 0.25), ("h2o", 0.5)].map(|(policy, budget)| evicted(4096, policy, budget)));
    records[5].status = Status::Skipped;
    insta::assert_snapshot!(summary_table(&records), @r"
    ### forward

    8/2 heads · seed 0 · D 64 · f32 · causal · 2 threads · avx2

    | context | kernel      |      peak | median |     ± |  drift | vs naive |
    |--------:|-------------|----------:|-------:|------:|-------:|---------:|
    |      8K | naive       |  2.04 GiB | 7.64 s | ±5.0% | 6.4e-7 |    1.00x |
    |      8K | tiled:br=64 |  41.0 MiB | 2.75 s | ±5.0% | 4.9e-7 |    2.78x |
    |     16K | naive       | ~8.08 GiB |    oom |     – |      – |        – |
    |     16K | tiled:br=64 |  81.0 MiB | 11.0 s | ±5.0% | 5.3e-7 |        – |

    ### evict

    4K context · 8/2 heads · tiled · seed 0 · D 64 · f32 · causal · 32 new tokens · 2 threads · avx2

    | policy | budget |       kv |  decode |     ± |  drift | recall | vs full |
    |--------|-------:|---------:|--------:|------:|-------:|-------:|--------:|
    | full   |      1 | 4.00 MiB |  486 µs | ±5.0% | 3.0e-7 |   100% |   1.00x |
    | h2o    |   0.25 |        – | skipped |     – |      – |      – |       – |
    | h2o    |    0.5 | 2.00 MiB |  259 µs | ±5.0% | 0.0284 |    90% |   1.88x |
    ");
}

#[test]
fn a_leaderboard_has_means_over_tasks_and_leaves_out_what_lacks_one() {
    let mut run = samples::answers();
    let lame = |record: &Record| {
        let cell = &record.cell;
        cell.policy.as_deref() == Some("h2o") && cell.task.as_deref() == Some("passkey") && cell.context_tokens == 1024
    };
    let place = run.records.iter().position(lame).unwrap();
    run.records[place] = failed(run.records[place].clone());
    let summary = summary_table(&run.records);
    assert!(within_width(&summary), "{summary}");
    let board: Vec<&str> = summary.lines().take_while(|line| !line.contains("eval: niah")).collect();
    insta::assert_snapshot!(board.join("\n"));
    let points = table(&run, "accuracy-vs-budget");
    assert!(points.iter().all(|point| point["cells"] == "2" && point["interval"] == "ci95"));
    let h2o: Vec<&str> =
        points.iter().filter(|point| point["series"] == "h2o").map(|point| point["kept_fraction"].as_str()).collect();
    assert_eq!(h2o, ["0.125", "0.25"]);
    assert!(table(&run, "kl-vs-budget").iter().all(|point| point["series"] != "full"));
}

#[test]
fn what_a_model_cannot_do_ranks_nobody_and_nothing_but_a_window_is_marked() {
    let mut run = samples::answers();
    for record in run.records.iter_mut().filter(|record| record.cell.task.as_deref() == Some("passkey")) {
        // The full cache is right in two of five.
        let answers = record.answers.as_mut().unwrap();
        let difference = answers.accuracy_difference.as_mut().unwrap();
        difference.mean = answers.accuracy.unwrap().mean - 0.4;
    }
    let summary = summary_table(&run.records);
    let unranked = "passkey at 512 (full cache 40.0) · passkey at 1K (full cache 40.0)";
    let words = summary.replace('\n', " ");
    assert!(words.contains(&format!("not ranked, the model cannot do it: {unranked}")), "{summary}");
    assert!(table(&run, "accuracy-vs-budget").iter().all(|point| point["cells"] == "1"));
    assert!(table(&run, "kl-vs-budget").iter().all(|point| point["cells"] == "2"));
    let marked: Vec<&str> = summary.lines().filter(|line| line.contains(" ! |")).collect();
    assert!(!marked.is_empty() && marked.iter().all(|line| line.contains("snapkv")), "{marked:?}");
    assert!(summary.contains("! nothing but protected tokens stays"), "{summary}");
    let rows = table(&run, "comparisons");
    // Six policies at three budgets: every pair once, the better one first, none surer than alone.
    assert_eq!(rows.len(), 3 * 15);
    for row in &rows {
        let number = |field: &str| row[field].parse::<f64>().unwrap();
        assert!((number("value_a") - number("value_b") - number("difference")).abs() < 1e-9, "{row:?}");
        assert!(number("ci95_low") < number("ci95_high") && number("p") <= number("p_holm"), "{row:?}");
        assert!(number("difference") >= 0.0 && row["protocol"] == "agnostic", "{row:?}");
    }
}

#[test]
fn needles_are_found_by_depth_and_length() {
    let rows = table(&samples::answers(), "needle-heat-map");
    let of_full: Vec<&str> =
        rows.iter().filter(|row| row["series"] == "full").map(|row| row["accuracy"].as_str()).collect();
    assert_eq!(of_full, ["1"; 10]);
    let middle = |row: &&BTreeMap<String, String>| row["series"] == "random@0.125";
    assert_eq!(rows.iter().filter(middle).count(), 10);
}

#[test]
fn findings_do_not_let_a_lucky_seed_win() {
    let cell = |policy: &str, seed: u64, rel_l2: f64| {
        let mut record = with_cell(evicted(4096, policy, 0.25), |cell| cell.seed = seed);
        record.drift.as_mut().unwrap().rel_l2 = rel_l2;
        record
    };
    let random = [(0, 0.001), (1, 0.8), (2, 0.9)].map(|(seed, drift)| cell("random", seed, drift));
    let steady = [(0, 0.1), (1, 0.1), (2, 0.1)].map(|(seed, drift)| cell("h2o", seed, drift));
    let records: Vec<Record> = random.into_iter().chain(steady).chain([evicted(4096, "full", 1.0)]).collect();
    let findings = findings::of(&latest(&records));
    assert_eq!(findings.len(), 1);
    assert!(findings[0].contains("`h2o`") && findings[0].contains("25% of the KV bytes"), "{findings:?}");
}

#[test]
fn one_layer_and_few_steps_have_none_of_the_figures_of_many() {
    let (_folder, drawn) = drawn(&[samples::run()]);
    let names: Vec<String> =
        drawn.figures.iter().filter_map(|path| Some(path.file_stem()?.to_string_lossy().to_string())).collect();
    let of_many = ["steps", "chunk", "kept-", "ragged", "equal-bytes", "ranked", "read-vs-held"];
    assert!(names.iter().all(|name| of_many.iter().all(|part| !name.contains(part))), "{names:?}");
}

#[test]
fn many_curves_become_small_plots_that_name_every_one() {
    let run = samples::layers();
    let (folder, _) = drawn(std::slice::from_ref(&run));
    let svg = fs::read_to_string(folder.path().join("plots/drift-vs-kv-bytes.svg")).unwrap();
    let policies: std::collections::BTreeSet<&str> =
        run.records.iter().filter_map(|record| record.cell.policy.as_deref()).collect();
    for policy in policies.into_iter().filter(|policy| !policy.contains("chunks") && *policy != "full") {
        assert_eq!(svg.matches(&format!("\n{policy}\n")).count(), 1, "{policy}");
    }
    let ranked = table(&run, "policies-ranked");
    let order: Vec<&str> = ranked.iter().map(|row| row["series"].as_str()).collect();
    assert_eq!((order[0], ranked.len()), ("oracle", 14 * 3));
}

#[test]
fn chunks_are_places_on_an_axis_and_one_piece_is_the_context() {
    let rows = table(&samples::layers(), "kv-peak-vs-chunk");
    let mut places: Vec<(&str, &str)> =
        rows.iter().map(|row| (row["series"].as_str(), row["chunk_tokens"].as_str())).collect();
    places.dedup();
    let suffixes: std::collections::BTreeSet<&str> = places.iter().map(|(series, _)| &series[..6]).collect();
    assert_eq!(suffixes.into_iter().collect::<Vec<_>>(), ["snapkv"]);
    let of_first: Vec<&str> =
        places.iter().filter(|(series, _)| *series == places[0].0).map(|(_, place)| *place).collect();
    assert_eq!(of_first, ["512", "1024", "4096"]);
}

#[test]
fn regret_is_what_the_oracle_keeps_and_the_policy_does_not() {
    let rows = table(&samples::layers(), "regret-vs-steps");
    let of_h2o: Vec<&BTreeMap<String, String>> = rows.iter().filter(|row| row["series"].starts_with("h2o")).collect();
    // 3 budgets, and 16 steps of which 4 are one point.
    assert_eq!(of_h2o.len(), 3 * 4);
    assert!(of_h2o.iter().all(|row| (row["regret"].parse::<f64>().unwrap() - 0.07).abs() < 1e-9));
    assert!(rows.iter().all(|row| !row["series"].starts_with("oracle") && !row["series"].starts_with("full")));
}

#[test]
fn ragged_heads_need_more_where_there_is_one_rectangle_for_all() {
    let rows = table(&samples::layers(), "ragged-memory");
    let bytes = |series: &str| -> Vec<u64> {
        rows.iter().filter(|row| row["series"] == series).map(|row| row["kv_bytes"].parse().unwrap()).collect()
    };
    let dense = 4 * 2 * 2 * 64 * 4 * 4096;
    assert_eq!(bytes("snapkv+ada"), [dense / 4, dense / 4, dense / 8 * 3, dense]);
    // There are many, so those whose heads keep the same are left out.
    assert_eq!(bytes("snapkv"), [0u64; 0]);
}

#[test]
fn kept_tokens_are_shown_by_layer_and_on_demand_by_head() {
    let folder = tempfile::tempdir().unwrap();
    for (detail, rows, first) in [(Detail::Layers, 4, "0.25"), (Detail::Heads, 8, "0.375")] {
        write(folder.path(), &[samples::layers()], detail).unwrap();
        let mut reader = ::csv::Reader::from_path(folder.path().join("plots/kept-by-position.csv")).unwrap();
        let lines: Vec<BTreeMap<String, String>> = reader.deserialize().map(Result::unwrap).collect();
        let ada: Vec<&BTreeMap<String, String>> = lines.iter().filter(|row| row["series"] == "snapkv+ada").collect();
        assert_eq!((ada.len(), ada[0]["kept_fraction"].as_str()), (rows * 64, first));
    }
    let by_head = table(&samples::layers(), "kept-by-head");
    assert_eq!(by_head.len(), 2 * 4 * 2);
}

#[test]
fn equal_bytes_join_shapes_of_one_size() {
    let rows = table(&samples::layers(), "equal-bytes-drift");
    let series: std::collections::BTreeSet<&str> = rows.iter().map(|row| row["series"].as_str()).collect();
    assert!(series.contains("snapkv 8/4 heads, 2K tokens") && series.contains("snapkv 8/2 heads, 4K tokens"));
    assert!(rows.iter().all(|row| !row["series"].starts_with("full")));
}

#[test]
fn figures_of_layers_show_no_failed_cell() {
    let records = samples::layers().records;
    for broken in (0..records.len()).step_by(4) {
        let mut records = records.clone();
        records[broken] = failed(records[broken].clone());
        let id = records[broken].cell_id.clone();
        let (_folder, drawn) = drawn(&[of(records)]);
        for path in &drawn.figures {
            assert!(!fs::read_to_string(path.with_extension("csv")).unwrap().contains(&id), "{path:?}");
        }
    }
}

#[test]
fn names_of_policies_are_never_cut_and_bytes_read_appear_where_they_are_few() {
    let long = format!("snapkv:window=32+{}+chunks:tokens=512", "protect:sink=4".repeat(8));
    let records = [evicted(4096, "full", 1.0), evicted(4096, &long, 0.25)];
    let summary = summary_table(&records);
    assert!(summary.contains(&long) && !summary.contains("…"), "{summary}");
    // What all have in common is never cut: it goes on on a second line.
    let many = summary_table(&samples::layers().records);
    assert!(within_width(&many) && many.contains("4 layers") && many.contains("2 threads"));
    assert!(!summary.contains(" read |") && summary_table(&samples::layers().records).contains(" read |"));
}

#[test]
fn many_policies_at_one_budget_are_lines_with_names_and_not_a_cloud() {
    let mut records = samples::layers().records;
    records.retain(|record| matches!(record.cell.budget.as_deref(), Some("0.25" | "1")));
    let (_folder, drawn) = drawn(&[of(records)]);
    let has = |name: &str| drawn.figures.iter().any(|path| path.ends_with(format!("plots/{name}.svg")));
    assert!(has("policies-ranked") && !has("drift-vs-budget") && !has("needle-recall-vs-budget"));
}

#[test]
fn the_guides_figure_draws_what_records_say() {
    let run = samples::run();
    let records: Vec<&Record> = run.records.iter().collect();
    let chart = super::figures::example::chart(&super::figures::Data::new(&records, Detail::Layers)).unwrap();
    let points = chart.series.iter().map(|series| series.points.len()).sum::<usize>();
    assert!(chart.id == "peak-vs-budget" && chart.series.len() > 3 && points > 6, "{chart:?}");
}
