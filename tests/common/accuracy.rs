//! Seeded problems that kvsieve and another program both compute, and the f64 rows that judge both.

use super::{Problem, cpu, forward_call, inputs};
use kvsieve::attention::reference::{self, Row};
use kvsieve::attention::{AttentionError, DenseKv, Forward, Inputs, Params, Shape, kernel};
use kvsieve::tensor::DType;
use serde::Deserialize;

/// Queries of each head that are compared.
const MOST_QUERIES: usize = 64;

/// A problem as the fixture and the requests of `benches/peers` write it: one sequence, standard scale.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Described {
    pub dtype: DType,
    /// Query heads, KV heads.
    pub heads: [usize; 2],
    pub q_len: usize,
    pub kv_len: usize,
    pub head_dim: usize,
    pub causal: bool,
}

impl Described {
    /// The problem, when its extents fit together.
    pub fn problem(&self) -> Result<Problem, AttentionError> {
        let Described { dtype, heads: [q_heads, kv_heads], q_len, kv_len, head_dim, causal } = *self;
        let shape = Shape { batch: 1, q_heads, kv_heads, q_len, kv_len, head_dim };
        shape.check()?;
        Ok(Problem { shape, params: Params::new(head_dim, causal), dtype })
    }
}

/// The seeded inputs of a problem with the f64 result of some of its rows.
pub struct Checked {
    pub problem: Problem,
    pub inputs: Inputs,
    /// `[batch, query head, query]` of each row.
    pub at: Vec<[usize; 3]>,
    pub expected: Vec<Row>,
}

impl Checked {
    pub fn new(problem: Problem, seed: u64) -> Self {
        let (inputs, at) = (inputs(&problem, seed), reference::sample_rows(&problem.shape, MOST_QUERIES));
        let kv = DenseKv::new(inputs.k.view(), inputs.v.view()).unwrap();
        let Problem { shape, params, .. } = problem;
        let expected = reference::rows(&Forward { shape, params, q: inputs.q.view(), kv: &kv, cpu: cpu(2) }, &at);
        Checked { problem, inputs, at, expected }
    }

    /// Relative L2 error of a kernel's output over the rows.
    pub fn error(&self, name: &str) -> f64 {
        let kv = DenseKv::new(self.inputs.k.view(), self.inputs.v.view()).unwrap();
        let Problem { shape, params, dtype } = self.problem;
        let call = Forward { shape, params, q: self.inputs.q.view(), kv: &kv, cpu: cpu(2) };
        let outputs = forward_call(&*kernel(name).unwrap(), &call, dtype);
        reference::relative_error(&outputs.o.view(), &self.at, &self.expected)
    }
}
