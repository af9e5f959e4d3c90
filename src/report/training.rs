//! The figures of a training run, from its log: loss against steps, and accuracy on tasks that no step has read.

use super::chart::{Axis, Chart, Point, Quantity, Series};
use super::{ReportError, draw, files, palette};
use crate::experiment::record::Status;
use crate::train::log::{self, Line};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// What was drawn.
pub struct Drawn {
    /// The last evaluation in words, one line for each task and length.
    pub summary: String,
}

/// Draws `loss.svg`, and for each evaluated length `accuracy-<tokens>.svg`, into a run's folder; of gates `divergence.svg`
/// and `compression.svg`, `distance.svg` and `gates.svg`, or `explained.svg`.
///
/// # Errors
/// When the log cannot be read or a file cannot be written.
pub fn draw(folder: &Path) -> Result<Drawn, ReportError> {
    let lines = log::read(folder).map_err(|error| ReportError::Draw(error.to_string()))?;
    let of_gates = gates(&lines).into_iter().chain(heads(&lines)).chain([surrogate(&lines)]);
    for chart in std::iter::once(loss(&lines)).chain(accuracies(&lines)).chain(of_gates) {
        if chart.series.iter().any(|series| !series.points.is_empty()) {
            files::replace(&folder.join(format!("{}.svg", chart.id)), &draw::svg(&chart)?)?;
        }
    }
    Ok(Drawn { summary: summary(&lines) })
}

fn loss(lines: &[Line]) -> Chart {
    // One curve for each length: where sequences become longer the loss jumps, because what is read changes.
    let mut lengths: BTreeMap<usize, Vec<Point>> = BTreeMap::new();
    for line in lines {
        if let Line::Step { step, length_tokens, loss, .. } = line {
            lengths.entry(*length_tokens).or_default().push(point(*step, *loss));
        }
    }
    let mut names: Vec<_> = lengths.into_iter().map(|(length, points)| (format!("{length} tokens"), points)).collect();
    let held_out = lines.iter().filter_map(|line| match line {
        Line::HeldOut { step, loss, .. } => Some(point(*step, *loss)),
        _ => None,
    });
    let held_out: Vec<Point> = held_out.collect();
    if !held_out.is_empty() {
        names.push(("held out".into(), held_out));
    }
    Chart {
        id: "loss".into(),
        title: "Training loss".into(),
        subtitle: "weighted cross-entropy of the target tokens, mean over the steps between two lines of the log"
            .into(),
        caption: "One curve for each length of sequences.".into(),
        y: Axis { label: "loss, nats per token".into(), field: "loss", quantity: Quantity::Loss },
        ..chart(names.into_iter())
    }
}

/// A figure for each length, with a curve for each task.
fn accuracies(lines: &[Line]) -> impl Iterator<Item = Chart> {
    let mut lengths: BTreeMap<usize, BTreeMap<String, Vec<Point>>> = BTreeMap::new();
    for line in lines {
        if let Line::Evaluation { step, task, length_tokens, right, samples } = line {
            let share = *right as f64 / *samples as f64;
            lengths.entry(*length_tokens).or_default().entry(task.clone()).or_default().push(point(*step, share));
        }
    }
    lengths.into_iter().map(|(length, tasks)| Chart {
        id: format!("accuracy-{length}"),
        title: format!("Accuracy at {length} tokens, on samples that were not trained on"),
        subtitle: "fraction of samples whose every token of the answer was the likeliest".into(),
        caption: "Full cache, one question of each sample.".into(),
        y: Axis { label: "accuracy".into(), field: "accuracy", quantity: Quantity::Share },
        ..chart(tasks.into_iter())
    })
}

/// Divergence and compression of gates, while training and with hard decisions on held-out text.
fn gates(lines: &[Line]) -> [Chart; 2] {
    let mut divergence = [Vec::new(), Vec::new()];
    let mut compression = [Vec::new(), Vec::new(), Vec::new()];
    let ratio = |evicted: f64| 1.0 / (1.0 - evicted.min(0.99));
    for line in lines {
        match line {
            Line::Gates { step, kl, evicted, target, .. } => {
                divergence[0].push(point(*step, *kl));
                compression[0].push(point(*step, ratio(*evicted)));
                compression[1].push(point(*step, ratio(*target)));
            }
            Line::HeldOutGates { step, kl, evicted } => {
                divergence[1].push(point(*step, *kl));
                compression[2].push(point(*step, ratio(*evicted)));
            }
            _ => (),
        }
    }
    // Nothing to draw on a logarithmic axis before anything is evicted.
    divergence.iter_mut().for_each(|points| points.retain(|point| point.y > Some(0.0)));
    let caption = "Held out: text that no step has read, decisions as they are at inference.";
    let named = |names: &[&str], points: Vec<Vec<Point>>| {
        chart(names.iter().map(|name| name.to_string()).zip(points).collect::<Vec<_>>().into_iter())
    };
    [
        Chart {
            id: "divergence".into(),
            title: "Divergence of gated attention from the dense model".into(),
            subtitle: "mean over the steps between two lines of the log".into(),
            caption: caption.into(),
            y: Axis { label: "KL, nats per token".into(), field: "kl", quantity: Quantity::Loss },
            ..named(&["training", "held out"], divergence.into())
        },
        Chart {
            id: "compression".into(),
            title: "Compression behind the window".into(),
            subtitle: "tokens for each that stays, of those that lie behind the window, over all layers and heads"
                .into(),
            caption: caption.into(),
            y: Axis { label: "compression".into(), field: "ratio", quantity: Quantity::Count },
            ..named(&["training", "asked for", "held out"], compression.into())
        },
    ]
}

