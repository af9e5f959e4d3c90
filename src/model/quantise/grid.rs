//! Codes of a group of weights, `w = scale (code - zero)`: a scale in f16, whole codes from 0, and a whole zero point, as GPTQ and AWQ
//! keep them.

use half::f16;

/// Which codes there are, and how many weights of a row share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Of a code: 4 or 8.
    pub bits: u32,
    /// Weights that share a scale and a zero point.
    pub group: usize,
    /// Whether zero is in the middle of the codes, whatever the weights.
    pub symmetric: bool,
}

/// What a group's codes stand for.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Step {
    pub scale: f16,
    pub zero: u8,
}

impl Grid {
    /// The largest code.
    pub fn most(self) -> f32 {
        ((1u32 << self.bits) - 1) as f32
    }

    /// The scale and the zero point whose codes reach over a group and zero. The scale is no number where f16 holds none that does.
    pub fn step(self, group: &[f32]) -> Step {
        let ends = group.iter().fold((0.0f32, 0.0f32), |(least, most), &x| (least.min(x), most.max(x)));
        // Comparisons pass over a NaN.
        let sum: f32 = group.iter().sum();
        let (least, most) = match self.symmetric {
            true => (-ends.1.max(-ends.0), ends.1.max(-ends.0)),
            false => ends,
        };
        let scale = f16::from_f32(if sum.is_finite() { (most - least) / self.most() } else { f32::NAN });
        let zero = match self.symmetric {
            true => (self.most() + 1.0) / 2.0,
            // 0 / 0 becomes 0.
            false => (-least / scale.to_f32()).round_ties_even().min(self.most()),
        };
        Step { scale, zero: zero as u8 }
    }
}

impl Step {
    /// The code nearest to a weight.
    pub fn code(self, grid: Grid, weight: f32) -> u8 {
        // A scale of 0 has no number there, which becomes code 0 of a weight that is 0 all the same.
        ((weight / self.scale.to_f32()).round_ties_even() + f32::from(self.zero)).clamp(0.0, grid.most()) as u8
    }

    /// What a code stands for.
    pub fn weight(self, code: u8) -> f32 {
        self.scale.to_f32() * (f32::from(code) - f32::from(self.zero))
    }

    /// The weight of the code nearest to one.
    pub fn nearest(self, grid: Grid, weight: f32) -> f32 {
        self.weight(self.code(grid, weight))
    }
}
