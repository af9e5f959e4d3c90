//! A run from its recipe to a model: steps, evaluations, checkpoints, and the record at the end.

pub use super::error::TrainError;

use super::activations::Extents;
use super::checkpoint::{self, Identity, Progress, as_written};
use super::data::{Data, DataError};
use super::export;
use super::log::{Line, Log};
use super::origin::Start;
use super::recipe::{Recipe, Stage};
use super::tensor_parallel;
use super::zero::{Groups, Zero};
use super::{Batch, Network, Parameters};
use crate::device::Cpu;
use crate::memory::{Arena, LabelBytes};
use crate::model::fingerprint;
use crate::ranks::Comm;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Name of the record in a run's folder.
pub const RECORD: &str = "training.json";
/// Most sequences that are evaluated at once.
const JUDGED_AT_ONCE: usize = 4;

/// A rank that trains, and how the numbers of training are shared out with the others.
pub struct Place<'a> {
    /// To the others.
    pub comm: &'a Comm,
    /// Where it computes.
    pub cpu: &'a Cpu,
    /// Stage of ZeRO ([`Zero`]).
    pub stage: u8,
    /// Ranks that share each block ([`tensor_parallel`]); the others read other sequences.
    pub tensor_parallel: usize,
    /// Whether the optimizer's averages lie in a file.
    pub offload: bool,
}

/// How a run is made.
pub struct Options {
    /// The run's folder.
    pub out: PathBuf,
    /// Whether to go on with the run in it.
    pub resume: bool,
    /// Stop after this many steps of the recipe; the rest can be resumed.
    pub stop_after: Option<usize>,
    /// What tensors may take.
    pub limit_bytes: u64,
    /// Where and with what, for the record.
    pub environment: Value,
}

impl Options {
    /// The step that a run of `steps` ends behind.
    pub(super) fn end(&self, steps: usize) -> usize {
        self.stop_after.unwrap_or(usize::MAX).min(steps)
    }
}

/// Trains a model, on each of its ranks. Tells `watch` each line as it is logged, which rank 0 does.
///
/// # Errors
/// When the recipe, the folder or the memory does not allow it, the loss stops being a number, or another rank ended.
pub fn run(
    recipe: &Recipe,
    place: &Place<'_>,
    options: &Options,
    watch: &mut dyn FnMut(&Line),
) -> Result<(), TrainError> {
    let misfit = |reason| TrainError::Misfit { name: format!("recipe '{}'", recipe.name), reason };
    let start = recipe.model.open(recipe.data.text.as_deref())?;
    recipe.check_lengths(start.config.most_tokens(), "the model's longest context").map_err(misfit)?;
    let groups = Groups::new(place.comm, place.tensor_parallel)?;
    recipe.check_ranks(groups.data.size()).map_err(misfit)?;
    let share = tensor_parallel::share(&start.config, place.tensor_parallel).map_err(misfit)?;
    let whole = Parameters::with_frozen(&start.config, &recipe.frozen).map_err(misfit)?;
    let parameters = Parameters::with_frozen(&share, &recipe.frozen).map_err(misfit)?;
    let data = Data::new(recipe, &start.vocabulary)?;
    data.check(&recipe.evaluation, recipe.stages.iter().map(|stage| stage.length).max().unwrap_or(0))?;
    let arena = Arena::with_limit(options.limit_bytes);
    let mut trainer = Trainer::new(recipe, (place, &groups), &arena, [&whole, &parameters], &start, &data, options)?;
    let end = options.end(recipe.steps());
    // Nothing is to be added to a run that is done.
    while trainer.progress.step < end {
        trainer.stage(end, options, watch)?;
    }
    Ok(())
}

