//! Every kernel against the f64 reference, over a wide grid of shapes, options and element types.

use crate::common;
use crate::common::{Problem, VARIANTS, cpu, forward_call, inputs, rng, shape, widen};
use kvsieve::attention::{DenseKv, Forward, Params, Shape, kernel, reference};
use kvsieve::tensor::DType;
use proptest::prelude::*;
use rand::RngExt;

/// Largest relative L2 error of `o` that is only rounding: of f32 sums, or half a unit of the output's own type
/// (which a single element reaches; many together stay near a third of it).
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 3e-6,
        DType::Bf16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
    }
}

/// Room for chance: outputs of few components share the rounding of their weights and may all be unlucky at once.
fn few_components(shape: &Shape) -> f64 {
    1.0 + 2.0 / shape.head_dim as f64
}

/// Least RMS that errors are taken relative to: outputs are averages of standard normal values over at most this many
/// keys, so a smaller one is a chance cancellation.
fn least_rms(shape: &Shape, params: &Params) -> f64 {
    let keys = params.window.map_or(shape.kv_len, |window| window.min(shape.kv_len));
    (0.5 / (keys as f64).sqrt()).max(0.02)
}

/// Largest distance of a log-sum-exp from the reference, relative to one plus its size. It is f32 in every type.
const LSE_TOLERANCE: f64 = 3e-6;

/// Runs all variants on a problem; returns the largest errors of `o` and of `lse` over the reference's rows.
fn errors(problem: &Problem, seed: u64, variants: &[&str]) -> (f64, f64) {
    let Problem { shape, params, dtype } = *problem;
    let inputs = inputs(problem, seed);
    let kv = DenseKv::new(inputs.k.view(), inputs.v.view()).unwrap();
    let call = Forward { shape, params, q: inputs.q.view(), kv: &kv, cpu: cpu(2) };
    let at = reference::sample_rows(&shape, 48);
    let expected = reference::rows(&call, &at);
    let seen = expected.iter().filter(|row| row.lse > f64::NEG_INFINITY).count();
    let norm = expected.iter().flat_map(|row| &row.o).map(|x| x * x).sum::<f64>().sqrt();
    let least = least_rms(&shape, &params) * ((seen * shape.head_dim) as f64).sqrt();
    let tolerance = tolerance(dtype) * few_components(&shape);
    let (mut worst_o, mut worst_lse) = (0.0f64, 0.0f64);
    let mut first: Option<Vec<f64>> = None;
    for name in variants {
        let outputs = forward_call(&*kernel(name).unwrap(), &call, dtype);
        let error = reference::relative_error(&outputs.o.view(), &at, &expected) * (norm / norm.max(least)).min(1.0);
        assert!(error <= tolerance, "{name}: o is off by {error:e} in {problem:?}, seed {seed}");
        worst_o = worst_o.max(error);
        for (&[batch, head, i], expected) in at.iter().zip(&expected) {
            let got = f64::from(outputs.lse[(batch * shape.q_heads + head) * shape.q_len + i]);
            if expected.lse == f64::NEG_INFINITY {
                assert_eq!(got, expected.lse, "{name}: lse of a row that sees nothing, {problem:?}");
                continue;
            }
            let error = (got - expected.lse).abs() / (1.0 + expected.lse.abs());
            assert!(error <= LSE_TOLERANCE, "{name}: lse {got} is not {} in {problem:?}", expected.lse);
            worst_lse = worst_lse.max(error);
        }
        // Rows between the sampled ones: all kernels agree on all of them.
        let o = outputs.o.to_f32();
        match &first {
            None => first = Some(widen(&o)),
            Some(first) => {
                let apart = common::relative_l2(&o, first) * (norm / norm.max(least)).min(1.0);
                assert!(apart <= 2.0 * tolerance, "{name}: {apart:e} from {} in {problem:?}", variants[0]);
            }
        }
    }
    (worst_o, worst_lse)
}

const LENGTHS: [(usize, usize); 14] = [
    (1, 1),
    (5, 3),
    (3, 5),
    (64, 128),
    (239, 1),
    (1, 799),
    (113, 203),
    (113, 128),
    (3, 799),
    (1, 2100),
    (4, 3000),
    (256, 512),
    (1023, 1024),
    (1024, 1023),
];
const WIDTHS: [usize; 8] = [1, 8, 40, 64, 96, 111, 128, 256];
const HEADS: [(usize, usize); 4] = [(1, 1), (4, 4), (4, 2), (6, 1)];

