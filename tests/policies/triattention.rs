//! TriAttention against its public code: `conformance/triattention_fixtures.py` ran the authors' class on the tensors of
//! `conformance/fixtures/`, each sequence a layer, and wrote its scores and the tokens that it keeps, once and again behind a first
//! compression. And the policy in a grid: memory as predicted, files of other models refused.

use crate::common;
use crate::common::cpu;
use kvsieve::attention::rope::Frequencies;
use kvsieve::attention::{DenseKv, Forward, Params, Shape};
use kvsieve::experiment::record::Status;
use kvsieve::experiment::{Device, Experiment, Options, Spec, run};
use kvsieve::memory::{Arena, Label};
use kvsieve::policy::triattention::{CENTRES, NORMS, calibrate};
use kvsieve::policy::{BeforeRope, Context, Policy, PolicyError, PolicyFile, Registry, select};
use kvsieve::tensor::file::{Output, TensorFile, write};
use kvsieve::tensor::{DType, Tensor};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conformance/fixtures")
}

/// A registry with this file of centres and norms.
fn registry(centres: (Vec<usize>, &[f32]), norms: (Vec<usize>, &[f32])) -> Registry {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("policy.safetensors");
    write(&path, &[Output::f32(CENTRES, centres.0, centres.1), Output::f32(NORMS, norms.0, norms.1)]).unwrap();
    Registry::default().with_file(PolicyFile::open(&path).unwrap())
}

/// Keys and queries of an input set, and what is expected of them.
struct Case {
    q: Tensor,
    k: Tensor,
    q_before_rope: Tensor,
    frequencies: Frequencies,
    expected: Vec<u8>,
    name: &'static str,
}

impl Case {
    fn open(name: &'static str) -> Self {
        let file = TensorFile::open(&fixtures().join(format!("{name}.safetensors"))).unwrap();
        let load = |name| file.load(name, &Arena::unlimited(), Label::Input).unwrap();
        let (q, k, q_before_rope) = (load("q"), load("k"), load("q_pre"));
        let theta: f64 = file.metadata("rope_theta").unwrap().parse().unwrap();
        let frequencies = Frequencies::new(k.dims()[3], theta);
        let expected = std::fs::read(fixtures().join("triattention.safetensors")).unwrap();
        Case { q, k, q_before_rope, frequencies, expected, name }
    }

    fn f32(&self, name: &str) -> (Vec<usize>, Vec<f32>) {
        let file = SafeTensors::deserialize(&self.expected).unwrap();
        let tensor = file.tensor(&format!("{}/{name}", self.name)).unwrap();
        let values = tensor.data().chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap()));
        (tensor.shape().to_vec(), values.collect())
    }

    /// Rows of the last axis.
    fn rows(&self, name: &str) -> Vec<Vec<usize>> {
        let file = SafeTensors::deserialize(&self.expected).unwrap();
        let tensor = file.tensor(&format!("{}/{name}", self.name)).unwrap();
        let values = tensor.data().chunks_exact(8).map(|x| i64::from_le_bytes(x.try_into().unwrap()) as usize);
        let values: Vec<usize> = values.collect();
        values.chunks_exact(*tensor.shape().last().unwrap()).map(<[usize]>::to_vec).collect()
    }

    fn policy(&self, text: &str) -> Policy {
        let (centres, norms) = (self.f32("centres"), self.f32("norms"));
        registry((centres.0, &centres.1), (norms.0, &norms.1)).policy(text).unwrap()
    }

    /// Scores `[layers, Hkv, n]` of lists that hold the tokens `held` at these positions, and the positions that are retained.
    fn scored(
        &self,
        policy: &Policy,
        held: &[Vec<usize>],
        budget_tokens: usize,
    ) -> Result<(Vec<f32>, Vec<Vec<usize>>), PolicyError> {
        let [layers, kv_heads, tokens, head_dim] = self.k.dims();
        let kv_len = held[0].len();
        let all = self.k.to_f32();
        let row = |(list, held): (usize, &Vec<usize>)| -> Vec<f32> {
            held.iter().flat_map(|token| all[(list * tokens + token) * head_dim..][..head_dim].to_vec()).collect()
        };
        let keys: Vec<f32> = held.iter().enumerate().flat_map(row).collect();
        let keys = common::tensor(DType::F32, [layers, kv_heads, kv_len, head_dim], &keys);
        let kv = DenseKv::new(keys.view(), keys.view()).unwrap();
        let shape = Shape { batch: layers, q_heads: self.q.dims()[1], kv_heads, q_len: tokens, kv_len, head_dim };
        let params = Params::new(head_dim, true);
        let arena = Arena::unlimited();
        let context = Context {
            call: Forward { shape, params, q: self.q.view(), kv: &kv, cpu: cpu(2) },
            layers,
            lse: &[],
            future: None,
            accumulated: None,
            gates: None,
            reconstructed: None,
            positions: &|list, slot| held[list][slot],
            seen_tokens: tokens,
            before_rope: Some(BeforeRope { frequencies: &self.frequencies, q: None, k: None }),
            w_o: &[],
            layer_numbers: &[],
            budget_tokens,
            seed: 0,
            arena: &arena,
        };
        let mut scored = policy.score(&context)?.unwrap();
        let scores = scored.values.to_vec();
        let selection = select(policy, &context, &mut scored)?;
        let kept = |list: usize| selection.kept(list).iter().map(|&slot| slot as usize).collect();
        Ok((scores, (0..held.len()).map(kept).collect()))
    }
}

