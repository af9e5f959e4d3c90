//! The planner's answers as text of at most 100 columns.

use crate::planner::levers::{Loss, Ranked};
use crate::planner::remedy::Remedy;
use crate::planner::roofline::Times;
use crate::planner::scenario::{Attention, Bytes, Logits};
use crate::planner::search::MOST;
use crate::planner::{Phase, Scenario, Waterfall};
use crate::units::{bytes, counted, gb, gib, grouped, nanoseconds};
use std::fmt::Write;
use std::path::Path;

/// Columns of a terminal.
const WIDTH: usize = 100;

/// Lines of at most [`WIDTH`] columns, broken between words, each beginning with `indent`.
pub fn wrapped(text: &str, indent: &str) -> String {
    let mut lines = String::new();
    let mut line = String::new();
    for word in text.split_whitespace() {
        if !line.is_empty() && indent.chars().count() + line.chars().count() + 1 + word.chars().count() > WIDTH {
            let _ = writeln!(lines, "{indent}{line}");
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    let _ = writeln!(lines, "{indent}{line}");
    lines
}

/// A table whose first column is left-aligned and whose others are right-aligned, but for the last ones in `left`.
pub fn table(rows: &[Vec<String>], left: usize) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().enumerate().map(|(column, cell)| {
            let pad = " ".repeat(widths[column] - cell.chars().count());
            if column == 0 || column + left >= columns { format!("{cell}{pad}") } else { format!("{pad}{cell}") }
        });
        let _ = writeln!(text, "{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
    text
}

/// The waterfall: a line for each term, its sums, how each is known, and the verdict.
pub fn waterfall(scenario: &Scenario<'_>, waterfall: &Waterfall) -> String {
    let of = |bytes: u64| if bytes == 0 { "-".into() } else { gib(u128::from(bytes)) };
    let heading = ["GiB", "load", "prefill", "decode", "known by"].map(String::from).to_vec();
    let mut rows = vec![heading];
    for term in &waterfall.terms {
        let known = format!("{:?}", term.known).to_lowercase();
        let cells = Phase::ALL.map(|phase| of(term.bytes(phase)));
        rows.push([vec![term.term.into()], cells.to_vec(), vec![known]].concat());
    }
    let sum = |name: &str, unit: fn(u128) -> String| {
        let sums = waterfall.total_bytes.map(|bytes| unit(u128::from(bytes)));
        [vec![name.to_string()], sums.to_vec()].concat()
    };
    rows.extend([sum("total", gib), sum("total, GB", gb)]);
    let there = u128::from(waterfall.available_bytes);
    let available = |name: &str, value: String| vec![name.to_string(), value.clone(), value.clone(), value];
    rows.extend([available("available", gib(there)), available("available, GB", gb(there))]);
    let mut text = wrapped(&scenario.words(), "");
    let _ = write!(text, "\n{}\n", table(&rows, 1));
    for term in &waterfall.terms {
        let line = format!("{} = {}: {}", term.term, term.formula, term.numbers);
        text.push_str(&wrapped(&line, "  "));
    }
    let _ = write!(text, "\n{}", wrapped(&waterfall.verdict, ""));
    text
}

/// The roofline's times, where the card is known.
pub fn times(times: Option<Times>) -> String {
    let Some(times) = times else { return String::new() };
    wrapped(
        &format!(
            "By the roofline the first token takes {}, each further one {} ({} read).",
            nanoseconds(times.prefill_s * 1e9),
            nanoseconds(times.decode_s * 1e9),
            bytes(times.decode_bytes as u64)
        ),
        "",
    )
}

/// What kvsieve itself takes.
pub fn own(peak: u64, scenario: &Scenario<'_>, threads: usize) -> String {
    let kernel = if scenario.attention == Attention::Tiled { "tiled" } else { "naive" };
    let weights = scenario.weights.map_or(String::new(), |format| format!(" --weights {}", format.name));
    let asked = format!("--kernel {kernel} --chunk {} --kv-format {}{weights}", scenario.run_chunk(), scenario.kv);
    // `generate` has one prompt, and logits of its last token.
    let asked = match scenario.batch == 1 && scenario.logits == Logits::Last {
        true => format!(" and `{asked}`"),
        false => String::new(),
    };
    let peak = format!("{} B ({})", grouped(u128::from(peak)), bytes(peak));
    wrapped(
        &format!(
            "Run by kvsieve on this CPU with {threads} threads{asked}, its arena's peak is {peak}: exact, the sizes that it \
             allocates."
        ),
        "",
    )
}

/// Levers that are shown, but for those that [`shown`] adds.
const SHOWN: usize = 12;

/// The levers of a table: of each kind the best, and the best that is enough or else the nearest to it; and as many others as there
/// is room for.
fn shown(levers: &[Ranked], there: u64) -> Vec<&Ranked> {
    let is_needed = |at: usize| {
        let alike = || levers.iter().enumerate().filter(|(_, other)| other.kind == levers[at].kind);
        let enough = alike().find(|(_, other)| other.peak_bytes <= there);
        let nearest = enough.or_else(|| alike().min_by_key(|(_, other)| other.peak_bytes));
        [alike().next(), nearest].into_iter().flatten().any(|(best, _)| best == at)
    };
    let mut room = SHOWN.saturating_sub((0..levers.len()).filter(|&at| is_needed(at)).count());
    let is_shown = |&at: &usize| {
        is_needed(at) || {
            let fills = room > 0;
            room -= usize::from(fills);
            fills
        }
    };
    (0..levers.len()).filter(is_shown).map(|at| &levers[at]).collect()
}

/// The levers, those that gain most for their price first.
pub fn levers(scenario: &Scenario<'_>, levers: &[Ranked]) -> String {
    if levers.is_empty() {
        return String::new();
    }
    let there = scenario.memory.bytes();
    let shown = shown(levers, there);
    let mut rows = vec![["change first", "longest context", "peak here", "time", "KL"].map(String::from).to_vec()];
    for lever in &shown {
        let context = lever.max_context_tokens.map_or("none".into(), |tokens| match tokens {
            MOST.. => "any".into(),
            tokens => grouped(u128::from(tokens)),
        });
        let time = lever.time_factor.map_or("-".into(), |factor| format!("x{factor:.2}"));
        let fits = if lever.peak_bytes <= there { "" } else { "!" };
        let peak = format!("{} GiB{fits:1}", gib(u128::from(lever.peak_bytes)));
        rows.push(vec![lever.lever.clone(), context, peak, time, loss(&lever.loss)]);
    }
    let note = if shown.iter().any(|lever| lever.peak_bytes > there) { "! still too much\n" } else { "" };
    let more = match levers.len() - shown.len() {
        0 => String::new(),
        more => format!("{more} more: --json -\n"),
    };
    format!("\n{}{note}{more}", table(&rows, 1))
}

fn loss(loss: &Loss) -> String {
    match loss {
        Loss::None => "none".into(),
        Loss::Measured { kl_nats, .. } => format!("{kl_nats:.4}"),
        Loss::NotMeasured => "not measured".into(),
    }
}

/// The cheapest sets of levers for a context of each of `held` sequences: with all of them, and with fewer.
pub fn remedies(held: u64, remedies: &[Remedy]) -> String {
    let Some(first) = remedies.first() else { return String::new() };
    let tokens = counted(first.target_context_tokens, "token");
    let what =
        if held > 1 { format!("{tokens} of {held} sequences held at once fit") } else { format!("{tokens} fit") };
    let mut said = if first.sequences < held { format!("\n{what} with no set of changes.\n") } else { String::new() };
    for one in remedies {
        let fit = if one.sequences < held { "With fewer held at once they fit" } else { &what };
        let _ = write!(said, "\n{}", wrapped(&format!("{fit} {}", remedy(one)), ""));
    }
    said
}

fn remedy(remedy: &Remedy) -> String {
    if remedy.levers.is_empty() {
        return "as it is.".into();
    }
    let with = remedy.levers.iter().zip(&remedy.losses).map(|(lever, of)| match of {
        Loss::None => lever.clone(),
        of => format!("{lever} (KL {})", loss(of)),
    });
    let time = remedy.time_factor.map_or(String::new(), |factor| format!(" A sequence takes x{factor:.2}."));
    let peak = gib(u128::from(remedy.peak_bytes));
    format!("with {}: peak {peak} GiB.{time}", with.collect::<Vec<_>>().join(", "))
}

/// The most that fits, and where that is none what `least`, the smallest that was looked at, needs.
pub fn most(scenario: &Scenario<'_>, what: &str, most: u64, least: Option<Bytes>) -> String {
    let answer = match most {
        0 => least.map_or("none".into(), |least| {
            let (term, bytes) = least.terms().into_iter().max_by_key(|(_, bytes)| *bytes).unwrap_or_default();
            let there = gib(u128::from(scenario.memory.bytes()));
            let need = gib(least.total());
            format!("none: the least needs {need} GiB, {} GiB of it {term}; {there} GiB are there", gib(bytes))
        }),
        MOST.. => format!("any number of {what}s"),
        most => match scenario.made_for(most).filter(|_| what == "token") {
            Some(made_for) => format!("{}; the model was made for {made_for}", counted(most, what)),
            None => counted(most, what),
        },
    };
    format!("{}{answer}\n", wrapped(&scenario.words(), ""))
}

/// Where the page with the figures lies.
pub fn page(folder: &Path) -> String {
    format!("\n{}\n", folder.join("report.html").display())
}
