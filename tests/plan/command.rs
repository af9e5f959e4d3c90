//! `kvsieve plan` as a user sees it.

use super::common::{normal, rng, tensor};
use assert_cmd::Command;
use kvsieve::tensor::DType;
use kvsieve::tensor::file::{self, Output};
use serde_json::Value;
use std::fs;
use tempfile::TempDir;

fn plan(arguments: &str) -> Command {
    let mut command = Command::cargo_bin("kvsieve").unwrap();
    command.arg("plan").args(arguments.split_whitespace()).env("NO_COLOR", "1");
    command
}

fn stdout(arguments: &str) -> String {
    String::from_utf8(plan(arguments).assert().success().stderr("").get_output().stdout.clone()).unwrap()
}

fn json(arguments: &str) -> Value {
    serde_json::from_str(&stdout(&format!("{arguments} --json -"))).unwrap()
}

#[test]
fn answers_are_as_reviewed() {
    let cases = [
        ("eager", "--model llama-3-8b --gpu 40536MiB --context 16384 --attention naive"),
        ("target", "--model llama-3-8b --gpu rtx-4090 --target-context 128k"),
        (
            "sharded",
            "--model deepseek-v3 --gpu h200 --tensor-parallel 8 --weights fp8 --batch 4 --context 32k --allocation paged",
        ),
        (
            "evicted",
            "--model llama-2-7b --gpu l4 --context 32k --policy keydiff+chunks:tokens=1024 --budget 4k --output-tokens 512",
        ),
        ("max_context", "max-context --model qwen3-8b --gpu rtx-4090 --prefill-chunk 2k --kv-format int8"),
        ("max_batch", "max-batch --model llama-3-8b --gpu h100 --context 8k"),
        ("fewer", "--model llama-3.1-8b --gpu a100-80gb --batch 16 --context 128k --target-context 128k"),
        ("llama_cpp", "--model llama-3-8b --gpu rtx-4090 --profile llama.cpp --concurrency 4 --context 16k"),
        ("compare", "compare llama-2-7b mistral-7b-v0.3 --gpu l4 --context 16k"),
        ("explain", "explain kv --model gemma-3-4b --context 128k"),
        ("train", "train --model llama-3-8b --gpu h100 --zero 2 --data-parallel 8 --offload optimizer"),
        ("scale", "scale --model llama-3-8b --gpu h100 --ranks 1,8,64,512 --context 1m"),
        ("gpus", "gpus --model qwen2.5-14b --context 32k"),
        ("claims", "claims"),
        ("published", "published"),
        ("audit", "audit results/reference/quickstart"),
    ];
    for (name, arguments) in cases {
        let said = stdout(arguments);
        assert!(said.lines().all(|line| line.chars().count() <= 100), "{name}: a line is too wide\n{said}");
        insta::assert_snapshot!(format!("plan_{name}"), said);
    }
}

#[test]
fn json_has_every_number() {
    let plan = json("--model llama-3-8b --gpu 40536MiB --context 16384 --attention naive");
    assert_eq!(plan["max_context_tokens"], 9621);
    assert_eq!(plan["guilty_term"], "scores");
    assert_eq!(plan["parameters"], 8_030_261_248u64);
    let scores = plan["terms"].as_array().unwrap().iter().find(|term| term["term"] == "scores").unwrap();
    assert_eq!(
        (&scores["prefill_bytes"], &scores["growth"]),
        (&Value::from(68_719_476_736u64), &Value::from("quadratic"))
    );
    let sum: u64 = plan["terms"].as_array().unwrap().iter().map(|term| term["prefill_bytes"].as_u64().unwrap()).sum();
    assert_eq!(plan["peak_bytes"], sum);
    assert!(plan["levers"][0]["lever"] == "tiled attention" && plan["levers"][0]["max_context_tokens"] == 111_124);
    assert_eq!(json("max-context --model llama-3-8b --gpu 40536MiB --attention minimal")["max_context_tokens"], 13_354);
    assert!(json("published").as_array().unwrap().len() >= 30);
}

