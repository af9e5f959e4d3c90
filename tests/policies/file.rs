//! Policies with parameters: gates on hidden states, calibrated filters and head gates, each against a computation by hand
//! or against the same without a file; and the file on the command line and in experiments.

use crate::byte_model;
use crate::common::models::checkpoint;
use kvsieve::device::Cpu;
use kvsieve::experiment::record::Status;
use kvsieve::experiment::{Device, Experiment, Options, Outcome, Spec, run};
use kvsieve::memory::{Arena, Label};
use kvsieve::model::{Activation, Decoder, Eviction, Hook, Model, Setup};
use kvsieve::policy::{Policy, PolicyFile, Registry, qfilters, triattention};
use kvsieve::tensor::file::{Output, TensorFile, write};
use kvsieve::tensor::{DType, TensorView};
use std::path::Path;
use std::sync::Mutex;

type Named<'n> = (&'n str, Vec<usize>, Vec<f32>);

fn save(path: &Path, tensors: &[Named<'_>]) {
    let outputs: Vec<_> =
        tensors.iter().map(|(name, shape, values)| Output::f32(name, shape.clone(), values)).collect();
    write(path, &outputs).unwrap();
}

/// A registry with a file of these tensors.
fn registry(tensors: &[Named<'_>]) -> Registry {
    let folder = tempfile::tempdir().unwrap();
    save(&folder.path().join("policy.safetensors"), tensors);
    Registry::default().with_file(PolicyFile::open(&folder.path().join("policy.safetensors")).unwrap())
}

/// Numbers between -1 and 1 without a pattern.
fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(next).collect()
}

/// Weight and bias of a gate.
fn gate(layers: usize, heads: usize, hidden: usize) -> [Named<'static>; 2] {
    let weight = noise(7, layers * heads * hidden);
    [("gate.weight", vec![layers, heads, hidden], weight), ("gate.bias", vec![layers, heads], noise(8, layers * heads))]
}

/// Keeps what it is shown of each layer.
struct Recorder {
    what: Activation,
    layers: Vec<Mutex<Vec<f32>>>,
}

impl Recorder {
    fn new(what: Activation, layers: usize) -> Self {
        Recorder { what, layers: (0..layers).map(|_| Mutex::default()).collect() }
    }
}

impl Hook for Recorder {
    fn rows(&self, layer: usize, what: Activation, rows: &[f32]) {
        if what == self.what {
            self.layers[layer].lock().unwrap().extend_from_slice(rows);
        }
    }
}

/// Prefill of `after` tokens, eviction, the rest; positions that each list holds at the end, by layer and head.
fn kept(
    model: &Model,
    tokens: &[u32],
    after: usize,
    (policy, budget): (&Policy, &str),
    hook: &Recorder,
) -> Vec<Vec<usize>> {
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    let setup = Setup { chunk_tokens: 9, columns: policy.columns(), ..Setup::of(64, DType::F32) };
    let mut decoder = Decoder::new(model, setup, &cpu, &arena).unwrap();
    decoder.hook(hook);
    let eviction = Eviction { policy, name: "policy", budget: Some(budget.parse().unwrap()), seed: 5, repeat: None };
    decoder.evict(eviction, &[after]).unwrap();
    decoder.prefill(&[&tokens[..after]], |_, _, _| ()).unwrap();
    decoder.follow(&[&tokens[after..]], |_, _, _| ()).unwrap();
    let lens = decoder.cache().lens().to_vec();
    let positions = |list: usize| (0..lens[list]).map(|slot| decoder.cache().position(list, slot)).collect();
    (0..lens.len()).map(positions).collect()
}

fn open(name: &str) -> (Model, Vec<u32>) {
    let checkpoint = checkpoint(name);
    (Model::open(&checkpoint.folder, &Arena::unlimited()).unwrap(), checkpoint.tokens)
}

/// The `count` best of `tokens` by their scores, ascending.
fn best(tokens: &[usize], scores: &[f64], count: usize) -> Vec<usize> {
    let mut order = tokens.to_vec();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order.truncate(count);
    order.sort_unstable();
    order
}

#[test]
fn the_gate_keeps_what_a_computation_by_hand_says() {
    const AFTER: usize = 24;
    const BUDGET: usize = 12;
    const WINDOW: usize = 6;
    for name in ["llama", "gemma2"] {
        let (model, tokens) = open(name);
        let (layers, heads, hidden) = (model.config.layers, model.config.kv_heads, model.config.hidden);
        let [weight, bias] = gate(layers, heads, hidden);
        let registry = registry(&[weight.clone(), bias.clone()]);
        for text in
            ["gate", "gate+protect:sink=2", "gate+chunks:tokens=8", "gate+every:steps=4", "gate+delayed:window=6"]
        {
            let hook = Recorder::new(Activation::Hidden, layers);
            let policy = registry.policy(text).unwrap();
            let got = kept(&model, &tokens, AFTER, (&policy, "12"), &hook);
            let mut differ = 0;
            for (list, got) in got.iter().enumerate() {
                let states = hook.layers[list / heads].lock().unwrap();
                let weight = &weight.2[list * hidden..][..hidden];
                let score = |state: &[f32]| {
                    let product: f64 = state.iter().zip(weight).map(|(h, w)| f64::from(*h) * f64::from(*w)).sum();
                    product + f64::from(bias.2[list])
                };
                let scores: Vec<f64> = states.chunks_exact(hidden).map(score).collect();
                assert_eq!(scores.len(), tokens.len());
                let context: Vec<usize> = (0..AFTER).collect();
                let expected = match text {
                    "gate+chunks:tokens=8" => {
                        let evicted = context.chunks(8).fold(Vec::new(), |held: Vec<usize>, chunk| {
                            best(&[&held[..], chunk].concat(), &scores, BUDGET)
                        });
                        evicted.into_iter().chain(AFTER..tokens.len()).collect()
                    }
                    "gate+every:steps=4" => {
                        let mut held = best(&context, &scores, BUDGET);
                        for token in AFTER..tokens.len() {
                            held.push(token);
                            if (token + 1 - AFTER).is_multiple_of(4) {
                                held = best(&held, &scores, BUDGET);
                            }
                        }
                        held
                    }
                    "gate+delayed:window=6" => {
                        let (old, recent) = context.split_at(AFTER - WINDOW);
                        let evicted = best(old, &scores, BUDGET - WINDOW);
                        let lost = old.iter().filter(|token| !evicted.contains(token));
                        let best_lost = lost.map(|&token| scores[token]).fold(f64::NEG_INFINITY, f64::max);
                        let mut held = [evicted, recent.to_vec()].concat();
                        for token in AFTER..tokens.len() {
                            held.push(token);
                            let leaving = held.len() - WINDOW - 1;
                            if scores[held[leaving]] <= best_lost {
                                held.remove(leaving);
                            }
                        }
                        held
                    }
                    "gate+protect:sink=2" => {
                        let evicted = best(&context[2..], &scores, BUDGET - 2);
                        [0, 1].into_iter().chain(evicted).chain(AFTER..tokens.len()).collect()
                    }
                    _ => best(&context, &scores, BUDGET).into_iter().chain(AFTER..tokens.len()).collect::<Vec<_>>(),
                };
                assert_eq!(*got, expected, "{name}, {text}, list {list}");
                differ += usize::from(expected[..BUDGET] != (0..BUDGET).collect::<Vec<_>>()[..]);
            }
            assert!(differ > 0, "{name}, {text}: the gate shows");
        }
    }
}

#[test]
fn calibrated_filters_of_the_same_queries_keep_the_same_tokens() {
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    for name in ["llama", "gemma2"] {
        let (model, tokens) = open(name);
        let config = &model.config;
        let hook = Recorder::new(Activation::Q, config.layers);
        let uncalibrated = Registry::default().policy("qfilters").unwrap();
        let own = kept(&model, &tokens, tokens.len(), (&uncalibrated, "12"), &hook);
        let q: Vec<f32> = hook.layers.iter().flat_map(|layer| layer.lock().unwrap().clone()).collect();
        let dims = [config.layers, tokens.len(), config.q_heads, config.head_dim];
        let q = TensorView::contiguous(DType::F32, dims, bytemuck::cast_slice(&q)).permuted([0, 2, 1, 3]);
        let filters = qfilters::filters(&q, config.kv_heads, &cpu, &arena).unwrap();
        let with = |filters: Vec<f32>| {
            let shape = vec![config.layers, config.kv_heads, config.head_dim];
            let policy = registry(&[(qfilters::FILTERS, shape, filters)]).policy("qfilters").unwrap();
            kept(&model, &tokens, tokens.len(), (&policy, "12"), &Recorder::new(Activation::Q, config.layers))
        };
        assert_eq!(with(filters.clone()), own, "{name}");
        assert_ne!(with(filters.iter().map(|x| -x).collect()), own, "{name}: the other way");
    }
}

#[test]
fn centres_keep_what_the_series_written_out_says() {
    const AFTER: usize = 24;
    const BUDGET: usize = 12;
    let (model, tokens) = open("llama");
    let config = &model.config;
    let (layers, heads, group, width) =
        (config.layers, config.kv_heads, config.q_heads / config.kv_heads, config.head_dim);
    let pairs = width / 2;
    let centres = noise(3, layers * heads * group * width);
    // No less than any norm of a centre's pair.
    let norms: Vec<f32> = noise(4, layers * heads * group * pairs).iter().map(|x| 2.5 + x).collect();
    let registry = registry(&[
        (triattention::CENTRES, vec![layers, heads * group, width], centres.clone()),
        (triattention::NORMS, vec![layers, heads * group, pairs], norms.clone()),
    ]);
    let mut ends = Vec::new();
    for (text, together) in
        [("triattention:future=50+every:steps=4", true), ("triattention:future=50,layers=own+every:steps=4", false)]
    {
        let policy = registry.policy(text).unwrap();
        let hook = Recorder::new(Activation::KBeforeRope, layers);
        let got = kept(&model, &tokens, AFTER, (&policy, "12"), &hook);
        let keys: Vec<Vec<f32>> = hook.layers.iter().map(|layer| layer.lock().unwrap().clone()).collect();
        let raw = |list: usize, of_group: usize, token: usize, seen: usize| -> f64 {
            let (layer, head) = (list / heads, list * group + of_group);
            let key = &keys[layer][(token * heads + list % heads) * width..][..width];
            let (centre, norm) = (&centres[head * width..][..width], &norms[head * pairs..][..pairs]);
            let polar = |row: &[f32], pair| {
                let (x, y) = (f64::from(row[pair]), f64::from(row[pair + pairs]));
                (x.hypot(y), y.atan2(x))
            };
            let of_pair = |pair: usize| {
                let ((c, c_angle), (k, k_angle)) = (polar(centre, pair), polar(key, pair));
                let turn = config.rope.theta.powf(-2.0 * pair as f64 / width as f64);
                let cosine = |ahead: &usize| ((seen + ahead - token) as f64 * turn + c_angle - k_angle).cos();
                let series = [1, 2, 4, 8, 16, 32].iter().map(cosine).sum::<f64>() / 6.0;
                c * k * series + (f64::from(norm[pair]) - c) * k
            };
            (0..pairs).map(of_pair).sum()
        };
        // By list and token, of those that a list holds; minus infinity of others.
        let scores = |held: &[Vec<usize>], seen: usize| -> Vec<Vec<f64>> {
            let of_list = |(list, held): (usize, &Vec<usize>)| {
                let mut best = vec![f64::NEG_INFINITY; tokens.len()];
                for of_group in 0..group {
                    let values: Vec<f64> = held.iter().map(|&token| raw(list, of_group, token, seen)).collect();
                    let mean = values.iter().sum::<f64>() / values.len() as f64;
                    let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / values.len() as f64;
                    let z = values.iter().map(|x| (x - mean) / variance.sqrt());
                    held.iter().zip(z).for_each(|(&token, z)| best[token] = best[token].max(z));
                }
                best
            };
            let own: Vec<Vec<f64>> = held.iter().enumerate().map(of_list).collect();
            let over_layers = |list: usize| {
                let of_token = |token: usize| (0..layers).map(|layer| own[layer * heads + list % heads][token]).sum();
                (0..tokens.len()).map(of_token).collect()
            };
            if together { (0..own.len()).map(over_layers).collect() } else { own }
        };
        let mut held = vec![(0..AFTER).collect::<Vec<_>>(); layers * heads];
        for seen in AFTER..=tokens.len() {
            if seen > AFTER {
                held.iter_mut().for_each(|list| list.push(seen - 1));
            }
            if (seen - AFTER).is_multiple_of(4) {
                let scores = scores(&held, seen);
                held = held.iter().zip(&scores).map(|(list, scores)| best(list, scores, BUDGET)).collect();
            }
        }
        assert_eq!(got, held, "{text}");
        assert_eq!(got[..heads] == got[heads..], together, "{text}");
        ends.push(got);
    }
    assert_ne!(ends[0], ends[1]);
}

#[test]
fn heads_of_the_lowest_gates_keep_the_first_and_the_recent_tokens() {
    let (model, tokens) = open("llama");
    let registry = registry(&[("duo.alpha", vec![2, 2], vec![0.1, 0.2, 0.9, 0.3])]);
    let policy = registry.policy("knorm+duo:sink=1,recent=3,heads=0.75").unwrap();
    let hook = Recorder::new(Activation::Q, 2);
    let got = kept(&model, &tokens, tokens.len(), (&policy, "12"), &hook);
    let lens: Vec<usize> = got.iter().map(Vec::len).collect();
    // Three of four heads of the model are streaming heads; the fourth has what they leave of the model's budget.
    let last = tokens.len();
    assert_eq!((lens, last >= 36), (vec![4, 4, 36, 4], true));
    assert_eq!(got[3], [0, last - 3, last - 2, last - 1]);
    // What a streaming head keeps is not for a second stage to choose again.
    let refined = registry.policy("knorm+duo:sink=1,recent=3,heads=0.75+critical").unwrap();
    let refined = kept(&model, &tokens, tokens.len(), (&refined, "12"), &hook);
    assert_eq!([&refined[0], &refined[1], &refined[3]], [&got[0], &got[1], &got[3]]);

    // The same gates as DuoAttention's authors publish them, and what is no such table.
    let folder = tempfile::tempdir().unwrap();
    let of = |table: &str| {
        std::fs::write(folder.path().join("full_attention_heads.tsv"), table).unwrap();
        let text = format!("knorm+duo:sink=1,recent=3,heads=0.75,gates={}", folder.path().display());
        Registry::default().policy(&text).map_err(|error| error.to_string())
    };
    let published = of("1.0e-01\t2.0e-01\n9.0e-01\t3.0e-01\n").unwrap();
    assert_eq!(kept(&model, &tokens, tokens.len(), (&published, "12"), &hook), got);
    // How they were trained lies beside them.
    let as_trained = format!("knorm+duo:heads=0.75,gates={}", folder.path().display());
    std::fs::write(folder.path().join("config.json"), r#"{"sink_size": 1, "recent_size": 3}"#).unwrap();
    let as_trained = Registry::default().policy(&as_trained).unwrap();
    assert_eq!(kept(&model, &tokens, tokens.len(), (&as_trained, "12"), &hook), got);
    for (sizes, expected) in [
        (r#"{"recent_size": 0}"#, "recent_size is 0; a count of at least 1 is needed"),
        (r#"{"sink_size": -1}"#, "sink_size is -1; a count of at least 0 is needed"),
    ] {
        std::fs::write(folder.path().join("config.json"), sizes).unwrap();
        let said = of("0.1\t0.2\n").err().unwrap_or_default();
        assert!(said.ends_with(expected), "{said}");
    }
    std::fs::remove_file(folder.path().join("config.json")).unwrap();
    for (table, expected) in [
        ("0.1\t0.2\n0.9\n", "row 2 has 1 gates; 2 are needed"),
        ("0.1\thalf\n", "row 1: 'half' is no number"),
        ("\n", "full_attention_heads.tsv is empty"),
    ] {
        let said = of(table).err().unwrap_or_default();
        assert!(said.contains("holds no gates that can be read") && said.ends_with(expected), "{said}");
    }
}

#[test]
fn a_model_of_other_extents_is_refused() {
    let (model, _) = open("llama");
    let says = |policy: &Policy, name| {
        let error = Eviction { policy, name, budget: None, seed: 0, repeat: None }.check(&model.config).err();
        error.map(|error| error.to_string()).unwrap_or_default()
    };
    assert_eq!(says(&registry(&gate(2, 2, 32)).policy("gate").unwrap(), "gate"), "");
    for (wrong, expected) in [
        (gate(3, 2, 32), "has shape [3, 2, 32]; [layers = 2, KV heads = 2, hidden = 32] is needed"),
        (gate(2, 1, 32), "has shape [2, 1, 32]; [layers = 2, KV heads = 2, hidden = 32] is needed"),
        (gate(2, 2, 16), "has shape [2, 2, 16]; [layers = 2, KV heads = 2, hidden = 32] is needed"),
    ] {
        let said = says(&registry(&wrong).policy("gate").unwrap(), "gate");
        assert!(said.contains("'gate.weight'") && said.ends_with(expected), "{said}");
    }
    assert!(
        says(&Registry::default().policy("gate").unwrap(), "gate").contains("reads 'gate.weight' of a policy file")
    );
}

/// Runs the binary in a folder.
fn kvsieve(folder: &Path, arguments: &[&str]) -> (i32, String, String) {
    let mut command = assert_cmd::Command::new(env!("CARGO_BIN_EXE_kvsieve"));
    let output = command.current_dir(folder).args(arguments).args(["--threads", "2"]).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// The extents of the byte model: layers, KV heads, hidden.
const BYTE: [usize; 3] = [2, 2, 32];

#[test]
fn commands_read_a_policy_file_and_say_which() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    byte_model::write(&at("m"), 2048);
    std::fs::write(at("t.txt"), "Every morning the old lamp was lit again. ".repeat(3)).unwrap();
    let go = |arguments: &[&str]| {
        let (status, out, err) = kvsieve(folder.path(), arguments);
        assert_eq!(status, 0, "{arguments:?}: {err}");
        out
    };
    let text = ["--model", "m", "--text", "t.txt", "--output"];
    go(&[&["capture"][..], &text, &["in.safetensors", "--layers", "1"]].concat());
    go(&[&["calibrate", "--method", "qfilters,qfilters"][..], &text, &["filters.safetensors"]].concat());
    go(&[&["calibrate", "--method", "triattention"][..], &text, &["centres.safetensors"]].concat());
    let [weight, bias] = gate(BYTE[0], BYTE[1], BYTE[2]);
    save(&at("gate.safetensors"), &[weight.clone(), bias.clone()]);

    // A gate over captured tensors: the scores of layer 1 by hand.
    let evict = ["evict", "--input", "in.safetensors", "--output", "out.safetensors", "--budget", "9", "--json", "-"];
    let report = go(&[&evict[..], &["--policy", "gate", "--policy-file", "gate.safetensors"]].concat());
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    let hash = |name: &str| blake3::hash(&std::fs::read(at(name)).unwrap()).to_hex().to_string();
    assert_eq!(
        (&report["policy_file"], &report["policy_file_hash"]),
        (&"gate.safetensors".into(), &hash("gate.safetensors").into())
    );
    let values = |file: &str, name: &str| {
        TensorFile::open(&at(file)).unwrap().load(name, &Arena::unlimited(), Label::Input).unwrap()
    };
    let hidden = values("in.safetensors", "hidden");
    assert_eq!((hidden.dims()[0], hidden.dims()[1], hidden.dims()[3]), (1, 1, BYTE[2]));
    let bytes = std::fs::read(at("out.safetensors")).unwrap();
    let scores = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let scores: &[f32] = bytemuck::cast_slice(scores.tensor("scores").unwrap().data());
    let states = hidden.to_f32();
    for (index, score) in scores.iter().enumerate() {
        let (head, token) = (index / hidden.dims()[2], index % hidden.dims()[2]);
        let list = BYTE[1] + head;
        let (weight, state) = (&weight.2[list * BYTE[2]..][..BYTE[2]], &states[token * BYTE[2]..][..BYTE[2]]);
        let expected = bias.2[list] + weight.iter().zip(state).map(|(w, h)| w * h).sum::<f32>();
        assert!((score - expected).abs() < 1e-4 * (1.0 + expected.abs()), "head {head}, token {token}");
    }

    // Filters and centres of a model for a run of it.
    let generate = ["generate", "--model", "m", "--prompt", "The old lamp was lit.", "--budget", "9", "--json", "-"];
    for (policy, file) in [("qfilters", "filters.safetensors"), ("triattention+every", "centres.safetensors")] {
        let more = ["--max-new-tokens", "2", "--policy", policy, "--policy-file", file];
        let report: serde_json::Value = serde_json::from_str(&go(&[&generate[..], &more].concat())).unwrap();
        assert_eq!(report["policy_file_hash"], hash(file), "{policy}");
        assert!(report["evicted_tokens"].as_u64().unwrap() > 0, "{policy}");
    }

    // The user's mistakes.
    save(&at("wide.safetensors"), &gate(BYTE[0], BYTE[1], BYTE[2] + 1));
    save(&at("one.safetensors"), &gate(1, BYTE[1], BYTE[2]));
    std::fs::write(at("text.safetensors"), "text").unwrap();
    let least = &evict[..7];
    for (policy, file, expected) in [
        ("gate", None, "policy 'gate': it reads 'gate.weight' of a policy file; give --policy-file"),
        ("gate", Some("no.safetensors"), "cannot read 'no.safetensors'"),
        ("gate", Some("text.safetensors"), "'text.safetensors' is not a valid safetensors file"),
        ("gate", Some("filters.safetensors"), "has no tensor 'gate.weight'; it holds qfilters.filters"),
        ("gate", Some("wide.safetensors"), "is needed"),
        ("gate", Some("one.safetensors"), "is of a model of 1 layers; by the input's metadata it holds layer 1"),
        ("knorm", Some("gate.safetensors"), "policy 'knorm' reads no tensor of --policy-file"),
        ("qfilters", Some("gate.safetensors"), "policy 'qfilters' reads no tensor of --policy-file"),
    ] {
        let mut arguments = [least, &["--policy", policy]].concat();
        arguments.extend(file.iter().flat_map(|file| ["--policy-file", file]));
        let (status, out, err) = kvsieve(folder.path(), &arguments);
        assert_eq!((status, out.as_str(), err.lines().count()), (2, "", 1), "{policy}, {file:?}: {err}");
        assert!(err.contains(expected), "{policy}, {file:?}: {err}");
    }
    let (status, _, err) =
        kvsieve(folder.path(), &[&generate[..7], &["--policy", "gate", "--policy-file", "one.safetensors"]].concat());
    assert!(status == 2 && err.contains("[layers = 2, KV heads = 2, hidden = "), "{err}");
}

/// Runs an experiment into a folder.
fn run_into(out: &Path, experiment: &Experiment) -> Result<Outcome, String> {
    let options = Options {
        out: out.into(),
        resume: false,
        join: false,
        shard: None,
        limit_bytes: 1 << 30,
        repro: "kvsieve run x.toml".into(),
    };
    let cpu = Cpu::new(Some(2)).unwrap();
    run(experiment, &Registry::default(), &cpu, &options, &mut |_| ()).map_err(|error| error.to_string())
}

#[test]
fn an_experiment_reads_the_folder_that_a_policy_names() {
    let folder = tempfile::tempdir().unwrap();
    let (gates, table) = (folder.path().join("gates"), folder.path().join("gates/full_attention_heads.tsv"));
    std::fs::create_dir(&gates).unwrap();
    std::fs::write(&table, "0.1 0.9\n0.2 0.8\n").unwrap();
    let text = format!(
        "name = \"x\"\n[[grid]]\nmeasure = \"evict\"\nheads = \"4/2\"\nhead_dim = 32\nlayers = 2\ncontext_tokens = 300\n\
         budget = 64\npolicy = \"duoattention:gates={},recent=8\"\n",
        gates.display()
    );
    let spec = Spec::parse(&text, "x.toml").unwrap();
    let experiment = Experiment::new(spec, "x.toml", &Registry::default(), Device::Cpu).unwrap();
    let go = |out: &str| run_into(&folder.path().join(out), &experiment);
    let records = go("first").unwrap().records;
    let of_folder = records.iter().find(|record| record.cell.policy_file.is_some()).unwrap();
    assert_eq!((of_folder.status, &of_folder.reason), (Status::Ok, &None));
    std::fs::write(&table, "0.9 0.1\n0.2 0.8\n").unwrap();
    let error = go("second").err().unwrap();
    assert!(error.contains("has changed since the experiment was read"), "{error}");
}

#[test]
fn an_experiment_names_the_file_in_the_cells_that_read_it() {
    let folder = tempfile::tempdir().unwrap();
    let (model, path) = (folder.path().join("m"), folder.path().join("policy.safetensors"));
    byte_model::write(&model, 2048);
    let [weight, bias] = gate(BYTE[0], BYTE[1], BYTE[2]);
    save(&path, &[weight.clone(), bias.clone()]);
    let read = |grid: &str| {
        let text = format!("name = \"x\"\n[[grid]]\npolicy_file = \"{}\"\n{grid}", path.display());
        let spec = Spec::parse(&text, "x.toml").map_err(|error| error.to_string())?;
        Experiment::new(spec, "x.toml", &Registry::default(), Device::Cpu).map_err(|error| error.to_string())
    };
    let eval = format!(
        "measure = \"eval\"\nmodel = \"{}\"\ncontext_tokens = 600\ntask = \"passkey:digits=3\"\nsamples = 1\n\
         budget = 0.25\npolicy = [\"full\", \"keydiff\", \"gate\", \"gate+every:steps=4\", \"gate+chunks:tokens=256\"]\n",
        model.display()
    );
    let experiment = read(&eval).unwrap();
    let hashes: Vec<_> = experiment.cells.iter().map(|cell| cell.policy_file_hash.clone()).collect();
    let own = Some(blake3::hash(&std::fs::read(&path).unwrap()).to_hex().to_string());
    // Random eviction is added.
    assert_eq!(hashes, [None, None, own.clone(), own.clone(), own, None]);

    let go = |out: &str| run_into(&folder.path().join(out), &experiment);
    for record in go("first").unwrap().records {
        let (label, reason) = (record.cell.label(), &record.reason);
        assert_eq!(record.status, Status::Ok, "{label}: {reason:?}");
        assert_eq!(record.cell_id, record.cell.id());
        let kept = record.answers.as_ref().unwrap().kept_fraction;
        assert!(if label.contains("full") { kept == 1.0 } else { (0.2..0.3).contains(&kept) }, "{label}: {kept}");
    }

    // Another file makes other cells of the policies that read it, and the old cells do not run with it.
    save(&path, &[weight, (bias.0, bias.1, vec![0.25; bias.2.len()])]);
    let other = read(&eval).unwrap();
    let same: Vec<bool> = experiment.cells.iter().zip(&other.cells).map(|(a, b)| a.id() == b.id()).collect();
    assert_eq!(same, [true, true, false, false, false, true]);
    assert_ne!(experiment.config_hash(), other.config_hash());
    let outcome = go("second").unwrap();
    let evaluated = outcome.records.iter().filter(|record| record.cell.policy_file.is_some());
    for record in evaluated {
        let reason = record.reason.as_deref().unwrap_or_default();
        assert!(record.status == Status::Failed && reason.contains("has changed since"), "{reason}");
    }

    let evict = "measure = \"evict\"\nheads = \"4/2\"\nhead_dim = 8\ncontext_tokens = 64\nbudget = 16\nlayers = 2\n";
    for (rest, expected) in [
        ("policy = \"gate\"", "policy 'gate' looks at hidden states, which only a model has"),
        ("policy = [\"full\", \"knorm\"]", "none of the policies reads a tensor of policy_file"),
    ] {
        let error = read(&format!("{evict}{rest}\n")).err().unwrap();
        assert!(error.contains(expected), "{error}");
    }
    save(&path, &[(qfilters::FILTERS, vec![2, 2, 8], noise(1, 32))]);
    let cells = read(&format!("{evict}policy = [\"full\", \"qfilters\"]\n")).unwrap().cells;
    assert!(cells[0].policy_file.is_none() && cells[1].policy_file_hash.is_some());
    let star = read(&format!("{evict}policy = \"*\"\n")).unwrap().cells;
    assert!(star.iter().all(|cell| cell.policy.as_deref() != Some("gate")));
    let error = read(&format!("{}policy = \"qfilters\"\n", evict.replace("layers = 2", "layers = 3"))).err().unwrap();
    assert!(error.contains("has shape [2, 2, 8]; [layers = 3, KV heads = 2, head dim = 8] is needed"), "{error}");
}
