//! The tables for the terminal and for `summary.md`: one line for each cell, at most 100 columns wide where names of
//! policies allow it: these are never cut, because policies differ in any part of them.
//!
//! Names are long and the width is not, so what a table's cells have in common stands in its heading, and a cell
//! without a time says there why it has none.

use super::naming::{CONTEXT, Dimension, HEADS, KERNEL, Naming, SAMPLES, SEED};
use super::table::{MOST_COLUMNS, Table, lines, shortened, wrapped};
use super::text::{self, NOTHING};
use super::{SPARSE, answers, baseline, edits, knobs, latest, noise, recall, serving, steps, tuning};
use crate::experiment::cell::by_comparison;
use crate::experiment::measure::Measure;
use crate::experiment::record::{Eviction, Record, Status};
use crate::ranks::OfRank;
use crate::serving::published;
use crate::units;
use std::collections::BTreeMap;

/// The rows of a table, and what its columns are.
type Explained = (Vec<Vec<String>>, &'static str);

/// What is held while a decode step is measured.
const HELD: &str = "kv: the cache, which a step reads · peak: with the step's memory and the inputs, which are there throughout: queries \
                    of the whole context, and keys and values as tensors";

/// A column: its heading, and what stands in it.
type Column<'a> = (&'static str, Box<dyn Fn(&Record) -> String + 'a>);

/// Tables of `records` in markdown, one for each measure (and, where cells evict, for each context); a line for each
/// cell, sorted by context, kernel, policy and budget. A cell that is not `ok` has its status in place of its time,
/// and no numbers but the predicted peak (`~`) if it ran out of memory. The last column is how many times faster a
/// cell is than `naive` or, where cells evict, how many times faster it decodes than `full`.
pub fn summary_table(records: &[Record]) -> String {
    let all = latest(records);
    let records = knobs::own(&all);
    let together = |a: &&Record, b: &&Record| {
        let evicting = a.cell.measure == Measure::EVICT;
        a.cell.measure == b.cell.measure && !(evicting && a.cell.context_tokens != b.cell.context_tokens)
    };
    let tables = records.chunk_by(together).map(|records| table(records) + &warnings(records));
    tables.chain(knobs::tables(&all).iter().map(Table::markdown)).collect::<Vec<_>>().join("\n")
}

fn table(records: &[&Record]) -> String {
    let measure = records[0].cell.measure;
    if measure == Measure::SERVE {
        let headings = serving::HEADINGS.map(String::from).to_vec();
        let rows = std::iter::once(headings).chain(records.iter().map(|record| serving::line(record))).collect();
        let common = format!("percent of the pool's slots · printed: tokens and batch of {}", published::SOURCE);
        return format!("### serve\n\n{common}\n\n{}", lines(rows));
    }
    if measure == Measure::RECALL {
        let headings = recall::HEADINGS.map(String::from).to_vec();
        let naming = Naming::over(records, &[SEED, SAMPLES]);
        let line = |record: &&Record| recall::line(record, &naming.apart(record));
        let rows = std::iter::once(headings).chain(records.iter().map(line)).collect();
        let common = "right answers about kept, overwritten (new and old value) and never-written facts, in percent;\n\
                      answered cues about kept and never-written facts";
        return format!("### recall\n\n{common}\n\n{}", lines(rows));
    }
    if measure == Measure::TUNE {
        return of_comparisons(records, tuning::tables);
    }
    if measure == Measure::EDIT {
        return edits::tables(records).iter().map(Table::markdown).collect::<Vec<_>>().join("\n");
    }
    if measure == Measure::TRAIN {
        return of_comparisons(records, steps::tables);
    }
    if measure == Measure::EVAL {
        return answers::tables(records);
    }
    let evicting = measure == Measure::EVICT;
    let choices: &[Dimension] = if evicting { &[CONTEXT, HEADS, KERNEL, SEED] } else { &[HEADS, SEED] };
    let naming = Naming::over(records, choices);
    let columns = if evicting {
        evict_columns(&naming, records)
    } else if measure == Measure::RANKS {
        rank_columns(&naming, records)
    } else {
        kernel_columns(&naming, records, measure)
    };
    let headings = columns.iter().map(|(heading, _)| heading.to_string()).collect();
    let row = |record: &&Record| columns.iter().map(|(_, content)| content(record)).collect();
    let rows: Vec<Vec<String>> = std::iter::once(headings).chain(records.iter().map(row)).collect();
    let context = records.iter().filter_map(|record| record.memory.as_ref()?.context_bytes).max();
    let beside = context.map(|bytes| format!("\nBeside each peak the GPU's context takes {}.\n", units::bytes(bytes)));
    let held = if measure == Measure::DECODE { format!("\n{}\n", wrapped(HELD)) } else { String::new() };
    let (common, beside) = (wrapped(&naming.common), beside.unwrap_or_default());
    format!("### {}\n\n{common}\n\n{}{held}{beside}", measure.name(), lines(rows))
}

/// Two tables for each comparison, each table with what its columns are.
fn of_comparisons(records: &[&Record], tables: fn(&[&Record]) -> [Explained; 2]) -> String {
    let table = |(_, records): (String, Vec<&Record>)| {
        let common = wrapped(&Naming::over(&records, &[CONTEXT, SEED]).common);
        let [held, taken] = tables(&records).map(|(rows, words)| format!("{}\n{}\n", lines(rows), wrapped(words)));
        format!("### {}\n\n{common}\n\n{held}\n{taken}", records[0].cell.measure.name())
    };
    let comparisons = by_comparison(records.iter().copied(), |record| &record.cell);
    comparisons.into_iter().map(table).collect::<Vec<_>>().join("\n")
}

/// A cell's text with a sign where its record carries a warning, which stands below the table.
pub fn marked(record: &Record, text: String) -> String {
    if record.warnings.is_empty() { text } else { format!("{text} !") }
}

/// The warnings of records, each once with the number of its cells, in lines behind a table.
fn warnings(records: &[&Record]) -> String {
    let mut cells: BTreeMap<&str, usize> = BTreeMap::new();
    for warning in records.iter().flat_map(|record| &record.warnings) {
        *cells.entry(warning).or_default() += 1;
    }
    let one = |(warning, count): (&str, usize)| {
        let of = units::counted(count as u64, "cell");
        let mut lines = vec![format!("! {of}:")];
        for word in warning.split_whitespace().map(|word| shortened(word, MOST_COLUMNS - 2)) {
            let last = lines.last_mut().expect("there is a first line");
            match last.chars().count() + 1 + word.chars().count() <= MOST_COLUMNS {
                true => *last += &format!(" {word}"),
                false => lines.push(format!("  {word}")),
            }
        }
        format!("\n{}\n", lines.join("\n"))
    };
    cells.into_iter().map(one).collect()
}

fn kernel_columns<'a>(naming: &'a Naming, records: &'a [&Record], measure: Measure) -> Vec<Column<'a>> {
    let mut columns: Vec<Column> = vec![
        ("context", Box::new(|record| units::tokens(record.cell.context_tokens))),
        ("kernel", Box::new(|record| marked(record, format!("{}{}", record.cell.kernel, naming.apart(record))))),
    ];
    if measure == Measure::DECODE {
        columns.push(measured("kv", |record| text::kv_bytes(record).map(units::bytes)));
    }
    columns.push(("peak", Box::new(text::peak)));
    columns.extend(time_and_drift("median"));
    columns.push(("vs naive", Box::new(|record| speed_up(record, records))));
    columns
}

fn evict_columns<'a>(naming: &'a Naming, records: &'a [&Record]) -> Vec<Column<'a>> {
    let policy = |record: &Record| record.cell.policy.clone().unwrap_or_else(|| NOTHING.into());
    let mut columns: Vec<Column> = vec![
        ("policy", Box::new(move |record| format!("{}{}", policy(record), naming.apart(record)))),
        ("budget", Box::new(|record| marked(record, record.cell.budget.clone().unwrap_or_else(|| NOTHING.into())))),
        measured("kv", |record| Some(units::bytes(record.eviction.as_ref()?.kv_bytes_live))),
    ];
    // Who evicts reads what is retained; a column of its own is for those who read less than they hold.
    let sparse = |eviction: &Eviction| (eviction.kv_bytes_read as f64) < SPARSE * eviction.kv_bytes_live as f64;
    if records.iter().filter_map(|record| record.eviction.as_ref()).any(sparse) {
        columns.push(measured("read", |record| Some(units::bytes(record.eviction.as_ref()?.kv_bytes_read))));
    }
    let unequal: Vec<&str> =
        noise::unequal(records).iter().flat_map(|(_, differ)| differ).map(|record| record.cell_id.as_str()).collect();
    let [(heading, time), half, drift] = time_and_drift("decode");
    let sign = move |record: &Record| if unequal.contains(&record.cell_id.as_str()) { " ≠" } else { "" };
    columns.push((heading, Box::new(move |record| time(record) + sign(record))));
    columns.extend([half, drift]);
    columns.push(measured("recall", |record| Some(text::percent(record.eviction.as_ref()?.needle_recall?))));
    columns.push(("vs full", Box::new(|record| speed_up(record, records))));
    columns
}

/// Peak and bytes sent are those of the rank that takes and sends most; `hidden` is the least of the shares.
fn rank_columns<'a>(naming: &'a Naming, records: &'a [&Record]) -> Vec<Column<'a>> {
    let ranks = |record: &Record| record.cell.ranks.clone().unwrap_or_else(|| NOTHING.into());
    let mut columns: Vec<Column> = vec![
        ("context", Box::new(|record| units::tokens(record.cell.context_tokens))),
        ("ranks", Box::new(move |record| marked(record, format!("{}{}", ranks(record), naming.apart(record))))),
        ("peak", Box::new(text::peak)),
        measured("sent", |record| Some(units::bytes(record.ranks.iter().map(|rank| rank.sent_bytes).max()?))),
        measured("hidden", |record| {
            let shares = record.ranks.iter().filter_map(OfRank::hidden_share);
            shares.min_by(f64::total_cmp).map(text::percent)
        }),
    ];
    columns.extend(time_and_drift("median"));
    columns.push(("vs one", Box::new(|record| speed_up(record, records))));
    columns
}

fn time_and_drift(phase: &'static str) -> [Column<'static>; 3] {
    let time = |record: &Record| text::main_phase(record).map(|phase| units::nanoseconds(phase.median_ns));
    [
        (
            phase,
            Box::new(move |record| match record.status {
                Status::Ok => time(record).unwrap_or(NOTHING.into()),
                other => status(other).into(),
            }),
        ),
        measured("±", |record| Some(text::ends(text::main_phase(record)?))),
        measured("drift", |record| Some(text::drift(record.drift.as_ref()?.rel_l2))),
    ]
}

/// A column that only `ok` cells have.
fn measured(heading: &'static str, content: fn(&Record) -> Option<String>) -> Column<'static> {
    let of_ok = move |record: &Record| (record.status == Status::Ok).then(|| content(record)).flatten();
    (heading, Box::new(move |record| of_ok(record).unwrap_or(NOTHING.into())))
}

fn speed_up(record: &Record, records: &[&Record]) -> String {
    baseline::speed_up(record, records).map_or(NOTHING.into(), text::times)
}

/// A status as it stands in records.
pub fn status(status: Status) -> &'static str {
    match status {
        Status::Ok => "ok",
        Status::Oom => "oom",
        Status::Failed => "failed",
        Status::Skipped => "skipped",
    }
}
