//! What few samples and single runs let a reader think: what more would do, and what nobody knows.

use super::*;

/// Cells of policies on tasks of so many samples each, of which the first policy is right in all and the others in none.
fn scored(policies: usize, tasks: usize, samples: usize) -> Vec<Record> {
    let cell = |at: usize| {
        let policy = at % policies;
        let record = samples::answered(1024, "passkey", "tova", 0.5);
        let mut record = with_cell(record, |cell| {
            cell.policy = Some(format!("snapkv:window={}", policy + 1));
            cell.task = Some(format!("task-{}", at / policies));
        });
        let answers = record.answers.as_mut().unwrap();
        let right = if policy == 0 { 1.0 } else { 0.0 };
        (answers.samples, answers.sample_scores) = (samples, vec![right; samples]);
        // The full cache is right in all.
        (answers.accuracy.as_mut().unwrap().mean, answers.accuracy_difference.as_mut().unwrap().mean) =
            (right, right - 1.0);
        record
    };
    (0..policies * tasks).map(cell).collect()
}

fn sentence(records: &[Record]) -> String {
    findings(records).into_iter().find(|sentence| sentence.starts_with("eval")).unwrap()
}

#[test]
fn who_takes_as_many_samples_as_are_said_to_do_gets_a_finding() {
    for policies in [2, 3, 6, 40] {
        for (tasks, samples) in [(1, 2), (1, 4), (1, 7), (3, 1), (2, 3)] {
            let said = sentence(&scored(policies, tasks, samples));
            let words = said.split(" could").next().and_then(|text| text.rsplit(' ').next());
            let Some(enough) = words.filter(|_| said.contains(" could")).and_then(|word| word.parse::<usize>().ok())
            else {
                assert!(said.contains("10 make one"), "{policies} {tasks} {samples}: {said}");
                continue;
            };
            let then = sentence(&scored(policies, tasks, enough.div_ceil(tasks)));
            assert!(then.contains("is the best of"), "{policies} {tasks} {samples}: {said} {then}");
        }
    }
    let few = sentence(&scored(6, 3, 1));
    assert!(few.contains("3 samples set none of 6 policies apart") && few.contains("and 30 could"), "{few}");
}

#[test]
fn one_name_is_not_undecided_among_itself() {
    for (policies, tasks, expected) in [
        (2, 1, "is apart from the other, but 8 samples are too few for a finding (10 make one)"),
        (6, 1, "is apart from all 5 others, but 8 samples are too few for a finding (10 make one)"),
        (6, 3, "is apart from all 5 others, but 8 samples of each are too few for a finding (10 make one)"),
    ] {
        let said = sentence(&scored(policies, tasks, 8));
        assert!(said.contains("snapkv:window=1 (100%") && said.contains(expected), "{said}");
        assert!(!said.contains("undecided"), "{said}");
    }
    let alone = sentence(&scored(1, 1, 4));
    assert!(alone.contains(": snapkv:window=1 (100%") && !alone.contains("undecided"), "{alone}");
}

#[test]
fn a_single_run_has_no_interval_and_the_legend_says_so() {
    let with_runs = |counts: [usize; 2]| {
        let mut run = samples::answers();
        for (at, record) in run.records.iter_mut().enumerate() {
            for phase in record.latency.values_mut() {
                phase.samples_ns.truncate(counts[at % 2]);
                if counts[at % 2] == 1 {
                    (phase.ci95_low_ns, phase.ci95_high_ns) = (phase.median_ns, phase.median_ns);
                }
            }
        }
        run
    };
    for (counts, expected) in
        [([1, 1], Some("of one run each")), ([1, 3], Some("of some cells one run")), ([3, 3], None)]
    {
        let mut run = with_runs(counts);
        let (_folder, drawn) = drawn(std::slice::from_ref(&run));
        let page = fs::read_to_string(&drawn.html).unwrap();
        for text in [summary_table(&run.records).replace('\n', " "), page] {
            assert_eq!(text.contains("which tells nothing of how far they are off"), expected.is_some(), "{counts:?}");
            assert!(expected.is_none_or(|words| text.contains(words)), "{counts:?}");
        }
        // Of one task, whose point is no range over tasks.
        run.records.retain(|record| record.cell.task.as_deref() == Some("passkey"));
        let rows = table(&run, "first-token-vs-context");
        let known = rows.iter().filter(|row| row["interval"] == "range" && !row["low"].is_empty()).count();
        assert_eq!((known == 0, known == rows.len()), (counts == [1, 1], counts == [3, 3]), "{counts:?}: {rows:?}");
    }
    let single = noise::Measured { name: "a".into(), value: 2.0, low: 2.0, high: 2.0, count: 1, is_range: true };
    assert_eq!(single.words(|value| value.to_string()), "`a` (2, 1 sample)");
}

#[test]
fn a_field_of_needles_says_of_how_many_samples_it_is() {
    let mut run = samples::answers();
    for answers in run.records.iter_mut().filter_map(|record| record.answers.as_mut()) {
        answers.samples = 4;
        answers.sample_scores.truncate(4);
        answers.sample_depths = vec![0.1, 0.5, 0.5, 0.9];
    }
    let rows = table(&run, "needle-heat-map");
    let names: Vec<&str> = rows.iter().filter(|row| row["series"] == "full").map(|row| row["row"].as_str()).collect();
    let five = ["0–20 %", "20–40 %", "40–60 %", "60–80 %", "80–100 %"];
    assert_eq!(names, five.map(|name| [name; 2]).concat());
    for row in &rows {
        // Two tasks of each policy.
        let expected = match row["row"].as_str() {
            "40–60 %" => "4",
            "0–20 %" | "80–100 %" => "2",
            _ => "0",
        };
        assert_eq!(row["samples"], expected, "{row:?}");
        assert_eq!(row["status"] == "missing", expected == "0", "{row:?}");
    }
    let (_folder, drawn) = drawn(&[run]);
    let summary = fs::read_to_string(drawn.summary).unwrap();
    assert!(summary.contains("2 to 4 samples in a field, grey where there is none"), "{summary}");
}

/// Whether a cell ran alone too, and how often, changes nothing of what it answered: it is asked the same question, once.
#[test]
fn runs_alone_are_no_question_of_their_own() {
    let once = samples::answers();
    let bare = |record: &Record| {
        let record = with_cell(record.clone(), |cell| cell.alone_samples = Some(0));
        Record { memory: None, latency: BTreeMap::new(), ..record }
    };
    let is_twice = |record: &&Record| matches!(record.cell.policy.as_deref(), Some("full" | "random"));
    let again: Vec<Record> = once.records.iter().filter(is_twice).map(bare).collect();
    assert!(!again.is_empty());
    for records in [[again.clone(), once.records.clone()].concat(), [once.records.clone(), again].concat()] {
        let twice = Run { records, ..samples::answers() };
        for id in ["accuracy-vs-budget", "comparisons"] {
            assert_eq!(table(&twice, id), table(&once, id), "{id}");
        }
    }
    // A part of the policies ran alone, and the others did not: they are compared all the same.
    let mut mixed = samples::answers();
    mixed
        .records
        .iter_mut()
        .filter(|record| record.cell.policy.as_deref() == Some("tova"))
        .for_each(|record| *record = bare(record));
    let policies =
        |run: &Run| -> Vec<String> { table(run, "comparisons").iter().map(|row| row["policy_a"].clone()).collect() };
    assert_eq!(policies(&mixed), policies(&once));
}