/// Bytes of one card of several are those that it holds: whole layers, whole heads, one end of a pipeline.
#[test]
fn the_fullest_card_of_several_is_counted() {
    let term = |arguments: &str, name: &str, key: &str| {
        let plan = json(&format!("--gpu h100 {arguments}"));
        let terms = plan["terms"].as_array().unwrap().clone();
        terms.iter().find(|term| term["term"] == name).map_or(0, |term| term[key].as_u64().unwrap())
    };
    let table = 128_256 * 4096 * 2;
    let layer = (8_030_261_248 * 2 - 2 * table - 4096 * 2) / 32;
    for (stages, layers) in [(2, 16), (3, 11), (32, 1)] {
        let weights = term(&format!("--model llama-3-8b --pipeline {stages}"), "weights", "load_bytes");
        assert_eq!(weights, layers * layer + table + 4096 * 2, "{stages} stages");
    }
    let kv = |arguments: &str| term(arguments, "kv", "prefill_bytes");
    // 80 layers over 64 cards: two on some; 8 KV heads over 5: two on some.
    assert_eq!(kv("--model llama-3-70b --pipeline 64"), 2 * kv("--model llama-3-70b --pipeline 80"));
    assert_eq!(4 * kv("--model llama-3-8b --tensor-parallel 5"), kv("--model llama-3-8b"));
    let metadata = |arguments: &str| {
        term(&format!("--model llama-3-8b --allocation paged {arguments}"), "metadata", "prefill_bytes")
    };
    assert_eq!(8 * metadata("--tensor-parallel 8"), metadata(""));
    assert!(json("--model qwen3-next-80b-a3b --gpu h200 --tensor-parallel 2")["fits"].is_boolean());
}

/// What is retained is counted by the policy's own schedule, and tokens of a step are shared by all sequences that it reads.
#[test]
fn schedules_and_steps_are_those_of_the_policy_and_the_program() {
    let decode = |policy: &str| {
        let asked = format!("--model llama-3-8b --gpu h100 --budget 512 --output-tokens 4k --policy {policy}");
        let plan = json(&asked);
        let terms = plan["terms"].as_array().unwrap().clone();
        terms.iter().find(|term| term["term"] == "kv").unwrap()["decode_bytes"].as_u64().unwrap() / 131_072
    };
    assert_eq!(["h2o", "h2o+every:steps=64", "h2o+every:steps=8000"].map(decode), [4608, 576, 4608]);
    let asked = "--model llama-3-8b --gpu a100-80gb --context 8k --profile";
    for (profile, naive) in [("vllm", 0), ("llama.cpp", 4 * 32 * 512 * 8192)] {
        let most = json(&format!("max-batch {asked} {profile}"))["max_batch"].as_u64().unwrap();
        let at = |batch: u64| json(&format!("{asked} {profile} --batch {batch}"));
        assert_eq!([most, most + 1].map(|batch| at(batch)["fits"].clone()), [true, false], "{profile}");
        let terms = at(8)["terms"].as_array().unwrap().clone();
        let scores = terms
            .iter()
            .find(|term| term["term"] == "scores")
            .map_or(0, |term| term["prefill_bytes"].as_u64().unwrap());
        assert_eq!(scores, naive, "{profile}");
    }
    // Chunks help a longer context than the one that was asked for.
    let short = json("--model llama-3-8b --gpu rtx-4090 --context 512");
    let named = |name: &str| short["levers"].as_array().unwrap().iter().any(|lever| lever["lever"] == name);
    assert!(named("prefill in chunks of 512") && named("prefill in chunks of 2048"));
    // Nothing besides the model may hold memory, in any unit.
    let overhead = |amount: &str| json(&format!("--model llama-3-8b --gpu h100 --overhead {amount}"))["terms"].clone();
    assert_eq!([overhead("0GB"), overhead("0B")], [overhead("0"), overhead("0")]);
    // Who evicts nothing needs no budget.
    let terms = |policy: &str| json(&format!("--model llama-3-8b --gpu h100 {policy}"))["terms"].clone();
    assert_eq!(terms("--policy full"), terms(""));
    // A node that is not a power of two is left over the network all the same.
    let sent = |node: u64| {
        json(&format!("scale --model llama-3-8b --gpu h100 --ranks 8 --per-node {node}"))["on"][0]["tree_send_ns"]
            .as_f64()
            .unwrap()
    };
    assert!(sent(5) > 1.05 * sent(8), "{} {}", sent(5), sent(8));
}

