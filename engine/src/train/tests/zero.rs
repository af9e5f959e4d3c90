//! Training over ranks that are threads: the same bits in every stage, bytes held and sent against their formulas, and a rank that fails.

use super::super::checkpoint::Array;
use super::super::run::TrainError;
use super::super::tensor_parallel;
use super::super::zero::{Groups, Sharing, Zero};
use super::*;
use crate::memory::LabelBytes;
use crate::ranks::{Comm, RankError, threads};
use std::path::Path;

/// What a rank ended with.
struct Ended {
    /// Weights and averages, on rank 0.
    arrays: [Vec<f32>; 3],
    losses: Vec<(f64, f64)>,
    peak: LabelBytes,
    predicted: LabelBytes,
    sent_bytes: [u64; 2],
}

const HOW: How<'_> = How { frozen: &[], stage: 0, tensor: 1, offload: None, recompute: Recompute::Selective };
const STEPS: usize = 2;
/// Nothing is clipped, so that a norm's last bit does not matter.
const UNCLIPPED: Constants = Constants { clip: 1e9, ..CONSTANTS };

/// Which parameters are frozen, by parts of their names.
type Frozen<'a> = &'a [&'a str];

fn frozen(config: &Config, names: Frozen<'_>) -> Parameters {
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    Parameters::with_frozen(config, &names).unwrap()
}

/// How ranks share the work.
#[derive(Debug, Clone, Copy)]
struct How<'a> {
    frozen: Frozen<'a>,
    stage: u8,
    tensor: usize,
    offload: Option<&'a Path>,
    recompute: Recompute,
}

/// Steps on one rank of a global batch of `extents`.
fn train(comm: &Comm, extents: Extents<'_>, how: How<'_>) -> Result<Ended, TrainError> {
    let How { frozen: names, stage, tensor, offload, recompute } = how;
    let groups = Groups::new(comm, tensor)?;
    let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(1)).unwrap());
    let share = frozen(&tensor_parallel::share(extents.config(), tensor).unwrap(), names);
    let mut zero = Zero::new(&arena, &groups, &cpu, [extents.parameters, &share], stage, offload)?;
    let all = weights(extents.parameters, 3);
    for (whole, own) in tensor_parallel::pairs(extents.parameters, &share) {
        let part = tensor_parallel::part_of(whole, &all[whole.range.clone()], groups.tensor.rank(), tensor);
        zero.keep(own.range.start, &part);
    }
    let own = Extents { batch: extents.batch / groups.data.size(), parameters: &share, ..extents };
    let mut network = Network::new(&arena, &cpu, own, recompute)?;
    if tensor > 1 {
        network = network.shared_by(&arena, &groups.tensor)?;
    }
    let mut losses = Vec::new();
    for step in 0..STEPS {
        zero.take_sent_bytes();
        let batch = batch(&extents, step as u64).part(groups.data.rank(), groups.data.size(), extents.len);
        zero.begin();
        let share = network.step_of(&mut zero, &batch)?;
        let (loss, norm) = zero.loss_and_norm(share)?;
        zero.update(&UNCLIPPED, (step, 1e-2), norm)?;
        losses.push((loss, norm));
    }
    let sent_bytes = [zero.take_sent_bytes(), zero.step_sent_bytes(&own, recompute)];
    let peak = arena.usage().peak;
    let mut arrays = [const { Vec::new() }; 3];
    for array in Array::ALL {
        zero.each_whole(array, &mut |values| {
            arrays[array as usize].extend_from_slice(values);
            Ok(())
        })?;
    }
    Ok(Ended { arrays, losses, peak, predicted: zero.training_bytes(&own, recompute), sent_bytes })
}

/// The same on one rank that adds up the gradients of the parts of a batch in their order.
fn in_parts(extents: Extents<'_>, parts: usize) -> ([Vec<f32>; 3], Vec<(f64, f64)>) {
    let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(1)).unwrap());
    let parameters = extents.parameters;
    let mut weights = weights(parameters, 3);
    let mut adamw = AdamW::new(&arena, parameters.trained_count()).unwrap();
    let own = Extents { batch: extents.batch / parts, ..extents };
    let mut network = Network::new(&arena, &cpu, own, Recompute::Selective).unwrap();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (mut sum, mut loss) = (vec![0.0; parameters.trained_count()], 0.0);
        for part in 0..parts {
            let mut gradient = vec![0.0; parameters.trained_count()];
            let batch = batch(&extents, step as u64).part(part, parts, extents.len);
            loss += network.step(&weights, &batch, &mut gradient).unwrap();
            sum.iter_mut().zip(&gradient).for_each(|(sum, value)| *sum = if part == 0 { *value } else { *sum + value });
        }
        let norm = adamw.update(&cpu, &UNCLIPPED, &parameters.all, (step, 1e-2), &mut weights, &sum);
        losses.push((loss, norm));
    }
    ([weights, adamw.mean.to_vec(), adamw.square.to_vec()], losses)
}

