//! NVRTC, NVIDIA's compiler as a library: found, loaded, and asked for machine code.
//!
//! It is loaded from the path where it was found, not by name, so that the version shown is the version used. It needs
//! no GPU.

use super::CudaError;
use crate::device::gpu::Gpu;
use libloading::{Library, Symbol};
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

/// A loaded NVRTC.
pub struct Nvrtc {
    library: Library,
    /// NVRTC opens this by name; where no search path leads to it, it must be loaded before.
    _builtins: Option<Library>,
    path: PathBuf,
    version: (i32, i32),
}

type Handle = *mut c_void;

impl Nvrtc {
    /// Loads the library at `path`, else at `KVSIEVE_NVRTC`, else the first that [`Gpu::probe`] finds.
    ///
    /// # Errors
    /// [`CudaError::NoNvrtc`] when none can be loaded.
    pub fn load(path: Option<&Path>) -> Result<Self, CudaError> {
        let told = path.map(PathBuf::from).or_else(|| std::env::var_os("KVSIEVE_NVRTC").map(PathBuf::from));
        let candidates = match told {
            Some(path) => vec![path],
            None => Gpu::probe().nvrtc.into_iter().filter(|path| is_compiler(path)).collect(),
        };
        let mut looked = Vec::new();
        for candidate in candidates {
            match Self::open(&candidate) {
                Ok(nvrtc) => return Ok(nvrtc),
                Err(error) => looked.push(format!("{}: {error}", candidate.display())),
            }
        }
        let looked = if looked.is_empty() { "none was found".into() } else { looked.join("; ") };
        Err(CudaError::NoNvrtc { looked })
    }

    fn open(path: &Path) -> Result<Self, libloading::Error> {
        let builtins = path.parent().and_then(|folder| {
            let names = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
            let mut builtins: Vec<PathBuf> = names.filter(|path| is_builtins(path)).collect();
            builtins.sort();
            builtins.pop()
        });
        // SAFETY: the initialisers of NVIDIA's libraries have no requirements on their caller.
        let builtins = builtins.and_then(|path| unsafe { Library::new(path) }.ok());
        // SAFETY: as above.
        let library = unsafe { Library::new(path) }?;
        let (mut major, mut minor) = (0, 0);
        {
            // SAFETY: the type is that of nvrtcVersion in nvrtc.h.
            let version: Symbol<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int> =
                unsafe { library.get(b"nvrtcVersion") }?;
            // SAFETY: both pointers are to integers that live through the call.
            unsafe { version(&mut major, &mut minor) };
        }
        Ok(Nvrtc { library, _builtins: builtins, path: path.to_path_buf(), version: (major, minor) })
    }

    /// Where it was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// As `13.0`.
    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// Says whether it compiles for an architecture such as `sm_90a`.
    ///
    /// # Errors
    /// [`CudaError::Architecture`] when it does not, with the version that would.
    pub fn check(&self, architecture: &str) -> Result<(), CudaError> {
        let number = number(architecture);
        let listed = self.listed().is_none_or(|listed| number.is_some_and(|number| listed.contains(&number)));
        let young = first_version(architecture).is_none_or(|first| self.version >= first);
        match listed && young {
            true => Ok(()),
            false => Err(CudaError::Architecture {
                version: self.version(),
                path: self.path.display().to_string(),
                architecture: architecture.into(),
            }),
        }
    }

    /// The architectures that it says it compiles for, as 90; `None` before CUDA 11.2, which does not say.
    fn listed(&self) -> Option<Vec<c_int>> {
        type Count = unsafe extern "C" fn(*mut c_int) -> c_int;
        type List = unsafe extern "C" fn(*mut c_int) -> c_int;
        // SAFETY: the types are those of these functions in nvrtc.h; the list is as long as NVRTC says just before.
        unsafe {
            let count: Symbol<Count> = self.library.get(b"nvrtcGetNumSupportedArchs").ok()?;
            let list: Symbol<List> = self.library.get(b"nvrtcGetSupportedArchs").ok()?;
            let mut length = 0;
            if count(&mut length) != 0 {
                return None;
            }
            let mut listed = vec![0; usize::try_from(length).ok()?];
            (list(listed.as_mut_ptr()) == 0).then_some(listed)
        }
    }

