//! What models answered, in tables and in words: a leaderboard of policies by budgets, and a table for each task.

use super::comparison::{self, Ranked};
use super::naming::{CONTEXT, HEADS, KERNEL, Naming, SAMPLES, SEED, TASK};
use super::palette;
use super::summary::{lines, marked, status, wrapped};
use super::text::{self, NOTHING};
use super::{ReportError, SPARSE};
use crate::eval::Protocol;
use crate::experiment::answers::{Answers, Estimate};
use crate::experiment::cell::Cell;
use crate::experiment::measure::Measure;
use crate::experiment::measure::eval::RANDOM;
use crate::experiment::record::{Record, Status};
use crate::experiment::stats::bootstrap;
use crate::units;
use minijinja::{Value, context};
use std::collections::BTreeMap;

/// One policy and budget over all tasks (and seeds) that were asked.
pub struct Pool<'a> {
    /// The policy, and what else sets it apart.
    pub name: String,
    /// The policy alone.
    pub policy: &'a str,
    /// Its budget as it was written; empty for a full cache.
    pub budget: String,
    /// Hash of all else that sets its cells apart, such as the model: policies of another setting answer another question.
    pub setting: String,
    /// One for each task.
    pub records: Vec<&'a Record>,
}

/// What an `ok` evaluation gave.
fn answers(record: &Record) -> Option<&Answers> {
    record.answers.as_ref().filter(|_| record.status == Status::Ok && record.cell.measure == Measure::EVAL)
}

/// Least score of the full cache with which a task ranks policies: what a model cannot do, no eviction can spoil.
const LEAST_FULL: f64 = 0.5;

/// Score of the full cache on a cell's own samples; `None` for a text.
fn full_score(record: &Record) -> Option<f64> {
    let answers = answers(record)?;
    Some(answers.accuracy?.mean - answers.accuracy_difference?.mean)
}

/// Whether a cell's task ranks policies.
fn is_ranked(record: &Record) -> bool {
    full_score(record).is_none_or(|score| score > LEAST_FULL - 1e-9)
}

/// The tasks that rank nothing, in words; empty where all do.
fn unranked(records: &[&Record]) -> String {
    let mut tasks: BTreeMap<(&str, usize, &str), f64> = BTreeMap::new();
    for record in records.iter().filter(|record| !is_ranked(record)) {
        let (task, model) = (record.cell.task.as_deref().unwrap_or(NOTHING), record.cell.model.as_deref());
        tasks.insert((task, record.cell.context_tokens, model.unwrap_or(NOTHING)), full_score(record).unwrap_or(0.0));
    }
    let many = records.iter().any(|record| record.cell.model != records[0].cell.model);
    let one = |((task, context, model), score): (&(&str, usize, &str), &f64)| {
        let of_model = if many { format!(" by {model}") } else { String::new() };
        format!("{task} at {}{of_model} (full cache {:.1})", units::tokens(*context), 100.0 * score)
    };
    let all = tasks.iter().map(one).collect::<Vec<_>>().join(" · ");
    if all.is_empty() { all } else { format!("\n{}\n", wrapped(&format!("not ranked, the model cannot do it: {all}"))) }
}

/// The pools of the tasks that rank policies.
pub fn pools<'a>(records: &[&'a Record]) -> (Vec<Pool<'a>>, String) {
    all_pools(&records.iter().copied().filter(|record| is_ranked(record)).collect::<Vec<_>>())
}

/// The pools of the longest context that has any, and what they have in common. One that lacks a task that others of its
/// setting have is left out: its mean would be of something else.
pub fn all_pools<'a>(records: &[&'a Record]) -> (Vec<Pool<'a>>, String) {
    let mut records: Vec<&Record> = records.iter().copied().filter(|record| answers(record).is_some()).collect();
    // Texts have no score; beside tasks they are left to their own table.
    let scored = |record: &&Record| answers(record).is_some_and(|answers| answers.accuracy.is_some());
    if records.iter().any(scored) {
        records.retain(scored);
    }
    let longest = records.iter().map(|record| record.cell.context_tokens).max();
    records.retain(|record| Some(record.cell.context_tokens) == longest);
    let naming = Naming::over(&records, &[CONTEXT, SAMPLES, HEADS, KERNEL]);
    let mut pools: Vec<Pool> = Vec::new();
    for record in records {
        let policy = record.cell.chosen().unwrap_or("full");
        let (name, budget) =
            (format!("{policy}{}", naming.apart(record)), record.cell.budget.clone().unwrap_or_default());
        match pools.iter_mut().find(|pool| pool.name == name && pool.budget == budget) {
            Some(pool) => pool.records.push(record),
            None => pools.push(Pool { name, policy, budget, setting: setting(record), records: vec![record] }),
        }
    }
    // Samples are compared in pairs: tasks and seeds stand in one order everywhere.
    for pool in &mut pools {
        pool.records.sort_by_key(|record| asked(record));
    }
    let mut fullest: BTreeMap<String, Vec<AskedOf>> = BTreeMap::new();
    for pool in &pools {
        let asked: Vec<AskedOf> = pool.records.iter().map(|record| asked(record)).collect();
        let most = fullest.entry(pool.setting.clone()).or_default();
        if asked.len() > most.len() {
            *most = asked;
        }
    }
    pools.retain(|pool| pool.records.iter().map(|record| asked(record)).eq(fullest[&pool.setting].iter().copied()));
    (pools, naming.common)
}

