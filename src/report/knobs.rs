//! Policies over settings of the synthetic inputs: which of their ranks hold and which a knob decides.
//!
//! One setting of the knobs gives one order of the policies, and another may turn it round. Where a grid has several, its cells
//! with turned knobs are ranked here, setting by setting, and what is reported is the range of each policy's ranks. All
//! other tables and figures show the experiment's own setting.

use super::naming::{BUDGET, CONTEXT, HEADS, KERNEL, Naming};
use super::noise;
use super::palette;
use super::table::Table;
use crate::experiment::cell::Cell;
use crate::experiment::measure::Measure;
use crate::experiment::record::{Record, Status};
use std::collections::{BTreeMap, BTreeSet};

/// What the experiment's own setting is called.
const OWN: &str = "as they are";

/// The ranks of policies that were measured under the same settings, everything else being equal.
pub struct Ranking {
    /// What all cells have in common.
    pub common: String,
    /// The settings, in the order of [`Ranked::ranks`].
    pub settings: Vec<String>,
    /// The policies; those with the lowest median rank first.
    pub policies: Vec<Ranked>,
    /// Which policies are not ranked, each with the settings under which it has no drift; `None` without any.
    left_out: Option<String>,
}

/// A policy under every setting.
pub struct Ranked {
    /// Its name.
    pub name: String,
    /// 1 and the number of policies with less drift; over several seeds by the mean of log drift.
    pub ranks: Vec<usize>,
    /// The cells behind each rank.
    pub cell_ids: Vec<Vec<String>>,
}

impl Ranked {
    /// Lowest rank, median, highest.
    pub fn range(&self) -> (usize, f64, usize) {
        let mut ranks = self.ranks.clone();
        ranks.sort_unstable();
        let (below, above) = (ranks[(ranks.len() - 1) / 2], ranks[ranks.len() / 2]);
        (ranks[0], (below + above) as f64 / 2.0, ranks[ranks.len() - 1])
    }

    /// The settings under which it has this rank.
    fn settings<'s>(&self, rank: usize, settings: &'s [String]) -> Vec<&'s str> {
        let of = self.ranks.iter().zip(settings).filter(|(own, _)| **own == rank);
        of.map(|(_, setting)| setting.as_str()).collect()
    }
}

/// The records of the experiment's own setting, where the others are told by rankings; else all.
pub fn own<'a>(records: &[&'a Record]) -> Vec<&'a Record> {
    let is_told = |record: &Record| record.cell.knobs.is_some() && record.cell.measure == Measure::EVICT;
    if !records.iter().any(|record| is_told(record)) || rankings(records).is_empty() {
        return records.to_vec();
    }
    let own: Vec<&Record> = records.iter().copied().filter(|record| !is_told(record)).collect();
    if own.iter().any(|record| record.cell.measure == Measure::EVICT) { own } else { records.to_vec() }
}

/// Logarithms of drift over seeds, with the cells.
type Drifts = (Vec<f64>, Vec<String>);

/// Rankings of `records`, one for each question that was asked under several settings. Oracles are not ranked.
pub fn rankings(records: &[&Record]) -> Vec<Ranking> {
    type Policies = BTreeMap<String, BTreeMap<String, Drifts>>;
    let mut questions: BTreeMap<(usize, String), (Vec<&Record>, Policies)> = BTreeMap::new();
    for record in records {
        let Some((policy, drift)) = record.cell.policy.as_ref().zip(record.drift.as_ref()) else { continue };
        let is_real = !palette::is_baseline(policy) && !palette::is_oracle(policy);
        if record.cell.measure != Measure::EVICT || record.status != Status::Ok || !is_real {
            continue;
        }
        let question =
            Cell { policy: None, knobs: None, seed: 0, workload_hash: String::new(), ..record.cell.clone() }.id();
        let retained = record.eviction.as_ref().map_or(0, |eviction| eviction.budget_tokens);
        let (cells, policies) = questions.entry((retained, question)).or_default();
        cells.push(record);
        let setting = record.cell.knobs.as_ref().map_or(OWN.into(), ToString::to_string);
        let (drifts, ids) = policies.entry(policy.clone()).or_default().entry(setting).or_default();
        drifts.push(drift.rel_l2.ln());
        ids.push(record.cell_id.clone());
    }
    questions.into_values().filter_map(|(cells, policies)| ranking(&cells, policies)).collect()
}

