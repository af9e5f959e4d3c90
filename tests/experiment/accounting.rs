//! Bytes: what the arena counted is what was predicted, for each kernel, measure, policy, action and reader.

use super::measures::{assert_sound, every_policy, evict, judges_again, methods, run};
use kvsieve::cache::PAGE_TOKENS;
use kvsieve::experiment::record::{Record, Status};
use kvsieve::policy::Registry;
use kvsieve::tensor::DType;

#[test]
fn every_kernel_and_measure_is_accounted_for_to_the_byte() {
    let axes =
        "heads = [\"2/1\", \"4/2\"]\nhead_dim = 32\ndtype = [\"f32\", \"bf16\", \"f16\"]\ncontext_tokens = 256\n";
    let grids = [
        format!("[[grid]]\nmeasure = \"forward\"\nkernel = [\"naive\", \"tiled\", \"tiled:br=16,bc=48\"]\n{axes}"),
        format!("[[grid]]\nmeasure = \"forward\"\nbatch = 2\ncausal = false\nsoftcap = 20\n{axes}"),
        format!("[[grid]]\nmeasure = \"backward\"\nkernel = [\"naive\", \"tiled\"]\nwindow = 100\n{axes}"),
        format!("[[grid]]\nmeasure = \"decode\"\nkernel = [\"decode\", \"tiled\", \"naive\"]\n{axes}"),
    ];
    let records = run(&grids.concat());
    assert_eq!(records.len(), 6 * (3 + 1 + 2 + 3));
    for record in &records {
        assert_sound(record);
        let rounding = match record.cell.dtype {
            DType::F32 => 1e-5,
            DType::F16 => 5e-3,
            DType::Bf16 => 3e-2,
        };
        assert!(record.drift.as_ref().unwrap().rel_l2 < rounding, "{}", record.cell.label());
        assert!(record.latency.contains_key(record.cell.measure.name()), "{}", record.cell.label());
        assert!(record.work.as_ref().unwrap().flops > 0);
        assert!(record.eviction.is_none());
    }
}

/// A rectangular cache has room in every head for what its fullest one keeps: no more than what is live where all keep as many, but for
/// what a format leaves in full, of which heads keep more and less.
#[test]
fn a_rectangular_cache_is_as_large_as_its_fullest_head() {
    let axes = "kv_format = [\"f32\", \"q4_0\", \"int4:zero=true,recent=32\", \"kivi:bits=4\"]\ncontext_tokens = 512\nbudget = 128\n";
    let records = run(&evict(&format!("policy = [\"keydiff\", \"knorm+table:heads=1;3\"]\n{axes}")));
    assert_eq!(records.len(), 2 * 4);
    for record in &records {
        let (label, eviction) = (record.cell.label(), record.eviction.as_ref().unwrap());
        let (padded, live) = (eviction.kv_bytes_padded, eviction.kv_bytes_live);
        let keeps_full = record.cell.kv_format.is_some_and(|format| format.keeps_full());
        match record.cell.policy.as_deref() {
            Some("keydiff") if !keeps_full => assert_eq!(padded, live, "{label}"),
            Some("keydiff") => assert!((live..live * 5 / 4).contains(&padded), "{label}: {padded} {live}"),
            _ => assert!(padded > live * 5 / 4, "{label}: {padded} {live}"),
        }
    }
}

