//! Episodes: drawn facts are written into a memory, some are changed, all are asked for.
//!
//! A fact is a subject and a value, `z = s + v`; all numbers are drawn from a normal distribution so that those of `z` have
//! variance 1. Values are drawn from a table. The cue is the subject alone, with noise if asked for (`cue=0.5` is noise half as
//! long as the subject: the question in other words). The answer is the value of the table with the largest cosine to what the
//! memory reads. Facts that were never written are asked for too: their rate is chance, and the mark for what is forgotten.

use super::matrix::{Matrix, add_scaled, cosine};
use super::{EpisodicError, FactMemory, FactShape, Facts, Step};
use crate::memory::{Arena, Label};
use crate::named::{Named, NamedError, Parameter};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

const fn parameter(name: &'static str, default: &'static str, about: &'static str) -> Parameter {
    Parameter { name, default, about }
}

const COUNT: Parameter = parameter("count", "64", "facts that are written");
const WIDTH: Parameter = parameter("width", "128", "C, numbers of a fact");
const VALUES: Parameter =
    parameter("values", "256", "values that there are to answer with, beside 'unknown'; chance is one of all");
const CUE: Parameter = parameter("cue", "0", "noise of a cue, as a part of the subject's length");
const SHARE: Parameter = parameter("share", "0.25", "facts that are changed, as a part of all");

/// A kind of episode as the registry knows it.
pub struct EpisodeEntry {
    /// Name in experiment files and records.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// Its parameters.
    pub parameters: &'static [Parameter],
}

/// Every kind of episode.
pub const EPISODES: &[EpisodeEntry] = &[
    EpisodeEntry { name: "write", about: "Facts are written and asked for", parameters: &[COUNT, WIDTH, VALUES, CUE] },
    EpisodeEntry {
        name: "overwrite",
        about: "Some of the facts get another value afterwards",
        parameters: &[
            COUNT,
            WIDTH,
            VALUES,
            CUE,
            SHARE,
            parameter("by", "replace", "write: the new fact on top; replace: the old one is taken out before"),
        ],
    },
    EpisodeEntry {
        name: "forget",
        about: "Some of the facts are taken out afterwards",
        parameters: &[
            COUNT,
            WIDTH,
            VALUES,
            CUE,
            SHARE,
            parameter(
                "by",
                "delete",
                "delete: the fact is taken out; unknown: written on top with the value 'unknown'; both",
            ),
        ],
    },
];

/// Never-written facts that are asked for.
pub const UNWRITTEN: usize = 64;

/// What is done to some of the facts.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Change {
    share: f64,
    /// Whether the old fact is taken out.
    deletes: bool,
    /// What is written in its place.
    writes: Option<Replacement>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Replacement {
    Value,
    Unknown,
}

/// An episode with its parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Episode {
    /// Facts that are written.
    pub count: usize,
    /// Numbers of a fact.
    pub width: usize,
    values: usize,
    cue: f64,
    change: Option<Change>,
}

/// What came of one drawn episode. An answer is right when the cue is answered at all, with the right value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// Share of right answers about facts that were written and left alone; `None` where all are changed.
    pub kept: Option<f64>,
    /// Share of overwritten facts whose new value is given; `None` where nothing gets a new value.
    pub changed: Option<f64>,
    /// Share of changed facts whose old value is still given; `None` where nothing is changed.
    pub old: Option<f64>,
    /// Share of facts to be taken out that the memory did not find, which stay; `None` where none is taken out.
    pub refused: Option<f64>,
    /// Share of right answers about facts that were never written.
    pub unwritten: f64,
    /// Share of cues about facts that were left alone which are answered.
    pub answered_kept: Option<f64>,
    /// Share of cues about changed facts which are answered.
    pub answered_changed: Option<f64>,
    /// Share of cues about never-written facts which are answered.
    pub answered_unwritten: f64,
    /// How well the detector's distance tells written from never-written facts: the chance that it is smaller for a written one;
    /// `None` without a detector.
    pub scope_auc: Option<f64>,
    /// Mean cosine of what is read with the fact, of facts that were left alone.
    pub likeness: Option<f64>,
}

