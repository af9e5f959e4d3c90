//! Rotation by a Hadamard matrix: what one large element of a row would cost all of its neighbours is spread over the row.
//!
//! `H / sqrt(n)` for the matrix of `n` rows that Sylvester's construction gives: entries of one size, rows orthogonal, and its own
//! inverse. Products of two rows are those of the rotated rows, so that rotated keys are scored with rotated queries, and a
//! weighted sum of rotated values is rotated back once. QuaRot (arXiv 2404.00456) keeps keys so after RoPE.

/// Rotates a row, of a power of two elements; again, and it is what it was.
///
/// # Panics
/// When the row has another number of elements.
pub fn rotate(row: &mut [f32]) {
    assert!(row.len().is_power_of_two(), "{} elements are no power of two", row.len());
    let mut half = 1;
    while half < row.len() {
        for pair in row.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            low.iter_mut().zip(high).for_each(|(a, b)| (*a, *b) = (*a + *b, *a - *b));
        }
        half *= 2;
    }
    let scale = 1.0 / (row.len() as f32).sqrt();
    row.iter_mut().for_each(|x| *x *= scale);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_elements_by_hand() {
        let mut row = [4.0, 0.0, 0.0, 2.0];
        rotate(&mut row);
        assert_eq!(row, [3.0, 1.0, 1.0, 3.0]);
        rotate(&mut row);
        assert_eq!(row, [4.0, 0.0, 0.0, 2.0]);
    }

    #[test]
    fn products_of_rows_stay_what_they_are() {
        let wide = |factor: usize| (0..64).map(|x| (x * factor % 17) as f32 - 8.0).collect::<Vec<f32>>();
        let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        let (mut a, mut b) = (wide(5), wide(7));
        let before = product(&a, &b);
        rotate(&mut a);
        rotate(&mut b);
        assert!((product(&a, &b) - before).abs() < 1e-3);
    }
}
