//! Where the parameters of a model lie: one flat array of f32 in the order of its table, and a shorter one, laid out alike,
//! of those that are trained, for gradients and for each of the optimizer's averages.
//!
//! The projections to q, k and v follow each other, and so do gate and up: one matrix product reads each group as one
//! matrix.

use super::holder::Unit;
use super::linear::Linear;
use crate::memory::{Arena, ArenaError, Buffer, Label};
use crate::model::Config;
use crate::model::parameters::{self, Make, Role, Stack};
use crate::tensor::DType;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal};
use std::convert::Infallible;
use std::ops::Range;

/// What every token's embedding has in common at first, as a fraction of its size, and how many frequencies of RoPE the
/// first block's heads read from it, with what size after normalisation.
const COMMON: f32 = 0.33;
const FREQUENCIES: usize = 5;
const LOOK: f32 = 7.0;

/// A matrix or a vector of the array.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    /// Its name in the model's files.
    pub name: String,
    /// Its shape there: `[out, in]` of a matrix.
    pub shape: Vec<usize>,
    /// What it is for.
    pub role: Role,
    /// Where it lies.
    pub range: Range<usize>,
    /// Where it lies among the matrices, or else among the norms and biases.
    pub of_kind: Range<usize>,
    /// Where its gradient lies, unless it is frozen.
    pub gradient: Option<Range<usize>>,
}

/// Parameters that follow each other and are used as one.
#[derive(Debug, Clone)]
pub(super) struct Group {
    pub range: Range<usize>,
    /// As [`Parameter::of_kind`].
    pub of_kind: Range<usize>,
    /// Each stretch that is trained: its first element in the group, and where its gradient lies.
    pub trained: Vec<(usize, Range<usize>)>,
}

impl Group {
    pub fn new(parameters: &[Parameter]) -> Self {
        let start = parameters[0].range.start;
        let mut trained: Vec<(usize, Range<usize>)> = Vec::new();
        for Parameter { range, gradient, .. } in parameters {
            let Some(gradient) = gradient.clone() else { continue };
            match trained.last_mut() {
                Some((first, last)) if *first + last.len() == range.start - start => last.end = gradient.end,
                _ => trained.push((range.start - start, gradient)),
            }
        }
        let [first, last] = [&parameters[0], &parameters[parameters.len() - 1]];
        Group { range: start..last.range.end, of_kind: first.of_kind.start..last.of_kind.end, trained }
    }

    /// Where its gradient lies, if it is a single parameter that is trained.
    pub fn gradient(&self) -> Option<Range<usize>> {
        self.trained.first().map(|(_, range)| range.clone())
    }
}

/// A block's parameters.
#[derive(Debug, Clone)]
pub(super) struct BlockGroups {
    pub before_attention: Group,
    pub qkv: Linear,
    pub qk_norm: Option<[Group; 2]>,
    pub out: Linear,
    pub after_attention: Option<Group>,
    pub before_mlp: Group,
    pub gate_up: Linear,
    pub down: Linear,
    pub after_mlp: Option<Group>,
}

/// The layout of all parameters.
#[derive(Debug, Clone)]
pub struct Parameters {
    /// The model.
    pub config: Config,
    /// Type in which matrices are kept, and queries, keys and values: f32, or bf16 where nothing is trained.
    pub dtype: DType,
    /// Every one, in the order in which they lie.
    pub all: Vec<Parameter>,
    /// `[vocab, hidden]`.
    pub(super) embedding: Group,
    pub(super) blocks: Vec<BlockGroups>,
    pub(super) norm: Group,
    /// `[vocab, hidden]`: the embedding, where they are tied.
    pub(super) output: Group,
    /// The first block of which something is trained, or which lies above an embedding that is.
    pub(super) first_trained: usize,
}

impl Parameters {
    /// The layout of a model all of whose parameters are trained.
    pub fn new(config: &Config) -> Self {
        Self::trained(config, |_| true)
    }

    /// The layout of a model in which those parameters are frozen whose names a pattern matches: they get no gradient and
    /// no room in the optimizer. A pattern is a part of a name, `*` in it anything.
    ///
    /// # Errors
    /// When a pattern matches nothing, or nothing is left to train.
    pub fn with_frozen(config: &Config, patterns: &[String]) -> Result<Self, String> {
        let all = Self::new(config);
        let matched = |pattern: &&String| all.all.iter().any(|parameter| matches(pattern, &parameter.name));
        if let Some(pattern) = patterns.iter().find(|pattern| !matched(pattern)) {
            let first = &all.all[1].name;
            return Err(format!("frozen: '{pattern}' matches no parameter; a name is as '{first}', and * is anything"));
        }
        let parameters = Self::trained(config, |name| !patterns.iter().any(|pattern| matches(pattern, name)));
        match parameters.trained_count() {
            0 => Err(format!("frozen: {patterns:?} matches every parameter; at least one must be trained")),
            _ => Ok(parameters),
        }
    }

