//! Measures what the knobs promise on generated tensors, with a softmax of its own in f64.

use super::super::calibrate::BAND_TOKENS;
use super::*;
use crate::tensor::DType;

const PLAIN: Extents = Extents {
    layers: 1,
    batch: 1,
    q_heads: 4,
    kv_heads: 2,
    head_dim: 64,
    context_tokens: 2048,
    new_tokens: 64,
    dtype: DType::F32,
};

fn generate(spec: &SyntheticSpec, extents: &Extents, seed: u64) -> Workload {
    spec.generate(extents, seed, &Arena::unlimited()).unwrap()
}

/// A head's rows in f32.
fn head(tensor: &Tensor, batch: usize, head: usize) -> Vec<f32> {
    let [_, _, tokens, width] = tensor.dims();
    let mut rows = vec![0.0; tokens * width];
    tensor.view().read_rows(batch, head, 0, &mut rows);
    rows
}

/// The true softmax of one causal query, in f64.
fn softmax(query: &[f32], keys: &[f32], tokens: usize) -> Vec<f64> {
    let scale = (query.len() as f64).sqrt();
    let dot = |key: &[f32]| query.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>() / scale;
    let logits: Vec<f64> = keys.chunks_exact(query.len()).take(tokens).map(dot).collect();
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|logit| (logit - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

/// Mean masses on sinks, heavy hitters and the last tokens over late queries that ask nothing: retrieval heads, local.
fn measured_masses(spec: &SyntheticSpec, extents: &Extents, seed: u64) -> [[f64; 3]; 2] {
    let workload = generate(spec, extents, seed);
    let scene = Scene::new(spec, extents, seed).unwrap();
    let width = extents.head_dim;
    let mut sums = [[0.0; 3]; 2];
    let mut counts = [0.0; 2];
    for q_head in 0..extents.q_heads {
        let kv_head = q_head * extents.kv_heads / extents.q_heads;
        let (plan, _) = scene.plan(0, kv_head);
        let kind = usize::from(kv_head >= spec.retrieval_heads_of(extents.kv_heads));
        let (q, k) = (head(&workload.q, 0, q_head), head(&workload.k, 0, kv_head));
        for token in (extents.context_tokens..extents.total_tokens()).filter(|&token| plan.asked(token).is_none()) {
            let mass = softmax(&q[token * width..][..width], &k, token + 1);
            counts[kind] += 1.0;
            sums[kind][0] += mass[..spec.sinks].iter().sum::<f64>();
            sums[kind][1] += plan.heavy.keys().map(|&position| mass[position]).sum::<f64>();
            sums[kind][2] += mass[token + 1 - BAND_TOKENS..].iter().sum::<f64>();
        }
    }
    [0, 1].map(|kind| sums[kind].map(|sum| sum / counts[kind]))
}

#[test]
fn masses_are_what_the_knobs_say() {
    let shy = SyntheticSpec { sink_mass: 0.1, heavy_mass: 0.4, band_mass: 0.1, ..SyntheticSpec::default() };
    let quiet = SyntheticSpec { noise: 0.0, ..SyntheticSpec::default() };
    // A single sink differs from head to head: many of them are averaged.
    let heads = Extents { q_heads: 48, kv_heads: 48, ..PLAIN };
    for (spec, plain, head_dim, context_tokens) in [
        (SyntheticSpec::default(), &PLAIN, 64, 2048),
        (SyntheticSpec::default(), &PLAIN, 64, 8192),
        (SyntheticSpec::default(), &PLAIN, 128, 2048),
        (SyntheticSpec::default(), &PLAIN, 128, 8192),
        (shy, &PLAIN, 64, 2048),
        (quiet, &PLAIN, 64, 2048),
        (SyntheticSpec::smollm2(), &heads, 64, 2048),
    ] {
        let extents = Extents { head_dim, context_tokens, new_tokens: 32, ..*plain };
        let [retrieval, local] = measured_masses(&spec, &extents, 7);
        for (measured, band_mass) in [(retrieval, spec.band_mass), (local, spec.local_band_mass)] {
            let wanted = [spec.sink_mass, spec.heavy_mass, band_mass];
            for (measured, wanted) in measured.iter().zip(wanted) {
                assert!((measured - wanted).abs() < 0.12, "{extents:?}: {retrieval:.3?} {local:.3?}");
            }
        }
    }
}

#[test]
fn values_have_the_norms_that_the_knobs_say() {
    let spec = SyntheticSpec {
        sinks: 32,
        sink_value_norm: 0.25,
        heavy_value_norm: 2.0,
        value_spread: 0.3,
        ..Default::default()
    };
    let (workload, scene) = (generate(&spec, &PLAIN, 5), Scene::new(&spec, &PLAIN, 5).unwrap());
    let [mut sink, mut heavy, mut ordinary] = [const { Vec::new() }; 3];
    for kv_head in 0..PLAIN.kv_heads {
        let (plan, _) = scene.plan(0, kv_head);
        for (token, value) in head(&workload.v, 0, kv_head).chunks_exact(PLAIN.head_dim).enumerate() {
            let norm = value.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt().ln();
            match plan.role(token, spec.sinks) {
                Role::Sink => sink.push(norm),
                Role::Heavy(_) => heavy.push(norm),
                Role::Ordinary | Role::Needle(_) => ordinary.push(norm),
            }
        }
    }
    let mean = |norms: &[f64]| norms.iter().sum::<f64>() / norms.len() as f64;
    let of_ordinary = mean(&ordinary);
    // 64 sinks and 80 heavy hitters: a mean is within 4 standard errors.
    assert!((mean(&sink) - of_ordinary - 0.25f64.ln()).abs() < 0.16, "sinks");
    assert!((mean(&heavy) - of_ordinary - 2f64.ln()).abs() < 0.14, "heavy hitters");
    let variance = ordinary.iter().map(|norm| (norm - of_ordinary).powi(2)).sum::<f64>() / ordinary.len() as f64;
    // Noise of 64 channels has a deviation of its own, 1 / sqrt(2 * 64).
    assert!((variance - 0.09 - 1.0 / 128.0).abs() < 0.01, "{variance}");
    // Without the knobs values are the noise that they were: no number of it is drawn for norms.
    let [plain, even] = [SyntheticSpec::default(), SyntheticSpec { sink_value_norm: 0.5, ..Default::default() }]
        .map(|spec| head(&generate(&spec, &PLAIN, 5).v, 0, 1));
    let sinks = 4 * PLAIN.head_dim;
    assert!(plain[sinks..] == even[sinks..] && plain[..sinks].iter().zip(&even).all(|(a, b)| b / a == 0.5));
}

#[test]
fn asking_queries_give_the_needle_its_mass_and_its_value_comes_out() {
    let spec = SyntheticSpec::default();
    for (head_dim, context_tokens, dtype) in [(64, 2048, DType::F32), (128, 8192, DType::F32), (64, 2048, DType::Bf16)]
    {
        let extents = Extents { head_dim, context_tokens, dtype, new_tokens: 8, batch: 2, ..PLAIN };
        let workload = generate(&spec, &extents, 3);
        assert_eq!(workload.needles.len(), 2 * 8, "one of two heads retrieves, in each sequence");
        let mut right = 0;
        for needle in &workload.needles {
            let v = head(&workload.v, needle.batch, needle.kv_head);
            let k = head(&workload.k, needle.batch, needle.kv_head);
            let group = extents.q_heads / extents.kv_heads;
            for q_head in needle.kv_head * group..(needle.kv_head + 1) * group {
                let q = head(&workload.q, needle.batch, q_head);
                let mass = softmax(&q[needle.asked_by * head_dim..][..head_dim], &k, needle.asked_by + 1);
                let got = mass[needle.position];
                assert!((got - 0.6).abs() < if dtype == DType::F32 { 0.01 } else { 0.1 }, "{needle:?} got {got}");
                let mut output = vec![0.0; head_dim];
                for (mass, value) in mass.iter().zip(v.chunks_exact(head_dim)) {
                    output.iter_mut().zip(value).for_each(|(out, &x)| *out += mass * f64::from(x));
                }
                let likeness = |other: &&Needle| -> f64 {
                    let value = &v[other.position * head_dim..][..head_dim];
                    output.iter().zip(value).map(|(&o, &x)| o * f64::from(x)).sum()
                };
                let here = |other: &&Needle| (other.batch, other.kv_head) == (needle.batch, needle.kv_head);
                let found =
                    workload.needles.iter().filter(here).max_by(|a, b| likeness(a).total_cmp(&likeness(b))).unwrap();
                right += usize::from(found == needle);
            }
        }
        assert!(right as f64 >= 0.95 * (2 * workload.needles.len()) as f64, "{right} of 32");
    }
}

#[test]
fn needles_stand_where_a_policy_must_find_them() {
    let spec = SyntheticSpec { needles: 20, ..SyntheticSpec::default() };
    let extents = Extents { new_tokens: 12, ..PLAIN };
    let needles = generate(&spec, &extents, 1).needles;
    assert_eq!(needles.len(), 12, "no more than there are late tokens to ask for them");
    let mut asked: Vec<usize> = needles.iter().map(|needle| needle.asked_by).collect();
    asked.dedup();
    assert_eq!(asked, (2048..2060).collect::<Vec<_>>());
    assert_eq!(needles.iter().filter(|needle| needle.hinted).count(), 6);
    let mut positions: Vec<usize> = needles.iter().map(|needle| needle.position).collect();
    positions.sort_unstable();
    assert!(positions[0] >= 4 && positions[11] < 2048 - 64, "{positions:?}");
    assert!(positions.windows(2).all(|pair| pair[0] < pair[1] && pair[1] - pair[0] < 400), "{positions:?}");
    assert!(generate(&spec, &Extents { new_tokens: 0, ..PLAIN }, 1).needles.is_empty());
}

#[test]
fn salient_keys_are_smaller_and_less_like_the_mean_key() {
    let (spec, extents) = (SyntheticSpec::default(), PLAIN);
    let workload = generate(&spec, &extents, 5);
    let k = head(&workload.k, 0, 0);
    let squared = |token: usize| k[token * 64..][..64].iter().map(|x| x * x).sum::<f32>();
    let mut norms: Vec<f32> = (0..2048).map(squared).collect();
    let needles: Vec<f32> = workload.needles.iter().map(|needle| squared(needle.position)).collect();
    norms.sort_by(f32::total_cmp);
    assert!((0..4).all(|sink| squared(sink) < norms[64]), "sinks are among the smallest");
    assert!(needles.iter().all(|&norm| norm < norms[1024]), "{needles:?} below the median {}", norms[1024]);
}

#[test]
fn a_seed_gives_the_same_bytes_whatever_the_threads_and_takes_no_more_than_its_tensors() {
    let (spec, extents) = (SyntheticSpec::default(), Extents { batch: 2, ..PLAIN });
    for dtype in DType::ALL {
        let extents = Extents { dtype, ..extents };
        let arena = Arena::unlimited();
        let one = spec.generate(&extents, 1, &arena).unwrap();
        assert_eq!(arena.usage().peak_bytes, Workload::bytes(&extents));
        assert_eq!(arena.live_bytes(Label::Input), Workload::bytes(&extents));
        let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let again = alone.install(|| generate(&spec, &extents, 1));
        let other = generate(&spec, &extents, 2);
        assert_eq!(one.needles, again.needles);
        assert_ne!(one.needles, other.needles);
        for (a, b, c) in [(&one.q, &again.q, &other.q), (&one.k, &again.k, &other.k), (&one.v, &again.v, &other.v)] {
            assert!(a.bytes() == b.bytes() && a.bytes() != c.bytes());
            assert_eq!(a.first_non_finite(), None);
            assert!(a.to_f32().iter().all(|x| x.abs() < 1000.0));
        }
        let sequences = one.k.bytes().split_at(one.k.bytes().len() / 2);
        assert_ne!(sequences.0, sequences.1, "sequences of a batch differ");
    }
}

#[test]
fn short_contexts_and_bare_specs_work() {
    let bare = SyntheticSpec {
        noise: 0.0,
        heavy_hitters: 0.0,
        band_mass: 0.0,
        local_band_mass: 0.0,
        needles: 0,
        ..SyntheticSpec::default()
    };
    for (spec, head_dim, context_tokens, new_tokens) in [
        (SyntheticSpec::default(), 32, 128, 8),
        (SyntheticSpec::default(), 64, 64, 0),
        (SyntheticSpec { needles: 2, ..SyntheticSpec::default() }, 32, 24, 2),
        (SyntheticSpec { heavy_hitters: 0.4, ..SyntheticSpec::default() }, 32, 24, 8),
        (bare.clone(), 8, 256, 4),
        (bare, 64, 16, 1),
    ] {
        let extents = Extents { head_dim, context_tokens, new_tokens, ..PLAIN };
        let workload = generate(&spec, &extents, 0);
        assert_eq!(workload.k.dims(), extents.kv_dims());
        assert_eq!(workload.q.first_non_finite(), None);
    }
}

#[test]
fn what_cannot_be_planted_is_refused_with_what_would_be_right() {
    let spec = SyntheticSpec::default();
    let cases = [
        (Extents { head_dim: 63, ..PLAIN }, "head dim is 63; it must be an even number"),
        (Extents { q_heads: 3, ..PLAIN }, "3 query heads cannot share 2 KV heads"),
        (Extents { context_tokens: 20, new_tokens: 8, ..PLAIN }, "context_tokens is 20; it must be at least 24"),
        (Extents { context_tokens: 1 << 20, ..PLAIN }, "rope_theta must be at least 3354138"),
        (Extents { head_dim: 16, context_tokens: 1 << 14, ..PLAIN }, "band_mass = 0.25 cannot be reached"),
    ];
    for (extents, expected) in cases {
        let error = spec.generate(&extents, 0, &Arena::unlimited()).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let needy = SyntheticSpec { needle_mass: 0.99, band_mass: 0.0, local_band_mass: 0.0, ..spec.clone() };
    let error = needy.generate(&Extents { head_dim: 8, ..PLAIN }, 0, &Arena::unlimited()).err().unwrap().to_string();
    assert!(error.contains("needle_mass = 0.99 cannot be reached"), "{error}");
    let limited = Arena::with_limit(1000);
    assert!(matches!(spec.generate(&PLAIN, 0, &limited), Err(WorkloadError::Arena(_))));
}
