//! Scales of NF4 in eight bits (QLoRA's double quantisation, arXiv 2305.14314 section 3; bitsandbytes' nested states): their mean over the matrix is
//! taken off, and what is left is codes of a dynamic map, each 256 under their largest magnitude. 32 bits for each block of 64 weights
//! become 8.125.

use crate::format::SIGNED;

/// Scales that share a largest magnitude.
pub const BLOCK: usize = 256;

/// The scales of a matrix.
pub struct Nested {
    /// One for each scale.
    pub codes: Vec<u8>,
    /// Of each [`BLOCK`] codes what one is.
    pub most: Vec<f32>,
    /// What is added to each.
    pub offset: f32,
}

impl Nested {
    /// Codes of these scales, and in their place what the codes stand for.
    pub fn of(scales: &mut [f32]) -> Self {
        let sum: f64 = scales.iter().map(|scale| f64::from(*scale)).sum();
        let offset = (sum / scales.len().max(1) as f64) as f32;
        let (mut codes, mut most) = (Vec::with_capacity(scales.len()), Vec::new());
        for scales in scales.chunks_mut(BLOCK) {
            let largest = scales.iter().fold(0.0f32, |most, scale| most.max((scale - offset).abs()));
            for scale in scales {
                let fraction = if largest > 0.0 { (*scale - offset) / largest } else { 0.0 };
                let code = SIGNED.code(fraction.clamp(-1.0, 1.0));
                *scale = SIGNED.values()[usize::from(code)] * largest + offset;
                codes.push(code);
            }
            most.push(largest);
        }
        Nested { codes, most, offset }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_come_back_to_within_a_step_of_their_block() {
        let scales: Vec<f32> = (0..300).map(|at| 0.02 + 0.001 * (at * 37 % 101) as f32).collect();
        let mut back = scales.clone();
        let nested = Nested::of(&mut back);
        assert_eq!((nested.codes.len(), nested.most.len()), (300, 2));
        for (at, (scale, back)) in scales.iter().zip(&back).enumerate() {
            let most = nested.most[at / BLOCK];
            // There is no -1, and of the largest decade a step is 0.9 / 64.
            assert!((scale - back).abs() <= 0.9 / 64.0 * 0.51 * most || *scale < nested.offset - 0.98 * most, "{at}");
            assert_eq!(*back, SIGNED.values()[usize::from(nested.codes[at])] * most + nested.offset);
        }
        // Equal scales are their mean.
        let mut equal = vec![0.5; 7];
        assert_eq!(Nested::of(&mut equal).most, [0.0]);
        assert_eq!(equal, [0.5; 7]);
    }
}
