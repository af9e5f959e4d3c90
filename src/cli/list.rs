//! `kvsieve list`: what there is to choose from, straight from the registries.

use super::failure::Failure;
use super::output;
use crate::attention::KERNELS;
use crate::attention::cuda::CUDA_KERNELS;
use crate::episodic::{EPISODES, FACT_MEMORIES};
use crate::experiment::SHIPPED;
use crate::experiment::measure::MEASURES;
use crate::experiment::spec::Spec;
use crate::format::{FORMATS, KIVI};
use crate::memories::MEMORIES;
use crate::named::{NamedError, Parameter};
use crate::planner::architecture::Architecture;
use crate::planner::presets::{GPUS, Gpu, MODELS, WEIGHT_FORMATS};
use crate::policy::{PRESETS, Registry, cost_class, describe, markdown};
use crate::report::MOST_COLUMNS;
use crate::serving::{STRATEGIES, TRACES};
use crate::task::{self, TASKS};
use crate::units;
use serde::Serialize;
use std::path::PathBuf;

const EXAMPLES: &str = "\
One line each; with a name, the whole of it: parameters are shown with their defaults, give others as
NAME:key=value,key=value. Behind a policy's name stands what its scores look at: positions alone are free, K and V are read
once, the last queries cost a thin pass of attention, all queries a whole one.