#[test]
fn scores_and_retained_tokens_are_those_of_the_public_code() {
    for (name, mode, text) in [
        ("one", "own", "triattention:layers=own"),
        ("one", "mean", "triattention"),
        ("two", "own", "triattention:layers=own"),
        ("two", "mean", "triattention"),
        ("mqa", "own", "triattention:layers=own"),
        ("long", "again", "triattention:layers=own"),
        ("two", "again", "triattention:layers=own"),
    ] {
        let case = Case::open(name);
        let [layers, kv_heads, tokens, _] = case.k.dims();
        let held = match mode {
            "again" => case.rows("again/held"),
            _ => vec![(0..tokens).collect(); layers * kv_heads],
        };
        let ((_, expected), kept) = (case.f32(&format!("{mode}/scores")), case.rows(&format!("{mode}/kept")));
        let (got, retained) = case.scored(&case.policy(text), &held, kept[0].len()).unwrap();
        assert_eq!(retained, kept, "{name}, {mode}");
        // Normalised scores are near 1.
        let off = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(got.len() == expected.len() && off < 2e-5, "{name}, {mode}: off by {off}");
    }
}

#[test]
fn calibrated_centres_are_those_of_the_public_code() {
    for name in ["one", "two", "mqa", "long"] {
        let case = Case::open(name);
        let q = case.q_before_rope.view();
        let (centres, norms) = calibrate(&q, q.dims()[3] / 2);
        for (got, (_, expected)) in [(centres, case.f32("centres")), (norms, case.f32("norms"))] {
            let off = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(got.len() == expected.len() && off < 2e-6, "{name}: off by {off}");
        }
    }
}

#[test]
fn layers_that_hold_different_tokens_have_no_mean() {
    let case = Case::open("two");
    let policy = case.policy("triattention");
    let mut held = vec![(0..100).collect::<Vec<_>>(); 4];
    assert!(case.scored(&policy, &held, 50).is_ok());
    held[3][99] = 120;
    let error = case.scored(&policy, &held, 50).err().unwrap().to_string();
    assert!(error.contains("'triattention'") && error.contains("use layers=own"), "{error}");
    assert!(case.scored(&case.policy("triattention:layers=own"), &held, 50).is_ok());
}

#[test]
fn a_grid_runs_with_memory_as_predicted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("policy.safetensors");
    let save = |heads: usize| {
        let centres: Vec<f32> = (0..2 * heads * 32).map(|x| (x as f32).sin()).collect();
        let norms = vec![1.5; 2 * heads * 16];
        let outputs =
            [Output::f32(CENTRES, vec![2, heads, 32], &centres), Output::f32(NORMS, vec![2, heads, 16], &norms)];
        write(&path, &outputs).unwrap();
    };
    let experiment = || {
        let text = format!(
            "name = \"x\"\n[[grid]]\npolicy_file = \"{}\"\nmeasure = \"evict\"\nheads = \"4/2\"\nhead_dim = 32\nlayers = 2\n\
             context_tokens = 300\nnew_tokens = 20\nbudget = 64\n\
             policy = [\"triattention\", \"triattention+every:steps=4\", \"triattention:layers=own+ada+every:steps=4\"]\n",
            path.display()
        );
        let spec = Spec::parse(&text, "x.toml").map_err(|error| error.to_string())?;
        Experiment::new(spec, "x.toml", &Registry::default(), Device::Cpu).map_err(|error| error.to_string())
    };
    save(3);
    let error = experiment().err().unwrap();
    assert!(error.contains("has shape [2, 3, 32]; [layers = 2, query heads = 4, head dim = 32] is needed"), "{error}");
    save(4);
    let options = Options {
        out: folder.path().join("out"),
        resume: false,
        join: false,
        shard: None,
        limit_bytes: 1 << 30,
        repro: "kvsieve run x.toml".into(),
    };
    let done = run(&experiment().unwrap(), &Registry::default(), cpu(2), &options, &mut |_| ()).unwrap();
    let evicted = done.records.iter().filter(|record| record.cell.policy_file.is_some());
    assert_eq!(evicted.clone().count(), 3);
    for record in evicted {
        let (label, memory) = (record.cell.label(), record.memory.as_ref());
        assert_eq!(record.status, Status::Ok, "{label}: {:?}", record.reason);
        let [peak, predicted] = memory.map(|memory| [memory.peak_bytes, memory.predicted_peak_bytes]).unwrap();
        assert_eq!(peak, predicted, "{label}");
    }
}
