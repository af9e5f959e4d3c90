//! What models answered, cell by cell: a table for each task, and the numbers of the page's table.

use super::SPARSE;
use super::leaderboard::{self, protocol};
use super::naming::{CONTEXT, HEADS, KERNEL, Naming, SAMPLES, SEED, TASK, TEXT};
use super::pools::answers;
use super::summary::{marked, status};
use super::table::{Table, lines, wrapped};
use super::text::{self, NOTHING};
use crate::experiment::answers::{Answers, Estimate};
use crate::experiment::record::{Record, Status};
use crate::units;
use minijinja::{Value, context};
use std::collections::{BTreeMap, BTreeSet};

/// The tables of `summary.md` and of the terminal.
pub fn tables(records: &[&Record]) -> String {
    let mut text: Vec<String> = leaderboard::tables(records).iter().map(Table::markdown).collect();
    if text.is_empty() {
        text.push("### eval\n\nno cell has an answer\n".into());
    }
    let mut text = text.join("\n");
    let mut of_tasks: Vec<&Record> = records.to_vec();
    let task = |record: &Record| (record.cell.task.clone(), record.cell.context_tokens, record.cell.protocol());
    of_tasks.sort_by_key(|record| task(record));
    let mut shown: Vec<Column> = Vec::new();
    for records in of_tasks.chunk_by(|a, b| task(a) == task(b)) {
        text += &format!("\n{}", of_task(records));
        shown.extend(columns(records));
    }
    shown.sort_by_key(|column| ALL.iter().position(|other| other.heading == column.heading));
    shown.dedup_by_key(|column| column.heading);
    let words = shown.iter().map(|column| format!("{}: {}", column.heading, column.words));
    let words: Vec<String> = words.chain(runs(records).map(|runs| format!("times: {runs}"))).collect();
    format!("{text}\n{}\n", wrapped(&words.join(" · ")))
}

/// What a column shows of a cell.
#[derive(Clone, Copy)]
struct Column {
    heading: &'static str,
    /// What stands there.
    words: &'static str,
    read: fn(&Numbers) -> &String,
}

const ALL: [Column; 11] = [
    Column { heading: "score", words: "percent, of the model's own words", read: |numbers| &numbers.score },
    Column { heading: "perplexity", words: "of the text behind the eviction", read: |numbers| &numbers.perplexity },
    Column { heading: "95%", words: "the score's interval over samples", read: |numbers| &numbers.interval },
    Column { heading: "vs full", words: "score minus the full cache's", read: |numbers| &numbers.difference },
    Column { heading: "KL nats", words: "from the full cache, for each token", read: |numbers| &numbers.kl },
    Column { heading: "99%", words: "of tokens have a smaller KL", read: |numbers| &numbers.kl_p99 },
    Column { heading: "top-1", words: "percent of tokens likeliest with both caches", read: |numbers| &numbers.top1 },
    Column { heading: "kv", words: "bytes live behind the eviction", read: |numbers| &numbers.kv },
    Column { heading: READ, words: "bytes that the last step of an answer reads", read: |numbers| &numbers.kv_read },
    Column { heading: OF_TIMES[0], words: "time to the first token", read: |numbers| &numbers.first },
    Column { heading: OF_TIMES[1], words: "time of each one behind it", read: |numbers| &numbers.step },
];
/// Of a policy that selects what steps read.
const READ: &str = "read";
const OF_SCORES: [&str; 3] = ["score", "95%", "vs full"];
const OF_TEXTS: [&str; 3] = ["perplexity", "99%", "top-1"];
/// Of cells of which some sample ran alone.
const OF_TIMES: [&str; 2] = ["first", "per token"];

