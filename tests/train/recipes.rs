//! `kvsieve train` as a user meets it: a tiny recipe from nothing to a model, killed and resumed, and mistakes.

use crate::byte_model;
use crate::gguf::{Kind, Parts, Q8_0};
use assert_cmd::Command;
use kvsieve::device::Cpu;
use kvsieve::memory::Arena;
use kvsieve::model::{ChatTemplate, Config, Decoder, Message, Model, Setup, Text};
use kvsieve::tensor::DType;
use predicates::str::contains;
use safetensors::SafeTensors;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const RECIPE: &str = r#"
name = "tiny"
seed = 3
recompute = "selective"
[model]
hidden = 32
layers = 2
q_heads = 4
kv_heads = 2
head_dim = 8
ffn = 48
max_positions = 256
rope_theta = 10000.0
norm_eps = 1e-5
[optimizer]
learning_rate = 1e-3
warmup_steps = 4
final_share = 0.1
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
eps = 1e-8
clip = 1.0
[data]
text_weight = 0.1
sources = [{ source = "recall:queries=8", share = 1.0 }, { source = "needles", share = 1.0 }, { source = "text", share = 0.5 }]
[[stages]]
length = 96
batch = 4
steps = 6
[[stages]]
length = 192
batch = 2
steps = 6
[evaluation]
every_steps = 6
samples = 4
tasks = ["recall"]
lengths = [96]
log_steps = 1
save_steps = 2
"#;

fn kvsieve() -> Command {
    Command::new(assert_cmd::cargo::cargo_bin!("kvsieve"))
}

fn recipe(folder: &Path) -> PathBuf {
    let path = folder.join("tiny.toml");
    fs::write(&path, RECIPE).unwrap();
    path
}

fn train(recipe: &Path, out: &Path, more: &[&str]) -> assert_cmd::assert::Assert {
    kvsieve().arg("train").arg(recipe).arg("--out").arg(out).args(more).assert()
}

/// The log without what depends on the clock.
fn log(out: &Path) -> Vec<String> {
    let text = fs::read_to_string(out.join("training.jsonl")).unwrap();
    let line = |line: &str| {
        let mut line: serde_json::Map<String, serde_json::Value> = serde_json::from_str(line).unwrap();
        for key in ["seconds", "tokens_per_second", "gflop_per_second"] {
            line.remove(key);
        }
        serde_json::to_string(&line).unwrap()
    };
    text.lines().map(line).collect()
}

#[test]
fn a_run_that_stops_or_is_killed_goes_on_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path());
    let [whole, stopped, killed] = ["whole", "stopped", "killed"].map(|name| folder.path().join(name));
    train(&recipe, &whole, &["--threads", "2"]).success().stdout(contains("recall"));
    train(&recipe, &stopped, &["--threads", "1", "--steps", "5"]).success();
    train(&recipe, &stopped, &["--threads", "2", "--resume"]).success();

    let mut child = Killed(
        std::process::Command::new(assert_cmd::cargo::cargo_bin!("kvsieve"))
            .arg("train")
            .arg(&recipe)
            .arg("--out")
            .arg(&killed)
            .stdout(Stdio::null())
            .spawn()
            .unwrap(),
    );
    let (checkpoint, began) = (killed.join("checkpoint.safetensors"), Instant::now());
    while !checkpoint.exists() && began.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(1));
    }
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    train(&recipe, &killed, &["--resume"]).success();

    for other in [&stopped, &killed] {
        for name in ["model.safetensors", "config.json", "tokenizer.json"] {
            let same = fs::read(whole.join(name)).unwrap() == fs::read(other.join(name)).unwrap();
            assert!(same, "{name} of {} differs", other.display());
        }
        // A run that stops is evaluated where it stops; all else is the same.
        let common = |line: &String| !(line.contains("evaluation") && line.contains("\"step\":5"));
        let found: Vec<String> = log(other).into_iter().filter(common).collect();
        assert_eq!(log(&whole), found);
    }
    for name in ["loss.svg", "accuracy-96.svg", "training.json", "generation_config.json", "tokenizer_config.json"] {
        assert!(whole.join(name).exists(), "{name} is missing");
    }
    let record: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(whole.join("training.json")).unwrap()).unwrap();
    for memory in record["memory"].as_array().unwrap() {
        assert_eq!(memory["predicted_bytes"], memory["peak_bytes"]);
    }
}

