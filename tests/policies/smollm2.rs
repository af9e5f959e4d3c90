//! Agreement with kvpress on a real model: what each layer and head of SmolLM2-135M retains of a text, how its tokens score,
//! and the logits of what follows. `conformance/README.md` says how the fixture was made. Skipped, in one line, where the
//! model is not there (`scripts/fetch-smollm2`).

use crate::common;
use kvsieve::attention::Shape;
use kvsieve::cache::Column;
use kvsieve::device::Cpu;
use kvsieve::memory::Arena;
use kvsieve::model::{Decoder, Eviction, Model, Repeat, Setup, Text};
use kvsieve::policy::{Budget, Context, Policy, PolicyError, Protect, Registry, Scored, Scorer, Statistic};
use kvsieve::tensor::DType;
use kvsieve::train::sensitivity;
use safetensors::SafeTensors;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex};

const MODEL: &str = "models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
/// With the cases of KVzip and KVgrad in a file of their own.
const FIXTURES: [&str; 2] =
    ["tests/conformance/fixtures/smollm2.safetensors", "tests/conformance/fixtures/smollm2-kvzip.safetensors"];

/// The context with a full cache.
const CONTEXT: usize = 0;
/// The context as a policy leaves it.
const EVICTED: usize = 1;
const SEQUENCES: usize = 2;

/// What kvpress gave for a policy, a length and a budget.
#[derive(Default)]
struct Expected {
    /// `[layers * Hkv, T / 8]`, a bit for each token.
    kept: Vec<u8>,
    /// `[following, part of the vocabulary]`.
    logits: Vec<f32>,
    /// `[layers * Hkv, samples]`; empty where they were not recorded.
    scores: Vec<f32>,
}

/// Policy, tokens of the context, and budget in tokens.
type Case = (String, usize, usize);

fn floats(data: &[u8]) -> Vec<f32> {
    data.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// The tokens, and every case.
fn fixture() -> (Vec<u32>, BTreeMap<Case, Expected>) {
    let files = FIXTURES.map(|path| std::fs::read(path).unwrap());
    let tensors = files.iter().flat_map(|bytes| SafeTensors::deserialize(bytes).unwrap().tensors());
    let (mut tokens, mut cases) = (Vec::new(), BTreeMap::<Case, Expected>::new());
    for (name, tensor) in tensors {
        let data = tensor.data();
        if name == "tokens" {
            tokens = data.chunks_exact(4).map(|bytes| u32::from_le_bytes(bytes.try_into().unwrap())).collect();
            continue;
        }
        let [policy, length, budget, what] = name.split('/').collect::<Vec<_>>().try_into().unwrap();
        let case = cases.entry((policy.into(), length.parse().unwrap(), budget.parse().unwrap())).or_default();
        match what {
            "kept" => case.kept = data.into(),
            "logits" => case.logits = floats(data),
            _ => case.scores = floats(data),
        }
    }
    (tokens, cases)
}

/// A scorer that leaves its scores behind, `[layers * Hkv, T]`.
struct Recorded {
    scorer: Box<dyn Scorer>,
    scores: Arc<Mutex<Vec<f32>>>,
}

impl Scorer for Recorded {
    fn needs(&self) -> Vec<Statistic> {
        self.scorer.needs()
    }
    fn protect(&self, budget_tokens: usize) -> Protect {
        self.scorer.protect(budget_tokens)
    }
    fn recent_queries(&self) -> usize {
        self.scorer.recent_queries()
    }
    fn scratch_bytes(&self, shape: &Shape, threads: usize) -> u64 {
        self.scorer.scratch_bytes(shape, threads)
    }
    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        self.scorer.score(context, scores)?;
        *self.scores.lock().unwrap() = scores.into();
        Ok(())
    }
    fn refine(
        &self,
        context: &Context<'_>,
        scored: &mut Scored,
        counts: &[usize],
        scratch: &mut [f32],
    ) -> Result<(), PolicyError> {
        self.scorer.refine(context, scored, counts, scratch)
    }
}

