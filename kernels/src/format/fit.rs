//! Scales by least squares: what `llama.cpp` searches for where a block of few bits has no room for the plain choice.
//!
//! The scale that just holds the largest element is not the one with the least error. Some scales around it are tried: elements
//! are rounded with each, and then the scale (and the minimum) that fits these codes best has a closed form. The pair of least
//! weighted error is taken. Larger elements weigh more, because activations multiply them; where it is known what an
//! element is multiplied with, it weighs by the mean square of that and nothing else, because that is what its error makes of outputs.

use super::blocks::{MOST, largest, put_half};

/// How scales are tried.
pub struct Search {
    /// Largest code.
    pub most: f32,
    /// The range of `most` codes is made wider by `start`, and then by `step` more each time.
    pub start: f32,
    pub step: f32,
    pub steps: usize,
    /// Whether errors count by their square, or by themselves.
    pub squares: bool,
}

/// How scales beside minimums are tried where weights are of the inputs: in finer steps, for squares of errors.
pub const fn finely(most: f32) -> Search {
    Search { most, start: -0.9, step: 0.05, steps: 36, squares: true }
}

/// Weights of a block of which nothing is known but its elements: their squares.
pub fn by_square(block: &[f32]) -> [f32; MOST] {
    let mut weights = [0.0; MOST];
    weights.iter_mut().zip(block).for_each(|(weight, x)| *weight = x * x);
    weights
}

/// A scale and a minimum of at most 0, its sign turned, for `x = scale * code - least` with codes of 0 to `most`.
pub fn with_minimum(x: &[f32], weights: &[f32], search: &Search) -> [f32; 2] {
    let bounds = (0.0f32, f32::NEG_INFINITY);
    let (least, greatest) = x.iter().fold(bounds, |(least, most), &x| (least.min(x), most.max(x)));
    if greatest <= least {
        return [0.0, -least];
    }
    let Search { most, start, step, steps, squares } = *search;
    let sum = |of: &dyn Fn(f32, f32) -> f32| x.iter().zip(weights).map(|(&x, &w)| of(x, w)).sum::<f32>();
    let (w, wx) = (sum(&|_, w| w), sum(&|x, w| w * x));
    let error = |[scale, minimum]: [f32; 2], code: &dyn Fn(f32) -> f32| {
        sum(&|x, w| {
            let off = scale * code(x) + minimum - x;
            w * if squares { off * off } else { off.abs() }
        })
    };
    let coder = |per: f32| move |x: f32| (per * (x - least)).round_ties_even().clamp(0.0, most);
    let mut best = [(greatest - least) / most, least];
    let mut least_error = error(best, &coder(1.0 / best[0]));
    for index in 0..=steps {
        let code = coder((start + step * index as f32 + most) / (greatest - least));
        let (wl, wll, wxl) =
            (sum(&|x, w| w * code(x)), sum(&|x, w| w * code(x) * code(x)), sum(&|x, w| w * x * code(x)));
        let determinant = w * wll - wl * wl;
        if determinant <= 0.0 {
            continue;
        }
        let mut found = [(w * wxl - wx * wl) / determinant, (wll * wx - wl * wxl) / determinant];
        if found[1] > 0.0 {
            found = [wxl / wll, 0.0];
        }
        let found_error = error(found, &code);
        if found_error < least_error {
            (best, least_error) = (found, found_error);
        }
    }
    [best[0], -best[1]]
}

/// A scale for `x = scale * level(..)`: the element of the largest magnitude becomes about `end`, `steps` steps to both sides.
pub fn symmetric(x: &[f32], weights: &[f32], level: impl Fn(f32) -> f32, end: f32, (step, steps): (f32, i32)) -> f32 {
    let most = largest(x);
    let Some(&extreme) = x.iter().find(|x| x.abs() == most).filter(|_| most > 1e-15) else { return 0.0 };
    let (mut scale, mut gain) = (0.0, 0.0);
    // The plain choice comes first, and stays where nothing is better.
    for offset in std::iter::once(0).chain((-steps..=steps).filter(|&offset| offset != 0)) {
        let per = (end + step * offset as f32) / extreme;
        let (xl, ll) = x.iter().zip(weights).fold((0.0, 0.0), |(xl, ll), (&x, weight)| {
            let level = level(per * x);
            (xl + weight * x * level, ll + weight * level * level)
        });
        if ll > 0.0 && xl * xl > gain * ll {
            (scale, gain) = (xl / ll, xl * xl / ll);
        }
    }
    scale
}

/// What scales of a super-block's groups, none of them negative, are multiplied with to become codes of 0 to `most`, and what codes are
/// multiplied with: the largest becomes `most`, or with weights what fits all of them best.
pub fn of_scales(scales: &[f32], weights: Option<&[f32]>, most: f32) -> [f32; 2] {
    let largest = scales.iter().fold(0.0f32, |most, &scale| most.max(scale));
    match weights.filter(|_| largest > 0.0) {
        Some(weights) => {
            let scale = symmetric(scales, weights, |x| x.round_ties_even().clamp(0.0, most), most, (0.1, 4));
            [if scale > 0.0 { 1.0 / scale } else { 0.0 }, scale]
        }
        None => [if largest > 0.0 { most / largest } else { 0.0 }, largest / most],
    }
}

