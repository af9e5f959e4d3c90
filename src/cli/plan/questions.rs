//! Questions beside the waterfall: the most that fits, two models, one term, all cards, claims, audits, allocators.

use super::scenario::{ScenarioArgs, subject};
use super::{Reported, text};
use crate::cli::failure::Failure;
use crate::cli::output;
use crate::device::Cpu;
use crate::experiment::store::{CELLS, MAX_CONTEXTS};
use crate::memory::os;
use crate::planner::allocator::{Event, replay};
use crate::planner::audit::audit as held;
use crate::planner::cards::{Card, RANK, cards};
use crate::planner::claims::{CLAIMS, Verdict};
use crate::planner::measure::{check, measure as measured};
use crate::planner::presets::near;
use crate::planner::published::Published;
use crate::planner::roofline::REACHED;
use crate::planner::scenario::Memory;
use crate::planner::search::MOST;
use crate::planner::waterfall::Waterfall;
use crate::planner::{PlanError, Scenario};
use crate::report;
use crate::units::{bytes, gb, gib, grouped};
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// A question about one scenario.
#[derive(clap::Args)]
pub struct Asked {
    #[command(flatten)]
    scenario: ScenarioArgs,
    #[command(flatten)]
    report: Reported,
}

/// The largest context or batch.
#[derive(Serialize, Default)]
struct Most<'a> {
    model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    batch: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    context_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_context_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_batch: Option<u64>,
}

pub fn most(asked: &Asked, of_context: bool) -> Result<(), Failure> {
    asked.report.check(asked.scenario.read().as_slice())?;
    match of_context {
        true => asked.scenario.check_for_max_context()?,
        false => asked.scenario.check_for_max_batch()?,
    }
    let subject = asked.scenario.subject()?;
    let mut scenario = asked.scenario.scenario(&subject)?;
    let mut answer = Most { model: &subject.name, ..Most::default() };
    let (most, what) = if of_context {
        let most = scenario.max_context()?.unwrap_or(0);
        (answer.batch, answer.max_context_tokens) = (Some(scenario.batch), Some(most));
        // The least that could be asked for, where that is too much already.
        scenario.context = if most < MOST { most.max(1) } else { scenario.context };
        (most, "token")
    } else {
        let most = scenario.max_batch()?.unwrap_or(0);
        (answer.context_tokens, answer.max_batch) = (Some(scenario.context), Some(most));
        scenario.batch = if most < MOST { most.max(1) } else { scenario.batch };
        (most, "sequence")
    };
    let peak = scenario.peak(scenario.context);
    asked.report.give(&answer, || text::most(&scenario, what, most, peak.ok().map(|(_, bytes)| bytes)))
}

/// Two models in the same place.
#[derive(clap::Args)]
pub struct Compare {
    /// Two models, as --model takes them
    #[arg(num_args = 2, required = true, value_names = ["A", "B"])]
    models: Vec<PathBuf>,
    #[command(flatten)]
    scenario: ScenarioArgs,
    #[command(flatten)]
    report: Reported,
}

/// A model of a comparison.
#[derive(Serialize)]
struct Compared {
    model: String,
    parameters: u64,
    weight_bytes: u64,
    kv_bytes_per_token: u64,
    peak_bytes: u64,
    fits: bool,
    max_context_tokens: u64,
    max_batch: u64,
    decode_s: Option<f64>,
}

