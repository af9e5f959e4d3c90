//! Tasks: a solver that reads answers every sample, one that read another sample answers none, and lengths are met.

use kvsieve::task::{Draw, Question, Sample, TASKS, TaskError, Tokens, generate, length_tokens, markdown, task};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

/// A token for each word with the space before it, and one for each other character.
#[derive(Default)]
struct Words(Mutex<(Vec<String>, HashMap<String, u32>)>);

impl Tokens for Words {
    fn encode(&self, text: &str) -> Vec<u32> {
        let mut known = self.0.lock().unwrap();
        let mut tokens = Vec::new();
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let body = if first == ' ' { &rest[1..] } else { rest };
            let letters = body.find(|c: char| !c.is_alphabetic()).unwrap_or(body.len());
            let end = if letters > 0 { rest.len() - body.len() + letters } else { first.len_utf8() };
            let (piece, after) = rest.split_at(end);
            let (pieces, numbers) = &mut *known;
            tokens.push(*numbers.entry(piece.to_string()).or_insert_with(|| {
                pieces.push(piece.to_string());
                pieces.len() as u32 - 1
            }));
            rest = after;
        }
        tokens
    }

    fn decode(&self, tokens: &[u32]) -> String {
        let known = self.0.lock().unwrap();
        tokens.iter().map(|&token| known.0[token as usize].as_str()).collect()
    }
}

/// What stands between two texts.
fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let start = text.find(before)? + before.len();
    Some(&text[start..start + text[start..].find(after)?])
}

/// Every value that the context gives the key of a needle.
fn codes(context: &str, key: &str) -> Vec<String> {
    let stem = format!(" The code of {key} is ");
    context.match_indices(&stem).filter_map(|(at, _)| Some(between(&context[at..], &stem, ".")?.to_string())).collect()
}

/// The most frequent `count` words.
fn frequent<'a>(words: impl Iterator<Item = &'a str>, count: usize) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    words.for_each(|word| *counts.entry(word).or_default() += 1);
    let mut ranked: Vec<_> = counts.into_iter().collect();
    ranked.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
    ranked.iter().take(count).map(|(word, _)| *word).collect::<Vec<_>>().join(" ")
}

/// Reads the context and answers as the text says. An empty answer where it says nothing.
fn solve(name: &str, context: &str, prompt: &str) -> String {
    let answer = match name {
        "niah-multivalue" | "niah-multiquery" => {
            let keys = between(prompt, "all the codes of ", "?").unwrap();
            Some(keys.split(", ").flat_map(|key| codes(context, key)).collect::<Vec<_>>().join(", "))
        }
        _ if name.starts_with("niah") => codes(context, between(prompt, "code of ", "?").unwrap()).pop(),
        "vt" => between(prompt, "which variables are ", "?").and_then(|value| {
            let mut name = between(context, "VAR ", &format!(" = {value};"))?.rsplit("VAR ").next()?.to_string();
            let mut all = vec![name.clone()];
            while let Some(at) = context.find(&format!(" = VAR {name};")) {
                name = context[..at].rsplit("VAR ").next()?.to_string();
                all.push(name.clone());
            }
            Some(all.join(", "))
        }),
        "cwe" => Some(frequent(
            context.split(". ").map(|item| item.trim_end_matches(|c: char| c.is_ascii_digit()).trim()),
            10,
        )),
        "fwe" => Some(frequent(context.split_whitespace().filter(|word| *word != "..."), 3)),
        "qa-1" | "qa-2" => {
            between(prompt, " the ", " was made").or(between(prompt, " the ", " made")).and_then(|thing| {
                let owner = between(context, &format!(" The {thing} was made for "), ".")?;
                if name == "qa-1" {
                    return Some(owner.to_string());
                }
                between(context, &format!(" {owner} came from the "), ".").map(str::to_string)
            })
        }
        "passkey" => between(context, "secret number is ", ".").map(str::to_string),
        "recall" => between(context, &format!("{prompt} "), ";").map(|value| format!("{value};")),
        "kv-retrieval" => between(prompt, "\"", "\"")
            .and_then(|key| Some(between(context, &format!("\"{key}\": \""), "\"")?.to_string())),
        "needle-threading" => between(prompt, "begins with ", " ends").and_then(|start| {
            let steps: usize = between(prompt, "chain of ", " steps")?.parse().ok()?;
            (0..steps)
                .try_fold(start.to_string(), |at, _| between(context, &format!(" {at} -> "), ";").map(str::to_string))
        }),
        "count" => context
            .rsplit(' ')
            .next()
            .and_then(|last| last.parse::<usize>().ok())
            .map(|last| (1..5000).map(|step| (last + step).to_string()).collect::<Vec<_>>().join(" ")),
        "copy" => between(context, " List:", ".").map(str::to_string),
        "repeat" => Some(context.to_string()),
        _ => panic!("no solver for '{name}'"),
    };
    answer.unwrap_or_default()
}