fn ranking(cells: &[&Record], mut policies: BTreeMap<String, BTreeMap<String, Drifts>>) -> Option<Ranking> {
    let settings: BTreeSet<String> = policies.values().flat_map(BTreeMap::keys).cloned().collect();
    let lacks = |(name, of): (&String, &BTreeMap<String, Drifts>)| {
        let lacks: Vec<String> = settings.iter().filter(|setting| !of.contains_key(*setting)).cloned().collect();
        (!lacks.is_empty()).then(|| format!("`{name}` ({})", noise::listed(lacks)))
    };
    let left_out: Vec<String> = policies.iter().filter_map(lacks).collect();
    let words = "left out, without a drift under a setting that others have";
    let left_out = (!left_out.is_empty()).then(|| format!("{words}: {}", noise::listed(left_out)));
    policies.retain(|_, of| of.len() == settings.len());
    if settings.len() < 2 || policies.len() < 2 {
        return None;
    }
    let mean = |(drifts, _): &Drifts| drifts.iter().sum::<f64>() / drifts.len() as f64;
    let rank = |policy: &BTreeMap<String, Drifts>, setting: &String| {
        1 + policies.values().filter(|other| mean(&other[setting]) < mean(&policy[setting])).count()
    };
    let ranked = |(name, of): (&String, &BTreeMap<String, Drifts>)| Ranked {
        name: name.clone(),
        ranks: settings.iter().map(|setting| rank(of, setting)).collect(),
        cell_ids: of.values().map(|(_, ids)| ids.clone()).collect(),
    };
    let mut ranked: Vec<Ranked> = policies.iter().map(ranked).collect();
    let total = |policy: &Ranked| policy.ranks.iter().sum::<usize>();
    ranked.sort_by(|a, b| a.range().1.total_cmp(&b.range().1).then(total(a).cmp(&total(b))));
    // Settings are the axis here: what differs is told by their names.
    let cells: Vec<Record> = cells
        .iter()
        .map(|record| Record { cell: Cell { knobs: None, ..record.cell.clone() }, ..(*record).clone() })
        .collect();
    let naming = Naming::over(&cells.iter().collect::<Vec<_>>(), &[CONTEXT, HEADS, KERNEL, BUDGET]);
    Some(Ranking { common: naming.common, settings: settings.into_iter().collect(), policies: ranked, left_out })
}

/// One table for each ranking.
pub fn tables(records: &[&Record]) -> Vec<Table> {
    rankings(records).iter().map(table).collect()
}

fn table(ranking: &Ranking) -> Table {
    let headings = ["policy", "median rank", "best", "worst", "before random", "best under", "worst under"];
    let random = ranking.policies.iter().find(|policy| policy.name == "random");
    let row = |policy: &Ranked| {
        let (best, median, worst) = policy.range();
        let before = |random: &Ranked| {
            let before = policy.ranks.iter().zip(&random.ranks).filter(|(own, random)| own < random).count();
            format!("{before} of {}", ranking.settings.len())
        };
        vec![
            policy.name.clone(),
            median.to_string(),
            best.to_string(),
            worst.to_string(),
            random.filter(|random| random.name != policy.name).map_or(String::new(), before),
            under(&policy.settings(best, &ranking.settings)),
            under(&policy.settings(worst, &ranking.settings)),
        ]
    };
    let headings = headings.map(String::from).to_vec();
    Table {
        heading: format!("Ranks by drift over {} settings of the synthetic inputs", ranking.settings.len()),
        subtitle: ranking.common.clone(),
        rows: std::iter::once(headings).chain(ranking.policies.iter().map(row)).collect(),
        notes: [format!("Settings: {}", ranking.settings.join(" · "))]
            .into_iter()
            .chain(ranking.left_out.clone())
            .collect(),
    }
}

/// A setting, or how many they are.
fn under(settings: &[&str]) -> String {
    match settings {
        [one] => (*one).into(),
        several => format!("{} settings", several.len()),
    }
}

/// What holds over the settings, in a sentence for each ranking.
pub fn findings(records: &[&Record]) -> Vec<String> {
    rankings(records).iter().map(finding).collect()
}

