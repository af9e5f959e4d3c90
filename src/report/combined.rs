//! Formats of keys and values beside policies: which of the two, or both together, lose least for so many bytes, and whether
//! what they lose adds up.
//!
//! Losses are divergences from the full cache of plain elements, on the same samples, so that formats, policies and both
//! together are on one scale. Bytes are those of whole pages that stay of a context, by token of the context.

use super::palette;
use super::pools::Pool;
use super::table::Table;
use super::text;
use crate::experiment::answers::Estimate;
use crate::experiment::stats::unbounded_difference;
use crate::units;

/// Byte budgets of the table, as parts of the full cache of plain elements.
const PARTS: [u32; 5] = [2, 4, 8, 16, 32];

/// What a pool spends and loses.
pub struct Spent<'a> {
    /// The pool.
    pub pool: &'a Pool<'a>,
    /// KV bytes that stay, for each token of the context.
    pub bytes_per_token: f64,
    /// Divergence from the full cache of plain elements.
    pub kl_nats: Estimate,
}

/// What is saved by.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Nothing.
    Full,
    /// Fewer bits.
    Format,
    /// Fewer tokens.
    Policy,
    /// Both.
    Both,
}

impl Spent<'_> {
    fn kind(&self) -> Kind {
        match (self.pool.records[0].cell.kv_format.is_some(), palette::is_baseline(self.pool.policy)) {
            (false, true) => Kind::Full,
            (true, true) => Kind::Format,
            (false, false) => Kind::Policy,
            (true, false) => Kind::Both,
        }
    }
}

/// Whether policies are compared in the format of this pool: in plain elements where there are such, else in each. The same
/// comparison for every format would hide what it says.
pub fn is_compared(pool: &Pool, pools: &[Pool]) -> bool {
    let is_plain = |pool: &Pool| pool.records[0].cell.kv_format.is_none();
    is_plain(pool) || !pools.iter().any(is_plain)
}

/// What each pool spends and loses; nothing where all keep keys and values in one format. Oracles know the future and are
/// left out.
pub fn spent<'a>(pools: &'a [Pool<'a>]) -> Vec<Spent<'a>> {
    let one = |pool: &'a Pool<'a>| {
        let bytes_per_token = pool.mean(|answers| answers.kv_bytes_live as f64 / answers.context_tokens);
        Some(Spent { pool, bytes_per_token, kl_nats: pool.kl_nats()? })
    };
    let spent: Vec<Spent> = pools.iter().filter(|pool| !palette::is_oracle(pool.policy)).filter_map(one).collect();
    let is_mixed = spent.iter().any(|spent| spent.kind() == Kind::Format)
        && spent.iter().any(|spent| matches!(spent.kind(), Kind::Policy | Kind::Both));
    if is_mixed { spent } else { Vec::new() }
}

/// What loses least within so many bytes; `None` where nothing is that small.
fn least<'s, 'a>(spent: &'s [Spent<'a>], kind: Kind, bytes_per_token: f64) -> Option<&'s Spent<'a>> {
    let fits = |one: &&Spent| one.kind() == kind && one.bytes_per_token <= bytes_per_token;
    spent.iter().filter(fits).min_by(|a, b| a.kl_nats.mean.total_cmp(&b.kl_nats.mean))
}

