//! `kvsieve list`: what there is to choose from, straight from the registries.

use super::failure::Failure;
use super::output;
use kvsieve::attention::KERNELS;
use kvsieve::experiment::spec::{SHIPPED, Spec};
use kvsieve::named::Parameter;
use kvsieve::policy::{POLICIES, PolicyEntry};
use kvsieve::serving::{STRATEGIES, TRACES};
use serde::Serialize;
use std::fmt::Write;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Parameters are shown with their defaults; give others as NAME:key=value,key=value.

Examples:
  kvsieve list kernels
  kvsieve list policies
  kvsieve list experiments --json -
  kvsieve attend --kernel tiled:br=32,bc=128 ...";

/// List what there is to choose from, with parameters and their defaults
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// What to list
    #[arg(value_enum)]
    things: Things,
    /// Write JSON instead of the table, to standard output (-) or a file
    #[arg(long, value_name = "-|FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Things {
    /// Attention kernels
    Kernels,
    /// Eviction policies
    Policies,
    /// Allocation strategies of the measure `serve`
    Strategies,
    /// Request traces of the measure `serve`
    Traces,
    /// Experiments that come with kvsieve
    Experiments,
}

impl Things {
    fn rows(self) -> Vec<Row> {
        match self {
            Things::Kernels => {
                KERNELS.iter().map(|entry| Row::new(entry.name, entry.about, entry.parameters)).collect()
            }
            Things::Policies => POLICIES.iter().map(policy).collect(),
            Things::Strategies => {
                STRATEGIES.iter().map(|entry| Row::new(entry.name, entry.about, entry.parameters)).collect()
            }
            Things::Traces => TRACES.iter().map(|entry| Row::new(entry.name, entry.about, entry.parameters)).collect(),
            Things::Experiments => SHIPPED.iter().map(|(name, text)| experiment(name, text)).collect(),
        }
    }
}

fn policy(entry: &PolicyEntry) -> Row {
    Row {
        paper: (!entry.paper.is_empty()).then_some(entry.paper),
        needs: Some(entry.needs.describe()),
        ..Row::new(entry.name, entry.about, entry.parameters)
    }
}

fn experiment(name: &'static str, text: &str) -> Row {
    let description = Spec::parse(text, name).map(|spec| spec.description).unwrap_or_default();
    Row::new(name, &description, &[])
}

/// One thing of a registry.
#[derive(Serialize)]
struct Row {
    name: &'static str,
    about: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    paper: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    needs: Option<&'static str>,
    parameters: Vec<ParameterRow>,
}

#[derive(Serialize)]
struct ParameterRow {
    name: &'static str,
    default: &'static str,
    about: &'static str,
}

impl Row {
    fn new(name: &'static str, about: &str, parameters: &[Parameter]) -> Self {
        let parameters =
            parameters.iter().map(|&Parameter { name, default, about }| ParameterRow { name, default, about });
        Row { name, about: about.into(), paper: None, needs: None, parameters: parameters.collect() }
    }
}

pub fn run(args: &Args) -> Result<(), Failure> {
    let rows = args.things.rows();
    match &args.json {
        None => output::print(&table(&rows)),
        Some(target) => output::json(target, &rows),
    }
}

fn table(rows: &[Row]) -> String {
    let setting = |parameter: &ParameterRow| format!("{}={}", parameter.name, parameter.default);
    let longest = |widths: &mut dyn Iterator<Item = usize>| widths.max().unwrap_or(0);
    let names = longest(&mut rows.iter().map(|row| row.name.len()));
    let settings = longest(&mut rows.iter().flat_map(|row| &row.parameters).map(|parameter| setting(parameter).len()));
    let mut text = String::new();
    for row in rows {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{:names$}  {}", row.name, row.about);
        if let Some(needs) = row.needs {
            let paper = row.paper.map_or(String::new(), |paper| format!("arXiv {paper}; "));
            let _ = writeln!(text, "{:names$}    {paper}needs {needs}", "");
        }
        for parameter in &row.parameters {
            let _ = writeln!(text, "{:names$}    {:settings$}  {}", "", setting(parameter), parameter.about);
        }
    }
    text
}