/// Sequences that are held beside a prompt have been evicted from, in bytes, in words and in what is to be changed first.
#[test]
fn a_policy_and_sequences_that_are_held_go_together() {
    let asked = "--model llama-3-8b --gpu a100-80gb --context 32k --policy snapkv --budget 512 --concurrency 64";
    let plan = json(&format!("{asked} --target-context 32k"));
    let kv = |plan: &Value, key: &str| {
        plan["terms"].as_array().unwrap().iter().find(|term| term["term"] == "kv").unwrap()[key].clone()
    };
    assert_eq!(kv(&plan, "prefill_bytes"), 131_072_u64 * (32_768 + 63 * 512));
    assert_eq!(
        kv(&plan, "numbers"),
        "131,072 B a token in bf16 x (32,768 tokens + 512 tokens x 63 sequences); snapkv@512 retains 512 of 32,768"
    );
    assert_eq!((&plan["fits"], &plan["remedy"]["levers"]), (&Value::from(true), &Value::from(Vec::<Value>::new())));
    assert!(plan["max_context_tokens"].as_u64().unwrap() > 200_000, "{plan}");
    // Where decoding is fullest, a budget of tokens that is reached grows no further.
    let long = json(&format!("{asked} --output-tokens 64k --gpu 2000GiB").replace("--gpu a100-80gb ", ""));
    assert_eq!((&long["peak_phase"], kv(&long, "growth")), (&Value::from("decode"), Value::from("constant")));
}

/// A preset is planned as its makers published it, and in 16 bits where these are asked for.
#[test]
fn weights_are_as_they_are_published_where_nothing_is_asked_for() {
    let plan = |asked: &str| json(&format!("--model gpt-oss-20b --gpu rtx-4090 {asked}"));
    let (published, plain) = (plan(""), plan("--weights bf16"));
    let held = |plan: &Value| plan["terms"][0]["load_bytes"].clone();
    assert_eq!([held(&published), held(&plain)], [13_761_264_768u64, 41_829_514_368].map(Value::from));
    assert_eq!([&published["fits"], &plain["fits"]], [&Value::from(true), &Value::from(false)]);
    let verdict = |plan: &Value| plan["verdict"].as_str().unwrap().to_string();
    assert!(verdict(&published).ends_with("Weights are in mxfp4, as published; in bf16 they take 38.96 GiB."));
    assert!(!verdict(&plain).contains("as published"));
    let columns = |model: &str| stdout(&format!("gpus --model {model}")).lines().nth(2).unwrap().to_string();
    assert_eq!([columns("gpt-oss-20b").contains("mxfp4"), columns("llama-3-8b").contains("fp8")], [true; 2]);
}

/// The table has the best lever of each kind and says what it leaves out, which JSON has, and a figure's numbers too.
#[test]
fn levers_that_are_left_out_are_counted() {
    let folder = TempDir::new().unwrap();
    let asked = "--model llama-3.1-8b --gpu a100-80gb --context 128k --batch 16";
    let said = stdout(&format!("{asked} --output {}", folder.path().display()));
    let plan = json(asked);
    let levers = plan["levers"].as_array().unwrap();
    let rows: Vec<&str> = said.lines().skip_while(|line| !line.starts_with("change first")).skip(1).collect();
    let is_shown =
        |lever: &Value| rows.iter().any(|row| row.starts_with(&format!("{}  ", lever["lever"].as_str().unwrap())));
    let shown: Vec<&Value> = levers.iter().filter(|lever| is_shown(lever)).collect();
    assert!(rows.contains(&format!("{} more: --json -", levers.len() - shown.len()).as_str()), "{said}");
    let there = plan["available_bytes"].as_u64().unwrap();
    for (at, lever) in levers.iter().enumerate() {
        let before = || levers[..at].iter().filter(|before| before["kind"] == lever["kind"]);
        let fits = |lever: &Value| lever["peak_bytes"].as_u64().unwrap() <= there;
        assert!(is_shown(lever) || before().next().is_some(), "the best of its kind: {lever}");
        assert!(is_shown(lever) || !fits(lever) || before().any(fits), "the best of its kind that is enough: {lever}");
        let alike = || levers.iter().filter(|other| other["kind"] == lever["kind"]);
        let is_least = alike().all(|other| other["peak_bytes"].as_u64() >= lever["peak_bytes"].as_u64());
        assert!(is_shown(lever) || !is_least || alike().any(fits), "the nearest to being enough: {lever}");
    }
    for cards in [2, 4, 8] {
        assert!(
            levers.iter().any(|lever| lever["lever"] == format!("{cards} cards that share each layer")),
            "{levers:?}"
        );
    }
    let numbers = fs::read_to_string(folder.path().join("levers.csv")).unwrap();
    let gaining = levers.iter().filter(|lever| !lever["max_context_tokens"].is_null()).count();
    // A heading, and the context as it is.
    assert_eq!(numbers.lines().count(), gaining + 2, "{numbers}");
}

