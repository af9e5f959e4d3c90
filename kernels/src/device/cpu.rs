//! The CPU: a pool of a known number of threads, and the vector instructions that the machine offers.

use super::simd::{Isa, IsaError};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::fs;
use std::sync::{Mutex, PoisonError};

/// A pool of threads in which kernels run, with the instruction path they take.
pub struct Cpu {
    pool: ThreadPool,
    isa: Isa,
}

/// The pool could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// Not a usable number of threads.
    #[error("{threads} threads asked; 1 to 1024 are possible")]
    Threads {
        /// The number asked for.
        threads: usize,
    },
    /// The environment's number of threads is none.
    #[error("RAYON_NUM_THREADS is '{text}'; it must be a whole number from 1 to 1024, or be left out")]
    Environment {
        /// What stands there.
        text: String,
    },
    /// The environment asks for an instruction path that is not there.
    #[error(transparent)]
    Isa(#[from] IsaError),
    /// The system gave no threads.
    #[error("cannot start {threads} threads: {reason}")]
    System {
        /// The number asked for.
        threads: usize,
        /// The system's own words.
        reason: String,
    },
}

impl Cpu {
    /// A pool of `threads` threads; without a number, `RAYON_NUM_THREADS` or else every core.
    ///
    /// # Errors
    /// When the number is not between 1 and 1024, the system gives no threads, or `KVSIEVE_ISA` names an instruction
    /// path that this machine lacks.
    pub fn new(threads: Option<usize>) -> Result<Self, CpuError> {
        Self::with_isa(threads, Isa::chosen()?)
    }

    /// As [`Cpu::new`], with an instruction path instead of the environment's.
    ///
    /// # Errors
    /// When the number is not between 1 and 1024 or the system gives no threads.
    pub fn with_isa(threads: Option<usize>, isa: Isa) -> Result<Self, CpuError> {
        // rayon reads the variable too, but would try to start any number of threads.
        let from_environment = || match std::env::var("RAYON_NUM_THREADS") {
            // As rayon has it, 0 is every core.
            Ok(text) => match text.parse::<usize>() {
                Ok(count) => Ok(Some(count).filter(|&count| count > 0)),
                Err(_) => Err(CpuError::Environment { text }),
            },
            Err(_) => Ok(None),
        };
        let threads = threads.map_or_else(from_environment, |threads| Ok(Some(threads)))?;
        if let Some(threads) = threads.filter(|threads| !(1..=1024).contains(threads)) {
            return Err(CpuError::Threads { threads });
        }
        let wanted = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        let pool = ThreadPoolBuilder::new()
            .num_threads(wanted)
            .thread_name(|index| format!("kvsieve-{index}"))
            .start_handler(move |index| pin(index, wanted))
            .build()
            .map_err(|error| CpuError::System { threads: wanted, reason: error.to_string() })?;
        Ok(Cpu { pool, isa })
    }

    /// Number of threads in the pool.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Runs `work` inside the pool, so that its parallel iterators use these threads.
    pub fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        let (mut work, mut done) = (Some(work), None);
        self.enter(&mut || done = work.take().map(|work| work()));
        done.expect("the pool ran it")
    }

    /// The way into the pool, which is compiled once and not for each piece of work.
    fn enter(&self, work: &mut (dyn FnMut() + Send)) {
        self.pool.install(work);
    }

    /// Runs `work` inside the pool while the calling thread does something else; both results.
    pub fn beside<A: Send, B>(&self, work: impl FnOnce() -> A + Send, meanwhile: impl FnOnce() -> B) -> (A, B) {
        let mut done = None;
        let other = self.pool.in_place_scope(|scope| {
            scope.spawn(|_| done = Some(work()));
            meanwhile()
        });
        (done.expect("the scope waits for what it spawned"), other)
    }

    /// The instruction path that vector code takes.
    pub fn isa(&self) -> Isa {
        self.isa
    }
}

/// Binds a thread of a pool that has as many as the process has cores to one of these: systems that gather waking threads on few cores
/// run the first milliseconds of a pass, all of a short prompt, on one of two otherwise. Smaller pools may run beside others and are left to
/// the system, as is a thread that cannot be bound.
#[cfg(target_os = "linux")]
fn pin(index: usize, threads: usize) {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let mut cores = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core));
    let all = allowed.count() as usize;
    if let Some(core) = cores.nth(index).filter(|_| all > 1 && threads == all) {
        let mut own = CpuSet::new();
        own.set(core);
        let _ = sched_setaffinity(None, &own);
    }
}

#[cfg(not(target_os = "linux"))]
fn pin(_index: usize, _threads: usize) {}

/// Scratch memory cut into one slot for each thread of a pool.
pub struct Slots<'a>(Vec<Mutex<&'a mut [f32]>>);

impl<'a> Slots<'a> {
    /// `threads` equal slots of `scratch`.
    pub fn new(scratch: &'a mut [f32], threads: usize) -> Self {
        let slot_len = (scratch.len() / threads).max(1);
        Slots(scratch.chunks_mut(slot_len).take(threads).map(Mutex::new).collect())
    }

    /// Lends the calling thread its slot. Never contended: a thread of the pool has a slot of its own, and the code
    /// inside must not start parallel work (a stolen task would ask for the same slot again).
    pub fn with<R>(&self, work: impl FnOnce(&mut [f32]) -> R) -> R {
        let index = rayon::current_thread_index().unwrap_or(0);
        let mut slot = self.0[index].lock().unwrap_or_else(PoisonError::into_inner);
        work(&mut slot)
    }
}

/// Facts about the processor, for records and `doctor`.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct CpuInfo {
    /// Marketing name.
    pub model: String,
    /// Logical cores that this process may use.
    pub cores: usize,
    /// Vector extensions that kernels could use.
    pub isa: Vec<String>,
    /// Frequency governor, where the system tells.
    pub governor: Option<String>,
}

impl CpuInfo {
    /// Asks the system.
    pub fn probe() -> Self {
        let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let line = |name: &str| {
            text.lines().find_map(|line| {
                let (key, value) = line.split_once(':')?;
                (key.trim() == name).then(|| value.trim().to_string())
            })
        };
        let flags = line("flags").or_else(|| line("Features")).unwrap_or_default();
        let known = [
            "avx2",
            "fma",
            "f16c",
            "avx512f",
            "avx512bw",
            "avx512_vnni",
            "avx512_bf16",
            "avx512_fp16",
            "amx_bf16",
            "asimd",
        ];
        let isa = known.iter().filter(|name| flags.split(' ').any(|flag| flag == **name));
        CpuInfo {
            model: line("model name").unwrap_or_else(|| std::env::consts::ARCH.to_string()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            isa: isa.map(|name| name.to_string()).collect(),
            governor: fs::read_to_string("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
                .ok()
                .map(|text| text.trim().to_string()),
        }
    }
}
