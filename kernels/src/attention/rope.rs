//! Rotary position embedding in the rotate-half convention of Llama: channels `i` and `i + D/2` form pair `i`, which
//! turns by `theta^(-2i/D)` radians per token. Pair 0 turns fastest, pair `D/2 - 1` slowest. Where a model rotates a part of each head,
//! there are fewer frequencies: `D` is what is rotated, the first channels of a row, and those behind it stay as they are.

/// What inputs say of their RoPE.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeBase {
    /// Keys and queries were rotated, with this base of the frequencies.
    Theta(f64),
    /// They were not rotated.
    None,
}

impl RopeBase {
    /// Reads a number from 1 to 1e12, or `none`; nothing for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "none" => Some(RopeBase::None),
            text => text.parse().ok().filter(|theta| (1.0..=1e12).contains(theta)).map(RopeBase::Theta),
        }
    }

    /// The frequencies of a head of `head_dim` channels; all zero without RoPE.
    ///
    /// # Panics
    /// When `head_dim` is odd.
    pub fn frequencies(self, head_dim: usize) -> Frequencies {
        match self {
            RopeBase::Theta(theta) => Frequencies::new(head_dim, theta),
            RopeBase::None => {
                assert!(head_dim.is_multiple_of(2), "a head of {head_dim} channels has no pairs");
                Frequencies(vec![0.0; head_dim / 2])
            }
        }
    }
}

/// Angular frequencies of a head's pairs.
#[derive(Debug, Clone)]
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

    /// Frequencies of a model's own, one for each pair, in radians per token.
    pub fn from_rad_per_token(rad_per_token: Vec<f64>) -> Self {
        Frequencies(rad_per_token)
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
/// When the row is shorter than the frequencies say.
pub fn rotate(row: &mut [f32], position: usize, frequencies: &Frequencies) {
    rotate_by(row, position as f64, frequencies);
}

/// RoPE of a model: turns rows to positions that a memory gives them, which need not be whole.
pub struct ModelRope {
    frequencies: Frequencies,
    /// Factor of turned rows (YaRN).
    factor: f64,
}

impl ModelRope {
    /// Frequencies, and the factor of both sine and cosine.
    pub fn new(frequencies: Frequencies, factor: f64) -> Self {
        ModelRope { frequencies, factor }
    }

    /// Rotates one row of `D` channels, as they were before RoPE, to `position`.
    ///
    /// # Panics
    /// When the row is shorter than the frequencies say.
    pub fn rotate(&self, row: &mut [f32], position: f64) {
        let moved = self.frequencies.0.iter().map(|frequency| {
            let (sin, cos) = (position * frequency).sin_cos();
            ((sin * self.factor) as f32, (cos * self.factor) as f32)
        });
        turn_pairs(row, moved);
    }
}

/// Sines and cosines of a turn by some tokens, for many rows that turn alike.
pub struct Rotation(Vec<(f32, f32)>);

impl Rotation {
    /// The turn of a row that moves by `tokens` positions; a negative number turns back.
    pub fn new(frequencies: &Frequencies, tokens: i64) -> Self {
        Rotation(frequencies.sin_cos(tokens as f64).collect())
    }

    /// Rotates one row of `D` channels.
    ///
    /// # Panics
    /// When the row is shorter than the frequencies say.
    pub fn rotate(&self, row: &mut [f32]) {
        turn_pairs(row, self.0.iter().copied());
    }
}

/// Rotates rows back one after the other. Where positions follow each other the angles are added up, in f64 and anew
/// every 256 rows, which costs a tenth of sines and cosines for each row.
pub struct Unrotation<'a> {
    frequencies: &'a Frequencies,
    /// Cosine and sine of each pair at the last row's position, and of one step.
    at: Vec<[f64; 2]>,
    step: Vec<[f64; 2]>,
    next: Option<usize>,
    left: usize,
}

impl<'a> Unrotation<'a> {
    /// Rows until the angles are computed anew: until then they are off by less than 1e-13.
    const FRESH: usize = 256;

    /// No row yet.
    pub fn new(frequencies: &'a Frequencies) -> Self {
        let of = |frequency: &f64| [frequency.cos(), frequency.sin()];
        let step: Vec<[f64; 2]> = frequencies.0.iter().map(of).collect();
        Unrotation { frequencies, at: step.clone(), step, next: None, left: 0 }
    }

