//! Agreement with public implementations: `kvsieve evict` gives the scores, the retained tokens and the merged values that
//! kvpress and others give for the same tensors. `conformance/README.md` says how the fixtures were made and what is
//! compared. Every case is checked and every difference reported in one go.

use assert_cmd::Command;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Scores from here on stand for "always stays".
const PINNED: f64 = 1e30;

#[derive(Deserialize)]
struct Cases {
    cases: Vec<Case>,
}

/// An entry of `cases.json` or `matching.json`; tensors are named.
#[derive(Deserialize)]
struct Case {
    name: String,
    policy: String,
    budget: String,
    input: String,
    expected: String,
    scores: Option<String>,
    kept: Option<String>,
    outputs: BTreeMap<String, String>,
    protected: Protected,
    tolerance: f64,
}

/// Tokens that always stay: their scores are a convention, not a measurement.
#[derive(Deserialize)]
struct Protected {
    sink: usize,
    window: usize,
}

/// A tensor, widened.
struct Values {
    dims: Vec<usize>,
    values: Vec<f64>,
}

impl Values {
    /// Rows of the last axis.
    fn rows(&self) -> impl Iterator<Item = &[f64]> {
        self.values.chunks_exact(*self.dims.last().unwrap())
    }
}

/// All tensors of a file.
fn load(path: &Path) -> BTreeMap<String, Values> {
    let bytes = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let stored = SafeTensors::deserialize(&bytes).unwrap();
    let widen = |(name, tensor): (String, TensorView<'_>)| {
        let data = tensor.data();
        let values = match tensor.dtype() {
            Dtype::F32 => data.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap()).into()).collect(),
            Dtype::I64 => data.chunks_exact(8).map(|x| i64::from_le_bytes(x.try_into().unwrap()) as f64).collect(),
            Dtype::U8 => data.iter().map(|&x| f64::from(x)).collect(),
            other => panic!("{name} in {}: {other:?}", path.display()),
        };
        (name, Values { dims: tensor.shape().to_vec(), values })
    };
    stored.tensors().into_iter().map(widen).collect()
}

/// Why a case does not pass.
enum Failure {
    /// The command line does not know the policy; in its words.
    Refused(String),
    /// It does, and gives something else.
    Differs(String),
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conformance/fixtures")
}

fn check(case: &Case, expected: &BTreeMap<String, Values>) -> Result<(), Failure> {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("out.safetensors");
    let mut command = Command::cargo_bin("kvsieve").unwrap();
    command.args(["evict", "--threads", "1", "--policy", &case.policy, "--budget", &case.budget, "--input"]);
    let ran = command.arg(fixtures().join(&case.input)).arg("--output").arg(&output).output().unwrap();
    if !ran.status.success() {
        let said = String::from_utf8_lossy(&ran.stderr).trim_end().to_string();
        return Err(if ran.status.code() == Some(2) { Failure::Refused(said) } else { Failure::Differs(said) });
    }
    let got = load(&output);
    let tensor = |name: &str| got.get(name).ok_or_else(|| Failure::Differs(format!("wrote no tensor '{name}'")));
    let scores = case.scores.as_ref().map(|name| &expected[name]);
    let compared = || -> Result<(), Failure> {
        if let Some(wanted) = scores {
            scores_agree(case, tensor("scores")?, wanted).map_err(Failure::Differs)?;
        }
        if let Some(name) = &case.kept {
            let kept = kept_agree(case, tensor("kept")?, tensor("kept_len")?, &expected[name], scores);
            kept.map_err(Failure::Differs)?;
        }
        for (name, wanted) in &case.outputs {
            outputs_agree(case, name, tensor(name)?, &expected[wanted]).map_err(Failure::Differs)?;
        }
        Ok(())
    };
    compared()
}

/// What a difference is measured against: the size of the wanted number, but not less than a typical one.
fn allowed(case: &Case, wanted: f64, typical: f64) -> f64 {
    case.tolerance * wanted.abs().max(typical)
}

fn mean_size(values: impl Iterator<Item = f64> + Clone) -> f64 {
    values.clone().map(f64::abs).sum::<f64>() / values.count().max(1) as f64
}

/// Whether a token's score is compared.
fn evicted(case: &Case, slot: usize, wanted: &[f64]) -> bool {
    slot >= case.protected.sink && slot + case.protected.window < wanted.len() && wanted[slot] < PINNED
}

