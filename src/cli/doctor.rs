//! `kvsieve doctor`: what this machine offers, what is missing, and what to do about it.

mod memory;

use super::failure::Failure;
use super::output;
use crate::device::cpu::CpuInfo;
use crate::device::cuda::{Cache, Condition, Device, Limits, Nvrtc};
use crate::device::gpu::Gpu;
use crate::device::{Cpu, probe, simd::Isa};
use crate::experiment::kernels;
use crate::memory::os;
use crate::units;
use serde::Serialize;
use std::fmt::Write;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Nothing is changed and nothing has to be there: what is missing is named, with what would help.

Examples:
  kvsieve doctor
  kvsieve doctor --json -           for a bug report or a script
  kvsieve doctor --memory           who holds memory now
  kvsieve doctor --memory 1234      what one process holds, and what of it could be given back";

/// Say what this machine offers: CPU, memory, GPU, and what is missing
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Write JSON instead of the text, to standard output (-) or a file
    #[arg(long, value_name = "-|FILE")]
    json: Option<PathBuf>,
    /// NVRTC to try [default: KVSIEVE_NVRTC, else the first that is found]
    #[arg(long, value_name = "libnvrtc.so", conflicts_with = "memory")]
    nvrtc: Option<PathBuf>,
    /// Say who holds memory now, or what one process holds
    #[arg(long, value_name = "PID", num_args = 0..=1)]
    memory: Option<Option<u32>>,
}

#[derive(Serialize)]
struct Report {
    version: &'static str,
    git_rev: &'static str,
    git_dirty: bool,
    profile: &'static str,
    cpu: CpuInfo,
    isa_path: &'static str,
    /// Every path of this machine, fastest first; `KVSIEVE_ISA` forces one.
    isa_paths: Vec<&'static str>,
    /// Products of bf16 that the unit for them takes in the time of one multiply-add in f32, where there is one.
    bf16_gain: Option<f64>,
    threads: usize,
    memory: Memory,
    gpu: Gpu,
    cuda: Cuda,
    kernels: Kernels,
    /// Devices on which this build computes here.
    compute_devices: Vec<&'static str>,
}

/// What is there of what `--device cuda` needs, each tried.
#[derive(Serialize)]
struct Cuda {
    device: Tried<OpenGpu>,
    nvrtc: Tried<OpenNvrtc>,
    /// Clocks, temperature and power; not needed.
    nvml: Tried<OpenNvml>,
}

/// What was found, or why it was not; in JSON the fields of the one or `error`.
#[derive(Serialize)]
#[serde(untagged)]
enum Tried<T> {
    Found(T),
    Missing { error: String },
}

impl<T> From<Result<T, String>> for Tried<T> {
    fn from(tried: Result<T, String>) -> Self {
        tried.map_or_else(|error| Tried::Missing { error }, Tried::Found)
    }
}

#[derive(Serialize)]
struct OpenGpu {
    name: String,
    /// Compute capability, as `9.0`.
    capability: String,
    architecture: String,
    multiprocessors: usize,
    total_bytes: u64,
    free_bytes: u64,
    /// Memory of this process's context, where NVML tells.
    context_bytes: Option<u64>,
    l2_bytes: u64,
    /// Shared memory that one block may have.
    block_shared_bytes: usize,
    /// Version of the CUDA interface that the driver has.
    cuda_version: String,
}

#[derive(Serialize)]
struct OpenNvml {
    driver_version: Option<String>,
    #[serde(flatten)]
    condition: Condition,
}

#[derive(Serialize)]
struct OpenNvrtc {
    version: String,
    path: PathBuf,
}

impl Cuda {
    /// Opens the first GPU and loads NVRTC; what launches are planned for there too.
    fn probe(nvrtc: Option<&Path>) -> (Self, Option<Limits>) {
        let device = Device::open(0).map_err(|error| error.to_string());
        let nvml = device.as_ref().map_err(String::as_str).and_then(Device::nvml);
        let nvml = nvml
            .map_err(String::from)
            .map(|nvml| OpenNvml { driver_version: nvml.driver_version(), condition: nvml.condition() });
        let about = |device: &Device| OpenGpu {
            name: device.name().into(),
            capability: format!("{}.{}", device.limits().capability.0, device.limits().capability.1),
            architecture: device.architecture(),
            multiprocessors: device.limits().multiprocessors,
            total_bytes: device.total_bytes(),
            free_bytes: device.free_bytes(),
            context_bytes: device.context_bytes(),
            l2_bytes: device.l2_bytes(),
            block_shared_bytes: device.limits().block_shared_bytes,
            cuda_version: device.cuda_version(),
        };
        let nvrtc = Nvrtc::load(nvrtc).map(|nvrtc| OpenNvrtc { version: nvrtc.version(), path: nvrtc.path().into() });
        let cuda = Cuda {
            device: device.as_ref().map(about).map_err(Clone::clone).into(),
            nvrtc: nvrtc.map_err(|error| error.to_string()).into(),
            nvml: nvml.into(),
        };
        (cuda, device.ok().map(|device| *device.limits()))
    }
}

