//! Levers: what could be changed, what each gains in context, and what it costs in accuracy and time.
//!
//! A lever's price adds up what it spends: the logarithm of how much longer a sequence takes (its share of prompt and 256 more
//! tokens, by the roofline; 1 for layers on the host of a card whose speed is not known), ten times its KL divergence, 1 where
//! that was never measured, 2 for each doubling of cards, 0.1 for each halving of the sequences that are held at once (the others
//! wait; the time that all take is in the first term), and 0.01 for being a change at all. Levers are ranked by gained context
//! (log2 of the factor) per price.

use super::PlanError;
use super::eviction::Eviction;
use super::presets::{LOSSES, MODELS, Measured, WEIGHT_FORMATS};
use super::roofline::REACHED;
use super::scenario::{Allocation, Attention, Logits, Memory, Scenario};
use super::source::{Source, Subject};
use crate::units::{counted, grouped};
use serde::Serialize;

/// What a lever does to results.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "loss", rename_all = "kebab-case")]
pub enum Loss {
    /// Nothing beyond rounding.
    None,
    /// KL divergence of a real model's next token from that with its full cache, in a record.
    Measured {
        /// Nats for each token.
        kl_nats: f64,
        /// The experiment in `results/reference/`.
        experiment: &'static str,
    },
    /// Unknown here.
    NotMeasured,
}

/// A change of a scenario.
pub struct Lever<'a> {
    /// In words.
    pub name: String,
    /// At most one of a kind is used.
    pub(super) kind: &'static str,
    /// What it does to results.
    pub loss: Loss,
    /// What is spent besides time and accuracy: cards, and sequences that wait.
    spent: f64,
    /// The changed scenario, of this scenario.
    change: Box<dyn Fn(&mut Scenario<'a>) + 'a>,
}

/// A lever, and what it does.
#[derive(Debug, Clone, Serialize)]
pub struct Ranked {
    /// In words.
    pub lever: String,
    /// What it changes; of a kind one is used.
    pub kind: &'static str,
    /// The largest context that then fits.
    pub max_context_tokens: Option<u64>,
    /// Peak at the context that was asked for.
    pub peak_bytes: u64,
    /// How much longer a sequence takes, its share of what goes through together; `None` where nothing is known of the card's
    /// speed.
    pub time_factor: Option<f64>,
    /// What it does to results.
    #[serde(flatten)]
    pub loss: Loss,
    /// What it costs.
    pub price: f64,
    /// Gained context per price.
    pub gain_per_price: f64,
}

/// Tokens that a request is given when its time is compared.
const REQUEST_TOKENS: u64 = 256;

/// The kind of levers that hold fewer sequences than were asked for.
pub(super) const HELD: &str = "held";

/// Kinds of which the last lever takes least, whatever else is changed; that of fewer sequences is the last of them.
pub(super) const GRADED: [&str; 6] = ["attention", "chunk", "logits", "kv", "offload", HELD];

/// The kind of levers that take more cards.
const CARDS: &str = "cards";

/// Price of a halving of the sequences that are held at once.
const HALVING: f64 = 0.1;

/// Price of twice the cards.
const DOUBLING: f64 = 2.0;

/// Twice as many cards, and so on: a node has 8.
const DOUBLINGS: u32 = 3;

/// Policies that are offered, with their budgets: the records' best that evict while the prompt is read, and after it.
const POLICIES: [(&str, &str); 6] = [
    ("snapkv+chunks:tokens=512", "0.25"),
    ("snapkv+chunks:tokens=512", "0.125"),
    ("h2o+chunks:tokens=512", "0.25"),
    ("snapkv", "0.25"),
    ("h2o", "0.25"),
    ("streaming-llm", "0.25"),
];

/// Formats of keys and values that are offered.
const KV_FORMATS: [&str; 5] = ["q8_0", "int8", "fp8-e4m3", "k=q8_0,v=q4_0", "q4_0"];

/// What the records say of a policy at a budget.
pub fn of_policy(policy: &str, budget: &str) -> Loss {
    measured(|cell| cell.policy.as_deref() == Some(policy) && cell.budget.as_deref() == Some(budget))
}

