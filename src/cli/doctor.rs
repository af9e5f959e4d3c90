//! `kvsieve doctor`: what this machine offers, what is missing, and what to do about it.

use super::failure::Failure;
use super::{default_limit_bytes, output};
use kvsieve::device::cpu::CpuInfo;
use kvsieve::device::cuda::{Device, Nvrtc};
use kvsieve::device::gpu::Gpu;
use kvsieve::device::{Cpu, simd::Isa};
use kvsieve::memory::os;
use kvsieve::units;
use serde::Serialize;
use std::fmt::Write;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Nothing is changed and nothing has to be there: what is missing is named, with what would help.

Examples:
  kvsieve doctor
  kvsieve doctor --json -           for a bug report or a script";

/// Say what this machine offers: CPU, memory, GPU, and what is missing
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Write JSON instead of the text, to standard output (-) or a file
    #[arg(long, value_name = "-|FILE")]
    json: Option<PathBuf>,
    /// NVRTC to try [default: KVSIEVE_NVRTC, else the first that is found]
    #[arg(long, value_name = "libnvrtc.so")]
    nvrtc: Option<PathBuf>,
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
    threads: usize,
    memory: Memory,
    gpu: Gpu,
    cuda: Cuda,
    /// Devices on which this build computes here.
    compute_devices: Vec<&'static str>,
}

/// What is there of what `--device cuda` needs, each tried; the error where it is not.
#[derive(Serialize)]
struct Cuda {
    device: Result<OpenGpu, String>,
    nvrtc: Result<OpenNvrtc, String>,
}

#[derive(Serialize)]
struct OpenGpu {
    name: String,
    architecture: String,
    multiprocessors: usize,
    total_bytes: u64,
    free_bytes: u64,
}

#[derive(Serialize)]
struct OpenNvrtc {
    version: String,
    path: PathBuf,
}

impl Cuda {
    /// Opens the first GPU and loads NVRTC.
    fn probe(nvrtc: Option<&Path>) -> Self {
        let device = Device::open(0).map(|device| OpenGpu {
            name: device.name().into(),
            architecture: device.architecture(),
            multiprocessors: device.limits().multiprocessors,
            total_bytes: device.total_bytes(),
            free_bytes: device.free_bytes(),
        });
        let nvrtc = Nvrtc::load(nvrtc).map(|nvrtc| OpenNvrtc { version: nvrtc.version(), path: nvrtc.path().into() });
        Cuda { device: device.map_err(|error| error.to_string()), nvrtc: nvrtc.map_err(|error| error.to_string()) }
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
    let cpu = Cpu::new(None)?;
    let machine = os::machine();
    let cuda = Cuda::probe(args.nvrtc.as_deref());
    let mut compute_devices = vec!["cpu"];
    if cuda.device.is_ok() && cuda.nvrtc.is_ok() {
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
        threads: cpu.threads(),
        memory: Memory {
            total_bytes: machine.map(|machine| machine.total_bytes),
            available_bytes: machine.map(|machine| machine.available_bytes),
            default_limit_bytes: default_limit_bytes(),
            os_peak_resets: os::reset_peak(),
        },
        gpu: Gpu::probe(),
        cuda,
        compute_devices,
    };
    match &args.json {
        None => output::print(&text(&report)),
        Some(target) => output::json(target, &report),
    }
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
        (Ok(gpu), Ok(nvrtc)) => format!(
            "{} ({}, {} multiprocessors, {} of {} free) by attend --device cuda; NVRTC {}",
            gpu.name,
            gpu.architecture,
            gpu.multiprocessors,
            units::bytes(gpu.free_bytes),
            units::bytes(gpu.total_bytes),
            nvrtc.version
        ),
        (Err(error), Ok(nvrtc)) => format!("the CPU only: {error} (NVRTC {} loads)", nvrtc.version),
        (_, Err(error)) => format!("the CPU only: {error}"),
    };
    let lines = [
        ("kvsieve", format!("{} (git {}{dirty}), {} build{slow}", report.version, report.git_rev, report.profile)),
        ("", String::new()),
        ("cpu", cpu.model.clone()),
        ("cores", format!("{}, threads used: {}", cpu.cores, report.threads)),
        ("instructions", format!("{} (found: {})", report.isa_path, cpu.isa.join(", "))),
        ("paths", format!("{}; KVSIEVE_ISA forces one", report.isa_paths.join(", "))),
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
        ("used", used),
    ];
    let mut text = String::new();
    for (name, value) in lines {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}", format!("{name:14}  {value}").trim_end());
    }
    text
}
