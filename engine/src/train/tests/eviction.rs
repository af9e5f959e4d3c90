//! Gates of evicted tokens: gradients against finite differences, memory against its formula, modes of recomputation
//! against each other.

use super::*;
use crate::memory::{Buffer, LabelBytes};
use crate::policy::{DecidedBy, Registry};
use crate::tensor::DType;
use crate::train::Weights;
use crate::train::gates::{Design, Fate, Gates, Mode, OFFSET, SCALE};
use crate::train::lora::{Adapters, Asked, Layout};
use crate::train::weights::Frozen;
use half::bf16;
use std::path::Path;

const WINDOW: usize = 5;
const RELAXED: Mode = Mode::Relaxed { seed: 7, step: 3 };

const DROPPED: Fate = Fate::Dropped { window: WINDOW, by: DecidedBy::Itself };

const KINDS: [Design; 4] = [
    Design { fate: DROPPED, inner: None },
    Design { fate: Fate::Dropped { window: WINDOW, by: DecidedBy::Next }, inner: None },
    Design { fate: Fate::Accumulated, inner: None },
    Design { fate: DROPPED, inner: Some(3) },
];
/// Those that do other work.
const WORK: [Design; 3] = [KINDS[0], KINDS[2], KINDS[3]];

/// Gates whose decisions are divided.
fn gated<'a>(arena: &Arena, cpu: &'a Cpu, extents: Extents<'a>, recompute: Recompute) -> Network<'a> {
    gated_by(arena, cpu, extents, recompute, KINDS[0])
}

fn gated_by<'a>(
    arena: &Arena,
    cpu: &'a Cpu,
    extents: Extents<'a>,
    recompute: Recompute,
    design: Design,
) -> Network<'a> {
    let mut gates = Gates::new(arena, &extents, design).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let (config, functions) = (extents.config(), if design.fate == Fate::Accumulated { 2 } else { 1 });
    let weights = config.layers * functions * config.kv_heads * design.inner.unwrap_or(config.hidden);
    let biases = weights + config.layers * functions * config.kv_heads;
    gates.weights[..weights].iter_mut().for_each(|weight| *weight = rng.random_range(-0.02..0.02));
    gates.weights[weights..biases].fill(0.05);
    gates.weights[biases..].iter_mut().for_each(|weight| *weight = rng.random_range(-0.3..0.3));
    if design.fate == Fate::Accumulated {
        // Weights of tokens that are neither all alike nor next to nothing.
        let of_function = config.kv_heads * config.hidden;
        let importance = gates.weights[..weights].chunks_exact_mut(of_function).skip(1).step_by(2);
        importance.flatten().for_each(|weight| *weight *= 0.1);
    }
    Network::new(arena, cpu, extents, recompute).unwrap().with_gates(arena, gates).unwrap()
}

/// Bytes of such a network.
fn bytes(extents: &Extents<'_>, recompute: Recompute, threads: usize, design: Design) -> LabelBytes {
    let mut bytes = extents.training_bytes(recompute, threads);
    // Nothing of the model is trained.
    bytes.retain(|label, _| ![Label::Gradients, Label::Optimizer].contains(label));
    for (label, more) in Gates::bytes(extents, design) {
        *bytes.entry(label).or_default() += more;
    }
    bytes
}

fn tokens(extents: &Extents<'_>) -> Vec<u32> {
    batch(extents, 4).tokens
}

/// The families whose attention differs: plain, soft-capped with sliding windows, with norms of heads.
pub(super) fn models(dtype: DType) -> [Parameters; 3] {
    [config(&SMALL, 50), families::config("gemma2"), families::config("qwen3")]
        .map(|config| Parameters::all_frozen(&config, dtype))
}

/// Weights of a model, in the type of its matrices.
pub(super) fn frozen(parameters: &Parameters, arena: &Arena) -> Frozen {
    let all = weights(parameters, 3);
    let of_kind = |is_matrix: bool| {
        let kind = parameters.all.iter().filter(move |parameter| parameter.role.decays() == is_matrix);
        kind.flat_map(|parameter| &all[parameter.range.clone()]).copied().collect::<Vec<f32>>()
    };
    fn held<T: bytemuck::Pod>(arena: &Arena, values: &[T]) -> Buffer<T> {
        let mut buffer = arena.alloc(Label::Weights, values.len()).unwrap();
        buffer.copy_from_slice(values);
        buffer
    }
    match parameters.dtype {
        DType::F32 => Frozen::F32(held(arena, &all)),
        _ => {
            let matrices: Vec<bf16> = of_kind(true).into_iter().map(bf16::from_f32).collect();
            Frozen::Bf16(held(arena, &matrices), held(arena, &of_kind(false)))
        }
    }
}

