//! `kvsieve doctor --memory [PID]`: who holds memory now, what of it could be given back, and what to do first.

use crate::cli::failure::Failure;
use crate::cli::output;
use crate::cli::plan::text::wrapped;
use crate::device::cuda::{Device, GpuProcess, Nvml};
use crate::memory::os::{self, Held};
use crate::units::bytes;
use serde::Serialize;
use std::path::Path;

/// What the machine says.
#[derive(Serialize)]
struct Report {
    total_bytes: Option<u64>,
    available_bytes: Option<u64>,
    /// The process that was named, or those that hold most.
    processes: Vec<Process>,
    /// The first GPU, where there is one.
    gpu: Option<Gpu>,
    /// What to do first.
    advice: Vec<String>,
}

#[derive(Serialize)]
struct Process {
    pid: u32,
    name: String,
    #[serde(flatten)]
    held: Held,
}

#[derive(Serialize)]
struct Gpu {
    name: String,
    total_bytes: u64,
    free_bytes: u64,
    /// Who computes on it, as NVML tells.
    processes: Vec<GpuProcess>,
}

/// Processes that are listed where none is named.
const LISTED: usize = 8;

pub fn run(pid: Option<u32>, json: Option<&Path>) -> Result<(), Failure> {
    let machine = os::machine();
    let processes = match pid {
        Some(pid) => vec![process(pid).ok_or_else(|| {
            Failure::usage(format!("--memory {pid}: there is no such process, or it belongs to somebody else"))
        })?],
        None => largest(),
    };
    let device = Device::open(0).ok();
    let gpu = device.map(|device| Gpu {
        name: device.name().into(),
        total_bytes: device.total_bytes(),
        free_bytes: device.free_bytes(),
        processes: device.nvml().map(Nvml::processes).unwrap_or_default(),
    });
    let advice = advice(&processes, gpu.as_ref());
    let report = Report {
        total_bytes: machine.map(|machine| machine.total_bytes),
        available_bytes: machine.map(|machine| machine.available_bytes),
        processes,
        gpu,
        advice,
    };
    match json {
        Some(target) => output::json(target, &report),
        None => output::print(&text(&report)),
    }
}

fn process(pid: u32) -> Option<Process> {
    Some(Process { pid, name: name(pid)?, held: os::held(pid)? })
}

fn name(pid: u32) -> Option<String> {
    Some(std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim().to_string())
}

/// The processes that hold most, as far as the system tells.
fn largest() -> Vec<Process> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut processes: Vec<Process> = pids.filter_map(process).collect();
    processes.sort_by_key(|process| std::cmp::Reverse(process.held.proportional_bytes));
    processes.truncate(LISTED);
    processes
}

fn advice(processes: &[Process], gpu: Option<&Gpu>) -> Vec<String> {
    let mut advice = Vec::new();
    if let Some(most) = processes.first() {
        let Process { pid, name, held } = most;
        advice.push(format!(
            "first look at {name} ({pid}): it could give back {} by itself or by ending; another {} the system takes when it needs \
             them: clean pages of files, and pages that it gave up",
            bytes(held.anonymous_bytes.saturating_sub(held.lazily_free_bytes)),
            bytes(held.clean_bytes + held.lazily_free_bytes)
        ));
        if held.swapped_bytes > 0 {
            advice.push(format!(
                "{} of it are swapped out: what touches them waits for the disk",
                bytes(held.swapped_bytes)
            ));
        }
    }
    if let Some(gpu) = gpu {
        advice.push(format!(
            "on the GPU only the end of a process, or its allocator (`torch.cuda.empty_cache()`), gives memory back; {} of {} are free",
            bytes(gpu.free_bytes),
            bytes(gpu.total_bytes)
        ));
    }
    advice.push("what a model would need: kvsieve plan --model MODEL --gpu here".into());
    advice
}

fn text(report: &Report) -> String {
    let or_unknown = |bytes_of: Option<u64>| bytes_of.map_or("unknown".into(), bytes);
    let mut text =
        format!("memory      {}, {} available\n", or_unknown(report.total_bytes), or_unknown(report.available_bytes));
    if let Some(gpu) = &report.gpu {
        text += &format!("gpu         {}: {} of {} free\n", gpu.name, bytes(gpu.free_bytes), bytes(gpu.total_bytes));
        for GpuProcess { pid, used_bytes } in &gpu.processes {
            let name = name(*pid).unwrap_or_default();
            text += &format!("{pid:8} {:>9} on the GPU  {name}\n", or_unknown(*used_bytes));
        }
    }
    text += "\n     PID  resident  anonymous  huge pages  of files     clean   swapped\n";
    for Process { pid, name, held } in &report.processes {
        let columns = [
            held.resident_bytes,
            held.anonymous_bytes,
            held.huge_bytes,
            held.file_bytes,
            held.clean_bytes,
            held.swapped_bytes,
        ];
        let [resident, anonymous, huge, file, clean, swapped] = columns.map(bytes);
        text +=
            &format!("{pid:8} {resident:>9} {anonymous:>10} {huge:>11} {file:>9} {clean:>9} {swapped:>9}  {name}\n");
    }
    text.push('\n');
    report.advice.iter().for_each(|line| text += &wrapped(line, ""));
    text
}
