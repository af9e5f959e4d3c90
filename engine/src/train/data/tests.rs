//! What sequences hold, and that they depend on nothing but the seed and their number.

use super::*;
use crate::train::recipe::Stage;
use std::collections::BTreeSet;
use std::path::Path;

fn recipe(sources: &str) -> Recipe {
    let text = super::super::recipe::BUILTIN;
    let mut recipe = Recipe::parse(text, Path::new("built-in")).unwrap();
    let sources = sources.split(' ').map(|source| SourceSpec { source: source.into(), share: 1.0, from_length: 0 });
    recipe.data.sources = sources.collect();
    recipe
}

/// The target tokens of a batch, each with those before it in its sequence.
fn targets_of(batch: &Batch, len: usize) -> Vec<(Vec<u32>, u32)> {
    let before = |target: &Target| batch.tokens[target.row / len * len..=target.row].to_vec();
    batch.targets.iter().map(|target| (before(target), target.token)).collect()
}

#[test]
fn a_batch_depends_on_its_numbers_and_not_on_threads() {
    let (vocabulary, recipe) = (Vocabulary::of_generated_text(), recipe("echo needles recall:queries=40 copy text"));
    let data = Data::new(&recipe, &vocabulary).unwrap();
    let batch = |threads, first| data.batch(&Cpu::new(Some(threads)).unwrap(), first, [12, 200]).unwrap();
    assert_eq!(batch(1, 40), batch(3, 40));
    assert_ne!(batch(1, 40), batch(1, 41));
    // The second half of one batch is the first half of the next.
    assert_eq!(batch(1, 40).tokens[6 * 200..], batch(1, 46).tokens[..6 * 200]);
    let other = Recipe { seed: recipe.seed + 1, ..recipe.clone() };
    assert_ne!(
        Data::new(&other, &vocabulary).unwrap().batch(&Cpu::new(Some(1)).unwrap(), 40, [12, 200]).unwrap(),
        batch(1, 40)
    );
}

#[test]
fn weights_add_up_to_one_and_every_sequence_begins_and_is_full() {
    let vocabulary = Vocabulary::of_generated_text();
    let cpu = Cpu::new(Some(2)).unwrap();
    for source in ["echo", "needles", "recall:queries=40", "copy", "niah-single-2", "text"] {
        let recipe = recipe(source);
        let data = Data::new(&recipe, &vocabulary).unwrap();
        for len in [128, 333] {
            let batch = data.batch(&cpu, 0, [8, len]).unwrap();
            assert_eq!(batch.tokens.len(), 8 * len, "{source}");
            for sequence in batch.tokens.chunks(len) {
                assert_eq!(sequence[..1], *vocabulary.begin(), "{source}");
                assert!(!sequence[1..].contains(&vocabulary.begin()[0]), "{source}");
            }
            let sum: f64 = batch.targets.iter().map(|target| f64::from(target.weight)).sum();
            assert!((sum - 1.0).abs() < 1e-5 && batch.targets.is_sorted_by_key(|target| target.row), "{source}");
            let sequences: BTreeSet<usize> = batch.targets.iter().map(|target| target.row / len).collect();
            assert_eq!(sequences.len(), 8, "{source}: a sequence without a target");
        }
    }
}

#[test]
fn the_words_of_an_echo_followed_the_same_word_before() {
    let vocabulary = Vocabulary::of_generated_text();
    let recipe = recipe("echo");
    let data = Data::new(&recipe, &vocabulary).unwrap();
    let batch = data.batch(&Cpu::new(Some(1)).unwrap(), 0, [8, 300]).unwrap();
    let mut words = 0;
    for (before, token) in targets_of(&batch, 300) {
        let last = before[before.len() - 1];
        if Some(token) == vocabulary.end() {
            continue;
        }
        assert!(before.windows(2).any(|pair| pair == [last, token]), "{}", vocabulary.decode(&before));
        words += 1;
    }
    assert!(words > 500, "{words}");
}