/// Compiled kernels on the disk.
#[derive(Serialize)]
struct Kernels {
    /// Where they are kept; `None` where the environment names no folder.
    folder: Option<PathBuf>,
    /// Variants that this build has for the GPU that is there, or for one of each architecture that some are kept for.
    architectures: Vec<Held>,
    /// Whether all variants for the GPU that is there are kept; `None` without a GPU or NVRTC.
    fits: Option<bool>,
}

/// Variants of this build for an architecture, by the NVRTC that is there.
#[derive(Serialize)]
struct Held {
    architecture: String,
    variants: usize,
    held: usize,
    held_bytes: u64,
}

impl Kernels {
    fn probe(device: Option<Limits>, nvrtc: Option<&str>) -> Self {
        let cache = Cache::default();
        let folder = cache.folder().map(PathBuf::from);
        let Some(version) = nvrtc.filter(|_| folder.as_ref().is_some_and(|folder| folder.is_dir())) else {
            return Kernels { folder, architectures: Vec::new(), fits: device.zip(nvrtc).map(|_| false) };
        };
        let held = |limits: Limits| {
            let (architecture, programs) = (limits.architecture(), kernels::programs(&limits));
            let bytes = programs.iter().filter_map(|program| cache.holds(version, program, &architecture));
            let (held, held_bytes) = bytes.fold((0, 0), |(held, sum), bytes| (held + 1, sum + bytes));
            Held { architecture, variants: programs.len(), held, held_bytes }
        };
        let others = Limits::known().filter(|limits| device.is_none_or(|here| here.capability != limits.capability));
        let here = device.map(held);
        let fits = here.as_ref().map(|here| here.held == here.variants);
        let others = others.map(held).filter(|other| other.held > 0);
        Kernels { folder, architectures: here.into_iter().chain(others).collect(), fits }
    }

    /// In words, a line for each architecture.
    fn lines(&self) -> Vec<String> {
        let Some(folder) = &self.folder else {
            return vec!["kept nowhere: KVSIEVE_CACHE names a folder for them".into()];
        };
        let mut lines = vec![folder.display().to_string()];
        lines.extend(self.architectures.iter().map(|Held { architecture, variants, held, held_bytes }| {
            format!("{architecture}: {held} of {variants} variants of this build, {}", units::bytes(*held_bytes))
        }));
        lines[0] += match self.fits {
            Some(true) => ": fits this GPU",
            Some(false) => ": the rest is compiled when it is used; 'kvsieve kernels build' does it before",
            None if self.architectures.is_empty() => ": nothing for this build",
            None => "",
        };
        lines
    }
}

/// Memory of the machine; `None` where the system does not tell.
#[derive(Serialize)]
struct Memory {
    total_bytes: Option<u64>,
    available_bytes: Option<u64>,
    default_limit_bytes: Option<u64>,
    /// Whether the peak of the resident set can be measured anew for each cell.
    os_peak_resets: bool,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    output::check_json(args.json.as_deref())?;
    if let Some(pid) = args.memory {
        return memory::run(pid, args.json.as_deref());
    }
    let cpu = Cpu::new(None)?;
    let machine = os::machine();
    let (cuda, limits) = Cuda::probe(args.nvrtc.as_deref());
    let nvrtc = match &cuda.nvrtc {
        Tried::Found(nvrtc) => Some(nvrtc.version.as_str()),
        Tried::Missing { .. } => None,
    };
    let kernels = Kernels::probe(limits, nvrtc);
    let mut compute_devices = vec!["cpu"];
    if let (Tried::Found(_), Tried::Found(_)) = (&cuda.device, &cuda.nvrtc) {
        compute_devices.push("cuda");
    }
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        git_rev: env!("KVSIEVE_GIT_REV"),
        git_dirty: env!("KVSIEVE_GIT_DIRTY") == "true",
        profile: env!("KVSIEVE_PROFILE"),
        cpu: CpuInfo::probe(),
        isa_path: cpu.isa().name(),
        isa_paths: Isa::available().map(Isa::name).collect(),
        bf16_gain: Isa::available().find_map(probe::bf16_gain),
        threads: cpu.threads(),
        memory: Memory {
            total_bytes: machine.map(|machine| machine.total_bytes),
            available_bytes: machine.map(|machine| machine.available_bytes),
            default_limit_bytes: os::default_limit_bytes(),
            os_peak_resets: os::reset_peak(),
        },
        gpu: Gpu::probe(),
        cuda,
        kernels,
        compute_devices,
    };
    match &args.json {
        None => output::print(&text(&report)),
        Some(target) => output::json(target, &report),
    }
}

