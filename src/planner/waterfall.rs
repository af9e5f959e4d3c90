//! The waterfall: each term's bytes in each phase, with its formula, the numbers put in, and how it is known; and the
//! verdict, one sentence that names the guilty term.

use super::PlanError;
use super::architecture::KvGroup;
use super::eviction::Eviction;
use super::scenario::{Allocation, Bytes, DEFAULT_OVERHEAD, Logits, Memory, Phase, Scenario};
use crate::policy::Budget;
use crate::units::{gib, grouped};
use serde::Serialize;

/// How a number is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Known {
    /// Counted in the headers of files.
    Exact,
    /// A formula over the shape.
    Formula,
    /// Measured here, or given by the user.
    Measured,
    /// A constant from measurements elsewhere.
    Calibrated,
}

/// How a term grows with the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Growth {
    /// Not at all.
    Constant,
    /// In proportion.
    Linear,
    /// With the square.
    Quadratic,
}

impl Growth {
    fn words(self) -> &'static str {
        match self {
            Growth::Constant => "do not grow with the context",
            Growth::Linear => "grow in proportion to the context",
            Growth::Quadratic => "grow with the square of the context",
        }
    }
}

/// A line of the waterfall.
#[derive(Debug, Clone, Serialize)]
pub struct Term {
    /// Its name.
    pub term: &'static str,
    /// Bytes when weights have been loaded.
    pub load_bytes: u64,
    /// Bytes in the fullest moment of prefill.
    pub prefill_bytes: u64,
    /// Bytes when the last token is decoded.
    pub decode_bytes: u64,
    /// The formula.
    pub formula: &'static str,
    /// The numbers put in, for the fullest phase.
    pub numbers: String,
    /// How it is known.
    pub known: Known,
    /// How it grows.
    pub growth: Growth,
}

impl Term {
    /// Bytes in a phase.
    pub fn bytes(&self, phase: Phase) -> u64 {
        match phase {
            Phase::Load => self.load_bytes,
            Phase::Prefill => self.prefill_bytes,
            Phase::Decode => self.decode_bytes,
        }
    }
}

/// Where memory goes, and whether there is enough.
#[derive(Debug, Clone, Serialize)]
pub struct Waterfall {
    /// Terms that take anything.
    pub terms: Vec<Term>,
    /// Sums of the phases: load, prefill, decode.
    pub total_bytes: [u64; 3],
    /// The fullest phase.
    pub peak_phase: &'static str,
    /// Its sum.
    pub peak_bytes: u64,
    /// What is there.
    pub available_bytes: u64,
    /// Whether it fits.
    pub fits: bool,
    /// The largest context that fits; `None` when none does.
    pub max_context_tokens: Option<u64>,
    /// The guilty term: the largest of the fullest phase.
    pub guilty_term: &'static str,
    /// One sentence.
    pub verdict: String,
}

