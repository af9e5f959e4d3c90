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
    let (lines, rest) = row.as_chunks_mut();
    // Neighbours within a line are added without a loop, which vectors do by moving elements.
    lines.iter_mut().for_each(|line| [step::<1>, step::<2>, step::<4>, step::<8>].iter().for_each(|step| step(line)));
    let mut half = if rest.is_empty() { LINE } else { 1 };
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

/// Elements of a line.
const LINE: usize = 16;

/// Sums and differences of the elements of a line that are `HALF` apart.
#[inline(always)]
fn step<const HALF: usize>(line: &mut [f32; LINE]) {
    let other: [f32; LINE] = std::array::from_fn(|index| line[index ^ HALF]);
    *line = std::array::from_fn(|index| if index & HALF == 0 { line[index] } else { -line[index] } + other[index]);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the definition: the sign of an entry is the parity of the bits that its row and its column have in common.
    #[test]
    fn a_row_is_multiplied_by_the_matrix() {
        for count in [1usize, 2, 8, 16, 32, 64, 256] {
            let row: Vec<f32> = (0..count).map(|index| (index * 37 % 101) as f32 - 50.0).collect();
            let mut rotated = row.clone();
            rotate(&mut rotated);
            for (index, got) in rotated.iter().enumerate() {
                let signed = |(column, x): (usize, &f32)| if (index & column).count_ones() % 2 == 0 { *x } else { -x };
                let expected = row.iter().enumerate().map(signed).sum::<f32>() / (count as f32).sqrt();
                assert!((got - expected).abs() <= 1e-3, "element {index} of {count}: {got}, not {expected}");
            }
        }
    }

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
