//! Memories in models: against the full cache where they must equal it, against one another, and against a memory that is
//! worked out here; their bytes, and that nothing depends on chunks, batches or threads.

mod common;

use common::models::{Checkpoint, all, checkpoint, deviation, furthest};
use common::{bits, cpu};
use kvsieve::format::KvFormat;
use kvsieve::memories::{MEMORIES, memory};
use kvsieve::memory::Arena;
use kvsieve::model::{Decoder, Model, Setup, bytes_with_memory};
use kvsieve::tensor::DType;

fn setup(batch: usize, chunk_tokens: usize) -> Setup<'static> {
    Setup {
        kernel: "tiled",
        batch,
        max_tokens: 80,
        chunk_tokens,
        all_logits: true,
        dtype: DType::F32,
        kv_format: KvFormat::plain(DType::F32),
        columns: &[],
    }
}

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
                // Dynamic scaling turns a prompt's keys by the length of the prompt.
                if name == "dynamic" && prompt < expected.tokens.len() {
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

#[test]
fn slots_without_consolidation_are_a_ring() {
    for name in ["llama", "qwen3", "mistral", "gemma2"] {
        let (model, Checkpoint { tokens, .. }) = open(name);
        for slots in [1, 6, 20] {
            let ring = alone(&model, &tokens, &format!("transformer-xl:slots={slots},window=8"));
            let camelot = alone(&model, &tokens, &format!("camelot:slots={slots},window=8,threshold=2"));
            assert!(furthest(&ring, &camelot) < 1e-4, "{name}, {slots} slots");
            let full = alone(&model, &tokens, MEMORIES[0].exact);
            assert!(furthest(&ring, &full) > 1e-3, "{name}: {slots} slots are not all tokens");
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
    for text in ["camelot:slots=7,window=6,threshold=0.5", "transformer-xl:slots=7,window=6"] {
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
        ("larimar", "unknown memory 'larimar'; there are camelot, transformer-xl"),
        ("camelot:slots=0", "camelot: slots is '0'; it must be a whole number of at least 1"),
        ("camelot:window=0", "camelot: window is '0'; it must be a whole number of at least 1"),
        ("camelot:threshold=3", "camelot: threshold is '3'; it must be a number between -2 and 2"),
        ("camelot:top=none", "camelot: top is 'none'; it must be all or a whole number of at least 1"),
        ("camelot:position=first", "camelot: position is 'first'; it must be last, mean or near"),
        ("transformer-xl:top=3", "'transformer-xl' has no parameter 'top'; it has slots, window"),
    ] {
        assert_eq!(memory(text).err().unwrap().to_string(), expected);
    }
}