/// A policy whose scores can be looked at.
fn recorded(text: &str) -> (Policy, Arc<Mutex<Vec<f32>>>) {
    let (mut policy, scores) = (Registry::default().policy(text).unwrap(), Arc::default());
    let scorer = policy.scorer.take().unwrap();
    policy.scorer = Some(Box::new(Recorded { scorer, scores: Arc::clone(&scores) }));
    (policy, scores)
}

/// Scores differ by so much of the wanted one, or of a typical one where that is larger: f32's sums in another order, through 30
/// layers; more where a linear system is solved. (What that leaves of a text is sensitive too: without its sinks, logits of
/// `transformers` in f32 are already 5e-4 from those in f64.)
fn tolerance(policy: &str) -> f32 {
    if policy.starts_with("leverage") || policy.starts_with("compactor") { 2e-3 } else { 1e-4 }
}

/// How far apart scores lie, as a part of the largest: tokens of another fate may only be those of a tie.
fn spread(scores: impl Iterator<Item = f32>) -> f32 {
    let (mut least, mut most) = (f32::INFINITY, f32::NEG_INFINITY);
    scores.for_each(|score| (least, most) = (least.min(score), most.max(score)));
    if most <= least { 0.0 } else { (most - least) / most.abs().max(least.abs()) }
}

/// The model, the context in a decoder, and what is compared in it.
struct Bench<'a> {
    model: &'a Model,
    decoder: Decoder<'a>,
    tokens: &'a [u32],
    /// Tokens of the context.
    length: usize,
    /// Tokens that follow.
    following: usize,
}