impl Episode {
    /// The episode that a text such as `forget:count=64,width=128` names.
    ///
    /// # Errors
    /// When there is no such episode or parameter, or a value is wrong.
    pub fn parse(text: &str) -> Result<Self, NamedError> {
        let named: Named = text.parse()?;
        let entry = named.find("episode", EPISODES, |entry| entry.name)?;
        named.check(entry.parameters)?;
        let number = |key: &str, default: usize, least: usize| -> Result<usize, NamedError> {
            named.count_in(key, default, least..=MOST)
        };
        let choice = |options: &[&str]| {
            let found = named.text("by").unwrap_or(options[0]);
            let place = options.iter().position(|option| *option == found);
            place.ok_or_else(|| named.wrong("by", options.join(" or ")))
        };
        let share = || match named.number("share", 0.25, 0.0..=1.0)? {
            0.0 => Err(named.wrong("share", "above 0 and at most 1".into())),
            share => Ok(share),
        };
        let change = match entry.name {
            "overwrite" => {
                let deletes = choice(&["replace", "write"])? == 0;
                Some(Change { share: share()?, deletes, writes: Some(Replacement::Value) })
            }
            "forget" => {
                let by = choice(&["delete", "unknown", "both"])?;
                let writes = (by > 0).then_some(Replacement::Unknown);
                Some(Change { share: share()?, deletes: by != 1, writes })
            }
            _ => None,
        };
        Ok(Episode {
            count: number("count", 64, 1)?,
            width: number("width", 128, 2)?,
            values: number("values", 256, 2)?,
            cue: named.number("cue", 0.0, 0.0..=100.0)?,
            change,
        })
    }

    /// Whether facts are changed after they were written.
    pub fn changes(&self) -> bool {
        self.change.is_some()
    }

    /// How many facts are changed.
    pub fn changed_count(&self) -> usize {
        self.changed().count()
    }

    /// What a memory of its facts is opened for.
    pub fn shape(&self) -> FactShape {
        FactShape { width: self.width, most_facts: self.count + self.changed_count() }
    }

    /// Which facts are changed: as many as asked for, early ones as well as late.
    fn changed(&self) -> impl Iterator<Item = usize> + use<> {
        let share = self.change.map_or(0.0, |change| change.share);
        let count = self.count;
        let some = if share > 0.0 { ((share * count as f64).round() as usize).clamp(1, count) } else { 0 };
        (0..some).map(move |index| index * count / some)
    }

    /// Bytes at the peak: what is drawn, and what the memory holds and needs.
    pub fn peak_bytes(&self, memory: &FactMemory) -> u64 {
        let cues = self.count + UNWRITTEN;
        let vectors = |rows: usize| Matrix::bytes(rows, self.width);
        let workspace = |step| memory.method.workspace_bytes(self.width, step);
        let before = workspace(Step::Open).max(workspace(Step::Write(self.count)));
        let change = if self.changes() { vectors(1) + workspace(Step::Write(1)) } else { 0 };
        let read = vectors(1 + cues) + workspace(Step::Read(cues));
        let held: u64 = memory.bytes(&self.shape()).values().sum();
        vectors(self.values + 1 + 2 * cues + self.count) + held + before.max(change).max(read)
    }

    /// Draws facts, writes, changes and asks for them. Deterministic in `seed` and `draw`.
    ///
    /// # Errors
    /// When the arena has no room, or the memory cannot do what it is asked to.
    pub fn run(&self, memory: &FactMemory, seed: u64, draw: u64, arena: &Arena) -> Result<Outcome, EpisodicError> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(draw);
        let drawn = Drawn::new(self, &mut rng, arena)?;
        let mut deviate = || StandardNormal.sample(&mut rng);
        let mut facts = memory.open(&self.shape(), arena)?;
        facts.write(&drawn.facts, &mut deviate)?;
        let mut one = Matrix::zeros(arena, Label::Input, 1, self.width)?;
        let mut refused = Share::default();
        for index in self.changed() {
            let change = self.change.expect("something is changed");
            if change.deletes {
                match facts.forget(drawn.facts.row(index)) {
                    Err(EpisodicError::NotForgotten(_)) => refused.add(true),
                    found => refused.add(found.map(|()| false)?),
                }
            }
            let value = match change.writes {
                None => continue,
                Some(Replacement::Value) => drawn.new_value(index),
                Some(Replacement::Unknown) => self.values,
            };
            one.row_mut(0).copy_from_slice(drawn.subjects.row(index));
            add_scaled(one.row_mut(0), 1.0, drawn.table.row(value));
            facts.write(&one, &mut deviate)?;
        }
        let mut read = Matrix::zeros(arena, Label::Activations, drawn.cues.rows(), self.width)?;
        facts.read(&drawn.cues, &mut deviate, &mut read)?;
        Ok(Outcome { refused: refused.mean(), ..self.outcome(&drawn, &facts, &read) })
    }

    fn outcome(&self, drawn: &Drawn, facts: &Facts, read: &Matrix) -> Outcome {
        let mut is_changed = vec![false; self.count];
        self.changed().for_each(|index| is_changed[index] = true);
        let gets_value = self.change.is_some_and(|change| change.writes == Some(Replacement::Value));
        let (mut kept, mut changed, mut old, mut unwritten) =
            (Share::default(), Share::default(), Share::default(), Share::default());
        let (mut answered, mut answered_changed, mut answered_unwritten) =
            (Share::default(), Share::default(), Share::default());
        let mut likeness = Share::default();
        let (mut near, mut far) = (Vec::new(), Vec::new());
        for index in 0..read.rows() {
            let distance = facts.distance(drawn.cues.row(index), read.row(index));
            let is_answered = facts.answers(distance);
            let gives = |value: usize| is_answered && drawn.answer(read.row(index)) == value;
            match is_changed.get(index) {
                None => {
                    unwritten.add(gives(drawn.values[index]));
                    answered_unwritten.add(is_answered);
                    far.extend(distance);
                }
                Some(false) => {
                    kept.add(gives(drawn.values[index]));
                    answered.add(is_answered);
                    near.extend(distance);
                    likeness.add(cosine(read.row(index), drawn.facts.row(index)));
                }
                Some(true) => {
                    if gets_value {
                        changed.add(gives(drawn.new_value(index)));
                    }
                    old.add(gives(drawn.values[index]));
                    answered_changed.add(is_answered);
                }
            }
        }
        Outcome {
            kept: kept.mean(),
            changed: changed.mean(),
            old: old.mean(),
            refused: None,
            unwritten: unwritten.mean().expect("some are asked for"),
            answered_kept: answered.mean(),
            answered_changed: answered_changed.mean(),
            answered_unwritten: answered_unwritten.mean().expect("some are asked for"),
            scope_auc: (!near.is_empty()).then(|| smaller(&near, &far)),
            likeness: likeness.mean(),
        }
    }
}

