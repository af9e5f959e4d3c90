//! What is asked of a model that was told facts in some way: facts written, asked for in other words, replaced, forgotten, and
//! questions about others.
//!
//! An [`Episode`] draws its facts and questions once and puts them to every [`Informed`] model, a memory as well as a context, so
//! that all are asked the same.

use super::{Drawn, EditError, Encoder, Fact, HELD_OUT, TRAINED};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// Most facts of an episode that are asked for: evenly spaced in the order in which they were written.
const ASKED: usize = 64;
/// Of those, one in so many is forgotten, and then gets another value.
const CHANGED: usize = 4;

/// A model that was told facts.
pub trait Informed {
    /// Tells it facts, one after the other.
    ///
    /// # Errors
    /// When one cannot be encoded, or there is no room for them.
    fn write(&mut self, facts: &[Fact]) -> Result<(), EditError>;

    /// Takes facts back, which are given as they were told.
    ///
    /// # Errors
    /// When one was not told.
    fn forget(&mut self, facts: &[Fact]) -> Result<(), EditError>;

    /// The likeliest next token behind each question; `scoped` heeds the scope detector, where there is one.
    ///
    /// # Errors
    /// When a question cannot be encoded, or the arena has no room.
    fn answer(&mut self, questions: &[String], scoped: bool) -> Result<Vec<u32>, EditError>;

    /// Whether a scope detector says which questions are about what it was told.
    fn has_scope(&self) -> bool;

    /// Bytes that it holds of what it was told.
    fn held_bytes(&self) -> u64;
}

/// How many of some questions were answered so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Rate {
    /// Of them.
    pub right: usize,
    /// Questions.
    pub asked: usize,
}

impl Rate {
    fn of<T: PartialEq>(found: &[T], expected: &[T]) -> Self {
        assert_eq!(found.len(), expected.len(), "an answer for each question");
        let right = found.iter().zip(expected).filter(|(found, expected)| found == expected).count();
        Rate { right, asked: found.len() }
    }

    /// The part.
    pub fn share(&self) -> f64 {
        self.right as f64 / self.asked.max(1) as f64
    }

    fn add(&mut self, other: &Rate) {
        self.right += other.right;
        self.asked += other.asked;
    }
}

/// What was answered, over episodes.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Answered {
    /// Facts of an episode.
    pub facts: usize,
    /// Episodes.
    pub episodes: usize,
    /// Facts asked for by their stem, answered by their value.
    pub stem: Rate,
    /// The same in words that no training has.
    pub rephrased: Rate,
    /// Facts that were taken back, answered by what they were.
    pub forgotten: Rate,
    /// Facts beside those, answered by their value.
    pub remembered: Rate,
    /// Facts that then got another value, answered by it.
    pub replaced: Rate,
    /// The same, answered by the old one.
    pub replaced_old: Rate,
    /// Facts that were never written, answered by what they would have been.
    pub never_written: Rate,
    /// Questions about those, and sentences: the likeliest token is that of the model that was told nothing.
    pub unchanged: Rate,
    /// The same without the scope detector; nothing where there is none.
    pub unchanged_unscoped: Rate,
    /// Bytes that are held, most of the episodes.
    pub held_bytes: u64,
    /// Seconds that the last fact of each episode took to be written, behind all others.
    pub edit_seconds: Vec<f64>,
}

impl Answered {
    /// Median seconds of an edit.
    pub fn seconds_per_edit(&self) -> f64 {
        let mut seconds = self.edit_seconds.clone();
        seconds.sort_by(f64::total_cmp);
        seconds.get(seconds.len() / 2).copied().unwrap_or(0.0)
    }

    /// Adds another episode's answers.
    pub fn add(&mut self, mut other: Answered) {
        self.rates().into_iter().zip(other.rates()).for_each(|(rate, other)| rate.add(other));
        self.facts = other.facts;
        self.episodes += other.episodes;
        self.held_bytes = self.held_bytes.max(other.held_bytes);
        self.edit_seconds.append(&mut other.edit_seconds);
    }

    fn rates(&mut self) -> [&mut Rate; 9] {
        [
            &mut self.stem,
            &mut self.rephrased,
            &mut self.forgotten,
            &mut self.remembered,
            &mut self.replaced,
            &mut self.replaced_old,
            &mut self.never_written,
            &mut self.unchanged,
            &mut self.unchanged_unscoped,
        ]
    }
}

/// Facts that are drawn, and what is asked of them.
pub struct Episode {
    facts: Vec<Drawn>,
    /// Places of those that are asked for.
    asked: Vec<usize>,
    never: Vec<Drawn>,
    /// Questions about what was never written, and sentences, with the token that follows for the model alone.
    others: Vec<String>,
    alone: Vec<u32>,
}

