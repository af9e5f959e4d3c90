//! Memories in models: against the full cache where they must equal it, against one another, and against memories that are
//! worked out here; their bytes, and that nothing depends on chunks, batches or threads.

use crate::common::models::{Checkpoint, all, checkpoint, deviation, furthest, setup};
use crate::common::{bits, cpu, normal, rng, widen};
use kvsieve::attention::KvRows;
use kvsieve::attention::rope::{Frequencies, ModelRope};
use kvsieve::memories::{At, MEMORIES, MemoryShape, Runs, memory};
use kvsieve::memory::Arena;
use kvsieve::model::{Decoder, Model, bytes_with_memory};
use kvsieve::tensor::{DType, TensorView};
use proptest::prelude::*;

fn open(name: &str) -> (Model, Checkpoint) {
    let expected = checkpoint(name);
    (Model::open(&expected.folder, &Arena::unlimited()).unwrap(), expected)
}

/// Logits of all tokens of each sequence, `[L, vocab]`: `prompt` tokens in chunks, the others one by one.
fn logits(model: &Model, tokens: &[&[u32]], text: &str, prompt: usize, chunk: usize, threads: usize) -> Vec<Vec<f32>> {
    let (arena, memory) = (Arena::unlimited(), memory(text).unwrap());
    let setup = setup(tokens.len(), chunk);
    let mut decoder = Decoder::with_memory(model, setup, &*memory, cpu(threads), &arena).unwrap();
    let mut all = vec![Vec::new(); tokens.len()];
    let part = |from: usize, to: usize| -> Vec<&[u32]> {
        tokens.iter().map(|tokens| &tokens[from.min(tokens.len())..to.min(tokens.len())]).collect()
    };
    decoder.prefill(&part(0, prompt), |sequence, _, logits| all[sequence].extend_from_slice(logits)).unwrap();
    let longest = tokens.iter().map(|tokens| tokens.len()).max().unwrap();
    for at in prompt.min(longest)..longest {
        decoder.follow(&part(at, at + 1), |sequence, _, logits| all[sequence].extend_from_slice(logits)).unwrap();
    }
    all
}

/// All tokens of one sequence as a prompt.
fn alone(model: &Model, tokens: &[u32], text: &str) -> Vec<f32> {
    logits(model, &[tokens], text, tokens.len(), 16, 2).remove(0)
}

