//! `kvsieve quantize`: the sizes of llama.cpp's mixtures, files that give what their blocks stand for, and one line for what cannot
//! be written.

use crate::common::gguf::{F32, Kind, Parts, Q8_0};
use crate::common::models::{checkpoint, deviation, furthest, setup};
use assert_cmd::Command;
use kvsieve::device::Cpu;
use kvsieve::memory::Arena;
use kvsieve::model::{Activation, ChatTemplate, Config, Decoder, Hook, Message, Mixture, Model, Text, quantise};
use predicates::str::contains;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;

/// Bits of a parameter of Llama-3.1-8B.
fn bits_per_weight(mixture: &str) -> f64 {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0, "max_position_embeddings": 131_072, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
    });
    let Value::Object(config) = config else { unreachable!("it is an object") };
    let planned = mixture.parse::<Mixture>().unwrap().plan(&Config::from_json(&config).unwrap());
    let elements: usize = planned.iter().map(|one| one.elements()).sum();
    assert_eq!(elements, 8_030_261_248);
    8.0 * planned.iter().map(|one| one.bytes()).sum::<usize>() as f64 / elements as f64
}

#[test]
fn a_model_takes_the_bits_that_llama_cpp_publishes() {
    for (mixture, bits) in [("q8_0", 8.5008), ("q6_k", 6.5633), ("q4_k_m", 4.8944), ("q2_k", 3.1593)] {
        let found = bits_per_weight(mixture);
        assert!((found - bits).abs() < 5e-5, "{mixture}: {found}");
    }
}

fn logits(path: &Path, tokens: &[u32]) -> Vec<f32> {
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    let model = Model::open(path, &arena).unwrap();
    let mut decoder = Decoder::new(&model, setup(1, 80), &cpu, &arena).unwrap();
    let mut all = Vec::new();
    decoder.prefill(&[tokens], |_, _, row| all.extend_from_slice(row)).unwrap();
    all
}

#[test]
fn a_file_that_is_written_is_the_model_with_what_its_blocks_stand_for() {
    let (folder, cpu) = (tempfile::tempdir().unwrap(), Cpu::new(Some(2)).unwrap());
    let [source, made, output] = ["f32", "made", "out"].map(|name| folder.path().join(format!("{name}.gguf")));
    for name in ["llama", "llama-bias-tied", "qwen2", "phi3", "gemma2"] {
        let checkpoint = checkpoint(name);
        std::fs::write(&source, Parts::of(&checkpoint.folder, F32).bytes()).unwrap();
        for (mixture, kind) in [("f32", F32), ("q8_0", Q8_0)] {
            // Written by the rules of the conversion; rows that are no whole blocks are f32 there and f16 here.
            std::fs::write(&made, Parts::of(&checkpoint.folder, kind).bytes()).unwrap();
            let mixture: Mixture = mixture.parse().unwrap();
            let done = quantise(&source, mixture, None, &output, (&cpu, &Arena::unlimited()), |_, _| ()).unwrap();
            for one in &done {
                let bound = match one.format.as_str() {
                    "f32" => 0.0,
                    "f16" => 1e-3,
                    _ => 1e-2,
                };
                assert!(one.rel_l2 <= bound && one.from == "f32".parse().unwrap(), "{name}: {one:?}");
            }
            let (wanted, got) = (logits(&made, &checkpoint.tokens), logits(&output, &checkpoint.tokens));
            let off = furthest(&got, &wanted) / deviation(&wanted);
            assert!(off < if kind.1 == F32.1 { 1e-6 } else { 1e-2 }, "{name} in {mixture:?}: off by {off}");
        }
    }
}