/// Bytes that are given count as given, though they are those of the default.
#[test]
fn overhead_that_is_given_is_not_the_default() {
    let context = |asked: &str| {
        let plan = json(&format!("--model llama-3-8b --gpu h100 {asked}"));
        let terms = plan["terms"].as_array().unwrap().clone();
        let term = terms.into_iter().find(|term| term["term"] == "context").unwrap();
        (term["load_bytes"].clone(), term["known"].clone(), term["numbers"].clone())
    };
    let bytes = Value::from(500_000_000);
    let expected = |known: &str, numbers: &str| (bytes.clone(), known.into(), numbers.into());
    assert_eq!(context(""), expected("calibrated", "500,000,000 B, the default"));
    assert_eq!(context("--overhead 500000000B"), expected("measured", "500,000,000 B, given or measured"));
}

/// Of a pipeline's stages the fullest is counted: its end of the model, and what it keeps.
#[test]
fn training_counts_the_fullest_stage() {
    let spent = |asked: &str| json(&format!("train --model gemma-2-9b --gpu h100 {asked}"));
    let of = |spent: &serde_json::Value, what: &str| spent[what].as_u64().unwrap();
    let (whole, stages) =
        (spent("--context 512 --recompute full"), spent("--context 512 --recompute full --pipeline 42"));
    // The embedding is the output matrix: the last stage holds it, one block and the norm, and makes the logits.
    let (table, norm) = (256_000 * 3584_u64, 3584);
    let block = (of(&whole, "parameter_bytes") / 2 - table - norm).div_ceil(42);
    assert_eq!(of(&stages, "parameter_bytes"), 2 * (table + norm + block));
    assert_eq!(of(&stages, "loss_bytes"), of(&whole, "loss_bytes"));
    // With long sequences the first stage keeps more: an input of each of its blocks for 42 micro-batches, and has no logits.
    let first = spent("--pipeline 42 --context 8192 --recompute none");
    assert_eq!(of(&first, "loss_bytes"), 0);
    assert_eq!(spent("--context 512 --adapters 16 --pipeline 2")["optimizer"]["states"], 8);
}

/// A context that is too short for a fraction of it is asked for whether there is room, and never counts as one that fits.
#[test]
fn budgets_that_leave_nothing_do_not_make_room() {
    let most =
        |arguments: &str| json(&format!("max-context --model llama-3-8b {arguments}"))["max_context_tokens"].clone();
    assert_eq!(most("--gpu 1B --policy h2o --budget 0.01"), 0);
    let plan = json("--model llama-3-8b --gpu t4");
    let levers = plan["levers"].as_array().unwrap();
    assert!(
        levers.iter().all(|lever| lever["max_context_tokens"].as_u64().is_none_or(|tokens| tokens > 16)),
        "{levers:?}"
    );
    assert!(json("--model llama-3-8b --gpu h100 --context 1")["fits"].as_bool().unwrap());
    // Room is reserved for the context that is tried, not for the one that was asked about.
    let longest = |context: &str| {
        json(&format!("--model llama-3-8b --gpu 24GiB --profile llama.cpp --context {context}"))["max_context_tokens"]
            .clone()
    };
    assert_eq!(longest("1k"), longest("8k"));
    assert!(longest("64k").as_u64().unwrap() > 8192);
    // More cards cost doublings of all of them.
    let two = json("--model llama-3-8b --gpu rtx-4090 --pipeline 2");
    let named = |name: &str| two["levers"].as_array().unwrap().iter().find(|lever| lever["lever"] == name).cloned();
    assert!(named("4 cards, 2 to each layer").unwrap()["price"].as_f64().unwrap() >= 2.0);
}