/// Largest count, width and table.
const MOST: usize = 1 << 16;

/// What an episode draws.
struct Drawn {
    /// Values to answer with, and behind them the one of what is unknown.
    table: Matrix,
    subjects: Matrix,
    cues: Matrix,
    facts: Matrix,
    /// The value of each subject, the never-written ones last.
    values: Vec<usize>,
    /// How far in the table the new value is from the old one.
    steps: Vec<usize>,
    choices: usize,
}

impl Drawn {
    fn new(episode: &Episode, rng: &mut ChaCha8Rng, arena: &Arena) -> Result<Self, EpisodicError> {
        let &Episode { count, width, values: choices, cue, .. } = episode;
        let matrix = |rows| Matrix::zeros(arena, Label::Input, rows, width);
        let (mut table, mut subjects) = (matrix(choices + 1)?, matrix(count + UNWRITTEN)?);
        let (mut cues, mut facts) = (matrix(count + UNWRITTEN)?, matrix(count)?);
        let mut fill = |values: &mut [f64], scale: f64| {
            for value in values {
                let deviate: f64 = StandardNormal.sample(rng);
                *value = scale * deviate;
            }
        };
        let half = 0.5f64.sqrt();
        fill(&mut table, half);
        fill(&mut subjects, half);
        fill(&mut cues, half * cue);
        add_scaled(&mut cues, 1.0, &subjects);
        let mut pick =
            |least: usize| (0..count + UNWRITTEN).map(|_| rng.random_range(least..choices)).collect::<Vec<_>>();
        let (values, steps) = (pick(0), pick(1));
        for (index, &value) in values[..count].iter().enumerate() {
            facts.row_mut(index).copy_from_slice(subjects.row(index));
            add_scaled(facts.row_mut(index), 1.0, table.row(value));
        }
        Ok(Drawn { table, subjects, cues, facts, values, steps, choices })
    }

    fn new_value(&self, index: usize) -> usize {
        (self.values[index] + self.steps[index]) % self.choices
    }

    /// The value of the largest cosine; what is unknown is one of them.
    fn answer(&self, read: &[f64]) -> usize {
        let likeness = (0..self.table.rows()).map(|value| cosine(read, self.table.row(value)));
        likeness.enumerate().fold((0, f64::NEG_INFINITY), |best, found| if found.1 > best.1 { found } else { best }).0
    }
}

/// A mean that grows.
#[derive(Default)]
struct Share {
    sum: f64,
    count: usize,
}

impl Share {
    fn add(&mut self, value: impl Into<f64>) {
        self.sum += value.into();
        self.count += 1;
    }

    fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

/// The chance that one of `near` is smaller than one of `far`; of equals half a chance.
fn smaller(near: &[f64], far: &[f64]) -> f64 {
    let mut chances = Share::default();
    for near in near {
        far.iter().for_each(|far| chances.add(if near == far { 0.5 } else { f64::from(near < far) }));
    }
    chances.mean().unwrap_or(0.5)
}
