//! Rotary position embedding in the rotate-half convention of Llama: channels `i` and `i + D/2` form pair `i`, which
//! turns by `theta^(-2i/D)` radians per token. Pair 0 turns fastest, pair `D/2 - 1` slowest.

/// Angular frequencies of a head's pairs.
pub struct Frequencies(Vec<f64>);

impl Frequencies {
    /// The frequencies of a head of `head_dim` channels with base `theta`.
    ///
    /// # Panics
    /// When `head_dim` is odd: channels are rotated in pairs.
    pub fn new(head_dim: usize, theta: f64) -> Self {
        assert!(head_dim.is_multiple_of(2), "RoPE rotates pairs of channels; head dim {head_dim} is odd");
        Frequencies((0..head_dim / 2).map(|pair| theta.powf(-2.0 * pair as f64 / head_dim as f64)).collect())
    }

    /// Radians per token of every pair, fastest first.
    pub fn rad_per_token(&self) -> &[f64] {
        &self.0
    }

    /// Sine and cosine of every pair's angle at a position.
    fn sin_cos(&self, position: f64) -> impl ExactSizeIterator<Item = (f32, f32)> {
        self.0.iter().map(move |frequency| {
            // In f64: at a million tokens an f32 angle of the fastest pair would be off by several hundredths.
            let (sin, cos) = (position * frequency).sin_cos();
            (sin as f32, cos as f32)
        })
    }
}

/// Rotates one row of `D` channels, as they were before RoPE, to `position`.
///
/// # Panics
/// When the row is not as long as the frequencies say.
pub fn rotate(row: &mut [f32], position: usize, frequencies: &Frequencies) {
    turn(row, position as f64, frequencies);
}

/// Rotates one row back from `position`: the inverse of [`rotate`].
///
/// # Panics
/// When the row is not as long as the frequencies say.
pub fn unrotate(row: &mut [f32], position: usize, frequencies: &Frequencies) {
    turn(row, -(position as f64), frequencies);
}

/// Sines and cosines of a turn by some tokens, for many rows that turn alike.
pub struct Rotation(Vec<(f32, f32)>);

impl Rotation {
    /// The turn of a row that moves by `tokens` positions; a negative number turns back.
    pub fn new(frequencies: &Frequencies, tokens: i64) -> Self {
        Rotation(frequencies.sin_cos(tokens as f64).collect())
    }

    /// Turns one row of `D` channels.
    ///
    /// # Panics
    /// When the row is not as long as the frequencies say.
    pub fn turn(&self, row: &mut [f32]) {
        turn_pairs(row, self.0.iter().copied());
    }
}

fn turn(row: &mut [f32], position: f64, frequencies: &Frequencies) {
    turn_pairs(row, frequencies.sin_cos(position));
}

fn turn_pairs(row: &mut [f32], sin_cos: impl ExactSizeIterator<Item = (f32, f32)>) {
    assert_eq!(row.len(), 2 * sin_cos.len(), "a row has two channels for each frequency");
    let (first, second) = row.split_at_mut(sin_cos.len());
    for ((x, y), (sin, cos)) in first.iter_mut().zip(second).zip(sin_cos) {
        (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn dot(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    }

    fn rotated(row: &[f32], position: usize, frequencies: &Frequencies) -> Vec<f32> {
        let mut row = row.to_vec();
        rotate(&mut row, position, frequencies);
        row
    }

    #[test]
    fn pairs_are_half_a_head_apart_and_the_first_turns_by_one_radian() {
        let frequencies = Frequencies::new(4, 100.0);
        assert_eq!(frequencies.rad_per_token(), [1.0, 0.1]);
        let row = rotated(&[1.0, 0.0, 0.0, 2.0], 3, &frequencies);
        let expected = [3f32.cos(), -2.0 * 0.3f32.sin(), 3f32.sin(), 2.0 * 0.3f32.cos()];
        for (value, expected) in row.iter().zip(expected) {
            assert!((value - expected).abs() < 1e-6, "{row:?}");
        }
    }

    proptest! {
        #[test]
        fn norms_stay_inverses_undo_and_only_distances_matter(
            q in prop::collection::vec(-3f32..3.0, 16),
            k in prop::collection::vec(-3f32..3.0, 16),
            position in 0usize..1_000_000,
            distance in 0usize..10_000,
            theta in 1e3f64..1e7,
        ) {
            let frequencies = Frequencies::new(16, theta);
            let mut turned = rotated(&q, position, &frequencies);
            prop_assert!((dot(&turned, &turned) - dot(&q, &q)).abs() < 1e-4);
            let here = dot(&rotated(&q, position + distance, &frequencies), &rotated(&k, position, &frequencies));
            let at_start = dot(&rotated(&q, distance, &frequencies), &k);
            prop_assert!((here - at_start).abs() < 1e-3, "{here} {at_start}");
            Rotation::new(&frequencies, distance as i64).turn(&mut turned);
            let further = rotated(&q, position + distance, &frequencies);
            prop_assert!(turned.iter().zip(&further).all(|(a, b)| (a - b).abs() < 1e-4), "{turned:?} {further:?}");
            Rotation::new(&frequencies, -(distance as i64)).turn(&mut turned);
            unrotate(&mut turned, position, &frequencies);
            for (back, original) in turned.iter().zip(&q) {
                prop_assert!((back - original).abs() < 1e-5);
            }
        }
    }
}
