//! Parsers under inputs that are almost right. Whatever a file holds, reading it ends with a value or with an error: never
//! with a panic, and never with a message of nothing.
//!
//! Each parser has a corpus (`tests/parsers/corpus/`, or files that are in the repository anyway) and a test that draws
//! changed inputs from it (`mutate.rs`), the same ones every time. With `KVSIEVE_FUZZ_SECONDS=N` each test goes on with
//! new ones for N seconds; `KVSIEVE_FUZZ_SEED` begins elsewhere. An input that a reader panics on is kept and named;
//! once the reader is mended it belongs in the corpus.

#[path = "../common/gguf.rs"]
mod gguf;
mod mutate;
#[path = "../common/packed.rs"]
#[allow(dead_code)] // the same models in f32
mod packed;

use kvsieve::device::Cpu;
use kvsieve::experiment::{Device, Experiment, Spec, runner, store};
use kvsieve::memory::{Arena, Label};
use kvsieve::model::{Config, Importance, Model, Text, quantise, sequences};
use kvsieve::planner::Subject;
use kvsieve::planner::allocator::{Event, replay};
use kvsieve::policy::{Budget, Registry};
use kvsieve::report::{self, Detail, Run};
use kvsieve::tensor::file::TensorFile;
use kvsieve::train::recipe::Recipe;
use kvsieve::workload::{Extents, FileSource};
use mutate::mutated;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Everything that went wrong, in words.
type Said = Result<(), String>;

/// A parser and what it is tried with.
struct Target<'a> {
    name: &'a str,
    corpus: Vec<Vec<u8>>,
    /// Texts that mean something to it.
    words: &'a [&'a str],
    /// How many inputs a plain run tries.
    inputs: usize,
    /// Whether every input of the corpus is right as it stands.
    all_right: bool,
}

impl Target<'_> {
    /// Tries the corpus and inputs made from it. `read` finds the input in the file that it is given.
    fn run(&self, read: impl Fn(&Path) -> Said) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("input");
        let tried = |input: &[u8]| -> Said {
            fs::write(&path, input).unwrap();
            let result = catch_unwind(AssertUnwindSafe(|| read(&path))).unwrap_or_else(|_| {
                let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-panics", self.name));
                fs::write(&kept, input).unwrap();
                panic!("{} panics; its input is kept in {}", self.name, kept.display());
            });
            assert!(result.as_ref().err().is_none_or(|error| !error.trim().is_empty()), "an error without words");
            result
        };
        for (index, input) in self.corpus.iter().enumerate() {
            let result = tried(input);
            assert!(result.is_ok() || !self.all_right, "input {index} of the corpus: {}", result.unwrap_err());
        }
        let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
        let mut rng = ChaCha8Rng::seed_from_u64(number("KVSIEVE_FUZZ_SEED").unwrap_or(0));
        let (start, wanted) = (Instant::now(), number("KVSIEVE_FUZZ_SECONDS").map(Duration::from_secs));
        let (mut inputs, mut right) = (0, 0);
        while wanted.map_or(inputs < self.inputs, |wanted| start.elapsed() < wanted) {
            right += usize::from(tried(&mutated(&mut rng, &self.corpus, self.words)).is_ok());
            inputs += 1;
        }
        // Inputs that are all wrong, or all right, would show little.
        assert!(right > 0 && right < inputs, "{right} of {inputs} inputs were right");
        println!("{}: {inputs} inputs, {right} of them right", self.name);
    }
}

/// The files of a folder of the corpus, in the order of their names.
fn corpus(folder: &str) -> Vec<Vec<u8>> {
    let folder = Path::new("tests/parsers/corpus").join(folder);
    let mut paths: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| fs::read(path).unwrap()).collect()
}

fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}

