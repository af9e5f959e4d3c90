//! The simulator against the paper, against numbers worked out by hand, and against what must always hold.

use super::{Strategy, *};
use proptest::prelude::*;
use std::fs;

fn run(trace: &str, strategy: &str) -> Usage {
    simulate(&Trace::parse(trace).unwrap(), strategy, 0).unwrap()
}

fn shares(usage: &Usage) -> [f64; 4] {
    [usage.token_fraction, usage.reserved_fraction, usage.internal_fraction, usage.external_fraction]
}

/// Figure 2 of the vLLM paper within 1 percentage point, its power-of-two row within 5.
#[test]
fn the_shares_are_those_of_the_paper() {
    for row in published::PUBLISHED {
        let Some(printed) = row.shares_percent else { continue };
        let usage = run(row.trace, row.strategy);
        let most = if row.strategy == "pow2" { 5.0 } else { 1.0 };
        for (share, printed) in shares(&usage).into_iter().zip(printed) {
            let off = printed.map_or(0.0, |printed| (100.0 * share - printed).abs());
            assert!(off <= most, "{} {}: {share} is {off} points off {printed:?}", row.trace, row.strategy);
        }
    }
}

/// Figure 13, where the paper's load filled the memory: within 6%. Seven requests of 2048 are exact.
#[test]
fn the_batches_are_those_of_the_paper() {
    for row in published::PUBLISHED.iter().filter(|row| row.saturated) {
        let batch = run(&format!("{}:steps=300000", row.trace), row.strategy).mean_batch;
        let most = if row.strategy == "max" { 1e-9 } else { 0.06 };
        assert!(
            (batch / row.batch - 1.0).abs() <= most,
            "{} {}: {batch}, printed {}",
            row.trace,
            row.strategy,
            row.batch
        );
    }
}

/// The figure of the paper that the presets stand on.
#[test]
fn the_presets_have_the_published_means() {
    for (name, prompt, output) in [("sharegpt", 161.31, 337.99), ("alpaca", 19.31, 58.45)] {
        let trace = Trace::parse(name).unwrap();
        let count = 300_000;
        let sums = trace.requests(7).take(count).fold((0, 0), |(prompts, outputs), request| {
            assert!(request.tokens() <= 2048);
            (prompts + request.prompt_tokens, outputs + request.output_tokens)
        });
        for (sum, published) in [(sums.0, prompt), (sums.1, output)] {
            let mean = sum as f64 / count as f64;
            assert!((mean / published - 1.0).abs() < 0.01, "{name}: {mean}, published {published}");
        }
    }
}

/// Larger pages waste more of what is held; the shares are those of an independent simulation of the same rules.
#[test]
fn waste_grows_with_the_page() {
    let expected = [
        ("sharegpt:steps=200000", [(1, 0.0), (8, 0.7), (16, 1.6), (32, 3.2), (64, 6.3), (128, 11.9), (256, 21.8)]),
        ("alpaca:steps=30000", [(1, 0.0), (8, 4.3), (16, 8.8), (32, 16.7), (64, 29.6), (128, 49.2), (256, 70.6)]),
    ];
    for (trace, pages) in expected {
        for (page, percent) in pages {
            let waste = 100.0 * run(trace, &format!("paged:page={page}")).waste_of_held;
            assert!((waste - percent).abs() < 1.0, "{trace}, pages of {page}: {waste}, expected {percent}");
        }
    }
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), text).unwrap();
    file
}