/// What a reader must know of times of one run, which have no interval; `None` where every cell has more.
pub fn runs(records: &[&Record]) -> Option<&'static str> {
    let counts = records.iter().filter_map(|record| Some(record.latency.get("first_token")?.samples_ns.len()));
    let (single, several): (Vec<usize>, Vec<usize>) = counts.partition(|runs| *runs == 1);
    match (single.is_empty(), several.is_empty()) {
        (true, _) => None,
        (_, true) => Some("of one run each, which tells nothing of how far they are off"),
        _ => Some("of some cells one run, which tells nothing of how far they are off"),
    }
}

/// The columns of a task's table. A text has no score, so that there is room for how its tokens fare.
fn columns(records: &[&Record]) -> Vec<Column> {
    let of_texts = records.iter().all(|record| record.cell.text.is_some());
    let without: &[&str] = if of_texts { &OF_SCORES } else { &OF_TEXTS };
    let sparse = |(record, answers): (&&Record, &Answers)| {
        let may_select = record.cell.memory.is_some() || answers.kept_fraction >= 1.0;
        may_select
            && answers.kv_bytes_read > 0
            && (answers.kv_bytes_read as f64) < SPARSE * answers.kv_bytes_live as f64
    };
    let selects = records.iter().filter_map(|record| Some((record, answers(record)?))).any(sparse);
    let is_timed = records.iter().any(|record| record.latency.contains_key("first_token"));
    let shown = |column: &Column| {
        !without.contains(&column.heading)
            && (column.heading != READ || selects)
            && (!OF_TIMES.contains(&column.heading) || is_timed)
    };
    ALL.into_iter().filter(shown).collect()
}

/// The cells of one task.
fn of_task(records: &[&Record]) -> String {
    let texts: BTreeSet<_> = records.iter().filter_map(|record| record.cell.text.as_ref()).collect();
    let told: &[_] = match texts.len() {
        0 | 1 => &[KERNEL, TASK, CONTEXT, SAMPLES, SEED],
        _ => &[KERNEL, TASK, CONTEXT, SAMPLES, SEED, TEXT],
    };
    let naming = Naming::over(records, told);
    let shown = columns(records);
    let headings: Vec<String> =
        ["policy", "budget"].into_iter().chain(shown.iter().map(|column| column.heading)).map(String::from).collect();
    let row = |record: &&Record| {
        let policy = record.cell.chosen().unwrap_or(NOTHING);
        let mut row = vec![
            format!("{policy}{}", naming.apart(record)),
            marked(record, record.cell.budget.clone().unwrap_or_else(|| NOTHING.into())),
        ];
        match answers(record) {
            Some(found) => {
                let numbers = Numbers::of(record, found);
                row.extend(shown.iter().map(|column| (column.read)(&numbers).clone()));
            }
            None => {
                row.push(status(record.status).into());
                row.resize(headings.len(), NOTHING.into());
            }
        }
        row
    };
    let rows = std::iter::once(headings.clone()).chain(records.iter().map(row)).collect();
    let task = records[0].cell.task.as_deref().unwrap_or(NOTHING);
    let context = units::tokens(records[0].cell.context_tokens);
    let mut text = format!("### eval: {task}, {context} context{}\n\n{}", protocol(records[0]), lines(rows));
    let mut reasons: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for record in records.iter().filter(|record| record.status != Status::Ok) {
        *reasons.entry((status(record.status), record.reason.as_deref().unwrap_or(NOTHING))).or_default() += 1;
    }
    for ((status, reason), count) in reasons {
        text += &format!("\n{}\n", wrapped(&format!("{count} {status} · {reason}")));
    }
    text
}

/// Numbers of a cell as tables show them.
#[derive(Default)]
struct Numbers {
    score: String,
    interval: String,
    difference: String,
    kl: String,
    kl_p99: String,
    top1: String,
    perplexity: String,
    agreement: String,
    kv: String,
    kv_read: String,
    first: String,
    step: String,
}

