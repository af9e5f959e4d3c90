//! NVML, NVIDIA's management library, where the driver brings it: clocks, temperature and power beside a measurement,
//! and the memory of the whole GPU before this process has a context on it.
//!
//! A few functions are all that is needed, so they are called where they lie and no binding is. Nothing depends on it:
//! without NVML the record lacks these fields.

use libloading::{Library, Symbol};
use serde::{Deserialize, Serialize};
use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr::null_mut;

/// State of a GPU at one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Condition {
    /// Clock of the multiprocessors.
    pub sm_clock_mhz: Option<u32>,
    /// Clock of the memory.
    pub mem_clock_mhz: Option<u32>,
    /// Temperature of the chip, in degrees Celsius.
    pub temperature_c: Option<u32>,
    /// Power drawn, in watts.
    pub power_w: Option<f64>,
    /// What holds the clocks down, in NVML's words; an idle GPU says `gpu_idle`.
    pub throttle: Vec<String>,
}

/// One GPU as NVML sees it.
pub struct Nvml {
    library: Library,
    device: *mut c_void,
}

// SAFETY: NVML may be called from every thread at once (its documentation), and the handle is a number to it.
unsafe impl Send for Nvml {}
// SAFETY: as above.
unsafe impl Sync for Nvml {}

const NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];
/// `nvmlClockType_t`.
const CLOCK_SM: c_int = 1;
const CLOCK_MEM: c_int = 2;
/// `nvmlTemperatureSensors_t`.
const TEMPERATURE_GPU: c_int = 0;
/// `nvmlClocksEventReasons`, by bit.
const REASONS: [&str; 9] = [
    "gpu_idle",
    "applications_clocks",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake",
    "display_clocks",
];

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// A process that computes on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GpuProcess {
    /// Its id; that of another namespace, where it runs in a container of its own.
    pub pid: u32,
    /// Memory that it holds; `None` where the driver does not tell.
    pub used_bytes: Option<u64>,
}

/// `nvmlProcessInfo_t`.
#[repr(C)]
#[derive(Default, Clone, Copy)]
struct ProcessInfo {
    pid: c_uint,
    used: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// More processes than one GPU has.
const MOST_PROCESSES: usize = 1024;

impl Nvml {
    /// NVML's view of the GPU with this UUID.
    ///
    /// # Errors
    /// In words, when there is no NVML or it does not know the GPU.
    pub fn open(uuid: &str) -> Result<Self, String> {
        // SAFETY: the initialisers of NVIDIA's libraries have no requirements on their caller.
        let opened = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
        let library = opened.ok_or("libnvidia-ml.so.1 was not found; it comes with the driver")?;
        let text = CString::new(uuid).map_err(|_| format!("'{uuid}' is no UUID"))?;
        let mut device = null_mut();
        {
            let missing = |error: libloading::Error| error.to_string();
            // SAFETY: the types are those of these functions in nvml.h; the text ends with zero and outlives the call.
            unsafe {
                let init: Symbol<unsafe extern "C" fn() -> c_int> = library.get(b"nvmlInit_v2").map_err(missing)?;
                type Find = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
                let find: Symbol<Find> = library.get(b"nvmlDeviceGetHandleByUUID").map_err(missing)?;
                let status = init();
                if status != 0 {
                    return Err(format!("nvmlInit_v2 gave status {status}"));
                }
                let status = find(text.as_ptr(), &mut device);
                if status != 0 {
                    return Err(format!("NVML does not know {uuid}: status {status}"));
                }
            }
        }
        Ok(Nvml { library, device })
    }

    /// Memory in use on the GPU, by whomever.
    pub fn used_bytes(&self) -> Option<u64> {
        let mut memory = Memory::default();
        // SAFETY: the type is that of the function in nvml.h, and `memory` lives through the call.
        let status = unsafe {
            let get =
                self.function::<unsafe extern "C" fn(*mut c_void, *mut Memory) -> c_int>("nvmlDeviceGetMemoryInfo")?;
            get(self.device, &mut memory)
        };
        (status == 0).then_some(memory.used)
    }

