//! `evict --device cuda`: a cache in a GPU's memory is filled and evicted from there; what is retained is read for the output.

use super::{Args, Outcome, Tensors};
use crate::attention::{Params, Shape};
use crate::cache::cuda::DeviceCache;
use crate::cli::failure::Failure;
use crate::device::Cpu;
use crate::device::cuda::Runtime;
use crate::eviction::cuda::{DeviceTensors, retain};
use crate::memory::{Arena, Label};
use crate::policy::{Budget, Policy, tie_rate_of};
use crate::tensor::file::TensorFile;

pub fn run(args: &Args, index: usize, policy: &Policy, budget: Option<&Budget>) -> Result<(), Failure> {
    policy.check_device(&args.policy)?;
    if let Some(format) = args.kv_format {
        return Err(Failure::usage(format!("evict keeps a cache in {format} on the CPU only; leave --device out")));
    }
    args.check_files()?;
    let file = TensorFile::open(&args.input)?;
    // The host's copies are not what is measured.
    let host = Arena::unlimited();
    let inputs = ["q", "k", "v"].map(|name| file.load(name, &host, Label::Input));
    let [q, k, v] = inputs;
    let (q, k, v) = (q?, k?, v?);
    let shape = Shape::of(q.dims(), k.dims(), v.dims())?;
    if q.dtype() != k.dtype() || k.dtype() != v.dtype() {
        let found = format!("q is {}, k is {}, v is {}", q.dtype(), k.dtype(), v.dtype());
        return Err(Failure::usage(format!("{found}; on CUDA they must be of one type")));
    }
    let token_bytes = (2 * shape.head_dim * k.dtype().bytes()) as u64;
    let lists = shape.batch * shape.kv_heads;
    let budget_tokens = policy.budget_tokens(&args.policy, budget, shape.kv_len, token_bytes, lists)?;
    let rope = args.rope(&file, policy, &shape)?;

    let runtime = Runtime::open(index, args.compute.nvrtc.as_deref())?;
    runtime.sweep_l2()?;
    let (device, cpu) = (runtime.device(), Cpu::new(args.compute.threads)?);
    let arena = Arena::with_limit(args.compute.limit_memory.unwrap_or(device.free_bytes()));
    let mut there = Vec::new();
    for tensor in [&q, &k, &v] {
        let mut buffer = device.alloc(&arena, Label::Input, tensor.bytes().len() as u64)?;
        buffer.write(tensor.bytes())?;
        there.push(buffer);
    }
    let tensors = DeviceTensors {
        q: &there[0],
        k: &there[1],
        v: &there[2],
        dtype: k.dtype(),
        shape,
        params: Params::new(shape.head_dim, true),
        layers: 1,
        rope: rope.as_ref(),
    };
    let retained = retain(policy, &runtime, &arena, &cpu, tensors, budget_tokens)?;

    let mut scores = vec![0f32; lists * shape.kv_len];
    let mut tie_rate = 0.0;
    if let Some((values, highest)) = &retained.scores {
        values.read(bytemuck::cast_slice_mut(&mut scores))?;
        tie_rate = tie_rate_of(scores.chunks(shape.kv_len), *highest);
    }
    let outcome = Outcome {
        kept: retained.kept.iter().map(Vec::as_slice).collect(),
        scores: retained.scores.is_some().then_some(&scores),
        rows: if policy.rerotates { rows(&retained.cache)? } else { Vec::new() },
        read: None,
        kv_bytes_kept: None,
        device: format!("cuda:{index}"),
        threads: None,
        evict_ns: retained.time_ns,
        tie_rate,
        peak_bytes: arena.usage().peak_bytes,
        over_ranks: None,
        used: None,
    };
    let tensors = Tensors { q: q.view(), k: k.view(), v: v.view(), shape, cpu: &cpu };
    args.finish(policy, (budget, budget_tokens), &file, &tensors, &outcome)
}

/// Values and keys of a cache, padded to the longest list.
fn rows(cache: &DeviceCache) -> Result<Vec<(&'static str, Vec<f32>)>, Failure> {
    let (shape, columns) = (cache.shape(), cache.max_len());
    let all = |part: usize| -> Result<Vec<f32>, Failure> {
        let mut rows = vec![0.0; shape.lists() * columns * shape.head_dim];
        for (list, rows) in rows.chunks_mut((columns * shape.head_dim).max(1)).enumerate() {
            shape.dtype().decode(&cache.read_rows(list, part)?, &mut rows[..cache.lens()[list] * shape.head_dim]);
        }
        Ok(rows)
    };
    Ok(vec![("values", all(1)?), ("keys", all(0)?)])
}