/// The checkpoint of the last step says that there is nothing more to do: it is written behind all else.
#[test]
fn a_run_that_ends_before_its_record_is_written_is_gone_on_with() {
    let folder = tempfile::tempdir().unwrap();
    let (path, out) = (folder.path().join("six.toml"), folder.path().join("out"));
    fs::write(&path, RECIPE.replace("samples = 4", "samples = 6")).unwrap();
    // A folder in the record's place.
    let record = out.join("training.json");
    fs::create_dir_all(&record).unwrap();
    train(&path, &out, &[]).code(1);
    fs::remove_dir(&record).unwrap();
    train(&path, &out, &["--resume"]).success();
    let record: serde_json::Value = serde_json::from_str(&fs::read_to_string(&record).unwrap()).unwrap();
    assert_eq!((&record["steps"], &record["accuracy"][0]["samples"]), (&12.into(), &6.into()));
}

/// The recipe with another `[model]`, and more before it.
fn recipe_of(before: &str, model: &str) -> String {
    let (head, rest) = RECIPE.split_once("[model]").unwrap();
    let (_, rest) = rest.split_once("[optimizer]").unwrap();
    format!("{head}{before}\n[model]\n{model}\n[optimizer]{rest}")
}

#[test]
fn a_model_that_is_there_goes_on_to_be_trained_but_for_what_is_frozen() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, out, builtin) =
        (folder.path().join("tuned.toml"), folder.path().join("out"), Path::new("models/builtin"));
    fs::write(&recipe, recipe_of("frozen = ['embed', 'layers.*.mlp']", "from = 'builtin'")).unwrap();
    train(&recipe, &out, &["--steps", "2"]).success();
    train(&recipe, &out, &["--resume"]).success();
    let first: serde_json::Value = serde_json::from_str(&log(&out)[0]).unwrap();
    let loss = first["loss"].as_f64().unwrap();
    assert!(loss < 2.0, "a trained model begins with a loss of {loss}");
    for name in ["config.json", "tokenizer.json"] {
        assert!(fs::read(builtin.join(name)).unwrap() == fs::read(out.join(name)).unwrap(), "{name} differs");
    }
    let [before, after] = [builtin, &out].map(|folder| fs::read(folder.join("model.safetensors")).unwrap());
    let [before, after] = [&before, &after].map(|bytes| SafeTensors::deserialize(bytes).unwrap());
    for (name, tensor) in before.tensors() {
        let same = tensor == after.tensor(&name).unwrap();
        assert_eq!(same, name.contains("embed") || name.contains("mlp"), "{name}");
    }
    let record: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(out.join("training.json")).unwrap()).unwrap();
    for memory in record["memory"].as_array().unwrap() {
        assert_eq!(memory["predicted_bytes"], memory["peak_bytes"]);
    }
}

/// Logits of all tokens.
fn logits(model: &Path, tokens: &[u32]) -> Vec<f32> {
    let (cpu, arena) = (Cpu::new(Some(2)).unwrap(), Arena::unlimited());
    let model = Model::open(model, &arena).unwrap();
    let setup = Setup { all_logits: true, ..Setup::of(tokens.len(), DType::F32) };
    let mut logits = Vec::new();
    let mut decoder = Decoder::new(&model, setup, &cpu, &arena).unwrap();
    decoder.prefill(&[tokens], |_, _, row| logits.extend_from_slice(row)).unwrap();
    logits
}