    /// Rotates a row back from `position`.
    ///
    /// # Panics
    /// When the row is shorter than the frequencies say.
    pub fn unrotate(&mut self, row: &mut [f32], position: usize) {
        assert!(row.len() >= 2 * self.at.len(), "a row has two channels for each frequency");
        if self.next == Some(position) && self.left > 0 {
            self.left -= 1;
            for ([cos, sin], [step_cos, step_sin]) in self.at.iter_mut().zip(&self.step) {
                (*cos, *sin) = (*cos * step_cos - *sin * step_sin, *sin * step_cos + *cos * step_sin);
            }
        } else {
            self.left = Self::FRESH;
            for ([cos, sin], frequency) in self.at.iter_mut().zip(&self.frequencies.0) {
                (*sin, *cos) = (position as f64 * frequency).sin_cos();
            }
        }
        self.next = position.checked_add(1);
        let (first, second) = row.split_at_mut(self.at.len());
        for ((x, y), [cos, sin]) in first.iter_mut().zip(second).zip(&self.at) {
            let (cos, sin) = (*cos as f32, *sin as f32);
            (*x, *y) = (*x * cos + *y * sin, *y * cos - *x * sin);
        }
    }
}

fn rotate_by(row: &mut [f32], position: f64, frequencies: &Frequencies) {
    turn_pairs(row, frequencies.sin_cos(position));
}

fn turn_pairs(row: &mut [f32], sin_cos: impl ExactSizeIterator<Item = (f32, f32)>) {
    assert!(row.len() >= 2 * sin_cos.len(), "a row has two channels for each frequency");
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

    #[test]
    fn channels_behind_the_rotated_ones_stay() {
        let frequencies = Frequencies::new(4, 100.0);
        let row = [1.0, 0.5, -2.0, 2.0, 7.0, -8.0];
        let mut turned = rotated(&row, 3, &frequencies);
        assert_eq!((&turned[..4], &turned[4..]), (&rotated(&row[..4], 3, &frequencies)[..], &row[4..]));
        let mut moved = turned.clone();
        Rotation::new(&frequencies, 5).rotate(&mut moved);
        assert_eq!(moved[4..], row[4..]);
        Unrotation::new(&frequencies).unrotate(&mut turned, 3);
        assert!(turned.iter().zip(row).all(|(x, y)| (x - y).abs() < 1e-6), "{turned:?}");
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
            let mut moved = rotated(&q, position, &frequencies);
            prop_assert!((dot(&moved, &moved) - dot(&q, &q)).abs() < 1e-4);
            let here = dot(&rotated(&q, position + distance, &frequencies), &rotated(&k, position, &frequencies));
            let at_start = dot(&rotated(&q, distance, &frequencies), &k);
            prop_assert!((here - at_start).abs() < 1e-3, "{here} {at_start}");
            Rotation::new(&frequencies, distance as i64).rotate(&mut moved);
            let further = rotated(&q, position + distance, &frequencies);
            prop_assert!(moved.iter().zip(&further).all(|(a, b)| (a - b).abs() < 1e-4), "{moved:?} {further:?}");
            Rotation::new(&frequencies, -(distance as i64)).rotate(&mut moved);
            Rotation::new(&frequencies, -(position as i64)).rotate(&mut moved);
            for (back, original) in moved.iter().zip(&q) {
                prop_assert!((back - original).abs() < 1e-5);
            }
        }

        #[test]
        fn rows_one_after_the_other_are_rotated_back_as_each_by_itself(
            row in prop::collection::vec(-3f32..3.0, 16),
            runs in prop::collection::vec((0usize..1_000_000, 1usize..400), 1..4),
        ) {
            let frequencies = Frequencies::new(16, 10_000.0);
            let mut unrotation = Unrotation::new(&frequencies);
            for (start, count) in runs {
                for position in start..start + count {
                    let (mut got, mut expected) = (row.clone(), row.clone());
                    unrotation.unrotate(&mut got, position);
                    Rotation::new(&frequencies, -(position as i64)).rotate(&mut expected);
                    for (got, expected) in got.iter().zip(&expected) {
                        prop_assert!((got - expected).abs() < 1e-6, "{got} {expected} at {position}");
                    }
                }
            }
        }
    }
}
