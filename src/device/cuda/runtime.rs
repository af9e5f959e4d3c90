//! A GPU and a compiler together: programs are compiled and loaded when they are first used, and stay loaded.

use super::sweep::Sweep;
use super::{Cublas, CudaError, Device, Module, Nvrtc, Program, build};
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// A GPU that is ready to compute.
pub struct Runtime {
    /// Goes before the context that it lives on.
    cublas: OnceLock<Option<Mutex<Cublas>>>,
    device: Device,
    nvrtc: Nvrtc,
    modules: Mutex<HashMap<Program, Arc<Module>>>,
}

impl Runtime {
    /// Opens GPU `index`, and NVRTC where `nvrtc` says or where it is found.
    ///
    /// # Errors
    /// As [`Device::open`] and [`Nvrtc::load`].
    pub fn open(index: usize, nvrtc: Option<&Path>) -> Result<Self, CudaError> {
        let (device, nvrtc) = (Device::open(index)?, Nvrtc::load(nvrtc)?);
        Ok(Runtime { cublas: OnceLock::new(), device, nvrtc, modules: Mutex::default() })
    }

    /// From now on each pass that is timed begins with a cold L2. It takes memory of twice the L2's size, which no arena
    /// counts.
    ///
    /// # Errors
    /// As [`Runtime::module`], and [`CudaError::OutOfMemory`].
    pub fn sweep_l2(&self) -> Result<(), CudaError> {
        let (code, _) = build(&self.nvrtc, &Sweep::program(), &self.device.architecture())?;
        self.device.sweep_before(&self.device.load(code)?)
    }

    /// The GPU.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The compiler.
    pub fn nvrtc(&self) -> &Nvrtc {
        &self.nvrtc
    }

    /// cuBLAS, looked for the first time that it is asked for; `None` where there is none that works.
    pub fn cublas(&self) -> Option<MutexGuard<'_, Cublas>> {
        let load = || self.device.bind().ok().and_then(|()| Cublas::load()).map(Mutex::new);
        self.cublas.get_or_init(load).as_ref().map(|cublas| cublas.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whose matrix products there are: as `cuBLAS 13.0`, or `own products`.
    pub fn products(&self) -> String {
        self.cublas().map_or("own products".into(), |cublas| format!("cuBLAS {}", cublas.version()))
    }

    /// A program's machine code on the GPU.
    ///
    /// # Errors
    /// [`CudaError::Compile`] when NVRTC refuses it, [`CudaError::Driver`] when the GPU does not take it.
    pub fn module(&self, program: &Program) -> Result<Arc<Module>, CudaError> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(program) {
            return Ok(module.clone());
        }
        let (code, _) = build(&self.nvrtc, program, &self.device.architecture())?;
        let module = Arc::new(self.device.load(code)?);
        modules.insert(program.clone(), module.clone());
        Ok(module)
    }
}