#[test]
fn what_must_equal_the_full_cache_does_in_every_family() {
    let exact = MEMORIES.iter().map(|entry| entry.exact.to_string());
    let exact = exact.chain(["mean", "near"].map(|place| format!("camelot:slots=999,threshold=2,position={place}")));
    let exact: Vec<String> = exact.chain(["camelot:slots=999,threshold=2,top=999".into()]).collect();
    let mut failed = Vec::new();
    for name in all() {
        let (model, expected) = open(&name);
        let bound = 1e-3 * deviation(&expected.logits);
        for text in exact.iter().flat_map(|text| [5, 32].map(|window| format!("{text},window={window}"))) {
            for (prompt, chunk) in [(expected.tokens.len(), 7), (20, 100)] {
                // These scalings turn a prompt's keys by the length of the prompt.
                if ["dynamic", "longrope"].contains(&&*name) && prompt < expected.tokens.len() {
                    continue;
                }
                let got = logits(&model, &[&expected.tokens], &text, prompt, chunk, 2).remove(0);
                let off = furthest(&got, &expected.logits);
                if off.is_nan() || off > bound {
                    failed
                        .push(format!("{name}, {text}, {prompt} in chunks of {chunk}: off by {off}, allowed {bound}"));
                }
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// A step reads what its query attends to: of a memory that leaves nothing out what the full cache reads, at the ends of segments
/// too, of a ring the rows that it has, and where rows are chosen the keys that were looked at besides.
#[test]
fn a_step_reads_the_rows_that_it_is_handed() {
    let (model, Checkpoint { tokens, .. }) = open("llama");
    let read = |memory_text: Option<&str>| -> Vec<u64> {
        let (arena, of_text) = (Arena::unlimited(), memory_text.map(|text| memory(text).unwrap()));
        let mut decoder = match &of_text {
            Some(memory) => Decoder::with_memory(&model, setup(1, 16), &**memory, cpu(2), &arena),
            None => Decoder::new(&model, setup(1, 16), cpu(2), &arena),
        }
        .unwrap();
        decoder.prefill(&[&tokens[..6]], |_, _, _| ()).unwrap();
        let step = |at: usize| {
            decoder.follow(&[&tokens[at..at + 1]], |_, _, _| ()).unwrap();
            decoder.step_kv_bytes(0)
        };
        (6..tokens.len().min(30)).map(step).collect()
    };
    let row = 2 * 4 * (model.config.layers * model.config.kv_heads * model.config.head_dim) as u64;
    let full = read(None);
    assert_eq!(full, (7..=full.len() as u64 + 6).map(|rows| rows * row).collect::<Vec<_>>());
    for entry in MEMORIES {
        assert_eq!(read(Some(&format!("{},window=5", entry.exact))), full, "{}", entry.name);
    }
    // A segment of 8, the one token before it, and nothing else.
    let ring = (6..30u64).map(|at| (at % 8 + 1 + u64::from(at >= 8)) * row).collect::<Vec<_>>();
    assert_eq!(read(Some("transformer-xl:slots=1,window=8")), ring[..full.len()]);
    // 2 of the past for each query head, chosen by all of its keys, and the segment.
    let chosen = |at: u64| {
        let (past, own) = (at / 8 * 8, at % 8 + 1);
        let group = (model.config.q_heads / model.config.kv_heads) as u64;
        if past > 2 { past * row / 2 + (2 * group + own) * row } else { (past + own) * row }
    };
    let nearest = (6..30).map(chosen).collect::<Vec<_>>();
    assert_eq!(read(Some("memorizing-transformer:top=2,window=8")), nearest[..full.len()]);
}

#[test]
fn slots_without_consolidation_are_a_ring() {
    for name in ["llama", "qwen3", "mistral", "gemma2"] {
        let (model, Checkpoint { tokens, .. }) = open(name);
        for slots in [1, 6, 20] {
            let ring = alone(&model, &tokens, &format!("transformer-xl:slots={slots},window=8"));
            let camelot = alone(&model, &tokens, &format!("camelot:slots={slots},window=8,threshold=2"));
            assert!(furthest(&ring, &camelot) < 1e-4, "{name}, {slots} slots");
            // A sliding window may be all that there is to see.
            if model.config.windows.iter().all(Option::is_none) {
                let full = alone(&model, &tokens, MEMORIES[0].exact);
                assert!(furthest(&ring, &full) > 1e-3, "{name}: {slots} slots are not all tokens");
            }
        }
    }
}

/// A mode of one head, as the paper has it, in f64.
#[derive(Clone)]
struct Mode {
    key: Vec<f64>,
    value: Vec<f64>,
    tokens: f64,
    last: usize,
    mean: f64,
    /// Cosines with it of the keys that were taken in, added up.
    likeness: f64,
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// A key turned to a position by RoPE of base 100.
fn turned(key: &[f64], position: f64) -> Vec<f64> {
    let half = key.len() / 2;
    let turn = |pair: usize| {
        let (sin, cos) = (position * 100f64.powf(-2.0 * pair as f64 / key.len() as f64)).sin_cos();
        let (x, y) = (key[pair], key[pair + half]);
        [x * cos - y * sin, y * cos + x * sin]
    };
    let (first, second): (Vec<f64>, Vec<f64>) = (0..half).map(turn).map(|[x, y]| (x, y)).unzip();
    [first, second].concat()
}

/// Whether a list holds these keys and values, and nothing else.
fn holds(runs: &Runs<'_>, list: usize, expected: &[(Vec<f64>, Vec<f64>)]) -> Result<(), String> {
    if runs.len(0, list) != expected.len() {
        return Err(format!("list {list}: {} rows in place of {}", runs.len(0, list), expected.len()));
    }
    for (at, (key, value)) in expected.iter().enumerate() {
        let mut scratch = vec![0.0; key.len()];
        let rows =
            [runs.keys(0, list, at, 1, &mut scratch).to_vec(), runs.values(0, list, at, 1, &mut scratch).to_vec()];
        for (got, expected) in rows.iter().flatten().zip(key.iter().chain(value)) {
            if (f64::from(*got) - expected).abs() > 1e-4 {
                return Err(format!("list {list} row {at}: {got} in place of {expected}"));
            }
        }
    }
    Ok(())
}

fn tokens(rows: &[f32], heads: usize, all: usize, these: std::ops::Range<usize>) -> TensorView<'_> {
    let width = rows.len() / heads / all;
    TensorView::contiguous(DType::F32, [1, heads, all, width], bytemuck::cast_slice(rows)).tokens(these)
}

/// Writes a token to the modes of a head.
fn write(
    modes: &mut Vec<Mode>,
    (slots, sink, threshold): (usize, usize, f64),
    (key, value): (&[f64], &[f64]),
    position: usize,
) {
    let similarity = |mode: &Mode| cosine(&mode.key, key);
    let others = if position < sink { 0..0 } else { sink..modes.len() };
    let nearest = others.max_by(|&a, &b| similarity(&modes[a]).total_cmp(&similarity(&modes[b])));
    match nearest.filter(|&slot| similarity(&modes[slot]) > threshold) {
        Some(slot) => {
            modes[slot].likeness += similarity(&modes[slot]);
            let Mode { key: mean_key, value: mean_value, tokens, last, mean, .. } = &mut modes[slot];
            let update = |mean: &mut f64, new: f64| *mean = (new + *tokens * *mean) / (*tokens + 1.0);
            mean_key.iter_mut().zip(key).for_each(|(mean, new)| update(mean, *new));
            mean_value.iter_mut().zip(value).for_each(|(mean, new)| update(mean, *new));
            *mean = (position as f64 + (*tokens * *mean).round()) / (*tokens + 1.0);
            (*tokens, *last) = (*tokens + 1.0, position);
        }
        None => {
            let (key, value, mean) = (key.into(), value.into(), position as f64);
            let new = Mode { key, value, tokens: 1.0, last: position, mean, likeness: 0.0 };
            match modes.len() < slots {
                true => modes.push(new),
                false => *modes[sink..].iter_mut().min_by_key(|mode| mode.last).unwrap() = new,
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Every row that a token reads, for random keys of all similarities.
    #[test]
    fn modes_are_those_of_the_paper(
        seed in 0u64..1000,
        slots in 1usize..9,
        window in 1usize..7,
        threshold in prop::sample::select(vec![-2.0, -0.3, 0.2, 0.6, 0.9, 2.0]),
        top in prop::sample::select(vec![None, Some(1), Some(3)]),
        place in 0usize..3,
        sink in prop::sample::select(vec![0usize, 0, 2]),
        sliding in prop::sample::select(vec![None, Some(5), Some(17)]),
    ) {
        const TOKENS: usize = 30;
        const HEADS: usize = 2;
        const WIDTH: usize = 4;
        let place_name = ["last", "mean", "near"][place];
        let slots = slots + sink;
        let text = format!("camelot:slots={slots},sink={sink},window={window},threshold={threshold},position={place_name}");
        // Those of the first tokens are read in any case.
        let top = top.map(|top: usize| top + sink);
        let text = top.map_or(text.clone(), |top| format!("{text},top={top}"));
        let asked = memory(&text).unwrap();
        let shape = MemoryShape {
            sequences: 1,
            q_heads: HEADS,
            kv_heads: HEADS,
            head_dim: WIDTH,
            max_tokens: TOKENS,
            windowed: sliding.is_some(),
        };
        let mut state = asked.open(&shape, &Arena::unlimited()).unwrap();
        let rope = ModelRope::new(Frequencies::new(WIDTH, 100.0), 1.0);
        let at = At { sequence: 0, window: sliding, rope: &rope, cpu: cpu(2) };
        // A common part makes keys similar.
        let mut rng = rng(seed);
        let common = normal(&mut rng, WIDTH, 1.0);
        let mut rows = normal(&mut rng, 2 * TOKENS * HEADS * WIDTH, 1.0);
        rows.chunks_exact_mut(WIDTH).for_each(|row| row.iter_mut().zip(&common).for_each(|(x, y)| *x += y));
        let (keys, values) = rows.split_at(TOKENS * HEADS * WIDTH);
        let row = |rows: &[f32], head: usize, token: usize| -> Vec<f64> {
            widen(&rows[(head * TOKENS + token) * WIDTH..][..WIDTH])
        };
        let mut modes = vec![Vec::<Mode>::new(); HEADS];
        let mut seen = 0;
        while seen < TOKENS {
            let count = asked.together(seen, TOKENS - seen, sliding);
            let of = |rows| tokens(rows, HEADS, TOKENS, seen..seen + count);
            state.append(&at, of(keys), of(values));
            let own = seen + count - 1;
            let oldest = sliding.map_or(0, |sliding: usize| (own + 1).saturating_sub(sliding));
            let segment = own - own % window;
            {
                let runs = state.read(&at, of(keys));
                prop_assert!(runs.max_len() <= asked.most_rows(&shape));
                for (head, modes) in modes.iter().enumerate() {
                    let key = row(keys, head, own);
                    let mut ranks: Vec<usize> = (0..modes.len()).collect();
                    ranks.sort_by_key(|&slot| modes[slot].last);
                    let position = |slot: usize| match place {
                        0 => modes[slot].last as f64,
                        1 => modes[slot].mean,
                        _ => (segment - modes.len() + ranks.iter().position(|&other| other == slot).unwrap()) as f64,
                    };
                    let mut read: Vec<usize> = (0..modes.len()).filter(|&slot| position(slot) >= oldest as f64).collect();
                    let similarity = |slot: usize| if slot < sink { 2.0 } else { cosine(&modes[slot].key, &key) };
                    read.sort_by(|&a, &b| similarity(b).total_cmp(&similarity(a)).then(a.cmp(&b)));
                    read.truncate(top.unwrap_or(usize::MAX));
                    read.sort_unstable();
                    let past = read.iter().map(|&slot| (turned(&modes[slot].key, position(slot)), modes[slot].value.clone()));
                    let near = (segment.max(oldest)..=own)
                        .map(|token| (turned(&row(keys, head, token), token as f64), row(values, head, token)));
                    let expected: Vec<_> = past.chain(near).collect();
                    let found = holds(&runs, head, &expected);
                    prop_assert!(found.is_ok(), "{text}: {found:?}");
                }
            }
            state.write(&at);
            seen += count;
            if seen.is_multiple_of(window) {
                for (head, modes) in modes.iter_mut().enumerate() {
                    for token in segment..seen {
                        let (key, value) = (row(keys, head, token), row(values, head, token));
                        write(modes, (slots, sink, threshold), (&key, &value), token);
                    }
                    // Every token taken into one mode, or none into any.
                    prop_assert!(threshold > -1.0 || modes.len() == seen.min(1 + sink));
                    prop_assert!(threshold < 1.0 || modes.len() == slots.min(seen));
                }
                let told = state.modes(0).unwrap();
                let mean = |of_head: &dyn Fn(&[Mode]) -> f64| modes.iter().map(|modes| of_head(modes)).sum::<f64>() / HEADS as f64;
                let of_mode = |value: &dyn Fn(&Mode) -> f64| {
                    mean(&|modes| modes.iter().map(value).sum::<f64>() / modes.len() as f64)
                };
                let taken_in = |modes: &[Mode]| modes.iter().map(|mode| mode.tokens - 1.0).sum::<f64>();
                let likeness = |modes: &[Mode]| modes.iter().map(|mode| mode.likeness).sum::<f64>() / taken_in(modes);
                let alike: Vec<f64> = modes.iter().filter(|modes| taken_in(modes) > 0.0).map(|modes| likeness(modes)).collect();
                for (told, expected) in [
                    (told.count, mean(&|modes| modes.len() as f64)),
                    (told.tokens, of_mode(&|mode| mode.tokens)),
                    (told.most_tokens, mean(&|modes| modes.iter().map(|mode| mode.tokens).fold(0.0, f64::max))),
                    (told.single, of_mode(&|mode| f64::from(u8::from(mode.tokens == 1.0)))),
                    (told.age_tokens, of_mode(&|mode| (seen - 1 - mode.last) as f64)),
                    (told.likeness.unwrap_or(0.0), alike.iter().sum::<f64>() / alike.len().max(1) as f64),
                ] {
                    prop_assert!((told - expected).abs() < 1e-4, "{text}: {told} in place of {expected}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Every row that each query head reads, chosen by its own inner products.
    #[test]
    fn a_query_reads_the_keys_nearest_to_it(
        seed in 0u64..1000,
        top in prop::sample::select(vec![1usize, 3, 8, 100]),
        window in 1usize..7,
        sliding in prop::sample::select(vec![None, Some(5), Some(17)]),
    ) {
        const TOKENS: usize = 30;
        const Q_HEADS: usize = 6;
        const HEADS: usize = 2;
        const WIDTH: usize = 4;
        let asked = memory(&format!("memorizing-transformer:top={top},window={window}")).unwrap();
        let shape = MemoryShape {
            sequences: 2,
            q_heads: Q_HEADS,
            kv_heads: HEADS,
            head_dim: WIDTH,
            max_tokens: TOKENS,
            windowed: sliding.is_some(),
        };
        let mut state = asked.open(&shape, &Arena::unlimited()).unwrap();
        let rope = ModelRope::new(Frequencies::new(WIDTH, 100.0), 1.0);
        let at = At { sequence: 1, window: sliding, rope: &rope, cpu: cpu(2) };
        let mut rng = rng(seed);
        let [queries, keys, values] = [Q_HEADS, HEADS, HEADS].map(|heads| normal(&mut rng, heads * TOKENS * WIDTH, 1.0));
        let row = |rows: &[f32], head: usize, token: usize| widen(&rows[(head * TOKENS + token) * WIDTH..][..WIDTH]);
        let mut seen = 0;
        while seen < TOKENS {
            let these = seen..seen + asked.together(seen, TOKENS - seen, sliding);
            let of = |rows, heads| tokens(rows, heads, TOKENS, these.clone());
            state.append(&at, of(&keys, HEADS), of(&values, HEADS));
            let own = these.end - 1;
            let oldest = sliding.map_or(0, |sliding: usize| (own + 1).saturating_sub(sliding));
            let segment = own - own % window;
            // What goes together sees the same of the past.
            prop_assert!(these.len() == 1 || (segment <= top && oldest == 0 && segment <= seen));
            let runs = state.read(&at, of(&queries, Q_HEADS));
            prop_assert!(runs.max_len() <= asked.most_rows(&shape));
            for head in 0..asked.lists(&shape) {
                let (query, kv_head) = (row(&queries, head, own), head / (Q_HEADS / HEADS));
                let key = |token: usize| turned(&row(&keys, kv_head, token), token as f64);
                let product = |token: usize| key(token).iter().zip(&query).map(|(a, b)| a * b).sum::<f64>();
                let mut past: Vec<usize> = (oldest..segment.max(oldest)).collect();
                past.sort_by(|&a, &b| product(b).total_cmp(&product(a)));
                past.truncate(top);
                past.sort_unstable();
                let read = past.into_iter().chain(segment.max(oldest)..=own);
                let expected: Vec<_> = read.map(|token| (key(token), row(&values, kv_head, token))).collect();
                let found = holds(&runs, head, &expected);
                prop_assert!(found.is_ok(), "{found:?}");
            }
            drop(runs);
            state.write(&at);
            seen = these.end;
            prop_assert_eq!(state.held_rows(1), HEADS * seen);
        }
    }
}

#[test]
fn logits_do_not_depend_on_chunks_batches_or_threads() {
    for name in ["llama", "qwen3", "gemma2"] {
        let (model, Checkpoint { tokens, .. }) = open(name);
        for text in [
            "camelot:slots=9,window=6,threshold=0.5",
            "camelot:slots=9,window=6,threshold=0.5,top=3,position=mean",
            "camelot:slots=9,window=6,threshold=0.5,position=near",
            "transformer-xl:slots=9,window=6",
            "memorizing-transformer:top=5,window=6",
        ] {
            let whole = alone(&model, &tokens, text);
            for (prompt, chunk) in [(tokens.len(), 1), (tokens.len(), 100), (1, 1), (11, 4)] {
                let got = logits(&model, &[&tokens], text, prompt, chunk, 2).remove(0);
                assert!(furthest(&got, &whole) < 1e-4, "{name}, {text}, {prompt} in chunks of {chunk}");
            }
            let threads = |count| logits(&model, &[&tokens], text, 30, 16, count).remove(0);
            assert_eq!(bits(&threads(1)), bits(&threads(3)), "{name}, {text}");
            let batch: [&[u32]; 3] = [&tokens[..23], &tokens[5..], &tokens[30..31]];
            let together = logits(&model, &batch, text, 25, 9, 2);
            for (tokens, together) in batch.iter().zip(&together) {
                assert!(furthest(&alone(&model, tokens, text), together) < 1e-4, "{name}, {text}");
            }
        }
    }
}

#[test]
fn a_fork_goes_on_as_its_original_would() {
    let (model, Checkpoint { tokens, .. }) = open("llama");
    for text in [
        "camelot:slots=7,window=6,threshold=0.5",
        "transformer-xl:slots=7,window=6",
        "memorizing-transformer:top=4,window=6",
    ] {
        let (arena, memory) = (Arena::unlimited(), memory(text).unwrap());
        let mut decoder = Decoder::with_memory(&model, setup(2, 16), &*memory, cpu(2), &arena).unwrap();
        decoder.prefill(&[&tokens[..20], &tokens[7..31]], |_, _, _| ()).unwrap();
        decoder.fork(0, 1).unwrap();
        let mut rest = vec![Vec::new(); 2];
        // Another text in the original, and the same text in its fork.
        decoder.follow(&[&tokens[3..9], &tokens[20..]], |at, _, logits| rest[at].extend_from_slice(logits)).unwrap();
        let whole = alone(&model, &tokens, text);
        assert!(furthest(&rest[1], &whole[20 * model.config.vocab..]) < 1e-4, "{text}");
        decoder.free(1);
        let mut again = Vec::new();
        decoder.prefill(&[&[], &tokens], |_, _, logits| again.extend_from_slice(logits)).unwrap();
        assert!(furthest(&again, &whole) < 1e-4, "{text}");
    }
}

#[test]
fn the_peak_is_the_formula() {
    for (name, text, chunk_tokens, calls) in [
        ("llama", "camelot:slots=10,window=8", 16, vec![vec![40, 13], vec![1, 1], vec![0, 5]]),
        ("llama", "camelot:slots=10,window=8,top=4", 16, vec![vec![40, 13], vec![1, 1]]),
        ("llama", "camelot:slots=1000,window=300", 7, vec![vec![5, 0], vec![30, 2]]),
        ("gemma2", "camelot:slots=10,window=8,position=near", 16, vec![vec![40, 13], vec![1, 1]]),
        ("gemma2", "transformer-xl:slots=10,window=32", 64, vec![vec![40, 13], vec![30, 1]]),
        ("qwen3", "transformer-xl:slots=1,window=1", 64, vec![vec![7, 7]]),
        ("llama", "memorizing-transformer:top=4,window=8", 16, vec![vec![40, 13], vec![1, 1], vec![0, 5]]),
        ("gemma2", "memorizing-transformer:top=1000,window=8", 16, vec![vec![40, 13], vec![1, 1]]),
    ] {
        let (model, Checkpoint { tokens, .. }) = open(name);
        let (arena, memory) = (Arena::unlimited(), memory(text).unwrap());
        let setup = setup(2, chunk_tokens);
        let mut decoder = Decoder::with_memory(&model, setup, &*memory, cpu(2), &arena).unwrap();
        for call in &calls {
            decoder.follow(&[&tokens[..call[0]], &tokens[..call[1]]], |_, _, _| ()).unwrap();
        }
        let lens: Vec<&[usize]> = calls.iter().map(|call| &call[..]).collect();
        let predicted = bytes_with_memory(&model, &setup, &*memory, &lens, 2).unwrap() - model.weights.bytes();
        assert_eq!(arena.usage().peak_bytes, predicted, "{name} {text}");
        assert!(decoder.kv_bytes() > 0 && decoder.cache().pages() == 0);
        assert_eq!(arena.usage().live[&kvsieve::memory::Label::Kv], decoder.kv_bytes(), "{name} {text}");
    }
}

#[test]
fn what_means_nothing_is_refused_by_name() {
    for (text, expected) in [
        ("larimar", "unknown memory 'larimar'; there are camelot, transformer-xl, memorizing-transformer"),
        ("camelot:slots=0", "camelot: slots is '0'; it must be a whole number of at least 1"),
        ("camelot:window=0", "camelot: window is '0'; it must be a whole number of at least 1"),
        ("camelot:threshold=3", "camelot: threshold is '3'; it must be a number between -2 and 2"),
        ("camelot:slots=4,sink=4", "camelot: sink is '4'; it must be less than the 4 slots"),
        ("camelot:sink=4,top=4", "camelot: top is '4'; it must be all or more than the 4 of sink"),
        ("camelot:top=none", "camelot: top is 'none'; it must be all or a whole number of at least 1"),
        ("camelot:position=first", "camelot: position is 'first'; it must be last, mean or near"),
        ("memorizing-transformer:top=0", "memorizing-transformer: top is '0'; it must be a whole number of at least 1"),
        ("transformer-xl:top=3", "'transformer-xl' has no parameter 'top'; it has slots, window"),
    ] {
        assert_eq!(memory(text).err().unwrap().to_string(), expected);
    }
}
