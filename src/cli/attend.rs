//! `kvsieve attend`: attention over the tensors of a file, timed, counted, and checked against the f64 reference.

mod cuda;
mod pass;
mod ranks;
mod report;

use super::failure::Failure;
use super::hardware::Hardware;
use super::{Compute, output};
use crate::attention::{self, AttentionError, Gradients, Outputs, Params, Shape};
use crate::format::KvFormat;
use crate::memory::Arena;
use crate::named::Named;
use crate::ranks::Asked;
use crate::tensor::file::{self, Output, TensorFile};
use crate::tensor::{DType, Tensor};
use crate::workload::looks_swapped;
use pass::{Problem, Solution};
use report::Report;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Tensors: the input is a safetensors file (F32, F16 or BF16) with q [B, Hq, Lq, D] and k, v [B, Hkv, Lk, D], where Hq \
is a multiple of Hkv and D at most 256; with --backward also do [B, Hq, Lq, D]. The output holds o in the input's \
type (or --dtype), lse [B, Hq, Lq] in F32 (natural log), and with --backward dq, dk and dv.\n\n\
Times: with --repeat above 1, and always with --device cuda, one untimed pass warms up before the timed ones. The time of a backward pass is its \
own, without the forward pass.\n\n\
With --device cuda the kernels are naive, tiled and decode (any type; D to 256, naive any), and hopper (bf16 or f16, D \
64, 128 or 256, compute capability 9.0: H100, H200); gradients are those of naive, tiled and hopper (D 64 or 128). naive \
has its matrix products from cuBLAS if that is found. Memory is the GPU's, and times are the GPU's own, each behind a cold L2. Gradients of \
tiled and hopper may differ in their last bits from run to run there; tiled:deterministic=true makes them the same every \
time.

\
Drift is the relative L2 distance of o from the f64 reference over the input's own keys and values, on up to 64 queries of \
each head; with --kv-format the loss of the format is part of it.\n\n\
Examples:
  kvsieve attend --input in.safetensors --output out.safetensors --causal
  kvsieve attend --input in.safetensors --output out.safetensors --kernel naive --repeat 5 --json -
  kvsieve attend --input in.safetensors --output out.safetensors --kernel tiled:br=32 --dtype bf16
  kvsieve attend --input in.safetensors --output out.safetensors --kernel decode --kv-format int4:group=32
  kvsieve attend --input in.safetensors --output out.safetensors --causal --backward
  kvsieve attend --input in.safetensors --output out.safetensors --causal --ranks ring:2 --backward";

/// Compute attention over your own tensors; measure time, memory and drift
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// File with q, k and v (and do)
    #[arg(long, value_name = "FILE.safetensors")]
    input: PathBuf,
    /// File to write: o and lse (and dq, dk, dv)
    #[arg(long, value_name = "FILE.safetensors")]
    output: PathBuf,
    /// Kernel, perhaps with parameters: reference, naive, tiled[:br=..,bc=..], decode (see `kvsieve list kernels`)
    /// [default: decode for up to 8 queries, else tiled]
    #[arg(long, value_name = "NAME[:key=value,...]")]
    kernel: Option<String>,
    /// A query sees no later key: query i sees keys j <= i + Lk - Lq
    #[arg(long)]
    causal: bool,
    /// A query sees its own key and the W-1 before it, and no later one
    #[arg(long, value_name = "W")]
    window: Option<usize>,
    /// Soft-cap of the logits, C * tanh(logit / C): after the scale, before the mask
    #[arg(long, value_name = "C")]
    softcap: Option<f32>,
    /// Factor of the inner products [default: 1/sqrt(D)]
    #[arg(long, value_name = "S")]
    scale: Option<f32>,
    /// Convert the inputs to this type after loading [default: the file's]
    #[arg(long, value_name = "f32|bf16|f16")]
    dtype: Option<DType>,
    /// Read keys and values from a cache that keeps them so: a format, or k=FORMAT,v=FORMAT (see `kvsieve list formats`)
    /// [default: from the tensors]
    #[arg(long, value_name = "FORMAT", conflicts_with = "backward")]
    kv_format: Option<KvFormat>,
    /// Share attention out: ring:N or tree:N over N threads of this process, each with its own memory; ring or tree over the
    /// processes that mpirun started (docs/ranks.md). --threads are those of each rank [default: all cores, shared]
    #[arg(long, value_name = "ring|tree[:N]", conflicts_with_all = ["kernel", "dtype", "kv_format", "timeline"])]
    ranks: Option<Asked>,
    /// Also compute the gradients dq, dk and dv (kernels naive and tiled; over ranks those of a ring)
    #[arg(long)]
    backward: bool,
    #[command(flatten)]
    compute: Compute,
    /// Timed passes
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000), help_heading = "What is reported")]
    repeat: u32,
    /// Write every allocation and release of memory, in order, as JSON
    #[arg(long, value_name = "FILE.json", help_heading = "What is reported")]
    timeline: Option<PathBuf>,
    /// Write the measurements as JSON instead of the summary, to standard output (-) or a file
    #[arg(long, value_name = "-|FILE", help_heading = "What is reported")]
    json: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    if let Some(index) = args.compute.cuda() {
        return match args.ranks {
            None => cuda::run(args, index),
            Some(_) => Err(Failure::usage("--ranks is not available with --device cuda; leave one of them out".into())),
        };
    }
    if let Some(asked) = args.ranks {
        return ranks::run(args, asked);
    }
    let cpu = args.compute.cpu()?;
    args.check_files()?;
    let file = TensorFile::open(&args.input)?;
    let problem = args.problem(&file)?;
    let name = args.kernel(&problem);
    let kernel = attention::kernel(name)?;
    let name: Named = name.parse()?;
    let sizes = problem.sizes(&*kernel, cpu.threads())?;

    let limit_bytes = args.compute.limit_bytes();
    sizes.refuse_beyond(limit_bytes)?;
    let arena = Arena::with_limit(limit_bytes);
    if args.timeline.is_some() {
        arena.record_timeline();
    }
    let solution = problem.solve(&*kernel, &sizes, &file, &arena, &cpu, args.repeat)?;
    let hardware = Hardware::cpu(&cpu);
    let report = Report::new(name.to_string(), &problem, &sizes, &solution, arena.usage(), hardware, limit_bytes);
    args.finish(&report, &problem, &solution, &arena)
}

