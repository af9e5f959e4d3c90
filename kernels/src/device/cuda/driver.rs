//! The CUDA driver before any context: whether it is there and new enough, and what its primary context can be made anew.
//!
//! cudarc looks each function up when it is first called and panics where the library has none, so the version is asked
//! first. The features in `Cargo.toml` are the last that call nothing newer than CUDA 12.0.

use super::CudaError;
use super::error::doing;
use cudarc::driver::{DriverError, result, sys};
use std::ffi::c_int;

/// The first CUDA version with every function that is called: `cuTensorMapEncodeTiled` came with it.
const LEAST_VERSION: c_int = 12_000;

/// Says whether there is a driver that can be used, and starts it.
///
/// # Errors
/// [`CudaError::NoDriver`] without one, [`CudaError::OldDriver`] with one that is too old, [`CudaError::Driver`] when it
/// does not start.
pub(super) fn start() -> Result<(), CudaError> {
    // SAFETY: it only tries to load the driver's library, whose initialisers have no requirements.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    // SAFETY: the library was just found; it is looked at and nothing is called.
    if unsafe { sys::culib().get::<unsafe extern "C" fn(*mut c_int) -> sys::CUresult>(b"cuDriverGetVersion") }.is_err()
    {
        return Err(CudaError::NoDriver);
    }
    let found = version();
    if found < LEAST_VERSION {
        return Err(CudaError::OldDriver { found: text(found), needed: text(LEAST_VERSION) });
    }
    result::init().map_err(doing("starting the driver"))
}

/// The CUDA version that the driver has, as 13000; 0 where it does not tell.
fn version() -> c_int {
    let mut version = 0;
    // SAFETY: the pointer is to an integer that lives through the call.
    unsafe { sys::cuDriverGetVersion(&mut version) };
    version
}

/// The same as `13.0`.
pub(super) fn version_text() -> String {
    text(version())
}

fn text(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Ends the primary context of GPU `index`, with everything that this process has made in it, whoever made it.
///
/// # Safety
/// Nothing of the context may be used afterwards: no buffer, module, stream or handle of it may be left.
///
/// # Errors
/// The driver's.
pub(super) unsafe fn reset(index: usize) -> Result<(), DriverError> {
    let device = result::device::get(index as c_int)?;
    // SAFETY: the device is one of the driver's; the rest is the caller's promise.
    unsafe { sys::cuDevicePrimaryCtxReset_v2(device) }.result()
}
