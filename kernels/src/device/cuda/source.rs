//! A kernel's source with its headers in place, and the options that NVRTC gets for a variant.

use crate::tensor::DType;
use std::fmt;
use std::hash::{Hash, Hasher};

/// A file of kernels, which is part of the binary. Whoever launches its kernels declares it, but for [`MODEL`], [`SCORE`] and [`SELECT`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// Its name, as `tiled.cu`.
    pub name: &'static str,
    /// What is in it.
    pub text: &'static str,
}

/// By the name alone, as a module is looked up before every launch.
impl Hash for Source {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

/// A variant: what is compiled at one time.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Program {
    /// Its source.
    pub source: Source,
    /// Element type of q, k, v and o.
    pub dtype: DType,
    /// `D`.
    pub head_dim: usize,
    /// Further macros and their values.
    pub macros: Vec<(&'static str, usize)>,
}

/// Layers of a model, which is above these floors.
pub const MODEL: Source = Source { name: "model.cu", text: include_str!("../../../model.cu") };
/// Scores of policies, likewise.
pub const SCORE: Source = Source { name: "score.cu", text: include_str!("../../../score.cu") };
/// What policies retain, likewise.
pub const SELECT: Source = Source { name: "select.cu", text: include_str!("../../../select.cu") };

const HEADERS: [Source; 14] = [
    Source { name: "ptx.cuh", text: include_str!("../../../ptx.cuh") },
    Source { name: "problem.cuh", text: include_str!("../../../problem.cuh") },
    Source { name: "formats.cuh", text: include_str!("../../../formats.cuh") },
    Source { name: "pages.cuh", text: include_str!("../../../pages.cuh") },
    Source { name: "rows.cuh", text: include_str!("../../../rows.cuh") },
    Source { name: "operands.cuh", text: include_str!("../../../operands.cuh") },
    Source { name: "columns.cuh", text: include_str!("../../../columns.cuh") },
    Source { name: "gradient.cuh", text: include_str!("../../../gradient.cuh") },
    Source { name: "query_sums.cuh", text: include_str!("../../../query_sums.cuh") },
    Source { name: "product.cuh", text: include_str!("../../../product.cuh") },
    Source { name: "strip.cuh", text: include_str!("../../../strip.cuh") },
    Source { name: "lists.cuh", text: include_str!("../../../lists.cuh") },
    Source { name: "strip_f32.cuh", text: include_str!("../../../strip_f32.cuh") },
    Source { name: "hopper.cuh", text: include_str!("../../../hopper.cuh") },
];

impl Program {
    /// The text with its headers in place, each once, so that NVRTC needs no files.
    pub(super) fn text(&self) -> String {
        let (mut text, mut seen) = (String::new(), Vec::new());
        expand(self.source.text, &mut seen, &mut text);
        text
    }

    /// What NVRTC is told, for an architecture such as `sm_90`.
    pub(super) fn options(&self, architecture: &str) -> Vec<String> {
        let element = match self.dtype {
            DType::F32 => "F32",
            DType::Bf16 => "BF16",
            DType::F16 => "F16",
        };
        let own = self.macros.iter().map(|(name, value)| format!("-D{name}={value}"));
        let all = [
            format!("--gpu-architecture={architecture}"),
            "-std=c++17".into(),
            format!("-DELEMENT={element}"),
            format!("-DHEAD_DIM={}", self.head_dim),
        ];
        all.into_iter().chain(own).collect()
    }
}

impl fmt::Display for Program {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} for {} and D {}", self.source.name, self.dtype, self.head_dim)
    }
}

/// Appends `source` to `text` with the headers it includes, the first time that each is met.
fn expand(source: &str, seen: &mut Vec<&'static str>, text: &mut String) {
    for line in source.lines() {
        let included = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"'));
        match HEADERS.iter().find(|header| Some(header.name) == included) {
            Some(header) if seen.contains(&header.name) => {}
            Some(header) => {
                seen.push(header.name);
                expand(header.text, seen, text);
            }
            // One text has no header of its own to guard.
            None if line == "#pragma once" => {}
            None => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn in_cuda(header: &str, name: &str) -> Vec<String> {
        in_cuda_text(HEADERS.iter().find(|source| source.name == header).unwrap().text, name)
    }

    /// The names of a struct's fields in CUDA, in order.
    pub(in super::super) fn in_cuda_text(text: &str, name: &str) -> Vec<String> {
        let start = format!("struct {name} {{");
        let body = text.split_once(&start).unwrap().1.split_once("};").unwrap().0;
        let code: String = body.lines().map(|line| line.split("//").next().unwrap().trim()).collect();
        let parts = code.split(';').flat_map(|statement| statement.split(',')).filter(|part| !part.is_empty());
        parts.map(|part| part.split([' ', '*']).next_back().unwrap().to_string()).collect()
    }

    /// Likewise in Rust. The last field has no size, and none in CUDA.
    pub(in super::super) fn in_rust(text: &'static str, name: &str) -> Vec<&'static str> {
        let start = format!("struct {name}<'a> {{");
        let body = text.split_once(&start).unwrap().1.split_once('}').unwrap().0;
        let code = body.lines().map(str::trim).filter(|line| !line.starts_with("//"));
        let mut names: Vec<_> = code.filter_map(|line| Some(line.split_once(':')?.0)).collect();
        assert_eq!(names.pop(), Some("buffers"));
        names
    }

    #[test]
    fn arguments_are_the_same_in_rust_and_in_cuda() {
        assert_eq!(in_rust(include_str!("problem.rs"), "Problem"), in_cuda("problem.cuh", "Problem"));
        assert_eq!(in_rust(include_str!("gradients.rs"), "Gradients"), in_cuda("gradient.cuh", "Gradients"));
        assert_eq!(in_rust(include_str!("pages.rs"), "Pages"), in_cuda("pages.cuh", "Pages"));
    }
}
