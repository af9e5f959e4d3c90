//! Where the cells of a run are measured: on the CPU, or on a GPU with the CPU beside it.
//!
//! The host makes the inputs and knows the truth in either case. What an [`Engine`] answers is what differs: whose memory
//! the arena counts, where the inputs lie, who else is asked about memory, and the names that go into records.

use super::cell::{Cell, Device};
use super::measure::{Implementation, cuda};
use crate::attention::kernel;
use crate::device::Cpu;
use crate::device::cuda::{Condition, CudaError, Limits, Runtime};
use crate::memory::{Arena, ArenaError, os};
use crate::policy::Registry;
use crate::workload::{Extents, Workload, WorkloadError};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

/// Why a GPU evaluates nothing.
pub const MODELS_ON_CPU: &str = "models run on the CPU only";

/// A GPU that experiments run on. A kernel's fault ends its context, and with it all that is in its memory; then it is
/// opened anew, so the runtime is borrowed from here for each turn.
pub struct Gpu {
    /// Threads that make inputs and compute what is true.
    pub cpu: Cpu,
    /// `None` when the GPU was lost.
    runtime: RefCell<Option<Rc<Runtime>>>,
    limits: Limits,
    path: String,
}

impl Gpu {
    /// Opens GPU `index` for measurements: every timed pass begins with a cold L2.
    ///
    /// # Errors
    /// As [`Runtime::open`] and [`Runtime::sweep_l2`].
    pub fn open(index: usize, nvrtc: Option<&Path>, cpu: Cpu) -> Result<Self, CudaError> {
        let runtime = Runtime::open(index, nvrtc)?;
        runtime.sweep_l2()?;
        let (limits, nvrtc) = (*runtime.device().limits(), runtime.nvrtc().version());
        let path = format!("{}, {}, NVRTC {nvrtc}", runtime.device().name(), runtime.device().architecture());
        Ok(Gpu { cpu, runtime: RefCell::new(Some(Rc::new(runtime))), limits, path })
    }

    /// The GPU and its compiler.
    ///
    /// # Errors
    /// [`CudaError::Lost`] after `Gpu::reopen` has failed.
    pub fn runtime(&self) -> Result<Rc<Runtime>, CudaError> {
        self.runtime.borrow().clone().ok_or_else(|| CudaError::Lost("it was given up before".into()))
    }

    /// Opens it with a new context after a failure that [`CudaError::is_fatal`]. Nothing of the old one may be left: no
    /// inputs, and no runtime that was borrowed.
    ///
    /// # Errors
    /// [`CudaError::Lost`] when it does not open, or does not compute.
    fn reopen(&self) -> Result<(), CudaError> {
        let old = self.runtime()?;
        self.runtime.take();
        let old = Rc::try_unwrap(old).map_err(|_| CudaError::Lost("a trial still uses it".into()))?;
        let lost = |error: CudaError| match error {
            CudaError::Lost(_) => error,
            error => CudaError::Lost(error.to_string()),
        };
        let new = old.reopen()?;
        // A context that opens may still not compute: the first pass is of nothing but the read before it.
        new.sweep_l2().and_then(|()| new.device().timed(|| Ok(()))).map_err(lost)?;
        *self.runtime.borrow_mut() = Some(Rc::new(new));
        Ok(())
    }
}

/// Where a run's cells are measured.
#[derive(Clone, Copy)]
pub enum Engine<'a> {
    /// On the CPU.
    Cpu(&'a Cpu),
    /// On a GPU.
    Cuda(&'a Gpu),
}

impl<'a> From<&'a Cpu> for Engine<'a> {
    fn from(cpu: &'a Cpu) -> Self {
        Engine::Cpu(cpu)
    }
}

impl<'a> From<&'a Gpu> for Engine<'a> {
    fn from(gpu: &'a Gpu) -> Self {
        Engine::Cuda(gpu)
    }
}

/// The inputs of some cells, where their device reads them.
pub struct Inputs {
    /// Counts the device's memory: the inputs, and what trials take.
    pub arena: Arena,
    /// The tensors.
    pub tensors: Tensors,
}

