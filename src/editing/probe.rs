//! What an edited model answers: facts written, asked for in other words, replaced, forgotten, and questions about others.

use super::{Drawn, EditError, Editor, Encoder, Fact, HELD_OUT, Maps, TRAINED};
use crate::memory::Arena;
use crate::model::PrefixShape;
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// Part of the facts that are replaced, and of those that are forgotten: every fourth.
const CHANGED: usize = 4;
/// Sequential edits behind which all facts so far are asked for.
const COUNTS: [usize; 5] = [1, 4, 16, 64, 128];

/// How many of some questions were answered so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Rate {
    /// Of them.
    pub right: usize,
    /// Questions.
    pub asked: usize,
}

impl Rate {
    fn add(&mut self, right: impl Iterator<Item = bool>) {
        right.for_each(|right| {
            self.right += usize::from(right);
            self.asked += 1;
        });
    }

    /// The part.
    pub fn share(&self) -> f64 {
        self.right as f64 / self.asked.max(1) as f64
    }
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Probe {
    /// Episodes of facts that were drawn.
    pub episodes: usize,
    /// Single facts, each in a memory of its own, asked for by their stem.
    pub single: Rate,
    /// The same in words that no training has.
    pub single_rephrased: Rate,
    /// Single facts whose values no training has.
    pub single_new_values: Rate,
    /// Behind so many sequential edits, every fact so far, by its stem.
    pub sequential: Vec<(usize, Rate)>,
    /// The same in words that no training has.
    pub sequential_rephrased: Vec<(usize, Rate)>,
    /// Facts among 64 that got another value: answered by the new one.
    pub replaced: Rate,
    /// Answered by the old one.
    pub replaced_old: Rate,
    /// Facts among 64 that were taken out: answered by what they were.
    pub forgotten: Rate,
    /// Facts of those 64 that stayed.
    pub remembered: Rate,
    /// Facts that were never written: answered by what they would have been.
    pub never_written: Rate,
    /// Questions about those, and sentences: the model's likeliest token stays what it is without a memory of 64 facts.
    pub locality: Rate,
    /// The same without a scope detector.
    pub locality_unscoped: Rate,
    /// 64 facts in the context, with the full cache.
    pub context: Rate,
    /// The same in words that no training has.
    pub context_rephrased: Rate,
    /// Of facts in the context, the ones nearest to the question, so many.
    pub retrieved: Vec<(usize, Rate)>,
    /// Bytes of the full cache with 64 facts, of the memory, and of a prefix.
    pub context_bytes: u64,
    /// Bytes of the memory with room for 64 facts.
    pub memory_bytes: u64,
    /// Bytes of a prefix.
    pub prefix_bytes: u64,
    /// Seconds to encode and write a fact by itself, median.
    pub seconds_per_edit: f64,
}

/// Facts of an episode.
const FACTS: usize = 64;

/// Asks `episodes` of facts of an editor's maps. Draws depend on the seed alone.
///
/// # Errors
/// When a fact cannot be encoded, or the arena has no room.
pub fn probe(
    encoder: &Encoder<'_>,
    maps: &Maps,
    (episodes, seed): (usize, u64),
    arena: &Arena,
) -> Result<Probe, EditError> {
    let mut found = Probe { episodes, ..Probe::default() };
    let shape = PrefixShape::new(&encoder.model.config, maps.tokens);
    found.sequential = COUNTS.map(|count| (count, Rate::default())).into();
    found.sequential_rephrased = found.sequential.clone();
    found.retrieved = [1, 4].map(|count| (count, Rate::default())).into();
    let mut seconds = Vec::new();
    for episode in 0..episodes as u64 {
        let seed = seed.wrapping_mul(1 << 16).wrapping_add(4 * episode);
        let usable = |word: &str| encoder.is_one_token(word);
        let all = Drawn::draw(seed, 128 + FACTS, false, usable);
        let (written, never) = all.split_at(128);
        let few = &written[..FACTS];
        let new_values = Drawn::draw(seed + 1, 16, true, usable);
        let token = |fact: &Fact| encoder.value(&fact.value);
        let asked =
            |drawn: &[Drawn], template: &str| -> Vec<String> { drawn.iter().map(|one| one.ask(template)).collect() };

        // Single facts.
        for (drawn, is_new) in [(&few[..16], false), (&new_values[..], true)] {
            for one in drawn {
                let mut editor = Editor::new(encoder, maps, 1, arena)?;
                let began = Instant::now();
                editor.write(&[one.fact()])?;
                seconds.push(began.elapsed().as_secs_f64());
                let questions: Vec<String> =
                    [&TRAINED[..1], &HELD_OUT].concat().iter().map(|template| one.ask(template)).collect();
                let (answers, _) = editor.answers(&questions, true)?;
                let expected = token(&one.fact())?;
                if is_new {
                    found.single_new_values.add(answers[..1].iter().map(|answer| *answer == expected));
                } else {
                    found.single.add(answers[..1].iter().map(|answer| *answer == expected));
                    found.single_rephrased.add(answers[1..].iter().map(|answer| *answer == expected));
                }
            }
        }

        // One after another.
        let mut editor = Editor::new(encoder, maps, 128, arena)?;
        let mut done = 0;
        for (at, count) in COUNTS.into_iter().enumerate() {
            let more: Vec<Fact> = written[done..count].iter().map(Drawn::fact).collect();
            editor.write(&more)?;
            done = count;
            found.sequential[at].1.add(right(&mut editor, &written[..count], TRAINED[0], Drawn::fact)?.into_iter());
            for template in HELD_OUT {
                let right = right(&mut editor, &written[..count], template, Drawn::fact)?;
                found.sequential_rephrased[at].1.add(right.into_iter());
            }
        }

        // A memory of 64 facts, of which some change.
        let facts: Vec<Fact> = few.iter().map(Drawn::fact).collect();
        let fresh = |facts: &[Fact]| -> Result<Editor<'_>, EditError> {
            let mut editor = Editor::new(encoder, maps, FACTS, arena)?;
            editor.write(facts)?;
            Ok(editor)
        };
        let mut editor = fresh(&facts)?;
        // Questions about nothing that was written.
        let others: Vec<String> = [TRAINED[0], HELD_OUT[0]]
            .iter()
            .flat_map(|template| asked(never, template))
            .chain(sentences(seed))
            .collect();
        let alone = others.iter().map(|text| encoder.prompt(text)).collect::<Result<Vec<_>, _>>()?;
        let (alone, _) = encoder.answers(&alone, &vec![None; others.len()], &shape)?;
        for (heeded, to) in [(true, &mut found.locality), (false, &mut found.locality_unscoped)] {
            let (answers, _) = editor.answers(&others, heeded)?;
            to.add(answers.iter().zip(&alone).map(|(answer, alone)| answer == alone));
        }
        found.never_written.add(right(&mut editor, never, TRAINED[0], Drawn::fact)?.into_iter());

        let (changed, kept) = few.split_at(FACTS / CHANGED);
        let olds: Vec<Fact> = changed.iter().map(Drawn::fact).collect();
        editor.forget(&olds)?;
        found.forgotten.add(right(&mut editor, changed, TRAINED[0], Drawn::fact)?.into_iter());
        found.remembered.add(right(&mut editor, kept, TRAINED[0], Drawn::fact)?.into_iter());
        editor.write(&changed.iter().map(Drawn::changed).collect::<Vec<_>>())?;
        found.replaced.add(right(&mut editor, changed, TRAINED[0], Drawn::changed)?.into_iter());
        found.replaced_old.add(right(&mut editor, changed, TRAINED[0], Drawn::fact)?.into_iter());

        // The facts in the context, all of them or those whose stems are nearest to the question.
        let whole: String = facts.iter().map(Fact::statement).collect();
        for (template, to) in [(TRAINED[0], &mut found.context), (HELD_OUT[0], &mut found.context_rephrased)] {
            let prompts = few.iter().map(|one| encoder.prompt(&format!("{whole}{}", one.ask(template))));
            let prompts = prompts.collect::<Result<Vec<_>, _>>()?;
            let mut answers = Vec::new();
            for prompts in prompts.chunks(8) {
                let (tokens, bytes) = encoder.answers(prompts, &vec![None; prompts.len()], &shape)?;
                found.context_bytes = bytes / prompts.len() as u64;
                answers.extend(tokens);
            }
            let expected = facts.iter().map(token).collect::<Result<Vec<_>, _>>()?;
            to.add(answers.iter().zip(&expected).map(|(answer, expected)| answer == expected));
        }
        let stems: Vec<Vec<f64>> =
            encoder.facts(&facts)?.iter().map(|fact| maps.subject.apply(&fact.subject)).collect();
        let cues = encoder.questions(&asked(few, HELD_OUT[0]))?;
        for (count, to) in &mut found.retrieved {
            let prompts = cues.iter().zip(few).map(|(cue, one)| {
                let cue = maps.subject.apply(&cue.subject);
                let mut nearest: Vec<usize> = (0..stems.len()).collect();
                let cosine = |at: usize| crate::episodic::matrix::cosine(&stems[at], &cue);
                nearest.sort_by(|a, b| cosine(*a).total_cmp(&cosine(*b)));
                let of = &nearest[nearest.len() - *count..];
                let context: String = of.iter().map(|&at| facts[at].statement()).collect();
                encoder.prompt(&format!("{context}{}", one.ask(TRAINED[0])))
            });
            let prompts = prompts.collect::<Result<Vec<_>, _>>()?;
            let (answers, _) = encoder.answers(&prompts, &vec![None; prompts.len()], &shape)?;
            let expected = facts.iter().map(token).collect::<Result<Vec<_>, _>>()?;
            to.add(answers.iter().zip(&expected).map(|(answer, expected)| answer == expected));
        }
    }
    seconds.sort_by(f64::total_cmp);
    found.seconds_per_edit = seconds[seconds.len() / 2];
    found.prefix_bytes = 4 * shape.numbers() as u64;
    found.memory_bytes = Editor::bytes(maps, FACTS)?;
    Ok(found)
}

/// Whether each question is answered by the fact that `fact` makes of what was drawn.
fn right(
    editor: &mut Editor<'_>,
    drawn: &[Drawn],
    template: &str,
    fact: impl Fn(&Drawn) -> Fact,
) -> Result<Vec<bool>, EditError> {
    let questions: Vec<String> = drawn.iter().map(|one| one.ask(template)).collect();
    let (answers, _) = editor.answers(&questions, true)?;
    let expected = drawn.iter().map(|one| editor.encoder.value(&fact(one).value)).collect::<Result<Vec<_>, _>>()?;
    Ok(answers.iter().zip(&expected).map(|(answer, expected)| answer == expected).collect())
}

/// Sentences that ask for nothing.
fn sentences(seed: u64) -> Vec<String> {
    use rand::SeedableRng;
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed + 2);
    (0..FACTS).map(|_| crate::task::text::sentence(&mut rng)).collect()
}