/// A GGUF file of a model of bytes, with a tokenizer and a chat template. Norms are such that bf16 holds them.
fn gguf_file(folder: &Path, kind: Kind) -> PathBuf {
    let source = folder.join(kind.0);
    byte_model::write(&source, 512);
    let read = |name: &str| -> serde_json::Value {
        serde_json::from_str(&fs::read_to_string(source.join(name)).unwrap()).unwrap()
    };
    let mut tokens: Vec<(String, u64)> = read("tokenizer.json")["model"]["vocab"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(token, id)| (token.clone(), id.as_u64().unwrap()))
        .collect();
    tokens.sort_by_key(|(_, id)| *id);
    let kinds: Vec<u64> = tokens.iter().map(|(_, id)| if *id < 2 { 3 } else { 1 }).collect();
    let tokens: Vec<&str> = tokens.iter().map(|(token, _)| token.as_str()).collect();
    let mut parts = Parts::of(&source, kind);
    for (_, extents, _, bytes) in &mut parts.tensors {
        if extents.len() == 1 {
            bytes.chunks_exact_mut(4).for_each(|number| number[..2].fill(0));
        }
    }
    let own: [(&str, serde_json::Value); 9] = [
        ("ggml.model", "gpt2".into()),
        ("ggml.pre", "gpt-2".into()),
        ("ggml.tokens", tokens.into()),
        ("ggml.token_type", kinds.into()),
        ("ggml.merges", serde_json::json!([])),
        ("ggml.bos_token_id", 0.into()),
        ("ggml.add_bos_token", true.into()),
        ("ggml.eot_token_id", 2.into()),
        ("chat_template", "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}".into()),
    ];
    parts.keys.extend(own.map(|(key, value)| (format!("tokenizer.{key}"), value)));
    parts.keys.push(("tokenizer.ggml.eos_token_id".into(), 1.into()));
    let path = folder.join(format!("{}.gguf", kind.0));
    fs::write(&path, parts.bytes()).unwrap();
    path
}

/// Whether all weights of a folder are bf16.
fn all_are_bf16(folder: &Path) -> bool {
    let bytes = fs::read(folder.join("model.safetensors")).unwrap();
    let weights = SafeTensors::deserialize(&bytes).unwrap();
    weights.tensors().iter().all(|(_, tensor)| tensor.dtype() == safetensors::Dtype::BF16)
}

#[test]
fn a_gguf_file_is_gone_on_with_and_becomes_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let bf16 = Kind("bf16", 30);
    let (file, recipe, out) =
        (gguf_file(folder.path(), bf16), folder.path().join("tuned.toml"), folder.path().join("out"));
    // Weights that move by less than they are rounded: what comes out is what went in.
    let text =
        recipe_of("", &format!("from = '{}'", file.display())).replace("learning_rate = 1e-3", "learning_rate = 1e-9");
    fs::write(&recipe, &text).unwrap();
    train(&recipe, &out, &["--steps", "2"]).success();
    train(&recipe, &out, &["--resume", "--steps", "3"]).success();

    let read = |model: &Path| Config::read(model).unwrap();
    assert_eq!(read(&out), Config { dtype: DType::Bf16, ..read(&file) });
    let tokens = Text::open(&file).unwrap().tokens("The key of the red door is 4711, naïve\n").unwrap();
    let text = Text::open(&out).unwrap();
    assert_eq!(text.tokens("The key of the red door is 4711, naïve\n").unwrap(), tokens);
    assert_eq!(tokens[0], 0, "a text begins with its first token");
    assert_eq!(logits(&out, &tokens), logits(&file, &tokens));
    let words = [Message { role: "user".into(), content: "x".into() }];
    assert_eq!(ChatTemplate::open(&out).unwrap().render(&words, true).unwrap(), "<s>x</s>");
    assert!(all_are_bf16(&out));
    let json = |name: &str| -> serde_json::Value {
        serde_json::from_str(&fs::read_to_string(out.join(name)).unwrap()).unwrap()
    };
    let (config, tokenizer) = (json("config.json"), json("tokenizer_config.json"));
    assert_eq!((&config["model_type"], &config["pad_token_id"]), (&"llama".into(), &serde_json::Value::Null));
    assert_eq!((&tokenizer["bos_token"], &tokenizer["eos_token"]), (&"<s>".into(), &"</s>".into()));

    // Blocks are widened, and at a rate that is worth it they learn.
    let file = gguf_file(folder.path(), Q8_0);
    fs::write(&recipe, recipe_of("", &format!("from = '{}'", file.display()))).unwrap();
    let learnt = folder.path().join("learnt");
    train(&recipe, &learnt, &[]).success();
    let loss = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64();
    let losses: Vec<f64> = log(&learnt).iter().filter_map(|line| loss(line)).collect();
    assert!(losses[losses.len() - 1] < losses[0], "{losses:?}");

    // Fine-tuned whole, too, what comes out is a folder whose weights are what its configuration says.
    let (text, tuned) = (folder.path().join("text.txt"), folder.path().join("fine"));
    fs::write(&text, "The key of the red door is 4711. ".repeat(100)).unwrap();
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("kvsieve"));
    command.args(["train", "--method", "full", "--length", "32", "--steps", "2", "--model"]).arg(&file);
    command.arg("--text").arg(&text).arg("--out").arg(&tuned).assert().success();
    assert_eq!(read(&tuned), Config { dtype: DType::Bf16, ..read(&file) });
    assert!(all_are_bf16(&tuned));
    assert_ne!(logits(&tuned, &tokens), logits(&file, &tokens));
}