#[test]
fn gradients_equal_finite_differences() {
    for (parameters, kind) in models(DType::F32).iter().flat_map(|parameters| KINDS.map(|kind| (parameters, kind))) {
        let extents = Extents { parameters, batch: 2, len: 24, skipped: 0 };
        let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
        let mut network = gated_by(&arena, &cpu, extents, Recompute::None, kind);
        let (weights, tokens) = (weights(parameters, 3), tokens(&extents));
        let mut gradient = |weight: f64| {
            network.gates().gradient.fill(0.0);
            let found = network.distil(Weights::F32(&weights), &tokens, RELAXED, Some((1.0, weight))).unwrap();
            assert!(found.kl > 1e-3 && (0.1..0.9).contains(&found.evicted), "{found:?}");
            assert!((found.pressure - weight * (1.0 - found.evicted)).abs() < 1e-12);
            network.gates().gradient.to_vec()
        };
        let (of_kl, of_both) = (gradient(0.0), gradient(30.0));
        let of_pressure: Vec<f32> = of_both.iter().zip(&of_kl).map(|(both, kl)| both - kl).collect();
        for (gradient, of_pressure) in [(&of_kl, false), (&of_pressure, true)] {
            let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            let mut at = |step: f64| {
                let moves = gradient.iter().map(|g| (step * f64::from(*g) / norm) as f32).collect::<Vec<_>>();
                let before = network.gates().weights.to_vec();
                network.gates().weights.iter_mut().zip(&moves).for_each(|(w, by)| *w += by);
                let kl = network.distil(Weights::F32(&weights), &tokens, RELAXED, None).unwrap().kl;
                let relaxed = network.gates().relaxed();
                network.gates().weights.copy_from_slice(&before);
                if of_pressure { -30.0 * relaxed } else { kl }
            };
            let step = 2e-6;
            let found = (at(step) - at(-step)) / (2.0 * step);
            assert!((found - norm).abs() < 0.02 * norm, "{kind:?}, pressure {of_pressure}: {found}, gradient {norm}");
        }
    }
}

/// A network whose gates are divided, with adapters that change much.
fn adapted<'a>(arena: &Arena, cpu: &'a Cpu, extents: Extents<'a>) -> Network<'a> {
    let targets = vec!["q".into(), "v".into(), "down".into()];
    let layout = Layout::new(extents.parameters, &Asked { rank: 2, alpha: 4.0, targets }).unwrap();
    let mut adapters = Adapters::new(arena, layout, &extents, 5).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(12);
    adapters.weights.iter_mut().for_each(|weight| *weight = rng.random_range(-0.1..0.1));
    gated(arena, cpu, extents, Recompute::None).with_adapters(adapters)
}

#[test]
fn adapters_beside_gates_have_the_gradients_of_finite_differences_and_the_dense_model_has_none() {
    for parameters in &models(DType::F32) {
        let extents = Extents { parameters, batch: 2, len: 24, skipped: 0 };
        let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
        let (weights, tokens) = (weights(parameters, 3), tokens(&extents));
        let mut network = adapted(&arena, &cpu, extents);
        let mut plain = gated(&arena, &cpu, extents, Recompute::None);
        let distil = |network: &mut Network<'_>, mode, target| {
            network.distil(Weights::F32(&weights), &tokens, mode, target).unwrap()
        };
        // Where none is evicted, what is left is what adapters change; without adapters nothing is.
        let without = Mode::Hard;
        plain.gates().weights.fill(0.0);
        assert_eq!(distil(&mut plain, without, None).kl, 0.0);
        let gates = network.gates().weights.to_vec();
        network.gates().weights.fill(0.0);
        assert!(distil(&mut network, without, None).kl > 1e-3);
        network.gates().weights.copy_from_slice(&gates);

        network.gates_and_adapters().1.unwrap().gradient.fill(0.0);
        distil(&mut network, RELAXED, Some((1.0, 0.0)));
        let gradient = network.adapters().gradient.to_vec();
        let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        let mut at = |step: f64| {
            let before = network.adapters().weights.to_vec();
            let moved = network.adapters().weights.iter_mut().zip(&gradient);
            moved.for_each(|(w, g)| *w += (step * f64::from(*g) / norm) as f32);
            let kl = distil(&mut network, RELAXED, None).kl;
            network.adapters().weights.copy_from_slice(&before);
            kl
        };
        let step = 2e-4;
        let found = (at(step) - at(-step)) / (2.0 * step);
        assert!((found - norm).abs() < 0.02 * norm, "{found}, gradient {norm}");
    }
}

