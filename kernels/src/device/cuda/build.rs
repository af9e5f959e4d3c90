//! Compiled kernels, kept on the disk: the second use of a variant compiles nothing.
//!
//! The key is the hash of source, options (which name the architecture) and NVRTC's version. The folder is
//! `KVSIEVE_CACHE`, else `kvsieve` in `XDG_CACHE_HOME` or `~/.cache`. A file that cannot be written costs time only.

use super::{CudaError, Nvrtc, Program};
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// First bytes of machine code: an ELF file. What else a file holds is not used.
const MAGIC: &[u8] = b"\x7fELF";

/// Where machine code came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// It lay on the disk.
    Cache,
    /// It was compiled now.
    Compiled,
}

/// A folder of compiled kernels.
pub struct Cache {
    folder: Option<PathBuf>,
}

/// What [`Cache::build`] gives.
pub struct Built {
    /// The machine code.
    pub code: Vec<u8>,
    /// Where it came from.
    pub origin: Origin,
    /// Why it could not be kept, where that was tried.
    pub unkept: Option<std::io::Error>,
}

impl Default for Cache {
    /// Where the environment says; nowhere when it says nothing.
    fn default() -> Self {
        Cache { folder: folder() }
    }
}

impl Cache {
    /// In this folder, which is made when it is needed.
    pub fn at(folder: PathBuf) -> Self {
        Cache { folder: Some(folder) }
    }

    /// Where it is.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Machine code of a program for an architecture such as `sm_90a`, from the folder or compiled and kept there.
    ///
    /// # Errors
    /// [`CudaError::Compile`] when NVRTC refuses it.
    pub fn build(&self, nvrtc: &Nvrtc, program: &Program, architecture: &str) -> Result<Built, CudaError> {
        let (text, options) = (program.text(), program.options(architecture));
        let file = self.file(&text, &options, &nvrtc.version());
        let kept = file.as_ref().and_then(|file| fs::read(file).ok()).filter(|code| code.starts_with(MAGIC));
        if let Some(code) = kept {
            return Ok(Built { code, origin: Origin::Cache, unkept: None });
        }
        let code = nvrtc.compile(&text, &options).map_err(|log| CudaError::Compile {
            version: nvrtc.version(),
            program: program.to_string(),
            architecture: architecture.to_string(),
            log,
        })?;
        // A cache that cannot be written is, for who computes, a cache that is not there.
        let unkept = file.and_then(|file| keep(&file, &code).err());
        Ok(Built { code, origin: Origin::Compiled, unkept })
    }

    /// The bytes of this program's machine code, where it is kept: this very source, compiled by NVRTC `version` for this
    /// architecture.
    pub fn holds(&self, version: &str, program: &Program, architecture: &str) -> Option<u64> {
        let file = self.file(&program.text(), &program.options(architecture), version)?;
        let (mut opened, mut start) = (fs::File::open(file).ok()?, [0; MAGIC.len()]);
        opened.read_exact(&mut start).ok().filter(|()| start == MAGIC)?;
        Some(opened.metadata().ok()?.len())
    }

    fn file(&self, text: &str, options: &[String], version: &str) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(format!("{}.cubin", key(text, options, version))))
    }
}

fn key(text: &str, options: &[String], version: &str) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in [text, version].into_iter().chain(options.iter().map(String::as_str)) {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    hasher.finalize().to_hex()[..32].to_string()
}

/// Writes under another name first: a reader never sees half a file.
fn keep(file: &Path, code: &[u8]) -> std::io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let mut temporary = tempfile::NamedTempFile::new_in(folder)?;
    temporary.write_all(code)?;
    temporary.persist(file)?;
    Ok(())
}

fn folder() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("KVSIEVE_CACHE")
        .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("kvsieve")))
        .or_else(|| Some(variable("HOME")?.join(".cache/kvsieve")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::Source;
    use crate::tensor::DType;

    #[test]
    fn the_key_depends_on_every_part() {
        let options = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        let one = key("text", &options(&["-a", "-b"]), "13.0");
        let others = [
            key("texts", &options(&["-a", "-b"]), "13.0"),
            key("text", &options(&["-a"]), "13.0"),
            key("text", &options(&["-a-b"]), "13.0"),
            key("text", &options(&["-a", "-b"]), "13.1"),
        ];
        assert_eq!(one, key("text", &options(&["-a", "-b"]), "13.0"));
        assert!(others.iter().all(|other| *other != one));
    }

    /// Runs where an NVRTC is found, which needs no GPU: CI installs the wheel and names it in `KVSIEVE_NVRTC`.
    #[test]
    #[ignore = "cuda: needs NVRTC"]
    fn machine_code_is_kept() {
        let nvrtc = Nvrtc::load(None).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().into());
        let build = |program: &Program| {
            let built = cache.build(&nvrtc, program, "sm_80").unwrap();
            assert!(built.unkept.is_none());
            (built.code, built.origin)
        };
        let text = "#include \"problem.cuh\"\nstatic_assert(HEAD_DIM % 8 == 0, \"eights\");\n\
                    KERNEL(32) none(ARGUMENT Problem p) { store<ELEMENT>(p.o, 0, element<ELEMENT>(p.q, 0)); }";
        let source = Source { name: "none.cu", text };
        let program = Program { source, dtype: DType::F16, head_dim: 64, macros: vec![] };
        let held = |architecture| cache.holds(&nvrtc.version(), &program, architecture);
        assert_eq!(held("sm_80"), None);
        let (code, origin) = build(&program);
        assert_eq!(origin, Origin::Compiled);
        assert_eq!((held("sm_80"), held("sm_86")), (Some(code.len() as u64), None));
        assert_eq!(build(&program), (code, Origin::Cache));
        for file in fs::read_dir(folder.path()).unwrap() {
            fs::write(file.unwrap().path(), "torn").unwrap();
        }
        assert_eq!(held("sm_80"), None, "a torn file is not held");
        assert_eq!(build(&program).1, Origin::Compiled, "a torn file is not used");
        let wrong = Program { head_dim: 7, ..program.clone() };
        let error = Cache::at(folder.path().into()).build(&nvrtc, &wrong, "sm_80").err().unwrap().to_string();
        assert!(error.contains("none.cu for f16 and D 7") && error.contains("eights"), "{error}");
    }
}