/// Frozen weights are divided by stage 3 too, and what lies on the host comes back for the unit in work.
#[test]
fn training_counts_what_a_card_holds_and_sends() {
    let train = |arguments: &str| json(&format!("train --model llama-3-8b --gpu h100 {arguments}"));
    let of = |answer: &Value, key: &str| answer[key].as_u64().unwrap();
    let lora = train("--adapters 16 --zero 3 --data-parallel 8");
    let base = 8_030_261_248 * 2;
    assert!((base / 8..base / 8 + 200_000_000).contains(&of(&lora, "parameter_bytes")), "{lora}");
    let table = 128_256 * 4096;
    assert_eq!(of(&lora, "gathered_bytes"), 2 * table);
    // The table keeps 16 bits where blocks have four.
    let qlora = train("--adapters 16 --weights nf4 --zero 3 --data-parallel 8");
    assert_eq!(of(&qlora, "gathered_bytes"), 2 * table);
    assert_eq!(of(&train("--offload all"), "gathered_bytes"), 4 * table);
    // A card sends its part of gradients, and gets its part of parameters.
    let sent = train("--zero 2 --data-parallel 64 --offload optimizer");
    assert!(of(&sent, "link_bytes").abs_diff(2 * base / 64) < 100, "{sent}");
    assert_eq!(of(&sent, "link_bytes"), of(&train("--zero 1 --data-parallel 64 --offload optimizer"), "link_bytes"));
    // The block that is computed again holds its scores.
    let activations = |arguments: &str| of(&train(&format!("--context 8k {arguments}")), "activation_bytes");
    for (recompute, without) in [("selective", "none"), ("full", "full")] {
        let more = activations(&format!("--recompute {recompute} --attention naive"))
            - activations(&format!("--recompute {without}"));
        assert!(more.abs_diff(5 * 32 * 8192 * 8192) < 8192 * 32 * 8, "{recompute}: {more}");
    }
    // Every expert has its adapters, and the router too.
    let moe = json("train --model mixtral-8x7b --gpu h100 --adapters 16");
    let numbers = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 8 * 3 * (4096 + 14_336) + 4096 + 8);
    assert_eq!(of(&moe, "gradient_bytes"), 4 * numbers);
}