/// What the open GPU says of itself.
fn opened(gpu: &OpenGpu, nvml: &Tried<OpenNvml>) -> Vec<(&'static str, String)> {
    let number = |value: Option<u32>, unit: &str| value.map(|value| format!("{value} {unit}"));
    let said = match nvml {
        Tried::Missing { error } => format!("{error}; clocks, temperature and the context's bytes stay unknown"),
        Tried::Found(OpenNvml { driver_version, condition }) => {
            let power = condition.power_w.map(|watts| format!("{watts:.0} W"));
            let clocks = [number(condition.sm_clock_mhz, "MHz"), number(condition.mem_clock_mhz, "MHz memory")];
            let rest = [number(condition.temperature_c, "°C"), power, Some(condition.throttle.join(", "))];
            let parts = [driver_version.as_ref().map(|version| format!("driver {version}"))];
            let parts = parts.into_iter().chain(clocks).chain(rest).flatten().filter(|part| !part.is_empty());
            parts.collect::<Vec<_>>().join(", ")
        }
    };
    let context = gpu.context_bytes.map_or(String::new(), |bytes| format!(", context {}", units::bytes(bytes)));
    vec![
        (
            "cuda:0",
            format!(
                "{}, compute capability {} ({}), {} multiprocessors, CUDA {}",
                gpu.name, gpu.capability, gpu.architecture, gpu.multiprocessors, gpu.cuda_version
            ),
        ),
        (
            "",
            format!(
                "{} of {} free{context}, L2 {}, {} of shared memory for a block",
                units::bytes(gpu.free_bytes),
                units::bytes(gpu.total_bytes),
                units::bytes(gpu.l2_bytes),
                units::bytes(gpu.block_shared_bytes as u64)
            ),
        ),
        ("nvml", said),
    ]
}

fn text(report: &Report) -> String {
    let Report { cpu, memory, gpu, .. } = report;
    let or_unknown = |bytes: Option<u64>| bytes.map_or("unknown (the system does not tell)".into(), units::bytes);
    let dirty = if report.git_dirty { ", with local changes" } else { "" };
    let slow = if report.profile == "release" { "" } else { "; times mean little, build with --release" };
    let peak = match memory.os_peak_resets {
        true => "yes: the arena's peak is checked against the system's",
        false => "no: the arena's peak is not checked against the system's (Linux has this switch)",
    };
    let found = |paths: &[PathBuf], missing: &str| match paths {
        [] => format!("not found; {missing}"),
        paths => paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join("\n                "),
    };
    let driver = match &gpu.driver_version {
        Some(version) => format!("{version} (/proc/driver/nvidia/version)"),
        None => "not found; for an NVIDIA GPU, install its driver (in a container: start it with --gpus all)".into(),
    };
    let used = match (&report.cuda.device, &report.cuda.nvrtc) {
        (Tried::Found(gpu), Tried::Found(nvrtc)) => {
            format!("{} by attend and run --device cuda; NVRTC {}", gpu.name, nvrtc.version)
        }
        (Tried::Missing { error }, Tried::Found(nvrtc)) => {
            format!("the CPU only: {error} (NVRTC {} loads)", nvrtc.version)
        }
        (_, Tried::Missing { error }) => format!("the CPU only: {error}"),
    };
    let opened = match &report.cuda.device {
        Tried::Found(gpu) => opened(gpu, &report.cuda.nvml),
        Tried::Missing { .. } => Vec::new(),
    };
    let lines = [
        ("kvsieve", format!("{} (git {}{dirty}), {} build{slow}", report.version, report.git_rev, report.profile)),
        ("", String::new()),
        ("cpu", cpu.model.clone()),
        ("cores", format!("{}, threads used: {}", cpu.cores, report.threads)),
        ("instructions", format!("{} (found: {})", report.isa_path, cpu.isa.join(", "))),
        ("paths", format!("{}; KVSIEVE_ISA forces one", report.isa_paths.join(", "))),
        (
            "bf16",
            report
                .bf16_gain
                .map_or("no unit for it".into(), |gain| format!("{gain:.1} products in the time of one in f32")),
        ),
        ("governor", cpu.governor.clone().unwrap_or_else(|| "unknown (the system does not tell)".into())),
        ("", String::new()),
        ("memory", or_unknown(memory.total_bytes)),
        ("available", or_unknown(memory.available_bytes)),
        ("limit", format!("{}, unless --limit-memory says otherwise", or_unknown(memory.default_limit_bytes))),
        ("peak resets", peak.into()),
        ("", String::new()),
        ("gpu", if gpu.devices.is_empty() { "none listed by a driver".into() } else { gpu.devices.join(", ") }),
        ("driver", driver),
        ("libcuda.so.1", found(&gpu.libcuda, "it comes with the driver; LD_LIBRARY_PATH is searched too")),
        ("nvrtc", found(&gpu.nvrtc, "pip install nvidia-cuda-nvrtc, or set CUDA_HOME")),
        ("cublas", found(&gpu.cublas, "naive on a GPU then uses products of its own; pip install nvidia-cublas")),
    ];
    let mut text = String::new();
    let kept = report.kernels.lines().into_iter().enumerate();
    let kept = kept.map(|(number, line)| (if number == 0 { "kernels" } else { "" }, line));
    for (name, value) in lines.into_iter().chain(kept).chain(opened).chain([("used", used)]) {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}", format!("{name:14}  {value}").trim_end());
    }
    text
}