#[test]
fn what_is_held_out_asks_one_question_whose_answer_is_judged() {
    let vocabulary = Vocabulary::of_generated_text();
    let recipe = recipe("text");
    let data = Data::new(&recipe, &vocabulary).unwrap();
    let cpu = Cpu::new(Some(1)).unwrap();
    let batch = data.held_out(&cpu, "niah-single-2", 6, 256).unwrap();
    for (index, sequence) in batch.tokens.chunks(256).enumerate() {
        let answer: Vec<u32> =
            batch.targets.iter().filter(|target| target.row / 256 == index).map(|t| t.token).collect();
        let answer = vocabulary.decode(&answer);
        let text = vocabulary.decode(sequence);
        assert!(text.matches(answer.trim_end_matches('.')).count() >= 1, "{answer} in {text}");
        assert!(answer.trim().trim_end_matches('.').parse::<u32>().is_ok_and(|number| number >= 1_000_000), "{answer}");
        assert!(text.contains("What is the code of"), "{text}");
    }
    assert!(data.held_out(&cpu, "niah-single-2", 1, 20).is_err());
}

/// With a text of its own a recipe's sequences are pieces of it, needles lie in it, and quotes are foretold by what stands before.
#[test]
fn text_quotes_and_haystacks_come_from_the_recipes_text_and_its_end_is_held_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text.txt");
    let numbered: Vec<String> =
        (0..400).map(|at| format!("Document {at} says that cats are {} and dogs are not.", at * 7)).collect();
    std::fs::write(&path, numbered.join("\n\n")).unwrap();
    let mut recipe = recipe("text");
    recipe.data.text = Some(path.clone());
    recipe.stages = vec![Stage { length: 200, batch: 4, steps: 1 }];
    let documents = numbered.join("\n\n");
    let vocabulary = Vocabulary::of_json(&Vocabulary::json_of_text(&[&documents], 400));
    let cpu = Cpu::new(Some(2)).unwrap();
    let sequences = |source: &str| {
        let sources = vec![SourceSpec { source: source.into(), share: 1.0, from_length: 0 }];
        let recipe = Recipe { data: DataSpec { sources, ..recipe.data.clone() }, ..recipe.clone() };
        let data = Data::new(&recipe, &vocabulary).unwrap();
        data.batch(&cpu, 0, [4, 200]).unwrap()
    };
    let learned = vocabulary.decode(&vocabulary.encode(&documents));
    let prose = sequences("text");
    for sequence in prose.tokens.chunks(200) {
        let read = vocabulary.decode(&sequence[1..]);
        assert!(learned.contains(&read) && !read.contains("Document 39"), "{read}");
    }
    assert_eq!(prose.targets.len(), 4 * 200, "every token of a text is a target");

    let quotes = sequences("quotes");
    let weights = || quotes.targets.iter().map(|target| target.weight);
    let (heavy, light) = (weights().fold(0.0, f32::max), weights().fold(1.0, f32::min));
    assert!((heavy / light * recipe.data.text_weight - 1.0).abs() < 1e-4, "{heavy} and {light}");
    let quoted: Vec<_> = targets_of(&quotes, 200)
        .into_iter()
        .zip(&quotes.targets)
        .filter(|(_, target)| target.weight == heavy)
        .collect();
    assert!(quoted.len() > 100, "{}", quoted.len());
    for ((before, token), _) in quoted {
        let last = &before[before.len() - 2..];
        assert!(before[..before.len() - 1].windows(3).any(|seen| seen[..2] == *last && seen[2] == token));
    }

    let needles = sequences("needles");
    let text: String = needles.tokens.chunks(200).map(|sequence| vocabulary.decode(sequence)).collect();
    assert!(text.contains("code of") && text.contains("cats are"), "{text}");

    let data = Data::new(&recipe, &vocabulary).unwrap();
    let held_out = data.held_out_text(2, 100).unwrap();
    assert_eq!((held_out.tokens.len(), held_out.targets.len()), (200, 200));
    assert_ne!(held_out.tokens[..100], held_out.tokens[100..], "pieces from different places");
    assert!(vocabulary.decode(&held_out.tokens[101..]).contains("Document 3"));
    assert!(
        Data::new(
            &Recipe { data: DataSpec { text: Some("nowhere.txt".into()), ..recipe.data.clone() }, ..recipe },
            &vocabulary
        )
        .is_err()
    );
}
