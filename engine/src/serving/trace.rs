//! Request traces: how long prompts and outputs are, in which pool they are served, for how long.
//!
//! `sharegpt` and `alpaca` draw lengths from two lognormals and reject requests longer than `max`; their defaults have
//! the means that the vLLM paper (arXiv 2309.06180, figure 11) prints for the two data sets and the pool of its
//! OPT-13B on an A100 of 40 GB: 12 GiB at 819,200 bytes a token. `file` reads lengths from a CSV and repeats them.

use super::{Pool, ServingError};
use crate::named::{Named, NamedError, Parameter};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, LogNormal};
use serde::Deserialize;
use std::path::Path;

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct Request {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens that will be generated; only the strategy `oracle` may look.
    pub output_tokens: usize,
}

impl Request {
    /// Tokens at its end.
    pub fn tokens(self) -> usize {
        self.prompt_tokens + self.output_tokens
    }
}

/// A kind of trace as the registry knows it.
pub struct TraceEntry {
    /// Name in experiment files and records.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// Its parameters.
    pub parameters: &'static [Parameter],
}

const fn parameter(name: &'static str, default: &'static str, about: &'static str) -> Parameter {
    Parameter { name, default, about }
}

const SLOTS: Parameter = parameter("slots", "15728", "tokens that the pool holds");
const MAX: Parameter = parameter("max", "2048", "most tokens of a request, prompt and output together");
const STEPS: Parameter = parameter("steps", "1000000", "steps that are simulated; in each, every request grows by one");
const WARMUP: Parameter = parameter("warmup", "5000", "first steps that are not counted");

/// Every kind of trace.
pub const TRACES: &[TraceEntry] = &[
    TraceEntry {
        name: "sharegpt",
        about: "Conversations: prompts of 161 and outputs of 338 tokens on average, after rejection",
        parameters: &[
            parameter("prompt", "194", "mean tokens of a prompt before long requests are rejected"),
            parameter("prompt_cv2", "5", "variance of prompts over their squared mean"),
            parameter("output", "370", "mean tokens of an output before long requests are rejected"),
            parameter("output_cv2", "1.3", "variance of outputs over their squared mean"),
            SLOTS,
            MAX,
            STEPS,
            WARMUP,
        ],
    },
    TraceEntry {
        name: "alpaca",
        about: "Instructions: prompts of 19 and outputs of 58 tokens on average",
        parameters: &[
            parameter("prompt", "19.31", "mean tokens of a prompt before long requests are rejected"),
            parameter("prompt_cv2", "1", "variance of prompts over their squared mean"),
            parameter("output", "58.45", "mean tokens of an output before long requests are rejected"),
            parameter("output_cv2", "1", "variance of outputs over their squared mean"),
            SLOTS,
            MAX,
            STEPS,
            WARMUP,
        ],
    },
    TraceEntry {
        name: "file",
        about: "Your own: a CSV with the columns prompt_tokens and output_tokens, repeated from its start",
        parameters: &[parameter("path", "none", "the file"), SLOTS, MAX, STEPS, WARMUP],
    },
];

/// A trace: requests and the pool that serves them.
#[derive(Debug, Clone)]
pub struct Trace {
    /// The memory.
    pub pool: Pool,
    /// Steps that are simulated.
    pub steps: u64,
    /// First steps that are not counted.
    pub warmup_steps: u64,
    lengths: Lengths,
}

#[derive(Debug, Clone)]
enum Lengths {
    Drawn { prompt: LogNormal<f64>, output: LogNormal<f64> },
    Listed(Vec<Request>),
}

impl Trace {
    /// The trace that a text such as `sharegpt:steps=50000` or `file:path=requests.csv` names.
    ///
    /// # Errors
    /// When there is no such trace or parameter, a value is wrong, or a file is not a trace.
    pub fn parse(text: &str) -> Result<Self, ServingError> {
        let named: Named = text.parse()?;
        let entry = named.find("trace", TRACES, |entry| entry.name)?;
        named.check(entry.parameters)?;
        let number = |key: &str, least: usize, most: usize| -> Result<usize, NamedError> {
            let default = default_of(entry, key).parse().expect("a default is a number");
            named.count_in(key, default, least..=most)
        };
        let pool = Pool { slots: number("slots", 1, 1 << 28)?, max_tokens: number("max", 2, 1 << 30)? };
        let steps = number("steps", 1, 1_000_000_000)?;
        let warmup = number("warmup", 0, 1_000_000_000)?;
        if warmup >= steps {
            let wrong = match named.text("warmup") {
                Some(_) => named.wrong("warmup", format!("less than the {steps} steps")),
                None => named.wrong("steps", format!("more than the {warmup} steps of warmup")),
            };
            return Err(wrong.into());
        }
        let lengths = match named.text("path") {
            Some(path) => Lengths::Listed(read(Path::new(path), pool.max_tokens)?),
            None if entry.name == "file" => return Err(named.wrong("path", "the name of a CSV file".into()).into()),
            None => drawn(&named, entry, pool.max_tokens)?,
        };
        Ok(Trace { pool, steps: steps as u64, warmup_steps: warmup as u64, lengths })
    }

