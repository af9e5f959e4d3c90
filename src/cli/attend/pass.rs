//! The passes themselves: load, predict, run, check.

use super::Failure;
use crate::attention::{
    AttentionError, Backward, DenseKv, Forward, Gradients, Kernel, KvRows, Outputs, Params, Shape, WorkspaceSize,
    reference,
};
use crate::cache::{CacheShape, PAGE_TOKENS, PagedCache};
use crate::device::Cpu;
use crate::format::KvFormat;
use crate::memory::{Arena, Label};
use crate::tensor::file::TensorFile;
use crate::tensor::{DType, Tensor};
use crate::units;
use std::time::Instant;

/// Queries of each head that are compared with the reference.
const CHECKED_QUERIES: usize = 64;

/// What is to be computed.
pub struct Problem {
    pub shape: Shape,
    pub params: Params,
    /// Type of the inputs as they are computed with, and of the outputs.
    pub dtype: DType,
    pub backward: bool,
    /// How keys and values are kept in a cache, if they are to be read from one.
    pub kv_format: Option<KvFormat>,
    /// Tensors of the file, in the order in which they are loaded: name, extents, type in the file.
    pub stored: Vec<(&'static str, [usize; 4], DType)>,
}

/// Memory that the problem will take, known from shapes alone.
pub struct Sizes {
    pub forward: WorkspaceSize,
    pub backward: Option<WorkspaceSize>,
    pub peak_bytes: u64,
}

impl Sizes {
    /// Says before anything is allocated that the peak would pass the limit.
    pub fn refuse_beyond(&self, limit_bytes: u64) -> Result<(), Failure> {
        if self.peak_bytes <= limit_bytes {
            return Ok(());
        }
        Err(Failure::work(format!(
            "out of memory: the peak will be {} bytes ({}), the limit is {limit_bytes} bytes ({}); shorten the \
             context, choose a kernel with linear memory, or raise --limit-memory",
            self.peak_bytes,
            units::bytes(self.peak_bytes),
            units::bytes(limit_bytes)
        )))
    }
}

/// What came out.
pub struct Solution {
    pub outputs: Outputs,
    pub samples_ns: Vec<u64>,
    pub warmups: u32,
    pub backward: Option<BackwardSolution>,
    /// Relative L2 distance from the reference.
    pub rel_l2: f64,
    pub checked_rows: usize,
}

/// What came out of the backward pass.
pub struct BackwardSolution {
    pub gradients: Gradients,
    pub samples_ns: Vec<u64>,
}

impl Problem {
    /// The memory that [`Problem::solve`] takes, to the byte.
    pub fn sizes(&self, kernel: &dyn Kernel, threads: usize) -> Result<Sizes, AttentionError> {
        let forward = kernel.workspace(&self.shape, &self.params, self.dtype, threads);
        let backward = self.backward.then(|| {
            let size = kernel.backward_workspace(&self.shape, &self.params, self.dtype, threads);
            size.ok_or(AttentionError::Unsupported {
                kernel: kernel.name(),
                what: "backward pass",
                instead: "naive or tiled",
            })
        });
        let backward = backward.transpose()?;

        // A tensor that is converted is there twice until its copy in the file's type is given back.
        let (mut inputs, mut peak_bytes) = (0, 0);
        for &(_, dims, stored) in &self.stored {
            let kept = Tensor::bytes_of(self.dtype, dims);
            let twice = if stored == self.dtype { 0 } else { Tensor::bytes_of(stored, dims) };
            peak_bytes = peak_bytes.max(inputs + kept + twice);
            inputs += kept;
        }
        let cache: u64 = self.cache().map_or(0, |cache| self.cache_bytes(&cache));
        let held = inputs + cache + Outputs::bytes(&self.shape, self.dtype);
        peak_bytes = peak_bytes.max(held + forward.bytes());
        if let Some(workspace) = backward {
            peak_bytes = peak_bytes.max(held + Gradients::bytes(&self.shape, self.dtype) + workspace.bytes());
        }
        Ok(Sizes { forward, backward, peak_bytes })
    }

    /// The cache that keys and values are read from, if there is to be one.
    fn cache(&self) -> Option<CacheShape> {
        let Shape { batch, kv_heads, kv_len, head_dim, .. } = self.shape;
        let of = |format: KvFormat| CacheShape {
            batch,
            kv_heads,
            head_dim,
            format: format.in_pass(self.dtype),
            max_tokens: kv_len,
            page_tokens: PAGE_TOKENS,
            columns: &[],
        };
        self.kv_format.map(of)
    }

    fn cache_bytes(&self, cache: &CacheShape) -> u64 {
        cache.bytes(vec![self.shape.kv_len; cache.lists()], 0).values().sum()
    }

