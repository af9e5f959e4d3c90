//! `attend --device cuda`: the pass on a GPU, with the memory that the GPU's arena counts and the GPU's own times.

use super::Args;
use super::pass::{Problem, Sizes, Solution};
use super::report::{Place, Report};
use crate::cli::failure::Failure;
use kvsieve::attention::cuda::{Inputs, Plan, Results, cuda_kernel};
use kvsieve::attention::{AttentionError, Outputs};
use kvsieve::device::Cpu;
use kvsieve::device::cuda::Runtime;
use kvsieve::memory::{Arena, Label};
use kvsieve::tensor::file::TensorFile;
use kvsieve::tensor::{DType, Tensor};

pub fn run(args: &Args, index: usize) -> Result<(), Failure> {
    let kernel = cuda_kernel(&args.kernel)?;
    let runtime = Runtime::open(index, args.nvrtc.as_deref())?;
    let device = runtime.device();
    args.check_files()?;
    let file = TensorFile::open(&args.input)?;
    let problem = args.problem(&file)?;
    if problem.backward {
        let (what, instead) = ("backward pass on CUDA", "--device cpu");
        return Err(AttentionError::Unsupported { kernel: kernel.name(), what, instead }.into());
    }
    let plan = kernel.plan(&problem.shape, &problem.params, problem.dtype, device.limits())?;
    let sizes = sizes(&problem, &plan);
    let limit_bytes = args.compute.limit_memory.unwrap_or(device.free_bytes());
    sizes.refuse_beyond(limit_bytes)?;

    let arena = Arena::with_limit(limit_bytes);
    if args.timeline.is_some() {
        arena.record_timeline();
    }
    let cpu = Cpu::new(args.compute.threads)?;
    let solution = solve(&problem, &plan, &file, &runtime, &arena, &cpu, args)?;
    let place = Place {
        device: format!("cuda:{index}"),
        isa_path: format!("{}, {}, NVRTC {}", device.name(), device.architecture(), runtime.nvrtc().version()),
        threads: None,
    };
    let report = Report::new(kernel.name().into(), &problem, &sizes, &solution, arena.usage(), place, limit_bytes);
    args.finish(&report, &problem, &solution, &arena)
}

/// The GPU memory that [`solve`] takes, to the byte.
fn sizes(problem: &Problem, plan: &Plan) -> Sizes {
    let inputs: u64 = problem.stored.iter().map(|&(_, dims, _)| Tensor::bytes_of(problem.dtype, dims)).sum();
    let peak_bytes = inputs + Outputs::bytes(&problem.shape, problem.dtype) + plan.workspace.bytes();
    Sizes { forward: plan.workspace, backward: None, peak_bytes }
}

/// Copies the inputs to the GPU, runs the passes, copies the results back and checks them.
fn solve(
    problem: &Problem,
    plan: &Plan,
    file: &TensorFile,
    runtime: &Runtime,
    arena: &Arena,
    cpu: &Cpu,
    args: &Args,
) -> Result<Solution, Failure> {
    let device = runtime.device();
    // The host's copies are not what is measured.
    let host = Arena::unlimited();
    let inputs = problem.load_all(file, &host)?;

    let mut buffers = Vec::new();
    for tensor in &inputs {
        let mut buffer = device.alloc(arena, Label::Input, tensor.bytes().len() as u64)?;
        buffer.write(tensor.bytes())?;
        buffers.push(buffer);
    }
    let mut outputs = Outputs::allocate(&host, &problem.shape, problem.dtype)?;
    let mut o = device.alloc(arena, Label::Activations, outputs.o.bytes().len() as u64)?;
    let mut lse = device.alloc(arena, Label::Activations, outputs.lse.bytes())?;
    // A result that no kernel wrote must not look like one.
    o.write(&vec![0xff; outputs.o.bytes().len()])?;
    lse.write(&vec![0xff; outputs.lse.bytes() as usize])?;
    let mut scratch = plan.scratch(device, arena)?;
    let inputs_there = Inputs { q: &buffers[0], k: &buffers[1], v: &buffers[2] };
    let warmups = u32::from(args.repeat > 1);
    let mut samples_ns = Vec::new();
    for pass in 0..warmups + args.repeat {
        let time_ns = plan.forward(runtime, inputs_there, Results { o: &mut o, lse: &mut lse }, &mut scratch)?;
        if pass >= warmups {
            samples_ns.push(time_ns);
        }
    }
    o.read(outputs.o.bytes_mut())?;
    let lse_bytes = DType::F32.bytes() * outputs.lse.len();
    let mut raw = vec![0; lse_bytes];
    lse.read(&mut raw)?;
    DType::F32.decode(&raw, &mut outputs.lse);
    let (rel_l2, checked_rows) = problem.check_forward(&inputs, &outputs, cpu)?;
    Ok(Solution { outputs, samples_ns, warmups, backward: None, rel_l2, checked_rows })
}
