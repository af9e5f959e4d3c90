//! Where something ran, as reports say it.

use crate::device::Cpu;
use crate::device::cuda::Runtime;
use serde::Serialize;
use std::fmt;

/// Where something ran.
#[derive(Serialize)]
pub struct Hardware {
    /// As `--device` names it.
    pub device: String,
    /// Threads of the CPU; `None` on a GPU.
    pub threads: Option<usize>,
    /// Vector instructions of the CPU; product, architecture and compiler of a GPU.
    pub isa_path: String,
}

impl Hardware {
    /// The CPU.
    pub fn cpu(cpu: &Cpu) -> Self {
        Hardware { device: "cpu".into(), threads: Some(cpu.threads()), isa_path: cpu.isa().name().into() }
    }

    /// GPU `index`, with matrix products as `products` says, where it is to be said.
    pub fn cuda(index: usize, runtime: &Runtime, products: Option<String>) -> Self {
        let (device, nvrtc) = (runtime.device(), runtime.nvrtc().version());
        let products = products.map_or(String::new(), |products| format!(", {products}"));
        let isa_path = format!("{}, {}, NVRTC {nvrtc}{products}", device.name(), device.architecture());
        Hardware { device: format!("cuda:{index}"), threads: None, isa_path }
    }
}

impl fmt::Display for Hardware {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let threads = self.threads.map_or(String::new(), |threads| format!(", threads: {threads}"));
        write!(formatter, "{} ({}){threads}", self.device, self.isa_path)
    }
}
