//! What the figures show, by the tables behind them.

use super::*;

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
fn of_few_samples_the_ends_are_a_range_and_no_interval() {
    for (count, kind) in [(5, "range"), (6, "ci95")] {
        let mut run = samples::run();
        for phase in run.records.iter_mut().flat_map(|record| record.latency.values_mut()) {
            phase.samples_ns.resize(count, 1);
        }
        for id in ["latency-vs-context", "decode-latency-vs-kv-bytes", "paging-tradeoff"] {
            let rows = table(&run, id);
            let kinds: std::collections::BTreeSet<&str> =
                rows.iter().map(|row| row["interval"].as_str()).filter(|kind| !kind.is_empty()).collect();
            assert_eq!(kinds, [kind].into(), "{id}");
        }
        let (_folder, drawn) = drawn(&[run]);
        let page = fs::read_to_string(drawn.html).unwrap();
        assert!(page.contains("the band is the 95% interval, of fewer than 6 samples their range"));
    }
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
fn which_file_a_policy_was_built_from_is_said_where_two_have_one_name() {
    let built_from = |policy: &str, hash: &str| {
        with_cell(evicted(4096, policy, 0.25), |cell| cell.policy_file_hash = Some(hash.into()))
    };
    let series = |records: [Record; 2]| {
        let rows = table(&of(records.into()), "drift-vs-budget");
        rows.into_iter().map(|row| row["series"].clone()).collect::<Vec<_>>()
    };
    let apart = [built_from("dms:gates=a", "first"), built_from("dms:gates=b", "second")];
    assert_eq!(series(apart), ["dms:gates=a", "dms:gates=b"]);
    let alike = [built_from("dms:gates=a", "first"), built_from("dms:gates=a", "second")];
    assert_eq!(series(alike), ["dms:gates=a file first", "dms:gates=a file second"]);
    // Another seed, whose workload is another too, is no reason to take the files for one.
    let [first, second] = [("first", 0), ("second", 1)].map(|(hash, seed)| {
        with_cell(built_from("dms:gates=a", hash), |cell| {
            (cell.seed, cell.workload_hash) = (seed, format!("hash of seed {seed}"));
        })
    });
    assert_eq!(series([first, second]), ["dms:gates=a file first", "dms:gates=a file second"]);
}

#[test]
fn nothing_but_cells_without_room_is_still_a_figure() {
    let records = [1 << 20, 1 << 21].map(|context| pass(Measure::FORWARD, "naive", context));
    let rows = table(&of(records.into()), "latency-vs-context");
    assert!(rows.iter().all(|row| row["status"] == "oom") && rows.len() == 2);
}

#[test]
fn needles_are_found_by_depth_and_length() {
    let run = samples::answers();
    let rows = table(&run, "needle-heat-map");
    // A field names the cells that it is the mean of: those of its policy and its length.
    for row in &rows {
        let cells =
            row["cell_ids"].split(' ').map(|id| run.records.iter().find(|record| record.cell_id == id).unwrap());
        let cells: Vec<_> = cells.map(|record| record.cell.context_tokens.to_string()).collect();
        assert_eq!(
            (cells.len().to_string(), vec![row["context_tokens"].clone(); cells.len()]),
            (row["cells"].clone(), cells)
        );
        assert!(!row["cell_ids"].is_empty());
    }
    let of_full: Vec<&str> =
        rows.iter().filter(|row| row["series"] == "full").map(|row| row["accuracy"].as_str()).collect();
    assert_eq!(of_full, ["1"; 10]);
    let middle = |row: &&BTreeMap<String, String>| row["series"] == "random@0.125";
    assert_eq!(rows.iter().filter(middle).count(), 10);
}

/// A cell that failed leaves fields of its own policy empty, and the others theirs.
#[test]
fn a_field_without_a_sample_takes_no_row_from_the_other_maps() {
    let (whole, mut run) = (samples::answers(), samples::answers());
    for record in &mut run.records {
        if record.cell.policy.as_deref() == Some("random") && record.cell.context_tokens == 512 {
            record.answers = None;
        }
    }
    let [before, after] = [&whole, &run].map(|run| table(run, "needle-heat-map"));
    assert_eq!(after.len(), before.len());
    let missing: Vec<_> = after.iter().filter(|row| row["status"] == "missing").collect();
    assert!(!missing.is_empty() && missing.iter().all(|row| row["series"].starts_with("random")), "{missing:?}");
    assert!(missing.iter().all(|row| row["accuracy"].is_empty() && row["cells"] == "0"), "{missing:?}");
    let (folder, _) = drawn(&[run]);
    let svg = fs::read_to_string(folder.path().join("plots/needle-heat-map.svg")).unwrap();
    assert!(svg.contains("#C8C8C8") && !svg.contains("NaN"), "a grey field");
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
    // Who lacks the hardest budget is no better for it.
    let mut run = run;
    let hardest = |record: &Record| {
        record.cell.policy.as_deref() == Some("h2o") && record.cell.budget.as_deref() == Some("0.125")
    };
    run.records.retain(|record| !hardest(record));
    let ranked = table(&run, "policies-ranked");
    assert_eq!((ranked[0]["series"].as_str(), ranked.last().unwrap()["series"].as_str()), ("oracle", "h2o"));
    assert_ne!(order.last(), Some(&"h2o"));
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
    let chart = figures::example::chart(&figures::Data::new(&records, Detail::Layers)).unwrap();
    let points = chart.series.iter().map(|series| series.points.len()).sum::<usize>();
    assert!(chart.id == "peak-vs-budget" && chart.series.len() > 3 && points > 6, "{chart:?}");
}

#[test]
fn curves_that_lie_on_one_another_are_said_to_be_identical() {
    let cells = |policy: &'static str| [0.25, 0.5].map(|budget| evicted(4096, policy, budget));
    let mut records = [cells("h2o"), cells("keydiff"), cells("random")].concat();
    let drifts: Vec<_> = records[..2].iter().map(|record| record.drift.clone()).collect();
    for (record, drift) in records[4..].iter_mut().zip(drifts) {
        record.drift = drift;
    }
    let (_folder, drawn) = drawn(&[of(records)]);
    let page = fs::read_to_string(drawn.html).unwrap();
    assert!(page.contains("Identical to the eye at every point: h2o and random."), "{page}");
}

#[test]
fn a_policy_has_one_colour_in_every_figure_of_every_run() {
    let style = |policies: &[&str], wanted: &str| {
        let records: Vec<Record> = policies.iter().map(|policy| evicted(4096, policy, 0.25)).collect();
        let records: Vec<&Record> = records.iter().collect();
        let data = figures::Data::new(&records, Detail::Layers);
        let name = |record: &Record| record.cell.policy.clone().unwrap_or_default();
        let read = |_: &Record| Some(figures::Reading::measured(1.0, 1.0, None));
        let series = data.series(&records, &naming::Naming::over(&[], &[]), name, |_| String::new(), read);
        series.into_iter().find(|series| series.name == wanted).unwrap().style
    };
    let all = ["full", "h2o", "keydiff", "own", "random", "snapkv", "snapkv+ada", "tova"];
    for policy in ["h2o", "snapkv", "tova"] {
        assert_eq!(style(&all, policy), style(&["cur", policy, "streaming-llm"], policy), "{policy}");
    }
    let (snapkv, ada) = (style(&all, "snapkv"), style(&all, "snapkv+ada"));
    assert!(snapkv.colour == ada.colour && snapkv != ada);
}

/// The name of a series in a legend is looked for in the plot.
#[test]
fn what_has_no_mark_has_no_name_in_the_legend() {
    let run = samples::layers();
    let records: Vec<&Record> = run.records.iter().collect();
    let data = figures::Data::new(&records, Detail::Layers);
    let mut chart = figures::example::chart(&data).unwrap();
    chart.series.truncate(3);
    let mut nowhere = chart.series[0].clone();
    nowhere.name = "nowhere".into();
    // A logarithm has no place for 0.
    nowhere.points.iter_mut().for_each(|point| point.y = Some(0.0));
    chart.series.push(nowhere);
    assert!(!draw::svg(&chart).unwrap().contains("nowhere"));
    let mut panels = figures::PANELS.iter().filter_map(|figure| figure(&data));
    let ranked = panels.find_map(|picture| match picture {
        Picture::Rows(rows) if rows.id == "policies-ranked" => Some(rows),
        _ => None,
    });
    let mut rows = ranked.unwrap();
    rows.kinds.push(rows::Kind { name: "nowhere".into(), ..rows.kinds[0].clone() });
    rows.rows.iter_mut().for_each(|row| row.values.push(None));
    assert!(!draw::rows(&rows).unwrap().contains("nowhere"));
}

#[test]
fn points_of_one_place_stand_side_by_side() {
    let of_budgets = |budgets: &[f64]| {
        let cells = |policy| budgets.iter().map(move |budget| evicted(4096, policy, *budget));
        let (folder, drawn) = drawn(&[of(["h2o", "keydiff", "random"].into_iter().flat_map(cells).collect())]);
        let svg = fs::read_to_string(folder.path().join("plots/drift-vs-budget.svg")).unwrap();
        // Intervals of points that stand alone are lines of one and a half pixels, of which each has four parts.
        let place =
            |line: &str| Some(line.split_once("stroke-width=\"6\" points=\"")?.1.split(',').next()?.to_string());
        let places: std::collections::BTreeSet<String> = svg.lines().filter_map(place).collect();
        (places.len(), fs::read_to_string(drawn.html).unwrap().contains("stand side by side"))
    };
    assert_eq!((of_budgets(&[0.25]), of_budgets(&[0.25, 0.5])), ((3, true), (0, false)));
}

/// Side by side or not, what has more bytes stands farther right.
#[test]
fn points_side_by_side_are_in_the_order_of_their_places() {
    let run = samples::run();
    let records: Vec<&Record> = run.records.iter().collect();
    let mut chart = figures::example::chart(&figures::Data::new(&records, Detail::Layers)).unwrap();
    chart.series.truncate(4);
    for (series, x) in chart.series.iter_mut().zip([1010.0, 1000.0, 1020.0, 5000.0]) {
        series.points.truncate(1);
        series.points[0].x = x;
    }
    assert_eq!([0, 1, 2, 3].map(|index| chart.beside(index)), [vec![1, 0, 2], vec![1, 0, 2], vec![1, 0, 2], vec![3]]);
    assert!(draw::svg(&chart).unwrap().contains("points of one place stand side by side"));
}

/// Who keeps everything and reads a part stands where its budget is, not at the whole context.
#[test]
fn who_keeps_all_has_the_place_of_its_budget() {
    let cells = |policy: &'static str| [0.25, 0.5].map(|budget| evicted(4096, policy, budget));
    let mut quest = cells("quest");
    for eviction in quest.iter_mut().filter_map(|record| record.eviction.as_mut()) {
        (eviction.kept_fraction, eviction.kv_bytes_live) = (1.0, eviction.kv_bytes_dense);
    }
    let all = of([cells("h2o"), quest].concat());
    for id in ["drift-vs-budget", "needle-recall-vs-budget"] {
        let rows = table(&all, id);
        let places: Vec<&str> = rows.iter().map(|row| row["kept_or_budget_fraction"].as_str()).collect();
        assert_eq!(places, ["0.25", "0.5", "0.25", "0.5"], "{id}");
        assert!(table(&of(cells("h2o").to_vec()), id)[0].contains_key("kept_fraction"));
    }
}

#[test]
fn several_formats_are_drawn_as_fronts_and_policies_in_plain_elements() {
    let run = samples::formats();
    let of_budgets = table(&run, "kl-vs-budget");
    assert!(
        !of_budgets.is_empty() && of_budgets.iter().all(|row| !row["series"].contains("cache in")),
        "{of_budgets:?}"
    );
    let fronts = table(&run, "kl-vs-bits-and-tokens");
    let names: std::collections::BTreeSet<&str> = fronts.iter().map(|row| row["series"].as_str()).collect();
    assert_eq!(names, ["full", "random", "snapkv"].into());
    for pair in fronts.windows(2).filter(|pair| pair[0]["series"] == pair[1]["series"]) {
        let number = |at: usize, field: &str| pair[at][field].parse::<f64>().unwrap();
        assert!(
            number(0, "kv_bytes") < number(1, "kv_bytes") && number(0, "kl_nats") > number(1, "kl_nats"),
            "{pair:?}"
        );
    }
}

#[test]
fn weights_of_several_formats_are_drawn_as_fronts_over_all_bytes() {
    let fronts = table(&samples::hybrid(), "kl-vs-weights-and-cache");
    let names: std::collections::BTreeSet<&str> = fronts.iter().map(|row| row["series"].as_str()).collect();
    assert_eq!(names, ["weights in bf16", "weights in q4_0", "weights in q8_0"].into());
    for pair in fronts.windows(2).filter(|pair| pair[0]["series"] == pair[1]["series"]) {
        let number = |at: usize, field: &str| pair[at][field].parse::<f64>().unwrap();
        assert!(number(0, "whole_bytes") < number(1, "whole_bytes"), "{pair:?}");
        assert!(number(0, "kl_nats") > number(1, "kl_nats"), "{pair:?}");
    }
}

#[test]
fn what_two_protocols_lose_is_not_mixed() {
    use crate::eval::Protocol;
    for (run, ids) in [
        (samples::hybrid(), &["kl-vs-bits-and-tokens", "kl-vs-weights-and-cache", "weights-ranked"][..]),
        (samples::activations(), &["activations-ranked"]),
    ] {
        let under = |protocol: Protocol, times: f64| {
            let one = move |mut record: Record| {
                let answers = record.answers.as_mut().unwrap();
                answers.sample_kl_nats.iter_mut().for_each(|kl| *kl *= times);
                with_cell(record, |cell| cell.protocol = Some(protocol))
            };
            run.records.clone().into_iter().map(one)
        };
        let both = of(under(Protocol::Agnostic, 1.0).chain(under(Protocol::Aware, 3.0)).collect());
        for id in ids {
            let (alone, both) = (table(&run, id), table(&both, id));
            assert!(!alone.is_empty() && both.len() == 2 * alone.len(), "{id}: {both:?}");
            for row in &alone {
                let kl: f64 = row["kl_nats"].parse().unwrap();
                let has = |times: f64| {
                    let is = |other: &BTreeMap<String, String>| {
                        other["kl_nats"].parse::<f64>().is_ok_and(|other| (other - times * kl).abs() <= 1e-9)
                    };
                    both.iter().any(is)
                };
                assert!(has(1.0) && has(3.0), "{id}: {kl} {both:?}");
            }
        }
    }
}

#[test]
fn weights_alone_are_ranked_by_their_bytes() {
    let ranked = table(&samples::hybrid(), "weights-ranked");
    let names: Vec<&str> = ranked.iter().map(|row| row["series"].as_str()).collect();
    assert_eq!(names, ["in q8_0, 2.08 GiB", "in q4_0, 1.10 GiB"], "{ranked:?}");
}

#[test]
fn two_protocols_of_a_policy_share_a_plot() {
    use crate::eval::Protocol;
    let all = samples::answers().records.into_iter();
    let agnostic = all.map(|record| with_cell(record, |cell| cell.protocol = Some(Protocol::Agnostic)));
    let both = agnostic.flat_map(|record| {
        let aware = with_cell(record.clone(), |cell| cell.protocol = Some(Protocol::Aware));
        [record, aware]
    });
    let (folder, _) = drawn(&[of(both.collect())]);
    let svg = fs::read_to_string(folder.path().join("plots/accuracy-vs-budget.svg")).unwrap();
    // Once at the head of its plot, and the protocols once for all plots.
    for words in ["keydiff", "h2o", "agnostic", "aware"] {
        assert_eq!(svg.matches(&format!("\n{words}\n")).count(), 1, "{words}");
    }
}

#[test]
fn activations_in_fewer_bits_have_a_figure_and_no_place_among_what_saves_bytes() {
    let run = samples::activations();
    let weights = run.records.len() / 2;
    let rows = table(&run, "activations-ranked");
    let rounded: Vec<_> = rows.iter().filter(|row| row.values().any(|value| value == "in int8")).collect();
    assert_eq!(rounded.len(), weights, "{rows:?}");
    // Of the rest, the model's own weights lose nothing and have no place on a logarithm.
    assert_eq!(rows.len() - rounded.len(), weights - 1, "{rows:?}");
    assert_eq!(table(&run, "weights-ranked").len(), weights - 1);
}

/// A policy under two budgets is two series, and under another one for each number of facts one.
#[test]
fn budgets_set_a_policy_apart_from_itself_where_facts_are_told() {
    let told = |facts: usize, budget: &str| {
        with_cell(samples::told("", facts, 0.5), |cell| {
            (cell.memory, cell.policy, cell.budget) = (None, Some("keydiff".into()), Some(budget.into()));
        })
    };
    let names = |records: &[Record]| {
        let rows = table(&of(records.to_vec()), "answers-vs-facts");
        assert!(rows.iter().all(|row| row["interval"] == "ci95"), "{rows:?}");
        rows.into_iter().map(|row| row["series"].clone()).collect::<Vec<_>>()
    };
    let one = [told(16, "1KiB"), told(64, "2KiB")];
    assert_eq!(names(&one), ["keydiff", "keydiff"]);
    assert!(summary_table(&one).contains("seed 0 · budget 1KiB"), "{}", summary_table(&one));
    let two = [told(16, "1KiB"), told(16, "4KiB"), told(64, "1KiB"), told(64, "4KiB")];
    assert_eq!(names(&two), ["keydiff@1KiB", "keydiff@1KiB", "keydiff@4KiB", "keydiff@4KiB"]);
    let lines = summary_table(&two);
    assert!(
        lines.matches("| keydiff@1KiB |").count() == 2 && lines.matches("| keydiff@4KiB |").count() == 2,
        "{lines}"
    );
}

/// What all are compared with, of one model: the same number from every one of them, but for rounding.
#[test]
fn memories_stand_beside_the_line_of_the_full_cache() {
    let (_folder, drawn) = drawn(&[samples::memories()]);
    for name in ["score-vs-kv-bytes", "perplexity-vs-kv-bytes"] {
        let is_it = |path: &&std::path::PathBuf| path.file_stem().is_some_and(|stem| stem == name);
        let path = drawn.figures.iter().find(is_it).unwrap_or_else(|| panic!("{name} of {:?}", drawn.figures));
        assert_eq!(std::fs::read_to_string(path).unwrap().matches("full cache").count(), 1, "{name}");
    }
}
