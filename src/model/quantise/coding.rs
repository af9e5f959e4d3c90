//! The parameters of a block as they are made: matrices in codes, and what goes with them.
//!
//! AWQ scales inputs: the columns of what reads them are multiplied by factors, and the norm or the rows that they come from divided, so
//! that the block stays the same.

use super::awq;
use super::coded::Coded;
use super::gptq::Factor;
use super::moments::{INPUTS, Moment};
use super::recipe::{Method, Recipe};
use crate::device::Cpu;
use crate::format::RowFormat;
use crate::memory::{Arena, Buffer, Label};
use crate::model::parameters::{Make, Role};
use crate::model::weights::{Found, Matrix};
use crate::model::{Config, ModelError};

/// A parameter of a block as it is to be written.
pub enum Made {
    Coded(Coded),
    Vector(Vec<f32>),
}

/// Codes a block's parameters as they are made.
pub struct Coding<'c, 'f> {
    found: &'c mut Found<'f>,
    config: &'c Config,
    recipe: Recipe,
    /// Of what is read, in the order of [`INPUTS`].
    sums: Option<[Moment; 4]>,
    /// What the columns of matrices that read an input are multiplied by, and the input is divided by.
    factors: [Option<Vec<f32>>; 4],
    /// What GPTQ made of the last input's sums.
    factor: Option<(usize, Factor)>,
    /// What was made so far, by name.
    pub made: Vec<(String, Made)>,
    cpu: &'c Cpu,
    arena: &'c Arena,
}

/// The last part of a parameter's name but `weight` or `bias`.
fn part(name: &str) -> &str {
    name.rsplit('.').nth(1).unwrap_or_default()
}

/// Which of [`INPUTS`] a matrix reads.
pub(super) fn input_of(name: &str) -> usize {
    match part(name) {
        "o_proj" => 1,
        "gate_proj" | "up_proj" | "gate_up_proj" => 2,
        "down_proj" => 3,
        _ => 0,
    }
}

impl<'c, 'f> Coding<'c, 'f> {
    /// Of a block whose matrices read what `sums` say, for recipes that ask for that.
    pub fn new(
        found: &'c mut Found<'f>,
        config: &'c Config,
        recipe: Recipe,
        sums: Option<[Moment; 4]>,
        (cpu, arena): (&'c Cpu, &'c Arena),
    ) -> Self {
        Coding { found, config, recipe, sums, factors: Default::default(), factor: None, made: Vec::new(), cpu, arena }
    }

    /// Factors of AWQ, of all inputs that come out of something that can be divided: a norm, the MLP's first half, and values where
    /// each query head has its own.
    ///
    /// # Errors
    /// When a tensor cannot be read, or the arena has no room.
    pub fn find_factors(&mut self, index: usize) -> Result<(), ModelError> {
        let Some(sums) = self.sums.as_ref().filter(|_| self.recipe.method == Method::Awq) else { return Ok(()) };
        let mut shapes = Shapes(Vec::new());
        let Ok(_) = self.config.block(index, &mut shapes);
        let mut factors: [Option<Vec<f32>>; INPUTS.len()] = Default::default();
        for (input, sum) in sums.iter().enumerate() {
            if input == 1 && self.config.q_heads != self.config.kv_heads {
                continue;
            }
            let mut matrices = Vec::new();
            for (name, [rows, width]) in shapes.0.iter().filter(|(name, _)| input_of(name) == input) {
                let mut weights = self.arena.alloc::<f32>(Label::Workspace, rows * width)?;
                self.found.tensor(name, &[*rows, *width])?.widen(0, &mut weights);
                matrices.push(weights);
            }
            let matrices: Vec<&[f32]> = matrices.iter().map(|weights| &**weights).collect();
            let grid = self.recipe.grid;
            factors[input] =
                Some(awq::factors(grid, &matrices, &sum.products, &sum.magnitudes(), self.cpu, self.arena)?);
        }
        for (sum, factors) in self.sums.iter_mut().flatten().zip(&factors) {
            let Some(factors) = factors else { continue };
            for (row, factor) in sum.products.chunks_exact_mut(sum.width).zip(factors) {
                row.iter_mut().zip(factors).for_each(|(x, other)| *x /= factor * other);
            }
        }
        self.factors = factors;
        Ok(())
    }

    /// What the outputs of a layer are divided by, and the first of them that is: those of values and of the MLP's first half.
    fn divided(&self, name: &str) -> Option<(usize, &[f32])> {
        let Config { ffn, .. } = *self.config;
        let (first, input) = match part(name) {
            "v_proj" => (0, 1),
            "qkv_proj" => (self.config.q_width() + self.config.kv_width(), 1),
            "up_proj" => (0, 3),
            "gate_up_proj" => (ffn, 3),
            _ => return None,
        };
        Some((first, self.factors[input].as_deref()?))
    }

    /// Scales a matrix by the factors of its inputs and outputs.
    fn scale(&self, name: &str, weights: &mut [f32], width: usize) {
        if let Some(factors) = &self.factors[input_of(name)] {
            for row in weights.chunks_exact_mut(width) {
                row.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
            }
        }
        if let Some((first, factors)) = self.divided(name) {
            for (row, factor) in weights.chunks_exact_mut(width).skip(first).zip(factors) {
                row.iter_mut().for_each(|x| *x /= factor);
            }
        }
    }

