//! What can be said of an NVIDIA GPU without touching it: which files of its driver and of its run-time compiler lie
//! where programs look for them. Nothing is opened as a library, so this works on every machine.

use serde::Serialize;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// NVIDIA's traces on this machine; all empty where there are none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// Names of the devices that the kernel driver lists.
    pub devices: Vec<String>,
    /// Version of the loaded kernel driver, as `535.129.03`.
    pub driver_version: Option<String>,
    /// The driver's library, `libcuda.so.1`, wherever it lies.
    pub libcuda: Vec<PathBuf>,
    /// NVRTC, which compiles CUDA C++ at run time: `libnvrtc.so*`, wherever it lies.
    pub nvrtc: Vec<PathBuf>,
    /// cuBLAS, NVIDIA's matrix products: `libcublas.so*`, wherever it lies.
    pub cublas: Vec<PathBuf>,
}

/// Folders in which distributions, containers and CUDA's installer put libraries.
const LIBRARY_FOLDERS: [&str; 14] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "lib64",
    "usr/local/lib",
    "usr/local/nvidia/lib64",
    "usr/local/nvidia/lib",
    "usr/lib/wsl/lib",
    "run/opengl-driver/lib",
    "usr/local/cuda/compat",
    "opt/cuda/lib64",
];

impl Gpu {
    /// Looks at the usual places of this machine.
    pub fn probe() -> Self {
        Self::probe_in(Path::new("/"), |name| std::env::var_os(name))
    }

    /// Looks at the usual places under `root`, and at those that environment variables name.
    fn probe_in(root: &Path, variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let paths = |name: &str| -> Vec<PathBuf> {
            variable(name).map(|value| std::env::split_paths(&value).collect()).unwrap_or_default()
        };
        let mut folders = paths("LD_LIBRARY_PATH");
        folders.extend(LIBRARY_FOLDERS.iter().map(|folder| root.join(folder)));

        let mut toolkits: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH"].iter().flat_map(|name| paths(name)).collect();
        toolkits.extend(children(&root.join("usr/local"), "cuda"));
        let mut compilers = folders.clone();
        for toolkit in toolkits {
            compilers.extend([toolkit.join("lib64"), toolkit.join("lib")]);
            compilers.extend(children(&toolkit.join("targets"), "").iter().map(|target| target.join("lib")));
        }
        // Python's packages of CUDA lie beside the interpreters that PATH or an active environment names.
        let mut prefixes: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().flat_map(|name| paths(name)).collect();
        prefixes.extend(paths("PATH").iter().filter_map(|bin| bin.parent()).map(Path::to_path_buf));
        prefixes.extend(paths("HOME").iter().map(|home| home.join(".local")));
        prefixes.extend([root.join("usr/local"), root.join("usr")]);
        for prefix in prefixes {
            compilers.push(prefix.join("lib"));
            for python in children(&prefix.join("lib"), "python") {
                for packages in ["site-packages", "dist-packages"] {
                    let nvidia = children(&python.join(packages).join("nvidia"), "");
                    compilers.extend(nvidia.iter().map(|package| package.join("lib")));
                }
            }
        }

        let driver = root.join("proc/driver/nvidia");
        let devices = children(&driver.join("gpus"), "");
        Gpu {
            devices: devices.iter().filter_map(|device| device_name(&device.join("information"))).collect(),
            driver_version: fs::read_to_string(driver.join("version")).ok().map(|text| version(&text)),
            libcuda: files(&folders, "libcuda.so.1"),
            nvrtc: files(&compilers, "libnvrtc.so"),
            cublas: files(&compilers, "libcublas.so"),
        }
    }
}

/// Entries of a folder whose names start with `prefix`, sorted; none where there is no such folder.
fn children(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let named = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
    let mut paths: Vec<PathBuf> = named.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// Files in `folders` whose names start with `prefix`, in the order of the folders; links to the same file count once.
fn files(folders: &[PathBuf], prefix: &str) -> Vec<PathBuf> {
    let mut seen = BTreeSet::new();
    let found = folders.iter().flat_map(|folder| children(folder, prefix));
    found
        .filter_map(|path| path.canonicalize().ok())
        .filter(|path| path.is_file() && seen.insert(path.clone()))
        .collect()
}

/// `535.129.03` from `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 ...`.
fn version(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    line.split_whitespace().find(is_version).unwrap_or("unknown").to_string()
}

/// The `Model:` line of a device's information file.
fn device_name(information: &Path) -> Option<String> {
    let text = fs::read_to_string(information).ok()?;
    text.lines().find_map(|line| Some(line.strip_prefix("Model:")?.trim().to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_found_where_there_is_nothing() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(Gpu::probe_in(root.path(), |_| None), Gpu::default());
    }

    #[test]
    fn driver_library_and_compiler_are_found_where_they_usually_lie() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().canonicalize().unwrap().join(path);
        let version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19\nGCC version: 12.3.0\n";
        let cases = [
            ("proc/driver/nvidia/version", version),
            ("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA A100\nIRQ: 5\n"),
            ("usr/lib/x86_64-linux-gnu/libcuda.so.1", ""),
            ("extra/libcuda.so.1", ""),
            ("usr/local/cuda-12.4/targets/x86_64-linux/lib/libnvrtc.so.12.4.127", ""),
            ("usr/local/cuda-12.4/targets/x86_64-linux/lib/libnvrtc-builtins.so.12.4", ""),
            ("venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13", ""),
            ("venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcublas.so.13", ""),
            ("venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcublasLt.so.13", ""),
            ("toolkit/lib64/libnvrtc.so.11", ""),
        ];
        for (path, text) in cases {
            fs::create_dir_all(at(path).parent().unwrap()).unwrap();
            fs::write(at(path), text).unwrap();
        }
        #[cfg(unix)]
        std::os::unix::fs::symlink(at("usr/local/cuda-12.4"), at("usr/local/cuda")).unwrap();
        let gpu = Gpu::probe_in(root.path(), |name| match name {
            "LD_LIBRARY_PATH" => Some(at("extra").into()),
            "CUDA_HOME" => Some(at("toolkit").into()),
            "PATH" => Some(at("venv/bin").into()),
            _ => None,
        });
        assert_eq!(gpu.devices, ["NVIDIA A100"]);
        assert_eq!(gpu.driver_version.as_deref(), Some("535.129.03"));
        assert_eq!(gpu.libcuda, [at("extra/libcuda.so.1"), at("usr/lib/x86_64-linux-gnu/libcuda.so.1")]);
        let expected = [
            "toolkit/lib64/libnvrtc.so.11",
            "usr/local/cuda-12.4/targets/x86_64-linux/lib/libnvrtc.so.12.4.127",
            "venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
        ];
        assert_eq!(gpu.nvrtc, expected.map(at));
        assert_eq!(gpu.cublas, [at("venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcublas.so.13")]);
    }
}
