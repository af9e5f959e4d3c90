//! Formats of the cache: every kernel reads what was stored, at the bytes that the format says, and how far that is from
//! what was given.

use crate::common;
use crate::common::{Problem, assert_every_kernel_is_tested, cpu, forward_over, inputs, shape};
use kvsieve::attention::{DenseKv, Inputs, KvRows, Params};
use kvsieve::cache::{CacheShape, PagedCache};
use kvsieve::format::{FORMATS, KvFormat, RowFormat};
use kvsieve::memory::{Arena, Label};
use kvsieve::tensor::{DType, RowCode, Tensor};

/// Formats with something of their own, and how far the output may be from that over what was given, as a relative L2
/// distance. An element of int8 is off by up to half of 1/127 of its row's largest, of bf16 by 2^-9 of itself.
const FORMATS_OF_KV: [(&str, f64); 39] = [
    ("f32", 1e-6),
    ("bf16", 4e-3),
    ("f16", 1e-3),
    ("int8", 1.5e-2),
    ("k=int8,v=f32", 1.5e-2),
    ("k=bf16,v=int8", 1.2e-2),
    ("k=q8_0,v=f32", 1e-2),
    ("int4", 0.2),
    ("int4:group=64,zero=true", 0.2),
    ("k=int8,v=int4:zero=true", 0.15),
    ("int4:hadamard=true", 0.2),
    ("int3", 0.4),
    ("int2", 1.2),
    ("int2:zero=true", 0.9),
    ("turboquant", 0.2),
    ("turboquant:bits=3,group=32", 0.4),
    ("k=int4:zero=true,hadamard=true,v=bf16", 0.15),
    ("fp8-e4m3", 5e-2),
    ("fp8-e5m2", 0.1),
    ("nf4", 0.2),
    ("nf4:group=32", 0.2),
    ("q8_0", 1e-2),
    ("q5_1", 7e-2),
    ("q5_0", 7e-2),
    ("q4_1", 0.15),
    ("q4_0", 0.2),
    ("iq4_nl", 0.15),
    ("int4:group=64", 0.2),
    ("k=q4_0,v=nf4", 0.2),
    ("k=bf16,v=q4_0", 0.15),
    ("k=q4_0,v=bf16", 0.15),
    ("q4_0:recent=20,first=3", 0.2),
    ("int4:hadamard=true,recent=17", 0.2),
    ("k=int4:hadamard=true,v=int8:first=30", 0.2),
    ("k=f32,v=q8_0:recent=5", 1e-2),
    ("kivi:bits=4,recent=4", 0.15),
    ("kivi:bits=2,group=64,recent=20,first=4", 0.9),
    ("k=int8-channel,v=int8", 1.5e-2),
    ("k=int2-channel,v=f32:recent=1", 0.9),
];

/// `[B, Hq, Hkv, Lq, Lk, D]` of a decode step, of a step of MHA, of a chunk in the middle of a prompt, of rows that
/// fill no vector, of rows of a single block, which are no whole words, and of steps of two and four queries a KV head over wide rows;
/// and the tokens of a page.
const SHAPES: [([usize; 6], usize); 7] = [
    ([2, 6, 2, 1, 700, 64], 16),
    ([1, 3, 3, 1, 90, 128], 5),
    ([1, 4, 2, 65, 300, 64], 64),
    ([2, 4, 2, 3, 37, 33], 1),
    ([1, 2, 1, 3, 35, 32], 35),
    ([1, 4, 2, 1, 600, 128], 16),
    ([1, 4, 1, 1, 300, 256], 7),
];

const KERNELS: [&str; 4] = ["decode", "tiled", "tiled:br=7,bc=5", "naive"];

/// A cache in a format that holds the keys and values.
fn cache(arena: &Arena, format: KvFormat, inputs: &Inputs, page_tokens: usize) -> PagedCache {
    let [batch, kv_heads, max_tokens, head_dim] = inputs.k.dims();
    let shape = CacheShape { batch, kv_heads, head_dim, format, max_tokens, page_tokens, columns: &[] };
    let mut cache = PagedCache::new(arena, shape).unwrap();
    cache.append(inputs.k.view(), inputs.v.view(), 0..max_tokens).unwrap();
    cache
}

/// What a cache holds, as f32 tensors.
fn widened(cache: &PagedCache) -> [Tensor; 2] {
    let CacheShape { batch, kv_heads, head_dim, max_tokens, .. } = *cache.shape();
    [false, true].map(|of_values| {
        let mut rows = vec![0.0; batch * kv_heads * max_tokens * head_dim];
        for (index, row) in rows.chunks_exact_mut(head_dim).enumerate() {
            let (list, slot) = (index / max_tokens, index % max_tokens);
            if of_values { cache.read_value(list, slot, row) } else { cache.read_key(list, slot, row) }
        }
        common::tensor(DType::F32, [batch, kv_heads, max_tokens, head_dim], &rows)
    })
}

