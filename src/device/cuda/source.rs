//! The kernels' sources, which are part of the binary, and the text and options that NVRTC gets for a variant.

use crate::tensor::DType;
use std::fmt;

/// A source file of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// `naive.cu`: any element type, any head dim.
    Naive,
    /// `tiled.cu`: 16-bit elements.
    Tiled,
    /// `decode.cu` over contiguous tensors: 16-bit elements.
    Decode,
}

/// A variant: what is compiled at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Program {
    /// Its source.
    pub family: Family,
    /// Element type of q, k, v and o.
    pub dtype: DType,
    /// `D`.
    pub head_dim: usize,
}

const HEADERS: [(&str, &str); 3] = [
    ("ptx.cuh", include_str!("../../../kernels/ptx.cuh")),
    ("problem.cuh", include_str!("../../../kernels/problem.cuh")),
    ("strip.cuh", include_str!("../../../kernels/strip.cuh")),
];

impl Program {
    /// The text with its headers in place, each once, so that NVRTC needs no files.
    pub(super) fn text(&self) -> String {
        let source = match self.family {
            Family::Naive => include_str!("../../../kernels/naive.cu"),
            Family::Tiled => include_str!("../../../kernels/tiled.cu"),
            Family::Decode => include_str!("../../../kernels/decode.cu"),
        };
        let (mut text, mut seen) = (String::new(), Vec::new());
        expand(source, &mut seen, &mut text);
        text
    }

    /// What NVRTC is told, for an architecture such as `sm_90`.
    pub(super) fn options(&self, architecture: &str) -> Vec<String> {
        let element = match self.dtype {
            DType::F32 => "F32",
            DType::Bf16 => "BF16",
            DType::F16 => "F16",
        };
        let mut options = vec![
            format!("--gpu-architecture={architecture}"),
            "-std=c++17".into(),
            format!("-DELEMENT={element}"),
            format!("-DHEAD_DIM={}", self.head_dim),
        ];
        if self.family == Family::Decode {
            options.push("-DPAGED=0".into());
        }
        options
    }
}

impl fmt::Display for Program {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.family {
            Family::Naive => "naive",
            Family::Tiled => "tiled",
            Family::Decode => "decode",
        };
        write!(formatter, "{name}.cu for {} and D {}", self.dtype, self.head_dim)
    }
}

/// Appends `source` to `text` with the headers it includes, the first time that each is met.
fn expand(source: &str, seen: &mut Vec<&'static str>, text: &mut String) {
    for line in source.lines() {
        let included = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"'));
        match HEADERS.iter().find(|(name, _)| Some(*name) == included) {
            Some((name, _)) if seen.contains(name) => {}
            Some((name, header)) => {
                seen.push(name);
                expand(header, seen, text);
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
mod tests {
    use super::*;

    #[test]
    fn headers_are_in_place_once_and_nothing_else_is_left_to_include() {
        for family in [Family::Naive, Family::Tiled, Family::Decode] {
            let text = Program { family, dtype: DType::Bf16, head_dim: 64 }.text();
            assert_eq!(text.matches("struct Problem {").count(), 1, "{family:?}");
            let left: Vec<&str> = text.lines().filter(|line| line.starts_with("#include")).collect();
            assert_eq!(left, ["#include \"machine.hpp\""], "only the emulation's, which NVRTC skips: {family:?}");
        }
    }

    /// The fields of `Problem` on both sides: same names, same order.
    #[test]
    fn problem_is_the_same_in_rust_and_in_cuda() {
        let fields = |text: &str| {
            let body = text.split_once("struct Problem {").unwrap().1.split_once("};").unwrap().0;
            let code = body.lines().map(|line| line.split("//").next().unwrap().trim().to_string());
            let mut names: Vec<String> = Vec::new();
            for statement in code.collect::<String>().split(';').filter(|statement| !statement.is_empty()) {
                for part in statement.split(',') {
                    names.push(part.split([' ', '*']).next_back().unwrap().to_string());
                }
            }
            names
        };
        let rust =
            include_str!("problem.rs").split_once("pub struct Problem<'a> {").unwrap().1.split_once('}').unwrap().0;
        let code = rust.lines().map(str::trim).filter(|line| !line.starts_with("//"));
        let rust: Vec<&str> = code.filter_map(|line| Some(line.split_once(':')?.0)).collect();
        assert_eq!(rust[..rust.len() - 1], fields(HEADERS[1].1), "the last of Rust's fields has no size");
    }
}