fn scores_agree(case: &Case, got: &Values, wanted: &Values) -> Result<(), String> {
    if got.dims != wanted.dims {
        return Err(format!("scores are {:?}, expected {:?}", got.dims, wanted.dims));
    }
    for (list, (got, wanted)) in got.rows().zip(wanted.rows()).enumerate() {
        let evicted: Vec<usize> = (0..wanted.len()).filter(|&slot| evicted(case, slot, wanted)).collect();
        let typical = mean_size(evicted.iter().map(|&slot| wanted[slot]));
        let differs = |&&slot: &&usize| {
            // Written so that a NaN differs.
            let agrees = (got[slot] - wanted[slot]).abs() <= allowed(case, wanted[slot], typical);
            !agrees
        };
        let different: Vec<usize> = evicted.iter().filter(differs).copied().collect();
        if let Some(&slot) = different.first() {
            return Err(format!(
                "{} of {} scores of list {list} differ, first at token {slot}: {}, expected {} +- {:.1e}",
                different.len(),
                evicted.len(),
                got[slot],
                wanted[slot],
                allowed(case, wanted[slot], typical),
            ));
        }
        let best = evicted.iter().map(|&slot| got[slot]).fold(f64::NEG_INFINITY, f64::max);
        let mut always = (0..wanted.len()).filter(|slot| evicted.binary_search(slot).is_err());
        if let Some(slot) = always.find(|&slot| got[slot] < best) {
            return Err(format!("token {slot} of list {list} always stays, but scores {} under {best}", got[slot]));
        }
    }
    Ok(())
}

/// The same tokens stay. Where scores are known, tokens may change places if both score as much as the last that stays.
fn kept_agree(
    case: &Case,
    kept: &Values,
    kept_len: &Values,
    wanted: &Values,
    scores: Option<&Values>,
) -> Result<(), String> {
    if kept.dims[..2] != wanted.dims[..2] {
        return Err(format!("kept is {:?} for heads {:?}", kept.dims, &wanted.dims[..2]));
    }
    for (list, (kept, wanted)) in kept.rows().zip(wanted.rows()).enumerate() {
        let got: BTreeSet<usize> =
            kept[..kept_len.values[list] as usize].iter().map(|&position| position as usize).collect();
        let wanted: BTreeSet<usize> = (0..wanted.len()).filter(|&slot| wanted[slot] == 1.0).collect();
        let ties = |slot: usize| {
            let Some(scores) = scores.and_then(|scores| scores.rows().nth(list)) else { return false };
            let evicted = (0..scores.len()).filter(|&slot| evicted(case, slot, scores));
            let typical = mean_size(evicted.map(|slot| scores[slot]));
            let least = wanted.iter().map(|&slot| scores[slot]).fold(f64::INFINITY, f64::min);
            (scores[slot] - least).abs() <= 2.0 * allowed(case, least, typical)
        };
        let swapped: Vec<usize> = got.symmetric_difference(&wanted).copied().filter(|&slot| !ties(slot)).collect();
        if got.len() != wanted.len() || !swapped.is_empty() {
            return Err(format!(
                "list {list} keeps {} tokens, expected {}; other fate for {:?}{}",
                got.len(),
                wanted.len(),
                &swapped[..swapped.len().min(8)],
                if swapped.len() > 8 { " and more" } else { "" },
            ));
        }
    }
    Ok(())
}

fn outputs_agree(case: &Case, name: &str, got: &Values, wanted: &Values) -> Result<(), String> {
    if got.dims != wanted.dims {
        return Err(format!("'{name}' is {:?}, expected {:?}", got.dims, wanted.dims));
    }
    let typical = mean_size(wanted.values.iter().copied());
    let mut pairs = got.values.iter().zip(&wanted.values).enumerate();
    let differs = |(_, (got, wanted)): &(usize, (&f64, &f64))| {
        let agrees = (*got - *wanted).abs() <= allowed(case, **wanted, typical);
        !agrees
    };
    match pairs.find(differs) {
        Some((index, (got, wanted))) => Err(format!("element {index} of '{name}' is {got}, expected {wanted}")),
        None => Ok(()),
    }
}

#[test]
fn policies_agree_with_public_implementations() {
    let read =
        |name: &str| -> Cases { serde_json::from_str(&fs::read_to_string(fixtures().join(name)).unwrap()).unwrap() };
    let cases: Vec<Case> = ["cases.json", "matching.json"].into_iter().flat_map(|name| read(name).cases).collect();
    let names: BTreeSet<&str> = cases.iter().map(|case| case.expected.as_str()).collect();
    let expected: BTreeMap<&str, _> = names.into_iter().map(|name| (name, load(&fixtures().join(name)))).collect();

    let mut complaints = Vec::new();
    for case in &cases {
        match check(case, &expected[case.expected.as_str()]) {
            Ok(()) => {}
            Err(Failure::Refused(said)) => complaints.push(format!("{}: refused: {said}", case.name)),
            Err(Failure::Differs(said)) => complaints.push(format!("{}: {said}", case.name)),
        }
    }
    assert!(complaints.is_empty(), "{} of {} cases:\n{}", complaints.len(), cases.len(), complaints.join("\n"));
}
