//! A memory of facts in a model: facts written, replaced and forgotten as text, and questions answered by it.

use super::{EditError, Encoded, Encoder, Fact, Maps};
use crate::episodic::matrix::Matrix;
use crate::episodic::{FactMemory, FactShape, Facts};
use crate::memory::{Arena, Label};
use crate::model::PrefixShape;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

/// The memory that facts of a model go to; the scope detector is added with the maps' own threshold.
pub const MEMORY: &str = "larimar:slots=128,noise=0.05,scope=list";

/// Facts of a model.
pub struct Editor<'a> {
    /// Reads texts.
    pub encoder: &'a Encoder<'a>,
    /// What is trained.
    pub maps: &'a Maps,
    /// The memory.
    pub facts: Facts,
    shape: PrefixShape,
    arena: &'a Arena,
    rng: ChaCha8Rng,
}

impl<'a> Editor<'a> {
    /// The memory's name with its parameters, for these maps.
    pub fn memory(maps: &Maps) -> String {
        format!("{MEMORY},threshold={:.4}", maps.threshold)
    }

    /// An empty memory that lists at most `most_facts` for its scope detector.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn new(
        encoder: &'a Encoder<'a>,
        maps: &'a Maps,
        most_facts: usize,
        arena: &'a Arena,
    ) -> Result<Self, EditError> {
        let memory = FactMemory::parse(&Self::memory(maps)).map_err(crate::episodic::EpisodicError::from)?;
        let facts = memory.open(&FactShape { width: maps.width(), most_facts }, arena)?;
        Ok(Self::with(encoder, maps, facts, arena))
    }

    /// With a memory that is there.
    pub fn with(encoder: &'a Encoder<'a>, maps: &'a Maps, facts: Facts, arena: &'a Arena) -> Self {
        let shape = PrefixShape::new(&encoder.model.config, maps.tokens);
        Editor { encoder, maps, facts, shape, arena, rng: ChaCha8Rng::seed_from_u64(0) }
    }

    /// Bytes of an empty memory with room for a list of `most_facts`.
    ///
    /// # Errors
    /// When the maps' threshold is none of a scope detector.
    pub fn bytes(maps: &Maps, most_facts: usize) -> Result<u64, EditError> {
        let memory = FactMemory::parse(&Self::memory(maps)).map_err(crate::episodic::EpisodicError::from)?;
        Ok(memory.bytes(&FactShape { width: maps.width(), most_facts }).into_values().sum())
    }

    /// The prefix's extents.
    pub fn shape(&self) -> &PrefixShape {
        &self.shape
    }

    /// Reads facts and writes them, one after the other.
    ///
    /// # Errors
    /// When a fact cannot be encoded or the memory does not take it.
    pub fn write(&mut self, facts: &[Fact]) -> Result<(), EditError> {
        let z = self.matrix(&self.encoder.facts(facts)?)?;
        let Editor { facts, rng, encoder, .. } = self;
        Ok(encoder.cpu.install(|| facts.write(&z, &mut || StandardNormal.sample(rng)))?)
    }

    /// Takes facts out, which must be given as they were written.
    ///
    /// # Errors
    /// When one was not written.
    pub fn forget(&mut self, facts: &[Fact]) -> Result<(), EditError> {
        let z = self.matrix(&self.encoder.facts(facts)?)?;
        Ok((0..z.rows()).try_for_each(|row| self.facts.forget(z.row(row)))?)
    }

    /// For each question the prefix that goes before it; `None` where the scope detector says that nothing of the kind was
    /// written, unless it is not `heeded`.
    ///
    /// # Errors
    /// When a question cannot be encoded, or the memory cannot be read.
    pub fn read(&mut self, questions: &[String], heeded: bool) -> Result<Vec<Option<Vec<f32>>>, EditError> {
        let cues = self.matrix(&self.encoder.questions(questions)?)?;
        let mut read = Matrix::zeros(self.arena, Label::Activations, cues.rows(), cues.columns())?;
        let Editor { facts, rng, encoder, maps, .. } = self;
        encoder.cpu.install(|| {
            // A memory may go to another thread, but not be seen by two.
            let facts = &mut *facts;
            facts.read(&cues, &mut || StandardNormal.sample(rng), &mut read)
        })?;
        let prefix = |row: usize| {
            let answers = facts.answers(facts.distance(cues.row(row), read.row(row)));
            (answers || !heeded).then(|| maps.prefix(read.row(row)))
        };
        Ok((0..cues.rows()).map(prefix).collect())
    }

    /// The likeliest next token behind each question, and which of them the memory had a prefix for.
    ///
    /// # Errors
    /// As [`Editor::read`].
    pub fn answers(&mut self, questions: &[String], heeded: bool) -> Result<(Vec<u32>, Vec<bool>), EditError> {
        let prefixes = self.read(questions, heeded)?;
        let prompts = questions.iter().map(|question| self.encoder.prompt(question)).collect::<Result<Vec<_>, _>>()?;
        let (tokens, _) = self.encoder.answers(&prompts, &prefixes, &self.shape)?;
        Ok((tokens, prefixes.iter().map(Option::is_some).collect()))
    }

    fn matrix(&self, encoded: &[Encoded]) -> Result<Matrix, EditError> {
        let mut matrix = Matrix::zeros(self.arena, Label::Activations, encoded.len(), self.maps.width())?;
        for (row, encoded) in encoded.iter().enumerate() {
            matrix.row_mut(row).copy_from_slice(&self.maps.encoding(encoded));
        }
        Ok(matrix)
    }
}