struct Trainer<'a> {
    recipe: &'a Recipe,
    identity: Identity,
    place: &'a Place<'a>,
    groups: &'a Groups,
    arena: &'a Arena,
    /// Of the whole model, and those that this rank has.
    whole: &'a Parameters,
    parameters: &'a Parameters,
    start: &'a Start,
    data: &'a Data<'a>,
    folder: &'a Path,
    zero: Zero<'a>,
    /// Of rank 0.
    log: Option<Log>,
    progress: Progress,
    /// Predicted and highest bytes of each stage, noted at its end.
    memory: Vec<Value>,
    /// Bytes that the last step sent.
    sent_bytes: u64,
    results: Vec<Value>,
}

/// What was added up since the last line of the log.
#[derive(Default)]
struct Since {
    steps: usize,
    loss: f64,
    tokens: u64,
    flop: f64,
    seconds: f64,
}

impl<'a> Trainer<'a> {
    fn new(
        recipe: &'a Recipe,
        (place, groups): (&'a Place<'a>, &'a Groups),
        arena: &'a Arena,
        [whole, parameters]: [&'a Parameters; 2],
        start: &'a Start,
        data: &'a Data<'a>,
        options: &'a Options,
    ) -> Result<Self, TrainError> {
        let folder = options.out.as_path();
        checkpoint::check(options, start.folder.as_deref())?;
        std::fs::create_dir_all(folder).map_err(|error| TrainError::write(folder, &error))?;
        // With the model that it starts from, as its folder is now.
        let base = start.folder.as_deref().map(fingerprint).transpose()?;
        let identity = Identity::new(recipe, base.as_deref(), recipe.data.text.as_deref());
        let Place { comm, cpu, stage, offload, .. } = *place;
        let mut zero = Zero::new(arena, groups, cpu, [whole, parameters], stage, offload.then_some(folder))?;
        let progress = if options.resume {
            zero.load(folder, &identity)?
        } else {
            zero.start(start, recipe.seed)?;
            Progress::default()
        };
        let mut log = None;
        if comm.rank() == 0 {
            log = Some(Log::open(folder, progress.step)?);
            let text = toml::to_string(recipe).expect("a recipe is plain data");
            export::text(folder, "recipe.toml", &text)?;
        }
        // Before rank 0 writes what others look for.
        comm.barrier()?;
        Ok(Trainer {
            recipe,
            identity,
            place,
            groups,
            arena,
            whole,
            parameters,
            start,
            data,
            folder,
            zero,
            log,
            progress,
            // Of stages that a run which was stopped left behind; one that was killed wrote no record.
            memory: if options.resume { checkpoint::noted_memory(folder) } else { Vec::new() },
            sent_bytes: 0,
            results: Vec::new(),
        })
    }

    /// The sequences of a step that this rank reads.
    fn batch(&self, stage: Stage) -> Result<Batch, DataError> {
        let data = &self.groups.data;
        let whole = self.data.batch(self.place.cpu, self.progress.sequences, [stage.batch, stage.length])?;
        Ok(whole.part(data.rank(), data.size(), stage.length))
    }

    fn network(&self, extents: Extents<'a>) -> Result<Network<'a>, TrainError> {
        let network = Network::new(self.arena, self.place.cpu, extents, self.recipe.recompute)?;
        let tensor = &self.groups.tensor;
        Ok(if tensor.size() > 1 { network.shared_by(self.arena, tensor)? } else { network })
    }

    fn extents(&self, stage: Stage) -> Extents<'a> {
        Extents { parameters: self.parameters, batch: stage.batch, len: stage.length, skipped: 0 }
    }

    /// Steps of the stage that comes next, up to `end`.
    fn stage(&mut self, end: usize, options: &Options, watch: &mut dyn FnMut(&Line)) -> Result<(), TrainError> {
        let recipe = self.recipe;
        let stage = recipe.stage(self.progress.step);
        let ranks = self.place.comm.size();
        let own = Stage { batch: stage.batch / self.groups.data.size(), ..stage };
        let extents = self.extents(own);
        self.arena.reset_peak();
        let mut network = self.network(extents)?;
        let mut since = Since::default();
        let mut next = self.batch(stage)?;
        while self.progress.step < end && recipe.stage(self.progress.step) == stage {
            let (step, began) = (self.progress.step, Instant::now());
            let batch = next;
            self.zero.take_sent_bytes();
            let rate = recipe.optimizer.rate(step, recipe.steps());
            let (loss, gradient_norm) = self.zero.step(&mut network, &batch, &recipe.optimizer, (step, rate))?;
            self.sent_bytes = self.zero.take_sent_bytes();
            self.progress.step += 1;
            self.progress.sequences += stage.batch as u64;
            self.progress.tokens += (stage.batch * stage.length) as u64;
            next = self.batch(stage)?;
            let seconds = began.elapsed().as_secs_f64();
            self.progress.seconds += seconds;
            since.seconds += seconds;
            since.steps += 1;
            since.loss += loss;
            since.tokens += (stage.batch * stage.length) as u64;
            since.flop += ranks as f64 * extents.step_flop(batch.targets.len());

            let done = self.progress.step;
            let last = done == end || done == recipe.steps();
            // No line is a mean over two stages.
            let ends = last || recipe.stage(done) != stage;
            if done.is_multiple_of(recipe.evaluation.log_steps) || ends {
                self.tell(
                    watch,
                    Line::Step {
                        step: done,
                        length_tokens: stage.length,
                        loss: since.loss / since.steps as f64,
                        rate,
                        gradient_norm,
                        tokens: self.progress.tokens,
                        seconds: self.progress.seconds,
                        tokens_per_second: since.tokens as f64 / since.seconds,
                        gflop_per_second: since.flop / since.seconds / 1e9,
                    },
                )?;
                since = Since::default();
            }
            let used = self.arena.usage().peak;
            if done.is_multiple_of(recipe.evaluation.every_steps) || last {
                // Its network takes the place of this one: no more than the steps' memory is needed.
                drop(network);
                self.evaluate(own, watch)?;
                network = self.network(extents)?;
            }
            if ends {
                self.note_memory(&extents, used)?;
            }
            if last {
                self.finish(options)?;
            }
            // Last: a run that is killed before it does all of this again.
            if done.is_multiple_of(recipe.evaluation.save_steps) || last {
                self.save()?;
            }
        }
        Ok(())
    }

    fn tell(&self, watch: &mut dyn FnMut(&Line), line: Line) -> Result<(), TrainError> {
        self.log.as_ref().map_or(Ok(()), |log| log.tell(watch, line))
    }

    fn save(&mut self) -> Result<(), TrainError> {
        self.zero.save(self.folder, &self.identity, &self.progress, &self.start.files)
    }

    /// Judges every task at every length up to that of this rank's steps, in no more memory than they take.
    fn evaluate(&mut self, own: Stage, watch: &mut dyn FnMut(&Line)) -> Result<(), TrainError> {
        self.results.clear();
        let evaluation = &self.recipe.evaluation;
        let lengths = evaluation.lengths.iter().filter(|length| **length <= own.length);
        let longest = lengths.clone().max().copied();
        let samples = evaluation.samples;
        let divides = |at_once: &usize| samples.is_multiple_of(*at_once);
        let at_once = (1..=JUDGED_AT_ONCE.min(own.batch)).rev().find(divides).expect("all are multiples of 1");
        for &length in lengths {
            let extents = self.extents(Stage { length, batch: at_once, steps: 1 });
            let mut network = self.network(extents)?;
            for task in &evaluation.tasks {
                let all = self.data.held_out(self.place.cpu, task, samples, length)?;
                let (comm, zero) = (&self.groups.data, &mut self.zero);
                let right = judged(&mut network, comm, &all, |network, part| right_answers(network, zero, part))?;
                let right = right as usize;
                let step = self.progress.step;
                let line = Line::Evaluation { step, task: task.clone(), length_tokens: length, right, samples };
                self.results.push(serde_json::to_value(&line).expect("a line is plain data"));
                self.tell(watch, line)?;
            }
            if let Some(all) = self.data.held_out_text(samples, length).filter(|_| Some(length) == longest) {
                let (comm, zero) = (&self.groups.data, &mut self.zero);
                let loss = judged(&mut network, comm, &all, |network, part| {
                    Ok(network.judge_of(zero, part, |_, _, _| ())?)
                })?;
                self.tell(watch, Line::HeldOut { step: self.progress.step, loss, perplexity: loss.exp() })?;
            }
        }
        Ok(())
    }

    /// Notes what each rank took in a step of these extents, and sent.
    fn note_memory(&mut self, extents: &Extents<'_>, peak: LabelBytes) -> Result<(), TrainError> {
        let Place { comm, .. } = *self.place;
        let note = json!({
            "rank": comm.rank(),
            "sequences": extents.batch,
            "length_tokens": extents.len,
            "predicted_bytes": self.zero.training_bytes(extents, self.recipe.recompute),
            "peak_bytes": peak,
            "predicted_sent_bytes": self.zero.step_sent_bytes(extents, self.recipe.recompute),
            "sent_bytes": self.sent_bytes,
        });
        let of_ranks = comm.gather_texts(note.to_string().into_bytes())?;
        let is_same = |noted: &Value| ["length_tokens", "sequences"].iter().all(|key| noted[*key] == note[*key]);
        if !self.memory.iter().any(is_same) {
            let read = |text: &Vec<u8>| serde_json::from_slice::<Value>(text).expect("written by the same build");
            self.memory.extend(of_ranks.iter().map(read));
        }
        Ok(())
    }

    /// Writes the record.
    fn finish(&self, options: &Options) -> Result<(), TrainError> {
        let Place { comm, stage, offload, tensor_parallel, .. } = *self.place;
        if comm.rank() > 0 {
            return Ok(());
        }
        let record = json!({
            "recipe": as_written(&self.recipe),
            "recipe_digest": self.identity.digest(),
            "parameters": self.whole.count(),
            "trained_parameters": self.whole.trained_count(),
            "ranks": comm.size(),
            "transport": comm.transport(),
            "zero": stage,
            "offload": offload,
            "tensor_parallel": tensor_parallel,
            "steps": self.progress.step,
            "sequences": self.progress.sequences,
            "tokens": self.progress.tokens,
            "seconds": self.progress.seconds,
            "accuracy": self.results,
            "memory": self.memory,
            "environment": options.environment,
        });
        export::text(self.folder, RECORD, &format!("{record:#}\n"))
    }
}

/// What `judge` says of all sequences, added up; ranks take as many as a network has in turns.
fn judged(
    network: &mut Network<'_>,
    comm: &Comm,
    all: &Batch,
    mut judge: impl FnMut(&mut Network<'_>, &Batch) -> Result<f64, TrainError>,
) -> Result<f64, TrainError> {
    let Extents { len, .. } = *network.extents();
    let parts = all.tokens.len() / network.extents().rows();
    let mut sum = 0.0;
    for first in (0..parts).step_by(comm.size()) {
        let index = first + comm.rank();
        // All ranks walk over the model together, also those for which nothing is left.
        let found = judge(network, &all.part(index.min(parts - 1), parts, len))?;
        sum += if index < parts { found } else { 0.0 };
    }
    let mut of_ranks = vec![0f64; comm.size()];
    of_ranks[comm.rank()] = sum;
    comm.all_gather(&mut of_ranks.iter_mut().map(bytemuck::bytes_of_mut).collect::<Vec<_>>())?;
    Ok(of_ranks.iter().sum())
}

/// How many sequences of a batch have every judged token right.
fn right_answers(network: &mut Network<'_>, zero: &mut Zero<'_>, part: &Batch) -> Result<f64, TrainError> {
    let Extents { len, batch, .. } = *network.extents();
    let mut wrong = vec![false; batch];
    network.judge_of(zero, part, |target, token, _| wrong[target.row / len] |= token != target.token)?;
    Ok(wrong.iter().filter(|wrong| !**wrong).count() as f64)
}