#[test]
fn a_folder_becomes_a_file_that_reads_and_cuts_text_as_it_does() {
    let (folder, cpu) = (tempfile::tempdir().unwrap(), Cpu::new(Some(2)).unwrap());
    let output = folder.path().join("out.gguf");
    let write = |source: &Path| {
        let mixture = "f32".parse().unwrap();
        quantise(source, mixture, None, &output, (&cpu, &Arena::unlimited()), |_, _| ()).unwrap();
    };
    // Their own tokenizers are no byte-level BPE.
    let model = tempfile::tempdir().unwrap();
    for name in ["llama", "llama-bias-tied", "linear", "yarn", "llama3", "qwen3", "longrope", "phi3", "phi4-mini"] {
        let checkpoint = checkpoint(name);
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(checkpoint.folder.join(file), model.path().join(file)).unwrap();
        }
        write(model.path());
        let off = furthest(&logits(&output, &checkpoint.tokens), &logits(model.path(), &checkpoint.tokens));
        assert!(off == 0.0, "{name}: off by {off}");
    }
    let tokenizer = "tests/parsers/corpus/tokenizers/bpe-bytelevel.json";
    let mut json: Value = serde_json::from_str(&std::fs::read_to_string(tokenizer).unwrap()).unwrap();
    json["pre_tokenizer"] = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true });
    (json["normalizer"], json["model"]["unk_token"]) = (Value::Null, Value::Null);
    std::fs::write(model.path().join("tokenizer.json"), json.to_string()).unwrap();
    write(model.path());
    let [file, original] = [output.as_path(), model.path()].map(|model| Text::open(model).unwrap());
    for text in ["the key of the red door", "it's, isn't it?\n\n  Indented", "<s>the"] {
        assert_eq!(file.piece(text).unwrap(), original.piece(text).unwrap(), "{text}");
    }
    // Every token that ends a text, the tokenizer's own first; and a template that lies in a file of its own.
    let config = model.path().join("config.json");
    let mut keys: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    keys["eos_token_id"] = json!([3, 1, 4]);
    std::fs::write(&config, keys.to_string()).unwrap();
    let named = json["model"]["vocab"].as_object().unwrap().iter().find(|(_, id)| **id == 4).unwrap().0;
    let settings = json!({ "eos_token": { "content": named } });
    std::fs::write(model.path().join("tokenizer_config.json"), settings.to_string()).unwrap();
    std::fs::write(model.path().join("chat_template.jinja"), "{{ messages[0].content }}!").unwrap();
    write(model.path());
    assert_eq!(Config::read(&output).unwrap().eos, [4, 3, 1]);
    let said = Message { role: "user".into(), content: "so".into() };
    assert_eq!(ChatTemplate::open(&output).unwrap().render(&[said], false).unwrap(), "so!");
    keys["eos_token_id"] = json!([1, 2, 3, 4]);
    std::fs::write(&config, keys.to_string()).unwrap();
    refused(model.path(), &["--format", "f32", "--output", output.to_str().unwrap()])
        .stderr(contains("ends texts with 4 tokens; a GGUF file has places for 3"));
}

/// A Mistral without windows is what GGUF files call a Llama; one with a window has no place there.
#[test]
fn a_mistral_without_windows_becomes_a_file() {
    let (folder, cpu) = (tempfile::tempdir().unwrap(), Cpu::new(Some(2)).unwrap());
    let (checkpoint, output) = (checkpoint("mistral"), folder.path().join("out.gguf"));
    std::fs::copy(checkpoint.folder.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let mut keys: Value =
        serde_json::from_slice(&std::fs::read(checkpoint.folder.join("config.json")).unwrap()).unwrap();
    keys["sliding_window"] = Value::Null;
    std::fs::write(folder.path().join("config.json"), keys.to_string()).unwrap();
    quantise(folder.path(), "f32".parse().unwrap(), None, &output, (&cpu, &Arena::unlimited()), |_, _| ()).unwrap();
    assert_eq!(logits(&output, &checkpoint.tokens), logits(folder.path(), &checkpoint.tokens));
    keys["sliding_window"] = json!(8);
    std::fs::write(folder.path().join("config.json"), keys.to_string()).unwrap();
    refused(folder.path(), &["--format", "f32", "--output", folder.path().join("no.gguf").to_str().unwrap()])
        .stderr(contains("a MistralForCausalLM has no place in the GGUF files"));
}

/// A tensor that the configuration does not know is refused in every format, and what failed leaves nothing behind.
#[test]
fn tensors_that_are_not_part_of_the_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (source, checkpoint) = (folder.path().join("model"), checkpoint("llama"));
    std::fs::create_dir(&source).unwrap();
    std::fs::copy(checkpoint.folder.join("config.json"), source.join("config.json")).unwrap();
    let bytes = std::fs::read(checkpoint.folder.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let bias = [0.5f32; 32];
    let rows = file.tensor("model.layers.0.self_attn.q_proj.weight").unwrap().shape()[0];
    let extra =
        safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![rows], bytemuck::cast_slice(&bias[..rows]));
    let mut tensors = file.tensors();
    tensors.push(("model.layers.0.self_attn.q_proj.bias".into(), extra.unwrap()));
    safetensors::serialize_to_file(tensors, None, &source.join("model.safetensors")).unwrap();
    for (format, to) in
        [("q8_0", "out.gguf"), ("int8:group=8", "out"), ("nf4:block=32", "out"), ("fp8", "out"), ("w8a8", "out")]
    {
        let to = folder.path().join(to);
        let outcome = refused(&source, &["--format", format, "--output", to.to_str().unwrap()]);
        let said = String::from_utf8_lossy(&outcome.get_output().stderr).to_string();
        // The widths of this checkpoint are no whole blocks of some; what is refused first does not matter.
        assert!(
            said.contains("is not part of") || said.contains("inputs") || said.contains("group"),
            "{format}: {said}"
        );
        assert!(!to.exists(), "{format}");
    }
    refused(&checkpoint.folder, &["--format", "fp8", "--output", folder.path().join("out").to_str().unwrap()])
        .stderr(contains("fp8 needs a multiple of 32"));
    let empty = folder.path().join("w8a8");
    refused(&source, &["--format", "w8a8", "--output", empty.to_str().unwrap()])
        .stderr(contains("q_proj.bias' is not part of"));
}

