//! Whether what is lost adds up: what may be said of how many samples, and where its numbers are.

use super::*;
use crate::memory::Label;
use crate::report::additivity::FILE;

/// The sentence about `what` of a run.
fn sentence(run: &Run, what: &str) -> String {
    let mut said = findings(&run.records).into_iter().filter(|sentence| sentence.contains(what));
    said.next().unwrap_or_else(|| panic!("nothing of {what}"))
}

/// [`samples::formats`] with so many samples.
fn formats(samples: usize) -> Run {
    let mut run = samples::formats();
    for answers in run.records.iter_mut().filter_map(|record| record.answers.as_mut()) {
        answers.samples = samples;
        answers.sample_kl_nats.truncate(samples);
    }
    run
}

#[test]
fn sums_are_told_of_pairs_whose_parts_both_count_and_of_enough_samples() {
    // Int8 loses next to nothing beside any policy; of the others one pair loses half as much again as its parts.
    let cases = [
        (20, "beyond noise it is more than the sum in 1 and less in 0"),
        (10, "beyond noise it is more than the sum in 1 and less in 0"),
        (9, "9 samples cannot tell whether that is the sum, 10 could"),
        (4, "4 samples cannot tell whether that is the sum, 10 could"),
        (1, "1 sample cannot tell whether that is the sum, 10 could"),
    ];
    for (samples, expected) in cases {
        let run = formats(samples);
        let said = sentence(&run, "a format and a policy");
        for words in
            ["1.00 to 1.50 times", "3 pairs", expected, "left out: 3 with a part of at most 5% of the sum", FILE]
        {
            assert!(said.contains(words), "{samples}: {said}");
        }
        let summary = summary_table(&run.records);
        let table = summary.split("### ").find(|table| table.contains("together, beside the sum of both")).unwrap();
        let marked = table.lines().filter(|line| line.starts_with("| ") && line.contains('*'));
        assert_eq!(marked.count(), usize::from(samples >= 10), "{table}");
        let with_intervals = table.lines().filter(|line| line.starts_with("| ") && line.contains(" to "));
        assert_eq!(with_intervals.count(), if samples >= 10 { 3 } else { 0 }, "{table}");
        assert!(table.contains("| snapkv@0.25 cache in q4_0 |") && table.contains(" 1.50 |"), "{table}");
    }
}

#[test]
fn where_nothing_but_protected_tokens_stays_a_pair_tells_nothing() {
    let mut run = samples::formats();
    for record in run.records.iter_mut().filter(|record| record.cell.budget.as_deref() == Some("0.25")) {
        record.answers.as_mut().unwrap().unprotected_tokens = Some(0);
    }
    let said = sentence(&run, "a format and a policy");
    assert!(said.contains("2 pairs); beyond noise none is another than the sum"), "{said}");
    assert!(
        said.contains("2 with a part of at most 5% of the sum and 2 in which nothing but protected tokens stays"),
        "{said}"
    );
    run.records.retain(|record| record.cell.kv_format.is_none_or(|format| format.to_string() == "int8"));
    let said = sentence(&run, "a format and a policy");
    assert!(said.contains("adds up, none of 3 pairs tells: 2 with a part"), "{said}");
}

#[test]
fn weights_and_a_cache_that_lose_the_sum_are_not_told_apart_by_roundings() {
    // 2 formats of the weights beside 11 caches that are not the full one in plain elements.
    let said = sentence(&samples::hybrid(), "weights in fewer bits");
    assert!(said.contains("1.00 to 1.00 times") && said.contains("11 pairs"), "{said}");
    assert!(said.contains("beyond noise none is another than the sum; left out: 11 with a part"), "{said}");
}

#[test]
fn every_pair_has_its_line() {
    for (run, savings, parts, count) in [
        (samples::formats(), "format+policy", ["kl_format", "kl_policy"], 6),
        (samples::hybrid(), "weights+cache", ["kl_weights", "kl_cache"], 22),
    ] {
        let rows = table(&run, "additivity");
        let rows: Vec<_> = rows.iter().filter(|row| row["savings"] == savings).collect();
        assert_eq!(rows.len(), count, "{rows:?}");
        for row in rows {
            let number = |field: &str| row[field].parse::<f64>().unwrap();
            let near = |a: f64, b: f64| (a - b).abs() <= 1e-4 * a.abs().max(b.abs()) + 1e-9;
            assert!(near(number("kl_sum"), number(parts[0]) + number(parts[1])), "{row:?}");
            assert!(near(number("kl_both"), number("kl_sum") * number("ratio")), "{row:?}");
            assert!(near(number("difference"), number("kl_both") - number("kl_sum")), "{row:?}");
            assert!(
                number("ci95_low") <= number("difference") && number("difference") <= number("ci95_high"),
                "{row:?}"
            );
            assert_eq!(row["p_holm"].is_empty(), row["left_out"] == "part", "{row:?}");
            let others =
                ["kl_weights", "kl_format", "kl_policy", "kl_cache"].into_iter().filter(|name| !parts.contains(name));
            assert!(others.into_iter().all(|name| row[name].is_empty()), "{row:?}");
            let names = ["model", "task", "context_tokens", "samples", "protocol"].map(|field| row[field].as_str());
            assert_eq!(names, ["models/builtin", "perplexity", "1024", "20", "agnostic"]);
            let cell = |record: &&Record| {
                let Record { cell, .. } = record;
                let weights = cell.weights.as_ref().map_or("file".into(), ToString::to_string);
                let budget = cell.budget.clone().unwrap_or_default();
                (weights, cell.kv_format().to_string(), budget)
                    == (row["weights"].clone(), row["format"].clone(), row["budget"].clone())
            };
            assert!(run.records.iter().any(|record| cell(&record)), "{row:?}");
        }
    }
    let (_folder, shown) = drawn(&[samples::formats()]);
    assert!(fs::read_to_string(&shown.html).unwrap().contains(&format!("<code>{FILE}</code> beside the figures")));
    assert!(fs::read_to_string(&shown.summary).unwrap().contains(FILE));
    let (folder, _) = drawn(&[samples::answers()]);
    assert!(folder.path().join("plots/comparisons.csv").exists() && !folder.path().join("plots").join(FILE).exists());
}

/// Without a run alone there is no peak, and the bytes of the weights are those of the answers.
#[test]
fn weights_are_compared_without_a_run_alone() {
    let (counted, mut run) = (samples::hybrid(), samples::hybrid());
    for record in &mut run.records {
        let memory = record.memory.take().unwrap();
        record.answers.as_mut().unwrap().weights_bytes = memory.peak_by_label.get(&Label::Weights).copied();
        record.latency = BTreeMap::new();
    }
    let what = "weights in fewer bits";
    assert_eq!(sentence(&run, what), sentence(&counted, what));
    for figure in ["weights-ranked", "kl-vs-weights-and-cache"] {
        assert_eq!(table(&run, figure), table(&counted, figure), "{figure}");
    }
    let summary = summary_table(&run.records);
    assert!(summary.contains("bytes of weights and cache"), "{summary}");
    assert!(!summary.contains("per token") && summary_table(&counted.records).contains("per token"), "{summary}");
}
