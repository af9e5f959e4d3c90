//! Evaluated cells put together: one policy and budget over all tasks and seeds, which is what policies are ranked by.
//!
//! A pool's cells answered the same samples as those of the others, in one order, so that policies can be compared in
//! pairs. Tasks that the model cannot do with its full cache rank nobody.

use super::naming::{CONTEXT, HEADS, KERNEL, Naming, SAMPLES};
use super::origin::is_another_model;
use super::{noise, text};
use crate::experiment::answers::{Answers, Estimate};
use crate::experiment::cell::Cell;
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use crate::stats::bootstrap_strata;
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
    /// What sets its cells apart from others besides policy, budget and formats, such as the model; empty or with a leading space.
    /// What one loses beside another is a matter of one question.
    pub question: String,
    /// One for each task.
    pub records: Vec<&'a Record>,
}

/// Whether a cell only went on with a text, which has no score.
pub fn is_text(record: &Record) -> bool {
    answers(record).is_some_and(|answers| answers.accuracy.is_none())
}

/// What an `ok` evaluation gave.
pub fn answers(record: &Record) -> Option<&Answers> {
    record.answers.as_ref().filter(|_| record.status == Status::Ok && record.cell.measure == Measure::EVAL)
}

/// Least score of the full cache with which a task ranks policies: what a model cannot do, no eviction can spoil.
const LEAST_FULL: f64 = 0.5;

/// Score of the full cache on a cell's own samples; `None` for a text.
pub fn full_score(record: &Record) -> Option<f64> {
    let answers = answers(record)?;
    Some(answers.accuracy?.mean - answers.accuracy_difference?.mean)
}

/// Whether a cell's task ranks policies.
pub fn is_ranked(record: &Record) -> bool {
    full_score(record).is_none_or(|score| score > LEAST_FULL - 1e-9)
}

/// The pools of the tasks that rank policies.
pub fn pools<'a>(records: &[&'a Record]) -> (Vec<Pool<'a>>, String) {
    all_pools(&records.iter().copied().filter(|record| is_ranked(record)).collect::<Vec<_>>())
}

/// The pools of the longest context that has any, and what they have in common. One that lacks a task that others of its
/// setting have is left out ([`left_out`]): its mean would be of something else.
pub fn all_pools<'a>(records: &[&'a Record]) -> (Vec<Pool<'a>>, String) {
    let (mut pools, common) = grouped(records);
    let fullest = fullest(&pools);
    pools.retain(|pool| pool.records.iter().map(|record| asked(record)).eq(fullest[&pool.setting].iter().copied()));
    (pools, common)
}

/// The pools that are left out for what they lack, each with the tasks and seeds that gave no answer; `None` without any.
pub fn left_out(records: &[&Record]) -> Option<String> {
    let (pools, _) = grouped(&records.iter().copied().filter(|record| is_ranked(record)).collect::<Vec<_>>());
    let fullest = fullest(&pools);
    let words = |pool: &Pool| {
        let has = |of: &AskedOf| pool.records.iter().any(|record| asked(record) == *of);
        let lacks: Vec<String> = fullest[&pool.setting].iter().filter(|of| !has(of)).map(what).collect();
        let budget = if pool.budget.is_empty() { String::new() } else { format!(" at {}", pool.budget) };
        (!lacks.is_empty()).then(|| format!("`{}`{budget} ({})", pool.name, noise::listed(lacks)))
    };
    let all: Vec<String> = pools.iter().filter_map(words).collect();
    (!all.is_empty()).then(|| format!("left out, without an answer that others have: {}", noise::listed(all)))
}

/// A task or text with its seed.
fn what((task, text, seed, _): &AskedOf) -> String {
    format!("{}, seed {seed}", task.or(*text).unwrap_or(text::NOTHING))
}