/// Whole numbers from `-half` to `half - 1`.
pub fn signed(half: f32) -> impl Fn(f32) -> f32 {
    move |x| x.round_ties_even().clamp(-half, half - 1.0)
}

/// Of the scales of a super-block the one of the largest magnitude, with its sign.
pub fn extreme(scales: &[f32]) -> f32 {
    scales.iter().fold(0.0, |most: f32, &scale| if scale.abs() > most.abs() { scale } else { most })
}

/// Writes a block of which an element is not finite: all of it becomes NaN, by the f16 at `at`. Whether there is one.
pub fn put_not_finite(block: &[f32], to: &mut [u8], at: usize) -> bool {
    let is_there = !largest(block).is_finite();
    if is_there {
        to.fill(0);
        put_half(to, at, f32::NAN);
    }
    is_there
}

#[cfg(test)]
mod tests {
    use super::super::blocks::there_and_back;
    use crate::format::RowFormat;
    use crate::tensor::RowCode;
    use proptest::prelude::*;

    /// Formats whose scales are searched for, and what numbers of one size may lose, as a relative L2 distance.
    const LOSSES: [(&str, f64); 7] = [
        ("q6_k", 0.02),
        ("q5_k", 0.04),
        ("q4_k", 0.08),
        ("iq4_xs", 0.1),
        ("iq4_nl", 0.1),
        ("q3_k", 0.2),
        ("q2_k", 0.36),
    ];

    #[test]
    fn few_levels_are_found_again() {
        // 16 numbers that two bits hold: 0 to 3 halves. q2_k weighs no element that is zero, so none is far off either.
        let row: Vec<f32> = (0..512).map(|at| (at % 4) as f32 / 2.0).collect();
        for (x, back) in row.iter().zip(there_and_back("q2_k", &row)) {
            assert!((x - back).abs() < 2e-3, "{x} became {back}");
        }
        // Whole numbers from -32 to 31 are codes of six bits; groups of 16 have other extremes, so that their scales differ.
        let row: Vec<f32> = (0..512).map(|at| (at * 37 % 64) as f32 - 32.0).collect();
        for (x, back) in row.iter().zip(there_and_back("q6_k", &row)) {
            assert!((x - back).abs() < 0.6, "{x} became {back}");
        }
    }

    #[test]
    fn zeros_stay_and_what_is_not_finite_makes_its_block_so() {
        for (format, _) in LOSSES {
            assert!(there_and_back(format, &[0.0; 512]).iter().all(|x| *x == 0.0), "{format}");
            for x in [f32::NAN, f32::INFINITY] {
                let mut row = [1.0; 512];
                row[300] = x;
                let back = there_and_back(format, &row);
                assert!(back[300].is_nan() && back[..256].iter().all(|x| x.is_finite()), "{format}");
            }
        }
    }

    #[test]
    fn what_is_multiplied_with_much_is_off_by_less() {
        let drawn = |seed: usize, at: usize| ((at * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0;
        // One input of eight is 30 times as large as the others.
        let inputs: Vec<f32> = (0..512).map(|at| if at % 8 == 3 { 900.0 } else { 1.0 }).collect();
        let plain = ["q4_0", "q4_1", "q5_0", "q5_1"];
        for name in LOSSES.map(|(name, _)| name).into_iter().chain(plain) {
            let format: RowFormat = name.parse().unwrap();
            let mut lost = [0.0; 2];
            for seed in 0..8 {
                let row: Vec<f32> = (0..512).map(|at| drawn(seed, at)).collect();
                let mut bytes = vec![0; format.row_bytes(512)];
                for (lost, knows) in lost.iter_mut().zip([false, true]) {
                    match knows {
                        true => format.encode_weighted(&row, &inputs, &mut bytes),
                        false => format.encode(&row, 512, &mut bytes),
                    }
                    let mut back = vec![0.0; 512];
                    format.decode(&bytes, 0, &mut back);
                    let each = row.iter().zip(&back).zip(&inputs);
                    *lost += each.map(|((x, back), input)| f64::from(input * (x - back).powi(2))).sum::<f64>();
                }
            }
            assert!(lost[1] < 0.8 * lost[0], "{name}: {lost:?}");
        }
        // Where nothing can be weighed it is as it was.
        let (row, mut bytes): (Vec<f32>, _) = ((0..64).map(|at| drawn(1, at)).collect(), [vec![0; 68], vec![0; 68]]);
        let format: RowFormat = "q8_0".parse().unwrap();
        format.encode(&row, 64, &mut bytes[0]);
        format.encode_weighted(&row, &inputs[..64], &mut bytes[1]);
        assert_eq!(bytes[0], bytes[1]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn a_row_is_off_by_what_its_bits_allow(row in prop::collection::vec(-1f32..1.0, 512), shift in -0.3f32..0.3) {
            let row: Vec<f32> = row.iter().map(|x| x + shift).collect();
            for (format, bound) in LOSSES {
                let back = there_and_back(format, &row);
                let square = |of: &dyn Fn(f32, f32) -> f32| -> f32 { row.iter().zip(&back).map(|(&x, &y)| of(x, y).powi(2)).sum() };
                let off = f64::from(square(&|x, y| x - y) / square(&|x, _| x)).sqrt();
                prop_assert!(off < bound, "{format}: {off}");
            }
        }
    }
}