    /// Codes of a matrix's weights, which are what they stand for then.
    fn code(
        &mut self,
        name: &str,
        from: RowFormat,
        shape: [usize; 2],
        weights: &mut [f32],
    ) -> Result<Coded, ModelError> {
        let (input, [_, width], (cpu, arena)) = (input_of(name), shape, (self.cpu, self.arena));
        let mut coded = Coded::new(from, shape, self.recipe.grid, arena)?;
        let source = {
            let mut copy = arena.alloc::<f32>(Label::Workspace, weights.len())?;
            copy.copy_from_slice(weights);
            copy
        };
        match (self.recipe.method, &mut self.sums) {
            (Method::Gptq(method), Some(sums)) => {
                let factor = match self.factor.take_if(|(of, _)| *of == input) {
                    Some((_, factor)) => factor,
                    None => Factor::new(method, &sums[input].products, width, cpu, arena)?,
                };
                factor.code(weights, &mut coded, cpu);
                self.factor = Some((input, factor));
            }
            (Method::Awq, Some(sums)) => {
                // What is cut of queries and keys is multiplied with each other.
                if !["q_proj", "k_proj", "qkv_proj"].contains(&part(name)) {
                    awq::cut(self.recipe.grid, weights, &sums[input].products, width, cpu);
                }
                coded.round(weights, cpu);
            }
            _ => coded.round(weights, cpu),
        }
        if let Some(at) = coded.steps.iter().position(|step| !step.scale.is_finite()) {
            let row = at / (width / self.recipe.grid.group);
            let reason = format!(
                "tensor '{name}' holds in row {row} an element that is not finite, or that f16 has no scale for"
            );
            return Err(self.found.refused(reason));
        }
        coded.widen(weights, cpu);
        // Of what is lost, and of all of it.
        let squares = |of: &[f32]| of.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        let mut off = arena.alloc::<f32>(Label::Workspace, weights.len())?;
        off.iter_mut().zip(&*source).zip(&*weights).for_each(|((off, x), y)| *off = x - y);
        let relative = |lost: f64, all: f64| if all > 0.0 { (lost / all).max(0.0).sqrt() } else { 0.0 };
        coded.rel_l2 = relative(squares(&off), squares(&source));
        if let Some(sums) = &self.sums {
            let mut outputs = arena.alloc::<f32>(Label::Workspace, weights.len())?;
            let mut of = |x: &[f32]| awq::squares(x, &sums[input].products, width, &mut outputs, cpu);
            let (lost, all) = (of(&off), of(&source));
            coded.output_rel_l2 = Some(relative(lost, all));
        }
        Ok(coded)
    }
}

impl Make for Coding<'_, '_> {
    type Matrix = Matrix;
    type Vector = Buffer<f32>;
    type Error = ModelError;

    fn matrix(&mut self, name: String, _: Role, shape: [usize; 2]) -> Result<Matrix, ModelError> {
        let [rows, width] = shape;
        let own = self.found.tensor(&name, &shape)?;
        let mut bytes = self.arena.alloc::<u8>(Label::Weights, 4 * rows * width)?;
        let weights: &mut [f32] = bytemuck::cast_slice_mut(&mut bytes);
        own.widen(0, weights);
        self.scale(&name, weights, width);
        let coded = self.code(&name, own.format(), shape, weights)?;
        self.made.push((name, Made::Coded(coded)));
        Ok(Matrix::held(bytes, shape))
    }

    fn vector(&mut self, name: String, role: Role, width: usize) -> Result<Buffer<f32>, ModelError> {
        let mut vector = self.arena.alloc::<f32>(Label::Weights, width)?;
        self.found.widened(&name, width, &mut vector)?;
        let norms = [("input_layernorm", 0), (self.config.before_mlp(), 2)];
        let norm = norms.iter().find(|(norm, _)| role == Role::Norm && part(&name) == *norm);
        if let Some(factors) = norm.and_then(|(_, input)| self.factors[*input].as_ref()) {
            let shift = self.config.norm_shift();
            vector.iter_mut().zip(factors).for_each(|(x, factor)| *x = (*x + shift) / factor - shift);
        }
        if let Some((first, factors)) = self.divided(&name).filter(|_| role == Role::Bias) {
            vector[first..].iter_mut().zip(factors).for_each(|(x, factor)| *x /= factor);
        }
        self.made.push((name, Made::Vector(vector.to_vec())));
        Ok(vector)
    }
}

/// Names and shapes of a block's matrices.
struct Shapes(Vec<(String, [usize; 2])>);

impl Make for Shapes {
    type Matrix = ();
    type Vector = ();
    type Error = std::convert::Infallible;

    fn matrix(&mut self, name: String, _: Role, shape: [usize; 2]) -> Result<(), Self::Error> {
        self.0.push((name, shape));
        Ok(())
    }

    fn vector(&mut self, _: String, _: Role, _: usize) -> Result<(), Self::Error> {
        Ok(())
    }
}
