//! Folders of packed matrices: they give what the same model in f32 gives, from as many bytes as their rows take.

use crate::byte_model;
use crate::common::models::{deviation, furthest, setup};
use crate::common::packed::{self, FFN, HIDDEN, KV_WIDTH, LAYERS, MATRICES, VOCAB, layouts};
use assert_cmd::Command;
use kvsieve::device::Cpu;
use kvsieve::format::RowFormat;
use kvsieve::memory::{Arena, Label};
use kvsieve::model::{self, Decoder, Model, Setup};
use kvsieve::tensor::DType;
use predicates::str::contains;
use safetensors::Dtype;
use serde_json::{Value, json};
use std::path::Path;

/// Logits of all tokens, `[tokens, vocab]`.
fn logits(model: &Model, tokens: &[u32], chunk_tokens: usize) -> Vec<f32> {
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    let mut decoder = Decoder::new(model, setup(1, chunk_tokens), &cpu, &arena).unwrap();
    let mut all = Vec::new();
    decoder.prefill(&[tokens], |_, _, row| all.extend_from_slice(row)).unwrap();
    all
}

fn tokens() -> Vec<u32> {
    (0..60).map(|at| 2 + at * 37 % 250).collect()
}

#[test]
fn a_packed_folder_gives_what_its_model_gives_in_f32() {
    let (folder, arena) = (tempfile::tempdir().unwrap(), Arena::unlimited());
    for (name, format, config) in layouts() {
        let [path, wide] = ["packed", "wide"].map(|end| folder.path().join(format!("{name}-{end}")));
        packed::write(&path, &config);
        packed::write_wide(&wide, &config);
        let expected = logits(&Model::open(&wide, &arena).unwrap(), &tokens(), 80);
        // The same numbers, and so the same bits.
        let widened = Model::open_in(&path, Some("f32".parse().unwrap()), &arena).unwrap();
        assert_eq!(logits(&widened, &tokens(), 80), expected, "{name}");
        let model = Model::open(&path, &arena).unwrap();
        assert_eq!(model.weights.format().to_string(), format, "{name}");
        // Packed for many rows, read where they lie for few, and in between.
        for chunk in [80, 11, 3, 1] {
            let off = furthest(&logits(&model, &tokens(), chunk), &expected) / deviation(&expected);
            assert!(off < 1e-4, "{name}, {chunk} tokens at a time: off by {off}");
        }
    }
}

/// Few rows are multiplied as whole numbers and many as what these stand for: both under the scale that the folder has, whatever its
/// weights are kept in.
#[test]
fn inputs_under_a_scale_of_the_folder_are_the_same_however_they_are_multiplied() {
    let folder = tempfile::tempdir().unwrap();
    let (_, _, config) = layouts().into_iter().find(|(name, ..)| *name == "w8a8").unwrap();
    packed::write(folder.path(), &config);
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    for weights in ["int8", "q8_0", "q4_1", "iq4_nl"] {
        let model = Model::open_in(folder.path(), Some(weights.parse().unwrap()), &arena).unwrap();
        let rounded = |chunk_tokens| {
            let setup = Setup { activations: Some("int8".parse().unwrap()), ..setup(1, chunk_tokens) };
            let mut decoder = Decoder::new(&model, setup, &cpu, &arena).unwrap();
            let mut all = Vec::new();
            decoder.prefill(&[&tokens()], |_, _, row| all.extend_from_slice(row)).unwrap();
            all
        };
        let (many, plain) = (rounded(80), logits(&model, &tokens(), 80));
        let moved = furthest(&many, &plain) / deviation(&plain);
        assert!(moved > 0.01, "{weights}: rounding moves something: {moved}");
        for chunk in [11, 3, 1] {
            let off = furthest(&rounded(chunk), &many) / deviation(&plain);
            assert!(off < 0.1 * moved, "{weights}, {chunk} tokens at a time: off by {off}, rounding moves {moved}");
        }
    }
}

