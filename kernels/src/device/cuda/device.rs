//! A GPU: its memory by plain allocations that the arena counts, modules, launches, and times by events.

use super::nvml::{Condition, Nvml, uuid_text};
use super::sweep::Sweep;
use super::{CudaError, DeviceBuffer, Launch, Limits, Nvrtc, doing, driver};
use crate::memory::{Arena, Label};
use cudarc::driver::sys::{CUdevice_attribute, CUevent_flags, CUfunction_attribute_enum};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaStream, DeviceRepr, DriverError, LaunchArgs, LaunchConfig,
    PushKernelArg, result,
};
use cudarc::nvrtc::Ptx;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A GPU in use by this process.
pub struct Device {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    name: String,
    limits: Limits,
    total_bytes: u64,
    free_bytes: u64,
    l2_bytes: u64,
    context_bytes: Option<u64>,
    nvml: Result<Nvml, String>,
    /// Least memory that was free after an allocation, since [`Device::watch_memory`].
    least_free_bytes: AtomicU64,
    sweep: OnceLock<Sweep>,
}

impl Device {
    /// Opens GPU `index`.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`] and [`CudaError::OldDriver`] without a driver that will do, [`CudaError::TooOld`] before
    /// compute capability 8.0, [`CudaError::NoRoom`] when its memory is full, and [`CudaError::Driver`] when there is no
    /// such GPU or it cannot be used.
    pub fn open(index: usize) -> Result<Self, CudaError> {
        driver::start()?;
        let nvml = uuid(index).map_err(doing("looking for the GPU")).map(|uuid| Nvml::open(&uuid))?;
        let used_bytes = || nvml.as_ref().ok().and_then(Nvml::used_bytes);
        let used_before = used_bytes();
        let context = CudaContext::new(index).map_err(doing("opening the GPU"))?;
        let context_bytes = used_before.zip(used_bytes()).map(|(before, after)| after.saturating_sub(before));
        let ask = || -> Result<_, DriverError> {
            let multiprocessors = context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
            let shared_bytes =
                context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
            let limits = Limits {
                capability: context.compute_capability()?,
                multiprocessors: multiprocessors.max(1) as usize,
                block_shared_bytes: shared_bytes.max(0) as usize,
            };
            let l2_bytes = context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?;
            Ok((context.name()?, limits, l2_bytes.max(0) as u64, context.mem_get_info()?))
        };
        let (name, limits, l2_bytes, (free, total)) = ask().map_err(doing("asking what the GPU is"))?;
        let (major, minor) = limits.capability;
        if major < 8 {
            return Err(CudaError::TooOld { name, major, minor });
        }
        Ok(Device {
            stream: context.default_stream(),
            context,
            name,
            limits,
            total_bytes: total as u64,
            free_bytes: free as u64,
            l2_bytes,
            context_bytes,
            nvml,
            least_free_bytes: AtomicU64::new(u64::MAX),
            sweep: OnceLock::new(),
        })
    }

    /// The product's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What launches are planned for.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// What NVRTC compiles for: [`Limits::architecture`].
    pub fn architecture(&self) -> String {
        self.limits.architecture()
    }

    /// Memory of the GPU.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// Memory that was free when the GPU was opened, this process's context already taken off.
    pub fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// Memory that is free now.
    ///
    /// # Errors
    /// [`CudaError::Driver`] when the driver does not tell.
    pub fn free_bytes_now(&self) -> Result<u64, CudaError> {
        let (free, _) = self.context.mem_get_info().map_err(doing("asking for the free memory"))?;
        Ok(free as u64)
    }

    /// Size of the L2.
    pub fn l2_bytes(&self) -> u64 {
        self.l2_bytes
    }

    /// Version of the CUDA interface that the driver has, as `13.0`.
    pub fn cuda_version(&self) -> String {
        driver::version_text()
    }

    /// Memory that this process's context took when it was made, before anything was allocated: what NVML saw the GPU's
    /// use grow by. `None` without NVML; then no more is known than that it is at most what was not free.
    pub fn context_bytes(&self) -> Option<u64> {
        self.context_bytes
    }

    /// NVML's view of this GPU, or why there is none.
    pub fn nvml(&self) -> Result<&Nvml, &str> {
        self.nvml.as_ref().map_err(String::as_str)
    }

    /// Clocks, temperature and power now; `None` without NVML.
    pub fn condition(&self) -> Option<Condition> {
        self.nvml.as_ref().ok().map(Nvml::condition)
    }

    /// From now on the driver is asked after every allocation how much is free; what is free before.
    ///
    /// # Errors
    /// [`CudaError::Driver`] when the driver does not tell.
    pub fn watch_memory(&self) -> Result<u64, CudaError> {
        let free_bytes = self.free_bytes_now()?;
        self.least_free_bytes.store(free_bytes, Ordering::Relaxed);
        Ok(free_bytes)
    }