fn mean(sample: &Sample, answer: impl Fn(&Question) -> String) -> f64 {
    let scores: Vec<f64> = sample.questions.iter().map(|question| question.score(&answer(question))).collect();
    assert!(!scores.is_empty() && scores.iter().all(|score| (0.0..=1.0).contains(score)));
    scores.iter().sum::<f64>() / scores.len() as f64
}

fn made(name: &str, target_tokens: usize, draw: &Draw, tokens: &Words) -> Result<Sample, TaskError> {
    generate(name, &*task(name).unwrap(), target_tokens, draw, tokens)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn who_reads_is_right_and_who_read_something_else_is_not(seed in any::<u64>(), target_tokens in 700usize..4000) {
        let tokens = Words::default();
        let (mut wrong, mut all) = (0.0, 0.0);
        for entry in TASKS {
            let sample = made(entry.name, target_tokens, &Draw::new(seed, 0), &tokens).unwrap();
            // A short context, as that of `count`, may come again by chance.
            let mut others = (1..5).map(|number| made(entry.name, target_tokens, &Draw::new(seed, number), &tokens).unwrap());
            let other = others.find(|other| other.context != sample.context).unwrap();
            let right = mean(&sample, |question| solve(entry.name, &sample.context, &question.prompt()));
            prop_assert_eq!(right, 1.0, "{}: {}", entry.name, sample.context);
            prop_assert_eq!(mean(&sample, |question| question.expected.clone()), 1.0, "{}", entry.name);
            let astray = mean(&sample, |question| solve(entry.name, &other.context, &question.prompt()));
            prop_assert!(astray <= 0.34, "{}: {astray} without having read", entry.name);
            prop_assert_eq!(mean(&sample, |_| String::new()), 0.0, "{}", entry.name);
            (wrong, all) = (wrong + astray, all + 1.0);
        }
        prop_assert!(wrong / all < 0.05, "{} on average without having read", wrong / all);
    }

    #[test]
    fn lengths_are_met_and_seeds_decide(seed in any::<u64>(), target_tokens in 700usize..3000) {
        let tokens = Words::default();
        for entry in TASKS {
            let draw = Draw::new(seed, 3);
            let sample = made(entry.name, target_tokens, &draw, &tokens).unwrap();
            let length = length_tokens(&sample, &tokens);
            // One unit of filler is at most two paragraphs of `qa`, each a fact and a sentence.
            prop_assert!(length <= target_tokens && length + 160 > target_tokens, "{}: {length} of {target_tokens}", entry.name);
            prop_assert_eq!(&sample, &made(entry.name, target_tokens, &draw, &tokens).unwrap());
            // Of a short context, as that of `count`, two may be the same by chance.
            let context = |number| made(entry.name, target_tokens, &Draw::new(seed, number), &tokens).unwrap().context;
            prop_assert!((4..8).any(|number| context(number) != sample.context), "{}", entry.name);
        }
    }

    #[test]
    fn needles_lie_where_they_are_asked_to(seed in any::<u64>(), depth in 0.0f64..=1.0) {
        let tokens = Words::default();
        for name in ["niah-single-1", "niah-single-2", "niah-multikey-1", "niah-multikey-3", "passkey"] {
            let text = format!("{name}:depth={depth}");
            let sample = generate(name, &*task(&text).unwrap(), 2500, &Draw::new(seed, 0), &tokens).unwrap();
            let needle = sample.questions[0].expected.trim_matches([' ', '.']);
            let found = sample.context.find(needle).unwrap() as f64 / sample.context.len() as f64;
            prop_assert!((found - depth).abs() < 0.06, "{name}: at {found}, {depth} asked");
            prop_assert!((sample.depth.unwrap() - depth).abs() < 0.03);
        }
    }
}