/// The tensors of [`Inputs`].
pub enum Tensors {
    /// In the host's memory.
    Host(Workload),
    /// In a GPU's memory.
    Gpu(cuda::Inputs),
}

impl Inputs {
    /// The tensors in the host's memory; `None` for blank ones of a GPU.
    pub fn workload(&self) -> Option<&Workload> {
        match &self.tensors {
            Tensors::Host(workload) => Some(workload),
            Tensors::Gpu(inputs) => inputs.host.as_ref(),
        }
    }
}

/// Why there are no inputs.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// They cannot be made.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// The host has no room to make them for a GPU.
    #[error("on the host: {0}")]
    Host(ArenaError),
    /// The GPU does not take them.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// An arena for what the host keeps for a GPU: not measured, and no reason for the host to be killed.
pub(super) fn host_arena() -> Arena {
    Arena::with_limit(os::default_limit_bytes().unwrap_or(u64::MAX))
}

/// Inputs that the host made; its own lack of memory is not the GPU's.
fn host_inputs(made: Result<Workload, WorkloadError>) -> Result<Workload, InputError> {
    made.map_err(|error| match error {
        WorkloadError::Arena(error) => InputError::Host(error),
        error => InputError::Workload(error),
    })
}

/// What the system says of memory before a trial.
pub struct Watch {
    resident: Option<u64>,
    free_bytes: Option<u64>,
}

impl<'a> Engine<'a> {
    /// The kind of device.
    pub fn device(self) -> Device {
        match self {
            Engine::Cpu(_) => Device::Cpu,
            Engine::Cuda(_) => Device::Cuda,
        }
    }