    /// Least memory that was free since [`Device::watch_memory`].
    pub fn least_free_bytes(&self) -> u64 {
        self.least_free_bytes.load(Ordering::Relaxed)
    }

    /// From now on each timed pass begins with a cold L2.
    pub(super) fn sweep_before(&self, module: &Module) -> Result<(), CudaError> {
        let sweep = Sweep::new(self, module, self.l2_bytes)?;
        // Whoever came first has set the same.
        let _ = self.sweep.set(sweep);
        Ok(())
    }

    /// Takes zeroed memory, counted in the arena; none at all for 0 bytes.
    ///
    /// # Errors
    /// [`CudaError::Arena`] at the arena's limit, [`CudaError::OutOfMemory`] when the GPU has no room.
    pub fn alloc(&self, arena: &Arena, label: Label, bytes: u64) -> Result<DeviceBuffer, CudaError> {
        let claim = arena.claim(label, bytes)?;
        self.context.bind_to_thread().map_err(doing("binding the GPU's context"))?;
        let mut buffer = DeviceBuffer { address: 0, claim, context: self.context.clone() };
        if bytes > 0 {
            // SAFETY: the context is bound. The memory is freed by the buffer's drop alone.
            buffer.address = unsafe { result::malloc_sync(bytes as usize) }.map_err(|error| {
                match doing("taking memory")(error) {
                    CudaError::NoRoom { .. } => {
                        let free_bytes = self.context.mem_get_info().map_or(0, |(free, _)| free as u64);
                        CudaError::OutOfMemory { label, requested_bytes: bytes, free_bytes }
                    }
                    error => error,
                }
            })?;
            // SAFETY: the range is the allocation just made.
            unsafe { result::memset_d8_sync(buffer.address, 0, bytes as usize) }.map_err(doing("clearing memory"))?;
            self.least_free_bytes.fetch_min(self.free_bytes_now()?, Ordering::Relaxed);
        }
        Ok(buffer)
    }

    /// Loads machine code that this compiler made for this GPU.
    ///
    /// # Errors
    /// [`CudaError::Load`] when the driver does not take it, [`CudaError::NoRoom`] when the GPU's memory is full.
    pub(super) fn load(&self, code: Vec<u8>, nvrtc: &Nvrtc) -> Result<Module, CudaError> {
        let module = self.context.load_module(Ptx::from_binary(code)).map_err(|reason| {
            match doing("loading the kernels")(reason) {
                CudaError::Driver { reason, .. } => {
                    CudaError::Load { nvrtc: nvrtc.version(), driver: self.cuda_version(), reason }
                }
                error => error,
            }
        })?;
        Ok(Module { module, functions: Mutex::default() })
    }