pub fn compare(args: &Compare) -> Result<(), Failure> {
    if args.scenario.model.is_some() {
        return Err(Failure::usage("compare takes its two models without --model".into()));
    }
    args.models.iter().try_for_each(|model| args.report.check(&[("a model", model)]))?;
    let memory = args.scenario.memory()?;
    let of = |model: &PathBuf| {
        let subject = subject(model)?;
        let scenario = args.scenario.scenario_in(&subject, memory)?;
        let (_, peak) = scenario.peak(scenario.context)?;
        Ok(Compared {
            parameters: subject.parameters,
            weight_bytes: scenario.weight_bytes() as u64,
            kv_bytes_per_token: scenario.kv_token_bytes(),
            peak_bytes: peak.total() as u64,
            fits: scenario.fits(scenario.context)?,
            max_context_tokens: scenario.max_context()?.unwrap_or(0),
            max_batch: scenario.max_batch()?.unwrap_or(0),
            decode_s: scenario.times(REACHED)?.map(|times| times.decode_s),
            model: subject.name,
        })
    };
    let compared = args.models.iter().map(of).collect::<Result<Vec<_>, Failure>>()?;
    args.report.give(&compared, || {
        let n = |count: u64| grouped(u128::from(count));
        let row = |name: &str, of: &dyn Fn(&Compared) -> String| {
            [vec![name.to_string()], compared.iter().map(of).collect()].concat()
        };
        let rows = [
            row("", &|one| one.model.clone()),
            row("parameters", &|one| n(one.parameters)),
            row("weights, GiB", &|one| gib(one.weight_bytes.into())),
            row("KV of a token, B", &|one| n(one.kv_bytes_per_token)),
            row("peak, GiB", &|one| gib(one.peak_bytes.into())),
            row("fits", &|one| if one.fits { "yes".into() } else { "no".into() }),
            row("longest context", &|one| n(one.max_context_tokens)),
            row("largest batch", &|one| n(one.max_batch)),
            row("decode step, ms", &|one| one.decode_s.map_or("-".into(), |s| format!("{:.1}", s * 1e3))),
        ];
        text::table(&rows, 0)
    })
}

/// A term of the waterfall.
#[derive(clap::Args)]
pub struct Explain {
    /// weights, cold start, kv, scores, activations, logits, workspace, metadata, slack or context
    term: String,
    #[command(flatten)]
    scenario: ScenarioArgs,
    #[command(flatten)]
    report: Reported,
}

pub fn explain(args: &Explain) -> Result<(), Failure> {
    args.report.check(args.scenario.read().as_slice())?;
    let subject = args.scenario.subject()?;
    // A formula needs no card; where one is named, it is part of the answer.
    let memory = args.scenario.memory_or(Memory::ENDLESS)?;
    let scenario = args.scenario.scenario_in(&subject, memory)?;
    let waterfall = scenario.waterfall()?;
    let names = scenario.peak(scenario.context)?.1.terms().map(|(name, _)| name);
    if !names.contains(&args.term.as_str()) {
        let near = near(&args.term, names.into_iter()).join(", ");
        return Err(PlanError::Unknown { kind: "term", name: args.term.clone(), near }.into());
    }
    let Some(term) = waterfall.terms.iter().find(|term| term.term == args.term) else {
        return Err(Failure::usage(format!(
            "there are no bytes of '{}' in this scenario; change its options",
            args.term
        )));
    };
    for (option, without) in args.scenario.without_each(scenario.overhead_bytes) {
        let without = without.scenario_in(&subject, memory)?.waterfall()?;
        let changed = changed(&waterfall, &without);
        if !changed.is_empty() && !changed.contains(&term.term) {
            return Err(Failure::usage(format!(
                "{option} changes nothing of '{}', only {}; leave it out",
                term.term,
                changed.join(" and ")
            )));
        }
    }
    args.report.give(term, || {
        let bytes = |count: u64| format!("{} B ({} GiB)", grouped(u128::from(count)), gib(u128::from(count)));
        let rows: Vec<Vec<String>> = [
            ("formula", term.formula.to_string()),
            ("numbers", term.numbers.clone()),
            ("load", bytes(term.load_bytes)),
            ("prefill", bytes(term.prefill_bytes)),
            ("decode", bytes(term.decode_bytes)),
            ("known by", format!("{:?}", term.known).to_lowercase()),
            ("growth", format!("{:?} in the context", term.growth).to_lowercase()),
        ]
        .map(|(name, value)| vec![name.into(), value])
        .into();
        format!("{}\n{}", text::wrapped(&scenario.words(), ""), text::table(&rows, 1))
    })
}

/// The terms in which two scenarios differ.
fn changed(one: &Waterfall, other: &Waterfall) -> Vec<&'static str> {
    let bytes = |of: &Waterfall, name: &str| {
        let term = of.terms.iter().find(|term| term.term == name);
        term.map(|term| [term.load_bytes, term.prefill_bytes, term.decode_bytes])
    };
    let names: BTreeSet<&str> = one.terms.iter().chain(&other.terms).map(|term| term.term).collect();
    names.into_iter().filter(|name| bytes(one, name) != bytes(other, name)).collect()
}

