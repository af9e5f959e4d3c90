//! `kvsieve memory --model M --maps FILE`: facts and questions as text, written by a model's own encoder and answered by the
//! model with what is read from the memory before the question.

use super::{Action, Args, lost};
use crate::cli::failure::Failure;
use crate::cli::output;
use crate::device::Cpu;
use crate::editing::{Editor, Encoder, Fact, Informed, MEMORY, Maps};
use crate::episodic::{FactShape, Facts};
use crate::memory::{Arena, Usage};
use crate::model::{Model, Text, locate};
use crate::tensor::file::{self, TensorFile};
use std::path::Path;

/// Facts that a memory has room for in the list of its scope detector, if no more are written at once: as many as it has slots.
const LEAST_FACTS: usize = 128;

/// What was done: the memory's name, facts or questions, numbers of an encoding, how many questions were answered from it, and the arena
/// while it was open.
pub(super) type Done = (String, usize, usize, Option<usize>, Usage);

/// Writes, forgets or reads text.
pub(super) fn run(args: &Args, model: &Path, maps: &Path, cpu: &Cpu, arena: &Arena) -> Result<Done, Failure> {
    let located = locate(model)?;
    let (text, model) = (Text::open(&located)?, Model::open(&located, arena)?);
    // A model and its maps: encodings of others are something else.
    let origin = format!("{} {}", model.fingerprint, TensorFile::open(maps)?.hash());
    let maps = Maps::load(maps, &model.config, &model.fingerprint)?;
    let encoder = Encoder::new(&model, &text, maps.layer, cpu, arena)?;
    let lines = std::fs::read_to_string(&args.input)
        .map_err(|error| Failure::usage(format!("cannot read '{}': {error}", args.input.display())))?;
    let lines: Vec<&str> = lines.lines().filter(|line| !line.is_empty()).collect();
    if lines.is_empty() {
        return Err(Failure::usage(format!(
            "'{}' has no lines; give one for each fact or question",
            args.input.display()
        )));
    }
    let (name, shape, mut editor) = match &args.from {
        Some(path) => {
            let (name, shape, facts) = cpu.install(|| Facts::load(path, arena))?;
            if facts.origin != origin {
                let from = match facts.origin.is_empty() {
                    true => "vectors",
                    false if facts.origin.starts_with(&model.fingerprint) => "other maps of this model",
                    false => "another model",
                };
                return Err(Failure::usage(format!(
                    "'{}' was written from {from}; give a memory that --model {} wrote by --maps {}",
                    path.display(),
                    args.model.as_deref().unwrap_or(Path::new("")).display(),
                    args.maps.as_deref().unwrap_or(Path::new("")).display()
                )));
            }
            (name, shape, Editor::with(&encoder, &maps, facts, arena).seeded(args.seed))
        }
        None if args.action == Action::Write => {
            let most_facts = args.most_facts()?.unwrap_or(lines.len().max(LEAST_FACTS)).max(1);
            let name = Editor::memory(MEMORY, &maps)?;
            let mut editor = Editor::new(&encoder, &maps, (&name, most_facts), arena)?.seeded(args.seed);
            editor.facts.origin = origin;
            (name, FactShape { width: maps.width(), most_facts }, editor)
        }
        None => {
            return Err(Failure::usage("there is nothing to read or to forget yet; give a memory by --from".into()));
        }
    };
    if args.action == Action::Read {
        if let Some(line) = lines.iter().find(|line| line.contains('\t')) {
            return Err(Failure::usage(format!(
                "'{}' has a tab, behind which an answer is written; to read, give questions alone",
                shown(line)
            )));
        }
        let questions: Vec<String> = lines.iter().map(|line| line.to_string()).collect();
        let (tokens, answered) = editor.answers(&questions, true)?;
        let mut written = String::new();
        for ((question, token), answered) in questions.iter().zip(tokens).zip(&answered) {
            let source = if *answered { "memory" } else { "model" };
            written += &format!("{question}\t{}\t{source}\n", escaped(&text.text(&[token])?));
        }
        file::replace(&args.output, |path| std::fs::write(path, &written).map_err(|error| error.to_string()))?;
        let answered = answered.iter().filter(|answered| **answered).count();
        return Ok((name, lines.len(), shape.width, Some(answered), arena.usage()));
    }
    let facts = lines.iter().map(|line| fact(line, &encoder)).collect::<Result<Vec<Fact>, Failure>>()?;
    match args.action {
        Action::Forget => editor.forget(&facts)?,
        _ => editor.write(&facts)?,
    }
    editor.facts.save(&args.output, &name, &shape)?;
    output::warn(&lost(&editor.facts, &shape));
    Ok((name, facts.len(), shape.width, None, arena.usage()))
}

/// As much of a line as a message shows.
fn shown(line: &str) -> String {
    line.chars().take(60).collect()
}

/// An answer as it stands in a line with tabs: a model may well answer with the end of one.
fn escaped(answer: &str) -> String {
    let answer = answer.replace('\\', "\\\\");
    answer.replace('\n', "\\n").replace('\r', "\\r").replace('\t', "\\t")
}

/// A line's stem and value, between which a tab stands.
fn fact(line: &str, encoder: &Encoder<'_>) -> Result<Fact, Failure> {
    let Some((stem, value)) = line.split_once('\t') else {
        let shown = shown(line);
        return Err(Failure::usage(format!("'{shown}' is no fact; write what is asked, a tab, and the answer")));
    };
    let fact = Fact { stem: stem.into(), value: value.into() };
    encoder.value(&fact.value)?;
    Ok(fact)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_stays_within_its_place_in_a_line() {
        for (answer, expected) in [(" river", " river"), ("\n", "\\n"), ("\r\n\t", "\\r\\n\\t"), ("\\n", "\\\\n")] {
            assert_eq!(escaped(answer), expected);
        }
    }
}
