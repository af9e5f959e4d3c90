//! Perplexity of a text in windows, as published numbers are computed: nothing is evicted, and each window is read from an
//! empty cache.
//!
//! Where a window begins and which of its tokens are predicted is a convention that moves the number by tenths, so that
//! each has a name ([`Windows`]).

use super::distribution::nats;
use super::evaluator::numbers;
use super::{EvalError, Stage};
use crate::model::{Decoder, ModelError, Text};
use serde::Serialize;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// A convention. Windows do not overlap, and what does not fill one at the end of the text is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Windows {
    /// 2048 tokens, all but the first predicted: that of papers on quantisation (GPTQ and its successors), of the whole text
    /// tokenized at once.
    Wikitext,
    /// 512 tokens, of which the last 255 are predicted; where the tokenizer begins texts with a token, every window does.
    /// That of llama.cpp's `llama-perplexity`.
    LlamaPerplexity,
}

impl Windows {
    /// All of them.
    pub const ALL: [Windows; 2] = [Windows::Wikitext, Windows::LlamaPerplexity];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Windows::Wikitext => "wikitext",
            Windows::LlamaPerplexity => "llama-perplexity",
        }
    }

    /// Tokens of a window.
    pub fn tokens(self) -> usize {
        match self {
            Windows::Wikitext => 2048,
            Windows::LlamaPerplexity => 512,
        }
    }

    /// The first token of a window that is predicted.
    fn first(self) -> usize {
        match self {
            Windows::Wikitext => 1,
            Windows::LlamaPerplexity => self.tokens() / 2 + 1,
        }
    }

    /// Tokens of a window that are predicted.
    pub fn predicted(self) -> usize {
        self.tokens() - self.first()
    }

    /// The windows of a text, at most `most`.
    ///
    /// # Errors
    /// When the text is shorter than one.
    pub fn of(self, text: &Text, (path, content): (&Path, &str), most: usize) -> Result<Vec<Vec<u32>>, ModelError> {
        let tokens = text.tokens(content)?;
        let mut windows: Vec<Vec<u32>> = tokens.chunks_exact(self.tokens()).take(most).map(<[u32]>::to_vec).collect();
        if let (Windows::LlamaPerplexity, [begins]) = (self, &text.beginning()?[..]) {
            windows.iter_mut().for_each(|window| window[0] = *begins);
        }
        match windows.is_empty() {
            true => {
                let reason = format!("{} tokens; a window of {self} has {}", tokens.len(), self.tokens());
                Err(ModelError::Config { path: path.into(), reason })
            }
            false => Ok(windows),
        }
    }
}

impl fmt::Display for Windows {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for Windows {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = Windows::ALL.into_iter().find(|windows| windows.name() == text);
        named.ok_or_else(|| format!("'{text}' is neither {}", Windows::ALL.map(Windows::name).join(" nor ")))
    }
}

/// What a text is worth to a model.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Perplexity {
    /// Windows that were read.
    pub windows: usize,
    /// Minus the log-probability of a predicted token, on average.
    pub nll_nats: f64,
    /// `exp` of it.
    pub perplexity: f64,
    /// Standard error of the perplexity, from the spread between windows: tokens of one window are not independent. `None` of
    /// one window.
    pub standard_error: Option<f64>,
}

impl Perplexity {
    /// From the mean negative log-probability of each window's predicted tokens, which are as many in each.
    fn of(means: &[f64]) -> Self {
        let count = means.len() as f64;
        let mean = means.iter().sum::<f64>() / count;
        let variance = means.iter().map(|of_window| (of_window - mean).powi(2)).sum::<f64>() / (count - 1.0);
        let standard_error = (means.len() > 1).then(|| (variance / count).sqrt() * mean.exp());
        Perplexity { windows: means.len(), nll_nats: mean, perplexity: mean.exp(), standard_error }
    }
}

/// Reads `windows`; `each` is told of every one that was read, as the perplexity so far.
///
/// # Errors
/// When the arena has no room, or a logit is no number.
pub fn perplexity(
    stage: &Stage<'_>,
    convention: Windows,
    windows: &[Vec<u32>],
    mut each: impl FnMut(Perplexity),
) -> Result<Perplexity, EvalError> {
    let setup = stage.setup(1, &[]);
    let mut decoder = Decoder::new(stage.model, setup, stage.cpu, stage.arena)?;
    let mut means = Vec::with_capacity(windows.len());
    for window in windows {
        decoder.clear();
        // The last token predicts nothing of the window.
        let (read, predicted) = (&window[..window.len() - 1], &window[convention.first()..]);
        let (before, rest) = read.split_at(convention.first());
        let (mut sum, mut found) = (0.0, Ok(()));
        let mut add = |row: &[f32], token: u32| {
            sum += nats(row, token);
            if found.is_ok() {
                found = numbers(row);
            }
        };
        decoder.prefill(&[before], |_, _, row| add(row, predicted[0]))?;
        decoder.follow_closely(&[rest], |_, place, row| add(row, predicted[place + 1]))?;
        found?;
        means.push(sum / predicted.len() as f64);
        each(Perplexity::of(&means));
    }
    Ok(Perplexity::of(&means))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_mean_is_that_of_its_windows() {
        let of = Perplexity::of(&[1.0, 2.0, 3.0]);
        assert!((of.perplexity - 2f64.exp()).abs() < 1e-12 && of.windows == 3);
        assert!((of.standard_error.unwrap() - 2f64.exp() / 3f64.sqrt()).abs() < 1e-12);
        assert_eq!(Perplexity::of(&[1.0]).standard_error, None);
    }
}
