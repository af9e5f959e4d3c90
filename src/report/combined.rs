//! Fewer bits of the weights, fewer bits of keys and values, fewer tokens: which of these, or which together, lose least for
//! so many bytes. Whether what they lose adds up says [`super::additivity`].
//!
//! Losses are divergences from the model as its files have it, with the full cache of plain elements, on the same samples,
//! so that all are on one scale. Bytes are those of the arena: weights as they are kept, and the whole pages that stay of a
//! context.

use super::origin::{is_another_model, origin, weights, weights_bytes};
use super::palette;
use super::pools::Pool;
use super::table::Table;
use super::text;
use crate::experiment::answers::Estimate;
use crate::experiment::weights::OtherWeights;
use crate::units;

/// Byte budgets of the table of the cache, as parts of the full cache of plain elements.
const CACHE_PARTS: [f64; 5] = [2.0, 4.0, 8.0, 16.0, 32.0];
/// Those of weights and cache together, as parts of the most that any cell takes.
const WHOLE_PARTS: [f64; 5] = [1.5, 2.0, 3.0, 4.0, 6.0];
/// Pages round up by a little.
const ROUNDING: f64 = 1.05;

/// What a pool spends and loses.
pub struct Spent<'a> {
    /// The pool.
    pub pool: &'a Pool<'a>,
    /// KV bytes that stay, for each token of the context.
    pub bytes_per_token: f64,
    /// Bytes of the weights, and KV bytes that stay of a context.
    pub whole_bytes: f64,
    /// Divergence from the full cache of plain elements.
    pub kl_nats: Estimate,
    /// What it saves by.
    pub saved: Saved,
}

/// What is saved by.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Saved {
    /// Fewer bits of the weights than those that losses are from have.
    pub weights: bool,
    /// Fewer bits of keys and values.
    pub format: bool,
    /// Fewer tokens.
    pub policy: bool,
}

impl Spent<'_> {
    /// Its weights; `None` are those of the model's files.
    pub fn weights(&self) -> Option<&OtherWeights> {
        weights(self.pool)
    }

    /// Whether its cache keeps plain elements.
    pub fn is_plain(&self) -> bool {
        !self.saved.format
    }
}

fn is_plain(pool: &Pool) -> bool {
    pool.records[0].cell.kv_format.is_none()
}

/// Whether activations are as they are, or there are no such to compare with: rounding them saves no bytes.
fn is_unrounded(pool: &Pool, pools: &[Pool]) -> bool {
    let unrounded = |pool: &Pool| pool.records[0].cell.activations.is_none();
    unrounded(pool) || !pools.iter().any(|other| other.is_beside(pool) && unrounded(other))
}

/// Whether policies are compared in the formats of this pool: in the weights that losses are from or another model's, with
/// activations as they are and in plain elements where there are such. The same comparison for every format would hide what it says.
pub fn is_compared(pool: &Pool, pools: &[Pool]) -> bool {
    let is_whole = weights(pool) == origin(pool, pools) || is_another_model(pool, pools);
    let has_plain = || pools.iter().any(|other| other.is_beside(pool) && is_plain(other));
    is_whole && is_unrounded(pool, pools) && (is_plain(pool) || !has_plain())
}

