//! What linear layers read while a model reads a text, channel by channel: how large it becomes, which scales of static activations and
//! smoothing are taken of, and its mean square, by which errors of a weight count.

use super::moments::{INPUTS, widths};
use super::walk::Calibration;
use crate::device::Cpu;
use crate::memory::Arena;
use crate::model::{Activation, Decoder, Hook, Model, ModelError, Setup};
use crate::tensor::DType;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// The channels of one of [`INPUTS`] of a block.
#[derive(Debug, Clone, Default)]
pub struct Channels {
    /// Largest magnitudes, `[width]`.
    pub largest: Vec<f32>,
    /// Sums of squares, `[width]`.
    squares: Vec<f64>,
    rows: usize,
}

impl Channels {
    fn push(&mut self, width: usize, rows: &[f32]) {
        self.largest.resize(width, 0.0);
        self.squares.resize(width, 0.0);
        for row in rows.chunks_exact(width) {
            let sums = self.largest.iter_mut().zip(&mut self.squares);
            for ((largest, squares), x) in sums.zip(row) {
                *largest = largest.max(x.abs());
                *squares += f64::from(*x).powi(2);
            }
            self.rows += 1;
        }
    }

    /// Mean squares, `[width]`.
    pub fn mean_squares(&self) -> Vec<f32> {
        self.squares.iter().map(|sum| (sum / self.rows.max(1) as f64) as f32).collect()
    }
}

/// All of [`INPUTS`] of each block.
pub type Inputs = Vec<[Channels; INPUTS.len()]>;

struct Reading {
    widths: [usize; INPUTS.len()],
    inputs: Mutex<Inputs>,
}

impl Hook for Reading {
    fn rows(&self, layer: usize, what: Activation, rows: &[f32]) {
        if let Some(at) = INPUTS.iter().position(|&input| input == what) {
            self.inputs.lock().unwrap_or_else(PoisonError::into_inner)[layer][at].push(self.widths[at], rows);
        }
    }
}

/// What each of [`INPUTS`] of each block is while the model at `source` reads a text as it is.
///
/// # Errors
/// When the model cannot be read, a sequence is too long for it, or the arena has no room.
pub fn read_inputs(source: &Path, text: Calibration<'_>, cpu: &Cpu, arena: &Arena) -> Result<Inputs, ModelError> {
    let model = Model::open(source, arena)?;
    model.check_length(text.length)?;
    let inputs = Mutex::new(vec![Default::default(); model.config.layers]);
    let reading = Reading { widths: widths(&model.config), inputs };
    let setup = Setup::of(text.length, DType::F32);
    for piece in text.tokens.chunks(text.length) {
        let mut decoder = Decoder::new(&model, setup, cpu, arena)?;
        decoder.hook(&reading);
        decoder.prefill(&[piece], |_, _, _| ())?;
    }
    Ok(reading.inputs.into_inner().unwrap_or_else(PoisonError::into_inner))
}

#[cfg(test)]
mod tests {
    use super::Channels;

    #[test]
    fn channels_by_hand() {
        let mut channels = Channels::default();
        channels.push(3, &[3.0, -1.0, 0.0, -4.0, 1.0, 0.0]);
        assert_eq!(channels.largest, [4.0, 1.0, 0.0]);
        assert_eq!(channels.mean_squares(), [12.5, 1.0, 0.0]);
    }
}
