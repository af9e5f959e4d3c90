//! `kvsieve list`: what there is to choose from, straight from the registries.

use super::failure::Failure;
use super::output;
use kvsieve::attention::KERNELS;
use kvsieve::experiment::measure::MEASURES;
use kvsieve::experiment::spec::{SHIPPED, Spec};
use kvsieve::format::FORMATS;
use kvsieve::memories::MEMORIES;
use kvsieve::named::Parameter;
use kvsieve::planner::architecture::Architecture;
use kvsieve::planner::presets::{GPUS, Gpu, MODELS, WEIGHT_FORMATS};
use kvsieve::policy::{PRESETS, Registry, describe, markdown};
use kvsieve::serving::{STRATEGIES, TRACES};
use kvsieve::task::{self, TASKS};
use kvsieve::units;
use serde::Serialize;
use std::fmt::Write;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Parameters are shown with their defaults; give others as NAME:key=value,key=value.

Examples:
  kvsieve list kernels
  kvsieve list policies
  kvsieve list policies --markdown > docs/policies.md
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
    /// Write the page of policies or of tasks in Markdown instead of the table
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Things {
    /// Attention kernels
    Kernels,
    /// Eviction policies
    Policies,
    /// Formats of keys and values in the cache
    Formats,
    /// Memories in place of the cache
    Memories,
    /// Evaluation tasks
    Tasks,
    /// What experiments measure
    Measures,
    /// Allocation strategies of the measure `serve`
    Strategies,
    /// Request traces of the measure `serve`
    Traces,
    /// Models that `plan` knows by name
    Models,
    /// Cards that `plan` knows by name
    Gpus,
    /// Weight formats of `plan`
    Weights,
    /// Experiments that come with kvsieve
    Experiments,
}

impl Things {
    fn rows(self) -> Vec<Row> {
        match self {
            Things::Kernels => {
                KERNELS.iter().map(|entry| Row::new(entry.name, entry.about, entry.parameters)).collect()
            }
            Things::Policies => policies(&Registry::default()),
            Things::Formats => {
                FORMATS.iter().map(|entry| Row::new(entry.name, entry.about, entry.parameters)).collect()
            }
            Things::Memories => MEMORIES
                .iter()
                .map(|entry| Row { paper: paper(entry.paper), ..Row::new(entry.name, entry.about, entry.parameters) })
                .collect(),
            Things::Tasks => TASKS.iter().map(|entry| Row::new(entry.name, entry.about, entry.parameters)).collect(),
            Things::Measures => MEASURES.iter().map(|measure| Row::new(measure.name(), measure.about(), &[])).collect(),
            Things::Strategies => {
                STRATEGIES.iter().map(|entry| Row::new(entry.name, entry.about, entry.parameters)).collect()
            }
            Things::Traces => TRACES.iter().map(|entry| Row::new(entry.name, entry.about, entry.parameters)).collect(),
            Things::Models => MODELS.iter().map(model).collect(),
            Things::Gpus => GPUS.iter().map(|gpu| Row::new(&gpu.name, &about_gpu(gpu), &[])).collect(),
            Things::Weights => WEIGHT_FORMATS.iter().map(|format| Row::new(&format.name, &format.about, &[])).collect(),
            Things::Experiments => SHIPPED.iter().map(|(name, text)| experiment(name, text)).collect(),
        }
    }
}

/// A model that plans know.
fn model(model: &'static Architecture) -> Row {
    let heads = match model.mla {
        Some(mla) => format!("{} heads, latent rows of {}", model.heads, mla.kv_rank + mla.rope),
        None => format!("{} / {} heads of {}", model.heads, model.kv_heads, model.head_dim),
    };
    let window = model.window.map_or(String::new(), |window| {
        format!(", {} of {} layers see {} tokens", window.layers, model.layers, window.tokens)
    });
    let parameters = model.parameters() as f64 / 1e9;
    let context = units::tokens(model.context);
    let about =
        format!("{parameters:.2} billion parameters, {} layers, {heads}, context {context}{window}", model.layers);
    Row::new(&model.name, &about, &[])
}

fn about_gpu(gpu: &Gpu) -> String {
    let bf16 = if gpu.bf16 { "" } else { ", no bf16" };
    format!(
        "{} MiB, {} GB/s, {} TFLOP/s in 16 bits, PCIe {}{bf16}",
        units::grouped(gpu.mib.into()),
        gpu.gb_per_s,
        gpu.tflops,
        gpu.pcie
    )
}

/// Methods, presets and parts of policies.
fn policies(registry: &Registry) -> Vec<Row> {
    let looks_at = |name: &str| registry.policy(name).ok().map(|policy| describe(&policy.needs()));
    let methods = registry.entries().iter().map(|entry| Row {
        kind: Some("method"),
        paper: paper(entry.paper),
        needs: looks_at(entry.name),
        ..Row::new(entry.name, entry.about, entry.parameters)
    });
    let presets = PRESETS.iter().map(|preset| Row {
        kind: Some("preset"),
        paper: paper(preset.paper),
        needs: looks_at(preset.name),
        is: Some(preset.text),
        ..Row::new(preset.name, preset.about, &registry.preset_parameters(preset))
    });
    let parts = registry.parts().iter().map(|part| Row {
        kind: Some(registry.kind(part)),
        paper: paper(part.paper),
        ..Row::new(part.name, part.about, part.parameters)
    });
    methods.chain(presets).chain(parts).collect()
}

fn paper(id: &'static str) -> Option<&'static str> {
    (!id.is_empty()).then_some(id)
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
    /// Method, preset, or the kind of part.
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    /// The combination that a preset is.
    #[serde(skip_serializing_if = "Option::is_none")]
    is: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    paper: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    needs: Option<String>,
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
        Row {
            name,
            about: about.into(),
            kind: None,
            is: None,
            paper: None,
            needs: None,
            parameters: parameters.collect(),
        }
    }
}

pub fn run(args: &Args) -> Result<(), Failure> {
    if args.markdown {
        return match args.things {
            Things::Policies => output::print(&markdown(&Registry::default())),
            Things::Tasks => output::print(&task::markdown()),
            _ => Err(Failure::usage("--markdown writes the pages of policies and of tasks only".into())),
        };
    }
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
    let mut kind = None;
    for row in rows {
        if row.kind.is_some_and(|row| !matches!(row, "method" | "preset")) && kind.is_none() {
            kind = row.kind;
            text.push_str("\nparts, after a plus sign as in snapkv+ada:floor=0.1\n\n");
        }
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{:names$}  {}", row.name, row.about);
        let paper = row.paper.map(|paper| format!("arXiv {paper}"));
        let facts = [
            row.is.map(|is| format!("= {is}")),
            kind.and(row.kind).map(String::from),
            paper,
            row.needs.as_ref().map(|needs| format!("needs {needs}")),
        ];
        let facts: Vec<String> = facts.into_iter().flatten().collect();
        if !facts.is_empty() {
            let _ = writeln!(text, "{:names$}    {}", "", facts.join("; "));
        }
        for parameter in &row.parameters {
            let _ = writeln!(text, "{:names$}    {:settings$}  {}", "", setting(parameter), parameter.about);
        }
    }
    text
}
