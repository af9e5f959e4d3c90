//! Experiment files: what the TOML says, before it is expanded into cells.
//!
//! Unknown keys are refused. Every axis of a grid takes one value or a list, and lengths also take ranges such as
//! `"1k..32k*2"` (doubling) or `"1k..8k+1k"` (in steps).

use super::SHIPPED;
use super::axes::{BudgetText, Many, PageTokens, Tokens};
use super::measure::Measure;
use super::policy_axis::PolicyText;
use super::weights::WeightsText;
use crate::eval::Protocol;
use crate::format::{KvFormat, RowFormat};
use crate::named::nearest;
use crate::tensor::DType;
use crate::units;
use crate::workload::{Knobs, SyntheticSpec};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// An experiment file.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Name of the experiment and of its folder under the results: lower-case letters, digits, `-` and `_`.
    pub name: String,
    /// One or two sentences for the report.
    #[serde(default)]
    pub description: String,
    /// Memory limit such as `"8GiB"`; without it 80% of what is available. `--limit-memory` goes before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_memory: Option<String>,
    /// How long and how often cells are measured.
    #[serde(default)]
    pub timing: Timing,
    /// Inputs from a file; without it they are synthetic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<FileSpec>,
    /// Knobs of the synthetic inputs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub synthetic: Option<SyntheticSpec>,
    /// Grids of cells.
    pub grid: Vec<Grid>,
}

/// Tensors of a real model.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct FileSpec {
    /// A safetensors file with `q` `[B, Hq, L, D]`, `k` and `v` `[B, Hkv, L, D]`, after RoPE. Relative to the working
    /// folder.
    pub path: PathBuf,
}

/// How long and how often cells are measured.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Timing {
    /// Untimed rounds before the first sample (the first of them is the checked one).
    pub warmups: usize,
    /// Fewest samples of a cell.
    pub min_rounds: usize,
    /// Most samples of a cell.
    pub max_rounds: usize,
    /// Sampling stops when the half-width of the 95% interval is at most this fraction of the median.
    pub target: f64,
    /// Sampling stops when a cell has taken this long, all rounds together (but not before three samples).
    pub cap_s: f64,
}

impl Default for Timing {
    fn default() -> Self {
        Timing { warmups: 1, min_rounds: 6, max_rounds: 30, target: 0.03, cap_s: 10.0 }
    }
}