/// A model on every card.
#[derive(clap::Args)]
pub struct Gpus {
    #[command(flatten)]
    scenario: ScenarioArgs,
    #[command(flatten)]
    report: Reported,
}

pub fn gpus(args: &Gpus) -> Result<(), Failure> {
    args.report.check(args.scenario.read().as_slice())?;
    args.scenario.check_for_all_cards()?;
    let subject = args.scenario.subject()?;
    let scenario = args.scenario.scenario_in(&subject, Memory::ENDLESS)?;
    let cards = cards(&scenario)?;
    args.report.give(&cards, || {
        let heading = |cells: &[&str]| cells.iter().map(|cell| cell.to_string()).collect::<Vec<_>>();
        let shown = ["bf16", subject.published().map_or("fp8", |format| &format.name), "q4_k_m"];
        let [plain, published, four] = shown;
        let mut rows = vec![heading(&["", "GiB", plain, "", published, "", four, "", "LoRA", "QLoRA", "full"])];
        rows.push(heading(&["", "", "context", "batch", "context", "batch", "context", "batch"]));
        rows.extend(cards.iter().map(|one| card(one, &shown)));
        let mut moved = vec![heading(&["bf16, layers on the host", "layers", "GB a step", "over PCIe", "slower", "from disk"])];
        moved.extend(cards.iter().filter_map(offloaded));
        let note = format!(
            "context: the longest of {}; batch: the largest at {} tokens; --json has every weight format. LoRA and \
             QLoRA: rank {RANK} over bf16 and nf4, full: AdamW in mixed precision; one sequence, everything recomputed.",
            if scenario.held() > 1 { format!("each of {} sequences", scenario.held()) } else { "one sequence".into() },
            grouped(u128::from(scenario.context))
        );
        let moved = if moved.len() > 1 {
            let note = "The fewest layers with which bf16 fits, and tokens per second when their weights come over the link \
                        for every step, from the host's memory or from a disk of 5 GB/s.";
            format!("\n{}\n{}", text::table(&moved, 0), text::wrapped(note, ""))
        } else {
            String::new()
        };
        let head = format!("{}, {} parameters", subject.name, grouped(u128::from(subject.parameters)));
        let [head, note] = [head, note].map(|said| text::wrapped(&said, ""));
        format!("{head}\n{}\n{note}{moved}", text::table(&rows, 0))
    })
}

/// A line for a card, with these weight formats.
fn card(card: &Card, formats: &[&str]) -> Vec<String> {
    let short = |tokens: Option<u64>| {
        tokens.map_or("-".into(), |tokens| match tokens {
            1_000_000.. => format!("{:.1}M", tokens as f64 / 1e6),
            10_000.. => format!("{}K", tokens / 1000),
            tokens => tokens.to_string(),
        })
    };
    let yes = |fits| String::from(if fits { "yes" } else { "-" });
    let mut cells = vec![card.gpu.to_string(), format!("{:.0}", card.available_bytes as f64 / (1u64 << 30) as f64)];
    let shown = card.formats.iter().filter(|fit| formats.contains(&fit.weights));
    cells.extend(shown.flat_map(|fit| [short(fit.max_context_tokens), short(fit.max_batch)]));
    cells.extend([yes(card.lora_fits), yes(card.qlora_fits), yes(card.full_fits)]);
    cells
}

/// A line for a card on which layers must lie on the host.
fn offloaded(card: &Card) -> Option<Vec<String>> {
    let layers = card.offload_layers.filter(|layers| *layers > 0)?;
    let rate = |rate: Option<f64>| rate.map_or("-".into(), |rate| format!("{rate:.1}/s"));
    Some(vec![
        card.gpu.to_string(),
        layers.to_string(),
        gb(card.offload_bytes?.into()),
        rate(card.offload_tokens_per_s),
        format!("x{:.1}", card.offload_factor?),
        rate(card.disk_tokens_per_s),
    ])
}

/// The table of claims.
#[derive(clap::Args)]
pub struct Claims {
    #[command(flatten)]
    report: Reported,
}

/// A claim as JSON.
#[derive(Serialize)]
struct Claimed {
    id: &'static str,
    claim: &'static str,
    verdict: Verdict,
    computed: String,
}

/// As wide as what stands before a claim.
const INDENT: &str = "                ";

