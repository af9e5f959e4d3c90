//! What a reader must not need to guess: what a point is, where a warning holds, which lines hide others, what bytes are of.

use super::*;

/// The caption of a figure in `summary.md`.
fn caption(run: &Run, id: &str) -> String {
    let (_folder, drawn) = drawn(std::slice::from_ref(run));
    let summary = fs::read_to_string(drawn.summary).unwrap();
    let mut lines = summary.lines().skip_while(|line| !line.ends_with(&format!("(plots/{id}.svg)"))).skip(2);
    lines.next().unwrap_or_else(|| panic!("{id} is not in {summary}")).to_string()
}

#[test]
fn the_points_of_a_front_say_their_formats_and_budgets() {
    for (run, id, fields) in [
        (samples::formats(), "kl-vs-bits-and-tokens", &["format", "budget"][..]),
        (samples::hybrid(), "kl-vs-weights-and-cache", &["format", "policy", "budget"]),
    ] {
        let rows = table(&run, id);
        assert!(rows.len() > 3);
        for row in rows {
            let cell = &run.records.iter().find(|record| row["cell_ids"].starts_with(&record.cell_id)).unwrap().cell;
            for field in fields {
                let expected = match *field {
                    "format" => cell.kv_format().to_string(),
                    "policy" => cell.policy.clone().unwrap_or_default(),
                    _ => cell.budget.clone().unwrap_or_default(),
                };
                assert_eq!(row[*field], expected, "{id}: {row:?}");
            }
        }
    }
    assert!(!table(&samples::answers(), "kl-vs-budget")[0].contains_key("format"));
}

#[test]
fn a_warning_of_one_context_names_it() {
    let ids = ["model-memory-vs-context", "first-token-vs-context", "token-vs-context", "needle-heat-map"];
    let tight = |contexts: &[usize]| {
        let mut run = samples::answers();
        for record in &mut run.records {
            let is_tight =
                contexts.contains(&record.cell.context_tokens) && record.cell.budget.as_deref() == Some("0.125");
            record.answers.as_mut().unwrap().unprotected_tokens =
                Some(if is_tight && record.cell.policy.as_deref() == Some("h2o") { 0 } else { 9 });
        }
        run
    };
    let (one, both, none) = (tight(&[512]), tight(&[512, 1024]), tight(&[]));
    for id in ids {
        assert!(caption(&one, id).contains("stays of h2o at 0.125 at a context of 512: the policy's"), "{id}");
        assert!(caption(&both, id).contains("stays of h2o at 0.125: the policy's"), "{id}");
        assert!(!caption(&none, id).contains("Nothing but protected"), "{id}");
    }
}

#[test]
fn lines_that_the_eye_cannot_tell_apart_are_said_to_lie_on_one_another() {
    use crate::eval::Protocol;
    // What two protocols keep of a context differs by a token or so.
    let run = |kept: f64, right: f64| {
        let aware = |mut record: Record| {
            let answers = record.answers.as_mut().unwrap();
            answers.kept_fraction *= kept;
            answers.sample_scores.iter_mut().for_each(|score| *score *= right);
            with_cell(record, |cell| cell.protocol = Some(Protocol::Aware))
        };
        let agnostic = |record: Record| with_cell(record, |cell| cell.protocol = Some(Protocol::Agnostic));
        let mut records = samples::answers().records;
        records.retain(|record| matches!(record.cell.policy.as_deref(), Some("h2o" | "keydiff")));
        let both = |record: Record| [agnostic(record.clone()), aware(record)];
        of(records.into_iter().flat_map(both).collect())
    };
    let words = "Identical to the eye at every point: h2o agnostic and h2o aware; keydiff agnostic and keydiff aware.";
    for (kept, right, expected) in [(1.0, 1.0, true), (1.00005, 1.0, true), (1.05, 1.0, false), (1.00005, 0.98, false)]
    {
        let caption = caption(&run(kept, right), "accuracy-vs-budget");
        assert_eq!(caption.contains(words), expected, "{kept} {right}: {caption}");
        assert_eq!(caption.contains("Identical"), expected, "{kept} {right}: {caption}");
    }
}

#[test]
fn a_decode_step_shows_the_cache_beside_the_peak() {
    let cells = [1, 4, 16].map(|kv_heads| {
        let mut record =
            with_cell(pass(Measure::DECODE, "decode", 8192), |cell| (cell.q_heads, cell.kv_heads) = (16, kv_heads));
        record.memory.as_mut().unwrap().peak_by_label = [(crate::memory::Label::Kv, (kv_heads as u64) << 22)].into();
        record
    });
    let held = ["4.00 MiB", "16.0 MiB", "64.0 MiB"];
    let summary = summary_table(&cells);
    assert!(held.iter().all(|bytes| summary.contains(&format!("| {bytes:>8} |"))), "{summary}");
    assert!(summary.contains("peak: with the step's memory and the inputs"), "{summary}");
    let (_folder, drawn) = drawn(&[of(cells.to_vec())]);
    let page = fs::read_to_string(drawn.html).unwrap();
    assert!(held.iter().all(|bytes| page.contains(&format!("<td class=\"n\">{bytes}</td>"))));
    let forward = summary_table(&[pass(Measure::FORWARD, "tiled", 8192)]);
    assert!(!forward.contains(" kv |") && !forward.contains("with the step's memory"), "{forward}");
}
