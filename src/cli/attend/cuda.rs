//! `attend --device cuda`: the pass on a GPU, with the memory that the GPU's arena counts and the GPU's own times.

use super::Args;
use super::pass::{Problem, Sizes, Solution};
use super::report::{Place, Report};
use crate::cli::failure::Failure;
use kvsieve::attention::cuda::{CudaKernel, Plan};
use kvsieve::attention::{AttentionError, Outputs};
use kvsieve::device::Cpu;
use kvsieve::device::cuda::{Device, Nvrtc, Operands, Problem as DeviceProblem, build};
use kvsieve::memory::{Arena, Label};
use kvsieve::tensor::file::TensorFile;
use kvsieve::tensor::{DType, Tensor};

pub fn run(args: &Args, index: usize) -> Result<(), Failure> {
    let kernel = CudaKernel::named(&args.kernel)?;
    let device = Device::open(index)?;
    let nvrtc = Nvrtc::load(args.nvrtc.as_deref())?;
    args.check_files()?;
    let file = TensorFile::open(&args.input)?;
    let problem = args.problem(&file)?;
    if problem.backward {
        let (what, instead) = ("backward pass on CUDA", "--device cpu");
        return Err(AttentionError::Unsupported { kernel: kernel.name(), what, instead }.into());
    }
    let plan = Plan::new(kernel, &problem.shape, &problem.params, problem.dtype, device.multiprocessors())?;
    let sizes = sizes(&problem, &plan);
    let limit_bytes = args.compute.limit_memory.unwrap_or(device.free_bytes());
    sizes.refuse_beyond(limit_bytes)?;

    let arena = Arena::with_limit(limit_bytes);
    if args.timeline.is_some() {
        arena.record_timeline();
    }
    let cpu = Cpu::new(args.compute.threads)?;
    let solution = solve(&problem, &plan, &file, &Gpu { device: &device, nvrtc: &nvrtc, arena: &arena }, &cpu, args)?;
    let place = Place {
        device: format!("cuda:{index}"),
        isa_path: format!("{}, {}, NVRTC {}", device.name(), device.architecture(), nvrtc.version()),
        threads: None,
    };
    let report = Report::new(kernel.name().into(), &problem, &sizes, &solution, arena.usage(), place, limit_bytes);
    args.finish(&report, &problem, &solution, &arena)
}

/// Where a pass runs.
struct Gpu<'a> {
    device: &'a Device,
    nvrtc: &'a Nvrtc,
    arena: &'a Arena,
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
    gpu: &Gpu<'_>,
    cpu: &Cpu,
    args: &Args,
) -> Result<Solution, Failure> {
    let Gpu { device, nvrtc, arena } = *gpu;
    // The host's copies are not what is measured.
    let host = Arena::unlimited();
    let inputs = problem.load_all(file, &host)?;
    let (code, _) = build(nvrtc, &plan.program, &device.architecture())?;
    let module = device.load(code, &plan.launches)?;

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
    let mut scores = device.alloc(arena, Label::Scores, 4 * plan.workspace.scores as u64)?;
    let mut partials = device.alloc(arena, Label::Workspace, 4 * plan.workspace.scratch as u64)?;
    let mut operands = Operands {
        q: &buffers[0],
        k: &buffers[1],
        v: &buffers[2],
        o: &mut o,
        lse: &mut lse,
        scores: &mut scores,
        partials: &mut partials,
    };
    let on_device = DeviceProblem::new(&plan.extents, &mut operands)?;
    let warmups = u32::from(args.repeat > 1);
    let mut samples_ns = Vec::new();
    for pass in 0..warmups + args.repeat {
        let time_ns = device.run(&module, &plan.launches, &on_device)?;
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
