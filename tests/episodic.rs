//! Memories of facts: the algebra against Larimar's public code and against plain formulas, what is written and taken out, files.

mod common;

use kvsieve::episodic::matrix::{Matrix, cosine, dot};
use kvsieve::episodic::{Address, Episode, EpisodicError, FactMemory, FactShape, Facts, Inverse, Larimar, Prior, Step, Store, Write};
use kvsieve::memory::{Arena, Label};
use proptest::prelude::*;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use serde_json::Value;

fn matrix(rows: usize, columns: usize, values: &[f64]) -> Matrix {
    let mut matrix = Matrix::zeros(&Arena::unlimited(), Label::Input, rows, columns).unwrap();
    matrix.copy_from_slice(values);
    matrix
}

fn drawn(rows: usize, columns: usize, seed: u64) -> Matrix {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    matrix(rows, columns, &(0..rows * columns).map(|_| StandardNormal.sample(&mut rng)).collect::<Vec<f64>>())
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn count(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

/// Distance of two lists, as a part of the length of the second.
fn apart(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let difference: Vec<f64> = found.iter().zip(expected).map(|(a, b)| a - b).collect();
    (dot(&difference, &difference) / dot(expected, expected)).sqrt()
}

fn larimar(slots: usize, noise: f64) -> Larimar {
    let inverse = Inverse::Newton { steps: 20 };
    Larimar { slots, noise, write: Write::Sequential, address: Address::Prior, prior: Prior::Identity, inverse }
}

fn fixture() -> Value {
    serde_json::from_str(include_str!("fixtures/larimar.json")).unwrap()
}

#[test]
fn writes_and_reads_agree_with_the_public_code() {
    for case in fixture()["cases"].as_array().unwrap() {
        let (slots, width) = (count(&case["slots"]), count(&case["width"]));
        let (facts, cues) = (numbers(&case["facts"]), numbers(&case["cues"]));
        let settings = Larimar {
            write: if case["episode"].as_bool().unwrap() { Write::Episode } else { Write::Sequential },
            address: Address::Memory,
            inverse: Inverse::Newton { steps: count(&case["steps"]) },
            ..larimar(slots, case["noise"].as_f64().unwrap())
        };
        let arena = Arena::unlimited();
        let mut memory = settings.begin(width, &arena).unwrap().with_prior(&numbers(&case["prior"])).unwrap();
        let deviates = numbers(&case["deviates"]);
        let mut deviates = deviates.iter();
        let mut noise = || *deviates.next().unwrap();
        memory.write(&matrix(facts.len() / width, width, &facts), &mut noise).unwrap();
        let cues = matrix(cues.len() / width, width, &cues);
        let mut weights_noise = noise;
        let mut after = Vec::new();
        let mut recorded = || {
            let deviate = weights_noise();
            after.push(deviate);
            deviate
        };
        let weights = memory.read_weights(&cues, &mut recorded).unwrap();
        // A read draws the same deviates for its weights, and goes on with those of what is read.
        let mut again = after.into_iter().chain(std::iter::from_fn(|| Some(weights_noise())));
        let mut read = matrix(cues.rows(), width, &vec![0.0; cues.len()]);
        memory.read(&cues, &mut || again.next().unwrap(), &mut read).unwrap();
        let name = case["name"].as_str().unwrap();
        for (what, found, expected) in
            [("mean", &memory.mean()[..], &case["mean"]), ("weights", &weights, &case["weights"]), ("read", &read, &case["read"])]
        {
            let distance = apart(found, &numbers(expected));
            assert!(distance < 1e-4, "{name}: {what} is {distance} apart");
        }
        if let (Some(found), false) = (memory.covariance(), case["covariance"].is_null()) {
            assert!(apart(found, &numbers(&case["covariance"])) < 1e-4, "{name}: covariance");
        }
        drop(again);
        assert_eq!(deviates.count(), 0, "{name}: deviates are left over");
    }
}

#[test]
fn recall_against_capacity_is_that_of_the_public_code() {
    let capacity = &fixture()["capacity"];
    let (slots, width, values) = (count(&capacity["slots"]), count(&capacity["width"]), count(&capacity["values"]));
    let (subjects, table) = (numbers(&capacity["subjects"]), matrix(values, width, &numbers(&capacity["table"])));
    let mut seen = Vec::new();
    for point in capacity["points"].as_array().unwrap() {
        let count = count(&point["count"]);
        let (write, noise) = match point["episode"].as_bool().unwrap() {
            true => (Write::Episode, 0.0),
            false => (Write::Sequential, capacity["noise"].as_f64().unwrap()),
        };
        let settings = Larimar { write, address: Address::Memory, inverse: Inverse::Newton { steps: 15 }, ..larimar(slots, noise) };
        let mut memory = settings.begin(width, &Arena::unlimited()).unwrap();
        let cues = matrix(count, width, &subjects[..count * width]);
        let mut facts = matrix(count, width, &cues);
        for index in 0..count {
            facts.row_mut(index).iter_mut().zip(table.row(index % values)).for_each(|(fact, value)| *fact += value);
        }
        memory.write(&facts, &mut || 0.0).unwrap();
        let mut read = matrix(count, width, &vec![0.0; count * width]);
        memory.read(&cues, &mut || 0.0, &mut read).unwrap();
        let best: Vec<(usize, f64)> = (0..count)
            .map(|index| {
                let all = (0..values).map(|value| (value, cosine(read.row(index), table.row(value))));
                all.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap()
            })
            .collect();
        let right = best.iter().enumerate().filter(|(index, (value, _))| index % values == *value).count();
        let (recall, expected) = (right as f64 / count as f64, point["recall"].as_f64().unwrap());
        assert!((recall - expected).abs() < 1e-4, "{count} facts, {write:?}: {recall}, not {expected}");
        for ((_, likeness), expected) in best.iter().zip(numbers(&point["likeness"])) {
            assert!((likeness - expected).abs() < 1e-4, "{count} facts, {write:?}: {likeness}, not {expected}");
        }
        seen.push(recall);
    }
    // The curve falls, so that agreement says something.
    assert!(seen[0] > 0.9 && seen[4] < 0.7 && seen[9] < 0.7, "{seen:?}");
}

#[test]
fn facts_are_taken_out_as_the_papers_recursion_says() {
    let case = &fixture()["forget"];
    let (slots, width) = (count(&case["slots"]), count(&case["width"]));
    let facts = numbers(&case["facts"]);
    let facts = matrix(facts.len() / width, width, &facts);
    let mut memory = larimar(slots, case["noise"].as_f64().unwrap()).begin(width, &Arena::unlimited()).unwrap();
    memory.write(&facts, &mut || 0.0).unwrap();
    for index in numbers(&case["forgotten"]) {
        memory.forget(facts.row(index as usize)).unwrap();
    }
    assert!(apart(memory.mean(), &numbers(&case["mean"])) < 1e-4);
    assert!(apart(memory.covariance().unwrap(), &numbers(&case["covariance"])) < 1e-4);
}