#[test]
fn tensor_files() {
    let target = Target {
        name: "tensor_files",
        corpus: corpus("safetensors"),
        words: &["q", "k", "v", "F32", "F64", "BF16", "rope_theta", "none", "__metadata__", "data_offsets"],
        inputs: 3000,
        all_right: true,
    };
    target.run(|path| {
        let arena = Arena::with_limit(1 << 20);
        let file = TensorFile::open(path).map_err(said)?;
        for name in file.names().map_err(said)? {
            let _ = file.describe(&name);
            let _ = file.load(&name, &arena, Label::Input);
        }
        let source = FileSource::open(path).map_err(said)?;
        let (batch, q_heads, kv_heads, tokens, head_dim, dtype) = source.extents();
        let (layers, new_tokens) = (1, 1);
        let context_tokens = tokens.saturating_sub(new_tokens);
        let extents = Extents { layers, batch, q_heads, kv_heads, head_dim, context_tokens, new_tokens, dtype };
        source.load(&extents, &arena).map(drop).map_err(said)?;
        source.hash().map(drop).map_err(said)
    });
}

#[test]
fn gguf_files() {
    let parts = |name: &str, kind| gguf::Parts::of(&Path::new("tests/checkpoints").join(name), kind);
    let mut with_text = parts("llama3", gguf::F32);
    let fixture: serde_json::Value =
        serde_json::from_slice(&fs::read("tests/fixtures/sentencepiece.json").unwrap()).unwrap();
    let lists = [("tokens", "tokens"), ("scores", "scores"), ("token_type", "kinds")];
    with_text.keys.push(("tokenizer.ggml.model".into(), "llama".into()));
    with_text.keys.extend(lists.map(|(key, name)| (format!("tokenizer.ggml.{key}"), fixture[name].clone())));
    let target = Target {
        name: "gguf_files",
        corpus: [parts("llama", gguf::F32), parts("qwen2", gguf::Q8_0), with_text].map(|parts| parts.bytes()).into(),
        words: &[
            "GGUF",
            "llama.",
            "gemma2",
            "general.architecture",
            "general.alignment",
            "blk.0.attn_q.weight",
            "rope_freqs.weight",
            "tokenizer.ggml.scores",
            "gpt2",
            "yarn",
        ],
        inputs: 600,
        all_right: true,
    };
    target.run(|path| {
        let _ = Text::open(path);
        Model::open(path, &Arena::with_limit(64 << 20)).map(drop).map_err(said)
    });
}

/// Importance matrices of both kinds, by which a model is quantised.
#[test]
fn importance_matrices() {
    let (folder, cpu) = (tempfile::tempdir().unwrap(), Cpu::new(Some(1)).unwrap());
    let (llama, model) = (Path::new("tests/checkpoints/llama"), folder.path().join("model"));
    fs::create_dir(&model).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(llama.join(name), model.join(name)).unwrap();
    }
    let mut container = gguf::Parts::of(llama, gguf::F32);
    let matrices: Vec<_> = std::mem::take(&mut container.tensors).into_iter().filter(|one| one.1.len() == 2).collect();
    container.keys = vec![("general.type".into(), "imatrix".into()), ("imatrix.chunk_count".into(), 3.into())];
    let mut list = (matrices.len() as u32).to_le_bytes().to_vec();
    for (name, extents, ..) in matrices {
        let sums: Vec<u8> = (0..extents[0]).flat_map(|at| (1.0 + at as f32).to_le_bytes()).collect();
        list.extend((name.len() as u32).to_le_bytes());
        list.extend(name.as_bytes());
        list.extend([3u32, extents[0] as u32].into_iter().flat_map(u32::to_le_bytes));
        list.extend(&sums);
        container.tensors.push((format!("{name}.in_sum2"), vec![extents[0], 1], 0, sums));
        container.tensors.push((format!("{name}.counts"), vec![1, 1], 0, 64.0f32.to_le_bytes().to_vec()));
    }
    let target = Target {
        name: "importance_matrices",
        corpus: vec![container.bytes(), list],
        words: &["GGUF", ".in_sum2", ".counts", "blk.0.attn_q.weight", "token_embd.weight", "general.alignment"],
        inputs: 600,
        all_right: true,
    };
    let (mixture, to) = ("q4_0".parse().unwrap(), folder.path().join("out.gguf"));
    target.run(|path| {
        let arena = Arena::with_limit(64 << 20);
        let done = quantise(&model, mixture, Some(Importance::File(path)), &to, (&cpu, &arena), |_, _| ());
        done.map(drop).map_err(said)
    });
}