/// What the records say of keys and values in a format.
pub fn of_kv_format(format: &str) -> Loss {
    measured(|cell| cell.kv_format.as_deref() == Some(format))
}

/// What the records say of weights in a format.
pub fn of_weights(format: &str) -> Loss {
    measured(|cell| cell.weights.as_deref() == Some(format))
}

fn measured(is_it: impl Fn(&Measured) -> bool) -> Loss {
    let found = LOSSES.iter().find(|cell| is_it(cell));
    found.map_or(Loss::NotMeasured, |found| Loss::Measured { kl_nats: found.kl_nats, experiment: &found.experiment })
}

/// Presets of the same extents with fewer KV heads than a model that has as many as query heads.
pub fn siblings(subject: &Subject) -> Vec<Subject> {
    let shape = &subject.architecture;
    let alike = MODELS.iter().filter(|other| {
        shape.kv_heads == shape.heads
            && shape.mla.is_none()
            && other.kv_heads < shape.kv_heads
            && (other.layers, other.hidden, other.heads) == (shape.layers, shape.hidden, shape.heads)
            && other.window.is_none()
            && other.experts == shape.experts
    });
    alike.take(1).filter_map(|other| Subject::new(other.clone(), Source::Preset, None).ok()).collect()
}

/// Every lever that changes something of a scenario.
///
/// # Errors
/// When a policy cannot be built, which the tests hold.
pub fn levers<'a>(scenario: &Scenario<'a>, siblings: &'a [Subject]) -> Result<Vec<Lever<'a>>, PlanError> {
    let mut levers: Vec<Lever<'a>> = Vec::new();
    let is_host = matches!(scenario.memory, Memory::Host(_));
    let mut add = |kind, name: String, loss, change: Box<dyn Fn(&mut Scenario<'a>) + 'a>| {
        levers.push(Lever { name, kind, loss, spent: 0.0, change });
    };
    if scenario.attention != Attention::Tiled {
        let change = |scenario: &mut Scenario<'a>| scenario.attention = Attention::Tiled;
        add("attention", "tiled attention".into(), Loss::None, Box::new(change));
    }
    for chunk in [2048, 512].into_iter().filter(|&chunk| chunk < scenario.pass_tokens(super::search::MOST)) {
        let change = move |scenario: &mut Scenario<'a>| scenario.chunk = Some(chunk);
        add("chunk", format!("prefill in chunks of {chunk}"), Loss::None, Box::new(change));
    }
    if scenario.logits == Logits::All {
        let change = |scenario: &mut Scenario<'a>| scenario.logits = Logits::Last;
        add("logits", "logits of the last token only".into(), Loss::None, Box::new(change));
    }
    for format in KV_FORMATS {
        let kv = format.parse()?;
        let smaller = Scenario { kv, ..scenario.clone() };
        if smaller.kv.check(&smaller.subject.groups).is_ok() && smaller.kv_token_bytes() < scenario.kv_token_bytes() {
            let change = move |scenario: &mut Scenario<'a>| scenario.kv = kv;
            add("kv", format!("keys and values in {format}"), of_kv_format(format), Box::new(change));
        }
    }
    if scenario.eviction.is_none() {
        for (policy, budget) in POLICIES {
            let eviction = Eviction::of(policy, budget.parse()?)?;
            let change = move |scenario: &mut Scenario<'a>| scenario.eviction = Some(eviction.clone());
            add("eviction", format!("{policy}, {budget} kept"), of_policy(policy, budget), Box::new(change));
        }
    }
    if let Allocation::Reserved(_) = scenario.allocation {
        let change = |scenario: &mut Scenario<'a>| scenario.allocation = Allocation::Paged(16);
        add("allocation", "pages of 16 tokens".into(), Loss::None, Box::new(change));
    }
    let held = scenario.subject.weight_bytes(scenario.weights).total();
    for format in
        WEIGHT_FORMATS.iter().filter(|format| ["fp8", "q8_0", "nf4", "q4_k_m"].contains(&format.name.as_str()))
    {
        if scenario.subject.weight_bytes(Some(format)).total() < held {
            let change = move |scenario: &mut Scenario<'a>| scenario.weights = Some(format);
            add("weights", format!("weights in {}", format.name), of_weights(&format.name), Box::new(change));
        }
    }
    for count in halvings(scenario.batch) {
        // As many are held as before.
        let change = move |scenario: &mut Scenario<'a>| {
            scenario.concurrency = scenario.held();
            scenario.batch = scenario.batch.min(count);
        };
        add("batch", format!("prompts read {} at a time", grouped(u128::from(count))), Loss::None, Box::new(change));
    }
    let layers = scenario.subject.layers as u64;
    for part in [layers / 4, layers / 2, layers].into_iter().filter(|&part| part > scenario.offload && !is_host) {
        let change = move |scenario: &mut Scenario<'a>| scenario.offload = part;
        add("offload", format!("{part} of {layers} layers on the host"), Loss::None, Box::new(change));
    }
    for sibling in siblings {
        let change = move |scenario: &mut Scenario<'a>| scenario.subject = sibling;
        add("sibling", format!("{} in its place (GQA)", sibling.name), Loss::NotMeasured, Box::new(change));
    }
    for (count, halved) in halvings(scenario.held()).zip(1..) {
        let change = move |scenario: &mut Scenario<'a>| {
            scenario.concurrency = count;
            scenario.batch = scenario.batch.min(count);
        };
        let name = format!("{} held at once", counted(count, "sequence"));
        let spent = HALVING * f64::from(halved);
        levers.push(Lever { name, kind: HELD, loss: Loss::None, spent, change: Box::new(change) });
    }
    for doublings in (1..=DOUBLINGS).filter(|_| !is_host) {
        let mut add = |name: String, change: Box<dyn Fn(&mut Scenario<'a>) + 'a>| {
            let spent = DOUBLING * f64::from(doublings);
            levers.push(Lever { name, kind: CARDS, loss: Loss::None, spent, change });
        };
        let (tensor, stages) = (scenario.tensor_parallel << doublings, scenario.pipeline << doublings);
        let cards = (scenario.tensor_parallel * scenario.pipeline) << doublings;
        if tensor <= scenario.subject.heads as u64 {
            let part = if scenario.pipeline > 1 { format!(", {tensor} to") } else { " that share".into() };
            let change = move |scenario: &mut Scenario<'a>| scenario.tensor_parallel = tensor;
            add(format!("{cards} cards{part} each layer"), Box::new(change));
        }
        if stages <= layers {
            let part =
                if scenario.tensor_parallel > 1 { format!(" in {stages} parts of") } else { " that share".into() };
            let change = move |scenario: &mut Scenario<'a>| scenario.pipeline = stages;
            add(format!("{cards} cards{part} the layers"), Box::new(change));
        }
    }
    Ok(levers)
}