#[test]
fn what_is_wrong_is_told_in_one_line_with_status_2() {
    let cases = [
        ("--gpu h100", "--model is missing; give a preset such as llama-3-8b"),
        ("--model llama-3-8b", "--gpu is missing; give a card such as rtx-4090"),
        ("--model lama-3-8b --gpu h100", "unknown model 'lama-3-8b'; near it are llama-3-8b"),
        ("--model llama-3-8b --gpu h10", "unknown GPU 'h10'; near it are h100"),
        ("--model llama-3-8b --gpu 0GiB", "'0GiB' is not an amount of memory"),
        ("--model llama-3-8b --gpu=-5GiB", "'-5GiB' is not an amount of memory"),
        ("--model llama-3-8b --gpu h100 --context 0", "'0' is not a token count"),
        ("--model llama-3-8b --gpu h100 --context -1", "'-1' is not a token count"),
        ("--model llama-3-8b --gpu h100 --context 9999999999999999", "tokens are more than 2^40"),
        ("--model llama-3-8b --gpu h100 --batch 0", "--batch is 0; it must be 1 to 2^40"),
        ("--model llama-3-8b --gpu h100 --batch -2", "invalid value '-2'"),
        ("--model llama-3-8b --gpu h100 --batch 1099511627776 --context 1m", "more than 2^60 bytes"),
        ("--model llama-3-8b --gpu h100 --tensor-parallel 33", "--tensor-parallel is 33; the model has 32 query heads"),
        ("--model llama-3-8b --gpu h100 --offload-layers 33", "--offload-layers is 33; the model has 32 layers"),
        ("--model llama-3-8b --gpu h100 --weights q4_k", "unknown weight format 'q4_k'; near it are q4_k_m"),
        ("--model llama-3-8b --gpu h100 --weights mxfp4", "--weights is mxfp4; it is for matrices of experts"),
        ("--model llama-3-8b --gpu h100 --kv-format int9", "format of keys and values is 'int9'"),
        ("--model llama-3-8b --gpu h100 --attention flash", "it is naive, minimal or tiled"),
        ("--model llama-3-8b --gpu h100 --policy snapkv --budget 0", "'0' is not a budget"),
        ("--model llama-3-8b --gpu h100 --policy nosuch --budget 0.5", "unknown policy 'nosuch'"),
        ("--model llama-3-8b --gpu h100 --allocation paged:0", "'0' is not a token count"),
        ("--model /nosuch/model --gpu h100", "there is no such file or folder"),
        ("--model Cargo.toml --gpu h100", "not a GGUF file that is read"),
        ("--model Nosuch:hidden_size=1 --gpu h100", "architecture 'Nosuch' is not understood"),
        ("--model llama-3-8b --gpu h100 --concurrency 0", "--concurrency is 0"),
        ("--model llama-3-8b --gpu h100 --profile ollama", "it is eager, sdpa, vllm or llama.cpp"),
        ("--model llama-3-8b --gpu h100 --output-tokens 18446744073709551615", "tokens are more than 2^40"),
        ("--model llama-3-8b --gpu h100 --allocation reserved:1k", "context and output are 8192 tokens"),
        (
            "--model Qwen3NextForCausalLM:hidden_size=2048,num_hidden_layers=8,num_attention_heads=16,vocab_size=1000,\
             max_position_embeddings=4096,num_key_value_heads=2,head_dim=256,intermediate_size=512,num_experts=8,\
             moe_intermediate_size=512,shared_expert_intermediate_size=512,num_experts_per_tok=2,full_attention_interval=100,\
             linear_num_key_heads=4,linear_key_head_dim=128,linear_num_value_heads=8,linear_value_head_dim=128,\
             linear_conv_kernel_dim=4 --gpu h100 --policy snapkv --budget 64MiB",
            "no layer of this model has keys and values",
        ),
        ("--model llama-3-8b --gpu h100 --kv-format q4_k", "q4_k is a format of weights"),
        (
            "--model llama-3-8b --gpu h100 --kv-format k=int8,v=int2-channel",
            "int2-channel:group=32 is a format of keys",
        ),
        ("gpus --model llama-3-8b --gpu h100", "--gpu has no meaning for plan gpus"),
        ("measure --model builtin --allocation paged", "--allocation has no meaning for plan measure"),
        (
            "train --model gemma-3-1b --gpu h100 --recompute full --micro-batch 268435456 --context 32k",
            "a step comes to more than 2^60 bytes",
        ),
        ("measure --model llama-3-8b", "--model is llama-3-8b; kvsieve runs a folder or a GGUF file"),
        (
            "measure --model builtin --policy snapkv --budget 0.5",
            "--policy is snapkv; what is measured is a run without",
        ),
        ("explain kv --model llama-3-8b --logits all", "--logits changes nothing of 'kv', only"),
        ("explain kv --model llama-3-8b --overhead 3GB", "--overhead changes nothing of 'kv', only"),
        ("explain kv --model llama-3-8b --offload-layers 4", "--offload-layers changes nothing of 'kv', only"),
        ("--model llama-3-8b --gpu h100 --overhead -1GB", "'-1GB' is not an amount of memory"),
        ("explain kvs --model llama-3-8b", "unknown term 'kvs'; near it are kv"),
        ("compare llama-3-8b --gpu h100", "2 values required"),
        ("train --model llama-3-8b --gpu h100 --zero 4", "--zero is 4; the stages are 0 to 3"),
        ("train --model llama-3-8b --gpu h100 --optimizer adam", "unknown optimizer 'adam'; near it are adamw"),
        ("scale --model llama-3-8b --gpu 80GiB", "--gpu is '80GiB'; times need a card of `kvsieve list gpus`"),
        ("scale --model llama-3-8b --gpu h100 --ranks 0", "--ranks is 0; it must be 1 to 524288"),
        ("scale --model llama-3-8b --gpu h100 --ranks 8 --context 8", "--ranks is 8; it must be 1 to 4"),
        ("scale --model llama-3-8b --gpu h100 --per-node 0", "--per-node is 0; a node has 1 to 1048576 cards"),
        ("scale --model llama-3-8b --gpu h100 --context 1", "--context is 1; a ring needs at least 2 tokens"),
        ("scale --model gpt-neox-20b --gpu h100 --kv-format q4_k", "is a format of weights"),
        ("scale --model llama-3-8b --gpu h100 --network infiniband", "unknown network 'infiniband'; near it are"),
        ("--model llama-3-8b --gpu h100 --batch 4 --concurrency 2", "--concurrency is 2 and --batch 4"),
        ("max-context --model llama-3-8b --gpu h100 --context 8k", "--context has no meaning for plan max-context"),
        (
            "--model llama-3-8b --gpu h100 --policy full --budget 0.5",
            "--budget has no meaning for the policy 'full', which evicts nothing",
        ),
        ("--model llama-3-8b --gpu h100 --policy snapkv", "policy 'snapkv' needs --budget"),
        ("--model llama-3-8b --gpu h100 --policy oracle --budget 0.5", "it looks into the future"),
        ("train --model llama-3-8b --gpu h100 --recompute selective", "--recompute selective leaves out the scores"),
        ("max-batch --model llama-3-8b --gpu h100 --batch 4", "--batch has no meaning for plan max-batch"),
        ("measure --model builtin --context 5k", "a sequence of 5120 tokens; the model was made for at most 4096"),
        ("measure --model builtin --context 1k --batch 60000", "--context is 1024; with --batch 60000 it would take"),
        ("measure --model builtin --batch 65537 --context 1k", "--batch is 65537; it must be at most 65536"),
        ("measure --model builtin --kv-format fp8", "--kv-format is fp8; it must be one of"),
        ("measure --model builtin --context 100m", "a sequence of 104857600 tokens"),
        ("train --model llama-3-8b --gpu h100 --zero 1", "--zero shares things out over --data-parallel cards"),
        ("audit src", "there is no run in it"),
        ("--model llama-3-8b --gpu h100 --overhead 0foo", "'0foo' is not an amount of memory"),
        ("allocator Cargo.toml", "not a list of events"),
        (
            "--model gemma-3-4b --gpu h100 --policy quest --budget 0.5",
            "--policy is quest; it selects from the whole context, but this model has sliding windows",
        ),
        (
            "--model deepseek-v3 --gpu h200 --policy think --budget 0.5",
            "--policy is think; it selects from keys and values of heads, but this model has compressed rows",
        ),
        (
            "--model llama-3-8b --gpu h100 --policy quest --budget 0.5 --kv-format fp8",
            "--kv-format is fp8; a policy that selects what is read needs one of `kvsieve list formats`",
        ),
        ("--model llama-3-8b --gpu h100 --policy quest --budget 8", "reads whole pages of 16 tokens"),
        ("--model llama-3-8b --gpu h100 --policy think:ratio=0.5 --budget 0.5", "has its ratio from the parameter"),
        ("--model llama-3-8b --gpu h100 --policy streaming-llm --budget 4", "keeps 4 sinks and needs at least 5"),
    ];
    for (arguments, expected) in cases {
        let output = plan(arguments).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments}: {said}");
        assert!(said.contains(expected) && said.trim_end().lines().count() == 1, "{arguments}: {said}");
    }
}