/// A process that does not outlive its test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A text of one's own: its vocabulary, its sequences, and what is held out of it, with the same bits where the run is resumed.
#[test]
fn a_recipe_with_a_text_learns_its_tokens_and_is_resumed_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.txt");
    let sentence =
        |at: usize| format!("Page {at} holds the keys of layer {} and {} values.\n\n", at % 7, at * 13 % 101);
    fs::write(&text, (0..2000).map(sentence).collect::<String>()).unwrap();
    let path = folder.path().join("text.toml");
    let sources = r#"[{ source = "text", share = 2.0 }, { source = "quotes", share = 1.0 }, { source = "needles", share = 1.0 }]"#;
    let recipe = RECIPE
        .replace("norm_eps = 1e-5", "norm_eps = 1e-5\nvocabulary = 290\nlook_back = false")
        .replace("text_weight = 0.1", &format!("text_weight = 0.5\ntext = '{}'", text.display()))
        .replace("samples = 4", "samples = 16");
    let at = recipe.find("sources = ").unwrap();
    let end = at + recipe[at..].find('\n').unwrap();
    fs::write(&path, format!("{}sources = {sources}{}", &recipe[..at], &recipe[end..])).unwrap();

    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    train(&path, &whole, &[]).success();
    train(&path, &parts, &["--steps", "5"]).success();
    train(&path, &parts, &["--resume", "--threads", "1"]).success();
    for file in ["model.safetensors", "tokenizer.json"] {
        assert_eq!(fs::read(whole.join(file)).unwrap(), fs::read(parts.join(file)).unwrap(), "{file}");
    }
    assert_eq!(Config::read(&whole).unwrap().vocab, 290);
    let read = Text::open(&whole).unwrap();
    assert_eq!(read.piece(" layer").unwrap().len(), 1);
    let held_out = |folder: &Path| -> Vec<f64> {
        let log = fs::read_to_string(folder.join("training.jsonl")).unwrap();
        let lines = log.lines().filter(|line| line.contains("held_out"));
        lines.map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64().unwrap()).collect()
    };
    // Ranks judge their shares, and add them up.
    let ranks = folder.path().join("ranks");
    train(&path, &ranks, &["--ranks", "2"]).success();
    let (one, two) = (held_out(&whole), held_out(&ranks));
    assert!(one.len() == 2 && two.len() == 2, "one behind each stage: {one:?} {two:?}");
    assert!(one.iter().zip(&two).all(|(one, two)| (one / two - 1.0).abs() < 1e-4), "{one:?} {two:?}");
}