#[test]
fn the_arena_holds_the_bytes_of_packed_rows() {
    let folder = tempfile::tempdir().unwrap();
    for (name, format, config) in layouts() {
        let path = folder.path().join(name);
        packed::write(&path, &config);
        let arena = Arena::unlimited();
        let model = Model::open(&path, &arena).unwrap();
        assert_eq!(arena.usage().live[&Label::Weights], model.weights.bytes(), "{name}");
        let is_row = config["group_size"] == json!(-1) || config["quant_method"] == json!("compressed-tensors");
        let ordered = config["desc_act"] == json!(true);
        let of = |rows: usize, width: usize| {
            let format: RowFormat = match is_row && width == FFN {
                true => format.replace("128", "256").parse().unwrap(),
                false => format.parse().unwrap(),
            };
            rows * format.row_bytes(width) + if ordered { 4 * width } else { 0 }
        };
        let block: usize = MATRICES.iter().map(|&(_, rows, width)| of(rows, width)).sum();
        let plain = 2 * 2 * VOCAB * HIDDEN + 4 * (2 * LAYERS + 1) * HIDDEN;
        assert_eq!(model.weights.bytes(), (LAYERS * block + plain) as u64, "{name}");
        // What the elements take with all that belongs to them.
        let elements: usize = MATRICES.iter().map(|(_, rows, width)| rows * width).sum();
        let bits = 8.0 * block as f64 / elements as f64;
        let most = match format {
            "int8" => 8.25,
            _ if format.starts_with("uint8") => 8.75,
            _ if format.starts_with("fp8") => 8.251,
            _ => 5.0,
        };
        assert!(bits <= most, "{name}: {bits} bits");
    }
    assert_eq!(MATRICES[1].1, KV_WIDTH);
}

#[test]
fn the_peak_is_the_formula_with_columns_in_another_order_too() {
    let folder = tempfile::tempdir().unwrap();
    for (name, _, config) in layouts().into_iter().filter(|(name, ..)| name.starts_with("gptq")) {
        packed::write(folder.path(), &config);
        for (lens, steps, chunk_tokens, threads) in [(vec![60, 33], 2, 20, 2), (vec![5], 1, 1, 1)] {
            let (cpu, arena) = (Cpu::new(Some(threads)).unwrap(), Arena::unlimited());
            let model = Model::open(folder.path(), &arena).unwrap();
            let setup = Setup { all_logits: false, ..setup(lens.len(), chunk_tokens) };
            let predicted = model::bytes(&model, &setup, &lens, steps, threads).unwrap();
            let all = tokens();
            let prompts: Vec<&[u32]> = lens.iter().map(|&len| &all[..len]).collect();
            let mut decoder = Decoder::new(&model, setup, &cpu, &arena).unwrap();
            decoder.prefill(&prompts, |_, _, _| ()).unwrap();
            for _ in 0..steps {
                decoder.follow(&vec![&all[..1]; lens.len()], |_, _, _| ()).unwrap();
            }
            assert_eq!(arena.usage().peak_bytes, predicted, "{name}: {lens:?}");
        }
    }
}

fn kvsieve(arguments: &[&str]) -> Command {
    let mut command = Command::cargo_bin("kvsieve").unwrap();
    command.args(arguments).args(["--threads", "2"]);
    command
}

/// What a plan foretells of a packed folder from its headers, and the arena's account of a run.
#[test]
fn a_plan_knows_what_packed_folders_take() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().to_str().unwrap();
    for (name, _, config) in layouts() {
        packed::write(folder.path(), &config);
        let of = ["plan", "measure", "--model", model, "--context", "64", "--output-tokens", "2", "--kv-format", "f16"];
        let run = Command::cargo_bin("kvsieve").unwrap().args(of).args(["--json", "-"]).assert().success();
        let measured: Value = serde_json::from_slice(&run.get_output().stdout).unwrap();
        let held: Vec<&Value> =
            measured.as_array().unwrap().iter().flat_map(|of| of["held"].as_array().unwrap()).collect();
        assert!(held.len() > 5, "{measured}");
        held.iter().for_each(|term| assert_eq!(term["predicted_bytes"], term["arena_bytes"], "{name}: {term}"));
    }
    let plan = ["plan", "--model", model, "--gpu", "h100"];
    Command::cargo_bin("kvsieve").unwrap().args(plan).assert().success();
}