fn differing(a: &[Vec<f32>; 3], b: &[Vec<f32>; 3]) -> usize {
    assert_eq!(a.each_ref().map(Vec::len), b.each_ref().map(Vec::len));
    a.iter().flatten().zip(b.iter().flatten()).filter(|(a, b)| a.to_bits() != b.to_bits()).count()
}

#[test]
fn every_stage_trains_with_the_bits_of_one_rank_that_adds_up_parts() {
    let folder = tempfile::tempdir().unwrap();
    let models: [(&str, Config, Frozen<'_>, usize); 3] = [
        ("small", config(&SMALL, 50), &[], 4),
        ("gemma2", families::config("gemma2"), &["layers.0."], 2),
        ("qwen3", families::config("qwen3"), &["k_proj", "embed"], 3),
    ];
    for (name, config, names, most) in &models {
        let parameters = &frozen(config, names);
        let extents = Extents { parameters, batch: 12, len: 9, skipped: 0 };
        let (_, whole) = in_parts(extents, 1);
        for ranks in [1, 2, 3, 4].into_iter().filter(|ranks| ranks == most || *most == 4) {
            let (expected, expected_losses) = in_parts(extents, ranks);
            for (stage, offload) in [(0, false), (1, false), (1, true), (2, false), (3, false), (3, true)] {
                let case = format!("{name}, {ranks} ranks, stage {stage}, offload {offload}");
                let file = offload.then_some(folder.path());
                let ended = threads::run(ranks, |comm| {
                    train(comm, extents, How { frozen: names, stage, offload: file, ..HOW })
                })
                .unwrap();
                let differ = differing(&expected, &ended[0].arrays);
                assert_eq!(differ, 0, "{case}: numbers that differ");
                for (rank, of_rank) in ended.iter().enumerate() {
                    assert_eq!(of_rank.losses, ended[0].losses, "{case}: rank {rank}");
                    assert_eq!(of_rank.peak, of_rank.predicted, "{case}: rank {rank}");
                    assert_eq!(of_rank.sent_bytes[0], of_rank.sent_bytes[1], "{case}: rank {rank}");
                }
                for ((found, expected), whole) in ended[0].losses.iter().zip(&expected_losses).zip(&whole) {
                    let off = |a: f64, b: f64| ((a - b) / b).abs();
                    assert!(off(found.0, expected.0) < 1e-15 && off(found.1, expected.1) < 1e-12, "{case}");
                    assert!(
                        off(found.0, whole.0) < 1e-5 && off(found.1, whole.1) < 1e-4,
                        "{case}: {found:?} {whole:?}"
                    );
                }
            }
        }
    }
}

/// Blocks that are shared by ranks, alone and with sequences and what is trained shared out besides: gradients are one rank's but for
/// rounding, on all ranks the same.
#[test]
fn ranks_that_share_blocks_train_as_one() {
    let models: [(&str, Config, Frozen<'_>); 3] = [
        ("small", config(&Sizes { q_heads: 8, kv_heads: 4, ..SMALL }, 50), &[]),
        ("gemma2", families::config("gemma2"), &["layers.0.", "embed"]),
        ("qwen3", families::config("qwen3"), &["k_proj"]),
    ];
    for (name, config, names) in &models {
        let parameters = &frozen(config, names);
        let extents = Extents { parameters, batch: 4, len: 17, skipped: 0 };
        let (expected, expected_losses) = in_parts(extents, 1);
        let shares = [(2, 2, 0), (4, 2, 3), (4, 4, 0)].into_iter().filter(|(_, tensor, _)| *tensor <= config.kv_heads);
        for ((ranks, tensor, stage), recompute) in shares.zip([Recompute::Full, Recompute::Selective, Recompute::None])
        {
            let case = format!("{name}, {ranks} ranks, {tensor} share blocks, stage {stage}, {recompute:?}");
            let how = How { frozen: names, stage, tensor, recompute, ..HOW };
            let ended = threads::run(ranks, |comm| train(comm, extents, how)).unwrap();
            for (rank, of_rank) in ended.iter().enumerate() {
                assert_eq!(of_rank.losses, ended[0].losses, "{case}: rank {rank}");
                assert_eq!(of_rank.peak, of_rank.predicted, "{case}: rank {rank}");
                assert_eq!(of_rank.sent_bytes[0], of_rank.sent_bytes[1], "{case}: rank {rank}");
            }
            let off = |a: f64, b: f64| ((a - b) / b).abs();
            for (found, expected) in ended[0].losses.iter().zip(&expected_losses) {
                assert!(
                    off(found.0, expected.0) < 1e-5 && off(found.1, expected.1) < 1e-4,
                    "{case}: {found:?} {expected:?}"
                );
            }
            // The mean of gradients; weights after AdamW tell nothing of gradients that are nearly 0.
            let [_, expected, _] = &expected;
            let square = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>();
            let distance = square(&mut ended[0].arrays[1].iter().zip(expected).map(|(a, b)| a - b));
            let distance = (distance / square(&mut expected.iter().copied())).sqrt();
            assert!(distance < 1e-4, "{case}: mean gradients are {distance} from one rank's");
        }
    }
    let small = config(&SMALL, 50);
    let refused = |ranks| tensor_parallel::share(&small, ranks).unwrap_err();
    assert_eq!(refused(3), "the model has 2 KV heads; --tensor-parallel 3 needs a multiple of 3");
    assert!(tensor_parallel::share(&families::config("phi3"), 2).unwrap_err().contains("in one matrix"));
}

/// The table of `zero/mod.rs`, written out once more: what is shared out falls as one over the ranks, but for a number of each stretch,
/// and room for a unit is all that comes on top.
#[test]
fn what_is_shared_out_falls_as_one_over_the_ranks() {
    let sizes = Sizes { hidden: 48, layers: 3, ..SMALL };
    let parameters = Parameters::new(&config(&sizes, 70));
    let (all, embedding) = (parameters.count() as u64, 48 * 70);
    let block = (all - embedding - 48) / 3;
    // Embedding, blocks and the last norm are a stretch each.
    let stretches = 5;
    for ranks in 1..=9u64 {
        for stage in 0..=3 {
            for rank in 0..ranks {
                let sharing = Sharing::new(&parameters, stage, rank as usize, ranks as usize);
                let [weights, gathered, gradients, room] = sharing.counts().map(|count| count as u64);
                let share = |count: u64, shared: bool| match shared && ranks > 1 {
                    true => {
                        assert!(count.abs_diff(all / ranks) <= stretches, "stage {stage}, {rank} of {ranks}: {count}")
                    }
                    false => assert_eq!(count, all, "stage {stage}, {rank} of {ranks}"),
                };
                share(sharing.averages() as u64, stage >= 1);
                share(gradients, stage >= 2);
                share(weights, stage >= 3);
                let rooms = match stage {
                    _ if ranks == 1 => [0, 0],
                    0 | 1 => [0, 0],
                    2 => [0, embedding + block],
                    _ => [embedding.max(block), embedding + block],
                };
                assert_eq!([gathered, room], rooms, "stage {stage}, {rank} of {ranks}");
            }
        }
    }
}

#[test]
fn a_rank_that_fails_is_named_by_all_in_the_middle_of_a_step() {
    let parameters = Parameters::new(&config(&SMALL, 50));
    let extents = Extents { parameters: &parameters, batch: 3, len: 17, skipped: 0 };
    let said = std::sync::Mutex::new(Vec::new());
    let result = threads::run(3, |comm| {
        let ended = match comm.rank() {
            1 => Err(TrainError::Rank(RankError::Unsupported("a bad day".into()))),
            _ => train(comm, extents, How { stage: 3, ..HOW }).map(drop),
        };
        said.lock().unwrap().extend(ended.as_ref().err().map(ToString::to_string));
        ended
    });
    assert_eq!(result.unwrap_err().to_string(), "a bad day");
    let named = said.into_inner().unwrap().iter().filter(|said| said.starts_with("rank 1 of 3 ended: ")).count();
    assert_eq!(named, 2);
}
