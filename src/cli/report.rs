//! `kvsieve report`: figures and page again, from the records alone.

use super::failure::Failure;
use super::output;
use crate::experiment::record::Record;
use crate::experiment::store::{CELLS, MAX_CONTEXTS};
use crate::experiment::{Spec, store};
use crate::report::{self, Detail, Drawn, Run, Versus, versus, workers};
use crate::units;
use serde_json::Value;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
A folder is that of one run (it holds cells.jsonl), as `kvsieve run` prints it. Parts of one run (shards: the same \
configuration, build and kind of machine, no cell in common) are one section; the page is written into the first folder, or \
into --out. Of a run that processes share it shows how far each of them is.\n\n\
Two runs that have cells in common, each in one folder or in its shards, are compared, the second with the first: what differs between their machines and \
programs, and each cell whose time, memory, drift, score or other result changed beyond noise (* marks which). A time has changed when the \
95% intervals of the medians, of at least 10 samples each, do not meet and the medians differ by more than 5%; with --check a \
change is exit status 1. It is in comparison.md too.\n\n\
Examples:
  kvsieve report results/quickstart/20260101T120000Z-0a1b2c3d-1234567
  kvsieve report results/quickstart/* --out comparison
  kvsieve report before after --out comparison --check
  kvsieve report results/eviction-catalogue/* --per-head";

/// What two runs of the same cells have that differs, in the folder of their report.
const COMPARISON: &str = "comparison.md";

/// Names of parts that a run is called by.
const MOST_NAMES: usize = 4;

/// Draw the figures and the page of runs again, from their records
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folders of runs
    #[arg(value_name = "DIR", required = true)]
    folders: Vec<PathBuf>,
    /// Folder to write into [default: the first DIR]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Heat maps of retained tokens with a row for each KV head instead of each layer
    #[arg(long)]
    per_head: bool,
    /// Compare two runs, and end with exit status 1 if a cell changed beyond noise or is gone
    #[arg(long)]
    check: bool,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    let known: Vec<Option<PathBuf>> = args.folders.iter().map(|folder| folder.canonicalize().ok()).collect();
    if let Some(at) = (1..known.len()).find(|&at| known[at].is_some() && known[..at].contains(&known[at])) {
        return Err(Failure::usage(format!("'{}' is named twice; name each run once", args.folders[at].display())));
    }
    // A search for the longest context has no report of its own.
    let out = args.out.as_ref().or(args.folders.iter().find(|folder| !is_search(folder))).unwrap_or(&args.folders[0]);
    let detail = if args.per_head { Detail::Heads } else { Detail::Layers };
    let folders = read(&args.folders)?;
    let wholes = gathered(&folders, whole);
    let compared = match &wholes[..] {
        [(.., a), (.., b)] => Some(versus(a, b)).filter(|versus| versus.common > 0),
        _ => None,
    };
    if args.check && compared.is_none() {
        let found = match wholes.len() {
            2 => "these two have none".into(),
            runs => format!("these folders are of {}", units::counted(runs as u64, "run")),
        };
        return Err(Failure::usage(format!(
            "--check compares two runs that have cells in common; {found}, name those of two such runs"
        )));
    }
    let runs = sections(&folders);
    let drawn = write(out, &runs, detail)?;
    let progress: String = runs.iter().filter_map(progress).collect();
    let versus = match &compared {
        Some(versus) => {
            let path = out.join(COMPARISON);
            std::fs::write(&path, &versus.text)
                .map_err(|error| Failure::work(format!("cannot write '{}': {error}", path.display())))?;
            format!("{}\n", versus.text)
        }
        None => String::new(),
    };
    output::print(&format!("{progress}{versus}{} figures\nreport: {}\n", drawn.figures.len(), drawn.html.display()))?;
    match compared.filter(|_| args.check) {
        Some(Versus { common, changed, .. }) if changed > 0 => {
            Err(Failure::work(format!("{changed} of {common} cells changed beyond noise")))
        }
        Some(Versus { gone, .. }) if gone > 0 => Err(Failure::work(format!(
            "{} of the first run missing in the second",
            units::counted(gone as u64, "cell")
        ))),
        _ => Ok(()),
    }
}

/// Whether a folder holds what `--find-max-context` found, and no cells.
fn is_search(folder: &Path) -> bool {
    folder.join(MAX_CONTEXTS).is_file() && !folder.join(CELLS).is_file()
}

/// Reads the runs in `folders` and writes their report into `out`.
pub fn draw(out: &Path, folders: &[PathBuf], detail: Detail) -> Result<Drawn, Failure> {
    write(out, &sections(&read(folders)?), detail)
}

/// How far a run is that processes share.
fn progress(run: &Run) -> Option<String> {
    let tasks = workers::by_task(&run.records)?;
    let cells = run.records.len();
    let all = run.environment["run"]["cells"].as_u64().map_or(String::new(), |all| format!(" of {all}"));
    Some(format!("{}: {cells}{all} cells\n\n{tasks}\n", run.experiment))
}

/// What a folder of a run holds.
struct Folder {
    records: Vec<Record>,
    environment: Value,
    /// Text of its configuration; empty where records are all that is there.
    config: String,
    spec: Option<Spec>,
    run_id: String,
}

/// What `folders` hold, with warnings of what is wrong with it.
fn read(folders: &[PathBuf]) -> Result<Vec<Folder>, Failure> {
    let mut all = Vec::new();
    for folder in folders {
        // Beside runs may lie what a search for the longest context wrote, which has no cells.
        if folders.len() > 1 && is_search(folder) {
            output::warn(&[format!(
                "'{}' holds a search for the longest context, which no report shows",
                folder.display()
            )]);
            continue;
        }
        let (records, environment) = store::read(folder)?;
        let torn = store::torn(folder)?.into_iter();
        let torn = torn.map(|path| format!("'{}': the last line is torn and left out", path.display()));
        output::warn(&torn.collect::<Vec<_>>());
        output::warn(workers::divided(&records).as_slice());
        let path = folder.join("config.toml");
        let config = std::fs::read_to_string(&path).unwrap_or_default();
        // Records alone are enough; a configuration that is there must be right.
        let spec = match config.as_str() {
            "" => None,
            text => Some(Spec::parse(text, &path.display().to_string())?),
        };
        let name = folder.canonicalize().unwrap_or_else(|_| folder.clone());
        let named = || name.file_name().map(|name| name.to_string_lossy().to_string()).unwrap_or_default();
        let run_id =
            records.first().map(|record| record.run_id.clone()).filter(|id| !id.is_empty()).unwrap_or_else(named);
        all.push(Folder { records, environment, config, spec, run_id });
    }
    Ok(all)
}

/// A run or a part of it, with its cells and what it has in common with others that are put together with it.
type Gathered = (Key, HashSet<String>, Run);

/// Parts of a folder's records, each with its name.
type Parts = Vec<(String, Vec<Record>)>;

/// A folder's records as one, whatever thread counts and instruction paths they were measured with; named by the CPU.
fn whole(folder: &Folder) -> Parts {
    vec![(folder.environment["machine"]["cpu"].to_string(), folder.records.clone())]
}

/// A folder's records in parts whose times may stand in one table.
fn by_machine(folder: &Folder) -> Parts {
    let mut parts = workers::by_machine(folder.records.clone(), &folder.environment);
    if parts.is_empty() {
        parts.push(Default::default());
    }
    parts
}

/// The runs in `folders`, each folder in `parts`; parts of one run are put together.
fn gathered(folders: &[Folder], parts: fn(&Folder) -> Parts) -> Vec<Gathered> {
    let mut runs: Vec<Gathered> = Vec::new();
    for folder in folders {
        let Folder { environment, config, spec, run_id, .. } = folder;
        for (machine, records) in parts(folder) {
            let ids: HashSet<String> = records.iter().map(|record| record.cell_id.clone()).collect();
            // Parts of one configuration are one run; runs of two builds or machines are not, nor is what was run twice.
            let key = Key { config: config.clone(), build: environment["tool"]["git"].clone(), machine };
            match runs.iter_mut().find(|run| !config.is_empty() && run.0 == key && run.1.is_disjoint(&ids)) {
                Some((_, known, run)) => {
                    known.extend(ids);
                    run.records.extend(records);
                    run.run_id = with(&run.run_id, run_id);
                }
                None => {
                    let mut environment = environment.clone();
                    if let Some(worker) = records.first().and_then(|record| record.worker.as_ref()) {
                        environment["machine"]["cpu"] = worker.cpu.clone().into();
                    }
                    let run = Run {
                        experiment: spec.as_ref().map_or_else(|| run_id.clone(), |spec| spec.name.clone()),
                        is_synthetic: spec.as_ref().is_some_and(|spec| spec.file.is_none()),
                        description: spec.clone().map(described).unwrap_or_default(),
                        repro: records.first().map_or_else(String::new, |record| record.repro.clone()),
                        run_id: run_id.clone(),
                        environment,
                        records,
                        elsewhere: 0,
                    };
                    runs.push((key, ids, run));
                }
            }
        }
    }
    runs
}

/// The names of the parts of a run with one more; of many parts the first and how many others there are.
fn with(names: &str, more: &str) -> String {
    let parts: Vec<&str> = names.split(" + ").collect();
    let others = match parts[..] {
        [_, others] => others.strip_suffix(" more").and_then(|count| count.parse().ok()),
        _ => None,
    };
    match others.unwrap_or(parts.len() - 1) + 1 {
        others if others < MOST_NAMES => format!("{names} + {more}"),
        others => format!("{} + {others} more", parts[0]),
    }
}

/// The sections of a report of `folders`.
fn sections(folders: &[Folder]) -> Vec<Run> {
    let runs = gathered(folders, by_machine);
    output::warn(&apart(&runs));
    let elsewhere: Vec<usize> = (0..runs.len()).map(|at| elsewhere(&runs, at)).collect();
    runs.into_iter().zip(elsewhere).map(|((_, _, run), elsewhere)| Run { elsewhere, ..run }).collect()
}

/// Cells of the same configuration and build that are in other sections and not in this one.
fn elsewhere(runs: &[Gathered], at: usize) -> usize {
    let (key, own, _) = &runs[at];
    let is_other =
        |other: &Key| !key.config.is_empty() && other.config == key.config && other.build == key.build && other != key;
    let others = runs.iter().filter(|(other, ..)| is_other(other)).flat_map(|(_, ids, _)| ids);
    others.filter(|id| !own.contains(*id)).collect::<HashSet<_>>().len()
}

/// What parts of one run have in common.
#[derive(PartialEq)]
struct Key {
    config: String,
    build: Value,
    machine: String,
}

/// Which runs of one configuration are not put together although none of their cells is in both.
fn apart(runs: &[Gathered]) -> Vec<String> {
    let mut warnings = Vec::new();
    for (index, (key, ids, run)) in runs.iter().enumerate() {
        let earlier = runs[..index].iter().find(|(other, known, _)| {
            !key.config.is_empty() && other.config == key.config && *other != *key && known.is_disjoint(ids)
        });
        let Some((other, ..)) = earlier.filter(|_| !ids.is_empty()) else { continue };
        let (a, b) = if other.build == key.build {
            (other.machine.clone(), key.machine.clone())
        } else {
            (format!("build {}", other.build), format!("build {}", key.build))
        };
        warnings.push(format!(
            "{}: {} cells have a section of their own, for no ratio is formed of two machines or builds: {a}; {b}",
            run.experiment,
            ids.len()
        ));
    }
    warnings
}

/// What an experiment asks, and of which tensors where they are a user's.
fn described(Spec { description, file, .. }: Spec) -> String {
    match file {
        Some(file) => format!("{description} Inputs are those of {}.", file.path.display()).trim().into(),
        None => description,
    }
}

fn write(out: &Path, runs: &[Run], detail: Detail) -> Result<Drawn, Failure> {
    output::check_folder("--out", out)?;
    std::fs::create_dir_all(out)
        .map_err(|error| Failure::work(format!("cannot make folder '{}': {error}", out.display())))?;
    Ok(report::write(out, runs, detail)?)
}

#[cfg(test)]
mod tests {
    use super::with;

    #[test]
    fn a_run_of_many_parts_has_a_short_name() {
        let named = |parts: usize| (1..parts).fold("0".to_string(), |names, part| with(&names, &part.to_string()));
        assert_eq!(
            [1, 2, 4, 5, 6, 64].map(named),
            ["0", "0 + 1", "0 + 1 + 2 + 3", "0 + 4 more", "0 + 5 more", "0 + 63 more"]
        );
    }
}