/// Tensors of every packed layout, under configurations that are right.
#[test]
fn packed_folders() {
    let folder = tempfile::tempdir().unwrap();
    let layouts = packed::layouts();
    let made = |config: &serde_json::Value| {
        packed::write(folder.path(), config);
        fs::read(folder.path().join("model.safetensors")).unwrap()
    };
    let corpus: Vec<Vec<u8>> = layouts.iter().map(|(.., config)| made(config)).collect();
    let target = Target {
        name: "packed_folders",
        corpus,
        words: &[
            "qweight",
            "g_idx",
            ".scales",
            "I32",
            "F8_E4M3",
            "[4,128]",
            "blocksize",
            "absmax",
            "nested_absmax",
            "shape",
        ],
        inputs: 300,
        all_right: true,
    };
    // An input is read by the layout that its names are of; one without them by all.
    let method = |bytes: &[u8], (.., config): &(&str, &str, serde_json::Value)| {
        let has = |text: &str| bytes.windows(text.len()).any(|part| part == text.as_bytes());
        match config["quant_method"].as_str().unwrap() {
            "gptq" => has("g_idx"),
            "awq" => has("qweight") && !has("g_idx"),
            "bitsandbytes" => has(if config["load_in_4bit"] == serde_json::json!(true) { "absmax" } else { "SCB" }),
            "fp8" => has("weight_scale_inv"),
            _ => has("weight_scale") && !has("weight_scale_inv"),
        }
    };
    target.run(|path| {
        let bytes = fs::read(path).unwrap();
        fs::copy(path, folder.path().join("model.safetensors")).unwrap();
        let mut said = Err("no layout has such tensors".to_string());
        for layout in layouts.iter().filter(|layout| method(&bytes, layout)) {
            fs::write(folder.path().join("config.json"), packed::config(&layout.2).to_string()).unwrap();
            let found = Model::open(folder.path(), &Arena::with_limit(64 << 20)).map(drop).map_err(crate::said);
            said = if said.is_ok() { said } else { found };
        }
        said
    });
}

/// Configurations of packed folders, over tensors that are right for some of them.
#[test]
fn packed_configurations() {
    let folder = tempfile::tempdir().unwrap();
    let layouts: Vec<_> =
        packed::layouts().into_iter().filter(|(name, ..)| ["gptq-ordered", "awq", "fp8"].contains(name)).collect();
    for (name, _, config) in &layouts {
        packed::write(&folder.path().join(name), config);
    }
    let target = Target {
        name: "packed_configurations",
        corpus: layouts.iter().map(|(.., config)| packed::config(config).to_string().into_bytes()).collect(),
        words: &["gptq", "gptq_v2", "awq", "fp8", "-1", "32", "desc_act", "weight_block_size", "config_groups", "nf4"],
        inputs: 150,
        all_right: true,
    };
    target.run(|path| {
        let tried = layouts.iter().map(|(name, ..)| {
            let folder = folder.path().join(name);
            fs::copy(path, folder.join("config.json")).unwrap();
            Model::open(&folder, &Arena::with_limit(64 << 20)).map(drop).map_err(said)
        });
        let tried: Vec<Said> = tried.collect();
        tried.iter().find(|said| said.is_ok()).unwrap_or(&tried[0]).clone()
    });
}

/// The planner reads more architectures and types of tensors than can be run, and multiplies what it reads.
#[test]
fn planned_models() {
    let mut corpus: Vec<Vec<u8>> = ["models/builtin", "tests/checkpoints/gemma2", "tests/checkpoints/qwen3"]
        .map(|folder| fs::read(Path::new(folder).join("config.json")).unwrap())
        .into();
    let deepseek = r#"{"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280,
        "max_position_embeddings": 163840, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "first_k_dense_replace": 3}"#;
    corpus.push(deepseek.into());
    corpus.push(gguf::Parts::of(Path::new("tests/checkpoints/llama"), gguf::Q8_0).bytes());
    let words = &[
        "Qwen3NextForCausalLM",
        "GptOssForCausalLM",
        "268435456",
        "sliding_window",
        "num_experts",
        "null",
        "GGUF",
        "llama.",
    ];
    let target = Target { name: "planned_models", corpus, words, inputs: 2000, all_right: true };
    target.run(|path| {
        let is_gguf = fs::read(path).unwrap().starts_with(b"GGUF");
        let named = path.with_extension(if is_gguf { "gguf" } else { "json" });
        fs::copy(path, &named).unwrap();
        Subject::find(&named).map(drop).map_err(said)
    });
}