/// One grid: the product of its axes.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Grid {
    /// `forward`, `backward`, `decode`, `evict`, `serve`, `ranks`, `train`, `tune`, `recall`, `edit` or `eval`.
    pub measure: Measure,
    /// Kernels; by default `tiled`, and `decode` for `decode`. For `evict` the one that does the prefill.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub kernel: Many<String>,
    /// Context lengths; for every measure but `serve`, `recall` and `edit`. For `eval` in tokens of the model.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub context_tokens: Many<Tokens>,
    /// Heads as `"8/2"`: 8 query heads on 2 KV heads. From the file when there is one.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub heads: Many<String>,
    /// Head dims. From the file when there is one.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub head_dim: Many<usize>,
    /// Batch sizes; 1 by default.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub batch: Many<usize>,
    /// Element types; f32 by default. From the file when there is one.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub dtype: Many<DType>,
    /// How the cache keeps keys and values, as `int8` or `k=int8,v=bf16`, for `decode`, `evict` and `eval`; as `dtype` by
    /// default.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub kv_format: Many<KvFormat>,
    /// How weight matrices are kept, for `eval`: formats, or `file` for those of the model's own files, which is the default.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub weights: Many<WeightsText>,
    /// What activations are rounded to before each linear layer, for `eval`; `f32`, which is the default, leaves them as they are.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub activations: Many<RowFormat>,
    /// Causal mask; true by default.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub causal: bool,
    /// Sliding window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
    /// Soft-cap of the logits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub softcap: Option<f32>,
    /// Policies, for `evict`, `eval` and `edit`; `*` is every method and preset of the registry.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub policy: Many<PolicyText>,
    /// Budgets, for `evict` and `eval`; `full` needs none.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub budget: Many<BudgetText>,
    /// Memories in place of the cache, for `eval`; memories of facts, for `recall` and `edit`, where `nearest:facts=4` is one too.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub memory: Many<String>,
    /// A file that the policies may read tensors of, relative to the working folder, for `evict` and `eval`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy_file: Option<PathBuf>,
    /// Layers that share a budget, for `evict`; 1 by default.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub layers: Many<usize>,
    /// Tokens decoded after the context, for `evict`; 32 by default. For `eval` the most tokens of an answer; by default
    /// twice those of the right one, and 8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new_tokens: Option<usize>,
    /// Tokens of a page, or `"contiguous"`, for `decode`.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub page_tokens: Many<PageTokens>,
    /// Allocation strategies, for `serve`.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub strategy: Many<String>,
    /// Request traces, for `serve`.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub trace: Many<String>,
    /// Maps between a model and a memory of facts, as `train --method larimar` writes them, relative to the working folder, for
    /// `edit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maps: Option<PathBuf>,
    /// Facts that are written, for `edit`.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub facts: Many<usize>,
    /// Episodes, for `recall`.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub episode: Many<String>,
    /// Ranks that share a pass, for `ranks`: `ring:4`, `tree:2`; or training, for `train`: `zero:ranks=4,stage=3`.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub ranks: Many<String>,
    /// What is trained, and how, for `tune`: `full`, `lora:rank=8,target=q/v`, `qlora`.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub tuning: Many<String>,
    /// Models, for `eval`, `edit`, `train` and `tune`: Hugging Face folders or GGUF files, relative to the working folder, or `builtin`, which is the default.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub model: Many<String>,
    /// Tasks, for `eval`.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub task: Many<String>,
    /// Instead of tasks, a text file: each piece of `context_tokens` is evicted from, and the `new_tokens` that follow (128 by
    /// default) are fed as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<PathBuf>,
    /// Samples of each task, for `eval`, or drawn episodes, for `recall`; 20 by default; for `edit` 8. Rounds of `train` and
    /// `tune`; 5 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<usize>,
    /// How many of the samples of `eval` each cell also runs alone, for its times and memory; 3 by default, 1 where more than 8
    /// cells are compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alone_samples: Option<usize>,
    /// What policies have seen of a question when they evict, for `eval`; `agnostic` by default.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub protocol: Many<Protocol>,
    /// Whether prompts of `eval` are written in the model's chat template.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub chat: bool,
    /// Whether sequences of `eval` may be longer than the model was made for.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub beyond_limit: bool,
    /// Seeds; 0 by default.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub seed: Many<u64>,
    /// Settings of the synthetic inputs, each as knobs that differ from those of `[synthetic]`: `[{}, { hinted = 0 }]`.
    #[serde(default, skip_serializing_if = "Many::is_empty")]
    pub knobs: Many<Knobs>,
}

impl Grid {
    /// The element types given, each with every format of the cache that is asked for beside it, unless it is that of the
    /// elements themselves.
    pub(super) fn types(&self, dtypes: &[DType]) -> Vec<(DType, Option<KvFormat>)> {
        let formats: Vec<_> = self.kv_format.0.iter().copied().map(Some).collect();
        let formats = if formats.is_empty() { vec![None] } else { formats };
        let beside =
            |dtype: DType| move |format: &Option<KvFormat>| (dtype, format.filter(|&format| format != dtype.into()));
        dtypes.iter().flat_map(|&dtype| formats.iter().map(beside(dtype))).collect()
    }

