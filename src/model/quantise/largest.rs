//! How large the inputs of linear layers become while a model reads a text: what scales of static activations are taken of.

use super::walk::Calibration;
use crate::device::Cpu;
use crate::memory::Arena;
use crate::model::{Activation, Decoder, Hook, Model, ModelError, Setup};
use crate::tensor::DType;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Where a linear layer reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Site {
    /// In front of attention: queries, keys and values.
    Attention,
    /// Behind it: its output projection.
    Attended,
    /// In front of the MLP: gate and up.
    Mlp,
    /// Inside: down.
    Inner,
}

impl Site {
    /// Of a block.
    pub const COUNT: usize = 4;

    /// Where the layer of this weight reads.
    pub fn of(weight: &str) -> Site {
        let sites = [(".o_proj.", Site::Attended), (".down_proj.", Site::Inner), (".mlp.", Site::Mlp)];
        let found = sites.into_iter().find(|(part, _)| weight.contains(part));
        found.map_or(Site::Attention, |(_, site)| site)
    }
}

/// The largest magnitude at each [`Site`] of each block.
struct Largest(Mutex<Vec<[f32; Site::COUNT]>>);

impl Hook for Largest {
    fn rows(&self, layer: usize, what: Activation, rows: &[f32]) {
        let site = match what {
            Activation::Hidden => Site::Attention,
            Activation::O => Site::Attended,
            Activation::MlpInput => Site::Mlp,
            Activation::MlpInner => Site::Inner,
            _ => return,
        };
        let most = rows.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = &mut all[layer][site as usize];
        *kept = kept.max(most);
    }
}

/// The largest inputs of the linear layers of each block, by [`Site`], while the model at `source` reads a text as it is.
///
/// # Errors
/// When the model cannot be read, a sequence is too long for it, or the arena has no room.
pub fn largest_inputs(
    source: &Path,
    text: Calibration<'_>,
    cpu: &Cpu,
    arena: &Arena,
) -> Result<Vec<[f32; Site::COUNT]>, ModelError> {
    let model = Model::open(source, arena)?;
    model.check_length(text.length)?;
    let largest = Largest(Mutex::new(vec![[0.0; Site::COUNT]; model.config.layers]));
    let setup = Setup::of(text.length, DType::F32);
    for piece in text.tokens.chunks(text.length) {
        let mut decoder = Decoder::new(&model, setup, cpu, arena)?;
        decoder.hook(&largest);
        decoder.prefill(&[piece], |_, _, _| ())?;
    }
    Ok(largest.0.into_inner().unwrap_or_else(PoisonError::into_inner))
}