impl Episode {
    /// Draws `count` facts, with values of training or, `kept_back`, those that no training has.
    ///
    /// # Errors
    /// When a question is too long for the model, or the arena has no room.
    pub fn draw(encoder: &Encoder<'_>, count: usize, kept_back: bool, seed: u64) -> Result<Self, EditError> {
        let few = count.min(ASKED);
        let mut facts = Drawn::draw(seed, count + few, kept_back, |word| encoder.is_one_token(word))?;
        let never = facts.split_off(count);
        let asked = (0..few).map(|at| at * count / few).collect();
        let questions = |template: &str| never.iter().map(|one| one.ask(template)).collect::<Vec<_>>();
        let others = [questions(TRAINED[0]), questions(HELD_OUT[0]), sentences(few, seed)].concat();
        let prompts = others.iter().map(|text| encoder.prompt(text)).collect::<Result<Vec<_>, _>>()?;
        let alone = encoder.answers(&prompts, &vec![None; prompts.len()])?;
        Ok(Episode { facts, asked, never, others, alone })
    }

    /// Facts in the order in which they are written.
    pub fn facts(&self) -> Vec<Fact> {
        self.facts.iter().map(Drawn::fact).collect()
    }

    /// Most questions that are asked together.
    pub fn most_questions(&self) -> usize {
        self.others.len().max(HELD_OUT.len() * self.asked.len())
    }

    /// Most tokens of a context of all facts, one of which may have another value, with a question behind it.
    ///
    /// # Errors
    /// When the tokenizer has no token for a part of them.
    pub fn most_tokens(&self, encoder: &Encoder<'_>) -> Result<usize, EditError> {
        let context: String = self.facts.iter().map(|one| one.fact().statement()).collect();
        let mut longest = 0;
        for template in [TRAINED[0], HELD_OUT[0], HELD_OUT[1]] {
            for one in &self.facts {
                longest = encoder.piece(&one.ask(template))?.len().max(longest);
            }
        }
        for other in &self.others {
            longest = encoder.piece(other)?.len().max(longest);
        }
        // A value is one token, whichever it is.
        Ok(encoder.prompt(&context)?.len() + longest)
    }

    /// Tells a model the facts and asks it.
    ///
    /// # Errors
    /// When a fact cannot be encoded, or the arena has no room.
    pub fn ask(&self, encoder: &Encoder<'_>, informed: &mut dyn Informed) -> Result<Answered, EditError> {
        let tokens = |drawn: &[&Drawn], fact: fn(&Drawn) -> Fact| -> Result<Vec<u32>, EditError> {
            drawn.iter().map(|one| encoder.value(&fact(one).value)).collect()
        };
        let right = |informed: &mut dyn Informed, drawn: &[&Drawn], template: &str, fact: fn(&Drawn) -> Fact| {
            let questions: Vec<String> = drawn.iter().map(|one| one.ask(template)).collect();
            Ok::<_, EditError>(Rate::of(&informed.answer(&questions, true)?, &tokens(drawn, fact)?))
        };
        let facts = self.facts();
        let (last, before) = facts.split_last().expect("an episode has facts");
        informed.write(before)?;
        let began = Instant::now();
        informed.write(std::slice::from_ref(last))?;
        let edit_seconds = vec![began.elapsed().as_secs_f64()];
        let held_bytes = informed.held_bytes();

        let asked: Vec<&Drawn> = self.asked.iter().map(|&at| &self.facts[at]).collect();
        let stem = right(informed, &asked, TRAINED[0], Drawn::fact)?;
        let mut rephrased = Rate::default();
        for template in HELD_OUT {
            rephrased.add(&right(informed, &asked, template, Drawn::fact)?);
        }
        let answers = informed.answer(&self.others, true)?;
        let unchanged = Rate::of(&answers, &self.alone);
        let never: Vec<&Drawn> = self.never.iter().collect();
        let never_written = Rate::of(&answers[..never.len()], &tokens(&never, Drawn::fact)?);
        let unchanged_unscoped = match informed.has_scope() {
            true => Rate::of(&informed.answer(&self.others, false)?, &self.alone),
            false => Rate::default(),
        };

        let changed: Vec<&Drawn> = asked.iter().step_by(CHANGED).copied().collect();
        let kept: Vec<&Drawn> =
            asked.iter().enumerate().filter(|(at, _)| at % CHANGED != 0).map(|(_, one)| *one).collect();
        informed.forget(&changed.iter().map(|one| one.fact()).collect::<Vec<_>>())?;
        let forgotten = right(informed, &changed, TRAINED[0], Drawn::fact)?;
        let remembered = right(informed, &kept, TRAINED[0], Drawn::fact)?;
        informed.write(&changed.iter().map(|one| one.changed()).collect::<Vec<_>>())?;
        let questions: Vec<String> = changed.iter().map(|one| one.ask(TRAINED[0])).collect();
        let answers = informed.answer(&questions, true)?;
        Ok(Answered {
            facts: self.facts.len(),
            episodes: 1,
            stem,
            rephrased,
            forgotten,
            remembered,
            replaced: Rate::of(&answers, &tokens(&changed, Drawn::changed)?),
            replaced_old: Rate::of(&answers, &tokens(&changed, Drawn::fact)?),
            never_written,
            unchanged,
            unchanged_unscoped,
            held_bytes,
            edit_seconds,
        })
    }
}

/// Sentences that ask for nothing.
fn sentences(count: usize, seed: u64) -> Vec<String> {
    use rand::SeedableRng;
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed.wrapping_add(1));
    (0..count).map(|_| crate::task::text::sentence(&mut rng)).collect()
}