/// Task, text and seed of a cell: what its samples are drawn from.
type AskedOf<'a> = (Option<&'a str>, Option<&'a str>, u64, &'a str);

fn asked(record: &Record) -> AskedOf<'_> {
    let Cell { task, text, seed, workload_hash, .. } = &record.cell;
    (task.as_deref(), text.as_deref(), *seed, workload_hash)
}

/// Hash of what the cells of a comparison have in common besides their tasks and seeds.
fn setting(record: &Record) -> String {
    let cell = record.cell.without_choice();
    Cell { task: None, text: None, seed: 0, workload_hash: String::new(), ..cell }.id()
}

impl Pool<'_> {
    /// What sets it apart besides its policy; empty or with a leading space.
    pub fn apart(&self) -> &str {
        &self.name[self.policy.len()..]
    }

    /// Scores of every sample, by task.
    pub fn sample_scores(&self) -> Vec<&[f64]> {
        self.records.iter().filter_map(|record| Some(&answers(record)?.sample_scores[..])).collect()
    }

    /// Whether its answers have scores; a text only goes on.
    pub fn is_scored(&self) -> bool {
        self.sample_scores().iter().any(|scores| !scores.is_empty())
    }

    /// What ranks it, of every sample, by task, the higher the better: scores, or of texts minus the divergence.
    pub fn merits(&self) -> Vec<Vec<f64>> {
        match self.is_scored() {
            true => self.sample_scores().into_iter().map(<[f64]>::to_vec).collect(),
            false => {
                let answers = self.records.iter().filter_map(|record| answers(record));
                answers.map(|answers| answers.sample_kl_nats.iter().map(|kl| -kl).collect()).collect()
            }
        }
    }

    /// Mean score over tasks, with an interval over samples.
    pub fn score(&self) -> Option<Estimate> {
        Estimate::of_shares(&self.sample_scores())
    }

    /// Whether nothing but tokens that the policy protects stays of some context, so that its scores have no say.
    pub fn only_protected(&self) -> bool {
        self.records.iter().filter_map(|record| answers(record)).any(|answers| answers.unprotected_tokens == Some(0))
    }

    /// Mean divergence over tasks, likewise.
    pub fn kl_nats(&self) -> Option<Estimate> {
        self.over(|answers| &answers.sample_kl_nats)
    }

    /// Mean of a number over tasks.
    pub fn mean(&self, read: impl Fn(&Answers) -> f64) -> f64 {
        self.records.iter().filter_map(|record| answers(record)).map(read).sum::<f64>() / self.records.len() as f64
    }

    /// The cells behind it.
    pub fn cell_ids(&self) -> Vec<String> {
        self.records.iter().map(|record| record.cell_id.clone()).collect()
    }

    fn over(&self, read: impl Fn(&Answers) -> &Vec<f64>) -> Option<Estimate> {
        let lists: Vec<&Vec<f64>> = self.records.iter().filter_map(|record| Some(read(answers(record)?))).collect();
        let count = lists.iter().map(|values| values.len()).min().filter(|count| *count > 0)?;
        let of_picked = |values: &Vec<f64>, picked: &[usize]| {
            picked.iter().map(|&index| values[index]).sum::<f64>() / picked.len() as f64
        };
        let mean_over =
            |picked: &[usize]| lists.iter().map(|values| of_picked(values, picked)).sum::<f64>() / lists.len() as f64;
        let (ci95_low, ci95_high) = bootstrap(count, mean_over);
        Some(Estimate { mean: mean_over(&(0..count).collect::<Vec<_>>()), ci95_low, ci95_high })
    }
}