#[test]
fn an_audit_beyond_its_tolerance_ends_with_status_1() {
    let folder = TempDir::new().unwrap();
    let records = fs::read_to_string("results/reference/quickstart/cells.jsonl").unwrap();
    let first = records.lines().next().unwrap();
    let peak = &first[first.find("\"peak_bytes\":").expect("a measured peak")..];
    let peak = &peak[..peak.find(',').unwrap()];
    let bytes: u64 = peak.rsplit(':').next().unwrap().parse().unwrap();
    fs::write(folder.path().join("cells.jsonl"), first.replace(peak, &format!("\"peak_bytes\":{}", bytes + 4)) + "\n")
        .unwrap();
    let output = plan(&format!("audit {}", folder.path().display())).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stdout).unwrap().contains("peak of the arena"));
}

#[test]
fn figures_are_drawn_with_the_numbers_behind_them() {
    let folder = TempDir::new().unwrap();
    let to = folder.path().display();
    stdout(&format!("--model llama-3-8b --gpu a100-40gb --context 16k --attention naive --output {to}"));
    stdout(&format!("train --model llama-3-8b --gpu h100 --data-parallel 8 --output {to}"));
    for name in [
        "memory-vs-context",
        "memory-terms",
        "memory-stacked",
        "kv-room",
        "kv-heads",
        "levers",
        "levers-together",
        "zero-stages",
    ] {
        assert!(fs::read_to_string(folder.path().join(format!("{name}.svg"))).unwrap().contains("<svg"), "{name}");
        assert!(fs::read_to_string(folder.path().join(format!("{name}.csv"))).unwrap().lines().count() > 3, "{name}");
    }
    stdout(&format!("measure --model builtin --context 64 --output {to}"));
    assert!(
        fs::read_to_string(folder.path().join("measured-vs-context.csv")).unwrap().contains("\"peak, process\",ok,64,")
    );
    let page = fs::read_to_string(folder.path().join("report.html")).unwrap();
    assert!(page.contains("<svg") && page.contains("predicted: from headers and shapes"));
    let curves = fs::read_to_string(folder.path().join("memory-vs-context.csv")).unwrap();
    assert!(curves.contains("\"naive, 8 B a score: ends at 9,621\",oom,16384,,89105204480"), "{curves}");
}