    /// The threads: all that computes, or what helps the GPU.
    pub fn cpu(self) -> &'a Cpu {
        match self {
            Engine::Cpu(cpu) => cpu,
            Engine::Cuda(gpu) => &gpu.cpu,
        }
    }

    /// What ran, for records: the instruction path, or the GPU with what its code is compiled by.
    pub fn path(self) -> String {
        match self {
            Engine::Cpu(cpu) => cpu.isa().name().into(),
            Engine::Cuda(gpu) => gpu.path.clone(),
        }
    }

    /// The GPU and its compiler, where there is one and it was not lost.
    fn runtime(self) -> Option<Rc<Runtime>> {
        match self {
            Engine::Cpu(_) => None,
            Engine::Cuda(gpu) => gpu.runtime().ok(),
        }
    }

    /// The GPU for `env.json`; null without one.
    pub fn gpu(self) -> Value {
        let Some(runtime) = self.runtime() else { return Value::Null };
        let device = runtime.device();
        json!({
            "name": device.name(),
            "architecture": device.architecture(),
            "multiprocessors": device.limits().multiprocessors,
            "total_bytes": device.total_bytes(),
            "free_bytes": device.free_bytes(),
            "context_bytes": device.context_bytes(),
            "l2_bytes": device.l2_bytes(),
            "driver": device.nvml().ok().and_then(|nvml| nvml.driver_version()),
            "cuda": device.cuda_version(),
            "nvrtc": runtime.nvrtc().version(),
            "condition": device.condition(),
        })
    }

    /// State of the GPU now, where there is one and NVML tells.
    pub fn condition(self) -> Option<Condition> {
        self.runtime()?.device().condition()
    }

    /// Memory that the context of the GPU takes, where NVML tells.
    pub fn context_bytes(self) -> Option<u64> {
        self.runtime()?.device().context_bytes()
    }

    /// Makes the device good again after a failure that [`CudaError::is_fatal`]; nothing of it may be in use.
    ///
    /// # Errors
    /// [`CudaError::Lost`] when it cannot be.
    pub(super) fn reopen(self) -> Result<(), CudaError> {
        match self {
            Engine::Cpu(_) => Ok(()),
            Engine::Cuda(gpu) => gpu.reopen(),
        }
    }

    /// Memory that may be taken when nobody says otherwise: 80% of the host's that is available, or all that is free on
    /// the GPU. `None` where the system does not tell.
    pub fn default_limit_bytes(self) -> Option<u64> {
        match self {
            Engine::Cpu(_) => os::default_limit_bytes(),
            Engine::Cuda(gpu) => gpu.runtime().ok()?.device().free_bytes_now().ok(),
        }
    }

    /// What the kernel of a cell, and its policy from `registry`, are here.
    ///
    /// # Errors
    /// In words, when it cannot run here.
    pub(super) fn implementation(self, cell: &Cell, registry: &Registry) -> Result<Implementation, String> {
        match self {
            Engine::Cpu(_) => Ok(Implementation::Cpu(kernel(&cell.kernel).map_err(|error| error.to_string())?)),
            Engine::Cuda(gpu) => Ok(Implementation::Cuda(cuda::task(cell, registry, &gpu.limits)?)),
        }
    }

    /// Where models run.
    ///
    /// # Errors
    /// In words, when they do not run here.
    pub(super) fn for_models(self) -> Result<&'a Cpu, String> {
        match self {
            Engine::Cpu(cpu) => Ok(cpu),
            Engine::Cuda(_) => Err(MODELS_ON_CPU.into()),
        }
    }

    /// Bytes that inputs of these extents take from the arena.
    pub(super) fn input_bytes(self, extents: &Extents) -> u64 {
        match self {
            Engine::Cpu(_) => Workload::bytes(extents),
            Engine::Cuda(_) => cuda::Inputs::bytes(extents),
        }
    }

    /// The inputs that `make` makes on the host, where the device reads them, in an arena with a limit.
    ///
    /// # Errors
    /// When they cannot be made, or the device has no room for them.
    pub(super) fn inputs(
        self,
        extents: &Extents,
        limit_bytes: u64,
        make: impl FnOnce(&Arena) -> Result<Workload, WorkloadError>,
    ) -> Result<Inputs, InputError> {
        let arena = Arena::with_limit(limit_bytes);
        let tensors = match self {
            Engine::Cpu(_) => Tensors::Host(make(&arena)?),
            Engine::Cuda(gpu) => {
                // The host's copies are not what is measured.
                let host = host_arena();
                let host = host_inputs(make(&host))?;
                Tensors::Gpu(cuda::Inputs::upload(gpu.runtime()?.device(), &arena, extents, host)?)
            }
        };
        Ok(Inputs { arena, tensors })
    }

    /// Inputs that take the memory and nothing else: [`Workload::blank`].
    ///
    /// # Errors
    /// When the device has no room for them.
    pub(super) fn blank(self, extents: &Extents, limit_bytes: u64, v_byte: u8) -> Result<Inputs, InputError> {
        let arena = Arena::with_limit(limit_bytes);
        let tensors = match self {
            Engine::Cpu(_) => Tensors::Host(Workload::blank(extents, &arena, v_byte).map_err(WorkloadError::from)?),
            Engine::Cuda(gpu) => Tensors::Gpu(cuda::Inputs::blank(gpu.runtime()?.device(), &arena, extents, v_byte)?),
        };
        Ok(Inputs { arena, tensors })
    }

    /// Begins to watch what the system says of memory.
    pub(super) fn watch(self) -> Watch {
        match self {
            Engine::Cpu(_) => Watch {
                resident: os::reset_peak().then(os::resident).flatten().map(|resident| resident.now_bytes),
                free_bytes: None,
            },
            Engine::Cuda(_) => {
                let free_bytes = self.runtime().and_then(|runtime| runtime.device().watch_memory().ok());
                Watch { resident: None, free_bytes }
            }
        }
    }

    /// How far the process's resident set grew since then, and the GPU's memory in use; `None` where nobody tells.
    pub(super) fn growth(self, watch: &Watch) -> (Option<u64>, Option<u64>) {
        match self {
            Engine::Cpu(_) => {
                let grown = |before: u64| Some(os::resident()?.peak_bytes.saturating_sub(before));
                (watch.resident.and_then(grown), None)
            }
            Engine::Cuda(_) => {
                let least_bytes = self.runtime().map(|runtime| runtime.device().least_free_bytes());
                let growth = watch.free_bytes.zip(least_bytes).map(|(before, least)| before.saturating_sub(least));
                (None, growth)
            }
        }
    }
}