    /// The processes that compute on the GPU, those that hold most first; none where NVML does not tell.
    pub fn processes(&self) -> Vec<GpuProcess> {
        let mut found = vec![ProcessInfo::default(); MOST_PROCESSES];
        let mut count = found.len() as c_uint;
        type Get = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut ProcessInfo) -> c_int;
        // SAFETY: the type is that of the function in nvml.h; it writes at most `count` entries, for which there is room.
        let status = unsafe {
            let get = self.function::<Get>("nvmlDeviceGetComputeRunningProcesses_v3");
            get.map(|get| get(self.device, &mut count, found.as_mut_ptr()))
        };
        found.truncate(if status == Some(0) { count as usize } else { 0 });
        found.sort_by_key(|info| std::cmp::Reverse(info.used));
        // All bits set: the driver does not know.
        let known = |used| Some(used).filter(|used| *used != u64::MAX);
        found.iter().map(|info| GpuProcess { pid: info.pid, used_bytes: known(info.used) }).collect()
    }

    /// Version of the driver, as `580.65.06`.
    pub fn driver_version(&self) -> Option<String> {
        let mut text = [0u8; 96];
        type Get = unsafe extern "C" fn(*mut u8, c_uint) -> c_int;
        // SAFETY: the type is that of the function in nvml.h, but for the sign of its characters; it writes at most as
        // many bytes as it is told.
        let status =
            unsafe { self.function::<Get>("nvmlSystemGetDriverVersion")?(text.as_mut_ptr(), text.len() as c_uint) };
        let text = std::ffi::CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
        (status == 0).then(|| text.to_string())
    }

    /// The GPU's state now; what NVML does not tell is left out.
    pub fn condition(&self) -> Condition {
        let milliwatts = self.number("nvmlDeviceGetPowerUsage");
        Condition {
            sm_clock_mhz: self.number_of("nvmlDeviceGetClockInfo", CLOCK_SM),
            mem_clock_mhz: self.number_of("nvmlDeviceGetClockInfo", CLOCK_MEM),
            temperature_c: self.number_of("nvmlDeviceGetTemperature", TEMPERATURE_GPU),
            power_w: milliwatts.map(|power| f64::from(power) / 1000.0),
            throttle: self.reasons().map(named).unwrap_or_default(),
        }
    }

    /// A function of the library.
    ///
    /// # Safety
    /// `F` must be its type.
    unsafe fn function<F>(&self, name: &str) -> Option<Symbol<'_, F>> {
        // SAFETY: the caller knows the type.
        unsafe { self.library.get(name.as_bytes()) }.ok()
    }

    /// What a function says that takes the device and gives one number.
    fn number(&self, name: &str) -> Option<u32> {
        let mut value: c_uint = 0;
        // SAFETY: the callers name functions of this type, and `value` lives through the call.
        let status = unsafe {
            self.function::<unsafe extern "C" fn(*mut c_void, *mut c_uint) -> c_int>(name)?(self.device, &mut value)
        };
        (status == 0).then_some(value)
    }

    /// What a function says that takes the device and a kind and gives one number.
    fn number_of(&self, name: &str, kind: c_int) -> Option<u32> {
        let mut value: c_uint = 0;
        type Get = unsafe extern "C" fn(*mut c_void, c_int, *mut c_uint) -> c_int;
        // SAFETY: the callers name functions of this type, and `value` lives through the call.
        let status = unsafe { self.function::<Get>(name)?(self.device, kind, &mut value) };
        (status == 0).then_some(value)
    }

    /// Bits of what holds the clocks down. The function's old name is there in every driver.
    fn reasons(&self) -> Option<u64> {
        let mut bits: c_ulonglong = 0;
        type Get = unsafe extern "C" fn(*mut c_void, *mut c_ulonglong) -> c_int;
        // SAFETY: the type is that of the function in nvml.h, and `bits` lives through the call.
        let status =
            unsafe { self.function::<Get>("nvmlDeviceGetCurrentClocksThrottleReasons")?(self.device, &mut bits) };
        (status == 0).then_some(bits)
    }
}

fn named(bits: u64) -> Vec<String> {
    let set = REASONS.iter().enumerate().filter(|(bit, _)| bits >> bit & 1 == 1);
    set.map(|(_, name)| name.to_string()).collect()
}

/// How NVML writes the 16 bytes that CUDA gives: `GPU-` and groups of 4, 2, 2, 2 and 6 bytes.
pub(super) fn uuid_text(bytes: [u8; 16]) -> String {
    let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let groups = [0..4, 4..6, 6..8, 8..10, 10..16].map(|range| hex[range].concat());
    format!("GPU-{}", groups.join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_nvml_uses() {
        assert_eq!(uuid_text(std::array::from_fn(|i| i as u8 * 17)), "GPU-00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!(named(0b1_0000_0101), ["gpu_idle", "sw_power_cap", "display_clocks"]);
        assert_eq!(named(0), [""; 0]);
    }
}
