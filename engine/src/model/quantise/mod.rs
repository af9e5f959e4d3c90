//! A model's weights in fewer bits, on disk: a GGUF file of llama.cpp's types ([`gguf`]), or a Hugging Face folder of codes as GPTQ and
//! AWQ pack them ([`folder`]), or of NF4, 8-bit floats or bytes under scales ([`scaled`]).
//!
//! Codes of a folder come from a [`Recipe`]: each weight rounded to its nearest code, or by what the matrix is multiplied with while the
//! model reads a text. For that the model is walked block by block ([`walk`]): a block reads what the coded blocks below it made of the
//! text, sums of products of its matrices' inputs are taken ([`moments`]), and [`gptq`] or [`awq`] chooses codes by them.

mod awq;
mod coded;
mod coding;
mod fold;
mod folder;
mod gguf;
mod gptq;
mod importance;
mod inputs;
mod moments;
mod recipe;
mod scaled;
mod smooth;
mod walk;

#[cfg(test)]
mod tests;

pub use folder::quantise_folder;
pub use gguf::{Mixture, Planned, quantise};
pub use importance::Importance;
pub use recipe::Recipe;
pub use scaled::{Scaled, quantise_scaled};
pub use walk::Calibration;

use crate::format::RowFormat;

/// A tensor that was written.
#[derive(Debug, Clone)]
pub struct Quantised {
    /// Its name in what was written.
    pub name: String,
    /// Rows first.
    pub shape: Vec<usize>,
    /// How the source kept it.
    pub from: RowFormat,
    /// How it is kept now.
    pub format: String,
    /// Bytes it takes now.
    pub bytes: usize,
    /// Relative L2 distance of what is kept from what the source held; where factors were folded in (`awq`, smoothing), from that
    /// times its factors.
    pub rel_l2: f64,
    /// The same of what the matrix makes of the text that codes were chosen by.
    pub output_rel_l2: Option<f64>,
}

impl Quantised {
    /// Elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}