fn distance(found: &[f32], expected: &[f32]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let apart = square(&mut found.iter().zip(expected).map(|(x, y)| f64::from(x - y)));
    apart / square(&mut expected.iter().map(|&x| f64::from(x)))
}

#[test]
fn every_kernel_reads_what_every_format_keeps() {
    assert_every_kernel_is_tested();
    for (extents, page_tokens) in SHAPES {
        let shape = shape(extents);
        let params = Params { softcap: Some(20.0), ..Params::new(shape.head_dim, true) };
        let problem = Problem { shape, params, dtype: DType::F32 };
        let (inputs, arena) = (inputs(&problem, 7), Arena::unlimited());
        let given = DenseKv::new(inputs.k.view(), inputs.v.view()).unwrap();
        let (exact, _) = forward_over("reference", &problem, inputs.q.view(), &given, cpu(1));
        for (format, allowed) in FORMATS_OF_KV {
            let parsed: KvFormat = format.parse().unwrap();
            if parsed.check(shape.head_dim, shape.kv_len).is_err() {
                assert!(shape.head_dim < 64, "{format}");
                continue;
            }
            let cache = cache(&arena, parsed, &inputs, page_tokens);
            let [k, v] = widened(&cache);
            let kept = DenseKv::new(k.view(), v.view()).unwrap();
            let (expected, lse) = forward_over("reference", &problem, inputs.q.view(), &kept, cpu(1));
            let (of_cache, _) = forward_over("reference", &problem, inputs.q.view(), &cache, cpu(1));
            assert_eq!(of_cache, expected, "{format}: the reference reads the cache as it reads its widened copy");
            for kernel in KERNELS {
                let (o, own_lse) = forward_over(kernel, &problem, inputs.q.view(), &cache, cpu(2));
                let apart = distance(&o, &expected).max(distance(&own_lse, &lse));
                assert!(apart < 2e-6, "{kernel} over {format}, {extents:?}: {apart:e} from what the cache holds");
            }
            let loss = distance(&expected, &exact);
            assert!(loss < allowed, "{format}, {extents:?}: {loss:e} from what was given");
            assert_eq!(loss > 1e-7, format != "f32", "{format}, {extents:?}: {loss:e}");
        }
    }
}

/// What codes stand for is rounded to bf16 there, where the processor multiplies bf16.
#[test]
fn a_pass_in_bf16_reads_what_every_format_keeps() {
    for (extents, page_tokens) in [
        ([1, 4, 2, 60, 300, 64], 16),
        ([1, 3, 1, 21, 90, 128], 5),
        ([1, 2, 1, 35, 35, 32], 64),
        ([1, 2, 2, 1, 600, 128], 16),
        ([1, 4, 2, 1, 300, 128], 5),
        ([1, 4, 1, 1, 300, 256], 16),
    ] {
        let shape = shape(extents);
        let problem = Problem { shape, params: Params::new(shape.head_dim, true), dtype: DType::Bf16 };
        let (inputs, arena) = (inputs(&problem, 11), Arena::unlimited());
        for (format, _) in FORMATS_OF_KV {
            let parsed: KvFormat = format.parse().unwrap();
            if parsed.check(shape.head_dim, shape.kv_len).is_err() {
                continue;
            }
            let cache = cache(&arena, parsed.in_pass(DType::Bf16), &inputs, page_tokens);
            let [k, v] = widened(&cache);
            let kept = DenseKv::new(k.view(), v.view()).unwrap();
            let (expected, lse) = forward_over("reference", &problem, inputs.q.view(), &kept, cpu(1));
            let (of_cache, _) = forward_over("reference", &problem, inputs.q.view(), &cache, cpu(1));
            assert_eq!(of_cache, expected, "{format}: the reference reads the cache as it reads its widened copy");
            for kernel in ["tiled", "tiled:br=7,bc=5", "decode", "naive"] {
                let (o, own_lse) = forward_over(kernel, &problem, inputs.q.view(), &cache, cpu(2));
                let apart = distance(&o, &expected).max(distance(&own_lse, &lse));
                assert!(apart < 6e-3, "{kernel} over {format}, {extents:?}: {apart:e} from what the cache holds");
                // Its products are exact, and only its outputs are rounded.
                let of_sums = distance(&own_lse, &lse);
                assert!(kernel != "decode" || of_sums < 2e-6, "log-sum-exp over {format}, {extents:?}: {of_sums:e}");
            }
        }
    }
}

#[test]
fn a_cache_takes_the_bytes_of_its_format() {
    let problem = Problem { shape: shape([1, 2, 2, 1, 1024, 128]), params: Params::new(128, true), dtype: DType::F32 };
    let inputs = inputs(&problem, 1);
    let kv_bytes = |format: &str| {
        let arena = Arena::unlimited();
        let cache = cache(&arena, format.parse().unwrap(), &inputs, 16);
        assert_eq!(cache.len(0, 0), 1024);
        arena.usage().live[&Label::Kv]
    };
    assert_eq!(kv_bytes("bf16"), 2 * 1024 * 512);
    assert_eq!(kv_bytes("int8"), 2 * 1024 * (2 * 128 + 2 * 4));
    assert_eq!(kv_bytes("k=int8,v=bf16"), 2 * 1024 * (128 + 4 + 256));
}

