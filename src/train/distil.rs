//! Distillation: the Kullback-Leibler divergence of a teacher's next tokens from a student's, `sum p_T (log p_T - log p_S)`,
//! and its gradient by the student's logits, `p_S - p_T`.
//!
//! Both models share the output matrix, so that the teacher is no more than its last norm's output. Logits of few rows are
//! there at once, those of the student and of the teacher side by side in the room of [`super::loss`].

use super::loss::{Head, Loss};
use crate::device::Cpu;
use crate::device::gemm::{Matrix, product};
use crate::device::simd::loops;
use rayon::prelude::*;
use std::f32::consts::{LN_2, LOG2_E};

/// Rows of a block that one thread does.
const PIECE_ROWS: usize = 64;

impl Loss {
    /// Mean divergence over the rows of each sequence of `len` that lie behind its first `skipped`, of `[teacher, student]`,
    /// last norms' outputs `[rows, hidden]`; writes the gradient by the student's to `dn`, if that is wanted.
    pub fn distil(
        &mut self,
        cpu: &Cpu,
        [teacher, student]: [&[f32]; 2],
        [len, skipped]: [usize; 2],
        head: Head<'_>,
        mut dn: Option<&mut [f32]>,
    ) -> f64 {
        let (logits, hidden, vocab) = self.room();
        let at_once = logits.len() / vocab / 2;
        let (of_student, of_teacher) = logits.split_at_mut(at_once * vocab);
        if let Some(dn) = &mut dn {
            dn.fill(0.0);
        }
        let judged = student.len() / hidden / len * (len - skipped);
        let (weights, mut sum) = (Matrix::new(head.weights, vocab, hidden), 0.0);
        for sequence in (0..student.len() / hidden).step_by(len) {
            for first in (sequence + skipped..sequence + len).step_by(at_once) {
                let rows = first * hidden..(first + at_once).min(sequence + len) * hidden;
                let (student, teacher) = (&student[rows.clone()], &teacher[rows.clone()]);
                let mut unused = Vec::new();
                let dx = match &mut dn {
                    Some(dn) => &mut dn[rows],
                    None => {
                        unused.resize(rows.len(), 0.0);
                        &mut unused[..]
                    }
                };
                let sums: Vec<f64> = cpu.install(|| {
                    let rows = student.par_chunks(PIECE_ROWS * hidden).zip(teacher.par_chunks(PIECE_ROWS * hidden));
                    let logits = of_student.par_chunks_mut(PIECE_ROWS * vocab);
                    let logits = logits.zip(of_teacher.par_chunks_mut(PIECE_ROWS * vocab));
                    let pieces = rows.zip(logits).zip(dx.par_chunks_mut(PIECE_ROWS * hidden));
                    let sums = pieces.map(|(((student, teacher), (own, other)), dx)| {
                        let count = student.len() / hidden;
                        let (own, other) = (&mut own[..count * vocab], &mut other[..count * vocab]);
                        product(own, vocab, Matrix::new(student, count, hidden), weights.transposed(), false, 1);
                        product(other, vocab, Matrix::new(teacher, count, hidden), weights.transposed(), false, 1);
                        let rows = own.chunks_exact_mut(vocab).zip(other.chunks_exact_mut(vocab));
                        let sum: f64 = rows.map(|(own, other)| divergence(cpu, own, other, head.softcap, judged)).sum();
                        product(dx, hidden, Matrix::new(own, count, vocab), weights, false, 1);
                        sum
                    });
                    sums.collect()
                });
                sum += sums.iter().sum::<f64>();
            }
        }
        sum / judged as f64
    }
}

/// The divergence of a row of the teacher's logits from one of the student's, which becomes its gradient of the mean over
/// `judged` rows.
fn divergence(cpu: &Cpu, student: &mut [f32], teacher: &mut [f32], softcap: Option<f32>, judged: usize) -> f64 {
    let isa = cpu.isa();
    let mut capped = Vec::new();
    if let Some(cap) = softcap {
        loops::soft_cap(isa, student, 1.0, cap);
        loops::soft_cap(isa, teacher, 1.0, cap);
        capped.extend_from_slice(student);
    }
    let [own_most, most] = [&mut *student, &mut *teacher].map(|row| loops::scale_max(isa, row, LOG2_E));
    let apart: Vec<f32> = teacher.iter().zip(&*student).map(|(t, s)| t - s).collect();
    let [own_sum, sum] =
        [(&mut *student, own_most), (&mut *teacher, most)].map(|(row, most)| loops::exp2_sum(isa, row, most));
    let mean: f64 = teacher.iter().zip(&apart).map(|(p, apart)| f64::from(*p) * f64::from(*apart)).sum();
    let log_sums = f64::from(own_sum).log2() - f64::from(sum).log2() + f64::from(own_most) - f64::from(most);
    let share = 1.0 / judged as f32;
    loops::scale(isa, student, share / own_sum);
    loops::add_scaled(isa, student, -share / sum, teacher);
    if let Some(cap) = softcap {
        loops::cap_slope(isa, student, &capped, cap);
    }
    f64::from(LN_2) * (mean / f64::from(sum) + log_sums)
}
