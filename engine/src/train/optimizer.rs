//! The optimizers of fine-tuning, and what each remembers of a parameter.
//!
//! | optimizer | first moment | second moment | bytes of a parameter |
//! |---|---|---|---|
//! | `adamw` | f32 | f32 | 8 |
//! | `adamw-8bit` | 8 bits | 8 bits | 2 and 8 for each block of 2048 (`eight_bit.rs`) |
//! | `adafactor` | none | a mean of each row and each column | 4 for each row and column (`adafactor.rs`) |

use super::adafactor;
use super::adamw::{Constants, Update, sum_of_squares};
use super::eight_bit::{self, BLOCK, BLOCK_WORDS};
use super::parameters::Parameter;
use crate::device::Cpu;
use crate::format::{SIGNED, UNSIGNED};
use crate::memory::{Arena, ArenaError, Buffer, Label};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// An optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// AdamW with averages in f32.
    Adamw,
    /// AdamW with averages in blocks of eight bits.
    #[serde(rename = "adamw-8bit")]
    Adamw8bit,
    /// Adafactor.
    Adafactor,
}

impl Kind {
    /// All, from the most memory to the least.
    pub const ALL: [Kind; 3] = [Kind::Adamw, Kind::Adamw8bit, Kind::Adafactor];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        ["adamw", "adamw-8bit", "adafactor"][self as usize]
    }

    /// f32 words that are kept of a parameter, of the first moment and of the second.
    fn words(self, parameter: &Parameter) -> [usize; 2] {
        let count = parameter.gradient.as_ref().map_or(0, |_| parameter.range.len());
        match self {
            Kind::Adamw => [count; 2],
            Kind::Adamw8bit => [eight_bit::words(count); 2],
            Kind::Adafactor => [0, if count > 0 { adafactor::kept(parameter) } else { 0 }],
        }
    }

    /// Words of all parameters.
    fn all_words(self, parameters: &[Parameter]) -> [usize; 2] {
        let words = parameters.iter().map(|parameter| self.words(parameter));
        words.fold([0; 2], |[mean, square], words| [mean + words[0], square + words[1]])
    }

    /// Bytes that [`Optimizer::new`] takes.
    pub fn bytes(self, parameters: &[Parameter]) -> u64 {
        4 * self.all_words(parameters).iter().sum::<usize>() as u64
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = || Kind::ALL.map(Kind::name).join(", ");
        let found = Kind::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| format!("optimizer '{text}' is not known; there are {}", known()))
    }
}

/// What an optimizer remembers.
pub struct Optimizer {
    kind: Kind,
    /// Of first moments, in words of f32 whatever they hold.
    pub mean: Buffer<f32>,
    /// Of second moments.
    pub square: Buffer<f32>,
}

impl Optimizer {
    /// An optimizer that has seen nothing yet.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn new(arena: &Arena, kind: Kind, parameters: &[Parameter]) -> Result<Self, ArenaError> {
        let [mean, square] = kind.all_words(parameters);
        let (mean, square) = (arena.alloc(Label::Optimizer, mean)?, arena.alloc(Label::Optimizer, square)?);
        Ok(Optimizer { kind, mean, square })
    }

    /// Changes `weights` by one step (`step` from 0) at learning rate `rate`, and gives the norm of the gradient before
    /// it was clipped. Parameters without a gradient are left as they are.
    pub fn update(
        &mut self,
        cpu: &Cpu,
        constants: &Constants,
        parameters: &[Parameter],
        (step, rate): (usize, f32),
        weights: &mut [f32],
        gradients: &[f32],
    ) -> f64 {
        let norm = sum_of_squares(cpu, [gradients]).sqrt();
        let update = Update::new(constants, (step, rate), norm);
        let (mut mean, mut square) = (&mut *self.mean, &mut *self.square);
        for parameter in parameters {
            let Some(range) = parameter.gradient.clone() else { continue };
            let words = self.kind.words(parameter);
            let mean = mean.split_off_mut(..words[0]).expect("room for every parameter");
            let square = square.split_off_mut(..words[1]).expect("room for every parameter");
            let (decays, gradient) = (parameter.role.decays(), &gradients[range]);
            let weights = &mut weights[parameter.range.clone()];
            match self.kind {
                Kind::Adamw => update.apply(cpu, decays, weights, gradient, [mean, square]),
                Kind::Adamw8bit => in_eight_bits(cpu, &update, decays, (weights, gradient), [mean, square]),
                Kind::Adafactor => {
                    let factors = (update.scale(), update.decay(decays));
                    adafactor::update(cpu, parameter, (step, rate), factors, (weights, gradient), square);
                }
            }
        }
        norm
    }
}

/// Block by block: averages are read, changed as in f32, and written.
fn in_eight_bits(
    cpu: &Cpu,
    update: &Update,
    decays: bool,
    (weights, gradient): (&mut [f32], &[f32]),
    [mean, square]: [&mut [f32]; 2],
) {
    cpu.install(|| {
        let averages = mean.par_chunks_mut(BLOCK_WORDS).zip(square.par_chunks_mut(BLOCK_WORDS));
        let blocks = weights.par_chunks_mut(BLOCK).zip(gradient.par_chunks(BLOCK)).zip(averages);
        blocks.for_each(|((weights, gradient), (mean, square))| {
            let mut wide = [[0.0; BLOCK]; 2];
            let [m, v] = wide.each_mut().map(|wide| &mut wide[..weights.len()]);
            eight_bit::decode(&SIGNED, mean, m);
            eight_bit::decode(&UNSIGNED, square, v);
            update.piece(cpu.isa(), decays, weights, gradient, [m, v]);
            eight_bit::encode(&SIGNED, m, mean);
            eight_bit::encode(&UNSIGNED, v, square);
        });
    });
}