    /// Requests without end. The same seed gives the same requests; a file's requests come in their order.
    pub fn requests(&self, seed: u64) -> Box<dyn Iterator<Item = Request> + '_> {
        let most = self.pool.max_tokens;
        match &self.lengths {
            Lengths::Listed(requests) => Box::new(requests.iter().copied().cycle()),
            Lengths::Drawn { prompt, output } => {
                let mut rng = ChaCha8Rng::seed_from_u64(seed);
                let draws = std::iter::repeat_with(move || {
                    let mut tokens = |of: &LogNormal<f64>| of.sample(&mut rng).round().max(1.0) as usize;
                    Request { prompt_tokens: tokens(prompt), output_tokens: tokens(output) }
                });
                Box::new(
                    draws.filter(move |request| request.prompt_tokens.saturating_add(request.output_tokens) <= most),
                )
            }
        }
    }

    /// Hash of a file's requests; `None` where lengths are drawn, as the trace's name says all about them.
    pub fn file_hash(&self) -> Option<String> {
        let Lengths::Listed(requests) = &self.lengths else { return None };
        let mut hasher = blake3::Hasher::new();
        for request in requests {
            hasher.update(&(request.prompt_tokens as u64).to_le_bytes());
            hasher.update(&(request.output_tokens as u64).to_le_bytes());
        }
        Some(hasher.finalize().to_hex()[..16].to_string())
    }
}

fn default_of(entry: &TraceEntry, key: &str) -> &'static str {
    entry.parameters.iter().find(|parameter| parameter.name == key).expect("every trace has it").default
}

fn drawn(named: &Named, entry: &TraceEntry, max_tokens: usize) -> Result<Lengths, ServingError> {
    let number = |key: &str, least: f64, most: f64| -> Result<f64, NamedError> {
        let value = named.text(key).unwrap_or(default_of(entry, key)).parse().ok();
        let wrong = || named.wrong(key, format!("a number from {least} to {most}"));
        value.filter(|value| (least..=most).contains(value)).ok_or_else(wrong)
    };
    // The median of a lognormal is below its mean: at least a quarter of the draws pass when both means together do.
    let most = (max_tokens - 1) as f64;
    let (prompt, output) = (number("prompt", 1.0, most)?, number("output", 1.0, most)?);
    if prompt + output > most {
        return Err(named
            .wrong("output", format!("at most {} with prompts of {prompt} and max={max_tokens}", most - prompt))
            .into());
    }
    let lognormal = |mean: f64, key: &str| -> Result<LogNormal<f64>, NamedError> {
        let cv = number(key, 0.0, 1000.0)?.sqrt();
        LogNormal::from_mean_cv(mean, cv).map_err(|_| named.wrong(key, "a number from 0 to 1000".into()))
    };
    Ok(Lengths::Drawn { prompt: lognormal(prompt, "prompt_cv2")?, output: lognormal(output, "output_cv2")? })
}

fn read(path: &Path, max_tokens: usize) -> Result<Vec<Request>, ServingError> {
    let wrong = |reason: String| ServingError::File { path: path.into(), reason };
    let mut table =
        csv::ReaderBuilder::new().trim(csv::Trim::All).from_path(path).map_err(|error| wrong(error.to_string()))?;
    let mut requests = Vec::new();
    for (row, request) in table.deserialize().enumerate() {
        let request: Request = request.map_err(|error| {
            wrong(format!("{error}; a trace has the columns prompt_tokens and output_tokens, whole numbers"))
        })?;
        if request.prompt_tokens == 0 || request.output_tokens == 0 {
            return Err(wrong(format!("request {} has no tokens; prompt and output have at least 1 each", row + 1)));
        }
        let tokens = request.prompt_tokens.saturating_add(request.output_tokens);
        if tokens > max_tokens {
            return Err(wrong(format!(
                "request {} has {tokens} tokens, max is {max_tokens}; give max={tokens}",
                row + 1
            )));
        }
        requests.push(request);
    }
    if requests.is_empty() { Err(wrong("there is no request; give at least one".into())) } else { Ok(requests) }
}