/// What `quantize` says of a file.
fn refused(source: &Path, more: &[&str]) -> assert_cmd::assert::Assert {
    let mut command = Command::cargo_bin("kvsieve").unwrap();
    command.args(["quantize", "--threads", "2", "--model"]).arg(source).args(more).assert().code(2)
}

#[test]
fn what_cannot_be_written_is_said_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let (source, output) = (folder.path().join("model.gguf"), folder.path().join("out.gguf"));
    let (source_text, output_text) = (source.to_str().unwrap(), output.to_str().unwrap());
    let parts = || Parts::of(&checkpoint("llama").folder, Kind("f16", 1));
    std::fs::write(&source, parts().bytes()).unwrap();
    for (format, to, said) in [
        ("int3", output_text, "format 'int3' names no mixture of types; those that can be written: f32, f16"),
        ("int8", output_text, "int8 is written as a folder, name one"),
        ("nf4", output_text, "nf4 is written as a folder, name one"),
        ("nf4:group=32", output_text, "'nf4' has no parameter 'group'; it has block"),
        ("q9", output_text, "format 'q9' is not known; those that can be written"),
        ("q8_0", "out.bin", "q8_0 is written as a GGUF file, name it .gguf"),
        ("q8_0", source_text, "the same file as --model"),
    ] {
        let outcome = refused(&source, &["--format", format, "--output", to]).stderr(contains(said));
        assert_eq!(String::from_utf8_lossy(&outcome.get_output().stderr).lines().count(), 1);
    }
    for (format, said) in
        [("q8_0", "--imatrix is for GGUF types of six bits or fewer; q8_0 takes none"), ("q4_0", "it ends at byte 3")]
    {
        let imatrix = folder.path().join("imatrix.dat");
        std::fs::write(&imatrix, "cut").unwrap();
        refused(&source, &["--format", format, "--output", output_text, "--imatrix", imatrix.to_str().unwrap()])
            .stderr(contains(said));
    }
    let mut wrong = parts();
    // A NaN in the first row of a matrix.
    let matrix = wrong.tensors.iter_mut().find(|(name, ..)| name.contains("ffn_down")).unwrap();
    matrix.3[..2].copy_from_slice(&[0x00, 0x7e]);
    std::fs::write(&source, wrong.bytes()).unwrap();
    refused(&source, &["--format", "q8_0", "--output", output_text]).stderr(contains("an element that is not finite"));
    // GGUF files have no word for frequencies that change with the length.
    let folder = checkpoint("dynamic").folder;
    refused(&folder, &["--format", "q8_0", "--output", output_text])
        .stderr(contains("no place for all of its configuration"));
    let builtin = Path::new("models/builtin");
    refused(builtin, &["--format", "q8_0", "--output", output_text])
        .stderr(contains("it cuts text in none of the ways"));
    assert!(!output.exists(), "nothing is left behind");
}

