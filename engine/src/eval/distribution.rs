//! Distributions over the next token, and how far two are apart.

/// Natural logarithm of the sum of exponentials.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - most).exp()).sum();
    f64::from(most) + sum.ln()
}

/// Minus the log-probability of `token`, in nats.
pub fn nats(logits: &[f32], token: u32) -> f64 {
    log_sum_exp(logits) - f64::from(logits[token as usize])
}

/// Kullback-Leibler divergence of the softmax of `other` from that of `truth`, `sum p (ln p - ln q)`, in nats.
pub fn divergence(truth: &[f32], other: &[f32]) -> f64 {
    let (of_truth, of_other) = (log_sum_exp(truth), log_sum_exp(other));
    let term = |(&p, &q): (&f32, &f32)| {
        let (log_p, log_q) = (f64::from(p) - of_truth, f64::from(q) - of_other);
        log_p.exp() * (log_p - log_q)
    };
    // Rounding may leave a little less than nothing.
    truth.iter().zip(other).map(term).sum::<f64>().max(0.0)
}

/// The likeliest token, the first of several.
pub fn likeliest(logits: &[f32]) -> usize {
    (0..logits.len()).fold(0, |best, at| if logits[at] > logits[best] { at } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergences_are_those_of_small_distributions() {
        let logits = |shares: &[f64]| shares.iter().map(|share| share.ln() as f32 + 3.0).collect::<Vec<_>>();
        let (p, q) = (logits(&[0.5, 0.25, 0.25]), logits(&[0.25, 0.25, 0.5]));
        let expected = 0.5 * 2f64.ln() + 0.25 * 0.5f64.ln();
        assert!((divergence(&p, &q) - expected).abs() < 1e-6);
        assert_eq!(divergence(&p, &p), 0.0);
        let moved: Vec<f32> = p.iter().map(|logit| logit - 7.0).collect();
        assert!(divergence(&p, &moved).abs() < 1e-6);
        assert!((nats(&p, 1) - 4f64.ln()).abs() < 1e-6);
        assert_eq!((likeliest(&p), likeliest(&q), likeliest(&[1.0, 1.0])), (0, 2, 0));
    }
}