/// The tables of `summary.md` and of the terminal.
pub fn tables(records: &[&Record]) -> String {
    let mut text: Vec<String> = by_protocol(records).iter().map(|records| leaderboard(records)).collect();
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
    let words: Vec<String> = shown.iter().map(|column| format!("{}: {}", column.heading, column.words)).collect();
    format!("{text}\n{}\n", wrapped(&words.join(" · ")))
}

/// Cells with answers by their protocol: those of one are not compared with those of another.
fn by_protocol<'a>(records: &[&'a Record]) -> Vec<Vec<&'a Record>> {
    let of = |protocol: Protocol| {
        let these = |record: &&&Record| record.cell.protocol() == protocol && answers(record).is_some();
        records.iter().filter(these).copied().collect::<Vec<_>>()
    };
    Protocol::ALL.map(of).into_iter().filter(|records| !records.is_empty()).collect()
}

/// Every pair of policies of each protocol and budget as CSV; `None` where nothing is compared.
///
/// # Errors
/// [`ReportError::Csv`] when a line cannot be written.
pub fn comparisons(records: &[&Record]) -> Result<Option<String>, ReportError> {
    let of_protocols = by_protocol(records);
    let of_protocols = of_protocols.iter().map(|records| (records[0].cell.protocol(), pools(records).0));
    comparison::csv(&of_protocols.collect::<Vec<_>>())
}

/// What a heading says of the protocol of its cells.
fn protocol(record: &Record) -> String {
    record.cell.protocol.map_or(String::new(), |protocol| format!(", {protocol}"))
}

/// What a mark behind a score says.
pub const ONLY_PROTECTED: &str = "! nothing but protected tokens stays: the policy's scores have no say";

/// Policies by budgets: mean score over tasks in percent, or perplexity for texts; best first.
fn leaderboard(records: &[&Record]) -> String {
    let (pools, common) = pools(records);
    let scored = pools.iter().any(|pool| pool.score().is_some());
    let value = |pool: &Pool| match scored {
        true => pool.score().map(|score| 100.0 * score.mean),
        false => Some(pool.mean(|answers| answers.nll_nats.mean).exp()),
    };
    // Written budgets in the order in which records are sorted: the least first.
    let mut budgets: Vec<&str> = Vec::new();
    for pool in pools.iter().rev() {
        if !pool.budget.is_empty() && !budgets.contains(&pool.budget.as_str()) {
            budgets.push(&pool.budget);
        }
    }
    let mut rows: Vec<(f64, Vec<String>)> = Vec::new();
    let mut names: Vec<&str> = Vec::new();
    for pool in &pools {
        if !names.contains(&pool.name.as_str()) {
            names.push(&pool.name);
        }
    }
    for name in names {
        let of_name: BTreeMap<&str, f64> = pools
            .iter()
            .filter(|pool| pool.name == name)
            .filter_map(|pool| Some((pool.budget.as_str(), value(pool)?)))
            .collect();
        let marks: BTreeMap<&str, &str> = pools
            .iter()
            .filter(|pool| pool.name == name && pool.only_protected())
            .map(|pool| (pool.budget.as_str(), " !"))
            .collect();
        let mean = of_name.values().sum::<f64>() / of_name.len().max(1) as f64;
        let number = |value: Option<&f64>| value.map_or(NOTHING.into(), |value| format!("{value:.1}"));
        let mut row = vec![name.to_string(), number(of_name.get(""))];
        row.extend(budgets.iter().map(|budget| number(of_name.get(budget)) + marks.get(budget).unwrap_or(&"")));
        // The full cache leads: it is what the others are compared with.
        let order = if palette::is_baseline(name) { f64::NEG_INFINITY } else { mean };
        rows.push((if scored && order.is_finite() { -order } else { order }, row));
    }
    rows.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let headings: Vec<String> = ["policy".to_string(), "no budget".into()]
        .into_iter()
        .chain(budgets.iter().map(|text| text.to_string()))
        .collect();
    let what = if scored { "score in percent, mean over tasks" } else { "perplexity" };
    let table = lines(std::iter::once(headings).chain(rows.into_iter().map(|(_, row)| row)).collect());
    let heading = format!("### eval: leaderboard{}", protocol(records[0]));
    let note = if pools.iter().any(Pool::only_protected) { format!("\n{ONLY_PROTECTED}\n") } else { String::new() };
    let table = if pools.is_empty() {
        String::new()
    } else {
        format!("\n{}\n\n{table}", wrapped(&format!("{what} · {common}")))
    };
    format!("{heading}\n{table}{note}{}{}", unranked(records), comparison::tables(&pools, &protocol(records[0])))
}

