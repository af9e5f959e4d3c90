//! `generate --context FILE --question TEXT`: the answers with the full cache and with the evicted one, side by side.

use super::{Args, median_ns};
use crate::cli::failure::Failure;
use crate::cli::hardware::Hardware;
use crate::cli::model::Opened;
use crate::cli::output;
use crate::cli::policy::Used;
use crate::eval::{Choice, Frame, Prompt, Protocol, Replies, Stage, ask, questions};
use crate::format::RowFormat;
use crate::model::{ChatTemplate, Generated, Sampling, Text, locate};
use crate::policy::Registry;
use crate::units;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Columns that the two answers share.
const WIDTH: usize = 100;

/// What is reported, under the names that records use.
#[derive(Serialize)]
struct Report {
    model: PathBuf,
    architecture: &'static str,
    context: PathBuf,
    context_tokens: usize,
    protocol: Protocol,
    chat: bool,
    policy: Option<String>,
    #[serde(flatten)]
    policy_file: Option<Used>,
    budget: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<String>,
    kernel: String,
    dtype: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    activations: Option<RowFormat>,
    kv_format: String,
    temperature: f32,
    top_p: f32,
    seed: u64,
    #[serde(flatten)]
    hardware: Hardware,
    full: Side,
    evicted: Side,
    questions: Vec<Answered>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

/// What one of the two caches took.
#[derive(Serialize)]
struct Side {
    #[serde(flatten)]
    context: Replies,
    /// Tokens that a KV head holds of the context, on average.
    held_tokens_per_head: f64,
    peak_bytes: u64,
}

/// A question and its two answers.
#[derive(Serialize)]
struct Answered {
    question: String,
    full: Answer,
    evicted: Answer,
    /// Tokens with which both answers begin.
    same_tokens: usize,
}

#[derive(Serialize)]
struct Answer {
    text: String,
    tokens: Vec<u32>,
    first_token_ns: u64,
    step_ns: Vec<u64>,
}

/// Answers the questions twice.
pub fn run(args: &Args, registry: &Registry, path: &Path, sampling: Sampling, text: &Text) -> Result<(), Failure> {
    args.model.compute.refuse_cuda()?;
    if args.model.policy.is_none() && args.model.memory.is_none() {
        let reason = "--question compares the full cache with another one; give --policy and --budget, or --memory";
        return Err(Failure::usage(reason.into()));
    }
    if let Some(empty) = args.question.iter().find(|question| question.trim().is_empty()) {
        return Err(Failure::usage(format!("--question is '{empty}'; at least one word is asked")));
    }
    let context = std::fs::read_to_string(path)
        .map_err(|error| Failure::usage(format!("cannot read --context '{}': {error}", path.display())))?;
    if context.is_empty() {
        return Err(Failure::usage(format!("cannot read --context '{}': it is empty", path.display())));
    }
    let frame = match args.chat {
        true => Frame::chat(&ChatTemplate::open(&locate(&args.model.model)?)?, text)?,
        false => Frame::plain(text)?,
    };
    let protocol = args.protocol.unwrap_or_default();
    let prompts = questions(&context, &args.question, (protocol, args.chat), (text, &frame))?;
    let opened = args.model.open(registry)?;
    let longest = prompts.iter().map(|prompt| prompt.most_tokens(|_| args.max_new_tokens)).max().unwrap_or(0);
    let setup = args.model.setup(&opened, 2, longest, false)?;
    let stage = Stage {
        model: &opened.model,
        cpu: &opened.cpu,
        arena: &opened.arena,
        kernel: setup.kernel,
        dtype: setup.dtype,
        kv_format: setup.kv_format,
        activations: setup.activations,
        max_tokens: setup.max_tokens,
        chunk_tokens: setup.chunk_tokens,
    };
    let choice = match &opened.memory {
        Some(memory) => Some(Choice::Remember(&**memory)),
        None => args.model.eviction(&opened).map(Choice::Evict),
    };
    let bar = ProgressBar::new(2 * args.question.len() as u64);
    let style = ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {pos}/{len} answers  {msg}");
    bar.set_style(style.expect("the template is right").progress_chars("=> "));
    let side = |name: &'static str, choice: Option<Choice<'_>>| {
        bar.set_message(name);
        opened.arena.reset_peak();
        let context = ask(&stage, choice, &prompts, (sampling, args.max_new_tokens), || bar.inc(1))?;
        let heads = (opened.model.config.layers * opened.model.config.kv_heads) as f64;
        let held_tokens_per_head = context.held_tokens as f64 / heads;
        Ok::<Side, Failure>(Side { context, held_tokens_per_head, peak_bytes: opened.arena.usage().peak_bytes })
    };
    let (full, evicted) = (side("full cache", None)?, side("evicted", choice)?);
    bar.finish_and_clear();
    let report = args.report(&opened, (path, protocol, &prompts), (full, evicted), text)?;
    match &args.model.json {
        Some(target) => output::json(target, &report),
        None => output::print(&words(&report)),
    }
}

impl Args {
    fn report(
        &self,
        opened: &Opened,
        (path, protocol, prompts): (&Path, Protocol, &[Prompt]),
        (full, evicted): (Side, Side),
        text: &Text,
    ) -> Result<Report, Failure> {
        let answer = |given: &Generated| {
            let ends = |token: &&u32| !opened.model.config.eos.contains(token);
            let words: Vec<u32> = given.tokens.iter().take_while(ends).copied().collect();
            let Generated { tokens, first_token_ns, step_ns, .. } = given.clone();
            Ok::<_, Failure>(Answer { text: text.text(&words)?, tokens, first_token_ns, step_ns })
        };
        let mut answered = Vec::new();
        for ((question, full), evicted) in self.question.iter().zip(&full.context.replies).zip(&evicted.context.replies)
        {
            let same = full.tokens.iter().zip(&evicted.tokens).take_while(|(a, b)| a == b).count();
            let (full, evicted) = (answer(full)?, answer(evicted)?);
            answered.push(Answered { question: question.clone(), full, evicted, same_tokens: same });
        }
        let setup = self.model.setup(opened, 2, 0, false)?;
        let contexts: Vec<usize> = prompts.iter().map(Prompt::budgeted_tokens).collect();
        Ok(Report {
            model: self.model.model.clone(),
            architecture: opened.model.config.family.architecture(),
            context: path.into(),
            context_tokens: prompts[0].context.len(),
            protocol,
            chat: self.chat,
            policy: self.model.policy.clone(),
            policy_file: opened.policy_file.clone(),
            budget: opened.budget.map(|budget| budget.to_string()),
            memory: self.model.memory.clone(),
            kernel: setup.kernel.into(),
            dtype: setup.dtype.to_string(),
            activations: setup.activations,
            kv_format: setup.kv_format.to_string(),
            temperature: self.temperature,
            top_p: self.top_p,
            seed: self.model.seed,
            hardware: Hardware::cpu(&opened.cpu),
            full,
            evicted,
            questions: answered,
            warnings: self.model.warnings(opened, &setup, &contexts),
        })
    }
}

/// The answers in two columns, and what they took.
fn words(report: &Report) -> String {
    let other = match (&report.policy, &report.budget, &report.memory) {
        (Some(policy), Some(budget), _) => format!("{policy}, budget {budget}"),
        (.., Some(memory)) => memory.clone(),
        _ => String::new(),
    };
    let column = (WIDTH - 2) / 2;
    let row = |left: &str, right: &str| format!("{left:column$}  {right}").trim_end().to_string() + "\n";
    let mut text = format!(
        "{}: {} tokens{}; protocol {}\n",
        report.context.display(),
        units::grouped(report.context_tokens as u128),
        if report.protocol == Protocol::Agnostic { "" } else { " with the first question" },
        report.protocol
    );
    for (number, Answered { question, full, evicted, same_tokens }) in report.questions.iter().enumerate() {
        text += &format!("\n{}. {question}\n\n{}", number + 1, row("full cache", &other));
        let [left, right] = [full, evicted].map(|answer| textwrap::wrap(answer.text.trim(), column));
        for line in 0..left.len().max(right.len()) {
            let of =
                |column: &[std::borrow::Cow<'_, str>]| column.get(line).map_or(String::new(), |line| line.to_string());
            text += &row(&of(&left), &of(&right));
        }
        text += &match full.tokens == evicted.tokens {
            true => "the same answer\n".to_string(),
            false => format!("the same for {same_tokens} of {} tokens\n", full.tokens.len()),
        };
    }
    let numbers = |side: &Side, answer: &dyn Fn(&Answered) -> &Answer| {
        let median = |ns: Vec<u64>| median_ns(&ns).map_or("–".into(), units::nanoseconds);
        let answers = || report.questions.iter().map(answer);
        [
            units::grouped(side.held_tokens_per_head.round() as u128),
            units::bytes(side.context.kv_bytes_live),
            units::nanoseconds(side.context.read_ns as f64),
            median(answers().map(|answer| answer.first_token_ns).collect()),
            median(answers().flat_map(|answer| answer.step_ns.clone()).collect()),
            units::bytes(side.peak_bytes),
        ]
    };
    let sides =
        [numbers(&report.full, &|answered| &answered.full), numbers(&report.evicted, &|answered| &answered.evicted)];
    let titles = [
        "tokens per KV head",
        "keys and values",
        "reading, evicting",
        "first token",
        "per token",
        "peak, weights included",
    ];
    text += "\n";
    text += &format!("{:24}{:>16}  {:>16}\n", "", "full cache", "evicted");
    for (title, (full, evicted)) in titles.iter().zip(sides[0].iter().zip(&sides[1])) {
        text += &format!("{title:24}{full:>16}  {evicted:>16}\n");
    }
    text
}
