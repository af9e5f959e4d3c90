//! The parameters of a block as they are made: matrices in codes, and what goes with them.

use super::awq;
use super::coded::Coded;
use super::fold::{Factors, Fold, input_of, part, readers};
use super::gptq::Factor;
use super::moments::Moment;
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
    /// Of what is read, in the order of [`INPUTS`](super::moments::INPUTS).
    sums: Option<[Moment; 4]>,
    /// Factors of AWQ.
    fold: Fold<'c>,
    /// What GPTQ made of the last input's sums.
    factor: Option<(usize, Factor)>,
    /// What was made so far, by name.
    pub made: Vec<(String, Made)>,
    cpu: &'c Cpu,
    arena: &'c Arena,
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
        let fold = Fold::new(config, Factors::default());
        Coding { found, config, recipe, sums, fold, factor: None, made: Vec::new(), cpu, arena }
    }

    /// Factors of AWQ, of all inputs that come out of something that can be divided.
    ///
    /// # Errors
    /// When a tensor cannot be read, or the arena has no room.
    pub fn find_factors(&mut self, index: usize) -> Result<(), ModelError> {
        let Some(sums) = self.sums.as_mut().filter(|_| self.recipe.method == Method::Awq) else { return Ok(()) };
        let mut factors = Factors::default();
        for (input, names) in readers(self.config, index) {
            let mut matrices = Vec::new();
            for (name, [rows, width]) in names {
                let mut weights = self.arena.alloc::<f32>(Label::Workspace, rows * width)?;
                self.found.tensor(&name, &[rows, width])?.widen(0, &mut weights);
                matrices.push(weights);
            }
            let matrices: Vec<&[f32]> = matrices.iter().map(|weights| &**weights).collect();
            let (sum, grid) = (&mut sums[input], self.recipe.grid);
            let found = awq::factors(grid, &matrices, &sum.products, &sum.magnitudes(), self.cpu, self.arena)?;
            for (row, factor) in sum.products.chunks_exact_mut(sum.width).zip(&found) {
                row.iter_mut().zip(&found).for_each(|(x, other)| *x /= factor * other);
            }
            factors[input] = Some(found);
        }
        self.fold = Fold::new(self.config, factors);
        Ok(())
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
        self.fold.matrix(&name, 0, weights, width);
        let coded = self.code(&name, own.format(), shape, weights)?;
        self.made.push((name, Made::Coded(coded)));
        Ok(Matrix::held(bytes, shape))
    }

    fn vector(&mut self, name: String, role: Role, width: usize) -> Result<Buffer<f32>, ModelError> {
        let mut vector = self.arena.alloc::<f32>(Label::Weights, width)?;
        self.found.widened(&name, width, &mut vector)?;
        self.fold.vector(&name, role, &mut vector);
        self.made.push((name, Made::Vector(vector.to_vec())));
        Ok(vector)
    }
}