/// Pools so small that every step can be followed on paper.
#[test]
fn small_pools_are_counted_by_hand() {
    // One kind of request: prompt, output; slots and max; strategy; tokens, reserved, internal, batch.
    let cases = [
        // Alone in the pool with 3 and then 4 tokens of 8.
        ((2, 2), (8, 8), "max", [7.0 / 16.0, 1.0 / 16.0, 0.5], 1.0),
        // Two at a time, both with 3, then both with 4.
        ((2, 2), (8, 8), "oracle", [7.0 / 8.0, 1.0 / 8.0, 0.0], 2.0),
        ((2, 2), (8, 8), "pow2", [7.0 / 8.0, 1.0 / 8.0, 0.0], 2.0),
        // 1 + 4 slots are asked for where 4 will be used; the block has 8.
        ((1, 3), (8, 8), "pow2", [3.0 / 8.0, 1.0 / 8.0, 1.0 / 8.0], 1.0),
        // The same, with a max that is less than what the power of two asks for.
        ((1, 3), (8, 4), "pow2", [6.0 / 8.0, 2.0 / 8.0, 0.0], 2.0),
        // Two requests of 4 tokens with two pages of 3 each; one page is left over, and two slots belong to no page.
        ((3, 1), (17, 12), "paged:page=3", [8.0 / 17.0, 0.0, 4.0 / 17.0], 2.0),
    ];
    for ((prompt, output), (slots, max), strategy, [tokens, reserved, internal], batch) in cases {
        let file = file(&format!("prompt_tokens,output_tokens\n{prompt},{output}\n"));
        let path = file.path().display();
        let usage = run(&format!("file:path={path},slots={slots},max={max},steps=120,warmup=60"), strategy);
        let expected = [tokens, reserved, internal, 1.0 - tokens - reserved - internal];
        let close = shares(&usage).iter().zip(expected).all(|(share, expected)| (share - expected).abs() < 1e-12);
        assert!(close && usage.mean_batch == batch, "{prompt}+{output} {strategy}: {usage:?}, expected {expected:?}");
    }
}

#[test]
fn where_no_page_is_free_the_newest_waits_and_goes_on_later() {
    // Four start with a page each of four. At its third token each needs a second: the fourth gives the first its page, and the
    // third the second. In the step after, these two end; then the others start again with two tokens and two pages each, and end
    // in the fifth step.
    let file = file("prompt_tokens,output_tokens\n1,3\n");
    let trace =
        |steps, warmup| format!("file:path={},slots=8,max=4,steps={steps},warmup={warmup}", file.path().display());
    for (steps, warmup, finished, preempted) in [(3, 2, 2, 0), (3, 1, 2, 2), (4, 1, 2, 2), (5, 1, 4, 2)] {
        let usage = run(&trace(steps, warmup), "paged:page=2");
        assert_eq!((usage.finished_requests, usage.preempted_requests), (finished, preempted), "{steps} {usage:?}");
    }
    // The third and fourth have their third token then.
    assert_eq!(run(&trace(4, 3), "paged:page=2").token_fraction, 6.0 / 8.0);
}