pub fn claims(args: &Claims) -> Result<(), Failure> {
    args.report.check(&[])?;
    let of = |claim: &crate::planner::claims::Claim| Claimed {
        id: claim.id,
        claim: claim.claim,
        verdict: claim.verdict,
        computed: (claim.computed)(),
    };
    let claims: Vec<Claimed> = CLAIMS.iter().map(of).collect();
    args.report.give(&claims, || {
        let line = |claim: &Claimed| {
            let verdict = format!("{:?}", claim.verdict).to_lowercase();
            let head = text::wrapped(&format!("\"{}\"", claim.claim), INDENT);
            let said = text::wrapped(&claim.computed, INDENT);
            format!("{:4} {verdict:10} {}{said}", claim.id, head.trim_start())
        };
        claims.iter().map(line).collect::<Vec<_>>().join("\n")
    })
}

/// A folder with records.
#[derive(clap::Args)]
pub struct AuditArgs {
    /// A run's folder, or one with runs below it
    folder: PathBuf,
    #[command(flatten)]
    report: Reported,
}

pub fn audit(args: &AuditArgs) -> Result<(), Failure> {
    args.report.check(&[])?;
    let audit = held(&args.folder)?;
    let files = [CELLS, MAX_CONTEXTS].map(|name| audit.folders.iter().map(move |run| run.join(name)));
    files.into_iter().flatten().try_for_each(|file| args.report.check(&[("a file of records", &file)]))?;
    args.report.give(&audit, || {
        let mut rows = vec![["", "records", "beyond", "furthest", "allowed"].map(String::from).to_vec()];
        for finding in &audit.findings {
            let furthest = match finding.unit {
                "bytes" => {
                    format!("{}{}", if finding.worst < 0.0 { "-" } else { "" }, bytes(finding.worst.abs() as u64))
                }
                _ => format!("{:+.1}%", 100.0 * finding.worst),
            };
            let allowed = if finding.binding {
                finding.tolerance.into()
            } else {
                format!("{} (not held to it)", finding.tolerance)
            };
            rows.push(vec![
                finding.question.into(),
                finding.records.to_string(),
                finding.beyond.to_string(),
                furthest,
                allowed,
            ]);
        }
        let far = audit.findings.iter().filter(|finding| finding.beyond > 0);
        let far: String =
            far.map(|finding| text::wrapped(&format!("{}: {}", finding.question, finding.at), "  ")).collect();
        let runs = format!("{} records of {} runs", audit.records, audit.folders.len());
        format!("{runs}\n\n{}{far}", text::table(&rows, 1))
    })?;
    match audit.holds {
        true => Ok(()),
        false => Err(Failure::work(
            "a prediction is further from its measurement than is allowed; the table names the record".into(),
        )),
    }
}

/// A trace.
#[derive(clap::Args)]
pub struct Allocator {
    /// Timeline that `kvsieve attend --timeline` wrote
    trace: PathBuf,
    #[command(flatten)]
    report: Reported,
}

pub fn allocator(args: &Allocator) -> Result<(), Failure> {
    args.report.check(&[("the timeline", &args.trace)])?;
    let wrong = |reason: String| Failure::usage(format!("'{}': {reason}", args.trace.display()));
    let text = std::fs::read_to_string(&args.trace).map_err(|error| wrong(error.to_string()))?;
    let events: Vec<Event> = serde_json::from_str(&text)
        .map_err(|error| wrong(format!("not a list of events with label and delta_bytes: {error}")))?;
    let outcomes = replay(&events)?;
    args.report.give(&outcomes, || {
        let mut rows = vec![["", "allocated", "reserved", "fragmented at the peak"].map(String::from).to_vec()];
        let n = |count: u64| grouped(u128::from(count));
        rows.extend(outcomes.iter().map(|outcome| {
            let numbers = [outcome.allocated_peak_bytes, outcome.reserved_peak_bytes, outcome.fragmented_bytes].map(n);
            [vec![outcome.allocator.to_string()], numbers.to_vec()].concat()
        }));
        format!("{} events, bytes\n\n{}", n(events.len() as u64), text::table(&rows, 0))
    })
}

/// Published numbers.
#[derive(clap::Args)]
pub struct PublishedArgs {
    #[command(flatten)]
    report: Reported,
}

