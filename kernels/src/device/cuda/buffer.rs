//! Memory of a GPU that the arena counts, with copies that are done when they return.

use super::{CudaError, doing};
use crate::memory::Claim;
use cudarc::driver::{CudaContext, result};
use std::sync::Arc;

/// Memory of a GPU. Dropping it gives the memory back, to the GPU and to the arena's ledger.
pub struct DeviceBuffer {
    pub(super) address: u64,
    pub(super) claim: Claim,
    pub(super) context: Arc<CudaContext>,
}

impl DeviceBuffer {
    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.claim.bytes()
    }

    /// Where it begins; 0 for an empty one.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Copies `source` to its start.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when there is no room for it, [`CudaError::Driver`] when the copy fails.
    pub fn write(&mut self, source: &[u8]) -> Result<(), CudaError> {
        self.write_at(0, source)
    }

    /// Copies `source` to the place `start_bytes` behind its start.
    ///
    /// # Errors
    /// As [`DeviceBuffer::write`].
    pub fn write_at(&mut self, start_bytes: u64, source: &[u8]) -> Result<(), CudaError> {
        self.fits(start_bytes.saturating_add(source.len() as u64))?;
        self.context.bind_to_thread().map_err(doing("binding the GPU's context"))?;
        // SAFETY: the range lies in the buffer, and the copy is done when the call returns.
        unsafe { result::memcpy_htod_sync(self.address + start_bytes, source) }.map_err(doing("copying to the GPU"))
    }

    /// Copies all of `source` to the place `start_bytes` behind its start.
    ///
    /// # Errors
    /// As [`DeviceBuffer::write`].
    pub fn copy_at(&mut self, start_bytes: u64, source: &DeviceBuffer) -> Result<(), CudaError> {
        self.fits(start_bytes.saturating_add(source.bytes()))?;
        self.context.bind_to_thread().map_err(doing("binding the GPU's context"))?;
        let (target, bytes) = (self.address + start_bytes, source.bytes() as usize);
        // SAFETY: both ranges lie in their buffers, and the copy is done when the call returns.
        unsafe { result::memcpy_dtod_sync(target, source.address, bytes) }.map_err(doing("copying on the GPU"))
    }

    /// Fills it with a byte: 0xff makes every element a NaN.
    ///
    /// # Errors
    /// [`CudaError::Driver`] when it fails.
    pub fn fill(&mut self, byte: u8) -> Result<(), CudaError> {
        if self.address == 0 {
            return Ok(());
        }
        self.context.bind_to_thread().map_err(doing("binding the GPU's context"))?;
        // SAFETY: the range is the buffer's own.
        unsafe { result::memset_d8_sync(self.address, byte, self.bytes() as usize) }.map_err(doing("filling memory"))
    }

    /// Copies its start to `target`.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when it is shorter, [`CudaError::Driver`] when the copy fails.
    pub fn read(&self, target: &mut [u8]) -> Result<(), CudaError> {
        self.read_from(0, target)
    }

    /// Copies what lies from byte `start` on to `target`; nothing where that is empty.
    ///
    /// # Errors
    /// As [`DeviceBuffer::read`].
    pub fn read_from(&self, start: usize, target: &mut [u8]) -> Result<(), CudaError> {
        self.fits(start as u64 + target.len() as u64)?;
        if target.is_empty() {
            return Ok(());
        }
        self.context.bind_to_thread().map_err(doing("binding the GPU's context"))?;
        // SAFETY: the buffer reaches at least as far, and the copy is done when the call returns.
        unsafe { result::memcpy_dtoh_sync(target, self.address + start as u64) }.map_err(doing("copying from the GPU"))
    }

    /// Whether it has so many bytes.
    pub(super) fn fits(&self, bytes: u64) -> Result<(), CudaError> {
        match bytes <= self.bytes() {
            true => Ok(()),
            false => Err(CudaError::Operand(format!("{bytes} bytes to copy, the buffer has {}", self.bytes()))),
        }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.address != 0 && self.context.bind_to_thread().is_ok() {
            // SAFETY: the address came from `malloc_sync` and is freed once. A failure has nobody to be told to.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}