#[test]
fn a_folder_of_codes_runs_and_says_how_it_was_made() {
    let folder = tempfile::tempdir().unwrap();
    let [text, to] = ["text.txt", "coded"].map(|name| folder.path().join(name));
    let line = |at: usize| format!("The code of amber falcon is {}. A bear saw the sea. ", at * 7 % 90);
    std::fs::write(&text, (0..200).map(line).collect::<String>()).unwrap();
    let kvsieve = |args: &[&str]| {
        let mut command = Command::cargo_bin("kvsieve").unwrap();
        let output = command.args(args).args(["--threads", "2"]).assert().success();
        String::from_utf8(output.get_output().stdout.clone()).unwrap()
    };
    let (text, to) = (text.to_str().unwrap(), to.to_str().unwrap());
    let format = "gptq:group=64,order=act,symmetric=false";
    let asked =
        ["quantize", "--model", "builtin", "--format", format, "--text", text, "--samples", "4", "--length", "64"];
    let report: Value =
        serde_json::from_str(&kvsieve(&[&asked[..], &["--output", to, "--json", "-"]].concat())).unwrap();
    assert_eq!(
        (&report["text_tokens"], &report["format"]),
        (&json!(256), &json!("gptq:bits=4,damp=0.01,group=64,order=act,symmetric=false"))
    );
    let tensors = report["tensors"].as_array().unwrap();
    let matrices = tensors.iter().filter(|tensor| tensor["format"] == "uint4:group=64");
    for tensor in matrices.clone() {
        // What is made good costs weights more and outputs less.
        assert!(tensor["output_rel_l2"].as_f64() < tensor["rel_l2"].as_f64(), "{tensor}");
    }
    assert_eq!((matrices.count(), tensors.len()), (28, 29));
    let config: Value = serde_json::from_str(&std::fs::read_to_string(format!("{to}/config.json")).unwrap()).unwrap();
    let packing = &config["quantization_config"];
    assert_eq!(
        (&packing["quant_method"], &packing["desc_act"], &packing["group_size"]),
        (&json!("gptq"), &json!(true), &json!(64))
    );
    let table = kvsieve(&["quantize", "--model", to, "--format", "int8:group=32", "--output", &format!("{to}8")]);
    assert!(table.contains("model.layers.*.mlp.down_proj.weight"), "{table}");
    let said = |model: &str| {
        kvsieve(&["generate", "--model", model, "--prompt", "The code of amber", "--max-new-tokens", "4"])
    };
    assert_eq!(said(to), said(&format!("{to}8")), "eight bits of four bits say the same");
}

/// Folders under scales are read back as what was written: once more in the same format they lose nothing, but for nested scales, whose
/// mean is another then. What other programs read in
/// them is compared by `tests/conformance/scaled_folders.py`.
#[test]
fn folders_of_scaled_numbers_run_and_lose_nothing_a_second_time() {
    let folder = tempfile::tempdir().unwrap();
    let kvsieve = |args: &[&str]| {
        let output = Command::cargo_bin("kvsieve").unwrap().args(args).assert().success();
        String::from_utf8(output.get_output().stdout.clone()).unwrap()
    };
    for (format, error, bits, more_at_most) in [
        ("nf4:block=64", 0.07..0.13, 4.5..4.6, 1e-7),
        ("nf4:block=32", 0.06..0.12, 5.0..5.1, 1e-7),
        ("nf4:block=64,nested=true", 0.07..0.13, 4.1..4.8, 0.01),
        ("fp8", 0.02..0.03, 8.0..8.3, 1e-7),
        ("fp8:block=32", 0.02..0.03, 8.03..8.04, 1e-7),
        ("fp8:block=128", 0.02..0.03, 8.001..8.003, 1e-7),
        ("w8a8", 0.004..0.02, 8.0..8.3, 1e-7),
    ] {
        let [to, again] =
            ["to", "again"].map(|name| folder.path().join(format!("{name}-{}", format.replace(':', "-"))));
        let (to, again) = (to.to_str().unwrap(), again.to_str().unwrap());
        let coded = |from: &str, to: &str| -> Vec<Value> {
            let said = kvsieve(&["quantize", "--model", from, "--format", format, "--output", to, "--json", "-"]);
            let report: Value = serde_json::from_str(&said).unwrap();
            let tensors = report["tensors"].as_array().unwrap().clone();
            tensors.into_iter().filter(|tensor| tensor["format"] == format).collect()
        };
        let (first, second) = (coded("builtin", to), coded(to, again));
        assert_eq!((first.len(), second.len()), (28, 28));
        for (first, second) in first.iter().zip(&second) {
            let [lost, more, each] =
                [&first["rel_l2"], &second["rel_l2"], &first["bits_per_weight"]].map(|x| x.as_f64().unwrap());
            assert!(error.contains(&lost) && more < more_at_most && bits.contains(&each), "{first} {second}");
        }
        let asked =
            "The code of amber falcon is 1234567. What is the code of amber falcon? The code of amber falcon is";
        let said = |model| kvsieve(&["generate", "--model", model, "--prompt", asked, "--max-new-tokens", "5"]);
        assert!(said(to).contains("1234567"), "{}", said(to));
        assert_eq!(said(to), said(again));
    }
}