/// `tests/conformance/gguf_blocks.py` recorded what the `gguf` package makes of some numbers.
#[test]
fn blocks_of_llama_cpp_are_bit_by_bit_its_own() {
    let recorded: serde_json::Value = serde_json::from_str(include_str!("../fixtures/gguf_blocks.json")).unwrap();
    let bytes = |hex: &serde_json::Value| -> Vec<u8> {
        let digits = hex.as_str().unwrap();
        (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
    };
    let floats = |hex| bytes(hex).chunks(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect::<Vec<f32>>();
    let numbers = floats(&recorded["numbers"]);
    for (name, recorded) in recorded.as_object().unwrap().iter().filter(|(name, _)| *name != "numbers") {
        let format: RowFormat = name.parse().unwrap();
        let (blocks, wanted) = (bytes(&recorded["blocks"]), floats(&recorded["values"]));
        // The package writes the types of 32 elements; of the others blocks are recorded that nobody wrote.
        if wanted.len() == numbers.len() {
            let mut own = vec![0xff; format.row_bytes(numbers.len())];
            format.encode(&numbers, numbers.len(), &mut own);
            assert_eq!(own, blocks, "{name}");
        }
        let mut values = vec![f32::NAN; wanted.len()];
        format.decode(&blocks, 0, &mut values);
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&values), bits(&wanted), "{name}");
    }
}

#[test]
fn every_format_is_tested() {
    let of_kv = |name: &str| KvFormat::both(name.parse().unwrap()).check(256, 1024).is_ok();
    for entry in FORMATS.iter().filter(|entry| of_kv(entry.name)) {
        assert!(FORMATS_OF_KV.iter().any(|(text, _)| *text == entry.name), "format '{}' is not under test", entry.name);
    }
}

/// `tests/conformance/kivi.py` recorded what KIVI's order of operations makes of some keys and values.
#[test]
fn kivi_keeps_the_codes_scales_and_minimums_of_its_public_code() {
    let recorded: serde_json::Value = serde_json::from_str(include_str!("../fixtures/kivi.json")).unwrap();
    let size = |name: &str| recorded[name].as_u64().unwrap() as usize;
    let (group, tokens, width) = (size("group"), size("tokens"), size("width"));
    let bytes = |hex: &serde_json::Value| -> Vec<u8> {
        let digits = hex.as_str().unwrap();
        (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
    };
    let halves = |hex| -> Vec<f32> {
        bytes(hex).chunks(2).map(|x| half::f16::from_le_bytes(x.try_into().unwrap()).to_f32()).collect()
    };
    let arena = Arena::unlimited();
    // As many tokens again push the recorded ones out of the window.
    let given = [&recorded["keys"], &recorded["values"]].map(|hex| {
        let numbers = halves(hex);
        common::tensor(DType::F32, [1, 1, 2 * tokens, width], &[&numbers[..], &numbers[..]].concat())
    });
    for bits in ["2", "4"] {
        let format: KvFormat = format!("kivi:bits={bits},group={group},recent={tokens}").parse().unwrap();
        let max_tokens = 2 * tokens;
        let shape =
            CacheShape { batch: 1, kv_heads: 1, head_dim: width, format, max_tokens, page_tokens: 16, columns: &[] };
        let mut cache = PagedCache::new(&arena, shape).unwrap();
        cache.append(given[0].view(), given[1].view(), 0..max_tokens).unwrap();
        let recorded = &recorded[bits];
        let (key_scales, key_minimums) = (halves(&recorded["key_scales"]), halves(&recorded["key_minimums"]));
        let (value_scales, value_minimums) = (halves(&recorded["value_scales"]), halves(&recorded["value_minimums"]));
        let (key_codes, value_codes) = (bytes(&recorded["key_codes"]), bytes(&recorded["value_codes"]));
        let (mut key, mut value) = (vec![0.0; width], vec![0.0; width]);
        for token in 0..tokens {
            cache.read_key(0, token, &mut key);
            cache.read_value(0, token, &mut value);
            for d in 0..width {
                let (at, of_key) = (token * width + d, token / group * width + d);
                let wanted = key_scales[of_key] * f32::from(key_codes[at]) + key_minimums[of_key];
                assert_eq!(key[d], wanted, "{bits} bits, key {token}, channel {d}");
                let of_value = token * (width / group) + d / group;
                let wanted = value_scales[of_value] * f32::from(value_codes[at]) + value_minimums[of_value];
                assert_eq!(value[d], wanted, "{bits} bits, value {token}, channel {d}");
            }
        }
    }
}