#[test]
fn a_context_too_short_says_what_it_takes_and_that_is_enough() {
    let tokens = Words::default();
    for entry in TASKS {
        let draw = Draw::new(5, 0);
        let Err(TaskError::TooShort { least_tokens, .. }) = made(entry.name, 3, &draw, &tokens) else {
            panic!("{}: 3 tokens are enough?", entry.name);
        };
        assert!(made(entry.name, least_tokens, &draw, &tokens).is_ok(), "{}", entry.name);
        assert!(made(entry.name, least_tokens - 1, &draw, &tokens).is_err(), "{}", entry.name);
    }
}

/// A tokenizer that knows no digits.
struct NoDigits(Words);

impl Tokens for NoDigits {
    fn encode(&self, text: &str) -> Vec<u32> {
        self.0.encode(&text.replace(|c: char| c.is_ascii_digit(), "?"))
    }
    fn decode(&self, tokens: &[u32]) -> String {
        self.0.decode(tokens)
    }
}

#[test]
fn a_tokenizer_that_loses_what_a_task_needs_is_refused() {
    let tokens = NoDigits(Words::default());
    let error = generate("passkey", &*task("passkey").unwrap(), 500, &Draw::new(1, 0), &tokens).unwrap_err();
    assert!(matches!(error, TaskError::Token { .. }), "{error}");
    assert!(generate("copy", &*task("copy").unwrap(), 500, &Draw::new(1, 0), &tokens).is_ok());
}

/// A tokenizer for which every text is the same token.
struct OneToken;

impl Tokens for OneToken {
    fn encode(&self, _: &str) -> Vec<u32> {
        vec![0]
    }
    fn decode(&self, _: &[u32]) -> String {
        "?".into()
    }
}

#[test]
fn a_tokenizer_by_which_texts_get_no_longer_is_refused() {
    for name in ["niah-single-2", "cwe"] {
        let error = generate(name, &*task(name).unwrap(), 256, &Draw::new(1, 0), &OneToken).unwrap_err();
        assert!(matches!(error, TaskError::Token { .. }), "{error}");
    }
}

#[test]
fn the_words_that_are_most_common_in_a_list_are_those_that_are_asked_for() {
    let tokens = Words::default();
    for seed in 0..4 {
        let sample = generate("cwe", &*task("cwe").unwrap(), 6000, &Draw::new(seed, 0), &tokens).unwrap();
        let asked = sample.questions[0].expected.trim_matches([' ', '.']).split(", ").collect::<Vec<_>>();
        for word in asked {
            assert_eq!(sample.context.split_whitespace().filter(|other| *other == word).count(), 6, "{word}");
        }
    }
}

#[test]
fn what_is_listed_as_a_default_may_be_written_and_no_pair_is_asked_for_twice() {
    let tokens = Words::default();
    let sample = |text: &str| generate(text, &*task(text).unwrap(), 900, &Draw::new(3, 0), &tokens).unwrap();
    for entry in TASKS {
        let defaults: Vec<String> =
            entry.parameters.iter().map(|one| format!("{}={}", one.name, one.default)).collect();
        let written = format!("{}{}{}", entry.name, if defaults.is_empty() { "" } else { ":" }, defaults.join(","));
        assert_eq!(sample(&written), sample(entry.name), "{written}");
    }
    for text in ["recall:queries=1000", "kv-retrieval:queries=1000"] {
        let Sample { context, questions, .. } = sample(text);
        let asked: std::collections::HashSet<String> = questions.iter().map(Question::prompt).collect();
        assert_eq!((asked.len(), questions.len()), (context.matches(": ").count(), asked.len()), "{text}");
    }
}

#[test]
fn names_and_parameters_that_mean_nothing_are_refused() {
    for (text, expected) in [
        ("niah", "unknown task 'niah'"),
        ("recall:keys=2", "no parameter 'keys'; it has queries"),
        ("passkey:depth=2", "between 0 and 1"),
        ("cwe:often=3,seldom=3", "from 4 to 1000"),
        ("cwe:words=101", "words is '101'; it must be a whole number from 1 to 100"),
        ("needle-threading:steps=1000000000000000000", "from 1 to 1000"),
        ("vt:hops=100", "from 1 to 99"),
        ("passkey:digits=19", "from 1 to 18"),
    ] {
        let error = task(text).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn the_page_of_tasks_is_that_of_the_registry() {
    assert_eq!(
        include_str!("../../docs/tasks.md"),
        markdown(),
        "docs/tasks.md is old; renew it with `kvsieve list tasks --markdown > docs/tasks.md`"
    );
}
