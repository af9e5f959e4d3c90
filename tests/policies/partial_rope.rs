//! Policies that look behind RoPE, in heads of which a part is turned: they score as in heads that are turned whole, where the pairs
//! that stand still have frequency 0 and channels lie as they do there.

use crate::common::{self, cpu, normal, rng};
use kvsieve::attention::rope::{Frequencies, rotate};
use kvsieve::attention::{DenseKv, Forward, Params, Shape};
use kvsieve::memory::Arena;
use kvsieve::policy::triattention::{CENTRES, NORMS, calibrate};
use kvsieve::policy::{BeforeRope, Context, PolicyFile, Registry};
use kvsieve::tensor::file::{Output, write};
use kvsieve::tensor::{DType, Tensor};

const Q_DIMS: [usize; 4] = [1, 4, 24, 8];
const KV_DIMS: [usize; 4] = [1, 2, 24, 8];
/// Where each channel of a head that is turned whole lies in one of which the first four are: pairs `i` and `i + 2`, and four that stand still.
const FROM: [usize; 8] = [0, 1, 4, 5, 2, 3, 6, 7];

fn permuted(rows: &[f32]) -> Vec<f32> {
    rows.chunks_exact(8).flat_map(|row| FROM.map(|channel| row[channel])).collect()
}

/// Queries and keys before RoPE, and its frequencies.
struct Head {
    q: Vec<f32>,
    k: Vec<f32>,
    frequencies: Frequencies,
}

impl Head {
    fn turned(&self, rows: &[f32], dims: [usize; 4]) -> Tensor {
        let mut rows = rows.to_vec();
        rows.chunks_exact_mut(8).enumerate().for_each(|(at, row)| rotate(row, at % dims[2], &self.frequencies));
        common::tensor(DType::F32, dims, &rows)
    }

    fn scores(&self, registry: &Registry, text: &str) -> Vec<f32> {
        let policy = registry.policy(text).unwrap();
        let (q, k) = (self.turned(&self.q, Q_DIMS), self.turned(&self.k, KV_DIMS));
        let kv = DenseKv::new(k.view(), k.view()).unwrap();
        let shape = Shape { batch: 1, q_heads: 4, kv_heads: 2, q_len: 24, kv_len: 24, head_dim: 8 };
        let params = Params::new(8, true);
        let arena = Arena::unlimited();
        let context = Context {
            call: Forward { shape, params, q: q.view(), kv: &kv, cpu: cpu(2) },
            layers: 1,
            lse: &[],
            future: None,
            accumulated: None,
            gates: None,
            reconstructed: None,
            positions: &|_, slot| slot,
            seen_tokens: 24,
            before_rope: Some(BeforeRope { frequencies: &self.frequencies, q: None, k: None }),
            w_o: &[],
            layer_numbers: &[],
            budget_tokens: 12,
            seed: 0,
            arena: &arena,
        };
        policy.score(&context).unwrap().unwrap().values.to_vec()
    }
}

#[test]
fn scores_are_those_of_whole_heads_whose_other_pairs_stand_still() {
    let (mut rng, len) = (rng(5), |dims: [usize; 4]| dims.iter().product());
    let (q, k) = (normal(&mut rng, len(Q_DIMS), 1.0), normal(&mut rng, len(KV_DIMS), 1.0));
    let whole = Head {
        q: permuted(&q),
        k: permuted(&k),
        frequencies: Frequencies::from_rad_per_token(vec![1.0, 0.3, 0.0, 0.0]),
    };
    let part = Head { q, k, frequencies: Frequencies::from_rad_per_token(vec![1.0, 0.3]) };

    // What a file says of pairs that stand still in a whole head: no query is off their centre.
    let of_part = calibrate(&common::tensor(DType::F32, Q_DIMS, &part.q).view(), 2);
    let centres = permuted(&of_part.0);
    let still = |centre: &[f32], pair: usize| centre[pair].hypot(centre[pair + 4]);
    let norms = centres.chunks_exact(8).zip(of_part.1.chunks_exact(2));
    let norms: Vec<f32> = norms.flat_map(|(c, n)| [n[0], n[1], still(c, 2), still(c, 3)]).collect();
    let folder = tempfile::tempdir().unwrap();
    let registry = |name: &str, centres: &[f32], norms: &[f32], pairs: usize| {
        let path = folder.path().join(name);
        write(&path, &[Output::f32(CENTRES, vec![1, 4, 8], centres), Output::f32(NORMS, vec![1, 4, pairs], norms)])
            .unwrap();
        Registry::default().with_file(PolicyFile::open(&path).unwrap())
    };
    let registries = (registry("part", &of_part.0, &of_part.1, 2), registry("whole", &centres, &norms, 4));

    for text in ["expected-attention", "leverage:sketch=0", "triattention"] {
        let (got, wanted) = (part.scores(&registries.0, text), whole.scores(&registries.1, text));
        let largest = wanted.iter().filter(|score| score.is_finite()).fold(0f32, |most, score| most.max(score.abs()));
        assert!(largest > 0.0, "{text}");
        for (slot, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
            let is_near = got == wanted || (got - wanted).abs() < 1e-4 * largest;
            assert!(is_near, "{text}, slot {slot}: {got}, not {wanted}");
        }
    }
}
