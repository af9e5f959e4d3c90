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
