//! Distillation: the Kullback-Leibler divergence of a teacher's next tokens from a student's, `sum p_T (log p_T - log p_S)`,
//! and its gradient by the student's logits, `p_S - p_T`.
//!
//! Both models share the output matrix, so that the teacher is no more than its last norm's output. Logits of few rows are
//! there at once, those of the student and of the teacher side by side in the room of [`super::loss`].

use super::linear::Product;
use super::loss::{Head, Loss};
use crate::device::Cpu;
use crate::device::simd::loops;
use rayon::prelude::*;
use std::f32::consts::{LN_2, LOG2_E};

/// Elements of a row whose exponentials are taken and added up at a time.
const CHUNK: usize = 1024;

impl Loss {
    /// Mean divergence over the rows of each sequence of `len` that lie behind its first `skipped`, of `[teacher, student]`,
    /// last norms' outputs `[rows, hidden]`; writes the gradient by the student's to `dn`, if that is wanted. `scratch` is that
    /// of products.
    pub fn distil(
        &mut self,
        cpu: &Cpu,
        [teacher, student]: [&[f32]; 2],
        [len, skipped]: [usize; 2],
        head: Head<'_>,
        mut dn: Option<&mut [f32]>,
        scratch: &mut [f32],
    ) -> f64 {
        let (logits, hidden, vocab) = self.room();
        let at_once = (logits.len() / vocab / 2).max(1);
        let (of_student, of_teacher) = logits.split_at_mut(at_once * vocab);
        if let Some(dn) = &mut dn {
            dn.fill(0.0);
        }
        let judged = student.len() / hidden / len * (len - skipped);
        let (w, rounds, outputs, mut sum) = (head.weights, head.rounds, [0, vocab], 0.0);
        for sequence in (0..student.len() / hidden).step_by(len) {
            for first in (sequence + skipped..sequence + len).step_by(at_once) {
                let rows = first..(first + at_once).min(sequence + len);
                let part = rows.start * hidden..rows.end * hidden;
                let own = &mut of_student[..rows.len() * vocab];
                let other = &mut of_teacher[..rows.len() * vocab];
                for (x, logits) in [(student, &mut *own), (teacher, &mut *other)] {
                    let x = &x[part.clone()];
                    Product { x, w, transposed: false, outputs, rounds, bias: None, add: false }
                        .write(cpu, logits, scratch);
                }
                let sums: Vec<f64> = cpu.install(|| {
                    let rows = own.par_chunks_exact_mut(vocab).zip(other.par_chunks_exact_mut(vocab));
                    rows.map(|(own, other)| divergence(cpu, own, other, head.softcap, judged)).collect()
                });
                sum += sums.iter().sum::<f64>();
                if let Some(dn) = &mut dn {
                    let dx = &mut dn[part];
                    let x = &*own;
                    Product { x, w, transposed: true, outputs, rounds, bias: None, add: false }.write(cpu, dx, scratch);
                }
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
    let (mut own_sum, mut sum, mut mean, mut apart) = (0.0, 0.0, 0.0, [0.0; CHUNK]);
    for (own, other) in student.chunks_mut(CHUNK).zip(teacher.chunks_mut(CHUNK)) {
        let apart = &mut apart[..own.len()];
        apart.copy_from_slice(other);
        loops::add_scaled(isa, apart, -1.0, own);
        own_sum += f64::from(loops::exp2_sum(isa, own, own_most));
        sum += f64::from(loops::exp2_sum(isa, other, most));
        mean += f64::from(loops::dot(isa, other, apart));
    }
    let log_sums = own_sum.log2() - sum.log2() + f64::from(own_most) - f64::from(most);
    let share = 1.0 / judged as f64;
    loops::scale(isa, student, (share / own_sum) as f32);
    loops::add_scaled(isa, student, -(share / sum) as f32, teacher);
    if let Some(cap) = softcap {
        loops::cap_slope(isa, student, &capped, cap);
    }
    f64::from(LN_2) * (mean / sum + log_sums)
}
