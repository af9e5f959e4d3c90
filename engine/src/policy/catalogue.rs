//! The catalogue of policies as a page: `docs/policies.md` is this text.

use super::{PRESETS, PolicyEntry, Preset, Registry, Statistic};
use crate::named::Parameter;
use std::fmt::Write;

const HEAD: &str = "\
# Eviction policies

*Written by `kvsieve list policies --markdown`; a test holds it against the registry.*

A policy is a **method**, or a preset of one, and after plus signs **parts** that replace what the method brings:
`snapkv:window=32+ada:floor=0.1+every:steps=64`. Parts of one kind exclude each other, except changes of the scores, which
are applied in order.

Every method evicts once, behind the context, unless its text says more: its budget counts the tokens of the context that it
retains, and what comes behind stays on top. With `every` it evicts while decoding too and its budget counts all there is.
That is what some papers do; where so, the method's line says it.
";

/// The catalogue in Markdown.
pub fn markdown(registry: &Registry) -> String {
    let mut text = String::from(HEAD);
    // Writing to a string cannot fail.
    let _ = writeln!(text, "\n## Methods\n\n| name | keeps | looks at | paper | parameters |\n|---|---|---|---|---|");
    for entry in registry.entries() {
        let about = entry.about.strip_prefix("keeps ").unwrap_or(entry.about);
        let [paper, parameters] = [paper(entry.paper), parameters(entry.parameters)];
        let _ =
            writeln!(text, "| `{}` | {about} | {} | {paper} | {parameters} |", entry.name, looks_at(registry, entry));
    }
    let _ = writeln!(text, "\n## Presets\n\n| name | is | | paper | runs with |\n|---|---|---|---|---|");
    for preset in PRESETS {
        let own = registry.preset_parameters(preset);
        let own: Vec<String> = own.iter().map(|own| format!("`{own}`")).collect();
        let (Preset { name, text: is, about, .. }, paper, own) = (preset, paper(preset.paper), own.join(" "));
        let _ = writeln!(text, "| `{name}` | `{is}` | {about} | {paper} | {own} |");
    }
    let _ = writeln!(text, "\n## Parts\n\n| name | kind | | paper | parameters |\n|---|---|---|---|---|");
    for part in registry.parts() {
        let kind = registry.kind(part);
        let [paper, parameters] = [paper(part.paper), parameters(part.parameters)];
        let _ = writeln!(text, "| `{}` | {kind} | {} | {paper} | {parameters} |", part.name, part.about);
    }
    text
}

fn paper(id: &str) -> String {
    if id.is_empty() { String::new() } else { format!("[{id}](https://arxiv.org/abs/{id})") }
}

fn parameters(parameters: &[Parameter]) -> String {
    let each = parameters.iter().map(|own| format!("`{own}` {}", own.about));
    each.collect::<Vec<_>>().join("<br>")
}

fn looks_at(registry: &Registry, entry: &PolicyEntry) -> String {
    let needs = registry.policy(entry.name).map(|policy| policy.needs()).unwrap_or_default();
    describe(&needs)
}

/// The class of what scoring costs, by what a policy looks at: a word or two for a list.
pub fn cost_class(needs: &[Statistic]) -> &'static str {
    let looks_at = |statistic| needs.contains(&statistic);
    match () {
        _ if looks_at(Statistic::FutureAttention) => "future",
        _ if looks_at(Statistic::Gradients) => "gradients",
        _ if looks_at(Statistic::Reconstruction) => "another pass",
        _ if looks_at(Statistic::AccumulatedAttention) => "all queries",
        _ if looks_at(Statistic::RecentAttention) => "last queries",
        _ if looks_at(Statistic::HiddenStates) => "hidden states",
        _ if looks_at(Statistic::Queries) => "Q and K",
        _ if looks_at(Statistic::Values) => "K and V",
        _ if needs.is_empty() => "positions",
        _ => "K",
    }
}

/// What a policy looks at, in words.
pub fn describe(needs: &[Statistic]) -> String {
    match needs {
        [] => "nothing but positions".into(),
        needs => needs.iter().map(|need| need.describe()).collect::<Vec<_>>().join("; "),
    }
}