#[test]
fn mistakes_are_one_line_and_exit_status_2() {
    let folder = tempfile::tempdir().unwrap();
    let good = recipe(folder.path());
    let out = folder.path().join("out");
    train(&good, &out, &["--resume"]).code(2).stderr(contains("leave --resume out"));
    train(&good, &out, &["--steps", "1"]).success();
    train(&good, &out, &[]).code(2).stderr(contains("holds a run already"));
    let other = folder.path().join("other.toml");
    fs::write(&other, RECIPE.replace("seed = 3", "seed = 4")).unwrap();
    train(&other, &out, &["--resume"]).code(2).stderr(contains("another recipe"));
    let cases = [
        ("kv_heads = 2", "kv_heads = 3", "q_heads is 4; it must be a multiple of kv_heads, 3"),
        ("length = 192", "length = 999", "a stage's length is 999"),
        ("\"needles\"", "\"needle\"", "unknown task 'needle'"),
        ("\"needles\"", "\"cwe\"", "too few for the task 'cwe'"),
        ("seed = 3", "seed = 3\nsede = 4", "unknown field"),
        ("clip = 1.0", "clip = 0.0", "optimizer.clip is 0; it must be finite and above 0"),
        ("\"needles\"", "\"quotes\"", "the source 'quotes' needs data.text, the file of a text"),
        (
            "norm_eps = 1e-5",
            "norm_eps = 1e-5\nvocabulary = 300",
            "model.vocabulary needs data.text, the file of a text",
        ),
        ("norm_eps = 1e-5", "norm_eps = 1e-5\nvocabulary = 200", "model.vocabulary is 200; it must be 258 to 65536"),
        ("warmup_steps = 4", "warmup_steps = 12", "optimizer.warmup_steps is 12; it must be below the 12 steps"),
        ("log_steps = 1", "log_steps = 3", "evaluation.save_steps is 2; it must be a multiple of log_steps, 3"),
        (
            "text_weight = 0.1\nsources = [{ source = \"recall:queries=8\", share = 1.0 }, { source = \"needles\", share = 1.0 }, { source",
            "text_weight = 0.0\nsources = [{ source",
            "no source but 'text': nothing would be learned",
        ),
        ("tasks = [\"recall\"]", "tasks = [\"recal\"]", "unknown task 'recal'"),
        ("tasks = [\"recall\"]", "tasks = [\"cwe\"]", "too few for the task 'cwe'"),
        ("lengths = [96]", "lengths = [96, 0]", "evaluation: a length is 0; it must be at least 16"),
        ("text_weight = 0.1", "text_weight = 0.1\ntext = 'nowhere.txt'", "cannot read the text 'nowhere.txt'"),
        ("text_weight = 0.1", "text_weight = 0.1\ntext = 'models/builtin/recipe.toml'", "at least 3860 are needed"),
    ];
    let of_a_folder = [
        ("", "from = 'nowhere'", "nowhere"),
        ("", "from = 'builtin'\nhidden = 8", "unknown field `hidden`"),
        ("", "from = 'tests/checkpoints/gemma2'", "text needs a tokenizer"),
        (
            "",
            "from = 'tests/checkpoints/llama'",
            "a stage's length is 192; it must be 16 to the model's longest context, 128",
        ),
        ("frozen = ['embd']", "from = 'builtin'", "'embd' matches no parameter"),
        ("frozen = ['weight']", "from = 'builtin'", "matches every parameter"),
    ];
    let cases = cases.map(|(from, to, said)| (RECIPE.replace(from, to), said)).into_iter();
    let cases = cases.chain(of_a_folder.map(|(before, model, said)| (recipe_of(before, model), said)));
    for (index, (recipe, said)) in cases.enumerate() {
        fs::write(&other, recipe).unwrap();
        let out = folder.path().join(format!("out{index}"));
        let assert = train(&other, &out, &[]).code(2).stderr(contains(said));
        assert_eq!(String::from_utf8_lossy(&assert.get_output().stderr).lines().count(), 1);
    }
    let own = folder.path().join("own");
    fs::create_dir(&own).unwrap();
    for name in ["config.json", "tokenizer.json"] {
        fs::copy(Path::new("models/builtin").join(name), own.join(name)).unwrap();
    }
    fs::write(&other, recipe_of("", &format!("from = '{}'", own.display()))).unwrap();
    train(&other, &own, &[]).code(2).stderr(contains("the folder that the model comes from"));
}

/// Stages that differ in their batches alone each have their memory in the record, and no line of the log is over two of them.
#[test]
fn each_stage_has_its_memory_and_its_lines() {
    let folder = tempfile::tempdir().unwrap();
    let (path, out) = (folder.path().join("recipe.toml"), folder.path().join("out"));
    let recipe =
        RECIPE.replace("length = 192\nbatch = 2", "length = 96\nbatch = 8").replace("log_steps = 1", "log_steps = 4");
    fs::write(&path, recipe.replace("save_steps = 2", "save_steps = 12")).unwrap();
    train(&path, &out, &[]).success();
    let record: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(out.join("training.json")).unwrap()).unwrap();
    let batches: Vec<u64> =
        record["memory"].as_array().unwrap().iter().map(|of| of["sequences"].as_u64().unwrap()).collect();
    assert_eq!(batches, [4, 8]);
    let text = fs::read_to_string(out.join("training.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let steps: Vec<u64> =
        lines.filter(|line| line.get("gradient_norm").is_some()).map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [4, 6, 8, 12]);
}
