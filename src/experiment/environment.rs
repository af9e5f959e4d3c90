//! Where and with what a run was made: `env.json`.

use super::engine::Engine;
use super::record::Worker;
use crate::device::cpu::CpuInfo;
use crate::memory::os;
use serde_json::{Value, json};

/// Git revision of the source that the binary was built from, with `-dirty` if it had changes.
pub fn revision() -> String {
    let dirty = if env!("KVSIEVE_GIT_DIRTY") == "true" { "-dirty" } else { "" };
    format!("{}{dirty}", env!("KVSIEVE_GIT_REV"))
}

/// This process, among others that share a run.
pub fn worker() -> Worker {
    let slurm = |name: &str| std::env::var(format!("SLURM_{name}")).ok();
    let of_array = || Some(format!("{}_{}", slurm("ARRAY_JOB_ID")?, slurm("ARRAY_TASK_ID")?));
    let process = std::process::id();
    let task = of_array().or_else(|| slurm("JOB_ID")).unwrap_or_else(|| process.to_string());
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_string();
    Worker { task, process, host, cpu: CpuInfo::probe().model }
}

/// The environment as one JSON object.
pub fn probe(engine: Engine<'_>, command: &str) -> Value {
    let cpu = engine.cpu();
    let info = CpuInfo::probe();
    let read = |path: &str| std::fs::read_to_string(path).ok().map(|text| text.trim().to_string());
    let machine = os::machine();
    json!({
        "tool": {
            "version": env!("CARGO_PKG_VERSION"),
            "git": revision(),
            "profile": env!("KVSIEVE_PROFILE"),
            "arch": std::env::consts::ARCH,
        },
        "machine": {
            "cpu": info.model,
            "cores": info.cores,
            "isa": info.isa,
            "governor": info.governor,
            "os": std::env::consts::OS,
            "kernel": read("/proc/sys/kernel/osrelease"),
            "ram_bytes": machine.map(|machine| machine.total_bytes),
            "available_bytes": machine.map(|machine| machine.available_bytes),
            "load_before": read("/proc/loadavg").and_then(|text| text.split(' ').next().map(str::to_string)),
        },
        "gpu": engine.gpu(),
        "run": {
            "device": engine.device().name(),
            "threads": cpu.threads(),
            "isa_path": engine.path(),
            "rng": "ChaCha8",
            "command": command,
            "started_at": humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string(),
        },
    })
}