#[test]
fn a_timeline_goes_through_every_allocator() {
    let folder = TempDir::new().unwrap();
    let trace = folder.path().join("timeline.json");
    fs::write(&trace, r#"[{"at_ns":1,"label":"kv","delta_bytes":3145728},{"label":"kv","delta_bytes":-3145728}]"#)
        .unwrap();
    let outcomes = json(&format!("allocator {}", trace.display()));
    let reserved: Vec<u64> =
        outcomes.as_array().unwrap().iter().map(|one| one["reserved_peak_bytes"].as_u64().unwrap()).collect();
    assert_eq!(reserved, [20 << 20, 20 << 20, 4 << 20, 3 << 20, 3 << 20]);
}

/// Pages that are filled change their label, and no memory moves.
#[test]
fn the_timeline_of_a_cache_goes_through_every_allocator() {
    let folder = TempDir::new().unwrap();
    let [input, output, trace] =
        ["in.safetensors", "out.safetensors", "timeline.json"].map(|name| folder.path().join(name));
    let of = |dims: [usize; 4]| tensor(DType::F32, dims, &normal(&mut rng(1), dims.iter().product(), 1.0));
    let (q, kv) = (of([1, 4, 8, 64]), of([1, 2, 300, 64]));
    let all = [Output::tensor("q", &q), Output::tensor("k", &kv), Output::tensor("v", &kv)];
    file::write(&input, &all).unwrap();
    let mut attend = Command::cargo_bin("kvsieve").unwrap();
    attend.args(["attend", "--kv-format", "q8_0", "--input"]).arg(&input).arg("--output").arg(&output);
    attend.arg("--timeline").arg(&trace).assert().success();
    let events: Vec<Value> = serde_json::from_slice(&fs::read(&trace).unwrap()).unwrap();
    assert!(events.iter().any(|event| event["relabelled"] == true), "nothing was relabelled");
    let most = events.iter().map(|event| event["live_bytes"].as_u64().unwrap()).max();
    let outcomes = json(&format!("allocator {}", trace.display()));
    let peaks = outcomes.as_array().unwrap().iter().map(|one| one["allocated_peak_bytes"].as_u64());
    peaks.for_each(|peak| assert_eq!(peak, most));
}
