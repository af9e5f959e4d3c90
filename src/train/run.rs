//! A run from its recipe to a model: steps, evaluations, checkpoints, and the record at the end.

use super::activations::Extents;
use super::adamw::AdamW;
use super::checkpoint::{self, CHECKPOINT, Progress};
use super::data::{Data, DataError};
use super::export;
use super::log::{Line, Log};
use super::origin::Start;
use super::recipe::{Recipe, RecipeError, Stage};
use super::{Batch, Network, Parameters};
use crate::attention::AttentionError;
use crate::device::Cpu;
use crate::memory::{Arena, ArenaError, Buffer, Label, LabelBytes};
use crate::model::ModelError;
use crate::tensor::file::FileError;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Name of the record in a run's folder.
pub const RECORD: &str = "training.json";
/// Sequences that are evaluated at once.
const JUDGED_AT_ONCE: usize = 4;

/// Training that cannot begin or go on.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The recipe.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The model that it starts from.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A recipe that does not fit the model that it starts from.
    #[error("recipe '{name}': {reason}")]
    Misfit {
        /// The recipe's name.
        name: String,
        /// What was wrong, its value, and what would be right.
        reason: String,
    },
    /// The data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The folder holds a run, and nobody said to go on with it.
    #[error("'{0}' holds a run already; go on with it by --resume, or name another folder")]
    Taken(PathBuf),
    /// There is no run to go on with.
    #[error("'{0}' holds no {CHECKPOINT} to go on from; leave --resume out")]
    Nothing(PathBuf),
    /// A checkpoint that does not fit.
    #[error("'{path}': {reason}")]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file that cannot be read or written.
    #[error("cannot {verb} '{path}': {reason}")]
    System {
        /// Read or write.
        verb: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's own words.
        reason: String,
    },
    /// A file of tensors.
    #[error(transparent)]
    File(#[from] FileError),
    /// Attention.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// No room.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// Gates that let go of everything, or of nothing.
    #[error(
        "by step {step} gates evict {:.1}% of the tokens behind the window where {:.1}% are asked for; {}",
        100.0 * evicted, 100.0 * target,
        if evicted > target { "a smaller learning rate or pressure may help" }
        else { "a larger learning rate, more pressure or more steps may help" }
    )]
    Collapsed {
        /// Steps that are done.
        step: usize,
        /// Fraction of tokens that are evicted.
        evicted: f64,
        /// Fraction that is asked for.
        target: f64,
    },
    /// The loss is no number any more.
    #[error("the loss of step {step} is {loss}; a smaller learning rate or more warmup may help")]
    Diverged {
        /// The step.
        step: usize,
        /// The loss.
        loss: f64,
    },
}

impl TrainError {
    pub(super) fn read(path: &Path, error: &std::io::Error) -> Self {
        TrainError::System { verb: "read", path: path.into(), reason: error.to_string() }
    }