    /// Machine code of `source` for the architecture that `options` name; on failure the compiler's log.
    pub(super) fn compile(&self, source: &str, options: &[String]) -> Result<Vec<u8>, String> {
        let text = |text: &str| CString::new(text).map_err(|_| format!("a zero byte in {text:?}"));
        let source = text(source)?;
        let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let missing = |error: libloading::Error| error.to_string();
        type Create = unsafe extern "C" fn(
            *mut Handle,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        type Compile = unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> c_int;
        type Size = unsafe extern "C" fn(Handle, *mut usize) -> c_int;
        type Get = unsafe extern "C" fn(Handle, *mut u8) -> c_int;
        type Destroy = unsafe extern "C" fn(*mut Handle) -> c_int;
        // SAFETY: the types are those of these functions in nvrtc.h, the same since CUDA 11.1; `source` and the options
        // end with zero and outlive the calls; `take` makes each buffer as large as NVRTC says just before.
        unsafe {
            let create: Symbol<Create> = self.library.get(b"nvrtcCreateProgram").map_err(missing)?;
            let compile: Symbol<Compile> = self.library.get(b"nvrtcCompileProgram").map_err(missing)?;
            let destroy: Symbol<Destroy> = self.library.get(b"nvrtcDestroyProgram").map_err(missing)?;
            let log_size: Symbol<Size> = self.library.get(b"nvrtcGetProgramLogSize").map_err(missing)?;
            let log: Symbol<Get> = self.library.get(b"nvrtcGetProgramLog").map_err(missing)?;
            let code_size: Symbol<Size> = self.library.get(b"nvrtcGetCUBINSize").map_err(missing)?;
            let code: Symbol<Get> = self.library.get(b"nvrtcGetCUBIN").map_err(missing)?;
            let take = |program: Handle, size: &Size, get: &Get| {
                let mut bytes = 0;
                if size(program, &mut bytes) != 0 {
                    return Vec::new();
                }
                let mut data = vec![0; bytes];
                if get(program, data.as_mut_ptr()) == 0 { data } else { Vec::new() }
            };
            let mut program = null_mut();
            let status = create(&mut program, source.as_ptr(), null(), 0, null(), null());
            if status != 0 {
                return Err(format!("nvrtcCreateProgram gave status {status}"));
            }
            let status = compile(program, pointers.len() as c_int, pointers.as_ptr());
            let code = if status == 0 { take(program, &code_size, &code) } else { Vec::new() };
            let said = take(program, &log_size, &log);
            destroy(&mut program);
            if code.is_empty() {
                let said = String::from_utf8_lossy(&said);
                return Err(format!("status {status}; {}", said.trim_end_matches('\0').trim()));
            }
            Ok(code)
        }
    }
}

/// The first NVRTC that compiles for an architecture (release notes of the CUDA Toolkit), as far as is known here.
const FIRST_VERSIONS: [(&str, (c_int, c_int)); 12] = [
    ("sm_80", (11, 0)),
    ("sm_86", (11, 1)),
    ("sm_87", (11, 4)),
    ("sm_89", (11, 8)),
    ("sm_90a", (12, 0)),
    ("sm_88", (13, 0)),
    ("sm_100", (12, 8)),
    ("sm_101", (12, 8)),
    ("sm_103", (12, 9)),
    ("sm_110", (13, 0)),
    ("sm_120", (12, 8)),
    ("sm_121", (12, 9)),
];

fn first_version(architecture: &str) -> Option<(c_int, c_int)> {
    FIRST_VERSIONS.iter().find(|(known, _)| *known == architecture).map(|&(_, version)| version)
}

/// The number of an architecture, as 90 of `sm_90a`.
fn number(architecture: &str) -> Option<c_int> {
    architecture.strip_prefix("sm_")?.trim_end_matches(['a', 'f']).parse().ok()
}

/// What to do where a compiler does not know an architecture.
pub(super) fn advice(architecture: &str) -> String {
    let which = match first_version(architecture) {
        Some((major, minor)) => format!("{major}.{minor} is the first that does"),
        None => "a later one may".into(),
    };
    format!("{which}: pip install nvidia-cuda-nvrtc, or give its path (--nvrtc or KVSIEVE_NVRTC)")
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Whether a file is NVRTC itself; a second build beside it is called `.alt.`.
fn is_compiler(path: &Path) -> bool {
    name(path).starts_with("libnvrtc.so") && !name(path).contains(".alt.")
}

fn is_builtins(path: &Path) -> bool {
    name(path).starts_with("libnvrtc-builtins.so") && !name(path).contains(".alt.")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::{CudaError, Limits};

    #[test]
    fn the_version_that_knows_an_architecture_is_named() {
        let said = |architecture: &str| {
            let error = CudaError::Architecture {
                version: "12.4".into(),
                path: "libnvrtc.so".into(),
                architecture: architecture.into(),
            };
            error.to_string()
        };
        let line = said("sm_103");
        assert!(line.starts_with("NVRTC 12.4 (libnvrtc.so) does not compile for sm_103; 12.9 is the first"), "{line}");
        assert!(said("sm_150").contains("; a later one may: pip install"), "{}", said("sm_150"));
        for limits in Limits::known() {
            let (architecture, (major, minor)) = (limits.architecture(), limits.capability);
            assert_eq!(number(&architecture), Some(10 * major + minor));
            assert!(first_version(&architecture).is_some(), "{architecture}");
        }
    }
}