/// All pools of the longest context that has any, their records in one order, and what they have in common.
fn grouped<'a>(records: &[&'a Record]) -> (Vec<Pool<'a>>, String) {
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
            Some(pool) => match pool.records.iter_mut().find(|known| asked(known) == asked(record)) {
                // The same cell with another count of runs alone: what it answered is the same.
                Some(known) if known.memory.is_none() => *known = record,
                Some(_) => {}
                None => pool.records.push(record),
            },
            None => pools.push(Pool {
                name,
                policy,
                budget,
                setting: setting(&record.cell),
                question: naming.apart(&without_choice(record)),
                records: vec![record],
            }),
        }
    }
    // Another model's answers are compared with those of the model that its divergences are from.
    let is_other: Vec<bool> = pools.iter().map(|pool| is_another_model(pool, &pools)).collect();
    for (pool, _) in pools.iter_mut().zip(is_other).filter(|(_, is_other)| *is_other) {
        let cell = pool.records[0].cell.clone();
        pool.setting = setting(&Cell { weights: None, weights_hash: None, ..cell });
    }
    // Samples are compared in pairs: tasks and seeds stand in one order everywhere.
    for pool in &mut pools {
        pool.records.sort_by_key(|record| asked(record));
    }
    (pools, naming.common)
}

/// What the pool that answered most of each setting was asked, in order.
fn fullest<'a>(pools: &[Pool<'a>]) -> BTreeMap<String, Vec<AskedOf<'a>>> {
    let mut fullest: BTreeMap<String, Vec<AskedOf>> = BTreeMap::new();
    for pool in pools {
        let most = fullest.entry(pool.setting.clone()).or_default();
        if pool.records.len() > most.len() {
            *most = pool.records.iter().map(|record| asked(record)).collect();
        }
    }
    fullest
}

/// Task, text and seed of a cell: what its samples are drawn from.
type AskedOf<'a> = (Option<&'a str>, Option<&'a str>, u64, &'a str);

fn asked(record: &Record) -> AskedOf<'_> {
    let Cell { task, text, seed, workload_hash, .. } = &record.cell;
    (task.as_deref(), text.as_deref(), *seed, workload_hash)
}

/// A record of what a cell's answers are about, whatever was chosen.
fn without_choice(record: &Record) -> Record {
    let Record { threads, isa_path, .. } = record;
    Record { threads: *threads, isa_path: isa_path.clone(), ..Record::blank(record.cell.without_choice()) }
}

/// Hash of what the cells of a comparison have in common besides their tasks and seeds. Policies are ranked in one format of each.
fn setting(cell: &Cell) -> String {
    let Cell { kv_format, weights, weights_hash, activations, .. } = cell.clone();
    let cell = Cell { kv_format, weights, weights_hash, activations, ..cell.without_choice() };
    Cell { task: None, text: None, seed: 0, workload_hash: String::new(), alone_samples: None, ..cell }.id()
}