/// A published number as JSON.
#[derive(Serialize)]
struct Beside {
    source: &'static str,
    what: String,
    unit: &'static str,
    published: f64,
    computed: f64,
    agrees: bool,
}

pub fn published(args: &PublishedArgs) -> Result<(), Failure> {
    args.report.check(&[])?;
    let of = |row: Published| Beside {
        agrees: row.agrees(),
        source: row.source,
        what: row.what,
        unit: row.unit,
        published: row.value,
        computed: row.computed,
    };
    let rows: Vec<Beside> = crate::planner::published::published().into_iter().map(of).collect();
    args.report.give(&rows, || {
        let mut said = String::new();
        for group in rows.chunk_by(|a, b| a.source == b.source) {
            let line = |row: &Beside| {
                let apart = 100.0 * (row.computed / row.published - 1.0);
                let apart = if row.agrees { "as printed".into() } else { format!("{apart:+.1}%") };
                let [published, computed] = [row.published, row.computed].map(|value| format!("{value:.2}"));
                vec![format!("  {}", row.what), published, computed, row.unit.into(), apart]
            };
            let lines: Vec<Vec<String>> = group.iter().map(line).collect();
            said.push_str(&format!("{}\n{}\n", group[0].source, text::table(&lines, 2)));
        }
        let agree = rows.iter().filter(|row| row.agrees).count();
        said + &format!("published and computed; {agree} of {} agree to the last printed digit\n", rows.len())
    })
}

/// A model at hand, run here.
#[derive(clap::Args)]
pub struct MeasureArgs {
    #[command(flatten)]
    scenario: ScenarioArgs,
    /// Folder to draw into: sizes against context, as SVG and CSV, and on a page, report.html
    #[arg(long, value_name = "DIR", help_heading = "What is reported")]
    output: Option<PathBuf>,
    #[command(flatten)]
    report: Reported,
}

/// Shorter contexts than the one that is asked for, each twice the one before.
const SHORTER: u32 = 3;

pub fn measure(args: &MeasureArgs) -> Result<(), Failure> {
    args.report.check(args.scenario.read().as_slice())?;
    args.output.as_deref().map_or(Ok(()), |folder| output::check_folder("--output", folder))?;
    args.scenario.check_for_measure()?;
    let subject = args.scenario.subject()?;
    let longest = args.scenario.scenario_in(&subject, Memory::ENDLESS)?;
    let (cpu, limit_bytes) = (Cpu::new(None)?, os::default_limit_bytes().unwrap_or(u64::MAX));
    check(&longest, cpu.threads(), limit_bytes)?;
    let contexts = (0..=SHORTER).rev().map(|halvings| longest.context >> halvings).filter(|&context| context > 0);
    let measured = contexts.map(|context| Ok(measured(&Scenario { context, ..longest.clone() }, &cpu, limit_bytes)?));
    let measured = measured.collect::<Result<Vec<_>, Failure>>()?;
    let mut rows = vec![["context", "", "predicted, B", "arena, B", "apart", "process, B"].map(String::from).to_vec()];
    let size = |bytes: Option<u64>| bytes.map_or("-".into(), |bytes| grouped(bytes.into()));
    for one in &measured {
        rows.extend(one.held.iter().enumerate().map(|(at, held)| {
            vec![
                if at == 0 { grouped(one.context_tokens.into()) } else { String::new() },
                held.term.into(),
                grouped(held.predicted_bytes.into()),
                size(held.arena_bytes),
                held.arena_bytes.map_or("-".into(), |arena| (arena as i128 - held.predicted_bytes as i128).to_string()),
                size(held.process_bytes),
            ]
        }));
    }
    let mut said =
        format!("{}\n{}\n{}", text::wrapped(&longest.words(), ""), text::table(&rows, 0), text::wrapped(MEASURED, ""));
    if let Some(folder) = &args.output {
        report::planner::write_measured(folder, &longest, &measured, &said)?;
        said.push_str(&text::page(folder));
    }
    args.report.give(&measured, || said)
}

/// What a reader of the measurement must know.
const MEASURED: &str = "predicted: from headers and shapes, before anything is read. arena: what the code then asked for. process: how \
far its resident set grew, with the pages of files that it touched: a load that maps its files has touched few of them, one that \
encodes them in another format has read them all.";