    /// The layout of a model none of whose parameters is trained, with matrices in f32 or bf16.
    pub fn all_frozen(config: &Config, dtype: DType) -> Self {
        Parameters { dtype, ..Self::trained(config, |_| false) }
    }

    fn trained(config: &Config, is_trained: impl Fn(&str) -> bool) -> Self {
        let mut list = List { all: Vec::new(), is_trained };
        let Ok(tree) = config.parameters(&mut list);
        let (hidden, ffn) = (config.hidden, config.ffn);
        let one = |parameter: Parameter| Group::new(&[parameter]);
        let linear = |stack: Stack<Parameter, Parameter>, inputs, outputs| {
            let bias = (!stack.biases.is_empty()).then(|| Group::new(&stack.biases));
            Linear { weight: Group::new(&stack.matrices), bias, inputs, outputs }
        };
        let block = |block: parameters::Block<Parameter, Parameter>| BlockGroups {
            before_attention: one(block.before_attention),
            qkv: linear(block.qkv, hidden, config.qkv_width()),
            qk_norm: block.qk_norm.map(|norms| norms.map(one)),
            out: linear(block.o, config.q_width(), hidden),
            after_attention: block.after_attention.map(one),
            before_mlp: one(block.before_mlp),
            gate_up: linear(block.gate_up, hidden, 2 * ffn),
            down: linear(block.down, ffn, hidden),
            after_mlp: block.after_mlp.map(one),
        };
        let embedding = one(tree.embedding);
        let all = list.all;
        let trained = |layer: &usize| {
            let prefix = format!("model.layers.{layer}.");
            all.iter().any(|parameter| parameter.gradient.is_some() && parameter.name.starts_with(&prefix))
        };
        let first_trained = match all[0].gradient {
            Some(_) => 0,
            None => (0..config.layers).find(trained).unwrap_or(config.layers),
        };
        Parameters {
            output: tree.output.map_or_else(|| embedding.clone(), one),
            embedding,
            blocks: tree.blocks.into_iter().map(block).collect(),
            norm: one(tree.norm),
            all,
            first_trained,
            config: config.clone(),
            dtype: DType::F32,
        }
    }

    /// The unit of a parameter.
    pub(super) fn unit_of(&self, parameter: &Parameter) -> Unit {
        let within =
            |group: &Group| parameter.range.start >= group.range.start && parameter.range.end <= group.range.end;
        let layer = parameter.name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
        match layer {
            Some(layer) => Unit::Block(layer),
            None if within(&self.embedding) => Unit::Embedding,
            None if within(&self.norm) => Unit::Norm,
            None => Unit::Output,
        }
    }

    /// What holds the output matrix.
    pub(super) fn output_unit(&self) -> Unit {
        if self.output.range == self.embedding.range { Unit::Embedding } else { Unit::Output }
    }

    /// Number of f32 elements.
    pub fn count(&self) -> usize {
        self.all[self.all.len() - 1].range.end
    }

    /// Numbers in all matrices, and in all norms and biases.
    pub(super) fn counts(&self) -> [usize; 2] {
        [true, false].map(|is_matrix| {
            let last = self.all.iter().rev().find(|parameter| parameter.role.decays() == is_matrix);
            last.map_or(0, |last| last.of_kind.end)
        })
    }

    /// Bytes of all of them.
    pub fn bytes(&self) -> u64 {
        let [matrices, vectors] = self.counts();
        (self.dtype.bytes() * matrices + 4 * vectors) as u64
    }

    /// Number of f32 elements that are trained.
    pub fn trained_count(&self) -> usize {
        self.all.iter().rev().find_map(|parameter| parameter.gradient.as_ref()).map_or(0, |range| range.end)
    }