#[test]
fn recomputation_and_threads_do_not_change_a_bit_and_bytes_are_those_of_the_formula() {
    let models = [models(DType::F32), models(DType::Bf16)].concat();
    for (parameters, kind) in models.iter().flat_map(|parameters| WORK.map(|kind| (parameters, kind))) {
        let extents = Extents { parameters, batch: 2, len: 70, skipped: 0 };
        let run = |recompute, threads| {
            let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(threads)).unwrap());
            let mut network = gated_by(&arena, &cpu, extents, recompute, kind);
            let weights = frozen(parameters, &arena);
            assert_eq!(arena.usage().peak, bytes(&extents, recompute, threads, kind));
            let found = network.distil(weights.all(), &tokens(&extents), RELAXED, Some((0.9, 1.0))).unwrap();
            (found.kl.to_bits(), network.gates().gradient.to_vec())
        };
        let expected = run(Recompute::None, 1);
        for recompute in Recompute::ALL {
            assert_eq!(run(recompute, 2), expected, "{kind:?}, {recompute:?}");
        }
    }
}

/// With matrices, queries, keys and values in bf16 the gradient is that of f32 but for what is rounded: much, with weights as
/// large as these, and gates that multiply a difference by a thousand.
#[test]
fn gradients_in_bf16_are_near_those_in_f32() {
    let pairs = models(DType::F32).into_iter().zip(models(DType::Bf16));
    for ((wide, narrow), kind) in pairs.flat_map(|pair| WORK.map(|kind| (pair.clone(), kind))) {
        let [wide, narrow] = [&wide, &narrow].map(|parameters| {
            let extents = Extents { parameters, batch: 2, len: 70, skipped: 0 };
            let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
            let mut network = gated_by(&arena, &cpu, extents, Recompute::None, kind);
            let weights = frozen(parameters, &arena);
            let found = network.distil(weights.all(), &tokens(&extents), RELAXED, Some((0.9, 1.0))).unwrap();
            (found.kl, network.gates().gradient.to_vec())
        });
        let of = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let cosine = of(&wide.1, &narrow.1) / (of(&wide.1, &wide.1) * of(&narrow.1, &narrow.1)).sqrt();
        assert!(cosine > 0.9, "{kind:?}: cosine {cosine}");
        assert!((narrow.0 / wide.0 - 1.0).abs() < 0.1, "divergence {} and {}", wide.0, narrow.0);
    }
}

/// Rows that have no token behind their window are those of the dense model, whether they are computed once more or not.
#[test]
fn skipped_rows_change_nothing() {
    let models = [models(DType::F32), models(DType::Bf16)].concat();
    for (parameters, kind) in models.iter().flat_map(|parameters| WORK.map(|kind| (parameters, kind))) {
        let unchanged = if kind.fate == Fate::Accumulated { 1 } else { WINDOW + 1 };
        let run = |recompute, skipped, threads| {
            let extents = Extents { parameters, batch: 1, len: 140, skipped };
            let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(threads)).unwrap());
            let mut network = gated_by(&arena, &cpu, extents, recompute, kind);
            let weights = frozen(parameters, &arena);
            assert_eq!(arena.usage().peak, bytes(&extents, recompute, threads, kind));
            let found = network.distil(weights.all(), &tokens(&extents), RELAXED, Some((0.9, 1.0))).unwrap();
            (found.kl.to_bits(), found.evicted, network.gates().gradient.to_vec())
        };
        let (all, behind) = (run(Recompute::None, 0, 1), run(Recompute::None, unchanged, 1));
        assert_eq!((all.0, all.1), (behind.0, behind.1));
        let norm = |values: &[f32]| values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        let apart: Vec<f32> = all.2.iter().zip(&behind.2).map(|(a, b)| a - b).collect();
        let rounding = if parameters.dtype == DType::F32 { 1e-5 } else { 1e-2 };
        assert!(norm(&apart) < rounding * norm(&all.2), "{} of {}", norm(&apart), norm(&all.2));
        for recompute in Recompute::ALL {
            assert_eq!(run(recompute, unchanged, 3), behind, "{kind:?}, {recompute:?}");
        }
    }
}