#[test]
fn kernels_agree_with_the_reference_over_a_grid() {
    common::assert_every_kernel_is_tested();
    let mut worst = [(0.0f64, 0.0f64); 3];
    for (row, (q_len, kv_len)) in LENGTHS.into_iter().enumerate() {
        for (column, head_dim) in WIDTHS.into_iter().enumerate() {
            let seed = (row * WIDTHS.len() + column) as u64;
            let mut rng = rng(seed);
            let large = q_len * kv_len > 50_000;
            let (q_heads, kv_heads) = if large { (2, 1) } else { HEADS[rng.random_range(0..4)] };
            let batch = if large { 1 } else { rng.random_range(1..=2) };
            let params = Params {
                scale: [1.0 / (head_dim as f32).sqrt(), 0.3, -0.2, 0.0][(row + column) % 4],
                softcap: [None, Some(15.0)][rng.random_range(0..2)],
                causal: rng.random(),
                window: [None, None, Some(1), Some(7), Some(200)][rng.random_range(0..5)],
            };
            let rotated = [DType::ALL[(row + column) % 3]];
            for &dtype in if large { &rotated[..] } else { &DType::ALL[..] } {
                let shape = shape([batch, q_heads, kv_heads, q_len, kv_len, head_dim]);
                // A 1 x 1 tile is a call for each score: only where there are few.
                let variants: Vec<&str> =
                    VARIANTS.into_iter().filter(|name| !(large && name.contains("br=1,bc=1"))).collect();
                let (o, lse) = errors(&Problem { shape, params, dtype }, seed, &variants);
                let worst = &mut worst[dtype as usize];
                *worst = (worst.0.max(o), worst.1.max(lse));
            }
        }
    }
    println!("largest errors of (o, lse): f32 {:?}, bf16 {:?}, f16 {:?}", worst[0], worst[1], worst[2]);
}

prop_compose! {
    fn problems()(
        (kv_heads, group, batch) in (1usize..4, 1usize..4, 1usize..3),
        q_len in 1usize..40,
        kv_len in 1usize..300,
        head_dim in 1usize..=160,
        scale in prop_oneof![Just(None), (-0.5f32..0.5).prop_map(Some)],
        softcap in prop_oneof![Just(None), (0.5f32..1000.0).prop_map(Some)],
        causal: bool,
        window in prop_oneof![Just(None), (1usize..400).prop_map(Some), Just(Some(usize::MAX))],
        dtype in prop::sample::select(DType::ALL.to_vec()),
    ) -> Problem {
        let shape = shape([batch, kv_heads * group, kv_heads, q_len, kv_len, head_dim]);
        let scale = scale.unwrap_or(1.0 / (head_dim as f32).sqrt());
        Problem { shape, params: Params { scale, softcap, causal, window }, dtype }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

    #[test]
    fn kernels_agree_with_the_reference_on_random_problems(problem in problems(), seed in 0u64..1 << 40) {
        errors(&problem, seed, &VARIANTS);
    }

    #[test]
    fn the_reference_agrees_with_the_definition(problem in problems(), seed in 0u64..1 << 40) {
        let problem = Problem { dtype: DType::F32, ..problem };
        let Problem { shape, params, .. } = problem;
        let inputs = inputs(&problem, seed);
        let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(|tensor| widen(&tensor.to_f32()));
        let (o, lse) = common::exact::attend(&shape, &params, &q, &k, &v);
        let kv = DenseKv::new(inputs.k.view(), inputs.v.view()).unwrap();
        let call = Forward { shape, params, q: inputs.q.view(), kv: &kv, cpu: cpu(2) };
        let at = reference::sample_rows(&shape, shape.q_len);
        for (row, got) in reference::rows(&call, &at).into_iter().enumerate() {
            prop_assert!(got.lse == lse[row] || (got.lse - lse[row]).abs() < 1e-11, "{} {}", got.lse, lse[row]);
            for (got, wanted) in got.o.iter().zip(&o[row * shape.head_dim..]) {
                prop_assert!((got - wanted).abs() < 1e-11);
            }
        }
        // As a kernel it rounds the same rows once.
        let (kernel_o, kernel_lse) = common::forward("reference", &problem, &inputs, 3);
        prop_assert!(kernel_o.iter().zip(&o).all(|(got, wanted)| (f64::from(*got) - wanted).abs() <= 1e-7 * (1e-4 + wanted.abs())));
        prop_assert!(kernel_lse.iter().zip(&lse).all(|(&got, &wanted)| got == wanted as f32 || (f64::from(got) - wanted).abs() < 1e-6 * wanted.abs()));
    }
}

#[test]
fn a_kernel_that_reads_one_key_too_many_would_be_seen() {
    // The same causal problem with the mask moved by one must be far outside of every tolerance.
    let params = Params::new(16, true);
    let moved = Problem { shape: shape([1, 1, 1, 8, 9, 16]), params, dtype: DType::F32 };
    let problem = Problem { shape: Shape { kv_len: 8, ..moved.shape }, ..moved };
    let longer = inputs(&moved, 1);
    let k = longer.k.view().tokens(0..8);
    let v = longer.v.view().tokens(0..8);
    let kv = DenseKv::new(k, v).unwrap();
    let right = common::forward_over("tiled", &problem, longer.q.view(), &kv, cpu(1)).0;
    let wrong = common::forward("tiled", &moved, &longer, 1).0;
    assert!(common::relative_l2(&wrong, &widen(&right)) > 0.1);
}