/// A packed model with a tokenizer whose tokens are bytes.
fn with_tokenizer(folder: &Path, config: &Value) {
    byte_model::write(folder, 2048);
    packed::write(folder, config);
}

#[test]
fn commands_run_packed_folders() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    std::fs::write(at("tokens.json"), json!({"tokens": [tokens()]}).to_string()).unwrap();
    for (name, format, config) in layouts() {
        let model = at(name);
        with_tokenizer(Path::new(&model), &config);
        let output = at("logits.safetensors");
        let run = kvsieve(&["logits", "--model", &model, "--tokens", &at("tokens.json"), "--output", &output])
            .args(["--dtype", "f32", "--json", "-"])
            .assert()
            .success();
        let report: Value = serde_json::from_slice(&run.get_output().stdout).unwrap();
        let held = Model::open(Path::new(&model), &Arena::unlimited()).unwrap().weights.bytes();
        assert_eq!((&report["weights_format"], &report["weights_bytes"]), (&json!(format), &json!(held)), "{report}");
        kvsieve(&["generate", "--model", &model, "--prompt", "abc", "--max-new-tokens", "4"]).assert().success();
    }
    let arena = Arena::unlimited();
    for name in ["gptq-ordered", "nf4"] {
        let gguf = at("model.gguf");
        let written = ["quantize", "--model", &at(name), "--format", "f32", "--output", &gguf];
        kvsieve(&written).assert().success();
        let [made, own] = [&gguf, &at(name)].map(|path| {
            let model = Model::open_in(Path::new(path), Some("f32".parse().unwrap()), &arena).unwrap();
            logits(&model, &tokens(), 80)
        });
        assert!(furthest(&made, &own) < 1e-5 * deviation(&own), "{name}: {}", furthest(&made, &own));
        let small = ["--tokens", "256", "--needles", "1", "--output"];
        kvsieve(&["inspect", "--model", &at(name)]).args(small).arg(at("anatomy")).assert().success();
        let task = ["--task", "passkey", "--context", "512", "--samples", "1"];
        kvsieve(&["eval", "--model", &at(name)]).args(task).assert().success();
    }
}

#[test]
fn packed_folders_are_trained_from() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    std::fs::write(at("text"), "A bear saw the sea and a ship on it. ".repeat(60)).unwrap();
    for (name, _, config) in layouts().into_iter().filter(|(name, ..)| ["gptq-ordered", "nf4"].contains(name)) {
        with_tokenizer(Path::new(&at(name)), &config);
    }
    let train = |method: &str, model: &str, out: &str| {
        let few = ["--length", "32", "--steps", "1", "--text"];
        kvsieve(&["train", "--method", method, "--model", &at(model), "--out", &at(out)])
            .args(few)
            .arg(at("text"))
            .assert()
    };
    train("qlora", "nf4", "adapter").success();
    Model::open(Path::new(&at("adapter")), &Arena::unlimited()).unwrap();
    let kvgrad = ["--task", "passkey", "--context", "512", "--samples", "1", "--policy", "kvgrad", "--budget", "0.5"];
    kvsieve(&["eval", "--model", &at("nf4")]).args(kvgrad).assert().success();
    let refused = kvsieve(&["eval", "--model", &at("gptq-ordered")]).args(kvgrad).assert().failure();
    refused.stderr(contains("are in another order (desc_act), which gradients do not know"));
    train("lora", "gptq-ordered", "beside").success();
    train("qlora", "gptq-ordered", "none").code(2).stderr(contains("are in another order (desc_act)"));
    // What comes out is plain, and says so.
    train("full", "gptq-ordered", "tuned").success();
    let config = std::fs::read_to_string(folder.path().join("tuned/config.json")).unwrap();
    assert!(!config.contains("quantization_config"), "{config}");
    let tuned = Model::open(Path::new(&at("tuned")), &Arena::unlimited()).unwrap();
    assert_eq!(tuned.weights.format(), RowFormat::plain(DType::F16));
}