/// A trace of allocations.
#[test]
fn traces() {
    let trace = r#"[{"at_ns":1,"label":"kv","delta_bytes":3145728},{"label":"scores","delta_bytes":700},
        {"label":"kv","delta_bytes":-3145728},{"label":"kv","delta_bytes":20971520}]"#;
    let words = &["-3145728", "9223372036854775807", "281474976710656", "kv"];
    let target = Target { name: "traces", corpus: vec![trace.into()], words, inputs: 2000, all_right: true };
    target.run(|path| {
        let events: Vec<Event> = serde_json::from_slice(&fs::read(path).unwrap()).map_err(said)?;
        replay(&events).map(drop).map_err(said)
    });
}

#[test]
fn model_configurations() {
    let published = fs::read("tests/fixtures/published_configs.json").unwrap();
    let published: Vec<serde_json::Value> = serde_json::from_slice(&published).unwrap();
    let target = Target {
        name: "model_configurations",
        corpus: published.iter().map(|published| published["config"].to_string().into_bytes()).collect(),
        words: &[
            "rope_scaling",
            "rope_parameters",
            "rope_type",
            "yarn",
            "llama3",
            "dynamic",
            "factor",
            "layer_types",
            "sliding_attention",
            "sliding_window",
            "max_window_layers",
            "original_max_position_embeddings",
            "Gemma2ForCausalLM",
            "Phi3ForCausalLM",
            "null",
        ],
        inputs: 3000,
        all_right: false,
    };
    target.run(|path| {
        let folder = path.parent().unwrap();
        fs::copy(path, folder.join("config.json")).unwrap();
        fs::copy(path, folder.join("generation_config.json")).unwrap();
        let config = Config::read(folder).map_err(said)?;
        let _ = (config.most_tokens(), config.q_width(), config.kv_width());
        Ok(())
    });
}

#[test]
fn tokenizers() {
    let target = Target {
        name: "tokenizers",
        corpus: corpus("tokenizers"),
        words: &[
            "type",
            "Split",
            "Replace",
            "Regex",
            "ByteLevel",
            "Metaspace",
            "Sequence",
            "BPE",
            "Unigram",
            "WordPiece",
            "TemplateProcessing",
            "(?=a)b",
            "[",
            "(?<x",
            "\\p{",
            "$A:0",
            "unk_token",
            "byte_fallback",
        ],
        inputs: 2000,
        all_right: true,
    };
    target.run(|path| {
        let folder = path.parent().unwrap();
        fs::copy(path, folder.join("tokenizer.json")).unwrap();
        let text = Text::open(folder).map_err(said)?;
        for words in ["", "a", "ab hello wörld 123\n\u{1F600}", "<s>"] {
            let tokens = text.tokens(words);
            let _ = text.piece(words);
            let _ = text.text(&tokens.unwrap_or_default());
        }
        let _ = text.beginning();
        text.text(&[0, 1, 2, 3, 1000, u32::MAX]).map(drop).map_err(said)
    });
}

#[test]
fn experiments() {
    let mut corpus = corpus("experiments");
    let shipped = fs::read_dir("experiments").unwrap().map(|entry| entry.unwrap().path());
    let mut shipped: Vec<PathBuf> = shipped.filter(|path| path.extension().is_some_and(|end| end == "toml")).collect();
    shipped.sort();
    corpus.extend(shipped.into_iter().map(|path| fs::read(path).unwrap()));
    let target = Target {
        name: "experiments",
        corpus,
        words: &[
            "[[grid]]\n",
            "measure = \"evict\"\n",
            "measure = \"serve\"\n",
            "\"1k..32k*2\"",
            "\"1..4*1\"",
            "\"8/2\"",
            "\"64MiB\"",
            "[]",
            "= ",
            "\"",
            "inf",
            "nan",
            "0.5",
            "\"snapkv+ada\"",
        ],
        inputs: 400,
        all_right: false,
    };
    let (cpu, registry) = (Cpu::new(Some(1)).unwrap(), Registry::default());
    target.run(|path| {
        let text = fs::read_to_string(path).map_err(said)?;
        let _ = Recipe::parse(&text, path).map(|recipe| recipe.steps());
        let spec = Spec::parse(&text, "input").map_err(said)?;
        let experiment = Experiment::new(spec, "input", &registry, Device::Cpu).map_err(said)?;
        let prepared = runner::prepare(&experiment, &registry, &cpu).map_err(said)?;
        for cell in &prepared {
            let _ = (cell.work(), cell.extents());
        }
        Ok(())
    });
}

