//! A model from its first block to its last, each coded by what the coded ones below it make of a text.
//!
//! The residual stream of the text lies in the arena. A block is run once as it is, while [`Moments`] are taken of what its matrices read;
//! then its matrices are coded, and it is run again with what the codes stand for, which is what the next block reads. Only one block is
//! widened at a time.

use super::coding::{Coding, Made};
use super::moments::Moments;
use super::recipe::Recipe;
use crate::device::Cpu;
use crate::memory::{Arena, Buffer, Label};
use crate::model::weights::{Found, embed, layer};
use crate::model::{Decoder, Hook, Model, ModelError, Setup};
use crate::tensor::DType;
use std::path::Path;

/// Tokens that go through a block together, where sequences are shorter.
const TOKENS: usize = 2048;

/// Sequences of a text, of as many tokens each.
#[derive(Debug, Clone, Copy)]
pub struct Calibration<'a> {
    /// Of all sequences.
    pub tokens: &'a [u32],
    /// Of a sequence.
    pub length: usize,
}

/// Codes the matrices of all blocks of the model at `source`; `take` is given each block's parameters, by name, in the order of
/// [`Config::parameters`].
///
/// # Errors
/// When the source cannot be read, a weight is not finite or no scale holds it, the arena has no room, and those of `take`.
pub fn walk<E: From<ModelError>>(
    source: &Path,
    recipe: Recipe,
    text: Option<Calibration<'_>>,
    (cpu, arena): (&Cpu, &Arena),
    mut take: impl FnMut(Vec<(String, Made)>) -> Result<(), E>,
) -> Result<(), E> {
    let mut model = Model::open(source, arena)?;
    let config = model.config.clone();
    let mut found = Found::open(source, &config, arena)?;
    let mut stream = text.map(|text| Stream::new(&model, text, cpu, arena)).transpose()?;
    for index in 0..config.layers {
        let sums = match &mut stream {
            None => None,
            Some(stream) => {
                let moments = Moments::new(&config, cpu, arena).map_err(ModelError::from)?;
                stream.through(&model, index, Some(&moments))?;
                Some(moments.finish())
            }
        };
        let mut coding = Coding::new(&mut found, &config, recipe, sums, (cpu, arena));
        coding.find_factors(index)?;
        let block = config.block(index, &mut coding)?;
        let made = coding.made;
        // Nothing reads what lies behind the last.
        if let Some(stream) = stream.as_mut().filter(|_| index + 1 < config.layers) {
            let own = std::mem::replace(&mut model.weights.layers[index], layer(&config, block));
            stream.through(&model, index, None)?;
            model.weights.layers[index] = own;
        }
        take(made)?;
    }
    Ok(())
}

/// The residual stream of a text in front of a block.
struct Stream<'a> {
    rows: Buffer<f32>,
    text: Calibration<'a>,
    cpu: &'a Cpu,
    arena: &'a Arena,
}

impl<'a> Stream<'a> {
    /// In front of the first.
    fn new(model: &Model, text: Calibration<'a>, cpu: &'a Cpu, arena: &'a Arena) -> Result<Self, ModelError> {
        let hidden = model.config.hidden;
        model.check_length(text.length)?;
        model.check_tokens(0, 0, text.tokens)?;
        let mut rows = arena.alloc::<f32>(Label::Activations, text.tokens.len() * hidden)?;
        for (&token, row) in text.tokens.iter().zip(rows.chunks_exact_mut(hidden)) {
            embed(&model.weights.embedding, token as usize, model.config.embedding_scale, row);
        }
        Ok(Stream { rows, text, cpu, arena })
    }

    /// Through a block: to what lies behind it, or where a hook looks on back to where it was.
    fn through(&mut self, model: &Model, layer: usize, hook: Option<&dyn Hook>) -> Result<(), ModelError> {
        let length = self.text.length;
        let sequence = length * model.config.hidden;
        for rows in self.rows.chunks_mut((TOKENS / length).max(1) * sequence) {
            let setup = Setup { batch: rows.len() / sequence, ..Setup::of(length, DType::F32) };
            let mut decoder = Decoder::new(model, setup, self.cpu, self.arena)?;
            match hook {
                None => decoder.through(layer, rows)?,
                Some(hook) => {
                    decoder.hook(hook);
                    let mut copy = self.arena.alloc::<f32>(Label::Activations, rows.len())?;
                    copy.copy_from_slice(rows);
                    decoder.through(layer, &mut copy)?;
                }
            }
        }
        Ok(())
    }
}
