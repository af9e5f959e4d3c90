//! Memories of facts: the algebra against Larimar's public code and against plain formulas, what is written and taken out, files.

use kvsieve::episodic::matrix::{Matrix, cosine, dot};
use kvsieve::episodic::{
    Address, Episode, EpisodicError, FactMemory, FactShape, Facts, Inverse, Larimar, Prior, Start, Stays, Store, Write,
};
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
    Larimar {
        slots,
        noise,
        write: Write::Sequential,
        address: Address::Prior,
        prior: Prior::Identity,
        start: Start::Prior,
        inverse: Inverse::Newton { steps: 20 },
    }
}

fn fixture() -> Value {
    serde_json::from_str(include_str!("../fixtures/larimar.json")).unwrap()
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
        for (what, found, expected) in [
            ("mean", &memory.mean()[..], &case["mean"]),
            ("weights", &weights, &case["weights"]),
            ("read", &read, &case["read"]),
        ] {
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
        let settings = Larimar {
            write,
            address: Address::Memory,
            inverse: Inverse::Newton { steps: 15 },
            ..larimar(slots, noise)
        };
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
    assert!(seen[0] - seen[4] > 0.5 && seen[5] - seen[9] > 0.2, "{seen:?}");
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// The four conditions of Moore and Penrose, of matrices of any shape and rank.
    #[test]
    fn an_exact_pseudo_inverse_is_one(rows in 1usize..9, columns in 1usize..9, rank in 1usize..9, seed in 0u64..1000) {
        let arena = Arena::unlimited();
        let product = |left: &Matrix, right: &Matrix| {
            let mut target = Matrix::zeros(&arena, Label::Input, left.rows(), right.columns()).unwrap();
            target.set_product(left, right);
            target
        };
        let a = product(&drawn(rows, rank, seed), &drawn(rank, columns, seed + 1));
        let x = Inverse::Exact.of(&a, &arena).unwrap();
        let (ax, xa) = (product(&a, &x), product(&x, &a));
        prop_assert!(apart(&product(&ax, &a), &a) < 1e-9);
        prop_assert!(apart(&product(&xa, &x), &x) < 1e-9);
        for square in [&ax, &xa] {
            for row in 0..square.rows() {
                for column in 0..row {
                    prop_assert!((square.row(row)[column] - square.row(column)[row]).abs() < 1e-9);
                }
            }
        }
        // With steps enough the iteration comes to the same, unless singular values are nearly 0 that are not.
        if 2 * rank <= rows.min(columns) {
            let iterated = Inverse::Newton { steps: 30 }.of(&a, &arena).unwrap();
            prop_assert!(apart(&iterated, &x) < 1e-4, "{} apart", apart(&iterated, &x));
        }
    }

    /// What is taken out leaves the memory as if it had never been written, and nothing else does.
    #[test]
    fn a_forgotten_fact_was_never_there(count in 2usize..20, at in 0usize..20, noise in 0.05f64..2.0, seed in 0u64..1000) {
        let (width, at) = (12, at % count);
        let facts = drawn(count, width, seed);
        let others: Vec<f64> = (0..count).filter(|&index| index != at).flat_map(|index| facts.row(index).to_vec()).collect();
        let memory = |facts: &Matrix| {
            let mut memory = larimar(8, noise).begin(width, &Arena::unlimited()).unwrap();
            memory.write(facts, &mut || 0.0).unwrap();
            memory
        };
        let (mut forgetful, never) = (memory(&facts), memory(&matrix(count - 1, width, &others)));
        prop_assert!(apart(forgetful.mean(), never.mean()) > 1e-6);
        forgetful.forget(facts.row(at)).unwrap();
        prop_assert!(apart(forgetful.mean(), never.mean()) < 1e-6);
        prop_assert!(apart(forgetful.covariance().unwrap(), never.covariance().unwrap()) < 1e-6);
    }

    /// As many facts as there is room for are read as they were written, by themselves and in any order of writing.
    #[test]
    fn what_fits_is_read_back(count in 1usize..8, seed in 0u64..1000) {
        let facts = drawn(count, 24, seed);
        for (write, most) in [(Write::Episode, 1e-6), (Write::Sequential, 1e-3)] {
            let inverse = Inverse::Exact;
            let noise = if write == Write::Episode { 0.0 } else { 1e-3 };
            let settings = Larimar { write, inverse, start: Start::Empty, ..larimar(8, noise) };
            let mut memory = settings.begin(24, &Arena::unlimited()).unwrap();
            memory.write(&facts, &mut || 0.0).unwrap();
            let mut read = matrix(count, 24, &vec![0.0; count * 24]);
            memory.read(&facts, &mut || 0.0, &mut read).unwrap();
            prop_assert!(apart(&read, &facts) < most, "{write:?}: {}", apart(&read, &facts));
        }
    }
}

/// Another value at a written address, and where there is a list other last bits, are refused before anything is changed.
#[test]
fn a_fact_with_another_value_is_not_forgotten() {
    let facts = drawn(40, 128, 0);
    let (mut other, mut near) = (facts.row(0).to_vec(), facts.row(0).to_vec());
    other[64..].iter_mut().for_each(|value| *value = -*value);
    near[127] *= 1.0 + 1e-12;
    for name in ["larimar:slots=64", "larimar:slots=64,noise=0.01", "larimar:slots=64,scope=list", "list:slots=64"] {
        let (has_list, shape) = (name.contains("list"), FactShape { width: 128, most_facts: 40 });
        let mut memory = FactMemory::parse(name).unwrap().open(&shape, &Arena::unlimited()).unwrap();
        memory.write(&facts, &mut || 0.0).unwrap();
        let read = |memory: &Facts| {
            let mut read = matrix(40, 128, &[0.0; 40 * 128]);
            memory.read(&facts, &mut || 0.0, &mut read).unwrap();
            read.to_vec()
        };
        let before = read(&memory);
        let mut is_refused = |fact: &[f64]| match memory.forget(fact) {
            Err(EpisodicError::NotForgotten(Stays::List)) => has_list,
            Err(EpisodicError::NotForgotten(Stays::Value { lengths })) => !has_list && lengths > 100.0,
            _ => false,
        };
        assert!(is_refused(&other) && (!has_list || is_refused(&near)), "{name}");
        assert!(before == read(&memory), "{name}");
        memory.forget(facts.row(0)).unwrap();
        let again = memory.forget(facts.row(0)).unwrap_err().to_string();
        assert!(again.contains("is not in the memory"), "{name}: {again}");
    }
}

/// What is taken out leaves no more than a few thousandths behind, whatever the noise: where rounding would, the fact stays.
#[test]
fn a_fact_is_not_forgotten_that_rounding_would_leave() {
    let facts = drawn(60, 128, 0);
    for (noise, taken_out, most) in [
        (0.1, 30..=30, 1e-7),
        (0.05, 30..=30, 1e-6),
        (0.01, 30..=30, 1e-3),
        (0.003, 1..=29, 5e-3),
        (0.001, 0..=3, 5e-3),
    ] {
        let mut memory = larimar(64, noise).begin(128, &Arena::unlimited()).unwrap();
        memory.write(&facts, &mut || 0.0).unwrap();
        let mut left = Vec::new();
        for index in 0..60 {
            match if index < 30 { memory.forget(facts.row(index)) } else { Ok(false) } {
                Ok(true) => continue,
                Ok(false) | Err(EpisodicError::NotForgotten(Stays::Rounding { .. })) => left.push(facts.row(index)),
                Err(error) => panic!("noise {noise}: {error}"),
            }
        }
        let mut never = larimar(64, noise).begin(128, &Arena::unlimited()).unwrap();
        never.write(&matrix(left.len(), 128, &left.concat()), &mut || 0.0).unwrap();
        let off = apart(memory.mean(), never.mean());
        assert!(
            taken_out.contains(&(60 - left.len())) && off < most,
            "noise {noise}: {} stay, {off} apart",
            left.len()
        );
    }
}

#[test]
fn an_episode_takes_the_bytes_that_are_predicted() {
    let memories = [
        "larimar:slots=8",
        "larimar:slots=8,inverse=exact",
        "larimar:slots=40,address=memory,prior=random,scope=list",
        "larimar:slots=8,write=episode",
        "larimar:slots=40,write=episode,inverse=exact,scope=residual",
        "list:slots=12,scope=list",
    ];
    for memory in memories {
        for episode in [
            "write:count=9,width=24",
            "write:count=80,width=16,cue=0.5",
            "forget:count=12,width=24",
            "overwrite:count=12,width=24",
        ] {
            let (memory, parsed) = (FactMemory::parse(memory).unwrap(), Episode::parse(episode).unwrap());
            if parsed.changes() && !memory.method.forgets() {
                continue;
            }
            let arena = Arena::unlimited();
            parsed.run(&memory, 0, 0, &arena).unwrap();
            assert_eq!(arena.usage().peak_bytes, parsed.peak_bytes(&memory), "{episode}");
            assert_eq!(arena.usage().live_bytes, 0);
        }
    }
}

#[test]
fn episodes_are_drawn_from_their_seed_and_few_facts_are_recalled_changed_and_forgotten() {
    let arena = Arena::unlimited();
    for name in ["larimar:slots=64,scope=list", "list:slots=64,scope=list"] {
        let memory = FactMemory::parse(name).unwrap();
        let run = |episode: &str, seed: u64| Episode::parse(episode).unwrap().run(&memory, seed, 0, &arena).unwrap();
        let written = run("write:count=16", 0);
        assert_eq!(written, run("write:count=16", 0));
        assert!(written.likeness != run("write:count=16", 1).likeness || name.starts_with("list"));
        assert!(
            written.kept == Some(1.0) && written.unwritten < 0.1 && written.changed.is_none(),
            "{name}: {written:?}"
        );
        assert!(written.answered_unwritten < 0.1 && written.scope_auc > Some(0.99), "{name}: {written:?}");
        let forgotten = run("forget:count=16", 0);
        assert!(forgotten.kept == Some(1.0) && forgotten.old < Some(0.1), "{name}: {forgotten:?}");
        let replaced = run("overwrite:count=16", 0);
        assert!(replaced.changed == Some(1.0) && replaced.old < Some(0.1), "{name}: {replaced:?}");
    }
}

#[test]
fn what_cannot_be_is_said_in_one_line() {
    let shape = FactShape { width: 8, most_facts: 4 };
    let fact = drawn(1, 8, 0);
    for (text, said) in [
        ("larimar:slots=0", "larimar: slots is '0'; it must be a whole number from 1 to 16384"),
        ("larimar:slots=100000", "from 1 to 16384"),
        ("larimar:noise=-1", "a number between 0 and 1000"),
        ("larimar:prior=none", "identity or random"),
        ("larimar:start=empty,address=memory", "prior with address=memory"),
        ("larimar:steps=50", "from 1 to 40"),
        ("larimar:inverse=exact,steps=3", "left out with inverse=exact"),
        ("larimar:write=episode,address=memory", "address is 'memory'; it must be left out with write=episode"),
        ("larimar:write=episode,start=prior", "start is 'prior'; it must be left out with write=episode"),
        ("larimar:threshold=0.5", "left out without a scope detector"),
        ("list:scope=near", "none, list or residual"),
        ("list:noise=1", "'list' has no parameter 'noise'; it has slots, scope, threshold"),
        ("hopfield", "unknown memory of facts 'hopfield'"),
    ] {
        let error = FactMemory::parse(text).err().unwrap().to_string();
        assert!(error.contains(said) && !error.contains('\n'), "{error}");
    }
    for (text, said) in [
        ("write:width=1", "width is '1'"),
        ("write:count=0", "count is '0'"),
        ("write:share=0.5", "'write' has no parameter 'share'"),
        ("forget:by=prayer", "delete or unknown or both"),
        ("overwrite:share=0", "share is '0'; it must be above 0 and at most 1"),
        ("recite", "unknown episode 'recite'"),
    ] {
        let error = Episode::parse(text).err().unwrap().to_string();
        assert!(error.contains(said) && !error.contains('\n'), "{error}");
    }
    let open = |text: &str| FactMemory::parse(text).unwrap().open(&shape, &Arena::unlimited());
    let forget = |text: &str| open(text).unwrap().forget(fact.row(0)).unwrap_err();
    assert!(matches!(forget("larimar:slots=4"), EpisodicError::NotForgotten(Stays::Address { .. })));
    assert!(matches!(forget("larimar:slots=4,write=episode"), EpisodicError::NoCovariance));
    let mut quiet = || 0.0;
    let strange = open("larimar:slots=4").unwrap().write(&drawn(1, 9, 0), &mut quiet);
    assert!(matches!(strange, Err(EpisodicError::Width { found: 9, expected: 8 })));
    // What would be kept as nothing, or turn the slots into NaN, is not written.
    for (text, head, tail, said) in [
        ("larimar:slots=4", 0.0, 1.0, "its first 4 numbers alone make its address"),
        ("larimar:slots=4", 1e200, 1.0, "of its address, is inf; to be a fact's it must be above 0 and finite"),
        ("larimar:slots=4,write=episode", 1.0, f64::NAN, "is NaN;"),
        ("larimar:slots=4,prior=random", 0.0, 0.0, "is 0;"),
        ("list", 0.0, 1e200, "is inf;"),
        ("list", 0.0, 0.0, "is 0;"),
    ] {
        let (mut memory, values) = (open(text).unwrap(), [[head; 4], [tail; 4]].concat());
        let written = memory.write(&matrix(1, 8, &values), &mut quiet).unwrap_err().to_string();
        let forgotten = memory.forget(&values).unwrap_err().to_string();
        assert!(written.contains(said) && forgotten == written, "{text}: {written}; {forgotten}");
        memory.write(&drawn(2, 8, 1), &mut quiet).unwrap();
    }
    // More rows than columns depend on one another.
    let singular = open("larimar:slots=9,noise=0,address=memory").unwrap().write(&fact, &mut quiet);
    assert!(matches!(singular, Err(EpisodicError::Singular { .. })));
    let mut long = drawn(1, 8, 0);
    long.iter_mut().for_each(|value| *value *= 100.0);
    let diverges = open("larimar:slots=4,write=episode").unwrap().write(&long, &mut quiet);
    assert!(matches!(diverges, Err(EpisodicError::Diverges { .. })));
    // A largest singular value just above what converges, among others of which the power method can hardly tell it.
    let mut near = drawn(8, 8, 0);
    near.fill(0.0);
    (0..8).for_each(|at| near[at * 9] = if at == 0 { 63.35 } else { 63.18 });
    let diverges = open("larimar:slots=8,noise=0,write=episode").unwrap().write(&near, &mut quiet);
    assert!(matches!(diverges, Err(EpisodicError::Diverges { .. })));
}

#[test]
fn memories_are_saved_and_read_back_and_damage_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memory.safetensors");
    let shape = FactShape { width: 16, most_facts: 6 };
    for text in ["larimar:slots=6,scope=list", "larimar:slots=6,write=episode", "list:slots=3,scope=residual"] {
        let mut facts = FactMemory::parse(text).unwrap().open(&shape, &Arena::unlimited()).unwrap();
        facts.write(&drawn(5, 16, 0), &mut || 0.0).unwrap();
        facts.save(&path, text, &shape).unwrap();
        let (name, found, mut again) = Facts::load(&path, &Arena::unlimited()).unwrap();
        assert_eq!((name.as_str(), found), (text, shape));
        // What was loaded goes on as what was saved does.
        let mut reads = Vec::new();
        for facts in [&mut facts, &mut again] {
            if !text.contains("episode") {
                facts.write(&drawn(1, 16, 1), &mut || 0.0).unwrap();
            }
            let mut read = drawn(5, 16, 2);
            facts.read(&drawn(5, 16, 3), &mut || 0.0, &mut read).unwrap();
            reads.push((read.to_vec(), facts.distance(drawn(1, 16, 0).row(0), read.row(0))));
        }
        assert_eq!(reads[0], reads[1], "{text}");
        let whole = std::fs::read(&path).unwrap();
        let mut changed = whole.clone();
        *changed.last_mut().unwrap() ^= 1;
        // A width of which no tensor is, and more than there is memory for.
        let end = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        let header = String::from_utf8(whole[8..end].to_vec()).unwrap();
        let header = header.replace(r#""width":"16""#, r#""width":"4611686018427387904""#);
        let wide = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &whole[end..]].concat();
        for damaged in [&whole[..whole.len() - 9], &whole[..20], &changed, &wide] {
            std::fs::write(&path, damaged).unwrap();
            let error = Facts::load(&path, &Arena::unlimited()).err().unwrap().to_string();
            assert!(error.contains("memory.safetensors") && !error.contains('\n'), "{error}");
        }
    }
}