    /// A grid of a measure without any axis.
    pub fn of(measure: Measure) -> Self {
        Grid {
            measure,
            kernel: Many::default(),
            context_tokens: Many::default(),
            heads: Many::default(),
            head_dim: Many::default(),
            batch: Many::default(),
            dtype: Many::default(),
            kv_format: Many::default(),
            weights: Many::default(),
            activations: Many::default(),
            causal: yes(),
            window: None,
            softcap: None,
            policy: Many::default(),
            budget: Many::default(),
            memory: Many::default(),
            policy_file: None,
            layers: Many::default(),
            new_tokens: None,
            page_tokens: Many::default(),
            strategy: Many::default(),
            trace: Many::default(),
            maps: None,
            facts: Many::default(),
            episode: Many::default(),
            ranks: Many::default(),
            tuning: Many::default(),
            model: Many::default(),
            task: Many::default(),
            text: None,
            samples: None,
            alone_samples: None,
            protocol: Many::default(),
            chat: false,
            beyond_limit: false,
            seed: Many::default(),
            knobs: Many::default(),
        }
    }
}

fn yes() -> bool {
    true
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
fn is_yes(flag: &bool) -> bool {
    *flag
}

/// An experiment file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The file cannot be read.
    #[error("cannot read experiment '{path}': {reason}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's own words.
        reason: String,
    },
    /// There is no such file, and no shipped experiment of that name.
    #[error("there is no experiment '{path}', neither a file nor a shipped one; {}", match &near[..] {
        [] => "`kvsieve list experiments` lists what is shipped".into(),
        near => format!("near it are {}", near.join(", ")),
    })]
    Unknown {
        /// What was asked for.
        path: PathBuf,
        /// Shipped ones of similar names.
        near: Vec<&'static str>,
    },
    /// The text is not an experiment.
    #[error("{origin}:{line}:{column}: {message}")]
    Syntax {
        /// The file.
        origin: String,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// What was wrong.
        message: String,
    },
    /// A value that makes no sense together with the others.
    #[error("{origin}: {message}")]
    Value {
        /// The file.
        origin: String,
        /// What was wrong.
        message: String,
    },
}

impl Spec {
    /// Reads an experiment file, or a shipped experiment by its name or as `experiments/NAME.toml`.
    ///
    /// # Errors
    /// When there is neither, or the text is not an experiment.
    pub fn load(path: &Path) -> Result<Self, SpecError> {
        let origin = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(&text, &origin),
            Err(error) => {
                let name = origin.strip_prefix("experiments/").unwrap_or(&origin);
                let name = name.strip_suffix(".toml").unwrap_or(name);
                match SHIPPED.iter().find(|(shipped, _)| *shipped == name) {
                    Some((_, text)) => Self::parse(text, &origin),
                    None if path.exists() => Err(SpecError::Read { path: path.into(), reason: error.to_string() }),
                    None => Err(SpecError::Unknown {
                        path: path.into(),
                        near: nearest(name, &SHIPPED.iter().map(|(name, _)| *name).collect::<Vec<_>>()),
                    }),
                }
            }
        }
    }

    /// Reads the text of an experiment; `origin` stands in errors.
    ///
    /// # Errors
    /// When the text is not an experiment; the error names line and column.
    pub fn parse(text: &str, origin: &str) -> Result<Self, SpecError> {
        let spec: Spec = toml::from_str(text).map_err(|error| {
            let (line, column) = place(text, &error);
            let (line, column, message) = match error.message() {
                message if message.contains("`query_aware`") => {
                    let known = Protocol::ALL.map(Protocol::name).join(", ");
                    (line, column, format!("query_aware is gone; use protocol = \"agnostic\", or a list of {known}"))
                }
                message if message.starts_with(UNKNOWN) => unknown_keys(text, error),
                // Which key it is of the line says, and what a number may be its type.
                message if message.starts_with("invalid ") => {
                    let stands = text.lines().nth(line.saturating_sub(1)).unwrap_or_default().trim();
                    let words = message.replace("expected u64", "expected a whole number, 0 or more");
                    let words = words.replace("expected usize", "expected a whole number, 0 or more");
                    let words = words.split('`').map(shortened).collect::<Vec<_>>().join("`");
                    (line, column, format!("{stands}: {}", words.lines().collect::<Vec<_>>().join("; ")))
                }
                message => (line, column, message.lines().collect::<Vec<_>>().join("; ")),
            };
            SpecError::Syntax { origin: origin.into(), line, column, message }
        })?;
        spec.check().map_err(|message| SpecError::Value { origin: origin.into(), message })?;
        Ok(spec)
    }

    fn check(&self) -> Result<(), String> {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
        if self.name.is_empty() || !self.name.chars().all(plain) {
            return Err(format!("name is '{}'; use lower-case letters, digits, '-' and '_'", self.name));
        }
        let Timing { warmups, min_rounds, max_rounds, target, cap_s } = self.timing;
        // Who only lowers the most means that the least goes with it.
        let is_meant = min_rounds != Timing::default().min_rounds;
        if min_rounds == 0 || max_rounds == 0 || is_meant && max_rounds < min_rounds {
            return Err(format!("timing: min_rounds is {min_rounds}, max_rounds {max_rounds}; need 1 <= min <= max"));
        }
        if max_rounds > 10_000 || warmups > 100 {
            return Err(format!("timing: {max_rounds} rounds, {warmups} warm-ups; at most 10000 and 100 make sense"));
        }
        if !(target > 0.0 && target < 1.0 && cap_s > 0.0 && cap_s.is_finite()) {
            return Err(format!("timing: target is {target} (between 0 and 1), cap_s {cap_s} (seconds, above 0)"));
        }
        if self.file.is_some() && self.synthetic.is_some() {
            return Err("both [file] and [synthetic] are given; inputs come from one of them".into());
        }
        if let Some(text) = &self.limit_memory {
            units::parse_bytes(text).map_err(|error| format!("limit_memory: {error}"))?;
        }
        if self.grid.is_empty() {
            return Err("there is no [[grid]]; give at least one".into());
        }
        if self.file.is_some() && self.grid.iter().any(|grid| !grid.knobs.is_empty()) {
            return Err("knobs are of synthetic inputs; these come from a [file]".into());
        }
        self.synthetic.as_ref().map_or(Ok(()), |knobs| knobs.check().map_err(|error| error.to_string()))
    }
}