/// For each budget in bytes what loses least: a format, a policy, both.
pub fn table(pools: &[Pool], protocol: &str) -> Option<Table> {
    let spent = spent(pools);
    let full = spent.iter().find(|one| one.kind() == Kind::Full)?.bytes_per_token;
    let mut rows =
        vec![["of full", "saved by", "policy", "bytes a token", "KL nats", "95%"].map(String::from).to_vec()];
    for part in PARTS {
        // Pages round up by a little.
        let most = full / f64::from(part) * 1.05;
        let kinds = [(Kind::Format, "format"), (Kind::Policy, "policy"), (Kind::Both, "both")];
        let found = kinds.into_iter().filter_map(|(kind, name)| Some((name, least(&spent, kind, most)?)));
        rows.extend(found.map(|(name, Spent { pool, bytes_per_token, kl_nats })| {
            let budget = if pool.budget.is_empty() { String::new() } else { format!("@{}", pool.budget) };
            vec![
                format!("1/{part}"),
                name.into(),
                format!("{}{budget}{}", pool.policy, pool.apart()),
                units::bytes(*bytes_per_token as u64),
                text::drift(kl_nats.mean),
                format!("{}–{}", text::drift(kl_nats.ci95_low), text::drift(kl_nats.ci95_high)),
            ]
        }));
    }
    Some(Table {
        heading: format!("eval: what loses least for so many bytes{protocol}"),
        subtitle: String::new(),
        rows,
        notes: vec![
            "of full: at most so much of the full cache of plain elements · least KL of all cells of that kind, random \
             included, oracles not · the best of many looks better than it is"
                .into(),
        ],
    })
}

/// Whether a format and a policy together lose what both lose alone.
pub fn finding(pools: &[Pool], protocol: &str) -> Option<String> {
    let spent = spent(pools);
    let (mut ratios, mut more, mut less) = (Vec::new(), 0, 0);
    for both in spent.iter().filter(|one| one.kind() == Kind::Both) {
        let cell = |one: &Spent| one.pool.records[0].cell.kv_format;
        let alone = |of: &dyn Fn(&Spent) -> bool| spent.iter().find(|one| of(one)).map(|one| one.pool);
        let format = alone(&|one| one.kind() == Kind::Format && cell(one) == cell(both));
        let policy = alone(&|one| {
            one.kind() == Kind::Policy && one.pool.policy == both.pool.policy && one.pool.budget == both.pool.budget
        });
        let Some((format, policy)) = format.zip(policy) else { continue };
        let [together, format, policy] = [both.pool, format, policy].map(|pool| pool.sample_kl_nats().concat());
        let excess: Vec<f64> =
            together.iter().zip(&format).zip(&policy).map(|((both, format), policy)| both - format - policy).collect();
        let sum = |values: &[f64]| values.iter().sum::<f64>();
        ratios.push(sum(&together) / (sum(&format) + sum(&policy)));
        if let Some(difference) = unbounded_difference(&excess) {
            // Sums of what is the same differ by roundings.
            let rounding = 1e-9 * sum(&together);
            more += usize::from(difference.low > rounding);
            less += usize::from(difference.high < -rounding);
        }
    }
    ratios.sort_by(f64::total_cmp);
    let (least, most) = (ratios.first()?, ratios.last()?);
    Some(format!(
        "eval{protocol}: a format and a policy together have {least:.2} to {most:.2} times the KL that both have alone, \
         added up (median {:.2}, {} pairs); beyond the 95% interval of the paired samples it is more in {more} and less \
         in {less}.",
        ratios[ratios.len() / 2],
        ratios.len(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::record::Record;
    use crate::report::pools::pools;
    use crate::report::samples;

    #[test]
    fn the_least_loss_within_so_many_bytes_is_found_and_losses_are_added_up() {
        let run = samples::formats();
        let records: Vec<&Record> = run.records.iter().collect();
        let (pools, _) = pools(&records);
        let table = table(&pools, "").unwrap();
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
        let sentence = finding(&pools, "").unwrap();
        assert!(sentence.contains("1.00 to 1.50 times"), "{sentence}");
        assert!(sentence.contains("6 pairs") && sentence.contains("it is more in 1 and less in 0"), "{sentence}");
        assert!(is_compared(&pools[0], &pools) && !is_compared(pools.last().unwrap(), &pools));
        // Policies are ranked in one format, and nothing is said of formats where there is one.
        assert!(pools.iter().all(|pool| pool.setting != pools[0].setting || pool.apart() == pools[0].apart()));
        let plain: Vec<&Record> = records.into_iter().filter(|record| record.cell.kv_format.is_none()).collect();
        assert!(super::table(&super::super::pools::pools(&plain).0, "").is_none());
    }
}