impl Numbers {
    fn of(record: &Record, answers: &Answers) -> Self {
        let or_nothing = |text: Option<String>| text.unwrap_or(NOTHING.into());
        let percent = |value: f64| format!("{:.1}", 100.0 * value);
        let time = |phase: &str| or_nothing(record.latency.get(phase).map(|phase| units::nanoseconds(phase.median_ns)));
        let interval = |score: Estimate| format!("{:.0}–{:.0}", 100.0 * score.ci95_low, 100.0 * score.ci95_high);
        Numbers {
            score: or_nothing(answers.accuracy.map(|score| percent(score.mean))),
            interval: or_nothing(answers.accuracy.map(interval)),
            difference: or_nothing(answers.accuracy_difference.map(|value| format!("{:+.1}", 100.0 * value.mean))),
            kl: text::drift(answers.kl_nats.mean),
            kl_p99: or_nothing(answers.kl_of_tokens.map(|spread| text::drift(spread.p99))),
            top1: percent(answers.top1_agreement.mean),
            perplexity: units::three_digits(answers.nll_nats.mean.exp()),
            agreement: answers.greedy_agreement.map_or(NOTHING.into(), |agreement| percent(agreement.mean)),
            kv: units::bytes(answers.kv_bytes_live),
            kv_read: units::bytes(answers.kv_bytes_read),
            first: time("first_token"),
            step: time("decode"),
        }
    }
}

/// What all cells of the page's table have in common.
pub fn common(records: &[&Record]) -> String {
    Naming::over(records, &[KERNEL, SAMPLES]).common
}

/// Lines of the page's table.
pub fn rows(records: &[&Record]) -> Vec<Value> {
    let naming = Naming::over(records, &[KERNEL, SAMPLES]);
    let row = |record: &&Record| {
        let numbers = answers(record).map_or_else(Numbers::default, |found| Numbers::of(record, found));
        context! {
            cell_id => &record.cell_id,
            status => status(record.status),
            only_protected => text::is_only_protected(record),
            task => record.cell.task.as_deref().unwrap_or(NOTHING),
            context => units::tokens(record.cell.context_tokens),
            policy => record.cell.chosen().unwrap_or(NOTHING),
            apart => naming.apart(record),
            budget => record.cell.budget.as_deref().unwrap_or(NOTHING),
            seed => record.cell.seed,
            peak => text::peak(record),
            score => numbers.score,
            interval => numbers.interval,
            difference => numbers.difference,
            kl => numbers.kl,
            top1 => numbers.top1,
            perplexity => numbers.perplexity,
            agreement => numbers.agreement,
            kv => numbers.kv,
            first => numbers.first,
            step => numbers.step,
        }
    };
    records.iter().map(row).collect()
}

/// Records of each policy at the middle one of its budgets, of all lengths and tasks together; and what they have in
/// common.
pub fn by_length<'a>(records: &[&'a Record]) -> (Vec<(String, Vec<&'a Record>)>, String) {
    let naming = Naming::over(records, &[SAMPLES, HEADS, KERNEL]);
    let mut maps: BTreeMap<String, Vec<&Record>> = BTreeMap::new();
    for &record in records {
        let policy = record.cell.chosen().unwrap_or("full");
        maps.entry(format!("{policy}{}", naming.apart(record))).or_default().push(record);
    }
    let middle = |(name, mut records): (String, Vec<&'a Record>)| {
        let kept = |record: &Record| answers(record).map_or(0.0, |answers| answers.kept_fraction);
        records.sort_by(|a, b| kept(a).total_cmp(&kept(b)));
        let mut budgets: Vec<Option<String>> = Vec::new();
        for record in &records {
            if !budgets.contains(&record.cell.budget) {
                budgets.push(record.cell.budget.clone());
            }
        }
        let budget = budgets[budgets.len() / 2].clone();
        records.retain(|record| record.cell.budget == budget);
        (format!("{name}{}", budget.map_or(String::new(), |budget| format!("@{budget}"))), records)
    };
    (maps.into_iter().map(middle).collect(), naming.common)
}
