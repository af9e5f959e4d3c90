//! Rotation by a Hadamard matrix: what one large element of a row would cost all of its neighbours is spread over the row.
//!
//! `S H S / sqrt(n)` for the matrix `H` of `n` rows that Sylvester's construction gives, and fixed signs `S`: entries of one size, rows
//! orthogonal, and its own inverse. Without the signs a row of equal elements, or any other that looks like a row of `H`, would become
//! one large element; QuaRot (arXiv 2404.00456), which keeps keys so after RoPE, draws them at random. Here they are the
//! Rudin-Shapiro sequence, whose product with any row of `H` is at most `sqrt(2 n)`. Products of two rows are those of the
//! rotated rows, so that rotated keys are scored with rotated queries, and a weighted sum of rotated values is rotated back once.

/// Rotates a row, of a power of two elements; again, and it is what it was.
///
/// # Panics
/// When the row has another number of elements.
pub fn rotate(row: &mut [f32]) {
    assert!(row.len().is_power_of_two(), "{} elements are no power of two", row.len());
    change_signs(row);
    multiply(row);
    change_signs(row);
}

/// Elements whose signs are in the table.
const TABLE: usize = 256;
/// The sign bits of the first elements.
const SIGNS: [u32; TABLE] = {
    let (mut signs, mut index) = ([0; TABLE], 0);
    while index < TABLE {
        signs[index] = sign(index);
        index += 1;
    }
    signs
};

/// The sign bit of element `index`: whether it has an odd number of neighbouring ones in binary (Rudin, Shapiro).
const fn sign(index: usize) -> u32 {
    ((index & (index >> 1)).count_ones() & 1) << 31
}

fn change_signs(row: &mut [f32]) {
    let (first, rest) = row.split_at_mut(row.len().min(TABLE));
    first.iter_mut().zip(&SIGNS).for_each(|(x, sign)| *x = f32::from_bits(x.to_bits() ^ sign));
    rest.iter_mut().enumerate().for_each(|(at, x)| *x = f32::from_bits(x.to_bits() ^ sign(TABLE + at)));
}

/// `H / sqrt(n)` times a row.
fn multiply(row: &mut [f32]) {
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
        for count in [1usize, 2, 8, 16, 32, 64, 256, 512] {
            let row: Vec<f32> = (0..count).map(|index| (index * 37 % 101) as f32 - 50.0).collect();
            let mut rotated = row.clone();
            rotate(&mut rotated);
            for (index, got) in rotated.iter().enumerate() {
                let neighbours = |at: usize| (0..20).filter(|bit| at >> bit & 3 == 3).count();
                let signed = |(column, x): (usize, &f32)| {
                    let ones = (index & column).count_ones() as usize + neighbours(index) + neighbours(column);
                    if ones.is_multiple_of(2) { *x } else { -x }
                };
                let expected = row.iter().enumerate().map(signed).sum::<f32>() / (count as f32).sqrt();
                assert!((got - expected).abs() <= 1e-3, "element {index} of {count}: {got}, not {expected}");
            }
        }
    }

    #[test]
    fn four_elements_by_hand() {
        // The last of four has another sign: (4, 0, 0, -2) times the matrix, and again the sign.
        let mut row = [4.0, 0.0, 0.0, 2.0];
        rotate(&mut row);
        assert_eq!(row, [1.0, 3.0, 3.0, -1.0]);
        rotate(&mut row);
        assert_eq!(row, [4.0, 0.0, 0.0, 2.0]);
    }

    #[test]
    fn no_row_of_the_matrix_becomes_one_large_element() {
        for count in [16usize, 32, 64, 128, 256, 1024] {
            for row in 0..count {
                let of_matrix = |column: usize| if (row & column).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                let mut elements: Vec<f32> = (0..count).map(of_matrix).collect();
                rotate(&mut elements);
                let largest = elements.iter().fold(0f32, |largest, x| largest.max(x.abs()));
                assert!(largest < 1.415, "row {row} of {count}: {largest}");
            }
        }
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