#[test]
fn what_is_wrong_with_a_folder_is_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = folder.path().join("tokens.json");
    std::fs::write(&tokens, json!({"tokens": [[2, 3, 4]]}).to_string()).unwrap();
    let refused = |all: &[packed::Stored], config: &Value, said: &str| {
        std::fs::write(folder.path().join("config.json"), packed::config(config).to_string()).unwrap();
        packed::save(&folder.path().join("model.safetensors"), all);
        let [model, tokens] = [folder.path(), &tokens].map(|path| path.to_str().unwrap());
        let output = folder.path().join("logits.safetensors");
        let run = kvsieve(&["logits", "--model", model, "--tokens", tokens, "--output", output.to_str().unwrap()])
            .assert()
            .code(2)
            .stderr(contains(said));
        assert_eq!(String::from_utf8_lossy(&run.get_output().stderr).lines().count(), 1, "{said}");
    };
    let layout = |name: &str| layouts().into_iter().find(|(own, ..)| *own == name).unwrap().2;
    let gptq = layout("gptq-ordered");
    let changed = |config: &Value, name: &str, change: &dyn Fn(&mut packed::Stored)| {
        let [mut all, _] = packed::model(config);
        change(all.iter_mut().find(|one| one.name == name).unwrap());
        all
    };
    let q = "model.layers.0.self_attn.q_proj";
    let nan = |one: &mut packed::Stored| one.bytes[..2].copy_from_slice(&half::f16::NAN.to_le_bytes());
    refused(
        &changed(&gptq, &format!("{q}.scales"), &nan),
        &gptq,
        "scales' holds NaN at 0; every number must be finite",
    );
    let far = |one: &mut packed::Stored| one.bytes[..4].copy_from_slice(&4i32.to_le_bytes());
    refused(
        &changed(&gptq, &format!("{q}.g_idx"), &far),
        &gptq,
        "g_idx' is 4 at 0; it must be 0 to 3 (packed as gptq)",
    );
    let renamed = |one: &mut packed::Stored| one.name = "other".into();
    refused(&changed(&gptq, &format!("{q}.qzeros"), &renamed), &gptq, &format!("there is no tensor '{q}.qzeros'"));
    let flat = |one: &mut packed::Stored| one.shape = vec![one.shape.iter().product()];
    refused(&changed(&gptq, &format!("{q}.qweight"), &flat), &gptq, "is I32 [2048]; I32 [16, 128] is needed");
    // A bias that is not zero, of a model without biases, would be added by other programs.
    let bias = |one: &mut packed::Stored| one.bytes[1] = 0x3c;
    refused(&changed(&gptq, &format!("{q}.bias"), &bias), &gptq, &format!("tensor '{q}.bias' is not part of"));
    let [all, wide] = packed::model(&gptq);
    let with = |key: &str, value: Value| {
        let mut config = gptq.clone();
        config[key] = value;
        config
    };
    refused(&all, &with("desc_act", json!(false)), "mixes groups, but desc_act is false; it must be true");
    refused(&all, &with("group_size", json!(96)), "has 128 inputs; groups of 96 must divide them");
    refused(&all, &with("quant_method", json!("hqq")), "quant_method is \"hqq\"; known: gptq, awq");
    refused(&all, &with("bits", json!(2)), "quantization_config.bits is 2; of gptq 4 and 8 are read");
    refused(&all, &with("hyper", json!(2)), "quantization_config.hyper is 2; this option is not known");
    refused(&all, &Value::Null, "there is no tensor 'model.layers.0.self_attn.q_proj.weight'");
    // Matrices that were left as they are need nothing of it.
    let (path, arena) = (folder.path(), Arena::unlimited());
    std::fs::write(path.join("config.json"), packed::config(&gptq).to_string()).unwrap();
    packed::save(&path.join("model.safetensors"), &wide);
    assert_eq!(Model::open(path, &arena).unwrap().weights.format(), RowFormat::plain(DType::F32));
    assert!(wide.iter().all(|one| one.dtype == Dtype::F32));
}