#[test]
fn every_policy_gives_back_its_bytes_and_none_beats_the_oracle() {
    for (seed, dtype) in [(0, "f32"), (1, "bf16")] {
        let axes = format!("dtype = \"{dtype}\"\ncontext_tokens = 384\nbudget = [0.125, 90]\nseed = {seed}\n");
        let more = every_policy().replace(']', ", \"h2o+every\"]");
        let records = run(&evict(&format!("{more}{axes}")));
        assert_eq!(records.len(), 2 * methods().len() + 1);
        let of = |policy: &str, budget: usize| {
            let same = |record: &&Record| record.eviction.as_ref().unwrap().budget_tokens == budget;
            records.iter().filter(same).find(|record| record.cell.policy.as_deref() == Some(policy)).unwrap()
        };
        let full = of("full", 384);
        let (full_drift, page_bytes) = (full.drift.as_ref().unwrap().rel_l2, (PAGE_TOKENS * 2 * 32) as u64);
        let page_bytes = page_bytes * if dtype == "f32" { 4 } else { 2 };
        assert!(full_drift < if dtype == "f32" { 1e-5 } else { 3e-2 });
        assert_eq!(full.eviction.as_ref().unwrap().needle_recall, Some(1.0));
        for record in &records {
            assert_sound(record);
            let (label, eviction) = (record.cell.label(), record.eviction.as_ref().unwrap());
            let policy = record.cell.policy.as_deref().unwrap();
            let pages = |tokens: usize| 2 * tokens.div_ceil(PAGE_TOKENS) as u64 * page_bytes;
            assert_eq!(eviction.kv_bytes_dense, pages(384), "{label}");
            assert!(eviction.kv_bytes_peak >= eviction.kv_bytes_dense, "{label}");
            let kept = (eviction.kept_fraction * 384.0 * 2.0).round() as usize;
            if Registry::default().policy(policy).unwrap().selection.is_some() {
                assert_eq!((kept, eviction.evicted_tokens), (2 * 384, 0), "{label}");
                assert_eq!(eviction.kv_bytes_live, pages(384), "{label}");
                assert!(eviction.kv_bytes_read < full.eviction.as_ref().unwrap().kv_bytes_read, "{label}");
                assert!(record.drift.as_ref().unwrap().rel_l2 > full_drift, "{label}");
                continue;
            }
            assert_eq!(kept, 2 * eviction.budget_tokens, "{label}");
            if policy == "delayed-keydiff" {
                let least = (kept as u64).div_ceil(PAGE_TOKENS as u64) * page_bytes;
                assert!((least..=least + page_bytes).contains(&eviction.kv_bytes_live), "{label}");
            } else {
                assert_eq!(eviction.kv_bytes_live, pages(eviction.budget_tokens), "{label}");
            }
            let mass = eviction.attention_mass_kept.expect("keys are as they are");
            assert!((0.0..=1.0).contains(&mass), "{label}");
            assert!(eviction.needle_recall.is_some_and(|recall| (0.0..=1.0).contains(&recall)), "{label}");
            assert_eq!(eviction.evicted_tokens == 0, policy == "full", "{label}");
            if policy != "full" {
                assert!(eviction.evicted_tokens >= (2 * 384 - kept) as u64, "{label}");
                assert!(record.drift.as_ref().unwrap().rel_l2 > full_drift, "{label}");
                assert_eq!(record.latency.contains_key("decode_evict"), judges_again(policy), "{label}");
                assert!(record.latency.contains_key("score") && record.latency.contains_key("evict"), "{label}");
            }
            // Of all ways to keep as many tokens of each head, the oracle's keeps most attention.
            if policy != "full" && policy != "delayed-keydiff" {
                let bound =
                    of("oracle", eviction.budget_tokens).eviction.as_ref().unwrap().attention_mass_kept.unwrap();
                assert!(mass <= bound + 1e-3, "{label}");
            }
        }
        for budget in [48, 90] {
            let drift = |policy| of(policy, budget).drift.as_ref().unwrap().rel_l2;
            assert!(drift("oracle") < drift("random"), "at {budget} tokens");
            assert!(drift("oracle-output") < drift("oracle"), "at {budget} tokens");
            // What comes behind the context stays on top of the budget, unless the schedule says every: then as many are
            // evicted as are added.
            let evicted = |policy| of(policy, budget).eviction.as_ref().unwrap().evicted_tokens;
            assert_eq!(evicted("h2o"), 2 * (384 - budget) as u64);
            assert_eq!(evicted("h2o+every"), 2 * (384 - budget + 8) as u64);
        }
    }
}

#[test]
fn bytes_are_predicted_for_odd_lengths_and_several_sequences() {
    // More slabs than one, and pages that are not full.
    let text = format!("{}batch = 3\ncontext_tokens = [250, 700]\nbudget = 0.5\n", every_policy());
    let grids = evict(&text);
    for record in run(&grids) {
        assert_sound(&record);
    }
}