#[test]
fn gates_evict_nothing_at_first_and_nothing_inside_the_window() {
    let parameters = &models(DType::F32)[0];
    let extents = Extents { parameters, batch: 1, len: 30, skipped: 0 };
    let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(1)).unwrap());
    let mut network = gated(&arena, &cpu, extents, Recompute::None);
    let (weights, tokens) = (weights(parameters, 3), tokens(&extents));
    let mut kl_of = |bias: f32| {
        network.gates().weights.fill(0.0);
        let biases = network.gates().weights.len() - 4;
        network.gates().weights[biases..].fill(bias);
        network.distil(Weights::F32(&weights), &tokens, Mode::Hard, None).unwrap()
    };
    let (none, all) = (kl_of(0.0), kl_of(1.0));
    assert_eq!((none.kl, none.evicted, all.evicted), (0.0, 0.0, 1.0));
    assert!(all.kl > 0.0);
    // A model whose own window is as long, with the query's own token in it, has nothing behind it.
    let mut windowed = parameters.config.clone();
    windowed.windows.iter_mut().for_each(|window| *window = Some(WINDOW + 1));
    let windowed = Parameters::all_frozen(&windowed, DType::F32);
    let extents = Extents { parameters: &windowed, ..extents };
    let mut network = gated(&arena, &cpu, extents, Recompute::None);
    assert_eq!(network.distil(Weights::F32(&weights), &tokens, Mode::Hard, None).unwrap().kl, 0.0);
}

/// A checkpoint of NVIDIA's Model-Optimizer diverges from its dense model, with decisions by the token behind, as their code says
/// (`tests/conformance/dms_fixtures.py`).
#[test]
fn a_public_checkpoint_evicts_what_its_own_code_evicts() {
    const FOLDER: &str = "../tests/checkpoints/qwen3-dms";
    let expected = std::fs::read(Path::new(FOLDER).join("expected.safetensors")).unwrap();
    let expected = safetensors::SafeTensors::deserialize(&expected).unwrap();
    let number = |name: &str| f32::from_le_bytes(expected.tensor(name).unwrap().data().try_into().unwrap());
    let tokens = expected.tensor("tokens").unwrap();
    let tokens: Vec<u32> =
        tokens.data().chunks_exact(8).map(|token| i64::from_le_bytes(token.try_into().unwrap()) as u32).collect();

    let config = Config::read(Path::new(FOLDER)).unwrap();
    let Config { layers, kv_heads, hidden, .. } = config;
    let policy = Registry::default().policy(&format!("dms:gates={FOLDER}")).unwrap();
    assert_eq!(policy.decided_by, DecidedBy::Next);
    let scorer = policy.scorer.unwrap();
    let gate = |layer: usize, element: Option<usize>| {
        let (mut state, mut gates) = (vec![0.0; hidden], vec![0.0; kv_heads]);
        element.into_iter().for_each(|at| state[at] = 1.0);
        scorer.gate(layer, &state, &mut gates);
        gates
    };

    let floats = |name: &str| {
        let values = expected.tensor(name).unwrap().data().chunks_exact(4);
        values.map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect::<Vec<f32>>()
    };
    let (normed, logits) = (floats("normed"), floats("logits_of_gates"));
    for (row, state) in normed.chunks(hidden).enumerate() {
        let (layer, at, mut gates) = (row / tokens.len(), row % tokens.len(), vec![0.0; kv_heads]);
        scorer.gate(layer, state, &mut gates);
        for (head, gate) in gates.iter().enumerate() {
            let expected = logits[(layer * kv_heads + head) * tokens.len() + at];
            assert!((gate + expected).abs() < 1e-3, "layer {layer}, head {head}, token {at}: {gate}, {expected}");
        }
    }

    let parameters = Parameters::all_frozen(&config, DType::F32);
    // Six tokens behind the query's own.
    let window = scorer.protect(usize::MAX).window;
    assert_eq!(window, 6);
    let extents = Extents { parameters: &parameters, batch: 1, len: tokens.len(), skipped: 0 };
    let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(2)).unwrap());
    let weights = Frozen::open(Path::new(FOLDER), &parameters, &arena).unwrap();
    let design = Design { fate: Fate::Dropped { window, by: DecidedBy::Next }, inner: None };
    let mut gates = Gates::new(&arena, &extents, design).unwrap();
    for layer in 0..layers {
        let none = gate(layer, None);
        for (head, none) in none.iter().enumerate() {
            let row = (layer * kv_heads + head) * hidden;
            for at in 0..hidden {
                gates.weights[row + at] = (none - gate(layer, Some(at))[head]) / SCALE;
            }
            gates.weights[layers * kv_heads * hidden + layer * kv_heads + head] = (OFFSET - none) / SCALE;
        }
    }
    let mut network = Network::new(&arena, &cpu, extents, Recompute::None).unwrap().with_gates(&arena, gates).unwrap();
    let found = network.distil(weights.all(), &tokens, Mode::Hard, None).unwrap();
    let (kl, evicted) = (f64::from(number("kl")), f64::from(number("evicted")));
    assert!((found.kl / kl - 1.0).abs() < 1e-3 && (found.evicted - evicted).abs() < 1e-6, "{found:?}, {kl} {evicted}");
}
