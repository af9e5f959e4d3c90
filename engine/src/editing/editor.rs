//! A memory of facts in a model: facts written, replaced and forgotten as text, and questions answered by it.

use super::{EditError, Encoded, Encoder, Fact, Informed, Maps};
use crate::episodic::matrix::Matrix;
use crate::episodic::{EpisodicError, FactMemory, FactShape, Facts, Step};
use crate::memory::{Arena, Label};
use crate::model::PrefixShape;
use crate::named::Named;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

/// The memory that facts of a model go to, where nothing else is said.
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
    held_bytes: u64,
    arena: &'a Arena,
    rng: ChaCha8Rng,
}

impl<'a> Editor<'a> {
    /// A memory's name with its parameters, for these maps: a scope detector without a threshold gets theirs.
    ///
    /// # Errors
    /// When there is no such memory, or a parameter is wrong.
    pub fn memory(text: &str, maps: &Maps) -> Result<String, EditError> {
        let mut named: Named = text.parse().map_err(EpisodicError::from)?;
        if named.text("scope").is_some_and(|scope| scope == "list") && named.text("threshold").is_none() {
            named.set("threshold", &format!("{:.4}", maps.threshold));
        }
        parsed(&named.to_string())?;
        Ok(named.to_string())
    }

    /// An empty memory that lists at most `most_facts` for its scope detector; `memory` is a name that [`Editor::memory`] gave.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn new(
        encoder: &'a Encoder<'a>,
        maps: &'a Maps,
        (memory, most_facts): (&str, usize),
        arena: &'a Arena,
    ) -> Result<Self, EditError> {
        let before = arena.usage().live_bytes;
        let facts = parsed(memory)?.open(&FactShape { width: maps.width(), most_facts }, arena)?;
        let held_bytes = arena.usage().live_bytes - before;
        Ok(Editor { held_bytes, ..Self::with(encoder, maps, facts, arena) })
    }

    /// With a memory that is there.
    pub fn with(encoder: &'a Encoder<'a>, maps: &'a Maps, facts: Facts, arena: &'a Arena) -> Self {
        let shape = PrefixShape::new(&encoder.model.config, maps.tokens);
        Editor { encoder, maps, facts, shape, held_bytes: 0, arena, rng: ChaCha8Rng::seed_from_u64(0) }
    }

    /// The same with other noise.
    #[must_use]
    pub fn seeded(self, seed: u64) -> Self {
        Editor { rng: ChaCha8Rng::seed_from_u64(seed), ..self }
    }

    /// Bytes of a memory with room for a list of `most_facts`.
    ///
    /// # Errors
    /// As [`Editor::memory`].
    pub fn bytes(maps: &Maps, (memory, most_facts): (&str, usize)) -> Result<u64, EditError> {
        Ok(parsed(memory)?.bytes(&FactShape { width: maps.width(), most_facts }).into_values().sum())
    }

    /// Most bytes that such a memory takes from its arena while `most_facts` are written and `most_questions` asked together: what it
    /// holds, the vectors, and scratch space.
    ///
    /// # Errors
    /// As [`Editor::memory`].
    pub fn peak_bytes(
        maps: &Maps,
        (memory, most_facts): (&str, usize),
        most_questions: usize,
    ) -> Result<u64, EditError> {
        let (method, width) = (parsed(memory)?.method, maps.width());
        let written = Matrix::bytes(most_facts, width) + method.workspace_bytes(width, Step::Write(most_facts));
        let asked =
            2 * Matrix::bytes(most_questions, width) + method.workspace_bytes(width, Step::Read(most_questions));
        Ok(Self::bytes(maps, (memory, most_facts))? + written.max(asked))
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
        let shape = self.shape;
        let prefixes = self.read(questions, heeded)?;
        let had: Vec<bool> = prefixes.iter().map(Option::is_some).collect();
        let prefixes: Vec<_> = prefixes.into_iter().map(|prefix| prefix.map(|numbers| (shape, numbers))).collect();
        let prompts = questions.iter().map(|question| self.encoder.prompt(question)).collect::<Result<Vec<_>, _>>()?;
        Ok((self.encoder.answers(&prompts, &prefixes)?, had))
    }

    fn matrix(&self, encoded: &[Encoded]) -> Result<Matrix, EditError> {
        let mut matrix = Matrix::zeros(self.arena, Label::Activations, encoded.len(), self.maps.width())?;
        for (row, encoded) in encoded.iter().enumerate() {
            matrix.row_mut(row).copy_from_slice(&self.maps.encoding(encoded));
        }
        Ok(matrix)
    }
}

impl Informed for Editor<'_> {
    fn write(&mut self, facts: &[Fact]) -> Result<(), EditError> {
        if facts.is_empty() {
            return Ok(());
        }
        let z = self.matrix(&self.encoder.facts(facts)?)?;
        let Editor { facts, rng, encoder, .. } = self;
        Ok(encoder.cpu.install(|| facts.write(&z, &mut || StandardNormal.sample(rng)))?)
    }

    fn forget(&mut self, facts: &[Fact]) -> Result<(), EditError> {
        let z = self.matrix(&self.encoder.facts(facts)?)?;
        Ok((0..z.rows()).try_for_each(|row| self.facts.forget(z.row(row)))?)
    }

    fn answer(&mut self, questions: &[String], scoped: bool) -> Result<Vec<u32>, EditError> {
        Ok(self.answers(questions, scoped)?.0)
    }

    fn has_scope(&self) -> bool {
        self.facts.has_scope()
    }

    fn held_bytes(&self) -> u64 {
        self.held_bytes
    }
}

fn parsed(memory: &str) -> Result<FactMemory, EditError> {
    Ok(FactMemory::parse(memory).map_err(EpisodicError::from)?)
}
