//! Copies that are begun and not waited for: they run on the default stream, in order with the kernels around them. What
//! a step of a model needs goes to the GPU so, and what it gives comes back to a [`Landing`], for which alone is waited.

use super::{CudaError, Device, DeviceBuffer, doing};
use crate::memory::{Arena, Label};
use cudarc::driver::{CudaStream, result};
use std::ptr::{self, NonNull};
use std::sync::Arc;

impl DeviceBuffer {
    /// Begins to copy `source` to the place `start_bytes` behind its start; `source` may change when the call returns.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when there is no room for it, [`CudaError::Driver`] when the driver refuses.
    pub fn begin_write(&mut self, device: &Device, start_bytes: u64, source: &[u8]) -> Result<(), CudaError> {
        self.fits(start_bytes.saturating_add(source.len() as u64))?;
        if source.is_empty() {
            return Ok(());
        }
        device.bind()?;
        let stream = device.stream().cu_stream();
        // SAFETY: the range lies in the buffer, and freeing it waits for the copy. Plain memory of the host is staged
        // before the call returns: the driver "may synchronize with the stream and stage the copy" (CUDA Driver API, "API
        // synchronization behavior"), and every driver so far does, though the page does not promise it.
        unsafe { result::memcpy_htod_async(self.address() + start_bytes, source, stream) }
            .map_err(doing("beginning a copy to the GPU"))
    }
}

/// Memory of the host that a GPU writes in the background, page-locked so that it can.
pub struct Landing {
    memory: NonNull<u8>,
    bytes: usize,
    stream: Arc<CudaStream>,
}

impl Landing {
    /// Room for `bytes`, which no arena counts: it is not the GPU's.
    ///
    /// # Errors
    /// [`CudaError::Driver`] when the host has no room.
    pub fn new(device: &Device, bytes: usize) -> Result<Self, CudaError> {
        device.bind()?;
        let bytes = bytes.max(1);
        // SAFETY: the context is bound, and the memory is freed by `drop` alone.
        let memory = unsafe { result::malloc_host(bytes, 0) }.map_err(doing("taking page-locked memory"))?.cast::<u8>();
        // SAFETY: the allocation has so many bytes, and nothing else knows of it yet.
        unsafe { ptr::write_bytes(memory, 0, bytes) };
        let memory = NonNull::new(memory).expect("an allocation that succeeded has an address");
        Ok(Landing { memory, bytes, stream: device.stream().clone() })
    }

    /// Begins to copy the first `bytes` of a buffer to the place `start`, behind everything that was begun before.
    ///
    /// # Errors
    /// [`CudaError::Operand`] when either has no room, [`CudaError::Driver`] when the driver refuses.
    pub fn begin(&mut self, start: usize, from: &DeviceBuffer, bytes: usize) -> Result<(), CudaError> {
        from.fits(bytes as u64)?;
        if start + bytes > self.bytes {
            return Err(CudaError::Operand(format!("{bytes} bytes to land behind {start}, of {}", self.bytes)));
        }
        if bytes == 0 {
            return Ok(());
        }
        self.stream.context().bind_to_thread().map_err(doing("binding the GPU's context"))?;
        // SAFETY: both ranges lie in their memory, which the copy does not outlive: freeing a buffer waits for it, and so
        // does `drop`. Nobody sees the bytes before `wait`, which has a mutable borrow as this has.
        unsafe {
            let target = std::slice::from_raw_parts_mut(self.memory.as_ptr().add(start), bytes);
            result::memcpy_dtoh_async(target, from.address(), self.stream.cu_stream())
        }
        .map_err(doing("beginning a copy from the GPU"))
    }

    /// Waits for everything that was begun; what has landed.
    ///
    /// # Errors
    /// [`CudaError::Driver`] when a kernel has failed.
    pub fn wait(&mut self) -> Result<&[u8], CudaError> {
        self.stream.synchronize().map_err(doing("running the kernels"))?;
        // SAFETY: the memory was written when it was made, and no copy to it runs any more.
        Ok(unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.bytes) })
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        // A failure has nobody to be told to.
        let _ = self.stream.synchronize();
        // SAFETY: the memory came from `malloc_host`, is freed once, and no copy to it runs.
        let _ = unsafe { result::free_host(self.memory.as_ptr().cast()) };
    }
}

/// Least that memory grows by: short lists would make it grow every few tokens.
const LEAST_GROWTH_BYTES: u64 = 4096;

/// Memory of a GPU that grows to what is asked for, by so much more that it seldom does.
pub struct Growing {
    buffer: DeviceBuffer,
    label: Label,
}

impl Growing {
    /// None yet.
    ///
    /// # Errors
    /// [`CudaError::Driver`] when the GPU cannot be used.
    pub fn new(device: &Device, arena: &Arena, label: Label) -> Result<Self, CudaError> {
        Ok(Growing { buffer: device.alloc(arena, label, 0)?, label })
    }

    /// The memory, of at least `bytes`; what was in it is lost when it grows.
    ///
    /// # Errors
    /// At the arena's limit, or when the GPU has no room.
    pub fn of(&mut self, device: &Device, arena: &Arena, bytes: u64) -> Result<&mut DeviceBuffer, CudaError> {
        let has = self.buffer.bytes();
        if has < bytes {
            // The old memory goes first.
            self.buffer = device.alloc(arena, self.label, 0)?;
            let wanted = bytes.max(has + has / 8).next_multiple_of(LEAST_GROWTH_BYTES);
            self.buffer = device.alloc(arena, self.label, wanted)?;
        }
        Ok(&mut self.buffer)
    }

    /// The memory as it is.
    pub fn now(&self) -> &DeviceBuffer {
        &self.buffer
    }
}