/// What a column shows of a cell.
#[derive(Clone, Copy)]
struct Column {
    heading: &'static str,
    /// What stands there.
    words: &'static str,
    read: fn(&Numbers) -> &String,
}

const ALL: [Column; 10] = [
    Column { heading: "score", words: "percent, of the model's own words", read: |numbers| &numbers.score },
    Column { heading: "perplexity", words: "of the text behind the eviction", read: |numbers| &numbers.perplexity },
    Column { heading: "95%", words: "the score's interval over samples", read: |numbers| &numbers.interval },
    Column { heading: "vs full", words: "score minus the full cache's", read: |numbers| &numbers.difference },
    Column { heading: "KL nats", words: "from the full cache, for each token", read: |numbers| &numbers.kl },
    Column { heading: "top-1", words: "percent of tokens likeliest with both caches", read: |numbers| &numbers.top1 },
    Column { heading: "kv", words: "bytes live behind the eviction", read: |numbers| &numbers.kv },
    Column { heading: READ, words: "bytes of them that a step reads", read: |numbers| &numbers.kv_read },
    Column { heading: "first", words: "time to the first token", read: |numbers| &numbers.first },
    Column { heading: "per token", words: "time of each one behind it", read: |numbers| &numbers.step },
];
/// Of a policy that selects what steps read.
const READ: &str = "read";
const OF_SCORES: [&str; 3] = ["score", "95%", "vs full"];
const OF_TEXTS: [&str; 2] = ["perplexity", "top-1"];

/// The columns of a task's table. A text has no score, so that there is room for how its tokens fare.
fn columns(records: &[&Record]) -> Vec<Column> {
    let scored = records.iter().filter_map(|record| answers(record)).any(|answers| answers.accuracy.is_some());
    let without: &[&str] = if scored { &OF_TEXTS } else { &OF_SCORES };
    let sparse = |answers: &Answers| {
        answers.kv_bytes_read > 0 && (answers.kv_bytes_read as f64) < SPARSE * answers.kv_bytes_live as f64
    };
    let selects = records.iter().filter_map(|record| answers(record)).any(sparse);
    let shown = |column: &Column| !without.contains(&column.heading) && (column.heading != READ || selects);
    ALL.into_iter().filter(shown).collect()
}

/// The cells of one task.
fn of_task(records: &[&Record]) -> String {
    let naming = Naming::over(records, &[KERNEL, TASK, CONTEXT, SAMPLES, SEED]);
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

/// Lines of the page's table.
pub fn rows(records: &[&Record]) -> Vec<Value> {
    let naming = Naming::over(records, &[KERNEL, SAMPLES]);
    let row = |record: &&Record| {
        let numbers = answers(record).map_or_else(Numbers::default, |found| Numbers::of(record, found));
        context! {
            cell_id => &record.cell_id,
            status => status(record.status),
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

/// For each budget: the policies that may be the best, beside random eviction and the full cache.
pub fn findings(records: &[&Record]) -> Vec<String> {
    by_protocol(records).iter().flat_map(|records| best(records)).collect()
}

fn best(records: &[&Record]) -> Vec<String> {
    let (pools, _) = pools(records);
    let sentence = |budget: Vec<Ranked>| {
        budget.first().filter(|ranked| ranked.pool.is_scored())?;
        let best = budget.iter().filter(|ranked| ranked.among_best >= 0.05).collect::<Vec<_>>();
        let first = best.first()?;
        let name = |ranked: &&Ranked| format!("`{}` ({})", ranked.pool.name, text::percent(ranked.value.mean));
        let is_full = |pool: &&Pool| palette::is_baseline(pool.policy) && pool.setting == first.pool.setting;
        let full = pools.iter().find(is_full).and_then(Pool::score)?;
        let random = budget.iter().find(|ranked| ranked.pool.policy == RANDOM);
        // Where nobody answers anything there is no best.
        (first.value.mean > 0.0).then(|| {
            format!(
                "eval{}, budget {}: among the best in at least 5% of resamples: {}; {}full cache {}.",
                protocol(records[0]),
                first.pool.budget,
                best.iter().map(name).collect::<Vec<_>>().join(", "),
                random.map_or(String::new(), |random| format!("random {}, ", text::percent(random.value.mean))),
                text::percent(full.mean),
            )
        })
    };
    comparison::ranked(&pools).into_iter().filter_map(sentence).collect()
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