impl Bench<'_> {
    fn lists(&self) -> usize {
        self.model.config.layers * self.model.config.kv_heads
    }

    /// How many tokens have another fate than kvpress gives them; refused where their scores are no tie.
    fn swapped(&self, policy: &str, expected: &Expected, scores: &[f32]) -> Result<usize, String> {
        let (heads, length) = (self.model.config.kv_heads, self.length);
        // KVzip and KVgrad compare all tokens, Ada-KV those of all heads of a layer, the others those of one head.
        let together = match policy {
            _ if policy.starts_with("kv") => self.lists(),
            _ if policy.contains("ada") => heads,
            _ => 1,
        };
        let mut swapped = vec![BTreeSet::new(); self.lists() / together];
        for list in 0..self.lists() {
            let cache = self.decoder.cache();
            let at = cache.list(list / heads * SEQUENCES + EVICTED, list % heads);
            let got: BTreeSet<usize> = (0..cache.lens()[at]).map(|slot| cache.position(at, slot)).collect();
            let kept = |token: &usize| expected.kept[(list * length + token) / 8] >> (token % 8) & 1 == 1;
            let wanted: BTreeSet<usize> = (0..length).filter(kept).collect();
            if together == 1 && got.len() != wanted.len() {
                return Err(format!("list {list} keeps {} tokens, expected {}", got.len(), wanted.len()));
            }
            swapped[list / together].extend(got.symmetric_difference(&wanted).map(|token| list * length + token));
        }
        for swapped in &swapped {
            let spread = spread(swapped.iter().map(|&at| scores[at]));
            if spread > 2.0 * tolerance(policy) {
                let tokens: Vec<_> = swapped.iter().map(|at| (at / length, at % length)).collect();
                return Err(format!("other fate for (list, token) {tokens:?}, whose scores are {spread:.1e} apart"));
            }
        }
        Ok(swapped.iter().map(BTreeSet::len).sum())
    }

    /// The recorded scores; not those of the last `window` tokens, which always stay.
    fn scores_agree(&self, policy: &str, expected: &[f32], scores: &[f32], window: usize) -> Result<(), String> {
        let (length, samples) = (self.length, expected.len() / self.lists());
        for (list, wanted) in expected.chunks(samples.max(1)).enumerate() {
            let scores = &scores[list * length..][..length];
            let typical = scores.iter().map(|score| score.abs()).sum::<f32>() / length as f32;
            for (sample, &wanted) in wanted.iter().enumerate() {
                let token = sample * length / samples + length / (2 * samples);
                let allowed = tolerance(policy) * wanted.abs().max(typical);
                // Written so that a NaN differs.
                let agrees = (scores[token] - wanted).abs() <= allowed;
                if token + window < length && !agrees {
                    let got = scores[token];
                    return Err(format!(
                        "token {token} of list {list} scores {got}, expected {wanted} +- {allowed:.1e}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Logits of the tokens that follow, one of so many of the vocabulary.
    fn logits_agree(&mut self, policy: &str, expected: &[f32]) -> Result<(), String> {
        let row_len = expected.len() / self.following;
        let (step, mut furthest) = (self.model.config.vocab / row_len, 0f32);
        let follow =
            self.decoder.follow_closely(&[&[], &self.tokens[self.length..][..self.following]], |_, place, row| {
                furthest = furthest.max(common::models::furthest(
                    &row.iter().step_by(step).copied().collect::<Vec<_>>(),
                    &expected[place * row_len..][..row_len],
                ));
            });
        follow.map_err(|error| error.to_string())?;
        if furthest <= 3.0 * tolerance(policy) { Ok(()) } else { Err(format!("a logit is {furthest:.1e} off")) }
    }
}

#[test]
fn policies_agree_with_kvpress_on_a_real_model() {
    if !Path::new(MODEL).exists() {
        println!("skipped: {MODEL} is not there; scripts/fetch-smollm2 fetches it");
        return;
    }
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    let model = Model::open_in(Path::new(MODEL), Some("f32".parse().unwrap()), &arena).unwrap();
    let (tokens, cases) = fixture();
    let policies: BTreeMap<&str, _> = cases.keys().map(|(name, ..)| (name.as_str(), recorded(name))).collect();
    let lengths: BTreeSet<usize> = cases.keys().map(|&(_, length, _)| length).collect();
    let setup = Setup {
        batch: SEQUENCES,
        chunk_tokens: 512,
        columns: &[Column::Attention],
        ..Setup::of(2 * tokens.len(), DType::F32)
    };
    // Without the chat template, as in the fixture.
    let text = Text::open(Path::new(MODEL)).unwrap();
    let repeat = Repeat::new(Path::new(MODEL), &text).unwrap().with_gradients(sensitivity);
    let plain = Repeat { answer: text.piece("\n").unwrap(), ..repeat };
    let mut decoder = Decoder::new(&model, setup, &cpu, &arena).unwrap();
    decoder.record_queries(policies.values().map(|(policy, _)| policy));
    let following = tokens.len() - lengths.last().unwrap();
    let mut bench = Bench { model: &model, decoder, tokens: &tokens, length: 0, following };
    let (mut complaints, mut swapping) = (Vec::new(), 0);
    for length in lengths {
        bench.length = length;
        bench.decoder.clear();
        bench.decoder.prefill(&[&tokens[..length], &[]], |_, _, _| ()).unwrap();
        for ((name, _, budget), expected) in cases.iter().filter(|((_, of, _), _)| *of == length) {
            let (policy, scores) = &policies[name.as_str()];
            let eviction =
                Eviction { policy, name, budget: Some(Budget::Tokens(*budget)), seed: 0, repeat: Some(&plain) };
            bench.decoder.fork(CONTEXT, EVICTED).unwrap();
            bench.decoder.evict_recorded(EVICTED, eviction, 0).unwrap();
            let scores = scores.lock().unwrap().clone();
            let window = policy.scorer.as_ref().unwrap().protect(*budget).window;
            let mut compare = || {
                bench.scores_agree(name, &expected.scores, &scores, window)?;
                match bench.swapped(name, expected, &scores)? {
                    0 => bench.logits_agree(name, &expected.logits),
                    // A tie that fell differently shows in the logits.
                    _ => {
                        swapping += 1;
                        Ok(())
                    }
                }
            };
            complaints.extend(compare().err().map(|said| format!("{name}, {budget} of {length}: {said}")));
        }
    }
    assert!(complaints.is_empty(), "{} of {} cases:\n{}", complaints.len(), cases.len(), complaints.join("\n"));
    assert!(policies.len() >= 12 && 4 * swapping < cases.len(), "ties of {swapping} of {} cases", cases.len());
}
