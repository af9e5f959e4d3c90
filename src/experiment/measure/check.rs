//! Results against the f64 reference.

use super::trials::{Bench, TrialError, Trials};
use crate::attention::{DenseKv, Forward, Outputs, Shape, reference};
use crate::device::Cpu;
use crate::experiment::cell::Cell;
use crate::experiment::record::Drift;
use crate::stats::bootstrap;
use crate::tensor::DType;
use crate::workload::Workload;
use std::collections::BTreeMap;

/// Queries of a long context that are compared, in every head.
const CHECKED_QUERIES: usize = 32;

/// Rows of the dense f64 result.
pub struct Truth {
    /// `[batch, query head, token]` of each row.
    pub at: Vec<[usize; 3]>,
    /// The rows.
    pub rows: Vec<reference::Row>,
}

impl Truth {
    /// Computes the rows that a cell is checked on ([`Trials::checked_rows`]).
    ///
    /// # Errors
    /// When the inputs do not fit together.
    pub fn compute(trials: &dyn Trials, cell: &Cell, workload: &Workload, cpu: &Cpu) -> Result<Self, TrialError> {
        let tokens = cell.context_tokens + cell.new_tokens;
        let shape = Shape { q_len: tokens, kv_len: tokens, ..cell.shape() };
        let kv = DenseKv::new(workload.k.view().tokens(0..tokens), workload.v.view().tokens(0..tokens))?;
        let q = workload.q.view().tokens(0..tokens);
        let call = Forward { shape, params: cell.params(), q, kv: &kv, cpu };
        let at = trials.checked_rows(cell, &shape);
        let rows = reference::rows(&call, &at);
        Ok(Truth { at, rows })
    }

    /// All rows of a call, over the keys and values that it reads.
    pub fn of_call(call: &Forward<'_>) -> Self {
        let at = rows_of(&call.shape, &(0..call.shape.q_len).collect::<Vec<_>>());
        let rows = reference::rows(call, &at);
        Truth { at, rows }
    }

    /// What the same rows are for [`Workload::blank`] inputs, whose values are all `value`.
    pub fn blank(cell: &Cell, value: f64) -> Self {
        let (shape, params) = (cell.shape(), cell.params());
        let at = sample_rows(&shape);
        let row = |&[_, _, token]: &[usize; 3]| {
            let seen = params.visible(token, shape.q_len, shape.kv_len).len();
            reference::Row { o: vec![value; cell.head_dim], lse: (seen as f64).ln() }
        };
        let rows = at.iter().map(row).collect();
        Truth { at, rows }
    }

    /// Relative L2 distance of a result from these rows, with an interval over tokens. `read` writes the result's row
    /// `[batch, query head, token]` into its second argument.
    pub fn drift(&self, head_dim: usize, read: impl Fn([usize; 3], &mut [f32])) -> Drift {
        let mut row = vec![0.0; head_dim];
        // Squared distance and norm for each token, summed over sequences and heads.
        let mut sums: BTreeMap<usize, (f64, f64)> = BTreeMap::new();
        for (&at, expected) in self.at.iter().zip(&self.rows) {
            read(at, &mut row);
            let (distance, norm) = sums.entry(at[2]).or_default();
            for (&got, &wanted) in row.iter().zip(&expected.o) {
                *distance += (f64::from(got) - wanted).powi(2);
                *norm += wanted * wanted;
            }
        }
        let sums: Vec<(f64, f64)> = sums.into_values().collect();
        let relative = |picked: &[usize]| {
            let total = picked.iter().fold((0.0, 0.0), |sum, &i| (sum.0 + sums[i].0, sum.1 + sums[i].1));
            if total.0 == 0.0 { 0.0 } else { (total.0 / total.1).sqrt() }
        };
        let (ci95_low, ci95_high) = bootstrap(sums.len(), relative);
        let all: Vec<usize> = (0..sums.len()).collect();
        Drift { rel_l2: relative(&all), ci95_low, ci95_high, checked_rows: self.at.len() }
    }
}

/// The rows of a long context that are compared.
pub(super) fn sample_rows(shape: &Shape) -> Vec<[usize; 3]> {
    reference::sample_rows(shape, CHECKED_QUERIES)
}

/// The rows of all heads for some tokens.
pub(super) fn rows_of(shape: &Shape, tokens: &[usize]) -> Vec<[usize; 3]> {
    let heads = (0..shape.batch).flat_map(|batch| (0..shape.q_heads).map(move |head| (batch, head)));
    heads.flat_map(|(batch, head)| tokens.iter().map(move |&token| [batch, head, token])).collect()
}

impl Bench<'_> {
    /// In a checked trial, fills outputs with NaN, so that what a kernel does not write is seen.
    pub(super) fn poison(&self, outputs: &mut Outputs) {
        if self.truth.is_some() {
            outputs.o.bytes_mut().fill(0xff);
            outputs.lse.fill(f32::NAN);
        }
    }
}

/// Refuses outputs that hold a NaN or an infinity, or were not written.
pub(super) fn finite(outputs: &Outputs) -> Result<(), TrialError> {
    if let Some((at, value)) = outputs.o.first_non_finite() {
        return Err(TrialError::Failed(format!("the output holds {value} at {at:?}")));
    }
    match outputs.lse.iter().position(|lse| lse.is_nan() || *lse == f32::INFINITY) {
        Some(row) => Err(TrialError::Failed(format!("the log-sum-exp of row {row} is {}", outputs.lse[row]))),
        None => Ok(()),
    }
}

/// Refuses a kernel whose result is further from the reference than rounding explains.
pub(super) fn accurate(drift: &Drift, dtype: DType) -> Result<(), TrialError> {
    // Several times what correct kernels show (docs/measurement.md), far below what a wrong mask or scale gives.
    let limit = match dtype {
        DType::F32 => 1e-4,
        DType::F16 => 5e-3,
        DType::Bf16 => 3e-2,
    };
    if drift.rel_l2 <= limit {
        return Ok(());
    }
    let error = drift.rel_l2;
    Err(TrialError::Failed(format!(
        "the result is {error:.2e} from the f64 reference; {dtype} must be within {limit:.0e}"
    )))
}