    pub(super) fn write(path: &Path, error: &std::io::Error) -> Self {
        TrainError::System { verb: "write", path: path.into(), reason: error.to_string() }
    }
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

/// Trains a model. Tells `watch` each line as it is logged.
///
/// # Errors
/// When the recipe, the folder or the memory does not allow it, or the loss stops being a number.
pub fn run(recipe: &Recipe, cpu: &Cpu, options: &Options, watch: &mut dyn FnMut(&Line)) -> Result<(), TrainError> {
    let misfit = |reason| TrainError::Misfit { name: recipe.name.clone(), reason };
    let start = recipe.model.open()?;
    let out = options.out.canonicalize().ok();
    if start.folder.as_ref().is_some_and(|folder| folder.canonicalize().ok() == out) {
        return Err(misfit(format!(
            "'{}' is the folder that the model comes from; name another one",
            options.out.display()
        )));
    }
    recipe.check_lengths(start.config.most_tokens(), "the model's longest context").map_err(misfit)?;
    let parameters = Parameters::with_frozen(&start.config, &recipe.frozen).map_err(misfit)?;
    let data = Data::new(recipe, &start.vocabulary)?;
    let arena = Arena::with_limit(options.limit_bytes);
    let mut trainer = Trainer::new(recipe, cpu, &arena, &parameters, &start, &data, options)?;
    let end = options.stop_after.unwrap_or(usize::MAX).min(recipe.steps());
    if trainer.progress.step >= end {
        // There is nothing to add to the record of a run that is done.
        return Ok(());
    }
    while trainer.progress.step < end {
        trainer.stage(end, watch)?;
    }
    trainer.finish(options)
}

struct Trainer<'a> {
    recipe: &'a Recipe,
    digest: String,
    cpu: &'a Cpu,
    arena: &'a Arena,
    parameters: &'a Parameters,
    start: &'a Start,
    data: &'a Data<'a>,
    folder: &'a Path,
    weights: Buffer<f32>,
    gradients: Buffer<f32>,
    adamw: AdamW,
    log: Log,
    progress: Progress,
    /// Predicted and highest bytes of each stage's shape.
    memory: Vec<Value>,
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
        cpu: &'a Cpu,
        arena: &'a Arena,
        parameters: &'a Parameters,
        start: &'a Start,
        data: &'a Data<'a>,
        options: &'a Options,
    ) -> Result<Self, TrainError> {
        let folder = options.out.as_path();
        let there = folder.join(CHECKPOINT).exists();
        if there && !options.resume {
            return Err(TrainError::Taken(folder.into()));
        }
        if !there && options.resume {
            return Err(TrainError::Nothing(folder.into()));
        }
        std::fs::create_dir_all(folder).map_err(|error| TrainError::write(folder, &error))?;
        let digest = recipe.digest();
        let mut weights = start.weights(parameters, arena, recipe.seed)?;
        let gradients = arena.alloc(Label::Gradients, parameters.trained_count())?;
        let mut adamw = AdamW::new(arena, parameters.trained_count())?;
        let progress =
            if there { checkpoint::load(folder, &digest, &mut weights, &mut adamw)? } else { Progress::default() };
        let log = Log::open(folder, progress.step)?;
        let text = toml::to_string(recipe).expect("a recipe is plain data");
        export::text(folder, "recipe.toml", &text)?;
        Ok(Trainer {
            recipe,
            digest,
            cpu,
            arena,
            parameters,
            start,
            data,
            folder,
            weights,
            gradients,
            adamw,
            log,
            progress,
            memory: Vec::new(),
            results: Vec::new(),
        })
    }

    fn extents(&self, stage: Stage) -> Extents<'a> {
        Extents { parameters: self.parameters, batch: stage.batch, len: stage.length, skipped: 0 }
    }

    /// Steps of the stage that comes next, up to `end`.
    fn stage(&mut self, end: usize, watch: &mut dyn FnMut(&Line)) -> Result<(), TrainError> {
        let recipe = self.recipe;
        let stage = recipe.stage(self.progress.step);
        let extents = self.extents(stage);
        self.arena.reset_peak();
        let mut network = Network::new(self.arena, self.cpu, extents, recipe.recompute)?;
        let mut since = Since::default();
        let mut next = self.data.batch(self.cpu, self.progress.sequences, [stage.batch, stage.length])?;
        while self.progress.step < end && recipe.stage(self.progress.step) == stage {
            let (step, began) = (self.progress.step, Instant::now());
            let batch = next;
            self.gradients.fill(0.0);
            let loss = network.step(&self.weights, &batch, &mut self.gradients)?;
            if !loss.is_finite() {
                return Err(TrainError::Diverged { step, loss });
            }
            let rate = recipe.optimizer.rate(step, recipe.steps());
            let gradient_norm = self.adamw.update(
                self.cpu,
                &recipe.optimizer,
                &self.parameters.all,
                (step, rate),
                &mut self.weights,
                &self.gradients,
            );
            self.progress.step += 1;
            self.progress.sequences += stage.batch as u64;
            self.progress.tokens += extents.rows() as u64;
            next = self.data.batch(self.cpu, self.progress.sequences, [stage.batch, stage.length])?;
            let seconds = began.elapsed().as_secs_f64();
            self.progress.seconds += seconds;
            since.seconds += seconds;
            since.steps += 1;
            since.loss += loss;
            since.tokens += extents.rows() as u64;
            since.flop += extents.step_flop(batch.targets.len());

            let done = self.progress.step;
            let last = done == end || done == recipe.steps();
            if done.is_multiple_of(recipe.evaluation.log_steps) || last {
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
            if done.is_multiple_of(recipe.evaluation.save_steps) || last {
                self.save()?;
            }
            if done.is_multiple_of(recipe.evaluation.every_steps) || last {
                let used = self.arena.usage().peak;
                self.evaluate(stage.length, watch)?;
                self.note_memory(&extents, used);
            }
        }
        Ok(())
    }

    fn tell(&self, watch: &mut dyn FnMut(&Line), line: Line) -> Result<(), TrainError> {
        self.log.add(&line)?;
        watch(&line);
        Ok(())
    }

    fn save(&self) -> Result<(), TrainError> {
        checkpoint::save(self.folder, &self.digest, &self.progress, &self.weights, &self.adamw)?;
        export::write(self.folder, &self.start.files, self.parameters, &self.weights)
    }

    /// Judges every task at every length up to `longest`.
    fn evaluate(&mut self, longest: usize, watch: &mut dyn FnMut(&Line)) -> Result<(), TrainError> {
        self.results.clear();
        let evaluation = &self.recipe.evaluation;
        for &length in evaluation.lengths.iter().filter(|length| **length <= longest) {
            let at_once = JUDGED_AT_ONCE.min(evaluation.samples);
            let samples = evaluation.samples / at_once * at_once;
            let extents = self.extents(Stage { length, batch: at_once, steps: 1 });
            let mut network = Network::new(self.arena, self.cpu, extents, self.recipe.recompute)?;
            for task in &evaluation.tasks {
                let all = self.data.held_out(self.cpu, task, samples, length)?;
                let right = right_answers(&mut network, &self.weights, &all)?;
                let step = self.progress.step;
                let line = Line::Evaluation { step, task: task.clone(), length_tokens: length, right, samples };
                self.results.push(serde_json::to_value(&line).expect("a line is plain data"));
                self.tell(watch, line)?;
            }
        }
        Ok(())
    }

    fn note_memory(&mut self, extents: &Extents<'_>, peak: LabelBytes) {
        let note = json!({
            "sequences": extents.batch,
            "length_tokens": extents.len,
            "predicted_bytes": extents.training_bytes(self.recipe.recompute, self.cpu.threads()),
            "peak_bytes": peak,
        });
        if self.memory.last().is_none_or(|last| last["length_tokens"] != note["length_tokens"]) {
            self.memory.push(note);
        }
    }

    /// Writes the record.
    fn finish(&self, options: &Options) -> Result<(), TrainError> {
        let record = json!({
            "recipe": self.recipe,
            "recipe_digest": self.digest,
            "parameters": self.parameters.count(),
            "trained_parameters": self.parameters.trained_count(),
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

/// How many sequences have every judged token right.
fn right_answers(network: &mut Network<'_>, weights: &[f32], all: &Batch) -> Result<usize, TrainError> {
    let Extents { len, .. } = *network.extents();
    let rows = network.extents().rows();
    let mut right = 0;
    for (index, tokens) in all.tokens.chunks_exact(rows).enumerate() {
        let within = index * rows..(index + 1) * rows;
        let targets = all.targets.iter().filter(|target| within.contains(&target.row));
        let targets = targets.map(|target| super::loss::Target { row: target.row - within.start, ..*target }).collect();
        let mut wrong = vec![false; rows / len];
        let batch = Batch { tokens: tokens.to_vec(), targets };
        network.judge(weights, &batch, |target, token, _| wrong[target.row / len] |= token != target.token)?;
        right += wrong.iter().filter(|wrong| !**wrong).count();
    }
    Ok(right)
}
