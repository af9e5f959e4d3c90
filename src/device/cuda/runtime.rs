//! A GPU and a compiler together: programs are compiled and loaded when they are first used, and stay loaded.

use super::{CudaError, Device, Module, Nvrtc, Program, build};
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// A GPU that is ready to compute.
pub struct Runtime {
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
        Ok(Runtime { device: Device::open(index)?, nvrtc: Nvrtc::load(nvrtc)?, modules: Mutex::default() })
    }

    /// The GPU.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The compiler.
    pub fn nvrtc(&self) -> &Nvrtc {
        &self.nvrtc
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
