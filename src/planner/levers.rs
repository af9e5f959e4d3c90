//! Levers: what could be changed, what each gains in context, and what it costs in accuracy and time.
//!
//! A lever's price adds up what it spends: the logarithm of how much longer a sequence takes (its share of prompt and 256 more
//! tokens, by the roofline; 1 for layers on the host of a card whose speed is not known), ten times its KL divergence, 1 where
//! that was never measured, 2 for each doubling of cards, and 0.01 for being a change at all. Levers are ranked by gained
//! context (log2 of the factor) per price. A search over one lever of each kind finds the set of least price that fits a
//! context.

use super::PlanError;
use super::eviction::Eviction;
use super::presets::{LOSSES, MODELS, Measured, WEIGHT_FORMATS};
use super::roofline::REACHED;
use super::scenario::{Allocation, Attention, Logits, Memory, Scenario};
use super::search::MOST;
use super::source::{Source, Subject};
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
    kind: &'static str,
    /// What it does to results.
    pub loss: Loss,
    /// Doublings of cards.
    doublings: u32,
    /// The changed scenario, of this scenario.
    change: Box<dyn Fn(&mut Scenario<'a>) + 'a>,
}

/// A lever, and what it does.
#[derive(Debug, Clone, Serialize)]
pub struct Ranked {
    /// In words.
    pub lever: String,
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
        levers.push(Lever { name, kind, loss, doublings: 0, change });
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
    if scenario.batch > 1 {
        let half = scenario.batch / 2;
        let change = move |scenario: &mut Scenario<'a>| scenario.batch = half;
        add("batch", format!("batch of {half}"), Loss::None, Box::new(change));
    }
    if scenario.concurrency > scenario.batch {
        let half = (scenario.concurrency / 2).max(scenario.batch);
        let change = move |scenario: &mut Scenario<'a>| scenario.concurrency = half;
        add("concurrency", format!("{half} sequences held at once"), Loss::None, Box::new(change));
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
    for doublings in (1..=3u32).filter(|_| !is_host) {
        let mut add = |name: String, change: Box<dyn Fn(&mut Scenario<'a>) + 'a>| {
            levers.push(Lever { name, kind: "cards", loss: Loss::None, doublings, change });
        };
        let (tensor, stages) = (scenario.tensor_parallel << doublings, scenario.pipeline << doublings);
        let cards = (scenario.tensor_parallel * scenario.pipeline) << doublings;
        if tensor <= scenario.subject.heads as u64 {
            let part = if scenario.pipeline > 1 { format!(", {tensor} to") } else { " that share".into() };
            let change = move |scenario: &mut Scenario<'a>| scenario.tensor_parallel = tensor;
            add(format!("{cards} cards{part} each layer"), Box::new(change));
        }
        if stages <= layers && doublings == 1 {
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
    fn pulled(&self, scenario: &Scenario<'a>) -> Scenario<'a> {
        let mut changed = scenario.clone();
        (self.change)(&mut changed);
        changed
    }

    /// How much longer a sequence takes, where that is known.
    fn time_factor(&self, scenario: &Scenario<'a>) -> Result<Option<f64>, PlanError> {
        time_factor(scenario, &self.pulled(scenario))
    }

    /// What it costs.
    fn price(&self, time_factor: Option<f64>) -> f64 {
        // Nothing else that is offered makes a sequence take so much longer.
        let unknown = if self.kind == "offload" { 1.0 } else { 0.0 };
        let loss = match self.loss {
            Loss::None => 0.0,
            Loss::Measured { kl_nats, .. } => 10.0 * kl_nats,
            Loss::NotMeasured => 1.0,
        };
        0.01 + loss + 2.0 * f64::from(self.doublings) + time_factor.map_or(unknown, |factor| factor.ln().max(0.0))
    }
}

/// How much longer a sequence takes after a change, where that is known.
fn time_factor(before: &Scenario<'_>, after: &Scenario<'_>) -> Result<Option<f64>, PlanError> {
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
    let mut ranked = Vec::new();
    // More than twice the cards gain no more for their price.
    for lever in levers(scenario, siblings)?.into_iter().filter(|lever| lever.doublings <= 1) {
        let changed = lever.pulled(scenario);
        let Some((_, peak)) = possible(changed.peak(changed.context))? else { continue };
        let (max_context_tokens, peak_bytes) = (changed.max_context()?, peak.total());
        if max_context_tokens <= most && peak_bytes >= peak_before {
            continue;
        }
        let time_factor = lever.time_factor(scenario)?;
        let price = lever.price(time_factor);
        let gained = max_context_tokens.unwrap_or(0).max(1) as f64 / most.unwrap_or(1) as f64;
        ranked.push(Ranked {
            lever: lever.name.clone(),
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
            let Some(after) = possible(lever.pulled(&scenario).max_context())? else { continue };
            let after = after.unwrap_or(0);
            let gain = (after as f64 / before.max(1) as f64).log2() / lever.price(lever.time_factor(&scenario)?);
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

/// The set of levers of least price with which a context fits.
#[derive(Debug, Clone, Serialize)]
pub struct Remedy {
    /// The context.
    pub target_context_tokens: u64,
    /// The levers; none where it fits as it is.
    pub levers: Vec<String>,
    /// What they do to results.
    pub losses: Vec<Loss>,
    /// Their prices, added up.
    pub price: f64,
    /// Peak at the target.
    pub peak_bytes: u64,
    /// The largest context that fits with them.
    pub max_context_tokens: Option<u64>,
    /// How much longer a sequence takes.
    pub time_factor: Option<f64>,
}

/// Searches one lever of each kind for the set of least price with which `target` tokens fit; `None` when no set is enough.
///
/// # Errors
/// When the budget leaves no token.
pub fn remedy<'a>(scenario: &Scenario<'a>, target: u64, siblings: &'a [Subject]) -> Result<Option<Remedy>, PlanError> {
    let start = Scenario { context: target.min(MOST), ..scenario.clone() };
    let mut levers = levers(&start, siblings)?;
    levers.retain(|lever| lever.pulled(&start).peak(start.context).is_ok());
    let priced = levers.iter().map(|lever| Ok((lever, lever.price(lever.time_factor(&start)?))));
    let priced: Vec<(&Lever<'a>, f64)> = priced.collect::<Result<_, PlanError>>()?;
    let mut kinds: Vec<&str> = priced.iter().map(|(lever, _)| lever.kind).collect();
    kinds.dedup();
    let kinds: Vec<Vec<(&Lever<'a>, f64)>> =
        kinds.iter().map(|kind| priced.iter().filter(|(lever, _)| lever.kind == *kind).copied().collect()).collect();
    let mut search = Search { kinds: &kinds, best: None };
    search.go(0, &start, 0.0, &mut Vec::new())?;
    let Some((price, used)) = search.best else { return Ok(None) };
    let changed = used.iter().fold(start.clone(), |scenario, lever| lever.pulled(&scenario));
    Ok(Some(Remedy {
        target_context_tokens: start.context,
        levers: used.iter().map(|lever| lever.name.clone()).collect(),
        losses: used.iter().map(|lever| lever.loss.clone()).collect(),
        price,
        peak_bytes: u64::try_from(changed.peak(start.context)?.1.total()).unwrap_or(u64::MAX),
        max_context_tokens: changed.max_context()?,
        time_factor: time_factor(&start, &changed)?,
    }))
}

/// A search in depth, cut where the price is no longer the best.
struct Search<'s, 'a> {
    kinds: &'s [Vec<(&'s Lever<'a>, f64)>],
    best: Option<(f64, Vec<&'s Lever<'a>>)>,
}

impl<'s, 'a> Search<'s, 'a> {
    fn go(
        &mut self,
        kind: usize,
        scenario: &Scenario<'a>,
        price: f64,
        used: &mut Vec<&'s Lever<'a>>,
    ) -> Result<(), PlanError> {
        if self.best.as_ref().is_some_and(|(best, _)| price >= *best) {
            return Ok(());
        }
        if scenario.fits(scenario.context)? {
            self.best = Some((price, used.clone()));
            return Ok(());
        }
        let Some(levers) = self.kinds.get(kind) else { return Ok(()) };
        for &(lever, cost) in levers {
            used.push(lever);
            self.go(kind + 1, &lever.pulled(scenario), price + cost, used)?;
            used.pop();
        }
        self.go(kind + 1, scenario, price, used)
    }
}