impl<'a> Lever<'a> {
    /// The scenario with the lever pulled.
    pub(super) fn pulled(&self, scenario: &Scenario<'a>) -> Scenario<'a> {
        let mut changed = scenario.clone();
        (self.change)(&mut changed);
        changed
    }

    /// What it costs besides time.
    pub(super) fn cost(&self) -> f64 {
        let loss = match self.loss {
            Loss::None => 0.0,
            Loss::Measured { kl_nats, .. } => 10.0 * kl_nats,
            Loss::NotMeasured => 1.0,
        };
        0.01 + loss + self.spent
    }
}

/// What the time of levers costs.
pub(super) fn time_price(levers: &[&Lever<'_>], time_factor: Option<f64>) -> f64 {
    // Nothing else that is offered makes a sequence take so much longer.
    let unknown = if levers.iter().any(|lever| lever.kind == "offload") { 1.0 } else { 0.0 };
    time_factor.map_or(unknown, |factor| factor.ln().max(0.0))
}

/// Halves, and halves of these, down to one.
fn halvings(count: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(count / 2), |count| Some(count / 2)).take_while(|&count| count > 0)
}

/// How much longer a sequence takes after a change, where that is known.
pub(super) fn time_factor(before: &Scenario<'_>, after: &Scenario<'_>) -> Result<Option<f64>, PlanError> {
    let of = |scenario: &Scenario<'_>| {
        Ok::<_, PlanError>(scenario.times(REACHED)?.map(|times| times.sequence_s(scenario, REQUEST_TOKENS)))
    };
    Ok(of(before)?.zip(of(after)?).map(|(before, after)| after / before))
}

