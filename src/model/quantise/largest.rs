//! How large what linear layers read becomes while a model reads a text: what scales of static activations are taken of.

use super::moments::INPUTS;
use super::walk::Calibration;
use crate::device::Cpu;
use crate::memory::Arena;
use crate::model::{Activation, Decoder, Hook, Model, ModelError, Setup};
use crate::tensor::DType;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// The largest magnitude of each of [`INPUTS`] of each block.
struct Largest(Mutex<Vec<[f32; INPUTS.len()]>>);

impl Hook for Largest {
    fn rows(&self, layer: usize, what: Activation, rows: &[f32]) {
        if let Some(at) = INPUTS.iter().position(|&input| input == what) {
            let most = rows.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            let kept = &mut self.0.lock().unwrap_or_else(PoisonError::into_inner)[layer][at];
            *kept = kept.max(most);
        }
    }
}

/// The largest magnitude of each of [`INPUTS`] of each block, while the model at `source` reads a text as it is.
///
/// # Errors
/// When the model cannot be read, a sequence is too long for it, or the arena has no room.
pub fn largest_inputs(
    source: &Path,
    text: Calibration<'_>,
    cpu: &Cpu,
    arena: &Arena,
) -> Result<Vec<[f32; INPUTS.len()]>, ModelError> {
    let model = Model::open(source, arena)?;
    model.check_length(text.length)?;
    let largest = Largest(Mutex::new(vec![[0.0; INPUTS.len()]; model.config.layers]));
    let setup = Setup::of(text.length, DType::F32);
    for piece in text.tokens.chunks(text.length) {
        let mut decoder = Decoder::new(&model, setup, cpu, arena)?;
        decoder.hook(&largest);
        decoder.prefill(&[piece], |_, _, _| ())?;
    }
    Ok(largest.0.into_inner().unwrap_or_else(PoisonError::into_inner))
}
