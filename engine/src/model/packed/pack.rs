//! The other way: codes of a matrix as GPTQ and AWQ folders hold them, in the words that [`super::words`] reads.

use super::words::AWQ_PLACES;
use crate::format::Step;
use safetensors::Dtype;

/// Codes `[rows, width]` of a matrix `[outputs, inputs]`, and what they stand for: `scale (code - zero)`.
pub struct Codes<'a> {
    /// Of a code: 4 or 8.
    pub bits: usize,
    pub rows: usize,
    pub width: usize,
    pub codes: &'a [u8],
    /// Scale and zero point of each row's groups, `[rows, groups]`.
    pub steps: &'a [Step],
    /// The group of each input.
    pub group_of: &'a [u32],
}

/// A tensor of a folder: the end of its name, type, shape and bytes.
pub type Stored = (&'static str, Dtype, Vec<usize>, Vec<u8>);

impl Codes<'_> {
    fn groups(&self) -> usize {
        self.steps.len() / self.rows
    }

    /// Tensors `.qweight`, `.qzeros`, `.scales` and `.g_idx` of GPTQ's first format, which stores zero points less one.
    pub fn gptq(&self) -> [Stored; 4] {
        let (rows, in_word) = (self.rows, 32 / self.bits);
        let mask = (1u32 << self.bits) - 1;
        let codes = words(self.width / in_word * rows, in_word, self.bits, |word, place| {
            u32::from(self.codes[word % rows * self.width + word / rows * in_word + place])
        });
        let words_of_rows = rows / in_word;
        let zeros = words(self.groups() * words_of_rows, in_word, self.bits, |word, place| {
            let row = word % words_of_rows * in_word + place;
            u32::from(self.steps[row * self.groups() + word / words_of_rows].zero).wrapping_sub(1) & mask
        });
        let group_of = self.group_of.iter().flat_map(|group| group.to_le_bytes()).collect();
        [
            (".qweight", Dtype::I32, vec![self.width / in_word, rows], codes),
            (".qzeros", Dtype::I32, vec![self.groups(), words_of_rows], zeros),
            self.scales(),
            (".g_idx", Dtype::I32, vec![self.width], group_of),
        ]
    }

    /// Tensors `.qweight`, `.qzeros` and `.scales` of AWQ.
    pub fn awq(&self) -> [Stored; 3] {
        let words_of_rows = self.rows / 8;
        let row = |word: usize, place: usize| {
            let output = AWQ_PLACES.iter().position(|at| *at == place).expect("a place of eight");
            word % words_of_rows * 8 + output
        };
        let codes = words(self.width * words_of_rows, 8, 4, |word, place| {
            u32::from(self.codes[row(word, place) * self.width + word / words_of_rows])
        });
        let zeros = words(self.groups() * words_of_rows, 8, 4, |word, place| {
            u32::from(self.steps[row(word, place) * self.groups() + word / words_of_rows].zero)
        });
        [
            (".qweight", Dtype::I32, vec![self.width, words_of_rows], codes),
            (".qzeros", Dtype::I32, vec![self.groups(), words_of_rows], zeros),
            self.scales(),
        ]
    }

    fn scales(&self) -> Stored {
        let groups = self.groups();
        let scale = |at: usize| self.steps[at % self.rows * groups + at / self.rows].scale.to_le_bytes();
        (".scales", Dtype::F16, vec![groups, self.rows], (0..self.rows * groups).flat_map(scale).collect())
    }
}

/// Words of 32 bits of codes, the first in the lowest bits: `code` gives that of a word and a place in it.
fn words(count: usize, in_word: usize, bits: usize, code: impl Fn(usize, usize) -> u32) -> Vec<u8> {
    let word = |word| (0..in_word).fold(0, |all, place| all | code(word, place) << (bits * place));
    (0..count).flat_map(|at| u32::to_le_bytes(word(at))).collect()
}