/// Nothing for a lever whose budget leaves no token of the context.
fn possible<T>(answer: Result<T, PlanError>) -> Result<Option<T>, PlanError> {
    match answer {
        Err(PlanError::Budget(_)) => Ok(None),
        answer => answer.map(Some),
    }
}

/// Levers that gain context or free memory, the most gained per price first.
///
/// # Errors
/// When the budget leaves no token.
pub fn rank<'a>(scenario: &Scenario<'a>, siblings: &'a [Subject]) -> Result<Vec<Ranked>, PlanError> {
    let (most, peak_before) = (scenario.max_context()?, scenario.peak(scenario.context)?.1.total());
    let (mut ranked, mut enough) = (Vec::new(), f64::INFINITY);
    for lever in levers(scenario, siblings)? {
        // More cards than are enough help no more.
        if lever.kind == CARDS && lever.spent > enough {
            continue;
        }
        let changed = lever.pulled(scenario);
        let Some((_, peak)) = possible(changed.peak(changed.context))? else { continue };
        let (max_context_tokens, peak_bytes) = (changed.max_context()?, peak.total());
        if lever.kind == CARDS && peak_bytes <= u128::from(changed.memory.bytes()) {
            enough = lever.spent;
        }
        if max_context_tokens <= most && peak_bytes >= peak_before {
            continue;
        }
        let time_factor = time_factor(scenario, &changed)?;
        let price = lever.cost() + time_price(&[&lever], time_factor);
        let gained = max_context_tokens.unwrap_or(0).max(1) as f64 / most.unwrap_or(1) as f64;
        ranked.push(Ranked {
            lever: lever.name.clone(),
            kind: lever.kind,
            max_context_tokens,
            peak_bytes: u64::try_from(peak_bytes).unwrap_or(u64::MAX),
            time_factor,
            loss: lever.loss.clone(),
            price,
            gain_per_price: gained.log2() / price,
        });
    }
    ranked.sort_by(|a, b| b.gain_per_price.total_cmp(&a.gain_per_price).then(a.peak_bytes.cmp(&b.peak_bytes)));
    Ok(ranked)
}

/// Levers one on top of the other, each the one that then gains most context for its price and none of a kind twice: what is
/// pulled, and the largest context that fits with it and all before it.
///
/// # Errors
/// When the budget leaves no token.
pub fn together<'a>(scenario: &Scenario<'a>, siblings: &'a [Subject]) -> Result<Vec<(String, u64)>, PlanError> {
    let (mut scenario, mut used, mut steps) = (scenario.clone(), Vec::new(), Vec::new());
    loop {
        let before = scenario.max_context()?.unwrap_or(0);
        let mut best: Option<(f64, u64, Lever<'a>)> = None;
        for lever in levers(&scenario, siblings)?.into_iter().filter(|lever| !used.contains(&lever.kind)) {
            let changed = lever.pulled(&scenario);
            let Some(after) = possible(changed.max_context())? else { continue };
            let after = after.unwrap_or(0);
            let price = lever.cost() + time_price(&[&lever], time_factor(&scenario, &changed)?);
            let gain = (after as f64 / before.max(1) as f64).log2() / price;
            if after > before && best.as_ref().is_none_or(|(most, ..)| gain > *most) {
                best = Some((gain, after, lever));
            }
        }
        let Some((_, after, lever)) = best else { return Ok(steps) };
        steps.push((lever.name.clone(), after));
        used.push(lever.kind);
        scenario = lever.pulled(&scenario);
    }
}