#[test]
fn tokens_in_full_are_predicted_and_evicted_beside_coded_ones() {
    let formats = ["q4_0:recent=40,first=4", "kivi:bits=4,recent=40", "k=int8-channel,v=int8"];
    let policies = ["full", "snapkv:window=16", "h2o+every:steps=3", "knorm+ada+chunks:tokens=100", "random+merge"];
    let text = format!(
        "policy = {policies:?}\nkv_format = {formats:?}\nbatch = 2\ncontext_tokens = [300, 700]\nbudget = [0.25, 120]\n\
         [[grid]]\nmeasure = \"decode\"\nheads = \"4/2\"\nhead_dim = 32\nkv_format = {formats:?}\ncontext_tokens = 700"
    );
    for record in run(&evict(&text)) {
        let (label, memory) = (record.cell.label(), record.memory.as_ref());
        assert_eq!(record.status, Status::Ok, "{label}: {:?}", record.reason);
        let residual_bytes = memory.unwrap().residual_bytes;
        // Which tokens are in full, and of how many groups some are left, is in the data once some were evicted.
        let evicts = record.cell.budget.is_some();
        assert!(residual_bytes == 0 || evicts && residual_bytes < 0, "{label}: {residual_bytes}");
    }
}

#[test]
fn bytes_are_predicted_where_decoding_takes_most() {
    let axes = "new_tokens = 600\ncontext_tokens = 128\nbudget = [0.25, 0.9]\n";
    let more = every_policy().replace(']', ", \"h2o+every:steps=7\", \"snapkv:window=9+every:steps=20\"]");
    for record in run(&evict(&format!("{more}{axes}")).replacen("new_tokens = 8\n", "", 1)) {
        // Which heads keep what under a threshold is in the data: there the prediction is a bound.
        if record.cell.policy.as_deref() == Some("delayed-keydiff") {
            assert_eq!(record.status, Status::Ok);
            assert!(record.memory.unwrap().residual_bytes <= 0);
        } else {
            assert_sound(&record);
        }
    }
}

/// Actions, turned keys and readers, also where lists differ, prefill is in chunks, and decoding takes most.
const SHAPED: [&str; 19] = [
    "knorm+merge",
    "snapkv:window=9+merge:threshold=0.5+every:steps=3",
    "knorm+cam:window=4",
    "h2o+cam+every",
    "snapkv:window=9+cam+every:steps=3",
    "knorm+accumulate+chunks:tokens=64",
    "h2o+accumulate+every",
    "streaming-llm+rerotate+every",
    "streaming-llm+rerotate+chunks:tokens=50",
    "snapkv:window=9+rerotate+every:steps=3",
    "h2o+rerotate+merge+every",
    "tova+accumulate+rerotate+every:steps=5",
    "quest",
    "think",
    "think:window=3",
    "snapkv:window=300+every:steps=4",
    "random+merge+chunks:tokens=100",
    "rms-attention:window=9+match:queries=20",
    "h2o+match:fit=values,of=context+chunks:tokens=64",
];

#[test]
fn bytes_of_actions_and_readers_are_predicted() {
    for (new_tokens, axes) in [
        (8, "context_tokens = [250, 700]\nbatch = 2\nbudget = 0.5\n"),
        (8, "context_tokens = 256\nlayers = 2\ndtype = \"bf16\"\nbudget = [0.125, 90]\n"),
        (300, "context_tokens = 128\nbudget = 0.25\n"),
    ] {
        let grids = evict(&format!("policy = {SHAPED:?}\n{axes}"));
        for record in run(&grids.replacen("new_tokens = 8", &format!("new_tokens = {new_tokens}"), 1)) {
            assert_sound(&record);
        }
    }
    // Where heads keep different numbers the prediction is a bound.
    let uneven = [
        "knorm+ada+merge",
        "knorm+ada+match",
        "delayed-keydiff+accumulate",
        "delayed-keydiff+rerotate",
        "snapkv+ada+rerotate+chunks:tokens=60",
    ];
    for record in run(&evict(&format!("policy = {uneven:?}\ncontext_tokens = 256\nbudget = 90\n"))) {
        assert_eq!(record.status, Status::Ok, "{}: {:?}", record.cell.label(), record.reason);
        assert!(record.memory.as_ref().unwrap().residual_bytes <= 0, "{}", record.cell.label());
    }
}
