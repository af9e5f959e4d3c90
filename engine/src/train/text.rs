//! Sequences of a user's text: nine tenths to learn from, from random places, and the last tenth held out.

use super::error::TrainError;
use super::vocabulary::Vocabulary;
use crate::task::Tokens;
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::path::Path;

/// Number of the first sequence that is held out.
pub(super) const HELD_OUT: u64 = 1 << 40;

/// A text as tokens.
pub(super) struct TextSource<'a> {
    begin: &'a [u32],
    tokens: Vec<u32>,
    seed: u64,
}

impl<'a> TextSource<'a> {
    /// Reads a text for sequences of `len` tokens, each of which begins as every text of the model does.
    ///
    /// # Errors
    /// When it cannot be read, or is shorter than twenty sequences.
    pub fn open(path: &Path, vocabulary: &'a Vocabulary, len: usize, seed: u64) -> Result<Self, String> {
        let text = read(path).map_err(|error| error.to_string())?;
        Self::new(path, vocabulary, vocabulary.encode(&text), len, seed)
    }

    /// The same of a text of many documents with blank lines between them, whose tokens are those of each document.
    ///
    /// # Errors
    /// As [`TextSource::open`].
    pub fn of_documents(path: &Path, vocabulary: &'a Vocabulary, len: usize, seed: u64) -> Result<Self, String> {
        let text = read(path).map_err(|error| error.to_string())?;
        let tokens = documents(&text).into_iter().flat_map(|document| vocabulary.encode(document)).collect();
        Self::new(path, vocabulary, tokens, len, seed)
    }

    fn new(path: &Path, vocabulary: &'a Vocabulary, tokens: Vec<u32>, len: usize, seed: u64) -> Result<Self, String> {
        let begin = vocabulary.begin();
        if tokens.len() < 20 * len {
            return Err(format!(
                "'{}' has {} tokens; at least {} are needed for sequences of {len}",
                path.display(),
                tokens.len(),
                20 * len
            ));
        }
        Ok(TextSource { begin, tokens, seed })
    }

    /// Tokens that are learned from; those behind them are held out.
    fn trained(&self) -> usize {
        self.tokens.len() / 10 * 9
    }

    /// `count` tokens from a random place on: of what is held out for sequences from number [`HELD_OUT`] on, else of what is
    /// learned from.
    pub fn span(&self, number: u64, rng: &mut impl Rng, count: usize) -> &[u32] {
        let places = match number < HELD_OUT {
            true => 0..self.trained() - count,
            false => self.trained()..self.tokens.len() - count,
        };
        let at = rng.random_range(places);
        &self.tokens[at..at + count]
    }

    /// `count` sequences of `len` tokens, from number `first` on.
    pub fn drawn(&self, first: u64, [count, len]: [usize; 2]) -> Vec<u32> {
        let of_text = len - self.begin.len();
        let sequence = |number: u64| {
            let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
            rng.set_stream(number);
            self.begin.iter().chain(self.span(number, &mut rng, of_text)).copied().collect::<Vec<_>>()
        };
        (first..first + count as u64).flat_map(sequence).collect()
    }

    /// Number of pieces of `len` tokens, begin and all, that follow each other in what is held out.
    pub fn pieces(&self, len: usize) -> usize {
        (self.tokens.len() - self.trained()) / (len - self.begin.len())
    }

    /// Piece `index` of these, `[len]`.
    pub fn piece(&self, index: usize, len: usize) -> Vec<u32> {
        let of_text = len - self.begin.len();
        let at = self.trained() + index * of_text;
        self.begin.iter().chain(&self.tokens[at..at + of_text]).copied().collect()
    }
}

/// Reads a text.
///
/// # Errors
/// When it cannot be read.
pub(super) fn read(path: &Path) -> Result<String, TrainError> {
    let wrong = |error: std::io::Error| TrainError::System {
        verb: "read the text",
        path: path.into(),
        reason: error.to_string(),
    };
    std::fs::read_to_string(path).map_err(wrong)
}

/// The parts of a text between blank lines, each with the one behind it.
pub(super) fn documents(text: &str) -> Vec<&str> {
    text.split_inclusive("\n\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_out_is_not_learned_from() {
        let text = TextSource { begin: &[], tokens: (0..1000).collect(), seed: 1 };
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        for number in 0..300 {
            let [read, held_out] = [number, HELD_OUT + number].map(|number| text.span(number, &mut rng, 40).to_vec());
            assert!(read.iter().all(|&token| token < 900), "{read:?}");
            assert!(held_out.iter().all(|&token| token >= 900), "{held_out:?}");
        }
        assert!(text.drawn(0, [50, 40]).iter().all(|&token| token < 900));
        assert!(text.drawn(HELD_OUT, [50, 40]).iter().all(|&token| token >= 900));
        assert!(text.piece(text.pieces(40) - 1, 40).iter().all(|&token| token >= 900));
    }
}
