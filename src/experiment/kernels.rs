//! Every variant of a kernel that this build is likely to compile on a GPU, known without one.
//!
//! What a plan compiles follows from extents, options and a GPU's limits alone, so the plans themselves are asked: those of
//! the shipped experiments' cells, and those of a table of types, head dims, masks, pages and policies, which is an
//! experiment too. A kernel that is added is in the list as soon as it is planned. What is not in the list (a head dim that
//! nobody has) is compiled when it is first used.

use super::SHIPPED;
use super::cell::Device;
use super::grid::Experiment;
use super::measure::cuda;
use super::spec::Spec;
use crate::cache;
use crate::device::cuda::{Limits, Program, Sweep};
use crate::model;
use crate::policy::Registry;
use crate::tensor::DType;
use std::collections::HashSet;

/// Element types and head dims of common models, and of the checks on a GPU (`benches/gpu`); the masks that kernels
/// distinguish; groups of 1 to 16 heads, as `decode` has variants for few rows.
const TABLE: &str = r#"
name = "kernels"
[[grid]]
measure = "forward"
kernel = ["naive", "tiled", "decode", "hopper"]
dtype = ["bf16", "f16", "f32"]
head_dim = [40, 64, 80, 96, 128, 256]
heads = "8/2"
context_tokens = 4096
[[grid]]
measure = "forward"
kernel = ["naive", "tiled", "decode", "hopper"]
dtype = ["bf16", "f16", "f32"]
head_dim = [64, 128, 256]
heads = "8/2"
context_tokens = 4096
causal = false
[[grid]]
measure = "forward"
kernel = ["naive", "tiled", "decode", "hopper"]
dtype = ["bf16", "f16", "f32"]
head_dim = [64, 128, 256]
heads = "8/2"
context_tokens = 4096
softcap = 50.0
[[grid]]
measure = "forward"
kernel = ["naive", "tiled", "decode", "hopper"]
dtype = ["bf16", "f16", "f32"]
head_dim = [64, 128, 256]
heads = "8/2"
context_tokens = 4096
causal = false
softcap = 50.0
[[grid]]
measure = "forward"
kernel = ["naive", "tiled", "decode", "hopper"]
dtype = ["bf16", "f16", "f32"]
head_dim = [64, 128, 256]
heads = "8/2"
context_tokens = 4096
window = 1024
[[grid]]
measure = "backward"
kernel = ["naive", "tiled", "tiled:deterministic=true", "hopper"]
dtype = ["bf16", "f16", "f32"]
head_dim = [40, 64, 80, 96, 128, 256]
heads = "8/2"
context_tokens = 4096
[[grid]]
measure = "backward"
kernel = ["naive", "tiled", "tiled:deterministic=true", "hopper"]
dtype = ["bf16", "f16", "f32"]
head_dim = [64, 128, 256]
heads = "8/2"
context_tokens = 4096
causal = false
[[grid]]
measure = "decode"
kernel = "decode"
dtype = ["bf16", "f16", "f32"]
head_dim = [40, 64, 80, 96, 128, 256]
heads = ["8/8", "8/1", "16/1"]
context_tokens = 4096
page_tokens = ["contiguous", 16]
[[grid]]
measure = "evict"
dtype = ["bf16", "f16", "f32"]
head_dim = [40, 64, 96, 128]
heads = "8/2"
layers = 2
context_tokens = 512
new_tokens = 4
policy = "*"
budget = 0.25
"#;

/// What is compiled for GPUs with these limits, each variant once, in an order that is always the same.
pub fn programs(limits: &Limits) -> Vec<Program> {
    let registry = Registry::default();
    let planned = SHIPPED.iter().copied().chain([("kernels", TABLE)]).flat_map(|(name, text)| {
        let experiment = measured(name, text, &registry);
        let of_cells = experiment.iter().flat_map(Experiment::in_trials);
        let tasks = of_cells.filter_map(|cell| cuda::task(cell, &registry, limits).ok());
        tasks.flat_map(|task| task.programs()).collect::<Vec<_>>()
    });
    let models = [DType::F32, DType::Bf16, DType::F16].map(model::cuda::program);
    // Log-sum-exps of a model's observation windows.
    let windows = [cache::cuda::program(DType::F32.into(), 1)];
    let mut seen = HashSet::new();
    [Sweep::program()]
        .into_iter()
        .chain(models)
        .chain(windows)
        .chain(planned)
        .filter(|program| seen.insert(program.clone()))
        .collect()
}

/// The cells of an experiment that run on a GPU; `None` where none does.
fn measured(name: &str, text: &str, registry: &Registry) -> Option<Experiment> {
    let mut spec = Spec::parse(text, name).expect("experiments of this crate are right");
    spec.grid.retain(|grid| grid.measure.trials().is_some());
    if spec.grid.is_empty() {
        return None;
    }
    Some(Experiment::new(spec, name, registry, Device::Cuda).expect("experiments of this crate are right"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::cuda::CUDA_KERNELS;
    use std::collections::BTreeSet;

    fn of(major: i32, minor: i32) -> Limits {
        Limits::known().find(|limits| limits.capability == (major, minor)).unwrap()
    }

    #[test]
    fn every_file_of_kernels_is_compiled_somewhere() {
        let files =
            |limits: &Limits| programs(limits).iter().map(|program| program.source.name).collect::<BTreeSet<_>>();
        let everywhere: BTreeSet<&str> = Limits::known().flat_map(|limits| files(&limits)).collect();
        let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels")).unwrap();
        let names = folder.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let missing: Vec<String> =
            names.filter(|name| name.ends_with(".cu") && !everywhere.contains(name.as_str())).collect();
        assert_eq!(missing, [""; 0]);
        assert!(files(&of(9, 0)).contains("hopper.cu") && !files(&of(8, 0)).contains("hopper.cu"));
    }

    /// A list for a GPU that is there is the list that was made without it.
    #[test]
    fn what_is_compiled_does_not_depend_on_the_number_of_multiprocessors() {
        let few = programs(&of(9, 0));
        for multiprocessors in [1, 16, 78, 114, 144, 500] {
            assert!(programs(&Limits { multiprocessors, ..of(9, 0) }) == few, "{multiprocessors}");
        }
    }

    #[test]
    fn the_table_names_every_kernel() {
        for kernel in CUDA_KERNELS {
            assert!(TABLE.contains(&format!("\"{}\"", kernel.name())), "{}", kernel.name());
        }
    }
}
