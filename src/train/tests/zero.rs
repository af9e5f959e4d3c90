//! Training over ranks that are threads: the same bits in every stage, bytes held and sent against their formulas, and a rank that fails.

use super::super::checkpoint::Array;
use super::super::run::TrainError;
use super::super::zero::{Sharing, Zero};
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

const STEPS: usize = 3;
/// Nothing is clipped, so that a norm's last bit does not matter.
const UNCLIPPED: Constants = Constants { clip: 1e9, ..CONSTANTS };

/// Steps on one rank of a global batch of `extents`.
fn train(comm: &Comm, extents: Extents<'_>, stage: u8, offload: Option<&Path>) -> Result<Ended, TrainError> {
    let (arena, cpu) = (Arena::unlimited(), Cpu::new(Some(1)).unwrap());
    let mut zero = Zero::new(&arena, comm, &cpu, extents.parameters, stage, offload)?;
    zero.keep(0, &weights(extents.parameters, 3));
    let own = Extents { batch: extents.batch / comm.size(), ..extents };
    let mut network = Network::new(&arena, &cpu, own, Recompute::Selective)?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        comm.take_traffic();
        let batch = batch(&extents, step as u64).part(comm.rank(), comm.size(), extents.len);
        zero.begin();
        let share = network.step_of(&mut zero, &batch)?;
        let (loss, norm) = zero.loss_and_norm(share)?;
        zero.update(&UNCLIPPED, (step, 1e-2), norm)?;
        losses.push((loss, norm));
    }
    let sent_bytes = [comm.take_traffic().sent_bytes, zero.sharing().step_sent_bytes()];
    let peak = arena.usage().peak;
    let mut arrays = [const { Vec::new() }; 3];
    for array in Array::ALL {
        zero.each(array, &mut |values| {
            arrays[array as usize].extend_from_slice(values);
            Ok(())
        })?;
    }
    Ok(Ended { arrays, losses, peak, predicted: zero.training_bytes(&own, Recompute::Selective), sent_bytes })
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
    let small = Parameters::new(&config(&SMALL, 50));
    let gemma = Parameters::with_frozen(&families::config("gemma2"), &["layers.0.".into()]).unwrap();
    let qwen = Parameters::with_frozen(&families::config("qwen3"), &["k_proj".into(), "embed".into()]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (name, parameters) in [("small", &small), ("gemma2", &gemma), ("qwen3", &qwen)] {
        let extents = Extents { parameters, batch: 12, len: 17, skipped: 0 };
        let (_, whole) = in_parts(extents, 1);
        for ranks in 1..=4 {
            let (expected, expected_losses) = in_parts(extents, ranks);
            for (stage, offload) in [(0, false), (1, false), (1, true), (2, false), (3, false), (3, true)] {
                let case = format!("{name}, {ranks} ranks, stage {stage}, offload {offload}");
                let file = offload.then_some(folder.path());
                let ended = threads::run(ranks, |comm| train(comm, extents, stage, file)).unwrap();
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
            _ => train(comm, extents, 3, None).map(drop),
        };
        said.lock().unwrap().extend(ended.as_ref().err().map(ToString::to_string));
        ended
    });
    assert_eq!(result.unwrap_err().to_string(), "a bad day");
    let named = said.into_inner().unwrap().iter().filter(|said| said.starts_with("rank 1 of 3 ended: ")).count();
    assert_eq!(named, 2);
}
