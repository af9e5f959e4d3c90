//! Samples of a length in tokens: random numbers by name, and the search for the size that fills a context.

use super::{Question, Sample, Task};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// What tasks need of a tokenizer.
pub trait Tokens {
    /// Tokens of a piece of text; nothing is put before or behind it.
    fn encode(&self, text: &str) -> Vec<u32>;

    /// The text of tokens.
    fn decode(&self, tokens: &[u32]) -> String;
}

/// The random numbers of a sample, in streams that do not disturb one another: what a longer sample draws for its
/// filler changes nothing of its needles.
#[derive(Debug, Clone, Copy)]
pub struct Draw {
    seed: u64,
    index: u64,
}

impl Draw {
    /// Those of sample `index` of a seed.
    pub fn new(seed: u64, index: u64) -> Self {
        Draw { seed, index }
    }

    /// Those of sample `index` of a task that is evaluated under a seed: no two tasks hide anything at the same places, and
    /// the parameters of a task change nothing of what it draws.
    pub fn of_task(name: &str, seed: u64, index: u64) -> Self {
        let name = name.split(':').next().unwrap_or_default();
        let hash = blake3::Hasher::new().update(&seed.to_le_bytes()).update(name.as_bytes()).finalize();
        let bytes = hash.as_bytes().first_chunk().expect("a hash has 32 bytes");
        Draw { seed: u64::from_le_bytes(*bytes), index }
    }

    /// What the sample hides.
    pub fn content(&self) -> ChaCha8Rng {
        self.stream(0)
    }

    /// What it hides it in.
    pub fn filler(&self) -> ChaCha8Rng {
        self.stream(1)
    }

    /// Where it hides it.
    pub fn places(&self) -> ChaCha8Rng {
        self.stream(2)
    }

    fn stream(&self, stream: u64) -> ChaCha8Rng {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(self.index * 4 + stream);
        rng
    }
}

/// A sample that cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TaskError {
    /// A task that cannot be that long.
    #[error("the task '{task}' has at most {most_tokens} tokens, with this tokenizer; {target_tokens} were asked for")]
    TooLong {
        /// The task.
        task: String,
        /// Asked for.
        target_tokens: usize,
        /// As long as it gets.
        most_tokens: usize,
    },
    /// The context is too short.
    #[error("{target_tokens} tokens are too few for the task '{task}'; with this tokenizer it needs {least_tokens}")]
    TooShort {
        /// The task.
        task: String,
        /// What was asked for.
        target_tokens: usize,
        /// What it takes.
        least_tokens: usize,
    },
    /// Nothing of the answer would be fed behind an eviction.
    #[error(
        "an answer of the task '{task}' is one token long and comes from the prefill's own logits, in which no eviction shows; \
         use another task, or the protocol agnostic"
    )]
    OneToken {
        /// The task.
        task: String,
    },
    /// The tokenizer loses something.
    #[error("the tokenizer cannot write '{piece}', which the task '{task}' needs: it gives back '{found}'")]
    Token {
        /// The task.
        task: String,
        /// What was lost.
        piece: String,
        /// What came back.
        found: String,
    },
}

/// Tokens of a sample: its context, and the longest of its questions with its answer.
pub fn length_tokens(sample: &Sample, tokens: &dyn Tokens) -> usize {
    let asked = |question: &Question| {
        let pieces = [&question.text, &question.answer_prefix, &question.expected];
        pieces.iter().map(|piece| tokens.encode(piece).len()).sum()
    };
    tokens.encode(&sample.context).len() + sample.questions.iter().map(asked).max().unwrap_or(0)
}

/// Sample `index` of a task, as long as it can be with [`length_tokens`] up to `target_tokens`. `name` is what errors
/// call the task.
///
/// # Errors
/// When the least sample is longer, or when the tokenizer cannot write an answer or what is asked.
pub fn generate(
    name: &str,
    task: &dyn Task,
    target_tokens: usize,
    draw: &Draw,
    tokens: &dyn Tokens,
) -> Result<Sample, TaskError> {
    let fits = |units: usize| {
        let sample = task.write(units, draw)?;
        let length = length_tokens(&sample, tokens);
        (length <= target_tokens).then_some(sample)
    };
    let mut low = task.least_units();
    // A text without tokens would fit any length.
    let least = task.write(low, draw).filter(|least| !least.context.is_empty());
    if let Some(least) = least.filter(|least| tokens.encode(&least.context).is_empty()) {
        let piece = least.context.chars().take(40).collect();
        return Err(TaskError::Token { task: name.into(), piece, found: String::new() });
    }
    let Some(mut best) = fits(low) else {
        let least_tokens = task.write(low, draw).map_or(0, |sample| length_tokens(&sample, tokens));
        return Err(TaskError::TooShort { task: name.into(), target_tokens, least_tokens });
    };
    // Doubling, then halving: `low` fits, `high` does not. A unit is a token at least, or texts get no longer however much they say.
    let most = low + target_tokens;
    let mut step = 1;
    let mut high = loop {
        match fits(low + step) {
            Some(sample) if low + step > most => {
                let piece = sample.context.chars().take(40).collect();
                return Err(TaskError::Token { task: name.into(), piece, found: String::new() });
            }
            Some(sample) => {
                (low, best) = (low + step, sample);
                step *= 2;
            }
            None => break low + step,
        }
    };
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        match fits(middle) {
            Some(sample) => (low, best) = (middle, sample),
            None => high = middle,
        }
    }
    // Not the next unit is too long, there is none: a shorter context must not pass for one as long as was asked for.
    let most_tokens = length_tokens(&best, tokens);
    if 10 * most_tokens < 9 * target_tokens && task.write(high, draw).is_none() {
        return Err(TaskError::TooLong { task: name.into(), target_tokens, most_tokens });
    }
    for question in &best.questions {
        for piece in [&question.text, &question.answer_prefix, &question.expected] {
            let found = tokens.decode(&tokens.encode(piece));
            if found.trim() != piece.trim() {
                return Err(TaskError::Token { task: name.into(), piece: piece.trim().into(), found });
            }
        }
    }
    Ok(best)
}