Examples:
  kvsieve list policies
  kvsieve list policies snapkv
  kvsieve list kernels tiled
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
    /// One of them: everything there is to say
    name: Option<String>,
    /// Write JSON instead of the table, to standard output (-) or a file
    #[arg(long, value_name = "-|FILE")]
    json: Option<PathBuf>,
    /// Write the page of policies or of tasks in Markdown instead of the table
    #[arg(long, conflicts_with_all = ["json", "name"])]
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
    /// Memories of facts
    FactMemories,
    /// Episodes of the measure `recall`
    Episodes,
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
    /// One of them.
    fn one(self) -> &'static str {
        match self {
            Things::Kernels => "kernel",
            Things::Policies => "policy",
            Things::Formats => "format",
            Things::Memories => "memory",
            Things::FactMemories => "memory of facts",
            Things::Episodes => "episode",
            Things::Tasks => "task",
            Things::Measures => "measure",
            Things::Strategies => "strategy",
            Things::Traces => "trace",
            Things::Experiments => "experiment",
            Things::Models => "model",
            Things::Gpus => "GPU",
            Things::Weights => "weight format",
        }
    }

    fn rows(self, registry: &Registry) -> Vec<Row> {
        match self {
            Things::Kernels => kernels(),
            Things::Policies => policies(registry),
            Things::Formats => {
                let rows = FORMATS.iter().map(|entry| Row::new(entry.name, entry.about, &entry.all_parameters()));
                rows.chain([Row::new(KIVI.name, KIVI.about, KIVI.parameters)]).collect()
            }
            Things::Memories => MEMORIES
                .iter()
                .map(|entry| Row { paper: paper(entry.paper), ..Row::new(entry.name, entry.about, entry.parameters) })
                .collect(),
            Things::FactMemories => FACT_MEMORIES
                .iter()
                .map(|entry| Row {
                    paper: paper(entry.paper),
                    ..Row::new(entry.name, entry.about, &entry.all_parameters())
                })
                .collect(),
            Things::Episodes => {
                EPISODES.iter().map(|entry| Row::new(entry.name, entry.about, entry.parameters)).collect()
            }
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

/// Kernels of the CPU, with what they take on a GPU besides, and those that GPUs alone have.
fn kernels() -> Vec<Row> {
    let on_cpu = |name: &str| KERNELS.iter().any(|entry| entry.name == name);
    let of_cuda = |name: &str| CUDA_KERNELS.iter().find(|kernel| kernel.name() == name);
    let rows = KERNELS.iter().map(|entry| {
        let more = of_cuda(entry.name).map_or(&[][..], |kernel| kernel.parameters());
        Row::new(entry.name, entry.about, &[entry.parameters, more].concat())
    });
    let alone = CUDA_KERNELS.iter().filter(|kernel| !on_cpu(kernel.name()));
    rows.chain(alone.map(|kernel| Row::new(kernel.name(), kernel.about(), kernel.parameters()))).collect()
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
    let needs = |name: &str| registry.policy(name).ok().map(|policy| policy.needs());
    let looks_at = |name: &str| needs(name).map(|needs| describe(&needs));
    let cost = |name: &str| needs(name).map(|needs| cost_class(&needs));
    let methods = registry.entries().iter().map(|entry| Row {
        kind: Some("method"),
        paper: paper(entry.paper),
        needs: looks_at(entry.name),
        cost: cost(entry.name),
        ..Row::new(entry.name, entry.about, entry.parameters)
    });
    let presets = PRESETS.iter().map(|preset| Row {
        kind: Some("preset"),
        paper: paper(preset.paper),
        needs: looks_at(preset.name),
        cost: cost(preset.name),
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
    /// The class of what scoring costs.
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<&'static str>,
    parameters: Vec<Parameter>,
}

impl Row {
    fn new(name: &'static str, about: &str, parameters: &[Parameter]) -> Self {
        Row {
            name,
            about: about.into(),
            kind: None,
            is: None,
            paper: None,
            needs: None,
            cost: None,
            parameters: parameters.to_vec(),
        }
    }
}

pub fn run(args: &Args, registry: &Registry) -> Result<(), Failure> {
    if args.markdown {
        return match args.things {
            Things::Policies => output::print(&markdown(registry)),
            Things::Tasks => output::print(&task::markdown()),
            _ => Err(Failure::usage("--markdown writes the pages of policies and of tasks only".into())),
        };
    }
    let mut rows = args.things.rows(registry);
    if let Some(name) = &args.name {
        let known: Vec<&str> = rows.iter().map(|row| row.name).collect();
        let index = known.iter().position(|known| known == name);
        let index = index.ok_or_else(|| NamedError::unknown(args.things.one(), name, known))?;
        rows = vec![rows.swap_remove(index)];
    }
    match (&args.json, &args.name) {
        (Some(target), _) => output::json(target, &rows),
        (None, Some(_)) => output::print(&whole(&rows[0])),
        (None, None) => output::print(&table(&rows)),
    }
}

/// A line for each thing, as much as fits; methods, presets and parts of policies under headings.
fn table(rows: &[Row]) -> String {
    let names = rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
    let costs = rows.iter().filter_map(|row| row.cost).map(str::len).max().unwrap_or(0);
    let (mut text, mut section) = (String::new(), "");
    for row in rows {
        let heading = row.kind.map_or("", |kind| match kind {
            "method" => "methods, and what their scores look at",
            "preset" => "presets: combinations with a name",
            _ => "parts, after a plus sign as in snapkv+ada:floor=0.1",
        });
        if heading != section {
            text.push_str(if section.is_empty() { "" } else { "\n" });
            text.push_str(&format!("{heading}\n\n"));
            section = heading;
        }
        let cost = row.cost.map_or(String::new(), |cost| format!("{cost:costs$}  "));
        let start = format!("{:names$}  {cost}", row.name);
        text.push_str(&format!(
            "{start}{}\n",
            on_a_line(&row.about, MOST_COLUMNS.saturating_sub(start.chars().count()))
        ));
    }
    text
}

/// What fits into so many columns: all of it, or as many words as there is room for.
fn on_a_line(about: &str, columns: usize) -> String {
    if about.chars().count() <= columns {
        return about.into();
    }
    let mut line = String::new();
    for word in about.split(' ') {
        if line.chars().count() + " ".len() + word.chars().count() + " ...".len() > columns {
            break;
        }
        line.push_str(if line.is_empty() { "" } else { " " });
        line.push_str(word);
    }
    format!("{} ...", line.trim_end_matches([',', ';', ':', '.']))
}

/// Everything about one thing.
fn whole(row: &Row) -> String {
    let mut text = format!("{}\n  {}\n", row.name, row.about);
    let facts = [
        row.kind.map(String::from),
        row.is.map(|is| format!("= {is}")),
        row.paper.map(|paper| format!("arXiv {paper}")),
        row.needs.as_ref().map(|needs| format!("looks at {needs}")),
    ];
    facts.into_iter().flatten().for_each(|fact| text.push_str(&format!("  {fact}\n")));
    let settings = row.parameters.iter().map(|parameter| parameter.to_string().len()).max().unwrap_or(0);
    for parameter in &row.parameters {
        text.push_str(&format!("    {:settings$}  {}\n", parameter.to_string(), parameter.about));
    }
    text
}