fn finding(ranking: &Ranking) -> String {
    let count = ranking.policies.len();
    let quarter = count.div_ceil(4);
    let range = |policy: &Ranked| format!("`{}` ({} to {})", policy.name, policy.range().0, policy.range().2);
    let held: Vec<String> = ranking.policies.iter().filter(|policy| policy.range().2 <= quarter).map(range).collect();
    let spread = |policy: &&Ranked| policy.range().2 - policy.range().0;
    let widest = ranking.policies.iter().max_by_key(spread).map(range).unwrap_or_default();
    let held = if held.is_empty() { "none".into() } else { held.join(", ") };
    let random = ranking.policies.iter().find(|policy| policy.name == "random");
    let behind = random.map_or(String::new(), |random| {
        let is_behind = |policy: &&Ranked| policy.ranks.iter().zip(&random.ranks).any(|(own, random)| own > random);
        let behind = ranking.policies.iter().filter(is_behind).count();
        let have = if behind == 1 { "has" } else { "have" };
        format!(" {behind} of them {have} more drift than `random` under at least one.")
    });
    let left_out = ranking.left_out.as_ref().map_or(String::new(), |words| format!(" {words}."));
    format!(
        "Ranks of {count} policies by drift over {} settings of the synthetic inputs ({}): always among the first {quarter}: {held}. The widest range is that of {widest}.{behind}{left_out}",
        ranking.settings.len(),
        ranking.common,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::samples;
    use crate::workload::Knobs;

    /// A cell of a policy under a setting, with this drift.
    fn record(policy: &str, hinted: Option<f64>, seed: u64, drift: f64) -> Record {
        let record = samples::with_cell(samples::evicted(4096, policy, 0.25), |cell| {
            cell.knobs =
                hinted.map(|share| -> Knobs { serde_json::from_value(serde_json::json!({"hinted": share})).unwrap() });
            cell.seed = seed;
        });
        let drift = crate::experiment::record::Drift { rel_l2: drift, ..record.drift.clone().unwrap() };
        Record { drift: Some(drift), ..record }
    }

    #[test]
    fn ranks_are_by_the_mean_over_seeds_under_each_setting() {
        // a is best as things are, worst without hints; its seeds straddle b's.
        let drifts = [("a", [0.1, 0.4, 0.9]), ("b", [0.3, 0.3, 0.1]), ("random", [0.5, 0.5, 0.5])];
        let mut records = Vec::new();
        for (policy, [first, second, unhinted]) in drifts {
            records.push(record(policy, None, 0, first));
            records.push(record(policy, None, 1, second));
            records.push(record(policy, Some(0.0), 0, unhinted));
        }
        // One without the second setting is not ranked, and named.
        records.push(record("c", None, 0, 0.01));
        records.push(record("oracle", None, 0, 0.01));
        let records: Vec<&Record> = records.iter().collect();
        let rankings = rankings(&records);
        assert_eq!(rankings.len(), 1);
        assert_eq!(rankings[0].settings, [OWN, "hinted 0.0"]);
        let ranks: Vec<_> =
            rankings[0].policies.iter().map(|policy| (policy.name.as_str(), &policy.ranks[..])).collect();
        assert_eq!(ranks, [("b", &[2, 1][..]), ("a", &[1, 3]), ("random", &[3, 2])]);
        assert_eq!(rankings[0].policies[1].range(), (1, 2.0, 3));
        let table = &tables(&records)[0];
        assert_eq!(table.rows[2], ["a", "2", "1", "3", "1 of 2", OWN, "hinted 0.0"]);
        let said = &findings(&records)[0];
        assert!(said.contains("always among the first 1: none"), "{said}");
        assert!(said.contains("widest range is that of `a` (1 to 3)") && said.contains("1 of them has"), "{said}");
        let left_out = "left out, without a drift under a setting that others have: `c` (hinted 0.0)";
        assert!(said.ends_with(&format!(" {left_out}.")) && table.notes[1] == left_out, "{said} {:?}", table.notes);
        // What is drawn elsewhere is the own setting.
        assert_eq!(own(&records).len(), 8);
        assert_eq!(own(&records[2..3]).len(), 1);
        // Where no ranking tells of them, all settings are shown.
        assert_eq!(own(&records[..3]).len(), 3);
    }

    #[test]
    fn one_setting_is_no_ranking() {
        let records = [record("a", None, 0, 0.1), record("random", None, 0, 0.2)];
        assert!(rankings(&records.iter().collect::<Vec<_>>()).is_empty());
    }
}