    /// Loads the tensors, runs the passes `repeat` times, and checks what they wrote.
    pub fn solve(
        &self,
        kernel: &dyn Kernel,
        sizes: &Sizes,
        file: &TensorFile,
        arena: &Arena,
        cpu: &Cpu,
        repeat: u32,
    ) -> Result<Solution, Failure> {
        let inputs = self.load_all(file, arena)?;
        let dense = DenseKv::new(inputs[1].view(), inputs[2].view())?;
        let cache = self.cache().map(|shape| {
            let mut cache = PagedCache::new(arena, shape)?;
            cache.append(inputs[1].view(), inputs[2].view(), 0..self.shape.kv_len)?;
            Ok::<_, Failure>(cache)
        });
        let cache = cache.transpose()?;
        let kv = cache.as_ref().map_or(&dense as &dyn KvRows, |cache| cache);
        let call = Forward { shape: self.shape, params: self.params, q: inputs[0].view(), kv, cpu };
        let warmups = u32::from(repeat > 1);

        let mut outputs = Outputs::allocate(arena, &self.shape, self.dtype)?;
        let mut workspace = sizes.forward.allocate(arena)?;
        let samples_ns = timed(warmups, repeat, || kernel.forward(&call, &mut outputs, &mut workspace))?;
        drop(workspace);
        self.refuse_bad(&outputs)?;

        let backward = match sizes.backward {
            None => None,
            Some(size) => {
                let mut gradients = Gradients::allocate(arena, &self.shape, self.dtype)?;
                let mut workspace = size.allocate(arena)?;
                let (o, lse, grad_o) = (outputs.o.view(), &*outputs.lse, inputs[3].view());
                let call = Backward { forward: call, o, lse, grad_o };
                let samples_ns = timed(warmups, repeat, || kernel.backward(&call, &mut gradients, &mut workspace))?;
                refuse_bad_gradients(&gradients)?;
                Some(BackwardSolution { gradients, samples_ns })
            }
        };

        // Of what was given, whatever the cache made of it.
        let (rel_l2, checked_rows) = self.drift(&Forward { kv: &dense, ..call }, &outputs)?;
        Ok(Solution { outputs, samples_ns, warmups, backward, rel_l2, checked_rows })
    }

    /// Loads every tensor, converted to the type that is computed with.
    pub fn load_all(&self, file: &TensorFile, arena: &Arena) -> Result<Vec<Tensor>, Failure> {
        self.stored.iter().map(|&(name, ..)| self.load(file, name, arena)).collect()
    }

    /// Checks what a device wrote for `inputs`; its distance from the reference and the number of rows compared.
    pub fn check_forward(&self, inputs: &[Tensor], outputs: &Outputs, cpu: &Cpu) -> Result<(f64, usize), Failure> {
        self.refuse_bad(outputs)?;
        let kv = DenseKv::new(inputs[1].view(), inputs[2].view())?;
        let call = Forward { shape: self.shape, params: self.params, q: inputs[0].view(), kv: &kv, cpu };
        self.drift(&call, outputs)
    }

    fn drift(&self, call: &Forward<'_>, outputs: &Outputs) -> Result<(f64, usize), Failure> {
        let at = reference::sample_rows(&self.shape, CHECKED_QUERIES);
        let rel_l2 = reference::relative_error(&outputs.o.view(), &at, &reference::rows(call, &at));
        if !rel_l2.is_finite() {
            return Err(Failure::work(format!("drift from the f64 reference is {rel_l2}; nothing was written")));
        }
        Ok((rel_l2, at.len()))
    }

    fn refuse_bad(&self, outputs: &Outputs) -> Result<(), Failure> {
        refuse_non_finite("o", &outputs.o)?;
        self.refuse_wrong_lse(&outputs.lse)
    }

    /// Loads a tensor and converts it to the type that is computed with.
    fn load(&self, file: &TensorFile, name: &str, arena: &Arena) -> Result<Tensor, Failure> {
        let stored = file.load(name, arena, Label::Input)?;
        if stored.dtype() == self.dtype {
            return Ok(stored);
        }
        let (width, dtype) = (stored.dims()[3], self.dtype);
        let mut tensor = Tensor::zeros(arena, Label::Input, dtype, stored.dims())?;
        let mut row = vec![0.0; width];
        let sources = stored.bytes().chunks_exact(width * stored.dtype().bytes());
        for (source, target) in sources.zip(tensor.bytes_mut().chunks_exact_mut(width * dtype.bytes())) {
            stored.dtype().decode(source, &mut row);
            dtype.encode(&row, target);
        }
        match tensor.first_non_finite() {
            None => Ok(tensor),
            Some((index, _)) => Err(Failure::usage(format!(
                "tensor '{name}' holds a number at {index:?} that is too large for {dtype}; use --dtype bf16 or f32"
            ))),
        }
    }

    /// A log-sum-exp is finite, but `-inf` where the query sees no key.
    fn refuse_wrong_lse(&self, lse: &[f32]) -> Result<(), Failure> {
        let Shape { q_heads, q_len, kv_len, .. } = self.shape;
        for (row, &value) in lse.iter().enumerate() {
            let (head, i) = (row / q_len, row % q_len);
            let sees_nothing = self.params.visible(i, q_len, kv_len).is_empty();
            if !(value.is_finite() || sees_nothing && value == f32::NEG_INFINITY) {
                return Err(bad_result("lse", &[head / q_heads, head % q_heads, i], value));
            }
        }
        Ok(())
    }
}

/// Runs `pass` untimed `warmups` times, then `repeat` times; the times of the latter in nanoseconds.
fn timed(
    warmups: u32,
    repeat: u32,
    mut pass: impl FnMut() -> Result<(), AttentionError>,
) -> Result<Vec<u64>, AttentionError> {
    for _ in 0..warmups {
        pass()?;
    }
    let sample = |_| {
        let started = Instant::now();
        pass()?;
        Ok(started.elapsed().as_nanos() as u64)
    };
    (0..repeat).map(sample).collect()
}

/// Refuses gradients that are no numbers.
pub fn refuse_bad_gradients(gradients: &Gradients) -> Result<(), Failure> {
    let named = [("dq", &gradients.q), ("dk", &gradients.k), ("dv", &gradients.v)];
    named.into_iter().try_for_each(|(name, tensor)| refuse_non_finite(name, tensor))
}

fn refuse_non_finite(name: &str, tensor: &Tensor) -> Result<(), Failure> {
    tensor.first_non_finite().map_or(Ok(()), |(index, value)| Err(bad_result(name, &index, value)))
}

fn bad_result(name: &str, index: &[usize], value: f32) -> Failure {
    Failure::work(format!(
        "the result '{name}' holds {value} at {index:?}, so nothing was written; are the inputs or the scale too large?"
    ))
}