impl Pool<'_> {
    /// Whether both answer one question, in the same formats or others.
    pub fn is_beside(&self, other: &Pool<'_>) -> bool {
        self.question == other.question
    }

    /// What sets it apart besides its policy; empty or with a leading space.
    pub fn apart(&self) -> &str {
        &self.name[self.policy.len()..]
    }

    /// Whether it is a memory in place of the cache.
    pub fn is_memory(&self) -> bool {
        self.records[0].cell.memory.is_some()
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
            false => self.less_is_better(|answers| &answers.sample_kl_nats),
        }
    }

    /// The log-probability of a token of every sample's right answer, by task; empty of records from before it was written
    /// down.
    pub fn log_probabilities(&self) -> Vec<Vec<f64>> {
        self.less_is_better(|answers| &answers.sample_nll_nats)
    }

    fn less_is_better(&self, read: impl Fn(&Answers) -> &Vec<f64>) -> Vec<Vec<f64>> {
        let mut lists = self.independent(read);
        lists.iter_mut().flatten().for_each(|value| *value = -*value);
        lists
    }

    /// A number of every sample that is one of its own, by task or text: pieces of a text are the same ones under every seed, so
    /// that each counts once, with its mean over the seeds.
    fn independent(&self, read: impl Fn(&Answers) -> &Vec<f64>) -> Vec<Vec<f64>> {
        let mut lists: Vec<(Option<&str>, usize, Vec<f64>)> = Vec::new();
        for record in &self.records {
            let Some(values) = answers(record).map(&read) else { continue };
            let text = record.cell.text.as_deref();
            match lists
                .iter_mut()
                .find(|(known, _, sums)| text.is_some() && *known == text && sums.len() == values.len())
            {
                Some((_, seeds, sums)) => {
                    *seeds += 1;
                    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
                }
                None => lists.push((text, 1, values.clone())),
            }
        }
        let mean = |(_, seeds, sums): (_, usize, Vec<f64>)| sums.into_iter().map(|sum| sum / seeds as f64).collect();
        lists.into_iter().map(mean).collect()
    }

    /// Mean score over tasks, with an interval over samples.
    pub fn score(&self) -> Option<Estimate> {
        Estimate::of_shares(&self.sample_scores())
    }

    /// Whether nothing but tokens that the policy protects stays of some context, so that its scores have no say.
    pub fn only_protected(&self) -> bool {
        self.records.iter().any(|record| text::is_only_protected(record))
    }

    /// Samples of all tasks together, by which policies are compared.
    pub fn all_samples(&self) -> usize {
        self.merits().iter().map(Vec::len).sum()
    }

    /// Samples of the task that has the fewest; of texts, which are one comparison, the pieces of all.
    pub fn samples(&self) -> usize {
        let of_tasks = self.records.iter().filter_map(|record| answers(record)).map(|answers| answers.samples);
        if self.is_scored() { of_tasks.min().unwrap_or(0) } else { self.all_samples() }
    }

    /// How many lists of samples each have to be long enough: one of each task and seed, or one of all texts.
    pub fn asked_apart(&self) -> usize {
        if self.is_scored() { self.records.len() } else { 1 }
    }

    /// Divergence of every sample, by task or text.
    pub fn sample_kl_nats(&self) -> Vec<Vec<f64>> {
        self.independent(|answers| &answers.sample_kl_nats)
    }

    /// Mean divergence over the samples of all tasks or texts.
    pub fn kl_nats(&self) -> Option<Estimate> {
        self.over(|answers| &answers.sample_kl_nats)
    }

    /// Minus the log-probability of a token, over the samples of all texts; over texts where records are from before samples had
    /// theirs.
    pub fn nll_nats(&self) -> f64 {
        let over_samples = self.over(|answers| &answers.sample_nll_nats);
        over_samples.map_or_else(|| self.mean(|answers| answers.nll_nats.mean), |nats| nats.mean)
    }

    /// Mean of a number over tasks.
    pub fn mean(&self, read: impl Fn(&Answers) -> f64) -> f64 {
        self.records.iter().filter_map(|record| answers(record)).map(read).sum::<f64>() / self.records.len() as f64
    }

    /// The cells behind it.
    pub fn cell_ids(&self) -> Vec<String> {
        self.records.iter().map(|record| record.cell_id.clone()).collect()
    }

    /// Mean over the samples of all lists, and its interval: of two texts each piece counts alike.
    fn over(&self, read: impl Fn(&Answers) -> &Vec<f64>) -> Option<Estimate> {
        let lists = self.independent(read);
        let counts: Vec<usize> = lists.iter().map(|values| values.len()).collect();
        let all = counts.iter().sum::<usize>();
        (all > 0 && !counts.contains(&0)).then_some(())?;
        let mean_over = |picked: &[Vec<usize>]| {
            let of_list = |(values, picked): (&Vec<f64>, &Vec<usize>)| picked.iter().map(|&at| values[at]).sum::<f64>();
            lists.iter().zip(picked).map(of_list).sum::<f64>() / all as f64
        };
        let (ci95_low, ci95_high) = bootstrap_strata(&counts, mean_over);
        let whole: Vec<Vec<usize>> = counts.iter().map(|&count| (0..count).collect()).collect();
        Some(Estimate { mean: mean_over(&whole), ci95_low, ci95_high })
    }
}