#[test]
fn policies_and_budgets() {
    let text = fs::read_to_string("tests/parsers/corpus/policies.txt").unwrap();
    let registry = Registry::default();
    let names = registry.entries().iter().map(|entry| entry.name).chain(registry.parts().iter().map(|part| part.name));
    let words: Vec<&str> = names.chain(["+", ":", "=", ",", ";", "@", " ", "0", "1e+4", "inf", "MiB"]).collect();
    let target = Target {
        name: "policies_and_budgets",
        corpus: text.lines().map(|line| line.as_bytes().to_vec()).collect(),
        words: &words,
        inputs: 10_000,
        all_right: true,
    };
    target.run(|path| {
        let text = fs::read_to_string(path).map_err(said)?;
        let (policy, budget) = text.split_once(" at ").unwrap_or((&text, "0.5"));
        let budget: Budget = budget.parse().map_err(said)?;
        let asked = registry.policy(policy).map_err(said)?;
        for context in [1, 2, 7, 64, 1 << 20, usize::MAX >> 12] {
            let tokens = asked.budget_tokens(policy, Some(&budget), context, 256, 8);
            let _ = tokens.map(|tokens| asked.warnings(tokens, context, 0, (1, 2)));
        }
        let _ = (asked.needs(), asked.columns(), asked.is_even(), asked.rope(policy, None, 64).is_err());
        Ok(())
    });
}

#[test]
fn records() {
    // Some records of every reference run: a few lines are a run.
    let mut corpus = Vec::new();
    let mut runs: Vec<PathBuf> = fs::read_dir("results/reference").unwrap().map(|run| run.unwrap().path()).collect();
    runs.sort();
    for run in runs {
        let Ok(text) = fs::read_to_string(run.join(store::CELLS)) else { continue };
        let lines: Vec<&str> = text.lines().collect();
        corpus.extend(lines.chunks(lines.len().div_ceil(3)).map(|lines| {
            let some = lines.iter().step_by(lines.len().div_ceil(4));
            some.flat_map(|line| [line, "\n"]).collect::<String>().into_bytes()
        }));
    }
    let target = Target {
        name: "records",
        corpus,
        words: &["ok", "oom", "full", "naive", "tiled", "kvsieve/cell/v3", "\n", "-", "eval", "evict", "serve"],
        inputs: 60,
        all_right: true,
    };
    target.run(|path| {
        let folder = path.parent().unwrap();
        // A mutation of a whole run changes one of its lines, as a tree where it is one.
        fs::copy(path, folder.join(store::CELLS)).unwrap();
        let (records, environment) = store::read(folder).map_err(said)?;
        let run = Run {
            experiment: "x".into(),
            description: String::new(),
            is_synthetic: true,
            run_id: records.first().map_or_else(String::new, |record| record.run_id.clone()),
            repro: String::new(),
            environment,
            records,
            elsewhere: 0,
        };
        for detail in [Detail::Layers, Detail::Heads] {
            report::write(&folder.join("report"), std::slice::from_ref(&run), detail).map_err(said)?;
        }
        report::findings(&run.records);
        Ok(())
    });
}

#[test]
fn files_of_tokens() {
    let target = Target {
        name: "files_of_tokens",
        corpus: corpus("tokens"),
        words: &["tokens", "[", "]", "{", "}", ",", "null"],
        inputs: 4000,
        all_right: true,
    };
    target.run(|path| sequences(path).map(drop).map_err(said));
}