    /// The stream on which everything runs.
    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Waits for all that was begun.
    ///
    /// # Errors
    /// What went wrong with it and was not told yet; where that ended the context, it is told every time.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.context.synchronize().map_err(doing("waiting for the GPU"))
    }

    /// Opens the same GPU with a new context, after one that a fault has ended.
    ///
    /// # Errors
    /// [`CudaError::Lost`] when a buffer or a module of the old context is still there, the driver does not let go of it, or
    /// the GPU does not open again.
    pub(super) fn reopen(self) -> Result<Self, CudaError> {
        let (index, old) = (self.context.ordinal(), Arc::downgrade(&self.context));
        drop(self);
        if old.strong_count() > 0 {
            return Err(CudaError::Lost("something of its old context is still in use".into()));
        }
        // SAFETY: buffers, modules and streams hold the old context, and nobody does.
        unsafe { driver::reset(index) }
            .map_err(doing("ending the old context"))
            .and_then(|()| Self::open(index))
            .map_err(|error| match error {
                CudaError::Lost(_) => error,
                error => CudaError::Lost(error.to_string()),
            })
    }

    /// Makes the GPU's context that of this thread, as libraries beside the driver need it.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread().map_err(doing("binding the GPU's context"))
    }

    /// Runs the launches in order, each with the same arguments, and waits for them; the GPU's own time for them in
    /// nanoseconds.
    ///
    /// # Errors
    /// [`CudaError::Driver`] when a launch or a kernel fails.
    pub(crate) fn run(
        &self,
        module: &Module,
        launches: &[Launch],
        arguments: &[&dyn Argument],
    ) -> Result<u64, CudaError> {
        let ready = self.ready(module, launches)?;
        self.timed(|| self.begin(&ready, arguments))
    }

    /// Does `work`, which begins what runs on the default stream, and waits for that; the GPU's own time for it in
    /// nanoseconds.
    ///
    /// # Errors
    /// Those of `work`; [`CudaError::Driver`] when a kernel fails.
    pub fn timed<E: From<CudaError>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<u64, E> {
        let timed = || self.stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        if let Some(sweep) = self.sweep.get() {
            self.begin(&sweep.ready, &[&sweep.stretch()])?;
        }
        let start = timed().map_err(doing("recording an event"))?;
        let worked = work();
        let end = timed();
        // Whatever went wrong: what was begun has ended when buffers may be given back.
        let ended = self.stream.synchronize();
        // What a kernel broke is why calls after it fail.
        ended.map_err(doing("running the kernels"))?;
        worked?;
        let end = end.map_err(doing("recording an event"))?;
        let milliseconds = start.elapsed_ms(&end).map_err(doing("reading the time"))?;
        Ok((f64::from(milliseconds) * 1e6) as u64)
    }

    /// Finds the functions of launches before any time is taken.
    ///
    /// # Errors
    /// [`CudaError::Driver`] when there is no such function, or not so much shared memory; [`CudaError::Operand`] when there are
    /// more lists or heads than CUDA has blocks for.
    pub fn ready(&self, module: &Module, launches: &[Launch]) -> Result<Vec<Ready>, CudaError> {
        let ready = |launch: &Launch| {
            if launch.grid[1].max(launch.grid[2]) > Launch::MOST_BLOCKS {
                return Err(CudaError::Operand(format!(
                    "{} needs {:?} blocks, and there are at most {} in y and z: take fewer sequences, layers or heads at once",
                    launch.function,
                    launch.grid,
                    Launch::MOST_BLOCKS
                )));
            }
            let config = LaunchConfig {
                grid_dim: blocks(launch.grid),
                block_dim: (launch.threads, 1, 1),
                shared_mem_bytes: launch.shared_bytes,
            };
            Ok(Ready { function: module.function(launch)?, config })
        };
        launches.iter().map(ready).collect()
    }

    /// Begins the launches in order, each with the same arguments. [`Device::timed`] waits for them, or whoever reads what
    /// they write.
    ///
    /// # Errors
    /// [`CudaError::Driver`] when a launch fails.
    pub fn begin(&self, ready: &[Ready], arguments: &[&dyn Argument]) -> Result<(), CudaError> {
        for Ready { function, config } in ready {
            let mut builder = self.stream.launch_builder(function);
            arguments.iter().for_each(|argument| argument.push(&mut builder));
            // SAFETY: the arguments are laid out as the kernel's parameters, and their buffers are as long as the kernel
            // takes them to be (`Argument`); kernels stay inside them (the emulation checks this under
            // AddressSanitizer). They live until the kernel has ended: `timed` waits for it, and so does freeing memory (CUDA
            // C++ Programming Guide, "Stream Ordered Memory Allocator": cudaFree synchronizes all streams).
            unsafe { builder.launch(*config) }.map_err(doing("launching a kernel"))?;
        }
        Ok(())
    }
}

/// The GPU's UUID as NVML writes it. It needs no context.
fn uuid(index: usize) -> Result<String, DriverError> {
    let uuid = result::device::get_uuid(result::device::get(index as i32)?)?;
    Ok(uuid_text(uuid.bytes.map(|byte| byte as u8)))
}

/// A launch whose function was found.
pub struct Ready {
    function: CudaFunction,
    config: LaunchConfig,
}

impl Ready {
    /// The next launches are of another grid.
    pub fn set_grid(&mut self, grid: [usize; 3]) {
        self.config.grid_dim = blocks(grid);
    }
}

/// A grid as the driver takes it.
fn blocks(grid: [usize; 3]) -> (u32, u32, u32) {
    let [x, y, z] = grid.map(|blocks| blocks as u32);
    (x, y, z)
}

/// What a kernel takes by value: `repr(C)`, laid out as the parameter in the kernel's source, and borrowing every buffer
/// whose address is in it.
pub trait Argument {
    /// Appends the value to a launch.
    fn push<'a>(&'a self, launch: &mut LaunchArgs<'a>);
}

impl<T: DeviceRepr> Argument for T {
    fn push<'a>(&'a self, launch: &mut LaunchArgs<'a>) {
        launch.arg(self);
    }
}

/// Loaded machine code, and its functions as far as they were launched.
pub struct Module {
    module: Arc<CudaModule>,
    /// With the shared memory that each was told of.
    functions: Mutex<HashMap<&'static str, (CudaFunction, u32)>>,
}

impl Module {
    /// The function of a launch, told how much shared memory it may have.
    fn function(&self, launch: &Launch) -> Result<CudaFunction, CudaError> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let (function, told_bytes) = match functions.get(launch.function) {
            Some(known) => known.clone(),
            None => (self.module.load_function(launch.function).map_err(doing("finding a kernel"))?, 0),
        };
        // Above 48 KiB a function must be told that it may have so much.
        if launch.shared_bytes > told_bytes {
            let attribute = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let told = function.set_attribute(attribute, launch.shared_bytes as i32);
            told.map_err(doing("reserving shared memory"))?;
        }
        functions.insert(launch.function, (function.clone(), launch.shared_bytes.max(told_bytes)));
        Ok(function)
    }
}