impl Args {
    /// Writes everything that was asked for.
    fn finish(&self, report: &Report, problem: &Problem, solution: &Solution, arena: &Arena) -> Result<(), Failure> {
        write(&self.output, &problem.shape, solution)?;
        if let Some(timeline) = &self.timeline {
            output::json(timeline, &arena.timeline())?;
        }
        match &self.json {
            Some(target) => output::json(target, report),
            None => output::print(&report.summary(&self.output)),
        }
    }

    /// The kernel that is asked for, or the one that fits.
    fn kernel(&self, problem: &Problem) -> &str {
        self.kernel.as_deref().unwrap_or_else(|| attention::fitting(&problem.shape, problem.backward))
    }

    fn check_files(&self) -> Result<(), Failure> {
        let json = self.json.as_deref().filter(|target| !output::is_stdout(target));
        let optional = [("--timeline", self.timeline.as_deref()), ("--json", json)];
        let mut writes: Vec<(&str, &Path)> = vec![("--output", &self.output)];
        writes.extend(optional.into_iter().filter_map(|(option, path)| Some((option, path?))));
        output::check_files(&[("--input", &self.input)], &writes)
    }

    /// What the file and the options ask for, checked without reading a tensor.
    fn problem(&self, file: &TensorFile) -> Result<Problem, Failure> {
        let names: &[&'static str] = if self.backward { &["q", "k", "v", "do"] } else { &["q", "k", "v"] };
        let mut stored = Vec::new();
        for &name in names {
            let (dims, dtype) = file.describe(name)?;
            stored.push((name, dims, dtype));
        }
        let dims = |index: usize| stored[index].1;
        let shape = Shape::of(dims(0), dims(1), dims(2))?;
        output::warn(looks_swapped(shape.kv_heads, shape.kv_len).as_slice());
        if self.backward && dims(3) != shape.q_dims() {
            return Err(AttentionError::Shape(format!(
                "do is {:?} and q is {:?}; they must have the same shape",
                dims(3),
                dims(0)
            ))
            .into());
        }
        let dtype = match self.dtype {
            Some(dtype) => dtype,
            None if stored.iter().all(|tensor| tensor.2 == stored[0].2) => stored[0].2,
            None => {
                let found: Vec<_> = stored.iter().map(|(name, _, dtype)| format!("{name} is {dtype}")).collect();
                let found = found.join(", ");
                return Err(Failure::usage(format!("{found}; give --dtype f32, bf16 or f16 to make them one type")));
            }
        };
        let default = Params::new(shape.head_dim, self.causal);
        let scale = self.scale.unwrap_or(default.scale);
        let params = Params { scale, softcap: self.softcap, window: self.window, ..default };
        params.check()?;
        self.kv_format.map_or(Ok(()), |format| format.check(shape.head_dim, shape.kv_len))?;
        Ok(Problem { shape, params, dtype, backward: self.backward, kv_format: self.kv_format, stored })
    }
}

/// Writes the output file.
fn write(path: &Path, shape: &Shape, solution: &Solution) -> Result<(), Failure> {
    write_tensors(path, shape, &solution.outputs, solution.backward.as_ref().map(|backward| &backward.gradients))
}

/// The same of what ranks computed.
fn write_tensors(path: &Path, shape: &Shape, results: &Outputs, gradients: Option<&Gradients>) -> Result<(), Failure> {
    let lse_dims = vec![shape.batch, shape.q_heads, shape.q_len];
    let mut outputs = vec![Output::tensor("o", &results.o), Output::f32("lse", lse_dims, &results.lse)];
    if let Some(gradients) = gradients {
        let named: [(&str, &Tensor); 3] = [("dq", &gradients.q), ("dk", &gradients.k), ("dv", &gradients.v)];
        outputs.extend(named.map(|(name, tensor)| Output::tensor(name, tensor)));
    }
    Ok(file::write(path, &outputs)?)
}