impl Scenario<'_> {
    /// All terms and the verdict.
    ///
    /// # Errors
    /// When the scenario cannot be, or its bytes are beyond any memory.
    pub fn waterfall(&self) -> Result<Waterfall, PlanError> {
        self.check()?;
        let phases = Phase::ALL.map(|phase| self.bytes_at(phase, self.context));
        let [load, prefill, decode] = phases;
        let phases = [load?, prefill?, decode?];
        let (phase, peak) = self.peak(self.context)?;
        let cells = phases.map(|bytes| bytes.terms());
        let terms: Vec<Term> = (0..cells[0].len())
            .map(|place| {
                let term = cells[0][place].0;
                let [load_bytes, prefill_bytes, decode_bytes] = cells.map(|cells| cells[place].1 as u64);
                // Where the fullest phase has none of it, the phase that has most.
                let of = |phase: Phase| cells[phase as usize][place].1;
                let fullest = Phase::ALL.into_iter().max_by_key(|&other| of(other));
                let most = fullest.filter(|_| of(phase) == 0).unwrap_or(phase);
                let (formula, numbers, known, growth) = self.explain(term, most, &phases[most as usize]);
                Term { term, load_bytes, prefill_bytes, decode_bytes, formula, numbers, known, growth }
            })
            .filter(|term| Phase::ALL.iter().any(|&phase| term.bytes(phase) > 0))
            .collect();
        let guilty = terms.iter().max_by_key(|term| term.bytes(phase)).expect("weights take something");
        let max_context_tokens = self.max_context()?;
        let available_bytes = self.memory.bytes();
        let peak_bytes = peak.total() as u64;
        let fits = peak_bytes <= available_bytes;
        Ok(Waterfall {
            total_bytes: phases.map(|bytes| bytes.total() as u64),
            peak_phase: phase.name(),
            peak_bytes,
            available_bytes,
            fits,
            max_context_tokens,
            guilty_term: guilty.term,
            verdict: self.verdict(phase, &peak, guilty, max_context_tokens),
            terms,
        })
    }

    fn verdict(&self, phase: Phase, peak: &Bytes, guilty: &Term, most: Option<u64>) -> String {
        let (need, there) = (gib(peak.total()), gib(u128::from(self.memory.bytes())));
        let tokens = grouped(u128::from(self.context));
        let share = gib(u128::from(guilty.bytes(phase)));
        let name = title(guilty.term);
        let growth = guilty.growth.words();
        let cliff = match most {
            Some(most) if most >= super::search::MOST => "No context is too long.".into(),
            Some(most) => format!("The cliff is at {} tokens.", grouped(u128::from(most))),
            None => "No context fits.".into(),
        };
        let batch = if self.batch > 1 { format!(" of {} sequences each", self.batch) } else { String::new() };
        let margin = match peak.total() <= u128::from(self.memory.bytes()) {
            true => format!("fits, and {} GiB stay free", gib(u128::from(self.memory.bytes()) - peak.total())),
            false => "does not fit".into(),
        };
        format!(
            "At {tokens} tokens{batch} {} needs {need} GiB; {there} are there: it {margin}. {name} take {share} GiB of \
             it and {growth}. {cliff}{}{}",
            phase.name(),
            self.made_for(self.context).map_or(String::new(), |most| format!(" The model was made for {most} tokens.")),
            self.as_published()
        )
    }

    /// That weights are as their makers published them, where that is not in 16 bits.
    fn as_published(&self) -> String {
        let Some(format) = self.weights.filter(|format| self.subject.published() == Some(*format)) else {
            return String::new();
        };
        let plain = Scenario { weights: None, ..self.clone() }.weight_bytes();
        format!(" Weights are in {}, as published; in bf16 they take {} GiB.", format.name, gib(plain))
    }

    /// Tokens that the model was made for, where these are more; bytes are counted all the same.
    pub fn made_for(&self, tokens: u64) -> Option<String> {
        let most = self.subject.architecture.context as u64;
        (tokens > most).then(|| grouped(u128::from(most)))
    }

    /// Formula, numbers put in, how it is known and how it grows.
    pub fn explain(&self, term: &str, phase: Phase, at: &Bytes) -> (&'static str, String, Known, Growth) {
        let subject = self.subject;
        let batch = match term {
            "kv" | "slack" => self.held(),
            "workspace" if self.evicting().is_none() => self.opened(phase),
            _ if phase == Phase::Decode => self.held(),
            _ => self.batch,
        };
        let tokens = if phase == Phase::Decode { 1 } else { self.pass_tokens(self.context) };
        let n = |count: u64| grouped(u128::from(count));
        let bounded = |growth| if self.is_bounded(phase) { Growth::Constant } else { growth };
        // Whether a pass of a context twice as long has more rows.
        let is_whole = self.pass_tokens(2 * self.context) > self.pass_tokens(self.context);
        let rows = if is_whole && phase != Phase::Decode { bounded(Growth::Linear) } else { Growth::Constant };
        // Lists that are as long as their windows grow no further.
        let is_full =
            subject.groups.iter().all(|group| group.window.is_some_and(|window| window as u64 <= self.context));
        let held_growth = if is_full { Growth::Constant } else { bounded(Growth::Linear) };
        let times = if batch > 1 { format!(" x {batch} sequences") } else { String::new() };
        let cards = if self.tensor_parallel * self.pipeline > 1 { " of the fullest card" } else { "" };
        match term {
            "weights" => {
                let (known, numbers) = match (self.weights, subject.held) {
                    (None, Some(held)) => (Known::Exact, format!("{} B of tensors in its files", n(held.total()))),
                    (format, _) => {
                        let name = format.map_or("bf16", |format| &format.name);
                        (Known::Formula, format!("{} parameters in {name}", n(subject.parameters)))
                    }
                };
                let cards = self.tensor_parallel * self.pipeline;
                let shared = if cards > 1 { format!(", over {cards} cards") } else { String::new() };
                let gone =
                    if self.offload > 0 { format!(", {} layers on the host", self.offload) } else { String::new() };
                ("sum over tensors of elements x bits / 8", format!("{numbers}{shared}{gone}"), known, Growth::Constant)
            }
            "cold start" => (
                "largest matrix x 2 B, while it is quantised",
                format!("{} elements x 2 B", n(subject.largest_matrix())),
                Known::Formula,
                Growth::Constant,
            ),
            "kv" => {
                let (token, states) = (self.card_token_bytes(), self.card_state_bytes());
                let state = match states {
                    0 => String::new(),
                    bytes => format!(" + states of {} B{times}", n(bytes)),
                };
                let has_windows = subject.groups.iter().any(|group| group.window.is_some());
                let average = if has_windows { " on average" } else { "" };
                let part = |(sequences, tokens): (u64, u64)| {
                    let mut part = Bytes::default();
                    self.add_cache(&mut part, 1, tokens, self.context);
                    let tokens = (part.kv - u128::from(states)) / u128::from(token.max(1));
                    let times = if sequences > 1 { format!(" x {sequences} sequences") } else { String::new() };
                    format!("{} tokens{average}{times}", grouped(tokens))
                };
                let parts = self.lists_hold(phase, self.context).unwrap_or_default();
                let held = parts.iter().copied().map(part).collect::<Vec<_>>().join(" + ");
                let held = if parts.len() > 1 { format!("({held})") } else { held };
                let retained = match self.retained(self.context) {
                    Ok(tokens) if phase == Phase::Prefill && tokens < self.context => {
                        format!("; {} retains {} of {}", self.policy(), n(tokens), n(self.context))
                    }
                    _ => String::new(),
                };
                let numbers = format!("{} B a token{cards} in {} x {held}{state}{retained}", n(token), self.kv);
                let formula = "sum over layers of Hkv x (key row + value row) x min(tokens, window)";
                (formula, numbers, Known::Formula, held_growth)
            }
            "scores" => {
                let heads = (subject.heads as u64).div_ceil(self.tensor_parallel);
                let row = self.attention.score_bytes() * heads;
                let keys = at.scores / (u128::from(row) * u128::from(tokens * batch)).max(1);
                let numbers = format!(
                    "{} B x {heads} heads{cards} x {} queries x {} keys{times}",
                    self.attention.score_bytes(),
                    n(tokens),
                    grouped(keys)
                );
                // Where all have windows, as many as there are keys in a pass: there are no more however long the context is.
                let full = |group: &KvGroup| group.window.is_some_and(|window| window as u64 + tokens <= self.context);
                let has_windows = subject.groups.iter().all(full);
                let growth = match rows {
                    Growth::Linear => Growth::Quadratic,
                    _ if has_windows => Growth::Constant,
                    _ => Growth::Linear,
                };
                ("B x Hq x Lq x Lk x bytes of a score, of one layer", numbers, Known::Formula, bounded(growth))
            }
            "activations" => {
                let per_token = at.activations / u128::from((tokens * batch).max(1));
                let numbers = format!("{} tokens x {} B{times}", n(tokens), grouped(per_token));
                ("tokens of a pass x (stream, norm, gate, up, product)", numbers, Known::Formula, rows)
            }
            "logits" => {
                let (count, growth) = match self.logits {
                    Logits::Last => (1, Growth::Constant),
                    Logits::All => (tokens, rows),
                };
                let bytes = at.logits / (u128::from(count * batch) * subject.vocab as u128).max(1);
                let numbers = format!("{} rows x {} tokens x {bytes} B{times}", n(count), n(subject.vocab as u64));
                ("rows x vocabulary x bytes of a logit", numbers, Known::Formula, growth)
            }
            "workspace" if self.evicting().is_none() => {
                let [once, twice] = [1, 2].map(|times| self.index_bytes(times * self.context).unwrap_or(0));
                let growth = if twice > once { Growth::Linear } else { Growth::Constant };
                let numbers = format!("{}: {} B a sequence{cards}{times}", self.policy(), grouped(once));
                ("what a policy chooses by what a step reads, of each list", numbers, Known::Formula, growth)
            }
            "workspace" => (
                "scores of a policy: 4 B x B x Hkv x keys",
                format!("{}{times}", self.policy()),
                Known::Formula,
                bounded(Growth::Linear),
            ),
            "metadata" => (
                "page table: 4 B a page of each list",
                format!("{} lists a sequence", self.lists()),
                Known::Formula,
                held_growth,
            ),
            "slack" => {
                let (numbers, growth) = match self.allocation {
                    Allocation::Exact => (String::new(), Growth::Constant),
                    Allocation::Paged(page) => (format!("pages of {page} tokens{times}"), Growth::Constant),
                    Allocation::Reserved(most) => {
                        let most = most.unwrap_or(self.context + self.output);
                        // Room for all of a context, of which a policy retains a part: after each chunk, or behind the prompt.
                        let evicts = |eviction: &Eviction| {
                            eviction.chunk_tokens().is_some() || phase == Phase::Decode || self.held() > self.batch
                        };
                        let grows = self.evicting().is_some_and(evicts)
                            && matches!(self.allocation, Allocation::Reserved(None));
                        let growth = if grows { Growth::Linear } else { Growth::Constant };
                        (format!("{} tokens reserved{times}", n(most)), growth)
                    }
                };
                ("room for tokens that is taken and empty", numbers, Known::Formula, growth)
            }
            _ => {
                let (bytes, known, from) = match self.overhead_bytes {
                    Some(bytes) => (bytes, Known::Measured, "given or measured"),
                    None => (DEFAULT_OVERHEAD, Known::Calibrated, "the default"),
                };
                let numbers = format!("{} B, {from}", n(bytes));
                ("context, libraries, other processes", numbers, known, Growth::Constant)
            }
        }
    }

    /// Whether what is held does not grow with the context: a budget of tokens that is reached, behind the prompt or by what comes
    /// between the policy's chunks.
    fn is_bounded(&self, phase: Phase) -> bool {
        let evicting = self.evicting().filter(|eviction| !matches!(eviction.budget, Budget::Fraction(_)));
        let more = evicting.and_then(|eviction| if phase == Phase::Decode { Some(1) } else { eviction.chunk_tokens() });
        let is_reached = |more: u64| self.retained(self.context).is_ok_and(|tokens| tokens + more <= self.context);
        more.is_some_and(is_reached)
    }

    fn lists(&self) -> usize {
        self.subject.groups.iter().map(|group| group.layers * group.heads).sum()
    }

    fn policy(&self) -> String {
        self.eviction.as_ref().map_or(String::new(), Eviction::to_string)
    }

    /// What is asked, in one line.
    pub fn words(&self) -> String {
        let card = match self.memory {
            Memory::Gpu(gpu) => format!("{} ({} MiB)", gpu.name, grouped(u128::from(gpu.mib))),
            Memory::Bytes(bytes) if bytes >= 1 << 60 => "any card".into(),
            Memory::Bytes(bytes) | Memory::Host(bytes) => format!("{} GiB", gib(u128::from(bytes))),
        };
        let cards = self.tensor_parallel * self.pipeline;
        let cards = if cards > 1 { format!("{cards} x ") } else { String::new() };
        let weights = match (self.weights, self.subject.held) {
            (Some(format), _) => &format.name,
            (None, Some(_)) => "its files'",
            (None, None) => "bf16",
        };
        let chunk = self.pass_tokens(self.context);
        let chunk =
            if chunk < self.context { format!(" in chunks of {}", grouped(u128::from(chunk))) } else { String::new() };
        let attention = self.attention.name();
        let policy = self.eviction.as_ref().map_or(String::new(), |_| format!(", {}", self.policy()));
        let held = if self.held() > self.batch { format!(", {} held at once", self.held()) } else { String::new() };
        format!(
            "{} on {cards}{card}: {} x {} tokens{chunk}{held}, {} more, {attention} attention, {weights} weights, {} KV{policy}",
            self.subject.name,
            self.batch,
            grouped(u128::from(self.context)),
            grouped(u128::from(self.output)),
            self.kv
        )
    }
}

/// A term's name at the beginning of a sentence.
fn title(term: &str) -> &'static str {
    match term {
        "weights" => "Weights",
        "cold start" => "Conversions at the load",
        "kv" => "Keys and values",
        "scores" => "Scores",
        "activations" => "Activations",
        "logits" => "Logits",
        "workspace" => "Workspaces",
        "metadata" => "Page tables",
        "slack" => "Empty places",
        _ => "Context and libraries",
    }
}