    /// First values for training: normal deviates from `seed`, norms that multiply by 1, no biases, and heads that look
    /// back in the first block.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn initial(&self, arena: &Arena, seed: u64) -> Result<Buffer<f32>, ArenaError> {
        let mut weights = arena.alloc(Label::Weights, self.count())?;
        let mut rest = &mut *weights;
        self.each_initial(seed, true, &mut |values| {
            rest.split_off_mut(..values.len()).expect("room for every parameter").copy_from_slice(values);
        });
        Ok(weights)
    }

    /// The same, one parameter after the other, with heads that look back or without.
    pub(super) fn each_initial(&self, seed: u64, look_back: bool, take: &mut dyn FnMut(&[f32])) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut values = Vec::new();
        for parameter in &self.all {
            values.clear();
            values.resize(parameter.range.len(), 0.0);
            // A product with a row of size 1 has size 1; what is added to the residual stream 2 * layers times has less.
            let size = 1.0 / (parameter.shape[parameter.shape.len() - 1] as f32).sqrt();
            let std_dev = match parameter.role {
                Role::Norm => {
                    values.fill(1.0 - self.config.norm_shift());
                    0.0
                }
                Role::Bias => 0.0,
                Role::Embedding | Role::Matrix => size,
                Role::Residual => 1.0 / (2.0 * self.config.layers as f32) * size,
            };
            if std_dev > 0.0 {
                let normal = Normal::new(0.0f32, std_dev).expect("a std_dev is finite and not negative");
                values.iter_mut().for_each(|value| *value = normal.sample(&mut rng));
            }
            if look_back {
                self.look_back(parameter, &mut values);
            }
            take(&values);
        }
    }

    /// Lets query head `h` of the first block look at the token `h + 1` places before its own.
    ///
    /// To answer by content a model must bring together what a place holds and what came before it (induction heads,
    /// Olsson et al. 2022, arXiv 2209.11895). Neither is of use without the other, so that from normal deviates alone
    /// training stays on a plateau until both are there by chance. Here the second is there from the start: the first
    /// component of every embedding is the same number, from which q and k of some frequencies of RoPE are read, turned
    /// by the distance. All of it can be unlearned.
    fn look_back(&self, parameter: &Parameter, values: &mut [f32]) {
        let Config { hidden, head_dim, q_heads, kv_heads, max_positions, ref rope, .. } = self.config;
        let size = 1.0 / (hidden as f32).sqrt();
        let common = COMMON / (1.0 + COMMON * COMMON).sqrt();
        // A row of q or k that gives `LOOK` for every token: after RMSNorm its first component is common * sqrt(hidden).
        let gain = LOOK * size / common;
        if parameter.range == self.embedding.range {
            values.chunks_exact_mut(hidden).for_each(|row| row[0] = COMMON);
        }
        // Of q, k and v below each other, the rows that this parameter has.
        let qkv = self.blocks[0].qkv.weight.range.clone();
        if !qkv.contains(&parameter.range.start) {
            return;
        }
        let first = (parameter.range.start - qkv.start) / hidden;
        let mut set = |row: usize, value: f32| {
            if let Some(row) = row.checked_sub(first).and_then(|row| values.chunks_exact_mut(hidden).nth(row)) {
                row.fill(0.0);
                row[0] = gain * value;
            }
        };
        let (half, frequencies) = (rope.pairs(head_dim), rope.frequencies(head_dim, max_positions, max_positions));
        for head in 0..q_heads + kv_heads {
            let back = if head < q_heads { head + 1 } else { 0 };
            for pair in 0..FREQUENCIES.min(half) {
                let angle = -(back as f64) * frequencies.rad_per_token()[pair];
                set(head * head_dim + pair, angle.cos() as f32);
                set(head * head_dim + half + pair, angle.sin() as f32);
            }
        }
    }
}

/// Whether the parts of a pattern between its `*` stand in a name, one behind the other.
fn matches(pattern: &str, name: &str) -> bool {
    let rest = pattern.split('*').try_fold(name, |rest, part| rest.find(part).map(|at| &rest[at + part.len()..]));
    rest.is_some()
}

/// Parameters one behind the other.
struct List<F> {
    all: Vec<Parameter>,
    is_trained: F,
}

impl<F: Fn(&str) -> bool> List<F> {
    fn add(&mut self, name: String, role: Role, shape: Vec<usize>) -> Parameter {
        let count: usize = shape.iter().product();
        let start = self.all.last().map_or(0, |last| last.range.end);
        let trained =
            self.all.iter().rev().find_map(|parameter| parameter.gradient.as_ref()).map_or(0, |last| last.end);
        let gradient = (self.is_trained)(&name).then(|| trained..trained + count);
        let is_matrix = role.decays();
        let before = self.all.iter().rev().find(|parameter| parameter.role.decays() == is_matrix);
        let among = before.map_or(0, |before| before.of_kind.end);
        let (range, of_kind) = (start..start + count, among..among + count);
        let parameter = Parameter { name, shape, role, range, of_kind, gradient };
        self.all.push(parameter.clone());
        parameter
    }
}

impl<F: Fn(&str) -> bool> Make for List<F> {
    type Matrix = Parameter;
    type Vector = Parameter;
    type Error = Infallible;

    fn matrix(&mut self, name: String, role: Role, shape: [usize; 2]) -> Result<Parameter, Infallible> {
        Ok(self.add(name, role, shape.to_vec()))
    }

    fn vector(&mut self, name: String, role: Role, width: usize) -> Result<Parameter, Infallible> {
        Ok(self.add(name, role, vec![width]))
    }
}