/// How serde begins what it says of a key that nobody reads.
const UNKNOWN: &str = "unknown field `";

/// A value as a message has it: of a number with hundreds of digits the first ones.
fn shortened(value: &str) -> String {
    const MOST: usize = 40;
    let is_number = value.len() > MOST && value.chars().all(|c| c.is_ascii_digit() || "+-.".contains(c));
    if is_number { format!("{}...", &value[..MOST / 2]) } else { value.into() }
}

/// Line and column of an error, from 1.
fn place(text: &str, error: &toml::de::Error) -> (usize, usize) {
    let before = &text[..error.span().map_or(0, |span| span.start.min(text.len()))];
    (before.matches('\n').count() + 1, before.chars().rev().take_while(|&c| c != '\n').count() + 1)
}

/// All keys that nobody reads, with the place of the first: each is made a comment, and the rest is read again.
fn unknown_keys(text: &str, mut error: toml::de::Error) -> (usize, usize, String) {
    let mut lines: Vec<String> = text.lines().map(String::from).collect();
    let mut found = Vec::new();
    loop {
        let (line, column) = place(&lines.join("\n"), &error);
        let message = error.message().to_string();
        let names: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
        let (key, known) = names.split_first().expect("a key is named");
        let near = nearest(key, known).first().map(|near| format!("{UNKNOWN}{key}` (did you mean `{near}`?)"));
        found.push((line, column, near, message.clone()));
        // Of a table whose error has no place of its own the first key is told.
        let Some(of_key) = lines.get_mut(line - 1).filter(|line| line.trim_start().starts_with(key)) else { break };
        of_key.insert(0, '#');
        match toml::from_str::<Spec>(&lines.join("\n")) {
            Err(next) if next.message().starts_with(UNKNOWN) => error = next,
            _ => break,
        }
    }
    found.sort();
    let (line, column, ..) = found[0];
    let said = found.into_iter().enumerate().map(|(index, (line, _, near, message))| {
        let words = near.unwrap_or(message);
        if index == 0 { words } else { format!("line {line}: {words}") }
    });
    (line, column, said.collect::<Vec<_>>().join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: &str =
        "name = \"x\"\n[[grid]]\nmeasure = \"forward\"\ncontext_tokens = 64\nheads = \"2/1\"\nhead_dim = 8\n";

    #[test]
    fn lengths_are_single_lists_and_ranges() {
        for (text, expected) in [
            ("64", vec![64]),
            ("\"2k\"", vec![2048]),
            ("[64, \"1k\"]", vec![64, 1024]),
            ("\"1k..8k*2\"", vec![1024, 2048, 4096, 8192]),
            ("\"1k..3k+1k\"", vec![1024, 2048, 3072]),
            ("[\"512..1k*2\", 4096]", vec![512, 1024, 4096]),
        ] {
            let spec = Spec::parse(&LEAST.replace("= 64", &format!("= {text}")), "x.toml").unwrap();
            assert_eq!(
                spec.grid[0].context_tokens.0.iter().flat_map(|t| t.lengths.clone()).collect::<Vec<_>>(),
                expected
            );
        }
    }

    #[test]
    fn mistakes_are_named_with_line_and_column() {
        let cases = [
            (LEAST.replace("head_dim", "head_dims"), "x.toml:6:1: unknown field `head_dims`"),
            (
                LEAST.replace("head_dim", "# more\nhead_dims").replace("context_tokens = 64", "kernell = 1\nfoo = [2]"),
                "x.toml:4:1: unknown field `kernell` (did you mean `kernel`?); line 5: unknown field `foo`, expected one of ",
            ),
            (
                LEAST.replace("head_dim", "head_dims").replace("context_tokens", "contextt"),
                "x.toml:4:1: unknown field `contextt` (did you mean `context_tokens`?); line 6: unknown field `head_dims` \
                 (did you mean `head_dim`?)",
            ),
            (LEAST.replace("= 64", "= \"1k..2k\""), "x.toml:4:18: '1k..2k' is not a range"),
            (LEAST.replace("= 64", "= 0"), "x.toml:4:18: '0' is not a token count"),
            (LEAST.replace("= 64", "= []"), "x.toml:4:18: the list is empty"),
            (
                LEAST.replace("\"forward\"", "\"sideways\""),
                "x.toml:3:11: unknown measure 'sideways'; known are forward",
            ),
            (LEAST.replace("= 8\n", "= "), "x.toml:6:"),
            (
                LEAST.replace("\"x\"", "1e308"),
                "x.toml:1:8: name = 1e308: invalid type: floating point `10000000000000000000...`, expected a string",
            ),
            (LEAST.replace("\"x\"", "\"../x\""), "x.toml: name is '../x'"),
            (format!("{LEAST}query_aware = true\n"), "x.toml:7:1: query_aware is gone; use protocol = "),
            (format!("{LEAST}budget = 1.5\n"), "x.toml:7:10: '1.5' is not a budget"),
            (LEAST.replace("[[grid]]", "[timing]\ntarget = 2\n[[grid]]"), "x.toml: timing: target is 2"),
            (LEAST.replace("[[grid]]", "[file]\npath = \"a\"\n[synthetic]\n[[grid]]"), "x.toml: both [file] and"),
            ("name = \"x\"".into(), "x.toml:1:1: missing field `grid`"),
        ];
        for (text, expected) in cases {
            let error = Spec::parse(&text, "x.toml").unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn what_is_written_into_a_run_is_read_back() {
        for (name, text) in SHIPPED {
            let spec = Spec::parse(text, name).unwrap();
            let written = toml::to_string_pretty(&spec).unwrap();
            let again = Spec::parse(&written, name).unwrap();
            assert_eq!(toml::to_string_pretty(&again).unwrap(), written);
        }
    }

    #[test]
    fn shipped_experiments_are_found_by_name_and_path() {
        for (name, _) in SHIPPED {
            assert_eq!(Spec::load(Path::new(name)).unwrap().name, *name);
            assert_eq!(Spec::load(Path::new(&format!("experiments/{name}.toml"))).unwrap().name, *name);
        }
        assert!(Spec::load(Path::new("quickstrt")).unwrap_err().to_string().ends_with("near it are quickstart"));
    }
}
