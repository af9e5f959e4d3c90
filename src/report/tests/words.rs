//! What tables and sentences say.

use super::*;

/// Whether no line passes a hundred columns but those of tables, in which names of policies are whole.
fn within_width(summary: &str) -> bool {
    summary.lines().all(|line| line.chars().count() <= 100 || line.starts_with('|'))
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
fn steps_of_each_shape_have_tables_of_their_own() {
    let shapes = [(256, 1), (256, 2), (512, 2)];
    for (run, rows, against) in [(samples::training(), 18, 3), (samples::tuning(), 8, 0)] {
        let of_shape = |shape| {
            let place =
                move |record: &Record| with_cell(record.clone(), |cell| (cell.context_tokens, cell.batch) = shape);
            run.records.iter().map(place)
        };
        let summary = summary_table(&shapes.into_iter().flat_map(of_shape).collect::<Vec<_>>());
        let headings: Vec<&str> =
            summary.lines().filter(|line| line.ends_with(" context") || line.contains(" context ·")).collect();
        assert_eq!(headings.len(), shapes.len(), "{summary}");
        for (heading, (context, batch)) in headings.iter().zip(shapes) {
            assert!(heading.starts_with(&format!("{context} context ")), "{heading}");
            assert_eq!(heading.contains(&format!("B {batch} ")), batch > 1, "{heading}");
        }
        let lines = summary.lines().filter(|line| line.starts_with("| ")).count();
        assert_eq!(lines, shapes.len() * (rows + 2), "{summary}");
        // Each stage is held against that of its own batch.
        assert_eq!(summary.matches("1.30x [").count(), against, "{summary}");
    }
}

#[test]
fn what_is_not_there_is_told_before_what_is() {
    let mut run = samples::answers();
    run.environment["run"]["cells"] = run.records.len().into();
    assert!(!html::summary(&[(&run, Vec::new())]).contains("Incomplete"));
    let all = run.records.len();
    run.records.truncate(all - 2);
    let text = html::summary(&[(&run, Vec::new())]);
    assert!(text.contains(&format!("{} of {all} cells: ", all - 2)), "{text}");
    let first = text.lines().find(|line| line.starts_with("- ")).unwrap();
    assert_eq!(first, format!("- Incomplete: 2 of {all} cells are not here; what follows is of the rest."));
}

#[test]
fn seeds_of_a_memory_of_facts_are_told_apart() {
    let recalled = |seed: u64| with_cell(samples::recalled("list", "write:count=16", 0.9), |cell| cell.seed = seed);
    let both = summary_table(&[recalled(0), recalled(1)]);
    assert!(both.contains("| list seed 0 |") && both.contains("| list seed 1 |"), "{both}");
    assert!(!summary_table(&[recalled(0)]).contains("seed"));
}

#[test]
fn models_of_one_name_in_two_folders_are_two() {
    let mut run = samples::answers();
    let twice = run.records.clone().into_iter().map(|record| {
        let place = |folder: &str| with_cell(record.clone(), |cell| cell.model = Some(format!("{folder}/model")));
        ["one", "other"].map(place)
    });
    run.records = twice.flatten().collect();
    let summary = summary_table(&run.records);
    let of = |folder: &str| summary.lines().filter(|line| line.contains(&format!("h2o {folder}/model"))).count();
    assert!(of("one") > 0 && of("one") == of("other"), "{summary}");
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
fn memories_are_compared_in_pairs_and_texts_apart_from_tasks() {
    let run = samples::memories();
    let rows = table(&run, "comparisons");
    let of = |measure: &str| rows.iter().filter(|row| row["measure"] == measure && row["budget"].is_empty()).count();
    // Every pair of four: of the text by divergence and by its tokens' log-probability, of the task by score.
    assert_eq!(["kl_nats", "nll_nats", "accuracy"].map(of), [6; 3]);
    let pair = ["camelot:slots=256,window=128", "transformer-xl:slots=1"];
    let is_pair = |row: &&BTreeMap<String, String>| {
        row["measure"] == "nll_nats" && [row["policy_a"].as_str(), row["policy_b"].as_str()] == pair
    };
    let row = rows.iter().find(is_pair).unwrap();
    let number = |field: &str| row[field].parse::<f64>().unwrap();
    assert!((number("value_a") - number("value_b") - number("difference")).abs() < 1e-9, "{row:?}");
    assert!(number("difference") < 0.0 && number("ci95_high") < 0.0, "{row:?}");
    let summary = summary_table(&run.records);
    assert_eq!(summary.matches("### eval: comparison, memories").count(), 2, "{summary}");
    // exp(-0.78 * 0.35) is 0.76.
    let of_text = |line: &&str| line.starts_with("| camelot:slots=256,window=128 |") && line.contains("| -24% (");
    assert_eq!(summary.lines().filter(of_text).count(), 1, "{summary}");
    let sentences = findings(&run.records);
    assert!(sentences.iter().any(|sentence| sentence.contains("memories, 20 samples") && sentence.contains("window")));
}

/// Cells of seeds 0, 1 and so on with these drifts, each known to 5%.
fn seeds(policy: &str, drifts: &[f64], checked_tokens: usize) -> Vec<Record> {
    let cell = |(seed, rel_l2): (u64, &f64)| {
        let mut record = with_cell(evicted(4096, policy, 0.25), |cell| cell.seed = seed);
        let drift = record.drift.as_mut().unwrap();
        (drift.rel_l2, drift.ci95_low, drift.ci95_high) = (*rel_l2, 0.95 * rel_l2, 1.05 * rel_l2);
        drift.checked_rows = checked_tokens * record.cell.shape().batch * record.cell.q_heads;
        record
    };
    (0..).zip(drifts).map(cell).collect()
}

#[test]
fn a_finding_needs_ten_samples_and_intervals_apart() {
    let least = "`h2o` (0.100, 95% 0.0950 to 0.105) has the least drift of 2, before `random`";
    let cases: [(&[f64], usize, &str); 4] = [
        (&[0.8], 10, least),
        (&[0.8], 9, "undecided with 9 samples (10 make a finding) between `h2o`"),
        (
            &[0.108],
            512,
            "undecided between `h2o` (0.100, 95% 0.0950 to 0.105) and `random` (0.108, 95% 0.103 to 0.113)",
        ),
        // A lucky seed does not win, and an unlucky one does not lose.
        (
            &[0.001, 0.8, 0.9],
            512,
            "undecided between `h2o` (0.100, 95% 0.0950 to 0.105) and `random` (0.800, 95% 9.5e-4",
        ),
    ];
    for (random, rows, expected) in cases {
        let full = evicted(4096, "full", 1.0);
        let records = [seeds("random", random, rows), seeds("h2o", &[0.1], rows), vec![full]].concat();
        let findings = findings::of(&latest(&records));
        assert!(findings.len() == 1 && findings[0].contains(expected), "{findings:?}");
    }
    // Of times that do not overlap their ranks decide: of three and three samples they lie apart by luck one time in ten.
    let of_kernels = |samples: usize, factor: u64| {
        let of = ["tiled", "naive"].map(|kernel| {
            let mut record = pass(Measure::FORWARD, kernel, 4096);
            let phase = record.latency.get_mut("forward").unwrap();
            let middle = if kernel == "tiled" { 1000 } else { 1000 * factor };
            phase.samples_ns = (0..samples as u64).map(|at| middle + 300 * at).collect();
            record
        });
        findings::of(&latest(&of)).concat()
    };
    for (samples, factor, expected) in [
        (9, 4, "of the time of `naive`"),
        (5, 4, "of the time of `naive`"),
        (3, 4, "their ranges do not meet, but samples are too few to be sure; `tiled` runs at a peak"),
        (5, 2, "undecided with 5 samples"),
    ] {
        let sentence = of_kernels(samples, factor);
        assert!(sentence.contains(expected), "{samples} {factor}: {sentence}");
        assert_eq!(sentence.contains("ranges do not meet"), (samples, factor) == (3, 4), "{sentence}");
    }
}

#[test]
fn wide_intervals_and_times_that_bytes_do_not_explain_are_told() {
    let timed = |policy: &str, factor: f64, half: f64| {
        let mut record = evicted(4096, policy, 0.25);
        let phase = record.latency.get_mut("decode").unwrap();
        phase.median_ns = 1e6 * factor;
        (phase.ci95_low_ns, phase.ci95_high_ns) = (phase.median_ns * (1.0 - half), phase.median_ns * (1.0 + half));
        phase.samples_ns = vec![phase.median_ns as u64; 10];
        record
    };
    let same = ["h2o", "keydiff", "random"].map(|policy| timed(policy, 1.0, 0.02));
    assert!(noise::warnings(&latest(&same)).is_empty());
    let slow = [&same[..2], &[timed("random", 1.5, 0.02)]].concat();
    let warnings = noise::warnings(&latest(&slow));
    assert!(
        warnings.len() == 1 && warnings[0].contains("Equal bytes, unequal times") && warnings[0].contains("`random")
    );
    let marked: Vec<String> =
        summary_table(&slow).lines().filter(|line| line.contains('≠')).map(String::from).collect();
    assert!(marked.len() == 1 && marked[0].contains("random"), "{marked:?}");
    // Whoever has the least drift there, its time is not that of its bytes.
    for (full, expected) in [(&slow, false), (&same.to_vec(), true)] {
        let records = [&full[..], &[timed("full", 3.0, 0.02)]].concat();
        let sentences = findings::of(&latest(&records)).concat();
        assert_eq!(sentences.contains("of the decode time"), expected, "{sentences}");
    }
    let unsure = [&same[..2], &[timed("random", 1.5, 0.6)]].concat();
    let warnings = noise::warnings(&latest(&unsure));
    assert!(warnings.len() == 1 && warnings[0].contains("1 of 3 median times is not known to ±10%"), "{warnings:?}");
}

/// Who evicts once holds more and more while tokens are decoded, and is not ranked beside who evicts at every step.
#[test]
fn a_cache_that_grows_is_not_ranked_beside_those_that_do_not() {
    let ending_with = |policy: &str, times: u64| {
        let mut record = evicted(4096, policy, 0.25);
        let eviction = record.eviction.as_mut().unwrap();
        let live = eviction.kv_bytes_live;
        for (step, at) in eviction.steps.iter_mut().zip(1..) {
            step.kv_bytes_live = live + live * (times - 1) * at / 4;
        }
        record
    };
    let snapkv = "snapkv:kernel=7,window=32";
    let rivals = |times: u64| {
        let records = [(snapkv, times), ("h2o", 1), ("random", 1)].map(|(policy, times)| ending_with(policy, times));
        [&records[..], &[evicted(4096, "full", 1.0)]].concat()
    };
    let said = findings::of(&latest(&rivals(4))).concat();
    assert!(said.contains("`h2o` (") && said.contains("has the least drift of 2, before `random`"), "{said}");
    assert!(
        said.contains(&format!("Not ranked beside them, since more than twice as much stays in the end: `{snapkv}`"))
    );
    assert!(said.contains("100% of the KV bytes of `full`"), "{said}");
    let said = findings::of(&latest(&rivals(1))).concat();
    assert!(said.contains(&format!("undecided between `{snapkv}`")) && !said.contains("Not ranked"), "{said}");
    // Its place is what it holds on average.
    let rows = table(&of(rivals(4)), "drift-vs-kv-bytes");
    let bytes = |series: &str| {
        let row = rows.iter().find(|row| row["series"] == series).unwrap();
        row["mean_kv_bytes_live"].parse::<f64>().unwrap()
    };
    assert_eq!(bytes(snapkv) / bytes("h2o"), 1.0 + 3.0 * 2.5 / 4.0);
    // All grow alike: what is left of the context is not what is held.
    let grown = [(snapkv, 4), ("random", 4), ("full", 1)].map(|(policy, times)| ending_with(policy, times));
    let said = findings::of(&latest(&grown)).concat();
    assert!(said.contains("it needs 25% of the KV bytes behind prefill, 400% of those at the end of `full`"), "{said}");
}

#[test]
fn samples_that_would_do_are_those_of_the_hardest_score() {
    let scored = |policy: &str, samples: usize, mean: f64| {
        let mut record = samples::answered(1024, "passkey", policy, 0.5);
        let answers = record.answers.as_mut().unwrap();
        let (ci95_low, ci95_high) = crate::stats::wilson(mean, samples);
        (answers.samples, answers.accuracy) =
            (samples, Some(crate::experiment::answers::Estimate { mean, ci95_low, ci95_high }));
        record
    };
    // The widest is of three samples, and the one whose score is near a half takes more.
    let records = [scored("h2o", 3, 1.0), scored("random", 20, 0.4)];
    let warning = noise::warnings(&latest(&records)).concat();
    assert!(
        warning.contains("2 of 2 scores are not known to ±10 points, the worst to ±28 with 3 samples"),
        "{warning}"
    );
    assert!(warning.contains("about 100 would do for all"), "{warning}");
    let single = noise::warnings(&latest(&[{
        let mut record = evicted(4096, "h2o", 0.25);
        record.latency.get_mut("decode").unwrap().samples_ns.truncate(1);
        record
    }]));
    assert_eq!(single, ["Times without an interval: 1 of 1 is of one sample."]);
}

#[test]
fn what_models_answered_is_decided_by_pairs_and_says_what_is_only_a_window() {
    let sentences = findings::of(&latest(&samples::answers().records));
    let of_eval: Vec<&String> =
        sentences.iter().filter(|sentence| sentence.starts_with("eval at a context of")).collect();
    assert_eq!(of_eval.len(), 3);
    for sentence in of_eval {
        assert!(
            sentence.contains(" samples of each of ")
                && sentence.contains("random")
                && sentence.contains("full cache 100%")
        );
        let is_tight = sentence.contains("budget 0.0625") || sentence.contains("budget 0.125");
        assert_eq!(sentence.contains("Nothing but protected tokens"), is_tight, "{sentence}");
    }
}

#[test]
fn texts_are_ranked_by_divergence_the_least_first() {
    let mut records = samples::answers().records;
    for answers in records.iter_mut().filter_map(|record| record.answers.as_mut()) {
        (answers.accuracy, answers.accuracy_difference) = (None, None);
        answers.sample_scores.clear();
    }
    let sentences = findings::of(&latest(&records));
    let sentence = sentences.iter().find(|sentence| sentence.contains("budget 0.25,")).unwrap();
    for part in
        ["KL in nats a token: `oracle` (0.0500", "is the best of 6, 0.0700 nats (", "before `snapkv", "; random 0."]
    {
        assert!(sentence.contains(part), "{part}: {sentence}");
    }
}

/// Of 40 policies there are 780 pairs, of which 12 samples can set none apart; but which of them may be the best asks for 39, and there
/// they can.
#[test]
fn who_may_be_the_best_is_asked_of_no_other_pairs() {
    let sentence = |policies: usize, samples: usize| {
        let one = samples::formats().records.into_iter().find(|record| record.cell.policy.as_deref() != Some("full"));
        let one = with_cell(one.unwrap(), |cell| (cell.text, cell.kv_format) = (Some("a.txt".into()), None));
        let policy = |at: usize| {
            let mut record = with_cell(one.clone(), |cell| cell.policy = Some(format!("snapkv:window={}", at + 1)));
            // Two are alike, and all others are worse by more than pieces differ.
            let worse = if at < 2 { 0.0 } else { 1.0 };
            let kl = (0..samples).map(|sample| 0.1 + 0.01 * ((sample * 7 + at * 3) % 5) as f64 + worse);
            let answers = record.answers.as_mut().unwrap();
            (answers.samples, answers.sample_kl_nats) = (samples, kl.collect());
            record
        };
        let records: Vec<Record> = (0..policies).map(policy).collect();
        let records: Vec<&Record> = records.iter().collect();
        findings::of(&records).into_iter().find(|sentence| sentence.starts_with("eval")).unwrap()
    };
    let decided = sentence(40, 12);
    let named = decided.matches("snapkv:window").count();
    assert!(decided.contains("undecided between") && named == 2, "{decided}");
    let few = sentence(40, 6);
    assert!(few.contains("undecided: 6 samples set none of 40 policies apart from `snapkv:window="), "{few}");
    assert!(few.contains("and 11 could"), "{few}");
}

/// Pieces of a text are the same under every seed: another seed is no other evidence, of whatever is compared.
#[test]
fn pieces_of_a_text_count_once_whatever_the_seeds() {
    let text = |seeds: u64, samples: usize| -> Vec<Record> {
        let records = samples::formats().records.into_iter().filter(|record| record.cell.kv_format.is_none());
        let under = |record: Record| {
            (0..seeds).map(move |seed| {
                let mut record =
                    with_cell(record.clone(), |cell| (cell.text, cell.seed) = (Some("a.txt".into()), seed));
                record.answers.as_mut().unwrap().sample_kl_nats.truncate(samples);
                record
            })
        };
        records.flat_map(under).collect()
    };
    let pairs = |records: &[Record]| {
        let records: Vec<&Record> = records.iter().collect();
        let (pools, _) = pools::pools(&records);
        let merits: Vec<usize> = pools.iter().map(|pool| pool.merits().concat().len()).collect();
        let ranked = comparison::ranked(&pools);
        let ps = ranked.iter().flat_map(|ranked| comparison::pairs(ranked)).map(|pair| pair.difference.p);
        (merits, ps.collect::<Vec<f64>>())
    };
    let (once, three) = (pairs(&text(1, 6)), pairs(&text(3, 6)));
    assert!(once.0.iter().all(|&samples| samples == 6) && !once.1.is_empty());
    assert_eq!(once, three);
    // 4 samples cannot set two policies apart, and the table says so; 12 can.
    let notes = |samples| {
        let records = text(1, samples);
        let records: Vec<&Record> = records.iter().collect();
        let (pools, protocol) = pools::pools(&records);
        comparison::tables(&pools, &protocol)
            .iter()
            .flat_map(|table| table.notes.clone())
            .collect::<Vec<_>>()
            .join("\n")
    };
    let few = notes(4);
    assert!(
        few.contains("4 samples of 2 policies set no two apart: the least p of 1 pairs is 0.12; 10 samples"),
        "{few}"
    );
    assert!(!notes(12).contains("set no two apart"));
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
fn the_leaderboard_is_best_first_beside_memories_too() {
    let policies = samples::answers().records;
    let names = |records: &[Record]| -> Vec<String> {
        let summary = summary_table(records);
        let board = summary.split("### ").find(|table| table.contains("leaderboard")).unwrap();
        let rows = board.lines().filter(|line| line.starts_with("| ")).skip(1);
        rows.map(|line| line.split('|').nth(1).unwrap().trim().to_string()).collect()
    };
    let memories = policies.iter().filter(|record| record.cell.policy.as_deref() == Some("full")).map(|record| {
        with_cell(record.clone(), |cell| {
            cell.policy = None;
            cell.memory = Some("camelot:slots=64".into());
        })
    });
    let with_memories: Vec<Record> = policies.iter().cloned().chain(memories).collect();
    let mut found = names(&with_memories);
    assert!(found.contains(&"camelot:slots=64".to_string()), "{found:?}");
    found.retain(|name| !name.starts_with("camelot"));
    assert_eq!(found, names(&policies));
}

#[test]
fn a_longer_context_of_another_measure_takes_no_sentence_away() {
    let mut records = samples::run().records;
    let evictions = |records: &[Record]| {
        findings(records).into_iter().filter(|sentence| sentence.starts_with("evict at")).collect::<Vec<_>>()
    };
    let before = evictions(&records);
    records.push(samples::answered(1 << 20, "passkey", "snapkv", 0.5));
    assert_eq!((before.is_empty(), evictions(&records)), (false, before.clone()));
}

/// Two texts of one run are one comparison, in which each piece counts once, however many of either there are and under whatever
/// seeds.
#[test]
fn pieces_of_two_texts_count_alike() {
    let of = |text: &str, pieces: usize, seed: u64| -> Vec<Record> {
        let records = samples::formats().records.into_iter().filter(|record| record.cell.kv_format.is_none());
        let of_text = |record: Record| {
            let mut record = with_cell(record, |cell| (cell.text, cell.seed) = (Some(text.into()), seed));
            let answers = record.answers.as_mut().unwrap();
            let (kl, nll) = if pieces < 5 { (0.2, 1.0) } else { (0.4, 2.0) };
            (answers.samples, answers.sample_kl_nats) = (pieces, vec![kl; pieces]);
            // One is worse on one of the texts.
            let worse = if pieces < 5 && record.cell.policy.as_deref() == Some("random") { 0.5 } else { 0.0 };
            answers.sample_nll_nats = vec![nll + worse; pieces];
            answers.nll_nats.mean = nll + worse;
            record
        };
        records.map(of_text).collect()
    };
    for seeds in 1..3 {
        let all: Vec<Record> =
            (0..seeds).flat_map(|seed| [of("a.txt", 2, seed), of("b.txt", 8, seed)].concat()).collect();
        let records: Vec<&Record> = all.iter().collect();
        let (pools, _) = pools::pools(&records);
        assert!(!pools.is_empty());
        for pool in &pools {
            let found = pool.kl_nats().unwrap();
            assert!((found.mean - 0.36).abs() < 1e-12, "{}: {found:?}", pool.name);
            assert_eq!((pool.all_samples(), pool.samples()), (10, 10), "{}", pool.name);
        }
        // exp(1.8) is 6.05, and exp(1.9) 6.69; the mean over texts would be 1.5.
        let summary = summary_table(&all);
        let board = summary.lines().take_while(|line| !line.contains("comparison")).collect::<Vec<_>>().join("\n");
        assert!(board.contains(" 6.0 |") && board.contains(" 6.7 |") && !board.contains(" 4.5 |"), "{board}");
        let of_nll = table(&super::of(all.clone()), "comparisons");
        let mut of_nll = of_nll.iter().filter(|row| row["measure"] == "nll_nats").peekable();
        assert!(of_nll.peek().is_some());
        for row in of_nll {
            let number = |field: &str| row[field].parse::<f64>().unwrap();
            assert!((number("value_a") - number("value_b") - number("difference")).abs() < 1e-9, "{row:?}");
        }
        let said = findings(&all);
        assert!(said.iter().any(|sentence| sentence.contains("10 samples, KL")), "{said:?}");
    }
}
