//! `attend --device cuda`: the pass on a GPU, with the memory that the GPU's arena counts and the GPU's own times.

use super::Args;
use super::pass::{BackwardSolution, Problem, Sizes, Solution, refuse_bad_gradients};
use super::report::Report;
use crate::attention::cuda::{
    BackwardInputs, BackwardPlan, BackwardResults, Inputs, Plan, Results, Scratch, cuda_kernel,
};
use crate::attention::{Gradients, Outputs};
use crate::cli::failure::Failure;
use crate::cli::hardware::Hardware;
use crate::device::Cpu;
use crate::device::cuda::{CudaError, DeviceBuffer, Runtime};
use crate::format::GpuRows;
use crate::memory::{Arena, Label};
use crate::named::Named;
use crate::tensor::file::TensorFile;
use crate::tensor::{DType, Tensor};

pub fn run(args: &Args, index: usize) -> Result<(), Failure> {
    args.check_files()?;
    let file = TensorFile::open(&args.input)?;
    let problem = args.problem(&file)?;
    let rows =
        GpuRows::new(problem.dtype, problem.kv_format.unwrap_or(problem.dtype.into())).map_err(Failure::usage)?;
    let name = args.kernel(&problem);
    let kernel = cuda_kernel(name)?;
    let name: Named = name.parse()?;
    let runtime = Runtime::open(index, args.compute.nvrtc.as_deref())?;
    runtime.sweep_l2()?;
    let device = runtime.device();
    let (shape, params, dtype, limits) = (&problem.shape, &problem.params, problem.dtype, device.limits());
    let forward = kernel.plan(shape, params, rows, limits)?;
    let backward = problem.backward.then(|| kernel.plan_backward(shape, params, dtype, limits)).transpose()?;
    let plans = Plans { rows, forward, backward };
    let sizes = plans.sizes(&problem);
    let limit_bytes = args.compute.limit_memory.unwrap_or(device.free_bytes());
    sizes.refuse_beyond(limit_bytes)?;

    let arena = Arena::with_limit(limit_bytes);
    if args.timeline.is_some() {
        arena.record_timeline();
    }
    let cpu = Cpu::new(args.compute.threads)?;
    let solution = plans.solve(&problem, &file, &runtime, &arena, &cpu, args.repeat)?;
    let hardware = Hardware::cuda(index, &runtime, plans.forward.gemm(&runtime));
    let report = Report::new(name.to_string(), &problem, &sizes, &solution, arena.usage(), hardware, limit_bytes);
    args.finish(&report, &problem, &solution, &arena)
}

/// What runs.
struct Plans {
    rows: GpuRows,
    forward: Plan,
    backward: Option<BackwardPlan>,
}

impl Plans {
    /// The GPU memory that [`Plans::solve`] takes, to the byte.
    fn sizes(&self, problem: &Problem) -> Sizes {
        let (shape, dtype) = (&problem.shape, problem.dtype);
        let [keys, values] = self.rows.lists_bytes(shape.batch * shape.kv_heads, shape.kv_len, shape.head_dim);
        let others = problem.stored.iter().filter(|(name, ..)| !["k", "v"].contains(name));
        let inputs = others.map(|&(_, dims, _)| Tensor::bytes_of(dtype, dims)).sum::<u64>() + (keys + values) as u64;
        let (forward, backward) = (self.forward.workspace, self.backward.as_ref().map(BackwardPlan::workspace));
        let passes = backward.map_or(0, |size| Gradients::bytes(shape, dtype) + size.bytes()).max(forward.bytes());
        Sizes { forward, backward, peak_bytes: inputs + Outputs::bytes(shape, dtype) + passes }
    }

    /// Copies the inputs to the GPU, runs the passes, copies the results back and checks them.
    fn solve(
        &self,
        problem: &Problem,
        file: &TensorFile,
        runtime: &Runtime,
        arena: &Arena,
        cpu: &Cpu,
        repeat: u32,
    ) -> Result<Solution, Failure> {
        let device = runtime.device();
        // The host's copies are not what is measured.
        let host = Arena::unlimited();
        let inputs = problem.load_all(file, &host)?;
        let mut buffers = Vec::new();
        for (index, tensor) in inputs.iter().enumerate() {
            let coded = match index {
                1 | 2 => self.rows.encode(index - 1, tensor),
                _ => None,
            };
            let bytes = coded.as_deref().unwrap_or(tensor.bytes());
            let mut buffer = device.alloc(arena, Label::Input, bytes.len() as u64)?;
            buffer.write(bytes)?;
            buffers.push(buffer);
        }
        let result = |bytes| unwritten(runtime, arena, bytes);
        let mut outputs = Outputs::allocate(&host, &problem.shape, problem.dtype)?;
        let (mut o, mut lse) = (result(outputs.o.bytes().len())?, result(outputs.lse.bytes() as usize)?);
        let (q, k, v) = (&buffers[0], &buffers[1], &buffers[2]);
        let mut scratch = self.forward.scratch(device, arena)?;
        let samples_ns = timed(repeat, &mut scratch, |scratch| {
            self.forward.forward(runtime, Inputs { q, k, v }, Results { o: &mut o, lse: &mut lse }, scratch)
        })?;
        drop(scratch);
        o.read(outputs.o.bytes_mut())?;
        let lse_bytes = DType::F32.bytes() * outputs.lse.len();
        let mut raw = vec![0; lse_bytes];
        lse.read(&mut raw)?;
        DType::F32.decode(&raw, &mut outputs.lse);
        let (rel_l2, checked_rows) = problem.check_forward(&inputs, &outputs, cpu)?;

        let backward = match &self.backward {
            None => None,
            Some(plan) => {
                let mut gradients = Gradients::allocate(&host, &problem.shape, problem.dtype)?;
                let mut grad_q = result(gradients.q.bytes().len())?;
                let mut grad_k = result(gradients.k.bytes().len())?;
                let mut grad_v = result(gradients.v.bytes().len())?;
                let call = BackwardInputs { q, k, v, o: &o, lse: &lse, grad_o: &buffers[3] };
                let mut scratch = plan.scratch(device, arena)?;
                let samples_ns = timed(repeat, &mut scratch, |scratch| {
                    let results = BackwardResults { q: &mut grad_q, k: &mut grad_k, v: &mut grad_v };
                    plan.run(runtime, call, results, scratch)
                })?;
                grad_q.read(gradients.q.bytes_mut())?;
                grad_k.read(gradients.k.bytes_mut())?;
                grad_v.read(gradients.v.bytes_mut())?;
                refuse_bad_gradients(&gradients)?;
                Some(BackwardSolution { gradients, samples_ns })
            }
        };
        Ok(Solution { outputs, samples_ns, warmups: 1, backward, rel_l2, checked_rows })
    }
}

/// Memory for a result. One that no kernel wrote must not look like one.
fn unwritten(runtime: &Runtime, arena: &Arena, bytes: usize) -> Result<DeviceBuffer, CudaError> {
    let mut buffer = runtime.device().alloc(arena, Label::Activations, bytes as u64)?;
    buffer.write(&vec![0xff; bytes])?;
    Ok(buffer)
}

/// The GPU's times of `repeat` passes behind one that finds kernels and libraries cold, in nanoseconds.
fn timed(
    repeat: u32,
    scratch: &mut Scratch,
    mut pass: impl FnMut(&mut Scratch) -> Result<u64, CudaError>,
) -> Result<Vec<u64>, CudaError> {
    pass(scratch)?;
    (0..repeat).map(|_| pass(scratch)).collect()
}
