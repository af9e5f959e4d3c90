//! A GPU and a compiler together: programs are compiled and loaded when they are first used, and stay loaded.

use super::sweep::Sweep;
use super::{Cache, Cublas, CudaError, Device, Module, NoCublas, Nvrtc, Program};
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// A GPU that is ready to compute.
pub struct Runtime {
    /// Goes before the context that it lives on.
    cublas: OnceLock<Result<Mutex<Cublas>, NoCublas>>,
    device: Device,
    nvrtc: Nvrtc,
    cache: Cache,
    modules: Mutex<HashMap<Program, Arc<Module>>>,
}

impl Runtime {
    /// Opens GPU `index`, and NVRTC where `nvrtc` says or where it is found.
    ///
    /// # Errors
    /// As [`Device::open`] and [`Nvrtc::load`]; [`CudaError::Architecture`] when the one does not compile for the other.
    pub fn open(index: usize, nvrtc: Option<&Path>) -> Result<Self, CudaError> {
        let (device, nvrtc) = (Device::open(index)?, Nvrtc::load(nvrtc)?);
        nvrtc.check(&device.architecture())?;
        Ok(Self::new(device, nvrtc))
    }

    fn new(device: Device, nvrtc: Nvrtc) -> Self {
        Runtime { cublas: OnceLock::new(), device, nvrtc, cache: Cache::default(), modules: Mutex::default() }
    }

    /// The same GPU with a new context, in which nothing is loaded, after a failure that [`CudaError::is_fatal`].
    ///
    /// # Errors
    /// [`CudaError::Lost`] when the GPU does not open again, or buffers of the old context are still there.
    pub fn reopen(self) -> Result<Self, CudaError> {
        let Runtime { cublas, device, nvrtc, modules, .. } = self;
        drop((cublas, modules));
        Ok(Self::new(device.reopen()?, nvrtc))
    }

    /// From now on each pass that is timed begins with a cold L2. It takes memory of twice the L2's size, which no arena
    /// counts.
    ///
    /// # Errors
    /// As [`Runtime::module`], and [`CudaError::OutOfMemory`].
    pub fn sweep_l2(&self) -> Result<(), CudaError> {
        self.device.sweep_before(&*self.module(&Sweep::program())?)
    }

    /// The GPU.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The compiler.
    pub fn nvrtc(&self) -> &Nvrtc {
        &self.nvrtc
    }

    /// cuBLAS, looked for the first time that it is asked for; `None` where there is none that works, and then never again:
    /// products are the same from the first to the last, and [`Runtime::gemm`] says which.
    pub fn cublas(&self) -> Option<MutexGuard<'_, Cublas>> {
        self.tried_cublas().as_ref().ok().map(|cublas| cublas.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn tried_cublas(&self) -> &Result<Mutex<Cublas>, NoCublas> {
        let load = || match self.device.bind() {
            Ok(()) => Cublas::load().map(Mutex::new),
            Err(error) => Err(NoCublas::Broken(error.to_string())),
        };
        self.cublas.get_or_init(load)
    }

    /// Whose matrix products there are: as `cuBLAS 13.0`, or `fallback GEMM`, with the reason where there is a cuBLAS that
    /// does not work.
    pub fn gemm(&self) -> String {
        match self.tried_cublas() {
            Ok(cublas) => {
                let cublas = cublas.lock().unwrap_or_else(PoisonError::into_inner);
                format!("cuBLAS {}", cublas.version())
            }
            Err(NoCublas::NotFound) => "fallback GEMM".into(),
            Err(NoCublas::Broken(reason)) => format!("fallback GEMM ({reason})"),
        }
    }

    /// A program's machine code on the GPU.
    ///
    /// # Errors
    /// [`CudaError::Compile`] when NVRTC refuses it, [`CudaError::Load`] when the driver does not take it, and
    /// [`CudaError::NoRoom`] when the GPU has no memory for it.
    pub fn module(&self, program: &Program) -> Result<Arc<Module>, CudaError> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(program) {
            return Ok(module.clone());
        }
        let built = self.cache.build(&self.nvrtc, program, &self.device.architecture())?;
        let module = Arc::new(self.device.load(built.code, &self.nvrtc)?);
        modules.insert(program.clone(), module.clone());
        Ok(module)
    }

    /// Compiles and loads what is about to run, before any time is taken.
    ///
    /// # Errors
    /// As [`Runtime::module`].
    pub fn load(&self, programs: impl IntoIterator<Item = Program>) -> Result<(), CudaError> {
        programs.into_iter().try_for_each(|program| self.module(&program).map(|_| ()))
    }
}