#[test]
fn mistakes_are_named() {
    let long = file("prompt_tokens,output_tokens\n10,20\n3000,1\n");
    let empty = file("prompt_tokens,output_tokens\n");
    let columns = file("prompt,output\n1,2\n");
    let none = file("prompt_tokens,output_tokens\n5,0\n");
    let path = |file: &tempfile::NamedTempFile| format!("file:path={}", file.path().display());
    for (text, expected) in [
        ("wikitext".to_string(), "unknown trace 'wikitext'; there are sharegpt, alpaca, file"),
        ("alpaca:steps=0".into(), "steps is '0'"),
        ("alpaca:steps=100,warmup=100".into(), "less than the 100 steps"),
        ("alpaca:steps=100".into(), "steps is '100'; it must be more than the 5000 steps of warmup"),
        (
            "alpaca:slots=1000000000000".into(),
            "slots is '1000000000000'; it must be a whole number from 1 to 268435456",
        ),
        ("alpaca:warp=1".into(), "no parameter 'warp'"),
        ("alpaca:prompt_cv2=NaN".into(), "prompt_cv2 is 'NaN'; it must be a number from 0 to 1000"),
        ("alpaca:prompt=-3".into(), "prompt is '-3'; it must be a number from 1 to 2047"),
        ("alpaca:prompt=1500,output=1000".into(), "at most 547 with prompts of 1500 and max=2048"),
        ("file".into(), "path is ''; it must be the name of a CSV file"),
        ("file:path=nowhere.csv".into(), "trace 'nowhere.csv'"),
        (path(&long), "request 2 has 3001 tokens, max is 2048; give max=3001"),
        (path(&empty), "there is no request"),
        (path(&columns), "columns prompt_tokens and output_tokens"),
        (path(&none), "request 1 has no tokens"),
    ] {
        let error = Trace::parse(&text).unwrap_err().to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{text}: {error}");
    }
    let pool = Pool { slots: 3000, max_tokens: 2500 };
    for (text, expected) in [
        ("best", "unknown strategy 'best'; there are max, pow2, oracle, paged"),
        ("max:page=3", "'max' has no parameter 'page'; it has none"),
        ("paged:page=0", "page is '0'"),
        ("oracle", "no room for a request of 2500 tokens in a pool of 3000 slots"),
        ("paged:page=1800", "no room for a request of 2500 tokens in a pool of 3000 slots"),
    ] {
        let error = strategy(text, pool).err().unwrap().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

proptest! {
    /// Any trace through any strategy: the shares add up, nothing is negative, the same seed gives the same numbers.
    #[test]
    fn shares_are_shares(
        slots in 96usize..2000,
        prompt in 1.0f64..12.0,
        output in 1.0f64..12.0,
        cv2 in 0.0f64..4.0,
        seed: u64,
        page in 1usize..30,
    ) {
        let text = format!(
            "alpaca:prompt={prompt},output={output},prompt_cv2={cv2},output_cv2={cv2},slots={slots},max=32,steps=300,warmup=20"
        );
        let trace = Trace::parse(&text).unwrap();
        let paged = format!("paged:page={page}");
        for name in ["max", "pow2", "oracle", paged.as_str()] {
            let usage = simulate(&trace, name, seed).unwrap();
            prop_assert!(shares(&usage).iter().all(|share| (-1e-12..=1.0).contains(share)), "{name}: {usage:?}");
            prop_assert!((0.0..1.0).contains(&usage.waste_of_held) && usage.mean_batch > 0.0, "{name}: {usage:?}");
            prop_assert!(name == paged || usage.preempted_requests == 0);
            prop_assert!(name != "oracle" || usage.internal_fraction == 0.0);
            prop_assert_eq!(simulate(&trace, name, seed).unwrap(), usage);
        }
    }

    /// Whatever requests come, grow and go: a pool never gives out more than it has, a refusal takes nothing, and when
    /// all is given back everything is there again.
    #[test]
    fn a_pool_gives_out_what_it_has(
        slots in 64usize..500,
        page in 1usize..17,
        steps in prop::collection::vec((0usize..3, 1usize..31, 1usize..31), 1..150),
    ) {
        let paged = format!("paged:page={page}");
        for name in ["max", "pow2", "oracle", paged.as_str()] {
            let pool = Pool { slots, max_tokens: 60 };
            let Ok(mut strategy) = strategy(name, pool) else { continue };
            let mut held: Vec<Holding> = Vec::new();
            let admits = |strategy: &mut dyn Strategy| {
                let request = Request { prompt_tokens: 20, output_tokens: 20 };
                let all: Vec<Holding> = std::iter::from_fn(|| strategy.admit(request)).collect();
                let count = all.len();
                all.into_iter().for_each(|holding| strategy.release(holding));
                count
            };
            let empty = admits(&mut *strategy);
            for &(action, prompt_tokens, output_tokens) in &steps {
                match action {
                    0 => held.extend(strategy.admit(Request { prompt_tokens, output_tokens })),
                    1 if !held.is_empty() => {
                        let at = prompt_tokens % held.len();
                        strategy.release(held.swap_remove(at));
                    }
                    _ if !held.is_empty() => {
                        let at = prompt_tokens % held.len();
                        let before = held[at];
                        let tokens = before.granted_tokens + output_tokens - 1;
                        if strategy.grow(&mut held[at], tokens) {
                            prop_assert!(held[at].granted_tokens >= tokens);
                        } else {
                            prop_assert_eq!(held[at], before);
                        }
                    }
                    _ => {}
                }
                prop_assert!(held.iter().map(|holding| holding.taken_slots).sum::<usize>() <= slots);
                prop_assert!(held.iter().all(|holding| holding.granted_tokens <= holding.taken_slots));
            }
            held.into_iter().for_each(|holding| strategy.release(holding));
            prop_assert_eq!(admits(&mut *strategy), empty, "{}", name);
        }
    }
}