/// The largest number at a place of a layer.
#[derive(Default)]
struct Largest(Mutex<HashMap<(usize, &'static str), f32>>);

impl Hook for Largest {
    fn rows(&self, layer: usize, what: Activation, rows: &[f32]) {
        let parts: &[_] = match what {
            Activation::Hidden => &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            Activation::O => &["self_attn.o_proj"],
            Activation::MlpInput => &["mlp.gate_proj", "mlp.up_proj"],
            Activation::MlpInner => &["mlp.down_proj"],
            _ => &[],
        };
        let most = rows.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for part in parts {
            let mut all = self.0.lock().unwrap();
            let kept = all.entry((layer, *part)).or_default();
            *kept = kept.max(most);
        }
    }
}

#[test]
fn static_scales_are_those_of_the_largest_inputs() {
    let folder = tempfile::tempdir().unwrap();
    let [text, to] = ["text.txt", "coded"].map(|name| folder.path().join(name));
    let source = Path::new("tests/checkpoints/llama");
    let content = "The sea lies between two hills, and a road goes along it to the old town. ".repeat(4);
    std::fs::write(&text, &content).unwrap();
    let tokens = Text::open(source).unwrap().tokens(&content).unwrap();
    let paths = [&text, &to].map(|path| path.to_str().unwrap());
    let length = tokens.len().min(48).to_string();
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    // What is smoothed reads what the written model does, which is rounded; what is not, what the source does.
    for (format, model, bound) in
        [("w8a8:activations=static", source, 1e-5), ("w8a8:activations=static,smoothing=0.5", to.as_path(), 0.05)]
    {
        let format = ["--format", format, "--text", paths[0], "--samples", "1", "--length", &length];
        let run = ["quantize", "--model", "tests/checkpoints/llama", "--output", paths[1]];
        Command::cargo_bin("kvsieve").unwrap().args(run).args(format).assert().success();
        let model = Model::open(model, &arena).unwrap();
        let (largest, read) = (Largest::default(), tokens.len().min(48));
        let mut decoder = Decoder::new(&model, setup(1, 80), &cpu, &arena).unwrap();
        decoder.hook(&largest);
        decoder.prefill(&[&tokens[..read]], |_, _, _| ()).unwrap();
        let bytes = std::fs::read(to.join("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let largest = largest.0.into_inner().unwrap();
        assert_eq!(largest.len(), 14);
        for ((layer, part), most) in largest {
            let scale = file.tensor(&format!("model.layers.{layer}.{part}.input_scale")).unwrap();
            let scale = f32::from_le_bytes(scale.data().try_into().unwrap());
            assert!((127.0 * scale / most - 1.0).abs() < bound, "{layer} {part}: {scale}, and at most {most}");
        }
        std::fs::remove_dir_all(&to).unwrap();
    }
}

#[test]
fn what_is_missing_for_codes_is_said_before_anything_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let [text, to] = ["text.txt", "coded"].map(|name| folder.path().join(name).display().to_string());
    std::fs::write(&text, "A short text.").unwrap();
    let builtin = Path::new("builtin");
    for (more, said) in [
        (&["--format", "gptq"][..], "gptq reads a text; give one with --text FILE"),
        (
            &["--format", "int4", "--text", &text],
            "--text is for gptq, awq, static or smoothed w8a8 and GGUF types of six bits or fewer; int4 reads none",
        ),
        (&["--format", "gptq", "--text", &text], "tokens; --samples 32 of --length 512 need 16384"),
        (&["--format", "gptq", "--text", &text, "--samples", "0"], "both must be at least 1"),
        (&["--format", "int4", "--samples", "8"], "--text <FILE>"),
        (&["--format", "gptq", "--text", "nowhere.txt"], "nowhere.txt"),
        (&["--format", "int4:group=48"], "group is '48'; it must be a multiple of 32"),
        (
            &["--format", "int4:group=96"],
            "has 128 inputs, which groups of 96 do not divide; of these inputs groups of 32, 64, 128 do",
        ),
        (&["--format", "gptq:bits=3"], "bits is '3'; it must be"),
        (&["--format", "gptq:order=size"], "order is 'size'; it must be inputs or act"),
        (&["--format", "nf4:block=96"], "block is '96'; it must be 32, 64, 128 or 256"),
        (&["--format", "nf4:block=256"], "has 128 inputs, which blocks of 256 do not divide; 32, 64, 128 do"),
        (&["--format", "nf4:nested=yes"], "nested is 'yes'; it must be true or false"),
        (&["--format", "fp8:block=96"], "block is '96'; it must be 32, 64, 128 or none"),
        (&["--format", "fp8:group=64"], "'fp8' has no parameter 'group'; it has block"),
        (&["--format", "nf4", "--text", &text], "six bits or fewer; nf4 reads none"),
        (&["--format", "w8a8:activations=static"], "w8a8:activations=static reads a text; give one"),
        (&["--format", "w8a8", "--text", &text], "six bits or fewer; w8a8 reads none"),
        (&["--format", "w8a8:activations=block"], "activations is 'block'; it must be token or static"),
        (&["--format", "w8a8:smoothing=2"], "smoothing is '2'; it must be"),
        (&["--format", "w8a8:smoothing=0.5"], "w8a8:smoothing=0.5 reads a text; give one"),
        (&["--format", "awq:symmetric=true"], "'awq' has no parameter 'symmetric'; it has group"),
    ] {
        let outcome = refused(builtin, &[more, &["--output", &to]].concat()).stderr(contains(said));
        let lines = String::from_utf8_lossy(&outcome.get_output().stderr).lines().count();
        assert!(lines == 1 || said == "--text <FILE>", "{said}: {lines} lines");
    }
    assert!(!Path::new(&to).exists(), "nothing is left behind");
    // A NaN in the last row of a matrix of the built-in model.
    let source = folder.path().join("model");
    std::fs::create_dir(&source).unwrap();
    for name in ["config.json", "tokenizer.json"] {
        std::fs::copy(Path::new("models/builtin").join(name), source.join(name)).unwrap();
    }
    let mut bytes = std::fs::read("models/builtin/model.safetensors").unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..start]).unwrap();
    let end = header["model.layers.2.mlp.down_proj.weight"]["data_offsets"][1].as_u64().unwrap() as usize;
    bytes[start + end - 2..start + end].copy_from_slice(&[0xc0, 0x7f]);
    std::fs::write(source.join("model.safetensors"), bytes).unwrap();
    let said = "'model.layers.2.mlp.down_proj.weight' holds in row 127 an element that is not finite";
    refused(&source, &["--format", "int4:group=64", "--output", &to]).stderr(contains(said));
    let said = "'model.layers.2.mlp.down_proj.weight' holds NaN in row 127";
    let other = format!("{to}-nf4");
    refused(&source, &["--format", "nf4", "--output", &other]).stderr(contains(said));
    // What failed leaves its name to the next run.
    assert!(!Path::new(&to).exists() && !Path::new(&other).exists());
    std::fs::create_dir(&to).unwrap();
    refused(&source, &["--format", "nf4", "--output", &to])
        .stderr(contains("is there already; nf4 is written as a folder of its own"));
}