/// What each pool spends and loses. Oracles know the future and are left out, and so are other models, which save nothing.
fn spent<'a>(pools: &'a [Pool<'a>]) -> Vec<Spent<'a>> {
    let one = |pool: &'a Pool<'a>| {
        let saved = Saved {
            weights: weights(pool) != origin(pool, pools),
            format: !is_plain(pool),
            policy: !palette::is_baseline(pool.policy),
        };
        let bytes_per_token = pool.mean(|answers| answers.kv_bytes_live as f64 / answers.context_tokens);
        let whole_bytes = weights_bytes(pool) as f64 + pool.mean(|answers| answers.kv_bytes_live as f64);
        Some(Spent { pool, bytes_per_token, whole_bytes, kl_nats: pool.kl_nats()?, saved })
    };
    let compared =
        |pool: &&Pool| !palette::is_oracle(pool.policy) && is_unrounded(pool, pools) && !is_another_model(pool, pools);
    pools.iter().filter(compared).filter_map(one).collect()
}

/// What is spent on the cache, with the weights that losses are from, by question; nothing where all keep keys and values in one format.
pub fn of_cache<'a>(pools: &'a [Pool<'a>]) -> Vec<Vec<Spent<'a>>> {
    let mut spent = spent(pools);
    spent.retain(|one| !one.saved.weights);
    let is_mixed = |of: &Vec<Spent>| {
        of.iter().any(|one| one.saved.format && !one.saved.policy) && of.iter().any(|one| one.saved.policy)
    };
    by_question(spent).into_iter().filter(is_mixed).collect()
}

/// What is spent on weights and cache, by question; nothing where all weights are alike.
pub fn of_whole<'a>(pools: &'a [Pool<'a>]) -> Vec<Vec<Spent<'a>>> {
    let differ = |of: &Vec<Spent>| of.iter().any(|one| one.saved.weights);
    by_question(spent(pools)).into_iter().filter(differ).collect()
}

/// Those of each question, such as of each model: what one loses says nothing of another.
fn by_question(all: Vec<Spent<'_>>) -> Vec<Vec<Spent<'_>>> {
    let mut questions: Vec<Vec<Spent>> = Vec::new();
    for one in all {
        match questions.iter_mut().find(|known| known[0].pool.is_beside(one.pool)) {
            Some(question) => question.push(one),
            None => questions.push(vec![one]),
        }
    }
    questions
}

/// Those of which no other loses less with as few bytes, by bytes: the Pareto front. A logarithm has no place for what loses
/// nothing.
pub fn front<'a>(mut spent: Vec<Spent<'a>>, bytes: fn(&Spent) -> f64) -> Vec<Spent<'a>> {
    spent.retain(|one| one.kl_nats.mean > 0.0);
    spent.sort_by(|a, b| bytes(a).total_cmp(&bytes(b)).then(a.kl_nats.mean.total_cmp(&b.kl_nats.mean)));
    let mut least = f64::INFINITY;
    spent.retain(|one| {
        let is_better = one.kl_nats.mean < least;
        least = least.min(one.kl_nats.mean);
        is_better
    });
    spent
}

/// For each budget in bytes what loses least: of the cache a format, a policy, both; of all bytes the weights, the cache, both.
pub fn tables(pools: &[Pool], protocol: &str) -> Vec<Table> {
    let (of_caches, of_wholes) = (of_cache(pools), of_whole(pools));
    let of_cache = |one: &Spent| match one.saved {
        Saved { format: true, policy: true, .. } => "both",
        Saved { format: true, .. } => "format",
        Saved { policy: true, .. } => "policy",
        _ => "",
    };
    let of_whole = |one: &Spent| match one.saved {
        Saved { weights: true, format: false, policy: false } => "weights",
        Saved { weights: true, .. } => "both",
        Saved { format: false, policy: false, .. } => "",
        _ => "cache",
    };
    let caches = of_caches.into_iter().map(|spent| Least {
        heading: format!("eval: what loses least for so many bytes of the cache{protocol}{}", named(&spent)),
        bytes: ("bytes a token", |one| one.bytes_per_token),
        kind: &of_cache,
        kinds: ["format", "policy", "both"],
        parts: CACHE_PARTS,
        full: "the full cache of plain elements",
        spent,
    });
    let wholes = of_wholes.into_iter().map(|spent| Least {
        heading: format!("eval: what loses least for so many bytes of weights and cache{protocol}{}", named(&spent)),
        bytes: ("bytes", |one| one.whole_bytes),
        kind: &of_whole,
        kinds: ["weights", "cache", "both"],
        parts: WHOLE_PARTS,
        full: "the weights that losses are from and the full cache of plain elements",
        spent,
    });
    caches.chain(wholes).filter_map(|least| least.table()).collect()
}

/// A pool's policy, budget and formats, without what the heading says of the question.
pub fn choice(pool: &Pool) -> String {
    let budget = if pool.budget.is_empty() { String::new() } else { format!("@{}", pool.budget) };
    format!("{}{budget}{}", pool.policy, pool.apart().strip_prefix(&pool.question[..]).unwrap_or(pool.apart()))
}

/// What sets a question apart, where there are several.
pub fn named(spent: &[Spent]) -> String {
    let words = spent[0].pool.question.trim_start();
    if words.is_empty() { String::new() } else { format!(", {words}") }
}

/// A table of what loses least.
struct Least<'s, 'a> {
    heading: String,
    /// What bytes are meant, and what a pool spends of them.
    bytes: (&'static str, fn(&Spent) -> f64),
    /// What a pool saves by; empty where it saves nothing.
    kind: &'s dyn Fn(&Spent<'a>) -> &'static str,
    kinds: [&'static str; 3],
    parts: [f64; 5],
    /// What nothing is saved of.
    full: &'static str,
    spent: Vec<Spent<'a>>,
}

impl Least<'_, '_> {
    fn table(&self) -> Option<Table> {
        let (name, bytes) = self.bytes;
        let full = self.spent.iter().filter(|one| (self.kind)(one).is_empty()).map(bytes).reduce(f64::max)?;
        let mut rows = vec![["of full", "saved by", "policy", name, "KL nats", "95%"].map(String::from).to_vec()];
        for part in self.parts {
            let fits = |one: &&Spent| bytes(one) <= full / part * ROUNDING;
            for kind in self.kinds {
                let fitting = self.spent.iter().filter(|one| (self.kind)(one) == kind).filter(fits);
                let Some(best) = fitting.min_by(|a, b| a.kl_nats.mean.total_cmp(&b.kl_nats.mean)) else { continue };
                let Spent { pool, kl_nats, .. } = best;
                rows.push(vec![
                    format!("1/{part}"),
                    kind.into(),
                    choice(pool),
                    units::bytes(bytes(best) as u64),
                    text::drift(kl_nats.mean),
                    format!("{}–{}", text::drift(kl_nats.ci95_low), text::drift(kl_nats.ci95_high)),
                ]);
            }
        }
        Some(Table {
            heading: self.heading.clone(),
            subtitle: String::new(),
            rows,
            notes: vec![format!(
                "of full: at most so much of {} · least KL of all cells of that kind, random included, oracles not · the \
                 best of many looks better than it is",
                self.full
            )],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::record::Record;
    use crate::report::additivity;
    use crate::report::pools::pools;
    use crate::report::samples;

    #[test]
    fn the_least_loss_within_so_many_bytes_is_found() {
        let run = samples::formats();
        let records: Vec<&Record> = run.records.iter().collect();
        let (pools, _) = pools(&records);
        let [table] = &tables(&pools, "")[..] else { panic!("one table") };
        let found = |part: &str, kind: &str| {
            let row = table.rows.iter().find(|row| row[0] == part && row[1] == kind);
            row.map(|row| (row[2].clone(), row[4].clone()))
        };
        let row = |policy: &str, kl: &str| Some((policy.to_string(), kl.to_string()));
        assert_eq!(found("1/2", "format"), row("full cache in int8", "1.0e-3"));
        assert_eq!(found("1/2", "policy"), row("snapkv@0.5", "0.199"));
        assert_eq!(found("1/8", "both"), row("snapkv@0.5 cache in int8", "0.200"));
        // A quarter of the tokens in plain elements is the least that a policy alone goes to.
        assert_eq!((found("1/8", "policy"), found("1/4", "format").is_some()), (None, true));
        assert_eq!(found("1/8", "format"), None);
        assert!(is_compared(&pools[0], &pools) && !is_compared(pools.last().unwrap(), &pools));
        // Policies are ranked in one format, and nothing is said of formats where there is one.
        assert!(pools.iter().all(|pool| pool.setting != pools[0].setting || pool.apart() == pools[0].apart()));
        let plain: Vec<&Record> = records.into_iter().filter(|record| record.cell.kv_format.is_none()).collect();
        assert!(tables(&super::super::pools::pools(&plain).0, "").is_empty());
    }

    #[test]
    fn only_the_widest_weights_rank_policies() {
        let run = samples::hybrid();
        let records: Vec<&Record> = run.records.iter().collect();
        let (pools, _) = pools(&records);
        let [cache, whole] = &tables(&pools, "")[..] else { panic!("two tables") };
        assert!(cache.rows.iter().all(|row| !row[2].contains("weights in q")), "{:?}", cache.rows);
        let found = |part: &str, kind: &str| {
            let row = whole.rows.iter().find(|row| row[0] == part && row[1] == kind);
            row.map(|row| row[2].clone()).unwrap_or_default()
        };
        assert_eq!(found("1/1.5", "weights"), "full weights in q8_0");
        assert_eq!(found("1/3", "weights"), "full weights in q4_0");
        assert_eq!(found("1/3", "both"), "full weights in q4_0 cache in int8");
        let compared = pools.iter().filter(|pool| is_compared(pool, &pools));
        assert!(compared.clone().count() > 0 && compared.clone().all(|pool| !pool.apart().contains("q8_0")));
    }

    /// What one model loses says nothing of another: both have the tables and the sentences that they have alone.
    #[test]
    fn models_are_not_mixed() {
        let of_model = |name: &str, times: f64| -> Vec<Record> {
            let of = |record: Record| {
                let mut record = samples::with_cell(record, |cell| cell.model = Some(format!("models/{name}")));
                let answers = record.answers.as_mut().unwrap();
                answers.sample_kl_nats.iter_mut().for_each(|kl| *kl *= times);
                record
            };
            samples::hybrid().records.into_iter().map(of).collect()
        };
        let runs = [("llama", of_model("llama", 1.0)), ("qwen", of_model("qwen", 7.0))];
        let both: Vec<&Record> = runs.iter().flat_map(|(_, records)| records).collect();
        let (both, _) = pools(&both);
        for (name, records) in &runs {
            let (alone, _) = pools(&records.iter().collect::<Vec<_>>());
            let bare = |text: &str| text.replace(&format!(", {name}"), "").replace(&format!(" {name}"), "");
            let of_tables = |pools: &[Pool]| -> Vec<(String, Vec<String>)> {
                let found = tables(pools, "").into_iter().map(|table| (table.heading, table.rows));
                found.map(|(heading, rows)| (heading, rows.iter().map(|row| bare(&row.join("|"))).collect())).collect()
            };
            let (all, expected) = (of_tables(&both), of_tables(&alone));
            let own: Vec<_> = all.iter().filter(|(heading, _)| heading.ends_with(&format!(", {name}"))).collect();
            assert_eq!((all.len(), own.len()), (4, expected.len()), "{all:?}");
            assert!(own.iter().zip(&expected).all(|(own, alone)| own.1 == alone.1), "{own:?} {expected:?}");
            let said: Vec<String> = additivity::findings(&both, "")
                .iter()
                .filter(|said| said.contains(name))
                .map(|said| bare(said))
                .collect();
            assert_eq!(said, additivity::findings(&alone, ""));
        }
    }

    /// A model with adapters merged into it takes more bytes than the file that divergences are from: it saves nothing, and is ranked.
    #[test]
    fn another_model_saves_nothing_and_is_ranked_beside_the_files_own() {
        let run = samples::hybrid();
        let in_weights = |from: &str, weights: Option<&str>| -> Vec<Record> {
            let plain = |record: &&Record| record.cell.weights == from.parse().ok() && record.cell.kv_format.is_none();
            let own = |cell: &mut crate::experiment::cell::Cell| {
                cell.weights = weights.map(|text| text.parse().expect("weights"));
                cell.weights_hash = weights.map(String::from);
            };
            run.records.iter().filter(plain).map(|record| samples::with_cell(record.clone(), own)).collect()
        };
        let records = [in_weights("q4_0", None), in_weights("bf16", Some("models/adapted"))].concat();
        let records: Vec<&Record> = records.iter().collect();
        let (pools, _) = pools(&records);
        assert!(tables(&pools, "").is_empty() && additivity::findings(&pools, "").is_empty());
        let ranked = crate::report::comparison::ranked(&pools);
        for ranked in &ranked {
            let (own, other): (Vec<_>, Vec<_>) = ranked.iter().partition(|one| one.pool.apart().is_empty());
            assert!(!own.is_empty() && own.len() == other.len(), "{:?}", pools[0].setting);
            assert!(ranked.iter().all(|one| is_compared(one.pool, &pools)));
            let floor = crate::report::comparison::floor(ranked).map(|at| ranked[at].pool.name.as_str());
            assert!(floor.is_none_or(|name| name == "random"), "{floor:?}");
        }
    }
}