/// What gates of heads cost, and what is left of them.
fn heads(lines: &[Line]) -> [Chart; 2] {
    let (mut distance, mut left) = ([Vec::new(), Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for line in lines {
        match line {
            Line::Heads { step, distance: of_steps, alpha, low, heads, .. } => {
                distance[0].push(point(*step, *of_steps));
                left[0].push(point(*step, *alpha));
                left[1].push(point(*step, 1.0 - *low as f64 / *heads as f64));
            }
            Line::HeldOutHeads { step, distance: of_lowest, random } => {
                distance[1].push(point(*step, *of_lowest));
                distance[2].push(point(*step, *random));
            }
            _ => (),
        }
    }
    distance.iter_mut().for_each(|points| points.retain(|point| point.y > Some(0.0)));
    let names = ["training", "held out, lowest half near", "held out, random half near"].map(String::from);
    let of_left = ["mean of the gates", "gates above one half"].map(String::from);
    [
        Chart {
            id: "distance".into(),
            title: "What gates of heads change of the model's last hidden state".into(),
            subtitle: "mean square off the dense model where answers are written".into(),
            caption: "Held out: half of the heads read only what is near, those with the lowest gates or drawn by lot."
                .into(),
            y: Axis { label: "mean square".into(), field: "distance", quantity: Quantity::Loss },
            ..chart(names.into_iter().zip(distance))
        },
        Chart {
            id: "gates".into(),
            title: "Gates of heads".into(),
            subtitle: "1: all tokens, 0: the first and the recent ones".into(),
            caption: "Over all layers and KV heads.".into(),
            y: Axis { label: "gates".into(), field: "alpha", quantity: Quantity::Share },
            ..chart(of_left.into_iter().zip(left))
        },
    ]
}

/// How well gates foretell scores, against what they were fitted to.
fn surrogate(lines: &[Line]) -> Chart {
    let mut curves = [const { Vec::new() }; 4];
    for line in lines {
        if let Line::Fitted { step, explained, held_out, inner } = line {
            let first = if *inner > 0 { 2 } else { 0 };
            curves[first].push(point(*step, *explained));
            curves[first + 1].push(point(*step, *held_out));
        }
    }
    let names = ["fitted to", "held out", "with an inner layer", "with an inner layer, held out"].map(String::from);
    Chart {
        id: "explained".into(),
        title: "What gates foretell of KVzip+'s scores".into(),
        subtitle: "part of the variance of their logarithms, mean over layers and KV heads".into(),
        caption: "Held out: text that the gates were not fitted to. Steps are sequences.".into(),
        y: Axis { label: "explained variance".into(), field: "explained", quantity: Quantity::Share },
        ..chart(names.into_iter().zip(curves).filter(|(_, curve)| !curve.is_empty()))
    }
}

fn chart(named: impl Iterator<Item = (String, Vec<Point>)>) -> Chart {
    let series = named.enumerate().map(|(place, (name, points))| {
        let style = palette::style(&name, place, 0);
        Series { name, style, points }
    });
    let steps = Axis { label: "steps".into(), field: "step", quantity: Quantity::Steps };
    Chart {
        id: String::new(),
        title: String::new(),
        subtitle: String::new(),
        caption: String::new(),
        y: steps.clone(),
        x: steps,
        interval_fields: ("low", "high"),
        model_field: None,
        series: series.collect(),
        rules: Vec::new(),
    }
}

fn point(step: usize, y: f64) -> Point {
    Point { x: step as f64, y: Some(y), interval: None, model: None, status: Status::Ok, cell_ids: Vec::new() }
}

fn summary(lines: &[Line]) -> String {
    let last = lines.iter().rev().find(|line| matches!(line, Line::Evaluation { .. })).map(Line::step);
    let mut text = String::new();
    for line in lines {
        match line {
            Line::Evaluation { step, task, length_tokens, right, samples } if Some(*step) == last => {
                let _ = writeln!(text, "{task:<24} {length_tokens:>6} tokens  {right} of {samples} right");
            }
            Line::HeldOut { step, loss, perplexity } if *step == 0 || Some(*step) == lines.last().map(Line::step) => {
                let _ = writeln!(text, "held out, step {step:>5}: loss {loss:.4}, perplexity {perplexity:.3}");
            }
            Line::HeldOutGates { step, kl, evicted } if Some(*step) == lines.last().map(Line::step) => {
                let evicted = 100.0 * evicted;
                let _ =
                    writeln!(text, "held-out text: {evicted:.1}% evicted behind the window, KL {kl:.4} nats per token");
            }
            Line::HeldOutHeads { step, distance, random } if Some(*step) == lines.last().map(Line::step) => {
                let _ = writeln!(
                    text,
                    "half of the heads near: off by {distance:.4} with the lowest gates, {random:.4} by lot"
                );
            }
            _ => (),
        }
    }
    text
}
